"""First derivatives of every backend under torch's autograd and torch.func; test_second_order.py has the second."""

import pytest
import torch

import flashsci


def leaves():
    return [torch.randn(1, 2, 5, 8).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_force_training_is_right_where_it_is_allowed(backend):
    x, k, v = (y.double().detach().requires_grad_() for y in leaves())
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def loss(w):
        energy = flashsci.attention(x @ w, k, v, backend=backend).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0].square().sum()

    assert torch.autograd.gradcheck(loss, weight)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_forward_mode_works_in_plain_pytorch(backend):
    q, k, v = (x.detach().double() for x in leaves())
    call = lambda q: flashsci.attention(q, k, v, backend=backend)  # noqa: E731
    direction = torch.randn_like(q)
    _, tangent = torch.func.jvp(call, (q,), (direction,))
    step = 1e-6
    difference = (call(q + step * direction) - call(q - step * direction)) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
def test_functional_transforms(backend):
    """torch.func.grad, vjp and jacrev agree with autograd."""
    q, k, v = leaves()

    def energy(q, k):
        return flashsci.attention(q, k, v.detach(), causal=True, backend=backend).square().sum()

    wanted = torch.autograd.grad(energy(q, k), (q, k))
    found = torch.func.grad(energy, argnums=(0, 1))(q.detach(), k.detach())
    _, pull = torch.func.vjp(energy, q.detach(), k.detach())
    for a, b, c in zip(found, pull(torch.ones(())), wanted, strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)
    jacobian = torch.func.jacrev(lambda x: flashsci.attention(x, k.detach(), v.detach(), backend=backend).sum(-1))(
        q.detach()
    )
    assert jacobian.shape == (1, 2, 5, 1, 2, 5, 8)
    torch.testing.assert_close(
        jacobian.sum((0, 1, 2)),
        torch.autograd.grad(flashsci.attention(q, k, v, backend=backend).sum(), q)[0],
    )


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
def test_vmap(backend):
    q, k, v = (torch.randn(3, 2, 5, 8) for _ in range(3))
    call = lambda q, k, v: flashsci.attention(q, k, v, causal=True, backend=backend)  # noqa: E731
    truth = call(q, k, v)
    torch.testing.assert_close(torch.vmap(call)(q, k, v), truth)
    torch.testing.assert_close(torch.vmap(call, in_dims=(0, None, None))(q, k[0], v[0]), call(q, k[:1], v[:1]))
    per_sample = torch.vmap(torch.func.grad(lambda q, k, v: call(q, k, v).sum()))(q, k, v)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(per_sample, torch.autograd.grad(call(leaf, k, v).sum(), leaf)[0])


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_only_what_is_needed(backend, needed):
    """Gradients of some inputs are those one gets when all are asked for."""
    tensors = [*(torch.randn(1, 2, 5, 8) for _ in range(3)), torch.randn(5, 5)]
    all_of_them = [x.clone().requires_grad_() for x in tensors]
    some = [x.clone().requires_grad_(i in needed) for i, x in enumerate(tensors)]
    call = lambda q, k, v, b: flashsci.attention(q, k, v, bias=b, backend=backend).square().sum()  # noqa: E731
    wanted = torch.autograd.grad(call(*all_of_them), all_of_them)
    call(*some).backward()
    for i, x in enumerate(some):
        assert (x.grad is None) == (i not in needed)
        if i in needed:
            torch.testing.assert_close(x.grad, wanted[i])


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
def test_backward_twice_with_a_retained_graph(backend):
    q, k, v = leaves()
    out = flashsci.attention(q, k, v, backend=backend)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
def test_no_grad_leaves_no_graph(backend):
    q, k, v = leaves()
    with torch.no_grad():
        assert not flashsci.attention(q, k, v, backend=backend).requires_grad
    with torch.inference_mode():
        flashsci.attention(q, k, v, backend=backend)
    assert not flashsci.attention(q.detach(), k.detach(), v.detach(), backend=backend).requires_grad


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
def test_changed_inputs_are_noticed(backend):
    """Autograd's version counter: an input changed in place before backward raises."""
    q, k, v = leaves()
    out = flashsci.attention(q, k, v, backend=backend)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(backend, reentrant):
    from torch.utils.checkpoint import checkpoint

    q, k, v = leaves()
    call = lambda q, k, v: flashsci.attention(q, k, v, causal=True, backend=backend)  # noqa: E731
    wanted = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    checkpoint(call, q, k, v, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, w) for x, w in zip((q, k, v), wanted, strict=True))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_checkpointing_drops_the_same_entries(backend):
    from torch.utils.checkpoint import checkpoint

    q, k, v = leaves()
    call = lambda q, k, v: flashsci.attention(q, k, v, dropout_p=0.5, backend=backend)  # noqa: E731
    torch.manual_seed(1)
    wanted = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(1)
    checkpoint(call, q, k, v, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(x.grad, w) for x, w in zip((q, k, v), wanted, strict=True))


def test_gradients_by_themselves_under_autocast():
    """attention_backward computes in the dtype of what it is given, as outside."""
    q, k, v, dout = torch.randn(4, 1, 2, 33, 16).unbind(0)
    out, lse = flashsci.attention(q, k, v, return_lse=True)
    due = flashsci.attention_backward(dout, q, k, v, out, lse, backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        found = flashsci.attention_backward(dout, q, k, v, out, lse, backend="reference")
    for ours, theirs in zip(found[:3], due[:3], strict=True):
        assert torch.equal(ours, theirs)
