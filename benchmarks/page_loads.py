"""`python -m benchmarks.page_loads`: how fast Hopper reads pages of a KV cache, by what a CTA asks for at a time.

The roof of paged attention, without attention: page_loads.cu reads a cache as vLLM has it (16 bits, head dim 128, 8 heads, pages of
16 rows, K and V in one row) in an order of pages that looks random, and computes nothing. What a pattern has read is checked by the
sum of all words. Patterns are interleaved with each other and with a copy of as many bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.timer import interleave

SOURCE = Path(__file__).with_suffix(".cu")
BY = ("boxes", "rows", "pieces")
PROMOTIONS = {"none": 0, "64": 1, "128": 2, "256": 3}


class Pattern(NamedTuple):
    """A line has 128 bytes: a head of K has two in a row of the cache, and two of V follow."""

    name: str
    by: str  # TMA boxes, "cp.async.bulk" of rows, or "cp.async" of 16 bytes
    lines: int  # of a copy
    copy_heads: int
    rows: int
    heads: int  # that a CTA reads, 64 / heads rows in a stage of 32 KiB


PATTERNS = (
    Pattern("a line of 16 rows: the kernels of csrc/sm90/paged", "boxes", 1, 1, 16, 1),
    Pattern("K or V of 16 rows", "boxes", 2, 1, 16, 1),
    Pattern("K and V of 16 rows", "boxes", 4, 1, 16, 1),
    Pattern("K or V of 16 rows, 2 heads", "boxes", 2, 2, 16, 2),
    Pattern("a line of 16 rows, 4 heads", "boxes", 1, 4, 16, 4),
    Pattern("K or V of 16 rows, 4 heads", "boxes", 2, 4, 16, 4),
    Pattern("K and V of 16 rows, 4 heads", "boxes", 4, 4, 16, 4),
    Pattern("K and V of 8 rows, 8 heads", "boxes", 4, 8, 8, 8),
    Pattern("rows of K or V", "rows", 2, 1, 1, 1),
    Pattern("rows of K and V", "rows", 4, 1, 1, 1),
    Pattern("16 bytes of K or V: FlashAttention-3", "pieces", 2, 1, 1, 1),
)


def library(path: Path) -> ctypes.CDLL:
    """The compiled kernels; compiled now, if they are not there."""
    if not path.exists():
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise SystemExit("no nvcc here: compile benchmarks/page_loads.cu elsewhere, and name the result by --library")
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = ("-std=c++17", "-O3", "-arch=sm_90a", "-shared", "-Xcompiler", "-fPIC")
        subprocess.run([nvcc, *flags, "-o", str(path), str(SOURCE)], check=True)
    found = ctypes.CDLL(str(path))
    integers = (ctypes.c_int,) * 8
    found.read_pages.argtypes = (ctypes.c_int, ctypes.c_void_p, *integers, ctypes.c_void_p, ctypes.c_void_p)  # fmt: skip
    return found


def reader(
    read: Callable[..., int], cache: torch.Tensor, pattern: Pattern, promotion: str, stages: int, ctas: int
) -> Callable[[torch.Tensor | None], None]:
    """What reads the cache once; given a place for it, adds up what it has read."""
    log_pages = cache.shape[0].bit_length() - 1

    def run(total: torch.Tensor | None = None) -> None:
        code = read(
            BY.index(pattern.by), cache.data_ptr(), log_pages, pattern.lines, pattern.copy_heads, pattern.rows, pattern.heads,
            PROMOTIONS[promotion], stages, ctas, None if total is None else total.data_ptr(), torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"{pattern.name}: CUDA error {code}")

    return run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_loads", description=__doc__)
    parser.add_argument("--pages", type=int, default=17, help="2 to this power of 64 KiB each")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 5], help="of 32 KiB each; 6 at most")
    parser.add_argument("--ctas", type=int, nargs="+", default=[128])
    parser.add_argument("--promotions", nargs="+", choices=PROMOTIONS, default=["none", "128"])
    parser.add_argument("--library", type=Path, default=Path("build/page_loads.so"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("torch sees no GPU of compute capability 9 here")
    device = torch.device("cuda")
    cache = torch.randint(-(1 << 31), 1 << 31, (1 << options.pages, 16 * 8 * 4 * 32), dtype=torch.int32, device=device)  # fmt: skip
    wanted = int(cache.sum()) % (1 << 32)
    read = library(options.library).read_pages
    functions: dict[str, Callable[[], None]] = {}
    forms = product(PATTERNS, options.promotions, options.stages, options.ctas)
    for pattern, promotion, stages, ctas in forms:
        if pattern.by != "boxes" and promotion != options.promotions[0]:
            continue
        run = reader(read, cache, pattern, promotion, stages, ctas)
        total = torch.zeros((), dtype=torch.int32, device=device)
        run(total)
        found = int(total) % (1 << 32)
        name = f"{pattern.name} | {promotion if pattern.by == 'boxes' else '-'} | {stages} | {ctas}"
        if found == wanted:
            functions[name] = run
        else:
            print(f"{name}: not timed, it read something else ({found}, {wanted})")
    half = torch.empty(cache.numel() * 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(half)
    functions["copy | - | - | -"] = partial(target.copy_, half)
    times = interleave(functions, device, options.seconds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {cache.numel() * 4 / 1e9:.2f} GB")
    print("| a copy takes | L2 promotion | stages | CTAs | GB/s |\n|---|---|---|---|---|")
    for name, time in sorted(times.items(), key=lambda item: item[1].median):
        print(f"| {name} | {cache.numel() * 4 / 1e9 / time.median:.0f} |")
    return int(len(functions) == 1)


if __name__ == "__main__":
    sys.exit(main())
