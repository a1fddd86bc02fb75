"""The specification, rule by rule, on every backend that runs here."""

import itertools

import pytest
import torch

import flashsci
from flashsci.call.ops import Saved, Tensors
from flashsci.testing import embed
from tests.support.naive import naive

pytestmark = pytest.mark.every(4)

BACKENDS = ["reference", "triton"]
ALL = ["reference", "sdpa", "triton"]


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def agree(found, truth, dtype=torch.float32):
    """Small problems: within 32 roundings of one, or of the largest number if that is more."""
    assert found.shape == truth.shape
    if not found.numel():
        return
    error = (found.double() - truth.double()).abs().nan_to_num(0).max()
    largest = truth.detach().double().abs().nan_to_num(0, 0, 0).max().clamp(min=1)
    assert error <= 32 * torch.finfo(dtype).eps * largest
    assert torch.equal(torch.isfinite(found), torch.isfinite(truth))


# Shapes


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("lead", [None, (), (2,), (2, 3), (2, 1, 2), (2, 2, 1, 3)])
def test_leading_dims(backend, lead):
    """[S, D], [H, S, D], [B, H, S, D], [B, N, H, S, D] and beyond."""
    shape = (5, 8) if lead is None else (*lead, 2, 5, 8)
    q, k, v = (draw(*shape).requires_grad_() for _ in range(3))
    out = flashsci.attention(q, k, v, causal=True, backend=backend)
    truth, _ = naive(q, k, v, causal=True)
    agree(out, truth)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    wanted = torch.autograd.grad(truth.sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        agree(a, b)


@pytest.mark.parametrize("backend", ALL)
def test_leading_dims_broadcast(backend):
    """Keys shared by a batch, queries shared by another: gradients are summed back."""
    q = draw(3, 1, 2, 4, 8).requires_grad_()
    k, v = draw(1, 2, 2, 6, 8).requires_grad_(), draw(2, 2, 6, 8).requires_grad_()
    bias = draw(3, 1, 1, 1, 6).requires_grad_()
    out = flashsci.attention(q, k, v, bias=bias, backend=backend)
    truth, _ = naive(q, k, v, bias=bias)
    agree(out, truth)
    leaves = (q, k, v, bias)
    for a, b in zip(
        torch.autograd.grad(out.sum() + out.square().sum(), leaves),
        torch.autograd.grad(truth.sum() + truth.square().sum(), leaves),
        strict=True,
    ):
        agree(a / 8, b / 8)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (6, 3)])
def test_query_head_uses_key_head_of_its_group(backend, heads):
    q, k, v = draw(2, heads[0], 5, 8), draw(2, heads[1], 6, 8), draw(2, heads[1], 6, 4)
    agree(flashsci.attention(q, k, v, backend=backend), naive(q, k, v)[0])


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("dims", [(1, 1), (3, 7), (320, 64), (8, 300)])
def test_head_dims(backend, dims):
    q, k, v = draw(1, 2, 4, dims[0]), draw(1, 2, 5, dims[0]), draw(1, 2, 5, dims[1])
    agree(flashsci.attention(q, k, v, backend=backend), naive(q, k, v)[0])


# Memory


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_output_follows_the_layout_of_q(backend, order):
    """Leading dims of out and dq lie in memory as those of q do, the last dim innermost."""
    q = embed(draw(2, 3, 5, 8), order=(*order, 3)).requires_grad_()
    k, v = draw(2, 3, 4, 8), draw(2, 3, 4, 6)
    found = flashsci.attention(q, k, v, backend=backend, return_lse=backend != "sdpa")
    out, *lse = found if isinstance(found, tuple) else (found,)
    by_stride = sorted(range(4), key=lambda d: -out.stride(d))
    assert by_stride == [*order, 3]
    assert torch.empty_like(out).stride() == out.stride(), "out is dense"
    for x in lse:
        assert x.is_contiguous()


@pytest.mark.parametrize("backend", ALL)
def test_inner_dim_of_q_k_v_may_be_strided(backend):
    q, k, v = (draw(2, 3, 8, 5).transpose(-1, -2) for _ in range(3))
    agree(flashsci.attention(q, k, v, backend=backend), naive(q, k, v)[0])


