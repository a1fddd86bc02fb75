"""The gradient of attention as a function of its own, for a given out and lse."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.api import block_mask, varlen
from flashsci.api.attention import describe
from flashsci.api.block_mask import BlockMask
from flashsci.call import arguments, transforms
from flashsci.call import mask_tiles as tables
from flashsci.call.dispatch import seed_for
from flashsci.call.kinds import Dense, Packed
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Tensors,
    with_rank,
)
from flashsci.call.problem import with_feature
from flashsci.call.row_pitch import whole_rows
from flashsci.call.torch_state import is_recorded, tracer_paused, transforming
from flashsci.choice import backends, differentiate
from flashsci.choice.backends import ATTENTION
from flashsci.choice.choose import decide, recorded_reference
from flashsci.choice.gradients import written


class Gradients(NamedTuple):
    """Gradients of one attention call: shapes and dtypes of q, k, v, bias and key_weight (None if the call has
    none)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dkey_weight: Tensor | None = None


def attention_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    bias: Tensor | None = None,
    key_weight: Tensor | None = None,
    mask: Tensor | BlockMask | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "upper_left",
    scale: float | None = None,
    softcap: float | None = None,
    softcap_at: str = "scores",
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool | str | None = None,
    precision: str | None = None,
    backend: str = "auto",
) -> Gradients:
    """Gradients of attention for a *given* out and lse: P is recomputed as ``exp(scores - lse)``.

    With the out and lse of the same call this is its backward. With those of a larger set of keys it is this block's
    share of the whole gradient, as ring attention and other key-split schemes need it. Therefore it also serves
    attention sinks: with the out and lse of ``attention(..., sink=...)`` it needs no sink. (The sink's own gradient
    is minus the sum of ``exp(sink - lse) (<dout, out> - dlse)``.)

    Args:
        dout: gradient of out, shape of ``out``; None for zero.
        q, k, v: as in :func:`attention`, with equal ranks and leading dims, or packed as in :func:`varlen_attention`
            when ``cu_seqlens_q`` is given.
        out: ``[..., Hq, Sq, Dv]``, q's dtype (packed: ``[Tq, Hq, Dv]``).
        lse: float32 ``[..., Hq, Sq]`` (packed: ``[Hq, Tq]``). Rows of -inf give zero gradients.
        dlse: gradient of lse, shape of ``lse``; None for zero.
        alibi_slopes: as in the forward call. ALiBi counts positions within the given block of keys, so for a block of
            a larger call write it as a bias. The slopes have no gradient here.
        others: as in the forward call.

    Returns:
        :class:`Gradients` ``(dq, dk, dv, dbias, dkey_weight)`` with the shapes and dtypes of the tensors.

    Raises:
        TypeError, ValueError, BackendError: as :func:`attention`; also ValueError for an out or lse of another shape.

    Examples:
        >>> import torch, flashsci
        >>> q, k, v, dout = torch.randn(4, 2, 4, 10, 16).unbind(0)
        >>> out, lse = flashsci.attention(q, k, v, return_lse=True)
        >>> flashsci.attention_backward(dout, q, k, v, out, lse).dq.shape
        torch.Size([2, 4, 10, 16])

    Source: Dao, arXiv:2307.08691, algorithm 2; Liu et al., arXiv:2310.01889 (ring attention).
    """
    block = mask if isinstance(mask, BlockMask) else None
    mask, tiles = block_mask.parts(mask)
    arguments.check_types(q, k, v, bias=bias, mask=mask, key_weight=key_weight, alibi_slopes=alibi_slopes)
    arguments.check_type("out", out)
    arguments.check_type("lse", lse)
    for name, x in (("dout", dout), ("dlse", dlse)):
        if x is not None:
            arguments.check_type(name, x, " or None")
    options = arguments.Options.of(
        causal, window, align, scale, softcap, dropout_p, True, deterministic, precision, softcap_at
    )
    options.check()
    max_seqlen_q = arguments.length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = arguments.length("max_seqlen_k", max_seqlen_k)
    dropout_seed = _seed(q, options.dropout_p, dropout_seed)
    needs_grad = transforms.needs_grad(dout, dlse, q, k, v, bias, key_weight, alibi_slopes, out, lse)
    given_bias, bias = bias, arguments.widened(bias, q.dtype)
    kernel_bias, bias_offsets, kernel_weight = bias, None, key_weight
    if cu_seqlens_q is None:
        dense = Dense(q, k, v, bias, key_weight, mask, alibi_slopes)
        with tracer_paused():
            call = describe(dense, options, needs_grad, tiles is not None)
        equal = all(x.dim() == q.dim() and x.shape[:-3] == q.shape[:-3] for x in (k, v))
        if not equal or q.dim() > 5:
            raise ValueError(
                "attention_backward takes q, k, v with equal leading dims, at most two before the heads, got "
                f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}; expand them to one batch and flatten its dims"
            )
        kernel_bias, mask, tiles = (with_rank(x, q.dim()) for x in (bias, mask, tiles))
        kernel_weight = with_rank(key_weight, q.dim() - 1)
        lse_shape = tuple(q.shape[:-1])
    else:
        if mask is not None:
            raise ValueError("packed sequences take no mask; put -inf in a per-pair bias")
        packed = Packed(q, k, v, cu_seqlens_q, cu_seqlens_k, bias, key_weight, alibi_slopes)
        call = varlen.describe(packed, options, needs_grad)
        cu_seqlens_q, cu_seqlens_k = varlen.dense_offsets(cu_seqlens_q, cu_seqlens_k)
        kernel_bias, bias_offsets = varlen.kernel_bias(bias, k.shape[0], cu_seqlens_q, cu_seqlens_k)
        if key_weight is not None and key_weight.dim() == 1:
            kernel_weight = key_weight.unsqueeze(0)
        lse_shape = (q.shape[1], q.shape[0])
    _check_given(q, v, dout, out, lse, dlse, lse_shape)
    if needs_grad and transforms.wanted(alibi_slopes):  # of these gradients: a second derivative
        call = with_feature(call, "alibi_further", True)
    choice = decide(ATTENTION, call, backend)
    if choice.forward == "reference" and cu_seqlens_q is not None and cu_seqlens_k is not None:
        arguments.check_unmapped("cu_seqlens_q", cu_seqlens_q)
        arguments.check_unmapped("cu_seqlens_k", cu_seqlens_k)
        if is_recorded() or q.is_meta:
            choice = recorded_reference()
    module = backends.LOADED[ATTENTION][choice.forward]
    if tiles is not None and not tables.serves(
        tiles, dense, module, choice.has_own_gradients, block_mask.is_held(block)
    ):
        tiles = None
    if block is not None and tiles is None and not block_mask.is_held(block):
        mask = with_rank(block.dense(), q.dim())
    if cu_seqlens_q is not None:
        q, k, v, out = (x.transpose(0, 1) for x in (q, k, v, out))
        dout = None if dout is None else dout.transpose(0, 1)
    tensors = Tensors(
        q, k, v, kernel_bias, kernel_weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed,
        alibi_slopes, tiles,
    ).inner_contiguous()  # fmt: skip
    rows = whole_rows(tensors) if module.FUSED else tensors
    copied, tensors = rows.bias is not tensors.bias, rows
    scalars = options.scalars(q.shape[-1], max_seqlen_q, max_seqlen_k)
    need = NEED_Q | NEED_K | NEED_V | (0 if bias is None else NEED_BIAS)
    need |= 0 if key_weight is None else NEED_KEY_WEIGHT
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = lse.to(statistics).contiguous()
    dlse = None if dlse is None else dlse.to(statistics).contiguous()
    transformed = torch.compiler.is_compiling() or transforming()
    if module.FUSED and (needs_grad or transformed):
        from flashsci.call.autograd import Backward, guarded  # imports the compiler

        # The second-order formulas treat out and lse as functions of this q, k, v, bias. Here they are given.
        given = dout, dlse, *tensors, out, lse
        inputs = guarded(given, "a second derivative, through attention_backward,")
        dq, dk, dv, dbias, dweight = Backward.apply(written(choice), *inputs, *scalars, need)
    else:
        saved = Saved(tensors, out, lse, scalars)
        dq, dk, dv, dbias, dweight = differentiate.backward(choice, dout, dlse, saved, need)
    if cu_seqlens_q is not None:
        dq, dk, dv = (x.transpose(0, 1) for x in (dq, dk, dv))
    dbias, dweight = (None if x is None else g.reshape(x.shape) for g, x in ((dbias, bias), (dweight, key_weight)))
    if dbias is not None and copied:
        dbias = dbias.contiguous()
    if given_bias is not None and dbias is not None:
        dbias = dbias.to(given_bias.dtype)
    return Gradients(dq, dk, dv, dbias, dweight)


def _seed(q: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor | None:
    """The forward's seed; None without dropout."""
    if not dropout_p:
        return None
    if dropout_seed is None:
        raise ValueError("attention_backward needs the forward's dropout_seed to drop the same entries")
    return seed_for(q, dropout_p, dropout_seed)


def _check_given(
    q: Tensor,
    v: Tensor,
    dout: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    lse_shape: tuple[int, ...],
) -> None:
    """Raise for results and cotangents that do not fit q and v, or each other."""
    out_shape = (*q.shape[:-1], v.shape[-1])
    for name, x, shape in (
        ("dout", dout, out_shape),
        ("out", out, out_shape),
        ("lse", lse, lse_shape),
        ("dlse", dlse, lse_shape),
    ):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    arguments.same_device(q, dout=dout, out=out, lse=lse, dlse=dlse)
    for name, x in (("dout", dout), ("out", out)):
        if x is not None and x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype ({q.dtype}), got {x.dtype}")
