"""Benchmarks: the same cases for every backend and baseline, checked before they are timed.

    python -m flashsci bench --suite headline --json benchmarks/results/h200/headline.json

or, without the command line's extras:

    >>> from flashsci import bench
    >>> cases = bench.select(ids=["cpu-pair-bias"])
    >>> records = bench.run(cases, ["reference", "sdpa:math"], "cpu", seconds=0.01)
    >>> [record["gate"] for record in records if record["pass"] == "forward"]
    ['passed', 'passed']
"""

from flashsci.bench.candidates import BASELINES, OURS
from flashsci.bench.cases import CASES, CLAIMS, SUITES, Case, Claim, select
from flashsci.bench.measure import candidate_names, in_dtype, run
from flashsci.bench.report import claims, geomeans, markdown, plain, show

__all__ = [
    "BASELINES",
    "CASES",
    "CLAIMS",
    "OURS",
    "SUITES",
    "Case",
    "Claim",
    "candidate_names",
    "claims",
    "geomeans",
    "in_dtype",
    "markdown",
    "plain",
    "run",
    "select",
    "show",
]
