"""Whole models in small: the patches compute what their clients compute, through flashsci, and the runner says so or
why not. And the calls suite: tensors lie in memory as the models put them there."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from tools import bench, models
from tools.bench import cases, inputs, report
from tools.models import measure, served
from tools.models.step import Step, Way, double_stays, loss, replaced

CPU = torch.device("cpu")

#: Calls of flashsci in one step of the tiny size.
CALLS = {
    "pet-forces": 4,
    "pet-training": 4,
    "boltz-pairformer": 3,
    "boltz-pairformer-inference": 3,
    "boltz-diffusion": 2,
    "boltz-atoms": 2,
    "protenix-triangle": 2,
    "unimol-64": 2,
    "esmc": 2,
    "esmc-inference": 2,
    "tabpfn": 3,
    "tabpfn-inference": 3,
    "vit": 2,
    "vit-inference": 2,
    "swin": 2,
    "swin-inference": 2,
}


def client(name):
    try:
        return models.load(name)
    except models.Unavailable as missing:
        pytest.skip(str(missing))


@cache
def built(name):
    """The steps in fp64 and fp32."""
    module = client(name)
    return [module.build("tiny", dtype, CPU) for dtype in (torch.float64, torch.float32)]


@cache
def traced(name):
    """Results of each step on flashsci in fp32, and its calls."""
    found = {}
    for step in built(name)[1]:
        with served.listening() as calls:
            results = step.ours.results()
        found[step.id] = results, list(calls.values())
    return found


@pytest.mark.parametrize("name", models.MODELS)
def test_patched_model_is_the_client(name):
    """In fp64 to rounding, in fp32 within twice the client's own error; parameter gradients and forces included."""
    exact, single = built(name)
    for step, step64 in zip(single, exact, strict=True):
        with double_stays():
            truth, ours64 = step64.client.results(), step64.ours.results()
        results, _ = traced(name)[step.id]
        theirs = step.client.results()
        assert set(truth) == set(ours64) == set(results) == set(theirs)
        training = "inference" not in step.id and step.id != "pet-forces"
        assert ("parameter gradients" in truth) == training
        for what, x in truth.items():
            assert x.dtype == torch.float64 and x.abs().max() > 0, (step.id, what)
            assert x.numel() > 50, f"{step.id}: the rounding of few numbers is luck: {what}"
            assert measure.relative(ours64[what], x) < 1e-13, (step.id, what)
            allowed = 2 * measure.relative(theirs[what], x) + torch.finfo(torch.float32).eps / 2
            assert measure.relative(results[what], x) <= allowed, (step.id, what)


@pytest.mark.parametrize("name", models.MODELS)
def test_errors_are_measured_of_every_step_that_is_timed(name):
    """By names, so on no device; but PET looks for neighbours, which takes numbers."""
    module = client(name)
    device = CPU if name == "pet" else torch.device("meta")
    with device:
        timed, measured = (
            [step.id for step in module.build(size, module.DTYPES[0], device)]
            for size in ("real", measure.SIZES["real"])
        )
    assert timed == measured


@pytest.mark.parametrize("name", models.MODELS)
def test_patch_reaches_flashsci_and_is_undone(name):
    for step in built(name)[1]:
        _, calls = traced(name)[step.id]
        assert sum(call["count"] for call in calls) == CALLS[step.id], step.id
        assert all(call["forward"] for call in calls)
        with served.listening() as none:
            step.client.results()
        assert not none, f"{step.id}: the client as it is calls flashsci"


def layout(shape, strides, packed):
    """Of LAYOUTS, by strides; None: contiguous."""
    heads, s, d = (shape[-2], shape[-3], shape[-1]) if packed else shape[-3:]
    by_head, by_row = (strides[-2], strides[-3]) if packed else (strides[-3], strides[-2])
    if by_row == d and by_head == s * d and not packed:
        return None
    assert by_head == d or heads == 1
    return {heads * d: cases.HEADS_INSIDE, 3 * heads * d: cases.QKV}[by_row]


