"""What each rank computes, and what a strategy is predicted to cost: no processes needed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from flashsci.distributed.call import from_text
from flashsci.distributed.cost import (
    STRATEGIES,
    CallSizes,
    Machine,
    choose,
    hides_quiet,
    planned,
    predict,
)
from flashsci.distributed.layout import Layout
from flashsci.distributed.pieces import Band, Piece, joined, pieces

SIZES = CallSizes(batch=1, heads_q=16, heads_k=8, head_dim=128, head_dim_v=128, itemsize=2)


def visible(total_q: int, total_k: int, band: Band) -> torch.Tensor:
    """[Sq, Sk] by definition."""
    i, j = torch.arange(total_q)[:, None] + band.shift, torch.arange(total_k)
    keep = torch.ones(total_q, total_k, dtype=torch.bool)
    if band.left >= 0:
        keep &= j >= i - band.left
    if band.right >= 0:
        keep &= j <= i + band.right
    if band.offsets is not None:
        sequence = torch.bucketize(torch.arange(total_q), torch.tensor(band.offsets[1:]), right=True)
        keep &= sequence[:, None] == sequence
    return keep


def covered(found: list, places_q: list[int], places_k: list[int], shape: tuple[int, int]) -> torch.Tensor:
    """How often each pair of the whole is computed by pieces of these rows and keys."""
    times = torch.zeros(shape, dtype=torch.int)
    for piece in found:
        offsets = piece.offsets or (
            (0, piece.rows[1] - piece.rows[0]),
            (0, piece.keys[1] - piece.keys[0]),
        )
        for (a, b), (c, d) in zip(*(itertools.pairwise(x) for x in offsets), strict=True):
            band = visible(b - a, d - c, Band(piece.left, piece.right))
            rows = [places_q[piece.rows[0] + i] for i in range(a, b)]
            keys = [places_k[piece.keys[0] + j] for j in range(c, d)]
            times[torch.tensor(rows)[:, None], torch.tensor(keys)] += band.int()
            assert piece.columns is None or places_k[piece.keys[0]] == piece.columns[0]
    return times


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_what_is_visible(seed):
    """Each visible pair once, each other never, by windows of non-negative bounds."""
    chosen = random.Random(seed)
    world, kind = chosen.randint(1, 4), chosen.choice(["contiguous", "head_tail"])
    total_q = chosen.randint(1, 30)
    offsets, total_k = None, chosen.randint(1, 30)
    if seed % 3 == 0:
        total_k = total_q
        offsets = (
            0,
            *sorted(chosen.randint(0, total_q) for _ in range(chosen.randint(0, 5))),
            total_q,
        )
    shift = total_k - total_q if chosen.randrange(2) else 0
    band = Band(chosen.choice([-1, 0, 1, 7, 40]), chosen.choice([-1, 0, 0, 3, 40]), shift, offsets)
    layouts = [Layout.of(kind, n, world) for n in (total_q, total_k)]
    expected = visible(total_q, total_k, band)
    for form in (list, joined):
        times = torch.zeros(total_q, total_k, dtype=torch.int)
        pairs = 0
        for rank, source in itertools.product(range(world), repeat=2):
            rows, keys = layouts[0].intervals(rank), layouts[1].intervals(source)
            found = form(pieces(rows, keys, band))
            assert all(min(p.left, p.right) >= -1 for p in found)
            pairs += sum(p.pairs() for p in found)
            places = [[i for a, b in side for i in range(a, b)] for side in (rows, keys)]
            times += covered(found, *places, (total_q, total_k))
        assert torch.equal(times, expected.int()) and pairs == expected.sum()


def test_pieces_are_joined_where_one_call_is_the_two():
    """Any two pieces that touch, also such as no layout of today makes."""
    chosen, joins = random.Random(0), 0
    for _ in range(6000):
        edges = [0, *(chosen.randint(1, 4) for _ in range(2))]
        a_end, b_end = edges[1], edges[1] + edges[2]
        keys = [chosen.randint(1, 5) for _ in range(2)]
        bound = lambda: chosen.choice([-1, 0, 0, 1, 2, 3, 5])  # noqa: E731
        if chosen.randrange(2):
            two = [(0, a_end), (a_end, b_end)], [(0, keys[0]), (0, keys[1])]
        else:
            two = [(0, a_end)] * 2, [(0, keys[0]), (keys[0], sum(keys))]
        found = [Piece(r, k, k, -1, bound()) for r, k in zip(*two, strict=True)]
        together = joined(found)
        places = list(range(20))
        assert torch.equal(covered(found, places, places, (20, 20)), covered(together, places, places, (20, 20))), found
        joins += len(together) == 1
    assert joins > 400


@pytest.mark.parametrize("total", [64, 61])
def test_of_head_and_tail_one_call_a_step(total):
    """Causal or full, a rank computes one piece with each rank's keys; with a bias, which has its own places, one for each chunk."""
    for causal in (False, True):
        call = planned(total, 4, causal=causal, layout="head_tail")
        for rank, source in itertools.product(range(4), repeat=2):
            assert len(call.pieces(rank, source)) == 1
        apart = call._replace(placed=True)
        assert len(apart.pieces(1, 1)) == (3 if causal else 4)
    (own,) = planned(64, 4, causal=True, layout="head_tail").pieces(1, 1)
    assert (own.rows, own.keys, own.left, own.right) == ((0, 16), (0, 16), -1, 0)


