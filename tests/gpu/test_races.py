"""Every kernel instance a hundred times over: the same bits where they are promised, within the bound each time where not.

tests/race_cases.py has the calls (from the table of compiled kernels) and their shapes: many short tiles, empty tiles
first and last, one tile, one more than multiprocessors, rings that go round. Half of the repeats run beside other
kernels on a second stream. The first run of each is judged; outputs and workspaces hold NaN before every run. Raw ops
are called, each held to its generation: no other kernel can step in. The host waits once for each call.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import race_cases as races
import torch
from race_cases import Call, Shape
from torch import Tensor

from flashsci import ops, registry
from flashsci.backends import cuda as backend
from flashsci.testing import Inputs, Judge, evaluate, exact_matmul, poisoned_memory

pytestmark = pytest.mark.gpu
REPEATS = int(os.environ.get("FLASHSCI_RACE_REPEATS", "100"))
SOFTCAP = 5.0
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 2


def unavailable(generation: str, dtype: str) -> str | None:
    """Why this machine cannot run a generation's kernels, or None."""
    if generation in registry.BACKENDS:
        return registry.BACKENDS[generation].unavailable()
    reason = backend.unavailable()
    if reason is not None:
        return reason
    suffix = next(s for s, d in races.DTYPES.items() if d == dtype)
    unit = f"cuda/{generation}/fwd_{suffix}"
    if unit not in (backend.build_info() or {}).get("units", {}):
        return f"this build has no {unit}"
    major, minor = torch.cuda.get_device_capability()
    if major != 9 if generation == "sm90" else 10 * major + minor < int(generation[2:]):
        return f"{generation} does not run on {torch.cuda.get_device_name()}"
    return None


def require(generation: str, dtype: str) -> None:
    """A generation that this machine lacks is a reason to skip, never a pass."""
    reason = unavailable(generation, dtype)
    if reason is not None:
        pytest.skip(f"{generation}: {reason}")


# --- one call ----------------------------------------------------------------------------------


def draw(call: Call, shape: Shape) -> Inputs:
    """The tensors of a call, as the public functions take them."""
    generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(f"{call} {shape.name}".encode()))
    dtype = getattr(torch, call.dtype)

    def rand(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, device=DEVICE, generator=generator).to(dtype)

    def sizes(heads: int, seq: int, dim: int) -> tuple[int, ...]:
        return (seq, heads, dim) if call.packed else (shape.batch, heads, seq, dim)

    def pairs(kind: str | None) -> tuple[int, ...]:
        rows = {
            "own": (shape.batch, shape.heads, shape.seq_q),
            "shared": (1, shape.heads, shape.seq_q),
            "keys": (shape.batch, 1, 1),
        }
        return (*rows[str(kind)], shape.seq_k)

    bias = mask = None
    if call.bias is not None:
        bias = rand(*pairs(call.bias), dtype=torch.float32 if call.bias_fp32 else dtype)
    if call.mask is not None:
        mask = torch.rand(*pairs(call.mask), device=DEVICE, generator=generator) < 0.75
        mask[..., 0] = True
    causal = call.causal and shape.window == (-1, -1)
    options = {
        "causal": causal,
        "window": None if causal or not call.causal else shape.window,
        "align": "lower_right" if shape.lower_right else "upper_left",
        "softcap": SOFTCAP if call.softcap else None,
    }

    def offsets(lens: tuple[int, ...]) -> Tensor | None:
        starts = torch.tensor((0, *lens), device=DEVICE).cumsum(0)
        return starts.to(torch.int32) if call.packed else None

    return Inputs(
        q=rand(*sizes(shape.heads, shape.seq_q, call.head_dim)),
        k=rand(*sizes(shape.heads_k, shape.seq_k, call.head_dim)),
        v=rand(*sizes(shape.heads_k, shape.seq_k, call.head_dim_v)),
        dout=rand(*sizes(shape.heads, shape.seq_q, call.head_dim_v))
        if call.has_backward and not shape.forward_only
        else None,
        bias=bias,
        mask=mask,
        cu_seqlens_q=offsets(shape.lens_q),
        cu_seqlens_k=offsets(shape.lens_k),
        options=options,
    )


