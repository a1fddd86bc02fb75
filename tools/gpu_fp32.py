"""The fp32 launchers by ctypes: generated cases against fp64, and timings beside SDPA and Triton. Needs a GPU.

    python tools/gpu_fp32.py check fp32.so --count 300
    python tools/gpu_fp32.py time base.so next.so --cases dense,unimol

A library is what nvcc -shared makes of csrc/sm80/*_fp32.cu.
"""

from __future__ import annotations

import argparse
import ctypes as c
import itertools
import math
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch

from flashsci.testing import Inputs, Judge, generate, make_inputs, variants
from flashsci.testing.cases import ALL_LENGTHS
from tools.gpu_triton import interleaved


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


def fields(kind, names):
    return [(n, kind) for n in names.split()]


class Forward(c.Structure):
    _fields_ = [
        *fields(c.c_void_p, "q k v out lse cu_q cu_k"),
        *fields(Strides, "q_strides k_strides v_strides out_strides"),
        ("pairs", Pairs),
        *fields(c.c_int64, "batch0 batch1"),
        *fields(c.c_int32, "heads_q heads_k seq_q seq_k num_seqs max_seqlen_q head_dim head_dim_v"),
        *fields(c.c_float, "scale softcap"),
        *fields(c.c_int32, "window_left window_right lower_right precision copy_bytes device"),
        ("shared_per_sm", c.c_int32),
    ]


class Backward(c.Structure):
    _fields_ = [
        *fields(c.c_void_p, "q k v out dout lse dlse dq dk dv dbias workspace cu_q cu_k"),
        *fields(Strides, "q_strides k_strides v_strides out_strides dout_strides dlse_strides"),
        *fields(Strides, "dq_strides dk_strides dv_strides"),
        ("pairs", Pairs),
        ("dbias_strides", PairStrides),
        *fields(c.c_int64, "batch0 batch1"),
        *fields(c.c_int32, "heads_q heads_k seq_q seq_k num_seqs max_seqlen_q max_seqlen_k"),
        *fields(c.c_int32, "head_dim head_dim_v"),
        *fields(c.c_float, "scale softcap"),
        *fields(c.c_int32, "window_left window_right lower_right deterministic precision"),
        *fields(c.c_int32, "copy_bytes device shared_per_sm"),
    ]


def full(x):
    """[B0, B1, H, S, D] view."""
    return x[(None,) * (5 - x.dim())]


def strides(x):
    """Of a [B0, B1, H, S, ...] view; 0 where there is one element."""
    return [s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True)]


def copy_bytes(*tensors):
    bits = 16
    for t in tensors:
        bits = math.gcd(bits, t.data_ptr())
        for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True):
            if size > 1:
                bits = math.gcd(bits, stride * 4)
    return bits


def pointer(x):
    return None if x is None or x.numel() == 0 else x.data_ptr()


