"""Protenix: triangle attention around starting and ending nodes, against the Triton kernel that it brings along."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tools.models.served import attention
from tools.models.step import Results, Step, drawn, loss, randomised, replaced

os.environ.setdefault("LAYERNORM_TYPE", "torch")  # its default compiles CUDA at import
from protenix.model.triangular.layers import Attention
from protenix.model.triangular.triangular import TriangleAttention

DTYPES = (torch.bfloat16, torch.float32)
SIZES = {"tiny": {"tokens": 20}, "check": {"tokens": 128}, "real": {"tokens": 384}}


def _attention(
    self: Attention,
    q_x: Tensor,
    kv_x: Tensor,
    biases: list[Tensor] | None = None,
    triangle_attention: str = "torch",
) -> Tensor:
    """Attention.forward; its first bias is a mask in numbers, 0 or -1e9. The client's kernel multiplies float32 in TF32."""
    masked, bias = biases or (None, None)
    q, k, v = self._prep_qkv(q_x, kv_x, apply_scale=False)
    precision = "tf32" if triangle_attention == "triattention" else None
    mask = None if masked is None else masked == 0
    out = attention(q, k, v, bias=bias, mask=mask, precision=precision)
    return self._wrap_up(out.transpose(-2, -3), q_x)


def patched():
    return replaced((Attention, "forward", _attention))


def build(size: str, dtype: torch.dtype, device: torch.device) -> list[Step]:
    tokens = SIZES[size]["tokens"]
    layers = [TriangleAttention(128, 32, 4, starting=starting) for starting in (True, False)]
    model = randomised(torch.nn.ModuleList(layers)).to(device, dtype)
    pair = drawn()(1, tokens, tokens, 128).to(device, dtype)
    real = torch.ones(1, tokens, device=device, dtype=dtype)
    real[:, tokens - tokens // 16 :] = 0
    mask = real[:, :, None] * real[:, None, :]
    kernels = device.type == "cuda" and dtype != torch.float64

    def step() -> Results:
        z = pair
        for layer in model:
            own = "triattention" if kernels else "torch"
            z = z + layer(z, mask=mask, triangle_attention=own)
        z = z * mask[..., None]
        loss(z).backward()
        return {"pair": z}

    about = f"triangle attention, {tokens} tokens, {len(layers)} layers, training"
    path = "its Triton kernel" if kernels else "matmul, softmax"
    return [Step.of("protenix-triangle", about, path, model, step, patched)]
