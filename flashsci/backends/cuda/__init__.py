"""The CUDA backend: loads flashsci/_C.so, says what it serves, and maps the contract onto its ops.

Its backward is Triton's until CUDA has one.
"""

from __future__ import annotations

import ctypes
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashsci
from flashsci import ops
from flashsci.problem import Problem

FUSED = True
MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16)

_forward_op: Any = None
_library: ctypes.CDLL | None = None
_loaded = False
_problem: str | None = None  # why the library is not there
_driver: str | None = None
_driver_asked = False


def library_path() -> Path | None:
    """The newest _C*.so of the package; an editable install spreads it over two folders."""
    found = [path for folder in flashsci.__path__ for path in Path(folder).glob("_C*.so")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _load() -> str | None:
    """Load the library once; the reason if that fails."""
    global _forward_op, _library, _loaded, _problem
    if _loaded:
        return _problem
    _loaded = True
    path = library_path()
    if path is None:
        _problem = (
            "the CUDA library (flashsci/_C.so) was not built: flashsci was installed where nvcc was not on the PATH; "
            "install it again with the CUDA toolkit there"
        )
        return _problem
    try:
        torch.ops.load_library(str(path))
        _library = ctypes.CDLL(str(path))
        _library.flashsci_build_info.restype = ctypes.c_char_p
        _library.flashsci_driver_problem.restype = ctypes.c_char_p
        op = torch.ops.flashsci.cuda_forward.default
        torch.library.register_fake("flashsci::cuda_forward", ops.fake_forward, lib=ops.LIBRARY)
        ops.register_vmap(op, (0, 1, 2))
        _forward_op = op
    except Exception as error:  # whatever a broken build raises is a reason, not a crash
        # load_library hides the loader's own words in __cause__.
        reasons = [str(e) for e in (error, error.__cause__) if e is not None]
        _problem = f"the CUDA library {path} cannot be loaded ({'; '.join(reasons)}); build it again for this torch"
    return _problem


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
        _driver_asked = True
        if not torch.ops.flashsci.sees_torch_cuda():
            _driver = (
                f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
            )
        elif not torch.cuda.is_available():
            _driver = "torch sees no CUDA device (no GPU, or no working NVIDIA driver)"
        else:
            assert _library is not None
            reason = _library.flashsci_driver_problem()
            if reason is not None:
                nvcc = json.loads(_library.flashsci_build_info().decode())["nvcc"]
                _driver = (
                    f"the CUDA library, built with nvcc {nvcc}, cannot use this machine's driver "
                    f"({reason.decode()}); update the driver or build flashsci with an older toolkit"
                )
    return _driver


def _device_name(capability: tuple[int, int]) -> str:
    text = f"sm_{capability[0]}{capability[1]}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.get_device_capability(index) == capability:
                return f"{torch.cuda.get_device_name(index)}, {text}"
    return text


def rejects(problem: Problem) -> str | None:
    """Why a call cannot be served, and what to do; None if it can."""
    if problem.device_type != "cuda" or problem.capability is None:
        return f"its kernels run on CUDA devices and the tensors are on {problem.device_type}; use backend='sdpa' or 'reference'"
    if problem.dtype not in _DTYPES:
        name = str(problem.dtype).removeprefix("torch.")
        other = "'reference'" if problem.dtype == torch.float64 else "'triton'"
        return f"it has no {name} kernels yet, only float16 and bfloat16; use backend={other}"
    if problem.capability < (8, 0):
        device = _device_name(problem.capability)
        if problem.dtype == torch.bfloat16:
            return (
                f"bfloat16 needs compute capability 8.0 and this device ({device}) has no bfloat16 tensor cores; "
                "use float16, float32 with backend='triton', or backend='sdpa'"
            )
        return f"its kernels need compute capability 8.0 and this device is {device}; use backend='triton' or 'sdpa'"
    info = build_info()
    if info is not None and not any(int(arch) >= 80 for arch in info["archs"]):
        built = ",".join(info["archs"])
        arch = problem.capability[0] * 10 + problem.capability[1]
        return f"this build (FA_ARCHS={built}) has no kernel for sm_{arch}; build with FA_ARCHS={arch}, or use backend='triton'"
    if problem.bias:
        return "it has no bias yet; use backend='triton'"
    if problem.mask:
        return "it has no mask yet; use backend='triton'"
    if problem.dropout_p:
        return "it has no dropout yet; use backend='triton'"
    if problem.head_dim > MAX_HEAD_DIM or problem.head_dim_v > MAX_HEAD_DIM:
        return (
            f"its head dims end at {MAX_HEAD_DIM}, and these are {problem.head_dim} and {problem.head_dim_v}; "
            "use backend='triton' or 'reference'"
        )
    if problem.requires_grad:
        reason = _backward_problem(problem)
        if reason is not None:
            return f"its gradients come from the triton backend, which cannot serve this call ({reason}); use backend='sdpa' or 'reference'"
    return None


def _triton() -> Any:
    return importlib.import_module("flashsci.backends.triton")


def _backward_problem(problem: Problem) -> str | None:
    try:
        module = _triton()
    except ImportError as error:
        return f"it cannot be imported: {error}"
    reason: str | None = module.unavailable() or module.rejects(problem)
    return reason


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
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
) -> tuple[Tensor, Tensor]:
    """out, lse; what `rejects` refuses must not come here."""
    if _forward_op is None:
        reason = _load()
        if reason is not None:
            raise flashsci.BackendError(f"flashsci: {reason}")
    if bias is not None or mask is not None or dropout_p:
        raise flashsci.BackendError(
            "flashsci: the cuda backend has no bias, mask or dropout yet; use backend='triton'"
        )
    result: tuple[Tensor, Tensor] = _forward_op(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        softcap,
        window_left,
        window_right,
        lower_right,
    )
    return result


_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbias, with the contract's signature: the Triton kernels."""
    global _backward
    if _backward is None:
        _backward = _triton().backward
    return _backward(*arguments)
