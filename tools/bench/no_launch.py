"""The cuda and triton backends on CPU tensors, up to the launch of a kernel: to time and test the Python before it.

Everything that Python does for a call on a GPU is done, and one C function with the same number of arguments is
called, which does nothing: results are uninitialised memory. Missing are the launch itself (3 to 5 us), torch's
allocator of CUDA memory, and autograd's thread for a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import flashsci
from flashsci.backends import cuda, triton
from flashsci.backends.cuda import prepared
from flashsci.backends.triton import launcher
from flashsci.call import plans
from flashsci.call.problem import Problem
from flashsci.choice import choose, differentiate
from flashsci.choice.gradients import Choice, named

attention = flashsci.attention  # binds the functions, and loads their modules
varlen = sys.modules["flashsci.api.varlen"]


class Library:
    """In place of the compiled one: its functions succeed at once."""

    def __init__(self) -> None:
        for name in prepared.PARAMETERS:
            # Any function that ignores its arguments and does not return 0; each with its own argument types.
            setattr(self, name, ctypes.CDLL(None)["getpid"])


def _prepare(*_: Any) -> torch.Tensor:
    return torch.zeros(8, dtype=torch.uint8)


class Launch(launcher.Launch):
    """A handle of a kernel that is never compiled."""

    def _compile(self, kind: int, tensors: tuple[Any, ...]) -> None:
        function = ctypes.CDLL(None)["getpid"]
        self.compiled[kind] = lambda pointers: function()


def _chosen(problem: Problem, name: str, strict: bool = False) -> Choice:
    return named("cuda" if name == "auto" else name)


def keep_memory() -> None:
    """Let the C library keep memory that torch frees, like torch's allocator of CUDA memory: otherwise the system
    is asked again, now and then."""
    function = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc
    if function is not None:
        for parameter in (-1, -2, -3):  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD
            function(parameter, 1 << 28)


@contextlib.contextmanager
def no_launches() -> Iterator[None]:
    """Inside, tensors of the CPU are those of a Hopper GPU to both backends, and "auto" is cuda."""
    with contextlib.ExitStack() as stack:

        def replace(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value, create=True))

        for module in (cuda, triton):
            replace(module, "unavailable", lambda: None)
            replace(module, "rejects", lambda problem: None)
        replace(cuda.library, "load", lambda: None)
        replace(cuda.library, "handle", Library())
        replace(cuda.library, "fills_results", lambda: False)
        replace(cuda, "backward_kernels", lambda *_: (90, None))
        replace(prepared, "_stream_of", lambda index: 0)
        replace(choose, "choose", _chosen)
        for name in ("cuda_prepared_forward", "cuda_prepared_backward"):
            replace(torch.ops.flashsci, name, _prepare)
        replace(triton.plans.dense, "Launch", Launch)
        # As for tensors on a GPU, contents of offsets are not looked at.
        replace(varlen, "contents_are_seen", lambda q, validate: validate)
        before = dict(plans.plans)
        _forget()
        try:
            yield
        finally:
            _forget()
            plans.plans.update(before)


def _forget() -> None:
    plans.plans.clear()
    triton.plans.dense.plan.cache_clear()
    differentiate._gradients_of.cache_clear()
