"""Workbench of the sm90 backward: loads builds of its launcher with ctypes, checks them against fp64 and times them
launch by launch beside FA3 and SDPA. Needs a Hopper GPU.

    python tools/gpu_sm90_backward.py check base=base.so
    python tools/gpu_sm90_backward.py time base=base.so two=two.so@128 --dims 64,128 --peers fa3,cudnn
"""

from __future__ import annotations

import argparse
import ctypes as c
import itertools
import statistics
import sys
import time as clock
from pathlib import Path

import torch

from tools.launchers import BackwardParams, Pairs, _pair_strides, _pointer, _strides

START = clock.time()
SEED = [0]


class Library:
    def __init__(self, name, path):
        path, _, dims = path.partition("@")  # name=path@64+128: only those head dims
        self.name, self.dims = name, [int(x) for x in dims.split("+") if x]
        lib = c.CDLL(str(Path(path).resolve()))
        self.fn = {}
        unit = "sm80" if name.startswith("sm80") else "sm90"
        for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            fn = getattr(lib, f"flashsci_backward_{unit}_{suffix}", None)
            if fn is not None:
                size = getattr(lib, f"flashsci_backward_{unit}_{suffix}_workspace")
                size.restype = c.c_int64
                self.fn[dtype] = fn, size

    def prepare(self, dout, q, k, v, out, lse, *, scale=None, softcap=0.0, window=(-1, -1), lower_right=False, dlse=None, cu=None,
                deterministic=False, need=7, bias=None, mask=None):  # fmt: skip
        """Rank 4 or 5 [B.., H, S, D], or rank 3 [H, T, D] with cu = (cu_q, cu_k). Returns (launch, dq, dk, dv), and dbias with
        a bias."""
        grads = [torch.empty_like(x).fill_(float("nan")) for x in (q, k, v)]
        if bias is not None:
            grads.append(torch.full(bias.shape, float("nan"), dtype=bias.dtype, device="cuda"))
        lead = (1,) * (5 - q.dim()) + tuple(q.shape)
        p = BackwardParams(
            q=_pointer(q), k=_pointer(k), v=_pointer(v), out=_pointer(out), dout=_pointer(dout),
            lse=_pointer(lse), dlse=_pointer(dlse),
            dq=_pointer(grads[0]) if need & 1 else None, dk=_pointer(grads[1]) if need & 2 else None,
            dv=_pointer(grads[2]) if need & 4 else None,
            dbias=_pointer(grads[3]) if need & 8 else None, dbias_strides=_pair_strides(grads[3] if need & 8 else None),
            pairs=Pairs(_pointer(bias), _pointer(mask), _pair_strides(bias), _pair_strides(mask),
                        bias is not None and bias.dtype == torch.float32),
            cu_seqlens_q=_pointer(cu and cu[0]), cu_seqlens_k=_pointer(cu and cu[1]),
            q_strides=_strides(q), k_strides=_strides(k), v_strides=_strides(v), out_strides=_strides(out),
            dout_strides=_strides(dout), dlse_strides=_strides(dlse, last=False),
            dq_strides=_strides(grads[0]), dk_strides=_strides(grads[1]), dv_strides=_strides(grads[2]),
            batch0=lead[0], batch1=lead[1], heads_q=q.shape[-3], heads_k=k.shape[-3], seq_q=q.shape[-2], seq_k=k.shape[-2],
            num_seqs=cu[0].numel() - 1 if cu else 0, max_seqlen_q=-1, max_seqlen_k=-1,
            head_dim=q.shape[-1], head_dim_v=v.shape[-1], scale=q.shape[-1] ** -0.5 if scale is None else scale,
            softcap=softcap, window_left=window[0], window_right=window[1], lower_right=int(lower_right),
            deterministic=int(deterministic), copy_bytes=16, device=0, shared_per_sm=233472,
        )  # fmt: skip
        fn, size = self.fn[q.dtype]
        space = torch.full((max(size(c.byref(p)), 1),), 0xFF, dtype=torch.uint8, device=q.device)
        p.workspace = _pointer(space)
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)

        def launch(keep=(dout, q, k, v, out, lse, dlse, cu, grads, space, bias, mask)):
            error = fn(c.byref(p), stream)
            if error:
                raise RuntimeError(f"launch error {error}")

        return launch, *grads


def scores(q, k, scale, softcap, window, lower_right):
    s = q @ k.transpose(-1, -2) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(s.shape[-2], device=s.device)[:, None]
    j = torch.arange(s.shape[-1], device=s.device)[None, :]
    rel = j - i - (s.shape[-1] - s.shape[-2] if lower_right else 0)
    seen = torch.ones_like(rel, dtype=torch.bool)
    if window[0] >= 0:
        seen &= rel >= -window[0]
    if window[1] >= 0:
        seen &= rel <= window[1]
    return s, s.masked_fill(~seen, float("-inf"))


