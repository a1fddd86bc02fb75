"""A profile of a model's step on flashsci and as its client runs it: kernels, and host time of calls. Needs a GPU.

python -m tools.bench.profile_models swin-inference bf16
python -m tools.bench.profile_models boltz-pairformer bf16 --backend cuda --rows 20
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import flashsci
from flashsci.call.plans import Plan
from flashsci.choice import differentiate
from tools.bench.inputs import DTYPES
from tools.models import MODELS, load, served
from tools.models.step import Way, replaced

DEVICE = torch.device("cuda")


@contextmanager
def clocked(owner: Any, name: str, samples: list[float], **given: Any) -> Iterator[None]:
    """Microseconds of the host in each call of a function, with optional extra arguments."""
    function = getattr(owner, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **options, **given)
        samples.append(1e6 * (time.perf_counter() - start))
        return result

    with replaced((owner, name, timed)):
        yield


def host(way: Way, backend: str) -> str:
    """A few steps: the whole, and its calls of attention, by the host's clock."""
    forward: list[float] = []
    backward: list[float] = []
    sdpa: list[float] = []
    whole: list[float] = []
    ours = replaced((served, "flashsci", _Chosen(backend, forward)))
    with ours, clocked(Plan, "backward", backward), clocked(differentiate, "backward", backward), clocked(torch.nn.functional, "scaled_dot_product_attention", sdpa):  # fmt: skip
        for turn in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            way()
            torch.cuda.synchronize()
            if turn >= 4:
                whole.append(1e3 * (time.perf_counter() - start))
            else:
                for samples in (forward, backward, sdpa):
                    samples.clear()
    parts = [f"step {statistics.median(whole):.2f} ms"]
    for what, samples in (("attention", forward), ("its backward kernels", backward), ("SDPA", sdpa)):  # fmt: skip
        if samples:
            parts.append(f"{what} {statistics.median(samples):.0f} us of the host x {len(samples) // 8}")  # fmt: skip
    return ", ".join(parts)


class _Chosen:
    """flashsci as the patches call it, by one backend, with the host's time of each call."""

    def __init__(self, backend: str, samples: list[float]) -> None:
        self.attention = self._timed(flashsci.attention, backend, samples)
        self.varlen_attention = self._timed(flashsci.varlen_attention, backend, samples)

    @staticmethod
    def _timed(function: Callable[..., Any], backend: str, samples: list[float]) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **options, backend=backend)
            samples.append(1e6 * (time.perf_counter() - start))
            return result

        return timed


def kernels(way: Way, backend: str, rows: int) -> list[str]:
    """The longest kernels of one step."""
    with replaced((served, "flashsci", _Chosen(backend, []))):
        way()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            way()
            torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(event.self_device_time_total)
    total, launches = sum(map(sum, times.values())), sum(map(len, times.values()))
    lines = [f"  GPU {total / 1e3:.2f} ms in {launches} launches"]
    for name, each in sorted(times.items(), key=lambda x: -sum(x[1]))[:rows]:
        lines.append(f"  {sum(each):9.0f} us {len(each):5d} x  {name[:110]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("step", help="by its id, as in docs/develop/models.md")
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", type=int, default=12, help="kernels to show")
    parser.add_argument("--no-client", action="store_true", help="flashsci alone")
    given = parser.parse_args()
    model = next((name for name in MODELS if given.step.split("-")[0] == name), None)
    if model is None:
        raise SystemExit(f"no model of a step {given.step!r}; there are {', '.join(MODELS)}")
    steps = {step.id: step for step in load(model).build("real", DTYPES[given.dtype], DEVICE)}
    if given.step not in steps:
        raise SystemExit(f"no step {given.step!r}; there are {', '.join(steps)}")
    step = steps[given.step]
    ways = {f"flashsci, {given.backend}": step.ours}
    if not given.no_client:
        ways = {"client": step.client, **ways}
    for name, way in ways.items():
        print(f"{step.id}, {given.dtype}, {name}: {host(way, given.backend)}")
        print("\n".join(kernels(way, given.backend, given.rows)), flush=True)


if __name__ == "__main__":
    main()
