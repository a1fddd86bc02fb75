"""The suite of drawn calls: its candidates, the check of each, its records, and the end of its time."""

import contextlib
import functools
import json
import os
import time
from dataclasses import replace

import pytest
import torch

from flashsci.testing import SMALL_CALLS, DrawnCall, draw_call
from flashsci.testing.calls import SIZES
from tests.support.clock import Clock
from tools.bench import commands, drawn, timer
from tools.bench.drawn import ahead, course, isolation, measure, sample, ways
from tools.bench.drawn.work import Work
from tools.bench.inputs import Unsupported

CPU = torch.device("cpu")
PLAIN = DrawnCall(1, 3, "step", "float32", batch=2, heads=4, heads_k=2, seq_q=19, seq_k=19, dim=8, dim_v=16)
PACKED = replace(PLAIN, batch=1, seq_q=0, seq_k=0, lens=(3, 9, 5, 14))
BIASED = {"bias": "shared", "bias_dtype": "float32", "bias_grad": True}
#: A call of every kind that PyTorch alone can express, with the candidates that must be right on it.
KINDS = {
    "plain": {},
    "other lengths": {"seq_q": 3},
    "causal": {"causal": True},
    "causal, at the end": {"causal": True, "seq_q": 7, "align": "lower_right"},
    "window": {"window": (3, 5)},
    "softcap": {"softcap": 15.0},
    "sink": {"sink": True},
    "alibi": {"alibi": True},
    "alibi, at the end": {"alibi": True, "seq_q": 7, "align": "lower_right"},
    "key weights": {"key_weight": True, "causal": True},
    "dropout": {"dropout_p": 0.2},
    "bias": BIASED,
    "bias, heads inside": {**BIASED, "bias_inner": "heads"},
    "bias of pairs": {**BIASED, "bias": "pairs", "mask": "keys"},
    "bias of keys": {**BIASED, "bias": "keys"},
    "bias of one head": {**BIASED, "bias": "one head", "bias_rank": "least", "causal": True},
    "documents": {"mask": "documents", "mask_size": 5, "mask_own": True},
    "band": {"mask": "band", "mask_size": 3},
    "prefix": {"mask": "prefix", "mask_size": 5},
    "graph": {"mask": "graph", "mask_size": 10, "causal": True},
    "slices": {"layout": "qkv"},
    "second order": {"work": "second", **BIASED},
    "forward": {"work": "forward"},
}
NO_SDPA = ("softcap", "sink")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measure, "LOOP_SECONDS", 0.005)


