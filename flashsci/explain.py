"""What would serve a call, and why, without running it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from flashsci import arguments, registry
from flashsci.attention import attention
from flashsci.attention import describe as describe_dense
from flashsci.paged import describe as describe_paged
from flashsci.paged import paged_attention
from flashsci.tracing import autocast
from flashsci.varlen import describe as describe_packed
from flashsci.varlen import varlen_attention


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto", **options: Any
) -> registry.Explanation:
    """Which backend would serve ``attention(q, k, v, ...)``, and why; or ``varlen_attention``, given ``cu_seqlens_q``, or
    ``paged_attention``, given ``block_table``.

    Args:
        q, k, v, options: as for the call in question.
        backend: as for the call in question.

    Returns:
        An :class:`Explanation`: who was asked, who was chosen, the reason of each backend that
        refused. Printing it gives a table.

    Raises:
        TypeError, ValueError: the arguments do not fit, as in the call itself.

    Examples:
        >>> import torch, flashsci
        >>> q = k = v = torch.randn(2, 4, 8, 16)
        >>> flashsci.explain(q, k, v, causal=True).chosen
        'sdpa'
    """
    if "block_table" in options:
        return _explain_paged(q, k, v, backend, options)
    packed = "cu_seqlens_q" in options
    entry = varlen_attention if packed else attention
    bound = inspect.signature(entry).bind(q, k, v, **options)
    bound.apply_defaults()
    given = bound.arguments
    shared = arguments.Options.of(*(given[name] for name in arguments.SHARED))
    bias, weight = given["bias"], given["key_weight"]
    arguments.check_types(q, k, v, bias, given.get("mask"), weight)
    q, k, v = autocast(q, k, v)
    needs_grad = arguments.needs_grad(q, k, v, bias, weight)
    if packed:
        call = describe_packed(
            q, k, v, given["cu_seqlens_q"], given["cu_seqlens_k"], bias, weight, shared, needs_grad
        )
    else:
        call = describe_dense(q, k, v, bias, weight, given["mask"], shared, needs_grad)
    return registry.explain(registry.problem_of(*call), *registry.requested(backend))


def _explain_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, backend: str, options: dict[str, Any]
) -> registry.Explanation:
    bound = inspect.signature(paged_attention).bind(q, k_cache, v_cache, **options)
    bound.apply_defaults()
    given = bound.arguments
    shared = arguments.Options.of(
        given["causal"], given["window"], "lower_right", given["scale"], given["softcap"], 0.0, given["return_lse"], False, None
    )  # fmt: skip
    tensors = {n: given[n] for n in inspect.signature(describe_paged).parameters if n != "options"}
    call = describe_paged(**tensors, options=shared)
    return registry.explain(registry.problem_of(*call), *registry.requested(backend))
