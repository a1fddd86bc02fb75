"""Structures, their labels, and batches of them.

Labels are those of ASE's EMT, an analytical many-body potential for the fcc metals Al, Ni, Cu, Pd,
Ag, Pt, Au and their alloys. It also has parameters for H, C, N and O, good enough for molecules as
a second kind of structure to learn, though not for chemistry.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.collections import g2
from ase.data import atomic_numbers, reference_states
from ase.neighborlist import neighbor_list
from torch import Tensor

METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
KINDS = ("element", "alloy", "vacancies", "slab", "cluster", "molecule")


def structure(kind: str, rng: np.random.Generator, metals: Sequence[str] = METALS) -> Atoms:
    """A strained and displaced structure of this kind, without labels."""
    if kind == "molecule":
        names = [n for n in g2.names if len(g2[n]) > 1 and set(g2[n].symbols) <= set("HCNO")]
        atoms = g2[rng.choice(names)]
        atoms.positions += rng.normal(0, rng.uniform(0.01, 0.08), (len(atoms), 3))
        return atoms
    chosen = rng.choice(metals, 1 if kind == "element" else min(rng.integers(2, 4), len(metals)), False)
    side = np.array([reference_states[atomic_numbers[m]]["a"] for m in chosen])
    share = rng.dirichlet(np.ones(len(chosen)))
    atoms = bulk("Cu", a=float(share @ side), cubic=True).repeat(3 if kind == "cluster" else 2)
    atoms.symbols = rng.choice(chosen, len(atoms), p=share)
    strain = rng.normal(0, 0.012, (3, 3)).clip(-0.03, 0.03)
    stretch = np.eye(3) * rng.uniform(0.97, 1.05) + (strain + strain.T) / 2
    atoms.set_cell(atoms.cell @ stretch, scale_atoms=True)
    if kind == "vacancies":
        del atoms[rng.choice(len(atoms), rng.integers(1, 5), False)]
    elif kind == "slab":  # two faces of vacuum
        atoms.cell[2] *= 1 + 9 / np.linalg.norm(atoms.cell[2])
    elif kind == "cluster":
        middle = atoms.positions.mean(0) + rng.uniform(-1, 1, 3)
        far = np.linalg.norm(atoms.positions - middle, axis=1)
        atoms = atoms[np.argsort(far)[: rng.integers(6, 33)]]
        atoms.pbc = False
    atoms.positions += rng.normal(0, rng.uniform(0.03, 0.16), (len(atoms), 3))
    return atoms


@dataclass
class Sample:
    """A structure with its labels and its neighbour list: atom j, moved by `image`, is a neighbour
    of atom i."""

    kind: str
    numbers: Tensor  # [n]
    positions: Tensor  # [n, 3] Angstrom
    i: Tensor  # [pairs], ascending
    j: Tensor
    image: Tensor  # [pairs, 3]
    energy: float = 0.0  # eV
    forces: Tensor | None = None  # [n, 3] eV / Angstrom

    @staticmethod
    def of(atoms: Atoms, cutoff: float, kind: str = "") -> Sample:
        i, j, cells = neighbor_list("ijS", atoms, cutoff)
        numpy = (atoms.numbers, atoms.positions, i, j, cells @ atoms.cell.array)
        return Sample(kind, *(torch.from_numpy(np.array(x)) for x in numpy))

    @property
    def most(self) -> int:
        """The largest number of neighbours."""
        return int(self.i.bincount().max()) if len(self.i) else 0

    def shuffled(self, generator: torch.Generator) -> Sample:
        """The same structures with every atom's neighbours in another order: the same sums, rounded otherwise."""
        order = torch.randperm(len(self.i), generator=generator)
        order = order[self.i[order].argsort(stable=True)]
        changed = {name: getattr(self, name)[order] for name in ("i", "j", "image")}
        return Sample(**{**vars(self), **changed})


def labelled(kind: str, seed: int, metals: Sequence[str], cutoff: float) -> Sample:
    atoms = structure(kind, np.random.default_rng(seed), metals)
    sample = Sample.of(atoms, cutoff, kind)
    atoms.calc = EMT()
    sample.energy = atoms.get_potential_energy()
    sample.forces = torch.from_numpy(atoms.get_forces())
    return sample


def samples(
    count: int,
    cutoff: float,
    kinds: Sequence[str] = KINDS,
    metals: Sequence[str] = METALS,
    seed: int = 0,
    processes: int = 1,
) -> list[Sample]:
    """`count` labelled structures, the kinds in turn."""
    todo = [(kinds[n % len(kinds)], seed + n, metals, cutoff) for n in range(count)]
    if processes == 1:
        return [labelled(*arguments) for arguments in todo]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return list(pool.map(labelled, *zip(*todo, strict=True), chunksize=16))


@dataclass
class Batch:
    """Structures one after the other; A atoms, B structures, N slots for neighbours of each atom."""

    numbers: Tensor  # [A]
    positions: Tensor  # [A, 3]
    owner: Tensor  # [A] the structure
    neighbour: Tensor  # [A, N] the atom; 0 in unused slots
    image: Tensor  # [A, N, 3]
    real: Tensor  # [A, N] bool: the slot is used
    energy: Tensor  # [B]
    forces: Tensor  # [A, 3]
    count: Tensor  # [B] atoms of the structure

    @staticmethod
    def of(chosen: Sequence[Sample], places: int) -> Batch:
        count = torch.tensor([len(s.numbers) for s in chosen])
        start = count.cumsum(0) - count
        atoms = int(count.sum())
        i = torch.cat([s.i + n for s, n in zip(chosen, start.tolist(), strict=True)])
        j = torch.cat([s.j + n for s, n in zip(chosen, start.tolist(), strict=True)])
        number = i.bincount(minlength=atoms)
        place = torch.arange(len(i)) - (number.cumsum(0) - number)[i]
        neighbour = torch.zeros(atoms, places, dtype=torch.long)
        image = torch.zeros(atoms, places, 3, dtype=torch.float64)
        real = torch.zeros(atoms, places, dtype=torch.bool)
        neighbour[i, place], real[i, place] = j, True
        image[i, place] = torch.cat([s.image for s in chosen])
        return Batch(
            torch.cat([s.numbers for s in chosen]),
            torch.cat([s.positions for s in chosen]),
            torch.arange(len(chosen)).repeat_interleave(count),
            neighbour,
            image,
            real,
            torch.tensor([s.energy for s in chosen], dtype=torch.float64),
            torch.cat([torch.zeros_like(s.positions) if s.forces is None else s.forces for s in chosen]),
            count,
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Batch:
        return Batch(*(x.to(device, dtype if x.is_floating_point() else None) for x in vars(self).values()))


def offsets(chosen: Sequence[Sample], elements: int) -> Tensor:
    """The energy of each element; summed over atoms, these come closest to the labels."""
    composition = torch.stack([s.numbers.bincount(minlength=elements) for s in chosen]).double()
    energy = torch.tensor([s.energy for s in chosen], dtype=torch.float64)
    return torch.linalg.lstsq(composition, energy[:, None], driver="gelsd").solution.squeeze(1)
