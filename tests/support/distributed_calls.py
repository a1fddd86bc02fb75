"""What the processes of ranks.py run: distributed calls on their parts of problems that every process can make."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashsci
import flashsci.distributed as fd
from flashsci.distributed import agreement, block, cost, exchange
from flashsci.distributed.layout import Layout
from flashsci.testing import Case, Inputs, Judge, Variant, draw_case, make_inputs, poisoned_memory

LEAVES = ("q", "k", "v", "bias", "key_weight")
DTYPES = ("float32", "bfloat16", "float64", "float16")
STRATEGIES = ("ring", "all_gather", "ulysses", "auto")
LENGTHS = (1, 2, 3, 7, 16, 17, 31, 33, 40, 64, 65, 0)


@dataclass(frozen=True)
class Split:
    """A problem and how it is split."""

    case: Case
    layout: str
    strategy: str
    rows: tuple[int, ...] | None = None  # of each rank, where they are neither even nor head and tail
    keys: tuple[int, ...] | None = None

    def inputs(self) -> Inputs:
        inputs = make_inputs(self.case)
        options = {n: x for n, x in inputs.options.items() if not n.startswith(("max_seqlen", "dropout"))}
        return replace(inputs, options=options)

    def layouts(self, inputs: Inputs, world: int) -> tuple[Layout, Layout]:
        dim = 0 if inputs.varlen else -2
        totals = inputs.q.shape[dim], inputs.k.shape[dim]
        given = (self.rows, self.rows if inputs.varlen else self.keys)
        return tuple(
            Layout.of(self.layout, total, world) if lengths is None else Layout("contiguous", lengths)
            for total, lengths in zip(totals, given, strict=True)
        )


def draw_split(choices: Any, pool: list[Variant], worlds: tuple[int, ...]) -> tuple[int, Split]:
    """How many ranks, and a problem with how it is split over them; ``choices`` as of flashsci.testing's drawing."""
    world, strategy = choices.one_of(worlds), choices.one_of(STRATEGIES)
    case = draw_case(choices, pool, lengths=LENGTHS, score_limit=1 << 14)
    if case.variant.varlen:  # of a query and its key alike
        shape = case.bias_shape and (case.bias_shape[0], 1, sum(case.lens_q))
        case = replace(case, lens_k=case.lens_q, self_attention=True, bias_shape=shape)
    if case.bias_shape and case.bias_view == "expanded":  # to rows of its own, whose gradients are shared
        case = replace(case, bias_view="padded")
    if 0 < case.seq_q <= world:  # a gradient of one row is refused where each rank has one
        tangents = case.variant.tangents.replace("b", "")
        case = replace(case, variant=replace(case.variant, bias_grad=False, tangents=tangents))
    if strategy == "ulysses":
        case = _with_heads(case, world + choices.integer(0, 1))
    layout = choices.one_of(("contiguous", "head_tail"))
    uneven: list[Any] = [None, None]
    if layout == "contiguous" and choices.integer(0, 1):
        totals = (sum(case.lens_q), 0) if case.variant.varlen else (case.seq_q, case.seq_k)
        for i, total in enumerate(totals):
            ends = sorted(choices.integer(0, total) for _ in range(world - 1))
            uneven[i] = tuple(b - a for a, b in zip([0, *ends], [*ends, total], strict=True))
    return world, Split(case, layout, strategy, *uneven)


def _with_heads(case: Case, heads_k: int) -> Case:
    """The case with so many key heads, and a head for each in what is split by rows."""
    group, rank = case.group, max(case.rank, 3)

    def pairs(shape: Any) -> Any:
        if shape is None or len(shape) < 2:
            return shape
        heads = heads_k * group
        if len(shape) == 2:
            return (heads, *shape)
        own = heads if shape[-2] != 1 or shape[-3] != 1 else 1
        return (*shape[:-3], own, *shape[-2:])

    weights = case.weight_shape
    if weights is not None and len(weights) > 1 and weights[-2] != 1:
        weights = (*weights[:-2], heads_k, weights[-1])
    bias, mask = pairs(case.bias_shape), pairs(case.mask_shape)
    return replace(case, heads_k=heads_k, rank=rank, bias_shape=bias, mask_shape=mask, weight_shape=weights)


