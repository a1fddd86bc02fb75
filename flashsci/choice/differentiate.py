"""The derivatives of a call by the kernels that should compute them, which tensors and their strides decide."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Given, Saved, Tensors
from flashsci.call.problem import problem_of, sums_bias
from flashsci.call.row_pitch import differs_by_query
from flashsci.call.torch_state import count_flops, tracer_paused
from flashsci.choice.backends import BACKENDS, FORWARD_OF_CUDA, kernels
from flashsci.choice.candidates import able, advice
from flashsci.choice.gradients import Choice, gradients, sharing
from flashsci.errors import BackendError


class _Sizes(NamedTuple):
    """The sizes of a call whose gradients are wanted; known where no compiler hides them."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    bias: tuple[int, ...]
    sequences: int  # packed; -1: dense

    def features(self) -> dict[str, Any]:
        batch = self.q[:-3] if self.sequences < 0 else (self.sequences,)
        sizes = {"batch": batch, "seq_q": self.q[-2], "seq_k": self.k[-2]}
        return {**sizes, "bias_shape": self.bias} if self.bias else sizes

    def heads(self) -> tuple[int, int]:
        return (1, 1) if len(self.q) < 3 else (self.q[-3], self.k[-3])


@functools.lru_cache(maxsize=4096)
def _gradients_of(
    choice: Choice,
    strides: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    sizes: _Sizes | None,
    **features: Any,
) -> str:
    """The backend that computes gradients, cached by the properties that decide it."""
    heads = (1, 1) if sizes is None else sizes.heads()
    if sizes is not None:
        features |= sizes.features()
    dims = head_dim, head_dim_v
    problem = problem_of(device.type, device.index, dtype, *heads, *dims, tuple(features.items()))
    found = gradients(choice, problem, strides)
    if found.backend is None:
        raise BackendError(
            f"flashsci: backend {choice.name!r} has no backward for this call: {found.reason}"
            + advice(able(problem, {}))
        )
    return found.backend


def forget() -> None:
    """Drop all cached choices: the times behind them have changed."""
    _gradients_of.cache_clear()


def backward(choice: Choice, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbias, dkey_weight of a call, by the kernels that should compute them."""
    module, name = sharing(choice), choice.usual
    if module is not None:
        # The choice asks the library, which takes no other strides; saved-tensor hooks may bring back any.
        saved = saved._replace(tensors=saved.tensors.laid_out())
        name = _gradient_backend(choice, module, saved, need)
    module = kernels(name)
    count_flops()
    found: tuple[Tensor, ...] = module.backward(dout, dlse, saved, need)
    return found


def prepared_backward(
    choice: Choice, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int
) -> Callable[..., tuple[Tensor | None, ...]]:
    """:func:`backward` prepared in the same way: a function of (dout, dlse, tensors, out, lse), with None for
    gradients that ``need`` does not name."""
    module, name = sharing(choice), choice.usual
    if module is not None:
        name = _gradient_backend(choice, module, saved, need)
    module, scalars = kernels(name), saved.scalars
    if hasattr(module, "prepared_backward"):
        found: Callable[..., tuple[Tensor | None, ...]] = module.prepared_backward(dout, dlse, saved, need)
        return found
    wanted = [bool(need >> i & 1) for i in range(5)]

    def run(
        dout: Tensor | None, dlse: Tensor | None, tensors: Given, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        found = module.backward(dout, dlse, Saved(Tensors(*tensors), out, lse, scalars), need)
        return tuple([x if want else None for x, want in zip(found, wanted, strict=True)])

    return run


def slope_sums(choice: Choice, dout: Tensor | None, dlse: Tensor | None, saved: Saved) -> Tensor:
    """The gradient of ALiBi slopes as sums over keys, fp32 [*, Hq, Sq], by the kernels that should compute the others."""
    module, name = sharing(choice), choice.usual
    if module is not None:
        name = _gradient_backend(choice, module, saved, NEED_Q | NEED_K | NEED_V)
    sums: Tensor = kernels(name).slope_sums(dout, dlse, saved)
    return sums


def _gradient_backend(choice: Choice, module: Any, saved: Saved, need: int) -> str:
    with tracer_paused():  # sizes are numbers, and the decision is no part of a trace
        return _decided(choice, module, saved, need)


def _decided(choice: Choice, module: Any, saved: Saved, need: int) -> str:
    tensors, scalars = saved.tensors, saved.scalars
    q, k, v, bias, cu_seqlens_q = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.cu_seqlens_q
    given = tuple([name for name, x in zip(tensors._fields, tensors, strict=True) if x is not None])
    features: dict[str, Any] = {}
    bias_shape: tuple[int, ...] = ()
    if choice.forward in FORWARD_OF_CUDA and module.takes_pairs(tensors, scalars):
        return choice.forward
    if bias is not None:
        bias_shape = bias.shape
        features["bias_shape"] = ()  # the call has a bias; a compiler may hide its sizes
        features["bias_dtype"] = bias.dtype
        features["bias_grad"] = bool(need & NEED_BIAS)
        features["bias_summed"] = sums_bias(bias, q.shape[:-2])
    sequences = -1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    window = scalars.window_left, scalars.window_right
    known = all(type(n) is int for n in (*q.shape, *k.shape, *window, sequences))
    sizes = _Sizes(q.shape, k.shape, bias_shape, sequences) if known else None
    return _gradients_of(
        choice,
        module.hopper_takes(saved, need),
        q.device,
        q.dtype,
        index(q.shape[-1]),
        index(v.shape[-1]),
        sizes,
        given=given,
        mask=tensors.mask is not None,
        mask_by_query=tensors.mask is not None and differs_by_query(tensors.mask),
        mask_tiles=tensors.mask_tiles is not None,
        key_weight="key_weight" in given,
        alibi="alibi_slopes" in given,
        varlen=cu_seqlens_q is not None,
        window_left=window[0] if known else -1,
        window_right=window[1] if known else -1,
        lower_right=scalars.lower_right,
        softcap=1.0 if scalars.softcap else 0.0,
        caps_bias=scalars.caps_bias and ("bias" in given or "alibi_slopes" in given),
        dropout_p=0.5 if scalars.dropout_p else 0.0,
        precision=scalars.precision,
        deterministic=scalars.deterministic,
        batch_invariant=scalars.batch_invariant(),
        requires_grad=True,
        **features,
    )


@functools.lru_cache(maxsize=1024)
def _triton_rejects(device: torch.device, dtype: torch.dtype, d: int, dv: int) -> str | None:
    problem = problem_of(device.type, device.index, dtype, 1, 1, d, dv, ())
    return BACKENDS["triton"].rejects(problem)


def triton_rejects(tensors: Tensors) -> str | None:
    """Why Triton's kernels cannot compute second derivatives of a call, or None."""
    q, v = tensors.q, tensors.v
    with tracer_paused():
        return _triton_rejects(q.device, q.dtype, index(q.shape[-1]), index(v.shape[-1]))


def second_order(name: str, tensors: Tensors, what: str = "double_backward") -> Any:
    """The module with the second-order kernels for calls that a fused backend computed: its own, or Triton's.

    Args:
        what: the function that is wanted; a backend has ``jvp`` and ``double_backward`` or neither.

    Raises:
        BackendError: neither has them.
    """
    module = kernels(name)
    if hasattr(module, what):
        count_flops()
        return module
    reason = triton_rejects(tensors)
    if reason is not None:
        raise BackendError(
            f"flashsci: second derivatives come from the triton backend, and {reason}; compute "
            "this call with backend='reference'"
        )
    module = kernels("triton")
    count_flops()
    return module
