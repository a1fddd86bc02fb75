"""Attention with its Jacobian and Laplacian by the coordinates of its inputs, block by block in PyTorch.

    S = scale Q K^T + bias, masked;   P = softmax(S)
    d_i S = scale (d_i Q K^T + Q d_i K^T);   C_i = d_i S - sum_j P d_i S
    L S = scale (L Q K^T + Q L K^T + 2 sum_i d_i Q d_i K^T)
    d_i out = (P C_i) V + P d_i V
    X = L S + sum_i C_i^2;   L P = P (X - sum_j P X)
    L out = (L P) V + 2 sum_i (P C_i) d_i V + P L V

d_i is the derivative by coordinate i, L the sum of the second derivatives over all coordinates. Source: Li et al.,
arXiv:2307.08214 (the forward Laplacian); the formulas above are its rule for softmax attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.call import recompute
from flashsci.call.laplacian_ops import Kernel
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.call.torch_state import transforming

#: Numbers of a block with a direction for each, at most, unless one row has more.
BLOCK = 1 << 24


def _precise(tensors: LaplacianTensors) -> LaplacianTensors:
    """The numbers in the dtype of the computation, k and v with a head for each of q."""
    dtype = torch.float64 if tensors.q.dtype is torch.float64 else torch.float32
    heads = tensors.q.shape[-3] if tensors.q.dim() > 2 else None
    found = {}
    for name, x in zip(tensors._fields, tensors, strict=True):
        if x is not None and x.is_floating_point():
            x = x.to(dtype)
            if name[0] in "kv" and heads is not None:
                x = reference.per_query_head(x, heads)
        found[name] = x
    return LaplacianTensors(**found)  # type: ignore[arg-type]


def _sum(*terms: Tensor | None) -> Tensor | None:
    """The sum of those that are there."""
    present = [x for x in terms if x is not None]
    return sum(present[1:], present[0]) if present else None


def _times(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """The product x y^T over the last dims, None for a factor of zeros."""
    return None if x is None or y is None else x @ y.mT


def _probabilities(x: LaplacianTensors, scale: float) -> Tensor:
    """P of a block; zero in rows that see no key."""
    scores = x.q @ x.k.mT * scale
    if x.bias is not None:
        scores = scores + x.bias
    if x.mask is not None:
        scores = scores.masked_fill(~x.mask, -math.inf)
    if not scores.shape[-1]:
        return scores
    top = scores.detach().amax(-1, keepdim=True)
    hidden = top == -math.inf
    p = torch.exp(scores - top.masked_fill(hidden, 0))
    return p / p.sum(-1, keepdim=True).masked_fill(hidden, 1)


def _rows(x: LaplacianTensors, scale: float, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, Jacobian and Laplacian of a block of rows, ``step`` directions at a time."""
    p = _probabilities(x, scale)
    curvature = _sum(_times(x.q_laplacian, x.k), _times(x.q, x.k_laplacian))  # L S / scale
    pairs = x.q_jacobian is not None and x.k_jacobian is not None
    out, n = p @ x.v, x.directions
    square = torch.zeros_like(p)  # sum_i C_i^2
    total = torch.zeros_like(out) if x.v_laplacian is None else p @ x.v_laplacian
    jacobian = [out.new_zeros((0, *out.shape))]
    for first in range(0, n, step):
        dq, dk, dv = (None if d is None else d[first : first + step] for d in x.jacobians)
        slope = _sum(_times(dq, x.k), _times(x.q, dk))
        found = None if dv is None else p @ dv
        if slope is not None:
            slope = slope * scale
            centred = slope - (p * slope).sum(-1, keepdim=True)
            square = square + centred.square().sum(0)
            change = p * centred
            found = _sum(found, change @ x.v)
            if dv is not None:
                total = total + 2 * (change @ dv).sum(0)
        if pairs:
            curvature = _sum(curvature, 2 * _times(dq, dk).sum(0))  # type: ignore[union-attr]
        jacobian.append(out.new_zeros((min(step, n - first), *out.shape)) if found is None else found)
    rate = square if curvature is None else square + curvature * scale
    change = p * (rate - (p * rate).sum(-1, keepdim=True))
    return out, torch.cat(jacobian), total + change @ x.v


