"""What backend 'sdpa' asks of torch's own kernels, and what it puts right around them: wide biases, layouts of dout, values that
are not finite, a program that swapped torch's function."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsci
from flashsci.backends import sdpa, sdpa_kernels
from flashsci.call import plans, second_order
from flashsci.testing import Inputs, Judge

INF, NAN = float("inf"), float("nan")
HALVES = [torch.bfloat16, torch.float16]


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def judged(inputs, backend="auto"):
    """out and gradients of a call without lse, by the bounds of flashsci.testing."""
    found = {}
    options = dict(inputs.options, mask=inputs.mask, key_weight=inputs.key_weight)
    leaves = {n: getattr(inputs, n).requires_grad_() for n in ("q", "k", "v")}
    if inputs.bias is not None and inputs.bias_grad:
        leaves["bias"] = inputs.bias.requires_grad_()
    out = flashsci.attention(*(leaves[n] for n in "qkv"), bias=inputs.bias, backend=backend, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
    found = {"out": out.detach()} | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    Judge(inputs).require(found)
    return found


# Biases in fp32 beside 16 bits.


@pytest.mark.parametrize("size", [3, 30, 300])
@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 4, 33, 40), (2, 1, 1, 40), (33, 40)])
def test_wide_bias_keeps_its_bits(size, learnt, dtype, shape):
    q, k, v, dout = tensors((2, 4, 33, 24), (2, 2, 40, 24), (2, 2, 40, 24), (2, 4, 33, 24), dtype=dtype)
    bias = torch.randn(shape) * size
    assert flashsci.explain(q, k, v, bias=bias).chosen == "sdpa"
    found = judged(Inputs(q, k, v, bias, dout=dout, bias_grad=learnt))
    if learnt:
        assert found["dbias"].dtype == torch.float32


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(9, 4), align="lower_right"), {}])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_wide_bias_beside_masks(options, masked, dtype):
    q, k, v, dout = tensors((2, 4, 33, 24), (2, 4, 40, 24), (2, 4, 40, 24), (2, 4, 33, 24), dtype=dtype)
    bias = torch.randn(4, 33, 40) * 100
    mask = torch.rand(2, 1, 33, 40) < 0.8 if masked else None
    judged(Inputs(q, k, v, bias, mask, dout=dout, options=options), "sdpa")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [True, False])
def test_key_weights_beside_16_bits(dtype, biased):
    """Their logarithms keep fp32."""
    q, k, v, dout = tensors((2, 4, 33, 24), (2, 4, 40, 24), (2, 4, 40, 24), (2, 4, 33, 24), dtype=dtype)
    weight = torch.rand(2, 4, 40) * 1e6 * (torch.rand(2, 4, 40) < 0.9)
    bias = torch.randn(1, 4, 33, 40).to(dtype) if biased else None
    given = Inputs(q, k, v, bias, dout=dout, key_weight=weight, key_weight_grad=False)
    judged(given, "sdpa")


def test_wide_bias_on_a_gpu_is_computed_in_its_dtype(monkeypatch):
    """The kernels there take a bias of q's dtype alone; nothing is cast to fewer bits."""
    seen = []

    def attend(q, k, v, attn_mask, **others):
        seen.append((q.dtype, k.dtype, v.dtype, attn_mask.dtype))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, **others)

    monkeypatch.setattr(sdpa, "attend", attend)
    monkeypatch.setattr(sdpa, "on_gpu", lambda x: True)
    q, k, v, dout = tensors(*[(1, 2, 9, 8)] * 4, dtype=torch.bfloat16)
    judged(Inputs(q, k, v, torch.randn(1, 2, 9, 9) * 100, dout=dout), "sdpa")
    assert seen == [(torch.float32,) * 4]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("learnt", [False, True])
