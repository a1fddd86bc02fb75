"""The second order of attention in fp64, with what the roundings of a fused kernel can do to it.

It evaluates the formulas of docs/develop/kernels/second_order.md on values that carry two sizes: that of the same
formula on absolute values, for roundings to the inputs' dtype (``coarse``), and the same for all that kernels keep in
fp32 (``fine``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Gradients of <tx, dx>, summed over x, by q, k, v, bias, key_weight, pair_gate, sink, dout and dlse; in forward mode tangents
# of out and lse, and their tangents along a second direction.
SECOND_ORDER = (
    "gq", "gk", "gv", "gbias", "gkey_weight", "gpair_gate", "gsink", "gdout", "gdlse", "tout", "tlse", "tuout", "tulse",
)  # fmt: skip


class Sized(NamedTuple):
    """A value, its formula on absolute values, and the possible error of fp32 roundings so far, in units of one
    rounding.

    ``loose`` is the absolute error that comes from rows whose P may have any value (formula.py); None if there are
    none.
    """

    value: Tensor
    coarse: Tensor
    fine: Tensor
    loose: Tensor | None = None

    def map(self, f: Callable[[Tensor], Tensor]) -> Sized:
        """A linear map without negative coefficients, applied to all fields."""
        return Sized(*(None if x is None else f(x) for x in self))  # type: ignore[arg-type]

    def plus(self, other: Sized, sign: int = 1) -> Sized:
        coarse = self.coarse + other.coarse
        loose = _added(self.loose, other.loose)
        return Sized(self.value + sign * other.value, coarse, self.fine + other.fine + coarse, loose)

    def minus(self, other: Sized) -> Sized:
        return self.plus(other, -1)

    def times(self, other: Sized) -> Sized:
        return self._product(other, torch.mul)

    def matmul(self, other: Sized) -> Sized:
        return self._product(other, torch.matmul)

    def _product(self, other: Sized, of: Callable[[Tensor, Tensor], Tensor]) -> Sized:
        coarse = of(self.coarse, other.coarse)
        fine = of(self.fine, other.coarse) + of(self.coarse, other.fine)
        loose = None
        if self.loose is not None:
            most = other.coarse if other.loose is None else other.coarse + other.loose
            loose = of(self.loose, most)
        if other.loose is not None:
            loose = _added(loose, of(self.coarse, other.loose))
        return Sized(of(self.value, other.value), coarse, fine + coarse, loose)

    def scaled(self, factor: float) -> Sized:
        sizes = self.map(lambda x: abs(factor) * x)
        return sizes._replace(value=factor * self.value)

    def turned(self) -> Sized:
        return self.map(lambda x: x.transpose(-1, -2))

    def row(self) -> Sized:
        return self.map(lambda x: x.sum(-1, keepdim=True))

    def rounded(self, how: Callable[[Tensor], Tensor], tiny: float) -> Sized:
        """The value rounded to the inputs' dtype, whose smallest normal number is ``tiny``."""
        return self._replace(value=how(self.value), coarse=self.coarse + tiny * (self.coarse > 0))

    @staticmethod
    def bend(tanh: Tensor, slope: Tensor, raw_abs: Tensor, softcap: float) -> Sized:
        """The second derivative of the softcap at scores ``softcap atanh(tanh)``, with the slope there."""
        coarse = 2 / softcap * tanh.abs() * slope
        steep = 2 / softcap**2 * slope * (slope + 2 * tanh * tanh)
        return Sized(-2 / softcap * tanh * slope, coarse, coarse + steep * raw_abs)


