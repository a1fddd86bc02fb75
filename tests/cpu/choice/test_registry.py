"""Who serves a call, and why."""

import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.backends.cuda.library import library_path
from flashsci.call import ops
from flashsci.call.problem import Problem
from flashsci.choice import backends, candidates, differentiate, explanation, gradients, predictions, preferences

Q = torch.randn(2, 4, 5, 8)
DEFAULTS = preferences.read(preferences.FOLDER / "defaults.json")


def test_explain_gives_every_backends_answer():
    found = flashsci.explain(Q, Q, Q, softcap=2.0)
    assert set(found.reasons) == {"reference", "sdpa", "triton", "cuda"}
    assert found.chosen == "reference" and "softcap" in found.reasons["sdpa"]
    text = str(found)
    assert (
        "-> reference can serve this call" in text and "no: SDPA has no softcap" in text and "sdpa > reference" in text
    )
    assert flashsci.explain(Q, Q, Q).chosen == "sdpa"


def test_explain_packed():
    x, offsets = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    found = flashsci.explain(x, x, x, cu_seqlens_q=offsets, causal=True)
    assert found.problem.varlen and found.problem.window_right == 0 and found.chosen == "reference"
    with pytest.raises(ValueError, match="packed q must have shape"):
        flashsci.explain(Q, Q, Q, cu_seqlens_q=offsets)


def test_explain_sees_what_the_call_would():
    """The problem that explain describes carries every feature of the call."""
    q, bias = Q.bfloat16().requires_grad_(), torch.randn(4, 1, 5, requires_grad=True)
    found = flashsci.explain(
        q,
        q[:, :2],
        q[:, :2],
        bias=bias,
        mask=torch.ones(5, 5, dtype=torch.bool),
        window=(3, None),
        causal=True,
        align="lower_right",
        softcap=3.0,
        dropout_p=0.1,
        return_lse=True,
        deterministic=True,
    )
    p = found.problem
    assert (p.dtype, p.heads_q, p.heads_k, p.head_dim, p.head_dim_v) == (torch.bfloat16, 4, 2, 8, 8)
    assert (p.batch, p.seq_q, p.seq_k, p.bias_shape, p.bias_dtype, p.bias_grad) == (
        (2,),
        5,
        5,
        (4, 1, 5),
        torch.float32,
        True,
    )
    assert (p.mask, p.window_left, p.window_right, p.lower_right, p.softcap, p.dropout_p) == (
        True,
        3,
        0,
        True,
        3.0,
        0.1,
    )
    assert p.return_lse and p.requires_grad and p.deterministic and p.device_type == "cpu" and p.capability is None


def test_use_backend_holds_for_this_thread_and_block():
    with flashsci.use_backend("reference"):
        assert flashsci.explain(Q, Q, Q).chosen == "reference"
        with flashsci.use_backend("sdpa"):
            assert flashsci.explain(Q, Q, Q).chosen == "sdpa"
        assert flashsci.explain(Q, Q, Q).asked == "reference"
        assert flashsci.explain(Q, Q, Q, backend="sdpa").chosen == "sdpa", "an argument wins"
        other = []
        thread = threading.Thread(target=lambda: other.append(flashsci.explain(Q, Q, Q).asked))
        thread.start()
        thread.join()
        assert other == ["auto"]
    assert flashsci.explain(Q, Q, Q).asked == "auto"


def test_use_backend_is_undone_by_an_error():
    with (
        pytest.raises(RuntimeError, match="inside"),
        flashsci.use_backend("reference", strict=True),
    ):
        raise RuntimeError("inside")
    assert backends.requested("auto") == ("auto", False)


