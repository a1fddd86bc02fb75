"""Distributed calls are the calls they are parts of: every strategy and layout against the fp64 oracle of the whole."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import flashsci
import flashsci.distributed
from flashsci.call.derivatives import ENTRIES
from flashsci.testing import Case, Variant
from flashsci.testing.choices import strategy_of
from tests.support.distributed_calls import (
    Split,
    agreement_of,
    alone,
    asked_for,
    asked_of,
    call_by_groups,
    compiled,
    compiled_shards,
    compiled_triangle,
    compiled_with_pairs,
    counted_flops,
    draw_split,
    dtensors,
    force_problem,
    force_step,
    forces,
    heads_of_ranks,
    inside_torchs_context_parallel,
    judge,
    own_communicator,
    pool,
    refused_placements,
    repeated,
    second_order_pool,
    sharded_parameters,
    split_call,
    tensor_parallel,
    triangle_problem,
    triangles,
    whole_sequences,
)
from tests.support.emulated_ranks import World, settled
from tests.support.ranks import Ranks

pytestmark = pytest.mark.every(4)

STRATEGIES = ("ring", "all_gather", "ulysses")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.stop()


def check(run, pool: list[Variant], worlds: tuple[int, ...], examples: int, function=split_call) -> None:
    """Problems that Hypothesis draws, the number of ranks and their parts with them, against the oracle of the whole."""

    @settings(max_examples=examples)
    @given(strategy_of(lambda choices: draw_split(choices, pool, worlds)))
    def body(drawn):
        world, split = drawn
        judge(split, [parts[0] for parts in run(function, world, splits=[split])])

    body()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_are_those_of_the_whole(ranks, world):
    check(ranks.run, pool(), (world,), 40)


@pytest.mark.parametrize("world", [2, 4])
def test_second_derivatives(ranks, world):
    check(ranks.run, second_order_pool(), (world,), 12)


def test_rings_by_groups_of_heads(ranks):
    def body(function, world, splits):
        ring = replace(splits[0], strategy="ring")
        return ranks.run(function, world, splits=[ring])

    check(body, pool(), (2, 3), 40, call_by_groups)


def emulated(function, size, **arguments):
    """:meth:`Ranks.run` within this process, for any number of ranks."""
    return settled(World(size, "cpu"), lambda mesh: function(mesh, **arguments))


def test_results_of_more_ranks():
    check(emulated, pool(), (1, 5, 6, 7, 8), 25)


@pytest.mark.parametrize("argument", ["causal", "scale", "softcap", "strategy", "dtype", "heads", "bias", "local"])
def test_ranks_that_differ_all_raise_before_data_moves(ranks, argument):
    outcomes = ranks.outcomes(agreement_of, 3, wrong=1, argument=argument)
    told = [error[0] for _, error in outcomes if error]
    assert len(told) == 3
    if argument == "local":  # an error of one rank's own
        assert "k and v must have the same length" in told[1]
        assert all("rank 1 of the mesh refused its arguments" in told[r] for r in (0, 2))
    else:
        assert all(text.startswith("ValueError: the ranks of the mesh") for text in told)


@pytest.mark.parametrize(
    "entry, name",
    [
        (entry.removeprefix("distributed."), name)
        for entry, rules in ENTRIES.items()
        for name, rule in rules.rules.items()
        if entry.startswith("distributed.") and not rule.forward and name != "mask"
    ],
)
def test_forward_mode_and_vmap_are_refused_before_data_moves(ranks, entry, name):
    asks = {"beside grad": "within torch.func's transforms"}
    asks |= {"vmap": f"no batching rule and torch.vmap maps {name}"}
    if name != "cu_seqlens":
        says = f"no forward-mode derivatives and {name} has a tangent"
        asks |= {"jvp": says, "dual numbers": says}
    if entry == "unshard":  # its collective refuses first
        asks = dict.fromkeys(asks, "collectives have no vmap")
    for way, says in asks.items():
        for _, error in ranks.outcomes(asked_of, 2, entry=entry, name=name, way=way):
            assert error is not None and says in error[0], error


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("rows", [(5, 6), (3, 0, 4)])
def test_triangles(ranks, rows, strategy):
    found = ranks.run(triangles, len(rows), rows=rows, strategy=strategy)
    q, k, v, bias, mask, dout = triangle_problem(sum(rows))
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    out = flashsci.attention(q, k, v, bias=bias, mask=mask)
    first = torch.autograd.grad(out, leaves, dout, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    for i, x in enumerate((out, *first, *second)):
        whole = torch.cat([parts[i] for parts in found], -2 if i in (4, 8) else 1)
        torch.testing.assert_close(whole, x.detach(), rtol=1e-12, atol=1e-12)


def test_one_rank_is_the_plain_call(ranks):
    ranks.run(alone, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "rows, keys",
    [
        ((0, 7, 0), (4, 0, 5)),
        ((0, 0, 9), (9, 0, 0)),
        ((3, 0, 2), (0, 0, 0)),
        ((0, 0, 0), (2, 1, 0)),
    ],
)
def test_ranks_without_rows(ranks, rows, keys, strategy):
    """Of queries, of keys, of either, on some ranks or on all of them."""
    for causal in (False, True):
        variant = Variant(bias="pair", bias_grad=sum(rows) > 0, lse_grad=True, window=causal)
        shape = (6, sum(rows), sum(keys))
        case = Case(
            variant, lead=(2,), heads_k=3, group=2, seq_q=sum(rows), seq_k=sum(keys), causal=causal,
            window=(5, None) if causal else None, bias_shape=shape,
        )  # fmt: skip
        split = Split(case, "contiguous", strategy, rows, keys)
        judge(split, [parts[0] for parts in ranks.run(split_call, 3, splits=[split])])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtensors(ranks, strategy):
    assert max(ranks.run(dtensors, "2x2", strategy=strategy)) < 1e-13


CASES = (
    "dense",
    "grouped",
    "one head",
    "replicated",
    "heads over both",
    "bias",
    "bias of heads",
    "bias of all",
    "weights",
    "slopes",
)


@pytest.mark.parametrize("case", CASES)
def test_dtensors_with_whole_sequences(ranks, case):
    """Batch and heads split: each rank computes its part, and the forward sends nothing."""
    for difference, messages in ranks.run(whole_sequences, "2x2", case=case):
        assert difference < 1e-13 and messages == 0


def test_the_ring_counts_the_flops_of_its_rank(ranks):
    """In all those of one causal call over 16 positions, 2 heads, D 8."""
    found = ranks.run(counted_flops, 2, strategy="ring")
    pairs = 2 * 16 * 17 // 2
    assert sum(forward for forward, _ in found) == 2 * pairs * 2 * 8
    assert sum(backward for _, backward in found) == 2 * pairs * 5 * 8
    assert found[0][0] < found[1][0]


@pytest.mark.slow
def test_dtensors_compile_in_one_graph(ranks):
    assert all(ranks.run(compiled_shards, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_heads_of_ranks(ranks, dtype):
    assert all(ranks.run(heads_of_ranks, 2, dtype=dtype))


def test_tensor_parallel_layer(ranks):
    assert max(ranks.run(tensor_parallel, 2)) < 1e-12


def test_placements_that_attention_does_not_take(ranks):
    expected = (
        r"ValueError: q is a DTensor with the placement S.*\(.*2\) on mesh dim 1; its sequence is split: call flashsci.distributed",
        r"ValueError: q is a DTensor with the placement S.*3\) on mesh dim 1; redistribute it to Replicate, or to Shard of the",
        r"ValueError: q is a DTensor with the placement P.* on mesh dim 0; redistribute it",
        r"ValueError: k has the placement R.* on mesh dim 1 where q has S.*; Shard\(1\) is wanted there",
        r"ValueError: 3 heads of k do not divide into 2 equal parts, so groups of 2 heads of q would be torn apart",
        r"ValueError: bias has the placement R.* on mesh dim 1 where q has S.*; Shard\(0\) is wanted there",
        r"TypeError: q is a DTensor, mask is not; make one of it",
        r"TypeError: q is a DTensor, and dropout_p is not taken with DTensors",
    )
    for words in ranks.run(refused_placements, "2x2"):
        assert len(words) == len(expected)
        for word, due in zip(words, expected, strict=True):
            assert re.match(due, word), word


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_sharded_parameters(ranks, strategy):
    assert max(ranks.run(sharded_parameters, "2x2", strategy=strategy)) < 1e-12


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_training_on_forces(ranks, strategy):
    positions, targets, weights = force_problem()
    plain = lambda *x: flashsci.attention(*x)  # noqa: E731
    found, loss = force_step(positions.requires_grad_(), targets, weights, plain)
    expected = torch.autograd.grad(loss, weights)
    parts = ranks.run(forces, 3, strategy=strategy)
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), found.detach())
    for _, *gradients in parts:
        torch.testing.assert_close(gradients, list(expected))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_in_one_graph(ranks, strategy):
    assert all(ranks.run(compiled, 2, strategy=strategy))
    assert all(ranks.run(compiled_with_pairs, 3, strategy=strategy))


@pytest.mark.slow
def test_compiled_by_inductor(ranks):
    assert all(ranks.run(compiled, 2, strategy="ring", backend="inductor"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_triangles_compiled_in_one_graph(ranks, strategy):
    assert all(ranks.run(compiled_triangle, 2, strategy=strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_bits_twice(ranks, strategy):
    assert all(ranks.run(repeated, 3, strategy=strategy))


@pytest.mark.parametrize("by", ["argument", "torch", "nobody"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kernels_are_told_to_be_deterministic(ranks, strategy, by):
    assert ranks.run(asked_for, 2, strategy=strategy, by=by) == [{by != "nobody"}] * 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_inside_torchs_context_parallel(ranks, world, causal):
    assert max(ranks.run(inside_torchs_context_parallel, world, causal=causal)) < 1e-5


@pytest.mark.parametrize("name", flashsci.distributed.__all__)
def test_examples_in_docstrings(name):
    public = getattr(flashsci.distributed, name)
    examples = doctest.DocTestFinder(recurse=False).find(public, name)
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.summarize(verbose=False) == (0, runner.tries) and runner.tries


def test_without_nccl_all_transfers_go_through_the_group(ranks):
    assert not any(ranks.run(own_communicator, 2))
