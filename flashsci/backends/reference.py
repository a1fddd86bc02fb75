"""The specification as code: every feature in plain PyTorch, on any device and dtype, differentiable to any order.

    S = softcap(scale Q K^T) + bias - slope |i + shift - j|, masked; or softcap of that sum, masked
    L = log(sum_j w e^S + e^sink);  P = w exp(S - L);  O = (P o R o G) V

Here R is the dropout keep mask divided by 1 - p, w the key weights and G the gate of
pairs (1 without). Memory is O(Sq * Sk). In float64
this is the oracle of all tests. In a lower dtype it is "plain PyTorch in the same dtype", the baseline of the
two-error rule.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from flashsci.api.dropout import keep_mask
from flashsci.backends.host_reads import check_readable
from flashsci.call import kinds
from flashsci.call.fp8_ops import FP8, lacks
from flashsci.call.ops import Saved, Scalars, Tensors, follow_layout, interleaved
from flashsci.call.problem import Problem
from flashsci.call.torch_state import casts_to, holds, rounds_products
from flashsci.errors import BackendError

FUSED = False
_ROWS = frozenset(("q", "k", "v"))
_OFFSETS = frozenset(("cu_seqlens_q", "cu_seqlens_k"))
#: The tensors that it reads, by kind of call.
READS = {
    kinds.ATTENTION: _ROWS
    | _OFFSETS
    | {"bias", "key_weight", "mask", "bias_offsets", "dropout_seed", "alibi_slopes", "sink", "pair_gate"},
    kinds.PAGED: frozenset(
        ("q", "k_cache", "v_cache", "block_table", "seqused_k", "cu_seqlens_q", "sink", "k_scale", "v_scale")
    ),
    kinds.FP8: _ROWS | _OFFSETS | {"q_scale", "k_scale", "v_scale"},
}
SMALLEST_NORMAL = 2.0**-126  # of fp32; key weights below it count as zero


def unavailable() -> str | None:
    return None


def rejects(problem: Problem) -> str | None:
    if problem.batch_invariant and problem.dtype == FP8:
        return "its batched products of 8-bit floats depend on the batch; give q, k and v in 16 bits"
    return lacks(problem) if problem.dtype == FP8 else None


def ahead(seq_q: int, seq_k: int, lower_right: bool, device: torch.device) -> Tensor:
    """The distance of each key after the diagonal of each query: int64 [Sq, Sk]."""
    shift = seq_k - seq_q if lower_right else 0
    return torch.arange(seq_k, device=device) - torch.arange(seq_q, device=device)[:, None] - shift


def visible(
    seq_q: int,
    seq_k: int,
    window_left: int,
    window_right: int,
    lower_right: bool,
    device: torch.device,
) -> Tensor | None:
    """Bool [Sq, Sk]: the keys that causal and window leave each query; None if they leave all."""
    if window_left < 0 and window_right < 0:
        return None
    distance = ahead(seq_q, seq_k, lower_right, device)
    keep = torch.ones_like(distance, dtype=torch.bool)
    if window_left >= 0:
        keep = keep & (distance >= -window_left)
    if window_right >= 0:
        keep = keep & (distance <= window_right)
    return keep


def per_query_head(x: Tensor, heads_q: int) -> Tensor:
    """The tensor with key heads repeated, so that query head h meets key head h // (Hq // Hk)."""
    return x if x.dim() < 3 or x.shape[-3] == heads_q else interleaved(x, heads_q // x.shape[-3], -3)


def _per_key_head(x: Tensor, heads_k: int) -> Tensor:
    """The transpose of :func:`per_query_head`: the sum over the query heads of each key head."""
    if x.dim() < 3 or x.shape[-3] == heads_k:
        return x
    return x.unflatten(-3, (heads_k, -1)).sum(-3)


def _sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    return x if x.shape == shape else x.sum_to_size(shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed in fp32 or better and rounded once to their dtype, whatever torch's TF32 switch and autocast
    say."""
    if casts_to(a) is not None:
        with torch.autocast(a.device.type, enabled=False):
            return _exact_product(a, b)
    return _exact_product(a, b)


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cpu" and a.dtype.itemsize == 2:
        # torch's own reads past the rows of a strided [n, 1], and brings in NaN from there.
        return (a.float() @ b.float()).to(a.dtype)
    if a.device.type == "cuda" and rounds_products(a.dtype):
        return (a.double() @ b.double()).to(a.dtype)
    return a @ b


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tanh(x: Tensor) -> Tensor:
    """tanh x with exact derivatives. torch's own derivative is 1 - tanh^2, in which everything cancels for large x;
    that of a small sigmoid is exact there, and so are all higher ones."""
    above, below = 1 - 2 * torch.sigmoid(-2 * x), 2 * torch.sigmoid(2 * x) - 1
    return torch.where(x.abs() < 1, torch.tanh(x), torch.where(x > 0, above, below))


def _tanh_slope(x: Tensor) -> Tensor:
    """1 - tanh^2 x."""
    small = torch.sigmoid(torch.where(x > 0, -2 * x, 2 * x))
    return 4 * small * (1 - small)


def at_most(x: Tensor, most: float | Tensor) -> Tensor:
    """min(x, most), with the derivatives of x. A difference from x would round: beside scores of 1e11 to multiples of 1e4."""
    still = x.detach()
    return torch.where(still > most, most + (x - still), x)


def _scores(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    scalars: Scalars,
) -> tuple[Tensor, Tensor | None]:
    """S [*, Hq, Sq, Sk] with -inf where a key is not visible, and the argument of the softcap's tanh if there is one."""
    softcap, caps_bias = scalars.softcap, scalars.caps_bias
    keys = per_query_head(k, q.shape[-3] if q.dim() > 2 else 1)
    scores = _product(q * scalars.scale, keys.transpose(-1, -2))
    capped = None
    hidden = [] if mask is None else [~mask]
    if softcap and not caps_bias:
        # In fp32: if a softcap is far above the scores, their quotient is below the range of fp16.
        capped = scores.to(_statistics_dtype(scores.dtype)) / softcap
        scores = (softcap * _tanh(capped)).to(scores.dtype)
    if bias is not None and caps_bias:
        # A bias of -inf hides its key, and the tanh would not.
        scores = scores.to(_statistics_dtype(scores.dtype))
        hidden.append(bias == float("-inf"))
        bias = bias.masked_fill(hidden[-1], 0.0)
    if bias is not None:
        scores = scores + bias
    scores = scores.to(_statistics_dtype(scores.dtype))
    if alibi_slopes is not None:
        slopes = alibi_slopes[..., None, None] if q.dim() > 2 else alibi_slopes
        away = ahead(q.shape[-2], k.shape[-2], scalars.lower_right, q.device).abs()
        scores = scores - slopes.to(scores.dtype) * away
    if softcap and caps_bias:
        capped = scores / softcap
        scores = softcap * _tanh(capped)
    window = scalars.window_left, scalars.window_right, scalars.lower_right
    keep = visible(q.shape[-2], k.shape[-2], *window, q.device)
    for where in hidden if keep is None else (~keep, *hidden):
        scores = scores.masked_fill(where, float("-inf"))
    return scores, capped


def _weights(key_weight: Tensor, heads_q: int, dtype: torch.dtype) -> Tensor:
    """Key weights [*, Hk or 1, Sk] as factors of the exponentials of scores, [*, Hq or 1, 1, Sk].

    Below the smallest normal number of fp32 they are zero, with the gradient of a zero.
    """
    weights = key_weight.to(dtype)
    weights = weights - torch.where(weights.abs() < SMALLEST_NORMAL, weights, 0.0).detach()
    if weights.dim() > 1 and weights.shape[-2] not in (1, heads_q):
        weights = interleaved(weights, heads_q // weights.shape[-2], -2)
    return weights.unsqueeze(-2)


def weights_as_bias(key_weight: Tensor, bias: Tensor | None, heads_q: int) -> Tensor:
    """bias + log w: the same attention, without the derivative by a weight of zero."""
    dtype = torch.promote_types(torch.float32, key_weight.dtype)
    logarithm = _weights(key_weight, heads_q, dtype).log()
    return logarithm if bias is None else bias + logarithm


def _keep(seed: Tensor, dropout_p: float, scores: Tensor, batch_offset: int) -> Tensor:
    heads = scores.shape[-3] if scores.dim() > 2 else 1
    leading = scores.shape[:-2]
    rows = torch.arange(leading.numel(), device=scores.device).reshape(leading) + batch_offset * heads
    return keep_mask(seed, dropout_p, rows, scores.shape[-2], scores.shape[-1])


def _dense_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    scalars: Scalars,
    batch_offset: int = 0,
    pair_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, bias, mask, alibi_slopes, scalars)
    # The maximum only guards the exponential: softmax does not depend on it, so gradients do not either.
    peaks = scores.detach()
    weights = None
    if key_weight is not None:
        weights = _weights(key_weight, q.shape[-3] if q.dim() > 2 else 1, scores.dtype)
        peaks = peaks + weights.detach().log()
    if holds(k.shape[-2] == 0, unknown=True):
        peaks = torch.cat((peaks, peaks.new_full((*peaks.shape[:-1], 1), float("-inf"))), -1)
    top = peaks.amax(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(scores.dtype)
        sink = sink[:, None, None] if q.dim() > 2 else sink[:, None]
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    terms = scores - top
    rest = torch.zeros_like(top) if sink is None else torch.exp(sink - top)
    if weights is None:
        terms = torch.exp(terms)
        total = terms.sum(-1, keepdim=True) + rest
        empty = total == 0
    else:
        # A key of weight zero may have any score: 0 * inf must not happen.
        most = math.log(torch.finfo(terms.dtype).max) - 8
        terms = weights * torch.exp(torch.where(weights == 0, terms.clamp(max=most), terms))
        total = terms.sum(-1, keepdim=True) + rest
        empty = total == 0
        terms = terms.masked_fill(empty, 0)  # no gradient of weights that are all zero
    total = torch.where(empty, torch.ones_like(total), total)
    lse = torch.where(empty, torch.full_like(total, float("-inf")), torch.log(total) + top).squeeze(-1)
    p = terms / total
    dropout_p = scalars.dropout_p
    if dropout_p:
        assert seed is not None
        p = torch.where(_keep(seed, dropout_p, scores, batch_offset), p / (1 - dropout_p), torch.zeros_like(p))
    if pair_gate is not None:
        p = p * pair_gate.to(p.dtype)
    return _product(p.to(v.dtype), per_query_head(v, q.shape[-3] if q.dim() > 2 else 1)), lse


def _dense_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scalars: Scalars,
    batch_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    heads_q = q.shape[-3] if q.dim() > 2 else 1
    heads_k = k.shape[-3] if k.dim() > 2 else 1
    compute = _statistics_dtype(q.dtype)
    # Scores round as in the forward: then P = exp(scores - lse) belongs to its lse, and sums to 1.
    scores, capped = _scores(q, k, bias, mask, alibi_slopes, scalars)
    scores, capped = scores.to(compute), None if capped is None else capped.to(compute)
    q_, k_, v_, dout_, out_ = (x.to(compute) for x in (q, k, v, dout, out))
    lse = lse.to(compute).unsqueeze(-1)
    exponent = scores - torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    # P is at most 1. Scores of -1e9 leave an lse rounded to multiples of 64, and exponents of that size above 0.
    most: float | Tensor = 0.0
    if key_weight is not None:
        weights = _weights(key_weight, heads_q, compute)
        # The exponential itself, at most 1 / w: it has a gradient even for a weight of zero.
        most = (-weights.detach().log()).clamp(max=math.log(torch.finfo(compute).max) - 8)
    p = torch.exp(at_most(exponent, most))
    p = torch.where(lse == float("-inf"), torch.zeros_like(p), p)
    terms = p
    if key_weight is not None:
        p = weights * p
    keep = torch.ones_like(p)
    scale, dropout_p = scalars.scale, scalars.dropout_p
    if dropout_p:
        assert seed is not None
        keep = _keep(seed, dropout_p, scores, batch_offset).to(compute) / (1 - dropout_p)
    delta = (dout_ * out_).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(compute).unsqueeze(-1)
    dp = keep * _product(dout_, per_query_head(v_, heads_q).transpose(-1, -2))
    ds = p * (dp - delta)
    dweight = None if key_weight is None else _weight_gradient(terms * (dp - delta), key_weight, heads_k)
    of_products = ds if capped is None else ds * _tanh_slope(capped)
    of_bias = of_products if scalars.caps_bias else ds
    dbias = None if bias is None else _sum_to(of_bias, bias.shape).to(bias.dtype)
    ds = of_products
    dq = scale * _product(ds, per_query_head(k_, heads_q))
    dk = _per_key_head(scale * _product(ds.transpose(-1, -2), q_), heads_k)
    dv = _per_key_head(_product((p * keep).transpose(-1, -2), dout_), heads_k)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias, dweight


def _weight_gradient(of_pairs: Tensor, key_weight: Tensor, heads_k: int) -> Tensor:
    """The gradient of key weights [*, Hk or 1, Sk], a sum over the queries and heads that share them."""
    found = _per_key_head(of_pairs.sum(-2, keepdim=True), heads_k).squeeze(-2)
    return _sum_to(found, key_weight.shape).to(key_weight.dtype)


def pieces(x: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
    """``x`` cut along ``dim`` into the packed sequences, and the rest after the last. It is one split: each slice
    would add a gradient of the size of ``x``."""
    return x.split([*sizes, x.shape[dim] - sum(sizes)], dim)


def pieces_if_any(x: Tensor | None, sizes: list[int], dim: int) -> tuple[Tensor | None, ...]:
    return (None,) * (len(sizes) + 1) if x is None else pieces(x, sizes, dim)


class Sequences:
    """The sequences of a packed call. Reads the offsets on the host."""

    def __init__(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, ragged_bias: bool):
        check_readable(cu_seqlens_q)
        self.sizes_q, self.sizes_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        self.count = len(self.sizes_q)
        self.shapes = list(zip(self.sizes_q, self.sizes_k, strict=True))
        self.bias_sizes = [m * n for m, n in self.shapes] if ragged_bias else self.sizes_k
        self.ragged_bias = ragged_bias

    def biases(self, bias: Tensor | None) -> list[Tensor | None]:
        """The bias of each sequence, [Hq or 1, Sq or 1, Sk]."""
        blocks = pieces_if_any(bias, self.bias_sizes, -1)[: self.count]
        if not self.ragged_bias:
            return list(blocks)
        return [x.unflatten(-1, s) for x, s in zip(blocks, self.shapes, strict=True) if x is not None]

    def slopes(self, alibi_slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        """The slopes of each sequence, [Hq]."""
        if alibi_slopes is None:
            return (None,) * self.count
        return alibi_slopes.expand(self.count, alibi_slopes.shape[-1]).unbind(0)

    def join(self, parts: list[Tensor], whole: Tensor, dim: int) -> Tensor:
        """Results of the sequences in the packed layout of ``whole``; zeros after the last."""
        left = whole.shape[dim] - sum(part.shape[dim] for part in parts)
        return torch.cat([*parts, torch.zeros_like(whole.narrow(dim, 0, left))], dim)


def _by_members(tensors: Tensors, scalars: Scalars, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and lse of a dense call, each member of the batch by products of its own.

    The order of the sums of a batched product depends on the batch, and may depend on addresses: members are copied.
    """
    lead = tensors.q.shape[:-3]

    def of(x: Tensor | None, trailing: int, n: tuple[int, ...]) -> Tensor | None:
        if x is None:
            return None
        dims = max(x.dim() - trailing, 0)
        member = x[tuple(0 if x.shape[d] == 1 else n[len(lead) - dims + d] for d in range(dims))]
        return member.clone(memory_format=torch.contiguous_format)

    results = []
    for n in itertools.product(*map(range, lead)):
        q, k, v = (of(x, 3, n) for x in (tensors.q, tensors.k, tensors.v))
        assert q is not None and k is not None and v is not None
        bias, mask = of(tensors.bias, 3, n), of(tensors.mask, 3, n)
        weight, alibi = of(tensors.key_weight, 2, n), of(tensors.alibi_slopes, 1, n)
        results.append(_dense_forward(q, k, v, bias, weight, mask, None, alibi, sink, scalars))
    if not results:
        seed = tensors.dropout_seed
        return _dense_forward(*tensors[:3], *tensors[3:6], seed, tensors.alibi_slopes, sink, scalars)
    outs, lses = (torch.stack(x) for x in zip(*results, strict=True))
    return outs.reshape(*lead, *outs.shape[1:]), lses.reshape(*lead, *lses.shape[1:])


def forward(
    tensors: Tensors, scalars: Scalars, sink: Tensor | None = None, pair_gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [*, Hq, Sq, Dv] and lse [*, Hq, Sq] (fp32, or fp64 for fp64).

    Both are differentiable in q, k, v, bias, key_weight, alibi_slopes, sink [Hq] and, for dense calls, the gate of pairs.
    (Other backends compute no sink: flashsci/call/sink.py.)
    """
    q, k, v, bias, key_weight = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.key_weight
    mask, seed, alibi = tensors.mask, tensors.dropout_seed, tensors.alibi_slopes
    cu_seqlens_q, cu_seqlens_k, bias_offsets = tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.bias_offsets
    if cu_seqlens_q is None and scalars.batch_invariant() and pair_gate is None:
        out, lse = _by_members(tensors, scalars, sink)
    elif cu_seqlens_q is None:
        out, lse = _dense_forward(q, k, v, bias, key_weight, mask, seed, alibi, sink, scalars, pair_gate=pair_gate)
    else:
        assert cu_seqlens_k is not None
        packed = Sequences(cu_seqlens_q, cu_seqlens_k, bias_offsets is not None)
        if not packed.count:  # all rows belong to no sequence: one call without keys, which has gradients
            bias, key_weight = (None if x is None else x[..., :0] for x in (bias, key_weight))
            bias = bias.unsqueeze(-2) if bias is not None and packed.ragged_bias else bias
            keys = k[..., :0, :], v[..., :0, :]
            return _dense_forward(q, *keys, bias, key_weight, None, seed, None, sink, scalars)
        qs = pieces(q, packed.sizes_q, -2)
        ks, vs = (pieces(x, packed.sizes_k, -2) for x in (k, v))
        if scalars.batch_invariant():  # sums of products may depend on addresses
            qs, ks, vs = (tuple(x.clone() for x in of) for of in (qs, ks, vs))
        biases = packed.biases(bias)
        weights = pieces_if_any(key_weight, packed.sizes_k, -1)
        slopes = packed.slopes(alibi)
        results = [
            _dense_forward(
                qs[n],
                ks[n],
                vs[n],
                biases[n],
                weights[n],
                None,
                seed,
                slopes[n],
                sink,
                scalars,
                batch_offset=n,
            )
            for n in range(packed.count)
        ]
        # Rows after the last sequence: out 0, lse -inf.
        heads, left = q.shape[0], q.shape[-2] - sum(packed.sizes_q)
        rest = q.new_full((heads, left), float("-inf"), dtype=_statistics_dtype(q.dtype))
        out = torch.cat([*(r[0] for r in results), q.new_zeros(heads, left, v.shape[-1])], 1)
        lse = torch.cat([*(r[1] for r in results), rest], 1)
    return out, lse


def backward(dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, bias and key_weight from a given out and lse, which may be those of a larger set of keys.

    Scores are rounded to the inputs' dtype, as in the forward. The lse of a backend that keeps scores in fp32 belongs
    to P up to that rounding.
    """
    tensors = saved.tensors
    q, k, v, bias, key_weight = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.key_weight
    mask, seed, alibi = tensors.mask, tensors.dropout_seed, tensors.alibi_slopes
    cu_seqlens_q, cu_seqlens_k, bias_offsets = tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.bias_offsets
    out, lse, scalars = saved.out, saved.lse, saved.scalars
    dout = torch.zeros_like(out) if dout is None else dout
    if cu_seqlens_q is None:
        if scalars.batch_invariant() and q.dim() > 3:
            raise BackendError(
                "flashsci: attention_backward of the reference backend sums in batched products, whose order depends on the "
                "batch; call it once for each member, use backend='triton', or differentiate flashsci.attention"
            )
        dq, dk, dv, dbias, dweight = _dense_backward(
            dout, dlse, q, k, v, bias, key_weight, mask, seed, alibi, out, lse, scalars
        )
    else:
        assert cu_seqlens_k is not None
        packed = Sequences(cu_seqlens_q, cu_seqlens_k, bias_offsets is not None)
        qs, outs, douts = (pieces(x, packed.sizes_q, -2) for x in (q, out, dout))
        lses, dlses = pieces(lse, packed.sizes_q, -1), pieces_if_any(dlse, packed.sizes_q, -1)
        ks, vs = (pieces(x, packed.sizes_k, -2) for x in (k, v))
        biases, slopes = packed.biases(bias), packed.slopes(alibi)
        weights = pieces_if_any(key_weight, packed.sizes_k, -1)
        found = [
            _dense_backward(
                douts[n],
                dlses[n],
                qs[n],
                ks[n],
                vs[n],
                biases[n],
                weights[n],
                None,
                seed,
                slopes[n],
                outs[n],
                lses[n],
                scalars,
                batch_offset=n,
            )
            for n in range(packed.count)
        ]
        dq = follow_layout(packed.join([f[0] for f in found], q, -2), q)
        dk = follow_layout(packed.join([f[1] for f in found], k, -2), k)
        dv = follow_layout(packed.join([f[2] for f in found], v, -2), v)
        dbias = None
        if bias is not None:
            blocks = [f[3] for f in found if f[3] is not None]
            if packed.ragged_bias:
                blocks = [block.flatten(-2) for block in blocks]
            dbias = packed.join(blocks, bias, -1)
        dweight = None
        if key_weight is not None:
            dweight = packed.join([f[4] for f in found if f[4] is not None], key_weight, -1)
    unneeded = [q.new_empty(0) if x is None else x.new_empty(0) for x in (q, k, v, bias, key_weight)]
    wanted = [need & bit for bit in (1, 2, 4, 8, 16)]
    gradients = (dq, dk, dv, dbias, dweight)
    return tuple(g if w and g is not None else u for g, w, u in zip(gradients, wanted, unneeded, strict=True))
