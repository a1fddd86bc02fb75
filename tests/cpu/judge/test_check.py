"""`python -m flashsci check`: its bookkeeping, and a small run where Triton interprets."""

import json
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from flashsci import check, digest
from flashsci.check import judging, planning, units, workers
from flashsci.check.report import write
from flashsci.testing import Case, FP8Case, FP8Inputs, PagedCase, PagedInputs, Variant

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, run the check itself")


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    """Whatever library lies in the tree, built from whatever sources: these runs know none."""
    monkeypatch.setattr(units, "library_units", dict)


@pytest.fixture
def bearable(monkeypatch):
    """Cases that the reference survives in float16 and that Triton serves: moderate scores, no gradient of key weights beside a sink."""
    planned = planning.plan_cases

    def eased(case):
        learnt = case.variant.key_weight_grad and not case.variant.sink
        variant = replace(case.variant, key_weight_grad=learnt)
        return replace(case, variant=variant, magnitude="unit", scale=None, bias_number="")

    monkeypatch.setattr(planning, "plan_cases", lambda *a, **k: [eased(c) for c in planned(*a, **k)])


def test_a_small_run_writes_the_report(tmp_path, monkeypatch, bearable):
    lines, out = [], tmp_path / "report.json"
    digests = {"triton/forward": "1", "cuda/sm80/fwd_bf16": "2"}
    monkeypatch.setattr(digest, "units", lambda: digests)
    kept = {"minus_infinity_in_bias": judging.TRAPS["minus_infinity_in_bias"]}
    monkeypatch.setattr(judging, "TRAPS", kept)
    code = check.run(
        cases=4,
        seed=0,
        out=out,
        workers=1,
        device="cpu",
        backends=("triton", "reference"),
        say=lines.append,
    )
    report = json.loads(out.read_text())
    assert code == 0, lines
    assert report["cases"] == 4 and report["failures"] == 0
    assert report["units"] == {"triton/forward": "1"}, "no backend here runs the other"
    for name in ("triton", "reference"):
        found = report["backends"][name]
        assert found["cases"] == 4 and set(found["worst ratio of error to allowance"]) >= {
            "out",
            "lse",
            "dq",
            "dk",
            "dv",
        }
        assert found["a result times 1.01 would fail"]["lse"]["judged"] > 0
    assert report["backends"]["triton-reference"]["cases"] == 4
    assert report["traps"] == {"minus_infinity_in_bias": {"triton": "passed", "reference": "passed"}}
    assert report["machine"]["torch"] == torch.__version__


def test_a_wrong_kernel_is_reported_with_its_reproducer(tmp_path, monkeypatch, stand_in):
    from flashsci.backends import triton

    honest = triton.forward
    stand_in(triton, forward=lambda *a: (1.01 * honest(*a)[0], honest(*a)[1]))
    monkeypatch.setattr(judging, "TRAPS", {})
    lines, out = [], tmp_path / "report.json"
    code = check.run(cases=4, seed=0, out=out, workers=1, device="cpu", backends=("triton",), say=lines.append)
    failures = json.loads(out.read_text())["backends"]["triton"]["failures"]
    assert code == 1 and failures
    assert any(f["problem"].startswith("out: ") for f in failures)
    case = failures[0]["case"]
    assert any(case in line for line in lines)
    assert check.reproduce(case, ["triton"], "cpu", say=lambda *a: None) == 1
    stand_in(triton, forward=honest)
    assert check.reproduce(case, ["triton"], "cpu", say=lambda *a: None) == 0


def test_a_failing_trap_is_a_failure(monkeypatch):
    def fall(backend, device):
        raise AssertionError("fell in")

    from flashsci.testing import Trap

    monkeypatch.setattr(judging, "TRAPS", {"pit": Trap("pit", fall)})
    assert judging.spring("pit", "triton", "cpu") == ("pit", "triton", "failed: fell in")
    assert check.run(cases=1, out=None, workers=1, device="cpu", backends=("triton",), say=lambda *a: None) == 1


def test_refusals_are_counted_and_an_untried_backend_fails(monkeypatch):
    monkeypatch.setattr(judging, "TRAPS", {})
    lines = []
    code = check.run(cases=2, out=None, workers=1, device="cpu", backends=("cuda",), say=lines.append)
    assert code == 1 and "no case ran on: cuda" in lines[-1]


