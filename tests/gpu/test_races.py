"""Every kernel instance a hundred times over, small calls five hundred times: the same bits where they are promised, within the
bound each time where not.

tests/support/race_cases.py has the calls (from the table of compiled kernels) and their shapes: many short tiles, empty tiles
first and last, one tile, one more than multiprocessors, rings that go round. Half of the repeats run beside other
kernels on a second stream. The first run of each is judged; outputs and workspaces hold NaN before every run. Raw ops
are called, each held to its generation: no other kernel can step in. Repeats are launched back to back and compared with the
first run's results on the device; the host waits for them once for each call.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from flashsci.call import ops
from flashsci.choice import backends
from flashsci.testing import (
    FP8Case,
    FP8Inputs,
    Inputs,
    Judge,
    PagedCase,
    PagedInputs,
    evaluate,
    exact_matmul,
    make_fp8_inputs,
    make_paged_inputs,
    poisoned_memory,
)
from tests.support import judged_cases, raw_calls
from tests.support import race_cases as races
from tests.support.race_cases import Call, FP8Call, PagedCall, Shape

pytestmark = pytest.mark.gpu
REPEATS = int(os.environ.get("FLASHSCI_RACE_REPEATS", "100"))
SOFTCAP = 5.0
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 2


def require(generation: str, dtype: str) -> None:
    """A generation that this machine lacks is a reason to skip, never a pass."""
    if generation in backends.BACKENDS:
        judged_cases.require(generation)
    else:
        raw_calls.require(generation, next(s for s, d in races.DTYPES.items() if d == dtype))


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
            "members": (1, shape.heads, shape.seq_q),
            "keys": (shape.batch, 1, 1),
            "weights": (shape.batch, shape.heads_k if shape.heads > 8 else 1, 1),
        }
        return (*rows[str(kind)], shape.seq_k)

    bias = mask = None
    if call.bias == "linear":
        pair = (1, shape.seq_q, shape.seq_k, shape.heads)
        bias = rand(*pair, dtype=torch.float32 if call.bias_fp32 else dtype).permute(0, 3, 1, 2)
    elif call.bias == "inner":
        pair = (shape.batch, shape.seq_q, shape.seq_k, shape.heads)
        bias = rand(*pair, dtype=torch.float32 if call.bias_fp32 else dtype).permute(0, 3, 1, 2)
    elif call.bias is not None:
        bias = rand(*pairs(call.bias), dtype=torch.float32 if call.bias_fp32 else dtype)
    weighted = call.bias == "weights"
    key_weight = bias.squeeze(-2).abs() if weighted else None
    if call.mask is not None:
        mask = torch.rand(*pairs(call.mask), device=DEVICE, generator=generator) < 0.75
        mask[..., 0] = True
    causal = call.causal and shape.window == (-1, -1)
    options = {
        "causal": causal,
        "window": None if causal or not call.causal else shape.window,
        "align": "lower_right" if shape.lower_right else "upper_left",
        "softcap": SOFTCAP if call.softcap else None,
    } | ({"dropout_p": 0.25} if call.dropout else {})

    def offsets(lens: tuple[int, ...]) -> Tensor | None:
        starts = torch.tensor((0, *lens), device=DEVICE).cumsum(0)
        return starts.to(torch.int32) if call.packed else None

    def rows(heads: int, seq: int, dim: int) -> Tensor:
        # In 16 bits the kernels of a bias with inner heads want heads inside rows, too.
        if call.inside or (call.bias == "inner" and call.dtype != "float32"):
            return rand(shape.batch, seq, heads, dim).transpose(1, 2)
        return rand(*sizes(heads, seq, dim))

    return Inputs(
        q=rows(shape.heads, shape.seq_q, call.head_dim),
        k=rows(shape.heads_k, shape.seq_k, call.head_dim),
        v=rows(shape.heads_k, shape.seq_k, call.head_dim_v),
        dout=rows(shape.heads, shape.seq_q, call.head_dim_v) if call.has_backward and not shape.forward_only else None,
        bias=None if weighted else bias,
        key_weight=key_weight,
        mask=mask,
        cu_seqlens_q=offsets(shape.lens_q),
        cu_seqlens_k=offsets(shape.lens_k),
        options=options,
        dropout_seed=torch.tensor([1234, 5], device=DEVICE) if call.dropout else None,
        alibi_slopes=rand(shape.heads, dtype=torch.float32).abs() / 4 if call.alibi else None,
    )


def make_inputs(case: FP8Case | PagedCase) -> FP8Inputs | PagedInputs:
    """The tensors of a case of its own kind."""
    made = make_paged_inputs if isinstance(case, PagedCase) else make_fp8_inputs
    return made(case, DEVICE)


def problems_of(inputs: FP8Inputs | PagedInputs, found: dict[str, Tensor]) -> list[str]:
    """What its judge says."""
    judge = inputs.judge(fused=True) if isinstance(inputs, PagedInputs) else inputs.judge()
    return judge.problems(found)


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
        self.tensors = ops.Tensors(self.q, self.k, self.v, inputs.bias, None, inputs.mask, *self.offsets)
        # In the place of a bias, and their gradient in that of its own.
        self.weighted = inputs.key_weight is not None
        self.bias = inputs.key_weight.unsqueeze(-2) if self.weighted else inputs.bias
        self.need = ops.NEED_Q | ops.NEED_K | ops.NEED_V
        self.need |= ops.NEED_BIAS if self.bias is not None else 0
        # So are slopes of ALiBi, without a gradient.
        slopes = inputs.alibi_slopes
        if slopes is not None:
            self.bias = slopes[None, :, None, None]
        dropout = (inputs.dropout_seed, inputs.options["dropout_p"]) if call.dropout else ()
        self.last = self.weighted, slopes is not None, *dropout

    def _swap(self, x: Tensor) -> Tensor:
        """Packed: [T, H, D] as [H, T, D], which the ops take, and back."""
        return x.transpose(0, 1) if self.call.packed else x

    @functools.cached_property
    def _forward(self) -> Callable[[], tuple[Tensor, ...]]:
        x = self.inputs
        if self.call.generation in backends.BACKENDS:
            scalars = ops.Scalars(*self.scalars, 0.0, "default", True)
            forward = backends.BACKENDS[self.call.generation].load().forward
            return functools.partial(forward, self.tensors, scalars)
        return functools.partial(
            torch.ops.flashsci.cuda_forward.default,
            self.q, self.k, self.v, self.bias, x.mask, *self.offsets,
            *self.scalars, False, int(self.call.generation[2:]), *self.last,
        )  # fmt: skip

    def forward(self) -> dict[str, Tensor]:
        out, lse = self._forward()
        return {"out": self._swap(out), "lse": lse}

    def prepared_backward(
        self, results: dict[str, Tensor], deterministic: bool, need: int | None = None
    ) -> Callable[[], dict[str, Tensor]]:
        """What runs the backward, given the results of a forward."""
        x, need = self.inputs, self.need if need is None else need
        out, lse = self._swap(results["out"]), results["lse"]
        if self.call.generation in backends.BACKENDS:
            scalars = ops.Scalars(*self.scalars, 0.0, "default", deterministic)
            saved = ops.Saved(self.tensors, out, lse, scalars)
            backward = backends.BACKENDS[self.call.generation].load().backward
            call = functools.partial(backward, self.dout, None, saved, need)
        else:
            call = functools.partial(
                torch.ops.flashsci.cuda_backward.default,
                self.dout, None, self.q, self.k, self.v, self.bias, x.mask, *self.offsets,
                out, lse, *self.scalars, False, deterministic, int(self.call.generation[2:]), need, *self.last,
            )  # fmt: skip
        bits = (ops.NEED_Q, ops.NEED_K, ops.NEED_V, ops.NEED_BIAS)
        last = "dkey_weight" if self.weighted else "dbias"
        names = [n for n, bit in zip(("dq", "dk", "dv", last), bits, strict=True) if need & bit]
        indices = [i for i, bit in enumerate(bits) if need & bit]

        def run() -> dict[str, Tensor]:
            found = call()
            own = lambda x: x.squeeze(-2) if self.weighted else x  # noqa: E731
            swapped = (own(found[i]) if i == 3 else self._swap(found[i]) for i in indices)
            return dict(zip(names, swapped, strict=True))

        return run


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


@dataclass
class Compared:
    """One tensor of some runs against the first run's: the largest difference of every repeat, and where it is."""

    label: str
    shape: tuple[int, ...]
    allowed: float | None  # None: bits are compared, a difference is 1
    worst: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)

    def add(self, first: Tensor, repeats: list[Tensor]) -> None:
        if not first.numel():
            return
        found = torch.stack(repeats)
        if self.allowed is None:
            away = (words(found) != words(first.contiguous())).view(torch.uint8)
        else:
            away = (found.float() - first.float()).abs()
        worst, places = away.flatten(1).max(1)  # NaN is the largest
        self.worst.append(worst.double())
        self.places.append(places)

    def problem(self, worst: list[float], places: list[int]) -> str | None:
        """What is wrong, with the numbers of all repeats on the host."""
        limit = self.allowed or 0.0
        bad = [n for n, x in enumerate(worst) if not x <= limit]  # NaN is, too
        if not bad:
            return None
        n, place, cell = bad[0], places[bad[0]], []
        for size in reversed(self.shape):
            place, at = divmod(place, size)
            cell.append(at)
        where = f"{len(bad)} of {len(worst)} repeats, first in repeat {n} at {cell[::-1]}"
        if self.allowed is None:
            return f"{self.label} differs in {where}"
        return f"{self.label} is off by {worst[n]:.3g} from the first run, allowed {limit:.3g}, in {where}"


