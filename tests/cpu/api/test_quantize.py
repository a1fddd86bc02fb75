"""`flashsci.quantize`: what its numbers mean, that smoothing and rotation are exact, and rows that are zero, NaN or far out."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashsci
from flashsci.api.quantization import rotation

E4M3 = torch.float8_e4m3fn
EDGES = torch.tensor([0, 70, 70, 200, 201], dtype=torch.int32)


def dense_scale(found, rows, per, block):
    if per == "tensor":
        return found.scale
    if per == "head":
        return found.scale[..., None, None]
    return found.scale.repeat_interleave(block, -1)[..., :rows, None]


@pytest.mark.parametrize("per", ("tensor", "head", "block"))
@pytest.mark.parametrize("block", (64, 128))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_dense(per, block, dtype):
    """Each number within its rounding, and the largest of all that share a scale at 448."""
    x = (torch.randn(2, 3, 200, 40) * torch.logspace(-3, 3, 200)[:, None]).to(dtype)
    found = flashsci.quantize(x, per, block=block)
    count = -(-200 // block)
    assert found.scale.shape == {"tensor": (), "head": (2, 3), "block": (2, 3, count)}[per]
    assert found.values.dtype == E4M3 and found.values.shape == x.shape and found.mean is None
    scale = dense_scale(found, 200, per, block)
    error = (found.values.float() * scale - x.float()).abs()
    assert (error <= 2**-4 * 1.001 * x.float().abs() + 2**-10 * scale).all()
    parts = [x] if per == "tensor" else [x[a, b] for a in range(2) for b in range(3)]
    if per == "block":
        parts = [p for x in parts for p in x.split(block)]
    wanted = torch.stack([p.float().abs().max() / 448 for p in parts])
    assert torch.equal(found.scale.flatten(), wanted)


@pytest.mark.parametrize("block", (64, 128))
def test_packed_is_each_sequence_by_itself(block):
    x = torch.randn(201, 3, 16) * torch.logspace(-2, 2, 201)[:, None, None]
    for per in ("head", "block"):
        found = flashsci.quantize(x, per, block=block, cu_seqlens=EDGES)
        assert found.scale.shape == ((4 if per == "head" else 201 // block + 4), 3)
        for n, (first, last) in enumerate(itertools.pairwise(EDGES.tolist())):
            alone = flashsci.quantize(x[first:last].transpose(0, 1), per, block=block)
            values = found.values[first:last].transpose(0, 1)
            assert torch.equal(values.float(), alone.values.float())
            slot = n if per == "head" else first // block + n
            blocks = 1 if per == "head" else alone.scale.shape[-1]
            if last > first:
                assert torch.equal(found.scale[slot : slot + blocks].T.reshape(alone.scale.shape), alone.scale)
    assert flashsci.quantize(x, "tensor", cu_seqlens=EDGES).scale == x.abs().max() / 448


@pytest.mark.parametrize("width", (1, 2, 8, 64, 128, 256))
def test_rotation_is_orthogonal_and_spreads(width):
    matrix = rotation(width, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width))
    # Neither one large column nor equal ones stay large.
    for x in (torch.eye(width)[0] * width**0.5, torch.ones(width)):
        assert (x @ matrix).abs().max() <= 2**0.5 * 1.0001


@pytest.mark.parametrize("width", (64, 96, 40, 7))
def test_rotation_keeps_products(width):
    """Also in parts, where the width is no power of two: of numbers that e4m3 holds, whose sums it holds, exactly."""
    q, k = torch.randint(-1, 2, (2, 5, width)).float()
    rounded = [flashsci.quantize(x, "tensor", rotate=True) for x in (q, k)]
    wide = [found.values.double() * found.scale.double() for found in rounded]
    error = (wide[0] @ wide[1].T - (q @ k.T).double()).abs()
    assert (error <= 0.1 * q.norm(dim=1)[:, None] * k.norm(dim=1)).all()


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("packed", (False, True))
def test_smoothing_is_exact(causal, packed):
    """out is that of the keys as they were, lse less what the mean is worth."""
    q, v = torch.randn(2, 201, 64), torch.randn(2, 201, 64)
    k = torch.randn(2, 201, 64)
    k[..., 3] += 80
    options: dict = dict(causal=causal, return_lse=True)
    if packed:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    errors = {}
    for smooth in (False, True):
        edges = dict(cu_seqlens=EDGES) if packed else {}
        found = [flashsci.quantize(x, smooth=smooth and x is k, **edges) for x in (q, k, v)]
        tensors = [f.values for f in found]
        scales = {f"{n}_scale": f.scale for n, f in zip("qkv", found, strict=True)}
        mean = found[1].mean
        if packed:
            out, lse = flashsci.varlen_attention(*tensors, EDGES, **scales, **options)
            exact, sums = flashsci.varlen_attention(q, k, v, EDGES, backend="reference", **options)
        else:
            out, lse = flashsci.attention(*tensors, **scales, **options)
            exact, sums = flashsci.attention(q, k, v, backend="reference", **options)
        if smooth:
            assert mean.shape == ((2, 64) if packed else (2, 1, 64))
            moved = 64**-0.5 * (q * mean).sum(-1)
            lse = lse + (moved.T if packed else moved)
        errors[smooth] = ((out - exact).norm() / exact.norm()).item(), (lse - sums).abs().max().item()
    assert errors[True][0] < 0.5 * errors[False][0] and errors[True][0] < 0.1, errors
    assert errors[True][1] < errors[False][1] and errors[True][1] < 0.5, errors


def test_rotation_helps_where_single_entries_are_large():
    """The distribution of FlashAttention-3's paper: one entry of a thousand ten times as large."""
    q, k, v = torch.randn(3, 4, 512, 128)
    for x in (q, k):
        x += 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)
    exact = flashsci.attention(q, k, v, backend="reference")
    errors = []
    for rotate in (False, True):
        found = [flashsci.quantize(x, rotate=rotate and x is not v) for x in (q, k, v)]
        scales = {f"{n}_scale": f.scale for n, f in zip("qkv", found, strict=True)}
        out = flashsci.attention(*(f.values for f in found), **scales)
        errors.append(((out - exact).norm() / exact.norm()).item())
    assert errors[1] < 0.8 * errors[0] and errors[1] < 0.06, errors


