"""Workbench of the sm80 backward: generated cases and traps by fp64, and times beside SDPA and Triton. Needs a GPU.

nvcc -shared -Xcompiler -fPIC -std=c++17 -O3 -gencode arch=compute_80,code=sm_90 csrc/sm80/backward_*.cu -o bwd.so
python tools/gpu_backward.py check bwd.so --cases 400
python tools/gpu_backward.py time a=bwd.so b=other.so
python tools/gpu_backward.py bias bwd.so
"""

from __future__ import annotations

import argparse
import ctypes as c
import itertools
import math
import multiprocessing
import statistics
import time
import traceback
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashsci import check as checks
from flashsci import registry
from flashsci.backends import reference
from flashsci.ops import empty_like_layout
from flashsci.testing import TRAPS, Case, Skipped, evaluate, generate, make_inputs, variants
from flashsci.testing.cases import BULK_LENGTHS, LARGE_LENGTHS
from tools import launchers

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
NAME = "sm80"
SKIPPED = ("second_device", "second_order_takes_no_quadratic_memory")  # the forward here does


class Backend:
    """Forward by the reference in fp64, rounded; backward by the launchers under test."""

    FUSED = True

    def __init__(self, path: str, deterministic: bool = False):
        self.deterministic = deterministic
        found = c.CDLL(path if "/" in path else f"./{path}")
        self.units = {
            t: Unit(path, f"sm80_{n}", t, self)
            for t, n in DTYPES.items()
            if hasattr(found, f"flashsci_backward_sm80_{n}")
        }

    def unavailable(self) -> None:
        return None

    def rejects(self, problem: Any) -> str | None:
        if problem.dtype not in self.units:
            return f"no {problem.dtype}"
        return self.units[problem.dtype].rejects(problem)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        wide = None if bias is None else bias.double()
        cu_q, cu_k = rest[2:4]
        garbage = cu_q is not None and not (
            bool((cu_q.diff() >= 0).all() and (cu_k.diff() >= 0).all())
            and cu_q[0] == 0 == cu_k[0]
            and cu_q[-1] <= q.shape[-2]
            and cu_k[-1] <= k.shape[-2]
        )
        if garbage:
            out = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]))
            return out, torch.zeros(q.shape[:-1], device=q.device)
        with torch.no_grad():
            found, lse = reference.forward(q.double(), k.double(), v.double(), wide, *rest)
        out = empty_like_layout(q, found.shape)
        return out.copy_(found), lse.float().contiguous()

    def backward(self, dout: Any, dlse: Any, q: Tensor, *rest: Any) -> Any:
        return self.units[q.dtype].backward(dout, dlse, q, *rest)


class Unit(launchers.Launchers):
    def __init__(self, path: str, unit: str, dtype: torch.dtype, owner: Backend):
        self.owner, self.unit, self.dtype, self.limits = owner, unit, dtype, (256, 256)
        library = c.CDLL(path if "/" in path else f"./{path}")
        self.launch = getattr(library, f"flashsci_backward_{unit}")
        self.bytes = getattr(library, f"flashsci_backward_{unit}_workspace")
        self.bytes.restype = c.c_int64
        self.last: Any = None

    def workspace(self, p: Any) -> int:
        p._obj.deterministic |= int(self.owner.deterministic)
        return int(self.bytes(p))

    def launch_backward(self, p: Any, stream: Any) -> int:
        self.last = p
        return int(self.launch(p, stream))


class Installed(registry.Backend):
    def load(self) -> Any:
        return registry.LOADED[self.name]


def install(path: str) -> Backend:
    backend = Backend(path)
    registry.LOADED[NAME] = backend  # type: ignore[assignment]
    registry.BACKENDS[NAME] = Installed(NAME, "")
    return backend


def worker(path: str) -> None:
    torch.set_num_threads(1)
    install(path)