class Kernels:
    """The raw ops of one call. Results have the shapes that the public functions give them."""

    def __init__(self, call: Call, shape: Shape, inputs: Inputs):
        self.call, self.inputs = call, inputs
        self.q, self.k, self.v = (self._swap(x) for x in (inputs.q, inputs.k, inputs.v))
        self.dout = None if inputs.dout is None else self._swap(inputs.dout)
        causal, window = inputs.options["causal"], inputs.options["window"]
        left, right = (-1, 0) if causal else window or (-1, -1)
        longest = (max(shape.lens_q), max(shape.lens_k)) if shape.known else (-1, -1)
        scale, softcap = call.head_dim**-0.5, inputs.options["softcap"] or 0.0
        self.scalars = (*longest, scale, softcap, left, right, shape.lower_right)
        self.offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        self.tensors = ops.Tensors(
            self.q, self.k, self.v, inputs.bias, None, inputs.mask, *self.offsets
        )
        self.need = ops.NEED_Q | ops.NEED_K | ops.NEED_V
        self.need |= ops.NEED_BIAS if inputs.bias is not None else 0

    def _swap(self, x: Tensor) -> Tensor:
        """Packed: [T, H, D] as [H, T, D], which the ops take, and back."""
        return x.transpose(0, 1) if self.call.packed else x

    def forward(self) -> dict[str, Tensor]:
        x = self.inputs
        if self.call.generation in registry.BACKENDS:
            out, lse = (
                registry.BACKENDS[self.call.generation]
                .load()
                .forward(self.tensors, ops.Scalars(*self.scalars, 0.0, "default", True))
            )
        else:
            out, lse = torch.ops.flashsci.cuda_forward.default(
                self.q, self.k, self.v, x.bias, x.mask, *self.offsets,
                *self.scalars, False, int(self.call.generation[2:]),
            )  # fmt: skip
        return {"out": self._swap(out), "lse": lse}

    def backward(
        self, results: dict[str, Tensor], deterministic: bool, need: int | None = None
    ) -> dict[str, Tensor]:
        x, need = self.inputs, self.need if need is None else need
        out, lse = self._swap(results["out"]), results["lse"]
        if self.call.generation in registry.BACKENDS:
            scalars = ops.Scalars(*self.scalars, 0.0, "default", deterministic)
            saved = ops.Saved(self.tensors, out, lse, scalars)
            module = registry.BACKENDS[self.call.generation].load()
            gradients = module.backward(self.dout, None, saved, need)
        else:
            gradients = torch.ops.flashsci.cuda_backward.default(
                self.dout, None, self.q, self.k, self.v, x.bias, x.mask, *self.offsets,
                out, lse, *self.scalars, False, deterministic, int(self.call.generation[2:]), need,
            )  # fmt: skip
        bits = (ops.NEED_Q, ops.NEED_K, ops.NEED_V, ops.NEED_BIAS)
        found = zip(("dq", "dk", "dv", "dbias"), bits, gradients[:4], strict=True)
        return {n: g if n == "dbias" else self._swap(g) for n, bit, g in found if need & bit}


# --- repeats -----------------------------------------------------------------------------------


def words(x: Tensor) -> Tensor:
    """Bits, of which NaN equals itself."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


@functools.cache
def _noise() -> tuple[torch.cuda.Stream, Tensor, Tensor, Tensor, Tensor]:
    a = torch.randn(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    big = torch.empty(1 << 22, device=DEVICE)
    torch.cuda.synchronize()
    return torch.cuda.Stream(), a, torch.empty_like(a), big, torch.empty_like(big)


def disturb(time: int) -> None:
    """A kernel on a second stream: a product that fills multiprocessors, or a copy that fills the memory's."""
    if not ON_GPU:
        return
    stream, a, product, big, copy = _noise()
    with torch.cuda.stream(stream):
        if time % 2:
            torch.mm(a, a, out=product)
        else:
            copy.copy_(big)


@contextmanager
def fresh_memory() -> Iterator[None]:
    """What kernels allocate holds NaN, so that what they leave unwritten is not the last run's."""
    with poisoned_memory(cuda_bytes=0):
        yield


class Repeats:
    """What a hundred runs show, without waiting for any."""

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}
        self.excess: dict[str, tuple[Tensor, float]] = {}

    def same(self, label: str, first: dict[str, Tensor], run: Callable[[], dict[str, Tensor]]) -> None:  # fmt: skip
        """Bitwise."""
        counts = {n: torch.zeros((), dtype=torch.int64, device=DEVICE) for n in first}
        for time in range(REPEATS):
            if 2 * time >= REPEATS:
                disturb(time)
            for name, x in run().items():
                counts[name] += torch.ne(words(x), words(first[name])).any()
        self.counts.update({f"{label}: {n}": x for n, x in counts.items()})

    def bounded(self, label: str, judge: Judge, run: Callable[[], dict[str, Tensor]], first: dict[str, Tensor]) -> None:  # fmt: skip
        """Within what the judge allows, of largest errors."""
        worst = {n: torch.zeros((), dtype=torch.float64, device=DEVICE) for n in first}
        wide = torch.float64 if judge.inputs.q.dtype == torch.float32 else torch.float32
        truth = {n: judge.truth[n].to(wide) for n in first}
        for time in range(REPEATS):
            if 2 * time >= REPEATS:
                disturb(time)
            for name, x in run().items():
                error = (x.to(wide) - truth[name]).abs().max() if x.numel() else worst[name]
                worst[name] = torch.maximum(worst[name], error.double())  # NaN stays
        for name, x in worst.items():
            self.excess[f"{label}: {name}"] = x, judge.judge(name, first[name]).allowed

    def problems(self) -> list[str]:
        """With one wait for the device."""
        counted, exceeded = list(self.counts), list(self.excess)
        numbers = torch.stack(
            [
                *(self.counts[n].double() for n in counted),
                *(self.excess[n][0] for n in exceeded),
            ]
        ).tolist()
        found = [
            f"{name} differs in {n:.0f} of {REPEATS} repeats"
            for name, n in zip(counted, numbers, strict=False)
            if n
        ]
        for name, error in zip(exceeded, numbers[len(counted) :], strict=True):
            allowed = self.excess[name][1]
            if not error <= allowed:  # nor NaN
                found.append(
                    f"{name} is off by {error:.3g} in some of {REPEATS} repeats, allowed {allowed:.3g}"
                )
        return found


