"""ALiBi in the CUDA kernels of sm80, asked for by name: what `check` draws by chance, here on purpose."""

from dataclasses import replace

import pytest
import torch

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
    "pairs hidden": dict(mask_shape=(2, 1, 130, 300)),
    "keys hidden": dict(mask_shape=(2, 1, 1, 300), mask_kind="keys"),
    "packed": dict(lens_q=(100, 0, 33, 300), lens_k=(50, 20, 0, 333)),
}
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


def case_of(dtype, dims, kind, **others):
    given = KINDS[kind]
    variant = Variant(
        dtype, *dims, alibi=True, varlen=kind == "packed", window="causal" in given or "window" in given,
        softcap="softcap" in given, mask="mask_shape" in given, lse_grad=True,
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


@pytest.mark.parametrize("packed", (False, True))
def test_repeated_calls(packed):
    """Without torch's dispatcher: the slopes are read anew in each call."""
    inputs = make_inputs(case_of("bfloat16", (64, 64), "packed" if packed else "causal"), DEVICE)
    for factor in (1.0, 1.0, 3.0, 0.5):
        given = replace(inputs, alibi_slopes=inputs.alibi_slopes * factor)
        Judge(given).require(evaluate(given, NAME))
