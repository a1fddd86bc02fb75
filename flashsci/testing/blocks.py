"""The dense problems in fp64 that a call consists of: the call itself, or its packed sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashsci.testing.inputs import Inputs
from flashsci.testing.second_tangents import second_direction


@dataclass
class Block:
    """One dense attention problem in fp64: the whole call, or one packed sequence.

    q [*, Hq, Sq, D], k [*, Hk, Sk, D], v [*, Hk, Sk, Dv], dout as out, dlse [*, Hq, Sq]; bias, visible,
    dropped (dropout, already divided by 1 - p) and gate broadcast to the scores [*, Hq, Sq, Sk].
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
    dropped: Tensor
    gate: Tensor | None
    scale: float
    softcap: float | None
    caps_bias: bool  # the softcap bounds scores with bias and ALiBi
    place: dict[str, Any]  # tensor name -> the view of a whole result's slice in this block's shape
    tangents: dict[str, Tensor]  # "tq", "tk", "tv", "tbias" in the shapes of q, k, v, bias
    residual: bool = False  # scores are a result
    dscores: Tensor | None = None  # their gradient, [*, Hq, Sq, Sk]
    by_slope: Tensor | None = None  # -|i + shift - j| where slopes of ALiBi have a gradient, [Sq, Sk]
    slopes: Tensor | None = None  # [*, Hq or 1, 1, 1]
    second: dict[str, Tensor] = field(default_factory=dict)  # tangents along a second direction
    mixed: dict[str, Tensor] = field(default_factory=dict)  # those of `tangents` along it

    @property
    def keep(self) -> Tensor:
        """The factor of P after the softmax, of any sign."""
        return self.dropped if self.gate is None else self.dropped * self.gate

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
_OWN = ("q", "k", "v", "bias", "key_weight", "sink", "pair_gate")
_LIKE = {
    **{f"g{name}": f"d{name}" for name in _OWN},
    **{f"t{name}": f"d{name}" for name in _OWN if name != "sink"},
    "gdout": "out",
    "gdlse": "lse",
    "tout": "out",
    "tlse": "lse",
    "tuout": "out",
    "tulse": "lse",
}


def _places(first: dict[str, Any]) -> dict[str, Any]:
    return first | {name: first[like] for name, like in _LIKE.items()}


def _directions(place: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """The tangents of one block along both directions, and of the first along the second; none of these without
    ``twice``."""
    second, mixed = second_direction(inputs.tangents if inputs.twice else {})
    every = {"tangents": inputs.tangents, "second": second, "mixed": mixed}
    return {which: {name: place[name](x) for name, x in given.items()} for which, given in every.items()}


def _kept(inputs: Inputs, shape: tuple[int, ...], index: int) -> Tensor:
    """The factors of dropout for the scores of one block."""
    from flashsci import dropout_mask

    p = inputs.options.get("dropout_p", 0.0)
    if not p:
        return inputs.q.new_ones(())
    assert inputs.dropout_seed is not None
    return dropout_mask(inputs.dropout_seed, p, shape, batch_offset=index).double() / (1 - p)


def _of_scores(inputs: Inputs) -> tuple[float, float | None, bool]:
    """Scale, softcap (None: it bounds nothing) and whether that bounds scores with their bias."""
    scale, softcap = inputs.options.get("scale"), inputs.options.get("softcap")
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    biased = inputs.options.get("softcap_at") == "biased"
    largest = max(abs(scale), 1.0) if biased else abs(scale)
    softcap = None if softcap is not None and softcap >= 2.0**100 * largest else softcap
    return scale, softcap, bool(softcap) and biased


def blocks(inputs: Inputs) -> Iterator[Block]:
    """The dense problems of a call in fp64."""
    options = inputs.options
    scale, softcap, caps_bias = _of_scores(inputs)
    keep = functools.partial(_kept, inputs)

    if inputs.cu_seqlens_q is None:
        heads = (lambda x: x[None]) if inputs.q.dim() == 2 else (lambda x: x)
        q, k, v = heads(inputs.q), heads(inputs.k), heads(inputs.v)
        shape = (*q.shape[:-1], k.shape[-2])
        full = lambda x: x.reshape((1,) * (len(shape) - x.dim()) + x.shape)  # noqa: E731
        by_key = lambda x: x.reshape((1,) * (len(shape) - 1 - x.dim()) + x.shape)  # noqa: E731
        visible = visible_pairs(shape[-2], shape[-1], options, q.device)
        alibi, by_slope, slopes = inputs.alibi_slopes, None, None
        if alibi is not None:
            by_slope = -_ahead(shape[-2], shape[-1], options, q.device).abs()
            slopes = full(alibi[..., None, None])
            alibi = (slopes * by_slope).expand(shape)
        visible = visible if inputs.mask is None else visible & full(inputs.mask)
        place = _places(
            dict.fromkeys(("out", "lse", "scores", "dq", "dk", "dv"), heads)
            | {
                "dbias": full,
                "dkey_weight": by_key,
                "dsink": lambda x: x,
                "dalibi_slopes": lambda x: full(x[..., None, None]),
                "dpair_gate": full,
            }
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
            None if inputs.pair_gate is None else full(inputs.pair_gate),
            scale,
            softcap,
            caps_bias,
            place,
            residual=inputs.residual,
            dscores=None if inputs.dscores is None else heads(inputs.dscores),
            by_slope=by_slope if inputs.alibi_grad else None,
            slopes=slopes,
            **_directions(place, inputs),
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

        def slopes_of(x: Tensor, n: int = n) -> Tensor:
            return (x if x.dim() == 1 else x[min(n, len(x) - 1)])[:, None, None]

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
                "dalibi_slopes": slopes_of,
                "dpair_gate": lambda x: x,  # packed calls have none
            }
        )
        alibi, by_slope, slopes = inputs.alibi_slopes, None, None
        if alibi is not None:
            by_slope = -_ahead(*size, options, inputs.q.device).abs()
            slopes = slopes_of(alibi)
            alibi = slopes * by_slope
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
            None,
            scale,
            softcap,
            caps_bias,
            place,
            by_slope=by_slope if inputs.alibi_grad else None,
            slopes=slopes,
            **_directions(place, inputs),
        )
