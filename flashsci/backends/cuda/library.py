"""The library flashsci/_C.so: loaded once, with its contents and the reason why it cannot be used here."""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashsci.call import paged_ops
from flashsci.call.op_checks import on_one_device
from flashsci.call.ops import Tensors, empty_like_layout, fake_backward, fake_forward, register_vmap
from flashsci.call.schemas import LIBRARY
from flashsci.call.torch_state import tracer_paused

ops: Any = None  # (forward, backward) of the loaded library, as torch has them
handle: ctypes.CDLL | None = None  # the same library for calls without torch's dispatcher
_loaded = False
_problem: str | None = None  # why the library is absent
_driver: str | None = None
_driver_asked = False
_lock = threading.RLock()  # for all of these: the first caller loads, others wait for the outcome


def library_path() -> Path | None:
    """The newest _C*.so of the package; an editable install spreads the package over two folders."""
    folders = sys.modules["flashsci"].__path__
    found = [path for folder in folders for path in Path(folder).glob("_C*.so")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def load() -> str | None:
    """Load the library once; the reason if that fails."""
    global _problem, _loaded
    if not _loaded:
        with _lock:
            if not _loaded:
                _problem = _load_now()
                _loaded = True  # last: a thread that sees it sees the outcome
    return _problem


def _load_now() -> str | None:
    global ops, handle
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
            torch.library.register_fake(op.name(), on_one_device(fake), lib=LIBRARY)
            register_vmap(op)
        torch.library.register_fake(
            namespace.cuda_fp8_forward.default.name(), on_one_device(_fake_fp8_forward), lib=LIBRARY
        )
        if hasattr(namespace, "cuda_paged_attention"):  # absent in a library of an older tree
            paged_ops.register_fake("cuda_paged_attention")
        handle, ops = library, found
    except Exception as error:  # any exception of a broken build is a reason, not a crash
        # load_library hides the loader's own words in __cause__.
        reasons = [str(e) for e in (error, error.__cause__) if e is not None]
        return f"the CUDA library {path} cannot be loaded ({'; '.join(reasons)}); build it again for this torch"
    return None


# The arguments of cuda_backward between dlse and need (csrc/bindings/library.cpp).
_INPUTS = ("q", "k", "v", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "out", "lse")
_OPTIONS = (
    "max_seqlen_q", "max_seqlen_k", "scale", "softcap", "window_left", "window_right", "lower_right", "tf32", "deterministic",
    "generation",
)  # fmt: skip


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fake_forward(Tensors(q, k, v))


def _fake_backward(dout: Tensor | None, dlse: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    """Results of the library's op, to which key weights are a bias."""
    need = given[len(_INPUTS) + len(_OPTIONS)]  # `weighted` may follow
    left, right = (given[len(_INPUTS) + _OPTIONS.index(name)] for name in ("window_left", "window_right"))
    packed = given[_INPUTS.index("cu_seqlens_q")] is not None
    return fake_backward(Tensors(*given[:4]), need, packed or left >= 0 or right >= 0)[:4]


def _fake_fp8_forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *_, is_fp16, _ = given  # csrc/bindings/library.cpp
    out_dtype = torch.float16 if is_fp16 else torch.bfloat16
    out = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]), out_dtype)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def build_info() -> dict[str, Any] | None:
    """Version, kernel digests, architectures, tile preset and compiler of the loaded library; None without one."""
    if load() is not None or handle is None:
        return None
    info: dict[str, Any] = json.loads(handle.flashsci_build_info().decode())
    return info


@functools.cache
def fills_results() -> bool:
    """Whether this is a debug build, whose ops fill results with NaN before kernels overwrite them
    (csrc/core/poison.cuh)."""
    return any("-poison" in digest for digest in (build_info() or {"units": {}})["units"].values())


def stale() -> str | None:
    """Why the loaded library differs from the source tree, or None; `check` refuses a stale one."""
    from flashsci.digest import cuda_units

    info, tree = build_info(), cuda_units()
    if info is None or not tree:
        return None
    differ = [name for name, digest in info["units"].items() if tree.get(name) != digest]
    if differ:
        return (
            f"the CUDA library was built from other sources than the tree holds ({', '.join(differ)}); build it again"
        )
    return None


def unavailable() -> str | None:
    """Why the backend cannot run on this machine at all, or None."""
    global _driver, _driver_asked
    problem = load()
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
    with tracer_paused():  # torch.jit.trace records no op that gives a bool
        has_cuda = torch.ops.flashsci.sees_torch_cuda()
    if not has_cuda:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (no GPU, or no working NVIDIA driver)"
    assert handle is not None
    reason = handle.flashsci_driver_problem()
    if reason is None:
        return None
    nvcc = json.loads(handle.flashsci_build_info().decode())["nvcc"]
    return (
        f"the CUDA library, built with nvcc {nvcc}, cannot use this machine's driver "
        f"({reason.decode()}); update the driver or build flashsci with an older toolkit"
    )


@functools.lru_cache(maxsize=1)
def _sources() -> dict[str, Any]:
    from flashsci.digest import cuda_units

    return {"archs": ["75", "80", "90"], "units": cuda_units()}


def described() -> dict[str, Any]:
    """`build_info`, or the contents of a full build of the source tree if none was made (`unavailable` says so
    first)."""
    return build_info() or _sources()
