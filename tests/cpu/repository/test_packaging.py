"""How a release is judged (tools/packaging), and how the library binds to older runtimes (cmake/glibc_stubs.py)."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flashsci import versions
from tools.packaging import __main__ as packaging
from tools.packaging import versions as matrix
from tools.packaging import wheel as wheels

ROOT = Path(__file__).resolve().parents[3]
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++") or not shutil.which("readelf"), reason="no g++ on Linux"
)


def glibc_stubs():
    spec = importlib.util.spec_from_file_location("glibc_stubs", ROOT / "cmake" / "glibc_stubs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = wheels.Contents(
    name="flashsci-0.1.0-py3-none-manylinux_2_28_x86_64.whl",
    size=20_000_000,
    library_size=30_000_000,
    version="0.1.0",
    tags=["py3-none-manylinux_2_28_x86_64"],
    files=["flashsci/__init__.py", "flashsci/_C.so", "flashsci-0.1.0.dist-info/WHEEL"],
    needed=["libtorch.so", "libtorch_cpu.so", "libc.so.6"],
    symbols={"GLIBC": {(2, 2, 5): ["dlopen"], (2, 28): ["fcntl64"]}, "GLIBCXX": {(3, 4, 25): ["x"]}},
    archs=list(wheels.RELEASED),
)


def test_a_wheel_that_may_be_published():
    assert wheels.faults(GOOD, wheels.RELEASED) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tags": ["py3-none-linux_x86_64"]}, "auditwheel repair gives it"),
        ({"tags": ["cp311-cp311-manylinux_2_28_x86_64"]}, "the tags are cp311"),
        ({"size": 44_000_000}, "44.0 MB are more than 40 MB"),
        ({"library_size": 41_000_000}, "flashsci/_C.so: 41.0 MB are more than 40 MB"),
        ({"files": [*GOOD.files, "tests/x.py"]}, "top level flashsci, tests"),
        ({"files": GOOD.files[:1]}, "no flashsci/_C.so"),
        ({"needed": [*GOOD.needed, "libcudart.so.13"]}, "asks for libcudart.so.13"),
        ({"needed": ["libtorch_cpu.so"]}, "does not ask for libtorch.so"),
        ({"symbols": {"GLIBC": {(2, 34): ["dlopen"]}}}, "symbols newer than GLIBC_2.28: dlopen@GLIBC_2.34"),
        ({"symbols": {"GLIBCXX": {(3, 4, 26): ["f"]}}}, "symbols newer than GLIBCXX_3.4.25: f@GLIBCXX_3.4.26"),
        ({"symbols": {"MINE": {(1,): ["f"]}}}, "symbols newer than MINE_0"),
        ({"archs": ["75", "80", "90"]}, "no kernels for 100, 120"),
    ],
)
def test_a_wheel_that_may_not(change, words):
    assert any(words in fault for fault in wheels.faults(dataclasses.replace(GOOD, **change), wheels.RELEASED))


LISTING = """
   10: 0000 93 FUNC    GLOBAL DEFAULT   16 dlopen@@GLIBC_2.34
   11: 0000 93 FUNC    GLOBAL DEFAULT   16 dlopen@GLIBC_2.2.5
   12: 0000 93 FUNC    WEAK   DEFAULT   16 pthread_setname_np@@GLIBC_2.34
   13: 0000 93 FUNC    WEAK   DEFAULT   16 pthread_setname_np@GLIBC_2.12
   14: 0000 93 FUNC    GLOBAL DEFAULT   16 pthread_new@@GLIBC_2.34
   15: 0000 93 FUNC    GLOBAL DEFAULT   16 shm_open@@GLIBC_2.34
   16: 0000 93 FUNC    GLOBAL DEFAULT   16 shm_open@GLIBC_2.2.5
   17: 0000 93 FUNC    GLOBAL DEFAULT   16 memcpy@@GLIBC_2.14
   18: 0000 93 FUNC    GLOBAL DEFAULT   16 memcpy@GLIBC_2.2.5
   19: 0000  1 OBJECT  GLOBAL DEFAULT   16 __libc_single_threaded@@GLIBC_2.32
