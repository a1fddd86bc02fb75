"""The first check of a GPU, on one whose kernels are right: it finds nothing, in a second, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from flashsci.backends import cuda

pytestmark = pytest.mark.gpu
PROGRAM = """
import json, time, torch, flashsci
from flashsci.choice import choose, first_check
choose._examined.clear()
choose._examined.add(None)
q, k, v = torch.randn(3, 2, 4, 64, 64, device="cuda", dtype=torch.float16).unbind(0)
first = flashsci.attention(q, k, v, backend="cuda")
assert torch.cuda.get_device_capability() in choose._examined
print(json.dumps(list(json.loads(first_check.cache().read_text()).values())))
"""


def test_a_call_on_a_gpu_that_nobody_has_checked(tmp_path):
    if cuda.unavailable() is not None:
        pytest.skip(cuda.unavailable())
    environ = {k: v for k, v in os.environ.items() if k != "FLASHSCI_FIRST_CHECK"} | {"FLASHSCI_CACHE": str(tmp_path)}
    found = []
    for _ in range(2):
        command = [sys.executable, "-W", "error::UserWarning:flashsci", "-c", PROGRAM]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert "first check" not in done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1], "the second process read the first one's outcome"
    (entry,) = found[0]
    assert entry["failures"] == {}
    print(f"{entry['seconds']} s")
    assert entry["seconds"] <= 1
