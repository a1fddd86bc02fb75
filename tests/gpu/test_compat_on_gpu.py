"""Stand-ins for functions of other packages on the kernels: what tests/cpu interprets, in sizes that take several tiles."""

import pytest
import torch

import flashsci
from flashsci.compat import cuequivariance, deepspeed, jvp_flash_attention, xformers
from flashsci.testing import Inputs, Judge
from tests.support import standins
from tests.support.everywhere import served_on_a_gpu

KERNELS = pytest.mark.parametrize("backend", ["triton", "cuda"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("loaded")]


@KERNELS
@DTYPES
@pytest.mark.parametrize("odd", [False, True])
def test_triangle_attention(backend, dtype, odd):
    served_on_a_gpu(standins.triangle, backend, dtype, (1, 6, 4, 150, 150), (32, 32), odd=odd)


@DTYPES
def test_evoformer_attention(dtype):
    served_on_a_gpu(standins.evoformer, "triton", dtype, (1, 7, 140, 4, 32))


@pytest.mark.parametrize("depth", [60.0, 95.0, 130.0])
def test_evoformer_biases_that_cancel_each_other(depth):
    """Weights of keys down to e^-75 in rows that are lifted for it; every gradient against float64."""
    q, k, v, dout = torch.randn(4, 1, 5, 140, 4, 32, device="cuda").bfloat16()
    keys = torch.randint(-512, 512, (1, 5, 1, 1, 140), device="cuda") / 256
    pairs = torch.randint(-512, 512, (1, 1, 4, 140, 140), device="cuda") / 256
    keys[..., 33] -= depth
    pairs[..., 33] += depth
    inputs = [x.transpose(2, 3) for x in (q, k, v, dout)]
    judge = Judge(Inputs(*inputs[:3], dout=inputs[3], bias=keys + pairs))
    leaves = [x.requires_grad_() for x in (q, k, v, keys, pairs)]
    out = deepspeed.DS4Sci_EvoformerAttention(q, k, v, [keys, pairs])
    dq, dk, dv, dkeys, dpairs = torch.autograd.grad(out, leaves, dout)
    found = dict(out=out.detach(), dq=dq, dk=dk, dv=dv)
    judge.require({name: x.transpose(2, 3) for name, x in found.items()})
    truth = judge.truth["dbias"]
    for a, t in ((dkeys, truth.sum((2, 3), keepdim=True)), (dpairs, truth.sum(1, keepdim=True))):
        assert (a - t).abs().max() <= 2**-6 * t.abs().max()


@KERNELS
@DTYPES
def test_evoformer_attention_with_one_bias(backend, dtype):
    served_on_a_gpu(standins.evoformer, backend, dtype, (1, 7, 140, 4, 32), pairs=False)


@KERNELS
@DTYPES
@pytest.mark.parametrize("band", [None, *standins.BANDS])
def test_one_sequence(backend, dtype, band):
    served_on_a_gpu(standins.one_sequence, backend, dtype, band, (150, 190))


@KERNELS
@pytest.mark.parametrize("heads", [(), (2, 3)])
@pytest.mark.parametrize("tensor", [False, True])
def test_dims(backend, heads, tensor):
    served_on_a_gpu(standins.one_sequence, backend, torch.bfloat16, None, (150, 190), heads, tensor)


@KERNELS
@pytest.mark.parametrize("name", standins.PACKED)
def test_packed(backend, name):
    served_on_a_gpu(standins.packed, backend, torch.bfloat16, name, groups=2, shared=True)


@DTYPES
@pytest.mark.parametrize("mask", [None, "bool", "-1e9"])
@pytest.mark.parametrize("through", ["func", "dual", "explicit"])
@KERNELS
def test_tangents(backend, dtype, mask, through):
    if mask == "-1e9" and dtype == torch.float16:
        mask = "-inf"
    served_on_a_gpu(standins.tangents, backend, dtype, mask, length=150, through=through)


def test_packed_biases_are_made_where_the_tensors_are():
    bias = xformers.BlockDiagonalMask.from_seqlens([3, 4])
    assert bias.q_seqinfo.seqstart.device.type == "cuda"
    x = torch.randn(1, 7, 2, 16, device="cuda")
    assert xformers.memory_efficient_attention(x, x, x, bias).shape == x.shape


def peak(call):
    """Bytes that a call needs at once, beyond what it returns and what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before
    del kept
    return found


def test_no_stand_in_needs_memory_for_scores():
    """A score of 16 bits for each pair would be 512 MiB."""
    length, dtype = 16384, torch.bfloat16
    q, k, v, *ts = (torch.randn(1, 1, length, 64, device="cuda", dtype=dtype) for _ in range(6))
    calls = {
        "jvp": lambda: torch.func.jvp(jvp_flash_attention.attention, (q, k, v), tuple(ts)),
        "jvp, explicit": lambda: jvp_flash_attention.attention_jvp(q, k, v, *ts),
    }
    packed = [x.transpose(1, 2) for x in (q, k, v)]
    for name in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        bias = getattr(xformers, name).from_seqlens([length // 2, length // 2])
        calls[name] = lambda bias=bias: xformers.memory_efficient_attention(*packed, bias)
    padded = xformers.BlockDiagonalCausalWithOffsetPaddedKeysMask
    bias = padded.from_seqlens([length // 2] * 2, length // 2, [length // 2 - 5] * 2)
    calls["padded"] = lambda: xformers.memory_efficient_attention(*packed, bias)
    for name, call in calls.items():
        assert peak(call) < length * length * 2 // 8, name


def test_triangles_never_add_mask_and_bias():
    n, heads = 192, 4
    q, k, v = torch.randn(3, 1, n, heads, n, 32, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1, 1, heads, n, n, device="cuda")
    mask = torch.rand(1, n, 1, 1, n, device="cuda") < 0.8
    call = lambda: cuequivariance.triangle_attention(q, k, v, bias, mask)  # noqa: E731
    assert peak(call) < n * heads * n * n * 2
    with flashsci.use_backend("reference"):
        assert peak(call) > n * heads * n * n * 2  # what is measured here
