"""SGLang's engine with flashsci's attention: greedy tokens of tiny random models are those of transformers' eager attention in
float32, in batches, with prompts that arrive in chunks and prefixes that are there already. What its steps become in paged calls:
tests/cpu/integrations/test_sglang.py.

SGLang and transformers install each other's versions: `make serving` makes an environment for these tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; `make serving` has it", allow_module_level=True)

from tests.serving.sglang_on_cpu import engine  # before transformers
from tests.serving.tiny import NEW, greedy, model, prompts

# SGLang's Mistral has no window. Windows: Gemma 2's in the one pool, Mellum's in a pool of their own, so small that its slots are
# taken again while those of the other pool are not.
CASES = {
    "llama": ("llama", "eager", dict()),
    "windows, softcap, chunks beside decodes": ("gemma2", "eager", dict(enable_mixed_chunk=True)),
    "8-bit cache": ("gemma2", "rounded", dict(kv_cache_dtype="fp8_e4m3")),
    "a pool for windows": ("mellum", "eager", dict(swa_full_tokens_ratio=0.25)),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_eager_attention(case, tmp_path, monkeypatch, capfd):
    """Six prompts, four at a time, at most 32 tokens of prompts a step; then again, when pages of them are in the radix cache.
    The engine finds `fsci` by itself: nothing here registers it."""
    name, attention, options = CASES[case]
    made = model(name, attention)
    made.save_pretrained(tmp_path)
    expected = greedy(made)
    file = tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(file))
    longest, cached, tables = [], [], []
    # What SGLang prints is seen: where its scheduler fails, this process ends too.
    with capfd.disabled(), engine(tmp_path, **options) as llm:
        how = dict(temperature=0, max_new_tokens=NEW, ignore_eos=True)
        for _ in range(2):
            file.write_text("")
            found = llm.generate(input_ids=prompts(), sampling_params=how)
            assert [x["output_ids"] for x in found] == expected
            queries, places = zip(*(map(int, x.split()) for x in file.read_text().splitlines()), strict=True)
            assert min(queries) == 1, "decodes"
            longest.append(max(queries))
            cached.append(sum(x["meta_info"]["cached_tokens"] for x in found))
            tables += zip(places[::2], places[1::2], strict=True)
    assert cached[0] == 0 and cached[1] > 100
    assert max(longest) <= 32 < max(map(len, prompts())), "chunks"
    apart = name == "mellum"
    assert all((a != b) == apart for a, b in tables), "a table for each pool"


@pytest.mark.parametrize("name, off", [("gemma2", dict(sliding_window=128)), ("gemma2", dict(attn_logit_softcapping=None)),
                                       ("mellum", dict(sliding_window=128))])  # fmt: skip
def test_the_features_show(name, off):
    """Tokens are other ones without the window, and without the softcap: the test above would notice."""
    assert greedy(model(name)) != greedy(model(name, **off))


def test_the_rounding_shows():
    assert greedy(model("gemma2", "rounded")) != greedy(model("gemma2"))


def test_sglang_finds_it():
    if "flashsci" not in {d.name for d in importlib.metadata.distributions()}:
        pytest.skip("flashsci is not installed here (`make serving` installs it)")
    (point,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="flashsci")
    from flashsci.integrations import sglang

    assert point.load() is sglang.register
