"""The checks that all raw ops share, with their messages, and the kinds of calls by which good calls are recognised.

Anyone may call an op, and kernels do not check. So every op checks its own arguments: dtypes, devices, shapes,
strides, numbers. It does not check the contents of tensors on a device, because that would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.call import memory
from flashsci.call.kinds import fields

MAX_LENGTH = 1 << 29  # rows, their differences and sums with a window fit 32 bits
MOST_KNOWN = 4096
FP32_MAX = torch.finfo(torch.float32).max


def need(condition: bool, message: str, kind: type[Exception] = ValueError) -> None:
    if not condition:
        raise kind(f"flashsci: {message}")


def shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())


def kinds(*tensors: Tensor | None) -> tuple[Any, ...]:
    """All properties of tensors that are checked, without their addresses."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def remember(known: dict[Any, Any], key: Any, found: Any) -> Any:
    """Keep the result of a kind of calls; if there are very many kinds, the earlier ones are forgotten."""
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[key] = found
    return found


def same(name: str, x: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], like: Tensor) -> None:
    """Check that x is a tensor of this shape and of one of these dtypes, on the device of ``like``."""
    need(
        x.device == like.device,
        f"{name} is on {x.device} and the first tensor of the call on {like.device}; move it there",
    )
    wanted = " or ".join(str(d) for d in dict.fromkeys(dtypes))
    need(x.dtype in dtypes, f"{name} must be {wanted}, got {x.dtype}", TypeError)
    need(tuple(x.shape) == tuple(shape), f"{name} must have shape {list(shape)}, got {list(x.shape)}")


def declared(declaration: type, name: str, x: Tensor, shape: Sequence[int], q: Tensor) -> None:
    """Check a tensor of a kind of call as :func:`same` does, with the dtypes of its declaration."""
    argument = fields(declaration)[name].argument
    assert argument is not None, f"{name} is an option"
    same(name, x, shape, argument.taken(q.dtype), q)


def inner_contiguous(name: str, x: Tensor) -> None:
    """Check the rows of an x that is written or too large to be copied: its last dim is contiguous."""
    need(
        x.stride(-1) == 1 or x.shape[-1] == 1,
        f"the last dim of {name} must be contiguous, got strides {list(x.stride())}; no copy of it is made",
    )


def rows_fit(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> int:
    """Check the shapes of q, k, v ``[*, H, S, D]`` of one rank against each other; returns the heads of q.

    Raises:
        ValueError: shapes that do not fit, or head dims above ``head_dim``.
    """
    given = shapes(q=q, k=k, v=v)
    need(
        q.shape[:-3] == k.shape[:-3] == v.shape[:-3],
        f"the leading dims of q, k and v differ: {given}",
    )
    need(k.shape[:-1] == v.shape[:-1], f"k and v must have the same heads and keys: {given}")
    need(q.shape[-1] == k.shape[-1], f"q and k must have the same head dim: {given}")
    dims = q.shape[-1], v.shape[-1]
    need(
        min(dims) >= 1 and max(dims) <= head_dim,
        f"head dims must be 1 to {head_dim}: {given}",
    )
    heads, heads_k = (x.shape[-3] if q.dim() > 2 else 1 for x in (q, k))
    need(
        heads == 0 or (heads_k > 0 and heads % heads_k == 0),
        f"the heads of q must be a multiple of those of k: {given}",
    )
    need(
        max(q.shape[-2], k.shape[-2]) <= MAX_LENGTH,
        f"sequences are limited to 2^29 rows: {given}",
    )
    return heads


def rows(x: Tensor) -> Tensor:
    """x, or a copy if the stride of its last dim is not 1.

    ``contiguous`` would give an empty tensor back as it is, which the library refuses as it does any such stride.
    """
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def whole(x: Tensor | None) -> Tensor | None:
    """x, or a copy if it is not contiguous."""
    return None if x is None else x.contiguous()


def numbers(scale: float, softcap: float, window_left: int, window_right: int, most: float = FP32_MAX) -> None:
    """Check the options that all ops share; ``most``: the largest number in which they compute."""
    need(-most <= scale <= most, f"scale must be finite (at most {most:.1e}), got {scale}")
    need(0 <= softcap <= most, f"softcap must be >= 0 and finite (at most {most:.1e}), got {softcap}")
    need(
        window_left >= -1 and window_right >= -1,
        f"window_left and window_right must be >= 0, or -1 for unbounded, got {window_left} and {window_right}",
    )


def need_no_overlap(written: str, x: Tensor, **others: Tensor | None) -> None:
    """Check that x, which an op writes, shares no memory with the others, which it reads."""
    for name, y in others.items():
        need(
            y is None or not memory.share(x, y),
            f"{written} shares memory with {name}, which is read while {written} is written; give {written} memory of its own, "
            f"or {name}.clone()",
        )


def unfolded(name: str, x: Tensor) -> None:
    need(
        not memory.folds(x),
        f"{name} is written, and elements of it share memory: shape {list(x.shape)}, strides {list(x.stride())}; "
        f"give {name}.clone() or a new tensor",
    )


def implement(library: torch.library.Library, name: str, kernel: Callable[..., Any], key: str) -> None:
    """Register an op's kernel for a dispatch key. torch accepts None for any tensor of a schema; here that raises."""
    arguments = torch._C._get_schema(f"flashsci::{name}", "").arguments
    needed = [(i, a.name) for i, a in enumerate(arguments) if str(a.type) == "Tensor"]

    def complete(*given: Any) -> Any:
        for i, argument in needed:
            if given[i] is None:
                raise TypeError(f"flashsci: {argument} must be a torch.Tensor, got None")
        return kernel(*given)

    library.impl(name, complete, key)


def on_one_device(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel that refuses tensors of several devices: torch also calls it if one is on "meta" and others are
    not."""

    def checked(*arguments: Any) -> Any:
        found = {x.device for x in arguments if isinstance(x, Tensor)}
        if len(found) > 1:
            names = ", ".join(sorted(map(str, found)))
            need(False, f"all tensors of an op must be on one device, got {names}; move them to one")
        return fake(*arguments)

    return checked