class Repeats:
    """What a hundred runs show, without waiting for any."""

    BYTES = 1 << 27  # of results that are kept until they are compared
    SMALL = 1 << 22  # bytes of results whose launches cost little

    def __init__(self) -> None:
        self.compared: list[Compared] = []

    def of(
        self,
        label: str,
        first: dict[str, Tensor],
        run: Callable[[], dict[str, Tensor]],
        allowed: dict[str, float] | None = None,
    ) -> None:
        """Each run has the first one's bits, or, with ``allowed``, differs from it by no more than that.

        Runs are launched back to back, some of them at a time, and compared then.
        """
        tensors = {
            name: Compared(f"{label}: {name}", tuple(x.shape), allowed and allowed[name]) for name, x in first.items()
        }
        self.compared += tensors.values()
        size = sum(x.numel() * x.element_size() for x in first.values())
        repeats = REPEATS if size > self.SMALL else 5 * REPEATS  # a race of one launch in 200 must show
        together = max(1, min(repeats, self.BYTES // max(size, 1)))
        for begin in range(0, repeats, together):
            found = []
            with fresh_memory():
                for time in range(begin, min(begin + together, repeats)):
                    if 2 * time >= repeats:
                        disturb(time)
                    found.append(run())
            for name, compared in tensors.items():
                compared.add(first[name], [results[name] for results in found])

    def problems(self) -> list[str]:
        """With one wait for the device."""
        compared = [c for c in self.compared if c.worst]
        if not compared:
            return []
        counts = [sum(map(len, c.worst)) for c in compared]
        worst = torch.cat([x for c in compared for x in c.worst])
        places = torch.cat([x for c in compared for x in c.places])
        # A place is an integer that fp64 holds.
        numbers = torch.stack([worst, places.double()]).cpu().split(counts, 1)
        found = (
            c.problem(w, [int(x) for x in p]) for c, (w, p) in zip(compared, (n.tolist() for n in numbers), strict=True)
        )
        return [problem for problem in found if problem]


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
                backward = {
                    deterministic: kernels.prepared_backward(first, deterministic)
                    for deterministic in ((False, True) if kernels.dout is not None else ())
                }
                gradients = {deterministic: run() for deterministic, run in backward.items()}
            findings = judge.findings({n: x[: shape.judged] for n, x in first.items()})
            if shape.judged is not None:
                found = beyond(inputs, first["out"], findings[0].allowed)
                problems += [f"{shape.name}: {problem}" for problem in found]
            allowed = {}
            for results in gradients.values():
                found = judge.findings(results)
                allowed = {f.tensor: f.allowed for f in found}
                findings += found
            problems += [f"{shape.name}: {f.problem}" for f in findings if f.problem]
            repeats.of(shape.name, first, kernels.forward)
            if gradients:
                repeats.of(f"{shape.name}, in turns", gradients[True], backward[True])
                repeats.of(f"{shape.name}, any order", gradients[False], backward[False], allowed)
        problems += repeats.problems()
    assert not problems, f"{call}\n" + "\n".join(problems)


def run_apart(call: FP8Call | PagedCall) -> None:
    """The same of calls with cases of their own."""
    repeats, problems = Repeats(), []
    with torch.no_grad():
        for name, case in call.cases(PROCESSORS):
            inputs = make_inputs(case)
            run = functools.partial(inputs.evaluate, call.backend)
            with fresh_memory():
                first = run()
            with torch.enable_grad():
                found = problems_of(inputs, first)
            problems += [f"{name}: {problem}" for problem in found]
            repeats.of(name, first, run)
    problems += repeats.problems()
    assert not problems, f"{call}\n" + "\n".join(problems)


CALLS = races.all_calls()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_hundred_repeats(call):
    require(call.generation, call.dtype)
    if isinstance(call, Call):
        run_call(call)
    else:
        run_apart(call)


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
            if not isinstance(call, Call):
                for _, case in call.cases(PROCESSORS):
                    make_inputs(case).evaluate(call.backend)
                continue
            for shape in races.shapes(call, PROCESSORS):
                kernels = Kernels(call, shape, draw(call, shape))
                first = kernels.forward()
                if kernels.dout is not None:
                    for deterministic in (False, True):
                        kernels.prepared_backward(first, deterministic)()
                    kernels.prepared_backward(first, False, need=ops.NEED_Q)()
        torch.cuda.synchronize()
    names = {event.name for event in profile.events() if "flashsci" in event.name}
    found = races.launched(names, dtype)
    # An instance that a Hopper call hands to sm80 (bias_gradient) counts there.
    missing = [i for i in races.instances() if (i.generation, i.dtype) == (generation, dtype) and i not in found]
    assert not missing, f"no call launched {missing}; seen: {sorted(names)}"
