"""The peers: what is put around SDPA, FlashAttention-3 and those of triangle attention computes what the reference does.

The libraries themselves need a GPU; here stand-ins with their signatures take their place.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import flashsci
from tools.bench import Case, candidates, fa3, peers
from tools.bench.cases import HEADS_INSIDE, HEADS_LAST
from tools.bench.inputs import Unsupported, make_inputs

CPU = torch.device("cpu")


def small(**options):
    defaults = {"dtype": "fp32", "H": 2, "Sq": 16, "Sk": 16, "D": 8}
    return Case("small", "test", **{**defaults, **options})


CASES = {
    "dense": small(B=3, N=2, bias=(1, 2, 2, 16, 16), bias_grad=True),
    "grouped heads, causal": small(H=4, Hk=2, causal=True),
    "window": small(window=(3, 0), causal=True),
    "mask": small(B=3, mask=(3, 1, 1, 16)),
    "packed": small(Sq=0, Sk=0, lens=(3, 1, 7)),
    "packed, ragged bias": small(Sq=0, Sk=0, lens=(3, 1, 7), bias="ragged", bias_grad=True),
}


def agree(call, x):
    """Output and gradients of a candidate are those of the reference."""
    ours = candidates.candidate("reference", x)()
    theirs = call()
    torch.testing.assert_close(ours, theirs)
    leaves = list(x.leaves.values())
    for a, b in zip(
        torch.autograd.grad(ours, leaves, x.dout),
        torch.autograd.grad(theirs, leaves, x.dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", CASES)
def test_sdpa_computes_the_same(name):
    x = make_inputs(CASES[name], CPU)
    agree(candidates.candidate("sdpa:math", x), x)


def test_refusals_have_reasons():
    x = make_inputs(small(), CPU)
    with pytest.raises(Unsupported, match="on GPUs only"):
        candidates.candidate("flex", x)
    packed = make_inputs(CASES["packed, ragged bias"], CPU)
    with pytest.raises(Unsupported, match="no packed sequences"):
        candidates.candidate("sdpa", packed)


def fa3_forward(
    q, k, v, *, softmax_scale, is_causal, window_size_left, window_size_right, num_splits,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
):  # fmt: skip
    """Signature, layout and alignment of FlashAttention-3's op, on the reference."""
    window = (window_size_left if window_size_left >= 0 else None, window_size_right)
    window = None if window == (None, -1) else (window[0], None if window[1] < 0 else window[1])
    options = {"causal": is_causal, "window": window, "scale": softmax_scale, "return_lse": True}
    options |= {"align": "lower_right", "backend": "reference"}
    if cu_seqlens_q is not None:
        out, lse = flashsci.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        return out, lse, None, None
    out, lse = flashsci.attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    return out.transpose(1, 2).contiguous(), lse, None, None


def fa3_backward(dout, q, k, v, out, lse, dq, dk, dv, **options):
    assert out.shape == dout.shape and lse.dtype == torch.float32
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        again = fa3_forward(*leaves, num_splits=1, **options)[0]
        for written, found in zip((dq, dk, dv), torch.autograd.grad(again, leaves, dout), strict=True):
            written.copy_(found)


@pytest.mark.parametrize(
    "case",
    [
        small(B=3, N=2),
        small(H=4, Hk=2, causal=True),
        small(causal=True, window=(3, 0)),
        small(window=(2, 5)),
        small(Sq=0, Sk=0, lens=(3, 1, 7), causal=True),
        small(Sq=1, order=0),
    ],
    ids=["two batch dims", "grouped, causal", "causal window", "window", "packed", "decode"],
)
def test_fa3_computes_the_same(case):
    x = make_inputs(case, CPU)
    call = fa3.call(SimpleNamespace(fwd=fa3_forward, bwd=fa3_backward), x)
    if x.leaves:
        agree(call, x)
    else:
        torch.testing.assert_close(call(), candidates.candidate("reference", x)())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "no fp32"),
        ({"dtype": "bf16", "bias": (1, 1, 16, 16)}, "no bias"),
        ({"dtype": "bf16", "D": 12}, "multiples of 8"),
        ({"dtype": "bf16", "D": 320}, "up to 256"),
        ({"dtype": "bf16", "Dv": 16}, "D != Dv"),
        ({"dtype": "bf16", "Sq": 8, "causal": True}, "lower right"),
    ],
)
def test_fa3_refuses_with_a_reason(options, reason):
    with pytest.raises(Unsupported, match=reason):
        candidates.candidate("fa3", make_inputs(small(**options), CPU))


def test_fa3_library_is_asked_for(tmp_path):
    with pytest.raises(Unsupported, match="FLASHSCI_FA3=PATH"):
        fa3.load("")
    with pytest.raises(Unsupported, match="there is no file"):
        fa3.load(str(tmp_path / "none.so"))
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(Unsupported, match="cannot be loaded"):
        fa3.load(str(broken))


def test_fa3_under_another_name(monkeypatch, tmp_path):
    """The build that was loaded last is the one that is called."""
    names = {"flash_attn_3": SimpleNamespace(fwd="old"), "fa3_fwd": SimpleNamespace()}
    names = SimpleNamespace(**names, _vllm_fa3_C=SimpleNamespace())
    monkeypatch.setattr(torch, "ops", names)
    names.load_library = lambda path: setattr(names.fa3_fwd, "fwd", path)
    library = tmp_path / "_C.so"
    library.touch()
    assert fa3.load(str(library)) is names.fa3_fwd
    (tmp_path / "again.so").touch()
    assert fa3.load(str(tmp_path / "again.so")) is names.flash_attn_3
    del names.flash_attn_3.fwd, names.fa3_fwd.fwd
    names.load_library = lambda path: None
    (tmp_path / "other.so").touch()
    with pytest.raises(Unsupported, match="registers none of flash_attn_3, fa3_fwd, _vllm_fa3_C"):
        fa3.load(str(tmp_path / "other.so"))


