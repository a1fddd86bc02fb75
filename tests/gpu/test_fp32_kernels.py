"""The fp32 kernels of sm80 on a GPU: products of fp16 halves must be as good as fp32 whatever the inputs' range."""

import pytest
import torch

from flashsci.testing import Inputs, Judge, evaluate

NAME = "cuda:sm80"
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


def draw(dim, seq, kind):
    g = torch.Generator("cuda").manual_seed(dim + seq)
    rand = lambda *s: torch.randn(*s, device="cuda", generator=g)  # noqa: E731
    q, k, v, dout = (rand(2, 2, seq, dim) for _ in range(4))
    mask = None
    if kind == "hidden keys":  # a masked row may hold anything
        mask = torch.rand(2, 1, 1, seq, device="cuda", generator=g) < 0.7
        for x in (k, v):
            x.transpose(1, 2)[~mask[:, 0, 0]] *= 1e15
    elif kind == "rows":
        for x in (v, dout):
            x *= torch.exp2(torch.randint(-30, 30, (2, 2, seq, 1), device="cuda", generator=g))
    elif kind in ("tiny", "huge"):
        for x, size in ((q, 1e-12), (k, 1e12), (v, 1e-12), (dout, 1e-8)):
            x *= size if kind == "tiny" else 1 / size
    elif kind == "columns":
        for x in (v, dout):
            x *= torch.exp2(torch.randint(-10, 10, (dim,), device="cuda", generator=g))
    return Inputs(q, k, v, None, mask, dout)


@pytest.mark.parametrize("kind", ("hidden keys", "rows", "tiny", "huge", "columns"))
@pytest.mark.parametrize("seq", (25, 200, 300))
@pytest.mark.parametrize("dim", (8, 32, 64, 128, 192, 256))
def test_rows_of_any_size(dim, seq, kind):
    inputs = draw(dim, seq, kind)
    Judge(inputs).require(evaluate(inputs, NAME))


@pytest.mark.parametrize("shape", ((2, 2, 70, 90), (1, 2, 70, 90), (2, 1, 1, 90), (70, 1), (1, 1)))
@pytest.mark.parametrize("dim", (8, 24, 64, 128, 160, 256))
@pytest.mark.parametrize("precision", ("tf32x3", "tf32"))
def test_bias_gradients_of_every_shape_twice_the_same(shape, dim, precision):
    g = torch.Generator("cuda").manual_seed(dim)
    rand = lambda *s: torch.randn(*s, device="cuda", generator=g)  # noqa: E731
    q, k, v, dout = rand(2, 2, 70, dim), rand(2, 2, 90, dim), rand(2, 2, 90, dim), rand(2, 2, 70, dim)
    inputs = Inputs(q, k, v, rand(*shape), None, dout, options={"precision": precision})
    found = evaluate(inputs, NAME)
    Judge(inputs).require(found)
    again = evaluate(inputs, NAME)
    assert all(torch.equal(x, again[n]) for n, x in found.items())


@pytest.mark.parametrize("dim", [64, 160])
@pytest.mark.parametrize("name", ["reference", "auto"])
def test_torchs_tf32_switch_is_not_ours(name, dim):
    """Many training scripts turn it on; what asks for fp32 gets fp32 all the same."""
    inputs = draw(dim, 60, "plain")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        found = evaluate(inputs, name, lse=False)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    Judge(inputs).require(found)
