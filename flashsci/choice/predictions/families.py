"""Families of kernels whose times one formula gives, and the family that would compute one pass of a call."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashsci.call.problem import Problem

#: Head dims for which kernels are compiled: the smallest that holds both serves a call, unless a family pads them apart.
OF_16_BITS, OF_32_BITS, OF_HOPPER = (32, 64, 96, 128, 192, 256), (16, 32, 64, 128, 256), (64, 96, 128, 192, 256)
OF_DECODING, OF_SMALL = (64, 128, 256), (16, 32, 64)


class Tiling(NamedTuple):
    """The sizes to which a family rounds lengths and head dims up."""

    queries: int
    keys: int
    dims: int | tuple[int, ...] = (
        16  # a multiple of it, or the first that holds a head dim; 0: a power of two, or the sum of two
    )
    fixed: bool = True  # else shorter lengths get shorter tiles, down to 16
    grid: str = "queries"  # programs are tiles of "queries" or of "keys", "heads" or "split" over all processors
    skips: bool = True  # tiles that a band hides
    apart: bool = True  # q and v may have different head dims


#: By the folder of csrc, or the kernels of a backend; forward kernels first.
TILINGS = {
    "sm80/small": Tiling(16, 16, OF_SMALL, grid="heads", apart=False),
    "sm80/fwd": Tiling(64, 64, OF_16_BITS, apart=False),
    "sm80/fwd_fp32": Tiling(64, 32, OF_32_BITS, apart=False),
    "sm90/fwd": Tiling(128, 128, OF_HOPPER, apart=False),
    "sm90/decode": Tiling(16, 64, OF_DECODING, grid="split", apart=False),
    "sm90/triangle_fwd": Tiling(128, 64),
    "sm90/pair": Tiling(32, 32, fixed=False),
    "triton/dense": Tiling(128, 64, 0, fixed=False),
    "triton/wide": Tiling(64, 64, 32, fixed=False, skips=False),
    "triton/wide/long": Tiling(64, 64, 32, fixed=False, grid="split", skips=False),
    "sdpa/plain": Tiling(128, 128, 32),
    "sdpa/decode": Tiling(16, 64, 32, grid="split"),
    "sdpa/efficient": Tiling(64, 64, 32),
    "sdpa/masked": Tiling(64, 64, 32, skips=False),
    "eager": Tiling(16, 16, grid="split", skips=False),
    "sm80/bwd": Tiling(64, 64, OF_16_BITS, grid="keys", apart=False),
    "sm80/bwd_fp32": Tiling(32, 32, OF_32_BITS, grid="keys", apart=False),
    "sm80/bwd_fp32/short": Tiling(32, 32, OF_32_BITS, grid="keys", apart=False),
    "sm90/bwd": Tiling(64, 128, OF_HOPPER, grid="keys"),
    "sm90/triangle_bwd": Tiling(64, 128, grid="keys"),
    "triton/small": Tiling(32, 32, 0, grid="heads"),
}
#: Kernels of the library that prepare operands, before those of a family.
PREPARING = "sm80/weights"
#: Head dims and lengths of Triton's backward of a whole sequence by one program (flashsci/backends/triton/tilings.py).
SMALL_LENGTH, SMALL_WIDTH = 64, 128
#: Up to so many queries SDPA's kernels divide the keys among processors.
FEW_QUERIES = 16
#: Products of whole heads in fp32 begin beyond this head dim; sums over more keys than LONG are divided among processors.
WIDE, LONG = 128, 1024


def bits_of(p: Problem, backend: str) -> int:
    """Bits of the dtype in which a backend multiplies. SDPA takes a bias of more bits by rows of as many."""
    wider = p.bias_dtype.itemsize if backend == "sdpa" and p.bias_dtype is not None else 0
    return 8 * max(p.dtype.itemsize, wider)


def padded(dim: int, dims: int | tuple[int, ...]) -> int:
    """A head dim as a family computes it, by :attr:`Tiling.dims`."""
    if isinstance(dims, tuple):
        return next((size for size in dims if size >= dim), dim)
    if dims:
        return -(-dim // dims) * dims
    dim = max(16, -(-dim // 16) * 16)
    power = 1 << (dim.bit_length() - 1)
    rest = dim - power
    return power if not rest else power + (1 << (rest - 1).bit_length())


def head_dims(p: Problem, tiling: Tiling) -> tuple[int, int]:
    """The head dims of q and v as a family computes them."""
    dims = p.head_dim, p.head_dim_v
    first, second = dims if tiling.apart else (max(dims), max(dims))
    return padded(first, tiling.dims), padded(second, tiling.dims)


def _of_triton(p: Problem, backward: bool) -> str:
    widest, longest = max(p.head_dim, p.head_dim_v), max(p.seq_q or 0, p.seq_k or 0)
    if p.dtype == torch.float32 and widest > WIDE and p.few_scores:
        return "triton/wide/long" if (p.seq_k or 0) > LONG else "triton/wide"
    width = max(padded(p.head_dim, 0), padded(p.head_dim_v, 0))
    fits = longest <= SMALL_LENGTH and width <= (SMALL_WIDTH if p.dtype.itemsize == 2 else SMALL_WIDTH // 2)
    return "triton/small" if backward and fits else "triton/dense"


def _of_sdpa(p: Problem) -> str | None:
    banded = p.window_left >= 0 or p.window_right > 0 or (p.window_right == 0 and p.lower_right)
    masked = p.bias or p.mask or banded
    uneven = p.head_dim != p.head_dim_v
    if p.inner_heads or (p.heads_q != p.heads_k and (masked or uneven or p.dtype == torch.float32)):
        return None  # torch copies the bias, or expands the heads, and may take plain math
    if masked:
        return "sdpa/masked"
    if uneven or p.dtype == torch.float32:
        return "sdpa/efficient"
    return "sdpa/decode" if (p.seq_q or 0) <= FEW_QUERIES else "sdpa/plain"


def kernels_of(p: Problem, backward: bool) -> tuple[str, ...]:
    """The library's kernels of a pass; () if it has none or is not here."""
    from flashsci.backends.cuda.of_problem import kernels

    return kernels(p, backward)