def gradients(
    dout, q, k, v, out, lse, dlse, scale, softcap, window, lower_right, dtype, addend=None, bias=()
):
    """dq, dk, dv, and dbias of a bias of this shape, of the formulas in this dtype, and of their absolute values (a floor for errors)."""
    group = q.shape[-3] // k.shape[-3]
    q, k, v, dout, out = (x.to(dtype) for x in (q, k, v, dout, out))
    kk, vv = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    raw, s = scores(q, kk, scale, softcap, window, lower_right)
    if addend is not None:
        s = s + addend.to(dtype)
    p = torch.exp(s.to(lse.dtype) - lse[..., None]).nan_to_num(0.0, posinf=0.0)
    p = torch.where(lse[..., None] == float("-inf"), 0.0, p).to(dtype)
    dp = dout @ vv.transpose(-1, -2)
    delta = (dout * out).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None].to(dtype)
    slope = 1 - (raw / softcap) ** 2 if softcap else 1.0
    ds = p * (dp - delta) * slope
    dsa = p * (dp.abs() + delta.abs()) * slope

    def fold(x):
        return x.unflatten(-3, (k.shape[-3], group)).sum(-3)

    def products(p, ds, q, kk, dout):
        return (
            scale * (ds @ kk),
            fold(scale * (ds.transpose(-1, -2) @ q)),
            fold(p.transpose(-1, -2) @ dout),
            ds.sum_to_size(bias),
        )

    return products(p, ds, q, kk, dout), products(p, dsa, q.abs(), kk.abs(), dout.abs())


def make(shape, dtype, layout="bhsd", scale=1.0):
    SEED[0] += 1
    g = torch.Generator("cuda").manual_seed(SEED[0])
    if layout == "bshd":
        *lead, h, s, d = shape
        x = torch.randn((*lead, s, h, d), device="cuda", generator=g).transpose(-3, -2)
    else:
        x = torch.randn(shape, device="cuda", generator=g)
    return (x * scale).to(dtype)


def forward(q, k, v, options, addend=None):
    group = q.shape[-3] // k.shape[-3]
    kk, vv = (x.double().repeat_interleave(group, -3) for x in (k, v))
    _, s = scores(q.double(), kk, *options)
    if addend is not None:
        s = s + addend
    lse = torch.logsumexp(s, -1)
    out = torch.softmax(s, -1).nan_to_num(0.0) @ vv
    return out, lse


