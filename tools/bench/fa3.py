"""FlashAttention-3 as a peer: its kernels from a library on disk, behind plain autograd.

Any build that registers torch.ops.flash_attn_3 will do. One that needs no compiling is in the xformers wheel
(docs/develop/benchmarks.md says how to get it); it was linked against CUDA 12, whose runtime must be loaded
before it and may be stored next to it. It has no 8-bit floats; the wheel of fa3-fwd has them, under another
name and without a backward. So has vLLM's, whose schema has no defaults.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.bench.inputs import Inputs, Unsupported
from tools.bench.peers import collapsed

VARIABLE = "FLASHSCI_FA3"
RUNTIME = "libcudart.so.12"
NAMES = ("flash_attn_3", "fa3_fwd", "_vllm_fa3_C")  # of torch.ops, by build
NEUTRAL = {
    **dict.fromkeys(("window_size_left", "window_size_right"), -1),
    **dict.fromkeys(("is_causal", "has_softcap"), False),
    **dict.fromkeys(("num_splits", "sm_margin", "max_seqlen_k_new", "cp_rank"), 0),
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "cp_world_size": 1,
}


def candidate(x: Inputs) -> Callable[[], Tensor]:
    """Its forward on these inputs; gradients of q, k and v flow. Layout [B, S, H, D], by views."""
    reason = refuses(x)
    if reason is not None:
        raise Unsupported(reason)
    if x.q.device.type != "cuda":
        raise Unsupported("it runs on GPUs only")
    return call(load(os.environ.get(VARIABLE, "")), x)


def refuses(x: Inputs) -> str | None:
    """The reason why it cannot run this case, or None."""
    case = x.case
    if case.dtype not in ("bf16", "fp16"):
        return f"it has no {case.dtype}"
    if case.bias or case.mask:
        return "it has no bias and no mask"
    if case.D % 8 or case.D > 256:
        return f"its head dims are multiples of 8 up to 256, and this is {case.D}"
    if case.Dv != case.D:
        return "D != Dv is not compared (its backward pads both to the larger)"
    if (case.causal or case.window) and case.Sq != case.Sk:
        return "its masks are aligned lower right, those of the cases upper left"
    return None


@cache
def load(path: str) -> Any:
    """torch.ops.flash_attn_3, or the name of this build for it, with its kernels."""
    if not path:
        raise Unsupported(f"no library: --fa3 PATH or {VARIABLE}=PATH (docs/develop/benchmarks.md)")
    library = Path(path).resolve()
    if not library.is_file():
        raise Unsupported(f"there is no file {library}")
    for runtime in (library.with_name(RUNTIME), *_wheel_runtimes(), RUNTIME):
        try:
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
            break
        except OSError:  # the next place; some libraries need no runtime
            continue
    before = _registered()
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise Unsupported(f"{library} cannot be loaded: {error.__cause__ or error}") from error
    found = _registered()
    name = next((n for n in found if n not in before), next(iter(found), None))
    if name is None:
        raise Unsupported(f"{library} registers none of {', '.join(NAMES)} in torch.ops")
    return getattr(torch.ops, name)


def _registered() -> list[str]:
    return [name for name in NAMES if hasattr(getattr(torch.ops, name), "fwd")]


@cache
def neutral(op: Any) -> dict[str, object]:
    """Values for unwanted arguments without a default in an op's schema: None, or NEUTRAL."""
    schema = getattr(getattr(op, "default", None), "_schema", None)
    lacking = [a for a in schema.arguments if not a.has_default_value()] if schema else []
    nothing = {a.name: None for a in lacking if a.type.kind() == "OptionalType"}
    return nothing | {a.name: NEUTRAL[a.name] for a in lacking if a.name in NEUTRAL}


def _wheel_runtimes() -> list[Path]:
    """The place where the wheel nvidia-cuda-runtime-cu12 puts it."""
    found = importlib.util.find_spec("nvidia")
    places = (found.submodule_search_locations or []) if found else []
    return [Path(place) / "cuda_runtime" / "lib" / RUNTIME for place in places]


def call(ops: Any, x: Inputs) -> Callable[[], Tensor]:
    """The same with its `fwd` and `bwd` given."""
    case = x.case
    left, right = case.window or (-1, -1)
    options = {
        "softmax_scale": case.D**-0.5,
        "is_causal": case.causal and case.window is None,
        "window_size_left": left,
        "window_size_right": 0 if case.causal and case.window else right,
    }
    if x.cu_seqlens is not None:
        options |= {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}
        options |= {"max_seqlen_q": max(case.lens), "max_seqlen_k": max(case.lens)}
        return partial(_Attention.apply, ops, options, 1, x.q, x.k, x.v)
    splits = 0 if case.Sq == 1 else 1  # keys split over the GPU, as in its own decoding API

    def dense() -> Tensor:
        q, k, v = (collapsed(t, case.batch).transpose(1, 2) for t in (x.q, x.k, x.v))
        out = _Attention.apply(ops, options, splits, q, k, v)
        return out.transpose(1, 2).reshape((*x.q.shape[:-1], case.Dv))

    return dense


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ops, options, splits, q, k, v):
        out, lse, *_ = ops.fwd(q, k, v, **neutral(ops.fwd) | options | {"num_splits": splits})
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ops, ctx.options = ops, options
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        ctx.ops.bwd(dout, q, k, v, out, lse, dq, dk, dv, **ctx.options)
        return None, None, None, dq, dk, dv
