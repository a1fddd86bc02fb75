"""The wiring of fused kernels to second order: what autograd and torch.func make of four opaque ops, in fp64.

The kernels are stood in for by closed formulas (opaque.py), so that gradcheck and exact comparisons with the reference
apply; test_second_order_kernels.py has the kernels themselves.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import flashsci
from flashsci.backends import triton
from flashsci.call import ops
from tests.support import opaque

pytestmark = pytest.mark.every(3)

HINT = "backend='reference', which differentiates to any order"


@pytest.fixture(autouse=True)
def opaque_kernels(stand_in):
    stand_in(triton, rejects=lambda problem: None, **opaque.define())


def inputs(*, heads=(2, 1), rank=4, dims=(3, 2), seq=(4, 5), bias=None, grad=True):
    lead = (2,) * (rank - 3)
    shapes = [
        (*lead, *((heads[i],) if rank > 2 else ()), seq[i], dim)
        for i, dim in ((0, dims[0]), (1, dims[0]), (1, dims[1]))
    ]
    if bias is not None:
        shapes.append(bias)
    return [torch.randn(s, dtype=torch.float64).requires_grad_(grad) for s in shapes]


def attend(backend, **options):
    def call(q, k, v, bias=None):
        return flashsci.attention(q, k, v, bias=bias, backend=backend, **options)

    return call


def total(backend, **options):
    """A scalar of out and lse with a curvature of its own."""

    def call(*tensors):
        out, lse = attend(backend, return_lse=True, **options)(*tensors)
        return out.sin().sum() + lse.cos().sum()

    return call


def close(a, b, what=None):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m: f"{what}: {m}")


VARIANTS = {
    "plain": ({}, {}),
    "causal, softcap": ({}, {"causal": True, "softcap": 1.5}),
    "full bias": ({"bias": (2, 2, 4, 5)}, {}),
    "bias of keys": ({"bias": (2, 1, 1, 5)}, {"softcap": 2.0}),
    "bias of fewer dims": ({"bias": (4, 1)}, {}),
    "one head": ({"rank": 2}, {"causal": True}),
    "no batch": ({"rank": 3, "bias": (1, 4, 5)}, {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_gradcheck_and_gradgradcheck(name):
    make, options = VARIANTS[name]
    tensors = inputs(**make)
    call = attend("triton", return_lse=True, **options)
    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_mode(name):
    make, options = VARIANTS[name]
    tensors = inputs(**make)
    call = attend("triton", return_lse=True, **options)
    assert torch.autograd.gradcheck(
        call,
        tensors,
        check_forward_ad=True,
        check_backward_ad=False,
        check_batched_forward_grad=True,
    )
    assert torch.autograd.gradgradcheck(
        call, tensors, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    )


def test_forward_mode_of_some_inputs():
    tensors = inputs(bias=(2, 1, 4, 5), grad=False)
    for chosen in [*itertools.combinations(range(4), 1), (0, 2), (1, 3)]:

        def call(backend, *some, chosen=chosen):
            given = dict(zip(chosen, some, strict=True))
            return attend(backend, return_lse=True)(*(given.get(i, x) for i, x in enumerate(tensors)))

        primals = tuple(tensors[i] for i in chosen)
        tangents = tuple(torch.randn_like(x) for x in primals)
        found = torch.func.jvp(lambda *x: call("triton", *x), primals, tangents)
        truth = torch.func.jvp(lambda *x: call("reference", *x), primals, tangents)
        for a, b in zip(found[1], truth[1], strict=True):
            close(a, b, chosen)


def test_dual_numbers():
    q, k, v = inputs(grad=False)
    direction = torch.randn_like(k)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, direction)
        for returned in (False, True):
            found, truth = (attend(b, return_lse=returned)(q, dual, v) for b in ("triton", "reference"))
            for a, b in zip(found, truth, strict=True) if returned else ((found, truth),):
                a, b = (torch.autograd.forward_ad.unpack_dual(x).tangent for x in (a, b))
                close(a, b)


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f, argnums=(0, 1, 2)),
    "jacrev": lambda f: torch.func.jacrev(f, argnums=(0, 2)),
    "jacfwd": lambda f: torch.func.jacfwd(f, argnums=(1, 2)),
    "hessian": lambda f: torch.func.hessian(f, argnums=(0, 1, 2)),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f), argnums=1),
    "jacrev of jacfwd": lambda f: torch.func.jacrev(torch.func.jacfwd(f), argnums=2),
    "jacfwd of jacrev": lambda f: torch.func.jacfwd(torch.func.jacrev(f, argnums=2), argnums=0),
    "grad of a gradient's norm": lambda f: torch.func.grad(
        lambda *x: torch.func.grad(f)(*x).square().sum(), argnums=(0, 1, 2)
    ),
    "jvp of grad": lambda f: (
        lambda *x: torch.func.jvp(torch.func.grad(f, argnums=(0, 1)), x, tuple(y.cos() for y in x))
    ),
    "vjp of grad": lambda f: lambda *x: torch.func.vjp(torch.func.grad(f), *x)[1](x[0].cos()),
    "grad of jvp": lambda f: torch.func.grad(
        lambda *x: torch.func.jvp(f, x, tuple(y.cos() for y in x))[1], argnums=(0, 1, 2)
    ),
    "linearize": lambda f: lambda *x: torch.func.linearize(f, *x)[1](*(y.cos() for y in x)),
}


def leaves_of(x):
    return torch.utils._pytree.tree_leaves(x)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("rank", [3, 4])
def test_transforms(name, rank):
    """Also where nested vmaps leave no leading dim free (rank 4)."""
    tensors = inputs(rank=rank, seq=(2, 3), grad=False)
    found, truth = (leaves_of(TRANSFORMS[name](total(b, causal=True))(*tensors)) for b in ("triton", "reference"))
    assert len(found) == len(truth) > 0
    for a, b in zip(found, truth, strict=True):
        close(a, b, name)


@pytest.mark.parametrize("name", ["grad", "jvp of grad", "vjp of grad", "grad of jvp"])
def test_transforms_under_vmap(name):
    """Per sample, with a bias that all samples share."""
    q, k, v, bias = inputs(rank=4, bias=(4, 5), grad=False)

    def of(backend, q, k, v):
        return TRANSFORMS[name](lambda *x: total(backend)(*x, bias))(q, k, v)

    found = leaves_of(torch.vmap(lambda *x: of("triton", *x))(q, k, v))
    truth = leaves_of(torch.vmap(lambda *x: of("reference", *x))(q, k, v))
    for a, b in zip(found, truth, strict=True):
        close(a, b, name)


def test_hessian_of_the_bias():
    q, k, v, bias = inputs(rank=3, bias=(1, 1, 5), grad=False)
    found, truth = (
        torch.func.hessian(lambda b: total(x)(q, k, v, b))(bias)  # noqa: B023
        for x in ("triton", "reference")
    )
    close(found, truth)


class Force:
    """Energy of positions through projections and a distance bias; loss on energy and forces."""

    def __init__(self):
        n, self.heads, self.dim = 5, 2, 3
        self.weights = [torch.randn(3, 6, dtype=torch.float64).requires_grad_() for _ in range(3)]
        self.slope = torch.randn(2, 1, 1, dtype=torch.float64).requires_grad_()
        self.positions = torch.randn(n, 3, dtype=torch.float64)

    @property
    def parameters(self):
        return [*self.weights, self.slope]

    def loss(self, backend, positions=None, **options):
        x = (self.positions if positions is None else positions).clone().requires_grad_()
        split = lambda y: y.unflatten(-1, (self.heads, self.dim)).transpose(0, 1)  # noqa: E731
        q, k, v = (split(torch.tanh(x @ w)) for w in self.weights)
        distance = (x[:, None] - x[None]).square().sum(-1).add(0.1).sqrt()
        out, lse = attend(backend, return_lse=True, **options)(q, k, v, -(self.slope**2) * distance)
        energy = out.tanh().sum() + 0.3 * lse.sin().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().sum() + energy.square()


@pytest.mark.parametrize("through", ["grad", "backward"])
def test_force_training(through):
    force = Force()
    truth = torch.autograd.grad(force.loss("reference"), force.parameters)
    if through == "grad":
        found = torch.autograd.grad(force.loss("triton"), force.parameters)
    else:
        force.loss("triton").backward()
        found = [p.grad for p in force.parameters]
    for a, b in zip(found, truth, strict=True):
        close(a, b)


def test_force_training_through_the_lse_alone():
    q, k, v = inputs()
    losses = []
    for backend in ("triton", "reference"):
        _, lse = attend(backend, return_lse=True)(q, k, v)
        (force,) = torch.autograd.grad(lse.sin().sum(), q, create_graph=True)
        losses.append(torch.autograd.grad(force.square().sum(), (q, k), allow_unused=True))
    for a, b in zip(*losses, strict=True):
        close(a, b)


def test_checkpointed_force_training():
    from torch.utils.checkpoint import checkpoint

    q, k, v = inputs()

    def loss(call):
        (force,) = torch.autograd.grad(call(q, k, v).sin().sum(), q, create_graph=True)
        return torch.autograd.grad(force.square().sum(), (q, k, v))

    plain = attend("triton")
    for a, b in zip(loss(lambda *x: checkpoint(plain, *x, use_reentrant=False)), loss(plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_second_derivatives_by_pairs(first, second):
    """d/dy of dL/dx for every pair of inputs: what is not asked for is not computed, and nothing is missing."""
    tensors = inputs(bias=(2, 1, 4, 5), grad=False)
    results = []
    for backend in ("triton", "reference"):
        some = [x.clone().requires_grad_(i in (first, second)) for i, x in enumerate(tensors)]
        (gradient,) = torch.autograd.grad(total(backend)(*some), some[first], create_graph=True)
        results.append(torch.autograd.grad(gradient.sin().sum(), some[second])[0])
    close(*results)


def test_absent_cotangents_never_reach_the_kernel(monkeypatch):
    """The gradient of k alone: no cotangents of dq, dv, dbias; only k and dout can want a gradient."""
    seen = []
    honest = triton.double_backward
    monkeypatch.setattr(triton, "double_backward", lambda *a: seen.append(a) or honest(*a))
    q, k, v, bias = (x.detach() for x in inputs(bias=(4, 5)))
    k.requires_grad_()
    dout = torch.randn(2, 2, 4, 2, dtype=torch.float64, requires_grad=True)
    (dk,) = torch.autograd.grad(attend("triton")(q, k, v, bias), k, dout, create_graph=True)
    torch.autograd.grad(dk.sum(), (k, dout))
    tangents = seen[0][0]
    assert [x is None for x in tangents[:4]] == [True, False, True, True]
    assert seen[0][-1] == ops.NEED_K | ops.NEED_DOUT


def test_a_plain_backward_records_and_saves_nothing(monkeypatch):
    """Without create_graph, the gradients come from the kernel itself, not from a node."""
    from flashsci.call import autograd

    def fail(*a):
        raise AssertionError("a node in a plain backward")

    monkeypatch.setattr(autograd.Backward, "apply", fail)
    q, k, v = inputs()
    torch.autograd.grad(total("triton")(q, k, v), (q, k, v))


def weighted(backend, **options):
    """Attention of q, k, v, key_weight and perhaps a bias."""

    def call(q, k, v, w, bias=None):
        return flashsci.attention(q, k, v, key_weight=w, bias=bias, return_lse=True, backend=backend, **options)

    return call


def by_hand(q, k, v, w, bias=None, *, softcap=None):
    """The same in plain arithmetic, which knows no logarithm of a weight: weights may be 0, or -1e-6."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    w = w if w.dim() < 2 or w.shape[-2] == 1 else w.repeat_interleave(groups, -2)
    terms = w.unsqueeze(-2) * s.exp()
    total = terms.sum(-1, keepdim=True)
    return terms / total @ v, total.squeeze(-1).log()


