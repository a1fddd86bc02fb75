"""Collectives that make gloo release its tensors before the interpreter ends.

A thread of gloo runs a collective, wakes the waiting thread, and only then releases the tensors. If Python knows a
tensor, the release takes Python's lock. A thread that asks for this lock while the interpreter ends is ended there.
That is in a destructor, where C++ does not allow it: the process aborts, "terminate called without an active
exception", after all its results. ``destroy_process_group()`` ends the threads first, but only those of a group that
nothing else holds, and a DeviceMesh holds its groups (https://github.com/pytorch/pytorch/pull/179291).

Therefore a collective here uses tensors that nothing else knows, aliases of the caller's, and the end of a process
waits until they are released.

A forked child has none of the threads that run its parent's collectives, so it would wait forever. It is refused.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from flashsci.errors import BackendError

PATIENCE = 5.0  # seconds; tensors that are held for longer are not held by gloo
_lent: list[ReferenceType[Tensor]] = []
_parents: list[Any] = []  # the process group that this process inherited by a fork


def collective(operator: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """The result of a functional collective on x, after a wait. A compiler gets the collective itself: it holds no
    aliases."""
    wait: Callable[[Tensor], Tensor] = torch.ops._c10d_functional.wait_tensor
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return wait(operator(x, *arguments))
    if _parents and dist.group.WORLD is _parents[0]:
        raise BackendError(
            "flashsci: this process was forked after init_process_group, and the threads of its process group are the parent's alone; "
            "start workers by spawn, or call destroy_process_group and init_process_group in the child"
        )
    given = x.detach()
    found = operator(given, *arguments)
    _lent[:] = [*(one for one in _lent if one() is not None), ref(given), ref(found)]
    return wait(found).detach()


def _inherit() -> None:
    _parents[:] = [dist.group.WORLD] if dist.is_available() and dist.is_initialized() else []


os.register_at_fork(after_in_child=_inherit)


@atexit.register
def _settle() -> None:
    """Wait before the interpreter ends, while threads still get its lock: a sleep leaves it to them."""
    end = time.monotonic() + PATIENCE
    while any(one() is not None for one in _lent) and time.monotonic() < end:
        time.sleep(0.001)
