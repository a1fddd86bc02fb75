"""Loads from shared memory that are in flight when their warp arrives at an mbarrier, found in machine code.

    python tools/kernels/loads_in_flight.py LIBRARY_OR_OBJECT [PART_OF_A_KERNEL'S_NAME]

Whoever waits for the arrival may overwrite what such a load still has to read. A fence.proxy.async before both delays the
load, but not the arrival: an output of the copy engine then reaches shared memory first. A load has returned once an
instruction has waited for its scoreboard, which the control bits of the encoding tell.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "flashsci" / "check"))
from machine_code import tool  # noqa: E402  (as a script: importing the package would need torch)

_FUNCTION = re.compile(r"Function : (\S+)")
_CODE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_CONTROL = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_NONE = 7  # the scoreboard of an instruction that has none


@dataclass
class Instruction:
    """One instruction: its address, the scoreboards (bits) it waits for, and the one that its result clears."""

    address: int
    opcode: str
    operands: str
    conditional: bool
    waits: int = 0
    scoreboard: int = _NONE

    def __str__(self) -> str:
        return f"{self.address:#x} {self.opcode} {self.operands}"


@dataclass(frozen=True)
class InFlight:
    """An arrival, and the loads that it does not wait for."""

    kernel: str
    arrival: str
    loads: tuple[str, ...]


def kernels(sass: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """(mangled name, instructions) of the kernels in the output of `cuobjdump -sass`."""
    name, code = "", []
    for line in sass:
        if match := _FUNCTION.search(line):
            if name:
                yield name, code
            name, code = match[1], []
        elif match := _CODE.match(line):
            address, predicate, opcode, operands = match.groups()
            code.append(Instruction(int(address, 16), opcode, operands, predicate is not None))
        elif code and (match := _CONTROL.match(line)):
            control = int(match[1], 16)
            code[-1].waits, code[-1].scoreboard = control >> 52 & 0x3F, control >> 46 & 7
    if name:
        yield name, code


def _next(code: list[Instruction], i: int, places: dict[int, int]) -> list[int]:
    instruction = code[i]
    after = [i + 1] if i + 1 < len(code) else []
    if instruction.opcode.startswith("BRA"):
        target = _TARGET.search(instruction.operands)
        assert target, instruction
        # A predicate may also stand among the operands.
        whole = not instruction.conditional and "," not in instruction.operands
        return [places[int(target[1], 16)], *([] if whole else after)]
    return [] if instruction.opcode == "EXIT" and not instruction.conditional else after


def in_flight(kernel: str, code: list[Instruction]) -> list[InFlight]:
    """The arrivals of a kernel that some path reaches with a load from shared memory in flight."""
    places = {instruction.address: i for i, instruction in enumerate(code)}
    before: dict[int, frozenset[int]] = {}  # for each instruction, the loads that may be in flight
    found: dict[int, frozenset[int]] = {}
    waiting: list[tuple[int, frozenset[int]]] = [(0, frozenset())]
    while waiting:
        i, loads = waiting.pop()
        have = before.get(i)
        if have is not None and loads <= have:
            continue
        before[i] = loads if have is None else loads | have
        instruction = code[i]
        loads = frozenset(n for n in before[i] if not instruction.waits >> code[n].scoreboard & 1)
        if instruction.opcode.startswith("SYNCS.ARRIVE") and loads:
            found[i] = loads
        if instruction.opcode.startswith(("LDS", "LDSM")) and instruction.scoreboard != _NONE:
            loads |= {i}
        waiting += [(n, loads) for n in _next(code, i, places)]
    return [InFlight(kernel, str(code[i]), tuple(str(code[n]) for n in sorted(found[i]))) for i in sorted(found)]


def search(file: Path, part: str = "", arch: str = "sm_90a") -> list[InFlight]:
    """All findings in the kernels of a library or object file whose mangled name contains ``part``."""
    symbols = subprocess.run([tool("cuobjdump"), "-symbols", "-arch", arch, str(file)], capture_output=True, text=True)
    names = sorted({line.split()[-1] for line in symbols.stdout.splitlines() if "STO_ENTRY" in line and part in line})
    if not names:
        raise ValueError(f"{file} has no kernel for {arch} whose name contains {part!r}")
    # All of a library are too many names for a command.
    only = ["-fun", ",".join(names)] if part else []
    command = [tool("cuobjdump"), "-sass", "-arch", arch, *only, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        return [finding for name, code in kernels(process.stdout) for finding in in_flight(name, code)]


def main(arguments: list[str]) -> int:
    found = search(Path(arguments[0]), *arguments[1:2])
    for finding in found:
        print(f"{finding.kernel}\n  {finding.arrival}\n    before: " + "\n            ".join(finding.loads))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
