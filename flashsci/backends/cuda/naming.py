"""The kernels of a call by the names of their folders, as `flashsci.explain` shows them; no call is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flashsci.backends.cuda import decisions, layouts, library, rehearsal
from flashsci.backends.cuda.paged import refuse_layout
from flashsci.call import row_pitch
from flashsci.call.fp8_ops import FP8Scalars, FP8Tensors
from flashsci.call.ops import Saved, Scalars, Tensors, fake_forward, with_inner_keys
from flashsci.call.paged_ops import PagedScalars, PagedTensors

_Tensor = TypeVar("_Tensor", Tensor, None)


def without_memory(x: _Tensor) -> _Tensor:
    """A tensor on "meta" with the layout of this one, so that views and copies of it cost nothing."""
    return None if x is None else decisions.Described.of(x).tensor()


def _generation(name: str) -> int:
    """The generation of kernels that a backend is restricted to; 0: none."""
    return int(name.rpartition(":sm")[2]) if ":sm" in name else 0


def _is_cuda(name: str) -> bool:
    return name.partition(":")[0] == "cuda"


def _named(kernels: rehearsal.Kernels | None) -> str | None:
    """The folders of kernels; those of parts that generations share are left out."""
    folders = rehearsal.folders(kernels or ())
    return " + ".join(name for name in folders if name.startswith("sm")) or None


class Named(NamedTuple):
    """The kernels of a call and of its gradients, None if not of this library; and the backend of the gradients."""

    kernel: str | None
    gradient_kernel: str | None = None
    gradients: str | None = None


def _is_in_place(kernels: rehearsal.Kernels | None) -> bool:
    """Whether these kernels take a bias whose heads are neighbours in memory, in both passes. Others get a copy."""
    return kernels is not None and any(x.startswith("sm90/pair/") for x in kernels)


def as_read(
    tensors: Tensors, scalars: Scalars, need: int, device: torch.device, generation: int = 0
) -> tuple[Tensors, rehearsal.Kernels | None]:
    """The tensors of a call as the library's kernels read them, with the layouts of copies, and its forward kernels.

    Args:
        tensors: without memory, in the ranks that backends take.
        need: the gradients that are wanted; 0: none.
    """
    rows = layouts.whole_rows(tensors.inner_contiguous(None))
    kernels = decisions.forward(rows, scalars, generation, device)
    if _is_in_place(kernels) or (not need and decisions.reads_small_bias(rows, scalars, generation, device)):
        return rows, kernels
    rows = rows.inner_contiguous()
    of_bias, of_mask = row_pitch.ragged(rows)
    if of_bias and not need and decisions.reads_ragged_bias(rows, scalars, generation, device):
        of_bias = False
    rows = row_pitch.whole_rows(rows, with_inner_keys, with_inner_keys, (of_bias, of_mask))
    return rows, decisions.forward(rows, scalars, generation, device)


def attention(
    name: str,
    tensors: Tensors,
    scalars: Scalars,
    need: int,
    device: torch.device,
    whose: Callable[[bool], str | None],
) -> Named:
    """The kernels of a dense or packed call that backend ``name`` serves.

    Args:
        tensors: without memory, in the ranks that backends take.
        need: the gradients that are wanted; 0: none.
        device: that of the call.
        whose: the backend of the gradients, if the Hopper backward takes the strides of bias and mask, or if not.
    """
    generation, own = _generation(name), _is_cuda(name)
    if own:
        rows, kernels = as_read(tensors, scalars, need, device, generation)
    else:
        rows, kernels = row_pitch.whole_rows(layouts.whole_rows(tensors.inner_contiguous())), None
    in_place = _is_in_place(kernels)
    if not need:
        return Named(_named(kernels))
    saved = Saved(rows, *fake_forward(rows), scalars)
    chosen = name if in_place else whose(decisions.hopper_takes(saved, need, device))
    if chosen is None or not _is_cuda(chosen):
        return Named(_named(kernels), None, chosen)
    found = decisions.backward(saved, need, _generation(chosen), device)
    return Named(_named(kernels), _named(found), chosen)


def paged(
    name: str, tensors: PagedTensors, out: Tensor, scalars: PagedScalars, device: torch.device
) -> tuple[str | None, str | None]:
    """The kernels of a paged call, tensors without memory; or why no kernel takes their layout."""
    if library.load() is not None:
        return None, None
    if tensors.sink is not None:
        tensors = tensors._replace(sink=tensors.sink.float())
    with decisions.unobserved():
        described = decisions.device_of(device)
        found = rehearsal.paged_kernels(tensors, out, scalars, described, _generation(name))
    return _named(found), refuse_layout(tensors, out) if found is None else None


def fp8(tensors: FP8Tensors, scalars: FP8Scalars, device: torch.device) -> str | None:
    """The kernel of a call on 8-bit floats, tensors without memory."""
    if library.load() is not None:
        return None
    with decisions.unobserved():
        return _named(rehearsal.fp8_kernels(tensors, scalars, decisions.device_of(device)))
