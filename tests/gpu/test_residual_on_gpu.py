"""Residual attention on a GPU: model sizes, the same bits every time, graphs, compiled steps, indices beyond 32 bits, memory.
Generated cases are of `python -m flashsci check --residual`."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.testing import (
    Judge,
    ResidualCase,
    Variant,
    evaluate,
    make_inputs,
    poisoned_memory,
)
from flashsci.testing.evaluation import check_alone
from flashsci.testing.traps_execution import repeat_bitwise, replay_other_values

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float32")


def unimol(dtype, atoms=256, batch=2, **more):
    """Views of one projection, 64 heads of 8 channels, padding."""
    return ResidualCase(
        Variant(dtype, 8, 8, bias="pair", bias_grad=True), lead=(batch,), heads_k=64, seq_q=atoms, seq_k=atoms, seed=5,
        bias_shape=(batch, 64, atoms, atoms), layout="joint", padding="tail", dout_scale=1e-3, **more,
    )  # fmt: skip


def judge(case):
    inputs = make_inputs(case, "cuda")
    with poisoned_memory():
        found = evaluate(inputs, "triton")
    check_alone(inputs, "triton", found)
    Judge(inputs).require(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("atoms", [64, 66, 256, 258])
def test_unimol(dtype, atoms):
    judge(unimol(dtype, atoms, bias_number="float32_min", bias_number_at="padding"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits(dtype):
    repeat_bitwise([unimol(dtype)], "triton", torch.device("cuda"), 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_of_other_values(dtype):
    replay_other_values(unimol(dtype, 66), "triton", torch.device("cuda"))


def layers(x, pair):
    scores = pair
    for i in range(2):
        q, k, v = x, (x + i).sin(), x.cos()
        out, scores = flashsci.residual_attention(q, k, v, scores, backend="triton")
        x = x + out
    return x, scores


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_step(dtype):
    kind = getattr(torch, dtype)
    x = torch.randn(2, 8, 100, 16, device="cuda", dtype=kind)
    pair = torch.randn(2, 8, 100, 100, device="cuda", dtype=kind)

    def run(function):
        given = x.clone().requires_grad_(), pair.clone().requires_grad_()
        out, scores = function(*given)
        loss = out.float().square().mean() + scores.float().square().mean()
        return out, scores, *torch.autograd.grad(loss, given)

    compiled = torch.compile(layers, fullgraph=True)
    tolerance = 0.03 if kind == torch.bfloat16 else 1e-4
    for found, true in zip(run(compiled), run(layers), strict=True):
        error = (found.double() - true.double()).norm() / true.double().norm()
        assert error < tolerance, error


def test_more_scores_than_32_bits_count():
    """The last head of 2.2e9 scores, alone and among all."""
    heads, s = 34, 8100
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("takes 25 GB")
    q, k, v = (torch.randn(1, heads, s, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(1, heads, s, s, device="cuda", dtype=torch.bfloat16)

    def run(*given):
        given = [x.requires_grad_() for x in given]
        out, scores = flashsci.residual_attention(*given, backend="triton")
        return (
            out,
            scores,
            *torch.autograd.grad((out, scores), given, (out.detach(), scores.detach())),
        )

    whole = run(q, k, v, bias)
    last = run(*(x.detach()[:, -1:].clone() for x in (q, k, v, bias)))
    for a, b in zip(whole, last, strict=True):
        assert torch.equal(a[:, -1:], b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory(dtype):
    """A layer keeps its scores and nothing of their size besides; its backward makes one tensor more."""
    kind = getattr(torch, dtype)
    q, k, v = (torch.randn(8, 16, 512, 16, device="cuda", dtype=kind).requires_grad_() for _ in range(3))
    bias = torch.randn(8, 16, 512, 512, device="cuda", dtype=kind).requires_grad_()
    size = bias.numel() * bias.element_size()
    for _ in range(2):  # the first one compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out, scores = flashsci.residual_attention(q, k, v, bias, backend="triton")
        held = torch.cuda.memory_allocated() - before
        dscores = torch.randn_like(scores)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad((out, scores), (q, k, v, bias), (out.detach(), dscores))
        peak = torch.cuda.max_memory_allocated() - before
        del out, scores, dscores
    assert held < 1.2 * size and peak < 1.3 * size, (held / size, peak / size)