def test_environment(monkeypatch):
    monkeypatch.setenv("FLASHSCI_BACKEND", "reference")
    assert flashsci.explain(Q, Q, Q).chosen == "reference"
    with flashsci.use_backend("sdpa"):
        assert flashsci.explain(Q, Q, Q).chosen == "sdpa"
    assert flashsci.explain(Q, Q, Q, backend="triton").asked == "triton"
    calls = []
    reference = backends.BACKENDS["reference"].load()
    honest = reference.forward
    monkeypatch.setattr(reference, "forward", lambda *a: calls.append(1) or honest(*a))
    flashsci.attention(Q, Q, Q)
    assert calls == [1]
    monkeypatch.setenv("FLASHSCI_BACKEND", "sdpa")
    flashsci.attention(Q, Q, Q)
    assert calls == [1], "a cached decision does not outlive the setting it was made under"


def test_a_fallback_warns_once_for_each_reason(monkeypatch, fresh_choices):
    cuda = backends.BACKENDS["cuda"].load()
    monkeypatch.setattr(cuda, "unavailable", lambda: "reason one")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (3, 4, 5):
            flashsci.attention(*(torch.randn(1, 1, n, 8),) * 3, backend="cuda")
    assert [str(w.message) for w in caught] == ["flashsci: backend 'cuda' is unavailable, running 'triton': reason one"]
    monkeypatch.setattr(cuda, "unavailable", lambda: "reason two")
    with pytest.warns(UserWarning, match="reason two"):
        flashsci.attention(*(torch.randn(1, 1, 6, 8),) * 3, backend="cuda")


def test_a_loaded_backend_that_cannot_serve_a_call_never_falls_back(monkeypatch, fresh_choices):
    cuda = backends.BACKENDS["cuda"].load()
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "rejects", lambda problem: "it has no bias yet")
    with pytest.raises(
        flashsci.BackendError,
        match=r"backend 'cuda' cannot serve this call: it has no bias yet; backend='sdpa'.* can",
    ):
        flashsci.attention(Q, Q, Q, bias=torch.zeros(5, 5), backend="cuda")


def test_decisions_are_cached(monkeypatch, fresh_choices):
    asked = []
    sdpa = backends.BACKENDS["sdpa"].load()
    honest = sdpa.rejects
    monkeypatch.setattr(sdpa, "rejects", lambda problem: asked.append(problem) or honest(problem))
    for _ in range(3):
        flashsci.attention(Q, Q, Q)
    assert len(asked) == 1
    flashsci.attention(Q, Q, Q, causal=True)
    assert len(asked) == 2
    flashsci.attention(Q.requires_grad_(False).double(), Q.double(), Q.double())
    assert len(asked) == 3


def test_bf16_on_turing_is_refused_by_name():
    problem = Problem("cuda", (7, 5), torch.bfloat16, 4, 4, 64, 64)
    reason = backends.BACKENDS["cuda"].load().rejects(problem)
    assert "bfloat16" in reason and "sm_75" in reason and "float16" in reason
    assert "sm_75" in backends.BACKENDS["triton"].load().rejects(problem)


def test_one_generation_of_cuda_kernels_on_request(fresh_choices):
    """`auto` never asks for one; a call may, and hears why it cannot have it."""
    assert all(not {*backends.GENERATIONS, backends.OWN} & set(rule.order) for rule in DEFAULTS.calls)
    assert set(flashsci.explain(Q, Q, Q, backend="cuda:sm80").reasons) > {"cuda:sm80", "cuda"}
    with (
        flashsci.use_backend("cuda:sm80"),
        pytest.raises(flashsci.BackendError, match="'cuda:sm80' cannot serve this call"),
    ):
        flashsci.attention(Q, Q, Q)
    with pytest.raises(ValueError, match="unknown backend 'cuda:sm70'"):
        flashsci.attention(Q, Q, Q, backend="cuda:sm70")


