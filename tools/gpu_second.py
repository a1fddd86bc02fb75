"""Checks, sweeps and timings of the second order on a GPU; tables last. Not part of the package.

    python tools/gpu_second.py check=200 --part 0/2     generated cases against fp64, in a pool of processes
    python tools/gpu_second.py sweep=bf16,fp32:tf32         tile sizes of the large kernels
    python tools/gpu_second.py time                     forward + backward + double backward, and JVP, against SDPA's math
    python tools/gpu_second.py profile=pet-train-d16    kernels of a step, what the host does

What is timed is first run once in a pool of processes, which fills Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEVICE = "cuda"
WORKERS = min(15, os.cpu_count() or 1)


# check


def check_variant(cases):
    import torch

    from flashsci.check import judge_case

    torch.set_num_threads(1)
    torch.cuda.set_per_process_memory_fraction(0.06)
    found = []
    for case in cases:
        try:
            tally = judge_case(case, ["triton"], "cuda")["triton"]
            found.append(
                (case, [f["problem"] for f in tally.failures] + list(tally.refused), tally.worst)
            )
        except Exception as error:
            found.append((case, [f"{type(error).__name__}: {str(error)[:600]}"], {}))
    return found


def check(count, part, pool, until):
    from flashsci.check import plan_cases

    start = time.time()
    groups: dict = {}
    for case in plan_cases(count, 0, "cuda", "second_order", 2):
        groups.setdefault(case.variant, []).append(case)
    index, parts = (int(x) for x in part.split("/"))
    chosen = [group for i, group in enumerate(groups.values()) if i % parts == index]
    worst: dict = {}
    done = failures = 0
    lasted: list[float] = []
    results = pool.imap_unordered(check_variant, chosen)
    for _ in chosen:
        try:
            found = results.next(timeout=max(1.0, until - time.time()))
        except multiprocessing.TimeoutError:
            break
        lasted.append(round(time.time() - start, 1))
        for case, problems, ratios in found:
            done += 1
            failures += bool(problems)
            if problems and failures <= 10:
                print("FAIL", "; ".join(problems)[:700], "\n    ", case, flush=True)
            for tensor, ratio in ratios.items():
                key = case.variant.dtype, tensor
                worst[key] = max(worst.get(key, 0.0), *ratio)
    print(
        f"check: {done} of {sum(map(len, chosen))} cases, {failures} failures, {time.time() - start:.0f} s"
    )
    print("   ", {f"{d} {t}": round(r, 2) for (d, t), r in sorted(worst.items())}, flush=True)
    print("    groups done at", lasted, flush=True)


# sweeps and timings


def interleaved(candidates, rounds=7, budget=20.0):
    """Median milliseconds of each callable, launch by launch in turn, host time included."""
    import torch

    times: dict = {name: [] for name in candidates}
    started = time.time()
    for turn in range(rounds + 2):
        for name, run in candidates.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(begin.elapsed_time(end))
        if turn >= 4 and time.time() - started > budget:
            break
    return {name: statistics.median(t) for name, t in times.items()}


SHAPES = {"bf16": ("bfloat16", 1, 16, 8192, 64), "bf16-d128": ("bfloat16", 1, 8, 8192, 128),
          "fp32": ("float32", 2, 8, 2048, 64)}  # fmt: skip
SWEEPS = {
    "bf16": {
        "jvp": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)],
        "second_queries": [(64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2)],
        "second_keys": [(64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 2), (64, 128, 8, 2), (16, 64, 4, 3)],
    },
    "fp32:tf32x3": {
        "dkdv": [(32, 32, 2, 1), (32, 32, 4, 2)],
        "jvp": [(64, 32, 4, 1), (128, 64, 8, 1)],
        "second_queries": [(32, 32, 4, 1), (64, 32, 4, 1), (128, 32, 8, 1)],
        "second_keys": [(32, 32, 4, 1), (32, 32, 4, 2)],
    },
    "fp32:tf32": {
        "dkdv": [(32, 32, 2, 1), (64, 64, 4, 1)],
        "jvp": [(64, 32, 4, 1), (64, 64, 4, 2), (128, 64, 8, 2)],
        "second_queries": [(32, 32, 4, 1), (128, 32, 8, 1), (128, 32, 8, 2)],
        "second_keys": [(32, 32, 4, 1), (32, 32, 4, 2), (64, 32, 8, 1), (64, 32, 4, 1)],
    },
}  # fmt: skip
UNITS = {"forward": 2, "dq": 3, "dkdv": 4, "jvp": 5, "second_queries": 7, "second_keys": 8}


def kernel_run(name, kernel, config):
    """A launch of one kernel of a plain problem in one tile configuration."""
    import torch

    from flashsci.backends.triton import host, host_second, launch

    shape, _, precision = name.partition(":")
    dtype, b, h, s, d = SHAPES[shape]
    torch.manual_seed(0)
    x = torch.randn(9, b, h, s, d, device=DEVICE).to(getattr(torch, dtype))
    q, k, v, dout, out, tq, tk, tv, result = x.unbind(0)
    lse, mean, delta, zeta = torch.randn(4, b, h, s, device=DEVICE).unbind(0)
    lse = lse + 12
    honest = launch.config
    launch.config = lambda *_: config
    try:
        options = (d**-0.5, 0.0, -1, -1, False, 0.0, precision or "default")
        host.plan.cache_clear()
        second = host_second.second_of(
            (q, k, v, dout, out, tq, tk, tv), None, None, None, None, None, None, None, 0, options
        )
        nothing = (None,) * 7
        common = (q, k, v, *nothing, lse, dout, tq, tk, tv, None, None, mean, delta, zeta)
        plan = second.plan
        if kernel == "forward":
            run, given = plan.forward(result), (q, k, v, *nothing, result, torch.empty_like(lse))
        elif kernel == "dq":
            run, given = (
                plan.dq(result, True, 0, None),
                (q, k, v, *nothing, dout, lse, delta, result, None),
            )
        elif kernel == "dkdv":
            other = torch.empty_like(result)
            run, given = plan.dkdv(result, other, True, True, False), (
                q, k, v, *nothing, dout, lse, delta, result, other, None, None,
            )  # fmt: skip
        elif kernel == "jvp":
            run, given = second.jvp(result), (
                q, k, v, *nothing, out, lse, dout, None, tq, tk, tv, None, None, result, mean, delta, zeta,
            )  # fmt: skip
        elif kernel == "second_queries":
            run, given = second.queries(result, 0, None), (*common, result, None)
        else:
            run, given = second.keys(result, torch.empty_like(result), False), (
                *common, result, torch.empty_like(result), None, None,
            )  # fmt: skip
    finally:
        launch.config = honest
    return functools.partial(run, *given), result


def warm(task):
    """Compile what a task needs: a step of a case, or a kernel in a configuration."""
    try:
        warm_step(*task) if len(task) == 1 else kernel_run(*task)[0]()
    except Exception as error:
        return f"{task}: {str(error)[:200]}"


def sweep_tasks(names):
    return [
        (name, kernel, config)
        for name in names
        for kernel, configs in SWEEPS[name].items()
        for config in configs
    ]


def sweep(names):
    for name in names:
        _dtype, b, h, s, d = SHAPES[name.partition(":")[0]]
        for kernel, configs in SWEEPS[name].items():
            runs, away, first = {}, {}, None
            for config in configs:
                try:
                    run, result = kernel_run(name, kernel, config)
                    run()
                    first = result.double() if first is None else first
                    away[config] = ((result.double() - first).norm() / first.norm()).item()
                    runs[config] = run
                except Exception as error:
                    print("skipped", name, kernel, config, str(error)[:80])
            for config, ms in interleaved(runs, rounds=5).items():
                rate = UNITS[kernel] * 2 * b * h * s * s * d / ms / 1e9
                line = f"{name:12s} {kernel:15s} {config!s:18s} {ms:8.3f} ms {rate:6.0f} TFLOP/s"
                print(f"{line}, {away[config]:.1e} from the first", flush=True)
    sys.stdout.flush()


class Step:
    """Forward, backward and double backward of one case: ours, and SDPA's math."""

    def __init__(self, name):
        import torch

        from flashsci.bench.cases import CASES

        torch.manual_seed(0)
        self.name, self.torch = name, torch
        self.precision = None
        if name.startswith("fp32-tf32"):
            name, self.precision = "order2-fp32-s2048", name.removeprefix("fp32-")
        case = CASES[name]
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
        rand = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)  # noqa: E731
        h, d = case.H, case.D
        self.varlen = bool(case.lens)
        if self.varlen:
            lens, total = case.lens, sum(case.lens)
            self.cu = torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
            self.longest = max(lens)
            self.ours = [rand(total, h, d) for _ in range(4)]  # q, k, v, dout
            bias = rand(h, sum(n * n for n in lens))
            rows = (
                torch.arange(self.longest, device=DEVICE)
                < torch.tensor(lens, device=DEVICE)[:, None]
            )

            def padded(x):
                y = x.new_zeros(len(lens), self.longest, h, d)
                y[rows] = x
                return y.transpose(1, 2).contiguous()

            pairs = rows[:, :, None] & rows[:, None, :]
            full = bias.new_zeros(len(lens), self.longest, self.longest, h)
            full[pairs] = bias.t().contiguous()
            self.hidden = torch.where(rows, 0.0, -torch.inf)[:, None, None, :]
            self.math = [padded(x) for x in self.ours]
            self.biases = [bias, full.permute(0, 3, 1, 2).contiguous()]
        else:
            b, s = case.B, case.Sq
            self.ours = [rand(b, h, s, d) for _ in range(4)]
            self.math = self.ours
            self.biases = [rand(*case.bias)] * 2 if case.bias else [None, None]
        self.tangents = []
        for tensors, bias in ((self.ours, self.biases[0]), (self.math, self.biases[1])):
            given = [*tensors[:3], *(() if bias is None else (bias,))]
            self.tangents.append([torch.randn_like(x) for x in given])

    def attend(self, ours, q, k, v, bias):
        import flashsci

        torch = self.torch
        if ours and self.varlen:
            return flashsci.varlen_attention(
                q, k, v, self.cu, max_seqlen_q=self.longest, max_seqlen_k=self.longest, bias=bias, backend="triton"
            )  # fmt: skip
        if ours:
            return flashsci.attention(
                q, k, v, bias=bias, precision=self.precision, backend="triton"
            )
        if self.varlen:
            bias = bias + self.hidden
        if bias is not None:
            bias = bias.expand(*q.shape[:-1], k.shape[-2])
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def step(self, ours):
        torch = self.torch
        which = 0 if ours else 1
        q, k, v, dout = (x.detach().requires_grad_() for x in (self.ours, self.math)[which])
        bias = self.biases[which]
        bias = None if bias is None else bias.detach().requires_grad_()
        leaves = [q, k, v, *(() if bias is None else (bias,))]
        out = self.attend(ours, q, k, v, bias)
        first = torch.autograd.grad(out, leaves, dout, create_graph=True)
        return torch.autograd.grad(first, [*leaves, dout], self.tangents[which])

    def jvp(self, ours):
        torch = self.torch
        q, k, v = self.ours[:3]
        call = lambda q, k, v: self.attend(ours, q, k, v, None)  # noqa: E731
        with torch.no_grad():
            return torch.func.jvp(call, (q, k, v), tuple(self.tangents[0][:3]))

    def parts(self):
        """Forward alone, forward and backward: ours."""
        torch = self.torch
        q, k, v, dout = (x.detach().requires_grad_() for x in self.ours)
        bias = self.biases[0]
        bias = None if bias is None else bias.detach().requires_grad_()
        leaves = [q, k, v, *(() if bias is None else (bias,))]

        def both():
            return torch.autograd.grad(self.attend(True, q, k, v, bias), leaves, dout)

        def forward():
            with torch.no_grad():
                return self.attend(True, q, k, v, bias)

        return {"triton fwd": forward, "triton fwd+bwd": both}


