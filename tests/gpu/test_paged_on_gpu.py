"""Paged attention on a GPU: generated calls, one CUDA graph for any lengths and pages, no synchronisation, bytes of the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.api import paged
from flashsci.check.planning import aligned_paged
from flashsci.check.units import cuda_paged
from flashsci.testing import (
    PagedCase,
    PagedVariant,
    generate_paged,
    judge_paged,
    make_paged_inputs,
    poisoned_memory,
)

pytestmark = pytest.mark.gpu
EIGHT_BITS = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


HERE = cuda_paged("cuda")
needs_cuda_kernels = pytest.mark.skipif(not HERE, reason="none for this device in the library")
CUDA = [
    pytest.param(name, marks=pytest.mark.skipif(name not in HERE, reason="not one of this device and library"))
    for name in ("cuda", "cuda:sm80")
]
of_cuda = pytest.mark.parametrize("backend", CUDA)
every = pytest.mark.parametrize("backend", ("triton", *CUDA))


def here(case):
    """Whether this device has the case's dtypes."""
    older = torch.cuda.get_device_capability() < (8, 0)
    return (EIGHT_BITS or not case.variant.cache) and not (older and case.variant.dtype == "bfloat16")


@every
@pytest.mark.parametrize("part", range(4))
def test_generated(part, backend):
    judged = 0
    for case in filter(here, generate_paged(100 + part, 25)):
        case = aligned_paged(case) if backend != "triton" else case
        with poisoned_memory():
            judge_paged(case, backend, "cuda")
        judged += 1
    assert judged


NARROW = PagedVariant("bfloat16", "float8_e4m3fn", 40, 24, "left", softcap=True)


@pytest.mark.parametrize("repeats", range(3))
@pytest.mark.parametrize(
    "case",
    [
        PagedCase(NARROW, 268138739, (1,) * 5, (358, 1, 17, 244, 226), 3, 2, 128, "heads", 1, True, False, 40, False, "heads", 0),
        PagedCase(NARROW, 980528580, (41,), (17,), 3, 5, 32, "stacked", 2, True, True, 40, False, "heads", 20, 0, 0.3),
        PagedCase(NARROW, 1986926689, (1, 1, 0, 1, 0, 1), (289, 15, 15, 617, 0, 1), 3, 4, 32, "joint rows", 1, True, scales="one", left=1),
    ],
    ids=["splits", "garbage", "empty"],
)  # fmt: skip
def test_an_8_bit_cache_whose_rows_are_not_aligned(case, repeats):
    """The first of them met an illegal address once, among others that ran beside it: alone, and many times."""
    if not EIGHT_BITS:
        pytest.skip("no 8-bit floats before sm_89")
    inputs = make_paged_inputs(case, "cuda")
    judge = inputs.judge(fused=True)
    for _ in range(20):
        with poisoned_memory():
            judge.require(inputs.evaluate("triton"))
        torch.cuda.synchronize()


@every
@pytest.mark.parametrize("cache", ["", "float8_e4m3fn"])
@pytest.mark.parametrize("lens_q", [(1,) * 5, (1, 700, 1, 33, 0)])
@pytest.mark.parametrize("window", ["causal", "left"])
def test_long_sequences(lens_q, window, cache, backend):
    """Many splits of some, one of others."""
    if cache and not EIGHT_BITS:
        pytest.skip("no 8-bit floats before sm_89")
    variant = PagedVariant("float16", cache, 128, 128, window, sink=True)
    lens_k = (9000, 700, 40, 5001, 1)
    case = PagedCase(variant, 5, lens_q, lens_k, heads_k=2, group=4, spare_pages=300, left=3000)
    judge_paged(case, backend, "cuda")


