"""The forward Laplacian of attention: output, Jacobian and Laplacian by the coordinates of the inputs in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.call import arguments, laplacian, transforms
from flashsci.call.kinds import Role, fields
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.call.ops import bypasses_dispatcher
from flashsci.choice import backends

_FIELDS = fields(LaplacianTensors)
_HALVES = ("jacobian", "laplacian")


class ForwardLaplacian(NamedTuple):
    """The results of :func:`forward_laplacian`, in q's dtype."""

    out: Tensor
    """``[*, Hq, Sq, Dv]``: softmax(S) v."""
    jacobian: Tensor
    """``[n, *, Hq, Sq, Dv]``: the derivative of ``out`` by each of the n coordinates."""
    laplacian: Tensor
    """``[*, Hq, Sq, Dv]``: the sum over the coordinates of its second derivatives."""


def forward_laplacian(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_jacobian: Tensor | None = None,
    k_jacobian: Tensor | None = None,
    v_jacobian: Tensor | None = None,
    q_laplacian: Tensor | None = None,
    k_laplacian: Tensor | None = None,
    v_laplacian: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> ForwardLaplacian:
    """Attention with its Jacobian and its Laplacian by n coordinates that q, k and v depend on.

    Layer by layer it carries ``sum_i d^2 f / dx_i^2`` through a network: the kinetic energy of a wavefunction, the
    residual of a differential equation, the trace in score matching. A loop over the coordinates would compute the
    softmax n times, and reverse over forward would keep all of it.

    Args:
        q: queries ``[..., Hq, Sq, D]``, float16, bfloat16, float32 or float64; ``[Sq, D]`` is one head.
        k: keys ``[..., Hk, Sk, D]``, same leading dims; Hq must be a multiple of Hk.
        v: values ``[..., Hk, Sk, Dv]``.
        q_jacobian, k_jacobian, v_jacobian: ``[n, *q.shape]`` and so on: derivatives by the coordinates, in q's
            dtype. None: constant.
        q_laplacian, k_laplacian, v_laplacian: the shapes of q, k and v: their Laplacians. None: zero.
        bias: broadcastable to ``[..., Hq, Sq, Sk]``, as in :func:`flashsci.attention`; constant in the coordinates.
        mask: bool, likewise; True = attend.
        scale: factor of q k^T; default ``1 / sqrt(D)``.

    Returns:
        :class:`ForwardLaplacian`: (out, jacobian, laplacian), zero in rows that see no key. Computed in float32, or
        in float64 for float64. Differentiable in all floating tensors to any order; the backward computes blocks of
        rows again, and its memory beyond the results is that of a block. Without Jacobians n is 0.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes or devices that do not fit; nested tensors.

    Examples:
        >>> import torch, flashsci
        >>> x = torch.randn(5, 3)  # five electrons: 15 coordinates
        >>> w = torch.randn(3, 8)
        >>> rows = (x @ w)[None]  # [H, S, D], linear in x: no Laplacian
        >>> jacobian = (torch.eye(15).view(15, 5, 3) @ w)[:, None]
        >>> given = dict(q_jacobian=jacobian, k_jacobian=jacobian, v_jacobian=jacobian)
        >>> found = flashsci.forward_laplacian(rows, rows, rows, **given)
        >>> found.jacobian.shape, found.laplacian.shape
        (torch.Size([15, 1, 5, 8]), torch.Size([1, 5, 8]))

    Source: Li et al., "A computational framework for neural network-based variational Monte Carlo with Forward
        Laplacian", arXiv:2307.08214.
    """
    jacobians, laplacians = (q_jacobian, k_jacobian, v_jacobian), (q_laplacian, k_laplacian, v_laplacian)
    tensors = LaplacianTensors(q, k, v, *jacobians, *laplacians, bias, mask)
    for name, x in zip(tensors._fields, tensors, strict=True):
        if x is not None or name in "qkv":
            arguments.check_type(name, x, "" if name in "qkv" else " or None")
    transforms.check("forward_laplacian", **dict(zip(tensors._fields, tensors, strict=True)))
    tensors = tensors._replace(bias=arguments.widened(bias, q.dtype))
    _check(tensors)
    factor = arguments.number("scale", scale, optional=True)
    factor = q.shape[-1] ** -0.5 if factor is None else factor
    kind = "cpu" if q.is_meta else q.device.type
    with torch.autocast(kind, enabled=False):
        return ForwardLaplacian(*laplacian.compute(tensors, factor, _kernels(tensors)))


def _check(tensors: LaplacianTensors) -> None:
    """Check shapes, dtypes and devices of a call."""
    q, k, v = tensors[:3]
    if q.is_nested or k.is_nested or v.is_nested:
        raise ValueError("forward_laplacian takes no nested tensors; give padded ones, with a mask")
    arguments.check_tensors(q, k, v)
    for name, x in zip("qkv", tensors[:3], strict=True):
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least two dims [S, D], got shape {list(x.shape)}")
        if x.dim() != q.dim() or x.shape[:-3] != q.shape[:-3]:
            shapes = ", ".join(str(list(y.shape)) for y in tensors[:3])
            raise ValueError(
                f"q, k and v must have the same leading dims (before heads), got {shapes}; expand them, and their Jacobians"
            )
    arguments.check_head_dims(q, k, v)
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v)]
    arguments.check_heads(*heads)
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same number of rows, got {k.shape[-2]} and {v.shape[-2]}")
    n = tensors.directions
    for name, x in zip("qkv", tensors[:3], strict=True):
        for half, shape in zip(_HALVES, ((n, *x.shape), tuple(x.shape)), strict=True):
            given = getattr(tensors, f"{name}_{half}")
            if given is None:
                continue
            arguments.check_dtype(f"{name}_{half}", given, _argument(f"{name}_{half}"), q.dtype)
            arguments.same_device(q, **{f"{name}_{half}": given})
            if tuple(given.shape) != shape:
                wanted = f"[n, *{name}.shape], with one n for all," if half == "jacobian" else f"{name}'s shape"
                raise ValueError(f"{name}_{half} must have {wanted} {list(shape)}, got {list(given.shape)}")
    full = (*q.shape[:-1], k.shape[-2])
    arguments.check_others(_FIELDS, tensors, {Role.SCORES: (full, "Hq, Sq, Sk")})


def _argument(name: str) -> arguments.Argument:
    found = _FIELDS[name].argument
    assert found is not None
    return found


def _kernels(tensors: LaplacianTensors):  # type: ignore[no-untyped-def]
    """Triton's kernels for the call, or None where they do not serve it."""
    q = tensors.q
    given = [x for x in tensors if x is not None]
    if not (q.is_cuda and q.dtype is not torch.float64 and tensors.directions and bypasses_dispatcher(given)):
        return None
    if backends.requested("auto")[0] not in ("auto", "triton") or backends.find("triton").unavailable() is not None:
        return None
    from flashsci.backends.triton.plans import laplacian as kernels

    return kernels.compute if kernels.serves(tensors) else None
