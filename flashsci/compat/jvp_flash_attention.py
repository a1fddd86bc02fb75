"""``jvp_flash_attention.jvp_attention`` by :func:`flashsci.attention`: attention under forward mode.

It is for MeanFlow, consistency models and other losses on a derivative along the inputs. In that package
``attention`` is for reverse mode and ``JVPAttn.fwd_dual`` for ``torch.func.jvp``. Here both are one function, and
:func:`attention_jvp` gives tangents without ``torch.func``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashsci
from flashsci.call.torch_state import transforming
from flashsci.compat.kinds import flag, number


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
    sm_scale: float | None = None,
    warp_specialize: bool = True,
    USE_TMA: bool = True,
    verify_attn_mask: bool = True,
) -> Tensor:
    """Attention, differentiable in q, k, v and a float mask: in reverse mode to second order, in forward mode, and in
    reverse mode through a tangent.

    Args:
        q: ``[B, H, N, D]``; float16, bfloat16, float32 or float64.
        k, v: the same; other lengths, head dims and numbers of heads as in :func:`flashsci.attention`.
        attn_mask: bool, True = attend, or q's dtype or float32, added to the scores; broadcastable to ``[B, H, N,
            N]``. The number -100, with which jvp_flash_attention marks masked places, is added like any other.
        dropout_p: as in :func:`flashsci.attention`; jvp_flash_attention refuses it.
        causal: query i sees keys up to its own position, among those that the mask leaves.
        sm_scale: factor of the scores; default ``1 / sqrt(D)``.
        warp_specialize, USE_TMA: no effect; in jvp_flash_attention they choose kernels.
        verify_attn_mask: no effect; there it checks for values that its kernels cannot take (-inf, heads without
            keys). Here all are defined.

    Returns:
        ``[B, H, N, D]`` in q's dtype and layout.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention`.

    Examples:
        >>> import torch
        >>> x, t = torch.randn(2, 1, 2, 6, 16).unbind(0)
        >>> out, tangent = torch.func.jvp(lambda q: attention(q, q, q), (x,), (t,))
        >>> out.shape, tangent.shape
        (torch.Size([1, 2, 6, 16]), torch.Size([1, 2, 6, 16]))

    Source: the interface of jvp_flash_attention 0.14; Lu, Song, arXiv:2410.11081 (section 5); Geng et al., arXiv:2505.13447.
    """
    bias, mask = _bias_or_mask(attn_mask)
    # SDPA has neither forward mode nor an lse: a backend that has one of them has both.
    forward_mode = torch.compiler.is_compiling() or transforming()
    found: Any = flashsci.attention(
        q, k, v, bias=bias, mask=mask, causal=flag("causal", causal), scale=number("sm_scale", sm_scale),
        dropout_p=number("dropout_p", dropout_p), return_lse=forward_mode,
    )  # fmt: skip
    out: Tensor = found[0] if forward_mode else found
    return out


class JVPAttn:
    """The two names of :func:`attention`: ``fwd``, and ``fwd_dual`` for forward mode."""

    fwd = staticmethod(attention)
    fwd_dual = staticmethod(attention)


def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention and its derivative along (tq, tk, tv): one forward, one kernel for the tangent, no ``torch.func``.

    Args:
        q, k, v, attn_mask, causal, sm_scale: as in :func:`attention`.
        tq, tk, tv: tangents, with the shapes and dtypes of q, k, v; None for zero.
        backend: as in :func:`flashsci.attention`.

    Returns:
        (out, lse, tangent_out): ``[B, H, N, D]``, ``[B, H, N]`` (float32; float64 for float64), ``[B, H, N, D]``; all
        differentiable in reverse mode, the last also in tq, tk, tv.

    Raises:
        ValueError: a tangent with another shape or dtype than its tensor.
        TypeError, BackendError: as :func:`flashsci.attention`.
        RuntimeError: inside ``torch.func.jvp`` or another forward-mode level, which do not nest.

    Examples:
        >>> import torch
        >>> q, k, v, tq, tk, tv = torch.randn(6, 1, 2, 6, 16).unbind(0)
        >>> out, lse, tangent = attention_jvp(q, k, v, tq, tk, tv)
        >>> step = 1e-2
        >>> there = attention(q + step * tq, k + step * tk, v + step * tv)
        >>> back = attention(q - step * tq, k - step * tk, v - step * tv)
        >>> torch.allclose(tangent, (there - back) / (2 * step), atol=1e-2)
        True
    """
    bias, mask = _bias_or_mask(attn_mask)
    with forward_ad.dual_level():
        pairs = (("q", q, tq), ("k", k, tk), ("v", v, tv))
        out, lse = flashsci.attention(
            *(_dual(name, x, tangent) for name, x, tangent in pairs),
            bias=bias,
            mask=mask,
            causal=flag("causal", causal),
            scale=number("sm_scale", sm_scale),
            return_lse=True,
            backend=backend,
        )
        pair = forward_ad.unpack_dual(out)
        primal_lse = forward_ad.unpack_dual(lse).primal
    tangent_out = torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent
    return pair.primal, primal_lse, tangent_out


def _bias_or_mask(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if attn_mask is None or attn_mask.dtype is not torch.bool:
        return attn_mask, None
    return None, attn_mask


def _dual(name: str, x: Tensor, tangent: Tensor | None) -> Any:
    if tangent is None:
        return x
    if tangent.shape != x.shape or tangent.dtype != x.dtype:
        raise ValueError(
            f"t{name} must have the shape and dtype of {name}, {list(x.shape)} {x.dtype}, got "
            f"{list(tangent.shape)} {tangent.dtype}"
        )
    return forward_ad.make_dual(x, tangent)
