"""Attention on 8-bit floats on a GPU: generated calls, long sequences, no synchronisation, graphs, the same bits every time."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.check.units import runs_cuda_fp8
from flashsci.testing import (
    FP8Case,
    FP8Variant,
    generate_fp8,
    judge_fp8,
    make_fp8_inputs,
    poisoned_memory,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="no 8-bit floats before sm_89",
    ),
]
needs_cuda_kernel = pytest.mark.skipif(not runs_cuda_fp8("cuda"), reason="no Hopper, or a library without that kernel")
both = pytest.mark.parametrize("backend", ("triton", pytest.param("cuda", marks=needs_cuda_kernel)))
CASE = FP8Case(FP8Variant(head_dim=128, head_dim_v=128, window="causal"), 3, (1000,), (1000,), (2,), 2, 4, scales=("128", "64", "128"))  # fmt: skip
PACKED = FP8Case(
    FP8Variant(window="causal", packed=True), 4, (100, 1, 700), (300, 40, 700), (), 2, 2, scales=("64", "head", "64")
)


@both
@pytest.mark.parametrize("part", range(4))
def test_generated(part, backend):
    """The Hopper kernel leaves rows that TMA cannot load to others."""
    taken = 0
    for case in generate_fp8(100 + part, 25):
        try:
            with poisoned_memory():
                judge_fp8(case, backend, "cuda")
            taken += 1
        except flashsci.BackendError:
            assert backend == "cuda" and (
                case.layout == "unaligned" or case.variant.head_dim % 16 or case.variant.head_dim_v % 16
            ), case
    assert taken == 25 or (backend == "cuda" and taken >= 5)


def quantised(q, k, v, **options):
    found = [flashsci.quantize(x, **options) for x in (q, k, v)]
    scales = {f"{n}_scale": f.scale for n, f in zip("qkv", found, strict=True)}
    return [f.values for f in found], scales


@both
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_the_error_does_not_grow_with_the_keys(dim, backend):
    """To 128k, where sums that a tensor core keeps from tile to tile lose what is added late."""
    errors = []
    for keys in (1024, 8192, 32768, 131072):
        q = torch.randn(1, 256, dim, device="cuda")
        k, v = torch.randn(2, 1, keys, dim, device="cuda")
        tensors, scales = quantised(q, k, v)
        out = flashsci.attention(*tensors, **scales, out_dtype=torch.float16, backend=backend)
        exact = flashsci.attention(*(x.double() for x in (q, k, v)), backend="reference")
        errors.append(((out - exact).norm() / exact.norm()).item())
    assert max(errors) < 1.3 * min(errors) and max(errors) < 0.08, errors


@both
def test_a_needle_in_128k_keys(backend):
    """One key that a query attends to, anywhere among keys that it does not: its value comes back from every depth."""
    keys, dim = 131072, 128
    k = torch.randn(1, keys, dim, device="cuda")
    v = torch.randn(1, keys, dim, device="cuda")
    at = torch.arange(0, keys, keys // 64, device="cuda") + 17
    q = 3 * k[:, at]  # its score is 3 |k|^2 / sqrt(D), about 34 above all others
    tensors, scales = quantised(q, k, v)
    out = flashsci.attention(*tensors, **scales, backend=backend).float()
    error = (out - v[:, at]).norm(dim=-1) / v[:, at].norm(dim=-1)
    assert error.max() < 0.1, error


@both
@pytest.mark.parametrize("case", (CASE, PACKED))
def test_nothing_waits_for_the_device(case, backend):
    inputs = make_fp8_inputs(case, "cuda")
    edges = inputs.options.get("cu_seqlens_k")
    x = torch.randn(inputs.k.shape, device="cuda")
    flashsci.quantize(x, smooth=True, rotate=True, cu_seqlens=edges)
    inputs.evaluate(backend)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.evaluate(backend)
        for per in ("tensor", "head", "block"):
            flashsci.quantize(x, per, smooth=True, rotate=True, cu_seqlens=edges)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@both
@pytest.mark.parametrize("case", (CASE, PACKED))
def test_a_graph_replays(case, backend):
    first, second = (make_fp8_inputs(FP8Case(**vars(case) | {"seed": s}), "cuda") for s in (7, 8))
    first.evaluate(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = first.evaluate(backend)
    graph.replay()
    first.judge().require(found)
    for name in "qkv":
        getattr(first, name).copy_(getattr(second, name))
        first.options[f"{name}_scale"].copy_(second.options[f"{name}_scale"])
    graph.replay()
    second.judge().require(found)


@both
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("block", ("128", "64"))
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (192, 128), (256, 256)))
def test_results_are_the_same_every_time(dims, block, packed, backend):
    """Of every tile shape: on more tiles than the GPU has multiprocessors, alone and beside other work."""
    variant = FP8Variant("bfloat16", *dims, "causal", packed=packed)
    lengths = (700, 1, 1300) if packed else (1300,)
    inputs = make_fp8_inputs(
        FP8Case(variant, 5, lengths, lengths, () if packed else (3,), 4, 4, scales=("head", block, block)), "cuda"
    )
    first = inputs.evaluate(backend)
    inputs.judge().require(first)
    beside = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    for turn in range(30):
        if turn % 2:
            with torch.cuda.stream(beside):
                noise @ noise
        found = inputs.evaluate(backend)
        assert all(torch.equal(found[n], x) for n, x in first.items()), turn


def test_auto_is_cuda_on_hopper():
    inputs = make_fp8_inputs(CASE, "cuda")
    found = flashsci.explain(inputs.q, inputs.k, inputs.v, **inputs.options)
    assert found.chosen == ("cuda" if runs_cuda_fp8("cuda") else "triton")
