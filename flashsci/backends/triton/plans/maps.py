"""Launches of the reductions of an attention map."""

import torch

from flashsci.backends.triton.kernels.groups import Schedule
from flashsci.backends.triton.kernels.map_keys import map_keys_kernel
from flashsci.backends.triton.kernels.map_rows import map_rows_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.dense import DensePlan, options_of, plan_of
from flashsci.call.ops import Scalars, Tensors

#: The head dims that the kernels take: wider ones would spill.
MOST = 256


def rows_launch(plan: DensePlan) -> Launch:
    """The launch of map_rows.py, with the tiles of jvp.py."""
    if "map rows" not in plan.launches:
        programs, arguments = plan.scheduled("jvp")
        arguments["num_warps"] = max(2, arguments["num_warps"])
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


def statistics(
    tensors: Tensors, lse: torch.Tensor, scalars: Scalars, entropy: bool, largest: bool, key_sum: bool
) -> list[torch.Tensor]:
    """Entropy, largest score and sum over queries of a dense call; those that are wanted.

    Args:
        tensors: as the forward's raw op takes them, laid out, not empty; v is not read.
        lse: float32, contiguous.
    """
    plan = plan_of(tensors[:3], tuple(tensors), 0, options_of(scalars))
    rows = [torch.empty_like(lse) if wanted else None for wanted in (entropy, largest)]
    if entropy or largest:
        rows_launch(plan)(tuple(tensors), lse, *rows)
    found = [x for x in rows if x is not None]
    if key_sum:
        sums = lse.new_empty((*lse.shape[:-1], tensors.k.shape[-2]))
        keys_launch(plan)(tuple(tensors), lse, sums)
        found.append(sums)
    return found
