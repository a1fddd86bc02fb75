"""Dropout seeds that are drawn inside of compiled, exported and recomputed programs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashsci
from tests.support.everywhere import DEVICE

backends = pytest.mark.parametrize("backend", ["reference", "triton"])
compilers = pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def entries(call, rows=6):
    """P o R as out shows it, and as dv does: of v = 1, out is the matrix and dv its transpose times dout."""
    q, k = (torch.randn(1, 1, rows, 16, device=DEVICE).requires_grad_() for _ in range(2))
    v = torch.eye(rows, 16, device=DEVICE)[None, None].requires_grad_()
    out = call(q, k, v)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    return v.grad, out.detach()[..., :rows].mT @ upstream


def dropping(backend):
    return lambda q, k, v: flashsci.attention(q.sin(), k, v, dropout_p=0.5, backend=backend)


@compilers
@backends
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
def test_what_a_compiler_recomputes_drops_the_same(backend, compiler, inside, budget):
    call = dropping(backend)
    body = (lambda *x: checkpoint(call, *x, use_reentrant=False)) if inside else call
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled = torch.compile(body, fullgraph=True, backend=compiler)
        for _ in range(2):
            torch.testing.assert_close(*entries(compiled), rtol=1e-4, atol=1e-5)


@backends
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_eager_checkpoint_drops_the_same(backend, reentrant):
    """With torch's default preserve_rng_state=True; without it a drawn seed is another, as torch's own dropout is."""
    call = dropping(backend)
    torch.testing.assert_close(*entries(lambda *x: checkpoint(call, *x, use_reentrant=reentrant)), rtol=1e-4, atol=1e-5)
    seed = torch.tensor([1, 2], device=DEVICE)
    given = lambda q, k, v: flashsci.attention(  # noqa: E731
        q, k, v, dropout_p=0.5, dropout_seed=seed, backend=backend
    )
    options = dict(use_reentrant=reentrant, preserve_rng_state=False)
    torch.testing.assert_close(*entries(lambda *x: checkpoint(given, *x, **options)), rtol=1e-4, atol=1e-5)


@compilers
@backends
def test_compiled_dropout_follows_the_generator(backend, compiler):
    """The same seed drops the same entries compiled or not, and each call others."""
    call = dropping(backend)
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    for rows in (6, 9):
        q = torch.randn(1, 2, rows, 16, device=DEVICE)
        found = []
        for f in (call, compiled):
            torch.manual_seed(7)
            found.append((f(q, q, q), f(q, q, q)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        assert not torch.equal(*found[0])


@backends
@pytest.mark.parametrize("strict", [False, True])
def test_exported_dropout_draws_anew(backend, strict):
    class Block(torch.nn.Module):
        def forward(self, q):
            return dropping(backend)(q, q, q)

    q = torch.randn(1, 2, 6, 16, device=DEVICE)
    module = torch.export.export(Block(), (q,), strict=strict).module()
    assert not torch.equal(module(q), module(q))


@backends
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_compiled_vmap_draws_as_it_is_asked_to(backend, randomness):
    call = torch.vmap(lambda q: dropping(backend)(q, q, q), randomness=randomness)
    q = torch.randn(1, 2, 6, 16, device=DEVICE).expand(2, 1, 2, 6, 16)
    first, second = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(first, second) == (randomness == "same")


def test_opcheck_of_masks():
    seed, rows = torch.tensor([3, 4], device=DEVICE), torch.arange(4, device=DEVICE).reshape(2, 2)
    torch.library.opcheck(torch.ops.flashsci.keep_mask.default, (seed, 0.5, rows, 5, 6))
