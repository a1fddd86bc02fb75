"""The force field of examples/: what a potential must have, and the example in small."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ase")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from ase import Atoms
from ase.build import bulk, molecule
from force_field import train
from force_field.data import Batch, Sample, labelled, offsets, structure
from force_field.md import Learned, constant_energy
from force_field.model import Potential, smooth_step

CUTOFF = 3.5
CPU = torch.device("cpu")


@pytest.fixture
def potential():
    """Not trained, in float64, with forces of some eV / Angstrom."""
    torch.manual_seed(0)
    model = Potential(width=32, rounds=2, cutoff=CUTOFF, tail=1.2, backend="reference").double()
    model.energy[-1].weight.data *= 5
    return model


def alloy(seed: int = 1) -> Atoms:
    return structure("alloy", np.random.default_rng(seed), ("Cu", "Au", "Al"))


def evaluate(model: Potential, *chosen: Atoms, reach: float = CUTOFF, places: int = 0):
    samples = [Sample.of(atoms, reach) for atoms in chosen]
    batch = Batch.of(samples, max([places, *(s.most for s in samples)]))
    energies, forces = model.energies_and_forces(batch)
    return energies.detach(), forces


@pytest.mark.parametrize("backend", ["reference", "auto", "math"])
def test_forces_are_finite_differences_of_the_energy(potential, backend):
    data = train.Data([labelled(k, 3, ("Cu", "Au"), CUTOFF) for k in ("cluster", "slab")], CPU)
    model = Potential(**potential.arguments, backend=backend).double()
    model.load_state_dict(potential.state_dict())
    _, forces = model.energies_and_forces(data.batch(data.test, torch.float64))
    _, same = potential.energies_and_forces(data.batch(data.test, torch.float64))
    assert forces.abs().max() > 0.1
    torch.testing.assert_close(forces, same, rtol=1e-9, atol=1e-9)
    assert train.difference_of_forces(model, data) < 1e-6


def test_gradient_of_the_loss_is_its_finite_difference(potential):
    """The second order: the loss contains forces, its gradient their derivatives."""
    batch = Batch.of([labelled("cluster", 5, ("Cu", "Au"), CUTOFF)], 40)
    generator = torch.Generator().manual_seed(0)
    for backend in ("reference", "auto"):
        model = Potential(**potential.arguments, backend=backend).double()
        model.load_state_dict(potential.state_dict())
        parameters = list(model.parameters())
        gradient = torch.autograd.grad(train.loss_of(model, batch), parameters)
        along = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
        slope = sum((g * d).sum() for g, d in zip(gradient, along, strict=True))
        step, losses = 1e-6, []
        for sign in (1, -2):
            for p, d in zip(parameters, along, strict=True):
                p.data += sign * step * d
            losses.append(train.loss_of(model, batch).detach())
        torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), slope.detach(), rtol=1e-6, atol=0)


def test_invariance(potential):
    atoms = alloy()
    (energy,), forces = evaluate(potential, atoms)
    moved = atoms.copy()
    moved.positions += (0.3, -4.0, 1.7)
    moved.wrap()
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))  # may reflect, too
    moved.set_cell(moved.cell.array @ rotation.T, scale_atoms=False)
    moved.positions = moved.positions @ rotation.T
    order = np.random.default_rng(1).permutation(len(atoms))
    (other,), turned = evaluate(potential, moved[order], places=60)
    torch.testing.assert_close(other, energy, rtol=1e-12, atol=1e-12)
    expected = (forces @ torch.from_numpy(rotation).T)[order]
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-11)
    assert forces.sum(0).abs().max() < 1e-11


def test_energies_are_extensive_and_batches_do_not_mix(potential):
    atoms, water = alloy(), molecule("H2O")
    (one, two, three), forces = evaluate(potential, atoms, water, atoms.repeat((2, 1, 1)))
    torch.testing.assert_close(three, 2 * one, rtol=1e-12, atol=0)
    (alone,), alone_forces = evaluate(potential, water)
    torch.testing.assert_close(two, alone, rtol=1e-12, atol=0)
    torch.testing.assert_close(forces[32:35], alone_forces, rtol=0, atol=1e-12)


def test_angles_matter(potential):
    """Three neighbours at the same distances from the centre, and from one another but for one
    angle: only an environment that feels angles tells them apart."""
    far = 0.95 * CUTOFF  # so that neighbours of the centre do not see one another
    angles = np.array([0, 120, 240]), np.array([0, 90, 225])
    energies = []
    for degrees in angles:
        x = far * np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees)), 0 * degrees])
        atoms = Atoms("Cu4", np.concatenate([np.zeros((1, 3)), x.T]))
        assert atoms.get_all_distances()[1:, 1:][~np.eye(3, dtype=bool)].min() > CUTOFF
        energies.append(evaluate(potential, atoms)[0])
    assert (energies[0] - energies[1]).abs() > 1e-9


def test_smooth_when_an_atom_crosses_the_cutoff(potential):
    """Energy, forces and slopes of forces are the same on both sides."""
    atoms = bulk("Cu", a=3.7, cubic=True)
    atoms.pbc = False
    atoms += Atoms("Au", [(0.0, 0.0, 0.0)])

    def at(distance: float):
        moved = atoms.copy()
        moved.positions[-1] = moved.positions[0] - (distance, 0, 0)
        return evaluate(potential, moved)

    step = 1e-5
    for x, y in zip(at(CUTOFF - step), at(CUTOFF + step), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-8)
    near, far = ((at(d + step)[1] - at(d - step)[1]) / (2 * step) for d in (CUTOFF - 2 * step, CUTOFF + 2 * step))
    torch.testing.assert_close(near, far, rtol=0, atol=5e-4)  # a cosine's slope jumps by 0.1 and more
    x = torch.tensor([0.0, CUTOFF - 1.2, CUTOFF, CUTOFF + 1], dtype=torch.float64)
    assert smooth_step(x, CUTOFF, 1.2).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert (smooth_step(torch.linspace(CUTOFF - 1e-2, CUTOFF, 1000), CUTOFF, 1.2)[:-1] > 0).all()


def test_neighbours_beyond_the_cutoff_change_nothing(potential):
    atoms = alloy()
    energy, forces = evaluate(potential, atoms)
    more, same = evaluate(potential, atoms, reach=CUTOFF + 1)
    torch.testing.assert_close(more, energy, rtol=1e-13, atol=0)
    torch.testing.assert_close(same, forces, rtol=0, atol=1e-12)


def test_neighbours_in_another_order_are_the_same_structure(potential):
    sample = Sample.of(alloy(), CUTOFF)
    other = sample.shuffled(torch.Generator().manual_seed(0))
    assert not torch.equal(other.j, sample.j) and torch.equal(other.i, sample.i)
    with torch.no_grad():
        one, two = (potential(batch, batch.positions) for batch in (Batch.of([s], s.most) for s in (sample, other)))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


def test_offsets_are_the_energies_of_elements():
    mixed = [labelled(k, n, ("Cu", "Au"), CUTOFF) for n, k in enumerate(("alloy", "cluster") * 3)]
    truth = torch.zeros(100, dtype=torch.float64)
    truth[29], truth[79] = 1.5, -2.0
    for s in mixed:
        s.energy = truth[s.numbers].sum().item()
    torch.testing.assert_close(offsets(mixed, 100), truth)


def test_calculator_keeps_its_neighbours_and_the_energy(potential):
    atoms = bulk("Cu", a=3.7, cubic=True).repeat(2)
    atoms.calc = Learned(potential, skin=0.4)
    (energy,), forces = evaluate(potential, atoms)
    assert atoms.get_potential_energy() == pytest.approx(energy.item(), abs=1e-9)
    listed = atoms.calc._batch
    atoms.positions += np.random.default_rng(0).uniform(-0.1, 0.1, (len(atoms), 3))
    (energy,), forces = evaluate(potential, atoms)
    np.testing.assert_allclose(atoms.get_forces(), forces, atol=1e-9)
    assert atoms.get_potential_energy() == pytest.approx(energy.item(), abs=1e-9)
    assert atoms.calc._batch is listed
    atoms.positions[0] += 0.3
    atoms.get_forces()
    assert atoms.calc._batch is not listed
    run = constant_energy(atoms, 300, 1.0, 15)
    total = np.array(run["potential"]) + np.array(run["kinetic"])
    assert np.ptp(total) < 0.05 * np.ptp(run["kinetic"])


def test_example_from_beginning_to_end(tmp_path, capsys):
    """Trains, moves, compares, measures and draws; a failed check would raise SystemExit."""
    settings = dict(structures=30, steps=40, compared=4, reordered=1, dynamics=5, seconds=0.1)
    train.main(output=tmp_path, small=True, device="cpu", settings=json.dumps(settings))
    found = json.loads((tmp_path / "results.json").read_text())
    losses = found["train"]["losses"]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert found["compare"]["within rounding"] and found["compare"]["step for step"]
    assert len(found["compare"]["losses"]["flashsci"]) == 4
    assert found["measure"][0]["ms"].keys() == {"flashsci", "SDPA math"}
    assert (tmp_path / "force-field.png").read_bytes().startswith(b"\x89PNG")
    assert "meV/atom/ps" in capsys.readouterr().out
    with pytest.raises(Exception, match="cook"):
        train.main(["cook"], output=tmp_path)
