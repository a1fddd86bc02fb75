"""The conclusions from records: wins and losses with their ratios, the state of the claims, and changes.

A record is a dict as `tools.bench.run` documents it. Only candidates that passed their check have a time.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tools.bench import cases
from tools.bench.candidates import BASE, BASELINES, OURS
from tools.bench.cases import CLAIMS, Claim

Record = dict

SDPA_KERNELS = [n for n in BASELINES if n.startswith("sdpa:") and n != "sdpa:default"]

#: Ratios this near to 1, as shown, are a draw: another run may reverse them.
DRAW = 0.0201


def geomean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)


def series(record: Record) -> str:
    return cases.series(record["case"]["id"])


def length(record: Record) -> int | None:
    """Keys of each query; None for packed sequences."""
    return record["case"].get("Sk")


def own(records: Iterable[Record]) -> tuple[str, ...]:
    """The backends that count as ours: our kernels or, if none ran, any backend that did."""
    ran = {r["backend"] for r in records if r["time_us"]}
    kernels = [n for n in OURS if n in ran and n not in ("reference", "sdpa", "eager")]
    return tuple(kernels or [n for n in OURS if n in ran])


def _timed(records: Iterable[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """{(case, pass): {backend: record}} of records with a time."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for r in records:
        if r["time_us"]:
            found.setdefault((r["case"]["id"], r["pass"]), {})[r["backend"]] = r
    return found


def median(record: Record) -> float:
    return record["time_us"]["median"]


@dataclass(frozen=True)
class Standing:
    """One case and pass: our best against the best of everyone else."""

    ours: Record | None  # None: none of ours computes it
    peer: Record | None

    @property
    def about(self) -> Record:
        """Any record of the case and pass."""
        return self.ours or self.peer or {}

    @property
    def ratio(self) -> float | None:
        return median(self.peer) / median(self.ours) if self.ours and self.peer else None

    @property
    def result(self) -> str:
        """One of "wins", "draws" and "loses"; a side without a rival wins."""
        if self.ratio is None:
            return "wins" if self.ours else "loses"
        if abs(round(self.ratio, 2) - 1) <= DRAW:
            return "draws"
        return "wins" if self.ratio > 1 else "loses"


def standings(records: list[Record]) -> list[Standing]:
    """One for each case and pass; none if only one side has records at all."""
    names = own(records) if any(r["backend"] in BASELINES for r in records) else ()
    found = []
    for (_, kind), by in _timed(records).items():
        ours = [r for n, r in by.items() if n in names]
        peers = [r for n, r in by.items() if n in BASELINES]
        if kind in ("forward", "backward") and any(n in by for n in SDPA_KERNELS):
            # torch's own choice is one of its kernels; the host's time includes the choice.
            peers = [r for r in peers if r["backend"] != "sdpa:default"]
        if names and (ours or peers):
            best = (min(side, key=median, default=None) for side in (ours, peers))
            found.append(Standing(*best))
    return found


@dataclass(frozen=True)
class Group:
    """The standings of one series and pass, as one line."""

    name: str
    kind: str
    lengths: tuple[int, ...]
    members: tuple[Standing, ...]

    @property
    def ratio(self) -> float | None:
        ratios = [s.ratio for s in self.members if s.ratio]
        return geomean(ratios) if ratios else None

    def backend(self, side: str) -> str:
        """The most frequent candidate on a side, "ours" or "peer"; "+" if there are others."""
        names = Counter(r["backend"] for s in self.members if (r := getattr(s, side)))
        return "" if not names else names.most_common(1)[0][0] + ("+" if len(names) > 1 else "")

    def mean(self, side: str, what: str) -> float | None:
        """Geometric mean of a field of the records on a side."""
        values = [r[what] for s in self.members if (r := getattr(s, side)) and r[what]]
        return geomean(values) if values else None