def plan(count: int, seed: int) -> list[Case]:
    """Cases of every feature these kernels have, one in eight with long sequences."""
    found = {
        replace(
            v,
            dropout=False,
            key_weight=None,
            key_weight_grad=False,
            **(dict(bias=None, bias_grad=False) if v.varlen else {}),
        )
        for v in variants(256, dtypes=tuple(f"{t}".removeprefix("torch.") for t in DTYPES))
    }
    pool = sorted(found, key=repr)
    short = generate(seed, count - count // 8, pool, lengths=BULK_LENGTHS)
    long = generate(seed + 1, count // 8, pool, lengths=LARGE_LENGTHS, score_limit=1 << 21)
    return [*short, *long]


def subsets(case: Case, backend: Backend) -> list[str]:
    """Every subset of gradients is that of all; deterministic results repeat bitwise."""
    inputs = make_inputs(case, "cuda")
    unit = backend.units[inputs.q.dtype]
    seen: list[Any] = []
    original = backend.backward
    backend.backward = lambda *a: (seen.append(a), original(*a))[1]  # type: ignore[method-assign]
    try:
        evaluate(inputs, NAME)
    finally:
        backend.backward = original  # type: ignore[method-assign]
    problems = []
    for arguments in seen:
        *rest, need = arguments
        full = unit.backward(*rest, need)
        for subset in range(1, 16):
            if subset & need != subset:
                continue
            for i, x in enumerate(unit.backward(*rest, subset)):
                if not subset >> i & 1:
                    continue
                exact = backend.deterministic and (i > 0 or subset & 6)
                same = (
                    torch.equal(x, full[i])
                    if exact
                    else torch.allclose(
                        x.float(),
                        full[i].float(),
                        rtol=0.05,
                        atol=0.02 * max(full[i].float().abs().max().item(), 1e-3)
                        if x.numel()
                        else 0,
                    )
                )
                if not same:
                    problems.append(f"need {subset}: gradient {i} differs from that of need {need}")
    return problems


def judge(task: tuple[Any, ...]) -> tuple[str, Any]:
    kind, what, deterministic = task
    backend: Any = registry.LOADED[NAME]
    backend.deterministic = deterministic
    if kind == "trap":
        try:
            TRAPS[what](NAME, torch.device("cuda"))
            return kind, (what, "passed")
        except (Skipped, registry.BackendError) as reason:
            return kind, (what, f"not run: {reason}"[:120])
        except Exception as error:
            return kind, (what, f"FAILED: {error!r} {traceback.format_exc()[-300:]}"[:1500])
    total = checks.Tally()
    for index, case in enumerate(what):
        try:
            for tally in checks.judge_case(case, [NAME], "cuda", 1).values():
                total.add(tally)
            if index % 4 == 0:
                for problem in subsets(case, backend):
                    total.fail(case, problem)
        except Exception as error:
            total.fail(case, repr(error)[:300] + traceback.format_exc()[-400:])
    return kind, total


def check(path: str, count: int, seed: int, workers: int, seconds: float, traps: bool) -> int:
    start = time.time()
    install(path)  # what cannot be loaded fails here, not in every process of the pool
    cases = plan(count, seed)
    tasks: list[Any] = [
        ("trap", t.name, mode)
        for t in TRAPS.values()
        for mode in (False, True)
        if traps and not t.gigabytes and t.name not in SKIPPED
    ]
    tasks += [("cases", cases[i::60], i % 2 == 1) for i in range(60) if cases[i::60]]
    total, outcomes = checks.Tally(), []
    with multiprocessing.get_context("spawn").Pool(workers, worker, (path,)) as pool:
        results = pool.imap_unordered(judge, tasks)
        for _ in tasks:
            left = seconds - (time.time() - start)
            try:
                kind, found = results.next(timeout=max(left, 0.1))
            except multiprocessing.TimeoutError:
                print("OUT OF TIME")
                break
            if kind == "trap":
                outcomes.append(found)
            else:
                total.add(found)
        pool.terminate()
    for name, outcome in outcomes:
        if outcome != "passed":
            print(f"trap {name}: {outcome}")
    print(sum(o == "passed" for _, o in outcomes), "traps passed")
    reasons: dict[str, list[Any]] = defaultdict(list)
    for failure in total.failures:
        reasons[failure["problem"].splitlines()[-1][:160]].append(failure["case"])
    for problem, which in list(reasons.items())[:20]:
        print(f"FAILED {problem}  ({len(which)} such)\n    {str(which[0])[:900]}")
    for tensor, ratios in total.worst.items():
        print(f"{tensor}: worst error, gain, spread over allowance", *(f"{r:.2f}" for r in ratios))
    print("refused", total.refused)
    print(f"{total.cases} cases, {len(total.failures)} failures, {time.time() - start:.0f} s")
    return len(total.failures)


def timed(runs: dict[str, Any], reps: int) -> dict[str, float]:
    """Median milliseconds, interleaved launch by launch."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for rep in range(reps + 2):
        for name, run in runs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)  # the host gets ahead: what is timed is the device
            start.record()
            run()
            stop.record()
            stop.synchronize()
            if rep >= 2:
                times[name].append(start.elapsed_time(stop))
    return {n: statistics.median(t) for n, t in times.items()}


def libraries(paths: list[str]) -> dict[str, Backend]:
    return {p.rpartition("=")[0] or NAME: Backend(p.rpartition("=")[2]) for p in paths}


def raw(backend: Backend, arguments: tuple[Any, ...], deterministic: bool = False) -> Any:
    """A closure that launches the prepared call, and its gradients."""
    unit = backend.units[arguments[2].dtype]
    backend.deterministic = deterministic
    kept, empty = [], torch.empty
    try:
        torch.empty = lambda *a, **k: (kept.append(empty(*a, **k)), kept[-1])[1]  # type: ignore[assignment]
        found = unit.backward(*arguments)
    finally:
        torch.empty = empty
    p, stream = unit.last, unit.stream()

    def run(keep: Any = (arguments, kept, found)) -> None:
        error = unit.launch(p, stream)
        assert error == 0, error

    return run, found


def scalars(d: int, right: int = -1) -> tuple[Any, ...]:
    return (-1, -1, d**-0.5, 0.0, -1, right, False, 0.0, "default", False)


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, *options: Any) -> Any:
    from flashsci.backends import triton

    return triton.forward(q, k, v, bias, None, mask, None, None, None, None, *options)


def worst(found: Any, expect: Any) -> float:
    return max(
        ((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-6)).item()
        for a, b in zip(found, expect, strict=True)
        if a.numel()
    )


def dense(paths: list[str], dims: list[int], seqs: list[int], reps: int, peers: list[str]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    libs = libraries(paths)
    geo: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for d, causal, s in itertools.product(dims, (False, True), seqs):
        b, h = 16384 // s, 2048 // d
        q, k, v, dout = (
            torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        for x in (q, k, v):
            x.requires_grad_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = sdpa(q, k, v, is_causal=causal)
        flash = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)  # noqa: E731
        expect = flash()
        options = scalars(d, 0 if causal else -1)
        with torch.no_grad():
            lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[1]
        arguments = (None,) * 7
        raws = {}
        for name, lib in libs.items():
            call = (
                dout,
                None,
                q.detach(),
                k.detach(),
                v.detach(),
                *arguments,
                out.detach(),
                lse.contiguous(),
                *options,
                7,
            )
            raws[name], found = raw(lib, call, deterministic=name.startswith("det"))
            if not worst(found[:3], expect) < 2e-2:
                print(
                    "MISMATCH",
                    name,
                    d,
                    causal,
                    s,
                    [f"{worst([f], [e]):.3g}" for f, e in zip(found, expect, strict=False)],
                )
        runs = {"flash": flash, **raws}
        if "triton" in peers:
            from flashsci.backends import triton

            call = (
                dout,
                None,
                q.detach(),
                k.detach(),
                v.detach(),
                *arguments,
                out.detach(),
                lse.contiguous(),
                *options,
                7,
            )
            runs["triton"] = lambda: triton.backward(*call)
        ms = timed(runs, reps)
        work = 10 * b * h * s * s * d * (0.5 if causal else 1)
        for n in runs:
            geo[n][d].append(ms["flash"] / ms[n])
        print(
            f"{d:4d} {'causal' if causal else 'full':>7} {s:6d}",
            *(f"{n} {work / t * 1e-9:6.1f}" for n, t in ms.items()),
            *(f"{ms['flash'] / ms[n]:.3f}" for n in list(runs)[1:]),
            flush=True,
        )
    for n, per in geo.items():
        g = {d: statistics.geometric_mean(r) for d, r in per.items()}
        print(
            f"{n:>10}: vs flash",
            *(f"d{d} {r:.3f}" for d, r in g.items()),
            f"all {statistics.geometric_mean(g.values()):.3f}",
        )


# id: [B, N, H, Sq, Sk, D], bias shape, bias dtype, mask shape
BIAS = {
    "triangle-s256": ((1, 256, 4, 256, 256, 32), (1, 1, 4, 256, 256), torch.float32, (1, 256, 1, 1, 256)),
    "triangle-s384": ((1, 384, 4, 384, 384, 32), (1, 1, 4, 384, 384), torch.float32, (1, 384, 1, 1, 384)),
    "triangle-s512": ((1, 512, 4, 512, 512, 32), (1, 1, 4, 512, 512), torch.float32, (1, 512, 1, 1, 512)),
    "triangle-s768": ((1, 768, 4, 768, 768, 32), (1, 1, 4, 768, 768), torch.float32, (1, 768, 1, 1, 768)),
    "af3-pair": ((1, 4, 16, 768, 768, 64), (1, 4, 16, 768, 768), torch.bfloat16, None),
    "af3-pairformer-s768": ((1, 1, 16, 768, 768, 24), (1, 1, 16, 768, 768), torch.float32, None),
    "af3-diffusion": ((1, 48, 16, 384, 384, 48), (1, 1, 16, 384, 384), torch.float32, None),
    "msa-row": ((1, 512, 8, 384, 384, 32), (1, 1, 8, 384, 384), torch.bfloat16, (1, 512, 1, 1, 384)),
    "graphormer-bf16": ((1, 64, 32, 129, 129, 24), (1, 64, 32, 129, 129), torch.bfloat16, None),
    "unimol-bf16": ((1, 32, 64, 256, 256, 8), (1, 32, 64, 256, 256), torch.bfloat16, None),
    "pangu-window": ((30, 124, 6, 144, 144, 32), (1, 124, 6, 144, 144), torch.bfloat16, None),
    "atom-window": ((32, 144, 4, 32, 128, 32), (1, 144, 4, 32, 128), torch.bfloat16, None),
    "long-bias": ((1, 1, 16, 4096, 4096, 64), (1, 1, 16, 4096, 4096), torch.bfloat16, None),
}  # fmt: skip


def biases(paths: list[str], names: list[str], reps: int, peers: list[str]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    libs = libraries(paths)
    geo: dict[str, list[float]] = defaultdict(list)
    for name in names or BIAS:
        (b, n, h, sq, sk, d), bias_shape, bias_dtype, mask_shape = BIAS[name]
        g = torch.Generator("cuda").manual_seed(0)
        rand = lambda *s: torch.randn(*s, device="cuda", generator=g)  # noqa: E731
        q, dout = (rand(b, n, h, sq, d).bfloat16() for _ in range(2))
        k, v = (rand(b, n, h, sk, d).bfloat16() for _ in range(2))
        bias = rand(*bias_shape).to(bias_dtype)
        mask = None if mask_shape is None else rand(*mask_shape) > -1.5
        options = scalars(d)
        out, lse = forward(q, k, v, bias, mask, *options)
        call = (dout, None, q, k, v, bias, None, mask, *(None,) * 4, out, lse, *options, 15)
        runs: dict[str, Any] = {}
        for label, lib in libs.items():
            runs[label], found = raw(lib, call, deterministic=label.startswith("det"))
            from flashsci.backends import triton

            expect = triton.backward(*call)[:4]
            errors = [worst([f], [e]) for f, e in zip(found[:4], expect, strict=True)]
            if not max(errors) < 3e-2:
                print("MISMATCH", label, name, [f"{e:.3g}" for e in errors])
            partial = (*call[:-1], 7)
            runs[label + "-nobias"], _ = raw(lib, partial, deterministic=label.startswith("det"))
        if "triton" in peers:
            runs["triton"] = lambda: triton.backward(*call)
        if "efficient" in peers:
            flat = lambda x: x.reshape(b * n, *x.shape[2:])  # noqa: E731
            leaves = [flat(x).detach().requires_grad_() for x in (q, k, v)]
            leaf = bias.bfloat16().detach().requires_grad_()
            full = leaf if mask is None else leaf.masked_fill(~mask, -math.inf)
            full = full.expand(b, n, h, sq, sk).reshape(b * n, h, sq, sk)
            pad = -sk % 8
            if pad:
                full = torch.nn.functional.pad(full, (0, pad))[..., :sk]
            try:
                with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                    y = sdpa(*leaves, attn_mask=full)
                runs["efficient"] = lambda: torch.autograd.grad(
                    y, [*leaves, leaf], flat(dout), retain_graph=True
                )
                runs["efficient"]()
            except RuntimeError as error:
                runs.pop("efficient", None)
                print("efficient", str(error)[:100])
        ms = timed(runs, reps)
        work = 10 * b * n * h * sq * sk * d
        first = next(iter(libs))
        for other in ms:
            geo[other].append(ms[other] / ms[first])
        print(
            f"{name:>20}",
            *(f"{x} {t * 1e3:7.1f}us" for x, t in ms.items()),
            f" {work / ms[first] * 1e-9:.0f} TF",
            flush=True,
        )
    print(
        "over", next(iter(libs)), {x: f"{statistics.geometric_mean(r):.2f}" for x, r in geo.items()}
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("check", "time", "bias"))
    parser.add_argument("libs", nargs="+")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--no-traps", action="store_true")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--seqs", default="1024,4096,16384")
    parser.add_argument("--names", default="")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--peers", default="triton,efficient")
    a = parser.parse_args()
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    if a.mode == "check":
        raise SystemExit(
            check(a.libs[0], a.cases, a.seed, a.workers, a.seconds, not a.no_traps) != 0
        )
    elif a.mode == "time":
        dense(a.libs, numbers(a.dims), numbers(a.seqs), a.reps, a.peers.split(","))
    else:
        biases(a.libs, [x for x in a.names.split(",") if x], a.reps, a.peers.split(","))
