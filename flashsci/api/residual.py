"""Residual attention: softmax attention that also returns its scores, which the next layer adds to its own.

Where kernels serve the call it is one op. Elsewhere, and for derivatives of its derivatives, it is made from parts:
the scores in plain PyTorch, and an attention that computes them a second time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.api.attention import describe as describe_attention
from flashsci.call import arguments, recompute, repeats, transforms
from flashsci.call.dispatch import seed_for
from flashsci.call.kinds import Dense
from flashsci.call.ops import bypasses_dispatcher, interleaved
from flashsci.call.plans import (
    alone,
    as_given,
    gradients,
    keep,
    plans,
    remember,
    repeated,
    signature,
)
from flashsci.call.residual_ops import ResidualCall, ResidualKernels, scores_dtype
from flashsci.call.torch_state import autocast, count_flops, hides_sizes, transforming
from flashsci.choice import backends
from flashsci.choice.choose import PARTS, decide
from flashsci.choice.gradients import Choice


def residual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    precision: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention and its scores: ``S = scale q k^T + bias``, ``out = softmax(S) v``.

    S is the bias of the next layer, which thereby adds its scores to those of all layers before it (RealFormer;
    Uni-Mol, where S is the pair representation). Both results have gradients. S adds to the cost of out one write of
    S, and in the backward one read of its gradient.

    Args:
        q: queries ``[..., Hq, Sq, D]``, float16, bfloat16, float32 or float64. Leading dims may be absent or several;
            those of q, k, v broadcast.
        k: keys ``[..., Hk, Sk, D]``, same dtype and device; Hq must be a multiple of Hk.
        v: values ``[..., Hk, Sk, Dv]``.
        bias: broadcastable to ``[..., Hq, Sq, Sk]``, natural-log units, q's dtype or float32 (with float32 q also a
            16-bit dtype). In the first layer it is what the model begins with, or None; in later layers it is the
            scores of the layer before. A mask is -inf in the first bias, and stays in the scores.
        scale: factor of q k^T; default ``1 / sqrt(D)``.
        dropout_p: probability of dropping an entry of P, in [0, 1). Scores are never dropped.
        dropout_seed: int64 tensor [2] (seed, offset) on q's device; None draws one from torch's generator.
        precision: for float32 inputs, as in :func:`flashsci.attention`. Scores that are computed from parts follow
            ``torch.backends.cuda.matmul`` instead.
        backend: "auto" and "triton" have kernels that compute both at once, on a GPU, with head dims up to 128.
            "auto" takes the parts for calls that these kernels do not serve, and every other name always does: scores
            in plain PyTorch, and :func:`flashsci.attention` with that backend.

    Returns:
        (out, scores): out ``[..., Hq, Sq, Dv]`` in q's dtype and memory layout; scores ``[..., Hq, Sq, Sk]`` in the
        wider one of q's and the bias's dtype, in rows that begin at multiples of 16 bytes: contiguous where Sk is
        a multiple of 8 (float32: 4). P is computed from the scores before they are rounded to that dtype. A row
        of only -inf has out 0, and gives q, k, v and bias the gradient of its scores alone.

    Raises:
        TypeError: dtypes that do not fit, options of another type.
        ValueError: shapes, devices or options that do not fit; nested tensors.
        BackendError: the backend asked for cannot serve the call; its message says which can.

    Results are deterministic. Under autocast q, k and v are cast as SDPA casts them; the bias is never cast. Cast the
    bias of the first layer, or all scores are float32. It has derivatives of the same orders as
    :func:`flashsci.attention`; those beyond the first hold all scores several times.

    Examples:
        >>> import torch, flashsci
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)
        >>> pair = torch.randn(2, 4, 10, 10, requires_grad=True)
        >>> out, scores = flashsci.residual_attention(q, k, v, pair)
        >>> out, scores = flashsci.residual_attention(q, k, out, scores)  # the next layer
        >>> (out.sum() + scores.square().mean()).backward(); pair.grad.shape
        torch.Size([2, 4, 10, 10])

    Source: He, Ravula, Kanagal, Ainslie, "RealFormer: Transformer likes residual attention", arXiv:2012.11747, equation 3; Zhou
        et al., "Uni-Mol", ICLR 2023.
    """
    again = call = None
    if not dropout_p and dropout_seed is None:
        seen = (q, k, v) if bias is None else (q, k, v, bias)
        again, call = repeated(("residual", bias is None), seen, (scale, dropout_p, precision), None, backend)
        if again is not None:
            return again((q, k, v, bias))
    check(q, k, v, bias)
    options = arguments.Options.of(False, None, "upper_left", scale, None, dropout_p, False, None, precision)
    q, k, v = autocast(q, k, v)
    bias = arguments.widened(bias, q.dtype)
    needs_grad = transforms.needs_grad(q, k, v, bias)
    choice = choice_of(q, k, v, bias, options, needs_grad, backend)
    parts = choice.forward == PARTS
    kernels: ResidualKernels | None = None if parts else backends.LOADED[backends.RESIDUAL][choice.forward]
    seed = seed_for(q, options.dropout_p, dropout_seed) if options.dropout_p else None
    if kernels is None or transforming():
        return _from_parts(q, k, v, bias, seed, options, backend)
    count_flops()
    scalars = options.scalars(q.shape[-1])
    wanted = scalars.scale, scalars.dropout_p, scalars.precision
    direct = bypasses_dispatcher((q, k, v, bias, seed))
    call = as_given(call, q, k, v, bias)
    if direct and call is not None and _fits(q, k, v, bias):
        run = functools.partial(_again, Repeated(kernels, call_of(q, k, v, bias, seed, *wanted)), needs_grad)
        remember(call, run)
        return run((q, k, v, bias))
    leading, heads = _outer(q, k, v)
    q, k, v = (_folded(x, leading) for x in (q, k, v))
    bias = None if bias is None else _folded(bias, leading)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    shape = (*leading, *heads)
    results = Residual.apply(kernels, q, k, v, bias, seed, *wanted)
    out, scores = (x if x.shape[:-2] == shape else x.reshape(*shape, *x.shape[-2:]) for x in results)
    return out, scores


