"""Real crystals and molecules through every backend: the backend that serves the call, its errors, its times, and
the result.

    python examples/crystals.py            (or: make demo)

Every elemental crystal of ASE's `dcdft` collection and every molecule of its `g2` collection go
into ONE packed batch, without padding: 1 to 96 atoms each. One attention layer as in models of
atoms (Crystalformer, Graphormer, Uni-Mol): per-atom features from an element embedding and the
local environment, and a bias -d^2 / 2 sigma_h^2 for every pair of atoms of a structure, with one learned length
sigma_h per head. Forces F = -dE/dx flow through features and bias. The weights are random (seeded): the arithmetic
is compared, and the figure shows the geometry.

Without a GPU, Triton runs in interpreter mode on a few structures in a separate process: correct, and slow by
design.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import flashsci
from flashsci.testing import Inputs, Judge, evaluate

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tools/, which is not in the wheel
from tools.bench.timer import interleave

HEADS, DIM = 8, 16  # 128 features, as PET and Crystalformer
CELL = 7.0  # Angstrom: crystals are repeated until their faces are this far apart
PIECE = ("H2O", "CH4", "Si2H6", "Cu", "C6H6")  # structures for the interpreter
TENSORS = ("out", "dq", "dk", "dv", "dbias")


@dataclass
class Batch:
    """Structures packed one after the other; a pair (i, j) of atoms for every two of the same
    structure."""

    names: list[str]
    crystal: list[bool]
    lens: list[int]
    numbers: Tensor  # [T] atomic numbers
    positions: Tensor  # [T, 3] Angstrom
    i: Tensor  # [sum S^2] first atom of each pair, row-major blocks
    j: Tensor
    image: Tensor  # [sum S^2, 3]: what to add to x_j - x_i for the nearest periodic image

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lens], device=self.i.device).cumsum(0).int()

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        numbers, i, j = (x.to(device) for x in (self.numbers, self.i, self.j))
        positions, image = (x.to(device, dtype) for x in (self.positions, self.image))
        return Batch(self.names, self.crystal, self.lens, numbers, positions, i, j, image)

    def pairs(self, n: int) -> slice:
        """The pairs of structure n."""
        before = sum(s * s for s in self.lens[:n])
        return slice(before, before + self.lens[n] ** 2)

    def atoms(self, n: int) -> slice:
        before = sum(self.lens[:n])
        return slice(before, before + self.lens[n])


def structures(names: Sequence[str] = ()) -> Batch:
    """The crystals and molecules of these names (default: all), packed, with nearest-image
    vectors."""
    from ase.collections import dcdft, g2

    unknown = set(names) - set(dcdft.names) - set(g2.names)
    if unknown:
        raise ValueError(f"neither in dcdft nor in g2: {', '.join(sorted(unknown))}")
    chosen = [(n, dcdft[n], True) for n in dcdft.names if not names or n in names]
    chosen += [(n, g2[n], False) for n in g2.names if not names or n in names]
    lens, numbers, positions, firsts, seconds, images = [], [], [], [], [], []
    start = 0
    for _, atoms, periodic in chosen:
        if periodic:
            areas = np.linalg.norm(np.cross(atoms.cell[[1, 2, 0]], atoms.cell[[2, 0, 1]]), axis=1)
            heights = atoms.cell.volume / areas
            atoms = atoms.repeat(np.ceil(CELL / heights - 1e-9).astype(int))
        x, size = atoms.positions, len(atoms)
        nearest = atoms.get_all_distances(mic=periodic, vector=True)  # [S, S, 3]: x_j - x_i + image
        images.append((nearest - (x[None] - x[:, None])).reshape(-1, 3))
        index = start + np.arange(size)
        firsts.append(np.repeat(index, size))
        seconds.append(np.tile(index, size))
        lens.append(size)
        numbers.append(atoms.numbers)
        positions.append(x)
        start += size

    def joined(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))

    return Batch(
        [n for n, _, _ in chosen],
        [periodic for _, _, periodic in chosen],
        lens,
        *map(joined, (numbers, positions, firsts, seconds, images)),
    )


class Layer(nn.Module):
    """Per-atom features -> q, k, v; pair distances -> bias; attention out -> energy of each atom."""

    def __init__(self) -> None:
        super().__init__()
        width, radial = HEADS * DIM, 16
        self.elements = nn.Embedding(100, width)
        self.register_buffer("centres", torch.linspace(0.5, 6.0, radial))  # Angstrom
        self.environment = nn.Linear(radial, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.log_sigma = nn.Parameter(torch.linspace(0.8, 6.0, HEADS).log())  # Angstrom
        self.energy = nn.Linear(width, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v [T, H, D] and the ragged bias [H, sum S^2], differentiable in the positions."""
        r = batch.positions[batch.j] - batch.positions[batch.i] + batch.image
        squared = (r * r).sum(-1)
        bias = -squared / (2 * self.log_sigma.exp().square()[:, None])
        other = (batch.i != batch.j).nonzero().squeeze(1)
        bumps = torch.exp(-4 * (squared[other].sqrt()[:, None] - self.centres) ** 2)
        around = torch.zeros(len(batch.numbers), len(self.centres)).to(bumps)
        around = around.index_add(0, batch.i[other], bumps)
        features = self.elements(batch.numbers) + self.environment(around)
        q, k, v = self.qkv(torch.nn.functional.layer_norm(features, features.shape[-1:])).chunk(3, -1)
        return *(x.unflatten(-1, (HEADS, DIM)) for x in (q, k, v)), bias