class Call:
    """One attention call: launches into outputs that were NaN."""

    def __init__(self, library, inputs, precision="tf32x3"):
        self.library, self.inputs, options = library, inputs, inputs.options
        packed = inputs.cu_seqlens_q is not None
        q, k, v, dout, bias, mask = (
            None if x is None else x.detach()
            for x in (
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.dout,
                inputs.bias,
                inputs.mask,
            )
        )
        heads_first = (lambda x: x.transpose(0, 1)) if packed else (lambda x: x)
        self.q, self.k, self.v = (full(heads_first(x)) for x in (q, k, v))
        self.dout = None if dout is None else full(heads_first(dout))
        self.out_shape = (*q.shape[:-1], v.shape[-1])
        self.out = torch.full(self.out_shape, math.nan, device=q.device)
        out = full(heads_first(self.out))
        lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
        self.lse = torch.full(lse_shape, math.nan, device=q.device)
        scores = (*self.q.shape[:-1], self.k.shape[-2])
        self.bias_shape = None if bias is None else bias.shape
        bias, mask = (None if x is None else x.expand(scores) for x in (bias, mask))
        left, right = options.get("window") or (None, None)
        if options.get("causal"):
            right = 0 if right is None else min(right, 0)
        self.cu_q, self.cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        if packed and self.cu_k is None:
            self.cu_k = self.cu_q
        scale = options.get("scale")
        longest = options.get("max_seqlen_q"), options.get("max_seqlen_k")
        self.pairs = Pairs(
            pointer(bias), pointer(mask),
            PairStrides(*([0] * 5 if bias is None else strides(bias))),
            PairStrides(*([0] * 5 if mask is None else strides(mask))),
            1,
        )  # fmt: skip
        self.shape = dict(
            batch0=self.q.shape[0], batch1=self.q.shape[1],
            heads_q=self.q.shape[2], heads_k=self.k.shape[2], seq_q=self.q.shape[3], seq_k=self.k.shape[3],
            num_seqs=self.cu_q.numel() - 1 if packed else 0,
            max_seqlen_q=-1 if longest[0] is None else longest[0],
            head_dim=self.q.shape[4], head_dim_v=self.v.shape[4],
            scale=q.shape[-1] ** -0.5 if scale is None else scale, softcap=options.get("softcap") or 0.0,
            window_left=-1 if left is None else left, window_right=-1 if right is None else right,
            lower_right=int(options.get("align") == "lower_right"),
            precision=int(precision == "tf32"), device=0, shared_per_sm=233472,
            cu_q=pointer(self.cu_q), cu_k=pointer(self.cu_k), pairs=self.pairs,
        )  # fmt: skip
        self.params = Forward(
            q=pointer(self.q), k=pointer(self.k), v=pointer(self.v), out=pointer(out), lse=pointer(self.lse),
            q_strides=Strides(*strides(self.q)[:4]), k_strides=Strides(*strides(self.k)[:4]),
            v_strides=Strides(*strides(self.v)[:4]), out_strides=Strides(*strides(out)[:4]),
            copy_bytes=copy_bytes(self.q, self.k, self.v), **self.shape,
        )  # fmt: skip

    def forward(self):
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = self.library.flashsci_forward_sm80_fp32(c.byref(self.params), stream)
        assert error == 0, f"forward: cudaError {error}"
        return {"out": self.out, "lse": self.lse}

    def prepare_backward(self, need_bias=True):
        i, packed = self.inputs, self.cu_q is not None
        heads_first = (lambda x: x.transpose(0, 1)) if packed else (lambda x: x)
        nan = lambda *s: torch.full(s, math.nan, device=self.q.device)  # noqa: E731
        self.dq, self.dk, self.dv = (nan(*x.shape) for x in (i.q, i.k, i.v))
        views = [full(heads_first(x)) for x in (self.dq, self.dk, self.dv)]
        self.dbias = nan(*self.bias_shape) if self.bias_shape is not None and need_bias else None
        dbias = None if self.dbias is None else full(self.dbias)
        dlse = None if i.dlse is None else full(i.dlse.detach()[..., None])
        out = full(heads_first(self.out))
        four = lambda x: Strides(*strides(x)[:4])  # noqa: E731
        b = Backward(
            q=pointer(self.q), k=pointer(self.k), v=pointer(self.v), out=pointer(out), dout=pointer(self.dout),
            lse=pointer(self.lse), dlse=pointer(dlse), dq=pointer(views[0]), dk=pointer(views[1]),
            dv=pointer(views[2]), dbias=pointer(dbias),
            q_strides=four(self.q), k_strides=four(self.k), v_strides=four(self.v), out_strides=four(out),
            dout_strides=four(self.dout), dlse_strides=Strides() if dlse is None else four(dlse),
            dq_strides=four(views[0]), dk_strides=four(views[1]), dv_strides=four(views[2]),
            dbias_strides=PairStrides(*([0] * 5 if dbias is None else strides(dbias))),
            max_seqlen_k=-1 if i.options.get("max_seqlen_k") is None else i.options["max_seqlen_k"],
            copy_bytes=copy_bytes(self.q, self.k, self.v, out, self.dout), deterministic=0, **self.shape,
        )  # fmt: skip
        size = self.library.flashsci_backward_sm80_fp32_workspace
        size.restype = c.c_int64
        self.workspace = torch.full((size(c.byref(b)) // 4 + 64,), math.nan, device=self.q.device)
        b.workspace = self.workspace.data_ptr()
        assert b.workspace % 256 == 0
        self.backward_params = b

    def backward(self):
        if not hasattr(self, "backward_params"):
            self.prepare_backward(self.inputs.bias_grad)
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = self.library.flashsci_backward_sm80_fp32(c.byref(self.backward_params), stream)
        assert error == 0, f"backward: cudaError {error}"
        found = {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        return found if self.dbias is None else found | {"dbias": self.dbias}


def pool():
    """Variants in fp32 with all that the kernels serve."""
    found = [
        v
        for v in variants(400, ("float32",))
        if not v.dropout
        and not (v.varlen and v.bias)
        and v.head_dim <= MAX_DIM
        and v.head_dim_v <= MAX_DIM
    ]
    return found


MAX_DIM = 256


def check(libraries, count, seed, tensors, seconds):
    start = time.time()
    worst, failures, done = {}, 0, 0
    if seed == 0:
        for name, library in libraries.items():
            for label, inputs in extremes():
                judge, call = Judge(inputs), Call(library, inputs)
                found = call.forward() | (call.backward() if "back" in tensors else {})
                for finding in judge.findings(found):
                    if finding.problem:
                        failures += 1
                        print("FAIL", name, label, finding.problem, flush=True)
                done += 1
    for name, library in libraries.items():
        for case in generate(seed, count, pool(), lengths=ALL_LENGTHS, score_limit=1 << 19):
            if time.time() - start > seconds:
                break
            inputs = make_inputs(case, "cuda")
            for precision in ("tf32x3", "tf32"):
                if precision == "tf32":
                    if done % 3:
                        continue
                    inputs.options["precision"] = "tf32"
                judge = Judge(inputs)
                call = Call(library, inputs, precision)
                found = call.forward()
                if "back" in tensors:
                    found |= call.backward()
                    first = {n: x.clone() for n, x in call.backward().items()}
                    call.backward()
                    different = [n for n, x in first.items() if not torch.equal(x, found[n])]
                    if different:
                        failures += 1
                        print("DIFFER", different, case)
                torch.cuda.synchronize()
                for finding in judge.findings(found):
                    key = f"{precision} {finding.tensor}"
                    if finding.problem:
                        failures += 1
                        if failures < 12:
                            print("FAIL", name, precision, finding.problem, case, flush=True)
                    else:
                        worst[key] = max(worst.get(key, 0.0), *finding.ratios)
            done += 1
    print(f"check: {done} cases, {failures} failures; worst ratio to what is allowed:")
    print("   ", {n: round(r, 2) for n, r in sorted(worst.items())}, flush=True)
    return failures


def extremes():
    """Inputs whose rows differ in size by more than fp16 spans; hidden keys that hold anything."""
    for seed, (dim, seq, kind) in enumerate(
        itertools.product(
            (8, 32, 64, 128, 200), (40, 200), ("hidden", "rows", "tiny", "huge", "columns")
        )
    ):
        g = torch.Generator("cuda").manual_seed(seed)
        rand = lambda *s: torch.randn(*s, device="cuda", generator=g)  # noqa: E731
        q, k, v, dout = (rand(2, 2, seq, dim) for _ in range(4))
        mask = None
        if kind == "hidden":
            mask = torch.rand(2, 1, 1, seq, device="cuda", generator=g) < 0.7
            hidden = ~mask[:, 0, 0]
            for x, size in ((k, 1e30), (v, 1e35)):
                x.transpose(1, 2)[hidden] *= size
        elif kind == "rows":
            for x in (v, dout):
                x *= torch.exp2(torch.randint(-30, 30, (2, 2, seq, 1), device="cuda", generator=g))
        elif kind in ("tiny", "huge"):
            for x, size in ((q, 1e-12), (k, 1e12), (v, 1e-25), (dout, 1e-8)):
                x *= size if kind == "tiny" else 1 / size
        else:
            for x in (v, dout):
                x *= torch.exp2(torch.randint(-10, 10, (dim,), device="cuda", generator=g))
        yield f"{kind} d{dim} s{seq}", Inputs(q, k, v, None, mask, dout)


CASES = {
    "dense-d32": dict(B=4, H=16, S=4096, D=32),
    "dense-d64": dict(B=4, H=16, S=4096, D=64),
    "dense-d64-causal": dict(B=4, H=16, S=4096, D=64, causal=True),
    "dense-d128": dict(B=4, H=8, S=4096, D=128),
    "unimol": dict(B=32, H=64, S=256, D=8, bias=(32, 64, 256, 256)),
    "graphormer": dict(B=64, H=32, S=129, D=24, bias=(64, 32, 129, 129)),
    "triangle-256": dict(B=256, H=4, S=256, D=32, bias=(1, 4, 256, 256), mask=(256, 1, 1, 256)),
    "triangle-384": dict(B=384, H=4, S=384, D=32, bias=(1, 4, 384, 384), mask=(384, 1, 1, 384)),
    "triangle-768": dict(B=768, H=4, S=768, D=32, bias=(1, 4, 768, 768), mask=(768, 1, 1, 768)),
    "pet-md-4096": dict(B=4096, H=8, S=25, D=16, bias=(4096, 1, 1, 25)),
    "pet-train-d16": dict(B=500, H=8, S=25, D=16, bias=(500, 1, 1, 25)),
    "pet-train-d32": dict(B=500, H=8, S=25, D=32, bias=(500, 1, 1, 25)),
    "pet-train-d48": dict(B=500, H=8, S=25, D=48, bias=(500, 1, 1, 25)),
    "pet-train-d80": dict(B=500, H=8, S=25, D=80, bias=(500, 1, 1, 25)),
    "pet-md-70000": dict(B=70000, H=8, S=25, D=16, bias=(70000, 1, 1, 25)),
}


def timing(libraries, names, peers, rounds, tensors):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.backends.cuda.matmul.allow_tf32 = False
    for case in names:
        z = CASES[case]
        g = torch.Generator("cuda").manual_seed(0)
        rand = lambda *s: torch.randn(*s, device="cuda", generator=g)  # noqa: E731
        q, k, v, dout = (rand(z["B"], z["H"], z["S"], z["D"]) for _ in range(4))
        bias = rand(*z["bias"]) if "bias" in z else None
        mask = None
        if "mask" in z:
            mask = torch.arange(z["S"], device="cuda").expand(z["mask"]) < z["S"] - z["S"] // 16
        causal = z.get("causal", False)
        inputs = Inputs(q, k, v, bias, mask, dout, options={"causal": causal})
        runs, expect = {}, None
        if "sdpa" in peers:
            both = bias if mask is None else torch.where(mask, bias, -math.inf)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            if both is not None:
                leaves.append(both.detach().requires_grad_())
            expanded = None if both is None else leaves[3].expand(*q.shape[:-1], z["S"])
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                try:
                    runs["sdpa"] = lambda q=q, k=k, v=v, b=expanded, c=causal: sdpa(
                        q, k, v, b, is_causal=c
                    )
                    expect = runs["sdpa"]().detach()
                    if "back" in tensors:
                        out = sdpa(*leaves[:3], expanded, is_causal=causal)
                        runs["sdpa"] = lambda o=out, x=leaves, d=dout: torch.autograd.grad(
                            o, x, d, retain_graph=True
                        )
                except RuntimeError:
                    del runs["sdpa"]
        if "triton" in peers:
            from flashsci.backends.triton import host

            scalars = (
                -1,
                -1,
                z["D"] ** -0.5,
                0.0,
                -1,
                0 if causal else -1,
                False,
                0.0,
                "default",
                False,
            )
            tensors_ = (q, k, v, bias, mask, None, None, None, None)
            runs["triton"] = lambda t=tensors_, s=scalars: host.forward(*t, *s)
            found = runs["triton"]()
            expect = found[0] if expect is None else expect
            if "back" in tensors:
                runs["triton"] = lambda t=tensors_, f=found, s=scalars, d=dout: host.backward(
                    d, None, *t, *f, *s, 15
                )
        for name, library in libraries.items():
            for precision in ("tf32x3", "tf32"):
                call = Call(library, inputs, precision)
                found = call.forward()["out"]
                short = name + ("" if precision == "tf32x3" else "/tf32")
                if expect is not None and not (found - expect).abs().max() < (
                    1e-5 if "x3" in precision else 1e-2
                ):
                    print("MISMATCH", case, short, (found - expect).abs().max().item())
                runs[short] = call.forward
                if "back" in tensors:
                    call.backward()
                    runs[short] = call.backward
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            times = interleaved(runs, rounds)
        work = (
            (10 if "back" in tensors else 4)
            * z["B"]
            * z["H"]
            * z["S"] ** 2
            * z["D"]
            / (2 if causal else 1)
        )
        print(
            f"{case:16}",
            *(f"{n} {t * 1e3:8.1f} us {work / t * 1e-9:5.1f} TF;" for n, t in times.items()),
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("check", "time"))
    parser.add_argument("libraries", nargs="+", help="paths")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=600, help="stop drawing cases after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-dim", type=int, default=256)
    parser.add_argument("--tensors", default="forward")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--peers", default="sdpa,triton")
    parser.add_argument("--rounds", type=int, default=9)
    a = parser.parse_args()
    MAX_DIM = a.max_dim
    loaded = {os.path.basename(x).split(".")[0]: c.CDLL(os.path.abspath(x)) for x in a.libraries}
    if a.mode == "check":
        sys.exit(check(loaded, a.count, a.seed, a.tensors, a.seconds) != 0)
    timing(loaded, a.cases.split(","), a.peers.split(","), a.rounds, a.tensors)
