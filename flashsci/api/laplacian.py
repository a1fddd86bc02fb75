"""The forward Laplacian of attention: output, Jacobian and Laplacian by the coordinates of the inputs in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.api.attention import describe
from flashsci.call import arguments, laplacian, laplacian_ops, transforms
from flashsci.call.kinds import Dense
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.call.torch_state import tracer_paused
from flashsci.choice import backends
from flashsci.choice.choose import PARTS, decide


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
    backend: str = "auto",
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
        backend: "triton" has kernels, for head dims up to 128 in 16 and 32 bits; "reference" is plain PyTorch, block by
            block. "auto" takes the kernels on a GPU where they serve the call. Other names refuse.

    Returns:
        :class:`ForwardLaplacian`: (out, jacobian, laplacian), zero in rows that see no key. Computed in float32, or
        in float64 for float64. Differentiable in all floating tensors to any order, under transforms too; derivatives
        are plain PyTorch. The backward computes blocks of rows again, and its memory beyond the results is that of a
        block. Without Jacobians n is 0.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes or devices that do not fit; nested tensors.
        BackendError: the backend asked for cannot serve the call; its message says which can.

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
    given = dict(zip(tensors._fields, tensors, strict=True))
    for name, x in given.items():
        if x is not None or name in "qkv":
            arguments.check_type(name, x, "" if name in "qkv" else " or None")
    transforms.check("forward_laplacian", **given)
    if q.is_nested or k.is_nested or v.is_nested:
        raise ValueError("forward_laplacian takes no nested tensors; give padded ones, with a mask")
    tensors = tensors._replace(bias=arguments.widened(bias, q.dtype))
    laplacian_ops.check(tensors)
    options = arguments.Options.of(False, None, "upper_left", scale, None, 0.0, False, None, None)
    needs_grad = transforms.needs_grad(*tensors)
    with tracer_paused():
        call = describe(Dense(q, k, v, tensors.bias, mask=mask), options, needs_grad)
    choice = decide(backends.LAPLACIAN, call, backend)
    kernels = None if choice.forward == PARTS else backends.LOADED[backends.LAPLACIAN][choice.forward]
    kind = "cpu" if q.is_meta else q.device.type
    with torch.autocast(kind, enabled=False):
        factor = options.scalars(q.shape[-1]).scale
        return ForwardLaplacian(*laplacian.compute(tensors, factor, kernels, needs_grad))
