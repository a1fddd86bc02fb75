"""The forward Laplacian's kernels, compiled without a GPU: they fit shared memory, spill little, and serve every size."""

from __future__ import annotations

import pytest

from tests.compile.ahead_of_time import check, compiled, report_of, script

ARCHITECTURES = (75, 80, 90, 100)
# Head dims (25: rows that are not aligned), with lengths of small tiles and of large ones.
CALLS = [(dim, length, "float32") for dim in (16, 25, 32, 64, 128) for length in (42, 512)]
CALLS += [(dim, 512, "float16") for dim in (64, 128)]
MOST_SPILLED = 64  # bytes of a thread


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans import laplacian
    from flashsci.call.laplacian_tensors import LaplacianTensors

    for dim, length, dtype in CALLS:
        x = torch.zeros(2, 4, length, dim, dtype=getattr(torch, dtype))
        jacobian = torch.zeros(3, *x.shape, dtype=x.dtype)
        laplacian.compute(LaplacianTensors(x, x, x, *[jacobian] * 3, x, x, x), 0.1)
        for entry, _ in compiled(launched, architecture, f"{dtype} {dim} {length}"):
            yield entry


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture)
    assert len(found) == 3 * len(CALLS)
    check(found, architecture)
    if architecture >= 80:  # without tensor cores the products spill
        spilled = {f"{e['call']} {e['kernel']}": e["stack"] for e in found if e["stack"] > MOST_SPILLED}
        assert not spilled


if __name__ == "__main__":
    script(report)
