"""`make gpu-check`: its steps, their limits and logs, and the table at the end. The steps themselves need a GPU."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402


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
                if path.startswith(("tests/", "scripts/")):
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
    use(monkeypatch, check=python("import sys; print(sys.argv[1:])"), tests=python("0"))
    assert gpu_check.main(["--out", str(tmp_path), "check", "--option", "check=--cases 5"]) == 0
    assert "['--cases', '5']" in capsys.readouterr().out
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
