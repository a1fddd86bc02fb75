"""Boltz-2: pairformer blocks (triangle attention and attention with a pair bias), the diffusion transformer over
tokens, whose samples share a bias, and the atom transformer, in windows of 32 queries and 128 keys."""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
from boltz.model.layers.attentionv2 import AttentionPairBias
from boltz.model.layers.pairformer import PairformerModule
from boltz.model.layers.triangular_attention.primitives import Attention
from boltz.model.modules.encodersv2 import get_indexing_matrix, single_to_keys
from boltz.model.modules.transformersv2 import AtomTransformer, DiffusionTransformer
from torch import Tensor

from tools.models.served import attention
from tools.models.step import (
    Results,
    Step,
    counted,
    drawn,
    loss,
    master,
    mixed,
    randomised,
    replaced,
)

DTYPES = (torch.bfloat16, torch.float32)
SIZES = {
    "tiny": {
        "tokens": 24,
        "inference": 24,
        "atoms": 64,
        "samples": 2,
        "heads": 2,
        "blocks": 1,
        "layers": 2,
    },
    "check": {
        "tokens": 128,
        "inference": 128,
        "atoms": 512,
        "samples": 3,
        "heads": 16,
        "blocks": 1,
        "layers": 2,
    },
    "real": {
        "tokens": 384,
        "inference": 768,
        "atoms": 4608,
        "samples": 16,
        "heads": 16,
        "blocks": 2,
        "layers": 3,
    },
}


def _triangle(
    self: Attention,
    q_x: Tensor,
    kv_x: Tensor,
    tri_bias: Tensor,
    mask_bias: Tensor,
    mask: Tensor,
    use_kernels: bool = False,
) -> Tensor:
    """Attention.forward: the mask as a mask, not as -1e9; the scores of no row in memory."""
    q, k, v = self._prep_qkv(q_x, kv_x, apply_scale=False)
    out = attention(q, k, v, bias=tri_bias, mask=mask.bool())
    return self._wrap_up(out.transpose(-2, -3), q_x)


def _pair_bias(
    self: AttentionPairBias, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1
) -> Tensor:
    """AttentionPairBias.forward: diffusion samples as a dim of their own, over which the bias broadcasts."""
    samples, queries, width = s.shape

    def heads(x: Tensor) -> Tensor:
        return x.view(-1, multiplicity, x.shape[1], self.num_heads, self.head_dim).transpose(-2, -3)

    q, k, v = heads(self.proj_q(s)), heads(self.proj_k(k_in)), heads(self.proj_v(k_in))
    bias = self.proj_z(z).unsqueeze(1)  # [.., 1, H, queries, keys]
    gate = self.proj_g(s).sigmoid()
    keep = mask.view(-1, 1, 1, mask.shape[-1]).bool()
    keep = keep.unflatten(0, (-1, multiplicity)) if len(keep) == samples else keep.unsqueeze(1)
    # The client first raises all to float32 for its scores; in the kernels scores are float32 for q and k of any
    # dtype.
    out = attention(q, k, v, bias=bias, mask=keep)
    return self.proj_o(gate * out.transpose(-2, -3).reshape(samples, queries, width))


def patched():
    return replaced((Attention, "forward", _triangle), (AttentionPairBias, "forward", _pair_bias))


def build(size: str, dtype: torch.dtype, device: torch.device) -> list[Step]:
    n = SIZES[size]
    heads = n["heads"]
    width, wide = 24 * heads, 48 * heads  # for the pairformer, for the diffusion transformer
    kernels = device.type == "cuda" and importlib.util.find_spec("cuequivariance_torch") is not None
    triangles = "cuEquivariance, einsum" if kernels else "matmul, softmax; einsum"
    # float64 has no fast path.
    kernels = kernels and dtype != torch.float64

    def placed(x: Tensor) -> Tensor:
        return x.to(device, master(dtype))

    def real(*shape: int) -> Tensor:
        """1 for tokens, 0 for the padding at the end."""
        keep = torch.ones(shape)
        keep[..., shape[-1] - shape[-1] // 16 :] = 0
        return placed(keep)

    def pairformer(tokens: int, blocks: int, training: bool) -> Step:
        model = PairformerModule(width, 128, blocks, num_heads=heads, dropout=0.0, v2=True)
        model = randomised(model).to(device, master(dtype))
        randn, keep = drawn(), real(1, tokens)
        single, pair = placed(randn(1, tokens, width)), placed(randn(1, tokens, tokens, 128))
        pairs = keep[:, :, None] * keep[:, None, :]

        def step() -> Results:
            model.train(training)
            with mixed(dtype, device), torch.set_grad_enabled(training):
                s, z = model(single, pair, keep, pairs, use_kernels=kernels)
                s, z = s * keep[..., None], z * pairs[..., None]
                if training:
                    loss(s, z).backward()
            return {"single": s, "pair": z}

        kind = "training" if training else "inference"
        name = "boltz-pairformer" if training else "boltz-pairformer-inference"
        about = f"pairformer, {tokens} tokens, {counted(blocks, 'block')}, {kind}"
        return Step.of(name, about, triangles, model, step, patched)

    def diffusion() -> Step:
        tokens, samples, layers = n["tokens"], n["samples"], n["layers"]
        model = DiffusionTransformer(layers, heads, dim=wide, dim_single_cond=wide)
        model = randomised(model).to(device, master(dtype))
        randn, keep = drawn(), real(samples, tokens)
        a, s = placed(randn(samples, tokens, wide)), placed(randn(samples, tokens, wide))
        pairs = placed(randn(1, tokens, tokens, heads * layers))

        def step() -> Results:
            model.train()
            bias = pairs.detach().requires_grad_()
            with mixed(dtype, device):
                out = model(a, s, bias=bias, mask=keep, multiplicity=samples) * keep[..., None]
                loss(out).backward()
            return {"activations": out, "bias gradient": bias.grad}

        about = f"diffusion transformer, {tokens} tokens, {samples} samples"
        about += f", {counted(layers, 'layer')}, training"
        return Step.of("boltz-diffusion", about, "einsum, fp32", model, step, patched)

    def atoms() -> Step:
        count, samples, layers = n["atoms"], n["samples"], n["layers"]
        windows = count // 32
        model = AtomTransformer(32, 128, depth=layers, heads=4, dim=128, dim_single_cond=128)
        model = randomised(model).to(device, master(dtype))
        randn, keep = drawn(), real(samples, count)
        q, c = placed(randn(samples, count, 128)), placed(randn(samples, count, 128))
        pairs = placed(randn(1, windows, 32, 128, 4 * layers))
        index = placed(get_indexing_matrix(windows, 32, 128, "cpu"))

        def step() -> Results:
            model.train()
            bias = pairs.detach().requires_grad_()
            to_keys = partial(single_to_keys, indexing_matrix=index, W=32, H=128)
            with mixed(dtype, device):
                out = model(q=q, c=c, bias=bias, to_keys=to_keys, mask=keep, multiplicity=samples)
                out = out * keep[..., None]
                loss(out).backward()
            return {"activations": out, "bias gradient": bias.grad}

        about = f"atom transformer, {count:,} atoms, {samples} samples"
        about += f", {counted(layers, 'layer')}, training"
        return Step.of("boltz-atoms", about, "einsum, fp32", model, step, patched)

    return [
        pairformer(n["tokens"], n["blocks"], training=True),
        pairformer(n["inference"], 1, training=False),
        diffusion(),
        atoms(),
    ]
