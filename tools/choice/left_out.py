"""The regret of predicted times on drawn calls, each predicted by constants that were fitted to the calls of other seeds.

    python -m tools.choice.left_out          every seed of the committed records
    python -m tools.choice.left_out 5 7      these seeds

Only the constants have not seen the calls: rules by hand, after which predictions decide, and the spreads of predictions are today's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

from flashsci.choice import predictions
from flashsci.choice.predictions import model
from tools.choice import drawn, fit
from tools.choice.drawn import Measured, Pair, Regret

RECORDS = fit.ROOT / "reports" / "bench" / "h200"
SEEDS = [int(name) for path in fit.DRAWN if (name := path.stem.removeprefix("drawn-")).isdigit()]


def files_of(seed: int) -> list[Path]:
    """The files of records of a seed, those of calls that were timed again last."""
    return sorted(RECORDS.glob(f"drawn-{seed}.jsonl")) + sorted(RECORDS.glob(f"drawn-{seed}-*.jsonl"))


@functools.cache
def _samples() -> list[fit.Sample]:
    return fit.samples_of(fit.FITTED)


@functools.cache
def without(seed: int) -> model.Model:
    """The constants of all records but those of a seed, with the spreads of what is shipped."""
    rest = [sample for sample in _samples() if sample.groups["suite"] != f"seed {seed}"]
    paths = [path for path in fit.FITTED if path not in files_of(seed)]
    shipped = model.of((9, 0))
    assert shipped is not None
    return fit.fit(rest, {name: one.spread for name, one in shipped.families.items()}, fit.hosts(paths))


def chosen(m: Measured) -> Pair | None:
    """The choice for a call by constants that did not see its seed."""
    usual = drawn.rules(m)
    return usual and predictions.leader(usual, predictions.times(m.problem, drawn.able(m), without(m.call.seed)))


def regrets(seeds: Iterable[int] = SEEDS) -> list[Regret]:
    """The regrets of the calls of these seeds."""
    return drawn.regrets([m for seed in seeds for m in drawn.read(files_of(seed)) if m.call.seed == seed], chosen)


def main(arguments: list[str]) -> int:
    """Print the table; returns the exit status."""
    seeds = [int(seed) for seed in arguments] or SEEDS
    found = regrets(seeds)
    measured = [r.measured for r in found]
    print("rules")
    print(drawn.text(drawn.regrets(measured)))
    print("predicted by constants of other seeds")
    print(drawn.text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