def pool() -> list[Variant]:
    """Every feature that distributed calls have, alone and together."""
    plain = [Variant(dtype=d, window=w, lse_grad=g) for d in DTYPES for w in (False, True) for g in (False, True)]
    pairs = [
        Variant(dtype=d, bias=b, bias_grad=True, bias_float=f, mask=m, window=w)
        for d in DTYPES[:2]
        for b in ("pair", "key")
        for f, m, w in ((False, False, False), (True, True, True))
    ]
    weights = [
        Variant(
            key_weight="float",
            key_weight_grad=True,
            bias=b,
            bias_grad=b is not None,
            window=True,
            lse_grad=True,
        )
        for b in (None, "pair")
    ]
    packed = [
        Variant(dtype=d, varlen=True, window=w, bias=b, bias_grad=b is not None, lse_grad=True)
        for d in DTYPES[:2]
        for w in (False, True)
        for b in (None, "key")
    ]
    others = [
        Variant(mask=True),
        Variant(softcap=True, window=True),
        Variant(head_dim=24, head_dim_v=8, window=True),
    ]
    return plain + pairs + weights + packed + others


def second_order_pool() -> list[Variant]:
    return [
        Variant(dtype="float64", tangents="qkvb", bias="pair", bias_grad=True, window=True),
        Variant(tangents="qkv", lse_grad=True, mask=True),
        Variant(dtype="float64", tangents="qkvw", key_weight="inputs", key_weight_grad=True),
    ]


