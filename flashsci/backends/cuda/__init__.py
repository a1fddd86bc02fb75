"""The CUDA backend: loads flashsci/_C.so, says what it serves, and maps the contract onto its ops.

The library picks the newest generation of kernels that serves a call. SM75, SM80 and SM90 are the
same backend held to one generation, for tests and comparisons: ``use_backend("cuda:sm75")``. Where
the library has no backward for a call, or a slower one, Triton's takes the same saved tensors; held to
SM90, nothing else does: what its kernels do not take is a BackendError, of the call or of its backward.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import flashsci
from flashsci import ops
from flashsci.problem import Problem

FUSED = True
MAX_HEAD_DIM = 256
GENERATIONS = (90, 80, 75)  # newest first, as the library tries them
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

_ops: Any = None  # (forward, backward)
_library: ctypes.CDLL | None = None
_loaded = False
_problem: str | None = None  # why the library is not there
_driver: str | None = None
_driver_asked = False
_lock = threading.RLock()  # of all of these: whoever asks first loads, others wait for the outcome


def library_path() -> Path | None:
    """The newest _C*.so of the package; an editable install spreads it over two folders."""
    found = [path for folder in flashsci.__path__ for path in Path(folder).glob("_C*.so")]
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
            "the CUDA library (flashsci/_C.so) was not built: flashsci was installed where nvcc was not on the PATH; "
            "install it again with the CUDA toolkit there"
        )
    try:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
        library.flashsci_build_info.restype = ctypes.c_char_p
        library.flashsci_driver_problem.restype = ctypes.c_char_p
        namespace = torch.ops.flashsci
        found = namespace.cuda_forward.default, namespace.cuda_backward.default
        for op, fake, tensors in zip(
            found,
            (ops.fake_forward, _fake_backward),
            ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5, 6, 9, 10)),
            strict=True,
        ):
            torch.library.register_fake(op.name(), fake, lib=ops.LIBRARY)
            ops.register_vmap(op, tensors)
        _library, _ops = library, found
    except Exception as error:  # whatever a broken build raises is a reason, not a crash
        # load_library hides the loader's own words in __cause__.
        reasons = [str(e) for e in (error, error.__cause__) if e is not None]
        return f"the CUDA library {path} cannot be loaded ({'; '.join(reasons)}); build it again for this torch"
    return None


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The library's op knows no key weights."""
    return ops.fake_backward(*arguments[:6], None, *arguments[6:])[:4]


def build_info() -> dict[str, Any] | None:
    """Version, kernel digests, architectures, tile preset and compiler of the loaded library; None without one."""
    if _load() is not None or _library is None:
        return None
    info: dict[str, Any] = json.loads(_library.flashsci_build_info().decode())
    return info


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


def _limit(kind: str, generation: int, problem: Problem, pinned: bool = False) -> str | None:
    """What the kernels of one generation leave to others, beyond dtypes and devices; ``pinned`` to them, they refuse strides
    themselves."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if problem.dtype == torch.float32:
        if widest > 128:
            return f"the head dims of its float32 kernels end at 128, and this call has {widest}"
        return None
    # Which strides they take, a Problem does not know; the library goes on to sm80's.
    if generation == 90 and not pinned and (problem.bias or problem.mask):
        return "its Hopper kernels take a bias or a mask in some strides only"
    if generation == 75 and kind == "backward" and widest > 128:
        return f"the head dims of its Turing backward end at 128, and this call has {widest}"
    odd = problem.head_dim % 8 or problem.head_dim_v % 8
    if generation == 90 and kind == "backward" and odd:
        return "the head dims of its Hopper backward are multiples of 8"
    return None


def _refusal(kind: str, problem: Problem, generation: int = 0) -> str | None:
    """Why the library's forward or backward cannot serve a call that its dtype allows; None if it can."""
    if problem.dropout_p:
        return "it has no dropout"
    if problem.key_weight:
        return "it has no key_weight"
    if problem.varlen and problem.bias:
        return "it has no bias for packed sequences"
    if problem.dtype == torch.float32 and problem.precision == "ieee":
        return "its float32 products are three of fp16 halves (fp32 accuracy) or one, not IEEE"
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        dims = f"{problem.head_dim} and {problem.head_dim_v}"
        return f"its head dims end at {MAX_HEAD_DIM}, and these are {dims}"
    assert problem.capability is not None
    capability = problem.capability[0] * 10 + problem.capability[1]
    info = build_info() or _sources()
    reason = None
    for candidate in (generation,) if generation else GENERATIONS:
        if candidate == 90:
            runs = capability // 10 == 9
        else:  # Turing's kernels run on what is newer, but only for who asks for them
            asked = candidate != 75 or capability < 80 or generation == 75
            runs = capability >= candidate and asked
        if runs and f"cuda/sm{candidate}/{kind}_{_DTYPES[problem.dtype]}" in info["units"]:
            reason = _limit(kind, candidate, problem, pinned=generation != 0)
            if reason is None:
                return None
    if reason is not None:
        return reason
    only = f" of generation sm{generation}" if generation else ""
    return (
        f"this build (FA_ARCHS={','.join(info['archs'])}) has no {_name(problem.dtype)} {kind} "
        f"kernel{only} for {_device_name(problem.capability)}; build with FA_ARCHS={capability}"
    )


