"""One table of which tensor arguments have gradients, tangents, second derivatives and a batching rule, and the function that reads it.

torch asks a call for derivatives in several ways: a tensor requires grad, has a tangent (``torch.func.jvp``, ``forward_ad``), or is
mapped by ``torch.vmap``, each at any depth of transforms. A kernel sees none of this. So every entry point asks here, and a request
that the table does not grant raises an error: it never gives zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.tracing import transforming, transforming_eagerly


class Rule(NamedTuple):
    """What one tensor argument has."""

    reverse: bool = False
    """A gradient."""
    forward: bool = False
    """A tangent."""
    second: bool = False
    """Second derivatives."""
    mapped: bool = False
    """A batching rule under ``torch.vmap``."""
    lacking: Mapping[str, str] = {}
    """Backends that have no derivative by this argument although others do, each with its reason. The registry reads it."""


class Entry(NamedTuple):
    """The rules of one entry point, and the words of its refusals."""

    rules: Mapping[str, Rule]
    subject: str = ""
    verb: str = "have"
    reverse: str = ""  # what to do instead, in each mode
    forward: str = ""
    mapped: str = ""


EVERY = Rule(True, True, True, True)
PLACES = Rule(mapped=True)  # bools, integers and seeds: constants to any derivative
FIXED = Rule()


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_SLOPES = EVERY._replace(
    lacking={
        "triton": "ALiBi slopes have no derivative in the Triton kernels; detach them, write learnt ones as a bias, or use "
        "backend='reference'"
    }
)
_WEIGHTS = EVERY._replace(
    lacking={
        "sdpa": "SDPA takes key_weight as its logarithm, whose derivative at zero is lost; use backend='triton' or 'reference'"
    }
)
# Fused kernels take out and lse for functions of the other arguments, which here they are not. They refuse where a derivative
# is computed: a call within a backward often has tensors that require grad, and needs no derivative.
_GIVEN = EVERY._replace(
    lacking=dict.fromkeys(
        ("triton", "cuda"), "its second derivative is that of the forward's own out and lse"
    )
)

_OFFSETS = _each("cu_seqlens_q cu_seqlens_k", PLACES)
_SCALES = _each("q_scale k_scale v_scale", FIXED)
_PACKED = {
    **_each("q k v bias sink", EVERY), "key_weight": _WEIGHTS, "alibi_slopes": _SLOPES, "dropout_seed": PLACES, **_SCALES
}  # fmt: skip
_DENSE = {**_PACKED, "mask": PLACES}
_PART = Rule(reverse=True, second=True)  # of a tensor that is split over ranks

_ENDED = "call inside torch.no_grad() or torch.inference_mode(), or"
_DETACHED = "detach what is a constant, or"
_BY_SEVERAL = Entry(
    _each("q k v bias key_weight", _PART) | _each("mask", FIXED),
    "calls over several ranks",
    forward="use reverse mode (torch.autograd.grad, torch.func.jacrev)",
    mapped="give the samples as leading dims",
)
_PAGED = Entry(
    _each("q k_cache v_cache block_table seqused_k cu_seqlens_q sink k_scale v_scale out", FIXED),
    "paged calls",
    reverse=f"{_ENDED} train with flashsci.varlen_attention",
    forward=f"{_DETACHED} differentiate flashsci.varlen_attention",
    mapped="give the samples as sequences of one call",
)

#: The entry points: those of flashsci, those of flashsci.distributed, and ``attention`` and ``varlen_attention`` of 8-bit floats.
ENTRIES: dict[str, Entry] = {
    "attention": Entry(_DENSE),
    "explain": Entry(_DENSE),
    "varlen_attention": Entry(_PACKED | _OFFSETS),
    "float8": Entry(
        dict.fromkeys(_DENSE | _OFFSETS, FIXED),
        "attention of float8_e4m3fn tensors",
        "has",
        reverse=f"{_ENDED} train in 16 bits",
        forward=f"{_DETACHED} differentiate the call in 16 bits",
        mapped="give the samples as leading dims, or as sequences of flashsci.varlen_attention",
    ),
    "residual_attention": Entry(_each("q k v bias", EVERY) | _each("dropout_seed", PLACES)),
    "attention_backward": Entry(
        _each("dout q k v out lse dlse bias key_weight", _GIVEN)
        | _each("mask dropout_seed", PLACES)
        | {"alibi_slopes": _SLOPES, **_OFFSETS}
    ),
    "paged_attention": _PAGED,
    "write_kv_cache": _PAGED._replace(
        rules=_each("key value k_cache v_cache slot_mapping k_scale v_scale", FIXED),
        mapped="give the tokens of all samples in one call",
    ),
    "quantize": Entry(
        {"x": PLACES, "cu_seqlens": FIXED},
        "rounding to 8 bits",
        "has",
        reverse="call inside torch.no_grad(), or give x.detach()",
        forward="give x.detach()",
        mapped="give the samples as sequences of one call",
    ),
    "merge": Entry(_each("outs lses", EVERY)),
    "sdpa": Entry(_each("query key value attn_mask", EVERY)),
    "dropout_mask": Entry({"dropout_seed": PLACES}),
    "distributed.attention": _BY_SEVERAL,
    "distributed.varlen_attention": _BY_SEVERAL._replace(
        rules=_each("q k v bias key_weight", _PART) | _each("cu_seqlens", FIXED)
    ),
    "distributed.triangle_attention": _BY_SEVERAL._replace(
        rules=_each("q k v bias", _PART) | _each("mask", FIXED)
    ),
    "distributed.shard": Entry({"x": EVERY}),
    "distributed.unshard": _BY_SEVERAL._replace(rules={"x": _PART}),
}


class Asked(Flag):
    """What torch asks of a tensor."""

    NOTHING = 0
    REVERSE = 1
    FORWARD = 2
    MAPPED = 4


_functorch = torch._C._functorch
_unwrapped, _level = _functorch.get_unwrapped, _functorch.maybe_get_level
_wrapped, _mapped = _functorch.is_functorch_wrapped_tensor, _functorch.is_batchedtensor
_legacy = _functorch.is_legacy_batchedtensor


def asked(x: Tensor) -> Asked:
    """What torch asks of ``x`` at any depth: functorch's transforms wrap a tensor once each, and hide what is below."""
    if not transforming_eagerly():
        found = Asked.REVERSE if x.requires_grad and torch.is_grad_enabled() else Asked.NOTHING
        return found | Asked.MAPPED if _legacy(x) else found
    found = Asked.NOTHING
    stack: list[Any] = []  # the transforms left behind
    recording, along = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    try:
        while True:
            depth = max(_level(x), 0) if _wrapped(x) else 0
            # A tensor answers for its own level alone, and only while that is the innermost one.
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
    """Whether the level around the innermost transform records gradients, and tangents: not where they were off when it began."""
    inner = _functorch.peek_interpreter_stack()
    if inner.key() == _functorch.TransformType.Grad:
        recording = recording and _functorch.CGradInterpreterPtr(inner).prevGradMode()
    elif inner.key() == _functorch.TransformType.Jvp:
        along = along and _functorch.CJvpInterpreterPtr(inner).prevFwdGradMode()
    return recording, along


