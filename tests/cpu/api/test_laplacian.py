"""The forward Laplacian: its formula against derivatives by torch.func, its gradients, blocks, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.func import hessian, jacfwd

import flashsci
from flashsci.call import laplacian
from flashsci.call.laplacian_tensors import LaplacianTensors
from tests.support.laplacian_calls import SHAPES, Shape, require, tensors_of, to

NAMES = LaplacianTensors._fields


def call(tensors, **options):
    return flashsci.forward_laplacian(*tensors[:3], **dict(zip(NAMES[3:], tensors[3:], strict=True)), **options)


def curves(shape):
    """q, k and v as polynomials of the coordinates, bias and mask."""
    made = to(tensors_of(shape), torch.float64)
    n = shape.directions
    slopes = [torch.randn(n, *x.shape, dtype=torch.float64) for x in made[:3]]
    bends = [torch.randn(n, n, *x.shape, dtype=torch.float64) / n for x in made[:3]]

    def rows(x):
        return [
            b + torch.einsum("n,n...->...", x, s) + torch.einsum("n,m,nm...->...", x, x, c)
            for b, s, c in zip(made[:3], slopes, bends, strict=True)
        ]

    return rows, made.bias, made.mask


@pytest.mark.parametrize("name", ["plain", "grouped heads", "mask", "one head", "one key", "two batch dims"])
def test_against_the_hessian(name):
    shape = SHAPES[name]._replace(directions=4)
    rows, bias, mask = curves(shape)

    def attention(x):
        return flashsci.attention(*rows(x), bias=bias, mask=mask, scale=0.7, backend="reference")

    x = torch.randn(shape.directions, dtype=torch.float64)
    halves = []
    for n in range(3):
        jacobian = jacfwd(lambda x, n=n: rows(x)[n])(x).movedim(-1, 0)
        halves.append((jacobian, hessian(lambda x, n=n: rows(x)[n])(x).diagonal(dim1=-2, dim2=-1).sum(-1)))
    jacobians, laplacians = zip(*halves, strict=True)
    found = call(LaplacianTensors(*rows(x), *jacobians, *laplacians, bias, mask), scale=0.7)
    torch.testing.assert_close(found.out, attention(x))
    torch.testing.assert_close(found.jacobian, jacfwd(attention)(x).movedim(-1, 0))
    torch.testing.assert_close(found.laplacian, hessian(attention)(x).diagonal(dim1=-2, dim2=-1).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_errors_and_blocks(name, dtype, monkeypatch):
    tensors = tensors_of(SHAPES[name], dtype)
    scale = tensors.q.shape[-1] ** -0.5
    whole = call(tensors)
    require(whole, tensors, scale)
    monkeypatch.setattr(laplacian, "BLOCK", 300)
    require(call(tensors), tensors, scale)


@pytest.mark.parametrize("name", SHAPES)
def test_absent_tensors_are_zeros(name):
    tensors = to(tensors_of(SHAPES[name]), torch.float64)
    n = tensors.directions
    filled = [
        x if x is not None else y.new_zeros(n, *y.shape) if i < 3 else torch.zeros_like(y)
        for i, (x, y) in enumerate(zip(tensors[3:9], 2 * tensors[:3], strict=True))
    ]
    for a, b in zip(call(tensors), call(tensors._replace(**dict(zip(NAMES[3:9], filled, strict=True)))), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["plain", "grouped heads", "mask", "constant queries"])
def test_gradients_to_second_order(name, monkeypatch):
    """Also where the backward goes block by block."""
    shape = SHAPES[name]._replace(batch=(1,), rows=2, keys=3, directions=2, dim=2, dim_v=2)
    shape = shape._replace(bias=shape.bias and (1, 2, 1, 3), mask=shape.mask and (1, 1, 2, 3))
    tensors = to(tensors_of(shape), torch.float64)
    present = [n for n, x in zip(NAMES, tensors, strict=True) if x is not None and x.is_floating_point()]
    leaves = [getattr(tensors, n).requires_grad_() for n in present]

    def function(*given):
        return tuple(call(tensors._replace(**dict(zip(present, given, strict=True)))))

    for block in (laplacian.BLOCK, 8):
        monkeypatch.setattr(laplacian, "BLOCK", block)
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_tensors_that_are_one():
    """The gradient of rows that are query, key and value at once is the sum of the three."""
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    jacobian = torch.randn(5, 2, 4, 3, dtype=torch.float64)
    given = dict(q_jacobian=jacobian, k_jacobian=jacobian, v_jacobian=jacobian)
    same = torch.autograd.grad(flashsci.forward_laplacian(x, x, x, **given).laplacian.sin().sum(), x)[0]
    three = [x.detach().clone().requires_grad_() for _ in range(3)]
    apart = torch.autograd.grad(flashsci.forward_laplacian(*three, **given).laplacian.sin().sum(), three)
    torch.testing.assert_close(same, sum(apart))


@pytest.mark.parametrize("sizes", [dict(directions=0), dict(rows=0), dict(keys=0), dict(batch=(0,))])
def test_empty_dims(sizes):
    tensors = tensors_of(Shape()._replace(**sizes))
    found = call(tensors)
    shape = (*tensors.q.shape[:-1], tensors.v.shape[-1])
    assert found.out.shape == found.laplacian.shape == shape and found.jacobian.shape == (tensors.directions, *shape)
    if not tensors.k.shape[-2]:
        assert not any(x.any() for x in found)


def test_huge_scores_and_hidden_rows():
    tensors = tensors_of(SHAPES["mask"])
    large = tensors._replace(bias=tensors.bias * 1e4)
    found = call(large)
    assert all(x.isfinite().all() for x in found)
    require(found, large, 8**-0.5)
    assert not found.out[0, 0, 0].any() and not found.jacobian[:, 0, 0, 0].any() and not found.laplacian[0, 0, 0].any()


def test_under_transforms_and_autocast():
    tensors = to(tensors_of(SHAPES["plain"]), torch.float64)
    due = call(tensors)
    mapped = torch.vmap(lambda q, dq: call(tensors._replace(q=q, q_jacobian=dq)).laplacian, in_dims=(0, 0))(
        torch.stack([tensors.q] * 2), torch.stack([tensors.q_jacobian] * 2)
    )
    torch.testing.assert_close(mapped, torch.stack([due.laplacian] * 2))
    _, tangent = torch.func.jvp(lambda q: call(tensors._replace(q=q)).out, (tensors.q,), (tensors.q_jacobian[0],))
    alone = tensors._replace(k_jacobian=None, v_jacobian=None)
    torch.testing.assert_close(tangent, call(alone).jacobian[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert call(to(tensors, torch.float32)).laplacian.dtype is torch.float32


def test_under_a_compiler():
    tensors = tensors_of(SHAPES["plain"])
    compiled = torch.compile(lambda *given: tuple(call(LaplacianTensors(*given))), backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(*tensors), call(tensors), strict=True):
        torch.testing.assert_close(a, b)


def test_by_kernels_with_gradients_and_under_a_compiler():
    """Triton interprets them here; gradients are those of the formula, also where it stands for the kernels' values."""
    tensors = tensors_of(SHAPES["mask"])
    require(call(tensors, backend="triton"), tensors, 8**-0.5)
    compiled = torch.compile(
        lambda *given: tuple(call(LaplacianTensors(*given), backend="triton")), backend="aot_eager", fullgraph=True
    )
    require(compiled(*tensors), tensors, 8**-0.5)
    with flashsci.use_backend("triton"):
        found = torch.autograd.grad(
            call(to(tensors._replace(q=tensors.q.requires_grad_()), torch.float32)).laplacian.sum(), tensors.q
        )
    due = torch.autograd.grad(call(tensors, backend="reference").laplacian.sum(), tensors.q)
    torch.testing.assert_close(found, due)


