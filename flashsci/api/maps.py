"""Attention maps without a tensor of all pairs: probabilities of chosen rows, and reductions of all of them."""

from __future__ import annotations

import functools
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.api import varlen
from flashsci.call import arguments, maps, packed_maps, transforms
from flashsci.call.kinds import Packed, Role, fields
from flashsci.call.map_ops import MAX_TOP, MapCall
from flashsci.call.map_tensors import MapTensors
from flashsci.call.maps import ALL, Reductions, Selection
from flashsci.call.ops import Scalars, Tensors
from flashsci.call.ranks import aligned
from flashsci.call.torch_state import count_flops
from flashsci.choice.choose import PARTS, decide_map

_FIELDS = fields(MapTensors)


class AttentionStatistics(NamedTuple):
    """The reductions of an attention map, None where not asked for; of a packed call with T in the place of ``*`` and S."""

    entropy: Tensor | None
    """``[*, Hq, Sq]``: ``-sum_j P log P`` of each row, in nats."""
    largest_score: Tensor | None
    """``[*, Hq, Sq]``: the largest score of each row, -inf for a row without keys."""
    key_sum: Tensor | None
    """``[*, Hq, Sk]``: the sum of P over the queries, which is the attention that each key receives."""
    top_values: Tensor | None
    """``[*, Hq, Sq, top_k]``: the largest probabilities of each row, in descending order."""
    top_indices: Tensor | None
    """``[*, Hq, Sq, top_k]``: their keys, int64; of a packed call counted in their sequence, -1 beyond its keys."""


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    rows: slice | Tensor | None = None,
    columns: slice | Tensor | None = None,
    average_heads: bool = False,
    bias: Tensor | None = None,
    key_weight: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "upper_left",
    scale: float | None = None,
    softcap: float | None = None,
    softcap_at: str = "scores",
) -> Any:
    """Softmax probabilities P of chosen queries and keys, from the lse of the forward.

    Args:
        q, k: as :func:`flashsci.attention` got them; with ``cu_seqlens_q`` as :func:`flashsci.varlen_attention` did.
        lse: ``[*, Hq, Sq]``, packed ``[Hq, Tq]``, by ``return_lse=True``: that of all keys, whatever the columns.
        rows: queries: a slice, or an integer tensor ``[R]`` on q's device, in any order; None: all. In packed calls
            they are rows of each sequence: ``slice(-1, None)`` is the last query of each.
        columns: keys ``[C]``, likewise.
        average_heads: the mean over the heads, without those of single heads in memory.
        bias, key_weight, mask, alibi_slopes, causal, window, align, scale, softcap, softcap_at: as the forward got them,
            for all queries and keys. A sink is part of the lse: its share is what a row lacks to 1. Dropout does not enter.
        cu_seqlens_q, cu_seqlens_k: the offsets of a packed call, of which ``cu_seqlens_k`` may be None as in the forward.

    Returns:
        P ``[*, Hq, R, C]``, or ``[*, R, C]`` of the average: float32 (float64 for float64), zero in rows that see no key.
        Of a packed call a tuple, with one such tensor ``[Hq, R, C]`` for each sequence, whose offsets the host reads.
        Differentiable in all floating tensors; gradients pass through ``lse``, which has to come from a
        differentiable forward for the gradients of P to be whole.

    Raises:
        TypeError, ValueError: as :func:`flashsci.attention`; an lse of another shape; rows or columns of another kind.

    Examples:
        >>> import torch, flashsci
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)
        >>> out, lse = flashsci.attention(q, k, v, causal=True, return_lse=True)
        >>> last = flashsci.attention_weights(q, k, lse, rows=slice(-1, None), causal=True)
        >>> torch.allclose(last @ v, out[..., -1:, :], atol=1e-6)
        True

    Source: Milakov and Gimelshein, arXiv:1805.02867 (the normaliser from which P follows).
    """
    average = arguments.flag("average_heads", average_heads)
    tensors = MapTensors(q, k, lse, bias, key_weight, mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    options = arguments.Options.of(causal, window, align, scale, softcap, 0.0, True, False, None, softcap_at)
    wanted = Reductions(weights=not average, average_heads=average)
    places = _selection("rows", rows, q), _selection("columns", columns, q)
    found = _map("attention_weights", tensors, options, wanted, *places)
    return found[0] if cu_seqlens_q is None else found


def attention_statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    entropy: bool = False,
    largest_score: bool = False,
    key_sum: bool = False,
    top_k: int = 0,
    bias: Tensor | None = None,
    key_weight: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "upper_left",
    scale: float | None = None,
    softcap: float | None = None,
    softcap_at: str = "scores",
) -> AttentionStatistics:
    """Reductions of the softmax probabilities P of all queries and keys, in one pass over blocks of them.

    Args:
        q, k, lse, cu_seqlens_q, cu_seqlens_k: as for :func:`attention_weights`.
        entropy: the entropy of each row. With a sink it is the sum over keys alone.
        largest_score: the largest score of each row, as the softmax takes it (scaled, capped, with bias), without
            ``log key_weight``. ``.amax((0, -1))`` of it is the largest logit of each head, as QK-Clip wants it.
        key_sum: the sum of P over the queries; divided by Sq it is their mean.
        top_k: how many of the largest probabilities of each row, with their keys; 0: none. Equal probabilities come in any order.
            A packed sequence with fewer keys has zeros after them, of key -1. Triton's kernels find up to 64.
        bias, key_weight, mask, alibi_slopes, causal, window, align, scale, softcap, softcap_at: as for
            :func:`attention_weights`.

    Returns:
        :class:`AttentionStatistics`, in float32 (float64 for float64); differentiable as :func:`attention_weights` is.
        Packed: entropy and largest_score ``[Hq, Tq]``, key_sum ``[Hq, Tk]``, the others ``[Hq, Tq, top_k]``.
        A backward computes the blocks again. Its second derivatives are right, but keep all pairs in memory.

    Raises:
        TypeError, ValueError: as :func:`attention_weights`; a ``top_k`` beyond the number of keys; no reduction asked for.

    Examples:
        >>> import torch, flashsci
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)
        >>> out, lse = flashsci.attention(q, k, v, return_lse=True)
        >>> found = flashsci.attention_statistics(q, k, lse, entropy=True, key_sum=True, top_k=3)
        >>> found.entropy.shape, found.key_sum.shape, found.top_indices.shape
        (torch.Size([2, 4, 10]), torch.Size([2, 4, 10]), torch.Size([2, 4, 10, 3]))

    Source: Kimi team, arXiv:2507.20534 (QK-Clip).
    """
    tensors = MapTensors(q, k, lse, bias, key_weight, mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    options = arguments.Options.of(causal, window, align, scale, softcap, 0.0, True, False, None, softcap_at)
    flags = [
        arguments.flag(n, x) for n, x in (("entropy", entropy), ("largest_score", largest_score), ("key_sum", key_sum))
    ]
    wanted = Reductions(
        entropy=flags[0], largest_score=flags[1], key_sum=flags[2], top_k=arguments.length("top_k", top_k) or 0
    )
    if not any(wanted):
        raise ValueError("no reduction is asked for; give entropy=True, largest_score=True, key_sum=True or top_k=n")
    found = iter(_map("attention_statistics", tensors, options, wanted))
    results = [next(found) if asked else None for asked in flags]
    return AttentionStatistics(*results, *(found if wanted.top_k else (None, None)))


def _by_kernels(
    tensors: MapTensors, bias_offsets: Tensor | None, scalars: Scalars, wanted: Reductions
) -> list[Tensor] | None:
    """The reductions by Triton's kernels, for calls without derivatives; None: they do not serve the call."""
    q = tensors.q
    if not wanted.reduces() or transforms.needs_grad(*tensors):
        return None
    choice = decide_map(q.device.type, q.device.index, q.dtype, index(q.shape[-1]))  # constants, as those of facts
    return None if choice.forward == PARTS else fused(tensors, bias_offsets, scalars, wanted)


def fused(tensors: MapTensors, bias_offsets: Tensor | None, scalars: Scalars, wanted: Reductions) -> list[Tensor]:
    """The results of Triton's kernels, which must have been loaded."""
    q, k, lse = tensors.q, tensors.k, tensors.lse
    given = Tensors(
        q, k, k, tensors.bias, tensors.key_weight, tensors.mask, tensors.cu_seqlens_q, tensors.cu_seqlens_k,
        bias_offsets, alibi_slopes=tensors.alibi_slopes,
    )  # fmt: skip
    if tensors.cu_seqlens_q is None:
        given = aligned(given, tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])))
    asked = wanted.entropy, wanted.largest_score, wanted.key_sum
    call = MapCall.of(given, lse.reshape(given.q.shape[:-1]), scalars, asked, wanted.top_k)
    top = *lse.shape, wanted.top_k
    shapes = lse.shape, lse.shape, (*lse.shape[:-1], k.shape[-2]), top, top
    count_flops()
    found = torch.ops.flashsci.triton_map_statistics.default(*call)
    return [x.reshape(s) for x, s, need in zip(found, shapes, call.wanted, strict=True) if need]


