"""Measurements of whole models: errors against the client in float64, time of the step, peak memory, and the
backends that served each call.

In float64 most clients do not fit into memory at the timed size: for "real" ones errors are measured at a
medium size, and at the timed size the two ways are compared with each other.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from tools.bench.cases import BenchError
from tools.bench.inputs import DTYPES
from tools.bench.measure import commit_of_tree, environment, fatal, first_line, microseconds
from tools.bench.timer import Times, host_time, interleave
from tools.models import MODELS, Unavailable, load
from tools.models.served import listening
from tools.models.step import Results, Step, Way, double_stays

SIZES = {"tiny": "tiny", "real": "check"}  # timed size: size at which errors are measured
WAYS = ("client", "flashsci")
# A step that takes this many times the GPU's own time waits for the host, whose time varies by a tenth from
# round to round: it is measured for LONGER times as long.
HOST_BOUND, LONGER = 1.05, 6
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def run(
    names: Iterable[str] = (),
    *,
    size: str | None = None,
    dtype: str | None = None,
    device: torch.device | str | None = None,
    seconds: float = 1.0,
    minutes: float = math.inf,
    compiled: bool = False,
    on_step: Callable[[str], object] = lambda text: None,
    on_model: Callable[[list[dict]], object] = lambda records: None,
) -> list[dict]:
    """Two records per step and dtype, of the client as it is and of the client on flashsci.

    Args:
        names: of `MODELS`; empty: all.
        size: "tiny" or "real"; default "real" on a GPU.
        dtype: "bf16" or "fp32", for the models that run in it; default all in which a model runs.
        device: default the GPU if there is one.
        seconds: measuring time per step and clock, about; more where a step waits for the host.
        minutes: no model begins after these, and none goes on to another dtype.
        compiled: time both ways by `torch.compile`, too, which takes a minute for each.
        on_step, on_model: called with each step, and after each model with the records so far.

    Returns:
        Records as of `tools.bench.run`, suite "models" and pass "step": `time_us` by the host's clock, from an idle
        device to an idle one; `device_us` by the GPU's, without waiting for the host; `graph_us` of the step captured
        as a CUDA graph and replayed, if nothing in it waits for the device; `compiled_us` of the step by
        `torch.compile`, one way after the other, `compiled_difference` the largest difference of its results from
        the uncompiled ones, and `compiled_gate` its outcome; `errors` by result, relative in the Euclidean norm, and
        `err_ratio`, the largest share of the allowance: twice the client's error and one rounding. `difference` is
        the largest from the client at the timed size; `path` the code that computed the attention; `calls` those
        that reached flashsci. A failed way has no time, and its gate gives the reason; so does that of a model whose
        client is not on this machine.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = size or ("real" if device.type == "cuda" else "tiny")
    if size not in SIZES:
        raise BenchError(f"no size named {size!r}; there are {', '.join(SIZES)}")
    if dtype is not None and dtype not in DTYPES:
        raise BenchError(f"no dtype named {dtype!r}; there are {', '.join(DTYPES)}")
    modules: dict[str, ModuleType | Unavailable] = {}
    for name in names or MODELS:  # all names are checked before anything is measured
        try:
            modules[name] = load(name)
        except Unavailable as error:
            modules[name] = error
    records: list[dict] = []
    until = time.monotonic() + 60 * minutes
    for name, module in modules.items():
        gate = f"refused: {module}"
        if not isinstance(module, Unavailable):
            chosen = [d for d in module.DTYPES if dtype is None or d == DTYPES[dtype]]
            try:
                for found in _model(name, module, size, chosen, device, seconds, on_step, until, compiled):
                    records += found
                gate = ""
            except OutOfTime:
                gate = "refused: time is up"
            except Exception as error:  # the client's, in float64 or at its start
                if fatal(error):
                    raise
                gate = f"failed: it raised: {first_line(error)}"
            _release(device)
        if gate:
            about = {"id": name, "model": name, "about": name, "dtype": dtype, "size": size}
            records += [_record(about, way, _Side(gate=gate), device) for way in WAYS]
        on_model(records)
    return records


class OutOfTime(Exception):
    """Whether the next step would begin too late."""


@dataclass
class _Side:
    """The results of one way through a step."""

    path: str = ""
    gate: str = "passed"
    errors: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    difference: float | None = None
    calls: list[dict] = field(default_factory=list)
    memory: int | None = None
    time: Times | None = None
    device_time: Times | None = None
    graph_time: Times | None = None
    compiled_time: Times | None = None
    compiled_difference: float | None = None
    compiled_gate: str | None = None  # None: not requested

    @property
    def failed(self) -> bool:
        return self.gate.startswith(("failed", "refused"))


