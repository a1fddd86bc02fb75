"""Paged attention of the CUDA library where there is no GPU: what it does not take, and what it says then."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashsci
from flashsci.api import paged
from flashsci.backends import cuda as backend
from flashsci.backends.cuda import paged as kernels
from flashsci.call.paged_ops import PagedOps, PagedScalars, PagedTensors
from flashsci.call.problem import Problem, facts
from flashsci.check import planning, units
from flashsci.choice import backends, choose
from flashsci.choice.gradients import named
from flashsci.choice.loaded import Loaded
from flashsci.testing import PagedCase, PagedVariant, make_paged_inputs

UNITS = ("paged_fp16", "paged_bf16", "paged8_fp16", "paged8_bf16")
BUILD = {"archs": ["80", "90"], "units": {f"cuda/{g}/{n}": "" for g in ("sm80", "sm90") for n in UNITS}}
PROBLEM = Problem("cuda", (9, 0), torch.bfloat16, 8, 2, 128, 128, paged=True, cache_dtype=torch.bfloat16)
SCALARS = PagedScalars(-1, 0.1, 0.0, -1, 0, False)
FP32 = {"dtype": torch.float32, "cache_dtype": torch.float32}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP64 = {"dtype": torch.float64, "cache_dtype": torch.float64}


@pytest.fixture
def built(monkeypatch):
    """A library with the kernels, as if this machine could run them."""
    monkeypatch.setattr(backend.library, "build_info", lambda: BUILD)
    monkeypatch.setattr(backend, "unavailable", lambda: None)
    monkeypatch.setattr(choose, "_choices", {})


def test_serves(built):
    for change in (
        {}, {"dtype": torch.float16, "cache_dtype": torch.float16}, {"head_dim": 40, "head_dim_v": 24}, {"head_dim": 256},
        {"cache_dtype": FP8[0]}, {"cache_dtype": FP8[1], "dtype": torch.float16}, {"softcap": 5.0}, {"window_left": 30, "window_right": 0}, {"sink": True}, {"return_lse": True}, {"heads_q": 14},
    ):  # fmt: skip
        assert backend.rejects(replace(PROBLEM, **change)) is None, change
        assert backend.SM90.rejects(replace(PROBLEM, **change)) is None, change
        assert backend.SM80.rejects(replace(PROBLEM, **change)) is None, change
        for capability in ((8, 0), (8, 9), (12, 0)):
            assert backend.rejects(replace(PROBLEM, capability=capability, **change)) is None, change


@pytest.mark.parametrize(
    "change, words",
    [
        ({"device_type": "cpu", "capability": None}, ("cpu",)),
        ({"capability": (7, 5)}, ("8.0 and newer", "sm_75")),
        (FP32, ("float32", "float16 and bfloat16")),
        (FP64, ("float64",)),
        ({"cache_dtype": torch.float16}, ("bfloat16", "8-bit floats", "float16")),
        ({"head_dim": 36}, ("multiples of 8 up to 256", "36 and 128")),
        ({"head_dim_v": 264}, ("multiples of 8 up to 256", "128 and 264")),
    ],
)
def test_rejects(built, change, words):
    reason = backend.rejects(replace(PROBLEM, **change))
    assert reason is not None
    for word in words:
        assert word in reason, reason


def test_builds_and_generations(monkeypatch):
    monkeypatch.setattr(backend.library, "build_info", lambda: {"archs": ["75"], "units": {}})
    reason = backend.rejects(PROBLEM)
    assert "FA_ARCHS=75" in reason and "FA_ARCHS=90" in reason
    older = {n: d for n, d in BUILD["units"].items() if "paged_" in n}
    monkeypatch.setattr(backend.library, "build_info", lambda: {"archs": ["90"], "units": older})
    assert backend.rejects(PROBLEM) is None
    assert "kernel for float8_e5m2 caches" in backend.rejects(replace(PROBLEM, cache_dtype=FP8[1]))
    monkeypatch.setattr(backend.library, "build_info", lambda: BUILD)
    assert "not sm75" in backend.SM75.rejects(PROBLEM)
    for capability in ((8, 0), (12, 0)):
        reason = backend.SM90.rejects(replace(PROBLEM, capability=capability))
        assert "9.0 (Hopper)" in reason
    newer = {n: d for n, d in BUILD["units"].items() if "sm90" in n}
    monkeypatch.setattr(backend.library, "build_info", lambda: {"archs": ["90"], "units": newer})
    assert backend.rejects(PROBLEM) is None
    assert "FA_ARCHS=86" in backend.rejects(replace(PROBLEM, capability=(8, 6)))
    older = {n: d for n, d in BUILD["units"].items() if "sm80" in n}
    monkeypatch.setattr(backend.library, "build_info", lambda: {"archs": ["80"], "units": older})
    assert backend.rejects(PROBLEM) is None  # of an older generation


def given(tokens=5, group=4, heads_k=2, dim=64, pages=6, page=16, **changes):
    """Tensors of a call, in bf16 on the CPU, and its out."""
    q = torch.zeros(tokens, group * heads_k, dim, dtype=torch.bfloat16)
    cache = torch.zeros(pages, page, heads_k, dim, dtype=torch.bfloat16)
    tensors = PagedTensors(
        q, cache, cache, torch.zeros(2, 3).int(), torch.zeros(2).int(), torch.zeros(3).int(), None, None, None
    )
    return tensors._replace(**changes), torch.zeros_like(q)


def stand_in(monkeypatch, op):
    """Instead of the library's op."""
    ops = SimpleNamespace(cuda_paged_attention=SimpleNamespace(default=op))
    monkeypatch.setattr(torch.ops, "flashsci", ops, raising=False)


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def bytes_of(*shape):
    """A cache of 8-bit floats, as both."""
    cache = torch.zeros(*shape, dtype=torch.uint8).view(FP8[0])
    return {"k_cache": cache, "v_cache": cache}