def test_the_formula_by_hand_is_twice_differentiable_at_zero():
    *tensors, _ = weights_and_all({}, (2, 1, 5))
    assert torch.autograd.gradcheck(by_hand, tensors)
    assert torch.autograd.gradgradcheck(by_hand, tensors)
    assert torch.autograd.gradcheck(by_hand, tensors, check_forward_ad=True)


WEIGHTS = {
    "plain": ({}, (2, 1, 5), {}),
    "one for all": ({}, (5,), {}),
    "two key heads, softcap": ({"heads": (4, 2)}, (2, 2, 5), {"softcap": 1.5}),
    "bias": ({"bias": (2, 1, 4, 5)}, (1, 5), {}),
}


def weights_and_all(make, shape):
    tensors = inputs(**make)
    w = torch.rand(shape, dtype=torch.float64)
    w[..., 1] = w[..., -1] = 0
    tensors.insert(3, w.requires_grad_())
    return [*tensors, None] if len(tensors) == 4 else tensors


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_key_weights_with_exact_zeros(name, backend):
    """Values, gradients, gradients of gradients, forward mode and Hessian-vector products, at weights of zero."""
    make, shape, options = WEIGHTS[name]
    tensors = [x for x in weights_and_all(make, shape) if x is not None]
    calls = weighted(backend, **options), lambda *x: by_hand(*x, **options)
    primals = tuple(x.detach() for x in tensors)
    directions = tuple(torch.randn_like(x) for x in primals)
    ends = calls[1](*primals)
    dout = [torch.randn_like(x).requires_grad_() for x in ends]
    results = []
    for call in calls:

        def scalar(*x, call=call):
            return sum((y * c.detach()).sum().sin() for y, c in zip(call(*x), dout, strict=True))

        found = call(*tensors)
        first = torch.autograd.grad(found, tensors, dout, create_graph=True)
        second = torch.autograd.grad(first, [*tensors, *dout], directions)
        along = torch.func.jvp(call, primals, directions)[1]
        gradient = torch.func.grad(scalar, argnums=tuple(range(len(primals))))
        hessian = torch.func.jvp(gradient, primals, directions)[1]
        results.append((*found, *first, *second, *along, *hessian))
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, i=i: f"{i}: {m}")
    positive = [x.detach().requires_grad_() for x in tensors]
    with torch.no_grad():
        positive[3] += 0.1
    assert torch.autograd.gradcheck(calls[0], positive)
    assert torch.autograd.gradgradcheck(calls[0], positive)


