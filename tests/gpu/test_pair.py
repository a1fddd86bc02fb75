"""Attention with a bias whose heads lie side by side (csrc/sm90/pair), in sizes and layouts of models, with their padding and masks
written as numbers: against fp64, and many times over, for its copies and clusters are what nothing but a GPU can time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashsci.backends import cuda
from flashsci.call.ops import Scalars, Tensors
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs
from flashsci.testing.evaluation import check_alone

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def case(
    dtype="float32",
    dims=(24, 24),
    lead=(1,),
    heads=16,
    sq=384,
    sk=384,
    mask=False,
    seed=0,
    bias_float=True,
    **options,
):
    wide = bias_float and dtype != "float32"
    variant = Variant(dtype, *dims, bias="pair", bias_float=wide, bias_grad=True, mask=mask)
    full = (*lead, heads, sq, sk)
    defaults = {"bias_view": "linear", "layout": "bshd", "bias_shape": full}
    if mask:
        defaults |= {"mask_shape": (*lead, 1, 1, sk), "mask_kind": "keys"}
    return Case(variant, seed, len(full), lead, heads, seq_q=sq, seq_k=sk, **{**defaults, **options})


TAKEN = {
    "tokens of Boltz": case(mask=True),
    "one block": case(sq=16, sk=9, heads=8),
    "blocks that end within a box": case(lead=(3,), heads=8, sq=130, sk=77, mask=True, seed=1),
    "more clusters than multiprocessors": case(lead=(70,), heads=8, sq=70, sk=40, dims=(32, 16), seed=2),
    "two leading dims": case(lead=(2, 3), heads=8, sq=100, sk=65, dims=(8, 32), mask=True, seed=3),
    "768 tokens": case(sq=768, sk=768, seed=4),
    "-1e9": case(bias_number="-1e9", bias_number_at="rows", seed=5),
    "-inf, tiny gradients, zero rows": case(bias_holes=True, padding="tail_masked", mask=True, dout_scale=1e-9, seed=6),
    "lowest numbers": case(bias_number="float32_min", bias_number_at="last", sq=100, sk=130, seed=7),
}
# In 16 bits heads of 24 or 32 dims; gradients of 1e-9 are zero in fp16.
NARROW = {
    f"{name}, {dtype}": replace(
        x,
        variant=replace(
            x.variant,
            dtype=dtype,
            head_dim=max(x.variant.head_dim, x.variant.head_dim_v),
            head_dim_v=max(x.variant.head_dim, x.variant.head_dim_v),
            bias_float=True,
        ),
        dout_scale=1.0 if dtype == "float16" else x.dout_scale,
    )
    for dtype in ("bfloat16", "float16")
    for name, x in TAKEN.items()
}
TAKEN |= NARROW
COPIED = {
    "bf16, bias in 16 bits": case("bfloat16", heads=8, sq=100, sk=70, mask=True, bias_float=False),
    "bf16, heads apart": case("bfloat16", heads=8, sq=100, sk=70, layout="bhsd"),
    "bf16, head dim 16": case("bfloat16", heads=8, sq=100, sk=70, dims=(16, 16)),
    "bf16, other values": case("bfloat16", heads=8, sq=100, sk=70, dims=(24, 32)),
    "four heads": case(heads=4, sq=32, sk=128, dims=(32, 32), mask=True),
    "three heads": case(heads=3, sq=40, sk=50),
    "causal": case(heads=8, sq=100, sk=100, causal=True),
    "a bias for all batches": case(lead=(3,), heads=8, sq=64, sk=70, bias_shape=(1, 8, 64, 70)),
    "head dim 40": case(heads=8, sq=64, sk=70, dims=(40, 40)),
    "head dim 18": case(heads=8, sq=64, sk=70, dims=(18, 18)),
    "rows off 16 bytes": case(heads=8, sq=64, sk=70, layout="shifted"),
    "a mask of pairs": case(heads=8, sq=64, sk=70, mask=True, mask_shape=(1, 1, 64, 70), mask_kind="random"),
}


def takes(x, needs_grad: bool) -> bool:
    left, right = (-1, 0) if x.options.get("causal") else (-1, -1)
    scalars = Scalars(-1, -1, 1.0, 0.0, left, right, False, 0.0, "default", False)
    return cuda.takes_bias(Tensors(x.q, x.k, x.v, x.bias, None, x.mask), scalars, needs_grad)


@pytest.mark.parametrize("name", TAKEN)
def test_against_fp64(name):
    x = make_inputs(TAKEN[name], DEVICE)
    assert takes(x, needs_grad=True)
    judge = Judge(x)
    first = evaluate(x, "cuda:own")
    judge.require(first)
    check_alone(x, "cuda:own", first)
    for _ in range(20):
        again = evaluate(x, "cuda:own")
        assert all(torch.equal(y, again[n]) for n, y in first.items())


@pytest.mark.parametrize("name", COPIED)
def test_what_the_kernels_refuse_gets_a_copy(name):
    x = make_inputs(COPIED[name], DEVICE)
    assert not takes(x, needs_grad=False) and not takes(x, needs_grad=True)
    Judge(x).require(evaluate(x, "cuda"))


def test_a_gradient_of_out_whose_heads_lie_apart_gets_a_copy_of_the_bias():
    """Which the kernels of 16 bits learn in the backward only."""
    x = make_inputs(TAKEN["one block, bfloat16"], DEVICE)
    first = evaluate(x, "cuda:own")
    again = evaluate(replace(x, dout=x.dout.contiguous()), "cuda:own")
    assert torch.equal(first["out"], again["out"])
    Judge(x).require(again)


@pytest.mark.parametrize("name", ["tokens of Boltz", "tokens of Boltz, bfloat16"])
def test_the_gradient_lies_in_memory_as_the_bias(name):
    """Which the Linear's backward reads without a copy."""
    x = make_inputs(TAKEN[name], DEVICE)
    bias = x.bias.detach().requires_grad_()
    from flashsci import attention

    out = attention(x.q, x.k, x.v, bias=bias, mask=x.mask, backend="cuda")
    (gradient,) = torch.autograd.grad(out, bias, x.dout)
    assert gradient.stride() == bias.stride()
