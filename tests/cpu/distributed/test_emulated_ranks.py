"""Ranks emulated in one process: their results, and the messages that they send."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch

import flashsci
import flashsci.distributed as fd
from flashsci.distributed import block, cost
from flashsci.distributed.layout import Layout
from tests.support.distributed_calls import part
from tests.support.emulated_ranks import World, settled

SIZES = cost.CallSizes(batch=2, heads_q=4, heads_k=2, head_dim=8, head_dim_v=8, itemsize=4)


def call(seq, layout, strategy, options, world, mesh):
    """out and gradients of a rank, for an emulated world."""
    random = torch.Generator().manual_seed(seq)
    q, k, v, dout = (torch.randn(2, h, seq, 8, generator=random) for h in (4, 2, 2, 4))
    *leaves, dout = (fd.shard(x, mesh, layout=layout) for x in (q, k, v, dout))
    leaves = [x.contiguous().requires_grad_() for x in leaves]
    out = fd.attention(*leaves, mesh=mesh, layout=layout, strategy=strategy, **options)
    world.phase("backward")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def traces(seq, ranks, layout, strategy, **options):
    world = World(ranks, "cpu")
    step = partial(call, seq, layout, strategy, options, world)
    return settled(world, step), [world.run(r, step)[1] for r in range(ranks)]


def sent(trace):
    """Bytes of a rank's forward and of its backward."""
    middle = [s.key if s.what == "phase" else "" for s in trace].index("backward")
    return [sum(s.size for s in part if s.what in ("send", "collective")) for part in (trace[:middle], trace[middle:])]


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_emulated_ranks_are_the_whole(strategy):
    layout, results = (
        Layout.of("head_tail", 30, 2),
        traces(30, 2, "head_tail", strategy, causal=True)[0],
    )
    random = torch.Generator().manual_seed(30)
    q, k, v, dout = (torch.randn(2, h, 30, 8, generator=random) for h in (4, 2, 2, 4))
    whole = [x.requires_grad_() for x in (q, k, v)]
    out = flashsci.attention(*whole, causal=True)
    expected = [out, *torch.autograd.grad(out, whole, dout)]
    for rank, found in enumerate(results):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, part(y.detach(), layout, rank, -2))


def test_a_window_sends_what_is_seen_and_no_more():
    """24 tokens on each of four ranks, of which a query sees the 5 before it and the 2 after: a rank's keys go to its neighbours."""
    _, found = traces(96, 4, "contiguous", "ring", window=(5, 2))
    for rank, trace in enumerate(found):
        rows_to = {rank + 1: 5, rank - 1: 2}
        neighbours = {r: n for r, n in rows_to.items() if 0 <= r < 4}
        sends = [s for s in trace if s.what == "send"]
        assert {s.key[1] for s in sends} == set(neighbours)
        forward, backward = sent(trace)
        assert forward == sum(SIZES.keys(n) for n in neighbours.values())
        # Keys and values once more, and gradients of those that this rank has seen.
        seen = {rank - 1: 5, rank + 1: 2}
        assert backward - forward == sum(SIZES.keys(n) for r, n in seen.items() if 0 <= r < 4)


def test_messages_are_under_way_while_ranks_compute():
    """Each of the ring's, forward and backward, is begun before a piece is computed and waited for after it; but for the last
    gradients, which nothing is left to hide."""
    world = World(4, "cpu")
    marked = lambda function: lambda *x: (world.phase("piece"), function(*x))[1]  # noqa: E731
    with (
        patch.object(block, "forward", marked(block.forward)),
        patch.object(block, "backward", marked(block.backward)),
    ):
        step = partial(call, 64, "head_tail", "ring", dict(causal=True), world)
        settled(world, step)
        for rank in range(4):
            order = [(s.what, s.key) for s in world.run(rank, step)[1]]
            begun = [i for i, (what, _) in enumerate(order) if what in ("send", "receive")]
            pieces = [i for i, step in enumerate(order) if step == ("phase", "piece")]
            waits = [order.index(("wait", order[i][1])) for i in begun]
            hidden = [any(i < piece < wait for piece in pieces) for i, wait in zip(begun, waits, strict=True)]
            # k and v three times in each pass, their gradients three times, sent and received.
            assert len(hidden) == 9 * 4 and hidden == [True] * 32 + [False] * 4


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_model_knows_what_is_sent(strategy, causal):
    """All bytes that the busiest rank sends, but for lse, which the model leaves out."""
    seq, world = 64, 2
    layout = "head_tail" if causal else "contiguous"
    planned = cost.planned(seq, world, causal=causal, layout=layout)
    _, found = traces(seq, world, layout, strategy, causal=causal)
    most = [max(sent(t)[i] for t in found) for i in (0, 1)]
    forward = cost.predict(planned, SIZES, strategy, False).sent
    both = cost.predict(planned, SIZES, strategy, True).sent
    lse = 2 * 4 * seq // world * 4 // world if strategy == "ulysses" else 0
    assert most[0] == forward + lse
    # The model adds up the busiest rank of each step, which are different ranks.
    assert sum(most) - lse <= both <= 1.5 * sum(most)
    if not causal:
        assert sum(most) - lse == both


def test_errors_of_emulated_ranks_are_told():
    def wrong(mesh):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        settled(World(2, "cpu"), wrong)
