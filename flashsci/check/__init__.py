"""Is every kernel right on this GPU? The suite of generated problems and traps: see :mod:`flashsci.check.command`."""

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
