"""`flashsci.tune`: trials on the user's calls, the choice by their times, and the calls that it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import flashsci
from flashsci.backends import eager, reference
from flashsci.call.plans import plans
from flashsci.call.problem import Problem
from flashsci.choice import backends, candidates, choose, differentiate, preferences, timing, tuned, tuning
from flashsci.choice.gradients import by_rules, gradients, named

GENUINE = timing.measure


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A machine on which nothing has been tuned: the folder of its files."""
    monkeypatch.setenv("FLASHSCI_CACHE", str(tmp_path))
    monkeypatch.delenv("FLASHSCI_TUNE")
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "SAMPLE", 0)

    def fresh():
        for kept in (tuned._known, tuned._said, plans, choose._choices):
            kept.clear()
        differentiate.forget()

    fresh()
    yield tmp_path
    fresh()


@pytest.fixture
def clock(monkeypatch, cache):
    """Times as the test gives them, by request; each call still runs. Further requests take a second."""
    given: dict[str, float] = {}

    def measure(calls, device):
        times, unable = GENUINE(calls, device)
        return {name: given.get(name, 1.0) for name in times}, unable

    monkeypatch.setattr(timing, "measure", measure)
    return given


def rows(*shape, gradients=False, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=gradients) for _ in range(3)]


def chosen(*given, **options):
    return flashsci.explain(*given, **options).chosen


def test_the_fastest_backend_is_chosen_from_then_on(clock, monkeypatch):
    q, k, v = rows(2, 4, 8, 16)
    clock["triton"] = 31e-6
    assert chosen(q, k, v) == "sdpa"
    with flashsci.tune() as session:
        first = flashsci.attention(q, k, v)
    found = flashsci.explain(q, k, v)
    assert found.chosen == "triton"
    assert "order of 'auto': triton > sdpa > reference: tuned on this CPU: triton 31 us, " in str(found)
    (kind,) = tuning.rows(session._session)
    assert kind == ("float32, batch 2, heads 4, 8 x 8, D 16", "sdpa", "triton", "1 s", "31 us", "32258.06x", "")
    assert "sdpa" in session.table() and "31 us" in session.table()
    ran = []
    genuine = backends.find("triton").load().prepared_forward
    monkeypatch.setattr(backends.find("triton").load(), "prepared_forward", lambda *x: ran.append(x) or genuine(*x))
    plans.clear()
    assert torch.equal(flashsci.attention(q, k, v), first) and len(ran) == 1
    assert chosen(q, k, v, causal=True) == chosen(q[:1], k[:1], v[:1]) == "sdpa", "of other kinds nothing is known"
    assert chosen(q, k, v, backend="reference") == "reference"


def test_within_two_percent_the_default_stays(clock):
    q, k, v = rows(2, 4, 8, 16)
    clock |= {"sdpa": 1.0, "triton": 0.985, "eager": 0.99}
    with flashsci.tune() as session:
        flashsci.attention(q, k, v)
    found = flashsci.explain(q, k, v)
    assert found.chosen == "sdpa"
    assert (
        "tuned on this CPU, the default stays: triton 985 ms, eager 990 ms, reference 1 s, sdpa 1 s" in found.evidence
    )
    assert "preferences/defaults.json" in found.evidence
    assert tuning.rows(session._session)[0][5] == "-"


def test_a_kind_is_timed_once(clock, monkeypatch):
    q, k, v = rows(2, 4, 8, 16)
    with flashsci.tune() as session:
        for _ in range(3):
            flashsci.attention(q, k, v)
            flashsci.attention(q, k, v, causal=True)
    assert len(session._session.kinds) == 2
    with flashsci.tune() as again:
        flashsci.attention(q, k, v)
    assert again.table() == "flashsci.tune: no new kind of call was timed"
    flashsci.attention(q[:1], k[:1], v[:1])
    assert not tuning.active and len(tuned._known.popitem()[1].exact["calls"]) == 2


