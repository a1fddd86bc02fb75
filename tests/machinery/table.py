"""All cells, and how soon each is run: always, among the slow tests, or in a full run alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import batches, compilers, derivatives, execution, graphs  # noqa: F401  (they fill the table)
from .cells import MACHINERIES, Call, Machinery
from .entries import CONTROL, ENTRIES
from .outcomes import Outcome

ALWAYS, SLOW, FULL = "always", "slow", "full"
FAMILIES = ("derivatives", "batches", "graph", "compilers", "execution")
# Cheap, and each on a way of its own through autograd: run on the interpreted kernels, too, for all but a call's later tensors.
CORE = (
    "call", "reverse", "jvp", "dual", "reverse over reverse", "forward over reverse", "vmap", "is_grads_batched",
    "saved tensors transposed", "meta tensors", "DTensor",
)  # fmt: skip
# Of other cells on a CPU: one in so many always, and of traced ones one in so many more among the slow tests.
INTERPRETED, AUTO, TRACED, TRACED_SLOWLY = 40, 4, 60, 6


@dataclass(frozen=True)
class Cell:
    call: Call
    machinery: Machinery

    def __str__(self) -> str:
        return f"{self.call.name}-{self.call.row}-{self.machinery.name}-{self.call.backend}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.call.name, self.call.row, self.machinery.name, self.call.backend

    def outcome(self) -> Outcome:
        return self.machinery.outcome(self.call)

    @property
    def when(self) -> str:
        """A fixed sample: of every tensor and of every machinery some."""
        draw = zlib.crc32(str(self).encode())
        call, machinery = self.call, self.machinery
        if machinery.seconds:
            rare = max(1, round((machinery.seconds / compilers.SECONDS) ** 0.5))
            if draw % (TRACED * rare**4) == 0:
                return ALWAYS
            whole = call.name == "attention" and call.row == "q" and call.backend in ("triton", "auto")
            return SLOW if whole or draw % (TRACED_SLOWLY * rare) == 0 else FULL
        if call.device != "cpu":
            return ALWAYS
        if call.backend == "triton":
            core = machinery.name in CORE and call.row not in call.entry.needed[1:]
            return ALWAYS if core or draw % INTERPRETED == 0 else SLOW
        alone = call.backend != "auto" or len(call.entry.backends) == 1
        return ALWAYS if alone or machinery.name in CORE or draw % AUTO == 0 else SLOW


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


OWN = [entry for entry in ENTRIES.values() if entry.name != CONTROL]


def cells(on: str | None = None) -> Iterator[Cell]:
    """Of every function, tensor, machinery and backend; the cuda backend where there is a GPU."""
    on = on or device()
    for entry in OWN:
        for row in entry.rows:
            for machinery in (m for m in MACHINERIES.values() if m.fits(entry, row, on)):
                for backend in entry.backends:
                    if on != "cpu" or backend != "cuda":
                        yield Cell(Call(entry.name, row, backend, on), machinery)
