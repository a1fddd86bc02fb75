"""The public functions written as one would on paper, in plain PyTorch: what every cell of the matrix is judged by."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import flashsci


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, key_weight: Tensor | None = None,
    mask: Tensor | None = None, alibi_slopes: Tensor | None = None, sink: Tensor | None = None,
    keep: Tensor | None = None, dropout_p: float = 0.0, pair_gate: Tensor | None = None, causal: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of ``[..., Hq, Sq, D]``, ``[..., Hk, Sk, D]``, ``[..., Hk, Sk, Dv]``; the diagonal of causal lies lower right."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    scores = scores_of(q, k, bias)
    away = torch.arange(k.shape[-2], device=q.device) - torch.arange(q.shape[-2], device=q.device)[:, None]
    away = away - (k.shape[-2] - q.shape[-2] if causal else 0)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * away.abs()
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
    if causal:
        seen = seen & (away <= 0)
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=-1e4)
    terms = (scores - largest).exp()
    if key_weight is not None:
        terms = terms * key_weight.repeat_interleave(group, -2).unsqueeze(-2)
    total = terms.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink[:, None, None] - largest).exp()
    weights = terms / total
    if keep is not None:
        weights = weights * keep / (1 - dropout_p)
    if pair_gate is not None:
        weights = weights * pair_gate
    return weights @ v, (total.log() + largest).squeeze(-1)


def scores_of(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores if bias is None else scores + bias


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    bias: Tensor | None = None, key_weight: Tensor | None = None, alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None, dropout_seed: Tensor | None = None, dropout_p: float = 0.0, causal: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out ``[T, H, Dv]``, lse ``[H, T]``); the bias is per key, ``[H, 1, Tk]``."""
    outs, lses = [], []
    edges = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for n, (a, b, c, d) in enumerate(zip(edges[0], edges[0][1:], edges[1], edges[1][1:], strict=False)):
        keep = None
        if dropout_seed is not None:
            shape = (1, q.shape[1], b - a, d - c)
            keep = flashsci.dropout_mask(dropout_seed, dropout_p, shape, batch_offset=n)[0]
        out, lse = softmax_attention(
            q[a:b].transpose(0, 1),
            k[c:d].transpose(0, 1),
            v[c:d].transpose(0, 1),
            bias=None if bias is None else bias[..., c:d],
            key_weight=None if key_weight is None else key_weight[..., c:d],
            alibi_slopes=None if alibi_slopes is None else alibi_slopes[n],
            sink=sink,
            keep=keep,
            dropout_p=dropout_p,
            causal=causal,
        )
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


def paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seqused_k: Tensor, cu_seqlens_q: Tensor, *,
    sink: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of causal attention to pages."""
    outs, lses = [], []
    edges = cu_seqlens_q.tolist()
    for n, used in enumerate(seqused_k.tolist()):
        k, v = (cache[block_table[n].long()].flatten(0, 1)[:used].transpose(0, 1) for cache in (k_cache, v_cache))
        if k_scale is not None:
            k = k * k_scale[n][:, None, None]
        if v_scale is not None:
            v = v * v_scale[n][:, None, None]
        rows = q[edges[n] : edges[n + 1]].transpose(0, 1)
        out, lse = softmax_attention(rows, k, v, sink=sink, causal=True)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, dlse: Tensor | None = None,
    bias: Tensor | None = None, key_weight: Tensor | None = None, mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None, keep: Tensor | None = None, dropout_p: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk, dv, then dbias and dkey_weight where these are given: as many heads of keys as of queries."""
    scores = scores_of(q, k, bias)
    if alibi_slopes is not None:
        away = torch.arange(k.shape[-2], device=q.device) - torch.arange(q.shape[-2], device=q.device)[:, None]
        scores = scores - alibi_slopes[..., None, None] * away.abs()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    bare = (scores - lse.unsqueeze(-1)).exp()
    p = bare if key_weight is None else bare * key_weight.unsqueeze(-2)
    scaled = 1.0 if keep is None else keep / (1 - dropout_p)
    dp = dout @ v.mT * scaled
    change = dp - (dout * out).sum(-1, keepdim=True)
    if dlse is not None:
        change = change + dlse.unsqueeze(-1)
    ds = p * change
    scale = q.shape[-1] ** -0.5
    found = [scale * ds @ k, scale * ds.mT @ q, (p * scaled).mT @ dout]
    if bias is not None:
        found.append(ds.sum_to_size(bias.shape))
    if key_weight is not None:
        found.append((bare * change).sum(-2))
    return tuple(found)