def triangle_attention(q, k, v, bias, mask=None, scale=None, return_aux=False, *, kv_lengths=None):
    """Signature and rules of cuequivariance_torch.triangle_attention."""
    b, n, h, s, _ = q.shape
    assert bias.shape == (b, 1, h, s, k.shape[3])
    assert mask is None or mask.shape == (b, n, 1, 1, k.shape[3])
    return flashsci.attention(q, k, v, bias=bias, mask=mask, scale=scale, backend="reference")


@pytest.fixture
def cuequivariance(monkeypatch):
    module = ModuleType("cuequivariance_torch")
    module.triangle_attention = triangle_attention
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", module)


def turbo_attention(q, k, v, res_mask=None, pair_bias=None):
    """Signature, rules and layout of turbopairformer.turbo_attention, but for the rounding of a bias."""
    *prefix, n, h, s, d = q.shape
    assert q.shape == k.shape == v.shape and q.dtype is torch.bfloat16 and prefix and d <= 64
    assert pair_bias.shape[-4:] == (1, h, s, s)
    assert pair_bias.dtype in (torch.bfloat16, torch.float32)
    mask = None
    if res_mask is not None:
        assert res_mask.shape[-4:] == (n, 1, 1, s) and res_mask.dtype is torch.float32
        mask = res_mask == 0
        assert (mask | res_mask.isneginf()).all()
    out = flashsci.attention(q, k, v, bias=pair_bias, mask=mask, backend="reference")
    return out.transpose(-3, -2).contiguous()


@pytest.fixture
def turbopairformer(monkeypatch):
    module = ModuleType("turbopairformer")
    module.turbo_attention = turbo_attention
    monkeypatch.setitem(sys.modules, "turbopairformer", module)


TRIANGLES = {
    "triangle": small(N=16, bias=(1, 1, 2, 16, 16), bias_grad=True, mask=(1, 16, 1, 1, 16)),
    "as models have it": small(
        N=16,
        bias=(1, 1, 2, 16, 16),
        bias_grad=True,
        mask=(1, 1, 1, 1, 16),
        layout=HEADS_INSIDE,
        bias_layout=HEADS_LAST,
    ),
    "a bias for each": small(B=3, bias=(3, 2, 16, 16), bias_grad=True, mask=(1, 1, 1, 16)),
    "one bias": small(B=3, bias=(1, 2, 16, 16), bias_grad=True, mask=(3, 1, 1, 16)),
    "two batch dims": small(B=2, N=3, bias=(1, 1, 2, 16, 16), bias_grad=True),
    "of keys": small(B=3, bias=(3, 1, 1, 16), bias_grad=True),
}


@pytest.mark.parametrize("name", TRIANGLES)
def test_cuequivariance_computes_the_same(name, cuequivariance):
    x = make_inputs(TRIANGLES[name], CPU)
    agree(candidates.candidate("cueq", x), x)


@pytest.mark.parametrize("bias_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", TRIANGLES)
def test_turbopairformer_computes_the_same(name, bias_dtype, turbopairformer):
    x = make_inputs(replace(TRIANGLES[name], dtype="bf16", bias_dtype=bias_dtype), CPU)
    agree(candidates.candidate("turbo", x), x)


def test_one_bias_is_handed_over_once():
    """Members that share a bias are rows of one: expanded, it would be as large as all of their scores."""
    x = make_inputs(small(dtype="bf16", B=3, bias=(1, 2, 16, 16), bias_dtype="fp32"), CPU)
    rows = peers._triangle(x)
    assert rows(x.q).shape == (1, 3, 2, 16, 8) and rows(x.bias).shape == (1, 1, 2, 16, 16)


@pytest.mark.parametrize("name", ["cueq", "turbo"])
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (small(), "triangle attention only"),
        (small(B=1, N=2, bias=(1, 2, 2, 16, 16)), "one for each"),
        (small(N=2, bias=(1, 1, 2, 16, 16), mask=(1, 2, 1, 16, 16)), "one of pairs"),
    ],
)
def test_triangles_are_all_they_do(name, case, reason, cuequivariance, turbopairformer):
    with pytest.raises(Unsupported, match=reason):
        candidates.candidate(name, make_inputs(case, CPU))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "fp32"}, "no fp32"),
        ({"dtype": "fp16"}, "no fp16"),
        ({"Sk": 24, "bias": (1, 2, 16, 24)}, "as many keys as queries"),
        ({"D": 72}, "at most 64"),
        ({"Dv": 16}, "D = Dv"),
    ],
)
def test_turbopairformer_refuses_with_a_reason(options, reason, turbopairformer):
    case = small(**{"dtype": "bf16", "bias": (1, 2, 16, 16)} | options)
    with pytest.raises(Unsupported, match=reason):
        candidates.candidate("turbo", make_inputs(case, CPU))


def test_turbopairformer_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "turbopairformer", None)
    with pytest.raises(Unsupported, match="pip install turbopairformer"):
        candidates.candidate("turbo", make_inputs(small(), CPU))


def test_cuequivariance_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", None)
    with pytest.raises(Unsupported, match="pip install cuequivariance_torch"):
        candidates.candidate("cueq", make_inputs(small(), CPU))


def test_errors_of_a_library_are_reasons(monkeypatch, cuequivariance):
    def fails(*_, **__):
        raise KeyError("sm_75")

    monkeypatch.setattr(sys.modules["cuequivariance_torch"], "triangle_attention", fails)
    with pytest.raises(Unsupported, match="sm_75"):
        candidates.candidate("cueq", make_inputs(small(bias=(1, 2, 16, 16)), CPU))
