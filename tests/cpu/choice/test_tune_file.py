"""The file of `flashsci.tune`: across processes, damaged, of other machines; FLASHSCI_TUNE and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashsci
from flashsci import cached
from flashsci.call.problem import Problem
from flashsci.choice import choose, tuned

ROOT = Path(__file__).resolve().parents[3]
PROBLEM = Problem("cpu", None, torch.float32, 4, 4, 16, 16, (2,), 8, 8, given=("q", "k", "v"))
TIMES = tuned.Times("sdpa", "sdpa", {"sdpa": 2e-5, "triton": 1e-5}, unable={"eager": "RuntimeError: no"})


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """The path of the file on a machine on which nothing has been tuned."""
    monkeypatch.setenv("FLASHSCI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHSCI_TUNE")
    restart()
    yield tmp_path / "cache" / "tuned.json"
    restart()


def restart():
    """Forget what the process knows, as a new one would."""
    tuned._known.clear()
    tuned._said.clear()
    choose.forget()


def start(program, *arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **variables}
    return subprocess.run(
        [sys.executable, *arguments, *([] if program is None else ["-c", program])],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_problem_is_read_as_it_was_written():
    changes = dict(bias_shape=(4, 8, 8), bias_dtype=torch.bfloat16, window_right=0, capability=(9, 0), precision="ieee")
    for problem in (PROBLEM, replace(PROBLEM, **changes), replace(PROBLEM, paged=True, cache_dtype=torch.float8_e5m2)):
        assert tuned.read(tuned.written(problem)) == problem


def test_another_process_reads_the_winners(machine):
    tuned.keep(PROBLEM, TIMES)
    restart()
    assert tuned.find("calls", PROBLEM) == (("triton",), "tuned on this CPU: triton 10 us, sdpa 20 us")
    assert tuned._known.popitem()[1].exact["calls"] == {PROBLEM: TIMES}
    program = "import torch, flashsci; q = torch.randn(2, 4, 8, 16); print(flashsci.explain(q, q, q).evidence)"
    threads = f"torch.set_num_threads({torch.get_num_threads()})"
    done = start(program.replace("; q", f"; {threads}; q", 1))
    assert "tuned on this CPU: triton 10 us, sdpa 20 us" in done.stdout, done.stderr
    without = start(program.replace("; q", f"; {threads}; q", 1), FLASHSCI_TUNE="0")
    assert "tuned" not in without.stdout and not without.stderr


@pytest.mark.parametrize("what", ["device_of", "_software"])
def test_times_of_another_machine_or_version_are_left(what, machine, monkeypatch):
    tuned.keep(PROBLEM, TIMES)
    monkeypatch.setattr(tuned, what, lambda *_: "another")
    restart()
    assert tuned.find("calls", PROBLEM) is None and tuned.lacks(PROBLEM)
    tuned.keep(PROBLEM, replace(TIMES, seconds={"sdpa": 1.0}))
    monkeypatch.undo()
    assert len(cached.entries(machine) if machine.exists() else json.loads(machine.read_text())) == 2


def test_the_key_names_what_times_depend_on(machine):
    tuned.keep(PROBLEM, TIMES)
    ((key, _),) = cached.entries(machine).items()
    assert key.startswith("CPU ") and f"torch {torch.__version__}, triton " in key
    assert key.endswith(f"flashsci {flashsci.__version__}") and "library " in key


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"KEY": []}', '{"KEY": {"{}": {}}}', '{"KEY": {"x": 3}}', b"\xff\xfe",
     '{"KEY": {"PROBLEM": {"default": "sdpa", "usual": "sdpa", "seconds": {"sdpa": -1.0}}}}',
     '{"KEY": {"PROBLEM": {"default": "sdpa", "usual": "sdpa", "seconds": {"rocket": 1.0}}}}',
     '{"KEY": {"PROBLEM": {"default": "sdpa", "usual": "sdpa", "seconds": [1.0]}}}'],
)  # fmt: skip
def test_a_broken_file_is_said_once_and_written_anew(content, machine):
    machine.parent.mkdir()
    if isinstance(content, str):
        key = f"{tuned.device_of('cpu', None)}, {tuned._software()}"
        content = content.replace("KEY", key).replace("PROBLEM", json.dumps(tuned.written(PROBLEM))[1:-1]).encode()
    machine.write_bytes(content)
    q = torch.randn(2, 4, 8, 16)
    with pytest.warns(UserWarning, match=r"tuned.json is not a file of flashsci.tune .*the next tuning writes it anew"):
        assert flashsci.explain(q, q, q).chosen == "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashsci.explain(q, q, q, causal=True)
        tuned.keep(PROBLEM, TIMES)
        restart()
        assert tuned.find("calls", PROBLEM)[0] == ("triton",)


def test_a_folder_that_cannot_be_written_is_named(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHSCI_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept in .*they hold for this process. Set FLASHSCI_CACHE"):
        tuned.keep(PROBLEM, TIMES)
    assert tuned.find("calls", PROBLEM)[0] == ("triton",)


def test_a_later_process_times_a_kind_of_which_nothing_could_be_timed(machine):
    q, nothing = torch.randn(2, 4, 8, 16), replace(TIMES, seconds={})
    tuned.keep(PROBLEM, nothing)
    assert not machine.exists() and not tuned.lacks(PROBLEM)
    assert "tuned on this CPU, the default stays: no candidate could be timed" in flashsci.explain(q, q, q).evidence


def test_clear_forgets_the_process_and_the_file(machine):
    tuned.keep(PROBLEM, TIMES)
    q = torch.randn(2, 4, 8, 16)
    assert flashsci.explain(q, q, q).chosen == "triton" and machine.exists()
    flashsci.tune.clear()
    flashsci.tune.clear()
    assert flashsci.explain(q, q, q).chosen == "sdpa" and not machine.exists()


def test_processes_that_write_at_once_keep_all_winners(machine):
    program = (
        "import sys, torch\nfrom dataclasses import replace\nfrom flashsci.choice import tuned\n"
        "from flashsci.call.problem import Problem\n"
        "p = Problem('cpu', None, torch.float32, 4, 4, 16, 16, (2,), 8, 8)\n"
        "for n in range(40):\n"
        "    tuned.keep(replace(p, seq_q=int(sys.argv[1]) + n), tuned.Times('sdpa', 'sdpa', {'sdpa': 1.0}))\n"
    )
    script = machine.parent.parent / "writer.py"
    script.write_text(program)
    with ThreadPoolExecutor(2) as executor:
        for done in executor.map(lambda first: start(None, str(script), str(first)), (100, 200)):
            assert done.returncode == 0, done.stderr
    (kept,) = cached.entries(machine).values()
    sizes = {tuned.read(text).seq_q for text in kept}
    assert sizes == {*range(100, 140), *range(200, 240)}
    assert sorted(p.name for p in machine.parent.iterdir()) == ["tuned.json", "tuned.lock"]


PROGRAM = """
import sys, torch, flashsci
q, k, v = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
flashsci.attention(q, k, v).sum().backward()
print(__name__, sys.argv[1:], sys.path[0])
"""


def test_the_environment_variable_tunes_a_process(machine):
    done = start(PROGRAM, FLASHSCI_TUNE="1")
    assert done.returncode == 0, done.stderr
    assert "flashsci.tune: kinds of call timed: 1, kept in" in done.stderr and "D 16, gradients" in done.stderr
    assert machine.exists() and "flashsci.tune" not in done.stdout
    again = start(PROGRAM, FLASHSCI_TUNE="1")
    assert again.returncode == 0 and again.stderr == "", "nothing is new"
    wrong = start(PROGRAM, FLASHSCI_TUNE="yes")
    assert "FLASHSCI_TUNE='yes' is neither '1', to tune this process, nor '0'" in wrong.stderr


@pytest.mark.slow
def test_the_command_runs_a_script(machine, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = start(None, "-m", "flashsci", "tune", "--verbose", str(script), "--epochs", "1", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"__main__ ['--epochs', '1', '--help'] {tmp_path}\n"
    assert "gradients: tuned on this CPU" in done.stderr and "kept in" in done.stderr and machine.exists()
    script.write_text(PROGRAM + "\nsys.exit(3)\n")
    done = start(None, "-m", "flashsci", "tune", str(script))
    assert done.returncode == 3 and "no new kind of call was timed" in done.stderr
    script.write_text("raise KeyError('x')")
    done = start(None, "-m", "flashsci", "tune", str(script))
    assert done.returncode == 1 and "KeyError: 'x'" in done.stderr and "no new kind" in done.stderr
    done = start(None, "-m", "flashsci", "tune", str(tmp_path / "absent.py"))
    assert done.returncode == 2 and "there is no file" in done.stderr


def test_env_says_where_the_file_is(machine):
    found = start(None, "-S", "-m", "flashsci", "env")
    assert f"times of tune  none: there is no {machine}" in " ".join(found.stdout.split()).replace(
        "tune none", "tune  none"
    )
    tuned.keep(PROBLEM, TIMES)
    found = start(None, "-S", "-m", "flashsci", "env")
    assert f"times of tune {machine}" in " ".join(found.stdout.split())
