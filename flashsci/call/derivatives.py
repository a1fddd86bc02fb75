"""The table of which tensor arguments have gradients, tangents, second derivatives and a batching rule.

torch asks for them in several ways, and kernels see none of these. A request that the table does not grant raises an
error (flashsci/call/transforms.py): it never gives zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag
from typing import NamedTuple

from flashsci.call import kinds
from flashsci.call.kinds import EVERY, FIXED, PLACES, Dense, DerivativeRule, Packed, Scales, Seeded
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.call.map_tensors import MapTensors
from flashsci.call.ops import Tangents
from flashsci.call.paged_ops import PagedTensors
from flashsci.call.residual_ops import ResidualCall


class Entry(NamedTuple):
    """The rules of one entry point, and the words of its refusals."""

    rules: Mapping[str, DerivativeRule]
    subject: str = ""
    verb: str = "have"
    reverse: str = ""  # what to do instead, in each mode
    forward: str = ""
    mapped: str = ""


def _each(names: str, rule: DerivativeRule) -> dict[str, DerivativeRule]:
    return dict.fromkeys(names.split(), rule)


# Fused kernels treat out and lse as functions of the other arguments; here they are not. They refuse where a
# derivative is computed: a call within a backward often has tensors that require grad, and needs no derivative.
_GIVEN = EVERY._replace(
    lacking=dict.fromkeys(("triton", "cuda"), "its second derivative is that of the forward's own out and lse")
)

_DENSE = kinds.rules(Dense, Seeded, Scales)
_PACKED = kinds.rules(Packed, Seeded, Scales)
_PART = DerivativeRule(reverse=True, second=True)  # of a tensor that is split over ranks

_ENDED = "call inside torch.no_grad() or torch.inference_mode(), or"
_DETACHED = "detach what is a constant, or"
_BY_SEVERAL = Entry(
    _each("q k v bias key_weight", _PART) | _each("mask", FIXED),
    "calls over several ranks",
    forward="use reverse mode (torch.autograd.grad)",
    mapped="give the samples as leading dims",
)
_PAGED = Entry(
    kinds.rules(PagedTensors) | _each("out", FIXED),
    "paged calls",
    reverse=f"{_ENDED} train with flashsci.varlen_attention",
    forward=f"{_DETACHED} differentiate flashsci.varlen_attention",
    mapped="give the samples as sequences of one call",
)

_MAP = kinds.rules(MapTensors)

#: The entry points: those of flashsci, those of flashsci.distributed, and ``attention`` and ``varlen_attention`` of 8-bit floats.
ENTRIES: dict[str, Entry] = {
    "attention": Entry(_DENSE),
    "explain": Entry(_DENSE),
    "varlen_attention": Entry(_PACKED),
    "float8": Entry(
        dict.fromkeys(_DENSE | _PACKED, FIXED),
        "attention of float8_e4m3fn tensors",
        "has",
        reverse=f"{_ENDED} train in 16 bits",
        forward=f"{_DETACHED} differentiate the call in 16 bits",
        mapped="give the samples as leading dims, or as sequences of flashsci.varlen_attention",
    ),
    "residual_attention": Entry(kinds.rules(ResidualCall)),
    "attention_backward": Entry(
        {n: rule for n, rule in (_DENSE | _PACKED).items() if n not in ("sink", "pair_gate", *Scales._fields)}
        | _each("dout out lse dlse", _GIVEN)
        | _each(" ".join(Tangents._fields), _GIVEN)
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
    "attention_weights": Entry(_MAP | _each("rows columns", PLACES)),
    "attention_statistics": Entry(_MAP),
    "forward_laplacian": Entry(kinds.rules(LaplacianTensors)),
    "merge": Entry(_each("outs lses", EVERY)),
    "sdpa": Entry(_each("query key value attn_mask", EVERY)),
    "dropout_mask": Entry({"dropout_seed": PLACES}),
    "distributed.attention": _BY_SEVERAL,
    "distributed.varlen_attention": _BY_SEVERAL._replace(
        rules=_each("q k v bias key_weight", _PART) | _each("cu_seqlens", FIXED)
    ),
    "distributed.triangle_attention": _BY_SEVERAL._replace(rules=_each("q k v bias", _PART) | _each("mask", FIXED)),
    "distributed.shard": Entry({"x": EVERY}),
    "distributed.unshard": _BY_SEVERAL._replace(rules={"x": _PART}),
}


class Asked(Flag):
    """The derivatives and mappings that torch wants of a tensor."""

    NOTHING = 0
    REVERSE = 1
    FORWARD = 2
    MAPPED = 4


def lacks(backend: str, argument: str) -> str | None:
    """The reason why a backend has no derivatives of attention by an argument, or None."""
    return _DENSE[argument].lacking.get(backend)


def refuse(name: str, mode: Asked, arguments: list[str]) -> None:
    """Refuse the arguments of entry point ``name`` that do not have all that is asked of them.

    Raises:
        ValueError: names the arguments, the derivatives wanted, and the alternative.
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


def _allows(rule: DerivativeRule, mode: Asked) -> bool:
    if mode is Asked.REVERSE:
        return rule.reverse
    return rule.forward if mode is Asked.FORWARD else rule.mapped
