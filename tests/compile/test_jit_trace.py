"""torch.jit.trace: a traced module computes other values, other lengths and other offsets, with gradients."""

from __future__ import annotations

import io

import pytest
import torch

import flashsci
from tests.support.everywhere import BACKENDS, DEVICE

pytestmark = [
    pytest.mark.every(4),
    pytest.mark.usefixtures("loaded"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
every = pytest.mark.parametrize("backend", ["auto", *BACKENDS])
A = flashsci.attention


def draw(*shape):
    return torch.randn(shape, device=DEVICE)


def rows(n, heads_k=2):
    return draw(1, 4, n, 16), draw(1, heads_k, n, 16), draw(1, heads_k, n, 16)


def packed(*edges):
    total = edges[-1]
    offsets = torch.tensor(edges, dtype=torch.int32, device=DEVICE)
    return draw(total, 2, 16), draw(total, 2, 16), draw(total, 2, 16), offsets


# What is called, inputs it is traced with, inputs it is run with.
DENSE = {
    "causal": (lambda b, q, k, v: A(q, k, v, causal=True, backend=b), lambda: rows(8), lambda: rows(11)),
    "ranks apart": (
        lambda b, q, k, v: A(q, k, v, backend=b),
        lambda: (draw(3, 2, 4, 16), draw(1, 2, 4, 16), draw(2, 4, 16)),
        lambda: (draw(5, 2, 4, 16), draw(1, 2, 4, 16), draw(2, 4, 16)),
    ),
    "bias": (
        lambda b, q, k, v, m: A(q, k, v, bias=m, backend=b),
        lambda: (*rows(8), draw(8, 8)),
        lambda: (*rows(9), draw(9, 9)),
    ),
    "bias with inner heads": (
        lambda b, q, k, v, m: A(q, k, v, bias=m.permute(0, 3, 1, 2), backend=b),
        lambda: (*rows(8), draw(1, 8, 8, 4)),
        lambda: (*rows(9), draw(1, 9, 9, 4)),
    ),
    "mask": (
        lambda b, q, k, v, m: A(q, k, v, mask=m > 0, backend=b),
        lambda: (*rows(8), draw(1, 1, 8, 8)),
        lambda: (*rows(9), draw(1, 1, 9, 9)),
    ),
    "residual": (
        lambda b, q, k, v, m: sum(x.sin().sum((-2, -1)) for x in flashsci.residual_attention(q, k, v, m, backend=b)),
        lambda: (*rows(8, 4), draw(1, 4, 8, 8)),
        lambda: (*rows(9, 4), draw(1, 4, 9, 9)),
    ),
}
OTHERS = {  # that SDPA has not
    "lse": (
        lambda b, q, k, v: A(q, k, v, window=(2, 0), align="lower_right", return_lse=True, backend=b)[1],
        lambda: rows(8), lambda: rows(11),
    ),
    "sink": (
        lambda b, q, k, v, s: A(q, k, v, sink=s, backend=b), lambda: (*rows(8), draw(4)), lambda: (*rows(9), draw(4)),
    ),
    "packed": (
        lambda b, q, k, v, o: flashsci.varlen_attention(q, k, v, o, backend=b),
        lambda: packed(0, 2, 5), lambda: packed(0, 4, 5),
    ),
    "packed, more of them": (
        lambda b, q, k, v, o: flashsci.varlen_attention(q, k, v, o, backend=b),
        lambda: packed(0, 2, 5), lambda: packed(0, 4, 4, 9),
    ),
    "packed bias": (
        lambda b, q, k, v, o, m: flashsci.varlen_attention(q, k, v, o, bias=m, backend=b),
        lambda: (*packed(0, 2, 5), draw(1, 13)), lambda: (*packed(0, 4, 7), draw(1, 25)),
    ),
}  # fmt: skip


def traced(call, inputs, **options):
    return torch.jit.trace(call, inputs, check_trace=False, **options)


def agree(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@every
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
def test_a_trace_computes_what_it_is_given(backend, grad, name):
    if name in OTHERS and backend == "sdpa":
        pytest.skip("SDPA does not serve it")
    if backend == "cuda" and name == "packed bias":
        pytest.skip("the cuda backend does not serve it")
    call, first, second = (DENSE | OTHERS)[name]

    def inputs(make):
        return tuple(x.requires_grad_(grad) if x.is_floating_point() else x for x in make())

    seen = inputs(first)
    for _ in range(3):  # known as a repeated call before it is traced
        call(backend, *seen)
    module = traced(lambda *x: call(backend, *x), seen)
    for make in (first, second):
        given = inputs(make)
        out, due = module(*given), call("reference", *given)
        agree(out, due)
        if grad:
            leaves = [x for x in given if x.requires_grad]
            gradients = (torch.autograd.grad(x.sin().sum(), leaves, materialize_grads=True) for x in (out, due))
            for a, b in zip(*gradients, strict=True):
                agree(a, b)


def test_a_trace_without_gradients_is_saved_and_loaded():
    def call(q, k, v):
        return A(q, k, v, causal=True, backend="triton")

    file = io.BytesIO()
    torch.jit.save(traced(call, rows(8)), file)
    file.seek(0)
    given = rows(11)
    agree(torch.jit.load(file)(*given), call(*given))


def test_paged_calls_are_traced():
    cache = draw(4, 4, 2, 16)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    for backend in ("reference", "triton"):

        def call(q, used, backend=backend):
            return flashsci.paged_attention(
                q, cache, cache, block_table=table, seqused_k=used, cu_seqlens_q=offsets, backend=backend
            )

        used = torch.tensor([3, 5], dtype=torch.int32, device=DEVICE)
        module = traced(call, (draw(2, 4, 16), used))
        q, others = draw(2, 4, 16), used + 2
        agree(module(q, others), call(q, others))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_traced_dropout_draws_anew(backend):
    q, k, v = rows(8)
    module = traced(lambda *x: A(*x, dropout_p=0.5, backend=backend), (q, k, v))
    assert not torch.equal(module(q, k, v), module(q, k, v))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_nothing_of_a_trace_stays_behind(backend):
    """Sizes are tensors to a tracer: none may reach a cache."""
    from flashsci.call.plans import plans

    before = set(plans)
    q, k, v = rows(13)
    traced(lambda *x: A(*x, backend=backend), (q, k, v))
    assert set(plans) == before
