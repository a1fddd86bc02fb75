"""Tests that need a GPU: skipped, with the reason, where torch sees none."""

import pytest
import torch

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


@pytest.fixture
def findings(generation, dtype):
    """Collects what is wrong; the test fails with all of it."""
    require(generation, dtype)
    found = Findings(generation)
    yield found
    found.done()
