"""The raw op of attention on 8-bit floats: its arguments, schema and fake kernel, and the allowed shapes of the
scales.

All are the same for every backend that has the op. ``flashsci::<backend>_fp8_attention`` returns (out, lse). It is
opaque to a compiler and has no gradients. fp8_checks.py has its checks. Scales are not read on the host: NaN,
infinity, zero or less is no error, and gives the result of the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call import kinds
from flashsci.call.ops import bypasses_dispatcher, empty_like_layout
from flashsci.call.problem import Problem
from flashsci.call.schemas import arguments, define_op

FP8 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of e4m3
BLOCKS = (128, 64)  # rows that may share a scale
WHOLE = 1 << 30  # rows that share one where there are no blocks


class FP8Tensors(NamedTuple):
    """The tensors of one call, as kernels take them.

    Dense: q ``[*, Hq, Sq, D]``, k ``[*, Hk, Sk, D]``, v ``[*, Hk, Sk, Dv]`` with equal leading dims, none to two.
    Packed: q ``[Hq, Tq, D]`` and so on. All are e4m3 with a contiguous last dim; scales are fp32, with any strides,
    in the shapes of :func:`rows_per_scale`.
    """

    q: kinds.FixedRows
    k: kinds.FixedRows
    v: kinds.FixedRows
    q_scale: kinds.Scale  # None: 1
    k_scale: kinds.Scale
    v_scale: kinds.Scale
    cu_seqlens_q: kinds.OptionalTable  # int32 [N + 1], contiguous
    cu_seqlens_k: kinds.OptionalTable

    @property
    def sequences(self) -> int:
        """The number of sequences of a packed call; -1: dense."""
        return -1 if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


class FP8Scalars(NamedTuple):
    """The options of one call: 0 is off (softcap), -1 is none (windows) or unknown (longest lengths). ``fast``: sums of
    the tensor cores may run over all keys, and over all columns of q and k."""

    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    softcap: float
    window_left: int
    window_right: int
    lower_right: bool
    out_dtype: torch.dtype
    return_lse: bool
    fast: bool


FP8Attention = Callable[[FP8Tensors, FP8Scalars], tuple[Tensor, Tensor]]
"""A backend's function: returns out like q ``[..., Dv]`` and lse, or ``[0]`` if it is not asked for."""

_ATTENTION = f"({arguments(FP8Tensors, FP8Scalars)}) -> (Tensor out, Tensor lse)"
_T = len(FP8Tensors._fields)


def empty_results(tensors: FP8Tensors, scalars: FP8Scalars) -> tuple[Tensor, Tensor]:
    """Empty tensors for out and lse."""
    q = tensors.q
    out = empty_like_layout(q, (*q.shape[:-1], tensors.v.shape[-1]), scalars.out_dtype)
    return out, q.new_empty(q.shape[:-1] if scalars.return_lse else (0,), dtype=torch.float32)


class Op:
    """A backend's op as its callers have it: ``plain`` computes ordinary tensors, without torch's dispatcher."""

    def __init__(self, plain: FP8Attention, dispatched: Callable[..., Any]) -> None:
        self.plain, self.dispatched = plain, dispatched

    def __call__(self, tensors: FP8Tensors, scalars: FP8Scalars) -> tuple[Tensor, Tensor]:
        if bypasses_dispatcher(tensors):
            return self.plain(tensors, scalars)
        found: tuple[Tensor, Tensor] = self.dispatched(*tensors, *scalars)
        return found


def define(backend: str, attention: FP8Attention, keys: Sequence[str]) -> Op:
    """Define a backend's op for the given dispatch keys."""

    def grouped(*given: Any) -> tuple[FP8Tensors, FP8Scalars]:
        return FP8Tensors(*given[:_T]), FP8Scalars(*given[_T:])

    run = define_op(
        f"{backend}_fp8_attention",
        _ATTENTION,
        lambda *given: attention(*grouped(*given)),
        keys,
        lambda *given: empty_results(*grouped(*given)),
    )
    return Op(attention, run)


def rows_per_scale(scale: Tensor | None, x: Tensor, sequences: int) -> int | None:
    """The number of rows that share a number of ``scale``: one of BLOCKS, or WHOLE; None: the shape does not fit.

    Args:
        scale: ``[]``; for a dense x ``[*, H]`` or ``[*, H, blocks]`` with blocks = ceil(S / 128) or ceil(S / 64); for
            a packed x ``[N, H]`` or ``[slots, H]`` with slots = T // 128 + N or T // 64 + N. Block b of sequence n,
            counted from its first row at cu_seqlens[n], has the slot ``cu_seqlens[n] // block + n + b``: one for
            each, found without a sum over the sequences before it. None: 1.
        x: as in :class:`FP8Tensors`.
        sequences: N, or -1 where x is dense.
    """
    if scale is None or scale.dim() == 0:
        return WHOLE
    rows = x.shape[-2]
    if sequences >= 0:
        if scale.dim() != 2 or scale.shape[1] != x.shape[0]:
            return None
        if scale.shape[0] == sequences:
            return WHOLE
        return next((b for b in BLOCKS if scale.shape[0] == rows // b + sequences), None)
    if scale.shape == x.shape[:-2]:
        return WHOLE
    if scale.dim() != x.dim() - 1 or scale.shape[:-1] != x.shape[:-2]:
        return None
    return next((b for b in BLOCKS if scale.shape[-1] == -(-rows // b)), None)


def lacks(problem: Problem) -> str | None:
    """The reason why no kernel has a call on 8-bit floats, and the alternative; None if there is no reason."""
    asked = (
        (problem.bias, "bias"),
        (problem.mask, "mask"),
        (problem.key_weight, "key_weight"),
        (problem.alibi, "alibi_slopes"),
        (problem.sink, "sink"),
        (problem.dropout_p, "dropout"),
    )
    names = [name for given, name in asked if given]
    if not names:
        return None
    return f"float8_e4m3fn inputs have no {', '.join(names)}; dequantise them (x.float() * scale, in bfloat16) and call again"
