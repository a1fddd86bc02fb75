"""Trials of `flashsci.tune`: the first call of each kind is timed on every candidate.

Entry points call :func:`consider` where they make a plan. Trials run in a thread of their own, which has none of the
caller's modes: no autocast, no saved-tensor hooks, no transforms. They take detached tensors and a seed of zeros for
dropout, so that the caller's graph, gradients and random numbers stay as they are.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashsci.call.ops import bypasses_dispatcher
from flashsci.call.plans import plans
from flashsci.call.problem import Problem, problem_of
from flashsci.call.torch_state import is_captured
from flashsci.choice import choose, differentiate, timing, tuned
from flashsci.choice.backends import OWN, requested
from flashsci.choice.candidates import comparable

#: A call of the kind under trial: of tensors in the order given, by the backend of that name.
Again = Callable[[Sequence[Tensor | None], str], Any]


@dataclass(eq=False)
class Session:
    """The kinds of call that were timed while tuning was on."""

    verbose: bool = False
    kinds: list[tuple[Problem, tuned.Times]] = field(default_factory=list)


#: The sessions that are on, the innermost last. Entry points look whether there is one.
active: list[Session] = []
_busy = threading.Lock()
_thread = threading.local()


def start(session: Session) -> None:
    """Time each new kind of call from here on, in every thread."""
    active.append(session)
    plans.clear()  # kinds that were planned before are new to the session


def stop(session: Session) -> None:
    active.remove(session)
    plans.clear()


def consider(call: tuple[Any, ...], backend: str, tensors: Sequence[Tensor | None], again: Again) -> bool:
    """Time a call on all candidates, if its kind is new and the choice is left to ``auto``.

    Calls of a compiler, tracer, transform, mode or profiler, and those that a CUDA graph captures, are left alone. So are
    calls with gradients inside a backward pass: theirs would wait for a thread of autograd that waits for them.

    Args:
        call: the arguments of :func:`problem_of`.
        backend: as the user gave it.
        tensors: those of the call.
        again: makes the call anew.

    Returns:
        Whether the choice for this kind is final, so that a plan of it may be kept.
    """
    if getattr(_thread, "trial", False) or requested(backend)[0] != "auto":
        return True
    given = [x for x in tensors if x is not None]
    if not bypasses_dispatcher(given) or forward_ad._current_level >= 0 or is_captured(given[0]):
        return False
    problem = problem_of(*call)
    if not tuned.lacks(problem):
        return True
    if problem.requires_grad and torch._C._current_graph_task_id() >= 0:
        return False
    usual = choose.choose(problem, "auto").forward  # raises where no backend serves the call, as the call itself
    requests = _requests(problem, usual)
    if len(requests) < 2:
        return True
    if not _busy.acquire(blocking=False):  # another thread's trials; a later call of the kind is timed
        return False
    try:
        if not tuned.lacks(problem):  # another thread was faster
            return True
        found = _in_clean_thread(given[0], lambda: _trials(problem, usual, requests, tensors, again))
        tuned.keep(problem, found)
        choose.forget()
        differentiate.forget()
        for session in active:
            session.kinds.append((problem, found))
        if any(session.verbose for session in active):
            print(f"flashsci.tune: {described(problem)}: {found.text(device_word(problem))}", file=sys.stderr)
        return True
    finally:
        plans.clear()  # those of trials, and of calls that other threads made meanwhile
        _busy.release()


def _in_clean_thread(x: Tensor, work: Callable[[], tuned.Times]) -> tuned.Times:
    """The result of work in a thread without the caller's modes, on the caller's stream."""
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    inference = torch.is_inference_mode_enabled()

    def run() -> tuned.Times:
        _thread.trial = True
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            on_stream: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
            stack.enter_context(on_stream)
            return work()

    with ThreadPoolExecutor(1, "flashsci.tune") as executor:
        return executor.submit(run).result()


def _requests(problem: Problem, usual: str) -> list[str]:
    """The requests to compare for a call that ``auto`` gives to the backend ``usual``, the default among them."""
    names = comparable(problem, usual)
    if not problem.requires_grad:
        return names
    if "cuda" not in names or "triton" not in names:
        return names
    pairs = {"triton": ["triton", "triton/cuda"], "cuda": [OWN, "cuda/triton"]}
    found = [request for name in names for request in pairs.get(name, [name])]
    # Where rules choose the backend of the gradients, strides of the call decide: the default is timed as it is.
    return ["auto", *found] if usual in pairs else found


def _trials(
    problem: Problem, usual: str, requests: list[str], tensors: Sequence[Tensor | None], again: Again
) -> tuned.Times:
    """The times of a call's candidates: ``requests``, in the place of the backend ``usual``."""
    default = "auto" if "auto" in requests else usual
    given = [None if x is None else x.detach() for x in tensors]
    leaves: list[Tensor] = []
    if problem.requires_grad:
        for x, original in zip(given, tensors, strict=True):
            if x is not None and original is not None and original.requires_grad:
                leaves.append(x.requires_grad_())

    def forward(name: str) -> Any:
        found = again(given, name)
        return found[0] if isinstance(found, tuple) else found

    def step(name: str) -> None:
        out = forward(name)
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    device = tensors[0].device  # type: ignore[union-attr]
    with torch.set_grad_enabled(problem.requires_grad):
        alone, unable = timing.measure({name: partial(forward, name) for name in requests}, device)
        if not problem.requires_grad:
            return tuned.Times(default, usual, alone, unable=unable)
        both, failed = timing.measure({name: partial(step, name) for name in alone}, device)
    return tuned.Times(default, usual, both, alone, {**unable, **failed})


