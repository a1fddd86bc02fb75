"""Hugging Face transformers: ``attn_implementation="fsci"``. (``"paged|fsci"`` is in :mod:`.transformers_paged`.)

A model passes its attention function tensors, possibly a mask, and further arguments. A mask, if there is one, is
complete: it comes from transformers' own rules for SDPA, so it includes causality and windows. Without a mask the
function applies them itself. Packed sequences are found here, because transformers leaves them out of the mask when
it has a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flashsci.api.attention import attention
from flashsci.api.maps import attention_weights
from flashsci.api.varlen import varlen_attention
from flashsci.call.torch_state import autocast
from flashsci.integrations.transformers_paged import paged_attention_forward

# Arguments that other attention functions of transformers read and this one refuses, each with the alternative.
REFUSED = {
    "cache": 'paged caches are for attn_implementation="paged|fsci"',
    "block_table": 'paged caches are for attn_implementation="paged|fsci"',
    "block_indices": "attention over chosen blocks is not supported; use the implementation that the model names",
    "kernel_options": 'they are options of FlexAttention; use attn_implementation="flex_attention", or leave them out',
}


def register(name: str = "fsci") -> None:
    """Make ``attn_implementation=name`` of every transformers model run :func:`flashsci.attention`.

    ``paged|name``, its continuous batching, runs :func:`flashsci.paged_attention`. This function registers an
    attention function and, under the same name, the mask function of SDPA: without one transformers silently drops
    every mask. (Continuous batching asks for no mask.) Call it before a model is made; further calls change nothing.

    Args:
        name: the name that models are loaded with. It must not contain "flash", "flex_attention" or "sdpa", by which
            transformers recognises its own implementations, nor "/", ":" or "|", which it parses, nor be "eager".

    Raises:
        ImportError: transformers is not installed, or is older than its attention interface.
        ValueError: a name that transformers would misread, or that another package has registered.

    Examples:
        >>> from flashsci.integrations.transformers import register
        >>> register()
        >>> model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fsci")  # doctest: +SKIP

    Source: transformers 5.17, ``AttentionInterface`` and ``masking_utils``.
    """
    for part, reason in {
        "flash": "transformers takes every name with 'flash' in it for a flash-attn package, tries to import it "
        "when a model is made, and builds other masks for it",
        "flex_attention": "transformers takes it for FlexAttention, and checks whether the model supports that",
        "sdpa": "transformers takes it for SDPA, and may exchange it for 'eager'",
        "/": "transformers takes it for a kernel to download",
        ":": "transformers takes it for a kernel to download",
        "|": "transformers takes what stands before it for a kind of cache",
    }.items():
        if part in name:
            raise ValueError(f"the name {name!r} contains {part!r}: {reason}; the default is 'fsci'")
    if name in ("", "eager"):
        raise ValueError(f"the name {name!r} is taken by transformers; the default is 'fsci'")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"flashsci.integrations.transformers needs a transformers with AttentionMaskInterface ({error}); it is "
            "tested with 5.17: pip install 'transformers==5.17.*'"
        ) from error
    functions: dict[str, Callable[..., Any]] = {name: attention_forward, f"paged|{name}": paged_attention_forward}
    for each, function in functions.items():
        if AttentionInterface().get(each, function) is not function:
            raise ValueError(f"{each!r} is registered with another attention function; choose another name")
    for each, function in functions.items():
        AttentionInterface.register(each, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    deterministic: bool | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that :func:`register` registers.

    Args:
        module: the attention layer; its ``is_causal`` counts if the argument is None, and its ``training`` switches
            dropout.
        query: ``[B, Hq, Sq, D]``. float32 with 16-bit weights (as in PEFT) is cast to their dtype.
        key: ``[B, Hk, Sk, D]``, heads not repeated.
        value: ``[B, Hk, Sk, Dv]``.
        attention_mask: ``[B, 1 or Hq, Sq, Sk]``, bool (True = attend) or added to the scores; None: causal according
            to ``is_causal``, upper left where ``Sq > 1`` (keys beyond Sq are the unused end of a static cache).
        dropout: probability of dropping, in training.
        scaling: factor of the scores; None: ``1 / sqrt(D)``.
        sliding_window: w: a query sees itself and the ``w - 1`` keys before it (not causal: also after it). A mask
            includes it already.
        softcap: as in :func:`flashsci.attention`.
        s_aux: ``[Hq]`` logits of attention sinks, columns of the softmax without a value.
        position_bias: added to the scores, broadcastable to ``[B, Hq, Sq, Sk]``, with a gradient.
        position_ids: ``[B or 1, Sq]``. A packed sequence begins where they fall, or return to their least.
        cu_seq_lens_q, cu_seq_lens_k: offsets ``[N + 1]`` of packed sequences in the rows of the batch.
        max_length_q, max_length_k: the longest of these, as host ints; tensors are not read.
        deterministic: True demands bitwise equal results run to run.
        output_attentions: True: also return the probabilities, before dropout, computed again from the lse.
        others: arguments that models pass on and no attention function reads. Those of :data:`REFUSED` raise.

    Returns:
        ``([B, Sq, Hq, Dv] contiguous, None)``, or in place of None the probabilities ``[B, Hq, Sq, Sk]`` in the dtype of the
        query: zeros in rows without a key.

    Raises:
        ValueError: an argument that is not supported, or shapes that do not fit.
        TypeError, BackendError: as :func:`flashsci.attention`.
    """
    for name, advice in REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"flashsci in transformers: {name} is not supported: {advice}")
    query, key, value = _in_dtype_of_weights(module, query, key, value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bias, mask, keys = position_bias, attention_mask, key.shape[2]
    if mask is None and causal and 1 < query.shape[2] < key.shape[2]:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., : query.shape[2]]
    packing = _packing(query, key, position_ids, mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    pattern = _Pattern(bool(causal), sliding_window)
    options: dict[str, Any] = dict(
        scale=scaling,
        softcap=softcap,
        dropout_p=dropout if module.training else 0.0,
        deterministic=deterministic or None,
    )
    if s_aux is not None:
        if s_aux.shape != (query.shape[1],):
            raise ValueError(f"s_aux must have one logit for each of {query.shape[1]} heads, got {list(s_aux.shape)}")
        options["sink"] = s_aux.to(torch.promote_types(s_aux.dtype, torch.float32))
    known = packing is not None and _says_no_more(mask, pattern, packing)
    weights = None
    if packing is not None and known and bias is None and not output_attentions:
        out = _packed(query, key, value, pattern, packing, options)
    else:
        if packing is not None and (known or packing.given):
            mask = _and_packing(mask, pattern, packing, query, key)
        elif sliding_window is not None and _says_no_more(mask, pattern):
            mask = None  # kernels skip keys outside a window, but read all of a mask
        out, weights = _dense(query, key, value, mask, bias, pattern, options, bool(output_attentions))
    if weights is not None:
        weights = torch.nn.functional.pad(weights, (0, keys - key.shape[2])).to(query.dtype)
    return out.contiguous(), weights


class _Pattern(NamedTuple):
    """The keys of its sequence that a query sees."""

    causal: bool
    sliding_window: int | None

    def window(self) -> tuple[int, int] | None:
        """The window in attention()'s form, given together with ``causal``."""
        if self.sliding_window is None:
            return None
        return self.sliding_window - 1, self.sliding_window - 1

    def mask(self, length: int, device: torch.device) -> Tensor:
        """The pattern as a mask: bool [S, S]."""
        places = torch.arange(length, device=device)
        back = places[:, None] - places
        keep = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
        return keep if self.sliding_window is None else keep & (back.abs() < self.sliding_window)


class _Packing(NamedTuple):
    """Packed sequences: offsets in the rows of the batch, one row after the other; the longest if known."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int | None
    max_k: int | None
    rows: int  # of queries, in the whole batch
    given: bool  # by the caller, not read from positions


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    pattern: _Pattern,
    options: dict[str, Any],
    weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """out [B, Sq, Hq, Dv], and the probabilities [B, Hq, Sq, Sk] if wanted."""
    given: dict[str, Any]
    if mask is None:
        if pattern.causal and query.shape[2] == 1:  # decoding: the one query is the last
            given = dict(window=pattern.window(), align="lower_right")
        else:
            given = dict(causal=pattern.causal, window=pattern.window())
    elif mask.dtype == torch.bool:
        given = dict(mask=mask)
    else:
        given = {}
        bias = mask if bias is None else bias + mask
    if bias is not None and bias.dtype != query.dtype:
        bias = bias.float()
    if not weights:
        out: Tensor = attention(query, key, value, bias=bias, **given, **options)
        return out.transpose(1, 2), None
    out, lse = attention(query, key, value, bias=bias, return_lse=True, **given, **options)
    query, key, _ = autocast(query, key, value)
    shaping = dict(scale=options["scale"], softcap=options["softcap"])
    return out.transpose(1, 2), attention_weights(query, key, lse, bias=bias, **given, **shaping)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: _Pattern,
    packing: _Packing,
    options: dict[str, Any],
) -> Tensor:
    """out of :func:`_dense`, for each sequence alone."""
    batch, length = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out: Tensor = varlen_attention(
        q, k, v, packing.cu_q, packing.cu_k, max_seqlen_q=packing.max_q, max_seqlen_k=packing.max_k,
        causal=pattern.causal, window=pattern.window(), align="lower_right", **options,
    )  # fmt: skip
    return out.unflatten(0, (batch, length))


def _in_dtype_of_weights(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in the model's dtype: PEFT keeps norms in fp32, and layers of quantised weights pass that dtype
    on."""
    if query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type):
        return query, key, value
    config = getattr(module, "config", None)
    if hasattr(config, "_is_quantized"):
        dtype = config.dtype  # type: ignore[union-attr]
    else:
        linear = (x for x in module.modules() if isinstance(x, torch.nn.Linear))
        dtype = next((x.weight.dtype for x in linear), torch.float32)
    if dtype not in (torch.float16, torch.bfloat16):
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _packing(
    query: Tensor,
    key: Tensor,
    position_ids: Tensor | None,
    mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: Any,
    max_k: Any,
) -> _Packing | None:
    """The packed sequences of a call, None if every row is one."""
    length = query.shape[2]
    if (cu_q is None) != (cu_k is None):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k go together, got one of them")
    if cu_q is not None and cu_k is not None:
        most_q, most_k = (x if isinstance(x, int) else None for x in (max_q, max_k))
        rows = query.shape[0] * length
        return _Packing(cu_q.to(torch.int32), cu_k.to(torch.int32), most_q, most_k, rows, True)
    if position_ids is None or length == 1 or key.shape[2] != length:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != length:
        return None  # positions of several axes (images); nothing that packs has them
    if torch.compiler.is_compiling() and mask is not None:
        return None  # the mask is followed: no tensor can be read while a graph is made
    return _from_positions(position_ids, query.shape[0])


