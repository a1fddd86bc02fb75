"""The examples in the docstrings of the stand-ins for science code run and print what they say."""

import doctest
import importlib

import pytest

EXAMPLES = {
    "cuequivariance": {"triangle_attention", "mask_to_kv_lengths"},
    "deepspeed": {"DS4Sci_EvoformerAttention"},
    "jvp_flash_attention": {"attention", "attention_jvp"},
    "xformers": {"memory_efficient_attention", "merge_attentions"},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name):
    module = importlib.import_module(f"flashsci.compat.{name}")
    found = [x for x in doctest.DocTestFinder().find(module) if x.examples]
    assert {x.name.rpartition(".")[2] for x in found} == EXAMPLES[name]
    runner = doctest.DocTestRunner()
    for example in found:
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0
