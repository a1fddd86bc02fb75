"""The checks of the raw op of attention on 8-bit floats, for any caller."""

from __future__ import annotations

import sys
from typing import Any

import torch

from flashsci.call.fp8_ops import FP8, FP8Scalars, FP8Tensors, rows_per_scale
from flashsci.call.kinds import Role, named
from flashsci.call.op_checks import declared, need, numbers, rows, rows_fit, same, shapes, whole

OUT_DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIM = 256  # the largest of kernels


def attention(tensors: FP8Tensors, scalars: FP8Scalars, head_dim: int = sys.maxsize) -> None:
    """Check all of a call; its results are new tensors. ``head_dim``: the largest that a backend serves.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    q, k, v, edges_q, edges_k = tensors.q, tensors.k, tensors.v, tensors.cu_seqlens_q, tensors.cu_seqlens_k
    given = shapes(q=q, k=k, v=v)
    rank = q.dim()
    need(
        2 <= rank <= 5 and k.dim() == v.dim() == rank,
        f"q, k and v must have the same number of dims, 2 to 5: {given}",
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        same(name, x, x.shape, (FP8,), q)
    rows_fit(q, k, v, head_dim)
    need((edges_q is None) == (edges_k is None), "cu_seqlens_q and cu_seqlens_k go together")
    if edges_q is not None and edges_k is not None:
        need(rank == 3, f"packed tensors are [heads, tokens, dim]: {given}")
        for name, x in (("cu_seqlens_q", edges_q), ("cu_seqlens_k", edges_k)):
            need(
                x.dim() == 1 and x.shape[0] >= 1,
                f"{name} must be a vector of N + 1 offsets, got {list(x.shape)}",
            )
            declared(FP8Tensors, name, x, edges_q.shape, q)
    for name, x in (("q_scale", q), ("k_scale", k), ("v_scale", v)):
        scale = getattr(tensors, name)
        if scale is not None:
            declared(FP8Tensors, name, scale, scale.shape, q)
            need(
                rows_per_scale(scale, x, tensors.sequences) is not None,
                f"{name} of shape {list(scale.shape)} does not fit a tensor of shape {list(x.shape)}; flashsci.quantize makes it",
            )
    numbers(scalars.scale, scalars.softcap, scalars.window_left, scalars.window_right)
    check_out_dtype(scalars.out_dtype)


def check_out_dtype(dtype: torch.dtype) -> None:
    if dtype not in OUT_DTYPES:
        allowed = " or ".join(map(str, OUT_DTYPES))
        raise TypeError(f"flashsci: out_dtype must be {allowed}, got {dtype}")


_ROWS, _INDICES = named(FP8Tensors, Role.ROWS), named(FP8Tensors, Role.INDEX)


def as_kernels_read(tensors: FP8Tensors) -> FP8Tensors:
    """The tensors, with copies of those that are not stored as kernels read them."""
    copied: dict[str, Any] = {name: rows(getattr(tensors, name)) for name in _ROWS}
    copied |= {name: whole(getattr(tensors, name)) for name in _INDICES}
    return tensors._replace(**copied)
