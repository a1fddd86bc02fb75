"""A fused backend in fp64: closed formulas behind ops that autograd cannot see into, as kernels are. Dense calls only.

It shares no code with the kernels or the reference, so what the wiring makes of it is compared with both.
"""

from __future__ import annotations

import torch

from flashsci.call import ops

FUSED = True


def _wide(x, heads):
    """Key heads repeated for their query heads."""
    return x if x.dim() < 3 or x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def _narrow(x, like):
    return x if x.shape == like.shape else x.unflatten(-3, (like.shape[-3], -1)).sum(-3)


class Call:
    """P and what surrounds it, for one call."""

    def __init__(self, q, k, v, bias, weight, mask, *rest, scale, softcap, right):
        self.q, self.heads, self.scale, self.softcap = (
            q,
            q.shape[-3] if q.dim() > 2 else 1,
            scale,
            softcap,
        )
        self.k0, self.v0, self.bias = k, v, bias
        self.k, self.v = _wide(k, self.heads), _wide(v, self.heads)
        raw = scale * q @ self.k.mT
        self.tanh = torch.tanh(raw / softcap) if softcap else None
        s = raw if self.tanh is None else softcap * self.tanh
        s = s if bias is None else s + bias
        if mask is not None:
            s = s.masked_fill(~mask, -torch.inf)
        if right == 0:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        self.s, self.weight = s, weight
        self.w = torch.ones(()) if weight is None else self.per_head(weight)
        self.lse = torch.logsumexp(s + self.w.log(), -1)

    def per_head(self, x):
        """[*, Hk or 1, Sk] as [*, Hq or 1, 1, Sk]."""
        if x.dim() > 1 and x.shape[-2] > 1:
            x = x.repeat_interleave(self.heads // x.shape[-2], -2)
        return x.unsqueeze(-2)

    def summed(self, x):
        """The transpose, of [*, Hq, Sq, Sk] to the shape of the weights."""
        x = x.sum(-2)
        if x.dim() > 1:
            x = x.unflatten(-2, (self.k0.shape[-3], -1)).sum(-2)
        return x.sum_to_size(self.weight.shape)

    def bare(self, lse):
        """P without the weights."""
        dead = lse == -torch.inf
        return torch.exp(self.s - lse.masked_fill(dead, torch.inf).unsqueeze(-1))

    def p(self, lse):
        return self.w * self.bare(lse)


def _call(tensors, scalars):
    rule = dict(scale=scalars.scale, softcap=scalars.softcap, right=scalars.window_right)
    return Call(*tensors, **rule)


def _fill(need, likes, found):
    return tuple(
        x if need >> i & 1 else like.new_empty(0) for i, (like, x) in enumerate(zip(likes, found, strict=True))
    )


def forward(tensors, scalars):
    c = _call(tensors, scalars)
    return c.p(c.lse) @ c.v, c.lse


def _first(c, p, dout, dlse, out):
    dout = torch.zeros_like(out) if dout is None else dout
    delta = (dout * out).sum(-1, keepdim=True) - (0 if dlse is None else dlse.unsqueeze(-1))
    return dout, delta, dout @ c.v.mT - delta


def backward(dout, dlse, saved, need):
    tensors, out, lse, scalars = saved
    c = _call(tensors, scalars)
    p = c.p(lse)
    dout, _, u = _first(c, p, dout, dlse, out)
    e = p * u
    raw = e if c.tanh is None else e * (1 - c.tanh**2)
    found = (
        c.scale * raw @ c.k,
        _narrow(c.scale * raw.mT @ c.q, c.k0),
        _narrow(p.mT @ dout, c.v0),
        e if c.bias is None else e.sum_to_size(c.bias.shape),
        None if c.weight is None else c.summed(c.bare(lse) * u),
    )
    return _fill(need, (c.q, c.k0, c.v0, *_likes(c)), found)


def _likes(c):
    return (c.q if x is None else x for x in (c.bias, c.weight))


def _tangent(c, lse, tq, tk, tv, tbias, tweight, out):
    p = c.p(lse)
    extra = torch.zeros(()) if tweight is None else c.per_head(tweight) * c.bare(lse)
    zero = torch.zeros_like
    tq = zero(c.q) if tq is None else tq
    tk = zero(c.k) if tk is None else _wide(tk, c.heads)
    tv = zero(c.v) if tv is None else _wide(tv, c.heads)
    raw = c.scale * (tq @ c.k.mT + c.q @ tk.mT)
    t = raw if c.tanh is None else raw * (1 - c.tanh**2)
    t = t if tbias is None else t + tbias
    m = (p * t + extra).sum(-1)
    t = t - m.unsqueeze(-1)
    w = p * t + extra
    return tq, tk, tv, raw, t, w, m, w @ c.v + p @ tv


def jvp(tangents, saved):
    tensors, out, lse, scalars = saved
    c = _call(tensors, scalars)
    *_, m, tout = _tangent(c, lse, *tangents, out)
    return tout, m


def second_jvp(first, second, mixed, first_lse, second_lse, saved):
    tensors, out, lse, scalars = saved
    c = _call(tensors, scalars)
    p, bare = c.p(lse), c.bare(lse)
    aq, ak, av, araw, a, aw, _, _ = _tangent(c, lse, *first, out)
    bq, bk, bv, braw, b, bw, _, _ = _tangent(c, lse, *second, out)
    _, _, xv, xraw, *_ = _tangent(c, lse, *mixed, out)
    raw = xraw + c.scale * (aq @ bk.mT + bq @ ak.mT)
    rate = raw
    if c.tanh is not None:
        slope = 1 - c.tanh**2
        rate = raw * slope - 2 / c.softcap * c.tanh * slope * araw * braw
    rate = rate if mixed.bias is None else rate + mixed.bias
    weights = [torch.zeros(()) if t.key_weight is None else c.per_head(t.key_weight) for t in (first, second, mixed)]
    terms = p * (rate + a * b) + bare * (weights[0] * b + weights[1] * a + weights[2])
    m = terms.sum(-1)
    moved = terms - p * m.unsqueeze(-1)
    return moved @ c.v + aw @ bv + bw @ av + p @ xv, m


def double_backward(tangents, dout, dlse, saved, need):
    tensors, out, lse, scalars = saved
    c = _call(tensors, scalars)
    p = c.p(lse)
    tq, tk, tv, traw, t, w, m, tout = _tangent(c, lse, *tangents, out)
    dout, _, u = _first(c, p, dout, dlse, out)
    e = p * u
    y = dout @ tv.mT - (dout * tout).sum(-1, keepdim=True)
    f = w * u + p * y
    e_raw, f_raw = e, f
    if c.tanh is not None:
        slope = 1 - c.tanh**2
        e_raw, f_raw = e * slope, f * slope - 2 / c.softcap * c.tanh * slope * traw * e
    found = (
        c.scale * (f_raw @ c.k + e_raw @ tk),
        _narrow(c.scale * (f_raw.mT @ c.q + e_raw.mT @ tq), c.k0),
        _narrow(w.mT @ dout, c.v0),
        f if c.bias is None else f.sum_to_size(c.bias.shape),
        None if c.weight is None else c.summed(c.bare(lse) * (u * t + y)),
        tout,
        m,
    )
    return _fill(need, (c.q, c.k0, c.v0, *_likes(c), tout, m), found)


_OPS = {}


def define() -> dict:
    """The ops, once: what replaces the functions of a backend's module."""
    if _OPS:
        return _OPS
    for kernel in (forward, backward, jvp, second_jvp, double_backward):
        name = kernel.__name__
        _OPS[name] = ops.define("opaque", name, kernel, ("CPU",))
    return _OPS
