"""Ring attention: keys and values travel, queries stay.

    forward   (O_s, L_s) of each block of keys; L = log sum_s e^{L_s}; O = sum_s e^{L_s - L} O_s, summed in fp32
    backward  each block's gradients for the whole O and L; dq is summed on its rank, dk and dv travel back to the rank of the
              keys and are summed there in the order of steps, in fp32. The result of one call travels in its own dtype, a
              sum of several in fp32

A sum of at most two parts (two ranks) is rounded only once in any case; it has the dtype of the tensors.

In addition to the rank's own, two blocks of keys and values are in memory, never the sequence. In the backward of
long sequences these are blocks of a few heads at a time (groups.py), one group after the other; each travels while
one before it is computed. A backward that is itself differentiated is recorded by the all-gather strategy, which has
derivatives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call import flops
from flashsci.call.op_checks import implement, on_one_device
from flashsci.call.ops import (
    Tensors,
    empty_like_layout,
    fake_forward,
    follow_layout,
    statistics_dtype,
)
from flashsci.call.schemas import LIBRARY
from flashsci.distributed import block, cost, gather, op_checks, recording
from flashsci.distributed.block import Side
from flashsci.distributed.call import DistributedCall, from_text
from flashsci.distributed.collectives import group_named
from flashsci.distributed.exchange import Block, Blocks, Post, Transfer, around, quiet, rounds
from flashsci.distributed.groups import head_groups, sizes_of
from flashsci.distributed.layout import Interval
from flashsci.distributed.merging import merge
from flashsci.distributed.pieces import Piece


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
    found: tuple[Tensor, Tensor] = Ring.apply(q, k, v, bias, key_weight, mask, text)
    return found


class Ring(torch.autograd.Function):
    """out, lse; gradients of q, k, v, bias and key_weight."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        return recording.forward(ctx, torch.ops.flashsci.ring_forward, inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return recording.backward(ctx, torch.ops.flashsci.ring_backward, gather.attend, dout, dlse)


DIMS = (-2, -2, -1)  # dims of the rows, in k, v and key_weight


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    text: str,
) -> tuple[Tensor, Tensor]:
    call, statistics = from_text(text), statistics_dtype(q.dtype)
    rank, side = group_named(call.group).rank(), Side(bias, mask)
    _check(call, rank, q, k, v, bias, key_weight, mask)
    sums = _sum_dtype(q, call.most_parts(rank)[0])
    out: Tensor | None = None
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=statistics)
    post = _post(call, q, k, v, back=False)
    blocks = _around(call, post, [x for x in (k, v, key_weight) if x is not None])
    for block_, keys in zip(blocks, rounds(post, blocks), strict=True):
        for piece in call.needed_pieces(rank, block_.source):
            assert keys is not None
            part, part_lse = block.forward(q, *_three(keys), side, piece, call.scores)
            if out is None and piece.rows == (0, q.shape[-2]):  # the start of the sums
                out, lse = part.to(sums), part_lse
            else:
                out = _nothing(q, v, sums) if out is None else out
                rows = block.rows_of(out, piece.rows), block.rows_of(lse, piece.rows, -1)
                merge(*rows, part, part_lse)
            del part, part_lse
        del keys  # before there is memory for the block after the next
    out = _nothing(q, v, sums) if out is None else out
    return follow_layout(out.to(q.dtype), q), lse


def _check(
    call: DistributedCall,
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
) -> None:
    op_checks.rows_of_rank(call, rank, q, k, v)
    op_checks.of_pairs(q, call.keys.total, bias=bias, mask=mask)
    op_checks.of_keys(key_weight, k)