def test_a_generation_serves_only_what_its_kernels_do(monkeypatch):
    from flashsci.backends import cuda

    units = {f"cuda/sm{g}/fwd_{d}": "" for g in (75, 80, 90) for d in ("fp16", "bf16")}
    del units["cuda/sm75/fwd_bf16"]
    monkeypatch.setattr(cuda.library, "build_info", lambda: {"archs": ["75", "80", "90"], "units": units})
    hopper = Problem("cuda", (9, 0), torch.bfloat16, 2, 2, 64, 64)
    assert cuda.SM90.rejects(hopper) is None and cuda.SM80.rejects(hopper) is None
    assert "generation sm75" in cuda.SM75.rejects(hopper)
    blackwell = Problem("cuda", (10, 0), torch.float16, 2, 2, 64, 64)
    assert cuda.SM75.rejects(blackwell) is None and cuda.SM80.rejects(blackwell) is None
    assert "generation sm90" in cuda.SM90.rejects(blackwell)


def test_held_to_hopper_nothing_else_serves(monkeypatch):
    """A bias or mask is for the kernels to take or refuse, and their refusal is a BackendError; no gradient is Triton's."""
    from flashsci.backends import cuda

    units = {f"cuda/sm90/{kind}_bf16": "" for kind in ("fwd", "bwd")}
    monkeypatch.setattr(cuda.library, "build_info", lambda: {"archs": ["90"], "units": units})
    given = dict(bias_shape=(1, 2, 9, 9), mask=True, requires_grad=True)
    hopper = Problem("cuda", (9, 0), torch.bfloat16, 2, 2, 64, 64, **given)
    assert rejects("cuda:sm90", hopper) is None and rejects("cuda", hopper) is not None
    odd = Problem("cuda", (9, 0), torch.bfloat16, 2, 2, 33, 64, requires_grad=True)
    assert "no gradients of this call of its own" in rejects("cuda:sm90", odd)
    assert rejects("cuda", odd) is None, "Triton has them"

    def refuses(*arguments):
        raise RuntimeError(
            "flashsci: forward: no bfloat16 kernel of generation sm90 serves this call on compute capability 9.0 [2, 3]"
        )

    with pytest.raises(flashsci.BackendError, match="no bfloat16 kernel of generation sm90"):
        cuda._call(refuses, 90)
    with pytest.raises(RuntimeError) as caught:
        cuda._call(refuses, 0)
    assert not isinstance(caught.value, flashsci.BackendError)

    def breaks(*arguments):
        raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError, match="launch failed") as caught:
        cuda._call(breaks, 90)
    assert not isinstance(caught.value, flashsci.BackendError)


def rejects(name, problem):
    """Why a backend cannot serve a call, gradients included, on a machine that could run every backend."""
    return candidates.rejects(name, problem, anywhere=True)


def remark(name, problem):
    auto = name.partition(":")
    choice = gradients.by_rules(auto[2]) if auto[0] == "auto" else gradients.named(name)
    return gradients.remark(auto[2] if auto[0] == "auto" else name, choice, problem)


def pretend(monkeypatch, units, triton=None):
    """The cuda backend as if a library of these units were loaded, and Triton as if it could run here."""
    from flashsci.backends import cuda
    from flashsci.backends import triton as module

    info = {"archs": ["75", "80", "90"], "units": dict.fromkeys(units, "")}
    monkeypatch.setattr(cuda.library, "build_info", lambda: info)
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(module, "unavailable", lambda: triton)
    differentiate._gradients_of.cache_clear()


EVERYTHING = [
    f"cuda/sm{generation}/{kind}_{dtype}"
    for generation, dtypes in ((75, "fp16"), (80, "fp16 bf16 fp32"), (90, "fp16 bf16"))
    for dtype in dtypes.split()
    for kind in ("fwd", "bwd")
]


@pytest.fixture
def no_hopper_backward(monkeypatch):
    """A library of everything less a Hopper backward."""
    pretend(monkeypatch, [unit for unit in EVERYTHING if "sm90/bwd" not in unit])
    yield
    differentiate._gradients_of.cache_clear()


@pytest.fixture
def full_build(monkeypatch):
    """A library of everything."""
    pretend(monkeypatch, EVERYTHING)
    yield
    differentiate._gradients_of.cache_clear()


