"""Calls whose bias or mask has rows that begin anywhere, large enough for a copy: numbers, CUDA graphs, the compiler."""

import pytest
import torch

import flashsci
from flashsci.call import row_pitch
from flashsci.choice import backends
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs

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


def needs(backend):
    reason = backends.BACKENDS[backend].unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_numbers(name, backend):
    needs(backend)
    judge = Judge(make_inputs(CASES[name], torch.device("cuda")))
    judge.require(evaluate(judge.inputs, backend))


def made(*bias_shape):
    q, k, v = (torch.randn(2, 8, n, 64, device="cuda", dtype=torch.bfloat16) for n in (SEQ_Q, SEQ_K, SEQ_K))
    bias = torch.randn(bias_shape, device="cuda", dtype=torch.bfloat16)
    return [x.requires_grad_() for x in (q, k, v, bias)]


@pytest.mark.parametrize("room", ((0, 0), (1, 0), (0, 2)))
@pytest.mark.parametrize("dim", (64, 96, 128))
@pytest.mark.parametrize("shape", (OWN, (8, SEQ_Q, SEQ_K), (SEQ_Q, SEQ_K)), ids=str)
def test_rows_are_read_where_they_are(shape, dim, room):
    """The bits of a copy, with NaN behind the rows and keys of the bias, and no memory for a copy."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these are Hopper's kernels")
    q, k, v, dout = (
        torch.randn(2, 8, n, dim, device="cuda", dtype=torch.bfloat16) for n in (SEQ_Q, SEQ_K, SEQ_K, SEQ_Q)
    )
    wide = torch.full((*shape[:-2], SEQ_Q + room[0], SEQ_K + room[1]), torch.nan, device="cuda", dtype=torch.bfloat16)
    bias = wide[..., :SEQ_Q, :SEQ_K].normal_()
    results = []
    for given in (bias, row_pitch.padded(bias)):
        leaves = [x.detach().requires_grad_(x is not bias or shape == OWN) for x in (q, k, v, given)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = flashsci.attention(*leaves[:3], bias=leaves[3], backend="cuda", deterministic=True)
        held = torch.cuda.memory_allocated() - before
        assert held < out.numel() * 2 + bias.numel(), "a copy is kept"
        wanted = [x for x in leaves if x.requires_grad]
        results.append((out, *torch.autograd.grad(out, wanted, dout)))
    for found, due in zip(*results, strict=True):
        assert torch.equal(found, due)


def step(backend):
    def run(q, k, v, bias):
        out = flashsci.attention(q, k, v, bias=bias, backend=backend, deterministic=True)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v, bias))

    return run


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("shape", (OWN, (1, 8, SEQ_Q, SEQ_K), (SEQ_Q, SEQ_K)), ids=str)
def test_a_graph_reads_the_bias_of_its_replay(shape, backend):
    needs(backend)
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
    needs(backend)
    given = made(*shape)

    def loss(q, k, v, bias):
        return flashsci.attention(q, k, v, bias=bias, backend=backend, deterministic=True).float().square().sum()

    compiled = torch.compile(loss, dynamic=False, fullgraph=True)
    found, due = (torch.autograd.grad(f(*given), given) for f in (compiled, loss))
    for x, y in zip(found, due, strict=True):
        assert x.shape == y.shape and torch.equal(x, y)
