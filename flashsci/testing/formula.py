"""Attention and its gradients in fp64, with the possible effects of a fused kernel's roundings, which bounds.py
allows.

It shares no code with the reference, which it checks. Read it in the order of the computation: formula_scores.py
(scores, softmax, rows whose scores are too large), then here `Forward`, `Backward`, and `Formula`, which calls
second_order.py. Roundings are perturbations (roundings.py); tolerance.py has the constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.testing.blocks import Block
from flashsci.testing.formula_scores import Heads, LooseRows, Scores, per_head, row, slope_of, turn
from flashsci.testing.roundings import Precisions, Rounding, Roundings
from flashsci.testing.second_order import Sized, second_order
from flashsci.testing.second_tangents import SecondTangents
from flashsci.testing.tolerance import PHASES, ROUNDINGS


class ForwardFormula:
    """P after its roundings, the lse and out; [*, Hq, Sq, Sk], [*, Hq, Sq, Dv] or, for rows, [*, Hq, Sq, 1].

    ``x_abs``, ``x_fine``, ``x_loose``: the sizes of x in ``coarse``, ``fine`` and ``loose`` of Formula. ``p``: before
    dropout, ``pr``: after it. ``p_sink``: the share of the sink. ``scores_abs``, ``mean_abs``: the formula of scores on
    absolute values, and its mean over a row.
    """

    def __init__(self, formula: Formula):
        self.b, self.s, self.rows = formula.b, formula.scores, formula.rows
        self.roundings, self.precisions = formula.roundings, formula.precisions
        self.scores_abs = formula.scores_abs
        self.v, self.v_abs = formula.v, formula.v.abs()
        self._probabilities()
        self._store(formula)

    def _probabilities(self) -> None:
        """lse, the share of the sink, and the sizes of P."""
        b, s, near = self.b, self.s, ~self.rows.far
        self.zero = zero = b.q.new_zeros(())
        rounded = self.roundings.rounded(s.lse, self.precisions.internal)
        self.lse = torch.where(self.rows.far, s.lse, rounded)
        self.p_sink = torch.where(s.unseen, zero, torch.exp(s.sink - self.lse))
        self.sink_abs = torch.where(self.p_sink > 0, s.sink.abs() + self.lse.abs(), zero)
        self.mean_abs = row(s.p * self.scores_abs) + self.p_sink * self.sink_abs
        self.p_fine = s.p * (self.scores_abs + self.mean_abs) * near
        self.p_abs = s.p + self.precisions.tiny * s.visible
        self.pr_abs, self.pr_fine = self.p_abs * b.keep.abs(), self.p_fine * b.keep.abs()

    def _store(self, formula: Formula) -> None:
        """Round P and out, and fill the formula's parts of out and lse."""
        b, s, rounded = self.b, self.s, self.roundings.rounded
        before = s.before_normalising(b.keep, b.sink is not None)
        coarse_p: CoarseP | None = None
        if self.precisions.of_p is None:
            # P is rounded directly, or before it is normalised: then rows with equal ratios have equal roundings.
            self.pr = rounded(rounded(s.p * b.keep), like=before)
        else:  # to so few bits that one of the two would be seen in the other
            coarse_p = CoarseP(self, before, self.precisions.of_p)
            self.pr, self.lse = coarse_p.pr, coarse_p.lse
        self.out_abs, self.out_fine = self.pr_abs @ self.v_abs, self.pr_fine @ self.v_abs
        out = self.pr @ self.v
        share = row(s.p).detach()
        if b.sink is not None:  # rounded before the sink takes its share, too
            out = rounded(out, like=torch.where(share > 0, out / share, self.zero))
        bare_out, self.out = out, rounded(out)
        near = ~self.rows.far
        formula.values = {
            "out": self.out,
            "lse": torch.where(s.unseen, -torch.inf, self.lse).squeeze(-1),
        }
        formula.fine = {
            "out": self.out_abs + self.out_fine,
            "lse": ((self.mean_abs + self.lse.abs()) * near).squeeze(-1),
        }
        if coarse_p is None:
            zeros = self.zero.expand(self.lse.shape[:-1])
            formula.coarse = {"out": self.out_abs, "lse": zeros}
            formula.subnormal = {"out": self.precisions.subnormal(self.pr) @ self.v_abs}
        else:
            coarse_p.store(formula, self, bare_out)
        if b.sink is not None:
            # A share so near 1 that it moves a rounded number by less than a rounding is lost, in every element in
            # the same way.
            lost = torch.clamp((1 - share) / self.precisions.unit, max=1.0)
            lost = lost * self.out.detach().abs()
            formula.subnormal["out"] = formula.subnormal["out"] + lost
        if b.residual:
            self._store_scores(formula)
        self._store_loose(formula)

    def _store_scores(self, formula: Formula) -> None:
        """The formula's parts of scores that are a result."""
        s, zero = self.s, self.zero
        kept = torch.where(s.attended, s.scores, zero)
        kept = self.roundings.rounded(kept, self.precisions.of_bias)
        size = s.scores.abs() + self.precisions.tiny
        formula.values["scores"] = torch.where(s.attended, kept, -torch.inf)
        formula.coarse["scores"] = torch.where(s.attended, size, zero)
        formula.fine["scores"] = torch.where(s.attended, s.residual_abs(), zero)

    def _store_loose(self, formula: Formula) -> None:
        """The possible changes of out and lse in loose rows."""
        self.pr_loose = self.out_loose = None
        if self.rows.p is None or self.rows.lse is None:
            return
        self.pr_loose = self.rows.p * self.b.keep.abs()
        # Forward, P is normalised by its own sum: a mean of values.
        most = self.out.abs() + self.b.keep.abs().max() * self.v_abs.amax(-2, keepdim=True)
        self.out_loose = torch.minimum(self.pr_loose @ self.v_abs, 1.1 * most.detach())
        formula.loose = {"out": self.out_loose, "lse": self.rows.lse.squeeze(-1)}


