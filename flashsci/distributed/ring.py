"""Ring attention: keys and values travel, queries stay.

    forward   (O_s, L_s) of each block of keys; L = log sum_s e^{L_s}; O = sum_s e^{L_s - L} O_s, summed in fp32
    backward  each block's gradients under the whole O and L; dq is summed where it is, dk and dv travel back to the rank of the
              keys and are summed there in the order of steps, in fp32. What one call gave travels as it gave it, a sum of
              several in fp32

Where no sum has more than two parts (two ranks) it is rounded once in any case, and is in the dtype of the tensors.

Two blocks of keys and values are in memory beside the rank's own, never the sequence; in the backward of long sequences those of
a few heads at a time (groups.py). A backward that is itself differentiated is recorded by the all-gather strategy, which has
derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.distributed import block, gather, recording
from flashsci.distributed.block import Side
from flashsci.distributed.call import Call, from_text
from flashsci.distributed.collectives import group_named
from flashsci.distributed.exchange import Blocks, Transfer, rounds
from flashsci.distributed.groups import head_groups
from flashsci.distributed.layout import Interval
from flashsci.distributed.merging import merge
from flashsci.ops import (
    LIBRARY,
    Tensors,
    empty_like_layout,
    fake_forward,
    follow_layout,
    statistics_dtype,
)


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


DIMS = (-2, -2, -1)  # that of the rows, of k, v and key_weight


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
    sums = _sum_dtype(q, call.most_parts(rank)[0])
    out: Tensor | None = None
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=statistics)
    for source, keys in _travelling(call, k, v, key_weight):
        for piece in call.needed_pieces(rank, source):
            assert keys is not None
            part, part_lse = block.forward(q, *_three(keys), side, piece, call.scores)
            if out is None and piece.rows == (0, q.shape[-2]):  # the beginning of the sums
                out, lse = part.to(sums), part_lse
            else:
                out = _nothing(q, v, sums) if out is None else out
                rows = block.rows_of(out, piece.rows), block.rows_of(lse, piece.rows, -1)
                merge(*rows, part, part_lse)
            del part, part_lse
        del keys  # before there is memory for the next but one
    out = _nothing(q, v, sums) if out is None else out
    return follow_layout(out.to(q.dtype), q), lse


def _nothing(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """out of queries that have seen no key yet."""
    return empty_like_layout(q, (*q.shape[:-1], v.shape[-1]), dtype).zero_()


def _sum_dtype(x: Tensor, parts: int) -> torch.dtype:
    """Of a sum of so many parts in x's dtype: two are rounded once in any case, and take half the memory so."""
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
    groups = head_groups(call, q, k, v, bias, key_weight)
    if len(groups) == 1:
        return _results(tensors, _backward_of(call, dout, dlse, *tensors, out, lse)())
    whole = [None if x is None else x.new_empty(x.shape) for x in tensors[:5]]
    pending: Callable[[], None] | None = (
        None  # the group before: its last gradients are on their way home
    )
    for group in groups:
        dout_part, dlse_part, *results = group.of_results(dout, dlse, out, lse)
        end = _backward_of(call, dout_part, dlse_part, *group.of(*tensors), *results)
        if pending is not None:
            pending()
        pending = functools.partial(group.store, whole, end)
        del end
    assert pending is not None
    pending()
    return _results(tensors, whole)