@pytest.mark.parametrize(
    "dtype, dim, backend, words",
    [
        (
            torch.float32,
            8,
            "cuda",
            "backend 'cuda' has no forward Laplacian; use backend='auto', 'triton' or 'reference'",
        ),
        (torch.float64, 8, "triton", "not float64; backend='auto' takes plain PyTorch"),
        (torch.float32, 160, "triton", "head dims up to 128, got 160 and 8"),
    ],
)
def test_backends_that_do_not_serve_a_call(dtype, dim, backend, words):
    tensors = to(tensors_of(Shape(dim=dim)), dtype)
    with pytest.raises(flashsci.BackendError, match=words):
        call(tensors, backend=backend)
    with flashsci.use_backend(backend), pytest.raises(flashsci.BackendError, match=words):
        call(tensors)
    with pytest.raises(ValueError, match="unknown backend 'none'"):
        call(tensors, backend="none")


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(q_jacobian=torch.randn(5, 2, 2, 9, 7)), r"q_jacobian must have \[n, \*q.shape\]"),
        (dict(k_jacobian=torch.randn(4, 2, 2, 9, 8)), r"with one n for all, \[5, 2, 2, 9, 8\]"),
        (dict(v_laplacian=torch.randn(2, 2, 9)), "v_laplacian must have v's shape"),
        (dict(q_laplacian=torch.randn(2, 2, 9, 8).double()), "q_laplacian must have q's dtype"),
        (dict(mask=torch.ones(9, 9)), "mask must be a bool tensor"),
        (dict(bias=torch.ones(3, 9)), "does not broadcast"),
        (dict(v=torch.randn(2, 2, 8, 8)), "same number of rows"),
        (dict(k=torch.randn(1, 2, 9, 8)), "same leading dims"),
        (dict(q_jacobian=3.0), "q_jacobian must be a torch.Tensor or None, got float"),
    ],
)
def test_what_does_not_fit(change, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call(tensors_of(Shape())._replace(**change))


@pytest.mark.parametrize("rows", [1, 2, 1 << 20])
def test_batches_of_cotangents(rows, monkeypatch):
    """Of the vmap behind is_grads_batched, first and second order, one block of rows and several."""
    tensors = [None if x is None else x.clone() for x in to(tensors_of(SHAPES["plain"]), torch.float64)]
    leaves = [x.requires_grad_() for x in tensors if x is not None and x.is_floating_point()]
    pairs = tensors[0].shape[:-2].numel() * tensors[1].shape[-2] * tensors[3].shape[0]
    monkeypatch.setattr(laplacian, "BLOCK", rows * pairs)
    results = call(tensors, backend="reference")
    cotangents = [torch.stack([x.detach().cos(), x.detach().sin()]) for x in results]
    found = torch.autograd.grad(results, leaves, cotangents, is_grads_batched=True, retain_graph=True)
    due = [torch.autograd.grad(results, leaves, [g[n] for g in cotangents], create_graph=True) for n in range(2)]
    torch.testing.assert_close(list(found), [torch.stack(x).detach() for x in zip(*due, strict=True)])
    first = due[0]
    along = [torch.stack([x.detach().cos(), x.detach().sin()]) for x in first]
    second = torch.autograd.grad(first, leaves, along, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(first, leaves, [g[n] for g in along], retain_graph=True) for n in range(2)]
    torch.testing.assert_close(list(second), [torch.stack(x) for x in zip(*each, strict=True)])