class CoarseP:
    """P in a format of few bits, ``of_p`` of Formula: its roundings, and their effect on out and the lse.

    ``moves``: the roundings of P that a row, or all rows together, may have in place of those of ``pr``.
    """

    def __init__(self, f: ForwardFormula, before: Tensor, of_p: Rounding):
        self.of_p, self.v_abs, s = of_p, f.v_abs, f.s
        of_row = (torch.exp(s.largest - s.top) / s.total).detach()
        self.least = of_p.tiny * of_row  # the smallest normal P
        phases = [2.0 ** (i / PHASES) for i in range(PHASES)]
        off = torch.stack([of_row * of_p.of_sum(before * x) / x for x in phases])
        self.shift = off.squeeze(-1)
        self.lse, copies = f.roundings.shifted(f.lse, off.square().mean(0).sqrt())

        def rounded(**how: Any) -> Tensor:
            return f.roundings.rounded(s.p * f.b.keep, of_p.unit, before, self.least, **how)

        of_sums = rounded(rows=copies), rounded(bins=2.0**16)
        self.pr = rounded()
        self.moves = [x - x.detach() for x in of_sums]

    def store(self, formula: Formula, f: ForwardFormula, bare_out: Tensor) -> None:
        """Fill the formula's parts of out and lse; ``bare_out``: before its own rounding."""
        unit, size = f.precisions.unit, self.pr.detach().abs()
        # Roundings of P in their own units: relative for normal numbers, that of the smallest normal number for
        # subnormal ones, or all of P.
        few = size < self.least
        size = torch.where(few, (size / self.of_p.unit).clamp(max=self.least), size)
        factor = self.of_p.unit / (ROUNDINGS * unit)
        formula.shift["lse"] = self.shift
        formula.coarse = {
            "out": f.out_abs + factor * self._of_out(size, f.out),
            "lse": factor * row(size).squeeze(-1),
        }
        cells = self._of_out(torch.where(few, size, f.zero), f.out)
        formula.subnormal = {"out": self.of_p.unit / unit * cells}
        own = f.out - bare_out + bare_out.detach()
        formula.others["out"] = [own + x @ f.v - f.out.detach() * row(x) for x in self.moves]

    def _of_out(self, size: Tensor, out: Tensor) -> Tensor:
        """The change of out by changes of P of this size, in its numerator and denominator."""
        return size @ self.v_abs + row(size) * out.detach().abs()


