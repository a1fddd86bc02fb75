"""The order in which ``auto`` tries backends by predicted times: work of a call times constants fitted to records.

A family of kernels has a handful of constants (sm90.json, written by tools/choice/fit.py), a GPU its maker's figures
(devices.json). Predictions decide where a rule was written by hand, its choice has one with evidence, and another candidate's leads it
by more than their spreads explain. They are off with FLASHSCI_PREDICTIONS=0, and where FLASHSCI_PREFERENCES names rules.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from flashsci.call.problem import Problem
from flashsci.choice.predictions import devices, model
from flashsci.choice.predictions.model import Time
from flashsci.choice.preferences import PREDICTED, Rule

SWITCH = "FLASHSCI_PREDICTIONS"
#: The choice of the rules stays within MARGIN of the best predicted time, and within CERTAINTY of the spread of their ratio.
#: On drawn calls left out of the fit 0 and 0.5 are as good, and 1 and more leave gains; rules that were learnt from records of
#: their own lose the less the more it is.
MARGIN, CERTAINTY = 1.05, 0.5
#: The backends of a call, and of its gradients if these are wanted.
Pair = tuple[str, str | None]
Choice = TypeVar("Choice", str, Pair)


@functools.cache
def enabled() -> bool:
    """Whether predictions may decide in this process."""
    return os.environ.get(SWITCH, "1") not in ("", "0") and not os.environ.get("FLASHSCI_PREFERENCES")


def has_model(problem: Problem) -> bool:
    """Whether there are constants for the GPU of a call."""
    return model.of(problem.capability) is not None


def times(problem: Problem, pairs: Iterable[Pair], by: model.Model | None = None) -> dict[Pair, Time]:
    """The times of these choices, those that have a prediction with evidence.

    Args:
        by: the model that predicts; None: that of the compute capability.
    """
    capability = problem.capability
    by = model.of(capability) if by is None else by
    device = None if capability is None else devices.here(capability)
    if by is None or device is None or by.capability != capability:
        return {}
    found = ((pair, by.time(problem, *pair, device)) for pair in pairs)
    return {pair: time for pair, time in found if time is not None}


def leader(usual: Choice, found: Mapping[Choice, Time], certainty: float = CERTAINTY) -> Choice:
    """The choice of the least time among those that certainly take less than ``usual``; ``usual`` if there is none, or if it
    has no time."""
    if usual not in found:
        return usual
    own = found[usual]

    def leads(other: Time) -> bool:
        return own.us > other.us * max(MARGIN, math.exp(certainty * math.hypot(own.spread, other.spread)))

    return min((name for name, time in found.items() if leads(time)), key=lambda name: found[name].us, default=usual)


def reordered(rule: Rule, usual: str | None, found: Mapping[str, Time]) -> Rule:
    """The rule if it leads to the right backend, or one that orders by predicted times.

    Args:
        usual: the backend to which the rule leads.
        found: predicted times by backend.
    """
    first = None if usual is None else leader(usual, found)
    if first is None or first == usual:
        return rule
    order = tuple(sorted(found, key=lambda name: (name != first, found[name].us)))
    evidence = "predicted times: " + ", ".join(f"{name} {found[name].us:.3g} us" for name in order)
    rest = tuple(name for name in rule.order if name not in found)
    return replace(rule, when={}, order=(*order, *rest), evidence=evidence, table=PREDICTED)


def of_backends(problem: Problem, served: Sequence[Pair]) -> dict[str, Time]:
    """Predicted times by backend of a call that these serve."""
    return {pair[0]: time for pair, time in times(problem, served).items()}


def of_gradients(problem: Problem, forward: str, names: Sequence[str]) -> dict[str, Time]:
    """Predicted times of a call and its gradients, by the backend of the gradients."""
    found = times(problem, [(forward, name) for name in names])
    return {str(pair[1]): time for pair, time in found.items()}
