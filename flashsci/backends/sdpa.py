"""PyTorch's own attention as a backend: torch.nn.functional.scaled_dot_product_attention behind our specification.

First derivatives are SDPA's own, in autograd's own graph: saved-tensor hooks see the tensors that it saves, and a
freed graph stays freed. No fused SDPA kernel differentiates twice; flashsci/call/second_order.py adds second derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashsci.backends import reference
from flashsci.backends.sdpa_kernels import Following, LaidOut, aligned, attend, finite, lost, on_gpu
from flashsci.call import derivatives, kinds
from flashsci.call.ops import Scalars, Tensors, bypasses_dispatcher
from flashsci.call.problem import Problem
from flashsci.call.torch_state import casts_to, transforming

FUSED = False
#: The tensors that it reads, by kind of call.
READS = {kinds.ATTENTION: frozenset(("q", "k", "v", "bias", "key_weight", "mask"))}
TINY = 2.0**-20  # scales below this, or above its inverse, belong to extreme q and k


def unavailable() -> str | None:
    return None


def rejects(problem: Problem) -> str | None:
    if problem.dtype.itemsize == 1:
        return "SDPA takes no 8-bit floats"
    if problem.batch_invariant:
        return "SDPA's kernels, and the order of their sums, depend on the batch"
    if problem.paged:
        return "SDPA takes no paged cache"
    if problem.varlen:
        return "SDPA takes no packed sequences"
    if problem.softcap:
        return "SDPA has no softcap"
    if problem.dropout_p:
        return "SDPA cannot drop by a given seed"
    if problem.key_weight_grad:
        return derivatives.lacks("sdpa", "key_weight")
    if problem.alibi:
        return "SDPA has no ALiBi but as a bias of all pairs; build that bias"
    if problem.sink:
        return "SDPA has no attention sinks"
    if problem.sizes_from_data:
        return "SDPA's rules compare sizes, and a compiler cannot compare those that depend on data"
    if problem.return_lse:
        return "SDPA does not return the lse"
    if problem.deterministic and problem.device_type == "cuda" and problem.requires_grad:
        return "SDPA's fused backward passes are not deterministic on CUDA"
    if problem.precision == "ieee" and problem.device_type == "cuda" and problem.dtype == torch.float32:
        return "SDPA's fp32 precision follows torch's global TF32 switch"
    return None


def _merged_mask(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scalars: Scalars,
) -> Tensor | None:
    """bias, mask, causal and window as the one attn_mask that SDPA takes."""
    window = scalars.window_left, scalars.window_right, scalars.lower_right
    keep = reference.visible(q.shape[-2], k.shape[-2], *window, q.device)
    if mask is not None:
        keep = mask if keep is None else keep & mask
    if bias is None:
        return keep
    # Never fewer bits than the bias has: a bias of 300 in bf16 is off by 1.
    merged = bias.to(torch.promote_types(bias.dtype, q.dtype))
    return merged if keep is None else merged.masked_fill(~keep, float("-inf"))


def _four_dims(x: Tensor, batch: torch.Size) -> Tensor:
    """[*, H, S, D] as [B, H, S, D]; leading dims of a mask that are all broadcast stay one dim of size 1."""
    if x.dim() == 4:
        return x
    if x.dim() < 4:
        return x.reshape(*(1,) * (4 - x.dim()), *x.shape)
    leading = x.shape[:-3]
    return (x if leading.numel() == 1 else x.expand(*batch, *x.shape[-3:])).reshape(-1, *x.shape[-3:])


def _flags(q: Tensor, k: Tensor, alone: bool, scalars: Scalars) -> dict[str, Any]:
    """torch's flags for a causal call and for grouped heads. ``alone``: without bias and mask. A window that is not
    ``is_causal`` needs a mask."""
    flags: dict[str, Any] = {"is_causal": False}
    # torch's kernel for the CPU masks before it scales: -inf times 0 or less gives NaN (torch 2.13). Under a compiler comparisons
    # may be symbols, which torch does not take as flags.
    plain = alone and not scalars.lower_right and scalars.scale > 0
    if plain and scalars.window_left < 0 and scalars.window_right == 0:
        flags["is_causal"] = True
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        flags["enable_gqa"] = True
    return flags


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scalars: Scalars) -> Tensor:
    arguments = _flags(q, k, bias is None and mask is None, scalars)
    merged = None if arguments["is_causal"] else _merged_mask(q, k, bias, mask, scalars)
    shape, batch, dtype = (*q.shape[:-1], v.shape[-1]), q.shape[:-3], q.dtype
    if merged is not None:
        if merged.dim() < q.dim():
            merged = merged.reshape(*(1,) * (q.dim() - merged.dim()), *merged.shape)
        # SDPA broadcasts every dim except the last, and reads the last with stride 1.
        merged = merged.expand(*merged.shape[:-1], k.shape[-2])
        merged = merged if merged.stride(-1) == 1 else merged.contiguous()
        merged = _four_dims(merged, batch)
    scale = scalars.scale
    if dtype is not torch.float16 and not TINY < abs(scale) < 1 / TINY:
        # Products that are scaled afterwards may overflow. A power of two scales q without an error.
        scale, exponent = math.frexp(scale)
        q = q * 2.0**exponent
    gpu = on_gpu(q)
    if gpu and merged is not None and merged.dtype not in (torch.bool, dtype):
        # The kernels of GPUs take only a bias of q's dtype; the kernel of the CPU also takes fp32 with 16 bits.
        q, k, v = q.to(merged.dtype), k.to(merged.dtype), v.to(merged.dtype)
    q, k, v = (aligned(x if x.dim() == 4 else _four_dims(x, batch)) for x in (q, k, v))
    arguments["attn_mask"], arguments["scale"] = merged, scale
    if gpu and _only_bias_has_gradient(q, k, v, merged):
        q = Following.apply(q, merged)
    if merged is not None and merged.dtype == torch.float32 and casts_to(q) is not None:
        with torch.autocast(q.device.type, enabled=False):  # it would cast the bias
            out = _call(q, k, v, arguments)
    else:
        out = _call(q, k, v, arguments)
    if gpu and out.requires_grad and torch.compiler.is_compiling():
        out = LaidOut.apply(out)  # elsewhere second_order.SecondOrder does it
    return out.to(dtype).reshape(shape)


def prepared(tensors: Tensors, scalars: Scalars) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """A function that computes out of q, k, v with the shapes and strides of these; None where SDPA's kernels need more than
    their addresses to be aligned."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if not (
        on_gpu(q)
        and all(x is None for x in tensors[3:])
        and q.dim() == k.dim() == v.dim() == 4
        and 0 not in (q.numel(), k.numel())
        and q.shape[-1] == v.shape[-1]
        and scalars.window_left < 0
        and TINY < scalars.scale < 1 / TINY
        and all(aligned(x) is x for x in (q, k, v))
    ):
        return None
    arguments = {**_flags(q, k, True, scalars), "scale": scalars.scale}
    if scalars.window_right >= 0 and not arguments["is_causal"]:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            q, k, v = aligned(q), aligned(k), aligned(v)
        return attend(q, k, v, **arguments)

    return run


