"""The softmax of a row merged from pieces of its keys, in place.

L = log(e^L1 + e^L2)        O = O1 + e^(L2 - L) (O2 - O1)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the attention to more keys, ``part`` and ``part_lse``, to the sums ``out`` and ``lse``.

    The sums may be views; lse is in float32 or float64. Rows that see nothing have an lse of -inf and an out of 0, on
    either side. A 16-bit out is rounded again.
    """
    kernel = _kernel() if out.is_cuda and lse.dtype == torch.float32 else None
    if kernel is not None and kernel.launch(out, lse, part, part_lse):
        return
    both = torch.logaddexp(lse, part_lse)
    base = both.masked_fill(both == float("-inf"), 0.0)
    share = torch.exp(part_lse - base).unsqueeze(-1)
    out.copy_(torch.lerp(out.to(share.dtype), part.to(share.dtype), share))
    lse.copy_(both)


@functools.cache
def _kernel() -> Any:
    try:
        from flashsci.distributed import merge_kernel
    except ImportError:  # no Triton
        return None
    return merge_kernel
