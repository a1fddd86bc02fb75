"""The kernels of a gate of pairs, compiled without a GPU: they fit shared memory, spill little, and serve every size."""

from __future__ import annotations

import functools
import itertools

import pytest

from tests.compile.ahead_of_time import PARTS, check, compiled, report_of, script

ARCHITECTURES = (80, 90)
KERNELS = {
    "gated_forward_kernel", "gated_dq_kernel", "gated_dkdv_kernel", "pair_sums_kernel", "delta_kernel", "gated_jvp_kernel",
    "gated_double_backward_queries_kernel", "gated_double_backward_keys_kernel", "second_order_pair_sums_kernel",
    "product_kernel", "gated_wide_forward_kernel", "gated_wide_backward_kernel", "gated_wide_double_backward_kernel",
}  # fmt: skip


def calls():
    """(dtype, head dims, lengths, feature, whether to the second order)."""
    for dtype, dim in itertools.product(("bfloat16", "float32"), (32, 64, 128)):
        yield dtype, (dim, dim), (200, 300), "", True
        yield dtype, (dim, dim), (200, 300), "bias", dim == 64
        yield dtype, (dim, dim), (200, 300), "causal, dropout", False
    yield "bfloat16", (64, 64), (30, 200), "", True
    yield "bfloat16", (128, 128), (150, 30), "", True
    yield "bfloat16", (129, 384), (200, 300), "", False
    yield "float32", (129, 384), (120, 130), "", True
    yield "float32", (129, 384), (600, 600), "", False


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans import gated, gated_second_order
    from flashsci.call.gate_ops import GatedTangents
    from flashsci.call.ops import Saved, Scalars, Tensors

    for name, (dim, dim_v), (queries, keys), feature, further in calls():
        draw = functools.partial(torch.zeros, dtype=getattr(torch, name))
        q, k, v = draw(2, 4, queries, dim), draw(2, 2, keys, dim), draw(2, 2, keys, dim_v)
        bias = draw(1, 4, queries, keys) if feature == "bias" else None
        rest = (0, False, 0.1) if feature == "causal, dropout" else (-1, False, 0.0)
        scalars = Scalars(-1, -1, 0.1, 0.0, -1, *rest, "default", False)
        seed = torch.zeros(2, dtype=torch.int64) if feature == "causal, dropout" else None
        tensors = Tensors(q, k, v, bias, dropout_seed=seed)
        out, lse = draw(2, 4, queries, dim_v), torch.zeros(2, 4, queries)
        gate = draw(2 if feature else 1, 4, queries, keys)  # with a number for each score, or shared
        saved, along = Saved(tensors, out, lse, scalars), GatedTangents(q, k, v, bias, None, gate)
        gated.forward(tensors, gate, scalars)
        gated.backward(out, None, saved, gate, 63)
        if further:
            gated_second_order.jvp(along, saved, gate)
            gated_second_order.double_backward(along, out, None, saved, gate, 255)
        for entry, ptx in compiled(launched, architecture, f"{name} {dim}/{dim_v} {queries} x {keys} {feature}"):
            yield entry | {"both": "wgmma" in ptx and "mma.sync" in ptx}


@pytest.mark.slow
@pytest.mark.every(6)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture, part):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture, part)
    assert {entry["kernel"] for entry in found} == KERNELS
    found = check(found, architecture)
    # Of a tile that is loaded ahead and read by both, Triton 3.6 overwrites what wgmma still reads.
    mixed = [entry for entry in found if entry["both"] and entry["stages"] > 1]
    assert not mixed, mixed


if __name__ == "__main__":
    script(report)
