"""Key weights of any length in the CUDA kernels of sm80, asked for by name: what `check` draws by chance, here on purpose."""

from dataclasses import replace

import pytest
import torch

from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs
from tests.support import judged_cases

DEVICE = torch.device("cuda")
NAME = "cuda:sm80"
DIMS = ((16, 16), (33, 64), (64, 64), (96, 80), (128, 128), (200, 256))
KINDS = {
    "of heads": {},
    "of all heads": dict(weight_shape=(2, 1, 300)),
    "of the batch": dict(weight_shape=(1, 2, 300), weight_view="transposed"),
    "one for all keys": dict(weight_shape=(2, 2, 1)),
    "all zero in one member": dict(weight_zeros="rows"),
    "subnormal": dict(weight_zeros="subnormal"),
    "causal": dict(causal=True, align="lower_right"),
    "softcap": dict(softcap=9.0),
    "pairs hidden": dict(mask_shape=(2, 1, 130, 300)),
    "keys hidden": dict(mask_shape=(2, 1, 1, 300), mask_kind="keys"),
}
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_every_tile(dtype, dims, kind, deterministic):
    given = {"weight_shape": (2, 2, 300), **KINDS[kind]}
    variant = Variant(
        dtype, *dims, key_weight="float", key_weight_grad=True, lse_grad=True, window="causal" in given,
        softcap="softcap" in given, mask="mask_shape" in given,
    )  # fmt: skip
    for seed in range(2):
        case = Case(variant, seed, lead=(2,), heads_k=2, group=2, seq_q=130, seq_k=300, **given)
        judged_cases.judge(case, NAME, DEVICE, deterministic)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_weights_in_the_dtype_of_q(dtype):
    variant = Variant(dtype, 64, 64, key_weight="inputs", key_weight_grad=True)
    inputs = make_inputs(Case(variant, 1, lead=(2,), heads_k=2, seq_q=130, seq_k=300, weight_shape=(2, 2, 300)), DEVICE)
    for _ in range(3):  # repeated calls too
        Judge(inputs).require(evaluate(inputs, NAME))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_repeated_calls(dtype):
    """Without torch's dispatcher: the weights are read anew in each call."""
    variant = Variant(dtype, 64, 64, key_weight="float", key_weight_grad=True)
    inputs = make_inputs(
        Case(variant, 2, lead=(2,), heads_k=2, group=2, seq_q=130, seq_k=300, weight_shape=(2, 2, 300)), DEVICE
    )
    for factor in (1.0, 1.0, 3.0, 0.5):
        given = replace(inputs, key_weight=inputs.key_weight * factor)
        Judge(given).require(evaluate(given, NAME))
