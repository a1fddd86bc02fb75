"""Rules for `auto` from records: exceptions to the handwritten ones, few and short.

Learning starts from the handwritten rules and puts exceptions before them, one at a time: the conditions and
the backend that save most regret, if they save more than a rule costs. Each condition costs a little, and so
does every unmeasured call whose choice the rule would change: rules stay near their evidence. A cost does not
keep a rule that saves enough from calls with a bias of another form, for which kernels differ in speed. So
every rule names the forms that its records have. Changes beyond these forms still count in its cost; without
that, ranges closed around single records.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flashsci.call.problem import Problem
from flashsci.choice import preferences
from flashsci.choice.preferences import Rule, Table
from tools.bench.cases import CASES
from tools.choice.regret import (
    BACKENDS,
    SHARING,
    Timed,
    fastest,
    generation_of,
    pick,
    picked,
    problem_of,
)

#: The order after the backend that a learnt rule puts first.
OTHERS = ("cuda", "triton", "sdpa", "reference")
#: Costs in units of log regret: of a rule, of each of its conditions, of an unmeasured call whose choice it
#: changes.
RULE, CONDITION, FLIP = 0.04, 0.005, 0.01
#: The cost of a choice that was not measured, or failed its check.
UNKNOWN = math.log(1.5)
MOST_CONDITIONS, BEAM = 6, 12
#: The host time of a call with gradients through our interface beyond that of one of our kernels, in
#: microseconds: `small-call` on an H200. Training steps wait for the host at the sizes where this counts.
HOST = {"sdpa": 120.0}
#: The features that learnt rules may test, with the numbers among them.
ASKED = {
    "calls": ("bits", "head_dim", "seq_q", "seq_k", "batch_heads", "aligned", "band", "bias", "inner_heads", "mask", "varlen", "grad"),
    "gradients": ("bits", "head_dim", "seq_q", "seq_k", "batch_heads", "aligned", "band", "bias", "bias_grad", "bias_summed", "mask", "varlen", "generation", "forward"),
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """An example for learning: features of a call, and for each backend that may be put first its time over
    the best (inf: not measured, or wrong)."""

    case: Timed
    found: dict[str, Any]
    ratios: dict[str, float]

    def loss(self, lead: str) -> float:
        """Log regret; regret beyond 10% counts twice."""
        ratio = self.ratios[lead]
        return UNKNOWN if math.isinf(ratio) else math.log(ratio) + max(0.0, math.log(ratio / 1.1))


def examples(cases: list[Timed], kind: str, tables: tuple[Table, ...]) -> list[Example]:
    """For gradients, ``tables`` give the backend of the forward."""
    if kind == "calls":
        return [e for case in cases for e in _calls(case)]
    forwards = [(case, picked(case, tables, grad=True)) for case in cases]
    return [e for case, name in forwards if name in SHARING for e in _of_gradients(case, name)]


def _calls(case: Timed) -> Iterable[Example]:
    """A call without gradients by its forward, one with by both passes."""
    for grad in (False, True):
        if grad and (not case.problem.requires_grad or math.isinf(case.best["backward"])):
            continue
        problem = replace(case.problem, requires_grad=grad)
        ratios = {}
        for lead in BACKENDS:
            name = pick((lead, *OTHERS), case, grad)
            time = None
            if name is not None and name not in case.wrong:
                own = [case.time(name, by) for by in SHARING]
                time = min((t for t in own if t), default=None) if grad else case.forward[name]
            least = fastest(case) if grad else case.best["forward"]
            more = HOST.get(name or "", 0.0) if grad and case.problem.device_type == "cuda" else 0.0
            ratios[lead] = math.inf if time is None else (time + more) / least
        yield Example(case, preferences.features(problem), ratios)


def _of_gradients(case: Timed, forward: str) -> Iterable[Example]:
    times = {name: case.gradients(name) for name in SHARING}
    if None in times.values() or not case.problem.requires_grad:
        return
    least = min(times.values())
    if not math.isinf(least):
        ratios = {name: time / least for name, time in times.items()}
        yield Example(case, preferences.features(case.problem, case.generation, forward), ratios)


Condition = tuple[str, Any]


def conditions(seen: list[Example], kind: str) -> list[Condition]:
    """All conditions of a rule: values that occur, and thresholds between neighbouring ones."""
    found: list[Condition] = []
    for name in ASKED[kind]:
        values = sorted({v for e in seen if (v := e.found[name]) is not None})
        if name in preferences.NUMBERS:
            for low, high in itertools.pairwise(values):
                cut = _between(low, high)
                found += [(name, [None, cut]), (name, [cut + 1, None])]
        elif len(values) > 1:
            found += [(name, value) for value in values]
    return found


def _between(low: int, high: int) -> int:
    """A round number from low to below high: the power of two before their geometric mean, if it is one of them."""
    power = 1 << (math.isqrt(low * high).bit_length() - 1) if low else 0
    return power if low <= power < high else low


def _joined(when: dict[str, Any], condition: Condition) -> dict[str, Any] | None:
    """The rule with one more condition; None if it adds nothing."""
    name, wanted = condition
    if name not in when:
        return {**when, name: wanted}
    if name not in preferences.NUMBERS:
        return None
    (a, b), (c, d) = when[name], wanted
    low = max((n for n in (a, c) if n is not None), default=None)
    high = min((n for n in (b, d) if n is not None), default=None)
    ranged = [low, high]
    return None if ranged == when[name] or (low and high and low > high) else {**when, name: ranged}


@dataclass(frozen=True)
class Candidate:
    """An exception that might be made."""

    gain: float
    when: dict[str, Any]
    lead: str
    covered: torch.Tensor  # [points], 1 where the conditions hold

    def key(self) -> tuple[float, str]:
        """A sort key: the best first, and a fixed order among equals."""
        return -round(self.gain, 9), json.dumps([self.when, self.lead], sort_keys=True)


class Learner:
    """Exceptions to the rules written by hand, from examples of one GPU.

    A point is a call that a rule may cover: the examples, then unmeasured cases, which should keep their
    choice.
    """

    def __init__(self, kind: str, seen: list[Example], defaults: Table, unmeasured: list[dict]):
        self.kind, self.seen, self.base = kind, seen, defaults
        self.leads = tuple(seen[0].ratios)
        self.points = [*(e.found for e in seen), *unmeasured]
        self.conditions = conditions(seen, kind)
        held = [[Rule({n: w}, (), "").holds(p) for p in self.points] for n, w in self.conditions]
        self.held = torch.tensor(held, dtype=torch.float64)  # [conditions, points]
        self.rules: list[Rule] = []

    def learn(self) -> list[Rule]:
        while (rule := self._next()) is not None:
            self.rules.insert(0, rule)
        for rule in tuple(self.rules):  # a later exception may have made an earlier one redundant
            rest = [r for r in self.rules if r is not rule]
            if self._total(rest) <= self._total(self.rules) + RULE:
                self.rules = rest
        return self.rules

    def _lead(self, rules: list[Rule], found: dict[str, Any]) -> str:
        own = Table("", **{k: tuple(rules) if k == self.kind else () for k in preferences.KINDS})
        order = preferences.first((own, self.base), self.kind, found).order
        return next(name for name in order if name in self.leads)

    def _total(self, rules: list[Rule]) -> float:
        return sum(e.loss(self._lead(rules, e.found)) for e in self.seen)

    def _savings(self) -> dict[str, torch.Tensor]:
        """For each backend that may lead, [points]: the regret that it saves there."""
        now = [self._lead(self.rules, point) for point in self.points]
        measured, rest = now[: len(self.seen)], now[len(self.seen) :]
        found = {}
        for lead in self.leads:
            saved = [e.loss(at) - e.loss(lead) for e, at in zip(self.seen, measured, strict=True)]
            turned = [-FLIP * (at != lead) for at in rest]
            found[lead] = torch.tensor([*saved, *turned], dtype=torch.float64)
        return found

    def _next(self) -> Rule | None:
        """The exception that saves most, if any saves something."""
        savings = self._savings()
        everywhere = torch.ones(len(self.points), dtype=torch.float64)
        beams = {lead: [Candidate(-math.inf, {}, lead, everywhere)] for lead in self.leads}
        best: Candidate | None = None
        for depth, lead in itertools.product(range(1, MOST_CONDITIONS + 1), self.leads):
            grown: dict[str, Candidate] = {}
            for start in beams[lead]:
                saved = start.covered * savings[lead]
                gains = self.held @ saved - RULE - CONDITION * depth
                some = self.held @ saved.clamp(min=0) > RULE  # else no condition helps
                for condition, held, gain, promising in zip(
                    self.conditions, self.held, gains.tolist(), some.tolist(), strict=True
                ):
                    when = _joined(start.when, condition) if promising else None
                    if when is not None:
                        more = Candidate(gain, when, lead, start.covered * held)
                        grown[more.key()[1]] = more
            beams[lead] = sorted(grown.values(), key=Candidate.key)[:BEAM]
            for candidate in beams[lead][:1]:
                if candidate.gain > (0.0 if best is None else best.gain) + 1e-9:
                    best = candidate
        if best is None:
            return None
        others = OTHERS if self.kind == "calls" else SHARING
        ran = {n for e in self.seen for n, time in e.case.forward.items() if time < math.inf}
        rest = (n for n in others if n != best.lead and (n in ran or n == "reference"))
        covered = best.covered[: len(self.seen)].tolist()
        forms = sorted({e.found["bias"] for e, own in zip(self.seen, covered, strict=True) if own})
        when = best.when | {"bias": forms if len(forms) > 1 else forms[0]}
        return Rule(dict(sorted(when.items(), key=_place)), (best.lead, *rest), "")


def _place(item: Condition) -> int:
    return (*preferences.NUMBERS, *preferences.WORDS).index(item[0])


def unmeasured(cases: list[Timed], seen: list[Example], kind: str) -> list[dict[str, Any]]:
    """Features of calls that no record has: the benchmark's other cases, and every measured one with a feature changed."""
    capability = cases[0].problem.capability
    measured = {case.id for case in cases}
    found = []
    for case in CASES.values():
        if case.id not in measured:
            described = json.loads(json.dumps(case.describe()))
            problem = problem_of(described, capability, capability is not None)
            found.append((problem, generation_of(described, problem)))
    found += [(p, case.generation) for case in cases for p in _changed(case.problem)]
    points = []
    for problem, generation in found:
        if kind == "calls":
            both = {False, problem.requires_grad}
            points += [preferences.features(replace(problem, requires_grad=g)) for g in both]
        elif problem.requires_grad:
            points += [preferences.features(problem, generation, name) for name in SHARING]
    known = {json.dumps(e.found) for e in seen}
    return [point for point in points if json.dumps(point) not in known]


