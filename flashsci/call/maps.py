"""Attention maps from q, k and lse, block by block: probabilities, and what is reduced from them.

    S = softcap(scale Q K^T) + bias - slope |i + shift - j|, masked
    P = w exp(S - lse)

Or the softcap bounds that sum, where the forward's did.

Everything is computed in float32, or in float64 for float64. A block of rows is in memory at a time, with all of its
keys: forward and backward compute it again rather than keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.call import recompute
from flashsci.call.map_tensors import MapTensors
from flashsci.call.ops import Scalars
from flashsci.call.torch_state import holds, transforming

#: Probabilities of a block, at most, unless one row has more.
BLOCK = 1 << 24

Selection = slice | Tensor
ALL = slice(None)
#: A function that selects the tensors of a block, and the distance of each key after the diagonal of each query.
Block = tuple[Callable[[MapTensors], MapTensors], Tensor]


class Reductions(NamedTuple):
    """The results that are wanted of a map; hashable."""

    weights: bool = False
    average_heads: bool = False
    entropy: bool = False
    largest_score: bool = False
    key_sum: bool = False
    top_k: int = 0

    def reduces(self) -> bool:
        """Whether a result is wanted that is numbers for each row or key."""
        return self.entropy or self.largest_score or self.key_sum or self.top_k > 0

    def joins(self) -> tuple[int | None, ...]:
        """For each result the dim along which blocks of rows are joined; None: they are summed."""
        found: list[int | None] = []
        found += [-2] * (self.weights or self.average_heads)
        found += [-1] * self.entropy + [-1] * self.largest_score
        found += [None] * self.key_sum
        return (*found, *((-2, -2) if self.top_k else ()))


def _chosen(x: Tensor, selection: Selection, dim: int) -> Tensor:
    """The selected places of a dim, which may be broadcast."""
    if x.dim() < -dim or (isinstance(selection, slice) and selection == ALL):
        return x
    one = x.shape[dim] == 1
    # A length that a compiler does not know is that of a sequence, which is not broadcast.
    if bool(one) if isinstance(one, Tensor) else holds(one):
        return x
    return _picked(x, selection, dim)


def _picked(x: Tensor, selection: Selection, dim: int) -> Tensor:
    place: tuple[Any, ...] = (..., selection, *(slice(None),) * (-dim - 1))
    return x[place]


def selected(tensors: MapTensors, rows: Selection, columns: Selection) -> MapTensors:
    """The tensors of these rows and columns alone."""
    pairs = [None if x is None else _chosen(_chosen(x, rows, -2), columns, -1) for x in (tensors.bias, tensors.mask)]
    weight = tensors.key_weight
    return tensors._replace(
        q=_picked(tensors.q, rows, -2),
        k=_picked(tensors.k, columns, -2),
        lse=_picked(tensors.lse, rows, -1),
        bias=pairs[0],
        mask=pairs[1],
        key_weight=None if weight is None else _chosen(weight, columns, -1),
    )


def _scores(tensors: MapTensors, away: Tensor, scalars: Scalars) -> Tensor:
    """S of a block; ``away`` [R, C]: the distance of each key after the diagonal of each query."""
    q, k = tensors.q, tensors.k
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    keys = reference.per_query_head(k.to(dtype), q.shape[-3] if q.dim() > 2 else 1)
    scores = reference._product(q.to(dtype), keys.transpose(-1, -2)) * scalars.scale
    hidden = [] if tensors.mask is None else [~tensors.mask]
    if scalars.softcap and not scalars.caps_bias:
        scores = scalars.softcap * reference._tanh(scores / scalars.softcap)
    if tensors.bias is not None:
        bias = tensors.bias.to(dtype)
        if scalars.caps_bias:
            hidden.append(bias == -math.inf)
            bias = bias.masked_fill(hidden[-1], 0)
        scores = scores + bias
    if tensors.alibi_slopes is not None:
        slopes = tensors.alibi_slopes.to(dtype)
        scores = scores - (slopes[..., None, None] if scores.dim() > 2 else slopes[..., None]) * away.abs()
    if scalars.caps_bias:
        scores = scalars.softcap * reference._tanh(scores / scalars.softcap)
    if scalars.window_left >= 0:
        hidden.append(away < -scalars.window_left)
    if scalars.window_right >= 0:
        hidden.append(away > scalars.window_right)
    for where in hidden:
        scores = scores.masked_fill(where, -math.inf)
    return scores


def _probabilities(scores: Tensor, tensors: MapTensors) -> tuple[Tensor, Tensor]:
    """P of a block, and log P where P is not zero (0 elsewhere)."""
    lse = tensors.lse.to(scores.dtype).unsqueeze(-1)
    empty = lse == -math.inf
    exponent = scores - lse.masked_fill(empty, 0)
    most: float | Tensor = 0.0
    weights = None
    if tensors.key_weight is not None:
        weights = reference._weights(tensors.key_weight, scores.shape[-3] if scores.dim() > 2 else 1, scores.dtype)
        most = (-weights.detach().log()).clamp(max=math.log(torch.finfo(scores.dtype).max) - 8)
    # P is at most 1; scores of -1e9 leave an lse rounded to multiples of 64.
    exponent = reference.at_most(exponent, most)
    p = torch.exp(exponent)
    if weights is not None:
        p = reference.at_most(weights * p, 1.0)
    p = p.masked_fill(empty, 0)
    nothing = p.detach() == 0
    logarithm = exponent if weights is None else exponent + torch.where(weights == 0, 1.0, weights).log()
    return p, logarithm.masked_fill(nothing, 0)


def _block(tensors: MapTensors, away: Tensor, scalars: Scalars, wanted: Reductions) -> tuple[Tensor, ...]:
    """The results of a block of rows, in the order of :meth:`Reductions.joins`."""
    scores = _scores(tensors, away, scalars)
    p, logarithm = _probabilities(scores, tensors)
    found = []
    if wanted.weights:
        found.append(p)
    if wanted.average_heads:
        found.append(p.mean(-3) if p.dim() > 2 else p)
    if wanted.entropy:
        found.append(-(p * logarithm).sum(-1))
    if wanted.largest_score:
        some = holds(scores.shape[-1] > 0)
        found.append((scores if some else torch.nn.functional.pad(scores, (0, 1), value=-math.inf)).amax(-1))
    if wanted.key_sum:
        found.append(p.sum(-2))
    if wanted.top_k:
        found.extend(_largest(p, wanted.top_k))
    return tuple(found)


def _largest(p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest probabilities of each row and their keys; zeros of key -1 where there are fewer keys."""
    keys = p.shape[-1]
    if holds(keys >= count):
        values, places = torch.topk(p, count, -1)
        return values, places
    values, places = torch.topk(torch.nn.functional.pad(p, (0, count), value=-1.0), count, -1)
    beyond = places >= keys
    return values.masked_fill(beyond, 0), places.masked_fill(beyond, -1)


