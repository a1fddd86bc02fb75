"""The modules of the package import downwards: no circles, whether at the top of a file, in a function or by name."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
Graph = dict[str, set[str]]


def modules(package: Path) -> dict[str, Path]:
    """{dotted name: file} of a package; a folder's ``__init__.py`` has the folder's name."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that one of them needs, wherever in its text it says so: by an import statement at any
    depth, or by a string that is the name of a module, as ``importlib`` takes it. ``from package import x`` needs x where
    that is a module, else the package."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield from (x for x in (inner if inner in known else base,) if x in known)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield from {node.value} & known.keys()


def graph(package: Path) -> Graph:
    known = modules(package)
    return {name: {*imported(name, path, known)} - {name} for name, path in known.items()}


def circles(edges: Graph) -> list[list[str]]:
    """Each set of modules of which every one needs every other (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in number:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], number[other])
        if lowest[name] == number[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(edges):
        if name not in number:
            visit(name)
    return found


def test_no_circles():
    assert circles(graph(ROOT / "flashsci")) == []


def test_backends_import_nothing_above_them():
    """They say what they can compute; who computes is decided above."""
    below = {
        "problem",
        "derivatives",
        "directions",
        "dropout",
        "torch_state",
        "ops",
        "paged_ops",
        "fp8_ops",
        "residual_ops",
    }
    below |= {
        "memory",
        "op_checks",
        "paged_checks",
        "fp8_checks",
        "row_pitch",
        "mask_tiles",
        "schemas",
        "kinds",
        "map_ops",
        "symbols",
        "gate_ops",
        "laplacian_ops",
        "laplacian_tensors",
    }
    edges = graph(ROOT / "flashsci")
    for name in edges:
        if name.startswith("flashsci.backends."):
            for other in edges[name]:
                _, room, *inner = (*other.split("."), "")
                assert room in {"backends", "digest", "errors", "versions"} or inner[0] in below, (name, other)


def test_functions_import_nothing_from_the_package_itself():
    """Its class is its own (flashsci/__init__.py), and compilers of torch before 2.12, which trace imports of functions, take
    modules of ModuleType alone: `from flashsci.call.autograd import Forward`, never `from flashsci import autograd`."""
    wrong = []
    for name, path in modules(ROOT / "flashsci").items():
        if name.startswith(("flashsci.testing", "flashsci.__main__")):  # nobody compiles these
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in itertools.chain.from_iterable(ast.walk(f) for f in functions):
            absolute = isinstance(node, ast.ImportFrom) and node.module == "flashsci"
            whole = isinstance(node, ast.Import) and any(a.name.split(".")[0] == "flashsci" for a in node.names)
            if absolute or whole:
                wrong.append(f"{name}, line {node.lineno}")
    assert not wrong


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"a": "from pack import b", "b": "import pack.c", "c": ""}, []),
        ({"a": "from pack import b", "b": "def f():\n    from pack.a import x"}, [["a", "b"]]),
        ({"a": "from . import b", "b": "from .c import x", "c": "M = 'pack.a'"}, [["a", "b", "c"]]),
        ({"__init__": "H = 'pack.a'", "a": "import pack"}, [["", "a"]]),
        ({"__init__": "from . import a", "a": "from pack import name"}, [["", "a"]]),
        ({"__init__": "from . import a", "a": "from . import b", "b": "x = 'pack'"}, []),
    ],
)
def test_circles_are_found(tmp_path, files, expected):
    package = tmp_path / "pack"
    package.mkdir()
    for name, text in ({"__init__": ""} | files).items():
        (package / f"{name}.py").write_text(text)
    found = circles(graph(package))
    assert found == [[f"pack.{n}" if n else "pack" for n in component] for component in expected]
