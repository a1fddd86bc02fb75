"""The regret of predicted times on records of benchmarks and of drawn calls, with groups left out of the fit.

python -m tools.choice.predicted                  rules and predictions by suite, each case predicted without its group
python -m tools.choice.predicted --relearn        also rules that are learnt anew without each fifth of the cases
python -m tools.choice.predicted --certainty 1    the choice of the rules stays within so much of the spread
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from flashsci.choice import predictions, preferences
from flashsci.choice.predictions.model import Model
from flashsci.choice.preferences import Table
from tools.choice import fit, regret
from tools.choice.regret import BACKENDS, SHARING, Timed
from tools.choice.rules import learnt

KINDS = ("forward", "both")


def groups_of(case: Timed) -> dict[str, str]:
    """The groups with which a case is left out, as those of its samples."""
    p = case.problem
    return {"case": case.id.partition("@")[0], "suite": case.suite, "D": str(max(p.head_dim, p.head_dim_v))}


def _gradients(case: Timed, forward: str, tables: tuple[Table, ...]) -> str:
    return regret._gradients(case, tables, forward) if forward in SHARING else forward


def _known(time: float | None) -> bool:
    return time is not None and time < math.inf


def chosen(
    case: Timed, kind: str, tables: tuple[Table, ...], model: Model | None, certainty: float
) -> tuple[str, str] | None:
    """The backends of a call and of its gradients: those of the rules, or by a model those of predicted times."""
    grad = kind == "both"
    name = regret.picked(case, tables, grad)
    if name is None:
        return None
    usual = name, _gradients(case, name, tables)
    if model is None:
        return usual
    problem = replace(case.problem, requires_grad=grad)
    served = case.serving(grad)
    names = [n for n in BACKENDS if _known(served.get(n)) and regret.allowed(n, case)]
    pairs: list[predictions.Pair] = []
    for n in names:
        whose = [g for g in (SHARING if n in SHARING else (n,)) if _known(case.gradients(g))]
        pairs += [(n, g) for g in whose] if grad else [(n, None)]
    asked: predictions.Pair = usual if grad else (name, None)
    best = predictions.leader(asked, predictions.times(problem, pairs, model), certainty)
    return best[0], best[1] or best[0]


def ratio(case: Timed, kind: str, pair: tuple[str, str] | None) -> float | None:
    """The time of a choice over that of the best; None if it was not measured."""
    if pair is None or pair[0] in case.wrong:
        return None
    if kind == "forward":
        return case.forward[pair[0]] / case.best["forward"]
    total = case.time(*pair)
    return total / regret.fastest(case) if total is not None and total < math.inf else None


Ratios = dict[tuple[str, str], list[float]]  # by suite and kind


def ratios(
    cases: Iterable[Timed],
    tables: Callable[[Timed], tuple[Table, ...]],
    model: Callable[[Timed], Model | None],
    certainty: float = predictions.CERTAINTY,
) -> Ratios:
    """The regrets of a chooser that has a table and a model for each case."""
    found: Ratios = {}
    for case in cases:
        for kind in KINDS:
            if kind == "both" and (not case.problem.requires_grad or math.isinf(case.best["backward"])):
                continue
            one = ratio(case, kind, chosen(case, kind, tables(case), model(case), certainty))
            if one is not None:
                found.setdefault((case.suite, kind), []).append(one)
                found.setdefault(("all", kind), []).append(one)
    return found


def committed() -> list[Timed]:
    """The cases of the records that fits use, except those timed on the host."""
    return [case for path in fit.RECORDS for case in regret.read(path) if case.suite != "latency"]


def held_out(models: Mapping[str, Model], key: str) -> Callable[[Timed], Model | None]:
    """For a case, the model that did not see its group."""
    return lambda case: models.get(fit.group_of(groups_of(case), key))


def means(found: Ratios) -> dict[str, float]:
    """The geometric mean of all cases by kind."""
    return {kind: statistics.geometric_mean(found["all", kind]) for kind in KINDS}


def text(columns: Mapping[str, Ratios]) -> str:
    """Geometric mean, share above 1.1 and worst by suite and kind."""
    keys = sorted({key for found in columns.values() for key in found}, key=lambda k: (k[0] == "all", k))
    lines = [f"{'':<24}{'calls':>6}" + "".join(f"{name:>24}" for name in columns)]
    for key in keys:
        cells = []
        for found in columns.values():
            x = found.get(key, [])
            cells.append(
                f"{statistics.geometric_mean(x):.3f} {sum(r > 1.1 for r in x) / len(x):.0%} {max(x):.2f}" if x else "-"
            )
        count = max(len(found.get(key, [])) for found in columns.values())
        lines.append(f"{' '.join(key):<24}{count:>6}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--certainty", type=float, default=predictions.CERTAINTY)
    parser.add_argument("--relearn", action="store_true", help="minutes")
    given = parser.parse_args(arguments)
    cases, samples = committed(), fit.samples_of(fit.FITTED)
    defaults = preferences.read(preferences.FOLDER / "defaults.json")
    shipped = (preferences.read(preferences.FOLDER / "sm90.json"), defaults)
    columns = {"rules, shipped": ratios(cases, lambda case: shipped, lambda case: None)}
    columns["rules by hand"] = ratios(cases, lambda case: (defaults,), lambda case: None)
    if given.relearn:
        by = {}
        for fold in map(str, range(fit.FOLDS)):
            rest = [case for case in cases if fit.group_of(groups_of(case), "case") != fold]
            by[fold] = (learnt("sm90", rest), defaults)
        columns["rules without case"] = ratios(
            cases, lambda case: by[fit.group_of(groups_of(case), "case")], lambda case: None
        )
    for key in fit.GROUPS:
        model = held_out(fit.without(samples, key), key)
        columns[f"hand, times no {key}"] = ratios(cases, lambda case: (defaults,), model, given.certainty)
    print(text(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