CALLS = {
    "plain": (partial(flashsci.attention), {}),
    "bias": (flashsci.attention, {"bias": (4, 8, 8)}),
    "bias of keys": (flashsci.attention, {"bias": (8,)}),
    "grouped, window": (flashsci.attention, {"heads": 2, "window": (3, 1), "align": "lower_right"}),
    "weights": (flashsci.attention, {"key_weight": (2, 4, 8)}),
    "leading dims": (flashsci.attention, {"leading": (1,)}),
    "softcap": (flashsci.attention, {"softcap": 3.0}),
    "slopes": (flashsci.attention, {"alibi_slopes": (4,)}),
    "sink": (flashsci.attention, {"sink": (4,)}),
    "dropout": (flashsci.attention, {"dropout_p": 0.3}),
    "lse": (flashsci.attention, {"return_lse": True}),
    "packed": (flashsci.varlen_attention, {}),
    "packed, bias": (flashsci.varlen_attention, {"bias": (4, 34), "causal": True}),
    "packed, bias of keys": (flashsci.varlen_attention, {"bias": (4, 8)}),
}


def made(form):
    """A call with gradients, as (function, its tensors, its arguments)."""
    function, options = CALLS[form]
    options = dict(options)
    q, k, v = rows(2, 4, 8, 16, gradients=True)
    heads, leading = options.pop("heads", 4), options.pop("leading", None)
    if heads != 4:
        k, v = (x.detach()[:, :heads].requires_grad_() for x in (k, v))
    if leading:
        k = k.detach()[:1].requires_grad_()
    if function is flashsci.varlen_attention:
        q, k, v = (x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v))
        options["cu_seqlens_q"] = torch.tensor([0, 3, 8], dtype=torch.int32)
    for name, x in options.items():
        if isinstance(x, tuple) and name != "window":
            options[name] = torch.rand(x, requires_grad=name not in ("key_weight", "alibi_slopes"))
    return function, (q, k, v), options


@pytest.mark.parametrize("form", CALLS)
def test_the_gradients_of_a_kind_are_found_by_the_backward(form, clock, monkeypatch):
    """The backward describes its call by other arguments than the call itself."""
    function, given, options = made(form)
    names = []
    monkeypatch.setattr(tuning, "_requests", lambda problem, usual: names.append(usual) or [usual, "triton"])
    clock["triton"] = 1e-3
    with flashsci.tune() as session:
        found = function(*given, **options)
    ((problem, times),) = session._session.kinds
    assert times.winner == "triton" and not times.unable and names == [times.default]
    asked = []
    genuine = differentiate.gradients
    monkeypatch.setattr(differentiate, "gradients", lambda *x: asked.append(x) or genuine(*x))
    out = found[0] if isinstance(found, tuple) else found
    out.sum().backward()
    ((choice, of_backward, _),) = asked
    assert choice[:2] == by_rules("triton")[:2]
    evidence = tuned.find("gradients", of_backward, "triton")
    assert evidence == tuned.find("gradients", problem, "triton") == (("triton",), times.text("CPU"))
    assert tuned.find("gradients", of_backward, "cuda") is None


@pytest.fixture
def hopper(monkeypatch, cache):
    """A Hopper GPU with every kernel, for decisions; and a training call there."""
    from flashsci.backends import cuda, triton

    lacks = None
    monkeypatch.setattr(tuned, "device_of", lambda kind, capability: "NVIDIA H200")
    for module in (cuda, triton):
        monkeypatch.setattr(module, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "rejects", lambda problem: None)
    monkeypatch.setattr(cuda, "backward_kernels", lambda problem, strides: (90, lacks))
    monkeypatch.setattr(cuda, "older_backward", lambda problem: 0)
    return Problem(
        "cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64, (8,), 1000, 1000, requires_grad=True, given=("q", "k", "v")
    )


def test_gradients_are_chosen_by_themselves(hopper):
    usual = choose.choose(hopper, "auto").forward
    requests = tuning._requests(hopper, usual)
    assert {"auto", "sdpa", "triton", "triton/cuda", "cuda:own", "cuda/triton"} <= set(requests)
    for name, forward, backward in (
        ("cuda/triton", "cuda", "triton"),
        ("cuda:own", "cuda", "cuda"),
        ("triton/cuda", "triton", "cuda"),
        ("triton", "triton", "triton"),
        ("sdpa", "sdpa", "sdpa"),
    ):
        flashsci.tune.clear()
        seconds = dict.fromkeys(requests, 2.0) | {name: 1.0}
        tuned.keep(hopper, tuned.Times("auto", usual, seconds))
        choice = choose.choose(hopper, "auto")
        assert choice.forward == forward and f"{tuned.Times('auto', usual, {}).label(name)} 1 s" in choice.reason
        assert gradients(choice, hopper).backend == backward
        assert gradients(named(name), hopper).backend == backward, "the request by which it was timed"
    tuned.keep(hopper, tuned.Times("auto", usual, dict.fromkeys(requests, 2.0)))
    rules = preferences.first(preferences.tables((9, 0)), "calls", preferences.features(hopper))
    assert preferences.find("calls", hopper).order == rules.order


