"""Rehearsals of the CUDA library without a GPU: tensors without memory, and the calls that the backend serves."""

from dataclasses import replace

import pytest
import torch

from flashsci.backends import cuda as backend


def empty(*shape, dtype=torch.float32, pad=0):
    """A tensor without memory; ``pad``: so much longer are its rows."""
    rows = torch.empty(*shape[:-1], shape[-1] + pad, dtype=dtype, device="meta")
    return rows[..., : shape[-1]]


def require_library(argument):
    """Skip a test where no library was built, or one whose forward lacks this argument."""
    if backend.library.load() is not None:
        pytest.skip("no library")
    if argument not in str(torch.ops.flashsci.cuda_forward.default._schema):
        pytest.skip("a library of other sources")


def check_served(problem, change, reason):
    """The changed problem is refused for this reason; or, without one, sm80's kernels alone serve it, with its gradients."""
    problem = replace(problem, **change)
    found = backend.rejects(problem)
    if reason is not None:
        assert reason in found
        return
    assert found is None
    assert backend.backward_kernels(problem) == (80, None)
    assert "sm80" in backend.SM90.rejects(problem)
    assert backend.SM80.rejects(problem) is None
