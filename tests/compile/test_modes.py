"""Modes, proxies and wrappers of torch around a call: each sees the call's ops, and gets the numbers of a plain one."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashsci
from tests.support.everywhere import BACKENDS, DEVICE

pytestmark = [pytest.mark.usefixtures("loaded"), pytest.mark.every(4)]
every = pytest.mark.parametrize("backend", ["auto", *BACKENDS])
FUSED = [b for b in BACKENDS if b not in ("reference", "sdpa")]


def leaf(*shape):
    return torch.randn(shape, device=DEVICE).requires_grad_()


def packed_call(backend):
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    return lambda q, k, v: flashsci.varlen_attention(q, k, v, offsets, backend=backend)


CALLS = {
    "dense": lambda b: lambda q, k, v: flashsci.attention(q, k, v, causal=True, backend=b),
    "packed": packed_call,
    "residual": lambda b: lambda q, k, v: flashsci.residual_attention(q, k, v, backend=b)[0],
}
calls = pytest.mark.parametrize("name", CALLS)


def case(name, backend):
    if name == "packed" and backend == "sdpa":
        pytest.skip("SDPA does not serve it")
    shape = (6, 2, 16) if name == "packed" else (1, 2, 6, 16)
    return CALLS[name](backend), [leaf(*shape) for _ in range(3)]


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


AROUND = {
    "dispatch mode": Dispatched,
    "function mode": Called,
    "anomaly": torch.autograd.detect_anomaly,
    "save on cpu": torch.autograd.graph.save_on_cpu,
    "profiler": torch.autograd.profiler.profile,
}


def results(call, inputs):
    out = call(*inputs)
    return (out, *torch.autograd.grad(out.sin().sum(), inputs))


@every
@calls
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_is_around_a_call_changes_no_number(backend, name, around):
    call, inputs = case(name, backend)
    wanted = [results(call, inputs) for _ in range(3)][-1]
    with AROUND[around]():
        for _ in range(2):
            found = results(call, inputs)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("name", ["dense", "packed"])
def test_a_dispatch_mode_sees_the_ops(backend, name):
    call, inputs = case(name, backend)
    results(call, inputs)
    with Dispatched() as mode:
        results(call, inputs)
    assert [x for x in mode.seen if "_forward" in x] == [f"flashsci.{backend}_forward.default"]
    assert any("flashsci" in x and "_backward" in x for x in mode.seen)


@every
@calls
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_computes_what_it_is_given(backend, name, mode):
    call, inputs = case(name, backend)
    inputs = [x.detach() for x in inputs]
    if name == "packed":  # what is fake takes no real offsets

        def call(q, k, v, offsets):
            return flashsci.varlen_attention(q, k, v, offsets, backend=backend)

        inputs.append(torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE))
    traced = make_fx(call, tracing_mode=mode)(*inputs)
    others = [torch.randn_like(x) if x.is_floating_point() else x for x in inputs]
    torch.testing.assert_close(traced(*others), call(*others), rtol=1e-5, atol=1e-5)


@every
def test_make_fx_of_packed_offsets(backend):
    if backend == "sdpa":
        pytest.skip("SDPA does not serve it")

    def call(q, offsets):
        return flashsci.varlen_attention(q, q, q, offsets, backend=backend)

    first, second = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 2, 6], [0, 5, 6]))
    q = torch.randn(6, 2, 16, device=DEVICE)
    torch.testing.assert_close(make_fx(call)(q, first)(q, second), call(q, second))


def test_proxies_are_refused_by_name():
    with pytest.raises(TypeError, match=r"q must be a torch.Tensor.*Proxy"):
        torch.fx.symbolic_trace(lambda q: flashsci.attention(q, q, q))


@every
@calls
def test_inference_mode_and_both_checkpoints(backend, name):
    call, inputs = case(name, backend)
    wanted = results(call, inputs)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(call(*inputs), wanted[0], rtol=1e-5, atol=1e-5)
    for reentrant in (False, True):
        for x in inputs:
            x.grad = None
        out = checkpoint(call, *inputs, use_reentrant=reentrant)
        out.sin().sum().backward()
        for a, b in zip((out, *(x.grad for x in inputs)), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
