"""Calls that repeat an earlier one (flashsci/call/repeats.py): which do, which must not, and that nobody can tell from what comes out.

Closed formulas take the place of Triton's kernels, so that calls that went astray differ.
"""

import contextlib
import functools
import inspect
import os
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flashsci
from flashsci.backends import cuda, triton
from flashsci.backends.cuda import prepared
from flashsci.call import drawn_seed, plans, repeats
from flashsci.choice import choose
from flashsci.choice.gradients import named
from tests.support import opaque
from tools.bench.no_launch import no_launches

SHAPE = (2, 4, 6, 8)
module = sys.modules["flashsci.api.attention"]


@pytest.fixture
def planned(stand_in, monkeypatch):
    """Grows with every call that is no repeat."""
    stand_in(triton, rejects=lambda problem: None, unavailable=lambda: None, **opaque.define())
    found = []
    for where in (module, sys.modules["flashsci.api.varlen"]):
        monkeypatch.setattr(where, "_plan", spy(where._plan, found))
    return found


def spy(function, calls):
    def run(*arguments):
        calls.append(function)
        return function(*arguments)

    return run


def draw(*shapes, grad=False, dtype=torch.float32):
    return [torch.randn(x, dtype=dtype).requires_grad_(grad) for x in shapes or (SHAPE,) * 3]


def call(q, k, v, **options):
    return flashsci.attention(q, k, v, **{"backend": "triton", **options})


