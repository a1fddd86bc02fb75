"""Caches in pages, packed queries beside a cache, and unused rows, of flash_attn's functions over flashsci: by the formula in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

import flashsci
from flashsci.compat.flash_attn import fa2, fa3, steps
from flashsci.testing import Inputs, Judge

INT = torch.int32
HEADS_Q, HEADS_K, DIM, DIM_V = 4, 2, 8, 5


def seen(seq_q, seq_k, causal=False, window=(-1, -1)):
    i, j = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)
    left, right = window[0], 0 if causal else window[1]
    mask = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if left >= 0:
        mask &= j >= i - left
    return mask & (j <= i + right) if right >= 0 else mask


def offsets(lengths):
    return pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(INT)


def alibi(slopes, seq_q, seq_k):
    i, j = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)
    return -slopes[..., None, None] * (i - j).abs()


class Pages:
    """A cache of pages in random order, NaN in all rows but those in use, and the same rows sequence by sequence."""

    def __init__(self, used, page, columns, dtype=torch.float32):
        count = len(used)
        self.used, self.page = used, page
        numbers = torch.randperm(count * columns + 2)[: count * columns]
        self.table = numbers.view(count, columns).to(INT)
        self.k, self.v = (
            torch.full((count * columns + 2, page, HEADS_K, d), torch.nan, dtype=dtype) for d in (DIM, DIM_V)
        )
        for n, rows in enumerate(used):
            for r in range(rows):
                self.k[self.at(n, r)] = torch.randn(HEADS_K, DIM).to(dtype)
                self.v[self.at(n, r)] = torch.randn(HEADS_K, DIM_V).to(dtype)

    def at(self, n, r):
        return int(self.table[n, r // self.page]), r % self.page

    def rows(self, n, stop, start=0):
        """k and v of a sequence, [rows, Hk, .]."""
        places = [self.at(n, r) for r in range(start, stop)]
        return [torch.stack([x[p] for p in places]) if places else x[:0, 0] for x in (self.k, self.v)]


def judge(q, k, v, out, lse, bias=None, **options):
    """One sequence, [S, H, .]; lse in flash_attn 2's or 3's sign."""
    causal, window = options.pop("causal", False), options.pop("window_size", (-1, -1))
    inputs = Inputs(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        bias=bias,
        mask=seen(q.shape[0], k.shape[0], causal, window),
        options=dict(scale=options.get("softmax_scale"), softcap=options.get("softcap")),
    )
    lse = {} if lse is None else dict(lse=lse.masked_fill(lse == torch.inf, -torch.inf))
    Judge(inputs, fused=False).require(dict(out=out.transpose(0, 1)) | lse)


CALLS = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 1)),
    "causal-window-cap": dict(causal=True, window_size=(4, -1), softcap=2.0, softmax_scale=0.3),
    "no-new": dict(new=0, causal=True),
    "one": dict(seq_q=1, new=1, causal=True),
    "int": dict(lengths=5, causal=True),
    "none": dict(lengths=None, new=0),
    "rows": dict(entries=True, causal=True),
    "rotary": dict(rotary=True, causal=True),
    "rotary-full": dict(rotary=True),
    "leftpad": dict(leftpad=True, causal=True),
}


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("name", CALLS)
def test_cache_in_pages(name, page):
    """The same numbers as a dense cache, and every other row untouched."""
    options = dict(CALLS[name])
    new, seq_q = options.pop("new", 3), options.pop("seq_q", 3)
    lengths = options.pop("lengths", torch.tensor([4, 0, 6], dtype=INT))
    columns = -(-12 // page)
    capacity = columns * page
    used = torch.as_tensor(capacity if lengths is None else lengths).expand(3).tolist()
    by_row = options.pop("entries", False)
    rows = [2, 4, 0] if by_row else [0, 1, 2]
    of_row = [0] * (5 if by_row else 3)
    for n, row in enumerate(rows):
        of_row[row] = used[n]
    cache = Pages(of_row, page, columns)
    entries = torch.tensor(rows, dtype=INT) if by_row else None
    pads = [1, 0, 2] if options.pop("leftpad", False) else [0, 0, 0]
    q, k, v = (
        torch.randn(3, s, h, d) for s, h, d in ((seq_q, HEADS_Q, DIM), (new, HEADS_K, DIM), (new, HEADS_K, DIM_V))
    )
    written = dict(k=k, v=v) if new else {}
    if options.pop("rotary", False):
        angles = torch.outer(torch.arange(20.0), torch.tensor([1.0, 0.3]))
        written.update(rotary_cos=angles.cos(), rotary_sin=angles.sin())
    leftpad = torch.tensor(pads, dtype=INT) if any(pads) else None
    common = dict(cache_seqlens=lengths, cache_leftpad=leftpad, return_softmax_lse=True, **written, **options)
    dense = [torch.stack([x[cache.table[row].long()].flatten(0, 1) for row in rows]) for x in (cache.k, cache.v)]
    before = [x.clone() for x in (cache.k, cache.v)]
    expected, lse_expected = fa2.flash_attn_with_kvcache(q, *dense, **common)
    out, lse = fa2.flash_attn_with_kvcache(
        q, cache.k, cache.v, block_table=cache.table, cache_batch_idx=entries, **common
    )
    for x, old, whole in zip((cache.k, cache.v), before, dense, strict=True):
        changed = torch.zeros(x.shape[:2], dtype=torch.bool)
        for n, row in enumerate(rows):
            for r in range(used[n], used[n] + new):
                changed[cache.at(row, r)] = True
                torch.testing.assert_close(x[cache.at(row, r)], whole[n, r], rtol=0, atol=0)
        torch.testing.assert_close(x[~changed], old[~changed], rtol=0, atol=0, equal_nan=True)
    if "rotary_cos" not in written:  # of rotated queries the dense cache knows, which other tests judge
        for n, row in enumerate(rows):
            keys, values = cache.rows(row, used[n] + new, pads[n])
            judge(q[n], keys, values, out[n], lse[n], **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, lse_expected, rtol=1e-5, atol=1e-5)
    again = fa3.flash_attn_with_kvcache(
        q, before[0], before[1], page_table=cache.table, cache_batch_idx=entries, **common
    )
    assert torch.equal(again[0], out) and again[2:] == (None, None)


@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
def test_pages_with_alibi(shape):
    used, slopes = [4, 1, 6], torch.rand(shape)
    cache = Pages(used, 3, 3, torch.float16)
    q = torch.randn(3, 2, HEADS_Q, DIM).half()
    out = fa2.flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        cache_seqlens=torch.tensor(used, dtype=INT),
        block_table=cache.table,
        causal=True,
        alibi_slopes=slopes,
    )
    for n, rows in enumerate(used):
        keys, values = cache.rows(n, rows)
        judge(q[n], keys, values, out[n], None, alibi(slopes.expand(3, 4)[n], 2, rows), causal=True)


@pytest.mark.parametrize("page", [2, 5])
def test_rows_beyond_the_pages_are_left_out(page):
    cache = Pages([page * 2, 1], page, 2)
    before = cache.k.clone()
    new = torch.randn(2, 1, HEADS_K, DIM), torch.randn(2, 1, HEADS_K, DIM_V)
    fa2.flash_attn_with_kvcache(
        torch.randn(2, 1, HEADS_Q, DIM),
        cache.k,
        cache.v,
        *new,
        cache_seqlens=torch.tensor([page * 2, 1], dtype=INT),
        block_table=cache.table,
    )
    before[cache.at(1, 1)] = new[0][1, 0]
    torch.testing.assert_close(cache.k, before, rtol=0, atol=0, equal_nan=True)


def test_pages_of_the_triton_kernels():
    pytest.importorskip("triton")
    used = [7, 2]
    cache = Pages(used, 4, 3)
    q, k, v = torch.randn(2, 2, HEADS_Q, DIM), torch.randn(2, 2, HEADS_K, DIM), torch.randn(2, 2, HEADS_K, DIM_V)
    with flashsci.use_backend("triton"):
        out, lse = fa2.flash_attn_with_kvcache(
            q, cache.k, cache.v, k, v, cache_seqlens=torch.tensor(used, dtype=INT), block_table=cache.table,
            causal=True, return_softmax_lse=True,
        )  # fmt: skip
    for n, rows in enumerate(used):
        judge(q[n], *cache.rows(n, rows + 2), out[n], lse[n], causal=True)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotary", [None, "local", "full", "positions"])
def test_packed_queries_and_new_keys(paged, rotary):
    """FlashAttention-3's cu_seqlens_q, cu_seqlens_k_new and rotary_seqlens: every sequence as a call of its own."""
    used, lens_q, lens_new = [4, 0, 6], [2, 1, 3], [1, 3, 0]
    q = torch.randn(sum(lens_q), HEADS_Q, DIM)
    k, v = torch.randn(sum(lens_new), HEADS_K, DIM), torch.randn(sum(lens_new), HEADS_K, DIM_V)
    cache = Pages(used, 3, 4)
    k_cache, v_cache = (
        (cache.k, cache.v) if paged else (x[cache.table.long()].flatten(1, 2) for x in (cache.k, cache.v))
    )
    options, places = dict(causal=rotary != "full"), used
    if rotary is not None:
        angles = torch.outer(torch.arange(40.0), torch.tensor([1.0, 0.3]))
        options.update(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=False)
    if rotary == "positions":
        places = [7, 2, 20]
        options["rotary_seqlens"] = torch.tensor(places, dtype=INT)
    before = [x.clone() for x in (k_cache, v_cache)]
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(used, dtype=INT), page_table=cache.table if paged else None,
        cu_seqlens_q=offsets(lens_q), cu_seqlens_k_new=offsets(lens_new), max_seqlen_q=3, return_softmax_lse=True,
        **options,
    )  # fmt: skip
    options.pop("rotary_seqlens", None)
    parts = zip(
        q.split(lens_q), k.split(lens_new), v.split(lens_new), out.split(lens_q), lse.split(lens_q, 1), strict=True
    )
    for n, (qn, kn, vn, found, found_lse) in enumerate(parts):
        caches = [x[cache.table[n].long()].flatten(0, 1)[None] if paged else x[n : n + 1].clone() for x in before]
        if rotary == "positions":
            from flashsci.compat.flash_attn.rotary import apply_rotary

            tables = options["rotary_cos"], options["rotary_sin"]
            turned_q, turned_k = (apply_rotary(x[None], *tables, places[n]) for x in (qn, kn))
            plain = dict(causal=True)
        else:
            turned_q, turned_k, plain = qn[None], kn[None], options
        new = (turned_k, vn[None]) if len(kn) else (None, None)
        if not len(kn) and rotary in ("local", "full"):
            continue  # a call without new keys takes no rotary
        alone, alone_lse = fa2.flash_attn_with_kvcache(
            turned_q, *caches, *new, cache_seqlens=used[n], return_softmax_lse=True, **plain
        )
        torch.testing.assert_close(found, alone[0], rtol=1e-5, atol=1e-5)
        finite = alone_lse[0].masked_fill(alone_lse[0] == torch.inf, -torch.inf)
        torch.testing.assert_close(found_lse, finite, rtol=1e-5, atol=1e-5)


