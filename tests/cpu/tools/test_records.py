"""Committed records are written one a line."""

import json
from pathlib import Path

import pytest

from flashsci import records

ROOT = Path(__file__).resolve().parents[3]
FILES = [*sorted((ROOT / "reports" / "bench").rglob("*.json")), ROOT / "reports" / "gpu-check.json"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_committed_files_are_as_written(path):
    text = path.read_text(encoding="utf-8")
    assert records.dumps(json.loads(text)) == text


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        [{"a": 1}, {"b": [1, {"c": None}]}],
        {"short": [1, 2], "long": ["x" * 90, "y" * 90], "deep": {"a": {"b": {"c": ["z" * 99, "z" * 99]}}}},
        {'quoted "key"': "a\nb", "empty": {"a": []}},
        [1.5, True, None, "text"],
    ],
)
def test_the_text_holds_the_value(value):
    assert json.loads(records.dumps(value)) == value


def test_a_record_is_a_line_and_a_long_list_is_open():
    found = [{"name": "n" * 200, "values": list(range(90))}, {"name": "m"}]
    assert len(records.dumps(found).splitlines()) == len(found) + 2
    assert len(records.dumps({"lists": ["x" * 90, "y" * 90]}).splitlines()) == 6
