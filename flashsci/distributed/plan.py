"""The step from a rank's arguments to the call that all ranks make together: checks, agreement, the choice of a
strategy."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call import arguments
from flashsci.call.arguments import Options
from flashsci.call.kinds import Dense, Role, fields
from flashsci.distributed import agreement, cost, ulysses
from flashsci.distributed.agreement import Value, dtype_number, tensor_fields
from flashsci.distributed.block import Scores
from flashsci.distributed.call import DistributedCall
from flashsci.distributed.collectives import group_named
from flashsci.distributed.layout import LAYOUTS, Layout, check_layout, checked
from flashsci.distributed.pieces import Band
from flashsci.errors import BackendError

_FIELDS = fields(Dense)
STRATEGIES = ("auto", *cost.STRATEGIES)
FREE = agreement.rows("q", "k", "bias", "mask")  # fields in which ranks may differ
Shape = tuple[int, ...]


class Given(NamedTuple):
    """The arguments of one rank, without its tensors: hashable."""

    q: Shape  # [..., Hq, Sq, D], with the rows of this rank
    k: Shape
    v: Shape
    bias: Shape | None
    mask: Shape | None
    fields: tuple[tuple[str, Value], ...]  # the values that ranks compare
    device: str
    itemsize: int
    layout: str
    strategy: str
    backend: str
    offsets: Shape | None
    total: tuple[int, int] | None  # whole Sq and Sk, if every rank's rows follow from them
    needs_grad: bool
    bias_grad: bool
    options: Options


class Planned(NamedTuple):
    """The facts that all ranks agreed on."""

    text: str  # that of the call
    strategy: str
    split: tuple[bool, bool]  # as in the call


def given(
    tensors: tuple[Tensor | None, ...],
    options: Options,
    layout: str,
    strategy: str,
    backend: str,
    offsets: Shape | None = None,
    total: tuple[int, int] | None = None,
) -> Given:
    """Check this rank's own arguments; ``tensors`` are q, k, v, bias, key_weight, mask.

    Raises:
        TypeError, ValueError: as :func:`flashsci.distributed.attention` documents.
    """
    q, k, v, bias, key_weight, mask = tensors
    arguments.check_types(q, k, v, bias=bias, mask=mask, key_weight=key_weight)
    assert q is not None and k is not None and v is not None
    _check_qkv(q, k, v)
    options.check()
    check_choices(layout, strategy)
    # The shapes of the tensors of scores are checked where the rows of all ranks are known.
    keys = {Role.KEYS: (k.shape[:-1], "Hk, Sk of this rank")}
    arguments.check_others(_FIELDS, Dense(q, k, v, bias, key_weight, mask), keys, Role.SCORES)
    if key_weight is not None and (key_weight.dim() == 0 or key_weight.shape[-1] != k.shape[-2]):
        raise ValueError(
            f"key_weight is split as k is: its last dim must be this rank's keys, {k.shape[-2]}, got shape "
            f"{list(key_weight.shape)}; expand it"
        )
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q, k, v, key_weight, bias)]
    return Given(
        tuple(q.shape), tuple(k.shape), tuple(v.shape),
        None if bias is None else tuple(bias.shape),
        None if mask is None else tuple(mask.shape),
        tuple(_fields(tensors, options, layout, strategy, backend, offsets, total).items()),
        q.device.type, q.dtype.itemsize, layout, strategy, backend, offsets, total, any(needs), needs[-1], options,
    )  # fmt: skip


def check_choices(layout: str, strategy: str) -> None:
    check_layout(layout)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")


def checked_total(
    total: int | tuple[int, int], q: Tensor, k: Tensor, layout: str, place: tuple[int, int]
) -> tuple[int, int]:
    """The whole Sq and Sk.

    Raises:
        ValueError: this rank's rows are not those of ``shard``.
    """
    check_layout(layout)
    found = (total, total) if isinstance(total, int) else (int(total[0]), int(total[1]))
    rank, world = place
    for name, x, whole in zip("qk", (q, k), found, strict=True):
        rows = Layout.of(layout, whole, world).lengths[rank]
        if x.shape[-2] != rows:
            raise ValueError(
                f"total={total}: rank {rank} of {world} has {rows} rows of {name} in layout {layout!r}, got {x.shape[-2]}; "
                "leave total out for parts that flashsci.distributed.shard has not cut"
            )
    return found


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    arguments.check_tensors(q, k, v)
    shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
    if not 2 <= q.dim() <= 5 or len({(x.dim(), x.shape[:-3]) for x in (q, k, v)}) > 1:
        raise ValueError(
            "a distributed call takes q, k, v with equal leading dims, [..., H, S, D] of 2 to 5 dims, "
            f"got {shapes}; expand or flatten the leading ones"
        )
    arguments.check_head_dims(q, k, v)
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same length (dim -2), got {k.shape[-2]} and {v.shape[-2]}")
    arguments.check_heads(*(x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v)))


def _fields(
    tensors: tuple[Tensor | None, ...],
    options: Options,
    layout: str,
    strategy: str,
    backend: str,
    offsets: Shape | None,
    total: tuple[int, int] | None,
) -> dict[str, Value]:
    q, k, v, bias, key_weight, mask = tensors
    assert q is not None and k is not None and v is not None
    fields: dict[str, Value] = {}
    for name, x in (("q", q), ("k", k)):
        fields |= tensor_fields(name, x, {x.dim() - 2: "rows"})
    fields |= {
        "head dim of v": v.shape[-1],
        "v requires grad": float(torch.is_grad_enabled() and v.requires_grad),
    }
    for name, pairs in (("bias", bias), ("mask", mask)):
        fields |= tensor_fields(name, pairs, {} if pairs is None else {pairs.dim() - 2: "rows"})
    if key_weight is None:
        fields["key_weight dims"] = -1
    else:
        fields["key_weight dims"] = key_weight.dim()
        fields["key_weight dtype"] = dtype_number(key_weight.dtype)
        fields["key_weight requires grad"] = float(torch.is_grad_enabled() and key_weight.requires_grad)
    fields |= {
        "layout": LAYOUTS.index(layout),
        "strategy": STRATEGIES.index(strategy),
        "window's left side (-1: unbounded)": options.window_left,
        "window's right side, 0 if causal (-1: unbounded)": options.window_right,
        "align": arguments.ALIGNMENTS.index(options.align),
        "scale": options.scale or 0.0,
        "softcap": options.softcap or 0.0,
        "deterministic": float(options.deterministic),
        "precision": -1 if options.precision is None else arguments.PRECISIONS.index(options.precision),
        "backend (a hash)": backend,
        "cu_seqlens (a hash)": -1 if offsets is None else offsets,
        "total (a hash)": -1 if total is None else total,
        "grad mode": float(torch.is_grad_enabled()),
    }
    return fields


def plan(group_name: str, mine: Given) -> Planned:
    """The facts that all ranks agree on for this call. If the whole length is given, only the first call of a kind
    asks the others.

    Raises:
        ValueError, RuntimeError, BackendError: the same on every rank.
    """
    group = group_named(group_name)
    plans = agreement.kept(group).plans
    found: Planned | None = plans.get(mine)
    if found is not None and agreement.trusts():
        return found
    table = agreement.agree(group, dict(mine.fields), FREE, mine.device)
    key = (mine, tuple(row.get(name) for row in table for name in sorted(FREE)))
    if len(plans) >= agreement.MOST_KEPT:
        plans.clear()
    if key not in plans:
        plans[key] = _planned(group_name, mine, table)
    # A rank with one query does not know whether a bias or mask of one row is one rank's own or shared by all.
    if mine.total is not None and mine.bias is None and mine.mask is None:
        plans[mine] = plans[key]
    answer: Planned = plans[key]
    return answer


def _planned(group_name: str, mine: Given, table: list[dict[str, float]]) -> Planned:
    """The plan as a function of the agreed facts and the ranks' rows: all ranks get the same result."""
    queries, keys = (checked(mine.layout, [int(row[f"{name} rows"]) for row in table], name) for name in ("q", "k"))
    if mine.offsets is not None:
        _check_offsets(mine.offsets, queries.total, keys.total)
    bias_grad = mine.bias is not None and mine.bias_grad
    split = (False, False)  # packed sequences: their bias is per key
    if mine.offsets is None:
        split = (
            _split("bias", mine.bias, bias_grad, table, queries.lengths),
            _split("mask", mine.mask, False, table, queries.lengths),
        )
    for name, shape in (("bias", mine.bias), ("mask", mine.mask)):
        if shape is not None:
            arguments.check_broadcast(name, shape, (*mine.q[:-1], keys.total), "Hq, Sq of this rank, whole Sk")
    options = mine.options
    shift = keys.total - queries.total if options.align == "lower_right" else 0
    band = Band(options.window_left, options.window_right, shift, mine.offsets)
    scores = Scores(options.scale, options.softcap, options.of_ranks(), options.precision, mine.backend)
    placed = mine.bias is not None or mine.mask is not None
    call = DistributedCall(group_name, queries, keys, band, scores, split, placed)
    return Planned(call.text(), _strategy(call, mine), split)


