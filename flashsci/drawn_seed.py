"""The seed of a dropout that names none, as an op: drawn once for forward and backward, whatever a compiler recomputes.

A compiler that saves memory computes again what a backward needs, and to it a drawn number is as good as the next. So the graph
that it partitions says of this op that its result is saved. Where nothing may be saved (an activation memory budget of 0) the
partitioner keeps the generator's state instead, as it does inside a checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("flashsci", "FRAGMENT")
NAME = "draw_seed"
_LAST_GRAPH = 1 << 30  # after every checkpoint of a program: none of them makes a boundary of ours


def draw(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


def draw_recorded(device: torch.device) -> Tensor:
    """The op, for who traces."""
    # Random and empty: a vmap of randomness="different" maps it, and so reaches the rule of this op.
    seed: Tensor = torch.ops.flashsci.draw_seed(torch.rand(0, device=device))
    return seed


def _fake(like: Tensor) -> Tensor:
    _teach_the_tracer()
    return like.new_empty(2, dtype=torch.int64)


@functools.cache
def _teach_the_tracer() -> None:
    """Register what follows with the tracer of graphs, which not every process imports."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    torch.library.register_torch_dispatch(
        f"flashsci::{NAME}", ProxyTorchDispatchMode, _traced, lib=LIBRARY
    )


def _traced(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
    """As any op is traced; with the partitioner's mark on its node, unless a checkpoint has set one."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, proxy_call
    from torch.utils.checkpoint import CheckpointPolicy

    found: Any = proxy_call(mode, func, mode.pre_dispatch, args, kwargs or {})
    meta = get_proxy_slot(found, mode.tracer).proxy.node.meta
    if meta.get("recompute") is None:
        nothing = _budget(meta) == 0
        meta["recompute"] = (
            CheckpointPolicy.PREFER_RECOMPUTE if nothing else CheckpointPolicy.MUST_SAVE
        )
        meta["ac_graph_id"] = _LAST_GRAPH
    seed: Tensor = found
    return seed


def _budget(meta: dict[str, Any]) -> float:
    """How much a compiler may save for a backward: of the region that is traced, or of everything."""
    from torch._functorch import config

    region = (meta.get("custom") or {}).get("_region_activation_memory_budget")
    return float(config.activation_memory_budget if region is None else region)


def _mapped(info: Any, dims: tuple[int | None, ...], like: Tensor) -> tuple[Tensor, int | None]:
    """Only randomness="different" comes here."""
    return torch.stack([torch.ops.flashsci.draw_seed(like) for _ in range(info.batch_size)]), 0


LIBRARY.define(f"{NAME}(Tensor like) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
LIBRARY.impl(NAME, lambda like: draw(like.device), "CompositeExplicitAutograd")
torch.library.register_fake(f"flashsci::{NAME}", _fake, lib=LIBRARY)
torch.library.register_vmap(f"flashsci::{NAME}", _mapped, lib=LIBRARY)
