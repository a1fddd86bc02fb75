"""The summary of drawn calls: every figure by hand, and that of the committed records again."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flashsci.testing import DrawnCall
from tools.bench import drawn
from tools.bench.drawn import report

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = sorted((ROOT / "reports" / "bench").glob("*/drawn-*.jsonl"))
ENV = {"gpu": "NVIDIA H200", "host": "x86_64", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
ENV |= {"flashsci": "0.1.0", "python": "3.12.3"}
CALL = DrawnCall(1, 0, "step", seq_q=300, seq_k=300)


def record(times, call=CALL, auto=("cuda", "cuda"), neighbour=None, **gates):
    """Times in us by candidate, the backends that `auto` chose, and the gates of candidates without a time."""
    by = {"auto": auto, "cuda": ("cuda", "cuda"), "triton": ("triton", "triton")}
    if call.work == "forward":
        by = {name: (pair[0], None) for name, pair in by.items()}
    candidates = {
        name: {"gate": "passed", "loop_us": time, **({"by": by[name]} if name in by else {})}
        for name, time in times.items()
    }
    candidates |= {name: {"gate": gate} for name, gate in gates.items()}
    other = call.neighbour()
    found = {"gate": "passed", "loop_us": neighbour} if neighbour else {"gate": "refused: out of memory"}
    return {
        "call": call.as_dict(),
        "text": str(call),
        "scores": call.scores,
        "candidates": candidates,
        "neighbour": {"call": other.as_dict(), "scores": other.scores, **found},
        "seconds": {"checking": 0.5, "timing": 0.25},
        "commit": "abc1234",
        "dirty": False,
        "env": ENV,
    }


def test_one_code_has_one_time():
    two = record({"auto": 10.0, "cuda": 12.0, "triton": 11.0})
    assert report.times(two) == {"auto": 10.0, "cuda": 10.0, "triton": 11.0}
    assert report.regret(two) == 1
    other = record({"auto": 10.0, "triton": 8.0, "cuda": 20.0}, auto=("triton", "cuda"))
    assert report.regret(other) == 10 / 8


def test_regret_is_against_choices_and_torch_is_against_torch():
    found = record({"auto": 12.0, "cuda": 12.0, "sdpa:efficient": 10.0, "math": 6.0, "sdpa:math": 8.0})
    assert report.regret(found) == 1.2
    assert report.against_torch(found) == 0.5
    assert report.regret(record({"cuda": 1.0}, auto="failed: out")) is None
    assert report.against_torch(record({"auto": 1.0}, math="refused")) is None


def test_a_wrong_candidate_is_nobodys_best():
    found = record({"auto": 12.0, "cuda": 12.0}, triton="failed: dq: error 1 > 0.1", math="failed: out")
    assert report.regret(found) == 1
    text = drawn.summary([found])
    assert "triton failed: dq: error 1 > 0.1" in text
    assert "of torch, by candidate: math 1" in text


def test_cliffs_are_of_calls_and_of_scores():
    found = record({"auto": 40.0, "cuda": 40.0}, neighbour=20.0)  # 300 to 320
    assert report.cliff(found) == (2, pytest.approx(2 * (320 / 300) ** 2))
    assert report.cliff(record({"auto": 40.0})) is None
    assert report.is_long(found)
    assert not report.is_long(record({}, replace(CALL, seq_q=255)))
    assert not report.is_long(record({}, replace(CALL, lens=(300, 9))))
    assert "    2.00  1/0 bf16 step" in drawn.summary([found])


def test_the_figures_of_a_summary():
    forward = replace(CALL, work="forward")
    records = [
        record({"auto": 10.0, "cuda": 10.0, "triton": 20.0, "sdpa:flash": 40.0}, neighbour=10.0),
        record({"auto": 40.0, "cuda": 40.0, "triton": 20.0, "sdpa:flash": 10.0}, neighbour=10.0),
        record({"auto": 12.0, "cuda": 12.0, "triton": 10.0}, forward, neighbour=12.0),
        {**record({}), "failed": "out of memory"},
    ]
    lines = [re.sub(" +", " ", line) for line in drawn.summary(records).splitlines()]
    assert lines[0].startswith("3 of 4 drawn calls timed; seed 1; NVIDIA H200; torch 2.11.0, triton 3.6.0")
    assert lines[0].endswith("commit abc1234; for each call: checking 0.50 s, timing 0.25 s")
    assert "forward 1 1.200 100.0% 0.0% 1.20" in lines
    assert "step 2 2.000 50.0% 50.0% 4.00" in lines
    assert "all 3 1.687 66.7% 33.3% 4.00" in lines
    assert "step 2 1.000 50.0% 0.25" in lines  # against torch: 4 and 1/4
    assert "a call 3 1.000 4.00 4.00" in lines
    work = lines[lines.index("Work list: auto over the best of all") + 2 :]
    assert work[0].startswith(" 4.00 cuda 40 sdpa:flash 10 1/0 bf16 step")
    assert work[1].startswith(" 1.20 cuda 12 triton 10 1/0 bf16 forward")
    assert any(line.endswith("out of memory") for line in lines)


def test_a_summary_of_nothing_says_so():
    assert drawn.summary([]).startswith("0 of 0 drawn calls timed")


def test_the_work_list_names_both_backends_and_ends():
    records = [
        record({"auto": 2.0 + n, "triton": 1.0}, replace(CALL, index=n), auto=("cuda", "triton")) for n in range(20)
    ]
    text = drawn.summary(records)
    assert text.count("cuda, triton") == report.LISTED
    assert "1/19 bf16" in text and "1/3 bf16" not in text


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_summaries_are_those_of_the_records(path):
    """Of runs on GPUs: the text that was printed is computed again."""
    records = drawn.read(path)
    assert path.with_suffix(".txt").read_text(encoding="utf-8") == drawn.summary(records) + "\n"
    for found in records:
        call = DrawnCall.of(found["call"])
        assert found["scores"] == call.scores
        assert found["text"] == str(call)
