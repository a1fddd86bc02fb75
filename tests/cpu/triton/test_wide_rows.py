"""Wide heads with few queries and thousands of keys, interpreted: one program holds a row of scores, and sums over keys are divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs, poisoned_memory

pytest.importorskip("triton")

from flashsci.backends.triton import tilings
from flashsci.backends.triton.plans.dense import plan
from flashsci.backends.triton.plans.wide import Wide

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets without a GPU only; there, run the check"
)

PAIR = {"bias": "pair", "bias_grad": True, "tangents": "qkvb"}
WEIGHT = {"key_weight": "float", "key_weight_grad": True, "tangents": "qkvw"}
GATE = {"gate": "float", "tangents": "qkvg"}


def case(dims, seq_q, seq_k, variant=None, **fields):
    variant = {"tangents": "qkv", "head_dim": dims[0], "head_dim_v": dims[1]} | (variant or {})
    given = {"lead": (2,), "heads_k": 1, "group": 1, "seed": 11, "seq_q": seq_q, "seq_k": seq_k} | fields
    return Case(variant=Variant(**variant), **given)


CASES = {
    "3 of 2,048": case((160, 160), 3, 2048, {"lse_grad": True}),
    "1 of 4,096": case((256, 256), 1, 4096, lead=(1,)),
    "3 of 8,192": case((136, 40), 3, 8192, lead=(1,)),
    "95 of 1,500, causal": case((160, 64), 95, 1500, {"window": True}, causal=True, lead=(1,)),
    "95 of 1,025, causal, lower right": case(
        (129, 129), 95, 1025, {"window": True}, causal=True, align="lower_right", lead=(1,)
    ),
    "17 of 2,047, window": case((256, 160), 17, 2047, {"window": True}, window=(700, 900), align="lower_right", lead=(1,)),
    "17 of 1,288, full bias": case((160, 136), 17, 1288, PAIR, bias_shape=(2, 1, 17, 1288), bias_holes=True),
    "3 of 4,095, shared bias, softcap": case(
        (129, 131), 3, 4095, {**PAIR, "softcap": True}, softcap=2.0, bias_shape=(1, 1, 3, 4095), lead=(1,), group=2
    ),
    "3 of 2,048, bias of keys": case(
        (160, 160), 3, 2048, {**PAIR, "bias": "key"}, bias_shape=(2, 1, 1, 2048), layout="bshd"
    ),
    "3 of 3,001, mask": case((160, 160), 3, 3001, {"mask": True}, mask_shape=(1, 1, 3, 3001), mask_kind="rows", lead=(1,)),
    "1 of 1,025, mask of keys": case((160, 160), 1, 1025, {"mask": True}, mask_shape=(2, 1, 1, 1025), mask_kind="keys"),
    "3 of 2,048, dropout": case((160, 160), 3, 2048, {"dropout": True}, dropout_p=0.5),
    "1 of 4,096, key weights": case((160, 160), 1, 4096, WEIGHT, weight_shape=(1, 1, 4096), lead=(1,)),
    "17 of 1,100, ALiBi and a sink": case((160, 72), 17, 1100, {"alibi": True, "sink": "float"}, align="lower_right"),
    "3 of 1,100, two batch dims": case((160, 24), 3, 1100, rank=5, lead=(2, 3), layout="bshd"),
    "17 of 2,048, gate": case((136, 136), 17, 2048, GATE, gate_shape=(2, 1, 17, 2048)),
}  # fmt: skip
QUICK = {"3 of 2,048", "95 of 1,025, causal, lower right", "17 of 1,288, full bias", "1 of 1,025, mask of keys"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_long_rows(name, monkeypatch):
    """Forward, gradients and second order, with sums over keys in pieces: in one section, a few, or one for each key head."""
    plan.cache_clear()
    monkeypatch.setattr(tilings, "BUSY", 1000)  # for pieces of a call this small
    monkeypatch.setattr(tilings, "FEW_SCORES", (1 << 24, 1 << 13, 1)[list(CASES).index(name) % 3])
    # Few large tiles, for the interpreter's sake.
    monkeypatch.setattr(tilings, "product_config", lambda *given: (32, 128, 64, 4, 1))
    served, pieces = set(), set()
    for what in ("forward", "backward", "tangents", "double_backward"):
        honest = getattr(Wide, what)
        spy = lambda *a, what=what, honest=honest, **k: served.add(what) or honest(*a, **k)  # noqa: E731
        monkeypatch.setattr(Wide, what, spy)
    honest = tilings.pieces_of
    monkeypatch.setattr(tilings, "pieces_of", lambda *a: pieces.add(honest(*a)) or honest(*a))
    judge = Judge(replace(make_inputs(CASES[name]), twice=not CASES[name].variant.gate))
    with poisoned_memory():
        judge.require(evaluate(judge.inputs, "triton"))
    plan.cache_clear()
    assert len(served) == 4 and min(n for n, _ in pieces) > 1


@pytest.mark.parametrize("depth", (3, 255, 1024, 1025, 1500, 2047, 4096, 8192))
@pytest.mark.parametrize("programs", (1, 24, 192, 5000))
def test_pieces_cover_a_sum_once(depth, programs):
    for step in (16, 32):
        pieces, piece = tilings.pieces_of(132, programs, depth, step)
        assert piece % step == 0 and (pieces - 1) * piece < depth <= pieces * piece
        assert pieces == 1 or (depth > tilings.SHORT_ROW and piece >= tilings.LEAST_PIECE)
        assert pieces == 1 or (pieces - 1) * programs < tilings.BUSY * 132


@pytest.mark.parametrize("columns", (1, 40, 1024, 1025, 2048, 4096, tilings.MOST_KEYS))
@pytest.mark.parametrize("narrower", (1, 2))
def test_a_thread_holds_as_many_scores_of_a_long_row_as_of_short_ones(columns, narrower):
    for rows in (1, 3, 95):
        m, n, warps = tilings.rows_config(rows, columns, narrower)
        assert n >= columns and m * n <= 32 * 32 * warps // narrower
