"""Backwards that `python -m flashsci check` does not draw: an lse that is given and larger, gradients that nobody wants, packed
rows of no sequence, offsets of any contents, every broadcast of a bias. 16-bit kernels, each held to its generation.

What Hopper's kernels take of a bias or mask, and what they leave to others, is in test_sm90.py.
"""

import pytest
import torch

import flashsci
from tests.support.raw_calls import CELLS, DEVICE, HALVES, WINDOWS, attention, make

pytestmark = pytest.mark.gpu
ONE = (1, 4, 2, 333, 444)  # batch, heads, heads of k, queries, keys


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_long_rows_and_large_batches(findings, dtype, dim, deterministic):
    for sizes in ((20, 8, 4, 321, 321), (1, 2, 2, 1500, 1411), (1, 2, 1, 6000, 300)):
        for window, lower_right in WINDOWS:
            findings.backward(
                "dense",
                sizes,
                HALVES[dtype],
                (dim, dim),
                window=window,
                lower_right=lower_right,
                deterministic=deterministic,
            )


@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_lse_and_dout_as_ring_attention_gives_them(findings, dtype, dim):
    """An lse of more keys than the call has, a gradient of the lse, no gradient of out."""
    call = ONE, HALVES[dtype], (dim, dim), "bhsd"
    findings.backward("dlse", *call, dlse=True)
    findings.backward("a global lse", *call, extra=1.5)
    findings.backward("no dout", *call, dlse=True, no_dout=True)
    for scale in (-0.3, 0.0):
        findings.backward("scale", *call, scale=scale)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_gradients_that_nobody_wants(findings, dtype, dim, deterministic):
    for need in range(1, 7):
        findings.backward("need", ONE, HALVES[dtype], (dim, dim), need=need, deterministic=deterministic)


@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_exponentials_that_overflow_where_nothing_is_seen(findings, dtype, dim):
    """Rows whose lse is far below -88.7: what a window hides must not be raised to exp(-lse)."""
    for s in (64, 192, 320):
        call = (1, 2, 2, s, s), HALVES[dtype], (dim, dim), "bhsd"
        findings.backward("low", *call, window=(-1, 0), size=12.0)
        findings.backward("low", *call, window=(16, 16), size=30.0)
        findings.backward("low", *call, scale=-1.0, size=8.0)


LENS = ([0, 1, 130, 63, 64, 0, 400, 193, 7, 128], [5, 1, 77, 64, 200, 9, 300, 0, 129, 128])
FEW = ([5, 50, 300, 0, 40], [7, 30, 200, 3, 500])
LONG = ([300, 1000, 17, 640, 64, 2000, 5], [5, 2000, 64, 640, 17, 1000, 300])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("generation, dtype, dim", CELLS)
def test_packed_rows_of_no_sequence(findings, dtype, dim, deterministic):
    given = findings, HALVES[dtype]
    for window, lower_right in WINDOWS:
        packed(*given, dim, dim, LENS, deterministic, window=window, lower_right=lower_right)
    packed(*given, dim - 8, dim, LENS, deterministic, window=(-1, 0), lower_right=True)
    packed(*given, dim, dim, LENS, deterministic, window=(-1, 0), lower_right=True, softcap=5.0)
    packed(*given, dim, dim, FEW, deterministic, first=0)
    packed(*given, dim, dim, LONG, deterministic, window=(-1, 0), lower_right=True)


def packed(findings, dtype, d, dv, lens, deterministic, first=3, **options):
    """Offsets begin at row ``first`` and end before the last; a sequence in the middle is NaN, as are rows of none."""
    name = f"packed d{d}/{dv} {options} {lens[0]}"
    cu = tuple(torch.tensor([first, *x], device=DEVICE).cumsum(0).int() for x in lens)
    starts_q, starts_k = (x.tolist() for x in cu)
    total_q, total_k, h, hk = starts_q[-1] + 5, starts_k[-1] + 6, 6, 2
    q, dout, out = (make((h, total_q, n), dtype, "bshd") for n in (d, dv, dv))
    k, v = (make((hk, total_k, n), dtype, "bshd") for n in (d, dv))
    lse = torch.full((h, total_q), -torch.inf, device=DEVICE)
    poison = len(lens[0]) // 2 - 1
    parts = [(slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])) for n in range(len(lens[0]))]
    for rows, keys in parts:
        if keys.stop > keys.start:
            o, s = attention(q[:, rows], k[:, keys], v[:, keys], **options)
            out[:, rows], lse[:, rows] = o.to(dtype), s.float()
        else:
            out[:, rows] = 0
    for x, starts in ((q, starts_q), (dout, starts_q), (k, starts_k), (v, starts_k)):
        x[:, starts[poison] : starts[poison + 1]] = torch.nan
        x[:, : starts[0]] = x[:, starts[-1] :] = torch.nan

    def call(offsets):
        given = dict(options, cu=offsets, deterministic=deterministic, need=7)
        return findings.backward_op(dout, None, q, k, v, out, lse, **given)

    got = findings.run(name, call(cu))
    if got is None:
        return
    for n, (rows, keys) in enumerate(parts):
        if n != poison:
            mine = got[0][:, rows], got[1][:, keys], got[2][:, keys]
            given = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, rows]
            findings.judge_backward(f"{name}, sequence {n}", mine, (*given, None), **options)
    for x, starts in zip(got, (starts_q, starts_k, starts_k), strict=False):
        if not ((x[:, : starts[0]] == 0).all() and (x[:, starts[-1] :] == 0).all()):
            findings.fail(name, "gradients of rows of no sequence")
    # Any contents of the offsets: in bounds, no hang.
    garbage = tuple(torch.randint_like(x, -(2**31), 2**31 - 1) for x in cu)
    findings.run(f"{name}: offsets of any contents", call(garbage))


@pytest.mark.parametrize("bias", ["16 bits", "fp32"])
@pytest.mark.parametrize("generation, dtype, dim", [c for c in CELLS if c[0] != "sm90"])
def test_every_broadcast_of_a_bias(findings, dtype, dim, bias):
    half = HALVES[dtype]
    options = {"bias_dtype": torch.float32 if bias == "fp32" else half}
    shapes = [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (1, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 1)]
    for shape in shapes:
        for sizes in ((3, 4, 2, 257, 264), (2, 6, 6, 640, 384)):
            findings.every_use_of_a_bias(sizes, half, (dim, dim), *shape, **options)
    odd = (2, 4, 2, 333, 441)
    for pad in (0, 3):
        findings.backward_with_bias(odd, half, (dim, dim - 8), 1, 1, 1, 1, pad=pad, **options)
        findings.backward_with_bias(odd, half, (dim - 8, dim), 0, 1, 1, 1, pad=pad, **options)
    for mask in ((2, 1, 333, 441), (1, 4, 333, 441), (2, 1, 1, 441)):
        findings.backward_with_bias(odd, half, (dim, dim), 1, 1, 1, 1, mask=mask, **options)


@pytest.mark.parametrize("backend", ["cuda", "triton", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_batch_whose_dout_has_columns_apart(backend, dtype):
    leaves = [torch.randn(0, 2, 15, 64, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(3)]
    out = flashsci.attention(*leaves, causal=True, backend=backend)
    dout = torch.empty(0, 2, 64, 15, device=DEVICE, dtype=dtype).mT
    assert dout.stride(-1) != 1
    assert [x.shape for x in torch.autograd.grad(out, leaves, dout)] == [x.shape for x in leaves]
