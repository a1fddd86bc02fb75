"""Records as tables: every case, geometric means of the ratios, and the project's claims."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flashsci.bench.cases import CLAIMS

Record = dict
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows


def _time(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.3g} ms"


def _case_rows(records: list[Record]) -> list[list[str]]:
    rows = []
    for r in records:
        if r["gate"].startswith("refused"):
            continue
        about = [r["case"]["id"], r["pass"], r["backend"]]
        if r["time_us"] is None:
            rows.append([*about, "-", "-", "-", "-", "-", r["gate"]])
            continue
        rows.append(
            [
                *about,
                _time(r["time_us"]["median"]),
                f"{r['tflops']:.3g}" if r["tflops"] else "-",
                f"{r['gbps']:.3g}" if r["gbps"] else "-",
                f"{r['pct_sol']:.0f}%" if r["pct_sol"] else "-",
                f"{r['peak_mem_mb']:.0f}" if r["peak_mem_mb"] is not None else "-",
                "not checked" if r["err_ratio"] is None else f"{r['err_ratio']:.2f} of allowed",
            ]
        )
    return rows


def _refusals(records: list[Record]) -> list[list[str]]:
    """Who did not run what, one row per reason."""
    cases: dict[tuple[str, str], dict[str, None]] = {}
    for r in records:
        if r["gate"].startswith("refused"):
            reason = r["gate"].removeprefix("refused: ")
            cases.setdefault((r["backend"], reason), {})[r["case"]["id"]] = None
    return [[name, ", ".join(ids), reason] for (name, reason), ids in cases.items()]


def _times(records: Iterable[Record], what: str) -> dict[tuple[str, str, str], float]:
    """{(case, pass, backend): microseconds} of what passed its check; `what`: median or min."""
    return {
        (r["case"]["id"], r["pass"], r["backend"]): r["time_us"][what]
        for r in records
        if r["time_us"] is not None
    }


def _geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def geomeans(records: list[Record]) -> list[list[str]]:
    """Per suite, head dim and pass: how much faster ours are than each baseline, over the cases
    both ran."""
    medians = _times(records, "median")
    about = {r["case"]["id"]: (r["suite"], r["case"].get("D", 64)) for r in records}
    groups: dict[tuple, list[float]] = {}
    for (case, kind, ours), us in medians.items():
        if ours not in ("triton", "cuda", "auto"):
            continue
        for (other_case, other_kind, baseline), other_us in medians.items():
            if (other_case, other_kind) == (case, kind) and baseline not in (
                "triton",
                "cuda",
                "auto",
            ):
                groups.setdefault((*about[case], kind, ours, baseline), []).append(other_us / us)
    return [
        [suite, str(d), kind, ours, baseline, f"{_geomean(ratios):.2f}x", str(len(ratios))]
        for (suite, d, kind, ours, baseline), ratios in sorted(groups.items())
    ]


def claims(records: list[Record]) -> list[list[str]]:
    """Every claim that these records can speak to, with what they say."""
    measured = {(r["case"]["id"], r["pass"]) for r in records}
    rows = []
    for claim in CLAIMS:
        if not measured.issuperset((id, claim.kind) for id in claim.cases):
            continue
        times = _times(records, "median" if claim.baseline else "min")
        ours = [times.get((id, claim.kind, claim.ours)) for id in claim.cases]
        if claim.baseline is None:
            value, good = ours[0], ours[0] is not None and ours[0] <= claim.target
            shown, target = "-" if value is None else f"{value:.1f} us", f"<= {claim.target:g} us"
        else:
            theirs = [times.get((id, claim.kind, claim.baseline)) for id in claim.cases]
            ratios = [b / a for a, b in zip(ours, theirs, strict=True) if a and b]
            value = _geomean(ratios) if ratios else None
            good = len(ratios) == len(claim.cases) and value is not None and value >= claim.target
            missing = len(claim.cases) - len(ratios)
            shown = "-" if value is None else f"{value:.2f}x"
            shown += f" ({missing} of {len(claim.cases)} missing)" if missing else ""
            target = f">= {claim.target:g}x"
        against = f"{claim.ours} vs {claim.baseline}" if claim.baseline else claim.ours
        rows.append([claim.text, against, shown, target, "met" if good else "not met"])
    return rows


def tables(records: list[Record]) -> list[Table]:
    """Everything worth showing about these records."""
    every = [
        (
            "Times (medians, interleaved)",
            [
                "case",
                "pass",
                "backend",
                "time",
                "TFLOP/s",
                "GB/s",
                "of ceiling",
                "peak MB",
                "check",
            ],
            _case_rows(records),
        ),
        ("Not run", ["backend", "cases", "because"], _refusals(records)),
        (
            "Speed over baselines (geometric means)",
            ["suite", "D", "pass", "ours", "baseline", "faster by", "cases"],
            geomeans(records),
        ),
        ("Claims", ["claim", "who", "measured", "target", ""], claims(records)),
    ]
    return [(title, header, rows) for title, header, rows in every if rows]


def markdown(records: list[Record]) -> str:
    parts = []
    for title, header, rows in tables(records):
        lines = [header, ["---"] * len(header), *rows]
        parts.append(f"**{title}**\n\n" + "\n".join("| " + " | ".join(r) + " |" for r in lines))
    return "\n\n".join(parts)


def plain(records: list[Record]) -> str:
    """The tables as aligned text."""
    parts = []
    for title, header, rows in tables(records):
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [header, ["-" * w for w in widths], *rows]
        parts.append(
            f"{title}\n"
            + "\n".join(
                "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip()
                for r in lines
            )
        )
    return "\n\n".join(parts)


def show(records: list[Record], console=None) -> None:
    """Print the tables: with rich if there is a console, as plain text otherwise."""
    if console is None:
        print(plain(records))
        return
    from rich.table import Table as RichTable

    for title, header, rows in tables(records):
        table = RichTable(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if 3 <= i <= 7 and len(header) == 9 else "left")
        grouped = len({row[0] for row in rows}) <= len(rows) / 2
        before = None
        for row in rows:
            if grouped and before not in (None, row[0]):
                table.add_section()
            before = row[0]
            table.add_row(*row)
        console.print(table)
