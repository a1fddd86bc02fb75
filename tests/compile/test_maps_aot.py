"""The kernels of attention maps, compiled without a GPU: they fit shared memory, spill little, and serve every size."""

from __future__ import annotations

import itertools

import pytest

from tests.compile.ahead_of_time import PARTS, check, compiled, report_of, script

ARCHITECTURES = (75, 80, 90, 100)


DTYPES = {75: ("float16", "float32")}  # sm_75 has no bfloat16
TOPS = 8, 64
MOST_STACK = {16: 8, 32: 128}  # bytes of a thread that may spill, by the bits of q: the most is of fp32 with D 256
MOST_OF_TURING = 40  # in 16 bits
MOST_OF_BLACKWELL = 304  # in fp32: the 64 largest of a row at D 128
FEATURES = ("", "bias", "causal", "packed")


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans import maps
    from flashsci.call.map_ops import MapCall
    from flashsci.call.ops import Scalars, Tensors

    dtypes = [getattr(torch, name) for name in DTYPES.get(architecture, ("bfloat16", "float32"))]
    for dtype, dim, feature in itertools.product(dtypes, (32, 64, 128, 256), FEATURES):
        lead = () if feature == "packed" else (2,)
        q, k = torch.zeros(*lead, 4, 300, dim, dtype=dtype), torch.zeros(*lead, 2, 500, dim, dtype=dtype)
        edges = torch.zeros(3, dtype=torch.int32) if feature == "packed" else None
        bias = torch.zeros(2, 4, 300, 500, dtype=dtype) if feature == "bias" else None
        scalars = Scalars(-1, -1, 0.1, 0.0, -1, 0 if feature == "causal" else -1, False, 0.0, "default", False)
        tensors = Tensors(q, k, k, bias, cu_seqlens_q=edges, cu_seqlens_k=edges)
        for wanted, top in (((True, True, True), TOPS[0]), ((False, False, False), TOPS[1])):
            maps.statistics(MapCall.of(tensors, torch.zeros(*lead, 4, 300), scalars, wanted, top))
        for entry, _ in compiled(launched, architecture, f"{dtype} {dim} {feature}"):
            yield entry


@pytest.mark.slow
@pytest.mark.every(12)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture, part):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture, part)
    assert len(found) == 4 * 2 * 4 * 4
    found = check(found, architecture)
    spilled = {entry["call"]: entry["stack"] for entry in found if entry["stack"]}
    limits = MOST_STACK | {75: {16: MOST_OF_TURING}, 100: {32: MOST_OF_BLACKWELL}}.get(architecture, {})
    assert all(most <= limits[32 if "float32" in call else 16] for call, most in spilled.items()), spilled


if __name__ == "__main__":
    script(report)
