"""Constants of families with their evidence, and the times that they predict."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flashsci.call.problem import Problem
from flashsci.choice.predictions import devices
from flashsci.choice.predictions.families import family_of
from flashsci.choice.predictions.formula import microseconds
from flashsci.choice.predictions.seen import unseen, words
from flashsci.choice.predictions.work import Work, work_of

FOLDER = Path(__file__).parent
#: A family with fewer times has no evidence.
LEAST = 8
#: The spread of families of which no time was left out of a fit, and the least, that of the host's time.
USUAL_SPREAD, LEAST_SPREAD = 0.5, 0.15


class Time(NamedTuple):
    """A predicted time, and the standard deviation of its logarithm."""

    us: float
    spread: float


@dataclass(frozen=True)
class Constants:
    """The constants of a family, and the records behind them."""

    values: Work
    calls: int  # times that they were fitted to
    spread: float  # root mean square of log(predicted / measured) of calls that were left out of the fit
    seen: Mapping[str, list[Any]] = field(default_factory=dict)  # kinds of calls, see seen.py

    def lacks(self, p: Problem) -> str | None:
        """Why they say nothing of a call, or None."""
        if self.calls < LEAST:
            return f"only {self.calls} times of it are recorded"
        missing = unseen(self.seen, words(p))
        return f"no record has such {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Model:
    """The families of one GPU, and the host's time of calls."""

    capability: tuple[int, int]
    families: Mapping[str, Constants]
    #: us by backend: of a forward, of a step with its own gradients, of one with those of another
    host: Mapping[str, tuple[float, float, float]]
    about: str = ""

    def gpu_time(self, p: Problem, backend: str, backward: bool, device: devices.Device) -> Time | None:
        """The time of a pass on a GPU; None without evidence."""
        family = family_of(p, backend, backward)
        constants = None if family is None else self.families.get(family.text)
        if family is None or constants is None or constants.lacks(p) is not None:
            return None
        spread = USUAL_SPREAD if math.isnan(constants.spread) else constants.spread
        return Time(microseconds(work_of(p, backend, family, backward, device), constants.values), spread)

    def time(self, p: Problem, forward: str, gradients: str | None, device: devices.Device) -> Time | None:
        """The time of a call, and of its gradients if they have a backend: the longer of GPU and host."""
        passes = [self.gpu_time(p, forward, False, device)]
        if gradients is not None:
            passes.append(self.gpu_time(p, gradients, True, device))
        known = [time for time in passes if time is not None]
        if len(known) < len(passes) or forward not in self.host:
            return None
        kind = 0 if gradients is None else 1 if gradients == forward else 2
        on_gpu, on_host = sum(time.us for time in known), self.host[forward][kind]
        spread = math.hypot(*(time.us * time.spread for time in known)) / on_gpu
        return Time(on_gpu, spread) if on_gpu > on_host else Time(on_host, LEAST_SPREAD)


def read(path: Path) -> Model:
    """A model from its file.

    Raises:
        ValueError: the file is no such model; the message names the fault.
    """
    try:
        data = json.loads(path.read_text())
        families = {
            name: Constants(Work(**one["constants"]), one["calls"], one["spread"], one["seen"])
            for name, one in data["families"].items()
        }
        host = {name: (float(first), float(own), float(mixed)) for name, (first, own, mixed) in data["host"].items()}
        major, minor = data["capability"]
        model = Model((major, minor), families, host, data["about"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no model of times ({type(error).__name__}: {error}); tools/choice/fit.py writes one from records"
        ) from error
    for name, one in families.items():
        if min(one.values) <= 0:
            raise ValueError(f"{path}: the constants of {name!r} must be positive, got {tuple(one.values)}")
    return model


@functools.lru_cache(maxsize=16)
def of(capability: tuple[int, int] | None) -> Model | None:
    """The model of a GPU of this compute capability, or None: times of one generation say little of another."""
    path = None if capability is None else FOLDER / f"sm{capability[0]}{capability[1]}.json"
    return read(path) if path is not None and path.exists() else None