# Values read from tensors on the host, once for all the layers that get the same tensor.
_read = WeakTensorKeyDictionary()
_T = TypeVar("_T")


def _once(x: Tensor, what: Hashable, read: Callable[[], _T]) -> _T:
    """``read()``, remembered as long as the tensor exists unchanged."""
    if x.is_inference():  # it does not count its changes
        return read()
    version, known = _read.get(x, (None, {}))
    if version != x._version:
        known = {}
        _read[x] = (x._version, known)
    if what not in known:
        known[what] = read()
    found: _T = known[what]
    return found


@torch.compiler.disable
def _from_positions(position_ids: Tensor, batch: int) -> _Packing | None:
    """The packed sequences of these positions; reading them waits for the device."""

    def read() -> _Packing | None:
        before, after = position_ids[:, :-1], position_ids[:, 1:]
        begins = (after < before) | (after == position_ids.amin(1, keepdim=True))
        if not begins.any():
            return None
        begins = torch.nn.functional.pad(begins, (1, 0), value=True).expand(batch, -1).flatten()
        end = begins.new_tensor([begins.shape[0]], dtype=torch.int64)
        offsets = torch.cat([begins.nonzero().flatten(), end]).to(torch.int32)
        longest = int(offsets.diff().max())
        return _Packing(offsets, offsets, longest, longest, begins.shape[0], False)

    return _once(position_ids, ("packing", batch), read)


