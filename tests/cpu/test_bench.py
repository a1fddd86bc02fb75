"""The benchmark's own parts: cases, counting, timing, checking, tables."""

import time

import pytest
import torch

from flashsci import bench
from flashsci.bench import candidates, cases, report, timer
from flashsci.bench.verify import Sample

CPU = torch.device("cpu")


def small(**options):
    defaults = {"dtype": "fp32", "H": 2, "Sq": 16, "Sk": 16, "D": 8}
    return bench.Case("small", "test", **{**defaults, **options})


def test_cases_are_unique_and_well_formed():
    every = [*cases.CASES.values(), *cases.CPU_CASES]
    assert len({case.id for case in every}) == len(every) == 85
    for case in every:
        assert bool(case.lens) != bool(case.Sq)
        assert case.H % case.Hk == 0
        if isinstance(case.bias, tuple):
            full = (*case.batch, case.H, case.Sq, case.Sk)
            assert all(n in (1, m) for n, m in zip(case.bias, full, strict=True)), case.id


def test_crystal_lengths_look_like_mptrj():
    lengths = cases.crystal_lengths(4000)
    assert 29 < sum(lengths) / len(lengths) < 34
    assert 0.80 < sum(n < 50 for n in lengths) / len(lengths) < 0.87
    assert lengths == cases.crystal_lengths(4000)


def test_select_keeps_order_and_explains_errors():
    assert [c.id for c in bench.select(["latency"], ["af3-pair", "small-call"])] == [
        "small-call",
        "af3-pair",
    ]
    with pytest.raises(ValueError, match="no suite named 'issue'"):
        bench.select(["issue"])
    with pytest.raises(ValueError, match="close: af3-pair"):
        bench.select(ids=["af3-nonsense"])


def test_claims_rest_on_headline_cases():
    headline = {case.id for case in bench.SUITES["headline"]}
    for claim in bench.CLAIMS:
        assert headline.issuperset(claim.cases)


