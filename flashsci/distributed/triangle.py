"""Triangle attention of a pair representation whose rows are split over the ranks of a mesh.

Row i of z [N, N, C] attends along itself: q, k, v of a row are on its rank, whole. The bias [H, N, N], one for all
rows, is not: it is computed from z too, so each rank has some of its query rows. A block of those rows serves the
queries of the same place in every row, and no two blocks share a query: nothing is merged.

    all_gather  collects the bias, H N^2 numbers on every rank; differentiable to any order
    ring        passes blocks of it on, two at a time besides its own; their gradients travel back and are summed in float32
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import flashsci
from flashsci.call import arguments
from flashsci.call.kinds import Dense, Role, fields
from flashsci.call.op_checks import implement, on_one_device
from flashsci.call.ops import Tensors, fake_forward, statistics_dtype
from flashsci.call.schemas import LIBRARY
from flashsci.distributed import agreement, op_checks, recording
from flashsci.distributed.agreement import Mesh, Value, tensor_fields
from flashsci.distributed.block import Scores, rows_of
from flashsci.distributed.call import DistributedCall, from_text
from flashsci.distributed.collectives import group_named
from flashsci.distributed.exchange import Blocks, Post, Transfer, around, rounds
from flashsci.distributed.layout import Interval, Layout, assemble
from flashsci.distributed.pieces import Band

_FIELDS = fields(Dense)
STRATEGIES = ("auto", "ring", "all_gather")
ROOM = 1 << 30  # bytes of the whole bias up to which "auto" collects it


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    mesh: Mesh,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    backend: str = "auto",
    strategy: str = "auto",
) -> Any:
    """Attention along the rows of a pair representation split by rows, with a bias split by its queries.

    Args:
        q: ``[R, H, N, D]`` or ``[B, R, H, N, D]``, where R is the number of rows of this rank, any number.
        k, v: ``[..., R, H or fewer, N, D or Dv]``.
        bias: ``[H or 1, n, N]``, or ``[B or 1, 1, H or 1, n, N]`` if q has a batch: one for all rows, for the n
            queries of this rank, in rank order; ranks may have different n. Its gradient is that of these queries,
            summed over all rows of all ranks.
        mesh: DeviceMesh of one dim over which rows, and the bias's queries, are split.
        mask: bool, broadcastable to ``[..., R, H, N, N]``, of this rank's rows: ``[..., R, 1, 1, N]``.
        scale, return_lse, deterministic, precision, backend: as in :func:`flashsci.attention`.
        strategy: "all_gather" holds the whole bias: ``H N^2`` numbers on every rank (H 4, N 4096, bf16: 134 MB), and
            as many for its gradient in the backward. "ring" holds two blocks of ``H n N`` (8 ranks: 34 MB), and in
            the backward three more and the sum in float32 (84 MB). "auto": "all_gather" up to 1 GiB.

    Returns:
        out ``[..., R, H, N, Dv]``; with ``return_lse`` also lse ``[..., R, H, N]``. The rows of all ranks together
        are the result of one call with all rows and the whole bias.

    Raises:
        TypeError, ValueError, BackendError, RuntimeError: as :func:`flashsci.distributed.attention`.

    Attention around the ending node is the same function of z transposed, whose rows are split again after an
    all-to-all, for example ``DTensor.redistribute`` from ``Shard(0)`` to ``Shard(1)``.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> import flashsci.distributed as fd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> q, k, v = torch.randn(3, 12, 4, 12, 16)  # those of 12 rows
        >>> bias = torch.randn(4, 12, 12, requires_grad=True)
        >>> fd.triangle_attention(q, k, v, bias, mesh=mesh).sum().backward()
        >>> bias.grad.shape
        torch.Size([4, 12, 12])
        >>> dist.destroy_process_group()
    """
    group = agreement.group_of(mesh)
    options = arguments.Options.of(False, None, "upper_left", scale, None, 0.0, return_lse, deterministic, precision)
    scores = Scores(options.scale, None, options.of_ranks(), options.precision, backend)
    if group.size() == 1:
        return flashsci.attention(q, k, v, bias=bias, mask=mask, return_lse=return_lse, **scores.options())
    agreement.check_transforms("distributed.triangle_attention", q=q, k=k, v=v, bias=bias, mask=mask)
    name, given = group.group_name, (q, k, v, bias, mask, options, strategy)
    if torch.compiler.is_compiling():
        lengths = _constant_lengths(name, tuple(_fields(*given).items()), q.device.type)
    else:
        try:
            fields = _fields(*given)
        except (TypeError, ValueError) as error:
            agreement.refuse(group, error)
        lengths = _lengths(name, tuple(fields.items()), q.device.type)
    queries = Layout("contiguous", lengths)
    if queries.total != q.shape[-2]:  # the same on every rank
        raise ValueError(
            f"the bias must have the {q.shape[-2]} queries of q, split over the ranks, got {list(lengths)} by rank"
        )
    text = _text(name, lengths, tuple(scores))
    size = sum(lengths) * bias[..., :1, :].numel() * bias.element_size()
    if strategy == "all_gather" or (strategy == "auto" and size <= ROOM):
        out, lse = _collected(q, k, v, bias, mask, text)
    else:
        out, lse = Triangle.apply(q, k, v, bias, mask, text)
    return (out, lse) if return_lse else out


def _fields(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    options: arguments.Options,
    strategy: str,
) -> dict[str, Value]:
    """Check this rank's own arguments; return the values that ranks compare."""
    arguments.check_types(q, k, v, bias=bias, mask=mask)
    arguments.check_tensors(q, k, v)
    if not 4 <= q.dim() <= 5 or not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            "q, k, v must be [R, H, N, D] or [B, R, H, N, D] with equal leading dims, got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
    arguments.check_others(_FIELDS, Dense(q, k, v, bias, mask=mask), {}, Role.SCORES)
    if bias.dim() < 3 or (bias.dim() > 3 and bias.shape[-4] != 1) or bias.shape[-1] != k.shape[-2]:
        raise ValueError(
            f"bias must be [H or 1, n, N] or [..., 1, H or 1, n, N], one for all rows, with N = {k.shape[-2]} keys, got "
            f"{list(bias.shape)}"
        )
    fields: dict[str, Value] = {
        "strategy": STRATEGIES.index(strategy),
        "scale": options.scale or 0.0,
    }
    fields |= {
        "deterministic": float(options.deterministic),
        "return_lse": float(options.return_lse),
        "grad mode": float(torch.is_grad_enabled()),
    }
    for tensor, x in (("q", q), ("k", k), ("v", v)):
        fields |= tensor_fields(tensor, x, {x.dim() - 4: "rows"})
    fields |= tensor_fields("bias", bias, {bias.dim() - 2: "rows"})
    return fields