# Packed sequences whose keys are in pages


@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(window_size=(2, 0), softcap=3.0)], ids=str)
def test_varlen_over_pages(options):
    used, lens_q = [5, 1, 0, 8], [3, 1, 2, 4]
    cache = Pages(used, 3, 3)
    q = torch.randn(sum(lens_q), HEADS_Q, DIM)
    arguments = q, cache.k, cache.v, offsets(lens_q), offsets(used), 4, 8
    out, lse, _ = fa2.flash_attn_varlen_func(*arguments, **options, return_attn_probs=True, block_table=cache.table)
    parts = zip(q.split(lens_q), out.split(lens_q), lse.split(lens_q, 1), strict=True)
    for n, (qn, found, found_lse) in enumerate(parts):
        judge(qn, *cache.rows(n, used[n]), found, found_lse, **options)
    alone = fa2.flash_attn_varlen_func(*arguments, **options, block_table=cache.table)
    assert torch.equal(alone, out)
    left, right = options.get("window_size", (-1, -1))
    stepped = steps._flash_attn_varlen_forward(
        *arguments, 0.0, None, options.get("causal", False), left, right, options.get("softcap", 0.0),
        block_table=cache.table,
    )  # fmt: skip
    assert torch.equal(stepped[0], out) and torch.equal(stepped[1], lse)


