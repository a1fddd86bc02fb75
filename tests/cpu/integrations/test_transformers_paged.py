"""Continuous batching of transformers through paged calls: greedy tokens of tiny random models are those of eager attention,
with prompts in chunks beside decodes, shared prefixes, windows, softcap and sinks."""

from __future__ import annotations

import pytest
import torch

from flashsci.integrations import transformers as integration
from flashsci.integrations import transformers_paged as paged

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.3, bos_token_id=None,
    eos_token_id=None, pad_token_id=None,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=20),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=20, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=20, num_local_experts=2, num_experts_per_tok=2
    ),
}
NEW = 8  # tokens


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """transformers asks psutil, which need not be there."""
    cache = pytest.importorskip("transformers.generation.continuous_batching.cache")
    of_machine = (torch.device("cpu"), 2**30, 0, 0)
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: of_machine)
    integration.register()


@pytest.fixture
def calls(monkeypatch):
    """How often each function was called."""
    found = {"paged_attention": 0, "varlen_attention": 0}

    def counted(name, function):
        def call(*arguments, **options):
            found[name] += 1
            return function(*arguments, **options)

        return call

    for name in found:
        monkeypatch.setattr(paged, name, counted(name, getattr(paged, name)))
    return found


def model(name):
    config = CONFIGS[name]()
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    made = kind._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.shape == (4,):  # sinks, which begin as nothing in particular
                parameter.normal_()
        made.get_input_embeddings().weight *= 0.1  # else tied embeddings repeat the last token
    return made


@torch.no_grad()
def greedy(made, prompts):
    """The tokens that follow each prompt, without a cache."""
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(NEW):
            logits = made(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def batched(made, prompts, block_size=16):
    """The same, with at most 32 tokens a step."""
    made.set_attn_implementation("paged|fsci")
    found = made.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=block_size, num_blocks=1024 // block_size, max_batch_tokens=32
        ),
        progress_bar=False,
    )
    return [x.generated_tokens for x in found.values()]


def drawn(*lengths):
    return [torch.randint(128, (n,)).tolist() for n in lengths]


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_eager_attention(name, calls):
    made, prompts = model(name), drawn(1, 5, 40, 90, 17)
    expected = greedy(made, prompts)
    assert batched(made, prompts) == expected
    assert calls["paged_attention"] > 0 or name == "mistral", "all of its layers have windows"


def test_shared_prefixes(calls):
    """Pages of one prompt serve another."""
    made, (prefix, *ends) = model("llama"), drawn(50, 3, 9, 1)
    prompts = [prefix + end for end in ends]
    expected = greedy(made, prompts)
    assert batched(made, prompts) == expected
    assert calls["paged_attention"] > 0


def test_blocks_that_are_no_pages(calls):
    made, prompts = model("llama"), drawn(5, 40)
    expected = greedy(made, prompts)
    assert batched(made, prompts, block_size=20) == expected
    assert calls["paged_attention"] == 0 and calls["varlen_attention"] > 0


def test_refusals():
    made = model("llama")
    made.set_attn_implementation("paged|fsci")
    with pytest.raises(ValueError, match="load the model with 'fsci'"):
        made(torch.ones(1, 3, dtype=torch.long))
    given = dict(cache=object(), cu_seq_lens_q=torch.tensor([0, 1]), read_index=[], write_index=[])
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="attention_mask is not supported"):
        paged.paged_attention_forward(made, x, x, x, torch.ones(1), **given)
    with pytest.raises(ValueError, match="block_table is not supported"):
        paged.paged_attention_forward(made, x, x, x, block_table=torch.zeros(1), **given)


def test_a_paged_name_that_is_taken():
    transformers.AttentionInterface.register("paged|mine", integration.attention_forward)
    try:
        with pytest.raises(ValueError, match=r"'paged\|mine' is registered with another"):
            integration.register("mine")
        assert "mine" not in transformers.AttentionInterface().valid_keys()
    finally:
        del transformers.AttentionInterface._global_mapping["paged|mine"]
