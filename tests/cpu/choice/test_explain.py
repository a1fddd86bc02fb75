"""What explain says of kernels, and of residual attention; on a described Hopper GPU, with tensors on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.backends import cuda, triton
from flashsci.backends.cuda.library import library_path
from flashsci.call.problem import problem_of
from flashsci.choice import predictions, preferences

needs_library = pytest.mark.skipif(library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)")


@pytest.fixture
def hopper(monkeypatch):
    """Calls as they would be seen on an H100."""
    known = problem_of
    monkeypatch.setattr(
        sys.modules["flashsci.api.explain"],
        "problem_of",
        lambda *a: replace(known(*a), device_type="cuda", capability=(9, 0)),
    )
    for module in (cuda, triton, cuda.SM80, cuda.SM90):
        monkeypatch.setattr(module, "unavailable", lambda: None)


def rows(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype).requires_grad_()


def inner_heads(batch, rows, heads, columns, dtype=torch.bfloat16):
    x = torch.empty(batch, rows, columns, heads, dtype=dtype).permute(0, 3, 1, 2)
    return x.requires_grad_()


DENSE = rows(2, 16, 1024, 64)
TRIANGLE = rows(1, 384, 4, 384, 32)
PAIRS = torch.empty(2, 384, 16, 24).transpose(1, 2).requires_grad_()
SMALL = rows(1000, 6, 16, 32)
CALLS = {  # tensors, options, the kernels of the call and of its gradients
    "dense": (DENSE, {}, "sm90/fwd", "sm90/bwd"),
    "no gradients": (DENSE.detach(), {}, "sm90/fwd", None),
    "one generation": (DENSE, {"backend": "cuda:sm80"}, "sm80/fwd", "sm80/bwd"),
    "short": (rows(16, 16, 100, 32), {"backend": "cuda"}, "sm90/fwd", "sm80/bwd"),
    "small": (SMALL, {}, "sm80/small", "sm80/small"),
    "triangle": (TRIANGLE, {"bias": rows(1, 1, 4, 384, 384)}, "sm90/triangle_fwd", "sm90/triangle_bwd"),
    "a bias of a lower rank": (TRIANGLE, {"bias": rows(4, 384, 384)}, "sm90/triangle_fwd", "sm90/triangle_bwd"),
    "inner heads": (PAIRS, {"bias": inner_heads(2, 384, 16, 384, torch.float32), "backend": "cuda"}, "sm90/pair", "sm90/pair"),
    "a bias that is copied": (DENSE, {"bias": inner_heads(2, 1024, 16, 1024), "backend": "cuda"}, "sm90/fwd", "sm90/bwd"),
    "rows of a bias off 16 bytes": (DENSE, {"bias": torch.empty(2, 16, 1024, 1025, dtype=torch.bfloat16)[..., 1:], "backend": "cuda"}, "sm90/fwd", "sm90/bwd"),
    "rows of fp32 off 16 bytes": (DENSE, {"bias": torch.empty(2, 16, 1024, 1025)[..., 1:], "backend": "cuda"}, "sm90/fwd", "sm90/bwd"),
    "key weights": (rows(8, 4, 20, 16, dtype=torch.float32), {"key_weight": torch.empty(20), "precision": "tf32x3", "backend": "cuda"}, "sm80/small", "sm80/small"),
    "from triton": (DENSE, {"dropout_p": 0.1, "backend": "triton"}, None, None),
}  # fmt: skip


@needs_library
@pytest.mark.parametrize("name", CALLS)
def test_kernels(hopper, name):
    q, options, kernel, gradient = CALLS[name]
    found = flashsci.explain(q, q, q, **options)
    assert (found.kernel, found.gradient_kernel) == (kernel, gradient), str(found)
    line = f"kernels: {kernel}" + ("" if gradient is None else f"; its gradients: {gradient}")
    assert (line in str(found)) == (kernel is not None)
    # Of layouts that are taken, no remark speaks of other layouts.
    assert kernel is None or gradient is None or "strides" not in str(found.remarks)


@needs_library
def test_gradients_that_triton_leaves_to_cuda(hopper, monkeypatch):
    monkeypatch.setattr(predictions, "enabled", lambda: False)
    by_triton = replace(preferences.find("calls", PROBLEM), order=("triton",))
    find = preferences.find
    monkeypatch.setattr(
        preferences,
        "find",
        lambda kind, *rest: by_triton if kind == "calls" else find(kind, *rest),
    )
    found = flashsci.explain(SMALL, SMALL, SMALL)
    assert found.chosen == "triton" and found.kernel is None
    assert found.gradient_kernel == "sm80/small"
    assert "kernels of its gradients: sm80/small" in str(found)


PROBLEM = flashsci.explain(DENSE, DENSE, DENSE).problem


@needs_library
def test_packed_and_8_bit_calls(hopper):
    x, offsets = torch.empty(50, 2, 64, dtype=torch.bfloat16), torch.tensor([0, 20, 50], dtype=torch.int32)
    found = flashsci.explain(x, x, x, cu_seqlens_q=offsets, max_seqlen_q=30, backend="cuda")
    assert found.kernel == "sm90/fwd"
    eight = x.to(torch.float8_e4m3fn)
    scale = torch.ones(2, 2)
    found = flashsci.explain(eight, eight, eight, cu_seqlens_q=offsets, q_scale=scale)
    assert found.kernel == "sm90/fp8"
    dense = torch.empty(3, 1, 4, 256, 128, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    found = flashsci.explain(dense, dense[0], dense, k_scale=torch.ones(1, 4, 2))
    assert found.kernel == "sm90/fp8"


def paged(page=64, **more):
    q = torch.empty(2, 8, 64, dtype=torch.bfloat16)
    cache = torch.empty(20, page, 2, 64, dtype=torch.bfloat16)
    whole = {
        n: torch.zeros(*s, dtype=torch.int32)
        for n, s in (("block_table", (2, 4)), ("seqused_k", (2,)), ("cu_seqlens_q", (3,)))
    }
    return flashsci.explain(q, cache, cache, **whole, max_seqlen_q=1, **more)


@needs_library
def test_paged_calls(hopper):
    assert paged().kernel == paged(backend="cuda").kernel == "sm90/paged"
    assert paged(backend="cuda:sm80").kernel == "sm80/paged"
    found = paged(page=24)
    assert (found.chosen, found.kernel) == ("triton", None)
    assert "pages have 24 rows" in found.reasons["cuda"]
    assert paged(page=24, backend="cuda").chosen is None


def residual(q, **options):
    return flashsci.explain(q, q, q, entry=flashsci.residual_attention, **options)


def test_residual_attention_by_kernels(hopper):
    found = residual(rows(2, 4, 64, 32), bias=torch.empty(4, 64, 64))
    assert found.chosen == "triton" and found.reasons["triton"] is None
    assert "no kernel that computes out and scores" in found.reasons["cuda"]
    wide = residual(rows(2, 4, 64, 192), backend="triton")
    assert wide.chosen is None and "up to 128, got 192" in wide.reasons["triton"]


@needs_library
def test_residual_attention_from_parts(hopper):
    found = residual(DENSE, backend="cuda")
    assert (found.chosen, found.kernel, found.gradient_kernel) == ("cuda", "sm90/fwd", "sm90/bwd")
    assert "plain PyTorch the scores" in found.remarks["cuda"]
    wide = residual(rows(2, 4, 256, 192))
    assert wide.chosen == "cuda" and "(triton: its kernels of residual" in wide.remarks["cuda"]


def test_residual_attention_here():
    """As the call decides, with its refusals."""
    q = torch.empty(2, 4, 10, 16)
    assert residual(q, backend="sdpa").chosen == "sdpa" and residual(q).kernel is None
    assert residual(q, backend="reference").chosen == "reference"
    with pytest.raises(TypeError, match="bias is a bool tensor"):
        residual(q, bias=torch.ones(10, 10) > 0)
    with pytest.raises(ValueError, match="do not broadcast"):
        flashsci.explain(q, q[:1].expand(3, 4, 10, 16), q, entry=flashsci.residual_attention)
    with pytest.raises(TypeError, match="causal"):
        residual(q, causal=True)


def test_entries():
    q = torch.empty(2, 4, 10, 16)
    asked = flashsci.explain(q, q, q, entry=flashsci.attention)
    assert asked.problem == flashsci.explain(q, q, q).problem
    with pytest.raises(ValueError, match="attention, varlen_attention, paged_attention, residual_attention"):
        flashsci.explain(q, q, q, entry=flashsci.sdpa)
