"""deterministic="batch": the bits of a sequence, and of its gradients, do not depend on what else is in the call."""

from __future__ import annotations

import pytest
import torch

import flashsci

pytestmark = pytest.mark.every(4)

pytest.importorskip("triton")
tilings = pytest.importorskip("flashsci.backends.triton.tilings")
BACKENDS = ("reference", "triton")
BATCH = dict(deterministic="batch")
OPTIONS = {
    "none": lambda b, h, m, n: {},
    "causal": lambda b, h, m, n: dict(causal=True, align="lower_right"),
    "window": lambda b, h, m, n: dict(window=(20, 3)),
    "softcap": lambda b, h, m, n: dict(softcap=2.0),
    "bias": lambda b, h, m, n: dict(bias=torch.randn(b, h, m, n)),
    "shared bias": lambda b, h, m, n: dict(bias=torch.randn(1, h, m, n)),
    "mask": lambda b, h, m, n: dict(mask=torch.rand(b, 1, m, n) < 0.7),
    "weights": lambda b, h, m, n: dict(key_weight=torch.rand(b, 2, n)),
    "slopes": lambda b, h, m, n: dict(alibi_slopes=torch.rand(b, h)),
    "sink": lambda b, h, m, n: dict(sink=torch.randn(h)),
}


def member(x, n):
    """The n-th member of the batch, of a tensor that has one, in memory of its own."""
    if not torch.is_tensor(x) or x.dim() < 2 or x.shape[0] == 1:
        return x
    return x[n : n + 1].clone()