def test_key_weights_under_vmap():
    q, k, v = inputs(grad=False)
    w = torch.rand(3, 1, 5, dtype=torch.float64)
    call = lambda w: weighted("triton")(q, k, v, w)[0].sin().sum()  # noqa: E731
    found = torch.vmap(torch.func.grad(call))(w)
    for one, x in zip(found, w, strict=True):
        close(one, torch.func.grad(call)(x))


# Third order.


@pytest.mark.parametrize("through", ["grad", "backward"])
def test_third_order_raises(through):
    """As training on Hessians meets it, for a weight behind the projections too."""
    force = Force()
    x = force.positions.clone().requires_grad_()
    first = torch.autograd.grad(force.loss("triton", x), force.weights[0], create_graph=True)[0]
    loss = first.square().sum()
    with pytest.raises(flashsci.BackendError, match="third derivative") as caught:
        torch.autograd.grad(loss, force.weights[1]) if through == "grad" else loss.backward()
    assert HINT in str(caught.value)


def test_third_order_raises_whatever_is_differentiated():
    q, k, v, bias = inputs(bias=(4, 5))
    dout = torch.randn(2, 2, 4, 2, dtype=torch.float64, requires_grad=True)
    for wanted in range(5):
        out = attend("triton")(q, k, v, bias)
        first = torch.autograd.grad(out, (q, k, v, bias), dout, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), (q, k, v, bias, dout), create_graph=True)
        with pytest.raises(flashsci.BackendError, match="third derivative"):
            torch.autograd.grad(second[wanted].sum(), (q, k, v, bias)[(wanted + 1) % 4])


