"""JSON files of records, one record a line: readable, and a diff shows the records that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTH = 160  # columns; a longer object takes a line for each of its entries
LEVELS = 3  # levels that are opened so; below them an object is one line


def write(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` as :func:`dumps` formats it."""
    path.write_text(dumps(value), encoding="utf-8")


def dumps(value: Any) -> str:
    """JSON text that ends in a newline.

    A list of objects has one object a line, however long. Any other list or object is one line if it fits ``WIDTH``
    columns or is nested ``LEVELS`` deep; otherwise it has a line for each entry, indented by one space a level.

    Examples:
        >>> from flashsci import records
        >>> print(records.dumps([{"case": "a", "us": [1, 2]}, {"case": "b", "us": [3, 4]}]), end="")
        [
         {"case": "a", "us": [1, 2]},
         {"case": "b", "us": [3, 4]}
        ]
    """
    return _text(value, 0) + "\n"


def _text(value: Any, level: int) -> str:
    line = json.dumps(value)
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return _open("[]", [json.dumps(entry) for entry in value], level)
    if not isinstance(value, dict | list) or len(line) + level <= WIDTH or level == LEVELS:
        return line
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_text(entry, level + 1)}" for key, entry in value.items()]
        return _open("{}", entries, level)
    return _open("[]", [_text(entry, level + 1) for entry in value], level)


def _open(brackets: str, entries: list[str], level: int) -> str:
    lines = ",".join(f"\n{' ' * (level + 1)}{entry}" for entry in entries)
    return f"{brackets[0]}{lines}\n{' ' * level}{brackets[1]}"