def test_a_compiled_call_uses_the_winner_that_all_sizes_share(hopper):
    hidden = replace(hopper, batch=None, seq_q=None, seq_k=None)
    usual = choose.choose(hidden, "auto").forward
    other = "triton" if usual == "cuda" else "cuda"
    won = tuned.Times("auto", usual, {"auto": 2.0, {"cuda": "cuda:own"}.get(other, other): 1.0})
    tuned.keep(hopper, won)
    choose.forget()
    assert choose.choose(hidden, "auto").forward == other
    of_backward = replace(hidden, heads_q=1, heads_k=1, given=())
    assert tuned.find("gradients", of_backward, other) == ((other,), won.text("GPU"))
    tuned.keep(replace(hopper, seq_q=64, seq_k=64), tuned.Times("auto", usual, {"auto": 1.0, other: 2.0}))
    choose.forget()
    assert choose.choose(hidden, "auto").forward == usual, "two sizes, two winners"
    assert choose.choose(hopper, "auto").forward == other


def test_candidates_are_as_accurate_and_small_as_auto_asks(hopper):
    assert "eager" not in candidates.comparable(hopper, "cuda")
    assert "reference" not in candidates.comparable(hopper, "cuda"), "it holds a million scores"
    assert "reference" in candidates.comparable(hopper, "reference"), "the choice itself"
    single = replace(hopper, dtype=torch.float32, requires_grad=False)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert not {"sdpa", "eager", "reference"} & set(candidates.comparable(single, "cuda"))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert "sdpa" in candidates.comparable(single, "cuda")


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_step_is_as_it_was_without_tuning(dropout_p, clock):
    """Results, gradients, hooks, versions and random numbers; the winner is the default."""
    clock |= {"sdpa": 0.1, "reference": 0.1}
    q, k, v = rows(2, 4, 8, 16, gradients=True)
    bias = torch.randn(4, 8, 8, requires_grad=True)
    packs, seen = [], []

    def step():
        torch.manual_seed(3)
        for x in (q, k, v, bias):
            x.grad = None
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packs.append(1) or x, lambda x: x):
            out = flashsci.attention(q * 2, k, v, bias=bias, dropout_p=dropout_p)
        out.square().sum().backward()
        return [out.detach(), torch.rand(3), *(x.grad.clone() for x in (q, k, v, bias))]

    for x in (q, k, v, bias):
        x.register_hook(lambda gradient: seen.append(1))
    due = step()
    counts, versions = (len(packs), len(seen)), [x._version for x in (q, k, v, bias)]
    assert counts[0] and counts[1] == 4
    with flashsci.tune() as session:
        found = step()
    assert dropout_p or len(session._session.kinds) == 1
    assert all(map(torch.equal, found, due))
    assert (len(packs), len(seen)) == tuple(2 * n for n in counts)
    assert [x._version for x in (q, k, v, bias)] == versions


def test_dropout_leaves_the_generator(clock, monkeypatch):
    monkeypatch.setattr(tuning, "_requests", lambda problem, usual: [usual, "triton"])
    q, k, v = rows(2, 4, 8, 16)
    torch.manual_seed(5)
    due = flashsci.attention(q, k, v, dropout_p=0.5), torch.rand(2)
    torch.manual_seed(5)
    with flashsci.tune() as session:
        found = flashsci.attention(q, k, v, dropout_p=0.5), torch.rand(2)
    assert len(session._session.kinds) == 1 and all(map(torch.equal, found, due))


