"""The order of `auto` from measured records: learn a table of rules for a GPU, and say what `auto` loses by it.

    python -m scripts.preferences                           regret on the committed records, the worst ten
    python -m scripts.preferences --write                   learn flashsci/preferences/sm*.json, and docs/auto.md's tables
    python -m scripts.preferences --check                   whether those are what the records give
    python -m scripts.preferences mine.json --table T.json  a table of one's own records, for FLASHSCI_PREFERENCES=T.json

*Regret* of a case: the time of what `auto` picks over that of the best candidate that passed its check (cuda, triton,
every kernel of SDPA; plain math where it may hold its scores), for the forward, the backward, and both together. A case
of the suite `latency`, which the GPU computes in less time than the host launches it, counts by its pass `host` alone.

*Learning* starts from the rules written by hand and puts exceptions before them, one at a time: the conjunction of
conditions and the backend that save most regret, as long as they save more than a rule costs. Costs keep rules few,
short, and away from what nobody measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES
from benchmarks.inputs import DTYPES
from flashsci import ops, preferences, registry
from flashsci.preferences import Rule, Table
from flashsci.problem import Problem, sums_bias

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "auto.md"
#: Of records that do not say.
CAPABILITIES = {"NVIDIA H200": (9, 0)}
#: The order behind the backend that a learnt rule puts first.
OTHERS = ("cuda", "triton", "sdpa", "reference")
BACKENDS = ("cuda", "triton", "sdpa", "eager")
SHARING = ("cuda", "triton")  # each may compute the gradients of the other's forward
SDPA_KERNELS = ("sdpa:flash", "sdpa:cudnn", "sdpa:efficient")
#: In units of log regret: of a rule, of each of its conditions, of a case nobody measured whose choice it turns.
RULE, CONDITION, FLIP = 0.04, 0.005, 0.01
#: Of a choice that was not measured, or failed its check.
UNKNOWN = math.log(1.5)
MOST_CONDITIONS, BEAM = 6, 12
#: What learnt rules may ask, with the numbers among them.
ASKED = {
    "calls": ("bits", "head_dim", "seq_q", "seq_k", "batch_heads", "aligned", "band", "bias", "bias_inner", "mask", "varlen", "grad"),
    "gradients": ("bits", "head_dim", "seq_q", "seq_k", "batch_heads", "aligned", "band", "bias", "bias_inner", "bias_grad", "bias_summed", "mask", "varlen", "generation", "forward"),
}  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One case of one file of records: who computes its passes, and in what time."""

    file: str
    id: str
    suite: str
    commit: str
    gpu: str
    problem: Problem
    generation: int  # of the cuda backend's kernels that would compute its gradients
    forward: dict[str, float]  # backend -> us; inf: refused or wrong
    backward: dict[str, float]
    best: dict[str, float]  # pass -> us of the best candidate, whether auto could pick it or not

    def gradients(self, backend: str) -> float | None:
        """The time of a backend's own gradients. What `cuda` measured may have been another's."""
        own = self.backward.get("cuda:own") if backend == "cuda" else None
        return own or self.backward.get(backend)

    def time(self, backend: str, gradients: str) -> float | None:
        """Of forward and backward: ``gradients`` are whose where cuda and triton may have each other's."""
        first = self.forward.get(backend)
        second = self.gradients(gradients if backend in SHARING else backend)
        return None if first is None or second is None else first + second


def problem_of(case: dict[str, Any], capability: tuple[int, int] | None, on_gpu: bool) -> Problem:
    """The case of a record as `auto` would see it, with gradients if it has any."""
    lens = case.get("lens")
    batch = (case.get("B", 1), case["N"]) if "N" in case else (case.get("B", 1),)
    left, right = case.get("window", (-1, -1))
    order, bias = case.get("order", 0), case.get("bias")
    shape = None if bias is None or lens else tuple(bias)
    dtype, bias_dtype = DTYPES[case["dtype"]], DTYPES[case.get("bias_dtype", case["dtype"])]
    wanted = bool(bias and order and case.get("bias_grad"))
    summed = wanted and shape is not None and sums_bias(
        torch.empty(shape, dtype=bias_dtype, device="meta"), (*batch, case["H"])
    )  # fmt: skip
    return Problem(
        "cuda" if on_gpu else "cpu", capability, dtype, case["H"], case["Hk"], case["D"], case["Dv"],
        batch=(lens["n"],) if lens else batch,
        seq_q=lens["total"] if lens else case["Sq"], seq_k=lens["total"] if lens else case["Sk"],
        varlen=bool(lens), ragged_bias=bool(lens and bias), bias_shape=shape, bias_dtype=bias_dtype if bias else None,
        bias_grad=wanted, bias_summed=summed, bias_inner="bias_layout" not in case, mask="mask" in case,
        window_left=left, window_right=0 if case.get("causal") else right, requires_grad=order > 0,
    )  # fmt: skip


