"""The CUDA backend: loads flashsci/_C.so, says what it serves, and maps the contract onto its ops.

The library picks the newest generation of kernels that serves a call. SM75, SM80 and SM90 are the
same backend restricted to one generation, OWN to its own gradients, for tests and comparisons:
``use_backend("cuda:sm75")``. This file says
what the library *can* compute, forward and backward apart: where it has no backward for a call, or a slower one,
flashsci/registry.py names another backend, which takes the same saved tensors.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flashsci import ops, paged_ops
from flashsci.backends.cuda import fp8, layouts, paged, prepared
from flashsci.backends.cuda.layouts import hopper_takes
from flashsci.errors import BackendError
from flashsci.fp8_ops import FP8
from flashsci.ops import NEED_BIAS, Given, Saved, Scalars, Tensors
from flashsci.problem import Problem

FUSED = True
MAX_HEAD_DIM = 256
GENERATIONS = (90, 80, 75)  # newest first, as the library tries them
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_UNITS = {"forward": "fwd", "backward": "bwd"}

_ops: Any = None  # (forward, backward)
_library: ctypes.CDLL | None = None
_loaded = False
_problem: str | None = None  # why the library is not there
_driver: str | None = None
_driver_asked = False
_lock = threading.RLock()  # of all of these: whoever asks first loads, others wait for the outcome


def library_path() -> Path | None:
    """The newest _C*.so of the package; an editable install spreads it over two folders."""
    folders = sys.modules["flashsci"].__path__
    found = [path for folder in folders for path in Path(folder).glob("_C*.so")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _load() -> str | None:
    """Load the library once; the reason if that fails."""
    global _problem, _loaded
    if not _loaded:
        with _lock:
            if not _loaded:
                _problem = _load_now()
                _loaded = True  # last: a thread that sees it sees the outcome
    return _problem


def _load_now() -> str | None:
    global _ops, _library
    path = library_path()
    if path is None:
        return (
            "the CUDA library (flashsci/_C.so) was not built: flashsci was installed without nvcc on the PATH, or with "
            "FA_ARCHS=none; install it again with the CUDA toolkit there, such as by FA_ARCHS=90 make build"
        )
    try:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
        library.flashsci_build_info.restype = ctypes.c_char_p
        library.flashsci_driver_problem.restype = ctypes.c_char_p
        namespace = torch.ops.flashsci
        found = namespace.cuda_forward.default, namespace.cuda_backward.default
        fakes: tuple[Callable[..., Any], ...] = (_fake_forward, _fake_backward)
        for op, fake in zip(found, fakes, strict=True):
            torch.library.register_fake(op.name(), fake, lib=ops.LIBRARY)
            ops.register_vmap(op)
        if hasattr(namespace, "cuda_paged_attention"):  # not in a library of an older tree
            paged_ops.register_fake("cuda_paged_attention")
        _library, _ops = library, found
    except Exception as error:  # whatever a broken build raises is a reason, not a crash
        # load_library hides the loader's own words in __cause__.
        reasons = [str(e) for e in (error, error.__cause__) if e is not None]
        return f"the CUDA library {path} cannot be loaded ({'; '.join(reasons)}); build it again for this torch"
    return None


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return ops.fake_forward(Tensors(q, k, v))


def _fake_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """The library's op knows no key weights."""
    return ops.fake_backward(Tensors(q, k, v, bias), rest[-1])[:4]


def build_info() -> dict[str, Any] | None:
    """Version, kernel digests, architectures, tile preset and compiler of the loaded library; None without one."""
    if _load() is not None or _library is None:
        return None
    info: dict[str, Any] = json.loads(_library.flashsci_build_info().decode())
    return info


@functools.cache
def _fills_results() -> bool:
    """Whether this is a debug build, whose ops fill results with NaN that kernels are to overwrite (csrc/core/poison.cuh)."""
    return any("-poison" in digest for digest in (build_info() or {"units": {}})["units"].values())


