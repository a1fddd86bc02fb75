"""Workbench of the sm90 forward: loads builds of its launcher with ctypes, checks them against fp64 and times
them launch by launch beside SDPA. Needs a Hopper GPU.

    python tools/gpu_sm90.py check base=base.so
    python tools/gpu_sm90.py time base=base.so two=two.so --dims 64,128 --seqs 512,16384 --peers cudnn,flash
"""

from __future__ import annotations

import argparse
import ctypes as c
import itertools
import statistics
import sys
import time as clock

import torch

START = clock.time()
SEED = [0]  # one more for every tensor
ARENA = 0  # elements of NaN around every tensor
PAIRS = [0]  # cases with bias or mask
WORST = [0.0]  # the largest error as a part of its bound


class Strides(c.Structure):
    _fields_ = [(n, c.c_int64) for n in ("batch0", "batch1", "head", "row")]


class PairStrides(c.Structure):
    _fields_ = [(n, c.c_int64) for n in ("batch0", "batch1", "head", "row", "column")]


class Pairs(c.Structure):
    _fields_ = [
        ("bias", c.c_void_p),
        ("mask", c.c_void_p),
        ("bias_strides", PairStrides),
        ("mask_strides", PairStrides),
        ("bias_is_fp32", c.c_int32),
    ]


class Params(c.Structure):
    _fields_ = [
        *[(n, c.c_void_p) for n in ("q", "k", "v", "out", "lse", "cu_q", "cu_k")],
        *[(n, Strides) for n in ("q_strides", "k_strides", "v_strides", "out_strides")],
        ("pairs", Pairs),
        ("batch0", c.c_int64),
        ("batch1", c.c_int64),
        *[(n, c.c_int32) for n in ("heads_q", "heads_k", "seq_q", "seq_k", "num_seqs", "max_seqlen_q")],
        *[(n, c.c_int32) for n in ("head_dim", "head_dim_v")],
        ("scale", c.c_float),
        ("softcap", c.c_float),
        *[(n, c.c_int32) for n in ("window_left", "window_right", "lower_right", "precision", "copy_bytes")],
        *[(n, c.c_int32) for n in ("device", "shared_per_sm")],
        ("workspace", c.c_void_p),
    ]  # fmt: skip


def strides(t):
    s = (0,) * (5 - t.dim()) + tuple(t.stride())
    return Strides(*s[:4])


