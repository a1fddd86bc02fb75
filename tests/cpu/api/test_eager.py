"""The eager backend: plain PyTorch for small calls, by the rules of the others."""

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.call import plans
from flashsci.call.problem import Problem
from flashsci.choice import candidates, predictions, preferences
from flashsci.testing import TRAPS, Inputs, Judge, evaluate, traps, traps_models

SERVED = [
    "minus_infinity_in_bias",
    "shared_bias_gradient_of_an_empty_batch",
]


@pytest.mark.parametrize("name", SERVED)
def test_trap(name, monkeypatch):
    """Those that need none of what it has not, without the lse."""

    def without_lse(inputs, backend, lse=True, **options):
        return evaluate(replace(inputs, dlse=None), backend, lse=False, **options)

    for module in (traps, traps_models):
        monkeypatch.setattr(module, "evaluate", without_lse)
    TRAPS[name]("eager", "cpu")


@pytest.mark.parametrize("number", [-1e4, -1e9, -1e30, torch.finfo().min, float("-inf")])
def test_masks_as_numbers_and_padding(number):
    """Grouped heads, a bias that hides keys by a number, a row that sees none, zero rows of dout."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, 4, 9, 12)
    k, v = torch.randn(2, 2, 2, 11, 12)
    bias = torch.randn(2, 1, 1, 11)
    bias[..., 7:] = number
    mask = torch.ones(2, 1, 9, 11, dtype=torch.bool)
    mask[:, :, 4] = False
    dout[..., 6:, :] = 0
    inputs = Inputs(q, k, v, bias=bias, mask=mask, dout=dout)
    found = evaluate(inputs, "eager", lse=False)
    Judge(inputs, fused=False).require(found)
    assert (found["out"][:, :, 4] == 0).all()
    assert (found["dq"][:, :, 4] == 0).all() and (found["dq"][:, :, 6:] == 0).all()


def test_any_order_of_derivative():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    bias = torch.randn(2, 3, 3, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)

    def call(*tensors):
        q, k, v, bias = tensors
        return flashsci.attention(q, k, v, bias=bias, mask=mask, causal=True, backend="eager")

    assert torch.autograd.gradcheck(call, (q, k, v, bias))
    assert torch.autograd.gradgradcheck(call, (q, k, v, bias))

    def slope(*tensors):  # a third derivative is the second of a first
        return torch.autograd.grad(call(*tensors).sin().sum(), tensors[0], create_graph=True)[0]

    assert torch.autograd.gradgradcheck(slope, (q, k, v, bias))


@pytest.mark.parametrize("options, what", [({"softcap": 2.0}, "softcap"), ({"return_lse": True}, "lse"), ({"dropout_p": 0.1}, "dropout"), ({"key_weight": torch.ones(5)}, "key_weight")])  # fmt: skip
def test_refusals(options, what):
    q = torch.randn(2, 5, 8)
    with pytest.raises(flashsci.BackendError, match=f"it has no {what}"):
        flashsci.attention(q, q, q, **options, backend="eager")
    with pytest.raises(flashsci.BackendError, match="scores would round to 16 bits"):
        flashsci.attention(*(q.bfloat16(),) * 3, backend="eager")


@pytest.mark.parametrize(
    "changes, may",
    [
        ({}, True),
        ({"seq_q": 64, "seq_k": 64}, True),  # 4 * 64 numbers for each row of q, k, v and out
        ({"seq_q": 65, "seq_k": 65}, False),
        (
            {"seq_q": 65, "seq_k": 65, "bias_shape": (1, 4, 65, 65)},
            True,
        ),  # no more than what it adds
        ({"seq_q": 65, "seq_k": 65, "bias_shape": (1, 1, 65)}, False),
        ({"seq_q": None, "seq_k": None}, False),  # a compiler's
        ({"varlen": True}, False),
    ],
)
def test_auto_never_holds_more_scores_than_the_call_has_numbers(changes, may, monkeypatch):
    given = {"batch": (2,), "seq_q": 5, "seq_k": 5, **changes}
    problem = Problem("cuda", (9, 0), torch.float32, 4, 4, 16, 16, **given)
    assert candidates.may_hold_scores(problem) is may
    rule = preferences.Rule({}, ("eager", "reference"), "")
    monkeypatch.setattr(preferences, "find", lambda *_: rule)
    assert ("eager" in candidates.candidates(problem, "auto", False)) is may


WIDE = Problem("cuda", (9, 0), torch.float32, 1, 1, 129, 128, batch=(216,), seq_q=120, seq_k=120)


@pytest.fixture
def tf32():
    """TF32 for torch's own products, as many training scripts ask for it."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def order(problem):
    return candidates.candidates(problem, "auto", False)


def test_wide_heads_in_fp32_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(predictions, "enabled", lambda: False)
    assert order(WIDE)[:2] == ("eager", "sdpa")
    assert "eager" not in order(replace(WIDE, seq_q=9000, seq_k=9000)), "scores take too much memory"
    assert order(replace(WIDE, head_dim=128))[0] == "cuda"


def test_fp32_stays_fp32_whatever_torch_multiplies_with(tf32):
    """What follows torch's TF32 switch is for who asks for TF32, or for the backend."""
    assert order(WIDE) == ("cuda", "triton", "reference")
    assert order(replace(WIDE, precision="tf32"))[0] == "eager"
    assert order(replace(WIDE, dtype=torch.bfloat16)) != order(WIDE)
    assert order(replace(WIDE, capability=(7, 5)))[0] == "sdpa", "no TF32 on Turing"


def test_a_plan_is_of_one_way_to_multiply(tf32):
    q = torch.randn(2, 3, 8)
    before = len(plans.plans)
    flashsci.attention(q, q, q)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    flashsci.attention(q, q, q)
    flashsci.attention(q, q, q)
    assert len(plans.plans) == before + 2
