"""torch's own attention kernels, made safe to call: their unchecked assumptions are made true, and lost values are
restored.

- Rows begin at multiples of 16 bytes (:func:`aligned`).
- The gradient of out has the memory layout of out (:func:`laid_out`, :class:`LaidOut`), as cuDNN's backward assumes.
- If the bias requires a gradient, so does one of q, k, v (:class:`Following`): otherwise the memory-efficient forward
  saves no lse, and its backward raises.
- Hooks of saved tensors bring them back in the memory layout in which they were saved (:func:`attend`): the backward
  passes assume the strides of the forward's tensors.
- Inputs on the CPU are finite (:func:`finite`, :func:`lost`): the kernel there returns zeros for a row whose scores
  are all NaN, and finite numbers for some infinite scores of 16 bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flashsci.backends.reference import per_query_head
from flashsci.call.ops import Scalars

#: The function itself: programs, flashsci included, replace torch.nn.functional's name.
torch_attention = torch._C._nn.scaled_dot_product_attention
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def on_gpu(x: Tensor) -> bool:
    """Whether torch's kernels for GPUs compute with x."""
    return x.is_cuda


def _rows_are_aligned(x: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes; True where there is no address, as a tracer's fake tensors have none."""
    if not x.is_cuda or type(x) not in (Tensor, torch.nn.Parameter):
        return True
    size = x.element_size()
    strides = [n * size for n, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1]
    whole_rows = x.shape[-1] * size % 16 == 0  # SDPA pads the others itself
    return x.data_ptr() % 16 == 0 and not (whole_rows and any(n % 16 for n in strides))


def aligned(x: Tensor) -> Tensor:
    """x, copied if its rows do not begin at multiples of 16 bytes, which SDPA's kernels assume without a check."""
    if torch.compiler.is_compiling() or _rows_are_aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def laid_out(dout: Tensor, strides: tuple[int, ...]) -> Tensor:
    """dout in the memory layout of an out of these strides, aligned; no copy if it already has it."""
    # Batched tensors (is_grads_batched) have no address to examine, and do not allow a write in place.
    if not _is_batched(dout) and dout.stride() == strides and _rows_are_aligned(dout):
        return dout
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return dout.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """torch's function; the tensors that autograd saves for it keep their memory layout through hooks."""
    hooks = None if torch.compiler.is_compiling() else _saving_hooks(False)
    if hooks is None:
        return torch_attention(q, k, v, **arguments)
    pack, unpack = hooks
    with saved_tensors_hooks(lambda x: (pack(x), x.stride()), lambda kept: restored(unpack(kept[0]), kept[1])):
        return torch_attention(q, k, v, **arguments)


def restored(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides; no copy if it already has them."""
    if x.stride() == strides and _rows_are_aligned(x):
        return x
    shape = [n if stride else 1 for n, stride in zip(x.shape, strides, strict=True)]
    reach = 0  # of the dims with smaller strides
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride <= reach:
            return x.contiguous()  # rows that overlap, which no copy can write
        reach += (length - 1) * stride
    once = x[tuple(slice(n) for n in shape)]
    return x.new_empty_strided(shape, strides).copy_(once).expand(x.shape)


class LaidOut(torch.autograd.Function):
    """out unchanged, with a gradient that arrives in its layout. For compilers: they trace one layout, and run
    others."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.save_for_backward(out)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return torch.empty_like(out).copy_(dout)


class Following(torch.autograd.Function):
    """q unchanged; it requires a gradient if the bias does, and takes none."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, bias: Tensor) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dq: Tensor) -> tuple[None, None]:
        return None, None


def _once(x: Tensor) -> Tensor:
    """x without the repetitions of expanded dims."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def finite(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether every score is a number or -inf. Reads the tensors on the host."""
    # Sums are several times as fast as isfinite. If they overflow, they say less.
    if not math.isfinite(_sum(q) + _sum(k)) and not bool(q.isfinite().all() & k.isfinite().all()):
        return False
    if bias is None or bias.numel() == 0:
        return True
    largest: float = _once(bias.detach()).amax().item()
    return largest < math.inf


def _sum(x: Tensor) -> float:
    return (x.detach() if x.requires_grad else x).sum().item()


def lost(q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, scalars: Scalars) -> Tensor:
    """Zeros and NaN to add to out: they restore a NaN that :func:`finite` would find, where nothing may read values
    on the host.

    Keys that a mask, a bias or a window may hide are left to the kernel.
    """
    rows = (q.detach() * 0).sum(-1, keepdim=True)
    if bias is not None or mask is not None or scalars.window_left >= 0 or scalars.lower_right:
        return rows
    keys = per_query_head((k.detach() * 0).sum(-1, keepdim=True), q.shape[-3] if q.dim() > 2 else 1)
    if scalars.window_right < 0:
        return rows + keys.sum(-2, keepdim=True)
    if scalars.window_right > 0:
        return rows
    last = torch.arange(q.shape[-2], device=q.device).clamp(max=k.shape[-2] - 1)
    return rows + keys.cumsum(-2).index_select(-2, last)
