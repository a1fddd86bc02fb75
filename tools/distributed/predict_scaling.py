"""A prediction of scaling over 2, 4 and 8 GPUs from one, which does the work of every rank in turn.

A model moves the messages.

    python tools/distributed/predict_scaling.py                                 # some three minutes of a GPU
    python tools/distributed/predict_scaling.py --minutes 2 --json machine.json
    python tools/distributed/predict_scaling.py --device cpu --tiny             # that it runs

flashsci.distributed runs unchanged, over a process group in which a rank receives the messages of an earlier pass
(tools/distributed/emulated_ranks.py). The computation of a rank between two messages is timed with events of the device,
medians over rounds. From that and the bytes follows the time of all ranks in parallel: a rank computes while its
messages are in flight, and waits where the code waits. Two effects are left out: transfers take memory bandwidth
and processors from kernels, and ranks are not equally fast.

    slowest     ms that the slowest rank computes
    work        time of one GPU over the computation of all ranks together: the loss without any message
    sent        MB of the busiest rank, message by message
    x GB/s      predicted ms, and efficiency, for links with this speed each way
    model       ms by flashsci.distributed.cost with the speeds fitted here, for the first link
    GiB         peak memory of rank 0 with its inputs; of one GPU; and the model's value for rank 0

The model's own choice is marked *. Cells run cheapest first; cells that would exceed the minutes are left out.
Short sequences run with the messages of the others, and results are compared with those of one call; long ones run
on random messages, and of the longest only the first and the last rank (marked with the number of ranks). Before
anything is timed, small calls are judged by the fp64 oracle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flashsci
import flashsci.distributed as fd
from flashsci.distributed import cost
from flashsci.distributed.layout import Layout, in_order
from flashsci.testing import Inputs, Judge
from tools.distributed.context_parallel import torchs
from tools.distributed.emulated_ranks import Step, World, settled, simulate

# The longest sequences with real messages, with all ranks, and with all strategies; beyond, the ring alone.
COMPARED, ALL_RANKS, ALL_STRATEGIES = 1 << 15, 1 << 16, 1 << 17
PASSES = 3  # until results are right: all ranks have equal row counts
# The allowed difference of two results, relative to their largest number, by the bytes of a number: in 16 bits each
# may be off by two; in 32 the order of sums makes the difference.
ROUNDINGS = {2: 4, 4: 64}
Trace = list[Step]


@dataclass(frozen=True)
class Cell:
    """One call; ``strategy`` "one" is that of a single GPU."""

    seq: int
    dim: int
    causal: bool
    world: int = 1
    strategy: str = "one"

    @property
    def layout(self) -> str:
        return "head_tail" if self.causal else "contiguous"

    def call(self) -> Any:
        return cost.planned(self.seq, self.world, causal=self.causal, layout=self.layout)

    def operations(self) -> float:
        """FLOPs of the forward and the backward of the whole, per head."""
        return 7.0 * self.dim * self.seq**2 * (1 if self.causal else 2)


class Found(NamedTuple):
    """Traces by rank, of the forward and of both passes; peaks of rank 0 after the forward and after both."""

    forward: dict[int, Trace]
    step: dict[int, Trace]
    memory: tuple[float, float]
    error: float | None = None  # against one call, in roundings of the largest number

    def seconds(self, which: str) -> list[float]:
        return [sum(s.seconds for s in trace) for trace in getattr(self, which).values()]


@dataclass
class Results:
    """The results so far."""

    cells: dict[Cell, Found | str] = field(default_factory=dict)
    triangles: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def whole_inputs(cell: Cell, options: argparse.Namespace) -> list[Tensor]:
    """q, k, v, dout of the whole."""
    heads = (options.heads, options.heads_k, options.heads_k, options.heads)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shape = lambda h: (1, h, cell.seq, cell.dim)  # noqa: E731
    return [torch.randn(shape(h), device=options.device, dtype=dtype) for h in heads]


def owned(x: Tensor, mesh: DeviceMesh | None, layout: str) -> Tensor:
    """A rank's part, in separate memory."""
    part = x if mesh is None else fd.shard(x, mesh, layout=layout)
    return part.clone() if part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else part  # fmt: skip


