"""What a correct fused kernel does, in PyTorch: the subject of the tests of our own criteria.

P and dS are rounded to the inputs' dtype before they enter a matrix product, everything else is
fp32. ``wrong`` names one mistake to make.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashsci.testing import Inputs
from flashsci.testing.blocks import blocks

MISTAKES = (
    "last key forgotten", "last key forgotten in the backward", "first row sees one key too few",
    "scores times 1.01", "natural exponent for 2", "lse in base 2", "delta without the lse's cotangent",
    "dq without the scale", "wrong key head", "dv from unnormalised P", "bias gradient of one batch entry",
    "NaN in one place", "one row not written", "bias gradient without the slope",
)  # fmt: skip

# Mistakes that only inputs as models have them show.
MODEL_MISTAKES = (
    "zero rows set the exponent of halves", "offset of exp2 rounded", "recomputed P beyond 1", "zero keys left out",
    "rows without dout not computed", "column block of the next tile", "gradient of an empty sum not written",
    "number hides a whole row", "padding reaches dv",
)  # fmt: skip

SECOND_MISTAKES = (
    "zeta forgotten", "mean not subtracted", "E tk forgotten", "E tq forgotten", "tv forgotten", "softcap not bent",
    "zeta too small", "tangent without the scale", "bias tangent forgotten", "last key forgotten",
    "delta without the lse's cotangent", "first row not written", "gv of the uncentred tangent",
)  # fmt: skip


def flash_like(inputs: Inputs, wrong: str | None = None) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv, dbias of one call, as a kernel would compute them."""
    assert wrong is None or wrong in MISTAKES + MODEL_MISTAKES
    dtype = inputs.q.dtype
    found = {
        "out": torch.zeros(*inputs.q.shape[:-1], inputs.v.shape[-1], dtype=dtype),
        "lse": torch.full(
            inputs.q.shape[:-1] if not inputs.varlen else (inputs.q.shape[1], inputs.q.shape[0]),
            -math.inf,
        ),
        "dq": torch.zeros(inputs.q.shape, dtype=dtype),
        "dk": torch.zeros(inputs.k.shape, dtype=dtype),
        "dv": torch.zeros(inputs.v.shape, dtype=dtype),
    }
    if inputs.bias is not None:
        found["dbias"] = torch.zeros(inputs.bias.shape, dtype=inputs.bias.dtype)
    if inputs.key_weight is not None:
        found["dkey_weight"] = torch.zeros(inputs.key_weight.shape, dtype=inputs.key_weight.dtype)
    if inputs.sink is not None:
        found["dsink"] = torch.zeros(inputs.sink.shape)
    if inputs.pair_gate is not None:
        found["dpair_gate"] = torch.zeros(inputs.pair_gate.shape, dtype=inputs.pair_gate.dtype)
    for block in blocks(inputs.to(torch.float32)):
        results = _block(block, dtype, wrong)
        for name, whole in found.items():
            slot = block.slot(name, whole)
            slot.copy_(slot + results[name] if name == "dsink" else results[name])
    if inputs.sink is not None:
        found["dsink"] = found["dsink"].to(inputs.sink.dtype)
    if inputs.bias is not None and not inputs.bias_grad:
        del found["dbias"]
    if inputs.key_weight is not None and not inputs.key_weight_grad:
        del found["dkey_weight"]
    if wrong == "gradient of an empty sum not written" and not inputs.q.numel():
        found["dbias"] = torch.full_like(found["dbias"], 1e-3)
    if wrong == "NaN in one place":
        found["out"].view(-1)[-1] = math.nan
    return found


