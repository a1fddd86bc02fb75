"""Paged attention on the library's kernels: their limits, and the call.

The kernels are csrc/sm90/paged for Hopper and csrc/sm80/paged from sm_80 on; the units of paged8 are those for 8-bit
caches. A :class:`flashsci.call.problem.Problem` has no strides and no page size. Therefore the limits are in two places:
`rejects`, when a backend is chosen, and `refuse_layout`, when the library has refused a call. No other kernel replaces this
one for a call that it refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashsci.call import paged_checks
from flashsci.call.paged_ops import FP8, PagedOps, PagedScalars, PagedTensors
from flashsci.call.problem import Problem
from flashsci.errors import BackendError

GENERATIONS = (90, 80)  # newest first, as the library tries them
MAX_HEAD_DIM = 256
MAX_ROWS = 1 << 29  # FLASHSCI_MAX_SEQ: (token, head) pairs of a call, keys of a sequence
MAX_BLOCKS = (1 << 30) - 1  # of keys, of all tiles and heads at the longest lengths
BLOCK_BYTES = 8192  # of K in a block of csrc/sm80/paged, the smallest of all
PAGE = 16  # kSmallPage: a copy takes as many rows as pages and tiles have in common
ROWS = 64  # kRows, of a tile
UNIT = 8  # of head dims
BYTES = 16  # of addresses and strides
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def unit_of(dtype: torch.dtype, cache_dtype: torch.dtype | None, generation: int) -> str:
    """The kernel unit of one of `_DTYPES`, and a cache."""
    return f"cuda/sm{generation}/paged{'8' if cache_dtype in FP8 else ''}_{_DTYPES[dtype]}"


def runs_on(generation: int, capability: tuple[int, int]) -> bool:
    """Whether a generation runs on a device; Hopper's kernels run on Hopper only."""
    return capability[0] == 9 if generation == 90 else capability >= divmod(generation, 10)


def rejects(problem: Problem, generation: int, info: Mapping[str, Any], device: str) -> str | None:
    """Why a paged call cannot be computed; None if it can, strides and page size not considered.

    Args:
        generation: the only one to consider, 0 for any.
        info: the contents of the library, present or possible.
        device: the device in words.
    """
    assert problem.capability is not None
    if generation not in (0, *GENERATIONS):
        return f"its paged kernels are of generations sm90 and sm80, not sm{generation}"
    if problem.dtype not in _DTYPES:
        return f"its paged kernels take queries in float16 and bfloat16, not {_name(problem.dtype)}"
    asked = (generation,) if generation else GENERATIONS
    running = [g for g in asked if runs_on(g, problem.capability)]
    if not running:
        wanted = "9.0 (Hopper)" if generation == 90 else "8.0 and newer"
        return f"its paged kernels run on compute capability {wanted} and this device is {device}"
    if problem.cache_dtype not in (problem.dtype, *FP8):
        return (
            f"its paged kernels read caches in the dtype of the queries ({_name(problem.dtype)}) or in 8-bit floats, and these are "
            f"{_name(problem.cache_dtype)}"
        )
    dims = problem.head_dim, problem.head_dim_v
    if max(dims) > MAX_HEAD_DIM or any(d % UNIT for d in dims):
        return (
            f"its paged kernels have head dims that are multiples of {UNIT} up to {MAX_HEAD_DIM}, and these are {dims[0]} and "
            f"{dims[1]}"
        )
    units = [unit_of(problem.dtype, problem.cache_dtype, g) for g in running]
    if not any(unit in info["units"] for unit in units):
        cache = f" for {_name(problem.cache_dtype)} caches" if problem.cache_dtype in FP8 else ""
        return (
            f"this build (FA_ARCHS={','.join(info['archs'])}) has no {_name(problem.dtype)} paged kernel{cache} for "
            f"{device}; build with FA_ARCHS={problem.capability[0]}{problem.capability[1]}"
        )
    return None


def refuse_layout(tensors: PagedTensors, out: Tensor) -> str | None:
    """Why the kernels do not take the tensors of a call in their memory layout, and the alternative; None if they do.

    The conditions are those of csrc/core/paged/host.cuh and of the launchers, which check addresses themselves.
    """
    q, k_cache, v_cache, block_table = tensors[:4]
    page, heads_k = k_cache.shape[1:3]
    scales = [n for n in ("k_scale", "v_scale") if getattr(tensors, n) is not None]
    if scales and k_cache.dtype not in FP8:
        return f"its kernels have no {' and no '.join(scales)} for a 16-bit cache; put scales into the cache, or use backend='triton'"
    if page % PAGE:
        return f"pages have {page} rows and its kernels take multiples of {PAGE}; use such pages, or backend='triton'"
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        sizes, strides, unit = x.shape[:-1], x.stride()[:-1], BYTES // x.element_size()
        odd = any(n > 1 and s % unit for n, s in zip(sizes, strides, strict=True))
        if odd or x.storage_offset() % unit:
            return (
                f"{name} has strides {list(strides)} before its last dim and begins {x.storage_offset()} elements into its "
                f"storage, and its kernels copy rows that lie at multiples of {BYTES} bytes: all of these must be multiples of {unit} "
                "(strides of dims of size 1 may be any); lay it out so, or use backend='triton'"
            )
    keys = block_table.shape[1] * page
    if keys > MAX_ROWS or q.shape[0] * q.shape[1] > MAX_ROWS:
        return (
            f"sequences may have {keys} keys and q has {q.shape[0]} tokens of {q.shape[1]} heads, and its kernels count up to "
            f"{MAX_ROWS} keys and rows; use fewer columns of the block table, or backend='reference'"
        )
    tiles = q.shape[0] * (q.shape[1] // heads_k) // ROWS + block_table.shape[0] + 2
    dim = next(n for n in (64, 128, 256) if max(q.shape[2], v_cache.shape[3]) <= n)
    block = BLOCK_BYTES // (dim * k_cache.element_size())
    if tiles * heads_k * (-(-keys // block) + 1) > MAX_BLOCKS:
        return (
            f"{tiles} tiles of rows, {heads_k} key heads and up to {keys} keys of a sequence are more blocks than its kernels "
            f"count ({MAX_BLOCKS}); use fewer columns of the block table, or backend='triton'"
        )
    return None


def attention(tensors: PagedTensors, out: Tensor, scalars: PagedScalars, generation: int = 0) -> Tensor:
    """Fill ``out`` and return the lse of a call that `rejects` accepts. ``generation``: the only one to use.

    Raises:
        ValueError: ``out`` shares memory with a tensor that is read.
        BackendError: as `refuse_layout`. Both are checked only when the library has refused: a decode step has no microseconds
            for them, and a compiler could not trace them.
    """
    if tensors.sink is not None and tensors.sink.dtype != torch.float32:
        tensors = tensors._replace(sink=tensors.sink.float())
    try:
        lse: Tensor = torch.ops.flashsci.cuda_paged_attention.default(*tensors, out, *scalars, generation)
    except RuntimeError:
        paged_checks.attention_apart(tensors, out)
        reason = refuse_layout(tensors, out)
        if reason is None:
            raise
        raise BackendError(f"backend 'cuda' cannot serve this call: {reason}") from None
    return lse


OPS = PagedOps(attention, None)


def _ops_of(generation: int) -> PagedOps:
    """The paged functions of one generation of kernels."""
    return PagedOps(functools.partial(attention, generation=generation), None)


SM80, SM90 = _ops_of(80), _ops_of(90)
