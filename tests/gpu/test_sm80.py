"""The 16-bit kernels of sm80, asked for by name: what `check` draws by chance, here on purpose."""

import pytest
import torch

from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs, poisoned_memory

DEVICE = torch.device("cuda")
NAME = "cuda:sm80"
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (33, 64), (48, 48), (127, 128), (128, 128), (200, 256)])
@pytest.mark.parametrize("seq_k", [129, 136])  # rows of the bias that start anywhere, or aligned
@pytest.mark.parametrize("shape", ["pairs", "shared", "keys"])
def test_bias_and_its_gradient(shape, seq_k, head_dim, head_dim_v, fp32, deterministic):
    variant = Variant("bfloat16", head_dim, head_dim_v, bias="pair", bias_float=fp32, bias_grad=True, mask=True)
    bias = {
        "pairs": (3, 4, 70, seq_k),
        "shared": (1, 4, 70, seq_k),  # triangle attention
        "keys": (3, 4, 1, seq_k),
    }[shape]
    case = Case(
        variant=variant,
        lead=(3,),
        heads_k=2,
        group=2,
        seq_q=70,
        seq_k=seq_k,
        bias_shape=bias,
        bias_holes=True,
        mask_shape=(3, 1, 1, seq_k),
        mask_kind="keys",
    )
    inputs = make_inputs(case, DEVICE)
    with poisoned_memory():
        found = evaluate(inputs, NAME, deterministic=deterministic)
    Judge(inputs).require(found)
