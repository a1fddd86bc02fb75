"""scaled_dot_product_attention and varlen_attn of torch, through flashsci as torch's flash attention: forward, backward, compiled,
captured; judged against fp64. The operators themselves: tests/cpu/integrations/test_torch_impl.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import attention as theirs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import flashsci
from flashsci.integrations import torch as integration
from flashsci.testing import Inputs, Judge

pytestmark = pytest.mark.gpu
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def active():
    handle = integration.register()
    theirs.activate_flash_attention_impl("flashsci")
    handle.activate()  # torch 2.10 activates a name once
    try:
        yield handle
    finally:
        restore()


def restore():
    if hasattr(theirs, "restore_flash_attention_impl"):
        theirs.restore_flash_attention_impl()
    else:
        integration.register().remove()


def sdpa(*tensors, **options):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(*tensors, **options)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def judged(function, tensors, dout, **options):
    """Output and gradients of function(q, k, v), by the bounds of flashsci.testing."""
    judge = Judge(Inputs(*tensors, dout=dout, options=options))
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    judge.require(dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True)))
    return out


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "batch, heads, length, dim",
    [
        (1, (4, 4), 512, 64),
        (2, (8, 8), 1024, 128),
        (2, (8, 2), 512, 128),  # grouped
        (1, (4, 4), 333, 256),
        (2, (4, 4), 200, 20),  # torch pads it to 24
    ],
)
def test_forward_and_backward(active, dtype, causal, batch, heads, length, dim):
    q, k, v = (normal(batch, h, length, dim, dtype=dtype) for h in (heads[0], heads[1], heads[1]))
    gqa = heads[0] != heads[1]
    judged(
        lambda *x: sdpa(*x, is_causal=causal, enable_gqa=gqa),
        (q, k, v),
        normal(*q.shape, dtype=dtype),
        causal=causal,
    )


def kernels_of(function) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    return {event.name for event in seen.events() if event.name}


def test_the_kernels_are_ours_until_torchs_are_restored(active):
    leaves = [normal(1, 4, 512, 64).requires_grad_() for _ in range(3)]

    def step():
        sdpa(*leaves).sum().backward()

    assert any("flashsci" in name for name in kernels_of(step))
    assert not any("pytorch_flash" in name for name in kernels_of(step))
    restore()
    names = kernels_of(step)
    assert not any("flashsci" in name for name in names)
    assert any("pytorch_flash" in name for name in names)
    active.activate()
    assert any("flashsci" in name for name in kernels_of(step))


def test_varlen_attn_runs_our_kernels_where_torch_prefers_cudnn(active):
    """Packed calls without a window, which torch 2.14 sends to cuDNN on Hopper; forward and backward."""
    q, k, v = (normal(700, 4, 64).requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, 300, 700], dtype=torch.int32, device="cuda")

    def step():
        varlen_attn(q, k, v, offsets, offsets, 400, 400).sum().backward()

    step()
    names = kernels_of(step)
    assert any("flashsci" in name for name in names)
    assert not any("cudnn" in name.lower() or "pytorch_flash" in name for name in names)


LAYOUTS = {
    "bhsd": lambda: normal(2, 4, 300, 64),
    "bshd": lambda: normal(2, 300, 4, 64).transpose(1, 2),
    "packed projection": lambda: normal(2, 300, 3, 4, 64)[:, :, 0].transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_keeps_the_layout_of_query(active, layout):
    q, k, v = (LAYOUTS[layout]() for _ in range(3))
    out = judged(lambda *x: sdpa(*x, is_causal=True), (q, k, v), normal(*q.shape), causal=True)
    assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("dtype", HALVES)
def test_dropout_is_the_same_in_forward_and_backward(active, dtype):
    """Each column of out is linear in that of v, so <dout, out> = <dv, v>; with other entries dropped they differ by as much as
    they are (roundings: 0.003)."""
    q, k, v, dout = (normal(2, 4, 384, 64, dtype=dtype) for _ in range(4))
    v.requires_grad_()
    torch.manual_seed(0)
    out = sdpa(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out, v, dout)
    forward, backward = ((x.double() * y.double()).sum(-2) for x, y in ((dout, out), (dv, v)))
    assert (forward - backward).norm() < 0.05 * forward.norm()
    torch.manual_seed(0)
    assert torch.equal(sdpa(q, k, v, dropout_p=0.5), out)
    assert not torch.equal(sdpa(q, k, v, dropout_p=0.5), out)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled(active, dtype, causal, layout):
    """What the compiler was promised of strides, and values of both passes."""
    torch._dynamo.reset()  # one function of many kinds of inputs, which a limit is for
    q, k, v = (LAYOUTS[layout]().to(dtype) for _ in range(3))
    compiled = torch.compile(lambda *x: sdpa(*x, is_causal=causal), fullgraph=True)
    eager = sdpa(q, k, v, is_causal=causal)
    out = judged(compiled, (q, k, v), normal(*q.shape, dtype=dtype), causal=causal)
    assert (out.shape, out.stride(), out.dtype) == (eager.shape, eager.stride(), eager.dtype)


LENGTHS = [1, 300, 77, 512]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_attn(active, dtype, causal, compiled):
    q, k, v, dout = (normal(sum(LENGTHS), 4, 64, dtype=dtype) for _ in range(4))
    cu = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    if "is_causal" in varlen_attn.__annotations__:  # torch 2.10
        options = dict(is_causal=causal)
    else:
        options = dict(window_size=(-1, 0) if causal else (-1, -1))

    def call(q, k, v):
        return varlen_attn(q, k, v, cu, cu, max(LENGTHS), max(LENGTHS), **options)

    judge = Judge(Inputs(q, k, v, dout=dout, cu_seqlens_q=cu, options=dict(causal=causal)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = (torch.compile(call, fullgraph=True) if compiled else call)(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    names = ("out", "dq", "dk", "dv")
    judge.require(dict(zip(names, (out.detach(), *gradients), strict=True)))


def test_captured(active):
    """Two replays of a CUDA graph give the bits of the call."""
    q, k, v = (normal(2, 4, 512, 64) for _ in range(3))
    due = sdpa(q, k, v, is_causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sdpa(q, k, v, is_causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(q, k, v, is_causal=True)
    for _ in range(2):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, due)


def test_keys_in_pieces(active):
    """As context parallelism calls it: a block's gradient under the out and lse of all keys is its share."""
    q, k, v, dout = (normal(1, 4, 512, 64) for _ in range(4))
    op = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, _, _, _, _, rng_state, unused, _ = op(q, k, v)
    judge = Judge(Inputs(q, k, v, dout=dout))
    halves = [
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k[:, :, part], v[:, :, part], out, lse, None, None, 512, 256, 0.0, False, rng_state, unused,
        )
        for part in (slice(0, 256), slice(256, None))
    ]  # fmt: skip
    dk, dv = (torch.cat([x[i] for x in halves], 2) for i in (1, 2))
    judge.require({"out": out, "dk": dk, "dv": dv})
    dq = halves[0][0].float() + halves[1][0].float()  # each rounded once more than one dq would be
    assert judge.errors("dq", dq)[2] <= 4 * judge.baseline_errors("dq")[2]


def test_the_sdpa_backend_comes_back_here_once(active):
    """It calls scaled_dot_product_attention, whose kernels are ours now: those ask for an lse, which that backend refuses, so
    the round ends."""
    q, k, v = (normal(1, 4, 512, 64) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = flashsci.attention(q, k, v, causal=True, backend="sdpa")
    Judge(Inputs(q, k, v, options=dict(causal=True))).require({"out": out})
