"""A check before a long run: is there a GPU, does its driver answer, is it free? Exits with 1 and the reason if not.

Each answer is one line. Standard library only, any Python: nothing is installed yet when this runs (`make sweep`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

FIELDS = {
    "GPU": "name",
    "compute capability": "compute_cap",
    "driver": "driver_version",
    "memory, MiB": "memory.total",
    "in use, MiB": "memory.used",
    "load, %": "utilization.gpu",
    "temperature, C": "temperature.gpu",
    "SM clock, MHz": "clocks.sm",
    "highest, MHz": "clocks.max.sm",
}
MOST_IN_USE = 2048  # MiB; a driver and a display take less
MOST_LOAD = 10  # %


def ask(device: str) -> dict[str, str]:
    """The answers of nvidia-smi for one GPU, by FIELDS; OSError with the reason if it does not answer."""
    if not shutil.which("nvidia-smi"):
        raise OSError("no NVIDIA driver on this machine (nvidia-smi is not on the PATH)")
    query = ["nvidia-smi", "-i", device, f"--query-gpu={','.join(FIELDS.values())}"]
    command = [*query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired as error:
        raise OSError("the NVIDIA driver does not answer (nvidia-smi took 30 s)") from error
    said = (done.stdout.strip() or done.stderr.strip()).splitlines() or ["nothing"]
    if done.returncode or not done.stdout.strip():
        raise OSError(f"the NVIDIA driver does not work: nvidia-smi said: {said[-1]}")
    return dict(zip(FIELDS, (value.strip() for value in said[0].split(",")), strict=True))


def objection(found: dict[str, str]) -> str | None:
    """The reason why figures measured now would not be worth much, or None."""
    limits = {"in use, MiB": MOST_IN_USE, "load, %": MOST_LOAD}
    for what, most in limits.items():
        if found[what].isdigit() and int(found[what]) > most:
            return f"the GPU is not free: {what.replace(',', ' in')} is {found[what]}, more than {most}"
    return None


def main() -> int:
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    try:
        found = ask(device)
    except OSError as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 1
    for what, value in found.items():
        print(f"{what:<20}{value}")
    nvcc = shutil.which("nvcc")
    print(f"{'nvcc':<20}{nvcc or 'none: CUDA kernels must be built already'}")
    problem = objection(found)
    if problem:
        print(f"preflight: {problem}", file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
