"""A bias of packed calls in the CUDA kernels of sm80, asked for by name: what `check` draws by chance, here on purpose."""

import math

import pytest
import torch

import flashsci
from flashsci.testing import Case, Variant
from tests.support import judged_cases

DEVICE = torch.device("cuda")
NAME = "cuda:sm80"
DIMS = ((16, 16), (33, 64), (64, 64), (96, 80), (128, 128), (200, 256))
LENS = dict(lens_q=(100, 0, 33, 300), lens_k=(50, 20, 0, 333))
PAIRS, KEYS = sum(a * b for a, b in zip(*LENS.values(), strict=True)), sum(LENS["lens_k"])
KINDS = {
    "pairs of every head": dict(bias_shape=(4, PAIRS)),
    "pairs that heads share": dict(bias_shape=(1, PAIRS)),
    "pairs, keys not neighbours": dict(bias_shape=(4, PAIRS), bias_view="transposed"),
    "pairs, -inf hides": dict(bias_shape=(4, PAIRS), bias_holes=True),
    "pairs, causal": dict(bias_shape=(4, PAIRS), causal=True, align="lower_right"),
    "pairs, window": dict(bias_shape=(1, PAIRS), window=(90, 20)),
    "pairs, softcap of the scores": dict(bias_shape=(4, PAIRS), softcap=3.0),
    "pairs, softcap of the sum": dict(bias_shape=(4, PAIRS), softcap=3.0),
    "keys of every head": dict(bias_shape=(4, KEYS)),
    "keys that heads share": dict(bias_shape=(1, 1, KEYS)),
    "keys, causal": dict(bias_shape=(4, KEYS), causal=True),
}
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


def case_of(dtype, dims, kind, bias_float, **others):
    given = KINDS[kind]
    variant = Variant(
        dtype, *dims, bias="pair" if "pairs" in kind else "key", bias_float=bias_float, bias_grad=True, varlen=True,
        window="causal" in given or "window" in given, softcap="softcap" in given, caps_bias="sum" in kind, lse_grad=True,
    )  # fmt: skip
    return Case(variant, heads_k=2, group=2, **LENS, **given, **others)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_every_tile(dtype, dims, kind, deterministic):
    for seed in range(2):
        case = case_of(dtype, dims, kind, seed == 1 and dtype != "float32", seed=seed)
        judged_cases.judge(case, NAME, DEVICE, deterministic)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("wrong", (-1, 5, 1 << 40, -(1 << 62), (1 << 62)))
def test_block_starts_that_are_wrong_stay_in_bounds(dtype, wrong):
    """A block that would leave the bias is not read, and its gradient not written: its queries see no key."""
    q, k, v = (torch.randn(2, 12, 64, device=DEVICE, dtype=dtype) for _ in range(3))
    edges = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    around = torch.full((2, 3, 74), math.nan, device=DEVICE, dtype=dtype)
    bias = around[:, 1].copy_(torch.randn(2, 74, device=DEVICE))
    starts = torch.tensor([0, 25 + wrong, 74], device=DEVICE)
    scalars = (-1, -1, 0.125, 0.0, -1, -1, False, False)
    tensors = q, k, v, bias, None, edges, edges
    out, lse = torch.ops.flashsci.cuda_forward(*tensors, *scalars, 80, bias_offsets=starts)
    found = torch.ops.flashsci.cuda_backward(
        out, None, *tensors, out, lse, *scalars, False, 80, 15, bias_offsets=starts
    )
    torch.cuda.synchronize()
    assert out.isfinite().all() and all(x.isfinite().all() for x in found)
    outside = wrong > 0 or wrong < -25
    assert (lse[:, 5:] == -math.inf).all() == outside
    if outside:
        assert not out[:, 5:].any() and not any(x[:, 5:].any() for x in found[:3]) and not found[3][:, 25:].any()


def test_repeated_calls():
    """The bias and the starts are read anew in each call."""
    for lens in ((30, 40, 50), (50, 30, 40), (120,)):
        edges = torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32)
        q, k, v = (torch.randn(120, 4, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        bias = torch.randn(4, sum(n * n for n in lens), device=DEVICE, requires_grad=True)
        found = []
        for backend in (NAME, "reference"):
            out = flashsci.varlen_attention(q, k, v, edges, bias=bias, backend=backend)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v, bias))))
        for ours, truth in zip(*found, strict=True):
            error = (ours.double() - truth.double()).norm() / truth.double().norm()
            assert error < 0.02, error
