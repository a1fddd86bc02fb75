"""The derivatives and mappings that torch wants of tensors, under transforms of any depth, and the check that an
entry point has them.

A tensor requires grad, has a tangent (``torch.func.jvp``, ``torch.autograd.forward_ad``), or is mapped by ``torch.vmap``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.call import derivatives
from flashsci.call.derivatives import Asked
from flashsci.call.torch_state import transforming, transforming_eagerly

_functorch = torch._C._functorch
_unwrapped, _level = _functorch.get_unwrapped, _functorch.maybe_get_level
_wrapped, _mapped = _functorch.is_functorch_wrapped_tensor, _functorch.is_batchedtensor
_legacy = _functorch.is_legacy_batchedtensor


def asked(x: Tensor) -> Asked:
    """The flags of ``x`` at any depth: each of functorch's transforms wraps a tensor once, and hides the levels
    below."""
    if not transforming_eagerly():
        found = Asked.REVERSE if x.requires_grad and torch.is_grad_enabled() else Asked.NOTHING
        return found | Asked.MAPPED if _legacy(x) else found
    found = Asked.NOTHING
    stack: list[Any] = []  # the transforms exited on the way
    recording, along = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    try:
        while True:
            depth = max(_level(x), 0) if _wrapped(x) else 0
            # A tensor answers only for its own level, and only while that level is the innermost one.
            while _functorch.get_dynamic_layer_stack_depth() > depth:
                recording, along = _outside(recording, along)
                stack.append(_functorch.pop_dynamic_layer_stack())
            if (depth and _mapped(x)) or _legacy(x):
                found |= Asked.MAPPED
            else:
                if recording and x.requires_grad:
                    found |= Asked.REVERSE
                if along and _has_tangent(x):
                    found |= Asked.FORWARD
            if not depth:
                return found
            x = _unwrapped(x)
    finally:
        while stack:
            _functorch.push_dynamic_layer_stack(stack.pop())


def _outside(recording: bool, along: bool) -> tuple[bool, bool]:
    """Whether the level around the innermost transform records gradients, and tangents: not if they were off when it
    began."""
    inner = _functorch.peek_interpreter_stack()
    if inner.key() == _functorch.TransformType.Grad:
        recording = recording and _functorch.CGradInterpreterPtr(inner).prevGradMode()
    elif inner.key() == _functorch.TransformType.Jvp:
        along = along and _functorch.CJvpInterpreterPtr(inner).prevFwdGradMode()
    return recording, along


def _has_tangent(x: Tensor) -> bool:
    return x.is_floating_point() and torch._VF._unpack_dual(x, level=0)[1] is not None


def wanted(x: Tensor | None) -> bool:
    """Whether a call with ``x`` must have a derivative by it, in either mode."""
    if x is None:
        return False
    if torch.compiler.is_compiling() or not transforming_eagerly():
        return x.requires_grad and torch.is_grad_enabled()
    return bool(asked(x) & (Asked.REVERSE | Asked.FORWARD))


def is_mapped(x: Tensor) -> bool:
    """Whether ``torch.vmap`` maps a tensor; the host then cannot read its values."""
    return not torch.compiler.is_compiling() and transforming_eagerly() and Asked.MAPPED in asked(x)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a derivative is wanted by any of these."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    if torch.compiler.is_compiling() or not transforming_eagerly():
        return False
    return any(map(wanted, tensors))


def check(name: str, **given: Tensor | None) -> None:
    """Refuse derivatives and mappings that the rules of an entry point do not have.

    Args:
        name: a key of :data:`flashsci.call.derivatives.ENTRIES`.
        given: its tensor arguments, by name.

    Raises:
        ValueError: as :func:`flashsci.call.derivatives.refuse`.
    """
    rules = derivatives.ENTRIES[name].rules
    present = {n: x for n, x in given.items() if x is not None}
    if torch.compiler.is_compiling():
        lacking = [n for n in present if not (rules[n].forward and rules[n].mapped)]
        if transforming():
            from flashsci.call.undifferentiable import Undifferentiable  # imports the compiler

            for n in lacking:
                Undifferentiable.apply(present[n], name, n, torch.is_grad_enabled())
        elif torch.is_grad_enabled():
            derivatives.refuse(name, Asked.REVERSE, [n for n in lacking if present[n].requires_grad])
        return
    if not transforming_eagerly():  # nearly always: little to check
        recording = torch.is_grad_enabled()
        if not any((recording and x.requires_grad) or _legacy(x) for x in present.values()):
            return
    found = {n: asked(x) for n, x in present.items()}
    for mode in Asked:
        derivatives.refuse(name, mode, [n for n, x in found.items() if mode in x])


def within_second_order() -> bool:
    """Whether the transforms around a call ask for at most two derivatives, at most one of them in forward mode.

    A compiler hides them: False if it traces any.
    """
    if torch.compiler.is_compiling():
        return not transforming()
    kinds = [layer.key() for layer in _functorch.get_interpreter_stack() or ()]
    forward = max(kinds.count(_functorch.TransformType.Jvp), int(torch.autograd.forward_ad._current_level >= 0))
    return forward < 2 and forward + kinds.count(_functorch.TransformType.Grad) <= 2
