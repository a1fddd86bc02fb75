"""First calls of many threads in a fresh process, on a GPU: libraries, kernels and contexts are all new to them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.judged_cases import require

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu

CODE = """
    import sys, threading, time, warnings
    sys.setswitchinterval(1e-6)
    warnings.simplefilter("ignore")
    import torch, flashsci

    backend = {backend!r}
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 2, 4, 70, 64, device="cuda").half()
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32, device="cuda")

    def dense():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashsci.attention(*leaves, causal=True, deterministic=True, backend=backend)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    def packed():
        leaves = [x[0].transpose(0, 1).clone().requires_grad_() for x in (q, k, v)]
        out = flashsci.varlen_attention(*leaves, offsets, deterministic=True, backend=backend)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    def explained():
        return [] if flashsci.explain(q, k, v, backend=backend).chosen else None

    calls = (dense, packed, explained) * 6
    barrier, found, errors = threading.Barrier(len(calls)), [], []

    def run(call):
        barrier.wait()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results = call()
                torch.cuda.current_stream().synchronize()
            found.append((call, results))
        except BaseException as error:
            errors.append(error)

    torch.cuda.synchronize()  # what the streams read is there
    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    [t.start() for t in threads]
    until = time.monotonic() + 200
    [t.join(max(0, until - time.monotonic())) for t in threads]
    assert not any(t.is_alive() for t in threads), "deadlock"
    if errors:
        raise errors[0]
    for call, results in found:
        for a, b in zip(results, call(), strict=True):
            assert torch.equal(a, b)
    assert len(found) == len(calls)
"""


@pytest.mark.parametrize("backend", ["auto", "triton", "cuda"])
def test_calls_of_every_kind(backend, tmp_path):
    if backend != "auto":
        require(backend)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE.format(backend=backend))],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
