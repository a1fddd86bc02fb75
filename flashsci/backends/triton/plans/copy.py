"""Copies of a bias or mask, in another order of its dims or in rows of whole 16 bytes: the dims that can be merged, and tiles."""

import functools
import math

import torch
import triton

from flashsci.backends.triton.kernels.copy_bias import (
    CopySide,
    CopySizes,
    CopyStrides,
    copy_bias_kernel,
)
from flashsci.backends.triton.kernels.copy_rows import RowSizes, RowStrides, copy_rows_kernel
from flashsci.backends.triton.launcher import Launch, device_of

#: Limits of a tile of copy_bias.py: its bytes, and the most elements of its shorter side.
COPIED_BYTES, COPIED_SIDE = 4096, 64
#: A tile of copy_rows.py. With more rows at a time memory gives a half of its rate.
ROWS, WORDS = 4, 128


def copy_dims(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(size, stride of the source, stride of the target) of each dim of a copy, as the kernel takes them.

    First three outer dims, then the dim with neighbours in the source, then the dim with neighbours in the target.
    Dims that follow each other in both tensors are merged: rows and keys, for example.
    """
    dims: list[tuple[int, int, int]] = []
    for size, read, written in sorted(zip(shape, source, target, strict=True), key=lambda dim: -dim[2]):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * read, size * written):
            size *= dims.pop()[0]
        dims.append((size, read, written))
    inner = dims.pop() if dims else (1, 0, 0)
    other = min(dims, key=lambda dim: dim[1], default=(1, 0, 0))
    outer = [dim for dim in dims if dim is not other]
    return [(1, 0, 0)] * (3 - len(outer)) + [*outer, other, inner]


def copy_sides(dims: list[tuple[int, int, int]], itemsize: int) -> tuple[CopySide, CopySide]:
    """Tiles along the dim that is read and the one that is written; the shorter dim is one tile if it is not long."""
    *outer, (read, _, read_apart), (written, written_apart, _) = dims
    widths = triton.next_power_of_2(read), triton.next_power_of_2(written)
    elements = COPIED_BYTES // itemsize
    side = min(*widths, COPIED_SIDE)
    others = [min(width, elements // side) for width in widths]
    others[widths.index(min(widths))] = side

    def made(size: int, tile: int, apart: list[int]) -> CopySide:
        whole = size % tile == 0
        found = math.gcd(16 // itemsize, *apart, 0 if whole else size)
        return CopySide(tile, found, whole, size <= tile)

    return (
        made(read, others[0], [written_apart, *(dim[1] for dim in outer)]),
        made(written, others[1], [read_apart, *(dim[2] for dim in outer)]),
    )


def _are_rows(dims: list[tuple[int, int, int]], itemsize: int) -> bool:
    """Whether keys are neighbours in both tensors."""
    keys, *apart = dims[-1]
    return apart == [1, 1] and keys > 1 and itemsize < 8


def _of_rows(dims: list[tuple[int, int, int]], itemsize: int, padded: bool) -> Launch:
    """The launch that copies rows of keys. padded: as for :func:`copied`."""
    sizes, sources, targets = zip(*dims, strict=True)
    outer, words = math.prod(sizes[:3]), -(-sizes[4] * itemsize // 8)
    last = sum((size - 1) * stride for size, stride in zip(sizes, sources, strict=True))
    return Launch(copy_rows_kernel, outer * -(-sizes[3] // ROWS) * -(-words // WORDS), {
        "strides": RowStrides(sources[:4], targets[:4]), "sizes": RowSizes(*sizes[1:], last), "BYTES": itemsize,
        "ROWS": ROWS, "WORDS": WORDS, "OUTER": outer > 1, "WHOLE": padded, "num_warps": 4, "num_stages": 1,
    })  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _copy(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    source: tuple[int, ...],
    target: tuple[int, ...],
    padded: bool,
) -> Launch:
    """The launch that copies a bias from the first strides to the second."""
    dims = copy_dims(shape, source, target)
    sizes, sources, targets = zip(*dims, strict=True)
    if _are_rows(dims, dtype.itemsize):
        return _of_rows(dims, dtype.itemsize, padded)
    of_read, of_written = copy_sides(dims, dtype.itemsize)
    outer = math.prod(sizes[:3])
    # Launched before the kernel before it has ended: a launch after that takes 0.7 us, of 3.7 for 19 MB.
    early = (device_of(device).capability or (0, 0)) >= (9, 0)
    programs = outer * -(-sizes[3] // of_read.TILE) * -(-sizes[4] // of_written.TILE)
    return Launch(copy_bias_kernel, programs, {
        "strides": CopyStrides(sources, targets), "sizes": CopySizes(*sizes[1:]), "READ": of_read, "WRITTEN": of_written,
        "OUTER": outer > 1, "EARLY": early, "num_warps": 2, "num_stages": 1,
    } | ({"launch_pdl": True} if early else {}))  # fmt: skip


def copied(source: torch.Tensor, target: torch.Tensor, padded: bool = False) -> torch.Tensor:
    """``target``, of source's shape and up to 5 dims, filled with the values of source.

    padded: its rows are whole multiples of 8 bytes, with room behind the keys that may be filled with anything.
    """
    if source.numel():
        kind = source.device, source.dtype, tuple(source.shape), source.stride(), target.stride()
        _copy(*kind, padded)(source, target)
    return target