@pytest.mark.parametrize("backend", ALL)
def test_bias_and_mask_of_any_stride(backend):
    q, k, v = draw(2, 2, 5, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8)
    plain, mask = draw(2, 2, 5, 6), torch.rand(2, 2, 5, 6) < 0.7
    mask[..., 0] = True
    truth, _ = naive(q, k, v, bias=plain, mask=mask)
    for order in itertools.permutations(range(4)):
        view = embed(plain, order=order, pad={order[-1]: 2})
        out = flashsci.attention(q, k, v, bias=view, mask=embed(mask, order=order), backend=backend)
        agree(out, truth)


@pytest.fixture
def biases(stand_in):
    """The biases that Triton's kernels get from here on."""
    from flashsci.backends import triton

    seen = []
    for name in ("forward", "backward", "jvp", "double_backward"):
        run = getattr(triton, name)

        def spy(*given, run=run):
            found = (x.tensors if isinstance(x, Saved) else x for x in given)
            seen.extend(x.bias for x in found if isinstance(x, Tensors))
            return run(*given)

        stand_in(triton, **{name: spy})
    return seen


def both(f, *xs):
    return torch.func.vmap(f)(*(torch.stack([x, 2 * x]) for x in xs))


DERIVED = {
    "out": lambda f, x, t: f(x),
    "gradient": lambda f, x, t: torch.autograd.grad(f(x).square().sum(), x)[0],
    "second": lambda f, x, t: torch.autograd.functional.hvp(lambda x: f(x).sin().sum(), x, t)[1],
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "vmap": lambda f, x, t: both(f, x),
    "vmap of grad": lambda f, x, t: both(torch.func.grad(lambda x: f(x).square().sum()), x),
    "compiled": lambda f, x, t: torch.compile(f, backend="aot_eager", fullgraph=True)(x),
}


@pytest.mark.parametrize("what", DERIVED)
def test_a_bias_of_a_linear_is_read_by_rows(biases, what):
    """Heads innermost, as a Linear over pairs leaves them: kernels get a copy, with rows that Hopper's copies take,
    derivatives of every kind go through it, and q, k and v stay where they are."""
    q, k, v = (draw(4, 5, 3, 8).transpose(1, 2) for _ in range(3))
    pairs, tangent = draw(1, 5, 5, 3).requires_grad_(), draw(1, 5, 5, 3)

    def on(backend):
        return lambda x: flashsci.attention(q, k, v, bias=x.movedim(-1, 1), backend=backend)

    found = DERIVED[what](on("triton"), pairs, tangent)
    assert biases and all(x.stride(-1) == 1 for x in biases)
    if what != "compiled":  # a compiler may not know how long rows are
        assert all(x.stride(-2) * x.element_size() % 16 == 0 for x in biases)
    agree(found, DERIVED[what](on("reference"), pairs, tangent))


def test_an_expanded_bias_is_not_copied(biases):
    """A copy would hold each of its repetitions."""
    q = draw(4, 3, 5, 8)
    held = draw(3, 5, 5).mT
    bias = held.expand(4, 3, 5, 5)
    agree(flashsci.attention(q, q, q, bias=bias, backend="triton"), naive(q, q, q, bias=bias)[0])
    assert [x.data_ptr() for x in biases] == [held.data_ptr()]
    flashsci.attention(q, q, q, bias=held, backend="triton")
    assert biases[1].stride(-1) == 1 and biases[1].shape == (1, 3, 5, 5)


@pytest.mark.parametrize("backend", ALL)
def test_inputs_are_not_changed(backend):
    q, k, v = (draw(2, 2, 5, 8).requires_grad_() for _ in range(3))
    bias = draw(2, 1, 1, 5).requires_grad_()
    before = [x.detach().clone() for x in (q, k, v, bias)]
    flashsci.attention(q, k, v, bias=bias, causal=True, backend=backend).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, bias), strict=True))


