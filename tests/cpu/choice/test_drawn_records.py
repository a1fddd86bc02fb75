"""Records of drawn calls as problems: the choices of today's rules on them, and of any other chooser."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from flashsci.backends.cuda import library
from flashsci.choice.predictions.model import Time
from flashsci.testing import SMALL_CALLS, DrawnCall, draw_call
from tools.bench import drawn
from tools.bench.drawn import measure, report
from tools.choice import drawn as choosing
from tools.choice import left_out
from tools.choice.samples import of_drawn

ROOT = Path(__file__).resolve().parents[3]
RECORDS = ROOT / "reports" / "bench" / "h200"
GUIDE = (ROOT / "docs" / "guide" / "auto.md").read_text(encoding="utf-8")
H200 = {"gpu": "NVIDIA H200", "capability": [9, 0]}
CALL = DrawnCall(1, 7, "step", batch=4, heads=8, heads_k=8, seq_q=1000, seq_k=1000, dim=128, dim_v=128)


def record(call, pairs, **of_torch):
    """A record of a call on an H200: us by backend and backend of the gradients."""
    candidates = {
        f"{first}:{second}": {"gate": "passed", "loop_us": time, "by": [first, second]}
        for (first, second), time in pairs.items()
    }
    candidates |= {name.replace("_", ":"): {"gate": "passed", "loop_us": t} for name, t in of_torch.items()}
    candidates["auto"] = next(iter(candidates.values()))
    return json.loads(json.dumps({"call": call.as_dict(), "env": H200, "candidates": candidates}))


def saved(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


STEP = {("cuda", "cuda"): 100.0, ("triton", "triton"): 80.0}
FORWARD = {("cuda", None): 30.0, ("triton", None): 60.0}


def test_a_record_is_a_problem_and_times():
    found = choosing.measured(record(CALL, STEP, sdpa_flash=90.0, math=20.0))
    p = found.problem
    assert (p.device_type, p.capability, p.batch, p.seq_q, p.head_dim) == ("cuda", (9, 0), (4,), 1000, 128)
    assert p.requires_grad
    assert found.times == STEP
    assert found.of_torch == {"sdpa:flash": 90.0, "math": 20.0}
    assert found.auto == ("cuda", "cuda")
    assert found.best == 80  # plain math is no choice
    assert (
        choosing.measured({"call": CALL.as_dict(), "env": H200, "candidates": {"auto": {"gate": "failed: out"}}})
        is None
    )


def test_todays_rules_are_judged(tmp_path):
    forward = replace(CALL, work="forward", index=8)
    path = saved(tmp_path / "drawn.jsonl", record(CALL, STEP, sdpa_flash=50.0), record(forward, FORWARD))
    found = choosing.regrets(choosing.read([path]))
    assert [r.pair for r in found] == [("cuda", "cuda"), ("cuda", None)]
    assert [r.ratio for r in found] == [2, 1]
    text = choosing.text(found)
    assert "2.00  cuda: 1/7 bf16 step" in text
    assert text.splitlines()[-2].split() == ["all", "2", "1.414", "50.0%", "50.0%", "2.00"]


def test_a_chooser_is_fitted_on_some_seeds_and_judged_on_others():
    calls = [replace(CALL, seed=seed, index=n) for seed in (1, 2) for n in range(3)]
    found = [choosing.measured(record(call, STEP)) for call in calls]
    fitted, judged = choosing.of_seeds(found, {1}), choosing.of_seeds(found, {2})
    assert {m.call.seed for m in fitted} == {1} and {m.call.seed for m in judged} == {2}
    often = min(fitted[0].times, key=lambda pair: sum(m.times[pair] for m in fitted))
    assert [r.ratio for r in choosing.regrets(judged, lambda m: often)] == [1, 1, 1]
    unknown = choosing.regrets(judged, lambda m: ("eager", "eager"))
    assert [r.ratio for r in unknown] == [None] * 3
    assert "?  eager: 2/0" in choosing.text(unknown)


def test_predicted_times_are_a_chooser(monkeypatch, tmp_path, capsys):
    of_times = {("cuda", "cuda"): 90.0, ("triton", "triton"): 40.0, ("cuda", "triton"): 60.0}
    found = choosing.measured(record(CALL, of_times))
    monkeypatch.setattr(choosing, "able", lambda m: list(of_times))
    monkeypatch.setattr(
        choosing.predictions, "times", lambda p, pairs: {pair: Time(of_times[pair], 0.1) for pair in pairs}
    )
    assert choosing.rules(found) == ("cuda", "cuda")
    assert choosing.predicted(found) == ("triton", "triton")
    monkeypatch.setattr(choosing.predictions, "times", lambda p, pairs: {})
    assert choosing.predicted(found) == ("cuda", "cuda")
    path = saved(tmp_path / "drawn.jsonl", record(CALL, of_times))
    assert choosing.main([str(path), "--chooser", "predicted"]) == 0
    assert "predicted, with predictions of 0 of 1 calls" in capsys.readouterr().out


@pytest.mark.skipif(library.load() is not None, reason="the library is not built here")
def test_drawn_records_are_samples_of_passes(tmp_path):
    both, alone = (
        record(CALL, {("triton", "triton"): 100.0}),
        record(replace(CALL, work="forward"), {("sdpa", None): 40.0}),
    )
    masked = record(replace(CALL, mask="prefix"), {("triton", "triton"): 100.0})
    tiled = record(replace(CALL, mask="prefix", seq_q=2000, seq_k=2000), {("triton", "triton"): 100.0})
    for one in (both, alone, masked, tiled):
        for timed in one["candidates"].values():
            timed["gpu_us"] = timed["loop_us"]
    path = saved(tmp_path / "drawn.jsonl", both, alone, masked, tiled)
    found = of_drawn(path, lambda sample: 30.0)
    assert [(s.family, s.time) for s in found] == [
        ("triton/dense backward, 16 bits", 70.0),
        ("sdpa/plain forward, 16 bits", 40.0),
        ("triton/dense backward, 16 bits", 70.0),
    ]
    assert [s.words["mask_by_query"] for s in found] == [False, False, True]
    assert found[2].work.masked == found[2].work.scores and found[2].work.modified == found[0].work.masked == 0
    assert choosing.measured(tiled).problem.mask_tiles
    assert found[0].groups["suite"] == "seed 1"
    assert [s.time for s in of_drawn(path, lambda sample: 90.0)] == [40.0]  # too little is left to say anything


def test_the_library_says_which_strides_it_takes(monkeypatch):
    biased = replace(CALL, bias="shared", bias_dtype="bfloat16", bias_grad=True)
    monkeypatch.setattr(library, "load", lambda: "there is no library")
    with pytest.raises(RuntimeError, match="there is no library"):
        choosing.described(biased, (9, 0))
    assert choosing.described(replace(biased, work="forward"), (9, 0))[1]
    assert choosing.described(CALL, (9, 0))[1]


@pytest.mark.skipif(library.load() is not None, reason="the library is not built here")
def test_strides_of_full_size_calls_are_found():
    answers = {choosing.described(draw_call(1, n), (9, 0))[1] for n in range(60)}
    assert answers == {True, False}


def test_records_of_this_machine_have_the_choice_of_the_rules(tmp_path, monkeypatch, capsys):
    """The code that ran, as the record names it, is what the rules choose again from the record."""
    monkeypatch.setattr(measure, "LOOP_SECONDS", 0.005)
    path = tmp_path / "drawn-9.jsonl"
    records = drawn.run(9, 600, device="cpu", calls=6, path=path)
    found = choosing.read([path])
    assert len(found) == len(records)
    assert [choosing.rules(m) for m in found] == [m.auto for m in found]
    ratios = [r.ratio for r in choosing.regrets(found)]
    assert ratios == pytest.approx([report.regret(r) for r in records])
    assert [m.call for m in found] == [draw_call(9, n, SMALL_CALLS) for n in range(6)]
    assert choosing.main([str(path), "--seeds", "9"]) == 0
    assert "all" in capsys.readouterr().out


def published(row):
    """The figures of a row of the guide: calls, regret forward, with gradients, of all, percent above 1.1, the worst."""
    found = re.search(rf"\| {row}[^|]*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \((\d+) %, ([\d.]+)\) \|", GUIDE)
    assert found, row
    return tuple(map(float, found.groups()))


def figures(ratios):
    """The same of regrets, each with the kind of its work."""
    every = [ratio for _, ratio in ratios]
    of_work = (statistics.geometric_mean([r for work, r in ratios if work == kind]) for kind in ("forward", "step"))
    above = 100 * sum(r > 1.1 for r in every) / len(every)
    return *of_work, statistics.geometric_mean(every), above, max(every)


@pytest.mark.parametrize("seed", (3, 4, 5, 6, 7))
def test_the_published_regret_is_that_of_the_records(seed):
    records = report.read(RECORDS / f"drawn-{seed}.jsonl")
    ratios = [(r["call"].get("work", "forward"), x) for r in records if (x := report.regret(r)) is not None]
    assert f"seed {seed}, {len(ratios)} calls" in GUIDE
    due = figures(ratios)
    for found, exact, room in zip(published(f"seed {seed}, "), due, (6e-4, 6e-4, 6e-4, 0.6, 0.06), strict=True):
        assert found == pytest.approx(exact, abs=room)


@pytest.mark.slow
@pytest.mark.skipif(library.load() is not None, reason="the library is not built here")
def test_the_published_regret_of_what_is_shipped_is_recomputed():
    ratios = [(r.measured.call.work, r.ratio) for r in left_out.regrets() if r.ratio is not None]
    assert f"| {len(ratios)} calls of all seeds" in GUIDE
    due = figures(ratios)
    row = f"{len(ratios)} calls of all seeds by what is shipped"
    for shown, exact, room in zip(published(row), due, (2e-3, 2e-3, 2e-3, 2, 0.06), strict=True):
        assert shown == pytest.approx(exact, abs=room)