def stale() -> str | None:
    """Why the loaded library is not what the source tree holds, or None; `check` refuses a stale one."""
    from flashsci.digest import cuda_units

    info, tree = build_info(), cuda_units()
    if info is None or not tree:
        return None
    differ = [name for name, digest in info["units"].items() if tree.get(name) != digest]
    if differ:
        return f"the CUDA library was built from other sources than the tree holds ({', '.join(differ)}); build it again"
    return None


def unavailable() -> str | None:
    """Why the backend cannot run on this machine at all, or None."""
    global _driver, _driver_asked
    problem = _load()
    if problem is not None:
        return problem
    if not _driver_asked:
        with _lock:
            if not _driver_asked:
                _driver = _ask_driver()
                _driver_asked = True
    return _driver


def _ask_driver() -> str | None:
    """Why the loaded library cannot run here, or None."""
    if not torch.ops.flashsci.sees_torch_cuda():
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (no GPU, or no working NVIDIA driver)"
    assert _library is not None
    reason = _library.flashsci_driver_problem()
    if reason is None:
        return None
    nvcc = json.loads(_library.flashsci_build_info().decode())["nvcc"]
    return (
        f"the CUDA library, built with nvcc {nvcc}, cannot use this machine's driver "
        f"({reason.decode()}); update the driver or build flashsci with an older toolkit"
    )


def _device_name(capability: tuple[int, int]) -> str:
    text = f"sm_{capability[0]}{capability[1]}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.get_device_capability(index) == capability:
                return f"{torch.cuda.get_device_name(index)}, {text}"
    return text


