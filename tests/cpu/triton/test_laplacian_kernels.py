"""The forward Laplacian's kernels, interpreted: judged by the two-error rule."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashsci.backends.triton.plans import laplacian as kernels
from tests.support.laplacian_calls import SHAPES, Shape, require, tensors_of

pytestmark = pytest.mark.every(6)


@pytest.mark.parametrize("name", SHAPES)
def test_against_fp64(name):
    tensors = tensors_of(SHAPES[name])
    require(kernels.compute(tensors, 0.3), tensors, 0.3)


@pytest.mark.parametrize("name", ["electrons", "many keys"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    tensors = tensors_of(SHAPES[name], dtype)
    require(kernels.compute(tensors, 0.3), tensors, 0.3)


@pytest.mark.parametrize("processors", [1, 3, 1000])
def test_directions_in_parts(processors, monkeypatch):
    """Few programs divide the directions among several, also where these are no multiple."""
    monkeypatch.setattr(kernels, "device_of", lambda device: DEVICE._replace(processors=processors))
    tensors = tensors_of(Shape(batch=(1,), heads=1, heads_k=1, directions=7))
    require(kernels.compute(tensors, 0.3), tensors, 0.3)


DEVICE = kernels.device_of(torch.device("cpu"))


@pytest.mark.parametrize("name", ["plain", "many keys"])
def test_strided_tensors(name):
    tensors = tensors_of(SHAPES[name])
    strided = tensors._replace(
        q=tensors.q.transpose(1, 2).contiguous().transpose(1, 2),
        k_jacobian=tensors.k_jacobian.transpose(0, 1).contiguous().transpose(0, 1),
    )
    for a, b in zip(kernels.compute(strided, 0.3), kernels.compute(tensors, 0.3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sizes", [dict(keys=0), dict(rows=0), dict(directions=0), dict(batch=(0,))], ids=str)
def test_empty_dims(sizes):
    tensors = tensors_of(Shape()._replace(**sizes))
    require(kernels.compute(tensors, 0.3), tensors, 0.3)


def test_many_keys_without_directions():
    tensors = tensors_of(SHAPES["many keys"]._replace(directions=0))
    require(kernels.compute(tensors, 0.3), tensors, 0.3)


@pytest.mark.parametrize("scale", [0.3, 30.0])
@pytest.mark.parametrize("seen", ["last tile", "other tiles by row", "one key"])
def test_slopes_are_centred_by_another_tile(seen, scale):
    """The mean over the first tile that a row sees stands for that over all of its keys; huge slopes where P is small."""
    tensors = tensors_of(SHAPES["many keys"]._replace(bias=(70, 75)))
    keys, rows = torch.arange(75), torch.arange(70)[:, None]
    if seen == "one key":
        tensors = tensors._replace(bias=torch.where(keys == 70, 20.0, tensors.bias))
    else:
        tensors = tensors._replace(mask=(keys >= 64).expand(70, 75) if seen == "last tile" else keys >= rows)
    tensors = tensors._replace(k_jacobian=tensors.k_jacobian * torch.where(keys < 40, 100.0, 1.0)[:, None])
    require(kernels.compute(tensors, scale), tensors, scale)


def test_huge_scores():
    tensors = tensors_of(SHAPES["mask"])
    tensors = tensors._replace(bias=tensors.bias * 1e4)
    require(kernels.compute(tensors, 0.3), tensors, 0.3)
