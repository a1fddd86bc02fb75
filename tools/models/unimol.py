"""Uni-Mol (unimol_tools): 15 layers of 64 heads of 8 channels. Every layer hands its scores, before the softmax
and with the bias, to the next as its bias, and the last ones are the pair representation."""

from __future__ import annotations

import torch
from torch import Tensor
from unimol_tools.models.transformers import SelfMultiheadAttention, TransformerEncoderWithPair

from tools.models.served import attention, residual_attention
from tools.models.step import Results, Step, drawn, loss, master, mixed, replaced

DTYPES = (torch.bfloat16, torch.float32)
SIZES = {
    "tiny": {"batch": 2, "atoms": {"unimol-64": 17}, "layers": 2},
    "check": {"batch": 4, "atoms": {"unimol-64": 61, "unimol-256": 125}, "layers": 3},
    "real": {"batch": 32, "atoms": {"unimol-64": 64, "unimol-256": 256}, "layers": 15},
}


def _attention(
    self: SelfMultiheadAttention,
    query: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    return_attn: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """SelfMultiheadAttention.forward."""
    if key_padding_mask is not None:
        raise NotImplementedError("Uni-Mol's encoder puts padding into the bias, as -inf")
    batch, s, width = query.shape
    projected = self.in_proj(query).view(batch, s, 3, self.num_heads, self.head_dim)
    q, k, v = projected.permute(2, 0, 3, 1, 4)
    bias = attn_bias.view(batch, self.num_heads, s, s)
    options = {"scale": self.scaling, "dropout_p": self.dropout if self.training else 0.0}
    if not return_attn:
        out = attention(q, k, v, bias=bias, **options)
        return self.out_proj(out.transpose(1, 2).reshape(batch, s, width))
    # Under autocast the first layer's is wider than the scores that the client adds it to.
    out, scores = residual_attention(q, k, v, bias.to(q.dtype), **options)
    out = self.out_proj(out.transpose(1, 2).reshape(batch, s, width))
    return out, scores.view_as(attn_bias), None  # the third, P, has no reader


def patched():
    return replaced((SelfMultiheadAttention, "forward", _attention))


def build(size: str, dtype: torch.dtype, device: torch.device) -> list[Step]:
    n = SIZES[size]
    return [_step(name, n["batch"], atoms, n["layers"], dtype, device) for name, atoms in n["atoms"].items()]


def _step(name: str, batch: int, atoms: int, layers: int, dtype: torch.dtype, device: torch.device) -> Step:
    torch.manual_seed(0)
    model = TransformerEncoderWithPair(
        encoder_layers=layers,
        embed_dim=512,
        ffn_embed_dim=2048,
        attention_heads=64,
        emb_dropout=0.0,
        dropout=0.0,
        attention_dropout=0.0,
        max_seq_len=512,
    ).to(device, master(dtype))
    randn = drawn()
    embedding = randn(batch, atoms, 512).to(device, master(dtype))
    pairs = randn(batch * 64, atoms, atoms).to(device, master(dtype))
    lengths = torch.randint(atoms // 2, atoms + 1, (batch,), generator=torch.Generator().manual_seed(2))
    lengths[0] = atoms
    real = (torch.arange(atoms) < lengths[:, None]).to(device)
    # Pairs with padding: -inf minus -inf for a key, anything for a query.
    hidden = ~(real[:, :, None] & real[:, None, :])[..., None]

    def step() -> Results:
        model.train()
        bias = pairs.detach().requires_grad_()
        with mixed(dtype, device):
            # The encoder writes into its mask.
            x, _, pair, _, _ = model(embedding, attn_mask=bias.clone(), padding_mask=(~real).to(embedding.dtype))
            x, pair = x * real[..., None], pair.masked_fill(hidden, 0)
            loss(x, pair).backward()
        return {"atoms": x, "pairs": pair, "bias gradient": bias.grad}

    about = f"{batch} molecules of up to {atoms} atoms, {layers} layers, training"
    return Step.of(name, about, "bmm, softmax", model, step, patched)
