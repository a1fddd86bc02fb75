"""One digest per kernel unit; it ties a GPU result to the code that gave it. Standard library only.

A CUDA unit is one .cu of csrc/, with all files that it includes from there, without comments and layout, plus the
compiler flags. A Triton unit is the syntax tree of a file with kernels, of the files of its package that it imports
and of the launch code, without docstrings. A change of a comment changes no digest.

    python flashsci/digest.py            all units, as JSON
    python flashsci/digest.py cuda       CUDA units only
    python flashsci/digest.py cuda --build-info FILE --archs 80,90 --preset 1 --nvcc 13.0.88
                                         the C string literal that the library carries, and
                                         digests/UNIT in the same folder
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
from pathlib import Path

VERSION = "0.1.0"
ROOT = Path(__file__).resolve().parent.parent

_TOKENS = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|([^"'/]+|/)""", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def normalised_cpp(source: str) -> str:
    """C++ without comments, one space for any run of blanks, preprocessor lines as lines of their own."""
    source = source.replace("\\\n", " ")
    text = "".join(m[1] or m[2] or " " for m in _TOKENS.finditer(source))
    lines: list[str] = []
    for raw in text.split("\n"):
        line = re.sub(r"\s+", " ", raw).strip()
        if line.startswith("#"):
            lines.append("\n" + line + "\n")
        elif line:
            lines.append(line)
    joined = " ".join(lines)
    # Blanks next to punctuation are layout, except inside the literals, which hold no such runs.
    return re.sub(r" ?([(){}\[\];,<>=+*&|:?!~^%-]) ?", r"\1", joined)


def cpp_sources(files: list[Path]) -> list[Path]:
    """The files and the files that they include with quotes, recursively, in a fixed order."""
    found: dict[Path, None] = {}
    queue = list(files)
    while queue:
        path = queue.pop(0).resolve()
        if path in found or not path.is_file():
            continue
        found[path] = None
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            queue.append(path.parent / name)
    return sorted(found)


def cuda_sources(root: Path = ROOT) -> dict[str, Path]:
    """The .cu of every CUDA unit: "cuda/sm80/fwd_bf16" is csrc/sm80/fwd/bf16.cu, "cuda/sm80/fwd_fp32"
    csrc/sm80/fwd_fp32/fp32.cu."""
    return {
        f"cuda/{path.parts[-3]}/{path.parts[-2].split('_')[0]}_{path.stem}": path
        for path in sorted((root / "csrc").glob("sm*/*/*.cu"))
    }


def cuda_units(root: Path = ROOT) -> dict[str, str]:
    csrc = root / "csrc"
    flags = root / "cmake" / "nvcc_flags.txt"
    units: dict[str, str] = {}
    for unit, source in cuda_sources(root).items():
        digest = hashlib.sha256(" ".join(flags.read_text(encoding="utf-8").split()).encode())
        for path in cpp_sources([source]):
            digest.update(f"\0{path.relative_to(csrc.resolve())}\0".encode())
            digest.update(normalised_cpp(path.read_text(encoding="utf-8")).encode())
        units[unit] = digest.hexdigest()[:16]
    return units


def _strip_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body
            if ast.get_docstring(node, clean=False) is not None:
                node.body = body[1:] or [ast.Pass()]


def _local_imports(tree: ast.AST, path: Path, folder: Path, package: str) -> set[Path]:
    """Files below a package's folder that a file of it imports."""
    here = (package, *path.relative_to(folder).parts[:-1])
    found: set[Path] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            above = ".".join(here[: len(here) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (above, node.module)))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            inner = name.removeprefix(f"{package}.")
            file = folder.joinpath(*inner.split(".")).with_suffix(".py")
            if inner != name and file.is_file():
                found.add(file)
    return found


def _has_kernels(tree: ast.Module) -> bool:
    return any(isinstance(n, ast.FunctionDef) and n.name.endswith("_kernel") for n in tree.body)


