"""Cases about processes, with plain torch as the control: one line for each case, each in a separate process.

    python tools/gpu/process_cases.py packages   AOTInductor: compile a module with one attention, package it, load it, run it
    python tools/gpu/process_cases.py fork       a forked child that computes on the CPU, after its parent used the GPU (if there is one)
    python tools/gpu/process_cases.py fork-after the same, after its parent made the same call, with torch's threads

A case that plain torch does not survive either is torch's fault.
"""

from __future__ import annotations

import argparse
import functools
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
PATIENCE = {"packages": 120, "fork": 30, "fork-after": 30}
PLAIN = ("plain", "torch's sdpa")
BACKENDS = {
    "packages": ("reference", "sdpa", "eager", "triton", "cuda", "auto"),
    "fork": ("reference", "sdpa", "auto"),
    "fork-after": ("reference", "sdpa", "auto"),
}


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def attention(name: str) -> Attend:
    if name == "plain":
        return plain
    if name == "torch's sdpa":
        return F.scaled_dot_product_attention
    import flashsci

    return lambda q, k, v: flashsci.attention(q, k, v, backend=name)


class Module(torch.nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


def error_of(found: Tensor, tensors: tuple[Tensor, ...]) -> float:
    wide = (x.double().cpu() for x in tensors)
    return (found.double().cpu() - plain(*wide)).abs().max().item()


def packages(name: str) -> str:
    """Print progress, so that a process that dies tells how far it came."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = tuple(torch.randn(3, 2, 4, 64, 64, device=device, dtype=dtype).unbind(0))
    module = Module(attention(name))
    print("export", flush=True)
    program = torch.export.export(module, tensors)
    with tempfile.TemporaryDirectory() as folder:
        print("compile", flush=True)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder, "attention.pt2")))
        print("load", flush=True)
        loaded = torch._inductor.aoti_load_package(path)
        print("run", flush=True)
        found = loaded(*tensors)
        found = found[0] if isinstance(found, (tuple, list)) else found
        return f"error {error_of(found, tensors):.2g}"


def fork(name: str, parent_computes: bool = False) -> str:
    if torch.cuda.is_available():
        x = torch.randn(64, 64, device="cuda")
        (x @ x).sum().item()
    attend = attention(name)
    tensors = tuple(torch.randn(3, 2, 4, 64, 64).unbind(0))
    if parent_computes:
        attend(*tensors)
    print("fork", flush=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"error {error_of(attend(*tensors), tensors):.2g}"
        except BaseException as problem:
            said = f"{type(problem).__name__}: {problem}"
        os.write(write, said.encode())
        os._exit(0)
    ready, _, _ = select.select([read], [], [], PATIENCE["fork"] - 10)
    if not ready:
        os.kill(child, 9)
        raise SystemExit("the child hangs")
    return os.read(read, 10_000).decode()


def outcome(which: str, name: str) -> str:
    command = [sys.executable, __file__, which, "--case", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE[which])
    except subprocess.TimeoutExpired as late:
        reached = (late.stdout or b"").decode().split()
        return f"no answer within {PATIENCE[which]} s, after {reached[-1:] or ['the start']}"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0:
        return f"rc 0, {lines[-1]}"
    last = (done.stderr.strip().splitlines() or [""])[-1][:300]
    return f"rc {done.returncode}, in {(lines or ['the start'])[-1]}: {last}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("which", choices=PATIENCE)
    parser.add_argument("--case", help="run this one here")
    given = parser.parse_args()
    after = functools.partial(fork, parent_computes=True)
    run: dict[str, Callable[[str], Any]] = {"packages": packages, "fork": fork, "fork-after": after}
    if given.case:
        print(run[given.which](given.case))
        return
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"torch {torch.__version__}, {gpu}")
    for name in (*PLAIN, *BACKENDS[given.which]):
        print(f"{given.which}: {name}: {outcome(given.which, name)}", flush=True)


if __name__ == "__main__":
    main()
