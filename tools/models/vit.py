"""ViT-Base (transformers): an image of 224 x 224 as 197 tokens, 12 heads of 64 channels, no bias and no mask."""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTModel

from tools.models.step import Step, counted, drawn, master, randomised
from tools.models.transformers_attention import of_images

DTYPES = (torch.bfloat16, torch.float32)
SIZES = {
    "tiny": {"batch": 2, "image": 32, "layers": 2, "heads": 2},
    "check": {"batch": 4, "image": 224, "layers": 4, "heads": 12},
    "real": {"batch": 256, "image": 224, "layers": 12, "heads": 12},
}


def build(size: str, dtype: torch.dtype, device: torch.device) -> list[Step]:
    n = SIZES[size]
    width = 64 * n["heads"]
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=n["layers"],
        num_attention_heads=n["heads"],
        image_size=n["image"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    model = randomised(ViTModel(config, add_pooling_layer=False)).to(device, master(dtype))
    images = drawn()(n["batch"], 3, n["image"], n["image"]).to(device, master(dtype))

    about = f"{counted(n['batch'], 'image')} of {n['image']} x {n['image']}, {n['layers']} layers"
    return of_images("vit", about, model, images, dtype)
