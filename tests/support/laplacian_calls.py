"""Calls of the forward Laplacian, and its judge: twice the error of plain PyTorch and the rounding of the terms' magnitudes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.call import laplacian
from flashsci.call.laplacian_tensors import LaplacianTensors

EVERYTHING = (True,) * 6


class Shape(NamedTuple):
    """The sizes of a call, and the Jacobians and Laplacians (of q, k, v each) that it has."""

    batch: tuple[int, ...] = (2,)
    heads: int = 2
    heads_k: int = 2
    rows: int = 9
    keys: int = 9
    dim: int = 8
    dim_v: int = 8
    directions: int = 5
    given: tuple[bool, ...] = EVERYTHING
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None


#: By name; rows and keys of the last ones are those of several tiles.
SHAPES = {
    "plain": Shape(),
    "one head": Shape(batch=(), heads=1, heads_k=1, rows=4, keys=6),
    "grouped heads": Shape(heads=4, heads_k=2, rows=10, keys=7, dim_v=5),
    "electrons": Shape(batch=(1,), rows=42, keys=42, dim=16, dim_v=16, directions=7, bias=(42, 42)),
    "constant queries": Shape(given=(False, True, True, False, True, True)),
    "constant keys": Shape(given=(True, False, True, True, False, True)),
    "values alone": Shape(given=(False, False, True, False, False, True)),
    "scores alone": Shape(given=(True, True, False, True, True, False)),
    "linear": Shape(given=(True, True, True, False, False, False)),
    "mask": Shape(mask=(2, 1, 9, 9), bias=(2, 2, 1, 9)),
    "one key": Shape(keys=1, rows=3),
    "one direction": Shape(directions=1, rows=1),
    "wide": Shape(batch=(1,), heads=1, heads_k=1, dim=96, dim_v=70, directions=2),
    "two batch dims": Shape(batch=(2, 3), rows=3, keys=4, bias=(2, 1, 1, 3, 4), mask=(3, 1, 1, 4)),
    "many keys": Shape(batch=(1,), heads=2, heads_k=1, rows=70, keys=75, dim_v=12, directions=3, bias=(2, 70, 75)),
    "many keys, mask": Shape(batch=(1,), rows=20, keys=130, directions=2, mask=(1, 130)),
    "many keys, values alone": Shape(batch=(1,), rows=7, keys=80, given=(False, False, True, True, True, True)),
}


def tensors_of(shape: Shape, dtype: torch.dtype = torch.float32) -> LaplacianTensors:
    """Random tensors; a mask leaves the first row of the first head without keys."""
    q = torch.randn(*shape.batch, shape.heads, shape.rows, shape.dim)
    k, v = (torch.randn(*shape.batch, shape.heads_k, shape.keys, d) for d in (shape.dim, shape.dim_v))
    if not shape.batch and shape.heads == 1:
        q, k, v = q[0], k[0], v[0]
    jacobians = [
        torch.randn(shape.directions, *x.shape) if g else None for x, g in zip((q, k, v), shape.given[:3], strict=True)
    ]
    laplacians = [torch.randn_like(x) if g else None for x, g in zip((q, k, v), shape.given[3:], strict=True)]
    bias = None if shape.bias is None else torch.randn(shape.bias)
    found = [q, k, v, *jacobians, *laplacians, bias]
    mask = None
    if shape.mask is not None:
        mask = torch.rand(shape.mask) > 0.4
        if len(shape.mask) > 1 and shape.mask[-2] > 1:
            mask[(0,) * (len(shape.mask) - 2)][0] = False
    return LaplacianTensors(*(None if x is None else x.to(dtype) for x in found), mask)


def to(tensors: LaplacianTensors, dtype: torch.dtype) -> LaplacianTensors:
    """The tensors in another dtype, but for the mask."""
    return LaplacianTensors(*(x if x is None or x.dtype is torch.bool else x.to(dtype) for x in tensors))


def magnitudes(tensors: LaplacianTensors, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The results with every term in its absolute value: a rounding of any of them is a share of it."""
    x = laplacian._precise(to(tensors, torch.float64))
    p = laplacian._probabilities(x, scale)
    x = LaplacianTensors(*(t if t is None or t.dtype is torch.bool else t.abs() for t in x))
    largest = 1 + scale * (x.q @ x.k.mT).amax() + (0 if x.bias is None else x.bias[x.bias.isfinite()].amax())
    dq, dk, dv = x.jacobians
    zero = torch.zeros((), dtype=torch.float64)

    def pairs(a: Tensor | None, b: Tensor | None) -> Tensor:
        return zero if a is None or b is None else a @ b.mT * scale

    slope = pairs(dq, x.k) + pairs(x.q, dk)
    centred = slope + (p * slope).sum(-1, keepdim=True) if slope.dim() else zero
    change = p * centred
    out = p @ x.v
    jacobian = (change @ x.v if slope.dim() else zero) + (zero if dv is None else p @ dv)
    rate = pairs(x.q_laplacian, x.k) + pairs(x.q, x.k_laplacian)
    if slope.dim():
        rate = rate + centred.square().sum(0)
    if dq is not None and dk is not None:
        rate = rate + 2 * pairs(dq, dk).sum(0)
    total = zero if x.v_laplacian is None else p @ x.v_laplacian
    if dv is not None and slope.dim():
        total = total + 2 * (change @ dv).sum(0)
    if rate.dim():
        total = total + (p * (rate + (p * rate).sum(-1, keepdim=True))) @ x.v
    return out * largest, jacobian * largest, total * largest


def require(found: tuple[Tensor, ...], tensors: LaplacianTensors, scale: float) -> None:
    """Raise where a result errs by more than the two-error rule allows."""
    exact = laplacian.computed(to(tensors, torch.float64), scale)
    if not tensors.q.numel() * tensors.k.numel():
        for x, due in zip(found, exact, strict=True):
            assert x.dtype is tensors.q.dtype and torch.equal(x.double(), due)
        return
    plain = laplacian.computed(tensors, scale)
    eps = torch.finfo(tensors.q.dtype).eps
    for name, x, due, other, terms in zip(
        ("out", "jacobian", "laplacian"), found, exact, plain, magnitudes(tensors, scale), strict=True
    ):
        assert x.shape == due.shape and x.dtype is tensors.q.dtype, (name, x.shape, x.dtype)
        if not x.numel():
            continue  # a Jacobian by no coordinate
        allowed = 2 * (other.double() - due).abs().amax() + 2 * eps * terms
        error = (x.double() - due).abs()
        assert (error <= allowed).all(), (name, error.max().item(), (error / allowed.clamp(min=1e-300)).max().item())
