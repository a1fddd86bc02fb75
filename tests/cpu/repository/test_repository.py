"""What the Makefile does with and without a GPU, and that files which name the same thing agree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashsci
from tools.packaging.wheel import RELEASED

ROOT = Path(__file__).resolve().parents[3]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")
ALL = "FA_ARCHS='75,80,90'"


def pins(path: str) -> dict[str, str]:
    """name: version, wherever a file says name==version."""
    return dict(re.findall(r"\b([\w-]+)==([\w.]+)", (ROOT / path).read_text()))


def planned(folder: Path, *targets: str, gpu: bool = False, before: str = "", **variables: str) -> str:
    """What `make` would run in a fresh environment, on a machine with or without a GPU."""
    tools = folder / "tools"
    tools.mkdir()
    answer = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'" if gpu else "echo 'No devices found.'; exit 6"
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tools / "nvidia-smi").chmod(0o755)
    venv = folder / "venv"
    venv.mkdir()
    if before:
        (venv / ".flashsci-archs").write_text(before + "\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FA_ARCHS", "MAKE", "MFLAGS"))}
    environment["PATH"] = f"{tools}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["make", "-n", f"VENV={venv}", f"PYTHON={sys.executable}", *targets],
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_make
@pytest.mark.parametrize("target", ["install", "demo", "test", "test-all"])
def test_without_a_gpu_no_kernels_are_compiled(target, tmp_path):
    said = planned(tmp_path, target)
    assert "FA_ARCHS='none'" in said and "FA_ARCHS=90 make build" in said
    assert said.count("pip --disable-pip-version-check install -v") == 1


@needs_make
def test_kernels_are_compiled_where_they_run_or_are_asked_for(tmp_path):
    cases = {
        "gpu": dict(gpu=True),
        "archs": dict(FA_ARCHS="90"),
        "remembered": dict(before="80"),
        "forgotten": dict(before="none", gpu=True),
    }
    found = {}
    for name, options in cases.items():
        (tmp_path / name).mkdir()
        (found[name],) = re.findall(r"FA_ARCHS='(.*?)'", planned(tmp_path / name, "demo", **options))
    assert found == {"gpu": "", "archs": "90", "remembered": "80", "forgotten": ""}


@needs_make
def test_who_asks_for_a_library_gets_all_architectures(tmp_path):
    (tmp_path / "one").mkdir()
    assert ALL in planned(tmp_path / "one", "build")
    (tmp_path / "two").mkdir()
    assert "FA_ARCHS=''" in planned(tmp_path / "two", "build", gpu=True), "CMake asks the GPU"


@needs_make
@pytest.mark.parametrize("gpu", [False, True])
def test_a_wheel_is_for_the_gpus_of_a_release_wherever_it_is_made(gpu, tmp_path):
    said = planned(tmp_path, "wheel", gpu=gpu)
    assert f"FA_ARCHS='{','.join(RELEASED)}'" in said
    assert said.index("packaging repair") < said.index("packaging sdist")
    (tmp_path / "asked").mkdir()
    assert "FA_ARCHS='90'" in planned(tmp_path / "asked", "wheel", gpu=gpu, FA_ARCHS="90")


@needs_make
@pytest.mark.parametrize("gpu", [False, True])
def test_every_test_runs_once(gpu, tmp_path):
    lines = planned(tmp_path, "test-all", gpu=gpu).splitlines()
    runs = [run for line in lines if "-m pytest" in line for run in line.split(" && ")]
    parts = [re.search(r'-m ("[^"]*"|rest)', run)[1].strip('"') for run in runs]
    each = 1 + gpu
    assert parts == ["not slow"] * each + ["slow and not rest"] * each + ["rest"] * each
    assert [run.lstrip().startswith("CUDA_VISIBLE_DEVICES= ") for run in runs] == (
        [True, False] if gpu else [False]
    ) * 3


def test_tools_are_pinned_once():
    wanted = pins("constraints.txt")
    hooks = pins(".pre-commit-config.yaml")
    assert set(hooks) == {"ruff", "clang-format"}
    assert hooks == {name: wanted[name] for name in hooks}


def test_ci_runs_what_the_readme_says():
    steps = re.findall("; make (.*)$", (ROOT / ".ci" / "run").read_text(), re.M)
    made = {word for step in steps for word in step.split()}
    targets = set(re.findall(r"^make ([\w-]+)", (ROOT / "README.md").read_text(), re.M))
    assert {"demo", "test"} <= targets
    missing = targets - {"sweep", "gpu-check"} - made  # those two need a GPU
    assert not missing, f".ci/run does not make {missing}"
    assert re.search(r"run: .*\.ci/run$", (ROOT / ".github/workflows/ci.yml").read_text(), re.M)


def test_changelog_begins_with_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert flashsci.__version__ in headings[:2], headings
    assert re.search(rf'^version = "{flashsci.__version__}"$', (ROOT / "pyproject.toml").read_text(), re.M)


def function_lengths(text: str) -> dict[str, int]:
    """Lines of each function by name, without its docstring."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            found[node.name] = max(lines, found.get(node.name, 0))
    return found


def test_python_functions_are_short():
    """The rule of the C++ (tests/compile/test_build.py) for Python; a Triton kernel is one function by necessity."""
    long = "def long():\n    x = 0\n" + "    x += 1\n" * 119
    assert function_lengths(long) == {"long": 121}
    assert function_lengths(long.replace("    x = 0", '    """A\n    docstring."""')) == {"long": 120}
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = listed.stdout.split()
    assert len(paths) > 100
    too_long = [
        f"{path}: {name} has {lines} lines"
        for path in paths
        if (ROOT / path).exists()
        for name, lines in function_lengths((ROOT / path).read_text(encoding="utf-8")).items()
        if lines > 120 and not name.endswith("_kernel")
    ]
    assert not too_long, "\n".join(too_long)
