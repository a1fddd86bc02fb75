"""The source of gradients of a bias and of key weights, by the dims that the bias is broadcast along (p: a Plan of
dense.py)."""

import torch

from flashsci.backends.triton.kernels.backward_queries import NO_BIAS_GRADIENT, ROW_SUMS, STORE
from flashsci.call.ops import empty_bias_gradient

NO_ROUTE = NO_BIAS_GRADIENT.value, None, None, False


def bias_route(p, bias, lse, pitched: bool = False) -> tuple:
    """The source of a bias gradient (see the heads of the kernels' files).

    A tuple of: what the kernel by queries does with it, the tensor that this kernel fills, the tensor of its sums
    over queries, and whether it has a kernel of its own. ``pitched``: as ops.pitches_bias_gradient says.
    """
    if bias.shape == ((p.heads, p.bias_total) if p.ragged else p.score_shape):
        # Scores that no query tile visits are not written.
        if p.window or p.ragged:
            return STORE.value, bias.new_zeros(bias.shape), None, False
        found = empty_bias_gradient(bias, pitched)
        return STORE.value, found.zero_() if p.tiles else found, None, False
    if not p.ragged and bias.shape[-2] == 1:
        shape = (*lse.shape[:-1], p.size_k)
        sums = torch.empty(shape, dtype=torch.float32, device=bias.device)
        return NO_BIAS_GRADIENT.value, None, sums, False
    if not p.ragged and bias.shape[-1] == 1:
        return ROW_SUMS.value, torch.empty_like(lse), None, False
    return NO_BIAS_GRADIENT.value, None, None, True


def bias_parts(p, bias, splits: int) -> torch.Tensor:
    """The tensor that the kernel of a shared bias fills. Blocks of a ragged bias need not cover it."""
    return (torch.zeros if p.ragged else torch.empty)(
        (splits, *bias.shape),
        dtype=bias.dtype if splits == 1 else torch.float32,
        device=bias.device,
    )


def bias_result(bias, use: int, found, sums, shared: bool) -> torch.Tensor:
    """The bias gradient from the tensors of `bias_route`, after kernels have filled them."""
    if sums is not None:
        return reduce_to(sums.unsqueeze(-2), bias)
    if use == ROW_SUMS.value:
        return reduce_to(found.unsqueeze(-1), bias)
    if shared:
        return found[0] if len(found) == 1 else found.sum(0).to(bias.dtype)
    return found


def reduce_to(sums: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """fp32 sums over the dims that the bias is broadcast along."""
    dims = [d for d, (n, m) in enumerate(zip(sums.shape, bias.shape, strict=True)) if n != m]
    return (sums.sum(dims, keepdim=True) if dims else sums).to(bias.dtype)
