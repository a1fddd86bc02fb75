"""ESM-C (esm): a protein language model. As it is: packed where flash_attn is installed and the dtype has 16
bits, else a padded batch through SDPA with a mask of pairs. flashsci takes flash_attn's place, in any dtype."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tools.bench.cases import protein_lengths
from tools.models.served import varlen_attention
from tools.models.step import Results, Step, Way, drawn, loss, replaced

logging.getLogger("esm.models.esmc.kernels").setLevel(logging.ERROR)  # it lists what is not installed
from esm.layers.rotary import rotate_half  # noqa: E402
from esm.models.esmc import kernels, layers  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32)
SIZES = {
    "tiny": {"lengths": (30, 7, 18, 1), "width": 128, "heads": 2, "layers": 2},
    "check": {"lengths": (300, 57, 181, 9), "width": 960, "heads": 15, "layers": 4},
    "real": {"lengths": protein_lengths(24), "width": 960, "heads": 15, "layers": 6},
}


class _Packing(NamedTuple):
    """Data that all layers of a step share: offsets and longest of the proteins, and their rotations,
    [tokens, 1, head dim] each."""

    cu_seqlens: Tensor
    longest: int
    cos: Tensor
    sin: Tensor


_packings: dict[int, _Packing] = {}  # of the step that runs, by the mask of its tokens


def _packing(rotary: layers.EsmcTritonRotaryEmbedding, real: Tensor, dtype: torch.dtype) -> _Packing:
    """The client recomputes it in every layer, and waits for the device each time."""
    found = _packings.get(id(real))
    if found is None:
        lengths = real.sum(-1, dtype=torch.int32)
        cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = int(lengths.max())
        rotary._update_cos_sin_cache(longest, device=real.device, dtype=dtype)
        tokens = torch.arange(real.shape[1], device=real.device).expand_as(real)
        positions = tokens[real]  # they start again with each protein
        cos, sin = (table[positions].repeat(1, 2)[:, None] for table in (rotary._cos_cached, rotary._sin_cached))
        found = _packings[id(real)] = _Packing(cu_seqlens, longest, cos, sin)
    return found


def _attention(
    self: layers.EsmcFlashMultiHeadAttention,
    x: Tensor,
    seq_id: Tensor,
    output_attentions: bool = False,
) -> tuple[Tensor, None]:
    """EsmcFlashMultiHeadAttention.forward; its rotation in plain PyTorch, where flash_attn brings a kernel."""
    packing = _packing(self.rotary, seq_id, x.dtype)
    q, k, v = self.layernorm_qkv(x).chunk(3, dim=-1)
    q, k = self.q_ln(q).to(v.dtype), self.k_ln(k).to(v.dtype)
    q, k, v = (t.view(len(x), self.n_heads, self.d_head) for t in (q, k, v))
    q, k = (torch.addcmul(t * packing.cos, rotate_half(t), packing.sin) for t in (q, k))
    longest = {"max_seqlen_q": packing.longest, "max_seqlen_k": packing.longest}
    out = varlen_attention(q, k, v, packing.cu_seqlens, scale=self.d_head**-0.5, **longest)
    return self.out_proj(out.reshape(len(x), -1)), None


def patched():
    _packings.clear()
    return replaced((layers.EsmcFlashMultiHeadAttention, "forward", _attention))


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
            Way(packed, partial(unpadded, training), patched),
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