def device_word(problem: Problem) -> str:
    return "GPU" if problem.device_type == "cuda" else "CPU"


def described(p: Problem) -> str:
    """A kind of call in a few words.

    >>> described(Problem("cpu", None, torch.bfloat16, 8, 2, 64, 64, batch=(3,), seq_q=128, seq_k=128, window_right=0))
    'bfloat16, batch 3, heads 8/2, 128 x 128, D 64, causal'
    """
    batch = "x".join(map(str, p.batch or ()))
    where = f"{p.batch[0]} sequences" if p.varlen and p.batch else f"batch {batch}" if batch else ""
    heads = f"heads {p.heads_q}" if p.heads_q == p.heads_k else f"heads {p.heads_q}/{p.heads_k}"
    dim = f"D {p.head_dim}" if p.head_dim == p.head_dim_v else f"D {p.head_dim}/{p.head_dim_v}"
    windowed = p.window_left >= 0 or p.window_right > 0
    window = f"window ({p.window_left}, {p.window_right})" if windowed else "causal" if p.window_right == 0 else ""
    bias = f"bias {list(p.bias_shape)}" if p.bias_shape else "bias" if p.bias else ""
    flags = {
        "key weights": p.key_weight, "mask": p.mask, "ALiBi": p.alibi, "sink": p.sink, "softcap": p.softcap > 0,
        "of biased scores": p.caps_bias,         "dropout": p.dropout_p > 0, "lse": p.return_lse, "deterministic": p.deterministic, "gradients": p.requires_grad,
    }  # fmt: skip
    dtype = str(p.dtype).removeprefix("torch.")
    parts = (
        dtype,
        where,
        heads,
        f"{p.seq_q} x {p.seq_k}",
        dim,
        window,
        bias,
        *(n for n, there in flags.items() if there),
    )
    return ", ".join(filter(None, parts))


def rows(session: Session) -> list[tuple[str, ...]]:
    """The table of a session: kind, choice before, choice now, their times, the gain, and what failed."""
    found = []
    for problem, times in session.kinds:
        now = times.winner
        before_s, now_s = times.seconds.get(times.default), times.seconds.get(now)
        known = before_s is not None and now_s is not None
        gain = f"{before_s / now_s:.2f}x" if known and now != times.default else "-"  # type: ignore[operator]
        failed = "; ".join(f"{times.label(name)}: {error}" for name, error in times.unable.items())
        seconds = ["-" if x is None else tuned.duration(x) for x in (before_s, now_s)]
        found.append((described(problem), times.label(times.default), times.label(now), *seconds, gain, failed))
    return found


HEADER = ("kind of call", "before", "now", "time before", "time now", "gain", "failed")


def table(session: Session) -> str:
    """The summary of a session as text: by rich where it is installed."""
    found = rows(session)
    if not found:
        return "flashsci.tune: no new kind of call was timed"
    columns = len(HEADER) if any(row[-1] for row in found) else len(HEADER) - 1
    title = f"flashsci.tune: kinds of call timed: {len(found)}, kept in {tuned.path()}"
    lines = [row[:columns] for row in (HEADER, *found)]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([title, *text])
    drawn = Table(*lines[0], title=title, title_justify="left")
    for line in lines[1:]:
        drawn.add_row(*(cell.replace("[", "\\[") for cell in line))
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def report(session: Session) -> None:
    """Print the summary of a session where it does not mix with a program's results."""
    print(table(session), file=sys.stderr)


def _from_environment() -> None:
    """Tuning for the whole process, if FLASHSCI_TUNE asks for it."""
    asked = os.environ.get(tuned.SWITCH, "")
    if asked not in ("", "0", "1"):
        warnings.warn(
            f"flashsci: {tuned.SWITCH}={asked!r} is neither '1', to tune this process, nor '0', to leave out the times "
            "of earlier ones; it is ignored",
            stacklevel=2,
        )
    if asked == "1":
        session = Session()
        start(session)
        atexit.register(lambda: report(session) if session.kinds else None)


_from_environment()
