"""The torch-free launchers of one kernel unit as a backend, by ctypes: what is tried on a GPU before the bindings know it.

nvcc -shared -Xcompiler -fPIC -std=c++17 -O3 -gencode arch=compute_75,code=sm_90 csrc/sm75/*_fp16.cu -o sm75.so
install("sm75", "sm75.so", "sm75_fp16", torch.float16)
flashsci.attention(q, k, v, backend="sm75")
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashsci import registry
from flashsci.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, empty_like_layout


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Strides(c.Structure):
    _fields_ = _fields(c.c_int64, "batch0 batch1 head row")


class PairStrides(c.Structure):
    _fields_ = _fields(c.c_int64, "batch0 batch1 head row column")


class Pairs(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "bias mask"),
        *_fields(PairStrides, "bias_strides mask_strides"),
        *_fields(c.c_int32, "bias_is_fp32"),
    ]


class ForwardParams(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "q k v out lse cu_seqlens_q cu_seqlens_k"),
        *_fields(Strides, "q_strides k_strides v_strides out_strides"),
        *_fields(Pairs, "pairs"),
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
        *_fields(Pairs, "pairs"),
        *_fields(PairStrides, "dbias_strides"),
        *_fields(c.c_int64, "batch0 batch1"),
        *_fields(c.c_int32, "heads_q heads_k seq_q seq_k num_seqs max_seqlen_q max_seqlen_k"),
        *_fields(c.c_int32, "head_dim head_dim_v"),
        *_fields(c.c_float, "scale softcap"),
        *_fields(c.c_int32, "window_left window_right lower_right deterministic precision"),
        *_fields(c.c_int32, "copy_bytes device shared_per_sm"),
    ]


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _strides(x: Tensor | None, last: bool = True) -> Strides:
    """Of [B0, B1, H, S, D]; missing dims have stride 0. last=False: x has no D (an lse)."""
    if x is None:
        return Strides()
    step = x.stride()[:-1] if last else x.stride()
    return Strides(*(0,) * (4 - len(step)), *step)


def _pair_strides(x: Tensor | None) -> PairStrides:
    if x is None:
        return PairStrides()
    step = [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return PairStrides(*(0,) * (5 - len(step)), *step)


def _copy_bytes(*tensors: Tensor | None) -> int:
    bits = 16
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
            for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True):
                bits |= s * x.element_size() if n > 1 else 0
    return bits & -bits


class Launchers:
    """A backend module (flashsci/backends) of one unit, such as sm75_fp16."""

    FUSED = True

    def __init__(
        self,
        path: str,
        unit: str,
        dtype: torch.dtype,
        max_dim: int = 256,
        max_dim_backward: int = 256,
    ):
        self.unit, self.dtype = unit, dtype
        self.limits = max_dim, max_dim_backward
        library = c.CDLL(str(Path(path).resolve()))
        self.launch_forward = getattr(library, f"flashsci_forward_{unit}")
        self.launch_backward = getattr(library, f"flashsci_backward_{unit}", None)
        if self.launch_backward is not None:
            self.workspace = getattr(library, f"flashsci_backward_{unit}_workspace")
            self.workspace.restype = c.c_int64

    def unavailable(self) -> str | None:
        return None

    def rejects(self, problem: Any) -> str | None:
        if problem.dtype != self.dtype:
            return f"{self.unit} is compiled for {self.dtype}"
        if problem.dropout_p or problem.key_weight or (problem.varlen and problem.bias):
            return f"{self.unit} has neither dropout nor a packed bias"
        limit = self.limits[problem.requires_grad]
        if max(problem.head_dim, problem.head_dim_v) > limit:
            return f"{self.unit} ends at head dim {limit} here"
        if problem.requires_grad and self.launch_backward is None:
            return f"{self.unit} has no backward"
        return None

    def params(self, kind: Any, tensors: tuple[Any, ...], scalars: tuple[Any, ...]) -> Any:
        """What forward and backward have in common, filled in."""
        q, k, v, bias, _, mask, cu_q, cu_k, _, _ = tensors
        max_q, max_k, scale, softcap, left, right, lower_right, _, precision, _ = scalars
        batch0, batch1, heads_q, seq_q, head_dim = (1,) * (5 - q.dim()) + q.shape
        p = kind(
            q=_pointer(q), k=_pointer(k), v=_pointer(v),
            cu_seqlens_q=_pointer(cu_q), cu_seqlens_k=_pointer(cu_k),
            q_strides=_strides(q), k_strides=_strides(k), v_strides=_strides(v),
            pairs=Pairs(
                _pointer(bias), _pointer(mask), _pair_strides(bias), _pair_strides(mask),
                int(bias is not None and bias.dtype == torch.float32),
            ),
            batch0=batch0, batch1=batch1,
            heads_q=heads_q, heads_k=k.shape[-3] if k.dim() > 2 else 1,
            seq_q=seq_q, seq_k=k.shape[-2],
            num_seqs=0 if cu_q is None else cu_q.numel() - 1,
            max_seqlen_q=max_q, head_dim=head_dim, head_dim_v=v.shape[-1],
            scale=scale, softcap=softcap,
            window_left=min(left, 2**31 - 1), window_right=min(right, 2**31 - 1),
            lower_right=int(lower_right), precision=int(precision == "tf32"),
            device=q.device.index,
            shared_per_sm=torch.cuda.get_device_properties(q.device).shared_memory_per_multiprocessor,
        )  # fmt: skip
        if kind is BackwardParams:
            p.max_seqlen_k = max_k
        return p

    def check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"{self.unit}: cudaError {error}")

    def stream(self) -> c.c_void_p:
        return c.c_void_p(torch.cuda.current_stream().cuda_stream)

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        tensors, scalars = arguments[:10], arguments[10:]
        q, k, v = tensors[:3]
        out = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]))
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        with torch.cuda.device(q.device):
            p = self.params(ForwardParams, tensors, scalars)
            p.out, p.lse, p.out_strides = _pointer(out), _pointer(lse), _strides(out)
            p.copy_bytes = _copy_bytes(q, k, v)
            self.check(self.launch_forward(c.byref(p), self.stream()))
        return out, lse

    def backward(self, dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        tensors, (out, lse), scalars, need = rest[:10], rest[10:12], rest[12:-1], rest[-1]
        q, k, v, bias = tensors[:4]
        if dout is not None and dout.stride(-1) != 1:
            dout = dout.contiguous()
        lse = lse.contiguous()

        def gradient(like: Tensor, bit: int) -> Tensor:
            return empty_like_layout(like, like.shape) if need & bit else like.new_empty(0)

        dq, dk, dv = gradient(q, NEED_Q), gradient(k, NEED_K), gradient(v, NEED_V)
        want_bias = bias is not None and need & NEED_BIAS
        dbias = (
            torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
            if want_bias
            else q.new_empty(0)
        )
        with torch.cuda.device(q.device):
            p = self.params(BackwardParams, tensors, scalars)
            for name, x in (("out", out), ("dout", dout)):
                setattr(p, name, _pointer(x))
                setattr(p, f"{name}_strides", _strides(x))
            p.lse, p.dlse = _pointer(lse), _pointer(dlse)
            p.dlse_strides = _strides(dlse, last=False)
            for name, x, bit in (("dq", dq, NEED_Q), ("dk", dk, NEED_K), ("dv", dv, NEED_V)):
                if need & bit:
                    setattr(p, name, _pointer(x))
                    setattr(p, f"{name}_strides", _strides(x))
            if want_bias:
                p.dbias, p.dbias_strides = _pointer(dbias), _pair_strides(dbias)
            p.deterministic = int(scalars[-1])
            p.copy_bytes = _copy_bytes(q, k, v, out, dout)
            size = self.workspace(c.byref(p))
            workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=q.device)
            p.workspace = _pointer(workspace)
            self.check(self.launch_backward(c.byref(p), self.stream()))
        return dq, dk, dv, dbias, q.new_empty(0)


class _Installed(registry.Backend):
    """A backend whose module is at hand."""

    def load(self) -> Any:
        return registry.LOADED[self.name]


def install(name: str, path: str, unit: str, dtype: torch.dtype, **limits: int) -> Launchers:
    """Make the launchers of a shared object a backend of this process."""
    launchers = Launchers(path, unit, dtype, **limits)
    registry.LOADED[name] = launchers  # type: ignore[assignment]
    registry.BACKENDS[name] = _Installed(name, "")
    return launchers
