"""The attention of one molecule, drawn: which atoms each atom sees, by an entropy and the lines of its largest shares.

    python examples/attention_map.py docs/figures/attention-map.png

Caffeine, as ASE reads it from its coordinates, goes through one attention layer with random (seeded) features of its
elements and a bias ``-d^2 / 2 sigma^2`` of the distances, one sigma for each head. Every number of the figure is a
result of :func:`flashsci.attention_weights` or :func:`flashsci.attention_statistics`; no tensor of all pairs is made
by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import Atoms
from ase.data import covalent_radii
from ase.data.colors import jmol_colors
from matplotlib.axes import Axes
from torch import Tensor

import flashsci

SIGMAS = (1.2, 3.0)  # of each head, in Angstrom
DIM = 16
LINES = 4  # of each atom: its largest shares
# Caffeine (PubChem CID 2519), in Angstrom; nearly flat.
SYMBOLS = "O2N4C8H10"
PLACES = (
    (0.47, 2.5688, 0.0006), (-3.1271, -0.4436, -0.0003), (-0.9686, -1.3125, 0.0), (2.2182, 0.1412, -0.0003),
    (-1.3477, 1.0797, -0.0001), (1.4119, -1.9372, 0.0002), (0.8579, 0.2592, -0.0008), (0.3897, -1.0264, -0.0004),
    (0.0307, 1.422, -0.0006), (-1.9061, -0.2495, -0.0004), (2.5032, -1.1998, 0.0003), (-1.4276, -2.6960, 0.0008),
    (3.1926, 1.2061, 0.0003), (-2.2969, 2.1881, 0.0007), (3.5163, -1.5787, 0.0008), (-1.0451, -3.1973, -0.8937),
    (-2.5186, -2.7596, 0.0011), (-1.0447, -3.1963, 0.8957), (4.1992, 0.7801, 0.0002), (3.0468, 1.8092, -0.8992),
    (3.0466, 1.8083, 0.9004), (-1.8087, 3.1651, -0.0003), (-2.9322, 2.1027, 0.8881), (-2.9346, 2.1021, -0.8849),
)  # fmt: skip


def molecule() -> Atoms:
    return Atoms(SYMBOLS, positions=PLACES)


def maps(atoms: Atoms) -> tuple[Tensor, Tensor, Tensor]:
    """(P of each head, entropy of each row, the most looked-at atoms by key sums)."""
    generator = torch.Generator().manual_seed(3)
    distances = torch.from_numpy(atoms.get_all_distances()).float()
    sigma = torch.tensor(SIGMAS)[:, None, None]
    bias = -(distances**2) / (2 * sigma**2)
    table = torch.randn(3, 119, len(SIGMAS), DIM, generator=generator)
    q, k, v = table[:, torch.from_numpy(atoms.numbers)].transpose(1, 2)
    _, lse = flashsci.attention(q, k, v, bias=bias, return_lse=True)
    p = flashsci.attention_weights(q, k, lse, bias=bias)
    found = flashsci.attention_statistics(q, k, lse, bias=bias, entropy=True, key_sum=True)
    assert found.entropy is not None and found.key_sum is not None
    return p, found.entropy, found.key_sum


def draw_head(axes: Axes, atoms: Atoms, p: Tensor, key_sum: Tensor, title: str) -> None:
    """Atoms in the plane, as large as the attention that they receive, and the largest shares as lines."""
    places = atoms.positions[:, :2]
    radii = covalent_radii[atoms.numbers]
    bonds = np.argwhere(np.triu(atoms.get_all_distances() < 1.2 * (radii[:, None] + radii), 1))
    for i, j in bonds:
        axes.plot(*places[[i, j]].T, color="#9aa5b1", linewidth=3, zorder=1, solid_capstyle="round")
    values, keys = p.fill_diagonal_(0).topk(LINES, -1)
    for i, (row, others) in enumerate(zip(values.tolist(), keys.tolist(), strict=True)):
        for share, j in zip(row, others, strict=True):
            axes.plot(*places[[i, j]].T, color="#6741d9", alpha=min(1.0, 1.6 * share), linewidth=1.6, zorder=2)
    sizes = 60 + 130 * key_sum.numpy()
    axes.scatter(*places.T, s=sizes, c=jmol_colors[atoms.numbers], edgecolors="#1f2933", linewidths=0.8, zorder=3)
    axes.set_title(title, fontsize=10)
    axes.set_aspect("equal")
    axes.axis("off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="where the figure goes")
    path = parser.parse_args().path
    atoms = molecule()
    p, entropy, key_sum = maps(atoms)
    figure, panels = plt.subplots(1, len(SIGMAS), figsize=(8, 3.6))
    for head, (axes, sigma) in enumerate(zip(panels, SIGMAS, strict=True)):
        title = f"sigma {sigma} A, mean entropy {entropy[head].mean():.2f} nats"
        draw_head(axes, atoms, p[head], key_sum[head], title)
    figure.tight_layout()
    figure.savefig(path, dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main()
