"""One piece of a distributed call, forward and backward, by flashsci's own functions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.api.backward import Gradients, attention_backward
from flashsci.api.varlen import varlen_attention
from flashsci.call.ops import statistics_dtype
from flashsci.distributed.pieces import Piece


class Scores(NamedTuple):
    """The options on scores, as keyword arguments of :func:`flashsci.attention`."""

    scale: float | None
    softcap: float | None
    deterministic: bool
    precision: str | None
    backend: str

    def options(self) -> dict[str, Any]:
        # A compiler does not know the types of values from a constant function.
        number: Callable[[float | None], float | None] = lambda x: None if x is None else float(x)  # noqa: E731
        return dict(
            scale=number(self.scale),
            softcap=number(self.softcap),
            deterministic=bool(self.deterministic),
            precision=None if self.precision is None else str(self.precision),
            backend=str(self.backend),
        )


class Side(NamedTuple):
    """Tensors per pair, which stay with the rank of the queries: [..., Sq or 1, Sk or 1], keys of the whole
    sequence."""

    bias: Tensor | None
    mask: Tensor | None

    def of(self, piece: Piece) -> Side:
        return Side(cut(self.bias, piece), cut(self.mask, piece))


def cut(x: Tensor | None, piece: Piece) -> Tensor | None:
    """The part of a bias or mask, or of its gradient, that a piece reads: a view."""
    if x is None:
        return None
    assert piece.columns is not None
    for dim, (a, b) in ((-1, piece.columns), (-2, piece.rows)):
        if x.dim() >= -dim and x.shape[dim] != 1:
            x = x.narrow(dim, a, b - a)
    return x


def rows_of(x: Tensor, interval: tuple[int, int], dim: int = -2) -> Tensor:
    return x.narrow(dim, interval[0], interval[1] - interval[0])


def weights_of(key_weight: Tensor | None, piece: Piece) -> Tensor | None:
    return None if key_weight is None else rows_of(key_weight, piece.keys, -1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_weight: Tensor | None,
    side: Side,
    piece: Piece,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """out and lse of a piece, differentiable. q is this rank's; ``piece.keys`` counts rows of k, v and key_weight."""
    q, k, v = rows_of(q, piece.rows), rows_of(k, piece.keys), rows_of(v, piece.keys)
    side = side.of(piece)
    options: dict[str, Any] = dict(
        scores.options(),
        window=(piece.left, piece.right),
        bias=side.bias,
        key_weight=weights_of(key_weight, piece),
        return_lse=True,
    )
    if piece.offsets is None:
        return attention(q, k, v, mask=side.mask, **options)
    (of_q, of_k), longest = _packed(piece, q.device)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out, lse = varlen_attention(q, k, v, of_q, of_k, **longest, **options)
    return out.transpose(0, 1), lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_weight: Tensor | None,
    side: Side,
    found: list[Piece],
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """out and lse of queries whose keys are all here; differentiable. Pieces come in the order of their rows."""
    assert all(a.rows[1] <= b.rows[0] for a, b in itertools.pairwise(found)), "keys of a row in two pieces"
    if (
        not found
    ):  # a call without keys: it has gradients of zero, and the collectives of its backward run on every rank
        found = [Piece((0, q.shape[-2]), (0, 0), (0, 0), -1, -1)]
    if len(found) == 1 and found[0].rows == (0, q.shape[-2]):
        return forward(q, k, v, key_weight, side, found[0], scores)
    outs, lses, row = [], [], 0
    for piece in [*found, None]:
        start = q.shape[-2] if piece is None else piece.rows[0]
        blind = (*q.shape[:-2], start - row)  # rows that see no key
        outs.append(q.new_zeros(*blind, v.shape[-1]))
        lses.append(q.new_full(blind, float("-inf"), dtype=statistics_dtype(q.dtype)))
        if piece is not None:
            out, lse = forward(q, k, v, key_weight, side, piece, scores)
            outs.append(out)
            lses.append(lse)
            row = piece.rows[1]
    return torch.cat(outs, -2), torch.cat(lses, -1)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_weight: Tensor | None,
    side: Side,
    out: Tensor,
    lse: Tensor,
    piece: Piece,
    scores: Scores,
) -> Gradients:
    """A piece's share of the gradient for the whole call's out and lse."""
    dout, q, out = (rows_of(x, piece.rows) for x in (dout, q, out))
    lse, dlse = (
        rows_of(lse, piece.rows, -1),
        None if dlse is None else rows_of(dlse, piece.rows, -1),
    )
    k, v = rows_of(k, piece.keys), rows_of(v, piece.keys)
    side = side.of(piece)
    options: dict[str, Any] = dict(
        scores.options(),
        window=(piece.left, piece.right),
        bias=side.bias,
        key_weight=weights_of(key_weight, piece),
        dlse=dlse,
    )
    if piece.offsets is None:
        return attention_backward(dout, q, k, v, out, lse, mask=side.mask, **options)
    (of_q, of_k), longest = _packed(piece, q.device)
    dout, q, k, v, out = (x.transpose(0, 1) for x in (dout, q, k, v, out))
    found = attention_backward(dout, q, k, v, out, lse, cu_seqlens_q=of_q, cu_seqlens_k=of_k, **longest, **options)
    return found._replace(**{n: getattr(found, n).transpose(0, 1) for n in ("dq", "dk", "dv")})


def _packed(piece: Piece, device: torch.device) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    assert piece.offsets is not None
    of_q, of_k = piece.offsets
    longest = [max(b - a for a, b in itertools.pairwise(x)) for x in (of_q, of_k)]
    return (_offsets(of_q, device), _offsets(of_k, device)), dict(max_seqlen_q=longest[0], max_seqlen_k=longest[1])


@functools.lru_cache(maxsize=256)
def _offsets(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
