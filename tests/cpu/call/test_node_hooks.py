"""The hooks that give a node of SDPA's kernels a second derivative, around the node of its kernel for the CPU, against fp64 formulas."""

import gc
import weakref

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashsci.call import second_order
from flashsci.call.ops import Scalars

CAUSAL = Scalars(-1, -1, 8**-0.5, 0.0, -1, 0, False, 0.0, "default", False)


def attention(q, k, v):
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    hooks = second_order.NodeHooks(CAUSAL, out)
    out.grad_fn.register_prehook(hooks.before)
    out.grad_fn.register_hook(hooks.after)
    return out


def formula(q, k, v):
    scores = q @ k.mT * 8**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def made(wanted="qkv"):
    generator = torch.Generator().manual_seed(3)
    shape = 2, 3, 5, 8
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(n in wanted) for n in "qkv"}


def equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("wanted", ("qkv", "k", "qv", "v"))
@pytest.mark.parametrize("leaf", (False, True))
def test_first_and_second_derivatives(wanted, leaf):
    found = []
    for function in (attention, formula):
        x = made(wanted)
        inputs = [x[n] for n in wanted]
        rows = [y if leaf else y * 1 for y in x.values()]
        plain = torch.autograd.grad(function(*rows).sum(), inputs)  # of a dout that is expanded
        rows = [y if leaf else y * 1 for y in x.values()]
        first = torch.autograd.grad(function(*rows).square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        found.append((*plain, *first, *second))
    equal(*found)


def test_one_tensor_three_times():
    found = []
    for function in (attention, formula):
        x = made()["q"]
        (first,) = torch.autograd.grad(function(x, x, x).square().sum(), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), x)))
    equal(*found)


def test_batched_cotangents():
    found = []
    cotangents = torch.randn(4, 2, 3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for function in (attention, formula):
        x = made()
        out = function(*x.values())
        found.append(torch.autograd.grad(out, list(x.values()), cotangents, is_grads_batched=True))
    equal(*found)


@pytest.mark.parametrize("recorded", (False, True))
def test_a_freed_graph_stays_freed(recorded):
    x = made()
    out = attention(*x.values())
    for _ in range(2):
        torch.autograd.grad(out.sum(), list(x.values()), retain_graph=True, create_graph=recorded)
    torch.autograd.grad(out.sum(), list(x.values()))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), list(x.values()), create_graph=recorded)


def test_no_tensor_outlives_the_graph():
    gc.disable()
    try:
        rows = [x * 1 for x in made().values()]
        kept = [weakref.ref(x) for x in rows]
        out = attention(*rows)
        del rows, out
        assert all(x() is None for x in kept)
    finally:
        gc.enable()