def test_third_order_of_a_mixture_raises():
    """The second derivative's cotangents are differentiable: alone they give numbers, beside others they raise."""
    q, k, v = inputs()
    direction = torch.randn_like(q).requires_grad_()
    results = []
    for backend in ("triton", "reference"):
        (dq,) = torch.autograd.grad(total(backend)(q, k, v), q, create_graph=True)
        (hvp,) = torch.autograd.grad(dq, k, direction, create_graph=True)
        results.append(torch.autograd.grad(hvp.sin().sum(), direction, retain_graph=True)[0])
        if backend == "triton":
            with pytest.raises(flashsci.BackendError, match="third derivative"):
                torch.autograd.grad(hvp.sin().sum(), (direction, v))
    close(*results)


def test_a_graph_of_the_second_derivative_may_be_made_and_dropped():
    """create_graph=True at second order asks for nothing of third order yet."""
    q, k, v = inputs()
    results = []
    for backend in ("triton", "reference"):
        (dq,) = torch.autograd.grad(total(backend)(q, k, v), q, create_graph=True)
        results.append(torch.autograd.grad(dq.square().sum(), k, create_graph=True)[0])
    close(*results)


def test_forward_over_forward_raises():
    q, k, v = inputs(grad=False)
    jacobian = torch.func.jacfwd(torch.func.jacfwd(lambda q: total("triton")(q, k, v)))
    with pytest.raises(flashsci.BackendError, match=r"forward mode over.*jacfwd\(torch.func.jacrev"):
        jacobian(q)
    third = torch.func.jacfwd(torch.func.hessian(lambda q: total("triton")(q, k, v)))
    with pytest.raises(flashsci.BackendError, match="forward mode over"):
        third(q)


