"""Forward, backward and double backward of a case: Triton's second order against SDPA's math. Needs a GPU.

    python -m tools.bench.second_order time                           the table of docs/develop/kernels/second_order.md
    python -m tools.bench.second_order profile pet-train-d16          kernels of a step, and the host's work

A case is one of bench's; "@tf32" or "@tf32x3" after its id sets the precision.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashsci
from tools.bench.cases import CASES
from tools.bench.inputs import make_inputs
from tools.bench.timer import host_time, interleave

DEVICE = torch.device("cuda")
TIMED = ("order2-bf16-s8192", "order2-fp32-s2048@tf32x3", "order2-fp32-s2048@tf32", "pet-train-d16", "crystals-mptrj", "order2-fp32-s128")  # fmt: skip
WITH_JVP = ("order2-bf16-s8192",)
GRAPHED = ("pet-train-d16", "order2-fp32-s128")
Run = Callable[[], Any]


class Step:
    """Forward, backward and double backward of one case: ours, and SDPA's math, padded where ours is packed."""

    def __init__(self, name: str):
        id, _, precision = name.partition("@")
        self.precision = precision or None
        case = CASES[id]
        torch.manual_seed(0)
        x = make_inputs(case, DEVICE)
        self.lens, self.cu = case.lens, x.cu_seqlens
        tensors = [None if t is None else t.detach() for t in (x.q, x.k, x.v, x.dout, x.bias)]
        self.hidden: Tensor | None = None
        self.given = {True: tensors, False: self.padded(*tensors) if case.lens else tensors}
        self.tangents = {
            ours: [torch.randn_like(t) for t in (q, k, v, bias) if t is not None]
            for ours, (q, k, v, _, bias) in self.given.items()
        }

    def padded(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """q, k, v, dout and a ragged bias as SDPA takes them."""
        *rows, bias = tensors
        n, longest = len(self.lens), max(self.lens)
        real = torch.arange(longest, device=DEVICE) < torch.tensor(self.lens, device=DEVICE)[:, None]

        def pad(x: Tensor) -> Tensor:
            y = x.new_zeros(n, longest, *x.shape[1:])
            y[real] = x
            return y.transpose(1, 2).contiguous()

        self.hidden = torch.where(real, 0.0, -torch.inf)[:, None, None, :]
        full = bias.new_zeros(n, longest, longest, bias.shape[0])
        full[real[:, :, None] & real[:, None, :]] = bias.t().contiguous()
        return [*map(pad, rows), full.permute(0, 3, 1, 2).contiguous()]

    def attend(self, ours: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        if ours and self.lens:
            longest = {"max_seqlen_q": max(self.lens), "max_seqlen_k": max(self.lens)}
            return flashsci.varlen_attention(q, k, v, self.cu, bias=bias, backend="triton", **longest)
        if ours:
            return flashsci.attention(q, k, v, bias=bias, precision=self.precision, backend="triton")
        if self.hidden is not None:
            bias = bias + self.hidden
        if bias is not None:
            bias = bias.expand(*q.shape[:-1], k.shape[-2])
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def leaves(self, ours: bool) -> tuple[list[Tensor | None], Tensor]:
        """q, k, v, bias; dout."""
        found = [None if x is None else x.detach().requires_grad_() for x in self.given[ours]]
        return [*found[:3], found[4]], found[3]

    def forward(self, ours: bool) -> Tensor:
        with torch.no_grad():
            return self.attend(ours, *self.leaves(ours)[0])

    def backward(self, ours: bool) -> tuple[Tensor, ...]:
        leaves, dout = self.leaves(ours)
        wanted = [x for x in leaves if x is not None]
        return torch.autograd.grad(self.attend(ours, *leaves), wanted, dout)

    def step(self, ours: bool) -> tuple[Tensor, ...]:
        leaves, dout = self.leaves(ours)
        wanted = [x for x in leaves if x is not None]
        out = self.attend(ours, *leaves)
        first = torch.autograd.grad(out, wanted, dout, create_graph=True)
        return torch.autograd.grad(first, [*wanted, dout], self.tangents[ours])

    def jvp(self, ours: bool) -> tuple[Tensor, Tensor]:
        call = lambda q, k, v: self.attend(ours, q, k, v, None)  # noqa: E731
        with torch.no_grad():
            return torch.func.jvp(call, tuple(self.given[ours][:3]), tuple(self.tangents[ours][:3]))


def warm(name: str) -> None:
    """Compile all kernels of a case: the caches on disk keep them."""
    step = Step(name)
    step.step(True)
    if name in WITH_JVP:
        step.jvp(True)


def peak(run: Run) -> float:
    """MiB beyond the memory that was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def graphed(run: Run) -> Run:
    """Replays of a CUDA graph of a step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timings(name: str) -> None:
    step = Step(name)
    both = lambda f: {who: functools.partial(f, who == "ours") for who in ("ours", "math")}  # noqa: E731
    runs = {"step": both(step.step)}
    if name in WITH_JVP:
        runs["jvp"] = both(step.jvp)
    if name in GRAPHED:
        runs["step in a CUDA graph"] = {w: graphed(run) for w, run in both(step.step).items()}
    memory = [peak(run) for run in runs["step"].values()]
    for what, pair in runs.items():
        device = interleave(pair, DEVICE, 0.8, (5, 50))
        host = host_time(pair, DEVICE, 0.5, calls=1, to_end=True)
        line = [f"{name:24} {what:20}"]
        for where, found in (("device", device), ("with the host's time", host)):
            ours, math = (found[who].median * 1e3 for who in ("ours", "math"))
            bound = "*" if found["ours"].host_bound else ""
            line.append(f"{where} {ours:.3f}{bound}, math {math:.3f} ms, {math / ours:.2f}x")
        print(" | ".join(line))
    parts = {n: functools.partial(getattr(step, n), True) for n in ("forward", "backward")}
    times = {n: t.median * 1e3 for n, t in interleave(parts, DEVICE, 0.3, (5, 50)).items()}
    print(
        f"    forward {times['forward']:.3f} ms, with backward {times['backward']:.3f}; "
        f"peak {memory[0]:.0f} of {memory[1]:.0f} MiB = 1/{memory[1] / memory[0]:.0f}",
        flush=True,
    )


def profiled(name: str) -> None:
    """Kernels and host functions of a step, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    step = Step(name)
    for ours in (True, False):
        for _ in range(5):
            step.step(ours)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                step.step(ours)
            torch.cuda.synchronize()
        print(name, "ours" if ours else "math")
        for where, attribute in (
            ("device", "self_device_time_total"),
            ("host, profiler included", "self_cpu_time_total"),
        ):
            print(f"  us a step, {where}:")
            rows = sorted(found.key_averages(), key=lambda row: -getattr(row, attribute))
            for row in rows[:10]:
                print(f"  {getattr(row, attribute) / 10:9.1f} {row.count // 10:3d}x {row.key[:90]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("time", "profile"))
    parser.add_argument("cases", nargs="*", default=TIMED)
    options = parser.parse_args()
    workers = min(len(options.cases), os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(warm, options.cases, chunksize=1)
    for name in options.cases:
        (timings if options.mode == "time" else profiled)(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
