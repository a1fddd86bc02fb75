"""deterministic="batch" on a GPU: Triton's kernels, dense, packed and paged, bit for bit, gradients too."""

from __future__ import annotations

import pytest
import torch

import flashsci

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BATCH = dict(deterministic="batch")
OPTIONS = {"none": {}, "causal": dict(causal=True), "window": dict(window=(100, 9)), "sink": dict(sink=torch.randn(8))}


def differentiated(call, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = call(*leaves)
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [out.detach(), lse.detach()])


def rows(length, dtype, dim, *lead):
    return [torch.randn(*lead, h, length, dim, device="cuda", dtype=dtype) for h in (8, 2, 2)]


def options_of(name, dtype):
    return {n: x.to("cuda", dtype) if torch.is_tensor(x) else x for n, x in OPTIONS[name].items()}


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_member_of_a_batch_alone(name, dtype, dim):
    whole = rows(300, dtype, dim, 65)
    options = options_of(name, dtype)

    def call(*x):
        return flashsci.attention(*x, **options, **BATCH, return_lse=True)

    every = differentiated(call, whole)
    for n in (0, 37):
        for x, y in zip(every, differentiated(call, [x[n : n + 1].clone() for x in whole]), strict=True):
            assert torch.equal(x[n : n + 1], y)


@pytest.mark.parametrize("own", [20, 64, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_packed_sequence_with_other_neighbours(name, dtype, own):
    mine = [x.transpose(0, 1) for x in rows(own, dtype, 64)]
    options = options_of(name, dtype)

    def call(before, after):
        lengths, start = [*before, own, *after], sum(before)
        edges = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        every = [x.transpose(0, 1).contiguous() for x in rows(sum(lengths), dtype, 64)]
        for x, y in zip(every, mine, strict=True):
            x[start : start + own] = y
        found = differentiated(
            lambda *x: flashsci.varlen_attention(*x, edges, **options, **BATCH, return_lse=True), every
        )
        cut = slice(start, start + own)
        return found[0][cut], found[1][:, cut], *(x[cut] for x in found[2:])

    alone = call((), ())
    for before, after in (((3,), ()), ((2000, 0, 17), (5,) * 40), ((), (9000,))):
        for x, y in zip(alone, call(before, after), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("queries", [1, 40])
def test_a_paged_sequence_with_other_neighbours(queries, cache):
    length, page = 1500, 16
    k_cache, v_cache = torch.randn(2, 900, page, 2, 64, device="cuda").to(cache)
    q = torch.randn(queries, 8, 64, device="cuda", dtype=torch.bfloat16)

    def call(beside):
        most = max(length, *(keys for _, keys in beside), 1)
        table = torch.randint(100, 900, (1 + len(beside), -(-most // page)), device="cuda", dtype=torch.int32)
        table[0, :94] = torch.arange(94, device="cuda")
        used = torch.tensor([length, *(keys for _, keys in beside)], device="cuda", dtype=torch.int32)
        edges = torch.tensor([0, queries, *(n for n, _ in beside)], device="cuda").cumsum(0).to(torch.int32)
        every = torch.cat([q, *(torch.randn(n, 8, 64, device="cuda", dtype=torch.bfloat16) for n, _ in beside)])
        out, lse = flashsci.paged_attention(
            every, k_cache, v_cache, block_table=table, seqused_k=used, cu_seqlens_q=edges, return_lse=True, **BATCH
        )
        return out[:queries], lse[:, :queries]

    alone = call([(0, 0)])
    for beside in ([(1, 40)], [(1, 9000)] * 3, [(700, 700), (0, 9), (1, 5)] * 20):
        for x, y in zip(alone, call(beside), strict=True):
            assert torch.equal(x, y)
