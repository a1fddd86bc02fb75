"""The CUDA backend: it maps the contract onto the ops of the library flashsci/_C.so.

The library (library.py) picks the newest generation of kernels that serves a call (capabilities.py, decisions.py). SM75, SM80
and SM90 are the same backend restricted to one generation, for tests and comparisons: ``use_backend("cuda:sm75")``. prepared.py makes repeated calls without torch's dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flashsci.backends.cuda import decisions, layouts, library, masked_bias, prepared
from flashsci.backends.cuda.capabilities import DROPPING, READS, WEIGHTED, backward_kernels, older_backward, rejects
from flashsci.backends.cuda.decisions import hopper_takes, reads_ragged_bias
from flashsci.backends.cuda.library import build_info, library_path, stale, unavailable
from flashsci.call.op_checks import rows
from flashsci.call.ops import NEED_BIAS, Given, Saved, Scalars, Tensors
from flashsci.errors import BackendError

__all__ = [
    "READS",
    "SM75",
    "SM80",
    "SM90",
    "backward",
    "backward_kernels",
    "build_info",
    "forward",
    "hopper_takes",
    "library_path",
    "older_backward",
    "prepared_backward",
    "prepared_forward",
    "reads_ragged_bias",
    "rejects",
    "slope_sums",
    "stale",
    "takes_bias",
    "takes_pairs",
    "unavailable",
]

FUSED = True


def _call(op: Any, generation: int, *arguments: Any) -> Any:
    """An op of the library. If one generation is asked for and does not take these strides, its refusal is a
    BackendError."""
    try:
        return op(*arguments)
    except RuntimeError as error:
        text = str(error).split("\n")[0]
        if generation and "serves this call on compute capability" in text:
            raise BackendError(text) from None
        raise


def forward(tensors: Tensors, scalars: Scalars, generation: int = 0) -> tuple[Tensor, Tensor]:
    """out, lse of a call that `rejects` accepts."""
    if library.ops is None:
        reason = library.load()
        if reason is not None:
            raise BackendError(f"flashsci: {reason}")
    _require_served(tensors, scalars)
    tensors = layouts.whole_rows(tensors)
    result: tuple[Tensor, Tensor] = _call(
        library.ops[0],
        generation,
        *layouts.inputs(tensors),
        *layouts.options(scalars),
        generation,
        tensors.key_weight is not None,
        *layouts.last_options(tensors, scalars),
    )
    return result


def _require_served(tensors: Tensors, scalars: Scalars) -> None:
    """Refuse calls with features that no kernel has: the choice of this backend may have missed one, and kernels
    would ignore it."""
    if _lacks(tensors, scalars):
        raise BackendError(
            "flashsci: the cuda backend has no alibi_slopes beside a bias or key_weight, "
            f"{DROPPING.removeprefix('it ')}, and {WEIGHTED.removeprefix('it ')}; "
            "use backend='triton'"
        )


def _lacks(tensors: Tensors, scalars: Scalars) -> bool:
    """Whether a call has a feature that no kernel of the library has."""
    weighted = tensors.key_weight is not None and not decisions.takes_weights(tensors, scalars)
    alibi = tensors.alibi_slopes is not None and (tensors.bias is not None or tensors.key_weight is not None)
    packed = layouts.has_packed_bias(tensors) or (tensors.alibi_slopes is not None and tensors.cu_seqlens_q is not None)
    wide = max(tensors.q.shape[-1], tensors.v.shape[-1]) > 128
    undropped = tensors.q.dtype == torch.float32 or wide or tensors.key_weight is not None or packed
    return (bool(scalars.dropout_p) and undropped) or alibi or weighted


def takes_bias(tensors: Tensors, scalars: Scalars, needs_grad: bool, generation: int = 0) -> bool:
    """Whether the library takes a bias whose keys are not neighbours in memory at least as well as a copy with
    neighbouring keys.

    csrc/sm90/pair takes it if its heads are neighbours. Without gradients triangle attention takes it too: it makes a
    copy itself, during other work; and so do kernels of small calls.
    """
    found = _takes_bias(tensors, scalars, generation)
    if found == prepared.AS_GIVEN or needs_grad:
        return found == prepared.AS_GIVEN
    return found == prepared.FORWARD_AS_GIVEN or decisions.reads_small_bias(tensors, scalars, generation)


def takes_pairs(tensors: Tensors, scalars: Scalars, generation: int = 0) -> bool:
    """Whether csrc/sm90/pair computes the gradients of a call; it takes the bias without a copy."""
    return tensors.has_strided_bias() and (_takes_bias(tensors, scalars, generation) == prepared.AS_GIVEN)


def _takes_bias(tensors: Tensors, scalars: Scalars, generation: int) -> int:
    if tensors.bias is None or library.load() is not None or _lacks(tensors, scalars):
        return 0
    if not prepared.has_scores(tensors) or layouts.has_packed_bias(tensors):
        return 0
    if tensors.q.device.type != "cuda":
        return 0
    options = layouts.options(scalars)
    return prepared.takes_bias(library.handle, tensors, (*options, generation, False, False, scalars.caps_bias))


def prepared_forward(
    tensors: Tensors, scalars: Scalars, generation: int = 0
) -> Callable[[Given], tuple[Tensor, Tensor]]:
    """:func:`forward` prepared for plain tensors with the signature of these, in their order."""

    def general(tensors: Given) -> tuple[Tensor, Tensor]:
        return forward(Tensors(*tensors), scalars, generation)

    if library.load() is not None or _lacks(tensors, scalars) or not prepared.has_scores(tensors):
        return general
    if library.fills_results() or scalars.dropout_p or layouts.has_packed_bias(tensors):
        return general
    weighted = tensors.key_weight is not None
    if tensors.key_weight is not None and tensors.key_weight.dtype != torch.float32:
        return general
    options = *layouts.options(scalars), generation, weighted, *layouts.last_options(tensors, scalars)
    made = prepared.PreparedForward if tensors.alibi_slopes is None else prepared.PreparedForwardOfSlopes
    return made(library.handle, tensors, options, general)


def backward(
    dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int, generation: int = 0
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbias, dkey_weight of a call that `backward_kernels` accepts."""
    _require_served(saved.tensors, saved.scalars)
    saved = saved._replace(tensors=layouts.whole_rows(saved.tensors.laid_out()))
    tensors = saved.tensors
    if decisions.hides_in_bias(saved, need, generation):
        tensors = masked_bias.hidden_in_bias(tensors)
    q, bias, weights = tensors.q, tensors.bias, tensors.key_weight
    tensors = layouts.with_own_heads(tensors, need)
    dout = None if dout is None else rows(dout)
    out, lse = rows(saved.out), saved.lse.contiguous()
    if weights is not None:
        out, dout = layouts.on_16_bytes(out), None if dout is None else layouts.on_16_bytes(dout)
    inputs = *layouts.inputs(tensors), out, lse
    options = *layouts.options(saved.scalars), saved.scalars.deterministic, generation
    if weights is None:
        last = layouts.last_options(tensors, saved.scalars)
        unweighted = (False, *last) if last else ()
        *rows_of, dbias = _call(library.ops[1], generation, dout, dlse, *inputs, *options, need, *unweighted)
        return *rows_of, layouts.summed(dbias, bias), q.new_empty(0)
    need = layouts.bias_or_weights_needed(need)
    *found, dweights = _call(library.ops[1], generation, dout, dlse, *inputs, *options, need, True)
    if need & NEED_BIAS:
        dweights = dweights.reshape(weights.shape).to(weights.dtype)
    return *found, q.new_empty(0), dweights


