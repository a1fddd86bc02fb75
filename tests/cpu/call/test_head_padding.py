"""Rows of q, k and v that no vector load fits: the copies that kernels of 16 bits read, and the results of such calls."""

import pytest
import torch

import flashsci
from flashsci.call import head_padding, plans
from flashsci.call.arguments import Options

BF16 = torch.bfloat16
SIZES = (2, 3, 40, 33)  # batch, heads, queries, keys


@pytest.fixture(autouse=True)
def copies_of_any_size(monkeypatch):
    monkeypatch.setattr(head_padding, "LEAST_WORK", 1)
    monkeypatch.setattr(head_padding, "FEWEST_ROWS", 2)
    monkeypatch.setattr(head_padding, "_has_tensor_cores", lambda device: True)
    plans.plans.clear()
    yield
    plans.plans.clear()


def made(dim=25, dim_v=11, layout="bhsd", dtype=BF16):
    b, h, sq, sk = SIZES
    random = torch.Generator().manual_seed(dim)

    def rows(n, d):
        shape = (b, n, h, d) if layout == "bshd" else (b, h, n, d)
        x = torch.randn(shape, generator=random).to(dtype)
        return x.transpose(1, 2) if layout == "bshd" else x

    return [x.detach().requires_grad_() for x in (rows(sq, dim), rows(sk, dim), rows(sk, dim_v))]


def pays(q, k, v, window=None, backend="auto", offsets=None, deterministic=None):
    options = Options.of(False, window, "upper_left", None, None, 0.0, False, deterministic, None, "scores")
    return head_padding.pays(q, k, v, options, backend, offsets)


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True, align="lower_right"),
    "scale, softcap": dict(scale=0.3, softcap=2.0),
    "bias, mask": dict(bias=torch.linspace(-1, 1, 40 * 33).reshape(40, 33).to(BF16), mask=torch.arange(33) != 5),
    "sink": dict(sink=torch.tensor([0.5, 1.0, -1.0])),
    "dropout": dict(dropout_p=0.25, dropout_seed=torch.tensor([3, 4])),
    "gate": dict(pair_gate=torch.linspace(0, 1, 33).expand(3, 40, 33)),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dims", ((25, 11), (32, 11), (25, 32), (12, 12)))