def test_wide_bias_under_autocast(monkeypatch, gpu, compiled, learnt):
    """Which casts every argument of torch's function, the bias among them, and what was upcast for it."""
    if gpu:
        monkeypatch.setattr(sdpa, "on_gpu", lambda x: True)
    q, k, v, dout = tensors(*[(2, 4, 16, 8)] * 4, dtype=torch.bfloat16)
    bias = (torch.randn(4, 16, 16) * 100).requires_grad_(learnt)
    wide = [x.float().requires_grad_() for x in (q, k, v)]

    def step(*x):
        with torch.autocast("cpu", torch.bfloat16):
            return flashsci.attention(*x, bias=bias, backend="sdpa")

    step = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    out = step(*wide)
    leaves = [*wide, *([bias] if learnt else [])]
    found = dict(zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(out, leaves, dout), strict=False))
    found = {n: g if n == "dbias" else g.bfloat16() for n, g in found.items()}
    given = Inputs(q, k, v, bias.detach(), dout=dout, bias_grad=learnt)
    Judge(given).require({"out": out.detach(), **found})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_wide_bias_compiled(backend):
    q, k, v, dout = tensors(*[(2, 4, 16, 8)] * 4, dtype=torch.bfloat16)
    bias = (torch.randn(4, 16, 16) * 100).requires_grad_()
    step = torch.compile(
        lambda *x: flashsci.attention(*x, bias=bias, backend="sdpa"),
        fullgraph=True,
        backend=backend,
    )
    out = step(q, k, v)
    (dbias,) = torch.autograd.grad(out, bias, dout)
    due = {"out": out.detach(), "dbias": dbias}
    Judge(Inputs(q, k, v, bias.detach(), dout=dout)).require(due)


# The layout of dout.


class ReadsDoutAsOut(torch.autograd.Function):
    """A kernel whose backward reads the memory of dout by the strides of out, as cuDNN's does."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = torch.ops.aten.scaled_dot_product_attention(*leaves, **options)
        ctx.leaves, ctx.out = leaves, out
        return out.detach()

    @staticmethod
    def backward(ctx, dout):
        misread = dout.as_strided(ctx.out.shape, ctx.out.stride())
        return *torch.autograd.grad(ctx.out, ctx.leaves, misread), None


@pytest.fixture
def misreading(monkeypatch):
    monkeypatch.setattr(sdpa, "attend", lambda q, k, v, **options: ReadsDoutAsOut.apply(q, k, v, options))


LAYOUTS = {
    "transposed": lambda out: out.transpose(1, 2).reshape(out.shape[0], -1),
    "permuted": lambda out: out.permute(3, 2, 1, 0).flatten(),
    "summed": lambda out: out.sum((0, 2)),  # dout is expanded
    "sliced": lambda out: torch.cat([out, out], -1)[..., 1:9],
    "one": lambda out: out.sum(),
}


@pytest.mark.parametrize("consumed", LAYOUTS)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "HSD"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dout_arrives_in_the_layout_of_out(misreading, consumed, layout, dtype):
    q, k, v = (x.requires_grad_() for x in tensors(*[(2, 3, 7, 8)] * 3, dtype=dtype))
    given = q, k, v
    if layout == "BSHD":
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    if layout == "HSD":
        given = [x.flatten(0, 1) for x in given]

    def gradients(backend):
        out = flashsci.attention(*given, backend=backend)
        used = LAYOUTS[consumed](out.view(2, 3, 7, 8))
        weight = torch.linspace(-1, 2, used.numel(), dtype=dtype).view(used.shape)
        return torch.autograd.grad((used * weight).sum(), (q, k, v))

    for ours, due in zip(gradients("sdpa"), gradients("reference"), strict=True):
        torch.testing.assert_close(ours, due)


def test_dout_laid_out():
    strides = (120, 5, 40, 1)
    dout = torch.randn(2, 8, 3, 5)
    laid = sdpa_kernels.laid_out(dout, strides)
    assert laid.stride() == strides and torch.equal(laid, dout)
    assert sdpa_kernels.laid_out(laid, strides) is laid
    batched = torch.func.vmap(lambda x: sdpa_kernels.laid_out(x, strides))(dout.expand(3, 2, 8, 3, 5))
    assert torch.equal(batched[1], dout)


SEEN = []


@torch.library.custom_op("flashsci_test::backward_by_strides", mutates_args=())
def backward_by_strides(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    SEEN.append((dout.stride(), out.stride()))
    return dout.as_strided(out.shape, out.stride()).clone()


@backward_by_strides.register_fake
def _(dout, out):
    return torch.empty_like(out)


class Kernel(torch.autograd.Function):
    """Twice its input, by a kernel whose backward no compiler looks into."""

    @staticmethod
    def forward(ctx, x):
        out = x * 2
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, dout):
        return 2 * torch.ops.flashsci_test.backward_by_strides(dout, *ctx.saved_tensors)


@pytest.mark.every(3)
@pytest.mark.parametrize("consumed", ["transposed", "permuted", "sliced", "one"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dout_arrives_in_the_layout_of_out(backend, consumed):
    """By the node that compilers trace, whatever the graph around makes of dout."""

    def function(x):
        return LAYOUTS[consumed](sdpa_kernels.LaidOut.apply(Kernel.apply(x)).mul(3)).sin()

    # In float64: one number that sums all others goes through a sine.
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    found = torch.compile(function, fullgraph=True, backend=backend)(x)
    SEEN.clear()
    (dx,) = torch.autograd.grad(found.square().sum(), x)
    assert len(SEEN) == 1 and SEEN[0][0] == SEEN[0][1]
    x_ = x.detach().requires_grad_()
    (due,) = torch.autograd.grad(LAYOUTS[consumed](x_ * 6).sin().square().sum(), x_)
    torch.testing.assert_close(dx, due)


def test_a_bias_that_alone_requires_a_gradient(monkeypatch):
    """torch's memory-efficient kernel keeps the lse, which its backward reads, where q, k or v require one."""

    def attend(q, k, v, attn_mask, **others):
        assert q.requires_grad or k.requires_grad or v.requires_grad, "no lse"
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, **others)

    monkeypatch.setattr(sdpa, "attend", attend)
    monkeypatch.setattr(sdpa, "on_gpu", lambda x: True)
    q, k, v, dout = tensors(*[(2, 3, 9, 8)] * 4)
    for shape in ((2, 3, 9, 9), (1, 3, 9, 9), (3, 1, 9), (9,)):
        bias = torch.randn(shape, requires_grad=True)
        for options in ({}, dict(causal=True)):
            out = flashsci.attention(q, k, v, bias=bias, backend="sdpa", **options)
            due = flashsci.attention(q, k, v, bias=bias, backend="reference", **options)
            found, wanted = (torch.autograd.grad(x, bias, dout)[0] for x in (out, due))
            torch.testing.assert_close(found, wanted)
    assert q.grad is None and not q.requires_grad


