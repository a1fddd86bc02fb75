"""The dropout mask that every backend shares: Philox4x32-7 as a pure function of seed and position.

One draw of four words has 16 bits for each of eight neighbouring keys of a query. Salmon, Moraes, Dror, Shaw: "Parallel random
numbers: as easy as 1, 2, 3", SC11; seven rounds pass the tests of BigCrush there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashsci.call import drawn_seed

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
ROUNDS = 7
DRAWN = 8  # keys of a draw
BITS = 16  # of a key


def philox4x32(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, ...]:
    """Philox4x32: four 32-bit words, stored as int64, for a key of two and a counter of four (broadcast together)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        # The int64 product wraps, but its bits are those of the 64-bit product.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def draw_seed(device: torch.device) -> Tensor:
    """An int64[2] (seed, offset) from torch's generator of that device; a CUDA graph can capture it."""
    if torch.compiler.is_compiling():
        return drawn_seed.draw_recorded(device)
    return drawn_seed.draw(device)


def keep_threshold(dropout_p: float) -> int:
    """The threshold of 16 drawn bits: a position is kept if its number is at least this.

    So the probability is ``dropout_p`` to within 2^-17, and at most 1 - 2^-16. Up to 2^-17 nothing is dropped.
    """
    return min(round(dropout_p * 2**BITS), 2**BITS - 1)


def keep_mask(seed: Tensor, dropout_p: float, rows: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """Bool ``rows.shape + [seq_q, seq_k]``: True where P is kept, for flat batch-head indices ``rows`` (b * Hq +
    h)."""
    if torch.compiler.is_compiling():
        # An op, because inductor's code for these products of 64-bit integers gives other numbers (torch 2.13, CPU).
        found: Tensor = torch.ops.flashsci.keep_mask(seed, dropout_p, rows, seq_q, seq_k)
        return found
    return _keep_mask(seed, dropout_p, rows, seq_q, seq_k)


def _keep_mask(seed: Tensor, dropout_p: float, rows: Tensor, seq_q: int, seq_k: int) -> Tensor:
    device = seed.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    key = (seed[0] & _LOW, (seed[0] >> 32) & _LOW)
    i = torch.arange(seq_q, device=device)[:, None]
    block = torch.arange((seq_k + DRAWN - 1) // DRAWN, device=device)[None, :]
    counter = (zero + (seed[1] & _LOW), rows[..., None, None], i, block)
    words = torch.broadcast_tensors(*philox4x32(key, counter))
    numbers = torch.stack([half for word in words for half in (word & (2**BITS - 1), word >> BITS)], dim=-1)
    return numbers.flatten(-2)[..., :seq_k] >= keep_threshold(dropout_p)


def _mapped_mask(
    info: Any, dims: tuple[Any, ...], seed: Tensor, dropout_p: float, rows: Tensor, *sizes: int
) -> tuple[Tensor, int]:
    """A mask for each sample."""
    seeds, all_rows = (
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in ((seed, dims[0]), (rows, dims[2]))
    )
    each = [torch.ops.flashsci.keep_mask(seeds[n], dropout_p, all_rows[n], *sizes) for n in range(info.batch_size)]
    return torch.stack(each), 0


LIBRARY = torch.library.Library("flashsci", "FRAGMENT")
LIBRARY.define("keep_mask(Tensor seed, float dropout_p, Tensor rows, SymInt seq_q, SymInt seq_k) -> Tensor")
LIBRARY.impl("keep_mask", _keep_mask, "CompositeExplicitAutograd")
torch.library.register_fake(
    "flashsci::keep_mask",
    lambda seed, dropout_p, rows, *sizes: rows.new_empty(*rows.shape, *sizes, dtype=torch.bool),
    lib=LIBRARY,
)
torch.library.register_vmap("flashsci::keep_mask", _mapped_mask, lib=LIBRARY)


def dropout_mask(dropout_seed: Tensor, dropout_p: float, shape: tuple[int, ...], *, batch_offset: int = 0) -> Tensor:
    """The positions of P that attention keeps for a given seed, identical in every backend.

    Args:
        dropout_seed: int64 tensor [2], (seed, offset), as given to :func:`flashsci.attention`.
        dropout_p: probability of dropping, 0 <= p < 1, to within 2^-17.
        shape: ``(..., Hq, Sq, Sk)``, at least ``(Sq, Sk)``; leading dims count as batch in
            row-major order.
        batch_offset: index of the first batch entry (for a packed call: the sequence's index).

    Returns:
        bool tensor of ``shape``: True = kept (and multiplied by 1 / (1 - p)), False = dropped.

    Raises:
        ValueError: seed of another shape or dtype, p outside [0, 1), fewer than two dims.

    Examples:
        >>> import torch, flashsci
        >>> seed = torch.tensor([7, 0])
        >>> flashsci.dropout_mask(seed, 0.25, (1, 2, 3, 5)).shape
        torch.Size([1, 2, 3, 5])
    """
    check_dropout(dropout_p, dropout_seed)
    if len(shape) < 2:
        raise ValueError(f"shape must end in (Sq, Sk), got {tuple(shape)}")
    if type(dropout_seed).__name__ == "DTensor":
        raise TypeError("dropout_seed is a DTensor; give dropout_seed.full_tensor()")
    leading, (seq_q, seq_k) = shape[:-2], shape[-2:]
    heads = leading[-1] if leading else 1
    rows = torch.arange(math.prod(leading), device=dropout_seed.device) + batch_offset * heads
    return keep_mask(dropout_seed, dropout_p, rows, seq_q, seq_k).reshape(shape)


def check_dropout(dropout_p: float, dropout_seed: Tensor | None) -> None:
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if dropout_seed is not None and not isinstance(dropout_seed, Tensor):
        raise TypeError(
            "dropout_seed must be an int64 tensor of shape [2] (seed, offset) or None, got "
            f"{type(dropout_seed).__name__}; torch.tensor([seed, offset]) makes one"
        )
    if dropout_seed is not None and (dropout_seed.dtype != torch.int64 or dropout_seed.shape != (2,)):
        raise ValueError(
            "dropout_seed must be an int64 tensor of shape [2] (seed, offset), "
            f"got {dropout_seed.dtype} of shape {list(dropout_seed.shape)}"
        )
