"""Generated problems and poisoned memory."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from flashsci.testing import (
    Case,
    Variant,
    cases,
    embed,
    evaluate,
    generate,
    make_inputs,
    poison_value,
    poisoned_memory,
    variants,
)
from flashsci.testing.poison import GUARD


def test_variants_are_few_and_cover_much():
    pool = variants()
    assert len(pool) == len(set(pool)) <= 64
    for name in (
        "bias_float",
        "bias_grad",
        "key_weight_grad",
        "mask",
        "window",
        "softcap",
        "dropout",
        "varlen",
        "lse_grad",
    ):
        assert {getattr(v, name) for v in pool} == {False, True}, name
    assert {v.bias for v in pool} == {None, "pair", "key"}
    assert {v.key_weight for v in pool} == {None, "inputs", "float"}
    assert {v.dtype for v in pool} == {"bfloat16", "float16", "float32"}
    dims = {(v.head_dim, v.head_dim_v) for v in pool}
    assert (1, 1) in dims and (64, 64) in dims and (256, 256) in dims
    dtypes = {"bfloat16", "float16", "float32"}
    assert {(v.head_dim, v.head_dim_v, v.dtype) for v in pool} == {
        (*d, t) for d in dims for t in dtypes
    }
    assert {(v.dtype, v.varlen) for v in pool} == {
        (d, p) for d in ("bfloat16", "float16", "float32") for p in (False, True)
    }


def test_generator_reproduces_and_covers():
    drawn = list(generate(3, 600))
    assert drawn == list(generate(3, 600)) and drawn != list(generate(4, 600))
    dense = [c for c in drawn if not c.variant.varlen]
    assert {c.rank for c in dense} == {2, 3, 4, 5}
    assert {c.layout for c in drawn} == {"bhsd", "bshd", "packed", "strided", "expanded", "shifted"}
    assert {c.magnitude for c in drawn} == {
        "unit",
        "peaked",
        "low",
        "small_v",
        "large_v",
        "offset_v",
    }
    assert {0, 1, 63, 64, 65, 127, 128, 129, 300} <= {c.seq_q for c in dense}
    assert any(c.seq_q != c.seq_k for c in dense) and any(c.group > 1 for c in drawn)
    assert {c.align for c in drawn} == {"upper_left", "lower_right"}
    assert {c.bias_view for c in dense} == {"contiguous", "transposed", "padded", "expanded"}
    assert {c.mask_kind for c in dense} == {"random", "rows", "keys", "none"}
    assert any(0 in c.lens_q for c in drawn) and any(c.lens_q != c.lens_k for c in drawn)


def test_a_case_is_its_own_reproducer():
    for case in generate(5, 50):
        assert eval(repr(case)) == case
        a, b = make_inputs(case), make_inputs(case)
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, torch.Tensor):
                assert x.stride() == y.stride()
                torch.testing.assert_close(x, y, rtol=0, atol=0)


@settings(max_examples=30)
@given(cases(score_limit=1 << 12))
def test_hypothesis_draws_the_same_kind_of_case(case):
    assert isinstance(case, Case)
    inputs = make_inputs(case)
    assert inputs.q.dtype == case.variant.torch_dtype
    if not case.variant.varlen:
        assert tuple(inputs.q.shape[:-1]) == case.score_shape[:-1]
        if inputs.bias is not None:
            torch.broadcast_shapes(inputs.bias.shape, case.score_shape)


def test_low_magnitude_is_below_what_exp_can_hold():
    found = evaluate(
        make_inputs(Case(magnitude="low", seq_k=64, variant=Variant(head_dim=64))), "reference"
    )
    assert found["lse"].max() < -88.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int32])
def test_embed_keeps_values_and_surrounds_them(dtype):
    x = (torch.arange(24) % 2).to(dtype).view(2, 3, 4)
    view = embed(x, order=(1, 0, 2), pad={2: 3, 1: 1}, offset=1)
    assert torch.equal(view, x) and view.stride() == (7, 14, 1)
    whole = torch.empty(0, dtype=dtype).set_(view.untyped_storage())
    touched = torch.zeros(len(whole), dtype=torch.bool)
    touched.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    rest = whole[~touched]
    poison = torch.tensor(poison_value(dtype), dtype=dtype)
    assert len(rest) >= 2 * GUARD and bool(((rest == poison) | (rest != rest)).all())
    assert view.storage_offset() == GUARD + 1


def test_layouts_are_what_they_say():
    shape = {
        "lead": (2,),
        "heads_k": 3,
        "seq_q": 5,
        "seq_k": 5,
        "variant": Variant(head_dim=8, head_dim_v=8),
    }
    stride = lambda layout: make_inputs(Case(layout=layout, **shape)).q.stride()  # noqa: E731
    assert stride("bhsd") == (120, 40, 8, 1)
    assert stride("bshd") == (120, 8, 24, 1)
    assert stride("packed") == (360, 8, 72, 1)
    assert stride("expanded") == (0, 40, 8, 1)
    assert stride("strided") == (288, 96, 16, 1)
    shifted = make_inputs(Case(layout="shifted", **shape)).q
    assert shifted.data_ptr() % 16 != 0 and shifted.stride(-2) == 9


def test_fresh_memory_is_poison_only_inside():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.empty(5).isnan().all()
        assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
        assert torch.zeros(2).new_empty((4,)).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2)).isnan().all()
        assert torch.empty(3, dtype=torch.int32).eq(torch.iinfo(torch.int32).max).all()
    assert torch.are_deterministic_algorithms_enabled() == before
    with pytest.raises(RuntimeError), poisoned_memory():
        raise RuntimeError
    assert torch.are_deterministic_algorithms_enabled() == before


def test_poison_shows_what_a_backend_reads_outside():
    """A kernel that reads one key too many meets NaN."""
    inputs = make_inputs(Case(seq_k=7))
    with torch.no_grad():
        beyond = inputs.k.as_strided((1, 1, 8, 16), inputs.k.stride(), inputs.k.storage_offset())
        assert (inputs.q @ beyond.transpose(-1, -2)).isnan().any()


def test_resized_cases_stay_in_their_family():
    """Same variant, layout, views and length classes; other sizes; broadcast dims stay so and fit."""
    from flashsci.testing.cases import SeededChoices, _length_class, resized

    choices = SeededChoices(1)
    sizes = set()
    for family in generate(2, 60):
        for case in (resized(choices, family) for _ in range(4)):
            sizes.add((case.seq_q, case.lead, case.lens_q))
            for name in ("variant", "rank", "layout", "bias_view", "mask_view", "causal", "window"):
                assert getattr(case, name) == getattr(family, name)
            assert _length_class(case.seq_q) == _length_class(family.seq_q)
            for shape in (case.bias_shape, case.mask_shape):
                if shape is not None and not case.variant.varlen:
                    assert torch.broadcast_shapes(shape, case.score_shape) == torch.Size(
                        case.score_shape
                    )
            if case.weight_shape is not None:
                torch.broadcast_shapes(case.weight_shape, case.key_shape)
                assert make_inputs(case).key_weight.shape == case.weight_shape
            if case.variant.varlen and case.bias_shape is not None:
                assert case.bias_shape[0] in (1, case.heads_q)
    assert len(sizes) > 60