def _has_tangent(x: Tensor) -> bool:
    return x.is_floating_point() and torch._VF._unpack_dual(x, level=0)[1] is not None


def wanted(x: Tensor | None) -> bool:
    """Whether a call with ``x`` is to have a derivative by it, in either mode."""
    if x is None:
        return False
    if torch.compiler.is_compiling() or not transforming_eagerly():
        return x.requires_grad and torch.is_grad_enabled()
    return bool(asked(x) & (Asked.REVERSE | Asked.FORWARD))


def is_mapped(x: Tensor) -> bool:
    """Whether ``torch.vmap`` maps a tensor, whose values the host then cannot read."""
    return transforming_eagerly() and Asked.MAPPED in asked(x)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a derivative is wanted by any of these."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    if torch.compiler.is_compiling() or not transforming_eagerly():
        return False
    return any(map(wanted, tensors))


def lacks(backend: str, argument: str) -> str | None:
    """Why a backend has no derivatives of attention by an argument, or None."""
    return _DENSE[argument].lacking.get(backend)


def check(name: str, **given: Tensor | None) -> None:
    """Refuse what the rules of an entry point do not have.

    Args:
        name: a key of :data:`ENTRIES`.
        given: its tensor arguments, by name.

    Raises:
        ValueError: names the arguments, what is asked of them, and what to do instead.
    """
    rules = ENTRIES[name].rules
    present = {n: x for n, x in given.items() if x is not None}
    if torch.compiler.is_compiling():
        lacking = [n for n in present if not (rules[n].forward and rules[n].mapped)]
        if transforming():
            from flashsci.autograd import Undifferentiable  # imports the compiler

            for n in lacking:
                Undifferentiable.apply(present[n], name, n, torch.is_grad_enabled())
        elif torch.is_grad_enabled():
            refuse(name, Asked.REVERSE, [n for n in lacking if present[n].requires_grad])
        return
    found = {n: asked(x) for n, x in present.items()}
    for mode in Asked:
        refuse(name, mode, [n for n, x in found.items() if mode in x])


def refuse(name: str, mode: Asked, arguments: list[str]) -> None:
    """Refuse the arguments that do not have what is asked of them all.

    Raises:
        ValueError: as :func:`check`.
    """
    entry = ENTRIES[name]
    names = [n for n in arguments if not _allows(entry.rules[n], mode)]
    if not names:
        return
    listed, one = ", ".join(names), len(names) == 1
    start = f"{entry.subject} {entry.verb} no"
    if mode is Asked.REVERSE:
        asks = f"{start} gradients and {listed} require{'s' if one else ''} one; {entry.reverse}"
    elif mode is Asked.FORWARD:
        asks = f"{start} forward-mode derivatives and {listed} ha{'s' if one else 've'} a tangent; {entry.forward}"
    else:
        asks = f"{start} batching rule and torch.vmap maps {listed}; {entry.mapped}"
    raise ValueError(asks)


def _allows(rule: Rule, mode: Asked) -> bool:
    if mode is Asked.REVERSE:
        return rule.reverse
    return rule.forward if mode is Asked.FORWARD else rule.mapped