class BackwardFormula:
    """dS = E and its factors: P recomputed with the stored lse, dP, delta; [*, Hq, Sq, Sk] or, for rows, [.., 1].

    E = P o U, U = R o (dO V^T) - delta, plus the gradient of scores that are a result. ``da``: E before the softcap.
    ``gone``: P that kernels flush to zero, in roundings.
    """

    def __init__(self, formula: Formula, f: ForwardFormula):
        b, s, rows = formula.b, formula.scores, formula.rows
        self.f, self.zero, near = f, f.zero, ~rows.far
        self.precisions, self.rounded = f.precisions, f.roundings.rounded
        self.dout = torch.zeros_like(f.out).detach() if b.dout is None else b.dout
        self.g_abs = self.dout.abs()
        above = torch.where(s.visible, s.scores - f.lse, self.zero)
        self.bare = torch.where(s.visible, torch.exp(above), self.zero)
        self.bare_fine = self.bare * (f.scores_abs + f.mean_abs) * near
        self.p = s.w * self.bare
        self.pr = self.rounded(self.p * b.keep)
        dlse = self.zero if b.dlse is None else b.dlse[..., None]
        self.dp_abs = b.keep.abs() * (self.g_abs @ turn(f.v_abs))
        self.dp = b.keep * (self.dout @ turn(f.v))
        self.delta_abs = row(self.g_abs * f.out_abs) + dlse.abs()
        self.delta = row(self.dout * f.out) - dlse
        self.delta_fine = row(self.g_abs * f.out_fine)
        self.u_abs = self.dp_abs + self.delta_abs
        self._of_scores(b, rows)
        self._before_softcap(b, s)
        # Kernels flush a P below the smallest normal number of their own arithmetic to zero.
        wide = torch.float64 if self.precisions.internal < 2.0**-24 else torch.float32
        self.least_p = torch.finfo(wide).smallest_normal
        gone = torch.where(self.p < self.least_p, self.p, self.zero)
        self.gone = gone.detach() / self.precisions.unit

    def _of_scores(self, b: Block, rows: LooseRows) -> None:
        """E and its sizes."""
        # Kernels of wide heads only have room for P in the inputs' dtype.
        wide = max(b.q.shape[-1], b.v.shape[-1]) > 128
        e = (self.rounded(self.p) if wide else self.p) * (self.dp - self.delta)
        # Where dout and dlse are zero nothing is rounded.
        e_abs = self.p * self.u_abs + self.precisions.tiny * (self.f.s.visible & (self.u_abs > 0))
        e_fine = e_abs + self.f.p_fine * self.u_abs + self.p * self.delta_fine
        if b.dscores is not None:  # the gradient of a result, to which others are added
            g_scores = b.dscores.abs()
            e, e_abs, e_fine = e + b.dscores, e_abs + g_scores, e_fine + g_scores
        self.e, self.e_abs, self.e_fine = e, e_abs, e_fine
        self.e_loose = self.delta_loose = None
        if rows.p is not None and self.f.out_loose is not None:
            self.delta_loose = row(self.g_abs * self.f.out_loose)
            self.e_loose = rows.p * (self.u_abs + self.delta_loose)
            self.e_loose = self.e_loose + self.p.detach() * self.delta_loose

    def _before_softcap(self, b: Block, s: Scores) -> None:
        """``da`` and its sizes, and the slope of the softcap."""
        da, self.da_abs, self.da_fine, self.da_loose = self.e, self.e_abs, self.e_fine, self.e_loose
        self.slope: Tensor | None = None
        self.slope_fine = self.zero
        if s.tanh is not None and b.softcap:
            internal = self.precisions.internal
            self.slope = slope_of(s.raw / b.softcap)
            # The error of an argument of tanh, and the steepest slope within it: never more than 1.
            off, steepest = s.off(b.softcap, internal), s.steepest(b.softcap, internal)
            bent = (2 * s.tanh.abs() * off + 2 * off * off).clamp(max=1)
            self.slope_fine = 2 * s.tanh * s.tanh + steepest * bent / (ROUNDINGS * internal)
            da = self.e * self.slope
            self.da_abs = self.e_abs * self.slope
            self.da_fine = self.e_fine * self.slope + self.e_abs * self.slope_fine
            self.da_loose = None if self.e_loose is None else self.e_loose * steepest
        self.da = self.rounded(da)