"""


def test_stubs_name_what_moved_and_nothing_else():
    module = glibc_stubs()
    found = module.stubs(module.versions(LISTING), (2, 28))
    assert found == {
        "libdl.so.2": {(2, 2, 5): ["dlopen"]},
        "libpthread.so.0": {(2, 12): ["pthread_setname_np"]},
        "librt.so.1": {(2, 2, 5): ["shm_open"]},
    }
    assert module.stubs(module.versions(LISTING), (2, 34)) == {}, "a glibc that is old enough needs none"


def test_without_readelf_nothing_is_linked(tmp_path):
    command = [
        sys.executable,
        ROOT / "cmake" / "glibc_stubs.py",
        "--compiler=g++",
        "--newest=2.28",
        f"--output={tmp_path}",
    ]
    done = subprocess.run(
        [str(c) for c in command], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "" and "no readelf" in done.stderr


PROGRAM = """
#include <atomic>
#include <dlfcn.h>
#include <memory>
#include <pthread.h>
#include <sstream>
#include <string>
extern "C" __attribute__((visibility("default"))) int flashsci_try(void *name) {
  std::ostringstream text;
  std::stringstream both;
  std::shared_ptr<int> shared = std::make_shared<int>(1);
  std::shared_ptr<int> other = shared;
  both << "6";
  int value;
  both >> value;
  text << value << *other;
  pthread_mutexattr_t attributes;
  if (pthread_mutexattr_init(&attributes)) return -1;
  return dlsym(nullptr, static_cast<char *>(name)) ? std::stoi(text.str()) : -2;
}
"""


@needs_compiler
def test_a_library_linked_with_the_stubs_asks_for_old_symbols_and_runs(tmp_path):
    pytest.importorskip("elftools", reason="pyelftools (auditwheel brings it) is not installed")
    (tmp_path / "try.cpp").write_text(PROGRAM)
    output = tmp_path / "stubs"
    command = [
        sys.executable,
        ROOT / "cmake" / "glibc_stubs.py",
        "--compiler=g++",
        "--newest=2.28",
        f"--output={output}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    libraries = done.stdout.split()
    sources = [tmp_path / "try.cpp", ROOT / "csrc" / "bindings" / "older_runtimes.cpp"]
    flags = ["-shared", "-fPIC", "-O2", "-fvisibility=hidden", f"-Wl,--version-script={ROOT / 'cmake' / 'exports.map'}"]
    library = tmp_path / "try.so"
    command = ["g++", *flags, *sources, "-Wl,--no-as-needed", *libraries, "-ldl", "-lpthread", "-o", library]
    subprocess.run(command, check=True)
    needed, symbols, _ = wheels.asked(library.read_bytes())
    assert set(needed) <= wheels.SYSTEM
    late = {f: v for f, of in symbols.items() for v in of if v > wheels.NEWEST[f]}
    assert not late, f"newer than {wheels.PLATFORM}: {late}"
    # In a process of its own, as an extension is loaded: the functions of the stubs come from the system's libraries.
    program = f"import ctypes; print(ctypes.CDLL({str(library)!r}).flashsci_try(b'malloc'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "61"


def test_the_section_of_a_version():
    text = "# Changes\n\n## [0.2.0] - 2031-01-02\n\n- two\n\n## [0.1.0] - 2030-01-02\n\n- one\n"
    assert packaging.changes(text, "0.2.0") == "## [0.2.0] - 2031-01-02\n\n- two"
    assert packaging.changes(text, "0.1.0") == "## [0.1.0] - 2030-01-02\n\n- one"
    assert packaging.changes(text, "0.1") is None
    assert packaging.changes((ROOT / "CHANGELOG.md").read_text(), packaging.version())


def test_a_release_of_another_tag_or_without_files_is_refused(tmp_path):
    command = [sys.executable, "-m", "tools.packaging", "check", tmp_path, "--tag", "v9.9"]
    done = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the tag is v9.9 and pyproject.toml says" in done.stderr
    assert "has 0 wheels and 0 source distributions" in done.stderr


def test_a_wheel_without_kernels_is_no_release(tmp_path):
    path = tmp_path / "flashsci-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flashsci/__init__.py", "")
        archive.writestr("flashsci-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n")
    contents = wheels.read(path)
    assert (contents.version, contents.tags, contents.archs) == ("0.1.0", ["py3-none-linux_x86_64"], [])
    assert "no flashsci/_C.so" in " ".join(wheels.faults(contents))
    command = [sys.executable, "-m", "tools.packaging", "repair", path, "--output", tmp_path]
    done = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "nothing to repair" in done.stderr


def test_the_tested_versions_are_those_that_pages_name():
    """The oldest torch of pyproject.toml is tested, and README, the release job and the list agree."""
    releases = list(dict.fromkeys(".".join(map(str, versions.series(torch))) for torch, _ in versions.TESTED))
    assert f'"torch>={releases[0]}"' in (ROOT / "pyproject.toml").read_text()
    listed = ", ".join(f'"{release}"' for release in releases)
    assert f"torch: [{listed}]" in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    newest = [".".join(map(str, versions.NEWEST[name])) for name in ("torch", "triton")]
    oldest = ".".join(map(str, min(versions.series(triton) for _, triton in versions.TESTED)))
    assert f"torch {releases[0]} to {newest[0]} and Triton {oldest} to {newest[1]}" in readme


def test_the_files_of_version_sensitive_tests_exist():
    assert set(matrix.QUICK) < set(matrix.SENSITIVE)
    assert [path for path in matrix.SENSITIVE if not (ROOT / path).is_file()] == []


def test_pairs_of_some_releases():
    assert matrix.chosen([]) == list(versions.TESTED)
    assert {torch for torch, _ in matrix.chosen(["2.14", "2.10"])} == {"2.10.0", "2.14.1"}
    assert matrix.chosen(["2.14.1-3.8.0"]) == [("2.14.1", "3.8.0")]
    with pytest.raises(SystemExit, match=r"no pair 1.0 is tested; there are 2.10, 2.10.0-3.6.0, "):
        matrix.chosen(["1.0"])


def test_ci_runs_the_oldest_and_the_newest_torch():
    steps = (ROOT / ".ci" / "run").read_text()
    (pairs,) = re.findall(r'^export QUICK=1 VERSIONS="(.+?)"', steps, re.M)
    assert re.search(r"; make .*\bversions\b", steps)
    oldest, newest = (versions.series(torch) for torch, _ in matrix.chosen(pairs.split()))
    metadata = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, oldest))}"' in metadata and newest == versions.NEWEST["torch"]


def test_the_outcome_of_a_run():
    assert matrix.last_line("..\n=== 3 passed, 1 skipped in 2.50s (0:00:02) ===\n") == "3 passed, 1 skipped"
    assert matrix.last_line("ERROR: no such file") == "no tests ran"


def test_newer_releases_are_named_once(monkeypatch):
    torch, triton = (".".join(map(str, versions.NEWEST[name])) for name in ("torch", "triton"))
    assert versions.newer("torch", f"{torch}.7+cu130") is None and versions.newer("triton", "3.1.0") is None
    monkeypatch.setitem(versions.NEWEST, "torch", (2, 9))
    with pytest.warns(UserWarning, match=r"torch 2\.10\.0\+cpu is newer than flashsci is tested with \(to 2\.9\)"):
        versions.warn_if_newer("torch", "2.10.0+cpu")
    assert "newer than" in versions.newer("torch", "3.0.0a0+git1234")
    assert versions.newer("triton", f"{triton}.1+rocm") is None


def test_a_newer_torch_is_named_at_the_first_use():
    program = (
        "import warnings, flashsci.versions as v\n"
        "v.NEWEST['torch'] = (2, 0)\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import flashsci\n"
        "    flashsci.attention; flashsci.varlen_attention; flashsci.sdpa\n"
        "print([str(w.message) for w in seen if 'flashsci' in str(w.message)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.count("is newer than flashsci is tested with (to 2.0)") == 1


def test_what_the_release_job_runs_is_here():
    """Targets of the Makefile, modules of tools and files that .github/workflows/release.yml names."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    targets = set(re.findall(r"\bmake (?!sure)([a-z-]+)", text)) - {"dnf"}
    makefile = (ROOT / "Makefile").read_text()
    assert {"wheel", "versions"} <= targets
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
    assert [p for p in re.findall(r"(?:tools|docs)/[\w/]+\.\w+", text) if not (ROOT / p).is_file()] == []
    assert re.findall(r"-m (tools[\w.]+) (\w+)", text) == [("tools.packaging", "check")]