def _nothing(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """out for queries that have seen no key yet."""
    return empty_like_layout(q, (*q.shape[:-1], v.shape[-1]), dtype).zero_()


def _sum_dtype(x: Tensor, parts: int) -> torch.dtype:
    """The dtype of a sum of this many parts in x's dtype: two are rounded only once in any case, and take half the
    memory in it."""
    return x.dtype if parts <= 2 else statistics_dtype(x.dtype)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    text: str,
) -> tuple[Tensor, ...]:
    call, tensors = from_text(text), (q, k, v, bias, key_weight, mask)
    _check(call, group_named(call.group).rank(), *tensors)
    op_checks.results(q, v, out, lse, dout, dlse)
    groups = head_groups(call, q, k, v, bias, key_weight)
    post = _post(call, q, k, v, back=True)
    several = len(groups) > 1
    gradients: list[Tensor | None] = []
    if several:
        gradients = [None if x is None else x.new_empty(x.shape) for x in tensors[:5]]
    shares = []
    for group in groups:
        store = functools.partial(group.store, gradients) if several else gradients.extend
        results = group.of_results(dout, dlse, out, lse)
        shares.append(Share(call, post, group.of(*tensors), results, store))
    turns = [(share, step) for share in shares for step in range(call.world)]
    if several:  # the last gradients travel home while the last step is computed
        turns.append(turns.pop(-call.world))
    coming: Coming | None = None
    travelling = rounds(post, [share.blocks[step] for share, step in turns])
    for (share, step), keys in zip(turns, travelling, strict=True):
        parts = share.compute(step, keys)
        del keys  # before there is memory for the block after the next
        if coming is not None:
            coming.arrive()
        coming = Coming(share, step, share.send_home(parts, step)) if step else None
        del parts
    if coming is not None:
        coming.arrive()
    return _results(tensors, gradients)


