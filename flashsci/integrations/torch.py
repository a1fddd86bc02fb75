"""torch's registry of flash attention: ``activate_flash_attention_impl("flashsci")``.

torch first chooses a kernel for ``scaled_dot_product_attention``. For flash (fp16 and bf16 on CUDA, no mask, head
dims to 256, padded to a multiple of 8) it calls operators of its own. These are replaced here; context parallelism
calls the same ones. ``varlen_attn`` has operators above them, which choose cuDNN for some calls since torch 2.14; those
are replaced, too. Diagonals start lower right, as in the kernels that torch ships (it sends no causal call with
Sq != Sk here, but others may). An operator runs below autograd and autocast, which torch has done by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.api.backward import attention_backward
from flashsci.api.dropout import draw_seed
from flashsci.api.varlen import varlen_attention
from flashsci.choice import backends

NAME = "flashsci"
KERNELS: dict[str, Callable[..., Any]] = {}  # operators of aten by name
VARLEN_KERNELS: dict[str, Callable[..., Any]] = {}  # operators of torch_attn, those of torch.nn.attention.varlen


class Handle:
    """flashsci's place among torch's flash attention kernels."""

    def __init__(self) -> None:
        self._library: Replaced | None = None

    def activate(self) -> Handle:
        """Replace the operators. torch calls it on activation (2.10 only on the first one of a process)."""
        if self._library is None:
            self._library = Replaced("CUDA")
        return self

    def remove(self) -> None:
        """Restore torch's own kernels. ``restore_flash_attention_impl`` (torch 2.11 and newer) does it through
        this."""
        if self._library is not None:
            self._library.remove()
            self._library = None


_handle = Handle()


def register() -> Handle:
    """Enter flashsci among torch's flash attention implementations. Nothing changes until it is activated.

    Returns:
        A :class:`Handle`, the same at every call; its ``remove`` restores torch's kernels.

    Raises:
        RuntimeError: this torch has no such registry.

    Examples:
        >>> from flashsci.integrations.torch import register
        >>> from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls
        >>> handle = register()
        >>> "flashsci" in list_flash_attention_impls()
        True
        >>> activate_flash_attention_impl("flashsci")  # doctest: +SKIP
        >>> handle.remove()

    Source: torch.nn.attention, torch 2.10 to 2.14.
    """
    enter = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if enter is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl (2.10 to 2.14 have); "
            "call flashsci.sdpa in the place of scaled_dot_product_attention"
        )
    enter(NAME, register_fn=_handle.activate)
    return _handle


class Replaced:
    """Operators of torch whose kernels of one dispatch key are flashsci's."""

    def __init__(self, dispatch_key: str) -> None:
        import torch.nn.attention.varlen  # defines the operators of torch_attn

        self._libraries = []
        for namespace, kernels in (("aten", KERNELS), ("torch_attn", VARLEN_KERNELS)):
            ops = getattr(torch.ops, namespace)
            replaced = torch.library.Library(namespace, "IMPL", dispatch_key)
            for name, kernel in kernels.items():
                if hasattr(ops, name):  # the in-place ones came with torch 2.12
                    replaced.impl(name, _by_name(getattr(ops, name), kernel), dispatch_key)
            self._libraries.append(replaced)

    def remove(self) -> None:
        """Restore torch's kernels."""
        for replaced in self._libraries:
            replaced._destroy()
        self._libraries = []


