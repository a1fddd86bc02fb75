"""Attention maps of packed calls: every sequence has the map of a dense call of its own, values and gradients."""

from __future__ import annotations

import pytest
import torch

import flashsci
from tests.support.map_calls import packed

ROWS, KEYS = (3, 0, 5, 2), (4, 2, 0, 7)
EVERYTHING = dict(entropy=True, largest_score=True, key_sum=True, top_k=3)
PAIRS = sum(m * n for m, n in zip(ROWS, KEYS, strict=True))
OPTIONS = {
    "none": {},
    "causal": dict(causal=True, align="lower_right"),
    "window": dict(window=(2, 1)),
    "bias of pairs": dict(bias=torch.linspace(-2, 2, 4 * PAIRS).view(4, PAIRS).double()),
    "bias of keys": dict(bias=torch.linspace(-2, 2, 13).view(1, 13).double()),
    "weights": dict(key_weight=torch.linspace(0, 1, 13).double()),
    "slopes": dict(alibi_slopes=torch.linspace(0, 1, 16).view(4, 4).double()),
    "softcap": dict(softcap=0.5),
}


def called(name):
    """(arguments of a packed map, one dict of a dense map for each sequence, the q and k of all)."""
    q, k, first, second = packed(ROWS, KEYS, 8)
    q, k = q.requires_grad_(), k.requires_grad_()
    options = OPTIONS[name]
    _, lse = flashsci.varlen_attention(q, k, k, first, second, return_lse=True, backend="reference", **options)
    parts, pairs = [], 0
    for n, (m, keys) in enumerate(zip(ROWS, KEYS, strict=True)):
        i, j = first[n].item(), second[n].item()
        own = dict(options)
        if name == "bias of pairs":
            own["bias"] = options["bias"][:, pairs : pairs + m * keys].view(4, m, keys)
        if name == "bias of keys":
            own["bias"] = options["bias"][:, None, j : j + keys]
        if name == "weights":
            own["key_weight"] = options["key_weight"][j : j + keys]
        if name == "slopes":
            own["alibi_slopes"] = options["alibi_slopes"][n]
        pairs += m * keys
        rows = dict(q=q[i : i + m].transpose(0, 1), k=k[j : j + keys].transpose(0, 1), lse=lse[:, i : i + m])
        parts.append(rows | own)
    whole = dict(q=q, k=k, lse=lse, cu_seqlens_q=first, cu_seqlens_k=second) | options
    return whole, parts, (q, k)


PLACES = {"all": {}, "last": dict(rows=slice(-1, None)), "block": dict(rows=slice(1, 3), columns=slice(0, 2))}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_of_each_sequence(name, average, places):
    whole, parts, leaves = called(name)
    found = flashsci.attention_weights(**whole, **places, average_heads=average)
    due = [flashsci.attention_weights(**part, **places, average_heads=average) for part in parts]
    assert len(found) == len(due) == 4
    torch.testing.assert_close(list(found), due, rtol=0, atol=0)
    gradients = (torch.autograd.grad(sum(x.sin().sum() for x in of), leaves, retain_graph=True) for of in (found, due))
    torch.testing.assert_close(*gradients)


def test_a_place_that_a_sequence_lacks():
    """Of a sequence without keys there is no first one."""
    whole, _, _ = called("none")
    with pytest.raises(IndexError):
        flashsci.attention_weights(**whole, columns=torch.tensor([0]))


@pytest.mark.parametrize("name", OPTIONS)
def test_statistics_of_each_sequence(name):
    whole, parts, leaves = called(name)
    found = flashsci.attention_statistics(**whole, **EVERYTHING)
    most = [min(3, keys) for keys in KEYS]
    due = [
        flashsci.attention_statistics(**part, **EVERYTHING | dict(top_k=n)) for part, n in zip(parts, most, strict=True)
    ]
    for field in ("entropy", "largest_score", "key_sum"):
        torch.testing.assert_close(
            getattr(found, field), torch.cat([getattr(x, field) for x in due], -1), rtol=0, atol=0
        )
    edge = 0
    for m, n, own in zip(ROWS, most, due, strict=True):
        rows = slice(edge, edge + m)
        values, indices = found.top_values[:, rows], found.top_indices[:, rows]
        assert (values[..., n:] == 0).all() and (indices[..., n:] == -1).all()
        if n:
            assert torch.equal(values[..., :n], own.top_values) and torch.equal(indices[..., :n], own.top_indices)
        edge += m
    got = torch.autograd.grad(found.entropy.sum() + found.key_sum.sin().sum(), leaves, retain_graph=True)
    wanted = torch.autograd.grad(sum(x.entropy.sum() + x.key_sum.sin().sum() for x in due), leaves)
    torch.testing.assert_close(got, wanted)


