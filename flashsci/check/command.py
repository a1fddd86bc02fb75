"""`python -m flashsci check`: the check of every kernel on this GPU. Writes reports/gpu-check.json.

Generated problems (flashsci.testing.cases) are judged against the fp64 oracle by the criteria of
flashsci.testing.bounds, forward, lse and all gradients, on every backend. Then the known traps and bitwise
determinism are tested. Worker processes share the work by kernel variant, so that each variant is compiled once and
many are compiled at a time. The report has one digest per kernel unit: from it a CPU test knows which kernels have
changed since. It also lists properties that the generator can draw, but did not draw for some dtypes or head dims of
a backend (`coverage`).

"cuda" picks kernels as users get them; "cuda:sm90" and similar names are restricted to one generation, so that a call
that another one served does not count. A part of the cases is drawn for the newest generation, and judged on CUDA
kernels alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from flashsci.check.judging import judge_case, judge_fp8_case, judge_map_case, judge_paged_case
from flashsci.check.suite import run
from flashsci.check.units import kernels_here
from flashsci.testing import (
    Case,
    FP8Case,
    FP8Variant,
    MapCase,
    PagedCase,
    PagedVariant,
    ResidualCase,
    Variant,
)


def reproduce(text: str, backends: Sequence[str], device: str, say: Any = print) -> int:
    """Judge one case, given as the report prints it."""
    kinds = Case, Variant, PagedCase, PagedVariant, FP8Case, FP8Variant, ResidualCase, MapCase
    names = {x.__name__: x for x in kinds}
    case = eval(text, names)
    judge: Any = {PagedCase: judge_paged_case, FP8Case: judge_fp8_case, MapCase: judge_map_case}.get(
        type(case), judge_case
    )
    tallies = judge(case, backends, device)
    for name, tally in tallies.items():
        what = [f["problem"] for f in tally.failures] or list(tally.refused) or ["right"]
        say(f"{name}: " + "\n  ".join(what))
    return int(any(t.failures for t in tallies.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m flashsci check`."""
    parser = argparse.ArgumentParser(prog="python -m flashsci check", description=__doc__)
    parser.add_argument("--unit", help="only this kernel unit (or units that start so)")
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="add the results to the report under this name (default with --unit: the unit; else they replace "
        "the whole run's)",
    )
    parser.add_argument(
        "--cases-only",
        action="store_true",
        help="no traps: for a part beside a run that sprang them",
    )
    parser.add_argument("--cases", type=int, default=2000, help="generated problems (default 2000)")
    parser.add_argument(
        "--paged",
        type=int,
        metavar="N",
        help="only N generated calls of paged attention, as a part of that name",
    )
    parser.add_argument(
        "--fp8",
        type=int,
        metavar="N",
        help="only N generated calls on 8-bit floats, as a part of that name",
    )
    parser.add_argument(
        "--residual",
        type=int,
        metavar="N",
        help="only N generated calls of residual attention, as a part of that name",
    )
    parser.add_argument(
        "--maps",
        type=int,
        metavar="N",
        help="only N generated calls of the reductions of attention maps, as a part of that name",
    )
    parser.add_argument("--out", default="reports/gpu-check.json", help="where the report goes")
    parser.add_argument(
        "--seed",
        type=int,
        help="of the generator (default: today's date, YYYYMMDD, and for a part three digits of its name)",
    )
    parser.add_argument("--workers", type=int, help="processes (default: one per core, at most 14 for each GPU)")
    parser.add_argument("--minutes", type=float, default=15.0, help="stop then (default 15)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: Triton interprets")
    parser.add_argument("--backends", help="comma-separated (default: all with kernels of ours)")
    parser.add_argument("--reproduce", metavar="CASE", help="judge one case, as a report prints it")
    options = parser.parse_args(arguments)
    backends = options.backends.split(",") if options.backends else None
    if options.device == "cpu":  # Triton decides when it is imported, here and in the worker processes
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if options.reproduce:
        return reproduce(options.reproduce, backends or kernels_here(), options.device)
    for name, count in (
        ("paged", options.paged),
        ("fp8", options.fp8),
        ("residual", options.residual),
        ("maps", options.maps),
    ):
        if count is not None:
            options.unit, options.cases, options.cases_only = name, count, True
    return run(
        options.unit,
        options.cases,
        options.out,
        options.seed,
        options.workers,
        options.device,
        backends,
        options.minutes,
        part=options.part,
        cases_only=options.cases_only,
    )
