"""The backends that a request may take for a call, in order, and their refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flashsci.call.problem import Problem
from flashsci.call.torch_state import rounds_products
from flashsci.choice import predictions, preferences
from flashsci.choice.backends import BACKENDS, find
from flashsci.choice.gradients import by_rules, gradients, named

#: The rule of calls whose results may not depend on the batch: nor may their backend.
INVARIANT = preferences.Rule(
    {"batch_invariant": True}, ("triton", "reference"), "no other backend promises it", "candidates"
)


def rule_of(problem: Problem) -> preferences.Rule:
    """The rule by which ``auto`` orders the backends."""
    if problem.batch_invariant:
        return INVARIANT
    tiled = preferences.tiled(problem)
    if tiled is not None:
        return tiled
    rule = preferences.find("calls", problem)
    return by_times(rule, problem) if predictions.enabled() else rule


def by_times(rule: preferences.Rule, problem: Problem) -> preferences.Rule:
    """The rule, or an order by predicted times where these decide. Rules stay that were learnt from times of such calls."""
    if rule.table != preferences.BY_HAND or not predictions.has_model(problem):
        return rule
    left_out = preferences.untimed(problem)
    served: list[predictions.Pair] = []
    for name in preferences.KNOWN:
        if (
            name == "reference"
            or name in left_out
            or not may_choose(name, problem)
            or rejects(name, problem) is not None
        ):
            continue
        # Strides are those of contiguous tensors, which the Hopper backward takes.
        found = gradients(by_rules(name), problem, strides=True) if problem.requires_grad else None
        served.append((name, found.backend if found else None))
    able = [name for name, _ in served]
    usual = next((name for name in rule.order if name in able), None)
    return predictions.reordered(rule, usual, predictions.of_backends(problem, served))


def rejects(name: str, problem: Problem, anywhere: bool = False) -> str | None:
    """Why a request by name cannot be served, gradients included, or None. ``anywhere``: ignore whether this machine
    can run the backends."""
    reason = find(name).rejects(problem, anywhere)
    if reason is None and problem.requires_grad:
        found = gradients(named(name), problem, anywhere=anywhere)
        reason = found.reason if found.backend is None else None
    return reason


def candidates(problem: Problem, name: str, strict: bool) -> tuple[str, ...]:
    """The backends to try, in order, for a request."""
    if name == "auto":
        order = rule_of(problem).order
        return tuple(n for n in order if may_choose(n, problem))
    absent = name == "cuda" and not strict and find(name).unavailable() is not None
    return (name, "triton") if absent else (name,)


def may_choose(name: str, p: Problem) -> bool:
    """Whether ``auto`` may take a backend that can serve a call.

    Without a request, float32 stays float32, and memory stays proportional to the call's own tensors.
    """
    if name not in ("eager", "sdpa"):
        return True
    has_tf32 = p.capability is not None and p.capability >= (8, 0)
    rounded = has_tf32 and p.precision != "tf32" and rounds_products(p.dtype)
    return not rounded and (name != "eager" or may_hold_scores(p))


def comparable(problem: Problem, chosen: str) -> list[str]:
    """The backends that `flashsci.tune` compares with the one that ``auto`` chose: each as accurate and as small in memory
    as ``auto`` asks for, and able to serve the call."""
    left_out = preferences.untimed(problem)

    def fits(name: str) -> bool:
        if name == chosen:
            return True
        # The reference holds every score, as eager does.
        allowed = may_choose("eager" if name == "reference" else name, problem)
        return allowed and name not in left_out and rejects(name, problem) is None

    return [name for name in preferences.KNOWN if fits(name)]


def may_hold_scores(p: Problem) -> bool:
    """Whether ``auto`` may take a backend that holds every score.

    The scores must be no more numbers than the call's own tensors (q, k, v, out and bias), so that memory stays
    proportional to those.
    """
    if p.varlen or p.batch is None or p.seq_q is None or p.seq_k is None:
        return False
    rows = p.heads_q * p.seq_q + p.heads_k * p.seq_k
    bias = math.prod(p.bias_shape) if p.bias_shape else 0
    count = math.prod(p.batch)
    return count * p.heads_q * p.seq_q * p.seq_k <= count * rows * (p.head_dim + p.head_dim_v) + bias


def able(problem: Problem, reasons: dict[str, str | None]) -> list[str]:
    """The backends that can serve a call, in the order that ``auto`` prefers. ``reasons``: those known already."""
    order = dict.fromkeys((*candidates(problem, "auto", False), *BACKENDS))
    return [n for n in order if (reasons[n] if n in reasons else rejects(n, problem)) is None]


def advice(names: Sequence[str]) -> str:
    """Advice after a refusal, as the end of its sentence."""
    *others, last = (repr(n) for n in names) if names else ("",)
    if not last:
        return "; no other backend can"
    return f"; backend={', '.join(others)} or {last} can" if others else f"; backend={last} can"
