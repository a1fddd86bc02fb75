"""Tests that need a GPU: skipped, with the reason, where torch sees none."""

import gc

import pytest
import torch

from tests.support import judged_cases
from tests.support.raw_calls import Findings, require


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    reason = (
        f"torch {torch.__version__} was built without CUDA"
        if torch.version.cuda is None
        else "torch sees no CUDA device"
    )
    for item in items:
        if "tests/gpu" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(autouse=True)
def memory_for_others():
    """The process keeps no more than this after a test: others share the GPU, and a call of billions of elements leaves tens of
    gigabytes to the allocator."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 4 << 30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def findings(generation, dtype):
    """Collects what is wrong; the test fails with all of it."""
    require(generation, dtype)
    found = Findings(generation)
    yield found
    found.done()


@pytest.fixture
def sm80():
    """For the kernels of sm80, asked for by name."""
    judged_cases.require("cuda:sm80")


@pytest.fixture
def sm90():
    """For the kernels of sm90, asked for by name."""
    judged_cases.require("cuda:sm90")


@pytest.fixture
def launches_that_share_p(monkeypatch):
    """Many cotangents or directions of one call have them also where other ways are faster."""
    from flashsci.backends.triton.plans import many_backward

    monkeypatch.setattr(many_backward, "NARROW", 64)
