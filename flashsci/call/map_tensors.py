"""The tensors of an attention map, declared once."""

from __future__ import annotations

from typing import NamedTuple

from flashsci.call import kinds


class MapTensors(NamedTuple):
    """The tensors of a map, as users give them."""

    q: kinds.Rows
    k: kinds.Rows
    lse: kinds.Statistics
    bias: kinds.Bias = None
    key_weight: kinds.KeyWeight = None
    mask: kinds.Mask = None
    alibi_slopes: kinds.Slopes = None
    cu_seqlens_q: kinds.OptionalOffsets = None
    cu_seqlens_k: kinds.OptionalOffsets = None
