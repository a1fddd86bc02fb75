"""The tensors of a case, and a lower bound of the cost of computing it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashsci.call.problem import Problem
from tools.bench.cases import BIAS_LAYERS, FIRST_HEADS, ONE_LAYER, QKV, Case

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Unsupported(Exception):
    """This candidate cannot run this case; the message says why."""


@dataclass
class Inputs:
    """The tensors of a case. Packed cases hold q, k, v as [T, H, D] with `cu_seqlens`."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    dout: Tensor
    leaves: dict[str, Tensor] = field(default_factory=dict)  # inputs of the gradients, by name

    def detached(self) -> Inputs:
        """The same tensors for a forward alone: nothing requires a gradient."""
        names = ("q", "k", "v", "bias")
        tensors = {n: t.detach() for n in names if (t := getattr(self, n)) is not None}
        return replace(self, **tensors, leaves={})


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Random inputs of a case, the same for everyone; leaves require gradients if the case has
    any."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def randn(shape, dtype=dtype):
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    if case.lens:
        total = sum(case.lens)
        batch, lengths = (), (total, total)
        ends = torch.tensor((0, *case.lens)).cumsum(0)
        cu_seqlens = ends.to(device=device, dtype=torch.int32)
    else:
        cu_seqlens = None
        batch, lengths = case.batch, (case.Sq, case.Sk)

    def laid_out(heads: int, s: int, d: int) -> Tensor:
        """[..., H, S, D], or packed [T, H, D], in the memory order of this layout."""
        if case.layout is None and not case.lens:
            return randn((*batch, heads, s, d))
        held = case.H if case.layout == FIRST_HEADS else heads
        x = randn((*batch, s, held, d))[..., :heads, :]
        return x if case.lens else x.transpose(-3, -2)

    if case.layout == QKV:
        q, k, v = randn((*batch, lengths[0], 3, case.H, case.D)).unbind(-3)
        if not case.lens:
            q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    else:
        q = laid_out(case.H, lengths[0], case.D)
        k = laid_out(case.Hk, lengths[1], case.D)
        v = laid_out(case.Hk, lengths[1], case.Dv)
    bias = mask = None
    if case.bias == "ragged":
        bias = randn((case.H, sum(s * s for s in case.lens)), DTYPES[case.bias_dtype])
    elif case.bias is not None:
        *outer, heads, sq, sk = case.bias
        layers = BIAS_LAYERS if case.bias_layout == ONE_LAYER else 1
        shape = (*outer, sq, sk, layers, heads) if case.bias_layout else case.bias
        bias = randn(shape).to(DTYPES[case.bias_dtype])  # SDPA must round it to q's dtype
        if case.bias_layout:
            bias = bias[..., 0, :].movedim(-1, -3)
    if case.mask is not None:
        # Padding, as in practice: the first keys of every row are real, the rest are not.
        real = torch.randint(case.Sk // 2, case.Sk + 1, (*case.mask[:-1], 1), device=device, generator=generator)
        mask = torch.arange(case.Sk, device=device) < real
    dout = laid_out(case.H, lengths[0], case.Dv)
    inputs = Inputs(case, q, k, v, bias, mask, cu_seqlens, dout)
    if case.order > 0:
        inputs.leaves = {"q": q, "k": k, "v": v}
        if bias is not None and case.bias_grad:
            inputs.leaves["bias"] = bias
        for leaf in inputs.leaves.values():
            leaf.requires_grad_()
    return inputs


def problems(case: Case, device: torch.device) -> list[tuple[Problem, int]]:
    """The case as `Problem`s with multiplicities (packed: one for each length), to count FLOPs."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    left, right = case.window or (-1, -1)
    common = {
        "device_type": device.type,
        "capability": capability,
        "dtype": DTYPES[case.dtype],
        "heads_q": case.H,
        "heads_k": case.Hk,
        "head_dim": case.D,
        "head_dim_v": case.Dv,
        "window_left": left,
        "window_right": 0 if case.causal else right,
        "bias_dtype": DTYPES[case.bias_dtype] if case.bias else None,
        "bias_grad": case.bias_grad,
        "mask": case.mask is not None,
    }
    if not case.lens:
        bias = case.bias if isinstance(case.bias, tuple) else None
        return [(Problem(batch=case.batch, seq_q=case.Sq, seq_k=case.Sk, bias_shape=bias, **common), 1)]
    return [
        (
            Problem(
                batch=(1,),
                seq_q=s,
                seq_k=s,
                bias_shape=(case.H, s, s) if case.bias == "ragged" else None,
                **common,
            ),
            case.lens.count(s),
        )
        for s in sorted(set(case.lens))
    ]


def flops(case: Case, device: torch.device, order: int) -> int:
    return sum(n * problem.flops(order) for problem, n in problems(case, device))


def bytes_moved(case: Case, device: torch.device, order: int) -> int:
    return sum(n * problem.bytes(order) for problem, n in problems(case, device))
