"""The order in which ``auto`` tries backends by predicted times: work of a call times constants fitted to records.

A family of kernels has a handful of constants (sm90.json, written by tools/choice/fit.py), a GPU its maker's figures
(devices.json). Predictions decide where every candidate has one with evidence and the best leads the choice of the
rules by more than MARGIN. They are off unless FLASHSCI_PREDICTIONS=1, and off where FLASHSCI_PREFERENCES names rules.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flashsci.call.problem import Problem
from flashsci.choice.predictions import devices, model
from flashsci.choice.preferences import PREDICTED, Rule

SWITCH = "FLASHSCI_PREDICTIONS"
#: Within this factor of the best predicted time the choice of the rules stays: about half the spread of a prediction.
#: On cases left out of the fit, 1.05 lost a little more than it gained (tools/choice/predicted.py).
MARGIN = 1.15
#: The backends of a call, and of its gradients if these are wanted.
Pair = tuple[str, str | None]


@functools.cache
def enabled() -> bool:
    """Whether predictions may decide in this process."""
    return os.environ.get(SWITCH, "0") not in ("", "0") and not os.environ.get("FLASHSCI_PREFERENCES")


def times(problem: Problem, pairs: Iterable[Pair], by: model.Model | None = None) -> dict[Pair, float] | None:
    """Microseconds of each of these choices; None if one of them has no prediction with evidence.

    Args:
        by: the model that predicts; None: that of the compute capability.
    """
    capability = problem.capability
    by = model.of(capability) if by is None else by
    device = None if capability is None else devices.here(capability)
    if by is None or device is None or by.capability != capability:
        return None
    found = {}
    for forward, gradients in pairs:
        time = by.time(problem, forward, gradients, device)
        if time is None:
            return None
        found[forward, gradients] = time
    return found


def leader(usual: str, found: Mapping[str, float], margin: float = MARGIN) -> str:
    """The backend of the least time; ``usual`` if it is within ``margin`` of that."""
    fastest = min(found, key=found.__getitem__)
    return usual if found.get(usual, float("inf")) <= margin * found[fastest] else fastest


def reordered(rule: Rule, usual: str | None, found: Mapping[str, float] | None) -> Rule:
    """The rule if it leads to the right backend, or one that orders by predicted times.

    Args:
        usual: the backend to which the rule leads.
        found: predicted microseconds by backend; None: not all are known.
    """
    if not found or usual is None or leader(usual, found) == usual:
        return rule
    order = tuple(sorted(found, key=found.__getitem__))
    evidence = "predicted times: " + ", ".join(f"{name} {found[name]:.3g} us" for name in order)
    rest = tuple(name for name in rule.order if name not in found)
    return replace(rule, when={}, order=(*order, *rest), evidence=evidence, table=PREDICTED)


def of_backends(problem: Problem, served: Sequence[Pair]) -> dict[str, float] | None:
    """Predicted microseconds by backend of a call that these serve, or None."""
    found = times(problem, served)
    return None if found is None else {pair[0]: time for pair, time in found.items()}


def of_gradients(problem: Problem, forward: str, names: Sequence[str]) -> dict[str, float] | None:
    """Predicted microseconds of a call and its gradients, by the backend of the gradients, or None."""
    found = times(problem, [(forward, name) for name in names])
    return None if found is None else {str(pair[1]): time for pair, time in found.items()}
