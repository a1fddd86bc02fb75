"""The raw op of the forward Laplacian: its checks, schema and fake kernel, the same for every backend that has one.

``flashsci::<backend>_forward_laplacian`` is opaque to a compiler and knows nothing of autograd:
flashsci/call/laplacian.py has the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashsci.call import arguments
from flashsci.call.kinds import Role, fields
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.call.op_checks import FP32_MAX, need, rows_fit, shapes
from flashsci.call.ops import bypasses_dispatcher
from flashsci.call.schemas import arguments as schema
from flashsci.call.schemas import define_op

MAX_HEAD_DIM = 128  # of kernels
Results = tuple[Tensor, Tensor, Tensor]
Kernel = Callable[[LaplacianTensors, float], Results]

_FIELDS = fields(LaplacianTensors)


class LaplacianOptions(NamedTuple):
    """The numbers of one call."""

    scale: float


def check(tensors: LaplacianTensors) -> None:
    """Check shapes, dtypes and devices of a call.

    Raises:
        TypeError, ValueError: as :func:`flashsci.forward_laplacian` documents.
    """
    q, k, v = tensors[:3]
    arguments.check_tensors(q, k, v)
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least two dims [S, D], got shape {list(x.shape)}")
        if x.dim() != q.dim() or x.shape[:-3] != q.shape[:-3]:
            shapes = ", ".join(str(list(y.shape)) for y in (q, k, v))
            raise ValueError(
                f"q, k and v must have the same leading dims (before heads), got {shapes}; expand them, and their "
                "Jacobians"
            )
    arguments.check_head_dims(q, k, v)
    arguments.check_heads(*[x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v)])
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same number of rows, got {k.shape[-2]} and {v.shape[-2]}")
    for name, x in zip("qkv", (q, k, v), strict=True):
        whole = f"[n, *{name}.shape], with one n for all,"
        _same(tensors, f"{name}_jacobian", (tensors.directions, *x.shape), whole)
        _same(tensors, f"{name}_laplacian", tuple(x.shape), f"{name}'s shape")
    arguments.check_others(_FIELDS, tensors, {Role.SCORES: ((*q.shape[:-1], k.shape[-2]), "Hq, Sq, Sk")})


def _same(tensors: LaplacianTensors, name: str, shape: tuple[int, ...], wanted: str) -> None:
    """Check an optional tensor of this shape, which ``wanted`` describes."""
    x, declared = getattr(tensors, name), _FIELDS[name].argument
    assert declared is not None
    if x is None:
        return
    arguments.check_dtype(name, x, declared, tensors.q.dtype)
    arguments.same_device(tensors.q, **{name: x})
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have {wanted} {list(shape)}, got {list(x.shape)}")


def empty_results(tensors: LaplacianTensors) -> Results:
    """Empty tensors for output, Jacobian and Laplacian."""
    q, shape = tensors.q, (*tensors.q.shape[:-1], tensors.v.shape[-1])
    return q.new_empty(shape), q.new_empty((tensors.directions, *shape)), q.new_empty(shape)


def define(backend: str, kernel: Kernel, keys: Sequence[str]) -> Kernel:
    """Define a backend's op for the given dispatch keys; returns the function that calls it.

    Args:
        kernel: takes checked tensors with head dims up to :data:`MAX_HEAD_DIM`, and the scale.
    """

    def run(*given: Any) -> Results:
        *every, scale = given
        tensors = LaplacianTensors(*every)
        q, k, v = tensors[:3]
        need(min(x.dim() for x in (q, k, v)) >= 2, f"q, k and v are [*, H, S, D] or [S, D]: {shapes(q=q, k=k, v=v)}")
        rows_fit(q, k, v, MAX_HEAD_DIM)
        check(tensors)
        need(math.isfinite(scale) and abs(scale) <= FP32_MAX, f"scale must be a finite float32 number, got {scale}")
        return kernel(tensors, scale)

    op = define_op(
        f"{backend}_forward_laplacian",
        f"({schema(LaplacianTensors, LaplacianOptions)}) -> (Tensor out, Tensor jacobian, Tensor laplacian)",
        run,
        keys,
        lambda *given: empty_results(LaplacianTensors(*given[:-1])),
    )

    def call(tensors: LaplacianTensors, scale: float) -> Results:
        if bypasses_dispatcher(tensors):
            return kernel(tensors, scale)
        found: Results = op(*tensors, scale)
        return found

    return call
