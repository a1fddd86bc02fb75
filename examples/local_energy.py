"""The local energy of electrons in a harmonic trap, by the forward-Laplacian rule through a whole Psiformer-like network.

    python examples/local_energy.py                            # small, on a CPU; 42 electrons and 256 walkers on a GPU
    python examples/local_energy.py --electrons 14 --walkers 64

The kinetic energy of a wavefunction needs the sum of its second derivatives by all 3 N coordinates. A :class:`Jet` carries
an intermediate value, its Jacobian by the coordinates and its Laplacian through the network. Each operation has a small
rule here; attention has :func:`flashsci.forward_laplacian`. The network is written once: it maps tensors to tensors, and
jets to jets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashsci


class Jet(NamedTuple):
    """A value that depends on n coordinates, with its first derivatives and the sum of its second ones."""

    value: Tensor
    jacobian: Tensor  # [n, *value.shape]
    laplacian: Tensor  # [*value.shape]


T = TypeVar("T", Tensor, Jet)


def linear(x: T, function: Callable[[Tensor], Tensor]) -> T:
    """A linear function of the last dims."""
    return Jet(*map(function, x)) if isinstance(x, Jet) else function(x)


def add(x: T, y: T) -> T:
    return Jet(*(a + b for a, b in zip(x, y, strict=True))) if isinstance(x, Jet) else x + y


def shift(x: T, constant: Tensor | float) -> T:
    return x._replace(value=x.value + constant) if isinstance(x, Jet) else x + constant


def concatenate(x: T, y: T) -> T:
    """Along the last dim."""
    if not isinstance(x, Jet):
        return torch.cat((x, y), -1)
    return Jet(*(torch.cat(both, -1) for both in zip(x, y, strict=True)))


def multiply(x: T, y: T) -> T:
    """x y, elementwise."""
    if not isinstance(x, Jet):
        return x * y
    return Jet(
        x.value * y.value,
        x.jacobian * y.value + x.value * y.jacobian,
        x.laplacian * y.value + x.value * y.laplacian + 2 * (x.jacobian * y.jacobian).sum(0),
    )


def pointwise(x: T, function: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> T:
    """A function of each number, given with its first two derivatives."""
    if not isinstance(x, Jet):
        return function(x)[0]
    value, first, second = function(x.value)
    return Jet(value, first * x.jacobian, first * x.laplacian + second * x.jacobian.square().sum(0))


def tanh(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.tanh(x)
    slope = 1 - y * y
    return y, slope, -2 * y * slope


def power(x: Tensor, exponent: float) -> tuple[Tensor, Tensor, Tensor]:
    return x**exponent, exponent * x ** (exponent - 1), exponent * (exponent - 1) * x ** (exponent - 2)


def layer_norm(x: T, layer: nn.LayerNorm) -> T:
    centred = linear(x, lambda t: t - t.mean(-1, keepdim=True))
    variance = linear(multiply(centred, centred), lambda t: t.mean(-1, keepdim=True))
    inverse = pointwise(shift(variance, layer.eps), lambda t: power(t, -0.5))
    return shift(linear(multiply(centred, inverse), lambda t: t * layer.weight), layer.bias)


def dense(x: T, layer: nn.Linear) -> T:
    return shift(linear(x, lambda t: F.linear(t, layer.weight)), layer.bias)


def attention(q: T, k: T, v: T) -> T:
    if isinstance(q, Jet):
        jacobians = dict(q_jacobian=q.jacobian, k_jacobian=k.jacobian, v_jacobian=v.jacobian)
        laplacians = dict(q_laplacian=q.laplacian, k_laplacian=k.laplacian, v_laplacian=v.laplacian)
        return Jet(*flashsci.forward_laplacian(q.value, k.value, v.value, **jacobians, **laplacians))
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def log_determinant(x: T) -> T:
    """log |det x| of matrices [*, N, N]."""
    if not isinstance(x, Jet):
        return torch.linalg.slogdet(x).logabsdet
    value = torch.linalg.slogdet(x.value).logabsdet
    inverse = torch.linalg.inv(x.value)
    products = inverse @ x.jacobian
    squares = (products * products.mT).sum((0, -1, -2))  # sum_i tr (x^-1 d_i x)^2
    jacobian = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    return Jet(value, jacobian, (inverse.mT * x.laplacian).sum((-1, -2)) - squares)


class Layer(nn.Module):
    """Attention between electrons, then a layer of tanh for each."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out, self.mlp = (nn.Linear(width, width) for _ in range(5))

    def forward(self, x: T) -> T:
        y = layer_norm(x, self.before_attention)
        q, k, v = (
            linear(dense(y, layer), lambda t: t.unflatten(-1, (self.heads, -1)).transpose(-2, -3))
            for layer in (self.query, self.key, self.value)
        )
        found = linear(attention(q, k, v), lambda t: t.transpose(-2, -3).flatten(-2))
        x = add(x, dense(found, self.out))
        return add(x, pointwise(dense(layer_norm(x, self.before_mlp), self.mlp), tanh))


