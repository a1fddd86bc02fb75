"""An error of one rank is an error of all of them, within the timeout of the group; arguments that differ are found before data
moves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from tests.cpu.distributed.distributed_faults import (
    TIMEOUT,
    differing,
    differing_parts,
    differing_triangles,
    exchanges,
    fault,
    in_detail,
    without_memory,
)
from tests.support.ranks import Ranks

pytestmark = pytest.mark.every(8)

STRATEGIES = ("ring", "all_gather", "ulysses")
GRACE = 60.0  # seconds beyond the timeout on a busy machine; a call that hangs takes tests.support.ranks.PATIENCE


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.stop()


def told(outcomes: list) -> list[str]:
    """What the ranks raised, all of them."""
    assert all(error for _, error in outcomes), outcomes
    return [error[0] for _, error in outcomes]


def seconds(text: str) -> float:
    return float(re.search(r"after (\S+) s", text)[1])


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_error_of_one_rank_ends_all_of_them(ranks, strategy, where):
    said = told(ranks.outcomes(fault, 4, wrong=1, where=where, strategy=strategy))
    assert "MemoryError mine" in said[1]
    assert all(seconds(text) < TIMEOUT + GRACE for text in said)


def test_who_does_not_call_is_missed(ranks):
    outcomes = ranks.outcomes(fault, 4, wrong=1, where="absent", strategy="ring")
    assert outcomes[1] == (None, None)
    said = told([outcomes[0], *outcomes[2:]])
    assert all(seconds(text) < TIMEOUT + GRACE for text in said)


@pytest.mark.parametrize("argument", ["heads", "softcap", "total"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_known_kinds_that_differ_are_found_before_data_moves(ranks, strategy, argument):
    """Not the first calls of their kind: what ranks differ in is found each time."""
    said = told(ranks.outcomes(differing, 3, wrong=2, argument=argument, strategy=strategy))
    if argument == "total":  # one rank's own rows are not those of its whole
        assert "total=20: rank 2 of 3 has 7 rows of q" in said[2]
        assert all("rank 2 of the mesh refused its arguments" in said[r] for r in (0, 1))
    else:
        assert all(text.startswith("ValueError: the ranks of the mesh call with") for text in said)


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("gradient", "k requires grad is 0, 1, 0 by rank"),
        ("bias", "must have the 9 queries of q"),
        ("keys", "v shape[2] is 9, 5, 9 by rank"),
        ("own", "rank 1 of the mesh refused its arguments"),
    ],
)
def test_triangles_that_differ(ranks, argument, expected):
    said = told(ranks.outcomes(differing_triangles, 3, wrong=1, argument=argument))
    assert all(expected in text for r, text in enumerate(said) if argument != "own" or r != 1)


def test_parts_that_differ(ranks):
    said = told(ranks.outcomes(differing_parts, 3, wrong=1))
    assert all("x shape[1] is 2, 3, 2 by rank" in text for text in said)


SHAPES = {
    "attention": [[2, 4, 6, 8], [2, 4, 6]],
    "varlen_attention": [[4, 6, 8], [6, 4]],
    "triangle_attention": [[2, 4, 24, 8], [2, 4, 24]],
    "unshard": [[2, 4, 24, 8]],
}


@pytest.mark.parametrize("entry", SHAPES)
def test_tensors_without_memory_have_shapes(ranks, entry):
    assert ranks.run(without_memory, 4, entry=entry) == [SHAPES[entry]] * 4


def test_offsets_without_memory_are_refused(ranks):
    said = told(ranks.outcomes(without_memory, 4, entry="varlen_attention", offsets_too=True))
    assert all("reads cu_seqlens" in text and "give it on the CPU" in text for text in said)


@pytest.mark.parametrize("given, detail, times", [(False, False, 3), (True, False, 1), (True, True, 3)])
def test_how_often_ranks_ask(ranks, given, detail, times):
    assert ranks.run(exchanges, 4, given=given, detail=detail) == [times] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_torchs_own_checks(ranks, strategy):
    if torch.__version__ < (2, 12):
        pytest.skip("before torch 2.12 its checks take none of its functional gathers over gloo")
    assert all(ranks.run(in_detail, 4, strategy=strategy))


def test_the_death_of_a_rank_ends_the_others():
    ranks = Ranks(timeout=10)
    try:
        outcomes = ranks.outcomes(fault, 4, wrong=1, where="death", strategy="ring")
        assert outcomes.pop(1) == (None, ("died", ""))
        assert all(seconds(text) < 10 + GRACE for text in told(outcomes))
    finally:
        ranks.stop()