def _results(
    tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Gradients as an operator gives them: an empty tensor for none."""
    q = tensors[0]
    assert q is not None
    return tuple(
        q.new_empty(0) if x is None or g is None else g.to(x.dtype)
        for x, g in zip(tensors[:5], gradients, strict=True)
    )


def _backward_of(
    call: Call,
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
) -> Callable[[], list[Tensor | None]]:
    """What waits for the last gradients of this rank's keys, and then has all: dq, dk, dv, dbias, dkey_weight."""
    rank, side = group_named(call.group).rank(), Side(bias, mask)
    of_queries, of_keys = call.most_parts(rank)
    own = [x for x in (k, v, key_weight) if x is not None]
    dbias = None if bias is None else _sums(bias)
    home: list[Tensor] = []
    dq: Tensor | None = None
    returning: Transfer | None = None
    for step, (source, keys) in enumerate(_travelling(call, k, v, key_weight)):
        found = call.needed_pieces(rank, source)
        one = len(found) == 1  # as the one call gives them
        if step:
            parts = None if keys is None or one else [_sums(x) for x in keys]
        elif one and call.needed(rank, rank) == found[0].keys == (0, k.shape[-2]):
            parts = None
        else:  # the rank's own go where they belong
            home = [_sums(x, _sum_dtype(x, of_keys)) for x in own]
            parts = _cut(home, call.needed(rank, rank))
        for piece in found:
            assert keys is not None
            share = block.backward(dout, dlse, q, *_three(keys), side, out, lse, piece, call.scores)
            dq = _added(dq, share.dq, piece.rows, q, _sum_dtype(q, of_queries))
            cell = block.cut(dbias, piece) if dbias is not None else None
            if cell is not None and share.dbias is not None:
                cell.add_(share.dbias)
            shares = [x for x in (share.dk, share.dv, share.dkey_weight) if x is not None]
            del share
            if parts is None:
                parts = shares
            else:
                for total, part, dim in zip(parts, shares, DIMS, strict=False):
                    block.rows_of(total, piece.keys, dim).add_(part)
            del shares
        del keys
        if not home:
            assert parts is not None
            home = [x.to(_sum_dtype(x, of_keys)) for x in parts]
        if step:
            _bring_home(returning, home, call, step - 1)
            returning = _send_home(parts, home, own, call, step)
        del parts

    def end() -> list[Tensor | None]:
        _bring_home(returning, home, call, call.world - 1)
        total = torch.zeros_like(q) if dq is None else dq
        return [total, *home[:2], dbias, home[2] if len(home) > 2 else None]

    return end


def _added(
    total: Tensor | None, part: Tensor, rows: Interval, like: Tensor, dtype: torch.dtype
) -> Tensor:
    """The sum of pieces of dq; the first, if it is of all rows, is its beginning."""
    if total is None and rows == (0, like.shape[-2]):
        return part.to(dtype)
    total = _sums(like, dtype) if total is None else total
    block.rows_of(total, rows).add_(part)
    return total


def _travelling(
    call: Call, k: Tensor, v: Tensor, key_weight: Tensor | None
) -> Iterator[tuple[int, Blocks]]:
    """(source, what this rank needs of its keys, values and weights), all ranks in turn."""
    group, own = group_named(call.group), [x for x in (k, v, key_weight) if x is not None]
    rank = group.rank()

    def sent_to(to: int) -> Blocks:
        return _cut(own, call.needed(to, rank))

    def room_for(source: int) -> Blocks:
        interval = call.needed(rank, source)
        if interval is None:
            return None
        shapes = [list(x.shape) for x in own]
        for shape, dim in zip(shapes, DIMS, strict=False):
            shape[dim] = interval[1] - interval[0]
        return [x.new_empty(shape) for x, shape in zip(own, shapes, strict=True)]

    return rounds(group, sent_to(rank), sent_to, room_for)


def _send_home(
    parts: Blocks, home: list[Tensor], own: list[Tensor], call: Call, step: int
) -> Transfer:
    """Gradients of a block to the rank of its keys; those that another rank found of this one's come back."""
    group = group_named(call.group)
    rank, world = group.rank(), group.size()
    worker = (rank + step) % world
    mine = _cut(home, call.needed(worker, rank))
    exact = len(call.pieces(worker, rank)) == 1  # as the one call gave them
    room = None
    if mine is not None:
        dtypes = [x.dtype if exact else statistics_dtype(x.dtype) for x in own]
        room = [x.new_empty(x.shape, dtype=d) for x, d in zip(mine, dtypes, strict=True)]
    return Transfer(group, parts, (rank - step) % world, room, worker)


def _bring_home(returning: Transfer | None, home: list[Tensor], call: Call, step: int) -> None:
    """Add what came back at a step."""
    found = None if returning is None else returning.wait()
    if found is None:
        return
    rank = group_named(call.group).rank()
    totals = _cut(home, call.needed((rank + step) % call.world, rank))
    for total, part in zip(totals or (), found, strict=True):
        total.add_(part)


def _cut(tensors: Sequence[Tensor], interval: Interval | None) -> list[Tensor] | None:
    """Rows of keys, values and weights, or of their gradients: views."""
    if interval is None:
        return None
    return [block.rows_of(x, interval, dim) for x, dim in zip(tensors, DIMS, strict=False)]


def _three(keys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    return keys[0], keys[1], keys[2] if len(keys) > 2 else None


def _sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros to sum gradients of x in."""
    return torch.zeros(x.shape, dtype=dtype or statistics_dtype(x.dtype), device=x.device)


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_weight, Tensor? mask"
LIBRARY.define(f"ring_forward({_TENSORS}, str call) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"ring_backward(Tensor dout, Tensor? dlse, {_TENSORS}, Tensor out, Tensor lse, str call) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dkey_weight)"
)
LIBRARY.impl("ring_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("ring_backward", _backward, "CompositeExplicitAutograd")


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return fake_forward(Tensors(q, k, v))


def _fake_backward(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    bias, key_weight = others[:2]
    return tuple(
        q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, bias, key_weight)
    )


torch.library.register_fake("flashsci::ring_forward", _fake_forward, lib=LIBRARY)
torch.library.register_fake("flashsci::ring_backward", _fake_backward, lib=LIBRARY)