TIMED = (
    "order2-bf16-s8192",
    "fp32-tf32x3",
    "fp32-tf32",
    "pet-train-d16",
    "crystals-mptrj",
    "order2-fp32-s128",
)


def warm_step(name):
    step = Step(name)
    step.step(True)
    if name == "order2-bf16-s8192":
        step.jvp(True)
    step.torch.cuda.synchronize()


def peak(torch, run):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def device_times(runs, seconds=0.8):
    """Median milliseconds on the device alone, by the benchmark's timer."""
    import torch

    from flashsci.bench.timer import interleave

    found = interleave(runs, torch.device(DEVICE), seconds, (5, 50))
    return {n: (t.median * 1e3, t.host_bound) for n, t in found.items()}


def graphed(run):
    """Replays of a CUDA graph of it."""
    import torch

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


def timings(names):
    for name in names:
        step = Step(name)
        ours, math = functools.partial(step.step, True), functools.partial(step.step, False)
        pairs = {"step": (ours, math)}
        if name == "order2-bf16-s8192":
            pairs["jvp"] = functools.partial(step.jvp, True), functools.partial(step.jvp, False)
        if name in ("pet-train-d16", "order2-fp32-s128"):
            pairs["step in a CUDA graph"] = graphed(ours), graphed(math)
        memory = [peak(step.torch, run) for run in (ours, math)]
        for what, (a, b) in pairs.items():
            device = device_times({"a": a, "b": b})
            host = interleaved({"a": a, "b": b}, rounds=30, budget=0.5)
            (x, bound), (y, _) = device["a"], device["b"]
            line = f"{name:18s} {what:20s} device {x:8.3f}{'*' if bound else ' '} math {y:8.3f} ms {y / x:6.2f}x"
            line += f" | with the host's time {host['a']:8.3f}, {host['b']:8.3f} ms {host['b'] / host['a']:6.2f}x"
            print(line)
        parts = {n: ms for n, (ms, _) in device_times(step.parts(), 0.3).items()}
        print(f"{'':18s} fwd {parts['triton fwd']:.3f}, fwd+bwd {parts['triton fwd+bwd']:.3f} ms; "
              f"peak {memory[0]:.0f} of {memory[1]:.0f} MiB = 1/{memory[1] / memory[0]:.0f}", flush=True)  # fmt: skip


