"""The constants of predicted times from records, judged on records that took no part in the fit.

    python -m tools.choice.fit                      fit the committed records, and judge by groups that are left out
    python -m tools.choice.fit drawn-*.jsonl        those with drawn calls too; --seeds 1,2: drawn calls of these alone
    python -m tools.choice.fit ... --write          write flashsci/choice/predictions/sm90.json

A spread is the root mean square of log(predicted / measured). Each family of kernels is fitted by least squares on the
logarithms of times. Its constants are drawn towards those of all families of its pass and dtype, and these towards
USUAL, so that a part of the work that few records have keeps a sensible constant.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from flashsci.choice.predictions import model as predictions
from flashsci.choice.predictions.formula import OVERLAP, USUAL, microseconds
from flashsci.choice.predictions.model import Constants, Model
from flashsci.choice.predictions.seen import collected
from flashsci.choice.predictions.work import Work
from tools.choice.samples import Sample, of_benchmarks, of_drawn, of_host, sources

ROOT = Path(__file__).resolve().parents[2]
RECORDS = [
    ROOT / "reports" / "bench" / "h200" / f"{name}.json"
    for name in ("auto", "calls", "dense", "dense-fp16", "headline", "decode", "triangle", "fit/wide-long")
]
#: Drawn calls of which constants are learnt. `drawn-early` was drawn by other weights; no other seed takes part.
DRAWN = [
    ROOT / "reports" / "bench" / "h200" / f"drawn-{name}.jsonl"
    for name in ("early", "1", "2", "3", "4", "5", "6", "7", "8")
]
FITTED = [*RECORDS, *DRAWN]
#: Weights of the squared log distance of a constant from the one that it is drawn towards.
OF_FAMILY, OF_ALL = 0.05, 0.02
#: us of the host on an H200, of a forward, of a step, and of one with the gradients of another backend, where few drawn calls
#: say it.
HOST = {
    "cuda": (15.0, 196.0, 231.0),
    "triton": (21.0, 237.0, 237.0),
    "sdpa": (30.0, 304.0, 304.0),
    "eager": (60.0, 400.0, 400.0),
}
#: Backends whose calls take the host less time than when most of the drawn calls were recorded.
FASTER = ("sdpa",)
LEAST_HOST = 5  # drawn calls
FOLDS = 5  # of cases
GROUPS = ("case", "D", "suite")


def predicted(work: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """Logs of microseconds [.., calls] of work [calls, parts] with logs of constants [.., parts]."""
    parts = work * logs.exp()[..., None, :]
    body = parts[..., 1:-1].sum(-1) ** OVERLAP + parts[..., -1] ** OVERLAP
    return (parts[..., 0] + body ** (1 / OVERLAP)).log()


def fitted(samples: Sequence[Sample], prior: Sequence[float], weight: float, steps: int = 40) -> Work:
    """The constants of least squares, by Levenberg's and Marquardt's steps."""
    work = torch.tensor([s.work for s in samples], dtype=torch.float64)
    times = torch.tensor([s.time for s in samples], dtype=torch.float64).log()
    start = torch.tensor(prior, dtype=torch.float64).log()
    each = torch.eye(len(prior), dtype=torch.float64)
    pull, delta, damping = math.sqrt(weight), 1e-4, 1e-2

    def residuals(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([predicted(work, x) - times, pull * (x - start)], -1)

    x, r = start, residuals(start)
    for _ in range(steps):
        slope = (residuals(x + delta * each) - r) / delta  # [parts, residuals]
        step = torch.linalg.solve(slope @ slope.T + damping * each, -(slope @ r)).clamp(-1, 1)
        tried = residuals(x + step)
        if tried @ tried < r @ r:
            x, r, damping = x + step, tried, max(damping / 3, 1e-6)
        else:
            damping *= 4
    return Work(*x.exp().tolist())


def by_family(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.family, []).append(sample)
    return dict(sorted(found.items()))


def _kin(family: str) -> str:
    """Pass and bits: "forward, 16 bits"."""
    return family.partition(" ")[2]


def priors(samples: Sequence[Sample]) -> dict[str, Work]:
    """For each pass and dtype, the constants of all families together."""
    kin: dict[str, list[Sample]] = {}
    for sample in samples:
        kin.setdefault(_kin(sample.family), []).append(sample)
    return {name: fitted(own, USUAL, OF_ALL) for name, own in kin.items()}


def fit(
    samples: Sequence[Sample],
    spreads: Mapping[str, float] | None = None,
    host: Mapping[str, tuple[float, float, float]] = HOST,
) -> Model:
    """A model of these samples."""
    towards = priors(samples)
    families = {}
    for name, own in by_family(samples).items():
        values = fitted(own, towards[_kin(name)], OF_FAMILY)
        rounded = Work(*(float(f"{x:.3g}") for x in values))
        families[name] = Constants(
            rounded, len(own), (spreads or {}).get(name, math.nan), collected([s.words for s in own])
        )
    return Model((9, 0), families, host)


def group_of(sample_groups: Mapping[str, str], key: str) -> str:
    """The group with which a call is left out; of cases, a fifth of them."""
    group = sample_groups[key]
    return str(zlib.crc32(group.encode()) % FOLDS) if key == "case" else group


def without(samples: Sequence[Sample], key: str) -> dict[str, Model]:
    """For each group, the model of all samples that are not in it."""
    groups = sorted({group_of(s.groups, key) for s in samples})
    rest = {g: [s for s in samples if group_of(s.groups, key) != g] for g in groups}
    return {g: fit(own) for g, own in rest.items() if own}


def _log_error(sample: Sample, model: Model) -> float | None:
    constants = model.families.get(sample.family)
    if constants is None:
        return None
    return math.log(microseconds(sample.work, constants.values) / sample.time)


def errors(samples: Sequence[Sample], models: Mapping[str, Model], key: str) -> dict[str, list[tuple[float, Sample]]]:
    """By family: log(predicted / measured) by the models that did not see the sample."""
    found: dict[str, list[tuple[float, Sample]]] = {}
    for sample in samples:
        model = models.get(group_of(sample.groups, key))
        error = None if model is None else _log_error(sample, model)
        if error is not None:
            found.setdefault(sample.family, []).append((error, sample))
    return found


def rms(values: Iterable[float]) -> float:
    """The root mean square; NaN of nothing."""
    squares = [x * x for x in values]
    return math.sqrt(statistics.fmean(squares)) if squares else math.nan


def text(samples: Sequence[Sample], judged: Mapping[str, dict[str, list[tuple[float, Sample]]]], model: Model) -> str:
    """A table: calls, spread in the fit and with groups left out, the worst call that was left out with its fold."""
    lines = [f"{'':<40}{'times':>6}{'fit':>7}" + "".join(f"{key:>7}" for key in judged) + "  worst"]
    for name, own in by_family(samples).items():
        inside = rms(e for s in own if (e := _log_error(s, model)) is not None)
        out = [rms(e for e, _ in judged[key].get(name, ())) for key in judged]
        first = judged[next(iter(judged))].get(name) or [(0.0, own[0])]
        error, sample = max(first, key=lambda item: abs(item[0]))
        spreads = "".join(f"{x:>7.3f}" for x in (inside, *out))
        lines.append(f"{name:<40}{len(own):>6}{spreads}  {math.exp(error):.2f} {sample.id}")
    return "\n".join(lines)


def written(model: Model, about: str) -> str:
    """A model as its file: a family in three lines."""
    lines = ["{", f' "about": {json.dumps(about)},', f' "capability": {json.dumps(model.capability)},']
    lines += [f' "host": {json.dumps(model.host)},', ' "families": {']
    families = []
    for name, one in model.families.items():
        families.append(
            f'  {json.dumps(name)}: {{"calls": {one.calls}, "spread": {json.dumps(one.spread)},\n'
            f'   "constants": {json.dumps(one.values._asdict())},\n   "seen": {json.dumps(one.seen)}}}'
        )
    return "\n".join([*lines, ",\n".join(families), " }", "}"]) + "\n"


def samples_of(paths: Iterable[Path], seeds: set[int] | None = None) -> list[Sample]:
    """The samples of files of records: drawn ones (.jsonl) by the forwards that the others predict."""
    paths = list(paths)
    found = [s for path in paths if path.suffix == ".json" for s in of_benchmarks(path)]
    drawn = [path for path in paths if path.suffix == ".jsonl"]
    if drawn:
        first = fit(found) if found else None

        def forward(sample: Sample) -> float | None:
            error = None if first is None else _log_error(sample, first)
            return None if error is None else sample.time * math.exp(error)

        own = [s for path in drawn for s in of_drawn(path, forward)]
        found += [s for s in own if seeds is None or int(s.groups["suite"].split()[1]) in seeds]
    return found


def hosts(paths: Iterable[Path]) -> dict[str, tuple[float, float, float]]:
    """Microseconds of the host by backend. Those of cuda are medians of the drawn calls that the host bounds; others follow from
    them by the ratio within a call, because hosts differ, or by that in HOST."""
    calls = [call for path in paths if path.suffix == ".jsonl" for call in of_host(path)]

    def pair(backend: str, kind: int) -> tuple[str, str | None]:
        return backend, (None, backend, "cuda" if backend == "triton" else "triton")[kind]

    def time(backend: str, kind: int) -> float:
        base = "cuda", None if kind == 0 else "cuda"
        of_base = [call[base] for call in calls if base in call]
        known = statistics.median(of_base) if len(of_base) >= LEAST_HOST else HOST["cuda"][min(kind, 1)]
        ratio = HOST[backend][kind] / HOST["cuda"][min(kind, 1)]
        both = [call[pair(backend, kind)] / call[base] for call in calls if {base, pair(backend, kind)} <= set(call)]
        if len(both) >= LEAST_HOST and backend not in FASTER:
            ratio = statistics.geometric_mean(both)
        return float(f"{known * ratio:.3g}")

    return {backend: (time(backend, 0), time(backend, 1), time(backend, 2)) for backend in HOST}


def judge(samples: Sequence[Sample]) -> dict[str, dict[str, list[tuple[float, Sample]]]]:
    """The errors with groups left out, by what a group is."""
    return {key: errors(samples, without(samples, key), key) for key in GROUPS}


def main(arguments: list[str]) -> int:
    """Print spreads, and write the model if asked; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path, help="besides the committed ones")
    parser.add_argument("--seeds", default="", help="comma-separated: drawn calls of these seeds alone")
    parser.add_argument("--write", action="store_true", help="write flashsci/choice/predictions/sm90.json")
    given = parser.parse_args(arguments)
    seeds = {int(seed) for seed in given.seeds.split(",")} if given.seeds else None
    paths = [*FITTED, *given.records]
    samples = samples_of(paths, seeds)
    judged = judge(samples)
    spreads = {name: round(rms(e for e, _ in own), 3) for name, own in judged["case"].items()}
    model = fit(samples, spreads, hosts(paths))
    print(text(samples, judged, model))
    if given.write:
        about = f"Fitted by tools/choice/fit.py to {len(samples)} times of NVIDIA H200: {'; '.join(sources(samples))}."
        path = predictions.FOLDER / "sm90.json"
        path.write_text(written(model, about))
        print(path.relative_to(ROOT), "written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
