"""The order of `auto` from measured records: a table of rules for a GPU, and the regret of `auto` with it.

    python -m tools.choice.preferences                           regret on the committed records, the worst ten
    python -m tools.choice.preferences --write                   learn flashsci/choice/preferences/sm*.json, and docs/results/rules.md's tables
    python -m tools.choice.preferences --check                   whether those are the result of the records
    python -m tools.choice.preferences mine.json --table T.json  a table from other records, for FLASHSCI_PREFERENCES=T.json

The definition of regret: tools/choice/regret.py. The learning of rules: tools/choice/rules.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from flashsci.choice import preferences
from flashsci.choice.preferences import Table
from tools.choice.regret import Regret, by_gpu, regrets, report, summary
from tools.choice.rules import learnt

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "reports" / "bench"
PAGE = ROOT / "docs" / "results" / "rules.md"


def text_of(table: Table, found: list[Regret]) -> str:
    """A table as its file: a rule in three lines."""
    lines = ["{", f' "about": {json.dumps(table.about)},']
    if table.capability is not None:
        lines.append(f' "capability": {json.dumps(table.capability)},')
    lines.append(f' "regret": {json.dumps(summary(found))},')
    for kind in preferences.KINDS:
        rules = [
            f'  {{"when": {json.dumps(rule.when)},\n   "order": {json.dumps(rule.order)},\n'
            f'   "evidence": {json.dumps(rule.evidence)}}}'
            for rule in getattr(table, kind)
        ]
        inner = ",\n".join(rules)
        comma = "," if kind != preferences.KINDS[-1] else ""
        lines.append(f' "{kind}": [\n{inner}\n ]{comma}' if rules else f' "{kind}": []{comma}')
    return "\n".join([*lines, "}"]) + "\n"


def pages(table: Table, found: list[Regret]) -> dict[str, str]:
    """The tables of the rules in docs/results/rules.md, by the name of their place there."""
    defaults = preferences.read(preferences.FOLDER / "defaults.json")
    rows = ["| pass | cases | geometric mean | worst |", "|---|---|---|---|"]
    rows += [f"| {kind} | {n} | {mean:.3f} | {worst:.2f} |" for kind, (n, mean, worst) in summary(found).items()]
    shown = {"regret": "\n".join(rows)}
    for kind in preferences.KINDS:
        rows = ["| calls | order | why | written |", "|---|---|---|---|"]
        for source, by in ((table, f"{table.name}.json, by the tool"), (defaults, "by hand")):
            rows += [
                f"| {rule.text()} | {' > '.join(rule.order)} | {rule.evidence} | {by} |"
                for rule in getattr(source, kind)
            ]
        shown[kind] = "\n".join(rows)
    rows = ["| calls | left out | why |", "|---|---|---|"]
    rows += [f"| {r.text()} | {', '.join(r.order)} | {r.evidence} |" for r in defaults.untimed]
    rows += [] if defaults.untimed else ["| none | | |"]
    shown["untimed"] = "\n".join(rows)
    return shown


def placed(page: str, shown: dict[str, str]) -> str:
    """A page with new text between its markers."""
    for name, text in shown.items():
        begin, end = f"<!-- preferences:begin {name} -->", "<!-- preferences:end -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"no place for {name}: {begin} ... {end}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def results() -> dict[Path, str]:
    """The files that the committed records give, and their right contents."""
    files = {}
    page = PAGE.read_text()
    for name, cases in by_gpu(sorted(RESULTS.glob("*/*.json"))).items():
        defaults = preferences.read(preferences.FOLDER / "defaults.json")
        table = learnt(name, cases)
        found = regrets(cases, (table, defaults))
        files[preferences.FOLDER / f"{name}.json"] = text_of(table, found)
        page = placed(page, pages(table, found))
    return {**files, PAGE: page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path, help="default: reports/bench/*/*.json")
    parser.add_argument("--write", action="store_true", help="tables and page of the committed records")
    parser.add_argument("--check", action="store_true", help="fail if those are other than committed")
    parser.add_argument("--table", type=Path, help="learn a table of these records, and write it here")
    arguments = parser.parse_args()
    if arguments.write or arguments.check:
        files = results()
        stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
        for path in stale:
            if arguments.write:
                path.write_text(files[path])
            print(
                path.relative_to(ROOT),
                "written" if arguments.write else "is not what the records give",
            )
        return int(bool(stale) and arguments.check)
    groups = by_gpu(arguments.records or sorted(RESULTS.glob("*/*.json")))
    if arguments.table and len(groups) != 1:
        parser.error(f"--table is of one kind of GPU, and these records are of {', '.join(groups) or 'none'}")
    for name, cases in groups.items():
        tables = preferences.tables(cases[0].problem.capability)
        if arguments.table:
            learned = learnt(arguments.table.stem, cases)
            tables = learned, preferences.read(preferences.FOLDER / "defaults.json")
            arguments.table.write_text(text_of(learned, regrets(cases, tables)))
        print(f"{name}, by {', '.join(t.name for t in tables)}\n{report(regrets(cases, tables))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
