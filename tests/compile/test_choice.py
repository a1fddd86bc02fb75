"""The choice of a backend in compiled functions: each call in a trace has its own, and use_backend counts, inside and outside."""

from __future__ import annotations

import threading

import pytest
import torch

import flashsci
from flashsci.choice import backends, choose
from flashsci.choice.loaded import Loaded
from tests.support.everywhere import DEVICE

pytestmark = pytest.mark.usefixtures("loaded")


@pytest.fixture
def asked(monkeypatch):
    """The backends that calls ask for, in a process that has chosen none yet."""
    found, honest = [], choose.choose

    def seen(problem, name, strict=False):
        found.append(name)
        return honest(problem, name, strict)

    monkeypatch.setattr(choose, "choose", seen)
    monkeypatch.setattr(backends, "LOADED", {kind: Loaded() for kind in backends.LOADED})
    torch._dynamo.reset()
    return found


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def rows():
    return torch.randn(1, 2, 5, 8, device=DEVICE)


def test_calls_in_one_trace_have_backends_of_their_own(asked):
    q, names = rows(), ["reference", "sdpa", "triton"]

    def call(q):
        return sum(flashsci.attention(q * n, q, q, backend=b) for n, b in enumerate(names))

    torch.testing.assert_close(compiled(call)(q), call(q))
    assert asked[:3] == names


def test_use_backend_inside_of_a_compiled_function(asked):
    q = rows()

    def call(q):
        with flashsci.use_backend("reference"):
            first = flashsci.attention(q, q, q, softcap=2.0)
        with flashsci.use_backend("sdpa"):
            second = flashsci.attention(q, q, q)
        return first + second + flashsci.attention(q, q, q)

    found = compiled(call)(q)
    assert asked == ["reference", "sdpa", "auto"]
    torch.testing.assert_close(found, call(q))


def test_refusals_of_a_backend_used_inside():
    def call(q):
        with flashsci.use_backend("sdpa"):
            return flashsci.attention(q, q, q, softcap=2.0)

    with pytest.raises(Exception, match="backend 'sdpa' cannot serve this call: SDPA has no soft"):
        compiled(call)(rows())


def test_use_backend_around_a_compiled_function(asked):
    """A call is traced again under another backend, and not under one that was traced before."""
    q, call = rows(), compiled(lambda q: flashsci.attention(q, q, q))
    for _ in range(2):
        call(q)
        with flashsci.use_backend("reference"):
            call(q)
    assert asked == ["auto", "reference"]


def test_use_backend_in_a_thread_that_compiles_first(asked):
    q, failed = rows(), []

    def call(q):
        with flashsci.use_backend("reference"):
            return flashsci.attention(q, q, q)

    def work():
        try:
            compiled(call)(q)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed and asked == ["reference"]


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_residual_attention_follows_use_backend(asked, backend):
    q = rows()

    def call(q):
        with flashsci.use_backend(backend):
            return flashsci.residual_attention(q, q, q)

    for found, wanted in zip(compiled(call)(q), call(q), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_table_of_what_is_loaded():
    table = Loaded(a=1)
    table["b:c"] = 2
    assert (table["a"], table["b:c"], table.get("d"), "a" in table, "d" in table) == (
        1,
        2,
        None,
        True,
        False,
    )
    del table["a"]
    assert "a" not in table and "b:c" in table.copy()


def test_windows_that_a_compiler_keeps_symbolic():
    """It does so for a window that differs from the one in a frame that it compiled after a graph break."""
    torch._dynamo.reset()
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    refused = torch.compile(lambda scale: flashsci.attention(q, k, k, scale=scale), backend="eager")
    with pytest.raises(Exception, match="scale must be a number"):
        refused(torch.tensor(0.5))
    for causal in (False, True):
        compiled = torch.compile(flashsci.attention, fullgraph=True, backend="aot_eager")
        found = compiled(q, k, k, causal=causal, backend="sdpa")
        torch.testing.assert_close(found, flashsci.attention(q, k, k, causal=causal, backend="sdpa"))
