"""vLLM: an attention backend, ``--attention-backend CUSTOM``.

vLLM calls :func:`register` in each of its processes, by the entry point ``vllm.general_plugins``; nothing changes
until the backend is asked for. Keys and values are pages that vLLM owns. :func:`flashsci.write_kv_cache` writes a
layer's new tokens into them, and :func:`flashsci.paged_attention` reads them without a copy: prefills, chunks of
prefills and decodes in one call. Lengths and pages are tensors of vLLM with a fixed address from step to step, so a
CUDA graph captured once is right for all later steps.

Written for the interface of vLLM 0.26 and 0.32. The difference: until 0.26 a backend defines the shape and memory
order of the cache; since then vLLM defines the shape, and the backend says which orders it can read.
"""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from flashsci.api.paged import paged_attention, write_kv_cache
from flashsci.api.varlen import varlen_attention
from flashsci.call.problem import Problem
from flashsci.choice.backends import BACKENDS

PATH = f"{__name__}.FlashSciBackend"
FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def register() -> None:
    """Make ``attention_backend="CUSTOM"`` of vLLM mean flashsci.

    vLLM calls it itself (entry point ``flashsci`` of the group ``vllm.general_plugins``; ``VLLM_PLUGINS`` chooses
    among those). Further calls change nothing.

    Raises:
        ValueError: another plugin has taken the name CUSTOM.

    Examples:
        >>> from vllm import LLM  # doctest: +SKIP
        >>> model = LLM("meta-llama/Llama-3.2-1B", attention_backend="CUSTOM")  # doctest: +SKIP

    Source: vLLM 0.26 and 0.32, ``vllm.v1.attention.backends.registry``.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != PATH:
        raise ValueError(
            f"vLLM's attention backend CUSTOM is {custom.get_path()} already; load one of both with VLLM_PLUGINS=flashsci"
        )
    register_backend(custom, PATH)
    if current_platform.is_cpu():
        _let_cpus_choose()


def _let_cpus_choose() -> None:
    """Let vLLM's CPU platform accept a request for CUSTOM, checked as on CUDA.

    The platform answers every request with its own backend; all other requests still go that way.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = CpuPlatform.get_attn_backend_cls.__func__
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def chosen(cls: Any, selected_backend: Any, attn_selector_config: Any, *rest: Any, **named: Any) -> Any:
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return own(cls, selected_backend, attn_selector_config, *rest, **named)
        asked = attn_selector_config._asdict()
        reasons = FlashSciBackend.validate_configuration(device_capability=None, **asked)
        if reasons:
            raise ValueError(f"flashsci in vLLM cannot serve this configuration: {', '.join(reasons)}")
        return PATH

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)


class FlashSciBackend(AttentionBackend):
    """The answers that vLLM needs before it makes a layer: the calls that are served, and the classes that serve
    them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's name for it in its enumeration of backends

    @staticmethod
    def get_impl_cls() -> type[FlashSciAttention]:
        return FlashSciAttention

    @staticmethod
    def get_builder_cls() -> type[FlashSciMetadataBuilder]:
        return FlashSciMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The shape that later versions use without asking; called until vLLM 0.26."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The dimensions in memory order; called until vLLM 0.26. Any order can be read; vLLM's setting is
        followed."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        heads_first = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:  # layers are before all others in the shape
            return (1, 2, 0, 3, 4) if heads_first else (1, 0, 3, 2, 4)
        return (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= 256

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """vLLM asks where ``VLLM_BATCH_INVARIANT=1`` is set."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        if kv_cache_dtype in ("float16", "bfloat16") and dtype != getattr(torch, kv_cache_dtype):
            return f"a cache of {kv_cache_dtype} beside a model of {dtype} (--kv-cache-dtype auto takes the model's)"
        if device_capability is None:  # on the CPU the reference serves everything
            return None
        capability = device_capability.major, device_capability.minor
        stored = FP8.get(kv_cache_dtype, dtype)
        call = Problem("cuda", capability, dtype, 1, 1, head_size, head_size, paged=True, cache_dtype=stored)
        return BACKENDS["triton"].rejects(call, anywhere=True)


