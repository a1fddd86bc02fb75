"""The checks between the raw Triton ops and pointers: tensors that do not fit raise an error for any caller.

Kernels take sizes from q, k and v alone and do not check the rest. Offsets and a seed that are views are copied, as
are q, k, v whose rows are not contiguous; everything else that does not fit raises. A call that has passed is
remembered by the kinds of its tensors, so that a small call costs one look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.backends.triton import tilings
from flashsci.call import kinds
from flashsci.call.kinds import Role
from flashsci.call.mask_tiles import fits
from flashsci.call.op_checks import declared, need, numbers, rows_fit, same, shapes
from flashsci.call.ops import Saved, Scalars, Tangents, Tensors, statistics_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PRECISIONS = ("default", "ieee", "tf32x3", "tf32")
_known: set[tuple[Any, ...]] = set()


def _kind(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.dtype, x.get_device())


def _broadcasts(name: str, x: Tensor, full: Sequence[int], q: Tensor) -> None:
    """Check that x has as many dims as ``full``, each 1 or equal, and the dtype of its declaration."""
    fits = x.dim() == len(full) and all(n in (1, m) for n, m in zip(x.shape, full, strict=True))
    need(
        fits,
        f"{name} must have {len(full)} dims, each 1 or that of {list(full)}, got {list(x.shape)}",
    )
    declared(Tensors, name, x, x.shape, q)


def _check_inputs(tensors: Tensors) -> None:
    """Check all that shapes, dtypes and devices of ops.Tensors decide."""
    q, k, v, bias, mask = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.mask
    cu_q, cu_k, bias_offsets = tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.bias_offsets
    given = shapes(q=q, k=k, v=v)
    need(
        q.dtype in DTYPES,
        f"q, k and v must be float16, bfloat16 or float32, got {q.dtype}",
        TypeError,
    )
    need(
        q.dtype == k.dtype == v.dtype,
        f"q, k and v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}",
        TypeError,
    )
    need(
        q.device == k.device == v.device,
        f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}",
    )
    rank = q.dim()
    need(
        2 <= rank <= 5 and k.dim() == v.dim() == rank,
        f"q, k and v must have the same number of dims, 2 to 5, got {given}",
    )
    heads = rows_fit(q, k, v, tilings.MAX_HEAD_DIM)
    need((cu_q is None) == (cu_k is None), "cu_seqlens_q and cu_seqlens_k go together")
    need(
        cu_q is not None or bias_offsets is None,
        "bias_offsets belong to a packed call, with cu_seqlens",
    )
    if cu_q is not None and cu_k is not None:
        need(rank == 3, f"packed tensors are [heads, tokens, dim], got {given}")
        need(mask is None, "packed calls take no mask")
        for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            need(
                x.dim() == 1 and x.shape[0] >= 1,
                f"{name} must be a vector of N + 1 offsets, got {list(x.shape)}",
            )
            declared(Tensors, name, x, x.shape, q)
        need(
            cu_q.shape == cu_k.shape,
            f"cu_seqlens_q and cu_seqlens_k must have the same length, got {cu_q.shape[0]} and {cu_k.shape[0]}",
        )
        if bias is not None and bias_offsets is None:
            _broadcasts("bias", bias, (heads, 1, k.shape[-2]), q)
        elif bias is not None and bias_offsets is not None:
            fits = bias.dim() == 2 and bias.shape[0] in (1, heads)
            need(
                fits,
                f"a bias of pairs of packed sequences must be [1 or {heads}, pairs], got {list(bias.shape)}",
            )
            declared(Tensors, "bias", bias, bias.shape, q)
            declared(Tensors, "bias_offsets", bias_offsets, cu_q.shape, q)
    full = {Role.SCORES: (*q.shape[:-1], k.shape[-2]), Role.KEYS: tuple(k.shape[:-1])}
    for name, field in kinds.fields(Tensors).items():
        x = getattr(tensors, name)
        if x is not None and field.role in full and not (cu_q is not None and x is bias):
            _broadcasts(name, x, full[field.role], q)
    if tensors.mask_tiles is not None:
        _check_table(tensors.mask_tiles, mask, q, k)
    slopes, seed = tensors.alibi_slopes, tensors.dropout_seed
    if slopes is not None:
        shape = (*q.shape[:-3], heads) if cu_q is None else (cu_q.shape[0] - 1, heads)
        slopes = slopes.reshape((1,) * (len(shape) - slopes.dim()) + slopes.shape)
        _broadcasts("alibi_slopes", slopes, shape, q)
    if seed is not None:
        declared(Tensors, "dropout_seed", seed, (2,), q)


def _check_table(table: Tensor, mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Check the table of tiles of a mask, see kernels/tiles.py."""
    need(mask is not None, "mask_tiles belong to a mask")
    assert mask is not None
    right = table.dim() == mask.dim() and table.shape[-2] == 1 and fits(table.shape[-1], q.shape[-2], k.shape[-2])
    right = right and all(n in (1, m) for n, m in zip(table.shape[:-2], mask.shape[:-2], strict=True))
    need(
        right,
        f"mask_tiles must be the table of flashsci::triton_mask_tiles for a mask of {list(mask.shape)}, got "
        f"{list(table.shape)}",
    )
    declared(Tensors, "mask_tiles", table, table.shape, q)


