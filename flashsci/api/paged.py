"""Attention of packed queries to a paged KV cache, as serving engines keep it, and the update of that cache."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from operator import is_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call import arguments, transforms
from flashsci.call.kinds import SCALE, Role, fields
from flashsci.call.paged_ops import FP8, PagedScalars, PagedTensors
from flashsci.call.plans import grad_enabled, gradients, keep, plans, signature
from flashsci.call.problem import facts
from flashsci.call.torch_state import count_flops, modes, transforming_eagerly
from flashsci.choice import backends, tuning
from flashsci.choice.backends import PAGED
from flashsci.choice.choose import decide, decide_write
from flashsci.errors import BackendError

_KINDS = frozenset((Tensor, torch.nn.Parameter, NoneType))  # the types that a key describes


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    deterministic: bool | str | None = None,
    backend: str = "auto",
) -> Any:
    """Exact softmax attention of N packed sequences to their keys and values in a paged cache.

    One call serves decode, speculative decode, chunked prefill, or all of them.

    Sequence n has the queries ``q[cu_seqlens_q[n]:cu_seqlens_q[n + 1]]`` and ``seqused_k[n]`` keys; its last query
    belongs to the last of them. Its key j is ``k_cache[block_table[n, j // page], j % page]``. Nothing is gathered,
    and no length is read on the host: the launches depend only on shapes and ``max_seqlen_q``, so a CUDA graph
    replays with any lengths and pages.

    Args:
        q: packed queries ``[T, Hq, D]``. Rows of no sequence (before the first, after the last) may hold any values.
        k_cache: ``[pages, page, Hk, D]`` in q's dtype, float8_e4m3fn or float8_e5m2; last dim contiguous, other
            strides free (keys and values may share rows, heads may come before rows). Places that no sequence uses
            may hold any values, NaN included.
        v_cache: ``[pages, page, Hk, Dv]``, in k_cache's dtype.
        block_table: int32 ``[N, max_pages]``. Entries that no visible key needs may have any value, so the pages left
            of a window may be freed; other entries are clamped into the cache.
        seqused_k: int32 ``[N]``, the number of keys including the new ones, 0 allowed; clamped to ``max_pages *
            page``.
        cu_seqlens_q: int32 ``[N + 1]``, rising from 0 to at most T; sequences may have no query.
        max_seqlen_q: an upper bound of the queries of a sequence as a host int; it decides the tiles. None where
            unknown. Results do not depend on it.
        causal: query i of Sq sees the keys up to ``i + Sk - Sq`` (aligned lower right).
        window: ``(left, right)``, keys around that diagonal; -1 or None for unbounded. ANDed with causal.
        softcap, scale: as in :func:`flashsci.attention`. scale defaults to 1/sqrt(D).
        sink: ``[Hq]`` in q's dtype or float32: one more logit per head, in the denominator of the softmax only.
        k_scale, v_scale: positive float32, ``[]`` or ``[1]`` (one for all) or ``[N, Hk]``, on q's device. The stored
            values times these are K and V. None: 1. They multiply scores and output, in float32.
        return_lse: also return the lse.
        out: ``[T, Hq, Dv]`` in q's dtype with a contiguous last dim, to be filled and returned; None for a new one.
        deterministic: "batch" demands that the bits of a sequence do not depend on the other sequences of the call. The
            keys of a sequence are then not split over programs, which takes longer where sequences are few and long.
            Results are equal from run to run in any case.
        backend: as in :func:`flashsci.attention`; "triton", "cuda" (from sm_80 on, 16-bit queries) and "reference"
            have paged calls. "auto" takes cuda for decodes from sm_80 on, triton for other calls on a GPU, and
            elsewhere reference, which reads lengths on the host.

    Returns:
        out ``[T, Hq, Dv]``; with ``return_lse`` also the lse ``[Hq, T]``, natural log, float32 (float64 for float64),
        the sink included. A row without a key has out 0 and lse -inf, or the sink if there is one. Rows of no
        sequence have out 0 and lse -inf.

    Raises:
        TypeError, ValueError: arguments that do not fit, or a tensor that requires grad, has a tangent or is mapped
            by ``torch.vmap``: there are no derivatives.
        BackendError: no backend can serve the call, or the one asked for cannot.

    Examples:
        >>> import torch, flashsci
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 2, 64).unbind(0)  # 10 pages of 16 tokens, 2 key heads
        >>> table = torch.tensor([[7, 2, 9], [4, 0, 0]], dtype=torch.int32)
        >>> used = torch.tensor([40, 3], dtype=torch.int32)
        >>> edges = torch.tensor([0, 1, 4], dtype=torch.int32)  # one new token, and a prompt of three
        >>> q = torch.randn(4, 8, 64)
        >>> flashsci.paged_attention(
        ...     q, k_cache, v_cache, block_table=table, seqused_k=used, cu_seqlens_q=edges
        ... ).shape
        torch.Size([4, 8, 64])
    """
    options = arguments.Options.of(
        causal, window, "lower_right", scale, softcap, 0.0, return_lse, deterministic or False, None
    )
    max_seqlen_q = arguments.length("max_seqlen_q", max_seqlen_q)
    given = PagedTensors(q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, sink, k_scale, v_scale)
    plan = _plan(given, out, max_seqlen_q, options, backend)
    tensors = given if plan.as_given else as_kernels_take_them(given)
    if out is None:
        out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    try:
        lse = getattr(backends.LOADED[PAGED], plan.backend).attention(tensors, out, plan.scalars)
    except BackendError as error:  # only the kernels know strides and pages
        if backends.requested(backend)[0] != "auto" or plan.backend == "triton":
            raise
        _say_once(str(error))
        lse = backends.load("triton", PAGED).attention(tensors, out, plan.scalars)
    return (out, lse) if return_lse else out


class _Plan(NamedTuple):
    """The decisions for a call, which follow from its tensors (by their signature) and options."""

    backend: str
    scalars: PagedScalars
    as_given: bool  # whether kernels take the tensors without a copy


def _plan(
    given: PagedTensors,
    out: Any,
    max_seqlen_q: int | None,
    options: arguments.Options,
    backend: str,
) -> _Plan:
    """The plan of a call, with its checks; from the cache if an equal call was planned before."""
    key: tuple[Any, ...] | None = None
    every = (*given, out)
    # A key does not hold the derivatives that transforms want from the tensors.
    if not (torch.compiler.is_compiling() or transforming_eagerly()) and _KINDS.issuperset(map(type, every)):
        wanted = grad_enabled() and gradients(*every)
        key = ("paged", *signature(*every), max_seqlen_q, options, wanted, backends.requested(backend))
        kept: _Plan | None = plans.get(key)
        if kept is not None and not modes():
            return kept
    call = describe(given, out, max_seqlen_q, options)
    if not torch.compiler.is_compiling() and tuning.active:
        again = functools.partial(_again, max_seqlen_q, options)
        key = key if tuning.consider(call, backend, given, again) else None
    choice = decide(PAGED, call, backend)
    count_flops()
    scalars = scalars_of(given.q, max_seqlen_q, options)
    plan = _Plan(choice.forward, scalars, all(map(is_, given, as_kernels_take_them(given))))
    if key is not None:
        keep(key, plan)
    return plan


_AGAIN = ("window", "scale", "softcap", "return_lse", "deterministic")


def _again(max_seqlen_q: int | None, options: arguments.Options, given: Sequence[Tensor | None], backend: str) -> Any:
    """The call of a plan, with other tensors of the same kind and an output of its own."""
    tensors: dict[str, Any] = dict(zip(PagedTensors._fields, given, strict=True))
    shared = {name: x for name, x in options.keywords().items() if name in _AGAIN}
    return paged_attention(**tensors, max_seqlen_q=max_seqlen_q, causal=False, **shared, backend=backend)


def scalars_of(q: Tensor, max_seqlen_q: int | None, options: arguments.Options) -> PagedScalars:
    dense = options.scalars(q.shape[-1], max_seqlen_q)
    return PagedScalars(
        dense.max_seqlen_q, dense.scale, dense.softcap, dense.window_left, dense.window_right, options.return_lse
    )


def as_kernels_take_them(x: PagedTensors) -> PagedTensors:
    """The tensors in the layout of :class:`PagedTensors`, with copies where needed."""
    shape = x.block_table.shape[0], x.k_cache.shape[2]
    return PagedTensors(
        x.q if x.q.stride(-1) == 1 else x.q.contiguous(), x.k_cache, x.v_cache, x.block_table.contiguous(),
        x.seqused_k.contiguous(), x.cu_seqlens_q.contiguous(), None if x.sink is None else x.sink.contiguous(),
        _per_head(x.k_scale, *shape), _per_head(x.v_scale, *shape),
    )  # fmt: skip


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place, quantised if the cache is.

    Args:
        key: ``[T, Hk, D]``, last dim contiguous or copied. Rows beyond those of slot_mapping are padding.
        value: ``[T, Hk, Dv]``.
        k_cache: ``[pages, page, Hk, D]`` in key's dtype, float8_e4m3fn or float8_e5m2; last dim contiguous. (A cache that an
            engine keeps as uint8 is given as ``cache.view(torch.float8_e4m3fn)``.)
        v_cache: ``[pages, page, Hk, Dv]``, in k_cache's dtype.
        slot_mapping: int64 ``[at most T]``: token t goes to slot ``page * page_size + offset``. -1 and any other slot
            that the cache does not have are skipped. If two tokens have one slot, either may win.
        k_scale, v_scale: positive float32, ``[]`` or ``[1]`` (one for all) or ``[Hk]``. The cache stores the token
            divided by these, rounded to nearest; numbers too large for an 8-bit float become its largest number.
            None: 1.
        backend: as in :func:`paged_attention`; "cuda" runs Triton's kernel.

    Raises:
        TypeError, ValueError: arguments that do not fit, or a tensor that requires grad, has a tangent or is mapped
            by ``torch.vmap``.
        BackendError: no backend can serve the call, or the one asked for cannot.

    Examples:
        >>> import torch, flashsci
        >>> k_cache, v_cache = torch.zeros(2, 10, 16, 2, 64).unbind(0)
        >>> key, value = torch.randn(2, 3, 2, 64).unbind(0)
        >>> flashsci.write_kv_cache(key, value, k_cache, v_cache, torch.tensor([5 * 16 + 15, 8 * 16, -1]))
        >>> bool((k_cache[8, 0] == key[1]).all())
        True
    """
    names = dict(key=key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    _check_all("write_kv_cache", names, dict(k_scale=k_scale, v_scale=v_scale))
    arguments.same_device(key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    _check_rows("key", key, "value", value)
    _check_caches(key, k_cache, v_cache)
    heads_k = k_cache.shape[2]
    if key.shape[1:] != (heads_k, k_cache.shape[-1]) or value.shape[1:] != (heads_k, v_cache.shape[-1]):
        raise ValueError(
            f"key and value must be [T, {heads_k}, {k_cache.shape[-1]}] and [T, {heads_k}, {v_cache.shape[-1]}] as the caches "
            f"have it, got {arguments.shape_of(key)} and {arguments.shape_of(value)}"
        )
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping must be int64, got {slot_mapping.dtype}; call .to(torch.int64)")
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(
            f"slot_mapping must be [at most T = {key.shape[0]}], a slot for each row of key, got "
            f"{arguments.shape_of(slot_mapping)}"
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(name, scale, key, (heads_k,), "[Hk]")
    features = _features(k_cache)
    choice = decide_write(facts(key, value, heads_k, heads_k, features), backend)
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    scales = (None if s is None else s.reshape(-1).expand(heads_k) for s in (k_scale, v_scale))
    write = backends.LOADED[PAGED][choice.forward].write_kv_cache
    assert write is not None
    write(key, value, k_cache, v_cache, slot_mapping.contiguous(), *scales)


_FIELDS = fields(PagedTensors)
_NEEDED = tuple(name for name, field in _FIELDS.items() if not field.optional)


def describe(
    given: PagedTensors, out: Tensor | None, max_seqlen_q: int | None, options: arguments.Options
) -> tuple[Any, ...]:
    """The arguments of problem_of for a paged call, checked except for the values of its integers.

    Raises:
        TypeError, ValueError: as :func:`paged_attention` documents.
    """
    tensors = dict(zip(given._fields, given, strict=True))
    needed = {name: tensors[name] for name in _NEEDED}
    optional = {name: x for name, x in tensors.items() if name not in needed}
    _check_all("paged_attention", needed, dict(**optional, out=out))
    q, k_cache, v_cache = given.q, given.k_cache, given.v_cache
    arguments.same_device(q, **{n: x for n, x in needed.items() if n != "q"}, out=out)
    if q.dim() != 3:
        raise ValueError(f"q must be packed, [T, Hq, D], got {arguments.shape_of(q)}")
    _check_caches(q, k_cache, v_cache)
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(f"q and k_cache must have the same head dim (last), got {q.shape[-1]} and {k_cache.shape[-1]}")
    heads_q, heads_k = q.shape[1], k_cache.shape[2]
    arguments.check_heads(heads_q, heads_k, v_cache.shape[2])
    options.check()
    arguments.check_others(_FIELDS, given, {Role.LOGITS: ((heads_q,), "Hq")}, Role.INDEX)
    _check_tables(given.block_table, given.seqused_k, given.cu_seqlens_q)
    for name, scale in (("k_scale", given.k_scale), ("v_scale", given.v_scale)):
        _check_scale(name, scale, q, (given.block_table.shape[0], heads_k), "[N, Hk]")
    if out is not None:
        wanted = [*q.shape[:-1], v_cache.shape[-1]]
        if out.dtype != q.dtype or list(out.shape) != wanted or out.stride(-1) != 1:
            raise ValueError(
                f"out must be {q.dtype} {wanted} with a contiguous last dim, got {out.dtype} "
                f"{arguments.shape_of(out)} with strides {list(out.stride())}"
            )
    features = options.features(tensors, False) | _features(k_cache)
    # Prompt lengths differ from step to step: a plan only knows that a call is none of these.
    if not torch.compiler.is_compiling() and max_seqlen_q is not None and max_seqlen_q <= DECODED:
        features["seq_q"] = max_seqlen_q
    return facts(q, v_cache, heads_q, heads_k, features)


def _features(k_cache: Tensor) -> dict[str, Any]:
    return {"paged": True, "cache_dtype": k_cache.dtype}


def _check_all(entry: str, needed: dict[str, Any], optional: dict[str, Any]) -> None:
    for name, x in needed.items():
        arguments.check_type(name, x)
    for name, x in optional.items():
        if x is not None:
            arguments.check_type(name, x, " or None")
    transforms.check(entry, **needed, **optional)


def _check_rows(name: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.dim() != 3 or y.dim() != 3 or x.shape[0] != y.shape[0] or x.dtype != y.dtype:
        raise ValueError(
            f"{name} and {other} must be [T, Hk, D] and [T, Hk, Dv] in one dtype, got {x.dtype} {arguments.shape_of(x)} and "
            f"{y.dtype} {arguments.shape_of(y)}"
        )


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if q.dtype not in arguments.DTYPES:
        raise TypeError(
            f"tokens must be float16, bfloat16, float32 or float64, got {q.dtype}; an 8-bit cache is read by 16-bit queries"
        )
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, *FP8):
        advice = ""
        if torch.uint8 in (k_cache.dtype, v_cache.dtype):
            advice = "; say which 8-bit float the bytes are: cache.view(torch.float8_e4m3fn)"
        raise TypeError(
            f"k_cache and v_cache must both be {q.dtype}, float8_e4m3fn or float8_e5m2, got {k_cache.dtype} and "
            f"{v_cache.dtype}{advice}"
        )
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must be [pages, page, Hk, D] and [pages, page, Hk, Dv] and agree in all but the last, got "
            f"{arguments.shape_of(k_cache)} and {arguments.shape_of(v_cache)}"
        )
    if 0 in k_cache.shape or v_cache.shape[-1] == 0:
        raise ValueError(
            f"caches must have at least one page, row, head and column, got {arguments.shape_of(k_cache)} and "
            f"{arguments.shape_of(v_cache)}"
        )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError(
            f"the last dim of the caches must be contiguous, got strides {list(k_cache.stride())} and "
            f"{list(v_cache.stride())}; a copy of a cache is not made"
        )


def _check_tables(block_table: Tensor, seqused_k: Tensor, cu_seqlens_q: Tensor) -> None:
    if block_table.dim() != 2 or block_table.shape[1] == 0:
        raise ValueError(
            f"block_table must be [N, max_pages] with at least one page, got {arguments.shape_of(block_table)}"
        )
    sequences = block_table.shape[0]
    if seqused_k.shape != (sequences,) or cu_seqlens_q.shape != (sequences + 1,):
        raise ValueError(
            f"block_table has {sequences} sequences, so seqused_k must be [{sequences}] and cu_seqlens_q [{sequences + 1}], got "
            f"{arguments.shape_of(seqused_k)} and {arguments.shape_of(cu_seqlens_q)}"
        )


def _check_scale(name: str, scale: Tensor | None, q: Tensor, full: tuple[int, ...], dims: str) -> None:
    if scale is None:
        return
    arguments.same_device(q, **{name: scale})
    arguments.check_dtype(name, scale, SCALE, q.dtype)
    if scale.shape not in ((), (1,), full):
        raise ValueError(
            f"{name} must be one number ([] or [1]) or {dims} = {list(full)}, got {arguments.shape_of(scale)}"
        )


def _per_head(scale: Tensor | None, sequences: int, heads_k: int) -> Tensor | None:
    return None if scale is None else scale.expand(sequences, heads_k)


DECODED = 16  # most tokens of a sequence that a step decodes, speculated ones included


@functools.lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    warnings.warn(f"flashsci: running 'triton', since {reason}", stacklevel=3)
