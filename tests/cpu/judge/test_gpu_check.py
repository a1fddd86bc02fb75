"""`make gpu-check`: its steps, their limits and logs, and the table at the end. The steps themselves need a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from flashsci import digest
from tests.support.clock import Clock, processes
from tools.gpu import gpu_check, more_cases

ROOT = Path(__file__).resolve().parents[3]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def use(monkeypatch, **commands: list[str]) -> None:
    """These commands as the steps, two seconds each."""
    plan = {name: gpu_check.Step(30, {name: command}) for name, command in commands.items()}
    monkeypatch.setattr(gpu_check, "steps", lambda *_: plan)


def test_steps_are_those_that_the_help_lists(tmp_path):
    plan = gpu_check.steps(tmp_path, tmp_path, 2)
    listed = gpu_check.__doc__.split("output folder:\n\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(plan)
    for step in plan.values():
        for command in step.commands.values():
            for path in command:
                path = path.removeprefix("--ignore=")
                if path.startswith(("tests/", "tools/")):
                    assert (ROOT / path).exists(), path
    assert "make build-manual" in plan["sanitizers"].skipped or "PATH" in plan["sanitizers"].skipped


def test_every_step_runs_and_the_table_says_how(tmp_path, monkeypatch, capsys):
    use(
        monkeypatch,
        check=python("print('12 cases, 0 failures')"),
        tests=python("print('first'); print('2 failed'); raise SystemExit(3)"),
        bench=python("import time; time.sleep(60)"),
    )
    assert gpu_check.main(["--out", str(tmp_path), "--limit", "bench=1"]) == 1
    *_, table = capsys.readouterr().out.rsplit("\n\n", 1)
    check, tests, bench, where = table.splitlines()
    assert check.split()[:2] == ["check", "passed"] and check.endswith("12 cases, 0 failures")
    assert tests.startswith("tests       failed: exit 3") and tests.endswith("2 failed")
    assert bench.startswith("bench       out of time: 1 s") and "--limit" in bench
    assert where.endswith(str(tmp_path))
    assert "first" in (tmp_path / "tests.log").read_text()


def test_some_steps_with_options(tmp_path, monkeypatch, capsys):
    code = "import os, sys; print(sys.argv[1:], os.environ['PYTHONPATH'].split(os.pathsep)[0])"
    use(monkeypatch, check=python(code), tests=python("0"))
    assert gpu_check.main(["--out", str(tmp_path), "check", "--option", "check=--cases 5"]) == 0
    assert f"['--cases', '5'] {ROOT}" in capsys.readouterr().out
    assert not (tmp_path / "tests.log").exists()
    with pytest.raises(SystemExit):
        gpu_check.main(["--out", str(tmp_path), "nonsense"])
    assert "no step named 'nonsense'; there are check, tests" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="'nonsense=1' is not STEP=VALUE"):
        gpu_check.main(["--out", str(tmp_path), "--limit", "nonsense=1"])


def test_nothing_runs_without_a_gpu(tmp_path, monkeypatch, capsys):
    use(monkeypatch, preflight=python("raise SystemExit('no NVIDIA driver')"), check=python("0"))
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert "no NVIDIA driver" in capsys.readouterr().out
    assert not (tmp_path / "check.log").exists()


def test_a_step_that_runs_out_of_time_says_what_it_found(tmp_path, monkeypatch, capsys):
    """pytest, when it is interrupted, shows its failures; what it started ends with it."""
    (tmp_path / "test_slow.py").write_text(
        textwrap.dedent("""
            import subprocess, sys, time
            from pathlib import Path

            def test_wrong():
                assert 6 * 9 == 42

            def test_hanging():
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
                Path(__file__).with_name("child").write_text(str(child.pid))
                time.sleep(60)
        """)
    )
    command = [sys.executable, *gpu_check.PYTEST, "-c", "/dev/null", str(tmp_path / "test_slow.py")]
    use(monkeypatch, tests=command, bench=python("print('done')"))
    child, wait = tmp_path / "child", subprocess.Popen.wait

    def until_it_hangs(process, timeout=None):
        """The time is up when the second test waits for its child."""
        for _ in range(2400 if process.args == command else 0):
            if child.exists() and child.read_text():
                break
            time.sleep(0.05)
        return wait(process, timeout)

    monkeypatch.setattr(gpu_check.subprocess.Popen, "wait", until_it_hangs)
    out = tmp_path / "out"
    assert gpu_check.main(["--out", str(out), "--limit", "tests=1"]) == 1
    log = (out / "tests.log").read_text()
    assert "assert (6 * 9) == 42" in log and "1 failed" in log and "stopped after 1 s" in log
    assert "bench       passed" in capsys.readouterr().out, "the steps after it run"
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # its parent is gone: who reaps it, does so when it likes
            os.kill(int(child.read_text()), 0)
            time.sleep(0.05)


def test_all_steps_within_some_seconds(tmp_path, monkeypatch, capsys):
    clock = Clock()
    start = clock.now
    monkeypatch.setattr(gpu_check, "time", clock)
    monkeypatch.setattr(gpu_check, "subprocess", processes(clock, lasts=60))
    use(monkeypatch, check=python("import time; time.sleep(60)"), tests=python("0"))
    assert gpu_check.main(["--out", str(tmp_path), "--seconds", "60"]) == 1
    assert clock.now - start < 60
    said = capsys.readouterr().out
    assert "check       out of time: 30 s" in said
    assert "tests       no time left" in said.splitlines()[-2]


def test_steps_work_within_their_limits(tmp_path):
    """`check`, `cases`, `machinery` and `bench` end by themselves, and report."""
    commands = [c for step in gpu_check.steps(tmp_path, tmp_path, 2).values() for c in step.commands.values()]
    budgets = [x for command in commands for x in command if x in (gpu_check.SECONDS, gpu_check.MINUTES)]
    assert len(budgets) == 4
    for seconds in (30, 100, 600):
        assert 0 < float(gpu_check.fitted(gpu_check.SECONDS, seconds)) < seconds
        assert 0 < 60 * float(gpu_check.fitted(gpu_check.MINUTES, seconds)) < seconds
    assert gpu_check.fitted("600", 100) == "600"


def test_ending_it_ends_the_steps(tmp_path):
    """`timeout 600 python tools/gpu/gpu_check.py` leaves nothing on the GPU, and the table."""
    code = """
        import sys
        sys.path.insert(0, ".")
        import signal; from tools.gpu import gpu_check
        child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
        gpu_check.steps = lambda *_: {"check": gpu_check.Step(50, {"check": [sys.executable, "-c", child]})}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        sys.exit(gpu_check.main(["--out", sys.argv[1]]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    log, numbers = tmp_path / "check.log", []
    for _ in range(2400):
        numbers = log.read_text().splitlines()[1:] if log.exists() else []
        if numbers:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 143 and "logs and results" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(numbers[0]), 0)


# A check that judges nothing, and takes no time to start: it enters a part of as many cases as it is asked for.
FAKE_CHECK = """
    import argparse, json, sys, time, zlib
    from pathlib import Path

    parser = argparse.ArgumentParser()
    for name in ("unit", "part", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--fail", default="never")
    o = parser.parse_args()
    assert o.part.startswith(o.unit) and 0 < o.minutes <= 2.5
    if o.fail == "refuse":
        sys.exit(2)
    time.sleep(o.pause)
    known = json.loads(Path(__file__).with_name("units.json").read_text())
    units = {u: d for u, d in known.items() if u.startswith(o.unit)}
    names = {"cuda", *(f"cuda:{u.split('/')[1]}" for u in units)}
    failures = [{"problem": "", "case": ""}] if o.unit == o.fail else []
    part = {
        "cases": o.cases, "seed": zlib.crc32(o.part.encode()), "units": units,
        "backends": {n: {"cases": o.cases - 10, "failures": failures} for n in names},
        "coverage": {n: {"float32": {"cases": 0 if n == "cuda:sm90" else o.cases // 4}} for n in names},
    }
    out = Path(o.out)
    report = json.loads(out.read_text()) if out.is_file() else {"units": {}, "parts": {}}
    report["units"].update(units)
    report["parts"][o.part] = part
    out.write_text(json.dumps(report))
    sys.exit(len(failures))
"""


@pytest.fixture
def parts(tmp_path, monkeypatch, capfd):
    """Runs tools/gpu/more_cases.py on the fake check; returns (exit status, units in turn, the report, what was printed)."""
    check = tmp_path / "check.py"
    check.write_text(textwrap.dedent(FAKE_CHECK))
    monkeypatch.setattr(more_cases, "CHECK", (sys.executable, str(check)))
    (tmp_path / "units.json").write_text(json.dumps(digest.units()))
    out = tmp_path / "report.json"

    def run(*arguments):
        code = more_cases.main(["--out", str(out), *arguments])
        report = json.loads(out.read_text()) if out.exists() else {"parts": {}}
        said = capfd.readouterr().out
        begun = [line.split()[1].rstrip(",") for line in said.splitlines() if line.startswith("---")]
        return code, begun, report, said

    run.out = out
    return run


def test_cases_are_added_in_parts_until_there_are_enough(parts, monkeypatch):
    monkeypatch.setattr(more_cases, "ENOUGH", {"cases": 300, "cuda:sm90": 200, "fp32": 30})
    # A whole run of these kernels, one of other kernels, and a part of earlier days.
    now = digest.units()
    old = {"cases": 900, "seed": 1, "units": {"cuda/sm90/fwd_fp16": "0"}, "backends": {}, "coverage": {}}
    whole = {"cases": 50, "seed": 2, "judged": now, "units": now, "backends": {}, "coverage": {}}
    parts.out.write_text(json.dumps({**whole, "parts": {"cuda/sm90/more-1": old}}))
    code, begun, _, said = parts("--cases", "100")
    assert begun == ["cuda/sm90/more-2", "cuda/more-1", "cuda/sm80/more-1", "cuda/sm90/more-3"]
    assert code == 0 and "4 parts, failed: none; cases 450 of 300, cuda:sm90 270 of 200" in said
    assert parts("--cases", "100")[:2] == (0, []), "there were enough"


def test_a_report_of_other_kernels_is_worth_nothing(parts, monkeypatch):
    """Its own total would say that there is enough: the tree decides, also before the first part."""
    monkeypatch.setattr(more_cases, "ENOUGH", {"cases": 80, "cuda:sm90": 0, "fp32": 0})
    then = dict.fromkeys(digest.units(), "0")
    whole = {"cases": 9000, "seed": 2, "judged": then, "units": then, "backends": {}, "coverage": {}}
    parts.out.write_text(json.dumps({**whole, "parts": {}}))
    assert parts("--cases", "100")[:2] == (0, ["cuda/sm90/more-1"])


def test_parts_end_in_time(parts, monkeypatch):
    """A part is told how long it may take; none begins that could not end, and one that does not end is stopped."""
    clock = Clock()
    monkeypatch.setattr(more_cases, "time", clock)
    monkeypatch.setattr(more_cases, "subprocess", processes(clock, lasts=40))
    code, begun, report, said = parts("--cases", "100", "--seconds", "200")
    assert code == 1 and list(report["parts"]) == begun and len(begun) == 4
    assert "40 s are left, too few for a part" in said
    monkeypatch.setattr(more_cases, "subprocess", processes(clock, lasts=600))
    code, begun, after, said = parts("--seconds", "60", "--check", "--pause 60")
    assert code == 1 and len(begun) == 1 and ": not done after 60 s; nothing of it" in said
    assert after == report, "what was stopped is not in the report"


def test_failures_count_and_what_cannot_run_ends(parts, monkeypatch):
    monkeypatch.setattr(more_cases, "ENOUGH", {"cases": 180, "cuda:sm90": 90, "fp32": 0})
    code, begun, _, said = parts("--cases", "100", "--check", "--fail cuda")
    assert code == 1 and begun == ["cuda/sm90/more-1", "cuda/more-1"]
    assert "failed: cuda/more-1; cases 200 of 180" in said
    parts.out.unlink()
    code, begun, _, said = parts("--check", "--fail refuse")
    assert code == 1 and begun == ["cuda/sm90/more-1", "cuda/more-1", "cuda/sm80/more-1"]


def test_library_of_a_wheel(tmp_path):
    wheel = tmp_path / "flashsci.whl"
    (tmp_path / "flashsci").mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flashsci/__init__.py", "")
    with pytest.raises(SystemExit, match="make wheel"):
        gpu_check.take_library(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("flashsci/_C.so", b"kernels")
    gpu_check.take_library(wheel, tmp_path)
    assert (tmp_path / "flashsci" / "_C.so").read_bytes() == b"kernels"
