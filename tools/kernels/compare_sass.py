"""A comparison of the kernels' machine code in two builds, kernel by kernel, from the output of `cuobjdump -sass`.

    python tools/kernels/compare_sass.py BEFORE AFTER       object files, folders of them, or libraries; exit code 1 if some differ

Names do not count (a namespace or a class may have moved, and a kernel's name with it): kernels are the same if their
instructions are, with encodings, and so with registers, stalls and branch targets. Objects are compared unit by unit, by the
names of their files, in either order of their parts: forward_sm80_bf16 is sm80_fwd_bf16.

If all kernels of a unit are the same, earlier GPU results of the unit stay valid: `python tools/kernels/resources.py
--write` records the hash of each unit's code, and renews the digest in reports/gpu-check.json if that hash has not
changed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "flashsci" / "check"))
from machine_code import tool  # noqa: E402  (as a script: importing the package would need torch)

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_ARCH = re.compile(r"^arch = (sm_\w+)")
_CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/|^\s+/\* 0x[0-9a-f]{16} \*/")
_NAME = re.compile(r"[$.\w]*_Z\w+")


def kernels(file: Path) -> list[tuple[str, str, str]]:
    """(architecture, mangled name, hash of the code) of every kernel in an object file or library."""
    command = [tool("cuobjdump"), "-sass", str(file)]
    found: list[tuple[str, str, str]] = []
    arch = name = ""
    code = hashlib.sha256()

    def close() -> None:
        if name:
            found.append((arch, name, code.hexdigest()[:16]))

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := _FUNCTION.match(line):
                close()
                name, code = match[1], hashlib.sha256()
            elif match := _ARCH.match(line):
                close()
                arch, name = match[1], ""
            elif _CODE.match(line):
                code.update(_NAME.sub("name", " ".join(line.split())).encode())
        close()
    if process.returncode:
        raise SystemExit(f"compare_sass: {' '.join(command)} failed")
    return found


def unit_hash(found: list[tuple[str, str, str]]) -> str:
    """The hash of all kernels of a unit, for any names and order."""
    text = "\n".join(sorted(f"{arch} {code}" for arch, _, code in found))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def units(path: Path) -> dict[str, list[Path]]:
    """Files by unit, such as sm80_fwd_bf16; a library is one unit, "all"."""
    if path.is_dir():
        objects = [p for p in path.rglob("*.o") if re.search(r"sm\d+", str(p.relative_to(path)))]
    else:
        objects = [path]
    found: dict[str, list[Path]] = {}
    for file in objects:
        # CMake: CMakeFiles/sm80_fwd_bf16.dir/csrc/...; build_manual.sh: sm80_fwd_bf16.o
        inner = re.search(r"([a-z0-9_]+)\.dir/", str(file))
        words = (inner[1] if inner else file.name.split(".")[0]).split("_")
        words = [{"forward": "fwd", "backward": "bwd"}.get(word, word) for word in words]
        unit = "_".join(sorted(words, key=lambda w: (not w.startswith("sm"), w[1:] != "wd")))
        found.setdefault(unit if file.suffix == ".o" else "all", []).append(file)
    return found


def demangled(names: list[str]) -> list[str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return names
    return subprocess.run([tool], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    before, after = units(options.before), units(options.after)
    differ = False
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for unit in sorted(before.keys() | after.keys()):
            if unit not in before or unit not in after:
                differ = True
                print(f"{unit}: only in {options.before if unit in before else options.after}")
                continue
            old, new = ([k for found in pool.map(kernels, side[unit]) for k in found] for side in (before, after))
            left = Counter((arch, code) for arch, _, code in old)
            right = Counter((arch, code) for arch, _, code in new)
            same = sum((left & right).values())
            print(f"{unit}: {same} of {len(new)} kernels are the same ({len(old)} before)")
            if left != right:
                differ = True
                changed = [(a, n) for a, n, code in new if right[a, code] > left[a, code]]
                for (arch, _), name in zip(changed, demangled([n for _, n in changed]), strict=True):
                    print(f"    {arch} {name}")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