def _check_results(q: Tensor, v: Tensor, of_out: dict[str, Tensor | None], of_lse: dict[str, Tensor | None]) -> None:
    for name, x in of_out.items():
        if x is not None:
            same(name, x, (*q.shape[:-1], v.shape[-1]), (q.dtype,), q)
    for name, x in of_lse.items():
        if x is not None:
            same(name, x, q.shape[:-1], (statistics_dtype(q.dtype),), q)


def _check_scalars(seed: Tensor | None, scalars: Scalars) -> None:
    """Check seed and options. The longest lengths are hints: any value is allowed."""
    dropout_p, precision = scalars.dropout_p, scalars.precision
    numbers(scalars.scale, scalars.softcap, scalars.window_left, scalars.window_right)
    need(0 <= dropout_p < 1, f"dropout_p must be in [0, 1), got {dropout_p}")
    need(not dropout_p or seed is not None, "dropout needs a dropout_seed")
    need(precision in PRECISIONS, f"precision must be one of {PRECISIONS}, got {precision!r}")


def _check_tangents(tangents: Sequence[Tensor | None], tensors: Tensors) -> None:
    """Check the tangents of one direction, or of several, one direction after the other."""
    q, count = tensors.q, len(Tangents._fields)
    for i, x in enumerate(tangents):
        name, like = Tangents._fields[i % count], tensors[i % count]
        if x is not None:
            need(like is not None, f"a tangent of {name} needs {name}")
            assert like is not None
            same(f"the tangent of {name}", x, like.shape, (like.dtype,), q)


def checked(
    tensors: Tensors,
    scalars: Scalars,
    tangents: Sequence[Tensor | None] = (),
    of_out: tuple[Tensor | None, ...] = (),
    of_lse: tuple[Tensor | None, ...] = (),
) -> Tensors:
    """The tensors as kernels read them. Raises for those that do not fit, unless a call of these kinds has passed
    before.

    ``of_out`` is out and dout, ``of_lse`` lse and dlse, or lse and its tangents along two directions, if the op has them.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    # Written out where every call has a tensor, because this is most of the cost of a small call.
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(),
        *[None if x is None else (x.shape, x.dtype, x.get_device()) for x in tensors[3:]],
        *[None if x is None else _kind(x) for x in (*tangents, *of_out, *of_lse)],
        *scalars[2:9], scalars.caps_bias,
    )  # fmt: skip
    if key not in _known:
        _check_inputs(tensors)
        _check_scalars(tensors.dropout_seed, scalars)
        _check_tangents(tangents, tensors)
        _check_results(
            q,
            v,
            dict(zip(("out", "dout"), of_out, strict=False)),
            dict(zip(("lse", "dlse") if len(of_lse) < 3 else ("lse", "tlse", "ulse"), of_lse, strict=False)),
        )
        if len(_known) >= 4096:
            _known.clear()
        _known.add(key)
    whole = tensors.cu_seqlens_q is tensors.dropout_seed is tensors.mask_tiles is None
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and whole:
        return tensors  # the usual call, at once
    return tensors.laid_out()


def check_scores(q: Tensor, shape: Sequence[int], dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Check scores that are a result, and their gradient."""
    for name, x in tensors.items():
        if x is not None:
            same(name, x, shape, (dtype,), q)


