"""The options of flash_attn's functions, of any type, as keyword arguments of flashsci's."""

from __future__ import annotations

from operator import index
from typing import Any

from torch import Tensor

from flashsci.compat.kinds import flag, number

Window = tuple[int, int]
EVERYWHERE: Window = (-1, -1)


def window_of(window_size: Any) -> Window | None:
    """(left, right) as ints, -1 for a side without a bound; None where neither side has one.

    Args:
        window_size: two ints, or tensors or numpy scalars that hold ints; a tensor of two elements; None for no
            bounds. Every negative number is no bound.

    Raises:
        ValueError: any other value.
    """
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if type(left) is int is type(right) and left >= -1 <= right:
            return None if left == right == -1 else window_size
    if window_size is None:
        return None
    try:
        sides = window_size.tolist() if isinstance(window_size, Tensor) else window_size
        left, right = (max(-1, index(side)) for side in sides)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"window_size must be (left, right), two ints, got {window_size!r}; -1 is unbounded"
        ) from error
    return None if left == right == -1 else (left, right)


def constants(
    causal: Any, deterministic: Any, softcap: Any, dropout_p: Any, softmax_scale: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """The five options, in types that flashsci takes."""
    return (
        flag("causal", causal),
        flag("deterministic", deterministic),
        number("softcap", softcap),
        number("dropout_p", dropout_p),
        number("softmax_scale", softmax_scale),
    )


def options_of(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    deterministic: Any = False,
) -> dict[str, Any]:
    """The keyword arguments of flashsci.attention and varlen_attention."""
    causal, deterministic, softcap, dropout_p, softmax_scale = constants(
        causal, deterministic, softcap, dropout_p, softmax_scale
    )
    return {
        "causal": causal,
        "window": window_of(window_size),
        "align": "lower_right",
        "scale": softmax_scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "deterministic": deterministic or None,
    }