def _results(tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Gradients in the form of an operator's results: an empty tensor for None."""
    q = tensors[0]
    assert q is not None
    return tuple(
        q.new_empty(0) if x is None or g is None else g.to(x.dtype) for x, g in zip(tensors[:5], gradients, strict=True)
    )


class Share:
    """The backward of some heads, step by step.

    Args:
        tensors: q, k, v, bias, key_weight, mask of the heads.
        results: their dout, dlse, out, lse.
        store: takes dq, dk, dv, dbias, dkey_weight when all is summed.
    """

    def __init__(
        self,
        call: DistributedCall,
        post: Post,
        tensors: Sequence[Any],
        results: Sequence[Any],
        store: Callable[[Sequence[Tensor | None]], None],
    ):
        self.call, self.post, self.results, self.store = call, post, results, store
        self.q, k, v, bias, key_weight, mask = tensors
        self.side, self.rank = Side(bias, mask), post.group.rank()
        self.own = [x for x in (k, v, key_weight) if x is not None]
        self.blocks = _around(call, post, self.own)
        self.of_queries, self.of_keys = call.most_parts(self.rank)
        self.dq: Tensor | None = None
        self.dbias = None if bias is None else _sums(bias)
        self.home: list[Tensor] = []  # gradients of this rank's keys
        self.left = 2 * call.world - 1  # steps, and the gradients that come back from all but one

    def compute(self, step: int, keys: Blocks) -> Blocks:
        """Gradients of the keys of a step, unless they are this rank's."""
        call, rank = self.call, self.rank
        found = call.needed_pieces(rank, self.blocks[step].source)
        one = len(found) == 1  # in the dtype of the one call
        parts: Blocks = None
        if step:
            parts = None if keys is None or one else [_sums(x) for x in keys]
        elif not (one and call.needed(rank, rank) == found[0].keys == (0, self.own[0].shape[-2])):
            parts = self._home_of(rank)
        elif self.home:
            parts = self.home
        for piece in found:
            assert keys is not None
            shares = self._piece(piece, keys)
            if parts is None:
                parts = shares
                continue
            for total, part, dim in zip(parts, shares, DIMS, strict=False):
                block.rows_of(total, piece.keys, dim).add_(part)
        if step == 0 and not self.home:
            assert parts is not None
            self.home = [x.to(_sum_dtype(x, self.of_keys)) for x in parts]
        self._settle()
        return parts if step else None

    def _piece(self, piece: Piece, keys: Sequence[Tensor]) -> list[Tensor]:
        """dk, dv and dkey_weight of a piece; dq and dbias are summed."""
        dout, dlse, out, lse = self.results
        found = block.backward(dout, dlse, self.q, *_three(keys), self.side, out, lse, piece, self.call.scores)
        sums = _sum_dtype(self.q, self.of_queries)
        self.dq = _added(self.dq, found.dq, piece.rows, self.q, sums)
        cell = block.cut(self.dbias, piece) if self.dbias is not None else None
        if cell is not None and found.dbias is not None:
            cell.add_(found.dbias)
        return [x for x in (found.dk, found.dv, found.dkey_weight) if x is not None]

    def send_home(self, parts: Blocks, step: int) -> Transfer:
        """Send gradients of a step's keys to their rank; receive those that another rank computed for this rank's
        keys."""
        rank, world = self.rank, self.call.world
        worker = (rank + step) % world
        mine = _cut(self.own, self.call.needed(worker, rank))
        exact = len(self.call.pieces(worker, rank)) == 1  # in the dtype of the one call
        room = None
        if mine is not None:
            dtypes = [x.dtype if exact else statistics_dtype(x.dtype) for x in self.own]
            room = [x.new_empty(x.shape, dtype=d) for x, d in zip(mine, dtypes, strict=True)]
        return self.post.transfer(parts, (rank - step) % world, room, worker)

    def bring_home(self, found: Blocks, step: int) -> None:
        """Add the gradients that came back at a step."""
        if found is not None:
            totals = self._home_of((self.rank + step) % self.call.world)
            for total, part in zip(totals or (), found, strict=True):
                total.add_(part)
        self._settle()

    def _home_of(self, worker: int) -> Blocks:
        """The part of this rank's gradients that a worker computes a share of."""
        if not self.home:
            self.home = [_sums(x, _sum_dtype(x, self.of_keys)) for x in self.own]
        return _cut(self.home, self.call.needed(worker, self.rank))

    def _settle(self) -> None:
        self.left -= 1
        if self.left:
            return
        dq = torch.zeros_like(self.q) if self.dq is None else self.dq
        self.store([dq, *self.home[:2], self.dbias, self.home[2] if len(self.home) > 2 else None])
        self.dq, self.dbias, self.home = None, None, []


class Coming(NamedTuple):
    """Gradients on their way home."""

    share: Share
    step: int
    transfer: Transfer

    def arrive(self) -> None:
        self.share.bring_home(self.transfer.wait(), self.step)


def _added(total: Tensor | None, part: Tensor, rows: Interval, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of pieces of dq; it starts with the first piece if that has all rows."""
    if total is None and rows == (0, like.shape[-2]):
        return part.to(dtype)
    total = _sums(like, dtype) if total is None else total
    block.rows_of(total, rows).add_(part)
    return total


def _post(call: DistributedCall, q: Tensor, k: Tensor, v: Tensor, back: bool) -> Post:
    group = group_named(call.group)
    hidden = q.is_cuda and cost.hides_quiet(call, sizes_of(q, k, v), back)
    return Post(quiet(group) if hidden else group)


def _around(call: DistributedCall, post: Post, own: list[Tensor]) -> list[Block]:
    """The keys, values and weights of all ranks, in turn, that this rank needs."""
    rank = post.group.rank()

    def room_for(source: int) -> Blocks:
        interval = call.needed(rank, source)
        if interval is None:
            return None
        shapes = [list(x.shape) for x in own]
        for shape, dim in zip(shapes, DIMS, strict=False):
            shape[dim] = interval[1] - interval[0]
        return [x.new_empty(shape) for x, shape in zip(own, shapes, strict=True)]

    return around(post, lambda to: _cut(own, call.needed(to, rank)), room_for)


def _cut(tensors: Sequence[Tensor], interval: Interval | None) -> list[Tensor] | None:
    """Rows of keys, values and weights, or of their gradients: views."""
    if interval is None:
        return None
    return [block.rows_of(x, interval, dim) for x, dim in zip(tensors, DIMS, strict=False)]


def _three(keys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    return keys[0], keys[1], keys[2] if len(keys) > 2 else None


def _sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros for a sum of gradients of x."""
    return torch.zeros(x.shape, dtype=dtype or statistics_dtype(x.dtype), device=x.device)


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_weight, Tensor? mask"
LIBRARY.define(f"ring_forward({_TENSORS}, str call) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"ring_backward(Tensor dout, Tensor? dlse, {_TENSORS}, Tensor out, Tensor lse, str call) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dkey_weight)"
)
implement(LIBRARY, "ring_forward", _forward, "CompositeExplicitAutograd")
implement(LIBRARY, "ring_backward", _backward, "CompositeExplicitAutograd")


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return fake_forward(Tensors(q, k, v))


def _fake_backward(dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    bias, key_weight = others[:2]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, bias, key_weight))


torch.library.register_fake("flashsci::ring_forward", on_one_device(_fake_forward), lib=LIBRARY)
torch.library.register_fake("flashsci::ring_backward", on_one_device(_fake_backward), lib=LIBRARY)


def _pairs(given: dict[str, Any]) -> int:
    """The pairs that this rank computes, for a counter of FLOPs."""
    q, call = given["q"], from_text(given["call"])
    return math.prod(q.shape[:-2]) * call.pairs(group_named(call.group).rank())


flops.PAIRS |= {"ring_forward": _pairs, "ring_backward": _pairs}
