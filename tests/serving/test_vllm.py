"""vLLM with flashsci's attention: greedy tokens of tiny random models are those of transformers' eager attention in float32, in
batches, with prompts that arrive in chunks. What one layer does with scales, sinks and layouts; what is refused.

vLLM and transformers install each other's versions: `make serving` makes an environment for these tests."""

from __future__ import annotations

import importlib.metadata
import os

os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process, where calls are counted
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    GLOO_SOCKET_IFNAME="lo",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make serving` has it")

from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flashsci.integrations import vllm as integration
from tests.serving.tiny import NEW, greedy, model, prompts

if not current_platform.is_cpu():
    pytest.skip("tools/serving/replay.py is for GPUs", allow_module_level=True)

integration.register()  # as vLLM does where flashsci is installed


@pytest.fixture
def calls(monkeypatch):
    """The longest query of every call of paged_attention."""
    found = []

    def counted(query, *arguments, **options):
        found.append(options["max_seqlen_q"])
        return paged(query, *arguments, **options)

    paged = integration.paged_attention
    monkeypatch.setattr(integration, "paged_attention", counted)
    return found


def serve(folder, **options):
    defaults = dict(
        dtype="float32", skip_tokenizer_init=True, attention_backend="CUSTOM", enforce_eager=True, block_size=16,
        max_num_batched_tokens=32, max_num_seqs=4, max_model_len=128, enable_prefix_caching=False,
    )  # fmt: skip
    return LLM(str(folder), **defaults | options)


def tokens_of(llm):
    how = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NEW)
    asked = [dict(prompt_token_ids=p) for p in prompts()]
    return [list(x.outputs[0].token_ids) for x in llm.generate(asked, how, use_tqdm=False)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_tokens_are_those_of_eager_attention(name, tmp_path, calls):
    """Six prompts, four at a time, at most 32 tokens a step: chunks of prompts beside decodes."""
    made = model(name)
    made.save_pretrained(tmp_path)
    assert tokens_of(serve(tmp_path)) == greedy(made)
    assert max(calls) > 1 and min(calls) == 1


@pytest.mark.parametrize("name, off", [("mistral", dict(sliding_window=None)), ("gemma2", dict(sliding_window=128)),
                                       ("gemma2", dict(attn_logit_softcapping=None))])  # fmt: skip
def test_the_features_show(name, off):
    """Tokens are other ones without the window, and without the softcap: the test above would notice."""
    assert greedy(model(name)) != greedy(model(name, **off))


def test_shared_prefixes(tmp_path, calls):
    """Pages of one prompt serve another that begins with it."""
    made = model("llama")
    made.save_pretrained(tmp_path)
    llm = serve(tmp_path, enable_prefix_caching=True, max_num_batched_tokens=256)
    expected = greedy(made)
    assert tokens_of(llm) == expected
    first = max(calls)
    calls.clear()
    assert tokens_of(llm) == expected
    assert max(calls) < first, "the second time the pages are there"


def test_fp8_cache(tmp_path):
    made = model("gemma2", "rounded")
    made.save_pretrained(tmp_path)
    assert tokens_of(serve(tmp_path, kv_cache_dtype="fp8")) == greedy(made)
    assert greedy(made) != greedy(model("gemma2")), "the rounding shows"


def layer_of(**options):
    defaults = dict(num_heads=4, head_size=16, scale=0.3, num_kv_heads=2)
    with set_current_vllm_config(VllmConfig()):
        return integration.FlashSciAttention(**defaults | options)


def formula(q, k, v, causal=True, window=None, softcap=None, sinks=None, dtype=torch.float64):
    """Attention [Lq, Hq, D] as written down, the last query beside the last key; a window of w keys, the own one included."""
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = 0.3 * q @ k.transpose(1, 2)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    back = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    seen = (back >= 0) | (not causal)
    seen = seen if window is None else seen & (back.abs() < window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        columns = sinks.to(dtype)[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat([scores, columns], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


def judge(out, q, k, v, **options):
    """The two-error rule."""
    truth, plain = (formula(q, k, v, **options, dtype=d) for d in (torch.float64, torch.float32))
    error, due = ((x.double() - truth).abs().max().item() for x in (out, plain))
    assert error <= 2 * due + 8 * torch.finfo(torch.float32).eps * v.abs().max().item()


def metadata(lengths_q, lengths_k, pages, causal=True):
    """Of sequences with pages of their own, through the builder."""
    edges = torch.tensor([0, *lengths_q]).cumsum(0, dtype=torch.int32)
    table = torch.randperm(len(lengths_k) * pages).to(torch.int32).reshape(-1, pages)
    slots = [table[n].long().repeat_interleave(16) * 16 + torch.arange(16).repeat(pages) for n in range(len(lengths_k))]
    step = SimpleNamespace(
        num_actual_tokens=sum(lengths_q),
        max_query_len=max(lengths_q),
        query_start_loc=edges,
        causal=causal,
        seq_lens=torch.tensor(lengths_k, dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=torch.cat([s[:n] for s, n in zip(slots, lengths_k, strict=True)]),
    )
    builder = integration.FlashSciMetadataBuilder(None, [], None, torch.device("cpu"))
    return builder.build(common_prefix_len=0, common_attn_metadata=step)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize(
    "options, causal",
    [
        (dict(), True),
        (dict(sliding_window=5, logits_soft_cap=2.0, sinks=torch.tensor([0.0, 1, -3, 2])), True),
        (dict(sliding_window=5), False),  # of drafts; the window is on both sides
        (dict(kv_cache_dtype="fp8"), True),
        (dict(kv_cache_dtype="fp8_e5m2", sliding_window=20), True),
    ],
)
def test_one_layer(options, causal, order):
    """In every order of memory: what is written is what is read, dequantised by scales of the layer or of each head. Unwritten
    slots hold NaN, rows of padding are left alone."""
    lengths_q, lengths_k = [1, 7, 3], [33, 7, 20]
    attention, step = layer_of(**options), metadata(lengths_q, lengths_k, 3, causal)
    fp8 = integration.FP8.get(options.get("kv_cache_dtype"))
    shape = integration.FlashSciBackend.get_kv_cache_shape(9, 16, 2, 16)
    stored = torch.full([shape[i] for i in order], torch.nan).to(fp8 or torch.float32)
    cache = stored.permute([order.index(i) for i in range(4)])
    cache = cache.view(torch.uint8) if fp8 else cache
    key, value = torch.randn(2, sum(lengths_k) + 2, 2, 16).unbind(0)
    scales = torch.tensor([0.25, 2.0]), torch.tensor(0.5)
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    attention.do_kv_cache_update(layer, key, value, cache, step.slot_mapping)
    if fp8:
        key, value = (
            (x / s[..., None]).to(fp8).float() * s[..., None] for x, s in zip((key, value), scales, strict=True)
        )
    query = torch.randn(sum(lengths_q) + 2, 4, 16)
    out = torch.full_like(query, 7.0)
    assert attention.forward(layer, query, None, None, cache, step, out) is out
    assert (out[sum(lengths_q) :] == 7).all()
    named = dict(
        causal=causal,
        window=options.get("sliding_window"),
        softcap=options.get("logits_soft_cap"),
        sinks=options.get("sinks"),
    )
    total = sum(lengths_q), sum(lengths_k)
    parts = zip(*(x[:n].split(s) for x, n, s in ((out, total[0], lengths_q), (query, total[0], lengths_q), (key, total[1], lengths_k), (value, total[1], lengths_k))), strict=True)  # fmt: skip
    for part in parts:
        judge(*part, **named)


@pytest.mark.parametrize("window", [None, 4])
def test_encoders_keep_nothing(window):
    lengths = [5, 1, 9]
    attention = layer_of(attn_type=AttentionType.ENCODER_ONLY, sliding_window=window)
    step = metadata(lengths, lengths, 1, causal=False)
    query, key, value = torch.randn(15, 4, 16), *torch.randn(2, 15, 2, 16).unbind(0)
    attention.do_kv_cache_update(None, key, value, torch.zeros(0), step.slot_mapping)
    out = attention.forward(None, query, key, value, torch.zeros(0), step, torch.empty_like(query))
    for part in zip(*(x.split(lengths) for x in (out, query, key, value)), strict=True):
        judge(*part, causal=False, window=window)


def test_steps():
    """What vLLM changes from group to group, what it measures its memory with, and what a graph may hold."""
    step = metadata([2], [9], 1)
    builder = integration.FlashSciMetadataBuilder(None, [], None, torch.device("cpu"))
    table, slots = torch.zeros(1, 2, dtype=torch.int32), torch.arange(9)
    other = builder.update_block_table(step, table, slots)
    assert other.block_table is table and other.slot_mapping is slots
    assert step.block_table is not table and other.seq_lens is step.seq_lens
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH
    assert not layer_of().forward(None, torch.ones(2, 4, 16), None, None, None, None, torch.ones(2, 4, 16)).any()


def test_refusals():
    with pytest.raises(ValueError, match="ALiBi is not supported"):
        layer_of(alibi_slopes=[0.5] * 4)
    with pytest.raises(ValueError, match="sinks of encoders"):
        layer_of(sinks=torch.zeros(4), attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(ValueError, match="quantised outputs"):
        layer_of().forward(None, *[None] * 5, torch.zeros(1), output_scale=torch.ones(1))
    with pytest.raises(ValueError, match="causal and others"):
        metadata([1], [1], 1, causal=torch.tensor([True]))


def reasons(**options):
    asked = dict(
        head_size=64, dtype=torch.float16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=False,
        use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=None,
        attn_type=AttentionType.DECODER,
    )  # fmt: skip
    return integration.FlashSciBackend.validate_configuration(**asked | options)


def test_what_vllm_is_told():
    everything = dict(has_sink=True, has_sliding_window=True, use_non_causal=True, use_per_head_quant_scales=True)
    for kind in AttentionType:
        for cache in ("auto", "fp8", "fp8_e5m2", "float16"):
            assert reasons(attn_type=kind, kv_cache_dtype=cache, **everything) == []
    assert reasons(head_size=576) == ["head_size not supported"]
    assert reasons(block_size=8) == ["block_size not supported"]
    assert reasons(use_mla=True) == ["MLA not supported"]
    hopper, turing = (SimpleNamespace(major=major, minor=minor) for major, minor in ((9, 0), (7, 5)))
    assert reasons(kv_cache_dtype="fp8", device_capability=hopper) == []
    assert reasons(device_capability=turing) == []
    assert len(reasons(kv_cache_dtype="fp8", device_capability=turing)) == 1
    (reason,) = reasons(dtype=torch.bfloat16, device_capability=turing)
    assert "no bfloat16 instructions" in reason
    (reason,) = reasons(kv_cache_dtype="bfloat16")
    assert "bfloat16 beside a model of torch.float16" in reason


def test_registration():
    """Twice is once; on the CPU others than CUSTOM get what they got; a name that is taken is not taken over."""
    integration.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is integration.FlashSciBackend
    asked = SimpleNamespace(use_mla=False, use_sparse=False)
    cpu = AttentionBackendEnum.CPU_ATTN
    assert current_platform.get_attn_backend_cls(cpu, asked, num_heads=4) == cpu.get_path()
    from vllm.v1.attention.backends.registry import register_backend

    try:
        register_backend(AttentionBackendEnum.CUSTOM, "somebody.Else")
        with pytest.raises(ValueError, match=r"somebody\.Else already"):
            integration.register()
    finally:
        register_backend(AttentionBackendEnum.CUSTOM, integration.PATH)


def test_vllm_finds_it():
    if "flashsci" not in {d.name for d in importlib.metadata.distributions()}:
        pytest.skip("flashsci is not installed here (`make serving` installs it)")
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="flashsci")
    assert point.load() is integration.register


@pytest.mark.parametrize(("value", "asked"), [(None, None), ("0", None), ("1", "batch")])
def test_batch_invariance_is_declared_and_asked_for(value, asked, monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert integration.FlashSciBackend.supports_batch_invariance()
    assert integration.FlashSciAttention(4, 16, 0.25).deterministic == asked