def test_flops_by_hand():
    assert candidates.flops(small(), CPU, 0) == 4 * 2 * 16 * 16 * 8
    assert candidates.flops(small(), CPU, 1) == 2.5 * candidates.flops(small(), CPU, 0)
    causal = candidates.flops(small(causal=True), CPU, 0)
    assert causal == 4 * 2 * (16 * 17 // 2) * 8
    packed = small(Sq=0, Sk=0, lens=(3, 16, 3), causal=False)
    assert candidates.flops(packed, CPU, 0) == 4 * 2 * (9 + 256 + 9) * 8


def test_interleave_finds_the_slower_one():
    def wait(seconds):
        return lambda: time.sleep(seconds)

    times = timer.interleave({"fast": wait(0.001), "slow": wait(0.004)}, CPU, 0.1)
    assert times["slow"].median > 2 * times["fast"].median
    assert times["fast"].min <= times["fast"].p20 <= times["fast"].median <= times["fast"].p80
    assert times["fast"].n == times["slow"].n >= 5


def test_short_work_is_batched():
    times = timer.interleave({"nothing": lambda: None}, CPU, 0.01)
    assert times["nothing"].batch > 1


CASES = {
    "dense": small(B=3, N=2, bias=(1, 2, 2, 16, 16), bias_grad=True),
    "grouped heads, causal": small(H=4, Hk=2, causal=True),
    "mask": small(B=3, mask=(3, 1, 1, 16)),
    "packed, ragged bias": small(Sq=0, Sk=0, lens=(3, 1, 7), bias="ragged", bias_grad=True),
}


@pytest.mark.parametrize("budget", [1 << 20, 300], ids=["whole", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_check_passes_what_is_right_and_no_more(name, budget, monkeypatch):
    """Also when only a sample is checked: some batch entries, heads, query rows or sequences."""
    monkeypatch.setitem(Sample.__init__.__globals__["BUDGET"], "cpu", budget)
    inputs = candidates.make_inputs(CASES[name], CPU)
    sample = Sample(inputs)
    if budget == 300 and not inputs.case.lens:
        assert sample.call.q.numel() < inputs.q.numel()
    right = candidates.candidate("reference", inputs)
    found = sample.verdicts("reference", right, backward=True)
    assert [v.problem for v in found.values()] == [None, None]
    assert set(found) == {"forward", "backward"}
    wrong = sample.verdicts("reference", lambda: right() * 1.01, backward=True)
    assert "out" in wrong["forward"].problem
    assert "dq" in wrong["backward"].problem
    missing = sample.verdicts("reference", lambda: right() * float("nan"), backward=False)
    assert "not finite" in missing["forward"].problem


@pytest.mark.parametrize("name", CASES)
def test_sdpa_baseline_computes_the_same(name):
    inputs = candidates.make_inputs(CASES[name], CPU)
    ours = candidates.candidate("reference", inputs)()
    theirs = candidates.candidate("sdpa:math", inputs)()
    torch.testing.assert_close(ours, theirs)


def test_refusals_have_reasons():
    inputs = candidates.make_inputs(small(), CPU)
    with pytest.raises(candidates.Unsupported, match="on GPUs only"):
        candidates.candidate("flex", inputs)
    packed = candidates.make_inputs(CASES["packed, ragged bias"], CPU)
    with pytest.raises(candidates.Unsupported, match="no packed sequences"):
        candidates.candidate("sdpa", packed)


def test_no_speed_for_what_is_wrong(monkeypatch):
    right = candidates.candidate

    def wrong(name, inputs):
        function = right(name, inputs)
        return (lambda: 1.01 * function()) if name == "sdpa" else function

    monkeypatch.setattr(candidates, "candidate", wrong)
    found = bench.run([small()], ["reference", "sdpa"], "cpu", seconds=0.01)
    by = {(r["backend"], r["pass"]): r for r in found}
    assert by["reference", "forward"]["gate"] == "passed"
    assert by["reference", "forward"]["time_us"]["median"] > 0
    for kind in ("forward", "backward"):
        assert by["sdpa", kind]["gate"].startswith("failed: out")
        assert by["sdpa", kind]["time_us"] is None
        assert by["sdpa", kind]["tflops"] is None


def test_host_times_of_the_small_call():
    (case,) = bench.select(["latency"])
    found = bench.run([case], ["sdpa:default"], "cpu", seconds=0.01, check=False)
    assert [r["pass"] for r in found] == ["forward", "backward", "host", "host, with gradients"]
    assert all(r["gate"] == "not checked" for r in found)


def record(case, kind, backend, us, gate="passed"):
    return {
        "case": {"id": case, "D": 64},
        "suite": "dense",
        "pass": kind,
        "backend": backend,
        "time_us": None if us is None else {"median": us, "min": 0.9 * us},
        "tflops": 1.0,
        "gbps": 1.0,
        "pct_sol": None,
        "peak_mem_mb": None,
        "err_ratio": 0.5,
        "gate": gate,
    }


def test_geomeans_and_claims():
    found = []
    (claim, *_) = (c for c in bench.CLAIMS if c.kind == "forward" and c.baseline == "flex")
    for i, id in enumerate(claim.cases):
        found.append(record(id, "forward", "triton", 10.0))
        found.append(record(id, "forward", "flex", (20.0, 5.0)[i % 2]))
    assert report.geomeans(found) == [["dense", "64", "forward", "triton", "flex", "1.00x", "8"]]
    (row,) = report.claims(found)
    assert row[1:] == ["triton vs flex", "1.00x", ">= 1x", "met"]
    found[0] = record(claim.cases[0], "forward", "triton", None, "failed: out")
    (row,) = report.claims(found)
    assert "1 of 8 missing" in row[2]
    assert row[-1] == "not met"


def test_claims_of_host_time_take_the_best_sample():
    (row,) = report.claims([record("small-call", "host", "cuda", 16.0)])
    assert row[2:] == ["14.4 us", "<= 15 us", "met"]


def test_tables_as_text_and_markdown():
    found = [
        record("a", "forward", "triton", 12.0),
        record("a", "forward", "cuda", None, "failed: out: error 3 > 2"),
        record("a", "forward", "flex", None, "refused: no GPU"),
    ]
    text, marked = report.plain(found), report.markdown(found)
    for shown in (text, marked):
        assert "12.0 us" in shown
        assert "failed: out" in shown
        assert "no GPU" in shown
    assert "| a | forward | triton | 12.0 us |" in marked