def part(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    parts = [x.narrow(dim, a, b - a) for a, b in layout.intervals(rank)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def places(inputs: Inputs) -> dict[str, tuple[str, int] | None]:
    """Over whose rows, and along which dim, each tensor is split; None: every rank has all of it."""
    rows = 0 if inputs.varlen else -2
    found: dict[str, Any] = {"out": ("q", rows), "lse": ("q", -1)}
    for name, side in (("q", "q"), ("k", "k"), ("v", "k")):
        found[name] = (side, rows)
    found["dout"], found["dlse"], found["key_weight"] = ("q", rows), ("q", -1), ("k", -1)
    for name in ("bias", "mask"):
        x = getattr(inputs, name)
        split = x is not None and not inputs.varlen and x.dim() > 1 and x.shape[-2] != 1
        found[name] = ("q", -2) if split else None
    return found


def split_call(mesh: Any, splits: list[Split]) -> list[dict[str, Tensor]]:
    """This rank's parts of out, lse and all gradients of each problem, in memory that is NaN before it is written."""
    with poisoned_memory():
        return [_one(mesh, split) for split in splits]


def call_by_groups(mesh: Any, splits: list[Split]) -> list[dict[str, Tensor]]:
    """The same, a ring's heads a few at a time, as those of long calls."""
    with patch.object(cost, "GROUP_SECONDS", 1e-12):
        return split_call(mesh, splits)


def call_quietly_by_groups(mesh: Any, splits: list[Split]) -> list[dict[str, Tensor]]:
    """The same, with transfers over few processors, as those that a long call hides."""
    with patch.object(cost, "hides_quiet", return_value=True):
        return call_by_groups(mesh, splits)


def _one(mesh: Any, split: Split) -> dict[str, Tensor]:
    inputs, rank = split.inputs().on(mesh.device_type), mesh.get_local_rank()
    where = places(inputs)
    layouts = dict(zip("qk", split.layouts(inputs, mesh.size()), strict=True))

    def own(x: Tensor | None, name: str) -> Any:
        if x is None or where[name] is None:
            return x
        side, dim = where[name]
        return part(x, layouts[side], rank, dim)

    learnt = {"bias": inputs.bias_grad, "key_weight": inputs.key_weight_grad}
    leaves: dict[str, Any] = {}
    for name in LEAVES:
        x = own(getattr(inputs, name), name)
        leaves[name] = None if x is None else x.detach().requires_grad_(learnt.get(name, True))
    options = dict(inputs.options, mesh=mesh, layout=split.layout, strategy=split.strategy, return_lse=True)
    q, k, v, bias, key_weight = leaves.values()
    if inputs.varlen:
        del options["align"]
        out, lse = fd.varlen_attention(q, k, v, inputs.cu_seqlens_q, bias=bias, key_weight=key_weight, **options)
    else:
        mask = own(inputs.mask, "mask")
        out, lse = fd.attention(q, k, v, bias=bias, key_weight=key_weight, mask=mask, **options)
    found = {"out": out, "lse": lse}
    ends = {"out": own(inputs.dout, "dout")}
    if inputs.dlse is not None:
        ends["lse"] = own(inputs.dlse, "dlse").to(lse.dtype)
    wanted = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    cotangents = {n: x.detach().requires_grad_(bool(inputs.tangents)) for n, x in ends.items()}
    gradients = torch.autograd.grad(
        [found[n] for n in ends],
        list(wanted.values()),
        list(cotangents.values()),
        create_graph=bool(inputs.tangents),
    )
    found |= {f"d{n}": g for n, g in zip(wanted, gradients, strict=True)}
    if inputs.tangents:
        chosen = []
        for name, tangent in inputs.tangents.items():
            g, own_tangent = found[f"d{name[1:]}"], own(tangent, name[1:])
            if where[name[1:]] is None and rank:  # every rank has the gradient: one of them takes its tangent
                own_tangent = torch.zeros_like(own_tangent)
            chosen.append((g, own_tangent.to(g.dtype)))
        leaves_too = {f"g{n}": x for n, x in wanted.items()} | {f"gd{n}": x for n, x in cotangents.items()}
        second = torch.autograd.grad(
            [g for g, _ in chosen],
            list(leaves_too.values()),
            [t for _, t in chosen],
            allow_unused=True,
        )
        found |= {
            n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves_too.items(), second, strict=True)
        }
    return {n: x.detach().clone() for n, x in found.items()}


def assembled(split: Split, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole of each tensor from the ranks' parts, which must be equal where every rank has the whole."""
    inputs = split.inputs()
    where = places(inputs)
    layouts = dict(zip("qk", split.layouts(inputs, len(parts)), strict=True))
    found = {}
    for name in parts[0]:
        place = where[
            name if name in where else name.removeprefix("g").removeprefix("d") if name[1:] not in where else name[1:]
        ]
        pieces = [p[name] for p in parts]
        if place is None:
            for rank, x in enumerate(pieces):
                assert torch.equal(pieces[0], x), f"{name} of ranks 0 and {rank} differ: {pieces[0]}, {x}"
            found[name] = pieces[0]
            continue
        side, dim = place
        ordered = []
        for rank, x in enumerate(pieces):
            start = 0
            for a, b in layouts[side].intervals(rank):
                ordered.append((a, b, x.narrow(dim, start, b - a)))
                start += b - a
            assert start == x.shape[dim], f"{name} of rank {rank} is {list(x.shape)}"
        ordered.sort(key=lambda piece: piece[:2])
        found[name] = torch.cat([x for _, _, x in ordered], dim)
    return found


def judge(split: Split, parts: list[dict[str, Tensor]], fused: bool = False) -> None:
    """The parts of all ranks together, against the oracle; ``fused`` as of :class:`flashsci.testing.Judge`."""
    Judge(split.inputs(), fused).require(assembled(split, parts))


def agreement_of(mesh: Any, wrong: int, argument: str) -> Any:
    """A call in which one rank differs from the others."""
    rank = mesh.get_local_rank()
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    given: dict[str, Any] = dict(mesh=mesh, causal=True)
    if rank == wrong:
        if argument == "dtype":
            q, k, v = q.double(), k.double(), v.double()
        elif argument == "heads":
            q, k, v = q[:, :2], k[:, :2], v[:, :2]
        elif argument == "bias":
            given["bias"] = torch.zeros(1, 12)
        elif argument == "local":
            v = v[..., :3, :]
        else:
            given[argument] = {"causal": False, "scale": 0.5, "strategy": "ring", "softcap": 3.0}[argument]
    return fd.attention(q, k, v, **given)


def _by_dual_numbers(call: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, x))


WAYS = {
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "dual numbers": _by_dual_numbers,
    "beside grad": lambda call, x: torch.func.grad(lambda y: call(x).sum() * y)(torch.ones(())),
    "vmap": lambda call, x: torch.func.vmap(call)(torch.stack([x, x])),
}


def asked_of(mesh: Any, entry: str, name: str, way: str) -> Any:
    """A call of which a transform asks something by one of its tensors."""
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    given = dict(q=q, k=k, v=v, bias=torch.randn(1, 6, 12), key_weight=torch.rand(2, 4, 6))
    call: Any = fd.attention
    if entry == "varlen_attention":
        q, k, v = torch.randn(3, 6, 4, 8)
        weight, offsets = torch.rand(4, 6), torch.tensor([0, 5, 12], dtype=torch.int32)
        given = dict(q=q, k=k, v=v, cu_seqlens=offsets, bias=torch.randn(1, 1, 12), key_weight=weight)
        call = fd.varlen_attention
    elif entry == "triangle_attention":
        q, k, v = torch.randn(3, 6, 4, 12, 8)
        given, call = dict(q=q, k=k, v=v, bias=torch.randn(4, 6, 12)), fd.triangle_attention
    elif entry == "unshard":
        given, call = dict(x=q), fd.unshard
    return WAYS[way](lambda x: call(**given | {name: x}, mesh=mesh), given[name])


def triangles(mesh: Any, rows: tuple[int, ...], strategy: str) -> list[Tensor]:
    """out and gradients of this rank's rows, and second derivatives by its bias."""
    rank = mesh.get_local_rank()
    q, k, v, bias, mask, dout = triangle_problem(sum(rows))
    layout = Layout("contiguous", rows)
    own = [part(x, layout, rank, 1).requires_grad_() for x in (q, k, v)] + [
        part(bias, layout, rank, -2).requires_grad_()
    ]
    out = fd.triangle_attention(*own, mesh=mesh, mask=part(mask, layout, rank, 1), strategy=strategy)
    dout = part(dout, layout, rank, 1)
    plain = torch.autograd.grad(out, own, dout, retain_graph=True)
    first = torch.autograd.grad(out, own, dout, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), own)
    return [x.detach().clone() for x in (out, *plain, *second)]


