"""The figure of examples/crystals.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from ase.data import chemical_symbols, covalent_radii
from ase.data.colors import jmol_colors
from matplotlib.patches import Circle, Rectangle
from torch import Tensor

if TYPE_CHECKING:
    from crystals import Batch

INK, FAINT = "#1f2933", "#9aa5b1"
COLOURS = {
    "reference": "#7b8794",
    "sdpa, padded": "#d98e04",
    "triton": "#6741d9",
    "triton (interpreter)": "#6741d9",
    "cuda": "#2f9e44",
}


def draw(
    path: Path,
    batch: Batch,
    weights: list[Tensor],
    sigmas: list[float],
    found: dict[str, dict],
    small: dict | None,
    device: str,
) -> None:
    """Attention as geometry above, the backends below."""
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
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
        }
    )
    figure = plt.figure(figsize=(15, 8.8), facecolor="white")
    grid = figure.add_gridspec(
        2, 12, height_ratios=(1, 1), hspace=0.26, wspace=2.6,
        left=0.05, right=0.98, top=0.87, bottom=0.07,
    )  # fmt: skip
    figure.text(0.05, 0.955, "Attention over real crystals and molecules", fontsize=17, weight="bold")
    figure.text(
        0.05,
        0.925,
        f"{sum(batch.crystal)} elemental crystals and {len(batch.lens) - sum(batch.crystal)} molecules in one packed "
        f"batch, bias $-d^2/2\\sigma_h^2$ per pair, on {device}",
        color="#52606d",
        fontsize=10.5,
    )
    _periodic_table(figure.add_subplot(grid[0, :8]), batch, weights, sigmas)
    _molecule(figure.add_subplot(grid[0, 8:]), batch, weights, sigmas)
    _shells(figure.add_subplot(grid[1, :3]), batch, weights, sigmas)
    _sizes(figure.add_subplot(grid[1, 3:6]), batch)
    _errors(figure.add_subplot(grid[1, 6:9]), found, small)
    _times(figure.add_subplot(grid[1, 9:]), found)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _place(number: int) -> tuple[int, int]:
    """(period, group) in the 18-column table; the f block is left out of the columns."""
    noble = [0, 2, 10, 18, 36, 54, 86, 118]
    period = next(p for p in range(1, 8) if number <= noble[p])
    step = number - noble[period - 1]
    if step <= (1 if period == 1 else 2):
        return period, step if number != 2 else 18
    return period, 18 - (noble[period] - number)


def _periodic_table(axes, batch: Batch, weights: list[Tensor], sigmas: list[float]) -> None:
    head = int(np.argmin(np.abs(np.array(sigmas) - 1.5)))
    values = {}
    for name, crystal, p in zip(batch.names, batch.crystal, weights, strict=True):
        if crystal:
            entropy = -(p[head] * p[head].clamp_min(1e-30).log()).sum(-1)
            values[name] = entropy.exp().mean().item()
    norm = matplotlib.colors.LogNorm(min(values.values()), max(values.values()))
    colours = matplotlib.colormaps["viridis"]
    for number in range(1, 87):
        symbol = chemical_symbols[number]
        if 58 <= number <= 71 and symbol != "Lu":
            continue
        period, group = (6, 3) if symbol == "Lu" else _place(number)
        if number == 57:
            continue
        value = values.get(symbol)
        face = colours(norm(value)) if value else "#f1f3f5"
        axes.add_patch(Rectangle((group - 0.47, period - 0.47), 0.94, 0.94, color=face, lw=0))
        light = value is not None and norm(value) < 0.6
        ink = "white" if light else INK if value else FAINT
        axes.text(
            group,
            period - 0.1,
            symbol,
            ha="center",
            va="center",
            color=ink,
            weight="bold",
            fontsize=11,
        )
        if value:
            axes.text(
                group,
                period + 0.28,
                f"{value:.1f}",
                ha="center",
                va="center",
                color=ink,
                fontsize=7.5,
            )
    axes.set(xlim=(0.4, 18.6), ylim=(6.6, 0.4), aspect="equal", anchor="C")
    axes.axis("off")
    axes.set_title(
        f"How many atoms one atom attends to: $e^{{entropy}}$ in the head with $\\sigma$ = {sigmas[head]:.1f} Å"
    )
    bar = axes.inset_axes((0.2, 0.9, 0.38, 0.035))
    mappable = matplotlib.cm.ScalarMappable(norm, colours)
    colourbar = plt.colorbar(mappable, cax=bar, orientation="horizontal")
    ticks = [t for t in (1, 2, 5, 10, 20, 50) if norm.vmin <= t <= norm.vmax]
    colourbar.set_ticks(ticks, labels=[str(t) for t in ticks])
    colourbar.minorticks_off()
    colourbar.outline.set_visible(False)
    bar.set_title("dilute  →  dense", fontsize=8, weight="normal", loc="center", pad=3)


def _molecule(axes, batch: Batch, weights: list[Tensor], sigmas: list[float]) -> None:
    """One atom's attention in a molecule, in three heads, drawn on the molecule."""
    molecules = [n for n, crystal in enumerate(batch.crystal) if not crystal]
    n = max(molecules, key=lambda n: (batch.names[n] == "C6H6", batch.lens[n]))
    x = batch.positions[batch.atoms(n)].double().numpy()
    x = x - x.mean(0)
    flat = x @ np.linalg.svd(x)[2][:2].T
    numbers = batch.numbers[batch.atoms(n)].tolist()
    start = int(np.argmax(numbers))
    heads = [0, len(sigmas) // 3, len(sigmas) - 1]
    span = 2 * np.abs(flat).max() + 1.6
    for place, head in enumerate(heads):
        shift = np.array([[0, span * 0.5], [-span * 0.55, -span * 0.5], [span * 0.55, -span * 0.5]][place])
        at = flat + shift
        p = weights[n][head, start].numpy()
        for a in range(len(at)):
            for b in range(a):
                if np.linalg.norm(x[a] - x[b]) < 1.25 * (covalent_radii[numbers[a]] + covalent_radii[numbers[b]]):
                    axes.plot(*at[[a, b]].T, color="#ced4da", lw=3, zorder=1, solid_capstyle="round")
        for b in range(len(at)):
            if b != start:
                axes.plot(
                    *at[[start, b]].T,
                    color="#6741d9",
                    lw=14 * p[b],
                    alpha=0.75,
                    zorder=2,
                    solid_capstyle="round",
                )
        for a, number in enumerate(numbers):
            colour = jmol_colors[number] if number != 1 else (0.93, 0.93, 0.93)
            radius = 0.55 * covalent_radii[number] + 0.08
            edge = "#6741d9" if a == start else INK
            axes.add_patch(
                Circle(
                    at[a],
                    radius,
                    facecolor=colour,
                    edgecolor=edge,
                    lw=2.6 if a == start else 0.8,
                    zorder=3,
                )
            )
        axes.text(
            shift[0],
            shift[1] - span * 0.5,
            f"$\\sigma$ = {sigmas[head]:.1f} Å, itself {p[start]:.0%}",
            ha="center",
            fontsize=9,
        )
    axes.set(xlim=(-span * 1.08, span * 1.08), ylim=(-span * 1.05, span * 1.02), aspect="equal")
    axes.axis("off")
    axes.set_title(f"{batch.names[n]}: what one {chemical_symbols[numbers[start]]} attends to")


def _shells(axes, batch: Batch, weights: list[Tensor], sigmas: list[float]) -> None:
    crystals = [n for n, crystal in enumerate(batch.crystal) if crystal]
    n = max(crystals, key=lambda n: (batch.names[n] == "Si", batch.lens[n]))
    r = batch.positions[batch.j] - batch.positions[batch.i] + batch.image
    distance = r[batch.pairs(n)].norm(dim=-1).numpy()
    colours = matplotlib.colormaps["plasma"](np.linspace(0.05, 0.85, len(sigmas)))
    shells = np.unique(distance.round(2))
    for head in (0, 1, 2, len(sigmas) // 2, len(sigmas) - 1):
        p = weights[n][head].flatten().numpy()
        mean = [p[np.abs(distance - s) < 0.02].mean() for s in shells]
        axes.plot(shells, mean, "o-", ms=3.5, lw=1.2, color=colours[head], label=f"{sigmas[head]:.1f} Å")
    axes.set(yscale="log", ylim=(1e-6, 1.5), xlabel="distance (Å)", ylabel="mean attention weight")
    axes.legend(title="$\\sigma_h$", frameon=False, fontsize=8, title_fontsize=8)
    axes.set_title(f"Crystal of {batch.names[n]}: shell by shell")


def _sizes(axes, batch: Batch) -> None:
    crystal = np.array(batch.crystal)
    lens = np.array(batch.lens)
    order = np.lexsort((lens, crystal))
    colours = np.where(crystal[order], "#1c7ed6", "#f08c00")
    axes.bar(np.arange(len(lens)), lens[order], width=1.0, color=colours, lw=0)
    axes.axhline(lens.max(), color=FAINT, lw=0.8, ls="--")
    waste = len(lens) * lens.max() ** 2 / (lens**2).sum()
    axes.text(
        2,
        lens.max() * 0.985,
        f"padded to {lens.max()}: {waste:.0f}x the pairs",
        va="top",
        fontsize=8.5,
    )
    axes.text(len(lens) * 0.35, 18, "molecules", color="#f08c00", ha="center", weight="bold")
    axes.text(len(lens) * 0.76, 72, "crystals", color="#1c7ed6", ha="center", weight="bold")
    axes.set(xlabel="structure", ylabel="atoms", xlim=(-1, len(lens)))
    axes.set_title("One packed batch, no padding")


def _errors(axes, found: dict[str, dict], small: dict | None) -> None:
    ways = {name: way["errors"] for name, way in found.items()}
    if small and "errors" in small:
        ways["triton (interpreter)"] = {t: e for t, e in small["errors"].items() if t != "lse"}
    tensors = list(next(iter(ways.values())))
    for k, (name, errors) in enumerate(ways.items()):
        y = np.arange(len(errors)) + (k - (len(ways) - 1) / 2) * 0.17
        largest = [error for error, _ in errors.values()]
        axes.plot(largest, y, "o", color=COLOURS.get(name, INK), ms=6.5, label=name)
    allowed = [a for _, a in next(iter(ways.values())).values()]
    for y, bound in enumerate(allowed):
        axes.vlines(bound, y - 0.36, y + 0.36, color="#e03131", lw=2)
        axes.axhline(y, color="#f1f3f5", lw=16, zorder=0)
    axes.text(allowed[0] * 0.8, 0, "allowed", color="#e03131", ha="right", va="center", fontsize=8)
    axes.set_yticks(range(len(tensors)), tensors)
    axes.set(xscale="log", ylim=(len(tensors) + 0.45, -0.6), xlabel="largest error against fp64")
    axes.legend(frameon=False, fontsize=8, loc="lower left", ncols=2, columnspacing=1, handletextpad=0)
    axes.set_title("fp32: how exact")


def _times(axes, found: dict[str, dict]) -> None:
    names = list(found)
    for k, kind in enumerate(("forward", "backward")):
        values = [found[n]["ms"].get(kind, 0) for n in names]
        y = np.arange(len(names)) + (k - 0.5) * 0.36
        axes.barh(y, values, height=0.33, color=[COLOURS.get(n, INK) for n in names], alpha=(1.0, 0.55)[k])
        for at, value in zip(y, values, strict=True):
            text = f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.2g} s"
            axes.text(value * 1.06, at, f"{text} {kind}", va="center", fontsize=8)
    largest = max(v for n in names for v in found[n]["ms"].values())
    axes.set_yticks(range(len(names)), [n.replace(", ", ",\n") for n in names])
    axes.set(xscale="log", xlim=(None, largest * 12), ylim=(len(names) - 0.4, -0.6), xlabel="time (ms)")
    axes.set_title("fp32 with gradients: how fast")