def call_of(batch: Batch, layer: Layer) -> Inputs:
    """The attention call of a batch: its tensors as leaves, and an output gradient to start the backward from."""
    q, k, v, bias = (x.detach() for x in layer(batch))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    longest = {"max_seqlen_q": max(batch.lens), "max_seqlen_k": max(batch.lens)}
    return Inputs(q, k, v, bias, dout=dout, cu_seqlens_q=batch.cu_seqlens, options=longest)


def padded_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lens: Tensor, pairs: Tensor) -> Tensor:
    """The usual padded form: pad every structure to the longest, mask, call SDPA, unpad."""
    real = torch.arange(pairs.shape[-1], device=q.device) < lens[:, None]  # [N, S]

    def pad(x: Tensor) -> Tensor:  # [T, H, D] -> [N, H, S, D]
        full = x.new_zeros(*real.shape, *x.shape[1:])
        return full.masked_scatter(real[:, :, None, None], x).transpose(1, 2)

    # Rows of padding see everything: a row that sees nothing would become NaN.
    padding = ~real[:, None, :, None]
    if bias is None:
        mask = pairs[:, None] | padding
    else:  # ragged [H, sum S^2] -> [N, H, S, S], -inf outside the structures
        full = bias.new_full((len(bias), *pairs.shape), float("-inf"))
        mask = full.masked_scatter(pairs, bias).transpose(0, 1).masked_fill(padding, 0.0)
    out = nn.functional.scaled_dot_product_attention(pad(q), pad(k), pad(v), mask)
    return out.transpose(1, 2)[real]


def ways(call: Inputs) -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]]:
    """Every way to serve the call: each backend, and SDPA on a padded batch."""
    offsets = call.cu_seqlens_q
    lens = offsets.diff()
    inside = torch.arange(int(lens.max()), device=lens.device) < lens[:, None]
    pairs = inside[:, :, None] & inside[:, None, :]

    def by(backend: str) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
            return flashsci.varlen_attention(q, k, v, offsets, bias=bias, backend=backend, **call.options)

        return attend

    found = {name: by(name) for name in ("reference", "triton", "cuda")}
    found["sdpa, padded"] = lambda q, k, v, bias: padded_sdpa(q, k, v, bias, lens, pairs)
    return found