@pytest.mark.parametrize("head_dim", [1, 24, 33, 64, 100, 127, 128, 200, 256])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sm80_takes_bias_and_mask_at_every_head_dim(no_hopper_backward, head_dim, capability, dtype):
    problem = Problem(
        "cuda",
        capability,
        dtype,
        *(4, 2, head_dim, head_dim),
        bias_shape=(1, 4, 9, 9),
        bias_grad=True,
        mask=True,
        requires_grad=True,
    )
    assert rejects("cuda", problem) is None and rejects("cuda:sm80", problem) is None
    assert remark("cuda:sm80", problem) is None
    refusal = rejects("cuda:sm90", problem)
    assert refusal is not None and ("no gradients of this call of its own" in refusal or capability[0] == 8)
    elsewhere = remark("cuda", problem)
    assert (elsewhere is None) == (capability[0] == 8)
    assert elsewhere is None or "gradients come from triton: on Hopper" in elsewhere


needs_library = pytest.mark.skipif(library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)")


def saved_of(q, v, bias, mask, softcap=0.0, k=None):
    """What a forward leaves, with as many keys as bias and mask have."""
    scalars = ops.Scalars(-1, -1, 1.0, softcap, -1, -1, False, 0.0, "default", False)
    keys = max([x.shape[-1] for x in (bias, mask) if x is not None] or [1])
    if k is None:
        v = v if keys == 1 else v[..., :keys, :]
        k = v
    tensors = ops.Tensors(q, k, v, bias, mask=mask)
    return ops.Saved(tensors, *ops.fake_forward(tensors), scalars)


def whose(saved, need):
    """The backend of the gradients of what the cuda backend computed on a Hopper GPU, by rules: predicted times prefer its own for
    calls as short as these."""
    module, known = backends.find("cuda").load(), differentiate.problem_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            differentiate,
            "problem_of",
            lambda *a: replace(known(*a), device_type="cuda", capability=(9, 0)),
        )
        patch.setattr(predictions, "enabled", lambda: False)
        differentiate.forget()
        try:
            return differentiate._gradient_backend(gradients.named("cuda"), module, saved, need)
        finally:
            differentiate.forget()


@needs_library
@pytest.mark.parametrize(
    "shape, stride, dtype, need, takes, backend",
    [
        ((6, 4, 48, 24), None, torch.bfloat16, 15, True, "cuda"),
        ((6, 4, 48, 24), (4608, 1152, 1, 48), torch.bfloat16, 7, False, "triton"),  # transposed
        ((6, 4, 48, 23), None, torch.bfloat16, 7, False, "triton"),  # rows off 16 bytes
        ((6, 4, 48, 24), None, torch.float32, 15, True, "cuda"),
        ((6, 4, 48, 20), None, torch.float32, 15, True, "cuda"),  # rows of 80 bytes
        ((6, 4, 48, 22), None, torch.float32, 7, False, "triton"),
        ((1, 4, 48, 24), None, torch.float32, 15, True, "cuda"),  # added to by tiles
        ((6, 1, 1, 24), None, torch.float32, 15, True, "triton"),
        ((1, 4, 48, 24), None, torch.bfloat16, 7, True, "cuda"),
        ((1, 4, 48, 24), None, torch.bfloat16, 15, True, "triton"),  # a shared gradient
        ((6, 4, 48, 1), None, torch.bfloat16, 7, False, "triton"),
        ((6, 1, 1, 23), None, torch.float32, 7, True, "cuda"),
    ],
)
def test_who_computes_gradients_with_a_bias_on_hopper(full_build, shape, stride, dtype, need, takes, backend):
    """What the Hopper backward takes, which is not always what it should. (Of up to 16 heads learnt rules speak.)"""
    from flashsci.backends.cuda import hopper_takes

    q = v = torch.empty(6, 4, 48, 64, dtype=torch.bfloat16)
    bias = torch.empty(shape, dtype=dtype)
    if stride is not None:
        bias = torch.empty(6 * stride[0], dtype=dtype).as_strided(shape, stride)
    keys, pairs = torch.ones(6, 1, 1, shape[-1]) > 0, torch.ones(6, 1, 48, shape[-1]) > 0
    for mask in (None, keys):
        saved = saved_of(q, v, bias, mask)
        assert hopper_takes(saved, need) is takes
        assert whose(saved, need) == backend
    capped, staged = saved_of(q, v, bias, None, softcap=5.0), dtype == torch.float32 and shape[-2] > 1
    assert hopper_takes(capped, need) is (takes and not staged)
    assert whose(capped, need) == ("cuda" if takes and not staged and need == 7 else "triton")
    assert hopper_takes(saved_of(q, v, None, keys), need)
    assert not hopper_takes(saved_of(q, v, bias, pairs), need)  # rows of 24 bytes


