"""Swin-T (transformers): windows of 7 x 7 with a learnt bias of relative positions, every second time shifted,
with a mask of -100 between parts of the image that do not belong together."""

from __future__ import annotations

import torch
from transformers import SwinConfig, SwinModel

from tools.models.step import Step, counted, drawn, master, randomised
from tools.models.transformers_attention import of_images

DTYPES = (torch.bfloat16, torch.float32)
SIZES = {
    "tiny": {"batch": 1, "image": 56, "width": 64, "depths": (2,), "heads": (2,)},
    "check": {"batch": 2, "image": 224, "width": 96, "depths": (2, 2), "heads": (3, 6)},
    "real": {
        "batch": 64,
        "image": 224,
        "width": 96,
        "depths": (2, 2, 6, 2),
        "heads": (3, 6, 12, 24),
    },
}


def build(size: str, dtype: torch.dtype, device: torch.device) -> list[Step]:
    n = SIZES[size]
    config = SwinConfig(
        image_size=n["image"],
        embed_dim=n["width"],
        depths=list(n["depths"]),
        num_heads=list(n["heads"]),
        drop_path_rate=0.0,
        attn_implementation="sdpa",
    )
    model = randomised(SwinModel(config, add_pooling_layer=False)).to(device, master(dtype))
    images = drawn()(n["batch"], 3, n["image"], n["image"]).to(device, master(dtype))

    about = f"{counted(n['batch'], 'image')} of {n['image']} x {n['image']}, {sum(n['depths'])} layers"
    return of_images("swin", about, model, images, dtype)
