"""Triton's kernels of attention maps, interpreted: the reductions by the two-error rule, with every option and odd lengths."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.call.maps import Reductions
from tests.support.map_calls import OPTIONS, near, packed, reduced, rounded, scores_of, size_of, written

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu/test_maps_on_gpu.py runs them"),
    pytest.mark.every(6),
]
WANTED = Reductions(entropy=True, largest_score=True, key_sum=True)


def by_kernels(q, k, lse, *, wanted=WANTED, **options):
    asked = {n: x for n, x in wanted._asdict().items() if n in ("entropy", "largest_score", "key_sum")}
    with flashsci.use_backend("triton"):
        found = flashsci.attention_statistics(q, k, lse, **asked, **options)
    return [x for x in found if x is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, dtype):
    q, k, lse, options, theirs = rounded(name, dtype)
    p, s = written(q.double(), k.double(), **theirs)
    narrow = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in theirs.items()}
    near(by_kernels(q, k, lse, **options), reduced(p, s)[:3], reduced(*written(q, k, **narrow))[:3], size_of(s))


@pytest.mark.parametrize("shape", [(5, 8), (3, 70, 8), (2, 3, 130, 80), (2, 1, 2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("pattern", [dict(), dict(causal=True), dict(window=(20, 3))], ids=str)
def test_ranks_and_lengths_beyond_a_tile(shape, pattern):
    q, k = torch.randn(2, *shape).unbind(0)
    _, lse = flashsci.attention(q.double(), k.double(), k.double(), return_lse=True, backend="reference", **pattern)
    exact = flashsci.attention_statistics(
        q.double(), k.double(), lse, entropy=True, largest_score=True, key_sum=True, **pattern
    )
    plain = flashsci.attention_statistics(q, k, lse.float(), entropy=True, largest_score=True, key_sum=True, **pattern)
    near(by_kernels(q, k, lse.float(), **pattern), exact[:3], plain[:3], size_of(scores_of(q, k)))


@pytest.mark.parametrize("wanted", ["entropy", "largest_score", "key_sum"])
def test_one_alone_has_the_same_bits(wanted):
    q, k = torch.randn(2, 2, 3, 40, 16).unbind(0)
    lse = torch.randn(2, 3, 40) + 9
    every = by_kernels(q, k, lse)
    (alone,) = by_kernels(q, k, lse, wanted=Reductions(**{wanted: True}))
    assert torch.equal(alone, every[["entropy", "largest_score", "key_sum"].index(wanted)])


def test_strides_and_layouts():
    q, k = (torch.randn(2, 17, 4, 16).transpose(1, 2) for _ in range(2))
    k = torch.randn(2, 2, 16, 19).mT
    bias = torch.randn(4, 19, 17).mT
    lse = torch.randn(2, 17, 4).transpose(1, 2) + 9
    found = by_kernels(q, k, lse, bias=bias)
    due = flashsci.attention_statistics(q, k, lse, bias=bias, entropy=True, largest_score=True, key_sum=True)
    exact = flashsci.attention_statistics(
        q.double(), k.double(), lse.double(), bias=bias.double(), entropy=True, largest_score=True, key_sum=True
    )
    near(found, exact[:3], due[:3], size_of(scores_of(q, k, bias)))


EDGES = (3, 0, 40, 1, 17), (70, 9, 0, 18, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["none", "causal", "window", "softcap", "bias of pairs", "bias of keys", "weights", "slopes"]
)
def test_packed(name, dtype):
    """Every sequence has the results of a dense call of its own, whatever lies beside it."""
    q, k, first, second = packed(*EDGES, 16, dtype)
    pairs = sum(m * n for m, n in zip(*EDGES, strict=True))
    options = {
        "none": {}, "causal": dict(causal=True, align="lower_right"), "window": dict(window=(9, 3)), "softcap": dict(softcap=2.0),
        "bias of pairs": dict(bias=torch.randn(4, pairs, dtype=dtype)), "bias of keys": dict(bias=torch.randn(1, 1, 99, dtype=dtype)),
        "weights": dict(key_weight=torch.rand(2, 99).to(dtype)), "slopes": dict(alibi_slopes=torch.rand(5, 4)),
    }[name]  # fmt: skip
    wide = {n: x.double() if torch.is_tensor(x) and n != "alibi_slopes" else x for n, x in options.items()}
    edges = dict(cu_seqlens_q=first, cu_seqlens_k=second)
    _, lse = flashsci.varlen_attention(
        q.double(), k.double(), k.double(), first, second, return_lse=True, backend="reference", **wide
    )
    asked = dict(entropy=True, largest_score=True, key_sum=True)
    exact = flashsci.attention_statistics(q.double(), k.double(), lse, **asked, **edges, **wide)[:3]
    plain = flashsci.attention_statistics(q, k, lse.float(), **asked, **edges, **options)[:3]
    with flashsci.use_backend("triton"):
        found = flashsci.attention_statistics(q, k, lse.float(), **asked, **edges, **options)[:3]
    every = (
        scores_of(q.transpose(0, 1), k.transpose(0, 1)).abs().amax() + options.get("bias", torch.zeros(1)).abs().amax()
    )
    near(found, exact, plain, 1 + every)
    assert not all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))  # others computed them


def test_compiled_by_the_kernels():
    """The op is part of a graph without breaks."""
    q, k = torch.randn(2, 1, 4, 20, 16).unbind(0)
    lse = torch.randn(1, 4, 20) + 9

    def call(q, k, lse):
        with flashsci.use_backend("triton"):
            return flashsci.attention_statistics(q, k, lse, entropy=True, largest_score=True, key_sum=True)[:3]

    ops = []

    def seen(graph, inputs):
        ops.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    for x, y in zip(torch.compile(call, backend=seen, fullgraph=True)(q, k, lse), call(q, k, lse), strict=True):
        assert torch.equal(x, y)
    assert torch.ops.flashsci.triton_map_statistics.default in ops
