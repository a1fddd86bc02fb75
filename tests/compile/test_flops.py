"""FlopCounterMode over every kind of call: what torch counts of SDPA on equal shapes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flashsci
from tests.support.everywhere import BACKENDS, DEVICE

pytestmark = pytest.mark.usefixtures("loaded")
FUSED = [b for b in BACKENDS if b not in ("reference", "sdpa")]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def draw(*shape, grad=True):
    return torch.randn(shape, device=DEVICE).to(HALF).requires_grad_(grad)


def counted(call, *inputs):
    """Of the forward and of the backward."""
    with FlopCounterMode(display=False) as counter:
        found = call(*inputs)
        out = found[0] if isinstance(found, tuple) else found
        forward = counter.get_total_flops()
        if out.requires_grad:
            out.float().sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("backend", FUSED)
def test_dense_calls_count_as_sdpa(backend):
    q, k, v = draw(2, 4, 8, 16), draw(2, 4, 12, 16), draw(2, 4, 12, 32)
    shapes = q.shape, k.shape, v.shape
    out = (2, 4, 8, 32)
    due = sdpa_flop_count(*shapes), sdpa_backward_flop_count(out, *shapes)
    for _ in range(3):
        flashsci.attention(q, k, v, backend=backend).float().sum().backward()
        assert counted(lambda *x: flashsci.attention(*x, backend=backend), q, k, v) == due


def test_residual_calls_count_as_sdpa():
    q, k, v = draw(2, 4, 8, 16), draw(2, 4, 12, 16), draw(2, 4, 12, 16)
    due = sdpa_flop_count(q.shape, k.shape, v.shape), sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)
    assert counted(lambda *x: flashsci.residual_attention(*x, backend="triton"), q, k, v) == due


@pytest.mark.parametrize("backend", ["reference", *FUSED])
def test_packed_calls_count_their_sequences(backend):
    q, k, v = draw(7, 4, 16), draw(7, 2, 16), draw(7, 2, 16)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE)
    pairs = 4 * (3 * 3 + 4 * 4)
    call = lambda *x: flashsci.varlen_attention(*x, offsets, backend=backend)  # noqa: E731
    assert counted(call, q, k, v) == (2 * pairs * 2 * 16, 2 * pairs * 5 * 16)


def test_paged_calls_count_what_is_used():
    q = draw(2, 4, 16, grad=False)
    cache = draw(3, 8, 2, 16, grad=False)
    table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=DEVICE)
    used = torch.tensor([9, 5], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)

    def call(backend):
        return flashsci.paged_attention(
            q, cache, cache, block_table=table, seqused_k=used, cu_seqlens_q=offsets, backend=backend
        )

    for backend in ("reference", "triton"):
        call(backend)
        for _ in range(2):
            assert counted(lambda b=backend: call(b))[0] == 2 * 4 * (9 + 5) * 2 * 16


def test_the_second_order_is_counted():
    q, k, v = draw(1, 2, 8, 16), draw(1, 2, 8, 16), draw(1, 2, 8, 16)
    with FlopCounterMode(display=False) as counter:
        out = flashsci.attention(q, k, v, backend="triton")
        (force,) = torch.autograd.grad(out.float().sin().sum(), q, create_graph=True)
        first = counter.get_total_flops()
        force.float().square().sum().backward()
    pairs = 2 * 8 * 8
    assert counter.get_total_flops() - first == 2 * pairs * 12 * 16 + 2 * pairs * 5 * 16