def mapped_pairs(
    q: Tensor, k: Tensor, lse: Tensor, *, bias: Tensor | None = None, key_weight: Tensor | None = None,
    mask: Tensor | None = None, alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(P, scores) of given lse, with as many heads of lse as of q."""
    group = q.shape[-3] // k.shape[-3]
    scores = scores_of(q, k.repeat_interleave(group, -3), bias)
    away = torch.arange(k.shape[-2], device=q.device) - torch.arange(q.shape[-2], device=q.device)[:, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * away.abs()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    return p if key_weight is None else p * key_weight.repeat_interleave(group, -2).unsqueeze(-2), scores


def map_statistics(**given: Tensor) -> tuple[Tensor, ...]:
    """Entropy, largest score, sum over queries, and the two largest probabilities of each row."""
    p, scores = mapped_pairs(**given)
    logarithm = torch.where(p == 0, 1.0, p).log()
    return -(p * logarithm).sum(-1), scores.amax(-1), p.sum(-2), p.topk(2, -1).values


def forward_laplacian(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, mask: Tensor | None = None, **given: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, its first derivatives by n coordinates, and the sum of its second ones; of heads that keys share, too."""
    group, n = q.shape[-3] // k.shape[-3], next((x.shape[0] for name, x in given.items() if "jacobian" in name), 0)

    def rows(name: str, x: Tensor) -> tuple[Tensor, ...]:
        found = (x, given.get(f"{name}_jacobian"), given.get(f"{name}_laplacian"))
        found = tuple(
            x.new_zeros(s) if y is None else y for y, s in zip(found, ((), (n, *x.shape), x.shape), strict=True)
        )
        return found if name == "q" else tuple(y.repeat_interleave(group, -3) for y in found)

    (q, dq, lq), (k, dk, lk), (v, dv, lv) = rows("q", q), rows("k", k), rows("v", v)
    scale = q.shape[-1] ** -0.5
    scores = scores_of(q, k, bias)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1)
    ds = (dq @ k.mT + q @ dk.mT) * scale
    ls = (lq @ k.mT + q @ lk.mT + 2 * (dq @ dk.mT).sum(0)) * scale
    centred = ds - (p * ds).sum(-1, keepdim=True)
    dp = p * centred
    lp = (dp * centred - p * (dp * ds).sum(-1, keepdim=True)).sum(0) + p * (ls - (p * ls).sum(-1, keepdim=True))
    return p @ v, dp @ v + p @ dv, lp @ v + 2 * (dp @ dv).sum(0) + p @ lv


def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    whole = lses.logsumexp(0)
    return ((lses - whole).exp().unsqueeze(-1) * outs).sum(0), whole


def stored(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The caches after an update."""
    found = []
    for rows, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        if scale is not None:
            rows = rows / scale[:, None]
        flat = cache.flatten(0, 1)
        found.append(flat.index_put((slot_mapping,), rows).view_as(cache))
    return tuple(found)


def quantized(x: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values (as numbers) and a scale for each head, packed for each sequence and head."""
    edges = None if cu_seqlens is None else cu_seqlens.tolist()
    parts = [x] if edges is None else [x[a:b].transpose(0, 1) for a, b in itertools.pairwise(edges)]
    scales = [part.abs().amax((-2, -1)) / 448 for part in parts]
    values = [
        (part / scale[..., None, None]).float().to(torch.float8_e4m3fn).to(x.dtype)
        for part, scale in zip(parts, scales, strict=True)
    ]
    if edges is None:
        return values[0], scales[0]
    return torch.cat([x.transpose(0, 1) for x in values]), torch.stack(scales)
