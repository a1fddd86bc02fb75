"""Train the potential on energies and forces, and compare the training with SDPA's.

    make force-field                     everything; small on a CPU (two minutes), full on a GPU
    python examples/force_field train dynamics    some parts of it

The loss contains F = -dE/dx, so its gradient by the parameters contains second derivatives of every attention call.
`loss_of` has all of the training; the rest is bookkeeping. Every part adds its results to results.json in the
output folder; `plot` draws them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import torch
import typer
from ase.build import bulk
from ase.calculators.emt import EMT
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

if not __package__:
    raise SystemExit("train.py is part of a package; run: python examples/force_field")

import flashsci
from force_field.data import KINDS, METALS, Batch, Sample, offsets, samples
from force_field.md import Learned, constant_energy
from force_field.model import ELEMENTS, Potential
from tools.bench.timer import interleave

console = Console(width=110)


@dataclass(frozen=True)
class Settings:
    """A size of the experiment."""

    potential: dict = field(default_factory=dict)  # arguments of Potential
    structures: int = 1536
    kinds: Sequence[str] = KINDS
    metals: Sequence[str] = METALS
    batch: int = 32  # structures
    steps: int = 600
    rate: float = 2e-3
    compared: int = 50  # steps against SDPA's
    reordered: int = 3  # baselines that sum over neighbours in another order
    # Steps to measure: structures and cutoff (Angstrom).
    sizes: Sequence[tuple[int, float]] = ((16, 5.0), (64, 5.0), (256, 5.0), (64, 7.0))
    seconds: float = 2.0  # of measuring, each
    repeat: int = 3  # molecular dynamics: the side of a Cu3Au supercell
    dynamics: int = 600  # steps
    seed: int = 0


FULL = Settings()
SMALL = Settings(
    potential=dict(width=32, rounds=1, cutoff=4.0),
    structures=240,
    kinds=("alloy", "element"),
    metals=("Cu", "Au"),
    batch=3,
    steps=300,
    rate=5e-3,
    compared=20,
    reordered=2,
    sizes=((3, 4.0),),
    seconds=1.0,
    repeat=2,
    dynamics=200,
)


def loss_of(model: Potential, batch: Batch) -> Tensor:
    """Squared errors of the energy per atom (10 meV weigh as much as 100 meV / Angstrom) and of the
    forces. Its gradient is one of second order."""
    energies, forces = model.energies_and_forces(batch, training=True)
    energy_error = ((energies - batch.energy) / batch.count).square().mean()
    return 10 * energy_error + (forces - batch.forces).square().mean()


class Data:
    """Labelled structures, ready for a device: nine of ten to train on."""

    def __init__(self, labelled: Sequence[Sample], device: torch.device) -> None:
        self.device = device
        self.places = -(-max(s.most for s in labelled) // 8) * 8
        tenth = -(-len(labelled) // 10)
        self.test, self.training = list(labelled[:tenth]), list(labelled[tenth:])

    def batch(self, chosen: Sequence[Sample], dtype: torch.dtype = torch.float32) -> Batch:
        """Rounded to float32 for every dtype: all dtypes answer the same question."""
        return Batch.of(chosen, self.places).to("cpu", torch.float32).to(self.device, dtype)

    def draws(self, size: int, seed: int) -> Iterator[list[Sample]]:
        """Random batches without end, every structure once an epoch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.training), generator=generator).tolist()
            for n in range(0, len(order) - size + 1, size):
                yield [self.training[m] for m in order[n : n + size]]


def new_model(settings: Settings, data: Data, backend: str = "auto", dtype: torch.dtype = torch.float32) -> Potential:
    """The same parameters for every backend and dtype."""
    torch.manual_seed(settings.seed)
    model = Potential(**settings.potential, backend=backend)
    model.offset.copy_(offsets(data.training, ELEMENTS))
    return model.to(data.device, dtype)


