"""A mask with the table of its tiles, made once for all layers of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.call import arguments, mask_blocks, mask_tiles
from flashsci.call.kinds import Dense, fields
from flashsci.call.ops import empty_with_inner_keys
from flashsci.call.row_pitch import once
from flashsci.choice import backends


def _check(name: str, mask: Tensor) -> None:
    """Check that a mask is a bool tensor."""
    arguments.check_type(name, mask)
    argument = fields(Dense)["mask"].argument
    assert argument is not None
    arguments.check_dtype(name, mask, argument, torch.bool)


def parts(mask: Tensor | BlockMask | None) -> tuple[Tensor | None, Tensor | None]:
    """The bool tensor of a mask, and its table, if the mask is a BlockMask.

    The tensor of one that holds none is a stand-in: it has the shape of the mask, and its values mean nothing.
    """
    if not isinstance(mask, BlockMask):
        return mask, None
    if mask.extent is None:
        return mask.mask, mask.tiles
    return mask.extent.new_zeros(1).expand(mask.shape), mask.tiles


def is_held(mask: Tensor | BlockMask | None) -> bool:
    """Whether a mask has a tensor of its scores: else its table is all that says them."""
    return not isinstance(mask, BlockMask) or mask.extent is None


#: Scores of the largest mask that keeps its tensor; only the bits of its partial tiles are kept of a larger one.
MOST_HELD = 1 << 22


class BlockMask(NamedTuple):
    """A mask for :func:`flashsci.attention`, with the table of the tiles in which it shows anything.

    Kernels of the Triton backend compute the tiles that the table lists, and read the mask only where a tile is partly
    hidden; ``backend="auto"`` takes them for such calls. Tiles are 128 x 128. Make it once, by :meth:`from_mask`,
    :meth:`from_documents` or :meth:`from_function`, and give it to every layer. It is a tuple of tensors, which
    ``torch.compile`` and CUDA graphs take as they take tensors.

    A mask of more than 4 million scores is never held as a whole, nor while it is made: its table has a bit for each
    score of the tiles that are partly hidden. All other backends read a bool tensor, which each call then makes
    (:meth:`dense`).

    Examples:
        >>> import torch, flashsci
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)
        >>> documents = flashsci.BlockMask.from_documents(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2]), causal=True)
        >>> flashsci.attention(q, k, v, mask=documents).shape
        torch.Size([2, 4, 10, 16])
        >>> band = flashsci.BlockMask.from_function(lambda b, h, i, j: (i - j).abs() <= 2, 1, 1, 10, 10)
        >>> torch.equal(band.mask, flashsci.BlockMask.from_mask(band.mask).mask)
        True
    """

    mask: Tensor | None
    """bool ``[*, H or 1, Sq or 1, Sk]``, True = attend; None for a mask that is not held."""
    tiles: Tensor | None
    """The table, int32 ``[*, H or 1, 1, N]``; None for a mask that is held, on devices without Triton's kernels."""
    extent: Tensor | None = None
    """Of a mask that is not held: a bool tensor without elements ``[*, H or 1, Sq, Sk, 0]``."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the mask ``[*, H or 1, Sq or 1, Sk]``."""
        if self.extent is not None:
            return self.extent.shape[:-1]
        assert self.mask is not None
        return self.mask.shape

    def dense(self) -> Tensor:
        """The mask as a bool tensor, made anew where it is not held."""
        if self.mask is not None:
            return self.mask
        assert self.tiles is not None
        *_, rows, keys = self.shape
        return mask_blocks.mask_of(self.tiles, rows, keys).expand(self.shape)

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device."""
        if self.mask is None or self.tiles is not None or torch.device(device).type == self.mask.device.type:
            return BlockMask(*(None if x is None else x.to(device) for x in self))
        return BlockMask.from_mask(self.mask.to(device))

    @classmethod
    def from_mask(cls, mask: Tensor) -> BlockMask:
        """The mask of a bool tensor ``[Sq, Sk]`` or ``[..., H or 1, Sq or 1, Sk]``, which is copied.

        Raises:
            TypeError: not a bool tensor.
            ValueError: fewer than two dims.
        """
        _check("mask", mask)
        if mask.dim() < 2:
            raise ValueError(f"mask must have at least two dims [Sq, Sk], got shape {list(mask.shape)}")
        found = once(mask)
        found = found.expand(*found.shape[:-1], mask.shape[-1])
        if _is_large(found.shape):
            return cls._made(lambda first, last: found[..., first:last, :], found.shape, mask.shape, mask.device)
        return cls._of(empty_with_inner_keys(found).copy_(found), mask.shape)

    @classmethod
    def from_documents(cls, ids: Tensor, causal: bool = False) -> BlockMask:
        """The mask by which each position attends to those of its own document.

        Args:
            ids: ``[S]`` or ``[..., S]``, the document of each position, of any dtype. The mask of ``[B, S]`` is
                ``[B, 1, S, S]``.
            causal: also hide positions that come later.

        Raises:
            TypeError: ids are not a tensor.
            ValueError: they have no dim.
        """
        arguments.check_type("ids", ids)
        if ids.dim() < 1:
            raise ValueError("ids must have at least one dim [S], got a number")
        if ids.dim() > 1:
            ids = ids.unsqueeze(-2)  # heads
        length = ids.shape[-1]
        if _is_large((*ids.shape, length)):

            def part(first: int, last: int) -> Tensor:
                found = ids[..., first:last, None] == ids[..., None, :]
                return found.tril_(first) if causal else found

            return cls._made(part, (*ids.shape, length), (*ids.shape, length), ids.device)
        mask = empty_with_inner_keys(ids.new_empty(*ids.shape, length, dtype=torch.bool))
        torch.eq(ids.unsqueeze(-1), ids.unsqueeze(-2), out=mask)
        return cls._of(mask.tril_() if causal else mask, mask.shape)

    @classmethod
    def from_function(
        cls,
        function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        B: int,
        H: int,
        Sq: int,
        Sk: int,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """The mask ``[B, H, Sq, Sk]`` of a function of indices.

        Args:
            function: takes tensors of indices b, h, q, k that broadcast, and returns a bool tensor that broadcasts to
                their shape: True = attend. It is called for blocks of queries, so that its own memory stays small.
            B, H: 1 where the mask is equal for all batch members or heads.
            device: of the indices and the mask; None: torch's default.

        Raises:
            TypeError: the function does not return a bool tensor.
            ValueError: its result does not broadcast.
        """
        b, h, q, k = (torch.arange(n, device=device) for n in (B, H, Sq, Sk))

        def part(first: int, last: int) -> Tensor:
            shape = B, H, last - first, Sk
            found = function(b[:, None, None, None], h[:, None, None], q[first:last, None], k)
            _check("the result of function", found)
            arguments.check_broadcast("the result of function", found.shape, shape, "B, H, rows, Sk")
            return found.expand(shape)

        if _is_large((B, H, Sq, Sk)):
            return cls._made(part, (B, H, Sq, Sk), (B, H, Sq, Sk), q.device)
        whole = part(0, Sq)
        mask = empty_with_inner_keys(whole).copy_(whole)
        return cls._of(mask, mask.shape)

    @classmethod
    def _of(cls, mask: Tensor, shape: torch.Size) -> BlockMask:
        """The mask, whose own dims of size 1 may be repeated in ``shape``."""
        tiles = None
        if mask.numel() and backends.BACKENDS["triton"].unavailable() is None:
            triton = backends.load("triton")
            if mask.is_cuda or triton.INTERPRETED:
                tiles = mask_tiles.table_of(mask)
        return cls(mask.expand(shape), tiles)

    @classmethod
    def _made(
        cls,
        part: Callable[[int, int], Tensor],
        own: tuple[int, ...],
        shape: tuple[int, ...],
        device: torch.device,
    ) -> BlockMask:
        """A mask that is not held, from blocks of its rows. ``own``: its shape without repetitions."""
        *lead, rows, keys = own
        table = mask_blocks.table_of(part, tuple(lead), rows, keys)
        return cls(None, table, torch.empty(*shape, 0, dtype=torch.bool, device=device))


def _is_large(shape: tuple[int, ...]) -> bool:
    """Whether a mask with a row for each query is not held as a whole."""
    return len(shape) > 1 and shape[-2] > 1 and math.prod(shape) > MOST_HELD
