"""The tensors that nodes save are the same at a call and at its repeats, which go another way.

torch.utils.checkpoint compares what a call and its recomputation save, and raises where shapes differ.
"""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import flashsci
from flashsci.call.plans import plans

OFFSETS = torch.tensor([0, 3, 11], dtype=torch.int32)
SEED = torch.tensor([3, 4])
MASK = torch.arange(55).reshape(5, 11) % 7 > 0


def leaf(*shape):
    return torch.randn(shape).requires_grad_()


def rows(*lead):
    return leaf(*lead, 4, 5, 16), leaf(*lead, 2, 11, 16), leaf(*lead, 2, 11, 16)


def packed():
    return leaf(11, 4, 16), leaf(11, 2, 16), leaf(11, 2, 16)


def _sdpa(backend, *x):
    with flashsci.use_backend(backend):
        return flashsci.sdpa(*x[:3], attn_mask=x[3], enable_gqa=True)


CALLS = {
    "dense": (lambda b, *x: flashsci.attention(*x, causal=True, backend=b), lambda: rows(3)),
    "without batch": (lambda b, *x: flashsci.attention(*x, backend=b), rows),
    "batch of keys": (lambda b, *x: flashsci.attention(*x, backend=b), lambda: (rows(1)[0], *rows(3)[1:])),
    "bias of pairs": (lambda b, *x: flashsci.attention(*x[:3], bias=x[3], backend=b), lambda: (*rows(3), leaf(5, 11))),
    "bias of heads": (lambda b, *x: flashsci.attention(*x[:3], bias=x[3], backend=b), lambda: (*rows(3), leaf(4, 5, 11))),
    "bias, heads innermost": (
        lambda b, *x: flashsci.attention(*x[:3], bias=x[3].movedim(-1, -3), backend=b),
        lambda: (*rows(3), leaf(3, 5, 11, 4)),
    ),
    "mask": (lambda b, *x: flashsci.attention(*x, mask=MASK, backend=b), lambda: rows(3)),
    "key weights": (lambda b, *x: flashsci.attention(*x[:3], key_weight=x[3].exp(), backend=b), lambda: (*rows(3), leaf(11))),
    "sink": (lambda b, *x: flashsci.attention(*x[:3], sink=x[3], backend=b), lambda: (*rows(3), leaf(4))),
    "sink and bias": (
        lambda b, *x: flashsci.attention(*x[:3], bias=x[4], sink=x[3], backend=b),
        lambda: (*rows(3), leaf(4), leaf(5, 11)),
    ),
    "strided rows": (lambda b, *x: flashsci.attention(*(y.mT for y in x), backend=b), lambda: (leaf(2, 4, 16, 5),) * 3),
    "dropout": (lambda b, *x: flashsci.attention(*x, dropout_p=0.5, dropout_seed=SEED, backend=b), lambda: rows(3)),
    "packed": (lambda b, *x: flashsci.varlen_attention(*x, OFFSETS, backend=b), packed),
    "packed, causal": (lambda b, *x: flashsci.varlen_attention(*x, OFFSETS, OFFSETS, causal=True, backend=b), packed),
    "packed, bias": (
        lambda b, *x: flashsci.varlen_attention(*x[:3], OFFSETS, bias=x[3], backend=b),
        lambda: (*packed(), leaf(4, 73)),
    ),
    "packed, sink": (
        lambda b, *x: flashsci.varlen_attention(*x[:3], OFFSETS, sink=x[3], backend=b),
        lambda: (*packed(), leaf(4)),
    ),
    "packed, strided": (
        lambda b, *x: flashsci.varlen_attention(*(y.mT for y in x), OFFSETS, backend=b),
        lambda: (leaf(11, 16, 4), leaf(11, 16, 2), leaf(11, 16, 2)),
    ),
    "residual": (
        lambda b, *x: flashsci.residual_attention(*x, backend="auto" if b == "sdpa" else b)[0],
        lambda: (*rows(3), leaf(5, 11)),
    ),
    "sdpa": (_sdpa, lambda: (*rows(3), leaf(5, 11))),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """No earlier plan; and offsets that are not read, which on a CPU every packed call does instead of repeating another."""
    monkeypatch.setattr("flashsci.api.varlen.contents_are_seen", lambda *_: False)
    plans.clear()


@pytest.mark.parametrize("backend", ["triton", "sdpa", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_repeats_save_what_the_first_call_saves(name, backend):
    call, make = CALLS[name]
    inputs = make()
    found = []

    def note(x):
        found[-1].append((tuple(x.shape), x.dtype))
        return x

    for _ in range(4):
        found.append([])
        with saved_tensors_hooks(note, lambda x: x):
            try:
                call(backend, *inputs)
            except flashsci.BackendError as reason:
                pytest.skip(str(reason))
    assert found[0]
    assert all(again == found[0] for again in found), found


@pytest.mark.every(3)
@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_checkpoint_at_every_call_of_a_kind(name, before):
    """Lanes change between calls: a checkpoint may begin before any of these changes."""
    call, make = CALLS[name]
    inputs = make()
    for _ in range(before):
        call("triton", *inputs)
    wanted = torch.autograd.grad(call("reference", *inputs).sin().sum(), inputs)
    out = checkpoint(call, "triton", *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sin().sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(a, b)
