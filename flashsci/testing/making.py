"""The construction of the tensors of a generated case: embedded in poison, in the case's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.call.residual_ops import scores_dtype
from flashsci.testing.cases import NUMBERS, SUBNORMAL, Case, ResidualCase
from flashsci.testing.inputs import Inputs
from flashsci.testing.poison import embed


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The tensors of a case: values depend only on the case, memory around and between them holds NaN.

    q, k, v, bias and key_weight are leaves that require grad (the last two as the variant says). Masks are surrounded
    by True, offsets by huge integers: any value read outside the tensors shows in the result.
    """
    return _Maker(case, torch.device(device)).inputs()


def _least(dtype: torch.dtype) -> float:
    """The least number of a dtype, or of fp32, in which values are drawn."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


class _Maker:
    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.random = torch.Generator().manual_seed(case.seed)

    def sent(self, x: Tensor) -> Tensor:
        """x on the device, without a wait for the work there: CUDA has read pageable memory when the copy returns."""
        return x.to(self.device, non_blocking=True)

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.random)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(tuple(shape), generator=self.random)

    def inputs(self) -> Inputs:
        case, variant = self.case, self.case.variant
        dim, dim_v, packed = variant.head_dim, variant.head_dim_v, variant.varlen
        self.rows, self.keys = self.kept()
        if packed:
            tq, tk = sum(case.lens_q), sum(case.lens_k)
            shapes: tuple[tuple[int, ...], ...]
            out_shape: tuple[int, ...]
            lse_shape: tuple[int, ...]
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
        dout = case.dout_scale * self.normal(out_shape)
        dlse = case.dout_scale * self.normal(lse_shape) if variant.lse_grad else None
        q, k, v, dout, dlse = self.zeroed(q, k, v, dout, dlse)
        q, k, v = (x.requires_grad_() for x in self.projections(q, k, v))
        options: dict[str, Any] = {
            "causal": case.causal,
            "window": case.window,
            "align": case.align,
            "scale": case.scale,
            "softcap": case.softcap,
            "dropout_p": case.dropout_p,
        }
        if variant.caps_bias:
            options["softcap_at"] = "biased"
        if case.precision:
            options["precision"] = case.precision
        if packed and case.known_lengths:
            options["max_seqlen_q"] = max(case.lens_q)
            if not case.self_attention:
                options["max_seqlen_k"] = max(case.lens_k)
        gate = self.gate()
        residual = self.residual(dout, bias, q) if isinstance(case, ResidualCase) else {}
        return Inputs(
            q,
            k,
            v,
            bias=None if bias is None else bias.requires_grad_(variant.bias_grad),
            key_weight=None if weight is None else weight.requires_grad_(variant.key_weight_grad),
            alibi_slopes=self.alibi() if variant.alibi else None,
            sink=self.sink().requires_grad_() if variant.sink else None,
            pair_gate=gate if gate is None else gate.requires_grad_(),
            mask=self.mask(),
            **(residual or {"dout": self.place(dout, "dout")}),
            execution=case.execution,
            dlse=None if dlse is None else embed(self.sent(dlse)),
            cu_seqlens_q=self.offsets(case.lens_q) if packed else None,
            cu_seqlens_k=self.offsets(case.lens_k) if packed and not case.self_attention else None,
            dropout_seed=torch.tensor([case.seed * 7919, case.seed % 97], device=self.device)
            if variant.dropout
            else None,
            bias_grad=variant.bias_grad,
            key_weight_grad=variant.key_weight_grad,
            alibi_grad=variant.alibi_grad,
            options=options,
            tangents=self.tangents(q, k, v, bias, weight, gate) if variant.tangents else {},
        )

    def residual(self, dout: Tensor, bias: Tensor | None, q: Tensor) -> dict[str, Any]:
        """The gradients of those results that have one. Padded pairs have none if dout has that padding, as in a loss
        that leaves them out."""
        case = self.case
        assert isinstance(case, ResidualCase)
        found: dict[str, Any] = {"residual": True, "dout": None}
        if case.given != "scores":
            found["dout"] = self.place(dout, "dout")
        if case.given != "out":
            gradient = case.dout_scale * self.normal(case.score_shape)
            if case.padding != "none":
                gradient = gradient.masked_fill(self.padded_pairs(), 0)
            found["dscores"] = self.view(gradient.to(scores_dtype(q, bias)), case.scores_view)
        return found

    def tangents(self, *tensors: Tensor | None) -> dict[str, Tensor]:
        """Tangents of q, k, v, bias, key_weight, pair_gate."""
        found = {}
        for letter, x in zip("qkvbwg", tensors, strict=True):
            if x is None or letter not in self.case.variant.tangents:
                continue
            tangent = self.normal(x.shape)
            if self.case.tangent_magnitude == "offset" and letter in "kb":
                tangent += 4
            if letter in "qkv" and self.case.padding in ("tail", "tail_masked", "scattered"):
                tangent = self.where(self.rows if letter == "q" else self.keys, tangent)
            if letter == "b":
                kind = "contiguous" if self.case.bias_view == "expanded" else self.case.bias_view
                found["tbias"] = self.view(tangent.to(x.dtype), kind)
            elif letter == "g":
                kind = "contiguous" if self.case.gate_view == "expanded" else self.case.gate_view
                found["tpair_gate"] = self.view(tangent.to(x.dtype), kind)
            elif letter == "w":
                found["tkey_weight"] = self.view(tangent.to(x.dtype), self.case.weight_view)
            else:
                found[f"t{letter}"] = self.place(tangent, letter)
        return found

    def kept(self) -> tuple[Tensor, Tensor]:
        """The rows of q and dout, and of k and v, that are not padding: bool [*lead, Sq] and [*lead, Sk]; packed:
        [Tq], [Tk]."""
        case = self.case
        scattered = "scattered" in case.padding
        if case.variant.varlen:
            blocks: list[list[Tensor]] = [[], []]
            for lens in zip(case.lens_q, case.lens_k, strict=True):
                share = self.uniform(())
                for into, n in zip(blocks, lens, strict=True):
                    tail = torch.arange(n) < (share * (n + 1)).long()
                    into.append(self.uniform((n,)) < 0.7 if scattered else tail)
            rows, keys = (torch.cat([torch.ones(0, dtype=torch.bool), *x]) for x in blocks)
            return rows, (rows if case.self_attention else keys)
        lead = case.lead[max(0, len(case.lead) + 3 - case.rank) :] if case.rank > 3 else ()
        share = self.uniform((*lead, 1))
        found = []
        for n in (case.seq_q, case.seq_k):
            tail = torch.arange(n) < (share * (n + 1)).long()
            found.append(self.uniform((*lead, n)) < 0.7 if scattered else tail)
        return found[0], found[1]

    def where(self, kept: Tensor, x: Tensor) -> Tensor:
        """x [*, H, S, D] (packed: [T, H, D]) with zeros in the rows that are padding."""
        if self.case.variant.varlen:
            return x * kept[:, None, None]
        return x * (kept if self.case.rank == 2 else kept.unsqueeze(-2))[..., None]

    def zeroed(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The tensors with the zero rows of ``case.padding``. If only dout has them, dlse has none."""
        if self.case.padding == "none":
            return q, k, v, dout, dlse
        dout = self.where(self.rows, dout)
        if self.case.padding.startswith("dout"):
            return q, k, v, dout, dlse
        if dlse is not None:
            packed = self.case.variant.varlen or self.case.rank == 2
            dlse = dlse * (self.rows if packed else self.rows.unsqueeze(-2))
        k, v = (self.where(self.keys, x) for x in (k, v))
        return self.where(self.rows, q), k, v, dout, dlse

    def magnitude(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        case, kind, dim = self.case, self.case.magnitude, max(1, q.shape[-1])
        scale = abs(dim**-0.5 if case.scale is None else case.scale) or 1.0
        if kind == "peaked":
            return q * 4, k * 4, v
        if kind == "low":  # every score near -150: exp underflows in fp32, row lse far below -88.7
            shift = (150 / (scale * dim)) ** 0.5
            return 0.3 * q + shift, 0.3 * k - shift, v
        if kind == "outliers":  # a few channels 30 to 100 times larger, as in large language models
            return q, self.outliers(k), self.outliers(v)
        if kind == "sharp_and_flat":  # rows near one-hot, uniform and ordinary
            pick = self.uniform((*q.shape[:-1], 1))
            return q * torch.where(pick < 0.3, 0.0, torch.where(pick < 0.6, 30.0, 1.0)), k, v
        if kind in ("rising", "falling"):  # the maximum moves at every tile, or never again
            most = (120 / (scale * dim)) ** 0.5
            return q + most, k + most * self.ramp(k, kind == "falling"), v
        if kind == "huge":  # scores of 1e7 and far more: softmax is a maximum
            size = (10.0 ** (7 + 4 * self.uniform(()).item()) / (scale * dim**0.5)) ** 0.5
            if case.variant.dtype == "float16":
                return (15000 * q).clamp(-6e4, 6e4), (15000 * k).clamp(-6e4, 6e4), v
            return size * q, size * k, v
        if kind == "vast":  # products that a tiny scale brings back to 1
            return case.vastness * q, case.vastness * k, v
        if kind == "tiny":  # float16: subnormals
            least = 1e-6 if case.variant.dtype == "float16" else 1e-12
            return q, least * k, least * v
        scaled = {"small_v": 1e-3, "large_v": 30.0}.get(kind, 1.0) * v
        return q, k, scaled + 3 if kind == "offset_v" else scaled

    def outliers(self, x: Tensor) -> Tensor:
        factors = torch.ones(x.shape[-1])
        chosen = torch.randperm(x.shape[-1], generator=self.random)[: 1 + x.shape[-1] // 32]
        spread = 0 if self.case.variant.dtype == "float16" else 70  # for gradients within float16
        factors[chosen] = 30 + spread * self.uniform(chosen.shape)
        return x * factors

    def ramp(self, k: Tensor, falling: bool) -> Tensor:
        """A ramp from 0 to 1 over the keys of each sequence, or back."""
        case = self.case
        if case.variant.varlen:
            parts = [torch.linspace(0, 1, n) for n in case.lens_k]
            ramp = torch.cat([torch.zeros(0), *parts])[:, None, None]
        else:
            ramp = torch.linspace(0, 1, case.seq_k)[:, None]
        return 1 - ramp if falling else ramp

    def projections(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """q, k, v in their layouts; those that are "joint" and have the same rows are slices of one buffer."""
        found = dict(zip("qkv", (q, k, v), strict=True))
        layouts, packed = self.case.layout_of, self.case.variant.varlen
        joint = [n for n in "qkv" if layouts[n] == "joint" and n != self.case.negated]
        tokens = 0 if packed else q.dim() - 2
        if "q" in joint and q.shape[tokens] != k.shape[tokens]:
            joint.remove("q")
        if len(joint) > 1:
            # [*, tokens, heads * dims of each], as one Linear makes them.
            turned = {n: found[n] if packed else found[n].transpose(-2, -3) for n in joint}
            dtype = self.case.variant.torch_dtype
            whole = torch.cat([x.flatten(-2) for x in turned.values()], -1).to(dtype)
            parts = embed(self.sent(whole)).split([x.shape[-2] * x.shape[-1] for x in turned.values()], -1)
            for (name, x), part in zip(turned.items(), parts, strict=True):
                view = part.unflatten(-1, x.shape[-2:])
                found[name] = (view if packed else view.transpose(-2, -3)).detach()
        return [x if n in joint and len(joint) > 1 else self.place(x, n) for n, x in found.items()]

    def place(self, x: Tensor, name: str) -> Tensor:
        """x in the inputs' dtype, in poisoned memory, in the case's layout for the tensor ``name``."""
        x = self.sent(x.to(self.case.variant.torch_dtype))
        # As in the imaginary part of a conjugate: memory holds -x, and torch knows.
        return torch._neg_view(self.laid_out(-x, name)) if name == self.case.negated else self.laid_out(x, name)

    def laid_out(self, x: Tensor, name: str) -> Tensor:
        rank = x.dim()
        layout = self.case.layout_of[name]
        heads_first = (*range(rank - 3), rank - 2, rank - 3, rank - 1) if rank > 2 else None
        if layout == "bshd" and not self.case.variant.varlen:
            return embed(x, order=heads_first)
        if layout in ("packed", "joint"):  # one of three slices of a joint projection
            order, heads = (None, 1) if self.case.variant.varlen else (heads_first, rank - 3)
            return embed(x, order=order, pad={heads: 2 * x.shape[heads]})
        if layout == "strided":
            return embed(x, pad={rank - 2: 1, rank - 1: 8})
        if layout == "shifted":  # rows that are not aligned to 16 bytes
            return embed(x, pad={rank - 1: 1}, offset=1)
        if layout == "expanded" and rank > 3:
            return embed(x[:1]).expand_as(x)
        if layout == "columns":
            return embed(x, order=(*range(rank - 2), rank - 1, rank - 2))
        if layout == "constant" and x.numel():
            return embed(x.flatten()[:1]).view(()).expand(x.shape)
        return embed(x)

    def view(self, x: Tensor, kind: str) -> Tensor:
        x = self.sent(x)
        if kind == "linear" and x.dim() > 2:  # [.., Sq, Sk, H] of a Linear over pairs, permuted
            heads = x.dim() - 3
            order = (*range(heads), x.dim() - 2, x.dim() - 1, heads)
            return embed(x, order=order, pad={heads: 3} if x.shape[heads] == 1 else None)
        if kind in ("transposed", "linear") and x.dim() > 1:
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
        bias = case.bias_scale * self.normal(case.bias_shape)
        if case.bias_holes:
            bias[self.uniform(case.bias_shape) < 0.2] = -torch.inf
            if not variant.varlen and bias.dim() > 1 and bias.numel():
                bias.select(-2, 0).fill_(-torch.inf)
        dtype = torch.float32 if variant.bias_float else variant.torch_dtype
        if case.bias_number:
            bias = bias + self.hidden(case.bias_shape) * self.number(dtype)
            bias = torch.where(bias == -torch.inf, bias, bias.clamp(min=_least(dtype)))
        return self.view(bias.to(dtype), case.bias_view)

    def number(self, dtype: torch.dtype) -> float:
        """The number that marks a hidden key in a bias of this dtype."""
        name, least = self.case.bias_number, _least(dtype)
        if name not in NUMBERS:
            raise ValueError(f"bias_number must be one of {NUMBERS} or '', got {name!r}")
        value = {"float32_min": torch.finfo(torch.float32).min, "dtype_min": least}.get(name)
        return max(float(name) if value is None else value, least)

    def hidden(self, shape: tuple[int, ...]) -> Tensor:
        """The places of that number in a bias of this shape: bool."""
        case, place = self.case, self.case.bias_number_at
        cut = self.uniform(()).item()
        if place == "scattered":
            return self.uniform(shape) < 0.3
        if not case.variant.varlen:
            if place == "rows":
                return (self.uniform((*shape[:-1], 1)) < 0.3).expand(shape)
            if place == "padding":
                return self.fitted(self.padded_pairs(), shape)
            position = torch.arange(shape[-1])
            return self.of_keys(place, cut, position, shape[-1]).expand(shape)
        by_pair = len(shape) == 2 and case.variant.bias == "pair"
        columns = [torch.zeros(0, dtype=torch.bool)]
        rows, keys = self.rows.split(list(case.lens_q)), self.keys.split(list(case.lens_k))
        for kept_rows, kept_keys in zip(rows, keys, strict=True):
            size = len(kept_rows), len(kept_keys)
            if place == "padding":
                part = ~kept_keys | ~kept_rows[:, None] if by_pair else ~kept_keys
            elif place == "rows":
                part = self.uniform((size[0], 1) if by_pair else (1,)) < 0.3
            else:
                part = self.of_keys(place, cut, torch.arange(size[1]), size[1])
            columns.append(part.expand(size if by_pair else size[1:]).flatten())
        return torch.cat(columns).expand(shape)

    def of_keys(self, place: str, cut: float, position: Tensor, count: int) -> Tensor:
        """The last or first keys of a sequence, never all."""
        seen = 1 + int(cut * max(0, count - 1))
        return position >= seen if place == "last" else position < count - seen

    def padded_pairs(self) -> Tensor:
        """Bool, broadcastable to the scores of a dense call: keys that are padding, and all keys of padded rows."""
        hidden = ~self.keys[..., None, :] | ~self.rows[..., None]
        return hidden if self.case.rank == 2 else hidden.unsqueeze(-3)

    def fitted(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """x, broadcastable to the scores, in a shape that broadcasts to them: true if true for any element."""
        full = x.expand(self.case.score_shape)
        if len(shape) < full.dim():
            full = full.flatten(0, full.dim() - len(shape) - 1).any(0)
        for dim, n in enumerate(shape):
            if n == 1 and full.shape[dim] != 1:
                full = full.any(dim, keepdim=True)
        return full

    def key_weight(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Key weights between 0.05 and 1, or exactly 0.

        None is 0 if its key could have a score so far above those of the other keys, for example of keys masked by a
        number, that the weight's gradient would be infinite in its dtype.
        """
        case = self.case
        if case.weight_shape is None:
            return None
        weight = 0.05 + 0.95 * self.uniform(case.weight_shape)
        dim = q.shape[-1]
        some = (x.reshape(-1, dim)[:512] for x in (q, k))
        products = next(some) @ next(some).T * (dim**-0.5 if case.scale is None else case.scale)
        spread = (products.max() - products.min()).item() if products.numel() else 0.0
        half = case.variant.key_weight == "inputs" and case.variant.dtype == "float16"
        near = spread < (4 if half else 40) and not case.bias_number and case.bias_scale == 1
        if case.weight_zeros != "none" and near:
            hidden = self.uniform(case.weight_shape) < 0.25
            small = torch.tensor(SUBNORMAL if case.weight_zeros == "subnormal" else (0.0,))
            weight[hidden] = small[torch.arange(weight.numel()) % len(small)].view_as(weight)[hidden]
        if case.weight_zeros == "rows" and weight.dim() > 1 and weight.numel():
            weight[0] = 0
        if case.variant.key_weight == "inputs":
            weight = weight.to(case.variant.torch_dtype)
        return self.view(weight, case.weight_view)

    def alibi(self) -> Tensor:
        """Slopes from 2^-8 to 1, as in models with any number of heads, for the whole batch or for each member."""
        case = self.case
        packed = case.variant.varlen
        lead = (len(case.lens_q),) if packed else case.shape(1, 1, 1)[:-3]
        heads = 1 if case.rank == 2 else case.heads_q
        shape = tuple(n if self.uniform(()) < 0.6 else 1 for n in lead)
        slopes = 2 ** (-8 * self.uniform((heads,) if self.uniform(()) < 0.5 else (*shape, heads)))
        turned = (*range(slopes.dim() - 2), slopes.dim() - 1, slopes.dim() - 2)
        return embed(self.sent(slopes), order=turned if slopes.dim() > 1 else None)

    def sink(self) -> Tensor:
        """Sinks as large as scores; sometimes the first head has none."""
        sink = 2 * self.normal((1 if self.case.rank == 2 else self.case.heads_q,))
        if self.uniform(()) < 0.25:
            sink[0] = -torch.inf
        half = self.case.variant.sink == "inputs"
        return embed(self.sent(sink.to(self.case.variant.torch_dtype if half else torch.float32)))

    def gate(self) -> Tensor | None:
        """A factor of P for each pair: of either sign, some of them zero."""
        shape = self.case.gate_shape
        if shape is None:
            return None
        gate = self.normal(shape).masked_fill(self.uniform(shape) < 0.1, 0.0)
        half = self.case.variant.gate == "inputs"
        return self.view(gate.to(self.case.variant.torch_dtype if half else torch.float32), self.case.gate_view)

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
        if self.case.padding == "tail_masked":
            hidden = ~self.keys[..., None, :]
            mask &= ~self.fitted(hidden if self.case.rank == 2 else hidden.unsqueeze(-3), shape)
        return self.view(mask, self.case.mask_view)

    def offsets(self, lens: Sequence[int]) -> Tensor:
        return embed(self.sent(torch.tensor([0, *lens]).cumsum(0).to(torch.int32)))
