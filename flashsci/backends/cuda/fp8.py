"""The Hopper kernel on 8-bit floats (csrc/sm90/fp8): its limits, and the call of the library's op."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from flashsci.call import fp8_checks, fp8_ops
from flashsci.call.fp8_ops import FP8Scalars, FP8Tensors
from flashsci.call.problem import Problem
from flashsci.errors import BackendError

UNIT = "cuda/sm90/fp8_e4m3"
MAX_HEAD_DIM = 256
ALIGNED = 16  # bytes, and columns; TMA needs rows at multiples of it


def rejects(problem: Problem, units: Container[str], generation: int = 0) -> str | None:
    """Why a call on 8-bit floats cannot be computed; None if it can. ``units``: those of the library."""
    assert problem.capability is not None
    dims = problem.head_dim, problem.head_dim_v
    if problem.capability[0] != 9 or generation not in (0, 90):
        where = ".".join(map(str, problem.capability))
        if generation not in (0, 90):
            return f"its kernels of generation sm{generation} take no 8-bit floats, Hopper's do"
        return f"its kernel on 8-bit floats is for compute capability 9.0 and this device has {where}"
    if UNIT not in units:
        return "this build has no kernel on 8-bit floats; build with FA_ARCHS=90"
    if max(dims) > MAX_HEAD_DIM:
        return f"float8_e4m3fn inputs have head dims up to {MAX_HEAD_DIM}, got {dims[0]} and {dims[1]}"
    if any(dim % ALIGNED for dim in dims):
        return f"its kernel on 8-bit floats has head dims that are multiples of {ALIGNED}, got {dims[0]} and {dims[1]}"
    return fp8_ops.lacks(problem)


def attention(tensors: FP8Tensors, scalars: FP8Scalars) -> tuple[Tensor, Tensor]:
    """out and lse; the library must be loaded, as :func:`rejects` requires too."""
    *options, out_dtype, return_lse, fast = scalars
    fp8_checks.check_out_dtype(out_dtype)
    try:
        out, lse = torch.ops.flashsci.cuda_fp8_forward(*tensors, *options, out_dtype == torch.float16, fast)
    except RuntimeError as error:
        text = str(error).split("\n")[0]
        if "no float8_e4m3fn kernel serves this call" in text:
            raise BackendError(text) from None
        raise
    return out, lse if return_lse else lse.new_empty(0)


OP = fp8_ops.define("cuda", attention, ("CUDA",))
