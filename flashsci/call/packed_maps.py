"""Attention maps of packed calls: each sequence is a dense map of its own, by flashsci/call/maps.py."""

from __future__ import annotations

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.call import maps
from flashsci.call.map_tensors import MapTensors
from flashsci.call.maps import ALL, Reductions, Selection
from flashsci.call.ops import Scalars


def sequences(tensors: MapTensors, ragged_bias: bool) -> list[MapTensors]:
    """The dense tensors of each sequence: views. Reads the offsets on the host.

    Args:
        tensors: q [Hq, Tq, D], k [Hk, Tk, D], lse [Hq, Tq], bias [Hb, 1, Tk] or, ``ragged_bias``, [Hb, pairs], key_weight
            [Hw, Tk], alibi_slopes [Hq] or [N, Hq].

    Raises:
        BackendError: a CUDA graph is being captured.
    """
    assert tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None
    packed = reference.Sequences(tensors.cu_seqlens_q, tensors.cu_seqlens_k, ragged_bias)
    cut = zip(
        reference.pieces(tensors.q, packed.sizes_q, -2)[: packed.count],
        reference.pieces(tensors.k, packed.sizes_k, -2),
        reference.pieces(tensors.lse, packed.sizes_q, -1),
        packed.biases(tensors.bias),
        reference.pieces_if_any(tensors.key_weight, packed.sizes_k, -1),
        packed.slopes(tensors.alibi_slopes),
        strict=False,
    )
    return [MapTensors(q, k, lse, bias, weight, None, slopes) for q, k, lse, bias, weight, slopes in cut]


def weights(
    parts: list[MapTensors], rows: Selection, columns: Selection, scalars: Scalars, wanted: Reductions
) -> tuple[Tensor, ...]:
    """P of the chosen queries and keys of each sequence."""
    return tuple(maps.compute(part, rows, columns, scalars, wanted)[0] for part in parts)


def statistics(
    tensors: MapTensors, parts: list[MapTensors], scalars: Scalars, wanted: Reductions
) -> tuple[Tensor, ...]:
    """The reductions of all sequences in the packed layout, as :func:`flashsci.call.maps.compute` orders them."""
    found = [maps.compute(part, ALL, ALL, scalars, wanted) for part in parts]
    rest = tensors._replace(q=tensors.q[:, :0], k=tensors.k[:, :0], lse=tensors.lse[:, :0])
    rest = MapTensors(*rest[:3])  # of no rows: it gives every result a dtype where there are no sequences
    found.append(maps.compute(rest, ALL, ALL, scalars, wanted))
    joined = []
    for dim, *pieces in zip(wanted.joins(), *found, strict=True):
        joined.append(torch.cat(pieces, -1 if dim is None else dim))
    return tuple(joined)
