"""The trained potential as an ASE calculator, and molecular dynamics with it.

At constant energy nothing hides a wrong force: where forces are not the gradient of the energy, or
jump when an atom crosses the cutoff, the total energy drifts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.md.velocitydistribution import Stationary
from ase.md.verlet import VelocityVerlet

from force_field.data import Batch, Sample
from force_field.model import Potential


class Learned(Calculator):
    """Energy and forces of a potential.

    The neighbour list reaches `skin` further than the cutoff and is kept until an atom has moved by half of that.
    Neighbours beyond the cutoff have weight 0, exactly: they change nothing.
    """

    implemented_properties = ("energy", "forces")

    def __init__(self, potential: Potential, skin: float = 0.4) -> None:
        super().__init__()
        self.potential, self.skin = potential, skin
        self._listed: Atoms | None = None  # where the neighbours were listed
        self._batch: Batch | None = None

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        like = next(self.potential.parameters())
        batch = self._neighbours(self.atoms)
        batch.positions = torch.from_numpy(self.atoms.positions).to(like)
        x = batch.positions.requires_grad_()
        energy = self.potential.atomic_energies(batch, x).double().sum()
        (slope,) = torch.autograd.grad(energy, x)
        self.results = {"energy": energy.item(), "forces": -slope.double().cpu().numpy()}

    def _neighbours(self, atoms: Atoms) -> Batch:
        old = self._listed
        if (
            old is None
            or len(old) != len(atoms)
            or (old.numbers != atoms.numbers).any()
            or (old.pbc != atoms.pbc).any()
            or (old.cell.array != atoms.cell.array).any()
            or np.linalg.norm(old.positions - atoms.positions, axis=1).max() > self.skin / 2
        ):
            sample = Sample.of(atoms, self.potential.cutoff + self.skin)
            like = next(self.potential.parameters())
            self._batch = Batch.of([sample], -(-sample.most // 8) * 8).to(like.device, like.dtype)
            self._listed = atoms.copy()
        return self._batch


def constant_energy(
    atoms: Atoms,
    kelvin: float,
    femtoseconds: float,
    steps: int,
    progress: Callable[[], object] = lambda: None,
    seed: int = 0,
) -> dict:
    """Velocity Verlet from velocities of twice this temperature, half of which becomes potential
    energy. Times in ps, energies in meV per atom; the drift is the slope of the total energy."""
    thermal = np.sqrt(atoms.get_masses() * units.kB * 2 * kelvin)[:, None]
    atoms.set_momenta(thermal * np.random.default_rng(seed).normal(size=(len(atoms), 3)))
    Stationary(atoms)
    dynamics = VelocityVerlet(atoms, timestep=femtoseconds * units.fs)
    time, potential, kinetic = [], [], []

    def record() -> None:
        time.append(dynamics.get_time() / units.fs / 1000)
        potential.append(atoms.get_potential_energy() / len(atoms) * 1000)
        kinetic.append(atoms.get_kinetic_energy() / len(atoms) * 1000)
        progress()

    dynamics.attach(record)
    dynamics.run(steps)
    total = np.array(potential) + np.array(kinetic)
    drift = float(np.polyfit(time, total, 1)[0])
    return {
        "time": time,
        "potential": potential,
        "kinetic": kinetic,
        "drift": drift,  # meV per atom and ps
        "wobble": float(total.std()),  # meV per atom
        "kelvin": float(np.mean(kinetic[steps // 2 :]) / 1000 / (1.5 * units.kB)),
        "atoms": len(atoms),
        "femtoseconds": femtoseconds,
    }
