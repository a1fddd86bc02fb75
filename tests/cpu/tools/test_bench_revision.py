"""A/B: another revision of flashsci in this process, under another name, in the same rounds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashsci
from flashsci.backends import cuda
from tools import bench
from tools.bench import revision

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """A tree that differs in one line, loaded as the base; gone again afterwards."""
    tree = tmp_path_factory.mktemp("older")
    shutil.copytree(ROOT / "flashsci", tree / "flashsci", ignore=shutil.ignore_patterns("*.so"))
    with (tree / "flashsci" / "api" / "attention.py").open("a") as changed:
        changed.write("\nCHANGED = True\n")
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("TRITON_INTERPRET", "1")
        loaded = revision.load(str(tree))
        yield loaded
    for name in [n for n in sys.modules if n.split(".")[0] == revision.ALIAS]:
        del sys.modules[name]
    revision._loaded = None


def test_both_live_side_by_side(older):
    q = k = v = torch.randn(2, 4, 8, 16)
    for backend in ("reference", "sdpa", "triton"):
        mine = flashsci.attention(q, k, v, causal=True, backend=backend)
        theirs = older.package.attention(q, k, v, causal=True, backend=backend)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert sys.modules["flashold.api.attention"].CHANGED
    assert not hasattr(sys.modules["flashsci.api.attention"], "CHANGED")
    assert torch.ops.flashold.triton_forward.default is not torch.ops.flashsci.triton_forward.default
    assert older.package.BackendError is not flashsci.BackendError
    with pytest.raises(older.package.BackendError, match="'reference' can"):
        older.package.attention(q.double(), k.double(), v.double(), backend="triton")


def test_ab_in_one_interleaving(older):
    (case,) = bench.select(ids=["cpu-dense"])
    found = bench.run([case], ["reference", "sdpa:math"], "cpu", seconds=0.02, base=older.base)
    names = [r["backend"] for r in found if r["pass"] == "forward"]
    assert names == ["reference", "reference@base", "sdpa:math"]
    assert all(r["gate"] == "passed" for r in found)
    by = {r["backend"]: r for r in found if r["pass"] == "backward"}
    assert by["reference@base"]["commit"] == older.base
    base, ours = bench.split(found)
    assert {r["backend"] for r in base} == {"reference"}
    shown = bench.plain(bench.comparison(base, ours, one_run=True))
    assert re.search(r"cpu-dense +forward +reference .*x +(faster|slower|no difference)", shown)
    assert "interleaved in one run" in shown


def test_one_other_revision_at_a_time(older):
    assert revision.load(older.base) is older
    with pytest.raises(bench.BenchError, match="is loaded already"):
        revision.load("HEAD")


@pytest.mark.parametrize(
    ("base", "message"),
    [("no-such-revision", "git rev-parse"), (str(ROOT / "docs"), "holds no package")],
)
def test_what_is_no_revision(base, message, monkeypatch):
    monkeypatch.setattr(revision, "_loaded", None)
    with pytest.raises(bench.BenchError, match=message):
        revision.load(base)


def test_a_commit_is_unpacked(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True)

    try:
        git("rev-parse", "--verify", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    commit, tree = revision._unpacked("HEAD", tmp_path / "tree")
    assert re.fullmatch(r"[0-9a-f]{7,}", commit)
    assert (tree / "flashsci" / "__init__.py").is_file()


def test_library_of_a_tree(tmp_path, monkeypatch):
    present = tmp_path / "present.so"
    present.touch()
    monkeypatch.setattr(cuda, "library_path", lambda: present)
    tree = tmp_path / "tree"
    for name in ("csrc", "cmake"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    assert revision._library(tree, None) == present, "the same sources: the same library"
    (tree / "csrc" / "include" / "flashsci.h").write_text("// changed\n")
    assert revision._library(tree, None) is None, "a folder is used as it is"
    built = tree / "build" / "manual" / "_C.so"
    built.parent.mkdir(parents=True)
    built.touch()
    assert revision._library(tree, None) == built


def test_library_that_does_not_build(tmp_path, monkeypatch):
    monkeypatch.setattr(revision, "ROOT", tmp_path)
    monkeypatch.setattr(cuda, "library_path", lambda: None)
    monkeypatch.setattr(revision.shutil, "which", lambda name: "/usr/bin/nvcc")
    script = tmp_path / "tree" / "tools" / "kernels" / "build_manual.sh"
    script.parent.mkdir(parents=True)
    script.write_text('echo "nvcc fatal: $1" >&2; exit 1\n')
    with pytest.raises(bench.BenchError, match=r"nvcc fatal: .*build/base/abc/_C\.so"):
        revision._library(tmp_path / "tree", "abc")
    script.write_text('echo built > "$1"\n')
    built = revision._library(tmp_path / "tree", "abc")
    assert built.read_text() == "built\n"


def test_cuda_libraries_of_two_revisions(tmp_path):
    """In a process of its own: the namespace in the copy is ALIAS, and both register their ops."""
    library = cuda.library_path()
    if library is None:
        pytest.skip("no CUDA library was built here")
    program = f"""
import pathlib, torch
from flashsci.backends import cuda
from tools.bench import revision
library = pathlib.Path({str(library)!r})
package = revision._renamed(pathlib.Path({str(ROOT)!r}), library, pathlib.Path({str(tmp_path)!r}))
from flashold.backends import cuda as old
assert cuda.build_info() == old.build_info() is not None
assert old.library_path() == pathlib.Path({str(tmp_path)!r}) / "flashold" / "_C.so"
a, b = (str(torch.ops.__getattr__(n).cuda_forward.default._schema) for n in ("flashsci", "flashold"))
assert a != b and a.replace("flashsci", "flashold") == b
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