def _by_name(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, called with each argument under the name that this torch's schema gives it."""
    names = [argument.name for argument in op.default._schema.arguments]

    @functools.wraps(kernel)
    def named(*arguments: Any, **options: Any) -> Any:
        return kernel(**dict(zip(names, arguments, strict=False)), **options)

    return named


def _operator(function: Callable[..., Any], kernels: dict[str, Callable[..., Any]] = KERNELS) -> Callable[..., Any]:
    """Enter a function among the kernels, under its name; it records no graph and casts nothing."""

    @functools.wraps(function)
    def kernel(*arguments: Any, **options: Any) -> Any:
        device = (arguments[0] if arguments else options["query"]).device.type
        casts = torch.is_autocast_enabled(device)
        # Backends without an lse cannot compute this call; sdpa, which may have called this operator, is one of them.
        without_lse = backends.requested("auto")[0] in ("sdpa", "eager")
        ours = backends.use_backend("auto") if without_lse else nullcontext()
        exact = torch.autocast(device, enabled=False) if casts else nullcontext()
        with torch.no_grad(), exact, ours:
            return function(*arguments, **options)

    kernels[function.__name__] = kernel
    return kernel


_varlen_operator = functools.partial(_operator, kernels=VARLEN_KERNELS)


def _supported(**arguments: Any) -> None:
    """Raise RuntimeError for an argument that asks for an unsupported feature."""
    for name, x in arguments.items():
        if x is not None and x is not False:
            raise RuntimeError(
                f"flashsci as torch's flash attention: {name} is not supported; put torch's own kernels back with "
                "torch.nn.attention.restore_flash_attention_impl()"
            )


def _head_dims(query: Tensor, value: Tensor) -> None:
    if query.shape[-1] != value.shape[-1]:
        raise RuntimeError(
            "torch's flash operators give out the shape of query: head dims must be equal, got "
            f"{query.shape[-1]} and {value.shape[-1]}; call flashsci.attention"
        )


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x in the strides that torch's meta kernels promise to compilers, those of ``empty_like``."""
    if x.stride() == like.stride():
        return x
    promised = torch.empty_like(like)
    return x if x.stride() == promised.stride() else promised.copy_(x)


def _random(query: Tensor, dropout_p: float) -> tuple[Tensor | None, Tensor, Tensor]:
    """The seed of a call's dropout; then the same bits and an empty tensor, as the operators pass them to their
    backward."""
    unused = query.new_empty((), dtype=torch.uint64)
    if not dropout_p:
        return None, query.new_empty(2, dtype=torch.uint64), unused
    seed = draw_seed(query.device)
    return seed, seed.view(torch.uint64), unused


def _seed(rng_state: Tensor, dropout_p: float) -> Tensor | None:
    return rng_state.view(torch.int64) if dropout_p else None


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _dense_options(query: Tensor, key: Tensor, **options: Any) -> dict[str, Any]:
    """Options for ``[B, H, S, D]``. If both diagonals are equal, the usual one, which more kernels take."""
    square = query.shape[2] == key.shape[2]
    return dict(options, align="upper_left" if square else "lower_right")


@_operator
def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _supported(return_debug_mask=return_debug_mask)
    _head_dims(query, value)
    seed, rng_state, unused = _random(query, dropout_p)
    options = _dense_options(query, key, causal=is_causal, scale=scale, dropout_p=dropout_p)
    out, lse = attention(query, key, value, dropout_seed=seed, return_lse=True, **options)
    lengths = query.shape[2], key.shape[2]
    debug_mask = query.new_empty(0)
    return _laid_out(out, query), lse, None, None, *lengths, rng_state, unused, debug_mask


@_operator
def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    options = _dense_options(query, key, causal=is_causal, scale=scale, dropout_p=dropout_p)
    found = attention_backward(
        grad_out, query, key, value, out, logsumexp, dropout_seed=_seed(philox_seed, dropout_p), **options,
    )  # fmt: skip
    return tuple(_laid_out(g, x) for g, x in zip(found[:3], (query, key, value), strict=True))


@_operator
def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Dense ``[B, S, H, D]``, or packed ``[T, H, D]`` with offsets."""
    _supported(
        return_debug_mask=return_debug_mask,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        num_splits=num_splits,
    )
    _head_dims(query, value)
    seed, rng_state, unused = _random(query, dropout_p)
    options: dict[str, Any] = dict(
        causal=is_causal,
        window=_window(window_size_left, window_size_right),
        scale=scale,
        dropout_p=dropout_p,
    )
    given: dict[str, Any] = dict(dropout_seed=seed, return_lse=True)
    if cum_seq_q is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = attention(q, k, v, **given, **_dense_options(q, k, **options))
        out = out.transpose(1, 2)
    else:
        _packed(cum_seq_k)
        out, lse = varlen_attention(
            query, key, value, cum_seq_q, cum_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k, align="lower_right",
            **given, **options,
        )  # fmt: skip
    return _laid_out(out, query), lse, rng_state, unused, query.new_empty(0)


@_operator
def _flash_attention_forward_no_dropout_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    _supported(dropout_p=dropout_p or None)
    found, lse, *_ = _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal, return_debug_mask, scale=scale,
        window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k,
        alibi_slopes=alibi_slopes, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
    out.copy_(found)
    result: Tensor = lse
    return result


@_operator
def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    options: dict[str, Any] = dict(
        causal=is_causal,
        window=_window(window_size_left, window_size_right),
        scale=scale,
        dropout_p=dropout_p,
    )
    seed = _seed(rng_state, dropout_p)
    if cum_seq_q is None:
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        options = _dense_options(q, k, **options)
        found = attention_backward(dout, q, k, v, o, logsumexp, dropout_seed=seed, **options)
        gradients = tuple(g.transpose(1, 2) for g in found[:3])
    else:
        _packed(cum_seq_k)
        found = attention_backward(
            grad_out, query, key, value, out, logsumexp, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k,
            max_seqlen_q=max_q, max_seqlen_k=max_k, align="lower_right", dropout_seed=seed, **options,
        )  # fmt: skip
        gradients = found[:3]
    return tuple(_laid_out(g, x) for g, x in zip(gradients, (query, key, value), strict=True))


def _packed(cum_seq_k: Tensor | None) -> None:
    if cum_seq_k is None:
        raise RuntimeError(
            "flashsci as torch's flash attention: packed queries need cum_seq_k, the offsets of the keys (without "
            "them keys are pages, which are not supported)"
        )


@_varlen_operator
def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Packed ``[T, H, D]``. torch compares the numbers of heads before the call."""
    left, right = window_size or (-1, -1)
    out, lse, *_ = _flash_attention_forward(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, is_causal, False, scale=scale, window_size_left=left,
        window_size_right=right, seqused_k=seqused_k, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
    return out, lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


@_varlen_operator
def _varlen_attn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, ...]:
    left, right = window_size or (-1, -1)
    found: tuple[Tensor, ...] = _flash_attention_backward(
        grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, is_causal, rng_state, rng_state,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return found
