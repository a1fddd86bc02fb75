"""The form in which the library takes tensors: key weights, in whole rows of 16 bytes, or slopes of ALiBi in the place of
a bias; a bias of packed sequences with neighbouring keys, and with heads of its own if it has a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.call.ops import NEED_BIAS, NEED_KEY_WEIGHT, Scalars, Tensors, bypasses_dispatcher
from flashsci.call.symbols import certainly


def bias_or_weights(tensors: Tensors) -> Tensor | None:
    """The tensor that the library takes as a bias: key weights in fp32 as [*, Hk or 1, 1, Sk], if a call has them."""
    return tensors.bias if tensors.key_weight is None else tensors.key_weight.float().unsqueeze(-2)


def _slopes(tensors: Tensors) -> Tensor:
    """Slopes of ALiBi as [*, Hq or 1, 1, 1] of the rank of q; packed: [N or 1, Hq or 1, 1, 1]."""
    slopes, q = tensors.alibi_slopes, tensors.q
    assert slopes is not None
    if q.dim() == 2:
        return slopes.reshape(1, 1)
    lead = q.dim() - 2 if tensors.cu_seqlens_q is None else 2
    missing = (None,) * (lead - slopes.dim())
    every = (*missing, ..., None, None)
    return slopes[every]


def inputs(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """The tensors in the order of the library's ops, which have no others."""
    t = tensors
    bias = bias_or_weights(t) if t.alibi_slopes is None else _slopes(t)
    if bias is not None and has_packed_bias(t) and bias.stride(-1) != 1:
        bias = bias.contiguous()
    return t.q, t.k, t.v, bias, t.mask, t.cu_seqlens_q, t.cu_seqlens_k


def last_options(tensors: Tensors, scalars: Scalars) -> tuple[Any, ...]:
    """The last arguments of an op: whether the tensors have slopes, whether the softcap bounds them or a bias, then those
    of dropout, and the starts of the blocks of a packed bias; as many as the call needs."""
    slopes = tensors.alibi_slopes is not None
    if tensors.bias_offsets is not None:
        return slopes, scalars.caps_bias, None, 0.0, tensors.bias_offsets
    if scalars.dropout_p:
        return slopes, scalars.caps_bias, tensors.dropout_seed, scalars.dropout_p
    if scalars.caps_bias:
        return slopes, True
    return (True,) if slopes else ()


#: Scores of a call up to which kernels that read a bias number by number take less time than a copy with neighbouring keys,
#: which is a launch and its Python.
MOST_IN_PLACE = 1 << 20


def is_small(tensors: Tensors) -> bool:
    """Whether a call has so few scores. False for sizes that a compiler keeps symbolic."""
    return certainly(tensors.q.shape[:-1].numel() * tensors.k.shape[-2] <= MOST_IN_PLACE)


def has_packed_bias(tensors: Tensors) -> bool:
    """Whether a call has a bias of packed sequences."""
    return tensors.bias is not None and tensors.cu_seqlens_q is not None


def with_own_heads(tensors: Tensors, need: int) -> Tensors:
    """The tensors for gradients; a bias of packed sequences that heads share becomes one of every head in fp32, because
    kernels write its gradient for every head. :func:`summed` adds these up."""
    bias, heads = tensors.bias, tensors.q.shape[0]
    if bias is None or not has_packed_bias(tensors) or not need & NEED_BIAS or bias.shape[0] == heads:
        return tensors
    return tensors._replace(bias=bias.contiguous().float().expand(heads, *bias.shape[1:]))


def summed(dbias: Tensor, bias: Tensor | None) -> Tensor:
    """The gradient of a bias from that of its copy by :func:`with_own_heads`."""
    if bias is None or dbias.dim() != bias.dim() or dbias.shape == bias.shape:
        return dbias
    return dbias.sum(0, keepdim=True).to(bias.dtype)


def options(scalars: Scalars) -> tuple[Any, ...]:
    """The options of the library's forward; its backward takes the first of them."""
    s = scalars
    window = s.window_left, s.window_right, s.lower_right
    return s.max_seqlen_q, s.max_seqlen_k, s.scale, s.softcap, *window, s.precision == "tf32"


def bias_or_weights_needed(need: int) -> int:
    """``need`` in the library's form: it treats the gradient of key weights as that of a bias."""
    return need & ~NEED_KEY_WEIGHT | (NEED_BIAS if need & NEED_KEY_WEIGHT else 0)


def whole_rows(tensors: Tensors) -> Tensors:
    """The tensors; with key weights, fp32 rows of q, k and v begin at multiples of 16 bytes, because the kernels of short
    sequences take no others."""
    if tensors.key_weight is None or tensors.q.dtype != torch.float32:
        return tensors
    q, k, v = (on_16_bytes(x) for x in (tensors.q, tensors.k, tensors.v))
    return tensors._replace(q=q, k=k, v=v)


def on_16_bytes(x: Tensor) -> Tensor:
    """x, copied if it is float32 and its rows do not begin at multiples of 16 bytes. The address of a tensor of a tracer or
    transform is not known: it is copied, too."""
    if x.dtype != torch.float32:
        return x
    steps = [s for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    aligned = bypasses_dispatcher((x,)) and x.data_ptr() % 16 == 0 and not any(s % 4 for s in steps)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
