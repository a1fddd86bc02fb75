"""A sweep of tile sizes of the Triton kernels, first and second order, each kernel alone. Needs a GPU.

    python -m tools.kernels.triton_tiles dense-d64 order2-tf32          sweeps by their names in SWEEPS, best tiles first
    python -m tools.kernels.triton_tiles bias --kernels dq,dkdv

The table in flashsci/backends/triton/tilings.py comes from here. A configuration is (BLOCK_M, BLOCK_N, warps,
stages[, registers a thread]); for the kernel of whole small sequences it is (tile side, warps[, registers a
thread]). Compiling takes longer than running: a pool of processes first fills Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.groups import Operands, TangentOperands
from flashsci.backends.triton.plans import dense, second_order
from flashsci.call.ops import Saved, Scalars, Tensors
from tools.bench.cases import CASES, Case
from tools.bench.inputs import flops, make_inputs
from tools.bench.timer import interleave

DEVICE = torch.device("cuda")
Config = tuple[int, ...]

SHORT = {
    case.id: case
    for case in (
        Case("short-bf16-d32", "tiny", B=16384, H=8, Sq=30, Sk=30, D=32),
        Case("short-fp32-d64", "tiny", "fp32", B=4096, H=8, Sq=25, Sk=25, D=64),
        Case("short-bf16-d64", "tiny", B=8192, H=8, Sq=60, Sk=60, D=64),
        Case("order2-bf16-d128-s8192", "order2", "bf16", H=8, Sq=8192, Sk=8192, D=128, order=2),
    )
}
PAIRS = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 2), (128, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2),
         (64, 128, 4, 2), (32, 64, 4, 3), (32, 128, 4, 2), (64, 64, 8, 2)]  # fmt: skip
FP32 = [(64, 32, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1), (32, 64, 4, 1), (128, 32, 8, 1), (64, 32, 4, 2), (32, 32, 2, 1), (64, 64, 8, 1),
        (32, 32, 4, 2), (64, 16, 4, 2), (16, 64, 4, 2), (64, 32, 2, 1), (128, 32, 4, 1)]  # fmt: skip
SECOND = {
    "jvp": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)],
    "double_backward_queries": [(64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2)],
    "double_backward_keys": [(64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 2), (64, 128, 8, 2), (16, 64, 4, 3)],
}  # fmt: skip
# Name: cases, precision, configurations of each kernel.
SWEEPS: dict[str, tuple[tuple[str, ...], str, dict[str, list[Config]]]] = {
    "dense-d64": (("dense-bf16-d64-full-s16384", "dense-bf16-d64-causal-s16384"), "default", {
        "forward": [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3)],
        "dq": [(128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3, 128)],
        "dkdv": [(64, 64, 4, 3), (64, 64, 4, 3, 168), (64, 64, 4, 4)],
    }),
    "dense-d128": (("dense-bf16-d128-full-s16384", "dense-bf16-d128-causal-s16384"), "default", {
        "forward": [(128, 128, 8, 3), (64, 64, 4, 3)],
        "dq": [(128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 3, 128)],
        "dkdv": [(64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3)],
    }),
    "bias": (("triangle-bf16-s384", "af3-pair"), "default", dict.fromkeys(("forward", "dq", "dkdv", "bias_gradient"), PAIRS)),
    "fp32": (("dense-fp32-d64-full-s2048", "dense-fp32-d128-full-s2048", "triangle-fp32-s384"), "default",
             dict.fromkeys(("forward", "dq", "dkdv", "bias_gradient"), FP32)),
    "tiny": (("pet-md-4096", "short-bf16-d32", "short-fp32-d64"), "default", {
        "forward": [(32, 32, 1, 1), (32, 32, 1, 2), (32, 32, 2, 1), (32, 32, 2, 2), (32, 32, 4, 1), (32, 32, 2, 1, 96)],
        "small": [(32, 1), (32, 2), (32, 4), (32, 2, 168), (32, 2, 128), (32, 4, 128), (32, 4, 96)],
    }),
    "tiny-s60": (("short-bf16-d64",), "default", {
        "forward": [(64, 64, 1, 1), (64, 64, 1, 2), (64, 64, 2, 1), (64, 64, 2, 2), (64, 64, 4, 1), (64, 64, 2, 1, 96)],
        "small": [(64, 1), (64, 2), (64, 4), (64, 2, 168), (64, 2, 128), (64, 4, 128), (64, 4, 96)],
    }),
    "order2-bf16": (("order2-bf16-s8192", "order2-bf16-d128-s8192"), "default", SECOND),
    "order2-tf32x3": (("order2-fp32-s2048",), "tf32x3", {
        "dkdv": [(32, 32, 2, 1), (32, 32, 4, 2)],
        "jvp": [(64, 32, 4, 1), (128, 64, 8, 1)],
        "double_backward_queries": [(32, 32, 4, 1), (64, 32, 4, 1), (128, 32, 8, 1)],
        "double_backward_keys": [(32, 32, 4, 1), (32, 32, 4, 2)],
    }),
    "order2-tf32": (("order2-fp32-s2048",), "tf32", {
        "dkdv": [(32, 32, 2, 1), (64, 64, 4, 1)],
        "jvp": [(64, 32, 4, 1), (64, 64, 4, 2), (128, 64, 8, 2)],
        "double_backward_queries": [(32, 32, 4, 1), (128, 32, 8, 1), (128, 32, 8, 2)],
        "double_backward_keys": [(32, 32, 4, 1), (32, 32, 4, 2), (64, 32, 8, 1), (64, 32, 4, 1)],
    }),
}  # fmt: skip
# Work of a kernel over that of the forward, two products.
PRODUCTS = {"forward": 1.0, "dq": 1.5, "dkdv": 2.0, "jvp": 2.5, "double_backward_queries": 3.5, "double_backward_keys": 4.0}  # fmt: skip


@contextmanager
def configured(kernel: str, config: Config, plans: Callable[..., dense.DensePlan]) -> Iterator[None]:
    """Launches decided here have this configuration, of this kernel; `plans` keeps them."""
    name = "small_config" if kernel == "small" else "config"
    honest, shared = getattr(tilings, name), dense.plan
    replaced = lambda *a: config if kernel in ("small", a[0]) else honest(*a)  # noqa: E731
    setattr(tilings, name, replaced)
    dense.plan = plans
    try:
        yield
    finally:
        setattr(tilings, name, honest)
        dense.plan = shared


def case_of(id: str) -> Case:
    return SHORT.get(id) or CASES[id]


def shares(case: Case) -> bool:
    """Whether it has a bias whose gradient is a sum: the case of the kernel `bias_gradient`."""
    return case.bias is not None and case.bias != (*case.batch, case.H, case.Sq, case.Sk)


class Problem:
    """A case, and each kernel's launch for it."""

    def __init__(self, id: str, precision: str):
        self.case = case_of(id)
        x = make_inputs(self.case, DEVICE).detached()
        self.q, self.k, self.v, self.bias, self.dout = x.q, x.k, x.v, x.bias, x.dout
        self.tensors = Tensors(x.q, x.k, x.v, x.bias, None, x.mask)
        self.options = (self.case.D**-0.5, 0.0, -1, 0 if self.case.causal else -1, False, 0.0, precision)
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[Tensor, Tensor]:
        return dense.forward(self.tensors, Scalars(-1, -1, *self.options, False))

    def backward(self, need: int) -> tuple[Tensor, ...]:
        scalars = Scalars(-1, -1, *self.options, False)
        return dense.backward(self.dout, None, Saved(self.tensors, self.out, self.lse, scalars), need)

    def launch(self, kernel: str, config: Config) -> tuple[Callable[[], Any], Tensor | None]:
        """(run, a result that it fills)."""
        plans = functools.lru_cache(dense.DensePlan)
        if self.case.order > 1:
            with configured(kernel, config, plans):
                return self.alone(kernel)
        own = self.bias is not None and not shares(self.case)  # written by the kernel of dQ
        need = {"dq": 9 if own else 1, "dkdv": 6, "bias_gradient": 8, "small": 15}

        def run() -> None:
            with configured(kernel, config, plans):
                _ = self.forward() if kernel == "forward" else self.backward(need[kernel])

        return run, None

    def alone(self, kernel: str) -> tuple[Callable[[], Any], Tensor]:
        """One kernel of the second order, or dK and dV, on numbers of any kind."""
        torch.manual_seed(0)
        q, k, v, dout, out = self.q, self.k, self.v, self.dout, self.out
        tq, tk, tv, result, other = (torch.randn_like(q) for _ in range(5))
        mean, delta, zeta = (torch.randn_like(self.lse) for _ in range(3))
        inputs, tangents = Operands(q, k, v, *(None,) * 8), TangentOperands(tq, tk, tv, None, None)
        second = second_order.second_order_of(inputs, tangents, dout, out, 0, self.options)
        common = (inputs, tangents, self.lse, dout, mean, delta, zeta)
        if kernel == "dkdv":
            run = second.plan.dkdv(result, other, False)
            given = (inputs, dout, self.lse, delta, result, other, None, None)
        elif kernel == "jvp":
            run = second.jvp(result)
            given = (inputs, tangents, out, self.lse, dout, None, result, mean, delta, zeta)
        elif kernel == "double_backward_queries":
            run, given = second.queries(result, 0, None), (*common, result, None)
        else:
            run, given = second.keys(result, other, False), (*common, result, other, None, None)
        return functools.partial(run, *given), result


