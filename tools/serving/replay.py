"""vLLM with flashsci's attention against vLLM's own backends, on a GPU machine with vLLM (0.26 or 0.32).

A table comes last.

    python tools/serving/replay.py                    tokens of three tiny models, then step times of a Llama of 1B parameters
    python tools/serving/replay.py --only tokens      or times

Tokens: greedy, of random models in 16 bits, eagerly and with graphs of decodes, with a 16-bit and an FP8 cache,
against transformers' eager attention in float32 (rounded as the cache rounds). If a token differs, the two logits
must be as near to each other as twice the error of transformers in 16 bits allows. Their distance is printed as a
share of that, and likewise for vLLM's own backend. Without a GPU the tokens are compared in float32, and there are
no times. Times: batch 64, prompts of 512, float16, random weights from vLLM; each backend in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", VLLM_CPU_KVCACHE_SPACE="1",
)  # fmt: skip

import torch
import transformers

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
SIZES = dict(
    vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, initializer_range=0.1, bos_token_id=None,
    eos_token_id=None, pad_token_id=None,
)  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=100),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=100, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
}
ONE_BILLION = dict(
    vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=2048, architectures=["LlamaForCausalLM"],
)  # fmt: skip
LENGTHS, NEW = (1, 17, 64, 300, 511, 5, 130, 90), 24
BATCH, PROMPT, STEPS, ROUNDS = 64, 512, 128, 5
AT_ONCE = 5  # engines on one GPU


def rounded(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Eager attention on keys and values rounded to e4m3, like a cache."""
    key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
    eager = transformers.models.gemma2.modeling_gemma2.eager_attention_forward
    return eager(module, query, key, value, mask, **options)


def dtype_of(model: str) -> torch.dtype:
    """vLLM takes no Gemma 2 in float16."""
    half = torch.bfloat16 if model == "gemma2" else torch.float16
    return half if GPU else torch.float32


def engine(folder: str, dtype: torch.dtype, backend: str, graphs: bool, **options: Any) -> Any:
    from vllm import LLM

    from flashsci.integrations.vllm import register

    register()
    how = dict(compilation_config=GRAPHS) if graphs else dict(enforce_eager=True)
    return LLM(
        folder,
        dtype=str(dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        attention_backend=backend,
        **how,
        **options,
    )


def generate(llm: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=new)
    asked = [dict(prompt_token_ids=p) for p in prompts]
    return [list(x.outputs[0].token_ids) for x in llm.generate(asked, how, use_tqdm=False)]


def drawn() -> list[list[int]]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(512, (n,), generator=numbers).tolist() for n in LENGTHS]


def tokens_of_vllm(folder: str, dtype: torch.dtype, backend: str, graphs: bool, cache: str) -> list[list[int]]:
    """Prompts in pieces of at most 128 tokens a step."""
    options = dict(max_num_batched_tokens=128, max_num_seqs=8, max_model_len=600, kv_cache_dtype=cache)
    if GPU:  # concurrent engines cannot measure free memory
        options |= dict(gpu_memory_utilization=0.8 / AT_ONCE, kv_cache_memory_bytes=1 << 29)
    return generate(engine(folder, dtype, backend, graphs, **options), drawn(), NEW)


