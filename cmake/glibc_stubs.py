"""Stub libraries for the linker: the functions that glibc 2.34 moved into libc.so.6, at their older versions.

    python cmake/glibc_stubs.py --compiler g++ --newest 2.28 --output FOLDER

A linker binds a function to the newest version that the build machine's glibc has, and the library then loads nowhere older.
glibc keeps the older versions for programs that were linked before: the stubs name those. What is printed, one a line, are the
stubs to link before libc; nothing where the build machine's glibc is old enough, or is no glibc.
"""

from __future__ import annotations

import argparse
import collections
import re
import shutil
import subprocess
import sys
from pathlib import Path

# The library that holds a function before glibc 2.34; a function of no such family stays where it is.
HOMES = (
    (re.compile(r"(pthread|sem)_"), "libpthread.so.0"),
    (re.compile(r"dl(a|m|v)?(open|close|sym|error|ddr|info)"), "libdl.so.2"),
    (re.compile(r"shm_"), "librt.so.1"),
)
SYMBOL = re.compile(r"FUNC +(?:GLOBAL|WEAK) +DEFAULT +\d+ +(\w+)(@@?)GLIBC_([\d.]+)$")

Version = tuple[int, ...]
# name -> (the version that a linker takes, older ones)
Versions = dict[str, tuple[Version, list[Version]]]


def version(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


def versions(listing: str) -> Versions:
    """The versions of each function, from what ``readelf --dyn-syms --wide libc.so.6`` prints."""
    newest: dict[str, Version] = {}
    older = collections.defaultdict(list)
    for line in listing.splitlines():
        if found := SYMBOL.search(line.rstrip()):
            name, sign, text = found.groups()
            if sign == "@@":
                newest[name] = version(text)
            else:
                older[name].append(version(text))
    return {name: (value, older[name]) for name, value in newest.items()}


def stubs(functions: Versions, newest: Version) -> dict[str, dict[Version, list[str]]]:
    """The functions of each stub by version: those that a linker would bind to a version above ``newest``."""
    found: dict[str, dict[Version, list[str]]] = {}
    for name, (default, older) in sorted(functions.items()):
        allowed = [v for v in older if v <= newest]
        home = next((library for pattern, library in HOMES if pattern.match(name)), None)
        if default > newest and allowed and home:
            found.setdefault(home, {}).setdefault(max(allowed), []).append(name)
    return found


def write(library: str, by_version: dict[Version, list[str]], compiler: str, folder: Path) -> Path:
    """One shared library of empty functions, which is linked with and never loaded."""
    names = [name for group in by_version.values() for name in group]
    source, script = folder / f"{library}.s", folder / f"{library}.map"
    source.write_text("".join(f".globl {n}\n.type {n}, %function\n{n}:\n" for n in names))
    nodes = (f"GLIBC_{'.'.join(map(str, v))} {{ {'; '.join(group)}; }};\n" for v, group in sorted(by_version.items()))
    script.write_text("".join(nodes))
    output = folder / library
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{library}", f"-Wl,--version-script={script}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(output)], check=True)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--newest", required=True, type=version)
    parser.add_argument("--output", required=True, type=Path)
    given = parser.parse_args()
    if shutil.which("readelf") is None:
        print("no readelf (binutils): the library asks for this machine's glibc, or a newer one", file=sys.stderr)
        return
    ask = [given.compiler, "-print-file-name=libc.so.6"]
    libc = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    if not libc.is_absolute():  # a compiler repeats the name of a file that it does not have: no glibc
        return
    listing = subprocess.run(["readelf", "--dyn-syms", "--wide", str(libc)], capture_output=True, text=True, check=True)
    given.output.mkdir(parents=True, exist_ok=True)
    for library, by_version in stubs(versions(listing.stdout), given.newest).items():
        print(write(library, by_version, given.compiler, given.output))


if __name__ == "__main__":
    main()