def _elsewhere(problem: Problem, generation: int = 0) -> str | None:
    """Why Triton computes gradients that a kernel here could (it is the faster one), or None."""
    hopper = problem.capability is not None and problem.capability[0] == 9
    if generation or not hopper or problem.dtype.itemsize != 2:
        return None
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    if wide and not (
        problem.bias or problem.mask
    ):  # H200, D 256: sm80's takes half of Triton's time
        return None
    own = f"cuda/sm90/bwd_{_DTYPES[problem.dtype]}" in (build_info() or _sources())["units"]
    if own and _limit("backward", 90, problem) is None:
        return None
    reason = "on Hopper its backward is faster than the one written for sm80"
    if own and not wide and (problem.bias or problem.mask):
        reason += ", which is left with what the Hopper backward does not take of a bias or mask"
    return reason


def _triton_gradients(problem: Problem, generation: int = 0) -> str | None:
    """Why gradients of a call come from the triton backend, or None."""
    reason = _refusal("backward", problem, generation)
    if reason is None:
        reason = _elsewhere(problem, generation)
        if reason is not None and _triton_problem(problem) is not None:
            return None
    return reason


def remark(problem: Problem, generation: int = 0) -> str | None:
    """What `explain` adds for a call that is served."""
    reason = _triton_gradients(problem, generation) if problem.requires_grad else None
    return None if reason is None else f"its gradients come from triton: {reason}"


def rejects(problem: Problem, generation: int = 0) -> str | None:
    """Why a call cannot be served, and what to do; None if it can."""
    if problem.device_type != "cuda" or problem.capability is None:
        return f"its kernels run on CUDA devices and the tensors are on {problem.device_type}; use backend='sdpa' or 'reference'"
    if problem.dtype not in _DTYPES:
        other = "'reference'" if problem.dtype == torch.float64 else "'triton'"
        return f"it has no {_name(problem.dtype)} kernels, only float16, bfloat16 and float32; use backend={other}"
    if problem.dtype == torch.bfloat16 and problem.capability < (8, 0):
        return (
            f"bfloat16 needs compute capability 8.0 and this device ({_device_name(problem.capability)}) has no bfloat16 "
            "tensor cores; use float16, float32 with backend='triton', or backend='sdpa'"
        )
    reason = _refusal("forward", problem, generation)
    if reason is not None:
        return f"{reason}, or use backend='triton' or 'sdpa'"
    refusal = _refusal("backward", problem, generation) if problem.requires_grad else None
    if refusal is not None and generation == 90:
        return f"it has no gradients of this call of its own: {refusal}; use backend='cuda'"
    if refusal is not None:
        reason = _triton_problem(problem)
        if reason is not None:
            return f"its gradients would come from the triton backend, which cannot serve this call ({reason}); use backend='sdpa' or 'reference'"
    return None


def _triton() -> Any:
    return importlib.import_module("flashsci.backends.triton")


def _triton_problem(problem: Problem) -> str | None:
    try:
        module = _triton()
    except ImportError as error:
        return f"it cannot be imported: {error}"
    reason: str | None = module.unavailable() or module.rejects(problem)
    return reason


def _call(op: Any, generation: int, *arguments: Any) -> Any:
    """An op of the library; held to a generation whose kernels do not take these strides, its refusal is a BackendError."""
    try:
        return op(*arguments)
    except RuntimeError as error:
        text = str(error).split("\n")[0]
        if generation and "serves this call on compute capability" in text:
            raise flashsci.BackendError(text) from None
        raise


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    bias_offsets: Tensor | None,
    dropout_seed: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    lower_right: bool,
    dropout_p: float,
    precision: str,
    deterministic: bool,
    generation: int = 0,
) -> tuple[Tensor, Tensor]:
    """out, lse; what `rejects` refuses must not come here."""
    if _ops is None:
        reason = _load()
        if reason is not None:
            raise flashsci.BackendError(f"flashsci: {reason}")
    packed_bias = cu_seqlens_q is not None and bias is not None
    if dropout_p or key_weight is not None or packed_bias:
        raise flashsci.BackendError(
            "flashsci: the cuda backend has no dropout, no key_weight and no bias of packed "
            "sequences; use backend='triton'"
        )
    result: tuple[Tensor, Tensor] = _call(
        _ops[0],
        generation,
        q,
        k,
        v,
        bias,
        mask,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        softcap,
        window_left,
        window_right,
        lower_right,
        precision == "tf32",
        generation,
    )
    return result