def run(call: Inputs, seconds: float) -> tuple[dict[str, dict], dict[str, str]]:
    """Errors against fp64 and times of every way that can serve the call, and the reasons of the others.

    Returns {way: {"errors": {tensor: (error, allowed)}, "ms": {"forward": ..., "backward": ...}}}.
    """
    judge = Judge(call)
    found, reasons, forwards, backwards = {}, {}, {}, {}
    for name, attend in ways(call).items():
        wanted = ("q", "k", "v", "bias") if call.bias is not None else ("q", "k", "v")
        leaves = {n: getattr(call, n).detach().requires_grad_(call.dout is not None) for n in wanted}
        arguments = [leaves.get(n) for n in ("q", "k", "v", "bias")]
        try:
            with flashsci.use_backend("auto", strict=True):
                out = attend(*arguments)
        except flashsci.BackendError as error:
            reasons[name] = str(error).split("; these can:")[0].split(": ", 1)[-1]
            continue
        results = {"out": out.detach()}
        forwards[name] = lambda attend=attend, a=arguments: attend(*a)
        if call.dout is not None:

            def backward(out=out, leaves=leaves) -> tuple[Tensor, ...]:
                return torch.autograd.grad(out, list(leaves.values()), call.dout, retain_graph=True)

            results.update(zip((f"d{n}" for n in leaves), backward(), strict=True))
            backwards[name] = backward
        findings = [judge.judge(n, x) for n, x in results.items()]
        found[name] = {
            "errors": {f.tensor: (f.error, f.allowed) for f in findings},
            "problems": [f.problem for f in findings if f.problem],
            "ms": {},
        }
    for kind, functions in (("forward", forwards), ("backward", backwards)):
        if functions:
            limits = (5, 200) if call.q.is_cuda else (1, 20)
            for name, times in interleave(functions, call.q.device, seconds, limits).items():
                found[name]["ms"][kind] = times.median * 1e3
    return found, reasons


