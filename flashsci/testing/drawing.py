"""Problems drawn at random, all by one drawing function.

The same :func:`draw_case` serves a seeded generator (:func:`generate`, no dependencies) and Hypothesis
(:func:`cases`): both only supply choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flashsci.testing.cases import (
    BULK_LENGTHS,
    LAYOUTS,
    Case,
    MapCase,
    ResidualCase,
    Variant,
)
from flashsci.testing.choices import Choices, SeededChoices, strategy_of
from flashsci.testing.drawing_values import (
    draw_execution,
    draw_gate,
    draw_layouts,
    draw_second_order,
    draw_values,
    draw_weights,
)
from flashsci.testing.reshaping import with_inner_heads, with_members
from flashsci.testing.variants import map_variants, residual_variants, variants


def draw_residual(
    choices: Choices,
    pool: Sequence[Variant] | None = None,
    lengths: Sequence[int] = BULK_LENGTHS,
    score_limit: int = 1 << 19,
) -> ResidualCase:
    """A case of residual attention, drawn like those of :func:`draw_case`."""
    case = draw_case(choices, residual_variants() if pool is None else pool, lengths, score_limit)
    views = ("contiguous", "contiguous", "transposed", "padded", "linear")
    return ResidualCase(
        **vars(case),
        given=choices.one_of(("both", "both", "both", "out", "scores")),
        scores_view=choices.one_of(views),
    )


def generate_residual(seed: int, count: int, **limits: Any) -> Iterator[ResidualCase]:
    """``count`` cases of a seeded generator; ``limits`` as in :func:`draw_residual`."""
    choices = SeededChoices(seed)
    for _ in range(count):
        yield draw_residual(choices, **limits)


def residual_cases(**limits: Any) -> Any:
    """A Hypothesis strategy of whole cases (needs hypothesis)."""
    return strategy_of(lambda choices: draw_residual(choices, **limits))


def draw_map(
    choices: Choices,
    pool: Sequence[Variant] | None = None,
    lengths: Sequence[int] = BULK_LENGTHS,
    score_limit: int = 1 << 19,
) -> MapCase:
    """A case of the reductions of an attention map, drawn like those of :func:`draw_case`."""
    return MapCase(**vars(draw_case(choices, map_variants() if pool is None else pool, lengths, score_limit)))


def generate_maps(seed: int, count: int, **limits: Any) -> Iterator[MapCase]:
    """``count`` cases of a seeded generator; ``limits`` as in :func:`draw_map`."""
    choices = SeededChoices(seed)
    for _ in range(count):
        yield draw_map(choices, **limits)


def map_cases(**limits: Any) -> Any:
    """A Hypothesis strategy of whole cases (needs hypothesis)."""
    return strategy_of(lambda choices: draw_map(choices, **limits))


def draw_case(
    choices: Choices,
    pool: Sequence[Variant],
    lengths: Sequence[int] = BULK_LENGTHS,
    score_limit: int = 1 << 20,
) -> Case:
    """One case of a variant in ``pool``; B * Hq * Sq * Sk stays under ``score_limit``."""
    variant = choices.one_of(pool)
    case = Case(
        variant=variant,
        seed=choices.integer(0, 2**31 - 1),
        dropout_p=choices.one_of((0.2, 0.5)) if variant.dropout else 0.0,  # 1 / (1 - p) is exact in every dtype
        layout=choices.one_of(LAYOUTS),
        heads_k=choices.one_of((1, 1, 2, 3)),
        group=choices.one_of((1, 1, 2, 4)),
    )
    if variant.window:
        kind = choices.one_of(("causal", "causal", "band", "left", "causal_band"))
        width = choices.one_of((0, 1, 5, 16, 64, 100))
        window = {
            "causal": None,
            "band": (width, choices.one_of((0, 3, 40))),
            "left": (width, None),
            "causal_band": (width, None),
        }[kind]
        case = replace(
            case,
            causal=kind.startswith("causal"),
            window=window,
            align=choices.one_of(("upper_left", "lower_right")),
        )
    case = (
        _draw_packed(choices, case, lengths, score_limit)
        if variant.varlen
        else _draw_dense(choices, case, lengths, score_limit)
    )
    if variant.key_weight:
        case = draw_weights(choices, case)
    if variant.gate:
        case = draw_gate(choices, case)
    case = draw_values(choices, draw_layouts(choices, case))
    return draw_second_order(choices, draw_execution(choices, case))


def _draw_dense(choices: Choices, case: Case, lengths: Sequence[int], score_limit: int) -> Case:
    rank = choices.one_of((2, 3, 4, 4, 4, 5))
    if rank == 2:
        case = replace(case, heads_k=1, group=1)
    seq_q = choices.one_of(lengths)
    seq_k = seq_q if choices.integer(0, 1) else choices.one_of(lengths)
    scores = max(1, case.heads_q * seq_q * seq_k)
    lead = tuple(choices.one_of((1, 2, 3, 5)) for _ in range(rank - 3))
    if lead and choices.integer(1, 20) == 20:
        lead = (*lead[:-1], 0)
    while scores * math.prod(lead) > score_limit and max((*lead, 1)) > 1:
        lead = tuple(max(1, n - 1) for n in lead)
    if scores * math.prod(lead) > score_limit:
        case = replace(case, heads_k=1, group=1)
    case = replace(case, rank=rank, lead=lead, seq_q=seq_q, seq_k=seq_k)
    if case.variant.bias == "pair" and score_limit >= 1 << 20 and choices.integer(1, 12) == 12:
        return with_members(choices, case)
    if case.variant.bias == "pair" and rank > 2 and choices.integer(1, 8) == 8:
        return with_inner_heads(choices, case)

    def broadcast(kind: str | None) -> tuple[int, ...] | None:
        if kind is None:
            return None
        full = case.score_shape
        shape = tuple(n if choices.integer(0, 2) else 1 for n in full)
        if kind == "key":
            shape = (*full[:-3], *[1] * min(2, rank - 1), full[-1])
        elif choices.integer(0, 1):
            shape = full
        # Fewer dims than the scores broadcast too.
        return shape[choices.integer(0, rank - 1) :] if choices.integer(0, 3) == 0 else shape

    views = ("contiguous", "transposed", "padded", "expanded")
    return replace(
        case,
        bias_shape=broadcast(case.variant.bias),
        bias_view=choices.one_of((*views, "linear", "linear")) if case.variant.bias else "contiguous",
        mask_shape=broadcast(choices.one_of(("pair", "key")) if case.variant.mask else None),
        mask_view=choices.one_of(views) if case.variant.mask else "contiguous",
        mask_kind=choices.one_of(("random", "rows", "keys", "none")) if case.variant.mask else "random",
    )


def _draw_packed(choices: Choices, case: Case, lengths: Sequence[int], score_limit: int) -> Case:
    count = choices.integer(1, 6)
    lens_q = tuple(choices.one_of(lengths) for _ in range(count))
    same = choices.integer(0, 1) == 1
    lens_k = lens_q if same else tuple(choices.one_of(lengths) for _ in range(count))
    while case.heads_q * sum(a * b for a, b in zip(lens_q, lens_k, strict=True)) > score_limit and len(lens_q) > 1:
        lens_q, lens_k = lens_q[1:], lens_k[1:]
    shape: tuple[int, ...] | None = None
    if case.variant.bias:
        heads, keys = choices.one_of((1, case.heads_q)), sum(lens_k)
        pairs = sum(a * b for a, b in zip(lens_q, lens_k, strict=True))
        # If both sizes are equal, only three dims decide between them.
        shape = (heads, pairs) if case.variant.bias == "pair" else (heads, keys)
        if pairs == keys or (case.variant.bias == "key" and choices.integer(0, 1)):
            shape = (heads, 1, keys)
    return replace(
        case,
        rank=3,
        lead=(),
        seq_q=0,
        seq_k=0,
        lens_q=lens_q,
        lens_k=lens_k,
        bias_shape=shape,
        bias_view=choices.one_of(("contiguous", "transposed")) if shape else "contiguous",
        self_attention=same and choices.integer(0, 1) == 1,
        known_lengths=choices.integer(0, 1) == 1,
    )


def generate(seed: int, count: int, pool: Sequence[Variant] | None = None, **limits: Any) -> Iterator[Case]:
    """``count`` cases of a seeded generator; ``pool`` and ``limits`` as in :func:`draw_case`.

    Examples:
        >>> from flashsci.testing import generate
        >>> len({case.seed for case in generate(0, 10)})
        10
    """
    choices = SeededChoices(seed)
    pool = variants() if pool is None else pool
    for _ in range(count):
        yield draw_case(choices, pool, **limits)


def cases(pool: Sequence[Variant] | None = None, **limits: Any) -> Any:
    """A Hypothesis strategy of whole cases (needs hypothesis); ``pool`` and ``limits`` as in :func:`draw_case`."""
    chosen = variants() if pool is None else pool
    return strategy_of(lambda choices: draw_case(choices, chosen, **limits))
