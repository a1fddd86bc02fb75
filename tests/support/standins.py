"""Stand-ins for functions of other packages (flashsci/compat) against the formulas those document, on any device and backend.

Each formula is plain PyTorch in the layout of its package. In float64 it must agree with the oracle of the same call in our layout,
whose bounds then judge the stand-in in its dtype.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashsci
from flashsci.compat import cuequivariance, deepspeed, jvp_flash_attention, xformers
from flashsci.testing import Inputs, Judge, embed
from flashsci.testing.bounds import PLAIN

Leaves = dict[str, Tensor]


def same_signature(function: Callable[..., Any], recorded: str) -> None:
    """Names, kinds and defaults of parameters are those of a ``def`` recorded as text."""
    (node,) = ast.parse(f"def {recorded}: ...").body
    assert isinstance(node, ast.FunctionDef)
    a = node.args
    first = [None] * (len(a.args) - len(a.defaults))
    expected = [(x.arg, "positional", d) for x, d in zip(a.args, first + a.defaults, strict=True)]
    expected += [(x.arg, "keyword", d) for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    found = [
        (
            name,
            "keyword" if p.kind is p.KEYWORD_ONLY else "positional",
            None if p.default is p.empty else repr(p.default),
        )
        for name, p in inspect.signature(function).parameters.items()
    ]
    assert found == [
        (name, kind, None if default is None else repr(ast.literal_eval(default))) for name, kind, default in expected
    ]


def differentiated(call: Callable[..., Tensor], leaves: Leaves, dout: Tensor) -> Leaves:
    """out and gradients of ``call(**leaves)`` by name, in the layout of the leaves."""
    xs = {n: x.detach().requires_grad_() for n, x in leaves.items()}
    out = call(**xs)
    gradients = torch.autograd.grad(out, list(xs.values()), dout)
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(xs, gradients, strict=True)}}


def judged(
    call: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    leaves: Leaves,
    dout: Tensor,
    backend: str,
    ours: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    **inputs: Any,
) -> Leaves:
    """Judge a stand-in on a backend; what it found is returned.

    Args:
        call, formula: of the leaves by name, in the package's layout.
        leaves: q, k, v and perhaps bias.
        ours: a tensor of the package's layout in that of flashsci; its name is that of a leaf, or "out".
        inputs: what else ``Inputs`` takes.
    """
    given = {n: ours(n, x) for n, x in leaves.items()}
    judge = Judge(Inputs(**given, dout=ours("out", dout), **inputs), backend not in PLAIN)
    wide = {n: x.double() for n, x in leaves.items()}
    for name, x in differentiated(formula, wide, dout.double()).items():
        x, truth = ours(name.removeprefix("d"), x), judge.truth[name]
        torch.testing.assert_close(x, truth, rtol=1e-9, atol=1e-9 * max(1, truth.abs().max().item()))
    with flashsci.use_backend(backend, strict=True):
        found = differentiated(call, leaves, dout)
    judge.require({n: ours(n.removeprefix("d"), x) for n, x in found.items()})
    for name, x in leaves.items():
        assert found[f"d{name}"].shape == x.shape
    return found


def draw(*shapes: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).to(device) for shape in shapes]


# --- cuequivariance -------------------------------------------------------------------------------


def triangle_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """As documented: masked scores are replaced by -1e9."""
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT + bias
    if mask is not None:
        scores = scores.masked_fill(~mask.bool(), -1e9)
    return scores.softmax(-1) @ v


def triangle(
    backend: str,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...] = (1, 3, 2, 7, 9),
    dims: tuple[int, int] = (16, 16),
    odd: bool = False,
    scale: float | None = None,
) -> None:
    """Masks with a hole in every row, padding at the end, and rows that see nothing."""
    b, n, h, s, t = sizes
    d, dv = dims
    q, k, v, dout = draw(
        (b, n, h, s, d), (b, n, h, t, d), (b, n, h, t, dv), (b, n, h, s, dv), dtype=dtype, device=device
    )
    (bias,) = draw((b, 1, h, s, t), dtype=torch.float32, device=device)
    if odd:  # as models make them: heads after the sequence, bias from a linear layer of pairs
        q, k, v, dout = (embed(x, order=(0, 1, 3, 2, 4), pad={4: 3}) for x in (q, k, v, dout))
        bias = embed(bias, order=(0, 1, 3, 4, 2))
    mask = torch.rand(b, n, 1, 1, t) < 0.7
    mask[..., -1] = False
    mask[..., 0] = True
    mask[:, -1] = False
    mask = mask.to(device)
    empty = ~mask.any(-1, keepdim=True)

    def ours(name: str, x: Tensor) -> Tensor:
        # Rows that see nothing are the stand-in's business: looked at below.
        return x.masked_fill(empty, 0) if name in ("out", "v") else x

    judged(
        lambda q, k, v, bias: cuequivariance.triangle_attention(q, k, v, bias, mask, scale),
        lambda q, k, v, bias: triangle_formula(q, k, v, bias, mask, scale),
        {"q": q, "k": k, "v": v, "bias": bias},
        dout,
        backend,
        ours,
        mask=mask,
        options={"scale": scale},
    )
    xs = [x.detach().requires_grad_() for x in (q, k, v)]
    with flashsci.use_backend(backend, strict=True):
        out = cuequivariance.triangle_attention(*xs, bias, mask, scale)
    dq, dk, dv_ = torch.autograd.grad(out, xs, dout)
    blind = (slice(None), slice(-1, None))
    eps = torch.finfo(dtype).eps
    mean, share = (
        v[blind].double().mean(-2, keepdim=True),
        dout[blind].double().sum(-2, keepdim=True) / t,
    )
    torch.testing.assert_close(out[blind].double(), mean.expand_as(out[blind]), rtol=eps, atol=eps)
    torch.testing.assert_close(dv_[blind].double(), share.expand_as(dv_[blind]), rtol=2 * eps, atol=2 * eps)
    assert dq[blind].eq(0).all() and dk[blind].eq(0).all()


# --- DeepSpeed ------------------------------------------------------------------------------------


def evoformer_formula(Q: Tensor, K: Tensor, V: Tensor, biases: list[Tensor | None]) -> Tensor:
    q, k, v = (x.transpose(-2, -3) for x in (Q, K, V))
    scores = q.shape[-1] ** -0.5 * q @ k.mT
    for bias in biases:
        scores = scores if bias is None else scores + bias
    return (scores.softmax(-1) @ v).transpose(-2, -3)


def evoformer(
    backend: str,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...] = (1, 3, 9, 2, 8),
    pairs: bool = True,
    odd: bool = False,
) -> None:
    """Random masks as numbers, one sequence wholly masked; with and without the bias of pairs."""
    b, n, s, h, d = sizes
    q, k, v, dout = draw(*4 * [(b, n, s, h, d)], dtype=dtype, device=device)
    leaves = {"q": q, "k": k, "v": v}
    if odd:
        leaves = {m: embed(x, order=(0, 2, 1, 3, 4), pad={4: 1}) for m, x in leaves.items()}
    if pairs:
        (leaves["bias"],) = draw((b, 1, h, s, s), dtype=dtype, device=device)
    mask = torch.randint(0, 2, (b, n, 1, 1, s), dtype=dtype).to(device)
    mask[..., 0] = 1
    mask[:, -1] = 0
    keys = 1e9 * (mask - 1)  # -inf in float16
    # Of a sequence wholly masked, -1e9 everywhere changes nothing.
    seen = mask.bool() | ~mask.bool().any(-1, keepdim=True)
    judged(
        lambda q, k, v, bias=None: deepspeed.DS4Sci_EvoformerAttention(q, k, v, [keys, bias]),
        lambda q, k, v, bias=None: evoformer_formula(q, k, v, [torch.where(seen, 0.0, -1e9).double(), bias]),
        leaves,
        dout,
        backend,
        lambda name, x: x if name == "bias" else x.transpose(-2, -3),
        mask=seen,
    )


# --- xformers -------------------------------------------------------------------------------------


def xformers_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """[B, M, *H, K], with ``bias`` [*, Mq, Mk] or broadcast to it. Rows of -inf are 0."""
    q, k, v = (x.movedim(1, -2) for x in (query, key, value))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    scores = scores if bias is None else scores + bias
    empty = scores.isneginf().all(-1, keepdim=True)
    p = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return (p @ v).movedim(-2, 1)


BANDS = {
    "LowerTriangularMask": (lambda: xformers.LowerTriangularMask(), {"causal": True}),
    "LowerTriangularFromBottomRightMask": (
        lambda: xformers.LowerTriangularFromBottomRightMask(),
        {"causal": True, "align": "lower_right"},
    ),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        lambda: xformers.LowerTriangularFromBottomRightMask().make_local_attention(3),
        {"window": (2, 0), "align": "lower_right"},
    ),
    "LocalAttentionFromBottomRightMask": (
        lambda: xformers.LocalAttentionFromBottomRightMask(2, 1),
        {"window": (2, 1), "align": "lower_right"},
    ),
}


def one_sequence(
    backend: str,
    device: str,
    dtype: torch.dtype,
    band: str | None = None,
    lengths: tuple[int, int] = (6, 9),
    heads: tuple[int, ...] = (2,),
    tensor: bool = False,
    odd: bool = False,
    scale: float | None = None,
) -> None:
    """Dense calls, by the band of a bias and ``heads`` (none: [B, M, K]; two: groups)."""
    b, d, dv = 2, 16, 8
    s, t = lengths
    q, k, v, dout = draw(
        (b, s, *heads, d),
        (b, t, *heads, d),
        (b, t, *heads, dv),
        (b, s, *heads, dv),
        dtype=dtype,
        device=device,
    )
    if odd:  # batch inside of the sequence, room after each row
        q, k, v = (embed(x, order=(1, 0, *range(2, x.dim())), pad={x.dim() - 1: 5}) for x in (q, k, v))
    make, options = BANDS[band] if band else (lambda: None, {})
    leaves = {"q": q, "k": k, "v": v}
    if tensor:
        (leaves["bias"],) = draw((b, *heads, s, t), dtype=dtype, device=device)
        leaves["bias"][..., 1] = -1e9 if dtype != torch.float16 else -6e4
    mask = make()
    assert mask is None or type(mask).__name__ == band

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        given: Any = mask if bias is None else bias if mask is None else mask.add_bias(bias)
        return xformers.memory_efficient_attention(q, k, v, given, 0.0, scale)

    def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        if mask is not None:
            band = mask.materialize((s, t), torch.float64, device)
            bias = band if bias is None else bias + band
        return xformers_formula(q, k, v, bias, scale)

    judged(
        attend,
        formula,
        leaves,
        dout,
        backend,
        lambda name, x: x if name == "bias" else x.movedim(1, -2),
        options={"scale": scale, **options},
    )


Q_LENGTHS, K_LENGTHS = [3, 1, 4], [5, 2, 4]
PLACES_OF_KEYS = [4, 1, 9, 13]  # of gappy keys; the last is their number


def packed_biases(device: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """{name: (bias, the same as options of varlen_attention)}."""
    blocks = xformers.BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS, device=device)
    padded = [Q_LENGTHS, 6, K_LENGTHS]
    lower = {"align": "lower_right"}
    gappy = [Q_LENGTHS, PLACES_OF_KEYS, K_LENGTHS]
    Padded, Offset = (
        xformers.BlockDiagonalPaddedKeysMask,
        xformers.BlockDiagonalCausalWithOffsetPaddedKeysMask,
    )
    Gappy, OffsetGappy = (
        xformers.BlockDiagonalGappyKeysMask,
        xformers.BlockDiagonalCausalWithOffsetGappyKeysMask,
    )
    found = [
        (blocks, {}),
        (blocks.make_causal(), {"causal": True}),
        (blocks.make_causal_from_bottomright(), {"causal": True, **lower}),
        (blocks.make_local_attention(2), {"window": (1, 0)}),
        (blocks.make_local_attention_from_bottomright(2), {"window": (1, 0), **lower}),
        (Padded.from_seqlens(*padded, device=device), {}),
        (Offset.from_seqlens(*padded, device=device), {"causal": True, **lower}),
        (
            Padded.from_seqlens(*padded, device=device).make_local_attention(2, 1),
            {"window": (2, 1), **lower},
        ),
        (
            xformers.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(*padded, 3).to(device),
            {"window": (2, 0), **lower},
        ),
        (Gappy.from_seqlens(*gappy, device=device), {}),
        (OffsetGappy.from_seqlens(*gappy, device=device), {"causal": True, **lower}),
    ]
    return {type(bias).__name__: (bias, options) for bias, options in found}


PACKED = tuple(packed_biases("cpu"))


def packed(
    backend: str,
    device: str,
    dtype: torch.dtype,
    name: str,
    groups: int | None = None,
    shared: bool = False,
    imitate: Callable[[Any], Any] = lambda bias: bias,
) -> None:
    """Packed calls; ``imitate`` makes of a bias what is given in its place."""
    bias, options = packed_biases(device)[name]
    spread = hasattr(bias.k_seqinfo, "seqlen")
    rows, keys = sum(Q_LENGTHS), bias.k_seqinfo.seqstart_py[-1]
    heads = (groups, 2) if groups else (2,)
    few = (*heads[:-1], 1) if shared else heads
    q, k, v, dout = draw(
        (1, rows, *heads, 16),
        (1, keys, *few, 16),
        (1, keys, *few, 8),
        (1, rows, *heads, 8),
        dtype=dtype,
        device=device,
    )
    used = [torch.arange(a, b) for a, b in bias.k_seqinfo.intervals()]
    places = torch.cat(used).to(device)
    offsets = xformers.BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS, device=device)

    def ours(name: str, x: Tensor) -> Tensor:
        x = x[0].flatten(1, -2)
        return x[places] if spread and name in "kv" else x

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if shared:
            k, v = (x.expand(*x.shape[:-2], 2, x.shape[-1]) for x in (k, v))
        return xformers.memory_efficient_attention(q, k, v, imitate(bias))

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return xformers_formula(q, k, v, bias.materialize((rows, keys), torch.float64, device))

    found = judged(
        attend, formula, {"q": q, "k": k, "v": v}, dout, backend, ours,
        cu_seqlens_q=offsets.q_seqinfo.seqstart, cu_seqlens_k=offsets.k_seqinfo.seqstart, options=options,
    )  # fmt: skip
    free = torch.ones(keys, dtype=torch.bool, device=device).index_fill(0, places, False)
    assert bool(free.any()) == spread
    assert found["dk"][:, free].eq(0).all() and found["dv"][:, free].eq(0).all()


# --- jvp_flash_attention --------------------------------------------------------------------------


def tangents(
    backend: str,
    device: str,
    dtype: torch.dtype,
    mask: str | None = None,
    causal: bool = False,
    length: int = 20,
    through: str = "func",
) -> None:
    """out, its tangent and the gradients of the primal, by torch.func.jvp, dual numbers or attention_jvp."""
    shape = (2, 2, length, 16)
    q, k, v, tq, tk, tv, dout = draw(*7 * [shape], dtype=dtype, device=device)
    given = {"attn_mask": None}
    inputs: dict[str, Any] = {}
    if mask == "bool":
        given["attn_mask"] = inputs["mask"] = (torch.rand(2, 1, length, length) < 0.7).to(device)
    elif mask:
        (bias,) = draw((2, 1, length, length), dtype=dtype, device=device)
        given["attn_mask"] = inputs["bias"] = bias.masked_fill((torch.rand(bias.shape) < 0.3).to(device), float(mask))
        inputs["bias_grad"] = False
    given["causal"] = causal
    judge = Judge(
        Inputs(
            q,
            k,
            v,
            dout=dout,
            options={"causal": causal},
            tangents={"tq": tq, "tk": tk, "tv": tv},
            **inputs,
        ),
        backend not in PLAIN,
    )
    xs, ts = [x.requires_grad_() for x in (q, k, v)], (tq, tk, tv)
    found: Leaves = {}
    with flashsci.use_backend(backend, strict=True):
        if through == "func":
            out, tangent = torch.func.jvp(
                lambda q, k, v: jvp_flash_attention.attention(q, k, v, **given), tuple(xs), ts
            )
        elif through == "dual":
            with torch.autograd.forward_ad.dual_level():
                duals = map(torch.autograd.forward_ad.make_dual, xs, ts)
                dual = jvp_flash_attention.JVPAttn.fwd_dual(*duals, **given)
                out, tangent = torch.autograd.forward_ad.unpack_dual(dual)
        else:
            out, found["lse"], tangent = jvp_flash_attention.attention_jvp(*xs, *ts, **given)
        found.update(out=out, tout=tangent)
        gradients = torch.autograd.grad(out, xs, dout, retain_graph=True)
        found.update(zip(("dq", "dk", "dv"), gradients, strict=True))
        # <dout, tangent of out> = <tangents, gradients of out>, whose gradients the judge knows.
        gradients = torch.autograd.grad(tangent, xs, dout)
        found.update(zip(("gq", "gk", "gv"), gradients, strict=True))
    judge.require({n: x.detach() for n, x in found.items()})
