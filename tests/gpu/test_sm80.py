"""The 16-bit kernels of sm80, asked for by name: what `check` draws by chance, here on purpose."""

import pytest
import torch

import flashsci
from flashsci import registry
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs, poisoned_memory

DEVICE = torch.device("cuda")
NAME = "cuda:sm80"
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def loaded():
    reason = registry.find(NAME).unavailable()
    if reason is not None:
        pytest.skip(f"{NAME}: {reason}")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (33, 64), (48, 48), (127, 128), (128, 128), (200, 256)])  # fmt: skip
@pytest.mark.parametrize("seq_k", [129, 136])  # rows of the bias that start anywhere, or aligned
@pytest.mark.parametrize("shape", ["pairs", "shared", "keys"])
def test_bias_and_its_gradient(shape, seq_k, head_dim, head_dim_v, fp32, deterministic):
    variant = Variant(
        "bfloat16", head_dim, head_dim_v, bias="pair", bias_float=fp32, bias_grad=True, mask=True
    )
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


REPEATED = [
    (dtype, d, 300) for dtype in (torch.float16, torch.bfloat16) for d in (32, 64, 128, 256)
]
# fp32: short rows of keys by one warp, five and eight; then two kernels.
REPEATED += [(torch.float32, d, s) for d, s in ((24, 30), (24, 129), (16, 200), (32, 300), (64, 300), (128, 300))]  # fmt: skip


@pytest.mark.parametrize("dtype, head_dim, seq", REPEATED)
def test_a_hundred_repeats_are_bitwise_equal(dtype, head_dim, seq):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 4, seq, head_dim, device=DEVICE, dtype=dtype) for _ in range(4))
    bias = torch.randn(1, 4, seq, seq, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]

    def run():
        out = flashsci.attention(q, k, v, bias=bias, deterministic=True, backend=NAME)
        return out, *torch.autograd.grad(out, leaves, dout)

    first = run()
    for _ in range(99):
        assert all(map(torch.equal, first, run()))
