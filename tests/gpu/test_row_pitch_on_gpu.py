"""Calls whose bias or mask has rows that begin anywhere, large enough for a copy: numbers, CUDA graphs, the compiler."""

import pytest
import torch

import flashsci
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs
from tests.support.judged_cases import require

pytestmark = pytest.mark.gpu

SEQ_Q, SEQ_K = 517, 511
OWN = (2, 8, SEQ_Q, SEQ_K)
PAIR = {"bias": "pair", "bias_grad": True}


def case(variant, **fields):
    plain = {"lead": (2,), "heads_k": 8, "group": 1, "seq_q": SEQ_Q, "seq_k": SEQ_K, "seed": 3}
    return Case(
        variant=Variant(**({"dtype": "bfloat16", "head_dim": 64, "head_dim_v": 64} | variant)), **(plain | fields)
    )


CASES = {
    "for every pair": case(PAIR, bias_shape=OWN),
    "for every pair, fp16, D 32": case(PAIR | {"dtype": "float16", "head_dim": 32, "head_dim_v": 32}, bias_shape=OWN),
    "for every pair, causal": case(PAIR | {"window": True}, bias_shape=OWN, causal=True),
    "shared by the batch": case(PAIR, bias_shape=(1, 8, SEQ_Q, SEQ_K)),
    "shared by many": case(
        PAIR | {"head_dim": 32, "head_dim_v": 32}, bias_shape=(1, 2, SEQ_Q, SEQ_K), lead=(12,), heads_k=2
    ),
    "of one head": case(PAIR, bias_shape=(2, 1, SEQ_Q, SEQ_K)),
    "heads innermost": case(PAIR, bias_shape=OWN, bias_view="linear"),
    "mask": case({"mask": True}, mask_shape=(1, 1, SEQ_Q, SEQ_K)),
    "mask and bias": case(PAIR | {"mask": True}, bias_shape=OWN, mask_shape=(SEQ_Q, SEQ_K)),
    "second order": case(PAIR | {"tangents": "qkvb"}, bias_shape=OWN),
}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_numbers(name, backend):
    require(backend)
    judge = Judge(make_inputs(CASES[name], torch.device("cuda")))
    judge.require(evaluate(judge.inputs, backend))


def made(*bias_shape):
    q, k, v = (torch.randn(2, 8, n, 64, device="cuda", dtype=torch.bfloat16) for n in (SEQ_Q, SEQ_K, SEQ_K))
    bias = torch.randn(bias_shape, device="cuda", dtype=torch.bfloat16)
    return [x.requires_grad_() for x in (q, k, v, bias)]


def step(backend):
    def run(q, k, v, bias):
        out = flashsci.attention(q, k, v, bias=bias, backend=backend, deterministic=True)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v, bias))

    return run


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("shape", (OWN, (1, 8, SEQ_Q, SEQ_K), (SEQ_Q, SEQ_K)), ids=str)
def test_a_graph_reads_the_bias_of_its_replay(shape, backend):
    require(backend)
    given, run = made(*shape), step(backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*given)
    with torch.no_grad():
        for x in given:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for found, due in zip(captured, run(*given), strict=True):
        assert torch.equal(found, due)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("shape", (OWN, (1, 8, SEQ_Q, SEQ_K)), ids=str)
def test_the_compiler_computes_the_same(shape, backend):
    require(backend)
    given = made(*shape)

    def loss(q, k, v, bias):
        return flashsci.attention(q, k, v, bias=bias, backend=backend, deterministic=True).float().square().sum()

    compiled = torch.compile(loss, dynamic=False, fullgraph=True)
    found, due = (torch.autograd.grad(f(*given), given) for f in (compiled, loss))
    for x, y in zip(found, due, strict=True):
        assert x.shape == y.shape and torch.equal(x, y)
