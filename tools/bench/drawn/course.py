"""The course of a run on drawn calls: check some ahead, then time them one after the other, until the time is over."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from flashsci.testing import LARGE_CALLS, SMALL_CALLS, CallLimits, draw_call
from tools.bench.drawn.ahead import check_ahead
from tools.bench.drawn.measure import Check, Record, record_of
from tools.bench.measure import environment

#: The share of the time left that checks ahead may take.
AHEAD = 0.35
#: Seconds that another turn of checks and times needs to be worth its start.
LEAST_TURN = 40.0


def run(
    seed: int,
    seconds: float,
    *,
    device: torch.device | str | None = None,
    calls: int = 10**6,
    first: int = 0,
    small: bool | None = None,
    isolated: bool | None = None,
    path: Path | None = None,
    on_step: Callable[[str], object] = lambda text: None,
    on_record: Callable[[Record], object] = lambda record: None,
) -> list[Record]:
    """The records of the calls of a seed, in order, until the time is over.

    Args:
        seed: of the draw; no rule of `auto` was learnt from a seed that is used to judge it.
        seconds: of the whole run, checks included. No call begins after it.
        device: default the GPU if there is one.
        calls: the most calls.
        first: the number of the first call.
        small: draw small calls (the default on a CPU).
        isolated: measure in processes of their own, and go on in other ones after a call that takes the device or the
            process with it (the default on a GPU).
        path: records are written to this file as they come, one a line; one that exists is replaced.
        on_step, on_record: called with each step, and with each record.
    """
    from tools.bench.drawn import isolation

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    limits = LARGE_CALLS if (on_gpu if small is None else not small) else SMALL_CALLS
    through = isolation.measured if (on_gpu if isolated is None else isolated) else measured
    until = time.monotonic() + seconds
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    records: list[Record] = []
    numbers = range(first, first + calls)
    while numbers:
        turn = numbers
        checks: dict[int, Check | None] = {}
        if on_gpu:
            wanted = (draw_call(seed, n, limits) for n in numbers)
            now = time.monotonic()
            ahead = check_ahead(wanted, device, until=now + AHEAD * (until - now), on_step=on_step)
            turn = numbers[: max(1, len(ahead))]
            checks = {numbers[place]: check for place, check in ahead.items()}
        before = len(records)
        for record in through(seed, turn, limits, device, until, on_step, checks):
            records.append(record)
            if path:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            on_record(record)
        numbers = numbers[len(records) - before :]
        if len(records) - before < len(turn) or time.monotonic() > until - LEAST_TURN:
            break
    return records


def measured(
    seed: int,
    numbers: Sequence[int],
    limits: CallLimits,
    device: torch.device,
    until: float,
    on_step: Callable[[str], object],
    checks: Mapping[int, Check | None],
) -> Iterator[Record]:
    """The records of these calls, in this process, until that time by the monotonic clock or a lost device. ``checks``:
    those that were made before, by the number of the call."""
    begin(device)
    for n in numbers:
        if time.monotonic() >= until:
            return
        call = draw_call(seed, n, limits)
        on_step(f"{n}: {call}")
        record = record_of(call, device, checks.get(n))
        yield record
        if record.get("lost"):
            return


def begin(device: torch.device) -> None:
    """Make this process ready for calls."""
    # A warning of autograd's own threads, on their first matrix product; harmless.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    # Refusals of SDPA on nested tensors, which are in the records.
    logging.getLogger("torch.nested._internal.sdpa").setLevel(logging.ERROR)
    environment(device)  # kept: a lost device cannot be asked
