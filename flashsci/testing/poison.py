"""Memory that shows when it is read unwritten or out of bounds: NaN around tensors and inside fresh allocations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

GUARD = 4096  # elements before and after every embedded tensor: more than a kernel's tile row


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """The value that fills memory which must not be read: NaN, True, or an integer far out of any range."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max // 2


def embed(
    x: Tensor,
    order: Sequence[int] | None = None,
    pad: Mapping[int, int] | None = None,
    offset: int = 0,
) -> Tensor:
    """A copy of ``x`` as a view into a larger buffer of poison: same shape and values, other strides.

    Args:
        x: tensor of any shape.
        order: dims from outermost to innermost in memory; default as they are.
        pad: dim -> extra poisoned elements after it (a row stride larger than the row, a slice of a packed projection).
        offset: elements by which the start is shifted away from the buffer's alignment.

    Examples:
        >>> import torch
        >>> from flashsci.testing import embed
        >>> embed(torch.zeros(2, 3), pad={1: 5}).stride()
        (8, 1)
    """
    order = range(x.dim()) if order is None else order
    sizes = [x.shape[d] + (pad or {}).get(d, 0) for d in order]
    count = 1
    for size in sizes:
        count *= size
    buffer = torch.full((count + 2 * GUARD + offset,), poison_value(x.dtype), dtype=x.dtype, device=x.device)
    view = buffer[GUARD + offset :][:count].view(sizes)
    inverse = [list(order).index(d) for d in range(x.dim())]
    view = view.permute(inverse)
    for d in range(x.dim()):
        view = view.narrow(d, 0, x.shape[d])
    view.copy_(x)
    return view.detach()


@contextmanager
def poisoned_memory(cuda_bytes: int = 1 << 28) -> Iterator[None]:
    """While active, ``torch.empty`` and its relatives return NaN (huge integers, for integers), also inside C++ ops.

    It uses torch's own ``fill_uninitialized_memory``, which needs deterministic algorithms on: kernels called with
    ``deterministic=None`` therefore see True. On CUDA, blocks of NaN are also left in the caching allocator, for
    kernels that allocate their workspace without ``torch.empty``.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    switches: Any = torch.utils.deterministic  # its switch is a property that stubs do not have
    fill = switches.fill_uninitialized_memory
    try:
        if torch.cuda.is_available() and cuda_bytes:
            blocks = [torch.full((cuda_bytes >> shift,), torch.nan, device="cuda") for shift in (3, 7, 11, 15, 19)]
            del blocks
        torch.use_deterministic_algorithms(True, warn_only=True)
        switches.fill_uninitialized_memory = True
        yield
    finally:
        switches.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
