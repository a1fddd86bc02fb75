"""The calls that the library computes, forward and backward separately, by the properties of a Problem.

decisions.py asks the library about tensors. If the library has no backward for a call, or a slower one,
flashsci/choice/gradients.py names another backend, which takes the same saved tensors.
"""

from __future__ import annotations

import torch

from flashsci.backends.cuda import decisions, fp8, library, paged
from flashsci.call import derivatives, kinds
from flashsci.call.fp8_ops import FP8
from flashsci.call.problem import Problem

MAX_HEAD_DIM = 256
GENERATIONS = (90, 80, 75)  # newest first, as the library tries them
_ROWS = frozenset(("q", "k", "v"))
_OFFSETS = frozenset(("cu_seqlens_q", "cu_seqlens_k"))
#: The tensors that the library reads, by kind of call; a sink by the pass behind its kernels (flashsci/call/sink.py).
READS = {
    kinds.ATTENTION: _ROWS
    | _OFFSETS
    | {"bias", "bias_offsets", "key_weight", "mask", "alibi_slopes", "sink", "dropout_seed"},
    kinds.PAGED: frozenset(
        ("q", "k_cache", "v_cache", "block_table", "seqused_k", "cu_seqlens_q", "sink", "k_scale", "v_scale")
    ),
    kinds.FP8: _ROWS | _OFFSETS | {"q_scale", "k_scale", "v_scale"},
}
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_UNITS = {"forward": "fwd", "backward": "bwd"}


