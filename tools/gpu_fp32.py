"""Workbench of the fp32 kernels of sm80: generated cases by fp64, and times beside SDPA and Triton. Needs a GPU.

    python tools/gpu_fp32.py check --cases 400
    python tools/gpu_fp32.py time --cases dense-d64,unimol --libraries next.so

`check` judges the library of the package through its bindings (`cuda:sm80`). `time` takes further builds of
csrc/sm80/*_fp32.cu (nvcc -shared), one beside the other, by tools/launchers.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch

from flashsci.testing import (
    Case,
    Inputs,
    Judge,
    evaluate,
    generate,
    make_inputs,
    poisoned_memory,
    variants,
)
from flashsci.testing.cases import ALL_LENGTHS, LARGE_LENGTHS
from tools.gpu_triton import interleaved
from tools.launchers import Launchers

NAME, MAX_DIM = "cuda:sm80", 128
PRECISIONS = (None, "tf32x3", "tf32")


def plan(count: int, seed: int) -> list[Case]:
    """Cases of all that the kernels serve; in one of eight all sequences are long."""
    pool = [
        v
        for v in variants(400, ("float32",), max_dim=MAX_DIM)
        if not v.dropout and not (v.varlen and v.bias)
    ]
    short = generate(seed, count - count // 8, pool, lengths=ALL_LENGTHS, score_limit=1 << 18)
    long = generate(seed + 1, count // 8, pool, lengths=LARGE_LENGTHS, score_limit=1 << 21)
    cases = itertools.chain(short, long)
    return [replace(case, precision=PRECISIONS[i % 3]) for i, case in enumerate(cases)]


def extremes() -> list[tuple[str, Inputs]]:
    """Inputs whose rows differ in size by more than fp16 spans; hidden keys that hold anything."""
    found = []
    kinds = ("hidden", "rows", "tiny", "huge", "columns")
    for seed, (dim, seq, kind) in enumerate(
        itertools.product((8, 32, 64, 128), (40, 200), kinds)
    ):
        g = torch.Generator("cuda").manual_seed(seed)
        rand = lambda *s: torch.randn(*s, device="cuda", generator=g)  # noqa: E731
        q, k, v, dout = (rand(2, 2, seq, dim) for _ in range(4))
        mask = None
        if kind == "hidden":
            mask = torch.rand(2, 1, 1, seq, device="cuda", generator=g) < 0.7
            hidden = ~mask[:, 0, 0]
            for x, size in ((k, 1e15), (v, 1e15)):
                x.transpose(1, 2)[hidden] *= size
        elif kind == "rows":
            for x in (v, dout):
                x *= torch.exp2(torch.randint(-30, 30, (2, 2, seq, 1), device="cuda", generator=g))
        elif kind in ("tiny", "huge"):
            for x, size in ((q, 1e-12), (k, 1e12), (v, 1e-12), (dout, 1e-8)):
                x *= size if kind == "tiny" else 1 / size
        else:
            for x in (v, dout):
                x *= torch.exp2(torch.randint(-10, 10, (dim,), device="cuda", generator=g))
        found.append((f"{kind} d{dim} s{seq}", Inputs(q, k, v, None, mask, dout)))
    return found


def judge(inputs: Inputs, repeats: int) -> tuple[list[str], dict[str, float]]:
    """Problems, and the largest ratio of error to allowance by tensor."""
    judged = Judge(inputs)
    with poisoned_memory(cuda_bytes=0):
        found = evaluate(inputs, NAME)
    findings = judged.findings(found)
    problems = [f.problem for f in findings if f.problem]
    for _ in range(repeats):
        with poisoned_memory(cuda_bytes=0):
            again = evaluate(inputs, NAME, deterministic=True)
        differ = [n for n, x in found.items() if not torch.equal(x, again[n])]
        if differ:
            problems.append(f"another run differs in {differ}")
            break
    return problems, {f.tensor: max(f.ratios) for f in findings}


def work(task: tuple[Any, int]) -> tuple[str, list[str], dict[str, float]]:
    case, repeats = task
    try:
        if isinstance(case, int):
            label, inputs = extremes()[case]
        else:
            label, inputs = repr(case), make_inputs(case, "cuda")
        return label, *judge(inputs, repeats)
    except Exception:
        return repr(case), [traceback.format_exc(limit=-3)], {}


def check(count: int, seed: int, seconds: float) -> int:
    start = time.time()
    cases: list[Any] = list(plan(count, seed))
    tasks = [(case, 100 if i % 25 == 0 else 1) for i, case in enumerate(cases)]
    tasks[len(tasks) // 2 : len(tasks) // 2] = [(i, 1) for i in range(40)]
    worst: dict[str, float] = {}
    failures, done = 0, 0
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        for label, problems, ratios in pool.imap_unordered(work, tasks, chunksize=4):
            done += 1
            for problem in problems:
                failures += 1
                if failures <= 12:
                    print("FAIL", problem[:400], label, flush=True)
            if not problems:
                for tensor, ratio in ratios.items():
                    worst[tensor] = max(worst.get(tensor, 0.0), ratio)
            if time.time() - start > seconds:
                print("out of time")
                pool.terminate()
                break
    print(f"check: {done} of {len(tasks)} cases, {failures} failures, {time.time() - start:.0f} s")
    print("worst ratio to what is allowed:", {n: round(r, 3) for n, r in worst.items()}, flush=True)
    return failures


SHAPES = {
    "dense-d32": dict(B=4, H=16, S=4096, D=32),
    "dense-d64": dict(B=4, H=16, S=4096, D=64),
    "dense-d64-causal": dict(B=4, H=16, S=4096, D=64, causal=True),
    "dense-d128": dict(B=4, H=8, S=4096, D=128),
    "unimol": dict(B=32, H=64, S=256, D=8, bias=(32, 64, 256, 256)),
    "graphormer": dict(B=64, H=32, S=129, D=24, bias=(64, 32, 129, 129)),
    "triangle-384": dict(B=384, H=4, S=384, D=32, bias=(1, 4, 384, 384), mask=(384, 1, 1, 384)),
    "pet-md-4096": dict(B=4096, H=8, S=25, D=16, bias=(4096, 1, 1, 25)),
    "pet-train-d32": dict(B=500, H=8, S=25, D=32, bias=(500, 1, 1, 25)),
    "pet-train-d48": dict(B=500, H=8, S=25, D=48, bias=(500, 1, 1, 25)),
}


class Peer:
    """SDPA's efficient kernel, forward and backward, beside ours."""

    def __init__(self, q, k, v, bias, mask, dout, causal):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.kernel = lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
        both = bias if mask is None else torch.where(mask, bias, -math.inf)
        self.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        if both is not None:
            self.leaves.append(both.detach().requires_grad_())
        expanded = None if both is None else self.leaves[3].expand(*q.shape[:-1], k.shape[-2])
        self.arguments, self.causal, self.dout = (*self.leaves[:3], expanded), causal, dout
        with self.kernel():
            self.out = self.run()

    def run(self):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(*self.arguments, is_causal=self.causal)

    def forward(self):
        with torch.no_grad(), self.kernel():
            return self.run()

    def backward(self):
        with self.kernel():
            return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)


