"""Quantisation to 8-bit floats: scales per tensor, head or block, keys without their mean, and a rotation that
spreads outliers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.call import arguments, transforms
from flashsci.call.fp8_ops import BLOCKS, FP8, MOST
from flashsci.call.ops import interleaved

PER = ("tensor", "head", "block")


class Quantized(NamedTuple):
    """The result of :func:`flashsci.quantize`: ``x = values * scale (+ mean)``, up to the rounding of values."""

    values: Tensor
    """float8_e4m3fn, in the shape and layout of x."""
    scale: Tensor
    """float32, in the form that q_scale, k_scale and v_scale of :func:`flashsci.attention` take."""
    mean: Tensor | None
    """float32 ``[..., H, 1, D]``, packed ``[H, D]``: the mean that ``smooth`` took from every row, before any
    rotation; None without."""


def quantize(
    x: Tensor,
    per: str = "block",
    *,
    block: int = 128,
    smooth: bool = False,
    rotate: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Quantized:
    """Round q, k or v of :func:`flashsci.attention` to float8_e4m3fn, with scales that put the largest number at 448.

    Args:
        x: ``[..., H, S, D]`` (``[S, D]`` is one head), or packed ``[T, H, D]`` with ``cu_seqlens``; float16, bfloat16
            or float32, any strides.
        per: the part that shares a scale: "tensor", all of x; "head", a head of a batch member or sequence; "block",
            ``block`` rows of a head.
        block: 128 or 64 rows; without effect for other values of ``per``.
        smooth: first take the mean over rows (packed: over all rows) from every row. Not for q. For k: a softmax does not
            change when all its scores move by ``scale * <q, mean>``, so out is exact, but the lse is lower by that
            amount: add it where the lse matters (see the examples). Out is not exact under a softcap, which bounds
            scores after they have moved. From SageAttention; it helps if keys share large components. For v: add the mean
            to out, since weights sum to 1; it helps where ``fp8_accumulate="fast"``.
        rotate: multiply every row by an orthogonal matrix: a Hadamard matrix with fixed signs. Rotate q and k
            together: their products do not change. It helps if single columns are much larger than the others
            (QuaRot, FlashAttention-3). If D is no power of two, parts of the largest power of two that divides it are
            rotated.
        cu_seqlens: int32 ``[N + 1]``, as in :func:`flashsci.varlen_attention`; read only on the device.

    Returns:
        (values, scale, mean). values: float8_e4m3fn in x's shape. scale: float32 ``[]``, ``[..., H]`` (packed ``[N, H]``)
        or ``[..., H, ceil(S / block)]`` (packed ``[T // block + N, H]``, numbered as in :func:`flashsci.varlen_attention`).
        mean: float32 ``[..., H, 1, D]`` (packed ``[H, D]``) if ``smooth``, else None.

        A scale is 1 where x has only zeros. NaN and infinite numbers become NaN, and have no part in a scale or a
        mean: a bad row (with ``rotate``, all of it) does not spoil the others.

    Raises:
        TypeError: x of another dtype, or options of another type.
        ValueError: shapes or options that do not fit, or an x that requires grad or has a tangent: rounding has no derivative.

    Examples:
        >>> import torch, flashsci
        >>> q, k, v = torch.randn(3, 2, 4, 200, 64).unbind(0)
        >>> q8, q_scale, _ = flashsci.quantize(q)
        >>> k8, k_scale, mean = flashsci.quantize(k, smooth=True)
        >>> v8, v_scale, _ = flashsci.quantize(v, per="head")
        >>> q_scale.shape, v_scale.shape
        (torch.Size([2, 4, 2]), torch.Size([2, 4]))
        >>> out, lse = flashsci.attention(
        ...     q8, k8, v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True
        ... )
        >>> lse = lse + 64**-0.5 * (q * mean).sum(-1)  # the share of the mean
        >>> exact, exact_lse = flashsci.attention(q, k, v, return_lse=True, backend="reference")
        >>> bool((out - exact).norm() < 0.1 * exact.norm()), bool((lse - exact_lse).abs().max() < 0.1)
        (True, True)

    Source: Shah et al., arXiv:2407.08608 (FlashAttention-3: blocks and rotation); Zhang et al., arXiv:2410.02367 and
        2411.10958 (SageAttention: keys without their mean); Ashkboos et al., arXiv:2404.00456 (QuaRot: rotation).
    """
    _check(x, per, block, cu_seqlens)
    smooth = arguments.flag("smooth", smooth)
    rotate = arguments.flag("rotate", rotate)
    wide, mean = x.float(), None
    rows = -2 if cu_seqlens is None else 0
    if smooth:
        finite = wide.isfinite()
        count = finite.sum(rows, keepdim=True).clamp(min=1)
        mean = torch.where(finite, wide, 0.0).sum(rows, keepdim=True) / count
        wide = wide - mean
        mean = mean if cu_seqlens is None else mean.squeeze(0)
    if rotate:
        part = x.shape[-1] & -x.shape[-1]
        wide = (wide.unflatten(-1, (-1, part)) @ rotation(part, x.device)).flatten(-2)
    # NaN stays NaN; infinity becomes NaN, because e4m3 has no infinity.
    size = torch.where(wide.isfinite(), wide.abs(), 0.0)
    if cu_seqlens is None:
        scale, of_rows = _dense_scales(size, per, block)
    else:
        scale, of_rows = _packed_scales(size, per, block, cu_seqlens)
    values = torch.where(wide.isfinite(), wide / of_rows, torch.nan).to(FP8)
    return Quantized(values, scale, mean)


def _check(x: Tensor, per: str, block: int, cu_seqlens: Tensor | None) -> None:
    arguments.check_type("x", x)
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"x must be float16, bfloat16 or float32, got {x.dtype}; call .float() where its numbers fit")
    transforms.check("quantize", x=x, cu_seqlens=cu_seqlens)
    if per not in PER:
        raise ValueError(f"per must be one of {PER}, got {per!r}")
    if block not in BLOCKS:
        raise ValueError(f"block must be 128 or 64 rows, got {block!r}")
    if cu_seqlens is None:
        if x.dim() < 2:
            raise ValueError(f"x must have at least two dims [S, D], got shape {arguments.shape_of(x)}")
    elif x.dim() != 3:
        raise ValueError(f"packed x must have shape [T, H, D], got {arguments.shape_of(x)}")
    if x.shape[-1] == 0:
        raise ValueError(f"head dims must be at least 1, got shape {arguments.shape_of(x)}")
    if cu_seqlens is not None:
        arguments.check_cu_seqlens("cu_seqlens", cu_seqlens, x)


def _scales(largest: Tensor) -> Tensor:
    """Scales of parts with these largest numbers; never so small that a division by one overflows."""
    least = torch.finfo(torch.float32).smallest_normal
    return torch.where(largest == 0, 1.0, (largest / MOST).clamp(min=least))


def _dense_scales(size: Tensor, per: str, block: int) -> tuple[Tensor, Tensor]:
    """(scales, the same in the form that divides x ``[..., H, S, D]``)."""
    if size.numel() == 0:
        shape = {"tensor": (), "head": size.shape[:-2]}.get(per, (*size.shape[:-2], -(-size.shape[-2] // block)))
        return size.new_ones(shape), size.new_ones(())
    if per == "tensor":
        scale = _scales(size.amax())
        return scale, scale
    if per == "head":
        scale = _scales(size.amax((-2, -1)))
        return scale, scale[..., None, None]
    rows = size.shape[-2]
    blocks = -(-rows // block)
    largest = torch.nn.functional.pad(size.amax(-1), (0, blocks * block - rows))
    scale = _scales(largest.unflatten(-1, (blocks, block)).amax(-1))
    return scale, interleaved(scale, block, -1)[..., :rows, None]


def _packed_scales(size: Tensor, per: str, block: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, the same in the form that divides x ``[T, H, D]``)."""
    rows, heads, _ = size.shape
    sequences = cu_seqlens.shape[0] - 1
    if per == "tensor":
        scale = _scales(size.amax() if rows * heads else size.new_zeros(()))
        return scale, scale
    row = torch.arange(rows, device=size.device, dtype=torch.int32)
    n = (torch.searchsorted(cu_seqlens.contiguous(), row, right=True) - 1).clamp(0, max(sequences - 1, 0))
    place, count = n, sequences
    if per == "block":
        first = cu_seqlens[n]
        place, count = first // block + n + (row - first) // block, rows // block + sequences
    place = place.clamp(0, max(count - 1, 0))[:, None].expand(rows, heads)
    largest = size.new_zeros(count, heads).scatter_reduce_(0, place.long(), size.amax(-1), "amax")
    scale = _scales(largest)
    return scale, scale.gather(0, place.long())[..., None]


def rotation(width: int, device: torch.device) -> Tensor:
    """An orthogonal matrix ``[width, width]`` of numbers ±width^-0.5 in fp32; width is a power of two.

    It is Hadamard's matrix with the signs of Rudin and Shapiro on its rows, so that rows of equal numbers are spread
    too.
    """
    i = torch.arange(width, device=device)
    signs = 1 - 2 * _parity(i & (i >> 1))
    hadamard = 1 - 2 * _parity(i[:, None] & i)
    return signs[:, None] * hadamard * width**-0.5


def _parity(x: Tensor) -> Tensor:
    """The parity of the set bits."""
    for shift in (32, 16, 8, 4, 2, 1):
        x = x ^ (x >> shift)
    return x & 1
