"""A test file as a script that compiles kernels for one architecture, in a process and with a cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any


def report_of(script: str, architecture: int) -> list[dict[str, Any]]:
    """What ``python SCRIPT ARCHITECTURE`` prints in its last line, as JSON; nothing is interpreted there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, script, str(architecture)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
