"""`python -m tools.bench.page_loads`: Hopper's speed of reading a KV cache, by the size of a CTA's requests.

This is the upper bound of decoding: page_loads.cu reads 16 bits of head dim 128, 8 heads, and computes
nothing. The cache is paged as in vLLM (pages of 16 rows, K and V in one row) with pages in pseudo-random
order, or dense K and V. The sum of all words checks that a pattern has read everything. All patterns are
interleaved with a copy of the same number of bytes.
"""

from __future__ import annotations

import argparse
import ctypes as c
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch

from tools.bench.timer import interleave

SOURCE = Path(__file__).with_suffix(".cu")
BY = ("boxes", "rows", "pieces")  # TMA's, "cp.async.bulk", "cp.async" of 16 bytes
PROMOTIONS = {"none": 0, "64": 1, "128": 2, "256": 3}
LINE = 128  # bytes: half a row of K or V of a head
STAGE, LOADERS = 32768, 128  # bytes; threads, a copy each


class Layout(c.Structure):
    _fields_ = [(n, c.c_int32) for n in ("lines", "heads", "page_rows", "log_pages", "shuffled")]
    _fields_ += [(n, c.c_int64) for n in ("head", "row", "page")]


class Pattern(c.Structure):
    """The size of a copy, and the heads that a CTA reads."""

    _fields_ = [(n, c.c_int32) for n in ("lines", "copy_heads", "rows", "heads")]


def paged(log_rows: int) -> Layout:
    """Neighbouring heads of a row, for K and V each: four lines."""
    return Layout(4, 8, 16, log_rows - 4, True, 4 * LINE, 8 * 4 * LINE, 16 * 8 * 4 * LINE)


def dense(log_rows: int) -> Layout:
    """Rows of a head one after the other; heads of K and of V, two lines each."""
    return Layout(2, 16, 64, log_rows - 6, False, (1 << log_rows) * 2 * LINE, 2 * LINE, 64 * 2 * LINE)


PATTERNS = {
    paged: {
        "a line of 16 rows, as csrc/sm90/paged": ("boxes", Pattern(1, 1, 16, 1)),
        "K or V of 16 rows": ("boxes", Pattern(2, 1, 16, 1)),
        "K and V of 16 rows": ("boxes", Pattern(4, 1, 16, 1)),
        "K or V of 16 rows, 2 heads": ("boxes", Pattern(2, 2, 16, 2)),
        "a line of 16 rows, 4 heads": ("boxes", Pattern(1, 4, 16, 4)),
        "K or V of 16 rows, 4 heads": ("boxes", Pattern(2, 4, 16, 4)),
        "K and V of 16 rows, 4 heads": ("boxes", Pattern(4, 4, 16, 4)),
        "K and V of 8 rows, 8 heads": ("boxes", Pattern(4, 8, 8, 8)),
        "K or V of a row": ("rows", Pattern(2, 1, 1, 1)),
        "K and V of a row": ("rows", Pattern(4, 1, 1, 1)),
        "16 bytes, as FlashAttention-3": ("pieces", Pattern(2, 1, 1, 1)),
    },
    dense: {
        "a line of 64 rows, as csrc/sm90/decode": ("boxes", Pattern(1, 1, 64, 1)),
        "64 rows": ("boxes", Pattern(2, 1, 64, 1)),
        "16 rows, not in boxes": ("rows", Pattern(2, 1, 16, 1)),
        "16 bytes": ("pieces", Pattern(2, 1, 1, 1)),
    },
}


def library(path: Path) -> c.CDLL:
    """The compiled kernels; compiled now if there is no library yet."""
    if not path.exists():
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise SystemExit(f"no nvcc here: compile {SOURCE} elsewhere, and name the result by --library")
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = ("-std=c++17", "-O3", "-arch=sm_90a", "-shared", "-Xcompiler", "-fPIC")
        subprocess.run([nvcc, *flags, "-o", str(path), str(SOURCE)], check=True)
    found = c.CDLL(str(path))
    found.read_pages.argtypes = (
        c.c_int, c.c_void_p, c.POINTER(Layout), c.POINTER(Pattern), *(c.c_int,) * 3, c.c_void_p, c.c_void_p,
    )  # fmt: skip
    return found


def reader(
    read: Callable[..., int], cache: torch.Tensor, layout: Layout, by: str, pattern: Pattern, promotion: str,
    stages: int, ctas: int,
) -> Callable[..., None]:  # fmt: skip
    """A function that reads the cache once; given an output, it stores the sum."""

    def run(total: torch.Tensor | None = None) -> None:
        code = read(
            BY.index(by), cache.data_ptr(), c.byref(layout), c.byref(pattern), PROMOTIONS[promotion], stages, ctas,
            None if total is None else total.data_ptr(), torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"CUDA error {code}")

    return run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.page_loads", description=__doc__)
    parser.add_argument("--rows", type=int, default=21, help="2 to this power, of 4 KiB each: of all sequences")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 5], help="of 32 KiB; at most 6")
    parser.add_argument("--ctas", type=int, nargs="+", default=[128], help="of up to 6 stages in all on an SM")
    parser.add_argument("--promotions", nargs="+", choices=PROMOTIONS, default=["none", "128"])
    parser.add_argument("--library", type=Path, default=Path("build/page_loads.so"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("torch sees no GPU of compute capability 9 here")
    device = torch.device("cuda")
    cache = torch.randint(-(1 << 31), 1 << 31, (1 << options.rows, 1024), dtype=torch.int32, device=device)
    wanted = int(cache.sum()) % (1 << 32)
    read = library(options.library).read_pages
    functions: dict[str, Callable[[], object]] = {}
    for place, patterns in PATTERNS.items():
        forms = product(patterns.items(), options.promotions, options.stages, options.ctas)
        for (name, (by, pattern)), promotion, stages, ctas in forms:
            if by != "boxes" and promotion != options.promotions[0]:
                continue
            run = reader(read, cache, place(options.rows), by, pattern, promotion, stages, ctas)
            total = torch.zeros((), dtype=torch.int32, device=device)
            run(total)
            title = f"{place.__name__}: {name} | {promotion if by == 'boxes' else '-'} | {stages} | {ctas}"
            if int(total) % (1 << 32) == wanted:
                functions[title] = run
            else:
                print(f"{title}: not timed, it has read something else")
    half = torch.empty(cache.numel() * 2, dtype=torch.uint8, device=device)
    functions["copy | - | - | -"] = partial(torch.empty_like(half).copy_, half)
    times = interleave(functions, device, options.seconds)
    gigabytes = cache.numel() * 4 / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {gigabytes:.2f} GB")
    print("| a copy takes | L2 promotion | stages | CTAs | GB/s |\n|---|---|---|---|---|")
    for name, time in sorted(times.items(), key=lambda item: item[1].median):
        print(f"| {name} | {gigabytes / time.median:.0f} |")
    return int(len(functions) == 1)


if __name__ == "__main__":
    sys.exit(main())
