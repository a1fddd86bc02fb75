"""Dense attention: the user API, its argument checks and the choice of a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.api import fp8
from flashsci.api.block_mask import BlockMask, is_held, parts
from flashsci.call import arguments, head_padding, transforms
from flashsci.call import mask_tiles as tables
from flashsci.call.dispatch import run, seed_for
from flashsci.call.kinds import Dense, Role, fields
from flashsci.call.ops import Given, Tensors
from flashsci.call.plans import (
    Plan,
    absent,
    as_given,
    gradients,
    keep,
    plans,
    present,
    repeated,
    signature,
)
from flashsci.call.problem import facts, has_inner_heads, sums_bias
from flashsci.call.ranks import aligned
from flashsci.call.torch_state import (
    autocast,
    hides_sizes,
    is_traced,
    rounds_products,
    sizes_from_data,
    tracer_paused,
)
from flashsci.choice import backends, tuning
from flashsci.choice.backends import ATTENTION
from flashsci.choice.choose import decide

FP8 = fp8.FP8  # one look-up: every call asks


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    key_weight: Tensor | None = None,
    mask: Tensor | BlockMask | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    pair_gate: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "upper_left",
    scale: float | None = None,
    softcap: float | None = None,
    softcap_at: str = "scores",
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | str | None = None,
    precision: str | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fp8_accumulate: str = "safe",
    backend: str = "auto",
) -> Any:
    """Exact softmax attention, ``softmax(softcap(scale q k^T) + bias) v``, differentiable in q, k,
    v, bias, key_weight, sink, pair_gate and lse.

    Args:
        q: queries ``[..., Hq, Sq, D]``; float16, bfloat16, float32 or float64; float8_e4m3fn without
            gradients, see below. Leading dims may be absent or several; those of q, k, v broadcast.
            ``[S, D]`` is one head.
        k: keys ``[..., Hk, Sk, D]``, same dtype and device; Hq must be a multiple of Hk (query head
            h uses key head ``h // (Hq // Hk)``).
        v: values ``[..., Hk, Sk, Dv]``.
        bias: added to the scores, in natural-log units; broadcastable to ``[..., Hq, Sq, Sk]``, q's dtype or float32
            (with float32 q also a 16-bit dtype), any strides, -inf allowed. Its gradient has its own shape and dtype
            and is accumulated in float32 or better. Kernels read a copy if the keys are not neighbours in memory
            (``[..., Sq, Sk, Hq]`` with heads moved forward) and no dim is expanded.
        key_weight: multiplies the exponential of every score of its key, ``P = w e^S / sum w e^S``: the smooth cutoff
            of an interatomic potential. Non-negative, broadcastable to ``[..., Hk, Sk]``, q's dtype or float32. Zeros
            are exact, and so is the gradient there (a bias of ``log w`` has none). Weights below 2**-126, the
            smallest normal number of float32, count as zero. Negative weights give undefined results, as their
            logarithm would; only a synchronisation could find them.
        mask: bool, broadcastable to ``[..., Hq, Sq, Sk]``, True = attend. mask, -inf in bias,
            causal and window are ANDed. A :class:`flashsci.BlockMask` is such a mask with a table of its tiles, made
            once for all layers: kernels skip those that it hides. A large bool tensor gets its table in the call.
        alibi_slopes: ALiBi: adds ``-slope |i + shift - j|`` to the scores, in addition to the bias. The shift is
            where ``align`` puts the diagonal: ``Sk - Sq`` for "lower_right" (as flash-attn), 0 for "upper_left".
            float32, broadcastable to ``[..., Hq]``, such as ``[Hq]`` or ``[B, Hq]``. Learnt slopes have a gradient in
            the triton and cuda backends, by one more pass. Further derivatives by them, and those in a call with a sink,
            under a transform or in a compiled program, are the reference's; for other backends write ALiBi as a bias.
        sink: ``[Hq]``, one more logit per head in the softmax, without a value: it takes its share of the probability
            from all keys. q's dtype or float32, -inf for none. Scale, softcap, bias and mask do not affect it. The
            lse includes it. A row with no key has out 0 and lse ``sink``.
        pair_gate: multiplies the probabilities after the softmax, ``out = (P * pair_gate) v``, as edge features do in
            graph transformers. Finite, of any sign, broadcastable to ``[..., Hq, Sq, Sk]``, q's dtype or float32. The
            lse does not see it. Its gradient has its own shape. Third derivatives hold all scores.
        causal: query i sees keys up to its own position.
        window: ``(left, right)``: query i sees keys from ``i - left`` to ``i + right``; None or -1
            is unbounded.
        align: where the diagonal of causal and window starts when Sq != Sk: "upper_left" (as SDPA) or "lower_right"
            (as flash-attn: the last query sees the last key).
        scale: factor of q k^T; default ``1 / sqrt(D)``. It is a number, as softcap and dropout_p are. Multiply q by a
            learned temperature: q keeps its gradient. Kernels apply the scale to q k^T, which must be finite in
            float32 by itself: 1e37 is safe. The sum of ``abs(v)`` over the keys may be 1e30.
        softcap: bounds scores to ``softcap * tanh(scores / softcap)``; None or 0 for none. A softcap of
            ``2**100 * abs(scale)`` or more counts as none.
        softcap_at: the scores that the softcap bounds: "scores", ``scale q k^T`` before bias and ALiBi (as flash-attn,
            Gemma), or "biased", their sum (as AlphaGenome, x-transformers). mask, causal and window hide keys after it.
            Under "biased" a large negative number in the bias becomes ``-softcap``, and its key stays visible; -inf
            hides it.
        dropout_p: probability of dropping an entry of P, in [0, 1), to within 2^-17.
        dropout_seed: int64 tensor [2] (seed, offset) on q's device; None draws one from torch's
            generator. Every backend drops the same entries: see :func:`flashsci.dropout_mask`.
        return_lse: return ``(out, lse)`` instead of ``out``.
        deterministic: True demands results that are bitwise equal run to run; None follows
            ``torch.use_deterministic_algorithms``. (Without it some CUDA backwards sum dq in any order, and those on
            Hopper the gradient of a shared float32 bias. With it SDPA's backward on CUDA is left out, because it has
            no fixed order.) "batch" demands, too, that the bits of a sequence do not depend on the others of the call:
            see docs/reference/numerics.md.
        precision: for float32 inputs: "ieee" or "tf32x3" (float32 accuracy, by three products of halves on tensor
            cores; None picks the faster), or "tf32" (one product: 11 significant bits). Other dtypes ignore it.
        q_scale, k_scale, v_scale: for float8_e4m3fn tensors only. The stored values times their scale are q, k and v.
            float32, positive: ``[]``, one for each head ``[..., H]``, or one for each block of 128 or 64 rows of a
            head ``[..., H, ceil(S / 128 or 64)]``, with the leading dims of the tensor itself; None: 1.
            :func:`flashsci.quantize` makes both.
        out_dtype: for float8_e4m3fn tensors only: bfloat16 (None) or float16.
        fp8_accumulate: for float8_e4m3fn tensors: how long tensor cores, which keep about 14 bits of a sum, may add
            products before float32 takes over. "safe": over a tile of 64 or 128 keys, or 128 columns of q and k.
            "fast": over all keys and columns, if a kernel gains by it: on Hopper for head dims above 192 and values above
            128, where v has one scale or one for each head. Other calls are as in "safe". The error of "fast" grows
            with the keys: docs/guide/fp8.md has a table.
        backend: "auto", "reference", "sdpa", "eager", "triton" or "cuda"; see :func:`flashsci.explain`.

    Returns:
        out ``[..., Hq, Sq, Dv]`` in q's dtype (for float8_e4m3fn: out_dtype) and memory layout. With ``return_lse``,
        also lse ``[..., Hq, Sq]``: the natural log of the (weighted) sum of exponentials of the scores, float32
        (float64 for float64), differentiable. A row with no key to attend to has out 0, lse -inf and zero
        gradients.

    Raises:
        TypeError: dtypes that do not fit (a bool bias: use ``mask``), options of another type, DTensors with other tensors.
        ValueError: shapes, devices or options that do not fit; float8_e4m3fn tensors and scales that require grad, have a tangent
            or are mapped by ``torch.vmap``; ``fp8_accumulate="fast"`` with other tensors than those.
        BackendError: the backend asked for cannot serve the call; its message says which backends can.

    Under autocast q, k and v are cast as SDPA casts them; the bias is never cast. Jagged nested tensors ``[B, H, j,
    D]`` are accepted as in SDPA, without bias, mask or pair_gate. Values outside the tensors never matter. NaN in k or v at
    masked positions is unspecified.

    DTensors may be ``Shard`` of the batch or the heads, or ``Replicate``: each rank computes its part, and nothing is
    moved. Results are placed as q is. For a sequence that is split there is :func:`flashsci.distributed.attention`.

    float8_e4m3fn q, k, v are for inference, with causal, window, align, scale, softcap and grouped heads; bias, mask,
    key_weight, alibi_slopes, sink, pair_gate and dropout are refused. Both products are of 8-bit floats, so P is rounded to 1
    part in 16 as well; docs/guide/fp8.md has the errors. autocast does not change the tensors.

    Examples:
        >>> import torch, flashsci
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)
        >>> distance = torch.rand(2, 1, 10, 10, requires_grad=True)  # one bias for all heads
        >>> out, lse = flashsci.attention(q, k, v, bias=-distance, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 4, 10, 16]), torch.Size([2, 4, 10]))
        >>> out.sum().backward(); distance.grad.shape
        torch.Size([2, 1, 10, 10])
        >>> cutoff = torch.linspace(1, 0, 10)  # the last key counts for nothing
        >>> weighted = flashsci.attention(q, k, v, key_weight=cutoff)
        >>> torch.allclose(weighted, flashsci.attention(q, k, v, bias=cutoff.log()), atol=1e-6)
        True
        >>> q8, k8, v8 = (flashsci.quantize(x, "head") for x in (q, k, v))
        >>> scales = dict(q_scale=q8.scale, k_scale=k8.scale, v_scale=v8.scale)
        >>> flashsci.attention(q8.values, k8.values, v8.values, **scales, fp8_accumulate="fast").dtype
        torch.bfloat16

    Source: Milakov, Gimelshein, arXiv:1805.02867 (online softmax); Dao et al., arXiv:2205.14135 and
        2307.08691; Press, Smith, Lewis, arXiv:2108.12409 (ALiBi); Xiao et al., arXiv:2309.17453 (sinks; as
        one learnt logit per head they are gpt-oss's).
    """
    again = call = None
    tiles = block = None
    if mask is not None and isinstance(mask, BlockMask):
        block = mask
        mask, tiles = (mask.mask, mask.tiles) if mask.extent is None else parts(mask)
    if dropout_seed is q_scale is k_scale is v_scale is out_dtype is None and fp8_accumulate == "safe":
        entry: Any = "dense"
        seen: tuple[Any, ...] = (q, k, v)
        if not (bias is key_weight is mask is alibi_slopes is sink is pair_gate is None):
            every = (q, k, v, bias, key_weight, mask, alibi_slopes, sink, pair_gate, tiles)
            seen, entry = tuple(filter(present, every)), tuple(map(absent, every))
        again, call = repeated(
            entry,
            seen,
            (causal, align, scale, softcap, dropout_p, return_lse, deterministic, precision, softcap_at),
            window,
            backend,
        )
    if again is not None:
        rows: Given = (q, k, v, bias, key_weight, mask, None, None, None, None, alibi_slopes, tiles)
        if pair_gate is not None:
            rows = (*rows, sink, pair_gate)
        elif sink is not None:
            rows = (*rows, sink)
        found = again(rows)
        return found if return_lse else found[0]
    if block is not None and (type(q).__name__ == "DTensor" or getattr(q, "is_nested", False)):
        mask, tiles = block.dense(), None
    if type(q).__name__ == "DTensor":
        from flashsci.distributed.dtensor import on_shards

        shards = dict(q=q, k=k, v=v, bias=bias, key_weight=key_weight, mask=mask, alibi_slopes=alibi_slopes, sink=sink)
        return on_shards(
            attention,
            {name: x for name, x in shards.items() if x is not None},
            dict(pair_gate=pair_gate, dropout_p=dropout_p, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=out_dtype,
                 fp8_accumulate=fp8_accumulate != "safe"),
            causal=causal, window=window, align=align, scale=scale, softcap=softcap, softcap_at=softcap_at, return_lse=return_lse,
            deterministic=deterministic, precision=precision, backend=backend,
        )  # fmt: skip
    arguments.check_types(
        q, k, v, bias=bias, mask=mask, key_weight=key_weight, alibi_slopes=alibi_slopes, sink=sink, pair_gate=pair_gate
    )  # fmt: skip
    options = arguments.Options.of(
        causal, window, align, scale, softcap, dropout_p, return_lse, deterministic, precision, softcap_at
    )
    if q.dtype is FP8 or not (q_scale is k_scale is v_scale is out_dtype is None and fp8_accumulate == "safe"):
        scaled = fp8.FP8Options(
            q_scale, k_scale, v_scale, out_dtype, fp8_accumulate, bias, key_weight, mask, alibi_slopes, sink, pair_gate
        )
        return fp8.dense(q, k, v, scaled, options, backend)
    if q.is_nested:
        from flashsci.api.nested import attention as attend

        return attend(
            q, k, v, bias=bias, key_weight=key_weight, mask=mask, alibi_slopes=alibi_slopes, sink=sink, pair_gate=pair_gate,
            causal=causal, window=window, align=align, scale=scale, softcap=softcap, softcap_at=softcap_at,
            dropout_p=dropout_p, dropout_seed=dropout_seed, return_lse=return_lse, deterministic=deterministic, precision=precision, backend=backend,
        )  # fmt: skip
    q, k, v = autocast(q, k, v)
    bias = arguments.widened(bias, q.dtype)
    given = Dense(q, k, v, bias, key_weight, mask, alibi_slopes, sink, pair_gate)
    if head_padding.pays(q, k, v, options, backend):
        others = {"dropout_seed": dropout_seed, "backend": backend, "mask": mask if block is None else block}
        found = head_padding.attend(attention, given, options, **others)
        return found if return_lse else found[0]
    needs_grad = transforms.needs_grad(q, k, v, bias, key_weight, alibi_slopes, sink, pair_gate)
    tabled = tiles is not None and pair_gate is None  # the kernels of gated calls read masks
    plan = _plan(given, options, needs_grad, backend, tabled)
    if tiles is not None and not (tabled and plan.computes_by(tiles, given, is_held(block))):
        tiles = call = None
        if block is not None and not is_held(block):
            mask = block.dense()
            given = given._replace(mask=mask)
            plan = _plan(given, options, needs_grad, backend, tabled)
    # Kernels must not read a seed without dropout.
    dropout_seed = seed_for(q, options.dropout_p, dropout_seed) if options.dropout_p else None
    tensors = Tensors(q, k, v, bias, key_weight, mask, dropout_seed=dropout_seed, alibi_slopes=alibi_slopes, mask_tiles=tiles)  # fmt: skip
    if pair_gate is not None:
        from flashsci.api.gated import attend as attend_gated

        found = attend_gated(plan, tensors, pair_gate, sink, needs_grad, as_given(call, *given, tiles))
        return found if return_lse else found[0]
    call = as_given(call, *given, tiles)
    if plan.leading is None:
        out, lse = run(plan, tensors, needs_grad, sink, call, reads_lse=return_lse)
    else:
        around = functools.partial(_expanding, plan.leading)
        out, lse = around(lambda given: run(plan, given, needs_grad, sink, call, around, return_lse))(tensors)
    return (out, lse) if return_lse else out


def _plan(given: Dense, options: arguments.Options, needs_grad: bool, backend: str, tiled: bool) -> Plan:
    """The plan of a dense call; from the cache if an equal call was planned before."""
    q, k, v = given.q, given.k, given.v
    if hides_sizes(q, k, v):
        return _make_plan(given, options, needs_grad, backend, tiled)
    if is_traced():
        with tracer_paused():
            traced = _make_plan(given, options, needs_grad, backend, tiled)
        if traced.leading is not None:
            traced.leading = _leading(q, k, v)  # the tracer follows these sizes
        return traced
    key = (
        *signature(*given),
        options,
        needs_grad and gradients(given.bias, given.key_weight, given.alibi_slopes, given.pair_gate),
        backends.requested(backend),
        rounds_products(q.dtype),
        tiled,
    )
    plan = plans.get(key)
    if plan is not None:
        return plan
    again = functools.partial(_again, options)
    tuned = tuning.active and not tiled  # a trial would make the table of a BlockMask again
    if tuned and not tuning.consider(describe(given, options, needs_grad), backend, given, again):
        return _make_plan(given, options, needs_grad, backend, tiled)
    return keep(key, _make_plan(given, options, needs_grad, backend, tiled))


def _make_plan(given: Dense, options: arguments.Options, needs_grad: bool, backend: str, tiled: bool) -> Plan:
    choice = decide(ATTENTION, describe(given, options, needs_grad, tiled), backend)
    q, k, v = given.q, given.k, given.v
    ranks = {x.dim() for x in (q, k, v, given.bias, given.mask) if x is not None}
    if given.key_weight is not None:
        ranks.add(given.key_weight.dim() + 1)
    equal = q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and q.dim() == k.dim() == v.dim() <= 5
    leading = None if equal else _leading(q, k, v)
    rank = q.dim() if equal and len(ranks) > 1 else None
    module = backends.LOADED[ATTENTION][choice.forward]
    return Plan(choice, module, options.scalars(q.shape[-1]), leading, rank)


def _again(options: arguments.Options, given: Sequence[Tensor | None], backend: str) -> Any:
    """The call of a plan, with other tensors of the same kind and a seed of zeros."""
    tensors: dict[str, Any] = dict(zip(Dense._fields, given, strict=True))
    seed = tensors["q"].new_zeros(2, dtype=torch.int64) if options.dropout_p else None
    return attention(**tensors, dropout_seed=seed, **options.keywords(), backend=backend)


def _leading(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
    except RuntimeError as error:
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ValueError(f"the leading dims (before heads) of q, k, v do not broadcast: {shapes}") from error


_FIELDS = fields(Dense)


def describe(given: Dense, options: arguments.Options, needs_grad: bool, tiled: bool = False) -> tuple[Any, ...]:
    """Check a dense call; the arguments of problem_of. ``tiled``: its mask is a BlockMask.

    Raises:
        TypeError, ValueError: as :func:`attention` documents.
    """
    q, k, v = given.q, given.k, given.v
    bias = given.bias
    arguments.check_tensors(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least two dims [S, D], got shape {list(x.shape)}")
    arguments.check_head_dims(q, k, v)
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same length (dim -2), got {k.shape[-2]} and {v.shape[-2]}")
    heads_q, heads_k, heads_v = (x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v))
    arguments.check_heads(heads_q, heads_k, heads_v)
    options.check()
    batch = _leading(q, k, v)
    heads = (heads_q,) if max(q.dim(), k.dim(), v.dim()) > 2 else ()
    full = (*batch, *heads, q.shape[-2], k.shape[-2])
    shapes = {
        Role.SCORES: (full, "Hq, Sq, Sk"),
        Role.KEYS: ((*batch, *(heads and (heads_k,)), k.shape[-2]), "Hk, Sk"),
        Role.HEADS: ((*batch, heads_q), "Hq"),
        Role.LOGITS: ((heads_q,), "Hq"),
    }
    arguments.check_others(_FIELDS, given, shapes)
    features = options.features(dict(zip(given._fields, given, strict=True)), needs_grad)
    features["mask_tiles"] = tiled or tables.decides(Tensors(q, k, v, mask=given.mask))
    if hides_sizes(q, k, v):
        features["bias_shape"] = None if bias is None else ()
        features["sizes_from_data"] = sizes_from_data(q, k)
    else:
        bias_shape = None if bias is None else tuple(bias.shape)
        features.update(batch=batch, seq_q=q.shape[-2], seq_k=k.shape[-2], bias_shape=bias_shape)
        if bias is not None:
            features["inner_heads"] = has_inner_heads(bias)
        if bias is not None and features["bias_grad"]:
            features["bias_summed"] = sums_bias(bias, (*batch, *heads))
    return facts(q, v, heads_q, heads_k, features)


def _expanding(leading: tuple[int, ...], compute: Callable[[Tensors], Any]) -> Callable[..., Any]:
    """A run for tensors whose ranks or leading dims differ, or which have more leading dims than kernels take."""

    def expanded(tensors: Given) -> tuple[Tensor, Tensor | None]:
        out, lse = compute(aligned(tensors, leading))
        if len(leading) > 2:
            out = out.unflatten(0, leading[:-1])
            lse = None if lse is None else lse.unflatten(0, leading[:-1])
        return out, lse

    return expanded
