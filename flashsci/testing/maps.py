"""Attention maps in the check: a call of :func:`flashsci.attention_statistics`, and the limits of its errors.

The oracle is the formula in float64 from the same float32 lse. With an error e of the exponent, which is 16 roundings of
the formula of S - L on absolute values,

    log P'             lies between log P - e and log P + e, at most 0
    the largest score  lies between the largest S - e and the largest S + e

Tensor cores add products of subnormal numbers of float16 as if those were the smallest normal one, so that the largest
score may be off by as much as sums of that size.

An entropy and a sum of P may differ by the sum of these over their row or column, and by 16 roundings of the sum itself.
The n-th largest P' of a row lies between the n-th largest of its lower limits and that of its upper ones; and so does, with its own
error, the P of its key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.errors import BackendError
from flashsci.testing.blocks import Block, blocks
from flashsci.testing.bounds import REDUCTIONS, Finding
from flashsci.testing.cases import MapCase
from flashsci.testing.formula_scores import Heads, Scores
from flashsci.testing.making import make_inputs
from flashsci.testing.tolerance import FLOOR_ROUNDINGS, ROUNDINGS

_FLAGS = REDUCTIONS[:3]
TOPS = 1, 5, 20, 64  # probabilities of each row that a call asks for, by its number of queries
_SHAPING = ("causal", "window", "align", "scale", "softcap", "softcap_at")
_UNIT = torch.finfo(torch.float32).eps / 2
_SUBNORMAL = 2.0**-149
# Kernels lower an lse from 2^20 on by this share of it, a little more than its roundings and those of the scores.
_LARGE, _MARGIN = 2.0**20 * (1 - 2.0**-18), 2.0**-18 * (1 + 2.0**-18)
_LOST = 128 * torch.finfo(torch.float32).tiny  # of P log P where P is subnormal


class MapInputs:
    """The inputs of one call, with the lse of exact attention to them, rounded to float32."""

    def __init__(self, case: MapCase, device: str = "cpu") -> None:
        self.given = make_inputs(case, device).forward_alone()
        self.exact = self.given.to(torch.float64)
        q = self.given.q
        shape = (q.shape[1], q.shape[0]) if self.given.varlen else q.shape[:-1]
        self.lse = torch.full(shape, -torch.inf, device=q.device)
        most = TOPS[-1] if self.given.varlen else self.given.k.shape[-2]
        self.top_k = min(TOPS[shape[-1] % len(TOPS)], most)
        for block, scores in self.scores():
            # Without a weight above zero a row has the lse of its sink, if there is one.
            exact = torch.where(scores.unseen, -torch.inf, torch.where(scores.empty, scores.top, scores.lse))
            block.slot("lse", self.lse).copy_(exact.squeeze(-1).detach())

    def scores(self) -> Iterator[tuple[Block, Scores]]:
        """The dense problems of the call, and their scores in float64."""
        for block in blocks(self.exact):
            heads = Heads(block)
            yield block, Scores(block, heads.per_query(block.k), heads)

    def evaluate(self, backend: str) -> dict[str, Tensor]:
        """The reductions by a backend, or those of plain PyTorch.

        Raises:
            BackendError: the backend is not one that has kernels for them.
        """
        import flashsci
        from flashsci.choice.choose import PARTS, decide_map

        x = self.given
        options: dict[str, Any] = {n: value for n, value in x.options.items() if n in _SHAPING}
        names = ("bias", "key_weight", "mask", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
        options |= {n: getattr(x, n) for n in names} | dict.fromkeys(_FLAGS, True)
        with flashsci.use_backend(backend), torch.no_grad():
            place = x.q.device.type, x.q.device.index
            if backend == "triton" and decide_map(*place, x.q.dtype, x.q.shape[-1]).forward == PARTS:
                raise BackendError("flashsci: Triton has no kernels for this map; use 'reference'")
            found = flashsci.attention_statistics(x.q, x.k, self.lse, top_k=self.top_k, **options)
        return {n: getattr(found, n) for n in (REDUCTIONS if self.top_k else _FLAGS)}


def _within(found: Tensor, exact: Tensor, allowed: Tensor) -> tuple[float, float]:
    """The largest error among finite results, and of its element the limit; infinite where others are not finite."""
    seen = exact.isfinite()
    if not torch.equal(found[~seen], exact[~seen]):
        return torch.inf, 0.0
    error, allowed = (found - exact)[seen].abs(), allowed[seen]
    if not error.numel():
        return 0.0, 0.0
    worst = (error.nan_to_num(torch.inf) / allowed.clamp(min=torch.finfo(torch.float32).tiny)).argmax()
    return error[worst].nan_to_num(torch.inf).item(), allowed[worst].item()


def _at_least(least: float, x: Tensor) -> Tensor:
    """The absolute values of numbers, of those that are not 0 at least ``least``."""
    return torch.where(x == 0, 0.0, x.abs().clamp(min=least))


class Top(NamedTuple):
    """The largest P of each row of a block, [..., rows, top_k], and their limits, zero beyond its keys."""

    exact: Tensor
    low: Tensor
    high: Tensor
    p: Tensor  # [..., rows, keys]
    moved: Tensor  # the error of each

    @classmethod
    def of(cls, p: Tensor, moved: Tensor, count: int) -> Top:
        beyond = (0, max(0, count - p.shape[-1]))
        every = p, (p - moved).clamp(min=0), p + moved
        exact, low, high = (torch.nn.functional.pad(x, beyond).topk(count, -1).values for x in every)
        return cls(exact, low, high, p, moved)

    @property
    def spread(self) -> Tensor:
        """The distance of the limits from the exact values."""
        return torch.maximum(self.high - self.exact, self.exact - self.low)

    def problem(self, keys: Tensor) -> str | None:
        """The fault of the keys that a call names."""
        there = min(keys.shape[-1], self.p.shape[-1])
        if (keys[..., there:] != -1).any():
            return "a key beyond those of its sequence"
        keys = keys[..., :there]
        if ((keys < 0) | (keys >= self.p.shape[-1])).any() or (keys.sort(-1).values.diff(dim=-1) == 0).any():
            return "keys that are not different ones of their sequence"
        p, moved = self.p.gather(-1, keys), self.moved.gather(-1, keys)
        wrong = (p + moved < self.low[..., :there]) | (p - moved > self.high[..., :there])
        return "a key of another probability" if wrong.any() else None


def _expected(
    block: Block, s: Scores, lse: Tensor, least: float, top_k: int
) -> tuple[dict[str, tuple[Tensor, Tensor]], Top]:
    """(exact result, its limit) of each reduction of a block. ``least``: the smallest normal number of q's dtype."""
    zero = s.raw.new_zeros(())
    lse = block.slot("lse", lse).double().unsqueeze(-1)
    seen = s.visible & (s.w > 0) & (lse > -torch.inf)
    lost = s.raw_abs / max(abs(block.scale), 1e-300) * _SUBNORMAL  # of a scale that is subnormal
    away = FLOOR_ROUNDINGS * _UNIT * (1 + s.sizes(block.softcap, _UNIT)) + lost
    exponent = (s.scores + s.log_w - torch.where(lse > -torch.inf, lse, zero)).clamp(max=0)
    exponent = torch.where(seen, exponent, zero)
    p = torch.where(seen, exponent.exp(), zero)
    # Of a huge lse kernels subtract less, because its roundings alone would decide between 0 and 1.
    lowered = torch.where(lse.abs() >= _LARGE, _MARGIN * lse.abs(), zero).nan_to_num(0.0, 0.0, 0.0)
    low, high = exponent - away, (exponent + away + lowered).clamp(max=0)
    moved = torch.maximum(high.exp() - p, p - low.exp())
    terms = torch.stack([-x * x.exp() for x in (low, exponent, high)])
    most = torch.where((low < -1) & (high > -1), 1 / math.e, terms.amax(0))  # of -x e^x between low and high
    bits = torch.maximum(most - terms[1], terms[1] - terms.amin(0))
    moved, bits = (torch.where(seen, x + _LOST, zero) for x in (moved, bits))
    entropy, key_sum = (-p * exponent).sum(-1), p.sum(-2)
    rounded = ROUNDINGS * _UNIT
    q, k = _at_least(least, block.q), Heads(block).per_query(_at_least(least, block.k))
    aligned = abs(block.scale) * (q @ k.mT) - s.raw_abs  # beyond the products themselves
    spread = FLOOR_ROUNDINGS * _UNIT * (s.residual_abs() + s.alibi.abs() + aligned.clamp(min=0)) + lost
    moves = (zero, spread, -spread)
    largest, high, low = (torch.where(s.attended, s.scores + x, -torch.inf) for x in moves)
    if largest.shape[-1]:
        largest, high, low = (x.amax(-1) for x in (largest, high, low))
    else:
        largest = high = low = largest.new_full(largest.shape[:-1], -torch.inf)
    top = Top.of(p, moved, top_k)
    limits = {
        "entropy": (entropy, bits.sum(-1) + rounded * (entropy + bits.sum(-1))),
        "largest_score": (largest, torch.maximum(high - largest, largest - low)),
        "key_sum": (key_sum, moved.sum(-2) + rounded * (key_sum + moved.sum(-2))),
        "top_values": (top.exact, top.spread + rounded * (top.exact + top.spread)),
    }
    return limits, top


