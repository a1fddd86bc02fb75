"""Machineries of execution: CUDA graphs, streams, threads, processes, copies of modules, tensors without memory, DTensors."""

from __future__ import annotations

import copy
import io
import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .cells import FIRST, SINGLE, Call, Pair, machinery, require
from .derivatives import cotangents_of, leaf, pull, pulled
from .entries import mesh

FAMILY = "execution"


@machinery("CUDA graph", FAMILY, on=("cuda",), rows=SINGLE)
def cuda_graph(call: Call) -> Iterator[Pair]:
    """Captured at one point, replayed at another."""
    x, inputs = call.x(), call.inputs()
    function = lambda: call.of({**inputs, call.variable: x})  # noqa: E731
    results, graph = _captured(function)
    x.copy_(call.x(other=True))
    graph.replay()
    yield from zip(results, call.value(other=True), strict=True)


@machinery("CUDA graph, reverse", FAMILY, on=("cuda",), rows=SINGLE)
def cuda_graph_reverse(call: Call) -> Iterator[Pair]:
    """All that the capture reads is on the device before."""
    x, inputs = leaf(call), call.inputs()
    forward = lambda: call.of({**inputs, call.variable: x})  # noqa: E731
    cotangents = cotangents_of(forward())
    function = lambda: (pull(forward(), x, cotangents),)  # noqa: E731
    results, graph = _captured(function)
    graph.replay()
    yield results[0], pulled(call)


def _captured(function: Any) -> tuple[Any, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return results, graph


@machinery("second stream", FAMILY, on=("cuda",))
def second_stream(call: Call) -> Iterator[Pair]:
    """A tensor that a busy stream writes late, read on that stream."""
    call(call.x())
    call(call.x())
    stream, x = torch.cuda.Stream(), call.x()
    late = call.x(other=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(late)
        results = call(x)
    stream.synchronize()
    yield from zip(results, call.value(other=True), strict=True)


@machinery("threads", FAMILY)
def threads(call: Call) -> Iterator[Pair]:
    found: dict[int, Any] = {}

    def work(n: int) -> None:
        try:
            found[n] = [call(call.x(other=bool(n % 2))) for _ in range(2)]
        except Exception as error:
            found[n] = error

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for n, result in sorted(found.items()):
        if isinstance(result, Exception):
            raise result
        for results in result:
            yield from zip(results, call.value(other=bool(n % 2)), strict=True)


@machinery("fork", FAMILY, on=("cpu",), rows=FIRST, alone=True, seconds=4)  # CUDA does not survive a fork
def fork(call: Call) -> Iterator[Pair]:
    """A child that goes on after its parent has called."""
    call(call.x())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            file = io.BytesIO()
            try:
                torch.save(call(call.x(other=True)), file)
            except Exception as error:
                torch.save(error, file)
            os.write(write, file.getvalue())
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], 30)
    try:
        require(bool(ready), "the child hangs")
        with os.fdopen(read, "rb") as pipe:
            sent = pipe.read()
        require(bool(sent), "the child died")
        found = torch.load(io.BytesIO(sent), weights_only=False)
        if isinstance(found, Exception):
            raise found
        yield from zip(found, call.value(other=True), strict=True)
    finally:
        if not ready:
            os.kill(child, 9)
        os.waitpid(child, 0)


class Layer(torch.nn.Module):
    """A module with the row's tensor as its parameter."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.x = torch.nn.Parameter(call.x(), requires_grad=False)

    def forward(self) -> tuple[Tensor, ...]:
        return self.call(self.x.data)


@machinery("deepcopy", FAMILY)
def deepcopied(call: Call) -> Iterator[Pair]:
    layer = Layer(call)
    layer()
    yield from zip(copy.deepcopy(layer)(), call.value(), strict=True)


@machinery("pickle", FAMILY)
def pickled(call: Call) -> Iterator[Pair]:
    layer, file = Layer(call), io.BytesIO()
    layer()
    torch.save(layer, file)
    file.seek(0)
    yield from zip(torch.load(file, weights_only=False)(), call.value(), strict=True)


def _shaped(results: Any, call: Call, strides: bool) -> Iterator[Pair]:
    real = call(call.x())
    for found, like in zip(results, real, strict=True):
        require(found.dtype == like.dtype, f"{found.dtype} for {like.dtype}")
        yield torch.tensor(found.shape), torch.tensor(like.shape)
        if strides:
            yield torch.tensor(found.stride()), torch.tensor(like.stride())


@machinery("meta tensors", FAMILY)
def meta(call: Call) -> Iterator[Pair]:
    """Shapes and dtypes are right, or the call is refused."""
    results = call.of({n: x.to("meta") for n, x in call.inputs().items()})
    require(all(r.is_meta for r in results), "results that have memory")
    yield from _shaped(results, call, strides=False)


@machinery("fake tensors", FAMILY)
def fake(call: Call) -> Iterator[Pair]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    inputs = {n: mode.from_tensor(x) for n, x in call.inputs().items()}
    with mode:
        results = call.of(inputs)
    yield from _shaped(results, call, strides=True)


@machinery("DTensor", FAMILY)
def dtensor(call: Call) -> Iterator[Pair]:
    """All tensors of a call on a mesh of one process: results are right, or the call is refused."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sequences = (
        {"q": 2, "k": 2, "v": 2, "bias": 1, "key_weight": 1, "mask": 2} if call.name == "distributed.attention" else {}
    )
    inputs = {}
    for name, x in call.inputs().items():
        placement = Shard(sequences[name]) if name in sequences else Replicate()
        inputs[name] = DTensor.from_local(x, mesh(call.device), [placement])
    if call.name == "distributed.attention":
        results = tuple(call.entry.call(call.backend, inputs))
    else:
        results = call.of(inputs)
    whole = [r.full_tensor() if isinstance(r, DTensor) else r for r in results]
    yield from zip(whole, call.value(), strict=True)