def _changed(p: Problem) -> Iterable[Problem]:
    """A call with one feature changed."""
    yield replace(p, mask=not p.mask)
    yield replace(p, window_left=63 if p.window_left < 0 else -1)
    yield replace(p, window_right=-1 if p.window_right == 0 else 0)
    yield replace(p, head_dim=p.head_dim + 1)
    yield replace(p, dtype=torch.float32 if p.dtype.itemsize == 2 else torch.bfloat16)
    yield replace(p, batch=(*p.batch[:-1], 16 * p.batch[-1]))
    if p.varlen:
        return
    rows, keys = p.seq_q, p.seq_k
    if p.bias_shape is None:
        yield replace(p, seq_q=8 * rows, seq_k=8 * keys)
    every = (*p.batch, p.heads_q, rows, keys)
    # By the batch; a single batch member has a bias for each head then, or one for all of them.
    shared = every[-3:] if math.prod(p.batch) > 1 else (1, rows, keys)
    for shape in (None, (1, keys), shared, every):
        if shape != p.bias_shape:
            yield replace(p, bias_shape=shape, bias_dtype=p.dtype if shape else None)


def learnt(name: str, cases: list[Timed]) -> Table:
    """The table of the records of one GPU."""
    defaults = preferences.read(preferences.FOLDER / "defaults.json")
    table = Table(name, (), (), cases[0].problem.capability, _about(cases))
    for kind in preferences.KINDS:
        seen = examples(cases, kind, (table, defaults))
        rest = unmeasured(cases, seen, kind)
        rules = Learner(kind, seen, defaults, rest).learn() if seen else []
        told = (replace(r, evidence=_evidence(r, rules, seen, defaults, kind), table=name) for r in rules)
        table = replace(table, **{kind: tuple(told)})
    return table


