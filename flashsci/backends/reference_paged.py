"""Paged attention and the cache update in plain PyTorch: every sequence's keys are gathered, then reference.py's formula.

It runs on any device and dtype; in float64 it is the oracle. In 16 bits it computes in fp32 and rounds once. It reads
lengths on the host, which waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.backends.host_reads import check_readable
from flashsci.call import paged_checks
from flashsci.call.ops import BATCH_INVARIANT, Scalars, Tensors, statistics_dtype
from flashsci.call.paged_ops import FP8, PagedScalars, PagedTensors, define, empty_lse


def _attention(tensors: PagedTensors, out: Tensor, scalars: PagedScalars) -> Tensor:
    """Fill ``out``, zero in rows of no sequence, and return the lse, -inf there."""
    paged_checks.attention(tensors, out, scalars, LIMITS)
    paged_checks.attention_apart(tensors, out)
    q = tensors.q
    total, most = q.shape[0], tensors.block_table.shape[1] * tensors.k_cache.shape[1]
    check_readable(tensors.cu_seqlens_q)
    edges = [min(max(edge, 0), total) for edge in tensors.cu_seqlens_q.tolist()]
    lengths = [min(max(length, 0), most) for length in tensors.seqused_k.tolist()]
    out.zero_()
    lse = empty_lse(q, True).fill_(-torch.inf)
    for n, length in enumerate(lengths):
        rows = slice(edges[n], edges[n + 1])
        if rows.start < rows.stop:
            found, sums = _sequence(tensors, scalars, n, rows, length)
            out[rows] = found.transpose(0, 1)
            lse[:, rows] = sums
    return lse if scalars.return_lse else lse.new_empty(0)


def _sequence(tensors: PagedTensors, scalars: PagedScalars, n: int, rows: slice, length: int) -> tuple[Tensor, Tensor]:
    """(out ``[Hq, Lq, Dv]``, lse ``[Hq, Lq]``) of sequence n."""
    q = tensors.q[rows].transpose(0, 1).to(statistics_dtype(tensors.q.dtype))
    if scalars.max_seqlen_q == BATCH_INVARIANT:  # sums of products may depend on addresses
        q = q.clone(memory_format=torch.contiguous_format)
    table, first = tensors.block_table[n], 0
    if scalars.window_left >= 0:  # keys that no query sees may have left the cache
        first = max(0, length - q.shape[1] - scalars.window_left)
    k = gathered(tensors.k_cache, table, length, tensors.k_scale, n, q.dtype)[first:]
    v = gathered(tensors.v_cache, table, length, tensors.v_scale, n, q.dtype)[first:]
    options = Scalars(
        -1, -1, scalars.scale, scalars.softcap, scalars.window_left, scalars.window_right, True, 0.0, "default", False
    )
    out, lse = reference.forward(Tensors(q, k.transpose(0, 1), v.transpose(0, 1)), options)
    if tensors.sink is None:
        return out, lse
    sink = tensors.sink.to(lse.dtype)[:, None]
    whole = torch.logaddexp(lse, sink)
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - whole))
    return out * share[..., None], whole


def gathered(cache: Tensor, table: Tensor, length: int, scale: Tensor | None, n: int, dtype: torch.dtype) -> Tensor:
    """The first ``length`` rows of sequence n, dequantised: ``[length, Hk, D]`` in ``dtype``."""
    page = cache.shape[1]
    pages = table[: -(-length // page)].long().clamp(0, max(cache.shape[0] - 1, 0))
    # As bytes, because not every device can index 8-bit floats.
    plain = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    rows = plain[pages].flatten(0, 1)[:length]
    rows = rows.view(cache.dtype) if cache.dtype in FP8 else rows
    return rows.to(dtype) if scale is None else rows.to(dtype) * scale[n].to(dtype)[:, None]


def quantised(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x ``[T, Hk, D]`` divided by its scale, as a cache of ``dtype`` stores it: numbers too large for an 8-bit float
    become its largest number."""
    if scale is not None:
        wide = statistics_dtype(x.dtype)
        x = x.to(wide) / scale.to(wide)[:, None]
    if dtype in FP8:
        most = torch.finfo(dtype).max
        x = x.float().clamp(-most, most)
    return x.to(dtype)


def _write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    given = key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale
    paged_checks.write(*given, LIMITS)
    paged_checks.write_apart(*given)
    pages, page = k_cache.shape[:2]
    check_readable(slot_mapping, "slots")
    (rows,) = ((slot_mapping >= 0) & (slot_mapping < pages * page)).nonzero(as_tuple=True)
    slots = slot_mapping[rows]
    where = slots // page, slots % page
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        new = quantised(x[rows], scale, cache.dtype)
        if cache.dtype in FP8:
            cache, new = cache.view(torch.uint8), new.view(torch.uint8)
        cache[where] = new


LIMITS = paged_checks.Limits((torch.float16, torch.bfloat16, torch.float32, torch.float64))
OPS = define("reference", _attention, _write, ("CompositeExplicitAutograd",))
