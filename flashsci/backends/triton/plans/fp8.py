"""The step from the tensors of a call on 8-bit floats to its launch.

Decisions that depend only on shapes, strides and options are made once and kept.
"""

from __future__ import annotations

import math
from operator import is_

import torch
import triton
from torch import Tensor

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.fp8 import (
    FP8Mod,
    FP8Sizes,
    FP8Strides,
    ScaleStrides,
    fp8_kernel,
)
from flashsci.backends.triton.kernels.groups import Chunks, Features, Operands, Schedule
from flashsci.backends.triton.kernels.scores import ABSENT
from flashsci.backends.triton.launcher import Device, Launch, device_of
from flashsci.backends.triton.plans.paged import unbounded, vector_of
from flashsci.call import fp8_checks, fp8_ops
from flashsci.call.fp8_ops import WHOLE, FP8Scalars, FP8Tensors
from flashsci.call.op_checks import kinds, remember

MAX_HEAD_DIM = fp8_checks.HEAD_DIM
# (BLOCK_M, BLOCK_N, warps, stages) for head dims up to the key. The product of P and values is held next to the sum
# that it is added to; tiles of the 16-bit kernels leave no registers for it. Not timed yet.
TILES = {
    "ada": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
    "hopper": {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
    "interpreter": {256: (32, 32, 4, 1)},  # small, so that small tests have several tiles
}


def tiles(device: Device, dims: tuple[int, int], length_q: int, most_keys: int) -> tuple[int, ...]:
    """(BLOCK_M, BLOCK_N, warps, stages); most_keys: the keys of a block of scales."""
    if device.capability is None:
        name = "interpreter"
    else:
        name = "ada" if device.capability < (9, 0) else "hopper"
    table = TILES[name]
    block_m, block_n, warps, stages = table[min(d for d in table if d >= max(dims))]
    if length_q <= 64 and block_m > 64:
        block_m, warps = 64, 4
    return block_m, min(block_n, most_keys), warps, stages


def chunks_of(width: int, *vectors: int) -> list[Chunks]:
    """A head dim as one or two chunks of 32 to 128: 8-bit products take at least 32 columns."""
    width32 = -(-width // 32) * 32
    d0, d1 = tilings.head_chunks(width32, min(vectors) > 1, width32 <= 128)
    return [Chunks(d0, d1, d0 + d1 != width, vector) for vector in vectors]


def four(strides: tuple[int, ...]) -> tuple[int, ...]:
    """All strides except the last as (b0, b1, head, row)."""
    return (0,) * (5 - len(strides)) + tuple(strides[:-1])


def scale_strides(scale: Tensor | None, x: Tensor, sequences: int) -> ScaleStrides:
    rows = fp8_ops.rows_per_scale(scale, x, sequences)
    assert rows is not None, "checked before"
    if scale is None or scale.dim() == 0:
        return ScaleStrides(0, 0, 0, 0, WHOLE, 0)
    strides = scale.stride()
    if sequences >= 0:
        blocks = rows != WHOLE
        return ScaleStrides(0 if blocks else strides[0], 0, strides[1], strides[0] if blocks else 0, rows, int(blocks))
    *outer, block = strides if rows != WHOLE else (*strides, 0)
    return ScaleStrides(*(0,) * (3 - len(outer)), *outer, block, rows, 0)


class FP8Plan:
    """The values that the launch of one kind of call needs."""

    def __init__(self, device, out_dtype, q_shape, k_shape, dim_v, strides, scales, sequences, scalars):
        packed = sequences >= 0
        self.device = device
        *lead, heads, size_q, dim = q_shape if len(q_shape) > 2 else (1, *q_shape)
        heads_k, size_k = k_shape[-3] if len(k_shape) > 2 else 1, k_shape[-2]
        batch = math.prod(lead)
        batch1 = lead[-1] if lead else 1
        self.empty = batch * heads * size_q * size_k == 0
        length_q = -(-3 * size_q // (2 * max(sequences, 1))) if packed else size_q
        most_keys = min(of.rows for of in scales[1:])
        block_m, block_n, warps, stages = tiles(device, (dim, dim_v), length_q, most_keys)
        q, k, v, out = (four(s) for s in strides)
        (d,) = chunks_of(dim, min(vector_of(dim, q, 1), vector_of(dim, k, 1)))
        v_chunks, out_chunks = chunks_of(dim_v, vector_of(dim_v, v, 1), vector_of(dim_v, out, out_dtype.itemsize))
        left, right = scalars.window_left, scalars.window_right
        window = 0 if left < 0 and right < 0 else 1 if left < 0 else 2
        count = size_q // block_m + sequences + 2 if packed else -(-size_q // block_m)
        # As in dense.py: with a window the longest tiles first, in sections of heads that fit in half the L2 cache.
        section = 1
        if window:
            fit = device.l2_bytes // 2 // max(1, size_k * (dim + dim_v))
            section = min(max(1, fit) * (heads // heads_k), batch * heads)
        self.launch = Launch(fp8_kernel, count * batch * heads, {
            "strides": FP8Strides(q, k, v, out),
            "sizes": FP8Sizes(
                batch1, heads, heads_k, heads // heads_k, max(sequences, 0), size_q, size_k, dim, dim_v, *scales
            ),
            "schedule": Schedule(count, section, batch * heads),
            "mod": FP8Mod(
                scalars.scale, scalars.softcap, unbounded(left), unbounded(right), int(scalars.lower_right)
            ),
            "F": Features(
                VARLEN=packed, WINDOW=window, SOFTCAP=scalars.softcap > 0, DROPOUT=False,
                BIAS=ABSENT.value, BIAS_VECTOR=0, RAGGED=False, MASK=ABSENT.value, MASK_VECTOR=0,
            ),
            "D": d, "V": v_chunks, "R": out_chunks, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "num_warps": warps, "num_stages": stages,
        })  # fmt: skip


class FP8Launch:
    """A checked call, and its plan."""

    def __init__(self, given: FP8Tensors, scalars: FP8Scalars):
        fp8_checks.attention(given, scalars, MAX_HEAD_DIM)
        tensors = fp8_checks.as_kernels_read(given)
        self.as_given = all(map(is_, given, tensors))
        q, k, v, *scales, _, _ = tensors
        out, _ = fp8_ops.empty_results(tensors, scalars)
        self.plan = FP8Plan(
            device_of(q.device),
            out.dtype,
            tuple(q.shape),
            tuple(k.shape),
            v.shape[-1],
            (q.stride(), k.stride(), v.stride(), out.stride()),
            tuple(scale_strides(s, x, tensors.sequences) for s, x in zip(scales, tensors[:3], strict=True)),
            tensors.sequences,
            scalars,
        )


def attention(tensors: FP8Tensors, scalars: FP8Scalars) -> tuple[Tensor, Tensor]:
    """out and lse."""
    key = kinds(*tensors), scalars
    call = _calls.get(key)
    if call is None:
        call = remember(_calls, key, FP8Launch(tensors, scalars))
    if not call.as_given:
        tensors = fp8_checks.as_kernels_read(tensors)
    q, k, v, *scales, cu_seqlens_q, cu_seqlens_k = tensors
    out, lse = fp8_ops.empty_results(tensors, scalars)
    if call.plan.empty:
        return out.zero_(), lse.fill_(-torch.inf)
    inputs = Operands(q, k, v, *(None,) * 3, cu_seqlens_q, cu_seqlens_k, *(None,) * 4)
    call.plan.launch(tuple(inputs), *scales, out, lse if scalars.return_lse else None)
    return out, lse


_calls: dict[tuple, FP8Launch] = {}
_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
OP = fp8_ops.define("triton", attention, _KEYS)