def gates(call):
    record = measure.record_of(call, CPU)
    return {name: found["gate"] for name, found in record["candidates"].items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", [1 << 15, 150], ids=["whole", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_compute_the_same_call(kind, budget, dtype, quick, monkeypatch):
    """ALiBi as a bias, a window as a mask, key weights as logarithms: each candidate says the call in its own way."""
    monkeypatch.setitem(sample.BUDGET, "cpu", budget)
    call = replace(PLAIN, dtype=dtype, **KINDS[kind])
    if budget == 150:
        assert sample.Sample(Work(call, CPU)).call.q.numel() < Work(call, CPU).inputs.q.numel()
    found = gates(call)
    right = ["auto", "math", *([] if kind in NO_SDPA else ["sdpa:math"])]
    assert [found[name] for name in right] == ["passed"] * len(right)
    if kind in NO_SDPA:
        assert found["sdpa:math"].startswith("refused: SDPA has no")
    assert not [gate for gate in found.values() if gate.startswith("failed")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "layout": "qkv"},
        {**BIASED, "bias": "pairs"},
        {**BIASED, "bias": "keys"},
        {"alibi": True},
        {"key_weight": True},
        {"sink": True},
        {"dropout_p": 0.2},
        {"window": (2, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [1 << 15, 400, 1], ids=["whole", "sampled", "a part of the heads"])
def test_packed_calls(options, budget, quick, monkeypatch):
    monkeypatch.setitem(sample.BUDGET, "cpu", budget)
    call = replace(PACKED, **options)
    if budget <= 400:
        part = sample.Sample(Work(call, CPU)).call
        assert len(part.cu_seqlens_q) < 5
        assert budget > 1 or (part.q.shape[1], part.k.shape[1]) == (call.heads // call.heads_k, 1)
    found = gates(call)
    assert found["auto"] == "passed"
    assert found["math"] == "refused: plain PyTorch has no packed sequences"
    assert not [gate for gate in found.values() if gate.startswith("failed")]
    if options and options.keys() - {"causal", "layout", "dropout_p"}:
        assert found["sdpa:math"].startswith("refused: SDPA on nested tensors has no")


@pytest.mark.parametrize("kind", ["plain", "alibi", "dropout", "sink", "second order"])
def test_triton_is_checked_by_a_sample(kind, quick, monkeypatch):
    """Its dropout and ALiBi depend on positions, which the sample keeps."""
    monkeypatch.setitem(sample.BUDGET, "cpu", 150)
    monkeypatch.setattr(ways, "names_of", lambda device, work: ("auto", "triton"))
    assert gates(replace(PLAIN, dtype="bfloat16", **KINDS[kind]))["triton"] == "passed"


@pytest.mark.parametrize("name", [*ways.SDPA, *ways.HOLDING])
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in NO_SDPA])
def test_every_candidate_of_torch_can_be_made(name, kind):
    """On a GPU each kernel has refusals of its own; here its arguments are made for the kernel that takes all."""
    work = Work(replace(PLAIN, **KINDS[kind]), CPU)
    attend = ways.attend(name, work.inputs)
    if name in ways.HOLDING:
        assert attend(work.inputs).shape == (2, 4, work.call.seq_q, 16)
        return
    with ways.within("sdpa:math"):
        assert attend(work.inputs).shape == (2, 4, work.call.seq_q, 16)


def test_a_candidate_runs_its_kernel(monkeypatch):
    """A kernel of SDPA is chosen around its calls, not in each."""
    chosen = []

    @contextlib.contextmanager
    def only(kernel):
        chosen.append(kernel)
        yield

    monkeypatch.setattr(ways, "only", only)
    for name in (*ways.OURS, *ways.TORCH):
        with ways.within(name):
            pass
    assert chosen == [ways.SDPA_KERNELS[n] for n in ("flash", "efficient", "cudnn", "math")]


def test_calls_of_full_size_reach_every_candidate():
    """Shapes of a GPU's calls, without memory: SDPA's math and plain PyTorch compute them as a GPU would."""
    ran = dict.fromkeys(ways.TORCH, 0)
    for n in range(120):
        call = draw_call(4, n)
        if call.lens:  # their lengths are read
            continue
        work = Work(call, torch.device("meta"))
        for name in ways.TORCH:
            try:
                with ways.within("sdpa:math"):
                    found = work.results(ways.attend(name, work.inputs))
            except Unsupported:
                continue
            ran[name] += 1
            assert found["out"].shape == (call.batch, call.heads, call.seq_q, call.dim_v)
            assert len(found) == 1 + len(work.leaves) * (1 + (call.work == "second")) + (call.work == "second")
    assert min(ran.values()) > 40


def test_a_wrong_candidate_is_not_timed(quick, monkeypatch):
    right = ways.attend

    def slightly_wrong(name, x):
        function = right(name, x)
        return (lambda y: 1.01 * function(y)) if name == "eager" else function

    monkeypatch.setattr(ways, "attend", slightly_wrong)
    record = measure.record_of(PLAIN, CPU)
    found = record["candidates"]["eager"]
    assert found["gate"].startswith("failed: out")
    assert set(found) == {"gate"}
    assert record["candidates"]["auto"]["loop_us"] > 0
    assert f"eager {found['gate']}" in drawn.summary([record])


def test_a_wrong_gradient_is_found(quick, monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.01 * grad

    right = ways.attend

    def slightly_wrong(name, x):
        function = right(name, x)
        return (lambda y: Wrong.apply(function(y))) if name == "math" else function

    monkeypatch.setattr(ways, "attend", slightly_wrong)
    assert gates(PLAIN)["math"].startswith("failed: dq")


def test_errors_are_reasons(quick, monkeypatch):
    right = ways.attend

    def failing(name, x):
        if name in ("math", "eager"):
            raise RuntimeError("no such kernel\nand more")
        if name == "sdpa:math":
            raise torch.OutOfMemoryError("much")
        return right(name, x)

    monkeypatch.setattr(ways, "attend", failing)
    found = gates(PLAIN)
    assert found["math"] == "refused: no such kernel"
    assert found["eager"] == "failed: it raised no such kernel"
    assert found["sdpa:math"] == "refused: out of memory"
    assert found["auto"] == "passed"


def test_scores_beyond_a_limit_are_refused(monkeypatch):
    monkeypatch.setattr(ways, "MOST_SCORES", 4 * 2 * 4 * 19 * 19 - 1)
    monkeypatch.setattr(ways, "MOST_MERGED", 100)
    inputs = Work(PLAIN, CPU).inputs
    for name in (*ways.HOLDING, "eager"):
        with pytest.raises(Unsupported, match="it holds every score"):
            ways.attend(name, inputs)
    with pytest.raises(Unsupported, match="as one tensor"):
        ways.attend("sdpa:efficient", Work(replace(PLAIN, **BIASED, mask="keys"), CPU).inputs)


def test_the_whole_suite_from_the_command_line(tmp_path, capsys, quick):
    path = tmp_path / "new" / "drawn-1.jsonl"
    which = ["--seed", "3", "--seconds", "600", "--calls", "3", "--first", "4", "--device", "cpu"]
    assert commands.main(["bench", "--suite", "drawn", *which, "--json", str(path)]) == 0
    records = drawn.read(path)
    assert [r["call"]["index"] for r in records] == [4, 5, 6]
    assert [DrawnCall.of(r["call"]) for r in records] == [draw_call(3, n, SMALL_CALLS) for n in (4, 5, 6)]
    text = drawn.summary(records)
    assert path.with_suffix(".txt").read_text() == text + "\n"
    out = capsys.readouterr().out
    assert text in out
    assert "seed 3" in text and torch.__version__ in text
    for record in records:
        assert record["candidates"]["auto"]["loop_us"] > 0
        assert record["neighbour"]["scores"] == DrawnCall.of(record["call"]).neighbour().scores
    assert commands.main(["report", str(path)]) == 0
    assert text in capsys.readouterr().out


def test_the_run_ends_with_its_time_and_keeps_its_records(tmp_path, monkeypatch):
    class Slow:
        def __init__(self, call, device, doing):
            self.call, self.reasons = call, {}

        def ready(self, check):
            pass

        def record(self):
            clock.now += 20
            return {**measure.about(self.call, CPU), "candidates": {}}

    clock = Clock()
    monkeypatch.setattr(course, "time", clock)
    monkeypatch.setattr(measure, "Measurement", Slow)
    path = tmp_path / "records.jsonl"
    seen = []
    records = drawn.run(1, 50, device="cpu", calls=9, path=path, on_record=lambda r: seen.append(len(drawn.read(path))))
    assert len(records) == 3
    assert seen == [1, 2, 3]  # each is in the file before the next begins
    assert drawn.read(path) == records
    assert "0 of" in drawn.summary(records)


def test_a_call_that_fails_is_a_record_and_a_lost_device_the_last(monkeypatch):
    class Failing:
        def __init__(self, call, device, doing):
            self.call, self.doing = call, doing

        def ready(self, check):
            self.doing.append("oracle")
            if self.call.index == 2:
                self.doing.append("cuda")
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            raise AssertionError("the oracle disagrees")

    monkeypatch.setattr(measure, "Measurement", Failing)
    records = drawn.run(1, 100, device="cpu", calls=9)
    said = [r["failed"].split(": ")[:2] for r in records]
    assert said == [*[["oracle", "the oracle disagrees"]] * 2, ["cuda", "CUDA error"]]
    assert "the oracle disagrees" in drawn.summary(records)


def small_calls(count):
    return (draw_call(1, n, SMALL_CALLS) for n in range(count))


def test_checks_ahead_are_those_of_a_run(quick):
    steps = []
    found = ahead.check_ahead(small_calls(3), CPU, time.monotonic() + 300, workers=2, on_step=steps.append)
    assert list(found) == [0, 1, 2] and steps[-1] == "checking ahead: 3 calls"
    call = draw_call(1, 1, SMALL_CALLS)
    check = found[1]
    assert check is not None and check.seconds > 0
    given, alone = measure.record_of(call, CPU, check), measure.record_of(call, CPU)
    gates = lambda record: {n: c["gate"].partition(";")[0] for n, c in record["candidates"].items()}  # noqa: E731
    assert gates(given) == gates(alone)
    assert given["candidates"]["auto"]["by"] == alone["candidates"]["auto"]["by"]
    assert given["seconds"]["checking"] == round(check.seconds, 2)


def test_a_candidate_that_a_check_found_wrong_is_not_run(quick, monkeypatch):
    call = replace(PLAIN, work="forward")
    check = measure.check_of(call, CPU)
    ran = []
    attend = ways.attend
    monkeypatch.setattr(ways, "attend", lambda name, x: (ran.append(name), attend(name, x))[1])
    record = measure.record_of(call, CPU, check._replace(reasons={**check.reasons, "math": "failed: out is wrong"}))
    assert record["candidates"]["math"] == {"gate": "failed: out is wrong"}
    assert "math" not in ran and "auto" in ran


def test_a_check_without_memory_is_made_again_alone(monkeypatch):
    def refused(self, name, sample):
        return measure.NO_MEMORY if name == "math" else None

    monkeypatch.setattr(measure.Measurement, "_try", refused)
    assert measure.check_of(replace(PLAIN, work="forward"), CPU) is None


def test_checks_ahead_end_with_their_time():
    begin = time.monotonic()
    assert len(ahead.check_ahead(small_calls(9), CPU, begin + 0.2, workers=1)) < 3
    assert time.monotonic() < begin + 300


RIGHT = measure.Check({}, {}, 1.0)


def dying(calls, device, share):
    if calls[0].index == 0:
        os._exit(1)
    return [RIGHT] * len(calls), False


def losing(calls, device, share):
    return [RIGHT], calls[0].index == 0


@pytest.mark.parametrize(("check_each", "left"), [(dying, 0), (losing, 1)])
def test_checks_ahead_survive_a_process_and_a_device(monkeypatch, check_each, left):
    """The calls of its kind are left to the run."""
    monkeypatch.setattr(ahead, "check_each", check_each)
    found = ahead.check_ahead(small_calls(SIZES + 1), CPU, time.monotonic() + 300, workers=1)
    assert found == {n: RIGHT if n < left or n == SIZES else None for n in range(SIZES + 1)}


def test_checks_of_a_kind_leave_errors_to_the_run(monkeypatch):
    def failing(call, device):
        if call.index == 1:
            raise ValueError("heads of q that no group divides")
        if call.index == 3:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return RIGHT

    monkeypatch.setattr(ahead, "check_once", failing)
    assert ahead.check_each(list(small_calls(3)), "cpu", 1.0) == ([RIGHT, None, RIGHT], False)
    assert ahead.check_each(list(small_calls(4)), "cpu", 1.0) == ([RIGHT, None, RIGHT], True)


def test_back_to_back_times_a_loop(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timer, "time", clock)
    ran = {"fast": 0, "slow": 0, "very slow": 0}

    def wait(name, seconds):
        def function():
            ran[name] += 1
            clock.sleep(seconds)

        return function

    functions = {"fast": wait("fast", 1e-3), "slow": wait("slow", 5e-3), "very slow": wait("very slow", 0.1)}
    entered = []

    def within(name):
        entered.append(name)
        return contextlib.nullcontext()

    times = timer.back_to_back(functions, CPU, seconds=0.12, within=within)
    assert entered.count("very slow") == 2 and entered.count("fast") == 2 + 5
    assert 1e-3 <= times["fast"].median < times["slow"].median < times["very slow"].median
    assert times["very slow"].n == 1 and ran["very slow"] == 3  # its trial alone
    assert times["fast"].n == 5 and times["fast"].batch > times["slow"].batch
    assert 2 <= times["slow"].n <= 5


def test_help_names_the_suite(capsys):
    assert commands.main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("drawn", "--seed", "--calls", "--small"):
        assert word in text


def test_records_are_plain_json(quick):
    record = measure.record_of(replace(PLAIN, work="forward"), CPU)
    assert json.loads(json.dumps(record, allow_nan=False)) == json.loads(json.dumps(record))


class Ending(measure.Attempt):
    """An attempt whose call 1 ends its process, whose call 2 loses its device, and whose call 3 needs the memory of others."""

    times = 0

    def ready(self, check=None):
        n = self.call.index
        if n == 1:
            os._exit(3)
        if n == 2:
            return measure.failed(self.call, self.device, "CUDA error", True)
        self.crowded = n == 3
        return None

    def record(self):
        Ending.times += 1
        return {
            **measure.about(self.call, self.device),
            "candidates": {},
            "process": os.getpid(),
            "times": Ending.times,
        }


SERVE = isolation._serve


def serve_ending(*given):
    isolation.Attempt = Ending
    SERVE(*given)


@pytest.mark.parametrize(("ready", "lasting"), [(1, 2), (2, 3), (4, 3)])
def test_a_process_that_ends_costs_one_call(monkeypatch, tmp_path, ready, lasting):
    """However many calls are ready at the same time, records come in order."""
    monkeypatch.setattr(isolation, "_serve", serve_ending)
    monkeypatch.setattr(isolation, "measured", functools.partial(isolation.measured, ready=ready))
    steps, path = [], tmp_path / "records.jsonl"
    records = drawn.run(1, 600, device="cpu", calls=6, isolated=True, path=path, on_step=steps.append)
    assert [r["call"]["index"] for r in records] == [0, 1, 2, 3, 4, 5]
    assert [r.get("failed") for r in records] == [None, "the process ended with status 3", "CUDA error", *(None,) * 3]
    assert [step.partition(":")[0] for step in steps] == ["0", "1", "2", "3", "4", "5"]
    assert drawn.read(path) == records
    assert len({r["process"] for r in records if "process" in r}) == lasting


def test_a_process_measures_as_this_one():
    records = drawn.run(3, 600, device="cpu", calls=2, isolated=True)
    assert [r["candidates"]["auto"]["gate"] for r in records] == ["passed", "passed"]


def test_a_process_without_a_word_is_given_up(monkeypatch):
    monkeypatch.setattr(isolation, "PATIENCE", 0.05)
    process = isolation._Process(1, SMALL_CALLS, CPU)
    first = process.process
    _, record = process.heard(0)
    assert record["failed"] == "no result within 0 s" and record["lost"] and not first.is_alive()
    process.prepare(1, None)
    assert process.process is not first and process.process.is_alive()
    process.stop()


def test_nothing_else_runs_while_a_call_is_timed(monkeypatch):
    """Every process is ready, or has found that it needs the others' memory, before the first call is timed."""
    words = []

    class Process:
        def __init__(self, seed, limits, device):
            pass

        def call(self, n):
            return n

        def prepare(self, n, check, alone=False):
            words.append(("alone" if alone else "prepare", n))
            self.crowded = n == 1 and not alone

        def heard(self, n):
            words.append(("ready", n))
            return (isolation.CROWDED if self.crowded else isolation.READY), None

        def timed(self, n):
            words.append(("time", n))
            return isolation.RECORD, {"n": n}

        def stop(self):
            words.append(("stop", None))

    monkeypatch.setattr(isolation, "_Process", Process)
    found = isolation.measured(1, range(3), SMALL_CALLS, CPU, time.monotonic() + 60, lambda text: None, {}, ready=3)
    assert [record["n"] for record in found] == [0, 1, 2]
    assert words == [
        *(("prepare", n) for n in range(3)), *(("ready", n) for n in range(3)), ("time", 0), ("time", 2),
        ("alone", 1), ("ready", 1), ("time", 1), *(("stop", None),) * 3,
    ]  # fmt: skip


def test_a_process_ends_with_the_time():
    assert drawn.run(3, 0.0, device="cpu", calls=2, isolated=True) == []


def test_a_gpu_checks_and_times_in_turns(monkeypatch):
    """Calls that are checked are timed; where time is left, the next ones are checked."""
    clock = Clock(0.0)
    turns = []

    def checking(calls, device, until, on_step):
        assert device.type == "cuda" and until == clock.now + course.AHEAD * (200 - clock.now)
        turns.append(next(iter(calls)).index)
        clock.now += 30
        return {0: "first", 1: None, 2: "third"}

    def measuring(seed, numbers, limits, device, until, on_step, checks):
        assert until == 200
        assert checks == {turns[-1]: "first", turns[-1] + 1: None, turns[-1] + 2: "third"}
        for n in numbers:
            clock.now += 10
            yield {"call": draw_call(seed, n).as_dict(), "candidates": {}}

    monkeypatch.setattr(course, "time", clock)
    monkeypatch.setattr(course, "check_ahead", checking)
    monkeypatch.setattr(isolation, "measured", measuring)
    records = drawn.run(1, 200, device=torch.device("cuda"), first=5)
    assert turns == [5, 8, 11]
    assert [r["call"]["index"] for r in records] == list(range(5, 14))  # 20 s are left: no turn begins


def test_candidates_of_a_gpu():
    names = ways.names_of(torch.device("cuda"), "step")
    assert set(names) == {*ways.OURS, *ways.TORCH}
    assert set(names) - set(ways.names_of(torch.device("cuda"), "forward")) == {"cuda:own"}
