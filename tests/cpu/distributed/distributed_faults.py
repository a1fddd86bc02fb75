"""What the processes of ranks.py run to see what errors do: each function has a process group of its own, which it leaves broken."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import flashsci.distributed as fd
from flashsci.distributed import agreement, block, collectives, exchange, triangle

TIMEOUT = 16.0  # seconds of these groups; on a busy machine ranks may take several to connect


def fresh(mesh: Any) -> Any:
    """A mesh of all ranks whose group nothing else uses."""
    assert mesh.size() == dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    return DeviceMesh.from_group(group, "cpu")


def call(mesh: Any, strategy: str, heads: int = 4, **options: Any) -> torch.Tensor:
    q, k, v = (torch.randn(2, heads, 6, 8, requires_grad=True) for _ in range(3))
    return fd.attention(q, k, v, mesh=mesh, strategy=strategy, causal=True, **options)


def fault(mesh: Any, wrong: int, where: str, strategy: str) -> None:
    """A call that goes well, and one in which a rank fails, or takes no part; what it raises says how long that took."""
    mesh = mesh if where == "death" else fresh(mesh)
    call(mesh, strategy).sum().backward()
    here = mesh.get_local_rank() == wrong
    start = time.monotonic()
    try:
        if where == "absent" and here:
            return
        if where == "death" and here:
            os._exit(1)
        if where == "forward" and here:
            with patch.object(block, "attention", side_effect=MemoryError("mine")):
                call(mesh, strategy)
        out = call(mesh, strategy)
        if where == "backward" and here:
            out.register_hook(failing)
        out.sum().backward()
    except BaseException as error:
        raise RuntimeError(f"after {time.monotonic() - start:.1f} s: {type(error).__name__} {error}") from error


def failing(gradient: torch.Tensor) -> None:
    raise MemoryError("mine")


def moved(*arguments: Any, **options: Any) -> None:
    raise AssertionError("data has moved")


def differing(mesh: Any, wrong: int, argument: str, strategy: str) -> None:
    """A call in which one rank differs from the others, after calls of both kinds by all of them. No data may move."""
    kinds: dict[str, dict[str, Any]] = {
        "heads": dict(heads=6),
        "softcap": dict(softcap=3.0),
        "total": dict(total=20),
    }
    if argument != "total":
        for options in ({}, kinds[argument]):
            call(mesh, strategy, **options)
    here = kinds[argument] if mesh.get_local_rank() == wrong else {}
    with (
        patch.object(exchange.Transfer, "__init__", moved),
        patch.object(collectives, "_all_to_all", moved),
        patch("flashsci.distributed.layout.all_gather", moved),
    ):
        call(mesh, strategy, **(dict(total=18) | here if argument == "total" else here))


def differing_triangles(mesh: Any, wrong: int, argument: str) -> None:
    here = mesh.get_local_rank() == wrong
    q, k, v, bias = (torch.randn(*s) for s in ((3, 4, 9, 8),) * 3 + ((4, 3, 9),))
    if here and argument == "gradient":
        k.requires_grad_()
    if here and argument == "bias":
        bias = bias[:, :2]
    if here and argument == "keys":
        v = v[..., :5, :]
    if here and argument == "own":
        v = v.double()
    with (
        patch.object(exchange.Transfer, "__init__", moved),
        patch.object(triangle, "assemble", moved),
    ):
        fd.triangle_attention(q, k, v, bias, mesh=mesh)


def differing_parts(mesh: Any, wrong: int) -> None:
    here = mesh.get_local_rank() == wrong
    fd.unshard(torch.zeros(4, 3 if here else 2), mesh, dim=0)


def without_memory(mesh: Any, entry: str, offsets_too: bool = False) -> list[list[int]]:
    """The shapes of a call's results on tensors of device "meta"."""
    mesh = fresh(mesh)
    x = torch.zeros(2, 4, 6, 8, device="meta")
    if entry == "attention":
        found = fd.attention(x, x, x, mesh=mesh, return_lse=True)
    elif entry == "varlen_attention":
        rows, edges = x[0], torch.tensor([0, 4 * mesh.size()], dtype=torch.int32)
        edges = edges.to("meta") if offsets_too else edges
        found = fd.varlen_attention(rows, rows, rows, edges, mesh=mesh, return_lse=True)
    elif entry == "triangle_attention":
        whole, bias = (x.new_zeros(*s, 6 * mesh.size(), n) for s, n in (((2, 4), 8), ((4,), 6)))
        found = fd.triangle_attention(whole, whole, whole, bias.mT, mesh=mesh, strategy="ring", return_lse=True)
    else:
        found = (fd.unshard(x, mesh),)
    return [list(x.shape) for x in found]


def exchanges(mesh: Any, given: bool, detail: bool) -> int:
    """How often ranks have compared their arguments in three calls of one kind."""
    mesh = fresh(mesh)
    before = dist.get_debug_level()
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with patch.object(agreement, "_exchange", wraps=agreement._exchange) as asked:
            for _ in range(3):
                options = dict(total=6 * mesh.size()) if given else {}
                call(mesh, "ring", **options).sum().backward()
        return asked.call_count
    finally:
        dist.set_debug_level(before)


def in_detail(mesh: Any, strategy: str) -> bool:
    """Whether a group that torch watches (TORCH_DISTRIBUTED_DEBUG=DETAIL) gives the bits of one that it does not."""
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    before, found = dist.get_debug_level(), []
    for level in (before, dist.DebugLevel.DETAIL):
        dist.set_debug_level(level)
        try:
            out = fd.attention(q, k, v, mesh=fresh(mesh), strategy=strategy, causal=True)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        finally:
            dist.set_debug_level(before)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))