@pytest.mark.parametrize("options", [dict(), dict(alibi_slopes=torch.rand(HEADS_Q))], ids=["", "alibi"])
def test_varlen_over_pages_has_gradients(options):
    """flash_attn has none there; here they reach the pages."""
    used, lens_q = [5, 1, 0, 8], [3, 1, 2, 4]
    cache = Pages(used, 3, 3, torch.float64)
    q = torch.randn(sum(lens_q), HEADS_Q, DIM).double().requires_grad_()
    k, v = (x.requires_grad_() for x in (cache.k, cache.v))
    out = fa2.flash_attn_varlen_func(
        q,
        k,
        v,
        offsets(lens_q),
        offsets(used),
        4,
        8,
        causal=True,
        block_table=cache.table,
        **options,
    )
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    keys, values = (torch.cat(x) for x in zip(*(cache.rows(n, u) for n, u in enumerate(used)), strict=True))
    expected = fa2.flash_attn_varlen_func(q, keys, values, offsets(lens_q), offsets(used), 4, 8, causal=True, **options)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(found, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(block_table=torch.zeros(3, 2, dtype=INT)), ValueError, "block_table has 3 entries and q 2"),
        (dict(block_table=torch.zeros(2, dtype=INT)), ValueError, r"block_table must be \[B, pages"),
        (dict(block_table=torch.zeros(2, 2)), TypeError, "block_table must be an int32 tensor"),
        (dict(block_table=[[0], [1]]), (TypeError, AttributeError), "block_table|shape"),
        (dict(cache_seqlens=7), ValueError, "holds 6 rows, 8 are needed"),
        (dict(cache_seqlens=torch.zeros(3, dtype=INT)), ValueError, r"cache_seqlens must be \[B\] = \[2\]"),
    ],
    ids=str,
)
def test_errors(change, error, words):
    cache = Pages([0, 0], 3, 2)
    new = torch.zeros(2, 1, HEADS_K, DIM), torch.zeros(2, 1, HEADS_K, DIM_V)
    arguments = dict(cache_seqlens=0, block_table=cache.table) | change
    with pytest.raises(error, match=words):
        fa2.flash_attn_with_kvcache(torch.zeros(2, 1, HEADS_Q, DIM), cache.k, cache.v, *new, **arguments)