ODD_ROWS = bf16(5, 8, 68)[..., :64]
SHIFTED = bf16(6 * 16 * 2 * 64 + 4)[4:].view(6, 16, 2, 64)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"k_cache": bf16(6, 24, 2, 64), "v_cache": bf16(6, 24, 2, 64)}, ("24 rows", "multiples of 16", "triton")),
        ({"q": ODD_ROWS}, ("q has strides [544, 68]", "multiples of 8", "triton")),
        ({"v_cache": SHIFTED}, ("v_cache has strides [2048, 128, 64]", "begins 4 elements", "triton")),
        ({"k_scale": torch.ones(2, 2)}, ("no k_scale for a 16-bit cache", "triton")),
        ({"k_scale": torch.ones(2, 2), "v_scale": torch.ones(2, 2)}, ("no k_scale and no v_scale",)),
        (bytes_of(6, 16, 2, 72), ("k_cache has strides [2304, 144, 72]", "multiples of 16 ", "triton")),
        (bytes_of(6, 24, 2, 64), ("24 rows", "triton")),
        ({"block_table": torch.zeros(1).int().expand(2, 1 << 26)}, ("1073741824 keys", "reference")),
        ({"block_table": torch.zeros(1).int().expand(1 << 10, 1 << 23)}, ("more blocks", "triton")),
    ],
)
def test_misfits(changes, words):
    tensors, out = given(**changes)
    reason = kernels.refuse_layout(tensors, out)
    assert reason is not None
    for word in words:
        assert word in reason, reason


def test_the_library_refuses_and_the_error_says_why(monkeypatch):
    """What is no misfit is raised as it is."""

    def refuse(*_):
        raise RuntimeError("flashsci: paged_attention: no kernel serves this call")

    stand_in(monkeypatch, refuse)
    with pytest.raises(flashsci.BackendError, match=r"backend 'cuda' cannot serve this call: q has strides"):
        kernels.attention(*given(q=ODD_ROWS), SCALARS)
    with pytest.raises(RuntimeError, match="no kernel serves"):
        kernels.attention(*given(), SCALARS)


