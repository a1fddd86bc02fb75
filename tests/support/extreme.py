"""Scores of any size against fp64, as plain functions of a backend and a device: tests/cpu runs them interpreted and small,
tests/gpu on the kernels.

Masks written as numbers (-1e9 in the bias), scores of which softmax is exactly a maximum, and softcaps so sharp that
their slope is tiny. Each compares with fp64 directly and says how far off a result may be: `flashsci.testing.Judge` allows
what roundings of scores can do, which with scores of 1e9 is anything.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import flashsci
from flashsci.testing import Inputs, Judge, evaluate
from flashsci.testing.tolerance import LOWEST

NUMBERS = (-1e4, -1e9, -1e30, "min of the bias", "min of the inputs")
PLACES = ("last keys", "first keys", "scattered keys", "whole rows")
KINDS = ("pair", "pair of the inputs' dtype", "shared pair", "weights", "packed", "short")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of the largest value of a tensor: tens of roundings of fp32; 8 of P and dS in 16 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BY_ROW = ("out", "lse", "dq", "gq", "gdout", "gdlse", "tout", "tlse")


def close(found, truth, dtype, what, rows=None):
    """Finite everywhere, and within the tolerance but for the rows that say anything."""
    assert torch.isfinite(found).all(), f"{what} is not finite"
    if rows is not None:
        found, truth = found[rows], truth[rows]
    limit = TOLERANCE[dtype] * truth.abs().max().item() + 1e-30
    error = (found.double() - truth).abs().max().item()
    assert error <= limit, f"{what}: error {error:.3g}, may be {limit:.3g}"


def draw(device, dtype, seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator).to(device, dtype) for s in shapes]


def masked(number, place, kind, dtype, device, order, sizes=(40, 37), dim=16):
    """Inputs whose bias holds a number as a mask, and which rows see nothing else: [*, H, Sq] (packed: [Sq])."""
    short = kind == "short"
    seq_q, seq_k = (17, 23) if short else sizes
    packed = kind == "packed"
    heads, lead = 2, () if packed else (2 if kind == "shared pair" else 1,)
    shape = lambda seq: (seq, heads, dim) if packed else (*lead, heads, seq, dim)  # noqa: E731
    like = [shape(seq_q), shape(seq_k), shape(seq_k)]
    q, k, v, dout, *tangents = draw(device, dtype, 5, *like, shape(seq_q), *like)
    own = kind == "pair of the inputs' dtype"
    bias_dtype = dtype if own else torch.float32
    full = (heads, seq_q, seq_k) if packed or kind == "shared pair" else (1, heads, seq_q, seq_k)
    [bias] = draw(device, torch.float32, 6, full)
    least = {"min of the bias": bias_dtype, "min of the inputs": dtype}
    value = torch.finfo(least[number]).min if number in least else number
    # What a dtype cannot hold is its lowest number: -inf would be another mask.
    value = max(value, torch.finfo(bias_dtype).min)
    dead = torch.zeros(seq_q, dtype=torch.bool, device=device)
    hidden = torch.zeros(seq_q, seq_k, dtype=torch.bool, device=device)
    if place == "last keys":
        hidden[:, seq_k * 2 // 3 :] = True
    elif place == "first keys":
        hidden[:, : seq_k // 3] = True
    elif place == "scattered keys":
        hidden[:] = torch.rand(seq_q, seq_k, generator=torch.Generator().manual_seed(7)) < 0.5
        hidden[:, 3] = False
    else:
        dead[[1, seq_q // 2, seq_q - 1]] = True
        hidden[dead] = True
        hidden[:, -2:] = True
    bias = bias.masked_fill(hidden, value).to(bias_dtype)
    dout = dout * ~dead[:, None, None] if packed else dout * ~dead[:, None]
    options = {}
    weight = None
    if kind == "weights":
        weight = torch.rand(1, 1, seq_k, generator=torch.Generator().manual_seed(8)).to(device)
        weight = weight * 0.9 + 0.1
        weight[..., 5] = 0
    if packed:
        # One sequence beside an empty one and one without keys.
        offsets = lambda n: torch.tensor([0, 0, n, n], dtype=torch.int32, device=device)  # noqa: E731
        options = {"cu_seqlens_q": offsets(seq_q), "cu_seqlens_k": offsets(seq_k)}
        bias = bias.flatten(1)
    named = dict(zip(("tq", "tk", "tv"), tangents, strict=True)) if order == 2 else {}
    return Inputs(q, k, v, bias, None, dout, key_weight=weight, tangents=named, **options), dead


def rows_of(name, packed, dead):
    """Index of the rows of a tensor that have a truth: those that see a key."""
    if name not in BY_ROW:
        return None
    if packed:
        return (slice(None), ~dead) if name.endswith("lse") else ~dead
    return (Ellipsis, ~dead) if name.endswith("lse") else (Ellipsis, ~dead, slice(None))


def kept_finite(found, inputs, dead):
    """The results, but for the lse of rows of a number so low that they may count as rows without keys."""
    if inputs.bias.min() < LOWEST and "lse" in found:
        without_keys = (found["lse"] == float("-inf")) & dead
        found["lse"] = found["lse"].masked_fill(without_keys, LOWEST)
    return found


def same(found, value, what):
    """Exactly; in fp32 but for what products of split operands round."""
    error = (found.double() - value.double()).abs()
    digits = 20 if found.dtype == torch.float32 else 60
    assert (error <= 2.0**-digits * value.double().abs()).all(), what


def masks_as_numbers(backend, device, number, place, kind, dtype, order=1, lse=True, **sizes):
    """Rows that see a key are as good as with -inf; the others, whose dout is zero, are finite and reach nothing."""
    inputs, dead = masked(number, place, kind, dtype, device, order, **sizes)
    found = kept_finite(evaluate(inputs, backend, lse=lse), inputs, dead)
    # fp64 on the CPU: also where the device's own is in doubt.
    truth = evaluate(inputs.to(torch.float64), "reference")
    for name, x in found.items():
        close(x, truth[name], dtype, name, rows_of(name, inputs.varlen, dead))
    if not dead.any():
        return
    rows = (Ellipsis, dead, slice(None))
    by_row = inputs.varlen and (dead,)
    assert found["dq"][by_row or rows].eq(0).all(), "dq of a row whose dout is zero"
    bias = found["dbias"].unflatten(1, (len(dead), -1)) if inputs.varlen else found["dbias"]
    assert bias[rows].eq(0).all(), "dbias of a row whose dout is zero"


def whole_rows_with_a_gradient(backend, device, number, dtype, kind="pair", order=1, lse=True):
    """Rows that see nothing but the number: any distribution, so every gradient is finite and no larger than if each key
    had probability 1."""
    inputs, dead = masked(number, "whole rows", kind, dtype, device, order)
    inputs.dout = draw(device, dtype, 9, inputs.dout.shape)[0]
    truth = evaluate(inputs.to(torch.float64), "reference")
    for name, x in kept_finite(evaluate(inputs, backend, lse=lse), inputs, dead).items():
        assert torch.isfinite(x).all(), f"{name} is not finite"
        if name[0] == "d" or name == "out":
            most = truth[name].abs().max().item() * (1 if name == "out" else 2 * len(dead))
            assert x.abs().max() <= 2 * most, f"{name} reaches {x.abs().max():.3g}, may {most:.3g}"


def one_key_wins(backend, device, dtype, size, scale, seq=40, dim=32, lse=True, tangents=False, **options):
    """Scores of which softmax is exactly a maximum: query i sees key perm(i) alone, which is right in every dtype.

    q and k are +-size: all products and sums are exact, and the largest score stands alone.
    """
    generator = torch.Generator().manual_seed(seq)
    signs = torch.randint(0, 2, (1, 2, seq, dim), generator=generator) * 2.0 - 1.0
    order = torch.randperm(seq, generator=generator)
    # Rows of 31 sizes: of some, the roundings of the lse lie below the score, of others above.
    factor = (1 + torch.arange(seq) % 31)[:, None] / 32
    q = (signs * factor * size * (1 if scale > 0 else -1)).to(device, dtype)
    k = (signs[:, :, order] * size).to(device, dtype)
    v, dout, *t = draw(device, dtype, 3, *[q.shape] * 5)
    named = dict(zip(("tq", "tk", "tv"), t, strict=True)) if tangents else {}
    inputs = Inputs(q, k, v, None, None, dout, options={"scale": scale, **options}, tangents=named)
    found = evaluate(inputs, backend, lse=lse)
    back = torch.argsort(order).to(device)
    for name, x in found.items():
        assert torch.isfinite(x).all(), f"{name} is not finite"
    same(found["out"], v[:, :, back], "out is the value of the key that wins")
    if "lse" in found:
        top = abs(scale) * size * size * dim * factor[:, 0].double()
        cap = options.get("softcap")
        top = (cap * torch.tanh(top / cap) if cap else top).to(device)
        error = ((found["lse"].double() - top).abs() / top).max().item()
        assert error <= 2.0**-20, f"lse is the score that wins, but for {error:.3g} of it"
    same(found["dv"], dout[:, :, order.to(device)], "dv is dout of the query that it won")
    # dS is 0; what two ways to sum dP leave of it is multiplied by scale k.
    terms = (dout.double().abs() * v[:, :, back].double().abs()).sum(-1).max().item()
    noise = 16 * torch.finfo(torch.float32).eps * terms * abs(scale) * size
    for name in ("dq", "dk"):
        assert found[name].abs().max() <= noise, f"{name} is zero but for roundings"


def rows_of_every_size(backend, device, dtype=torch.float32, seq=200, lse=True):
    """Huge and ordinary rows in one tile, and rows whose first keys score -1e10: ordinary rows are as good as alone."""
    q, k, v, dout = draw(device, dtype, 4, *[(1, 1, seq, 16)] * 4)
    k[:, :, : seq // 2, 15] = -1e5
    q[..., 15] = 0
    q[:, :, 1::4] *= 1e8
    q[:, :, 2::4, 15] = 1e6  # -1e11 / 4 for the first half of the keys
    inputs = Inputs(q, k, v, None, None, dout)
    truth = evaluate(inputs.to(torch.float64), "reference")
    found = evaluate(inputs, backend, lse=lse)
    ordinary = torch.ones(seq, dtype=torch.bool)
    ordinary[1::4] = False
    ordinary[2::4] = False
    rows = (Ellipsis, ordinary, slice(None))
    for name in ("out", "dq"):
        close(found[name], truth[name], dtype, name, rows)
    for name in ("dk", "dv"):
        assert torch.isfinite(found[name]).all(), f"{name} is not finite"


def capped(x):
    """tanh x for x > 0 whose derivatives, by autograd, lose no digit to cancellation."""
    e = torch.exp(-2 * x)
    return (1 - e) / (1 + e)


def slope_of_a_sharp_softcap(backend, device, dtype, saturation, lse=False):
    """Gradients through a softcap are tiny, but as good as others: all products here are exact, so nothing but the slope
    1 - tanh^2 and its derivative can lose digits."""
    seq = 16
    q, k = torch.zeros(2, 1, 1, seq, 16)
    q[..., 0] = 1
    k[0, 0, :, 0] = torch.arange(seq) * 0.0625 + saturation
    v, dout, tq, tk = draw("cpu", torch.float32, 11, *[(1, 1, seq, 16)] * 4)
    tensors = [x.to(device, dtype) for x in (q, k, v, dout, tq, tk)]
    q, k, v, dout, tq, tk = (x.double().cpu() for x in tensors)
    q.requires_grad_(), k.requires_grad_()
    p = torch.softmax(capped(q @ k.transpose(-1, -2)), -1)
    first = torch.autograd.grad(p @ v, (q, k), dout, create_graph=True)
    second = torch.autograd.grad(first, (q, k), (tq, tk))
    truth = dict(zip(("dq", "dk", "gq", "gk"), (*first, *second), strict=True))
    q, k, v, dout, tq, tk = tensors
    named = {"tq": tq, "tk": tk}
    inputs = Inputs(q, k, v, None, None, dout, options={"softcap": 1.0, "scale": 1.0}, tangents=named)
    found = evaluate(inputs, backend, lse=lse)
    for name, x in truth.items():
        x = x.detach().to(device)
        if x.abs().max() > 1e3 * torch.finfo(dtype).smallest_normal:
            close(found[name], x, dtype, name)
        else:
            assert found[name].abs().max() <= 2e3 * torch.finfo(dtype).smallest_normal, name


def softcap_far_above_the_scores(backend, device, dtype, softcap, seq=23, dim=16, tangents=True):
    """A bound of 1e3 to 1e38 for scores of order 1: its tanh sees arguments next to 0."""
    q, k, v, dout, tq, tk, tv = draw(device, dtype, 13, *[(1, 2, seq, dim)] * 7)
    [dlse] = draw(device, torch.float32, 14, (1, 2, seq))
    named = {"tq": tq, "tk": tk, "tv": tv} if tangents else {}
    options = {"softcap": softcap}
    inputs = Inputs(q, k, v, dout=dout, dlse=dlse, tangents=named, options=options)
    Judge(inputs, fused=backend != "reference").require(evaluate(inputs, backend))


def sums_near_the_end_of_fp32(backend, device, dtype, which, seq=20, dim=16, tangents=True, lse=True):
    """Products q k^T of 1e36 before a scale of 1e-36, and values of 1e27: finite sums, and accurate results."""
    q, k, v, dout, tq, tk, tv = draw(device, torch.float32, 17, *[(1, 2, seq, dim)] * 7)
    of_q, of_v = (2.0**58, 1.0) if which == "products" else (1.0, 2.0**90)
    q, k, tq, tk = (of_q * x for x in (q, k, tq, tk))
    v, tv, dout = of_v * v, of_v * tv, dout / of_v
    q, k, v, dout, tq, tk, tv = (x.to(dtype) for x in (q, k, v, dout, tq, tk, tv))
    named = {"tq": tq, "tk": tk, "tv": tv} if tangents else {}
    options = {"scale": dim**-0.5 / of_q**2}
    inputs = Inputs(q, k, v, dout=dout, tangents=named, options=options)
    fused = backend not in ("reference", "sdpa")
    Judge(inputs, fused).require(evaluate(inputs, backend, lse=lse))


def weights_below_the_smallest_normal_number(
    backend, device, dtype, share, bias=0.0, seq=(17, 23), dim=16, tangents=True
):
    """They are zero: every result has the bits that zeros in their places give. share: how many of the weights are so small."""
    seq_q, seq_k = seq
    like = [(1, 2, seq_q, dim), *[(1, 2, seq_k, dim)] * 2]
    q, k, v, dout, *directions = draw(device, dtype, 15, *like, like[0], *like)
    drawn, small, tweight = torch.rand(3, 1, 2, seq_k, generator=torch.Generator().manual_seed(16))
    least = torch.tensor([1e-45, 1e-42, 3e-39, 1e-38])[torch.arange(seq_k) % 4]
    few = small < share
    weight = torch.where(few, least, 0.1 + drawn).to(device)
    zeros = torch.where(few.to(device), 0.0, weight)
    names = ("tq", "tk", "tv", "tkey_weight")
    named = dict(zip(names, (*directions, tweight.to(device)), strict=True)) if tangents else {}
    given = Inputs(q, k, v, dout=dout, key_weight=weight, tangents=named)
    if bias:
        given = replace(given, bias=torch.full((seq_q, seq_k), bias, device=device), bias_grad=False)
    found, truth = (evaluate(replace(given, key_weight=w), backend, deterministic=True) for w in (weight, zeros))
    for name, x in truth.items():
        assert torch.equal(found[name], x), f"{name} is not that of weights of zero"
        assert torch.isfinite(x).all() or name in ("lse", "tlse"), f"{name} is not finite"


def sharp_softcap_and_scores_of_thirty(backend, device, seq=64, dim=128, lse=False):
    """A softcap of 0.01 makes of a rounding of scores of 30 a hundred of the slope's: no worse than plain PyTorch in fp32."""
    q, k, v, dout = draw(device, torch.float32, 12, *[(1, 2, seq, dim)] * 4)
    inputs = Inputs(q * 30, k, v, None, None, dout, options={"softcap": 0.01})
    truth = evaluate(inputs.to(torch.float64), "reference")
    plain = evaluate(inputs, "reference")
    found = evaluate(inputs, backend, lse=lse)
    for name in ("out", "dq", "dk", "dv"):
        error, base = ((x[name].double() - truth[name]).norm() for x in (found, plain))
        assert error <= 4 * base + 1e-6 * truth[name].norm(), f"{name}: {error:.3g}, plain {base:.3g}"


def gradients_under_a_given_lse(backend, device, dtype, number):
    """attention_backward of rows that see nothing but a mask's number: finite, and zero where dout is."""
    inputs, dead = masked(number, "whole rows", "pair", dtype, device, 1)
    with flashsci.use_backend(backend, strict=True), torch.no_grad():
        out, lse = flashsci.attention(inputs.q, inputs.k, inputs.v, bias=inputs.bias, return_lse=True, backend=backend)
        found = flashsci.attention_backward(
            inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, bias=inputs.bias, backend=backend
        )
    for name, x in zip(("dq", "dk", "dv", "dbias"), found[:4], strict=True):
        assert torch.isfinite(x).all(), f"{name} is not finite"
    assert found.dq[:, :, dead].eq(0).all() and found.dbias[:, :, dead].eq(0).all()
