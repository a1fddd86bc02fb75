"""The figures of a device by which predicted times scale: processors, clock, bandwidth, products of its tensor cores."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).parent


class Device(NamedTuple):
    """The figures of one GPU, as its maker gives them."""

    name: str
    processors: int
    clock: float  # MHz
    bandwidth: float  # GB/s
    tensor: int  # floating-point operations of 16-bit products, per clock and processor

    @property
    def products(self) -> float:
        """Floating-point operations of 16-bit products in a microsecond."""
        return self.processors * self.clock * self.tensor

    @property
    def lanes(self) -> float:
        """Operations of single lanes in a microsecond: 128 lanes for each processor."""
        return self.processors * self.clock * 128

    @property
    def bytes(self) -> float:
        """Bytes from or to memory in a microsecond."""
        return self.bandwidth * 1e3


@functools.cache
def known() -> tuple[tuple[tuple[int, int], Device], ...]:
    """The devices of devices.json with their compute capabilities; the first of a capability stands for it."""
    listed = json.loads((FOLDER / "devices.json").read_text())["devices"]
    return tuple(
        ((one["capability"][0], one["capability"][1]), Device(*(one[f] for f in Device._fields))) for one in listed
    )


def find(capability: tuple[int, int], name: str = "") -> Device | None:
    """The device of this name, else the one that stands for its compute capability, else None."""
    same = [device for cc, device in known() if cc == capability]
    return next((device for device in same if device.name in name), same[0] if same else None)


@functools.cache
def here(capability: tuple[int, int]) -> Device | None:
    """The first GPU of this machine with a compute capability; without one, the device that stands for it."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.get_device_capability(index) == capability:
                there = torch.cuda.get_device_properties(index)
                found = find(capability, there.name)
                return None if found is None else found._replace(processors=there.multi_processor_count)
    return find(capability)
