"""ALiBi and learnt slopes in the CUDA kernels of sm80, asked for by name: what `check` draws by chance, here on purpose."""

import functools
import math
from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs
from tests.support import judged_cases

DEVICE = torch.device("cuda")
NAME = "cuda:sm80"
DIMS = ((16, 16), (33, 64), (64, 64), (96, 80), (128, 128), (200, 256))
KINDS = {
    "plain": {},
    "causal": dict(causal=True, align="lower_right"),
    "window": dict(window=(90, 20)),
    "softcap": dict(softcap=9.0),
    "softcap of the sum": dict(softcap=9.0),
    "pairs hidden": dict(mask_shape=(2, 1, 130, 300)),
    "keys hidden": dict(mask_shape=(2, 1, 1, 300), mask_kind="keys"),
    "packed": dict(lens_q=(100, 0, 33, 300), lens_k=(50, 20, 0, 333)),
}
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


def case_of(dtype, dims, kind, learnt=True, **others):
    given = KINDS[kind]
    variant = Variant(
        dtype, *dims, alibi=True, alibi_grad=learnt, varlen=kind == "packed", window="causal" in given or "window" in given,
        softcap="softcap" in given, caps_bias=kind == "softcap of the sum", mask="mask_shape" in given, lse_grad=True,
    )  # fmt: skip
    sizes = {} if kind == "packed" else dict(lead=(2,), seq_q=130, seq_k=300)
    return Case(variant, heads_k=2, group=2, **sizes, **given, **others)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_every_tile(dtype, dims, kind, deterministic):
    for seed in range(2):
        judged_cases.judge(case_of(dtype, dims, kind, seed=seed), NAME, DEVICE, deterministic)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_slopes_of_any_sign_and_size(dtype):
    inputs = make_inputs(case_of(dtype, (64, 64), "plain"), DEVICE)
    for values in ((0.0, -0.03, 3e4, 1e-30), (1.0, 0.5, 0.25, 0.125)):
        given = replace(inputs, alibi_slopes=torch.tensor(values, device=DEVICE))
        Judge(given).require(evaluate(given, NAME))


@pytest.mark.parametrize("shape", ((4,), (1,), (2, 4), (2, 1), (1, 4)))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_learnt_slopes_that_broadcast(dtype, shape):
    inputs = make_inputs(case_of(dtype, (64, 64), "causal"), DEVICE)
    given = replace(inputs, alibi_slopes=torch.linspace(0.01, 0.3, math.prod(shape), device=DEVICE).reshape(shape))
    Judge(given).require(evaluate(given, NAME))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_learnt_slopes_of_long_rows(dtype):
    """Sums over thousands of keys and queries."""
    variant = Variant(dtype, 64, 64, alibi=True, alibi_grad=True)
    judged_cases.judge(Case(variant, heads_k=2, seq_q=2048, seq_k=3000), NAME, DEVICE, False)


@pytest.mark.parametrize("dims", ((32, 32), (64, 64), (96, 80), (128, 128)))
def test_learnt_slopes_with_dropout(dims):
    variant = Variant("bfloat16", *dims, alibi=True, alibi_grad=True, dropout=True, lse_grad=True)
    case = Case(variant, lead=(2,), heads_k=2, group=2, seq_q=130, seq_k=300, dropout_p=0.3)
    judged_cases.judge(case, NAME, DEVICE, False)


def test_only_the_slopes_are_learnt():
    inputs = make_inputs(case_of("bfloat16", (64, 64), "causal"), DEVICE)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    call = functools.partial(flashsci.attention, causal=True, align="lower_right", backend=NAME)
    slopes = inputs.alibi_slopes.detach().requires_grad_()
    found = [torch.autograd.grad(call(*rows, alibi_slopes=slopes), slopes, inputs.dout)[0]
             for rows in ((q, k, v), [x.clone().requires_grad_() for x in (q, k, v)])]  # fmt: skip
    assert torch.equal(*found)


@pytest.mark.parametrize("learnt", (False, True))
@pytest.mark.parametrize("packed", (False, True))
def test_repeated_calls(packed, learnt):
    """Without torch's dispatcher: the slopes are read anew in each call."""
    inputs = make_inputs(case_of("bfloat16", (64, 64), "packed" if packed else "causal", learnt), DEVICE)
    for factor in (1.0, 1.0, 3.0, 0.5):
        given = replace(inputs, alibi_slopes=inputs.alibi_slopes * factor)
        Judge(given).require(evaluate(given, NAME))
