"""The dense problems in fp64 that a call consists of: the call itself, or its packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashsci.testing.inputs import Inputs


@dataclass
class Block:
    """One dense attention problem in fp64: the whole call, or one packed sequence.

    q [*, Hq, Sq, D], k [*, Hk, Sk, D], v [*, Hk, Sk, Dv], dout as out, dlse [*, Hq, Sq]; bias, visible and keep
    (dropout, already divided by 1 - p) broadcast to the scores [*, Hq, Sq, Sk].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    dlse: Tensor | None
    bias: Tensor | None
    key_weight: Tensor | None  # [*, Hk or 1, Sk or 1]
    alibi: Tensor | None  # -slope |i + shift - j|, [*, Hq, Sq, Sk]
    sink: Tensor | None  # [Hq, 1, 1]
    visible: Tensor
    keep: Tensor
    scale: float
    softcap: float | None
    place: dict[str, Any]  # tensor name -> the view of a whole result's slice in this block's shape
    tangents: dict[str, Tensor]  # "tq", "tk", "tv", "tbias" in the shapes of q, k, v, bias
    residual: bool = False  # scores are a result
    dscores: Tensor | None = None  # their gradient, [*, Hq, Sq, Sk]

    def slot(self, name: str, whole: Tensor) -> Tensor:
        """This block's part of a result, a view of it."""
        return self.place[name](whole)


def _ahead(seq_q: int, seq_k: int, options: dict[str, Any], device: torch.device) -> Tensor:
    """j - i - shift, [Sq, Sk]."""
    shift = seq_k - seq_q if options.get("align") == "lower_right" else 0
    queries = torch.arange(seq_q, device=device)[:, None] + shift
    return torch.arange(seq_k, device=device)[None, :] - queries


def visible_pairs(seq_q: int, seq_k: int, options: dict[str, Any], device: torch.device) -> Tensor:
    """Bool [Sq, Sk] of causal, window and align."""
    left, right = options.get("window") or (None, None)
    if options.get("causal"):
        right = 0 if right is None else min(right, 0)
    ahead = _ahead(seq_q, seq_k, options, device)
    low = float("-inf") if left is None else -left
    return (ahead >= low) & (ahead <= (float("inf") if right is None else right))


# The shapes of the tensors of the second order.
_OWN = ("q", "k", "v", "bias", "key_weight", "sink")
_LIKE = {
    **{f"g{name}": f"d{name}" for name in _OWN},
    **{f"t{name}": f"d{name}" for name in _OWN[:-1]},
    "gdout": "out",
    "gdlse": "lse",
    "tout": "out",
    "tlse": "lse",
}


def _places(first: dict[str, Any]) -> dict[str, Any]:
    return first | {name: first[like] for name, like in _LIKE.items()}


def blocks(inputs: Inputs) -> Iterator[Block]:
    """The dense problems of a call in fp64."""
    from flashsci import dropout_mask

    options = inputs.options
    p = options.get("dropout_p", 0.0)
    scale = options.get("scale")
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    softcap = options.get("softcap")
    softcap = None if softcap is not None and softcap >= 2.0**100 * abs(scale) else softcap

    def keep(shape: tuple[int, ...], index: int) -> Tensor:
        if not p:
            return inputs.q.new_ones(())
        assert inputs.dropout_seed is not None
        return dropout_mask(inputs.dropout_seed, p, shape, batch_offset=index).double() / (1 - p)

    if inputs.cu_seqlens_q is None:
        heads = (lambda x: x[None]) if inputs.q.dim() == 2 else (lambda x: x)
        q, k, v = heads(inputs.q), heads(inputs.k), heads(inputs.v)
        shape = (*q.shape[:-1], k.shape[-2])
        full = lambda x: x.reshape((1,) * (len(shape) - x.dim()) + x.shape)  # noqa: E731
        by_key = lambda x: x.reshape((1,) * (len(shape) - 1 - x.dim()) + x.shape)  # noqa: E731
        visible = visible_pairs(shape[-2], shape[-1], options, q.device)
        alibi = inputs.alibi_slopes
        if alibi is not None:
            away = _ahead(shape[-2], shape[-1], options, q.device).abs()
            alibi = (-alibi[..., None, None] * away).expand(shape)
        visible = visible if inputs.mask is None else visible & full(inputs.mask)
        place = _places(
            dict.fromkeys(("out", "lse", "scores", "dq", "dk", "dv"), heads)
            | {"dbias": full, "dkey_weight": by_key, "dsink": lambda x: x}
        )
        yield Block(
            q,
            k,
            v,
            None if inputs.dout is None else heads(inputs.dout),
            None if inputs.dlse is None else heads(inputs.dlse),
            None if inputs.bias is None else full(inputs.bias),
            None if inputs.key_weight is None else by_key(inputs.key_weight),
            alibi,
            None if inputs.sink is None else inputs.sink[:, None, None],
            visible,
            keep(shape, 0),
            scale,
            softcap,
            place,
            {name: place[name](x) for name, x in inputs.tangents.items()},
            inputs.residual,
            None if inputs.dscores is None else heads(inputs.dscores),
        )
        return
    starts_q = inputs.cu_seqlens_q.tolist()
    starts_k = starts_q if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k.tolist()
    per_key = inputs.bias is not None and (inputs.bias.dim() == 3 or inputs.bias.shape[1] == starts_k[-1])
    offset = 0
    for n in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        size = rows.stop - rows.start, keys.stop - keys.start
        pairs = slice(offset, offset := offset + size[0] * size[1])

        def rows_of(x: Tensor, rows: slice = rows) -> Tensor:
            return x[rows].transpose(0, 1)

        def keys_of(x: Tensor, keys: slice = keys) -> Tensor:
            return x[keys].transpose(0, 1)

        def bias_of(x: Tensor, keys: slice = keys, pairs: slice = pairs, size: tuple[int, int] = size) -> Tensor:
            return x.view(len(x), 1, -1)[..., keys] if per_key else x[:, pairs].unflatten(-1, size)

        def weight_of(x: Tensor, keys: slice = keys) -> Tensor:
            return (x if x.dim() == 2 else x[None])[:, keys]

        def lse_of(x: Tensor, rows: slice = rows) -> Tensor:
            return x[:, rows]

        place = _places(
            {
                "out": rows_of,
                "lse": lse_of,
                "dq": rows_of,
                "dk": keys_of,
                "dv": keys_of,
                "dbias": bias_of,
                "dkey_weight": weight_of,
                "dsink": lambda x: x,
            }
        )
        alibi = inputs.alibi_slopes
        if alibi is not None:
            slopes = alibi.expand(len(starts_q) - 1, alibi.shape[-1])[n]
            alibi = -slopes[:, None, None] * _ahead(*size, options, inputs.q.device).abs()
        yield Block(
            rows_of(inputs.q),
            keys_of(inputs.k),
            keys_of(inputs.v),
            None if inputs.dout is None else rows_of(inputs.dout),
            None if inputs.dlse is None else lse_of(inputs.dlse),
            None if inputs.bias is None else bias_of(inputs.bias),
            None if inputs.key_weight is None else weight_of(inputs.key_weight),
            alibi,
            None if inputs.sink is None else inputs.sink[:, None, None],
            visible_pairs(*size, options, inputs.q.device),
            keep((inputs.q.shape[1], *size), n),
            scale,
            softcap,
            place,
            {name: place[name](x) for name, x in inputs.tangents.items()},
        )
