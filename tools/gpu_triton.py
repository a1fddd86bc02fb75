"""Checks, sweeps and timings of the Triton backend on a GPU; a table last. Not part of the package.

    python tools/gpu_triton.py check --count 200 --seed 0     generated cases against fp64
    python tools/gpu_triton.py sweep:forward,dq,dkdv          tile sizes, dense bf16
    python tools/gpu_triton.py time:dense,bias,tiny           against SDPA and FlexAttention, interleaved

Compiling takes longer than running: every mode first runs its work once in a pool of processes, which fills Triton's and
Inductor's caches on disk.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import warnings

warnings.filterwarnings("ignore")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORKERS = min(15, os.cpu_count() or 1)


def interleaved(candidates: dict, rounds: int = 15) -> dict[str, float]:
    """Median milliseconds of each callable, launch by launch in turn."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 2):
        for name, run in candidates.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(1_000_000)  # the host gets ahead: what is timed is the device
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


# check


def check_one(case):
    import torch

    from flashsci.testing import Judge, evaluate, make_inputs, poisoned_memory

    torch.cuda.set_per_process_memory_fraction(0.06)
    try:
        judge = Judge(make_inputs(case, "cuda"))
        with poisoned_memory():
            found = evaluate(judge.inputs, "triton")
        findings = judge.findings(found)
        again = evaluate(judge.inputs, "triton")
        problems = [f.problem for f in findings if f.problem]
        problems += [
            f"{n} differs between two runs" for n in found if not torch.equal(found[n], again[n])
        ]
        return problems, {f.tensor: max(f.ratios) for f in findings}
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:300]} {traceback.format_exc()[-300:]}"], {}


def check(count: int, seed: int, pool, dtype: str | None = None) -> None:
    from flashsci.testing import generate

    start = time.time()
    cases = list(generate(seed, count))
    if dtype:
        cases = [case for case in cases if case.variant.dtype == dtype]
    worst: dict[tuple[str, str], float] = {}
    failures = 0
    for case, (problems, ratios) in zip(
        cases, pool.imap(check_one, cases, chunksize=1), strict=True
    ):
        for tensor, ratio in ratios.items():
            key = (case.variant.dtype, tensor)
            worst[key] = max(worst.get(key, 0.0), ratio)
            if 0.6 < ratio <= 1.0:
                print(f"near: {tensor} {ratio:.2f} {case}"[:900], flush=True)
        if problems:
            failures += 1
            if failures <= 12:
                print("FAIL", "; ".join(problems)[:700], "\n    ", case, flush=True)
    print(
        f"check: {count} cases, {failures} failures, {time.time() - start:.0f} s; worst ratio to what is allowed:"
    )
    print("   ", {f"{d} {t}": round(r, 2) for (d, t), r in sorted(worst.items())}, flush=True)


# sweeps and timings


