"""Attention on 8-bit floats: `attention` and `varlen_attention` for q, k, v in float8_e4m3fn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call import arguments, transforms
from flashsci.call.fp8_ops import FP8, FP8Attention, FP8Scalars, FP8Tensors, rows_per_scale
from flashsci.call.kinds import SCALE, Scales
from flashsci.call.ops import bypasses_dispatcher
from flashsci.call.plans import Call, Run, absent, present, remember, repeated
from flashsci.call.problem import facts
from flashsci.call.torch_state import count_flops, hides_sizes
from flashsci.choice import backends, tuning
from flashsci.choice.choose import decide

OUT_DTYPES = (torch.bfloat16, torch.float16)
ACCUMULATE = ("safe", "fast")


class FP8Options(NamedTuple):
    """The tensors and options of a call that `attention` and `varlen_attention` pass on together."""

    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    out_dtype: torch.dtype | None
    fp8_accumulate: str
    # Features of Problem that these calls do not have, by name.
    bias: Tensor | None = None
    key_weight: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    pair_gate: Tensor | None = None


def dense(q: Tensor, k: Tensor, v: Tensor, given: FP8Options, options: arguments.Options, backend: str) -> Any:
    """`flashsci.attention` of 8-bit floats: out, or with return_lse (out, lse)."""
    tensors = (q, k, v, *given[:3])
    run, call = _repeated("dense 8-bit", tensors, given, options, (), backend)
    if run is None:
        described = describe(q, k, v, given, options)
        leading = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        compute = functools.partial(_dense, leading, scalars_of(q, options, None, None, given))
        again = functools.partial(_dense_again, given, options)
        run = _chosen(described, backend, tensors, again, compute, call)
    out, lse = run(tensors)
    return (out, lse) if options.return_lse else out


def _dense(
    leading: torch.Size, scalars: FP8Scalars, attend: FP8Attention, given: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of q, k, v and their scales."""
    q, k, v, *scales_given = given
    q, k, v, scales = as_kernels_take_them(q, k, v, tuple(scales_given), leading)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    q_scale, k_scale, v_scale = scales
    out, lse = attend(FP8Tensors(q, k, v, q_scale, k_scale, v_scale, None, None), scalars)
    if len(leading) > 2:
        out = out.unflatten(0, leading[:-1])
        lse = lse.unflatten(0, leading[:-1]) if scalars.return_lse else lse
    return out, lse


def _repeated(
    entry: str,
    tensors: tuple[Tensor | None, ...],
    given: FP8Options,
    options: arguments.Options,
    others: tuple[Any, ...],
    backend: str,
) -> tuple[Run | None, Call | None]:
    """:func:`flashsci.call.plans.repeated`, for calls without features that no kernel on 8-bit floats has."""
    if not all(map(absent, given[5:])):
        return None, None
    seen = tuple(filter(present, tensors))
    kind = (entry, *map(absent, tensors))
    return repeated(kind, seen, (*options, *given[3:5], *others), None, backend)


def _chosen(
    described: tuple[Any, ...],
    backend: str,
    tensors: Sequence[Tensor | None],
    again: tuning.Again,
    compute: Callable[..., tuple[Tensor, Tensor]],
    call: Call | None,
) -> Run:
    """The run of a call by the backend that should compute it, remembered where repeats may skip the decision.

    Args:
        described: the arguments of problem_of.
        tensors, again: those of :func:`flashsci.choice.tuning.consider`.
        compute: computes the call by a backend's function, its first argument.
        call: as :func:`_repeated` returns it.
    """
    final = torch.compiler.is_compiling() or not tuning.active or tuning.consider(described, backend, tensors, again)
    choice = decide(backends.FP8, described, backend)
    count_flops()
    op = backends.LOADED[backends.FP8][choice.forward]
    if final and call is not None and bypasses_dispatcher(call[1]):
        remember(call, functools.partial(compute, op.plain))
    return functools.partial(compute, op)


def _rescaled(given: FP8Options, scales: Sequence[Any]) -> FP8Options:
    return given._replace(**dict(zip(Scales._fields, scales, strict=True)))


def _dense_again(given: FP8Options, options: arguments.Options, tensors: Sequence[Any], backend: str) -> Any:
    """The same call of other tensors: q, k, v and their scales."""
    q, k, v, *scales = tensors
    return dense(q, k, v, _rescaled(given, scales), options, backend)