def test_auto_goes_to_triton_where_strides_do_not_fit(monkeypatch):
    """With a word about it, once; who asked for cuda gets the error."""

    def attention(tensors, out, scalars):
        raise flashsci.BackendError("backend 'cuda' cannot serve this call: strides")

    ops = {
        "cuda": PagedOps(attention, None),
        "triton": PagedOps(lambda tensors, out, scalars: out.fill_(7.0), None),
    }
    monkeypatch.setattr(backends, "LOADED", {"paged": Loaded(**ops)})
    monkeypatch.setattr(paged, "decide", lambda kind, call, backend: named("cuda"))
    tensors = given()[0]
    call = dict(
        block_table=tensors.block_table,
        seqused_k=tensors.seqused_k,
        cu_seqlens_q=tensors.cu_seqlens_q,
    )
    paged._say_once.cache_clear()
    with pytest.warns(UserWarning, match="running 'triton', since .*strides") as said:
        for _ in range(2):
            assert flashsci.paged_attention(*tensors[:3], **call).eq(7).all()
    assert len(said) == 1
    with pytest.raises(flashsci.BackendError, match="strides"):
        flashsci.paged_attention(*tensors[:3], **call, backend="cuda")


def test_an_out_that_does_not_fit():
    tensors, _ = given()
    assert "out has strides [544, 68]" in kernels.refuse_layout(tensors, ODD_ROWS)


@pytest.mark.parametrize("layout", ["rows", "heads", "joint rows", "joint heads", "stacked"])
@pytest.mark.parametrize("page", [16, 48, 128])
@pytest.mark.parametrize(
    "dims, cache",
    [((64, 64), ""), ((192, 128), ""), ((40, 24), ""), ((192, 80), "float8_e4m3fn"), ((64, 64), "float8_e5m2")],
)
def test_layouts_of_engines_fit(layout, page, dims, cache):
    """And one that is not aligned does not; dims of one row may have any stride."""
    case = PagedCase(PagedVariant("float16", cache, *dims), 1, (1, 7), (40, 90), 2, 4, page, layout, scales="heads" if cache else "none")  # fmt: skip
    for found, fits in ((case, True), (replace(case, layout="unaligned"), False)):
        x = make_paged_inputs(found)
        options = [x.options[n] for n in ("block_table", "seqused_k", "cu_seqlens_q")]
        scales = [x.options.get(n) for n in ("k_scale", "v_scale")]
        tensors = PagedTensors(x.q, x.k_cache, x.v_cache, *options, None, *scales)
        reason = kernels.refuse_layout(tensors, torch.empty(8, 8, dims[1]))
        assert (reason is None) == fits, reason
    tensors, out = given(tokens=1, q=bf16(1, 8, 64).as_strided((1, 8, 64), (3, 64, 1)))
    assert kernels.refuse_layout(tensors, out) is None


def test_calls_reach_the_library(built, monkeypatch):
    """With a sink in fp32; an update of the cache asked of cuda is Triton's."""
    seen = {}
    monkeypatch.setattr(backends, "LOADED", {"paged": Loaded()})

    def op(*arguments):
        seen["sink"], seen["scalars"], seen["generation"] = arguments[6], arguments[10:-1], arguments[-1]
        return torch.zeros(0)

    stand_in(monkeypatch, op)
    tensors, out = given(sink=torch.zeros(8).bfloat16())
    kernels.attention(tensors, out, PagedScalars(7, 0.1, 0.0, -1, 0, False))
    assert seen["scalars"] == (7, 0.1, 0.0, -1, 0, False) and seen["generation"] == 0
    assert seen["sink"].dtype == torch.float32
    monkeypatch.undo()
    assert kernels.OPS.write_kv_cache is None
    monkeypatch.setattr(choose, "choose", lambda problem, name, strict: asked.append(name) or named(name))
    asked, call = [], facts(out, out, 2, 2, {})
    assert choose.decide("paged", call, "cuda").forward == "cuda"
    assert backends.LOADED["paged"]["cuda"] is kernels.OPS
    asked.clear()
    assert choose.decide_write(call, "cuda").forward == "triton" and asked == ["cuda", "triton"]
    own = choose.decide("paged", call, "cuda:own").forward
    assert backends.LOADED["paged"][own] is kernels.OPS
    for generation in (90, 80):
        stand_in(monkeypatch, op)
        name = choose.decide("paged", call, f"cuda:sm{generation}").forward
        backends.LOADED["paged"][name].attention(tensors, out, SCALARS)
        assert seen["generation"] == generation