def profiled(names):
    """Kernels and host functions of a step, from torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for name in names:
        step = Step(name)
        for ours in (True, False):
            for _ in range(5):
                step.step(ours)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
                for _ in range(10):
                    step.step(ours)
                torch.cuda.synchronize()
            rows = sorted(found.key_averages(), key=lambda r: -r.self_device_time_total)
            print(name, "ours" if ours else "math", "us a step on the device:")
            for row in rows[:8]:
                print(
                    f"  {row.self_device_time_total / 10:9.1f} {row.count // 10:3d}x {row.key[:90]}"
                )
            print("  us a step on the host (with the profiler's own):")
            for row in sorted(found.key_averages(), key=lambda r: -r.self_cpu_time_total)[:10]:
                print(f"  {row.self_cpu_time_total / 10:9.1f} {row.count // 10:3d}x {row.key[:90]}")
        sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--cached", action="store_true", help="all is compiled already")
    options = parser.parse_args()
    until = time.time() + options.seconds
    modes = []
    for mode in options.modes:
        mode, _, rest = mode.partition("=")
        everything = list(SWEEPS) if mode == "sweep" else TIMED
        modes.append((mode, rest if mode == "check" else rest.split(",") if rest else everything))
    with multiprocessing.get_context("spawn").Pool(WORKERS if not options.cached else 1) as pool:
        tasks = []
        for mode, names in modes:
            if mode != "check" and not options.cached:
                tasks += sweep_tasks(names) if mode == "sweep" else [(name,) for name in names]
        tasks.sort(key=len)
        for problem in pool.imap_unordered(warm, dict.fromkeys(tasks)):
            if problem:
                print("cannot run", problem)
        for mode, names in modes:
            if mode == "check":
                check(int(names or 200), options.part, pool, until)
            else:
                {"sweep": sweep, "profile": profiled, "time": timings}[mode](names)


if __name__ == "__main__":
    main()