def rank_of(
    cell: Cell, whole: list[Tensor], world: World, peaks: list[float], mesh: DeviceMesh
) -> list[Tensor]:
    """out and gradients of the present rank; appends its peaks of memory."""
    gpu = whole[0].is_cuda
    before = torch.cuda.memory_allocated() if gpu else 0
    *leaves, dout = (owned(x, mesh if world.size > 1 else None, cell.layout) for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    if gpu:
        torch.cuda.reset_peak_memory_stats()

    def peak() -> None:
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else 0.0)

    world.phase("inputs")
    if cell.strategy == "torch":
        gradient = torchs(mesh, [*leaves, dout], True)()
        peak()
        return [gradient]
    if cell.strategy == "one":
        out = flashsci.attention(*leaves, causal=cell.causal)
    else:
        out = fd.attention(
            *leaves, mesh=mesh, causal=cell.causal, layout=cell.layout, strategy=cell.strategy, total=cell.seq
        )  # fmt: skip
    peak()
    world.phase("backward")
    gradients = torch.autograd.grad(out, leaves, dout)
    peak()
    return [out.detach(), *gradients]


def measure(
    cell: Cell, whole: list[Tensor], expected: list[Tensor], rounds: int
) -> tuple[Found, list[Tensor]]:
    """Times of a cell's ranks, and the whole results if they are right."""
    real = cell.seq <= COMPARED and cell.strategy != "torch"
    world = World(cell.world, whole[0].device.type, real)
    peaks: list[float] = []
    step = partial(rank_of, cell, whole, world, peaks)
    results = settled(world, step, PASSES) if real else []
    if not real and cell.world == 1 and cell.seq <= ALL_STRATEGIES:
        world.run(0, step)  # takes the memory that all others find afterwards
    joined = [whole_of(cell, list(x)) for x in zip(*results, strict=True)]
    del results
    ranks = {0, cell.world - 1} if cell.causal else {0}
    traces: dict[int, list[Trace]] = {
        r: [] for r in (range(cell.world) if cell.seq <= ALL_RANKS else sorted(ranks))
    }
    memory = (0.0, 0.0)
    for _ in range(rounds):
        for rank, found in traces.items():
            peaks.clear()
            found.append(world.run(rank, step)[1])
            memory = (peaks[0], max(peaks)) if rank == 0 else memory
    split = {rank: parts(medians(found)) for rank, found in traces.items()}
    forward, both = ({r: x[i] for r, x in split.items()} for i in (0, 1))
    return Found(forward, both, memory, worst(joined, expected)), joined


def medians(traces: list[Trace]) -> Trace:
    return [
        steps[0]._replace(seconds=statistics.median(s.seconds for s in steps))
        for steps in zip(*traces, strict=True)
    ]


def parts(trace: Trace) -> tuple[Trace, Trace]:
    """The forward, and everything, of a trace after the inputs were there."""
    names = [step.key if step.what == "phase" else None for step in trace]
    trace, names = trace[names.index("inputs") + 1 :], names[names.index("inputs") + 1 :]
    forward = trace[: names.index("backward") + 1] if "backward" in names else []
    return forward, trace


def whole_of(cell: Cell, of_ranks: list[Tensor]) -> Tensor:
    """The whole from the parts of all ranks."""
    layout = Layout.of(cell.layout, cell.seq, cell.world)
    return in_order(torch.cat([x.movedim(-2, 0) for x in of_ranks]), layout).movedim(0, -2)


def worst(found: list[Tensor], expected: list[Tensor]) -> float | None:
    """The largest difference, in roundings of the largest number."""
    if not found or not expected:
        return None
    return max(
        ((a - b).abs().max() / (b.abs().max() * torch.finfo(b.dtype).eps)).item()
        for a, b in zip(found, expected, strict=True)
    )


def every_rank(found: dict[int, Trace], world: int) -> list[Trace]:
    """Traces of all ranks: ranks that did not run have the trace of the nearest that did."""
    nearest = [min(found, key=lambda r: abs(r - rank)) for rank in range(world)]
    return [[s.of_rank(rank - r, world) for s in found[r]] for rank, r in enumerate(nearest)]


