"""The kernels of the library that would compute a call: the launchers' own decisions, without a launch, for any
device.

A name is ``sm90/triangle_fwd/triangle_forward_kernel``: the folder in csrc and the kernel, in the order of the launches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.backends.cuda import layouts, library
from flashsci.call.fp8_ops import FP8Scalars, FP8Tensors
from flashsci.call.ops import Saved, Scalars, Tensors
from flashsci.call.paged_ops import PagedScalars, PagedTensors


class DescribedDevice(NamedTuple):
    """The properties of a GPU that decide what launchers do."""

    capability: int  # 90 for 9.0
    processors: int  # streaming multiprocessors
    shared_per_sm: int  # bytes of shared memory
    shared_per_block: int  # bytes of it that one block may have

    @classmethod
    def of(cls, device: torch.device) -> DescribedDevice:
        """The properties of a CUDA device of this machine."""
        found: Any = torch.cuda.get_device_properties(device)
        return cls(
            found.major * 10 + found.minor,
            found.multi_processor_count,
            found.shared_memory_per_multiprocessor,
            found.shared_memory_per_block_optin,
        )


T4 = DescribedDevice(75, 40, 64 << 10, 64 << 10)
A100 = DescribedDevice(80, 108, 164 << 10, 163 << 10)
H100 = DescribedDevice(90, 132, 228 << 10, 227 << 10)  # and H200

Kernels = tuple[str, ...]


def forward_kernels(tensors: Tensors, scalars: Scalars, device: DescribedDevice, generation: int = 0) -> Kernels | None:
    """The kernels that compute out and lse; () if there is no score; None if no kernel takes the call.

    Args:
        tensors: those given to the cuda backend; on any device, "meta" too.
        generation: 75, 80 or 90: only its kernels.

    Raises:
        RuntimeError: tensors that do not belong together, with the message of the op.
    """
    options = layouts.options(scalars)
    inputs = layouts.inputs(tensors)
    weighted = tensors.key_weight is not None
    return _asked(
        "cuda_forward_kernels", *inputs, *options, generation, weighted, *device,
        *layouts.last_options(tensors, scalars),
    )  # fmt: skip


def backward_kernels(
    dout: Tensor | None,
    dlse: Tensor | None,
    saved: Saved,
    need: int,
    device: DescribedDevice,
    generation: int = 0,
) -> Kernels | None:
    """The kernels that compute the gradients named by ``need`` (:data:`flashsci.call.ops.NEED_Q`, ...), as :func:`forward_kernels`."""
    tensors, scalars = layouts.with_own_heads(saved.tensors, need), saved.scalars
    weighted = tensors.key_weight is not None
    return _asked(
        "cuda_backward_kernels", dout, dlse, *layouts.inputs(tensors), saved.out, saved.lse, *layouts.options(scalars), scalars.deterministic,
        generation, layouts.bias_or_weights_needed(need), weighted, *device,
        *layouts.last_options(tensors, scalars),
    )  # fmt: skip


def paged_kernels(
    tensors: PagedTensors, out: Tensor, scalars: PagedScalars, device: DescribedDevice, generation: int = 0
) -> Kernels | None:
    """The kernels of a paged call; as :func:`forward_kernels`."""
    return _asked("cuda_paged_attention_kernels", *tensors, out, *scalars, generation, *device)


def fp8_kernels(tensors: FP8Tensors, scalars: FP8Scalars, device: DescribedDevice) -> Kernels | None:
    """The kernels of a call on 8-bit floats; as :func:`forward_kernels`."""
    *options, out_dtype, _, fast = scalars
    is_fp16 = out_dtype == torch.float16
    return _asked("cuda_fp8_forward_kernels", *tensors, *options, is_fp16, fast, *device)


def folders(kernels: Kernels) -> Kernels:
    """The folders of kernels, each once: ``("sm90/bwd", "sm80/dbias")``."""
    return tuple(dict.fromkeys(name.rpartition("/")[0] for name in kernels))


def _asked(op: str, *arguments: Any) -> Kernels | None:
    reason = library.load()
    if reason is not None:
        raise RuntimeError(reason)
    try:
        text: str = getattr(torch.ops.flashsci, op).default(*arguments)
    except RuntimeError as error:
        if "serves this call" in str(error):
            return None
        raise
    return tuple(text.split("\n")) if text else ()