def _map(
    name: str,
    tensors: MapTensors,
    options: arguments.Options,
    wanted: Reductions,
    rows: Selection = ALL,
    columns: Selection = ALL,
) -> tuple[Tensor, ...]:
    """The results of a checked call."""
    indices = {n: x for n, x in (("rows", rows), ("columns", columns)) if isinstance(x, Tensor)}
    given: dict[str, Any] = dict(zip(tensors._fields, tensors, strict=True))
    for each in ("q", "k", "lse"):
        arguments.check_type(each, given[each])
    for each in tensors._fields[3:]:
        if given[each] is not None:
            arguments.check_type(each, given[each], " or None")
    transforms.check(name, **given, **indices)
    tensors = tensors._replace(bias=arguments.widened(tensors.bias, tensors.q.dtype))
    kind = "cpu" if tensors.q.is_meta else tensors.q.device.type
    scalars = options.scalars(tensors.q.shape[-1])
    bias_offsets = None
    if tensors.cu_seqlens_q is None:
        if tensors.cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k of a packed map needs cu_seqlens_q; give both, or none for a dense map")
        _check(tensors, options)
        if wanted.top_k > tensors.k.shape[-2]:
            raise ValueError(f"top_k must be at most the number of keys, {tensors.k.shape[-2]}, got {wanted.top_k}")
        compute = functools.partial(maps.compute, tensors, rows, columns, scalars)
    else:
        tensors, bias_offsets = _packed(tensors, options)
        compute = functools.partial(_by_sequences, tensors, bias_offsets, rows, columns, scalars)
    of_kernels = wanted if wanted.top_k <= MAX_TOP else wanted._replace(top_k=0)
    first = _by_kernels(tensors, bias_offsets, scalars, of_kernels)
    if first is not None:
        if of_kernels is wanted:
            return tuple(first)
        wanted = Reductions(top_k=wanted.top_k)
    with torch.autocast(kind, enabled=False):
        return (*(first or ()), *compute(wanted))