def check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """Refuse tensors of a kind that these calls do not take."""
    arguments.check_types(q, k, v, bias=bias)
    if q.is_nested:
        raise ValueError(
            "residual_attention takes no nested tensors: their scores have no common shape; pad them, and put -inf in the "
            "bias of the padding"
        )
    if bias is not None and bias.dtype is torch.bool:
        raise TypeError(
            "bias is a bool tensor; a mask is -inf in the first layer's bias: torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)"
        )


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    options: arguments.Options,
    needs_grad: bool,
) -> tuple[Any, ...]:
    """The arguments of problem_of for a call, checked.

    Raises:
        TypeError, ValueError: as :func:`residual_attention` documents.
    """
    return describe_attention(Dense(q, k, v, bias), options, needs_grad)


def _fits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels take these tensors as they are."""
    rows = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]
    if not (rows and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1):
        return False
    return bias is None or (bias.dim() == 4 and bias.stride(-1) == 1)


class Repeated:
    """A run of plain calls that repeat an earlier one, and of their gradients."""

    def __init__(self, kernels: ResidualKernels, call: ResidualCall) -> None:
        self.kernels, self.prepared = kernels, kernels.prepared(call)
        self.options = call[5:]
        self._backwards: dict[tuple[bool, ...], Any] = {}

    def backward(
        self, dout: Tensor | None, dscores: Tensor | None, saved: Sequence[Any], need_bias: bool
    ) -> Sequence[Tensor | None]:
        """dq, dk, dv and the gradient of the scores.

        ``saved``: q, k, v, bias, seed, out, lse, scores, of any kind and strides, because hooks of saved tensors may
        change them.
        """
        *tensors, out, lse, scores = saved
        given = [x for x in (dout, dscores, *saved) if x is not None]
        key = need_bias, dout is None, dscores is None
        kept = self._backwards.get(key)
        run = repeats.find(kept, given) if kept is not None and alone() else None
        if run is None:
            if not bypasses_dispatcher(given):
                call = call_of(*tensors, *self.options)
                return self.kernels.backward(dout, dscores, call, out, lse, scores, need_bias)
            run = self.prepared.backward(dout, dscores, tensors, out, lse, scores, need_bias)
            repeats.keep(self._backwards, key, given, run)
        found: Sequence[Tensor | None] = run(dout, dscores, tensors, out, lse, scores)
        return found


def _again(kept: Repeated, needs_grad: bool, given: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    """The results of a call that repeats an earlier one."""
    if needs_grad:
        results: tuple[Tensor, Tensor] = _apply(kept, *given)
        return results
    out, _, scores = kept.prepared.forward(*given, None)
    return out, scores


def choice_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    options: arguments.Options,
    needs_grad: bool,
    backend: str,
) -> Choice:
    """The choice for a call. A repeated call is not examined again.

    Raises:
        TypeError, ValueError, BackendError: as :func:`residual_attention` documents.
    """
    if hides_sizes(q, k, v):
        call = describe(q, k, v, bias, options, needs_grad)
        return decide(backends.RESIDUAL, call, backend)
    key = ("residual", *signature(q, k, v, bias), options, needs_grad and gradients(bias), backends.requested(backend))
    found: Choice | None = plans.get(key)
    if found is None:
        call = describe(q, k, v, bias, options, needs_grad)
        found = keep(key, decide(backends.RESIDUAL, call, backend))
    return found


def _outer(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leading dims of a call, and (heads,), or () if it has none."""
    leading = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return tuple(leading), tuple(q.shape[-3:-2])