def training_step(
    settings: Settings, model: Potential
) -> tuple[Callable[[Batch], Tensor], torch.optim.lr_scheduler.LRScheduler]:
    """A function that takes one step and returns its loss; and the schedule that it follows."""
    optimizer = torch.optim.Adam(model.parameters(), settings.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=settings.steps, pct_start=0.1)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step, schedule


def errors(model: Potential, data: Data, chosen: Sequence[Sample]) -> dict:
    """Mean absolute errors (meV per atom, meV per Angstrom) and the spread of the labels."""
    found: dict[str, list] = {"energy": [], "force": [], "label": [], "learned": []}
    for n in range(0, len(chosen), 32):
        batch = data.batch(chosen[n : n + 32])
        energies, forces = model.energies_and_forces(batch)
        found["energy"] += ((energies.detach() - batch.energy) / batch.count).abs().tolist()
        found["force"] += (forces - batch.forces).abs().flatten().tolist()
        found["label"] += batch.forces.flatten().tolist()
        found["learned"] += forces.flatten().tolist()
    return {
        "meV/atom": 1000 * sum(found["energy"]) / len(found["energy"]),
        "meV/A": 1000 * sum(found["force"]) / len(found["force"]),
        "forces": (found["label"][:6000], found["learned"][:6000]),
    }


def difference_of_forces(model: Potential, data: Data, step: float = 1e-4) -> float:
    """The largest difference between forces and central differences of the energy, of the largest
    force; in float64 through the reference backend."""
    exact = Potential(**model.arguments, backend="reference").to(data.device, torch.float64)
    exact.load_state_dict(model.state_dict())
    batch = data.batch(data.test[:2], torch.float64)
    _, forces = exact.energies_and_forces(batch)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for atom in torch.randperm(len(forces), generator=generator)[:4].tolist():
        for axis in range(3):
            moved = torch.zeros_like(batch.positions)
            moved[atom, axis] = step
            with torch.no_grad():
                up, down = (exact(batch, batch.positions + s * moved).sum() for s in (1, -1))
            worst = max(worst, abs(forces[atom, axis] + (up - down) / (2 * step)).item())
    return worst / forces.abs().max().item()


