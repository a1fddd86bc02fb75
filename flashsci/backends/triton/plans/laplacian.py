"""Launches of the forward Laplacian's kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flashsci.backends.triton.kernels.laplacian import (
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
            "BLOCK_N": 32,
            "BLOCK_D": 32 if q.shape[-1] > 16 else 16,
            "BLOCK_V": max(16, triton.next_power_of_2(v.shape[-1])),
            "VECTOR": math.gcd(16 // q.element_size(), q.shape[-1], v.shape[-1]),
            "PRECISION": dense.products("default", torch.float32, self.device.capability),
        }
        self.strides = of_bias, of_mask

    def parts(self) -> tuple[int, int]:
        """The parts of the directions for the Laplacian, and the directions of each."""
        programs = self.sizes.batch * self.sizes.heads * triton.cdiv(self.sizes.rows, 16)
        parts = max(1, min(self.sizes.directions, WAVES * self.device.processors // programs))
        step = max(1, triton.cdiv(self.sizes.directions, parts))
        return max(1, triton.cdiv(self.sizes.directions, step)), step

    def launch(self, kernel, parts: int, sizes: Sizes, *tensors: Tensor | None) -> None:
        """Launch for each tile of rows, each head and each part of the directions."""
        rows=16
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
    out, jacobian, laplacian = laplacian_ops.empty_results(tensors)
    if not (tensors.q.numel() and tensors.k.numel() and tensors.v.numel()):
        return out.zero_(), jacobian.zero_(), laplacian.zero_()
    call = _Call(tensors, scale)
    sizes, like = call.sizes, dict(dtype=torch.float32, device=out.device)
    precise = torch.empty(call.shape, **like)
    lse = torch.empty(call.shape[:-1], **like)
    means = torch.empty((sizes.directions, *lse.shape), **like)
    slopes, curvatures = call.rows[:6], call.rows[6:]
    call.launch(output_kernel, 1, sizes, *slopes[:3], call.bias, call.mask, precise, lse)
    given = *slopes, call.bias, call.mask, precise, lse, jacobian, means
    if sizes.directions:
        call.launch(jacobian_kernel, sizes.directions, sizes, *given)
    parts, step = call.parts()
    shares = torch.empty((parts, *call.shape), **like)
    given = *slopes, *curvatures, call.bias, call.mask, precise, lse, means, shares
    call.launch(laplacian_kernel, parts, sizes._replace(step=step), *given)
    return out.copy_(precise), jacobian, torch.sum(shares, 0, dtype=out.dtype) if parts > 1 else shares[0].to(out.dtype)


_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
OP = laplacian_ops.define("triton", compute, _KEYS)
