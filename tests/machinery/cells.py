"""A cell's call: one function on one backend, as a function of one of its tensors; and the judgement of what comes back."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashsci

from . import oracle
from .entries import CONTROL, ENTRIES, Entry, mesh
from .oracle import Exact, Results
from .outcomes import ABSENT, BAD, CRASHED, RIGHT, TORCHS, WRONG, Outcome, outcome_of

#: Errors allowed, in roundings of the largest number of a result: float32 sums of some hundred terms, and coarser types,
#: whose rounding is the only one that counts.
ROUNDINGS, COARSE_ROUNDINGS = 128.0, 4.0
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180  # seconds of a process
FLOAT32 = torch.finfo(torch.float32).eps


class NotHere(Exception):
    """The machinery has no meaning for this cell."""


class Wrong(Exception):
    """A result that is none, such as one without a graph."""


def require(condition: bool, what: str = "the results are detached from the tensor") -> None:
    if not condition:
        raise Wrong(what)


@dataclass(frozen=True)
class Call:
    """A right call. Calling it with a tensor puts that in the place of its row's."""

    name: str
    row: str
    backend: str
    device: str = "cpu"

    @property
    def entry(self) -> Entry:
        return ENTRIES[self.name]

    @property
    def variable(self) -> str:
        return oracle.variable_of(self.entry, self.row)

    @property
    def count(self) -> int | None:
        return self.entry.results(self.backend)

    def placed(self, x: Tensor, name: str = "") -> Tensor:
        """On the device, in float32 unless the function wants another type."""
        wanted = x.is_floating_point() and name not in self.entry.keep
        return x.to(self.device, torch.float32 if wanted else x.dtype, copy=True)

    def inputs(self) -> dict[str, Tensor]:
        if self.name.startswith("distributed"):
            mesh(self.device)
        return {n: self.placed(x, n) for n, x in self.entry.inputs(self.row).items()}

    def x(self, other: bool = False) -> Tensor:
        """What varies, at one of two points."""
        dtype = oracle.point(self.entry.inputs(self.row), self.variable).dtype
        return self.placed(oracle.where(self.name, self.row, other).to(dtype), self.variable)

    def of(self, tensors: dict[str, Tensor]) -> Results:
        return tuple(self.entry.call(self.backend, tensors))

    def __call__(self, x: Tensor) -> Results:
        return self.of(oracle.substituted(self.entry, self.inputs(), self.row, x))

    def value(self, other: bool = False) -> Results:
        return oracle.value(self.name, self.row, self.count, other)

    def exact(self, other: bool = False) -> Exact:
        if not self.entry.derivatives:
            raise Wrong("a derivative of rounded numbers came back, where an error should say that there is none")
        return oracle.exact(self.name, self.row, self.count, other)

    def floats(self) -> None:
        """Derivatives need a number."""
        if not self.x().is_floating_point():
            raise NotHere("no tensor of numbers")


Pair = tuple[Any, Tensor]  # what came, what should have come in float64


#: Of which rows a machinery has cells: of all; of single tensors; of calls (which are the same whichever of their needed
#: tensors varies); of one call.
EVERY, SINGLE, CALLS, FIRST = "every", "single", "calls", "first"


