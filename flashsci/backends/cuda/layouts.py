"""The limits of the kernels on the memory layout of tensors: a Problem has no strides and cannot express them.

This module is separate from the library: nothing here loads it or asks a device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashsci.call.ops import (
    NEED_BIAS,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Scalars,
    Tensors,
)
from flashsci.call.problem import sums_bias

NEED_ALL = NEED_Q | NEED_K | NEED_V | NEED_BIAS


def fits_small(rows: int, dims: tuple[int, int]) -> bool:
    """Whether sequences and head dims are within the limits of csrc/sm80/small."""
    return rows <= 32 and max(dims) <= 64 and not any(d % 4 for d in dims)


def is_small(tensors: Tensors, scalars: Scalars) -> bool:
    """Whether csrc/sm80/small takes a call; strides are not examined."""
    q, k, v = tensors.q, tensors.k, tensors.v
    fits = fits_small(max(q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1]))
    return (
        fits
        and tensors.cu_seqlens_q is None
        and not scalars.softcap
        and q.shape[:-2] == k.shape[:-2]
    )


def takes_weights(tensors: Tensors, scalars: Scalars) -> bool:
    """The same for a call with key weights, which take the place of a bias."""
    single = tensors.q.dtype == torch.float32
    return single and tensors.bias is None and is_small(tensors, scalars)


def bias_or_weights(tensors: Tensors) -> Tensor | None:
    """The tensor that the library takes as a bias: key weights as [*, Hk or 1, 1, Sk], if a call has them."""
    return tensors.bias if tensors.key_weight is None else tensors.key_weight.unsqueeze(-2)


def bias_or_weights_needed(need: int) -> int:
    """``need`` in the library's form: it treats the gradient of key weights as that of a bias."""
    return need & ~NEED_KEY_WEIGHT | (NEED_BIAS if need & NEED_KEY_WEIGHT else 0)


def whole_rows(tensors: Tensors) -> Tensors:
    """The tensors; with key weights, rows of q, k and v begin at multiples of 16 bytes, because no kernel takes
    others."""
    if tensors.key_weight is None:
        return tensors
    q, k, v = (on_16_bytes(x) for x in tensors[:3])
    return tensors._replace(q=q, k=k, v=v)


def on_16_bytes(x: Tensor) -> Tensor:
    """x of float32, copied unless its rows begin at multiples of 16 bytes."""
    steps = [s for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    aligned = x.data_ptr() % 16 == 0 and not any(s % 4 for s in steps)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _sums_bias_on_chip(saved: Saved, need: int) -> bool:
    """Whether csrc/sm90/triangle_bwd computes a call's gradients together, with dbias of many members in registers.

    This is the condition of its `takes`, without addresses.
    """
    q, k, v, bias, _, mask, cu_seqlens_q, *_ = saved.tensors
    scalars, dims = saved.scalars, (q.shape[-1], v.shape[-1])
    banded = scalars.softcap or scalars.window_left >= 0 or scalars.window_right >= 0
    if bias is None or cu_seqlens_q is not None or banded or need & NEED_ALL != NEED_ALL:
        return False
    lead = (1,) * (5 - q.dim()) + q.shape[:-2]
    owned = (1,) * (5 - bias.dim()) + bias.shape
    shares = [n for n, m in zip(lead[:2], owned[:2], strict=True) if m == 1]
    shapes = (
        q.dtype != torch.float32
        and max(dims) <= 32
        and not any(dim % 8 for dim in dims)
        and q.shape[-3:-2] == k.shape[-3:-2]
    )
    rows, keys = q.shape[-2], k.shape[-2]
    whole = rows > 64 and keys > 64 and owned[2:] == (lead[2], rows, keys)
    by_key = mask is None or mask.shape[-2] == 1 or mask.stride(-2) == 0
    ordered = not scalars.deterministic or rows <= 768  # two panels of queries
    return shapes and whole and by_key and ordered and math.prod(shares) >= 16


def _small_steps(x: Tensor) -> bool:
    """Whether strides are within the limits of csrc/sm80/small: `Steps` of its config.cuh."""
    most = (2**31 - 1) // 32, 2**32 - 1, 2**32 - 1  # bytes from row to row, of heads and members
    steps = x.stride()[-2::-1]
    within = all(s * x.element_size() <= n for s, n in zip(steps, most, strict=False))
    return within and not any(s % 4 for s in steps)


def takes_small(saved: Saved, need: int) -> bool:
    """Whether csrc/sm80/small, which comes before Hopper's kernels, computes a call's gradients: its `takes`, without
    addresses."""
    q, k, v, bias, *_ = saved.tensors
    if not is_small(saved.tensors, saved.scalars):
        return False
    if not all(_small_steps(x) for x in (q, k, v, saved.out)):
        return False
    weighted = saved.tensors.key_weight is not None
    if weighted:
        if not takes_weights(saved.tensors, saved.scalars):
            return False
        bias, need = bias_or_weights(saved.tensors), bias_or_weights_needed(need)
    if bias is None or not need & NEED_BIAS:
        return True
    lead = (1,) * (bias.dim() - q.dim()) + q.shape[:-2]
    own = [True, *(a == b for a, b in zip(lead, bias.shape[:-2], strict=True))]
    of_keys = bias.shape[-2] == 1 and (weighted or q.shape[-2] != 1)
    heads = own[-1] or (of_keys and q.shape[-3] <= 8)
    return all(own[:-1]) and heads and bias.shape[-1] == k.shape[-2]


def hopper_takes(saved: Saved, need: int) -> bool:
    """Whether the Hopper backward takes the bias and mask of a call in their memory layout.

    These are the conditions of TMA and of `takes_pairs` of csrc/sm90. They are evaluated here because a kernel that
    another backend replaces must not be launched.
    """
    q, _, v, bias, weights, mask, *_ = saved.tensors
    if weights is not None:
        return takes_small(saved, need)
    if (bias is None and mask is None) or _sums_bias_on_chip(saved, need):
        return True
    if takes_small(saved, need):
        return True
    dims = q.shape[-1], v.shape[-1]
    if saved.scalars.softcap or max(dims) > 128 or any(dim % 8 for dim in dims):
        return False

    def of_keys(x: Tensor) -> bool:
        return x.shape[-2] == 1 or x.stride(-2) == 0

    def by_tiles(x: Tensor) -> bool:
        unit = 16 // x.element_size()
        return (
            x.shape[-1] > 1
            and x.stride(-1) == 1
            and x.storage_offset() % unit == 0
            and all(n == 1 or s % unit == 0 for n, s in zip(x.shape[:-1], x.stride(), strict=False))
        )

    masked = mask is not None and not of_keys(mask)
    if mask is not None and masked and not by_tiles(mask):
        return False
    if bias is None or of_keys(bias):
        return True
    apart = bias.dtype == torch.float32
    if masked and not (apart and max(dims) <= 64):
        return False
    # A gradient that is stored by tiles: its rows are whole multiples of 16 bytes.
    whole = bias.shape[-1] * bias.element_size() % 16 == 0
    if need & NEED_BIAS and not sums_bias(bias, q.shape[:-2]) and not whole:
        return False
    return (apart or bias.dtype == q.dtype) and by_tiles(bias)