# Unused rows of packed sequences


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("of_k", [None, [2, 1, 0, 3]])
@pytest.mark.parametrize("of_q", [[5, 1, 0, 4], [3, 0, 0, 1]])
def test_seqused_q(of_q, of_k, causal):
    lens_q, lens_k = [5, 1, 0, 4], [3, 6, 2, 4]
    q, dout = torch.randn(2, sum(lens_q), HEADS_Q, DIM, dtype=torch.float64)
    k, v = torch.randn(2, sum(lens_k), HEADS_K, DIM, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = offsets(lens_q), offsets(lens_k)
    out, lse = fa3.flash_attn_varlen_func(
        *leaves, cu_q, cu_k, 5, 6, seqused_q=torch.tensor(of_q, dtype=INT),
        seqused_k=None if of_k is None else torch.tensor(of_k, dtype=INT), causal=causal, return_attn_probs=True,
    )  # fmt: skip
    found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    parts = []
    for n, (a, b) in enumerate(zip(of_q, of_k or lens_k, strict=True)):
        rows_q, rows_k = slice(cu_q[n], cu_q[n] + a), slice(cu_k[n], cu_k[n] + b)
        part = flashsci.attention(
            q[rows_q].transpose(0, 1),
            k[rows_k].transpose(0, 1),
            v[rows_k].transpose(0, 1),
            causal=causal,
            align="lower_right",
            backend="reference",
        ).transpose(0, 1)
        parts.append(pad(part, (0, 0, 0, 0, 0, lens_q[n] - a)))
        unused = slice(cu_q[n] + a, cu_q[n + 1])
        assert out[unused].eq(0).all() and lse[:, unused].eq(-torch.inf).all()
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for x, y in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_steps_of_keys_with_both_ends():
    lens_q, lens_k, pads, used = [5, 2], [6, 4], [1, 0], [5, 3]
    q = torch.randn(sum(lens_q), HEADS_Q, DIM)
    k, v = torch.randn(2, sum(lens_k), HEADS_K, DIM)
    out, lse, *_ = steps._flash_attn_varlen_forward(
        q, k, v, offsets(lens_q), offsets(lens_k), 5, 6, 0.0, None, True,
        leftpad_k=torch.tensor(pads, dtype=INT), seqused_k=torch.tensor(used, dtype=INT),
    )  # fmt: skip
    start = 0
    parts = zip(q.split(lens_q), out.split(lens_q), lse.split(lens_q, 1), strict=True)
    for n, (qn, found, found_lse) in enumerate(parts):
        rows = slice(start + pads[n], start + used[n])
        judge(qn, k[rows], v[rows], found, found_lse, causal=True)
        start += lens_k[n]


# 8-bit tensors


def eight_bits(x, scale):
    """x / scale rounded, and what it stands for."""
    small = (x / scale).to(torch.float8_e4m3fn)
    return small, small.float() * scale


@pytest.mark.parametrize("packed", [False, True])
def test_descaled(packed):
    q, k, v = (torch.randn(2, 6, h, 16) for h in (4, 2, 2))
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    per_row = [scales[0].repeat_interleave(2, 1)[:, None, :, None], *(s[:, None, :, None] for s in scales[1:])]
    pairs = [eight_bits(x, s) for x, s in zip((q, k, v), per_row, strict=True)]
    small, wide = zip(*pairs, strict=True)
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    expected = fa2.flash_attn_func(*wide, causal=True)
    if packed:
        cu = offsets([6, 6])
        out = fa3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in small), cu, cu, 6, 6, causal=True, **named).view(
            2, 6, 4, 16
        )
    else:
        out, lse = fa3.flash_attn_func(*small, causal=True, return_attn_probs=True, **named)
        assert lse.shape == (2, 4, 6)
    assert out.dtype == torch.bfloat16
    # P is rounded to 8 bits too: 2^-4 of a weighted mean of |v|.
    assert ((out.float() - expected).abs() <= 2**-4 * wide[2].abs().amax((1, 2, 3), keepdim=True)).all()


def test_descaled_pages():
    used = [5, 3]
    cache = Pages(used, 4, 2)
    scales = [torch.rand(2, HEADS_K) + 0.5 for _ in range(2)]
    small = [x.nan_to_num().to(torch.float8_e4m3fn) for x in (cache.k, cache.v)]
    q = torch.randn(2, 1, HEADS_Q, DIM).bfloat16()
    out = fa3.flash_attn_with_kvcache(
        q,
        *small,
        cache_seqlens=torch.tensor(used, dtype=INT),
        page_table=cache.table,
        k_descale=scales[0],
        v_descale=scales[1],
    )
    cache.k, cache.v = (x.float() for x in small)
    for n, rows in enumerate(used):
        keys, values = ((x * s[n, :, None]) for x, s in zip(cache.rows(n, rows), scales, strict=True))
        exact = fa2.flash_attn_func(q[n : n + 1].float(), keys[None], values[None])
        torch.testing.assert_close(out[n : n + 1].float(), exact, rtol=2**-7, atol=2**-7)
