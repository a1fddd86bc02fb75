"""`python -m flashsci check`: is every kernel right on this GPU? Writes reports/gpu-check.json.

Generated problems (flashsci.testing.cases) are judged against the fp64 oracle by the criteria of
flashsci.testing.bounds, forward, lse and all gradients, on every backend; then come the known traps
and bitwise determinism. Worker processes share the work by kernel variant, so that each variant is
compiled once and many are compiled at a time. The report carries one digest per kernel unit: a CPU
test knows from it which kernels changed since. It also lists what the generator draws, but did not for some
dtype or head dims of a backend (`coverage`).

"cuda" picks kernels as users get them; "cuda:sm90" and the like are held to one generation, so that what another one
served in its place does not count. A part of the cases is drawn for the newest generation, and judged on CUDA kernels alone.
"""

from flashsci.check.command import main, reproduce
from flashsci.check.judging import judge_case
from flashsci.check.planning import plan_cases
from flashsci.check.suite import run
from flashsci.check.tally import Tally
from flashsci.check.units import kernels_here

__all__ = [
    "Tally",
    "judge_case",
    "kernels_here",
    "main",
    "plan_cases",
    "reproduce",
    "run",
]