def dense_case(d, causal, s, dtype="bfloat16", b=None, h=None, hk=None):
    return {"id": f"d{d}-{'causal' if causal else 'full'}-s{s}", "B": b or 16384 // s, "H": h or 2048 // d, "S": s, "D": d, "causal": causal,
                "dtype": dtype, "Hk": hk or h or 2048 // d}  # fmt: skip


BIAS_CASES = {
    "triangle-bf16-s384": {"shape": (1, 384, 4, 384, 384, 32), "bias": (1, 1, 4, 384, 384), "bias_dtype": "float32",
                               "mask": (1, 384, 1, 1, 384)},
    "af3-pair": {"shape": (1, 4, 16, 768, 768, 64), "bias": (1, 4, 16, 768, 768)},
    "af3-pairformer-s768": {"shape": (1, 1, 16, 768, 768, 24), "bias": (1, 1, 16, 768, 768), "bias_dtype": "float32"},
    "af3-diffusion": {"shape": (1, 48, 16, 384, 384, 48), "bias": (1, 1, 16, 384, 384), "bias_dtype": "float32"},
    "pangu-window": {"shape": (30, 124, 6, 144, 144, 32), "bias": (1, 124, 6, 144, 144)},
    "atom-window": {"shape": (32, 144, 4, 32, 128, 32), "bias": (1, 144, 4, 32, 128)},
    "long-bias": {"shape": (1, 1, 16, 4096, 4096, 64), "bias": (1, 1, 16, 4096, 4096)},
    "unimol-fp16": {"shape": (1, 32, 64, 256, 256, 8), "bias": (1, 32, 64, 256, 256), "dtype": "float16"},
    "unimol-fp32": {"shape": (1, 32, 64, 256, 256, 8), "bias": (1, 32, 64, 256, 256), "dtype": "float32"},
    "triangle-fp32-s384": {"shape": (1, 384, 4, 384, 384, 32), "bias": (1, 1, 4, 384, 384), "dtype": "float32",
                               "mask": (1, 384, 1, 1, 384)},
}  # fmt: skip
TINY_CASES = {
    "pet-md-4096": {"shape": (1, 4096, 8, 25, 25, 16), "bias": (1, 4096, 1, 1, 25), "dtype": "float32"},
    "pet-md-70000": {"shape": (1, 70000, 8, 25, 25, 16), "bias": (1, 70000, 1, 1, 25), "dtype": "float32"},
    "escaip": {"shape": (1, 250, 10, 45, 45, 320, 64), "bias": (1, 250, 1, 1, 45), "dtype": "float32"},
    "fp32-d64-s2048": {"shape": (1, 2, 8, 2048, 2048, 64), "dtype": "float32"},
    "fp32-d128-s2048": {"shape": (1, 2, 8, 2048, 2048, 128), "dtype": "float32"},
    "short-bf16-d32": {"shape": (1, 16384, 8, 30, 30, 32)},
    "short-fp32-d64": {"shape": (1, 4096, 8, 25, 25, 64), "dtype": "float32"},
    "short-bf16-d64-s60": {"shape": (1, 8192, 8, 60, 60, 64)},
    "small-call": {"shape": (1, 1, 8, 64, 64, 64)},
}  # fmt: skip


class Call:
    """One case: its tensors, the backend's raw calls, and peers."""

    def __init__(
        self, shape, bias=None, bias_dtype=None, mask=None, dtype="bfloat16", causal=False, Hk=None
    ):
        import torch

        from flashsci.backends.triton import host

        self.host, self.torch, self.causal = host, torch, causal
        dtype = getattr(torch, dtype)
        b0, b1, h, sq, sk, d, *rest = shape
        dv = rest[0] if rest else d
        hk = Hk or h
        g = torch.Generator("cuda").manual_seed(0)
        rand = lambda *s: torch.randn(*s, device="cuda", generator=g).to(dtype)  # noqa: E731
        self.q, self.k, self.v = (
            rand(b0, b1, h, sq, d),
            rand(b0, b1, hk, sk, d),
            rand(b0, b1, hk, sk, dv),
        )
        self.dout = rand(b0, b1, h, sq, dv)
        self.bias = (
            None
            if bias is None
            else rand(*bias).to(getattr(torch, bias_dtype) if bias_dtype else dtype)
        )
        self.mask = None
        if mask:
            self.mask = torch.arange(sk, device="cuda").expand(mask) < sk - sk // 16
        self.scale = 1 / math.sqrt(d)
        self.scalars = (
            -1,
            -1,
            self.scale,
            0.0,
            -1,
            0 if causal else -1,
            False,
            0.0,
            "default",
            False,
        )
        self.tensors = (self.q, self.k, self.v, self.bias, None, self.mask, None, None, None, None)
        self.flops = 2 * b0 * b1 * h * sq * sk * (d + dv) / (2 if causal else 1)
        self.out, self.lse = self.forward()

    def forward(self):
        return self.host.forward(*self.tensors, *self.scalars)

    def backward(self, need=15):
        return self.host.backward(
            self.dout, None, *self.tensors, self.out, self.lse, *self.scalars, need
        )

    def flat(self, x):
        return x.flatten(0, 1)

    def flex(self):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch = self.torch
        q, k, v = (self.flat(x).detach().requires_grad_() for x in (self.q, self.k, self.v))
        sq, sk = q.shape[-2], k.shape[-2]
        block_mask = None
        if self.causal:
            block_mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, sq, sk, device="cuda"
            )
        run = torch.compile(flex_attention, dynamic=False)
        forward = lambda: run(q, k, v, block_mask=block_mask, scale=self.scale)  # noqa: E731
        out = forward()
        return forward, lambda: torch.autograd.grad(
            out, (q, k, v), self.flat(self.dout), retain_graph=True
        )

    def sdpa(self, backend):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        torch = self.torch
        q, k, v = (self.flat(x).detach().requires_grad_() for x in (self.q, self.k, self.v))
        leaves, bias = [q, k, v], None
        if self.bias is not None:
            leaf = self.bias.to(q.dtype).detach().requires_grad_()
            leaves.append(leaf)
            bias = (
                leaf.expand(*self.q.shape[:-1], k.shape[-2]).flatten(0, 1)
                if leaf.shape[:2] != self.q.shape[:2]
                else (leaf.flatten(0, 1).expand(*q.shape[:-1], k.shape[-2]))
            )

        def forward():
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self.causal,
                                                                        scale=self.scale)  # fmt: skip

        out = forward()
        return forward, lambda: torch.autograd.grad(
            out, leaves, self.flat(self.dout), retain_graph=True
        )


