"""An emulation of a mesh in one process, which is each rank in turn.

`World.run` makes this process rank r of W: torch.distributed is initialised as such, over a process group that keeps
messages. A rank receives the messages that the others sent in an earlier pass over all ranks; the emulated code does
not know of it. Messages of flashsci.distributed depend on one another (lengths, if they differ; keys; gradients under
the whole out): after PASSES passes every result is right. The steps of a rank are its messages in order.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from flashsci.distributed.agreement import WIDTH

PASSES = 6  # until every message, and its dependents, is right; 3 if all ranks have equal row counts and share nothing
Key = tuple[int, int, int]  # from, to, number of earlier messages that way


class Step(NamedTuple):
    """A message of a rank, the wait for one, or a mark."""

    what: str  # "send", "receive", "wait", "collective", "phase"
    key: Any = None  # of the message, or of the awaited one; of a collective its number; of a phase its name
    size: int = 0  # bytes that this rank sends or, for "receive", gets


class World:
    """The ranks of a mesh on one device.

    Args:
        size: the number of ranks.
        device: "cuda" or "cpu".
    """

    def __init__(self, size: int, device: str):
        self.size, self.device = size, device
        self.messages: dict[Any, Tensor] = {}

    def run(self, rank: int, function: Callable[[DeviceMesh], Any]) -> tuple[Any, list[Step]]:
        """The result of ``function`` on a rank, and the rank's steps."""
        global _present
        self.rank, self.sent, self.steps = rank, Counter[Any](), list[Step]()
        self.works: list[Done] = []
        _present = self
        hook = sys.excepthook  # to which torch adds one each time
        dist.init_process_group("emulated", store=dist.HashStore(), rank=rank, world_size=self.size)
        try:
            mesh = DeviceMesh(self.device, list(range(self.size)))
            result = function(mesh)
            self.phase("end")
            if self.device == "cuda":
                torch.cuda.synchronize()  # an error of a kernel belongs to this rank
        finally:
            dist.destroy_process_group()
            sys.excepthook, _present = hook, None
        return result, self.steps

    def phase(self, name: str) -> None:
        """Add a mark to the steps of the present rank."""
        self._mark("phase", name, 0)

    # The interface of process groups.

    def send(self, x: Tensor, to: int) -> Done:
        key = self._key(self.rank, to)
        self._mark("send", key, x.nbytes)
        self._keep(key, x)
        return Done(self, key)

    def receive(self, x: Tensor, source: int) -> Done:
        key = self._key(source, self.rank)
        self._mark("receive", key, x.nbytes)
        self._hand_out(x, self.messages.get(key))
        return Done(self, key)

    def wait(self, key: Any) -> None:
        if key is not None:
            self._mark("wait", key, 0)

    def all_gather(self, out: Tensor, x: Tensor) -> Done:
        number = self._collective(x, x.nbytes * (self.size - 1))
        self._keep(("whole", number, self.rank), x)
        for rank, part in enumerate(out.chunk(self.size)):
            # Numbers that ranks compare, and sizes: its own.
            kept = x if rank == self.rank else self.messages.get(("whole", number, rank), x)
            part.copy_(kept.view(part.shape))
        return Done(self, None if _agrees(x) else number)

    def all_to_all(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Done:
        sent = list(sent) or [len(x) // self.size] * self.size
        received = list(received) or [len(out) // self.size] * self.size
        number = self._collective(x, x[:1].nbytes * (sum(sent) - sent[self.rank]))
        for to, part in enumerate(x.split(sent)):
            self._keep(("part", number, self.rank, to), part)
        for source, part in enumerate(out.split(received)):
            self._hand_out(part, self.messages.get(("part", number, source, self.rank)))
        return Done(self, number)

    # Its implementation.

    def _key(self, source: int, to: int) -> Key:
        self.sent[source, to] += 1
        return source, to, self.sent[source, to]

    def _collective(self, x: Tensor, size: int) -> int:
        """The number of a group."""
        self.sent["collectives"] += 1
        if not _agrees(x):
            self._mark("collective", self.sent["collectives"], size)
        return self.sent["collectives"]

    def _keep(self, key: Any, x: Tensor) -> None:
        kept = self.messages.get(key)
        if kept is None or kept.shape != x.shape or kept.dtype != x.dtype:
            self.messages[key] = x.detach().clone()
        else:
            kept.copy_(x)

    def _hand_out(self, x: Tensor, message: Tensor | None) -> None:
        if message is not None and message.shape == x.shape and message.dtype == x.dtype:
            x.copy_(message)
        elif x.is_floating_point():
            x.normal_()
        else:
            x.zero_()

    def _mark(self, what: str, key: Any, size: int) -> None:
        self.steps.append(Step(what, key, size))


def _agrees(x: Tensor) -> bool:
    """Whether a message only makes ranks agree and is no part of the work."""
    return x.dtype == torch.float64 and x.numel() in (1, WIDTH)


class Done(dist.Work):
    """The work of a message that has arrived."""

    def __init__(self, world: World, key: Any):
        super().__init__()
        self.world, self.key = world, key
        world.works.append(self)  # which C++ does not keep alive

    def wait(self, timeout: Any = None) -> bool:
        self.world.wait(self.key)
        return True

    def is_completed(self) -> bool:
        return True


class Group(dist.ProcessGroup):
    """A process group of a World."""

    def __init__(self, rank: int, size: int, world: World):
        super().__init__(rank, size)
        self.world = world

    _device_types = property(lambda self: [torch.device("cpu")])
    group_name = property(lambda self: distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:
        return "emulated"

    def _get_backend(self, device: torch.device) -> Group:
        """The backend of a device, which torch 2.14 asks whether it coalesces messages."""
        return self

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Done:
        return self.world.send(tensors[0], to)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Done:
        return self.world.receive(tensors[0], source)

    def all_gather_single(self, out: Tensor, x: Tensor, options: Any = None) -> Done:
        return self.world.all_gather(out, x)

    def all_gather_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], options: Any = None) -> Done:
        return [self.world.all_gather(out, x) for out, x in zip(outs, tensors, strict=True)][-1]

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: list[int], sent: list[int], options: Any = None
    ) -> Done:
        return self.world.all_to_all(out, x, received, sent)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


_present: World | None = None


def _create(store: Any, rank: int, size: int, timeout: Any) -> Group:
    assert _present is not None
    return Group(rank, size, _present)


dist.Backend.register_backend("emulated", _create, devices=["cpu", "cuda"])


def settled(world: World, function: Callable[[DeviceMesh], Any], passes: int = PASSES) -> list[Any]:
    """The results of ``function`` on each rank of a world, whose messages are right afterwards. An error counts in
    the last pass."""
    results: list[Any] = []
    for turn in range(passes):
        results = []
        for rank in range(world.size):
            try:
                results.append(world.run(rank, function)[0])
            except (RuntimeError, ValueError):
                if turn == passes - 1:
                    raise
    return results
