"""The results of a run's cases for each backend, as counts and worst ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flashsci.testing import TENSORS, Case, FP8Case, PagedCase

SCALED = 1.01  # outputs times this must fail: the test of the test
CRITERIA = ("error", "gain", "spread")


@dataclass
class Tally:
    """The results of some cases for one backend."""

    cases: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    worst: dict[str, list[float]] = field(default_factory=dict)  # tensor -> ratios by CRITERIA
    caught: dict[str, list[int]] = field(default_factory=dict)  # tensor -> [failed when scaled, judged]
    forward_only: int = 0  # cases whose gradients the backend refuses

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def see(self, tensor: str, ratios: Sequence[float], caught: bool | None = None) -> None:
        before = self.worst.get(tensor, [0.0] * len(ratios))
        self.worst[tensor] = [max(a, b) for a, b in zip(before, ratios, strict=True)]
        if caught is not None:
            counts = self.caught.setdefault(tensor, [0, 0])
            counts[0] += caught
            counts[1] += 1

    def fail(self, case: Case | PagedCase | FP8Case, message: str) -> None:
        self.failures.append({"problem": message, "case": repr(case)})

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.forward_only += other.forward_only
        self.failures += other.failures
        for reason, count in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + count
        for tensor, ratios in other.worst.items():
            self.see(tensor, ratios)
        for tensor, counts in other.caught.items():
            mine = self.caught.setdefault(tensor, [0, 0])
            mine[:] = [a + b for a, b in zip(mine, counts, strict=True)]

    def summary(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "of these forward only": self.forward_only,
            "failures": self.failures,
            "refused": self.refused,
            "worst ratio of error to allowance": {
                t: dict(zip(CRITERIA, (_digits(r) for r in self.worst[t]), strict=False))
                for t in TENSORS
                if t in self.worst
            },
            f"a result times {SCALED} would fail": {
                t: {"caught": c, "judged": n, "share": _digits(c / n)}
                for t, (c, n) in sorted(self.caught.items(), key=lambda kv: TENSORS.index(kv[0]))
            },
        }


def _digits(x: float) -> float:
    return round(x, 4) if math.isfinite(x) else x
