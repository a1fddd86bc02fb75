"""The kernels of attention maps, compiled without a GPU: they fit shared memory, spill little, and serve every size."""

from __future__ import annotations

import itertools

import pytest

from tests.compile.ahead_of_time import check, compiled, report_of, script

ARCHITECTURES = (80, 90)


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans import maps
    from flashsci.call.ops import Scalars, Tensors

    for dtype, dim, feature in itertools.product(
        (torch.bfloat16, torch.float32), (32, 64, 128, 256), ("", "bias", "causal")
    ):
        q, k = torch.zeros(2, 4, 300, dim, dtype=dtype), torch.zeros(2, 2, 500, dim, dtype=dtype)
        bias = torch.zeros(4, 300, 500, dtype=dtype) if feature == "bias" else None
        scalars = Scalars(-1, -1, 0.1, 0.0, -1, 0 if feature == "causal" else -1, False, 0.0, "default", False)
        maps.statistics(Tensors(q, k, k, bias), torch.zeros(2, 4, 300), scalars, True, True, True)
        for entry, _ in compiled(launched, architecture, f"{dtype} {dim} {feature}"):
            yield entry


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture)
    assert len(found) == 2 * 2 * 4 * 3
    check(found, architecture)


if __name__ == "__main__":
    script(report)