def _model(
    name: str,
    module: ModuleType,
    size: str,
    dtypes: list[torch.dtype],
    device: torch.device,
    seconds: float,
    on_step: Callable[[str], object],
    until: float,
    compiled: bool,
) -> Iterator[list[dict]]:
    """Records of one dtype after the other."""
    if not dtypes:
        return
    if time.monotonic() >= until:
        raise OutOfTime
    on_step(f"{name}: float64")
    truth: dict[str, Results] = {}
    with double_stays():
        for step in module.build(SIZES[size], torch.float64, device):
            truth[step.id] = step.client.results()
    step = None
    _release(device)
    for dtype in dtypes:
        if time.monotonic() >= until:
            raise OutOfTime
        records = []
        found: dict[str, dict[str, _Side]] = {}
        for step in module.build(SIZES[size], dtype, device):
            on_step(f"{step.id}, {_NAMES[dtype]}: errors")
            found[step.id] = _errors(step, truth[step.id], dtype)
        step = None
        _release(device)
        for step in module.build(size, dtype, device):
            on_step(f"{step.id}, {_NAMES[dtype]}: timing")
            sides = found[step.id]
            _time(step, sides, device, seconds)
            if compiled:
                on_step(f"{step.id}, {_NAMES[dtype]}: compiled")
                _time_compiled(step, sides, dtype, device, seconds)
            about = {
                "id": f"{step.id}-{_NAMES[dtype]}",
                "model": name,
                "about": step.about,
                "dtype": _NAMES[dtype],
                "size": size,
            }
            sides["client"].path = step.path
            records += [_record(about, way, side, device) for way, side in sides.items()]
        step = None
        _release(device)
        yield records


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def relative(x: Tensor, truth: Tensor) -> float:
    """The error of a result, as a share of its norm; inf where it is not finite."""
    if not x.isfinite().all():
        return float("inf")
    return float((x.double() - truth.double()).norm() / truth.double().norm())


@contextmanager
def _problems_of(side: _Side):
    """Errors inside become the gate of that side."""
    try:
        yield
    except torch.OutOfMemoryError:
        side.gate = "refused: out of memory"
    except Exception as error:
        if fatal(error):
            raise
        side.gate = f"failed: it raised: {first_line(error)}"


def _errors(step: Step, truth: Results, dtype: torch.dtype) -> dict[str, _Side]:
    client, ours = sides = _Side(), _Side()
    with _problems_of(client):
        client.errors = {n: relative(x, truth[n]) for n, x in step.client.results().items()}
    with _problems_of(ours):
        with listening() as calls:
            results = step.ours.results()
        ours.errors = {n: relative(x, truth[n]) for n, x in results.items()}
        if not calls:
            ours.gate = "failed: no call reached flashsci"
        elif client.failed:
            ours.gate = "not checked"  # there is no reference to measure its errors against
        else:
            _judge(ours, client, dtype)
    return dict(zip(WAYS, sides, strict=True))


def _judge(ours: _Side, client: _Side, dtype: torch.dtype) -> None:
    """The two-error rule, with the rounding of a result itself as its floor."""
    rounding = torch.finfo(dtype).eps / 2
    shares = {name: error / (2 * client.errors[name] + rounding) for name, error in ours.errors.items()}
    worst = max(shares, key=lambda name: shares[name])
    ours.ratio = shares[worst]
    if ours.ratio > 1:
        errors = f"{ours.errors[worst]:.1e}, the client's {client.errors[worst]:.1e}"
        ours.gate = f"failed: error of {worst} {errors}"


def served_by(calls: list[dict]) -> str:
    """The backends whose kernels served calls, with counts: "cuda 4, triton 2; gradients triton 6".

    >>> served_by([{"forward": "cuda", "gradients": "triton", "count": 4}])
    'cuda 4; gradients triton 4'
    """
    texts = []
    for what in ("forward", "gradients"):
        counts: dict[str, int] = {}
        for call in calls:
            if call[what]:
                counts[call[what]] = counts.get(call[what], 0) + call["count"]
        if counts:
            texts.append(", ".join(f"{name} {count}" for name, count in counts.items()))
    return "; gradients ".join(texts)


