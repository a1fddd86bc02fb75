"""The cost of a distributed call by each strategy: bytes, arithmetic, and the share of the transfers that compute
hides.

    ring        sum over steps of max(compute of this block, transfer of the next)    memory: two blocks of k and v, and sums; backward of some
                                                                                      heads at a time
    all_gather  transfer of all k and v, then compute                                 memory: all k and v
    ulysses     transfer of q, k, v and out, then compute                             memory: q, k, v, out of 1/W of the heads

Compute is the pairs of the slowest rank divided by a kernel's speed, plus a fixed time for each call and the time of
reads and writes outside the kernels. Transfers are the bytes that the busiest rank sends divided by the link's speed,
plus a fixed time for each. The ring's backward moves k and v again and their gradients back; that of the others moves
the same tensors as the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashsci.distributed.block import Scores
from flashsci.distributed.call import DistributedCall
from flashsci.distributed.layout import Layout
from flashsci.distributed.pieces import Band

STRATEGIES = ("ring", "all_gather", "ulysses")
# A backward divides heads into at most this many groups, each with at least this many seconds of compute a step: then
# the host is ahead.
MOST_GROUPS, GROUP_SECONDS = 4, 2e-3
AS_GOOD = 1.02  # times the fastest: the model is no more exact


@dataclass(frozen=True)
class Machine:
    """Speeds of one GPU and of its links. The defaults are round numbers of an H100-class GPU on NVLink."""

    forward: float = 650e12  # operations per second of a forward kernel, 16 bits
    backward: float = 560e12
    wide: float = 0.15  # the same for 32 bits, as a fraction of these
    link: float = 300e9  # bytes per second that a rank sends while it receives as many
    quiet: float = 40e9  # the same with few processors (exchange.py)
    memory: float = 3e12  # bytes per second of the GPU's own memory
    call: float = 15e-6  # seconds that each call of a kernel takes in addition to its work
    transfer: float = 25e-6  # the same for each transfer
    room: float = 8e9  # bytes that the whole k and v may take on a rank


class CallSizes(NamedTuple):
    """Sizes of a call other than its sequence."""

    batch: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    itemsize: int

    def keys(self, rows: int) -> int:
        """Bytes of this many rows of k and v."""
        return self.batch * self.heads_k * rows * (self.head_dim + self.head_dim_v) * self.itemsize

    def queries(self, rows: int) -> int:
        """Bytes of this many rows of q and out."""
        return self.batch * self.heads_q * rows * (self.head_dim + self.head_dim_v) * self.itemsize


class Work(NamedTuple):
    """The work of a rank between two transfers."""

    pairs: int  # queries times keys, for each head and batch member
    calls: int = 1  # of kernels
    moved: float = 0.0  # bytes read and written outside them: sums, copies

    def seconds(self, sizes: CallSizes, back: bool, machine: Machine) -> float:
        speed = machine.backward if back else machine.forward
        speed *= 1.0 if sizes.itemsize == 2 else machine.wide
        return self.operations(sizes, back) / speed + self.calls * machine.call + self.moved / machine.memory

    def operations(self, sizes: CallSizes, back: bool) -> float:
        dims = sizes.head_dim + sizes.head_dim_v
        dims += 2 * sizes.head_dim + sizes.head_dim_v if back else 0
        return 2.0 * self.pairs * dims * sizes.batch * sizes.heads_q


class Prediction(NamedTuple):
    """The prediction for one rank, the slowest."""

    seconds: float
    compute: float  # seconds in which kernels run
    sent: int  # bytes
    memory: int  # bytes in addition to its own tensors

    def __add__(self, other: Prediction) -> Prediction:  # type: ignore[override]
        """The cost of one after the other."""
        return Prediction(
            self.seconds + other.seconds,
            self.compute + other.compute,
            self.sent + other.sent,
            max(self.memory, other.memory),
        )


def predict(
    call: DistributedCall, sizes: CallSizes, strategy: str, backward: bool, machine: Machine | None = None
) -> Prediction:
    """The cost of a forward or, with ``backward``, of a training step.

    Examples:
        >>> from flashsci.distributed.cost import Machine, Sizes, planned, predict
        >>> sizes = Sizes(batch=1, heads_q=32, heads_k=8, head_dim=128, head_dim_v=128, itemsize=2)
        >>> call = planned(131072, world=8, causal=True, layout="head_tail")
        >>> found = predict(call, sizes, "ring", backward=True)
        >>> found.compute <= found.seconds < 1.5 * found.compute  # nearly all transfers are hidden
        True
    """
    machine = machine or Machine()
    model: Callable[[DistributedCall, CallSizes, bool, Machine], Prediction]
    model = {"ring": _ring, "all_gather": _all_gather, "ulysses": _ulysses}[strategy]
    found = model(call, sizes, False, machine)
    return found + model(call, sizes, True, machine) if backward else found


def choose(
    call: DistributedCall, sizes: CallSizes, allowed: list[str], backward: bool, machine: Machine | None = None
) -> str:
    """The strategy of least predicted time; of several that are as good as the fastest, the one with least memory.

    all_gather is considered only if the whole k and v fit in ``machine.room``.
    """
    machine = machine or Machine()
    fits = [s for s in allowed if s != "all_gather" or sizes.keys(call.keys.total) <= machine.room]
    found = {s: predict(call, sizes, s, backward, machine) for s in fits}
    fastest = min(p.seconds for p in found.values())
    good = [s for s in fits if found[s].seconds <= AS_GOOD * fastest]
    return min(good, key=lambda s: found[s].memory)


def planned(
    seq: int,
    world: int,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    layout: str = "contiguous",
) -> DistributedCall:
    """A call on a mesh that need not exist."""
    left, right = window or (-1, -1)
    whole = Layout.of(layout, seq, world)
    scores = Scores(None, None, False, None, "auto")
    return DistributedCall("", whole, whole, Band(left, 0 if causal else right), scores)


def work(call: DistributedCall, sizes: CallSizes, strategy: str, rank: int, back: bool) -> list[Work]:
    """The work of a rank: step by step for a ring, all at once for the others."""
    if strategy == "ring":
        return [_step(call, sizes, rank, step, back) for step in range(call.world)]
    own = sizes.queries(call.queries.lengths[rank]) + sizes.keys(call.keys.lengths[rank])
    if strategy == "ulysses":
        pairs = sum(call.pairs(r) for r in range(call.world))
        share = -(-sizes.heads_k // call.world) / sizes.heads_k
        return [Work(round(pairs * share), 1, 4 * own)]  # packed and unpacked
    reordered = 1 if call.keys.kind == "contiguous" else 3
    moved = sizes.keys(call.keys.total) * (reordered + (2 if back else 0))
    return [Work(call.pairs(rank), len(call.queries.intervals(rank)), moved)]


def _step(call: DistributedCall, sizes: CallSizes, rank: int, step: int, back: bool) -> Work:
    found = call.pieces(rank, (rank - step) % call.world)
    rows = sum(p.rows[1] - p.rows[0] for p in found)
    keys = sum(p.keys[1] - p.keys[0] for p in found)
    each = 1 + 2 * 4 / sizes.itemsize  # a result is read, a sum in float32 read and written
    summed = sizes.queries(rows) // 2 * each  # out, or dq
    if back:
        summed += sizes.keys(keys) * each
    return Work(sum(p.pairs() for p in found), len(found), summed)


def head_groups(call: DistributedCall, sizes: CallSizes, machine: Machine | None = None) -> int:
    """The number of groups of heads in a ring's backward: more groups take less memory, and launch more."""
    longest = max((_step(call, sizes, rank, 0, True) for rank in range(call.world)), key=lambda w: w.pairs)
    seconds = longest.seconds(sizes, True, machine or Machine())
    return max(1, min(MOST_GROUPS, sizes.heads_k, int(seconds / GROUP_SECONDS)))