def as_kernels_take_them(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor | None, ...], leading: torch.Size
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Dense q, k, v and their scales in one rank, with at most two leading dims."""
    if not (q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and q.dim() == k.dim() == v.dim()):
        pairs = [_expanded(x, s, leading) for x, s in zip((q, k, v), scales, strict=True)]
        (q, k, v), scales = zip(*pairs, strict=True)
    if len(leading) > 2:
        fold = len(leading) - 2
        q, k, v = (x.reshape(-1, *x.shape[fold + 1 :]) for x in (q, k, v))
        scales = tuple(s if s is None or s.dim() == 0 else s.reshape(-1, *s.shape[fold + 1 :]) for s in scales)
    return q, k, v, scales


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int | None, int | None],
    given: FP8Options,
    options: arguments.Options,
    validate: bool,
    backend: str,
) -> Any:
    """`flashsci.varlen_attention` of 8-bit floats: out, or with return_lse (out, lse)."""
    second = None if cu_seqlens[1] is cu_seqlens[0] else cu_seqlens[1]
    tensors = (q, k, v, *given[:3], cu_seqlens[0], second)
    run, call = _repeated("packed 8-bit", tensors, given, options, (*longest, validate), backend)
    described = describe(q, k, v, given, options, cu_seqlens) if run is None else ()
    if arguments.contents_are_seen(cu_seqlens[0], validate):
        arguments.check_cu_seqlens_contents("cu_seqlens_q", cu_seqlens[0], q.shape[0], longest[0])
        arguments.check_cu_seqlens_contents("cu_seqlens_k", cu_seqlens[1], k.shape[0], longest[1])
    if run is None:
        compute = functools.partial(_packed, scalars_of(q, options, *longest, given))
        again = functools.partial(_packed_again, longest, given, options)
        run = _chosen(described, backend, (q, k, v, *cu_seqlens, *given[:3]), again, compute, call)
    out, lse = run(tensors)
    return (out, lse) if options.return_lse else out


def _packed(scalars: FP8Scalars, attend: FP8Attention, given: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """out and lse of packed q, k, v, their scales and offsets; no second offsets: those of the queries."""
    q, k, v, q_scale, k_scale, v_scale, first, second = given
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (x.transpose(0, 1) for x in (q, k, v)))
    first = first.contiguous()
    second = first if second is None else second.contiguous()
    out, lse = attend(FP8Tensors(q, k, v, q_scale, k_scale, v_scale, first, second), scalars)
    return out.transpose(0, 1), lse


def _packed_again(
    longest: tuple[int | None, int | None],
    given: FP8Options,
    options: arguments.Options,
    tensors: Sequence[Any],
    backend: str,
) -> Any:
    """The same call of other tensors: q, k, v, their offsets and their scales."""
    q, k, v, *edges = tensors[:5]
    return packed(q, k, v, (edges[0], edges[1]), longest, _rescaled(given, tensors[5:]), options, False, backend)


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: FP8Options,
    options: arguments.Options,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> tuple[Any, ...]:
    """The arguments of problem_of for a call, checked except for the contents of its offsets.

    Raises:
        TypeError, ValueError: as :func:`flashsci.attention` documents.
    """
    if given.fp8_accumulate not in ACCUMULATE:
        raise ValueError(f"fp8_accumulate must be one of {ACCUMULATE}, got {given.fp8_accumulate!r}")
    if not q.dtype == k.dtype == v.dtype == FP8:
        _refuse_dtypes(q, k, v, given)
    others = {name: x for name, x in given._asdict().items() if name not in ("out_dtype", "fp8_accumulate")}
    arguments.check_types(q, k, v, **others)
    if q.is_nested:
        raise ValueError(
            "jagged float8_e4m3fn tensors are not served; give their values() and offsets() to flashsci.varlen_attention"
        )
    arguments.same_device(q, k=k, v=v, **others)
    edges = {} if cu_seqlens is None else dict(cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1])
    transforms.check("float8", q=q, k=k, v=v, **others, **edges)
    if given.out_dtype not in (None, *OUT_DTYPES):
        raise TypeError(f"out_dtype must be torch.bfloat16 (the default) or torch.float16, got {given.out_dtype!r}")
    features = options.features(dict(q=q, k=k, v=v, **others, **edges), False)
    features["bias_shape"] = None if given.bias is None else ()
    options.check()
    arguments.check_head_dims(q, k, v)
    heads = _check_dense(q, k, v) if cu_seqlens is None else _check_packed(q, k, v, cu_seqlens)
    sequences = -1 if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    for name, x, scale in zip("qkv", (q, k, v), given[:3], strict=True):
        _check_scale(f"{name}_scale", scale, x, sequences)
    features["varlen"] = cu_seqlens is not None
    if not hides_sizes(q, k, v):
        if cu_seqlens is None:
            leading = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
            features.update(batch=tuple(leading), seq_q=q.shape[-2], seq_k=k.shape[-2])
        else:
            features.update(batch=(sequences,), seq_q=q.shape[0], seq_k=k.shape[0])
    return facts(q, v, *heads, features)


def _refuse_dtypes(q: Tensor, k: Tensor, v: Tensor, given: FP8Options) -> None:
    dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
    if FP8 in (q.dtype, k.dtype, v.dtype):
        raise TypeError(
            f"q, k, v must share one dtype, got {dtypes}; flashsci.quantize makes float8_e4m3fn of what is not"
        )
    names = [n for n in ("q_scale", "k_scale", "v_scale", "out_dtype") if getattr(given, n) is not None]
    if not names:
        raise ValueError(
            f'fp8_accumulate="{given.fp8_accumulate}" is for float8_e4m3fn q, k, v (flashsci.quantize makes them), got {dtypes}; '
            "leave it out"
        )
    raise TypeError(
        f"{', '.join(names)} belong{'s' if len(names) == 1 else ''} to float8_e4m3fn q, k, v (flashsci.quantize makes them), got "
        f"{dtypes}; leave {'it' if len(names) == 1 else 'them'} out"
    )


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least two dims [S, D], got shape {list(x.shape)}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same length (dim -2), got {k.shape[-2]} and {v.shape[-2]}")
    heads_q, heads_k, heads_v = (x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v))
    arguments.check_heads(heads_q, heads_k, heads_v)
    try:
        torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    except RuntimeError as error:
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ValueError(f"the leading dims (before heads) of q, k, v do not broadcast: {shapes}") from error
    return heads_q, heads_k


def _check_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[Tensor, Tensor]) -> tuple[int, int]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"packed {name} must have shape [T, H, D], got {list(x.shape)}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k and v must have the same number of packed rows, got {k.shape[0]} and {v.shape[0]}")
    arguments.check_heads(q.shape[1], k.shape[1], v.shape[1])
    for name, edges in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True):
        arguments.check_cu_seqlens(name, edges, q)
    if cu_seqlens[0].shape != cu_seqlens[1].shape:
        counts = f"{cu_seqlens[0].shape[0] - 1} and {cu_seqlens[1].shape[0] - 1}"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must hold the same number of sequences, got {counts}")
    return q.shape[1], k.shape[1]


def _check_scale(name: str, scale: Tensor | None, x: Tensor, sequences: int) -> None:
    if scale is None:
        return
    arguments.check_dtype(name, scale, SCALE, x.dtype)
    inner = x.transpose(0, 1) if sequences >= 0 else x
    if rows_per_scale(scale, inner, sequences) is not None:
        return
    rows = inner.shape[-2]
    if sequences >= 0:
        heads = inner.shape[0]
        shapes = f"a sequence and head ([{sequences}, {heads}]) or a block of 128 or 64 rows ([{rows // 128 + sequences} or {rows // 64 + sequences}, {heads}])"
    else:
        outer = ", ".join(map(str, x.shape[:-2]))
        comma = ", " if outer else ""
        shapes = (
            f"a head ([{outer}]) or a block of 128 or 64 rows ([{outer}{comma}{-(-rows // 128)} or {-(-rows // 64)}])"
        )
    raise ValueError(
        f"{name} must have one number for all ([]), {shapes}, got {arguments.shape_of(scale)}; flashsci.quantize makes it"
    )


def _expanded(x: Tensor, scale: Tensor | None, leading: torch.Size) -> tuple[Tensor, Tensor | None]:
    """x as ``[*leading, H, S, D]``, and its scale with the same leading dims."""
    heads = x.shape[-3:] if x.dim() > 2 else (1, *x.shape)
    if scale is not None and scale.dim() > 0:
        blocks = scale.shape[x.dim() - 2 :]
        scale = scale.reshape(*x.shape[:-3], heads[0], *blocks).expand(*leading, heads[0], *blocks)
    return x.reshape(*x.shape[:-3], *heads).expand(*leading, *heads), scale


def scalars_of(
    q: Tensor,
    options: arguments.Options,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    given: FP8Options,
) -> FP8Scalars:
    every = options.scalars(q.shape[-1], max_seqlen_q, max_seqlen_k)
    return FP8Scalars(
        every.max_seqlen_q, every.max_seqlen_k, every.scale, every.softcap, every.window_left, every.window_right,
        every.lower_right, given.out_dtype or torch.bfloat16, options.return_lse, given.fp8_accumulate == "fast",
    )  # fmt: skip
