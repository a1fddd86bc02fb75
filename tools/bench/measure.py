"""The measurement of cases by candidates: check, then time, then record. `run` documents the records, schema 1."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import importlib.util
import math
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from tools.bench import candidates as ways
from tools.bench import revision
from tools.bench.candidates import BASE, is_ours
from tools.bench.cases import STEP, TRAINING_STEPS, BenchError, Case
from tools.bench.inputs import (
    DTYPES,
    Inputs,
    Unsupported,
    bytes_moved,
    flops,
    make_inputs,
)
from tools.bench.timer import Times, host_time, interleave
from tools.bench.verify import Sample, Verdict

Progress = Callable[[str], object]


def in_dtype(case: Case, dtype: str) -> Case:
    """The same case in another dtype."""
    if dtype not in DTYPES:
        raise BenchError(f"no dtype named {dtype!r}; there are {', '.join(DTYPES)}")
    bias_dtype = dtype if case.bias_dtype == case.dtype else case.bias_dtype
    return replace(case, id=f"{case.id}@{dtype}", dtype=dtype, bias_dtype=bias_dtype)


def run(
    cases: Iterable[Case],
    names: Iterable[str] = (),
    device: torch.device | str | None = None,
    *,
    order: int = 1,
    seconds: float = 1.0,
    check: bool = True,
    base: str | None = None,
    minutes: float = math.inf,
    on_step: Progress = lambda text: None,
    on_case: Callable[[list[dict]], object] = lambda records: None,
) -> list[dict]:
    """One record per case, pass ("forward", "backward"; of some cases "training step", of small calls
    "host") and candidate.

    Args:
        cases: see `tools.bench.select`.
        names: candidates; empty: our kernels and every baseline.
        device: default the GPU if there is one.
        order: highest derivative to time; never more than the case has.
        seconds: measuring time per case and pass, about.
        check: judge each candidate against fp64 first. One that fails gets a record without speed.
        base: another revision (git's name for it, or a folder), whose backends run together with ours as
            "triton@base" and so on.
        minutes: no case begins after these; a warning names those left out, and a case that was interrupted.
        on_step, on_case: called with each step, and after each case with the records so far.

    Returns:
        Dicts of plain data: schema, suite, case, pass, backend, commit, dirty, time_us (None if it
        failed or refused), tflops, gbps, pct_sol (of the nearer of the two ceilings),
        ceiling (tflops of a matrix product and gbps of a copy, measured alongside), peak_mem_mb, max_err, err_ratio (1 = all that is allowed), gate ("passed", "not
        checked", "failed: ...", "refused: ..."), method, env.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # A warning of autograd's own threads, on their first matrix product; harmless.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    names = ways.names_of(names, device, base is not None)
    if base is not None:
        on_step(f"loading {base}")
        revision.load(base, kernels="cuda" + BASE in names and device.type == "cuda")
    records: list[dict] = []
    cases, until = list(cases), time.monotonic() + 60 * minutes
    for i, case in enumerate(cases):
        if time.monotonic() >= until:
            left = ", ".join(c.id for c in cases[i:])
            warnings.warn(f"time is up, not measured: {left}", stacklevel=2)
            break
        on_step(case.id)
        try:
            records += _Measurement(case, names, device, order, seconds, check, on_step).records()
        except Exception as error:  # too large, for example; other cases may fit
            if fatal(error):
                raise
            warnings.warn(f"{case.id} is not measured: {first_line(error)}", stacklevel=2)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        on_case(records)
    return records


def first_line(error: Exception) -> str:
    """An error as one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fatal(error: Exception) -> bool:
    """Whether every call on this device fails. It does after a launch that the driver refused, such as SDPA's
    of more than 65,535 sequences."""
    refused = "invalid configuration argument" in str(error)
    return isinstance(error, torch.AcceleratorError) and not refused


class _Measurement:
    """One case: the candidates that can run it, their correctness, and their times."""

    def __init__(
        self,
        case: Case,
        names: list[str],
        device: torch.device,
        order: int,
        seconds: float,
        check: bool,
        on_step: Progress,
    ):
        self.case, self.names, self.device = case, names, device
        self.seconds, self.on_step = seconds, on_step
        self.backward = min(order, case.order) > 0
        self.passes = ["forward", *(["backward"] if self.backward else [])]
        inputs = make_inputs(case, device)
        self.inputs = inputs if self.backward else inputs.detached()
        self.sample = Sample(self.inputs) if check else None
        self.functions: dict[str, dict[str, Callable[[], Tensor]]] = {k: {} for k in self.passes}
        self.refusals: dict[tuple[str, str], str] = {}  # (candidate, pass) -> why
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        self.memory: dict[tuple[str, str], float] = {}

    def records(self) -> list[dict]:
        for name in self.names:
            self._prepare(name)
        found = []
        clock = None
        for kind in self.passes:
            self.on_step(f"{self.case.id}: timing {kind}")
            times = self._time(kind)
            clock = _sm_clock(self.device)
            found += [self._record(name, kind, times, clock) for name in self.names]
        if self.case.suite == "latency":
            for kind, times in self._host_times().items():
                found += [self._record(n, kind, times, clock) for n in self.names if n in times]
        if self.case.id in TRAINING_STEPS and self.backward:
            times = self._step_times()
            found += [self._record(n, STEP, times, clock) for n in self.names if n in times]
        return found

    def _prepare(self, name: str) -> None:
        """Compile, check and weigh one candidate; one without gradients runs forward alone."""
        self.on_step(f"{self.case.id}: {name}")
        reason = self._try(name, self.inputs, self.passes)
        if reason and self.backward:
            self.refusals[name, "backward"] = reason
            reason = self._try(name, self.inputs.detached(), ["forward"])
        if reason:
            self.refusals[name, "forward"] = reason

    def _try(self, name: str, inputs: Inputs, passes: list[str]) -> str | None:
        """The reason why it cannot run these passes, or None."""
        try:
            function = ways.candidate(name, inputs)
            if self.sample:
                for kind, verdict in self.sample.verdicts(name, function, passes).items():
                    self.verdicts[name, kind] = verdict
            self._weigh(name, function, passes)
        except Unsupported as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:  # Triton's are no RuntimeErrors
            if fatal(error):
                raise
            said = first_line(error)
            if not is_ours(name):  # a baseline may run the forward and have no such gradient
                return said
            for kind in passes:
                self.verdicts[name, kind] = Verdict(math.inf, math.inf, f"it raised: {said}")
            return None
        for kind in passes:
            self.functions[kind][name] = function
        return None

    def _weigh(self, name: str, function: Callable[[], Tensor], passes: list[str]) -> None:
        if self.device.type != "cuda":
            return
        for kind in passes:
            start = None if kind == "forward" else function()
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            held = function() if start is None else self._gradients(start)
            torch.cuda.synchronize(self.device)
            self.memory[name, kind] = torch.cuda.max_memory_allocated(self.device) - before
            del held, start

    def _gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.inputs.leaves.values())
        return torch.autograd.grad(out, leaves, self.inputs.dout, retain_graph=True)

    def _failed(self, name: str) -> bool:
        """A candidate that is wrong in any pass has no valid speed."""
        verdicts = [self.verdicts.get((name, kind)) for kind in self.passes]
        return any(v is not None and v.problem is not None for v in verdicts)

    def _able(self, kind: str) -> dict[str, Callable[[], Tensor]]:
        return {n: f for n, f in self.functions[kind].items() if not self._failed(n)}

    def _time(self, kind: str) -> dict[str, Times]:
        able = self._able(kind)
        if kind == "backward":
            able = {n: partial(self._gradients, f()) for n, f in able.items()}
        if not able:
            return {}
        return interleave({**able, **self._ceilings()}, self.device, self.seconds)

    def _ceilings(self) -> dict[str, Callable[[], object]]:
        """A large matrix product and a large copy, timed in the same rounds: the device's current ceilings."""
        if self.device.type != "cuda":
            return {}
        a, b = _matrices(self.device, DTYPES[self.case.dtype])
        source, target = _buffers(self.device)
        return {"ceiling:matmul": lambda: a @ b, "ceiling:copy": lambda: target.copy_(source)}

    def _host_times(self) -> dict[str, dict[str, Times]]:
        plain = {n: torch.no_grad()(f) for n, f in self._able("forward").items() if n != "flex"}
        found = {"host": self._host(plain)}
        if self.backward:
            able = {n: f for n, f in self._able("backward").items() if n != "flex"}
            found["host, with gradients"] = self._host(able)
        return found

    def _step_times(self) -> dict[str, Times]:
        """Forward and backward by the host's clock, from an idle device until it is idle again."""
        self.on_step(f"{self.case.id}: timing {STEP}")
        leaves = list(self.inputs.leaves.values())

        def step(function: Callable[[], Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(), leaves, self.inputs.dout)

        able = {n: partial(step, f) for n, f in self._able("backward").items()}
        return host_time(able, self.device, self.seconds, calls=1, to_end=True) if able else {}

    def _host(self, functions: dict[str, Callable[[], Tensor]]) -> dict[str, Times]:
        self.on_step(f"{self.case.id}: host time")
        return host_time(functions, self.device, self.seconds) if functions else {}

    def _record(self, name: str, kind: str, times: dict[str, Times], clock: int | None) -> dict:
        on_host = kind == STEP or kind.startswith("host")
        judged = "backward" if kind == STEP else "forward" if on_host else kind
        verdict = self.verdicts.get((name, judged))
        refusal = self.refusals.get((name, judged))
        time = times.get(name)
        if refusal:
            gate = f"refused: {refusal}"
        elif self._failed(name):
            wrong = [v.problem for k in self.passes if (v := self.verdicts.get((name, k)))]
            gate = "failed: " + "; ".join(p for p in wrong if p)
        else:
            gate = "not checked" if verdict is None else "passed"
        tflops = gbps = share = None
        ceiling = _ceiling(times, self.device, DTYPES[self.case.dtype])
        if time and not on_host:
            derivative = int(kind == "backward")
            tflops = flops(self.case, self.device, derivative) / time.median * 1e-12
            gbps = bytes_moved(self.case, self.device, derivative) / time.median * 1e-9
            if ceiling:
                share = 100 * max(tflops / ceiling["tflops"], gbps / ceiling["gbps"])
        memory = self.memory.get((name, kind))
        if name.endswith(BASE):
            base = revision.current()
            commit, dirty = base.commit or base.base, False
        else:
            commit, dirty = commit_of_tree()
        return {
            "schema": 1,
            "suite": self.case.suite,
            "case": self.case.describe(),
            "pass": kind,
            "backend": name,
            "commit": commit,
            "dirty": dirty,
            "time_us": None if time is None else microseconds(time),
            "tflops": tflops,
            "gbps": gbps,
            "pct_sol": share,
            "ceiling": ceiling,
            "peak_mem_mb": None if memory is None else memory / 1e6,
            "max_err": None if verdict is None else verdict.error,
            "err_ratio": None if verdict is None else verdict.ratio,
            "gate": gate,
            "method": {
                "timer": "host" if on_host or self.device.type == "cpu" else "cuda_event",
                "batch": time.batch if time else None,
                "host_bound": bool(time and time.host_bound),
                "cold_l2": bool(time and time.batch == 1 and self.device.type == "cuda"),
                "interleaved": True,
                "input": "randn",
            },
            "env": {**environment(self.device), "sm_clock_mhz": clock},
        }


def microseconds(time: Times) -> dict:
    fields = asdict(time)
    return {k: fields[k] * 1e6 for k in ("median", "p20", "p80", "min")} | {"n": time.n}


_MATRIX_SIZE = 8192
_COPY_BYTES = 1 << 29


@cache
def _matrices(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = _MATRIX_SIZE if dtype.itemsize < 4 else _MATRIX_SIZE // 4
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return a, b


@cache
def _buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    source, target = torch.zeros(2, _COPY_BYTES, device=device, dtype=torch.int8)
    return source, target


def _ceiling(times: dict[str, Times], device: torch.device, dtype: torch.dtype) -> dict[str, float] | None:
    """The device's ceilings in the same rounds: a large matrix product, a large copy."""
    if "ceiling:matmul" not in times:
        return None
    size = _matrices(device, dtype)[0].shape[0]
    return {
        "tflops": 2 * size**3 / times["ceiling:matmul"].median * 1e-12,
        "gbps": 2 * _COPY_BYTES / times["ceiling:copy"].median * 1e-9,
    }


@cache
def commit_of_tree() -> tuple[str | None, bool | None]:
    """(commit, whether the tree differs from it): from FLASHSCI_COMMIT, for a tree that came without git,
    else from git; or (None, None)."""
    said = os.environ.get("FLASHSCI_COMMIT")
    if said:
        return said, False
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip())
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD"), bool(git("status", "--porcelain", "-uno"))
    except OSError:
        return None, None


@cache
def environment(device: torch.device) -> dict:
    import flashsci

    triton = importlib.util.find_spec("triton") is not None
    gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "capability": torch.cuda.get_device_capability(device) if gpu else None,
        "date": datetime.date.today().isoformat(),
        "driver": _nvidia_smi("driver_version") if gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if triton else None,
        "flashsci": flashsci.__version__,
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }


def _nvidia_smi(field: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def _sm_clock(device: torch.device) -> int | None:
    clock = _nvidia_smi("clocks.sm") if device.type == "cuda" else None
    return int(clock) if clock and clock.isdigit() else None
