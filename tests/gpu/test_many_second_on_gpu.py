"""The double backward along many directions of one call on a GPU, under torch.vmap: launches that share P."""

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.testing import Case, Judge, Variant, generate, make_inputs, poisoned_memory, second_order_variants
from flashsci.testing.evaluation import evaluate_second_batch
from flashsci.testing.second_tangents import second_direction

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("launches_that_share_p"),
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),
]


def judged(inputs, forward=False):
    """Judge the gradients along five directions, found in one call."""
    directions = [inputs.tangents, *second_direction(inputs.tangents)]
    directions += [{n: x.roll(1, -1) for n, x in t.items()} for t in directions[:2]]
    with poisoned_memory():
        found = evaluate_second_batch(inputs, "triton", directions, forward)
    for tangents, results in zip(directions, found, strict=True):
        Judge(replace(inputs, tangents=tangents)).require(results)


def cases(dtype):
    every = (v for v in second_order_variants(max_dim=64) if v.dtype == dtype and not v.gate)
    pool = [v for v in every if not (v.sink and v.key_weight_grad)][:6]  # no fused kernel has both
    return list(generate(19, 8, pool, score_limit=1 << 17))


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_generated_problems(dtype, number):
    case = replace(cases(dtype)[number], execution="", negated="")
    judged(make_inputs(case, DEVICE), forward=number % 2 == 1)


PAIR = {"bias": "pair", "bias_grad": True, "tangents": "qkvb"}
WEIGHTS = {"key_weight": "float", "key_weight_grad": True, "tangents": "qkvw"}
FEATURES = {
    "plain": ({"lse_grad": True}, {}),
    "bias": (PAIR, {"bias_shape": (2, 4, 300, 333)}),
    "bias of queries": (PAIR, {"bias_shape": (2, 4, 300, 1)}),
    "shared bias": (PAIR, {"bias_shape": (2, 1, 300, 333)}),
    "causal": ({"window": True, "softcap": True}, {"causal": True, "softcap": 3.0}),
    "window": ({"window": True, "alibi": True}, {"window": (40, 9)}),
    "dropout": ({"dropout": True}, {"dropout_p": 0.2}),
    "weights": (WEIGHTS, {"weight_shape": (2, 1, 333)}),
    "tangents of v": ({"tangents": "v"}, {}),
    "tangents of k": ({"tangents": "k"}, {}),
    "packed": ({"varlen": True}, {"rank": 3, "lead": (), "lens_q": (70, 0, 230), "lens_k": (33, 5, 295)}),
    "mask": ({"mask": True}, {"mask_shape": (2, 1, 300, 333)}),
    "mask of keys": ({"mask": True}, {"mask_shape": (2, 1, 1, 333)}),
    "everything": (
        PAIR | WEIGHTS | {"tangents": "qkvbw", "dropout": True, "softcap": True, "mask": True, "lse_grad": True},
        {
            "bias_shape": (2, 4, 300, 333), "weight_shape": (2, 1, 333), "dropout_p": 0.2, "softcap": 3.0,
            "mask_shape": (2, 1, 300, 333),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (64, 64), (48, 24), (50, 20)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("feature", FEATURES)
def test_long_sequences(feature, dtype, dims):
    of_variant, of_case = FEATURES[feature]
    of_variant = {"tangents": "qkv"} | of_variant
    variant = replace(Variant(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1]), **of_variant)
    case = Case(seed=34, variant=variant, lead=(2,), heads_k=2, group=2, seq_q=300, seq_k=333)
    judged(make_inputs(replace(case, **of_case), DEVICE), forward=dims[0] == 32)


def products(backend, x, **options):
    """The function from a direction of q, k, v to the tangents of their gradients."""
    energy = lambda *y: flashsci.attention(*y, backend=backend, **options).float().sin().sum()  # noqa: E731
    return lambda *t: torch.func.jvp(torch.func.grad(energy, (0, 1, 2)), x, t)[1]


@pytest.mark.parametrize("dim", [32, 64])
def test_tiles_of_a_mask(dim):
    """A mask with a table of its tiles."""
    x = tuple(torch.randn(2, 4, 500, dim, device=DEVICE).half() for _ in range(3))
    ways = [torch.randn(3, *y.shape, device=DEVICE).half() for y in x]
    mask = torch.ones(500, 500, dtype=torch.bool, device=DEVICE).tril().triu(-90)
    found = torch.vmap(products("triton", x, mask=flashsci.BlockMask.from_mask(mask)))(*ways)
    double = [t.double() for t in ways]
    due = torch.vmap(products("reference", tuple(y.double() for y in x), mask=mask))(*double)
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=3e-2, atol=3e-2 * b.abs().max().item())


def test_gradients_repeat_bitwise():
    x = tuple(torch.randn(2, 4, 300, 64, device=DEVICE).bfloat16() for _ in range(3))
    ways = [torch.randn(5, *y.shape, device=DEVICE).bfloat16() for y in x]
    along = torch.vmap(products("triton", x))
    first = along(*ways)
    for _ in range(20):
        for a, b in zip(along(*ways), first, strict=True):
            assert torch.equal(a, b)
