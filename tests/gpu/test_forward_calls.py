"""Forwards that `python -m flashsci check` does not draw: long rows of few queries, scores that grow from block to block, packed
rows of no sequence, every broadcast of bias and mask. 16-bit kernels, each held to its generation."""

import itertools

import pytest
import torch

from tests.support.raw_calls import CELLS, DEVICE, HALVES, WINDOWS, make

pytestmark = pytest.mark.gpu
INF = float("inf")


def tensors(dtype, b, h, hk, sq, sk, d, dv, layout="bshd"):
    shapes = ((b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv))
    return [make(shape, HALVES[dtype], layout) for shape in shapes]


@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_long_rows_and_large_batches(findings, dtype, dim):
    for size in ((40, 8, 4, 321, 321), (1, 2, 2, 2500, 2411)):
        for window, lower_right in WINDOWS:
            given = tensors(dtype, *size, dim, dim)
            findings.forward("dense", *given, window=window, lower_right=lower_right)


@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_scales(findings, dtype, dim):
    """Negative, zero, and so large that softmax is nearly a maximum."""
    for scale in (-0.3, 0.0):
        given = tensors(dtype, 2, 4, 2, 333, 444, dim, dim, "bhsd")
        findings.forward("scale", *given, scale=scale)
    given = tensors(dtype, 1, 2, 2, 1000, 1000, dim, dim)
    findings.forward("scale", *given, window=(-1, 0), scale=3.0)


@pytest.mark.parametrize("generation, dtype, dim", CELLS)
@pytest.mark.parametrize("dim_v", (40, 128, 200))
def test_scores_that_grow_from_block_to_block(findings, generation, dtype, dim, dim_v):
    """Right to left, until exp2 overflows."""
    if generation == "sm75" and dim_v > 128:
        pytest.skip("its head dims end at 128")
    kinds = itertools.product(
        (3.0, 12.0, 60.0),
        (WINDOWS[0], WINDOWS[2], ((400, 100), False)),
        ("ramp", "sink"),
        (0.0, 30.0),
    )
    for factor, (window, lower_right), what, softcap in kinds:
        q, k, v = tensors(dtype, 1, 4, 2, 700, 1111, dim, dim_v)
        if what == "ramp":
            k *= torch.linspace(factor, 0.1, 1111, device=DEVICE).to(k.dtype)[:, None]
        else:
            k[..., :3, :] = q[:, ::2, 5:8] * (factor / 3)
        findings.forward(f"{what} {factor}", q, k, v, window=window, lower_right=lower_right, softcap=softcap)


@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_packed_rows_of_no_sequence(findings, dtype, dim):
    """Offsets begin behind the first row and end before the last; a sequence in the middle is NaN, some are empty."""
    lens_q = [0, 1, 130, 63, 64, 0, 400, 193, 7, 128]
    lens_k = [5, 1, 77, 64, 200, 9, 300, 0, 129, 128]
    poison = 4
    cu = tuple(torch.tensor([3, *lens], device=DEVICE).cumsum(0).int() for lens in (lens_q, lens_k))
    starts_q, starts_k = (x.tolist() for x in cu)
    total_q, total_k = sum(lens_q) + 8, sum(lens_k) + 9
    for window, lower_right in (WINDOWS[0], WINDOWS[2], ((40, 20), False)):
        q = make((6, total_q, dim), HALVES[dtype], "bshd")
        k, v = (make((2, total_k, dim), HALVES[dtype], "bshd") for _ in range(2))
        for x in (k, v):
            x[:, starts_k[poison] : starts_k[poison + 1]] = torch.nan
            x[:, :3] = x[:, starts_k[-1] :] = torch.nan
        options = {"window": window, "lower_right": lower_right}
        name = f"packed {options}"
        found = findings.run(name, findings.forward_op(q, k, v, cu=cu, **options))
        if found is None:
            continue
        out, lse = found
        nobody = [slice(0, 3), slice(starts_q[-1], total_q)]
        for n, (rows, keys) in enumerate(zip(lens_q, lens_k, strict=True)):
            at, of = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
            if not keys:
                nobody.append(at)
            elif rows and n != poison:
                part = out[:, at], lse[:, at], q[:, at], k[:, of], v[:, of]
                findings.judge_forward(f"{name}, sequence {n}", *part, **options)
        for at in nobody:
            if not ((out[:, at] == 0).all() and (lse[:, at] == -INF).all()):
                findings.fail(name, f"rows {at} have no keys, and results")


