"""One causal attention layer over a sequence that no rank holds: forward and backward, a million tokens on GPUs.

python examples/long_sequence.py                         # a process for each GPU; without one, two on the CPU
torchrun --nproc-per-node 8 examples/long_sequence.py    # the same, started by torchrun

On one GPU that is some 8 PFLOP, about a quarter of a minute on an H100, twice.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import flashsci.distributed as fd

LAYOUT = "head_tail"


def layer(mesh: Any, device: torch.device, tokens: int, heads: int, dim: int) -> None:
    """Embeddings that depend on the position alone, through projections and attention, to a loss."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = heads * dim
    projection = torch.nn.Linear(width, 3 * width, bias=False, device=device, dtype=dtype)
    positions = fd.shard(torch.arange(tokens, device=device), mesh, dim=0, layout=LAYOUT)
    rates = torch.exp(-torch.arange(0, width, 2, device=device) / width * 9)
    angles = positions[:, None] * rates
    x = torch.cat([angles.sin(), angles.cos()], -1).to(dtype)  # [rows of this rank, width]

    def step() -> torch.Tensor:
        projection.weight.grad = None
        q, k, v = projection(x).unflatten(-1, (3, heads, dim)).permute(1, 2, 0, 3).unbind(0)
        out = fd.attention(q, k, v, mesh=mesh, causal=True, layout=LAYOUT, total=tokens)
        loss = out.float().square().sum() / tokens
        loss.backward()
        dist.all_reduce(loss.detach_(), group=mesh.get_group())
        dist.all_reduce(projection.weight.grad, group=mesh.get_group())
        return loss

    # Two products of the visible pairs in the forward, five in the backward; the projections are a thousandth of
    # that.
    operations = 7 * heads * dim * tokens * (tokens + 1)
    for call in ("first", "second"):  # kernels are compiled and connections made in the first
        start = time.perf_counter()
        loss = step().item()  # waits for the device
        norm = projection.weight.grad.float().norm().item()
        seconds = time.perf_counter() - start
        if dist.get_rank() != 0:
            continue
        if call == "first":
            print(f"{tokens} tokens on {mesh.size()} ranks, {x.shape[0]} on this one: loss {loss:.6f}")
            print(f"norm of the gradient {norm:.6f}")
        print(f"{call} call: {seconds:.2f} s, {operations / seconds / 1e12:.3g} TFLOP/s", flush=True)
    if dist.get_rank() == 0 and device.type == "cuda":
        print(
            f"{torch.cuda.get_device_name()}, most memory of a rank: "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        )


def main(rank: int, options: argparse.Namespace) -> None:
    if rank >= 0:  # otherwise torchrun has set the rank
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    layer(mesh, device, options.tokens, options.heads, options.dim)
    dist.destroy_process_group()


def parsed() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1 << 20 if gpus else 2048)
    parser.add_argument("--heads", type=int, default=8 if gpus else 2)
    parser.add_argument("--dim", type=int, default=128 if gpus else 16)
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    return parser.parse_args()


if __name__ == "__main__":
    given = parsed()
    if "RANK" in os.environ:
        main(-1, given)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        mp.spawn(main, (given,), given.ranks)
