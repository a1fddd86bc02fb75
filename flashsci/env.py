"""`python -m flashsci env`: the software on this machine, the missing parts, and how to get them.

It is made for bug reports and for broken machines, so it imports only the standard library and trusts nothing. Every
step that could fail, hang or end the interpreter (importing torch, loading the CUDA build, asking the driver) runs in
a child process with a time limit. A failure there becomes a line of the report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flashsci import cached
from flashsci.limits import about_gpu, about_version
from flashsci.versions import newer

#: Environment variables that change what flashsci, Triton or CUDA do.
VARIABLES = (
    "FLASHSCI_BACKEND",
    "FLASHSCI_CACHE",
    "FLASHSCI_FA3",
    "FLASHSCI_FIRST_CHECK",
    "FLASHSCI_TUNE",
    "FA_ARCHS",
    "FA_TILE_PRESET",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
)

_TORCH_PROBE = """
import json, torch
gpus = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gpus.append([f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB", [p.major, p.minor]])
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""

_BACKENDS_PROBE = """
import json
from flashsci.backends import cuda
from flashsci.choice.backends import BACKENDS
reasons = {name: backend.unavailable() for name, backend in BACKENDS.items()}
print(json.dumps({"reasons": reasons, "build": cuda.build_info(), "stale": cuda.stale()}))
"""


@dataclass(frozen=True)
class Part:
    """One line of the report. `advice` says how to get a missing part; None if nothing is missing."""

    what: str
    value: str
    advice: str | None = None


def _run(command: list[str], timeout: float = 20.0) -> str:
    """Standard output of a command; RuntimeError with the last line of its error output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise RuntimeError(f"{complaint[-1].strip()} ({ended})")
    return done.stdout.strip()


def _python(code: str, timeout: float = 120.0) -> Any:
    """The JSON that `code` prints last, run by this Python in a child process."""
    return json.loads(_run([sys.executable, "-c", code], timeout).splitlines()[-1])


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def system() -> list[Part]:
    return [Part("system", f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} cores")]


def python() -> list[Part]:
    where = f"{platform.python_version()} at {sys.executable}"
    old = sys.version_info < (3, 10)
    return [Part("python", where, "flashsci needs Python 3.10 or newer" if old else None)]


def torch() -> list[Part]:
    if not importlib.util.find_spec("torch"):
        return [Part("torch", "not installed", "pip install 'torch>=2.10'")]
    try:
        found = _python(_TORCH_PROBE)
    except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
        return [Part("torch", f"installed, but broken: {error}", "pip install --force-reinstall torch")]
    build = f"CUDA {found['cuda']}" if found["cuda"] else "CPU build"
    old = tuple(int(x) for x in found["version"].split(".")[:2]) < (2, 10)
    findings = [
        Part(
            "torch",
            f"{found['version']} ({build})",
            "flashsci needs torch >= 2.10" if old else newer("torch", found["version"]),
        )
    ]
    if found["gpus"]:
        findings += [Part(f"GPU {i}", gpu) for i, (gpu, _) in enumerate(found["gpus"])]
        kinds = {tuple(capability): i for i, (_, capability) in enumerate(found["gpus"])}
        findings += [Part(f"limit of GPU {i}", text) for c, i in kinds.items() for text in about_gpu(c)]
    elif not found["cuda"] and shutil.which("nvidia-smi"):
        findings.append(
            Part(
                "GPU",
                "there is a driver, but this torch cannot use it",
                "install a CUDA build of torch",
            )
        )
    else:
        findings.append(Part("GPU", "none that torch can use"))
    return findings + [
        Part("limit of torch", text) for text in about_version("torch", found["version"], bool(found["gpus"]))
    ]


def driver() -> list[Part]:
    if not shutil.which("nvidia-smi"):
        return [Part("driver", "no nvidia-smi: the fused kernels need an NVIDIA GPU and its driver")]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return [Part("driver", line) for line in _run(query).splitlines()]


def triton() -> list[Part]:
    if not importlib.util.find_spec("triton"):
        return [Part("triton", "not installed", "pip install 'triton>=3.6' (Linux)")]
    version = _python("import json, triton; print(json.dumps(triton.__version__))")
    gpu = shutil.which("nvidia-smi") is not None
    limits = [Part("limit of triton", text) for text in about_version("triton", version, gpu)]
    return [Part("triton", version, newer("triton", version)), *limits]


def compilers() -> list[Part]:
    findings = []
    for name, advice in (
        (
            "nvcc",
            "to build the CUDA backend, install the CUDA toolkit (12.8 or newer)",
        ),
        (os.environ.get("CXX", "c++"), "install a C++17 compiler, for instance g++"),
        ("cmake", "pip install cmake"),
        ("ninja", "pip install ninja"),
    ):
        path = shutil.which(name)
        if not path:
            findings.append(Part(name, "not found", advice))
            continue
        lines = [line for line in _run([path, "--version"]).splitlines() if line.strip()]
        release = next((line for line in lines if "release" in line), lines[0])
        findings.append(Part(name, f"{release.strip()} at {path}"))
    return findings


def extras() -> list[Part]:
    findings = []
    for extra, needs in (
        ("cli", ("typer", "rich")),
        ("demo", ("ase", "matplotlib")),
        ("test", ("pytest", "hypothesis")),
    ):
        have = {name: _installed(name) for name in needs}
        lacking = [name for name, version in have.items() if version is None]
        text = ", ".join(f"{name} {version or 'missing'}" for name, version in have.items())
        findings.append(Part(f"extra [{extra}]", text, f"pip install 'flashsci[{extra}]'" if lacking else None))
    return findings


def backends() -> list[Part]:
    found = _python(_BACKENDS_PROBE)
    findings = [Part(f"backend {name}", reason or "ready") for name, reason in found["reasons"].items()]
    if build := found["build"]:
        archs = ", ".join(f"sm_{arch}" for arch in build["archs"])
        text = f"{archs}, by nvcc {build['nvcc']}, tile preset {build['tile_preset']}"
        findings.append(Part("CUDA build", text, found["stale"]))
    return findings


def kept() -> list[Part]:
    path = cached.tuned()
    return [Part("times of tune", str(path) if path.is_file() else f"none: there is no {path}")]


def variables() -> list[Part]:
    return [Part(name, os.environ[name]) for name in VARIABLES if name in os.environ]


PROBES: tuple[Callable[[], list[Part]], ...] = (
    system,
    python,
    torch,
    driver,
    triton,
    compilers,
    extras,
    backends,
    kept,
    variables,
)


def collect() -> list[Part]:
    """Every finding. A probe that fails says so in its own line and does not affect the others."""
    findings = [Part("flashsci", _installed("flashsci") or "not installed (running from the source tree)")]
    for probe in PROBES:
        try:
            findings += probe()
        except Exception as error:  # a report on a broken machine must appear in every case
            findings.append(Part(probe.__name__, f"could not be found out: {error}"))
    return findings


def main(arguments: list[str] = []) -> int:  # noqa: B006 - read only
    if arguments not in ([], ["--json"]):
        print("usage: python -m flashsci env [--json]")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    findings = collect()
    if arguments:
        print(json.dumps([asdict(f) for f in findings], indent=2))
        return 0
    width = max(len(f.what) for f in findings)
    for f in findings:
        print(f"{f.what:<{width}}  {f.value}")
    missing = [f for f in findings if f.advice]
    if missing:
        print("\nMissing, and how to get it:")
        for f in missing:
            print(f"  {f.what:<{width}}  {f.advice}")
    return 0
