"""Every tensor argument of every entry point has a rule, and the rule holds: what has derivatives has the right ones, in every mode
of torch; what has none refuses, and by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import flashsci
import flashsci.distributed
from flashsci.backends import triton
from flashsci.call import derivatives, transforms
from flashsci.call.derivatives import ENTRIES, Asked
from tests.support import opaque
from tests.support.derivative_calls import (
    BESIDE,
    CALLS,
    HAVE,
    REFUSED,
    SAYS,
    WAYS,
    WITHOUT,
    along,
    beside_gradient,
    beside_mapped,
    call_of,
    dense,
    first,
    given,
    gradient,
    mapped,
    numbers,
    of,
    requires_grad,
    total,
    wide,
    without,
)

pytestmark = pytest.mark.every(4)


def entry_points():
    for module, prefix in ((flashsci, ""), (flashsci.distributed, "distributed.")):
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                yield prefix + name, function


def test_every_tensor_of_every_entry_point_has_a_rule():
    found = {
        entry: {
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if "Tensor" in str(parameter.annotation)
        }
        for entry, function in entry_points()
    }
    found["explain"] |= set(found["attention"])  # its options
    ruled = {entry: set(rules.rules) for entry, rules in ENTRIES.items() if entry != "float8"}
    assert {entry: names for entry, names in found.items() if names} == ruled
    dense_and_packed = found["attention"] | found["varlen_attention"]
    assert set(ENTRIES["float8"].rules) == dense_and_packed


@pytest.fixture
def kernels(stand_in):
    """Triton's kernels are stood in for by closed formulas in fp64."""
    stand_in(
        triton,
        rejects=lambda p: derivatives.lacks("triton", "alibi_slopes") if p.alibi_grad else None,
        **opaque.define(),
    )


def serves(entry, name, backend):
    """Whether this backend has such a call at all, apart from derivatives; the stand-in has dense ones without dropout, ALiBi and gates."""
    if backend == "reference":
        return True
    if backend == "triton":
        return entry in ("attention", "attention_backward", "sdpa") and name not in ("dropout_seed", "pair_gate")
    return entry == "sdpa" or (entry == "attention" and name in ("q", "k", "v", "bias", "mask", "key_weight"))


def lacks(entry, name, backend):
    if backend == "eager" and name == "key_weight":
        return True
    return backend in ENTRIES[entry].rules[name].lacking


