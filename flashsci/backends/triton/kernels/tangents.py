"""Scores, their tangents and their second-order gradients on one tile: the algebra that all second-order kernels share.

    S  = softcap(scale Q K^T) + B, or softcap(scale Q K^T + B);  N = e^(S - lse);  P = w N;  R = dropout's keep / (1 - p)
    T' = scale (tQ K^T + Q tK^T);   T = slope T' + tB            tangent of S (or T' with tB, and T = slope T')
    m  = sum_j P T + N tw                                       tangent of lse
    W  = P (T - m) + N tw                                       tangent of P
    tO = sum_j R (W V + P tV)                                   tangent of O
    U  = R (dO V^T) - delta;        delta = dO . O - dlse
    Y  = R (dO tV^T) - zeta;        zeta = dO . tO               tangent of U
    E  = P U;  F = W U + P Y                                    dS and its tangent
    dw = sum_i N U;  gw = sum_i N (U (T - m) + Y)               gradient of the key weights w and its tangent

Without key weights w is 1, tw is 0. At w = 0, N is still defined: nothing here divides by w.

tQ, tK, tV, tB, tw are tangents of q, k, v, bias, w in forward mode, and cotangents of dq, dk, dv, dbias, dw in double
backward: the same numbers, because the double backward of <tx, dx> is the tangent of the backward. Any of them may be
absent (None), for zero, and then costs nothing.

N has no bound at keys of weight zero. With tw, W and F have none either, and are scaled before they are rounded to fp16
(`add_moved`). Nothing else is multiplied in fp16 that could be larger than the inputs make it.
"""

import triton
import triton.language as tl

from .chunks import add_product, dot, score_chunks
from .scores import along_rows, load_plane, tanh


@triton.jit
def tangent_scores(
    products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F: tl.constexpr,
    TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """T and T' of a tile of products q k^T, in their shape. tbias: a Plane or None."""
    raw = tl.zeros_like(products)
    if tq_rows is not None:
        raw = score_chunks(tq_rows, k_rows, raw, PRECISION, TRANSPOSED)
    if tk_rows is not None:
        raw = score_chunks(q_rows, tk_rows, raw, PRECISION, TRANSPOSED)
    return tangent_of(raw, slope, i, j, tbias, span, mod, F, TBIAS, TBIAS_VECTOR, TRANSPOSED)


@triton.jit
def tangent_of(
    raw, slope, i, j, tbias, span, mod, F: tl.constexpr,
    TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """T and T' from tq k^T + q tk^T."""
    raw = raw * mod.scale
    value = 0.0
    if tbias is not None:
        value = load_plane(tbias, i, j, span.len_k, TBIAS, TBIAS_VECTOR, TRANSPOSED).to(tl.float32)
    if F.CAPS_BIAS:
        raw += value
    t = raw * slope if F.SOFTCAP else raw
    if tbias is not None and not F.CAPS_BIAS:
        t += value
    return t, raw


@triton.jit
def softcap_bend(products, s, slope, mod, F: tl.constexpr):
    """Derivative of the softcap's slope by its argument. s: the scores. (The tanh is the one of `scores`: computed once.)"""
    if F.SOFTCAP:
        if F.CAPS_BIAS:
            t = tl.where(s == float("-inf"), 0.0, s) * (1.0 / mod.softcap)
        else:
            t, _slope = tanh(products * (mod.scale / mod.softcap))
        return t * slope * (-2.0 / mod.softcap)
    else:
        return 0.0


@triton.jit
def second_order(p, bare, t, raw_t, tweights, u, y, mean, slope, bend, F: tl.constexpr, TRANSPOSED: tl.constexpr):
    """W, F with respect to a bias, E and F with respect to scores before the softcap, and the terms of gw. bare: N; mean: m of the rows, [M];
    tweights: tw [N] or None."""
    t -= along_rows(mean, TRANSPOSED)
    e = p * u
    w = p * t
    f = e * t + p * y
    if tweights is not None:
        extra = bare * (tweights[:, None] if TRANSPOSED else tweights[None, :])
        w += extra
        f += extra * u
    g = bare * (u * t + y)
    if F.SOFTCAP:
        f_raw = f * slope + bend * raw_t * e
        if F.CAPS_BIAS:
            f = f_raw
        return w, f, e * slope, f_raw, g
    else:
        return w, f, e, f, g


@triton.jit
def add_moved(x, rows, acc, PRECISION: tl.constexpr, TURNED: tl.constexpr, UNBOUNDED: tl.constexpr):
    """acc + x rows or, TURNED, acc + x^T rows, for a tile x of W or F.

    UNBOUNDED: there is a tangent of key weights. Where the rows of the result come from numbers of x that fp16 cannot
    hold, these are multiplied by a power of two, and their product by its inverse: both are exact.
    """
    if UNBOUNDED and rows[0].dtype == tl.float16:
        exponent = tl.max(tl.abs(x), 0 if TURNED else 1).to(tl.int32, bitcast=True) >> 23
        excess = tl.maximum(exponent - (127 + 14), 0)  # below 2^15 nothing is scaled
        smaller = ((127 - excess) << 23).to(tl.float32, bitcast=True)
        larger = ((127 + excess) << 23).to(tl.float32, bitcast=True)
        x = (x * (smaller[None, :] if TURNED else smaller[:, None])).to(tl.float16)
        x = x.T if TURNED else x
        a0 = acc[0] + dot(x, rows[0], None, PRECISION) * larger[:, None]
        if len(rows) == 2:
            return a0, acc[1] + dot(x, rows[1], None, PRECISION) * larger[:, None]
        else:
            return (a0,)
    else:
        x = x.to(rows[0].dtype)
        return add_product(x.T if TURNED else x, rows, acc, PRECISION)
