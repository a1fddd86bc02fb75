"""The benchmark's own parts: cases, counting, timing, checking."""

import json
from dataclasses import replace

import pytest
import torch

from tests.support.clock import Clock
from tools import bench
from tools.bench import ahead, candidates, cases, commands, inputs, measure, timer
from tools.bench.verify import Sample

CPU = torch.device("cpu")


def small(**options):
    defaults = {"dtype": "fp32", "H": 2, "Sq": 16, "Sk": 16, "D": 8}
    return bench.Case("small", "test", **{**defaults, **options})


def test_cases_are_unique_and_well_formed():
    every = [*cases.CASES.values(), *cases.CPU_CASES]
    assert len({case.id for case in every}) == len(every) == 229
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
        assert {claim.ours, *(claim.baseline or claim.ours).split(",")} <= {
            *bench.OURS,
            *bench.BASELINES,
        }


def test_flops_by_hand():
    assert inputs.flops(small(), CPU, 0) == 4 * 2 * 16 * 16 * 8
    assert inputs.flops(small(), CPU, 1) == 2.5 * inputs.flops(small(), CPU, 0)
    causal = inputs.flops(small(causal=True), CPU, 0)
    assert causal == 4 * 2 * (16 * 17 // 2) * 8
    packed = small(Sq=0, Sk=0, lens=(3, 16, 3), causal=False)
    assert inputs.flops(packed, CPU, 0) == 4 * 2 * (9 + 256 + 9) * 8


def test_interleave_finds_the_slower_one(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timer, "time", clock)

    def wait(seconds):
        return lambda: clock.sleep(seconds)

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
    made = inputs.make_inputs(CASES[name], CPU)
    sample = Sample(made)
    if budget == 300 and not made.case.lens:
        assert sample.call.q.numel() < made.q.numel()
    right = candidates.candidate("reference", made)
    both = ["forward", "backward"]
    found = sample.verdicts("reference", right, both)
    assert [v.problem for v in found.values()] == [None, None]
    assert set(found) == {"forward", "backward"}
    wrong = sample.verdicts("reference", lambda: right() * 1.01, both)
    assert "out" in wrong["forward"].problem
    assert "dq" in wrong["backward"].problem
    missing = sample.verdicts("reference", lambda: right() * float("nan"), ["forward"])
    assert "not finite" in missing["forward"].problem


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


def test_host_times_go_round_both_ways():
    order = []
    functions = {name: lambda name=name: order.append(name) for name in "abc"}
    timer.host_time(functions, torch.device("cpu"), seconds=0, calls=1, warmup=0)
    rounds = {"".join(order[i : i + 3]) for i in range(0, len(order), 3)}
    assert rounds == {"abc", "cba"}


def test_training_step_is_forward_and_backward_to_the_end(monkeypatch):
    case = small()
    monkeypatch.setattr(measure, "TRAINING_STEPS", (case.id,))
    found = bench.run([case], ["sdpa:default"], "cpu", seconds=0.01)
    assert [r["pass"] for r in found] == ["forward", "backward", "training step"]
    times = [r["time_us"]["min"] for r in found]
    assert times[2] > times[0] and found[2]["gate"] == "passed"


def test_what_has_no_gradient_runs_forward_alone(monkeypatch):
    plain = candidates.candidate

    def forward_only(name, made):
        if name == "sdpa:math" and made.leaves:
            raise inputs.Unsupported("no gradient of a bias")
        return plain(name, made)

    monkeypatch.setattr(candidates, "candidate", forward_only)
    found = bench.run([small()], ["reference", "sdpa:math"], "cpu", seconds=0.01)
    by = {(r["backend"], r["pass"]): r for r in found}
    assert by["sdpa:math", "forward"]["gate"] == "passed"
    assert by["sdpa:math", "forward"]["time_us"]["median"] > 0
    assert by["sdpa:math", "backward"]["gate"] == "refused: no gradient of a bias"
    assert by["reference", "backward"]["time_us"]["median"] > 0


def test_a_refused_launch_is_no_reason_to_stop(monkeypatch):
    """As SDPA's of more than 65,535 sequences; any other error of the device is."""
    plain = candidates.candidate

    def candidate(name, made):
        if name == "sdpa:math":
            raise torch.AcceleratorError(f"CUDA error: {said}\nmore of it")
        return plain(name, made)

    monkeypatch.setattr(candidates, "candidate", candidate)
    said = "invalid configuration argument"
    found = bench.run([small()], ["reference", "sdpa:math"], "cpu", order=0, seconds=0.01)
    gates = {r["backend"]: r["gate"] for r in found}
    assert gates == {"reference": "passed", "sdpa:math": f"refused: CUDA error: {said}"}
    said = "an illegal memory access was encountered"
    with pytest.raises(torch.AcceleratorError):
        bench.run([small()], ["sdpa:math"], "cpu", order=0, seconds=0.01)


class CompilationError(Exception):
    """As Triton's, which is no RuntimeError."""


def test_what_breaks_off_leaves_the_rest(monkeypatch):
    """A candidate's own kind of error is its gate; a case that cannot be made, or timed, is left out."""
    plain, make = candidates.candidate, inputs.make_inputs

    def candidate(name, made):
        if name == "sdpa":
            raise CompilationError("at 3:7\nand more")
        return plain(name, made)

    def large(case, device):
        if case.id == "large":
            raise torch.OutOfMemoryError("Tried to allocate 2 TiB")
        return make(case, device)

    monkeypatch.setattr(candidates, "candidate", candidate)
    monkeypatch.setattr(measure, "make_inputs", large)
    seen = []
    with pytest.warns(UserWarning, match="large is not measured: Tried to allocate"):
        found = bench.run(
            [replace(small(), id="large"), small()],
            ["reference", "sdpa"],
            "cpu",
            order=0,
            seconds=0.01,
            on_case=lambda records: seen.append(len(records)),
        )
    assert {r["backend"]: r["gate"] for r in found} == {
        "reference": "passed",
        "sdpa": "failed: it raised: at 3:7",
    }
    assert seen == [0, 2]


def test_no_case_begins_when_time_is_up(tmp_path, capsys):
    with pytest.warns(UserWarning, match="time is up, not measured: cpu-dense, cpu-pair-bias"):
        assert bench.run(bench.select(ids=["cpu-dense", "cpu-pair-bias"]), device="cpu", minutes=0) == []
    path = tmp_path / "records.json"
    arguments = ["--case", "cpu-causal-gqa", "--device", "cpu", "--seconds", "0.01", "--json", str(path)]
    assert commands.main(["bench", *arguments, "--minutes", "5"]) == 0
    said = capsys.readouterr().out
    first = next(line for line in said.splitlines() if line.startswith("cpu-causal-gqa forward: reference "))
    assert " us, sdpa " in first and said.index(first) < said.index("Standings")
    assert len(json.loads(path.read_text())) == 2 * 5


def test_forward_alone_needs_no_gradients():
    (found,) = bench.run([small()], ["reference"], "cpu", order=0, seconds=0.01)
    assert (found["pass"], found["gate"]) == ("forward", "passed")
    assert not inputs.make_inputs(small(), CPU).detached().q.requires_grad


def test_records_are_plain_data():
    (case,) = bench.select(ids=["cpu-crystals"])
    (record, *_) = bench.run([case], ["reference"], "cpu", seconds=0.01)
    assert json.loads(json.dumps(record)) == record
    assert record["case"]["D"] == 16
    assert record["case"]["lens"]["n"] == 8
    assert set(record["time_us"]) == {"median", "p20", "p80", "min", "n"}


def test_what_is_compiled_ahead():
    headline = bench.SUITES["headline"]
    found = ahead.jobs(headline, ["triton", "cuda", "flex", "sdpa:flash", "triton@base"])
    names = [name for _, name in found]
    assert names.count("flex") == len(headline)
    assert names.count("triton") == names.count("triton@base")
    assert names.count("triton") == len({cases.series(case.id) for case in headline})
    assert {"cuda", "sdpa:flash"}.isdisjoint(names)


def test_compiling_ahead_hides_what_goes_wrong(monkeypatch):
    ran = []

    def candidate(name, made):
        ran.append(name)
        if name == "flex":
            raise RuntimeError("no compiler")
        return lambda: made.q * made.leaves["q"]

    monkeypatch.setattr(candidates, "candidate", candidate)
    for name in ("flex", "triton"):
        ahead._once(small(), name, "cpu", 1)
    assert ran == ["flex", "triton"]


def test_names_of_candidates():
    gpu = torch.device("cuda")
    assert candidates.names_of([], gpu)[:2] == ["triton", "cuda"]
    assert {"flex", "fa3", "cueq", "turbo", "sdpa:cudnn"} <= set(candidates.names_of(["baselines"], gpu))
    assert candidates.names_of(["cuda", "flex"], gpu, base=True) == ["cuda", "cuda@base", "flex"]
    with pytest.raises(bench.BenchError, match="no candidate named 'xformers'"):
        candidates.names_of(["xformers"], gpu)
