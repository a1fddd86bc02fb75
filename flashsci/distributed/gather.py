"""The all-gather strategy: every rank collects all keys and values and computes its own queries.

It makes one call of the kernels for each interval of queries, without sums of parts, and is differentiable to the
order of the kernels: the collectives are functions with gradients. It needs memory for the whole k and v.
"""

from __future__ import annotations

from torch import Tensor

from flashsci.distributed import block
from flashsci.distributed.block import Side
from flashsci.distributed.call import from_text
from flashsci.distributed.collectives import place_in
from flashsci.distributed.layout import assemble
from flashsci.distributed.pieces import joined, pieces


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    text: str,
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries; differentiable. ``text`` is that of the call."""
    call = from_text(text)
    k, v = (assemble(x, call.keys, -2, call.group) for x in (k, v))
    if key_weight is not None:
        key_weight = assemble(key_weight, call.keys, -1, call.group)
    own = call.queries.intervals(place_in(call.group)[0])
    found = pieces(own, [(0, call.keys.total)], call.band)
    found = found if call.placed else joined(found)
    return block.attend(q, k, v, key_weight, Side(bias, mask), found, call.scores)
