"""Gradients for many cotangents of one call on a GPU, under torch.vmap: launches that share P."""

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.testing import Case, Judge, Variant, generate, make_inputs, poisoned_memory, variants
from flashsci.testing.evaluation import evaluate_batch

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("launches_that_share_p"),
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),
]


def judged(inputs, count, older=False):
    """Judge the gradients for as many cotangents, found in one call."""
    first = inputs.dout, inputs.dlse
    cotangents = [[None if x is None else x.roll(n, -1) for x in first] for n in range(count)]
    with poisoned_memory():
        found = evaluate_batch(inputs, "triton", cotangents, older)
    for (dout, dlse), results in zip(cotangents, found, strict=True):
        Judge(replace(inputs, dout=dout, dlse=dlse)).require(results)


def cases(dtype):
    served = (v for v in variants(max_dim=64) if v.dtype == dtype and not v.gate)
    every = (replace(v, alibi_grad=False) for v in served)  # under a transform, which the slopes' gradient refuses
    pool = [v for v in every if not (v.sink and v.key_weight_grad)][:6]  # no fused kernel has both
    return list(generate(17, 8, pool, score_limit=1 << 17))


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_generated_problems(dtype, number):
    case = replace(cases(dtype)[number], execution="", negated="")
    judged(make_inputs(case, DEVICE), 3 + number % 4, older=number % 4 == 3)


PAIR = {"bias": "pair", "bias_grad": True}
WEIGHTS = {"key_weight": "float", "key_weight_grad": True}
FEATURES = {
    "plain": ({"lse_grad": True}, {}),
    "bias": (PAIR, {"bias_shape": (2, 4, 300, 333)}),
    "bias of queries": (PAIR, {"bias_shape": (2, 4, 300, 1)}),
    "shared bias": (PAIR, {"bias_shape": (2, 1, 300, 333)}),
    "causal": ({"window": True, "softcap": True}, {"causal": True, "softcap": 3.0}),
    "window": ({"window": True, "alibi": True}, {"window": (40, 9)}),
    "dropout": ({"dropout": True}, {"dropout_p": 0.2}),
    "weights": (WEIGHTS, {"weight_shape": (2, 1, 333)}),
    "packed": ({"varlen": True}, {"rank": 3, "lead": (), "lens_q": (70, 0, 230), "lens_k": (33, 5, 295)}),
    "mask": ({"mask": True}, {"mask_shape": (2, 1, 300, 333)}),
    "mask of keys": ({"mask": True}, {"mask_shape": (2, 1, 1, 333)}),
    "everything": (
        PAIR | WEIGHTS | {"dropout": True, "softcap": True, "mask": True, "lse_grad": True},
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
    variant = replace(Variant(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1]), **of_variant)
    case = Case(seed=33, variant=variant, lead=(2,), heads_k=2, group=2, seq_q=300, seq_k=333)
    judged(make_inputs(replace(case, **of_case), DEVICE), 6)


@pytest.mark.parametrize("dims", [(32, 32), (64, 64)])
def test_tiles_of_a_mask(dims):
    """A mask with a table of its tiles."""
    q, k, v, ways = (torch.randn(n, 4, 500, d, device=DEVICE).half() for n, d in ((2, dims[0]), (2, dims[0]), (2, dims[1]), (6, dims[1])))  # fmt: skip
    mask = torch.ones(500, 500, dtype=torch.bool, device=DEVICE).tril().triu(-90)
    ways = ways.view(3, 2, 4, 500, dims[1])
    found, due = (
        torch.vmap(torch.func.vjp(lambda *x, b=b: flashsci.attention(*x, mask=mask, backend=b), *of)[1])(
            ways.to(of[0].dtype)
        )
        for b, of in (("triton", (q, k, v)), ("reference", (q.double(), k.double(), v.double())))
    )
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)


def test_gradients_repeat_bitwise():
    q, k, v = (torch.randn(2, 4, 300, 64, device=DEVICE).bfloat16() for _ in range(3))
    ways = torch.randn(5, 2, 4, 300, 64, device=DEVICE).bfloat16()
    pull = torch.func.vjp(lambda *x: flashsci.attention(*x, backend="triton"), q, k, v)[1]
    first = torch.vmap(pull)(ways)
    for _ in range(20):
        for a, b in zip(torch.vmap(pull)(ways), first, strict=True):
            assert torch.equal(a, b)


def test_batch_invariant_sequences_have_the_same_bits_beside_others():
    """Whatever else the batch holds; and for another number of cotangents."""
    q, k, v, ways = (torch.randn(n, 300, 4, 64, device=DEVICE).bfloat16() for n in (1, 1, 1, 4))
    q, k, v = (x[0] for x in (q, k, v))

    def of(x, offsets, along):
        offsets = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        call = lambda *y: flashsci.varlen_attention(*y, offsets, offsets, deterministic="batch", backend="triton")  # noqa: E731
        return torch.vmap(torch.func.vjp(call, *x)[1])(along)

    whole = of((q, k, v), [0, 100, 300], ways)
    part = of([x[:100] for x in (q, k, v)], [0, 100], ways[:2, :100])
    for a, b in zip(part, whole, strict=True):
        assert torch.equal(a, b[:2, :100])