@functools.lru_cache(maxsize=1024)
def _serves_backward(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    pairs: bool,
    generation: int,
) -> bool:
    problem = Problem(
        "cuda",
        torch.cuda.get_device_capability(device),
        dtype,
        *(1, 1, head_dim, head_dim_v),
        mask=pairs,
    )
    return _triton_gradients(problem, generation) is None


def _hopper_takes(
    q: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, softcap: float, need: int
) -> bool:
    """Whether the Hopper backward serves a call with a bias or mask, and faster than Triton's.

    What it takes: csrc/sm90/backward_pairs.cuh, backward_apart.cuh. H200, head dims to 64, a 16-bit bias that is
    shared: Triton sums its gradient in 0.83 to 0.89 of the time. In fp32 Triton takes 1.3 to 1.7 times as long.
    """
    dims = q.shape[-1], v.shape[-1]
    if softcap or max(dims) > 128 or any(dim % 8 for dim in dims):
        return False

    def of_keys(x: Tensor) -> bool:
        return x.shape[-2] == 1 or x.stride(-2) == 0

    def by_tiles(x: Tensor) -> bool:
        unit = 16 // x.element_size()
        return (
            x.shape[-1] > 1
            and x.stride(-1) == 1
            and x.storage_offset() % unit == 0
            and all(n == 1 or s % unit == 0 for n, s in zip(x.shape[:-1], x.stride(), strict=False))
        )

    masked = mask is not None and not of_keys(mask)
    if mask is not None and masked and not by_tiles(mask):
        return False
    if bias is None:
        return True
    tiles, apart = not of_keys(bias), bias.dtype == torch.float32
    if tiles and masked and not (apart and max(dims) <= 64):
        return False
    if need & ops.NEED_BIAS:
        added = tiles and apart  # a shared gradient too
        if not added and (not tiles or bias.shape[:-2] != q.shape[:-2]):
            if max(dims) <= 64:
                return False
        elif bias.shape[-1] * bias.element_size() % 16:
            return False
    return not tiles or ((apart or bias.dtype == q.dtype) and by_tiles(bias))


def backward(*arguments: Any, generation: int = 0) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbias, dkey_weight, with the contract's signature."""
    dout, dlse, q, k, v, bias, _, mask, cu_seqlens_q, cu_seqlens_k, _, _, out, lse = arguments[:14]
    *scalars, dropout_p, precision, deterministic, need = arguments[14:]
    pairs = (bias is not None or mask is not None) and (
        generation != 0 or not _hopper_takes(q, v, bias, mask, scalars[3], need)
    )
    served = _serves_backward(q.device, q.dtype, q.shape[-1], v.shape[-1], pairs, generation)
    if generation == 90 and not served:
        raise flashsci.BackendError(
            f"flashsci: the Hopper kernels have no backward for {_name(q.dtype)} and head dims {q.shape[-1]} and "
            f"{v.shape[-1]}; use backend='cuda'"
        )
    if (
        dropout_p
        or precision == "ieee"
        or (cu_seqlens_q is not None and bias is not None)
        or not served
    ):
        # Dropout and packed biases come from attention_backward alone: this forward refuses them.
        gradients: tuple[Tensor, ...] = _triton().backward(*arguments)
        return gradients
    if dout is not None and dout.stride(-1) != 1:
        dout = dout.contiguous()
    if out.stride(-1) != 1:
        out = out.contiguous()
    result: tuple[Tensor, ...] = _call(
        _ops[1],
        generation,
        dout,
        dlse,
        q,
        k,
        v,
        bias,
        mask,
        cu_seqlens_q,
        cu_seqlens_k,
        out,
        lse.contiguous(),
        *scalars,
        precision == "tf32",
        deterministic,
        generation,
        need,
    )
    return *result, q.new_empty(0)


def _held_to(generation: int) -> SimpleNamespace:
    return SimpleNamespace(
        FUSED=FUSED,
        unavailable=unavailable,
        rejects=functools.partial(rejects, generation=generation),
        remark=functools.partial(remark, generation=generation),
        forward=functools.partial(forward, generation=generation),
        backward=functools.partial(backward, generation=generation),
    )


SM75, SM80, SM90 = (_held_to(generation) for generation in (75, 80, 90))
