"""`make wheel`, then `pip install dist/*.whl` into a fresh environment with torch: what is in it, that it is quick, that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

from flashsci.backends import cuda

pytest.importorskip("scikit_build_core")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, torch, flashsci
from flashsci.backends import cuda
q = k = v = torch.randn(2, 4, 8, 16, requires_grad=True)
flashsci.attention(q, k, v, causal=True).sum().backward()
library = cuda.library_path()
print(json.dumps([flashsci.__file__, library and str(library), cuda.unavailable(), cuda.build_info()]))
"""


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(
        [str(c) for c in command],
        env={**environment, **options.pop("env", {})},
        capture_output=True,
        text=True,
        timeout=1800,
        **options,
    )


@pytest.fixture
def wheel(tmp_path_factory) -> Path:
    """Built from this tree for the architectures of the present library, if there is one: its objects are used again."""
    folder = tmp_path_factory.mktemp("dist")
    info = cuda.build_info()
    archs = ",".join(info["archs"]) if info else "none"
    options = ["--no-build-isolation", "--no-deps", "-w", folder]
    done = run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=ROOT, env={"FA_ARCHS": archs})
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture
def fresh(tmp_path_factory) -> Path:
    """Python of an environment with all that this one has (torch), but flashsci."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    others = folder / "others"
    others.mkdir()
    for package in (Path(p) for p in sys.path if p.endswith("-packages")):
        for entry in package.iterdir():
            link = others / entry.name
            if "flashsci" not in entry.name and not link.exists():
                link.symlink_to(entry)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{others}\n")
    return folder / "bin" / "python"


def test_wheel_installs_in_seconds_and_runs(wheel, fresh, tmp_path):
    """One test, so that one process builds it."""
    names = zipfile.ZipFile(wheel).namelist()
    assert "-py3-none-" in wheel.name
    assert {name.split("/")[0].split("-")[0] for name in names} == {"flashsci"}, "nothing but the package"
    assert ("flashsci/_C.so" in names) == (cuda.library_path() is not None)
    assert not [n for n in names if "__pycache__" in n]
    start = time.monotonic()
    done = run(sys.executable, "-m", "pip", "--python", fresh, "install", wheel)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert seconds < 60, f"installing the wheel took {seconds:.0f} s:\n{done.stdout}"
    done = run(fresh, "-c", PROGRAM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, library, reason, info = json.loads(done.stdout)
    assert Path(file).is_relative_to(fresh.parents[1]), "the installed package, not the tree"
    if cuda.library_path() is not None:
        assert Path(library).is_relative_to(fresh.parents[1]) and info == cuda.build_info()
    else:
        assert "was not built" in reason
    done = run(fresh, "-m", "flashsci", "backends", cwd=tmp_path)
    assert done.returncode == 0 and "flashsci on" in done.stdout, done.stderr
    done = run(fresh, "-m", "flashsci", "bench", cwd=tmp_path)
    assert done.returncode == 2 and "Clone it" in done.stderr
