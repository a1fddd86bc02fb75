"""The kernels that would compute a call which only a Problem describes, with tensors in their usual layout."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from flashsci.backends.cuda import decisions
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem


def _bias(p: Problem, in_place: bool) -> Tensor | None:
    """The bias in the rank of the scores; its heads stay neighbours in memory if ``in_place``."""
    if p.bias_shape is None or p.batch is None:
        return None
    shape = (*(1,) * (len(p.batch) + 3 - len(p.bias_shape)), *p.bias_shape)
    if not (p.inner_heads and in_place):
        return torch.empty(shape, dtype=p.bias_dtype, device="meta")
    *lead, heads, rows, keys = shape
    return torch.empty(*lead, rows, keys, heads, dtype=p.bias_dtype, device="meta").movedim(-1, -3)


def _tensors(p: Problem, in_place: bool) -> Tensors:
    assert p.batch is not None and p.seq_q is not None and p.seq_k is not None
    q, k, v = (
        torch.empty(*p.batch, heads, rows, dim, dtype=p.dtype, device="meta")
        for heads, rows, dim in (
            (p.heads_q, p.seq_q, p.head_dim),
            (p.heads_k, p.seq_k, p.head_dim),
            (p.heads_k, p.seq_k, p.head_dim_v),
        )
    )
    mask = torch.empty(*p.batch, 1, 1, p.seq_k, dtype=torch.bool, device="meta") if p.mask else None
    return Tensors(q, k, v, _bias(p, in_place), mask=mask)


@functools.lru_cache(maxsize=4096)
def kernels(problem: Problem, backward: bool) -> tuple[str, ...]:
    """The kernels of the forward, or of the gradients, in the order of their launches (:mod:`~.rehearsal`).

    They are () if no kernel takes the call, if a size is not known, or if no library is here. Packed, paged and 8-bit
    calls have other descriptions and get (). A mask is taken for one of keys.
    """
    p = problem
    sizes = (*(p.batch or ()), p.seq_q or 0, p.seq_k or 0, p.heads_q, p.heads_k)
    if p.varlen or p.paged or p.batch is None or p.dtype.itemsize == 1 or math.prod(sizes) == 0:
        return ()
    window = p.window_left, p.window_right
    scale = p.head_dim**-0.5  # the usual one; csrc/sm90/triangle_fwd takes none above ln 2
    scalars = Scalars(-1, -1, scale, p.softcap, *window, p.lower_right, 0.0, p.precision, p.deterministic)
    need = NEED_Q | NEED_K | NEED_V | (NEED_BIAS if p.bias_grad else 0)
    device = torch.device(p.device_type)
    for in_place in (True, False) if p.inner_heads else (False,):
        with decisions.unobserved():
            tensors = _tensors(p, in_place)
            found = decisions.forward(tensors, scalars, device=device)
            if in_place and not any(name.startswith("sm90/pair/") for name in found or ()):
                continue
            if backward:
                saved = Saved(tensors, *fake_forward(tensors), scalars)
                found = decisions.backward(saved, need, device=device)
        return found or ()
    return ()
