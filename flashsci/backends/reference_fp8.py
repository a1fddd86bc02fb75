"""Attention on 8-bit floats in plain PyTorch: q, k and v times their scales in fp32, then reference.py's formula.

It runs on any device. Out is rounded once and P is not rounded to 8 bits: this is the exact meaning of the inputs,
not the result of a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.backends.host_reads import check_readable
from flashsci.call import fp8_checks
from flashsci.call.fp8_ops import WHOLE, FP8Scalars, FP8Tensors, define, rows_per_scale
from flashsci.call.op_checks import kinds, need, remember
from flashsci.call.ops import Scalars, Tensors, follow_layout

_checked: dict[Any, bool] = {}  # kinds of calls whose arguments fit


def _attention(tensors: FP8Tensors, scalars: FP8Scalars) -> tuple[Tensor, Tensor]:
    kind = kinds(*tensors), scalars
    if kind not in _checked:
        fp8_checks.attention(tensors, scalars)
        remember(_checked, kind, True)
    edges = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    for name, x, of in zip(("cu_seqlens_q", "cu_seqlens_k"), edges, tensors[:2], strict=True):
        if x is not None:
            check_readable(x)
            starts = x.tolist()
            need(
                starts[0] >= 0 and starts == sorted(starts) and starts[-1] <= of.shape[-2],
                f"{name} must rise from 0 to at most {of.shape[-2]}, got {starts}",
            )
    q, k, v = (
        dequantised(x, scale, of)
        for x, scale, of in zip(tensors[:3], tensors[3:6], (edges[0], edges[1], edges[1]), strict=True)
    )
    options = Scalars(
        scalars.max_seqlen_q, scalars.max_seqlen_k, scalars.scale, scalars.softcap, scalars.window_left, scalars.window_right,
        scalars.lower_right, 0.0, "default", False,
    )  # fmt: skip
    out, lse = reference.forward(Tensors(q, k, v, cu_seqlens_q=edges[0], cu_seqlens_k=edges[1]), options)
    out = follow_layout(out.to(scalars.out_dtype), tensors.q)
    return out, lse.contiguous() if scalars.return_lse else lse.new_empty(0)


def dequantised(x: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """x ``[*, H, S, D]``, packed ``[H, T, D]``, in fp32."""
    if scale is None or scale.dim() == 0:
        return x.float() if scale is None else x.float() * scale
    sequences = -1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if sequences == 0:
        return x.float()
    block = rows_per_scale(scale, x, sequences)
    assert block is not None, "checked before"
    row = torch.arange(x.shape[-2], device=x.device)
    if cu_seqlens is not None:
        of_rows = scale[slots(cu_seqlens, row, block)].T
    elif block == WHOLE:
        of_rows = scale[..., None]
    else:
        of_rows = scale[..., row // block]
    return x.float() * of_rows[..., None]


def slots(cu_seqlens: Tensor, row: Tensor, block: int) -> Tensor:
    """The index of the scale of each row of a packed tensor, see fp8_ops.rows_per_scale."""
    n = torch.searchsorted(cu_seqlens, row.to(torch.int32), right=True) - 1
    n = n.clamp(0, cu_seqlens.shape[0] - 2)
    first = cu_seqlens[n].long()
    return first // block + n + (row - first) // block if block != WHOLE else n


OP = define("reference", _attention, ("CompositeExplicitAutograd",))
