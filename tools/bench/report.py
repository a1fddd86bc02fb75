"""Records as tables: on the terminal, as Markdown, and in pages of the repository.

A page asks for a table by a pair of comments; `refresh` rewrites the text between them:

    <!-- bench:begin summary reports/bench/h200/headline.json -->
    <!-- bench:end -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mode

from tools.bench import ranking
from tools.bench.candidates import BASELINES
from tools.bench.cases import BenchError
from tools.bench.ranking import Record

_BETWEEN_MARKERS = re.compile(r"^(<!-- bench:begin (\w+) (\S+) -->\n)(.*?)(^<!-- bench:end -->$)", re.M | re.S)
_STYLES = {
    "wins": "green",
    "faster": "green",
    "met": "green",
    "loses": "bold red",
    "slower": "bold red",
    "not met": "bold red",
}


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


def _digits(value: float, count: int = 3) -> str:
    """A number with this many significant digits, never with an exponent: 2240, 65.3, 0.0123."""
    return f"{float(f'{value:.{count}g}'):.12f}".rstrip("0").rstrip(".")


def _time(record: Record | None) -> str:
    if record is None:
        return "-"
    us = ranking.median(record)
    return f"{us:.1f} us" if us < 1000 else f"{_digits(us / 1000)} ms"


def _unit(record: Record) -> str:
    """The unit of the nearer ceiling: "tflops" or "gbps"."""
    ceiling = record.get("ceiling") if record["tflops"] else None
    near = ceiling and record["gbps"] / ceiling["gbps"] > record["tflops"] / ceiling["tflops"]
    return "gbps" if near else "tflops"


def _speed(unit: str, value: float | None) -> str:
    return "-" if value is None else f"{_digits(value)} {'TFLOP/s' if unit == 'tflops' else 'GB/s'}"


def _share(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.0f}%"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def times(records: list[Record]) -> Table:
    rows = []
    for r in records:
        about = [r["case"]["id"], r["pass"], r["backend"]]
        if r["gate"].startswith("refused"):
            continue
        if r["time_us"] is None:
            rows.append([*about, "-", "-", "-", "-", "-", r["gate"]])
            continue
        checked = r["err_ratio"] is not None
        rows.append(
            [
                *about,
                _time(r),
                _digits(r["tflops"]) if r["tflops"] else "-",
                _digits(r["gbps"]) if r["gbps"] else "-",
                _share(r["pct_sol"]),
                f"{r['peak_mem_mb']:.0f}" if r["peak_mem_mb"] is not None else "-",
                f"{r['err_ratio']:.2f} of allowed" if checked else "not checked",
            ]
        )
    columns = ["time", "TFLOP/s", "GB/s", "of ceiling", "peak MB", "check"]
    return Table("Times (medians, interleaved)", ["case", "pass", "backend", *columns], rows)


def refusals(records: list[Record]) -> Table:
    """The refusals by candidate, one row per reason."""
    passes: dict[tuple[str, str], dict[str, list[str]]] = {}
    for r in records:
        if r["gate"].startswith("refused"):
            key = (r["backend"], r["gate"].removeprefix("refused: "))
            passes.setdefault(key, {}).setdefault(r["case"]["id"], []).append(r["pass"])
    rows = []
    for (name, reason), cases in passes.items():
        some = [id if "forward" in kinds else f"{id} (backward)" for id, kinds in cases.items()]
        rows.append([name, ", ".join(some), reason])
    return Table("Not run", ["backend", "cases", "because"], rows)


def standings(records: list[Record]) -> Table:
    """Every case and pass: our best, the best of the others, and the winner."""
    found = ranking.standings(records)
    rows = []
    for s in found:
        unit = _unit(s.about)
        rows.append(
            [
                s.about["case"]["id"],
                s.about["pass"],
                s.ours["backend"] if s.ours else "none",
                _time(s.ours),
                _speed(unit, s.ours[unit] if s.ours else None),
                _share(s.ours["pct_sol"] if s.ours else None),
                s.peer["backend"] if s.peer else "nobody",
                _time(s.peer),
                _ratio(s.ratio),
                s.result,
            ]
        )
    header = ["case", "pass", "ours", "time", "speed", "of ceiling"]
    header += ["best of the others", "its time", "ratio", ""]
    note = f"In all: {_tally(found)}. {_method(records)}" if found else ""
    return Table("Standings (our best against the best of the others)", header, rows, note)


def _tally(found: Iterable[ranking.Standing]) -> str:
    results = [s.result for s in found]
    counts = ((word, results.count(word)) for word in ("wins", "draws", "loses"))
    return ", ".join(f"{word} {count}" for word, count in counts if count)


def summary(records: list[Record]) -> Table:
    """The standings, with cases that differ in length alone as one line."""
    rows = []
    for group in ranking.groups(records):
        first, lengths = group.members[0], group.lengths
        unit = mode(_unit(member.about) for member in group.members)
        speed = group.mean("ours", unit)
        alone = len(group.members) == 1
        span = f"{group.name}, S {lengths[0]} to {lengths[-1]}" if not alone else ""
        rows.append(
            [
                span or first.about["case"]["id"],
                group.kind,
                group.backend("ours") or "none",
                _speed(unit, speed) if speed else _time(first.ours),
                _share(group.mean("ours", "pct_sol")),
                group.backend("peer") or "nobody",
                _ratio(group.ratio),
                first.result if alone else _tally(group.members),
            ]
        )
    header = ["what", "pass", "ours", "speed", "of ceiling", "best of the others", "ratio", ""]
    title = "Who wins where (geometric means over lengths)"
    return Table(title, header, rows, _method(records) if rows else "")


def geomeans(records: list[Record]) -> Table:
    """How much faster each of ours is than each of the others, by suite, head dim and pass."""
    found: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for suite, d, kind, ours, peer, ratio, count in ranking.geomeans(records):
        cell = f"{_ratio(ratio)} ({count})"
        found.setdefault((suite, str(d), kind, ours), {})[peer] = cell
    peers = [n for n in BASELINES if any(n in cells for cells in found.values())]
    rows = [[*key, *(cells.get(n, "-") for n in peers)] for key, cells in found.items()]
    title = "Speed over each of the others (geometric mean, number of cases)"
    return Table(title, ["suite", "D", "pass", "ours", *peers], rows)


def claims(records: list[Record]) -> Table:
    rows = []
    for h in ranking.claims(records):
        c = h.claim
        if c.baseline is None:
            value, target = "-" if h.value is None else f"{h.value:.1f} us", f"<= {c.target:g} us"
        else:
            value, target = _ratio(h.value), f">= {c.target:g}x"
        if h.missing:
            value += f" ({h.missing} of {len(c.cases)} missing)"
        against = f"{c.ours} vs {c.baseline}" if c.baseline else c.ours
        rows.append([c.text, against, value, target, "met" if h.met else "not met"])
    return Table("Claims", ["claim", "who", "measured", "target", ""], rows)


def merged(old: list[Record], new: list[Record]) -> list[Record]:
    """``old`` updated with the measurements of ``new``: all records of each of its cases and passes in place
    of the old ones, and new cases at the end."""

    def grouped(records: list[Record]) -> dict[tuple[str, str, str], list[Record]]:
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for r in records:
            key = r["case"]["id"], r["case"].get("dtype", ""), r["pass"]
            groups.setdefault(key, []).append(r)
        return groups

    return [record for group in (grouped(old) | grouped(new)).values() for record in group]


def comparison(old: list[Record], new: list[Record], one_run: bool = False) -> Table:
    """The changes between two measurements, case by case, and the geometric means last."""
    found = ranking.changes(old, new)

    def spread(record: Record) -> str:
        time = record["time_us"]
        return f"{_time(record)} ({_digits(time['p20'], 4)} to {_digits(time['p80'], 4)})"

    rows = [
        [
            c.new["case"]["id"],
            c.new["pass"],
            c.new["backend"],
            spread(c.old),
            spread(c.new),
            _ratio(c.ratio),
            c.result,
        ]
        for c in found
    ]
    means: dict[tuple[str, str], list[float]] = {}
    for c in found:
        means.setdefault((c.new["pass"], c.new["backend"]), []).append(c.ratio)
    rows += [
        ["geometric mean", kind, name, "", "", _ratio(ranking.geomean(ratios)), f"of {len(ratios)}"]
        for (kind, name), ratios in means.items()
    ]
    drift = None if one_run else ranking.drift(found)
    if one_run:
        how = "interleaved in one run"
    elif drift:
        how = f"two runs: products and copies timed alongside ran at {drift:.2f}x of before"
    else:
        how = "two runs, without ceilings to compare them by"
    note = f"{_commits(new)} against {_commits(old)}; medians (20% to 80% of the samples, us); {how}"
    header = ["case", "pass", "backend", "old", "new", "faster by", ""]
    return Table("What changed", header, rows, note)


def _commits(records: list[Record]) -> str:
    found = (f"{r['commit']}{' with changes' if r['dirty'] else ''}" for r in records if r["commit"])
    return ", ".join(dict.fromkeys(found)) or "sources without git"


def _place(records: list[Record]) -> str:
    """The place and the records of the measurements."""

    def every(key: str) -> str:
        found = (r["env"][key] for r in records)
        return ", ".join(dict.fromkeys(value for value in found if value))

    return f"{every('gpu') or every('host')}, torch {every('torch')}, {_commits(records)}"


def _method(records: list[Record]) -> str:
    return f"{_place(records)}; medians, interleaved launch by launch; every result checked against fp64."


def _memory(record: Record) -> str:
    megabytes = record["peak_mem_mb"]
    if megabytes is None:
        return "-"
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{_digits(megabytes / 1000)} GB"


def _steps(records: list[Record]) -> dict[str, dict[str, Record]]:
    """The records of whole models: by step and dtype, the client's and flashsci's."""
    found: dict[str, dict[str, Record]] = {}
    for r in records:
        if r["suite"] == "models":
            found.setdefault(r["case"]["id"], {})[r["backend"]] = r
    return found


def speeds(records: list[Record]) -> Table:
    """Whole models in short: speed and memory on flashsci, as a multiple of the client as it is, in each dtype."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for way in _steps(records).values():
        client, ours = way["client"], way["flashsci"]
        if client["time_us"] and ours["time_us"]:
            case = client["case"]
            row = rows.setdefault((case["model"], case["about"], client["path"]), {})
            row[case["dtype"]] = _ratio(ranking.median(client) / ranking.median(ours))
            if client["peak_mem_mb"] and ours["peak_mem_mb"]:
                less = _ratio(client["peak_mem_mb"] / ours["peak_mem_mb"])
                row[case["dtype"]] += f", memory {less}"
            if _waits(client) and client.get("graph_us") and ours.get("graph_us"):
                speed = client["graph_us"]["median"] / ours["graph_us"]["median"]
                row[case["dtype"]] += f"; as CUDA graphs {_ratio(speed)}"
    dtypes = ("bf16", "fp32")
    header = ["model", "step", "its own attention", *dtypes]
    shown = [[*key, *(row.get(d, "-") for d in dtypes)] for key, row in rows.items()]
    used = [r for way in _steps(records).values() for r in way.values() if r["time_us"]]
    note = f"{_place(used)}; medians of whole steps, the two ways in turn." if used else ""
    return Table("Whole models in short", header, shown, note)


