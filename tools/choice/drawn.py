"""The regret of a chooser on records of drawn calls: today's rules, or any function from a call to its backends.

    python -m tools.choice.drawn reports/bench/h200/drawn-*.jsonl              regret of today's rules, the worst ten
    python -m tools.choice.drawn drawn-1.jsonl drawn-2.jsonl --seeds 2         on the calls of these seeds alone
    python -m tools.choice.drawn drawn-1.jsonl --chooser predicted             of predicted times after that of the rules

A chooser that is fitted to the calls of some seeds (`of_seeds`) is judged on those of others by `regrets`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flashsci.api.explain import explain
from flashsci.call import ops
from flashsci.call.problem import Problem
from flashsci.choice import backends, candidates, predictions, preferences
from flashsci.choice.gradients import by_rules, gradients
from flashsci.testing import DrawnCall
from tools.bench.drawn import report, ways
from tools.bench.drawn.work import Work

#: The backend of a call, and that of its gradients (None: it has none).
Pair = tuple[str, str | None]


@dataclass(frozen=True)
class Measured:
    """One drawn call as the problem that `auto` decides, and the times of its backends."""

    call: DrawnCall
    problem: Problem
    takes: bool  # whether the Hopper backward takes the strides of bias and mask
    times: dict[Pair, float]  # us, of those that were right
    of_torch: dict[str, float]  # us of the candidates of torch
    auto: Pair | None  # the choice when the record was made

    @property
    def best(self) -> float:
        """The least time of a choice."""
        return min((*self.times.values(), *(t for n, t in self.of_torch.items() if n in ways.SDPA)))


#: A function that chooses for a call without looking at its times.
Chooser = Callable[[Measured], Pair | None]


@dataclass(frozen=True)
class Regret:
    """A choice for a call, and its time over the best; None where it was not measured, or was wrong."""

    measured: Measured
    pair: Pair | None
    ratio: float | None


def read(paths: Iterable[Path]) -> list[Measured]:
    """The calls of files of records that have a time; the last record of a call counts, as kernels may have changed since the first."""
    last = {str(DrawnCall.of(record["call"])): record for path in paths for record in report.read(path)}
    return [found for record in last.values() if (found := measured(record)) is not None]


def measured(record: dict[str, Any]) -> Measured | None:
    """The call of a record; None if nothing was timed."""
    found, of_torch = {}, {}
    for name, time in report.times(record).items():
        by = record["candidates"][name].get("by")
        if by is None:
            of_torch[name] = time
        else:
            found[by[0], by[1]] = time
    if not found:
        return None
    call = DrawnCall.of(record["call"])
    capability = record["env"]["capability"]
    problem, takes = described(call, capability and tuple(capability))
    auto = record["candidates"].get("auto", {}).get("by")
    return Measured(call, problem, takes, found, of_torch, auto and (auto[0], auto[1]))


def described(call: DrawnCall, capability: tuple[int, int] | None) -> tuple[Problem, bool]:
    """A drawn call as `auto` sees it on a device, and whether the Hopper backward takes its strides.

    Raises:
        RuntimeError: bias or mask, and no library that says which strides it takes.
    """
    work = Work(call, torch.device("meta"))
    x = work.inputs
    given = ways.given(x)
    problem = explain(x.q, x.k, x.v, **given).problem
    problem = replace(problem, device_type="cpu" if capability is None else "cuda", capability=capability)
    if capability is None or not work.leaves or not (problem.bias or problem.mask):
        return problem, True
    if call.lens:  # no kernel of Hopper takes a bias of packed calls
        return problem, False
    module = backends.find("cuda").load()
    reason = module.library.load()
    if reason is not None:
        raise RuntimeError(f"the library says which strides of bias and mask its gradients take, and {reason}")
    full = 4

    def aligned(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.detach()[(None,) * (full - t.dim())]

    rows = [x.detach() for x in (x.q, x.k, x.v)]
    tensors = ops.Tensors(*rows, aligned(x.bias), mask=aligned(x.mask))
    p = problem
    window = p.window_left, p.window_right
    scalars = ops.Scalars(-1, -1, 1.0, p.softcap, *window, p.lower_right, p.dropout_p, p.precision, p.deterministic)
    saved = ops.Saved(tensors, *ops.fake_forward(tensors), scalars)
    need = ops.NEED_Q | ops.NEED_K | ops.NEED_V | (ops.NEED_BIAS if p.bias_grad else 0)
    return problem, module.hopper_takes(saved, need)


#: Inside, no predicted time decides.
alone = mock.patch.object(predictions, "enabled", lambda: False)


@alone
def rules(m: Measured) -> Pair | None:
    """The choice of today's rules."""
    order = candidates.candidates(m.problem, "auto", False)
    name = next((n for n in order if candidates.rejects(n, m.problem, anywhere=True) is None), None)
    if name is None or not m.problem.requires_grad:
        return name and (name, None)
    return name, gradients(by_rules(name), m.problem, strides=m.takes, anywhere=True).backend