@torch.no_grad()
def differing(model: Any, dtype: torch.dtype, found: list[list[int]]) -> list[float]:
    """For the prompts whose tokens differ from those of the model in float32: the distance of the first other
    token's logit below the best, in differences that this dtype allows. Later tokens have another prefix."""
    ratios = []
    for prompt, tokens in zip(drawn(), found, strict=True):
        ids = torch.tensor([prompt + tokens], device=DEVICE)
        exact, plain = (
            model.to(d)(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() for d in (torch.float32, dtype)
        )
        best = exact.argmax(-1)
        wrong = (best != ids[0, len(prompt) :]).nonzero()
        if wrong.numel():
            at = int(wrong[0])
            gap = exact[at, best[at]] - exact[at, tokens[at]]
            # Twice the error of each of the two; the error of one position would be a single draw.
            ratios.append((gap / (4 * (exact - plain).abs().max())).item())
    return ratios


def tokens(run: Any, say: Any) -> None:
    """A line of the table for each model, backend, cache and way of running; a differing token that has no excuse is marked."""
    transformers.AttentionInterface.register("rounded", rounded)
    transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.eager_mask)
    ways = [("CUSTOM", "auto", False), ("CUSTOM", "fp8", False)]
    if GPU:
        ways += [("CUSTOM", "auto", True), ("CUSTOM", "fp8", True), ("FLASH_ATTN", "auto", False)]
    with contextlib.ExitStack() as stack:
        models = {}
        for name, config in MODELS.items():
            torch.manual_seed(0)
            kind = transformers.AutoModelForCausalLM._model_mapping[type(config())]
            model = kind._from_config(config(), attn_implementation="eager").eval()
            model.config.architectures = [kind.__name__]
            model.get_input_embeddings().weight.data *= 0.3  # else tied embeddings repeat the last token
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model.to(dtype_of(name)).save_pretrained(folder)
            models[name] = model, folder
        # Engines are small and take long to start: several at once.
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE if GPU else 1))
        engines = {
            (name, backend, cache, graphs): pool.submit(
                run, tokens_of_vllm, folder, dtype_of(name), backend, graphs, cache
            )
            for name, (_, folder) in models.items()
            for backend, cache, graphs in ways
        }
        for (name, backend, cache, graphs), engine in engines.items():
            how = f"{name}, {cache} cache, {'graphs' if graphs else 'eager'} | {backend}"
            found, problem = engine.result()
            if problem:
                say(f"| {how} | **{problem}** | |")
                continue
            model = models[name][0]
            model.set_attn_implementation("eager" if cache == "auto" else "rounded")
            ratios = differing(model.to(DEVICE), dtype_of(name), found)
            bad = sum(ratio > 1 for ratio in ratios)
            near = f", others as near as {max(ratios):.2f} of what may be" if ratios else ""
            wrong = f", **{bad} WRONG**" if bad else ""
            say(f"| {how} | {len(LENGTHS) - len(ratios)} of {len(LENGTHS)} equal{near}{wrong} | |")


def step_times(backend: str) -> tuple[float, float]:
    """(ms of the prefill, ms of a decode step), medians."""
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaConfig(**ONE_BILLION).save_pretrained(folder)
        llm = engine(
            folder, torch.float16, backend, True, load_format="dummy", max_num_seqs=BATCH, max_num_batched_tokens=BATCH * PROMPT,
            max_model_len=PROMPT + STEPS + 16,
        )  # fmt: skip
    prompts = torch.randint(ONE_BILLION["vocab_size"], (BATCH, PROMPT)).tolist()

    def seconds(new: int) -> float:
        start = time.perf_counter()
        generate(llm, prompts, new)
        return time.perf_counter() - start

    seconds(STEPS + 1)
    first, both = zip(*((seconds(1), seconds(STEPS + 1)) for _ in range(ROUNDS)), strict=True)
    prefill = statistics.median(first)
    return 1e3 * prefill, 1e3 * (statistics.median(both) - prefill) / STEPS


def times(run: Any, say: Any) -> None:
    for backend in ("CUSTOM", "FLASH_ATTN", "TRITON_ATTN", "CUSTOM"):  # ours again, for the drift
        found, problem = run(step_times, backend)
        prefill, decode = ("-", "-") if problem else (f"{x:.2f}" for x in found)
        name = f"{backend}: **{problem}**" if problem else backend
        say(f"| 1B, batch {BATCH}, prompt {PROMPT} | {name} | {prefill} | {decode} |")


def attempt(function: Any, *arguments: Any) -> tuple[Any, str | None]:
    """(result, or the error): some errors of vLLM's cannot be passed between processes."""
    try:
        return function(*arguments), None
    except Exception as error:  # the other engines still run
        said = " ".join(str(error).split()) or "no message"
        return None, f"{type(error).__name__}: {said[:160]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=["tokens", "times"])
    parser.add_argument("--minutes", type=float, default=30.0, help="of all engines together (default 30)")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("there is no vLLM here (docs/guide/serving.md says which releases)")
    until = time.monotonic() + 60 * options.minutes
    lines: list[str] = []

    def run(function: Any, *arguments: Any) -> tuple[Any, str | None]:
        """(result, or the error) of a separate process, which leaves the GPU empty."""
        left = until - time.monotonic()
        if left <= 0:
            return None, "no time left"
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            try:
                return pool.apply_async(attempt, (function, *arguments)).get(left)
            except multiprocessing.TimeoutError:
                return None, "not done in time"

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    try:
        if options.only != "times":
            tokens(run, say)
        if options.only != "tokens" and GPU:
            times(run, say)
    finally:
        found = dict(
            vllm=importlib.metadata.version("vllm"),
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if GPU else "CPU",
        )
        print(json.dumps(found))
        print("\n| | backend | tokens, or ms of the prefill | ms of a decode step |\n|---|---|---|---|")
        print("\n".join(lines), flush=True)
    return int(not lines or "**" in "".join(lines))


if __name__ == "__main__":
    sys.exit(main())