def warm(*tensors, **options):
    """The first call finds what kernels take, the second what computes it."""
    for _ in range(2):
        call(*tensors, **options)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"window": (1, 2)}, {"window": (None, 2)}, {"scale": 1}, {"softcap": 2.0}, {"return_lse": True},
        {"bias": (1, 4, 6, 6)}, {"bias": (1, 4, 6, 6), "key_weight": (2, 4, 6)}, {"mask": (2, 1, 1, 6)},
        {"mask": (6, 6)}, {"bias": (4, 6, 6), "key_weight": (6,)}, {"bias": "heads last"},
    ],
    ids=str,
)  # fmt: skip
def test_alike_calls_are_repeats_with_their_own_results(planned, options, grad):
    def given():
        made = dict(options)
        for name in ("bias", "key_weight"):
            if made.get(name) == "heads last":  # of which kernels get a copy
                made[name] = torch.rand(1, 6, 6, 4, requires_grad=grad).permute(0, 3, 1, 2)
            elif name in made:
                made[name] = torch.rand(made[name]).requires_grad_(grad)
        if "mask" in made:
            made["mask"] = torch.ones(made["mask"], dtype=torch.bool).triu(1)
        return draw(grad=grad), made

    for _ in range(2):
        first, more = given()
        call(*first, **more)
    before = len(planned)
    tensors, more = given()
    found = call(*tensors, **more)
    assert len(planned) == before
    plans.plans.clear()
    due = call(*tensors, **more)
    assert len(planned) == before + 1
    found, due = (x if isinstance(x, tuple) else (x,) for x in (found, due))
    leaves = [x for x in (*tensors, *more.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    if grad:
        found += torch.autograd.grad(sum(x.sin().sum() for x in found), leaves)
        due += torch.autograd.grad(sum(x.sin().sum() for x in due), leaves)
    for a, b in zip(found, due, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("packed_rows", [False, True])
def test_calls_with_dropout_are_repeats_that_draw_anew(stand_in, monkeypatch, packed_rows, grad):
    """The seed that each call gets is the next of torch's generator, and its gradients get the same."""
    found, seeds = [], []

    def forward(tensors, scalars):
        seeds.append(tensors.dropout_seed)
        return torch.zeros_like(tensors.q), tensors.q.new_zeros(tensors.q.shape[:-1])

    def backward(dout, dlse, saved, need):
        seeds.append(saved.tensors.dropout_seed)
        return *(torch.zeros_like(x) for x in saved.tensors[:3]), None, None

    nothing = dict(rejects=lambda problem: None, unavailable=lambda: None)
    stand_in(triton, forward=forward, backward=backward, **nothing)
    where = sys.modules["flashsci.api.varlen"] if packed_rows else module
    monkeypatch.setattr(where, "_plan", spy(where._plan, found))
    if packed_rows:
        monkeypatch.setattr(where, "contents_are_seen", lambda q, validate: False)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    leaves = draw(*((6, 4, 8),) * 3, grad=grad) if packed_rows else draw(grad=grad)

    def step(**seed):
        given = dict(dropout_p=0.5, backend="triton", **seed)
        attend = functools.partial(flashsci.varlen_attention, *leaves, offsets) if packed_rows else None
        out = attend(**given) if packed_rows else flashsci.attention(*leaves, **given)
        if grad:
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    for _ in range(3):
        step()
    planned = len(found)
    torch.manual_seed(7)
    seeds.clear()
    for _ in range(2):
        step()
    assert len(found) == planned, "the calls were planned again"
    torch.manual_seed(7)
    due = [drawn_seed.draw(torch.device("cpu")) for _ in range(2)]
    for seed, wanted in zip(seeds, [x for x in due for _ in range(1 + grad)], strict=True):
        assert torch.equal(seed, wanted)
    seeds.clear()
    given = torch.tensor([3, 4])
    step(dropout_seed=given)
    assert all(torch.equal(x, given) for x in seeds), "a seed that is given is the one"


def test_backwards_are_repeats(planned, monkeypatch):
    """Also of other needs, and of gradients that lie otherwise, each in its turn."""
    found = []
    monkeypatch.setattr(plans.Plan, "backward", spy(plans.Plan.backward, found))

    def step(leaves, dout):
        return torch.autograd.grad(call(*leaves), leaves, dout)

    q, k, v = draw(grad=True)
    dense, spread = torch.randn(SHAPE), torch.randn(()).expand(SHAPE)
    for dout in (dense, spread, dense, spread):
        step((q, k, v), dout)
    assert len(found) == 2
    due = torch.autograd.grad(call(q, k, v, backend="reference"), (q, k, v), dense)
    for a, b in zip(step((q, k, v), dense), due, strict=True):
        torch.testing.assert_close(a, b)
    assert len(found) == 2
    for _ in range(2):
        torch.autograd.grad(call(q, k.detach(), v), (q, v), dense)
    assert len(found) == 3
    # Who wants to differentiate again has nodes for it.
    step((q, k, v), dense)
    dq, *_ = torch.autograd.grad(call(q, k, v), (q, k, v), dense, create_graph=True)
    assert "EagerBackward" in type(dq.grad_fn).__name__ and len(found) == 3


def test_backwards_have_tangents(planned, monkeypatch):
    """No comparison sees that a gradient has one: none is asked."""
    q, k, v = draw(grad=True)
    dout, direction = torch.randn(SHAPE), torch.randn(SHAPE)
    for _ in range(3):
        torch.autograd.grad(call(q, k, v), (q, k, v), dout)
    due = torch.autograd.grad(call(q, k, v), (q, k, v), direction)
    out = call(q, k, v)
    asked = []
    monkeypatch.setattr(repeats, "find", spy(repeats.find, asked))
    with forward_ad.dual_level():
        found = torch.autograd.grad(out, (q, k, v), forward_ad.make_dual(dout, direction))
        for x, tangent in zip(found, due, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(x).tangent, tangent)
    assert not asked


def test_hooks_of_saved_tensors_are_seen_by_backwards(planned):
    """They may bring back other tensors than were saved."""
    q, k, v = draw(grad=True)
    for _ in range(3):
        torch.autograd.grad(call(q, k, v).sum(), q)

    def unpack(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = call(q, k, v)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    due = torch.autograd.grad(call(q, k, v, backend="reference").sum(), (q, k, v))
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a, b)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


class Sub(torch.Tensor):
    pass


@contextlib.contextmanager
def deterministically():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def in_tf32():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def by_environment():
    os.environ["FLASHSCI_BACKEND"] = "reference"
    try:
        yield
    finally:
        del os.environ["FLASHSCI_BACKEND"]


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "forward AD": forward_ad.dual_level,
    "dispatch mode": Mode,
    "deterministic": deterministically,
    "use_backend": lambda: flashsci.use_backend("reference"),
    "strictly": lambda: flashsci.use_backend("auto", strict=True),
    "environment": by_environment,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "profiler": torch.autograd.profiler.profile,
    "tf32": in_tf32,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_torch_is_about_makes_another_call(planned, name, monkeypatch):
    """In a context the call is planned there; after it the earlier one is repeated again. By "auto", which all of them concern."""
    chosen = choose.choose
    monkeypatch.setattr(
        choose,
        "choose",
        lambda problem, name, strict: named("triton") if name == "auto" else chosen(problem, name, strict),
    )
    tensors = draw(grad=True)
    warm(*tensors, backend="auto")
    before = len(planned)
    due = call(*tensors, backend="auto")
    assert len(planned) == before
    with CONTEXTS[name]():
        found = call(*tensors, backend="auto")
        assert len(planned) == before + 1
    torch.testing.assert_close(found.float(), due, rtol=0.02, atol=0.02)
    assert found.requires_grad == (name not in ("no grad", "inference"))
    assert found.dtype == (torch.bfloat16 if name == "autocast" else torch.float32)
    assert torch.equal(call(*tensors, backend="auto"), due) and len(planned) == before + 1


def test_autocast_to_another_dtype_is_another_call(planned):
    """Whether there is one, a comparison of tensors sees; not to what."""
    tensors = draw(dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            for _ in range(3):
                assert call(*tensors).dtype == dtype
    # Once more in each: those of casted tensors are planned every time, by what the cast made.
    assert len(planned) == 2 + 3
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(*tensors), call(*tensors, backend="triton"))
    assert len(planned) == 5


def test_tracers_see_the_op_of_a_repeat(planned):
    """Their modes are not in any dispatch key."""
    tensors = draw()
    warm(*tensors)
    traced = make_fx(lambda q, k, v: call(q, k, v))(*tensors)
    assert "opaque_forward" in traced.code
    torch.testing.assert_close(traced(*tensors), call(*tensors))


def test_transforms_and_compilers_do_not_see_repeats(planned):
    q, k, v = draw()
    warm(q, k, v)
    before, due = len(planned), call(q, k, v)
    assert len(planned) == before
    batched = torch.func.vmap(lambda x: call(q, k, v) + x)(torch.zeros(2))
    torch.testing.assert_close(batched[1], due)
    assert len(planned) == before + 1
    torch.testing.assert_close(torch.func.vmap(call)(q[None], k[None], v[None])[0], due)
    torch.func.grad(lambda x: call(x, k, v).sum())(q)
    assert len(planned) == before + 3
    out, tangent = torch.func.jvp(lambda x: call(x, k, v), (q,), (q,))
    torch.testing.assert_close(out, due)
    assert len(planned) == before + 4 and tangent.abs().max() > 0
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), due)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        torch.testing.assert_close(forward_ad.unpack_dual(call(dual, k, v)).tangent, tangent)


def changed_strides(q, k, v):
    return q, k.transpose(1, 2).contiguous().transpose(1, 2), v


CHANGES = {
    "strides": changed_strides,
    "dtype": lambda *x: [y.to(torch.bfloat16) for y in x],
    "shape": lambda q, k, v: (q, k[..., 1:, :].contiguous(), v[..., 1:, :].contiguous()),
    "as many numbers": lambda *x: [y.reshape(4, 2, *y.shape[2:]) for y in x],
    "as many numbers in longer rows": lambda *x: [y.reshape(2, 4, 3, 16) for y in x],
    "heads": lambda q, k, v: (q, k[:, :2].contiguous(), v[:, :2].contiguous()),
    "grad": lambda q, k, v: (q, k, v.clone().requires_grad_()),
    "parameter": lambda q, k, v: (torch.nn.Parameter(q, False), k, v),
    "subclass": lambda q, k, v: (q.as_subclass(Sub), k, v),
    "negative": lambda q, k, v: (torch._neg_view(q), k, v),
    "zeros": lambda q, k, v: (torch._efficientzerotensor(SHAPE), k, v),
    "twice": lambda q, k, v: (q, k, k),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_tensors_make_another_call(planned, name):
    tensors = draw()
    warm(*tensors)
    before = len(planned)
    others = CHANGES[name](*tensors)
    found = call(*others)
    assert len(planned) == before + 1
    due = call(*(x.as_subclass(torch.Tensor) for x in others), backend="reference")
    torch.testing.assert_close(found.as_subclass(torch.Tensor), due, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "options, others",
    [
        ({"causal": True}, {"causal": 1}), ({}, {"causal": 0}), ({}, {"dropout_p": False}), ({}, {"dropout_p": 0}),
        ({}, {"return_lse": 0}), ({"scale": 1.0}, {"scale": True}), ({"scale": 1.0}, {"scale": torch.ones(())}),
        ({"softcap": 1.0}, {"softcap": True}), ({"deterministic": True}, {"deterministic": 1}),
        ({"window": (1, 1)}, {"window": (True, 1)}), ({"window": (1, 1)}, {"window": (1.0, 1)}), ({"window": (1, 1)}, {"window": [1, 1]}),
        ({"window": (1, 1)}, {"window": {1, 2}}), ({"window": (1, 1)}, {"window": 1}), ({}, {"align": ["upper_left"]}),
        ({}, {"scale": float("nan")}), ({}, {"dropout_p": 1.5}), ({}, {"precision": "half"}), ({}, {"backend": "no such"}),
        ({}, {"bias": [1.0]}), ({}, {"mask": torch.ones(6, 6)}), ({}, {"out_dtype": torch.float16}), ({}, {"sink": torch.ones(3)}),
        ({"bias": torch.ones(2, 4, 6, 6)}, {"mask": torch.ones(2, 4, 6, 6)}),
    ],
    ids=str,
)  # fmt: skip
def test_what_equals_an_earlier_call_and_is_none_is_judged_as_ever(planned, options, others):
    """To a dict 1, 1.0 and True are one key."""

    def outcome():
        try:
            return call(*tensors, **{**options, **others})
        except Exception as error:
            return type(error), str(error)

    tensors = draw()
    plans.plans.clear()
    due = outcome()
    for _ in range(3):
        call(*tensors, **options)
    found = outcome()
    assert torch.equal(found, due) if isinstance(due, torch.Tensor) else found == due


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_no_comparison_may_see(planned):
    """torch's comparison ends the process over tensors without strides; so these must not come to it."""
    q, k, v = draw()
    warm(q, k, v)
    nested = torch.nested.nested_tensor([torch.randn(SHAPE[1:]) for _ in range(2)])
    opaque_ones = [nested, q.to_sparse()]
    if torch.backends.mkldnn.is_available():
        opaque_ones.append(q.to_mkldnn())
    for x in opaque_ones:
        for given_ in ((q, x, v), (q, k, x), (x, k, v)):
            with pytest.raises(Exception):  # noqa: B017  (torch's own, of several kinds)
                call(*given_)
    for given_ in (("q", k, v), (q, None, v), (q, k, [1])):
        with pytest.raises(TypeError, match="must be a torch"):
            call(*given_)


def test_addresses_are_those_of_the_call():
    """Of tensors that begin elsewhere, aligned or not: launches look at them each time."""
    seen = []
    with no_launches():

        def run(*addresses):
            seen.append(dict(zip(prepared.PARAMETERS["flashsci_run_forward"], addresses, strict=True)))
            return 1

        cuda.library.handle.flashsci_run_forward = run
        tensors = draw(dtype=torch.bfloat16)
        for _ in range(3):
            call(*tensors, backend="cuda")
        storage = torch.randn(1 + tensors[0].numel()).to(torch.bfloat16)
        moved = storage[1:].view(SHAPE)
        out = call(moved, *tensors[1:], backend="cuda")
        read = [call(*tensors, backend="cuda", return_lse=True)[1] for _ in range(3)]
    unread = prepared._discarded(torch.device("cpu")).data_ptr()
    assert [x["lse"] == unread for x in seen] == [False, False, True, True, False, False, False]
    assert [x["lse"] for x in seen[4:]] == [x.data_ptr() for x in read]
    assert seen[3]["q"] == moved.data_ptr() != tensors[0].data_ptr()
    assert moved.data_ptr() % 4 == 2
    assert seen[3]["out"] == out.data_ptr()


def test_packed_calls_are_repeats():
    """Where contents of offsets are not looked at, as on a GPU."""
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    with no_launches(), pytest.MonkeyPatch.context() as patch:
        where, found = sys.modules["flashsci.api.varlen"], []
        patch.setattr(where, "_plan", spy(where._plan, found))

        def step(validate=False, more=None):
            q, k, v = draw(*((6, 4, 8),) * 3, grad=True)
            out, lse = flashsci.varlen_attention(
                q, k, v, offsets, more, return_lse=True, validate=validate, backend="cuda"
            )
            assert (out.shape, out.stride(), lse.shape) == ((6, 4, 8), (32, 8, 1), (4, 6))
            for x in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
                assert x.shape == (6, 4, 8)

        for _ in range(3):
            step()
        assert len(found) == 2
        step(validate=True)
        assert len(found) == 3
        step(more=offsets.clone())
        assert len(found) == 4
        strided = torch.zeros(3, 2, dtype=torch.int32)
        strided[:, 0] = offsets
        for _ in range(3):
            step(more=strided[:, 0])
        assert len(found) == 7, "kernels read a copy"
        with pytest.MonkeyPatch.context() as seen:
            seen.setattr(where, "contents_are_seen", lambda q, validate: True)
            plans.plans.clear()
            for _ in range(3):
                step()
        assert len(found) == 10, "contents that the host sees are checked every time"


def test_packed_repeats_are_right_to_second_order(monkeypatch):
    """Triton's own kernels, interpreted; the first call of a kind goes the general way."""
    where, found = sys.modules["flashsci.api.varlen"], []
    monkeypatch.setattr(where, "_plan", spy(where._plan, found))
    monkeypatch.setattr(where, "contents_are_seen", lambda q, validate: validate)
    plans.plans.clear()
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    tensors = draw(*((8, 2, 4),) * 3, grad=True)

    def step():
        out, lse = flashsci.varlen_attention(*tensors, offsets, offsets, causal=True, return_lse=True, backend="triton")
        loss = out.sin().sum() + lse.cos().sum()
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        plain = torch.autograd.grad(out, tensors[:2], torch.ones_like(out), retain_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), tensors)
        return [x.detach() for x in (out, lse, *first, *plain, *second)]

    due = step()
    for _ in range(3):
        for a, b in zip(step(), due, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b)
    assert len(found) == 2


def test_without_torchs_comparison_every_call_is_planned(planned, monkeypatch):
    monkeypatch.setattr(repeats, "_Guards", None)
    tensors = draw()
    for count in range(1, 4):
        call(*tensors)
        assert len(planned) == count


def test_no_tensor_is_kept(planned):
    import gc
    import weakref

    tensors = draw(grad=True)
    for _ in range(3):
        call(*tensors).sum().backward()
    alive = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_memory_is_bounded(planned, monkeypatch):
    monkeypatch.setattr(plans, "MOST_PLANS", 20)
    monkeypatch.setattr(plans, "MOST_BACKWARDS", 5)
    for length in range(1, 60):
        q, k, v = draw(*((1, 1, length, 4),) * 3, grad=True)
        for _ in range(2):
            call(q, k, v).sum().backward()
        assert len(plans.plans) <= 22
    for plan in plans.plans.values():
        assert isinstance(plan, tuple) or len(plan._backwards) <= 7


# --- sequences of calls -------------------------------------------------------------------------------------------


KINDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "batch": st.sampled_from([1, 2]),
        "heads": st.sampled_from([(2, 2), (2, 1), (2, 3)]),  # the last one is wrong
        "sizes": st.sampled_from([(3, 3), (3, 5)]),
        "dim": st.sampled_from([4, 6]),
        "turned": st.booleans(),
        "alike": st.sampled_from(["", "k is v"]),
        "grads": st.sampled_from([(), (0,), (0, 1, 2)]),
        "bias": st.sampled_from([None, None, (1, 2, 3, 3), (1, 2, 3, 5), (3, 3), (2, 1, 1, 1, 3)]),
        "options": st.sampled_from(
            [
                {}, {}, {"causal": True}, {"causal": 1}, {"scale": 1.0}, {"scale": True}, {"scale": 1}, {"return_lse": True}, {"return_lse": 1},
                {"window": (-1, 0)}, {"window": (-1, False)}, {"softcap": 0.0}, {"softcap": -1.0}, {"deterministic": True},
            ]
        ),
        "context": st.sampled_from([None, None, None, *CONTEXTS]),
    }
)  # fmt: skip


