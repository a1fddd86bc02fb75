"""Whether tensors share memory, against a look at every byte."""

from __future__ import annotations

import random

import pytest
import torch

from flashsci.call import memory


def bytes_of(x: torch.Tensor) -> list[int]:
    """Where the bytes of all elements lie."""
    places = [x.data_ptr()]
    for n, stride in zip(x.shape, x.stride(), strict=True):
        places = [p + i * stride * x.element_size() for p in places for i in range(n)]
    return [p + b for p in places for b in range(x.element_size())]


def view(of: torch.Tensor, choose: random.Random) -> torch.Tensor:
    """Any view of a buffer of 96 bytes."""
    x = of.view(choose.choice((torch.uint8, torch.int16, torch.float32)))
    shape = [choose.randint(0 if choose.random() < 0.05 else 1, 4) for _ in range(choose.randint(0, 3))]
    strides = [choose.randint(0, 6) for _ in shape]
    end = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if end >= x.numel():
        return x[:0]
    return x.as_strided(shape, strides, choose.randint(0, max(0, x.numel() - 1 - end)))


@pytest.mark.parametrize("seed", range(20))
def test_views_of_one_buffer(seed):
    choose, buffer = random.Random(seed), torch.zeros(96, dtype=torch.uint8)
    shared = 0
    for _ in range(200):
        a, b = view(buffer, choose), view(buffer, choose)
        truth = bool(set(bytes_of(a)) & set(bytes_of(b)))
        shared += truth
        assert memory.share(a, b) == memory.share(b, a) == truth, (a.stride(), b.stride())
        places = bytes_of(a)
        assert memory.folds(a) or len(set(places)) == len(places)  # strides that nest say it exactly
        spans = memory.Spans(a, (None, b))
        assert spans.cross(a, (None, b)) or not truth
        assert memory.span(a) == (max(places) + 1 - min(places) if places else 0)
    assert 20 < shared < 180


def test_caches_that_interleave():
    """The layouts of serving engines: one buffer for keys and values, which share no element."""
    for kv in (
        torch.zeros(2, 5, 16, 2, 8).unbind(0),
        torch.zeros(5, 2, 16, 2, 8).unbind(1),
        torch.zeros(5, 16, 2, 2, 8).unbind(2),
        torch.zeros(5, 16, 2, 16).split(8, -1),
        torch.zeros(5, 16, 2, 16).transpose(1, 2).split(8, -1),
    ):
        assert not memory.share(*kv) and not any(memory.folds(x) for x in kv)
        assert memory.share(kv[0], kv[0][1:, ::3])
    joint = torch.zeros(5, 16, 2, 16)
    assert memory.share(joint[..., :9], joint[..., 8:])
    assert memory.folds(torch.zeros(1, 4).expand(3, 4)) and not memory.folds(torch.zeros(3, 1).mT)


def test_a_search_without_an_end_says_yes():
    odd = torch.zeros(1).as_strided((40,) * 6, (0,) * 6)
    assert memory.folds(odd) and memory.share(odd, odd)
