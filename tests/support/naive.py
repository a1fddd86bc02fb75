"""Attention written row by row, as one would on paper: what the reference is compared with."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def naive(
    q, k, v, *, bias=None, key_weight=None, mask=None, causal=False, window=None, align="upper_left", scale=None, softcap=None,
    keep=None, dropout_p=0.0, alibi_slopes=None, sink=None, softcap_at="scores", pair_gate=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of q [..., Hq, Sq, D], k [..., Hk, Sk, D], v [..., Hk, Sk, Dv], differentiable.

    ``keep`` is the dropout mask, bool [..., Hq, Sq, Sk].
    """
    if q.dim() == 2:
        out, lse = naive(
            q[None], k[None], v[None], bias=bias, key_weight=key_weight, mask=mask, causal=causal, window=window, align=align,
            scale=scale, softcap=softcap, keep=keep, dropout_p=dropout_p, alibi_slopes=alibi_slopes, sink=sink,
            softcap_at=softcap_at, pair_gate=pair_gate,
        )  # fmt: skip
        return out[0], lse[0]
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (x.expand(*lead, *x.shape[-3:]) for x in (q, k, v))
    heads, seq_q, seq_k = q.shape[-3], q.shape[-2], k.shape[-2]
    full = (*lead, heads, seq_q, seq_k)
    bias = None if bias is None else bias.expand(full)
    w = None if key_weight is None else key_weight.expand(*lead, k.shape[-3], seq_k)
    mask = None if mask is None else mask.expand(full)
    keep = None if keep is None else keep.expand(full)
    gate = None if pair_gate is None else pair_gate.expand(full)
    slopes = None if alibi_slopes is None else alibi_slopes.expand(full[:-2])
    left, right = window or (None, None)
    shift = seq_k - seq_q if align == "lower_right" else 0
    outs, lses = [], []
    for place in itertools.product(*map(range, (*lead, heads, seq_q))):
        *batch, h, i = place
        key_head = (*batch, h // (heads // k.shape[-3]))
        terms = []
        for j in range(seq_k):
            away = j - (i + shift)
            if (causal and away > 0) or (left is not None and away < -left):
                continue
            if right is not None and away > right:
                continue
            if mask is not None and not mask[(*place, j)]:
                continue
            score = torch.dot(q[place], k[(*key_head, j)]) * (q.shape[-1] ** -0.5 if scale is None else scale)
            if softcap and softcap_at == "scores":
                score = softcap * torch.tanh(score / softcap)
            if bias is not None:
                if bias[(*place, j)] == -math.inf:
                    continue
                score = score + bias[(*place, j)]
            if slopes is not None:
                score = score - slopes[(*batch, h)] * abs(away)
            if softcap and softcap_at == "biased":
                score = softcap * torch.tanh(score / softcap)
            terms.append((j, score))
        # Beside a sink, a weight of zero has a gradient in every row.
        joined = bool(terms) and sink is not None and sink[h] > -math.inf
        seen = joined or any(w is None or w[(*key_head, j)] > 0 for j, _ in terms)
        if not seen:
            outs.append(0 * q[place].sum() * v.new_ones(v.shape[-1]))
            alone = sink is not None and sink[h] > -math.inf
            lses.append(sink[h] if alone else q.new_full((), -math.inf))
            continue
        weight = [1.0 if w is None else w[(*key_head, j)] for j, _ in terms]
        extra = [] if sink is None else [sink[h]]  # a logit without a value
        largest = max(s.detach() for s in [*(s for _, s in terms), *extra])
        lse = sum(a * torch.exp(s - largest) for a, (_, s) in zip(weight, terms, strict=True))
        lse = lse + sum(torch.exp(s - largest) for s in extra)
        lse = torch.log(lse) + largest
        out = q.new_zeros(v.shape[-1])
        for a, (j, score) in zip(weight, terms, strict=True):
            factor = 1.0 if keep is None else float(keep[(*place, j)]) / (1 - dropout_p)
            factor = factor if gate is None else factor * gate[(*place, j)]
            out = out + factor * a * torch.exp(score - lse) * v[(*key_head, j)]
        outs.append(out)
        lses.append(lse)
    shape = (*lead, heads, seq_q)
    if not outs:
        return q.new_zeros(*shape, v.shape[-1]), q.new_zeros(shape)
    return torch.stack(outs).view(*shape, v.shape[-1]), torch.stack(lses).view(shape)