def _time(step: Step, sides: dict[str, _Side], device: torch.device, seconds: float) -> None:
    ways: dict[str, Way] = dict(zip(WAYS, (step.client, step.ours), strict=True))
    results: dict[str, Results] = {}
    for name, way in ways.items():
        if not sides[name].failed:
            with _problems_of(sides[name]):
                with listening() as calls:
                    results[name] = way.results()
                sides[name].memory = _peak(way, device)
                if name == "flashsci":
                    sides[name].calls = list(calls.values())
                    sides[name].path = served_by(sides[name].calls)
    if len(results) == 2:
        theirs, mine = results.values()
        sides["flashsci"].difference = max(relative(mine[n], x) for n, x in theirs.items())
        if sides["flashsci"].difference == float("inf"):
            sides["flashsci"].gate = "failed: a result at the size that is timed is not finite"
    results.clear()
    able = {name: way for name, way in ways.items() if not sides[name].failed}
    if not able:
        return
    clock = host_time(able, device, seconds, calls=1, to_end=True, warmup=2)
    if device.type == "cuda":
        of_device = interleave(able, device, seconds)
        for name, times in of_device.items():
            sides[name].device_time = times
        if any(clock[name].median > HOST_BOUND * of_device[name].median for name in able):
            clock = host_time(able, device, LONGER * seconds, calls=1, to_end=True, warmup=0)
        graphs = {name: _captured(way, device) for name, way in able.items()}
        if all(graphs.values()):
            replays = {name: graph.replay for name, graph in graphs.items() if graph is not None}
            for name, times in interleave(replays, device, seconds / 2).items():
                sides[name].graph_time = times
    for name, times in clock.items():
        sides[name].time = times


def _time_compiled(
    step: Step, sides: dict[str, _Side], dtype: torch.dtype, device: torch.device, seconds: float
) -> None:
    """Some steps, such as training on forces, cannot be compiled: their gate says why. It fails if the
    compiler changes our results by more than twice its change of the client's, and a rounding."""
    for side, way in zip(sides.values(), (step.client, step.ours), strict=True):
        if side.failed:
            continue
        plain, compiled = way.results(), way.compiled()
        try:
            found = compiled.results()
        except Exception as error:
            if fatal(error):
                raise
            side.compiled_gate = f"refused: {first_line(error)}"
            continue
        side.compiled_difference = max(relative(found[n], x) for n, x in plain.items())
        side.compiled_gate = "passed"
        del plain, found
        times = host_time({"": compiled}, device, seconds, calls=1, to_end=True, warmup=2)
        side.compiled_time = times[""]
    torch.compiler.reset()
    by_compiler = [sides[name].compiled_difference for name in WAYS]
    theirs, mine = (math.nan if x is None else x for x in by_compiler)
    if mine > 2 * theirs + torch.finfo(dtype).eps:  # never where one of them has none
        text = f"failed: the compiler changes results by {mine:.1e}, the client's {theirs:.1e}"
        sides["flashsci"].compiled_gate = text


def _captured(way: Way, device: torch.device) -> torch.cuda.CUDAGraph | None:
    """A step as a CUDA graph; None if the host waits for the device on the way, as in some clients."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        way()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        way()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            way()
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        return None
    return graph


def _peak(way: Way, device: torch.device) -> int | None:
    """Bytes that a step takes beyond its memory at the start."""
    if device.type != "cuda":
        return None
    way.model.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    way()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _record(about: dict, way: str, side: _Side, device: torch.device) -> dict:
    commit, dirty = commit_of_tree()
    errors = side.errors.values()
    return {
        "schema": 1,
        "suite": "models",
        "case": about,
        "pass": "step",
        "backend": way,
        "path": side.path,
        "commit": commit,
        "dirty": dirty,
        "time_us": None if side.failed or side.time is None else microseconds(side.time),
        "device_us": None if side.failed or side.device_time is None else microseconds(side.device_time),
        "graph_us": None if side.failed or side.graph_time is None else microseconds(side.graph_time),
        "compiled_us": None if side.failed or side.compiled_time is None else microseconds(side.compiled_time),
        "compiled_difference": side.compiled_difference,
        "compiled_gate": side.compiled_gate,
        "tflops": None,
        "gbps": None,
        "pct_sol": None,
        "ceiling": None,
        "peak_mem_mb": None if side.memory is None else side.memory / 1e6,
        "errors": side.errors,
        "max_err": max(errors) if errors else None,
        "err_ratio": side.ratio,
        "difference": side.difference,
        "calls": side.calls,
        "gate": side.gate,
        "method": {"timer": "host", "interleaved": True, "input": "randn"},
        "env": environment(device),
    }
