"""The forward Laplacian's kernels, compiled without a GPU: they fit shared memory, spill little, and serve every size."""

from __future__ import annotations

import pytest

from tests.compile.ahead_of_time import check, compiled, report_of, script

ARCHITECTURES = (75, 80, 90, 100)


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans import laplacian
    from flashsci.call.laplacian_tensors import LaplacianTensors

    for dim in (16, 32, 64, 128):
        for keys in (42, 300):
            q, k = torch.zeros(2, 4, 42, dim), torch.zeros(2, 4, keys, dim)
            jacobians = [torch.zeros(6, *x.shape) for x in (q, k, k)]
            laplacian.compute(LaplacianTensors(q, k, k, *jacobians, q, k, k), 0.1)
            for entry, _ in compiled(launched, architecture, f"{dim} {keys}"):
                yield entry


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture)
    assert len(found) == 4 * (1 + 3)
    check(found, architecture)


if __name__ == "__main__":
    script(report)
