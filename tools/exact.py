"""What the cases of the raw launchers share: inputs, attention and its gradients in fp64, bounds, repeats.

Lighter than flashsci.testing.Judge, which could not hold the larger of these cases and has no given lse.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashsci.testing import embed, poisoned_memory
from tools.launchers import Build, Run

DEVICE = "cuda"
WINDOWS = [((-1, -1), False), ((-1, 0), False), ((-1, 0), True), ((100, 0), False),
           ((37, 50), True), ((-1, 300), False), ((64, -1), False)]  # fmt: skip
_seed = 0


def make(shape: Iterable[int], dtype: torch.dtype, layout: str = "bhsd", size: float = 1.0) -> Tensor:  # fmt: skip
    """Normal numbers, other ones at every call, in the middle of NaN; layout "bshd": heads inside rows."""
    global _seed
    _seed += 1
    x = torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(_seed))
    rank = x.dim()
    order = (*range(rank - 3), rank - 2, rank - 3, rank - 1) if layout == "bshd" else None
    return embed((x * size).to(dtype), order)


def _scores(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    lower_right: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores after softcap; and with bias, mask and window."""
    capped = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        capped = softcap * torch.tanh(capped / softcap)
    s = capped if bias is None else capped + bias
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
    return capped, s.masked_fill(~seen, float("-inf"))


def attention(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, Tensor]:
    """out, lse of the options of a launch, in this dtype."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    _, s = _scores(q, k, **options)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return p.to(dtype) @ v, torch.logsumexp(s, -1)


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dtype: torch.dtype,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """dq, dk, dv, and dbias of a bias, of the formulas in this dtype; and of their absolute values (a floor for errors)."""
    group = q.shape[-3] // k.shape[-3]
    q, k, v, dout, out = (x.to(dtype) for x in (q, k, v, dout, out))
    kk, vv = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    capped, s = _scores(q, kk, **options)
    p = torch.exp(s.to(lse.dtype) - lse[..., None]).nan_to_num(0.0, posinf=0.0)
    p = torch.where(lse[..., None] == float("-inf"), 0.0, p).to(dtype)
    dp = dout @ vv.transpose(-1, -2)
    delta = (dout * out).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None].to(dtype)
    softcap, scale = options.get("softcap"), options.get("scale")
    slope = 1 - (capped / softcap) ** 2 if softcap else 1.0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = options.get("bias")

    def fold(x: Tensor) -> Tensor:
        return x.unflatten(-3, (k.shape[-3], group)).sum(-3)

    def products(ds: Tensor, q: Tensor, kk: Tensor, dout: Tensor) -> list[Tensor]:
        found = [
            scale * (ds @ kk),
            fold(scale * (ds.transpose(-1, -2) @ q)),
            fold(p.transpose(-1, -2) @ dout),
        ]
        return found if bias is None else [*found, ds.sum_to_size(bias.shape)]

    of_sizes = p * (dp.abs() + delta.abs()) * slope
    return (
        products(p * (dp - delta) * slope, q, kk, dout),
        products(of_sizes, q.abs(), kk.abs(), dout.abs()),
    )


class Record:
    """Counts cases, prints failures."""

    def __init__(self) -> None:
        self.cases, self.failures, self.worst, self.start = 0, 0, 0.0, time.time()

    def fail(self, name: str, *lines: str) -> None:
        self.failures += 1
        if self.failures < 25:
            print("FAIL", name, *lines, sep="\n    ", flush=True)

    def launch(self, name: str, run: Run) -> bool:
        """Whether it ran; after an error of the device nothing else can."""
        self.cases += 1
        try:
            run()
            torch.cuda.synchronize()
        except RuntimeError as error:
            self.fail(name, str(error))
            if isinstance(error, torch.AcceleratorError):
                raise SystemExit(1) from error
            return False
        return True

    def within(self, name: str, errors: Iterable[tuple[str, Tensor, Tensor, float]]) -> None:
        """Each of (label, found, expected, bound)."""
        lines = []
        for label, found, expected, bound in errors:
            away = (found.double() - expected).abs()
            error, bound = away.max().item(), bound + 1e-30
            self.worst = max(self.worst, error / bound if error else 0.0)
            if not error <= bound:
                bad = (~(away <= bound)).nonzero()
                places = f"first {bad[0].tolist()} last {bad[-1].tolist()}"
                lines.append(
                    f"{label} error {error:.2e} bound {bound:.2e}, {len(bad)} of {found.numel()}, {places}"
                )
        if lines:
            self.fail(name, *lines)

    def repeats(self, name: str, run: Run, results: list[Tensor], count: int) -> None:
        """The same bits every time, over NaN."""
        first = [x.clone() for x in results]
        for _ in range(count):
            for x in results:
                x.fill_(float("nan"))
            run()
            if not all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(first, results, strict=True)):  # fmt: skip
                return self.fail(f"{name}: not repeatable")

    def show(self, what: str) -> None:
        print(
            f"{what}: {self.cases} cases, {self.failures} failures, worst {self.worst:.3f} of its bound "
            f"({time.time() - self.start:.0f} s)",
            flush=True,
        )


def poisoned():
    """Results and workspaces start as NaN (bytes: 0xFF)."""
    return poisoned_memory(cuda_bytes=0)


def bound(baseline: Tensor, expected: Tensor, size: float) -> float:
    """The two-error rule: twice plain PyTorch's error in the same dtype, plus 8 roundings of a size."""
    error = (baseline.double() - expected).abs().nan_to_num(0.0).max().item()
    return 2 * error + 8 * torch.finfo(baseline.dtype).eps * size


def main(about: str, kind: str, check: Any, sections: tuple[str, ...], dims: str) -> int:
    """The command line of the cases of a pass: `check(build, dtype, dim, record)` has a method for each section."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="+", metavar="name=path[@dims]")
    parser.add_argument("--dims", default=dims, help=f"buckets of head dims (default {dims})")
    parser.add_argument("--only", default=",".join(sections), help=f"of {', '.join(sections)}")
    options = parser.parse_args()
    record = Record()
    for build in map(Build, options.builds):
        halves = [t for t in build.dtypes(kind) if t.itemsize == 2]
        buckets = build.dims or [int(x) for x in options.dims.split(",")]
        for dtype, dim in itertools.product(halves, buckets):
            for section in options.only.split(","):
                getattr(check(build, dtype, dim, record), section)()
            record.show(f"{build.name} {dtype} d{dim}")
    return int(record.failures > 0)
