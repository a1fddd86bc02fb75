"""The forward Laplacian on a GPU: kernels by the two-error rule, every tile, hidden rows, strides, and memory."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.testing import exact_matmul
from tests.support.laplacian_calls import SHAPES, Shape, require, tensors_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
NAMES = LaplacianTensors._fields


def on_gpu(shape, dtype):
    return LaplacianTensors(*(None if x is None else x.to("cuda") for x in tensors_of(shape, dtype)))


def call(tensors, backend="triton", **options):
    given = dict(zip(NAMES[3:], tensors[3:], strict=True))
    return flashsci.forward_laplacian(*tensors[:3], **given, backend=backend, **options)


def judged(tensors, scale=0.2):
    with exact_matmul():
        found = call(tensors, scale=scale)
        require(found, tensors, scale)
    return found


@DTYPES
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name, dtype):
    judged(on_gpu(SHAPES[name], dtype))


@DTYPES
@pytest.mark.parametrize("dim", [16, 25, 32, 40, 64, 96, 128])
@pytest.mark.parametrize("length", [42, 160])
@pytest.mark.parametrize("hides", ["nothing", "the future", "whole rows"])
def test_every_tile(dim, length, hides, dtype):
    tensors = on_gpu(Shape(heads=4, rows=length, keys=length, dim=dim, dim_v=dim, directions=5), dtype)
    if hides == "the future":
        tensors = tensors._replace(mask=torch.ones(length, length, dtype=torch.bool, device="cuda").tril())
    if hides == "whole rows":
        mask = torch.rand(2, 1, length, length, device="cuda") > 0.3
        mask[:, :, 5:9] = False
        tensors = tensors._replace(mask=mask)
    found = judged(tensors)
    if hides == "whole rows":
        assert not any(x[..., 5:9, :].any() for x in found)


@DTYPES
@pytest.mark.parametrize("seen", ["last tile", "one key"])
def test_slopes_are_centred_by_another_tile(seen, dtype):
    tensors = on_gpu(SHAPES["many keys"]._replace(bias=(70, 75)), dtype)
    keys = torch.arange(75, device="cuda")
    if seen == "last tile":
        tensors = tensors._replace(mask=(keys >= 64).expand(70, 75))
    else:
        tensors = tensors._replace(bias=torch.where(keys == 70, 20.0, tensors.bias).to(dtype))
    judged(tensors._replace(k_jacobian=tensors.k_jacobian * torch.where(keys < 40, 100.0, 1.0)[:, None].to(dtype)))


@DTYPES
def test_sums_of_one_sign(dtype):
    """Tensor cores round towards zero: sums over n D numbers of one sign show it."""
    tensors = on_gpu(Shape(rows=42, keys=42, dim=64, dim_v=64, directions=126), dtype)
    judged(LaplacianTensors(*(None if x is None else x.abs() for x in tensors)), scale=0.05)


def test_strided_and_unaligned_tensors():
    tensors = on_gpu(Shape(dim=32, dim_v=32), torch.float32)
    q = torch.empty(tensors.q.numel() + 1, device="cuda")[1:].view_as(tensors.q).copy_(tensors.q)
    jacobian = tensors.k_jacobian.transpose(0, 2).contiguous().transpose(0, 2)
    for x, y in zip(call(tensors._replace(q=q, k_jacobian=jacobian)), call(tensors), strict=True):
        assert torch.equal(x, y)


def test_the_same_bits_every_time():
    tensors = on_gpu(Shape(heads=4, rows=42, keys=42, dim=64, dim_v=64, directions=126), torch.float32)
    first = call(tensors)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(call(tensors), first, strict=True))


def test_auto_takes_the_kernels():
    tensors = on_gpu(Shape(dim=32, dim_v=32), torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(call(tensors, backend="auto"), call(tensors), strict=True))


def test_captured_in_a_graph():
    tensors = on_gpu(Shape(dim=32, dim_v=32), torch.float32)
    call(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(tensors)
    tensors.q.copy_(torch.randn_like(tensors.q))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(found, call(tensors), strict=True))


def test_memory_of_rows():
    """Beyond the results there is less than them again: no number for each pair and direction."""
    length, directions = 512, 32
    tensors = on_gpu(Shape(rows=length, keys=length, dim=32, dim_v=32, directions=directions), torch.float32)
    call(tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call(tensors)
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(x.numel() for x in found) * 4
    pairs = directions * found.out[..., 0].numel() * length * 4
    assert peak - results < results < pairs
