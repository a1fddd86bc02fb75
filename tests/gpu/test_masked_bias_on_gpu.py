"""A mask by pairs or a softcap beside a 16-bit bias in Hopper's backward: what `check` draws by chance, here on purpose."""

import pytest
import torch

import flashsci
from flashsci.backends.cuda import decisions, masked_bias
from flashsci.call import plans
from flashsci.testing import Case, Variant
from tests.support import judged_cases

DEVICE = torch.device("cuda")
DIMS = ((32, 32), (64, 64), (96, 96), (64, 128), (128, 128))
PAIRS = (2, 4, 130, 304)
KINDS = {
    "every score": dict(bias_shape=PAIRS),
    "shared": dict(bias_shape=(130, 304)),
    "of keys, keys hidden": dict(bias_shape=(2, 1, 1, 304), mask_shape=(2, 1, 1, 304), mask_kind="keys"),
    "keys hidden": dict(bias_shape=PAIRS, mask_shape=(2, 1, 1, 304), mask_kind="keys"),
    "pairs hidden": dict(bias_shape=PAIRS, mask_shape=(2, 1, 130, 304)),
    "pairs of heads hidden, shared": dict(bias_shape=(4, 130, 304), mask_shape=(4, 130, 304)),
    "pairs hidden, odd rows": dict(bias_shape=(1, 4, 131, 301), mask_shape=(131, 301), seq_q=131, seq_k=301),
    "window": dict(bias_shape=PAIRS, window=(90, 20)),
    "-inf hides": dict(bias_shape=PAIRS, bias_holes=True),
    "rows of the lowest number": dict(bias_shape=(130, 304), bias_number="dtype_min", bias_number_at="rows"),
}
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90")]


@pytest.fixture(autouse=True)
def many_scores(monkeypatch):
    """As if these calls had so many scores that the copy pays."""
    monkeypatch.setattr(masked_bias, "FEWEST_SCORES", 1)
    for forget in (decisions._backward.cache_clear, plans.plans.clear):
        forget()
    yield
    for forget in (decisions._backward.cache_clear, plans.plans.clear):
        forget()


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("capped", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_tile(dtype, dims, kind, capped, deterministic):
    given = KINDS[kind]
    for seed in range(2):
        variant = Variant(
            dtype, *dims, softcap=capped, lse_grad=True, bias="pair", bias_grad=True, bias_float=seed == 1 and not capped,
            window="window" in given, mask="mask_shape" in given,
        )  # fmt: skip
        sizes = dict(lead=(2,), seq_q=130, seq_k=304, softcap=3.0 if capped else None)
        case = Case(variant, seed, heads_k=2, group=2, **(sizes | given))
        # Hopper's forward takes no mask of narrow heads, and no rows that begin anywhere.
        left = "odd" in kind or (dims == (32, 32) and "mask_shape" in given)
        judged_cases.judge(case, "cuda" if left else "cuda:sm90", DEVICE, deterministic)


@pytest.mark.parametrize("softcap", (None, 20.0))
def test_a_graph_of_a_step_replays_it(softcap):
    """The copy that hides the mask in the bias is a part of the graph."""
    q, k, v = (torch.randn(2, 4, 256, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 4, 256, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.rand(256, 256, device=DEVICE) < 0.7
    inputs = q, k, v, bias

    def step():
        out = flashsci.attention(q, k, v, bias=bias, mask=mask, softcap=softcap, backend="cuda")
        return torch.autograd.grad(out.square().sum(), inputs)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        bias.copy_(torch.randn_like(bias))
        mask.copy_(torch.rand(256, 256, device=DEVICE) < 0.5)
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