def small_calls(options: argparse.Namespace) -> list[str]:
    """The oracle's findings on emulated calls of every strategy; empty if all is well."""
    wrong = []
    cases = [
        (dict(causal=True), "head_tail"),
        (dict(), "contiguous"),
        (dict(window=(40, 9)), "contiguous"),
    ]
    for dim in options.dims:
        for world in options.worlds:
            for given, layout in cases:
                cell = Cell(options.small, dim, layout == "head_tail", world)
                q, k, v, dout = whole_inputs(cell, options)
                judge = Judge(Inputs(q, k, v, dout=dout, options=given), options.device == "cuda")
                for strategy in strategies(world, options)[: 1 if "window" in given else None]:
                    step = partial(_small_call, [q, k, v, dout], given, layout, strategy)
                    names = ("out", "dq", "dk", "dv")
                    try:
                        results = zip(
                            *settled(World(world, options.device), step, PASSES), strict=True
                        )
                        judge.require({n: whole_of(cell, list(x)) for n, x in zip(names, results, strict=True)})  # fmt: skip
                    except Exception as error:
                        wrong.append(f"{strategy}, {world} ranks, D {dim}, {given}: {error}")
    return wrong


def _small_call(
    whole: list[Tensor], given: dict[str, Any], layout: str, strategy: str, mesh: DeviceMesh
) -> list[Tensor]:
    *leaves, dout = (fd.shard(x, mesh, layout=layout) for x in whole)
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = fd.attention(*leaves, mesh=mesh, layout=layout, strategy=strategy, **given)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def strategies(world: int, options: argparse.Namespace) -> list[str]:
    return ["ring", "all_gather", *(["ulysses"] if options.heads_k >= world else [])]


def candidates(one: Cell, options: argparse.Namespace) -> list[Cell]:
    """The calls of several ranks that are compared with one."""
    found = []
    for world in options.worlds:
        names = ["ring"]
        if one.seq < ALL_STRATEGIES or (one.causal and one.seq == ALL_STRATEGIES):
            names = strategies(world, options)
            if options.device == "cuda" and one.causal and not options.no_torch:
                names.append("torch")
        found += [Cell(one.seq, one.dim, one.causal, world, name) for name in names]
    return found


def run(options: argparse.Namespace, results: Results, until: float) -> None:
    ones = [Cell(s, d, c) for s in options.seq for d in options.dims for c in (True, False)]
    # Operations per second, until one is measured.
    speed = 4e14 if options.device == "cuda" else 1e9
    late = lambda one: one.seq > ALL_STRATEGIES and not one.causal  # noqa: E731
    for one in sorted(ones, key=lambda c: (late(c), c.operations())):
        rounds = options.rounds if one.seq <= COMPARED else 2 if one.seq <= ALL_RANKS else 1
        expected: list[Tensor] = []
        whole: list[Tensor] = []
        for cell in (one, *candidates(one, options)):
            passes = rounds + (PASSES if one.seq <= COMPARED and cell.strategy != "torch" else 0)
            ran = cell.world if one.seq <= ALL_RANKS else 1 + (one.causal and cell.world > 1)
            estimate = one.operations() * options.heads / speed * ran / cell.world
            estimate *= {"one": 1.0, "torch": 2.0}.get(cell.strategy, 1.1) * passes
            if isinstance(results.cells.get(one), str) or time.perf_counter() + estimate > until:
                results.cells[cell] = "no time left"
                continue
            whole = whole or whole_inputs(one, options)
            found, joined = attempt(cell, whole, expected, rounds, results.wrong)
            results.cells[cell] = found
            if isinstance(found, Found):
                if cell == one:
                    expected = joined
                    speed = one.operations() * options.heads / found.seconds("step")[0]
                elif found.error is not None and found.error > ROUNDINGS[whole[0].itemsize]:
                    results.wrong.append(f"{cell}: {found.error:.1f} roundings from one call")
            del joined
            print(*lines(cell, results, options, cost.Machine()), sep="\n", flush=True)
        del whole, expected
        if options.device == "cuda" and one.seq >= ALL_STRATEGIES:
            torch.cuda.empty_cache()


def attempt(
    cell: Cell, whole: list[Tensor], expected: list[Tensor], rounds: int, wrong: list[str]
) -> tuple[Found | str, list[Tensor]]:
    """:func:`measure`, or the reason why it cannot. torch's is experimental, and may fail in any way; ours may only
    lack memory."""
    try:
        return measure(cell, whole, expected, rounds)
    except torch.OutOfMemoryError:
        return "no memory", []
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {str(error)[:80]}".replace("\n", " ").replace("|", "/")
        if cell.strategy != "torch":
            wrong.append(f"{cell}: {said}")
        return said, []


