"""The outcomes of all cells as a page: who asks "does X work under Y" finds the cell."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Sequence

import torch

from .cells import MACHINERIES
from .entries import ENTRIES
from .outcomes import ABSENT, BAD, REFUSED, RIGHT, TORCHS, Outcome
from .table import FAMILIES, OWN, device

LETTERS = {"reference": "R", "sdpa": "S", "triton": "T", "cuda": "C", "auto": "A"}
SIGNS = {RIGHT: "✓", REFUSED: "no", TORCHS: "✗", **{kind: f"**{kind}**" for kind in BAD}}
Found = dict[tuple[str, str, str, str], Outcome]  # by function, tensor, machinery, backend

TITLE = """# Under which machinery of torch a call works

Each cell is one call, made with the row's tensor under the column's machinery, on every backend, and judged by a formula in float64:
✓ the result is right, no: the call is refused with an error that says what to do instead (the number says why), ✗ torch's own
function, which served the call, fails by itself in the same way, empty: the machinery has no meaning there, ·: not run. Where backends differ, letters name them: R reference, S sdpa, T triton, C cuda, A auto. Derivatives beside a tensor of
integers or of bools are those of q.
`python -m tests.machinery --write docs/results/machinery.md` runs all cells and writes this page.
"""


class Notes:
    """Reasons, numbered as they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, why: str) -> int:
        return self.numbers.setdefault(why, len(self.numbers) + 1)

    def text(self) -> str:
        return "\n".join(f"{n}. {why}" for why, n in self.numbers.items())


def _cell(found: Found, name: str, row: str, machinery: str, notes: Notes) -> str:
    by: dict[str, list[str]] = defaultdict(list)
    outcomes = {b: found[name, row, machinery, b] for b in ENTRIES[name].backends if (name, row, machinery, b) in found}
    for backend, outcome in outcomes.items():
        if outcome.kind == ABSENT:
            continue
        sign = SIGNS[outcome.kind]
        if outcome.why:
            sign += f"<sup>{notes.number(_short(outcome.why))}</sup>"
        by[sign].append(LETTERS[backend])
    if not outcomes:
        return "·"
    if len(by) == 1:
        return next(iter(by))
    return ", ".join(f"{''.join(letters)} {sign}" for sign, letters in by.items())


def _short(why: str) -> str:
    """A reason as it reads beside others: without the numbers and names of one call."""
    why = why.split("; use backend=")[0].split("; these can:")[0].replace("|", "\\|").replace("<", "&lt;")
    return why if len(why) <= 200 else why[:199] + "…"


def page(found: Found, machine: str | None = None) -> str:
    """``machine``: that of the outcomes, if not this one, as :func:`where` says it."""
    parts, notes = [TITLE], Notes()
    rows = [(entry.name, row) for entry in OWN for row in entry.rows]
    for family in FAMILIES:
        names = [m.name for m in MACHINERIES.values() if m.family == family]
        grid = {(r, m): _cell(found, *r, m, notes) for r in rows for m in names}
        columns: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for m in names:
            columns[tuple(grid[r, m] for r in rows)].append(m)
        columns = {column: ms for column, ms in columns.items() if any(column)}
        lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for i, (name, row) in enumerate(rows):
            line = tuple(column[i] for column in columns)
            if any(line):
                lines.setdefault(line, {}).setdefault(name, []).append(row)
        if not lines:
            continue
        heads = ["call", *("; ".join(ms) for ms in columns.values())]
        parts.append(f"## {family.capitalize()}\n")
        parts += [_line(heads), _line(["---"] * len(heads))]
        for line, calls in lines.items():
            label = "; ".join(f"{name}: {', '.join(group)}" for name, group in calls.items())
            parts.append(_line([label, *line]))
        parts.append("")
    parts += ["## Why\n", notes.text(), "", machine or where()]
    return "\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def where() -> str:
    """The machine and the versions of a run."""
    import triton

    import flashsci

    gpu = torch.cuda.get_device_name() if device() == "cuda" else "no GPU: Triton interpreted, without the cuda backend"
    return f"{gpu}; torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}, flashsci {flashsci.__version__}"
