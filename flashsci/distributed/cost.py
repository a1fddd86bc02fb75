"""What a distributed call costs by each strategy: bytes, arithmetic, and what of the one hides behind the other.

    ring        sum over steps of max(compute of this block, transfer of the next)    memory: two blocks of k and v
    all_gather  transfer of all k and v, then compute                                 memory: all k and v
    ulysses     transfer of q, k, v and out, then compute                             memory: q, k, v, out of 1/W of the heads

Compute is the pairs of the slowest rank over a kernel's speed, and a fixed time for each call; transfers are the bytes that the
busiest rank sends over the link's speed, and a fixed time for each. The ring's backward moves k and v again and their gradients
back in float32; that of the others moves what the forward moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flashsci.distributed.block import Scores
from flashsci.distributed.call import Call
from flashsci.distributed.layout import Layout
from flashsci.distributed.pieces import Band

STRATEGIES = ("ring", "all_gather", "ulysses")


@dataclass(frozen=True)
class Machine:
    """Speeds of one GPU and of what connects it. The defaults are round numbers of an H100-class GPU on NVLink."""

    forward: float = 500e12  # operations per second of a forward kernel, 16 bits
    backward: float = 450e12
    wide: float = 0.15  # the same for 32 bits, as a fraction of these
    link: float = 300e9  # bytes per second that a rank sends while it receives as many
    memory: float = 3e12  # bytes per second of the GPU's own memory
    call: float = 15e-6  # seconds that each call of a kernel takes beside its work
    transfer: float = 25e-6  # the same for each transfer
    room: float = 8e9  # bytes that the whole k and v may take on a rank


class Sizes(NamedTuple):
    """Sizes of a call beside its sequence."""

    batch: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    itemsize: int

    def keys(self, rows: int) -> int:
        """Bytes of so many rows of k and v."""
        return self.batch * self.heads_k * rows * (self.head_dim + self.head_dim_v) * self.itemsize

    def queries(self, rows: int) -> int:
        """Bytes of so many rows of q and out."""
        return self.batch * self.heads_q * rows * (self.head_dim + self.head_dim_v) * self.itemsize


class Prediction(NamedTuple):
    """Of one rank, the slowest."""

    seconds: float
    compute: float  # seconds of it that kernels run
    sent: int  # bytes
    memory: int  # bytes beside its own tensors

    def __add__(self, other: Prediction) -> Prediction:  # type: ignore[override]
        """One after the other."""
        return Prediction(
            self.seconds + other.seconds,
            self.compute + other.compute,
            self.sent + other.sent,
            max(self.memory, other.memory),
        )


def predict(
    call: Call, sizes: Sizes, strategy: str, backward: bool, machine: Machine | None = None
) -> Prediction:
    """The cost of a forward, or with ``backward`` of a training step.

    Examples:
        >>> from flashsci.distributed.cost import Machine, Sizes, planned, predict
        >>> sizes = Sizes(batch=1, heads_q=32, heads_k=8, head_dim=128, head_dim_v=128, itemsize=2)
        >>> call = planned(131072, world=8, causal=True, layout="head_tail")
        >>> found = predict(call, sizes, "ring", backward=True)
        >>> found.compute <= found.seconds < 1.5 * found.compute  # nearly all transfers are hidden
        True
    """
    machine = machine or Machine()
    model: Callable[[Call, Sizes, bool, Machine], Prediction]
    model = {"ring": _ring, "all_gather": _all_gather, "ulysses": _ulysses}[strategy]
    found = model(call, sizes, False, machine)
    return found + model(call, sizes, True, machine) if backward else found


def choose(
    call: Call, sizes: Sizes, allowed: list[str], backward: bool, machine: Machine | None = None
) -> str:
    """The strategy of least predicted time; all_gather only where the whole k and v fit in ``machine.room``."""
    machine = machine or Machine()
    fits = [s for s in allowed if s != "all_gather" or sizes.keys(call.keys.total) <= machine.room]
    return min(fits, key=lambda s: predict(call, sizes, s, backward, machine).seconds)


def planned(
    seq: int,
    world: int,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    layout: str = "contiguous",
) -> Call:
    """A call on a mesh that need not exist."""
    left, right = window or (-1, -1)
    whole = Layout.of(layout, seq, world)
    scores = Scores(None, None, False, None, "auto")
    return Call("", whole, whole, Band(left, 0 if causal else right), scores)


def _kernel(pairs: float, sizes: Sizes, back: bool, calls: int, machine: Machine) -> float:
    dims = 3 * sizes.head_dim + 2 * sizes.head_dim_v if back else sizes.head_dim + sizes.head_dim_v
    speed = (machine.backward if back else machine.forward) * (
        1.0 if sizes.itemsize == 2 else machine.wide
    )
    return 2 * pairs * dims * sizes.batch * sizes.heads_q / speed + calls * machine.call


def _move(sent: float, machine: Machine) -> float:
    return sent / machine.link + machine.transfer if sent else 0.0


def _ring(call: Call, sizes: Sizes, back: bool, machine: Machine) -> Prediction:
    world, total, busy, sent, most = call.world, 0.0, 0.0, 0, 0
    summed = 3 if back else 1  # of float32: the output, or dq, dk and dv
    for step in range(world):
        compute, bytes_out = 0.0, 0
        for rank in range(world):
            found = call.pieces(rank, (rank - step) % world)
            rows = sum(p.rows[1] - p.rows[0] for p in found)
            time = _kernel(sum(p.pairs() for p in found), sizes, back, len(found), machine)
            time += summed * sizes.queries(rows) * 4 / sizes.itemsize / machine.memory
            compute = max(compute, time)
            needed = call.needed((rank + step + 1) % world, rank) if step + 1 < world else None
            block = sizes.keys(needed[1] - needed[0]) if needed else 0
            most = max(most, block)
            bytes_out = max(bytes_out, block + (block * 4 // sizes.itemsize if back else 0))
        total += max(compute, _move(bytes_out, machine))
        busy, sent = busy + compute, sent + bytes_out
    extra = most * (2 + (4 * 4 // sizes.itemsize if back else 0))
    return Prediction(total, busy, sent, extra)


def _all_gather(call: Call, sizes: Sizes, back: bool, machine: Machine) -> Prediction:
    calls = len(call.queries.intervals(0))
    compute = max(_kernel(call.pairs(r), sizes, back, calls, machine) for r in range(call.world))
    whole = sizes.keys(call.keys.total)
    sent = whole * (call.world - 1) // call.world
    return Prediction(compute + _move(sent, machine), compute, sent, whole * (2 if back else 1))


def _ulysses(call: Call, sizes: Sizes, back: bool, machine: Machine) -> Prediction:
    pairs = sum(call.pairs(r) for r in range(call.world))
    share = -(-sizes.heads_k // call.world) / sizes.heads_k
    compute = _kernel(pairs * share, sizes, back, 1, machine)
    own = max(
        sizes.queries(a) + sizes.keys(b)
        for a, b in zip(call.queries.lengths, call.keys.lengths, strict=True)
    )
    sent = own * (call.world - 1) // call.world
    return Prediction(
        compute + _move(sent, machine) + machine.transfer, compute, sent, own * (2 if back else 1)
    )