def triangles(options: argparse.Namespace, results: Results, until: float) -> None:
    """Triangle attention of n x n pairs over rows: time and memory of rank 0, by strategy."""
    n, heads, dim = options.pairs, 4, 32 if options.device == "cuda" else 8
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    make = partial(torch.randn, device=options.device, dtype=dtype)
    one = {}
    for world in (1, *options.worlds):
        for strategy in ("all_gather", "ring") if world > 1 else ("one",):
            if time.perf_counter() > until:
                results.triangles.append(f"| {n} | {world} | {strategy} | no time left | | | |")
                continue
            peaks: list[float] = []
            rows = n // world
            emulated = World(world, options.device, real=False)
            step = partial(_triangle, make, (n, rows, heads, dim), strategy, emulated, peaks)
            emulated.run(0, step)
            peaks.clear()
            trace = parts(medians([emulated.run(0, step)[1] for _ in range(options.rounds)]))[1]
            seconds = sum(s.seconds for s in trace)
            one = one or {"seconds": seconds, "memory": max(peaks)}
            parallel = simulate(
                every_rank({0: trace}, world), options.links[0] * 1e9, options.latency
            )
            results.triangles.append(
                f"| {n} | {world} | {strategy} | {1e3 * seconds:.2f} | {1e3 * parallel:.2f} "
                f"| {100 * one['seconds'] / world / parallel:.0f}% | {max(peaks):.2f} |"
            )


def _triangle(
    make: Callable[..., Tensor],
    sizes: tuple[int, int, int, int],
    strategy: str,
    world: World,
    peaks: list[float],
    mesh: DeviceMesh,
) -> None:
    n, rows, heads, dim = sizes
    gpu = world.device == "cuda"
    before = torch.cuda.memory_allocated() if gpu else 0
    leaves = [make(rows, heads, n, dim) for _ in range(3)] + [make(heads, rows, n)]
    leaves, dout = [x.requires_grad_() for x in leaves], make(rows, heads, n, dim)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    world.phase("inputs")
    if strategy == "one":
        out = flashsci.attention(*leaves[:3], bias=leaves[3])
    else:
        out = fd.triangle_attention(*leaves, mesh=mesh, strategy=strategy)
    world.phase("backward")
    torch.autograd.grad(out, leaves, dout)
    peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else 0.0)


def fitted(results: Results, options: argparse.Namespace, dim: int | None = None) -> cost.Machine:
    """The speeds with which the model comes nearest to the measurements: least squares of relative errors."""
    plain, rows, seconds = cost.Machine(), [], []
    for cell, found in results.cells.items():
        if isinstance(found, str) or cell.strategy == "torch" or dim not in (None, cell.dim):
            continue
        sizes = sizes_of(cell, options)
        for rank, forward in found.forward.items():
            both = found.step[rank]
            for back, trace in ((False, forward), (True, both[len(forward) :])):
                taken = sum(s.seconds for s in trace)
                work = [cost.Work(cell.call().pairs(0))]
                if cell.world > 1:
                    work = cost.work(cell.call(), sizes, cell.strategy, rank, back)
                operations = sum(w.operations(sizes, back) for w in work)
                moved = sum(w.moved for w in work) / plain.memory
                row = [0.0 if back else operations, operations if back else 0.0, sum(w.calls for w in work)]  # fmt: skip
                rows.append([x / taken for x in row])
                seconds.append((taken - moved) / taken)
    if not rows:
        return plain
    scale = torch.tensor([1e-12, 1e-12, 1e-3], dtype=torch.float64)  # of the unknowns
    every, target = torch.tensor(rows).double() * scale, torch.tensor(seconds).double()[:, None]
    solved = torch.linalg.lstsq(every, target).solution[:, 0]
    if solved[2] < 0:
        solved[:2] = torch.linalg.lstsq(every[:, :2], target).solution[:, 0]
        solved[2] = 0.0
    forward, backward, call = (solved * scale).tolist()
    if min(forward, backward) <= 0:  # for sizes at which only the calls take time
        return plain
    return cost.Machine(forward=1 / forward, backward=1 / backward, call=call)


def sizes_of(cell: Cell, options: argparse.Namespace) -> cost.Sizes:
    itemsize = 2 if options.device == "cuda" else 4
    return cost.Sizes(1, options.heads, options.heads_k, cell.dim, cell.dim, itemsize)


