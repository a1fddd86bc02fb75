"""Strong and weak scaling of distributed attention, by strategy, against torch's own context parallelism.

    python tools/distributed/context_parallel.py                               # spawns a process for each GPU
    torchrun --nproc-per-node 8 tools/distributed/context_parallel.py
    python tools/distributed/context_parallel.py --device cpu --tiny           # that it runs
    python tools/distributed/context_parallel.py --minutes 4 --seq 32768 131072

Causal bf16 calls, forward and backward, all candidates in turn, round by round; medians over rounds of the slowest
rank; short calls are timed several in a row. Strong: the sequence stays as ranks are added. Weak: the pairs of a
rank stay, and its sequence grows with the square root of their number. Efficiency is the time of one GPU, the
slowest of all at the same time, over that of W, times 1 / W if strong. "predicted" is flashsci.distributed.cost,
whose choice is marked *. GiB: the memory of the slowest rank's q, k, v and dout, and the peak beyond the memory
before the call. Rows are printed one by one, short sequences first, and all of them at the end. Cells that would
exceed the minutes, by the prediction, are left out.
"""

from __future__ import annotations

import argparse
import datetime
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
HEAD = """\
| scaling | S | D | pass | ranks | strategy | ms | efficiency | predicted ms | GiB |
|---|---|---|---|---|---|---|---|---|---|"""
WARMUP, LEAST = 2, 3  # rounds
CELL = 20.0  # seconds that the rounds of one cell may take, if that leaves the least number
# Short calls are timed several in a row, like the layers of a model: at most this many, until they take this time.
MOST_CALLS, AT_LEAST = 8, 0.1
LONG = 1.0  # seconds of a call from which on one round is enough to warm up, and two to measure
Step = Callable[[], Tensor]


def inputs(mesh: DeviceMesh, seq: int, options: argparse.Namespace, dim: int) -> list[Tensor]:
    """q, k, v and dout of this rank."""
    rows = fd.shard(torch.empty(seq, device="meta"), mesh, dim=0, layout=LAYOUT).shape[0]
    heads = (options.heads, options.heads_k, options.heads_k, options.heads)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    made = [torch.randn(1, h, rows, dim, device=options.device, dtype=dtype) for h in heads]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def ours(mesh: DeviceMesh, tensors: list[Tensor], strategy: str, backward: bool, seq: int) -> Step:
    q, k, v, dout = tensors
    options = dict(mesh=mesh, causal=True, layout=LAYOUT, strategy=strategy, total=seq)

    def step() -> Tensor:
        out = fd.attention(q, k, v, **options)
        return torch.autograd.grad(out, (q, k, v), dout)[0] if backward else out

    return step


def torchs(mesh: DeviceMesh, tensors: list[Tensor], backward: bool) -> Step:
    """torch's context parallelism, which cuts the sequence in the same way; it takes equal heads."""
    q, k, v, dout = tensors
    group = q.shape[1] // k.shape[1]
    k, v = (x.detach().repeat_interleave(group, 1).requires_grad_() for x in (k, v))
    # It needs something to cut; q, k and v are cut already.
    idle = torch.zeros(2 * mesh.size(), device=q.device)

    def step() -> Tensor:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with (
            context_parallel(mesh, buffers=[idle], buffer_seq_dims=[0]),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), dout)[0] if backward else out

    return step


def candidates(
    mesh: DeviceMesh,
    tensors: list[Tensor],
    options: argparse.Namespace,
    backward: bool,
    seq: int,
) -> dict[str, Step]:
    if mesh.size() == 1:
        return {"one": ours(mesh, tensors, "auto", backward, seq)}
    names = ["ring", "all_gather", *(["ulysses"] if options.heads_k >= mesh.size() else [])]
    found = {name: ours(mesh, tensors, name, backward, seq) for name in names}
    if options.device == "cuda":
        found["torch"] = torchs(mesh, tensors, backward)
    return found


