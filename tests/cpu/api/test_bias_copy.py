"""A bias whose keys are not neighbours in memory, copied by a kernel, and its gradient on the way back."""

import itertools
import math

import numpy as np
import pytest
import torch

from flashsci.call import bias_copy, ops
from flashsci.call.ops import Tensors

# shape of the bias as kernels see it, and how its memory lies: dims from the slowest to the fastest, and what lies between
LAYOUTS = {
    "pairs of a Linear": ((2, 5, 33, 66), (0, 2, 3, 1), 0),
    "whole tiles": ((1, 16, 7, 64), (0, 2, 3, 1), 0),
    "a layer's slice of a Linear": ((2, 4, 9, 64), (0, 2, 3, 1), 8),
    "more heads than a tile": ((1, 35, 3, 70), (0, 2, 3, 1), 0),
    "transposed": ((2, 3, 20, 17), (0, 1, 3, 2), 0),
    "without heads": ((9, 11), (1, 0), 0),
    "five dims": ((2, 3, 4, 5, 12), (0, 1, 3, 4, 2), 0),
    "rows that end within a tile": ((1, 12, 5, 70), (0, 2, 3, 1), 0),
    "many heads of the batch innermost": ((70, 4, 3, 9), (1, 2, 3, 0), 0),
}


def made(layout, dtype=torch.float32):
    shape, order, more = LAYOUTS[layout]
    sizes = [shape[d] for d in order]
    sizes[-1] += more
    x = torch.randn(sizes, dtype=dtype)[..., : shape[order[-1]]]
    return x.permute([order.index(d) for d in range(len(shape))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_are_exact(layout, dtype):
    bias = made(layout, dtype)
    found = bias_copy.copied(bias)
    assert torch.equal(found, bias) and found.stride(-1) == 1
    assert found.stride() == ops.with_inner_keys(bias).stride()
    assert found.shape[-1] == 1 or found.stride(-2) * found.element_size() % 16 == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_lies_as_the_bias_does(layout):
    bias = made(layout).requires_grad_()
    weight = torch.randn(bias.shape)
    (bias_copy.copied(bias) * weight).sum().backward()
    assert torch.equal(bias.grad, weight)
    (gradient,) = torch.autograd.grad(bias_copy.InnerKeys.apply(bias), bias, weight, create_graph=False)
    order = sorted(range(bias.dim()), key=lambda d: -bias.stride(d))
    assert torch.equal(gradient, weight) and gradient.permute(order).is_contiguous()


def test_second_derivatives():
    bias = torch.randn(2, 3, 2).double().permute(2, 0, 1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: bias_copy.copied(x) ** 3, bias)


def test_small_ones_and_those_on_the_cpu_are_torchs():
    q = torch.zeros(2, 5, 33, 8)
    bias = made("pairs of a Linear")
    assert bias_copy.choose(Tensors(q, q, q, bias)) is ops.with_inner_keys
    assert bias_copy.choose(Tensors(q, q, q)) is ops.with_inner_keys


def test_an_empty_bias():
    bias = torch.zeros(0, 4, 5, 3).permute(0, 3, 1, 2)
    assert bias_copy.copied(bias).shape == bias.shape


def test_a_launch_is_of_one_dtype():
    """A compiled kernel moves elements of one size: alike tensors of another dtype need another."""
    plans_copy = pytest.importorskip("flashsci.backends.triton.plans.copy")
    plans_copy._copy.cache_clear()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        bias = made("whole tiles", dtype)
        assert torch.equal(bias_copy.copied(bias), bias)
    assert plans_copy._copy.cache_info().misses == 3


@pytest.mark.parametrize("source", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("apart", (1, 2))
def test_from_any_order_to_any_other(source, apart):
    """Also where neighbours lie apart in both, or are the same in both."""
    plans_copy = pytest.importorskip("flashsci.backends.triton.plans.copy")
    shape = (5, 9, 67)

    def laid(order, last):
        sizes = [shape[d] for d in order]
        x = torch.randn(*sizes[:-1], sizes[-1] * last)[..., ::last]
        return x.permute([order.index(d) for d in range(3)])

    for order in itertools.permutations(range(3)):
        x, y = laid(source, apart), laid(order, 3 - apart)
        assert torch.equal(plans_copy.copied(x, y), x), order


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.uint8), ids=str)
def test_rows_of_any_pitch(dtype):
    """Between rows that begin anywhere; nothing beside them is written, unless the rows are said to be padded."""
    plans_copy = pytest.importorskip("flashsci.backends.triton.plans.copy")
    random = np.random.default_rng(3)

    def laid(shape, pitch, begin):
        rows = math.prod(shape[:-1])
        memory = torch.full((begin + rows * pitch + 5,), 7).to(dtype)
        return memory, memory[begin : begin + rows * pitch].view(*shape[:-1], pitch)[..., : shape[-1]]

    for _ in range(60):
        shape = [(3, 37), (2, 3, 5, 43), (1, 2, 9, 64), (4, 1), (5, 2), (2, 70, 135)][random.integers(6)]
        pitches = [shape[-1] + more for more in (0, -shape[-1] % 16, 1)]
        (_, source), (memory, target) = (
            laid(shape, random.choice(pitches), random.choice([0, 0, 1, 3])) for _ in range(2)
        )
        source.copy_(torch.randint(0, 100, shape).to(dtype))
        target.fill_(0)
        before = memory.clone()
        assert torch.equal(plans_copy.copied(source, target), source)
        target.fill_(0)
        assert torch.equal(memory, before)
        _, target = laid(shape, pitches[1], 0)
        assert torch.equal(plans_copy.copied(source, target, True), source)


def test_tiles():
    """Dims behind each other in both orders are one; accesses of 16 bytes wherever rows begin at multiples of them."""
    plans_copy = pytest.importorskip("flashsci.backends.triton.plans.copy")

    def sides(shape, source, target, itemsize=4):
        dims = plans_copy.copy_dims(shape, source, target)
        assert math.prod(dim[0] for dim in dims) == math.prod(shape)
        read, written = plans_copy.copy_sides(dims, itemsize)
        assert 0 < read.TILE * written.TILE * itemsize <= plans_copy.COPIED_BYTES
        return [dim[0] for dim in dims], (tuple(read), tuple(written))

    size, pairs = 384, 384 * 384
    heads_last = (pairs * 16, 1, size * 16, 16)
    rows_of_keys = (pairs * 16, pairs, size, 1)
    found = sides((1, 16, size, size), heads_last, rows_of_keys)
    assert found == ([1, 1, 1, 16, pairs], ((16, 4, True, True), (64, 4, True, False)))
    found = sides((1, 16, size, size), rows_of_keys, heads_last)
    assert found == ([1, 1, 1, pairs, 16], ((64, 4, True, False), (16, 4, True, True)))
    # One layer of three, in 16 bits, of 12 heads, whose copy has rows of 256 keys for 250.
    layer = (250 * 250 * 36, 1, 250 * 36, 36)
    padded = (250 * 256 * 12, 250 * 256, 256, 1)
    found = sides((2, 12, 250, 250), layer, padded, 2)
    assert found == ([1, 2, 250, 12, 250], ((16, 4, False, True), (128, 2, False, False)))
    assert sides((1, 1, 1, 5), (5, 5, 5, 1), (7, 7, 7, 1))[0] == [1, 1, 1, 1, 5]
