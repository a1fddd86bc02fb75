"""Generated problems and poisoned memory."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from hypothesis import find, given, settings

from flashsci.testing import (
    Case,
    Judge,
    Variant,
    cases,
    embed,
    evaluate,
    generate,
    make_inputs,
    poison_value,
    poisoned_memory,
    second_order_variants,
    variants,
)
from flashsci.testing.cases import (
    DOUT_LAYOUTS,
    LAYOUTS,
    MAGNITUDES,
    NUMBERS,
    PADDINGS,
    PLACES,
    SOFTCAPS,
)
from flashsci.testing.poison import GUARD

pytestmark = pytest.mark.every(4)


def test_variants_are_few_and_cover_much():
    pool = variants()
    assert len(pool) == len(set(pool)) <= 64
    for name in (
        "bias_float",
        "bias_grad",
        "key_weight_grad",
        "alibi_grad",
        "mask",
        "window",
        "softcap",
        "dropout",
        "varlen",
        "lse_grad",
        "flipped",
    ):
        assert {getattr(v, name) for v in pool} == {False, True}, name
    assert {v.bias for v in pool} == {None, "pair", "key"}
    assert {v.key_weight for v in pool} == {None, "inputs", "float"}
    assert {v.dtype for v in pool} == {"bfloat16", "float16", "float32"}
    dims = {(v.head_dim, v.head_dim_v) for v in pool}
    assert (1, 1) in dims and (64, 64) in dims and (256, 256) in dims
    dtypes = {"bfloat16", "float16", "float32"}
    assert {(v.head_dim, v.head_dim_v, v.dtype) for v in pool} == {(*d, t) for d in dims for t in dtypes}
    assert {(v.dtype, v.varlen) for v in pool} == {
        (d, p) for d in ("bfloat16", "float16", "float32") for p in (False, True)
    }


def test_generator_reproduces_and_covers():
    drawn = list(generate(3, 600))
    assert drawn == list(generate(3, 600)) and drawn != list(generate(4, 600))
    dense = [c for c in drawn if not c.variant.varlen]
    assert {c.rank for c in dense} == {2, 3, 4, 5}
    assert {c.layout for c in drawn} == set(LAYOUTS)
    assert {c.magnitude for c in drawn} == {"unit", *MAGNITUDES}
    assert {0, 1, 63, 64, 65, 127, 128, 129, 300} <= {c.seq_q for c in dense}
    assert any(c.seq_q != c.seq_k for c in dense) and any(c.group > 1 for c in drawn)
    assert {c.align for c in drawn} == {"upper_left", "lower_right"}
    assert {c.bias_view for c in dense} == {
        "contiguous",
        "transposed",
        "padded",
        "expanded",
        "linear",
    }
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
    found = evaluate(make_inputs(Case(magnitude="low", seq_k=64, variant=Variant(head_dim=64))), "reference")
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
    from flashsci.testing.choices import SeededChoices
    from flashsci.testing.reshaping import _length_class, resized

    choices = SeededChoices(1)
    sizes = set()
    for i, family in enumerate(generate(2, 3000)):  # rare ones, too: many members with key weights
        for case in (resized(choices, family) for _ in range(4 if i < 60 else 1)):
            sizes.add((case.seq_q, case.lead, case.lens_q))
            for name in (
                "variant",
                "rank",
                "bias_view",
                "mask_view",
                "causal",
                "window",
            ):
                assert getattr(case, name) == getattr(family, name)
            alike = ("bhsd", "bshd", "packed", "joint", "expanded")
            for name, layout in case.layout_of.items():
                before = family.layout_of[name]
                assert layout == before or (layout in alike and before in alike)
            assert case.seq_q == 0 or _length_class(case.seq_q) == _length_class(family.seq_q)
            for shape in (case.bias_shape, case.mask_shape):
                if shape is not None and not case.variant.varlen:
                    assert torch.broadcast_shapes(shape, case.score_shape) == torch.Size(case.score_shape)
            if case.weight_shape is not None:
                shape = torch.broadcast_shapes(case.weight_shape, case.key_shape)
                assert shape == torch.Size(case.key_shape)
                if i < 60:
                    assert make_inputs(case).key_weight.shape == case.weight_shape
            if case.variant.varlen and case.bias_shape is not None:
                assert case.bias_shape[0] in (1, case.heads_q)
    assert len(sizes) > 60


def zero_rows(x, dims=(-1,)):
    return (x == 0).all(-1)


PADDED = {"lead": (5,), "heads_k": 2, "seq_q": 40, "seq_k": 40}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_is_rows_of_zeros(padding, packed):
    """Of q, k, v, dout and dlse, or of dout alone; at the end of sequences, from none to all of them, or anywhere."""
    variant = Variant(varlen=packed, lse_grad=True, mask=not packed)
    case = Case(variant=variant, padding=padding, mask_shape=None if packed else (5, 1, 1, 40), **PADDED)
    if packed:
        case = dataclasses.replace(case, rank=3, lead=(), lens_q=(40,) * 5, lens_k=(40,) * 5)
    inputs = make_inputs(case)
    found = {n: zero_rows(getattr(inputs, n)) for n in ("q", "k", "v", "dout")}
    tokens = (lambda x: x[:, 0].unflatten(0, (5, 40))) if packed else (lambda x: x[:, 0])
    rows = {n: tokens(x) for n, x in found.items()}
    assert rows["dout"].any() and not rows["dout"].all()
    if padding.startswith("dout"):
        assert not any(rows[n].any() for n in "qkv") and (inputs.dlse != 0).all()
    else:
        assert torch.equal(rows["q"], rows["dout"]) and torch.equal(rows["k"], rows["v"])
        silent = (inputs.dlse == 0).t() if packed else inputs.dlse == 0
        assert torch.equal(silent, found["q"])
    if "scattered" in padding:
        assert (rows["dout"][:, 1:] != rows["dout"][:, :-1]).sum() > 20
    else:
        assert (rows["dout"][:, 1:] >= rows["dout"][:, :-1]).all(), "a tail"
        assert len(set(rows["dout"].sum(-1).tolist())) > 1
    if padding == "tail_masked" and not packed:
        assert not (inputs.mask.expand(5, 2, 1, 40)[:, 0, 0] & rows["k"]).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_means_are_small_and_not_zero(dtype):
    for scale in (1e-3, 1e-6):
        case = Case(variant=Variant(dtype=dtype, lse_grad=True), dout_scale=scale, seq_q=100)
        inputs = make_inputs(case)
        for x in (inputs.dout.float(), inputs.dlse):
            assert 0.5 * scale < x.square().mean().sqrt() < 2 * scale
    assert (inputs.dout.float().abs() < torch.finfo(torch.float16).smallest_normal).any() or (dtype != "float16")


@pytest.mark.parametrize("bias_float", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", NUMBERS)
def test_masks_are_numbers_where_they_should(number, place, dtype, bias_float):
    variant = Variant(dtype=dtype, bias="pair", bias_float=bias_float)
    case = Case(seed=3, variant=variant, bias_number=number, bias_number_at=place, padding="tail", **PADDED)
    for shape in ((5, 2, 40, 40), (1, 1, 40), (40,), (5, 1, 1, 40)):
        bias = make_inputs(dataclasses.replace(case, bias_shape=shape)).bias
        assert bias.isfinite().all() and bias.dtype == (torch.float32 if bias_float else variant.torch_dtype)
        least = torch.finfo(bias.dtype).min
        value = {"float32_min": torch.finfo(torch.float32).min, "dtype_min": least}.get(number)
        value = max(float(number) if value is None else value, least)
        hidden = bias.float() < value / 2
        assert torch.allclose(bias[hidden].float(), torch.tensor(value), rtol=1e-2)
        assert (bias[~hidden].abs() < 10).all()
        if place == "last" and hidden.any():
            assert (hidden[..., 1:] >= hidden[..., :-1]).all() and not hidden[..., 0].any()
        if place == "first" and hidden.any():
            assert (hidden[..., 1:] <= hidden[..., :-1]).all() and not hidden[..., -1].any()
        if len(shape) == 4 and shape[2] == 40:
            whole, some = hidden.all(-1), hidden.any(-1)
            assert whole.any() == (place in ("rows", "padding")), place
            assert torch.equal(whole, some) or place != "rows"


@pytest.mark.parametrize("place", PLACES)
def test_packed_masks_are_numbers_in_each_sequence(place):
    lens = (7, 20, 1, 12)
    for shape in ((2, sum(n * n for n in lens)), (2, 1, 40)):
        variant = Variant(bias="pair" if len(shape) == 2 else "key", varlen=True)
        case = Case(seed=4, variant=variant, rank=3, lead=(), heads_k=2, lens_q=lens, lens_k=lens, bias_shape=shape,
                    bias_number="-1e9", bias_number_at=place, padding="tail")  # fmt: skip
        hidden = make_inputs(case).bias < -1e8
        assert hidden.shape == shape and hidden.any() and not hidden.all()
        ends = 0
        for n in lens:
            size = n * n if len(shape) == 2 else n
            part = hidden[..., ends : ends + size].unflatten(-1, (-1, n))
            ends += size
            if place == "last":
                assert not part[..., 0].any() and (part[..., 1:] >= part[..., :-1]).all()
            if place == "first":
                assert not part[..., -1].any() and (part[..., 1:] <= part[..., :-1]).all()


def test_a_bias_of_a_linear_has_its_heads_innermost():
    variant = Variant(bias="pair", bias_grad=True)
    case = Case(variant=variant, bias_view="linear", bias_shape=(5, 2, 40, 40), **PADDED)
    assert make_inputs(case).bias.stride() == (3200, 1, 80, 2)
    for shape in ((5, 1, 40, 40), (40, 40), (1, 40, 40), (40,)):
        bias = make_inputs(dataclasses.replace(case, bias_shape=shape)).bias
        assert bias.shape == shape and (len(shape) == 1 or bias.stride(-1) > 1)
    drawn = [c for c in generate(8, 1500) if c.bias_shape is not None and not c.variant.varlen]
    assert {len(c.bias_shape) for c in drawn} == {1, 2, 3, 4, 5}
    assert any(0 in c.lead and 1 in c.bias_shape for c in drawn), "a shared bias of an empty batch"


def test_projections_share_one_buffer():
    sizes = {
        "lead": (2,),
        "heads_k": 2,
        "group": 2,
        "seq_q": 5,
        "variant": Variant(head_dim=8, head_dim_v=4),
    }
    owner = lambda x: x.untyped_storage().data_ptr()  # noqa: E731
    inputs = make_inputs(Case(layout="joint", seq_k=5, **sizes))
    assert owner(inputs.q) == owner(inputs.k) == owner(inputs.v) != owner(inputs.dout)
    row = 4 * 8 + 2 * 8 + 2 * 4
    assert inputs.q.stride() == (5 * row, 8, row, 1) and inputs.v.stride() == (5 * row, 4, row, 1)
    cross = make_inputs(Case(layout="joint", seq_k=7, **sizes))
    assert owner(cross.k) == owner(cross.v) != owner(cross.q)
    packed = dict(sizes, variant=Variant(head_dim=8, head_dim_v=4, varlen=True), rank=3, lead=(), seq_k=0)
    packed = make_inputs(Case(layout="joint", **(packed | {"lens_q": (3, 2), "lens_k": (3, 2), "seq_q": 0})))
    assert owner(packed.q) == owner(packed.k) == owner(packed.v) and packed.q.stride(0) == row
    # The values are those of any other layout.
    plain = make_inputs(Case(layout="bhsd", seq_k=5, **sizes))
    assert all(torch.equal(getattr(plain, n), getattr(inputs, n)) for n in ("q", "k", "v", "dout"))


def test_layouts_are_drawn_one_by_one():
    mixed = Case(layout="bhsd", layouts=("bshd", "strided", "shifted"), lead=(2,), heads_k=3)
    inputs = make_inputs(mixed)
    assert inputs.q.is_contiguous() and inputs.k.stride(-3) == 16 and inputs.v.stride(-2) == 24
    assert inputs.dout.data_ptr() % 16 != 0
    drawn = list(generate(6, 800))
    for name in ("q", "k", "v"):
        assert {c.layout_of[name] for c in drawn} == set(LAYOUTS), name
    assert {c.layout_of["dout"] for c in drawn} == set(DOUT_LAYOUTS)
    assert sum(c.layout_of["dout"] != c.layout for c in drawn) > 200


def test_magnitudes_are_what_they_say():
    plain = {"lead": (2,), "seq_q": 64, "seq_k": 96}

    def made(magnitude, dtype="float32", **fields):
        variant = Variant(dtype=dtype, head_dim=32, head_dim_v=32)
        inputs = make_inputs(Case(variant=variant, magnitude=magnitude, **plain, **fields))
        wide = inputs.to(torch.float64)
        return inputs, wide.q @ wide.k.mT * (fields.get("scale") or 32**-0.5)

    inputs, _ = made("outliers")
    for x in (inputs.k, inputs.v):
        sizes = x.detach().square().mean((0, 1, 2)).sqrt()
        assert 1 <= (sizes > 20).sum() <= 3 and sizes.median() < 2
    inputs, scores = made("sharp_and_flat")
    top = scores.softmax(-1).amax(-1)[0, 0, :32]
    assert (top > 0.99).any() and torch.isclose(top, torch.tensor(1 / 96).double()).any()
    for magnitude, sign in (("rising", 1), ("falling", -1)):
        means = sign * made(magnitude)[1].mean((0, 1, 2)).unflatten(0, (6, 16)).mean(-1)
        assert (means[1:] > means[:-1] + 5).all()
    for dtype in ("float32", "bfloat16", "float16"):
        inputs, scores = made("huge", dtype)
        assert scores.abs().max() > 1e7 and inputs.q.isfinite().all() and inputs.k.isfinite().all()
    assert inputs.q.abs().max() > 4e4, "the edge of float16"
    assert made("huge", scale=1e8)[1].abs().max() > 1e7
    v = made("tiny", "float16")[0].v
    assert (v.abs() < torch.finfo(torch.float16).smallest_normal).any() and (v != 0).any()
    for dtype, least in (("float32", 1e34), ("bfloat16", 1e34), ("float16", 1e4)):
        vast = Case(variant=Variant(dtype=dtype), magnitude="vast")
        wide = make_inputs(vast).to(torch.float64)
        products = wide.q @ wide.k.mT
        assert least < products.abs().max() < torch.finfo(torch.float32).max
    drawn = list(generate(9, 1500))
    assert any(c.scale == 1e8 for c in drawn) and any(c.softcap == 0.01 for c in drawn)
    for case in drawn:
        if case.magnitude == "vast":
            assert abs(case.scale) * case.vastness**2 <= 1


def test_what_is_rare_is_drawn():
    """And by itself: the plain case is what Hypothesis shrinks to."""
    drawn = list(generate(10, 1500))
    dense = [c for c in drawn if c.variant.flipped]
    assert {c.scale > 0 for c in dense if c.scale} == {False} and any(c.scale == 0 for c in dense)
    assert any(c.scale and 0 < c.scale < 1e-5 for c in drawn if not c.variant.flipped)
    assert {c.softcap for c in drawn if c.softcap} == set(SOFTCAPS)
    weighted = [c for c in drawn if c.weight_shape is not None]
    assert {c.weight_zeros for c in weighted} == {"some", "none", "rows", "subnormal"}
    assert len({c.variant.sink for c in weighted}) > 1
    assert any(v.sink and v.key_weight for v in second_order_variants(max_dim=32))


def test_subnormal_weights_are_drawn_and_count_as_zero():
    variant = Variant(key_weight="float", key_weight_grad=True)
    case = Case(variant=variant, weight_shape=(1, 40), seq_k=40, weight_zeros="subnormal")
    inputs = make_inputs(case)
    weight = inputs.key_weight.detach()
    small = weight < torch.finfo(torch.float32).smallest_normal
    assert small.any() and (weight > 0).all()
    zeros = replace(inputs, key_weight=torch.where(small, 0.0, weight).requires_grad_())
    truth, found = Judge(zeros, fused=False).truth, Judge(inputs, fused=False).truth
    assert all(torch.equal(truth[name], found[name]) for name in truth)


def test_dout_in_columns_and_of_one_number():
    shape = {"lead": (2,), "seq_q": 8, "seq_k": 8}
    columns = make_inputs(Case(layouts=("bhsd", "bhsd", "columns"), **shape)).dout
    assert columns.stride()[-2:] == (1, 8) and columns.mT.is_contiguous()
    constant = make_inputs(Case(layouts=("bhsd", "bhsd", "constant"), **shape)).dout
    assert constant.stride() == (0, 0, 0, 0) and constant.shape == columns.shape


def test_hypothesis_shrinks_to_the_property_that_fails():
    """A failure that needs one property is found, and shrunk to a case with little else."""
    for wanted in (
        lambda c: c.padding == "tail" and c.dout_scale == 1e-6,
        lambda c: c.bias_number == "-1e9" and c.bias_number_at == "rows",
    ):
        case = find(cases(score_limit=1 << 12), wanted, settings=settings(max_examples=20000, database=None))
        assert case.magnitude == "unit" and case.layouts == () and case.heads_q == 1
        assert eval(repr(case)) == case
