"""A softcap of biased scores in the CUDA kernels of sm80, asked for by name: what `check` draws by chance, here on purpose."""

import pytest
import torch

from flashsci.testing import Case, Variant
from tests.support import judged_cases

DEVICE = torch.device("cuda")
NAME = "cuda:sm80"
DIMS = ((16, 16), (33, 64), (64, 64), (96, 80), (128, 128), (200, 256))
PAIRS = (2, 4, 130, 300)
KINDS = {
    "every score": dict(bias_shape=PAIRS),
    "heads innermost": dict(bias_shape=PAIRS, bias_view="linear"),
    "shared": dict(bias_shape=(130, 300)),
    "of keys, keys hidden": dict(bias_shape=(2, 1, 1, 300), mask_shape=(2, 1, 1, 300), mask_kind="keys"),
    "pairs hidden": dict(bias_shape=(1, 4, 130, 300), mask_shape=(2, 1, 130, 300)),
    "window": dict(bias_shape=PAIRS, window=(90, 20)),
    "causal": dict(bias_shape=(130, 300), causal=True, align="lower_right"),
    "-inf hides": dict(bias_shape=PAIRS, bias_holes=True, softcap=0.5),
    "the lowest number does not": dict(bias_shape=(130, 300), bias_number="dtype_min"),
    "no scale": dict(bias_shape=PAIRS, scale=0.0),
    "dropout": dict(bias_shape=(1, 4, 130, 300), dropout_p=0.3),
    "ALiBi": {},
    "ALiBi, packed": dict(lens_q=(100, 0, 33, 300), lens_k=(50, 20, 0, 333)),
}
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_every_tile(dtype, dims, kind, deterministic):
    given = KINDS[kind]
    dropout, alibi, packed = kind == "dropout", "ALiBi" in kind, "packed" in kind
    if dropout and (dtype == "float32" or max(dims) > 128):
        return  # these calls have no kernels with dropout
    for seed in range(2):
        variant = Variant(
            dtype, *dims, softcap=True, caps_bias=True, lse_grad=True, alibi=alibi, varlen=packed, dropout=dropout,
            bias=None if alibi else "pair", bias_grad=not alibi, bias_float=seed == 1 and not alibi,
            window="causal" in given or "window" in given, mask="mask_shape" in given, flipped=given.get("scale", 1) <= 0,
        )  # fmt: skip
        sizes = {} if packed else dict(lead=(2,), seq_q=130, seq_k=300)
        case = Case(variant, seed, heads_k=2, group=2, **({"softcap": 3.0} | sizes | given))
        judged_cases.judge(case, NAME, DEVICE, deterministic)
