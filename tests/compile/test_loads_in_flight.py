"""Hopper's kernels free nothing that a load from shared memory may still read (tools/kernels/loads_in_flight.py)."""

from __future__ import annotations

import pytest

from flashsci.backends import cuda
from tools.kernels.loads_in_flight import InFlight, in_flight, kernels, search

# So many arrivals of a kernel may pass loads, which hold what another barrier frees, or what no fence.proxy.async delays.
HARMLESS = {
    "sm903fwd14forward_kernel": (8, "K and Q are free, which wgmma has read, while words of a bias are on their way"),
    "sm9012triangle_fwd": (1, "a bias that is not read is free, while q is on its way"),
    "14BackwardTiling": (
        2,
        "the record of a tile, which the loading warp alone writes, is on its way while that warp expects operands",
    ),
    "D256BackwardTiling": (3, "the same; and dS of a block is free, which wgmma has read, while delta is on its way"),
    "paged12paged_kernel": (5, "without a fence.proxy.async"),
    "sm904pair4half": (2, "its fences come after the loads of a block"),
    "sm903fp8": (
        1,
        "scales in one tiling: the record of a tile has been read, and used, since the fence of the tile before",
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(cuda.library_path() is None, reason="flashsci/_C.so was not built")
def test_no_load_is_in_flight_at_an_arrival():
    if "90" not in (cuda.build_info() or {"archs": []})["archs"]:
        pytest.skip("a build without sm_90a kernels")
    found: dict[str, list[InFlight]] = {}
    for finding in search(cuda.library_path()):
        found.setdefault(finding.kernel, []).append(finding)
    for kernel, findings in found.items():
        allowed = max((count for part, (count, _) in HARMLESS.items() if part in kernel), default=0)
        assert len(findings) <= allowed, "\n".join(map(str, findings))


def listed(*lines: tuple[str, int, int]) -> list[str]:
    """A listing of (instruction, scoreboards that it waits for, its own scoreboard)."""
    text = ["\t\tFunction : some_kernel"]
    for n, (instruction, waits, scoreboard) in enumerate(lines):
        text.append(f"        /*{n * 16:04x}*/                   {instruction} ;   /* 0x0000000000000000 */")
        text.append(f"                                              /* 0x{waits << 52 | scoreboard << 46:016x} */")
    return text


LOAD, ARRIVE = ("LDSM.16.M88.4 R8, [R2]", 0, 1), ("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", 0, 7)
USE = ("FADD R1, R8, R9", 1 << 1, 7)


@pytest.mark.parametrize(
    ("lines", "arrivals"),
    [
        ([LOAD, ARRIVE, USE], 1),
        ([LOAD, USE, ARRIVE], 0),
        ([LOAD, ("NOP", 1 << 2, 7), ARRIVE], 1),  # waits for another scoreboard
        ([LOAD, (ARRIVE[0], 1 << 1, 7)], 0),
        ([ARRIVE, LOAD, ("@P1 BRA 0x0", 0, 7), USE], 1),  # around a loop
        ([LOAD, ("@P1 BRA 0x30", 0, 7), USE, ARRIVE], 1),  # past the wait
        ([LOAD, ("BRA 0x30", 0, 7), ARRIVE, USE, ("EXIT", 0, 7)], 0),
        ([("LDG.E R8, [R2]", 0, 1), ARRIVE], 0),
    ],
)
def test_the_search(lines, arrivals):
    ((name, code),) = kernels(listed(*lines))
    assert len(in_flight(name, code)) == arrivals
