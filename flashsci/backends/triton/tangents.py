"""Scores, their tangents and their second-order gradients on one tile: the algebra that all second-order kernels share.

    S  = softcap(scale Q K^T) + B;  P = e^(S - lse);  R = dropout's keep / (1 - p)
    T' = scale (tQ K^T + Q tK^T);   T = slope T' + tB            tangent of S
    m  = sum_j P T                                              tangent of lse
    tO = sum_j R P ((T - m) V + tV)                             tangent of O
    U  = R (dO V^T) - delta;        delta = dO . O - dlse
    E  = P U;  F = P (U (T - m) + R (dO tV^T) - zeta);  zeta = dO . tO     dS and its tangent

tQ, tK, tV, tB are tangents of q, k, v, bias in forward mode, and cotangents of dq, dk, dv, dbias in double backward: the
same numbers, because the double backward of <tx, dx> is the tangent of the backward. Any of them may be absent (None), for
zero, and then costs nothing.
"""

import triton
import triton.language as tl

from .chunks import score_chunks
from .forward import RUNTIME
from .tile import ABSENT, LOG2E, load_plane, tanh

RUNTIME_SECOND = (
    *RUNTIME,
    "dout_strides",
    "tq_strides",
    "tk_strides",
    "tv_strides",
    "tbias_strides",
    "tout_strides",
    "gq_strides",
    "gk_strides",
    "gv_strides",
    "gbias_strides",
)


@triton.jit
def reference_of(lse, FOLD: tl.constexpr):
    """What `exponential` subtracts; +inf for rows without keys, so that their probabilities are 0."""
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse * LOG2E if FOLD else lse


@triton.jit
def tangent_scores(
    q, k, tq, tk, slope, i, j, tbias, tbias_strides, tbias_rows, len_k, scale,
    M: tl.constexpr, N: tl.constexpr, D1: tl.constexpr, SOFTCAP: tl.constexpr,
    TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """T and T' of a tile, [M, N] or, TRANSPOSED, [N, M]; q, k and their tangents are pairs of chunks."""
    raw = tl.zeros([N, M], tl.float32) if TRANSPOSED else tl.zeros([M, N], tl.float32)
    if tq is not None:
        raw = score_chunks(tq, k, raw, D1, PRECISION, TRANSPOSED)
    if tk is not None:
        raw = score_chunks(q, tk, raw, D1, PRECISION, TRANSPOSED)
    raw = raw * scale
    t = raw * slope if SOFTCAP else raw
    if TBIAS != ABSENT:
        value = load_plane(
            tbias, tbias_strides, i, j, tbias_rows, len_k, TBIAS, TBIAS_VECTOR, TRANSPOSED
        )
        t += value.to(tl.float32)
    return t, raw


@triton.jit
def softcap_bend(products, slope, scale, softcap, ACCURATE: tl.constexpr):
    """Derivative of the softcap's slope by its argument. (The tanh is the one of `scores`: computed once.)"""
    return tanh(products * (scale / softcap), ACCURATE) * slope * (-2.0 / softcap)


@triton.jit
def second_order(
    p, t, raw_t, h, y, mean, delta, zeta, slope, bend, SOFTCAP: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """P (T - m), F, and E, F with respect to scores before the softcap. mean, delta, zeta: [M]."""
    mean = mean[None, :] if TRANSPOSED else mean[:, None]
    delta = delta[None, :] if TRANSPOSED else delta[:, None]
    zeta = zeta[None, :] if TRANSPOSED else zeta[:, None]
    e = p * (h - delta)
    w = p * (t - mean)
    f = e * (t - mean) + p * (y - zeta)
    if SOFTCAP:
        return w, f, e * slope, f * slope + bend * raw_t * e
    else:
        return w, f, e, f
