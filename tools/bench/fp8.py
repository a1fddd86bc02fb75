"""`python -m tools.bench.fp8`: attention on 8-bit floats, its time against 16 bits and FlashAttention-3, and its error.

Times are of the attention alone, with inputs that were quantised before. A backend with "+fast" behind its name
(cuda+fast) is called with fp8_accumulate="fast", and with a scale for each head of v, which fast kernels need. A result is judged against the fp64
oracle in a head and 256 queries before it is timed; results that fail have no time. Candidates are
interleaved (timer.py). `--errors` prints the errors of 16-bit inputs that are quantised in each way, as a
table in Markdown; it runs anywhere, without a GPU in Triton's interpreter (TRITON_INTERPRET=1, minutes).
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashsci
from flashsci import records as records_file
from flashsci.testing import FP8Inputs, Judge
from flashsci.testing import Inputs as PlainInputs
from tools.bench import fa3, revision
from tools.bench.candidates import package_of
from tools.bench.inputs import Unsupported
from tools.bench.measure import environment
from tools.bench.peers import first_error_as_reason
from tools.bench.timer import interleave

LENGTHS = (1024, 4096, 16384, 65536)
DIMS = (64, 128, 256)
TOKENS = 16384  # smallest number in a batch
JUDGED = 256  # queries
FAST = "+fast"


@dataclass(frozen=True)
class Cell:
    seq: int = 1024
    dim: int = 128
    causal: bool = False
    heads: int = 16
    per: str = "block"

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.seq)

    @property
    def id(self) -> str:
        return f"fp8-d{self.dim}-{'causal' if self.causal else 'full'}-s{self.seq}"

    def flops(self) -> float:
        """FLOPs of both products."""
        pairs = self.seq * (self.seq + 1) / 2 if self.causal else self.seq**2
        return 4 * self.batch * self.heads * pairs * self.dim


def cells() -> Iterator[Cell]:
    for dim in DIMS:
        for causal in (False, True):
            for seq in LENGTHS:
                yield Cell(seq, dim, causal)


@dataclass
class Problem:
    """q, k, v of a cell in bf16, and quantised."""

    q: Tensor
    k: Tensor
    v: Tensor
    inputs: FP8Inputs

    @functools.cached_property
    def fast(self) -> FP8Inputs:
        """The call with sums of the tensor cores that run over all keys."""
        v, v_scale, _ = flashsci.quantize(self.v, "head")
        options = {"v_scale": v_scale, "fp8_accumulate": "fast"}
        return replace(self.inputs, v=v, options=self.inputs.options | options)

    def of(self, name: str) -> FP8Inputs:
        """The 8-bit inputs of a backend."""
        return self.fast if name.endswith(FAST) else self.inputs


def problem_of(cell: Cell, device: torch.device) -> Problem:
    random = torch.Generator(device).manual_seed(0)
    shape = (cell.batch, cell.heads, cell.seq, cell.dim)
    q, k, v = (torch.randn(shape, generator=random, device=device).bfloat16() for _ in range(3))
    inputs = quantised((q, k, v), cell.per)
    inputs.options["causal"] = cell.causal
    return Problem(q, k, v, inputs)


def quantised(tensors: tuple[Tensor, ...], per: str, smooth: bool = False, rotate: bool = False) -> FP8Inputs:
    """q, k, v in 8 bits; smooth: k, rotate: q and k."""
    found = [
        flashsci.quantize(x, per, smooth=smooth and name == "k", rotate=rotate and name != "v")
        for name, x in zip("qkv", tensors, strict=True)
    ]
    scales: dict[str, Any] = {f"{n}_scale": f.scale for n, f in zip("qkv", found, strict=True)}
    return FP8Inputs(*(f.values for f in found), scales)


def candidates(cell: Cell, x: Problem, names: list[str]) -> dict[str, Callable[[], Tensor]]:
    """The names that can run this call."""
    found: dict[str, Callable[[], Tensor]] = {}
    for name in names:
        eight = x.of(name)
        try:
            if name == "bf16":
                found[name] = partial(flashsci.attention, x.q, x.k, x.v, causal=cell.causal)
            elif name == "cudnn":
                found[name] = _cudnn(cell, x)
            elif name == "fa3":
                found[name] = _fa3(fa3.load(os.environ.get(fa3.VARIABLE, "")), cell, x)
            else:
                package, backend = package_of(name.removesuffix(FAST))
                found[name] = partial(package.attention, eight.q, eight.k, eight.v, **eight.options, backend=backend)
        except Unsupported as reason:
            print(f"{cell.id}: no {name}: {reason}")
    return found


def _cudnn(cell: Cell, x: Problem) -> Callable[[], Tensor]:
    """SDPA in bf16 by cuDNN."""
    if x.q.device.type != "cuda":
        raise Unsupported("it runs on GPUs only")

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(x.q, x.k, x.v, is_causal=cell.causal)

    return call


def _fa3(ops: Any, cell: Cell, x: Problem) -> Callable[[], Tensor]:
    """Its 8-bit forward: one scale for each batch member and head, its only kind. Packed, which all builds
    have."""
    heads = quantised((x.q, x.k, x.v), "head")
    q, k, v = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (heads.q, heads.k, heads.v))
    offsets = torch.arange(cell.batch + 1, dtype=torch.int32, device=q.device) * cell.seq
    options = {f"{n}_descale": heads.options[f"{n}_scale"] for n in "qkv"}
    options |= {"softmax_scale": cell.dim**-0.5, "is_causal": cell.causal, "num_splits": 1}
    options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": cell.seq, "max_seqlen_k": cell.seq}
    options = fa3.neutral(ops.fwd) | options

    def call() -> Tensor:
        out: Tensor = ops.fwd(q, k, v, **options)[0]
        return out.unflatten(0, (cell.batch, cell.seq)).transpose(1, 2)

    return first_error_as_reason(call)  # a build without 8-bit floats


def problems(cell: Cell, x: Problem, name: str, out: Tensor) -> list[str]:
    """The errors in the first head and its last queries. FlashAttention-3 has inputs with other scales: its
    result only has to be near the others."""
    rows = min(cell.seq, JUDGED)
    part = out[:1, :1, -rows:]
    options = {"causal": cell.causal, "align": "lower_right"}
    if name in ("bf16", "cudnn"):
        judge = Judge(PlainInputs(x.q[:1, :1, -rows:], x.k[:1, :1], x.v[:1, :1], options=options))
        found = judge.judge("out", part)
        return [found.problem] if found.problem else []
    inputs = x.of(name)
    wide = inputs.dequantised()
    q, k, v = wide.q[:1, :1, -rows:], wide.k[:1, :1], wide.v[:1, :1]
    if name == "fa3":
        exact = flashsci.attention(*(t.double() for t in (q, k, v)), **options, backend="reference")
        error = (part.double() - exact).norm() / exact.norm()
        return [] if error < 0.2 else [f"out differs by {error:.2f} of itself"]
    # Scales are separate from the rows of q, which begin within a block.
    ones = {f"{n}_scale": inputs.options[f"{n}_scale"] for n in "kv"}
    ones = {n: s if s.dim() == 0 else s[:1, :1] for n, s in ones.items()}
    of_rows = _row_scales(inputs.options["q_scale"], cell.seq)[:1, :1, -rows:]
    options["fp8_accumulate"] = inputs.options.get("fp8_accumulate", "safe")
    judged = _Part(inputs.q[:1, :1, -rows:], inputs.k[:1, :1], inputs.v[:1, :1], options | ones, of_rows)
    return judged.judge().problems({"out": part})


@dataclass
class _Part(FP8Inputs):
    """The error of some queries, whose scales are given by rows."""

    of_rows: Tensor

    def dequantised(self) -> PlainInputs:
        wide = super().dequantised()
        return replace(wide, q=wide.q * self.of_rows[..., None])


def _row_scales(scale: Tensor, rows: int) -> Tensor:
    """``[B, H, rows]`` (or one number) of scales for blocks of 128, for heads or for all."""
    if scale.dim() == 3:
        return scale.repeat_interleave(128, -1)[..., :rows]
    return scale.reshape(*scale.shape, 1) if scale.dim() else scale.reshape(1, 1, 1)


def measure(cell: Cell, names: list[str], device: torch.device, seconds: float) -> list[dict]:
    """A record for each candidate."""
    x = problem_of(cell, device)
    functions: dict[str, Callable[[], object]] = {}
    for name, function in candidates(cell, x, names).items():
        wrong = problems(cell, x, name, function())
        if wrong:
            print(f"{cell.id}: {name} is wrong and not timed: {wrong}")
        else:
            functions[name] = function
    records = []
    for name, time in (interleave(functions, device, seconds) if functions else {}).items():
        rate = cell.flops() / time.median
        records.append(
            {"case": asdict(cell) | {"id": cell.id}, "backend": name, "seconds": asdict(time), "flops_per_second": rate}
        )
        print(f"{cell.id:<32}{name:<10}{1e6 * time.median:12.1f} us{rate / 1e12:10.2f} TFLOP/s")
    return records


def _plain(x: dict[str, Tensor]) -> None:
    """Normal numbers."""


def _entries(x: dict[str, Tensor]) -> None:
    """The distribution of FlashAttention-3's paper: one entry in a thousand is ten times as large."""
    for t in x.values():
        t += 10 * torch.randn_like(t) * (torch.rand_like(t) < 0.001)


