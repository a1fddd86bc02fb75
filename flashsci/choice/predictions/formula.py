"""The time of a pass: the work of a call, each part times a constant of its family."""

from __future__ import annotations

from collections.abc import Sequence

from flashsci.choice.predictions.work import Work

#: Work of processors and traffic of memory overlap: their sum has this norm.
OVERLAP = 4
#: Constants of a family about which records say nothing, in the order of Work.
USUAL = Work(
    launch=4.0,
    programs=0.3,
    products=1.6,
    deep=0.3,
    wide=0.3,
    unaligned=1.0,
    scores=8.0,
    biased=4.0,
    masked=4.0,
    modified=2.0,
    summed=4.0,
    memory=1.3,
)


def microseconds(work: Sequence[float], constants: Sequence[float]) -> float:
    """Launches, and then the processors' part and the memory's part, which overlap."""
    launch, *processors, memory = [x * c for x, c in zip(work, constants, strict=True)]
    return launch + float((sum(processors) ** OVERLAP + memory**OVERLAP) ** (1 / OVERLAP))
