"""Options of flash_attn's functions in the kinds that its extension takes: tensors of one element, numpy scalars, ints for flags."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashsci.compat.flash_attn import fa2, fa3, steps
from flashsci.compat.flash_attn.scalars import window_of

Q = torch.randn(2, 6, 2, 8)
ROWS, CU = Q.flatten(0, 1), torch.tensor([0, 6, 12], dtype=torch.int32)
CACHE = torch.randn(2, 2, 9, 2, 8)


def functions(module):
    """Calls by their options, each with a tensor as its result."""
    yield lambda **o: module.flash_attn_func(Q, Q, Q, **o)
    yield lambda **o: module.flash_attn_qkvpacked_func(torch.stack((Q, Q, Q), 2), **o)
    yield lambda **o: module.flash_attn_varlen_func(ROWS, ROWS, ROWS, CU, CU, 6, 6, **o)
    yield lambda **o: module.flash_attn_with_kvcache(Q[:, :3], *CACHE, cache_seqlens=7, **o)


ALIKE = {
    "window-tensor": (dict(window_size=torch.tensor([2, 1])), dict(window_size=(2, 1))),
    "window-of-tensors": (
        dict(window_size=(torch.tensor(2), torch.tensor(1))),
        dict(window_size=(2, 1)),
    ),
    "window-of-one-tensor": (dict(window_size=(torch.randint(3, 4, ()), 0)), dict(window_size=(3, 0))),
    "window-int64": (dict(window_size=(np.int64(2), np.int32(1))), dict(window_size=(2, 1))),
    "window-array": (dict(window_size=np.array([2, 1])), dict(window_size=(2, 1))),
    "window-negative": (dict(window_size=(-7, 1)), dict(window_size=(-1, 1))),
    "window-none": (dict(window_size=None), dict()),
    "window-everywhere": (dict(window_size=torch.tensor([-1, -1])), dict()),
    "scale-tensor": (dict(softmax_scale=torch.tensor(0.5)), dict(softmax_scale=0.5)),
    "scale-one": (dict(softmax_scale=torch.tensor([0.5])), dict(softmax_scale=0.5)),
    "scale-numpy": (dict(softmax_scale=np.float32(0.5)), dict(softmax_scale=0.5)),
    "causal-int": (dict(causal=1), dict(causal=True)),
    "causal-zero": (dict(causal=0), dict(causal=False)),
    "causal-tensor": (dict(causal=torch.tensor(True)), dict(causal=True)),
    "causal-numpy": (dict(causal=np.bool_(True)), dict(causal=True)),
    "causal-none": (dict(causal=None), dict()),
    "softcap-tensor": (dict(softcap=torch.tensor(2.0)), dict(softcap=2.0)),
    "softcap-int": (dict(softcap=2), dict(softcap=2.0)),
}


@pytest.mark.parametrize("module", [fa2, fa3])
@pytest.mark.parametrize("name", ALIKE)
def test_kinds_that_say_the_same(name, module):
    given, plain = ALIKE[name]
    for call in functions(module):
        assert torch.equal(call(**given), call(**plain))


@pytest.mark.parametrize("module", [fa2, fa3])
def test_ints_as_flags(module):
    for call in list(functions(module))[:3]:
        out, lse, *_ = call(return_attn_probs=1, deterministic=1)
        again, lse_again, *_ = call(return_attn_probs=True, deterministic=True)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
    out, lse, *_ = list(functions(module))[3](return_softmax_lse=1)
    assert lse.shape == (2, 2, 3)


def test_dropout_as_a_tensor(seed):
    torch.manual_seed(seed)
    expected = fa2.flash_attn_func(Q, Q, Q, 0.25)
    torch.manual_seed(seed)
    assert torch.equal(fa2.flash_attn_func(Q, Q, Q, torch.tensor(0.25)), expected)


def test_flags_of_the_cache():
    angles = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.3]))
    table = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin())
    found = []
    for flag in (True, 1, torch.tensor(True)):
        k_cache, v_cache = CACHE.clone()
        found.append(
            fa2.flash_attn_with_kvcache(
                Q[:, :1], k_cache, v_cache, Q[:, :1], Q[:, :1], cache_seqlens=np.int64(3), rotary_interleaved=flag, **table
            )
        )  # fmt: skip
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_length_of_all_as_a_tensor():
    found = fa2.flash_attn_with_kvcache(Q[:, :1], *CACHE, cache_seqlens=torch.tensor(4))
    torch.testing.assert_close(found, fa2.flash_attn_with_kvcache(Q[:, :1], *CACHE, cache_seqlens=4))


def test_windows_of_the_steps():
    tail = (torch.tensor(2), np.int64(1), torch.tensor(0.0), None)
    found = steps._flash_attn_forward(Q, Q, Q, 0.0, torch.tensor(0.5), 0, *tail, 0)
    expected = steps._flash_attn_forward(Q, Q, Q, 0.0, 0.5, False, 2, 1, 0.0, None, False)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(softmax_scale=torch.tensor(0.5, requires_grad=True)), ValueError, "constant of a call.*multiply q"),
        (dict(softmax_scale=torch.ones(2)), ValueError, r"softmax_scale must be a number, got a tensor of shape \[2\]"),
        (dict(softmax_scale="0.5"), TypeError, "scale must be"),
        (dict(causal="yes"), TypeError, "causal must be True or False, got 'yes'"),
        (dict(causal=torch.ones(2)), ValueError, "causal must be a number"),
        (dict(window_size=3), ValueError, r"window_size must be \(left, right\)"),
        (dict(window_size=(1.5, 0)), ValueError, "window_size must be"),
        (dict(window_size=(1, 2, 3)), ValueError, "window_size must be"),
        (dict(window_size=torch.tensor([1.5, 0.0])), ValueError, "window_size must be"),
    ],
    ids=str,
)
@pytest.mark.parametrize("module", [fa2, fa3])
def test_kinds_that_say_nothing(module, options, error, words):
    for call in functions(module):
        with pytest.raises(error, match=words):
            call(**options)


def test_windows():
    assert window_of((-1, -1)) is window_of([-1, -5]) is window_of(None) is None
    assert window_of([np.int64(3), torch.tensor(-2)]) == (3, -1)
    assert all(type(side) is int for side in window_of((torch.tensor(3), np.int8(1))))
