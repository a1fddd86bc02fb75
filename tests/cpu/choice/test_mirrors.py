"""Structs of the C boundary that Python writes by hand have the sizes and offsets that a compiler gives them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cpu.emulator.test_paged_kernel import Params
from tools.kernels import launchers

ROOT = Path(__file__).resolve().parents[3]
MIRRORS = {
    "FlashsciStrides": launchers.Strides,
    "FlashsciScoreStrides": launchers.ScoreStrides,
    "FlashsciBiasMask": launchers.BiasMask,
    "FlashsciForwardParams": launchers.ForwardParams,
    "FlashsciBackwardParams": launchers.BackwardParams,
    "FlashsciPagedParams": Params,
}


def output_of(folder: Path, source: str, given: str = "") -> str:
    """What a C++ program prints that has the library's headers."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    file, program = folder / "said.cpp", folder / "said"
    file.write_text(source)
    include = ["-I", str(ROOT / "csrc" / "include")]
    subprocess.run([compiler, "-std=c++17", *include, str(file), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], input=given, capture_output=True, text=True, check=True)
    return done.stdout


def test_mirrors_of_structs(tmp_path):
    asked = [f"sizeof({name})" for name in MIRRORS]
    wanted = [ctypes.sizeof(mirror) for mirror in MIRRORS.values()]
    for name, mirror in MIRRORS.items():
        for field, *_ in mirror._fields_:
            asked.append(f"offsetof({name}, {field})")
            wanted.append(getattr(mirror, field).offset)
    lines = "\n".join(f'  std::printf("%zu\\n", {question});' for question in asked)
    said = output_of(
        tmp_path,
        f'#include <cstddef>\n#include <cstdio>\n#include "flashsci_paged.h"\nint main() {{\n{lines}\n}}\n',
    )
    assert dict(zip(asked, map(int, said.split()), strict=True)) == dict(zip(asked, wanted, strict=True))