def _added(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    return x + y


def second_order(
    tangents: dict[str, Sized],
    q: Sized,
    k: Sized,
    v: Sized,
    dout: Sized,
    p: Sized,
    bare: Sized,
    keep: Sized,
    dropped: Sized,
    scale: float,
    slope: Sized | None,
    bend: Sized | None,
    dp: Sized,
    delta: Sized,
    rounded: Callable[[Tensor], Tensor],
    tiny: float,
    caps_bias: bool = False,
    p_sink: Sized | None = None,
) -> dict[str, Sized]:
    """All of SECOND_ORDER, per query head; "gbias", "gkey_weight" and "gpair_gate" in the shape of the
    scores.

    ``bare``: P without key weights. ``keep``: the factor of P, of which ``dropped`` is the part without the gate. ``p_sink``: that of the sink, a key whose score has no tangent and whose value is
    zero; None without a sink; "gsink" has a value for every row. ``caps_bias``: the softcap bounds the bias, too.

    Everything but results is [*, Hq, Sq, Sk], [*, Hq, S, D] or, for rows, [*, Hq, Sq, 1]. ``rounded`` perturbs the
    tensors that kernels round before a product, to a dtype whose smallest normal number is ``tiny``.
    """
    nothing = p._replace(loose=None).map(torch.zeros_like)
    tq, tk, tv, tbias = (tangents.get(n) for n in ("tq", "tk", "tv", "tbias"))
    extra = bare.times(tangents["tkey_weight"]) if "tkey_weight" in tangents else None
    t_raw = nothing if tq is None else tq.matmul(k.turned())
    t_raw = (t_raw if tk is None else t_raw.plus(q.matmul(tk.turned()))).scaled(scale)
    wide = None if tbias is None else tbias.map(lambda x: x.expand(p.value.shape))
    t_raw = t_raw.plus(wide) if wide is not None and caps_bias else t_raw
    t = t_raw if slope is None else t_raw.times(slope)
    t = t.plus(wide) if wide is not None and not caps_bias else t
    mean = p.times(t) if extra is None else p.times(t).plus(extra)
    mean = mean.row()
    t = t.minus(mean)
    w = p.times(t) if extra is None else p.times(t).plus(extra)
    tdp = nothing
    tout = w.times(keep).rounded(rounded, tiny).matmul(v)
    if tv is not None:
        tout = tout.plus(p.times(keep).rounded(rounded, tiny).matmul(tv))
        tdp = dout.matmul(tv.turned()).times(keep)
    moved = w.times(keep)
    bare_dp = dout.matmul(v.turned()).times(dropped)
    bare_tdp = nothing if tv is None else dout.matmul(tv.turned()).times(dropped)
    if "tpair_gate" in tangents:
        tgate = tangents["tpair_gate"].map(lambda x: x.expand(p.value.shape))
        of_gate = p.times(dropped).times(tgate)
        tout = tout.plus(of_gate.rounded(rounded, tiny).matmul(v))
        tdp, moved = tdp.plus(bare_dp.times(tgate)), moved.plus(of_gate)
    zeta = dout.times(tout).row()
    u, y = dp.minus(delta), tdp.minus(zeta)
    e = p.times(u)
    f = e.times(t).plus(p.times(y))
    f = f if extra is None else f.plus(extra.times(u))
    e_raw, f_raw = e, f
    if slope is not None and bend is not None:
        e_raw, f_raw = e.times(slope), f.times(slope).plus(bend.times(t_raw).times(e))
    of_bias = f_raw if caps_bias else f
    f_raw = f_raw.rounded(rounded, tiny)
    gq, gk = f_raw.matmul(k), f_raw.turned().matmul(q)
    e_raw = e_raw.rounded(rounded, tiny)
    gq = gq if tk is None else gq.plus(e_raw.matmul(tk))
    gk = gk if tq is None else gk.plus(e_raw.turned().matmul(tq))
    of_sink = None if p_sink is None else p_sink.times(mean.times(delta).minus(zeta))
    mean = mean.map(lambda x: x.squeeze(-1))
    return {
        **({} if of_sink is None else {"gsink": of_sink}),
        "gq": gq.scaled(scale),
        "gk": gk.scaled(scale),
        "gv": moved.rounded(rounded, tiny).turned().matmul(dout),
        "gbias": of_bias,
        "gpair_gate": w.times(bare_dp).plus(p.times(bare_tdp)),
        "gkey_weight": bare.times(u.times(t).plus(y)),
        "gdout": tout,
        "gdlse": mean,
        "tout": tout,
        "tlse": mean,
    }