def kinds_of_bias(b, h, sq, sk):
    return (
        ((b, h, sq, sk), "bias"),
        ((1, h, sq, sk), "fp32"),
        ((b, 1, 1, sk), "bias"),
        ((b, 1, 1, sk), "mask"),
        ((1, 1, sq, sk), "mask"),
        ((b, h, sq, sk), "both"),
        ((1, 1, 1, sk), "fp32 both"),
        ((b, h, sq, sk), "inf"),
        ((b, 1, 1, sk), "least"),
    )


@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_every_broadcast_of_bias_and_mask(findings, generation, dtype, dim):
    sizes = [
        (2, 4, 4, 384, 384, dim),
        (1, 4, 2, 200, 336, dim),
        (3, 2, 1, 65, 1024, max(dim - 40, 8)),
        (2, 2, 2, 700, 96, dim - 8),
        (1, 2, 2, 1, 16, dim),
    ]
    for b, h, hk, sq, sk, d in sizes:
        for n, (shape, kind) in enumerate(kinds_of_bias(b, h, sq, sk)):
            q, k, v = tensors(dtype, b, h, hk, sq, sk, d, d)
            bias = mask = None
            if kind != "mask":
                bias = 3 * make(shape, torch.float32 if "fp32" in kind else HALVES[dtype])
            if kind == "inf":  # padding on the right, a few rows without keys
                bias[..., sk * 2 // 3 :] = -INF
                bias[..., : sq // 3, :] = -INF
            if kind == "least":  # as finfo.min pads
                bias[..., sk // 2 :] = torch.finfo(bias.dtype).min
            if kind == "mask" or "both" in kind:
                mask = torch.rand((b, 1, sq if n == 4 else 1, sk), device=DEVICE) < 0.6
                mask[0] &= torch.arange(sk, device=DEVICE) < sk // 2
                if n == 4:
                    mask[..., : sq // 2, :] = False
            if mask is not None and d <= 32 and generation == "sm90":
                continue  # left to sm80
            # With "least" every row has a key: it counts as -inf.
            window, lower_right = (WINDOWS[0], WINDOWS[2], ((50, 20), False))[0 if kind == "least" else n % 3]
            options = {"softcap": 20.0 if n == 5 else 0.0, "scale": -0.2 if n == 6 else None}
            findings.forward(kind, q, k, v, bias=bias, mask=mask, window=window, lower_right=lower_right, **options)


@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_few_queries_and_many_keys(findings, dtype, dim):
    sizes = [(1, 8, 2, 1, 5000, dim, dim), (3, 4, 4, 1, 300, dim, dim - 8), (5, 32, 8, 1, 2000, dim - 24, dim), (2, 14, 2, 3, 777, dim, dim),
             (40, 16, 4, 16, 515, dim, dim), (2, 3, 3, 64, 1000, dim, dim), (150, 2, 1, 2, 400, dim, dim)]  # fmt: skip
    options = zip((WINDOWS[0], WINDOWS[2], ((100, 0), True), WINDOWS[1]), (0.0, 0.0, 25.0, 0.0), strict=True)
    for (b, h, hk, sq, sk, d, dv), ((window, lower_right), softcap) in itertools.product(sizes, list(options)):
        q, k, _ = tensors(dtype, b, h, hk, sq, sk, d, dv)
        v = make((b, hk, sk, dv), HALVES[dtype])
        findings.forward("decode", q, k, v, window=window, lower_right=lower_right, softcap=softcap)