def bias_layout(shape, strides):
    heads = shape[-3]
    if strides[-1] == 1:
        return None
    assert strides[-3] == 1
    return cases.HEADS_LAST if strides[-1] == heads else cases.ONE_LAYER


def about(call):
    """What makes a call of a model and one of the suite alike, whatever the size."""
    shapes, strides = call["shapes"], call["strides"]
    packed = len(shapes["q"]) == 3
    found = {
        "D": shapes["q"][-1],
        "q": layout(shapes["q"], strides["q"], packed),
        "fewer heads": shapes["k"][-3] < shapes["q"][-3] and not packed,
        "bias": "bias" in shapes or "key_weight" in shapes,
        "strided bias": bias_layout(shapes["bias"], strides["bias"]) if "bias" in shapes else None,
        "mask": "mask" in shapes,
        "packed": packed,
    }
    if "dout" in strides:
        out = [*shapes["q"][:-1], shapes["v"][-1]]
        assert layout(out, strides["dout"], packed) == cases.HEADS_INSIDE
    return found


def small(case):
    """A case with its layouts and without its size."""
    sq = min(case.Sq, 6)
    sk = sq if case.Sk == case.Sq else 8
    size = {
        "B": min(case.B, 2),
        "Sq": sq,
        "Sk": sk,
        "lens": tuple(min(n, 5) for n in case.lens[:3]),
    }
    if case.N is not None:
        size["N"] = min(case.N, 3)
    size["H"] = min(case.H, 3)
    size["Hk"] = size["H"] if case.Hk == case.H else case.Hk
    made = replace(case, **size)
    full = (*made.batch, made.H, sq, sk)

    def fitted(shape):
        return shape and tuple(1 if n == 1 else m for n, m in zip(shape, full, strict=True))

    return replace(made, bias=fitted(case.bias), mask=fitted(case.mask))


def call_of(case):
    """A case as `served` would note it."""
    made = inputs.make_inputs(small(case), CPU)
    tensors = {n: getattr(made, n) for n in ("q", "k", "v", "bias", "mask", "dout")}
    tensors = {n: x for n, x in tensors.items() if x is not None}
    shapes = {n: list(x.shape) for n, x in tensors.items() if n != "dout"}
    return {"shapes": shapes, "strides": {n: list(x.stride()) for n, x in tensors.items()}}


@pytest.mark.parametrize("name", models.MODELS)
def test_every_call_of_a_model_is_in_the_suite(name):
    known = [about(call_of(case)) for case in bench.SUITES["calls"] if case.layout]
    for id, (_, calls) in traced(name).items():
        for call in calls:
            assert about(call) in known, f"{id}: no case for {call}"


@pytest.mark.parametrize("case", bench.SUITES["calls"], ids=lambda case: case.id)
def test_strides_are_as_declared(case):
    made = inputs.make_inputs(small(case), CPU)
    packed = bool(case.lens)
    q, k, v = made.q, made.k, made.v
    assert ("-model" in case.id) == (case.layout is not None)
    if case.layout is None:
        assert all(x.is_contiguous() for x in (q, k, v, made.dout))
        assert made.bias is None or made.bias.is_contiguous()
        return
    assert (made.dout if packed else made.dout.transpose(-3, -2)).is_contiguous()
    if case.layout == cases.QKV:
        first, second, third = (x.storage_offset() for x in (q, k, v))
        assert second - first == third - second == q.shape[-2 if packed else -3] * q.shape[-1]
        assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    else:
        rows, heads = (-3, -2) if packed else (-2, -3)
        held = (small(case).H if case.layout == cases.FIRST_HEADS else k.shape[heads]) * k.shape[-1]
        assert k.stride(rows) == held and q.stride(rows) == q.shape[heads] * q.shape[-1]
    if case.bias_layout:
        heads = made.bias.shape[-3] * (cases.BIAS_LAYERS if case.bias_layout == cases.ONE_LAYER else 1)
        assert made.bias.stride(-3) == 1 and made.bias.stride(-1) == heads
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in made.leaves.values())


