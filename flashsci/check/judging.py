"""The judgement of one case or one trap on the backends: results against the fp64 oracle, and against each other."""

from __future__ import annotations

import itertools
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from flashsci.check.tally import SCALED, Tally
from flashsci.errors import BackendError
from flashsci.testing import (
    TRAPS,
    Case,
    FP8Case,
    Inputs,
    Judge,
    MapCase,
    MapInputs,
    MapJudge,
    PagedCase,
    Skipped,
    evaluate,
    make_fp8_inputs,
    make_inputs,
    make_paged_inputs,
    poisoned_memory,
)
from flashsci.testing.bounds import PLAIN
from flashsci.testing.coverage import Coverage
from flashsci.testing.evaluation import check_alone
from flashsci.testing.fp8 import FP8Inputs, FP8Judge
from flashsci.testing.inputs import moved_to
from flashsci.testing.paged import PagedInputs, PagedJudge

# Scores of a case up to which one core judges it as fast as a GPU that many processes wait for.
ON_HOST = 1 << 19
T = TypeVar("T")


def judge_case(
    case: Case,
    backends: Sequence[str],
    device: str,
    order: int = 1,
    coverage: Coverage | None = None,
) -> dict[str, Tally]:
    """Judge one case on several backends, and each pair of them against each other.

    Keys are backend names and, for pairs, "a-b". ``order`` 0 leaves out the gradients. A backend restricted to a
    generation that refuses gradients is judged by its forward. ``coverage`` counts the judged cases.
    """
    tallies: dict[str, Tally] = defaultdict(Tally)
    where = "cpu" if case.scores <= ON_HOST else device
    inputs = make_inputs(case, device)
    forward = inputs.forward_alone()
    if order == 0:
        inputs = forward
    results: dict[str, dict[str, torch.Tensor]] = {}
    for name in backends:
        tally = tallies[name]
        for given in (inputs, forward):
            try:
                with poisoned_memory(cuda_bytes=0):
                    tensors = evaluate(given, name, name != "sdpa", deterministic=False)
                    if given.has_gradients and name not in PLAIN:
                        check_alone(given, name, tensors)
                # Wait for them, so that a fault of these kernels is not reported for the next.
                results[name] = moved_to(where, tensors)
                tally.forward_only += given is not inputs
                break
            except BackendError as error:
                tally.refuse(_reason(error))
                if ":" not in name or not given.has_gradients:
                    break
            except Exception:
                tally.fail(case, traceback.format_exc())
                break
    _judge(case, inputs, results, where, tallies, coverage)
    return dict(tallies)


def _judge(
    case: Case,
    inputs: Inputs,
    results: dict[str, dict[str, torch.Tensor]],
    where: str,
    tallies: dict[str, Tally],
    coverage: Coverage | None,
) -> None:
    """Results on the device ``where`` against the oracle, computed there, and against each other."""
    judges: dict[bool, Judge] = {}  # most of the time: not for calls that no backend serves
    for name in results:
        tally, fused = tallies[name], name not in PLAIN
        if fused not in judges:
            judges[fused] = Judge(inputs, fused, where)
        tally.cases += 1
        if coverage is not None:
            coverage.see(name, case)
        for found in judges[fused].findings(results[name]):
            x = results[name][found.tensor]
            tally.see(found.tensor, found.ratios, judges[fused].catches(found.tensor, x, SCALED))
            if found.problem:
                tally.fail(case, found.problem)
    for a, b in itertools.combinations(results, 2):
        tally = tallies[f"{a}-{b}"]
        tally.cases += 1
        judge = judges[a not in PLAIN and b not in PLAIN]
        for tensor in results[a].keys() & results[b].keys():
            found = judge.compare(tensor, results[a][tensor], results[b][tensor])
            tally.see(tensor, (found.ratios[0],))
            if found.problem:
                tally.fail(case, found.problem)


def _finished(results: T) -> T:
    """The results, after the device has computed them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return results


def judge_paged_case(case: PagedCase, backends: Sequence[str], device: str) -> dict[str, Tally]:
    """Judge one paged case on several backends: out, lse, and the bytes written into a cache, bit by bit."""
    inputs = make_paged_inputs(case, device)
    return _judge_apart(case, backends, inputs, lambda: inputs.judge(fused=True), inputs.written)


def judge_fp8_case(case: FP8Case, backends: Sequence[str], device: str) -> dict[str, Tally]:
    """Judge one case of 8-bit floats on several backends."""
    inputs = make_fp8_inputs(case, device)
    return _judge_apart(case, backends, inputs, inputs.judge)


def judge_map_case(case: MapCase, backends: Sequence[str], device: str) -> dict[str, Tally]:
    """Judge the reductions of one attention map on several backends."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    inputs = MapInputs(case, device)
    judge = None
    for name in backends:
        tally = tallies[name]
        try:
            with poisoned_memory(cuda_bytes=0):
                results = _finished(inputs.evaluate(name))
        except BackendError as error:
            tally.refuse(_reason(error))
            continue
        except Exception:
            tally.fail(case, traceback.format_exc())
            continue
        judge = judge or MapJudge(inputs)
        tally.cases += 1
        for found in judge.findings(results):
            x = results[found.tensor]
            caught = judge.catches(found.tensor, x, SCALED) if found.allowed else None
            tally.see(found.tensor, found.ratios, caught)
            if found.problem:
                tally.fail(case, found.problem)
    return dict(tallies)


def _judge_apart(
    case: PagedCase | FP8Case,
    backends: Sequence[str],
    inputs: PagedInputs | FP8Inputs,
    judge_of: Callable[[], PagedJudge | FP8Judge],
    written: Callable[[str], torch.Tensor] | None = None,
) -> dict[str, Tally]:
    """Judge a call with a judge of its own; ``written``: the bytes that a backend stores into a cache, which must be
    the reference's."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    judge = stored = None
    for name in backends:
        tally = tallies[name]
        try:
            with poisoned_memory(cuda_bytes=0):
                results = _finished(inputs.evaluate(name))
                try:
                    stored = _finished(written(name)) if written else None
                except BackendError as error:  # a device may read a format that it cannot store
                    tally.refuse(_reason(error))
                    stored = None
        except BackendError as error:
            tally.refuse(_reason(error))
            continue
        except Exception:
            tally.fail(case, traceback.format_exc())
            continue
        judge = judge or judge_of()
        tally.cases += 1
        for found in judge.findings(results):
            x = judge.part(results)[found.tensor]
            tally.see(found.tensor, found.ratios, judge.judge.catches(found.tensor, x, SCALED))
        for problem in judge.problems(results):
            tally.fail(case, problem)
        if written and stored is not None and not torch.equal(stored, written("reference")):
            tally.fail(case, "write_kv_cache stores other bytes than the reference")
    return dict(tallies)


def _reason(error: BackendError) -> str:
    """An error without the shapes of its call, which would make every refusal different."""
    return re.sub(r"\[[\d, ]*\]", "[..]", str(error)).split("; use ")[0]


def spring(name: str, backend: str, device: str) -> tuple[str, str, str]:
    """(trap, backend, outcome)."""
    try:
        TRAPS[name](backend, device)
        outcome = "passed"
    except Skipped as reason:
        outcome = f"skipped: {reason}"
    except BackendError as reason:
        outcome = f"refused: {reason}"
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else traceback.format_exc(limit=-3)
        outcome = f"failed: {text}"
    return name, backend, outcome
