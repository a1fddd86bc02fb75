"""The guides for contributors name code that exists: every name is in the file that the page gives for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GUIDES = [
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/extending.md")),
]
#: "`name` in `path`", or "`name`, `name` in `path`": the one form in which a guide gives a place.
PLACES = re.compile(r"((?:`[^`\n]+`,\s)*`[^`\n]+`)\s+in\s+`([\w./-]+\.\w+)`")
PATHS = re.compile(r"`((?:flashsci|csrc|tools|tests|docs|cmake|reports)/[\w./-]*)`")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def places(text: str) -> list[tuple[str, str]]:
    """(name, path) for every place that a page gives."""
    return [
        (name, path) for names, path in PLACES.findall(without_code(text)) for name in re.findall(r"`([^`]+)`", names)
    ]


def missing(found: list[tuple[str, str]], root: Path) -> list[str]:
    """The places that do not exist: no such file, or a file without that name as a word."""
    wrong = []
    for name, path in found:
        file = root / path
        if not file.is_file():
            wrong.append(f"there is no file {path} (for {name})")
        elif not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", file.read_text(encoding="utf-8")):
            wrong.append(f"{name} is not in {path}")
    return wrong


def test_places_are_read_in_their_one_form(tmp_path):
    (tmp_path / "a.py").write_text("def scores(): ...\n")
    text = "`scores`,\n`slopes` in `a.py`, and `x` in\n`b.py`\n```\n`no` in `c.py`\n```\n"
    found = places(text)
    assert found == [("scores", "a.py"), ("slopes", "a.py"), ("x", "b.py")]
    assert missing(found, tmp_path) == ["slopes is not in a.py", "there is no file b.py (for x)"]


@pytest.mark.parametrize("page", GUIDES)
def test_every_name_is_in_its_file(page):
    found = places((ROOT / page).read_text())
    assert found, f"{page} gives no places in the form `name` in `path`"
    assert not missing(found, ROOT)


@pytest.mark.parametrize("page", GUIDES)
def test_every_path_exists(page):
    text = without_code((ROOT / page).read_text())
    assert not [path for path in PATHS.findall(text) if not (ROOT / path).exists()]


def test_every_folder_of_kernels_has_a_row():
    """A kernel that applies the scale cannot be missing from the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`csrc/sm[^|]+) \|", text, re.M)
    named = {path for row in rows for path in re.findall(r"`([^`]+)`", row)}
    folders = {str(folder.relative_to(ROOT)) for folder in ROOT.glob("csrc/sm*/*") if folder.is_dir()}
    assert named == folders