@functools.lru_cache(maxsize=1)
def _sources() -> dict[str, Any]:
    """What a full build of the source tree would hold, for answers where none was made (`unavailable` says so first)."""
    from flashsci.digest import cuda_units

    return {"archs": ["75", "80", "90"], "units": cuda_units()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _limit(kind: str, generation: int, problem: Problem, strides: bool) -> str | None:
    """What the kernels of one generation do not take, beyond dtypes and devices. ``strides``: whether those of bias and mask
    are known to be such as Hopper's kernels take (a Problem has none)."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if problem.dtype == torch.float32:
        # Tiles of wide heads take the shared memory of Hopper (sm_90) and of sm_100.
        large = problem.capability is not None and problem.capability[0] in (9, 10)
        if kind == "backward" and widest > 128 and not large:
            return f"the head dims of its float32 backward end at 128 on this device, and this call has {widest}"
        return None
    if generation == 90 and not strides and (problem.bias or problem.mask):
        return "its Hopper kernels take a bias or a mask in some strides only"
    if generation == 75 and kind == "backward" and widest > 128:
        return f"the head dims of its Turing backward end at 128, and this call has {widest}"
    odd = problem.head_dim % 8 or problem.head_dim_v % 8
    if generation == 90 and kind == "backward" and odd:
        return "the head dims of its Hopper backward are multiples of 8"
    return None


def _kernels(
    kind: str, problem: Problem, generation: int = 0, strides: bool = False
) -> tuple[int, str | None]:
    """The generation of the library's kernels that computes the forward or backward of a call whose dtype it has, or 0 and the
    reason why none does. ``generation``: the only one to ask; it refuses strides itself."""
    if problem.dropout_p:
        return 0, "it has no dropout"
    if problem.alibi:
        return 0, "it has no alibi_slopes"
    if problem.varlen and problem.bias:
        return 0, "it has no bias for packed sequences"
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
    info = build_info() or _sources()
    if problem.key_weight:  # csrc/sm80/small alone has them
        if generation not in (0, 80) or capability < 80 or not _is_weighted(problem):
            return 0, WEIGHTED
        if kind == "backward" and not strides:
            return (
                0,
                "its gradients of key_weight are of rows that begin at multiples of 16 bytes, and of weights of each batch member",
            )
        return 80, None
    reason = None
    for candidate in (generation,) if generation else GENERATIONS:
        if candidate == 90:
            runs = capability // 10 == 9
        else:  # Turing's kernels run on what is newer, but only for who asks for them
            asked = candidate != 75 or capability < 80 or generation == 75
            runs = capability >= candidate and asked
        unit = f"cuda/sm{candidate}/{_UNITS[kind]}_{_DTYPES[problem.dtype]}"
        if runs and unit in info["units"]:
            reason = _limit(kind, candidate, problem, strides or generation != 0)
            if reason is None:
                return candidate, None
    if reason is not None:
        return 0, reason
    only = f" of generation sm{generation}" if generation else ""
    return (
        0,
        f"this build (FA_ARCHS={','.join(info['archs'])}) has no {_name(problem.dtype)} {kind} "
        f"kernel{only} for {_device_name(problem.capability)}; build with FA_ARCHS={capability}",
    )


def rejects(problem: Problem, generation: int = 0) -> str | None:
    """Why the forward of a call cannot be computed, and what to do; None if it can."""
    if problem.device_type != "cuda" or problem.capability is None:
        return f"its kernels run on CUDA devices and the tensors are on {problem.device_type}; use backend='sdpa' or 'reference'"
    if problem.paged:
        info = build_info() or _sources()
        return paged.rejects(problem, generation, info, _device_name(problem.capability))
    if problem.dtype == FP8:
        return fp8.rejects(problem, (build_info() or _sources())["units"], generation)
    if problem.dtype not in _DTYPES:
        other = "'reference'" if problem.dtype == torch.float64 else "'triton'"
        return f"it has no {_name(problem.dtype)} kernels, only float16, bfloat16 and float32; use backend={other}"
    if problem.dtype == torch.bfloat16 and problem.capability < (8, 0):
        return (
            f"bfloat16 needs compute capability 8.0 and this device ({_device_name(problem.capability)}) has no bfloat16 "
            "tensor cores; use float16, float32 with backend='triton', or backend='sdpa'"
        )
    _, reason = _kernels("forward", problem, generation)
    return None if reason is None else f"{reason}, or use backend='triton' or 'sdpa'"


def backward_kernels(
    problem: Problem, strides: bool = False, generation: int = 0
) -> tuple[int, str | None]:
    """The generation of kernels that computes the gradients of a call that `rejects` lets pass, or 0 and the reason why
    none does. ``strides``: of bias and mask, what :func:`hopper_takes` says."""
    if generation in (0, 90) and _may_take_pairs(problem):
        return 90, None
    return _kernels("backward", problem, generation, strides)


#: Calls with key weights that csrc/sm80/small takes.
WEIGHTED = (
    "it has key_weight for float32 calls of at most 32 queries and keys and 64 head dims, multiples of 4, without bias, "
    "softcap and grouped heads"
)


def _is_weighted(problem: Problem) -> bool:
    """Whether the kernels take a call with key weights."""
    return problem.dtype == torch.float32 and not problem.bias and _is_small(problem)


_MANY_HEADS = 132


def _is_short(problem: Problem) -> bool:
    """What `is_short` of csrc/bindings/backward.cpp says, which gives such calls to sm80's kernels; no where a size is hidden."""
    p = problem
    if p.varlen or p.bias or p.mask or p.batch is None or p.seq_q is None or p.seq_k is None:
        return False
    dim, rows = max(p.head_dim, p.head_dim_v), max(p.seq_q, p.seq_k)
    many = math.prod(p.batch) * p.heads_q >= _MANY_HEADS
    if dim <= 32:
        return rows <= (512 if many else 128)
    return dim <= 64 and rows <= (128 if many else 64)


def _is_small(problem: Problem) -> bool:
    """Whether csrc/sm80/small computes the gradients of a call, but for strides: sequences of at most 32 rows."""
    p = problem
    if p.varlen or p.softcap or p.seq_q is None or p.seq_k is None or p.heads_q != p.heads_k:
        return False
    built = f"cuda/sm80/small_{_DTYPES.get(p.dtype)}" in (build_info() or _sources())["units"]
    return built and layouts.fits_small(max(p.seq_q, p.seq_k), (p.head_dim, p.head_dim_v))


def older_backward(problem: Problem, generation: int = 0) -> int:
    """The generation of kernels that computes the gradients of a call though the one of :func:`backward_kernels` would take it,
    or 0. Rules of `auto` still go by that one: what they say of a generation holds for calls that it would serve best."""
    if (
        generation
        or not (_is_short(problem) or _is_small(problem))
        or backward_kernels(problem)[0] != 90
    ):
        return 0
    return _kernels("backward", problem, 80)[0]


def _may_take_pairs(problem: Problem) -> bool:
    """Whether csrc/sm90/pair serves a call, but for the strides that a Problem does not know (:func:`takes_pairs` does)."""
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
        and f"cuda/sm90/pair_{unit}" in (build_info() or _sources())["units"]
        and problem.heads_q == problem.heads_k
        and problem.heads_q % 8 == 0
        and not bool(others)
        and unbounded
        and suited
    )


