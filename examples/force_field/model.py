"""The potential: a transformer over the environment of every atom, smooth at its cutoff.

In the spirit of PET (Pozdnyakov, Ceriotti, arXiv:2305.19302). For every atom the tokens are the atom itself and its
neighbours. They attend to one another; then every token gives a part of the atom's energy, and the atom's own token
is the one that its neighbours see in the next round. Unlike PET, nothing depends on the orientation: lengths enter
through the tokens, and angles through the scores. Three of the channels of q and k are the unit vector u_j from the
atom to the neighbour, so that q_j . k_l holds a learned multiple of u_j . u_l = cos(j, atom, l).

A neighbour at distance r counts with weight w(r) in every softmax, P = w e^S / sum w e^S. w falls
smoothly to an exact 0 at the cutoff, and so does all influence of the neighbour: energy, forces and
the derivatives of the forces are continuous when atoms come and go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsci

if TYPE_CHECKING:
    from force_field.data import Batch

CHANNELS = 16  # of a head; q and k hold CHANNELS - 3 learned ones and a direction
ELEMENTS = 100


def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, backend: str) -> Tensor:
    """Attention of q, k, v [A, H, S, D] with a weight [A, S] for every key."""
    if backend != "math":
        return flashsci.attention(q, k, v, key_weight=weight[:, None], backend=backend)
    bias = weight.clamp(min=1e-15).log()[:, None, None]  # the form without flashsci
    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def smooth_step(r: Tensor, cutoff: float, tail: float) -> Tensor:
    """1 up to `cutoff - tail`, 0 from `cutoff` on, twice continuously differentiable."""
    x = ((cutoff - r) / tail).clamp(0, 1)  # from the cutoff: 1 - ... could round to below 0
    return x**3 * (10 - 15 * x + 6 * x**2)


def gather(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for an index of any shape. index_select's gradient is an index_add, much faster than the sort in the
    gradient of x[index]."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


class Block(nn.Module):
    """Attention among the tokens of an environment, then a perceptron for each."""

    def __init__(self, width: int, backend: str) -> None:
        super().__init__()
        self.heads, self.backend = width // CHANNELS, backend
        self.sizes = (CHANNELS - 3, 1, CHANNELS - 3, CHANNELS)  # q, its factor of u, k, v
        self.qkv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, self.heads * sum(self.sizes)))
        self.out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, direction: Tensor, weight: Tensor) -> Tensor:
        by_head = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [A, H, S, .]
        q, factor, k, v = by_head.split(self.sizes, -1)
        u = direction[:, None].expand(-1, self.heads, -1, -1)
        out = attend(torch.cat([q, factor * u], -1), torch.cat([k, u], -1), v, weight, self.backend)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.perceptron(x)


class Round(nn.Module):
    """One round: tokens from lengths and from both atoms' features; blocks; the atom's features for the next round."""

    def __init__(self, width: int, blocks: int, lengths: int, backend: str) -> None:
        super().__init__()
        self.length = nn.Linear(lengths, width)
        self.atom, self.neighbour = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.token = nn.Sequential(nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, backend) for _ in range(blocks))

    def forward(self, h: Tensor, neighbour: Tensor, lengths: Tensor, direction: Tensor, weight: Tensor) -> Tensor:
        pair = self.atom(h)[:, None] + gather(self.neighbour(h), neighbour)
        tokens = self.token(self.length(lengths) * (1 + pair))
        x = torch.cat([h[:, None], tokens], 1)  # [A, 1 + N, width]
        for block in self.blocks:
            x = block(x, direction, weight)
        return x


class Potential(nn.Module):
    """Energies of atoms from their neighbours within `cutoff` (Angstrom).

    Every round lets an atom see as far again; every block of a round, more of its neighbours at once. `backend` is
    one of flashsci's, or "math": SDPA's, for comparison.
    """

    def __init__(
        self,
        width: int = 128,
        rounds: int = 2,
        blocks: int = 2,
        cutoff: float = 5.0,
        tail: float = 1.5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.arguments = dict(width=width, rounds=rounds, blocks=blocks, cutoff=cutoff, tail=tail)
        self.cutoff, self.tail, lengths = cutoff, tail, 24
        self.species = nn.Embedding(ELEMENTS, width)
        self.register_buffer("centres", torch.linspace(0.8, cutoff, lengths))
        self.rounds = nn.ModuleList(Round(width, blocks, lengths, backend) for _ in range(rounds))
        self.energy = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.energy[-1].weight.data *= 0.2  # tens of tokens add up
        self.register_buffer("offset", torch.zeros(ELEMENTS))  # eV: energy of an element

    def atomic_energies(self, batch: Batch, positions: Tensor) -> Tensor:
        """[A] in eV, differentiable in positions [A, 3]."""
        r = gather(positions, batch.neighbour) - positions[:, None] + batch.image  # [A, N, 3]
        r = torch.where(batch.real[..., None], r, self.cutoff)  # padding: anywhere but at 0
        distance = r.norm(dim=-1, keepdim=True)
        near = smooth_step(distance.squeeze(-1), self.cutoff, self.tail) * batch.real
        weight = torch.cat([torch.ones_like(near[:, :1]), near], 1)  # the atom itself comes first
        direction = torch.cat([torch.zeros_like(r[:, :1]), r / distance], 1)
        spacing = self.centres[1] - self.centres[0]
        lengths = torch.exp(-0.5 * ((distance - self.centres) / spacing) ** 2)
        h, energies = self.species(batch.numbers), self.offset[batch.numbers]
        for one in self.rounds:
            x = one(h, batch.neighbour, lengths, direction, weight)
            energies = energies + (weight * self.energy(x).squeeze(-1)).sum(1)
            h = x[:, 0]
        return energies

    def forward(self, batch: Batch, positions: Tensor) -> Tensor:
        """Energies [B] of the structures, in eV."""
        energies = self.atomic_energies(batch, positions)
        return energies.new_zeros(len(batch.energy)).index_add(0, batch.owner, energies)

    def energies_and_forces(self, batch: Batch, training: bool = False) -> tuple[Tensor, Tensor]:
        """Energies [B] and forces -dE/dx [A, 3], which for training can be differentiated again."""
        positions = batch.positions.detach().requires_grad_()
        energies = self(batch, positions)
        (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=training)
        return energies, -slope
