"""The first parts of the formula: scores, their softmax, and the rows whose scores are too large for small errors."""

from __future__ import annotations

import torch
from torch import Tensor

from flashsci.testing.blocks import Block
from flashsci.testing.tolerance import FAR, LEAST_SHARE, LEAST_WEIGHT, LOWEST, ROUNDINGS


def turn(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)


def row(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def slope_of(x: Tensor) -> Tensor:
    """1 - tanh^2 x without cancellation for large x."""
    return 1 / torch.cosh(x.clamp(-300, 300)) ** 2


class Heads:
    """The query heads that share a key head, and the sums over them."""

    def __init__(self, b: Block):
        self.group = b.q.shape[-3] // b.k.shape[-3]
        self.key_weight = b.key_weight

    def per_query(self, x: Tensor) -> Tensor:
        """[*, Hk, Sk, D] repeated for every query head."""
        return x.repeat_interleave(self.group, -3)

    def per_key(self, x: Tensor) -> Tensor:
        """[*, Hq, Sk, D] summed over the query heads of each key head."""
        return x.unflatten(-3, (-1, self.group)).sum(-3) if self.group > 1 else x

    def per_pair(self, x: Tensor) -> Tensor:
        """Key weights in the shape that multiplies the scores."""
        return (x.repeat_interleave(self.group, -2) if x.shape[-2] > 1 else x)[..., None, :]

    def per_weight(self, x: Tensor) -> Tensor:
        """[*, Hq, Sq, Sk] summed to the shape of the key weights."""
        assert self.key_weight is not None
        grouped = x.sum(-2).unflatten(-2, (-1, self.group))
        return grouped.sum(-2).sum_to_size(self.key_weight.shape)


def per_head(x: Tensor) -> Tensor:
    """[*, Hq, Sq, 1] summed to one number a head."""
    return x.movedim(-3, 0).flatten(1).sum(1)


class Scores:
    """The scores of a block and their softmax, without roundings: [*, Hq, Sq, Sk] or, for rows, [*, Hq, Sq, 1].

    ``raw``: before the softcap; ``tanh``: of the softcap, or None; ``scores``: with bias and ALiBi, which are part of
    ``raw`` if the softcap bounds them (``addends`` is zero then); ``w``: key weights. ``attended``: pairs that mask, bias and window allow. ``visible``: the same in rows that have a key or a
    sink; ``empty``: rows without keys; ``unseen``: rows with neither. ``largest``: the largest score plus log w of a
    row; ``top``: the same with the sink. ``weights`` = w e^(scores - top); ``total``: their sum with the sink's.
    """

    def __init__(self, b: Block, k: Tensor, heads: Heads):
        zero = b.q.new_zeros(())
        self.raw_abs = abs(b.scale) * (b.q.abs() @ turn(k.abs()))
        self.raw = b.scale * (b.q @ turn(k))
        bias = torch.zeros_like(self.raw_abs) if b.bias is None else b.bias.expand(self.raw.shape)
        self.attended = b.visible.expand(self.raw.shape) & (bias > -torch.inf)
        self.bias = torch.where(self.attended, bias, zero)
        self.alibi = zero if b.alibi is None else b.alibi
        self.addends, self.caps_bias = self.bias + self.alibi, b.caps_bias
        if b.caps_bias:
            self.raw_abs = self.raw_abs + self.bias.abs() + self.alibi.abs()
            self.raw, self.addends = self.raw + self.addends, torch.zeros_like(self.raw)
        self.tanh = torch.tanh(self.raw / b.softcap) if b.softcap else None
        capped = self.raw
        if self.tanh is not None and b.softcap:
            capped = b.softcap * self.tanh
        self.capped = capped
        self.scores = capped + self.addends

        w = zero + 1 if b.key_weight is None else heads.per_pair(b.key_weight)
        self.w = torch.where(w < LEAST_WEIGHT, zero, w)
        self.log_w = torch.log(self.w)
        self.empty = ~(self.attended & (self.w > 0)).any(-1, keepdim=True)
        self._tops(b)

        # With a sink, keys that all have weight zero still count: their weights have a gradient.
        self.visible = self.attended & ~self.unseen
        above = torch.where(self.visible, self.scores - self.top, zero)
        self.weights = self.w * torch.where(self.visible, torch.exp(above), zero)
        total = row(self.weights) + torch.exp(self.sink - self.top)
        self.total = torch.where(self.unseen, zero + 1, total)
        self.lse = torch.log(self.total) + self.top
        self.p = self.weights / self.total

    def _tops(self, b: Block) -> None:
        """Fill largest, top, sink and unseen."""
        zero, empty = b.q.new_zeros(()), self.empty
        top = torch.where(self.attended & ~empty, self.scores + self.log_w, -torch.inf).detach()
        if top.shape[-1]:
            top = top.amax(-1, keepdim=True)
        else:
            top = self.raw_abs.new_zeros(*top.shape[:-1], 1)
        self.unseen = empty
        top = self.largest = torch.where(empty, zero, top)
        self.sink = zero - torch.inf if b.sink is None else b.sink
        if b.sink is not None:
            top = torch.maximum(torch.where(empty, -torch.inf, top), self.sink).detach()
            self.unseen = top == -torch.inf
            top = torch.where(self.unseen, zero, top)
        self.top = top

    def residual_abs(self) -> Tensor:
        """The formula of the scores on absolute values, for scores that are a result."""
        return self.raw_abs + self.capped.abs() + self.bias.abs() + self.scores.abs()

    def sizes(self, softcap: float | None, internal: float) -> Tensor:
        """The formula of scores - lse on absolute values: errors of scores are its internal roundings."""
        zero = self.raw.new_zeros(())
        spread = self.raw_abs
        if softcap:  # no error of a score is larger than the cap
            spread = self.raw_abs.clamp(max=2 * softcap / (ROUNDINGS * internal))
        terms = spread + self.capped.abs()
        if (
            self.caps_bias and softcap
        ):  # a number that stands for a mask is far beyond the cap, and its error without effect
            terms = torch.minimum(spread, self.raw_abs * self.steepest(softcap, internal)) + self.capped.abs()
        else:
            terms = terms + self.bias.abs() + self.alibi.abs()
        terms = terms + self.scores.abs() + self.lse.abs()
        return torch.where(self.visible, terms, zero) + torch.where(self.w > 0, self.log_w.abs(), zero)

    def off(self, softcap: float, internal: float) -> Tensor:
        """The possible error of the argument of the softcap's tanh."""
        return ROUNDINGS * internal * self.raw_abs / softcap

    def steepest(self, softcap: float, internal: float) -> Tensor:
        """The largest slope of the softcap within that error."""
        return slope_of(((self.raw / softcap).abs() - self.off(softcap, internal)).clamp(min=0))

    def before_normalising(self, keep: Tensor, sink: bool) -> Tensor:
        """P as kernels may round it, before it is divided by the sum of its row; they compute no sink."""
        if not sink:
            return self.weights * keep
        above = torch.where(self.visible & ~self.empty, self.scores - self.largest, -torch.inf)
        return self.w * torch.exp(above) * keep


class LooseRows:
    """The rows whose scores have errors near 1 or beyond, and the possible change of P and lse there.

    ``far``: which rows. ``p``, ``lse``: possible changes, ``worst``: the largest error of a score of a row that
    counts; all None if no row is loose. ``error``: of every score.
    """

    def __init__(self, s: Scores, sizes: Tensor, unit: float, internal: float):
        zero = s.raw.new_zeros(())
        shift = s.scores + s.log_w - s.lse
        shift = torch.where(s.visible & (s.w > 0), shift, -torch.inf).detach()
        self.error = ROUNDINGS * internal * sizes
        reached = shift + self.error > LEAST_SHARE
        # Scores that overflow in powers of two: such a row may count as one without keys.
        lowest = ~s.empty & (s.top < LOWEST)
        self.far = (reached & (sizes > FAR)).any(-1, keepdim=True) | lowest
        self.p = self.lse = self.worst = None
        if self.far.any():
            worst = torch.where(reached, self.error, zero).amax(-1, keepdim=True)
            most = torch.exp((shift + self.error + worst).clamp(max=0))
            moved = torch.maximum(most - s.p, s.p - torch.exp(shift - self.error - worst))
            moved = torch.where(lowest, zero + 1, moved)
            # Its own roundings included.
            moved = torch.where(self.far & s.visible, moved, zero)
            of_lse = worst + ROUNDINGS * internal * s.lse.abs()
            of_lse = torch.where(lowest, 2 * s.lse.abs(), of_lse)
            self.worst = worst
            self.p = (1 + 4 * ROUNDINGS * unit) * moved
            self.lse = torch.where(self.far, of_lse, zero)

    def bare(self, s: Scores, lse: Tensor, bare: Tensor) -> Tensor | None:
        """The possible size of P without key weights in loose rows; None if there are none."""
        if self.worst is None:
            return None
        grown = torch.where(s.visible, s.scores - lse, -torch.inf).detach() + self.error + self.worst
        most = torch.where(s.w > 0, 1 / s.w, torch.inf)
        most = torch.minimum(torch.exp(grown.clamp(max=600)), most)
        most = torch.where(self.far & s.visible, torch.maximum(most, bare), most.new_zeros(()))
        return most.detach()
