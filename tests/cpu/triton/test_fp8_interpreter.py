"""The Triton kernel on 8-bit floats in interpreter mode: named cases, generated ones, and what must not depend on what."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.testing import (
    FP8Case,
    FP8Inputs,
    FP8Variant,
    fp8_cases,
    judge_fp8,
    make_fp8_inputs,
    poisoned_memory,
)

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("triton")

E4M3 = torch.float8_e4m3fn
DIMS = dict(head_dim=32, head_dim_v=32)
LONG = dict(lens_q=(70,), lens_k=(150,), heads_k=2, group=2, seed=4)
PACKED = dict(lens_q=(40, 0, 9, 70), lens_k=(70, 5, 0, 40), heads_k=2, group=3, seed=5)
BLOCKS = dict(scales=("64", "64", "128"))
NAMED = {
    "one scale each": FP8Case(FP8Variant(**DIMS), **LONG),
    "none": FP8Case(FP8Variant("float16", **DIMS), **LONG, scales=("none",) * 3),
    "heads": FP8Case(FP8Variant(**DIMS), **LONG, scales=("head",) * 3, batch=(2,)),
    "blocks": FP8Case(FP8Variant(**DIMS), **LONG, **BLOCKS, batch=(2, 2)),
    "blocks, of 64": FP8Case(FP8Variant(**DIMS), **LONG, scales=("128", "128", "64"), layout="rows"),
    "d64": FP8Case(FP8Variant("float16"), **LONG, **BLOCKS),
    "two chunks": FP8Case(FP8Variant("bfloat16", 96, 48), **LONG, **BLOCKS),
    "d192": FP8Case(FP8Variant("bfloat16", 192, 128, "causal"), **LONG, **BLOCKS, layout="joint"),
    "d256": FP8Case(FP8Variant("bfloat16", 256, 256), **LONG, **BLOCKS),
    "narrow, unaligned": FP8Case(FP8Variant("bfloat16", 24, 8), **LONG, **BLOCKS, layout="unaligned"),
    "causal": FP8Case(FP8Variant(window="causal", **DIMS), **LONG, **BLOCKS),
    "causal, lower right": FP8Case(FP8Variant(window="causal", **DIMS), **LONG, **BLOCKS, align="lower_right"),
    "more queries than keys": FP8Case(FP8Variant(window="causal", **DIMS), lens_q=(90,), lens_k=(50,), align="lower_right"),
    "window": FP8Case(FP8Variant(window="left", **DIMS), **LONG, **BLOCKS, left=7, align="lower_right"),
    "window both": FP8Case(FP8Variant(window="both", **DIMS), **LONG, **BLOCKS, left=40, right=2),
    "softcap, large scores": FP8Case(FP8Variant(softcap=True, **DIMS), **LONG, **BLOCKS, sharp=8.0),
    "large scores": FP8Case(FP8Variant(**DIMS), **LONG, **BLOCKS, sharp=30.0),
    "packed": FP8Case(FP8Variant(packed=True, **DIMS), **PACKED, scales=("head", "64", "64")),
    "packed, causal": FP8Case(FP8Variant(window="causal", packed=True, **DIMS), **PACKED, scales=("128", "head", "one"), layout="joint"),
    "packed, lower right": FP8Case(FP8Variant(window="left", packed=True, **DIMS), **PACKED, **BLOCKS, align="lower_right", layout="rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named(name, poison):
    judge_fp8(NAMED[name], "triton")


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(fp8_cases(longest=130))
def test_generated(case):
    with poisoned_memory():
        judge_fp8(case, "triton")


def test_a_flat_tail_beside_one_large_score():
    """P of 3e-4 beside 1, four hundred times: without its factor e4m3 would hold none of them."""
    k = torch.zeros(1, 400, 64)
    k[:, 5] = 1
    q, v = torch.ones(1, 3, 64), torch.randn(1, 400, 64) + 1
    inputs = FP8Inputs(*(x.to(E4M3) for x in (q, k, v)), {"out_dtype": torch.bfloat16})
    found = inputs.evaluate("triton")
    inputs.judge().require(found)
    assert found["out"].float().mean() > 0.5


def test_the_error_does_not_grow_with_the_keys():
    """Of out, beside its own size, which shrinks with the keys; P v in tiles of 32 and scales of 64."""
    errors = []
    for keys in (64, 512, 4096):
        q, k, v = torch.randn(1, 32, 32), *torch.randn(2, 1, keys, 32)
        given, scales = [], {}
        for name, x in zip("qkv", (q, k, v), strict=True):
            found = flashsci.quantize(x, block=64)
            given.append(found.values)
            scales[f"{name}_scale"] = found.scale
        out = flashsci.attention(*given, **scales, out_dtype=torch.float16, backend="triton")
        exact = flashsci.attention(*(x.double() for x in (q, k, v)), backend="reference")
        errors.append(((out - exact).norm() / exact.norm()).item())
    assert max(errors) < 1.5 * min(errors) and max(errors) < 0.08, errors


def test_nan_stays_in_its_row():
    """A row of q that is NaN, as quantize leaves it; others are what they would be."""
    case = NAMED["blocks"]
    inputs = make_fp8_inputs(case)
    right = inputs.evaluate("triton")
    inputs.q[..., 7, :] = torch.nan
    found = inputs.evaluate("triton")
    rows = torch.arange(70) != 7
    assert found["out"][..., 7, :].isnan().all() and found["lse"][..., 7].isnan().all()
    for name, x in right.items():
        dim = -2 if name == "out" else -1
        kept = rows.nonzero().flatten()
        assert torch.equal(found[name].index_select(dim, kept), x.index_select(dim, kept))


def test_wrong_edges_stay_inside(poison):
    """Contents that are wrong give some rows, whatever they are: poison around every tensor would show what was read there."""
    from flashsci.call.fp8_ops import FP8Scalars

    inputs = make_fp8_inputs(NAMED["packed"])
    tensors = [x.transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v)]
    scales = [inputs.options[f"{n}_scale"] for n in "qkv"]
    scalars = FP8Scalars(-1, -1, 0.2, 0.0, -1, 0, True, torch.bfloat16, True, False)
    huge = torch.iinfo(torch.int32).max
    for edges in ([-5, huge, 2, 7, 9], [4, 1, 3, 90, 100], [0, huge, huge, -huge, huge]):
        of_both = torch.tensor(edges, dtype=torch.int32)
        out, lse = torch.ops.flashsci.triton_fp8_attention.default(*tensors, *scales, of_both, of_both, *scalars)
        assert out.isfinite().all() and not lse.isnan().any(), edges


def test_nothing_to_do():
    q, none = (torch.zeros(2, n, 64).to(E4M3) for n in (5, 0))
    out, lse = flashsci.attention(q, none, none, return_lse=True, backend="triton")
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert flashsci.attention(none, q, q, backend="triton").shape == (2, 0, 64)


def test_op_passes_opcheck():
    inputs = make_fp8_inputs(NAMED["d64"])
    scales = [inputs.options[f"{n}_scale"] for n in "qkv"]
    scalars = (-1, -1, 0.1, 0.0, -1, 0, True, torch.float16, False, True)
    arguments = (inputs.q, inputs.k, inputs.v, *scales, None, None, *scalars)
    op = torch.ops.flashsci.triton_fp8_attention.default
    torch.library.opcheck(op, arguments, test_utils=("test_faketensor",))


def test_older_devices_are_refused():
    from flashsci import cli

    for capability, served in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        reason = cli.support(capability, hypothetical=True)["float8_e4m3fn forward"]["triton"]
        assert (reason is None) == served
    assert "sm_80 has no instructions for 8-bit floats" in str(
        cli.support((8, 0), hypothetical=True)["float8_e4m3fn forward"]["triton"]
    )
