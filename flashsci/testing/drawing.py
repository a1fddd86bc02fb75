"""Problems drawn at random, all by one drawing function.

The same :func:`draw_case` serves a seeded generator (:func:`generate`, no dependencies) and Hypothesis
(:func:`cases`): both only supply choices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from flashsci.testing.cases import (
    ALL_LENGTHS,
    BULK_LENGTHS,
    DOUT_LAYOUTS,
    DOUT_SCALES,
    HEAD_DIMS,
    LAYOUTS,
    MAGNITUDES,
    NUMBERS,
    PADDINGS,
    PLACES,
    SOFTCAPS,
    Case,
    ResidualCase,
    Variant,
)

MEMBERS = (40, 48, 67)  # numbers of batch members that share a bias
WEIGHT_ZEROS = ("some", "some", "none", "rows", "subnormal")

T = TypeVar("T")
DrawnCase = TypeVar("DrawnCase")


class Choices(Protocol):
    """The source of a case's choices: a seeded generator or Hypothesis' ``draw``."""

    def one_of(self, options: Sequence[T]) -> T: ...

    def integer(self, low: int, high: int) -> int: ...


class SeededChoices:
    """Choices of a pseudo-random generator: the same seed, the same cases, on every machine."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.random.randrange(len(options))]

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


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
            sink=(together if weighted else sinks).one_of(
                (None,) * (1 if weighted else 6) + ("inputs", "float")
            )
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
        # With 16-bit results the steps of a sink's formula round by themselves, which the second order sees.
        sink = variant.sink if variant.dtype == "float32" else None
        if variant.dtype == "float32" and variant.key_weight:
            sink = sinks.one_of((None, "float"))
        found[replace(variant, tangents=tangents or "qkv", sink=sink)] = None
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
        **vars(case), given=choices.one_of(("both", "both", "both", "out", "scores")), scores_view=choices.one_of(views)
    )  # fmt: skip


def generate_residual(seed: int, count: int, **limits: Any) -> Iterator[ResidualCase]:
    """``count`` cases of a seeded generator; ``limits`` as in :func:`draw_residual`."""
    choices = SeededChoices(seed)
    for _ in range(count):
        yield draw_residual(choices, **limits)


def residual_cases(**limits: Any) -> Any:
    """A Hypothesis strategy of whole cases (needs hypothesis)."""
    return strategy_of(lambda choices: draw_residual(choices, **limits))


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
        dropout_p=choices.one_of((0.2, 0.5))
        if variant.dropout
        else 0.0,  # 1 / (1 - p) is exact in every dtype
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
        case = _draw_weights(choices, case)
    case = _draw_values(choices, _draw_layouts(choices, case))
    return _draw_second_order(choices, _draw_execution(choices, case))


def layouts_of(case: Case) -> list[str]:
    """The layouts of LAYOUTS that differ from each other at this rank."""
    if case.rank == 2:
        return ["bhsd", "strided", "shifted"]
    return [x for x in LAYOUTS if x != "expanded" or case.rank > 3]


def _draw_layouts(choices: Choices, case: Case) -> Case:
    """The case with the layout of q for k, v and dout, or one for each: gradients come as other operations leave
    them."""
    kinds = layouts_of(case)
    layout = case.layout if case.layout in kinds else "strided"
    of_dout = [*kinds, *DOUT_LAYOUTS[len(LAYOUTS) :]]
    others: tuple[str, ...] = ()
    if choices.integer(0, 1):
        others = tuple(choices.one_of(x) for x in (kinds, kinds, of_dout))
    negated = choices.one_of(("q", "k", "v", "dout")) if choices.integer(1, 24) == 24 else ""
    return replace(case, layout=layout, layouts=others, negated=negated)


