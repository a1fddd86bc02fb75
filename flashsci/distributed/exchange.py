"""Blocks that travel between ranks while others are computed.

At step t a rank sends its own block to the rank t places on and receives that of the rank t places back. This moves
as many bytes as passing blocks around a ring. But no rank waits for a chain of others, and a block goes only to ranks
that see some of it, and only the part that they see. The transfer of step t + 1 runs while step t is computed: NCCL
moves it on a stream of its own.

NCCL moves data by a kernel, which needs processors as any other does. Therefore
- all transfers during a step go in one batch, at its beginning: a second kernel would wait behind the first, and by then
  attention has all processors, until it ends;
- attention begins a little later (PAUSE): the next kernel in a stream begins sooner than one that waits for an event, and
  would be first;
- if a slow transfer is fast enough, it has few processors (``quiet``): a rank that is early waits for the others with only
  these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from flashsci.distributed.agreement import kept

Blocks = Sequence[Tensor] | None  # None: nothing to move
PAUSE = 12_000  # cycles, some 7 us
CTAS = 4  # of a quiet communicator: 40 GB/s each way over NVLink, where all of them make 300


class Transfer:
    """A send and a receive, in progress from the time when they are posted."""

    def __init__(self, post: Post, sent: Blocks, to: int, received: Blocks, source: int):
        self.received = received
        self._post, self._to, self._source = post, to, source
        # Alive until it is done.
        self._sent = None if sent is None else [x.contiguous() for x in sent]
        self.works: list[Any] | None = None  # those of all transfers posted together; None: not yet

    def operations(self) -> list[dist.P2POp]:
        group = self._post.group
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=self._to) for x in self._sent or ()]
        return ops + [dist.P2POp(dist.irecv, x, group=group, group_peer=self._source) for x in self.received or ()]

    def wait(self) -> Blocks:
        """The received blocks, ready for the current stream, as are all blocks that were sent with them."""
        if self.works is None:
            self._post.send()
        while self.works:  # each is waited for once, by the first caller
            self.works.pop().wait()
        self._sent = None
        return self.received


class Post:
    """The transfers of one call. ``group``: the process group that they use."""

    def __init__(self, group: Any):
        self.group = group
        self._waiting: list[Transfer] = []

    def transfer(self, sent: Blocks, to: int, received: Blocks, source: int) -> Transfer:
        """A transfer that begins with the next ``send``."""
        self._waiting.append(Transfer(self, sent, to, received, source))
        return self._waiting[-1]

    def send(self) -> None:
        """Begin the waiting transfers, all at once."""
        begun, self._waiting = self._waiting, []
        ops = [op for transfer in begun for op in transfer.operations()]
        works = dist.batch_isend_irecv(ops) if ops else []
        for transfer in begun:
            transfer.works = works
        if ops and ops[0].tensor.is_cuda:
            torch.cuda._sleep(PAUSE)


class Block(NamedTuple):
    """The block of a step: this rank's own, or a function that orders it."""

    source: int
    own: Blocks = None
    order: Callable[[], Transfer] | None = None


def around(post: Post, sent_to: Callable[[int], Blocks], room_for: Callable[[int], Blocks]) -> list[Block]:
    """This rank's block and then those of the ranks 1, 2, ... places back.

    Args:
        sent_to: the part of this rank's block that another rank, or this rank itself, needs.
        room_for: empty tensors for the part of another's block that this rank needs.
    """
    rank, world = post.group.rank(), post.group.size()

    def order(step: int) -> Transfer:
        to, source = (rank + step) % world, (rank - step) % world
        return post.transfer(sent_to(to), to, room_for(source), source)

    others = (Block((rank - s) % world, order=partial(order, s)) for s in range(1, world))
    return [Block(rank, sent_to(rank)), *others]


def rounds(post: Post, blocks: Sequence[Block]) -> Iterator[Blocks]:
    """The received part of each block in turn.

    When one is yielded, the next one from another rank is in flight, together with transfers that were added to
    ``post`` meanwhile.
    """
    orders = iter([block.order for block in blocks if block.order is not None])
    ahead = _next(orders)
    for block in blocks:
        found = block.own
        if block.order is not None:
            assert ahead is not None
            found = ahead.wait()
            ahead = _next(orders)
        post.send()
        yield found


def _next(orders: Iterator[Callable[[], Transfer]]) -> Transfer | None:
    order = next(orders, None)
    return None if order is None else order()


def quiet(group: Any) -> Any:
    """A communicator of the same ranks that takes few processors, made at the first call.

    It is the group itself if NCCL does not move the data, or if torch would split the communicator of all ranks and
    the group does not have all of them. All ranks of the group ask for it together.
    """
    backend = _nccl(group)
    if backend is None:
        return group
    splits = c10d._get_default_group().bound_device_id is not None
    if splits and group.size() < dist.get_world_size():
        return group
    known = kept(group)
    if known.quiet is None:
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        options._timeout = backend.options._timeout
        options.config.min_ctas, options.config.max_ctas = 1, CTAS
        known.quiet = _communicator(group, options)
    return known.quiet


def _communicator(group: Any, options: Any) -> Any:
    """The communicator of ``dist.new_group(use_local_synchronization=True)``, under a name that all ranks know.

    new_group itself counts the groups of a process: ranks in different numbers of groups would wait for each other
    under different names.
    """
    ranks = dist.get_process_group_ranks(group)
    made, _ = c10d._new_process_group_helper(
        len(ranks), group.rank(), ranks, dist.Backend("nccl"), c10d._get_default_store(),
        f"{group.group_name} flashsci transfers",  # type: ignore[arg-type]
        backend_options=options, timeout=options._timeout, device_id=torch.device("cuda", torch.cuda.current_device()),
        group_desc="flashsci transfers",
    )  # fmt: skip
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _nccl(group: Any) -> Any:
    """NCCL's backend of a group, or None."""
    if not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # a group for CPUs alone
        return None
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