def _call(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
    """torch's function, restricted to the kernels that compute such a call correctly."""
    if on_gpu(q) and (arguments["attn_mask"] is not None or q.shape[-1] != v.shape[-1]):
        # cuDNN's backward gives NaN for some masked shapes (pytorch#196678), and its graph misplaces
        # some outputs of another head dim than q's.
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(kernels):
            return attend(q, k, v, **arguments)
    return attend(q, k, v, **arguments)


def _only_bias_has_gradient(q: Tensor, k: Tensor, v: Tensor, merged: Tensor | None) -> bool:
    others = q.requires_grad or k.requires_grad or v.requires_grad
    return merged is not None and merged.requires_grad and not others


def forward(tensors: Tensors, scalars: Scalars) -> tuple[Tensor, Tensor | None]:
    """out [*, Hq, Sq, Dv]; SDPA returns no lse."""
    q, k, v, bias, key_weight, mask = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.key_weight, tensors.mask
    if q.numel() == 0 or k.numel() == 0 or transforming():
        # No key at all, or a functorch or forward-mode level that autograd.Function cannot follow.
        return reference.forward(tensors, scalars)[0], None
    if key_weight is not None:
        bias = reference.weights_as_bias(key_weight, bias, q.shape[-3] if q.dim() > 2 else 1)
    out = _attend(q, k, v, bias, mask, scalars)
    if q.is_cpu:
        if not bypasses_dispatcher((q, k)):
            return out + lost(q, k, bias, mask, scalars), None
        if not finite(q, k, bias):
            return reference.forward(tensors, scalars)[0], None
    return out, None