def pair_strides(t, shape):
    """Strides of a broadcastable tensor over [B0, B1, Hq, Sq, Sk]; 0 where it has one element."""
    if t is None:
        return PairStrides()
    t = t.reshape((1,) * (5 - t.dim()) + tuple(t.shape)) if t.dim() < 5 else t
    return PairStrides(*[0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


class Library:
    def __init__(self, name, path):
        path, _, flags = path.partition(":")  # name=path:static: without workspace
        path, _, dims = path.partition("@")  # name=path@64,128: only those head dimensions
        self.name, self.dims = name, [int(x) for x in dims.split("+") if x]
        lib = c.CDLL(path)
        self.fn, self.workspace = {}, {}
        for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            fn = getattr(lib, f"flashsci_forward_sm90_{suffix}", None)
            if fn is not None:
                self.fn[dtype] = fn
            size = getattr(lib, f"flashsci_forward_sm90_{suffix}_workspace", None)
            if size is not None and flags != "static":
                size.restype = c.c_int64
                self.workspace[dtype] = size

    def prepare(
        self,
        q,
        k,
        v,
        scale=None,
        softcap=0.0,
        window=(-1, -1),
        lower_right=False,
        out=None,
        cu=None,
        bias=None,
        mask=None,
    ):
        """Rank 4 or 5 [B.., H, S, D], or rank 3 [H, T, D] with cu = (cu_q, cu_k). Returns (launch, out, lse)."""
        shape = (*q.shape[:-1], v.shape[-1])
        if out is None:
            out = torch.full(shape, float("nan"), dtype=q.dtype, device=q.device)
        lse = torch.full(shape[:-1], float("nan"), device=q.device)
        lead = (1,) * (5 - q.dim()) + tuple(q.shape[:-1])
        shape5 = (*lead, k.shape[-2])
        pairs = Pairs(
            bias.data_ptr() if bias is not None else None,
            mask.data_ptr() if mask is not None else None,
            pair_strides(bias, shape5),
            pair_strides(mask, shape5),
            int(bias is not None and bias.dtype == torch.float32),
        )
        p = Params(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(),
            cu[0].data_ptr() if cu else None, cu[1].data_ptr() if cu else None,
            strides(q), strides(k), strides(v), strides(out), pairs,
            lead[0], lead[1], q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], cu[0].numel() - 1 if cu else 0, -1,
            q.shape[-1], v.shape[-1], q.shape[-1] ** -0.5 if scale is None else scale, softcap,
            window[0], window[1], int(lower_right), 0, 16, 0, 0,
        )  # fmt: skip
        size = self.workspace[q.dtype](c.byref(p)) if q.dtype in self.workspace else 0
        space = torch.full((size,), 0x7F, dtype=torch.uint8, device=q.device)
        p.workspace = space.data_ptr() if size else None
        fn, stream = self.fn[q.dtype], c.c_void_p(torch.cuda.current_stream().cuda_stream)

        def launch(keep=(q, k, v, cu, out, lse, space, bias, mask)):
            error = fn(c.byref(p), stream)
            if error:
                raise RuntimeError(f"launch error {error}")

        return launch, out, lse


def reference(
    q, k, v, scale, softcap, window, lower_right, bias=None, mask=None, dtype=torch.float64
):
    group = q.shape[-3] // k.shape[-3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    s = q @ k.transpose(-1, -2) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    i = torch.arange(s.shape[-2], device=s.device)[:, None]
    j = torch.arange(s.shape[-1], device=s.device)[None, :]
    rel = j - i - (s.shape[-1] - s.shape[-2] if lower_right else 0)
    seen = torch.ones_like(rel, dtype=torch.bool)
    if window[0] >= 0:
        seen &= rel >= -window[0]
    if window[1] >= 0:
        seen &= rel <= window[1]
    s = s.masked_fill(~seen, float("-inf"))
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return p.to(dtype) @ v, torch.logsumexp(s, -1)


def compare(name, got, q, k, v, options, failures, show=False):
    out, lse = got
    want, want_lse = reference(q, k, v, *options)
    base, _ = reference(q, k, v, *options, dtype=q.dtype)
    eps = torch.finfo(q.dtype).eps
    error = (out.double() - want).abs().max().item()
    bound = (
        2 * (base.double() - want).abs().nan_to_num(0).max().item()
        + 8 * eps * want.abs().max().item()
    )
    finite = torch.isfinite(want_lse)
    lse_ok = bool((torch.isfinite(lse) == finite).all()) and not torch.isnan(lse).any()
    lse_error = (lse.double() - want_lse)[finite].abs().max().item() if finite.any() else 0.0
    WORST[0] = max(WORST[0], error / bound if error else 0.0)
    ok = error <= bound and lse_ok and lse_error < 1e-3
    if not ok:
        failures.append(name)
    if not ok or show:
        print(
            f"{'ok  ' if ok else 'FAIL'} {name}: error {error:.2e} bound {bound:.2e} lse {lse_error:.1e} {lse_ok}",
            flush=True,
        )


def make(shape, dtype, layout="bhsd", seed=SEED):
    seed[0] += 1
    if ARENA:  # in the middle of mapped memory
        inner = make_plain(shape, dtype, layout, seed)
        arena = torch.full((inner.numel() + 2 * ARENA,), float("nan"), dtype=dtype, device="cuda")
        flat = arena[ARENA : ARENA + inner.numel()]
        if layout == "bshd":
            b, h, s, d = shape
            out = flat.view(b, s, h, d).transpose(1, 2)
        else:
            out = flat.view(shape)
        out.copy_(inner)
        return out
    return make_plain(shape, dtype, layout, seed)


def make_plain(shape, dtype, layout, seed):
    g = torch.Generator("cuda").manual_seed(seed[0])
    if layout == "bshd":
        b, h, s, d = shape
        return (
            torch.randn((b, s, h, d), device="cuda", dtype=torch.float32, generator=g)
            .to(dtype)
            .transpose(1, 2)
        )
    return torch.randn(shape, device="cuda", dtype=torch.float32, generator=g).to(dtype)


def check(libraries, dims, options):
    failures, count = [], 0
    for lib in libraries:
        for dtype in lib.fn:
            for d in dims:
                if options.only in ("", "decode"):
                    check_decode(lib, dtype, d, failures)
                if options.only == "decode":
                    continue
                cases = []
                for b, h, hk, sq, sk in [
                    (2, 4, 4, 512, 512),
                    (1, 2, 1, 200, 333),
                    (2, 3, 3, 1, 77),
                    (1, 4, 2, 777, 129),
                    (1, 1, 1, 64, 1),
                    (3, 6, 2, 300, 1000),
                    (40, 8, 4, 321, 321),
                    (1, 2, 2, 2500, 2411),
                ]:
                    for win, lr in [
                        ((-1, -1), False),
                        ((-1, 0), False),
                        ((-1, 0), True),
                        ((100, 0), False),
                        ((37, 50), True),
                        ((-1, 300), False),
                        ((64, -1), False),
                    ]:
                        cases.append((b, h, hk, sq, sk, d, d, win, lr, 0.0, None, "bshd"))
                lo = {64: 8, 128: 72, 256: 136}[d]
                for dq, dv in [(lo, lo), (d - 8, d), (d, lo), (d - 16, d - 16), (8, d)]:
                    cases.append((2, 4, 2, 333, 444, dq, dv, (-1, 0), True, 0.0, None, "bhsd"))
                    cases.append((2, 4, 2, 333, 444, dq, dv, (-1, -1), False, 0.0, None, "bhsd"))
                cases += [
                    (2, 4, 2, 333, 444, d, d, (-1, 0), False, 3.0, None, "bhsd"),
                    (2, 4, 2, 333, 444, d, d, (-1, -1), False, 0.0, -0.3, "bhsd"),
                    (2, 4, 2, 333, 444, d, d, (-1, -1), False, 0.0, 0.0, "bhsd"),
                    (1, 2, 2, 1000, 1000, d, d, (-1, 0), False, 0.0, 3.0, "bshd"),
                ]
                for case in cases if options.only != "packed" else ():
                    b, h, hk, sq, sk, dq, dv, win, lr, cap, scale, layout = case
                    q, k, v = (
                        make((b, h, sq, dq), dtype, layout),
                        make((b, hk, sk, dq), dtype, layout),
                        make((b, hk, sk, dv), dtype, layout),
                    )
                    launch, out, lse = lib.prepare(q, k, v, scale, cap, win, lr)
                    try:
                        launch()
                    except RuntimeError as e:
                        failures.append(case)
                        print("FAIL", case, e, flush=True)
                        continue
                    torch.cuda.synchronize()
                    count += 1
                    compare(
                        f"{lib.name} {dtype} {case}",
                        (out, lse),
                        q,
                        k,
                        v,
                        (scale, cap, win, lr),
                        failures,
                    )
                check_pairs(lib, dtype, d, failures)
                # scores that grow from block to block (right to left), up to overflow of exp
                for factor, (win, lr) in itertools.product(
                    (3.0, 12.0, 60.0), [((-1, -1), False), ((-1, 0), True), ((400, 100), False)]
                ):
                    for what in ("ramp", "sink"):
                        b, h, hk, sq, sk = 1, 4, 2, 700, 1111
                        q = make((b, h, sq, d), dtype, "bshd")
                        k, v = (make((b, hk, sk, d), dtype, "bshd") for _ in range(2))
                        if what == "ramp":
                            k *= torch.linspace(factor, 0.1, sk, device="cuda").to(dtype)[:, None]
                        else:
                            k[..., :3, :] = q[:, ::2, 5:8] * (factor / 3)
                        for cap in (0.0, 30.0):
                            launch, out, lse = lib.prepare(q, k, v, None, cap, win, lr)
                            launch()
                            torch.cuda.synchronize()
                            count += 1
                            compare(
                                f"{lib.name} {dtype} d{d} {what} {factor} {win} {cap}",
                                (out, lse),
                                q,
                                k,
                                v,
                                (None, cap, win, lr),
                                failures,
                            )
                # strided, two batch dims, broadcast K/V, guarded memory around the tensors
                big = make((2, 3, 260, 4, d + 64), dtype)
                q = big[..., :d].permute(0, 1, 3, 2, 4)
                k = make((1, 3, 2, 290, d), dtype).expand(2, 3, 2, 290, d)
                poisoned = torch.full((3, 2, 400, d), float("nan"), dtype=dtype, device="cuda")
                poisoned[:, :, 50:340] = make((3, 2, 290, d), dtype)
                v = poisoned[:, :, 50:340].unsqueeze(0).expand(2, 3, 2, 290, d)
                launch, out, lse = lib.prepare(q, k, v, None, 0.0, (-1, 0), True)
                launch()
                torch.cuda.synchronize()
                count += 1
                compare(
                    f"{lib.name} {dtype} strided d{d}",
                    (out, lse),
                    q,
                    k,
                    v,
                    (None, 0.0, (-1, 0), True),
                    failures,
                    True,
                )
                # packed: NaN neighbours in sequences of their own, empty and one-row sequences, rows of nobody
                for win, lr in [((-1, -1), False), ((-1, 0), True), ((40, 20), False)]:
                    lens_q = [0, 1, 130, 63, 64, 0, 400, 193, 7, 128]
                    lens_k = [5, 1, 77, 64, 200, 9, 300, 0, 129, 128]
                    cu = [
                        torch.tensor([3, *lens], device="cuda").cumsum(0).int()
                        for lens in (lens_q, lens_k)
                    ]
                    total_q, total_k = sum(lens_q) + 8, sum(lens_k) + 9
                    q = make((1, 6, total_q, d), dtype, "bshd")[0]
                    k, v = (make((1, 2, total_k, d), dtype, "bshd")[0] for _ in range(2))
                    for t in (k, v):  # sequence 4 is poison, as is what belongs to nobody
                        t[:, cu[1][4] : cu[1][5]] = float("nan")
                        t[:, :3] = float("nan")
                        t[:, cu[1][-1] :] = float("nan")
                    launch, out, lse = lib.prepare(q, k, v, None, 0.0, win, lr, cu=cu)
                    launch()
                    torch.cuda.synchronize()
                    count += 1
                    bounds = [c_.tolist() for c_ in cu]
                    for n in range(len(lens_q)):
                        if n == 4 or lens_q[n] == 0:
                            continue
                        rows, keys = slice(*bounds[0][n : n + 2]), slice(*bounds[1][n : n + 2])
                        if lens_k[n] == 0:
                            good = bool((out[:, rows] == 0).all()) and bool(
                                (lse[:, rows] == float("-inf")).all()
                            )
                            if not good:
                                failures.append(("packed empty", d))
                                print("FAIL packed empty", d)
                            continue
                        name = f"{lib.name} {dtype} packed d{d} {win} {lr} sequence {n}"
                        compare(
                            name,
                            (out[:, rows], lse[:, rows]),
                            q[:, rows],
                            k[:, keys],
                            v[:, keys],
                            (None, 0.0, win, lr),
                            failures,
                        )
                    for rows in (slice(0, 3), slice(bounds[0][-1], total_q)):
                        if not (
                            bool((out[:, rows] == 0).all())
                            and bool((lse[:, rows] == float("-inf")).all())
                        ):
                            failures.append(("packed nobody", d))
                            print("FAIL packed rows of nobody", d)
                # bitwise repeats
                q, k, v = (make((4, 8, 1111, d), dtype, "bshd") for _ in range(3))
                for win in ((-1, -1), (-1, 0)):
                    launch, out, lse = lib.prepare(q, k, v, window=win)
                    launch()
                    first = out.clone(), lse.clone()
                    same = True
                    for _ in range(options.repeats):
                        out.fill_(float("nan"))
                        launch()
                        same &= bool(torch.equal(out, first[0])) and bool(
                            torch.equal(lse, first[1])
                        )
                    count += 1
                    if not same:
                        failures.append(("repeat", d, win))
                        print("FAIL repeat", d, win, flush=True)
    print(
        f"check: {count} + {PAIRS[0]} cases, {len(failures)} failures, worst error {WORST[0]:.2f} of its bound ({clock.time() - START:.0f} s)",
        flush=True,
    )
    return failures


def check_pairs(lib, dtype, d, failures):
    device = "cuda"
    for b, h, hk, sq, sk, dq in [
        (2, 4, 4, 384, 384, d),
        (1, 4, 2, 200, 336, d),
        (3, 2, 1, 65, 1024, max(d - 40, 8)),
        (2, 2, 2, 700, 96, d - 8),
        (1, 2, 2, 1, 16, d),
    ]:
        for n, (shape, kind) in enumerate(
            [
                ((b, h, sq, sk), "bias"),
                ((1, h, sq, sk), "fp32"),
                ((b, 1, 1, sk), "bias"),
                ((b, 1, 1, sk), "mask"),
                ((1, 1, sq, sk), "mask"),
                ((b, h, sq, sk), "both"),
                ((1, 1, 1, sk), "fp32 both"),
                ((b, h, sq, sk), "inf"),
                ((b, 1, 1, sk), "least"),
            ]
        ):
            q = make((b, h, sq, dq), dtype, "bshd")
            k, v = (make((b, hk, sk, dq), dtype, "bshd") for _ in range(2))
            bias = mask = None
            if kind != "mask":
                bias = make(shape, torch.float32 if "fp32" in kind else dtype, "bhsd") * 3
            if kind == "inf":  # padding on the right, a few rows without keys
                bias[..., sk * 2 // 3 :] = float("-inf")
                bias[..., : sq // 3, :] = float("-inf")
            if kind == "least":  # as finfo.min pads
                bias[..., sk // 2 :] = torch.finfo(bias.dtype).min
            if kind == "mask" or "both" in kind:
                mask = torch.rand((b, 1, sq if n == 4 else 1, sk), device=device) < 0.6
                mask[0] &= torch.arange(sk, device=device) < sk // 2
                if n == 4:
                    mask[..., : sq // 2, :] = False
            win, lr = [((-1, -1), False), ((-1, 0), True), ((50, 20), False)][n % 3]
            if kind == "least":  # where every row has a key: it counts as -inf
                win, lr = (-1, -1), False
            cap, scale = (20.0, None) if n == 5 else (0.0, -0.2 if n == 6 else None)
            if mask is not None and dq <= 32:  # sm80's
                continue
            launch, out, lse = lib.prepare(q, k, v, scale, cap, win, lr, bias=bias, mask=mask)
            try:
                launch()
            except RuntimeError as e:
                failures.append(("pairs", kind))
                print("FAIL pairs", (b, h, hk, sq, sk, dq), kind, shape, e)
                continue
            torch.cuda.synchronize()
            PAIRS[0] += 1
            compare(
                f"{lib.name} {dtype} pairs {(b, h, hk, sq, sk, dq)} {shape} {kind} {win} {cap}",
                (out, lse),
                q,
                k,
                v,
                (scale, cap, win, lr, bias, mask),
                failures,
            )


def check_decode(lib, dtype, d, failures):
    for b, h, hk, sq, sk, dq, dv in [
        (1, 8, 2, 1, 5000, d, d),
        (3, 4, 4, 1, 300, d, d - 8),
        (5, 32, 8, 1, 2000, d - 24, d),
        (2, 14, 2, 3, 777, d, d),
        (40, 16, 4, 16, 515, d, d),
        (2, 3, 3, 64, 1000, d, d),
        (150, 2, 1, 2, 400, d, d),
    ]:
        for win, lr, cap in [
            ((-1, -1), False, 0.0),
            ((-1, 0), True, 0.0),
            ((100, 0), True, 25.0),
            ((-1, 0), False, 0.0),
        ]:
            q = make((b, h, sq, dq), dtype, "bshd")
            k = make((b, hk, sk, dq), dtype, "bshd")
            v = make((b, hk, sk, dv), dtype, "bhsd")
            launch, out, lse = lib.prepare(q, k, v, None, cap, win, lr)
            launch()
            torch.cuda.synchronize()
            PAIRS[0] += 1
            name = f"{lib.name} {dtype} decode {(b, h, hk, sq, sk, dq, dv)} {win} {lr} {cap}"
            compare(name, (out, lse), q, k, v, (None, cap, win, lr), failures)


def sdpa(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    which = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]

    def prepare(q, k, v, causal):
        def launch():
            with sdpa_kernel(which):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return launch

    return prepare


def fa3(path):
    c.CDLL(path + "/libcudart.so.12", mode=c.RTLD_GLOBAL)
    torch.ops.load_library(path + "/_C.so")

    def prepare(q, k, v, causal):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        absent = [None] * 20  # k_new .. v_descale
        tail = (q.shape[-1] ** -0.5, causal, -1, -1, 0, 0.0, True, None, 1, None, 0)

        def launch():
            torch.ops.flash_attn_3.fwd(q, k, v, *absent, *tail)

        return launch

    return prepare


def timed(launchers, rounds):
    """Median milliseconds of each launcher, interleaved launch by launch."""
    times = {name: [] for name in launchers}
    for r in range(rounds + 1):
        for name, launch in launchers.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(20000)  # the launch is in the queue before the GPU reaches it
            begin.record()
            launch()
            end.record()
            if r:
                times[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(b) for a, b in t) for n, t in times.items()}


def measure(libraries, dims, seqs, peers, options):
    prepared = {}
    for p in peers:
        prepared[p] = fa3(options.fa3) if p == "fa3" else sdpa(p)
    names = [lib.name for lib in libraries]
    dtype = getattr(torch, options.dtype)
    print("case".ljust(22), *[n.rjust(9) for n in [*names, *peers]], "best/peers")
    ratios = []
    for d, causal, s in itertools.product(dims, options.causal, seqs):
        b, h = 16384 // s, 2048 // d
        q, k, v = (make((b, h, s, d), dtype, "bshd") for _ in range(3))
        launchers = {}
        for lib in libraries:
            if lib.dims and d not in lib.dims:
                continue
            launchers[lib.name] = lib.prepare(
                q, k, v, window=(-1, 0 if causal else -1), out=torch.empty_like(q)
            )[0]
        for p in peers:
            launchers[p] = prepared[p](q, k, v, causal)
        flops = 4 * b * h * s * s * d / (2 if causal else 1)
        result = timed(launchers, options.rounds)
        rate = {n: flops / t / 1e9 for n, t in result.items()}
        best = max(rate[n] for n in names if n in rate)
        ratio = best / max([rate[p] for p in peers], default=best)
        ratios.append(ratio)
        print(
            f"d{d} {'causal' if causal else 'full'} s{s}".ljust(22),
            *[f"{rate[n]:9.0f}" if n in rate else " " * 9 for n in [*names, *peers]],
            f"{ratio:6.3f}",
            flush=True,
        )
    print(
        f"geomean {statistics.geometric_mean(ratios):.3f} min {min(ratios):.3f} ({clock.time() - START:.0f} s)"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "time", "both"))
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--seqs", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--peers", default="cudnn")
    parser.add_argument("--causal", default="0,1")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fa3", default=".scratch/sm90/fa3")
    parser.add_argument("--arena", type=int, default=0)
    parser.add_argument("--only", default="", choices=("", "dense", "packed", "decode"))
    options = parser.parse_args()
    global ARENA
    ARENA = options.arena
    options.causal = [x == "1" for x in options.causal.split(",")]
    libraries = [Library(*spec.split("=", 1)) for spec in options.libraries]
    dims = [int(x) for x in options.dims.split(",")]
    failures = []
    if options.what != "time":
        failures = check(libraries, dims, options)
    if options.what != "check":
        measure(
            libraries,
            dims,
            [int(x) for x in options.seqs.split(",")],
            [p for p in options.peers.split(",") if p],
            options,
        )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