SWEEP_LENGTH = 16384
CONFIGS = {
    ("forward", 64): [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3)],
    ("forward", 128): [(128, 128, 8, 3), (64, 64, 4, 3)],
    ("dq", 64): [(128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3, 128)],
    ("dq", 128): [(128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 3, 128)],
    ("dkdv", 64): [(64, 64, 4, 3), (64, 64, 4, 3, 168), (64, 64, 4, 4)],
    ("dkdv", 128): [(64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3)],
}  # fmt: skip
CONFIGS = {k: [c for c in v if c[1] & (c[1] - 1) == 0] for k, v in CONFIGS.items()}


def with_config(kernel: str, tile):
    """Make one kernel use these tile sizes."""
    from flashsci.backends.triton import host, launch

    if not hasattr(launch, "default_config"):
        launch.default_config = launch.config
    launch.config = lambda name, *rest: (
        tile if name == kernel and tile else launch.default_config(name, *rest)
    )
    host.plan.cache_clear()


def kernel_run(call: Call, kernel: str):
    full = call.bias is not None and call.bias.shape[:3] == call.q.shape[:3]
    return {"forward": call.forward, "dq": lambda: call.backward(9 if full else 1), "dkdv": lambda: call.backward(6),
            "bias_gradient": lambda: call.backward(8), "small": call.backward}[kernel]  # fmt: skip


def warm_config(job):
    case, kernel, tile = job
    try:
        call = Call(**case)
        with_config(kernel, tile)
        kernel_run(call, kernel)()
        call.torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{kernel} {tile}: {type(error).__name__} {str(error)[:150]}"


def sweep_cases(kernel: str, d: int):
    for causal in (False, True):
        c = dense_case(d, causal, SWEEP_LENGTH)
        yield (
            c["id"],
            {"shape": (1, c["B"], c["H"], SWEEP_LENGTH, SWEEP_LENGTH, d), "causal": causal},
        )


def sweep(kernels, pool, dims=(64, 128)) -> None:
    jobs = [(case, kernel, tile) for kernel in kernels for d in dims for _, case in sweep_cases(kernel, d)
            for tile in CONFIGS[kernel, d]]  # fmt: skip
    small = [
        (dict(case, shape=(1, 1, 1, 512, 512, case["shape"][-1])), kernel, tile)
        for case, kernel, tile in jobs
    ]
    start = time.time()
    failed = {
        error.split(":")[0]: error for error in pool.map(warm_config, small, chunksize=1) if error
    }
    print(
        f"sweep: {len(small)} kernels compiled in {time.time() - start:.0f} s; failed: {list(failed.values())}",
        flush=True,
    )
    rows = {}
    for kernel in kernels:
        for d in dims:
            for _name, case in sweep_cases(kernel, d):
                call = Call(**case)
                for tile in CONFIGS[kernel, d]:
                    if f"{kernel} {tile}" in failed:
                        continue
                    with_config(kernel, tile)
                    ms = interleaved({"x": kernel_run(call, kernel)}, 7)["x"]
                    work = {"forward": 1.0, "dq": 1.5, "dkdv": 2.0}[kernel] * call.flops
                    rows.setdefault((kernel, d, tile), {})[case["causal"]] = work / ms / 1e9
                with_config(kernel, None)
    for (kernel, d, tile), found in rows.items():
        print(
            f"{kernel:8} d{d:<4} {tile!s:20} full {found.get(False, 0):6.1f}  causal {found.get(True, 0):6.1f}"
        )