def triangle_problem(n: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(n)
    normal = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    mask = torch.rand(2, n, 1, 1, n, generator=random) > 0.2
    q, k, v, dout = (normal(2, n, 4, n, 8) for _ in range(4))
    return q, k, v, normal(2, 1, 4, n, n), mask, dout


def alone(mesh: Any) -> None:
    """On a mesh of one rank every call is the plain one, bit for bit, with its gradients."""
    from torch.distributed.tensor import DTensor, Shard

    q, k, v = torch.randn(3, 2, 4, 13, 8).bfloat16()
    bias, weight, mask = torch.randn(4, 13, 13), torch.rand(2, 4, 13), torch.rand(13, 13) > 0.2
    packed = [x.flatten(0, 1).transpose(0, 1) for x in (q, k, v)]  # [13, 8 heads, 8]
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32)
    sharded = lambda x: DTensor.from_local(x, mesh, [Shard(2)])  # noqa: E731
    options = dict(causal=True, layout="head_tail", strategy="ring", total=13)
    calls = [
        (
            lambda q, k, v, *pairs: fd.attention(
                q, k, v, mesh=mesh, bias=pairs[0], key_weight=pairs[1], mask=mask, **options
            ),
            lambda q, k, v, *pairs: flashsci.attention(
                q, k, v, bias=pairs[0], key_weight=pairs[1], mask=mask, causal=True
            ),
            [q, k, v, bias, weight],
        ),
        (
            lambda *x: fd.attention(*map(sharded, x), window=(3, 0)).to_local(),
            lambda *x: flashsci.attention(*x, window=(3, 0)),
            [q, k, v],
        ),
        (
            lambda *x: fd.varlen_attention(*x, offsets, mesh=mesh, causal=True),
            lambda *x: flashsci.varlen_attention(*x, offsets, causal=True),
            packed,
        ),
        (
            lambda *x: fd.triangle_attention(*x, mesh=mesh),
            lambda q, k, v, bias: flashsci.attention(q, k, v, bias=bias),
            [q, k, v, bias],
        ),
    ]
    for ours, plain, tensors in calls:
        found = []
        for call in (ours, plain):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out = call(*leaves)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for wrong in (dict(layout="tails"), dict(strategy="rings")):
        try:
            fd.attention(q, k, v, mesh=mesh, **wrong)
        except ValueError:
            continue
        raise AssertionError(f"{wrong} is accepted")


