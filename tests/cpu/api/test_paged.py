"""Paged attention and the cache update: what they mean, what they refuse, and generated calls against the fp64 oracle."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch

import flashsci
from flashsci.api import paged
from flashsci.backends import reference_paged
from flashsci.testing import PagedCase, PagedVariant, embed, judge_paged, make_paged_inputs
from flashsci.testing.bounds import exact_matmul

hypothesis = pytest.importorskip("hypothesis")

PAGE, HEADS, DIM = 16, 2, 8


def call(**changes):
    """Arguments of a small call: a decode and a prompt of three."""
    given = dict(
        q=torch.randn(4, 4, DIM),
        k_cache=torch.randn(5, PAGE, HEADS, DIM),
        v_cache=torch.randn(5, PAGE, HEADS, DIM),
        block_table=torch.tensor([[3, 1], [4, 0]], dtype=torch.int32),
        seqused_k=torch.tensor([20, 3], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 4], dtype=torch.int32),
    )
    return given | changes


def row_by_row(given, causal=True, window=(None, None), softcap=None, scale=DIM**-0.5, sink=None):
    """Every row by itself, key after key, from the definition."""
    q, out, lse = given["q"].double(), [], []
    edges, used = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
    for n, (first, last) in enumerate(itertools.pairwise(edges)):
        for i in range(last - first):
            diagonal = used[n] - (last - first) + i
            right = 0 if causal else window[1]
            keys = [
                j
                for j in range(used[n])
                if (right is None or j <= diagonal + right) and (window[0] is None or j >= diagonal - window[0])
            ]
            where = [(given["block_table"][n, j // PAGE], j % PAGE) for j in keys]
            for h in range(q.shape[1]):
                hk = h // (q.shape[1] // HEADS)
                s = [scale * (q[first + i, h] @ given["k_cache"][w][hk].double()) for w in where]
                s = [softcap * torch.tanh(x / softcap) for x in s] if softcap else s
                whole = torch.stack([*s, *([] if sink is None else [sink[h].double()])] or [torch.tensor(-torch.inf)])
                lse.append(whole.logsumexp(0))
                rows = [
                    torch.exp(x - lse[-1]) * given["v_cache"][w][hk].double() for x, w in zip(s, where, strict=True)
                ]
                out.append(sum(rows, torch.zeros(DIM).double()))
    shape = edges[-1], q.shape[1]
    return torch.stack(out).view(*shape, DIM), torch.stack(lse).view(shape).T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": (2, None)},
        {"causal": False, "window": (3, 1)},
        {"softcap": 2.0},
        {"scale": 0.5, "sink": torch.tensor([0.0, 3.0, -torch.inf, 20.0])},
    ],
)
def test_means_what_it_says(options):
    given = call(q=torch.randn(4, 4, DIM).double())
    given |= {n: given[n].double() for n in ("k_cache", "v_cache")}
    if "sink" in options:
        options = options | {"sink": options["sink"].double()}
    out, lse = flashsci.paged_attention(**given, **options, return_lse=True)
    torch.testing.assert_close((out, lse), row_by_row(given, **options))


def test_rows_without_keys():
    """The first of more queries than keys, a sequence that has none, and rows of no sequence."""
    given = call(
        q=torch.full((7, 4, DIM), torch.nan),
        seqused_k=torch.tensor([2, 0], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 3, 5], dtype=torch.int32),
    )
    given["q"][:5] = torch.randn(5, 4, DIM)
    sink = torch.tensor([0.0, 1.0, -torch.inf, -5.0])
    for options, empty in (({}, torch.full((4,), -torch.inf)), ({"sink": sink}, sink)):
        out, lse = flashsci.paged_attention(**given, **options, return_lse=True)
        assert (out[[0, 3, 4, 5, 6]] == 0).all() and out[1:3].isfinite().all()
        assert (lse[:, [0, 3, 4]] == empty[:, None]).all()
        assert (lse[:, 5:] == -torch.inf).all()


def test_out_is_filled():
    given = call()
    whole = torch.full((4, 9, DIM), torch.nan)
    out = whole[:, 3:7]
    found = flashsci.paged_attention(**given, out=out)
    assert found is out
    assert torch.equal(out, flashsci.paged_attention(**given))
    assert whole[:, :3].isnan().all() and whole[:, 7:].isnan().all()


def test_table_is_clamped():
    given = call(block_table=torch.tensor([[99, -3], [4, 0]], dtype=torch.int32))
    inside = call(**given | {"block_table": torch.tensor([[4, 0], [4, 0]], dtype=torch.int32)})
    assert torch.equal(flashsci.paged_attention(**given), flashsci.paged_attention(**inside))
    given["seqused_k"] = torch.tensor([10**9, -5], dtype=torch.int32)
    inside["seqused_k"] = torch.tensor([2 * PAGE, 0], dtype=torch.int32)
    assert torch.equal(flashsci.paged_attention(**given), flashsci.paged_attention(**inside))


def test_agrees_with_packed_attention():
    """One page for each sequence is a packed call."""
    q, k, v = torch.randn(3, 20, 2, DIM).unbind(0)
    edges = torch.tensor([0, 16, 20], dtype=torch.int32)
    caches = (torch.full((2, 16, 2, DIM), torch.nan) for _ in range(2))
    k_cache, v_cache = caches
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache[1], cache[0, :4] = x[:16], x[16:]
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    found = flashsci.paged_attention(q, k_cache, v_cache, block_table=table, seqused_k=edges.diff(), cu_seqlens_q=edges)
    wanted = flashsci.varlen_attention(q, k, v, edges, causal=True, align="lower_right", backend="reference")
    torch.testing.assert_close(found, wanted)


@hypothesis.settings(max_examples=40)
@hypothesis.given(flashsci.testing.paged_cases(longest_k=90, longest_q=20))
def test_generated(case):
    judge_paged(case, "reference")


def test_the_test_itself():
    """A result times 1.01, a wrong page and a scale forgotten all fail."""
    case = PagedCase(PagedVariant("bfloat16", "float8_e4m3fn"), 3, (1, 9), (40, 33), 2, 2, scales="heads")
    inputs = make_paged_inputs(case)
    judge, right = inputs.judge(fused=True), inputs.evaluate("reference")
    judge.require(right)
    assert judge.problems({"out": right["out"] * 1.01, "lse": right["lse"]})
    wrong = inputs.options["block_table"].clone()
    wrong[0, 1] = wrong[1, 1]
    k_scale = inputs.options["k_scale"].flip(0)
    for change in ({"block_table": wrong}, {"k_scale": k_scale}, {"v_scale": None}):
        assert judge.problems(inputs.evaluate("reference", **change)), change


WRONG = (
    (TypeError, "block_table must be a torch.Tensor, got list", {"block_table": [[0]]}),
    (TypeError, "block_table must be int32, got torch.int64; call .to", {"block_table": torch.zeros(2, 2).long()}),
    (TypeError, "cu_seqlens_q must be int32", {"cu_seqlens_q": torch.zeros(3).long()}),
    (ValueError, r"so seqused_k must be \[2\] and cu_seqlens_q \[3\], got \[3\] and \[3\]", {"seqused_k": torch.zeros(3).int()}),
    (ValueError, r"block_table must be \[N, max_pages\]", {"block_table": torch.zeros(2, 0).int()}),
    (ValueError, r"q must be packed, \[T, Hq, D\]", {"q": torch.zeros(1, 4, 4, DIM)}),
    (ValueError, "same head dim", {"q": torch.zeros(4, 4, 16)}),
    (ValueError, "multiple of the number of key heads", {"q": torch.zeros(4, 3, DIM)}),
    (TypeError, "both be torch.float32, float8_e4m3fn or float8_e5m2, got torch.float16", {"k_cache": torch.zeros(5, PAGE, HEADS, DIM).half()}),
    (TypeError, r"cache.view\(torch.float8_e4m3fn\)", {n: torch.zeros(5, PAGE, HEADS, DIM, dtype=torch.uint8) for n in ("k_cache", "v_cache")}),
    (ValueError, "agree in all but the last", {"k_cache": torch.zeros(4, PAGE, HEADS, DIM)}),
    (ValueError, "last dim of the caches must be contiguous", {"k_cache": torch.zeros(5, PAGE, DIM, HEADS).mT}),
    (ValueError, "at least one page", {n: torch.zeros(0, PAGE, HEADS, DIM) for n in ("k_cache", "v_cache")}),
    (TypeError, "block_table must be int32, got torch.bool; call .to", {"block_table": torch.zeros(2, 2).bool()}),
    (TypeError, "sink must have q's dtype .* got torch.bool", {"sink": torch.zeros(4).bool()}),
    (TypeError, "sink must have q's dtype", {"sink": torch.zeros(4).double()}),
    (ValueError, r"sink must be one logit per query head, \[Hq\] = \[4\], got \[2\]", {"sink": torch.zeros(2)}),
    (TypeError, "k_scale must be a torch.Tensor or None, got float", {"k_scale": 0.5}),
    (TypeError, "k_scale must be float32", {"k_scale": torch.ones(()).half()}),
    (ValueError, r"v_scale must be one number .* or \[N, Hk\] = \[2, 2\], got \[2\]", {"v_scale": torch.ones(2)}),
    (ValueError, r"out must be torch.float32 \[4, 4, 8\]", {"out": torch.zeros(4, 4, 4)}),
    (ValueError, "q requires one; call inside torch.no_grad", {"q": torch.zeros(4, 4, DIM, requires_grad=True)}),
    (ValueError, "window must be", {"window": 5}),
    (TypeError, "max_seqlen_q must be an int", {"max_seqlen_q": 1.0}),
    (flashsci.BackendError, "SDPA takes no paged cache", {"backend": "sdpa"}),
    (ValueError, "unknown backend", {"backend": "nonsense"}),
)  # fmt: skip


@pytest.mark.parametrize("error, message, changes", WRONG)
def test_refusals(error, message, changes):
    with pytest.raises(error, match=message):
        flashsci.paged_attention(**call(**changes))


def test_parameters_that_require_grad_are_fine_without_gradients():
    sink = torch.nn.Parameter(torch.zeros(4))
    with torch.no_grad():
        flashsci.paged_attention(**call(sink=sink))


def test_calls_alike_are_planned_once(monkeypatch):
    """Checks are a plan's: a call that differs in anything which they or the choice look at has its own."""
    counted = []
    describe = paged.describe
    monkeypatch.setattr(paged, "describe", lambda *given: counted.append(1) or describe(*given))
    monkeypatch.setattr(paged, "plans", {})
    monkeypatch.setattr(paged, "keep", paged.plans.setdefault)

    def plans_of(**changes):
        before = len(counted)
        for _ in range(3):
            found = flashsci.paged_attention(**call(**changes))
        return len(counted) - before, found

    assert plans_of()[0] == 1 and plans_of()[0] == 0
    strided = torch.randn(DIM, 4, 4).permute(2, 1, 0)
    assert plans_of(q=strided)[0] == 1
    given = call(q=strided)
    again = [flashsci.paged_attention(**given) for _ in range(2)]
    plain = flashsci.paged_attention(**given | {"q": strided.contiguous()})
    assert all(torch.equal(x, plain) for x in again), "copied each time"
    for changes in (
        {"causal": False}, {"window": (3, 0)}, {"softcap": 2.0}, {"scale": 0.5}, {"max_seqlen_q": 3}, {"return_lse": True},
        {"sink": torch.zeros(4)}, {"out": torch.empty(4, 4, DIM)}, {"backend": "reference"},
        {"block_table": torch.tensor([[3, 1, 0], [4, 0, 0]], dtype=torch.int32)},
    ):  # fmt: skip
        assert plans_of(**changes)[0] == 1, changes
    with flashsci.use_backend("triton"):
        assert plans_of()[0] == 1


