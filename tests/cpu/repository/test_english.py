"""The English of pages and docstrings: no sentence begins with a relative clause in the place of its subject.

"What a backend cannot do it refuses" makes a reader wait for the subject. "A backend refuses calls that it cannot
compute" says the same in order. A question may begin with "What".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: The files that this rule holds for: Markdown pages by their prose, Python files by their docstrings, C++ files by
#: their comments. Add patterns here.
SCOPE = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/start/**/*.md",
    "docs/guide/**/*.md",
    "docs/reference/**/*.md",
    "docs/develop/*.md",
    "docs/develop/kernels/*.md",  # not their logs
    "docs/results/*.md",
    "flashsci/**/*.py",
    "csrc/**/*.h",
    "csrc/**/*.cpp",
    "csrc/**/*.cuh",
    "csrc/**/*.cu",
    "tools/**/*.py",
    "examples/**/*.py",
]
RELATIVE = re.compile(
    r"(?:(?:Of|To|By|In|From|With) (?:what|which|whom|those that)|Whatever|Whatsoever|What|Whose|Whoever|Who|Which"
    r"|Those (?:that|who|which|whose)|That which)\b"
)


def blocks(markdown: str) -> Iterator[str]:
    """The paragraphs and list items of a page, each as one line; no code, tables, headings or comments."""
    text = re.sub(r"^(`{3,}).*?^\1", "", markdown, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(?:\||#|    \S|:::).*$", "", text, flags=re.M)
    text = re.sub(r"^\s*(?:[-*+]|\d+\.)\s+", "\n", text, flags=re.M)
    yield from (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found:
                yield from blocks(re.sub(r"^\s*>>>.*$", "", found, flags=re.M))


def comments(source: str) -> Iterator[str]:
    """The blocks of // comments of a C++ file, each as paragraphs; a comment after code is a block of its own."""
    block: list[str] = []
    for line in [*source.split("\n"), ""]:
        code, mark, text = line.partition("//")
        if mark and not code.strip():
            # "Roles     One CTA ..." begins a part of a kernel's header, "  - ..." an item of a list.
            block.append(re.sub(r"^ (?:[A-Z]\w+ {2,}|\s*- )", "\n\n", text))
            continue
        yield from blocks(re.sub(r"^ {5,}", " ", "\n".join(block), flags=re.M))
        block = []
        if mark and code.count('"') % 2 == 0:
            yield from blocks(text)


PROSE = {".py": docstrings, ".md": blocks}


def sentences(block: str) -> list[str]:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block)
    plain = re.sub(r"[*_]{2}|``?", "", plain)
    return re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", plain)


def faults(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = PROSE.get(path.suffix, comments)(text)
    return [
        sentence
        for block in found
        for sentence in sentences(block)
        if RELATIVE.match(sentence) and not sentence.endswith("?")
    ]


def files() -> list[Path]:
    return sorted({path for pattern in SCOPE for path in ROOT.glob(pattern)})


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("What a backend cannot do it refuses.", True),
        ("It works. Of what Python touches nothing is cached.", True),
        ("- a list\n- Those that fail have no time.", True),
        ("**What is rounded**, in the kernels: all.", True),
        ("Whose calls they are\nnobody knows.", True),
        ("What is a mask? It hides keys. Where Sq differs, it is whatever comes.", False),
        ("```\nWhat is code.\n```\n| What is a table |\n# What is a heading\n", False),
        ("Those calls pass, in which nothing fails.", False),
    ],
)
def test_the_rule(text, wrong, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert bool(faults(page)) == wrong
    module = tmp_path / "module.py"
    module.write_text(f'def f():\n    """Title.\n\n    {text.replace(chr(10), chr(10) + "    ")}\n    """\n')
    assert bool(faults(module)) == wrong


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("// What a CTA\n// copies.\nint x;\n", True),
        ("// A CTA copies a tile.\n//\n// What a CTA copies.\n", True),
        ("// One line, in which\n// What begins a line. A CTA copies.\n", False),
        ("// Maths     s = q k\n// Roles     Those that\n//           load, load.\n", True),
        ("int x;  // Whose it is.\n", True),
        ('const char* x = "// What is text.";\n', False),
    ],
)
def test_the_rule_in_comments(code, wrong, tmp_path):
    header = tmp_path / "header.cuh"
    header.write_text(code)
    assert bool(faults(header)) == wrong


def test_patterns_find_files():
    for pattern in SCOPE:
        assert list(ROOT.glob(pattern)), f"no file is {pattern}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_begins_with_a_relative_clause(path):
    assert not faults(path)