def measured(mesh: DeviceMesh, steps: dict[str, Step], options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """(median seconds of the slowest rank, GiB) of each; NaN for candidates that cannot run, with the reason
    printed."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    memory = dict.fromkeys(steps, 0.0)
    warmup, rounds, spent = WARMUP, options.rounds, 0.0
    calls: dict[str, int] = {}  # in a row, by the time of all ranks in the round before
    for turn in range(WARMUP + options.rounds):
        if turn == 1 and spent > LONG * len(steps):  # all ranks have seen the same times
            warmup, rounds = 1, min(rounds, 2)
        if turn == warmup:
            rounds = min(rounds, max(min(LEAST, rounds), int(CELL / max(spent / warmup, 1e-9))))
        if turn >= warmup + rounds:
            break
        for name, step in list(steps.items()):
            seconds = _timed(mesh, name, step, options, memory, calls.get(name, 1))
            if seconds is None:
                del steps[name]
                continue
            spent += seconds * calls.get(name, 1)
            calls[name] = max(1, min(MOST_CALLS, int(AT_LEAST / max(seconds, 1e-9))))
            if turn >= warmup:
                times[name].append(seconds)
    return {n: (statistics.median(times[n]), memory[n]) if n in steps else (float("nan"),) * 2 for n in times}


def _timed(
    mesh: DeviceMesh,
    name: str,
    step: Step,
    options: argparse.Namespace,
    memory: dict[str, float],
    calls: int,
) -> float | None:
    gpu = options.device == "cuda"
    before = 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
    dist.barrier(mesh.get_group())
    start, failed = time.perf_counter(), 0.0
    try:
        for _ in range(calls):
            step()
        if gpu:
            torch.cuda.synchronize()
    except Exception as error:  # in torch's experiments, or no memory: others go on
        failed = 1.0
        print(
            f"{name} on rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:200]}",
            flush=True,
        )
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else 0.0
    said = torch.tensor([(time.perf_counter() - start) / calls, peak, failed], device=options.device)
    dist.all_reduce(said, dist.ReduceOp.MAX, group=mesh.get_group())
    seconds, memory[name], failed = said.tolist()
    return None if failed else seconds


def predicted(seq: int, world: int, strategy: str, options: argparse.Namespace, dim: int, backward: bool) -> float:
    call = cost.planned(seq, world, causal=True, layout=LAYOUT)
    sizes = cost.CallSizes(1, options.heads, options.heads_k, dim, dim, 2)
    return cost.predict(call, sizes, "all_gather" if strategy in ("one", "torch") else strategy, backward).seconds


def chosen(seq: int, world: int, options: argparse.Namespace, dim: int, backward: bool) -> str:
    """The choice of "auto"."""
    call = cost.planned(seq, world, causal=True, layout=LAYOUT)
    sizes = cost.CallSizes(1, options.heads, options.heads_k, dim, dim, 2)
    allowed = [s for s in cost.STRATEGIES if s != "ulysses" or options.heads_k >= world]
    return cost.choose(call, sizes, allowed, backward)


def table(meshes: dict[int, DeviceMesh], options: argparse.Namespace, until: float) -> list[str]:
    """Rows of this rank's meshes; the first rank prints them one by one."""
    rows = []
    for base in sorted(options.seq):
        for dim in options.dims:
            for backward in (False, True):
                alone = None
                for scaling, world in cells(meshes):
                    found, alone = _lines(meshes[world], options, dim, scaling, base, backward, alone, until)
                    rows += found
                    if dist.get_rank() == 0:
                        print("\n".join(found), flush=True)
    return rows


def cells(meshes: dict[int, DeviceMesh]) -> list[tuple[str, int]]:
    """(scaling, ranks); one rank has no scaling."""
    more = sorted(world for world in meshes if world > 1)
    one = [("strong", 1)] if 1 in meshes else []
    return one + [(scaling, world) for scaling in ("strong", "weak") for world in more]


def _lines(
    mesh: DeviceMesh,
    options: argparse.Namespace,
    dim: int,
    scaling: str,
    base: int,
    backward: bool,
    alone: float | None,
    until: float,
) -> tuple[list[str], float | None]:
    """Rows of one mesh, and the seconds of a rank alone."""
    world = mesh.size()
    # torch's cuts want heads and tails of one length.
    seq = base if scaling == "strong" else 2 * world * round(base * world**-0.5 / 2)
    left = torch.tensor([until - time.perf_counter()], device=options.device)
    dist.all_reduce(left, dist.ReduceOp.MIN)  # all ranks begin together, or none does
    if mesh.get_coordinate() is None:
        return [], alone
    what, rows = "step" if backward else "forward", []
    names = ("one",) if world == 1 else ("all_gather",) * (4 if options.device == "cuda" else 3)
    least = sum(predicted(seq, world, n, options, dim, backward) for n in names)
    if left.item() < (WARMUP + LEAST) * least:
        return [f"| {scaling} | {seq} | {dim} | {what} | {world} | no time left | | | | |"], alone
    try:
        tensors = inputs(mesh, seq, options, dim)
        steps = candidates(mesh, tensors, options, backward, seq)
    except torch.OutOfMemoryError:
        return [f"| {scaling} | {seq} | {dim} | {what} | {world} | no memory | | | | |"], alone
    choice = chosen(seq, world, options, dim, backward)
    given = sum(x.nbytes for x in tensors) / 2**30
    for name, (seconds, memory) in measured(mesh, steps, options).items():
        if world == 1:  # each rank by itself
            slowest = torch.tensor([seconds], device=options.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            alone = seconds = slowest.item()
        efficiency = alone / seconds / (world if scaling == "strong" else 1) if alone else float("nan")
        model = predicted(seq, world, name, options, dim, backward)
        name += "*" if name == choice else ""
        rows.append(
            f"| {scaling} | {seq} | {dim} | {what} | {world} | {name} | {1e3 * seconds:.2f} | {100 * efficiency:.0f}% "
            f"| {1e3 * model:.2f} | {given + memory:.2f} |"
        )
    return rows, alone


def main(rank: int, options: argparse.Namespace) -> None:
    if rank >= 0:  # otherwise torchrun has set the rank
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    until = time.perf_counter() + 60 * options.minutes
    # If one rank has failed in the middle of a call, the others wait for it little longer than a cell takes.
    patience = datetime.timedelta(seconds=CELL + 180)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=patience)
    world = dist.get_world_size()
    grid = init_device_mesh(options.device, (world, 1), mesh_dim_names=("all", "alone"))
    some = {n: DeviceMesh(options.device, list(range(n))) for n in (2, 4, 8) if n < world}
    meshes = {1: grid["alone"], **some, world: grid["all"]}
    if dist.get_rank() == 0:
        print(HEAD, flush=True)
    rows = table(meshes, options, until)
    dist.barrier()
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        print(
            f"\n{name}, torch {torch.__version__}, heads {options.heads} and {options.heads_k}, "
            f"at most {options.rounds} rounds\n"
        )
        print("\n".join([HEAD, *rows]), flush=True)
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
    parser.add_argument("--minutes", type=float, default=8.0, help="of all measurements (default 8)")
    parser.add_argument("--ranks", type=int, default=gpus or 2, help="processes to start, without torchrun")
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
