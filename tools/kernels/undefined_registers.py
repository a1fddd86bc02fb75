"""A search for kernels that read uniform registers which nothing before has written.

The search itself is flashsci/check/machine_code.py.

    python tools/kernels/undefined_registers.py ~/.triton/cache build/py3-none-linux_x86_64

Files: cubins, object files, libraries, or folders of them. Exit code 1 if some kernel does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "flashsci" / "check"))
# As a script: importing the package would need torch.
from machine_code import Finding, tool, undefined_in  # noqa: E402


def check_file(path: Path) -> list[Finding]:
    """All findings in a cubin, or in those of an object file or library."""
    if path.suffix == ".cubin":
        return undefined_in(path)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [tool("cuobjdump"), "-xelf", "all", str(path.resolve())],
            cwd=folder,
            capture_output=True,
            check=True,
        )
        return [f for cubin in sorted(Path(folder).glob("*.cubin")) for f in undefined_in(cubin)]


def files_of(paths: list[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = [p for s in ("*.cubin", "*.cu.o") for p in sorted(path.rglob(s))]
        found += inside if path.is_dir() else [path]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE")
    files = files_of(parser.parse_args(arguments).paths)
    if not files:
        raise SystemExit("undefined_registers: no cubin, object file or library there")
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, findings in zip(files, pool.map(check_file, files), strict=True):
            bad += bool(findings)
            for found in findings:
                print(f"{path}\n    {found.kernel} at 0x{found.offset} reads {found.register}: {found.instruction}")
    print(f"{len(files)} files, {bad} with reads of undefined registers")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