def _draw_values(choices: Choices, case: Case) -> Case:
    """The case with values as models have them; no kernel is compiled for them."""
    variant = case.variant
    often = lambda n: choices.integer(1, n) < n  # noqa: E731  (1 is what Hypothesis shrinks to)
    case = replace(
        case,
        scale=None if often(3) else choices.one_of((0.05, 0.3, 1.0, 1e-6)),
        softcap=choices.one_of(SOFTCAPS) if variant.softcap else None,
        magnitude="unit" if often(3) else choices.one_of(MAGNITUDES),
        padding="none" if often(3) else choices.one_of(PADDINGS),
        dout_scale=1.0 if often(3) else choices.one_of(DOUT_SCALES[variant.dtype]),
    )
    if variant.dtype == "float16":  # so that gradients stay within it where possible
        if variant.tangents and case.magnitude in ("huge", "outliers", "sharp_and_flat"):
            case = replace(case, magnitude="rising")
        elif case.magnitude == "huge":
            case = replace(case, dout_scale=1e-3)
    elif case.magnitude == "huge":
        case = replace(case, scale=choices.one_of((None, 1e8)))
    if variant.flipped:
        case = replace(case, scale=choices.one_of((-0.3, -1.0, 0.0)))
    if case.magnitude == "vast":
        case = replace(case, scale=(0.3 if case.scale is None else case.scale) / case.vastness**2)
    if case.layout_of["dout"] == "constant":  # it has no rows of zeros
        case = replace(case, padding="none")
    if variant.bias is None:
        return case
    case = replace(
        case,
        bias_holes=not often(4),
        bias_scale=choices.one_of((1.0, 1.0, 10.0, 100.0)) if variant.bias_float else 1.0,
    )
    if choices.integer(0, 1):
        case = replace(
            case, bias_number=choices.one_of(NUMBERS), bias_number_at=choices.one_of(PLACES)
        )
    return case


def _draw_execution(choices: Choices, case: Case) -> Case:
    rare = choices.integer(1, 24)
    known = {23: "hooks", 24: "hooks" if case.variant.tangents else "batched"}
    return replace(case, execution=known.get(rare, ""))


def _draw_weights(choices: Choices, case: Case) -> Case:
    full = case.key_shape
    shape = tuple(n if choices.integer(0, 3) else 1 for n in full[:-1])
    shape = (*shape, full[-1])
    if choices.integer(0, 3) == 0:  # fewer dims broadcast too
        shape = shape[choices.integer(0, len(shape) - 1) :]
    return replace(
        case,
        weight_shape=shape,
        weight_view=choices.one_of(("contiguous", "contiguous", "padded", "transposed")),
        weight_zeros=choices.one_of(WEIGHT_ZEROS),
    )


def _draw_second_order(choices: Choices, case: Case) -> Case:
    if not case.variant.tangents:
        return case
    return replace(
        case,
        precision=choices.one_of((None, None, "ieee", "tf32", "tf32x3"))
        if case.variant.dtype == "float32"
        else None,
        tangent_magnitude=choices.one_of(("unit", "unit", "unit", "offset")),
    )


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
        bias_view=choices.one_of((*views, "linear", "linear"))
        if case.variant.bias
        else "contiguous",
        mask_shape=broadcast(choices.one_of(("pair", "key")) if case.variant.mask else None),
        mask_view=choices.one_of(views) if case.variant.mask else "contiguous",
        mask_kind=choices.one_of(("random", "rows", "keys", "none"))
        if case.variant.mask
        else "random",
    )


def with_members(choices: Choices, case: Case) -> Case:
    """The case with a bias that many members of a batch share, as in triangle attention: enough for kernels that keep
    it."""
    members, heads = choices.one_of(MEMBERS), choices.one_of((3, 4))
    batch = choices.one_of(((), (1,), (2,)))
    rows = heads * members * math.prod(batch)
    seq_q = choices.one_of([n for n in (65, 100, 128, 130, 192, 257) if rows * n * n < 6 << 20])
    seq_k = seq_q if choices.integer(0, 1) else choices.one_of((1, 40, 64, 70, 128, 190))
    lead = (*batch, members)
    bias = (*(n if choices.integer(0, 1) else 1 for n in batch), 1, heads, seq_q, seq_k)
    mask = (*lead, choices.one_of((1, heads)), 1, seq_k)
    masked = case.variant.mask
    return replace(
        case,
        rank=len(lead) + 3,
        lead=lead,
        heads_k=heads,
        group=1,
        seq_q=seq_q,
        seq_k=seq_k,
        bias_shape=bias,
        bias_view=choices.one_of(("contiguous", "linear", "padded")),
        mask_shape=mask if masked else None,
        mask_kind=choices.one_of(("keys", "random")) if masked else "random",
    )


def has_inner_heads(case: Case) -> bool:
    """Whether the bias of a case is as :func:`with_inner_heads` makes it."""
    own = case.bias_shape == case.score_shape and case.bias_view == "linear"
    return own and case.heads_q % 4 == 0 and case.rank > 2 and max((1, *case.lead)) <= 5


