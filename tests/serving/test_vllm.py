"""vLLM with flashsci's attention: greedy tokens of tiny random models are those of transformers' eager attention in float32, in
batches, with prompts that arrive in chunks. What one layer does with scales, sinks and layouts; what is refused.

vLLM and transformers install each other's versions: `make serving` makes an environment for these tests."""

from __future__ import annotations

import importlib.metadata
import os

os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process, where calls are counted
    VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
)  # fmt: skip

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed (`make serving` installs it in an environment of its own)")

import transformers
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flashsci.integrations import vllm as integration

if not current_platform.is_cpu():
    pytest.skip("scripts/serving.py is for GPUs", allow_module_level=True)

integration.register()  # as vLLM does where flashsci is installed

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.3,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
# A window and a softcap that change the tokens: `test_the_features_show` sees to it.
CONFIGS = {
    "llama": lambda **o: transformers.LlamaConfig(**SIZES | o),
    "mistral": lambda **o: transformers.MistralConfig(**SIZES | dict(sliding_window=20) | o),
    "gemma2": lambda **o: transformers.Gemma2Config(
        **SIZES | dict(sliding_window=20, attn_logit_softcapping=2.0, query_pre_attn_scalar=8) | o
    ),
}
NEW = 12  # tokens
LENGTHS = (1, 5, 40, 90, 17, 33)


def rounded(module, query, key, value, mask, **options):
    """Eager attention on what a cache of e4m3 holds."""
    key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
    return EAGER["gemma2"](module, query, key, value, mask, **options)


EAGER = {"gemma2": transformers.models.gemma2.modeling_gemma2.eager_attention_forward}
transformers.AttentionInterface.register("rounded", rounded)
transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.eager_mask)


def model(name, attention="eager", **changes):
    torch.manual_seed(1)
    config = CONFIGS[name](**changes)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [kind.__name__]
    made = kind._from_config(config, attn_implementation="eager").eval()
    made.get_input_embeddings().weight.data *= 0.1  # else tied embeddings repeat the last token for ever
    made.set_attn_implementation(attention)
    return made


def prompts():
    numbers = torch.Generator().manual_seed(2)
    return [torch.randint(128, (n,), generator=numbers).tolist() for n in LENGTHS]


@torch.no_grad()
def greedy(made):
    """The tokens that follow each prompt, without a cache."""
    found = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(made(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


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


@pytest.mark.parametrize("name", CONFIGS)
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
