"""The peers of flashsci: every kernel of PyTorch's SDPA, the formula in plain PyTorch, compiled
FlexAttention, cuEquivariance, TurboPairFormer. (FlashAttention-3 is in fa3.py.)

Work that an API needs per call (merging bias and mask for SDPA, say) is inside the timed function; data that
a user would prepare once (FlexAttention's block mask, padding indices) is outside.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashsci.backends import reference
from tools.bench.inputs import Inputs, Unsupported

SDPA_KERNELS: dict[str, SDPBackend | None] = {
    "default": None,  # torch's own choice
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def collapsed(x: Tensor | None, batch: tuple[int, ...]) -> Tensor | None:
    """[B, N, H, S, D] as [B * N, H, S, D]; a broadcast leading dim is expanded only if it must
    be."""
    if x is None or len(batch) == 1:
        return x
    leading = x.shape[:2]
    if leading.numel() > 1:
        x = x.expand(*batch, *x.shape[2:])
    return x.reshape(-1, *x.shape[2:])


def only(kernel: SDPBackend | None):
    return nullcontext() if kernel is None else sdpa_kernel(kernel)


def sdpa(name: str, x: Inputs) -> Callable[[], Tensor]:
    """SDPA held to one of its kernels, by a name of SDPA_KERNELS."""
    return (_sdpa_packed if x.case.lens else _sdpa)(SDPA_KERNELS[name], x)


def _fits(x: Inputs) -> None:
    """Refuse methods that store all scores if these are more than a few GiB."""
    case = x.case
    scores = math.prod(case.batch) * case.H * case.Sq * case.Sk * x.q.dtype.itemsize
    if scores > 1 << 33:
        raise Unsupported(f"it holds every score: {scores / 2**30:.0f} GiB of them")


def plain_math(x: Inputs) -> Callable[[], Tensor]:
    """softmax(q k^T scale + bias) v as a model's author would write it: eager, in the inputs' dtype."""
    case = x.case
    if case.lens:
        raise Unsupported("plain PyTorch has no packed sequences")
    _fits(x)
    left, right = case.window or (-1, -1)
    right = 0 if case.causal else right
    keep = reference.visible(case.Sq, case.Sk, left, right, False, x.q.device)
    if x.mask is not None:
        keep = x.mask if keep is None else keep & x.mask

    def heads(t: Tensor) -> Tensor:
        return t if case.Hk == case.H else t.repeat_interleave(case.H // case.Hk, -3)

    def call() -> Tensor:
        scores = x.q @ heads(x.k).mT * case.D**-0.5
        if x.bias is not None:
            scores = scores + x.bias
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        return scores.softmax(-1).to(x.v.dtype) @ heads(x.v)

    call()
    return call


def _sdpa(kernel: SDPBackend | None, x: Inputs) -> Callable[[], Tensor]:
    case = x.case
    if case.window is not None and kernel != SDPBackend.MATH:
        raise Unsupported("SDPA has no sliding window")
    if kernel == SDPBackend.MATH:
        _fits(x)
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
        q, k, v, merged = (collapsed(t, case.batch) for t in (x.q, x.k, x.v, merged))
        if merged is not None:
            # The kernels take stride-0 dims, but want all four of them at full size.
            merged = merged.expand(q.shape[0], case.H, case.Sq, case.Sk)
        with only(kernel):
            out = scaled_dot_product_attention(q, k, v, merged, is_causal=plain_causal, enable_gqa=case.Hk != case.H)
        return out.reshape((*x.q.shape[:-1], case.Dv))

    return _refusal_as_reason(call)


def _sdpa_packed(kernel: SDPBackend | None, x: Inputs) -> Callable[[], Tensor]:
    """Packed sequences in the forms of SDPA's users: jagged nested tensors, or padded if a bias is involved."""
    case, n, longest = x.case, len(x.case.lens), max(x.case.lens)
    if x.bias is None:
        offsets = x.cu_seqlens.long()

        def call() -> Tensor:
            q, k, v = (
                torch.nested.nested_tensor_from_jagged(
                    t.contiguous(), offsets, min_seqlen=min(case.lens), max_seqlen=longest
                ).transpose(1, 2)
                for t in (x.q, x.k, x.v)
            )
            with only(kernel):
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
        with only(kernel):
            out = scaled_dot_product_attention(pad(x.q), pad(x.k), pad(x.v), bias.masked_fill(hidden, float("-inf")))
        return out.transpose(1, 2)[real]

    return _refusal_as_reason(padded)


