"""Attention maps with every option, and their formulas of all pairs at once."""

from __future__ import annotations

import torch

import flashsci
from flashsci.call import maps
from flashsci.testing.tolerance import BASELINE_FACTOR, FLOOR_ROUNDINGS


def drawn(dtype=torch.float64, heads_k=2, rows=9, keys=11):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, h, n, 8, generator=generator, dtype=dtype)
        for h, n in ((4, rows), (heads_k, keys), (heads_k, keys))
    )
    return q, k, v


def written(
    q,
    k,
    *,
    sink=None,
    bias=None,
    key_weight=None,
    mask=None,
    hidden=None,
    softcap=None,
    slopes=None,
    shift=0,
    softcap_at="scores",
):
    """(P, S) of softmax, all pairs at once."""
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if softcap and softcap_at == "scores":
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if slopes is not None:
        keys, rows = (torch.arange(x.shape[2], device=q.device) for x in (k, q))
        away = keys - rows[:, None] - shift
        s = s - slopes[:, None, None] * away.abs()
    if softcap and softcap_at == "biased":
        s = (softcap * torch.tanh(s / softcap)).masked_fill(s == -torch.inf, -torch.inf)
    for keep in (mask, hidden):
        if keep is not None:
            s = s.masked_fill(~keep, -torch.inf)
    w = 1.0 if key_weight is None else key_weight.repeat_interleave(group, -2).unsqueeze(-2)
    terms = w * (s - s.detach().amax().clamp(min=0)).exp()
    total = terms.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink[:, None, None] - s.detach().amax().clamp(min=0)).exp()
    return terms / torch.where(total == 0, 1, total), s


def band(rows, keys, left, right, shift):
    away = torch.arange(keys) - torch.arange(rows)[:, None] - shift
    return (away >= -left) & (away <= right)


def reduced(p, s):
    """Entropy, largest score, sum over queries and the three largest of P."""
    logarithm = torch.where(p == 0, 1.0, p).log()
    return -(p * logarithm).sum(-1), s.amax(-1), p.sum(-2), p.topk(min(3, p.shape[-1]), -1).values


def size_of(s):
    """The largest exponent of P, which it has as relative error in roundings."""
    return 1 + s[s.isfinite()].abs().amax()


def scores_of(q, k, bias=None):
    """The scores of dense tensors in float64, without a pattern."""
    k = k.double().repeat_interleave(q.shape[-3] // k.shape[-3], -3) if q.dim() > 2 else k.double()
    s = q.double() @ k.mT * q.shape[-1] ** -0.5
    return s if bias is None else s + bias.double()


def near(found, exact, plain, size):
    """Require the two-error rule: as near to float64 as the formula in the dtype of the inputs, or as its roundings."""
    for x, truth, other in zip(found, exact, plain, strict=True):
        seen = truth.isfinite()
        assert x.shape == truth.shape and torch.equal(x.isfinite(), seen)
        error, baseline = ((y.double() - truth)[seen].norm() for y in (x, other))
        least = FLOOR_ROUNDINGS * size * torch.finfo(torch.float32).eps / 2 * truth[seen].norm()
        assert error <= torch.maximum(BASELINE_FACTOR * baseline, least)


OPTIONS = {
    "none": ({}, {}),
    "causal": (dict(causal=True), dict(hidden=band(9, 11, 99, 0, 0))),
    "lower right": (dict(causal=True, align="lower_right"), dict(hidden=band(9, 11, 99, 0, 2))),
    "window": (dict(window=(2, 1)), dict(hidden=band(9, 11, 2, 1, 0))),
    "softcap": (dict(softcap=0.5), dict(softcap=0.5)),
    "alibi": (
        dict(alibi_slopes=torch.tensor([0.1, 0.2, 0.4, 0.0]), align="lower_right"),
        dict(slopes=torch.tensor([0.1, 0.2, 0.4, 0.0]), shift=2),
    ),
    "softcap of biased scores": (
        dict(softcap=0.5, softcap_at="biased", bias=torch.tensor([1.0, -torch.inf, -4.0, *[0.5] * 8]).double()),
    )
    * 2,
    "sink": (dict(sink=torch.tensor([0.5, -1.0, 2.0, 0.0]).double()),) * 2,
    "bias": (dict(bias=torch.linspace(-2, 2, 99).view(9, 11).double()),) * 2,
    "bias of keys": (dict(bias=torch.linspace(-2, 2, 11).double()),) * 2,
    "empty rows": (dict(mask=(torch.arange(99).view(9, 11) % 3 > 0) & (torch.arange(9) != 4)[:, None]),) * 2,
    "weights": (dict(key_weight=torch.linspace(0, 1, 22).view(2, 11).double()),) * 2,
}


def called(name, small, monkeypatch, dtype=torch.float64):
    if small:
        monkeypatch.setattr(maps, "BLOCK", 200)
    q, k, v = drawn(dtype)
    q, k = q.requires_grad_(), k.requires_grad_()
    ours, theirs = OPTIONS[name]
    cast = lambda x: x.to(dtype) if torch.is_tensor(x) and x.dtype is torch.float64 else x  # noqa: E731
    ours = {n: cast(x) for n, x in ours.items()}
    _, lse = flashsci.attention(q, k, v, return_lse=True, backend="reference", **ours)
    ours.pop("sink", None)
    p, s = written(q.double(), k.double(), **theirs)
    return q, k, lse, ours, p, s


def rounded(name, dtype, device="cpu"):
    """(q, k, lse, options of a map, options of the formula) with the float32 lse of exact attention to rounded tensors."""
    q, k, v = (x.to(device, dtype) for x in drawn(torch.float64))
    ours, theirs = ({n: x.to(device) if torch.is_tensor(x) else x for n, x in o.items()} for o in OPTIONS[name])
    for options in (ours, theirs):
        for n in ("bias", "key_weight", "sink"):
            if n in options:
                options[n] = options[n].to(dtype).double()
    wide = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in ours.items()}
    _, lse = flashsci.attention(q.double(), k.double(), v.double(), return_lse=True, backend="reference", **wide)
    ours.pop("sink", None)
    ours = {n: x.to(dtype) if n in ("bias", "key_weight") else x for n, x in ours.items()}
    return q, k, lse.float(), ours, theirs


def packed(rows, keys, dim, dtype=torch.float64, device="cpu"):
    """q [Tq, 4, dim], k [Tk, 2, dim] of sequences with these lengths, and their offsets."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(sum(n), h, dim, generator=generator).to(device, dtype) for n, h in ((rows, 4), (keys, 2)))
    edges = (torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (rows, keys))
    return q, k, *edges
