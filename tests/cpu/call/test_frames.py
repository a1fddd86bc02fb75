"""The way from `attention` to the launch is short for every form of a call that was made before."""

from functools import partial

import pytest
import torch

import flashsci
from tools.house.trace import frames, launches

MOST = 9  # frames of a repeated call, the launch included
WITH_GRADIENTS = MOST + 2
FORMS = {
    "no option": {},
    "bias [1, H, Sq, Sk]": {"bias": (1, 2, 16, 16)},
    "bias [H, Sq, Sk]": {"bias": (2, 16, 16)},
    "bias [Sq, Sk]": {"bias": (16, 16)},
    "key weights [Sk]": {"key_weight": (16,)},
    "slopes [H]": {"alibi_slopes": (2,)},
    "sink": {"sink": (2,)},
    "sink and bias [Sq, Sk]": {"sink": (2,), "bias": (16, 16)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_repeated_call_is_short(form, gradients):
    options = {name: torch.rand(shape) for name, shape in FORMS[form].items()}
    q, k, v = (torch.randn(1, 2, 16, 16, requires_grad=gradients) for _ in range(3))
    call = partial(flashsci.attention, q, k, v, backend="triton", **options)
    call()  # imports the launcher
    counted = [frames(call, launches()) for _ in range(2)]
    assert len(counted[1]) <= (WITH_GRADIENTS if gradients else MOST), counted[1]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_repeated_call_on_8_bit_floats_is_short(scaled):
    q, k, v = (flashsci.quantize(torch.randn(1, 2, 16, 32), "head") for _ in range(3))
    scales = {f"{n}_scale": x.scale for n, x in zip("qkv", (q, k, v), strict=True)} if scaled else {}
    call = partial(flashsci.attention, q.values, k.values, v.values, backend="triton", **scales)
    call()
    counted = [frames(call, launches()) for _ in range(2)]
    assert len(counted[1]) <= 30, counted[1]


@pytest.mark.parametrize("inside", [False, True])
def test_a_repeated_call_is_as_short_when_it_was_tuned(inside, monkeypatch):
    """Tuning costs a kind of call nothing once it has been timed, inside of the context too."""
    from flashsci.choice import timing, tuning

    def measure(calls, device):
        for call in calls.values():
            call()
        return {name: 1.0 - (name == "triton") / 2 for name in calls}, {}

    monkeypatch.setattr(timing, "measure", measure)
    call = partial(flashsci.attention, *(torch.randn(1, 2, 16, 16) for _ in range(3)))
    with flashsci.tune() as session:
        call()
        if inside:
            call()
            counted = frames(call, launches())
    assert "triton" in session.table() and not tuning.active
    if not inside:
        for _ in range(2):  # the plan, and its repeat
            call()
        counted = frames(call, launches())
    flashsci.tune.clear()
    assert len(counted) <= MOST, counted
