"""examples/local_energy.py is right: against Hessians by torch.func in float64, with its gradient, and by kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, vmap

import flashsci

ELECTRONS, WALKERS = 4, 3


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "examples"))
    import local_energy

    return local_energy


def made(example, dtype):
    ansatz = example.Ansatz(ELECTRONS, width=16, heads=2, layers=2, frequency=0.8).double()
    for parameter in ansatz.parameters():  # biases and norms that are not those of a new layer
        parameter.data += 0.1 * torch.randn_like(parameter)
    return ansatz.to(dtype), torch.randn(WALKERS, ELECTRONS, 3, dtype=torch.float64).to(dtype)


def by_hessian(example, ansatz, positions, parameters=None, hessian=hessian):
    """The same energy with derivatives by torch.func, walker by walker: over a batch, or differentiated once more, forward mode
    through slogdet gives other numbers in torch 2.13."""
    parameters = dict(ansatz.named_parameters()) if parameters is None else parameters

    def log_psi(x):
        return functional_call(ansatz, parameters, (x,))

    def kinetic(x):
        curvature = hessian(log_psi)(x).reshape(3 * ELECTRONS, 3 * ELECTRONS).trace()
        return -(curvature + grad(log_psi)(x).square().sum()) / 2

    return torch.stack([kinetic(x) for x in positions]) + example.potential(positions, ansatz.frequency)


def test_every_part_of_a_jet(example):
    ansatz, positions = made(example, torch.float64)
    found = ansatz(example.coordinates(positions))
    torch.testing.assert_close(found.value, ansatz(positions))
    torch.testing.assert_close(found.jacobian.T.reshape(positions.shape), vmap(grad(ansatz))(positions))
    torch.testing.assert_close(example.local_energy(ansatz, positions), by_hessian(example, ansatz, positions))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_in_fp32(example, backend):
    """Its error is at most twice that of torch.func in fp32, and roundings of the terms that cancel."""
    if backend == "triton":
        pytest.importorskip("triton")
    ansatz, positions = made(example, torch.float32)
    with torch.no_grad(), flashsci.use_backend(backend):
        found = example.local_energy(ansatz, positions)
        jet = ansatz(example.coordinates(positions))
    plain = by_hessian(example, ansatz, positions)
    exact = by_hessian(example, ansatz.double(), positions.double())
    terms = jet.laplacian.abs() + jet.jacobian.square().sum(0) + example.potential(positions, ansatz.frequency)
    allowed = 2 * (plain - exact).abs().max() + 8 * torch.finfo(torch.float32).eps * terms.max()
    assert ((found - exact).abs() <= allowed).all(), ((found - exact).abs().max(), allowed)


def test_gradient_by_parameters(example):
    ansatz, positions = made(example, torch.float64)
    parameters = {name: x.detach().requires_grad_() for name, x in ansatz.named_parameters()}
    energy = by_hessian(example, ansatz, positions, parameters, lambda function: jacrev(jacrev(function))).sum()
    due = torch.autograd.grad(energy, list(parameters.values()))
    found = torch.autograd.grad(example.local_energy(ansatz, positions).sum(), list(ansatz.parameters()))
    for x, y in zip(found, due, strict=True):  # that of a key's bias is 0
        torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-7)


def test_a_separable_state(example):
    """One electron whose orbital is constant is in the ground state of the trap: 3/2 of the frequency, everywhere."""
    ansatz = example.Ansatz(1, width=16, heads=2, layers=1, frequency=0.8).double()
    torch.nn.init.zeros_(ansatz.orbitals.weight)
    energies = example.local_energy(ansatz, torch.randn(5, 1, 3, dtype=torch.float64))
    torch.testing.assert_close(energies, torch.full_like(energies, 1.2))
