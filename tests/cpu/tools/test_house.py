"""Counts of the repository about itself: exact in a small tree, and complete in this one."""

from __future__ import annotations

import pytest

from tools.house.__main__ import ROOT, main, table, tree, way_of_a_call
from tools.house.counts import (
    COLUMNS,
    classes_of_one_name,
    counts,
    deciders,
    duplicated_lines,
    files_that_say,
    layout,
    lines_by_area,
    long_functions,
)


def long(name: str, lines: int, head: str = "", docstring: int = 0) -> str:
    """A function of so many lines besides its docstring."""
    text = ['    """' + "\n" * (docstring - 1) + '"""'] if docstring else []
    return "\n".join([f"{head}def {name}(x):", *text, *["    x = x"] * (lines - 1), ""])


def test_lines_are_counted_by_area():
    found = lines_by_area(
        {
            "flashsci/a.py": "1\n2\n",
            "flashsci/call/b.py": "1\n",
            "csrc/x/y.cuh": "1\n2\n3\n",
            "scripts/s.py": "1\n",
            "reports/r.json": "{\n}\n",
            "docs/figure.svg": "1\n",
        }
    )
    assert found == {
        "lines of csrc (files)": "3 (1)",
        "lines of csrc/x (files)": "3 (1)",
        "lines of flashsci (files)": "3 (2)",
        "lines of flashsci/ itself (files)": "2 (1)",
        "lines of flashsci/call (files)": "1 (1)",
        "lines of tools (files)": "1 (1)",
        "lines of records and rules in JSON (files)": "2 (1)",
    }


def test_an_option_is_found_as_a_word():
    found = files_that_say({"flashsci/a.py": "sinking", "csrc/b.h": "int sink;"}, "sink")
    assert list(found.values()) == ["0", "1", "0", "0"]


def test_classes_of_one_name_are_counted():
    assert classes_of_one_name({"flashsci/a.py": "class A: 0\nclass B: 0", "flashsci/b.py": "class A: 0"}) == "A 2"
    assert classes_of_one_name({"tests/a.py": "class A: 0", "flashsci/a.py": "class A: 0"}) == "none"


def test_functions_that_say_who_computes_are_counted_by_name():
    found = deciders(
        {
            "flashsci/a.py": "def takes_pairs(): 0\ndef mistakes(): 0\ndef decide(): 0\n",
            "csrc/a.cuh": "bool takes(const P& p) {\nbool is_short(int n) {\nbool takes(int n);\n",
        }
    )
    assert list(found.values()) == ["2 (1)", "2 (1)"]


def test_long_functions_are_found_without_their_docstrings():
    found = long_functions(
        {
            "flashsci/a.py": long("f", 121) + long("g", 120, docstring=40) + long("h", 122, docstring=9),
            "tools/k.py": long("k", 130, "@kernel\n"),
            "tests/t.py": long("t", 300),
        }
    )
    assert [(f.lines, f.place, f.kernel) for f in found] == [
        (130, "tools/k.py k", True),
        (122, "flashsci/a.py h", False),
        (121, "flashsci/a.py f", False),
    ]


def test_evasions_of_the_formatter_are_counted():
    wide = "x" * (COLUMNS + 1)
    found = layout({"a.py": f"x  # fmt: skip\n{wide}\n", "tests/b.py": f"{wide}\n{wide[1:]}\n"})
    assert list(found.values()) == ["1", "1", "0", "1"]


def test_equal_runs_are_counted_in_lines():
    run = [f"x{i} = {i}" for i in range(9)]
    same = {"csrc/a.h": "\n".join(run), "csrc/b.h": "\n\n".join(["// first", *run, "y = 1"])}
    assert duplicated_lines(same, "csrc") == 18
    short = {"csrc/a.h": "\n".join(run[:7]), "csrc/b.h": "\n".join(run[:7])}
    assert duplicated_lines(short, "csrc") == 0


def test_a_table_has_rows_of_both_and_may_leave_out_equal_ones():
    columns = {"old": {"a": "1", "b": "2"}, "now": {"c": "3", "a": "1"}}
    assert table(columns, changed=True).splitlines()[2:] == ["| c | - | 3 |", "| b | 2 | - |"]
    assert table(columns, changed=False).splitlines()[3] == "| a | 1 | 1 |"


def test_this_tree_is_counted(capsys):
    """Every count finds something here: a folder that moved would leave a zero."""
    found = counts(tree(ROOT), "sink")
    for row, cell in found.items():
        if row.startswith(("lines of flashsci", "lines of csrc", "files of", "functions", "words")):
            assert not cell.startswith("0"), row
    assert main(["--no-trace", "--option", "window"]) == 0
    assert "| files of docs that name `window` |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--changed"])


def test_later_calls_take_a_shorter_way():
    """The second call of a kind runs fewer frames than the first, and the third no more than the second."""
    found = way_of_a_call(ROOT)
    assert len(found) == 8
    for call, cells in found.items():
        first, second, third = (int(cell.split(" ")[0]) for cell in cells.split(", "))
        assert first > second >= third > 1, call


def test_another_tree_is_not_counted_as_this_one(tmp_path):
    with pytest.raises(SystemExit, match=f"not that of {tmp_path}|No module named 'flashsci'"):
        way_of_a_call(tmp_path)