@every
@pytest.mark.parametrize("cache", ["", "float8_e4m3fn"])
@pytest.mark.parametrize("lens_q", [(1, 1, 1, 1), (3, 1, 40, 0)])
def test_one_graph_serves_any_lengths_and_pages(cache, lens_q, backend):
    """Captured with one batch, replayed with others that have the same shapes, each judged."""
    if cache and not EIGHT_BITS:
        pytest.skip("no 8-bit floats before sm_89")
    variant = PagedVariant("float16", cache, 64, 64)
    total, columns, pages = sum(lens_q), 40, 120
    batches = []
    for seed, lengths in enumerate(((600, 17, 100, 3), (1, 640, 40, 0), (0, 0, 0, 0), (33, 33, 300, 640))):
        new = lens_q if seed % 2 == 0 else lens_q[::-1]
        used = tuple(max(a, b) for a, b in zip(lengths, new, strict=True)) if any(lengths) else lengths
        case = PagedCase(variant, seed, new, used, heads_k=2, group=4, scales="heads" if cache else "none")
        batches.append(make_paged_inputs(case, "cuda"))
    q = torch.zeros(total, 8, 64, device="cuda", dtype=torch.float16)
    caches = torch.zeros(2, pages, 16, 2, 64, device="cuda").to(batches[0].k_cache.dtype)
    table = torch.zeros(4, columns, dtype=torch.int32, device="cuda")
    used, edges = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 5))
    scales = [torch.ones(4, 2, device="cuda") for _ in range(2)] if cache else [None, None]
    given = dict(
        block_table=table, seqused_k=used, cu_seqlens_q=edges, max_seqlen_q=max(lens_q), return_lse=True, backend=backend,
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip

    def load(batch):
        q.copy_(batch.q)
        for to, source in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
            to.view(torch.uint8 if cache else torch.float16)[: len(source)].copy_(
                source.contiguous().view(torch.uint8 if cache else torch.float16)
            )
        table.fill_(-1)
        table[:, : batch.options["block_table"].shape[1]].copy_(batch.options["block_table"])
        used.copy_(batch.options["seqused_k"])
        edges.copy_(batch.options["cu_seqlens_q"])
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            if scale is not None:
                scale.copy_(batch.options[name])

    load(batches[0])
    flashsci.paged_attention(q, *caches, **given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashsci.paged_attention(q, *caches, **given)
    for batch in (*batches, *batches[::-1]):
        load(batch)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        batch.judge(fused=True).require({"out": out, "lse": lse})


@every
def test_nothing_waits_for_the_device(backend):
    inputs = make_paged_inputs(PagedCase(PagedVariant("float16"), 1, (1, 30), (40, 90)), "cuda")
    rows = inputs.q.shape[0]
    key, value = torch.zeros(2, rows, 1, 64, dtype=torch.float16, device="cuda").unbind(0)
    slots = torch.full((rows,), -1, device="cuda")
    inputs.evaluate(backend)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.evaluate(backend)
        flashsci.write_kv_cache(key, value, inputs.k_cache, inputs.v_cache, slots, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@of_cuda
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("cache", ("float8_e4m3fn", "float8_e5m2"))
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (256, 256), (192, 80)))
def test_8_bit_caches(dims, cache, dtype, backend):
    """Every tile, in decodes and with tiers of rows; what nobody sees is NaN."""
    variant = PagedVariant(dtype, cache, *dims, "left", sink=True)
    for lens_q, group in (((1,) * 6, 4), ((4, 1, 9, 0, 30, 2), 3), ((70, 1, 16, 33, 2, 5), 8)):
        case = PagedCase(
            variant, 3, lens_q, (2000, 17, 300, 129, 30, 5), 2, group, 48, padding=3, scales="heads", left=900
        )
        with poisoned_memory():
            judge_paged(case, backend, "cuda")


@every
@pytest.mark.parametrize("cache", ["", "float8_e4m3fn"])
def test_results_are_the_same_every_time(backend, cache):
    if cache and not EIGHT_BITS:
        pytest.skip("no 8-bit floats before sm_89")
    variant = PagedVariant("float16", cache)
    inputs = make_paged_inputs(PagedCase(variant, 2, (1, 5, 1), (3000, 900, 20), 2, 4), "cuda")
    other = make_paged_inputs(PagedCase(variant, 3, (16, 9), (300, 90), 2, 4, sharp=30.0), "cuda")
    first = inputs.evaluate(backend)
    for _ in range(50):
        other.evaluate(backend)  # leaves other numbers in shared memory
        found = inputs.evaluate(backend)
        assert all(torch.equal(found[n], x) for n, x in first.items())


@of_cuda
@pytest.mark.parametrize("cache", ["", "float8_e4m3fn"])
def test_long_runs_beside_others(backend, cache):
    """On Hopper CTAs keep step in such runs: not only with those of their own launch, nor are all of them there at once."""
    if cache and not EIGHT_BITS:
        pytest.skip("no 8-bit floats before sm_89")
    case = PagedCase(PagedVariant("bfloat16", cache, 128, 128), 4, (1, 1), (110000, 60001), 8, 4)
    inputs = make_paged_inputs(case, "cuda")
    first = inputs.evaluate(backend)
    inputs.judge(fused=True).require(first)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(inputs.evaluate(backend))
    torch.cuda.synchronize()
    assert all(torch.equal(x[n], first[n]) for x in found for n in first)


@of_cuda
def test_refusals_name_what_was_given(backend):
    case = PagedCase(PagedVariant("float16"), 1, (1, 7), (40, 90), layout="unaligned")
    with pytest.raises(flashsci.BackendError, match=r"k_cache has strides .*multiples of 8"):
        make_paged_inputs(case, "cuda").evaluate(backend)
    with pytest.raises(flashsci.BackendError, match=r"k_cache has strides .*multiples of 16 "):
        variant = replace(case.variant, cache="float8_e4m3fn")
        make_paged_inputs(replace(case, variant=variant), "cuda").evaluate(backend)
    with pytest.raises(flashsci.BackendError, match="no k_scale and no v_scale for a 16-bit cache"):
        make_paged_inputs(replace(case, layout="rows", scales="one"), "cuda").evaluate(backend)


@of_cuda
@pytest.mark.parametrize("cache", ["", "float8_e4m3fn"])
def test_what_is_out_of_range_reads_nothing_beyond_the_tensors(cache, backend):
    """Lengths beyond the table, edges that shrink or leave the tensor, a table of garbage: no fault, no NaN from elsewhere."""
    case = PagedCase(PagedVariant("bfloat16", cache, 128, 128), 1, (1, 7, 3), (400, 90, 20), 2, 4)
    inputs = make_paged_inputs(case, "cuda")
    options = inputs.options
    for x in (inputs.k_cache, inputs.v_cache):
        x.copy_(x.float().nan_to_num(0.0))
    tables = [
        options["block_table"],
        torch.full_like(options["block_table"], 2**31 - 1),
        torch.full_like(options["block_table"], -(2**31)),
    ]
    for table in tables:
        for used in ((2**31 - 1, -5, 2**30), (10**6, 10**9, 0), (-(2**31), 1, 2**31 - 1)):
            for edges in ((0, 1, 8, 11), (5, 3, 2, 900), (-7, 2**31 - 1, 0, 4), (11, 11, 11, 11)):
                given = {
                    name: torch.tensor(value, dtype=torch.int32, device="cuda")
                    for name, value in (("seqused_k", used), ("cu_seqlens_q", edges))
                }
                found = inputs.evaluate(backend, block_table=table, **given)
                assert found["out"].isfinite().all() and not found["lse"].isnan().any()


@needs_cuda_kernels
def test_auto_decodes_by_cuda():
    """And leaves prompts, and pages that its kernels do not take, to Triton."""
    for cache in ("", "float8_e5m2"):
        case = PagedCase(PagedVariant("float16", cache), 1, (1, 7), (40, 90))
        inputs = make_paged_inputs(case, "cuda")
        found = flashsci.explain(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.options)
        assert found.chosen == "cuda"
    for most, chosen in ((7, "cuda"), (17, "triton"), (None, "triton")):
        options = inputs.options | {"max_seqlen_q": most}
        found = flashsci.explain(inputs.q, inputs.k_cache, inputs.v_cache, **options)
        assert found.chosen == chosen, most
    case = PagedCase(PagedVariant("float16"), 1, (1, 7), (40, 90), layout="unaligned")
    paged._say_once.cache_clear()
    with pytest.warns(UserWarning, match="running 'triton', since .*strides"):
        judge_paged(case, "auto", "cuda")
