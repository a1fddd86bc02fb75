"""Blocks that travel between ranks while others are computed.

At step t a rank sends its own block to the rank t places on and receives that of the rank t places back. As many bytes as by
passing blocks on around a ring; but no rank waits for a chain of others, a block goes only to those who see some of it, and only
the part that they see. The transfer of step t + 1 is under way while step t is computed: NCCL moves it on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

Blocks = Sequence[Tensor] | None  # None: nothing to move


class Transfer:
    """One batch of sends and receives under way."""

    def __init__(self, group: Any, sent: Blocks, to: int, received: Blocks, source: int):
        self.received = received
        self._sent = (
            None if sent is None else [x.contiguous() for x in sent]
        )  # alive until it is done
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x in self._sent or ()]
        ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=source) for x in received or ()]
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> Blocks:
        """What was received, for the current stream to use."""
        for work in self._works:
            work.wait()
        self._sent = None
        return self.received


def rounds(
    group: Any, own: Blocks, sent_to: Callable[[int], Blocks], room_for: Callable[[int], Blocks]
) -> Iterator[tuple[int, Blocks]]:
    """(source, its blocks) for this rank and then those 1, 2, ... places back; the next is in flight when one is given out.

    Args:
        own: what this rank itself computes with.
        sent_to: what of this rank's blocks another rank needs.
        room_for: empty tensors for what this rank needs of another's.
    """
    rank, world = group.rank(), group.size()
    ahead: Transfer | None = None
    for step in range(world):
        blocks = own if ahead is None else ahead.wait()
        if step + 1 < world:
            to, source = (rank + step + 1) % world, (rank - step - 1) % world
            ahead = Transfer(group, sent_to(to), to, room_for(source), source)
        yield (rank - step) % world, blocks
