"""The tensors and options of one attention call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Inputs:
    """The tensors and options of one attention call, with the cotangents of its backward.

    Dense: q [..., Hq, Sq, D], k [..., Hk, Sk, D], v [..., Hk, Sk, Dv], as :func:`flashsci.attention`. Packed, when
    ``cu_seqlens_q`` is given: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv], as :func:`flashsci.varlen_attention`.
    ``dout`` has out's shape and ``dlse`` that of lse; None means zero. With ``residual`` the call is one of
    :func:`flashsci.residual_attention`, and ``dscores`` is the gradient of its scores. ``tangents`` by name ("tq",
    "tk", "tv", "tbias", "tkey_weight", "tpair_gate"), in the shapes of their tensors, ask for the second order: absent means zero.
    ``twice``: with tangents, also those of out and lse along a second direction, in forward mode over forward mode.
    ``execution``: the way autograd runs the call, as in :class:`Case`.
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
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    pair_gate: Tensor | None = None
    bias_grad: bool = True
    key_weight_grad: bool = True
    alibi_grad: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tangents: dict[str, Tensor] = field(default_factory=dict)
    residual: bool = False
    dscores: Tensor | None = None
    execution: str = ""
    twice: bool = False

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def has_gradients(self) -> bool:
        return self.dout is not None or self.dscores is not None

    def forward_alone(self) -> Inputs:
        """The same without gradients."""
        return replace(self, dout=None, dlse=None, dscores=None, tangents={})

    def elsewhere(self) -> Inputs:
        """The same values in the same strides, at other addresses: copies of the memory of the tensors."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        copies: dict[str, Any] = {n: _elsewhere(x) for n, x in values if isinstance(x, Tensor)}
        return replace(self, **copies)

    def to(self, dtype: torch.dtype | None) -> Inputs:
        """Every floating-point tensor contiguous and in ``dtype`` (None: its own); masks, seeds and offsets
        unchanged."""

        def cast(x: Any) -> Any:  # a Tensor, or None if absent
            return None if x is None else x.detach().to(dtype or x.dtype).contiguous()

        return replace(
            self,
            q=cast(self.q),
            k=cast(self.k),
            v=cast(self.v),
            bias=cast(self.bias),
            key_weight=cast(self.key_weight),
            # Slopes are float32 except with float64 tensors.
            alibi_slopes=cast(self.alibi_slopes) if dtype == torch.float64 else self.alibi_slopes,
            sink=cast(self.sink),
            pair_gate=cast(self.pair_gate),
            dout=cast(self.dout),
            dlse=cast(self.dlse),
            dscores=cast(self.dscores),
            tangents={n: x.detach().to(dtype or x.dtype).contiguous() for n, x in self.tangents.items()},
        )

    def on(self, device: torch.device | str) -> Inputs:
        """Every tensor on that device."""
        given = {n: x.detach() for n, x in vars(self).items() if isinstance(x, Tensor)}
        moved: dict[str, Any] = dict(moved_to(device, given))
        moved["tangents"] = moved_to(device, {n: x.detach() for n, x in self.tangents.items()})
        return replace(self, **moved)


def _elsewhere(x: Tensor) -> Tensor:
    plain = torch._neg_view(x.detach()) if x.is_neg() else x.detach()
    copy = torch.empty(0, dtype=x.dtype, device=x.device)
    copy.set_(plain.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())
    return torch._neg_view(copy) if x.is_neg() else copy


def moved_to(device: torch.device | str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on a device, with one wait for all of them: while other processes run, each wait for a GPU is
    long."""
    moved = {n: x.to(device, non_blocking=True) for n, x in tensors.items()}
    if any(x.is_cuda for x in tensors.values()):
        torch.cuda.synchronize()
    return moved
