"""Tile configurations of calls with a table of tiles, on one Hopper GPU, beside FlexAttention, in at most 90 seconds.

    PYTHONPATH=$PWD python tools/bench/pending/table_tiles.py [--seconds 90] [--only "prefix"]

Each line is one mask with one kernel's configuration replaced (BLOCK_M x BLOCK_N x warps x stages [x registers]): forward and
step in us, medians of CUDA graphs that take turns, and the largest error of out and dq in one block of rows against fp32
math, and of dk and dv beside the configurations that flashsci chooses. Compilation runs ahead, in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashsci
from flashsci.backends.triton import tilings
from flashsci.backends.triton.plans import dense
from flashsci.call import plans

HEADS = 16
MASKS = {
    "nothing hidden": (4096, 128, lambda b, h, i, j: i >= 0),
    "prefix of 1024, causal": (8192, 128, lambda b, h, i, j: (j <= i) | (j < 1024)),
    "8 documents": (8192, 128, lambda b, h, i, j: i // 1024 == j // 1024),
    "band of 256": (10242, 64, lambda b, h, i, j: (i - j).abs() <= 256),
}
CANDIDATES = {
    64: {
        "forward": ["128x64x8x5x128", "128x64x4x3", "128x128x8x3", "64x64x4x3x160", "64x64x4x5", "128x64x8x3"],
        "dq": ["64x64x4x5x168", "64x64x4x3", "128x64x8x3", "128x64x8x3x128", "128x32x8x3"],
        "dkdv": ["64x128x8x5", "64x64x4x3", "64x64x8x3", "32x128x8x3"],
    },
    128: {
        "forward": ["128x64x8x5", "64x64x4x3", "64x64x4x5", "128x128x8x2"],
        "dq": ["128x64x8x5", "64x64x4x2", "64x64x4x3", "128x32x8x3"],
        "dkdv": ["64x128x8x2", "64x128x8x5", "64x64x8x3", "32x128x8x3", "64x64x4x2"],
    },
}
CHOSEN = ("chosen", "")
config = tilings.config


def candidates(dim: int) -> list[tuple[str, str]]:
    return [CHOSEN, *((kernel, found) for kernel, several in CANDIDATES[dim].items() for found in several)]


def use(kernel: str, sizes: str) -> None:
    """Take a configuration for one kernel; the others keep theirs."""

    def replaced(name, capability, dtype, precision, dim, dim_v, bias_mask, tables, *lengths):
        if tables and name == kernel:
            return tuple(map(int, sizes.split("x")))
        return config(name, capability, dtype, precision, dim, dim_v, bias_mask, tables, *lengths)

    tilings.config = replaced
    dense.plan.cache_clear()
    plans.plans.clear()


def tensors(length: int, dim: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def calls(name: str, what: tuple[str, str] | None):
    """Forward, and step with its results (out, dq, dk, dv), of a configuration, or of FlexAttention (None)."""
    length, dim, mod = MASKS[name]
    q, k, v, dout = tensors(length, dim)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if what is None:
        mask = create_block_mask(mod, None, None, length, length, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)

        def call():
            return compiled(q, k, v, block_mask=mask)

    else:
        use(*what)
        mask = flashsci.BlockMask.from_function(mod, 1, 1, length, length, "cuda")

        def call():
            return flashsci.attention(q, k, v, mask=mask, backend="triton")

    def forward():
        with torch.no_grad():
            return call()

    def step():
        out = call()
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return forward, step


def captured(function):
    """A CUDA graph of a function, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    return graph, found


def medians(graphs: dict, seconds: float) -> dict:
    """us of each graph; they take turns."""
    found = {key: [] for key in graphs}
    end = time.time() + seconds
    while time.time() < end or len(next(iter(found.values()))) < 5:
        for key, graph in graphs.items():
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            graph.replay()
            events[1].record()
            found[key].append(events)
        torch.cuda.synchronize()
    return {key: statistics.median(a.elapsed_time(b) for a, b in x) * 1e3 for key, x in found.items()}