# Values that are not finite.

SIZES = [(5, 7), (1, 1), (7, 1), (40, 70), (33, 600)]
OPTIONS = {
    "none": {},
    "causal": dict(causal=True),
    "lower": dict(causal=True, align="lower_right"),
    "window": dict(window=(3, 2)),
    "mask": {},
    "bias": {},
}


def poisoned(place, value, sizes, kind, dtype):
    q, k, v = tensors((1, 2, sizes[0], 8), *[(1, 2, sizes[1], 8)] * 2, dtype=dtype)
    options, row = dict(OPTIONS[kind]), sizes[0] // 2
    if kind == "mask":
        options["mask"] = torch.rand(1, 1, *sizes) < 0.7
        options["mask"][..., -1, :] = False  # a row that sees nothing
    if kind == "bias" or place == "bias":
        options["bias"] = torch.randn(1, 2, *sizes).to(dtype)
    chosen = {"q": lambda: q[0, 0, row, 3:4], "rows": lambda: q[0, 0], "k": lambda: k[0, 0, 0, 3:4]}
    chosen |= {
        "keys": lambda: k[0, 0],
        "v": lambda: v[0, 0, 0, 3:4],
        "bias": lambda: options["bias"][0, 0, row],
    }
    chosen[place]()[...] = value
    return (q, k, v), options


