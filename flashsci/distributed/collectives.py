"""Collectives along dim 0 whose gradients are collectives, so that derivatives of any order exist; parts may be
uneven.

They are torch's functional collectives, which compilers know. The receiver takes sums, in float32 and in the order of
ranks: they are bitwise equal in every run. All ranks together count as one function: a rank's gradient is that of the
sum of all ranks' results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from flashsci.call.torch_state import transforming
from flashsci.distributed.gloo import collective
from flashsci.errors import BackendError

_ops = torch.ops._c10d_functional
Lengths = tuple[int, ...]


def group_named(name: str) -> Any:
    return _resolve_process_group(name)  # type: ignore[arg-type]


@torch._dynamo.assume_constant_result
def place_in(group_name: str) -> tuple[int, int]:
    """(rank of this process, number of ranks); a compiler may know them while it traces."""
    group = group_named(group_name)
    return group.rank(), group.size()


def _all_to_all(x: Tensor, sent: Lengths, received: Lengths, group_name: str) -> Tensor:
    counts = list(received), list(sent)
    return collective(_ops.all_to_all_single, x.contiguous(), *counts, group_name)


class AllGather(torch.autograd.Function):
    """Rows of all ranks, in rank order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Lengths, group_name: str) -> Tensor:
        ctx.lengths, ctx.group_name = lengths, group_name
        world, most = len(lengths), max(lengths)
        padded = x.contiguous()
        if x.shape[0] < most:
            padded = torch.cat([padded, x.new_zeros(most - x.shape[0], *x.shape[1:])])
        every = collective(_ops.all_gather_into_tensor, padded, world, group_name)
        if all(n == most for n in lengths):
            return every
        return torch.cat([every[r * most : r * most + n] for r, n in enumerate(lengths)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_transforms(gradient)
        return ReduceScatter.apply(gradient, ctx.lengths, ctx.group_name), None, None


class ReduceScatter(torch.autograd.Function):
    """The sum over ranks of this rank's rows; the rows of all ranks are in rank order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Lengths, group_name: str) -> Tensor:
        ctx.lengths, ctx.group_name = lengths, group_name
        rank, _ = place_in(group_name)
        own = (lengths[rank],) * len(lengths)
        parts = _all_to_all(x, lengths, own, group_name).unflatten(0, (len(lengths), lengths[rank]))
        wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_transforms(gradient)
        return AllGather.apply(gradient, ctx.lengths, ctx.group_name), None, None


class AllToAll(torch.autograd.Function):
    """An exchange: ``sent[r]`` rows go to rank r, ``received[r]`` rows come from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Lengths, received: Lengths, group_name: str) -> Tensor:
        ctx.sent, ctx.received, ctx.group_name = sent, received, group_name
        return _all_to_all(x, sent, received, group_name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_transforms(gradient)
        back = AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group_name)
        return back, None, None, None


class Replicated(torch.autograd.Function):
    """A tensor that every rank has; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_transforms(gradient)
        return Summed.apply(gradient, ctx.group_name), None


class Summed(torch.autograd.Function):
    """The sum over ranks, on every rank: each rank sums a part, and all gather the sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        _, world = place_in(group_name)
        lengths = tuple((x.numel() + i) // world for i in range(world))
        part = ReduceScatter.apply(x.reshape(-1), lengths, group_name)
        return all_gather(part, lengths, group_name).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_transforms(gradient)
        return Summed.apply(gradient, ctx.group_name), None


def refuse_transforms(x: Tensor) -> None:
    """Raise if a call is mapped, traced by torch.jit, or has tangents: no collective is defined for any of these."""
    if torch.compiler.is_compiling():  # it traces none of these checks
        return
    legacy = torch._C._functorch.is_legacy_batchedtensor(x)
    if legacy or transforming() or torch._C._get_tracing_state():
        raise BackendError(
            "collectives have no vmap, no forward mode, no batched gradients and no torch.jit.trace; use reverse mode "
            "(torch.autograd.grad, backward), one gradient after the other, or call flashsci.attention on the whole sequence"
        )


def all_gather(x: Tensor, lengths: Lengths, group_name: str) -> Tensor:
    """Rows (dim 0) of all ranks in rank order, ``lengths[r]`` of rank r."""
    refuse_transforms(x)
    found: Tensor = AllGather.apply(x, lengths, group_name)
    return found


def all_to_all(x: Tensor, sent: Lengths, received: Lengths, group_name: str) -> Tensor:
    """Rows (dim 0) exchanged: ``sent[r]`` to rank r, ``received[r]`` from it, in rank order."""
    refuse_transforms(x)
    found: Tensor = AllToAll.apply(x, sent, received, group_name)
    return found


def replicated(x: Tensor, group_name: str) -> Tensor:
    """x with the sum of all ranks' gradients as its gradient."""
    found: Tensor = Replicated.apply(x, group_name) if x.requires_grad else x
    return found
