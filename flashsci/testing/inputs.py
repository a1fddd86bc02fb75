"""The tensors of one attention call, and how a generated case becomes them: embedded in poison, in the layout that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flashsci.testing.cases import Case
from flashsci.testing.poison import embed


@dataclass
class Inputs:
    """The tensors and options of one attention call, with the cotangents of its backward.

    Dense: q [..., Hq, Sq, D], k [..., Hk, Sk, D], v [..., Hk, Sk, Dv], as :func:`flashsci.attention`. Packed, when
    ``cu_seqlens_q`` is given: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv], as :func:`flashsci.varlen_attention`.
    ``dout`` has out's shape and ``dlse`` that of lse; None means zero. ``tangents`` by name ("tq", "tk", "tv", "tbias", "tkey_weight"), in the
    shapes of what they belong to, ask for the second order: absent means zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dropout_seed: Tensor | None = None
    key_weight: Tensor | None = None
    bias_grad: bool = True
    key_weight_grad: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    tangents: dict[str, Tensor] = field(default_factory=dict)

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    def to(self, dtype: torch.dtype | None) -> Inputs:
        """Every floating-point tensor contiguous and as ``dtype`` (None: as it is); masks, seeds and
        offsets untouched."""

        def cast(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().to(dtype or x.dtype).contiguous()

        return replace(
            self,
            q=cast(self.q),
            k=cast(self.k),
            v=cast(self.v),
            bias=cast(self.bias),
            key_weight=cast(self.key_weight),
            dout=cast(self.dout),
            dlse=cast(self.dlse),
            tangents={
                n: x.detach().to(dtype or x.dtype).contiguous() for n, x in self.tangents.items()
            },
        )


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The tensors of a case: values depend on the case alone, memory around and between them holds NaN.

    q, k, v, bias and key_weight are leaves that require grad (the last two as the variant says). Masks are surrounded by True, offsets by
    huge integers: whatever is read outside the tensors shows in the result.
    """
    return _Maker(case, torch.device(device)).inputs()


class _Maker:
    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.random = torch.Generator().manual_seed(case.seed)

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.random)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(tuple(shape), generator=self.random)

    def inputs(self) -> Inputs:
        case, variant = self.case, self.case.variant
        dim, dim_v, packed = variant.head_dim, variant.head_dim_v, variant.varlen
        if packed:
            tq, tk = sum(case.lens_q), sum(case.lens_k)
            shapes = (tq, case.heads_q, dim), (tk, case.heads_k, dim), (tk, case.heads_k, dim_v)
            out_shape, lse_shape = (tq, case.heads_q, dim_v), (case.heads_q, tq)
        else:
            shapes = (
                case.shape(case.heads_q, case.seq_q, dim),
                case.shape(case.heads_k, case.seq_k, dim),
                case.shape(case.heads_k, case.seq_k, dim_v),
            )
            out_shape = case.shape(case.heads_q, case.seq_q, dim_v)
            lse_shape = out_shape[:-1]
        q, k, v = (self.normal(s) for s in shapes)
        q, k, v = self.magnitude(q, k, v)
        bias, weight = self.bias(), self.key_weight(q, k)
        dout, dlse = self.normal(out_shape), self.normal(lse_shape) if variant.lse_grad else None
        leaves = [self.place(x).requires_grad_() for x in (q, k, v)]
        options: dict[str, Any] = {
            "causal": case.causal,
            "window": case.window,
            "align": case.align,
            "scale": case.scale,
            "softcap": case.softcap,
            "dropout_p": case.dropout_p,
        }
        if case.precision:
            options["precision"] = case.precision
        if packed and case.known_lengths:
            options["max_seqlen_q"] = max(case.lens_q)
            if not case.self_attention:
                options["max_seqlen_k"] = max(case.lens_k)
        return Inputs(
            *leaves,
            bias=None if bias is None else bias.requires_grad_(variant.bias_grad),
            key_weight=None if weight is None else weight.requires_grad_(variant.key_weight_grad),
            mask=self.mask(),
            dout=self.place(dout),
            dlse=None if dlse is None else embed(dlse.to(self.device)),
            cu_seqlens_q=self.offsets(case.lens_q) if packed else None,
            cu_seqlens_k=self.offsets(case.lens_k) if packed and not case.self_attention else None,
            dropout_seed=torch.tensor([case.seed * 7919, case.seed % 97], device=self.device)
            if variant.dropout
            else None,
            bias_grad=variant.bias_grad,
            key_weight_grad=variant.key_weight_grad,
            options=options,
            tangents=self.tangents(*leaves, bias, weight) if variant.tangents else {},
        )

    def tangents(self, *tensors: Tensor | None) -> dict[str, Tensor]:
        """Of q, k, v, bias, key_weight."""
        found = {}
        for letter, x in zip("qkvbw", tensors, strict=True):
            if x is None or letter not in self.case.variant.tangents:
                continue
            tangent = self.normal(x.shape)
            if self.case.tangent_magnitude == "offset" and letter in "kb":
                tangent += 4
            if letter == "b":
                kind = "contiguous" if self.case.bias_view == "expanded" else self.case.bias_view
                found["tbias"] = self.view(tangent.to(x.dtype), kind)
            elif letter == "w":
                found["tkey_weight"] = self.view(tangent.to(x.dtype), self.case.weight_view)
            else:
                found[f"t{letter}"] = self.place(tangent)
        return found

    def magnitude(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kind, dim = self.case.magnitude, max(1, q.shape[-1])
        if kind == "peaked":
            return q * 4, k * 4, v
        if kind == "low":  # every score near -150: exp underflows in fp32, row lse far below -88.7
            scale = self.case.scale if self.case.scale is not None else dim**-0.5
            shift = (150 / (scale * dim)) ** 0.5
            return 0.3 * q + shift, 0.3 * k - shift, v
        scaled = {"small_v": 1e-3, "large_v": 30.0}.get(kind, 1.0) * v
        return q, k, scaled + 3 if kind == "offset_v" else scaled

    def place(self, x: Tensor) -> Tensor:
        """x in the inputs' dtype, laid out in poisoned memory as the case says."""
        x, rank = x.to(self.case.variant.torch_dtype).to(self.device), x.dim()
        layout = self.case.layout
        heads_first = (*range(rank - 3), rank - 2, rank - 3, rank - 1) if rank > 2 else None
        if layout == "bshd":
            return embed(x, order=heads_first)
        if layout == "packed":  # one of three slices of a joint projection
            order, heads = (None, 1) if self.case.variant.varlen else (heads_first, rank - 3)
            return embed(x, order=order, pad={heads: 2 * x.shape[heads]})
        if layout == "strided":
            return embed(x, pad={rank - 2: 1, rank - 1: 8})
        if layout == "shifted":  # rows that are not aligned to 16 bytes
            return embed(x, pad={rank - 1: 1}, offset=1)
        if layout == "expanded" and rank > 3:
            return embed(x[:1]).expand_as(x)
        return embed(x)

    def view(self, x: Tensor, kind: str) -> Tensor:
        x = x.to(self.device)
        if kind == "transposed" and x.dim() > 1:
            return embed(x, order=(*range(x.dim() - 2), x.dim() - 1, x.dim() - 2))
        if kind == "padded":
            return embed(x, pad={x.dim() - 1: 5}, offset=1)
        if kind == "expanded" and not self.case.variant.varlen:
            return embed(x).expand(self.case.score_shape)
        return embed(x)

    def bias(self) -> Tensor | None:
        case, variant = self.case, self.case.variant
        if case.bias_shape is None:
            return None
        bias = self.normal(case.bias_shape)
        if case.bias_holes:
            bias[self.uniform(case.bias_shape) < 0.2] = -torch.inf
            if not variant.varlen and bias.dim() > 1 and bias.numel():
                bias.select(-2, 0).fill_(-torch.inf)
        return self.view(
            bias.float() if variant.bias_float else bias.to(variant.torch_dtype), case.bias_view
        )

    def key_weight(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Between 0.05 and 1, or exactly 0, but where a key that counts for nothing could have a score so far above
        those that count that its weight's gradient is infinite in its dtype."""
        case = self.case
        if case.weight_shape is None:
            return None
        weight = 0.05 + 0.95 * self.uniform(case.weight_shape)
        dim = q.shape[-1]
        some = (x.reshape(-1, dim)[:512] for x in (q, k))
        products = next(some) @ next(some).T * (dim**-0.5 if case.scale is None else case.scale)
        spread = (products.max() - products.min()).item() if products.numel() else 0.0
        half = case.variant.key_weight == "inputs" and case.variant.dtype == "float16"
        if case.weight_zeros != "none" and spread < (4 if half else 40):
            weight[self.uniform(case.weight_shape) < 0.25] = 0
        if case.weight_zeros == "rows" and weight.dim() > 1 and weight.numel():
            weight[0] = 0
        if case.variant.key_weight == "inputs":
            weight = weight.to(case.variant.torch_dtype)
        return self.view(weight, case.weight_view)

    def mask(self) -> Tensor | None:
        shape = self.case.mask_shape
        if shape is None:
            return None
        mask = self.uniform(shape) < 0.7
        if self.case.mask_kind == "keys":
            visible = int(self.uniform((1,)).item() * (shape[-1] + 1))
            mask = (torch.arange(shape[-1]) < visible).expand(shape).contiguous()
        elif self.case.mask_kind == "rows":
            mask &= self.uniform((*shape[:-1], 1)) < 0.7
        elif self.case.mask_kind == "none":
            mask = torch.zeros(shape, dtype=torch.bool)
        return self.view(mask, self.case.mask_view)

    def offsets(self, lens: Sequence[int]) -> Tensor:
        return embed(torch.tensor([0, *lens]).cumsum(0).to(torch.int32).to(self.device))
