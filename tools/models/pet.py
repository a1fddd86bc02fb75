"""PET (metatrain): a potential with forces as gradients. One short sequence per atom, of it and its neighbours,
and a smooth cutoff as a weight of keys. Trained on forces, so through gradients of gradients."""

from __future__ import annotations

import math

import torch
from metatrain.pet.modules import transformer
from metatrain.pet.modules.backend import PETBackend
from torch import Tensor

from tools.models.served import attention
from tools.models.step import Results, Step, counted, drawn, replaced

DTYPES = (torch.float32,)
SIZES = {"tiny": {"atoms": 60}, "check": {"atoms": 256}, "real": {"atoms": 8192}}

HYPERS = {
    "cutoff": 4.5,
    "cutoff_function": "Bump",
    "cutoff_width": 0.5,
    "num_neighbors_adaptive": None,
    "adaptive_cutoff_method": "solver",
    "cutoff_width_adaptive": 1.0,
    "d_pet": 128,
    "d_node": 256,
    "d_head": 128,
    "d_feedforward": 256,
    "num_heads": 8,
    "num_attention_layers": 2,
    "num_gnn_layers": 2,
    "normalization": "RMSNorm",
    "activation": "SwiGLU",
    "attention_temperature": 1.0,
    "transformer_type": "PreLN",
    "featurizer_type": "feedforward",
    "zbl": False,
    "long_range": {"enable": False},
    "system_conditioning": False,
    "max_charge": 10,
    "max_spin_multiplicity": 10,
}


def _attention(
    self: transformer.AttentionBlock, x: Tensor, cutoff_factors: Tensor, use_manual_attention: bool
) -> Tensor:
    """AttentionBlock.forward: the cutoff as a weight of keys, the same code for first and second derivatives."""
    atoms, s, width = x.shape
    qkv = self.input_linear(x).view(atoms, s, 3, self.num_heads, self.head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    weight = cutoff_factors[:, :1]  # [atoms, s, s] with equal rows
    scale = 1.0 / (self.head_dim**0.5 * self.temperature)
    out = attention(q, k, v, key_weight=weight, scale=scale)
    return self.output_linear(out.transpose(1, 2).reshape(atoms, s, width))


def patched():
    return replaced((transformer.AttentionBlock, "forward", _attention))


def _crystal(atoms: int) -> tuple[Tensor, float]:
    """Positions on a simple cubic lattice with vacancies, disturbed, and the side of the periodic box."""
    randn = drawn()
    sites = math.ceil((atoms / 0.8) ** (1 / 3))
    axis = torch.arange(sites, dtype=torch.float64)
    lattice = torch.cartesian_prod(axis, axis, axis)
    chosen = torch.randperm(len(lattice), generator=torch.Generator().manual_seed(0))[:atoms]
    side = max(2.4 * sites, 2.1 * HYPERS["cutoff"])
    return lattice[chosen] * (side / sites) + 0.25 * randn(atoms, 3).double(), side


def _neighbours(x: Tensor, side: float) -> tuple[Tensor, Tensor, Tensor]:
    """Centers, neighbours and cell shifts of all pairs within the cutoff; the box is larger than two of them."""
    centers, others, shifts = [], [], []
    for first, rows in enumerate(x.split(512)):
        offset = x[None] - rows[:, None]
        shift = -(offset / side).round()
        distance = (offset + side * shift).norm(dim=-1)
        i, j = torch.where((distance < HYPERS["cutoff"]) & (distance > 0))
        centers.append(i + 512 * first)
        others.append(j)
        shifts.append(shift[i, j])
    return torch.cat(centers), torch.cat(others), torch.cat(shifts)


def build(size: str, dtype: torch.dtype, device: torch.device) -> list[Step]:
    atoms = SIZES[size]["atoms"]
    torch.manual_seed(0)
    model = PETBackend(HYPERS, [0, 1, 2, 3])
    model.add_output("energy", {"energy": [1]})
    model = model.to(device, dtype)

    exact, side = _crystal(atoms)
    i, j, shifts = (t.to(device) for t in _neighbours(exact, side))
    positions = exact.to(device, dtype)
    species = torch.randint(0, 4, (atoms,), generator=torch.Generator().manual_seed(2)).to(device)
    target = drawn(3)(atoms, 3).to(device, dtype)
    cell = side * torch.eye(3, device=device, dtype=dtype)[None]
    system = torch.zeros(atoms, dtype=torch.long, device=device)

    def energies(x: Tensor) -> Tensor:
        batch = model.preprocess(x, i, j, species, cell, shifts.to(dtype), system, 1.0)
        nodes, edges = model.calculate_features(batch)
        found = model.predict(nodes, edges, batch, cell, system, ["energy"])
        return found[0]["energy"][0]

    def infer() -> Results:
        model.eval()
        x = positions.detach().requires_grad_()
        each = energies(x)
        return {"energies of atoms": each, "forces": -torch.autograd.grad(each.sum(), x)[0]}

    def train() -> Results:
        model.train()
        x = positions.detach().requires_grad_()
        each = energies(x)
        total = each.sum()
        forces = -torch.autograd.grad(total, x, create_graph=True)[0]
        loss = (forces - target).square().mean() + 1e-4 * (total / atoms).square()
        loss.backward()
        return {"energies of atoms": each, "forces": forces}

    about = counted(atoms, "atom")
    return [
        Step.of("pet-forces", f"{about}: energy and forces", "SDPA", model, infer, patched),
        Step.of("pet-training", f"{about}: training on forces", "matmul, softmax", model, train, patched),
    ]
