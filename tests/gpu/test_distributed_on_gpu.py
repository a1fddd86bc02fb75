"""Distributed calls by the kernels of a GPU: all ranks emulated on one, and with NCCL between as many as there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashsci.testing.choices import SeededChoices
from tests.support.distributed_calls import (
    Split,
    call_quietly_by_groups,
    draw_split,
    heads_of_ranks,
    judge,
    own_communicator,
    pool,
    repeated,
    second_order_pool,
    split_call,
)
from tests.support.emulated_ranks import World, settled
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu
CASES = 5  # of each part: most compile kernels of their own
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def started(bound: bool) -> Iterator[Ranks]:
    ranks = Ranks(30, torch.cuda.device_count(), "cuda", patience=60, bound=bound)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from started(bound=False)


@pytest.fixture
def bound_ranks() -> Iterator[Ranks]:
    yield from started(bound=True)


def drawn(part: int, worlds: tuple[int, ...], second: bool = False) -> Iterator[tuple[int, Split]]:
    choices, variants = SeededChoices(part), second_order_pool() if second else pool()
    for _ in range(CASES):
        yield draw_split(choices, variants, worlds)


@pytest.mark.parametrize("part", range(8))
def test_emulated(part):
    for size, split in drawn(part, (2, 3, 4, 8)):
        world = World(size, "cuda")
        found = settled(world, lambda mesh, split=split: split_call(mesh, [split]))
        judge(split, [parts[0] for parts in found], fused=True)


@several
@pytest.mark.parametrize("part", range(100, 108))
def test_between_gpus(ranks, part):
    """The last part takes second derivatives; every other one is as long calls are."""
    function = call_quietly_by_groups if part % 2 else split_call
    for size, split in drawn(part, (torch.cuda.device_count(),), second=part == 107):
        found = ranks.run(function, size, splits=[split])
        judge(split, [parts[0] for parts in found], fused=True)


@several
def test_hidden_transfers_have_a_communicator_of_their_own(ranks):
    """Also where ranks are in different numbers of groups."""
    assert all(ranks.run(own_communicator, torch.cuda.device_count()))


@several
def test_a_communicator_of_ranks_that_are_bound_to_their_gpus(bound_ranks):
    size = torch.cuda.device_count()
    assert all(bound_ranks.run(own_communicator, size))
    split = next(split for n, split in drawn(102, (size,)) if split.strategy == "ring")
    found = bound_ranks.run(call_quietly_by_groups, size, splits=[split])
    judge(split, [parts[0] for parts in found], fused=True)


@several
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_the_same_bits_twice(ranks, strategy):
    assert all(ranks.run(repeated, torch.cuda.device_count(), strategy=strategy))


@several
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtensors_split_by_heads(ranks, dtype):
    assert all(ranks.run(heads_of_ranks, torch.cuda.device_count(), dtype=dtype))
