"""The client code: its source, and the import of its model files without the packages' other dependencies.

Releases from PyPI, unchanged. Their declared dependencies cannot be installed together (esm wants torch 2.11,
protenix 2.7.1), and their models need almost none of them: `get` leaves only the packages in a folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "clients"  # where `make models` puts them
VARIABLE = "FLASHSCI_CLIENTS"

#: The downloads, and the package in each that is kept.
RELEASES = {
    "boltz==2.2.1": "boltz",
    "einops==0.8.2": "einops",
    "esm==3.4.1.post1": "esm",
    "metatrain==2026.4.1": "metatrain",
    "protenix==2.0.0": "protenix",
    "tabpfn==9.2.0": "tabpfn",
    "unimol-tools==0.1.6": "unimol_tools",
}

#: Packages that import far more than their models need (trainers, readers, servers): entered without
#: running their `__init__`.
SHELLS = (
    "esm.models.esmc",
    "metatrain.pet",
    "tabpfn",
    "tabpfn.architectures",
    "tabpfn.preprocessing",
    "tabpfn.preprocessing.torch",
    "unimol_tools",
    "unimol_tools.models",
)

#: Names that model files import at their top and the steps measured here never use, or use as stand-ins here;
#: provided if the module cannot be imported, while a model's file is imported.
PLACEHOLDERS: dict[str, dict[str, object]] = {
    "metatensor.torch": {"Labels": object},  # in annotations
    "metatomic.torch": {"NeighborListOptions": object, "System": object},  # in annotations
    "metatrain.pet.documentation": {"ModelHypers": dict},  # an annotation
    "optree": {},  # for chunks of rows, unused here
    "pydantic.dataclasses": {"dataclass": dataclasses.dataclass},  # configurations, not validated
}


class Unavailable(Exception):
    """The client's code is not on this machine; the message says what is missing and how to get it."""


def get(folder: Path) -> list[Path]:
    """Download the releases (8 MB) and unpack their packages into a folder; returns the folder's packages.

    Run where PyPI can be reached; the folder can then be carried to a machine that cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        # esm asks for Python 3.12; its model files run on older ones.
        options = "--quiet --no-deps --only-binary=:all: --python-version 3.12 --dest"
        command = [sys.executable, "-m", "pip", "download", *options.split(), wheels, *RELEASES]
        subprocess.run(command, check=True)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    top = name.split("/")[0]
                    if top in RELEASES.values() or top.endswith(".dist-info"):
                        archive.extract(name, folder)
    return sorted(folder.iterdir())


def prepare(folder: Path | str | None = None) -> None:
    """Make client packages importable: those installed, then those in a folder (default: the variable
    FLASHSCI_CLIENTS, or build/clients)."""
    path = str(folder or os.environ.get(VARIABLE) or FOLDER)
    if path not in sys.path:
        sys.path.append(path)
        importlib.invalidate_caches()
    for name in SHELLS:
        parent = name.rpartition(".")[0]
        if name not in sys.modules and (not parent or _found(parent)):
            spec = importlib.util.find_spec(name)
            if spec is not None:
                _install(name, importlib.util.module_from_spec(spec))


def _found(name: str) -> bool:
    parent = name.rpartition(".")[0]
    if name in sys.modules or (parent and not _found(parent)):
        return name in sys.modules
    return importlib.util.find_spec(name) is not None


@contextmanager
def placeholders() -> Iterator[None]:
    """Inside, the missing modules of PLACEHOLDERS can be imported; afterwards only modules that imported them
    still have them."""
    before = dict(sys.modules)
    added: list[str] = []
    for name, members in PLACEHOLDERS.items():
        top = name.partition(".")[0]
        if top in RELEASES.values() and not _found(top):
            continue  # the client itself is not here
        try:
            importlib.import_module(name)
        except ImportError:
            parent = name.rpartition(".")[0]
            if parent and sys.modules.get(parent) is None:
                package = types.ModuleType(parent)
                package.__path__ = []
                added.append(parent)
                _install(parent, package)
            module = types.ModuleType(name, "A placeholder: see tools/models/clients.py.")
            vars(module).update(members)
            added.append(name)
            _install(name, module)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]


def _install(name: str, module: types.ModuleType) -> None:
    parent, _, child = name.rpartition(".")
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], child, module)