def test_contiguous_twins_differ_in_layout_alone():
    suite = {case.id: case for case in bench.SUITES["calls"]}
    twins = [id for id in suite if id.endswith("-model") and id.removesuffix("-model") in suite]
    assert len(suite) >= 45 and len(twins) >= 13
    for id in twins:
        plain = replace(suite[id], id=id.removesuffix("-model"), layout=None, bias_layout=None)
        assert plain == suite[id.removesuffix("-model")]
    described = suite["calls-triangle-bf16-s384-model"].describe()
    assert (described["layout"], described["bias_layout"]) == ("heads inside", "heads last")
    assert "layout" not in suite["calls-triangle-bf16-s384"].describe()


@pytest.mark.parametrize("id", ["calls-triangle-bf16-s384-model", "calls-tabular-test-bf16-s2000-model"])
def test_plain_math_is_a_candidate(id):
    """bf16 with a strided fp32 bias and a mask; fewer heads of keys."""
    found = bench.run([small(bench.select(ids=[id])[0])], ["math", "sdpa"], "cpu", seconds=0.01)
    assert {(r["backend"], r["pass"], r["gate"]) for r in found} == {
        (name, kind, "passed") for name in ("math", "sdpa") for kind in ("forward", "backward")
    }


def test_plain_math_refuses_what_it_is_not():
    (packed,) = bench.select(ids=["calls-proteins-fp32-model"])
    (found,) = bench.run([small(packed)], ["math"], "cpu", order=0, seconds=0.01)
    assert found["gate"] == "refused: plain PyTorch has no packed sequences"


# The runner, on a model of its own.


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def attend(self, q, k, v):
        return (q @ k.mT / 8**0.5).softmax(-1) @ v

    def forward(self, x):
        return self.attend(*self.project(x).chunk(3, -1))


def toy(ours=lambda self, q, k, v: served.attention(q, k, v), theirs=Toy.attend):
    """A model file whose client and patch are these."""

    def build(size, dtype, device):
        torch.manual_seed(0)
        model = Toy().to(device, dtype)
        x = torch.randn(2, 5, 8).to(device, dtype)

        def step():
            out = model(x)
            loss(out).backward()
            return {"out": out}

        def through(attend):
            return Way(model, step, partial(replaced, (Toy, "attend", attend)))

        # What is wrong with the client is so in fp32 alone: float64 is the truth.
        attend = Toy.attend if dtype == torch.float64 else theirs
        return [Step("toy", "a toy", "matmul", through(attend), through(ours))]

    return SimpleNamespace(DTYPES=(torch.float32,), build=build)


def measured(monkeypatch, module):
    monkeypatch.setattr(measure, "load", lambda name: module)
    found = measure.run(["toy"], size="tiny", device="cpu", seconds=0.01)
    assert json.loads(json.dumps(found)) == found
    assert [r["backend"] for r in found] == ["client", "flashsci"]
    return found


def test_records_of_a_model(monkeypatch):
    theirs, ours = measured(monkeypatch, toy())
    assert theirs["case"] == ours["case"]
    assert theirs["case"]["id"] == "toy-fp32"
    assert set(ours["errors"]) == {"out", "parameter gradients"}
    assert (theirs["gate"], ours["gate"]) == ("passed", "passed")
    assert 0 < ours["err_ratio"] <= 1 and theirs["err_ratio"] is None
    assert theirs["time_us"]["median"] > 0 and ours["time_us"]["median"] > 0
    assert (theirs["path"], ours["path"]) == ("matmul", "sdpa 1; gradients sdpa 1")
    assert theirs["calls"] == [] and ours["calls"][0]["shapes"]["q"] == [2, 5, 8]
    assert 0 <= ours["difference"] < 1e-5


def raising(self, q, k, v):
    raise RuntimeError("no such kernel\nat line 3")


