"""The raw ops of paged attention: their arguments, schemas and fake kernels, the same for every backend that has them.

``flashsci::<backend>_paged_attention`` writes into the ``out`` it is given and returns the lse, so that a serving
engine's own buffer is filled without a copy; ``flashsci::<backend>_write_kv_cache`` writes into the caches. Both are
opaque to a compiler and have no gradients. paged_checks.py has their checks.

Numbers in tensors stay on the device. Impossible pages, lengths and slots are clamped or skipped; a scale of NaN,
infinity, zero or less gives the result of the formula. Neither is an error, and neither accesses memory beyond a
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call import kinds
from flashsci.call.op_checks import on_one_device
from flashsci.call.ops import bypasses_dispatcher, statistics_dtype
from flashsci.call.schemas import LIBRARY, arguments, define_op

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagedTensors(NamedTuple):
    """The tensors of one call, as kernels take them: the last dim of the first three and all of the next three contiguous."""

    q: kinds.FixedRows  # [T, Hq, D]
    k_cache: kinds.Cache  # [pages, page, Hk, D], q's dtype or one of FP8
    v_cache: kinds.Cache  # [pages, page, Hk, Dv]
    block_table: kinds.Table  # int32 [N, max_pages]
    seqused_k: kinds.Table  # int32 [N]
    cu_seqlens_q: kinds.Table  # int32 [N + 1]
    sink: kinds.FixedSink  # [Hq], q's dtype or fp32
    k_scale: kinds.Scale  # fp32 [N, Hk], any strides
    v_scale: kinds.Scale


class PagedScalars(NamedTuple):
    """The options of one call: 0 is off (softcap), -1 is none (windows) or unknown (the longest length, which may also be
    :data:`flashsci.call.ops.BATCH_INVARIANT`)."""

    max_seqlen_q: int
    scale: float
    softcap: float
    window_left: int
    window_right: int
    return_lse: bool


class PagedOps(NamedTuple):
    """The paged functions of a backend."""

    attention: Callable[[PagedTensors, Tensor, PagedScalars], Tensor]
    """Fills out ``[T, Hq, Dv]`` and returns the lse ``[Hq, T]``, or ``[0]`` if it is not asked for."""
    write_kv_cache: Callable[..., None] | None
    """(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale): scales fp32 ``[Hk]`` or None. None: it has none."""


_ATTENTION = f"({arguments(PagedTensors)}, Tensor(a!) out, {arguments(PagedScalars, integer='int')}) -> Tensor"
_WRITE = (
    "(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? k_scale, "
    "Tensor? v_scale) -> ()"
)
_T, _S = len(PagedTensors._fields), len(PagedScalars._fields)


def empty_lse(q: Tensor, wanted: bool) -> Tensor:
    """An empty tensor for the lse of q ``[T, Hq, D]``."""
    shape = (q.shape[1], q.shape[0]) if wanted else (0,)
    return q.new_empty(shape, dtype=statistics_dtype(q.dtype))


def _fake(*given: Any) -> Tensor:
    # The library's op has one more option.
    tensors, scalars = PagedTensors(*given[:_T]), PagedScalars(*given[_T + 1 : _T + 1 + _S])
    return empty_lse(tensors.q, scalars.return_lse)


def register_fake(name: str) -> None:
    """Register the fake kernel of an op of attention, for compilers."""
    torch.library.register_fake(f"flashsci::{name}", on_one_device(_fake), lib=LIBRARY)


def define(backend: str, attention: Callable[..., Any], write: Callable[..., Any], keys: Sequence[str]) -> PagedOps:
    """Define a backend's two ops for the given dispatch keys.

    Args:
        attention: takes (tensors, out, scalars) and returns the lse.
        write: takes the arguments of the op.
    """

    def flat(*given: Any) -> Tensor:
        tensors, out, scalars = given[:_T], given[_T], given[_T + 1 :]
        lse: Tensor = attention(PagedTensors(*tensors), out, PagedScalars(*scalars))
        return lse

    run = define_op(f"{backend}_paged_attention", _ATTENTION, flat, keys, _fake)
    store = define_op(f"{backend}_write_kv_cache", _WRITE, write, keys, lambda *given: None)

    # torch's way to the same functions costs a third of a step's host time.
    def direct(tensors: PagedTensors, out: Tensor, scalars: PagedScalars) -> Tensor:
        plainly = bypasses_dispatcher((*tensors, out))
        lse: Tensor = attention(tensors, out, scalars) if plainly else run(*tensors, out, *scalars)
        return lse

    def direct_write(*given: Tensor | None) -> None:
        write(*given) if bypasses_dispatcher(given) else store(*given)

    return PagedOps(direct, direct_write)