BACKENDS = ["reference", "triton", "sdpa", "eager"]
SERVED = [(e, n, b) for e, n in HAVE for b in BACKENDS if serves(e, n, b)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("entry, name, backend", [x for x in SERVED if ENTRIES[x[0]].rules[x[1]].reverse])
def test_derivatives_are_right_in_every_mode(entry, name, backend):
    """Against finite differences, in fp64: gradients, tangents (also mapped ones), second derivatives."""
    rule = ENTRIES[entry].rules[name]
    call, x = given(entry, name)
    if lacks(entry, name, backend):
        asks = (
            requires_grad,
            gradient,
            along,
            numbers,
            *(of(gradient, f) for f in BESIDE.values()),
        )
        for way in asks:
            with pytest.raises(flashsci.BackendError):
                way(call_of(call, backend), x)
        return
    assert rule.forward and rule.second
    x = x.requires_grad_()
    assert torch.autograd.gradcheck(call_of(call, backend), (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call_of(call, backend), (x,))
    x = x.detach()
    _, found = func.jvp(call_of(call, backend), (x,), (x.cos(),))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(first(call(forward_ad.make_dual(x, x.cos()), backend)))
    torch.testing.assert_close(dual.tangent, first(found), rtol=1e-9, atol=1e-11)
    twice = func.jvp(lambda y: first(func.jvp(call_of(call, backend), (y,), (y.cos(),))[1]), (x,), (x.sin(),))[1]
    due = func.jvp(lambda y: first(func.jvp(call_of(call, "reference"), (y,), (y.cos(),))[1]), (x,), (x.sin(),))[1]
    torch.testing.assert_close(twice, due, rtol=1e-9, atol=1e-11)
    mapped = func.vmap(lambda t: func.jvp(call_of(call, backend), (x,), (t,))[1])
    each = mapped(torch.stack([x.cos(), x.sin()]))
    torch.testing.assert_close(first(each)[0], first(found), rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("entry, name, backend", [x for x in SERVED if x[1:] != ("key_weight", "eager")])
def test_mapped_calls_are_those_of_each_sample(entry, name, backend):
    call, x = given(entry, name)
    samples = torch.stack([x, x.roll(1, -1)])
    if name.startswith("cu_seqlens"):  # on the CPU their values are checked
        with pytest.raises(ValueError, match=f"torch.vmap maps {name}, whose values the host reads"):
            func.vmap(call_of(call, backend))(samples)
        return
    each = [first(call(x, backend)) for x in samples]
    found = first(func.vmap(call_of(call, backend))(samples))
    torch.testing.assert_close(found, torch.stack(each), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("which, name, mode", REFUSED)
def test_what_has_no_derivatives_refuses(which, name, mode, backend):
    """Also where an equal call without any was planned before."""
    call, x = without(which, name, backend)
    call(x)
    for way, ask in WAYS[mode].items():
        with pytest.raises(ValueError, match=SAYS[mode].format(name)):
            pytest.fail(f"{way}: {ask(call, x)}")
    with torch.no_grad():
        call(x.clone().requires_grad_(x.is_floating_point()))
    call(x)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("which", WITHOUT)
@pytest.mark.parametrize("way", BESIDE)
def test_transforms_of_other_tensors_are_fine(which, way, backend):
    name = next(iter(WITHOUT[which][1]()))
    call, x = without(which, name, backend)
    due = total(call(x))
    found = BESIDE[way](call, x)
    torch.testing.assert_close(found, due.expand(found.shape))


@pytest.mark.parametrize("mode", [Asked.REVERSE, Asked.FORWARD])
@pytest.mark.parametrize("packed_call", [False, True])
def test_derivatives_by_slopes_are_the_references(packed_call, mode):
    """Triton's own kernels have the gradient of an eager call and refuse all others, "auto" goes to the reference, `explain` says so,
    and a call without derivatives in between leaves no plan behind."""
    entry = "varlen_attention" if packed_call else "attention"
    tensors, function = CALLS[entry]
    needed, others = tensors()
    needed = {n: x.float() if x.is_floating_point() else x for n, x in needed.items()}
    slopes = others["alibi_slopes"].float()

    def call(backend):
        return lambda x: function(**needed, alibi_slopes=x, backend=backend)

    def chosen(x):
        names.append(flashsci.explain(**needed, alibi_slopes=x).chosen)
        return x.sum()

    for way, ask in WAYS[mode].items():
        names: list[str] = []
        call("triton")(slopes)
        call("auto")(slopes)
        if way == "requires_grad":
            torch.testing.assert_close(ask(call("triton"), slopes), ask(call("reference"), slopes))
        else:
            with pytest.raises(flashsci.BackendError, match="ALiBi slopes have no derivative"):
                pytest.fail(f"{way}: {ask(call('triton'), slopes)}")
        for a, b in zip(flat(ask(call("auto"), slopes)), flat(ask(call("reference"), slopes)), strict=True):
            assert torch.equal(a, b), way
        ask(chosen, slopes)
        assert set(names) == {"reference"}, way


def flat(found):
    return [y for x in found for y in flat(x)] if isinstance(found, tuple) else [found]


def test_grad_mode_is_that_of_each_level():
    """As torch has it: `torch.no_grad` ends what all levels record, and a transform begins again what was off around it, for itself."""
    x = torch.randn(2, 3)
    seen = []

    def look(x, y=None):
        seen.append(transforms.asked(x))
        return x.sum()

    def ended(x, y=None):
        with torch.no_grad():
            return look(x)

    func.grad(ended)(x)
    func.grad(lambda x: func.grad(lambda y: ended(x) + y)(torch.zeros(())) + look(x))(x)
    x.requires_grad_()
    with torch.no_grad():
        func.grad(lambda y: look(x) + y)(torch.zeros(()))
        func.vmap(lambda y: look(x) + y)(torch.zeros(2))
    func.vmap(lambda y: look(x) + y)(torch.zeros(2))
    assert seen == [Asked.NOTHING, Asked.NOTHING, Asked.REVERSE, Asked.NOTHING, Asked.NOTHING, Asked.REVERSE]
    assert torch.is_grad_enabled() and not torch._C._functorch.get_dynamic_layer_stack_depth()


@pytest.mark.parametrize(
    "kind, backend",
    [("plain", b) for b in BACKENDS] + [(k, b) for k in ("sink", "residual") for b in BACKENDS[:2]],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_tangents_of_a_cotangent(kind, backend, recorded):
    """Forward mode over a backward whose forward was before: the gradients are linear in the cotangent."""
    dtype = torch.float32 if backend == "triton" else torch.float64  # kernels of its own
    q, k, v = (x.to(dtype).requires_grad_() for x in dense()[0].values())
    sink = wide(2).to(dtype).requires_grad_()
    leaves = (q, k, v, sink) if kind == "sink" else (q, k, v)

    def compute():
        if kind == "residual":
            return flashsci.residual_attention(q, k, v, backend=backend)[0]
        return flashsci.attention(q, k, v, sink=sink if kind == "sink" else None, backend=backend)

    direction = wide(2, 3, 2).to(dtype)
    due = torch.autograd.grad(compute(), leaves, direction)
    for _ in range(3):  # the later ones are repeats
        out = compute()
        with forward_ad.dual_level():
            dout = forward_ad.make_dual(torch.ones_like(out), direction)
            found = torch.autograd.grad(out, leaves, dout, create_graph=recorded)
            tangents = [forward_ad.unpack_dual(x).tangent for x in found]
        torch.testing.assert_close(tangents, list(due))
        assert all(x.requires_grad is recorded for x in found)


# --- compiled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["float8", "paged_attention", "write_kv_cache", "quantize"])
def test_compiled_transforms_refuse(which):
    """A compiler's tensors do not say what transforms ask of them. None of these gave an error before, but zeros."""
    names = {n: x for n, x in WITHOUT[which][1]().items() if x.is_floating_point()}
    name = list(names)[0 if which != "float8" else 3]
    call, x = without(which, name, "reference")
    rule = ENTRIES[WITHOUT[which][0]].rules[name]
    asks = {
        Asked.REVERSE: (requires_grad, gradient, of(gradient, beside_mapped)),
        Asked.FORWARD: (along, numbers, of(along, beside_gradient)),
        Asked.MAPPED: () if rule.mapped else (mapped,),
    }
    for mode, ways in asks.items():
        for way in ways:
            torch._dynamo.reset()
            with pytest.raises(Exception, match=SAYS[mode].format(name)):
                torch.compile(lambda x, way=way: way(call, x), backend="eager", fullgraph=True)(x)
    for way in BESIDE.values():
        torch._dynamo.reset()
        found = torch.compile(lambda x, way=way: way(call, x), backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(found, way(call, x))


@pytest.mark.parametrize("way", ["jvp", "dual numbers", "grad of vmap of another"])
def test_compiled_transforms_of_kernels(way):
    """Triton's own, interpreted: slopes are refused, residual attention is computed from its parts."""
    q, k, v = (torch.randn(2, 3, 16) for _ in range(3))
    ask = next(ways[way] for ways in WAYS.values() if way in ways)

    def run(call, x):
        torch._dynamo.reset()
        return torch.compile(lambda x: ask(call, x), backend="aot_eager", fullgraph=True)(x)

    with pytest.raises(Exception, match="a derivative by alibi_slopes in a fused kernel"):
        run(lambda x: flashsci.attention(q, k, v, alibi_slopes=x, backend="triton"), torch.rand(2))

    def residual(x):
        return flashsci.residual_attention(q, k, v, x, backend="triton")[0].sin()

    x = torch.randn(2, 3, 3)
    for found, due in zip(flat(run(residual, x)), flat(ask(residual, x)), strict=True):
        torch.testing.assert_close(tangent_of(found), tangent_of(due))


def tangent_of(x):
    return x.detach()


# --- other kinds of tensors -------------------------------------------------------------------------


class Label(torch.Tensor):
    """A subclass that torch functions hand on."""


@pytest.mark.parametrize("backend", ["reference", "sdpa", "eager", "triton"])
def test_subclasses_keep_values_and_gradients(backend):
    q, k, v, dout = torch.randn(4, 2, 3, 16).unbind(0)
    q.requires_grad_()
    due = flashsci.attention(q, k, v, backend=backend)
    (dq,) = torch.autograd.grad(due, q, dout)
    for wrap in (lambda x: x.as_subclass(Label), torch.nn.Parameter):
        x = wrap(q.detach()).requires_grad_()
        found = flashsci.attention(x, k, v, backend=backend)
        (gradient,) = torch.autograd.grad(found, x, dout)
        assert torch.equal(found.as_subclass(torch.Tensor), due)
        assert torch.equal(gradient.as_subclass(torch.Tensor), dq)


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensors_are_refused_by_name(mesh):
    """Each argument of each entry point; `flashsci.distributed` takes them, and merge is plain PyTorch."""
    from torch.distributed.tensor import DTensor, Replicate

    whole = {n: (f, rules, tensors) for n, (rules, tensors, f) in WITHOUT.items()}
    calls = [(lambda f=f, **x: f(**x, backend="reference"), tensors(), rules) for f, rules, tensors in whole.values()]
    for entry in ("attention", "varlen_attention", "residual_attention", "attention_backward"):
        needed, others = CALLS[entry][0]()
        calls.append((lambda f=CALLS[entry][1], **x: f(**x), needed | others, entry))
    calls.append((flashsci.sdpa, CALLS["sdpa"][0]()[0], "sdpa"))
    for call, tensors, entry in calls:
        for name, x in tensors.items():
            part = DTensor.from_local(x, mesh, [Replicate()])
            shown = {"query": "q", "key": "[qk]", "value": "v"}.get(name, name) if entry == "sdpa" else name
            with pytest.raises(TypeError, match=f"^{shown} is a DTensor, .* flashsci.distributed"):
                call(**tensors | {name: part})


def test_mapped_offsets_are_refused_where_their_contents_are_not_checked(monkeypatch):
    """As on a GPU, and after a call that has left a plan."""
    from flashsci.api import varlen

    monkeypatch.setattr(varlen, "contents_are_seen", lambda *given: False)
    q = torch.randn(5, 2, 8)
    offsets = [torch.tensor([0, 2, 5], dtype=torch.int32) for _ in range(2)]

    def attention(first, second):
        return flashsci.varlen_attention(q, q, q, first, second, backend="reference")

    attention(*offsets)
    for n, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
        given = list(offsets)
        given[n] = torch.stack([given[n]] * 2)
        with pytest.raises(ValueError, match=f"torch.vmap maps {name}, whose values the host reads"):
            func.vmap(attention, tuple(0 if m == n else None for m in range(2)))(*given)