def with_inner_heads(choices: Choices, case: Case) -> Case:
    """The case for kernels that read a bias of a Linear without a copy, with a mask of keys.

    The bias has a value for every pair and head, in the order in which a Linear over pairs leaves it.
    """
    keys = case.key_shape
    lead = tuple(min(n, 5) for n in case.lead)  # more members share a bias (`with_members`)
    case = replace(case, rank=max(case.rank, 3), lead=lead or (1,), group=1)
    case = replace(case, heads_k=choices.one_of((4, 8, 8, 16)))
    while case.scores > 1 << 20 and max(case.lead) > 1:
        case = replace(case, lead=tuple(max(1, n - 1) for n in case.lead))
    full = case.score_shape
    mask = (*(n if choices.integer(0, 1) else 1 for n in full[:-3]), 1, 1, full[-1])
    masked = case.variant.mask
    return replace(
        case,
        bias_shape=full,
        bias_view="linear",
        weight_shape=_spread(case.weight_shape, keys, case.key_shape),
        mask_shape=mask if masked else None,
        mask_kind=choices.one_of(("keys", "random")) if masked else "random",
    )


def with_neighbours(choices: Choices, case: Case) -> Case:
    """The case with several heads of queries, each with keys of its own: neighbours that kernels may read together.

    Half of these cases are self-attention with one layout for all tensors.
    """
    if case.rank == 2 or case.variant.varlen:
        return case
    scores, keys = case.score_shape, case.key_shape
    case = replace(case, heads_k=choices.one_of((2, 3, 4, 5, 6, 8, 12)), group=1)
    if choices.integer(0, 1) == 1:
        case = replace(case, seq_k=case.seq_q, layouts=())
    return replace(
        case,
        bias_shape=_spread(case.bias_shape, scores, case.score_shape),
        weight_shape=_spread(case.weight_shape, keys, case.key_shape),
        mask_shape=_spread(case.mask_shape, scores, case.score_shape),
    )


def _draw_packed(choices: Choices, case: Case, lengths: Sequence[int], score_limit: int) -> Case:
    count = choices.integer(1, 6)
    lens_q = tuple(choices.one_of(lengths) for _ in range(count))
    same = choices.integer(0, 1) == 1
    lens_k = lens_q if same else tuple(choices.one_of(lengths) for _ in range(count))
    while (
        case.heads_q * sum(a * b for a, b in zip(lens_q, lens_k, strict=True)) > score_limit
        and len(lens_q) > 1
    ):
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


def generate(
    seed: int, count: int, pool: Sequence[Variant] | None = None, **limits: Any
) -> Iterator[Case]:
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


# Layouts between which the divisors of strides, which Triton compiles for, do not change at ordinary head dims.
_ALIKE = ("bhsd", "bshd", "packed", "joint", "expanded")