def _shared(x: dict[str, Tensor]) -> None:
    """Keys that share large components, in one column of twenty."""
    k = x["k"]
    k += 30 * torch.randn_like(k[..., :1, :]) * (torch.rand_like(k[..., :1, :]) < 0.05)


def _columns(x: dict[str, Tensor]) -> None:
    """Keys with columns that are twenty times as large, one in thirty."""
    k = x["k"]
    k *= torch.where(torch.rand_like(k[..., :1, :]) < 0.03, 20.0, 1.0)


KINDS = {
    "normal": _plain,
    "large entries": _entries,
    "keys with a common part": _shared,
    "large columns of k": _columns,
}


def errors(
    kernel: str, seq: int, dim: int, heads: int, device: torch.device, kinds: tuple[str, ...] = tuple(KINDS)
) -> list[dict]:
    """Relative errors of out, for 16-bit inputs that are quantised in each way: of a kernel, and of the
    inputs' rounding alone (the reference on them); and of plain bf16."""
    records = []
    for kind in kinds:
        torch.manual_seed(0)
        x = {n: torch.randn(heads, seq, dim, device=device) for n in "qkv"}
        KINDS[kind](x)
        tensors = tuple(t.bfloat16() for t in x.values())
        exact = flashsci.attention(*(t.double() for t in tensors), backend="reference")

        def error(out: Tensor, exact: Tensor = exact) -> float:
            return ((out.double() - exact).norm() / exact.norm()).item()

        plain = error(flashsci.attention(*tensors, backend="reference"))
        for per in ("tensor", "head", "block"):
            for smooth, rotate in ((False, False), (True, False), (False, True), (True, True)):
                inputs = quantised(tensors, per, smooth, rotate)
                found = {b: error(inputs.evaluate(b)["out"]) for b in (kernel, "reference")}
                records.append({"inputs": kind, "per": per, "smooth": smooth, "rotate": rotate, "bf16": plain,
                                "kernel": found[kernel], "rounded inputs": found["reference"]})  # fmt: skip
    return records


