"""SGLang: an attention backend, ``--attention-backend fsci --page-size 16``.

SGLang calls :func:`register` in each of its processes, by the entry point ``sglang.srt.plugins``. It stores tokens in
slots, and a page is a fixed number of slots in a row. For each request it has the slot of each token: the page table
is every page-th of these. SGLang's pool writes new tokens, and :func:`flashsci.paged_attention` reads the pages
without a copy. Models with a separate pool for layers with a window have a second table. Decoding is captured in CUDA
graphs; its tables are then buffers that are filled before a replay.

Written for the interface of SGLang 0.5.18.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from flashsci.api.paged import paged_attention

NAME = "fsci"
PAGE = 16  # the divisor of pages
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def register() -> None:
    """Make ``attention_backend="fsci"`` of SGLang mean flashsci.

    SGLang calls it itself (entry point ``flashsci`` of the group ``sglang.srt.plugins``; ``SGLANG_PLUGINS`` chooses
    among those). Further calls change nothing.

    Examples:
        >>> import sglang  # doctest: +SKIP
        >>> engine = sglang.Engine(model_path=..., attention_backend="fsci", page_size=16)  # doctest: +SKIP

    Source: SGLang 0.5.18, ``sglang.srt.layers.attention.attention_registry``.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    register_attention_backend(NAME)(FlashSciBackend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


@dataclass
class Step:
    """The tensors that all layers of a step read."""

    cu_seqlens_q: Tensor  # [N + 1] int32
    max_seqlen_q: int
    seqused_k: Tensor  # [N] int32, new tokens included
    tables: Tables


@dataclass
class Tables:
    """The places of keys, and the places for those of new tokens."""

    pages: Tensor  # [N, pages] int32
    window_pages: Tensor  # the same in the pool of layers with a window; pages where there is only one pool
    window_slots: Tensor | None  # [T], the slots of new tokens in that pool

    def of(self, decodes: int) -> Tables:
        """Views of the first ``decodes`` sequences, with one token each."""
        slots = None if self.window_slots is None else self.window_slots[:decodes]
        return Tables(self.pages[:decodes], self.window_pages[:decodes], slots)

    def copy_(self, other: Tables) -> None:
        """Copy another's values. A replay is padded with sequences without a new token: theirs goes to slot 0, which
        SGLang never uses."""
        self.pages.copy_(other.pages)
        if self.window_slots is not None and other.window_slots is not None:
            self.window_pages.copy_(other.window_pages)
            new = other.window_slots.shape[0]
            self.window_slots[:new].copy_(other.window_slots)
            self.window_slots[new:].zero_()


class FlashSciBackend(AttentionBackend):
    """The attention of all layers of a model.

    Raises:
        ValueError: a page size that is no multiple of 16, context parallelism in decoding, or speculative decoding.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.page = model_runner.page_size
        if self.page % PAGE:
            raise ValueError(
                f"flashsci in SGLang: pages must be multiples of {PAGE} tokens, got {self.page}; start with --page-size {PAGE}"
            )
        if model_runner.ps.attn_dcp_size > 1:  # each rank would have a part of every sequence
            raise ValueError("flashsci in SGLang: --dcp-size is not supported; start with --attention-backend triton")
        self.device = model_runner.device
        # Layers of SGLang read the two pools from the backend, under these names.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.has_window_pool = hasattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa")
        self.step: Step | None = None
        self.captured: Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read a step that is not replayed from a graph."""
        batch = forward_batch
        if batch.spec_info is not None:
            raise ValueError(
                "flashsci in SGLang: speculative decoding is not supported; start with --attention-backend triton"
            )
        if batch.forward_mode.is_decode_or_idle():
            cu_seqlens_q = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=self.device)
            longest_q = 1
        else:
            edges = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0), (1, 0))
            cu_seqlens_q = edges.to(torch.int32)
            longest_q = max(batch.extend_seq_lens_cpu)
        longest_k = int(batch.seq_lens_cpu.max()) if batch.batch_size else 1
        self.step = Step(cu_seqlens_q, longest_q, batch.seq_lens.to(torch.int32), self._tables(batch, longest_k))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the buffers that captured decodes read."""

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        width = -(-self.req_to_token_pool.req_to_token.shape[1] // self.page)
        pages = buffer(max_bs, width)
        tables = Tables(pages, pages, None)
        if self.has_window_pool:
            slots = buffer(max_bs, dtype=torch.int64)
            tables = Tables(pages, torch.zeros_like(pages), slots)
        edges = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device)
        self.captured = Step(edges, 1, buffer(max_bs), tables)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the buffers of a decode that is captured, or about to be replayed."""
        whole, batch = self.captured, forward_batch
        if whole is None or not batch.forward_mode.is_decode() or batch.spec_info is not None:
            raise ValueError(
                f"flashsci in SGLang: {batch.forward_mode} is not captured in CUDA graphs, only decoding is; switch that graph off"
            )
        n = batch.batch_size
        tables = whole.tables.of(n)
        tables.copy_(self._tables(batch, self.req_to_token_pool.req_to_token.shape[1]))
        whole.seqused_k[:n].copy_(batch.seq_lens[:n])
        self.step = Step(whole.cu_seqlens_q[: n + 1], 1, whole.seqused_k[:n], tables)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _tables(self, batch: Any, longest: int) -> Tables:
        """Tables for lengths up to ``longest``. Entries beyond a sequence's length are not read."""
        firsts = self.req_to_token_pool.req_to_token[:, : longest : self.page][batch.req_pool_indices]
        pages = (firsts // self.page).to(torch.int32)
        if not self.has_window_pool:
            return Tables(pages, pages, None)
        translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
        slots = None if batch.out_cache_loc is None else translate(batch.out_cache_loc)
        return Tables(pages, (translate(firsts) // self.page).to(torch.int32), slots)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """q is ``[T, Hq D]`` or ``[T, Hq, D]``; out ``[T, Hq Dv]``."""
        _supported(layer, others)
        step = self.step
        assert step is not None, "SGLang reads a step before its layers run"
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, step.tables.window_slots)
            scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, *scales)
        keys, values = (
            self._paged(x(layer.layer_id))
            for x in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer)
        )
        apart = self.has_window_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        window = layer.sliding_window_size  # w means w keys before a query's own
        options = {}
        if keys.dtype in FP8 and layer.k_scale is not None:
            options = dict(k_scale=layer.k_scale.float(), v_scale=layer.v_scale.float())
        out = paged_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), keys, values,
            block_table=step.tables.window_pages if apart else step.tables.pages, seqused_k=step.seqused_k,
            cu_seqlens_q=step.cu_seqlens_q, max_seqlen_q=step.max_seqlen_q,
            causal=layer.attn_type != AttentionType.ENCODER_ONLY, window=None if window < 0 else (window, 0),
            softcap=layer.logit_cap or None, scale=layer.scaling, sink=sinks, **options,
        )  # fmt: skip
        return out.flatten(1)

    forward_decode = forward_extend

    def _paged(self, slots: Tensor) -> Tensor:
        """``[slots, Hk, D]`` as ``[pages, page, Hk, D]``."""
        whole = slots.shape[0] // self.page * self.page
        return slots[:whole].unflatten(0, (-1, self.page))


def _supported(layer: Any, others: dict[str, Any]) -> None:
    """Raise ValueError for unsupported features of a layer."""
    asked = [name for name, x in others.items() if x is not None and x is not False]
    if layer.is_cross_attention:
        asked.append("cross attention")
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        asked.append("attention in both directions between image tokens")
    if layer.xai_temperature_len > 0:
        asked.append("temperature by length (xai_temperature_len)")
    if asked:
        raise ValueError(f"flashsci in SGLang: {', '.join(asked)} not supported; start with --attention-backend triton")
