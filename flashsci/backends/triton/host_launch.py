"""One kernel with everything but its tensors decided, and the device that it runs on."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from flashsci.ops import Saved

from .arguments import Inputs, Tangents


class Device(NamedTuple):
    index: int
    capability: tuple[int, int] | None  # None: the interpreter
    l2_bytes: int
    processors: int


@functools.cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(-1, None, 32 << 20, 1)
    found = torch.cuda.get_device_properties(device)
    return Device(
        device.index, (found.major, found.minor), found.L2_cache_size, found.multi_processor_count
    )


class Launch:
    """One kernel with everything but its tensors decided.

    The first launch with tensors of a kind (absent, aligned to 16 bytes, not aligned) goes through
    Triton's own path, which compiles. Later ones hand the compiled kernel its arguments directly:
    Triton would look at all of them again, at many times the cost.
    """

    def __init__(self, kernel, programs: int, arguments: dict):
        self.kernel, self.programs = kernel, programs
        # Triton 3.10 will no longer fuse multiplications with additions unless asked to.
        self.arguments = arguments | {"enable_fp_fusion": True}
        self.compiled: dict[int, Callable] = {}
        self.rest: list = []

    def __call__(self, *tensors) -> None:
        """tensors: the kernel's first arguments, before all others those of Inputs and Tangents as plain tuples, which
        Triton's launcher reads in half the time."""
        kind = groups = 0
        for x in tensors:
            if isinstance(x, tuple):
                groups += 1
                for y in x:
                    kind = 3 * kind + (0 if y is None else 1 if y.data_ptr() % 16 == 0 else 2)
            else:
                kind = 3 * kind + (0 if x is None else 1 if x.data_ptr() % 16 == 0 else 2)
        run = self.compiled.get(kind)
        if run is not None:
            run(*tensors, *self.rest)
            return
        named = [group(*x) for group, x in zip((Inputs, Tangents), tensors[:groups], strict=False)]
        compiled = self.kernel[(self.programs,)](*named, *tensors[groups:], **self.arguments)
        if compiled is not None:  # None: interpreted
            names = self.kernel.arg_names[len(tensors) :]
            self.rest = [unnamed(self.arguments[name]) for name in names]
            self.compiled[kind] = compiled[(self.programs, 1, 1)]


def unnamed(x):
    """Named tuples as plain ones."""
    return tuple(map(unnamed, x)) if isinstance(x, tuple) else x


def on_device_of(position: int):
    """Runs a function with the device of one of its arguments, Tensors or Saved, current."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            given = arguments[position]
            device = (given.tensors if isinstance(given, Saved) else given).q.device
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return function(*arguments)
            return function(*arguments)

        return wrapper

    return decorate
