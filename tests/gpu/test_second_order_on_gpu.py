"""Second order on a GPU, whichever backend ran the forward: few problems, `python -m flashsci check` judges many."""

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.testing import (
    Case,
    Judge,
    Variant,
    evaluate,
    generate,
    make_inputs,
    poisoned_memory,
    second_order_variants,
)
from flashsci.testing.evaluation import evaluate_along
from flashsci.testing.second_tangents import second_direction
from tests.support.judged_cases import require

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.gpu


def cases(dtype):
    every = (v for v in second_order_variants() if v.dtype == dtype)
    pool = [v for v in every if not (v.sink and v.key_weight_grad)][:6]  # no fused kernel has both
    return list(generate(13, 12, pool, score_limit=1 << 17))


# A test each: they compile up to nine kernels, which processes can do side by side.
@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_generated_problems(dtype, backend, number):
    require(backend)
    inputs = make_inputs(cases(dtype)[number], DEVICE)
    try:
        with poisoned_memory():
            found = evaluate(inputs, backend, deterministic=False)
    except flashsci.BackendError as refusal:
        if backend == "triton":
            raise
        pytest.skip(str(refusal))
    Judge(inputs).require(found)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_forward_mode_over_forward_mode(dtype, number):
    narrow = [c for c in cases(dtype) if max(c.variant.head_dim, c.variant.head_dim_v) <= 128 and not c.variant.gate]
    inputs = replace(make_inputs(narrow[number % len(narrow)], DEVICE), twice=True)
    with poisoned_memory():
        found = evaluate(inputs, "triton", deterministic=False)
    Judge(inputs).require(found)


def along_directions(inputs, count):
    """Judge tangents along as many directions, found in one call under vmap."""
    first = [inputs.tangents, *second_direction(inputs.tangents)]
    directions = [{n: x.roll(i, -1) for n, x in first[i % 3].items()} for i in range(count)]
    with poisoned_memory():
        found = evaluate_along(inputs, "triton", directions)
    for tangents, results in zip(directions, found, strict=True):
        Judge(replace(inputs, tangents=tangents)).require(results)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_forward_mode_along_many_directions(dtype, number):
    served = [c for c in cases(dtype) if not (c.variant.gate or (c.variant.sink and c.variant.key_weight_grad))]
    along_directions(make_inputs(served[number % len(served)], DEVICE), 3 + number)


@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (64, 64), (48, 24), (50, 20)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("feature", ["plain", "bias", "causal", "dropout", "weights", "packed", "mask"])
def test_many_directions_of_long_sequences(feature, dtype, dims):
    variants = {
        "bias": ({"bias": "pair", "bias_grad": True, "tangents": "qkvb"}, {"bias_shape": (2, 1, 300, 333)}),
        "causal": ({"window": True, "softcap": True}, {"causal": True, "softcap": 3.0}),
        "dropout": ({"dropout": True}, {"dropout_p": 0.2}),
        "weights": (
            {"key_weight": "float", "key_weight_grad": True, "tangents": "qkvw"},
            {"weight_shape": (2, 1, 333)},
        ),
        "packed": ({"varlen": True}, {"rank": 3, "lead": (), "lens_q": (70, 0, 230), "lens_k": (33, 5, 295)}),
        "mask": ({"mask": True}, {"mask_shape": (2, 1, 300, 333)}),
    }
    of_variant, of_case = variants.get(feature, ({}, {}))
    variant = replace(Variant(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], tangents="qkv"), **of_variant)
    case = Case(seed=31, variant=variant, lead=(2,), heads_k=2, group=2, seq_q=300, seq_k=333)
    along_directions(make_inputs(replace(case, **of_case), DEVICE), 6)


def test_many_directions_repeat_bitwise():
    q, k, v, t = (torch.randn(n, 4, 300, 64, device=DEVICE).bfloat16() for n in (2, 2, 2, 10))
    call = lambda *x: flashsci.attention(*x, backend="triton")  # noqa: E731
    along = lambda: torch.vmap(lambda t: torch.func.jvp(call, (q, k, v), (t, t, t))[1])(t.view(5, 2, 4, 300, 64))  # noqa: E731
    first = along()
    for _ in range(20):
        assert torch.equal(along(), first)


def test_forward_mode_over_forward_mode_in_linear_memory():
    q, k, v = (torch.randn(1, 4, 8192, 64, device=DEVICE).bfloat16() for _ in range(3))
    call = lambda *x: flashsci.attention(*x, causal=True, backend="triton")  # noqa: E731
    first = lambda *x: torch.func.jvp(call, x, (k, v, q))[1]  # noqa: E731
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.func.jvp(first, (q, k, v), (v, q, k))
    assert torch.cuda.max_memory_allocated() - before < 24 * q.numel() * q.element_size()


@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
def test_fp32_tiles_of_head_dim_64(precision):
    """Large ones on Hopper, which no generated problem has."""
    variant = Variant(dtype="float32", head_dim=64, head_dim_v=64, tangents="qkv")
    case = Case(variant=variant, lead=(2,), heads_k=2, seq_q=1030, seq_k=1029, precision=precision)
    inputs = make_inputs(case, DEVICE)
    with poisoned_memory():
        found = evaluate(inputs, "triton", deterministic=False)
    Judge(inputs).require(found)


def test_the_second_derivative_of_sdpa_is_tritons():
    """SDPA's own kernels have none: nothing of the size of the scores is made for it."""
    variant = Variant(dtype="bfloat16", head_dim=64, head_dim_v=64, tangents="qkv")
    inputs = make_inputs(Case(variant=variant, lead=(2,), heads_k=2, seq_q=300, seq_k=300, causal=True), DEVICE)
    judge = Judge(inputs)
    found = evaluate(inputs, "sdpa", lse=False)
    judge.require({n: found[n] for n in ("gq", "gk", "gv", "gdout")})

    q, k, v = (torch.randn(1, 4, 8192, 64, device=DEVICE).bfloat16().requires_grad_() for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = torch.autograd.grad(
        flashsci.attention(q, k, v, backend="sdpa").float().square().sum(), (q, k, v), create_graph=True
    )
    torch.autograd.grad(sum(x.float().square().sum() for x in first), (q, k, v))
    assert torch.cuda.max_memory_allocated() - before < 4 * 8192 * 8192
