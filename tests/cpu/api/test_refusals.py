"""Every refusal names backends that can serve the call, all of them, and no other: over drawn problems, with and without a GPU."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashsci
from flashsci.backends import triton
from flashsci.backends.cuda import library
from flashsci.call.fp8_ops import FP8
from flashsci.call.problem import Problem
from flashsci.choice import backends, candidates, choose, preferences

NAMES = backends.REQUESTS
DTYPES = ("bf16", "fp16", "fp32")
UNITS = [f"cuda/sm{g}/{u}_{d}" for g in (75, 80, 90) for u in ("fwd", "bwd") for d in DTYPES]
UNITS += ["cuda/sm90/fp8_e4m3", *(f"cuda/sm90/pair_{d}" for d in DTYPES)]
UNITS += [f"cuda/sm80/small_{d}" for d in DTYPES]
BUILDS = [
    {"archs": ["75", "80", "90"], "units": dict.fromkeys(UNITS, "")},
    {"archs": ["75"], "units": dict.fromkeys((u for u in UNITS if "sm75" in u), "")},
    {"archs": ["90"], "units": dict.fromkeys((u for u in UNITS if "fwd" in u), "")},
]


@st.composite
def problems(draw):
    """Any call that the entry points can describe, and some that they cannot."""
    flip = st.booleans()
    gpu = draw(st.sampled_from([None, (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, FP8]))
    heads_k, times = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 1, 4]))
    dim = st.sampled_from([8, 20, 32, 64, 128, 256, 320, 2000])
    head_dim = draw(dim)
    paged, varlen = draw(st.sampled_from([(False, False), (False, False), (False, True), (True, False)]))
    sizes = {} if draw(flip) else dict(batch=(2,), seq_q=draw(st.sampled_from([5, 64, 900])), seq_k=64)
    options = {}
    rare = st.sampled_from([False, False, False, True])
    if draw(rare):
        options.update(bias_shape=(), bias_dtype=torch.float32, bias_grad=draw(flip))
    if draw(rare) and varlen:
        options.update(ragged_bias=True)
    if draw(rare):
        options.update(key_weight=True, key_weight_grad=draw(flip))
    if draw(rare):
        options.update(alibi=True, alibi_grad=draw(flip))
    if paged:
        options.update(paged=True, cache_dtype=draw(st.sampled_from([dtype, FP8, torch.float32])))
    for name in ("sink", "mask", "return_lse", "deterministic", "lower_right"):
        options[name] = draw(rare)
    options.update(
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
    )
    if options["softcap"] and ("bias_shape" in options or "ragged_bias" in options or "alibi" in options):
        options.update(caps_bias=draw(flip))
    options.update(window_right=draw(st.sampled_from([-1, 0])), requires_grad=draw(flip) and not paged)
    options.update(precision=draw(st.sampled_from(["default", "ieee", "tf32"])))
    return Problem(
        "cpu" if gpu is None else "cuda", gpu, dtype, heads_k * times, heads_k, head_dim,
        draw(st.sampled_from([head_dim, head_dim, 64])), varlen=varlen, **sizes, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def everything():
    """All backends as if installed, the library as built for some GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("triton", "cuda"):
            patch.setattr(backends.BACKENDS[name].load(), "unavailable", lambda: None)
        for name in backends.GENERATIONS:
            patch.setattr(backends.GENERATIONS[name].load(), "unavailable", lambda: None)
        patch.setattr(triton, "INTERPRETED", False)
        patch.setattr(library, "build_info", lambda: BUILDS[0])
        yield patch
    choose._choices.clear()


NAMED = re.compile(r"'(reference|sdpa|triton|eager|cuda(?::\w+)?)'")


@settings(max_examples=300)
@given(problem=problems(), build=st.sampled_from(BUILDS))
def test_advice_is_of_backends_that_can(everything, problem, build):
    everything.setattr(library, "build_info", lambda: build)
    for name in NAMES:
        reason = candidates.rejects(name, problem)
        if reason is None:
            continue
        assert not NAMED.search(reason), f"a reason that names a backend by itself: {reason}"
        with pytest.raises(flashsci.BackendError) as caught:
            choose.choose(problem, name, strict=True)
        said = str(caught.value)
        assert reason in said and said.startswith(f"backend {name!r} cannot serve this call: ")
        advised = NAMED.findall(said.removeprefix(f"backend {name!r}"))
        able = [n for n in backends.BACKENDS if candidates.rejects(n, problem) is None]
        assert set(able) <= set(advised) and name not in advised, said
        for other in advised:
            assert candidates.rejects(other, problem) is None, said
        assert advised or said.endswith("; no other backend can")
        order = [n for n in preferences.find("calls", problem).order if n in advised]
        assert advised[: len(order)] == order or len(order) < 2, "what auto prefers comes first"


def test_words():
    """One sentence, whatever the reason ends with."""
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(flashsci.BackendError, match=r"cannot serve this call: SDPA has no softcap; backend=.* can$"):
        flashsci.attention(q, q, q, softcap=2.0, backend="sdpa")
    assert candidates.advice(["triton"]) == "; backend='triton' can"
    assert candidates.advice(["triton", "cuda"]) == "; backend='triton' or 'cuda' can"
    assert candidates.advice(["a", "b", "c"]) == "; backend='a', 'b' or 'c' can"
    assert candidates.advice([]) == "; no other backend can"
