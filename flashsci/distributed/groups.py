"""Groups of heads for a backward, a few heads at a time: a ring then needs extra memory only for these.

Blocks in transfer, a piece's results, sums in float32 and the extra memory of kernels are as much as the rank's own
tensors. Heads are independent of each other, so a long call becomes several with some of the heads each, one after
the other. The first keys of a group, and its last gradients, travel while another group is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashsci.distributed import cost
from flashsci.distributed.call import DistributedCall
from flashsci.distributed.layout import Interval, even


class Group(NamedTuple):
    """Query heads and their key heads."""

    queries: Interval
    keys: Interval

    def of(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        key_weight: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Any, ...]:
        """The heads' part of each tensor: views."""
        q, bias, mask = (_narrow(x, self.queries, -3) for x in (q, bias, mask))
        k, v = (_narrow(x, self.keys, -3) for x in (k, v))
        return q, k, v, bias, _narrow(key_weight, self.keys, -2), mask

    def of_results(self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
        """The same for results and their gradients."""
        dout, out = (_narrow(x, self.queries, -3) for x in (dout, out))
        dlse, lse = (_narrow(x, self.queries, -2) for x in (dlse, lse))
        return dout, dlse, out, lse

    def store(self, whole: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        """Store gradients of the heads in their places."""
        sides = (self.queries, self.keys, self.keys, self.queries, self.keys)
        for x, part, side, dim in zip(whole, gradients, sides, (-3, -3, -3, -3, -2), strict=True):
            if x is not None and part is not None:
                _narrow(x, side, dim).copy_(part)


def head_groups(
    call: DistributedCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
) -> list[Group]:
    """The groups of heads of a backward: one if a call is short, or if heads share a gradient."""
    heads_q, heads_k = _heads(q), _heads(k)
    shared = (bias is not None and (bias.dim() < 3 or bias.shape[-3] != heads_q)) or (
        key_weight is not None and (key_weight.dim() < 2 or key_weight.shape[-2] != heads_k)
    )
    count = 1 if shared else cost.head_groups(call, sizes_of(q, k, v))
    each = heads_q // heads_k
    return [Group((a * each, b * each), (a, b)) for a, b in itertools.pairwise(even(heads_k, count))]


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> cost.CallSizes:
    batch = q.shape[:-3].numel() if q.dim() > 3 else 1
    return cost.CallSizes(batch, _heads(q), _heads(k), q.shape[-1], v.shape[-1], q.element_size())


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


def _narrow(x: Any, interval: Interval, dim: int) -> Any:
    """Heads of a tensor, if it has a dim of them."""
    if x is None or x.dim() < -dim or x.shape[dim] == 1:
        return x
    return x.narrow(dim, interval[0], interval[1] - interval[0])