def rows_by_definition(name: str, rows: slice):
    """out and dq of a block of rows, in fp32."""
    length, dim, mod = MASKS[name]
    q, k, v, dout = (x.float() for x in tensors(length, dim))
    i, j = torch.arange(length, device="cuda")[rows, None], torch.arange(length, device="cuda")
    scores = (q[:, :, rows] @ k.mT) * dim**-0.5
    p = scores.masked_fill(~mod(0, 0, i, j), -torch.inf).softmax(-1)
    out = p @ v
    dp = dout[:, :, rows] @ v.mT
    ds = p * (dp - (dout[:, :, rows] * out).sum(-1, keepdim=True))
    return out, ds @ k * dim**-0.5


def compare(name: str, end: float) -> None:
    length, dim, _ = MASKS[name]
    rows = slice(length // 2 - 32, length // 2 + 32)
    due = rows_by_definition(name, rows)
    forwards, steps, lines, chosen = {}, {}, {}, None
    kept = []  # the tensors that graphs read
    for what in [*candidates(dim), None]:
        if time.time() > end:
            print(f"{name}: no time for {what}")
            continue
        try:
            kept.append(calls(name, what))
            forward, step = kept[-1]
            forwards[what], _ = captured(forward)
            steps[what], found = captured(step)
            steps[what].replay()
            torch.cuda.synchronize()
        except Exception as error:  # a configuration that this GPU cannot launch
            forwards.pop(what, None)
            steps.pop(what, None)
            print(f"{name}: {what} failed: {type(error).__name__}: {str(error)[:150]}")
            continue
        chosen = chosen or [x.float().clone() for x in found[2:]]
        errors = [(x[:, :, rows].float() - y).abs().max().item() for x, y in zip(found[:2], due, strict=True)]
        errors += [(x.float() - y).abs().max().item() for x, y in zip(found[2:], chosen, strict=True)]
        lines[what] = " ".join(f"{x:.1e}" for x in errors)
    forward, step = (medians(graphs, max(1.0, end - time.time()) / 2) for graphs in (forwards, steps))
    for what, errors in lines.items():
        label = "FlexAttention" if what is None else " ".join(what)
        print(f"{name}, S {length}, D {dim}: {label:24s} {forward[what]:8.1f} {step[what]:8.1f}  {errors}", flush=True)


def compiled_ahead(names: list[str], seconds: float) -> None:
    """Fill the compilers' caches on disk: one process for each configuration of a head dim, and for FlexAttention of a mask."""
    jobs, seen = [], set()
    for name in names:
        for n, what in enumerate([*candidates(MASKS[name][1]), None]):
            key = (MASKS[name][1], what) if what else name
            if key not in seen:
                seen.add(key)
                jobs.append([sys.executable, __file__, "--compile", name, str(n)])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = []
    end = time.time() + seconds
    for job in jobs:
        while sum(x.poll() is None for x in running) >= (os.cpu_count() or 8) and time.time() < end:
            time.sleep(0.1)
        if time.time() < end:
            running.append(subprocess.Popen(job, **quiet))
    for process in running:
        try:
            process.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", nargs=2)
    given = parser.parse_args()
    if given.compile:
        name, n = given.compile
        calls(name, [*candidates(MASKS[name][1]), None][int(n)])[1]()
        return
    began = time.time()
    names = [name for name in MASKS if given.only in name]
    compiled_ahead(names, given.seconds * 0.5)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled in {time.time() - began:.0f} s",
        flush=True,
    )
    print("forward, step in us; errors of out, dq in one block of rows, of dk, dv beside the first line's")
    left = given.seconds - (time.time() - began)
    for n, name in enumerate(names, 1):
        compare(name, began + given.seconds - left * (1 - n / len(names)))


if __name__ == "__main__":
    main()