def _blocks(tensors: MapTensors, rows: Selection, columns: Selection, scalars: Scalars) -> list[Block]:
    """For each block that selects its tensors, and the distances of its pairs."""
    q, k = tensors.q, tensors.k
    device = q.device
    i, j = (torch.arange(n, device=device)[s] for n, s in ((q.shape[-2], rows), (k.shape[-2], columns)))
    shift = k.shape[-2] - q.shape[-2] if scalars.lower_right else 0
    pairs = math.prod(tensors.lse.shape[:-1]) * max(1, j.shape[0])
    step = max(1, BLOCK // max(1, pairs))
    # All rows at once where a compiler does not know their number: it traces a number of blocks that is fixed.
    single = step >= i.shape[0]
    if bool(single) if isinstance(single, Tensor) else holds(single, unknown=True):
        return [(lambda given: selected(given, rows, columns), j - i[:, None] - shift)]
    found: list[Block] = []
    for start in range(0, i.shape[0], step):
        part: Selection = i[start : start + step]
        if isinstance(rows, slice) and rows.step in (None, 1):  # views, not copies
            first = (rows.indices(q.shape[-2])[0]) + start
            part = slice(first, min(first + step, rows.indices(q.shape[-2])[1]))

        def choose(given: MapTensors, part: Selection = part) -> MapTensors:
            return selected(given, part, columns)

        found.append((choose, j - i[start : start + step, None] - shift))
    return found


def _joined(parts: list[tuple[Tensor, ...]], wanted: Reductions) -> tuple[Tensor, ...]:
    if len(parts) == 1:
        return parts[0]
    found = []
    for dim, pieces in zip(wanted.joins(), zip(*parts, strict=True), strict=True):
        if dim is not None:
            found.append(torch.cat(pieces, dim))
        else:
            total = pieces[0]
            for piece in pieces[1:]:
                total = total + piece
            found.append(total)
    return tuple(found)


def _computed(
    tensors: MapTensors, rows: Selection, columns: Selection, scalars: Scalars, wanted: Reductions
) -> tuple[Tensor, ...]:
    blocks = _blocks(tensors, rows, columns, scalars)
    return _joined([_block(choose(tensors), away, scalars, wanted) for choose, away in blocks], wanted)


class Map(torch.autograd.Function):
    """The results of a map, whose backward computes each block again."""

    @staticmethod
    def forward(
        ctx: Any, rows: Selection, columns: Selection, scalars: Scalars, wanted: Reductions, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        found = _computed(MapTensors(*given), rows, columns, scalars, wanted)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        ctx.selections, ctx.scalars, ctx.wanted = (rows, columns), scalars, wanted
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        given, needed = ctx.saved_tensors, ctx.needs_input_grad[4:]
        rows, columns = ctx.selections
        sums: list[Tensor | None] = [None] * len(given)
        if any(g is not None for g in cotangents):
            begin = 0
            for choose, away in _blocks(MapTensors(*given), rows, columns, ctx.scalars):
                end = begin + away.shape[0]
                parts = _parts(cotangents, ctx.wanted, begin, end)
                begin = end

                def compute(
                    *inputs: Tensor | None, choose: Callable[..., MapTensors] = choose, away: Tensor = away
                ) -> Any:
                    tensors = choose(MapTensors(*inputs))  # type: ignore[arg-type]
                    return _block(tensors, away, ctx.scalars, ctx.wanted)

                found = recompute.gradients(compute, given, needed, parts)
                sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, found, strict=True)]
        return (None, None, None, None, *sums)


def _parts(cotangents: Sequence[Tensor | None], wanted: Reductions, begin: int, end: int) -> list[Tensor | None]:
    """The cotangents of a block of rows."""
    joins = wanted.joins()
    return [
        g if g is None or dim is None else g.narrow(dim, begin, end - begin)
        for g, dim in zip(cotangents, joins, strict=True)
    ]


def compute(
    tensors: MapTensors, rows: Selection, columns: Selection, scalars: Scalars, wanted: Reductions
) -> tuple[Tensor, ...]:
    """The results of a map, in the order of the fields of ``wanted``; differentiable to any order.

    Second derivatives and those of transforms keep the probabilities of all blocks.
    """
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if recorded and not torch.compiler.is_compiling() and not transforming():
        found: tuple[Tensor, ...] = Map.apply(rows, columns, scalars, wanted, *tensors)
        return found
    return _computed(tensors, rows, columns, scalars, wanted)