@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_results_and_gradients_are_those_of_the_call(monkeypatch, name, dims, layout):
    options = OPTIONS[name] | {"return_lse": True, "backend": "auto"}
    q, k, v = made(*dims, layout)
    assert pays(q, k, v)
    found = flashsci.attention(q, k, v, **options)
    dout = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    gradients = torch.autograd.grad(found[0], (q, k, v), dout)
    monkeypatch.setattr(head_padding, "pays", lambda *given: False)
    due = flashsci.attention(q, k, v, **options)
    expected = torch.autograd.grad(due[0], (q, k, v), dout)
    for x, y in zip((*found, *gradients), (*due, *expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        torch.testing.assert_close(x.float(), y.float(), atol=0.02, rtol=0.02)
    order = lambda x: sorted(range(4), key=lambda d: -x.stride(d))  # noqa: E731
    assert order(found[0]) == order(q) or layout == "bhsd"


@pytest.mark.parametrize("dims", ((25, 11), (32, 11), (12, 16)))
def test_packed_sequences(monkeypatch, dims):
    offsets = torch.tensor([0, 30, 30, 70], dtype=torch.int32)
    q, k, v = (x.detach().transpose(1, 2).flatten(0, 1)[:70].requires_grad_() for x in made(*dims))
    k, v = (torch.cat((x, x))[:70].detach().requires_grad_() for x in (k, v))
    assert pays(q, k, v, offsets=offsets)
    monkeypatch.setattr(head_padding, "FEWEST_ROWS", 24)
    assert not pays(q, k, v, offsets=offsets), "a third of the rows"
    monkeypatch.setattr(head_padding, "FEWEST_ROWS", 2)
    results = []
    for _ in range(2):
        out, lse = flashsci.varlen_attention(q, k, v, offsets, causal=True, return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
        monkeypatch.setattr(head_padding, "pays", lambda *given: False)
    for x, y in zip(*results, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.float(), y.float(), atol=0.02, rtol=0.02)


def test_second_derivatives_and_transforms():
    q, k, v = (x.double() for x in made())
    of_copies = lambda x: head_padding.in_whole_pieces(x)  # noqa: E731
    assert torch.autograd.gradcheck(of_copies, q.detach()[..., :5].requires_grad_())
    q, k, v = (x.detach().requires_grad_() for x in made())
    out = flashsci.attention(q, k, v, backend="auto")
    (first,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.float().square().sum(), v)
    assert second.shape == v.shape and second.isfinite().all() and (second != 0).any()
    alone = torch.func.vmap(lambda *x: flashsci.attention(*x, backend="auto"))(q, k, v)
    torch.testing.assert_close(alone, out, atol=0.02, rtol=0.02)


def test_calls_that_compute_from_their_own_rows(monkeypatch):
    q, k, v = made()
    assert pays(q, k, v, backend="cuda") and pays(q, k, v, backend="triton")
    assert not pays(q, k, v, backend="sdpa") and not pays(q, k, v, backend="cuda:sm80"), "a request that names kernels"
    with flashsci.use_backend("sdpa"):
        assert not pays(q, k, v)
    assert not pays(*(x.float() for x in (q, k, v))), "32 bits"
    assert not pays(*made(32, 64)), "rows of whole 16 bytes"
    assert not pays(q, k[..., :24], v), "an error, which names the head dims that were given"
    assert not pays(q, k.expand(2, 3, 33, 25)[:1].expand(2, 3, 33, 25), v), "a copy would hold repetitions"
    monkeypatch.setattr(head_padding, "FEWEST_ROWS", 20)
    assert pays(q, k, v, (10, 10)) and not pays(q, k, v, (9, 9)), "few keys in a window"
    monkeypatch.setattr(head_padding, "FEWEST_ROWS", 34)
    assert not pays(q, k, v), "few keys"
    monkeypatch.setattr(head_padding, "FEWEST_ROWS", 2)
    monkeypatch.setattr(head_padding, "LEAST_WORK", 2 * 3 * 40 * 33 * (q.shape[-1] + v.shape[-1]) + 1)
    assert not pays(q, k, v), "little work"
    monkeypatch.setattr(head_padding, "LEAST_WORK", 1)
    assert pays(q, k, v) and not pays(q, k, v, deterministic="batch"), "the batch may decide nothing"
    monkeypatch.undo()
    assert not pays(q, k, v), "a CPU"


def test_errors_name_what_was_given():
    q, k, v = made()
    with pytest.raises(ValueError, match="25"):
        flashsci.attention(q, k[..., :24], v)


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_a_slice_of_projections(layout):
    """q, k and v as slices of one tensor, whose rows are apart by an odd number."""
    b, h, s, d = 2, 3, 40, 16
    wide = torch.randn(b, s, 3 * h * d + 1).to(BF16)
    q, k, v = (wide[..., i * h * d : (i + 1) * h * d].unflatten(-1, (h, d)).transpose(1, 2) for i in range(3))
    assert pays(q, k, v)
    copied = head_padding.in_whole_pieces(q)
    assert copied.shape == q.shape and all(n % 8 == 0 for n in copied.stride()[:-1]) and torch.equal(copied, q)
    out, due = flashsci.attention(q, k, v, backend="auto"), flashsci.attention(q, k, v, backend="reference")
    torch.testing.assert_close(out, due, atol=0.02, rtol=0.02)


def test_a_compiler_that_keeps_lengths_symbolic_copies_nothing():
    q, k, v = (x.detach() for x in made())
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: flashsci.attention(*x, backend="auto"), dynamic=True, fullgraph=True, backend="aot_eager"
    )
    due = flashsci.attention(q, k, v, backend="reference")
    torch.testing.assert_close(compiled(q, k, v), due, atol=0.02, rtol=0.02)
    static = torch.compile(
        lambda *x: flashsci.attention(*x, backend="auto"), dynamic=False, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(static(q, k, v), due, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_a_compiler_takes_the_generation_of_a_device_for_a_constant(monkeypatch, capability):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    torch.compiler.reset()  # which compiled the program for another generation
    device = torch.device("cuda", 0)

    def program(x):
        return x + 1 if head_padding._has_tensor_cores(device) else x

    found = torch.compile(program, fullgraph=True, backend="eager")(torch.zeros(2))
    assert bool(found.all()) is (capability >= (8, 0))