def test_a_plan_without_gradients_serves_no_call_with_them():
    given = call(q=torch.randn(4, 4, DIM, requires_grad=True))
    with torch.no_grad():
        flashsci.paged_attention(**given)
    for _ in range(2):
        with pytest.raises(ValueError, match="no gradients"):
            flashsci.paged_attention(**given)


def test_explain():
    given = call()
    tensors = [given.pop(n) for n in ("q", "k_cache", "v_cache")]
    found = flashsci.explain(*tensors, **given)
    assert found.chosen == "reference" and "paged" in found.reasons["sdpa"]
    assert "off the GPU" in str(found)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", [None, (), (HEADS,)])
def test_write_kv_cache_bitwise(cache, scales):
    """Each token by itself; slots that are -1 or out of range, and all that is not named, stay as they were."""
    tokens, pages = 11, 3
    key, value = (embed(20 * torch.randn(tokens + 2, HEADS, d), pad={1: 3}).bfloat16() for d in (DIM, 2 * DIM))
    key[4] = 1e5  # beyond e4m3
    joint = torch.zeros(pages, HEADS, PAGE, 3 * DIM, dtype=cache)
    joint.view(torch.uint8).random_()
    k_cache, v_cache = joint.transpose(1, 2).split((DIM, 2 * DIM), -1)
    slots = torch.randperm(pages * PAGE)[:tokens]
    slots[2], slots[5], slots[7] = -1, pages * PAGE, -(2**62)
    k_scale, v_scale = (None, None) if scales is None else (torch.rand(2, *scales) + 0.5).unbind(0)
    wanted = joint.clone()
    k_wanted, v_wanted = wanted.transpose(1, 2).split((DIM, 2 * DIM), -1)
    for t, slot in enumerate(slots.tolist()):
        if not 0 <= slot < pages * PAGE:
            continue
        for x, to, scale in ((key, k_wanted, k_scale), (value, v_wanted, v_scale)):
            row = x[t].float() if scale is None else x[t].float() / scale.reshape(-1, 1)
            most = torch.finfo(cache).max
            to[slot // PAGE, slot % PAGE] = row.clamp(-most, most).to(cache)
    flashsci.write_kv_cache(key, value, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(joint.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(
    "error, message, changes",
    [
        (TypeError, "slot_mapping must be int64", {"slot_mapping": torch.zeros(4).int()}),
        (ValueError, "a slot for each row of key", {"slot_mapping": torch.zeros(5).long()}),
        (ValueError, r"as the caches have it", {"key": torch.zeros(4, 1, DIM)}),
        (ValueError, r"key and value must be \[T, Hk, D\]", {"value": torch.zeros(3, HEADS, DIM)}),
        (ValueError, r"k_scale must be one number .* or \[Hk\]", {"k_scale": torch.zeros(3)}),
        (ValueError, "k_cache require", {"k_cache": torch.zeros(5, PAGE, HEADS, DIM, requires_grad=True)}),
    ],
)
def test_write_kv_cache_refusals(error, message, changes):
    given = dict(
        key=torch.zeros(4, HEADS, DIM),
        value=torch.zeros(4, HEADS, DIM),
        slot_mapping=torch.zeros(4).long(),
    )
    given |= dict.fromkeys(("k_cache", "v_cache"), torch.zeros(5, PAGE, HEADS, DIM)) | changes
    scales = {n: given.pop(n) for n in ("k_scale",) if n in given}
    order = ("key", "value", "k_cache", "v_cache", "slot_mapping")
    with pytest.raises(error, match=message):
        flashsci.write_kv_cache(*(given[n] for n in order), **scales)


def test_compiles_without_graph_breaks():
    given = call()

    def step(q, k_cache, v_cache, slots, **tables):
        flashsci.write_kv_cache(q[:, :HEADS], q[:, HEADS:], k_cache, v_cache, slots)
        return flashsci.paged_attention(q, k_cache, v_cache, return_lse=True, **tables)

    slots = torch.tensor([3 * PAGE, -1, 4 * PAGE, 4 * PAGE + 1])
    twin = {n: x.clone() for n, x in given.items()}
    wanted = step(slots=slots, **given)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(slots=slots, **twin)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(twin["k_cache"], given["k_cache"])


def test_ops_pass_opcheck():
    given = call()
    scalars = (-1, 0.3, 0.0, -1, 0, True)
    out = torch.empty(4, 4, DIM)
    op = torch.ops.flashsci.reference_paged_attention.default
    torch.library.opcheck(
        op, (*given.values(), None, None, None, out, *scalars), test_utils=("test_schema", "test_faketensor")
    )
    assert reference_paged.OPS is not None
    assert re.search("Tensor", str(op._schema))


def test_oracle_computes_in_double():
    """An 8-bit cache under queries in fp64: what the caches hold times the scales, and no rounding."""
    case = PagedCase(PagedVariant("float32", "float8_e4m3fn"), scales="one")
    inputs = make_paged_inputs(case)
    inputs.q = inputs.q.double()
    with exact_matmul():
        inputs.judge(fused=False).require(inputs.evaluate("reference"))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_out_shares_no_memory_with_what_is_read(backend):
    """It would be written while that is read: refused before anything is written. Neighbours in a buffer are no neighbours in memory."""
    q, caches = torch.randn(4, 2, 16), torch.randn(3, 16, 2, 32)
    k_cache, v_cache = caches.split(16, -1)
    tables = {
        "block_table": torch.tensor([[2, 0]], dtype=torch.int32),
        "seqused_k": torch.tensor([20], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32),
    }
    call = functools.partial(flashsci.paged_attention, k_cache=k_cache, v_cache=v_cache, **tables, backend=backend)
    expected = call(q.clone())
    for name, out in (
        ("q", q),
        ("q", q.flip(0)[:0].new_empty(0).set_(q.untyped_storage(), 0, (4, 2, 16), (32, 16, 1))),
        ("k_cache", caches[0, :4, :, :16]),
        ("v_cache", caches[2, 3:7, :, 16:]),
    ):
        before = q.clone(), caches.clone()
        with pytest.raises(ValueError, match=f"out shares memory with {name}, .*clone"):
            call(q, out=out)
        assert torch.equal(q, before[0]) and torch.equal(caches, before[1])
    with pytest.raises(ValueError, match="elements of it share memory"):
        call(q, out=torch.zeros(1, 2, 16).expand(4, 2, 16))
    joint = torch.zeros(4, 2, 32)
    joint[..., :16] = q
    found = call(joint[..., :16], out=joint[..., 16:])
    torch.testing.assert_close(found, expected)
    assert torch.equal(joint[..., :16], q)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_updates_that_read_what_they_write(backend):
    caches, slots = torch.randn(3, 16, 2, 32), torch.tensor([17, 1])
    k_cache, v_cache = caches.split(16, -1)
    key, value = torch.randn(2, 2, 2, 16).unbind(0)
    write = functools.partial(flashsci.write_kv_cache, backend=backend)
    with pytest.raises(ValueError, match=r"k_cache shares memory with key, .*clone"):
        write(k_cache[0, :2], value, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"v_cache shares memory with value, .*clone"):
        write(key, v_cache[1, 3:5], k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
        write(key, value, k_cache, caches[..., 1:17], slots)
    with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
        write(key, value, k_cache, k_cache, slots)
    write(key, key, k_cache, k_cache, slots)  # one cache of what is both
    assert torch.equal(k_cache[1, 1], key[0]) and torch.equal(k_cache[0, 1], key[1])
    before = caches.clone()
    write(key, value, k_cache, v_cache, slots)  # views that interleave
    assert torch.equal(v_cache[1, 1], value[0]) and torch.equal(caches[2], before[2])
