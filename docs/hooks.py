"""Sections of README.md in the site: a line ``<!-- README: Heading -->`` stands for what is under that heading.

And Sphinx's roles, which docstrings use and Markdown does not know, as plain code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"


def section(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", README.read_text(), re.M | re.S)
    if found is None:
        raise ValueError(f"README.md has no heading '## {heading}'; it has moved or docs/ is wrong")
    return found[1].strip()


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"^<!-- README: (.+) -->$", lambda m: section(m[1]), markdown, flags=re.M)


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r":(?:func|class|meth):(?=<code>)", "", html)
