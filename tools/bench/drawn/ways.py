"""The candidates for a drawn call: backends of flashsci, each kernel of SDPA as its user would call it, plain math.

A candidate is made from the tensors of a call: tensors that a user prepares once (masks of a window, ALiBi as a bias)
are made here, and work that every call needs (merging a bias and a mask for SDPA) is in the function that is timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashsci
from flashsci.backends import reference
from flashsci.choice.backends import OWN
from flashsci.testing import Inputs
from tools.bench.drawn.work import Attend
from tools.bench.inputs import Unsupported
from tools.bench.peers import SDPA_KERNELS, only

OURS = ("auto", "cuda", OWN, "triton", "sdpa", "eager")
SDPA = tuple(f"sdpa:{name}" for name in ("flash", "efficient", "cudnn"))
#: Candidates that hold every score, and the most bytes of them.
HOLDING = ("math", "sdpa:math")
MOST_SCORES = 1 << 30
MOST_MERGED = 4 << 30  # bytes of a bias and a mask that SDPA takes as one

#: `auto` may take these, or does through its backend `sdpa`: the best of them is the measure of its regret.
CHOICES = (*OURS[1:], *SDPA)
TORCH = (*SDPA, *HOLDING)


def names_of(device: torch.device, work: str) -> tuple[str, ...]:
    """All candidates for a work on a device. Triton on a CPU is an interpreter; a forward has no gradients that are
    another backend's."""
    if device.type != "cuda":
        return ("auto", "sdpa", "eager", "sdpa:flash", *HOLDING)
    return tuple(n for n in (*OURS, *TORCH) if n != OWN or work != "forward")


def attend(name: str, x: Inputs) -> Attend:
    """The attention of a candidate on these tensors, or on others of their shapes, to be called in :func:`within`.

    Raises:
        Unsupported: it cannot express the call; the message says why.
    """
    if name in (*HOLDING, "eager") and (held := _scores(x) * x.q.element_size()) > MOST_SCORES:
        raise Unsupported(f"it holds every score: {held / 2**30:.1f} GiB of them")
    if name in OURS:
        return _ours(name)
    if x.cu_seqlens_q is not None:
        if name == "math":
            raise Unsupported("plain PyTorch has no packed sequences")
        return _sdpa_packed(x)
    return _math(x) if name == "math" else _sdpa(x)


def within(name: str) -> AbstractContextManager[object]:
    """The setting in which a candidate is called: one kernel of SDPA, which its user chooses once."""
    return only(SDPA_KERNELS[name.removeprefix("sdpa:")]) if name in (*SDPA, "sdpa:math") else nullcontext()


def given(x: Inputs) -> dict[str, Any]:
    """The keyword arguments of flashsci.attention, or of varlen_attention."""
    names = ("bias", "mask", "key_weight", "alibi_slopes", "sink", "dropout_seed", "cu_seqlens_q")
    return {**x.options, **{n: t for n in names if (t := getattr(x, n)) is not None}}


def _ours(name: str) -> Attend:
    def call(x: Inputs) -> Tensor:
        function = flashsci.attention if x.cu_seqlens_q is None else flashsci.varlen_attention
        return function(x.q, x.k, x.v, backend=name, **given(x))

    return call


def _scores(x: Inputs) -> int:
    """The number of scores that plain math holds."""
    if x.cu_seqlens_q is None:
        return math.prod(x.q.shape[:-1]) * x.k.shape[-2]
    return (len(x.cu_seqlens_q) - 1) * x.q.shape[-2] * x.options["max_seqlen_q"] ** 2


def visible(x: Inputs) -> Tensor | None:
    """Bool [Sq, Sk] of causal and window; None if they leave all."""
    left, right = x.options["window"] or (-1, -1)
    right = 0 if x.options["causal"] else right
    lower_right = x.options["align"] == "lower_right"
    return reference.visible(x.q.shape[-2], x.k.shape[-2], left, right, lower_right, x.q.device)


def slope_bias(x: Inputs) -> Tensor | None:
    """ALiBi as a bias, fp32 [1, H, Sq, Sk]."""
    if x.alibi_slopes is None:
        return None
    lower_right = x.options["align"] == "lower_right"
    distance = reference.ahead(x.q.shape[-2], x.k.shape[-2], lower_right, x.q.device).abs()
    return -x.alibi_slopes[None, :, None, None] * distance