class MapJudge:
    """The findings on the reductions of one call."""

    def __init__(self, inputs: MapInputs) -> None:
        self.inputs = inputs
        least = torch.finfo(inputs.given.q.dtype).tiny
        lse, top_k = inputs.lse, inputs.top_k
        self.expected = [(block, *_expected(block, s, lse, least, top_k)) for block, s in inputs.scores()]

    def findings(self, results: dict[str, Tensor]) -> list[Finding]:
        """One finding for each reduction; its ratios are those of the worst element."""
        return [self._finding(name, x) for name, x in results.items()]

    def _finding(self, name: str, whole: Tensor) -> Finding:
        q, k, varlen = self.inputs.given.q, self.inputs.given.k, self.inputs.given.varlen
        shape = tuple(self.inputs.lse.shape)
        if name == "key_sum":
            shape = (*shape[:-1], k.shape[0] if varlen else k.shape[-2])
        if name.startswith("top_"):
            shape = (*shape, self.inputs.top_k)
        dtype = torch.int64 if name == "top_indices" else torch.float32
        if tuple(whole.shape) != shape or whole.dtype != dtype:
            return Finding(name, problem=f"{name} is {whole.dtype} {list(whole.shape)}, not {dtype} {list(shape)}")
        if name == "top_indices":
            places = [(top, block.slot("lse", whole).to(q.device)) for block, _, top in self.expected]
            faults = [top.problem(keys.reshape(top.exact.shape)) for top, keys in places]
            return Finding(name, problem=next((f"{name}: {fault}" for fault in faults if fault), None))
        error = allowed = 0.0
        for block, expected, _ in self.expected:
            part = block.slot("dkey_weight" if name == "key_sum" else "lse", whole).to(q.device).double()
            pair = _within(part.reshape(expected[name][0].shape), *expected[name])
            if pair[0] * max(allowed, 1e-300) >= error * max(pair[1], 1e-300):
                error, allowed = pair
        problem = None if error <= allowed else f"{name}: an error of {error:.3g}, allowed {allowed:.3g}"
        return Finding(name, error, allowed, problem=problem)

    def catches(self, name: str, x: Tensor, factor: float) -> bool:
        """Whether the result times ``factor`` would fail."""
        return self._finding(name, x * factor).problem is not None

    def require(self, results: dict[str, Tensor]) -> None:
        """Raise AssertionError unless all results are within their limits."""
        problems = [f.problem for f in self.findings(results) if f.problem]
        if problems:
            raise AssertionError("\n".join(problems))
