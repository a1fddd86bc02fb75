"""The state of torch around a call: functorch transforms, forward-mode levels, CUDA graphs, autocast, TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_tracing_state = torch._C._get_tracing_state
_set_tracing_state: Any = getattr(torch._C, "_set_tracing_state")  # noqa: B009  (torch's stubs lack it)
modes = torch._C._len_torch_dispatch_stack  # the number of dispatch modes that see ops


def is_traced() -> bool:
    """Whether torch.jit.trace records ops: sizes are then tensors."""
    return _tracing_state() is not None


def tracer_paused() -> AbstractContextManager[None]:
    """A context in which sizes are numbers, also under torch.jit.trace, which records no decision that is made from
    them."""
    return _paused() if is_traced() else nullcontext()


@contextmanager
def _paused() -> Iterator[None]:
    state = _tracing_state()
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


def is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph records operations on ``x``; the host then cannot read its values."""
    return x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def is_recorded() -> bool:
    """Whether a compiler, a tracer or a dispatch mode sees a call's ops.

    Then the call becomes part of a program that runs later, or runs with other than real tensors.
    """
    return torch.compiler.is_compiling() or is_traced() or torch._C._len_torch_dispatch_stack() > 0


_mode_of, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY


def is_readable(x: Tensor) -> bool:
    """Whether the host can look at numbers: not a compiler's or tracer's, which would keep them, nor those of a tensor without
    memory."""
    if torch.compiler.is_compiling() or is_traced() or _mode_of(_PROXY) is not None:
        return False
    return type(x) is Tensor and not x.is_meta


def hides_sizes(*tensors: Tensor) -> bool:
    """Whether sizes may be symbols: under a compiler, or a mode that traces for any length. No plan is kept of such a call."""
    if torch.compiler.is_compiling():
        return True
    return modes() > 0 and any(type(n) is not int for x in tensors for n in x.shape)


def count_flops() -> None:
    """Give flop counters that see this call's ops their formulas."""
    if not torch.compiler.is_compiling() and modes() > 0:
        from flashsci.call.flops import teach

        teach()


def holds(condition: Any, unknown: bool = False) -> bool:
    """A condition on sizes or strides, as a bool.

    ``unknown`` if a compiler cannot tell, because they depend on the data, or if a tracer would keep the answer for
    the sizes that it saw.
    """
    if isinstance(condition, Tensor):
        return unknown
    if type(condition) is bool and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return bool(guard_or_true(condition) if unknown else guard_or_false(condition))


def sizes_from_data(*tensors: Tensor) -> bool:
    """Whether a compiler cannot compare the sizes of these: they are numbers that other tensors hold, such as a count
    of nonzero entries."""
    empty = [x.numel() == 0 for x in tensors]
    return any(holds(x, unknown=True) != holds(x) for x in empty)


def transforming() -> bool:
    """Whether a functorch transform or forward-mode level is active, which sees only the results of an
    autograd.Function; for a compiler, among the transforms that it traces."""
    if torch.compiler.is_compiling():
        return _transforms_traced() or torch.autograd.forward_ad._current_level >= 0
    return transforming_eagerly()


def _transforms_traced() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


# Asked once per trace: a compiler enters the transforms that it traces, but cannot follow the question.
_transforms_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transforming_eagerly() -> bool:
    """:func:`transforming` for callers that no compiler traces: another check for that would be part of every small
    call."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


# The function behind that attribute, at an eighth of its time.
_precision_of = getattr(torch._C, "_get_fp32_precision_getter", None)


def rounds_products(dtype: torch.dtype) -> bool:
    """Whether plain PyTorch, and SDPA with it, may multiply this dtype on a GPU with fewer bits: float32 in TF32."""
    if dtype is not torch.float32:
        return False
    if _precision_of is not None:
        return bool(_precision_of("cuda", "matmul") == "tf32")
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# As for choose.decide: asked once per trace. A compiler traces again if the switch has changed.
rounds_products._dynamo_marked_constant = True  # type: ignore[attr-defined]


def casts_to(q: Tensor) -> torch.dtype | None:
    """The dtype that :func:`autocast` casts to, or None if it does not cast."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in autocast's dtype where autocast is on, as in SDPA: floating tensors except float64."""
    dtype = casts_to(q)
    if dtype is None or (q.dtype is dtype and k.dtype is dtype and v.dtype is dtype):
        return q, k, v
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
