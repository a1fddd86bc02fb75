"""Second tangents of out and lse in fp64, with what the roundings of a fused kernel can do to them: forward mode over
forward mode.

The formulas are those of docs/develop/kernels/second_order.md, on the values of second_order.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.testing.second_order import Sized

Tangents = dict[str, Any]  # Tensor or Sized, by name: "tq", "tk", "tv", "tbias", "tkey_weight", "tpair_gate"


def second_direction(tangents: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A second direction, and the tangents of the first direction along it, from those of the first."""
    return {n: x.flip(-1) for n, x in tangents.items()}, {n: x.roll(1, -1) for n, x in tangents.items()}


class Moved(NamedTuple):
    """The tangents of scores and probabilities along one direction; None: zero."""

    raw: Sized | None  # of products, before the softcap
    t: Sized | None  # of scores, less the mean
    extra: Sized | None  # the part of P's that comes from key weights
    mean: Sized | None  # of lse
    w: Sized | None  # of P
    factor: Sized | None  # of the factor of P


class SecondTangents:
    """The values of one call that its second tangents need; per query head, [*, Hq, Sq, Sk], [*, Hq, S, D] or, for
    rows, [*, Hq, Sq, 1]. The names are those of :func:`flashsci.testing.second_order.second_order`."""

    def __init__(
        self,
        q: Sized,
        k: Sized,
        v: Sized,
        p: Sized,
        bare: Sized,
        keep: Sized,
        dropped: Sized,
        scale: float,
        slope: Sized | None,
        bend: Sized | None,
        rounded: Callable[[Tensor], Tensor],
        tiny: float,
        caps_bias: bool,
        p_sink: Sized | None,
    ):
        self.q, self.k, self.v, self.p, self.bare = q, k, v, p, bare
        self.keep, self.dropped, self.scale, self.slope, self.bend = keep, dropped, scale, slope, bend
        self.rounded, self.tiny, self.caps_bias, self.p_sink = rounded, tiny, caps_bias, p_sink

    def results(self, first: Tangents, second: Tangents, mixed: Tangents) -> dict[str, Sized]:
        """The second tangents of out and lse, "tuout" and "tulse"."""
        a, b = self._moved(first), self._moved(second)
        crossed = [(first.get("tq"), second.get("tk")), (second.get("tq"), first.get("tk"))]
        raw = self._raw(mixed, [(x, y) for x, y in crossed if x is not None and y is not None])
        rate = self._scores(raw, mixed)
        if self.bend is not None and a.raw is not None and b.raw is not None:
            rate = _sum(rate, self.bend.times(a.raw).times(b.raw))
        rate = _sum(rate, _product(a.t, b.t))
        extra = None if "tkey_weight" not in mixed else self.bare.times(mixed["tkey_weight"])
        for x, t in ((first, b.t), (second, a.t)):
            if "tkey_weight" in x and t is not None:
                extra = _sum(extra, self.bare.times(x["tkey_weight"]).times(t))
        mean = _sum(_product(self.p, rate), extra)
        mean = None if mean is None else mean.row()
        if self.p_sink is not None and a.mean is not None and b.mean is not None:
            mean = _sum(mean, self.p_sink.times(a.mean).times(b.mean))
        change = None if mean is None else self.p.times(mean.scaled(-1) if rate is None else rate.minus(mean))
        change = _sum(change, extra)
        parts = [
            (_product(change, self.keep), self.v),
            (_product(a.w, b.factor), self.v),
            (_product(b.w, a.factor), self.v),
            (self._of_gate(mixed), self.v),
            (_sum(_product(a.w, self.keep), _product(self.p, a.factor)), second.get("tv")),
            (_sum(_product(b.w, self.keep), _product(self.p, b.factor)), first.get("tv")),
            (self.p.times(self.keep), mixed.get("tv")),
        ]
        out: Sized | None = None
        for weights, rows in parts:
            if weights is not None and rows is not None:
                out = _sum(out, weights.rounded(self.rounded, self.tiny).matmul(rows))
        nothing = self.p._replace(loose=None).map(torch.zeros_like)
        out = nothing.matmul(self.v) if out is None else out
        mean = nothing.row() if mean is None else mean
        return {"tuout": out, "tulse": mean.map(lambda x: x.squeeze(-1))}

    def _raw(self, tangents: Tangents, more: list[tuple[Sized, Sized]]) -> Sized | None:
        """The tangent of products; ``more``: pairs of rows whose product is part of it."""
        tq, tk = tangents.get("tq"), tangents.get("tk")
        pairs = list(more)
        if tq is not None:
            pairs.append((tq, self.k))
        if tk is not None:
            pairs.append((self.q, tk))
        found: Sized | None = None
        for x, y in pairs:
            found = _sum(found, x.matmul(y.turned()))
        found = None if found is None else found.scaled(self.scale)
        return _sum(found, self._of_bias(tangents)) if self.caps_bias else found

    def _scores(self, raw: Sized | None, tangents: Tangents) -> Sized | None:
        """The tangent of scores from that of products."""
        t = raw if raw is None or self.slope is None else raw.times(self.slope)
        return t if self.caps_bias else _sum(t, self._of_bias(tangents))

    def _of_bias(self, tangents: Tangents) -> Sized | None:
        shape = self.p.value.shape
        return None if "tbias" not in tangents else tangents["tbias"].map(lambda x: x.expand(shape))

    def _of_gate(self, tangents: Tangents) -> Sized | None:
        """P times the tangent of its factor."""
        return _product(self.p, self._factor(tangents))

    def _factor(self, tangents: Tangents) -> Sized | None:
        shape = self.p.value.shape
        if "tpair_gate" not in tangents:
            return None
        gate: Sized = tangents["tpair_gate"].map(lambda x: x.expand(shape))
        return self.dropped.times(gate)

    def _moved(self, tangents: Tangents) -> Moved:
        raw = self._raw(tangents, [])
        t = self._scores(raw, tangents)
        extra = self.bare.times(tangents["tkey_weight"]) if "tkey_weight" in tangents else None
        mean = _sum(_product(self.p, t), extra)
        if mean is None:
            return Moved(raw, None, None, None, None, self._factor(tangents))
        mean = mean.row()
        nothing = self.p._replace(loose=None).map(torch.zeros_like)
        t = (nothing if t is None else t).minus(mean)
        return Moved(raw, t, extra, mean, _sum(self.p.times(t), extra), self._factor(tangents))


def _sum(x: Sized | None, y: Sized | None) -> Sized | None:
    return y if x is None else x if y is None else x.plus(y)


def _product(x: Sized | None, y: Sized | None) -> Sized | None:
    return None if x is None or y is None else x.times(y)
