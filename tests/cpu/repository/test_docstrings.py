"""The examples in the public docstrings run and print what they say."""

import doctest
import importlib

import pytest

import flashsci


@pytest.mark.parametrize("name", flashsci.__all__)
def test_examples_in_docstrings(name):
    public = getattr(flashsci, name)
    module = importlib.import_module(public.__module__)
    examples = doctest.DocTestFinder(recurse=False).find(public, name, module)
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", [n for n in flashsci.__all__ if n[0].islower()])
def test_functions_have_examples(name):
    assert ">>> " in getattr(flashsci, name).__doc__