class Bare:
    """A fused backend without second-order kernels: cuda, or somebody else's."""

    FUSED = True
    forward = staticmethod(lambda *a: opaque.define()["forward"](*a))
    backward = staticmethod(lambda *a: opaque.define()["backward"](*a))


@pytest.fixture
def bare(monkeypatch):
    from flashsci.api import attention as dense
    from flashsci.choice import backends, differentiate
    from flashsci.choice.gradients import named

    monkeypatch.setitem(backends.LOADED["attention"], "cuda", Bare)
    monkeypatch.setattr(dense, "decide", lambda kind, call, name: named(name))
    differentiate._triton_rejects.cache_clear()
    yield
    differentiate._triton_rejects.cache_clear()


def test_triton_serves_the_second_order_of_other_backends(bare, fresh_choices):
    q, k, v = inputs()
    found = torch.autograd.grad(second(q, k, v, "cuda"), (q, k, v))
    for a, b in zip(found, torch.autograd.grad(second(q, k, v, "triton"), (q, k, v)), strict=True):
        assert torch.equal(a, b)
    direction = tuple(x.detach().cos() for x in (q, k, v))
    primals = tuple(x.detach() for x in (q, k, v))
    a, b = (torch.func.jvp(attend(x), primals, direction)[1] for x in ("cuda", "triton"))
    assert torch.equal(a, b)


def test_what_triton_cannot_serve_raises_with_the_reason(bare, fresh_choices, monkeypatch):
    monkeypatch.setattr(triton, "rejects", lambda problem: "it has no kernels for this")
    q, k, v = inputs()
    with pytest.raises(flashsci.BackendError, match="triton backend, and it has no kernels for this"):
        torch.autograd.grad(second(q, k, v, "cuda"), q)


def second(q, k, v, backend):
    (dq,) = torch.autograd.grad(attend(backend)(q, k, v).sin().sum(), q, create_graph=True)
    return dq.square().sum()


# attention_backward takes out and lse as they are given: its derivative is another one.


@pytest.mark.parametrize("wanted", ["dout", "q", "k", "v", "bias", "out", "lse"])
def test_derivatives_of_the_public_backward_raise(wanted):
    q, k, v, bias = inputs(bias=(2, 2, 4, 5), grad=False)
    out, lse = attend("triton", return_lse=True)(q, k, v, bias)
    given = {
        "dout": torch.randn_like(out),
        "q": q,
        "k": k,
        "v": v,
        "bias": bias,
        "out": out,
        "lse": lse,
    }
    given[wanted].requires_grad_()
    found = flashsci.attention_backward(**given, backend="triton")
    with pytest.raises(flashsci.BackendError, match="second derivative, through attention_backward"):
        torch.autograd.grad(found.dk.sum(), given[wanted])


def test_forward_mode_of_the_public_backward_raises():
    q, k, v = inputs(grad=False)
    out, lse = attend("triton", return_lse=True)(q, k, v)
    call = lambda q: flashsci.attention_backward(out, q, k, v, out, lse, backend="triton").dk  # noqa: E731
    with pytest.raises(flashsci.BackendError, match="through attention_backward"):
        torch.func.jvp(call, (q,), (q,))
