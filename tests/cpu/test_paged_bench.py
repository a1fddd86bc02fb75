"""The paged benchmark: its cells, and that it times nothing that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import paged

SMALL = paged.Cell(3, 64, "log-uniform", dtype="bfloat16", heads_q=4, heads_k=2, dim=32)
CPU = torch.device("cpu")


def test_cells():
    found = list(paged.cells())
    assert len({c.id for c in found}) == len(found) == 2 * 4 * 7
    assert all(len(c.lengths()) == c.batch and max(c.lengths()) == c.longest for c in found)
    assert replace(SMALL, spread="equal", batch=2).bytes() == 2 * 2 * 64 * 2 * 32 * 2 + 2 * 2 * 4 * 32 * 2  # fmt: skip


@pytest.mark.parametrize("cell", [SMALL, replace(SMALL, batch=1), replace(SMALL, cache="float8_e4m3fn")])  # fmt: skip
def test_measures(cell, capsys):
    records = paged.measure(cell, ["reference", "fa3"], CPU, 0.05)
    assert [r["backend"] for r in records] == ["reference", "copy"]
    assert "no fa3" in capsys.readouterr().out
    assert records[0]["bytes_per_second"] > 0 and records[1]["share_of_copy"] == 1


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    wrong = {"ours": lambda: torch.ones(3, 4, 32, dtype=torch.bfloat16)}
    monkeypatch.setattr(paged, "candidates", lambda *_: wrong)
    assert [r["backend"] for r in paged.measure(SMALL, ["ours"], CPU, 0.05)] == ["copy"]
    assert "is wrong and not timed" in capsys.readouterr().out


def test_all_of_it_in_small(tmp_path, monkeypatch, capsys):
    """One candidate's error is its own, one case's leaves the others, and the table comes last."""
    honest, made = paged.candidates, paged.inputs_of

    def failing():
        raise KeyError("no such kernel")

    def inputs_of(cell, device):
        if cell.cache != cell.dtype:
            raise torch.OutOfMemoryError("Tried to allocate 2 TiB")
        return made(cell, device)

    monkeypatch.setattr(paged, "candidates", lambda *a: {**honest(*a), "other": failing})
    monkeypatch.setattr(paged, "inputs_of", inputs_of)
    path = tmp_path / "new" / "paged.json"
    given = ["--device", "cpu", "--tiny", "--backends", "reference", "--seconds", "0.05"]
    assert paged.main([*given, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "other is wrong and not timed: [\"it raised: 'no such kernel'\"]" in said
    assert "paged-float8_e4m3fn-b3-log-uniform-s64 is not measured: Tried to allocate" in said
    head, _, row = said.strip().splitlines()[-3:]
    assert sorted(head.strip("| ").split(" | ")) == ["case", "copy", "reference"]
    assert row.startswith("| paged-bfloat16-b3-log-uniform-s64 | ") and ", 100%" in row
    assert [r["backend"] for r in json.loads(path.read_text())["records"]] == ["reference", "copy"]
    assert paged.main([*given, "--minutes", "0"]) == 1
    assert "no time left" in capsys.readouterr().out


def test_it_says_that_there_is_no_gpu(capsys):
    with pytest.raises(SystemExit):
        paged.main([])
    assert "torch sees no CUDA GPU" in capsys.readouterr().err


def test_a_backend_that_refuses_is_no_candidate_and_nobody_steps_in(capsys):
    x = paged.inputs_of(SMALL, CPU)
    assert list(paged.candidates(SMALL, x, ["cuda", "reference"])) == ["reference"]
    assert f"{SMALL.id}: no cuda: " in capsys.readouterr().out


def test_fa3_gets_its_own_arguments():
    x = paged.inputs_of(SMALL, CPU)
    seen = {}

    class Ops:
        @staticmethod
        def fwd(q, k, v, **options):
            seen.update(options, shape=k.shape)
            return (q,)

    assert paged._fa3(Ops, x)() is x.q
    assert seen["page_table"] is x.options["block_table"] and seen["max_seqlen_k"] == 64
    assert seen["shape"][1:] == (16, 2, 32)
