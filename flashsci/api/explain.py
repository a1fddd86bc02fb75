"""The backend and the kernels that would serve a call, and the reasons, without running it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashsci.api import block_mask, fp8, paged, residual
from flashsci.api.attention import attention
from flashsci.api.attention import describe as describe_dense
from flashsci.api.paged import paged_attention
from flashsci.api.residual import residual_attention
from flashsci.api.varlen import describe as describe_packed
from flashsci.api.varlen import varlen_attention
from flashsci.call import arguments, head_padding, transforms
from flashsci.call.fp8_ops import FP8Tensors
from flashsci.call.kinds import Dense, Packed, Role, fields, named
from flashsci.call.ops import Tensors
from flashsci.call.paged_ops import PagedTensors
from flashsci.call.plans import gradients
from flashsci.call.problem import problem_of
from flashsci.call.ranks import aligned
from flashsci.call.torch_state import autocast, transforming
from flashsci.choice import choose, explanation
from flashsci.choice.backends import FORWARD_OF_CUDA, requested
from flashsci.choice.gradients import BY_RULES, by_rules
from flashsci.choice.gradients import gradients as gradients_of
from flashsci.choice.gradients import named as named_choice


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    entry: Callable[..., Any] | None = None,
    backend: str = "auto",
    **options: Any,
) -> explanation.Explanation:
    """The backend and the kernels that would serve a call of an entry point, and the reasons.

    Args:
        q, k, v, options: as for the call in question.
        entry: the function that would be called: ``flashsci.attention``, ``varlen_attention``, ``paged_attention`` or
            ``residual_attention``. None: ``varlen_attention`` with ``cu_seqlens_q``, ``paged_attention`` with
            ``block_table``, else ``attention``.
        backend: as for the call in question.

    Returns:
        An :class:`Explanation`: the backend asked for, the backend chosen, the reason of each backend that refused,
        and the CUDA kernels where they compute the call or its gradients. Printing it gives a table.

    Raises:
        TypeError, ValueError: the arguments do not fit, as in the call itself.

    Examples:
        >>> import torch, flashsci
        >>> q = k = v = torch.randn(2, 4, 8, 16)
        >>> flashsci.explain(q, k, v, causal=True).chosen
        'sdpa'
        >>> flashsci.explain(q, k, v, entry=flashsci.residual_attention, backend="eager").chosen
        'eager'
    """
    if entry is None:
        packed = varlen_attention if "cu_seqlens_q" in options else attention
        entry = paged_attention if "block_table" in options else packed
    if entry not in _ENTRIES:
        names = ", ".join(known.__name__ for known in _ENTRIES)
        raise ValueError(f"entry must be one of the functions {names} of flashsci, got {entry!r}")
    bound = inspect.signature(entry).bind(q, k, v, **options)
    bound.apply_defaults()
    return _ENTRIES[entry](backend, bound.arguments)


def _attention(backend: str, given: dict[str, Any]) -> explanation.Explanation:
    """For attention and varlen_attention."""
    q, k, v = (given[name] for name in "qkv")
    packed = "cu_seqlens_q" in given
    shared = arguments.Options.of(*(given[name] for name in arguments.SHARED))
    declared = Packed if packed else Dense
    mask, tiles = block_mask.parts(given.get("mask"))
    given = {**given, "mask": mask}
    tensors = declared(**{name: given[name] for name in declared._fields})
    others = {
        n: getattr(tensors, n)
        for n, field in fields(declared).items()
        if field.optional and field.role is not Role.INDEX
    }
    arguments.check_types(q, k, v, **others)
    of_fp8 = {n: given[n] for n in ("q_scale", "k_scale", "v_scale", "out_dtype")}
    accumulate = given["fp8_accumulate"]
    offsets = [getattr(tensors, name) for name in named(declared, Role.INDEX)]
    longest = given.get("max_seqlen_q"), given.get("max_seqlen_k")
    if q.dtype == fp8.FP8 or accumulate != "safe" or any(x is not None for x in of_fp8.values()):
        scaled = fp8.FP8Options(**of_fp8, fp8_accumulate=accumulate, **others)
        return _fp8(backend, (q, k, v), scaled, shared, tuple(offsets), longest)
    q, k, v = autocast(q, k, v)
    if head_padding.pays(q, k, v, shared, backend, *offsets[:1]):
        q, k, v = (head_padding.in_whole_pieces(x) for x in (q, k, v))
    tensors = tensors._replace(q=q, k=k, v=v, bias=arguments.widened(tensors.bias, q.dtype))
    needs_grad = transforms.needs_grad(*tensors)
    describe: Any = describe_packed if packed else functools.partial(describe_dense, tiled=tiles is not None)
    found = _explained(describe(tensors, shared, needs_grad), backend)
    taken = {name: x for name, x in tensors._asdict().items() if name in Tensors._fields}
    if packed:
        taken["cu_seqlens_q"], taken["cu_seqlens_k"] = _both(offsets)
    return _with_kernels(found, Tensors(**taken), shared, needs_grad, longest)


def _both(offsets: Any) -> tuple[Tensor | None, Tensor | None]:
    """The offsets of queries and of keys, which may be one tensor."""
    first, second = (*offsets, None, None)[:2]
    return first, first if second is None else second


def _explained(call: tuple[Any, ...], backend: str) -> explanation.Explanation:
    """The explanation of a call here, within the active transforms."""
    found = explanation.explain(problem_of(*call), *requested(backend))
    if found.chosen != "sdpa" or not transforming():
        return found
    reason = (
        "no transform of torch.func and no forward mode sees through SDPA; 'reference' computes what it is chosen for"
    )
    return replace(found, chosen="reference", reasons={**found.reasons, "sdpa": reason})


def _naming() -> Any:
    from flashsci.backends.cuda import naming

    return naming


def _with_kernels(
    found: explanation.Explanation,
    tensors: Tensors,
    options: arguments.Options,
    needs_grad: bool,
    longest: tuple[int | None, int | None] = (None, None),
) -> explanation.Explanation:
    """The explanation of a dense or packed call with the names of its kernels. ``tensors``: as the user gives them."""
    q = tensors.q
    if found.chosen is None:
        return found
    choice = (by_rules if found.asked == "auto" else named_choice)(found.chosen)
    by_cuda = choice.forward in FORWARD_OF_CUDA
    if not (by_cuda or (choice.gradients == BY_RULES and needs_grad)) or q.is_nested:
        return found
    naming = _naming()
    flags = gradients(*tensors.leaves)[: len(tensors.leaves)] if needs_grad else ()
    need = sum(1 << i for i, wanted in enumerate(flags) if wanted)
    rows = Tensors(*map(naming.without_memory, tensors))
    if tensors.cu_seqlens_q is None:
        leading = torch.broadcast_shapes(*(x.shape[:-3] for x in (rows.q, rows.k, rows.v)))
        rows = aligned(rows, tuple(leading))
    else:
        heads_first = (x.transpose(0, 1) for x in (rows.q, rows.k, rows.v))
        rows = rows._replace(**dict(zip("qkv", heads_first, strict=True)))
    scalars = options.scalars(q.shape[-1], *longest)
    copied = replace(found.problem, inner_heads=False)  # the bias, where kernels do not take it in place

    def whose(strides: bool) -> str | None:
        return gradients_of(choice, copied, strides).backend

    kernels = naming.attention(choice.forward, rows, scalars, need, q.device, whose)
    found = replace(found, kernel=kernels.kernel, gradient_kernel=kernels.gradient_kernel)
    taken = by_cuda and kernels.gradients == choice.forward
    if taken and gradients_of(choice, found.problem).backend != choice.forward:
        # The remark is of other strides than these.
        others = {n: remark for n, remark in found.remarks.items() if n != found.chosen}
        found = replace(found, remarks=others)
    return found


def _fp8(
    backend: str,
    rows: tuple[Tensor, Tensor, Tensor],
    given: fp8.FP8Options,
    options: arguments.Options,
    offsets: tuple[Any, ...],
    longest: tuple[int | None, int | None],
) -> explanation.Explanation:
    """For both on 8-bit floats. ``offsets``: of packed sequences."""
    edges: Any = _both(offsets) if offsets else None
    found = _explained(fp8.describe(*rows, given, options, edges), backend)
    if found.chosen not in FORWARD_OF_CUDA:
        return found
    naming = _naming()
    q, k, v = map(naming.without_memory, rows)
    scales = tuple(map(naming.without_memory, given[:3]))
    if edges is None:
        leading = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        q, k, v, scales = fp8.as_kernels_take_them(q, k, v, scales, leading)
    else:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    without = (None if x is None else naming.without_memory(x).contiguous() for x in edges or (None, None))
    scalars = fp8.scalars_of(q, options, *longest, given)
    tensors = FP8Tensors(q, k, v, *scales, *without)
    return replace(found, kernel=naming.fp8(tensors, scalars, rows[0].device))


def _paged(backend: str, given: dict[str, Any]) -> explanation.Explanation:
    shared = arguments.Options.of(
        given["causal"], given["window"], "lower_right", given["scale"], given["softcap"], 0.0, given["return_lse"], False, None
    )  # fmt: skip
    tensors, longest = PagedTensors(*(given[n] for n in PagedTensors._fields)), given["max_seqlen_q"]
    found = _explained(paged.describe(tensors, given["out"], longest, shared), backend)
    if found.chosen not in FORWARD_OF_CUDA:
        return found
    naming, q = _naming(), given["q"]
    rows = PagedTensors(*map(naming.without_memory, tensors))
    rows = paged.as_kernels_take_them(rows)
    out = naming.without_memory(given["out"])
    if out is None:
        out = rows.q.new_empty((*q.shape[:-1], rows.v_cache.shape[-1]))
    scalars = paged.scalars_of(q, longest, shared)
    kernel, reason = naming.paged(found.chosen, rows, out, scalars, q.device)
    if reason is not None:  # the call itself finds it only when the kernels refuse
        instead = "triton" if found.asked == "auto" and found.reasons["triton"] is None else None
        return replace(found, chosen=instead, reasons={**found.reasons, found.chosen: reason})
    return replace(found, kernel=kernel)


def _residual(backend: str, given: dict[str, Any]) -> explanation.Explanation:
    """For residual_attention: kernels that compute both results, or an attention and plain scores."""
    q, k, v, bias = (given[name] for name in ("q", "k", "v", "bias"))
    residual.check(q, k, v, bias)
    options = arguments.Options.of(
        False, None, "upper_left", given["scale"], None, given["dropout_p"], False, None, given["precision"]
    )
    q, k, v = autocast(q, k, v)
    bias = arguments.widened(bias, q.dtype)
    needs_grad = transforms.needs_grad(q, k, v, bias)
    found = _explained(residual.describe(q, k, v, bias, options, needs_grad), backend)
    reason, by_kernels = None, False
    if found.asked in choose.HAVE_RESIDUAL:
        reason = choose.rejects_residual(found.problem)
        by_kernels = found.asked == "triton" if reason is not None else not transforming()
    if by_kernels:
        lacks = "it has no kernel that computes out and scores"
        reasons = {n: reason if n == "triton" else lacks for n in found.reasons}
        chosen = "triton" if reason is None else None
        return replace(found, chosen=chosen, reasons=reasons, remarks={}, evidence="")
    found = _with_kernels(found, Tensors(q, k, v, bias), options, needs_grad)
    if found.chosen is None:
        return found
    why = "" if reason is None else f" (triton: {reason})"
    remark = f"it computes the attention, and plain PyTorch the scores{why}"
    earlier = found.remarks.get(found.chosen)
    text = remark if earlier is None else f"{remark}; {earlier}"
    return replace(found, remarks={**found.remarks, found.chosen: text})


_ENTRIES: dict[Callable[..., Any], Callable[..., explanation.Explanation]] = {
    attention: _attention,
    varlen_attention: _attention,
    paged_attention: _paged,
    residual_attention: _residual,
}