def slope_sums(dout: Tensor | None, dlse: Tensor | None, saved: Saved, generation: int = 0) -> Tensor:
    """The gradient of ALiBi slopes as sums over keys, fp32 [*, Hq, Sq]: those of the rows of a head make that of its
    slope."""
    return backward(dout, dlse, saved, NEED_BIAS, generation)[3]


def prepared_backward(
    dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int, generation: int = 0
) -> Callable[..., tuple[Tensor | None, ...]]:
    """:func:`backward` prepared in the same way: a function of (dout, dlse, tensors, out, lse), with None for
    gradients that ``need`` does not name."""
    scalars = saved.scalars
    _require_served(saved.tensors, scalars)
    if decisions.hides_in_bias(saved, need, generation):
        saved = saved._replace(tensors=masked_bias.hidden_in_bias(saved.tensors))
        return masked_bias.hiding(prepared_backward(dout, dlse, saved, need, generation))

    def general(
        dout: Tensor | None, dlse: Tensor | None, tensors: Given, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved = Saved(Tensors(*tensors), out, lse, scalars)
        found = backward(dout, dlse, saved, need, generation)
        return tuple([x if need >> i & 1 else None for i, x in enumerate(found)])

    in_rows = all(x is None or x.stride(-1) == 1 for x in (dout, saved.out))
    if not in_rows or not saved.lse.is_contiguous() or not prepared.has_scores(saved.tensors):
        return general
    if library.fills_results() or scalars.dropout_p or layouts.has_packed_bias(saved.tensors):
        return general
    weighted = saved.tensors.key_weight is not None
    if saved.tensors.key_weight is not None and saved.tensors.key_weight.dtype != torch.float32:
        return general
    options = (
        *layouts.options(scalars),
        scalars.deterministic,
        generation,
        weighted,
        *layouts.last_options(saved.tensors, scalars),
    )
    by_pairs = takes_pairs(saved.tensors, scalars, generation) and dout is not None
    made = prepared.PreparedBackward if saved.tensors.alibi_slopes is None else prepared.PreparedBackwardOfSlopes
    return made(library.handle, dout, dlse, saved, need, options, general, by_pairs)


def _restricted_to(generation: int) -> SimpleNamespace:
    return SimpleNamespace(
        FUSED=FUSED,
        READS=READS,
        unavailable=unavailable,
        rejects=functools.partial(rejects, generation=generation),
        backward_kernels=functools.partial(backward_kernels, generation=generation),
        older_backward=functools.partial(older_backward, generation=generation),
        hopper_takes=hopper_takes,
        forward=functools.partial(forward, generation=generation),
        backward=functools.partial(backward, generation=generation),
        slope_sums=functools.partial(slope_sums, generation=generation),
        takes_bias=functools.partial(takes_bias, generation=generation),
        takes_pairs=functools.partial(takes_pairs, generation=generation),
        prepared_forward=functools.partial(prepared_forward, generation=generation),
        prepared_backward=functools.partial(prepared_backward, generation=generation),
        reads_ragged_bias=functools.partial(reads_ragged_bias, generation=generation),
    )


SM75, SM80, SM90 = (_restricted_to(generation) for generation in (75, 80, 90))