# Formula


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.7},
        {"scale": 0.0},
        {"scale": -0.5},
        {"softcap": 0.8},
        {"softcap": 30.0, "scale": 2.0},
        {"causal": True},
        {"causal": True, "align": "lower_right"},
        {"window": (1, 2)},
        {"window": (None, 1)},
        {"window": (2, None), "align": "lower_right"},
        {"window": (-1, 0)},
        {"window": (2, 2), "causal": True},
        {"window": (0, 0), "align": "lower_right"},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4)])
def test_scores_and_visibility(backend, options, lengths):
    q, k, v = draw(1, 2, lengths[0], 8), draw(1, 2, lengths[1], 8), draw(1, 2, lengths[1], 8)
    plain = dict(options, window=tuple(None if w == -1 else w for w in options.get("window", (None, None))))
    out, lse = flashsci.attention(q, k, v, return_lse=True, backend=backend, **options)
    truth, truth_lse = naive(q, k, v, **plain)
    agree(out, truth)
    agree(lse, truth_lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", ["upper_left", "lower_right"])
@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1), "softcap": 2.0}], ids=str)
def test_alibi(backend, align, lengths, options):
    """Distances from the diagonal of ``align``, slopes of heads and of batch members."""
    q, k, v = (draw(2, 3, 4, n, 8) for n in (lengths[0], lengths[1], lengths[1]))
    slopes = torch.rand(3, 4)
    for some in (slopes, slopes[0], slopes[:, :1], torch.rand(2, 1, 4).mT.contiguous().mT):
        given = dict(options, align=align, alibi_slopes=some)
        found = flashsci.attention(q, k, v, return_lse=True, backend=backend, **given)
        for a, b in zip(found, naive(q, k, v, **given), strict=True):
            agree(a, b)
    one = flashsci.attention(
        q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], alibi_slopes=slopes[0, :1], align=align, backend=backend
    )
    agree(one, naive(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], alibi_slopes=slopes[0, :1], align=align)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_alibi_of_many_leading_dims(backend):
    q, k, v = draw(2, 2, 1, 4, 5, 8), draw(2, 2, 3, 4, 6, 8), draw(2, 2, 3, 4, 6, 8)
    slopes = torch.rand(2, 1, 4)
    out = flashsci.attention(q, k, v, alibi_slopes=slopes, backend=backend)
    agree(out, naive(q, k, v, alibi_slopes=slopes)[0])


def test_alibi_slopes_have_a_gradient():
    q, slopes = draw(1, 2, 5, 8).double(), torch.rand(2, dtype=torch.float64, requires_grad=True)

    def call(slopes, backend="auto", q=q):
        return flashsci.attention(q, q, q, alibi_slopes=slopes, backend=backend)

    assert torch.autograd.gradcheck(call, slopes)
    (expected,) = torch.autograd.grad(call(slopes).square().sum(), slopes)
    learnt = slopes.detach().float().requires_grad_()
    (found,) = torch.autograd.grad(call(learnt, "triton", q.float()).square().sum(), learnt)
    agree(found, expected.float())
    with pytest.raises(flashsci.BackendError, match="SDPA has no ALiBi"):
        call(slopes.detach(), "sdpa")


@pytest.mark.parametrize("backend", ["sdpa"])
@pytest.mark.parametrize("align", ["upper_left", "lower_right"])
@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4)])
def test_sdpa_visibility(backend, align, lengths):
    q, k, v = draw(1, 2, lengths[0], 8), draw(1, 2, lengths[1], 8), draw(1, 2, lengths[1], 8)
    for options in ({"causal": True}, {"window": (1, 1)}, {"causal": True, "window": (1, None)}):
        agree(
            flashsci.attention(q, k, v, align=align, backend=backend, **options),
            naive(q, k, v, align=align, **options)[0],
        )


@pytest.mark.parametrize("backend", ALL)
def test_everything_that_hides_is_anded(backend):
    q, k, v = draw(1, 2, 6, 8), draw(1, 2, 6, 8), draw(1, 2, 6, 8)
    mask, bias = torch.rand(6, 6) < 0.6, torch.where(torch.rand(2, 6, 6) < 0.3, -torch.inf, 0.5)
    for options in itertools.product((None, mask), (None, bias), (False, True), (None, (3, 1))):
        options = dict(zip(("mask", "bias", "causal", "window"), options, strict=True))
        agree(flashsci.attention(q, k, v, backend=backend, **options), naive(q, k, v, **options)[0])