def timing(names: list[str], libraries: list[str], peers: list[str], rounds: int) -> None:
    from flashsci.registry import BACKENDS, GENERATIONS

    modules: dict[str, Any] = {}
    if "cuda" in peers:
        modules["cuda"] = GENERATIONS[NAME].load()
        assert modules["cuda"].unavailable() is None
    if "triton" in peers:
        modules["triton"] = BACKENDS["triton"].load()
    for path in libraries:
        modules[Path(path).stem] = Launchers(path, "sm80_fp32", torch.float32, MAX_DIM, MAX_DIM)
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in names:
        z = SHAPES[case]
        g = torch.Generator("cuda").manual_seed(0)
        rand = lambda *s: torch.randn(*s, device="cuda", generator=g)  # noqa: E731
        q, k, v, dout = (rand(z["B"], z["H"], z["S"], z["D"]) for _ in range(4))
        bias = rand(*z["bias"]) if "bias" in z else None
        mask = None
        if "mask" in z:
            mask = torch.arange(z["S"], device="cuda").expand(z["mask"]) < z["S"] - z["S"] // 16
        causal = z.get("causal", False)
        tensors = (q, k, v, bias, mask, None, None, None, None)
        runs: dict[str, dict[str, Any]] = {"forward": {}, "backward": {}}
        expect: list[torch.Tensor] = []
        if "sdpa" in peers:
            peer = Peer(q, k, v, bias, mask, dout, causal)
            runs["forward"]["sdpa"], runs["backward"]["sdpa"] = peer.forward, peer.backward
            expect = [peer.out.detach(), *peer.backward()]
        for name, module in modules.items():
            for precision in ("default", "tf32") if name == "cuda" else ("default",):
                scalars = (-1, -1, z["D"] ** -0.5, 0.0, -1, 0 if causal else -1, False, 0.0, precision, False)  # fmt: skip
                label = name if precision == "default" else f"{name}/tf32"
                need = 15 if bias is not None else 7
                forward = lambda m=module, s=scalars: m.forward(*tensors, *s)  # noqa: E731
                found = forward()
                backward = lambda m=module, s=scalars, f=found, n=need: m.backward(  # noqa: E731
                    dout, None, *tensors, *f, *s, n
                )
                for want, x in zip(expect, (found[0], *backward()), strict=False):
                    error = ((x - want).abs().max() / want.abs().max()).item()
                    if not error < (1e-5 if precision == "default" else 1e-2):
                        print("MISMATCH", case, label, tuple(x.shape), error)
                runs["forward"][label], runs["backward"][label] = forward, backward
        for kind, factor in (("forward", 4), ("backward", 10)):
            times = interleaved(runs[kind], rounds)
            work = factor * z["B"] * z["H"] * z["S"] ** 2 * z["D"] / (2 if causal else 1)
            base = times.get("sdpa", math.nan)
            print(
                f"{case:16} {kind:8}",
                *(
                    f"| {n} {t * 1e3:.0f} us {work / t * 1e-9:.1f} TF {base / t:.2f}x"
                    for n, t in times.items()
                ),
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("check", "time"))
    parser.add_argument("--cases", default="400", help="check: how many; time: names")
    parser.add_argument("--seconds", type=float, default=600, help="check: stop then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--libraries", nargs="*", default=[])
    parser.add_argument("--peers", default="cuda,sdpa,triton")
    parser.add_argument("--rounds", type=int, default=9)
    a = parser.parse_args()
    if a.mode == "check":
        sys.exit(check(int(a.cases), a.seed, a.seconds) != 0)
    names = list(SHAPES) if a.cases in ("all", "400") else a.cases.split(",")
    timing(names, a.libraries, a.peers.split(","), a.rounds)