def test_one_offset_serves_both():
    q, k, first, _ = packed((3, 4), (3, 4), 8)
    _, lse = flashsci.varlen_attention(q, k, k, first, return_lse=True)
    alone = flashsci.attention_statistics(q, k, lse, cu_seqlens_q=first, entropy=True)
    both = flashsci.attention_statistics(q, k, lse, cu_seqlens_q=first, cu_seqlens_k=first.clone(), entropy=True)
    assert torch.equal(alone.entropy, both.entropy)


def test_no_sequences():
    q, k, first, second = packed((), (), 8)
    found = flashsci.attention_statistics(
        q, k, q.new_zeros(4, 0), cu_seqlens_q=first, cu_seqlens_k=second, **EVERYTHING
    )
    assert [list(x.shape) for x in found] == [[4, 0], [4, 0], [4, 0], [4, 0, 3], [4, 0, 3]]
    assert flashsci.attention_weights(q, k, q.new_zeros(4, 0), cu_seqlens_q=first, cu_seqlens_k=second) == ()


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (dict(mask=torch.ones(3, 3, dtype=torch.bool)), ValueError, "packed maps take no mask; .* bias of pairs"),
        (dict(lse=torch.zeros(10, 4).double()), ValueError, r"\[Hq, Tq\] = \[4, 10\], got \[10, 4\]"),
        (dict(cu_seqlens_q=torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)), ValueError, "cu_seqlens_q must rise"),
        (dict(cu_seqlens_q=None), ValueError, "cu_seqlens_k .* needs cu_seqlens_q"),
        (dict(bias=torch.zeros(4, 5).double()), ValueError, "per-pair bias"),
    ],
)
def test_refused(change, kind, says):
    whole, _, _ = called("none")
    with pytest.raises(kind, match=says):
        flashsci.attention_weights(**{**whole, **change})
    with pytest.raises(kind, match=says):
        flashsci.attention_statistics(**{**whole, **change}, entropy=True)


@pytest.mark.parametrize(
    "name, dynamic",
    [("none", False), ("none", True), ("bias of keys", False), ("bias of pairs", True), ("weights", True)],
)
def test_compiled_for_lengths_that_offsets_hold(name, dynamic):
    """One graph serves other lengths of as many sequences, also empty ones and those with fewer keys than top_k."""
    whole, _, _ = called(name)
    whole["lse"] = whole["lse"] + 8  # as of many more keys: P stays below 1, where several would be equal
    leaves = [whole[n].detach().requires_grad_() for n in ("q", "k", "lse")]
    options = {n: x for n, x in whole.items() if n not in ("cu_seqlens_q", "cu_seqlens_k")}
    options.update(zip(("q", "k", "lse"), leaves, strict=True))

    def both(first, second):
        given = options | dict(cu_seqlens_q=first, cu_seqlens_k=second)
        statistics = flashsci.attention_statistics(**given, **EVERYTHING)
        return *flashsci.attention_weights(**given), *statistics

    torch._dynamo.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    edges = [(whole["cu_seqlens_q"], whole["cu_seqlens_k"])]
    if name != "bias of pairs":
        edges.append(tuple(torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1, 8, 10], [0, 0, 1, 12, 13])))
    for n, given in enumerate(edges):
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            found = compiled(*given)
        due = both(*given)
        values = [x for x in range(len(due)) if due[x].is_floating_point()]
        torch.testing.assert_close([found[x] for x in values], [due[x] for x in values], rtol=1e-9, atol=1e-11)
        hidden = due[-2] == 0  # equal probabilities come in any order
        torch.testing.assert_close(found[-1].masked_fill(hidden, 0), due[-1].masked_fill(hidden, 0))
        gradients = (
            torch.autograd.grad(sum(of[x].sin().sum() for x in values if x != 5), leaves) for of in (found, due)
        )
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


def test_mapped_offsets_are_refused_where_their_contents_are_not_checked(monkeypatch):
    """As on a GPU, and after a call that has left a plan."""
    from flashsci.api import varlen
    from flashsci.call import arguments

    monkeypatch.setattr(varlen, "contents_are_seen", lambda *given: False)
    monkeypatch.setattr(arguments, "contents_are_seen", lambda *given: False)
    whole, _, _ = called("none")
    q, k, lse, first, second = (whole[n].detach() for n in ("q", "k", "lse", "cu_seqlens_q", "cu_seqlens_k"))

    def attention(first, second):
        return flashsci.varlen_attention(q, k, k, first, second, backend="reference")

    def weights(first, second):
        return flashsci.attention_weights(q, k, lse, cu_seqlens_q=first, cu_seqlens_k=second)

    for call in (attention, weights):
        call(first, second)
        for n, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
            given = [first, second]
            given[n] = torch.stack([given[n]] * 2)
            with pytest.raises(ValueError, match=f"torch.vmap maps {name}, whose values the host reads"):
                torch.func.vmap(call, tuple(0 if m == n else None for m in range(2)))(*given)