BROADCAST = [
    s[n:] for s in itertools.product((1, 2), (1, 4), (1, 5), (1, 6)) for n in (0, 1, 2) if all(d == 1 for d in s[:n])
]


@pytest.mark.parametrize("backend", ALL)
def test_bias_gradient_has_the_shape_of_bias(backend):
    """Every broadcast shape; the gradient is the sum over what the bias was spread to."""
    q, k, v, dout = draw(2, 4, 5, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8), draw(2, 4, 5, 8)
    for shape in list(dict.fromkeys(BROADCAST))[:: 3 if backend == "triton" else 1]:
        bias = draw(*shape).requires_grad_()
        out = flashsci.attention(q, k, v, bias=bias, backend=backend)
        (found,) = torch.autograd.grad(out, bias, dout)
        full = bias.detach().expand(2, 4, 5, 6).clone().requires_grad_()
        (wanted,) = torch.autograd.grad(naive(q, k, v, bias=full)[0], full, dout)
        assert found.shape == bias.shape
        agree(found / 8, wanted.sum_to_size(shape) / 8)


# dtypes


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias_dtype", ["same", torch.float32])
def test_dtypes(backend, dtype, bias_dtype):
    q, k, v = (draw(1, 2, 4, 8, dtype=dtype).requires_grad_() for _ in range(3))
    bias = draw(4, 4, dtype=dtype if bias_dtype == "same" else bias_dtype).requires_grad_()
    lse = backend != "sdpa"
    if backend == "triton" and dtype == torch.float64:
        with pytest.raises(flashsci.BackendError, match=r"not float64; backend=.*'reference' can"):
            flashsci.attention(q, k, v, bias=bias, backend=backend)
        return
    found = flashsci.attention(q, k, v, bias=bias, backend=backend, return_lse=lse)
    out = found[0] if lse else found
    assert out.dtype == dtype
    if lse:
        assert found[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    gradients = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert [g.dtype for g in gradients] == [dtype, dtype, dtype, bias.dtype]


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
def test_fp32_is_fp32(backend):
    """Default precision: errors are those of fp32, whatever torch's TF32 switches say."""
    before = torch.get_float32_matmul_precision()
    q, k, v = draw(1, 2, 40, 64), draw(1, 2, 40, 64), draw(1, 2, 40, 64)
    truth = flashsci.attention(q.double(), k.double(), v.double(), backend="reference")
    try:
        torch.set_float32_matmul_precision("high")
        out = flashsci.attention(q, k, v, backend=backend)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (out - truth).abs().max() < 1e-5


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32", None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_precisions_are_accepted(backend, precision):
    q = draw(1, 1, 4, 16)
    agree(
        flashsci.attention(q, q, q, precision=precision, backend=backend),
        naive(q, q, q)[0],
        torch.float16,
    )


@pytest.mark.parametrize("backend", ALL)
def test_autocast_casts_q_k_v_and_never_the_bias(backend):
    q, k, v = (draw(1, 2, 4, 8).requires_grad_() for _ in range(3))
    bias = draw(4, 4).requires_grad_()
    fine = bias.detach() + 2.0**-12
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashsci.attention(q, k, v, bias=bias, backend=backend)
        moved = flashsci.attention(
            *(torch.zeros(1, 1, 1, 8),) * 2,
            torch.ones(1, 1, 1, 8),
            bias=fine[:1, :1],
            backend=backend,
        )
    assert out.dtype == torch.bfloat16 and moved.dtype == torch.bfloat16
    truth = flashsci.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=bias, backend=backend)
    assert torch.equal(out, truth)
    gradients = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert all(g.dtype == torch.float32 for g in gradients)
    double = draw(1, 2, 4, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flashsci.attention(double, double, double, backend="reference").dtype == torch.float64


# lse and empty rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_through_lse(backend):
    q, k, v = (draw(2, 2, 5, 8).requires_grad_() for _ in range(3))
    bias = draw(2, 1, 5, 5).requires_grad_()
    weight = draw(2, 2, 5)
    leaves = (q, k, bias)
    _, lse = flashsci.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    _, truth = naive(q, k, v, bias=bias)
    agree(lse, truth)
    for a, b in zip(
        torch.autograd.grad((lse * weight).sum(), leaves),
        torch.autograd.grad((truth * weight).sum(), leaves),
        strict=True,
    ):
        agree(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["mask", "bias", "window", "no keys"])
def test_rows_without_keys(backend, way, poison):
    """Output 0, lse -inf, zero gradients, exactly; other rows as if alone."""
    q, k, v = (draw(2, 2, 5, 8).requires_grad_() for _ in range(3))
    options, rows = {}, [0, 3]
    if way == "mask":
        options["mask"] = torch.ones(5, 5, dtype=torch.bool)
        options["mask"][rows] = False
    elif way == "bias":
        options["bias"] = torch.zeros(5, 5).index_fill(0, torch.tensor(rows), -torch.inf).requires_grad_()
    elif way == "window":
        k, v = (x[:, :, :2].detach().requires_grad_() for x in (k, v))
        options.update(causal=True, align="lower_right")
        rows = [0, 1, 2]
    else:
        k, v = (x[:, :, :0].detach().requires_grad_() for x in (k, v))
        rows = [0, 1, 2, 3, 4]
    out, lse = flashsci.attention(q, k, v, return_lse=True, backend=backend, deterministic=False, **options)
    assert out[:, :, rows].eq(0).all() and lse[:, :, rows].eq(-torch.inf).all()
    others = [i for i in range(5) if i not in rows]
    assert lse[:, :, others].isfinite().all()
    leaves = (q, k, v, *([options["bias"]] if way == "bias" else []))
    gradients = torch.autograd.grad(out.sum() + torch.where(torch.isinf(lse), 0.0, lse).sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][:, :, rows].eq(0).all()
    if way == "bias":
        assert gradients[3][rows].eq(0).all()
    if way == "no keys":
        assert gradients[1].shape == k.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0), (2, 2, 1, 1)])
