"""What a case can be run by: flashsci's backends, every kernel of PyTorch's SDPA, and compiled
FlexAttention.

A candidate turns the inputs of a case into a function of no arguments that returns the output, or
raises `Unsupported` with the reason. What an API needs per call (merging bias and mask for SDPA,
say) is inside the timed function; what a user would prepare once (FlexAttention's block mask,
padding indices) is not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashsci
from flashsci.backends import reference
from flashsci.bench.cases import Case
from flashsci.problem import Problem

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SDPA_KERNELS: dict[str, SDPBackend | None] = {
    "default": None,  # what torch picks by itself
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
OURS = ("reference", "sdpa", "triton", "cuda", "auto")
BASELINES = (*(f"sdpa:{kernel}" for kernel in SDPA_KERNELS), "flex")


class Unsupported(Exception):
    """This candidate cannot run this case; the message says why."""


@dataclass
class Inputs:
    """The tensors of a case. Packed cases hold q, k, v as [T, H, D] with `cu_seqlens`."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    dout: Tensor
    leaves: dict[str, Tensor] = field(default_factory=dict)  # what gradients are taken of, by name


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Random inputs of a case, the same for everyone; leaves require gradients if the case has
    any."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def randn(shape, dtype=dtype):
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    if case.lens:
        total = sum(case.lens)
        shapes = [(total, case.H, case.D), (total, case.Hk, case.D), (total, case.Hk, case.Dv)]
        ends = torch.tensor((0, *case.lens)).cumsum(0)
        cu_seqlens = ends.to(device=device, dtype=torch.int32)
    else:
        cu_seqlens = None
        shapes = [
            (*case.batch, case.H, case.Sq, case.D),
            (*case.batch, case.Hk, case.Sk, case.D),
            (*case.batch, case.Hk, case.Sk, case.Dv),
        ]
    q, k, v = (randn(shape) for shape in shapes)
    bias = mask = None
    if case.bias == "ragged":
        bias = randn((case.H, sum(s * s for s in case.lens)), DTYPES[case.bias_dtype])
    elif case.bias is not None:
        bias = randn(case.bias).to(DTYPES[case.bias_dtype])  # SDPA must round it to q's dtype
    if case.mask is not None:
        # Padding, as in practice: the first keys of every row are real, the rest are not.
        real = torch.randint(
            case.Sk // 2, case.Sk + 1, (*case.mask[:-1], 1), device=device, generator=generator
        )
        mask = torch.arange(case.Sk, device=device) < real
    inputs = Inputs(case, q, k, v, bias, mask, cu_seqlens, randn((*q.shape[:-1], case.Dv)))
    if case.order > 0:
        inputs.leaves = {"q": q, "k": k, "v": v}
        if bias is not None and case.bias_grad:
            inputs.leaves["bias"] = bias
        for leaf in inputs.leaves.values():
            leaf.requires_grad_()
    return inputs