def groups(records: list[Record]) -> list[Group]:
    found: dict[tuple[str, str], list[Standing]] = {}
    for standing in standings(records):
        found.setdefault((series(standing.about), standing.about["pass"]), []).append(standing)
    return [
        Group(
            name,
            kind,
            tuple(sorted({s for m in members if (s := length(m.about))})),
            tuple(members),
        )
        for (name, kind), members in found.items()
    ]


def geomeans(records: list[Record]) -> list[tuple[str, int, str, str, str, float, int]]:
    """(suite, D, pass, ours, peer, ratio of speeds, number of cases) for each pair that ran the
    same cases."""
    names = own(records)
    pairs: dict[tuple[str, int, str, str, str], list[float]] = {}
    for (_, kind), by in _timed(records).items():
        for ours, mine in by.items():
            for peer, theirs in by.items():
                if ours in names and peer in BASELINES:
                    key = (mine["suite"], mine["case"]["D"], kind, ours, peer)
                    pairs.setdefault(key, []).append(median(theirs) / median(mine))
    return [(*key, geomean(ratios), len(ratios)) for key, ratios in sorted(pairs.items())]


@dataclass(frozen=True)
class Holding:
    """The evidence of records for a claim: a ratio of speeds (or microseconds), and the number of cases."""

    claim: Claim
    value: float | None
    missing: int

    @property
    def met(self) -> bool:
        if self.value is None or self.missing:
            return False
        below = self.claim.baseline is None
        return self.value <= self.claim.target if below else self.value >= self.claim.target


def claims(records: list[Record]) -> list[Holding]:
    """Every claim whose cases are all among these records, with the candidates that it is about."""
    asked = {(r["case"]["id"], r["pass"], r["backend"]) for r in records}
    timed = _timed(records)
    found = []
    for claim in CLAIMS:
        keys = [(id, claim.kind) for id in claim.cases]
        others = (claim.baseline or claim.ours).split(",")
        if not all((*k, claim.ours) in asked and any((*k, n) in asked for n in others) for k in keys):
            continue
        values = [v for key in keys if (v := _value(claim, timed.get(key, {})))]
        value = None
        if values:
            value = min(values) if claim.each else geomean(values)
        found.append(Holding(claim, value, len(keys) - len(values)))
    return found


def _value(claim: Claim, by: dict[str, Record]) -> float | None:
    ours = by.get(claim.ours)
    if ours is None:
        return None
    if claim.baseline is None:
        return ours["time_us"]["min"]
    peers = [median(by[n]) for n in claim.baseline.split(",") if n in by]
    return min(peers) / median(ours) if peers else None


@dataclass(frozen=True)
class Change:
    """One backend on one case and pass, in an older and a newer measurement."""

    old: Record
    new: Record

    @property
    def ratio(self) -> float:
        return median(self.old) / median(self.new)

    @property
    def result(self) -> str:
        """ "no difference" where the middle 60% of the samples overlap."""
        old, new = self.old["time_us"], self.new["time_us"]
        if old["p20"] <= new["p80"] and new["p20"] <= old["p80"]:
            return "no difference"
        return "faster" if self.ratio > 1 else "slower"


def changes(old: list[Record], new: list[Record]) -> list[Change]:
    before, after = _timed(old), _timed(new)
    return [
        Change(before[key][name], record)
        for key, by in after.items()
        for name, record in by.items()
        if name in before.get(key, {})
    ]


def split(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """(records of the other revision under their plain names, all others) of an A/B run."""
    base = [{**r, "backend": r["backend"].removesuffix(BASE)} for r in records if r["backend"].endswith(BASE)]
    return base, [r for r in records if not r["backend"].endswith(BASE)]


def drift(found: list[Change]) -> float | None:
    """The device's own speed in the newer run over that in the older one, from the ceilings timed alongside."""
    ratios = [
        c.new["ceiling"][what] / c.old["ceiling"][what]
        for c in found
        if c.old.get("ceiling") and c.new.get("ceiling")
        for what in ("tflops", "gbps")
    ]
    return geomean(ratios) if ratios else None
