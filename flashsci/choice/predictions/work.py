"""The work of one pass of a call: the microseconds that each part of it would take at a device's own figures."""

from __future__ import annotations

import math
from typing import NamedTuple

from flashsci.call.problem import Problem, pairs_of
from flashsci.choice.predictions.devices import Device
from flashsci.choice.predictions.families import TILINGS, Family, Tiling, bits_of, head_dims


class Work(NamedTuple):
    """Microseconds at a device's figures, each of which a family multiplies by a constant of its own."""

    launch: float  # 1 for each kernel
    programs: float  # programs one after the other on a processor
    products: float  # of tensor cores
    deep: float  # the same times the head dim over 128: wide heads leave fewer registers
    wide: float  # products of head dims above 128
    unaligned: float  # products with rows that no vector load fits
    scores: float  # one operation of a lane for each score
    biased: float  # the same for scores that have a bias of their own
    masked: float  # for scores that have a mask of their own
    modified: float  # for each other modification of scores
    summed: float  # for scores whose gradients are summed to that of a bias
    memory: float  # bytes from and to memory


def _length(n: int, tile: int, fixed: bool) -> int:
    """A length as tiles cover it."""
    if n < tile and not fixed:
        tile = min(tile, max(16, 1 << (n - 1).bit_length()))
    return -(-n // tile) * tile


def _scores(p: Problem, tiling: Tiling) -> int:
    """Scores of one head that tiles with a visible one hold."""
    assert p.seq_q is not None and p.seq_k is not None
    rows, keys = _length(p.seq_q, tiling.queries, tiling.fixed), _length(p.seq_k, tiling.keys, tiling.fixed)
    rest = min(tiling.queries, rows) + min(tiling.keys, keys)
    if not tiling.skips:
        return rows * keys
    left = -1 if p.window_left < 0 else p.window_left + rest // 2
    right = -1 if p.window_right < 0 else p.window_right + rest // 2
    return pairs_of(rows, keys, left, right, p.lower_right)


def _programs(p: Problem, tiling: Tiling, heads: int) -> float:
    assert p.seq_q is not None and p.seq_k is not None
    if tiling.grid == "heads":
        return heads
    n, tile = (p.seq_q, tiling.queries) if tiling.grid == "queries" else (p.seq_k, tiling.keys)
    return heads * (_length(n, tile, tiling.fixed) // min(tile, _length(n, tile, tiling.fixed)))


def _merged(p: Problem, backend: str) -> float:
    """Bytes of the one mask that SDPA is given in place of a bias, a mask and a band."""
    assert p.batch is not None and p.seq_q is not None and p.seq_k is not None
    banded = p.window_left >= 0 or p.window_right > 0 or (p.window_right == 0 and (p.bias or p.mask or p.lower_right))
    if backend != "sdpa" or not (p.bias_shape is not None and (p.mask or banded)):
        return 0.0
    assert p.bias_shape is not None and p.bias_dtype is not None
    heads = p.bias_shape[-3] if len(p.bias_shape) > 2 else 1
    shared = math.prod(p.bias_shape[:-3]) if not p.mask else math.prod(p.batch)
    return 2.0 * shared * heads * p.seq_q * p.seq_k * p.bias_dtype.itemsize


def has_own_bias(p: Problem) -> bool:
    """Whether scores of different queries have different biases."""
    return p.bias_shape is not None and len(p.bias_shape) > 1 and p.bias_shape[-2] != 1


def work_of(p: Problem, backend: str, family: Family, backward: bool, device: Device) -> Work:
    """The work of a pass by a family; the sizes of the call are known."""
    assert p.batch is not None and p.seq_q is not None and p.seq_k is not None
    tiling = TILINGS[family.name]
    heads = math.prod(p.batch) * p.heads_q
    all_scores = heads * _scores(p, tiling)
    dims = head_dims(p, tiling)
    flops = 2 * all_scores * (3 * dims[0] + 2 * dims[1] if backward else sum(dims))
    if bits_of(p, backend) == 32:
        flops *= 3  # three products of halves
    programs = _programs(p, tiling, heads)
    turns = programs / device.processors
    # A processor without a program waits for the others.
    waits = 1.0 if tiling.grid == "split" else max(1.0, (turns + math.ceil(turns)) / 2) / turns
    lane = waits * all_scores / device.lanes
    others = sum(
        (
            p.bias and not has_own_bias(p),
            p.mask and not p.mask_by_query,
            p.softcap > 0,
            p.dropout_p > 0,
            p.alibi,
            p.key_weight,
        )
    )
    moved = float(p.bytes(int(backward)))
    if backend == "eager":
        passes = 7 if backward else 5
        moved += passes * heads * p.seq_q * p.seq_k * p.dtype.itemsize
    moved += _merged(p, backend)
    products = waits * flops / device.products
    return Work(
        launch=float(family.launches),
        programs=max(1.0, turns),
        products=products,
        deep=products * sum(dims) / 256,
        wide=products if max(dims) > 128 else 0.0,
        unaligned=products if p.head_dim % 8 or p.head_dim_v % 8 else 0.0,
        scores=lane,
        biased=has_own_bias(p) * lane,
        masked=p.mask_by_query * lane,
        modified=others * lane,
        summed=lane if backward and family.sums else 0.0,
        memory=moved / device.bytes,
    )