def _by_sequences(
    tensors: MapTensors,
    bias_offsets: Tensor | None,
    rows: Selection,
    columns: Selection,
    scalars: Scalars,
    wanted: Reductions,
) -> tuple[Tensor, ...]:
    """The results of a packed call in PyTorch.

    Raises:
        ValueError: offsets that do not cover the rows, or that torch.vmap maps.
        BackendError: a CUDA graph is being captured.
    """
    edges = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    if not torch.compiler.is_compiling() and any(x is not None and (x.is_meta or type(x) is not Tensor) for x in edges):
        raise ValueError(
            "flashsci: the lengths of packed maps are read on the host, and meta or fake tensors hold none; call with real "
            "tensors, or one dense map for each sequence"
        )
    for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), edges, strict=True):
        assert x is not None
        arguments.check_unmapped(name, x)
    parts = packed_maps.sequences(tensors, bias_offsets is not None)
    if wanted.weights or wanted.average_heads:
        return packed_maps.weights(parts, rows, columns, scalars, wanted)
    return packed_maps.statistics(tensors, parts, scalars, wanted)


def _packed(tensors: MapTensors, options: arguments.Options) -> tuple[MapTensors, Tensor | None]:
    """The tensors of a packed call, checked, as kernels take them; and the offsets of a bias of pairs.

    Raises:
        TypeError, ValueError: as :func:`flashsci.varlen_attention` documents; a mask; an lse of another shape.
    """
    q, k, lse, bias, key_weight = tensors.q, tensors.k, tensors.lse, tensors.bias, tensors.key_weight
    first, second, alibi_slopes = tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.alibi_slopes
    if tensors.mask is not None:
        raise ValueError("packed maps take no mask; write it as a bias of pairs, -inf where it hides")
    given = Packed(q, k, k, first, second, bias, key_weight, alibi_slopes)  # type: ignore[arg-type]
    varlen.describe(given, options, needs_grad=False)
    due = (q.shape[1], q.shape[0])
    if tuple(lse.shape) != due:
        raise ValueError(
            f"lse must have the shape [Hq, Tq] = {list(due)}, got {list(lse.shape)}; "
            "it is the second result of flashsci.varlen_attention(..., return_lse=True)"
        )
    arguments.check_others(_FIELDS, tensors, {Role.STATISTICS: (due, "Hq, Tq")})
    edges = varlen.dense_offsets(first, second)  # type: ignore[arg-type]
    if arguments.contents_are_seen(edges[0], False):
        varlen.check_contents(q, k, *edges, None, None, bias)
    bias, bias_offsets = varlen.kernel_bias(bias, k.shape[0], *edges)
    if key_weight is not None and key_weight.dim() == 1:
        key_weight = key_weight.unsqueeze(0)
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    return MapTensors(q, k, lse, bias, key_weight, None, alibi_slopes, *edges), bias_offsets


