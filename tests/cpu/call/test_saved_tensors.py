"""What autograd keeps for a backward, on every backend: freed with the graph, and in sight of saved-tensor hooks."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import flashsci

backends = pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
SHAPES = ((2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 1, 6, 7))


def leaves(bias=True):
    return [torch.randn(s).requires_grad_() for s in SHAPES[: 4 if bias else 3]]


def attend(backend, q, k, v, bias=None, **options):
    return flashsci.attention(q, k, v, bias=bias, backend=backend, **options)


@backends
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_a_graph_that_was_freed_raises(backend, bias, order):
    """As torch does, for whoever forgot retain_graph: not a gradient added twice."""
    inputs = leaves(bias)
    end = attend(backend, *inputs).sum()  # keeps nothing that could raise instead
    if order == 2:
        (force,) = torch.autograd.grad(end, inputs[0], create_graph=True)
        end = force.sum()
    end.backward()
    kept = [x.grad.clone() for x in inputs]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        end.backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(inputs, kept, strict=True))


@backends
def test_a_graph_that_was_freed_has_no_second_order_either(backend):
    inputs = leaves()
    end = attend(backend, *inputs).sum()
    torch.autograd.grad(end, inputs)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(end, inputs, create_graph=True)


@backends
def test_a_retained_graph_gives_the_same_again(backend):
    """In any order of plain and recorded backwards."""
    inputs = leaves()
    out = attend(backend, *inputs)
    upstream = torch.randn_like(out)
    rounds = [
        torch.autograd.grad(out, inputs, upstream, retain_graph=True, create_graph=recorded)
        for recorded in (False, True, False, True)
    ]
    for again in rounds[1:]:
        for a, b in zip(rounds[0], again, strict=True):
            torch.testing.assert_close(a, b)
    assert all(x.requires_grad for x in rounds[1]) and not any(x.requires_grad for x in rounds[2])


@backends
def test_hooks_hold_all_that_is_kept(backend):
    """After the forward nothing but what the hooks packed keeps the inputs' memory: save_on_cpu frees it."""
    packed = []

    def pack(x):
        packed.append(x.detach().clone())  # stands for a copy elsewhere
        return len(packed) - 1

    inputs = leaves()
    middle = [x * 1 for x in inputs]  # nobody's but the graph's
    alive = [x.untyped_storage()._weak_ref() for x in middle]
    with saved_tensors_hooks(pack, packed.__getitem__):
        out = attend(backend, *middle)
    alive.append(out.untyped_storage()._weak_ref())
    end = out.sum()  # keeps no tensor
    del middle, out
    gc.collect()
    try:
        expired = [torch.UntypedStorage._expired(x) for x in alive]
    finally:
        for x in alive:
            torch.UntypedStorage._free_weak_ref(x)
    assert all(expired), expired
    end.backward()
    found = [x.grad for x in inputs]
    wanted = torch.autograd.grad(attend(backend, *inputs).sum(), inputs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_what_hooks_give_back_is_what_counts(backend):
    """A hook that compresses decides the gradient: no second copy is read behind its back."""
    inputs = leaves(bias=False)
    lossy = lambda x: torch.zeros_like(x) if x.is_floating_point() else x  # noqa: E731
    with saved_tensors_hooks(lambda x: x, lossy):
        attend(backend, *inputs).square().sum().backward()
    assert all(x.grad.eq(0).all() for x in inputs)


@backends
def test_save_on_cpu_to_second_order(backend):
    inputs = leaves()

    def gradients():
        (force,) = torch.autograd.grad(attend(backend, *inputs).square().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(force.square().sum(), inputs)

    wanted = gradients()
    with torch.autograd.graph.save_on_cpu():
        found = gradients()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@backends
@pytest.mark.parametrize("needed", [(0,), (1, 2), (3,)])
def test_second_order_of_what_is_needed(backend, needed):
    """A recorded backward through some inputs only."""
    truth, found = ([x.detach().requires_grad_(i in needed) for i, x in enumerate(inputs)] for inputs in [leaves()] * 2)
    results = []
    for name, inputs in (("reference", truth), (backend, found)):
        wanted = [x for x in inputs if x.requires_grad]
        first = torch.autograd.grad(attend(name, *inputs).sin().sum(), wanted, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
