"""What PyTorch ships: torch.nn.functional.scaled_dot_product_attention behind our specification.

First derivatives are SDPA's own, in autograd's own graph: what it saves, saved-tensor hooks see, and a graph that
was freed stays so. No fused SDPA kernel differentiates twice; second derivatives are flashsci/second_order.py's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashsci import derivatives
from flashsci.backends import reference
from flashsci.ops import Scalars, Tensors
from flashsci.problem import Problem
from flashsci.tracing import transforming

FUSED = False


def unavailable() -> str | None:
    return None


def rejects(problem: Problem) -> str | None:
    if problem.dtype.itemsize == 1:
        return "SDPA takes no 8-bit floats; use backend='triton' or 'reference'"
    if problem.paged:
        return "SDPA takes no paged cache; use backend='triton' or 'reference'"
    if problem.varlen:
        return "SDPA takes no packed sequences; use backend='triton' or 'reference'"
    if problem.softcap:
        return "SDPA has no softcap; use backend='triton' or 'reference'"
    if problem.dropout_p:
        return "SDPA cannot drop by a given seed; use backend='triton' or 'reference'"
    if problem.key_weight_grad:
        return derivatives.lacks("sdpa", "key_weight")
    if problem.key_weight and problem.dtype.itemsize == 2:
        return (
            "SDPA takes key_weight as its logarithm and would round it to 16 bits; use "
            "backend='triton' or 'reference'"
        )
    if problem.alibi:
        return "SDPA has no ALiBi but as a bias of all pairs; use backend='triton' or 'reference', or build that bias"
    if problem.sink:
        return "SDPA has no attention sinks; use backend='triton', 'cuda' or 'reference'"
    if problem.return_lse:
        return "SDPA does not return the lse; use backend='triton' or 'reference'"
    if problem.deterministic and problem.device_type == "cuda" and problem.requires_grad:
        return (
            "SDPA's fused backward passes are not deterministic on CUDA; use backend='triton' or "
            "'reference'"
        )
    if (
        problem.precision == "ieee"
        and problem.device_type == "cuda"
        and problem.dtype == torch.float32
    ):
        return (
            "SDPA's fp32 precision follows torch's global TF32 switch; use backend='triton' or "
            "'reference'"
        )
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
    merged = bias.to(q.dtype)
    return merged if keep is None else merged.masked_fill(~keep, float("-inf"))


def _four_dims(x: Tensor | None, batch: torch.Size) -> Tensor | None:
    """[*, H, S, D] as [B, H, S, D]; a mask's broadcast leading dims stay size 1 where they all
    are."""
    if x is None or x.dim() == 4:
        return x
    if x.dim() < 4:
        return x.reshape(*(1,) * (4 - x.dim()), *x.shape)
    leading = x.shape[:-3]
    return (x if leading.numel() == 1 else x.expand(*batch, *x.shape[-3:])).reshape(
        -1, *x.shape[-3:]
    )


def aligned(x: Tensor) -> Tensor:
    """x, copied if its rows begin off the 16 bytes that SDPA's kernels assume without asking."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return x
    size = x.element_size()
    strides = [
        n * size for n, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1
    ]
    whole_rows = x.shape[-1] * size % 16 == 0  # SDPA pads the others itself
    if x.data_ptr() % 16 == 0 and not (whole_rows and any(n % 16 for n in strides)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scalars: Scalars
) -> Tensor:
    causal = scalars.window_left < 0 and scalars.window_right == 0 and not scalars.lower_right
    # torch's kernel for the CPU masks before it scales: -inf times 0 or less gives NaN (torch 2.13).
    causal = causal and bias is None and mask is None and scalars.scale > 0
    merged = None if causal else _merged_mask(q, k, bias, mask, scalars)
    if merged is not None:
        if merged.dim() < q.dim():
            merged = merged.reshape(*(1,) * (q.dim() - merged.dim()), *merged.shape)
        # SDPA broadcasts every dim but the last, and reads that one with stride 1.
        merged = merged.expand(*merged.shape[:-1], k.shape[-2])
        merged = merged if merged.stride(-1) == 1 else merged.contiguous()
    shape, batch = (*q.shape[:-1], v.shape[-1]), q.shape[:-3]
    q, k, v = (aligned(x if x.dim() == 4 else _four_dims(x, batch)) for x in (q, k, v))  # type: ignore[arg-type]
    merged = _four_dims(merged, batch)
    arguments: dict[str, Any] = dict(attn_mask=merged, is_causal=causal, scale=scalars.scale)
    if q.shape[1] != k.shape[1]:
        arguments["enable_gqa"] = True
    attend = torch.nn.functional.scaled_dot_product_attention
    if q.is_cuda and (merged is not None or q.shape[-1] != v.shape[-1]):
        # cuDNN's backward gives NaN for some masked shapes (pytorch#196678), and its graph misplaces
        # some outputs of another head dim than q's.
        with sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        ):
            return attend(q, k, v, **arguments).reshape(shape)
    return attend(q, k, v, **arguments).reshape(shape)


def forward(tensors: Tensors, scalars: Scalars) -> tuple[Tensor, Tensor | None]:
    """out [*, Hq, Sq, Dv]; SDPA has no lse to give."""
    q, k, v, bias, key_weight, mask, *_ = tensors
    if q.numel() == 0 or k.numel() == 0 or transforming():
        # Nothing to attend to, or a functorch or forward-mode level that autograd.Function cannot
        # follow.
        return reference.forward(tensors, scalars)[0], None
    if key_weight is not None:
        bias = reference.weights_as_bias(key_weight, bias, q.shape[-3] if q.dim() > 2 else 1)
    return _attend(q, k, v, bias, mask, scalars), None
