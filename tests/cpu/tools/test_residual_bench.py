"""tools/bench/residual.py: every way is measured on the same layer, and one that is wrong has no time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tools.bench import residual

CPU = torch.device("cpu")
CELL = residual.Cell("toy", "fp32", batch=2, heads=2, seq=9, dim=8)


def test_every_way_has_times_and_errors():
    records = list(residual.measure(CELL, CPU, 0.01))
    assert [(r["pass"], r["way"]) for r in records] == [
        (which, way) for which in ("forward", "backward") for way in ("flashsci", "parts", "plain")
    ]
    for record in records:
        assert record["us"] > 0 and record["gbps"] > 0
        assert len(record["errors"]) == 6 and max(record["errors"]) < 1e-5


@pytest.mark.parametrize("which", [0, 1])
def test_a_wrong_way_has_no_time(monkeypatch, which):
    def wrong(*given):
        found = list(residual.formula(*given))
        found[which] = 1.001 * found[which]
        return tuple(found)

    right = residual.ways
    monkeypatch.setattr(residual, "ways", lambda device: right(device) | {"parts": wrong})
    for record in residual.measure(CELL, CPU, 0.01):
        assert (record["us"] is None) == (record["way"] == "parts")


def test_layout_of_scores():
    """Of a layer amid others: rows of ours begin at multiples of 16 bytes."""
    _, scores = residual.formula(*(x.detach() for x in residual.tensors(CELL, CPU)))
    padded = torch.empty(2, 2, 9, 12)[..., :9]
    copy = residual.laid_out(scores, padded)
    assert copy.stride() == padded.stride() and torch.equal(copy, scores)


def test_command(tmp_path, capsys, monkeypatch):
    assert next(residual.cells()).id == "unimol-bf16-s64"
    monkeypatch.setattr(residual, "cells", lambda: [CELL, replace(CELL, dtype="bf16")])
    path = tmp_path / "records.json"
    residual.main(
        ["--only", "toy-fp32-s9", "--batch", "1", "--seconds", "0.01", "--device", "cpu", "--json", str(path)]
    )
    assert len(json.loads(path.read_text())) == 6
    assert "toy-fp32-s9 backward: flashsci" in capsys.readouterr().out
