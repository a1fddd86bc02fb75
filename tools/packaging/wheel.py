"""The contents of a wheel of flashsci, and the faults for which it may not be published. Needs pyelftools (auditwheel brings it).

A publishable wheel installs on every Python and every Linux that torch installs on: its tag is py3-none-manylinux_2_28, its
library asks for nothing newer than glibc 2.28 and libstdc++ of GCC 8, and for no library but those and torch's.
"""

from __future__ import annotations

import dataclasses
import io
import re
import zipfile
from pathlib import Path

PLATFORM = "manylinux_2_28"
# The newest symbol versions that AlmaLinux 8 has, the system of that platform.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
TORCH = {"libtorch.so", "libtorch_cpu.so"}
SYSTEM = {
    *("libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"),
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
}
LARGEST = 40e6  # bytes, of the file and of its library; PyPI takes 100e6
LIBRARY = "flashsci/_C.so"
# The architectures of a release. The kernels of sm_80 serve every later one.
RELEASED = ("75", "80", "90", "100", "120")


@dataclasses.dataclass(frozen=True)
class Contents:
    """A wheel: its name, size, files, and the demands of its library."""

    name: str
    size: int  # bytes
    library_size: int
    version: str
    tags: list[str]
    files: list[str]
    needed: list[str]  # shared libraries that _C.so asks for
    symbols: dict[str, dict[tuple[int, ...], list[str]]]  # family -> version -> names
    archs: list[str]

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.size / 1e6:.1f} MB (its library {self.library_size / 1e6:.1f}), {len(self.files)} files, tags {', '.join(self.tags)}"
        ]
        lines += [f"  kernels for {', '.join(f'sm_{a}' for a in self.archs) or 'no architecture'}"]
        lines += [f"  needs {', '.join(self.needed) or 'no shared library'}"]
        for family, versions in sorted(self.symbols.items()):
            counts = ", ".join(f"{dotted(v)} ({len(names)})" for v, names in sorted(versions.items()))
            lines += [f"  {family}: {counts}"]
        return "\n".join(lines)


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def read(path: Path) -> Contents:
    with zipfile.ZipFile(path) as archive:
        files = archive.namelist()
        info = next(name for name in files if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: *(\S+)", archive.read(info).decode(), re.MULTILINE)
        library = archive.read(LIBRARY) if LIBRARY in files else None
    needed, symbols, archs = ([], {}, []) if library is None else asked(library)
    sizes = path.stat().st_size, len(library or b"")
    return Contents(path.name, *sizes, path.name.split("-")[1], tags, files, needed, symbols, archs)


def asked(library: bytes) -> tuple[list[str], dict[str, dict[tuple[int, ...], list[str]]], list[str]]:
    """The libraries and versioned symbols that a shared library asks for, and the architectures of its kernels."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(library))
    needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
    of = {
        aux.entry.vna_other: aux.name
        for _, auxes in elf.get_section_by_name(".gnu.version_r").iter_versions()
        for aux in auxes
    }
    numbers = elf.get_section_by_name(".gnu.version")
    symbols: dict[str, dict[tuple[int, ...], list[str]]] = {}
    for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        text = of.get(numbers.get_symbol(index)["ndx"])
        if text is not None and symbol["st_shndx"] == "SHN_UNDEF":
            family, _, version = text.rpartition("_")
            key = tuple(int(part) for part in version.split("."))
            symbols.setdefault(family, {}).setdefault(key, []).append(symbol.name)
    found = re.search(rb'"archs": (\[[^\]]*\])', library)
    return needed, symbols, re.findall(r"\d+", found[1].decode()) if found else []


def faults(wheel: Contents, archs: tuple[str, ...] | None = None) -> list[str]:
    """Why a wheel may not be published; nothing if it may. ``archs``: those that its kernels must be compiled for."""
    found = []
    expected = [f"py3-none-{PLATFORM}_x86_64", f"py3-none-{PLATFORM}_aarch64"]
    if not set(wheel.tags) & set(expected) or not all(tag.startswith("py3-none-manylinux") for tag in wheel.tags):
        found.append(
            f"the tags are {', '.join(wheel.tags)}; {' or '.join(expected)} is wanted: auditwheel repair gives it"
        )
    for name, size in ((wheel.name, wheel.size), (LIBRARY, wheel.library_size)):
        if size > LARGEST:
            found.append(
                f"{name}: {size / 1e6:.1f} MB are more than {LARGEST / 1e6:.0f} MB: compile for fewer FA_ARCHS"
            )
    tops = {name.split("/")[0].split("-")[0] for name in wheel.files}
    if tops != {"flashsci"} or any("__pycache__" in name for name in wheel.files):
        found.append(f"files that are not the package's: top level {', '.join(sorted(tops))}")
    if LIBRARY not in wheel.files:
        found.append(f"no {LIBRARY}: build it where nvcc is, with FA_ARCHS set")
        return found
    if strange := sorted(set(wheel.needed) - TORCH - SYSTEM):
        found.append(f"the library asks for {', '.join(strange)}; link it statically")
    if missing := sorted(TORCH - set(wheel.needed)):
        found.append(f"the library does not ask for {', '.join(missing)}: it would load without torch's symbols")
    for family, versions in wheel.symbols.items():
        newest = NEWEST.get(family, (0,))
        late = [f"{name}@{family}_{dotted(v)}" for v, names in versions.items() if v > newest for name in names]
        if late:
            found.append(
                f"symbols newer than {family}_{dotted(newest)}: {', '.join(sorted(late))}; "
                f"cmake/glibc_stubs.py and csrc/bindings/older_runtimes.cpp are where older ones come from"
            )
    if archs is not None and (absent := [a for a in archs if a not in wheel.archs]):
        found.append(f"no kernels for {', '.join(absent)}: FA_ARCHS={','.join(archs)} make wheel")
    return found