def not_finite(x):
    """Where, and which kind: an infinity is not a NaN."""
    return x.isnan(), x == INF, x == -INF


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.float64])
@pytest.mark.parametrize("place", ["q", "rows", "k", "keys", "v", "bias"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_stays_so(dtype, place, value):
    """As in the reference: a row that sees one is NaN, every other as it is without."""
    for sizes in SIZES:
        for kind in OPTIONS:
            given, options = poisoned(place, value, sizes, kind, dtype)
            due = flashsci.attention(*given, backend="reference", **options)
            out = flashsci.attention(*given, backend="sdpa", **options)
            where = f"{sizes} {kind}"
            for ours, theirs in zip(not_finite(out), not_finite(due), strict=True):
                assert torch.equal(ours, theirs), where
            torch.testing.assert_close(out, due, equal_nan=True, rtol=0.02, atol=0.02)


def test_gradients_of_what_is_not_finite():
    given, options = poisoned("q", NAN, (5, 7), "none", torch.float32)
    leaves = [x.requires_grad_() for x in given]
    out = flashsci.attention(*leaves, backend="sdpa", **options)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert dq[0, 0, 2].isnan().all() and dk[0, 0].isnan().all() and dv[0, 0].isnan().all()
    assert dq[0, 1].isfinite().all() and dk[0, 1].isfinite().all() and dv[0, 1].isfinite().all()


@pytest.mark.parametrize("place", ["q", "keys"])
@pytest.mark.parametrize("options", [{}, dict(causal=True)])
@pytest.mark.parametrize("seen_by", ["compiler", "mode"])
def test_nan_where_nobody_may_read_values(place, options, seen_by):
    (q, k, v), _ = poisoned(place, NAN, (5, 7), "none", torch.float32)
    due = flashsci.attention(q, k, v, backend="reference", **options)
    if seen_by == "compiler":
        attend = torch.compile(flashsci.attention, fullgraph=True, backend="aot_eager")
        out = attend(q, k, v, backend="sdpa", **options)
    else:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False):
            out = flashsci.attention(q, k, v, backend="sdpa", **options)
    assert torch.equal(out.isnan(), due.isnan())
    torch.testing.assert_close(out, due, equal_nan=True)


@pytest.mark.parametrize("k_len", [3, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_lost_is_zero_where_all_is_finite(k_len, causal):
    """fp16 sums that overflow among them."""
    q, k = torch.full((2, 4, 5, 8), 6e4).half(), torch.full((2, 2, k_len, 8), 6e4).half()
    scalars = flashsci.call.arguments.Options.of(
        causal, None, "upper_left", None, None, 0.0, False, None, None
    ).scalars(8)
    assert sdpa_kernels.lost(q, k, None, None, scalars).eq(0).all()
    assert sdpa_kernels.finite(q, k, None)


def test_fake_tensors_are_not_read():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 2, 5, 8)
        assert flashsci.attention(q, q, q, backend="sdpa").shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_scales_of_extreme_products(dtype, causal):
    """Whose products of q and k are no numbers before they are scaled."""
    size = 2e19 if dtype == torch.float32 else 1e155
    q, k, v, dout = tensors(*[(1, 2, 9, 8)] * 4, dtype=dtype)
    options = dict(scale=1 / size / size, causal=causal)
    out = flashsci.attention(q * size, k * size, v, backend="sdpa", **options)
    due = flashsci.attention(q, k, v, scale=1.0, causal=causal, backend="reference")
    torch.testing.assert_close(out, due, rtol=1e-4, atol=1e-5)
    judged(Inputs(q, k, v, dout=dout, options=dict(scale=1e-7, causal=causal)), "sdpa")


# Scores so large that the fp32 lse does not hold the log of a sum.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_beyond_1e7_all_win_in_gradients_of_torch(dtype):
    """As docs/reference/numerics.md says; the reference shares them."""
    keys, size = 32, 2.0**13  # scores of 2^26
    q, k = (torch.full((1, 1, n, 1), size, dtype=dtype) for n in (1, keys))
    dout = torch.ones(1, 1, 1, 1, dtype=dtype)

    def dv(call):
        v = torch.zeros(1, 1, keys, 1, dtype=dtype, requires_grad=True)
        return torch.autograd.grad(call(q, k, v), v, dout)[0]

    options = dict(scale=1.0)
    of_torch = dv(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, **options))
    assert dv(lambda *x: flashsci.attention(*x, backend="sdpa", **options)).equal(of_torch)
    assert of_torch.eq(1).all()
    shared = dv(lambda *x: flashsci.attention(*x, backend="reference", **options))
    assert shared.eq(1 / keys).all()


# Saved tensors.


@pytest.mark.parametrize("strides", [(40, 8, 1), (1, 4, 20), (0, 8, 1), (0, 0, 1), (0, 16, 2), (8, 8, 1), (40, 3, 1)])
def test_restored_tensors_have_the_strides_that_were_saved(strides):
    shape = (4, 5, 8)
    saved = torch.randn(200).as_strided(shape, strides)
    assert sdpa_kernels.restored(saved, strides) is saved
    found = sdpa_kernels.restored(torch.randn(8, 4, 5).permute(1, 2, 0).copy_(saved), strides)
    assert found.equal(saved)
    overlapping = strides in [(8, 8, 1), (40, 3, 1)]
    assert found.stride() == ((40, 8, 1) if overlapping else strides)


# torch's own function.


def test_function_is_bound_by_itself():
    """However the name in torch.nn.functional was swapped before the backend was imported."""
    program = """
import torch
due = torch.nn.functional.scaled_dot_product_attention
import flashsci
torch.nn.functional.scaled_dot_product_attention = flashsci.sdpa
q = torch.randn(1, 2, 5, 8)
out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
torch.testing.assert_close(out, due(q, q, q))
from flashsci.backends import sdpa_kernels
assert sdpa_kernels.torch_attention is due
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_nothing_looks_up_what_programs_swap():
    """Of names that users put others in the place of, no module of the package asks torch at call time."""
    from pathlib import Path

    root = Path(flashsci.__file__).parent
    swapped = (
        "functional.scaled_dot_product_attention(",
        "F.scaled_dot_product_attention(",
        "= torch.nn.functional.scaled_dot",
    )
    for path in root.rglob("*.py"):
        code = [line for line in path.read_text().splitlines() if not line.lstrip().startswith((">>>", "...", "#"))]
        assert not any(name in line for line in code for name in swapped), path


def test_context_of_the_caller_is_kept():
    q, k, v = tensors(*[(1, 2, 5, 8)] * 3)
    with sdpa_kernel(SDPBackend.MATH):
        out = flashsci.attention(q, k, v, backend="sdpa")
    torch.testing.assert_close(out, flashsci.attention(q, k, v, backend="reference"))


# Repeated calls.

NODE = "ScaledDotProductFlashAttentionForCpuBackward0"


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(scale=0.3)], ids=str)
@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("ends", [False, True])
def test_repeats_are_planned_once_and_have_every_derivative(monkeypatch, options, heads_k, ends):
    """``ends``: as where a kernel returns gradients without a request."""
    monkeypatch.setattr(sdpa, "on_gpu", lambda x: True)
    if ends:
        monkeypatch.setattr(second_order, "UNREQUESTED", NODE)
    plans.plans.clear()
    ran = []
    monkeypatch.setattr(sdpa, "forward", lambda *given, real=sdpa.forward: ran.append(given) or real(*given))

    def derivatives(backend):
        torch.manual_seed(3)
        q, k, v, dout, t = tensors((2, 4, 9, 8), *((2, heads_k, 9, 8),) * 2, *((2, 4, 9, 8),) * 2)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = flashsci.attention(*leaves, backend=backend, **options)
        first = torch.autograd.grad(out, leaves, dout, create_graph=True)
        return (
            out,
            *first,
            *torch.autograd.grad(first[0], leaves, t, retain_graph=True),
            *torch.autograd.grad(first[1].sum(), q),
        )

    try:
        for _ in range(4):
            found = derivatives("sdpa")
        assert len(ran) == 2, "the way of first calls"
        for a, b in zip(found, derivatives("reference"), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    finally:
        plans.plans.clear()


@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True),
        dict(causal=True, align="lower_right"),
        dict(align="lower_right", scale=0.3),
        dict(window=(None, 2)),
        dict(window=(3, 0)),
        dict(causal=True, scale=-1.0),
    ],
    ids=str,
)
def test_repeats_ask_torch_for_the_same(monkeypatch, options, heads_k):
    """A repeat that is planned once, where there is one, has the flags of a first call."""
    asked, planned = [], []
    real_attend, real_prepared = sdpa.attend, sdpa.prepared

    def attend(*rows, attn_mask=None, **others):
        asked.append((attn_mask is None, others))
        return real_attend(*rows, attn_mask=attn_mask, **others)

    def prepared(*given):
        planned.append(real_prepared(*given) is not None)
        return real_prepared(*given)

    monkeypatch.setattr(sdpa, "attend", attend)
    monkeypatch.setattr(sdpa, "prepared", prepared)
    monkeypatch.setattr(sdpa, "on_gpu", lambda x: True)
    q, k, v = tensors((2, 4, 9, 8), *[(2, heads_k, 9, 8)] * 2)
    plans.plans.clear()
    try:
        for _ in range(3):
            flashsci.attention(q, k, v, backend="sdpa", **options)
    finally:
        plans.plans.clear()
    assert asked[0] == asked[1] == asked[2]
    unmasked, flags = asked[0]
    assert planned == [unmasked] and flags["is_causal"] == (options == dict(causal=True))
    assert flags.get("enable_gqa", False) == (heads_k == 2)


def test_a_repeat_has_rows_that_begin_anywhere_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(sdpa, "on_gpu", lambda x: True)
    monkeypatch.setattr(sdpa, "aligned", lambda x: seen.append(x.data_ptr() % 16) or x)
    plans.plans.clear()
    try:
        memory = torch.randn(2 * 4 * 9 * 8 + 1)
        given = memory[:-1].view(2, 4, 9, 8), memory[1:].view(2, 4, 9, 8)
        for q in given[:1] * 4:
            flashsci.attention(q, q.clone(), q.clone(), backend="sdpa")
        seen.clear()
        flashsci.attention(given[0], given[0].clone(), given[0].clone(), backend="sdpa")
        assert not seen, "nothing to copy"
        flashsci.attention(given[1], given[0].clone(), given[0].clone(), backend="sdpa")
        assert seen and seen[0]
    finally:
        plans.plans.clear()
