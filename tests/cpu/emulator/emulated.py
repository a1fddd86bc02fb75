"""Kernels of csrc/sm90, and those of csrc/sm80 that are much like them, on the host: a library of their C++, with csrc/ptx replaced by csrc/emulation.h, and calls of it."""

from __future__ import annotations

import ctypes as c
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tools.kernels.launchers import NOT_SUPPORTED

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent / "csrc"
# What no macro can turn into C++: launches, and dynamic shared memory.
REWRITTEN = (
    (r"([\w<>:]+)<<<(.*?), [^,]*>>>\(", r"emulation::launch(\1, \2, "),
    (
        r"extern __shared__ (?:__align__\(128\) )?unsigned char (\w+)\[\]",
        r"auto* const \1 = emulation::address_space + emulation::block->window + emulation::kBase",
    ),
)


def includes() -> Path:
    """Where cuda.h and cuda_runtime.h are."""
    nvcc = shutil.which("nvcc")
    beside = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    places = [*beside, Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include"))]
    found = next((p for p in places if (p / "cuda_runtime.h").is_file()), None)
    if found is None or shutil.which("g++") is None:
        pytest.skip("no g++, or no headers of the CUDA toolkit")
    return found


def build(
    folder: Path,
    name: str,
    *changes: tuple[str, str, str],
    define: str = "",
    fast: bool | None = None,
) -> c.CDLL:
    """csrc/<name>.cpp as a library. changes: (file of csrc/sm90, text, what it becomes). define: macros, with spaces between them. fast: whether the
    compiler optimises; by default not what is changed, which runs a few times, so that most of its time is the compiler's."""
    headers = includes()
    source = folder / "csrc"
    shutil.copytree(ROOT / "csrc", source)
    for path in (source / "ptx").glob("*.cuh"):
        path.write_text("#pragma once\n")
    for file, old, new in changes:
        path = source / "sm90" / file
        text = path.read_text()
        if text.count(old) != 1:  # no AssertionError, by which tests know that a fault is found
            raise LookupError(f"{file} has {text.count(old)} times {old!r}")
        path.write_text(text.replace(old, new))
    for path in source.rglob("*.cuh"):
        text = path.read_text()
        for old, new in REWRITTEN:
            text = re.sub(old, new, text)
        path.write_text(text)
    target = folder / f"{name}.so"
    # Kernels read bytes as other types, as nvcc allows; threads jump between stacks, which a fortified longjmp refuses; a
    # library shares no variables with those of other kernels in this process, nor functions with the CUDA runtime that torch loads.
    level = "-O1" if fast or (fast is None and not changes) else "-O0"
    flags = [
        "-w",
        "-Wno-psabi",
        "-fno-strict-aliasing",
        "-U_FORTIFY_SOURCE",
        "-fno-gnu-unique",
        "-Wl,-Bsymbolic",
    ]
    subprocess.run(
        ["g++", "-std=c++17", level, *flags, "-fPIC", "-shared", "-DFLASHSCI_POISON", *(f"-D{macro}" for macro in define.split()), "-isystem", headers, "-I", source,
         HERE / f"{name}.cpp", "-o", target],
        check=True,
    )  # fmt: skip
    return c.CDLL(str(target))


def emulate(call, params: c.Structure, bf16: bool, seed: int, processors: int = 3) -> bool:
    """Whether the launcher behind a function of a library took the call. seed: of the order in which things happen."""
    text = c.create_string_buffer(300)
    error = call(c.byref(params), bf16, processors, seed, text, len(text))
    assert error in (0, NOT_SUPPORTED), (error, text.value.decode())
    return error == 0


def is_found(judge: Callable[[int], object], seeds: Iterable[int] = range(2, 8)) -> bool:
    """Whether what is wrong with a kernel shows, in a judgement of one of these seeds."""
    for seed in seeds:
        try:
            judge(seed)
        except AssertionError:
            return True
    return False
