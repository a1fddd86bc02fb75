"""The step from the tensors of a paged call to its launches.

Decisions that depend only on shapes, strides and options are made once and kept; lengths and pages are read on the
device.
"""

from __future__ import annotations

from operator import is_
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.groups import Chunks, Features
from flashsci.backends.triton.kernels.paged import (
    PagedMod,
    PagedSizes,
    PagedStrides,
    paged_combine_kernel,
    paged_kernel,
)
from flashsci.backends.triton.kernels.paged_cache import (
    CacheSizes,
    CacheStrides,
    write_cache_kernel,
)
from flashsci.backends.triton.kernels.scores import ABSENT
from flashsci.backends.triton.launcher import Device, Launch, device_of
from flashsci.call import memory, paged_checks, paged_ops
from flashsci.call.op_checks import kinds, remember, rows
from flashsci.call.ops import BATCH_INVARIANT
from flashsci.call.paged_ops import PagedScalars, PagedTensors

UNBOUNDED = 1 << 30  # a window side that never cuts
# Tiles of up to FEW rows: (BLOCK_N, warps, stages) for head dims up to the key. Keys stream through them, and two or
# more programs fit on a processor; two of the stages are for the way from a page's number to its keys. Not timed yet.
FEW = 32
FEW_ROWS = {
    "turing": {64: (32, 4, 1), 128: (32, 4, 1), 256: (16, 4, 1)},
    "ampere": {64: (64, 4, 2), 128: (64, 4, 2), 256: (32, 4, 2)},
    "hopper": {64: (64, 4, 5), 128: (64, 4, 5), 256: (32, 4, 5)},
    "fp32": {64: (32, 4, 2), 128: (32, 4, 1), 256: (16, 4, 1)},
    "interpreter": {256: (16, 4, 1)},
}
# Programs for each processor below which keys are split. Decode: lengths differ, and a long sequence must not run
# alone at the end. Prompts: only to fill the device.
PROGRAMS_OF_FEW, PROGRAMS_OF_MANY = 16, 2
MOST_SPLITS = 64
SPLIT_KEYS = 256  # keys of a split, at least
COMBINED_ROWS = 4


class Tiles(NamedTuple):
    few: bool  # few rows of a sequence
    block_m: int
    block_n: int
    warps: int
    stages: int


def tiles(device: Device, dtype: torch.dtype, precision: str, dims: tuple[int, int], rows: int, keys: int) -> Tiles:
    """The tiles of a call, by the typical number of rows of its sequences and the most keys.

    Rows are (query, head) pairs that share a key head.
    """
    if rows > FEW:
        found = tilings.config("forward", device.capability, dtype, precision, *dims, False, False, rows, keys)
        return Tiles(False, *found[:4])
    if device.capability is None:
        name = "interpreter"
    elif dtype == torch.float32:
        name = "fp32"
    else:
        name = {7: "turing", 8: "ampere"}.get(device.capability[0], "hopper")
    table = FEW_ROWS[name]
    return Tiles(True, 16 if rows <= 16 else 32, *table[min(d for d in table if d >= max(dims))])


