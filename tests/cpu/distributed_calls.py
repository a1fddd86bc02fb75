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
        [found[n] for n in ends], list(wanted.values()), list(cotangents.values()), create_graph=bool(inputs.tangents)
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
            [g for g, _ in chosen], list(leaves_too.values()), [t for _, t in chosen], allow_unused=True
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
        place = where[name if name in where else name.removeprefix("g").removeprefix("d") if name[1:] not in where else name[1:]]
        pieces = [p[name] for p in parts]
        if place is None:
            assert all(torch.equal(pieces[0], x) for x in pieces[1:]), f"{name} differs between ranks"
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