class Ansatz(nn.Module):
    """log |psi| of N electrons: log |det| of orbitals that see all electrons, and a Gaussian of the trap's frequency."""

    def __init__(self, electrons: int, width: int = 256, heads: int = 4, layers: int = 4, frequency: float = 1.0):
        super().__init__()
        self.frequency = frequency
        self.embedding = nn.Linear(4, width)
        self.spin = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.orbitals = nn.Linear(width, electrons)
        self.register_buffer("spins", torch.arange(electrons) % 2)

    def forward(self, positions: T) -> T:
        """[*, N, 3] -> [*]."""
        squares = linear(multiply(positions, positions), lambda t: t.sum(-1, keepdim=True))
        radius = pointwise(shift(squares, 1.0), lambda t: power(t, 0.5))  # smooth at 0
        x = shift(dense(concatenate(positions, radius), self.embedding), self.spin[self.spins])
        for layer in self.layers:
            x = layer(x)
        found = log_determinant(dense(x, self.orbitals))
        return add(found, linear(squares, lambda t: -self.frequency / 2 * t.sum((-1, -2))))


def coordinates(positions: Tensor) -> Jet:
    """The jet of the coordinates themselves: positions [*, N, 3], n = 3 N."""
    n = positions.shape[-2] * 3
    directions = torch.eye(n, dtype=positions.dtype, device=positions.device)
    shape = n, *(1,) * (positions.dim() - 2), *positions.shape[-2:]
    jacobian = directions.view(shape).expand(n, *positions.shape)
    return Jet(positions, jacobian, torch.zeros_like(positions))


def potential(positions: Tensor, frequency: float) -> Tensor:
    """The energy of the trap and of the repulsion between electrons, in Hartree."""
    trap = frequency**2 / 2 * positions.square().sum((-1, -2))
    i, j = torch.triu_indices(positions.shape[-2], positions.shape[-2], 1, device=positions.device)
    return trap + (positions[..., i, :] - positions[..., j, :]).norm(dim=-1).reciprocal().sum(-1)


def local_energy(ansatz: Ansatz, positions: Tensor) -> Tensor:
    """H psi / psi = -(L log |psi| + |grad log |psi||^2) / 2 + V for each walker: positions [walkers, N, 3]."""
    found = ansatz(coordinates(positions))
    kinetic = -(found.laplacian + found.jacobian.square().sum(0)) / 2
    return kinetic + potential(positions, ansatz.frequency)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--electrons", type=int, default=42 if on_gpu else 6)
    parser.add_argument("--walkers", type=int, default=256 if on_gpu else 16)
    parser.add_argument("--width", type=int, default=256 if on_gpu else 64)
    parser.add_argument("--layers", type=int, default=4 if on_gpu else 2)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    ansatz = Ansatz(given.electrons, given.width, layers=given.layers).to(given.device)
    positions = torch.randn(given.walkers, given.electrons, 3, device=given.device)
    with torch.no_grad():
        for attempt in ("first", "second"):  # the first call compiles kernels
            start = time.perf_counter()
            energies = local_energy(ansatz, positions)
            mean, error = energies.mean().item(), (energies.std() / len(energies) ** 0.5).item()
            print(f"{attempt}: local energy {mean:.3f} +- {error:.3f} Hartree, {time.perf_counter() - start:.3f} s")


if __name__ == "__main__":
    main()
