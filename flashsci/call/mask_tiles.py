"""Tables of the tiles of a mask that hold a visible score: their form, and the calls for which one is made.

A table has a row of int32 for each block of a mask: ``[*, H or 1, Sq or 1, Sk]`` has ``[*, H or 1, 1, N]``. Triton's
kernels go through the tiles that it lists, and do not read the mask where a tile hides nothing
(flashsci/backends/triton/kernels/tiles.py has the layout).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.call.kinds import ATTENTION, Dense
from flashsci.call.ops import Tensors
from flashsci.call.row_pitch import FEWEST_READERS, differs_by_query, once
from flashsci.call.symbols import certainly
from flashsci.call.torch_state import is_traced

TILE = 128
#: Words of 32 bits of a row of a tile.
WORDS = TILE // 32
#: Numbers of bits of a tile of a mask with a row for each query; such a table has a multiple of them.
BITS = WORDS * TILE
#: Scores of a call from which on two more launches are a small part of its time.
FEWEST_SCORES = 1 << 26


def tiles(length: int) -> int:
    """The tiles that cover a length."""
    return (length + TILE - 1) // TILE


def lists_length(rows: int, keys: int) -> int:
    """Numbers of the table of one block of a mask before its bits."""
    tiles_q, tiles_k = tiles(rows), tiles(keys)
    length = 5 * tiles_q * tiles_k + tiles_q + tiles_k
    return length if rows == 1 else (length + BITS - 1) // BITS * BITS


def table_length(rows: int, keys: int) -> int:
    """Numbers of the table of one block of a mask in which every tile has bits."""
    return lists_length(rows, keys) + words(rows, keys)


def places(length: int, rows: int, keys: int) -> int:
    """Tiles that have bits in a table of this length."""
    return (length - lists_length(rows, keys)) // (WORDS * tile_rows(rows))


def fits(length: int, rows: int, keys: int) -> bool:
    """Whether a table of this length may be one of a mask of these sizes."""
    if rows > 1 and length % BITS == 0:
        return places(length, rows, keys) >= 1
    return length == table_length(1, keys)


def words(rows: int, keys: int) -> int:
    """Numbers of a table that hold bits: WORDS for each row of each tile; a mask of one row has no others."""
    return WORDS * tile_rows(rows) * tiles(rows) * tiles(keys)


def tile_rows(rows: int) -> int:
    """Rows of a tile that have bits."""
    return 1 if rows == 1 else TILE


def has_rows(shape: tuple[int, ...], rows: int) -> bool:
    """Whether a table, by its shape, is that of a mask with a row for each query; else of one with one row for all."""
    return rows > 1 and shape[-1] % BITS == 0  # the others have an odd length


def pays(tensors: Tensors) -> bool:
    """Whether a table of a call's mask costs little beside what it may save.

    The mask is read once, one byte for several scores; the table is made for the forward and kept for the backward.
    Not for ``torch.jit.trace``, nor for sizes that a compiler keeps symbolic.
    """
    mask, k = tensors.mask, tensors.k
    if mask is None or mask.dim() < 2 or is_traced() or tensors.cu_seqlens_q is not None:
        return False
    if certainly(tiles(mask.shape[-2]) * tiles(mask.shape[-1]) == 1):  # there is no other tile to go on to
        return False
    scores = tensors.q.shape[:-1].numel() * k.shape[-2]
    if not (certainly(mask.shape[-1] == k.shape[-2]) and certainly(scores >= FEWEST_SCORES)):
        return False
    return certainly(scores >= FEWEST_READERS * once(mask).numel())


def decides(tensors: Tensors) -> bool:
    """Whether the mask of a call decides its backend: it has a row for each query, and its table :func:`pays`."""
    return tensors.mask is not None and differs_by_query(tensors.mask) and pays(tensors)


def belongs(table: Tensor, given: Dense) -> bool:
    """Whether a table is of the very scores of a call, whose mask it does not repeat along the keys."""
    mask, k = given.mask, given.k
    return mask is not None and table.dim() == mask.dim() and certainly(mask.shape[-1] == k.shape[-2])


def serves(table: Tensor, given: Dense, module: Any, own: bool, held: bool) -> bool:
    """Whether the kernels of a backend's module compute a call by the table of its mask.

    Args:
        own: whether the gradients are that backend's, or of kernels that rules choose by the table.
        held: whether the call has a tensor of the mask. Without one no kernel may read it: not those of short
            sequences and of wide heads, which have no tiles to skip, nor another backend's for gradients.
    """
    if not (reads(module) and belongs(table, given)):
        return False
    return held or (own and not module.reads_mask(given.q, given.k, given.v))


def reads(module: Any) -> bool:
    """Whether the kernels of a backend's module read tables."""
    return "mask_tiles" in getattr(module, "READS", {}).get(ATTENTION, ())


def with_table(tensors: Tensors) -> Tensors:
    """The tensors of a call with the table of its mask."""
    assert tensors.mask is not None
    return tensors._replace(mask_tiles=table_of(tensors.mask))


def table_of(mask: Tensor) -> Tensor:
    """The table of a mask, by Triton's kernels, which must have been loaded."""
    found: Tensor = torch.ops.flashsci.triton_mask_tiles(mask)
    return found
