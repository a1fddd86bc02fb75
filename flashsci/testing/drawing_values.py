"""The part of a case that no kernel is compiled for: layouts, values, key weights, precision."""

from __future__ import annotations

from dataclasses import replace

from flashsci.testing.cases import (
    DOUT_LAYOUTS,
    DOUT_SCALES,
    LAYOUTS,
    MAGNITUDES,
    NUMBERS,
    PADDINGS,
    PLACES,
    SOFTCAPS,
    Case,
)
from flashsci.testing.choices import Choices

WEIGHT_ZEROS = ("some", "some", "none", "rows", "subnormal")


def layouts_of(case: Case) -> list[str]:
    """The layouts of LAYOUTS that differ from each other at this rank."""
    if case.rank == 2:
        return ["bhsd", "strided", "shifted"]
    return [x for x in LAYOUTS if x != "expanded" or case.rank > 3]


def draw_layouts(choices: Choices, case: Case) -> Case:
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


def draw_values(choices: Choices, case: Case) -> Case:
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
        case = replace(case, bias_number=choices.one_of(NUMBERS), bias_number_at=choices.one_of(PLACES))
    return case


def draw_execution(choices: Choices, case: Case) -> Case:
    rare = choices.integer(1, 24)
    known = {23: "hooks", 24: "hooks" if case.variant.tangents else "batched"}
    return replace(case, execution=known.get(rare, ""))


def draw_weights(choices: Choices, case: Case) -> Case:
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


def draw_gate(choices: Choices, case: Case) -> Case:
    full = case.score_shape
    shape = full
    if choices.integer(0, 1):
        shape = tuple(n if choices.integer(0, 2) else 1 for n in full)[choices.integer(0, len(full) - 1) :]
    views = ("contiguous", "transposed", "padded", "expanded", "linear")
    return replace(case, gate_shape=shape, gate_view=choices.one_of(views))


def draw_second_order(choices: Choices, case: Case) -> Case:
    if not case.variant.tangents:
        return case
    return replace(
        case,
        precision=choices.one_of((None, None, "ieee", "tf32", "tf32x3")) if case.variant.dtype == "float32" else None,
        tangent_magnitude=choices.one_of(("unit", "unit", "unit", "offset")),
    )
