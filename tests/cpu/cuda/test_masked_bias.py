"""A mask hidden in a bias for Hopper's backward: the calls for which that is done, and the copy."""

import pytest
import torch

from flashsci.backends.cuda import decisions, masked_bias
from flashsci.backends.cuda.library import library_path
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from tests.support.rehearsed import empty

built = pytest.mark.skipif(library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)")
ALL = NEED_Q | NEED_K | NEED_V | NEED_BIAS
SIZES = 2, 4, 130, 304


def call(bias, mask, dtype=torch.bfloat16, dim=64, softcap=0.0, caps_bias=False):
    q, k = empty(2, 4, 130, dim, dtype=torch.bfloat16), empty(2, 4, 304, dim, dtype=torch.bfloat16)
    mask = None if mask is None else empty(*mask, dtype=torch.bool)
    tensors = Tensors(q, k, k, None if bias is None else empty(*bias, dtype=dtype), mask=mask)
    scalars = Scalars(-1, -1, 0.125, softcap, -1, -1, False, 0.0, "default", False, caps_bias=caps_bias)
    return Saved(tensors, *fake_forward(tensors), scalars)


SERVED = {
    "every score": call(SIZES, (2, 1, 130, 304)),
    "shared by the batch": call((1, 4, 130, 304), (1, 1, 130, 304)),
    "fp32, wide heads": call(SIZES, (2, 1, 130, 304), torch.float32, 128),
    "softcap": call(SIZES, (2, 4, 130, 304), softcap=20.0),
}
LEFT = {
    "a mask of more batch entries": call((1, 4, 130, 304), (2, 1, 130, 304)),
    "a mask of more heads": call((2, 1, 130, 304), (1, 4, 130, 304)),
    "a bias of keys and a softcap": call((2, 4, 1, 304), (2, 1, 130, 304), softcap=20.0),
    "a softcap of the sum": call(SIZES, (2, 1, 130, 304), softcap=20.0, caps_bias=True),
    "wide heads": call(SIZES, (2, 1, 130, 304), dim=192),
}
AS_THEY_ARE = {
    "fp32": call(SIZES, (2, 1, 130, 304), torch.float32),
    "a mask of keys": call(SIZES, (2, 1, 1, 304)),
    "a mask of keys and a softcap": call(SIZES, (2, 1, 1, 304), softcap=20.0),
    "no mask": call(SIZES, None),
    "no bias": call(None, (2, 1, 130, 304)),
}


@pytest.fixture
def many_scores(monkeypatch):
    """As if these calls had so many scores that the copy pays."""
    monkeypatch.setattr(masked_bias, "FEWEST_SCORES", 1)
    decisions._backward.cache_clear()
    yield
    decisions._backward.cache_clear()


DEVICE = torch.device("cuda")


@built
@pytest.mark.usefixtures("many_scores")
@pytest.mark.parametrize("kind", SERVED | LEFT | AS_THEY_ARE)
def test_hoppers_backward_takes_a_mask_in_the_place_of_a_bias(kind):
    saved = (SERVED | LEFT | AS_THEY_ARE)[kind]
    first = decisions.backward(saved, ALL, device=DEVICE)[0]
    assert first.startswith("sm80/bwd/" if kind in LEFT else "sm90/bwd/")
    assert decisions._of_backward(saved, ALL, 0, DEVICE).hides_in_bias == (kind in SERVED)
    assert not decisions._of_backward(saved, ALL, 80, DEVICE).hides_in_bias


@built
@pytest.mark.parametrize("kind", SERVED)
def test_small_calls_have_both_read_by_other_kernels(kind):
    """Those of sm80; Hopper's if they are asked for by name."""
    decisions._backward.cache_clear()
    assert decisions.backward(SERVED[kind], ALL, device=DEVICE)[0].startswith("sm80/bwd/")
    assert decisions.backward(SERVED[kind], ALL, 90, DEVICE)[0].startswith("sm90/bwd/")


@pytest.mark.parametrize("keys", (301, 304))
@pytest.mark.parametrize("expanded", (False, True))
def test_the_copy_is_minus_infinity_at_hidden_pairs(keys, expanded):
    bias, mask = torch.randn(1 if expanded else 2, 4, 130, keys), torch.rand(1, 1, 130, keys) < 0.6
    given = bias.expand(2, 4, 130, keys).requires_grad_()
    q, k = torch.randn(2, 4, 130, 8), torch.randn(2, 4, keys, 8)
    tensors = Tensors(q, k, k, given, mask=mask)
    assert masked_bias.fits(tensors)
    found = masked_bias.hidden_in_bias(tensors)
    assert found.mask is None and found.bias.shape == given.shape and not found.bias.requires_grad
    assert torch.equal(found.bias, torch.where(mask, bias, -torch.inf).expand(given.shape))
    assert found.bias.stride()[0] == (0 if expanded else 4 * 130 * (-(-keys // 4) * 4))  # no copy of repetitions
    assert not any(step % 4 for step in found.bias.stride()[:-1])  # rows begin at multiples of 16 bytes


def test_what_a_copy_would_enlarge_stays_apart():
    rows = empty(2, 4, 130, 8), empty(2, 4, 304, 8), empty(2, 4, 304, 8)
    mask = empty(2, 1, 130, 304, dtype=torch.bool)
    expanded = empty(1, 4, 130, 304).expand(2, 4, 130, 304)
    assert not masked_bias.fits(Tensors(*rows, expanded, mask=mask))
    assert not masked_bias.fits(Tensors(*rows, empty(2, 4, 1, 304), mask=mask))
    assert not masked_bias.fits(Tensors(*rows, empty(2, 4, 130, 1), mask=mask))
    assert not masked_bias.fits(Tensors(*rows, empty(2, 4, 130, 304), mask=mask, mask_tiles=mask))
