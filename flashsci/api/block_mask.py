"""A mask with the table of its tiles, made once for all layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.call import arguments, mask_tiles
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
    """The bool tensor of a mask, and its table, if the mask is a BlockMask."""
    return (mask.mask, mask.tiles) if isinstance(mask, BlockMask) else (mask, None)


#: Scores of a mask that a function computes at once.
BLOCK = 1 << 22


class BlockMask(NamedTuple):
    """A mask for :func:`flashsci.attention`, with the table of the tiles in which it shows anything.

    Kernels of the Triton backend compute the tiles that the table lists, and read the mask only where a tile is partly
    hidden; ``backend="auto"`` takes them for such calls. All other backends read ``mask``. Tiles are 64 x 64. Make it
    once, by :meth:`from_mask`, :meth:`from_documents` or :meth:`from_function`, and give it to every layer. It is a
    tuple of tensors, which ``torch.compile`` and CUDA graphs take as they take tensors.

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

    mask: Tensor
    """bool ``[*, H or 1, Sq or 1, Sk]``, True = attend."""
    tiles: Tensor | None
    """The table, int32 ``[*, H or 1, 1, N]``; None on devices without Triton's kernels."""

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
        full = torch.empty(B, H, Sq, Sk, dtype=torch.bool, device=device)
        mask = empty_with_inner_keys(full)
        b, h, q, k = (torch.arange(n, device=mask.device) for n in (B, H, Sq, Sk))
        rows = max(1, BLOCK // max(1, B * H * Sk))
        for first in range(0, Sq, rows):
            part = mask[:, :, first : first + rows]
            found = function(b[:, None, None, None], h[:, None, None], q[first : first + rows, None], k)
            _check("the result of function", found)
            arguments.check_broadcast("the result of function", found.shape, part.shape, "B, H, rows, Sk")
            part.copy_(found)
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
