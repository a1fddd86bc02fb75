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


def squares(jacobian: Tensor) -> Tensor:
    """The sum of the squares of the derivatives, without a tensor of them."""
    return torch.linalg.vector_norm(jacobian, dim=0).square()


def pointwise(x: T, function: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> T:
    """A function of each number, given with its first two derivatives."""
    if not isinstance(x, Jet):
        return function(x)[0]
    value, first, second = function(x.value)
    return Jet(value, first * x.jacobian, first * x.laplacian + second * squares(x.jacobian))


def tanh(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.tanh(x)
    slope = 1 - y * y
    return y, slope, -2 * y * slope


def power(x: Tensor, exponent: float) -> tuple[Tensor, Tensor, Tensor]:
    return x**exponent, exponent * x ** (exponent - 1), exponent * (exponent - 1) * x ** (exponent - 2)


def layer_norm(x: T, layer: nn.LayerNorm) -> T:
    """y = (x - mean x) r with r = (var x + eps)^-1/2, times a weight. Along coordinate i its derivative is
    r (x_i - m_i - y a_i) with m_i = mean x_i and a_i = mean (y x_i), so that the Jacobian is read few times."""
    mean = lambda t: t.mean(-1, keepdim=True)  # noqa: E731
    value = x.value if isinstance(x, Jet) else x
    centred = value - mean(value)
    r = (mean(centred.square()) + layer.eps).rsqrt()
    y = centred * r
    if not isinstance(x, Jet):
        return y * layer.weight + layer.bias
    width = value.shape[-1]
    m, a = mean(x.jacobian), torch.einsum("n...d,...d->n...", x.jacobian, y / width).unsqueeze(-1)
    jacobian = torch.addcmul(x.jacobian - m, a, y, value=-1) * (r * layer.weight)
    moved = torch.einsum("n...d,n...->...d", x.jacobian, a.squeeze(-1)) - (a * m).sum(0)  # sum_i a_i (x_i - m_i)
    spread = mean(squares(x.jacobian)) - m.square().sum(0)  # sum_i var x_i
    bend = x.laplacian - mean(x.laplacian)
    factor = 3 * a.square().sum(0) - mean(centred * bend) - spread
    laplacian = (r * bend + r * r * (y * factor - 2 * moved)) * layer.weight
    return Jet(y * layer.weight + layer.bias, jacobian, laplacian)


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
        square = linear(multiply(positions, positions), lambda t: t.sum(-1, keepdim=True))
        radius = pointwise(shift(square, 1.0), lambda t: power(t, 0.5))  # smooth at 0
        x = shift(dense(concatenate(positions, radius), self.embedding), self.spin[self.spins])
        for layer in self.layers:
            x = layer(x)
        found = log_determinant(dense(x, self.orbitals))
        return add(found, linear(square, lambda t: -self.frequency / 2 * t.sum((-1, -2))))


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


def local_energy(ansatz: Ansatz, positions: Tensor, at_once: int = 64) -> Tensor:
    """H psi / psi = -(L log |psi| + |grad log |psi||^2) / 2 + V for each walker: positions [walkers, N, 3]. Memory is that of
    ``at_once`` walkers, each with 3 N derivatives of every activation."""

    def kinetic(part: Tensor) -> Tensor:
        found = ansatz(coordinates(part))
        return -(found.laplacian + squares(found.jacobian)) / 2

    return torch.cat([kinetic(part) for part in positions.split(at_once)]) + potential(positions, ansatz.frequency)


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