def _check_offsets(offsets: Shape, total_q: int, total_k: int) -> None:
    arguments.check_cu_seqlens_contents("cu_seqlens", torch.tensor(offsets), total_q, None)
    if total_q != total_k:
        raise ValueError(f"packed queries and keys are the same sequences, got {total_q} and {total_k} rows in all")


def _split(
    name: str,
    shape: Shape | None,
    learnt: bool,
    table: list[dict[str, float]],
    lengths: tuple[int, ...],
) -> bool:
    """Whether a bias or mask has the rows of its rank; otherwise its one row is for all.

    Raises:
        ValueError: it fits neither form, or either.
    """
    if shape is None or len(shape) < 2:
        return False
    found = [int(row[f"{name} rows"]) for row in table]
    if any(n != 1 for n in found):
        if found != list(lengths):
            raise ValueError(
                f"{name} must have this rank's queries in dim -2, {list(lengths)} by rank, or 1 on every rank, got {found}"
            )
        return True
    if learnt and max(lengths) == 1:
        raise ValueError(
            f"a {name} of one row is ambiguous where each rank has one query: it may be the same row on all ranks, or each rank's "
            "own row, and its gradient differs between the two; split the sequence over fewer ranks"
        )
    return False


def _strategy(call: DistributedCall, mine: Given) -> str:
    heads_q, heads_k = (s[-3] if len(s) > 2 else 1 for s in (mine.q, mine.k))
    reason = ulysses.refuses(call, heads_q, heads_k, mine.bias, mine.mask)
    if mine.strategy == "ulysses" and reason is not None:
        raise BackendError(f"strategy='ulysses' cannot serve this call: {reason}; use 'ring' or 'all_gather'")
    if mine.strategy != "auto":
        return mine.strategy
    batch = 1
    for n in mine.q[:-3]:
        batch *= n
    sizes = cost.CallSizes(batch, heads_q, heads_k, mine.q[-1], mine.v[-1], mine.itemsize)
    allowed = [s for s in cost.STRATEGIES if s != "ulysses" or reason is None]
    return cost.choose(call, sizes, allowed, mine.needs_grad)


@torch._dynamo.assume_constant_result
def _constant_plan(group_name: str, mine: tuple[Any, ...]) -> Planned:
    return plan(group_name, Given._make((*mine[:-1], Options._make(mine[-1]))))


def traced_plan(group_name: str, mine: Given) -> Planned:
    """:func:`plan` for a compiler, which calls it while it traces, and keeps the result. It takes no named tuples."""
    *before, options = mine
    return _constant_plan(group_name, (*before, tuple(options)))
