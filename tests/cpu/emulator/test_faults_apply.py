"""Injected faults: the text that each replaces stands once in the source, so that the slow tests that look for it can be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.emulator import (
    test_decode_kernel,
    test_forward_kernel,
    test_fp8_kernel,
    test_paged_kernel,
    test_sm80_kernel,
    test_small_kernel,
    test_triangle_backward_kernel,
    test_triangle_forward_kernel,
)

SM90 = Path(__file__).resolve().parents[3] / "csrc" / "sm90"
PAGED = [(generation, fault) for generation, _, fault in (p.values for p in test_paged_kernel.FAULTS)]
CHANGES = [
    *test_decode_kernel.FAULTS.values(),
    *test_forward_kernel.FAULTS.values(),
    *test_forward_kernel.OTHER_TILES,
    *test_fp8_kernel.FAULTS.values(),
    *test_fp8_kernel.only("Tiles64"),
    *test_triangle_backward_kernel.FAULTS.values(),
    *test_triangle_forward_kernel.FAULTS.values(),
    *test_sm80_kernel.FAULTS.values(),
    *((f"../sm80/small/{file}", old, new) for file, old, new in test_small_kernel.FAULTS.values()),
    *((test_paged_kernel.file_of(f[0], generation), *f[1:]) for generation, f in PAGED),
]


@pytest.mark.parametrize("file", sorted({file for file, _, _ in CHANGES}))
def test_replaced_text_stands_once(file):
    text = (SM90 / file).read_text()
    for name, old, new in CHANGES:
        assert name != file or (text.count(old) == 1 and old != new), f"{file} has {text.count(old)} times {old!r}"
