"""`make sweep`: the pre-flight, and that a sweep stops at the first failure and names it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools.gpu import preflight

ROOT = Path(__file__).resolve().parents[3]


ANSWER = "NVIDIA H200, 9.0, 580.159.04, 143771, {used}, {load}, 31, 345, 1980"


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def sweep(tmp_path, **variables):
    """tools/gpu/sweep.sh in an empty tree, where every tool is the test's own."""
    tree, tools = tmp_path / "tree", tmp_path / "tools"
    (tree / "tools" / "gpu").mkdir(parents=True, exist_ok=True)
    for name in ("sweep.sh", "preflight.py"):
        (tree / "tools" / "gpu" / name).write_text((ROOT / "tools" / "gpu" / name).read_text())
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "PY": "mypython"}
    return subprocess.run(
        ["bash", "tools/gpu/sweep.sh"],
        cwd=tree,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def tools(tmp_path):
    folder = tmp_path / "tools"
    folder.mkdir()
    tool(folder, "nvidia-smi", f"echo '{ANSWER.format(used=4, load=0)}'")
    tool(folder, "make", 'echo "make $*"')
    tool(folder, "mypython", 'echo "python $*"')
    return folder


def test_sweep_runs_every_step(tmp_path, tools):
    done = sweep(tmp_path, VENV="", BENCH="--quick", CHECK="--minutes 1", SUITE="dense,bias")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("make", "python"))]
    results = "reports/bench/h200/dense-bias.json"
    assert said == [
        "make --no-print-directory install VENV=",
        "python -m flashsci check --minutes 1",
        f"python -m flashsci bench --suite dense,bias --json {results} --quick",
        f"python -m flashsci report {results} --write --plots docs/figures",
    ]
    assert "all done" in done.stdout


def test_sweep_stops_at_the_first_failure(tmp_path, tools):
    tool(
        tools,
        "mypython",
        'echo "$*"; [ "$3" != check ] || { echo "2 failures" >&2; echo; exit 3; }',
    )
    done = sweep(tmp_path)
    assert done.returncode == 1
    assert "check failed (exit 3): mypython -m flashsci check" in done.stderr
    assert done.stderr.endswith("its last line: 2 failures\n")
    assert "bench" not in done.stdout


def test_sweep_needs_a_gpu(tmp_path, tools):
    tool(tools, "nvidia-smi", "echo 'No devices were found'; exit 6")
    done = sweep(tmp_path)
    assert done.returncode == 1
    assert "preflight failed" in done.stderr
    assert "nvidia-smi said: No devices were found" in done.stderr


@pytest.mark.parametrize(
    ("used", "load", "words"),
    [(4, 0, None), (30000, 0, "in use"), (4, 97, "load"), ("[N/A]", "[N/A]", None)],
)
def test_preflight_wants_the_gpu_to_itself(used, load, words):
    values = [v.strip() for v in ANSWER.format(used=used, load=load).split(",")]
    problem = preflight.objection(dict(zip(preflight.FIELDS, values, strict=True)))
    assert (problem is None) if words is None else (words in problem)


def test_preflight_without_a_driver(monkeypatch, capsys):
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    assert preflight.main() == 1
    assert "no NVIDIA driver" in capsys.readouterr().err
