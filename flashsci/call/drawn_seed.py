"""The seed of a dropout without a given seed, as an op: drawn once for forward and backward, whatever a compiler
recomputes.

A compiler that saves memory recomputes values that a backward needs, and would draw another number. Therefore the
graph that it partitions marks the result of this op as saved. Where nothing may be saved (an activation memory budget
of 0) the partitioner stores the generator's state instead, as it does inside a checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("flashsci", "FRAGMENT")
NAME = "draw_seed"
_LAST_GRAPH = 1 << 30  # after every checkpoint of a program: none makes a boundary of ours


def draw(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


def draw_recorded(device: torch.device) -> Tensor:
    """The op, for callers that trace."""
    # Random and empty: a vmap of randomness="different" maps it, and so reaches the rule of this op.
    seed: Tensor = torch.ops.flashsci.draw_seed(torch.rand(0, device=device))
    return seed


def _fake(like: Tensor) -> Tensor:
    _teach_the_tracer()
    return like.new_empty(2, dtype=torch.int64)


@functools.cache
def _teach_the_tracer() -> None:
    """Register the functions below with the tracer of graphs, which not every process imports."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    torch.library.register_torch_dispatch(f"flashsci::{NAME}", ProxyTorchDispatchMode, _traced, lib=LIBRARY)


def _traced(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
    """Trace as for any op, with the partitioner's mark on the node, unless a checkpoint has set one."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, proxy_call
    from torch.utils.checkpoint import CheckpointPolicy

    found: Any = proxy_call(mode, func, mode.pre_dispatch, args, kwargs or {})
    meta = get_proxy_slot(found, mode.tracer).proxy.node.meta
    if meta.get("recompute") is None:
        nothing = _budget(meta) == 0
        meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE if nothing else CheckpointPolicy.MUST_SAVE
        meta["ac_graph_id"] = _LAST_GRAPH
    traced: Tensor = found
    return traced


def _budget(meta: dict[str, Any]) -> float:
    """The share that a compiler may save for a backward: of the traced region, or of everything."""
    from torch._functorch import config

    region = (meta.get("custom") or {}).get("_region_activation_memory_budget")
    return float(config.activation_memory_budget if region is None else region)


def _mapped(info: Any, dims: tuple[int | None, ...], like: Tensor) -> tuple[Tensor, int | None]:
    """The rule for vmap; only randomness="different" reaches it."""
    return torch.stack([torch.ops.flashsci.draw_seed(like) for _ in range(info.batch_size)]), 0


LIBRARY.define(f"{NAME}(Tensor like) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
LIBRARY.impl(NAME, lambda like: draw(like.device), "CompositeExplicitAutograd")
torch.library.register_fake(f"flashsci::{NAME}", _fake, lib=LIBRARY)
torch.library.register_vmap(f"flashsci::{NAME}", _mapped, lib=LIBRARY)
