"""Attention over a sequence that is split over the ranks of a mesh: the functions and their documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashsci
from flashsci.call import arguments
from flashsci.call.ops import follow_layout
from flashsci.call.torch_state import autocast
from flashsci.distributed import agreement, dtensor, gather, plan, ring, ulysses
from flashsci.distributed.agreement import Mesh
from flashsci.distributed.collectives import place_in, replicated
from flashsci.distributed.plan import Given

ATTEND = {"ring": ring.attend, "all_gather": gather.attend, "ulysses": ulysses.attend}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh | None = None,
    bias: Tensor | None = None,
    key_weight: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "upper_left",
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    backend: str = "auto",
    layout: str = "contiguous",
    strategy: str = "auto",
    total: int | tuple[int, int] | None = None,
) -> Any:
    """:func:`flashsci.attention` of a sequence that is split over the ranks of a mesh.

    Every rank makes the same call on its own part. The result is that of one call on the whole, and gradients are
    those of the sum of the ranks' results.

    Args:
        q: this rank's queries ``[..., Hq, Sq of this rank, D]``; parts may be of any length, 0 too.
        k: this rank's keys ``[..., Hk, Sk of this rank, D]``, leading dims as q's.
        v: this rank's values ``[..., Hk, Sk of this rank, Dv]``.
        mesh: DeviceMesh of one dim, over which the sequence is split (``mesh["cp"]`` of a larger one). With one rank
            this is the plain call, bit for bit. Not needed if the tensors are DTensors: then it is the one mesh dim
            on which q, k, v are ``Shard`` of the sequence (on others they may be ``Shard`` of a leading dim), and
            results are DTensors too. Where none is, this is :func:`flashsci.attention` on DTensors.
        bias: split by rows, broadcastable to ``[..., Hq, Sq of this rank, whole Sk]``: its gradient is that of these
            rows. Or with one row (or no dim of rows), the same on every rank: its gradient is summed over the ranks,
            and every rank has the sum. Keys are in the order of the whole sequence, in every layout.
        key_weight: split as k is, broadcastable to ``[..., Hk, Sk of this rank]``; its last dim is not broadcast.
        mask: bool, as the bias.
        causal, window, align: on positions in the whole sequence.
        scale, softcap, return_lse, deterministic, precision, backend: as in :func:`flashsci.attention`.
        layout: the rows that a rank has: "contiguous", or "head_tail", the cut of :func:`flashsci.distributed.shard`
            that gives all ranks the same work under a causal mask. The same for q and k.
        strategy: "ring", "all_gather" or "ulysses"; "auto" takes the one that the model of
            :mod:`flashsci.distributed.cost` predicts to be fastest.
        total: the whole Sq, or whole (Sq, Sk), if the parts are those of :func:`flashsci.distributed.shard`. Then
            only the first call of a kind (shapes, options) compares arguments with the other ranks, for which the
            host waits. Without it every call does, and so does a call with a bias or a mask. DTensors know the whole
            length themselves.

    Returns:
        out ``[..., Hq, Sq of this rank, Dv]`` in q's dtype and layout; with ``return_lse`` also lse
        ``[..., Hq, Sq of this rank]``.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention`; also ValueError if ranks call with
            different arguments, and BackendError if a strategy cannot serve the call. Wrong arguments are found
            before data moves, on all ranks.
        RuntimeError: another rank refused its arguments.

    The all-gather strategy computes second derivatives, for any strategy of the first one. There is no dropout, no
    forward-mode derivative and no ``torch.vmap``: they raise ValueError.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> import flashsci.distributed as fd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # of torchrun's world
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> whole = torch.randn(3, 2, 4, 10, 16)  # q, k, v, the same on every rank
        >>> q, k, v = fd.shard(whole, mesh, layout="head_tail").unbind(0)
        >>> out = fd.attention(q, k, v, mesh=mesh, causal=True, layout="head_tail")
        >>> fd.unshard(out, mesh, layout="head_tail").shape
        torch.Size([2, 4, 10, 16])
        >>> dist.destroy_process_group()

    Source: Liu et al., arXiv:2310.01889 (ring); Llama 3, arXiv:2407.21783 (all-gather, head and tail chunks); Jacobs et al.,
        arXiv:2309.14509 (Ulysses).
    """
    tensors: tuple[Any, ...]
    wrap: Callable[[Tensor], Tensor]
    known = None
    if dtensor.is_dtensor(q) and not dtensor.splits_sequence(q):
        plan.check_choices(layout, strategy)
        return flashsci.attention(
            q, k, v, bias=bias, key_weight=key_weight, mask=mask, causal=causal, window=window, align=align, scale=scale,
            softcap=softcap, return_lse=return_lse, deterministic=deterministic, precision=precision, backend=backend,
        )  # fmt: skip
    if dtensor.is_dtensor(q):
        tensors, group, wrap = dtensor.unwrapped((q, k, v, bias, key_weight, mask))
        known = (q.shape[-2], k.shape[-2])
    else:
        tensors, group, wrap = (q, k, v, bias, key_weight, mask), agreement.group_of(mesh), _same
    options: dict[str, Any] = dict(
        causal=causal,
        window=window,
        align=align,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
        precision=precision,
    )
    if group.size() == 1:
        plan.check_choices(layout, strategy)
        q, k, v, bias, key_weight, mask = tensors
        found = flashsci.attention(
            q,
            k,
            v,
            bias=bias,
            key_weight=key_weight,
            mask=mask,
            return_lse=return_lse,
            backend=backend,
            **options,
        )
        return tuple(wrap(x) for x in found) if return_lse else wrap(found)
    given = Arguments(options, layout, strategy, backend, known=known, total=total)
    out, lse = _attend(group, tensors, given)
    return (wrap(out), wrap(lse)) if return_lse else wrap(out)


def _same(x: Tensor) -> Tensor:
    return x


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    mesh: Mesh,
    bias: Tensor | None = None,
    key_weight: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    backend: str = "auto",
    layout: str = "contiguous",
    strategy: str = "auto",
) -> Any:
    """:func:`flashsci.varlen_attention` of packed sequences whose rows are split over the ranks of a mesh.

    Args:
        q: this rank's rows of the packed queries, ``[T of this rank, Hq, D]``.
        k, v: this rank's rows of the keys and values of the same sequences, ``[T of this rank, Hk, D or Dv]``.
        cu_seqlens: int32 ``[N + 1]``, the offsets in the whole, the same on every rank: sequence n is rows
            ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``, on any ranks. The host reads them; on the CPU that waits for
            nothing.
        bias: per key, ``[Hb, 1, whole T]`` with Hb = 1 or Hq, the same on every rank.
        key_weight: ``[T of this rank]`` or ``[Hw, T of this rank]`` with Hw = 1 or Hk.
        others: as in :func:`attention`; causal and window are those of each sequence.

    Returns:
        out ``[T of this rank, Hq, Dv]``; with ``return_lse`` also lse ``[Hq, T of this rank]``.

    Raises:
        TypeError, ValueError, BackendError, RuntimeError: as :func:`attention`.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> import flashsci.distributed as fd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
        >>> q, k, v = (fd.shard(x, mesh, dim=0) for x in torch.randn(3, 13, 4, 16))
        >>> fd.varlen_attention(q, k, v, offsets, mesh=mesh, causal=True).shape
        torch.Size([13, 4, 16])
        >>> dist.destroy_process_group()
    """
    group = agreement.group_of(mesh)
    options: dict[str, Any] = dict(
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
        precision=precision,
    )
    if group.size() == 1:
        plan.check_choices(layout, strategy)
        return flashsci.varlen_attention(
            q, k, v, cu_seqlens.to(q.device), bias=bias, key_weight=key_weight, return_lse=return_lse, backend=backend,
            **options,
        )  # fmt: skip
    options["align"] = "upper_left"
    tensors = (q, k, v, bias, key_weight, None)
    given = Arguments(options, layout, strategy, backend, cu_seqlens)
    out, lse = _attend(group, tensors, given)
    out = out.transpose(0, 1)
    return (out, lse) if return_lse else out


class Arguments(NamedTuple):
    """The arguments of a call other than its tensors."""

    options: dict[str, Any]
    layout: str
    strategy: str
    backend: str
    cu_seqlens: Tensor | None = None
    known: tuple[int, int] | None = None  # whole Sq and Sk, known from DTensors
    total: int | tuple[int, int] | None = None  # the same, given by the caller


def _attend(group: Any, tensors: tuple[Any, ...], given: Arguments) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's part, [..., H, S, D], after all ranks agree."""
    group_name = group.group_name
    entry = "distributed.attention" if given.cu_seqlens is None else "distributed.varlen_attention"
    names = ("q", "k", "v", "bias", "key_weight", "mask")
    agreement.check_transforms(entry, cu_seqlens=given.cu_seqlens, **dict(zip(names, tensors, strict=True)))
    if torch.compiler.is_compiling():
        tensors, mine = _given(group_name, tensors, given)
        planned = plan.traced_plan(group_name, mine)
    else:
        try:
            tensors, mine = _given(group_name, tensors, given)
        except (TypeError, ValueError) as error:
            agreement.refuse(group, error)
        planned = plan.plan(group_name, mine)
    q, k, v, bias, key_weight, mask = tensors
    if bias is not None and not planned.split[0]:
        bias = replicated(bias, group_name)
    out, lse = ATTEND[planned.strategy](q, k, v, bias, key_weight, mask, planned.text)
    return follow_layout(out, q), lse


def _given(group_name: str, tensors: tuple[Any, ...], given: Arguments) -> tuple[tuple[Any, ...], Given]:
    """The tensors with heads before rows, and the known facts of the call."""
    q, k, v, bias, key_weight, mask = tensors
    arguments.check_types(q, k, v, bias=bias, mask=mask, key_weight=key_weight)
    q, k, v = autocast(q, k, v)
    offsets, total = None, given.known
    if given.cu_seqlens is not None:
        if not q.dim() == k.dim() == v.dim() == 3:
            shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
            raise ValueError(f"packed q, k, v must have shape [T, H, D], got {shapes}")
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        arguments.check_cu_seqlens("cu_seqlens", given.cu_seqlens, given.cu_seqlens)
        if given.cu_seqlens.device.type == "meta":
            raise ValueError(
                "the host reads cu_seqlens, which on device 'meta' has no values; give it on the CPU, beside q, k and v on any device"
            )
        offsets = tuple(given.cu_seqlens.tolist())
    tensors = (q, k, v, bias, key_weight, mask)
    checked = arguments.Options.of(**given.options, dropout_p=0.0, return_lse=True)
    if given.total is not None and total is None:
        total = plan.checked_total(given.total, q, k, given.layout, place_in(group_name))
    return tensors, plan.given(tensors, checked, given.layout, given.strategy, given.backend, offsets, total)
