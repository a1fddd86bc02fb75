"""`python -m tools.bench.fp8_sums`: what sums of a tensor core that keeps 14 bits do to attention on 8-bit floats.

A model on the CPU, in fp64, of the options "safe" and "fast" of fp8_accumulate, as a table in Markdown. A step of the
tensor core adds 32 products to a sum: all are cut, towards zero, to 14 bits below the largest of them, and so is the
new sum. That is the model of Hopper in the literature (docs/guide/fp8.md has the sources); no GPU takes part.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

BITS = 14  # that a sum keeps
STEP = 32  # products of a step
BLOCK = 128  # keys of a block
LARGEST, GROWTH = 8.0, 0.75  # log2 of P at the offset of a row; its growth until the offset follows
LENGTHS = (1024, 4096, 16384, 65536, 131072)


def cut(x: Tensor, largest: Tensor) -> Tensor:
    """x without the bits that a sum with this largest part does not keep."""
    step = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - BITS)
    return torch.trunc(x / step) * step


def add(total: Tensor, products: Tensor) -> Tensor:
    """The sum of a step. total: ``[...]``, products: ``[..., STEP]``."""
    parts = torch.cat([total[..., None], products], -1)
    found = cut(parts, parts.abs().amax(-1, keepdim=True)).sum(-1)
    return cut(found, found.abs())


def product(a: Tensor, b: Tensor, longest: int) -> Tensor:
    """``a [R, K] @ b [K, C]``, in sums of at most ``longest`` products, which are added exactly."""
    total = a.new_zeros(a.shape[0], b.shape[1])
    for first in range(0, a.shape[1], longest):
        part = torch.zeros_like(total)
        for at in range(first, min(first + longest, a.shape[1]), STEP):
            part = add(part, a[:, None, at : at + STEP] * b[at : at + STEP].T)
        total += part
    return total


def attention(q: Tensor, k: Tensor, v: Tensor, fast: bool) -> Tensor:
    """out of q ``[R, D]``, k ``[S, D]``, v ``[S, Dv]``, numbers of e4m3 in fp64, as the kernel for Hopper computes it."""
    factor = q.shape[1] ** -0.5 * torch.tensor(torch.e).log2()
    out, sums = q.new_zeros(q.shape[0], v.shape[1]), q.new_zeros(q.shape[0], 1)
    offset = q.new_full((q.shape[0], 1), -1e30)
    for first in range(k.shape[0] - BLOCK, -1, -BLOCK):
        keys, values = k[first : first + BLOCK], v[first : first + BLOCK]
        s = factor * product(q, keys.T, q.shape[1] if fast else 128)
        top = s.amax(1, keepdim=True) - LARGEST
        following = torch.where(top - offset > GROWTH, top, offset)
        alpha = torch.exp2(offset - following)
        out, sums, offset = out * alpha, sums * alpha, following
        p = torch.exp2(s - offset).clamp(max=448).to(torch.float8_e4m3fn).double()
        sums += product(p, torch.ones_like(values[:, :1]), BLOCK)
        if fast:
            for at in range(0, BLOCK, STEP):
                out = add(out, p[:, None, at : at + STEP] * values[at : at + STEP].T)
        else:
            out += product(p, values, BLOCK)
    return out / sums


def errors(keys: int, mean: float, rows: int = 8, dim: int = 256, columns: int = 32) -> list[float]:
    """Norms of the errors of "safe" and "fast" over that of out, against the same 8-bit numbers in fp64."""
    random = torch.Generator().manual_seed(keys)
    shapes = (rows, dim), (keys, dim), (keys, columns)
    q, k, v = (torch.randn(shape, generator=random) for shape in shapes)
    v += mean
    q, k, v = ((x * (448 / x.abs().max())).to(torch.float8_e4m3fn).double() * (x.abs().max() / 448) for x in (q, k, v))
    exact = torch.softmax(q @ k.T * dim**-0.5, 1) @ v
    return [((attention(q, k, v, fast) - exact).norm() / exact.norm()).item() for fast in (False, True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.fp8_sums", description=__doc__)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="comma-separated numbers of keys")
    lengths = [int(n) for n in parser.parse_args().lengths.split(",")]
    print("| keys | normal values, safe | fast | values of mean 1, safe | fast |")
    print("|---|---|---|---|---|")
    for keys in lengths:
        found = [f"{x:.4f}" for mean in (0.0, 1.0) for x in errors(keys, mean)]
        print(f"| {keys:,} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
