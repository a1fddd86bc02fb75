"""The criteria themselves: honest kernels pass, wrong ones do not."""

from dataclasses import replace

import pytest
import torch

from flashsci.backends import reference
from flashsci.testing import (
    Case,
    Inputs,
    Judge,
    Variant,
    assert_accurate,
    evaluate,
    generate,
    make_inputs,
    variants,
)
from flashsci.testing.cases import NUMBERS
from tests.support.honest_kernels import (
    MISTAKES,
    MODEL_MISTAKES,
    SECOND_MISTAKES,
    flash_like,
    second_like,
)

pytestmark = pytest.mark.every(4)

DTYPES = ("bfloat16", "float16", "float32")


def problems(dtype, count, seed, fused=True, **limits):
    pool = [v for v in variants() if v.dtype == dtype]
    for case in generate(seed, count, pool, **{"score_limit": 1 << 14, **limits}):
        inputs = make_inputs(case)
        yield case, inputs, Judge(inputs, fused)


def ordinary(case):
    """Data of any kind that is not chosen to be hard to judge: no masks as numbers, no padding, no small gradients, no biases of
    hundreds."""
    plain = case.magnitude in ("unit", "peaked", "small_v", "large_v", "offset_v")
    values = case.padding == "none" and case.dout_scale == 1 and case.softcap != 0.01
    # A bias of some hundred leaves one key to a row: absolute values bound its scores' errors by P, not by P (1 - P).
    return plain and values and not case.bias_number and case.bias_scale < 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_kernels_pass_and_scaled_results_fail(dtype, record_property):
    """Over generated problems: no honest result fails; times 1.01, nearly all that can be judged fail."""
    caught, judged = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 0), {}
    for case, inputs, judge in problems(dtype, 240, seed=1):
        found = flash_like(inputs)
        wrong = [f.problem for f in judge.findings(found) if f.problem]
        assert not wrong, f"{case}: {wrong}"
        for name in caught:
            if not ordinary(case) and name in ("dq", "dk"):
                continue  # shifts that cancel, rows that softmax does not move: noise in any dtype
            seen = judge.catches(name, found[name])
            if seen is not None:
                caught[name] += seen
                judged[name] = judged.get(name, 0) + 1
    assert min(judged.values()) >= 25, judged
    shares = {name: caught[name] / judged[name] for name in caught}
    record_property("share of results times 1.01 that fail", shares)
    # Gradients of small or badly conditioned problems are noise beyond 1% in 16 bits: no test can judge those.
    least = {"bfloat16": 0.7, "float16": 0.9, "float32": 0.93}[dtype]
    assert min(shares["out"], shares["lse"]) > 0.9 and min(shares.values()) > least, shares


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_plain_problems_are_judged_in_every_tensor(dtype):
    """Unit-scale data, some thousand rows: each tensor times 1.01 fails."""
    variant = Variant(dtype=dtype, head_dim=32, head_dim_v=32, bias="pair", bias_grad=True, lse_grad=True)
    case = Case(variant=variant, lead=(8,), heads_k=4, seq_q=64, seq_k=64, bias_shape=(8, 4, 64, 64))
    inputs = make_inputs(case)
    judge, found = Judge(inputs), flash_like(inputs)
    judge.require(found)
    assert {name: judge.catches(name, x) for name, x in found.items()} == dict.fromkeys(found, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_summation_orders_pass(dtype):
    """Plain PyTorch over keys in reverse order: the same function, other roundings."""
    for case, inputs, judge in problems(dtype, 60, seed=2, fused=False, score_limit=1 << 12):
        if not ordinary(case):
            continue  # plain PyTorch: its own accuracy, where scores are large
        variant = case.variant
        if variant.varlen or variant.window or variant.dropout or variant.alibi:
            continue

        def turned(x, dim=-2):
            return x if x is None or x.dim() < -dim or x.shape[dim] == 1 else x.flip(dim)

        plain = inputs.to(None)
        rows = {name: turned(getattr(plain, name)) for name in ("k", "v")}
        columns = {name: turned(getattr(plain, name), -1) for name in ("bias", "key_weight", "mask")}
        found = evaluate(replace(plain, **rows, **columns), "reference")
        for name, dim in (("dk", -2), ("dv", -2), ("dbias", -1), ("dkey_weight", -1)):
            if name in found:
                found[name] = turned(found[name], dim)
        judge.require(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", MISTAKES)
def test_mistakes_fail(wrong, dtype):
    """Each of these mistakes in an otherwise honest kernel fails, although errors are far from gross."""
    variant = Variant(dtype=dtype, head_dim=32, head_dim_v=24, bias="pair", bias_grad=True, lse_grad=True)
    case = Case(variant=variant, seed=5, lead=(3,), heads_k=2, group=2, seq_q=70, seq_k=90, bias_shape=(1, 4, 70, 90))
    inputs = make_inputs(case)
    judge = Judge(inputs)
    judge.require(flash_like(inputs))
    with pytest.raises(AssertionError):
        judge.require(flash_like(inputs, wrong))


def model_inputs(wrong, dtype, **fields):
    """The inputs that show one of MODEL_MISTAKES."""
    variant = Variant(dtype=dtype, head_dim=32, head_dim_v=24, bias="pair", bias_grad=True, lse_grad=False)
    plain = {"lead": (2,), "heads_k": 2, "seq_q": 48, "seq_k": 70, "bias_shape": (1, 2, 48, 70)}
    given = {
        "zero rows set the exponent of halves": {"padding": "dout_scattered", "dout_scale": 1e-9},
        "offset of exp2 rounded": {"bias_number": "float32_min"},
        "recomputed P beyond 1": {"bias_number": "float32_min", "bias_number_at": "rows"},
        "zero keys left out": {"padding": "scattered"},
        "rows without dout not computed": {"padding": "dout_tail"},
        "column block of the next tile": {},
        "gradient of an empty sum not written": {"lead": (0,)},
        "number hides a whole row": {"bias_number": "-1e30", "bias_number_at": "rows"},
        "padding reaches dv": {"padding": "dout_tail"},
    }[wrong]
    if "bias_number" in given:
        variant = replace(variant, bias_float=True)
    return make_inputs(Case(variant=variant, seed=9, **(plain | given | fields)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", MODEL_MISTAKES)
def test_mistakes_that_models_show_fail(wrong, dtype):
    """An honest kernel passes on padding, small gradients and masks as numbers; one with an old defect does not."""
    if dtype != "float32" and wrong.endswith("of halves"):
        pytest.skip("halves are of float32")
    inputs = model_inputs(wrong, dtype)
    judge = Judge(inputs)
    judge.require(flash_like(inputs))
    with pytest.raises(AssertionError):
        judge.require(flash_like(inputs, wrong))


@pytest.mark.parametrize(
    "case",
    [
        Case(
            Variant(head_dim=3, head_dim_v=5, bias="pair", bias_grad=True), seed=1743595698, lead=(5,), heads_k=3, group=4,
            seq_q=63, seq_k=2, bias_shape=(1, 63, 2), bias_view="expanded", layout="expanded", magnitude="rising",
        ),  # P of the second key is 1e-42
        Case(
            Variant(head_dim=96, head_dim_v=96, sink="float", varlen=True), seed=731587774, rank=3, heads_k=3, scale=1.0,
            lens_q=(511,), lens_k=(48,), magnitude="falling", padding="dout_scattered",
        ),  # and that of the sink
    ],
)  # fmt: skip
def test_subnormal_numbers_may_be_zero(case):
    """As exponentials on a GPU make them."""
    judge = Judge(make_inputs(case))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps subnormal numbers")
    try:
        found = evaluate(judge.inputs, "reference")
    finally:
        torch.set_flush_denormal(False)
    judge.require(found)


def test_small_numbers_in_parts():
    """A dS of 1e-40 keeps three bits in parts of TF32: that much its products may be off, and no more."""
    variant = Variant("float32", head_dim=8, head_dim_v=8, sink="float")
    case = Case(
        variant, seed=2119912205, rank=3, lead=(), heads_k=1, group=2, seq_q=3, seq_k=3, layout="shifted",
        layouts=("packed", "bshd", "strided"), magnitude="falling", padding="tail", dout_scale=1e-9,
    )  # fmt: skip
    inputs = make_inputs(case)
    judge, found = Judge(inputs), flash_like(inputs)
    assert abs(judge.errors("dk", found["dk"])[1]) > 1e-3, "the case does not test what it is for"
    judge.require(found)
    assert judge.judge("dk", found["dk"] * 1.2).problem
    with pytest.raises(AssertionError):  # plain PyTorch multiplies whole numbers
        Judge(inputs, fused=False).require(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", NUMBERS)
def test_whole_rows_of_numbers_loosen_no_other_row(number, dtype):
    """Rows that see a key are judged as tightly as if the others were not there, and so is all without dout."""
    variant = Variant(dtype=dtype, head_dim=32, head_dim_v=24, bias="pair", bias_float=True, bias_grad=True)
    case = Case(variant=variant, seed=9, lead=(2,), heads_k=2, seq_q=48, seq_k=70, bias_shape=(2, 2, 48, 70))
    plain = make_inputs(case)
    bias = plain.bias.detach().clone()
    least = torch.finfo(torch.float32).min
    named = {"float32_min": least, "dtype_min": torch.finfo(plain.q.dtype).min}
    value = named[number] if number in named else float(number)
    bias[..., 30:, :] = (bias[..., 30:, :] + value).clamp(min=least)
    dout = plain.dout.detach().clone()
    dout[..., 30:, :] = 0
    inputs = replace(plain, bias=bias.requires_grad_(), dout=dout)
    judge, found = Judge(inputs), flash_like(inputs)
    judge.require(found)
    alone = Judge(replace(inputs, q=inputs.q[..., :30, :], bias=bias[..., :30, :], dout=dout[..., :30, :]))
    for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
        most, least = (
            [
                2 * base + floor
                for base, floor in zip(j.baseline_errors(name)[::2], (j.floor[name], j.spread_floor[name]), strict=True)
            ]
            for j in (judge, alone)
        )
        assert all(a <= 1.5 * b for a, b in zip(most, least, strict=True)), (name, most, least)
    for name in ("dq", "dbias", "dk", "dv"):
        loose = judge.loose.get(name)
        assert loose is None or not loose.any(), f"{name}: rows without dout loosen it"
    wrong = found["dq"].clone()
    wrong[..., 35, :] += torch.finfo(wrong.dtype).smallest_normal
    with pytest.raises(AssertionError, match="every term is zero"):
        judge.require({"dq": wrong})
    for name in ("out", "dq", "dk", "dv"):
        assert judge.catches(name, found[name]) is not False, name


def test_scores_beyond_what_fp32_resolves_are_judged_where_one_key_wins():
    """Scores of 1e9: out is the value of the largest; another key's is wrong, but where the two are too close to tell."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, dout = (torch.randn(2, 2, 40, 32, generator=generator) for _ in range(4))
    inputs = Inputs(q, k, v, dout=dout, options={"scale": 1e8})
    judge, found = Judge(inputs), flash_like(inputs)
    judge.require(found)
    assert torch.equal(found["out"][0, 0, 0], v[0, 0, (q @ k.mT)[0, 0, 0].argmax()])
    wrong = found["out"].clone()
    wrong[..., 3, :] = v[..., 0, :]
    with pytest.raises(AssertionError):
        judge.require({"out": wrong})
    with pytest.raises(AssertionError):
        judge.require({"out": torch.full_like(wrong, torch.nan)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_off_by_one_fails(dtype):
    variant = Variant(dtype=dtype, window=True)
    inputs = make_inputs(Case(variant=variant, lead=(2,), heads_k=2, seq_q=65, seq_k=65, causal=True))
    shifted = replace(inputs, options={**inputs.options, "causal": False, "window": (None, 1)})
    judge = Judge(inputs)
    judge.require(flash_like(inputs))
    with pytest.raises(AssertionError):
        judge.require(flash_like(shifted))


def test_infinities_of_lse_must_agree():
    case = Case(variant=Variant(dtype="float16", mask=True), seq_q=20, mask_shape=(20, 1), mask_kind="rows")
    inputs = make_inputs(case)
    judge, found = Judge(inputs), flash_like(inputs)
    judge.require(found)
    hidden = torch.isinf(found["lse"])
    assert hidden.any()
    with pytest.raises(AssertionError, match="where -inf is due"):
        judge.require({"lse": torch.where(hidden, -1e30, found["lse"])})
    with pytest.raises(AssertionError, match="lse"):
        judge.require({"lse": torch.where(hidden, torch.inf, found["lse"])})


def test_what_a_dtype_cannot_hold_is_infinite_or_nan_there_alone():
    judge = Judge(make_inputs(Case(variant=Variant(dtype="float32"))))
    found = judge.baseline["dv"].clone()
    judge.truth["dv"][..., 3, 2] = 1e200
    judge.baseline["dv"][..., 3, 2] = torch.inf
    for value in (torch.inf, torch.nan):
        found[..., 3, 2] = value
        judge.require({"dv": found})
    with pytest.raises(AssertionError):
        judge.require({"dv": torch.full_like(found, torch.inf)})
    found[..., 3, 2] = 1.0
    with pytest.raises(AssertionError):
        judge.require({"dv": found})


def test_equal_probabilities_round_equally():
    """All P of a row are 1/193, to a few digits less than the dtype has: their roundings add up."""
    variant = Variant(dtype="float16", head_dim=200, head_dim_v=136, softcap=True, lse_grad=True)
    sizes = {"heads_k": 3, "seq_q": 193, "seq_k": 193, "rank": 3, "softcap": 2.0}
    judge = Judge(make_inputs(Case(variant=variant, seed=4, magnitude="tiny", **sizes)))
    off = abs(1 - torch.tensor(1 / 193).half().double().item() * 193)  # P as a kernel of wide heads keeps it
    assert off < judge.gain_floor["dk"] < 0.01


def test_dtype_and_shape_must_agree():
    judge = Judge(make_inputs(Case(variant=Variant(dtype="float16"))))
    out = judge.baseline["out"]
    with pytest.raises(AssertionError, match=r"must be torch\.float16 "):
        judge.require({"out": out.float()})
    with pytest.raises(AssertionError, match=r"must be torch\.float16 \[1, 1, 16, 16\]"):
        judge.require({"out": out[0]})


def test_baseline_that_overflows_is_replaced():
    """fp16 scores beyond 65504 break plain PyTorch, not a kernel with fp32 scores."""
    q, k, v, dout = torch.randn(4, 1, 2, 32, 16).half()
    inputs = Inputs(200 * q, 200 * k, v, dout=dout)
    assert not torch.isfinite(evaluate(inputs, "reference")["out"]).all()
    judge = Judge(inputs)
    assert all(torch.isfinite(x).all() for x in judge.baseline.values())
    judge.require(flash_like(inputs))


def test_the_oracle_is_checked(monkeypatch):
    """A reference that forgets the causal mask disagrees with the formula of the bounds."""
    inputs = make_inputs(Case(variant=Variant(window=True), causal=True))
    Judge(inputs)
    monkeypatch.setattr(reference, "visible", lambda *a, **k: None)
    with pytest.raises(AssertionError, match="disagree on out"):
        Judge(inputs)


def test_fp64_is_judged_at_fp64_rounding():
    inputs = make_inputs(Case(variant=Variant(dtype="float64"), heads_k=2, seq_q=30, seq_k=30))
    judge = Judge(inputs)
    found = evaluate(inputs, "reference")
    judge.require(found)
    with pytest.raises(AssertionError):
        judge.require({"out": found["out"].float().double()})


def test_assert_accurate_names_the_tensor(monkeypatch):
    inputs = make_inputs(Case())
    assert_accurate(inputs, "sdpa", lse=False)
    honest = reference.forward
    judge = Judge(inputs)
    monkeypatch.setattr(reference, "forward", lambda *a: tuple(1.01 * x for x in honest(*a)))
    with pytest.raises(AssertionError, match="out: error"):
        judge.require(evaluate(inputs, "reference"))


def second_order_inputs(dtype, **fields):
    variant = Variant(
        dtype=dtype, head_dim=32, head_dim_v=24, bias="pair", bias_grad=True, lse_grad=True, softcap=True, dropout=True,
        tangents="qkvb",
    )  # fmt: skip
    plain = {"lead": (3,), "heads_k": 2, "seq_q": 70, "seq_k": 90, "bias_shape": (1, 2, 70, 90)}
    return make_inputs(Case(variant=variant, seed=5, softcap=2.0, dropout_p=0.2, **(plain | fields)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_honest_second_order_passes_and_scaled_results_fail(dtype):
    for fields in (
        {},
        {"seq_q": 33, "seq_k": 17, "bias_shape": (1, 1, 33, 17)},
        {"magnitude": "peaked"},
        {"tangent_magnitude": "offset"},
    ):
        judge = Judge(second_order_inputs(dtype, **fields))
        found = second_like(judge.inputs)
        judge.require(found)
        caught = {name: judge.catches(name, x) for name, x in found.items()}
        if not fields:
            assert all(caught.values()), caught


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", SECOND_MISTAKES)
def test_second_order_mistakes_fail(wrong, dtype):
    judge = Judge(second_order_inputs(dtype))
    with pytest.raises(AssertionError):
        judge.require(second_like(judge.inputs, wrong))


def test_the_second_order_of_the_oracle_is_checked(monkeypatch):
    """A reference whose gradient is right and whose second derivative is not disagrees with the formula."""
    inputs = second_order_inputs("float32")
    Judge(inputs)
    honest = reference.forward

    class Twice(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, g: 2 * g)

    class Wrong(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, g: Twice.apply(g))
        jvp = staticmethod(lambda ctx, t: t)

    wrong = lambda t, scalars: honest(t._replace(q=Wrong.apply(t.q)), scalars)  # noqa: E731
    monkeypatch.setattr(reference, "forward", wrong)
    with pytest.raises(AssertionError, match="disagree on g"):
        Judge(inputs)