def test_modes_of_the_caller_do_not_take_part(clock, monkeypatch):
    seen = []
    genuine = reference.forward

    def forward(tensors, scalars):
        seen.append(
            (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), tensors.q.dtype, tensors.q.requires_grad)
        )
        return genuine(tensors, scalars)

    monkeypatch.setattr(reference, "forward", forward)
    q, k, v = rows(2, 4, 8, 16, gradients=True)
    with flashsci.tune(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        flashsci.attention(q, k, v)
    assert set(seen) == {(False, False, torch.bfloat16, False)}
    del seen[:]
    with flashsci.tune() as session, torch.inference_mode():
        flashsci.attention(*(x.detach() for x in rows(2, 4, 8, 16)))
    assert set(seen) == {(False, False, torch.float32, False)} and len(session._session.kinds) == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nTried"), RuntimeError("no image")])
def test_a_candidate_that_fails_is_listed_and_the_call_goes_on(error, clock, monkeypatch):
    def forward(tensors, scalars):
        raise error

    monkeypatch.setattr(eager, "forward", forward)
    q, k, v = rows(2, 4, 8, 16, gradients=True)
    clock["eager"] = 1e-6
    with flashsci.tune() as session:
        flashsci.attention(q, k, v).sum().backward()
    ((_, times),) = session._session.kinds
    text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert times.unable == {"eager": text} and "eager" not in times.seconds and q.grad is not None
    assert f"eager: {text}" in tuning.rows(session._session)[0][-1] and "failed" in session.table()


def test_a_candidate_without_a_backward_is_listed(clock, monkeypatch):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no gradients today")

    monkeypatch.setattr(eager, "forward", lambda tensors, scalars: (Broken.apply(tensors.q), None))
    clock["eager"] = 1e-6
    q, k, v = rows(2, 4, 8, 16, gradients=True)
    with flashsci.tune() as session:
        flashsci.attention(q, k, v)
    ((_, times),) = session._session.kinds
    assert times.unable == {"eager": "RuntimeError: no gradients today"}
    assert "eager" in times.forward and "eager" not in times.seconds and times.winner == "sdpa"


def _left_alone(call):
    with flashsci.tune() as session:
        call()
    return not session._session.kinds


def test_observed_calls_are_left_alone_and_use_kept_winners(clock, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = rows(2, 4, 8, 16)
    assert _left_alone(lambda: torch.vmap(flashsci.attention)(q, k, v))
    assert _left_alone(lambda: torch.func.grad(lambda x: flashsci.attention(x, k, v).sum())(q))
    assert _left_alone(lambda: torch.func.jvp(lambda x: flashsci.attention(x, k, v), (q,), (q,)))
    assert _left_alone(lambda: torch.jit.trace(flashsci.attention, (q, k, v), check_trace=False))
    with FakeTensorMode():
        fake = rows(2, 4, 8, 16)
        assert _left_alone(lambda: flashsci.attention(*fake))
    assert _left_alone(lambda: flashsci.attention(*fake)), "a fake tensor without its mode"
    assert _left_alone(lambda: flashsci.attention(*(x.to("meta") for x in (q, k, v))))
    assert _left_alone(lambda: flashsci.attention(q, k, v, backend="sdpa"))
    with flashsci.use_backend("reference"):
        assert _left_alone(lambda: flashsci.attention(q, k, v))
    monkeypatch.setattr(tuning, "is_captured", lambda x: True)
    assert _left_alone(lambda: flashsci.attention(q, k, v))


@pytest.mark.parametrize("why", ["captured", "busy", "vmap"])
def test_a_kind_that_was_left_alone_is_timed_later(why, clock, monkeypatch):
    """A plan that was made meanwhile does not stand in the way."""
    q, k, v = rows(2, 4, 8, 16)
    with flashsci.tune() as session:
        if why == "captured":
            with monkeypatch.context() as patch:
                patch.setattr(tuning, "is_captured", lambda x: True)
                for _ in range(3):
                    flashsci.attention(q, k, v)
        elif why == "busy":
            with tuning._busy:
                for _ in range(3):
                    flashsci.attention(q, k, v)
        else:
            torch.vmap(flashsci.attention)(*(x.expand(3, *x.shape) for x in (q, k, v)))
        assert not session._session.kinds
        flashsci.attention(q, k, v)
    assert len(session._session.kinds) == 1


def test_a_compiled_call_is_left_alone_and_uses_kept_winners(clock):
    q, k, v = rows(2, 4, 8, 16)
    graphs = []

    def compiled():
        torch.compiler.reset()
        keeping = lambda graph, _: graphs.append(graph.code) or graph  # noqa: E731
        torch.compile(lambda q, k, v: flashsci.attention(q, k, v), backend=keeping, fullgraph=True)(q, k, v)

    assert _left_alone(compiled)
    clock["triton"] = 1e-6
    with flashsci.tune():
        flashsci.attention(q, k, v)
        compiled()
    compiled()
    torch.compiler.reset()
    before, inside, after = graphs
    assert "scaled_dot_product_attention" in before
    assert "triton|rules" not in before and "triton" in inside and inside == after


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_pass_does_not_wait_for_trials(reentrant, clock):
    """A trial with gradients needs the threads of autograd, one of which may be making this call."""
    from torch.utils.checkpoint import checkpoint

    q, k, v = rows(2, 4, 8, 16, gradients=True)
    with flashsci.tune() as session:
        checkpoint(flashsci.attention, q, k, v, use_reentrant=reentrant).sum().backward()
        assert [problem.requires_grad for problem, _ in session._session.kinds] == [not reentrant]
        flashsci.attention(q, k, v)
    assert session._session.kinds[-1][0].requires_grad and len(session._session.kinds) == 1 + reentrant


def test_paged_and_8_bit_calls_are_timed(clock, monkeypatch):
    monkeypatch.setattr(tuning, "_requests", lambda problem, usual: [usual, "triton"])
    clock["triton"] = 1e-6
    x = [torch.randn(1, 2, 16, 32).to(torch.float8_e4m3fn) for _ in range(3)]
    edges = torch.tensor([0, 6, 16], dtype=torch.int32)
    cache_k, cache_v = torch.randn(2, 4, 16, 2, 16).unbind(0)
    table, used = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
    paged = dict(block_table=table, seqused_k=used, cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32))
    with flashsci.tune() as session:
        flashsci.attention(*x)
        flashsci.varlen_attention(*(y[0].transpose(0, 1) for y in x), edges)
        flashsci.paged_attention(torch.randn(2, 2, 16), cache_k, cache_v, **paged)
    assert [times.unable for _, times in session._session.kinds] == [{}, {}, {}]
    assert [times.winner for _, times in session._session.kinds] == ["triton"] * 3
    assert chosen(*x) == "triton"


def test_sessions_nest_and_end_after_an_error(clock):
    q, k, v = rows(2, 4, 8, 16)
    with pytest.raises(KeyError), flashsci.tune() as outer, flashsci.tune() as inner:
        flashsci.attention(q, k, v)
        raise KeyError
    assert tuning.active == [] and len(outer._session.kinds) == len(inner._session.kinds) == 1
    with outer, flashsci.tune():
        assert len(tuning.active) == 2, "a context may be entered anew"
    assert tuning.active == []
    with pytest.raises(RuntimeError, match="is entered already; make another one"), outer, outer:
        pass
    with pytest.raises(
        TypeError, match=r"verbose must be True or False, got function; .*`with flashsci.tune\(\): step"
    ):
        flashsci.tune(verbose=lambda: None)


def test_progress_is_printed_only_if_asked_for(clock, capsys):
    q, k, v = rows(2, 4, 8, 16)
    with flashsci.tune():
        flashsci.attention(q, k, v)
    assert capsys.readouterr() == ("", "")
    with flashsci.tune(verbose=True):
        flashsci.attention(q, k, v, causal=True)
    out, err = capsys.readouterr()
    assert out == "" and "causal: tuned on this CPU, the default stays: " in err.splitlines()[0] and "gain" in err


def test_the_table_without_rich(clock, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "rich.console", None)
    clock["triton"] = 0.25
    with flashsci.tune() as session:
        flashsci.attention(*rows(2, 4, 8, 16))
    _, header, row = session.table().splitlines()
    assert header.split("  ")[0] == "kind of call" and row.endswith("250 ms    4.00x")


def test_slow_candidates_are_timed_once_and_close_ones_in_turns(monkeypatch):
    order = []
    seconds = {"a": 1.0, "b": 1.5, "slow": 5.0}
    monkeypatch.setattr(timing, "by_host", lambda call, count: seconds[call()])
    calls = {name: lambda name=name: order.append(name) or name for name in seconds}
    times, unable = GENUINE(calls, torch.device("cpu"))
    assert times == seconds and unable == {}
    assert order == ["a", "a", "b", "b", "slow", "slow", *["a", "b"] * timing.ROUNDS]