class Formula:
    """Attention and its gradients in fp64, with the possible effects of a fused kernel's roundings.

    ``values[name]`` is the result, ``coarse[name]`` its formula on absolute values, and ``fine[name]`` the same for
    the parts that kernels keep in fp32 (scores, statistics). All have the shape of the block's slot. Errors of one
    rounding are at most ``unit * coarse + internal * fine``. ``tiny`` is the smallest normal number: no number rounds
    better.

    That is first order in the errors of scores. Where scores are so large (1e8, whole rows of -1e9) that these errors
    can be near 1 or far beyond, P may have any value between P e^(-2 err) and min(1, P e^(2 err)), and a recomputed P
    need not sum to 1. The possible effect of such *loose* rows on a result, as an error of its own size, is
    ``loose[name]``, element by element. It does not relax the demands on other rows, on keys that they do not reach,
    and on rows whose dout is zero, which add zero for any P. ``loose`` is empty if no row is loose.

    ``large``: scores so large that plain PyTorch in the inputs' dtype is no measure of a kernel.

    ``of_p``: the rounding of P, forward alone; None: ``unit`` and ``tiny``. It is so coarse that its largest effect
    counts once in ``coarse``, not as often as bounds.py allows for others. Kernels may sum P before that rounding or
    after it. In the first case it is only in the numerator of out, and not in the lse. In the second it is the same
    in numerator and denominator (``others``: results whose roundings may take the place of those of ``values``), and
    the lse is that of the rounded P: its error depends on where between two powers of two a row has its offset, and
    is computed for some such places. Rows may be off independently of each other, except copies, or all with one
    place (``shift``: [places, *], errors of a result).

    ``parts``: the rounding of the parts in which tensor cores multiply the results' own numbers, None if they
    multiply whole numbers. For numbers so small that their second part is subnormal, it loses more than ``unit``
    does.
    """

    def __init__(self, b: Block, precisions: Precisions):
        self.b, self.precisions = b, precisions
        self.roundings = Roundings(precisions.unit, precisions.tiny)
        self.others: dict[str, list[Tensor]] = {}
        self.shift: dict[str, Tensor] = {}
        self.loose: dict[str, Tensor] = {}
        self.values: dict[str, Tensor]
        self.coarse: dict[str, Tensor]
        self.fine: dict[str, Tensor]
        self.subnormal: dict[str, Tensor]  # roundings of the results whose products have such factors

        self.heads = Heads(b)
        self.k, self.v = self.heads.per_query(b.k), self.heads.per_query(b.v)
        self.scores = s = Scores(b, self.k, self.heads)
        self.scores_abs = s.sizes(b.softcap, precisions.internal)
        self.rows = LooseRows(s, self.scores_abs, precisions.unit, precisions.internal)
        self.large = bool((~s.empty & (s.lse.abs() * precisions.unit > 1)).any())
        forward = ForwardFormula(self)
        if b.dout is None and b.dscores is None:
            return
        backward = BackwardFormula(self, forward)
        sink = None if b.sink is None else self._share_of_sink(forward, backward)
        self._rows_gradients(forward, backward)
        self._bias_gradient(backward)
        self._weight_gradient(forward, backward)
        self._slope_gradient(backward)
        self._gate_gradient(forward, backward)
        if sink is not None:
            self._sink_gradient(forward, backward, sink)
        if b.tangents:
            self._second_order(forward, backward, sink)

    def _store(self, name: str, value: Tensor, coarse: Tensor, fine: Tensor) -> None:
        """One result of the backward, rounded."""
        self.coarse[name], self.fine[name] = coarse, fine
        self.values[name] = self.roundings.rounded(value, self.precisions.of_result(name))

    def _rows_gradients(self, f: ForwardFormula, g: BackwardFormula) -> None:
        """dq, dk, dv."""
        b, per_key, scale = self.b, self.heads.per_key, abs(self.b.scale)
        q_abs, k_abs = b.q.abs(), self.k.abs()
        self._store("dq", b.scale * (g.da @ self.k), scale * (g.da_abs @ k_abs), scale * (g.da_fine @ k_abs))
        self._store(
            "dk",
            per_key(b.scale * (turn(g.da) @ b.q)),
            per_key(scale * (turn(g.da_abs) @ q_abs)),
            per_key(scale * (turn(g.da_fine) @ q_abs)),
        )
        self._store(
            "dv",
            per_key(turn(g.pr) @ g.dout),
            per_key(turn(f.pr_abs) @ g.g_abs),
            per_key(turn(f.pr_abs + f.pr_fine) @ g.g_abs),
        )
        of_da = self.precisions.subnormal(g.da) + g.gone * g.u_abs
        of_pr = self.precisions.subnormal(g.pr) + g.gone * b.keep.abs()
        self.subnormal |= {
            "dq": scale * (of_da @ k_abs),
            "dk": per_key(scale * (turn(of_da) @ q_abs)),
            "dv": per_key(turn(of_pr) @ g.g_abs),
        }
        if g.da_loose is not None and f.pr_loose is not None:
            self.loose |= {
                "dq": scale * (g.da_loose @ k_abs),
                "dk": per_key(scale * (turn(g.da_loose) @ q_abs)),
                "dv": per_key(turn(f.pr_loose) @ g.g_abs),
            }

    def _bias_gradient(self, g: BackwardFormula) -> None:
        if self.b.bias is None:
            return
        shape = self.b.bias.shape
        parts, loose = self._of_addends(g)
        self._store("dbias", *(x.sum_to_size(shape) for x in parts))
        self.subnormal["dbias"] = (g.gone * g.u_abs).sum_to_size(shape)
        if loose is not None:
            self.loose["dbias"] = loose.sum_to_size(shape)

    def _of_addends(self, g: BackwardFormula) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """The gradient of what is added to products, and its possible sizes and errors."""
        if not self.b.caps_bias:
            return (g.e, g.e_abs, g.e_fine), g.e_loose
        assert g.slope is not None  # dS after the slope of the softcap, which kernels keep in fp32
        return (g.e * g.slope, g.da_abs, g.da_fine), g.da_loose

    def _slope_gradient(self, g: BackwardFormula) -> None:
        by_slope, slopes = self.b.by_slope, self.b.slopes
        if by_slope is None or slopes is None:
            return
        shape = slopes.shape

        def of_slope(x: Tensor) -> Tensor:
            return (x * by_slope).sum_to_size(shape)

        (e, e_abs, e_fine), loose = self._of_addends(g)
        self._store("dalibi_slopes", of_slope(e), -of_slope(e_abs), -of_slope(e_fine))
        self.subnormal["dalibi_slopes"] = -of_slope(g.gone * g.u_abs)
        if loose is not None:
            self.loose["dalibi_slopes"] = -of_slope(loose)

    def _weight_gradient(self, f: ForwardFormula, g: BackwardFormula) -> None:
        """dkey_weight, and the possible size of P without weights in loose rows."""
        self.bare_loose: Tensor | None = self.rows.p
        if self.b.key_weight is None:
            return
        per_weight, bare = self.heads.per_weight, g.bare
        self.bare_loose = None
        if g.delta_loose is not None:
            self.bare_loose = self.rows.bare(self.scores, f.lse, bare)
            assert self.bare_loose is not None
            loose = self.bare_loose * (g.u_abs + g.delta_loose) + bare.detach() * g.delta_loose
            self.loose["dkey_weight"] = per_weight(loose)
        fine = bare * g.u_abs + g.bare_fine * g.u_abs + bare * g.delta_fine
        parts = bare * (g.dp - g.delta), bare * g.u_abs, fine
        self._store("dkey_weight", *(per_weight(x) for x in parts))

    def _gate_gradient(self, f: ForwardFormula, g: BackwardFormula) -> None:
        b = self.b
        if b.gate is None:
            return
        shape = b.gate.shape
        value, size = b.dropped * (g.dout @ turn(f.v)), b.dropped * (g.g_abs @ turn(f.v_abs))
        parts = g.p * value, g.p * size, (f.p_fine + g.p) * size
        self._store("dpair_gate", *(x.sum_to_size(shape) for x in parts))
        self.subnormal["dpair_gate"] = (g.gone * size).sum_to_size(shape)
        if self.rows.p is not None:
            self.loose["dpair_gate"] = (self.rows.p * size).sum_to_size(shape)

    def _share_of_sink(self, f: ForwardFormula, g: BackwardFormula) -> Sized:
        """P of the sink, a key without a value."""
        flushed = (f.p_sink < g.least_p) / self.precisions.internal
        fine = f.p_sink * ((f.sink_abs + f.mean_abs) * ~self.rows.far + 1 + flushed)
        loose = None if self.rows.p is None else self.rows.far.to(f.p_sink)
        return Sized(f.p_sink, f.p_sink, fine, loose)

    def _sink_gradient(self, f: ForwardFormula, g: BackwardFormula, share: Sized) -> None:
        far, size = self.rows.far, g.delta_abs
        fine = size * (f.sink_abs + f.mean_abs) * ~far + g.delta_fine + size
        fine = fine + (f.p_sink < g.least_p) * size / self.precisions.internal
        parts = -g.delta, size, fine
        self._store("dsink", *(per_head(share.value * x) for x in parts))
        if g.delta_loose is not None:
            self.loose["dsink"] = per_head(far * (size + g.delta_loose)).detach()

    def _second_order(self, f: ForwardFormula, g: BackwardFormula, sink: Sized | None) -> None:
        """All of SECOND_ORDER, by second_order.py and second_tangents.py."""
        b, s, heads = self.b, self.scores, self.heads

        def exact(x: Tensor) -> Sized:
            return Sized(x, x.abs(), torch.zeros_like(x))

        slope: Sized | None = None
        bend: Sized | None = None
        if s.tanh is not None and g.slope is not None and b.softcap:
            slope = Sized(g.slope, g.slope, g.slope_fine)
            bend = Sized.bend(s.tanh, g.slope, s.raw_abs, b.softcap)
        spread = {"tk": heads.per_query, "tv": heads.per_query, "tkey_weight": heads.per_pair}

        def along(tangents: dict[str, Tensor]) -> dict[str, Sized]:
            return {n: exact(spread[n](x) if n in spread else x) for n, x in tangents.items()}

        shared: dict[str, Any] = {
            "q": exact(b.q),
            "k": exact(self.k),
            "v": exact(self.v),
            "p": Sized(g.p, f.p_abs, f.p_fine, self.rows.p),
            "bare": Sized(g.bare, g.bare, g.bare_fine, self.bare_loose),
            "keep": exact(b.keep),
            "dropped": exact(b.dropped),
            "scale": b.scale,
            "slope": slope,
            "bend": bend,
            "caps_bias": b.caps_bias,
            "rounded": self.roundings.rounded,
            "tiny": self.precisions.tiny,
            "p_sink": sink,
        }
        results = second_order(
            along(b.tangents),
            dout=exact(g.dout),
            dp=Sized(g.dp, g.dp_abs, g.dp_abs),
            delta=Sized(g.delta, g.delta_abs, g.delta_fine + g.delta_abs, g.delta_loose),
            **shared,
        )
        if b.second:
            results |= SecondTangents(**shared).results(along(b.tangents), along(b.second), along(b.mixed))
        summed = {"gk": heads.per_key, "gv": heads.per_key, "gsink": per_head}
        if b.bias is not None:
            shape = b.bias.shape
            summed["gbias"] = lambda x: x.sum_to_size(shape)
        if b.key_weight is not None:
            summed["gkey_weight"] = heads.per_weight
        if b.gate is not None:
            of_gate = b.gate.shape
            summed["gpair_gate"] = lambda x: x.sum_to_size(of_gate)
        for name, x in results.items():
            if name in ("gbias", "gkey_weight", "gpair_gate") and name not in summed:
                continue
            x = x.map(summed[name]) if name in summed else x
            if x.loose is not None:
                self.loose[name] = x.loose
            self._store(name, x.value, x.coarse, x.fine)

    def variances(self, name: str, directions: Tensor) -> Tensor:
        """Variance of <result, direction> for each of [n, *] directions, if groups of equal values round
        independently."""
        found = self.roundings.variances(self.values[name], directions)
        for other in self.others.get(name, []):
            found = torch.maximum(found, self.roundings.variances(other, directions))
        return found
