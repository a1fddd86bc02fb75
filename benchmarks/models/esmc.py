"""ESM-C (esm): a protein language model. As it is: packed where flash_attn is installed and the dtype has 16
bits, else a padded batch through SDPA with a mask of pairs. flashsci takes flash_attn's place, in any dtype."""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import protein_lengths
from benchmarks.models.served import varlen_attention
from benchmarks.models.step import Results, Step, Way, drawn, loss, replaced

logging.getLogger("esm.models.esmc.kernels").setLevel(
    logging.ERROR
)  # it lists what is not installed
from esm.layers.rotary import rotate_half  # noqa: E402
from esm.models.esmc import kernels, layers  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32)
SIZES = {
    "tiny": {"lengths": (30, 7, 18, 1), "width": 128, "heads": 2, "layers": 2},
    "check": {"lengths": (300, 57, 181, 9), "width": 960, "heads": 15, "layers": 4},
    "real": {"lengths": protein_lengths(24), "width": 960, "heads": 15, "layers": 6},
}


def _attention(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float | None = None
) -> Tensor:
    """flash_attn_varlen_qkvpacked_func, as far as ESM-C calls it."""
    q, k, v = qkv.unbind(1)
    longest = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return varlen_attention(q, k, v, cu_seqlens, scale=softmax_scale, **longest)


def _rotate(
    self: layers.EsmcTritonRotaryEmbedding, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """EsmcTritonRotaryEmbedding.forward in plain PyTorch: flash_attn brings the kernel that it calls. Positions begin
    anew with each protein."""
    self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=len(qkv))
    position = torch.arange(len(qkv), device=qkv.device) - starts
    cos, sin = (
        table[position].repeat(1, 2)[:, None, None]
        for table in (self._cos_cached, self._sin_cached)
    )
    qk, v = qkv.split((2, 1), dim=1)
    return torch.cat([qk * cos + rotate_half(qk) * sin, v], dim=1)


def patched():
    return replaced(
        (layers, "flash_attn_varlen_qkvpacked_func", _attention),
        (layers.EsmcTritonRotaryEmbedding, "forward", _rotate),
    )


def build(size: str, dtype: torch.dtype, device: torch.device) -> list[Step]:
    n = SIZES[size]
    lengths, config = n["lengths"], (n["width"], n["heads"], n["layers"])

    def stack(flash: bool) -> layers.EsmcTransformerStack:
        torch.manual_seed(0)
        return layers.EsmcTransformerStack(*config, use_flash_attn=flash).to(device, dtype)

    x = drawn()(len(lengths), max(lengths), n["width"]).to(device, dtype)
    real = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).to(device)
    pairs = (real[:, :, None] == real[:, None, :]).unsqueeze(1)
    padded, packed = stack(False), stack(True)

    def plain(training: bool) -> Results:
        with torch.set_grad_enabled(training):
            return _finish(padded(x, pairs)[0][real], training)

    def unpadded(training: bool) -> Results:
        with torch.set_grad_enabled(training):
            return _finish(packed(x[real], real)[0], training)

    def through(training: bool) -> Results:
        with patched():
            return unpadded(training)

    installed = kernels.FLASH_ATTN_INSTALLED and kernels.FLASH_ATTN_ROTARY_INSTALLED
    if installed and dtype.itemsize == 2 and device.type == "cuda":
        path, model, own = "flash_attn, packed", packed, unpadded
    else:
        path, model, own = "SDPA, padded", padded, plain

    tokens = f"{len(lengths)} proteins, {sum(lengths):,} of {len(lengths) * max(lengths):,} tokens"
    return [
        Step(
            name,
            f"{tokens}, {n['layers']} layers, {kind}",
            path,
            Way(model, partial(own, training)),
            Way(packed, partial(through, training)),
        )
        for name, kind, training in (
            ("esmc", "training", True),
            ("esmc-inference", "inference", False),
        )
    ]


def _finish(out: Tensor, training: bool) -> Results:
    if training:
        loss(out).backward()
    return {"representations": out}
