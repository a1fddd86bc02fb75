"""Records as pictures: speed and error against length, and the standings at a glance."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from tools.bench import ranking
from tools.bench.candidates import OURS
from tools.bench.ranking import Record

#: One colour and mark for each candidate, in every picture. Ours are bold.
_LOOKS = {
    "cuda": ("#c1121f", "o"),
    "cuda:sm80": ("#e07a5f", "h"),
    "triton": ("#f77f00", "s"),
    "auto": ("#6a040f", "D"),
    "fa3": ("#003049", "^"),
    "sdpa:cudnn": ("#2a9d8f", "v"),
    "sdpa:flash": ("#457b9d", "<"),
    "sdpa:efficient": ("#8d99ae", ">"),
    "sdpa:math": ("#adb5bd", "x"),
    "math": ("#6c757d", "+"),
    "flex": ("#7b2cbf", "P"),
    "cueq": ("#588157", "*"),
    "turbo": ("#b5838d", "X"),
}
_LOOK_OF_OTHERS = ("#444444", ".")
_WIDTH = 4.0  # inches of one panel


def draw(records: list[Record], folder: Path) -> list[Path]:
    """Every picture that these records suffice for; returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    gpu = next((r["env"]["gpu"] for r in records if r["env"]["gpu"]), "cpu")
    prefix = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    _, records = ranking.split(records)
    written = []
    found = ranking.standings(records)
    if any(s.ratio for s in found):
        written.append(folder / f"{prefix}-standings.png")
        _save(_standings(found), gpu, written[-1])
    for suite in dict.fromkeys(r["suite"] for r in records):
        for kind in ("forward", "backward"):
            panels = _panels([r for r in records if (r["suite"], r["pass"]) == (suite, kind)])
            if panels:
                for what, panel in _PANELS.items():
                    written.append(folder / f"{prefix}-{suite}-{kind}-{what}.png")
                    figure = _grid(panels, panel, sharey=what == "error")
                    _save(figure, f"{suite}, {kind}, {gpu}", written[-1])
    return written


def _panels(records: list[Record]) -> dict[str, list[Record]]:
    """{series: records} for series measured at two lengths or more."""
    panels: dict[str, list[Record]] = {}
    for r in records:
        if r["time_us"] and ranking.length(r):
            panels.setdefault(ranking.series(r), []).append(r)
    return {n: p for n, p in panels.items() if len({ranking.length(r) for r in p}) > 1}


def _grid(panels: dict[str, list[Record]], panel: Callable, sharey: bool) -> plt.Figure:
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    size = (_WIDTH * columns + 1.6, 3.2 * rows + 0.6)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharey=sharey, layout="constrained")
    for ax, (name, records) in zip(axes.flat, panels.items(), strict=False):
        panel(ax, records)
        ax.set_title(name, fontsize=10)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.grid(alpha=0.3)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    lines = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
    names = sorted(lines, key=lambda n: [*_LOOKS, n].index(n))
    figure.legend([lines[n] for n in names], names, loc="outside right upper", fontsize=8)
    figure.supxlabel("keys of each query", fontsize=9)
    return figure


def _curves(ax, records: list[Record], what: Callable[[Record], float | None]) -> None:
    for name in dict.fromkeys(r["backend"] for r in records):
        points = sorted((ranking.length(r), y) for r in records if r["backend"] == name and (y := what(r)))
        if points:
            colour, mark = _LOOKS.get(name, _LOOK_OF_OTHERS)
            ours = name in OURS
            ax.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=mark,
                markersize=4,
                linewidth=2.4 if ours else 1.2,
                zorder=3 if ours else 2,
                label=name,
            )


def _speed(ax, records: list[Record]) -> None:
    """TFLOP/s (GB/s where memory is the nearer ceiling); on the right, the share of the ceiling."""
    ceilings = [r["ceiling"] for r in records if r.get("ceiling")]
    near = [r["gbps"] / c["gbps"] > r["tflops"] / c["tflops"] for r in records if (c := r.get("ceiling"))]
    unit = "gbps" if near and sum(near) > len(near) / 2 else "tflops"
    _curves(ax, records, lambda r: r[unit])
    ax.set_ylim(bottom=0)
    ax.set_ylabel("TFLOP/s" if unit == "tflops" else "GB/s", fontsize=9)
    if ceilings:
        top = ranking.geomean(c[unit] for c in ceilings)
        ax.axhline(top, color="black", linestyle="--", linewidth=1, label="ceiling")
        share = ax.secondary_yaxis("right", functions=(lambda y: 100 * y / top, lambda p: p * top / 100))
        share.set_ylabel("% of ceiling", fontsize=9)


def _error(ax, records: list[Record]) -> None:
    """The largest absolute error against fp64 (of the tensors of the pass)."""
    _curves(ax, records, lambda r: r["max_err"])
    ax.set_yscale("log")
    ax.set_ylabel("largest error against fp64", fontsize=9)


_PANELS = {"speed": _speed, "error": _error}


def _standings(found: list[ranking.Standing]) -> plt.Figure:
    """One bar for each case and pass: to the right we win, to the left we lose."""
    bars = [s for s in found if s.ratio][::-1]
    figure, ax = plt.subplots(figsize=(9, 0.22 * len(bars) + 1.2), layout="constrained")
    colours = {"wins": "#2a9d8f", "draws": "#adb5bd", "loses": "#c1121f"}
    for y, s in enumerate(bars):
        ax.barh(y, s.ratio - 1, left=1, color=colours[s.result])
        text = f" {s.ratio:.2f}x {s.ours['backend']} vs {s.peer['backend']}"
        ax.annotate(text, (max(s.ratio, 1), y), va="center", fontsize=7)
    ax.set_yticks(range(len(bars)), [f"{s.ours['case']['id']} {s.ours['pass']}" for s in bars], fontsize=7)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.axvline(1, color="black", linewidth=1)
    ratios = [s.ratio for s in bars]
    ax.set_xlim(0.8 * min(0.5, *ratios), 2.5 * max(2, *ratios))
    ax.margins(y=0.01)
    ax.set_xlabel("speed of our best over the best of the others", fontsize=9)
    return figure


def _save(figure: plt.Figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
