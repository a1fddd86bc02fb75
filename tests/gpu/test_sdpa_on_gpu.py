"""Backend 'sdpa' on a GPU, where torch's kernels read dout as laid out like out, keep no lse for a bias alone, and take biases of
q's dtype; judged against fp64. The same by stand-ins: tests/cpu/api/test_sdpa_kernels.py."""

from __future__ import annotations

import copy

import pytest
import torch

import flashsci
from flashsci.testing import Inputs, Judge

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiled_anew():
    """A compiler gives up on a function that it has compiled for many shapes."""
    yield
    torch._dynamo.reset()


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def judged(inputs, compiled=False, consumed=None, **options):
    """out and the gradients that are asked for, with dout as ``consumed`` (of out) leaves it."""
    names = [n for n in ("q", "k", "v", "bias") if isinstance(getattr(inputs, n), torch.Tensor)]
    leaves = {n: getattr(inputs, n).detach() for n in names}
    wanted = ["bias"] if options.pop("bias_alone", False) else names
    for n in wanted:
        leaves[n].requires_grad_()

    def step(q, k, v, bias=None):
        return flashsci.attention(q, k, v, bias=bias, mask=inputs.mask, backend="sdpa", **inputs.options)

    step = torch.compile(step, fullgraph=True) if compiled else step
    out = step(*leaves.values())
    used = out if consumed is None else consumed(out)
    cotangent = inputs.dout if consumed is None else consumed(inputs.dout)
    gradients = torch.autograd.grad(used, [leaves[n] for n in wanted], cotangent)
    found = {f"d{n}": g for n, g in zip(wanted, gradients, strict=True)}
    Judge(inputs).require({"out": out.detach(), **found})


TRANSPOSED = {
    "none": None,
    "transposed": lambda x: x.transpose(1, 2),
    "permuted": lambda x: x.permute(0, 3, 1, 2),
    "merged heads": lambda x: x.transpose(1, 2).flatten(2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("consumed", TRANSPOSED)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("kind", ["none", "causal", "mask", "bias"])
@pytest.mark.parametrize("dims", [(64, 64), (64, 32), (20, 20)])
def test_layout_of_dout(dtype, consumed, layout, kind, dims):
    q, k, v, dout = (normal(2, 4, 128, d, dtype=dtype) for d in (dims[0], *dims, dims[1]))
    if layout == "BSHD":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    mask = torch.rand(2, 1, 128, 128, device="cuda") < 0.7 if kind == "mask" else None
    bias = normal(1, 4, 128, 128, dtype=dtype) if kind == "bias" else None
    options = dict(causal=True) if kind == "causal" else {}
    if TRANSPOSED[consumed] is not None:  # dout in the layout that its consumer makes
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    judged(Inputs(q, k, v, bias, mask, dout=dout, options=options), consumed=TRANSPOSED[consumed])


@pytest.mark.parametrize("consumed", ["transposed", "merged heads"])
@pytest.mark.parametrize("kind", ["none", "causal", "bias"])
def test_layout_of_dout_compiled(consumed, kind):
    q, k, v, dout = (normal(2, 4, 128, 64) for _ in range(4))
    bias = normal(1, 4, 128, 128) if kind == "bias" else None
    options = dict(causal=True) if kind == "causal" else {}
    inputs = Inputs(q, k, v, bias, dout=dout, options=options)
    judged(inputs, compiled=True, consumed=TRANSPOSED[consumed])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 64, 64), (1, 4, 64, 64), (2, 1, 64, 64), (4, 64, 64), (64, 64), (2, 1, 1, 64), (64,)],
)
def test_bias_alone_requires_a_gradient(dtype, compiled, shape):
    q, k, v, dout = (normal(2, 4, 64, 32, dtype=dtype) for _ in range(4))
    inputs = Inputs(q, k, v, normal(*shape, dtype=dtype), dout=dout)
    judged(inputs, compiled=compiled, bias_alone=True)


@pytest.mark.parametrize("size", [1, 30, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 4, 100, 72), (2, 1, 1, 72)])
@pytest.mark.parametrize("causal", [False, True])
def test_wide_bias(size, dtype, shape, causal):
    q, k, v, dout = (normal(2, 4, n, 32, dtype=dtype) for n in (100, 72, 72, 100))
    bias = normal(*shape, dtype=torch.float32) * size
    judged(Inputs(q, k, v, bias, dout=dout, options=dict(causal=causal)))


@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(7, 5), (128, 128)])
def test_nan_stays(place, causal, dtype, sizes):
    q, k, v = (normal(1, 2, n, 64, dtype=dtype) for n in (sizes[0], sizes[1], sizes[1]))
    row = 0 if place != "q" else sizes[0] // 2
    {"q": q, "k": k, "v": v}[place][0, 0, row, 3] = float("nan")
    due = flashsci.attention(q, k, v, causal=causal, backend="reference")
    out = flashsci.attention(q, k, v, causal=causal, backend="sdpa")
    assert torch.equal(out.isnan(), due.isnan())


class Block(torch.nn.Module):
    """Attention of a transformer, by the name that programs swap."""

    def __init__(self, causal: bool):
        super().__init__()
        self.qkv, self.proj, self.causal = (
            torch.nn.Linear(256, 768),
            torch.nn.Linear(256, 256),
            causal,
        )

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("order", ["swapped first", "entered first", "swapped alone"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_swapped_program(monkeypatch, order, causal, backend):
    """torch's function swapped for flashsci.sdpa, torch's flash kernels for flashsci's: calls of the backend 'sdpa' then come back
    to the package once, and end there."""
    from torch.nn import attention as theirs

    from flashsci.integrations import torch as integration

    torch.manual_seed(0)
    block, x = Block(causal).cuda(), normal(2, 128, 256)

    def results(module, x):
        module.zero_grad()
        out = module(x)
        (out * torch.linspace(-1, 2, out.numel(), device="cuda", dtype=out.dtype).view(out.shape)).sum().backward()
        return [out.detach(), *(p.grad.clone() for p in module.parameters())]

    before = results(block.bfloat16(), x)
    truth = results(copy.deepcopy(block).double(), x.double())
    handle = integration.register()

    def enter():
        theirs.activate_flash_attention_impl("flashsci")
        handle.activate()

    def swap():
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", flashsci.sdpa)

    steps = {
        "swapped first": (swap, enter),
        "entered first": (enter, swap),
        "swapped alone": (swap,),
    }
    try:
        for step in steps[order]:
            step()
        with flashsci.use_backend(backend):
            ours = results(block, x)
    finally:
        handle.remove()
        if hasattr(theirs, "restore_flash_attention_impl"):
            theirs.restore_flash_attention_impl()
    for x, plain, due in zip(ours, before, truth, strict=True):
        error, allowed = ((y.double() - due).abs().max().item() for y in (x, plain))
        assert error <= 2 * allowed + 8 * torch.finfo(torch.bfloat16).eps * due.abs().max().item()