def lines(
    cell: Cell, results: Results, options: argparse.Namespace, machine: cost.Machine
) -> list[str]:
    """Rows of a cell, of its forward and of a training step."""
    found, one = results.cells[cell], results.cells[Cell(cell.seq, cell.dim, cell.causal)]
    head = f"| {cell.seq} | {cell.dim} | {'causal' if cell.causal else 'full'} |"
    if isinstance(found, str) or isinstance(one, str):
        said = found if isinstance(found, str) else "no time left"
        return [f"{head} | {cell.world} | {cell.strategy} | {said} |" + " |" * (5 + len(options.links))]  # fmt: skip
    rows = []
    for which in ("forward", "step"):
        traces = getattr(found, which)
        if not traces[0]:
            continue
        alone = one.seconds(which)[0]
        every = every_rank(traces, cell.world)
        busy = [sum(s.seconds for s in trace) for trace in every]
        times = [simulate(every, link * 1e9, options.latency) for link in options.links]
        ran = "" if len(traces) == cell.world else f" ({len(traces)})"
        rows.append(
            f"{head} {which} | {cell.world}{ran} | {cell.strategy}{chosen(cell, which, options, machine)} | {1e3 * max(busy):.2f} "
            f"| {100 * alone / sum(busy):.1f}% "
            f"| {sent(every)} |"
            + "".join(f" {1e3 * t:.2f}, {100 * alone / cell.world / t:.1f}% |" for t in times)
            + f" {model(cell, which, options, machine)} | {memory(cell, which, found, one, options)} |"
        )
    return rows


def chosen(cell: Cell, which: str, options: argparse.Namespace, machine: cost.Machine) -> str:
    """Whether ``auto`` would take this strategy."""
    if cell.world == 1:
        return ""
    allowed = strategies(cell.world, options)
    best = cost.choose(cell.call(), sizes_of(cell, options), allowed, which == "step", machine)
    return " *" if best == cell.strategy else ""


def short_table(results: Results, options: argparse.Namespace) -> list[str]:
    """For the documentation: the fastest of ours and torch's, with the first link."""
    rows = []
    for one in results.cells:
        alone = results.cells[one]
        if one.world > 1 or isinstance(alone, str):
            continue
        for which in ("forward", "step"):
            seconds = alone.seconds(which)[0]
            cells = [f"{1e3 * seconds:.1f} ms, {alone.memory[which == 'step']:.1f}"]
            for world in options.worlds:
                said = []
                for ours in (True, False):
                    found = [
                        (simulate(every_rank(getattr(f, which), world), options.links[0] * 1e9, options.latency), c, f)
                        for c, f in results.cells.items()
                        if (c.seq, c.dim, c.causal, c.world) == (one.seq, one.dim, one.causal, world)
                        and isinstance(f, Found) and getattr(f, which)[0] and (c.strategy != "torch") == ours
                    ]  # fmt: skip
                    if found:
                        taken, cell, best = min(found, key=lambda x: x[0])
                        said.append(
                            f"{cell.strategy} {100 * seconds / world / taken:.0f}%, {best.memory[which == 'step']:.1f}"
                        )
                cells.append("; ".join(said))
            mask = "causal" if one.causal else "full"
            rows.append(f"| {one.seq} | {one.dim} | {mask} | {which} | " + " | ".join(cells) + " |")
    return rows


def sent(traces: list[Trace]) -> str:
    """Megabytes of the rank that sends most, message by message."""
    of_rank = []
    for trace in traces:
        found: list[float] = []
        before = ""
        for step in trace:
            if step.what in ("send", "collective"):
                if step.what == "send" == before:
                    found[-1] += step.size / 1e6
                else:
                    found.append(step.size / 1e6)
            before = step.what
        of_rank.append(found)
    most = max(of_rank, key=sum)
    runs: list[list[float]] = []
    for size in most:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return " + ".join(f"{n:.0f} x {x:.3g}" if n > 1 else f"{x:.3g}" for n, x in runs)


def model(cell: Cell, which: str, options: argparse.Namespace, machine: cost.Machine) -> str:
    if cell.strategy in ("one", "torch"):
        return ""
    found = cost.predict(
        cell.call(), sizes_of(cell, options), cell.strategy, which == "step", machine
    )
    return f"{1e3 * found.seconds:.2f}"


