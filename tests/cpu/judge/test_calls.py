"""Calls drawn at random: the same everywhere, within their limits, and of every kind."""

import doctest
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from flashsci.testing import (
    LARGE_CALLS,
    SMALL_CALLS,
    DrawnCall,
    Judge,
    calls,
    calls_making,
    draw_call,
    evaluate,
    make_call,
)
from flashsci.testing.blocks import visible_pairs

pytestmark = pytest.mark.every(4)

DRAWN = [draw_call(11, n) for n in range(1500)]
LITTLE = [draw_call(12, n, SMALL_CALLS) for n in range(400)]


def test_the_first_calls_of_a_seed_are_these():
    """A figure that is published for a seed is about these calls: a change of the distribution needs other seeds."""
    assert [str(draw_call(1, n)) for n in range(8)] == [
        "fp32 second, B 5, H 12, S 526, D 64, bshd, causal, softcap",
        "fp32 second, B 9, H 12, S 167, D 64, bshd, causal, softcap",
        "fp32 second, B 6, H 12, S 14, D 64, bshd, causal, softcap",
        "fp32 second, B 24, H 12, S 51, D 64, bshd, causal, softcap",
        "fp16 step, B 38, H 16, 288 x 186, D 128, bhsd, bias pairs fp16, dropout 0.2",
        "fp16 step, B 15, H 16, 532 x 1, D 128, bhsd, bias pairs fp16, dropout 0.2",
        "fp16 step, B 1, H 16, 415 x 4864, D 128, bhsd, bias pairs fp16, dropout 0.2",
        "fp16 step, B 10, H 16, 13662 x 1, D 128, bhsd, bias pairs fp16, dropout 0.2",
    ]


def test_calls_depend_on_seed_and_number_alone():
    state = torch.random.get_rng_state()
    assert draw_call(11, 40) == DRAWN[40]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len({replace(call, index=0) for call in DRAWN}) > 0.99 * len(DRAWN)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("work", "work"),
        ("dtype", "dtype"),
        ("layout", "layout"),
        ("bias", "bias"),
        ("bias's innermost", "bias_inner"),
        ("bias's gradient", "bias_grad"),
        ("mask", "mask"),
        ("mask's batch", "mask_own"),
        ("causal", "causal"),
    ],
)
def test_every_choice_is_made(name, field):
    seen = {getattr(call, field) for call in DRAWN}
    assert len(seen) == len(calls.ODDS[name])


def test_the_draw_has_every_kind_of_call():
    count = Counter()
    for call in DRAWN:
        count["decoding"] += call.seq_q <= calls.DECODED < call.seq_k
        count["cross"] += call.seq_q != call.seq_k
        count["packed"] += bool(call.lens)
        count["grouped"] += call.heads_k != call.heads
        count["odd dim"] += call.dim % 2
        count["other values"] += call.dim != call.dim_v
        count["window"] += call.window is not None
        count["fp32 bias in 16 bits"] += call.bias_dtype == "float32" != call.dtype
        count["many members"] += call.batch * call.heads > 65_535
        for option in ("softcap", "sink", "alibi", "key_weight", "dropout_p"):
            count[option] += bool(getattr(call, option))
    assert all(count[name] >= 5 for name in count), count
    lengths = [call.seq_k for call in DRAWN if call.seq_k >= 64]
    assert sum(n % 8 == 0 for n in lengths) < 0.25 * len(lengths)
    assert max(lengths) > 10_000
    assert {call.batch for call in DRAWN} >= {1, 2}


@pytest.mark.parametrize(("drawn", "limits"), [(DRAWN, LARGE_CALLS), (LITTLE, SMALL_CALLS)], ids=["large", "small"])
def test_limits_hold(drawn, limits):
    for call in drawn:
        assert max(call.seq_q, call.seq_k, *call.lens) <= limits.longest
        assert call.batch * call.heads <= limits.members
        assert call.bytes <= limits.bytes
        assert call.flops <= limits.flops / (8 if call.dtype == "float32" else 1)
        assert call.heads % call.heads_k == 0
        assert 8 <= call.dim <= 256 and 8 <= call.dim_v <= 256
        if call.work == "second":
            assert call.seq_k <= limits.longest_second and not call.lens