class Family(NamedTuple):
    """Kernels with one formula, and the parts of a call that its name does not say."""

    name: str  # one of TILINGS
    text: str  # the name with pass and bits, by which constants are found
    launches: int = 1
    sums: bool = False  # a kernel of its own sums the gradient of the bias


def _of_cuda(p: Problem, backward: bool) -> tuple[str | None, int, bool]:
    kernels = kernels_of(p, backward)
    if not kernels:
        return None, 0, False
    folder = next(kernel for kernel in kernels if not kernel.startswith(PREPARING)).rpartition("/")[0]
    short = any("/backward_short" in kernel for kernel in kernels)
    sums = any("dbias" in kernel for kernel in kernels)
    return f"{folder}/short" if short else folder, len(kernels), sums


def family_of(p: Problem, backend: str, backward: bool) -> Family | None:
    """The family of a pass; None if no formula describes such a call."""
    if p.varlen or p.paged or p.batch is None or p.seq_q is None or p.seq_k is None or p.dtype.itemsize == 1:
        return None
    if math.prod((*p.batch, p.seq_q, p.seq_k)) == 0:
        return None
    launches, sums = 1, False
    name: str | None = backend
    if backend == "cuda":
        name, launches, sums = _of_cuda(p, backward)
    elif backend == "triton":
        name, sums = _of_triton(p, backward), p.bias_summed
    elif backend == "sdpa":
        name, sums = _of_sdpa(p), p.bias_grad
    if name not in TILINGS:
        return None
    text = f"{name} {'backward' if backward else 'forward'}, {bits_of(p, backend)} bits"
    return Family(name, text, launches, sums)
