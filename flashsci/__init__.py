"""Exact softmax attention for PyTorch, made for science: see :func:`flashsci.attention`.

Names load on first use, so that ``python -m flashsci env`` can report on a machine where torch is missing or broken.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashsci.api.attention import attention
    from flashsci.api.backward import Gradients, attention_backward
    from flashsci.api.block_mask import BlockMask
    from flashsci.api.dropout import dropout_mask
    from flashsci.api.explain import explain
    from flashsci.api.laplacian import ForwardLaplacian, forward_laplacian
    from flashsci.api.maps import AttentionStatistics, attention_statistics, attention_weights
    from flashsci.api.merge import merge
    from flashsci.api.paged import paged_attention, write_kv_cache
    from flashsci.api.quantization import Quantized, quantize
    from flashsci.api.residual import residual_attention
    from flashsci.api.sdpa import sdpa
    from flashsci.api.tune import tune
    from flashsci.api.varlen import varlen_attention
    from flashsci.choice.backends import use_backend
    from flashsci.choice.explanation import Explanation
    from flashsci.errors import BackendError

__version__ = "0.1.0"

_HOME = {
    "attention": "flashsci.api.attention",
    "attention_backward": "flashsci.api.backward",
    "BlockMask": "flashsci.api.block_mask",
    "explain": "flashsci.api.explain",
    "ForwardLaplacian": "flashsci.api.laplacian",
    "forward_laplacian": "flashsci.api.laplacian",
    "Gradients": "flashsci.api.backward",
    "merge": "flashsci.api.merge",
    "varlen_attention": "flashsci.api.varlen",
    "dropout_mask": "flashsci.api.dropout",
    "use_backend": "flashsci.choice.backends",
    "BackendError": "flashsci.errors",
    "Explanation": "flashsci.choice.explanation",
    "sdpa": "flashsci.api.sdpa",
    "paged_attention": "flashsci.api.paged",
    "write_kv_cache": "flashsci.api.paged",
    "Quantized": "flashsci.api.quantization",
    "quantize": "flashsci.api.quantization",
    "residual_attention": "flashsci.api.residual",
    "tune": "flashsci.api.tune",
    "AttentionStatistics": "flashsci.api.maps",
    "attention_statistics": "flashsci.api.maps",
    "attention_weights": "flashsci.api.maps",
}

__all__ = [
    "AttentionStatistics",
    "BackendError",
    "BlockMask",
    "Explanation",
    "ForwardLaplacian",
    "Gradients",
    "Quantized",
    "attention",
    "attention_backward",
    "attention_statistics",
    "attention_weights",
    "dropout_mask",
    "explain",
    "forward_laplacian",
    "merge",
    "paged_attention",
    "quantize",
    "residual_attention",
    "sdpa",
    "tune",
    "use_backend",
    "varlen_attention",
    "write_kv_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flashsci' has no attribute {name!r}")
    for public, home in _HOME.items():
        globals()[public] = getattr(importlib.import_module(home), public)
    _look_at_torch()
    return globals()[name]


def _look_at_torch() -> None:
    """Warn once of a torch that is newer than the tested ones."""
    import torch

    from flashsci.versions import warn_if_newer

    warn_if_newer("torch", torch.__version__)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
