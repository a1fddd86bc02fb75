"""vLLM's own tests of attention backends (0.26 or 0.32), on flashsci's backend, with a GPU or without one; exit 1 if any failed or none passed.

    python tools/serving/vllm_tests.py FOLDER          a source distribution of the installed vLLM, unpacked; of it these are read:
                                                 tests/__init__.py, tests/v1/__init__.py, and in tests/v1/attention
                                                 test_attention_backends.py and utils.py, all unmodified
    python tools/serving/vllm_tests.py FOLDER -k TEXT  some of them, as pytest names them

Each writes new tokens into random pages, attends, and compares with FlexAttention's formula to 0.01. Lists of
backends become CUSTOM alone; models of the hub become folders with a config of the same heads. A test that passes
without a call of flashsci's attention is counted separately. vLLM's conftest imports much more than these tests
need: the two fixtures that matter are here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Next to this file; it sets the environment variables that vLLM reads when it is imported.
from tools.serving.replay import GPU

TESTS = Path("tests/v1/attention/test_attention_backends.py")
NEEDED = (
    TESTS,
    TESTS.with_name("utils.py"),
    Path("tests/__init__.py"),
    Path("tests/v1/__init__.py"),
)
PLAIN = dict(torch_dtype="bfloat16", num_hidden_layers=2, intermediate_size=448, vocab_size=32064)
# Heads, windows and dtypes of the models; a dense one for Phi's experts, which would bring kernels along.
MODELS = {
    "meta-llama/Meta-Llama-3-8B": dict(
        model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=4096, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    ),
    "microsoft/Phi-tiny-MoE-instruct": dict(
        model_type="mistral", architectures=["MistralForCausalLM"], hidden_size=4096, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, sliding_window=2047, max_position_embeddings=4096,
    ),
    "google/embeddinggemma-300m": dict(
        model_type="gemma3_text", architectures=["Gemma3TextModel"], hidden_size=768, num_attention_heads=3,
        num_key_value_heads=1, head_dim=256, sliding_window=512, use_bidirectional_attention=True,
        max_position_embeddings=2048,
    ),
}  # fmt: skip


def write_models(folder: Path) -> Path:
    """A folder for each model, and the file from which vLLM learns where they are (VLLM_MODEL_REDIRECT_PATH)."""
    places = {}
    for name, config in MODELS.items():
        place = folder / name.replace("/", "-")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(PLAIN | config))
        places[name] = str(place)
    redirect = folder / "redirect.json"
    redirect.write_text(json.dumps(places))
    return redirect


class Plugin:
    """A pytest plugin: the fixtures, the backend in the tests' lists, and the outcome of each test."""

    def __init__(self) -> None:
        self.calls = 0
        self.before = 0
        self.found: dict[str, Counter[str]] = {}

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[Any]:
        from vllm.config import VllmConfig, set_current_vllm_config

        config = VllmConfig()
        with set_current_vllm_config(config):
            yield config

    @pytest.fixture(autouse=True)
    def dynamo_reset(self) -> Iterator[None]:
        """FlexAttention, the truth, is traced again for each length: without this, the tracer's limit is reached."""
        yield
        torch._dynamo.reset()

    def count(self) -> None:
        """Count the calls of flashsci's attention."""
        from flashsci.integrations.vllm import FlashSciAttention

        forward = FlashSciAttention.forward

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return forward(*arguments, **options)

        FlashSciAttention.forward = counted

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for module in {item.module for item in items}:
            aim(module)

    def pytest_runtest_setup(self) -> None:
        self.before = self.calls

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = report.outcome
        if outcome == "passed":
            if report.when != "call":
                return
            outcome = "passed" if self.calls > self.before else "passed without flashsci"
        elif report.when == "teardown" and outcome == "skipped":
            return
        name = report.nodeid.split("::")[-1].split("[")[0]
        self.found.setdefault(name, Counter())[outcome] += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.found.setdefault(report.nodeid, Counter())["failed"] += 1


def aim(module: Any) -> None:
    """Put flashsci's backend in the place of all backends that a test module lists."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    lists = [name for name in vars(module) if name.endswith("BACKENDS_TO_TEST")]
    if not lists or not hasattr(module, "is_torch_equal_or_newer"):
        raise pytest.UsageError(
            f"{module.__file__} is not as of vLLM 0.26 or 0.32: it needs lists ...BACKENDS_TO_TEST and is_torch_equal_or_newer"
        )
    for name in lists:
        setattr(module, name, [AttentionBackendEnum.CUSTOM])
    # With a new torch the tests also run FlexAttention on large blocks, and ask for nothing else here.
    module.is_torch_equal_or_newer = lambda version: False


def table(found: dict[str, Counter[str]]) -> str:
    """A line for each test function, and one of all."""
    total = sum(found.values(), Counter())
    rows = [*found.items(), ("all", total)]
    lines = (f"{name}: {', '.join(f'{n} {what}' for what, n in sorted(of.items())) or 'none'}" for name, of in rows)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="that has vLLM's tests/")
    parser.add_argument("-k", default="", metavar="TEXT", help="as pytest's")
    options = parser.parse_args()
    folder = options.folder.resolve()
    missing = [str(path) for path in NEEDED if not (folder / path).is_file()]
    if missing:
        parser.error(f"{folder} has no {', '.join(missing)}: give vLLM's source distribution, unpacked")
    if importlib.util.find_spec("vllm") is None:
        parser.error("there is no vLLM here (docs/guide/serving.md says which releases)")
    sys.path.insert(0, str(folder))  # its package `tests`, before any other of that name
    plugin = Plugin()
    with tempfile.TemporaryDirectory() as made:
        os.environ["VLLM_MODEL_REDIRECT_PATH"] = str(write_models(Path(made)))
        import vllm

        from flashsci.integrations.vllm import register

        register()
        plugin.count()
        settings = Path(made) / "pytest.ini"  # neither vLLM's settings nor flashsci's
        settings.write_text("[pytest]\n")
        given = [str(folder / TESTS), "-c", str(settings), "--rootdir", str(folder), "--noconftest", "--import-mode=importlib",
                 "-p", "no:cacheprovider", "-q", "-rs", "--tb=short", "--show-capture=no", "-W", "ignore", *(["-k", options.k] if options.k else [])]  # fmt: skip
        code = pytest.main(given, plugins=[plugin])
    device = torch.cuda.get_device_name() if GPU else "CPU"
    print(
        f"\nvLLM {vllm.__version__}, torch {torch.__version__}, {device}; calls of flashsci's attention: {plugin.calls}"
    )
    print(table(plugin.found), flush=True)
    passed = sum(of["passed"] for of in plugin.found.values())
    return int(code != 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
