"""Known traps of execution: on another device, stream or thread, in a graph, compiled, repeated. Registered with
those of traps.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from flashsci.errors import BackendError
from flashsci.testing.bounds import Judge
from flashsci.testing.cases import Case, Variant
from flashsci.testing.evaluation import evaluate
from flashsci.testing.making import make_inputs
from flashsci.testing.traps import DTYPES, HALVES, Skipped, trap


@trap(cuda=True, one_of=HALVES)
def second_device(backend: str, device: torch.device, dtype: str) -> None:
    """Tensors on a device that is not the current one."""
    if torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    other = torch.device("cuda", (device.index or 0) ^ 1)
    with torch.cuda.device(device):
        inputs = make_inputs(Case(seed=11, variant=Variant(dtype=dtype, head_dim=64)), other)
        found = evaluate(inputs, backend)
    assert all(x.device == other for x in found.values())
    Judge(inputs).require(found)


@trap(cuda=True, one_of=HALVES)
def side_stream(backend: str, device: torch.device, dtype: str) -> None:
    """Kernels run on the current stream: inputs are written there, late, after a long wait."""
    case = Case(seed=12, variant=Variant(dtype=dtype, head_dim=64, head_dim_v=64), seq_q=300, seq_k=300)
    inputs, late = (make_inputs(case, device) for _ in range(2))

    def evaluate_late(deterministic: bool) -> dict[str, Tensor]:
        tensors = [(getattr(late, n), getattr(inputs, n)) for n in ("q", "k", "v", "dout")]
        with torch.no_grad():
            for x, _ in tensors:
                x.zero_()
        torch.cuda.synchronize(device)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            with torch.no_grad():
                for x, value in tensors:
                    x.copy_(value)
            found = evaluate(late, backend, deterministic=deterministic)
        stream.synchronize()
        return found

    truth = evaluate(inputs, backend, deterministic=True)
    found = evaluate_late(deterministic=True)
    for name, x in truth.items():
        assert torch.equal(x, found[name]), f"{name} differs on a side stream"
    # Without it, sums may have any order, so bits need not be equal.
    Judge(inputs).require(evaluate_late(deterministic=False))


@trap(cuda=True, one_of=HALVES)
def first_call_of_a_thread(backend: str, device: torch.device, dtype: str) -> None:
    """A new thread has no CUDA context yet: the same kernels serve its first call, to the bit."""
    import flashsci

    case = Case(seed=12, variant=Variant(dtype=dtype, head_dim=64, head_dim_v=64), seq_q=300, seq_k=300)
    inputs = make_inputs(case, device)
    q, k, v = inputs.q, inputs.k, inputs.v

    def call() -> list[Tensor]:
        with torch.no_grad(), flashsci.use_backend(backend, strict=True):
            out, lse = flashsci.attention(q, k, v, return_lse=True)
            gradients = flashsci.attention_backward(inputs.dout, q, k, v, out, lse, deterministic=True)
        return [out, lse, gradients.dq, gradients.dk, gradients.dv]

    expected = call()
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(call).result()
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), expected, found, strict=True):
            assert torch.equal(x, y), f"{name} differs in a thread of its own"


@trap(one_of=DTYPES)
def compiled_in_one_graph(backend: str, device: torch.device, dtype: str) -> None:
    """`torch.compile` takes a step and its gradients as one graph, in every version of torch, with the bits of the
    eager step."""
    import flashsci

    variant = Variant(dtype=dtype, head_dim=16, head_dim_v=16)
    inputs = make_inputs(Case(seed=14, variant=variant, seq_q=13, seq_k=13), device)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = flashsci.attention(q, k, v, causal=True, return_lse=True, deterministic=True, backend=backend)
        return out.float().square().sum() + lse.sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    # Eagerly first: a backend that refuses the call says so there, in an error of its own.
    expected, found = (torch.autograd.grad(f(*leaves), leaves) for f in (step, compiled))
    for name, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert torch.equal(x, y), f"{name} differs in a compiled step"


@trap(cuda=True, one_of=HALVES)
def cuda_graph(backend: str, device: torch.device, dtype: str) -> None:
    """Forward and backward captured once, replayed on other values."""
    import flashsci

    variant = Variant(dtype=dtype, head_dim=64, head_dim_v=64)
    dense = Case(seed=13, variant=variant, heads_k=2, group=2, seq_q=130, seq_k=130)
    packed = replace(
        dense,
        variant=replace(variant, varlen=True),
        rank=3,
        lead=(),
        lens_q=(60, 7),
        lens_k=(60, 7),
    )
    with flashsci.use_backend(backend, strict=True):
        for case in (dense, packed):
            replay_other_values(case, backend, device)


def replay_other_values(case: Case, backend: str, device: torch.device) -> None:
    """Fail if a captured graph, replayed on other values, gives other bits than a call on them."""
    first, second = (make_inputs(replace(case, seed=s), device) for s in (case.seed, case.seed + 1))
    truth = evaluate(second, backend)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        evaluate(first, backend)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = evaluate(first, backend)
    with torch.no_grad():
        for name in ("q", "k", "v", "bias", "dout", "dscores"):
            if getattr(first, name) is not None:
                getattr(first, name).copy_(getattr(second, name))
        for name, x in first.tangents.items():
            x.copy_(second.tangents[name])
    graph.replay()
    torch.cuda.synchronize(device)
    for name, x in truth.items():
        assert torch.equal(x, found[name]), f"{name} differs in a replayed graph"


@trap(slow=True, one_of=HALVES)
def bitwise_determinism(backend: str, device: torch.device, dtype: str) -> None:
    """The same call gives the same bits, run after run: results and every gradient."""
    runs = 20 if device.type == "cuda" else 2
    dense = Case(
        seed=16,
        variant=Variant(dtype=dtype, head_dim=64, head_dim_v=64, lse_grad=True),
        lead=(3,),
        heads_k=2,
        group=2,
        seq_q=257,
        seq_k=300,
    )
    bias = replace(dense.variant, bias="pair", bias_grad=True, bias_float=True, dropout=True)
    packed = replace(
        dense,
        variant=replace(dense.variant, varlen=True),
        rank=3,
        lead=(),
        lens_q=(200, 3, 90),
        lens_k=(40, 130, 90),
    )
    cases = [dense, packed]
    cases += [
        replace(dense, variant=bias, bias_shape=shape, dropout_p=0.2)
        for shape in ((1, 1, 257, 300), (3, 1, 1, 300), (4, 1, 1))
    ]
    repeat_bitwise(cases, backend, device, runs)


def repeat_bitwise(cases: list[Case], backend: str, device: torch.device, runs: int) -> None:
    """Fail if a run gives other bits. Only the first of the cases must be served."""
    for case in cases:
        inputs = make_inputs(case, device)
        try:
            first = evaluate(inputs, backend, deterministic=True)
        except BackendError:
            if case is cases[0]:
                raise
            continue
        for _ in range(runs - 1):
            again = evaluate(inputs, backend, deterministic=True)
            for name, x in first.items():
                assert torch.equal(x, again[name]), f"{name} differs between runs of {case}"
