"""One kernel with everything but its tensors decided, and the device that it runs on."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
from triton import knobs

from flashsci.backends.triton.kernels.groups import Operands, TangentOperands


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
    return Device(device.index, (found.major, found.minor), found.L2_cache_size, found.multi_processor_count)


class Launch:
    """One kernel with everything but its tensors decided.

    The first launch with tensors of a kind (absent, aligned to 16 bytes, not aligned) on a device takes Triton's own
    path, which compiles. Later launches give the compiled kernel its arguments directly: Triton would examine all of
    them again, at many times the cost.
    """

    def __init__(self, kernel, programs: int, arguments: dict):
        self.kernel, self.programs = kernel, programs
        # Triton 3.10 will no longer fuse multiplications with additions unless asked to.
        self.arguments = arguments | {"enable_fp_fusion": True}
        self.compiled: dict[int, Callable] = {}

    def __call__(self, *tensors) -> None:
        """Launch. tensors: the kernel's first arguments, with those of Inputs and Tangents first, as plain tuples.
        The first of all is never None."""
        first = tensors[0]
        kind = 1 + (first[0] if isinstance(first, tuple) else first).get_device()
        pointers: list = []  # numbers: from a tensor the launcher would get them again, and ask the driver
        for x in tensors:
            if isinstance(x, tuple):
                group = []
                for y in x:
                    kind *= 3
                    if y is None:
                        group.append(None)
                    else:
                        pointer = y.data_ptr()
                        kind += 2 if pointer & 15 else 1
                        group.append(pointer)
                pointers.append(tuple(group))
            else:
                kind *= 3
                if x is None:
                    pointers.append(None)
                else:
                    pointer = x.data_ptr()
                    kind += 2 if pointer & 15 else 1
                    pointers.append(pointer)
        run = self.compiled.get(kind)
        if run is None:
            self._compile(kind, tensors)
        else:
            run(pointers)

    def _compile(self, kind: int, tensors: tuple) -> None:
        """The first launch of a kind."""
        groups = sum(isinstance(x, tuple) for x in tensors)
        named = [group(*x) for group, x in zip((Operands, *[TangentOperands] * 3), tensors[:groups], strict=False)]
        device = (tensors[0][0] if groups else tensors[0]).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            compiled = self.kernel[(self.programs,)](*named, *tensors[groups:], **self.arguments)
            if compiled is None:  # interpreted
                return
            names = self.kernel.arg_names[len(tensors) :]
            rest = [unnamed(self.arguments[name]) for name in names]
            self.compiled[kind] = launcher(compiled, self.programs, rest, device.index)


# Versions of Triton whose C launcher takes these arguments.
DIRECT = ("3.6.",)


def launcher(compiled, programs: int, rest: list, device: int) -> Callable[[list], None]:
    """A function that launches a compiled kernel, given its pointers: it adds all other arguments, and the device's
    current stream.

    Between a kernel and its launcher in C, Triton has hooks, and makes a record for them at every launch; this costs
    more than the launcher. If no hook is set, this function bypasses them.
    """
    triton_launch = compiled[(programs, 1, 1)]
    c_launch = fixed = None
    loaded = compiled.run
    if triton.__version__.startswith(DIRECT) and not (loaded.global_scratch_size or loaded.profile_scratch_size):
        c_launch = loaded.launch
        fixed = (
            compiled.function, loaded.launch_cooperative_grid, loaded.launch_pdl, None, None, compiled.packed_metadata,
            None, None, None,
        )  # fmt: skip
    current, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    entering, leaving = (getattr(hook, "calls", (hook,)) for hook in (enter, leave))

    def launch(pointers: list) -> None:
        if current() != device:
            with torch.cuda.device(device):
                return launch(pointers)
        hooked = runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave or entering or leaving
        if c_launch is None or hooked:
            triton_launch(*pointers, *rest)
        else:
            c_launch(programs, 1, 1, stream_of(device), *fixed, *pointers, *rest)
        return None

    return launch


def unnamed(x):
    """Named tuples as plain tuples, which Triton's launcher reads in half the time."""
    return tuple(map(unnamed, x)) if isinstance(x, tuple) else x