def too_large(self, q, k, v):
    raise torch.OutOfMemoryError("2 TiB")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("patch", "gate"),
    [
        (lambda self, q, k, v: 1.01 * served.attention(q, k, v), "failed: error of "),
        (
            lambda self, q, k, v: float("nan") * served.attention(q, k, v),
            "failed: error of out inf",
        ),
        (Toy.attend, "failed: no call reached flashsci"),
        (raising, "failed: it raised: no such kernel"),
        (too_large, "refused: out of memory"),
    ],
    ids=["wrong", "nan", "not patched", "raises", "memory"],
)
def test_no_time_for_what_failed(monkeypatch, patch, gate):
    theirs, ours = measured(monkeypatch, toy(patch))
    assert ours["gate"].startswith(gate)
    assert ours["time_us"] is None
    assert theirs["gate"] == "passed" and theirs["time_us"]["median"] > 0
    (row,) = report.models([theirs, ours]).rows
    assert row[5] == "-" and row[-1] == f"flashsci {ours['gate']}"


def test_a_client_that_does_not_fit(monkeypatch):
    theirs, ours = measured(monkeypatch, toy(theirs=too_large))
    assert (theirs["gate"], theirs["time_us"]) == ("refused: out of memory", None)
    assert (ours["gate"], ours["err_ratio"]) == ("not checked", None)
    assert ours["time_us"]["median"] > 0 and max(ours["errors"].values()) < 1e-5
    (row,) = report.models([theirs, ours]).rows
    assert row[6] == "-" and row[-1] == "client refused: out of memory; flashsci not checked"


def test_a_client_that_is_not_there(monkeypatch, tmp_path):
    def absent(name):
        raise models.Unavailable("toy is not installed")

    monkeypatch.setattr(measure, "load", absent)
    found = measure.run(["toy"], size="tiny", device="cpu")
    assert [r["gate"] for r in found] == ["refused: toy is not installed"] * 2
    titles = {table.title: table for table in report.tables(found)}
    assert set(titles) == {"Not run"}
    with pytest.raises(bench.BenchError, match="there are tiny, real"):
        measure.run(["toy"], size="huge")
    with pytest.raises(bench.BenchError, match="no dtype named 'fp8'"):
        measure.run(["toy"], dtype="fp8")


def test_a_client_that_breaks_off_leaves_the_rest(monkeypatch):
    """In float64, that is: what it does in another dtype is its own gate."""

    def broken(size, dtype, device):
        raise torch.OutOfMemoryError("Tried to allocate 2 TiB")

    modules = {"pet": SimpleNamespace(DTYPES=(torch.float32,), build=broken), "vit": toy()}
    monkeypatch.setattr(measure, "load", modules.__getitem__)
    found = measure.run(["pet", "vit"], size="tiny", device="cpu", seconds=0.01)
    gates = [(r["case"]["id"], r["gate"]) for r in found]
    broke_off = "failed: it raised: Tried to allocate 2 TiB"
    assert gates == [("pet", broke_off)] * 2 + [("toy-fp32", "passed")] * 2
    report.show(report.tables(found), Console(file=(shown := io.StringIO()), width=300))
    assert "client failed: it raised: Tried to" in shown.getvalue()
    found = measure.run(["vit"], size="tiny", device="cpu", minutes=0)
    assert {r["gate"] for r in found} == {"refused: time is up"}


def test_names_of_models():
    with pytest.raises(bench.BenchError, match="no model named 'gpt'; there are pet, "):
        models.load("gpt")
    assert set(models.clients.RELEASES.values()) > {"boltz", "esm", "metatrain"}
    assert all(release.count("==") == 1 for release in models.clients.RELEASES)


def compiled_toy(monkeypatch, module):
    monkeypatch.setattr(measure, "load", lambda name: module)
    return measure.run(["toy"], size="tiny", device="cpu", seconds=0.01, compiled=True)


