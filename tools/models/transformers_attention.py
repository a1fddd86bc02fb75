"""flashsci as an attention function of transformers, for the models here: encoders, with or without a bias."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tools.models.served import attention
from tools.models.step import Results, Step, loss, mixed, replaced

NAME = "fsci-benchmark"  # transformers treats a name with "flash" in it as flash_attn's


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    mask = attention_mask
    kind = "mask" if mask is not None and mask.dtype == torch.bool else "bias"
    out = attention(query, key, value, scale=scaling, dropout_p=dropout, **{kind: mask})
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def patched(model: PreTrainedModel):
    """Inside, this model calls flashsci."""
    return replaced((model.config, "_attn_implementation", NAME))


def of_images(name: str, about: str, model: PreTrainedModel, images: Tensor, dtype: torch.dtype) -> list[Step]:
    """A training step and inference of a model of images, with tokens as the result."""

    def step(training: bool) -> Results:
        model.train(training)
        with mixed(dtype, images.device), torch.set_grad_enabled(training):
            out = model(images).last_hidden_state
            if training:
                loss(out).backward()
        return {"tokens": out}

    kinds = ((name, "training", True), (f"{name}-inference", "inference", False))
    return [
        Step.of(id, f"{about}, {kind}", "SDPA", model, partial(step, training), partial(patched, model))
        for id, kind, training in kinds
    ]
