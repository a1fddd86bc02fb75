"""Launches of the forward Laplacian's kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flashsci.backends.triton.kernels.laplacian import (
    few_keys_kernel,
    jacobian_kernel,
    laplacian_kernel,
    output_kernel,
)
from flashsci.backends.triton.launcher import Launch, device_of
from flashsci.backends.triton.plans import dense
from flashsci.call import laplacian_ops
from flashsci.call.laplacian_tensors import LaplacianTensors

FEW = 64  # keys of one tile
WAVES = 2  # programs of a multiprocessor, below which the directions are divided among several


class Sizes(NamedTuple):
    """The numbers that a kernel reads."""

    batch: int
    heads: int
    group: int
    rows: int
    keys: int
    dim: int
    dim_v: int
    directions: int
    step: int  # directions of a part
    scale: float


def _strides(x: Tensor | None, full: tuple[int, ...]) -> tuple[Tensor | None, tuple[int, ...]]:
    """A bias or mask with a single batch dim, and its strides (batch, head, row, column); 0 where it is broadcast."""
    if x is None:
        return None, (0, 0, 0, 0)
    x = x.expand(full)
    x = x.reshape(math.prod(full[:-3]), *full[-3:])  # a view but for several batch dims of which one is broadcast
    return x, x.stride()


class _Call:
    """One call as its kernels take it."""

    def __init__(self, tensors: LaplacianTensors, scale: float):
        q, k, v = tensors[:3]
        heads, heads_k = (x.shape[-3] if x.dim() > 2 else 1 for x in (q, k))
        batch = math.prod(q.shape[:-3])
        self.rows = [None if x is None else x.contiguous() for x in tensors[:9]]
        full = (*q.shape[:-3], heads, q.shape[-2], k.shape[-2])
        self.bias, of_bias = _strides(tensors.bias, full)
        mask = None if tensors.mask is None else tensors.mask.view(torch.uint8)
        self.mask, of_mask = _strides(mask, full)
        self.shape = *q.shape[:-1], v.shape[-1]
        self.sizes = Sizes(
            batch, heads, heads // heads_k, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], tensors.directions,
            tensors.directions, scale,
        )  # fmt: skip
        self.device = device_of(q.device)
        self.blocks = {
            "BLOCK_N": min(FEW, max(16, triton.next_power_of_2(k.shape[-2]))),
            "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1])),
            "BLOCK_V": max(16, triton.next_power_of_2(v.shape[-1])),
            "PRECISION": dense.products("default", torch.float32, self.device.capability),
        }
        self.strides = of_bias, of_mask

    def launch(self, kernel, rows: int, parts: int, sizes: Sizes, *tensors: Tensor | None) -> None:
        """Launch with tiles of so many rows, for each head and each part of the directions."""
        tiles = triton.cdiv(sizes.rows, rows)
        arguments = self.blocks | {
            "strides": self.strides,
            "sizes": sizes,
            "BLOCK_M": rows,
            "num_warps": 8 if rows * max(self.blocks["BLOCK_D"], self.blocks["BLOCK_V"]) >= 2048 else 4,
            "num_stages": 1,
        }
        Launch(kernel, parts * sizes.batch * sizes.heads * tiles, arguments)(*tensors)


def compute(tensors: LaplacianTensors, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output, Jacobian and Laplacian of a checked call, in the dtype of q."""
    if not (tensors.q.numel() and tensors.k.numel() and tensors.v.numel()):
        out, jacobian, laplacian = laplacian_ops.empty_results(tensors)
        return out.zero_(), jacobian.zero_(), laplacian.zero_()
    call = _Call(tensors, scale)
    few = tensors.k.shape[-2] <= FEW
    out, jacobian, laplacian = (_of_few_keys if few else _of_many_keys)(call, tensors)
    dtype = tensors.q.dtype
    return out.to(dtype), jacobian.to(dtype), laplacian.to(dtype)


def _of_few_keys(call: _Call, tensors: LaplacianTensors) -> tuple[Tensor, Tensor, Tensor]:
    sizes, q = call.sizes, tensors.q
    rows = min(64, max(16, triton.next_power_of_2(sizes.rows)))
    programs = sizes.batch * sizes.heads * triton.cdiv(sizes.rows, rows)
    parts = max(1, min(sizes.directions, WAVES * call.device.processors // programs))
    step = max(1, triton.cdiv(sizes.directions, parts))
    parts = max(1, triton.cdiv(sizes.directions, step))
    out = q.new_empty(call.shape, dtype=torch.float32)
    jacobian = q.new_empty((sizes.directions, *call.shape), dtype=torch.float32)
    laplacian = q.new_empty((parts, *call.shape), dtype=torch.float32)
    given = (*call.rows, call.bias, call.mask, out, jacobian, laplacian)
    call.launch(few_keys_kernel, rows, parts, sizes._replace(step=step), *given)
    return out, jacobian, laplacian.sum(0) if parts > 1 else laplacian[0]


def _of_many_keys(call: _Call, tensors: LaplacianTensors) -> tuple[Tensor, Tensor, Tensor]:
    sizes, q = call.sizes, tensors.q
    out = q.new_empty(call.shape, dtype=torch.float32)
    lse = q.new_empty(call.shape[:-1], dtype=torch.float32)
    jacobian = q.new_empty((sizes.directions, *call.shape), dtype=torch.float32)
    means = q.new_empty((sizes.directions, *lse.shape), dtype=torch.float32)
    rows, call.blocks["BLOCK_N"] = 64, 32
    slopes, curvatures = call.rows[:6], call.rows[6:]
    call.launch(output_kernel, rows, 1, sizes, *slopes[:3], call.bias, call.mask, out, lse)
    given = (*slopes, call.bias, call.mask, lse, jacobian, means)
    if sizes.directions:
        call.launch(jacobian_kernel, rows, sizes.directions, sizes, *given)
    laplacian = torch.empty_like(out)
    given = (*slopes, *curvatures, call.bias, call.mask, lse, means, out, laplacian)
    call.launch(laplacian_kernel, rows, 1, sizes, *given)
    return out, jacobian, laplacian


_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
OP = laplacian_ops.define("triton", compute, _KEYS)