@pytest.mark.slow
def test_compiled_steps(monkeypatch):
    theirs, ours = compiled_toy(monkeypatch, toy())
    for record in (theirs, ours):
        assert record["compiled_gate"] == "passed" and record["compiled_us"]["median"] > 0
        assert record["compiled_difference"] < 1e-5


@pytest.mark.slow
def test_a_compiler_that_changes_results_or_refuses_is_seen(monkeypatch):
    honest = torch.compile
    ways = []

    def wrong(step):
        """Its second call gives results of another model."""
        ways.append(step)
        return honest(step) if len(ways) == 1 else lambda: {"out": 1.01 * step()["out"]}

    monkeypatch.setattr(measure.torch, "compile", wrong)
    theirs, ours = compiled_toy(monkeypatch, toy())
    assert theirs["compiled_gate"] == "passed" and ours["gate"] == "passed"
    assert "changes results by 1.0e-02" in ours["compiled_gate"]

    def refuses(step):
        def run():
            raise RuntimeError("no such thing")

        return run

    monkeypatch.setattr(measure.torch, "compile", refuses)
    for record in compiled_toy(monkeypatch, toy()):
        assert record["compiled_gate"] == "refused: no such thing" and record["time_us"]
        assert record["compiled_us"] is None


def test_table_of_models(monkeypatch):
    found = measured(monkeypatch, toy())
    for record, us, mb in zip(found, (5000.0, 2500.0), (3000.0, 900.0), strict=True):
        record["time_us"]["median"] = us
        record["peak_mem_mb"] = mb
    table = report.models(found)
    (row,) = table.rows
    assert row[:4] == ["toy", "a toy", "fp32", "matmul"]
    assert row[4:12] == ["5 ms", "2.5 ms", "2.00x", "-", "-", "3 GB", "900 MB", "3.33x"]
    assert row[-1] == "sdpa 1; gradients sdpa 1"
    assert "errors relative to the client in float64" in table.note
    assert report.overview(found).rows == [["toy", "2.00x", "3.33x"]]
    slower = json.loads(json.dumps(found))
    for r, us in zip(slower, (5000.0, 10000.0), strict=True):
        r["case"]["id"], r["time_us"]["median"], r["peak_mem_mb"] = "toy-other", us, None
    both = report.overview([*found, *slower])
    assert both.rows == [["toy", "0.50x to 2.00x", "3.33x"]] and "medians of whole steps" in both.note
    short = report.speeds(found)
    assert short.rows == [["toy", "a toy", "matmul", "-", "2.00x, memory 3.33x"]]
    for record, us in zip(found, (900.0, 600.0), strict=True):  # a step that waits for the host
        record["device_us"] = record["graph_us"] = {**record["time_us"], "median": us}
    assert report.models(found).rows[0][7] == "0.9, 0.6 ms: 1.50x"
    ((*_, in_short),) = report.speeds(found).rows
    assert in_short == "2.00x, memory 3.33x; as CUDA graphs 1.50x"
    found[0]["compiled_us"], found[1]["compiled_us"] = {"median": 800.0}, {"median": 400.0}
    assert report.models(found).rows[0][8] == "0.8, 0.4 ms: 2.00x"
    found[0]["compiled_us"] = None  # the client alone is refused
    assert report.models(found).rows[0][8] == "-, 0.4 ms"
    found[1]["compiled_gate"] = "failed: the compiler changes results"
    assert report.models(found).rows[0][-1] == "flashsci failed: the compiler changes results"
    found[1]["time_us"] = None
    assert report.speeds(found).rows == [] and report.speeds([]).note == ""
    assert report.overview(found).rows == [] and report.overview([]).note == ""
    (call,) = report.served(found).rows
    assert call[0] == "toy-fp32" and "q [2, 5, 8]" in call[2] and call[4:] == ["1", "sdpa", "sdpa"]
    assert [t.title for t in report.tables(found)] == ["Whole models"]
    assert report.models([]).rows == [] and report.markdown(report.models([])).count("|\n") == 1