def splits_of(device: Device, few: bool, programs: int, keys: int, block_n: int) -> tuple[int, int]:
    """(number of splits of the keys, least keys of each)."""
    if device.capability is None:  # so that small tests have several
        return max(1, min(3, keys // (2 * block_n))), 2 * block_n
    wanted = (PROGRAMS_OF_FEW if few else PROGRAMS_OF_MANY) * device.processors
    fill = -(-wanted // max(programs, 1))
    return max(1, min(fill, MOST_SPLITS, keys // SPLIT_KEYS)), SPLIT_KEYS


def vector_of(width: int, strides: tuple[int, ...], itemsize: int) -> int:
    """The number of elements that one load may take."""
    vector = 16 // itemsize
    return vector if all(s % vector == 0 for s in (width, *strides)) else 1


def chunks_of(width: int, other: int, deep: bool, *vectors: int) -> list[Chunks]:
    """The same split of a head dim, next to another one, for tensors of these vectors."""
    d0, d1 = tilings.head_chunks(width, min(vectors) > 1, deep, other)
    return [Chunks(d0, d1, d0 + d1 != width, vector) for vector in vectors]


def unbounded(side: int) -> int:
    return UNBOUNDED if side < 0 else min(side, UNBOUNDED)


class PagedPlan:
    """The values that the launches of one kind of call share."""

    def __init__(
        self,
        device,
        dtype,
        cache_dtype,
        q_shape,
        k_shape,
        dim_v,
        table_shape,
        strides,
        scale_strides,
        scalars,
    ):
        (self.total, self.heads, dim), (pages, page, heads_k, _) = q_shape, k_shape
        (sequences, columns), self.dim_v = table_shape, dim_v
        self.device, self.group = device, self.heads // heads_k
        self.empty = self.total * self.heads * sequences == 0
        self.launches: dict[bool, tuple[Launch, Launch | None]] = {}
        turing = device.capability is not None and device.capability < (8, 0)
        precision = "tf32" if dtype != torch.float32 else "ieee" if turing else "tf32x3"
        keys = columns * page
        longest = scalars.max_seqlen_q
        invariant = longest == BATCH_INVARIANT
        if longest < 0:
            longest = -(-2 * self.total // max(sequences, 1))
        # Without influence of the batch, tiles and splits follow from nothing but dtype and head dims.
        typical = FEW if invariant else longest * self.group
        tile = tiles(device, dtype, precision, (dim, dim_v), typical, keys)
        slots = self.total * self.group // tile.block_m + sequences + 2
        full = -(-longest * self.group // tile.block_m) * sequences
        programs = min(slots, full) * heads_k
        self.splits, split_keys = splits_of(device, tile.few, programs, keys, tile.block_n)
        if invariant:
            self.splits = 1

        q_strides, k_strides, v_strides, out_strides = strides
        deep = precision != "tf32x3"
        q_chunks, k_chunks = chunks_of(
            dim, dim_v, deep, vector_of(dim, q_strides, dtype.itemsize), vector_of(dim, k_strides, cache_dtype.itemsize)
        )
        of_out = vector_of(dim_v, out_strides, dtype.itemsize)
        v_chunks, out_chunks, part_chunks = chunks_of(
            dim_v, dim, deep, vector_of(dim_v, v_strides, cache_dtype.itemsize), of_out, vector_of(dim_v, (), 4)
        )
        window = 1 if scalars.window_left < 0 else 2
        window = 0 if scalars.window_left < 0 and scalars.window_right < 0 else window
        sizes = PagedSizes(
            sequences, self.total, pages, page, columns, heads_k, self.group, dim, dim_v, slots, self.splits, split_keys,
            (0, 1, self.total), *scale_strides,
        )  # fmt: skip
        of_parts = (self.total * self.heads * dim_v, self.heads * dim_v, dim_v)
        parted = self.splits > 1
        self.main = Launch(paged_kernel, slots * heads_k * self.splits, {
            "strides": PagedStrides(q_strides, k_strides, v_strides, of_parts if parted else (0, *out_strides)),
            "sizes": sizes._replace(lse_strides=(self.total * self.heads, self.heads, 1)) if parted else sizes,
            "mod": PagedMod(scalars.scale, scalars.softcap, unbounded(scalars.window_left), unbounded(scalars.window_right)),
            "F": Features(
                VARLEN=True, WINDOW=window, SOFTCAP=scalars.softcap > 0, DROPOUT=False,
                BIAS=ABSENT.value, BIAS_VECTOR=0, RAGGED=False, MASK=ABSENT.value, MASK_VECTOR=0,
            ),
            "Q": q_chunks, "K": k_chunks, "V": v_chunks, "R": part_chunks if parted else out_chunks, "SPLIT": parted,
            "PRECISION": precision, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "num_warps": tile.warps, "num_stages": tile.stages,
        })  # fmt: skip
        self.combine = Launch(paged_combine_kernel, -(-self.total * self.heads // COMBINED_ROWS), {
            "strides": PagedStrides(q_strides, k_strides, v_strides, (0, *out_strides)), "sizes": sizes, "R": out_chunks,
            "WIDTH": triton.next_power_of_2(dim_v), "SPLITS": triton.next_power_of_2(self.splits), "ROWS": COMBINED_ROWS,
            "num_warps": 4, "num_stages": 2,
        })  # fmt: skip


class PagedLaunches:
    """A call that is checked except for shared memory, and its plan."""

    def __init__(self, given: PagedTensors, out: Tensor, scalars: PagedScalars):
        paged_checks.attention(given, out, scalars, LIMITS)
        tensors = paged_checks.as_kernels_read(given)
        q, k, v, table, _, _, _, k_scale, v_scale = tensors
        self.as_given = all(map(is_, given, tensors))
        self.spans = memory.Spans(out, given)
        self.plan = PagedPlan(
            device_of(q.device), q.dtype, k.dtype, tuple(q.shape), tuple(k.shape), v.shape[-1], tuple(table.shape),
            (q.stride()[:2], k.stride()[:3], v.stride()[:3], out.stride()[:2]),
            tuple((0, 0) if s is None else s.stride() for s in (k_scale, v_scale)), scalars,
        )  # fmt: skip


def attention(tensors: PagedTensors, out: Tensor, scalars: PagedScalars) -> Tensor:
    """Fill ``out`` and return the lse."""
    key = kinds(*tensors, out), scalars
    call = _calls.get(key)
    if call is None:
        call = remember(_calls, key, PagedLaunches(tensors, out, scalars))
    if call.spans.cross(out, tensors):
        paged_checks.attention_apart(tensors, out)
    if not call.as_given:
        tensors = paged_checks.as_kernels_read(tensors)
    q, k, v, table, used, cu_seqlens_q, sink, k_scale, v_scale = tensors
    lse, found = paged_ops.empty_lse(q, scalars.return_lse), call.plan
    if found.empty:
        out.zero_()
        lse.fill_(-torch.inf)
        return lse
    wanted = lse if scalars.return_lse else None
    if found.splits == 1:
        found.main(q, k, v, table, used, cu_seqlens_q, sink, k_scale, v_scale, out, wanted)
        return lse
    shape = found.splits, found.total, found.heads
    part_out = q.new_empty((*shape, found.dim_v), dtype=torch.float32)
    part_lse = q.new_empty(shape, dtype=torch.float32)
    found.main(q, k, v, table, used, cu_seqlens_q, sink, k_scale, v_scale, part_out, part_lse)
    found.combine(part_out, part_lse, cu_seqlens_q, sink, out, wanted)
    return lse


class Write:
    """An update that is checked except for shared memory, and its launch."""

    def __init__(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, *rest):
        slots, k_scale, v_scale = rest
        paged_checks.write(key, value, k_cache, v_cache, *rest, LIMITS)
        self.as_given = key.stride(-1) == value.stride(-1) == 1 and slots.is_contiguous()
        self.tokens = slots.shape[0]
        self.of_k, self.of_v = memory.span(k_cache), memory.span(v_cache)
        self.read = [0 if x is None else memory.span(x) for x in (key, value, *rest)]
        self.distances: set[int] = set()  # from k_cache to v_cache, for which they share no element
        key, value = rows(key), rows(value)
        heads, dims = key.shape[1], (key.shape[-1], value.shape[-1])
        most = torch.finfo(k_cache.dtype).max if k_cache.dtype in paged_ops.FP8 else 0.0
        width, width_v = (triton.next_power_of_2(d) for d in dims)
        at_once = max(1, min(triton.next_power_of_2(heads), 4096 // max(width, width_v)))
        strides = key.stride()[:2], value.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3]
        of_scales = (0 if s is None else s.stride(0) for s in (k_scale, v_scale))
        self.launch = Launch(write_cache_kernel, self.tokens, {
            "strides": CacheStrides(*strides),
            "sizes": CacheSizes(*k_cache.shape[:2], heads, *dims, *of_scales),
            "MOST": most, "HEADS": at_once, "WIDTH": width, "WIDTH_V": width_v, "num_warps": 4,
        })  # fmt: skip

    def look(self, k_cache: Tensor, v_cache: Tensor, *read: Tensor | None) -> None:
        """Raise if a cache shares memory with another tensor. read: key, value, slot_mapping and scales."""
        k, v = k_cache.data_ptr(), v_cache.data_ptr()
        end_k, end_v = k + self.of_k, v + self.of_v
        near = v - k not in self.distances
        for x, span in zip(read, self.read, strict=True):
            if span:
                at = x.data_ptr()
                near |= (at < end_k and k < at + span) or (at < end_v and v < at + span)
        if near:
            key, value, *rest = read
            paged_checks.write_apart(key, value, k_cache, v_cache, *rest)
            if not memory.share(k_cache, v_cache) and len(self.distances) < 4096:
                self.distances.add(v - k)


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    given = key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale
    kind = kinds(*given)
    write = _writes.get(kind)
    if write is None:
        write = remember(_writes, kind, Write(*given))
    write.look(k_cache, v_cache, key, value, slot_mapping, k_scale, v_scale)
    if not write.tokens:
        return
    if not write.as_given:
        key, value, slot_mapping = rows(key), rows(value), slot_mapping.contiguous()
    write.launch(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


LIMITS = paged_checks.KERNELS
_calls: dict[tuple, PagedLaunches] = {}
_writes: dict[tuple, Write] = {}
_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
OPS = paged_ops.define("triton", attention, write_kv_cache, _KEYS)