@needs_library
@pytest.mark.parametrize(
    "shape, need, takes",
    [
        ((6, 4, 16, 16), 15, True),
        ((6, 4, 16, 15), 7, True),  # any strides
        ((6, 1, 1, 16), 15, True),  # added up by the block that has all heads
        ((6, 1, 16, 16), 15, False),
        ((1, 4, 16, 16), 15, False),
        ((1, 4, 16, 16), 7, True),
    ],
)
def test_short_calls_with_a_bias_are_taken_in_any_strides(full_build, shape, need, takes):
    """By csrc/sm80/small, where Hopper's own kernels would refuse: no other backend has to stand in."""
    from flashsci.backends.cuda import decisions, hopper_takes

    def takes_small(saved, need):
        return (decisions.backward(saved, need) or ("",))[0].startswith("sm80/small/")

    q = v = torch.empty(6, 16, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    bias = torch.empty(*shape[:-1], 17, dtype=torch.bfloat16)[..., 1:]
    saved = saved_of(q, v, bias, None)
    assert takes_small(saved, need) is takes
    if takes:
        assert hopper_takes(saved, need) and whose(saved, need) == "cuda"
    assert not takes_small(saved_of(q, v, bias, None, softcap=5.0), need)


@needs_library
def test_every_generated_case_has_an_answer_about_hopper(full_build):
    """Of any ranks, broadcast dims and views, as plans ask it before gradients are computed."""
    from flashsci.backends.cuda import hopper_takes
    from flashsci.testing import generate
    from flashsci.testing.making import make_inputs

    found = set()
    for case in generate(11, 400):
        if case.variant.varlen:
            continue
        x = make_inputs(case, torch.device("cpu"))
        bias, mask = (None if t is None else t[(None,) * (x.q.dim() - t.dim())] for t in (x.bias, x.mask))
        saved = saved_of(x.q, x.v, bias, mask, k=x.k)
        found.add(hopper_takes(saved, 7 | (8 if x.bias is not None else 0)))
    assert found == {True, False}


@needs_library
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "shape": (1, 17, 4, 300, 70),
            "bias": (17, 4, 300, 70),
            "takes": False,
        },  # nobody shares it
        {"shape": (2, 8, 4, 300, 70), "bias": (1, 1, 4, 300, 70)},
        {"shape": (2, 8, 4, 300, 70), "bias": (2, 1, 4, 300, 70), "takes": False},  # 8 members
        {"bias": (1, 300, 70), "takes": False},  # shared by heads, too
        {"need": 9, "takes": False},
        {"dims": (40, 32), "takes": False},
        {"mask": (17, 1, 1, 70)},
        {"mask": (17, 1, 300, 70), "takes": False},
        {"softcap": 5.0, "takes": False},
        {"shape": (17, 4, 1000, 70), "bias": (1, 4, 1000, 70)},
        {
            "shape": (17, 4, 1000, 70),
            "bias": (1, 4, 1000, 70),
            "deterministic": True,
            "takes": False,
        },
    ],
)
def test_the_gradient_of_a_bias_of_many_members_is_summed_on_chip(full_build, changes):
    """Whatever the strides of the bias are: rows of 140 bytes here."""
    from flashsci.backends.cuda import hopper_takes

    given = {"shape": (17, 4, 300, 70), "bias": (1, 4, 300, 70), "mask": None, "dims": (32, 24), "need": 15, "takes": True}  # fmt: skip
    given |= changes
    *lead, rows, keys = given["shape"]
    q, v = (torch.empty(*lead, n, d, dtype=torch.bfloat16) for n, d in zip((rows, keys), given["dims"], strict=True))
    bias = torch.empty(given["bias"], dtype=torch.bfloat16)
    mask = None if given["mask"] is None else torch.ones(given["mask"]) > 0
    k = torch.empty(*lead, keys, q.shape[-1], dtype=q.dtype)
    saved = saved_of(q, v, bias, mask, given.get("softcap", 0.0), k)
    scalars = saved.scalars._replace(deterministic=given.get("deterministic", False))
    saved = saved._replace(scalars=scalars)
    assert hopper_takes(saved, given["need"]) is given["takes"]
    if given["takes"]:
        assert whose(saved, given["need"]) == "cuda"


