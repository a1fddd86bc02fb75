"""The bounded sets of variants, for which kernels are compiled, that generated cases draw from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashsci.testing.cases import (
    HEAD_DIMS,
    Variant,
)
from flashsci.testing.choices import SeededChoices


def variants(
    count: int = 64,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
    max_dim: int = 256,
    features: bool = True,
) -> list[Variant]:
    """A fixed list of at most ``count`` kernel variants covering every dtype, head dim and feature, and many pairs of them.

    ``features=False`` leaves out bias, key weights, mask, dropout and gradients of lse, which the simplest kernels
    lack.
    """
    # Each feature has choices of its own: a new feature does not change the others of any variant.
    choices, weights = SeededChoices(20), SeededChoices(22)
    slopes, sinks = SeededChoices(23), SeededChoices(24)
    scales, together = SeededChoices(25), SeededChoices(26)
    places, gates, learning = SeededChoices(28), SeededChoices(29), SeededChoices(30)
    dims = [d for d in HEAD_DIMS if max(d) <= max_dim]
    found: dict[Variant, None] = {}
    for i in range(4 * count):
        if len(found) == count:
            break
        rare = lambda n: features and choices.integer(1, n) == 1  # noqa: E731
        bias = choices.one_of(("pair", "pair", "key")) if rare(2) else None
        varlen = choices.integer(1, 4) == 1
        dim, dim_v = dims[i % len(dims)]
        weighted = features and weights.integer(1, 6) == 1
        variant = Variant(
            # A step of len(dims) moves on by one dtype: a head dim meets them all, round by round.
            dtype=dtypes[(i % len(dims) + i // len(dims)) % len(dtypes)],
            head_dim=dim,
            head_dim_v=dim_v,
            bias=bias,
            bias_float=bias is not None and rare(2),
            bias_grad=bias is not None and choices.integer(1, 3) > 1,
            key_weight=weights.one_of(("inputs", "float", "float")) if weighted else None,
            key_weight_grad=weighted and weights.integer(1, 4) > 1,
            alibi=features and slopes.integer(1, 8) == 1,
            sink=(together if weighted else sinks).one_of((None,) * (1 if weighted else 6) + ("inputs", "float"))
            if features
            else None,
            flipped=features and scales.integer(1, 10) == 1,
            mask=not varlen and rare(3),
            window=choices.integer(1, 3) == 1,
            softcap=choices.integer(1, 6) == 1,
            dropout=rare(6),
            varlen=varlen,
            lse_grad=rare(3),
        )
        if variant.softcap and (variant.bias or variant.alibi) and places.integer(1, 2) == 1:
            variant = replace(variant, caps_bias=True)
        if features and not varlen and gates.integer(1, 8) == 1:
            variant = replace(variant, gate=gates.one_of(("inputs", "float")))
        if variant.alibi and not (variant.sink or variant.gate):  # which Triton's slopes have no gradient beside
            variant = replace(variant, alibi_grad=learning.integer(1, 3) > 1)
        found[variant] = None
    return list(found)


def second_order_variants(count: int = 48, **limits: Any) -> list[Variant]:
    """The variants of :func:`variants` with tangents: for all tensors in two of three variants, else for some."""
    choices, sinks = SeededChoices(21), SeededChoices(27)
    found: dict[Variant, None] = {}
    for variant in variants(count, **limits):
        some = choices.one_of(("q", "k", "v", "b", "qk", "kv", "qb", "kvb"))
        everything = choices.integer(1, 3) > 1
        tangents = "qkvb" if everything else some
        if not variant.bias_grad:
            tangents = tangents.replace("b", "")
        if variant.key_weight_grad and (everything or variant.head_dim % 2 == 0):
            tangents += "w"
        if variant.gate and everything:
            tangents += "g"
        # With 16-bit results the steps of a sink's formula round by themselves, which the second order sees.
        sink = variant.sink if variant.dtype == "float32" else None
        if variant.dtype == "float32" and variant.key_weight:
            sink = sinks.one_of((None, "float"))
        found[replace(variant, tangents=tangents or "qkv", sink=sink, alibi_grad=False)] = None
    return list(found)


def map_variants(count: int = 96, **limits: Any) -> list[Variant]:
    """The variants of :func:`variants` without dropout and gradients, whose maps have kernels: of 16 and 32 bits, with
    head dims up to 256."""
    found: dict[Variant, None] = {}
    for v in variants(count, **limits):
        if v.head_dim <= 256 and v.dtype != "float64":
            bare = replace(v, dropout=False, bias_grad=False, key_weight_grad=False, alibi_grad=False, lse_grad=False)
            found[bare] = None
    return list(found)


def residual_variants(count: int = 96, **limits: Any) -> list[Variant]:
    """The variants of :func:`variants` with head dims up to 128, with only their bias and dropout."""
    found: dict[Variant, None] = {}
    for v in variants(count, **limits):
        if max(v.head_dim, v.head_dim_v) <= 128:
            bare = Variant(
                v.dtype,
                v.head_dim,
                v.head_dim_v,
                v.bias,
                v.bias_float,
                v.bias_grad,
                dropout=v.dropout,
            )
            found[bare] = None
    return list(found)