def _halves(x, wrong):
    """fp32 [*, S, D] as two fp16 numbers each, scaled by a power of two for every tile of 16 rows: what is left of them."""
    tiles = x.split(16, -2)
    found = []
    for tile in tiles:
        largest = tile.abs().amax((-2, -1), keepdim=True) if tile.numel() else tile.new_ones(())
        if wrong:  # a row of zeros is taken for one of exponent 0
            of_rows = tile.abs().amax(-1, keepdim=True)
            largest = torch.where(of_rows == 0, 1.0, of_rows).amax(-2, keepdim=True)
        exponent = torch.where(largest > 0, torch.frexp(largest).exponent, 0)
        scaled = torch.ldexp(tile, 8 - exponent)
        high = scaled.half().float()
        found.append(torch.ldexp(high + (scaled - high).half().float(), exponent - 8))
    return torch.cat(found, -2) if found else x


def _parts(x):
    """fp32 as tensor cores take it: two numbers of TF32, whose subnormal numbers are 2^-136 apart."""
    high = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    rest = x - high
    return high + ((rest.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _online(scores, low, wrong):
    """Softmax over tiles of 16 keys, the last first: unnormalised P, its largest score; a tile rescales what came before."""
    rows = (*scores.shape[:-1], 1)
    top, parts = scores.new_full(rows, -math.inf), []
    factor = math.log2(math.e)
    for tile in reversed(scores.split(16, -1)):
        above = torch.maximum(top, tile.amax(-1, keepdim=True))
        safe = torch.where(above == -math.inf, 0.0, above)
        if wrong:  # fma(s, c, -offset): the product is exact, the offset is rounded
            offset = (safe * factor).double()
            p = low(torch.exp2(tile.double() * factor - offset).float())
        else:
            p = torch.exp2((tile - safe) * factor)
        shrink = torch.exp2((torch.where(top == -math.inf, safe, top) - safe) * factor)
        parts = [p, *(x * shrink for x in parts)]
        top = above
    return torch.cat(parts, -1) if parts else scores, torch.where(top == -math.inf, 0.0, top)


def _block(b, dtype, wrong):
    low = lambda x: x.to(dtype).float()  # noqa: E731
    turn = lambda x: x.transpose(-1, -2)  # noqa: E731
    groups = b.q.shape[-3] // b.k.shape[-3]
    k, v = (x.repeat_interleave(groups, -3) for x in (b.k, b.v))
    if wrong == "wrong key head":
        k, v = (x.repeat(*(1,) * (x.dim() - 3), groups, 1, 1) for x in (b.k, b.v))
    per_key = lambda x: x.unflatten(-3, (-1, groups)).sum(-3)  # noqa: E731
    scores = b.scale * (b.q @ turn(k))
    tanh = None
    visible = b.visible
    if b.softcap and not b.caps_bias:
        tanh = torch.tanh(scores / b.softcap)
        scores = b.softcap * tanh
    if b.bias is not None:
        scores = scores + b.bias
        visible = visible & (b.bias > -math.inf)
    if b.alibi is not None:
        scores = scores + b.alibi
    if b.caps_bias:
        tanh = torch.tanh(scores / b.softcap)
        scores = b.softcap * tanh
    if wrong == "scores times 1.01":
        scores = scores * 1.01
    scores = scores.masked_fill(~visible, -math.inf)
    bare_scores = scores
    if b.key_weight is not None:
        # Subnormal weights count as zero.
        w = torch.where(b.key_weight < torch.finfo(torch.float32).tiny, 0.0, b.key_weight)
        w = w.repeat_interleave(groups, -2) if w.shape[-2] > 1 else w
        scores = scores + w.log()[..., None, :]
    hidden = scores.clone()
    if scores.shape[-1]:
        hidden[..., -1] = -math.inf
    if wrong == "last key forgotten":
        scores = hidden
    if wrong == "first row sees one key too few":
        scores[..., 0, -1] = -math.inf
    if wrong == "zero keys left out":
        scores = scores.masked_fill((k == 0).all(-1)[..., None, :], -math.inf)
    if wrong == "number hides a whole row":
        scores = scores.masked_fill(scores < -1e8, -math.inf)
    keep = b.keep.float()
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    top = torch.where(top == -math.inf, 0.0, top)
    base = 1.0 if wrong == "natural exponent for 2" else math.log2(math.e)
    p = torch.exp2((scores - top) * base)
    if wrong == "offset of exp2 rounded":
        p, top = _online(scores, lambda x: x.half().float(), True)
    elif wrong is None and scores.shape[-1] > 32:
        p, top = _online(scores, low, False)
    total = p.sum(-1, keepdim=True)
    safe = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -math.inf, top + torch.log(safe))
    out = low(low(p * keep) @ v / safe)
    if b.sink is not None:
        share = torch.where(total == 0, 0.0, torch.sigmoid(lse - b.sink))
        out, lse = low(out * share), torch.logaddexp(lse, b.sink)
    # Backward, from P recomputed with the stored lse.
    if wrong == "last key forgotten in the backward":
        scores = hidden
    # The stored lse of huge scores is off by more than exp can bear: no share of a row is above 1.
    shift = scores - torch.where(lse == -math.inf, 0.0, lse)
    p = torch.exp(shift.clamp(max=0))
    if wrong == "recomputed P beyond 1":
        factor = math.log2(math.e)
        p = torch.exp2((scores.double() * factor - (lse * factor).double()).float())
    p = torch.where(lse == -math.inf, 0.0, p)
    delta = (b.dout * out).sum(-1, keepdim=True)
    if b.dlse is not None and wrong != "delta without the lse's cotangent":
        delta = delta - b.dlse[..., None]
    ds = p * (keep * (b.dout @ turn(v)) - delta)
    if b.key_weight is not None:
        bare = torch.exp(bare_scores - torch.where(lse == -math.inf, math.inf, lse))
        terms = bare * (keep * (b.dout @ turn(v)) - delta)
        terms = terms.sum(-2).unflatten(-2, (-1, groups)).sum(-2)
    if wrong == "rows without dout not computed":
        out = out * (b.dout != 0).any(-1, keepdim=True)
    if wrong == "column block of the next tile" and out.shape[-2] > 16:
        out = out.clone()
        out[..., :8, 8:] = out[..., 16:17, 8:]
    results = {
        "out": out,
        "lse": lse[..., 0] * (math.log2(math.e) if wrong == "lse in base 2" else 1),
    }
    if wrong == "one row not written" and out.numel():
        results["out"] = torch.cat([torch.zeros_like(out[..., :1, :]), out[..., 1:, :]], -2)
    of_products = ds if tanh is None else ds * (1 - tanh * tanh)
    if b.bias is not None:
        ds = of_products if b.caps_bias and wrong != "bias gradient without the slope" else ds
        part = (
            ds * (torch.arange(len(ds)).view(-1, *(1,) * (ds.dim() - 1)) == 0)
            if (wrong == "bias gradient of one batch entry")
            else ds
        )
        results["dbias"] = part.sum_to_size(b.bias.shape)
    if b.sink is not None:
        of_sink = torch.where(lse == -math.inf, 0.0, torch.exp(b.sink - lse))
        results["dsink"] = -(of_sink * delta).movedim(-3, 0).flatten(1).sum(1)
    if b.gate is not None:
        of_gate = p * b.dropped * (b.dout @ turn(v))
        results["dpair_gate"] = of_gate.sum_to_size(b.gate.shape)
    if b.key_weight is not None:
        results["dkey_weight"] = terms.sum_to_size(b.key_weight.shape)
    ds = of_products
    ds = _parts(ds) if dtype == torch.float32 else low(ds)
    results["dq"] = (1 if wrong == "dq without the scale" else b.scale) * (ds @ k)
    results["dk"] = per_key(b.scale * (turn(ds) @ b.q))
    if wrong == "padding reaches dv":  # by an exponent too small to see in what is not padding
        p = p + 1e-4 * (b.dout == 0).all(-1, keepdim=True) * p
        ds = ds + 1e-6 * (b.dout == 0).all(-1, keepdim=True)
        results["dq"] = b.scale * (ds @ k)
    unnormalised = p * safe if wrong == "dv from unnormalised P" else p
    dout = b.dout
    if dtype == torch.float32 and wrong in (None, "zero rows set the exponent of halves"):
        dout = _halves(dout, wrong)
    results["dv"] = per_key(turn(low(unnormalised * keep)) @ dout)
    return results


def second_like(inputs: Inputs, wrong: str | None = None) -> dict[str, Tensor]:
    """The second order of one dense call without grouped heads, as kernels would compute it: P, P (T - m), E and F are
    rounded before they enter a product, all else is fp32."""
    assert wrong is None or wrong in SECOND_MISTAKES
    dtype = inputs.q.dtype
    (b,) = blocks(inputs.to(torch.float32))
    low = lambda x: x.to(dtype).float()  # noqa: E731
    turn = lambda x: x.transpose(-1, -2)  # noqa: E731
    row = lambda x: x.sum(-1, keepdim=True)  # noqa: E731
    q, k, v, dout, keep = b.q, b.k, b.v, b.dout, b.keep.float()
    tq, tk, tv, tbias = (b.tangents[n] for n in ("tq", "tk", "tv", "tbias"))
    tv = torch.zeros_like(tv) if wrong == "tv forgotten" else tv
    raw = b.scale * (q @ turn(k))
    raw = raw + b.bias if b.caps_bias else raw
    tanh = torch.tanh(raw / b.softcap) if b.softcap else torch.zeros_like(raw)
    scores = (b.softcap * tanh if b.softcap else raw) + (0 if b.caps_bias else b.bias)
    scores = scores.masked_fill(~b.visible, -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    p = torch.exp(scores - lse)
    if wrong == "last key forgotten":
        p = torch.cat([p[..., :-1], torch.zeros_like(p[..., -1:])], -1)
    out = low(low(p * keep) @ v)
    slope = 1 - tanh * tanh
    t_raw = tq @ turn(k) + q @ turn(tk)
    t_raw = t_raw if wrong == "tangent without the scale" else b.scale * t_raw
    tbias = 0 * tbias if wrong == "bias tangent forgotten" else tbias
    t_raw = t_raw + tbias if b.caps_bias else t_raw
    t = slope * t_raw + (0 if b.caps_bias else tbias)
    mean = row(p * t)
    w = p * (t if wrong == "mean not subtracted" else t - mean)
    tout = low(w * keep) @ v + low(p * keep) @ tv
    delta = row(dout * out)
    if b.dlse is not None and wrong != "delta without the lse's cotangent":
        delta = delta - b.dlse[..., None]
    zeta = row(dout * (0.9 * tout if wrong == "zeta too small" else tout))
    zeta = 0 * zeta if wrong == "zeta forgotten" else zeta
    e = p * (keep * (dout @ turn(v)) - delta)
    f = e * (t - mean) + p * (keep * (dout @ turn(tv)) - zeta)
    bend = 0 * tanh if not b.softcap or wrong == "softcap not bent" else -2 / b.softcap * tanh * slope
    e_raw, f_raw = e * slope, f * slope + bend * t_raw * e
    f = f_raw if b.caps_bias else f
    e_raw, f_raw = low(e_raw), low(f_raw)
    gq, gk = f_raw @ k, turn(f_raw) @ q
    gq = gq if wrong == "E tk forgotten" else gq + e_raw @ tk
    gk = gk if wrong == "E tq forgotten" else gk + turn(e_raw) @ tq
    gv = turn(low((p * t if wrong == "gv of the uncentred tangent" else w) * keep)) @ dout
    gq = b.scale * gq
    if wrong == "first row not written":
        gq = torch.cat([torch.zeros_like(gq[..., :1, :]), gq[..., 1:, :]], -2)
    return {
        "gq": gq.to(dtype),
        "gk": (b.scale * gk).to(dtype),
        "gv": gv.to(dtype),
        "gbias": f.sum_to_size(b.bias.shape).to(inputs.bias.dtype),
        "gdout": tout.to(dtype),
        "gdlse": mean[..., 0],
        "tout": tout.to(dtype),
        "tlse": mean[..., 0],
    }