class Check:
    def __init__(self):
        self.failures, self.count, self.worst = [], 0, 0.0

    def compare(self, name, got, arguments, options, dtype, addend=None, bias=()):
        want, floors = gradients(
            *(None if x is None else x.double() for x in arguments),
            *options,
            torch.float64,
            addend,
            bias,
        )
        base, _ = gradients(*arguments, *options, dtype, addend, bias)
        eps = torch.finfo(dtype).eps
        text = []
        for label, g, w, b, f in zip(
            ("dq", "dk", "dv", "dbias"), got, want, base, floors, strict=False
        ):
            if g.numel() == 0:
                continue
            error = (g.double() - w).abs().max().item()
            bound = (
                2 * (b.double() - w).abs().nan_to_num(0).max().item()
                + 8 * eps * f.max().item()
                + 1e-30
            )
            if g.dtype != dtype:  # fp32: nothing in its way is rounded to 16 bits
                bound = 2**-13 * f.max().item() + 1e-30
            self.worst = max(self.worst, error / bound)
            if not error <= bound:
                bad = (~((g.double() - w).abs() <= bound)).nonzero()
                text.append(
                    f"{label} error {error:.2e} bound {bound:.2e} {len(bad)} of {g.numel()} first {bad[0].tolist()} last {bad[-1].tolist()}"
                )
        self.count += 1
        if text:
            self.failures.append(name)
            if len(self.failures) < 25:
                print("FAIL", name, *text, sep="\n    ", flush=True)

    def repeat(self, name, launch, got, repeats):
        first = [g.clone() for g in got]
        for _ in range(repeats):
            for g in got:
                g.fill_(float("nan"))
            launch()
            if not all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(first, got, strict=True)):  # fmt: skip
                self.failures.append(name)
                print("FAIL not repeatable", name, flush=True)
                break

    def dense(self, lib, dtype, b, h, hk, sq, sk, d, dv, window=(-1, -1), lower_right=False, softcap=0.0, scale=None, layout="bshd",
              size=1.0, dlse=False, extra=0.0, need=7, no_dout=False, repeats=0):  # fmt: skip
        name = f"{lib.name} {dtype} b{b} h{h}/{hk} s{sq}x{sk} d{d}/{dv} {window} {lower_right} cap{softcap} scale{scale} {layout} size{size} dlse{dlse} extra{extra} need{need}"
        scale_ = d**-0.5 if scale is None else scale
        options = (scale_, softcap, window, lower_right)
        q, k, v, dout = (
            make((b, h, sq, d), dtype, layout, size), make((b, hk, sk, d), dtype, layout, size),
            make((b, hk, sk, dv), dtype, layout), make((b, h, sq, dv), dtype, layout),
        )  # fmt: skip
        out, lse = forward(q, k, v, options)
        out, lse = out.to(dtype), (lse + extra).float()
        grad_lse = torch.randn(lse.shape, device="cuda") if dlse else None
        launch, *got = lib.prepare(None if no_dout else dout, q, k, v, out, lse, scale=scale, softcap=softcap, window=window,
                                   lower_right=lower_right, dlse=grad_lse, need=need, deterministic=repeats > 0)  # fmt: skip
        try:
            launch()
            torch.cuda.synchronize()
        except RuntimeError as e:
            self.failures.append(name)
            print("FAIL", name, e, flush=True)
            if "launch error" not in str(e):
                sys.exit(1)
            return
        self.repeat(name, launch, got, repeats)
        if need != 7:
            got = [g if need >> i & 1 else g.new_empty(0) for i, g in enumerate(got)]
        self.compare(name, got, (dout * (not no_dout), q, k, v, out, lse, grad_lse), options, dtype)

    def pairs(self, lib, dtype, b, h, hk, sq, sk, d, dv, bias=None, bias_dtype=None, mask=None, window=(-1, -1), lower_right=False,
              hidden=0.0, need=15, repeats=0, pad=0, refused=False):  # fmt: skip
        name = f"{lib.name} {dtype} pairs b{b} h{h}/{hk} s{sq}x{sk} d{d}/{dv} bias {bias} {bias_dtype} mask {mask} {window} {lower_right} hidden {hidden} need {need} pad {pad}"
        options = (d**-0.5, 0.0, window, lower_right)
        q, k, v, dout = (
            make((b, h, sq, d), dtype, "bshd"), make((b, hk, sk, d), dtype, "bshd"),
            make((b, hk, sk, dv), dtype, "bshd"), make((b, h, sq, dv), dtype, "bshd"),
        )  # fmt: skip
        addend = torch.zeros((), device="cuda", dtype=torch.float64)
        x = y = None
        if bias is not None:  # rows of the memory are longer by `pad`, which is NaN
            x = make((*bias[:-1], bias[-1] + pad), bias_dtype or dtype)
            x[..., bias[-1] :] = float("nan")
            x = x[..., : bias[-1]]
            if hidden:
                x.masked_fill_(torch.rand(x.shape, device="cuda") < hidden, float("-inf"))
                x[..., :: max(x.shape[-2] // 5, 1), :] = float("-inf")  # rows without keys
            addend = addend + x.double()
        if mask is not None:
            y = torch.rand(mask, device="cuda") < 0.6
            addend = (
                torch.zeros(y.shape, device="cuda").double().masked_fill(~y, float("-inf")) + addend
            )
        out, lse = forward(q, k, v, options, addend)
        out, lse = out.to(dtype), lse.float()
        launch, *got = lib.prepare(dout, q, k, v, out, lse, window=window, lower_right=lower_right, bias=x, mask=y,
                                   need=need if x is not None else need & 7, deterministic=repeats > 0)  # fmt: skip
        try:
            launch()
            torch.cuda.synchronize()
        except RuntimeError as e:
            if not (refused and "error 801" in str(e)):
                self.failures.append(name)
                print("FAIL", name, e, flush=True)
            if "launch error" not in str(e):
                sys.exit(1)
            return
        if refused:
            self.failures.append(name)
            print("FAIL not refused", name, flush=True)
        self.repeat(name, launch, got, repeats)
        got = [g if need >> i & 1 else g.new_empty(0) for i, g in enumerate(got)]
        self.compare(name, got, (dout, q, k, v, out, lse, None), options, dtype, addend, bias or ())

    def packed(
        self,
        lib,
        dtype,
        d,
        dv,
        window,
        lower_right,
        softcap=0.0,
        heads=(6, 2),
        lens_q=None,
        lens_k=None,
        head=3,
        repeats=0,
    ):
        lens_q = lens_q or [0, 1, 130, 63, 64, 0, 400, 193, 7, 128]
        lens_k = lens_k or [5, 1, 77, 64, 200, 9, 300, 0, 129, 128]
        options = (d**-0.5, softcap, window, lower_right)
        cu = [
            torch.tensor([head, *lens], device="cuda").cumsum(0).int() for lens in (lens_q, lens_k)
        ]
        total_q, total_k = int(cu[0][-1]) + 5, int(cu[1][-1]) + 6
        h, hk = heads
        q, dout, out = (
            make((h, total_q, d), dtype, "bshd"),
            make((h, total_q, dv), dtype, "bshd"),
            make((h, total_q, dv), dtype, "bshd"),
        )
        k, v = make((hk, total_k, d), dtype, "bshd"), make((hk, total_k, dv), dtype, "bshd")
        lse = torch.full((h, total_q), float("-inf"), device="cuda")
        bounds = [x.tolist() for x in cu]
        poison = len(lens_q) // 2 - 1
        for n in range(len(lens_q)):
            a, b, e, f = bounds[0][n], bounds[0][n + 1], bounds[1][n], bounds[1][n + 1]
            if f > e:
                o, s = forward(q[:, a:b], k[:, e:f], v[:, e:f], options)
                out[:, a:b], lse[:, a:b] = o.to(dtype), s.float()
            else:
                out[:, a:b] = 0
        nan = float("nan")
        for x, at in (
            (q, 0),
            (dout, 0),
            (k, 1),
            (v, 1),
        ):  # one sequence is poison, as is what belongs to nobody
            x[:, bounds[at][poison] : bounds[at][poison + 1]] = nan
            x[:, : bounds[at][0]] = nan
            x[:, bounds[at][-1] :] = nan
        launch, *got = lib.prepare(dout, q, k, v, out, lse, softcap=softcap, window=window, lower_right=lower_right, cu=cu,
                                   deterministic=repeats > 0)  # fmt: skip
        launch()
        torch.cuda.synchronize()
        self.repeat(f"packed d{d} {window} {lower_right} {lens_q}", launch, got, repeats)
        for n in range(len(lens_q)):
            if n == poison:
                continue
            a, b, e, f = bounds[0][n], bounds[0][n + 1], bounds[1][n], bounds[1][n + 1]
            name = f"{lib.name} {dtype} packed d{d}/{dv} {window} {lower_right} cap{softcap} sequence {n} ({b - a} x {f - e})"
            self.compare(name, (got[0][:, a:b], got[1][:, e:f], got[2][:, e:f]),
                         (dout[:, a:b], q[:, a:b], k[:, e:f], v[:, e:f], out[:, a:b], lse[:, a:b], None), options, dtype)  # fmt: skip
        for x, at in zip(got, (0, 1, 1), strict=True):
            nobody = x[:, : bounds[at][0]].abs().sum() + x[:, bounds[at][-1] :].abs().sum()
            if nobody.item() != 0:
                self.failures.append("nobody")
                print(f"FAIL rows of nobody {at} d{d} {window}", flush=True)
        # any contents of the offsets: in bounds, no hang
        garbage = [
            torch.randint(-(2**31), 2**31 - 1, (len(lens_q) + 1,), device="cuda").int()
            for _ in range(2)
        ]
        launch, *_ = lib.prepare(dout, q, k, v, out, lse, window=window, lower_right=lower_right, cu=garbage,
                                 deterministic=repeats > 0)  # fmt: skip
        launch()
        torch.cuda.synchronize()


WINDOWS = [((-1, -1), False), ((-1, 0), False), ((-1, 0), True), ((100, 0), False), ((37, 50), True), ((-1, 300), False), ((64, -1), False)]  # fmt: skip


def check_pairs(result, lib, dtype, d):
    def case(b, h, hk, sq, sk, *shape, **options):
        sizes = [(b, h, sq, sk)[i] if x else 1 for i, x in enumerate(shape)]
        result.pairs(lib, dtype, b, h, hk, sq, sk, d, d, sizes, **options)

    for sizes in [(1, 2, 2, 128, 128), (2, 4, 4, 512, 512), (1, 2, 1, 200, 336), (3, 6, 2, 300, 1000), (1, 2, 2, 1, 80), (2, 2, 2, 1500, 1408)]:  # fmt: skip
        for window, lower_right in WINDOWS[:5]:
            case(*sizes, 1, 1, 1, 1, window=window, lower_right=lower_right, hidden=0.1)
    for shape in [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (1, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 1)]:  # fmt: skip
        for sizes in [(3, 4, 2, 257, 264), (2, 6, 6, 640, 384)]:
            case(*sizes, *shape)
            case(*sizes, *shape, hidden=0.3, window=(-1, 0), lower_right=True)
            case(*sizes, *shape, need=7)
            case(*sizes, *shape, need=8)
            case(*sizes, *shape, mask=(sizes[0], 1, 1, sizes[4]))
    for shape in [(1, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 1)]:
        case(2, 4, 2, 200, 333, *shape, bias_dtype=torch.float32)
        case(2, 4, 2, 200, 333, *shape, hidden=0.2)
    for mask in [(2, 4, 1, 333), (2, 1, 1, 333), (1, 1, 1, 333)]:
        result.pairs(lib, dtype, 2, 4, 2, 200, 333, d, d, mask=mask)
        result.pairs(lib, dtype, 2, 4, 2, 200, 333, d - 8, d - 16, mask=mask, window=(-1, 0))
    for dq, dv in [(d - 56, d - 56), (d - 8, d), (d, d - 56)]:
        result.pairs(lib, dtype, 2, 4, 2, 333, 448, dq, dv, (2, 4, 333, 448), window=(50, 70))
        result.pairs(lib, dtype, 2, 4, 2, 333, 448, dq, dv, (1, 4, 333, 448))
    case(2, 4, 2, 333, 441, 1, 1, 1, 1, pad=7, need=7)  # rows of the bias are longer than it
    case(2, 4, 2, 333, 441, 0, 1, 1, 1, pad=7)
    for need in (1, 2, 4, 9, 14):
        case(2, 4, 2, 333, 448, 1, 1, 1, 1, need=need)
    for window in [(-1, -1), (-1, 0)]:
        case(2, 8, 8, 1024, 1024, 1, 1, 1, 1, window=window, repeats=50)
        case(2, 4, 2, 1500, 1408, 0, 1, 1, 1, window=window, repeats=10)
    case(2, 4, 2, 333, 448, 1, 1, 1, 1, refused=True, mask=(1, 1, 333, 448))
    case(2, 4, 2, 333, 441, 1, 1, 1, 1, refused=True)


def check_apart(result, lib, dtype, d):
    """fp32 by pairs, masks by pairs."""
    fp32 = torch.float32

    def case(b, h, hk, sq, sk, *shape, **options):
        sizes = [(b, h, sq, sk)[i] if x else 1 for i, x in enumerate(shape)]
        result.pairs(lib, dtype, b, h, hk, sq, sk, d, d, sizes, bias_dtype=fp32, **options)

    for sizes in [(1, 2, 2, 128, 128), (2, 4, 4, 512, 512), (1, 2, 1, 200, 332), (3, 6, 2, 300, 1000), (1, 2, 2, 2, 80), (2, 2, 2, 1500, 1412)]:  # fmt: skip
        for window, lower_right in WINDOWS[:5]:
            case(*sizes, 1, 1, 1, 1, window=window, lower_right=lower_right, hidden=0.1)
            case(*sizes, 0, 1, 1, 1, window=window, lower_right=lower_right, hidden=0.1)
    for shape in [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1)]:
        for sizes in [(3, 4, 2, 257, 268), (2, 6, 6, 640, 384), (40, 4, 4, 384, 384)]:
            case(*sizes, *shape)
            case(*sizes, *shape, hidden=0.3, window=(-1, 0), lower_right=True)
            case(*sizes, *shape, need=7)
            case(*sizes, *shape, need=8)
            case(*sizes, *shape, mask=(sizes[0], 1, 1, sizes[4]))
    for dq, dv in [(d - 56, d - 56), (d - 8, d), (d, d - 56), (d - 40, d - 40)]:
        for batch in (1, 2):
            result.pairs(lib, dtype, 2, 4, 2, 333, 444, dq, dv, (batch, 4, 333, 444), fp32, window=(50, 70))  # fmt: skip
    case(2, 4, 2, 333, 441, 1, 1, 1, 1, pad=3, need=7)  # rows of the bias are longer than it
    case(2, 4, 2, 333, 441, 1, 1, 1, 1, pad=3, refused=True)  # nothing for rows of its gradient
    case(2, 4, 2, 333, 441, 0, 1, 1, 1, pad=3)  # sm80's kernel sums
    case(2, 4, 2, 333, 441, 1, 1, 1, 1, refused=True)
    for need in (1, 2, 4, 9, 14):
        case(2, 4, 2, 333, 448, 1, 1, 1, 1, need=need)
        case(2, 4, 2, 333, 448, 0, 1, 1, 1, need=need)
    for window in [(-1, -1), (-1, 0)]:  # deterministic
        case(2, 8, 8, 1024, 1024, 1, 1, 1, 1, window=window, repeats=50)
        case(2, 4, 2, 1500, 1408, 0, 1, 1, 1, window=window, repeats=10)
    for b, h, sq, sk, shape in [(2, 4, 333, 448, (1, 1)), (2, 4, 200, 336, (2, 1)), (2, 4, 64, 16, (2, 4)), (1, 2, 1500, 1424, (1, 2)), (3, 6, 257, 272, (1, 6))]:  # fmt: skip
        mask = (*shape, sq, sk)
        for window, lower_right in WINDOWS[:3]:
            result.pairs(lib, dtype, b, h, h // 2, sq, sk, d, d, None, mask=mask, window=window, lower_right=lower_right)  # fmt: skip
            result.pairs(lib, dtype, b, h, h // 2, sq, sk, d, d, (b, 1, 1, sk), mask=mask, window=window, lower_right=lower_right)  # fmt: skip
            for batches in {1, b}:
                case(b, h, h // 2, sq, sk, b == batches, 1, 1, 1, mask=mask, window=window,
                     lower_right=lower_right, hidden=0.1, refused=d > 64)  # fmt: skip
    result.pairs(lib, dtype, 2, 4, 2, 333, 441, d, d, None, mask=(2, 1, 333, 441), refused=True)


def check(libraries, options):
    result = Check()
    for lib in libraries:
        for dtype, d in itertools.product(lib.fn, lib.dims or [64, 128, 192, 256]):
            if options.only in ("", "dense"):
                for case in [(1, 1, 1, 64, 128), (1, 1, 1, 128, 128), (2, 4, 4, 512, 512), (1, 2, 1, 200, 333), (2, 3, 3, 1, 77), (1, 4, 2, 777, 129),
                             (1, 1, 1, 64, 1), (3, 6, 2, 300, 1000), (20, 8, 4, 321, 321), (1, 2, 2, 1500, 1411)]:  # fmt: skip
                    for window, lower_right in WINDOWS:
                        result.dense(lib, dtype, *case, d, d, window, lower_right)
                wide = [(d, 128), (d - 56, 24), (24, d - 16)] if d > 128 else []
                for dq, dv in [(d - 56, d - 56), (d - 8, d), (d, d - 56), (d - 16, d - 16), (8, d), *wide]:  # fmt: skip
                    result.dense(
                        lib, dtype, 2, 4, 2, 333, 444, dq, dv, (-1, 0), True, layout="bhsd"
                    )
                result.dense(lib, dtype, 2, 4, 2, 333, 444, d, d, scale=-0.3)
                result.dense(lib, dtype, 2, 4, 2, 333, 444, d, d, scale=0.0)
                result.dense(lib, dtype, 1, 4, 2, 333, 444, d, d, dlse=True)
                result.dense(lib, dtype, 1, 4, 2, 333, 444, d, d, extra=1.5)  # a global lse
                result.dense(lib, dtype, 1, 4, 2, 333, 444, d, d, dlse=True, no_dout=True)
                for need in (1, 2, 4, 6):
                    result.dense(lib, dtype, 1, 4, 2, 333, 444, d, d, need=need)
                # rows whose exponentials would overflow without a mask (lse far below -88.7)
                for s in (64, 192, 320):
                    result.dense(lib, dtype, 1, 2, 2, s, s, d, d, (-1, 0), size=12.0)
                    result.dense(lib, dtype, 1, 2, 2, s, s, d, d, (16, 16), size=30.0)
                    result.dense(lib, dtype, 1, 2, 2, s, s, d, d, size=8.0, scale=-1.0)
            if options.only in ("", "turns"):
                for case in [
                    (2, 4, 4, 512, 512),
                    (1, 6, 2, 777, 129),
                    (3, 6, 2, 300, 1000),
                    (2, 4, 2, 1500, 1411),
                ]:
                    for window, lower_right in WINDOWS:
                        result.dense(lib, dtype, *case, d, d, window, lower_right, repeats=10)
                for window, lower_right in WINDOWS:
                    result.packed(lib, dtype, d, d, window, lower_right, repeats=10)
                lens = [300, 1000, 17, 640, 64, 2000, 5]
                for window in ((-1, -1), (-1, 0)):
                    result.packed(lib, dtype, d, d, window, True, lens_q=lens, lens_k=lens[::-1], repeats=100)  # fmt: skip
                result.dense(lib, dtype, 2, 8, 8, 2048, 2048, d, d, (-1, 0), repeats=100)
                result.dense(lib, dtype, 2, 8, 8, 2048, 2048, d, d, repeats=100)
            if options.only in ("", "softcap"):
                for window, lower_right in WINDOWS[:4]:
                    result.dense(
                        lib, dtype, 2, 4, 2, 333, 444, d, d, window, lower_right, softcap=3.0
                    )
            if options.only in ("", "pairs"):
                check_pairs(result, lib, dtype, d)
                check_apart(result, lib, dtype, d)
            if options.only in ("", "packed"):
                for window, lower_right in WINDOWS:
                    result.packed(lib, dtype, d, d, window, lower_right)
                result.packed(lib, dtype, d - 8, d, (-1, 0), True)
                result.packed(lib, dtype, d, d, (-1, 0), True, softcap=5.0)
                result.packed(
                    lib,
                    dtype,
                    d,
                    d,
                    (-1, -1),
                    False,
                    head=0,
                    lens_q=[5, 50, 300, 0, 40],
                    lens_k=[7, 30, 200, 3, 500],
                )
            torch.cuda.synchronize()
            print(f"{lib.name} {dtype} d{d}: {result.count} cases, {len(result.failures)} failures, worst {result.worst:.3f} of bound ({clock.time() - START:.0f} s)", flush=True)  # fmt: skip
    return result.failures


def sdpa(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    which = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]

    def prepare(q, k, v, dout, causal):
        a = [x.detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(which):
            out = torch.nn.functional.scaled_dot_product_attention(*a, is_causal=causal)

        def launch():
            torch.autograd.grad(out, a, dout, retain_graph=True)

        return launch

    return prepare


def fa3(path):
    c.CDLL(path + "/libcudart.so.12", mode=c.RTLD_GLOBAL)
    torch.ops.load_library(path + "/_C.so")

    def prepare(q, k, v, dout, causal):
        q, k, v, dout = (t.transpose(1, 2) for t in (q, k, v, dout))
        absent = [None] * 20  # k_new .. v_descale
        scale = q.shape[-1] ** -0.5
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            q, k, v, *absent, scale, causal, -1, -1, 0, 0.0, True, None, 1, None, 0
        )
        grads = [torch.empty_like(x) for x in (q, k, v)]

        def launch():
            torch.ops.flash_attn_3.bwd(
                dout, q, k, v, out, lse, *grads, *[None] * 6, scale, causal, -1, -1, 0.0, False, 0
            )

        return launch

    return prepare


def triton(q, k, v, dout, causal):
    from flashsci.backends import triton as module

    out, scale = torch.empty_like(q).normal_() * 0.05, q.shape[-1] ** -0.5
    lse = torch.full(q.shape[:-1], 9.0, device="cuda")
    options = (-1, -1, scale, 0.0, -1, 0 if causal else -1, False, 0.0, "default", False, 7)
    return lambda: module.backward(dout, None, q, k, v, *[None] * 7, out, lse, *options)


def efficient(q, k, v, dout, bias, mask, grad):
    """SDPA's memory-efficient kernel, with the bias and mask that it takes: a bias in q's dtype."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    a = [x.detach().requires_grad_() for x in (q, k, v)]
    added = mask
    if bias is not None:
        added = bias.detach().to(q.dtype)
        if mask is not None:
            added = added.masked_fill(~mask, float("-inf"))  # as large as both: of batches too
        added = added.requires_grad_(grad)
    full = added.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*a, attn_mask=full)
    wanted = [*a, *([added] if grad else [])]
    return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)


PAIR_CASES = {  # B, H, Sq, Sk, D, bias, mask, bias_grad[, fp32]
    "triangle-384": (384, 4, 384, 384, 32, (1, 4, 384, 384), (384, 1, 1, 384), True, True),
    "triangle-768": (768, 4, 768, 768, 32, (1, 4, 768, 768), (768, 1, 1, 768), True, True),
    "af3-pairformer-384": (1, 16, 384, 384, 24, (1, 16, 384, 384), None, True, True),
    "af3-pairformer-768": (1, 16, 768, 768, 24, (1, 16, 768, 768), None, True, True),
    "af3-diffusion": (48, 16, 384, 384, 48, (1, 16, 384, 384), None, True, True),
    "fp32, no grad": (48, 16, 384, 384, 48, (1, 16, 384, 384), None, False, True),
    "af3-pair, fp32": (4, 16, 768, 768, 64, (4, 16, 768, 768), None, True, True),
    "fp32, D 128": (2, 16, 2048, 2048, 128, (2, 16, 2048, 2048), None, True, True),
    "mask": (4, 16, 2048, 2048, 64, None, (4, 1, 2048, 2048), False),
    "mask, D 32": (64, 16, 256, 256, 32, None, (64, 1, 256, 256), False),
    "mask, D 128": (4, 16, 2048, 2048, 128, None, (4, 1, 2048, 2048), False),
    "fp32 and mask": (4, 16, 768, 768, 64, (4, 16, 768, 768), (4, 1, 768, 768), True, True),
    "af3-pair": (4, 16, 768, 768, 64, (4, 16, 768, 768), None, True),
    "long-bias": (1, 16, 4096, 4096, 64, (1, 16, 4096, 4096), None, True),
    "long-bias, no grad": (1, 16, 4096, 4096, 64, (1, 16, 4096, 4096), None, False),
    "D 128": (2, 16, 2048, 2048, 128, (2, 16, 2048, 2048), None, True),
    "D 32": (4, 16, 768, 768, 32, (4, 16, 768, 768), None, True),
    "D 24": (1, 16, 768, 768, 24, (1, 16, 768, 768), None, True),
    "batch shares": (8, 16, 1024, 1024, 64, (1, 16, 1024, 1024), None, True),
    "batch shares, D 32": (256, 4, 256, 256, 32, (1, 4, 256, 256), None, True),
    "batch shares, D 128": (8, 16, 1024, 1024, 128, (1, 16, 1024, 1024), None, True),
    "key mask": (4, 16, 2048, 2048, 64, None, (4, 1, 1, 2048), False),
    "key mask, D 32": (64, 16, 256, 256, 32, None, (64, 1, 1, 256), False),
    "key mask, D 128": (4, 16, 2048, 2048, 128, None, (4, 1, 1, 2048), False),
}


def measure_pairs(libraries, options):
    from flashsci.backends import triton as module

    dtype = getattr(torch, options.dtype)
    names = [lib.name for lib in libraries]
    print("microseconds".ljust(22), *[n.rjust(9) for n in [*names, *options.peers.split(",")]])
    for name, (b, h, sq, sk, d, bias, mask, grad, *fp32) in PAIR_CASES.items():
        if options.cases not in name:
            continue
        q, k, v, dout = (make((b, h, s, d), dtype, "bshd") for s in (sq, sk, sk, sq))
        x = None if bias is None else make(bias, torch.float32 if fp32 else dtype)
        y = None if mask is None else torch.rand(mask, device="cuda") < 0.8
        out = torch.empty_like(q).normal_() * 0.05
        lse = torch.full((b, h, sq), 9.0, device="cuda")
        need = 15 if grad else 7
        launchers = {
            lib.name: lib.prepare(
                dout,
                q,
                k,
                v,
                out,
                lse,
                bias=x,
                mask=y,
                need=need,
                deterministic=lib.name.startswith("det"),
            )[0]
            for lib in libraries
        }
        scalars = (-1, -1, d**-0.5, 0.0, -1, -1, False, 0.0, "default", False, need)
        if "triton" in options.peers:
            launchers["triton"] = lambda a=(dout, None, q, k, v, x, y, *[None] * 5, out, lse, *scalars): module.backward(*a)  # fmt: skip
        if "efficient" in options.peers:
            launchers["efficient"] = efficient(q, k, v, dout, x, y, grad)
        times = timed(launchers, options.rounds)
        print(name.ljust(22), *[f"{t * 1e3:9.1f}" for t in times.values()], flush=True)


def timed(launchers, rounds):
    """Median milliseconds of each launcher, interleaved launch by launch."""
    times = {name: [] for name in launchers}
    for r in range(rounds + 1):
        for name, launch in launchers.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200000)  # the launch is in the queue before the GPU reaches it
            begin.record()
            launch()
            end.record()
            if r:
                times[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(b) for a, b in t) for n, t in times.items()}


def measure(libraries, options):
    peers = [p for p in options.peers.split(",") if p]
    prepared = {
        p: fa3(options.fa3) if p == "fa3" else triton if p == "triton" else sdpa(p) for p in peers
    }
    names = [lib.name for lib in libraries]
    dtype = getattr(torch, options.dtype)
    print("case".ljust(20), *[n.rjust(8) for n in [*names, *peers]], "best/peers")
    ratios = []
    for d, causal, s in itertools.product(options.dims, options.causal, options.seqs):
        b, h = 16384 // s, 2048 // d
        q, k, v, dout = (make((b, h, s, d), dtype, "bshd") for _ in range(4))
        # Any statistics of the right size time alike; those of random scores keep P near 1 / S.
        out = torch.empty_like(q).normal_() * 0.05
        seen = (
            torch.arange(1, s + 1, device="cuda").float()
            if causal
            else torch.full((s,), float(s), device="cuda")
        )
        lse = (seen.log() + 0.5).expand(b, h, s).contiguous()
        launchers = {}
        for lib in libraries:
            if not lib.dims or d in lib.dims:
                launchers[lib.name] = lib.prepare(
                    dout,
                    q,
                    k,
                    v,
                    out,
                    lse,
                    window=(-1, 0 if causal else -1),
                    deterministic=lib.name.startswith("det"),
                )[0]
        for p in peers:
            launchers[p] = prepared[p](q, k, v, dout, causal)
        flops = 10 * b * h * s * s * d / (2 if causal else 1)
        result = timed(launchers, options.rounds)
        rate = {n: flops / t / 1e9 for n, t in result.items()}
        best = max(rate[n] for n in names if n in rate)
        ratio = best / max([rate[p] for p in peers], default=best)
        ratios.append(ratio)
        print(f"d{d} {'causal' if causal else 'full'} s{s}".ljust(20),
              *[f"{rate[n]:8.0f}" if n in rate else " " * 8 for n in [*names, *peers]], f"{ratio:6.3f}", flush=True)  # fmt: skip
        del launchers
    print(
        f"geomean {statistics.geometric_mean(ratios):.3f} min {min(ratios):.3f} ({clock.time() - START:.0f} s)"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "time", "pairs", "both"))
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--seqs", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--peers", default="fa3,cudnn")
    parser.add_argument("--causal", default="0,1")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fa3", default="/tmp/fa3")
    parser.add_argument("--cases", default="", help="pairs: those whose name holds this")
    parser.add_argument(
        "--only", default="", choices=("", "dense", "packed", "softcap", "turns", "pairs")
    )
    options = parser.parse_args()
    options.causal = [x == "1" for x in options.causal.split(",")]
    options.dims, options.seqs = (
        [int(x) for x in text.split(",")] for text in (options.dims, options.seqs)
    )
    libraries = [Library(*spec.split("=", 1)) for spec in options.libraries]
    failures = check(libraries, options) if options.what in ("check", "both") else []
    if options.what == "pairs":
        measure_pairs(libraries, options)
    elif options.what != "check":
        measure(libraries, options)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