def sweep_bias(kernels, pool, names) -> None:
    """Tile sizes of cases with a bias; the table is per case in microseconds."""
    tiles = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 2), (128, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3),
             (64, 128, 8, 2), (64, 128, 4, 2), (32, 64, 4, 3), (32, 128, 4, 2), (64, 64, 8, 2)]  # fmt: skip
    if "fp32" in names[0]:
        tiles = [(64, 32, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1), (32, 64, 4, 1), (128, 32, 8, 1), (64, 32, 4, 2), (32, 32, 2, 1),
                 (64, 64, 8, 1), (32, 32, 4, 2), (64, 16, 4, 2), (16, 64, 4, 2)]  # fmt: skip
    jobs = [
        (BIAS_CASES[n] if n in BIAS_CASES else TINY_CASES[n], kernel, tile)
        for n in names
        for kernel in kernels
        for tile in tiles
    ]
    start = time.time()
    failed = {
        error.split(":")[0]: error for error in pool.map(warm_config, jobs, chunksize=1) if error
    }
    print(
        f"sweep: {len(jobs)} kernels compiled in {time.time() - start:.0f} s; failed: {list(failed.values())}",
        flush=True,
    )
    for name in names:
        call = Call(**(BIAS_CASES[name] if name in BIAS_CASES else TINY_CASES[name]))
        for kernel in kernels:
            found = []
            for tile in tiles:
                if f"{kernel} {tile}" in failed:
                    continue
                with_config(kernel, tile)
                found.append((interleaved({"x": kernel_run(call, kernel)}, 7)["x"] * 1e3, tile))
            with_config(kernel, None)
            print(
                f"{name:20} {kernel:14}",
                *(f"{tile} {us:.0f} us;" for us, tile in sorted(found)[:6]),
                flush=True,
            )


def warm_tiny(job):
    name, kernel, tile = job
    try:
        call = Call(**TINY_CASES[name])
        with_tiny(kernel, tile)
        kernel_run(call, kernel)()
        call.torch.cuda.synchronize()
    except Exception as error:
        return f"{kernel} {tile} {name}: {type(error).__name__} {str(error)[:150]}"


def with_tiny(kernel, tile):
    from flashsci.backends.triton import host, launch

    if kernel == "small":
        if not hasattr(launch, "default_small"):
            launch.default_small = launch.small_config
        launch.small_config = (lambda *a: tile) if tile else launch.default_small
        host.plan.cache_clear()
    else:
        with_config(kernel, tile)


def sweep_tiny(pool) -> None:
    tiles = {
        "forward": [(32, 32, 1, 1), (32, 32, 1, 2), (32, 32, 2, 1), (32, 32, 2, 2), (32, 32, 4, 1), (32, 32, 2, 1, 96)],
        "small": [(32, 1), (32, 2), (32, 4), (32, 2, 168), (32, 2, 128), (32, 4, 128), (32, 4, 96)],
    }  # fmt: skip
    names = ("pet-md-4096", "short-bf16-d32", "short-fp32-d64", "short-bf16-d64-s60")
    jobs = [(n, k, t if "s60" not in n else (64, *t[1:]) if k == "small" else (64, 64, *t[2:]))
            for n in names for k, found in tiles.items() for t in found]  # fmt: skip
    failed = [error for error in pool.map(warm_tiny, jobs, chunksize=1) if error]
    print("sweep-tiny failed:", failed, flush=True)
    rows: dict = {}
    calls = {n: Call(**TINY_CASES[n]) for n in names}
    for n, k, t in jobs:
        if any(error.startswith(f"{k} {t} {n}:") for error in failed):
            continue
        with_tiny(k, t)
        rows.setdefault((n, k), []).append(
            (interleaved({"x": kernel_run(calls[n], k)}, 7)["x"] * 1e3, t)
        )
        with_tiny(k, None)
    for (n, k), found in rows.items():
        print(f"{n:20} {k:8}", *(f"{t} {us:.0f} us;" for us, t in sorted(found)))


