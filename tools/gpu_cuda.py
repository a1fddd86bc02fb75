"""Kernel workbench: loads one or more builds of the torch-free launchers with ctypes, checks them against
fp64 and times them launch by launch beside SDPA's flash kernel. Needs a GPU.

    python tools/gpu_cuda.py check base=.scratch/variants/base.so
    python tools/gpu_cuda.py time base=.scratch/variants/base.so two=.scratch/variants/two.so --dims 64,128
"""

from __future__ import annotations

import argparse
import ctypes as c
import itertools
import math
import statistics
import sys

import torch


class Strides(c.Structure):
    _fields_ = [(n, c.c_int64) for n in ("batch0", "batch1", "head", "row")]


class Params(c.Structure):
    _fields_ = [
        *[(n, c.c_void_p) for n in ("q", "k", "v", "out", "lse", "cu_q", "cu_k")],
        *[(n, Strides) for n in ("q_strides", "k_strides", "v_strides", "out_strides")],
        ("batch0", c.c_int64),
        ("batch1", c.c_int64),
        *[
            (n, c.c_int32)
            for n in ("heads_q", "heads_k", "seq_q", "seq_k", "num_seqs", "max_seqlen_q")
        ],
        *[(n, c.c_int32) for n in ("head_dim", "head_dim_v")],
        ("scale", c.c_float),
        ("softcap", c.c_float),
        *[
            (n, c.c_int32)
            for n in (
                "window_left",
                "window_right",
                "lower_right",
                "copy_bytes",
                "device",
                "shared_per_sm",
            )
        ],
    ]


def strides(t):
    s = t.stride()
    return Strides(s[0] if t.dim() == 4 else 0, 0, s[-3], s[-2])


def copy_bytes(*tensors):
    bits = 16
    for t in tensors:
        bits = math.gcd(bits, t.data_ptr())
        for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=False):
            if size > 1:
                bits = math.gcd(bits, stride * 2)
    return bits


class Library:
    def __init__(self, name, path):
        self.name = name
        self.lib = c.CDLL(path)
        names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        self.fn = {
            t: getattr(self.lib, f"flashsci_forward_sm80_{n}", None) for t, n in names.items()
        }

    def prepare(
        self, q, k, v, scale=None, softcap=0.0, window=(-1, -1), lower_right=False, cu=None
    ):
        """Rank 4 [B, H, S, D], or rank 3 [H, T, D] with cu = (cu_q, cu_k). Returns (launch, out, lse)."""
        dense = cu is None
        shape = (*q.shape[:-1], v.shape[-1])
        out = torch.full(shape, float("nan"), dtype=q.dtype, device=q.device)
        lse = torch.full(shape[:-1], float("nan"), device=q.device)
        p = Params(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(),
            None if dense else cu[0].data_ptr(), None if dense else cu[1].data_ptr(),
            strides(q), strides(k), strides(v), strides(out),
            q.shape[0] if dense else 1, 1, q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2],
            0 if dense else cu[0].numel() - 1, -1, q.shape[-1], v.shape[-1],
            q.shape[-1] ** -0.5 if scale is None else scale, softcap, window[0], window[1],
            int(lower_right), copy_bytes(q, k, v), 0,
            torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor,
        )  # fmt: skip
        fn, stream = self.fn[q.dtype], c.c_void_p(torch.cuda.current_stream().cuda_stream)

        def launch(keep=(q, k, v, cu)):
            error = fn(c.byref(p), stream)
            assert error == 0, f"{self.name}: cudaError {error}"

        return launch, out, lse