def problems(case: Case, device: torch.device) -> list[tuple[Problem, int]]:
    """The case as `Problem`s with multiplicities (packed: one for each length), to count FLOPs."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    left, right = case.window or (-1, -1)
    common = {
        "device_type": device.type,
        "capability": capability,
        "dtype": DTYPES[case.dtype],
        "heads_q": case.H,
        "heads_k": case.Hk,
        "head_dim": case.D,
        "head_dim_v": case.Dv,
        "window_left": left,
        "window_right": 0 if case.causal else right,
        "bias_dtype": DTYPES[case.bias_dtype] if case.bias else None,
        "bias_grad": case.bias_grad,
        "mask": case.mask is not None,
    }
    if not case.lens:
        bias = case.bias if isinstance(case.bias, tuple) else None
        return [
            (Problem(batch=case.batch, seq_q=case.Sq, seq_k=case.Sk, bias_shape=bias, **common), 1)
        ]
    return [
        (
            Problem(
                batch=(1,),
                seq_q=s,
                seq_k=s,
                bias_shape=(case.H, s, s) if case.bias == "ragged" else None,
                **common,
            ),
            case.lens.count(s),
        )
        for s in sorted(set(case.lens))
    ]


def flops(case: Case, device: torch.device, order: int) -> int:
    return sum(n * problem.flops(order) for problem, n in problems(case, device))


def bytes_moved(case: Case, device: torch.device, order: int) -> int:
    return sum(n * problem.bytes(order) for problem, n in problems(case, device))


def candidate(name: str, inputs: Inputs) -> Callable[[], Tensor]:
    """The forward of `name` on these inputs, as a function without arguments."""
    if name in OURS:
        return _ours(name, inputs)
    if name.startswith("sdpa:") and name[5:] in SDPA_KERNELS:
        return (_sdpa_packed if inputs.case.lens else _sdpa)(SDPA_KERNELS[name[5:]], inputs)
    if name == "flex":
        return _flex(inputs)
    raise ValueError(f"no candidate named {name!r}; there are {', '.join(OURS + BASELINES)}")


def _ours(name: str, x: Inputs) -> Callable[[], Tensor]:
    options = {"bias": x.bias, "causal": x.case.causal, "window": x.case.window, "backend": name}
    if x.cu_seqlens is None:
        call = partial(flashsci.attention, x.q, x.k, x.v, mask=x.mask, **options)
    else:
        longest = {"max_seqlen_q": max(x.case.lens), "max_seqlen_k": max(x.case.lens)}
        call = partial(flashsci.varlen_attention, x.q, x.k, x.v, x.cu_seqlens, **longest, **options)
    try:
        # Strict once is enough, and keeps `use_backend` out of host timings: the choice is cached.
        with flashsci.use_backend(name, strict=True):
            call()
    except flashsci.BackendError as error:
        why = str(error).removeprefix(f"backend {name!r} cannot serve this call: ")
        raise Unsupported(why.split("; these can:")[0]) from error
    return call


def _collapsed(x: Tensor | None, batch: tuple[int, ...]) -> Tensor | None:
    """[B, N, H, S, D] as [B * N, H, S, D]; a broadcast leading dim is expanded only if it must
    be."""
    if x is None or len(batch) == 1:
        return x
    leading = x.shape[:2]
    if leading.numel() > 1:
        x = x.expand(*batch, *x.shape[2:])
    return x.reshape(-1, *x.shape[2:])


def _only(kernel: SDPBackend | None):
    return nullcontext() if kernel is None else sdpa_kernel(kernel)


def _sdpa(kernel: SDPBackend | None, x: Inputs) -> Callable[[], Tensor]:
    case = x.case
    if case.window is not None and kernel != SDPBackend.MATH:
        raise Unsupported("SDPA has no sliding window")
    scores = math.prod(case.batch) * case.H * case.Sq * case.Sk * x.q.dtype.itemsize
    if kernel == SDPBackend.MATH and scores > 1 << 33:
        raise Unsupported(f"it holds every score: {scores / 2**30:.0f} GiB of them")
    plain_causal = case.causal and case.window is None and x.bias is None and x.mask is None
    left, right = case.window or (-1, -1)
    keep = None
    if not plain_causal:
        right = 0 if case.causal else right
        keep = reference.visible(case.Sq, case.Sk, left, right, False, x.q.device)
        if x.mask is not None:
            keep = x.mask if keep is None else keep & x.mask

    def call() -> Tensor:
        merged = keep
        if x.bias is not None:
            merged = x.bias.to(x.q.dtype)
            if keep is not None:
                merged = merged.masked_fill(~keep, float("-inf"))
        if merged is not None and merged.dim() < 4:
            merged = merged[None, None]
        q, k, v, merged = (_collapsed(t, case.batch) for t in (x.q, x.k, x.v, merged))
        if merged is not None:
            # The kernels take stride-0 dims, but want all four of them at full size.
            merged = merged.expand(q.shape[0], case.H, case.Sq, case.Sk)
        with _only(kernel):
            out = scaled_dot_product_attention(
                q, k, v, merged, is_causal=plain_causal, enable_gqa=case.Hk != case.H
            )
        return out.reshape((*x.q.shape[:-1], case.Dv))

    return _refusal_as_reason(call)


def _sdpa_packed(kernel: SDPBackend | None, x: Inputs) -> Callable[[], Tensor]:
    """Packed sequences as users of SDPA have them: jagged nested tensors, or padded where a bias is
    involved."""
    case, n, longest = x.case, len(x.case.lens), max(x.case.lens)
    if x.bias is None:
        offsets = x.cu_seqlens.long()

        def call() -> Tensor:
            q, k, v = (
                torch.nested.nested_tensor_from_jagged(
                    t, offsets, min_seqlen=min(case.lens), max_seqlen=longest
                ).transpose(1, 2)
                for t in (x.q, x.k, x.v)
            )
            with _only(kernel):
                out = scaled_dot_product_attention(q, k, v, is_causal=case.causal)
            return out.transpose(1, 2).values()

        return _refusal_as_reason(call)
    if case.causal:
        raise Unsupported("padded SDPA with bias and causal is not written")
    device = x.q.device
    lengths = torch.tensor(case.lens, device=device)
    real = torch.arange(longest, device=device) < lengths[:, None]  # [N, S]
    pairs = real[:, :, None] & real[:, None, :]  # [N, S, S], in the order of the ragged blocks
    hidden = ~real[:, None, None, :]

    def padded() -> Tensor:
        def pad(t: Tensor) -> Tensor:  # [T, H, D] -> [N, H, S, D]
            full = t.new_zeros(n, longest, *t.shape[1:])
            return full.masked_scatter(real[:, :, None, None], t).transpose(1, 2)

        bias = x.bias.new_zeros(case.H, n, longest, longest)
        bias = bias.masked_scatter(pairs, x.bias).transpose(0, 1).to(x.q.dtype)
        with _only(kernel):
            out = scaled_dot_product_attention(
                pad(x.q), pad(x.k), pad(x.v), bias.masked_fill(hidden, float("-inf"))
            )
        return out.transpose(1, 2)[real]

    return _refusal_as_reason(padded)


def _refusal_as_reason(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run once; SDPA explains a refusal in warnings and then raises 'No available kernel'."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            said = [str(w.message).split(" (Triggered")[0] for w in caught]
            idle = ("because:", "not used", "runtime disabled")
            said = [s for s in said if not any(i in s for i in idle)] or [str(error)]
            raise Unsupported(said[-1].splitlines()[0]) from error
    return call


def _flex(x: Inputs) -> Callable[[], Tensor]:
    case = x.case
    if case.lens:
        raise Unsupported("FlexAttention on packed sequences is not part of this comparison")
    if x.q.device.type != "cuda":
        raise Unsupported("FlexAttention is compared on GPUs only")
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    config.donated_buffer = False  # the backward is timed with retain_graph=True
    batch = math.prod(case.batch)
    inner = case.batch[1] if len(case.batch) == 2 else 1
    left, right = case.window or (-1, -1)
    right = 0 if case.causal else right

    def at(t: Tensor, b, h, i, j):
        """t[b, h, i, j] of a tensor that broadcasts, as score_mod and mask_mod must write it."""
        where = (b // inner, b % inner, h, i, j) if t.dim() == 5 else (b, h, i, j)
        zero = b * 0
        return t[tuple(w if size > 1 else zero for w, size in zip(where, t.shape, strict=True))]

    def visible(b, h, i, j):
        keep = b == b
        if left >= 0:
            keep = keep & (j - i >= -left)
        if right >= 0:
            keep = keep & (j - i <= right)
        if x.mask is not None:
            keep = keep & at(x.mask, b, h, i, j)
        return keep

    score_mod = None
    if x.bias is not None:

        def score_mod(score, b, h, i, j):
            return score + at(x.bias, b, h, i, j)

    block_mask = None
    if left >= 0 or right >= 0 or x.mask is not None:
        per_batch = batch if x.mask is not None else None
        block_mask = create_block_mask(
            visible, per_batch, None, case.Sq, case.Sk, device=x.q.device
        )
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        q, k, v = (_collapsed(t, case.batch) for t in (x.q, x.k, x.v))
        out = compiled(
            q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=case.Hk != case.H
        )
        return out.reshape((*x.q.shape[:-1], case.Dv))

    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler's own errors have no common base class
        raise Unsupported(f"FlexAttention: {str(error).strip().splitlines()[0]}") from error
    return call
