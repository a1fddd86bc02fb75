"""`python -m tools.bench.paged`: decoding from a paged KV cache, in bytes moved a second, against FlashAttention-3 and a copy.

Every sequence has one new token; lengths are all equal, or log-uniform up to a maximum. fa3 is scheduled anew
at every call, fa3-planned by a schedule made before, as vLLM makes one a step. A result is judged against the
fp64 oracle, in the shortest and the longest sequence, before it is timed; results that fail have no time.
Candidates are interleaved (timer.py).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time as clock
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashsci import records as records_file
from flashsci.testing import PagedInputs
from tools.bench import fa3, revision
from tools.bench.candidates import package_of
from tools.bench.inputs import Unsupported
from tools.bench.measure import environment, fatal, first_line
from tools.bench.timer import host_time, interleave

BATCHES = (1, 16, 64, 256)
LENGTHS = (1024, 8192, 32768, 131072)
SHARE_OF_MEMORY = 0.6  # share that a cache may take
FA3 = ("fa3", "fa3-planned")  # scheduled anew by every call, or once, as an engine does for a step


@dataclass(frozen=True)
class Cell:
    batch: int = 1
    longest: int = 1024
    spread: str = "equal"  # or "log-uniform", from 1/64 of the longest on
    cache: str = "bfloat16"
    dtype: str = "bfloat16"
    heads_q: int = 32
    heads_k: int = 8
    dim: int = 128
    page: int = 16

    @property
    def id(self) -> str:
        return f"paged-{self.cache}-b{self.batch}-{self.spread}-s{self.longest}"

    def lengths(self) -> list[int]:
        if self.spread == "equal":
            return [self.longest] * self.batch
        drawn = random.Random(self.batch)
        low = math.log(max(1, self.longest // 64))
        lengths = [round(math.exp(drawn.uniform(low, math.log(self.longest)))) for _ in range(self.batch)]
        return [*lengths[1:], self.longest]

    def bytes(self) -> int:
        """Least bytes moved: visible keys and values, q and out once."""
        cache, q = (getattr(torch, name).itemsize for name in (self.cache, self.dtype))
        kv = 2 * sum(self.lengths()) * self.heads_k * self.dim * cache
        return kv + 2 * self.batch * self.heads_q * self.dim * q


def cells() -> Iterator[Cell]:
    for cache in ("bfloat16", "float8_e4m3fn"):
        for batch in BATCHES:
            for longest in LENGTHS:
                for spread in ("equal", "log-uniform") if batch > 1 else ("equal",):
                    yield Cell(batch, longest, spread, cache)


def tiny() -> Iterator[Cell]:
    """A small cell, for machines without a GPU."""
    for cache in ("bfloat16", "float8_e4m3fn"):
        yield Cell(3, 64, "log-uniform", cache, heads_q=4, heads_k=2, dim=32)


def inputs_of(cell: Cell, device: torch.device) -> PagedInputs:
    """Pages in random order, keys and values in one row, the layout of vLLM."""
    random = torch.Generator(device).manual_seed(0)
    needed = [-(-length // cell.page) for length in cell.lengths()]
    order = torch.randperm(sum(needed), generator=random, device=device).to(torch.int32)
    table = torch.zeros(cell.batch, max(needed), dtype=torch.int32, device=device)
    for n, pages in enumerate(order.split(needed)):
        table[n, : len(pages)] = pages
    shape = (sum(needed), cell.page, cell.heads_k, 2 * cell.dim)
    joint = torch.empty(shape, dtype=getattr(torch, cell.cache), device=device)
    for part in joint.split(4096):  # an 8-bit cache is not drawn whole in fp32
        part.copy_(torch.randn(part.shape, generator=random, device=device))
    q = torch.randn(cell.batch, cell.heads_q, cell.dim, generator=random, device=device)
    options: dict[str, Any] = dict(
        block_table=table,
        seqused_k=torch.tensor(cell.lengths(), dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(cell.batch + 1, dtype=torch.int32, device=device),
        max_seqlen_q=1,
        causal=True,
        window=None,
    )
    if cell.cache != cell.dtype:
        options |= dict.fromkeys(("k_scale", "v_scale"), torch.ones((), device=device))
    return PagedInputs(q.to(getattr(torch, cell.dtype)), *joint.split(cell.dim, -1), options)


def candidates(cell: Cell, x: PagedInputs, names: list[str]) -> dict[str, Callable[[], Tensor]]:
    """The names that can run this call."""
    found: dict[str, Callable[[], Tensor]] = {}
    for name in names:
        try:
            found[name] = _fa3_of(cell, x, name) if name in FA3 else _ours(x, name)
        except Unsupported as reason:
            print(f"{cell.id}: no {name}: {reason}")
    return found


def _ours(x: PagedInputs, name: str) -> Callable[[], Tensor]:
    """One of our backends, never another in its place; or one of another revision."""
    package, backend = package_of(name)
    asked = package.explain(x.q, x.k_cache, x.v_cache, **x.options, backend=backend)
    if asked.reasons[backend] is not None:
        raise Unsupported(asked.reasons[backend])
    return partial(package.paged_attention, x.q, x.k_cache, x.v_cache, **x.options, backend=backend)


def _fa3_of(cell: Cell, x: PagedInputs, name: str) -> Callable[[], Tensor]:
    if cell.cache != cell.dtype:
        raise Unsupported("an 8-bit cache needs 8-bit queries there")
    return _fa3(fa3.load(os.environ.get(fa3.VARIABLE, "")), x, planned=name == "fa3-planned")


def _fa3(ops: Any, x: PagedInputs, planned: bool = False) -> Callable[[], Tensor]:
    """Its own choice of splits. `planned`: the schedule is made here, untimed, as vLLM makes one per step for
    all layers."""
    o = x.options
    shared = dict(
        cu_seqlens_q=o["cu_seqlens_q"],
        seqused_k=o["seqused_k"],
        max_seqlen_q=1,
        max_seqlen_k=int(o["seqused_k"].max()),
        is_causal=True,
        num_splits=0,
    )
    options = fa3.neutral(ops.fwd) | shared | {"page_table": o["block_table"], "softmax_scale": x.q.shape[-1] ** -0.5}
    if planned:
        plan = getattr(ops, "get_scheduler_metadata", None)
        if plan is None:
            raise Unsupported("this build has no get_scheduler_metadata")
        (batch, heads_q, dim), (_, page, heads_k, _) = x.q.shape, x.k_cache.shape
        sizes = dict(
            batch_size=batch,
            num_heads=heads_q,
            num_heads_k=heads_k,
            headdim=dim,
            headdim_v=dim,
            qkv_dtype=x.q.dtype,
            page_size=page,
        )
        try:
            options["scheduler_metadata"] = plan(**fa3.neutral(plan) | shared | sizes)
        except RuntimeError as error:  # the other candidates are timed
            if fatal(error):
                raise
            raise Unsupported(f"it could not plan: {first_line(error)}") from error

    def call() -> Tensor:
        out: Tensor = ops.fwd(x.q, x.k_cache, x.v_cache, **options)[0]
        return out

    return call


def problems(x: PagedInputs, out: Tensor) -> list[str]:
    """The errors in the shortest and the longest sequence."""
    used = x.options["seqused_k"]
    chosen = torch.stack((used.argmin(), used.argmax()))
    options = x.options | {"block_table": x.options["block_table"][chosen], "seqused_k": used[chosen]}
    options["cu_seqlens_q"] = x.options["cu_seqlens_q"][:3].clone()
    if x.q.shape[0] == 1:  # both are one
        chosen = chosen[:1]
        options |= {n: options[n][:1] for n in ("block_table", "seqused_k")}
    part = PagedInputs(x.q[chosen], x.k_cache, x.v_cache, options)
    judge = part.judge(fused=True).judge
    found = judge.judge("out", out[chosen])
    return [found.problem] if found.problem else []


def judged(x: PagedInputs, function: Callable[[], Tensor]) -> list[str]:
    """The errors of a candidate, exceptions included."""
    try:
        return problems(x, function())
    except Exception as error:  # the error of one candidate: the others are timed
        if fatal(error):
            raise
        return [f"it raised: {first_line(error)}"]


def measure(cell: Cell, names: list[str], device: torch.device, seconds: float, host: bool = False) -> list[dict]:
    """A record for each candidate, and one of a copy of the same number of bytes. host: with the host's cost
    of a call."""
    x = inputs_of(cell, device)
    functions: dict[str, Callable[[], object]] = {}
    for name, function in candidates(cell, x, names).items():
        wrong = judged(x, function)
        if wrong:
            print(f"{cell.id}: {name} is wrong and not timed: {wrong}")
        else:
            functions[name] = function
    half = torch.empty(cell.bytes() // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(half)
    functions["copy"] = partial(target.copy_, half)
    times = interleave(functions, device, seconds)
    on_host = host_time(functions, device, seconds, 20) if host else {}
    records = []
    for name, time in times.items():
        rate = cell.bytes() / time.median
        share = times["copy"].median / time.median
        records.append({"case": asdict(cell) | {"id": cell.id}, "backend": name, "seconds": asdict(time), "bytes": cell.bytes(),
                        "bytes_per_second": rate, "share_of_copy": share})  # fmt: skip
        more = ""
        if name in on_host:
            records[-1]["host_seconds"] = asdict(on_host[name])
            more = f"{1e6 * on_host[name].median:10.1f} us of the host"
        print(
            f"{cell.id:<48}{name:<12}{1e6 * time.median:10.1f} us{rate / 1e9:10.0f} GB/s{share:8.0%}{more}",
            flush=True,
        )
    return records


def table(records: list[dict]) -> str:
    """A line for each case: microseconds of each candidate, and its share of the copy's speed."""
    names = list(dict.fromkeys(r["backend"] for r in records))
    cells: dict[str, dict[str, str]] = {}
    for r in records:
        text = f"{1e6 * r['seconds']['median']:.1f} us, {r['share_of_copy']:.0%}"
        cells.setdefault(r["case"]["id"], {})[r["backend"]] = text
    lines = [f"| case | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {case} | {' | '.join(by.get(n, '-') for n in names)} |" for case, by in cells.items()]
    return "\n".join(lines)


