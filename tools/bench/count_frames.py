"""Count the Python frames of the package between an entry point and the launch of a kernel, by the form of the call.

``python -m tools.bench.count_frames`` prints them for a first, a second and a third call. The backend is Triton; on
machines without a GPU set TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import flashsci

ROOT = os.path.dirname(flashsci.__file__) + os.sep
LAUNCH = os.path.join("backends", "triton", "launcher.py")


def frames_to_launch(call: Callable[[], Any]) -> list[str]:
    """The functions of the package that a call enters, up to the first launch, in order."""
    seen: list[str] = []
    launched = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal launched
        name = frame.f_code.co_filename
        if event == "call" and not launched and name.startswith(ROOT):
            file = name.removeprefix(ROOT)
            seen.append(f"{file}:{frame.f_code.co_name}")
            launched = file == LAUNCH and frame.f_code.co_name == "__call__"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    if not launched:
        raise ValueError("the call launched no Triton kernel")
    return seen


def forms() -> dict[str, dict[str, torch.Tensor]]:
    """The options of the calls to count, by name: for q of ``[1, 2, 16, 16]``."""
    sink = torch.zeros(2)
    return {
        "plain": {},
        "bias [1, H, Sq, Sk]": {"bias": torch.randn(1, 2, 16, 16)},
        "bias [H, Sq, Sk]": {"bias": torch.randn(2, 16, 16)},
        "bias [Sq, Sk]": {"bias": torch.randn(16, 16)},
        "mask [Sq, Sk]": {"mask": torch.ones(16, 16, dtype=torch.bool)},
        "key weights [Sk]": {"key_weight": torch.ones(16)},
        "sink": {"sink": sink},
        "sink and bias [Sq, Sk]": {"sink": sink, "bias": torch.randn(16, 16)},
    }


def count(options: dict[str, torch.Tensor], grad: bool = False) -> list[list[str]]:
    """The frames of a first, a second and a third call."""
    q, k, v = (torch.randn(1, 2, 16, 16, requires_grad=grad) for _ in range(3))

    def call() -> torch.Tensor:
        found: torch.Tensor = flashsci.attention(q, k, v, backend="triton", **options)
        return found

    return [frames_to_launch(call) for _ in range(3)]


if __name__ == "__main__":
    for name, options in forms().items():
        for grad in (False, True):
            counts = ", ".join(str(len(frames)) for frames in count(options, grad))
            print(f"{name}{', with gradients' if grad else ''}: {counts}")
