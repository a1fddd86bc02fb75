"""Masks written as numbers, scores beyond 1e7 and sharp softcaps on the kernels: what tests/cpu interprets, in sizes that
take several tiles, and in all dtypes."""

import pytest

import flashsci
from tests.support import extreme
from tests.support.everywhere import served_on_a_gpu
from tests.support.extreme import DTYPES, KINDS, NUMBERS, PLACES

KERNELS = ["triton", "cuda"]
FP32, FP16, BF16 = DTYPES
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("loaded")]


SIZES = (
    {"sizes": (40, 37), "dim": 16},
    {"sizes": (200, 333), "dim": 64},
    {"sizes": (129, 384), "dim": 128},
)


def pick(choices, *drawn):
    """One of the choices, another for each neighbour: the kernels to compile stay few."""
    tables = (NUMBERS, PLACES, KINDS, DTYPES)
    return choices[sum(t.index(x) for x in drawn for t in tables if x in t) % len(choices)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("backend", KERNELS)
def test_masks_as_numbers(backend, number, place, kind, dtype):
    served_on_a_gpu(extreme.masks_as_numbers, backend, number, place, kind, dtype, **pick(SIZES, kind, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("backend", KERNELS)
def test_masks_as_numbers_second_order(backend, number, place, kind):
    given = {"order": 2, **pick(SIZES[:2], kind)}
    dtype = pick(DTYPES, kind, number)
    served_on_a_gpu(extreme.masks_as_numbers, backend, number, place, kind, dtype, **given)


@pytest.mark.parametrize("order", (1, 2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("backend", KERNELS)
def test_whole_rows_with_a_gradient(backend, number, kind, order):
    dtype = pick(DTYPES, number, kind)
    served_on_a_gpu(extreme.whole_rows_with_a_gradient, backend, number, dtype, kind, order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_under_a_given_lse(backend, number, dtype):
    served_on_a_gpu(extreme.gradients_under_a_given_lse, backend, dtype, number)


HUGE = [
    (FP16, 61440.0, 0.1, {}),
    (FP16, 61440.0, -0.1, {}),
    (FP16, 61440.0, 0.3, {"window": (1000, 1000)}),
    (BF16, 2.0**20, 0.7, {}),
    (BF16, 1.0, 1.1e8, {}),
    (FP32, 1.0, 1.1e8, {}),
    (FP32, 4.0, -1.1e8, {}),
    (FP32, 2.0**15, 1.3e8, {}),
    (FP32, 1.0, 2.1e7, {}),
    (FP32, 2.0**15, 1e3, {"softcap": 1e14}),
]


@pytest.mark.parametrize("seq, dim, tangents", ((17, 32, True), (80, 64, True), (300, 128, False), (700, 64, False)))
@pytest.mark.parametrize("dtype, size, scale, options", HUGE)
@pytest.mark.parametrize("backend", KERNELS)
def test_one_key_wins(backend, dtype, size, scale, options, seq, dim, tangents):
    given = {"seq": seq, "dim": dim, "tangents": tangents, **options}
    served_on_a_gpu(extreme.one_key_wins, backend, dtype, size, scale, **given)


@pytest.mark.parametrize("seq", (200, 1000))
@pytest.mark.parametrize("backend", KERNELS)
def test_rows_of_every_size(backend, seq):
    served_on_a_gpu(extreme.rows_of_every_size, backend, seq=seq)


@pytest.mark.parametrize("saturation", (1, 4, 6, 9, 20, 60))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", KERNELS)
def test_slope_of_a_sharp_softcap(backend, dtype, saturation):
    served_on_a_gpu(extreme.slope_of_a_sharp_softcap, backend, dtype, saturation)


@pytest.mark.parametrize("seq, dim", ((64, 64), (512, 128)))
@pytest.mark.parametrize("backend", KERNELS)
def test_sharp_softcap_and_scores_of_thirty(backend, seq, dim):
    with flashsci.testing.exact_matmul():
        served_on_a_gpu(extreme.sharp_softcap_and_scores_of_thirty, backend, seq=seq, dim=dim)


@pytest.mark.parametrize("softcap", (1e3, 1e5, 1e7, 1e20, 1e29, 3e37))
@pytest.mark.parametrize("seq, dim, tangents", ((23, 16, True), (200, 64, False), (300, 128, False), (130, 256, False)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", KERNELS)
def test_softcap_far_above_the_scores(backend, dtype, softcap, seq, dim, tangents):
    given = {"seq": seq, "dim": dim, "tangents": tangents}
    served_on_a_gpu(extreme.softcap_far_above_the_scores, backend, dtype, softcap, **given)


@pytest.mark.parametrize("which", ("products", "values"))
@pytest.mark.parametrize("seq, dim, tangents", ((20, 16, True), (200, 64, False), (300, 128, False)))
@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("backend", [*KERNELS, "sdpa"])
def test_sums_near_the_end_of_fp32(backend, dtype, which, seq, dim, tangents):
    given = {"seq": seq, "dim": dim, "tangents": tangents, "lse": backend != "sdpa"}
    served_on_a_gpu(extreme.sums_near_the_end_of_fp32, backend, dtype, which, **given)


@pytest.mark.parametrize("share, bias", ((0.5, 0.0), (1.0, 0.0), (1.0, 92.0)))
@pytest.mark.parametrize("seq, tangents", (((17, 23), False), ((17, 23), True), ((70, 130), True)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", KERNELS)
def test_weights_below_the_smallest_normal_number(backend, dtype, seq, tangents, share, bias):
    given = {"seq": seq, "tangents": tangents}
    function = extreme.weights_below_the_smallest_normal_number
    served_on_a_gpu(function, backend, dtype, share, bias, **given)