def reference(q, k, v, scale, softcap, window, lower_right, dtype):
    q, k, v = (t.to(dtype) for t in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = (t.repeat_interleave(group, -3) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    sq, sk = s.shape[-2:]
    i = torch.arange(sq, device=q.device)[:, None] + (sk - sq if lower_right else 0)
    j = torch.arange(sk, device=q.device)[None]
    ok = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if window[0] >= 0:
        ok &= j - i >= -window[0]
    if window[1] >= 0:
        ok &= j - i <= window[1]
    s = s.masked_fill(~ok, float("-inf"))
    lse = torch.logsumexp(s, -1) if sk else torch.full(s.shape[:-1], float("-inf"), device=q.device)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return p @ v, lse


def verify(label, got, lse, q, k, v, **kw):
    args = (
        kw.get("scale"),
        kw.get("softcap", 0.0),
        kw.get("window", (-1, -1)),
        kw.get("lower_right", False),
    )
    true, true_lse = reference(q, k, v, *args, torch.float64)
    base, _ = reference(q, k, v, *args, q.dtype)
    magnitude, _ = reference(q, k, v.abs(), *args, torch.float64)
    if got.numel() == 0:
        return 0.0
    eps = torch.finfo(q.dtype).eps
    error = (got.double() - true).abs().max().item()
    bound = (
        2 * (base.double() - true).abs().nan_to_num(0).max().item()
        + 8 * eps * magnitude.max().item()
    )
    finite = torch.isfinite(true_lse)
    lse_ok = torch.equal(torch.isfinite(lse), finite) and (
        not finite.any()
        or (lse[finite].double() - true_lse[finite]).abs().max().item()
        < 2e-4 * max(1, true_lse[finite].abs().max().item())
    )
    ok = error <= bound and lse_ok
    if not ok:
        print(f"FAIL {label}: error {error:.3g} bound {bound:.3g} lse_ok {lse_ok}")
    return error / bound if ok and bound else (0.0 if ok else float("inf"))


def check(libs):
    torch.manual_seed(0)
    dev, worst, count, failures = "cuda", 0.0, 0, 0
    for lib in libs:
        cases = []
        for dtype, (d, dv) in itertools.product(
            (torch.bfloat16, torch.float16),
            (
                (64, 64),
                (128, 128),
                (256, 256),
                (32, 32),
                (96, 96),
                (192, 192),
                (7, 7),
                (37, 53),
                (8, 24),
                (192, 128),
                (20, 20),
                (50, 50),
                (1, 1),
                (129, 40),
                (255, 256),
            ),
        ):
            for sq, sk in ((128, 128), (200, 333), (1, 77), (333, 65), (64, 0), (17, 1)):
                cases.append((dtype, d, dv, sq, sk, (-1, -1), False, 0.0, None))
            cases.append((dtype, d, dv, 257, 300, (-1, 0), True, 0.0, None))
            cases.append((dtype, d, dv, 300, 257, (-1, 0), True, 0.0, None))
            cases.append((dtype, d, dv, 300, 257, (-1, 0), False, 0.0, None))
            cases.append((dtype, d, dv, 400, 500, (37, 11), False, 0.0, None))
            cases.append((dtype, d, dv, 400, 300, (100, 0), True, 20.0, None))
            cases.append((dtype, d, dv, 150, 150, (5, -1), False, 0.0, -0.3))
            cases.append((dtype, d, dv, 150, 150, (0, 0), False, 3.0, 1.0))
            cases.append((dtype, d, dv, 150, 150, (-1, -1), False, 0.0, 0.0))
        for dtype, d, dv, sq, sk, window, lr, softcap, scale in cases:
            b, hk, g = 2, 2, 3

            # NaN all around: rows are cut out of larger NaN-filled buffers.
            def cut(h, s, dim):
                pad = torch.full(
                    (b, s + 3, h + 1, dim + (8 if dim % 8 == 0 else 3)),
                    float("nan"),
                    dtype=dtype,
                    device=dev,
                )
                view = pad[:, 1 : s + 1, :h, :dim].transpose(1, 2)
                view.copy_(torch.randn(view.shape, device=dev))
                return view

            q, k, v = cut(hk * g, sq, d), cut(hk, sk, d), cut(hk, sk, dv)
            launch, out, lse = lib.prepare(q, k, v, scale, softcap, window, lr)
            launch()
            ratio = verify(
                f"{lib.name} {dtype} {d},{dv} {sq}x{sk} {window} lr={lr} cap={softcap} scale={scale}",
                out,
                lse,
                q,
                k,
                v,
                scale=scale,
                softcap=softcap,
                window=window,
                lower_right=lr,
            )
            count += 1
            failures += ratio == float("inf")
            worst = max(worst, ratio if ratio != float("inf") else 0)
        # packed
        for dtype, d, window, lr, head, tail in itertools.product(
            (torch.bfloat16, torch.float16),
            (64, 128, 40, 33),
            ((-1, -1), (-1, 0), (9, 3)),
            (False, True),
            (0, 5),
            (0, 150),
        ):
            g = torch.Generator().manual_seed(d)
            lens_q = [int(x) for x in torch.randint(0, 300, (40,), generator=g)] + [0, 1, 128, 129]
            lens_k = [int(x) for x in torch.randint(0, 300, (40,), generator=g)] + [7, 0, 128, 1]
            cq = [head] + [head + sum(lens_q[: i + 1]) for i in range(len(lens_q))]
            ck = [0] + [sum(lens_k[: i + 1]) for i in range(len(lens_k))]
            q = torch.randn(cq[-1] + tail, 4, d, device=dev).to(dtype).transpose(0, 1)
            k, v = (
                torch.randn(ck[-1], 2, d, device=dev).to(dtype).transpose(0, 1) for _ in range(2)
            )
            bad = 11  # NaN in one sequence must not reach another
            k[:, ck[bad] : ck[bad + 1]] = float("nan")
            v[:, ck[bad] : ck[bad + 1]] = float("nan")
            cu = tuple(torch.tensor(x, dtype=torch.int32, device=dev) for x in (cq, ck))
            launch, out, lse = lib.prepare(q, k, v, window=window, lower_right=lr, cu=cu)
            launch()
            ok = True
            for n in range(len(lens_q)):
                if n == bad:
                    continue
                a, e, s, t = cq[n], cq[n + 1], ck[n], ck[n + 1]
                ratio = verify(
                    f"{lib.name} varlen {dtype} d{d} {window} lr={lr} seq {n} {e - a}x{t - s}",
                    out[:, a:e],
                    lse[:, a:e],
                    q[:, a:e],
                    k[:, s:t],
                    v[:, s:t],
                    window=window,
                    lower_right=lr,
                )
                ok &= ratio != float("inf")
                worst = max(worst, ratio if ratio != float("inf") else 0)
            for part, value in (
                (out[:, :head], 0),
                (out[:, cq[-1] :], 0),
                (lse[:, :head], -math.inf),
                (lse[:, cq[-1] :], -math.inf),
            ):
                ok &= bool((part == value).all())
            failures += not ok
            count += 1
        # garbage offsets: any result, no crash, nothing outside (memcheck sees the rest)
        for _ in range(20):
            cu = tuple(
                torch.randint(-(2**31), 2**31 - 1, (50,), dtype=torch.int32, device=dev)
                for _ in range(2)
            )
            lib.prepare(q, k, v, cu=cu)[0]()
        torch.cuda.synchronize()
        # B * H = 70,000
        q, k, v = (torch.randn(70000, 1, 9, 16, device=dev, dtype=torch.bfloat16) for _ in range(3))
        launch, out, lse = lib.prepare(q, k, v)
        launch()
        failures += verify(f"{lib.name} 70000", out, lse, q, k, v) == float("inf")
        count += 1
    torch.cuda.synchronize()
    print(f"check: {count} cases, {failures} failures, worst error/bound {worst:.3f}")
    return failures


def flops(b, h, s, d, causal):
    return 4 * b * h * s * s * d * (0.5 if causal else 1)


def timing(libs, dims, seqs, reps):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    names = ["sdpa"] + [lib.name for lib in libs]
    print(
        "d".rjust(4), "mask".rjust(7), "s".rjust(6), *(n.rjust(9) for n in names), " ratio of best"
    )
    geo = {n: {} for n in names}
    for d, causal, s in itertools.product(dims, (False, True), seqs):
        b, h = 16384 // s, 2048 // d
        q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        runs = {}
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            runs["sdpa"] = lambda: sdpa(q, k, v, is_causal=causal)
            expect = runs["sdpa"]().float()
            for lib in libs:
                launch, out, _ = lib.prepare(q, k, v, window=(-1, 0 if causal else -1))
                launch()
                if not (out.float() - expect).abs().max() < 2e-2:
                    print(
                        "MISMATCH",
                        lib.name,
                        d,
                        causal,
                        s,
                        (out.float() - expect).abs().max().item(),
                    )
                runs[lib.name] = launch
            times = {n: [] for n in names}
            for n in names:
                for _ in range(3):
                    runs[n]()
            for _ in range(reps):
                for n in names:
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    runs[n]()
                    stop.record()
                    times[n].append((start, stop))
            torch.cuda.synchronize()
        work = flops(b, h, s, d, causal)
        tf = {
            n: work / statistics.median(a.elapsed_time(z) for a, z in t) * 1e-9
            for n, t in times.items()
        }
        for n in names:
            geo[n].setdefault(d, []).append(tf[n] / tf["sdpa"])
        best = max(names[1:], key=tf.get)
        print(
            f"{d:4d} {'causal' if causal else 'full':>7} {s:6d}",
            *(f"{tf[n]:9.1f}" for n in names),
            f" {tf[best] / tf['sdpa']:.3f} {best}",
        )
    for n in names[1:]:
        per = {d: statistics.geometric_mean(r) for d, r in geo[n].items()}
        print(
            f"{n:>10}: vs sdpa",
            *(f"d{d} {r:.3f}" for d, r in per.items()),
            f"all {statistics.geometric_mean(per.values()):.3f}",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("check", "time"))
    parser.add_argument("libs", nargs="+")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--seqs", default="1024,2048,4096,8192,16384")
    parser.add_argument("--reps", type=int, default=12)
    a = parser.parse_args()
    libraries = [Library(*x.split("=")) for x in a.libs]
    if a.mode == "check":
        sys.exit(check(libraries) != 0)
    timing(
        libraries, [int(x) for x in a.dims.split(",")], [int(x) for x in a.seqs.split(",")], a.reps
    )