def forward(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """``kernels`` (dense.forward) behind the checks."""

    def op(tensors: Tensors, scalars: Scalars) -> Any:
        return kernels(checked(tensors, scalars), scalars)

    return op


def backward(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """dense.backward behind the checks."""

    def op(dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int) -> Any:
        tensors, out, lse, scalars = saved
        given = checked(tensors, scalars, (), (out, dout), (lse, dlse))
        return kernels(dout, dlse, Saved(given, out, lse, scalars), need)

    return op


def jvp(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """second_order.jvp behind the checks."""

    def op(tangents: Tangents, saved: Saved) -> Any:
        tensors, out, lse, scalars = saved
        given = checked(tensors, scalars, tangents, (out,), (lse,))
        return kernels(tangents, Saved(given, out, lse, scalars))

    return op


def many_jvp(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """many_jvp.many_jvp behind the checks."""

    def op(tangents: Tangents, saved: Saved) -> Any:
        tensors, out, lse, scalars = saved
        given = checked(tensors, scalars, _first("tangents", tangents), (out,), (lse,))
        return kernels(tangents, Saved(given, out, lse, scalars))

    return op


def many_backward(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """many_backward.many_backward behind the checks."""

    def op(dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int) -> Any:
        tensors, out, lse, scalars = saved
        of_out, of_lse = _first("cotangents", (dout, dlse))
        given = checked(tensors, scalars, (), (out, of_out), (lse, of_lse))
        return kernels(dout, dlse, Saved(given, out, lse, scalars), need)

    return op


def _first(what: str, along: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tangents or cotangents of the first of many directions."""
    counts = {x.shape[0] if x.dim() else -1 for x in along if x is not None}
    need(
        len(counts) == 1 and min(counts) >= 0,
        f"{what} along many directions are [n, *] with one n, and at least one is given; got "
        f"{[None if x is None else list(x.shape) for x in along]}",
    )
    return [None if x is None else x[0] if x.shape[0] else x.new_empty(x.shape[1:]) for x in along]


def second_jvp(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """second_jvp.second_jvp behind the checks."""

    def op(first: Tangents, second: Tangents, mixed: Tangents, tlse: Tensor, ulse: Tensor, saved: Saved) -> Any:
        tensors, out, lse, scalars = saved
        given = checked(tensors, scalars, (*first, *second, *mixed), (out,), (lse, tlse, ulse))
        return kernels(first, second, mixed, tlse, ulse, Saved(given, out, lse, scalars))

    return op


def double_backward(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """host_second_order.double_backward behind the checks."""

    def op(tangents: Tangents, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int) -> Any:
        tensors, out, lse, scalars = saved
        given = checked(tensors, scalars, tangents, (out, dout), (lse, dlse))
        return kernels(tangents, dout, dlse, Saved(given, out, lse, scalars), need)

    return op


def many_double_backward(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """many_double_backward.many_double_backward behind the checks."""

    def op(tangents: Tangents, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int) -> Any:
        tensors, out, lse, scalars = saved
        given = checked(tensors, scalars, _first("tangents", tangents), (out, dout), (lse, dlse))
        return kernels(tangents, dout, dlse, Saved(given, out, lse, scalars), need)

    return op