def interpreted() -> dict:
    """The Triton kernels on a few structures, in Triton's interpreter, in a separate process.

    The switch is read when Triton is imported, so it cannot be set in this process any more.
    """
    command = [sys.executable, __file__, "--piece"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        return {"problem": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def piece() -> None:
    """The body of the process of `interpreted`: the small call by Triton, judged; JSON on stdout."""
    torch.manual_seed(0)
    call = call_of(structures(PIECE).to(torch.device("cpu"), torch.float32), Layer())
    judge, start = Judge(call), time.perf_counter()
    findings = judge.findings(evaluate(call, "triton"))
    print(
        json.dumps(
            {
                "atoms": len(call.q),
                "seconds": time.perf_counter() - start,
                "errors": {f.tensor: (f.error, f.allowed) for f in findings},
                "problems": [f.problem for f in findings if f.problem],
            }
        )
    )


def forces(batch: Batch, layer: Layer, backend: str) -> Tensor:
    """-dE/dx [T, 3], E the sum of all atoms' energies: through the gradients of q, k, v and of the
    bias."""
    x = batch.positions.clone().requires_grad_()
    moved = Batch(*(x if name == "positions" else value for name, value in vars(batch).items()))
    q, k, v, bias = layer(moved)
    longest = max(batch.lens)
    out = flashsci.varlen_attention(
        q,
        k,
        v,
        batch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        bias=bias,
        backend=backend,
    )
    (gradient,) = torch.autograd.grad(layer.energy(out.flatten(1)).sum(), x)
    return -gradient


def weights(batch: Batch, layer: Layer) -> list[Tensor]:
    """The attention weights [H, S, S] of every structure, from q, k, bias and the lse that
    attention returns."""
    with torch.no_grad():
        q, k, v, bias = layer(batch)
        _, lse = flashsci.varlen_attention(q, k, v, batch.cu_seqlens, bias=bias, return_lse=True, backend="reference")
    found = []
    for n, size in enumerate(batch.lens):
        rows = batch.atoms(n)
        scores = torch.einsum("ihd,jhd->hij", q[rows], k[rows]) / DIM**0.5
        scores = scores + bias[:, batch.pairs(n)].unflatten(-1, (size, size))
        found.append(torch.exp(scores - lse[:, rows, None]))
    return found


def step(number: int, text: str) -> None:
    print(f"\n[{number}/5] {text}", flush=True)


def show(title: str, found: dict[str, dict], reasons: dict[str, str]) -> None:
    tensors = [t for t in TENSORS if any(t in way["errors"] for way in found.values())]
    print(f"\n  {title}")
    head = "".join(f"{t:>10}" for t in tensors)
    print(f"  {'':<14}{head}   {'forward':>10} {'backward':>10}   within the bound?")
    for name, way in found.items():
        errors = "".join(f"{way['errors'][t][0]:>10.1e}" for t in tensors)
        times = " ".join(
            f"{way['ms'][kind]:>7.2f} ms" if kind in way["ms"] else f"{'-':>10}" for kind in ("forward", "backward")
        )
        print(f"  {name:<14}{errors}   {times}   {'; '.join(way['problems']) or 'yes'}")
    for name, reason in reasons.items():
        print(f"  {name:<14}no: {reason}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time per table and pass")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these structures only")
    parser.add_argument("--piece", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.piece:
        piece()
        return 0
    device = torch.device(options.device)
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")  # of autograd's threads
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    print(f"flashsci {flashsci.__version__}, torch {torch.__version__}, on {name}")

    step(1, "crystals (dcdft) and molecules (g2) from ASE: pairs and nearest periodic images")
    everything = structures(options.only)
    batch = everything.to(device, torch.float32)
    torch.manual_seed(0)
    layer = Layer().to(device)
    sizes = batch.lens
    useful, padded = sum(s * s for s in sizes), len(sizes) * max(sizes) ** 2
    print(
        f"  {sum(batch.crystal)} crystals and {len(sizes) - sum(batch.crystal)} molecules, {sum(sizes)} atoms, "
        f"{min(sizes)} to {max(sizes)} each\n"
        f"  {useful:,} pairs; padded to the longest it would be {padded / useful:.0f} times as many"
    )

    step(2, "who serves this call, and why")
    call = call_of(batch, layer)
    bias = call.bias.detach().requires_grad_()
    print(flashsci.explain(call.q, call.k, call.v, cu_seqlens_q=call.cu_seqlens_q, bias=bias))

    step(3, "the same call by every backend: largest error against fp64, and time")
    print("  the fp64 truth and what rounding may do to it ...", flush=True)
    failures = []
    found, reasons = run(call, options.seconds)
    show("fp32, pair bias, gradients of q, k, v and bias", found, reasons)
    halves = call.to(torch.bfloat16)
    halves.bias = halves.dout = None
    found_bf16, reasons_bf16 = run(halves, options.seconds)
    show("bf16, no bias, forward only (what serving needs)", found_bf16, reasons_bf16)
    small = None
    if "triton" in reasons:
        print(
            f"\n  Triton's kernels in interpreter mode, on {', '.join(PIECE)} (a minute or so) ...",
            flush=True,
        )
        small = interpreted()
        if "problem" in small:
            print(f"  triton        {small['problem']}")
            failures.append(small["problem"])
        else:
            errors = ", ".join(f"{t} {e:.0e}" for t, (e, _) in small["errors"].items())
            print(f"  {small['atoms']} atoms in {small['seconds']:.0f} s: {errors}")
            print(f"  within the bound? {'; '.join(small['problems']) or 'yes'}")
            failures += small["problems"]
    for way in (*found.values(), *found_bf16.values()):
        failures += way["problems"]

    step(4, "forces through features and bias, and Newton's third law")
    exact = forces(everything.to(device, torch.float64), layer.double(), "reference")
    force = forces(batch, layer.float(), "auto")
    largest = exact.norm(dim=1).max().item()
    worst = (force - exact).norm(dim=1).max().item()
    owner = torch.arange(len(sizes), device=device).repeat_interleave(call.cu_seqlens_q.diff())
    total = torch.zeros(len(sizes), 3).to(force).index_add(0, owner, force).norm(dim=1).max().item()
    print(
        f"  largest force {largest:.3g} (arbitrary units); largest error {worst / largest:.1e} of it;\n"
        f"  largest sum of forces over a structure, which must vanish, {total / largest:.1e} of it"
    )
    if not max(worst, total) < 1e-3 * largest:
        failures.append("forces are off")

    step(5, "figure")
    from _figure import draw

    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "crystals.png"
    cpu = everything.to(torch.device("cpu"), torch.float32)
    layer.cpu()
    draw(path, cpu, weights(cpu, layer), layer.log_sigma.exp().tolist(), found, small, name)
    record = {"device": name, "fp32": found, "bf16": found_bf16, "interpreter": small}
    (options.output / "crystals.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"  {path} and {path.with_suffix('.json')}")
    if failures:
        print("\nFAILED: " + "; ".join(failures), file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