def _selection(name: str, x: Any, q: Any) -> Selection:
    """The rows or columns of a call, checked."""
    if x is None:
        return ALL
    if isinstance(x, slice):
        if x.step is not None and x.step < 1:
            raise ValueError(
                f"{name} must be a slice with a positive step, got {x}; give the places as an integer tensor"
            )
        return x
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a slice, an integer tensor [N] or None, got {x!r} of type {type(x).__name__}")
    if x.dtype not in (torch.int64, torch.int32):
        advice = "; give mask.nonzero().flatten()" if x.dtype is torch.bool else "; call .long()"
        raise TypeError(f"{name} must be int64 or int32, got {x.dtype}{advice}")
    if x.dim() != 1:
        raise ValueError(f"{name} must have one dim, got shape {list(x.shape)}")
    if isinstance(q, Tensor):
        arguments.same_device(q, **{name: x})
    return x


def _check(tensors: MapTensors, options: arguments.Options) -> None:
    """Check the shapes, dtypes and devices of a call, and its options.

    Raises:
        TypeError, ValueError: as :func:`attention_weights` documents.
    """
    q, k, lse = tensors.q, tensors.k, tensors.lse
    if q.is_nested or k.is_nested:
        raise ValueError(
            "attention maps take no nested tensors: they have no common shape; call once for each sequence"
        )
    arguments.check_tensors(q, k, k)
    for name, x in (("q", q), ("k", k)):
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least two dims [S, D], got shape {list(x.shape)}")
    arguments.check_head_dims(q, k, k)
    heads_q, heads_k = (x.shape[-3] if x.dim() > 2 else 1 for x in (q, k))
    arguments.check_heads(heads_q, heads_k, heads_k)
    options.check()
    try:
        batch = tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3]))
    except RuntimeError as error:
        shapes = f"{list(q.shape)}, {list(k.shape)}"
        raise ValueError(f"the leading dims (before heads) of q and k do not broadcast: {shapes}") from error
    heads = (heads_q,) if max(q.dim(), k.dim()) > 2 else ()
    full = (*batch, *heads, q.shape[-2], k.shape[-2])
    if tuple(lse.shape) != full[:-1]:
        raise ValueError(
            f"lse must have the shape [..., Hq, Sq] = {list(full[:-1])}, got {list(lse.shape)}; "
            "it is the second result of flashsci.attention(..., return_lse=True)"
        )
    shapes_of = {
        Role.SCORES: (full, "Hq, Sq, Sk"),
        Role.KEYS: ((*batch, *(heads and (heads_k,)), k.shape[-2]), "Hk, Sk"),
        Role.HEADS: ((*batch, heads_q), "Hq"),
    }
    arguments.check_others(_FIELDS, tensors, shapes_of, Role.STATISTICS)
