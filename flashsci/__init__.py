"""Exact softmax attention for PyTorch, made for science: see :func:`flashsci.attention`.

Names load on first use, so that ``python -m flashsci env`` can report on a machine where torch is missing or broken.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashsci.attention import attention
    from flashsci.backward import Gradients, attention_backward
    from flashsci.dropout import dropout_mask
    from flashsci.errors import BackendError
    from flashsci.explain import explain
    from flashsci.merge import merge
    from flashsci.paged import paged_attention, write_kv_cache
    from flashsci.quantization import Quantized, quantize
    from flashsci.registry import Explanation, use_backend
    from flashsci.residual import residual_attention
    from flashsci.sdpa import sdpa
    from flashsci.varlen import varlen_attention

__version__ = "0.1.0"

_HOME = {
    "attention": "flashsci.attention",
    "attention_backward": "flashsci.backward",
    "explain": "flashsci.explain",
    "Gradients": "flashsci.backward",
    "merge": "flashsci.merge",
    "varlen_attention": "flashsci.varlen",
    "dropout_mask": "flashsci.dropout",
    "use_backend": "flashsci.registry",
    "BackendError": "flashsci.errors",
    "Explanation": "flashsci.registry",
    "sdpa": "flashsci.sdpa",
    "paged_attention": "flashsci.paged",
    "write_kv_cache": "flashsci.paged",
    "Quantized": "flashsci.quantization",
    "quantize": "flashsci.quantization",
    "residual_attention": "flashsci.residual",
}

__all__ = [
    "BackendError",
    "Explanation",
    "Gradients",
    "Quantized",
    "attention",
    "attention_backward",
    "dropout_mask",
    "explain",
    "merge",
    "paged_attention",
    "quantize",
    "residual_attention",
    "sdpa",
    "use_backend",
    "varlen_attention",
    "write_kv_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flashsci' has no attribute {name!r}")
    for public, home in _HOME.items():
        globals()[public] = getattr(importlib.import_module(home), public)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _Package(ModuleType):
    """This package. Its functions `attention`, `explain`, `merge` and `sdpa` are never replaced by the submodules of
    these names.

    The import system binds a submodule to its name in the package once it has run. Another thread that calls
    ``flashsci.attention`` at that moment would find a module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
