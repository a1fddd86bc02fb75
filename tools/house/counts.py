"""Counts of the text of a revision, which is given as {path: text} of its tracked files."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

CODE = (".py", ".cpp", ".cu", ".cuh", ".h")
LONGEST = 120  # lines of a Python function, without its docstring
COLUMNS = 120
EQUAL = 8  # lines that make a duplicate

# Areas that are shown folder by folder, and those that are shown as one.
BY_FOLDER = ("flashsci", "csrc")
AREAS = {"tests": ("tests",), "tools": ("tools", "benchmarks", "scripts"), "docs": ("docs",)}

# Functions that answer "who computes": their names, in Python and in C++.
DECIDES = re.compile(
    r"(takes|fits|serves|decide)(_\w+)?|\w+_(takes|fits|serves)|is_(small|short)|_decide|_instead_of\w+"
)
DEFINED = re.compile(r"\bbool\s+(\w+)\s*\([^;]*?\)\s*(?:const\s*)?\{")

Tree = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Long(NamedTuple):
    lines: int
    place: str
    kernel: bool


def lines_by_area(tree: Tree) -> dict[str, str]:
    """Lines (and files) by area: flashsci and csrc by folder, tests, tools, docs, records."""
    files, lines = Counter[str](), Counter[str]()
    for path, text in tree.items():
        area = _area(path)
        if area:
            files[area] += 1
            lines[area] += text.count("\n")
    for top in BY_FOLDER:
        inner = [a for a in lines if a.startswith(f"{top}/")]
        files[top], lines[top] = sum(files[a] for a in inner), sum(lines[a] for a in inner)
    order = sorted(lines, key=lambda a: ("JSON" in a, a))
    return {f"lines of {a} (files)": f"{lines[a]:,} ({files[a]})" for a in order}


def files_that_say(tree: Tree, word: str) -> dict[str, str]:
    """The number of files that name an option, by area."""
    said = re.compile(rf"\b{re.escape(word)}\b")
    found = {"flashsci": 0, "csrc": 0, "tests": 0, "docs": 0}
    for path, text in tree.items():
        top = path.split("/")[0]
        if top in found and said.search(text):
            found[top] += 1
    return {f"files of {top} that name `{word}`": str(n) for top, n in found.items()}


def classes_of_one_name(tree: Tree) -> str:
    names = Counter(
        node.name
        for _, module in _modules(tree, "flashsci/")
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    )
    several = [(name, n) for name, n in names.most_common() if n > 1]
    return ", ".join(f"{name} {n}" for name, n in several) or "none"


def deciders(tree: Tree) -> dict[str, str]:
    """Functions that answer who computes a call, counted by their names (DECIDES)."""
    python = [
        path
        for path, module in _modules(tree, "flashsci/")
        for node in ast.walk(module)
        if isinstance(node, Function) and DECIDES.fullmatch(node.name)
    ]
    cpp = [
        path
        for path, text in tree.items()
        if path.startswith("csrc/")
        for name in DEFINED.findall(text)
        if DECIDES.fullmatch(name)
    ]
    return {
        f"functions that say who computes, {language} (files)": f"{len(paths)} ({len(set(paths))})"
        for language, paths in (("Python", python), ("C++", cpp))
    }


def long_functions(tree: Tree) -> list[Long]:
    """Python functions of the package and the tools above LONGEST lines, longest first."""
    found = []
    for top in ("flashsci/", *(f"{t}/" for t in AREAS["tools"])):
        for path, module in _modules(tree, top):
            for node in ast.walk(module):
                if isinstance(node, Function):
                    lines = _lines(node)
                    if lines > LONGEST:
                        found.append(Long(lines, f"{path} {node.name}", _is_kernel(node)))
    return sorted(found, reverse=True)


def layout(tree: Tree) -> dict[str, str]:
    """Lines by which Python evades its formatter, outside the tests and inside."""
    found = {}
    for where, tests in (("outside tests", False), ("tests", True)):
        texts = [t for p, t in tree.items() if p.endswith(".py") and p.startswith("tests/") == tests]
        skips = sum(len(re.findall(r"# fmt: (?:skip|off)", text)) for text in texts)
        wide = sum(len(line) > COLUMNS for text in texts for line in text.splitlines())
        found[f"`fmt: skip`, {where}"] = f"{skips:,}"
        found[f"lines of Python over {COLUMNS} columns, {where}"] = f"{wide:,}"
    return found


def duplicated_lines(tree: Tree, top: str) -> int:
    """Lines of a folder that stand in a run of at least EQUAL equal lines elsewhere in it.

    Blank lines, comments, imports, includes and lone brackets count as nothing."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    kept: dict[str, list[str]] = {}
    for path, text in tree.items():
        if path.startswith(f"{top}/") and path.endswith(CODE):
            kept[path] = [line for line in map(str.strip, text.splitlines()) if _counts(line)]
            for i in range(len(kept[path]) - EQUAL + 1):
                places[tuple(kept[path][i : i + EQUAL])].append((path, i))
    equal = {(path, i + k) for found in places.values() if len(found) > 1 for path, i in found for k in range(EQUAL)}
    return len(equal)


def counts(tree: Tree, option: str) -> dict[str, str]:
    """Every count of a tree, by its description."""
    long = long_functions(tree)
    named = [f"{f.place.split('/')[-1]} {f.lines}" for f in long if not f.kernel]
    return {
        "words of README.md": f"{len(tree.get('README.md', '').split()):,}",
        **lines_by_area(tree),
        **files_that_say(tree, option),
        "classes of one name in flashsci": classes_of_one_name(tree),
        **deciders(tree),
        f"Python functions over {LONGEST} lines, kernels": str(sum(f.kernel for f in long)),
        f"Python functions over {LONGEST} lines, others": ", ".join(named) or "none",
        **layout(tree),
        **{
            f"lines of {top} in equal runs of {EQUAL} and more": f"{duplicated_lines(tree, top):,}" for top in BY_FOLDER
        },
    }


def _area(path: str) -> str | None:
    folder, _, _ = path.rpartition("/")
    top = path.split("/")[0]
    if path.endswith(".json"):
        return "records and rules in JSON"
    for area, tops in AREAS.items():
        if top in tops:
            return area if path.endswith((*CODE, ".md", ".sh")) else None
    if top in BY_FOLDER and path.endswith(CODE):
        return folder if folder != top else f"{top}/ itself"
    return None


def _modules(tree: Tree, top: str) -> Iterator[tuple[str, ast.Module]]:
    for path, text in tree.items():
        if path.startswith(top) and path.endswith(".py"):
            yield path, ast.parse(text)


def _lines(function: Function) -> int:
    """Lines of a function from `def` to its end, its docstring left out."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def _is_kernel(function: Function) -> bool:
    return any(ast.unparse(d) in ("kernel", "triton.jit") for d in function.decorator_list)


def _counts(line: str) -> bool:
    return len(line) > 2 and not line.startswith(("#", "//", "import ", "from ", '"""'))