def as_bias(x: Inputs) -> Tensor | None:
    """The constants of a call that a user of PyTorch would write as a bias: ALiBi, or the logarithm of key weights."""
    if x.key_weight is not None:
        return x.key_weight.log().unsqueeze(-2)
    return slope_bias(x)


def _math(x: Inputs) -> Attend:
    """softmax(q k^T scale + bias) v as a model's author writes it: eager, in the dtype of the inputs."""
    keep, constant = visible(x), as_bias(x)
    if x.mask is not None:
        keep = x.mask if keep is None else keep & x.mask
    hidden = None if keep is None else ~keep
    softcap, dropout = x.options["softcap"], x.options["dropout_p"]

    def call(x: Inputs) -> Tensor:
        q, k, v = x.q, x.k, x.v
        group = q.shape[-3] // k.shape[-3]
        if group > 1:
            k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        for bias in (x.bias, constant):
            if bias is not None:
                scores = scores + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        if x.sink is not None:
            column = x.sink[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
            shares = torch.cat((scores, column), -1).softmax(-1)[..., :-1].to(v.dtype)
        else:
            shares = scores.softmax(-1).to(v.dtype)
        if dropout:
            shares = torch.dropout(shares, dropout, True)
        return shares @ v

    return call


def _sdpa(x: Inputs) -> Attend:
    """SDPA, of which `within` picks the kernel. Only causal of equal lengths, without bias and mask, has a flag of its own."""
    if x.options["softcap"]:
        raise Unsupported("SDPA has no softcap")
    if x.sink is not None:
        raise Unsupported("SDPA has no sinks")
    full = (*x.q.shape[:-1], x.k.shape[-2])
    dtype = x.q.dtype
    lone = x.bias is None and x.mask is None and x.alibi_slopes is None and x.key_weight is None
    causal = x.options["causal"] and not x.options["window"] and lone and full[-1] == full[-2]
    if x.alibi_slopes is not None:
        _fits("ALiBi as a bias is", full[1:], dtype)
    keep, constant = None if causal else visible(x), as_bias(x)
    if x.mask is not None:
        keep = x.mask if keep is None else keep & x.mask
    if constant is not None:
        constant = constant.to(dtype)
        if keep is not None:
            constant = constant.masked_fill(~keep, -math.inf)
    hidden = None if keep is None or x.bias is None else ~keep
    if x.bias is not None and hidden is not None:
        _fits("bias and mask as one tensor are", torch.broadcast_shapes(x.bias.shape, hidden.shape), dtype)
    dropout, grouped = x.options["dropout_p"], x.q.shape[-3] != x.k.shape[-3]

    def call(x: Inputs) -> Tensor:
        merged = keep if constant is None else constant
        if x.bias is not None:
            merged = x.bias.to(dtype)
            if hidden is not None:
                merged = merged.masked_fill(hidden, -math.inf)
        if merged is not None:  # the kernels take stride-0 dims, but want all four of them at full size
            merged = merged.expand(full)
        return scaled_dot_product_attention(x.q, x.k, x.v, merged, dropout, is_causal=causal, enable_gqa=grouped)

    return call


def _fits(what: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_MERGED:
        raise Unsupported(f"{what} {size / 2**30:.1f} GiB")


def _sdpa_packed(x: Inputs) -> Attend:
    """SDPA on jagged nested tensors, as its users have packed sequences."""
    lacks = {"bias": x.bias, "key weights": x.key_weight, "ALiBi": x.alibi_slopes, "sinks": x.sink}
    lacks |= {n: x.options[n] or None for n in ("window", "softcap")}
    for what, value in lacks.items():
        if value is not None:
            raise Unsupported(f"SDPA on nested tensors has no {what}")
    offsets = x.cu_seqlens_q.long()
    lens = x.cu_seqlens_q.diff().tolist()
    shortest, longest = min(lens), max(lens)
    causal, dropout, grouped = x.options["causal"], x.options["dropout_p"], x.q.shape[-2] != x.k.shape[-2]

    def nested(t: Tensor) -> Tensor:
        made = torch.nested.nested_tensor_from_jagged(t.contiguous(), offsets, min_seqlen=shortest, max_seqlen=longest)
        return made.transpose(1, 2)

    def call(x: Inputs) -> Tensor:
        q, k, v = (nested(t) for t in (x.q, x.k, x.v))
        out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2).values()

    return call