def gains(records: list[dict]) -> str:
    """How many times as fast each candidate is with an 8-bit cache as with a 16-bit one, a line for each pair of cases."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for r in records:
        case = r["case"]
        rest = f"b{case['batch']}-{case['spread']}-s{case['longest']}"
        times.setdefault((rest, r["backend"]), {})[case["cache"]] = r["seconds"]["median"]
    found: dict[str, list[str]] = {}
    for (rest, name), by in times.items():
        narrow = [s for cache, s in by.items() if "float8" in cache]
        wide = [s for cache, s in by.items() if "float8" not in cache]
        if narrow and wide:
            found.setdefault(rest, []).append(f"{name} {wide[0] / narrow[0]:.2f}")
    return "\n".join(f"8 bits against 16, {rest}: {', '.join(by)}" for rest, by in found.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.paged", description=__doc__)
    parser.add_argument("--backends", default=f"triton,cuda,{','.join(FA3)}", help="comma-separated")
    parser.add_argument("--base", help="another revision, a folder or a commit: its backends are named cuda@base")
    parser.add_argument("--case", default="", help="only cases whose name has this")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    parser.add_argument(
        "--json",
        type=Path,
        help="where the records go (not reports/bench/*/, whose files are records of cases)",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--host", action="store_true", help="measure what a call costs the host")
    parser.add_argument("--tiny", action="store_true", help="one small case of each cache")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU here (--device cpu --tiny tries the program itself)")
    if options.base:
        revision.load(options.base, kernels=device.type == "cuda")
    most = SHARE_OF_MEMORY * torch.cuda.mem_get_info()[1] if device.type == "cuda" else math.inf
    records: list[dict] = []
    until = clock.monotonic() + 60 * options.minutes
    try:
        for cell in tiny() if options.tiny else cells():
            if options.case not in cell.id:
                continue
            if clock.monotonic() >= until:
                print(f"{cell.id} and what follows: no time left")
                break
            if 2 * cell.bytes() > most:  # the cache, and the source of the copy
                print(f"{cell.id}: left out, it does not fit into the memory")
                continue
            try:
                records += measure(cell, options.backends.split(","), device, options.seconds, options.host)
            except Exception as error:
                if fatal(error):
                    raise
                print(f"{cell.id} is not measured: {first_line(error)}", flush=True)
            if options.json:
                found = {"environment": environment(device), "records": records}
                options.json.parent.mkdir(parents=True, exist_ok=True)
                records_file.write(options.json, found)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    finally:
        if records:
            print(f"\n{table(records)}\n\n{gains(records)}", flush=True)
    return int(not records)


if __name__ == "__main__":
    sys.exit(main())
