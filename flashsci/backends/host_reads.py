"""The refusal of calls whose lengths or slots the host reads while a CUDA graph is captured."""

from __future__ import annotations

from torch import Tensor

from flashsci.call.torch_state import is_captured
from flashsci.errors import BackendError


def check_readable(x: Tensor, what: str = "lengths") -> None:
    """Called by the reference backend before it reads ``x`` on the host.

    Raises:
        BackendError: a CUDA graph is being captured.
    """
    if is_captured(x):
        raise BackendError(
            f"flashsci: the reference backend reads {what} on the host, which a CUDA graph capture does not allow; use "
            "backend='triton', or call outside of the capture"
        )