def _device_name(capability: tuple[int, int]) -> str:
    text = f"sm_{capability[0]}{capability[1]}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.get_device_capability(index) == capability:
                return f"{torch.cuda.get_device_name(index)}, {text}"
    return text


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _limit(kind: str, generation: int, problem: Problem, strides: bool) -> str | None:
    """The reason why the kernels of one generation do not take a call, dtypes and devices not considered.

    ``strides``: whether those of bias and mask are known to fit Hopper's kernels (a Problem has none).
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    if problem.dtype == torch.float32:
        # Tiles of wide heads take the shared memory of Hopper (sm_90) and of sm_100.
        large = problem.capability is not None and problem.capability[0] in (9, 10)
        if kind == "backward" and widest > 128 and not large:
            return f"the head dims of its float32 backward end at 128 on this device, and this call has {widest}"
        return None
    if generation == 90 and not strides and (problem.bias or problem.mask):
        return "its Hopper kernels take a bias or a mask only where its keys are neighbours in memory (stride 1)"
    if generation == 75 and kind == "backward" and widest > 128:
        return f"the head dims of its Turing backward end at 128, and this call has {widest}"
    odd = problem.head_dim % 8 or problem.head_dim_v % 8
    if generation == 90 and kind == "backward" and odd:
        return "the head dims of its Hopper backward are multiples of 8"
    return None


def _kernels(kind: str, problem: Problem, generation: int = 0, strides: bool = False) -> tuple[int, str | None]:
    """The generation of the library's kernels that computes the forward or backward of a call whose dtype it has, or
    0 and the reason why none does.

    ``generation``: the only one to consider; it checks strides itself.
    """
    if problem.alibi_further or (problem.alibi_grad and problem.sink):
        return 0, derivatives.lacks("cuda", "alibi_slopes")
    if problem.alibi and (problem.bias or problem.key_weight):
        return 0, "it has alibi_slopes only without bias and key_weight"
    if kind == "backward" and problem.varlen and problem.bias_grad and not _has_ragged_gradient(problem):
        return 0, RAGGED_GRADIENT
    if problem.dropout_p and (problem.dtype == torch.float32 or problem.key_weight):
        return 0, DROPPING
    if problem.dropout_p and (
        (problem.varlen and (problem.alibi or problem.bias)) or max(problem.head_dim, problem.head_dim_v) > 128
    ):
        return 0, DROPPING
    if problem.dtype == torch.float32 and problem.precision == "ieee":
        return (
            0,
            "its float32 products are three of fp16 halves (fp32 accuracy) or one, not IEEE",
        )
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        dims = f"{problem.head_dim} and {problem.head_dim_v}"
        return 0, f"its head dims end at {MAX_HEAD_DIM}, and these are {dims}"
    assert problem.capability is not None
    capability = problem.capability[0] * 10 + problem.capability[1]
    info = library.described()
    if problem.key_weight and (problem.varlen or problem.bias):
        return 0, WEIGHTED
    if kind == "backward" and not strides and _is_short_weighted(problem):
        return (
            0,
            "its gradients of key_weight for at most 32 queries and keys are of rows that begin at multiples of 16 bytes, and of weights of each batch member",
        )
    for given, name in (
        (problem.dropout_p, "dropout"),
        (problem.alibi, "alibi_slopes"),
        (problem.varlen and problem.bias, "a bias of packed sequences"),
        (problem.key_weight, "key_weight"),
        (problem.caps_bias, "a softcap of biased scores (softcap_at='biased')"),
    ):
        if given and (generation not in (0, 80) or capability < 80):
            return 0, f"only its kernels for compute capability 8.0 and newer (sm80) have {name}"
    packed_bias = problem.varlen and problem.bias
    if problem.dropout_p or problem.alibi or problem.key_weight or problem.caps_bias or packed_bias:
        generation = 80
    units = dict.fromkeys(_UNITS, "dropout") if problem.dropout_p else _UNITS
    reason = None
    for candidate in (generation,) if generation else GENERATIONS:
        if candidate == 90:
            runs = capability // 10 == 9
        else:  # Turing's kernels run on newer devices, but only on request
            asked = candidate != 75 or capability < 80 or generation == 75
            runs = capability >= candidate and asked
        unit = f"cuda/sm{candidate}/{units[kind]}_{_DTYPES[problem.dtype]}"
        if runs and unit in info["units"]:
            reason = _limit(kind, candidate, problem, strides or generation != 0)
            if reason is None:
                return candidate, None
    if reason is not None:
        return 0, reason
    only = f" of generation sm{generation}" if generation else ""
    only += " with dropout" if problem.dropout_p else ""
    return (
        0,
        f"this build (FA_ARCHS={','.join(info['archs'])}) has no {_name(problem.dtype)} {kind} "
        f"kernel{only} for {_device_name(problem.capability)}; build with FA_ARCHS={capability}",
    )


def rejects(problem: Problem, generation: int = 0) -> str | None:
    """Why the forward of a call cannot be computed; None if it can. (The choice adds who can.)"""
    if problem.device_type != "cuda" or problem.capability is None:
        return f"its kernels run on CUDA devices and the tensors are on {problem.device_type}"
    if problem.batch_invariant:
        return (
            "which of its kernels serves a call, and the number of parts into which that one cuts the keys, depend on the "
            "whole batch"
        )
    if problem.paged:
        info = library.described()
        return paged.rejects(problem, generation, info, _device_name(problem.capability))
    if problem.dtype == FP8:
        return fp8.rejects(problem, library.described()["units"], generation)
    if problem.dtype not in _DTYPES:
        return f"it has no {_name(problem.dtype)} kernels, only float16, bfloat16 and float32"
    if problem.dtype == torch.bfloat16 and problem.capability < (8, 0):
        return (
            f"bfloat16 needs compute capability 8.0 and this device ({_device_name(problem.capability)}) has no bfloat16 "
            "tensor cores; use float16 or float32"
        )
    return _kernels("forward", problem, generation)[1]


def backward_kernels(problem: Problem, strides: bool = False, generation: int = 0) -> tuple[int, str | None]:
    """The generation of kernels that computes the gradients of a call that `rejects` accepts, or 0 and the reason why
    none does.

    ``strides``: those of bias and mask, as :func:`hopper_takes` finds them.
    """
    if generation in (0, 90) and _may_take_pairs(problem):
        return 90, None
    return _kernels("backward", problem, generation, strides)


#: The calls with dropout that csrc/sm80/dropout takes.
DROPPING = (
    "it has dropout for float16 and bfloat16 calls of head dims up to 128 without key_weight, and for packed sequences "
    "without alibi_slopes and bias"
)

#: The biases of packed sequences that have a gradient in csrc/sm80.
RAGGED_GRADIENT = (
    "its gradient of a bias of packed sequences is that of a bias per pair, without a softcap of the scores below it"
)


def _has_ragged_gradient(problem: Problem) -> bool:
    return problem.ragged_bias and (not problem.softcap or problem.caps_bias)


#: The calls with key weights that csrc/sm80 takes.
WEIGHTED = "it has key_weight for dense calls without bias and alibi_slopes"


def _is_short_weighted(problem: Problem) -> bool:
    """Whether the forward of a call with key weights is one of csrc/sm80/small, whose backward has fewer layouts.

    No library is asked: a refusal states these limits, also where none was built or where a compiler hides sizes.
    """
    p = problem
    if not p.key_weight or p.bias or p.softcap or p.seq_q is None or p.seq_k is None:
        return False
    dims = p.head_dim, p.head_dim_v
    return (
        p.dtype == torch.float32
        and p.heads_q == p.heads_k
        and max(p.seq_q, p.seq_k) <= 32
        and max(dims) <= 64
        and not any(dim % 4 for dim in dims)
        and "cuda/sm80/small_fp32" in library.described()["units"]
    )


def older_backward(problem: Problem, generation: int = 0) -> int:
    """The older generation of kernels that computes the gradients of a call although that of :func:`backward_kernels`
    would take it; or 0.

    Rules of `auto` still use the newer one: a statement about a generation holds for the calls that it would serve
    best.
    """
    if generation or problem.bias or problem.mask or backward_kernels(problem)[0] != 90:
        return 0
    kernels = decisions.backward_of(problem)
    older = kernels is not None and all(name.startswith("sm80/") for name in kernels[:1])
    return _kernels("backward", problem, 80)[0] if older else 0


def _may_take_pairs(problem: Problem) -> bool:
    """Whether csrc/sm90/pair serves a call, without the strides, which a Problem does not hold (:func:`takes_pairs`
    checks them)."""
    dims = problem.head_dim, problem.head_dim_v
    unbounded = problem.window_left < 0 and problem.window_right < 0 and not problem.softcap
    others = problem.dropout_p or problem.key_weight or problem.alibi or problem.varlen
    if problem.dtype == torch.float32:
        suited = max(dims) <= 32 and not any(dim % 4 for dim in dims)
    else:  # and rows of all heads are whole
        suited = dims in ((24, 24), (32, 32)) and problem.bias_dtype == torch.float32
    unit = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(problem.dtype)
    return (
        problem.inner_heads
        and problem.precision != "ieee"
        and problem.capability is not None
        and problem.capability[0] == 9
        and f"cuda/sm90/pair_{unit}" in library.described()["units"]
        and problem.heads_q == problem.heads_k
        and problem.heads_q % 8 == 0
        and not bool(others)
        and unbounded
        and suited
    )
