"""The figure of the force field: what it learned, how it moves, and the same training on SDPA."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullFormatter

INK, FAINT = "#1f2933", "#9aa5b1"
COLOURS = {"flashsci": "#6741d9", "SDPA math": "#d98e04"}


def draw(path: Path, found: dict) -> None:
    """A panel for every part that was run."""
    panels = [p for p in PANELS if PANELS[p][0] in found]
    if not found.get("measure", [{"MiB": {}}])[0]["MiB"]:
        panels = [p for p in panels if p is not _memory]
    plt.rcParams.update(
        {
            "font.size": 9,
            "text.color": INK,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "legend.frameon": False,
        }
    )
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4.2 * columns, 3.4 * rows + 0.6),
        layout="constrained",
        squeeze=False,
    )
    for panel, one in zip(panels, axes.flat, strict=False):
        panel(one, found[PANELS[panel][0]])
        one.set_title(PANELS[panel][1])
    for one in axes.flat[len(panels) :]:
        one.axis("off")
    figure.suptitle(f"Training on forces: {found['machine']}", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _parity(axes, one: dict) -> None:
    label, learned = (np.array(x) for x in one["errors"]["forces"])
    end = 1.05 * np.abs(label).max()
    axes.plot([-end, end], [-end, end], color=FAINT, lw=0.8)
    axes.plot(label, learned, ".", ms=2, color=COLOURS["flashsci"], alpha=0.4, rasterized=True)
    axes.text(
        0.04,
        0.95,
        f"{one['errors']['meV/A']:.0f} meV/Å\n{one['errors']['meV/atom']:.1f} meV/atom",
        transform=axes.transAxes,
        va="top",
    )
    axes.set(xlabel="force of EMT (eV/Å)", ylabel="force of the model (eV/Å)")


def _loss(axes, one: dict) -> None:
    losses = np.array(one["losses"])
    width = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    axes.semilogy(losses, color=COLOURS["flashsci"], lw=0.5, alpha=0.35)
    axes.semilogy(np.arange(len(smooth)) + width / 2, smooth, color=COLOURS["flashsci"], lw=1.6)
    axes.set(xlabel="step", ylabel="loss")


def _energy(axes, one: dict) -> None:
    time, potential, kinetic = (np.array(one[k]) for k in ("time", "potential", "kinetic"))
    total = potential + kinetic
    for name, values, colour in (
        ("potential", potential - potential[0], "#1c7ed6"),
        ("kinetic", kinetic - kinetic[0], "#f08c00"),
        ("total", total - total[0], INK),
    ):
        axes.plot(time, values, lw=1.2, color=colour, label=name)
    axes.annotate(
        f"total drifts by {one['drift']:+.3f} meV/atom/ps",
        (time[-1], 0),
        (0, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
    )
    axes.set(xlabel="time (ps)", ylabel="energy since the start (meV/atom)")
    axes.margins(y=0.15)
    axes.legend(ncols=3, loc="upper right", columnspacing=1, handlelength=1)


def _agreement(axes, one: dict) -> None:
    others = [name for name in one["apart"] if name != "flashsci"]
    for n, name in enumerate(others):
        axes.semilogy(
            one["apart"][name],
            color=COLOURS["SDPA math"],
            lw=0.9,
            label=None if n else "SDPA math, sums in other orders",
        )
    axes.semilogy(one["apart allowed"], color=INK, lw=0.9, ls=":", label="allowed")
    axes.semilogy(one["apart"]["flashsci"], color=COLOURS["flashsci"], lw=1.6, label="flashsci")
    axes.set(xlabel="step", ylabel="loss: relative distance from SDPA math's")
    axes.legend(fontsize=8)


def _bars(axes, rows: list[dict], unit: str) -> None:
    for k, name in enumerate(COLOURS):
        values = [row[unit][name] for row in rows]
        at = np.arange(len(rows)) + (k - 0.5) * 0.4
        axes.bar(at, values, 0.38, color=COLOURS[name], label=name)
        for x, value in zip(at, values, strict=True):
            axes.text(x, value, f"{value:,.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [f"{row['atoms']:,}\n{1 + row['places']}" for row in rows])
    axes.set(xlabel="atoms a step, tokens of each", ylabel=unit)
    log, top = len(rows) > 1, axes.get_ylim()[1]
    axes.set(yscale="log" if log else "linear", ylim=(None, top * (3 if log else 1.25)))
    if log:
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper left")


def _time(axes, rows: list[dict]) -> None:
    _bars(axes, rows, "ms")


def _memory(axes, rows: list[dict]) -> None:
    _bars(axes, rows, "MiB")


PANELS = {
    _parity: ("train", "Forces on structures not seen"),
    _loss: ("train", "Loss: energies and forces"),
    _energy: ("dynamics", "Molecular dynamics, constant energy"),
    _agreement: ("compare", "The same training on SDPA math"),
    _time: ("measure", "Time of a training step"),
    _memory: ("measure", "Peak memory of a training step"),
}