def beyond(inputs: Inputs, out: Tensor, allowed: float) -> list[str]:
    """Whether an output is further from plain PyTorch in fp32 than twice what a judge of some batch entries allows."""
    with exact_matmul():
        plain = evaluate(inputs.to(torch.float32), "reference")["out"]
    error = (out.float() - plain).abs().max().item()
    if error <= 2 * allowed:
        return []
    return [f"out: off by {error:.3g} from plain fp32, allowed {2 * allowed:.3g}"]


def entries(inputs: Inputs, count: int | None) -> Inputs:
    """The first batch entries of a call without pairs."""
    dout = None if inputs.dout is None else inputs.dout[:count]
    return replace(inputs, q=inputs.q[:count], k=inputs.k[:count], v=inputs.v[:count], dout=dout)


def run_call(call: Call) -> None:
    """All shapes of a call: judged once, then a hundred times."""
    repeats, problems = Repeats(), []
    with torch.no_grad():
        for shape in races.shapes(call, PROCESSORS):
            inputs = draw(call, shape)
            kernels = Kernels(call, shape, inputs)
            with torch.enable_grad():
                judge = Judge(inputs if shape.judged is None else entries(inputs, shape.judged))
            with fresh_memory():
                first = kernels.forward()
            findings = judge.findings({n: x[: shape.judged] for n, x in first.items()})
            if shape.judged is not None:
                found = beyond(inputs, first["out"], findings[0].allowed)
                problems += [f"{shape.name}: {problem}" for problem in found]
            gradients = {}
            if kernels.dout is not None:
                for deterministic in (False, True):
                    with fresh_memory():
                        gradients[deterministic] = kernels.backward(first, deterministic)
                    findings += judge.findings(gradients[deterministic])
            problems += [f"{shape.name}: {f.problem}" for f in findings if f.problem]
            with fresh_memory():
                repeats.same(shape.name, first, kernels.forward)
                if gradients:
                    turns = functools.partial(kernels.backward, first, True)
                    repeats.same(f"{shape.name}, in turns", gradients[True], turns)
                    free = functools.partial(kernels.backward, first, False)
                    repeats.bounded(f"{shape.name}, any order", judge, free, gradients[False])
        problems += repeats.problems()
    assert not problems, f"{call}\n" + "\n".join(problems)


CALLS = races.all_calls()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_hundred_repeats(call):
    require(call.generation, call.dtype)
    run_call(call)


@pytest.mark.parametrize(
    ("generation", "dtype"),
    list(dict.fromkeys((i.generation, i.dtype) for i in races.instances())),
)
def test_the_calls_launch_every_instance(generation, dtype):
    """The claims of race_cases.py, held against what the profiler sees."""
    require(generation, dtype)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the instances are those that Hopper devices launch")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad(), torch.profiler.profile(activities=activities) as profile:
        for call in CALLS:
            if (call.generation, call.dtype) != (generation, dtype):
                continue
            for shape in races.shapes(call, PROCESSORS):
                kernels = Kernels(call, shape, draw(call, shape))
                first = kernels.forward()
                if kernels.dout is not None:
                    for deterministic in (False, True):
                        kernels.backward(first, deterministic)
                    kernels.backward(first, False, need=ops.NEED_Q)
        torch.cuda.synchronize()
    names = {event.name for event in profile.events() if "flashsci" in event.name}
    found = races.launched(names, dtype)
    # An instance that a Hopper call hands to sm80 (bias_gradient) counts there.
    missing = [
        i for i in races.instances() if (i.generation, i.dtype) == (generation, dtype) and i not in found
    ]  # fmt: skip
    assert not missing, f"no call launched {missing}; seen: {sorted(names)}"
