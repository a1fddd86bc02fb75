"""The backend that would serve a call, and the reasons, without running it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor

from flashsci.api import fp8
from flashsci.api.attention import attention
from flashsci.api.attention import describe as describe_dense
from flashsci.api.paged import describe as describe_paged
from flashsci.api.paged import paged_attention
from flashsci.api.varlen import describe as describe_packed
from flashsci.api.varlen import varlen_attention
from flashsci.call import arguments, transforms
from flashsci.call.problem import problem_of
from flashsci.call.tracing import autocast, transforming
from flashsci.choice import explanation
from flashsci.choice.backends import requested


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto", **options: Any
) -> explanation.Explanation:
    """The backend that would serve a call of an entry point, and the reasons.

    The entry point is ``attention(q, k, v, ...)``; with ``cu_seqlens_q`` it is ``varlen_attention``, with
    ``block_table`` it is ``paged_attention``.

    Args:
        q, k, v, options: as for the call in question.
        backend: as for the call in question.

    Returns:
        An :class:`Explanation`: the backend asked for, the backend chosen, and the reason of each backend that
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
    optional = ("bias", "mask", "key_weight", "alibi_slopes", "sink")
    others = {name: given[name] for name in optional if name in given}
    arguments.check_types(q, k, v, **others)
    of_fp8 = {n: given[n] for n in ("q_scale", "k_scale", "v_scale", "out_dtype")}
    if q.dtype == fp8.FP8 or any(x is not None for x in of_fp8.values()):
        edges = None
        if packed:
            first, second = given["cu_seqlens_q"], given["cu_seqlens_k"]
            edges = first, first if second is None else second
        call = fp8.describe(q, k, v, fp8.Given(**of_fp8, **others), shared, edges)
        return _explained(call, backend)
    q, k, v = autocast(q, k, v)
    if "bias" in others:
        others["bias"] = arguments.widened(others["bias"], q.dtype)
    needs_grad = transforms.needs_grad(q, k, v, *others.values())
    offsets = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if packed}
    describe = describe_packed if packed else describe_dense
    call = describe(q, k, v, **offsets, **others, options=shared, needs_grad=needs_grad)
    return _explained(call, backend)


def _explained(call: tuple[Any, ...], backend: str) -> explanation.Explanation:
    """The explanation of a call here, within the active transforms."""
    found = explanation.explain(problem_of(*call), *requested(backend))
    if found.chosen != "sdpa" or not transforming():
        return found
    reason = (
        "no transform of torch.func and no forward mode sees through SDPA; 'reference' computes "
        "what it is chosen for"
    )
    return replace(found, chosen="reference", reasons={**found.reasons, "sdpa": reason})


def _explain_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, backend: str, options: dict[str, Any]
) -> explanation.Explanation:
    bound = inspect.signature(paged_attention).bind(q, k_cache, v_cache, **options)
    bound.apply_defaults()
    given = bound.arguments
    shared = arguments.Options.of(
        given["causal"], given["window"], "lower_right", given["scale"], given["softcap"], 0.0, given["return_lse"], False, None
    )  # fmt: skip
    tensors = {n: given[n] for n in inspect.signature(describe_paged).parameters if n != "options"}
    return _explained(describe_paged(**tensors, options=shared), backend)