@needs_library
@pytest.mark.parametrize(
    "dim, dtype, both", [(64, torch.float32, True), (64, torch.float16, False), (72, torch.float32, False)]
)
def test_what_the_hopper_backward_takes_of_a_mask_by_pairs(dim, dtype, both):
    from flashsci.backends.cuda import hopper_takes

    q = v = torch.empty(2, 4, 48, dim, dtype=torch.float16)
    mask, bias = torch.ones(2, 1, 48, 32) > 0, torch.empty(2, 4, 48, 32, dtype=dtype)
    assert hopper_takes(saved_of(q, v, None, mask), 7)
    assert not hopper_takes(saved_of(q, v, None, mask[..., 1:]), 7)
    assert hopper_takes(saved_of(q, v, bias, mask), 15) is both
    assert hopper_takes(saved_of(q, v, bias[:, :, :1], mask), 7)


@pytest.mark.parametrize(
    "changes, generation, first",
    [
        ({}, 90, "cuda"),
        ({}, 80, "triton"),
        ({"head_dim": 256}, 80, "cuda"),
        ({"head_dim": 256, "mask": True}, 80, "cuda"),
        ({"head_dim": 256, "bias_shape": (4, 1, 128)}, 80, "triton"),
        ({"bias_shape": (), "bias_grad": True, "bias_summed": True}, 90, "triton"),
        ({"bias_shape": (), "bias_grad": True, "bias_summed": True, "head_dim": 72}, 90, "cuda"),
        ({"bias_shape": (), "bias_summed": True}, 90, "cuda"),
        ({"capability": (8, 0)}, 80, "cuda"),
        ({"dtype": torch.float32}, 80, "cuda"),
    ],
)
def test_the_order_of_gradients(changes, generation, first):
    problem = replace(Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64), **changes)
    found = preferences.features(problem, generation)
    assert preferences.first([DEFAULTS], "gradients", found).order[0] == first
    assert all(set(rule.order) == {"cuda", "triton"} for rule in DEFAULTS.gradients)


def test_explain_says_where_strides_decide(full_build):
    given = dict(requires_grad=True, bias_shape=(4, 128, 128), bias_grad=True)
    problem = Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64, **given)
    assert "from triton, where its Hopper backward does not take" in remark("cuda", problem)
    assert "from triton: H200" in remark("cuda", replace(problem, bias_summed=True)) or (
        "from triton: on Hopper" in remark("cuda", replace(problem, bias_summed=True))
    )
    assert remark("cuda", replace(problem, bias_shape=None, bias_grad=False)) is None