@functools.lru_cache(maxsize=1024)
def hides_quiet(call: DistributedCall, sizes: CallSizes, back: bool) -> bool:
    """Whether a ring's compute takes as long as its transfers with few processors."""
    machine = Machine()
    slow = _ring(call, sizes, back, replace(machine, link=machine.quiet))
    return slow.seconds <= AS_GOOD * slow.compute


def _move(sent: float, machine: Machine) -> float:
    return sent / machine.link + machine.transfer if sent else 0.0


def _ring(call: DistributedCall, sizes: CallSizes, back: bool, machine: Machine) -> Prediction:
    world, total, busy, sent, most, last = call.world, 0.0, 0.0, 0, 0, 0
    for step in range(world):
        compute, bytes_out, last = 0.0, 0, 0
        for rank in range(world):
            done = _step(call, sizes, rank, step, back)
            compute = max(compute, done.seconds(sizes, back, machine))
            block = _block(call, sizes, (rank + step + 1) % world, rank) if step + 1 < world else 0
            home = _home(call, sizes, rank, step - 1) if back else 0
            bytes_out, most = max(bytes_out, block + home), max(most, block)
            last = max(last, _home(call, sizes, rank, step) if back else 0)
        total += max(compute, _move(bytes_out, machine))
        busy, sent = busy + compute, sent + bytes_out
    if not back or head_groups(call, sizes, machine) == 1:
        total += _move(last, machine)  # the last gradients go home after all compute
    ranks = range(world)
    rows, keys = max(call.queries.lengths), max(call.keys.lengths)
    of_rows, of_keys = (max(call.most_parts(r)[i] for r in ranks) for i in (0, 1))
    wide = max(1, 4 // sizes.itemsize)
    extra = 2 * most + sizes.queries(rows) // 2  # of a piece's out or dq, and of their sum, if it is in float32
    extra += sizes.queries(rows) // 2 * wide if of_rows > 2 else 0
    if back:
        extra += 2 * last + (sizes.keys(keys) * wide if of_keys > 2 else 0)
        extra = -(-extra // head_groups(call, sizes, machine))
    return Prediction(total, busy, sent + last, extra)


def _home(call: DistributedCall, sizes: CallSizes, rank: int, step: int) -> int:
    """Bytes of the gradients that rank sends to the owner of the keys of a step."""
    if step < 1:
        return 0
    source = (rank - step) % call.world
    several = len(call.pieces(rank, source)) > 1  # a sum, in float32
    return _block(call, sizes, rank, source) * (max(1, 4 // sizes.itemsize) if several else 1)


def _block(call: DistributedCall, sizes: CallSizes, rank: int, source: int) -> int:
    """Bytes of the keys of source that rank sees."""
    needed = call.needed(rank, source)
    return sizes.keys(needed[1] - needed[0]) if needed else 0


def _all_gather(call: DistributedCall, sizes: CallSizes, back: bool, machine: Machine) -> Prediction:
    compute = max(
        w.seconds(sizes, back, machine) for r in range(call.world) for w in work(call, sizes, "all_gather", r, back)
    )
    whole = sizes.keys(call.keys.total)
    sent = whole * (call.world - 1) // call.world
    return Prediction(compute + _move(sent, machine), compute, sent, whole * (2 if back else 1))


def _ulysses(call: DistributedCall, sizes: CallSizes, back: bool, machine: Machine) -> Prediction:
    (done,) = work(call, sizes, "ulysses", 0, back)
    compute = done.seconds(sizes, back, machine)
    own = max(sizes.queries(a) + sizes.keys(b) for a, b in zip(call.queries.lengths, call.keys.lengths, strict=True))
    sent = own * (call.world - 1) // call.world
    return Prediction(
        compute + _move(sent, machine) + 3 * machine.transfer,
        compute,
        sent,
        own * (2 if back else 1),
    )
