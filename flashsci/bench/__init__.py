"""Benchmarks: the same cases for every backend and baseline, checked before they are timed.

    python -m flashsci bench --suite headline --json benchmarks/results/h200/headline.json

or, without the command line's extras:

    >>> from flashsci import bench
    >>> cases = bench.select(ids=["cpu-pair-bias"])
    >>> records = bench.run(cases, ["reference", "sdpa:math"], "cpu", seconds=0.01)
    >>> [record["gate"] for record in records if record["pass"] == "forward"]
    ['passed', 'passed']
"""

from flashsci.bench.ahead import compile_ahead
from flashsci.bench.candidates import BASELINES, OURS, names_of
from flashsci.bench.cases import CASES, CLAIMS, SUITES, BenchError, Case, Claim, select
from flashsci.bench.measure import in_dtype, run
from flashsci.bench.ranking import split, standings
from flashsci.bench.report import comparison, markdown, plain, refresh, show, tables

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