Job = tuple[str, str, str, Config]  # case, precision, kernel, configuration


def warm(job: Job) -> str | None:
    """Compile; returns the reason why it cannot, or None."""
    id, precision, kernel, config = job
    try:
        Problem(id, precision).launch(kernel, config)[0]()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__} {str(error)[:150]}"
    return None


def sweep(id: str, precision: str, kernel: str, configs: list[Config], seconds: float) -> None:
    problem = Problem(id, precision)
    runs, away, first = {}, {}, None
    for config in configs:
        runs[config], result = problem.launch(kernel, config)
        runs[config]()
        if result is not None:
            first = result.double() if first is None else first
            away[config] = ((result.double() - first).norm() / first.norm()).item()
    times = {config: t.median for config, t in interleave(runs, DEVICE, seconds).items()}
    work = flops(problem.case, DEVICE, 0) * PRODUCTS.get(kernel, 0.0)
    print(f"{id}, {precision}, {kernel}:")
    for config in sorted(configs, key=times.get):
        rate = f" {work / times[config] * 1e-12:6.0f} TFLOP/s" if work else ""
        other = f", {away[config]:.1e} from the first" if config in away else ""
        print(f"    {config!s:22} {times[config] * 1e6:9.1f} us{rate}{other}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", choices=list(SWEEPS))
    parser.add_argument("--kernels", default="", help="comma-separated; default all of a sweep")
    parser.add_argument("--seconds", type=float, default=1.0, help="a case and kernel")
    options = parser.parse_args()
    only = options.kernels.split(",") if options.kernels else PRODUCTS.keys() | {"bias_gradient", "small"}
    rows = [
        (id, precision, kernel, configs)
        for cases, precision, kernels in map(SWEEPS.get, options.sweeps)
        for id in cases
        for kernel, configs in kernels.items()
        if kernel in only and (kernel != "bias_gradient" or shares(case_of(id)))
    ]
    jobs = [(*row, config) for *row, configs in rows for config in configs]
    start = time.time()
    workers = min(15, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = {j: why for j, why in zip(jobs, pool.map(warm, jobs, chunksize=1), strict=True) if why}
    print(f"{len(jobs)} launches compiled in {time.time() - start:.0f} s")
    for job, why in failed.items():
        print("cannot run", *job, why)
    for id, precision, kernel, configs in rows:
        able = [config for config in configs if (id, precision, kernel, config) not in failed]
        if able:
            sweep(id, precision, kernel, able, options.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