@pytest.mark.parametrize("kind", ["contiguous", "head_tail"])
@pytest.mark.parametrize("total, world", [(0, 2), (3, 2), (16, 4), (37, 3), (5, 4)])
def test_layouts_have_every_row_once(kind, total, world):
    layout = Layout.of(kind, total, world)
    rows = [i for r in range(world) for a, b in layout.intervals(r) for i in range(a, b)]
    assert sorted(rows) == list(range(total)) and layout.total == total


def test_head_and_tail_balance_a_causal_call():
    balanced, lopsided = (planned(4096, 8, causal=True, layout=x) for x in ("head_tail", "contiguous"))
    work = [balanced.pairs(r) for r in range(8)]
    assert max(work) - min(work) <= 1e-3 * max(work)
    assert lopsided.pairs(7) > 7 * lopsided.pairs(0)
    assert sum(work) == sum(lopsided.pairs(r) for r in range(8)) == 4096 * 4097 // 2


def test_the_picture_is_what_is_computed():
    from tools.distributed import draw_ranks

    assert draw_ranks.FILE.read_text() == draw_ranks.picture(), "python tools/distributed/draw_ranks.py --write"
    for layout in ("contiguous", "head_tail"):
        assert set(draw_ranks.computed(layout)) == {(i, j) for i in range(8) for j in range(i + 1)}


def test_a_window_moves_its_neighbours_alone():
    call = planned(8192, 8, window=(100, 0))
    assert call.needed(3, 2) == (1024 - 100, 1024)
    assert [call.needed(3, s) is not None for s in range(8)] == [s in (2, 3) for s in range(8)]
    everything = predict(planned(8192, 8), SIZES, "ring", False)
    assert predict(call, SIZES, "ring", False).sent < everything.sent / 50
    assert choose(call, SIZES, list(STRATEGIES), False, Machine(link=1e9)) == "ring"


def test_the_model_hides_what_can_be_hidden():
    call = planned(1 << 18, 8, causal=True, layout="head_tail")
    fast, slow = Machine(), Machine(link=1e9)
    ring = predict(call, SIZES, "ring", True, fast)
    assert ring.compute <= ring.seconds < 1.05 * ring.compute
    assert (
        predict(call, SIZES, "all_gather", True, fast).seconds > predict(call, SIZES, "all_gather", True, fast).compute
    )
    assert predict(call, SIZES, "ring", True, slow).seconds > 2 * ring.seconds
    assert ring.memory < predict(call, SIZES, "all_gather", True, fast).memory
    assert choose(call, SIZES, list(STRATEGIES), True, Machine(room=1e6)) != "all_gather"


@pytest.mark.parametrize("back", (False, True))
def test_transfers_take_few_processors_only_where_they_are_hidden(back):
    """Long parts compute for longer than slow transfers take; short ones, and those of many ranks, do not."""
    assert hides_quiet(planned(1 << 16, 2, causal=True, layout="head_tail"), SIZES, back)
    assert not hides_quiet(planned(1 << 12, 2, causal=True, layout="head_tail"), SIZES, back)
    assert not hides_quiet(planned(1 << 16, 8, causal=True, layout="head_tail"), SIZES, back)


def test_calls_survive_as_text():
    call = planned(100, 3, causal=True, window=(7, 0))
    packed = call._replace(band=call.band._replace(offsets=(0, 40, 100)), split=(True, False))
    assert from_text(call.text()) == call and from_text(packed.text()) == packed