def test_rows_that_are_zero_nan_or_far_out():
    x = torch.randn(1, 256, 16)
    plain = flashsci.quantize(x)
    x[0, 3], x[0, 5, 2], x[0, 130] = torch.nan, torch.inf, 0.0
    found = flashsci.quantize(x)
    values = found.values.float()
    assert values[0, 3].isnan().all() and values[0, 5, 2].isnan() and (values[0, 130] == 0).all()
    rest = torch.ones(256, dtype=torch.bool)
    rest[[3, 5, 130]] = False
    assert values[:, rest].isfinite().all()
    torch.testing.assert_close(found.scale, plain.scale, rtol=0.5, atol=0.0)

    nothing = flashsci.quantize(torch.zeros(2, 10, 16))
    assert (nothing.scale == 1).all() and (nothing.values.float() == 0).all()
    tiny = flashsci.quantize(torch.full((1, 4, 16), 1e-44))
    assert tiny.scale > 0 and tiny.values.float().isfinite().all()
    # A row 1000 times as large takes a scale, not the digits: numbers down to 2^-15 of it keep theirs.
    x = torch.randn(1, 64, 16)
    x[0, 7] *= 1000
    far = flashsci.quantize(x)
    error = (far.values.float() * far.scale[..., None] - x).abs()
    assert (error <= 2**-4 * 1.001 * x.abs() + 2**-10 * far.scale[..., None]).all()


def test_bad_rows_have_no_part_in_a_mean():
    k = torch.randn(1, 50, 8)
    wanted = flashsci.quantize(k[:, 1:], smooth=True).mean
    k[:, 0] = torch.nan
    torch.testing.assert_close(flashsci.quantize(k, smooth=True).mean, wanted)


def test_nothing_to_round():
    for per, shape in (("tensor", ()), ("head", (2,)), ("block", (2, 0))):
        found = flashsci.quantize(torch.zeros(2, 0, 8), per, smooth=True)
        assert found.values.shape == (2, 0, 8) and found.scale.shape == shape
    edges = torch.zeros(3, dtype=torch.int32)
    found = flashsci.quantize(torch.zeros(0, 2, 8), cu_seqlens=edges)
    assert found.scale.shape == (2, 2)


@pytest.mark.parametrize(
    "error, message, x, options",
    [
        (TypeError, "x must be a torch.Tensor, got list", [1.0], {}),
        (TypeError, r"float16, bfloat16 or float32, got torch.float64; call .float\(\)", torch.zeros(2, 8).double(), {}),
        (ValueError, r"rounding to 8 bits has no gradients and x requires one; call inside torch.no_grad", torch.zeros(2, 8, requires_grad=True), {}),
        (ValueError, r"per must be one of \('tensor', 'head', 'block'\), got 'row'", torch.zeros(2, 8), {"per": "row"}),
        (ValueError, "block must be 128 or 64 rows, got 32", torch.zeros(2, 8), {"block": 32}),
        (ValueError, r"at least two dims \[S, D\]", torch.zeros(8), {}),
        (ValueError, r"packed x must have shape \[T, H, D\]", torch.zeros(2, 8), {"cu_seqlens": EDGES}),
        (TypeError, "cu_seqlens must be int32", torch.zeros(2, 2, 8), {"cu_seqlens": EDGES.long()}),
        (ValueError, "head dims must be at least 1", torch.zeros(2, 0), {}),
        (TypeError, "smooth must be True or False", torch.zeros(2, 8), {"smooth": 1}),
        (TypeError, "rotate must be True or False", torch.zeros(2, 8), {"rotate": "yes"}),
    ],
)  # fmt: skip
def test_refusals(error, message, x, options):
    with pytest.raises(error, match=message):
        flashsci.quantize(x, **options)


def test_compiles_without_graph_breaks():
    def step(x):
        return tuple(flashsci.quantize(x, smooth=True, rotate=True))

    x = torch.randn(2, 100, 64)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    for a, b in zip(found, step(x), strict=True):
        torch.testing.assert_close(a.float(), b.float())