def train(settings: Settings, data: Data) -> tuple[Potential, dict]:
    """A trained model, its losses and its errors on structures that it has not seen."""
    model = new_model(settings, data)
    step, schedule = training_step(settings, model)
    draws = data.draws(settings.batch, settings.seed)
    losses = []
    for _ in track(range(settings.steps), "training", console=console):
        losses.append(step(data.batch(next(draws))))
        schedule.step()
    by_kind = {k: [s for s in data.test if s.kind == k] for k in settings.kinds}
    found = errors(model, data, data.test)
    return model, {
        "losses": torch.stack(losses).tolist(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "structures": len(data.training),
        "places": data.places,
        "errors": found,
        "kinds": {k: {n: e for n, e in errors(model, data, s).items() if n != "forces"} for k, s in by_kind.items()},
        "finite differences": difference_of_forces(model, data),
    }


def compare(settings: Settings, data: Data) -> dict:
    """The first steps of the training on flashsci and on SDPA's math backend: the same seed, the
    same batches.

    The spread by rounding alone is seen from the baseline with its neighbours, and so its sums, in other orders.
    flashsci may be twice as far as the furthest of those from the truth, the reference backend in float64. A
    sharper limit holds for its distance from the baseline itself: at every step twice the furthest of those until
    then, and 8 roundings of a loss.
    """
    arms = {
        "truth": ("reference", torch.float64, None),
        "SDPA math": ("math", torch.float32, None),
        **{f"SDPA math, reordered {n}": ("math", torch.float32, n) for n in range(settings.reordered)},
        "flashsci": ("auto", torch.float32, None),
    }
    curves = {}
    for name, (backend, dtype, order) in arms.items():
        step, schedule = training_step(settings, new_model(settings, data, backend, dtype))
        draws = data.draws(settings.batch, settings.seed)
        shuffle = None if order is None else torch.Generator().manual_seed(order)
        losses = []
        for _ in track(range(settings.compared), name, console=console):
            chosen = next(draws)
            if shuffle is not None:
                chosen = [s.shuffled(shuffle) for s in chosen]
            losses.append(step(data.batch(chosen, dtype)))
            schedule.step()
        curves[name] = torch.stack(losses).tolist()
    away, apart = distances(curves, "truth"), distances(curves, "SDPA math")
    allowed = 2 * max(max(x) for name, x in away.items() if name != "flashsci")
    reordered = [x for name, x in apart.items() if "reordered" in name]
    furthest = accumulate((max(step) for step in zip(*reordered, strict=True)), max)
    each = [2 * x + 8 * torch.finfo(torch.float32).eps for x in furthest]
    return {
        "losses": curves,
        "away": away,
        "allowed": allowed,
        "worst": max(away["flashsci"]),
        "within rounding": max(away["flashsci"]) <= allowed,
        "apart": apart,
        "apart allowed": each,
        "step for step": all(x <= y for x, y in zip(apart["flashsci"], each, strict=True)),
    }


def distances(curves: Mapping[str, list[float]], origin: str) -> dict[str, list[float]]:
    """Relative distances of loss curves from one of them, step by step."""
    start = torch.tensor(curves[origin], dtype=torch.float64)
    return {
        name: ((torch.tensor(x, dtype=torch.float64) - start).abs() / start).tolist()
        for name, x in curves.items()
        if name not in ("truth", origin)
    }


def measure(settings: Settings, device: torch.device) -> list[dict]:
    """Time and peak memory of a training step, flashsci and SDPA's math backend in turns."""
    rows = []
    for size, cutoff in settings.sizes:
        few = samples(min(size, 64), cutoff, settings.kinds, settings.metals)
        data = Data(few, device)
        batch = data.batch((few * -(-size // len(few)))[:size])
        wide = replace(settings, potential={**settings.potential, "cutoff": cutoff})
        functions, memory = {}, {}
        for name, backend in (("flashsci", "auto"), ("SDPA math", "math")):
            step, _ = training_step(wide, new_model(wide, data, backend))
            step(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step(batch)
                torch.cuda.synchronize()
                memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            functions[name] = partial(step, batch)
        times = interleave(functions, device, settings.seconds, (3, 50))
        row = {"atoms": len(batch.numbers), "places": data.places, "cutoff": cutoff, "MiB": memory}
        rows.append(row | {"ms": {name: t.median * 1e3 for name, t in times.items()}})
    return rows


def dynamics(settings: Settings, model: Potential) -> dict:
    """A Cu3Au crystal at about 300 K and constant energy."""
    atoms = bulk("Cu", a=3.74, cubic=True)
    atoms.symbols[0] = "Au"
    atoms = atoms.repeat(settings.repeat)
    atoms.calc = Learned(model)
    bar = iter(track(range(settings.dynamics), "dynamics", console=console))
    found = constant_energy(atoms, 300.0, 2.0, settings.dynamics, lambda: next(bar, None))
    learned = atoms.get_forces()
    atoms.calc = EMT()
    return found | {"meV/A": 1000 * float(abs(learned - atoms.get_forces()).mean())}


PARTS = ("train", "dynamics", "compare", "measure", "plot")


def report(found: dict) -> list[str]:
    """Print the tables; returns the faults of the results."""
    problems = []
    if "train" in found:
        table = Table("", "meV/atom", "meV/Å", title="errors on structures not seen")
        one = found["train"]
        for kind, e in (*one["kinds"].items(), ("all", one["errors"])):
            table.add_row(kind, f"{e['meV/atom']:.1f}", f"{e['meV/A']:.0f}")
        console.print(table)
        difference = one["finite differences"]
        console.print(f"forces against finite differences, float64: {difference:.0e} of the largest")
        if not difference < 1e-6:
            problems.append("forces are not the gradient of the energy")
        first, last = (sum(x) / len(x) for x in (one["losses"][:10], one["losses"][-10:]))
        if not last < 0.5 * first:
            problems.append("training did not halve the loss")
    if "dynamics" in found:
        one = found["dynamics"]
        console.print(
            f"{one['atoms']} atoms, {one['time'][-1]:.2f} ps at {one['kelvin']:.0f} K: total energy drifts by "
            f"{one['drift']:+.3f} meV/atom/ps, wobbles by {one['wobble']:.3f} meV/atom;\n"
            f"forces at the end: {one['meV/A']:.0f} meV/Å from EMT's"
        )
    if "compare" in found:
        one = found["compare"]
        console.print(
            f"{len(one['away']['flashsci'])} steps of training: losses at most {one['worst']:.1e} from float64; "
            f"rounding of reordered sums allows {one['allowed']:.1e};\n"
            f"at most {max(one['apart']['flashsci']):.1e} from SDPA's math backend; allowed are "
            f"{one['apart allowed'][0]:.1e} at the first step, {one['apart allowed'][-1]:.1e} at the last"
        )
        if not one["within rounding"]:
            problems.append("the loss curve is further from float64 than rounding leads")
        if not one["step for step"]:
            problems.append("the loss curve is not that of SDPA's math backend, step for step")
    if "measure" in found:
        table = Table("atoms a step", "tokens each", "", "flashsci", "SDPA math", "ratio")
        for row in found["measure"]:
            for unit in ("ms", "MiB"):
                if row[unit]:
                    ours, theirs = row[unit]["flashsci"], row[unit]["SDPA math"]
                    numbers = (f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}")
                    table.add_row(str(row["atoms"]), str(1 + row["places"]), unit, *numbers)
        console.print(table)
    return problems


def main(
    parts: Annotated[list[str], typer.Argument(help=", ".join(PARTS))] = list(PARTS),  # noqa: B006
    small: Annotated[bool | None, typer.Option(help="Default: small without a GPU.")] = None,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    output: Annotated[Path, typer.Option()] = Path("force-field-output"),
    settings: Annotated[str, typer.Option(help="Changes as JSON, e.g. '{\"steps\": 9}'.")] = "{}",
) -> None:
    """Train a potential, run molecular dynamics with it, compare the training with SDPA's, measure
    both, draw it all."""
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(unknown)}: not among {', '.join(PARTS)}")
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")  # of autograd's threads
    place = torch.device(device)
    small = place.type == "cpu" if small is None else small
    chosen = replace(SMALL if small else FULL, **json.loads(settings))
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    machine = f"flashsci {flashsci.__version__}, torch {torch.__version__}, {name}"
    console.print(machine)
    output.mkdir(parents=True, exist_ok=True)
    path, weights = output / "results.json", output / "potential.pt"
    found = json.loads(path.read_text()) if path.exists() and set(parts) != set(PARTS) else {}

    def keep(part: str, result: object) -> None:
        found.update({part: result, "machine": machine})
        path.write_text(json.dumps(found))

    if {"train", "compare"} & set(parts):
        with console.status(f"{chosen.structures} structures, energies and forces by EMT"):
            cutoff = chosen.potential.get("cutoff", 5.0)
            processes = 1 if small else os.cpu_count() or 1
            labelled = samples(chosen.structures, cutoff, chosen.kinds, chosen.metals, chosen.seed, processes)
        data = Data(labelled, place)
    if "train" in parts:
        model, result = train(chosen, data)
        torch.save(model.state_dict(), weights)
        keep("train", result)
    if "dynamics" in parts:
        model = Potential(**chosen.potential)
        model.load_state_dict(torch.load(weights, map_location="cpu"))
        keep("dynamics", dynamics(chosen, model.to(place)))
    if "compare" in parts:
        keep("compare", compare(chosen, data))
    if "measure" in parts:
        keep("measure", measure(chosen, place))
    problems = report(found)
    if "plot" in parts:
        from force_field.figure import draw

        draw(output / "force-field.png", found)
        console.print(f"{output / 'force-field.png'} and {path}")
    if problems:
        raise SystemExit("FAILED: " + "; ".join(problems))


def app() -> None:
    typer.run(main)
