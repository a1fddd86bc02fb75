"""The Triton backend: every feature of the specification, on any GPU that Triton supports.

kernels/ holds one file for each idea: forward.py; backward_preprocess.py (delta), backward_queries.py (dq),
backward_keys.py (dk, dv), backward_small*.py, many_backward.py, bias_gradient.py, copy_bias.py, copy_rows.py; for the second order jvp.py,
many_jvp.py, second_jvp.py, double_backward_*.py and many_double_backward.py; for wide heads, whose scores are held in memory, wide_*.py; paged.py and paged_cache.py for paged KV
caches; fp8.py for 8-bit floats; gated.py and gated_second_order.py for a gate of pairs; mask_tiles.py for the tables of tiles of a mask;
map_rows.py, map_keys.py and map_top.py for attention maps; laplacian.py for the forward Laplacian.
They share groups.py (groups of arguments), coord.py (the place where a program works), chunks.py (tiles of rows), scores.py,
tiles.py, dropout.py and tangents.py.

plans/ decides the launches of each kind of call, launcher.py starts them, tilings.py has the tile sizes, and checks.py
the checks of the raw ops.

With TRITON_INTERPRET=1 in the environment before Triton is imported, the same kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

# Some are imported only for their definitions: ops of other calls, and kernels, which Triton interprets or not from
# here on.
from flashsci.backends.triton import checks, tilings
from flashsci.backends.triton.plans import (  # noqa: F401
    copy,
    dense,
    fp8,
    gated,
    gated_second_order,
    laplacian,
    many_backward,
    many_double_backward,
    many_jvp,
    maps,
    mask_tiles,
    paged,
    residual,
    second_order,
)
from flashsci.backends.triton.plans.second_jvp import second_jvp as second_tangents
from flashsci.call import derivatives, directions, fp8_ops, gate_ops, kinds, ops
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.call.ops import Saved, Scalars, Tensors
from flashsci.call.problem import Problem
from flashsci.versions import warn_if_newer

warn_if_newer("triton", triton.__version__)

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    from flashsci.backends.triton import interpreter  # noqa: F401

_KEYS = ("CUDA", "CPU") if INTERPRETED else ("CUDA",)
forward = ops.define("triton", "forward", checks.forward(dense.forward), _KEYS)
backward = ops.define("triton", "backward", checks.backward(dense.backward), _KEYS)
slope_sums = dense.slope_sums
jvp = ops.define("triton", "jvp", checks.jvp(second_order.jvp), _KEYS)
ops.define("triton", "many_jvp", checks.many_jvp(many_jvp.many_jvp), _KEYS)
directions.share("triton", "jvp", many_jvp.shares)
ops.define("triton", "many_backward", checks.many_backward(many_backward.many_backward), _KEYS)
directions.share("triton", "backward", many_backward.shares)
second_jvp = ops.define("triton", "second_jvp", checks.second_jvp(second_tangents), _KEYS)
double_backward = ops.define("triton", "double_backward", checks.double_backward(second_order.double_backward), _KEYS)
along_many = checks.many_double_backward(many_double_backward.many_double_backward)
ops.define("triton", "many_double_backward", along_many, _KEYS)
directions.share("triton", "double_backward", many_double_backward.shares)
#: The functions of calls with a gate of pairs.
gated_calls = gate_ops.define(
    "triton",
    gate_ops.GatedKernels(
        gated.forward,
        gated.backward,
        gated_second_order.jvp,
        gated_second_order.double_backward,
        gated.prepared_forward,
        gated.prepared_backward,
    ),
    _KEYS,
)


def prepared_forward(tensors: Tensors, scalars: Scalars) -> Any:
    """A function that computes out, lse of plain tensors with the signature of these."""
    return dense.prepared_forward(checks.checked(tensors, scalars), scalars)


def prepared_backward(dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int) -> Any:
    """A function in the same way: from (dout, dlse, tensors, out, lse) to dq, dk, dv, dbias, dkey_weight; None where
    ``need`` does not name them."""
    checks.checked(saved.tensors, saved.scalars, (), (saved.out, dout), (saved.lse, dlse))
    return dense.prepared_backward(dout, saved, need)


reads_mask = dense.reads_mask

FUSED = True
_ROWS = frozenset(("q", "k", "v"))
_OFFSETS = frozenset(("cu_seqlens_q", "cu_seqlens_k"))
#: The tensors that it reads, by kind of call; a sink by the pass behind the kernels (flashsci/call/sink.py).
READS = {
    kinds.ATTENTION: _ROWS
    | _OFFSETS
    | {"bias", "key_weight", "mask", "bias_offsets", "dropout_seed", "alibi_slopes", "sink", "mask_tiles", "pair_gate"},
    kinds.PAGED: frozenset(
        ("q", "k_cache", "v_cache", "block_table", "seqused_k", "cu_seqlens_q", "sink", "k_scale", "v_scale")
    ),
    kinds.FP8: _ROWS | _OFFSETS | {"q_scale", "k_scale", "v_scale"},
    kinds.RESIDUAL: _ROWS | {"bias", "dropout_seed"},
    kinds.LAPLACIAN: frozenset(LaplacianTensors._fields),
}


def unavailable() -> str | None:
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "needs a CUDA GPU that torch sees (or TRITON_INTERPRET=1 set before Python starts, to interpret on the CPU)"


def rejects(problem: Problem) -> str | None:
    if problem.device_type not in ("cuda", "meta") and not INTERPRETED:
        return f"Triton kernels run on CUDA tensors, these are on {problem.device_type}; move them"
    if problem.batch_invariant:
        refused = _varies(problem)
        if refused is not None:
            return refused
    if problem.dtype == fp8_ops.FP8:
        return _fp8_rejects(problem)
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the Triton kernels compute in float16, bfloat16 and float32, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.dtype == torch.bfloat16 and problem.capability is not None and problem.capability < (8, 0):
        return (
            f"sm_{problem.capability[0]}{problem.capability[1]} has no bfloat16 instructions (sm_80 and newer have); "
            "use float16 or float32"
        )
    if problem.alibi_further or (problem.alibi_grad and (problem.sink or "pair_gate" in problem.given)):
        return derivatives.lacks("triton", "alibi_slopes")
    if problem.sink and problem.key_weight_grad:
        return "key weights beside a sink have no gradient here, where a row's may all be zero"
    if max(problem.head_dim, problem.head_dim_v) > tilings.MAX_HEAD_DIM:
        return f"head dims up to {tilings.MAX_HEAD_DIM} are supported, got {problem.head_dim} and {problem.head_dim_v}"
    return _paged_rejects(problem) if problem.paged else None


def _varies(problem: Problem) -> str | None:
    """Why results depend on the batch; None: they do not."""
    if problem.dtype == fp8_ops.FP8:
        return "its tiles of 8-bit floats depend on the batch; give q, k and v in 16 bits"
    for name, learnt in (("bias", problem.bias_grad), ("key_weight", problem.key_weight_grad)):
        if learnt:
            return f"the gradient of {name} is a sum over the batch, which decides the kernels of dq too; give {name}.detach()"
    return None


def _paged_rejects(problem: Problem) -> str | None:
    if max(problem.head_dim, problem.head_dim_v) > 256:
        return f"paged calls have head dims up to 256, got {problem.head_dim} and {problem.head_dim_v}"
    eight_bits = problem.cache_dtype is not None and problem.cache_dtype.itemsize == 1
    if eight_bits and problem.capability is not None and problem.capability < (8, 9):
        return (
            f"sm_{problem.capability[0]}{problem.capability[1]} has no instructions for 8-bit floats (sm_89 and newer have); keep "
            "the cache in 16 bits"
        )
    return None


def _fp8_rejects(problem: Problem) -> str | None:
    if problem.capability is not None and problem.capability < (8, 9):
        return (
            f"sm_{problem.capability[0]}{problem.capability[1]} has no instructions for 8-bit floats (sm_89 and newer have); give q, k "
            "and v in 16 bits"
        )
    if max(problem.head_dim, problem.head_dim_v) > fp8.MAX_HEAD_DIM:
        return f"float8_e4m3fn inputs have head dims up to {fp8.MAX_HEAD_DIM}, got {problem.head_dim} and {problem.head_dim_v}"
    return fp8_ops.lacks(problem)
