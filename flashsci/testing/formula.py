"""Attention and its gradients in fp64, with the possible effects of a fused kernel's roundings, which bounds.py
allows.

It shares no code with the reference, which it checks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.testing.blocks import Block
from flashsci.testing.second_order import Sized, second_order

# Scores (their formula on absolute values) beyond which first-order allowances end: in fp32 they are exact to 2^-12 at best.
FAR = 4096.0
ROUNDINGS = 16.0  # of a score, in units of the internal precision: the allowance of such rows
# A row whose scores are all below this may count as one without keys: in powers of two such scores overflow.
LOWEST = -2e38
LEAST_WEIGHT = 2.0**-126  # of a key: smaller weights count as zero
UNIFORM = 3.0**-0.5  # standard deviation of a uniform error between -1 and 1
PHASES = 8  # places of a row's offset between two powers of two, at which its sum of rounded P is computed


class Rounding(NamedTuple):
    """A format that P is rounded to before its product with v, if it is not the results' own."""

    unit: float  # unit roundoff
    tiny: float  # the smallest normal number, relative to the largest P of a row

    def of_sum(self, x: Tensor) -> Tensor:
        """The increase of the sums of rows of x, at least zero, if x is rounded before."""
        step = torch.ldexp(torch.full_like(x, self.unit), torch.frexp(x).exponent)
        step = step.clamp(min=2 * self.unit * self.tiny)
        return (torch.round(x / step) * step - x).sum(-1, keepdim=True)


def finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


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

    def __init__(
        self,
        b: Block,
        unit: float,
        internal: float,
        tiny: float,
        bias_unit: float,
        weight_unit: float,
        sink_unit: float,
        of_p: Rounding | None = None,
        parts: Rounding | None = None,
    ):
        self.unit, self.tiny = unit, tiny
        # (perturbation, group of equal roundings, number of groups)
        self.leaves: list[tuple[Tensor, Tensor, int]] = []
        self.others: dict[str, list[Tensor]] = {}
        self.shift: dict[str, Tensor] = {}
        groups = b.q.shape[-3] // b.k.shape[-3]
        per_query = lambda x: x.repeat_interleave(groups, -3)  # noqa: E731
        per_key = lambda x: x.unflatten(-3, (-1, groups)).sum(-3) if groups > 1 else x  # noqa: E731
        turn = lambda x: x.transpose(-1, -2)  # noqa: E731
        row = lambda x: x.sum(-1, keepdim=True)  # noqa: E731

        def per_pair(x: Tensor) -> Tensor:
            """Key weights in the shape that multiplies the scores."""
            return (x.repeat_interleave(groups, -2) if x.shape[-2] > 1 else x)[..., None, :]

        def per_weight(x: Tensor) -> Tensor:
            """[*, Hq, Sq, Sk] summed to the shape of the key weights."""
            assert b.key_weight is not None
            return x.sum(-2).unflatten(-2, (-1, groups)).sum(-2).sum_to_size(b.key_weight.shape)

        k, v = per_query(b.k), per_query(b.v)
        q_abs, k_abs, v_abs, scale_abs = b.q.abs(), k.abs(), v.abs(), abs(b.scale)
        zero = b.q.new_zeros(())

        # Scores, their statistics and their softmax.
        raw_abs = scale_abs * (q_abs @ turn(k_abs))
        raw = b.scale * (b.q @ turn(k))
        tanh = torch.tanh(raw / b.softcap) if b.softcap else None
        capped = raw if tanh is None or not b.softcap else b.softcap * tanh
        bias = torch.zeros_like(raw_abs) if b.bias is None else b.bias.expand(raw.shape)
        visible = b.visible.expand(raw.shape) & (bias > -torch.inf)
        bias = torch.where(visible, bias, zero)
        alibi = zero if b.alibi is None else b.alibi
        scores = capped + bias + alibi
        seen, bare_abs = visible, raw_abs + capped.abs() + bias.abs() + scores.abs()
        w = zero + 1 if b.key_weight is None else per_pair(b.key_weight)
        w = torch.where(w < LEAST_WEIGHT, zero, w)
        empty = ~(visible & (w > 0)).any(-1, keepdim=True)
        logarithm = torch.log(w)
        top = torch.where(visible & ~empty, scores + logarithm, -torch.inf).detach()
        top = top.amax(-1, keepdim=True) if top.shape[-1] else raw_abs.new_zeros(*top.shape[:-1], 1)
        unseen = empty  # neither keys nor a sink
        top = of_keys = torch.where(empty, zero, top)
        sink = zero - torch.inf if b.sink is None else b.sink
        if b.sink is not None:
            top = torch.maximum(torch.where(empty, -torch.inf, top), sink).detach()
            unseen = top == -torch.inf
            top = torch.where(unseen, zero, top)
        # With a sink, keys that all have weight zero still count: their weights have a gradient.
        visible = visible & ~unseen
        weights = torch.where(visible, torch.exp(torch.where(visible, scores - top, zero)), zero)
        weights = w * weights
        total = torch.where(unseen, zero + 1, row(weights) + torch.exp(sink - top))
        lse = torch.log(total) + top
        p = weights / total
        spread = raw_abs
        if b.softcap:  # no error of a score is larger than the cap
            spread = raw_abs.clamp(max=2 * b.softcap / (ROUNDINGS * internal))
        scores_abs = torch.where(
            visible,
            spread + capped.abs() + bias.abs() + alibi.abs() + scores.abs() + lse.abs(),
            zero,
        )
        scores_abs = scores_abs + torch.where(w > 0, logarithm.abs(), zero)
        shift = torch.where(visible & (w > 0), scores + logarithm - lse, -torch.inf).detach()
        error = ROUNDINGS * internal * scores_abs
        reached = shift + error > -40  # keys that may have a share at all
        # Scores that overflow in powers of two: such a row may count as one without keys.
        lowest = ~empty & (top < LOWEST)
        far = (reached & (scores_abs > FAR)).any(-1, keepdim=True) | lowest
        self.large = bool((~empty & (lse.abs() * unit > 1)).any())
        p_loose = lse_loose = worst = None
        if far.any():
            worst = torch.where(reached, error, zero)
            worst = worst.amax(-1, keepdim=True)
            most = torch.exp((shift + error + worst).clamp(max=0))
            moved = torch.maximum(most - p, p - torch.exp(shift - error - worst))
            moved = torch.where(lowest, zero + 1, moved)
            # Its own roundings included.
            p_loose = (1 + 4 * ROUNDINGS * unit) * torch.where(far & visible, moved, zero)
            lse_loose = worst + ROUNDINGS * internal * lse.abs()
            lse_loose = torch.where(far, torch.where(lowest, 2 * lse.abs(), lse_loose), zero)
        near = ~far
        lse = torch.where(far, lse, self.rounded(lse, internal))
        mean_abs = row(p * scores_abs)
        p_sink = torch.where(unseen, zero, torch.exp(sink - lse))
        sink_abs = torch.where(p_sink > 0, sink.abs() + lse.abs(), zero)
        mean_abs = mean_abs + p_sink * sink_abs
        p_fine = p * (scores_abs + mean_abs) * near
        p_abs = p + tiny * visible
        pr, pr_abs, pr_fine = p * b.keep, p_abs * b.keep, p_fine * b.keep
        # P is rounded directly, or before it is normalised: then rows with equal ratios have equal roundings.
        before = weights * b.keep  # kernels compute no sink
        if b.sink is not None:
            above = torch.where(visible & ~empty, scores - of_keys, -torch.inf)
            before = w * torch.exp(above) * b.keep
        least: Any = None  # the smallest normal P
        if of_p is None:
            pr = self.rounded(self.rounded(pr), like=before)
        else:  # to so few bits that one of the two would be seen in the other
            of_row = (torch.exp(of_keys - top) / total).detach()
            least = of_p.tiny * of_row
            phases = [2.0 ** (i / PHASES) for i in range(PHASES)]
            off = [of_row * of_p.of_sum(before * x) / x for x in phases]
            self.shift["lse"] = torch.stack(off).squeeze(-1)
            size = torch.stack(off).square().mean(0).sqrt()
            sizes, copies = torch.unique(torch.round(size * 2.0**40), return_inverse=True)
            leaf = torch.zeros_like(size, requires_grad=True)
            self.leaves.append((leaf, copies, sizes.numel()))
            lse = lse + leaf * size
            of_sums = [
                self.rounded(pr, of_p.unit, before, least, rows=copies),
                self.rounded(pr, of_p.unit, before, least, bins=2.0**16),
            ]
            pr = self.rounded(pr, of_p.unit, before, least)
        out_abs, out_fine = pr_abs @ v_abs, pr_fine @ v_abs
        out = pr @ v
        if b.sink is not None:  # rounded before the sink takes its share, too
            share = row(p).detach()
            out = self.rounded(out, like=torch.where(share > 0, out / share, zero))
        bare_out, out = out, self.rounded(out)
        self.values = {"out": out, "lse": torch.where(unseen, -torch.inf, lse).squeeze(-1)}
        self.coarse = {"out": out_abs, "lse": zero.expand(lse.shape[:-1])}
        cells: Any = None
        if of_p is not None:
            # Roundings of P in their own units: relative for normal numbers, that of the smallest normal number for
            # subnormal ones, or all of P.
            size = pr.detach().abs()
            size = torch.where(size < least, (size / of_p.unit).clamp(max=least), size)
            moved_by = lambda x: x @ v_abs + row(x) * out.detach().abs()  # noqa: E731
            self.coarse = {
                "out": out_abs + of_p.unit / (ROUNDINGS * unit) * moved_by(size),
                "lse": of_p.unit / (ROUNDINGS * unit) * row(size).squeeze(-1),
            }
            cells = of_p.unit / unit * moved_by(torch.where(pr.detach().abs() < least, size, zero))
            moves = [x - x.detach() for x in of_sums]
            self.others["out"] = [
                out - bare_out + bare_out.detach() + x @ v - out.detach() * row(x) for x in moves
            ]
        self.fine = {
            "out": out_abs + out_fine,
            "lse": ((mean_abs + lse.abs()) * near).squeeze(-1),
        }
        if b.residual:
            kept = self.rounded(torch.where(seen, scores, zero), bias_unit)
            self.values["scores"] = torch.where(seen, kept, -torch.inf)
            self.coarse["scores"] = torch.where(seen, scores.abs() + tiny, zero)
            self.fine["scores"] = torch.where(seen, bare_abs, zero)
        self.loose: dict[str, Tensor] = {}

        def subnormal(x: Tensor) -> Tensor:
            """One rounding cell, in units of ``unit``, where x is a subnormal number: all such numbers may round in
            the same direction."""
            size = torch.where(x.detach() != 0, x.detach().abs(), torch.inf)
            cell = tiny * (size < tiny).to(x.dtype)
            if parts is not None:
                cell = cell + parts.tiny * (parts.unit / unit) * (size < parts.tiny / parts.unit)
            return cell

        # Roundings of the results whose products have such factors.
        self.subnormal = {"out": subnormal(pr) @ v_abs if cells is None else cells}
        if b.sink is not None:
            # A share so near 1 that it moves a rounded number by less than a rounding is lost, in every element in
            # the same way.
            lost = torch.clamp((1 - share) / self.unit, max=1.0)
            self.subnormal["out"] = self.subnormal["out"] + lost * out.detach().abs()
        pr_loose = out_loose = None
        if p_loose is not None and lse_loose is not None:
            pr_loose = p_loose * b.keep
            # Forward, P is normalised by its own sum: a mean of values.
            out_loose = torch.minimum(
                pr_loose @ v_abs,
                1.1 * (out.abs() + b.keep.max() * v_abs.amax(-2, keepdim=True)).detach(),
            )
            self.loose = {"out": out_loose, "lse": lse_loose.squeeze(-1)}
        if b.dout is None and b.dscores is None:
            return
        dout = torch.zeros_like(out).detach() if b.dout is None else b.dout

        # First backward, from P recomputed with the stored lse: E = dS = P o (R o (G V^T) - delta + g).
        bare = torch.where(visible, torch.exp(torch.where(visible, scores - lse, zero)), zero)
        bare_fine = bare * (scores_abs + mean_abs) * near
        p = w * bare
        pr = self.rounded(p * b.keep)
        g_abs = dout.abs()
        dlse = zero if b.dlse is None else b.dlse[..., None]
        dp_abs = b.keep * (g_abs @ turn(v_abs))
        dp = b.keep * (dout @ turn(v))
        delta_abs = row(g_abs * out_abs) + dlse.abs()
        delta = row(dout * out) - dlse
        # Kernels of wide heads only have room for P in the inputs' dtype.
        wide = max(b.q.shape[-1], b.v.shape[-1]) > 128
        e = (self.rounded(p) if wide else p) * (dp - delta)
        u_abs = dp_abs + delta_abs
        # Where dout and dlse are zero nothing is rounded.
        e_abs = p * u_abs + tiny * (visible & (u_abs > 0))
        e_fine = e_abs + p_fine * u_abs + p * row(g_abs * out_fine)
        if b.dscores is not None:  # the gradient of a result, to which others are added
            g_scores = b.dscores.abs()
            e, e_abs, e_fine = e + b.dscores, e_abs + g_scores, e_fine + g_scores
        e_loose = delta_loose = None
        if p_loose is not None and out_loose is not None:
            delta_loose = row(g_abs * out_loose)
            e_loose = p_loose * (u_abs + delta_loose) + p.detach() * delta_loose
        da, da_abs, da_fine, da_loose = e, e_abs, e_fine, e_loose
        slope_fine = zero
        if tanh is not None and b.softcap:
            slope = _slope(raw / b.softcap)
            # The error of an argument of tanh, and the steepest slope within it: never more than 1.
            off = ROUNDINGS * internal * raw_abs / b.softcap
            steepest = _slope(((raw / b.softcap).abs() - off).clamp(min=0))
            slope_fine = 2 * tanh * tanh + steepest * (2 * tanh.abs() * off + 2 * off * off).clamp(
                max=1
            ) / (ROUNDINGS * internal)
            da = e * slope
            da_abs = e_abs * slope
            da_fine = e_fine * slope + e_abs * slope_fine
            da_loose = None if e_loose is None else e_loose * steepest
        da = self.rounded(da)
        dq = [scale * (x @ y) for scale, x, y in _terms(b.scale, (da, da_abs, da_fine), k, k_abs)]
        dk = [
            per_key(scale * (turn(x) @ y))
            for scale, x, y in _terms(b.scale, (da, da_abs, da_fine), b.q, q_abs)
        ]
        dv = [
            per_key(turn(x) @ y)
            for _, x, y in _terms(1.0, (pr, pr_abs, pr_abs + pr_fine), dout, g_abs)
        ]
        dbias = [] if b.bias is None else [x.sum_to_size(b.bias.shape) for x in (e, e_abs, e_fine)]
        # Kernels flush a P below the smallest normal number of their own arithmetic to zero.
        least_p = torch.finfo(
            torch.float64 if internal < 2.0**-24 else torch.float32
        ).smallest_normal
        gone = torch.where(p < least_p, p, zero).detach() / unit
        lost_e = gone * u_abs
        of_da = subnormal(da) + lost_e
        self.subnormal |= {
            "dq": scale_abs * (of_da @ k_abs),
            "dk": per_key(scale_abs * (turn(of_da) @ q_abs)),
            "dv": per_key(turn(subnormal(pr) + gone * b.keep) @ g_abs),
        }
        if b.bias is not None:
            self.subnormal["dbias"] = lost_e.sum_to_size(b.bias.shape)
        if p_loose is not None and pr_loose is not None:
            assert e_loose is not None and da_loose is not None
            self.loose |= {
                "dq": scale_abs * (da_loose @ k_abs),
                "dk": per_key(scale_abs * (turn(da_loose) @ q_abs)),
                "dv": per_key(turn(pr_loose) @ g_abs),
            }
            if b.bias is not None:
                self.loose["dbias"] = e_loose.sum_to_size(b.bias.shape)
        dweight = []
        bare_loose = None
        if b.key_weight is not None:
            if worst is not None and delta_loose is not None:
                grown = torch.where(visible, scores - lse, -torch.inf).detach() + error + worst
                most = torch.where(w > 0, 1 / w, torch.inf)
                most = torch.minimum(torch.exp(grown.clamp(max=600)), most)
                bare_loose = torch.where(far & visible, torch.maximum(most, bare), zero).detach()
                loose = bare_loose * (u_abs + delta_loose) + bare.detach() * delta_loose
                self.loose["dkey_weight"] = per_weight(loose)
            n_fine = bare * u_abs + bare_fine * u_abs + bare * row(g_abs * out_fine)
            dweight = [per_weight(x) for x in (bare * (dp - delta), bare * u_abs, n_fine)]
        dsink = []

        def per_head(x: Tensor) -> Tensor:
            return x.movedim(-3, 0).flatten(1).sum(1)

        sized_sink: Sized | None = None
        if b.sink is not None:
            sink_fine = p_sink * ((sink_abs + mean_abs) * near + 1 + (p_sink < least_p) / internal)
            sink_loose = None if p_loose is None else far.to(p_sink)
            sized_sink = Sized(p_sink, p_sink, sink_fine, sink_loose)
            n_fine = delta_abs * (sink_abs + mean_abs) * near + row(g_abs * out_fine) + delta_abs
            n_fine = n_fine + (p_sink < least_p) * delta_abs / internal
            dsink = [per_head(p_sink * x) for x in (-delta, delta_abs, n_fine)]
            if delta_loose is not None:
                self.loose["dsink"] = per_head(far * (delta_abs + delta_loose)).detach()
        units = {"dbias": bias_unit, "dkey_weight": weight_unit, "dsink": sink_unit}
        for name, found in (
            ("dq", dq),
            ("dk", dk),
            ("dv", dv),
            ("dbias", dbias),
            ("dkey_weight", dweight),
            ("dsink", dsink),
        ):
            if found:
                value, self.coarse[name], self.fine[name] = found
                self.values[name] = self.rounded(value, units.get(name, unit))
        if b.tangents:
            exact = lambda x: Sized(x, x.abs(), torch.zeros_like(x))  # noqa: E731
            inclined: Sized | None = None
            bend: Sized | None = None
            if tanh is not None and b.softcap:
                inclined = Sized(slope, slope, slope_fine)
                bend = Sized.bend(tanh, slope, raw_abs, b.softcap)
            spread = {"tk": per_query, "tv": per_query, "tkey_weight": per_pair}
            results = second_order(
                {n: exact(spread.get(n, lambda y: y)(x)) for n, x in b.tangents.items()},
                exact(b.q), exact(k), exact(v), exact(dout), Sized(p, p_abs, p_fine, p_loose),
                Sized(bare, bare, bare_fine, bare_loose if b.key_weight is not None else p_loose), exact(b.keep), b.scale, inclined, bend,
                Sized(dp, dp_abs, dp_abs), Sized(delta, delta_abs, row(g_abs * out_fine) + delta_abs, delta_loose), self.rounded, tiny,
                sized_sink,
            )  # fmt: skip
            for name, x in results.items():
                if name in ("gk", "gv"):
                    x = x.map(per_key)
                elif name == "gbias":
                    if b.bias is None:
                        continue
                    shape = b.bias.shape
                    x = x.map(lambda y: y.sum_to_size(shape))  # noqa: B023  (called at once)
                elif name == "gkey_weight":
                    if b.key_weight is None:
                        continue
                    x = x.map(per_weight)
                elif name == "gsink":
                    x = x.map(per_head)
                self.coarse[name], self.fine[name] = x.coarse, x.fine
                if x.loose is not None:
                    self.loose[name] = x.loose
                last = {
                    "gbias": bias_unit,
                    "gkey_weight": weight_unit,
                    "gsink": sink_unit,
                    "gdlse": internal,
                    "tlse": internal,
                }.get(name, unit)
                self.values[name] = self.rounded(x.value, last)

    def rounded(
        self,
        x: Tensor,
        unit: float | None = None,
        like: Tensor | None = None,
        tiny: Any = None,
        bins: float = 8,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x with a perturbation, zero, that stands for its rounding to the precision ``unit``.

        Mantissas that are equal, to an eighth of a rounding (``bins``), round equally. Therefore they share a group,
        of all rows or of those that share an index (``rows``). Values that ``unit`` represents do not round at all.
        ``like``: the tensor that is rounded in x's place, x times a factor of its row. ``tiny``: the smallest normal
        number (of each row), None: that of results, where ``unit`` is theirs.
        """
        unit = self.unit if unit is None else unit
        mantissa = torch.frexp((x if like is None else like).detach().abs()).mantissa
        mantissas, group = torch.unique(torch.round(mantissa * (bins / unit)), return_inverse=True)
        exact = torch.round(mantissa * (2**16 / unit)) % 2**15 == 0
        leaf = torch.zeros_like(x, requires_grad=True)
        size = x.detach().abs()
        tiny = self.tiny if tiny is None and unit == self.unit else tiny
        if tiny is not None:  # the spacing of subnormal numbers is that of the smallest normal ones
            size = torch.where(size < tiny, (size / unit).clamp(max=tiny), size)
        size = torch.where(exact & (size == x.detach().abs()), 0.0, size)
        # A value that does not round adds zero, to any group: masked scores are millions of equal zeros, and a GPU
        # adds to one address serially.
        count = mantissas.numel()
        if rows is not None and count:
            group, count = group + rows * count, count * (int(rows.max()) + 1)
        any_group = torch.arange(group.numel(), device=x.device).view_as(group) % max(count, 1)
        self.leaves.append((leaf, torch.where(size == 0, any_group, group), count))
        return x + leaf * (x.detach().sign() * size * (unit * UNIFORM))

    def variances(self, name: str, directions: Tensor) -> Tensor:
        """Variance of <result, direction> for each of [n, *] directions, if groups of equal values round
        independently."""
        found = self._variances(self.values[name], directions)
        for other in self.others.get(name, []):
            found = torch.maximum(found, self._variances(other, directions))
        return found

    def _variances(self, value: Tensor, directions: Tensor) -> Tensor:
        found = directions.new_zeros(directions.shape[0])
        if not value.numel():
            return found
        leaves = [leaf for leaf, _, _ in self.leaves]
        # All directions at once if they are small, else one by one: each takes the memory of all leaves.
        together = len(directions) if sum(x.numel() for x in leaves) < 1 << 21 else 1
        for begin in range(0, len(directions), together):
            part = slice(begin, begin + together)
            changes = torch.autograd.grad(
                finite(value),
                leaves,
                directions[part],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            for change, (_, group, count) in zip(changes, self.leaves, strict=True):
                if change is not None and count:
                    sums = change.new_zeros(len(change), count)
                    sums.index_add_(1, group.flatten(), change.flatten(1))
                    found[part] += sums.square().sum(1)
        return found


def _slope(x: Tensor) -> Tensor:
    """1 - tanh^2 x without cancellation for large x."""
    return 1 / torch.cosh(x.clamp(-300, 300)) ** 2


def _terms(
    scale: float, sizes: tuple[Tensor, Tensor, Tensor], y: Tensor, y_abs: Tensor
) -> list[tuple[Any, ...]]:
    """Factors of a product's value, of its absolute-value formula, and of the same for the parts in fp32."""
    value, coarse, fine = sizes
    return [(scale, value, y), (abs(scale), coarse, y_abs), (abs(scale), fine, y_abs)]
