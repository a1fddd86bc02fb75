"""Machineries that trace a call: torch.compile, torch.export, AOTInductor, torch.jit.trace, make_fx."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from .cells import CALLS, FIRST, Call, NotHere, Pair, machinery, require
from .derivatives import gradients, leaf, pull, pulled
from .oracle import along, direction

FAMILY = "compilers"
SECONDS = 0.5  # of a traced cell
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
OLD = VERSION < (2, 13)


def function_of(call: Call, **options: Any) -> Callable[..., Any]:
    """The call of its row's tensor, the others fixed, in a form that tracers read."""
    backend, of, fixed, variable = call.backend, call.entry.call, call.inputs(), call.variable

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(of(backend, {**fixed, variable: x, **options}))

    return function


def at_both(call: Call, function: Callable[..., Any]) -> Iterator[Pair]:
    """Results at the point of the trace and at another one, and the gradient at the other."""
    yield from zip(function(call.x()), call.value(), strict=True)
    if call.x().is_floating_point():
        yield from zip(function(call.x(other=True)), call.value(other=True), strict=True)


def compiled(call: Call, x: Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function_of(call), fullgraph=True, **options)


@machinery("compile", FAMILY, seconds=SECONDS, rows=CALLS)
def compiled_call(call: Call) -> Iterator[Pair]:
    yield from at_both(call, compiled(call, call.x(), backend="aot_eager"))


