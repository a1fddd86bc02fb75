"""The GPU report and the tree: a kernel that changed since its GPU check must be owned up to.

``reports/gpu-check.json`` holds the digest each kernel unit had when it was checked on a GPU. A unit whose digest differs now,
or that was never checked, is listed in ``reports/unverified.md`` as ``- unit: reason``; nothing else is.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from flashsci import digest
from flashsci.check.report import total

ROOT = Path(__file__).resolve().parents[3]
REPORT = ROOT / "reports" / "gpu-check.json"
UNVERIFIED = ROOT / "reports" / "unverified.md"


def unverified(text):
    """{unit: reason} of the lines "- unit: reason"."""
    return {m[1]: m[2].strip() for m in re.finditer(r"^- `?([\w/.-]+)`?:(.*)$", text, re.MULTILINE)}


def mismatch(units, checked, listed):
    """What is wrong with the list, as the lines to add or remove."""
    changed = {unit for unit, found in units.items() if checked.get(unit) != found}
    lines = [f"+ - {unit}: <why its GPU check is missing>" for unit in sorted(changed - set(listed))]
    lines += [f"- - {unit}: {listed[unit]}   (checked, or gone)" for unit in sorted(set(listed) - changed)]
    return lines + [f"? - {unit}: has no reason" for unit in sorted(changed & set(listed)) if not listed[unit]]


def test_changed_units_are_listed_and_no_others():
    checked = json.loads(REPORT.read_text())["units"] if REPORT.is_file() else {}
    listed = unverified(UNVERIFIED.read_text()) if UNVERIFIED.is_file() else {}
    wrong = mismatch(digest.units(ROOT), checked, listed)
    assert not wrong, "reports/unverified.md does not fit the tree:\n" + "\n".join(wrong)


def test_the_comparison_itself():
    units = {"a": "1", "b": "2", "c": "3"}
    assert mismatch(units, dict(units), {}) == []
    assert mismatch(units, {"a": "1", "b": "0"}, {"b": "edited", "c": "new"}) == []
    assert len(mismatch(units, {"a": "1", "b": "0"}, {"b": "edited"})) == 1, "c is missing"
    assert len(mismatch(units, dict(units), {"a": "stale"})) == 1
    assert len(mismatch(units, dict(units), {"gone": "stale"})) == 1
    assert len(mismatch(units, {"a": "1", "b": "0", "c": "3"}, {"b": ""})) == 1
    assert unverified("# Title\n\ntext - a: b\n- cuda/x_1: why: so\n- `triton/y`: z\n") == {
        "cuda/x_1": "why: so",
        "triton/y": "z",
    }


@pytest.mark.skipif(not REPORT.is_file(), reason="no GPU report yet")
def test_the_report_is_a_pass():
    """What is committed is a full run and its parts, without failures, made with the library it speaks of."""
    report = json.loads(REPORT.read_text())
    runs = [report, *report.get("parts", {}).values()]
    assert sum(run["cases"] for run in runs) >= 2000
    # As many generated cases as there was time for, but every trap.
    left = [what for run in runs for what in run["unfinished"] if not what.endswith(" cases")]
    assert not left and not any(run["failures"] for run in runs)
    for name in ("triton", "cuda"):
        found = report["backends"][name]
        assert found["cases"] > 0 and not found["failures"]
        shares = found["a result times 1.01 would fail"]
        # About one case in ten allows 1 % of a bf16 output: a sample of a few hundred may lie below 0.9.
        assert shares["out"]["share"] > 0.85 and shares["lse"]["share"] > 0.9
    assert not [o for by in report["traps"].values() for o in by.values() if o.startswith("failed")]
    if "total" in report:
        assert report["total"] == total(report), "a run or a digest was changed by hand"
    cuda = {unit: found for unit, found in report["units"].items() if unit.startswith("cuda/")}
    assert {unit: report["library"].get(unit) for unit in cuda} == cuda


def test_comments_and_docstrings_change_no_digest(tmp_path):
    """Units see code, not prose: a unit edited in its comments keeps its digest, in its code it does not."""
    folder = tmp_path / "flashsci" / "backends" / "triton"
    folder.mkdir(parents=True)
    before = digest.triton_units()
    assert before, "there are Triton units"
    source = ROOT / "flashsci" / "backends" / "triton"
    for path in source.rglob("*.py"):
        tree, copy = path.read_text(), folder / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text("# A comment.\n" + tree + "\n# Another.\n")
    assert digest.triton_units(tmp_path) == before
    edited = folder / "kernels" / "forward.py"
    edited.write_text(edited.read_text() + "\nX = 1\n")
    assert digest.triton_units(tmp_path)["triton/forward"] != before["triton/forward"]


def test_digests_do_not_depend_on_the_python_that_makes_them(monkeypatch):
    """A later Python adds empty fields to its syntax tree (type_params, in 3.12): digests must not see them."""
    before = digest.triton_units()
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, "later"))
    monkeypatch.setattr(ast.FunctionDef, "later", [], raising=False)
    assert digest.triton_units() == before