@dataclass(frozen=True)
class Machinery:
    """A way in which torch runs a call."""

    name: str
    family: str
    run: Callable[[Call], Iterable[Pair]]
    eps: float = FLOAT32
    seconds: float = 0.0  # of a cell, where that is much: a compiler's
    alone: bool = False  # in a process of its own, which may die
    on: tuple[str, ...] = ("cpu", "cuda")
    rows: str = EVERY

    def fits(self, entry: Entry, row: str, device: str) -> bool:
        """Whether it means something for a row's tensor."""
        if device not in self.on or (self.rows != EVERY and "+" in row):
            return False
        first = row == entry.needed[0]
        return {EVERY: True, SINGLE: True, CALLS: first or row in entry.others, FIRST: first}[self.rows]

    def outcome(self, call: Call) -> Outcome:
        """What becomes of a cell."""
        outcome = self._outcome(call)
        suspect = outcome.kind in BAD and call.name != CONTROL and torch_serves(call)
        if suspect and control(self, call.device).kind == outcome.kind:
            return Outcome(TORCHS, f"torch's own scaled_dot_product_attention: {outcome.why}")
        return outcome

    def _outcome(self, call: Call) -> Outcome:
        if not self.alone:
            return self.here(call)
        return in_a_process(self, call)

    def here(self, call: Call) -> Outcome:
        torch.manual_seed(0)
        try:
            return judge(self.run(call), max(self.eps, call.entry.eps))
        except NotHere as reason:
            return Outcome(ABSENT, str(reason))
        except Wrong as error:
            return Outcome(WRONG, str(error))
        except Exception as error:
            return outcome_of(error)


MACHINERIES: dict[str, Machinery] = {}


def machinery(name: str, family: str, **options: Any) -> Callable[[Any], Any]:
    """Enters a function into the table."""

    def enter(run: Callable[[Call], Iterable[Pair]]) -> Any:
        assert name not in MACHINERIES
        MACHINERIES[name] = Machinery(name, family, run, **options)
        return run

    return enter


def torch_serves(call: Call) -> bool:
    """Whether the call is one of torch's kernel."""
    if call.backend == "sdpa":
        return True
    if call.backend != "auto" or call.name not in (
        "attention",
        "sdpa",
        "distributed.attention",
        "distributed.triangle_attention",
    ):
        return False
    inputs = call.inputs()
    options = {{"query": "q", "key": "k", "value": "v", "attn_mask": "bias"}.get(n, n): x for n, x in inputs.items()}
    if call.variable in inputs:
        inputs[call.variable].requires_grad_(inputs[call.variable].is_floating_point())
    return flashsci.explain(**options, **({"dropout_p": 0.3} if "dropout_seed" in options else {})).chosen == "sdpa"


@functools.cache
def control(machinery: Machinery, device: str) -> Outcome:
    """What becomes of torch's own function under a machinery; to first order, where torch's kernels end."""
    machinery = MACHINERIES[machinery.name.removesuffix(", second order")]
    return machinery._outcome(Call(CONTROL, "q", "auto", device))


def in_a_process(machinery: Machinery, call: Call) -> Outcome:
    """The outcome in a process of its own: one that dies or hangs is a crash."""
    cell = json.dumps([machinery.name, *astuple(call)])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.machinery", "--cell", cell],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return Outcome(CRASHED, f"no answer within {PATIENCE} s")
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("["):
        return Outcome(CRASHED, f"the process ends with {done.returncode}: {done.stderr.strip()[-300:]}")
    return Outcome(*json.loads(last))


def judge(pairs: Iterable[Pair], eps: float) -> Outcome:
    """Whether every result is what it should be."""
    count = 0
    for found, expected in pairs:
        count += 1
        if not isinstance(found, Tensor):
            return Outcome(WRONG, f"result {count} is {found!r}")
        if tuple(found.shape) != tuple(expected.shape):
            return Outcome(
                WRONG,
                f"result {count} has shape {list(found.shape)}, expected {list(expected.shape)}",
            )
        error = (found.detach().double().cpu() - expected.cpu()).abs().max().item() if expected.numel() else 0.0
        largest = expected.abs().max().item() if expected.numel() else 0.0
        allowed = (ROUNDINGS if eps == FLOAT32 else COARSE_ROUNDINGS) * eps * (1 + largest)
        if not error <= allowed:
            what = "zero" if not found.any() else f"off by {error:.2g}"
            return Outcome(WRONG, f"result {count} is {what}, where the largest number is {largest:.2g}")
    assert count, "a machinery that gives nothing to judge"
    return Outcome(RIGHT)
