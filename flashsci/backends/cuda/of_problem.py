"""The kernels that would compute a call which only a Problem describes, with tensors in their usual layout."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from flashsci.backends.cuda import decisions, naming
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem


def _empty(shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bias(p: Problem) -> Tensor | None:
    """The bias in the rank of the scores."""
    if p.bias_shape is None or p.batch is None:
        return None
    shape = (*(1,) * (len(p.batch) + 3 - len(p.bias_shape)), *p.bias_shape)
    if not p.inner_heads:
        return _empty(shape, p.bias_dtype)
    *lead, heads, rows, keys = shape
    return _empty((*lead, rows, keys, heads), p.bias_dtype).movedim(-1, -3)


def _tensors(p: Problem) -> Tensors:
    """The tensors of a call; a mask and weights differ by sequence and not by head. A mask by pairs beside a bias differs as that
    does."""
    assert p.batch is not None and p.seq_q is not None and p.seq_k is not None
    q, k, v = (
        _empty((*p.batch, heads, rows, dim), p.dtype)
        for heads, rows, dim in (
            (p.heads_q, p.seq_q, p.head_dim),
            (p.heads_k, p.seq_k, p.head_dim),
            (p.heads_k, p.seq_k, p.head_dim_v),
        )
    )
    rows, bias = p.seq_q if p.mask_by_query else 1, _bias(p)
    lead = p.batch if bias is None or not p.mask_by_query else bias.shape[:-3]
    return Tensors(
        q,
        k,
        v,
        bias,
        key_weight=_empty((*p.batch, 1, p.seq_k), torch.float32) if p.key_weight else None,
        mask=_empty((*lead, 1, rows, p.seq_k), torch.bool) if p.mask else None,
        alibi_slopes=_empty((p.heads_q,), torch.float32) if p.alibi else None,
    )


@functools.lru_cache(maxsize=4096)
def kernels(problem: Problem, backward: bool) -> tuple[str, ...]:
    """The kernels of the forward, or of the gradients, in the order of their launches (:mod:`~.rehearsal`).

    They are () if no kernel takes the call, if a size is not known, or if no library is here. Packed, paged and 8-bit
    calls have other descriptions and get ().
    """
    p = problem
    sizes = (*(p.batch or ()), p.seq_q or 0, p.seq_k or 0, p.heads_q, p.heads_k)
    if p.varlen or p.paged or p.batch is None or p.dtype.itemsize == 1 or math.prod(sizes) == 0:
        return ()
    window = p.window_left, p.window_right
    scale = p.head_dim**-0.5  # the usual one; csrc/sm90/triangle_fwd takes none above ln 2
    scalars = Scalars(-1, -1, scale, p.softcap, *window, p.lower_right, 0.0, p.precision, p.deterministic)
    wanted = NEED_Q | NEED_K | NEED_V | (NEED_BIAS if p.bias_grad else 0)
    device = torch.device(p.device_type)
    with decisions.unobserved():
        rows, found = naming.as_read(_tensors(p), scalars, wanted if p.requires_grad else 0, device)
        if backward:
            found = decisions.backward(Saved(rows, *fake_forward(rows), scalars), wanted, device=device)
    return found or ()