def memory(cell: Cell, which: str, found: Found, one: Found, options: argparse.Namespace) -> str:
    place = which == "step"
    said = f"{found.memory[place]:.2f}; {one.memory[place]:.2f}"
    if cell.strategy == "torch" or cell.world == 1:
        return said
    sizes, call = sizes_of(cell, options), cell.call()
    rows, keys = call.queries.lengths[0], call.keys.lengths[0]
    own = sizes.queries(rows) + sizes.keys(keys)  # q, k, v, out
    own *= 2 if place else 1.5  # and dout, and gradients
    extra = cost.predict(call, sizes, cell.strategy, place).memory
    return f"{said}; {(own + extra) / 2**30:.2f}"


def head(options: argparse.Namespace) -> str:
    links = " | ".join(f"{link:g} GB/s" for link in options.links)
    columns = f"| S | D | mask | pass | ranks | strategy | slowest | work | sent, MB | {links} | model | GiB |"
    return columns + "\n" + "|---" * (11 + len(options.links)) + "|"


def said_of(machine: cost.Machine) -> str:
    return (
        f"forward {machine.forward / 1e12:.0f} TFLOP/s, backward {machine.backward / 1e12:.0f}, a call "
        f"{1e6 * machine.call:.0f} us"
    )


def main(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    if options.device == "cpu":
        torch.set_num_threads(1)
    begin = time.perf_counter()
    until = begin + 60 * options.minutes
    results = Results(wrong=small_calls(options))
    print(f"small calls: {len(results.wrong)} wrong, {time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
    try:
        triangles(options, results, until)
    except Exception as error:  # other measurements are printed all the same
        traceback.print_exc()
        results.wrong.append(f"triangles: {type(error).__name__}: {str(error)[:80]}")
    print(head(options), flush=True)
    run(options, results, until)
    done = [c for c, f in results.cells.items() if not isinstance(f, str)]
    machine = fitted(results, options)
    by_dim = {d: fitted(results, options, d) for d in options.dims if any(c.dim == d for c in done)}
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}, heads {options.heads} and {options.heads_k}")
    print(f"fitted: {said_of(machine)}")
    for dim, found in by_dim.items():
        print(f"  of D {dim} alone: {said_of(found)}")
    rows = [row for cell in results.cells for row in lines(cell, results, options, machine)]
    print(
        f"\nEfficiency and GiB of a rank at {options.links[0]:g} GB/s, the fastest of ours; torch's\n"
    )
    gpus = "".join(f" {world} GPUs |" for world in options.worlds)
    print(
        f"| S | D | mask | pass | one GPU |{gpus}\n|---|---|---|---|---|"
        + "---|" * len(options.worlds)
    )
    print("\n".join(short_table(results, options)))
    print("\n" + "\n".join([head(options), *rows]))
    print(f"\nTriangle attention, forward and backward, {options.links[0]:g} GB/s\n")
    print("| N | ranks | strategy | rank 0 computes, ms | predicted ms | efficiency | GiB |\n|---|---|---|---|---|---|---|")  # fmt: skip
    print("\n".join(results.triangles))
    for error in results.wrong:
        print("WRONG", error)
    if options.json:
        said = {
            "device": name, "torch": torch.__version__, "heads": [options.heads, options.heads_k],
            "machine": asdict(machine), "by_dim": {d: asdict(m) for d, m in by_dim.items()},
            "cells": [asdict(c) | (f._asdict() if isinstance(f, Found) else {"why": f}) for c, f in results.cells.items()],
        }  # fmt: skip
        options.json.write_text(json.dumps(said, default=lambda x: x._asdict()))
    return bool(results.wrong)


def parsed() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--seq", type=int, nargs="+", default=[32768, 65536, 131072, 524288])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=2048, help="rows and columns of a pair representation")  # fmt: skip
    parser.add_argument("--small", type=int, default=512, help="tokens of the calls that the oracle judges")  # fmt: skip
    parser.add_argument("--links", type=float, nargs="+", default=[300.0, 150.0], help="GB/s each way")  # fmt: skip
    parser.add_argument("--latency", type=float, default=cost.Machine().transfer, help="seconds of a message beside its bytes")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--no-torch", action="store_true", help="without torch's context parallelism")  # fmt: skip
    parser.add_argument("--json", type=Path, help="where everything that was measured goes, too")
    parser.add_argument("--tiny", action="store_true", help="small sizes, one round")
    options = parser.parse_args()
    if options.tiny:
        options.seq, options.dims, options.worlds, options.heads, options.heads_k = [96], [16], [2, 4], 8, 4  # fmt: skip
        options.pairs, options.small, options.rounds = 16, 64, 1
    return options


if __name__ == "__main__":
    sys.exit(main(parsed()))
