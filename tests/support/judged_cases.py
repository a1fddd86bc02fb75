"""Backends that a test needs, and cases of one feature for one that is asked for by name, judged on this machine's GPU."""

from __future__ import annotations

import pytest
import torch

from flashsci.choice import backends
from flashsci.testing import Case, Judge, evaluate, make_inputs, poisoned_memory


def require(backend: str) -> None:
    """Skip where the backend is not available."""
    reason = backends.find(backend).unavailable()
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")


def judge(case: Case, backend: str, device: torch.device, deterministic: bool) -> None:
    """Judge all results of a case; those of a deterministic call have the same bits again."""
    inputs = make_inputs(case, device)
    with poisoned_memory():
        found = evaluate(inputs, backend, deterministic=deterministic)
    Judge(inputs).require(found)
    if deterministic:
        again = evaluate(inputs, backend, deterministic=True)
        assert all(torch.equal(x, again[n]) for n, x in found.items())