@dataclass
class FlashSciMetadata(AttentionMetadata):
    """A step's lengths and pages, for all layers of a group."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # [N + 1] int32
    seq_lens: Tensor  # [N] int32, new tokens included
    block_table: Tensor  # [N, pages] int32
    slot_mapping: Tensor  # [T] int64; vLLM's builders of cross attention put another one here
    causal: bool


class FlashSciMetadataBuilder(AttentionMetadataBuilder[FlashSciMetadata]):
    """A builder that passes on vLLM's tensors: a captured graph reads these in every later step."""

    # A captured launch has the longest query of its capture: that of all sequences of a uniform batch.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashSciMetadata:
        step = common_attn_metadata
        if isinstance(step.causal, Tensor):
            raise ValueError(
                "flashsci in vLLM: sequences of one step that are causal and others that are not are not supported; "
                "start vLLM with --attention-backend TRITON_ATTN"
            )
        return FlashSciMetadata(
            step.num_actual_tokens,
            step.max_query_len,
            step.query_start_loc,
            step.seq_lens,
            step.block_table_tensor,
            step.slot_mapping,
            step.causal,
        )

    def update_block_table(
        self, metadata: FlashSciMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> FlashSciMetadata:
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping = blk_table, slot_mapping
        return updated

    def use_cascade_attention(self, *arguments: Any, **options: Any) -> bool:
        return False


class FlashSciAttention(AttentionImpl[FlashSciMetadata]):
    """The attention of a layer."""

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError(
                "flashsci in vLLM: ALiBi is not supported; start vLLM with --attention-backend TRITON_ATTN"
            )
        if sinks is not None and attn_type in ENCODERS:
            raise ValueError(
                "flashsci in vLLM: attention sinks of encoders are not supported; start vLLM with "
                "--attention-backend TRITON_ATTN"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None  # vLLM: 0 for none
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.fp8 = FP8.get(kv_cache_dtype)
        self.deterministic = "batch" if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") else None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashSciMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """``query`` and ``output`` are ``[T, Hq, D]``; only their first ``num_actual_tokens`` count."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError(
                "flashsci in vLLM: quantised outputs are not supported; set fuse_attn_quant of the pass_config of "
                "vLLM's compilation config to false"
            )
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        step, tokens = attn_metadata, attn_metadata.num_actual_tokens
        if self.attn_type in ENCODERS:
            output[:tokens] = varlen_attention(
                query[:tokens], key[:tokens], value[:tokens], step.query_start_loc, max_seqlen_q=step.max_query_len,
                window=self._window(False), align="lower_right", scale=self.scale, softcap=self.softcap,
                deterministic=self.deterministic,
            )  # fmt: skip
            return output
        keys, values = self._pages(kv_cache)
        paged_attention(
            query[:tokens], keys, values, block_table=step.block_table, seqused_k=step.seq_lens,
            cu_seqlens_q=step.query_start_loc, max_seqlen_q=step.max_query_len, causal=step.causal,
            window=self._window(step.causal), softcap=self.softcap, scale=self.scale, sink=self.sinks,
            out=output[:tokens], deterministic=self.deterministic, **self._scales(layer, step.seq_lens.shape[0]),
        )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the new keys and values ``[T, Hk, D]`` into their places in the cache; rows beyond the slots are
        padding."""
        if self.attn_type in ENCODERS:  # these have no cache
            return
        write_kv_cache(key, value, *self._pages(kv_cache), slot_mapping, **self._scales(layer))

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K ``[pages, page, Hk, D]`` and V ``[pages, page, Hk, Dv]`` as views of vLLM's ``[pages, Hk, page, D +
        Dv]``, in any memory order."""
        if self.fp8 is not None:
            kv_cache = kv_cache.view(self.fp8)
        both = kv_cache.transpose(1, 2)
        return both[..., : self.head_size], both[..., self.head_size :]

    def _window(self, causal: bool) -> tuple[int, int] | None:
        """The window in flashsci's form; vLLM counts a query's own key."""
        if self.sliding_window is None:
            return None
        back = self.sliding_window - 1
        return back, 0 if causal else back

    def _scales(self, layer: Any, sequences: int | None = None) -> dict[str, Any]:
        """The scales of an FP8 cache: one for the layer, or one for each KV head."""
        if self.fp8 is None:
            return {}
        scales = dict(k_scale=layer._k_scale, v_scale=layer._v_scale)
        if sequences is None:
            return scales
        return {name: x if x.numel() == 1 else x.expand(sequences, self.num_kv_heads) for name, x in scales.items()}