@alone
def able(m: Measured) -> list[Pair]:
    """The choices that `auto` may make for a call: backends that can serve it, each with the gradients that it may have."""
    left_out, found = preferences.untimed(m.problem), []
    for name in preferences.KNOWN:
        refused = name == "reference" or name in left_out or not candidates.may_choose(name, m.problem)
        if refused or candidates.rejects(name, m.problem, anywhere=True) is not None:
            continue
        usual = gradients(by_rules(name), m.problem, strides=m.takes, anywhere=True).backend
        whose = {usual, name} if name in ("cuda", "triton") else {name}
        found += [(name, other) for other in sorted(filter(None, whose))] if m.problem.requires_grad else [(name, None)]
    return found


def predicted(m: Measured) -> Pair | None:
    """The choice by predicted times; that of today's rules where these do not decide."""
    usual = rules(m)
    return usual and predictions.leader(usual, predictions.times(m.problem, able(m)))


CHOOSERS: dict[str, Chooser] = {"rules": rules, "predicted": predicted}


def of_seeds(found: Iterable[Measured], seeds: Collection[int]) -> list[Measured]:
    """The calls of these seeds."""
    return [m for m in found if m.call.seed in seeds]


def regrets(found: Iterable[Measured], chooser: Chooser = rules) -> list[Regret]:
    """The choices of a chooser, each with its time over that of the best choice."""
    choices = [(m, chooser(m)) for m in found]
    return [Regret(m, pair, m.times[pair] / m.best if pair in m.times else None) for m, pair in choices]


def text(found: list[Regret], worst: int = 10) -> str:
    """Regret by kind of work, the worst calls, and the choices that were not measured."""
    header = f"{'':<10}{'calls':>6}{'mean':>8}{'> 1.1':>8}{'> 1.3':>8}{'worst':>8}"
    lines = [header]
    for work in (*report.WORKS, "all"):
        ratios = [r.ratio for r in found if r.ratio is not None and work in (r.measured.call.work, "all")]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            shares = "".join(f"{sum(x > limit for x in ratios) / len(ratios):>8.1%}" for limit in (1.1, 1.3))
            lines.append(f"{work:<10}{len(ratios):>6}{mean:>8.3f}{shares}{max(ratios):>8.2f}")
    known = [(r.ratio, r) for r in found if r.ratio is not None and r.ratio > 1]
    for ratio, r in sorted(known, key=lambda item: -item[0])[:worst]:
        lines.append(f"{ratio:>8.2f}  {_shown(r)}")
    lines += [f"{'?':>8}  {_shown(r)}" for r in found if r.ratio is None]
    return "\n".join(lines)


def _shown(r: Regret) -> str:
    call = r.measured.call
    names = "nobody" if r.pair is None else ", ".join(dict.fromkeys(filter(None, r.pair)))
    return f"{names}: {call.seed}/{call.index} {call}"


def main(arguments: list[str]) -> int:
    """Print the regret of today's rules on these records; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="files of `bench --suite drawn --json`")
    parser.add_argument("--seeds", default="", help="comma-separated: the calls of these seeds alone")
    parser.add_argument("--chooser", choices=CHOOSERS, default="rules", help="its regret after that of the rules")
    given = parser.parse_args(arguments)
    found = read(given.records)
    if given.seeds:
        found = of_seeds(found, {int(seed) for seed in given.seeds.split(",")})
    for name in dict.fromkeys(("rules", given.chooser)):
        decided = sum(rules(m) in predictions.times(m.problem, able(m)) for m in found) if name == "predicted" else 0
        print(f"{name}{f', with predictions of {decided} of {len(found)} calls' if name == 'predicted' else ''}")
        print(text(regrets(found, CHOOSERS[name])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
