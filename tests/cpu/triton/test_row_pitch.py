"""A bias or mask whose rows do not begin at multiples of 16 bytes, on the Triton kernels, interpreted: the copy that
kernels read, all derivatives, and the layout of the gradient."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.backends import triton
from flashsci.call import bias_copy, ops, plans, row_pitch
from flashsci.call.ops import NEED_BIAS, Tensors
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs, poisoned_memory

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets without a GPU only"),
    pytest.mark.every(6),
]


@pytest.fixture(autouse=True)
def copies_of_any_size(monkeypatch):
    for name in ("FEWEST_SCORES", "FEWEST_NARROW_SCORES"):
        monkeypatch.setattr(row_pitch, name, 1)
    plans.plans.clear()
    yield
    plans.plans.clear()


def case(variant=None, **fields):
    plain = {"lead": (2,), "heads_k": 2, "group": 1, "seq_q": 37, "seq_k": 43, "seed": 5}
    return Case(variant=Variant(**({"dtype": "bfloat16"} | (variant or {}))), **(plain | fields))


PAIR = {"bias": "pair", "bias_grad": True}
OWN = (2, 2, 37, 43)
CASES = {
    "shared by the batch": case(PAIR, bias_shape=(1, 2, 37, 43)),
    "shared by all": case(PAIR, bias_shape=(37, 43)),
    "of one head": case(PAIR, bias_shape=(2, 1, 37, 43)),
    "for every pair": case(PAIR, bias_shape=OWN),
    "for every pair, fp16": case(PAIR | {"dtype": "float16", "softcap": True}, bias_shape=OWN, softcap=3.0),
    "for every pair, causal": case(PAIR | {"window": True}, bias_shape=OWN, causal=True),
    "for every pair, short": case(PAIR, bias_shape=(2, 2, 17, 23), seq_q=17, seq_k=23),
    "shared, short": case(PAIR, bias_shape=(1, 2, 17, 23), seq_q=17, seq_k=23, lead=(5,)),
    "several tiles": case(PAIR, bias_shape=(1, 2, 70, 135), seq_q=70, seq_k=135, lead=(1,)),
    "transposed": case(PAIR, bias_shape=OWN, bias_view="transposed"),
    "heads innermost": case(PAIR, bias_shape=OWN, bias_view="linear"),
    "padded rows": case(PAIR, bias_shape=OWN, bias_view="padded"),
    "expanded": case(PAIR, bias_shape=OWN, bias_view="expanded"),
    "fp32": case(PAIR | {"dtype": "float32"}, bias_shape=OWN),
    "fp32 beside 16 bits": case(PAIR | {"bias_float": True}, bias_shape=OWN),
    "mask": case({"mask": True}, mask_shape=(1, 1, 37, 43)),
    "mask and bias": case(PAIR | {"mask": True}, bias_shape=OWN, mask_shape=(37, 43)),
    "expanded mask": case({"mask": True}, mask_shape=OWN, mask_view="expanded"),
    "second order": case(PAIR | {"tangents": "qkvb"}, bias_shape=OWN),
    "second order, shared": case(PAIR | {"tangents": "qkvb"}, bias_shape=(1, 2, 37, 43)),
    "second order, short": case(PAIR | {"tangents": "qkvb"}, bias_shape=(2, 2, 17, 23), seq_q=17, seq_k=23),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    judge = Judge(make_inputs(CASES[name]))
    with poisoned_memory():
        found = evaluate(judge.inputs, "triton")
    judge.require(found)


@pytest.fixture
def read(monkeypatch):
    """The strides of bias and mask of every call that the kernels have computed."""
    found = []
    prepared, forward = triton.prepared_forward, triton.forward

    def strides(tensors):
        found.append(tuple(None if x is None else x.stride() for x in (tensors.bias, tensors.mask)))

    def spy_on_prepared(tensors, scalars):
        run = prepared(tensors, scalars)

        def spied(given):
            strides(Tensors(*given))
            return run(given)

        return spied

    def spy_on_forward(tensors, scalars):
        strides(tensors)
        return forward(tensors, scalars)

    monkeypatch.setattr(triton, "prepared_forward", spy_on_prepared)
    monkeypatch.setattr(triton, "forward", spy_on_forward)
    return found


def made(*bias_shape, keys=43):
    q, k, v = (torch.randn(2, 2, n, 16).bfloat16() for n in (37, keys, keys))
    return q, k, v, torch.randn(bias_shape or (2, 2, 37, keys)).bfloat16()


PITCHED = 2 * 37 * 48, 37 * 48, 48, 1


@pytest.mark.parametrize("grad", (False, True))
def test_every_call_reads_a_copy_at_a_pitch_of_16_bytes(read, grad):
    q, k, v, bias = made()
    bias.requires_grad_(grad)
    mask = torch.rand(37, 43) < 0.8
    found = []
    for _ in range(4):  # the first, the planned and the repeated ones
        found.append(flashsci.attention(q, k, v, bias=bias, mask=mask, backend="triton"))
        bias = bias.detach().clone().requires_grad_(grad)
    assert read == [(PITCHED, (37 * 48, 37 * 48, 48, 1))] * 4
    assert all(torch.equal(x, found[0]) for x in found)


def test_kernels_that_read_it_in_place_get_no_copy_without_gradients(read, monkeypatch):
    asked = []
    monkeypatch.setattr(triton, "reads_ragged_bias", lambda *given: asked.append(given) or True, raising=False)
    q, k, v, bias = made()
    mask = torch.rand(37, 43) < 0.8
    expected = flashsci.attention(q, k, v, bias=bias.clone().requires_grad_(), mask=mask, backend="triton")
    for _ in range(3):
        found = flashsci.attention(q, k, v, bias=bias, mask=mask, backend="triton")
        assert torch.equal(found, expected)
    assert read == [(PITCHED, (37 * 48, 37 * 48, 48, 1))] + 3 * [(bias.stride(), (37 * 48, 37 * 48, 48, 1))]
    assert len(asked) == 1


def test_a_call_of_whole_rows_reads_its_own_tensors(read):
    q, k, v, bias = made(keys=48)
    for _ in range(3):
        flashsci.attention(q, k, v, bias=bias, backend="triton")
    assert {found[0] for found in read} == {bias.stride()}
    (plan,) = {x for x in plans.plans.values() if isinstance(x, plans.Plan)}
    assert plan.as_given


@pytest.mark.parametrize("shape", ((2, 2, 37, 43), (1, 2, 37, 43), (37, 43)), ids=str)
def test_the_gradient_has_the_memory_order_of_the_bias(shape):
    q, k, v, bias = made(*shape)
    bias.requires_grad_()
    for _ in range(3):
        out = flashsci.attention(q, k, v, bias=bias, backend="triton")
        (gradient,) = torch.autograd.grad(out.float().square().sum(), bias)
        assert gradient.shape == bias.shape and gradient.is_contiguous()


def test_the_memory_of_the_bias_is_not_kept():
    """Both passes read the copy: one tensor of this size is saved."""
    q, k, v, bias = made()
    bias.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        flashsci.attention(q, k, v, bias=bias, backend="triton")
    assert [x.stride() for x in saved if x.shape == bias.shape] == [PITCHED]


def test_a_bool_mask_is_copied_by_the_kernel():
    mask = torch.rand(3, 37, 43) < 0.5
    found = bias_copy.copied(mask)
    assert torch.equal(found, mask) and found.stride() == (37 * 48, 48, 1)


def test_vmap_computes_the_same():
    q, k, v, bias = made()

    def attend(q, bias):
        return flashsci.attention(q, k[0], v[0], bias=bias, backend="triton")

    each = torch.stack([attend(x, y) for x, y in zip(q, bias, strict=True)])
    assert torch.equal(torch.vmap(attend)(q, bias), each)


def test_backward_alone_reads_a_copy(monkeypatch):
    q, k, v, bias = made()
    out, lse = flashsci.attention(q, k, v, bias=bias, backend="triton", return_lse=True)
    dout, seen = torch.randn_like(out), []
    backward = flashsci.choice.differentiate.backward
    monkeypatch.setattr(
        flashsci.choice.differentiate, "backward", lambda *a: seen.append(a[3].tensors.bias.stride()) or backward(*a)
    )
    found = flashsci.attention_backward(dout, q, k, v, out, lse, bias=bias, backend="triton")
    assert seen == [PITCHED]
    own = bias.clone().requires_grad_()
    (expected,) = torch.autograd.grad(flashsci.attention(q, k, v, bias=own, backend="triton"), own, dout)
    assert torch.equal(found.dbias, expected) and found.dbias.is_contiguous()


@pytest.mark.parametrize("shape", ((2, 2, 37, 43), (1, 2, 37, 43)), ids=str)
def test_a_compiled_call_reads_a_copy(read, shape):
    given = made(*shape)
    own = [x.clone().requires_grad_() for x in given]
    other = [x.clone().requires_grad_() for x in given]

    def attend(q, k, v, bias):
        return flashsci.attention(q, k, v, bias=bias, backend="triton").float().square().sum()

    expected = torch.autograd.grad(attend(*own), own)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)
    read.clear()
    found = torch.autograd.grad(compiled(*other), other)
    assert {strides[0][-2:] for strides in read} == {(48, 1)}
    assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(found, expected, strict=True))


def test_lengths_of_a_compiled_call_stay_free():
    """A copy that is made for some lengths alone would be a condition, and a new graph."""
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounter()

    def attend(q, k, v, bias):
        return flashsci.attention(q, k, v, bias=bias, backend="triton")

    compiled = torch.compile(attend, backend=frames, fullgraph=True, dynamic=True)
    for keys in (43, 48, 51):
        given = made(keys=keys)
        assert torch.equal(compiled(*given), attend(*given))
    assert frames.frame_count == 1


def test_the_op_returns_what_its_fake_says():
    q, k, v, bias = made()
    tensors = row_pitch.whole_rows(Tensors(q, k, v, bias))
    scalars = ops.Scalars(-1, -1, 0.25, 0.0, -1, -1, False, 0.0, "default", False)
    saved = ops.Saved(tensors, *triton.forward(tensors, scalars), scalars)
    given = ops.PASSES["backward"].flat(torch.randn_like(saved.out), None, saved, NEED_BIAS | 7)
    torch.library.opcheck(torch.ops.flashsci.triton_backward.default, given, test_utils="test_faketensor")
    assert torch.ops.flashsci.triton_backward(*given)[3].stride() == PITCHED