def test_json_keeps_a_call():
    for call in DRAWN:
        assert DrawnCall.of(json.loads(json.dumps(call.as_dict()))) == call


def test_every_row_sees_a_key():
    for call in LITTLE:
        if call.lens:
            continue
        x = make_call(call)
        seen = visible_pairs(call.seq_q, call.seq_k, x.options, x.q.device)
        seen = seen if x.mask is None else seen & x.mask
        assert seen.any(-1).all(), call


def test_shapes_are_those_of_the_tensors():
    for call in LITTLE:
        x = make_call(call)
        assert call.bias_shape == (None if x.bias is None else tuple(x.bias.shape))
        assert call.mask_shape == (None if x.mask is None else tuple(x.mask.shape))
        scores = (call.batch, call.heads, call.seq_q, call.seq_k)
        for y in (x.bias, x.mask):
            assert y is None or call.lens or torch.broadcast_shapes(y.shape, scores) == scores
        held = sum(y.numel() * y.element_size() for y in (x.q, x.k, x.v, x.bias) if y is not None)
        assert held <= call.bytes
        assert (x.dout is None) == (call.work == "forward")
        assert bool(x.tangents) == (call.work == "second")


def test_layouts_are_in_memory():
    call = DrawnCall(1, 2, batch=2, heads=4, heads_k=2, seq_q=5, seq_k=5, dim=8, dim_v=16)
    x = make_call(call)
    assert x.q.is_contiguous() and x.v.is_contiguous()
    x = make_call(replace(call, layout="bshd"))
    assert x.q.transpose(1, 2).is_contiguous()
    x = make_call(replace(call, layout="qkv"))
    assert x.q.stride(2) == x.v.stride(2) == 4 * 8 + 2 * 8 + 2 * 16
    assert x.k.untyped_storage().data_ptr() == x.q.untyped_storage().data_ptr()
    inner = make_call(replace(call, bias="shared", bias_dtype="float32", bias_inner="heads")).bias
    assert inner.shape == (1, 4, 5, 5) and inner.stride(1) == 1
    packed = make_call(replace(call, batch=1, seq_q=0, seq_k=0, lens=(3, 4), layout="qkv"))
    assert packed.q.shape == (7, 4, 8) and packed.cu_seqlens_q.tolist() == [0, 3, 7]


@pytest.mark.parametrize("length", [(1, 1), (8, 8), (9, 16), (63, 64), (64, 64), (65, 128), (1025, 1088)])
def test_a_neighbour_has_lengths_that_kernels_like(length):
    own, other = length
    call = DrawnCall(1, 1, seq_q=own, seq_k=own, layout="qkv", bias="shared", bias_inner="heads", causal=True)
    found = call.neighbour()
    assert found == replace(call, seq_q=other, seq_k=other, layout="bhsd", bias_inner="keys")
    assert found.neighbour() == found
    assert DrawnCall(1, 1, lens=(own, 7)).neighbour().lens == (other, 7)


@pytest.mark.parametrize("call", [c for c in LITTLE if c.scores < 4000][:24], ids=str)
def test_tensors_go_to_the_judge(call):
    inputs = make_call(call)
    Judge(inputs, fused=False).require(evaluate(inputs, "reference"))


def test_a_device_gives_the_same_values_again():
    assert torch.equal(make_call(LITTLE[0]).q, make_call(LITTLE[0]).q)
    assert not torch.equal(make_call(LITTLE[0]).q, make_call(replace(LITTLE[0], index=1)).q)


@pytest.mark.parametrize("module", [calls, calls_making], ids=["calls", "calls_making"])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
