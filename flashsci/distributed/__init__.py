"""Attention over sequences that are split over the GPUs of a mesh: context parallelism on torch.distributed.

Not imported by ``import flashsci``. :func:`attention` and :func:`varlen_attention` for sequences, :func:`triangle_attention` for pair
representations; :func:`shard` and :func:`unshard` say who has which rows; :mod:`flashsci.distributed.cost` says what it costs.
"""

from flashsci.distributed.api import attention, varlen_attention
from flashsci.distributed.layout import shard, unshard
from flashsci.distributed.triangle import triangle_attention

__all__ = ["attention", "shard", "triangle_attention", "unshard", "varlen_attention"]