def whole_sequences(mesh: Any, case: str) -> tuple[float, int]:
    """DTensors split by batch and heads, through flashsci.attention, on a mesh of two dims: the largest difference from the
    plain call, of results and gradients, and the number of messages of the forward."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    batch_heads, none = [Shard(0), Shard(1)], [Replicate(), Replicate()]
    of_q, of_k, heads_k = batch_heads, batch_heads, {"grouped": 2, "one head": 1}.get(case, 4)
    if case == "one head":
        of_k = [Shard(0), Replicate()]
    if case == "replicated":
        of_q = of_k = none
    if case == "heads over both":
        of_q = of_k = [Shard(1), Shard(1)]
    kinds: dict[str, dict[str, tuple[Tensor, Any]]] = {
        "bias": {"bias": (normal(2, 4, 9, 9), batch_heads)},
        "bias of heads": {"bias": (normal(4, 9, 9), [Replicate(), Shard(0)])},
        "bias of all": {"bias": (normal(1, 1, 9, 9), none), "mask": (normal(2, 1, 9, 9) > -1, [Shard(0), Replicate()])},
        "weights": {"key_weight": (normal(2, 4, 9).exp(), batch_heads)},
        "slopes": {
            "alibi_slopes": (normal(4).exp(), [Replicate(), Shard(0)]),
            "sink": (normal(4), [Replicate(), Shard(0)]),
        },
    }
    others = kinds.get(case, {})
    q, dout = normal(2, 4, 9, 8), normal(2, 4, 9, 8)
    k, v = normal(2, heads_k, 9, 8), normal(2, heads_k, 9, 8)
    learnt = [n for n in others if n != "mask"]
    whole = [x.clone().requires_grad_() for x in (q, k, v, *(others[n][0] for n in learnt))]
    placements = [of_q, of_k, of_k, *(others[n][1] for n in learnt)]
    given = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(whole, placements, strict=True)]
    results: list[list[Tensor]] = []
    counts = []
    for tensors, cut in ((whole, lambda x, p: x), (given, lambda x, p: distribute_tensor(x, mesh, p))):
        named = dict(zip(learnt, tensors[3:], strict=True)) | {n: cut(*others[n]) for n in others if n == "mask"}
        dlse = cut(dout[..., 0].contiguous(), of_q)
        with CommDebugMode() as messages:
            out, lse = flashsci.attention(*tensors[:3], causal=True, return_lse=True, **named)
        counts.append(messages.get_total_counts())
        results.append([out, lse, *torch.autograd.grad((out, lse), tensors, (cut(dout, of_q), dlse))])
    expected, found = results
    for x, like in zip(found, [given[0], given[0], *given], strict=True):
        assert x.placements == like.placements
    pairs = zip(found, expected, strict=True)
    return max((a.full_tensor() - b).abs().max().item() for a, b in pairs), counts[1]


def heads_of_ranks(mesh: Any, dtype: torch.dtype) -> bool:
    """Whether DTensors split by heads have the bits of plain calls on the heads of each rank, results and gradients."""
    from torch.distributed.tensor import Shard, distribute_tensor

    random = torch.Generator().manual_seed(0)
    size = mesh.size()
    whole = torch.randn(4, 2, 2 * size, 65, 64, generator=random).to(mesh.device_type, dtype)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, dout = tensors
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flashsci.attention(*given, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, given, dout)

    found = call(*(distribute_tensor(x, mesh, [Shard(1)]) for x in whole))
    parts = [call(*(x.contiguous() for x in part)) for part in whole.chunk(size, 2)]
    gathered = [x.full_tensor() for x in found]  # type: ignore[attr-defined]
    return all(torch.equal(x, torch.cat(part, 1)) for x, part in zip(gathered, zip(*parts, strict=True), strict=True))


def compiled_shards(mesh: Any) -> bool:
    """Whether a call on DTensors split by heads compiles into one graph, with the results and gradients of the call."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    random = torch.Generator().manual_seed(0)
    q, bias = torch.randn(2, 4, 9, 8, generator=random), torch.randn(9, 9, generator=random)
    given = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in ((q, Shard(1)), (bias, Replicate()))]
    call = lambda q, bias: flashsci.attention(q, q, q, bias=bias, causal=True)  # noqa: E731
    found = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = function(*given)
        found.append([x.full_tensor() for x in (out, *torch.autograd.grad(out.square().sum(), given))])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def counted_flops(mesh: Any, strategy: str) -> tuple[int, int]:
    """FLOPs of the forward and of the backward of a causal call on this rank."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 8, 8))
    for _ in range(2):  # the first call loads the ops
        with FlopCounterMode(display=False) as counter:
            out = fd.attention(q, k, v, mesh=mesh, causal=True, strategy=strategy)
            forward = counter.get_total_flops()
            out.sum().backward()
    return forward, counter.get_total_flops() - forward


def tensor_parallel(mesh: Any) -> float:
    """A layer of attention whose projections torch splits over ranks: the largest difference from the whole layer, of its result
    and gradients."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
            self.out = torch.nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in self.qkv)
            return self.out(flashsci.sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    layer = Layer().double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    split = copy.deepcopy(layer)
    columns = ColwiseParallel(use_local_output=False)
    parallelize_module(split, mesh, {"qkv.0": columns, "qkv.1": columns, "qkv.2": columns, "out": RowwiseParallel()})
    expected, found = layer(x), split(x)
    for y in (expected, found):
        y.square().sum().backward()
    worst = (found - expected).abs().max().item()
    for a, b in zip(split.parameters(), layer.parameters(), strict=True):
        worst = max(worst, (a.grad.full_tensor() - b.grad).abs().max().item())
    return worst


def refused_placements(mesh: Any) -> list[str]:
    """The words for placements that attention does not take, on a mesh of two dims."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    x, words = torch.randn(2, 6, 8, 4, generator=torch.Generator().manual_seed(0)), []
    whole = distribute_tensor(x, mesh, [Replicate(), Replicate()])
    heads = distribute_tensor(x, mesh, [Replicate(), Shard(1)])
    grouped = distribute_tensor(x[:, :3], mesh, [Replicate(), Shard(1)])
    pending = DTensor.from_local(x, mesh, [Partial(), Replicate()])
    for given, others in (
        ([distribute_tensor(x, mesh, [Replicate(), Shard(2)])] * 3, {}),
        ([distribute_tensor(x, mesh, [Replicate(), Shard(3)])] * 3, {}),
        ([pending] * 3, {}),
        ([heads, whole, whole], {}),
        ([heads, grouped, grouped], {}),
        (
            [heads] * 3,
            {"bias": distribute_tensor(x[0, :, :, :1].expand(6, 8, 8).contiguous(), mesh, [Replicate()] * 2)},
        ),
        ([heads] * 3, {"mask": torch.ones(8, 8, dtype=torch.bool)}),
        ([heads] * 3, {"dropout_p": 0.5}),
    ):
        try:
            flashsci.attention(*given, **others)
        except (TypeError, ValueError) as error:
            words.append(f"{type(error).__name__}: {error}")
    return words


def dtensors(mesh: Any, strategy: str) -> float:
    """The largest difference from the plain call, of results and gradients, on a mesh of two dims: batch and sequence. The second
    call of a kind asks no other rank, if there is nothing of pairs in it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    q, k, v, dout = (normal(2, 4, 13, 8) for _ in range(4))
    rows, none = [Shard(0), Shard(2)], [Replicate(), Replicate()]
    cases: list[dict[str, tuple[Tensor, Any]]] = [
        {"bias": (normal(4, 13, 13), [Replicate(), Shard(1)])},
        {"bias": (normal(4, 1, 13), none)},
        {"mask": (normal(2, 4, 13, 13) > -1, [Shard(0), Shard(2)])},
        {"key_weight": (normal(2, 4, 13).exp(), [Shard(0), Shard(2)])},
        {"key_weight": (normal(4, 13).exp(), [Replicate(), Shard(1)])},
        {},
    ]
    worst = 0.0
    for case in cases:
        learnt = [n for n in case if n != "mask"]
        whole = [x.clone().requires_grad_() for x in (q, k, v, *(case[n][0] for n in learnt))]
        given = [
            distribute_tensor(x.detach(), mesh, p).requires_grad_()
            for x, p in zip(whole, (rows,) * 3 + tuple(case[n][1] for n in learnt), strict=True)
        ]
        expected, found = [], []
        for tensors, results, cut, function in (
            (whole, expected, lambda x, p: x, flashsci.attention),
            (given, found, lambda x, p: distribute_tensor(x, mesh, p), _distributed(strategy)),
        ):
            others = dict(zip(learnt, tensors[3:], strict=True))
            others |= {n: cut(*case[n]) for n in case if n == "mask"}
            out = function(*tensors[:3], causal=True, **others)
            results += [out, *torch.autograd.grad(out, tensors, cut(dout, rows))]
        for x, like in zip(found, [given[0], *given], strict=True):
            assert x.placements == like.placements
        pairs = zip(found, expected, strict=True)
        worst = max(worst, *((a.full_tensor() - b).abs().max().item() for a, b in pairs))
    with patch.object(agreement, "_exchange", wraps=agreement._exchange) as asked:
        _distributed(strategy)(*given[:3], causal=True)
        assert asked.call_count == 0
    return worst


def _distributed(strategy: str) -> Any:
    return partial(fd.attention, strategy=strategy)


def forces(mesh: Any, strategy: str) -> list[Tensor]:
    """A training step on forces: atoms are split, an energy is the sum of what ranks compute, a force its gradient by positions;
    the gradients of a loss on forces by parameters that every rank has, summed over the ranks."""
    import torch.distributed as dist

    positions, targets, weights = force_problem()
    layout = Layout.of("contiguous", len(positions), mesh.size())
    rank = mesh.get_local_rank()
    own = part(positions, layout, rank, 0).requires_grad_()
    found, loss = force_step(own, part(targets, layout, rank, 0), weights, partial(_distributed(strategy), mesh=mesh))
    gradients = torch.autograd.grad(loss, weights)
    for g in gradients:
        dist.all_reduce(g, group=mesh.get_group())
    return [found.detach(), *gradients]


def force_problem() -> tuple[Tensor, Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(5)
    normal = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    return (
        normal(11, 3),
        normal(11, 3),
        [normal(3, 24).requires_grad_(), normal(8).requires_grad_()],
    )


def force_step(positions: Tensor, targets: Tensor, weights: list[Tensor], attend: Any) -> Any:
    """Forces, and the loss on them."""
    q, k, v = (positions @ weights[0]).unflatten(-1, (3, 8)).movedim(1, 0)
    energy = (attend(q, k, v).tanh() @ weights[1]).sum()
    (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
    return -gradient, (gradient + targets).square().sum()


class Layer(torch.nn.Module):
    """An attention layer whose sequence is split over a mesh."""

    def __init__(self, mesh: Any, strategy: str):
        super().__init__()
        torch.manual_seed(0)
        self.projection, self.mesh, self.strategy = torch.nn.Linear(16, 48).double(), mesh, strategy

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.mesh is None:
            return x + flashsci.attention(q, k, v, causal=True).transpose(1, 2).flatten(-2)
        out = fd.attention(q, k, v, mesh=self.mesh, causal=True, layout="head_tail", strategy=self.strategy)
        return x + out.transpose(1, 2).flatten(-2)


def sharded_parameters(mesh: Any, strategy: str) -> float:
    """The largest difference of FSDP2's parameters after a step from those of one process."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = Layer(None, "")
    alone(x).square().sum().backward()
    layer = Layer(mesh["cp"], strategy)
    fully_shard(layer, mesh=mesh._flatten("all"))
    # Batch split over dp, sequence over cp: a sum over all ranks, of which FSDP takes the mean.
    own = fd.shard(x[mesh["dp"].get_local_rank()][None], mesh["cp"], dim=1, layout="head_tail")
    (layer(own).square().sum() * 4).backward()
    pairs = zip(layer.parameters(), alone.parameters(), strict=True)
    return max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)


def compiled(mesh: Any, strategy: str, backend: str = "aot_eager") -> bool:
    """Whether a compiled layer, one graph, gives the bits of the plain one, and inductor's what is nearly them."""
    layer = Layer(mesh, strategy)
    random = torch.Generator().manual_seed(mesh.get_local_rank())
    x = torch.randn(1, 4, 16, generator=random, dtype=torch.float64)
    return _compiled_alike(layer, [x], backend, *layer.parameters())


def _compiled_alike(function: Any, inputs: list[Tensor], backend: str, *parameters: Tensor) -> bool:
    found = []
    for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves)
        found.append((out, *torch.autograd.grad(out.square().sum(), [*leaves, *parameters])))
    if backend == "inductor":
        return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*found, strict=True))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def compiled_with_pairs(mesh: Any, strategy: str) -> bool:
    """The same of a call with a bias of pairs, one of one row, and key weights."""
    random = torch.Generator().manual_seed(mesh.get_local_rank())
    normal = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    keys = 5 * mesh.size()
    inputs = [normal(1, 4, 5, 8) for _ in range(3)] + [normal(4, 5, keys), normal(4, 5).exp()]
    shared = torch.ones(4, 1, keys, dtype=torch.float64)

    def step(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        options = dict(mesh=mesh, strategy=strategy, window=(7, 2))
        out = fd.attention(q, k, v, bias=bias, key_weight=weight, **options)
        return out + fd.attention(q, k, v, bias=shared, **options)

    return _compiled_alike(step, inputs, "aot_eager")


def compiled_triangle(mesh: Any, strategy: str) -> bool:
    random = torch.Generator().manual_seed(mesh.get_local_rank())
    shapes = ((3, 4, 3 * mesh.size(), 8),) * 3 + ((4, 3, 3 * mesh.size()),)
    inputs = [torch.randn(s, generator=random, dtype=torch.float64) for s in shapes]
    step = lambda *x: fd.triangle_attention(*x, mesh=mesh, strategy=strategy)  # noqa: E731
    return _compiled_alike(step, inputs, "aot_eager")


def own_communicator(mesh: Any) -> bool:
    """Whether hidden transfers of a mesh have a communicator of their own, the same each time."""
    group = mesh.get_group()
    made = exchange.quiet(group)
    assert exchange.quiet(group) is made and made.size() == group.size()
    return made is not group


def repeated(mesh: Any, strategy: str) -> bool:
    """Whether a call gives the same bits twice."""
    q, k, v = torch.randn(3, 1, 4, 33, 16, generator=torch.Generator().manual_seed(mesh.get_local_rank())).to(
        mesh.device_type, torch.bfloat16
    )
    bias = torch.ones(4, 1, 33 * mesh.size(), device=mesh.device_type)
    found = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = fd.attention(*leaves[:3], bias=leaves[3], mesh=mesh, causal=True, strategy=strategy)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def asked_for(mesh: Any, strategy: str, by: str) -> set[bool]:
    """What the calls of kernels are told about determinism, when a distributed call is."""
    seen = set()

    def watched(function: Any) -> Any:
        def call(*tensors: Any, **options: Any) -> Any:
            seen.add(options["deterministic"])
            return function(*tensors, **options)

        return call

    names = ("attention", "varlen_attention", "attention_backward")
    q, k, v = (torch.randn(9, 4, 8, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 7, 9 * mesh.size()], dtype=torch.int32)
    given = dict(mesh=mesh, strategy=strategy, deterministic=True if by == "argument" else None)
    try:
        torch.use_deterministic_algorithms(by == "torch")
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(block, name, watched(getattr(block, name))))
            heads_first = [x.transpose(0, 1) for x in (q, k, v)]
            out = fd.attention(*heads_first, causal=True, **given).transpose(0, 1)
            (out + fd.varlen_attention(q, k, v, offsets, **given)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return seen


def inside_torchs_context_parallel(mesh: Any, causal: bool) -> float:
    """torch's ``context_parallel`` around its own scaled_dot_product_attention, whose flash attention is flashsci: the largest
    difference from the plain call, of out and gradients. On CPUs torch has a flash attention that its context parallelism does not
    know, so here its function is one that calls the operators of CUDA, which ``register`` replaces."""
    import torch.nn.functional as functional
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    from flashsci.integrations.torch import Replaced

    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    layout = "head_tail" if causal else "contiguous"
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 4, 16, 8, generator=random)
    own = [fd.shard(x, mesh, layout=layout).contiguous() for x in (q, k, v, dout)]
    leaves = [x.requires_grad_() for x in own[:3]]
    idle = torch.zeros(2 * mesh.size())  # it wants something to cut
    replaced, balanced = Replaced("CPU"), theirs._cp_options.enable_load_balance
    theirs._cp_options.enable_load_balance = causal  # which torch does for causal calls alone
    try:
        with (
            patch.object(functional, scaled_dot_product_attention.__name__, scaled_dot_product_attention),
            context_parallel(mesh, buffers=[idle], buffer_seq_dims=[0]),
        ):
            out = functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            found = [out, *torch.autograd.grad(out, leaves, own[3])]
    finally:
        theirs._cp_options.enable_load_balance = balanced
        replaced.remove()
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flashsci.attention(*whole, causal=causal)
    expected = [out, *torch.autograd.grad(out, whole, dout)]
    parts = [fd.shard(x, mesh, layout=layout) for x in expected]
    return max((a - b).abs().max().item() for a, b in zip(found, parts, strict=True))