@needs_library
def test_explain_names_the_kernels_of_short_gradients(full_build, monkeypatch):
    """On Hopper sm80's compute those of short calls without bias and mask, whoever's the forward is."""
    given = dict(batch=(64,), seq_q=100, seq_k=128, requires_grad=True)
    problem = Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64, **given)
    by_cuda = preferences.Rule({}, ("cuda", "triton"), "measured")
    monkeypatch.setattr(preferences, "find", lambda *_: by_cuda)
    own = "its gradients come from cuda (sm80 kernels): so short a call is faster by them"
    assert remark("cuda", problem) == own and own in str(explanation.explain(problem, "cuda"))
    assert remark("cuda:own", problem) == own.replace("cuda", "cuda:own")
    assert remark("auto:triton", problem).startswith("its gradients come from cuda (sm80 kernels): measured")
    for name in ("cuda:sm80", "cuda:sm90"):
        assert remark(name, problem) is None, "those that were asked for"
    for change in ({"seq_k": 129}, {"batch": (2,)}, {"head_dim": 72}, {"seq_q": None}, {"varlen": True}, {"capability": (8, 0)}):  # fmt: skip
        assert remark("cuda", replace(problem, **change)) is None, change


def test_explain_names_no_kernels_that_are_not_there(monkeypatch):
    pretend(monkeypatch, [unit for unit in EVERYTHING if "sm80" not in unit])
    given = dict(batch=(64,), seq_q=100, seq_k=128, requires_grad=True)
    assert remark("cuda", Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64, **given)) is None


def test_gradients_stay_where_triton_has_none(no_hopper_backward, monkeypatch):
    problem = Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64, requires_grad=True)
    assert "faster" in remark("cuda", problem)
    from flashsci.backends import triton

    monkeypatch.setattr(triton, "unavailable", lambda: "triton is not installed")
    assert remark("cuda", problem) is None
    assert candidates.rejects("cuda", problem) is None


def test_wide_heads_keep_the_sm80_backward(no_hopper_backward):
    """Twice as fast as Triton's there, on an H200 at D 256, with a mask, too; with a bias nobody measured it."""
    problem = Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 256, 256, requires_grad=True)
    assert remark("cuda", problem) is None
    assert remark("cuda", replace(problem, mask=True)) is None
    assert "faster" in remark("cuda", replace(problem, bias_shape=(4, 1, 128)))


@pytest.mark.parametrize(
    "changes, first",
    [
        ({}, "cuda"),
        ({"requires_grad": True}, "cuda"),
        ({"head_dim": 256, "head_dim_v": 256}, "cuda"),
        ({"head_dim": 256, "head_dim_v": 256, "requires_grad": True}, "cuda"),
        ({"head_dim": 20}, "triton"),
        ({"window_left": 9, "requires_grad": True}, "cuda"),
        ({"mask": True}, "triton"),
        ({"bias_shape": (4, 65, 128)}, "cuda"),
        ({"bias_shape": (4, 64, 128), "seq_q": 64}, "triton"),  # short rows
        ({"bias_shape": (4, 1, 128)}, "triton"),  # of keys
        ({"bias_shape": ()}, "triton"),  # a compiler's
        ({"bias_shape": (65, 65), "head_dim": 16}, "triton"),
        ({"bias_shape": (65, 65), "capability": (12, 0)}, "triton"),
        ({"bias_shape": (65, 65), "dtype": torch.float32, "head_dim": 8}, "cuda"),
        ({"key_weight": True}, "triton"),
        ({"dropout_p": 0.1}, "triton"),
        ({"varlen": True}, "cuda"),  # proteins
        ({"varlen": True, "batch": (2048,)}, "triton"),  # crystals
        ({"varlen": True, "head_dim": 128, "head_dim_v": 128, "requires_grad": True}, "cuda"),
        ({"dtype": torch.float32}, "cuda"),
        ({"dtype": torch.float32, "mask": True}, "cuda"),
        ({"dtype": torch.float32, "mask": True, "seq_k": 512}, "triton"),
        ({"dtype": torch.float32, "head_dim": 32, "head_dim_v": 32}, "triton"),
        ({"capability": (8, 0)}, "sdpa"),
        ({"capability": (8, 0), "softcap": 3.0}, "cuda"),
        ({"capability": (8, 0), "varlen": True}, "cuda"),
        ({"capability": (7, 5), "dtype": torch.float16}, "sdpa"),
    ],
)
def test_the_order_of_auto(changes, first):
    given = {"batch": (2,), "seq_q": 128, "seq_k": 128, **changes}
    problem = replace(Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64), **given)
    order = preferences.first([DEFAULTS], "calls", preferences.features(problem)).order
    assert order[0] == first and order[-1] == "reference", "somebody must serve every call"


