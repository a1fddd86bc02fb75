"""Distributed calls are the calls they are parts of: every strategy and layout against the fp64 oracle of the whole."""

from __future__ import annotations

import doctest
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from distributed_calls import (
    Split,
    agreement_of,
    assembled,
    compiled,
    dtensors,
    repeated,
    sharded_parameters,
    split_call,
    torchs_own_ring,
    triangle_problem,
    triangles,
)
from ranks import Ranks

import flashsci
import flashsci.distributed
from flashsci.testing import Judge, Variant, generate

STRATEGIES = ("ring", "all_gather", "ulysses", "auto")
LENGTHS = (1, 2, 3, 7, 16, 17, 31, 33, 40, 64, 65)
DTYPES = ("float32", "bfloat16", "float64", "float16")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.stop()


def pool() -> list[Variant]:
    """Every feature that distributed calls have, alone and together."""
    plain = [
        Variant(dtype=d, window=w, lse_grad=g)
        for d in DTYPES
        for w in (False, True)
        for g in (False, True)
    ]
    pairs = [
        Variant(dtype=d, bias=b, bias_grad=True, bias_float=f, mask=m, window=w)
        for d in DTYPES[:2] for b in ("pair", "key") for f, m, w in ((False, False, False), (True, True, True))
    ]  # fmt: skip
    weights = [
        Variant(
            key_weight="float",
            key_weight_grad=True,
            bias=b,
            bias_grad=b is not None,
            window=True,
            lse_grad=True,
        )
        for b in (None, "pair")
    ]
    packed = [
        Variant(dtype=d, varlen=True, window=w, bias=b, bias_grad=b is not None, lse_grad=True)
        for d in DTYPES[:2] for w in (False, True) for b in (None, "key")
    ]  # fmt: skip
    others = [
        Variant(mask=True),
        Variant(softcap=True, window=True),
        Variant(head_dim=24, head_dim_v=8, window=True),
    ]
    return plain + pairs + weights + packed + others


def second_order_pool() -> list[Variant]:
    return [
        Variant(dtype="float64", tangents="qkvb", bias="pair", bias_grad=True, window=True),
        Variant(tangents="qkv", lse_grad=True, mask=True),
        Variant(dtype="float64", tangents="qkvw", key_weight="inputs", key_weight_grad=True),
    ]


def splits(seed: int, count: int, variants: list[Variant], world: int) -> list[Split]:
    """Problems as models have them, split in every way."""
    choices, found = random.Random(seed), []
    for case in generate(seed, count, variants, lengths=LENGTHS, score_limit=1 << 14):
        if case.variant.varlen:
            bias_shape = case.bias_shape and (case.bias_shape[0], 1, sum(case.lens_q))
            case = replace(
                case,
                lens_k=case.lens_q,
                self_attention=True,
                bias_shape=bias_shape,
                bias_view="contiguous",
            )
        if (
            case.bias_shape and case.bias_view == "expanded"
        ):  # to rows of its own, whose gradients are shared
            case = replace(case, bias_view="padded")
        if (
            case.variant.bias_grad and 0 < case.seq_q <= world
        ):  # a bias of one row is refused where each rank has one
            continue
        strategy = choices.choice(STRATEGIES)
        if strategy == "ulysses":
            enough = dict(heads_k=world + choices.randrange(2), rank=max(case.rank, 3))
            case = replace(case, **enough, bias_shape=None, mask_shape=None, weight_shape=None)
            case = replace(
                case, variant=replace(case.variant, bias=None, mask=False, key_weight=None)
            )
        layout = choices.choice(("contiguous", "head_tail"))
        uneven = [None, None]
        if layout == "contiguous" and choices.randrange(2):
            totals = (sum(case.lens_q), 0) if case.variant.varlen else (case.seq_q, case.seq_k)
            for i, total in enumerate(totals):
                ends = sorted(choices.randint(0, total) for _ in range(world - 1))
                uneven[i] = tuple(b - a for a, b in zip([0, *ends], [*ends, total], strict=True))
        found.append(Split(case, layout, strategy, *uneven))
    return found


def judge(split: Split, parts: list) -> None:
    inputs = split.inputs()
    results = assembled(split, parts)
    Judge(inputs, fused=False).require(results)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_are_those_of_the_whole(ranks, world):
    drawn = splits(world, 16, pool(), world)
    found = ranks.run(split_call, world, splits=drawn)
    for i, split in enumerate(drawn):
        try:
            judge(split, [parts[i] for parts in found])
        except AssertionError as error:
            raise AssertionError(f"{split}\n{error}") from None


@pytest.mark.parametrize("world", [2, 4])
def test_second_derivatives(ranks, world):
    drawn = splits(10 + world, 4, second_order_pool(), world)
    found = ranks.run(split_call, world, splits=drawn)
    for i, split in enumerate(drawn):
        try:
            judge(split, [parts[i] for parts in found])
        except AssertionError as error:
            raise AssertionError(f"{split}\n{error}") from None


@pytest.mark.parametrize(
    "argument", ["causal", "scale", "softcap", "strategy", "dtype", "heads", "bias", "local"]
)
def test_ranks_that_differ_all_raise_before_data_moves(ranks, argument):
    outcomes = ranks.outcomes(agreement_of, 3, wrong=1, argument=argument)
    told = [error[0] for _, error in outcomes if error]
    assert len(told) == 3
    if argument == "local":  # an error of one rank's own
        assert "k and v must have the same length" in told[1]
        assert all("rank 1 of the mesh refused its arguments" in told[r] for r in (0, 2))
    else:
        assert all(text.startswith("ValueError: the ranks of the mesh") for text in told)


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


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_dtensors(ranks, strategy):
    assert max(ranks.run(dtensors, "2x2", strategy=strategy)) < 1e-13


def test_with_sharded_parameters(ranks):
    assert max(ranks.run(sharded_parameters, "2x2", strategy="ring")) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_compiled_in_one_graph(ranks, strategy):
    assert all(ranks.run(compiled, 2, strategy=strategy))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_the_same_bits_twice(ranks, strategy):
    assert all(ranks.run(repeated, 3, strategy=strategy))


def test_inside_torchs_own_ring(ranks):
    assert max(ranks.run(torchs_own_ring, 2)) < 1e-5


@pytest.mark.parametrize("name", flashsci.distributed.__all__)
def test_examples_in_docstrings(name):
    public = getattr(flashsci.distributed, name)
    examples = doctest.DocTestFinder(recurse=False).find(public, name)
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.summarize(verbose=False) == (0, runner.tries) and runner.tries
