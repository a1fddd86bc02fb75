"""Collectives whose tensors gloo has let go of before the interpreter ends.

A thread of gloo runs a collective, wakes who waits for it, and only then lets go of the tensors. Where Python knows a tensor that takes
Python's lock, and a thread that asks for it while the interpreter ends is ended there. That is in a destructor, where C++ does not
allow it: the process aborts, "terminate called without an active exception", after all its results. ``destroy_process_group()``
ends the threads first, but only of a group that nothing else holds, and a DeviceMesh holds its groups
(https://github.com/pytorch/pytorch/pull/179291).

Hence a collective has tensors here that nobody else knows, aliases of the caller's, and the end of a process waits until they are gone.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

PATIENCE = 5.0  # seconds; what is kept for longer, something else than gloo keeps
_lent: list[ReferenceType[Tensor]] = []


def collective(operator: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """What a functional collective makes of x, waited for. A compiler has it as it is: it keeps no aliases."""
    wait: Callable[[Tensor], Tensor] = torch.ops._c10d_functional.wait_tensor
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return wait(operator(x, *arguments))
    given = x.detach()
    found = operator(given, *arguments)
    _lent[:] = [*(one for one in _lent if one() is not None), ref(given), ref(found)]
    return wait(found).detach()


@atexit.register
def _settle() -> None:
    """Before the interpreter ends, threads still get its lock: a sleep leaves it to them."""
    end = time.monotonic() + PATIENCE
    while any(one() is not None for one in _lent) and time.monotonic() < end:
        time.sleep(0.001)