def overview(records: list[Record]) -> Table:
    """One row per whole model: the range of its steps in speed and memory, as multiples of the client as it is."""
    found: dict[str, list[tuple[float, float | None]]] = {}
    used = []
    for way in _steps(records).values():
        client, ours = way["client"], way["flashsci"]
        if client["time_us"] and ours["time_us"]:
            speed = ranking.median(client) / ranking.median(ours)
            memory = None
            if client["peak_mem_mb"] and ours["peak_mem_mb"]:
                memory = client["peak_mem_mb"] / ours["peak_mem_mb"]
            found.setdefault(client["case"]["model"], []).append((speed, memory))
            used += [client, ours]
    rows = [[model, _range(s for s, _ in steps), _range(m for _, m in steps)] for model, steps in found.items()]
    note = f"{_place(used)}; medians of whole steps, the two ways in turn." if used else ""
    return Table("Whole models at a glance", ["model", "speed", "memory"], rows, note)


def _range(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    ends = [_ratio(value) for value in (known[:1] + known[-1:])]
    return " to ".join(dict.fromkeys(ends)) or "-"


def losses(records: list[Record]) -> Table:
    """The cases of a benchmark in which a peer is faster than our best."""
    found = [s for s in ranking.standings(records) if s.result == "loses"]
    rows = [
        [
            s.about["case"]["id"],
            s.about["pass"],
            s.peer["backend"] if s.peer else "nobody",
            _ratio(s.ratio),
        ]
        for s in found
    ]
    return Table("Where it loses", ["case", "pass", "faster", "ratio"], rows)


def _waits(record: Record) -> bool:
    """Whether a step is bound by the host: the GPU is idle for a fifth of it."""
    device = record["device_us"]
    return device is not None and device["median"] < 0.8 * ranking.median(record)


def _both(client: Record, ours: Record, clock: str) -> str:
    """Times of both ways by another clock than the host's, a dash for one that has none, and their ratio."""
    times = [r[clock]["median"] / 1e3 if r.get(clock) else None for r in (client, ours)]
    if not any(times):
        return "-"
    theirs, mine = times
    shown = ", ".join("-" if x is None else f"{x:.3g}" for x in times)
    return f"{shown} ms" + (f": {_ratio(theirs / mine)}" if theirs and mine else "")


def models(records: list[Record]) -> Table:
    """Whole models, as they are and on flashsci: time of a step, memory, errors, and the backends of the
    calls."""
    steps = _steps(records)
    rows = []
    for way in steps.values():
        client, ours = way["client"], way["flashsci"]
        case = client["case"]
        if all(r["gate"].startswith("refused") for r in way.values()):
            continue  # in the table of refusals
        speed = memory = None
        if client["time_us"] and ours["time_us"]:
            speed = ranking.median(client) / ranking.median(ours)
        if client["peak_mem_mb"] and ours["peak_mem_mb"]:
            memory = client["peak_mem_mb"] / ours["peak_mem_mb"]
        errors = "-"
        if ours["errors"]:
            worst = max(ours["errors"], key=lambda name: ours["errors"][name])
            theirs = client["errors"].get(worst)
            errors = f"{worst} {ours['errors'][worst]:.1e}"
            errors += f" ({theirs:.1e})" if theirs is not None else ""
        failed = [f"{r['backend']} {g}" for r in way.values() if (g := r["gate"]) != "passed"]
        changed = ours.get("compiled_gate") or ""
        failed += [f"flashsci {changed}"] if changed.startswith("failed") else []
        rows.append(
            [
                case["model"],
                case["about"],
                case["dtype"] or "-",
                client["path"],
                _time(client if client["time_us"] else None),
                _time(ours if ours["time_us"] else None),
                _ratio(speed),
                _both(client, ours, "graph_us"),
                _both(client, ours, "compiled_us"),
                _memory(client),
                _memory(ours),
                _ratio(memory),
                errors,
                "; ".join(failed) or ours["path"],
            ]
        )
    header = ["model", "step", "dtype", "its own attention", "time as it is", "time on flashsci"]
    header += [
        "speed",
        "as CUDA graphs",
        "compiled",
        "memory as it is",
        "memory on flashsci",
        "less by",
    ]
    header += ["largest error (the client's)", "served by"]
    note = ""
    if rows:
        shown = [r for way in steps.values() for r in way.values()]
        note = (
            f"{_place(shown)}; medians of whole steps by the host's clock, interleaved; errors relative "
            "to the client in float64."
        )
    return Table("Whole models", header, rows, note)


def served(records: list[Record]) -> Table:
    """Every call that the models made of flashsci: shapes, strides, and the backends that computed it."""
    rows = []
    for r in records:
        for call in r.get("calls", ()):
            shapes = ", ".join(f"{name} {shape}" for name, shape in call["shapes"].items())
            strides = ", ".join(f"{name} {stride}" for name, stride in call["strides"].items())
            who = [call["forward"] or "nobody", call["gradients"] or "-"]
            rows.append([r["case"]["id"], call["dtype"], shapes, strides, str(call["count"]), *who])
    header = ["step", "dtype", "shapes", "strides", "times", "forward", "gradients"]
    return Table("Calls of the models", header, rows)


#: The tables that a page can ask for, by name.
TABLES: dict[str, Callable[[list[Record]], Table]] = {
    "times": times,
    "refusals": refusals,
    "geomeans": geomeans,
    "standings": standings,
    "summary": summary,
    "claims": claims,
    "models": models,
    "speeds": speeds,
    "overview": overview,
    "losses": losses,
    "served": served,
}


def tables(records: list[Record]) -> list[Table]:
    """All tables for these records, the most important last."""
    calls = [r for r in records if r["suite"] != "models"]
    base, ours = ranking.split(calls)
    found = [times(calls), refusals(records), geomeans(ours), standings(ours)]
    found += [summary(ours), claims(ours), models(records)]
    if base:
        found.append(comparison(base, ours, one_run=True))
    return [table for table in found if table.rows]


def markdown(table: Table) -> str:
    strong = [[re.sub(r"^not met$|loses(?: \d+)?", r"**\g<0>**", c) for c in row] for row in table.rows]
    lines = [table.header, ["---"] * len(table.header), *strong]
    text = "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)
    return f"{text}\n\n{table.note}" if table.note else text


def plain(table: Table) -> str:
    """A table as aligned text."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [table.header, ["-" * w for w in widths], *table.rows]
    body = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(filter(None, (table.title, body, table.note)))


def show(found: Iterable[Table], console=None) -> None:
    """Print tables: with rich if there is a console, as plain text otherwise."""
    for table in found:
        if console is None:
            print(plain(table), end="\n\n")
            continue
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = RichTable(title=table.title, title_justify="left", caption=table.note or None)
        shown.caption_justify = "left"
        for name in table.header:
            numbers = name in ("time", "TFLOP/s", "GB/s", "of ceiling", "peak MB", "ratio")
            shown.add_column(name, justify="right" if numbers else "left")
        grouped = len({row[0] for row in table.rows}) <= len(table.rows) / 2
        before = None
        for row in table.rows:
            if grouped and before not in (None, row[0]):
                shown.add_section()
            before = row[0]
            shown.add_row(*(Text(c, style=_STYLES.get(c, "")) for c in row))
        console.print(shown)


def refresh(root: Path, pages: Iterable[Path] | None = None, write: bool = True) -> list[Path]:
    """Rewrite the tables between markers in README.md and docs/; returns the pages that differed.

    Raises:
        BenchError: a page asks for a table or a file that does not exist.
    """
    changed = []
    for page in pages or [root / "README.md", *sorted(root.glob("docs/**/*.md"))]:

        def block(found: re.Match, page: Path = page) -> str:
            begin, name, source, _, end = found.groups()
            if name not in TABLES:
                raise BenchError(f"{page}: no table named {name!r}; there are {', '.join(TABLES)}")
            tables = []
            for file in source.split(","):  # one run a file: runs are never compared with each other
                if not (root / file).is_file():
                    raise BenchError(f"{page}: there is no file {file}")
                tables.append(TABLES[name](json.loads((root / file).read_text(encoding="utf-8"))))
            rows = [row for table in tables for row in table.rows]
            rows = [row for i, row in enumerate(rows) if row not in rows[:i]]
            notes = " ".join(dict.fromkeys(table.note for table in tables if table.note))
            shown = Table(tables[0].title, tables[0].header, rows, notes)
            return f"{begin}\n{markdown(shown)}\n\n{end}"

        text = page.read_text(encoding="utf-8")
        fresh = _BETWEEN_MARKERS.sub(block, text)
        if fresh != text:
            changed.append(page)
            if write:
                page.write_text(fresh, encoding="utf-8")
    return changed
