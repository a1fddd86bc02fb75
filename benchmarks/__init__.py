"""Benchmarks: the same cases for every backend and baseline, checked before they are timed.

    python -m flashsci bench --suite headline --json benchmarks/results/h200/headline.json

or, without the command line's extras:

    >>> import benchmarks as bench
    >>> cases = bench.select(ids=["cpu-pair-bias"])
    >>> records = bench.run(cases, ["reference", "sdpa:math"], "cpu", seconds=0.01)
    >>> [record["gate"] for record in records if record["pass"] == "forward"]
    ['passed', 'passed']
"""

from benchmarks.ahead import compile_ahead
from benchmarks.candidates import BASELINES, OURS, names_of
from benchmarks.cases import CASES, CLAIMS, SUITES, BenchError, Case, Claim, select
from benchmarks.measure import in_dtype, run
from benchmarks.ranking import split, standings
from benchmarks.report import comparison, markdown, merged, plain, refresh, show, tables

__all__ = [
    "BASELINES",
    "CASES",
    "CLAIMS",
    "OURS",
    "SUITES",
    "BenchError",
    "Case",
    "Claim",
    "comparison",
    "compile_ahead",
    "in_dtype",
    "markdown",
    "merged",
    "names_of",
    "plain",
    "refresh",
    "run",
    "select",
    "show",
    "split",
    "standings",
    "tables",
]
