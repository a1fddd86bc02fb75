"""The op that makes the table of tiles of a mask, and its launches."""

import functools
import math

import torch
import triton

from flashsci.backends.triton.kernels.mask_tiles import (
    MaskSizes,
    MaskStrides,
    classify_kernel,
    list_kernel,
)
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.strides import plane_strides
from flashsci.call.mask_tiles import table_length, tile_rows, tiles, words
from flashsci.call.op_checks import need
from flashsci.call.row_pitch import once
from flashsci.call.schemas import LIBRARY, define_op


def bytes_at_once(strides: tuple[int, ...], keys: int) -> int:
    """The bytes of a mask that one load may take, up to 16: all rows begin and end at multiples of them, or their pitch
    holds the last load. 0: keys are not neighbours in memory."""
    if strides[4] != 1:
        return 0
    step = math.gcd(16, *strides[:4])
    return step if strides[3] > keys else math.gcd(step, keys)


@functools.lru_cache(maxsize=1024)
def launches(device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Launch, Launch]:
    """The two launches for masks of up to three dims before queries and keys."""
    lead, rows, keys = (1, 1, 1, *shape[:-2])[-3:], *shape[-2:]
    tiles_q, tiles_k = tiles(rows), tiles(keys)
    strides = plane_strides(shape, stride, False)
    vector = bytes_at_once(strides, keys)
    blocks = math.prod(lead)
    sizes = MaskSizes(
        rows,
        keys,
        tiles_q,
        tiles_k,
        lead[1],
        lead[2],
        table_length(rows, keys),
        words(rows, keys),
        tile_rows(rows),
    )
    classify = Launch(
        classify_kernel,
        blocks * tiles_q * tiles_k,
        {"strides": MaskStrides(*strides), "sizes": sizes, "VECTOR": vector, "num_warps": 8 if vector >= 4 else 16},
    )
    block = triton.next_power_of_2(max(tiles_q, tiles_k))
    make = Launch(
        list_kernel,
        blocks * (tiles_q + tiles_k),
        {"sizes": sizes, "BLOCK": block, "num_warps": 4 if block > 256 else 1},
    )
    return classify, make


def mask_tiles(mask: torch.Tensor) -> torch.Tensor:
    """The table [*, 1, N] of a mask [*, rows, keys]; dims that repeat the mask have size 1."""
    _check(mask)
    need(not mask.is_meta, "mask is on device meta, which has no values; move it to that of the kernels")
    mask = _blocks(mask)
    table = _empty(mask)
    if mask.numel() == 0:  # no tile to list
        return table.zero_()
    if mask.dim() > 5:
        mask = mask.reshape(-1, *mask.shape[-4:])
    classify, make = launches(mask.device, tuple(mask.shape), mask.stride())
    blocks = math.prod(mask.shape[:-2])
    kinds = torch.empty(blocks * tiles(mask.shape[-2]) * tiles(mask.shape[-1]), dtype=torch.int8, device=mask.device)
    classify(mask, kinds, table)
    make(kinds, table)
    return table


def _check(mask: torch.Tensor) -> None:
    need(mask.dtype == torch.bool, f"a mask must be a bool tensor, got {mask.dtype}", TypeError)
    need(mask.dim() >= 2, f"a mask with tiles must have at least two dims [Sq, Sk], got {list(mask.shape)}")


def _blocks(mask: torch.Tensor) -> torch.Tensor:
    """The mask without repetitions, but with all keys."""
    found = once(mask)
    return found.expand(*found.shape[:-1], mask.shape[-1])


def _empty(mask: torch.Tensor) -> torch.Tensor:
    shape = (*mask.shape[:-2], 1, table_length(*mask.shape[-2:]))
    return mask.new_empty(shape, dtype=torch.int32)


def _fake(mask: torch.Tensor) -> torch.Tensor:
    _check(mask)
    return _empty(_blocks(mask))


def _vmap(info, in_dims, mask):
    """The mapped dim becomes the first one."""
    return op(mask.movedim(in_dims[0], 0)), 0


_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
op = define_op("triton_mask_tiles", "(Tensor mask) -> Tensor", mask_tiles, _KEYS, _fake)
torch.library.register_vmap(op, _vmap, lib=LIBRARY)
