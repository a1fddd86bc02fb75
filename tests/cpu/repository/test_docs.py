"""The documentation: every Python block of README.md and docs/ runs, links resolve, pages are listed."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]


def python_of(text: str) -> str:
    """The Python blocks of a page as one program, each line at its line number in the page."""
    lines, inside = [], False
    for line in text.splitlines():
        starts = line.lstrip().startswith("```")
        lines.append(line if inside and not starts else "")
        if starts:
            inside = not inside and line.startswith("```python")
    return "\n".join(lines) + "\n"


def with_examples() -> list[str]:
    return [page for page in PAGES if python_of((ROOT / page).read_text()).strip()]


def test_pages_with_examples_are_found():
    assert {"README.md", "docs/start/quickstart.md", "docs/guide/backends.md"} <= set(with_examples())
    text = "a\n```sh\nb\n```\n```python\nx = 1\n```\n```\nc\n```\n```python\ny = 2\n```\n"
    assert python_of(text).split() == ["x", "=", "1", "y", "=", "2"]
    assert python_of(text).splitlines()[5] == "x = 1"
    for page in PAGES:  # no block escapes by being indented or spelt otherwise
        fences = re.findall(r"^.*```\s*py.*$", (ROOT / page).read_text(), re.M)
        assert set(fences) <= {"```python"}, page


@pytest.mark.parametrize("page", with_examples())
def test_examples_run(page, tmp_path):
    """As a reader would: a fresh process, no interpreter for Triton, blocks of a page one after the other."""
    program = tmp_path / f"page_{Path(page).stem}.py"  # a page may have the name of a package
    lines = python_of((ROOT / page).read_text()).split("\n")
    lines[0] = "import torch; torch.manual_seed(0)"  # where every page has its title
    program.write_text("\n".join(lines))
    hidden = ("TRITON_INTERPRET", "FLASHSCI_BACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{page} (line numbers are the page's):\n{done.stderr}"


def code_lines(path: Path) -> int:
    """Lines that are not blank, not a comment and not an include; of Python, docstrings and imports count."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return sum(bool(line) and not line.startswith(("//", "# ", "#include")) for line in lines)


def reading_order() -> list[list[str]]:
    text = (ROOT / "docs" / "develop" / "extending.md").read_text()
    text = text.split("### What to read, in which order\n")[1].split("\n### ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if len(row) == 4 and row[0].startswith("`")]


@pytest.mark.parametrize("row", reading_order(), ids=lambda row: row[0].strip("`/"))
def test_what_to_read_is_there_and_as_long_as_said(row):
    """Within a tenth; of a folder of CUDA no header is left out."""
    folder = ROOT / row[0].strip("`")
    plain, more = ([folder / n for n in re.findall(r"`([\w./]+\.\w+)`", row[i])] for i in (1, 3))
    assert not [path for path in plain + more if not path.is_file()]
    lines = sum(map(code_lines, plain))
    assert abs(lines - int(row[2])) <= lines / 10, f"{lines} lines of code, the page says {row[2]}"
    assert set(folder.glob("*.cuh")) <= {*plain, *more}


def test_the_readme_is_short():
    """At most 800 words, and everything that decides whether to go on before the first table."""
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 800
    assert text.splitlines().index("| backend | computes | measured on |") <= 45


#: Names of other projects, of the reader's own, or of hardware: no file of ours holds them.
OTHERS = {
    *(
        "mine",
        "F2F",
        "once_differentiable",
        "triangle_multiplicative_update",
        "attention_pair_bias",
    ),
    *("memory_efficient_attention_backward", "_partial", "FULL_AND_PIECEWISE"),
}


@pytest.mark.parametrize("page", [p for p in PAGES if "/logs/" not in p and "/results/" not in p])
def test_names_in_pages_exist(page):
    """An identifier in backticks is in some file of the repository."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    if page.endswith("glossary.md"):  # its last column has the names of other code bases
        text = re.sub(r"\|[^|\n]*\|$", "", text, flags=re.M)
    words = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text))
    names = {word.split(".")[-1] for word in words if not re.search(r"\.(?:py|cuh?|h|cpp|md|json|txt)$", word)}
    missing = {n for n in names - OTHERS if not re.search(rf"(?<!\w){re.escape(n)}(?!\w)", sources())}
    assert not missing, f"{page} names what no file has"


@functools.cache
def sources() -> str:
    folders = ("flashsci", "csrc", "tools", "tests", "examples", "cmake")
    files = [p for folder in folders for p in sorted((ROOT / folder).rglob("*")) if p.is_file()]
    files += [
        ROOT / name
        for name in (
            "Makefile",
            "CMakeLists.txt",
            "pyproject.toml",
            "constraints.txt",
            "mkdocs.yml",
            ".github/workflows/release.yml",
        )
    ]
    kinds = {".py", ".cuh", ".cu", ".h", ".cpp", ".cmake", ".txt", ".sh", ".toml", ".yml", ""}
    kept = [p for p in files if p.suffix in kinds and "results" not in p.parts and p.name != "test_docs.py"]
    return "\n".join(p.read_text(encoding="utf-8", errors="ignore") for p in kept)


def test_readme_sections_that_the_site_includes_exist():
    readme = (ROOT / "README.md").read_text().splitlines()
    pages = "\n".join((ROOT / page).read_text() for page in PAGES if page != "README.md")
    included = re.findall(r"^<!-- README: (.+) -->$", pages, re.M)
    assert included and {f"## {heading}" for heading in included} <= set(readme)


def test_nav_lists_every_page():
    nav = (ROOT / "mkdocs.yml").read_text()
    missing = [p for p in PAGES[1:] if not re.search(rf": {p.removeprefix('docs/')}$", nav, re.M)]
    assert not missing, f"pages that mkdocs.yml does not list: {missing}"


def headings(page: Path) -> set[str]:
    """The anchors that mkdocs gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    plain = [re.sub(r"[^\w\s-]", "", h).strip().lower() for h in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[-\s]+", "-", h) for h in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    """mkdocs checks docs/ where it is installed; README.md it does not see."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        if "://" not in link and not (target.exists() and (not anchor or anchor in headings(target))):
            dead.append(link)
    assert not dead, f"{page} links to what is not there: {dead}"


def test_documented_names_exist():
    """Every ``::: module.name`` of a page."""
    names = [
        n
        for page in (ROOT / "docs").rglob("*.md")
        for n in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(names) > 50
    for name in names:
        module, _, attribute = name.rpartition(".")
        source = (ROOT / module.replace(".", "/")).with_suffix(".py")
        assert source.is_file() and re.search(rf"^(def|class) {attribute}\b", source.read_text(), re.MULTILINE), name
