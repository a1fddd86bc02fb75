"""Structs of the C boundary that Python writes by hand have the sizes and offsets that a compiler gives them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import launchers
from tests.cpu.test_paged_kernel import Params

ROOT = Path(__file__).resolve().parents[2]
MIRRORS = {
    "FlashsciStrides": launchers.Strides,
    "FlashsciScoreStrides": launchers.ScoreStrides,
    "FlashsciBiasMask": launchers.BiasMask,
    "FlashsciForwardParams": launchers.ForwardParams,
    "FlashsciBackwardParams": launchers.BackwardParams,
    "FlashsciPagedParams": Params,
}


def test_mirrors_of_structs(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    asked = [f"sizeof({name})" for name in MIRRORS]
    wanted = [ctypes.sizeof(mirror) for mirror in MIRRORS.values()]
    for name, mirror in MIRRORS.items():
        for field, *_ in mirror._fields_:
            asked.append(f"offsetof({name}, {field})")
            wanted.append(getattr(mirror, field).offset)
    lines = "\n".join(f'  std::printf("%zu\\n", {question});' for question in asked)
    source, program = tmp_path / "sizes.cpp", tmp_path / "sizes"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include "
        f'"{ROOT}/csrc/include/flashsci_paged.h"\nint main() {{\n{lines}\n}}\n'
    )
    subprocess.run([compiler, "-std=c++17", str(source), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert dict(zip(asked, map(int, said.split()), strict=True)) == dict(
        zip(asked, wanted, strict=True)
    )