def _dump(node: object) -> str:
    """A syntax tree as text, the same in every Python, unlike ast.dump's: empty fields are left out, such as those
    that later versions add."""
    if isinstance(node, list):
        return f"[{','.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, getattr(node, name, None)) for name in node._fields)
    inner = ",".join(f"{n}={_dump(value)}" for n, value in fields if value not in (None, []))
    return f"{type(node).__name__}({inner})"


def triton_units(root: Path = ROOT) -> dict[str, str]:
    """One unit for each file with kernels."""
    folder = root / "flashsci" / "backends" / "triton"
    package = "flashsci.backends.triton"
    files = {path: ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")}
    imports = {path: _local_imports(tree, path, folder, package) for path, tree in files.items()}
    for tree in files.values():
        _strip_docstrings(tree)
    launching = {folder / "tilings.py", folder / "launcher.py"}
    plans = {path for path in files if path.parent.name == "plans" or path in launching}
    units: dict[str, str] = {}
    for path in sorted(files):
        if not _has_kernels(files[path]):
            continue
        # The code that launches it: tilings.py, and every plan on the way to it.
        hosts = {p for p in plans if path in imports[p]}
        closure = {folder / "tilings.py"} & files.keys() | hosts
        closure |= {p for host in hosts for p in imports[host] if p in plans}
        queue = [path]
        while queue:
            current = queue.pop()
            if current not in closure:
                closure.add(current)
                queue += imports[current]
        digest = hashlib.sha256()
        for part in sorted(closure):
            digest.update(f"\0{part.relative_to(folder)}\0{_dump(files[part])}".encode())
        units[f"triton/{path.stem}"] = digest.hexdigest()[:16]
    return units


def units(root: Path = ROOT) -> dict[str, str]:
    """Digest of every kernel unit in the source tree (CUDA units are absent in an installed wheel)."""
    return {**cuda_units(root), **triton_units(root)}


def build_info(archs: str, preset: str, nvcc: str, root: Path = ROOT, poison: bool = False) -> str:
    """A library's description of itself, as JSON.

    poison: a debug build (csrc/core/poison.cuh). Its results are not those of the installed code; its digests match
    no tree.
    """
    names = {"": "by architecture", "0": "t4_safe", "1": "ampere_balanced"}
    wanted = {int(a.rstrip("af")) for a in archs.replace(";", ",").split(",") if a}
    folders = {
        "sm75": any(a < 80 for a in wanted),
        "sm80": any(a >= 80 for a in wanted),
        "sm90": 90 in wanted,
    }
    mark = "-poison" if poison else ""
    built = {k: v + mark for k, v in cuda_units(root).items() if folders[k.split("/")[1]]}
    return json.dumps(
        {
            "version": VERSION,
            "units": built,
            "archs": [a for a in archs.replace(";", ",").split(",") if a],
            "tile_preset": names.get(preset, preset),
            "nvcc": nvcc,
        }
    )


def _write_digests(folder: Path) -> None:
    """Write a file for each unit, only if its digest is new.

    Objects depend on these files as well as on the headers that the compiler names. Otherwise a library could carry
    the digest of sources that its objects were not built from.
    """
    folder.mkdir(exist_ok=True)
    for unit, digest in cuda_units().items():
        file = folder / unit.removeprefix("cuda/").replace("/", "_")
        if not file.is_file() or file.read_text(encoding="utf-8") != digest:
            file.write_text(digest, encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Digests of the kernel units.")
    parser.add_argument("kind", nargs="?", choices=("cuda", "triton", "all"), default="all")
    parser.add_argument(
        "--build-info",
        metavar="FILE",
        help="write the library's description there, and digests/UNIT beside it",
    )
    parser.add_argument("--archs", default="")
    parser.add_argument("--preset", default="")
    parser.add_argument("--nvcc", default="")
    parser.add_argument("--poison", action="store_true")
    options = parser.parse_args(arguments)
    if options.build_info:
        text = json.dumps(build_info(options.archs, options.preset, options.nvcc, poison=options.poison))
        target = Path(options.build_info)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n", encoding="utf-8")
        _write_digests(target.parent / "digests")
        return 0
    chosen = {"cuda": cuda_units, "triton": triton_units, "all": units}[options.kind]
    print(json.dumps(chosen(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