def test_auto_decodes_by_cuda(built, monkeypatch):
    """And leaves prompts to Triton, as long as there is one."""
    triton = backends.BACKENDS["triton"].load()
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    decoding = replace(PROBLEM, seq_q=1)
    assert choose.choose(decoding, "auto").forward == "cuda"
    for cache_dtype in FP8:
        assert choose.choose(replace(decoding, cache_dtype=cache_dtype), "auto").forward == "cuda"
    assert choose.choose(replace(decoding, capability=(8, 6)), "auto").forward == "cuda"
    assert choose.choose(PROBLEM, "auto").forward == "triton"
    assert choose.choose(PROBLEM, "cuda").forward == "cuda"
    monkeypatch.setattr(choose, "_choices", {})
    monkeypatch.setattr(triton, "unavailable", lambda: "there is none")
    assert choose.choose(PROBLEM, "auto").forward == "cuda"


@pytest.mark.skipif(backend.library_path() is None, reason="flashsci/_C.so was not built")
@pytest.mark.parametrize("wanted", (False, True))
def test_a_compiler_sees_shapes(wanted):
    backend.library.load()
    with FakeTensorMode():
        tensors, out = given()
        lse = torch.ops.flashsci.cuda_paged_attention.default(*tensors, out, *SCALARS._replace(return_lse=wanted), 0)
    assert lse.shape == ((8, 5) if wanted else (0,)) and lse.dtype == torch.float32


@pytest.mark.skipif(backend.library_path() is None, reason="flashsci/_C.so was not built")
def test_tensors_of_the_cpu_reach_no_kernel():
    backend.library.load()
    tensors, out = given()
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.flashsci.cuda_paged_attention.default(*tensors, out, *SCALARS, 0)


def test_checks_judge_it_where_it_runs(monkeypatch):
    backends = ("triton", "cuda", "cuda:sm90", "cuda:sm80")
    every, ampere = BUILD["units"], {n: d for n, d in BUILD["units"].items() if "sm80" in n}
    both, older = ("cuda:sm90", "cuda:sm80"), ("cuda:sm80",)
    for info, here, expected in (
        (every, both, ("triton", "cuda", "cuda:sm80")),
        (every, older, ("triton", "cuda")),
        (ampere, both, ("triton", "cuda")),
        ({}, both, ("triton",)),
        (every, (), ("triton",)),
    ):
        monkeypatch.setattr(units, "library_units", lambda info=info: info)
        monkeypatch.setattr(units, "_runs_here", lambda name, here=here: name in here)
        cases, names = planning.paged_plan(60, 1, "cuda", backends)
        assert names == expected and len(cases) == 60
        fit = [c for c in cases if planning.aligned_paged(c) == c]
        assert (len(fit) >= 30) == ("cuda" in names)
        if "cuda" in names:
            assert {c.variant.cache for c in fit} == {"", "float8_e4m3fn", "float8_e5m2"}
    assert planning.paged_plan(3, 1, "cpu", backends)[1] == ("triton",)
    assert units.holds("cuda", "cuda/sm90/paged_bf16")
    assert BUILD["units"].keys() <= units.chosen_units("paged").keys()
