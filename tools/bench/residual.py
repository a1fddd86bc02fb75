"""`python -m tools.bench.residual`: times and errors of attention whose scores are a result, and of its peers.

Peers: the parts (flashsci.attention as `auto` serves it, and the scores by baddbmm), the formula in plain
PyTorch as models write it, and the compiled formula. It is a layer among others: each way gets scores, and a
gradient of its own, in its own memory layout. Each way's results and gradients are compared with the formula
in float64 first, on a few members of the batch; a way beyond twice the error of plain PyTorch has no time.
Ways are interleaved (timer.py); forward and backward separately.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

import flashsci
from flashsci import records as records_file
from flashsci.api.residual import plain_scores
from tools.bench.inputs import DTYPES
from tools.bench.measure import environment
from tools.bench.timer import interleave

FEW = 2  # members of the batch on which errors are measured
Way = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cell:
    name: str
    dtype: str
    batch: int
    heads: int
    seq: int
    dim: int

    @property
    def id(self) -> str:
        return f"{self.name}-{self.dtype}-s{self.seq}"

    def bytes(self, backward: bool) -> int:
        """Least bytes moved: bias and scores, backward also dS and the gradient of the scores; q, k, v, out
        and their gradients."""
        size = DTYPES[self.dtype].itemsize
        scores = self.batch * self.heads * self.seq**2
        rows = self.batch * self.heads * self.seq * self.dim
        return size * (3 * scores + 8 * rows if backward else 2 * scores + 4 * rows)


def cells() -> Iterator[Cell]:
    for dtype in ("bf16", "fp32"):
        for atoms in (64, 256, 258):  # 256 atoms between two tokens
            yield Cell("unimol", dtype, 32, 64, atoms, 8)
        yield Cell("realformer", dtype, 16, 12, 512, 64)
        yield Cell("long", dtype, 2, 16, 2048, 128)


def tensors(cell: Cell, device: torch.device) -> list[Tensor]:
    """q, k, v as views of one projection, and a bias with padded keys; all have gradients."""
    random = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=random, device=device)
    dtype = DTYPES[cell.dtype]
    joint = draw(cell.batch, cell.seq, 3, cell.heads, cell.dim).to(dtype)
    bias = draw(cell.batch, cell.heads, cell.seq, cell.seq)
    lengths = torch.linspace(cell.seq // 2, cell.seq, cell.batch, device=device)
    hidden = torch.arange(cell.seq, device=device) >= lengths[:, None]
    bias.masked_fill_(hidden[:, None, None], -torch.inf)
    return [x.requires_grad_() for x in (*joint.permute(2, 0, 3, 1, 4), bias.to(dtype))]


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The formula as models write it; every row sees a key."""
    scores = q * q.shape[-1] ** -0.5 @ k.mT + bias
    return scores.softmax(-1) @ v, scores


def parts(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    out = flashsci.attention(q, k, v, bias=bias)
    return out, plain_scores(q, k, v, bias, q.shape[-1] ** -0.5)


def ways(device: torch.device) -> dict[str, Way]:
    found: dict[str, Way] = {
        "flashsci": flashsci.residual_attention,
        "parts": parts,
        "plain": formula,
    }
    if device.type == "cuda":
        torch.compiler.reset()  # of a case before, whose shapes would count against its limit
        functorch.donated_buffer = False  # backwards are called again
        found["compiled"] = torch.compile(formula, dynamic=False)
    return found


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """A copy of x in the memory layout of another one."""
    return torch.empty_strided(x.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def results(way: Way, given: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """out, scores, dq, dk, dv, dbias."""
    found = way(*given)
    return [*found, *torch.autograd.grad(found, given, gradients)]


def errors(cell: Cell, each: dict[str, Way], given: list[Tensor], gradients: list[Tensor]) -> dict[str, list[float]]:
    """The error of all results in the Euclidean norm, relative to the formula in float64."""
    few = lambda x, dtype: x.detach()[:FEW].to(dtype)  # noqa: E731
    wide, dwide = ([few(x, torch.float64) for x in of] for of in (given, gradients))
    truth = results(formula, [x.requires_grad_() for x in wide], dwide)
    found = {}
    for name, way in each.items():
        inputs = [few(x, x.dtype).requires_grad_() for x in given]
        got = results(way, inputs, [few(x, x.dtype) for x in gradients])
        found[name] = [
            ((a.double() - b)[b.isfinite()].norm() / b[b.isfinite()].norm()).item()
            for a, b in zip(got, truth, strict=True)
        ]
    return found


def measure(cell: Cell, device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """A record for each way and pass."""
    each, given = ways(device), tensors(cell, device)
    gradients = [1e-3 * torch.randn_like(x) for x in formula(*(x.detach() for x in given))]
    found = errors(cell, each, given, gradients)
    floor = 2 * torch.finfo(DTYPES[cell.dtype]).eps
    right = {
        n: w for n, w in each.items() if all(a <= 2 * b + floor for a, b in zip(found[n], found["plain"], strict=True))
    }
    calls, backwards = {}, {}
    for name, way in right.items():
        *rows, bias = (x.detach() for x in given)
        _, scores = way(*rows, bias)
        own = [x.requires_grad_() for x in (*rows, laid_out(bias, scores))]
        calls[name] = partial(way, *own)
        backwards[name] = partial(
            torch.autograd.grad, way(*own), own, [gradients[0], laid_out(gradients[1], scores)], retain_graph=True
        )
    timed = {
        "forward": interleave(calls, device, seconds),
        "backward": interleave(backwards, device, seconds),
    }
    for which, times in timed.items():
        for name in each:
            time = times[name].median if name in times else None
            yield {
                "case": asdict(cell) | {"id": cell.id},
                "pass": which,
                "way": name,
                "us": time and 1e6 * time,
                "gbps": time and cell.bytes(which == "backward") / time / 1e9,
                "errors": found[name],
                "env": environment(device),
            }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.residual", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose id has this in it")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per case and pass")
    parser.add_argument("--batch", type=int, help="of every case, in place of its own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the records here")
    options = parser.parse_args(arguments)
    records: list[dict[str, Any]] = []
    for cell in cells():
        if options.only not in cell.id:
            continue
        cell = replace(cell, batch=options.batch or cell.batch)
        new = list(measure(cell, torch.device(options.device), options.seconds))
        for which in ("forward", "backward"):
            shown = [
                f"{r['way']} " + ("wrong" if r["us"] is None else f"{r['us']:,.0f} us")
                for r in new
                if r["pass"] == which
            ]
            print(f"{cell.id} {which}: {', '.join(shown)}", flush=True)
        worst = [f"{r['way']} {max(r['errors']):.1e}" for r in new[: len(new) // 2]]
        print(f"    largest errors: {', '.join(worst)}", flush=True)
        records += new
        if options.json:
            records_file.write(options.json, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
