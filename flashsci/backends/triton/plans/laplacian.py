"""Launches of the forward Laplacian's kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flashsci.backends.triton.kernels.laplacian import jacobian_kernel, laplacian_kernel, output_kernel
from flashsci.backends.triton.launcher import Launch, device_of
from flashsci.backends.triton.plans import dense
from flashsci.call import laplacian_ops
from flashsci.call.laplacian_tensors import LaplacianTensors

WAVES = 8  # programs of a multiprocessor, below which the directions are divided among several
# (BLOCK_M, BLOCK_N, warps) for head dims up to the key: the largest tiles that do not spill.
TILES = {32: (32, 32, 2), 64: (32, 16, 2), 128: (16, 32, 4)}
SMALL = {64: (16, 16, 1), 128: (16, 16, 2)}


def tiles_of(width: int, rows: int, keys: int, vector: int) -> tuple[int, int, int]:
    """The tile for these sizes. A small one if it saves a quarter of the scores, or if a load is of fewer than four numbers, whose
    addresses take registers."""
    if vector < 4:
        return SMALL[128]
    large, small = (next(tile for most, tile in table.items() if width <= most) for table in (TILES, SMALL))
    scores = [triton.cdiv(rows, m) * m * triton.cdiv(keys, n) * n for m, n, _ in (large, small)]
    return small if 4 * scores[1] <= 3 * scores[0] else large


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
    parts: int  # of the directions
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
            1, tensors.directions, scale,
        )  # fmt: skip
        self.device = device_of(q.device)
        vector = math.gcd(16 // q.element_size(), q.shape[-1], v.shape[-1])
        block_m, block_n, warps = tiles_of(max(q.shape[-1], v.shape[-1]), q.shape[-2], k.shape[-2], vector)
        precise = dense.products("default", torch.float32, self.device.capability)
        self.arguments = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": 16,
            "BLOCK_V": max(16, triton.next_power_of_2(v.shape[-1])),
            "VECTOR": vector,
            "PRECISION": precise,
            # 16 bits fit a single TF32 product.
            "SCORES": "tf32" if precise == "tf32x3" and q.element_size() == 2 else precise,
            "num_warps": warps,
            "num_stages": 1,
        }
        self.strides = of_bias, of_mask

    def programs(self) -> int:
        """The tiles of rows of all heads."""
        return self.sizes.batch * self.sizes.heads * triton.cdiv(self.sizes.rows, self.arguments["BLOCK_M"])

    def shared(self) -> Sizes:
        """The sizes with as many parts of the directions as keep the processors busy."""
        directions = self.sizes.directions
        parts = max(1, min(directions, WAVES * self.device.processors // self.programs()))
        step = max(1, triton.cdiv(directions, parts))
        return self.sizes._replace(parts=max(1, triton.cdiv(directions, step)), step=step)

    def launch(self, kernel, sizes: Sizes, *tensors: Tensor | None) -> None:
        """Launch for each tile of rows, each head and each part of the directions."""
        arguments = self.arguments | {"strides": self.strides, "sizes": sizes}
        Launch(kernel, sizes.parts * self.programs(), arguments)(*tensors)


def compute(tensors: LaplacianTensors, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output, Jacobian and Laplacian of a checked call, in the dtype of q."""
    out, jacobian, laplacian = laplacian_ops.empty_results(tensors)
    if not (tensors.q.numel() and tensors.k.numel() and tensors.v.numel()):
        return out.zero_(), jacobian.zero_(), laplacian.zero_()
    call = _Call(tensors, scale)
    sizes, wide = call.sizes, out.new_empty(0, dtype=torch.float32)
    precise = wide.new_empty(call.shape)
    lse = wide.new_empty(call.shape[:-1])
    means = wide.new_empty((sizes.directions, *lse.shape))
    slopes, curvatures = call.rows[:6], call.rows[6:]
    call.launch(output_kernel, sizes, *slopes[:3], call.bias, call.mask, precise, lse)
    given = *slopes, call.bias, call.mask, precise, lse
    if sizes.directions:
        call.launch(jacobian_kernel, sizes._replace(parts=sizes.directions), *given, jacobian, means)
    sizes = call.shared()
    shares = wide.new_empty((sizes.parts, *call.shape))
    given = *slopes, *curvatures, call.bias, call.mask, precise, lse
    call.launch(laplacian_kernel, sizes, *given, means, shares)
    return out.copy_(precise), jacobian, laplacian.copy_(shares.sum(0) if sizes.parts > 1 else shares[0])


_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
OP = laplacian_ops.define("triton", compute, _KEYS)