def _call(op: Any, generation: int, *arguments: Any) -> Any:
    """An op of the library. Restricted to a generation whose kernels do not take these strides, its refusal is a
    BackendError."""
    try:
        return op(*arguments)
    except RuntimeError as error:
        text = str(error).split("\n")[0]
        if generation and "serves this call on compute capability" in text:
            raise BackendError(text) from None
        raise


def forward(tensors: Tensors, scalars: Scalars, generation: int = 0) -> tuple[Tensor, Tensor]:
    """out, lse; what `rejects` refuses must not come here."""
    if _ops is None:
        reason = _load()
        if reason is not None:
            raise BackendError(f"flashsci: {reason}")
    _require_served(tensors, scalars)
    tensors = layouts.whole_rows(tensors)
    q, k, v, _, _, mask, cu_seqlens_q, cu_seqlens_k, *_ = tensors
    inputs = q, k, v, layouts.bias_or_weights(tensors), mask, cu_seqlens_q, cu_seqlens_k
    result: tuple[Tensor, Tensor] = _call(
        _ops[0], generation, *inputs, *_options(scalars), generation, tensors.key_weight is not None
    )
    return result


def _require_served(tensors: Tensors, scalars: Scalars) -> None:
    """Whoever chose this backend may have overlooked something, and kernels would compute without it."""
    if _lacks(tensors, scalars):
        raise BackendError(
            "flashsci: the cuda backend has no dropout, no alibi_slopes and no bias of packed sequences, and "
            f"{WEIGHTED.removeprefix('it ')}; use backend='triton'"
        )


def _lacks(tensors: Tensors, scalars: Scalars) -> bool:
    """Whether a call has what no kernel of the library has."""
    packed_bias = tensors.cu_seqlens_q is not None and tensors.bias is not None
    weighted = tensors.key_weight is not None and not layouts.takes_weights(tensors, scalars)
    others = scalars.dropout_p or tensors.alibi_slopes is not None
    return bool(others) or weighted or packed_bias


def _options(scalars: Scalars) -> tuple[Any, ...]:
    """Those of the library's forward: of its backward, the first."""
    *options, _, precision, _ = scalars
    return *options, precision == "tf32"


def takes_bias(tensors: Tensors, scalars: Scalars, needs_grad: bool, generation: int = 0) -> bool:
    """Whether the library takes a bias whose keys are not neighbours in memory at least as well as a copy that has them so:
    csrc/sm90/pair where its heads are; without gradients also triangle attention, which makes a copy itself, beside other work."""
    found = _takes_bias(tensors, scalars, generation)
    return found == prepared.AS_GIVEN or (found == prepared.FORWARD_AS_GIVEN and not needs_grad)


def takes_pairs(tensors: Tensors, scalars: Scalars, generation: int = 0) -> bool:
    """Whether the gradients of a call are those of csrc/sm90/pair, which takes its bias as it is."""
    return tensors.has_strided_bias() and (
        _takes_bias(tensors, scalars, generation) == prepared.AS_GIVEN
    )


