"""Cases made from drawn cases: other sizes for the same compiled kernels, and shapes that select special kernels."""

from __future__ import annotations

import math
from dataclasses import replace

from flashsci.testing.cases import (
    ALL_LENGTHS,
    Case,
)
from flashsci.testing.choices import Choices
from flashsci.testing.drawing_values import WEIGHT_ZEROS, draw_execution, draw_values, layouts_of

MEMBERS = (40, 48, 67)  # numbers of batch members that share a bias


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
        weight_shape=case.weight_shape and (seq_k,),
        gate_shape=(seq_q, seq_k) if case.variant.gate else None,
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
    keys, scores = case.key_shape, case.score_shape
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
        gate_shape=_spread(case.gate_shape, scores[-len(full) :], full),
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
        gate_shape=_spread(case.gate_shape, scores, case.score_shape),
    )


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
    case = draw_values(choices, replace(case, bias_number="", bias_holes=False))
    case = draw_execution(choices, case)
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
            gate_shape=case.gate_shape and (rows, keys),
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
        gate_shape=_spread(case.gate_shape, before, case.score_shape),
    )
    return with_inner_heads(choices, case) if inner_heads else case


def _spread(shape: tuple[int, ...] | None, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape with which a tensor that broadcast to ``before`` broadcasts to ``after`` in the same way."""
    if shape is None:
        return None
    old, new = before[len(before) - len(shape) :], after[len(after) - len(shape) :]
    return tuple(1 if n == 1 and (m != 1 or k == 1) else k for n, m, k in zip(shape, old, new, strict=True))


def _length_class(n: int) -> tuple[bool, int, bool]:
    """The class of a length: kernels treat none, up to 32, 64, 128, 256, 1,024 or more, and multiples of 8 or not, in equal
    ways."""
    return n == 0, sum(n > limit for limit in (32, 64, 128, 256, 1024)), n % 8 == 0
