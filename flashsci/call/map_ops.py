"""The raw op of the reductions of an attention map: its arguments, schema and fake kernel.

``flashsci::<backend>_map_statistics`` is opaque to a compiler and has no derivatives: flashsci/api/maps.py calls it where
none is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.call import kinds, ops
from flashsci.call.op_checks import need
from flashsci.call.schemas import arguments, define_op

MAX_HEAD_DIM = 256  # of kernels: wider heads would spill
MAX_TOP = 64  # of the probabilities of a row that a kernel finds


class MapCall(NamedTuple):
    """One call, as kernels take it; tensors as those of :class:`flashsci.call.ops.Tensors`."""

    q: kinds.Rows
    k: kinds.Rows
    lse: kinds.Statistics
    bias: kinds.Bias
    key_weight: kinds.KeyWeight
    mask: kinds.Mask
    cu_seqlens_q: kinds.OptionalOffsets
    cu_seqlens_k: kinds.OptionalOffsets
    bias_offsets: kinds.PairOffsets
    alibi_slopes: kinds.Slopes
    scale: float
    softcap: float
    window_left: int
    window_right: int
    lower_right: bool
    precision: str
    caps_bias: bool
    entropy: bool
    largest_score: bool
    key_sum: bool
    top_k: int

    @classmethod
    def of(
        cls, tensors: ops.Tensors, lse: Tensor, scalars: ops.Scalars, wanted: tuple[bool, bool, bool], top_k: int = 0
    ) -> MapCall:
        """The call with these tensors, of which v is not read."""
        return cls(
            tensors.q, tensors.k, lse, tensors.bias, tensors.key_weight, tensors.mask, tensors.cu_seqlens_q,
            tensors.cu_seqlens_k, tensors.bias_offsets, tensors.alibi_slopes, scalars.scale, scalars.softcap,
            scalars.window_left, scalars.window_right, scalars.lower_right, scalars.precision, scalars.caps_bias, *wanted,
            top_k,
        )  # fmt: skip

    @property
    def tensors(self) -> ops.Tensors:
        """The tensors of an attention call, with k in the place of v, which no kernel of a map reads."""
        return ops.Tensors(
            self.q, self.k, self.k, self.bias, self.key_weight, self.mask, self.cu_seqlens_q, self.cu_seqlens_k,
            self.bias_offsets, alibi_slopes=self.alibi_slopes,
        )  # fmt: skip

    @property
    def scalars(self) -> ops.Scalars:
        window = self.window_left, self.window_right
        return ops.Scalars(
            -1, -1, self.scale, self.softcap, *window, self.lower_right, 0.0, self.precision, False, self.caps_bias
        )

    @property
    def wanted(self) -> tuple[bool, bool, bool, bool, bool]:
        """Of each result, whether it is wanted."""
        top = self.top_k != 0
        return self.entropy, self.largest_score, self.key_sum, top, top


RESULTS = ("entropy", "largest_score", "key_sum", "top_values", "top_indices")
SCHEMA = f"({arguments(MapCall)}) -> ({', '.join(f'Tensor {name}' for name in RESULTS)})"


def empty_results(call: MapCall) -> tuple[Tensor, ...]:
    """Empty tensors for :data:`RESULTS`, fp32 but for int64 keys; without elements where not wanted.

    Raises:
        ValueError: a ``top_k`` that the kernels do not have.
    """
    need(
        0 <= call.top_k <= MAX_TOP,
        f"the kernels of maps find top_k from 0 to {MAX_TOP}, got {call.top_k}; use_backend('reference') has no limit",
    )
    rows = call.q.shape[:-1]
    top = *rows, call.top_k
    shapes = rows, rows, (*call.q.shape[:-2], call.k.shape[-2]), top, top
    dtypes = *(torch.float32,) * 4, torch.int64
    return tuple(
        [
            call.q.new_empty(shape if wanted else (0,), dtype=dtype)
            for shape, dtype, wanted in zip(shapes, dtypes, call.wanted, strict=True)
        ]
    )


def define(backend: str, kernels: Callable[[MapCall], tuple[Tensor, ...]], keys: Sequence[str]) -> None:
    """Define ``flashsci::<backend>_map_statistics`` for the given dispatch keys."""
    op = define_op(
        f"{backend}_map_statistics",
        SCHEMA,
        lambda *given: kernels(MapCall(*given)),
        keys,
        lambda *given: empty_results(MapCall(*given)),
    )
    ops.register_vmap(op)
