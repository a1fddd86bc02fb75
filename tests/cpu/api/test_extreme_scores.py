"""Masks written as numbers, scores beyond 1e7 and sharp softcaps, on what runs without a GPU."""

import pytest
import torch

from tests.support import extreme
from tests.support.extreme import DTYPES, KINDS, NUMBERS, PLACES

pytestmark = [
    pytest.mark.every(4),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets without a GPU only; there, tests/gpu"),
]
FP32, FP16, BF16 = DTYPES
# Every number, place, kind and dtype with several of the others.
MIXED = [
    (number, place, kind, DTYPES[(i + j + n) % 3])
    for i, number in enumerate(NUMBERS)
    for j, place in enumerate(PLACES)
    for n, kind in enumerate(KINDS)
    if (i + 2 * j + n) % 4 == 0
]


@pytest.mark.parametrize("number, place, kind, dtype", MIXED)
def test_masks_as_numbers(number, place, kind, dtype):
    extreme.masks_as_numbers("triton", "cpu", number, place, kind, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", NUMBERS)
def test_masks_as_numbers_second_order(number, kind):
    dtype = DTYPES[(NUMBERS.index(number) + KINDS.index(kind)) % 3]
    place = PLACES[-1] if NUMBERS.index(number) % 2 else PLACES[KINDS.index(kind) % 3]
    extreme.masks_as_numbers("triton", "cpu", number, place, kind, dtype, order=2)


@pytest.mark.parametrize("backend", ("reference", "sdpa"))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", NUMBERS)
def test_masks_as_numbers_in_plain_pytorch(backend, number, place):
    extreme.masks_as_numbers(backend, "cpu", number, place, "pair", FP32, lse=backend != "sdpa")


@pytest.mark.parametrize("kind", ("pair", "shared pair", "weights", "packed", "short"))
@pytest.mark.parametrize("number", NUMBERS)
def test_whole_rows_with_a_gradient(number, kind):
    dtype = DTYPES[(NUMBERS.index(number) + KINDS.index(kind)) % 3]
    order = 1 + KINDS.index(kind) % 2
    extreme.whole_rows_with_a_gradient("triton", "cpu", number, dtype, kind, order)


@pytest.mark.parametrize("backend", ("reference", "triton"))
@pytest.mark.parametrize("number", NUMBERS)
def test_gradients_under_a_given_lse(backend, number):
    extreme.gradients_under_a_given_lse(backend, "cpu", FP32, number)


HUGE = [
    (FP16, 61440.0, 0.1, {}),
    (FP16, 61440.0, -0.1, {}),
    (BF16, 2.0**20, 0.7, {"window": (90, 90)}),
    (FP32, 1.0, 1.1e8, {}),
    (FP32, 4.0, -1.1e8, {}),
    (FP32, 2.0**15, 1.3e8, {}),
    (FP32, 1.0, 2.1e7, {}),
    (FP32, 2.0**15, 1e3, {"softcap": 1e14}),
]


@pytest.mark.parametrize("seq", (17, 80))
@pytest.mark.parametrize("dtype, size, scale, options", HUGE)
def test_one_key_wins(dtype, size, scale, options, seq):
    extreme.one_key_wins("triton", "cpu", dtype, size, scale, seq, tangents=seq == 17, **options)


@pytest.mark.parametrize("size, scale", ((1.0, 1.1e8), (4.0, -1.1e8), (2.0**15, 1.3e8)))
def test_one_key_wins_in_plain_pytorch(size, scale):
    extreme.one_key_wins("reference", "cpu", FP32, size, scale)


@pytest.mark.parametrize("backend", ("reference", "triton"))
def test_rows_of_every_size(backend):
    extreme.rows_of_every_size(backend, "cpu")


@pytest.mark.parametrize("saturation", (1, 4, 6, 9, 20, 60))
@pytest.mark.parametrize("backend, dtype", [("reference", FP32), *(("triton", d) for d in DTYPES)])
def test_slope_of_a_sharp_softcap(backend, dtype, saturation):
    extreme.slope_of_a_sharp_softcap(backend, "cpu", dtype, saturation)


def test_sharp_softcap_and_scores_of_thirty():
    extreme.sharp_softcap_and_scores_of_thirty("triton", "cpu")


FAR = (1e3, 1e4, 1e5, 1e7, 1e10, 1e20, 1e23, 1e29, 3e37)


@pytest.mark.parametrize("softcap", FAR)
@pytest.mark.parametrize("backend, dtype", [(b, d) for b in ("reference", "triton") for d in DTYPES])
def test_softcap_far_above_the_scores(backend, dtype, softcap):
    extreme.softcap_far_above_the_scores(backend, "cpu", dtype, softcap)


@pytest.mark.parametrize("which", ("products", "values"))
@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("backend", ("reference", "triton", "sdpa"))
def test_sums_near_the_end_of_fp32(backend, dtype, which):
    extreme.sums_near_the_end_of_fp32(backend, "cpu", dtype, which, lse=backend != "sdpa")


@pytest.mark.parametrize("share, bias", ((0.5, 0.0), (1.0, 0.0), (1.0, 92.0)))
@pytest.mark.parametrize(
    "backend, dtype",
    [("reference", torch.float64), ("reference", FP32), ("triton", FP32), ("triton", BF16)],
)
def test_weights_below_the_smallest_normal_number(backend, dtype, share, bias):
    extreme.weights_below_the_smallest_normal_number(backend, "cpu", dtype, share, bias)


def test_the_reference_differentiates_a_softcap_to_any_order():
    """Also at scores of exactly 0, where a formula in |x| would have a kink."""
    x = torch.tensor([-30.0, -2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.0, 30.0], dtype=torch.float64)
    from flashsci.backends.reference import _tanh, _tanh_slope

    x.requires_grad_()
    for f, g in ((_tanh, torch.tanh), (_tanh_slope, lambda y: 1 - torch.tanh(y) ** 2)):
        ours, theirs = f(x), g(x)
        for _ in range(4):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
            ours, theirs = (torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in (ours, theirs))