def _takes_bias(tensors: Tensors, scalars: Scalars, generation: int) -> int:
    if _load() is not None or _lacks(tensors, scalars) or not prepared.has_scores(tensors):
        return 0
    if tensors.q.device.type != "cuda":
        return 0
    return prepared.takes_bias(_library, tensors, (*_options(scalars), generation))


def prepared_forward(
    tensors: Tensors, scalars: Scalars, generation: int = 0
) -> Callable[[Given], tuple[Tensor, Tensor]]:
    """:func:`forward` of all plain tensors of the signature of these, in their order."""

    def general(tensors: Given) -> tuple[Tensor, Tensor]:
        return forward(Tensors(*tensors), scalars, generation)

    if _load() is not None or _lacks(tensors, scalars) or not prepared.has_scores(tensors):
        return general
    if _fills_results():
        return general
    weighted = tensors.key_weight is not None
    options = *_options(scalars), generation, weighted
    return prepared.Forward(_library, tensors, options, general)


def backward(
    dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int, generation: int = 0
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbias, dkey_weight; what `backward_kernels` refuses must not come here."""
    _require_served(saved.tensors, saved.scalars)
    tensors = saved.tensors
    q, k, v, _, weights, mask, cu_seqlens_q, cu_seqlens_k, *_ = tensors
    out, lse = saved.out, saved.lse.contiguous()
    if dout is not None and dout.stride(-1) != 1:
        dout = dout.contiguous()
    if out.stride(-1) != 1:
        out = out.contiguous()
    inputs = q, k, v, layouts.bias_or_weights(tensors), mask, cu_seqlens_q, cu_seqlens_k, out, lse
    options = *_options(saved.scalars), saved.scalars.deterministic, generation
    if weights is None:
        result: tuple[Tensor, ...] = _call(_ops[1], generation, dout, dlse, *inputs, *options, need)
        return *result, q.new_empty(0)
    need = layouts.bias_or_weights_needed(need)
    *rows, dweights = _call(_ops[1], generation, dout, dlse, *inputs, *options, need, True)
    return *rows, q.new_empty(0), dweights.reshape(weights.shape) if need & NEED_BIAS else dweights


def prepared_backward(
    dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int, generation: int = 0
) -> Callable[..., tuple[Tensor | None, ...]]:
    """:func:`backward` in the same way: of (dout, dlse, tensors, out, lse), with None for what ``need`` does not name."""
    scalars = saved.scalars
    _require_served(saved.tensors, scalars)

    def general(
        dout: Tensor | None, dlse: Tensor | None, tensors: Given, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved = Saved(Tensors(*tensors), out, lse, scalars)
        found = backward(dout, dlse, saved, need, generation)
        return tuple([x if need >> i & 1 else None for i, x in enumerate(found)])

    rows = all(x is None or x.stride(-1) == 1 for x in (dout, saved.out))
    if not rows or not saved.lse.is_contiguous() or not prepared.has_scores(saved.tensors):
        return general
    if _fills_results():
        return general
    weighted = saved.tensors.key_weight is not None
    options = *_options(scalars), scalars.deterministic, generation, weighted
    by_pairs = takes_pairs(saved.tensors, scalars, generation) and dout is not None
    return prepared.Backward(_library, dout, dlse, saved, need, options, general, by_pairs)


def _restricted_to(generation: int) -> SimpleNamespace:
    return SimpleNamespace(
        FUSED=FUSED,
        unavailable=unavailable,
        rejects=functools.partial(rejects, generation=generation),
        backward_kernels=functools.partial(backward_kernels, generation=generation),
        older_backward=functools.partial(older_backward, generation=generation),
        hopper_takes=hopper_takes,
        forward=functools.partial(forward, generation=generation),
        backward=functools.partial(backward, generation=generation),
        takes_bias=functools.partial(takes_bias, generation=generation),
        takes_pairs=functools.partial(takes_pairs, generation=generation),
        prepared_forward=functools.partial(prepared_forward, generation=generation),
        prepared_backward=functools.partial(prepared_backward, generation=generation),
    )


OWN, SM75, SM80, SM90 = (_restricted_to(generation) for generation in (0, 75, 80, 90))