PEERS = {
    "dense": ("flex", "CUDNN_ATTENTION"),
    "bias": ("EFFICIENT_ATTENTION",),
    "tiny": ("EFFICIENT_ATTENTION",),
}


def timing_cases(group: str):
    if group == "dense":
        for d in (64, 128):
            for causal in (False, True):
                for s in (4096, 16384):
                    c = dense_case(d, causal, s)
                    yield c["id"], {"shape": (1, c["B"], c["H"], s, s, d), "causal": causal}
    if group == "bias":
        yield from BIAS_CASES.items()
    if group == "tiny":
        yield from TINY_CASES.items()


def warm_case(job):
    case, peers = job
    try:
        with_config("none", None)
        call = Call(**case)
        call.backward()
        if "flex" in peers:
            _, backward = call.flex()
            backward()
        call.torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {type(error).__name__} {str(error)[:300]}"


def timing(group: str, pool, rounds: int = 15) -> None:
    import torch

    cases = list(timing_cases(group))
    start = time.time()
    for error in pool.map(warm_case, [(case, PEERS[group]) for _, case in cases], chunksize=1):
        if error:
            print(error)
    print(f"time {group}: compiled in {time.time() - start:.0f} s", flush=True)
    ratios: dict[str, list[float]] = {}
    for name, case in cases:
        torch.cuda.empty_cache()
        call = Call(**case)
        runs = {"triton fwd": call.forward, "triton bwd": call.backward}
        for peer in PEERS[group]:
            try:
                forward, backward = call.flex() if peer == "flex" else call.sdpa(peer)
                backward()
                runs |= {f"{peer[:5].lower()} fwd": forward, f"{peer[:5].lower()} bwd": backward}
            except Exception as error:
                print(name, peer, str(error)[:120])
        ms = interleaved(runs, rounds)
        line = [f"{name:20}"]
        for run, t in ms.items():
            rate = call.flops * (2.5 if run.endswith("bwd") else 1) / t / 1e9
            line.append(f"{run} {t * 1e3:8.0f} us {rate:5.0f}")
            if not run.startswith("triton"):
                ratios.setdefault(run, []).append(t / ms["triton " + run[-3:]])
        print(" | ".join(line), flush=True)
        del call, runs
    for run, r in ratios.items():
        print(f"geomean of triton over {run}: {math.exp(statistics.fmean(map(math.log, r))):.3f}")


def host_time() -> None:
    """Microseconds of the host per call, the device kept busy."""
    import torch

    import flashsci

    call = Call(**TINY_CASES["small-call"])
    q, k, v = (x.flatten(0, 1).detach() for x in (call.q, call.k, call.v))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    runs = {
        "raw forward": call.forward,
        "raw backward": call.backward,
        "attention, no grad": lambda: flashsci.attention(q, k, v, backend="triton"),
        "attention, grad": lambda: flashsci.attention(*leaves, backend="triton"),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    for name, run in runs.items():
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        times = []
        for _ in range(20):
            torch.cuda._sleep(2_000_000)
            start = time.perf_counter()
            for _ in range(10):
                run()
            times.append((time.perf_counter() - start) / 10)
            torch.cuda.synchronize()
        print(f"host: {name:20} {statistics.median(times) * 1e6:6.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="+")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    pool = multiprocessing.get_context("spawn").Pool(WORKERS)
    for step in options.steps:
        name, *rest = step.split(":")
        rest = rest[0].split(",") if rest else []
        try:
            if name == "check":
                check(options.count, options.seed, pool, *rest)
            elif name == "sweep":
                sweep(rest, pool)
            elif name == "sweep-bias":
                sweep_bias(rest, pool, ("triangle-bf16-s384", "af3-pair"))
            elif name == "sweep-fp32":
                sweep_bias(rest, pool, ("fp32-d64-s2048", "fp32-d128-s2048", "triangle-fp32-s384"))
            elif name == "sweep-tiny":
                sweep_tiny(pool)
            elif name == "host":
                host_time()
            elif name == "time":
                for group in rest:
                    timing(group, pool, options.rounds)
        except Exception:
            traceback.print_exc()
    pool.terminate()


if __name__ == "__main__":
    main()