def _folded(x: Tensor, leading: tuple[int, ...]) -> Tensor:
    """q, k, v or bias as ``[B, H, rows, columns]``, B all leading dims."""
    if x.dim() == 4 and len(leading) == 1 and x.shape[0] in (1, leading[0]):
        return x if x.shape[0] == leading[0] else x.expand(*leading, *x.shape[1:])
    inner = (1,) * (3 - x.dim()) + tuple(x.shape[-3:])
    count = math.prod(leading)
    if math.prod(x.shape[:-3]) == 1:
        return x.reshape(1, *inner).expand(count, *inner)
    return x.expand(*leading, *inner).reshape(count, *inner)


def _from_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    options: arguments.Options,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out = attention(
        q, k, v, bias=bias, scale=options.scale, dropout_p=options.dropout_p, dropout_seed=seed, precision=options.precision,
        backend=backend,
    )  # fmt: skip
    scale = options.scalars(q.shape[-1]).scale
    return out, plain_scores(q, k, v, bias, scale)


def plain_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """``scale q k^T + bias`` in plain PyTorch, rounded once. Only the leading dims of v are used."""
    leading, heads = _outer(q, k, v)
    dtype = scores_dtype(q, bias)
    rows, keys = (_folded(x, leading).to(dtype) for x in (q, k))
    keys = interleaved(keys, rows.shape[1] // max(1, keys.shape[1]), -3)
    shape = (*leading, *heads, q.shape[-2], k.shape[-2])
    flat = (math.prod(shape[:-2]), *shape[-2:])
    added = q.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    added = added.expand(shape).reshape(flat)
    kind = "cpu" if q.is_meta else q.device.type
    with torch.autocast(kind, enabled=False):  # it would cast a wider bias down
        products = torch.baddbmm(added, rows.flatten(0, 1), keys.flatten(0, 1).mT, alpha=scale)
    return products.view(shape)


_BIAS = ResidualCall._fields.index("bias")  # among the tensors that nodes save, and their gradients


class Residual(torch.autograd.Function):
    """out, scores = residual attention.

    Kernels compute a plain backward. A backward that is recorded for a derivative of its own runs another forward,
    and then goes through the graph of the parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ResidualKernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        out, lse, scores = kernels.forward(call_of(q, k, v, bias, seed, *options))
        ctx.kernels, ctx.options = kernels, options
        return _kept(ctx, (q, k, v, bias, seed), out, lse, scores)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dscores: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse, scores = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:5]
        found = _gradients(ctx.options, tensors, wanted, dout, dscores)
        if found is None:
            need_bias = wanted[_BIAS]
            call = call_of(*tensors, *ctx.options)
            rows = ctx.kernels.backward(dout, dscores, call, out, lse, scores, need_bias)
            found = _summed(rows, wanted, tensors[_BIAS])
        return (None, *found, None, *(None,) * len(ctx.options))


class DirectResidual(torch.autograd.Function):
    """Residual attention of plain tensors that repeat an earlier call, in eager mode."""

    @staticmethod
    def forward(
        ctx: Any, kept: Repeated, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.kept = kept
        given = q, k, v, bias, None
        return _kept(ctx, given, *kept.prepared.forward(*given))

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dscores: Tensor | None) -> tuple[Any, ...]:
        saved, wanted, kept = ctx.saved_tensors, ctx.needs_input_grad[1:], ctx.kept
        tensors = saved[:5]
        found = _gradients(kept.options, tensors, wanted, dout, dscores)
        if found is None:
            rows = kept.backward(dout, dscores, saved, wanted[_BIAS])
            found = _summed(rows, wanted, tensors[_BIAS])
        return (None, *found)


#: ``apply`` without the search for functorch's tensors, which ``ops.bypasses_dispatcher`` has done already.
_apply = super(torch.autograd.Function, DirectResidual).apply


def _kept(
    ctx: Any, given: tuple[Tensor | None, ...], out: Tensor, lse: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """The results, with all that a backward needs saved. 16-bit scores are not saved: they are computed again, from
    the bias."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given, out, lse, scores if scores.dtype == torch.float32 else None)
    return out, scores


def _gradients(
    options: tuple[Any, ...],
    tensors: Sequence[Tensor | None],
    wanted: tuple[bool, ...],
    dout: Tensor | None,
    dscores: Tensor | None,
) -> list[Tensor | None] | None:
    """Gradients of q, k, v, bias where no kernel computes them, because none exist or they need gradients themselves;
    else None."""
    if dout is None and dscores is None:
        return [None] * 4
    if torch.is_grad_enabled() or transforming():
        return _recorded(tensors, wanted, options, dout, dscores)
    return None


def _summed(found: Sequence[Tensor | None], wanted: tuple[bool, ...], bias: Tensor | None) -> list[Tensor | None]:
    """dq, dk, dv, and the gradient of the bias, summed from that of the scores."""
    *rows, change = found
    gradients = [x if want else None for x, want in zip(rows, wanted, strict=False)]
    if not wanted[_BIAS] or bias is None or change is None:
        return [*gradients, None]
    if change.shape != bias.shape:
        change = change.sum_to_size(bias.shape)
    return [*gradients, change if change.dtype is bias.dtype else change.to(bias.dtype)]


def call_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed: Tensor | None, *options: Any) -> ResidualCall:
    """The call, with copies of tensors that are not stored as kernels read them, such as a bias whose keys are not
    neighbours.

    Tensors from saved-tensor hooks may have any strides.
    """
    if bias is not None and bias.stride(-1) != 1:
        bias = ResidualCall(q, k, v, bias, seed, *options).tensors.inner_contiguous().bias
    return ResidualCall(q, k, v, bias, seed, *options).laid_out()


def _recorded(
    tensors: Sequence[Tensor | None],
    wanted: tuple[bool, ...],
    scalars: tuple[Any, ...],
    dout: Tensor | None,
    dscores: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of q, k, v, bias that have gradients themselves."""
    scale, dropout_p, precision = scalars
    precision = None if precision == "default" else precision
    options = arguments.Options.of(False, None, "upper_left", scale, None, dropout_p, False, None, precision)
    *given, seed = tensors

    def compute(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return _from_parts(q, k, v, bias, seed, options, "auto")

    return recompute.gradients(compute, given, wanted, (dout, dscores))
