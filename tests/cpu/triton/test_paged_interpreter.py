"""The paged Triton kernels in interpreter mode: named cases, generated ones, and what must not depend on what."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.call import paged_ops
from flashsci.testing import (
    PagedCase,
    PagedVariant,
    judge_paged,
    make_paged_inputs,
    paged_cases,
    poisoned_memory,
)

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("triton")

MIXED = dict(lens_q=(1, 9, 0, 3, 4), lens_k=(70, 40, 5, 0, 4), heads_k=2, group=3, seed=4)
BF16 = dict(dtype="bfloat16", head_dim=32, head_dim_v=32)
FP8 = dict(BF16, cache="float8_e4m3fn")
NAMED = {
    "decode": PagedCase(PagedVariant(**BF16), lens_q=(1, 1, 1), lens_k=(100, 1, 17), group=4),
    "speculative": PagedCase(PagedVariant(**BF16), lens_q=(5, 5), lens_k=(64, 5), group=4, page=32),
    "mixed": PagedCase(PagedVariant(**BF16), **MIXED),
    "fp16, one head": PagedCase(PagedVariant("float16", "", 64, 16), lens_q=(2,), lens_k=(33,)),
    "fp32": PagedCase(PagedVariant("float32", "", 24, 40), **MIXED),
    "all heads one": PagedCase(PagedVariant(**BF16), lens_q=(7,), lens_k=(50,), group=12),
    "more queries than keys": PagedCase(PagedVariant(**BF16), lens_q=(20,), lens_k=(3,)),
    "full": PagedCase(PagedVariant(**BF16, window="none"), **MIXED, padding=3),
    "window": PagedCase(PagedVariant(**BF16, window="left"), **MIXED, left=7, layout="joint heads"),
    "window both": PagedCase(PagedVariant(**BF16, window="both"), **MIXED, left=4, right=2),
    "softcap, sink": PagedCase(PagedVariant(**BF16, softcap=True, sink=True), **MIXED, sharp=8.0),
    "sink, no prefix": PagedCase(PagedVariant(**BF16, window="left", sink=True), **MIXED, padding=2),
    "e4m3": PagedCase(PagedVariant(**FP8), **MIXED, scales="heads", layout="joint rows"),
    "e5m2": PagedCase(PagedVariant("float16", "float8_e5m2", 80, 48), **MIXED, scales="one"),
    "shared pages, some outside": PagedCase(PagedVariant(**BF16), **MIXED, shared=True, outside=True),
    "unaligned": PagedCase(PagedVariant(**BF16), **MIXED, layout="unaligned", known_length=False),
}


@pytest.mark.parametrize("name", NAMED)
def test_named(name, poison):
    judge_paged(NAMED[name], "triton")


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(paged_cases(longest_k=70, longest_q=12))
def test_generated(case):
    with poisoned_memory():
        judge_paged(case, "triton")


def test_results_do_not_depend_on_the_longest_length_given():
    """Too small a bound may cost time, never rows."""
    inputs = make_paged_inputs(NAMED["mixed"])
    given = [inputs.evaluate("triton", max_seqlen_q=n)["lse"] for n in (None, 9, 1)]
    for lse in given[1:]:
        torch.testing.assert_close(lse, given[0])


@pytest.mark.parametrize("heads", (1, 2))
def test_wrong_tables_and_edges_stay_inside(heads, poison):
    """Contents that are wrong give some rows, whatever they are: poison around every tensor would show what was read there."""
    inputs = make_paged_inputs(PagedCase(heads_k=heads, lens_q=(3, 2), lens_k=(30, 20)))
    caches = {n: torch.randn(4, 16, heads, 64) for n in ("k_cache", "v_cache")}
    huge = torch.iinfo(torch.int32).max
    for edges, used, entry in (
        ([-5, huge, 2], [huge, -huge], huge),
        ([4, 1, 3], [0, huge], -huge),
        ([0, huge, huge], [huge, huge], -1),
    ):
        out, lse = flashsci.paged_attention(
            torch.randn(5, heads, 64),
            **caches,
            block_table=torch.full((2, 3), entry, dtype=torch.int32),
            seqused_k=torch.tensor(used, dtype=torch.int32),
            cu_seqlens_q=torch.tensor(edges, dtype=torch.int32),
            return_lse=True,
            backend="triton",
        )
        assert out.isfinite().all() and not lse.isnan().any()
    assert inputs.evaluate("triton")["out"].isfinite().all()


def test_nothing_to_do():
    tables = dict(
        block_table=torch.zeros(0, 1, dtype=torch.int32),
        seqused_k=torch.zeros(0, dtype=torch.int32),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
    )
    cache = torch.randn(2, 16, 1, 64)
    out, lse = flashsci.paged_attention(
        torch.randn(3, 2, 64), cache, cache, **tables, return_lse=True, backend="triton"
    )
    assert (out == 0).all() and (lse == -torch.inf).all()
    none = torch.zeros(0, 1, 64)
    flashsci.write_kv_cache(none, none, cache, cache, torch.zeros(0).long(), backend="triton")


def test_out_of_a_serving_engine():
    """A slice of a larger buffer is filled and nothing else."""
    inputs = make_paged_inputs(NAMED["mixed"])
    whole = torch.zeros(len(inputs.q), 6, 3 * 32, dtype=torch.bfloat16)
    inputs.evaluate("triton", out=whole[..., 32:64])
    assert torch.equal(whole[..., 32:64], inputs.evaluate("triton")["out"])
    assert not whole[..., :32].any() and not whole[..., 64:].any()


def test_ops_pass_opcheck():
    inputs = make_paged_inputs(NAMED["decode"])
    o = inputs.options
    tensors = (
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        o["block_table"].contiguous(),
        o["seqused_k"],
        o["cu_seqlens_q"],
    )
    scalars = paged_ops.PagedScalars(-1, 0.1, 0.0, -1, 0, True)
    op = torch.ops.flashsci.triton_paged_attention.default
    arguments = (*tensors, None, None, None, torch.zeros_like(inputs.q), *scalars)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_is_refused():
    given = dict(
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seqused_k=torch.zeros(1, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        backend="triton",
    )
    for dtype, dim, message in ((torch.float64, 64, "float64"), (torch.float32, 257, "up to 256")):
        cache = torch.zeros(1, 16, 1, dim, dtype=dtype)
        with pytest.raises(flashsci.BackendError, match=message):
            flashsci.paged_attention(torch.zeros(1, 1, dim, dtype=dtype), cache, cache, **given)
