"""The torch-free launchers of kernel units by ctypes: several builds of a unit in one process.

They run before the bindings know them.

    nvcc -shared -Xcompiler -fPIC -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a csrc/sm90/*/bf16.cu -o new.so
    python -m tools.kernels.time_builds base=base.so new=new.so@128 --case af3-pair

A build is given as `name=path`, or `name=path@64+128` for those head dims only. In a library with several
generations the newest counts, except for a name that starts with another (sm80...). A name that starts with det
asks for deterministic gradients, one that starts with static launches forwards without workspace. On Hopper sm75's
kernels run from their PTX (`-gencode arch=compute_75,code=compute_75`) or compiled from it (`code=sm_90`).
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashsci import errors
from flashsci.call import kinds
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_K,
    NEED_Q,
    NEED_V,
    Saved,
    Scalars,
    Tensors,
    empty_like_layout,
)
from flashsci.choice import backends

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FOLDERS = ("sm90", "sm80", "sm75", "small")
ALIBI_SLOPES = 3  # a value of bias_is_fp32 (csrc/include/flashsci_alibi.h)
NOT_SUPPORTED = 801  # cudaErrorNotSupported: left to an older generation


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Strides(c.Structure):
    _fields_ = _fields(c.c_int64, "batch0 batch1 head row")


class ScoreStrides(c.Structure):
    _fields_ = _fields(c.c_int64, "batch0 batch1 head row column")


class BiasMask(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "bias mask"),
        *_fields(ScoreStrides, "bias_strides mask_strides"),
        *_fields(c.c_int32, "bias_is_fp32 capped"),
    ]


class ForwardParams(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "q k v out lse cu_seqlens_q cu_seqlens_k"),
        *_fields(Strides, "q_strides k_strides v_strides out_strides"),
        *_fields(BiasMask, "bias_mask"),
        *_fields(c.c_int64, "batch0 batch1"),
        *_fields(c.c_int32, "heads_q heads_k seq_q seq_k num_seqs max_seqlen_q"),
        *_fields(c.c_int32, "head_dim head_dim_v"),
        *_fields(c.c_float, "scale softcap"),
        *_fields(c.c_int32, "window_left window_right lower_right precision copy_bytes"),
        *_fields(c.c_int32, "device shared_per_sm"),
        *_fields(c.c_void_p, "workspace"),
    ]


class BackwardParams(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "q k v out dout lse dlse dq dk dv dbias workspace"),
        *_fields(c.c_void_p, "cu_seqlens_q cu_seqlens_k"),
        *_fields(Strides, "q_strides k_strides v_strides out_strides dout_strides dlse_strides"),
        *_fields(Strides, "dq_strides dk_strides dv_strides"),
        *_fields(BiasMask, "bias_mask"),
        *_fields(ScoreStrides, "dbias_strides"),
        *_fields(c.c_int64, "batch0 batch1"),
        *_fields(c.c_int32, "heads_q heads_k seq_q seq_k num_seqs max_seqlen_q max_seqlen_k"),
        *_fields(c.c_int32, "head_dim head_dim_v"),
        *_fields(c.c_float, "scale softcap"),
        *_fields(c.c_int32, "window_left window_right lower_right deterministic precision"),
        *_fields(c.c_int32, "copy_bytes device shared_per_sm"),
    ]


class Dropout(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "seed"),
        *_fields(c.c_uint32, "threshold"),
        *_fields(c.c_float, "keep_scale"),
    ]


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _strides(x: Tensor | None, last: bool = True) -> Strides:
    """Strides as [B0, B1, H, S, D]; missing dims have stride 0. last=False: x has no D (an lse)."""
    if x is None:
        return Strides()
    step = x.stride()[:-1] if last else x.stride()
    return Strides(*(0,) * (4 - len(step)), *step)


def _score_strides(x: Tensor | None) -> ScoreStrides:
    if x is None:
        return ScoreStrides()
    step = [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return ScoreStrides(*(0,) * (5 - len(step)), *step)


def _copy_bytes(*tensors: Tensor | None) -> int:
    bits = 16
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
            for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True):
                bits |= s * x.element_size() if n > 1 else 0
    return bits & -bits


Run = Callable[[], None]


class Build:
    """One shared object: prepared launches (q [B.., H, S, D], or packed [H, T, D] with `cu`), and a backend module (flashsci/backends)."""

    FUSED = True
    READS: ClassVar = {kinds.ATTENTION: frozenset(("q", "k", "v", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k"))}

    def __init__(self, given: str):
        self.name, _, path = given.partition("=")
        path, _, dims = path.partition("@")
        self.dims = [int(x) for x in dims.split("+") if x]
        self.deterministic = self.name.startswith("det")
        library = c.CDLL(str(Path(path).resolve()))
        folders = [f for f in FOLDERS if self.name.startswith(f)] or FOLDERS
        self.functions: dict[tuple[str, torch.dtype], tuple[Any, Any]] = {}  # launch, workspace
        self.folders: dict[tuple[str, torch.dtype], str] = {}
        for kind in ("forward", "backward"):
            for dtype, suffix in DTYPES.items():
                for folder in folders:
                    symbol = f"flashsci_{kind}_{folder}_{suffix}"
                    launch = getattr(library, symbol, None)
                    if launch is not None:
                        size = getattr(library, f"{symbol}_workspace", None)
                        if size is not None:
                            size.restype = c.c_int64
                        self.functions[kind, dtype] = launch, size
                        self.folders[kind, dtype] = folder
                        break
        if not self.functions:
            raise SystemExit(f"{path} has no launcher of {', '.join(folders)}")

    def dtypes(self, kind: str) -> list[torch.dtype]:
        """Whether the build has the pass ("forward" or "backward")."""
        return [dtype for found, dtype in self.functions if found == kind]

    def _params(
        self,
        kind: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Tensor | None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        cu: tuple[Tensor, Tensor] | None = None,
        longest: tuple[int, int] = (-1, -1),
        scale: float | None = None,
        softcap: float = 0.0,
        window: tuple[int, int] = (-1, -1),
        lower_right: bool = False,
        tf32: bool = False,
    ) -> Any:
        """The fields that forward and backward have in common, filled in; others: tensors whose alignment also
        matters."""
        batch0, batch1, heads_q, seq_q, head_dim = (1,) * (5 - q.dim()) + q.shape
        p = kind(
            q=_pointer(q), k=_pointer(k), v=_pointer(v),
            cu_seqlens_q=_pointer(cu and cu[0]), cu_seqlens_k=_pointer(cu and cu[1]),
            q_strides=_strides(q), k_strides=_strides(k), v_strides=_strides(v),
            bias_mask=BiasMask(
                _pointer(bias), _pointer(mask), _score_strides(bias), _score_strides(mask),
                int(bias is not None and bias.dtype == torch.float32),
            ),
            batch0=batch0, batch1=batch1,
            heads_q=heads_q, heads_k=k.shape[-3] if k.dim() > 2 else 1,
            seq_q=seq_q, seq_k=k.shape[-2],
            num_seqs=cu[0].numel() - 1 if cu else 0,
            max_seqlen_q=longest[0], head_dim=head_dim, head_dim_v=v.shape[-1],
            scale=q.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap,
            window_left=min(window[0], 2**31 - 1), window_right=min(window[1], 2**31 - 1),
            lower_right=int(lower_right), precision=int(tf32),
            copy_bytes=_copy_bytes(q, k, v, *others), device=q.device.index,
            shared_per_sm=torch.cuda.get_device_properties(q.device).shared_memory_per_multiprocessor,
        )  # fmt: skip
        if kind is BackwardParams:
            p.max_seqlen_k = longest[1]
        return p

    def _launch(self, kind: str, p: Any, q: Tensor, *keep: Any) -> Run:
        launch, size = self.functions[kind, q.dtype]
        bytes_ = 0 if size is None or self.name.startswith("static") else size(c.byref(p))
        workspace = torch.empty(max(bytes_, 1), dtype=torch.uint8, device=q.device)
        p.workspace = _pointer(workspace) if bytes_ or kind == "backward" else None

        def run(keep: Any = (q, workspace, *keep)) -> None:  # the tensors must live as long as it
            with torch.cuda.device(q.device):
                error = launch(c.byref(p), c.c_void_p(torch.cuda.current_stream().cuda_stream))
            if error == NOT_SUPPORTED:
                raise errors.BackendError(f"{self.name} leaves this to an older generation")
            if error:
                raise RuntimeError(f"{self.name}: cudaError {error}")

        return run

    def forward_launch(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Run, Tensor, Tensor]:
        """(run, out, lse); run fills them."""
        out = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]))
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        p = self._params(ForwardParams, q, k, v, **options)
        p.out, p.lse, p.out_strides = _pointer(out), _pointer(lse), _strides(out)
        return self._launch("forward", p, q, k, v, out, lse, options), out, lse

    def backward_launch(
        self,
        dout: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        dlse: Tensor | None = None,
        need: int = NEED_Q | NEED_K | NEED_V | NEED_BIAS,
        deterministic: bool = False,
        **options: Any,
    ) -> tuple[Run, Tensor, Tensor, Tensor, Tensor]:
        """(run, dq, dk, dv, dbias); those that are not needed are empty."""
        bias, none = options.get("bias"), q.new_empty(0)
        p = self._params(BackwardParams, q, k, v, out, dout, **options)
        p.out, p.out_strides = _pointer(out), _strides(out)
        p.dout, p.dout_strides = _pointer(dout), _strides(dout)
        p.lse, p.dlse, p.dlse_strides = _pointer(lse), _pointer(dlse), _strides(dlse, last=False)
        p.deterministic = int(deterministic or self.deterministic)
        gradients = []
        for name, like, bit in (("dq", q, NEED_Q), ("dk", k, NEED_K), ("dv", v, NEED_V)):
            gradients.append(empty_like_layout(like, like.shape) if need & bit else none)
            if need & bit:
                setattr(p, name, _pointer(gradients[-1]))
                setattr(p, f"{name}_strides", _strides(gradients[-1]))
        gradients.append(none)
        if bias is not None and need & NEED_BIAS:
            gradients[-1] = torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
            p.dbias, p.dbias_strides = _pointer(gradients[-1]), _score_strides(gradients[-1])
        keep = (k, v, dout, out, lse, dlse, gradients, options)
        return self._launch("backward", p, q, *keep), *gradients

    # The module of a backend, which `install` makes of it:

    def unavailable(self) -> None:
        return None

    def rejects(self, problem: Any) -> str | None:
        passes = ("forward", "backward")[problem.requires_grad :]  # without a forward: Triton's
        if all((kind, problem.dtype) not in self.functions for kind in passes):
            return f"{self.name} is not compiled for {problem.dtype}"
        unknown = problem.dropout_p or problem.key_weight or problem.alibi or problem.caps_bias
        if unknown or (problem.varlen and problem.bias):
            return f"{self.name} has neither dropout, nor key weights, nor ALiBi, nor a softcap of biased scores, nor a packed bias"
        if self.dims and max(problem.head_dim, problem.head_dim_v) not in self.dims:
            return f"{self.name} was given for head dims {self.dims}"
        return None

    def forward(self, tensors: Tensors, scalars: Scalars) -> tuple[Tensor, Tensor]:
        q, k, v = tensors[:3]
        if ("forward", q.dtype) not in self.functions:
            from flashsci.backends import triton

            return triton.forward(tensors, scalars)
        run, out, lse = self.forward_launch(q, k, v, **_options(tensors, scalars))
        run()
        return out, lse

    def backward(self, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int) -> tuple[Tensor, ...]:
        tensors, out, lse, scalars = saved
        if dout is not None and dout.stride(-1) != 1:
            dout = dout.contiguous()
        run, *gradients = self.backward_launch(
            dout, *tensors[:3], out, lse.contiguous(), dlse=dlse, need=need,
            deterministic=scalars.deterministic, **_options(tensors, scalars),
        )  # fmt: skip
        run()
        return *gradients, tensors[0].new_empty(0)


def _options(tensors: Tensors, scalars: Scalars) -> dict[str, Any]:
    """The options of a launch."""
    _, _, _, bias, _, mask, cu_q, cu_k, *_ = tensors
    max_q, max_k, scale, softcap, left, right, lower_right, _, precision, *_ = scalars
    return {
        "bias": bias,
        "mask": mask,
        "cu": None if cu_q is None else (cu_q, cu_k),
        "longest": (max_q, max_k),
        "scale": scale,
        "softcap": softcap,
        "window": (left, right),
        "lower_right": lower_right,
        "tf32": precision == "tf32",
    }


class _Installed(backends.Backend):
    """A backend whose module is at hand."""

    def load(self) -> Any:
        return backends.LOADED[backends.ATTENTION][self.name]


def install(given: str) -> Build:
    """Make a build a backend of this process, in place of the package's backend of that name, if there is one."""
    build = Build(given)
    backends.LOADED[backends.ATTENTION][build.name] = build
    backends.BACKENDS[build.name] = _Installed(build.name, "")
    return build
