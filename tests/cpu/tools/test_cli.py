"""The command line and the environment report: also on machines where half of it is missing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashsci import __main__, env
from flashsci.choice.backends import BACKENDS
from tools.kernels import check_torch_includes

ROOT = Path(__file__).resolve().parents[3]


def flashsci(*arguments, python=(), **variables):
    """`python -m flashsci ...` from the source tree, in a process of its own."""
    return subprocess.run(
        [sys.executable, *python, "-m", "flashsci", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_env_without_any_package():
    """-S leaves out site-packages: no torch, Triton, typer, nothing but the standard library."""
    done = flashsci("env", python=("-S",))
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    assert "not installed" in done.stdout
    assert "pip install 'torch>=2.10'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "ending",
    ["raise OSError('libcudart.so.13: cannot open')", "import os; os.kill(os.getpid(), 11)"],
    ids=["raises", "segfaults"],
)
def test_env_with_a_broken_torch(tmp_path, ending):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(ending)
    done = flashsci("env", python=("-S",), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "installed, but broken" in done.stdout
    assert "--force-reinstall" in done.stdout


def test_env_goes_on_when_a_probe_fails(monkeypatch):
    def bad():
        raise RuntimeError("no idea")

    monkeypatch.setattr(env, "PROBES", (bad, env.python))
    findings = env.collect()
    assert findings[1].value == "could not be found out: no idea"
    assert findings[2].what == "python"


def test_env_as_json(monkeypatch, capsys):
    monkeypatch.setattr(env, "PROBES", (env.python, env.extras, env.variables))
    assert __main__.main(["env", "--json"]) == 0
    assert {"what", "value", "advice"} == set(json.loads(capsys.readouterr().out)[0])
    assert __main__.main(["env", "--nonsense"]) == 2


def test_commands_say_what_is_not_installed(monkeypatch, capsys):
    done = flashsci("backends", python=("-S",))
    assert done.returncode == 1
    assert "torch is not installed" in done.stderr
    monkeypatch.delitem(sys.modules, "flashsci.cli", raising=False)
    monkeypatch.delattr(sys.modules["flashsci"], "cli", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert __main__.main(["bench"]) == 1
    assert "pip install 'flashsci[cli]'" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    from flashsci import cli

    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("backends", "check", "bench", "models", "report", "env"):
        assert f" {command} " in shown
    assert cli.main(["bench", "--help"]) == 0
    assert "--suite" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["bench"], ["bench", "--help"], ["models"], ["report", "--write"]])
def test_an_installed_package_says_where_the_benchmarks_are(command, tmp_path, monkeypatch, capsys):
    from flashsci import cli, digest

    monkeypatch.setattr(digest, "ROOT", tmp_path)  # site-packages
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert f"`{command[0]}` is not part of the installed package" in said
    assert str(tmp_path) in said and "Clone it" in said


def test_backends_lists_features_and_reasons(capsys):
    from flashsci import cli

    assert cli.main(["backends"]) == 0
    shown = capsys.readouterr().out
    for feature in cli.FEATURES:
        assert feature in shown
    assert "no [1]" in shown
    assert "[1] " in shown


def test_backends_of_a_gpu_that_is_not_here(capsys):
    from flashsci import cli

    assert cli.main(["backends", "--arch", "75", "--markdown"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "| bf16 | yes | yes | no | no |" in rows
    assert cli.main(["backends", "--arch", "T4"]) == 2


def test_page_of_features_is_true():
    """docs/results/features.md is what `python -m flashsci backends --write` writes now."""
    from flashsci import cli

    page = ROOT / "docs" / "results" / "features.md"
    assert page.read_text() == cli.features_page(), "run python -m flashsci backends --write"


def test_page_of_features_says_what_the_backends_answer():
    """Each yes, no and "from sm_80" of its table, cell by cell, for three generations."""
    from flashsci import cli

    lines = cli.features_page().split("## Why not")[0].splitlines()
    cells = [[c.strip() for c in x.strip("|").split("|")] for x in lines if x.startswith("| ")]
    table = {feature: dict(zip(BACKENDS, row, strict=True)) for feature, *row in cells[1:]}
    for number, capability in ((75, (7, 5)), (80, (8, 0)), (90, (9, 0))):
        for feature, answers in cli.support(capability, hypothetical=True).items():
            for name, reason in answers.items():
                cell = table[feature][name]
                if cell == "by triton":  # depends on whether Triton runs on this very machine
                    continue
                first = re.search(r"^(from )?(?:sm_\d+, )*sm_(\d+)", cell)
                covered = cell == "yes" or bool(
                    first and (f"sm_{number}" in cell or (first[1] and number > int(first[2])))
                )
                assert covered == (reason is None), (feature, name, number, cell, reason)


def test_features_are_written_in_a_clone_only(tmp_path, monkeypatch, capsys):
    from flashsci import cli, digest

    monkeypatch.setattr(digest, "ROOT", tmp_path)  # site-packages
    assert cli.main(["backends", "--write"]) == 2
    assert "clone of the repository" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    (tmp_path / "docs" / "results").mkdir(parents=True)
    assert cli.main(["backends", "--write"]) == 0
    assert (tmp_path / "docs" / "results" / "features.md").read_text() == cli.features_page()


def test_bench_writes_records(tmp_path, capsys):
    from flashsci import cli

    path = tmp_path / "deep" / "records.json"
    options = ["--case", "cpu-dense", "--backends", "reference,sdpa:math", "--device", "cpu"]
    assert cli.main(["bench", *options, "--quick", "--seconds", "0.05", "--json", str(path)]) == 0
    records = json.loads(path.read_text())
    assert {(r["pass"], r["backend"]) for r in records} == {
        (kind, name) for kind in ("forward", "backward") for name in ("reference", "sdpa:math")
    }
    capsys.readouterr()
    assert cli.main(["report", "--markdown", str(path)]) == 0
    assert "| cpu-dense | forward | reference |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "nonsense"], "no suite named"),
        (["--case", "pet-nonsense"], "pet-train-d16"),
        (["--backends", "nonsense"], "no candidate named"),
        (["--suite", "cpu", "--dtype", "int8"], "no dtype named"),
    ],
)
def test_bench_explains_bad_options(options, message, capfd):
    from flashsci import cli

    assert cli.main(["bench", *options]) == 2
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())


def test_torch_headers_stay_in_bindings(tmp_path):
    assert check_torch_includes.main([]) == 0
    kernel = tmp_path / "kernel.cuh"
    kernel.write_text("#pragma once\n#  include <ATen/ATen.h>\n// #include <torch/all.h>\n")
    assert check_torch_includes.offences([kernel]) == [f"{kernel}:2: #  include <ATen/ATen.h>"]
