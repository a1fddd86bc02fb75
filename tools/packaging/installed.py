"""A trial of an installed flashsci: README's example, and the library of kernels on the CPU.

    python tools/packaging/installed.py

The Python of the environment runs this, and imports the package that is installed there, never the sources beside this
file. It imports nothing but flashsci and torch, and prints what it found as JSON on the last line.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]


def example() -> str:
    """The first program of README.md."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise SystemExit(f"{ROOT / 'README.md'} has no block of Python")
    return found[1]


def main() -> None:
    sources = {HERE.parent, ROOT}
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in sources]
    start = time.monotonic()
    exec(compile(example(), "README.md", "exec"), {"__name__": "__main__"})
    seconds = time.monotonic() - start

    import torch

    import flashsci
    from flashsci.backends import cuda

    q = k = v = torch.randn(2, 4, 8, 16, requires_grad=True)
    flashsci.attention(q, k, v, causal=True).sum().backward()
    library = cuda.library_path()
    if library is not None and cuda.build_info() is None:
        raise SystemExit(f"{library} is installed and does not load: {cuda.unavailable()}")
    print(
        json.dumps(
            {
                "file": flashsci.__file__,
                "library": library and str(library),
                "unavailable": cuda.unavailable(),
                "build": cuda.build_info(),
                "torch": torch.__version__,
                "python": sys.version.split()[0],
                "seconds": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
