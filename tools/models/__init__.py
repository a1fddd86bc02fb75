"""Whole models, with client code from PyPI and random weights: as they are, and with their attention on flashsci.

    python -m tools.models get build/clients      # once, where PyPI can be reached
    python -m flashsci models pet boltz --json out.json

Each model is a file here with `build(size, dtype, device) -> list[Step]`, its `SIZES` and `DTYPES`, and the
patch that sends its attention through flashsci.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tools.bench.cases import BenchError
from tools.models import clients
from tools.models.clients import Unavailable

#: Every model, by its file.
MODELS = ("pet", "boltz", "protenix", "unimol", "esmc", "tabpfn", "vit", "swin")

__all__ = ["MODELS", "Unavailable", "load"]


def load(name: str) -> ModuleType:
    """The file of a model, with its client's code.

    Raises:
        BenchError: no such model.
        Unavailable: its client's code is not on this machine.

    >>> load("gpt")
    Traceback (most recent call last):
    tools.bench.cases.BenchError: no model named 'gpt'; there are pet, boltz, protenix, unimol, esmc, tabpfn, vit, swin
    """
    if name not in MODELS:
        raise BenchError(f"no model named {name!r}; there are {', '.join(MODELS)}")
    module = f"tools.models.{name}"
    if module in sys.modules:
        return sys.modules[module]
    clients.prepare()
    try:
        with clients.placeholders():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith(("tools", "flashsci")):
            raise
        ours = missing.split(".")[0] in clients.RELEASES.values()
        how = f"python -m tools.models get {clients.FOLDER}" if ours else f"pip install {missing}"
        raise Unavailable(f"{missing} is not installed; to get it: {how}") from error