def outcome(kind, number):
    """What a call gives, or why not. Its numbers are those of its place in the sequence."""
    generator = torch.Generator().manual_seed(number)

    def made(*shape):
        return torch.randn(shape, generator=generator, dtype=kind["dtype"])

    (hq, hk), (sq, sk), n, d = kind["heads"], kind["sizes"], kind["batch"], kind["dim"]
    q, k, v = made(n, hq, sq, d), made(n, hk, sk, d), made(n, hk, sk, d)
    if kind["turned"]:
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    if kind["alike"]:
        v = k
    leaves = [q, k, v]
    for i in kind["grads"]:
        leaves[i].requires_grad_()
    bias = None if kind["bias"] is None else made(*kind["bias"])
    try:
        with CONTEXTS.get(kind["context"], contextlib.nullcontext)():
            out = call(*leaves, bias=bias, **kind["options"])
            found = list(out) if isinstance(out, tuple) else [out]
            if found[0].requires_grad:
                wanted = [x for x in leaves if x.requires_grad]
                found += torch.autograd.grad(found[0].float().sin().sum(), wanted)
        return [(x.detach().clone(), x.stride(), x.requires_grad) for x in found]
    except Exception as error:
        return type(error), str(error)


def same(a, b):
    if isinstance(a, tuple) or isinstance(b, tuple):
        return a == b
    return len(a) == len(b) and all(
        torch.equal(x[0], y[0]) and x[1:] == y[1:] and x[0].dtype == y[0].dtype for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def formulas():
    """As ``stand_in``, once for all examples."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("prepared_forward", "prepared_backward"):
            patch.delattr(triton, name, raising=False)
        replaced = {"rejects": lambda problem: None, "unavailable": lambda: None, **opaque.define()}
        for name, function in replaced.items():
            patch.setattr(triton, name, function)
        plans.plans.clear()
        yield
        plans.plans.clear()


@given(kinds=st.lists(KINDS, min_size=1, max_size=3), order=st.lists(st.integers(0, 2), min_size=4, max_size=14))
def test_nobody_can_tell_a_repeat(formulas, kinds, order):
    """Sequences of few kinds of calls, and so with many repeats, with and without what was kept."""
    sequence = [kinds[i % len(kinds)] for i in order]
    plans.plans.clear()
    found = [outcome(kind, number) for number, kind in enumerate(sequence)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "_Guards", None)
        due = []
        for number, kind in enumerate(sequence):
            plans.plans.clear()
            due.append(outcome(kind, number))
    for number, (a, b) in enumerate(zip(found, due, strict=True)):
        assert same(a, b), (number, sequence[number])


# --- every argument ---------------------------------------------------------------------------------------------------

OTHER_VALUES = dict(
    bias=torch.zeros(1, 1, 6, 6), key_weight=torch.ones(6), mask=torch.ones(6, 6, dtype=torch.bool), alibi_slopes=torch.ones(4),
    sink=torch.zeros(4), pair_gate=torch.ones(6, 6), causal=True, window=(2, None), align="lower_right", scale=0.5, softcap=2.0, dropout_p=0.25,
    dropout_seed=torch.zeros(2, dtype=torch.int64), return_lse=True, deterministic=True, precision="ieee", softcap_at="biased", q_scale=torch.ones(()), fp8_accumulate="fast",
    k_scale=torch.ones(()), v_scale=torch.ones(()), out_dtype=torch.float16, backend="reference", validate=True,
    cu_seqlens_k=torch.tensor([0, 2, 6], dtype=torch.int32), max_seqlen_q=4, max_seqlen_k=4,
)  # fmt: skip


@pytest.mark.parametrize("entry", [flashsci.attention, flashsci.varlen_attention])
def test_no_argument_is_overlooked(entry):
    """Also one that is added later: it needs a value here, by which its call is another."""
    offsets = {} if entry is flashsci.attention else {"cu_seqlens_q": torch.tensor([0, 2, 6], dtype=torch.int32)}
    tensors = draw(*((6, 4, 8),) * 3) if offsets else draw()
    found = []

    def repeated(*arguments):
        again, known = plans.repeated(*arguments)
        found.append(again)
        return again, known

    with no_launches(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[entry.__module__], "repeated", repeated)
        for _ in range(3):
            entry(*tensors, **offsets, backend="cuda")
        assert found[-1] is not None
        for name in inspect.signature(entry).parameters:
            if name in ("q", "k", "v", *offsets):
                continue
            found.clear()
            with contextlib.suppress(Exception):  # of arguments that do not go together here
                entry(*tensors, **{**offsets, "backend": "cuda", name: OTHER_VALUES[name]})
            assert not found or found[-1] is None, name


# --- 8-bit floats -----------------------------------------------------------------------------------------------------


def eight_bit(seed, packed):
    """q, k, v in float8_e4m3fn with their scales, and the offsets of a packed call."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32) if packed else None
    tensors, scales = [], {}
    for name in "qkv":
        x = torch.randn((6, 4, 16) if packed else (1, 4, 6, 16), generator=generator)
        tensors.append(flashsci.quantize(x, "head", cu_seqlens=offsets))
        scales[f"{name}_scale"] = tensors[-1].scale
    given = {"cu_seqlens_q": offsets} if packed else {}
    return [x.values for x in tensors], {**given, **scales}


@pytest.mark.parametrize("packed", [False, True])
def test_calls_on_8_bit_floats_are_repeats(packed):
    entry = flashsci.varlen_attention if packed else flashsci.attention
    found = []

    def repeated(*arguments):
        again, known = plans.repeated(*arguments)
        found.append(again)
        return again, known

    fresh = []
    for seed in range(3):
        plans.plans.clear()
        tensors, options = eight_bit(seed, packed)
        fresh.append(entry(*tensors, **options, backend="reference"))
    plans.plans.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["flashsci.api.fp8"], "repeated", repeated)
        for seed, due in enumerate(fresh):
            tensors, options = eight_bit(seed, packed)
            assert torch.equal(entry(*tensors, **options, backend="reference"), due)
            assert (found[-1] is not None) == (seed > 0)
        for name, value in (
            ("scale", 1),
            ("causal", True),
            ("out_dtype", torch.float16),
            ("softcap", 3.0),
            ("q_scale", None),
        ):
            found.clear()
            entry(*tensors, **{**options, name: value}, backend="reference")
            assert found == [None], name
        found.clear()
        with pytest.raises(flashsci.BackendError, match="bias"):
            entry(*tensors, **options, bias=torch.zeros((4, 20) if packed else (6, 6)), backend="reference")
        assert found == []
