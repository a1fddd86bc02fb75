"""Triton kernels compiled without a GPU, one architecture in a process of its own: a test file as a script, whose calls' launches
are recorded instead of made, and compiled. Of a file with many calls a test may compile a part."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PARTS = 3  # of the calls of a file
MOST_SHARED = {75: 64, 80: 163, 89: 99, 90: 227, 100: 227}  # KiB that a block may have


def report_of(file: str, architecture: int, part: int | None = None) -> list[dict[str, Any]]:
    """What ``python FILE ARCHITECTURE [PART]`` prints in its last line, as JSON; nothing is interpreted there. Launches of calls of
    other parts have their kernels' names alone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, file, str(architecture), *([] if part is None else [str(part)])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def script(report: Callable[[int, dict, list], Iterable[dict[str, Any]]]) -> None:
    """The script: what ``report(architecture, raw ops by name, launches)`` yields. Raw ops append what they launch to that list."""
    from tools.kernels.compare_triton import recorder

    architecture = int(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        found = list(report(architecture, *recorder(architecture)))
    print(json.dumps(found))


def compiled(launched: list, architecture: int, call: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(what there is to know, PTX) of every launch of a call; the list is empty afterwards."""
    from flashsci.backends.triton.kernels.groups import RUNTIME
    from tools.kernels.compare_triton import compile_launch, compile_one

    if not _is_wanted(call):
        yield from (({"call": call, "kernel": kernel.__name__}, "") for kernel, _, _ in launched)
        launched.clear()
        return
    for kernel, args, options in launched:
        made = compile_launch(kernel, args, options, architecture)
        source = made.src
        fixed = {kernel.arg_names[path[0]] for path in (*source.constants, *source.attrs)}
        entry = {
            "call": call,
            "sizes": sorted(fixed & set(RUNTIME)),
            "stages": options.get("num_stages", 1),
        }
        yield entry | compile_one(kernel, args, options, architecture), made.asm["ptx"]
    launched.clear()


_kinds: dict[str, int] = {}  # of the calls of this process, in order


def _is_wanted(call: str) -> bool:
    """Whether a call is in the part of this process; calls that differ behind a comma are compiled together."""
    n = _kinds.setdefault(call.partition(",")[0], len(_kinds))
    return len(sys.argv) < 3 or n % PARTS == int(sys.argv[2])


def check(report: list[dict[str, Any]], architecture: int) -> list[dict[str, Any]]:
    """What holds for every kernel that was compiled; these."""
    report = [entry for entry in report if "shared" in entry]
    assert report and all(entry["shared"] <= MOST_SHARED[architecture] * 1024 for entry in report), report
    # What ptxas lost: flashsci/check/machine_code.py.
    assert not any(entry["undefined"] for entry in report), report
    # A kernel serves every size.
    assert not any(entry["sizes"] for entry in report), report
    return report