@machinery("compile, reverse", FAMILY, seconds=SECONDS, rows=CALLS)
def compiled_reverse(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    function = compiled(call, x, backend="aot_eager")
    yield from gradients(call, function(x), x)


@machinery("compile, dynamic", FAMILY, seconds=2 * SECONDS, rows=CALLS)
def compiled_dynamic(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    function = compiled(call, x, backend="aot_eager", dynamic=True)
    yield from gradients(call, function(x), x)


@machinery("compile, dynamic, no gradient", FAMILY, seconds=SECONDS, rows=CALLS)
def compiled_dynamic_call(call: Call) -> Iterator[Pair]:
    yield from at_both(call, compiled(call, call.x(), backend="aot_eager", dynamic=True))


@machinery("compile, inductor", FAMILY, seconds=10, rows=FIRST)
def compiled_inductor(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    function = compiled(call, x, backend="inductor")
    yield from gradients(call, function(x), x)


@machinery("compile, lengths from data", FAMILY, seconds=SECONDS, rows=FIRST)
def compiled_of_data(call: Call) -> Iterator[Pair]:
    """Rows that a mask chooses, as many as it says."""
    if not call.entry.lengths:
        raise NotHere("no rows that data could choose")
    backend, of, fixed = call.backend, call.entry.call, call.inputs()
    lengths = dict(call.entry.lengths)
    name, dim = next(iter(lengths.items()))
    keep = torch.ones(fixed[name].shape[dim], dtype=torch.bool, device=call.device)

    def function(keep: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        rows = keep.nonzero().squeeze(-1)
        chosen = {n: x.index_select(d, rows) for (n, d), x in zip(lengths.items(), tensors, strict=True)}
        return tuple(of(backend, {**fixed, **chosen}))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        traced = torch.compile(function, fullgraph=True, backend="aot_eager")
        yield from zip(traced(keep, *(fixed[n] for n in lengths)), call.value(), strict=True)


@machinery("compiled checkpoint, rematerialised", FAMILY, seconds=2 * SECONDS, rows=CALLS)
def rematerialised(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    yield from gradients(call, _rematerialised(function_of(call))(x), x)


def _rematerialised(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled so that a backward computes all once more."""

    def run(x: Tensor) -> Any:
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=0.0):
            step = torch.compile(
                lambda x: checkpoint(function, x, use_reentrant=False),
                fullgraph=True,
                backend="aot_eager_decomp_partition",
            )
            return step(x)

    return run


def _drawn(
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[Call], Iterator[Pair]]:
    """Of dropout with a seed that the call draws: out is linear in v, so that <v, dv> = <out, dout> if both drop the same entries."""

    def run(call: Call) -> Iterator[Pair]:
        if not call.entry.dropout_of:
            raise NotHere("no dropout")
        call = replace(call, row=call.entry.dropout_of)
        v = leaf(call)
        out = around(function_of(call, dropout_p=0.5))(v)[0]
        found = pull((out,), v)
        yield (v * found).sum(), (out.detach().double().cpu().reshape(-1) * along(out)).sum()

    return run


for name, around, seconds in (
    ("drawn dropout", lambda f: f, 0.0),
    ("drawn dropout, checkpoint", lambda f: lambda v: checkpoint(f, v, use_reentrant=False), 0.0),
    (
        "drawn dropout, compiled",
        lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
        SECONDS,
    ),
    ("drawn dropout, rematerialised", _rematerialised, SECONDS),
):
    machinery(name, FAMILY, seconds=seconds, rows=FIRST)(_drawn(around))


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@machinery("export", FAMILY, seconds=SECONDS, rows=CALLS)
def exported(call: Call) -> Iterator[Pair]:
    program = torch.export.export(Module(function_of(call)), (call.x(),))
    yield from at_both(call, program.module())


@machinery("AOTInductor", FAMILY, seconds=30, alone=True, rows=FIRST)
def ahead_of_time(call: Call) -> Iterator[Pair]:
    if "8-bit" in call.name and OLD:
        raise NotHere("before torch 2.13 AOTInductor loses the results of any op that takes bfloat16 as a dtype")
    if call.device == "cuda" and VERSION == (2, 11):
        raise NotHere(
            "a process that loads a package of torch 2.11's AOTInductor on a GPU dies, also one of a plain product"
        )
    program = torch.export.export(Module(function_of(call)), (call.x(),))
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder, "call.pt2")))
        yield from at_both(call, torch._inductor.aoti_load_package(package))


@machinery("jit.trace", FAMILY, seconds=0.1, rows=CALLS)
def jit_traced(call: Call) -> Iterator[Pair]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(function_of(call), (call.x(),), check_trace=False)
    yield from at_both(call, traced)


def _of_all(call: Call) -> tuple[Callable[..., Any], list[Tensor], int]:
    """The call as a function of all its tensors, these, and which of them varies: no tracer meets a tensor that it was not given."""
    backend, of, inputs = call.backend, call.entry.call, call.inputs()
    names = list(inputs)
    place = names.index(call.variable)
    inputs[call.variable] = call.x()
    return (
        lambda *tensors: tuple(of(backend, dict(zip(names, tensors, strict=True)))),
        list(inputs.values()),
        place,
    )


def _fx(mode: str) -> Callable[[Call], Iterator[Pair]]:
    def run(call: Call) -> Iterator[Pair]:
        function, tensors, place = _of_all(call)
        graph = make_fx(function, tracing_mode=mode)(*tensors)
        yield from at_both(call, lambda x: graph(*tensors[:place], x, *tensors[place + 1 :]))

    return run


machinery("make_fx", FAMILY, seconds=0.1, rows=CALLS)(_fx("real"))
machinery("make_fx, symbolic", FAMILY, seconds=0.2, rows=CALLS)(_fx("symbolic"))


@machinery("make_fx, reverse", FAMILY, seconds=0.2, rows=CALLS)
def fx_traced_gradient(call: Call) -> Iterator[Pair]:
    call.floats()
    function, tensors, place = _of_all(call)
    cotangents = [direction(r) for r in function(*tensors)]

    def gradient(*given: Tensor) -> Tensor:
        *given, x = *given, given[place].detach().requires_grad_()
        results = function(*given[:place], x, *given[place + 1 :])
        pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
        require(bool(pairs))
        ends, weights = zip(*pairs, strict=True)
        return torch.autograd.grad(ends, x, weights)[0]

    graph = make_fx(gradient)(*tensors)
    other = call.x(other=True)
    yield graph(*tensors[:place], other, *tensors[place + 1 :]), pulled(call, other=True)