def _same_sequence(packing: _Packing, batch: int, length_q: int, length_k: int) -> Tensor:
    """Bool [B, 1, Sq, Sk]: pairs within one sequence."""

    def of_rows(offsets: Tensor, length: int) -> Tensor:
        rows = torch.arange(batch * length, dtype=torch.int32, device=offsets.device)
        return torch.bucketize(rows, offsets[1:], right=True).reshape(batch, 1, length)

    of_queries, of_keys = of_rows(packing.cu_q, length_q), of_rows(packing.cu_k, length_k)
    return of_queries.unsqueeze(-1) == of_keys.unsqueeze(-2)


def _says_no_more(mask: Tensor | None, pattern: _Pattern, packing: _Packing | None = None) -> bool:
    """Whether a mask holds only the pattern, with or without the packing.

    Reading the mask waits for the device; while a graph is made, no mask counts as known.
    """
    if mask is None:
        return True
    batch, length = mask.shape[0], mask.shape[-1]
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] != length:
        return False
    if torch.compiler.is_compiling():
        return False
    offsets = None if packing is None else packing.cu_q

    def read() -> tuple[bool, Tensor | None]:
        keep = pattern.mask(length, mask.device)
        rows = mask[:1] if mask.stride(0) == 0 else mask  # rows that all of a batch share
        known = torch.equal(rows, keep.expand(rows.shape))
        if not known and packing is not None and packing.rows == batch * length:
            keep = keep & _same_sequence(packing, batch, length, length)
            known = torch.equal(mask, keep.expand(mask.shape))
        return known, offsets  # they stay alive with their id, a part of the key

    return _once(mask, (pattern, id(offsets)), read)[0]


def _and_packing(mask: Tensor | None, pattern: _Pattern, packing: _Packing, query: Tensor, key: Tensor) -> Tensor:
    """The mask, or the pattern if there is none, with pairs of different sequences masked."""
    batch, length_q, length_k = query.shape[0], query.shape[2], key.shape[2]
    same = _same_sequence(packing, batch, length_q, length_k)
    if mask is None:
        if length_q != length_k:
            raise ValueError(
                f"packed sequences beside a position_bias need as many queries as keys, got {length_q} and {length_k}"
            )
        return same & pattern.mask(length_q, query.device)
    return same & mask if mask.dtype == torch.bool else mask.masked_fill(~same, float("-inf"))
