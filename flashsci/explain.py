"""What would serve a call, and why, without running it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from flashsci import arguments, registry
from flashsci.attention import attention
from flashsci.attention import describe as describe_dense
from flashsci.tracing import autocast
from flashsci.varlen import describe as describe_packed
from flashsci.varlen import varlen_attention


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto", **options: Any
) -> registry.Explanation:
    """Which backend would serve ``attention(q, k, v, ...)`` (or ``varlen_attention``, given
    ``cu_seqlens_q``), and why.

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
    packed = "cu_seqlens_q" in options
    entry = varlen_attention if packed else attention
    bound = inspect.signature(entry).bind(q, k, v, **options)
    bound.apply_defaults()
    given = bound.arguments
    shared = arguments.Options.of(*(given[name] for name in arguments.SHARED))
    optional = ("bias", "mask", "key_weight", "alibi_slopes", "sink")
    others = {name: given[name] for name in optional if name in given}
    arguments.check_types(q, k, v, **others)
    q, k, v = autocast(q, k, v)
    needs_grad = arguments.needs_grad(q, k, v, *others.values())
    offsets = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if packed}
    describe = describe_packed if packed else describe_dense
    call = describe(q, k, v, **offsets, **others, options=shared, needs_grad=needs_grad)
    return registry.explain(registry.problem_of(*call), *registry.requested(backend))
