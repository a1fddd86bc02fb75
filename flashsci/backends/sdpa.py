"""What PyTorch ships: torch.nn.functional.scaled_dot_product_attention behind our specification.

No fused SDPA kernel differentiates twice, so second derivatives go through Triton's kernels or the
reference; first derivatives are SDPA's own, in autograd's own graph: what it saves, saved-tensor hooks
see, and a graph that was freed stays so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashsci import registry
from flashsci.backends import reference
from flashsci.problem import Problem
from flashsci.tracing import transforming

FUSED = False


def unavailable() -> str | None:
    return None


def rejects(problem: Problem) -> str | None:
    if problem.varlen:
        return "SDPA takes no packed sequences; use backend='triton' or 'reference'"
    if problem.softcap:
        return "SDPA has no softcap; use backend='triton' or 'reference'"
    if problem.dropout_p:
        return "SDPA cannot drop by a given seed; use backend='triton' or 'reference'"
    if problem.key_weight_grad:
        return (
            "SDPA takes key_weight as its logarithm, whose derivative at zero is lost; use "
            "backend='triton' or 'reference'"
        )
    if problem.key_weight and problem.dtype.itemsize == 2:
        return (
            "SDPA takes key_weight as its logarithm and would round it to 16 bits; use "
            "backend='triton' or 'reference'"
        )
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
    window_left: int,
    window_right: int,
    lower_right: bool,
) -> Tensor | None:
    """bias, mask, causal and window as the one attn_mask that SDPA takes."""
    keep = reference.visible(
        q.shape[-2], k.shape[-2], window_left, window_right, lower_right, q.device
    )
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


def _aligned(x: Tensor) -> Tensor:
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
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *scalars: Any
) -> Tensor:
    scale, _, window_left, window_right, lower_right = scalars[2:7]
    causal = (
        window_left < 0 and window_right == 0 and not lower_right and bias is None and mask is None
    )
    merged = (
        None if causal else _merged_mask(q, k, bias, mask, window_left, window_right, lower_right)
    )
    if merged is not None:
        if merged.dim() < q.dim():
            merged = merged.reshape(*(1,) * (q.dim() - merged.dim()), *merged.shape)
        # SDPA broadcasts every dim but the last, and reads that one with stride 1.
        merged = merged.expand(*merged.shape[:-1], k.shape[-2])
        merged = merged if merged.stride(-1) == 1 else merged.contiguous()
    shape, batch = (*q.shape[:-1], v.shape[-1]), q.shape[:-3]
    q, k, v = (_aligned(x if x.dim() == 4 else _four_dims(x, batch)) for x in (q, k, v))  # type: ignore[arg-type]
    merged = _four_dims(merged, batch)
    arguments: dict[str, Any] = dict(attn_mask=merged, is_causal=causal, scale=scale)
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


def _triton_serves(q: Tensor, v: Tensor) -> bool:
    if not q.is_cuda:
        return False
    heads = q.shape[-3] if q.dim() > 2 else 1
    problem = registry.problem_of(
        "cuda", q.device.index, q.dtype, heads, heads, q.shape[-1], v.shape[-1], ()
    )
    return registry.BACKENDS["triton"].rejects(problem) is None


class _SecondOrder(torch.autograd.Function):
    """``out`` of SDPA's graph, as it is. A plain backward goes on into that graph. One that is recorded for
    a derivative of its own turns off here: its gradients of q, k, v, bias are those of Triton's kernels
    where they can serve the call, else the reference's, either after a forward of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        *rest: Any,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, mask)
        ctx.rest = rest
        return (
            out.detach()
        )  # not a view to autograd: users may write to it, as to what SDPA returns

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * (6 + len(ctx.rest))
        if dout is None:
            return tuple(gradients)
        if not torch.is_grad_enabled():
            gradients[0] = _aligned(dout)
            return tuple(gradients)
        *inputs, mask = ctx.saved_tensors
        arguments = (*inputs, None, mask, *(None,) * 4, *ctx.rest)
        if _triton_serves(inputs[0], inputs[2]):
            from flashsci.attention import inner_contiguous
            from flashsci.autograd import Forward

            out, _ = Forward.apply("triton", *inner_contiguous(arguments))
        else:
            out, _ = reference.forward(*arguments)
        wanted = [i for i in range(4) if ctx.needs_input_grad[1 + i]]
        found = torch.autograd.grad(out, [inputs[i] for i in wanted], dout, create_graph=True)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[1 + i] = gradient
        return tuple(gradients)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """out [*, Hq, Sq, Dv]; SDPA has no lse to give."""
    scalars = rest[4:]
    if q.numel() == 0 or k.numel() == 0 or transforming():
        # Nothing to attend to, or a functorch or forward-mode level that autograd.Function cannot
        # follow.
        return reference.forward(q, k, v, bias, key_weight, mask, *rest)[0], None
    if key_weight is not None:
        bias = reference.weights_as_bias(key_weight, bias, q.shape[-3] if q.dim() > 2 else 1)
    out = _attend(q, k, v, bias, mask, *scalars)
    if torch.compiler.is_compiling() or not out.requires_grad:
        return out, None
    return _SecondOrder.apply(out, q, k, v, bias, mask, *scalars), None
