"""Benchmarks: the same cases for every backend and baseline, checked before they are timed.

    python -m flashsci bench --suite headline --json reports/bench/h200/headline.json

or, without the command line's extras:

    >>> from tools import bench
    >>> cases = bench.select(ids=["cpu-pair-bias"])
    >>> records = bench.run(cases, ["reference", "sdpa:math"], "cpu", seconds=0.01)
    >>> [record["gate"] for record in records if record["pass"] == "forward"]
    ['passed', 'passed']
"""

from tools.bench.ahead import compile_ahead
from tools.bench.candidates import BASELINES, OURS, names_of
from tools.bench.cases import CASES, CLAIMS, SUITES, BenchError, Case, Claim, select
from tools.bench.measure import in_dtype, run
from tools.bench.ranking import split, standings
from tools.bench.report import comparison, markdown, merged, plain, refresh, show, tables

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
