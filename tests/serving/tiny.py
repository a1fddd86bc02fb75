"""Tiny random models and their greedy tokens by transformers' eager attention in float32."""

from __future__ import annotations

import torch
import transformers

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.3,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
# A window and a softcap that change the tokens: `test_the_features_show` sees to it.
CONFIGS = {
    "llama": lambda **o: transformers.LlamaConfig(**SIZES | o),
    "mistral": lambda **o: transformers.MistralConfig(**SIZES | dict(sliding_window=20) | o),
    # SGLang reads `hidden_act`, which checkpoints have beside `hidden_activation`.
    "gemma2": lambda **o: transformers.Gemma2Config(
        **SIZES
        | dict(sliding_window=20, attn_logit_softcapping=2.0, query_pre_attn_scalar=8, hidden_act="gelu_pytorch_tanh")
        | o
    ),
    "mellum": lambda **o: transformers.MellumConfig(
        **SIZES
        | dict(sliding_window=20, layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["dense"] * 2)
        | o
    ),
}
NEW = 12  # tokens
LENGTHS = (1, 5, 40, 90, 17, 33)


def rounded(module, query, key, value, mask, **options):
    """Eager attention on what a cache of e4m3 holds."""
    key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
    return EAGER(module, query, key, value, mask, **options)


EAGER = transformers.models.gemma2.modeling_gemma2.eager_attention_forward
transformers.AttentionInterface.register("rounded", rounded)
transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.eager_mask)


def model(name, attention="eager", **changes):
    torch.manual_seed(1)
    config = CONFIGS[name](**changes)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [kind.__name__]
    made = kind._from_config(config, attn_implementation="eager").eval()
    # Else tied embeddings repeat the last token for ever.
    made.get_input_embeddings().weight.data *= 0.1
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