def differentiated(call, leaves):
    """(results, gradients of q, k, v) of a call; cotangents are the results, which need no function that a CPU rounds by the
    place of a number in its vectors."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = call(*leaves)
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [out.detach(), lse.detach()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_member_of_a_batch_alone(backend, name, dtype):
    q, k, v = (torch.randn(3, h, n, 16).to(dtype) for h, n in ((4, 33), (2, 40), (2, 40)))
    options = {
        n: x.to(dtype) if n in ("bias", "key_weight", "sink") else x for n, x in OPTIONS[name](3, 4, 33, 40).items()
    }

    def call(options):
        return lambda *x: flashsci.attention(*x, **options, **BATCH, return_lse=True, backend=backend)

    whole = differentiated(call(options), (q, k, v))
    for n in (0, 2):
        alone = differentiated(call({m: member(x, n) for m, x in options.items()}), [member(x, n) for x in (q, k, v)])
        for x, y in zip(whole, alone, strict=True):
            assert torch.equal(x[n : n + 1], y)


PACKED = ("none", "causal", "window", "softcap", "bias", "slopes", "sink")
# A sink is torch's functions after the kernels, which a CPU rounds by the place of a number in its vectors: on a GPU alone.
CALLS = [(b, n) for b in BACKENDS for n in PACKED if (b, n) != ("triton", "sink")]


@pytest.mark.parametrize("beside", [(3,), (50, 0, 5)], ids=str)
@pytest.mark.parametrize(("backend", "name"), CALLS)
def test_a_packed_sequence_with_other_neighbours(backend, name, beside):
    own = 40
    rows = [torch.randn(own, h, 16) for h in (4, 2, 2)]
    slopes, sink, pairs = torch.rand(4), torch.randn(4), torch.randn(4, own * own)

    def call(before, after):
        lengths = [*before, own, *after]
        edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        start = sum(before)
        each = [torch.randn(sum(lengths), x.shape[1], 16) for x in rows]
        for x, mine in zip(each, rows, strict=True):
            x[start : start + own] = mine
        options = {
            "none": {}, "causal": dict(causal=True), "window": dict(window=(20, 3)), "softcap": dict(softcap=2.0),
            "slopes": dict(alibi_slopes=slopes), "sink": dict(sink=sink),
            "bias": dict(bias=torch.cat([pairs if i == len(before) else torch.randn(4, n * n) for i, n in enumerate(lengths)], 1)),
        }[name]  # fmt: skip
        found = differentiated(
            lambda *x: flashsci.varlen_attention(*x, edges, **options, **BATCH, return_lse=True, backend=backend), each
        )
        cut = slice(start, start + own)
        return found[0][cut], found[1][:, cut], *(x[cut] for x in found[2:])

    alone = call((), ())
    for before, after in ((beside, ()), (beside, beside)):
        for x, y in zip(alone, call(before, after), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_paged_sequence_with_other_neighbours(backend, queries):
    """Neither other sequences, nor their lengths, pages and the width of the table, nor the hint of the longest."""
    length, page = 150, 16
    cache = torch.randn(2, 60, page, 2, 16)
    q = torch.randn(queries, 4, 16)
    pages = torch.arange(1, 1 + -(-length // page), dtype=torch.int32)

    def call(beside, **options):
        others = [(n, keys) for n, keys in beside]
        columns = max([len(pages), *(-(-keys // page) for _, keys in others)])
        table = torch.zeros(1 + len(others), columns, dtype=torch.int32)
        table[0, : len(pages)] = pages
        for i, (_, keys) in enumerate(others):
            table[i + 1, : -(-keys // page)] = torch.arange(20, 20 + -(-keys // page))
        used = torch.tensor([length, *(keys for _, keys in others)], dtype=torch.int32)
        edges = torch.tensor([0, queries, *(n for n, _ in others)]).cumsum(0).to(torch.int32)
        rows = torch.cat([q, *(torch.randn(n, 4, 16) for n, _ in others)])
        out, lse = flashsci.paged_attention(
            rows, *cache, block_table=table, seqused_k=used, cu_seqlens_q=edges, return_lse=True, backend=backend,
            **BATCH, **options,
        )  # fmt: skip
        return out[:queries], lse[:, :queries]

    alone = call([])
    for beside in ([(1, 40)], [(1, 600)], [(70, 70), (0, 9), (3, 500)]):
        for options in ({}, dict(max_seqlen_q=128)):
            for x, y in zip(alone, call(beside, **options), strict=True):
                assert torch.equal(x, y)


@pytest.mark.parametrize("deterministic", [True, "batch"])
def test_tiles_of_packed_calls(deterministic, monkeypatch):
    """They follow from the lengths of all sequences, and with "batch" from nothing of the call."""
    seen, config = [], tilings.config
    monkeypatch.setattr(tilings, "config", lambda *given: seen.append(given[-2:]) or config(*given))
    for lengths in ([17], [17, 3, 3, 3]):
        edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        leaves = [torch.randn(sum(lengths), h, 24, requires_grad=True) for h in (4, 2, 2)]
        flashsci.varlen_attention(*leaves, edges, deterministic=deterministic, backend="triton").sum().backward()
    assert len(set(seen)) == (1 if deterministic == "batch" else 2)


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_the_choice_does_not_depend_on_the_batch(backend):
    names = {
        flashsci.explain(torch.randn(b, 4, 9, 16), *torch.randn(2, b, 4, 9, 16), **BATCH, backend=backend).chosen
        for b in (1, 7)
    }
    assert len(names) == 1


Q = torch.randn(2, 2, 5, 16)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (dict(backend="sdpa"), flashsci.BackendError, "depend on the batch"),
        (dict(backend="eager"), flashsci.BackendError, "depends on the batch"),
        (dict(dropout_p=0.5), ValueError, "excludes dropout"),
        (dict(deterministic="always"), ValueError, "True, False, None or 'batch', got 'always'"),
        (dict(bias=torch.zeros(5, 5, requires_grad=True), backend="triton"), flashsci.BackendError, "bias.detach"),
    ],
)
def test_refused(options, kind, says):
    with pytest.raises(kind, match=says):
        flashsci.attention(Q, Q, Q, **{**BATCH, **options})
