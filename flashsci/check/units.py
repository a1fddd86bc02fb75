"""Kernel units and the backends that run them: the units of a check, and whether it would prove anything here."""

from __future__ import annotations

import torch

from flashsci import digest
from flashsci.choice.backends import BACKENDS

KERNELS = ("triton", "cuda")  # backends of our own
# Names for groups of units: the starts of their names.
GROUPS = {
    "second_order": (
        "triton/jvp",
        "triton/many_backward",
        "triton/many_double_backward",
        "triton/many_jvp",
        "triton/second_jvp",
        "triton/double_backward_",
        "triton/wide_double_backward",
    ),
    "paged": ("triton/paged", "cuda/sm90/paged", "cuda/sm80/paged"),
    "fp8": ("triton/fp8", "cuda/sm90/fp8_"),
    "residual": ("triton/residual",),
    "maps": ("triton/map_",),
}


def chosen_units(unit: str | None) -> dict[str, str]:
    """Digests of the units that ``unit`` names: one, all with that start, those of a group, or all."""
    starts = GROUPS.get(unit or "", (unit or "",))
    return {u: d for u, d in digest.units().items() if u.startswith(starts)}


def library_units() -> dict[str, str]:
    """Digests that the loaded CUDA library carries; empty without a library."""
    info = BACKENDS["cuda"].load().build_info()
    return {} if info is None else info["units"]


def kernels_here() -> tuple[str, ...]:
    """The backends with kernels of ours: as users get them, and every generation that runs here by itself."""
    folders = {unit.split("/")[1] for unit in library_units()}
    held = [f"cuda:{folder}" for folder in folders if folder.startswith("sm")]
    return (*KERNELS, *sorted((n for n in held if _runs_here(n)), reverse=True))


def _runs_here(backend: str) -> bool:
    """Whether this device runs a generation of kernels: Hopper's run on Hopper only, the others also on newer
    devices."""
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    wanted = int(backend.removeprefix("cuda:sm"))
    return major == 9 if wanted == 90 else 10 * major + minor >= wanted


def runs_group(group: str, device: str) -> bool:
    """Whether this device has the features that the kernels of a group need: 8-bit floats, for "fp8"."""
    return group != "fp8" or device != "cuda" or torch.cuda.get_device_capability() >= (8, 9)


def cuda_paged(device: str) -> tuple[str, ...]:
    """The backends that run CUDA's kernels of paged attention here: as users get them, and restricted to an older
    generation."""
    folders = {u.split("/")[1] for u in library_units() if u.startswith(GROUPS["paged"])}
    found = sorted((f"cuda:{f}" for f in folders if _runs_here(f"cuda:{f}")), reverse=True)
    return ("cuda", *found[1:]) if found and device == "cuda" else ()


def runs_cuda_fp8(device: str) -> bool:
    """Whether CUDA's kernel on 8-bit floats is in the library and runs here."""
    built = any(u.startswith(GROUPS["fp8"]) for u in library_units())
    return device == "cuda" and built and _runs_here("cuda:sm90")


def holds(backend: str, unit: str) -> bool:
    """Whether a backend, such as "cuda:sm80", runs a unit, such as "cuda/sm80/fwd_bf16"."""
    family, generation, *_ = unit.split("/")
    return backend in (family, f"{family}:{generation}")


def refusal(units: dict[str, str], device: str) -> str | None:
    """The reason why a check here would prove nothing about this tree; None if it would."""
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA GPU here; run this on a machine with one (python -m flashsci env)"
    for unit, found in library_units().items():
        if units.get(unit) not in (None, found):
            return (
                f"the loaded CUDA library was built from other sources ({unit}: {found}, tree: "
                f"{units[unit]}); build it again (make build) and repeat"
            )
    return None
