"""Attention over packed sequences of different lengths: no padding, no host synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.api import fp8
from flashsci.call import arguments, head_padding, transforms
from flashsci.call.arguments import contents_are_seen
from flashsci.call.dispatch import run, seed_for
from flashsci.call.kinds import Packed, Role, fields
from flashsci.call.ops import Given, Tensors, packed
from flashsci.call.plans import (
    Plan,
    Run,
    absent,
    as_given,
    gradients,
    keep,
    plans,
    present,
    repeated,
    signature,
)
from flashsci.call.problem import facts
from flashsci.call.torch_state import (
    autocast,
    hides_sizes,
    is_recorded,
    is_traced,
    rounds_products,
    tracer_paused,
)
from flashsci.choice import backends, tuning
from flashsci.choice.backends import ATTENTION, RECORDED
from flashsci.choice.choose import decide, recorded_reference

FP8 = fp8.FP8


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    bias: Tensor | None = None,
    key_weight: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
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
    validate: bool = False,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fp8_accumulate: str = "safe",
    backend: str = "auto",
) -> Any:
    """Exact softmax attention of N packed sequences: each sequence attends only to itself, at any length.

    Args:
        q: packed queries ``[Tq, Hq, D]``; sequence n is rows ``cu_seqlens_q[n]`` to
            ``cu_seqlens_q[n + 1]``.
        k: packed keys ``[Tk, Hk, D]``.
        v: packed values ``[Tk, Hk, Dv]``.
        cu_seqlens_q: int32 ``[N + 1]`` on q's device, rising from 0 to Tq.
        cu_seqlens_k: the same for keys; None: ``cu_seqlens_q``.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths as host ints, which save a search on the device; None
            where unknown. Neither way synchronises with the device. If a bound is too small, the rows of a sequence
            beyond it are not specified.
        bias: per pair, ``[Hb, sum_n Sq_n * Sk_n]`` with Hb = 1 or Hq, the row-major blocks ``[Sq_n, Sk_n]`` one after
            the other; or per key, ``[Hb, Tk]`` or ``[Hb, 1, Tk]``. q's dtype or float32 (with float32 q also a 16-bit
            dtype). Its gradient has its own shape.
        key_weight: ``[Tk]`` or ``[Hw, Tk]`` with Hw = 1 or Hk; as in :func:`flashsci.attention`.
        alibi_slopes: ``[Hq]`` or ``[N, Hq]``, one for each sequence; as in :func:`flashsci.attention`, with
            positions and ``align`` of each sequence.
        sink: ``[Hq]``, as in :func:`flashsci.attention`.
        causal, window, align: as in :func:`flashsci.attention`, for each sequence by its own lengths.
        validate: check the contents of cu_seqlens and the size of a per-pair bias on CUDA too, which synchronises
            once. On the CPU they are always checked. Wrong contents that are not checked give wrong rows, never
            access out of bounds.
        q_scale, k_scale, v_scale: for float8_e4m3fn tensors, as in :func:`flashsci.attention`: ``[]``, one for each
            sequence and head ``[N, H]``, or one for each block ``[T // block + N, H]`` with blocks of 128 or 64 rows.
            Block b of sequence n, counted from its first row, has the number ``cu_seqlens[n] // block + n + b``.
            :func:`flashsci.quantize` makes the scales.
        others: as in :func:`flashsci.attention`.

    Returns:
        out ``[Tq, Hq, Dv]`` in q's dtype (for float8_e4m3fn: out_dtype) and layout; with ``return_lse`` also lse
        ``[Hq, Tq]``.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention`.

    Examples:
        >>> import torch, flashsci
        >>> lengths = [5, 1, 7]
        >>> offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 13, 4, 16).unbind(0)
        >>> pairs = torch.randn(4, sum(n * n for n in lengths), requires_grad=True)
        >>> flashsci.varlen_attention(q, k, v, offsets, bias=pairs).shape
        torch.Size([13, 4, 16])
    """
    again = call = None
    featureless = sink is dropout_seed is bias is key_weight is None
    if featureless and q_scale is k_scale is v_scale is out_dtype is None and fp8_accumulate == "safe":
        # None means one tensor for both offsets.
        other = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
        every = (q, k, v, cu_seqlens_q, other, alibi_slopes)
        seen = tuple(filter(present, every))
        again, call = repeated(
            ("packed", *map(absent, every)), seen,
            (max_seqlen_q, max_seqlen_k, causal, align, scale, softcap, dropout_p, return_lse, deterministic, precision, validate, softcap_at),
            window, backend,
        )  # fmt: skip
    if again is not None:
        second = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        found = again((q, k, v, cu_seqlens_q, second, alibi_slopes))
        return found if return_lse else found[0]
    arguments.check_types(q, k, v, bias=bias, key_weight=key_weight, alibi_slopes=alibi_slopes, sink=sink)
    options = arguments.Options.of(
        causal, window, align, scale, softcap, dropout_p, return_lse, deterministic, precision, softcap_at
    )
    max_seqlen_q = arguments.length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = arguments.length("max_seqlen_k", max_seqlen_k)
    validate = arguments.flag("validate", validate)
    if q.dtype is FP8 or not (q_scale is k_scale is v_scale is out_dtype is None and fp8_accumulate == "safe"):
        scaled = fp8.FP8Options(
            q_scale, k_scale, v_scale, out_dtype, fp8_accumulate, bias, key_weight, None, alibi_slopes, sink
        )
        edges = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        return fp8.packed(q, k, v, edges, (max_seqlen_q, max_seqlen_k), scaled, options, validate, backend)
    q, k, v = autocast(q, k, v)
    bias = arguments.widened(bias, q.dtype)
    given = Packed(q, k, v, cu_seqlens_q, cu_seqlens_k, bias, key_weight, alibi_slopes, sink)
    longest = max_seqlen_q, max_seqlen_k
    if head_padding.pays(q, k, v, options, backend, cu_seqlens_q):
        lengths = dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, validate=validate)
        found = head_padding.attend(
            varlen_attention, given, options, dropout_seed=dropout_seed, backend=backend, **lengths
        )
        return found if return_lse else found[0]
    needs_grad = transforms.needs_grad(q, k, v, bias, key_weight, alibi_slopes, sink)
    plan = _plan(given, longest, options, needs_grad, backend)
    if plan.choice.forward in ("reference", RECORDED.name):  # also of a plan that an unmapped call has left
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if x is not None:
                arguments.check_unmapped(name, x)
    cu_seqlens_q, cu_seqlens_k = dense_offsets(cu_seqlens_q, cu_seqlens_k)
    other = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
    call = as_given(call, q, k, v, cu_seqlens_q, other, alibi_slopes)
    if contents_are_seen(cu_seqlens_q, validate):
        call = None  # contents are checked at every call
        check_contents(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, bias)
    dropout_seed = seed_for(q, options.dropout_p, dropout_seed) if options.dropout_p else None
    bias, bias_offsets = kernel_bias(bias, k.shape[0], cu_seqlens_q, cu_seqlens_k)
    if key_weight is not None and key_weight.dim() == 1:
        key_weight = key_weight.unsqueeze(0)
    plain = bias is None and key_weight is None and dropout_seed is None
    record = (
        functools.partial(_record, packed_rows=(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes)) if plain else None
    )
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    tensors = Tensors(
        q, k, v, bias, key_weight, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, bias_offsets=bias_offsets,
        dropout_seed=dropout_seed, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    around = functools.partial(_repeating, plan, needs_grad)
    out, lse = run(plan, tensors, needs_grad, sink, call, around, return_lse, record)
    out = out.transpose(0, 1)
    return (out, lse) if return_lse else out


def _record(plan: Plan, packed_rows: Given) -> tuple[Tensor, Tensor]:
    """out [Hq, Tq, Dv] and lse by the node of :func:`_repeating`."""
    from flashsci.call.autograd import apply_packed

    out, lse = apply_packed(plan, *packed_rows)
    return out.transpose(0, 1), lse


def _repeating(plan: Plan, needs_grad: bool, again: Run) -> Run:
    """A run for repeats of a call, from the tensors of :func:`flashsci.call.ops.packed`; ``again`` takes its result."""
    if needs_grad and plan.as_given and not plan.scalars.dropout_p:
        from flashsci.call.autograd import apply_packed

        def run(given: Given) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = apply_packed(plan, *given)
            return result

    else:

        def run(given: Given) -> tuple[Tensor, Tensor]:
            out, lse = again(packed(*given))
            return out.transpose(0, 1), lse

    return run


def _plan(
    given: Packed,
    longest: tuple[int | None, int | None],
    options: arguments.Options,
    needs_grad: bool,
    backend: str,
) -> Plan:
    """The plan of a packed call; from the cache if an equal call was planned before."""

    def make() -> Plan:
        choice = decide(ATTENTION, describe(given, options, needs_grad), backend)
        if choice.forward == "reference" and recorded and not transforms.needs_grad(given.alibi_slopes):
            choice = recorded_reference()
        module = backends.LOADED[ATTENTION][choice.forward]
        return Plan(choice, module, options.scalars(given.q.shape[-1], *longest))

    recorded = is_recorded() or given.q.is_meta
    if recorded and not torch.compiler.is_compiling() and is_traced():
        with tracer_paused():
            return make()
    if recorded or not all(x is None or type(x) is Tensor for x in (given.cu_seqlens_q, given.cu_seqlens_k)):
        return make()
    key = (
        "packed",
        *signature(*given),
        longest,
        options,
        needs_grad and gradients(given.bias, given.key_weight, given.alibi_slopes),
        backends.requested(backend),
        rounds_products(given.q.dtype),
    )
    plan = plans.get(key)
    if plan is not None:
        return plan
    again = functools.partial(_again, longest, options)
    if tuning.active and not tuning.consider(describe(given, options, needs_grad), backend, given, again):
        return make()
    return keep(key, make())


def _again(
    longest: tuple[int | None, int | None], options: arguments.Options, given: Sequence[Tensor | None], backend: str
) -> Any:
    """The call of a plan, with other tensors of the same kind and a seed of zeros."""
    tensors: dict[str, Any] = dict(zip(Packed._fields, given, strict=True))
    tensors["max_seqlen_q"], tensors["max_seqlen_k"] = longest
    seed = tensors["q"].new_zeros(2, dtype=torch.int64) if options.dropout_p else None
    return varlen_attention(**tensors, dropout_seed=seed, **options.keywords(), backend=backend)


_FIELDS = fields(Packed)


def describe(given: Packed, options: arguments.Options, needs_grad: bool) -> tuple[Any, ...]:
    """The arguments of problem_of for a packed call, checked except for the contents of its offsets.

    Raises:
        TypeError, ValueError: as :func:`varlen_attention` documents.
    """
    q, k, v, cu_seqlens_q = given.q, given.k, given.v, given.cu_seqlens_q
    bias, key_weight = given.bias, given.key_weight
    cu_seqlens_k = cu_seqlens_q if given.cu_seqlens_k is None else given.cu_seqlens_k
    arguments.check_tensors(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"packed {name} must have shape [T, H, D], got {list(x.shape)}")
    arguments.check_head_dims(q, k, v)
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k and v must have the same number of packed rows, got {k.shape[0]} and {v.shape[0]}")
    heads_q, heads_k = q.shape[1], k.shape[1]
    arguments.check_heads(heads_q, heads_k, v.shape[1])
    options.check()
    arguments.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    arguments.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        counts = f"{cu_seqlens_q.shape[0] - 1} and {cu_seqlens_k.shape[0] - 1}"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must hold the same number of sequences, got {counts}")
    features = options.features(dict(zip(given._fields, given, strict=True)), needs_grad)
    features["varlen"] = True
    sequences = cu_seqlens_q.shape[0] - 1
    shapes = {Role.HEADS: ((sequences, heads_q), "N, Hq"), Role.LOGITS: ((heads_q,), "Hq")}
    arguments.check_others(_FIELDS, given, shapes, Role.SCORES, Role.KEYS)
    if bias is not None:
        shaped = bias.dim() == 2 or (bias.dim() == 3 and bias.shape[1:] == (1, k.shape[0]))
        if not shaped or bias.shape[0] not in (1, heads_q):
            raise ValueError(
                "a packed bias must be per pair [Hb, sum Sq*Sk] or per key [Hb, Tk = "
                f"{k.shape[0]}] with Hb 1 or {heads_q}, "
                f"got {list(bias.shape)}"
            )
        features["ragged_bias"] = _per_pair(bias, k.shape[0])
        features["bias_shape"] = () if hides_sizes(q, k, bias) else tuple(bias.shape)
    if key_weight is not None:
        shape = arguments.shape_of(key_weight)
        if shape not in ([k.shape[0]], [1, k.shape[0]], [heads_k, k.shape[0]]):
            raise ValueError(
                f"a packed key_weight must be [Tk = {k.shape[0]}] or [Hw, Tk] with Hw 1 or {heads_k}, got {shape}"
            )
    if not hides_sizes(q, k, cu_seqlens_q):
        features.update(batch=(sequences,), seq_q=q.shape[0], seq_k=k.shape[0])
    return facts(q, v, heads_q, heads_k, features)


def dense_offsets(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contiguous offsets, as kernels read them; one copy for both if they are one tensor."""
    first = cu_seqlens_q.contiguous()
    if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:
        return first, first
    return first, cu_seqlens_k.contiguous()


def _per_pair(bias: Tensor, total_k: int) -> bool:
    if bias.dim() != 2:
        return False
    return True if bias.shape[1] != total_k else False  # noqa: SIM210  (a compiler keeps a comparison a symbol)


def check_contents(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    bias: Tensor | None,
) -> None:
    """Check the offsets' values, and the size of a bias against them, on the host.

    Raises:
        ValueError: offsets that fall or do not end at T; a per-pair bias of another size; a bias [Hb, n] whose n fits
            both readings although they differ.
    """
    arguments.check_cu_seqlens_contents("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    arguments.check_cu_seqlens_contents("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    if bias is None or bias.dim() == 3:
        return
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    pairs = sum(a * b for a, b in zip(lengths_q, lengths_k, strict=True))
    if _per_pair(bias, k.shape[0]):
        if bias.shape[1] != pairs:
            raise ValueError(
                f"a per-pair bias must have sum of Sq*Sk = {pairs} columns (a per-key one Tk = "
                f"{k.shape[0]}), got {bias.shape[1]}"
            )
    elif pairs == k.shape[0] and any(a != 1 and b for a, b in zip(lengths_q, lengths_k, strict=True)):
        raise ValueError(
            f"a bias with {pairs} columns could be per pair or per key here; give a per-key bias as [Hb, 1, Tk]"
        )


def kernel_bias(
    bias: Tensor | None, total_k: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The bias as raw ops take it: per key [Hb, 1, Tk] without offsets, or per pair [Hb, total] with int64 [N + 1]
    block starts."""
    if bias is None or bias.dim() == 3:
        return bias, None
    if not _per_pair(bias, total_k):
        return bias.unsqueeze(1), None
    sizes = cu_seqlens_q.diff().long() * cu_seqlens_k.diff()
    return bias, torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
