"""Strong and weak scaling of distributed attention, by strategy, against torch's own context parallelism.

    python scripts/context_parallel.py                               # spawns a process for each GPU
    torchrun --nproc-per-node 8 scripts/context_parallel.py
    python scripts/context_parallel.py --device cpu --tiny           # that it runs

Causal bf16 calls, forward and backward, all candidates in turn, round by round; medians over rounds of the slowest rank. Strong: the
sequence stays as ranks are added. Weak: so do the pairs of a rank, its sequence grows with the square root of their number. Efficiency is
the time of one GPU over that of W, times 1 / W if strong. "predicted" is flashsci.distributed.cost.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashsci.distributed as fd
from flashsci.distributed import cost

LAYOUT = "head_tail"
Step = Callable[[], Tensor]


def inputs(mesh: DeviceMesh, seq: int, options: argparse.Namespace, dim: int) -> list[Tensor]:
    """q, k, v and dout of this rank."""
    rows = fd.shard(torch.empty(seq, device="meta"), mesh, dim=0, layout=LAYOUT).shape[0]
    heads = (options.heads, options.heads_k, options.heads_k, options.heads)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    made = [torch.randn(1, h, rows, dim, device=options.device, dtype=dtype) for h in heads]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def ours(mesh: DeviceMesh, tensors: list[Tensor], strategy: str, backward: bool) -> Step:
    q, k, v, dout = tensors

    def step() -> Tensor:
        out = fd.attention(q, k, v, mesh=mesh, causal=True, layout=LAYOUT, strategy=strategy)
        return torch.autograd.grad(out, (q, k, v), dout)[0] if backward else out

    return step


def torchs(mesh: DeviceMesh, tensors: list[Tensor], backward: bool) -> Step:
    """torch's context parallelism, which cuts the sequence as ours does; it takes equal heads."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dout = tensors
    group = q.shape[1] // k.shape[1]
    k, v = (x.detach().repeat_interleave(group, 1).requires_grad_() for x in (k, v))

    def step() -> Tensor:
        with (
            context_parallel(mesh, buffers=[], buffer_seq_dims=[]),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), dout)[0] if backward else out

    return step


def candidates(
    mesh: DeviceMesh, tensors: list[Tensor], options: argparse.Namespace, backward: bool
) -> dict[str, Step]:
    if mesh.size() == 1:
        return {"one": ours(mesh, tensors, "auto", backward)}
    found = {
        "ring": ours(mesh, tensors, "ring", backward),
        "all_gather": ours(mesh, tensors, "all_gather", backward),
    }
    if options.heads_k >= mesh.size():
        found["ulysses"] = ours(mesh, tensors, "ulysses", backward)
    if options.device == "cuda":
        found["torch"] = torchs(mesh, tensors, backward)
    return found


def measured(
    mesh: DeviceMesh, steps: dict[str, Step], options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """(median seconds of the slowest rank, GiB) of each; NaN for what cannot run, with its reason printed."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    memory = dict.fromkeys(steps, 0.0)
    for turn in range(options.rounds + 2):
        for name, step in list(steps.items()):
            seconds = _timed(mesh, name, step, options, memory)
            if seconds is None:
                del steps[name]
            elif turn >= 2:  # two rounds to warm up
                times[name].append(seconds)
    return {
        n: (statistics.median(times[n]), memory[n]) if n in steps else (float("nan"),) * 2
        for n in times
    }


def _timed(
    mesh: DeviceMesh, name: str, step: Step, options: argparse.Namespace, memory: dict[str, float]
) -> float | None:
    gpu = options.device == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    dist.barrier(mesh.get_group())
    start, failed = time.perf_counter(), 0.0
    try:
        step()
        if gpu:
            torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError, AttributeError, ImportError) as error:
        failed = 1.0
        print(
            f"{name} on rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:200]}",
            flush=True,
        )
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    said = torch.tensor([time.perf_counter() - start, peak, failed], device=options.device)
    dist.all_reduce(said, dist.ReduceOp.MAX, group=mesh.get_group())
    seconds, memory[name], failed = said.tolist()
    return None if failed else seconds


def predicted(
    seq: int, world: int, strategy: str, options: argparse.Namespace, dim: int, backward: bool
) -> float:
    call = cost.planned(seq, world, causal=True, layout=LAYOUT)
    sizes = cost.Sizes(1, options.heads, options.heads_k, dim, dim, 2)
    return cost.predict(
        call, sizes, "all_gather" if strategy in ("one", "torch") else strategy, backward
    ).seconds


def table(meshes: dict[int, DeviceMesh], options: argparse.Namespace) -> list[str]:
    rows = []
    for dim in options.dims:
        for scaling in ("strong", "weak"):
            for base in options.seq:
                for backward in (False, True):
                    rows += _lines(meshes, options, dim, scaling, base, backward)
    return rows


def _lines(
    meshes: dict[int, DeviceMesh],
    options: argparse.Namespace,
    dim: int,
    scaling: str,
    base: int,
    backward: bool,
) -> list[str]:
    alone, rows = None, []
    for world, mesh in sorted(meshes.items()):
        seq = base if scaling == "strong" else round(base * world**0.5)
        dist.barrier()
        if mesh.get_coordinate() is None:
            continue
        steps = candidates(mesh, inputs(mesh, seq, options, dim), options, backward)
        for name, (seconds, memory) in measured(mesh, steps, options).items():
            alone = seconds if world == 1 else alone
            efficiency = (
                alone / seconds / (world if scaling == "strong" else 1) if alone else float("nan")
            )
            model = predicted(seq, world, name, options, dim, backward)
            what = "step" if backward else "forward"
            rows.append(
                f"| {scaling} | {seq} | {dim} | {what} | {world} | {name} | {1e3 * seconds:.2f} | {100 * efficiency:.0f}% "
                f"| {1e3 * model:.2f} | {memory:.2f} |"
            )
    return rows


def main(rank: int, options: argparse.Namespace) -> None:
    if rank >= 0:  # else torchrun has said who this is
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    whole = init_device_mesh(options.device, (dist.get_world_size(),))
    meshes = {
        n: DeviceMesh(options.device, list(range(n)))
        for n in (1, 2, 4, 8)
        if n < dist.get_world_size()
    }
    meshes[dist.get_world_size()] = whole
    rows = table(meshes, options)
    dist.barrier()
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        print(
            f"{name}, torch {torch.__version__}, heads {options.heads} and {options.heads_k}, {options.rounds} rounds\n"
        )
        print(
            "| scaling | S | D | pass | ranks | strategy | ms | efficiency | predicted ms | GiB |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        print("\n".join(rows))
    dist.destroy_process_group()


def parsed() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu")
    parser.add_argument("--seq", type=int, nargs="+", default=[32768, 131072, 524288])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--ranks", type=int, default=gpus or 2, help="processes to start, without torchrun"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, one round")
    options = parser.parse_args()
    if options.tiny:
        options.seq, options.dims, options.heads, options.heads_k, options.rounds = (
            [256],
            [16],
            4,
            2,
            1,
        )
    return options


if __name__ == "__main__":
    given = parsed()
    if "RANK" in os.environ:
        main(-1, given)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        mp.spawn(main, (given,), given.ranks)