def _lengths(group_name: str, fields: tuple[tuple[str, Value], ...], device: str) -> tuple[int, ...]:
    """The number of queries of each rank's bias."""
    free = agreement.rows("q", "k", "v", "bias")
    table = agreement.agree(group_named(group_name), dict(fields), free, device)
    return tuple(int(row["bias rows"]) for row in table)


@torch._dynamo.assume_constant_result
def _constant_lengths(group_name: str, fields: tuple[tuple[str, Value], ...], device: str) -> tuple[int, ...]:
    return _lengths(group_name, fields, device)


@torch._dynamo.assume_constant_result
def _text(group_name: str, lengths: tuple[int, ...], scores: tuple[Any, ...]) -> str:
    queries = Layout("contiguous", lengths)
    return DistributedCall(group_name, queries, queries, Band(-1, -1), Scores(*scores)).text()


def _collected(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, text: str) -> tuple[Tensor, Tensor]:
    """out and lse by the whole bias; differentiable."""
    call = from_text(text)
    whole = assemble(bias, call.queries, -2, call.group)
    result: tuple[Tensor, Tensor] = flashsci.attention(
        q, k, v, bias=whole, mask=mask, return_lse=True, **call.scores.options()
    )
    return result


class Triangle(torch.autograd.Function):
    """out, lse; gradients of q, k, v and bias."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        return recording.forward(ctx, torch.ops.flashsci.triangle_forward, inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return recording.backward(ctx, torch.ops.flashsci.triangle_backward, _collected, dout, dlse)


def _travelling(post: Post, bias: Tensor, call: DistributedCall) -> Iterator[tuple[Interval, Tensor | None]]:
    """(queries, their bias) of this rank and then of those 1, 2, ... places back."""

    def room_for(source: int) -> Blocks:
        shape = list(bias.shape)
        shape[-2] = call.queries.lengths[source]
        return [bias.new_empty(shape)] if shape[-2] else None

    own = [bias] if bias.shape[-2] else None
    blocks = around(post, lambda to: own, room_for)
    for block, found in zip(blocks, rounds(post, blocks), strict=True):
        yield call.queries.intervals(block.source)[0], found[0] if found else None


def _masked(mask: Tensor | None, interval: Interval) -> Tensor | None:
    return mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else rows_of(mask, interval)


def _check(call: DistributedCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    op_checks.rows_of_pairs(call, group_named(call.group).rank(), q, k, v, bias)
    full = bias.new_empty((), device="meta").expand(*bias.shape[:-2], q.shape[-2], bias.shape[-1])
    op_checks.of_pairs(q, k.shape[-2], bias=full, mask=mask)


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, text: str) -> tuple[Tensor, Tensor]:
    call = from_text(text)
    _check(call, q, k, v, bias, mask)
    out, lse = fake_forward(Tensors(q, k, v))
    for queries, part in _travelling(Post(group_named(call.group)), bias, call):
        if part is None:
            continue
        found = flashsci.attention(
            rows_of(q, queries),
            k,
            v,
            bias=part,
            mask=_masked(mask, queries),
            return_lse=True,
            **call.scores.options(),
        )
        rows_of(out, queries).copy_(found[0])
        rows_of(lse, queries, -1).copy_(found[1])
    return out, lse


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    text: str,
) -> tuple[Tensor, ...]:
    call = from_text(text)
    _check(call, q, k, v, bias, mask)
    op_checks.results(q, v, out, lse, dout, dlse)
    dq, dk, dv, dbias = (
        torch.zeros(x.shape, dtype=statistics_dtype(x.dtype), device=x.device) for x in (q, k, v, bias)
    )
    returning: Transfer | None = None
    post = Post(group_named(call.group))
    for step, (queries, part) in enumerate(_travelling(post, bias, call)):
        share = None
        if part is not None:
            found = flashsci.attention_backward(
                rows_of(dout, queries), rows_of(q, queries), k, v, rows_of(out, queries), rows_of(lse, queries, -1),
                dlse=None if dlse is None else rows_of(dlse, queries, -1), bias=part, mask=_masked(mask, queries),
                **call.scores.options(),
            )  # fmt: skip
            rows_of(dq, queries).copy_(found.dq)
            dk, dv, share = dk.add_(found.dk), dv.add_(found.dv), found.dbias
        if step == 0 and share is not None:
            dbias.add_(share)
        if step:
            _bring_home(returning, dbias)
            returning = _send_home(post, share, bias, call, step)
    _bring_home(returning, dbias)
    return tuple(g.to(x.dtype) for g, x in zip((dq, dk, dv, dbias), (q, k, v, bias), strict=True))


def _send_home(post: Post, share: Tensor | None, bias: Tensor, call: DistributedCall, step: int) -> Transfer:
    """Send a block's gradient to the rank of its queries; receive the share that another rank computed for this
    rank's block."""
    rank = post.group.rank()
    owner, worker = (rank - step) % call.world, (rank + step) % call.world
    room = [bias.new_empty(bias.shape)] if bias.shape[-2] else None
    return post.transfer(None if share is None else [share], owner, room, worker)


def _bring_home(returning: Transfer | None, dbias: Tensor) -> None:
    for share in (returning.wait() if returning else None) or ():
        dbias.add_(share)


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask"
LIBRARY.define(f"triangle_forward({_TENSORS}, str call) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"triangle_backward(Tensor dout, Tensor? dlse, {_TENSORS}, Tensor out, Tensor lse, str call) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)
implement(LIBRARY, "triangle_forward", _forward, "CompositeExplicitAutograd")
implement(LIBRARY, "triangle_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "flashsci::triangle_forward",
    on_one_device(lambda q, k, v, *others: fake_forward(Tensors(q, k, v))),
    lib=LIBRARY,
)
torch.library.register_fake(
    "flashsci::triangle_backward",
    on_one_device(lambda dout, dlse, *tensors: tuple(x.new_empty(x.shape) for x in tensors[:4])),
    lib=LIBRARY,
)
