"""``flash_attn.bert_padding``: padded batches to packed rows and back, differentiable to any order."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of ``input`` ``[R, ...]`` at ``indices`` ``[T]``: ``[T, ...]``."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`index_first_axis`, and ``input`` itself, for computations on all rows."""
    return index_first_axis(input, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros ``[first_axis_dim, ...]`` with ``values`` ``[T, ...]`` in the rows ``indices`` ``[T]``, each named once."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows that a mask selects, packed.

    Args:
        hidden_states: ``[B, S, ...]``.
        attention_mask: ``[B, S]``, bool or int, 1 for tokens.
        unused_mask: ``[B, S]``, 1 for rows that are kept although they are not tokens.

    Returns:
        (packed ``[T, ...]``, indices int64 ``[T]`` into the ``B * S`` rows, cu_seqlens int32 ``[B + 1]``, the longest
        length as an int, which waits for the device, and seqused int32 ``[B]``: tokens by ``attention_mask``
        alone).

    Examples:
        >>> import torch
        >>> from flashsci.compat.flash_attn.padding import pad_input, unpad_input
        >>> x, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> packed, indices, cu_seqlens, longest, used = unpad_input(x, mask)
        >>> indices.tolist(), cu_seqlens.tolist(), longest
        ([0, 1, 3, 4, 5], [0, 2, 5], 3)
        >>> torch.equal(pad_input(packed, indices, 2, 3), x * mask[..., None])
        True
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().squeeze(-1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return rows, indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`: ``[T, ...]`` to ``[batch, seqlen, ...]``, with zeros in the other rows."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The packed tokens of a batch whose rows hold several sequences each.

    Args:
        hidden_states: ``[B, S, ...]``.
        attention_mask_in_length: int ``[B, S]``: the lengths of the sequences of a row, in order, and zeros.

    Returns:
        As :func:`unpad_input`, without the last.

    Examples:
        >>> import torch
        >>> from flashsci.compat.flash_attn.padding import unpad_input_for_concatenated_sequences
        >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
        >>> x = torch.randn(2, 4, 8)
        >>> packed, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
        >>> indices.tolist(), cu_seqlens.tolist(), longest
        ([0, 1, 2, 4, 5, 6], [0, 2, 3, 6], 3)
    """
    place = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    used = attention_mask_in_length.sum(-1, keepdim=True)
    indices = (place < used).flatten().nonzero().squeeze(-1)
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().squeeze(-1)].to(torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, int(lengths.max())