def resized(choices: Choices, case: Case, score_limit: int = 1 << 20) -> Case:
    """Another problem for the kernels that ``case`` was compiled into.

    Values, batch, heads and lengths differ; lengths stay in their class (as tile sizes see them), and broadcast dims
    broadcast.
    """
    many = max((*case.lead, 1)) > 5  # batch members that share a bias
    inner_heads = has_inner_heads(case)
    kept = many or case.rank == 2
    group = case.group if kept else choices.one_of((1, 1, 2, 4))
    heads_k = case.heads_k if kept else choices.one_of((1, 2, 3))
    case = replace(
        case,
        seed=choices.integer(0, 2**31 - 1),
        heads_k=heads_k,
        group=group,
        align=choices.one_of(("upper_left", "lower_right")) if case.variant.window else case.align,
    )
    case = _draw_values(choices, replace(case, bias_number="", bias_holes=False))
    case = _draw_execution(choices, case)
    if case.weight_shape is not None:
        case = replace(case, weight_zeros=choices.one_of(WEIGHT_ZEROS))
    if case.variant.head_dim % 8 == case.variant.head_dim_v % 8 == 0:
        kinds = [x for x in layouts_of(case) if x in _ALIKE]
        redrawn = [choices.one_of(kinds) if x in kinds else x for x in case.layout_of.values()]
        layouts = tuple(redrawn[1:]) if case.layouts else ()
        case = replace(case, layout=redrawn[0], layouts=layouts)

    def like(length: int) -> int:
        return choices.one_of([n for n in ALL_LENGTHS if _length_class(n) == _length_class(length)])

    if case.variant.varlen:
        lens_q = tuple(like(n) for n in case.lens_q)
        lens_k = lens_q if case.lens_k == case.lens_q else tuple(like(n) for n in case.lens_k)
        shape = case.bias_shape
        if shape is not None:
            keys, pairs = sum(lens_k), sum(a * b for a, b in zip(lens_q, lens_k, strict=True))
            heads = 1 if shape[0] == 1 else heads_k * group
            per_key = len(shape) == 3 or case.variant.bias == "key" or pairs == keys
            shape = (heads, 1, keys) if per_key else (heads, pairs)
        resized = replace(case, lens_q=lens_q, lens_k=lens_k, bias_shape=shape)
        weights = case.weight_shape
        if weights is not None:
            weights = (*(1 if n == 1 else heads_k for n in weights[:-1]), sum(lens_k))
        return replace(resized, weight_shape=weights)
    before, keys_before = case.score_shape, case.key_shape
    seq_q = like(case.seq_q)
    seq_k = seq_q if case.seq_k == case.seq_q else like(case.seq_k)
    if choices.integer(1, 20) == 20:
        seq_q, seq_k = choices.one_of(((0, seq_k), (seq_q, 0)))
    if many:
        lead = (*case.lead[:-1], choices.one_of(MEMBERS))
        rows, keys = case.seq_q, case.seq_k
        if choices.integer(1, 10) == 10:
            rows, keys = choices.one_of(((0, keys), (rows, 0)))
        bias, mask = case.bias_shape or (), case.mask_shape
        case = replace(case, lead=lead, seq_q=rows, seq_k=keys)
        return replace(
            case,
            weight_shape=_spread(case.weight_shape, keys_before, case.key_shape),
            bias_shape=(*bias[:-2], *(rows, keys)[-len(bias) :]),
            mask_shape=mask and (*lead, *mask[len(lead) : -1], keys),
        )
    lead = tuple(choices.one_of((2, 3, 5)) for _ in case.lead)
    if lead and choices.integer(1, 20) == 20:
        lead = (*lead[:-1], 0)
    while heads_k * group * seq_q * seq_k * math.prod(lead) > score_limit and max((*lead, 1)) > 1:
        lead = tuple(max(1, n - 1) for n in lead)
    case = replace(case, seq_q=seq_q, seq_k=seq_k, lead=lead)

    bias_shape = _spread(case.bias_shape, before, case.score_shape)
    if bias_shape is not None and case.bias_view in ("contiguous", "expanded"):
        # Ones to the left, or none: one problem to a kernel, several to its caller.
        ones = next((i for i, n in enumerate(bias_shape[:-1]) if n != 1), len(bias_shape) - 1)
        bias_shape = bias_shape[choices.integer(0, ones) :]
    case = replace(
        case,
        bias_shape=bias_shape,
        weight_shape=_spread(case.weight_shape, keys_before, case.key_shape),
        mask_shape=_spread(case.mask_shape, before, case.score_shape),
    )
    return with_inner_heads(choices, case) if inner_heads else case


def _spread(
    shape: tuple[int, ...] | None, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The shape with which a tensor that broadcast to ``before`` broadcasts to ``after`` in the same way."""
    if shape is None:
        return None
    old, new = before[len(before) - len(shape) :], after[len(after) - len(shape) :]
    return tuple(
        1 if n == 1 and (m != 1 or k == 1) else k for n, m, k in zip(shape, old, new, strict=True)
    )


def _length_class(n: int) -> tuple[bool, int, bool]:
    """The class of a length: kernels treat none, up to 32, 64, 128, 256 or more, and multiples of 8 or not, in equal
    ways."""
    return n == 0, sum(n > limit for limit in (32, 64, 128, 256)), n % 8 == 0


def strategy_of(draw_one: Callable[[Choices], DrawnCase]) -> Any:
    """A Hypothesis strategy of the cases that a function draws from choices (needs hypothesis)."""
    from hypothesis import strategies as st

    class Drawn:
        def __init__(self, draw: Callable[..., Any]):
            self.draw = draw

        def one_of(self, options: Sequence[T]) -> T:
            return self.draw(st.sampled_from(list(options)))

        def integer(self, low: int, high: int) -> int:
            return self.draw(st.integers(low, high))

    @st.composite
    def strategy(draw: Callable[..., Any]) -> DrawnCase:
        return draw_one(Drawn(draw))

    return strategy()


def cases(pool: Sequence[Variant] | None = None, **limits: Any) -> Any:
    """A Hypothesis strategy of whole cases (needs hypothesis); ``pool`` and ``limits`` as in :func:`draw_case`."""
    chosen = variants() if pool is None else pool
    return strategy_of(lambda choices: draw_case(choices, chosen, **limits))