def test_a_part_updates_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "TRAPS", {})
    monkeypatch.setattr(digest, "units", lambda: {"triton/forward": "new", "triton/backward": "b"})
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"cases": 2000, "units": {"triton/forward": "old", "triton/backward": "kept"}}))
    assert (
        check.run(
            "triton/forward",
            cases=3,
            seed=0,
            out=path,
            workers=1,
            device="cpu",
            say=lambda *a: None,
        )
        == 0
    )
    report = json.loads(path.read_text())
    assert report["cases"] == 2000 and report["units"]["triton/backward"] == "kept"
    assert report["units"]["triton/forward"] == "new"
    part = report["parts"]["triton/forward"]
    assert part["cases"] == 3 and "dq" not in part["backends"]["triton"]["worst ratio of error to allowance"]


def entry(units, failures=0, library=None, cases=10, seed=1):
    """What a run reports, as far as the sums go: half of its cases are in fp32."""
    names = dict.fromkeys(f"cuda:{u.split('/')[1]}" if "/sm" in u else u.split("/")[0] for u in units)
    return {
        "cases": cases,
        "seed": seed,
        "failures": failures,
        "unfinished": [],
        "units": units,
        "library": library or {},
        "backends": {n: {"cases": cases, "failures": [{}] * failures} for n in names},
        "coverage": {n: {"float32": {"cases": cases // 2}} for n in names},
    }


def test_a_part_brings_its_library(tmp_path):
    """The report names the library that each unit was checked with, whichever run that was."""
    path = tmp_path / "report.json"
    kept = {"cuda/a": "1", "cuda/b": "2"}
    path.write_text(json.dumps({"units": dict(kept), "library": dict(kept)}))
    write(entry({"cuda/b": "3"}, library={"cuda/a": "4", "cuda/b": "3"}), path, "cuda/b")
    found = json.loads(path.read_text())
    assert found["units"] == found["library"] == {"cuda/a": "1", "cuda/b": "3"}
    write(entry({"cuda/b": "3"}, failures=1, library={"cuda/b": "5"}), path, "cuda/b")
    assert json.loads(path.read_text())["library"] == found["library"]


def test_parts_of_earlier_kernels_leave(tmp_path):
    path = tmp_path / "report.json"
    write(entry({"cuda/a/back": "1"}), path, "cuda/a/back")
    write(entry({"cuda/b": "1"}), path, "cuda/b")
    write(entry({"cuda/a/back": "2", "cuda/a/front": "1"}), path, "cuda/a")
    assert list(json.loads(path.read_text())["parts"]) == ["cuda/b", "cuda/a"]
    # What a part that failed has judged does not take the place of what passed.
    write(entry({"cuda/b": "3"}, failures=1), path, "cuda/b/more")
    assert list(json.loads(path.read_text())["parts"]) == ["cuda/b", "cuda/a", "cuda/b/more"]
    # A whole run replaces the last one; parts of the kernels that it has judged stay.
    write(entry({"cuda/a/back": "2", "cuda/a/front": "2", "cuda/b": "1"}), path, None)
    assert list(json.loads(path.read_text())["parts"]) == ["cuda/b"]


def test_a_report_adds_up_what_was_judged_of_the_present_kernels(tmp_path):
    path = tmp_path / "report.json"
    now = {"cuda/sm90/a": "1", "cuda/sm80/b": "1", "triton/c": "1"}
    write(entry(now, cases=100), path, None)
    write(entry({"cuda/sm90/a": "1"}, cases=30, seed=2), path, "cuda/sm90")
    write(entry(now, cases=50, seed=3), path, "another seed")
    # The same cases again: the longer run counts.
    found = write(entry(now, cases=40, seed=3), path, "again")["total"]
    assert found == json.loads(path.read_text())["total"]
    assert (found["cases"], found["runs"], found["seeds"]) == (180, 3, [1, 2, 3])
    assert found["backends"] == {
        "cuda:sm80": {"cases": 150, "fp32": 75, "failures": 0},
        "cuda:sm90": {"cases": 180, "fp32": 90, "failures": 0},
        "triton": {"cases": 150, "fp32": 75, "failures": 0},
    }
    # A kernel that changed: of the whole run, what other kernels were judged by still counts.
    found = write(entry({"cuda/sm90/a": "2"}, cases=7, seed=4), path, "cuda/sm90")["total"]
    assert (found["cases"], found["runs"]) == (7, 1)
    assert found["backends"]["cuda:sm90"] == {"cases": 7, "fp32": 3, "failures": 0}
    assert found["backends"]["triton"] == {"cases": 100, "fp32": 50, "failures": 0}


def test_a_part_has_a_name_and_a_seed_of_its_own(tmp_path, monkeypatch, bearable, capsys):
    monkeypatch.setattr(judging, "TRAPS", {})
    monkeypatch.setattr(digest, "units", lambda: {"triton/forward": "1"})
    out = tmp_path / "report.json"
    call = ["--cases", "3", "--workers", "1", "--device", "cpu", "--backends", "reference"]
    for more in ([], ["--part", "first"], ["--part", "second"]):
        check.main([*call, "--out", str(out), *more])
    found = json.loads(out.read_text())
    assert list(found["parts"]) == ["first", "second"]
    assert len(set(found["total"]["seeds"])) == 3 and found["total"]["cases"] == 9
    assert found["total"]["backends"]["reference"]["cases"] == 9
    assert "3 runs and parts: 9 generated cases" in capsys.readouterr().out


@pytest.mark.slow
def test_unknown_unit_and_missing_gpu(capsys):
    unit = next(iter(digest.units()))
    assert check.run("triton/sideways", cases=1, out=None, device="cpu") == 2
    assert unit in capsys.readouterr().out
    assert check.main(["--cases", "1"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().out


def test_a_library_from_other_sources_is_refused(monkeypatch):
    tree = digest.units()
    kernel = next(name for name in tree if name.startswith("cuda/"))
    monkeypatch.setattr(units, "library_units", lambda: {kernel: "0123"})
    reason = units.refusal(tree, "cpu")
    assert reason is not None and "built from other sources" in reason and "0123" in reason
    monkeypatch.setattr(units, "library_units", lambda: dict(tree))
    assert units.refusal(tree, "cpu") is None


def test_plans_cover_and_reproduce():
    cases = check.plan_cases(2000, 0, "cuda", None)
    assert len(cases) == 2000 and cases == check.plan_cases(2000, 0, "cuda", None)
    assert len({c.variant for c in cases}) <= 64
    assert max(max(c.seq_q, *c.lens_q, 0) for c in cases) >= 1000
    for unit, wanted in (
        ("triton/bias_gradient", lambda v: v.bias_grad),
        ("cuda/sm80/fwd_bf16", lambda v: v.dtype == "bfloat16"),
    ):
        assert all(wanted(c.variant) for c in check.plan_cases(100, 0, "cuda", unit))


def test_cases_of_cuda_units_are_served():
    """Nothing that every CUDA kernel refuses; a third of each dtype."""
    cases = check.plan_cases(900, 1, "cuda", "cuda/sm")
    assert not any(c.variant.dropout or c.variant.key_weight for c in cases)
    assert not any(c.variant.varlen and c.variant.bias for c in cases)
    for dtype in ("float16", "bfloat16", "float32"):
        assert sum(c.variant.dtype == dtype for c in cases) > 200


@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_cases_of_short_sequences_have_rows_that_go_through_shared_memory(dtype):
    """Of 32, 64 and 128 bytes, of several heads with keys of their own, before rows and inside them: a sixth of all at least.
    Of each size some with tensors that lie alike, where kernels know more."""
    cases = check.plan_cases(2000, 0, "cuda", f"cuda/sm80/small_{dtype}", many=True)
    seen: Counter[tuple[int, str, bool]] = Counter()
    for case in cases:
        variant = case.variant
        lengths = case.seq_q, case.seq_k
        whole = variant.head_dim == variant.head_dim_v and variant.head_dim in planning.WHOLE[variant.dtype]
        if whole and case.group == 1 and case.heads_k in (2, 3, 4, 5, 6, 8, 12) and min(lengths) > 0 and max(lengths) <= 32:  # fmt: skip
            alike = case.seq_q == case.seq_k and len(set(case.layout_of.values())) == 1
            seen[variant.head_dim, case.layout, alike] += 1
    for dim in planning.WHOLE[variant.dtype]:
        for layout in ("bhsd", "bshd", "joint"):
            assert min(seen[dim, layout, True], seen[dim, layout, False]) >= 5, seen
    assert sum(seen.values()) > len(cases) / 6


def test_large_traps_run_beside_and_wait_for_memory(monkeypatch):
    calls = []

    def spring(name, backend, device):
        calls.append(name)
        first = calls.count(name) == 1
        failures = {"short": "failed: CUDA out of memory", "wrong": "failed: dq differs"}
        return name, backend, failures.get(name, "passed") if first else "passed"

    monkeypatch.setattr(judging, "spring", spring)
    springs = [(name, "cuda", "cuda") for name in ("short", "other", "wrong")]
    large = workers.LargeTraps(springs, time.time() + 60)
    large.start()
    assert large.results() == [
        ("short", "cuda", "passed"),
        ("other", "cuda", "passed"),
        ("wrong", "cuda", "failed: dq differs"),
    ]
    assert calls == ["short", "other", "wrong", "short"], "only want of memory is tried again"
    late = workers.LargeTraps(springs, time.time() - 1)  # no time: they are missing from the report
    assert late.results() == []


def test_tallies_add_up():
    a, b = check.Tally(), check.Tally()
    a.see("out", (0.1, 0.5, 0.2), True)
    b.see("out", (0.3, 0.2, 0.1), False)
    b.see("dq", (0.1, 0.1, 0.1), None)
    b.fail(Case(), "wrong")
    b.refuse("no")
    a.add(b)
    assert a.worst == {"out": [0.3, 0.5, 0.2], "dq": [0.1, 0.1, 0.1]} and a.caught == {"out": [1, 2]}
    assert a.refused == {"no": 1} and eval(a.failures[0]["case"]) == Case(variant=Variant())


def test_seed_of_the_day_and_coverage_are_in_the_report(tmp_path, monkeypatch, bearable):
    monkeypatch.setattr(judging, "TRAPS", {})
    monkeypatch.setattr(digest, "units", lambda: {"triton/forward": "1"})
    lines, out = [], tmp_path / "report.json"
    run = {"cases": 6, "out": out, "workers": 1, "device": "cpu", "backends": ("reference",)}
    check.run(**run, say=lines.append)
    report = json.loads(out.read_text())
    assert 20000101 < report["seed"] < 99991231 and any(f"of seed {report['seed']}" in line for line in lines)
    seen = report["coverage"]["reference"]
    assert sum(x["cases"] for name, x in seen.items() if not name.startswith("head")) == 6
    assert all("values huge" in x["never"] or x["cases"] for x in seen.values())
    assert any("never drawn, reference, " in line for line in lines)


def test_parts_name_the_digests_that_they_judged(tmp_path):
    path = tmp_path / "report.json"
    write(entry({"triton/a": "1"}), path, "triton/a")
    write(entry({"triton/b": "1"}), path, "triton/b")
    parts = json.loads(path.read_text())["parts"]
    assert parts["triton/a"]["units"] == {"triton/a": "1"}
    # A unit that was judged again in another form: the older part speaks of a kernel that is gone.
    write(entry({"triton/a": "2", "triton/b": "1"}), path, "triton/")
    assert list(json.loads(path.read_text())["parts"]) == ["triton/b", "triton/"]


def test_kernels_here_hold_every_generation_that_runs(monkeypatch):
    built = {f"cuda/sm{g}/fwd_fp16": "" for g in (75, 80, 90)}
    monkeypatch.setattr(units, "library_units", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, held in (
        ((9, 0), ["90", "80", "75"]),
        ((8, 6), ["80", "75"]),
        ((10, 0), ["80", "75"]),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert check.kernels_here() == ("triton", "cuda", *(f"cuda:sm{g}" for g in held))


def test_a_full_run_has_cases_for_generations_alone():
    backends = ("triton", "cuda", "cuda:sm90", "cuda:sm80", "cuda:sm75")
    plans = planning.plans_of(10_000, 3, "cuda", None, [1, 2], backends)
    assert [len(planned) for planned, _ in plans] == [5000, 3500, 1500, 1000, 625]
    mixed, hopper, single, *_ = (planned for planned, _ in plans)
    assert [names for _, names in plans] == [
        backends,
        ("cuda:sm90", "cuda:sm80"),
        ("cuda:sm80",),
        ("triton", "cuda"),
        ("triton",),
    ]
    for case in hopper:
        variant = case.variant
        assert variant.dtype != "float32" and variant.head_dim % 8 == variant.head_dim_v % 8 == 0
        assert not (variant.dropout or variant.key_weight or (variant.varlen and variant.bias))
        assert "shifted" not in case.layout_of.values()
    assert sum(c.variant.dtype == "float32" for c in mixed) > 1500
    assert all(c.variant.dtype == "float32" for c in single)
    of_unit = planning.plans_of(400, 3, "cuda", "cuda/sm90", [1], ("cuda", "cuda:sm90"))
    assert [(len(planned), names) for planned, names in of_unit] == [
        (100, ("cuda", "cuda:sm90")),
        (300, ("cuda:sm90",)),
    ]
    one = planning.plans_of(400, 3, "cuda", "triton/forward", [1], ("triton",))
    assert [(len(planned), names) for planned, names in one] == [
        (400, ("triton",)),
        (25, ("triton",)),
    ]
    wide = planning.plans_of(400, 3, "cuda", "triton/wide", [1, 2], ("triton",))
    assert [len(planned) for planned, _ in wide] == [0, 40, 400]


@pytest.mark.parametrize("seed", (0, 3, 20261122))
def test_heads_wider_than_others_are_drawn_in_both_forms(seed):
    """Wide heads whose scores are held in memory, and such with too many of them; every feature, and the second order."""
    from flashsci.backends.triton import tilings

    cases = planning.wide_cases(600, seed, "cuda")
    assert {(c.variant.head_dim, c.variant.head_dim_v) for c in cases} == set(planning.WIDE)
    single = [c for c in cases if c.variant.dtype == "float32" and c.seq_q * c.seq_k]
    held = [c for c in single if tilings.is_wide((c.variant.head_dim, c.variant.head_dim_v), c.seq_q, c.seq_k, c.group)]
    assert len(held) > 200 and len(single) - len(held) > 50 and len(cases) > len(single)
    for feature in (
        "bias_grad",
        "key_weight_grad",
        "mask",
        "softcap",
        "window",
        "lse_grad",
        "tangents",
    ):
        assert any(getattr(c.variant, feature) for c in held), feature
    assert {c.group > 1 for c in held} == {True, False}
    assert sum(c.seq_k > tilings.SHORT_ROW for c in held) > 20


@pytest.mark.parametrize("seed", [0, 20261122])
def test_what_the_generator_draws_comes_up_in_a_long_run(seed):
    from flashsci.testing.coverage import Coverage

    plans = planning.plans_of(10_000, seed, "cuda", None, [1], ("triton", "cuda:sm90", "cuda:sm80"))
    missing = {}
    for (planned, _), name in zip(plans[:3], ("mixed", "hopper", "single"), strict=True):
        coverage = Coverage()
        for case in planned:
            coverage.see(name, case)
        for group, found in coverage.summary([name])[name].items():
            # Copies of Hopper take no rows off 16 bytes.
            missing[name, group] = {x for x in found["never"] if name != "hopper" or "shifted" not in x}
    for (name, group), never in missing.items():
        most = 0 if not group.startswith("head") else 14 if name == "mixed" else 6
        assert len(never) <= most, (name, group, never)


def test_a_pinned_backend_that_refuses_gradients_is_judged_by_its_forward(monkeypatch):
    from flashsci.errors import BackendError

    honest = judging.evaluate

    def evaluate(inputs, name, *arguments, **options):
        if name == "cuda:sm90" and inputs.dout is not None:
            raise BackendError(f"flashsci: no backward for {list(inputs.q.shape)}; use another")
        return honest(inputs, "reference", *arguments, **options)

    monkeypatch.setattr(judging, "evaluate", evaluate)
    tallies = check.judge_case(Case(), ["cuda:sm90", "reference"], "cpu")
    found = tallies["cuda:sm90"]
    assert found.cases == found.forward_only == 1 and set(found.worst) == {"out", "lse"}
    assert found.refused == {"flashsci: no backward for [..]": 1}
    assert tallies["reference"].forward_only == 0 and "dq" in tallies["reference"].worst


def test_what_nobody_serves_needs_no_oracle(monkeypatch):
    monkeypatch.setattr(judging, "Judge", None)
    tallies = check.judge_case(Case(), ["cuda"], "cpu")
    assert tallies["cuda"].cases == 0 and tallies["cuda"].refused


def test_paged_calls_are_a_part_of_their_own(tmp_path, capsys, monkeypatch):
    """Judged and counted like others, under the digests of their kernels; a small run of everything leaves them out."""
    monkeypatch.setattr(planning, "generate_paged", lambda seed, n, **_: [PagedCase(seed=i) for i in range(n)])
    digests = {"triton/forward": "1", "triton/paged": "2", "triton/paged_cache": "3"}
    monkeypatch.setattr(digest, "units", lambda: digests)
    path = tmp_path / "report.json"
    options = ["--paged", "2", "--device", "cpu", "--workers", "1", "--seed", "3", "--out", str(path)]
    assert check.main(options) == 0, capsys.readouterr().out
    part = json.loads(path.read_text())["parts"]["paged"]
    assert set(part["units"]) == {"triton/paged", "triton/paged_cache"}
    assert part["backends"]["triton"]["cases"] == part["cases"] == 2
    assert {"out", "lse"} <= set(part["backends"]["triton"]["worst ratio of error to allowance"])


def test_a_group_that_nobody_runs_here_is_not_checked(tmp_path, capsys):
    options = ["--paged", "2", "--device", "cpu", "--backends", "cuda", "--out", str(tmp_path / "x.json")]
    assert check.main(options) == 2
    assert "none of cuda runs units of 'paged'" in capsys.readouterr().out
    assert not (tmp_path / "x.json").exists()


def test_8_bit_floats_are_a_part_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning, "generate_fp8", lambda seed, n, **_: [FP8Case(seed=i) for i in range(n)])
    monkeypatch.setattr(digest, "units", lambda: {"triton/forward": "1", "triton/fp8": "2"})
    path = tmp_path / "report.json"
    options = ["--fp8", "2", "--device", "cpu", "--workers", "1", "--seed", "3", "--out", str(path)]
    assert check.main(options) == 0, capsys.readouterr().out
    part = json.loads(path.read_text())["parts"]["fp8"]
    assert part["units"] == {"triton/fp8": "2"}
    assert part["backends"]["triton"]["cases"] == part["cases"] == 2
    assert {"out", "lse"} <= set(part["backends"]["triton"]["worst ratio of error to allowance"])


def test_a_wrong_result_of_8_bit_floats_fails(monkeypatch):
    right = FP8Inputs.evaluate
    monkeypatch.setattr(FP8Inputs, "evaluate", lambda *given: {n: 1.2 * x for n, x in right(*given).items()})
    tallies = judging.judge_fp8_case(FP8Case(), ("reference", "sdpa"), "cpu")
    assert tallies["reference"].failures and tallies["sdpa"].refused


def test_older_devices_do_not_vouch_for_8_bit_floats(monkeypatch):
    for capability, runs in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at=capability: at)
        assert units.runs_group("fp8", "cuda") is runs and units.runs_group("paged", "cuda")


def test_a_wrong_paged_result_fails(monkeypatch):
    right = PagedInputs.evaluate
    monkeypatch.setattr(PagedInputs, "evaluate", lambda *given: {n: 1.01 * x for n, x in right(*given).items()})
    tallies = judging.judge_paged_case(PagedCase(), ("reference", "sdpa"), "cpu")
    assert tallies["reference"].failures and tallies["sdpa"].refused


@pytest.mark.parametrize("runs", (False, True))
def test_cases_of_8_bit_floats_are_for_cuda_where_it_has_them(monkeypatch, runs):
    monkeypatch.setattr(units, "runs_cuda_fp8", lambda device: runs)
    every = ("triton", "cuda", "cuda:sm90", "cuda:sm80")
    cases, backends = planning.fp8_plan(3, 1, "cuda", every)
    assert len(cases) == 3 and backends == (("triton", "cuda") if runs else ("triton",))
    assert {"triton/fp8", "cuda/sm90/fp8_e4m3"} == set(units.chosen_units("fp8"))
