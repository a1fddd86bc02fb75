"""``torch.nn.functional.scaled_dot_product_attention`` with the same arguments, served by this package's backends."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.call import arguments
from flashsci.call.ops import interleaved


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with the same arguments and meaning, served by flashsci's
    backends.

    It can replace torch's function by name.

    Args:
        query: ``[..., Hq, L, E]``, also ``[N, L, E]`` and ``[L, E]``; float16, bfloat16, float32 or float64.
        key: ``[..., H, S, E]``. All dims before the last two broadcast, heads among them.
        value: ``[..., H, S, Ev]``.
        attn_mask: broadcastable to ``[..., Hq, L, S]``. Bool: True takes part. Float, in query's dtype or float32:
            added to the scores; if it requires a gradient, this has its own shape. Or one of
            ``torch.nn.attention.bias``: ``causal_upper_left``, ``causal_lower_right``.
        dropout_p: probability of dropping an entry of the weights, in [0, 1]; applied in any mode of a module.
        is_causal: query i sees keys up to i (the diagonal starts upper left), among those that ``attn_mask`` leaves.
        scale: factor of the scores; default ``1 / sqrt(E)``. A tensor without dims and without a gradient is read on
            the host.
        enable_gqa: key and value may have fewer heads than query, a divisor of Hq: each serves ``Hq / H`` neighbours.

    Returns:
        ``[..., Hq, L, Ev]`` in query's dtype and memory layout. A row that may attend to no key is 0, with gradients
        of 0 (as in torch since 2.5; before it was NaN).

    Raises:
        TypeError: dtypes that do not fit; a scale that is a tensor with a gradient (multiply ``query`` by it).
        ValueError: shapes that do not fit; nested tensors that are not jagged.
        BackendError: no backend can serve the call, or the one of :func:`flashsci.use_backend` cannot.

    Dropout follows torch's generator, but drops other entries than torch's kernels do. Under autocast query, key and
    value are cast; a float mask is never cast.

    Examples:
        >>> import torch, flashsci
        >>> query, key, value = torch.randn(3, 2, 4, 10, 16).unbind(0)
        >>> ours = flashsci.sdpa(query, key, value, is_causal=True)
        >>> torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(
        ...     query, key, value, is_causal=True), atol=1e-6)
        True

    Source: the documentation of torch.nn.functional.scaled_dot_product_attention, torch 2.13.
    """
    if type(query).__name__ != "DTensor":  # attention() checks those
        arguments.check_types(query, key, value)
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor or None, got {type(attn_mask).__name__}")
    align = "upper_left"
    if type(attn_mask).__name__ == "CausalBias":  # of torch.nn.attention.bias; it holds no values
        align, attn_mask, is_causal = attn_mask.variant.name.lower(), None, True  # type: ignore[union-attr]
    by_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    if query.is_nested and query.layout != torch.jagged:
        raise ValueError(
            f"query is a nested tensor of layout {query.layout}; make it with "
            "torch.nested.nested_tensor(..., layout=torch.jagged)"
        )
    query, key, value = _heads(query, key, value, arguments.flag("enable_gqa", enable_gqa))
    dropout_p = _constant(dropout_p)
    drops_all = dropout_p == 1
    result: Tensor = attention(
        query,
        key,
        value,
        bias=None if by_bool else attn_mask,
        mask=attn_mask if by_bool else None,
        causal=is_causal,
        align=align,
        scale=_constant(scale),
        dropout_p=0.0 if drops_all else dropout_p,
    )
    return torch.dropout(result, 1.0, True) if drops_all else result


def _constant(x: Any) -> Any:
    """An option as a number; torch also takes it as a tensor without dims and without a gradient."""
    if isinstance(x, Tensor) and x.dim() == 0 and not x.requires_grad:
        return x.item()
    return x


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as attention() takes them: equal numbers for key and value, a divisor of query's."""
    counts = tuple(x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    of_query, of_key, of_value = counts
    if of_query == of_key == of_value:
        return query, key, value
    if enable_gqa:
        if not (of_key and of_value) or of_query % of_key or of_query % of_value:
            raise ValueError(
                "with enable_gqa the heads of key and value must divide those of query, got "
                f"{of_key} and {of_value} for {of_query}"
            )
        if of_key != of_value:
            heads = math.lcm(of_key, of_value)
            key, value = (interleaved(x, heads // n, -3) for x, n in ((key, of_key), (value, of_value)))
        return query, key, value
    several = {n for n in counts if n != 1}
    if len(several) != 1 or query.is_nested:
        raise ValueError(
            f"query, key and value have {of_query}, {of_key} and {of_value} heads (dim -3), which do not "
            "broadcast; enable_gqa=True lets key and value have fewer"
        )
    (heads,) = several

    def expanded(x: Tensor) -> Tensor:
        return x.expand(*x.shape[:-3], heads, *x.shape[-2:])

    if of_key != of_value:
        key, value = expanded(key), expanded(value)
    return expanded(query), key, value
