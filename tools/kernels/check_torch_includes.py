"""Fail if a file under csrc/ includes a torch header anywhere but in csrc/bindings/.

Kernels without torch compile in seconds, run in standalone programs under compute-sanitizer, and
keep the binary independent of the torch version. One stray include would quietly end all three.

    python tools/kernels/check_torch_includes.py [FILE ...]     (default: all of csrc/)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH_HEADER = re.compile(r'^\s*#\s*include\s*[<"](?:torch|ATen|c10|caffe2)/')
SUFFIXES = {".h", ".hpp", ".cuh", ".cu", ".cpp", ".cc", ".inl"}


def offences(files: list[Path]) -> list[str]:
    """`path:line: text` of every torch include outside csrc/bindings."""
    found = []
    for path in files:
        path = path.resolve()
        if path.suffix not in SUFFIXES or path.is_relative_to(ROOT / "csrc" / "bindings"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if TORCH_HEADER.match(line):
                name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
                found.append(f"{name}:{number}: {line.strip()}")
    return found


def main(arguments: list[str]) -> int:
    files = [Path(a) for a in arguments] or sorted((ROOT / "csrc").rglob("*"))
    found = offences([f for f in files if f.is_file()])
    if found:
        print("torch headers belong in csrc/bindings/ only:", *found, sep="\n  ")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
