"""A bias whose keys are not neighbours in memory, copied by a kernel, and its gradient on the way back."""

import pytest
import torch

from flashsci import bias_copy, ops
from flashsci.ops import Tensors

# shape of the bias as kernels see it, and how its memory lies: dims from the slowest to the fastest, and what lies between
LAYOUTS = {
    "pairs of a Linear": ((2, 5, 33, 66), (0, 2, 3, 1), 0),
    "whole tiles": ((1, 16, 7, 64), (0, 2, 3, 1), 0),
    "a layer's slice of a Linear": ((2, 4, 9, 64), (0, 2, 3, 1), 8),
    "more heads than a tile": ((1, 35, 3, 70), (0, 2, 3, 1), 0),
    "transposed": ((2, 3, 20, 17), (0, 1, 3, 2), 0),
    "without heads": ((9, 11), (1, 0), 0),
    "five dims": ((2, 3, 4, 5, 12), (0, 1, 3, 4, 2), 0),
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
    (gradient,) = torch.autograd.grad(
        bias_copy.InnerKeys.apply(bias), bias, weight, create_graph=False
    )
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
    host_bias = pytest.importorskip("flashsci.backends.triton.host_bias")
    host_bias._copy.cache_clear()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        bias = made("whole tiles", dtype)
        assert torch.equal(bias_copy.copied(bias), bias)
    assert host_bias._copy.cache_info().misses == 3
