"""The op of the reductions of an attention map, and its launches."""

import math

import torch
import triton

from flashsci.backends.triton import checks
from flashsci.backends.triton.kernels.groups import Schedule
from flashsci.backends.triton.kernels.map_keys import map_keys_kernel
from flashsci.backends.triton.kernels.map_rows import map_rows_kernel
from flashsci.backends.triton.kernels.map_top import map_top_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.dense import DensePlan, options_of, plan_of
from flashsci.call import map_ops
from flashsci.call.map_ops import MapCall, empty_results
from flashsci.call.op_checks import need


def rows_launch(plan: DensePlan) -> Launch:
    """The launch of map_rows.py, with the tiles of jvp.py."""
    if "map rows" not in plan.launches:
        programs, arguments = plan.scheduled("jvp")
        arguments["num_warps"] = max(2, arguments["num_warps"])
        if plan.bias_mask:  # 64 keys would spill
            arguments["BLOCK_N"] = min(32, arguments["BLOCK_N"])
        plan.launches["map rows"] = Launch(map_rows_kernel, programs, arguments)
    return plan.launches["map rows"]


def keys_launch(plan: DensePlan) -> Launch:
    """The launch of map_keys.py, with the tiles of a kernel that owns keys."""
    if "map keys" not in plan.launches:
        tiles, arguments = plan.tiled("double_backward_keys")
        heads = plan.batch * plan.heads
        arguments["schedule"] = Schedule(tiles, 1, heads)
        arguments["num_warps"] = max(2, arguments["num_warps"])
        plan.launches["map keys"] = Launch(map_keys_kernel, tiles * heads, arguments)
    return plan.launches["map keys"]


def top_tiles(plan: DensePlan, entries: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, warps) of map_top.py for lists of so many entries: a warp has 16 rows, each in four threads, and
    nearly nothing spills."""
    capability = plan.device.capability
    if capability is None:
        return 32, 16, 4
    turing = capability < (8, 0)
    rows = 32 if plan.lengths[0] <= 32 or turing else 64
    wgmma = capability[0] == 9 and rows == 64  # it reads q from shared memory, mma from registers
    if plan.dtype == torch.float32 or turing:
        if plan.width > 128 and not wgmma:
            return 16, 32, 4
        columns = 32 if plan.width <= (128 if wgmma else 32) else 16
    elif plan.width > 128 or plan.bias_mask:
        columns = 16 if plan.width > 128 and plan.bias_mask else 32
    else:
        columns = 64 if wgmma and entries <= 16 else 32
    return rows, columns, rows // 16


def top_launch(plan: DensePlan, count: int) -> Launch:
    """The launch of map_top.py for so many probabilities of a row."""
    key = "map top", count
    if key not in plan.launches:
        _, arguments = plan.scheduled("jvp")
        entries = 1 << (count - 1).bit_length()
        rows, columns, warps = top_tiles(plan, entries)
        tiles = plan.size_q // rows + plan.sequences + 2 if plan.varlen else -(-plan.size_q // rows)
        arguments["schedule"] = arguments["schedule"]._replace(tiles=tiles)
        # Nothing is loaded ahead in a loop that has another one in it.
        arguments.update(count=count, K=entries, BLOCK_M=rows, BLOCK_N=columns, num_warps=warps, num_stages=1)
        arguments.pop("maxnreg", None)
        plan.launches[key] = Launch(map_top_kernel, tiles * plan.batch * plan.heads, arguments)
    return plan.launches[key]


def statistics(call: MapCall) -> tuple[torch.Tensor, ...]:
    """The results of map_ops.RESULTS; without elements where not wanted.

    Raises:
        TypeError, ValueError: tensors that do not fit, as checks.py has it, a wider head, or a larger ``top_k``.
    """
    dim, most = call.q.shape[-1], map_ops.MAX_HEAD_DIM
    need(
        dim <= most,
        f"the kernels of maps have head dims up to {most}, got {dim}; use_backend('reference') has no limit",
    )
    tensors, scalars = checks.checked(call.tensors, call.scalars, of_lse=(call.lse,)), call.scalars
    plan = plan_of(tensors[:3], tuple(tensors), 0, options_of(scalars))
    found = empty_results(call)
    if plan.empty:
        for x, value in zip(found, (0.0, -math.inf, 0.0, 0.0, -1), strict=True):
            x.fill_(value)
        return found
    lse = call.lse.contiguous()
    if call.entropy or call.largest_score:
        rows = (x if wanted else None for x, wanted in zip(found, call.wanted[:2], strict=False))
        rows_launch(plan)(tuple(tensors), lse, *rows)
    if call.key_sum:
        keys_launch(plan)(tuple(tensors), lse, found[2])
    if call.top_k:
        top_launch(plan, call.top_k)(tuple(tensors), lse, *found[3:])
    return found


_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
map_ops.define("triton", statistics, _KEYS)
