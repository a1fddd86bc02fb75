"""Scores, their tangents and their second-order gradients on one tile: the algebra that all second-order kernels share.

    S  = softcap(scale Q K^T) + B;  N = e^(S - lse);  P = w N;  R = dropout's keep / (1 - p)
    T' = scale (tQ K^T + Q tK^T);   T = slope T' + tB            tangent of S
    m  = sum_j P T + N tw                                       tangent of lse
    W  = P (T - m) + N tw                                       tangent of P
    tO = sum_j R (W V + P tV)                                   tangent of O
    U  = R (dO V^T) - delta;        delta = dO . O - dlse
    Y  = R (dO tV^T) - zeta;        zeta = dO . tO               tangent of U
    E  = P U;  F = W U + P Y                                    dS and its tangent
    dw = sum_i N U;  gw = sum_i N (U (T - m) + Y)               gradient of the key weights w and its tangent

Without key weights w is 1, tw is 0. At w = 0, N is what is left: nothing here divides by w.

tQ, tK, tV, tB, tw are tangents of q, k, v, bias, w in forward mode, and cotangents of dq, dk, dv, dbias, dw in double
backward: the same numbers, because the double backward of <tx, dx> is the tangent of the backward. Any of them may be absent (None), for
zero, and then costs nothing.
"""

import triton
import triton.language as tl

from .chunks import score_chunks
from .forward import RUNTIME
from .tile import ABSENT, load_plane, tanh

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
    "tweight_strides",
)


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
    t, _slope = tanh(products * (scale / softcap), ACCURATE)
    return t * slope * (-2.0 / softcap)


@triton.jit
def second_order(
    p, bare, t, raw_t, tweights, h, y, mean, delta, zeta, slope, bend, SOFTCAP: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """W, F, E and F with respect to scores before the softcap, and the terms of gw. bare: N; mean, delta, zeta: [M];
    tweights: tw [N] or None."""
    mean = mean[None, :] if TRANSPOSED else mean[:, None]
    delta = delta[None, :] if TRANSPOSED else delta[:, None]
    zeta = zeta[None, :] if TRANSPOSED else zeta[:, None]
    u = h - delta
    t -= mean
    y -= zeta
    e = p * u
    w = p * t
    f = e * t + p * y
    if tweights is not None:
        extra = bare * (tweights[:, None] if TRANSPOSED else tweights[None, :])
        w += extra
        f += extra * u
    g = bare * (u * t + y)
    if SOFTCAP:
        return w, f, e * slope, f * slope + bend * raw_t * e, g
    else:
        return w, f, e, f, g