@contextmanager
def refusals() -> Iterator[None]:
    """A context in which SDPA's refusal is `Unsupported`: it explains one in warnings, and then raises 'No available
    kernel'."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            said = [str(w.message).split(" (Triggered")[0] for w in caught]
            idle = ("because:", "not used", "runtime disabled")
            said = [s for s in said if not any(i in s for i in idle)] or [str(error)]
            raise Unsupported(said[-1].splitlines()[0]) from error


def _refusal_as_reason(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run once, and give SDPA's reason if it refuses."""
    with refusals():
        call()
    return call


def flex(x: Inputs) -> Callable[[], Tensor]:
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
        block_mask = create_block_mask(visible, per_batch, None, case.Sq, case.Sk, device=x.q.device)
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        q, k, v = (collapsed(t, case.batch) for t in (x.q, x.k, x.v))
        out = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=case.Hk != case.H)
        return out.reshape((*x.q.shape[:-1], case.Dv))

    return first_error_as_reason(call)


def _triangle(x: Inputs) -> Callable[[Tensor], Tensor]:
    """Refuse cases that are no triangle attention. Tensors of the case are seen as [B, N, ...], with a bias
    [B, 1, ...] that all N rows share: members with one bias are the rows of one, members with a bias each
    have one row."""
    case = x.case
    if case.lens or x.bias is None or case.causal or case.window or case.Hk != case.H:
        raise Unsupported("it does triangle attention only: dense, with a bias, not causal")
    dim = 0 if x.bias.shape[0] == 1 else 1

    def rows(t: Tensor) -> Tensor:
        return t if t.dim() == 5 else t.unsqueeze(dim)

    if rows(x.bias).shape[1] != 1:
        raise Unsupported("its bias is shared by all rows; this case has one for each")
    if x.mask is not None and rows(x.mask).shape[2:4] != (1, 1):
        raise Unsupported("its mask is one of keys; this case has one of pairs")
    return rows


def cuequivariance(x: Inputs) -> Callable[[], Tensor]:
    """NVIDIA's triangle attention: [B, N, H, S, D] with a bias [B, 1, H, S, S] that all N rows share
    and a mask [B, N, 1, 1, S] of their keys."""
    try:
        from cuequivariance_torch import triangle_attention
    except ImportError as error:
        raise Unsupported(f"{error}; pip install cuequivariance_torch cuequivariance_ops_torch_cu13") from error
    case, rows = x.case, _triangle(x)
    mask = None
    if x.mask is not None:
        mask = rows(x.mask).expand(*rows(x.q).shape[:2], 1, 1, case.Sk).contiguous()

    def call() -> Tensor:
        q, k, v = rows(x.q), rows(x.k), rows(x.v)
        shape = (q.shape[0], 1, case.H, case.Sq, case.Sk)
        out = triangle_attention(q, k, v, bias=rows(x.bias).expand(shape), mask=mask)
        return out.reshape((*x.q.shape[:-1], case.Dv))

    return first_error_as_reason(call)


def turbopairformer(x: Inputs) -> Callable[[], Tensor]:
    """TurboPairFormer's triangle attention, bf16 on Hopper. Its mask is added to the scores, an fp32 bias is rounded to bf16
    and so is its gradient, and out comes as [B, N, S, H, D]."""
    try:
        from turbopairformer import turbo_attention
    except ImportError as error:
        raise Unsupported(f"{error}; pip install turbopairformer, see docs/develop/benchmarks.md") from error
    case, rows = x.case, _triangle(x)
    if case.dtype != "bf16":
        raise Unsupported(f"it has no {case.dtype}")
    if case.Sq != case.Sk:
        raise Unsupported("it has as many keys as queries")
    if case.D > 64 or case.Dv != case.D:
        raise Unsupported("its head dims are at most 64, and D = Dv")
    mask = None
    if x.mask is not None:  # which a model adds up once, for all its layers
        keep = rows(x.mask).expand(*rows(x.q).shape[:2], 1, 1, case.Sk)
        mask = torch.zeros(keep.shape, device=keep.device).masked_fill(~keep, float("-inf"))

    def call() -> Tensor:
        bias = rows(x.bias).expand(-1, 1, case.H, case.Sq, case.Sk)
        out = turbo_attention(rows(x.q), rows(x.k), rows(x.v), mask, bias)
        return out.transpose(-3, -2).reshape(x.q.shape)

    return first_error_as_reason(call)


def first_error_as_reason(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run once; a library's own errors have no common base class."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Unsupported(str(error).strip().splitlines()[0]) from error
    return call
