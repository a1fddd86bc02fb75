"""Conditions on sizes that a compiler traces as symbols."""

from __future__ import annotations

from typing import Any

import torch


def certainly(condition: Any) -> bool:
    """Whether a condition on sizes or strides holds for all sizes that a compiler traces for. The answer adds no
    condition to the trace."""
    if type(condition) is bool and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))