def test_explain_carries_remarks(no_hopper_backward):
    problem = Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64, requires_grad=True)
    found = explanation.explain(problem, "cuda")
    assert found.chosen == "cuda" and "gradients come from triton" in found.remarks["cuda"]
    assert "can serve this call; its gradients come from triton" in str(found)


SEEN_BY_GRADIENTS = {  # calls, by what a backend may lack
    "plain": {},
    "bias": {"bias": torch.randn(2, 4, 5, 5)},
    "mask": {"mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)},
    "key_weight": {"key_weight": torch.rand(5)},
    "alibi": {"alibi_slopes": torch.rand(4)},
    "dropout": {"dropout_p": 0.5},
    "softcap": {"softcap": 1.0},
    "window": {"window": (3, 1)},
    "causal": {"causal": True, "align": "lower_right"},
    "deterministic": {"deterministic": True},
    "precision": {"precision": "tf32x3"},
    "packed": {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
}
# What becomes of the forward, or of leaves whose gradients the choice is told by name.
OF_THE_FORWARD = {"return_lse", "sink", "alibi_grad", "key_weight_grad", "bias_grad", "bias_summed", "bias_dtype", "inner_heads"}  # fmt: skip


@pytest.mark.parametrize("name", SEEN_BY_GRADIENTS)
def test_gradients_are_chosen_by_the_whole_call(monkeypatch, name):
    """Another backend than the forward's may compute them: a feature that is not passed on would silently be left out."""
    options = {"precision": "tf32x3", **SEEN_BY_GRADIENTS[name]}
    q = Q[0] if name == "packed" else Q  # kernels have heads first, packed calls rows
    given = q.transpose(0, 1) if name == "packed" else q
    asked = flashsci.explain(given.clone().requires_grad_(), given, given, **options).problem
    of = {n: x for n, x in options.items() if isinstance(x, torch.Tensor)}
    named = {n: getattr(asked, n) for n in ops.Scalars._fields if hasattr(asked, n)}
    scalars = ops.Scalars(max_seqlen_q=-1, max_seqlen_k=-1, scale=0.3, **named)
    saved = ops.Saved(ops.Tensors(q, q, q, **of), q, q[..., 0], scalars)
    seen = []
    monkeypatch.setattr(
        differentiate,
        "gradients",
        lambda choice, problem, strides: seen.append(problem) or gradients.GradientKernels(choice.forward),
    )
    differentiate._gradients_of.cache_clear()
    differentiate._gradient_backend(gradients.named("cuda"), backends.kernels("cuda"), saved, 7)
    differentiate._gradients_of.cache_clear()
    differ = {f for f, x in vars(asked).items() if getattr(seen[0], f) != x}
    assert differ <= OF_THE_FORWARD, differ


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, flashsci
q = torch.randn(1, 2, 4, 8)
assert flashsci.attention(q, q, q).shape == q.shape
found = flashsci.explain(q, q, q)
assert "cannot be imported" in found.reasons["triton"], found.reasons
try:
    flashsci.attention(q, q, q, backend="triton")
except flashsci.BackendError as error:
    print(error)
"""


def test_triton_need_not_be_there():
    """`import flashsci` needs torch alone, and so does every question to a backend whose package is missing."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot be imported" in done.stdout
