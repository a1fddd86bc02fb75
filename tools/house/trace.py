"""Python frames of flashsci from `attention` to the launch of a kernel, on the interpreted Triton backend.

    PYTHONPATH=TREE python tools/house/trace.py        one JSON object: {call: [frames, files]}

It is a script without imports from this repository, so that it can count another revision, given by PYTHONPATH.
Frames of other packages are not counted; that of the launch is the last one counted.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

if __name__ == "__main__":  # the finder of an editable installation goes before PYTHONPATH
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]

import torch

import flashsci

PACKAGE = os.path.dirname(str(flashsci.__file__)) + os.sep
CALLS = ("first", "second", "third")


def launches() -> set:
    """The code that launches a kernel: `Launch.__call__`, in whichever module of flashsci defines it."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("flashsci.")]
    found = {m.Launch.__call__.__code__ for m in modules if isinstance(getattr(m, "Launch", None), type)}
    if not found:
        raise RuntimeError("no module of flashsci defines the class Launch: name the new class in tools/house/trace.py")
    return found


def frames(call, ends: set) -> list[str]:
    """The files of the package's frames up to the first launch, in order, one for each frame."""
    found: list[str] = []
    launched = False

    def profile(frame, event, _):
        nonlocal launched
        if event != "call" or launched:
            return
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            found.append(file[len(PACKAGE) :])
        launched = frame.f_code in ends

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    if not launched:
        raise RuntimeError("a call launched no kernel by Launch.__call__: there is no end to count to")
    return found


def options() -> dict[str, dict]:
    return {
        "no option": {},
        "bias [Sq, Sk]": {"bias": torch.randn(16, 16)},
        "bias [H, Sq, Sk]": {"bias": torch.randn(2, 16, 16)},
        "sink": {"sink": torch.randn(2)},
    }


def main() -> None:
    tree = os.path.realpath(os.environ["PYTHONPATH"])
    if not os.path.realpath(PACKAGE).startswith(tree + os.sep):
        raise RuntimeError(f"the package imported is {PACKAGE}, not that of {tree}")
    flashsci.attention(*(torch.randn(1, 1, 4, 8) for _ in range(3)), backend="triton")  # imports
    ends, found = launches(), {}
    for name, kwargs in options().items():
        for gradients in (False, True):
            q, k, v = (torch.randn(1, 2, 16, 16, requires_grad=gradients) for _ in range(3))
            for nth in CALLS:
                files = frames(partial(flashsci.attention, q, k, v, backend="triton", **kwargs), ends)
                way = "with gradients" if gradients else "without gradients"
                found[f"{name}, {way}, {nth}"] = [len(files), len(set(files))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
