"""Times of single passes from records of benchmarks, each with the family and the work by which it is predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashsci.call.problem import Problem
from flashsci.choice.predictions.devices import Device, find
from flashsci.choice.predictions.families import PREPARING, family_of
from flashsci.choice.predictions.seen import words
from flashsci.choice.predictions.work import Work, work_of
from tools.bench.drawn import report
from tools.choice import drawn
from tools.choice.regret import BACKENDS, CAPABILITIES, problem_of

PASSES = ("forward", "backward")
#: Drawn calls whose records time tiles of Triton that have given way to products of whole heads.
REPLACED = ("2/22", "6/42", "6/43")
#: A GPU that works for less than this share of a call's time waits for the host.
HOST_BOUND = 0.4
#: The names of a backend in records, the best first: `cuda` may have been another backend's gradients.
NAMES = {
    "cuda": ("cuda:own", "cuda"),
    "triton": ("triton",),
    "sdpa": ("sdpa", "sdpa:default"),
    "eager": ("eager",),
}


@dataclass(frozen=True)
class Sample:
    """One pass of one call by one family: its work, and the microseconds that a GPU took."""

    family: str
    work: Work
    time: float
    id: str
    groups: dict[str, str]  # by what is left out together: "D", "suite" or "case"
    words: dict[str, Any]  # the kind of call, see flashsci/choice/predictions/seen.py
    source: str


def sample_of(p: Problem, backend: str, backward: bool, time: float, device: Device, **about: Any) -> Sample | None:
    """The sample of a pass; None if no family serves it."""
    family = family_of(p, backend, backward)
    if family is None or (family.name.startswith("triton/wide") and about["id"] in REPLACED):
        return None
    work = work_of(p, backend, family, backward, device)
    groups = {"D": str(max(p.head_dim, p.head_dim_v)), "suite": about["suite"], "case": about["id"]}
    return Sample(family.text, work, time, about["id"], groups, words(p), about["source"])


def of_benchmarks(path: Path) -> list[Sample]:
    """The samples of a file of `bench --json`, at the GPU's own times."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    about: dict[str, dict] = {}
    for record in json.loads(path.read_text()):
        if record["suite"] != "latency" and record["pass"] in PASSES and record["time_us"]:
            about[record["case"]["id"]] = record
            found.setdefault((record["case"]["id"], record["pass"]), {})[record["backend"]] = record
    samples = []
    for (name, which), records in found.items():
        record = about[name]
        gpu, capability = record["env"]["gpu"], record["env"].get("capability")
        device = find(tuple(capability or CAPABILITIES[gpu]), gpu)
        if device is None:
            continue
        problem = problem_of(record["case"], tuple(capability or CAPABILITIES[gpu]), True)
        if not any(n == name and w == "backward" for n, w in found):
            problem = replace(problem, requires_grad=False)
        own = dict(id=name.partition("@")[0], suite=record["suite"], source=f"{path.name} ({record['commit']})")
        for backend in BACKENDS:
            timed = next((records[n] for n in NAMES[backend] if n in records), None)
            if timed is None or timed["gate"] != "passed" or timed["method"]["host_bound"]:
                continue
            time = timed["time_us"]["median"]
            sample = sample_of(problem, backend, which == "backward", time, device, **own)
            samples += [] if sample is None else [sample]
    return samples


def of_drawn(path: Path, forwards: Any) -> list[Sample]:
    """The samples of a file of `bench --suite drawn --json`: forwards, and what steps took beyond their forward.

    Args:
        forwards: the microseconds of a sample of a forward; None where they are not predicted.
    """
    samples: list[Sample] = []
    for record in report.read(path):
        call = drawn.measured(record)
        work = record["call"].get("work", "forward")
        device = find(tuple(record["env"]["capability"] or ()), record["env"]["gpu"] or "")  # type: ignore[arg-type]
        # The work of a call with a table depends on the tiles that its mask hides, which a Problem does not say. Of a call with
        # sinks torch's own kernels do a part, which takes most of the time of a small one.
        if call is None or device is None or work == "second" or call.problem.mask_tiles or call.problem.sink:
            continue
        own = dict(id=f"{call.call.seed}/{call.call.index}", suite=f"seed {call.call.seed}", source=path.name)
        for name, timed in record["candidates"].items():
            again = name == "auto" or (name == "cuda" and "cuda:own" in record["candidates"])
            if again or "by" not in timed or "gpu_us" not in timed:  # slow ones have no time of the GPU alone
                continue
            forward, gradients = timed["by"]
            of_forward, of_gradients = timed.get("kernels", (None, None))
            first = sample_of(call.problem, forward, False, timed["gpu_us"], device, **own)
            if first is not None and not _is_of(first, of_forward):
                first = None
            if work == "forward":
                samples += [] if first is None else [first]
                continue
            known = None if first is None or gradients is None else forwards(first)
            rest = math.nan if known is None else timed["gpu_us"] - known
            if rest > 0.4 * timed["gpu_us"]:  # else the rest says little
                second = sample_of(call.problem, gradients, True, rest, device, **own)
                samples += [second] if second is not None and _is_of(second, of_gradients) else []
    return samples


def _is_of(sample: Sample, kernels: str | None) -> bool:
    """Whether the kernels of the library that a record names are those that would serve its call today."""
    if kernels is None:
        return True
    return sample.family.startswith(next(name for name in kernels.split(" + ") if name != PREPARING))


def of_host(path: Path) -> Iterator[dict[tuple[str, str | None], float]]:
    """Of each call of a file of drawn calls the candidates that the host bounds: microseconds in a loop by the backends of a
    call and of its gradients."""
    for record in report.read(path):
        found = {}
        for name, timed in record["candidates"].items():
            if name == "auto" or "by" not in timed or "gpu_us" not in timed:
                continue
            if timed["gpu_us"] < HOST_BOUND * timed["loop_us"]:
                found[timed["by"][0], timed["by"][1]] = timed["loop_us"]
        if record["call"].get("work") != "second":
            yield found


def sources(samples: Iterable[Sample]) -> list[str]:
    """The files and commits of samples."""
    return sorted({sample.source for sample in samples})
