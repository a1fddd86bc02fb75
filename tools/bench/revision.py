"""Another revision of flashsci in this process, together with the present one: for A/B comparisons.

Two processes could only take turns through a pipe, with a synchronisation at every turn. In one process both
revisions share the stream, the allocator and the clock of the GPU, one launch is timed next to the other, and
everything else the benchmark does (fp64 check, memory, host time) applies to both. The obstacle is the name:
two packages `flashsci`, two op namespaces `flashsci::`. So the other revision is loaded from a copy in which
the word is ALIAS: in its Python everywhere, in its CUDA library in the one string that names the op
namespace, which is why both words have the same length. Its C symbols keep their names; libraries are loaded
without sharing symbols.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from flashsci.backends import cuda
from flashsci.digest import ROOT
from tools.bench.cases import BenchError

NAME, ALIAS = "flashsci", "flashold"
_KERNEL_SOURCES = ("csrc", "cmake", "CMakeLists.txt")


@dataclass(frozen=True)
class Revision:
    base: str  # as it was asked for
    commit: str | None  # None for a folder
    package: ModuleType


_loaded: Revision | None = None
_folder: tempfile.TemporaryDirectory | None = None  # as long as the process: Triton reads sources


def load(base: str, kernels: bool = False) -> Revision:
    """The revision `base`, a folder with a checkout or something git understands, as a package.

    `kernels`: with its CUDA library: the one in the folder, the present one if the C++ sources are the
    same, or else built here, once for each commit (build/base).

    Raises:
        BenchError: no such revision, its library does not build, or another one is loaded already.
    """
    global _loaded, _folder
    if _loaded is not None:
        if _loaded.base != base:
            raise BenchError(f"one other revision at a time: {_loaded.base!r} is loaded already")
        return _loaded
    _folder = tempfile.TemporaryDirectory(prefix="flashsci-base-")
    if Path(base).is_dir():
        commit, tree = None, Path(base).resolve()
        if not (tree / NAME / "__init__.py").is_file():
            raise BenchError(f"{tree} holds no package {NAME}")
    else:
        commit, tree = _unpacked(base, Path(_folder.name) / "tree")
    library = _library(tree, commit) if kernels else None
    package = _renamed(tree, library, Path(_folder.name))
    _loaded = Revision(base, commit, package)
    return _loaded


def current() -> Revision:
    """The revision that was loaded."""
    if _loaded is None:
        raise BenchError("no other revision is loaded; give one as base")
    return _loaded


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    except OSError as error:
        raise BenchError(f"git cannot run ({error}); give a folder instead of a revision") from error
    if done.returncode:
        raise BenchError(f"git {arguments[0]}: {done.stderr.decode().strip().splitlines()[-1]}")
    return done.stdout


def _unpacked(reference: str, folder: Path) -> tuple[str, Path]:
    commit = _git("rev-parse", "--short", "--verify", f"{reference}^{{commit}}").decode().strip()
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=_git("archive", commit), check=True)
    return commit, folder


def _library(tree: Path, commit: str | None) -> Path | None:
    """The CUDA library of a tree; None if it has none and none can be built."""
    found = [*tree.glob(f"{NAME}/_C*.so"), *tree.glob("build/manual/_C.so")]
    if found:
        return max(found, key=lambda path: path.stat().st_mtime)
    present = cuda.library_path()
    if present is not None and _kernel_sources(tree) == _kernel_sources(ROOT):
        return present
    if commit is None or not shutil.which("nvcc"):
        return None
    built = ROOT / "build" / "base" / commit / "_C.so"
    if not built.is_file():
        built.parent.mkdir(parents=True, exist_ok=True)
        script = next(tree.glob("*/**/build_manual.sh"), None)
        if script is None:
            raise BenchError(f"{commit} has no build_manual.sh; give a folder with its library")
        command = ["env", f"PYTHON={sys.executable}", "bash", str(script), str(built)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise BenchError(f"the CUDA library of {commit} does not build here: {said[-1]}")
    return built


def _kernel_sources(tree: Path) -> dict[str, bytes]:
    files = [f for name in _KERNEL_SOURCES for f in (tree / name, *tree.glob(f"{name}/**/*"))]
    return {str(f.relative_to(tree)): f.read_bytes() for f in files if f.is_file()}


def _renamed(tree: Path, library: Path | None, folder: Path) -> ModuleType:
    source, target = tree / NAME, folder / ALIAS
    for path in source.rglob("*.py"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(re.sub(rf"\b{NAME}\b", ALIAS, path.read_text(encoding="utf-8")))
    for path in source.rglob("*.json"):  # rules of auto
        shutil.copy(path, target / path.relative_to(source))
    if library is not None:
        content = library.read_bytes()
        namespace = NAME.encode() + b"\0"
        if content.count(namespace) != 1:
            raise BenchError(f"{library} does not name its op namespace once, as expected")
        (target / "_C.so").write_bytes(content.replace(namespace, ALIAS.encode() + b"\0"))
    spec = importlib.util.spec_from_file_location(ALIAS, target / "__init__.py")
    package = importlib.util.module_from_spec(spec)
    sys.modules[ALIAS] = package
    spec.loader.exec_module(package)
    return package
