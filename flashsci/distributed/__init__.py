"""Attention over sequences that are split over the GPUs of a mesh: context parallelism on torch.distributed.

``import flashsci`` does not import it. :func:`attention` and :func:`varlen_attention` are for sequences,
:func:`triangle_attention` for pair representations; :func:`shard` and :func:`unshard` define which rank has which
rows; :mod:`flashsci.distributed.cost` predicts the cost.
"""

from flashsci.distributed.api import attention, varlen_attention
from flashsci.distributed.layout import shard, unshard
from flashsci.distributed.triangle import triangle_attention

__all__ = ["attention", "shard", "triangle_attention", "unshard", "varlen_attention"]
