"""`flashsci.tune` on a GPU: real times, both passes, the caller's stream and memory, capture, and results as before."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.call.plans import plans
from flashsci.choice import choose, differentiate, tuned, tuning
from flashsci.testing import Inputs, Judge, evaluate

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine on which nothing has been tuned."""
    monkeypatch.setenv("FLASHSCI_CACHE", str(tmp_path))

    def fresh():
        for kept in (tuned._known, plans, choose._choices):
            kept.clear()
        differentiate.forget()

    fresh()
    yield
    fresh()


def rows(*shape, dtype=torch.bfloat16, gradients=True):
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=gradients) for _ in range(3)]


CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"bias": (8, 300, 300)},
    "mask": {"mask": (2, 1, 1, 300)},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", CALLS)
def test_both_passes_are_timed_and_the_winner_is_right(form, dtype):
    q, k, v = rows(2, 8, 300, 64, dtype=dtype)
    options = dict(CALLS[form])
    if "bias" in options:
        options["bias"] = torch.randn(options["bias"], device="cuda", dtype=dtype, requires_grad=True)
    if "mask" in options:
        options["mask"] = torch.rand(options["mask"], device="cuda") < 0.8
    state = torch.cuda.get_rng_state()
    with flashsci.tune() as session:
        out = flashsci.attention(q, k, v, **options)
        out.sum().backward()
    print(session.table())
    ((problem, times),) = session._session.kinds
    assert len(times.seconds) > 1 and times.default in times.seconds
    assert all(0 < x < 0.1 for x in (*times.seconds.values(), *times.forward.values()))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    tensors = {name: x for name, x in options.items() if name != "causal"}
    tensors |= {name: x.detach() for name, x in zip("qkv", (q, k, v), strict=True)}
    judge = Judge(Inputs(**tensors, dout=torch.randn_like(out), options={"causal": form == "causal"}))
    judge.require(evaluate(judge.inputs, "auto", lse=False))
    found = flashsci.explain(q, k, v, **options)
    assert found.evidence.split(": ", 1)[1].startswith("tuned on this GPU")
    won = times.passes
    assert won is None or found.chosen == won[0]
    assert problem.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_call_that_one_backend_serves_is_not_timed(dtype):
    """One backend alone drops the entries that a seed names."""
    q, k, v = rows(2, 8, 300, 64, dtype=dtype)
    with flashsci.tune() as session:
        flashsci.attention(q, k, v, dropout_p=0.1).sum().backward()
    assert not session._session.kinds


def test_it_runs_on_the_callers_stream():
    q, k, v = rows(2, 8, 256, 64, gradients=False)
    due = flashsci.attention(q, k, v, backend="sdpa").float()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), flashsci.tune() as session:
        found = flashsci.attention(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    assert session._session.kinds and torch.allclose(found.float(), due, atol=2e-2)


def test_capture_is_left_alone_and_uses_what_is_kept():
    q, k, v = rows(2, 8, 256, 64, gradients=False)
    flashsci.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with flashsci.tune() as session:
        with torch.cuda.graph(graph):
            captured = flashsci.attention(q, k, v)
        assert not session._session.kinds
        eager = flashsci.attention(q, k, v)
        assert len(session._session.kinds) == 1
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        later = flashsci.attention(q, k, v)
    graph.replay()
    again.replay()
    torch.cuda.synchronize()
    assert torch.allclose(captured.float(), eager.float(), atol=2e-2) and torch.equal(later, eager)


def test_candidates_without_memory_are_listed_and_the_step_goes_on(monkeypatch):
    from flashsci.choice.backends import find

    module = find("sdpa").load()

    def greedy(tensors, scalars):
        return torch.empty(1 << 50, dtype=torch.uint8, device="cuda"), None

    q, k, v = rows(2, 8, 256, 64)
    monkeypatch.setattr(module, "forward", greedy)
    with flashsci.tune() as session:
        flashsci.attention(q, k, v).sum().backward()
    ((_, times),) = session._session.kinds
    assert times.unable["sdpa"].startswith("OutOfMemoryError: ") and q.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_step_ends(reentrant):
    """A call inside a backward pass does not wait for the thread of autograd that makes it."""
    from torch.utils.checkpoint import checkpoint

    q, k, v = rows(2, 8, 256, 64)
    with flashsci.tune() as session:
        checkpoint(flashsci.attention, q, k, v, use_reentrant=reentrant).sum().backward()
    assert [problem.requires_grad for problem, _ in session._session.kinds] == [not reentrant]


def test_trials_leave_no_memory_behind():
    q, k, v = rows(2, 8, 512, 64)
    flashsci.attention(q, k, v, backend="triton").sum().backward()
    q.grad = k.grad = v.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with flashsci.tune() as session:
        out = flashsci.attention(q, k, v)
    assert session._session.kinds
    del out
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("pair", ["cuda:own", "cuda/triton", "triton", "triton/cuda", "sdpa"])
def test_each_pair_of_passes_serves_a_step_once_it_won(pair, monkeypatch):
    """The kernels that a kept winner names compute the step, and the judge takes it."""
    from flashsci.choice import timing

    measured = []
    genuine = timing.measure

    def measure(calls, device):
        times, unable = genuine(calls, device)
        measured.append(set(times))
        return {name: 1.0 if name == pair else 2.0 for name in times}, unable

    monkeypatch.setattr(timing, "measure", measure)
    q, k, v = rows(2, 8, 256, 64)
    with flashsci.tune() as session:
        flashsci.attention(q, k, v).sum().backward()
    if pair not in measured[-1]:
        ((_, times),) = session._session.kinds
        pytest.skip(f"{pair}: {times.unable.get(pair, 'no candidate')}")
    asked = []
    decided = differentiate.gradients
    monkeypatch.setattr(differentiate, "gradients", lambda *x: asked.append(decided(*x)) or asked[-1])
    judge = Judge(Inputs(*(x.detach() for x in (q, k, v)), dout=torch.randn_like(q)))
    judge.require(evaluate(judge.inputs, "auto", lse=False))
    flashsci.attention(q, k, v).sum().backward()
    forward, gradients = tuned.backends_of(pair)
    assert flashsci.explain(q, k, v).chosen == forward
    assert {found.backend for found in asked} <= {gradients}
    assert tuning.active == []