def _about(cases: list[Timed]) -> str:
    by_file: dict[str, set[str]] = {}
    for case in cases:
        by_file.setdefault(case.file, set()).add(case.commit)
    files = "; ".join(f"{f} ({', '.join(sorted(c))})" for f, c in sorted(by_file.items()))
    return f"Learnt by tools/choice/preferences.py from records of {cases[0].gpu}: {files}."


def _evidence(rule: Rule, rules: list[Rule], seen: list[Example], defaults: Table, kind: str) -> str:
    """The records on which a rule rests, and its gain over the handwritten rules."""
    own = [e for e in seen if next((r for r in rules if r.holds(e.found)), None) is rule]
    lead, gains, turned = rule.order[0], [], []
    for e in own:
        order = preferences.first((defaults,), kind, e.found).order
        before = next(name for name in order if name in e.ratios)
        if before != lead and e.ratios[before] < math.inf:
            turned.append(e)
            gains.append(e.ratios[before] / e.ratios[lead])
    if not gains:
        return f"{own[0].case.gpu}: what is chosen by hand was not measured, or was wrong"
    named = ", ".join(sorted({f"{Path(e.case.file).stem}.json ({e.case.commit})" for e in turned}))
    ids = sorted({e.case.id for e in turned})
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    mean, least = statistics.geometric_mean(gains), min(gains)
    return (
        f"{own[0].case.gpu}, {named}: {lead} takes 1/{mean:.2f} of the time of what is chosen by hand "
        f"(at worst 1/{least:.2f}) in {shown}"
    )