def _block(tensors: LaplacianTensors, rows: slice, scale: float, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """The results of these rows in the dtype of q."""
    cut = {n: x[..., rows, :] for n, x in zip(tensors._fields, tensors, strict=True) if x is not None and n[0] == "q"}
    for name, x in (("bias", tensors.bias), ("mask", tensors.mask)):
        if x is not None and x.dim() > 1 and x.shape[-2] > 1:
            cut[name] = x[..., rows, :]
    found = _rows(_precise(tensors._replace(**cut)), scale, step)
    dtype = tensors.q.dtype
    return found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)


def _blocks(tensors: LaplacianTensors, whole: bool) -> tuple[Iterator[slice], int]:
    """The blocks of rows, and the directions at a time; all of them at once if ``whole``, for a block with a graph."""
    rows, directions = tensors.q.shape[-2], max(1, tensors.directions)
    pairs = max(1, math.prod(tensors.q.shape[:-2])) * max(1, tensors.k.shape[-2])  # of one row
    count = max(1, BLOCK // (pairs * (directions if whole else 1)))
    step = directions if whole else max(1, BLOCK // (pairs * min(count, max(1, rows))))
    return (slice(n, n + count) for n in range(0, rows, count)), step


def computed(tensors: LaplacianTensors, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output [*, Hq, Sq, Dv], Jacobian [n, *, Hq, Sq, Dv] and Laplacian of a call, differentiable to any order."""
    rows, step = _blocks(tensors, False)
    parts = [_block(tensors, part, scale, step) for part in rows]
    if not parts:
        return _block(tensors, slice(None), scale, step)
    if len(parts) == 1:
        return parts[0]
    out, jacobian, laplacian = (torch.cat(pieces, -2) for pieces in zip(*parts, strict=True))
    return out, jacobian, laplacian


class ForwardLaplacian(torch.autograd.Function):
    """The results of a call, whose backward computes each block of rows again."""

    @staticmethod
    def forward(ctx: Any, compute: Any, scale: float, *given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        ctx.scale = scale
        found: tuple[Tensor, Tensor, Tensor] = compute(LaplacianTensors(*given), scale)  # type: ignore[arg-type]
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        given, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        sums: list[Tensor | None] = [None] * len(given)
        if any(g is not None for g in cotangents):
            rows, step = _blocks(LaplacianTensors(*given), True)
            for part in rows:

                def compute(*inputs: Tensor | None, part: slice = part) -> Any:
                    return _block(LaplacianTensors(*inputs), part, ctx.scale, step)  # type: ignore[arg-type]

                # The vmap behind is_grads_batched has no rule for a slice of all rows: torch makes it an alias.
                count = min(part.stop, LaplacianTensors(*given).q.shape[-2]) - part.start
                parts = [None if g is None else g.narrow(-2, part.start, count) for g in cotangents]
                found = recompute.gradients(compute, given, needed, parts)
                sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, found, strict=True)]
        return (None, None, *sums)


def compute(
    tensors: LaplacianTensors, scale: float, kernels: Kernel | None = None, needs_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a checked call, differentiable to any order.

    Args:
        kernels: a function like :func:`computed` without derivatives, or None.
        needs_grad: whether a derivative is wanted.
    """
    if transforming() or (needs_grad and torch.compiler.is_compiling()):
        return computed(tensors, scale)
    if not needs_grad:
        return (kernels or computed)(tensors, scale)
    found: tuple[Tensor, Tensor, Tensor] = ForwardLaplacian.apply(kernels or computed, scale, *tensors)
    return found