def generation_of(case: dict[str, Any], problem: Problem) -> int:
    """Of the cuda backend's kernels for the gradients of a case, with bias and mask as they lie in memory."""
    if problem.capability is None:
        return 0
    module = registry.find("cuda").load()

    def empty(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q = empty((*problem.batch, problem.heads_q, problem.seq_q, problem.head_dim), problem.dtype)
    v = empty((*problem.batch, problem.heads_q, problem.seq_k, problem.head_dim_v), problem.dtype)
    bias = mask = None
    if problem.bias_shape is not None:
        *outer, heads, rows, keys = problem.bias_shape
        bias = empty(problem.bias_shape, problem.bias_dtype)
        if not problem.bias_inner:
            bias = empty((*outer, rows, keys, heads), problem.bias_dtype).movedim(-1, -3)
    if "mask" in case:
        mask = empty(case["mask"], torch.bool)
    scalars = ops.Scalars(-1, -1, 1.0, 0.0, -1, -1, False, 0.0, "default", False)
    saved = ops.Saved(ops.Tensors(q, v, v, bias, mask=mask), v, q, scalars)
    takes = module.hopper_takes(saved, ops.NEED_BIAS if problem.bias_grad else 0)
    generation: int = module.backward_kernels(problem, takes)[0]
    return generation


def read(path: Path) -> list[Timed]:
    """The cases of a file of records."""
    found: dict[str, list[dict]] = {}
    for record in json.loads(path.read_text()):
        on_host = record["suite"] == "latency"
        if record["pass"] in (("host",) if on_host else ("forward", "backward")):
            found.setdefault(record["case"]["id"], []).append(record)
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return [case for records in found.values() if (case := _timed(name, records))]


def _timed(file: str, records: list[dict]) -> Timed | None:
    about = records[0]
    gpu = about["env"]["gpu"]
    capability = about["env"].get("capability") or CAPABILITIES.get(gpu)
    problem = problem_of(about["case"], capability and tuple(capability), gpu is not None)
    passes: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for r in records:
        times = passes["forward" if r["pass"] == "host" else r["pass"]]
        times[r["backend"]] = r["time_us"]["median"] if r["time_us"] else math.inf
    best = {}
    for kind, times in passes.items():
        peers = [n for n in times if n in (*BACKENDS, "cuda:own", *SDPA_KERNELS)]
        if registry.may_hold_scores(problem):
            peers += [n for n in ("math", "sdpa:math") if n in times]
        best[kind] = min((times[n] for n in peers), default=math.inf)
    if math.isinf(best["forward"]):
        return None
    if not passes["backward"]:
        problem = replace(problem, requires_grad=False)
    served = {kind: _backends(times, problem) for kind, times in passes.items()}
    generation = generation_of(about["case"], problem) if passes["backward"] else 0
    commit = about["commit"] or "no commit"
    return Timed(
        file, about["case"]["id"], about["suite"], commit, gpu or "CPU", problem, generation, **served, best=best,
    )  # fmt: skip


def _backends(times: dict[str, float], problem: Problem) -> dict[str, float]:
    """By what `auto` can pick. What was not measured itself goes by what it would run."""
    found = {n: times[n] for n in (*BACKENDS, "cuda:own", "reference") if n in times}
    if "sdpa" not in found:
        masked = problem.bias or problem.mask or problem.head_dim != problem.head_dim_v
        kernels = ("sdpa:flash", "sdpa:efficient") if masked else ("sdpa:default", *SDPA_KERNELS)
        there = [times[n] for n in kernels if n in times]
        if there:
            found["sdpa"] = min(there)
    refused = registry.find("eager").rejects(problem)
    if "eager" not in found and "math" in times and refused is None:
        found["eager"] = times["math"]
    return found


def pick(order: Iterable[str], times: dict[str, float], problem: Problem) -> str | None:
    """The first backend of an order that is not known to refuse; None: it was not measured."""
    for name in order:
        if name == "eager" and not registry.may_hold_scores(problem):
            continue
        if name not in times:
            return None
        if times[name] < math.inf:
            return name
    return None


@dataclass(frozen=True)
class Regret:
    """What `auto` picks for a pass of a case, and its time over the best."""

    case: Timed
    kind: str  # "forward", "backward" or "both"
    backend: str | None  # None: what it picks was not measured
    ratio: float | None


def regrets(cases: list[Timed], tables: tuple[Table, ...]) -> list[Regret]:
    """Of every case and pass: "forward" of a call without gradients, "backward" and "both" of one with."""
    found = []
    for case in cases:
        name = _picked(case, tables, grad=False)
        ratio = None if name is None else case.forward[name] / case.best["forward"]
        found.append(Regret(case, "forward", name, ratio))
        if not case.problem.requires_grad or math.isinf(case.best["backward"]):
            continue
        name = _picked(case, tables, grad=True)
        by = _gradients(case, tables, name)
        total = None if name is None else case.time(name, by)
        if name is None or total is None:
            found += [Regret(case, kind, None, None) for kind in ("backward", "both")]
            continue
        second = total - case.forward[name]
        shown = f"{name}, {by}" if name in SHARING and by != name else name
        found.append(Regret(case, "backward", shown, second / case.best["backward"]))
        found.append(Regret(case, "both", shown, total / _least(case)))
    return found


def _picked(case: Timed, tables: tuple[Table, ...], grad: bool) -> str | None:
    problem = replace(case.problem, requires_grad=grad)
    order = preferences.first(tables, "calls", preferences.features(problem)).order
    return pick(order, case.forward, problem)


def _gradients(case: Timed, tables: tuple[Table, ...], forward: str | None) -> str:
    found = preferences.features(case.problem, case.generation, forward or "")
    return preferences.first(tables, "gradients", found).order[0]


def _least(case: Timed) -> float:
    """The least time of forward and backward."""
    pairs = itertools.product(case.forward, SHARING)
    totals = [t for name, by in pairs if _allowed(name, case) and (t := case.time(name, by))]
    return min(totals)


def _allowed(name: str, case: Timed) -> bool:
    return name not in ("eager", "reference") or registry.may_hold_scores(case.problem)


@dataclass(frozen=True)
class Example:
    """What a rule is learnt from: features of a call, and by each backend that may be put first the time over the best
    (inf: not measured, or wrong)."""

    case: Timed
    found: dict[str, Any]
    ratios: dict[str, float]

    def loss(self, lead: str) -> float:
        """Log regret; what is beyond 10% counts twice."""
        ratio = self.ratios[lead]
        return UNKNOWN if math.isinf(ratio) else math.log(ratio) + max(0.0, math.log(ratio / 1.1))


def examples(cases: list[Timed], kind: str, tables: tuple[Table, ...]) -> list[Example]:
    """For gradients, ``tables`` say whose forward it is."""
    if kind == "calls":
        return [e for case in cases for e in _calls(case)]
    forwards = [(case, _picked(case, tables, grad=True)) for case in cases]
    return [e for case, name in forwards if name in SHARING for e in _of_gradients(case, name)]


def _calls(case: Timed) -> Iterable[Example]:
    """A call without gradients by its forward, one with by both passes."""
    for grad in (False, True):
        if grad and (not case.problem.requires_grad or math.isinf(case.best["backward"])):
            continue
        problem = replace(case.problem, requires_grad=grad)
        ratios = {}
        for lead in BACKENDS:
            name = pick(_order(lead), case.forward, problem)
            time = None
            if name is not None and (_allowed(lead, case) or name != lead):
                own = [case.time(name, by) for by in SHARING]
                time = min((t for t in own if t), default=None) if grad else case.forward[name]
            least = _least(case) if grad else case.best["forward"]
            ratios[lead] = math.inf if time is None else time / least
        yield Example(case, preferences.features(problem), ratios)


def _of_gradients(case: Timed, forward: str) -> Iterable[Example]:
    times = {name: case.gradients(name) for name in SHARING}
    if None in times.values() or not case.problem.requires_grad:
        return
    least = min(times.values())
    if not math.isinf(least):
        ratios = {name: time / least for name, time in times.items()}
        yield Example(case, preferences.features(case.problem, case.generation, forward), ratios)


def _order(lead: str) -> tuple[str, ...]:
    return (lead, *(name for name in OTHERS if name != lead))


Condition = tuple[str, Any]


def conditions(seen: list[Example], kind: str) -> list[Condition]:
    """All that a rule may ask: values that occur, and thresholds between neighbouring ones."""
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
    """With one more condition; None if it adds nothing."""
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
        """The best first, and always the same of equals."""
        return -round(self.gain, 9), json.dumps([self.when, self.lead], sort_keys=True)


class Learner:
    """Exceptions to the rules written by hand, from examples of one GPU.

    A point is a call that a rule may cover: the examples, then cases that nobody measured, which should stay as they are.
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
        for rule in tuple(self.rules):  # a later exception may have made an earlier one needless
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
        """By each backend that may lead, [points]: what it saves where it takes over."""
        now = [self._lead(self.rules, point) for point in self.points]
        measured, rest = now[: len(self.seen)], now[len(self.seen) :]
        found = {}
        for lead in self.leads:
            saved = [e.loss(at) - e.loss(lead) for e, at in zip(self.seen, measured, strict=True)]
            turned = [-FLIP * (at != lead) for at in rest]
            found[lead] = torch.tensor([*saved, *turned], dtype=torch.float64)
        return found

    def _next(self) -> Rule | None:
        """The exception that saves most, if it saves anything."""
        savings = self._savings()
        everywhere = torch.ones(len(self.points), dtype=torch.float64)
        beams = {lead: [Candidate(-math.inf, {}, lead, everywhere)] for lead in self.leads}
        best: Candidate | None = None
        for depth, lead in itertools.product(range(1, MOST_CONDITIONS + 1), self.leads):
            grown: dict[str, Candidate] = {}
            for start in beams[lead]:
                saved = start.covered * savings[lead]
                gains = self.held @ saved - RULE - CONDITION * depth
                some = self.held @ saved.clamp(min=0) > RULE  # else no more conditions help
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
        order = _order(best.lead)
        if self.kind == "gradients":
            order = tuple(n for n in order if n in self.leads)
        return Rule(dict(sorted(best.when.items(), key=_place)), order, "")


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
    """A call with one feature another."""
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
    shared = (p.heads_q, rows, keys)
    for shape in (None, (1, keys), shared, (*p.batch, *shared)):
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
    return f"Learnt by scripts/preferences.py from records of {cases[0].gpu}: {files}."


def _evidence(
    rule: Rule, rules: list[Rule], seen: list[Example], defaults: Table, kind: str
) -> str:
    """On which records a rule rests, and what it gains over the rules written by hand."""
    own = [e for e in seen if next((r for r in rules if r.holds(e.found)), None) is rule]
    lead, gains, turned = rule.order[0], [], []
    for e in own:
        order = preferences.first((defaults,), kind, e.found).order
        before = next(name for name in order if name in e.ratios)
        if before != lead and e.ratios[before] < math.inf:
            turned.append(e)
            gains.append(e.ratios[before] / e.ratios[lead])
    named = ", ".join(sorted({f"{Path(e.case.file).stem}.json ({e.case.commit})" for e in turned}))
    ids = sorted({e.case.id for e in turned})
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    mean, least = statistics.geometric_mean(gains), min(gains)
    return (
        f"{own[0].case.gpu}, {named}: {lead} takes 1/{mean:.2f} of the time of what is chosen by hand "
        f"(at worst 1/{least:.2f}) in {shown}"
    )


def text_of(table: Table, found: list[Regret]) -> str:
    """A table as its file: a rule in three lines."""
    lines = ["{", f' "about": {json.dumps(table.about)},']
    if table.capability is not None:
        lines.append(f' "capability": {json.dumps(table.capability)},')
    lines.append(f' "regret": {json.dumps(summary(found))},')
    for kind in preferences.KINDS:
        rules = [
            f'  {{"when": {json.dumps(rule.when)},\n   "order": {json.dumps(rule.order)},\n'
            f'   "evidence": {json.dumps(rule.evidence)}}}'
            for rule in getattr(table, kind)
        ]
        inner = ",\n".join(rules)
        comma = "," if kind != preferences.KINDS[-1] else ""
        lines.append(f' "{kind}": [\n{inner}\n ]{comma}' if rules else f' "{kind}": []{comma}')
    return "\n".join([*lines, "}"]) + "\n"


def summary(found: list[Regret]) -> dict[str, list[float]]:
    """{pass: [number of cases, geometric mean, worst]}."""
    by = {}
    for kind in ("forward", "backward", "both"):
        ratios = [r.ratio for r in found if r.kind == kind and r.ratio is not None]
        if ratios:
            by[kind] = [
                len(ratios),
                round(statistics.geometric_mean(ratios), 3),
                round(max(ratios), 2),
            ]
    return by


def report(found: list[Regret]) -> str:
    """Regret by suite and pass, the worst ten, and what auto picks without a measurement."""
    lines = []
    for suite in sorted({r.case.suite for r in found}):
        for kind, (count, mean, worst) in summary([r for r in found if r.case.suite == suite]).items():
            lines.append(f"{suite:<12}{kind:<10}{count:>4} cases{mean:>8.3f} worst {worst:.2f}")
    for kind, (count, mean, worst) in summary(found).items():
        lines.append(f"{'all':<12}{kind:<10}{count:>4} cases{mean:>8.3f} worst {worst:.2f}")
    known = [r for r in found if r.ratio is not None]
    for r in sorted(known, key=lambda r: -r.ratio)[:10]:
        lines.append(f"{r.ratio:>6.2f}  {r.case.id} {r.kind}: {r.backend} ({Path(r.case.file).stem})")
    blind = sorted({f"{r.case.id} ({Path(r.case.file).stem})" for r in found if r.ratio is None})
    if blind:
        lines.append(f"not measured: what auto picks of {', '.join(blind)}")
    return "\n".join(lines)


def by_gpu(paths: Iterable[Path]) -> dict[str, list[Timed]]:
    """{name of the table: cases}, "cpu" for machines without a GPU."""
    found: dict[str, list[Timed]] = {}
    for case in (case for path in paths for case in read(path)):
        capability = case.problem.capability
        name = "cpu" if capability is None else f"sm{capability[0]}{capability[1]}"
        found.setdefault(name, []).append(case)
    return found


def pages(table: Table, found: list[Regret]) -> dict[str, str]:
    """What docs/auto.md shows of the rules, by the name of its place there."""
    defaults = preferences.read(preferences.FOLDER / "defaults.json")
    rows = ["| pass | cases | geometric mean | worst |", "|---|---|---|---|"]
    rows += [f"| {kind} | {n} | {mean:.3f} | {worst:.2f} |" for kind, (n, mean, worst) in summary(found).items()]
    shown = {"regret": "\n".join(rows)}
    for kind in preferences.KINDS:
        rows = ["| calls | order | why | written |", "|---|---|---|---|"]
        for source, by in ((table, f"{table.name}.json, by the tool"), (defaults, "by hand")):
            rows += [
                f"| {rule.text()} | {' > '.join(rule.order)} | {rule.evidence} | {by} |"
                for rule in getattr(source, kind)
            ]
        shown[kind] = "\n".join(rows)
    return shown


def placed(page: str, shown: dict[str, str]) -> str:
    """A page with new text between its markers."""
    for name, text in shown.items():
        begin, end = f"<!-- preferences:begin {name} -->", "<!-- preferences:end -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"no place for {name}: {begin} ... {end}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def results() -> dict[Path, str]:
    """The files that the committed records give, and what should be in them."""
    files = {}
    page = PAGE.read_text()
    for name, cases in by_gpu(sorted(RESULTS.glob("*/*.json"))).items():
        defaults = preferences.read(preferences.FOLDER / "defaults.json")
        table = learnt(name, cases)
        found = regrets(cases, (table, defaults))
        files[preferences.FOLDER / f"{name}.json"] = text_of(table, found)
        page = placed(page, pages(table, found))
    return {**files, PAGE: page}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="*", type=Path, help="default: benchmarks/results/*/*.json")
    parser.add_argument("--write", action="store_true", help="tables and page of the committed records")
    parser.add_argument("--check", action="store_true", help="fail if those are other than committed")
    parser.add_argument("--table", type=Path, help="learn a table of these records, and write it here")
    arguments = parser.parse_args()
    if arguments.write or arguments.check:
        files = results()
        stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
        for path in stale:
            if arguments.write:
                path.write_text(files[path])
            print(path.relative_to(ROOT), "written" if arguments.write else "is not what the records give")
        return int(bool(stale) and arguments.check)
    groups = by_gpu(arguments.records or sorted(RESULTS.glob("*/*.json")))
    if arguments.table and len(groups) != 1:
        parser.error(f"--table is of one kind of GPU, and these records are of {', '.join(groups) or 'none'}")
    for name, cases in groups.items():
        tables = preferences.tables(cases[0].problem.capability)
        if arguments.table:
            learned = learnt(arguments.table.stem, cases)
            tables = learned, preferences.read(preferences.FOLDER / "defaults.json")
            arguments.table.write_text(text_of(learned, regrets(cases, tables)))
        print(f"{name}, by {', '.join(t.name for t in tables)}\n{report(regrets(cases, tables))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
