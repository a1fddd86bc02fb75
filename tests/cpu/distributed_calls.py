"""What the processes of ranks.py run: distributed calls on their parts of problems that every process can make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import flashsci
import flashsci.distributed as fd
from flashsci.distributed.layout import Layout
from flashsci.testing import Case, Inputs, make_inputs

LEAVES = ("q", "k", "v", "bias", "key_weight")


@dataclass(frozen=True)
class Split:
    """A problem and how it is split."""

    case: Case
    layout: str
    strategy: str
    rows: tuple[int, ...] | None = (
        None  # of each rank, where they are neither even nor head and tail
    )
    keys: tuple[int, ...] | None = None

    def inputs(self) -> Inputs:
        inputs = make_inputs(self.case)
        options = {
            n: x for n, x in inputs.options.items() if not n.startswith(("max_seqlen", "dropout"))
        }
        return replace(inputs, options=options)

    def layouts(self, inputs: Inputs, world: int) -> tuple[Layout, Layout]:
        dim = 0 if inputs.varlen else -2
        totals = inputs.q.shape[dim], inputs.k.shape[dim]
        given = (self.rows, self.rows if inputs.varlen else self.keys)
        return tuple(
            Layout.of(self.layout, total, world)
            if lengths is None
            else Layout("contiguous", lengths)
            for total, lengths in zip(totals, given, strict=True)
        )


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
    """This rank's parts of out, lse and all gradients of each problem."""
    return [_one(mesh, split) for split in splits]


def _one(mesh: Any, split: Split) -> dict[str, Tensor]:
    inputs, rank = split.inputs(), mesh.get_local_rank()
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
    options = dict(
        inputs.options, mesh=mesh, layout=split.layout, strategy=split.strategy, return_lse=True
    )
    q, k, v, bias, key_weight = leaves.values()
    if inputs.varlen:
        del options["align"]
        out, lse = fd.varlen_attention(
            q, k, v, inputs.cu_seqlens_q, bias=bias, key_weight=key_weight, **options
        )
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
            if (
                where[name[1:]] is None and rank
            ):  # every rank has the gradient: one of them takes its tangent
                own_tangent = torch.zeros_like(own_tangent)
            chosen.append((g, own_tangent.to(g.dtype)))
        leaves_too = {f"g{n}": x for n, x in wanted.items()} | {
            f"gd{n}": x for n, x in cotangents.items()
        }
        second = torch.autograd.grad(
            [g for g, _ in chosen],
            list(leaves_too.values()),
            [t for _, t in chosen],
            allow_unused=True,
        )
        found |= {
            n: torch.zeros_like(x) if g is None else g
            for (n, x), g in zip(leaves_too.items(), second, strict=True)
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
            name
            if name in where
            else name.removeprefix("g").removeprefix("d")
            if name[1:] not in where
            else name[1:]
        ]
        pieces = [p[name] for p in parts]
        if place is None:
            assert all(torch.equal(pieces[0], x) for x in pieces[1:]), (
                f"{name} differs between ranks"
            )
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
            given[argument] = {"causal": False, "scale": 0.5, "strategy": "ring", "softcap": 3.0}[
                argument
            ]
    return fd.attention(q, k, v, **given)


def triangles(mesh: Any, rows: tuple[int, ...], strategy: str) -> list[Tensor]:
    """out and gradients of this rank's rows, and second derivatives by its bias."""
    rank = mesh.get_local_rank()
    q, k, v, bias, mask, dout = triangle_problem(sum(rows))
    layout = Layout("contiguous", rows)
    own = [part(x, layout, rank, 1).requires_grad_() for x in (q, k, v)] + [
        part(bias, layout, rank, -2).requires_grad_()
    ]
    out = fd.triangle_attention(
        *own, mesh=mesh, mask=part(mask, layout, rank, 1), strategy=strategy
    )
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


def dtensors(mesh: Any, strategy: str) -> float:
    """The largest difference from the plain call, of results and gradients, on a mesh of two dims: batch and sequence."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    random = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 4, 13, 8, generator=random, dtype=torch.float64)
    biases = (
        torch.randn(4, 13, 13, generator=random, dtype=torch.float64),
        torch.randn(4, 1, 13, generator=random, dtype=torch.float64),
    )
    batch_and_rows = [Shard(0), Shard(2)]
    worst = 0.0
    for bias, placements in zip(
        biases, ([Replicate(), Shard(1)], [Replicate(), Replicate()]), strict=True
    ):
        whole = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = flashsci.attention(*whole[:3], bias=whole[3], causal=True)
        expected = [out, *torch.autograd.grad(out, whole, dout)]
        given = [distribute_tensor(x, mesh, batch_and_rows).requires_grad_() for x in (q, k, v)]
        given.append(distribute_tensor(bias, mesh, placements).requires_grad_())
        out = fd.attention(*given[:3], bias=given[3], causal=True, strategy=strategy)
        found = [
            out,
            *torch.autograd.grad(out, given, distribute_tensor(dout, mesh, batch_and_rows)),
        ]
        assert out.placements == tuple(batch_and_rows) and found[-1].placements == tuple(placements)
        worst = max(
            worst,
            *(
                (a.full_tensor() - b).abs().max().item()
                for a, b in zip(found, expected, strict=True)
            ),
        )
    return worst


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
        out = fd.attention(
            q, k, v, mesh=self.mesh, causal=True, layout="head_tail", strategy=self.strategy
        )
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


def compiled(mesh: Any, strategy: str) -> bool:
    """Whether a compiled layer, one graph, gives the bits of the plain one."""
    layer = Layer(mesh, strategy)
    x = torch.randn(
        1,
        4,
        16,
        generator=torch.Generator().manual_seed(mesh.get_local_rank()),
        dtype=torch.float64,
    )
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        found.append((out, *torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()])))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def repeated(mesh: Any, strategy: str) -> bool:
    """Whether a call gives the same bits twice."""
    q, k, v = torch.randn(
        3, 1, 4, 33, 16, generator=torch.Generator().manual_seed(mesh.get_local_rank())
    ).bfloat16()
    bias = torch.ones(4, 1, 33 * mesh.size())
    found = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = fd.attention(*leaves[:3], bias=leaves[3], mesh=mesh, causal=True, strategy=strategy)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def torchs_own_ring(mesh: Any) -> float:
    """torch's ring attention with flashsci's kernels as its flash attention, against the plain call."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    from flashsci.integrations.torch import library

    q, k, v = torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    own = [fd.shard(x, mesh, layout="contiguous").contiguous() for x in (q, k, v)]
    replaced = library("CPU")
    balanced = theirs._cp_options.enable_load_balance
    theirs._cp_options.enable_load_balance = False  # of causal calls
    try:
        out, *_ = theirs._templated_ring_attention(
            mesh.get_group(),
            2,
            torch.ops.aten._scaled_dot_product_flash_attention,
            *own,
            is_causal=False,
        )
    finally:
        theirs._cp_options.enable_load_balance = balanced
        replaced._destroy()
    expected = fd.shard(flashsci.attention(q, k, v), mesh)
    return (out - expected).abs().max().item()