def test_empty_and_single(backend, shape):
    batch, heads, seq_q, seq_k = shape
    q, k, v = (draw(batch, heads, n, 8).requires_grad_() for n in (seq_q, seq_k, seq_k))
    out, lse = flashsci.attention(q, k, v, return_lse=True, backend=backend)
    assert out.shape == (batch, heads, seq_q, 8) and lse.shape == (batch, heads, seq_q)
    if seq_k == 1:
        assert torch.equal(out, v.detach().expand_as(out))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_seventy_thousand_batch_heads(backend):
    """B * H = 70,000: more than a grid's second dim holds."""
    q, k, v = (draw(17_500, 4, n, 4).requires_grad_() for n in (2, 3, 3))
    out = flashsci.attention(q, k, v, backend=backend)
    truth = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
    agree(out, truth)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(truth.square().sum(), (q, k, v)),
        strict=True,
    ):
        agree(a / 16, b / 16)


# Packed sequences


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "align": "lower_right"}, {"window": (2, 1)}],
    ids=str,
)
def test_packed_is_each_sequence_alone(backend, known, options):
    lens_q, lens_k = (4, 0, 1, 9), (6, 3, 2, 5)
    q, k, v = draw(14, 4, 8), draw(16, 2, 8), draw(16, 2, 6)
    bounds = {"max_seqlen_q": 9, "max_seqlen_k": 6} if known else {}
    out, lse = flashsci.varlen_attention(
        q,
        k,
        v,
        offsets(*lens_q),
        offsets(*lens_k),
        return_lse=True,
        backend=backend,
        **options,
        **bounds,
    )
    assert out.shape == (14, 4, 6) and lse.shape == (4, 14)
    for a, b, c, d in zip(
        q.split(lens_q),
        k.split(lens_k),
        v.split(lens_k),
        zip(out.split(lens_q), lse.split(lens_q, 1), strict=True),
        strict=True,
    ):
        truth, truth_lse = naive(*(x.transpose(0, 1) for x in (a, b, c)), **options)
        agree(d[0], truth.transpose(0, 1))
        agree(d[1], truth_lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", ["pair", "key", "key, three dims"])
def test_packed_bias(backend, heads, kind):
    lens = (3, 0, 5)
    q, k, v, dout = draw(8, 4, 8), draw(8, 2, 8), draw(8, 2, 8), draw(8, 4, 8)
    shape = {"pair": (heads, 34), "key": (heads, 8), "key, three dims": (heads, 1, 8)}[kind]
    bias = draw(*shape).requires_grad_()
    out = flashsci.varlen_attention(q, k, v, offsets(*lens), bias=bias, backend=backend)
    (found,) = torch.autograd.grad(out, bias, dout)
    starts, pairs, parts = (0, 3, 3), (0, 9, 9), []
    for n, start, pair in zip(lens, starts, pairs, strict=True):
        rows = slice(start, start + n)
        block = bias[:, pair : pair + n * n].view(heads, n, n) if kind == "pair" else bias.view(heads, 1, -1)[..., rows]
        part, _ = naive(*(x[rows].transpose(0, 1) for x in (q, k, v)), bias=block)
        parts.append(part.transpose(0, 1))
    truth = torch.cat(parts)
    agree(out, truth)
    (wanted,) = torch.autograd.grad(truth, bias, dout)
    assert found.shape == bias.shape
    agree(found / 4, wanted / 4)


def test_packed_bias_that_could_be_both_is_refused():
    q, k = draw(2, 1, 4), draw(2, 1, 4)
    with pytest.raises(ValueError, match=r"per pair or per key here; give a per-key bias as \[Hb, 1, Tk\]"):
        flashsci.varlen_attention(q, k, k, offsets(0, 2), offsets(1, 1), bias=draw(1, 2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [True, False])
def test_jagged_nested_tensors(backend, heads):
    lens = (3, 1, 6)
    parts = [draw(n, *((2,) if heads else ()), 8) for n in lens]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    q = x.transpose(1, 2) if heads else x
    out, lse = flashsci.attention(q, q, q, causal=True, return_lse=True, backend=backend)
    assert out.is_nested and out.shape[0] == 3 and out.dim() == q.dim() and lse.dim() == q.dim() - 1
    (gradient,) = torch.autograd.grad(out.values().sum() if not heads else out.transpose(1, 2).values().sum(), x)
    for part, got, slope in zip(parts, out.unbind(), gradient.unbind(), strict=True):
        leaf = part.clone().requires_grad_()
        y = leaf.transpose(0, 1) if heads else leaf
        truth, _ = naive(y, y, y, causal=True)
        agree(got, truth)
        agree(slope / 4, torch.autograd.grad(truth.sum(), leaf)[0] / 4)


# attention_backward


@pytest.mark.parametrize("backend", ALL)
def test_backward_is_the_backward(backend):
    q, k, v = (draw(2, 4, 5, 8).requires_grad_() for _ in range(3))
    k, v = k[:, :2].detach().requires_grad_(), v[:, :2].detach().requires_grad_()
    bias, dout, dlse = draw(1, 4, 1, 5).requires_grad_(), draw(2, 4, 5, 8), draw(2, 4, 5)
    options = {"bias": bias, "causal": True, "softcap": 3.0}
    out, lse = flashsci.attention(q, k, v, return_lse=True, backend="reference", **options)
    wanted = torch.autograd.grad((out, lse), (q, k, v, bias), (dout, dlse))
    if backend == "sdpa":
        with pytest.raises(flashsci.BackendError):
            flashsci.attention_backward(dout, q, k, v, out, lse, dlse=dlse, backend=backend, **options)
        return
    with torch.no_grad():
        found = flashsci.attention_backward(dout, q, k, v, out, lse, dlse=dlse, backend=backend, **options)
    assert found._fields == ("dq", "dk", "dv", "dbias", "dkey_weight") and found.dkey_weight is None
    for a, b in zip(found[:4], wanted, strict=True):
        agree(a / 4, b / 4)
    with torch.no_grad():
        only = flashsci.attention_backward(None, q, k, v, out, lse, dlse=dlse, backend=backend, **options)
    assert only.dv.eq(0).all() and not only.dk.eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
def test_backward_of_key_weights(backend, packed):
    """Weights of zero have gradients, too."""
    q, k, v, dout = (draw(4, 9, 8) for _ in range(4))
    weight = draw(1, 9).abs()
    weight[:, 4] = 0
    options, call = {"causal": True}, flashsci.attention
    if packed:
        q, k, v, dout = (x.transpose(0, 1) for x in (q, k, v, dout))
        offsets = torch.tensor([0, 5, 9], dtype=torch.int32)
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        call = flashsci.varlen_attention
    leaves = [x.clone().requires_grad_() for x in (q, k, v, weight)]
    out, lse = call(*leaves[:3], key_weight=leaves[3], return_lse=True, backend="reference", **options)
    wanted = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        found = flashsci.attention_backward(dout, q, k, v, out, lse, key_weight=weight, backend=backend, **options)
    found = (*found[:3], found.dkey_weight)
    for a, b in zip(found, wanted, strict=True):
        agree(a / 4, b / 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ring_of_two_blocks_is_full_attention(backend):
    """Each block's gradients under the global out and lse: dk, dv are parts, dq adds up."""
    lens = (7, 4)
    q, dout = draw(2, 3, 6, 8), draw(2, 3, 6, 8)
    k, v = draw(2, 3, sum(lens), 8), draw(2, 3, sum(lens), 8)
    bias = draw(2, 1, 6, sum(lens))
    blocks = [*zip(k.split(lens, 2), v.split(lens, 2), bias.split(lens, 3), strict=True)]
    parts = [flashsci.attention(q, kn, vn, bias=bn, return_lse=True, backend=backend) for kn, vn, bn in blocks]
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), 0)
    out = sum(part[0] * torch.exp(part[1] - lse)[..., None] for part in parts)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    truth, truth_lse = flashsci.attention(*leaves[:3], bias=leaves[3], return_lse=True, backend="reference")
    agree(out, truth)
    agree(lse, truth_lse)
    wanted = torch.autograd.grad(truth, leaves, dout)
    shares = [flashsci.attention_backward(dout, q, kn, vn, out, lse, bias=bn, backend=backend) for kn, vn, bn in blocks]
    agree(sum(s.dq for s in shares), wanted[0])
    for i, dim in ((1, 2), (2, 2), (3, 3)):
        agree(torch.cat([s[i] for s in shares], dim), wanted[i])


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_of_rows_whose_lse_is_minus_infinity(backend):
    q, k, v, dout = (draw(1, 2, 5, 8) for _ in range(4))
    out, lse = flashsci.attention(q, k, v, return_lse=True, backend=backend)
    lse[:, :, 2] = -torch.inf
    found = flashsci.attention_backward(dout, q, k, v, out, lse, backend=backend)
    assert all(x.isfinite().all() for x in found[:3]) and found.dq[:, :, 2].eq(0).all()
    alone = flashsci.attention_backward(
        torch.cat([dout[:, :, :2], dout[:, :, 3:]], 2),
        *(torch.cat([q[:, :, :2], q[:, :, 3:]], 2), k, v),
        torch.cat([out[:, :, :2], out[:, :, 3:]], 2),
        torch.cat([lse[:, :, :2], lse[:, :, 3:]], 2),
        backend=backend,
    )
    agree(found.dv, alone.dv)
    agree(found.dk, alone.dk)


def test_backward_needs_what_the_forward_had():
    q = draw(1, 2, 5, 8)
    out, lse = flashsci.attention(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match="dropout_seed"):
        flashsci.attention_backward(q, q, q, q, out, lse, dropout_p=0.5)
    with pytest.raises(ValueError, match=r"lse must have shape \[1, 2, 5\]"):
        flashsci.attention_backward(q, q, q, q, out, lse[:, 0])


# determinism


def test_deterministic_follows_torch():
    q = draw(1, 2, 5, 8)
    assert not flashsci.explain(q, q, q).problem.deterministic
    assert flashsci.explain(q, q, q, deterministic=True).problem.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert flashsci.explain(q, q, q).problem.deterministic
        assert not flashsci.explain(q, q, q, deterministic=False).problem.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
