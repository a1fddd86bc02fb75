"""The interface of a model's file: steps, each in two ways, the client's and with attention on flashsci."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """A model, and a function that takes one step with it and returns what is to be compared: tensors of many numbers,
    for the rounding of a single one (a loss, a total energy) is luck."""

    model: nn.Module
    step: Callable[[], Results]
    patched: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self) -> Results:
        self.model.zero_grad(set_to_none=True)
        with self.patched():
            return self.step()

    def compiled(self) -> Way:
        """The same under default `torch.compile`: parts that it cannot trace, such as the engine's backward,
        run as before. One way at a time: nothing tells the compiler of another patch."""
        torch.compiler.reset()
        return replace(self, step=torch.compile(self.step))

    def results(self) -> Results:
        """The results of one step; with the gradients of the parameters, as one vector, if it has any."""
        found = {name: x.detach() for name, x in self().items()}
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        if gradients:
            found["parameter gradients"] = torch.cat(gradients)
        return found


@dataclass(frozen=True)
class Step:
    """One thing that users do with a client: a training step, energies with forces, inference."""

    id: str
    about: str  # sizes and kind, for people
    path: str  # the backend of the client's own attention
    client: Way
    ours: Way

    @staticmethod
    def of(
        id: str,
        about: str,
        path: str,
        model: nn.Module,
        step: Callable[[], Results],
        patched: Callable[[], AbstractContextManager[Any]],
    ) -> Step:
        """A step of one model, which a patch sends through flashsci."""
        return Step(id, about, path, Way(model, step), Way(model, step, patched))


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes (owner, name, value) to another value inside."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def double_stays() -> AbstractContextManager[None]:
    """Make `Tensor.float()` leave float64 alone inside: clients that raise a half to float32 with it must not
    lower their own float64."""
    plain = torch.Tensor.float

    def raised(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return self if self.dtype == torch.float64 else plain(self, *arguments, **options)

    return replaced((torch.Tensor, "float", raised))


def mixed(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast for a dtype of 16 bits; nothing otherwise."""
    return torch.autocast(device.type, dtype) if dtype.itemsize == 2 else nullcontext()


def master(dtype: torch.dtype) -> torch.dtype:
    """The dtype of parameters under `mixed`."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def randomised(model: nn.Module) -> nn.Module:
    """The model with random weights throughout: zeros, with which many clients begin, hide errors behind them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def counted(count: int, thing: str) -> str:
    """
    >>> counted(1, "layer"), counted(8192, "atom")
    ('1 layer', '8,192 atoms')
    """
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def drawn(seed: int = 1) -> Callable[..., Tensor]:
    """randn with its own generator, on the CPU: the same inputs on every device and in every dtype."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return randn


@cache
def _target(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return drawn(5)(width).to(device, dtype)


def loss(*tensors: Tensor) -> Tensor:
    """Squared distances from a random vector, the same for every row, in float32 or better. (The plain mean
    square of a layer norm's output is constant: its gradients would be rounding errors.)"""
    total = torch.zeros((), device=tensors[0].device)
    for x in tensors:
        x = x if x.dtype == torch.float64 else x.float()
        total = total + (x - _target(x.shape[-1], x.dtype, x.device)).square().mean()
    return total