def table(records: list[dict]) -> str:
    """A table in Markdown: a row for each kind of inputs and scale, a column for each treatment."""
    lines = [
        "| inputs | scales | bf16 | as they are | smooth | rotate | both |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in range(0, len(records), 4):
        of_row = records[row : row + 4]
        figures = " | ".join(f"{r['kernel']:.3f}" for r in of_row)
        first = of_row[0]
        lines.append(f"| {first['inputs']} | {first['per']} | {first['bf16']:.4f} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.fp8", description=__doc__)
    parser.add_argument("--backends", default="triton,bf16,cudnn,fa3", help="comma-separated")
    parser.add_argument("--base", help="another revision, a folder or a commit: its backends are named cuda@base")
    parser.add_argument("--case", default="", help="only cases whose name has this")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    parser.add_argument("--json", type=Path, help="where the records go")
    parser.add_argument("--errors", action="store_true", help="the table of errors instead")
    parser.add_argument("--seq", type=int, default=1024, help="of the table")
    parser.add_argument("--heads", type=int, default=2, help="of the table")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.base:
        revision.load(options.base, kernels=device.type == "cuda")
    records = []
    if options.errors:
        records = errors("triton", options.seq, 128, options.heads, device)
        print(table(records))
    else:
        for cell in cells():
            if options.case in cell.id:
                records += measure(cell, options.backends.split(","), device, options.seconds)
    if options.json:
        found = {"environment": environment(device), "records": records}
        records_file.write(options.json, found)


if __name__ == "__main__":
    main()
