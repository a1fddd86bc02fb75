"""A search in a kernel's machine code for reads of uniform registers that nothing before them has written.

ptxas 12.8, which comes with Triton 3.6, loses the base of a shared-memory descriptor in some kernels for Hopper.
wgmma then reads at the address of some other number, which gives a wrong result or an illegal address, in some calls.
A fault that shows in one call is found here for all: `check` examines every Triton kernel that it has compiled, tests
examine those that they compile, and tools/kernels/undefined_registers.py examines files.

A register counts as written if any path from the kernel's start writes it: a finding is undefined on every path.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_FUNCTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_\w+|\S+?)\)")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_BARRIER = re.compile(r"^(B\d+)\b")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")  # nothing follows, unless they are predicated


def tool(name: str) -> str:
    """The path of cuobjdump or nvdisasm: from the CUDA toolkit, or from Triton's package."""
    found = shutil.which(name)
    if found is None:
        spec = importlib.util.find_spec("triton")
        if spec and spec.submodule_search_locations:
            path = Path(spec.submodule_search_locations[0], "backends/nvidia/bin", name)
            found = str(path) if path.is_file() else None
    if found is None:
        raise FileNotFoundError(f"no {name} here: install the CUDA toolkit, or Triton")
    return found


class UndefinedRead(NamedTuple):
    kernel: str
    offset: str
    instruction: str
    register: str


@dataclass
class Instruction:
    offset: str
    text: str
    reads: int  # a bit for each uniform register
    writes: int
    next: list[int] = field(default_factory=list)


def bits(first: int, count: int = 1) -> int:
    return ((1 << count) - 1) << first


def registers_of(opcode: str, operands: str) -> tuple[int, int]:
    """Uniform registers that an instruction reads and writes, as bits. Of a group only the named register counts as
    read."""
    parts = [part.strip() for part in operands.split(",")]
    writes = 0
    if opcode == "ELECT":  # a predicate first, then the lane
        parts = parts[1:]
    if match := re.fullmatch(r"UR(\d+)", parts[0]):
        wide = opcode.split(".")
        count = 4 if "128" in wide else 2 if "64" in wide or "WIDE" in wide else 1
        writes = bits(int(match[1]), count)
        parts = parts[1:]
    reads = 0
    for number in _UNIFORM.findall(", ".join(p for p in parts if not p.startswith("gdesc"))):
        reads |= bits(int(number))
    if opcode.startswith("HGMMA") and (at := re.search(r"gdesc\[UR(\d+)\]", operands)):
        # Four registers: the descriptor of A, unless A is in registers, then that of B.
        before = operands[: at.start()].split(",")
        first = 2 if len(before) > 2 else 0
        reads |= bits(int(at[1]) + first, 4 - first)
    return reads, writes


def flow(lines: list[str]) -> list[Instruction]:
    """The instructions of one kernel, each with its possible successors."""
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    jumps: list[tuple[str | None, str, str]] = []
    for line in lines:
        if match := _LABEL.match(line):
            labels[match[1]] = len(found)
        elif match := _INSTRUCTION.match(line):
            offset, predicate, opcode, operands = match.groups()
            found.append(Instruction(offset, f"{opcode} {operands}", *registers_of(opcode, operands)))
            jumps.append((predicate, opcode, operands))
    regions: dict[str, set[int]] = defaultdict(set)  # the place where the threads of a barrier meet
    calls = [i + 1 for i, (_, opcode, _) in enumerate(jumps) if opcode.startswith("CALL")]
    for _, opcode, operands in jumps:
        if opcode.startswith("BSSY") and (barrier := _BARRIER.match(operands)):
            regions[barrier[1]] |= {labels[t] for t in _TARGET.findall(operands) if t in labels}
    for i, (predicate, opcode, operands) in enumerate(jumps):
        name = opcode.split(".")[0]
        after: set[int] = set()
        if name in ("BRA", "CALL", "JMP"):
            after |= {labels[t] for t in _TARGET.findall(operands) if t in labels}
        elif name in ("BRX", "JMX"):
            after |= set(labels.values())
        elif name == "RET":
            after |= set(calls)
        elif name == "BSYNC" and (barrier := _BARRIER.match(operands)):
            after |= regions[barrier[1]]
        whole = predicate is None and not (name == "BRA" and operands.count(",") > 0)
        if not (whole and (name in _ENDS or name in ("BRA", "JMP"))):
            after.add(i + 1)
        found[i].next = [n for n in sorted(after) if n < len(found)]
    return found


def undefined_reads(kernel: str, code: list[Instruction]) -> list[UndefinedRead]:
    """Reads of uniform registers that no path has written."""
    if not code:
        return []
    before: list[int | None] = [None] * len(code)
    before[0] = 0
    waiting = [0]
    while waiting:
        i = waiting.pop()
        written = (before[i] or 0) | code[i].writes
        for n in code[i].next:
            have = before[n]
            if have is None or written & ~have:
                before[n] = (have or 0) | written
                waiting.append(n)
    findings = []
    for instruction, have in zip(code, before, strict=True):
        if have is None:  # never reached
            continue
        missing = instruction.reads & ~have & bits(0, 63)
        while missing:
            number = (missing & -missing).bit_length() - 1
            findings.append(UndefinedRead(kernel, instruction.offset, instruction.text, f"UR{number}"))
            missing &= missing - 1
    return findings


def kernels(sass: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of the kernels in the output of `nvdisasm -c`."""
    name = ""
    lines: list[str] = []
    for line in sass.splitlines():
        if match := _FUNCTION.match(line):
            if name:
                yield name, lines
            name, lines = match[1], []
        else:
            lines.append(line)
    if name:
        yield name, lines


def undefined_in(cubin: bytes | Path) -> list[UndefinedRead]:
    """All findings in one cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        if isinstance(cubin, bytes):
            file.write(cubin)
            file.flush()
        path = file.name if isinstance(cubin, bytes) else str(cubin)
        done = subprocess.run([tool("nvdisasm"), "-c", path], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed for {path}: {done.stderr.strip()}")
    return [f for name, lines in kernels(done.stdout) for f in undefined_reads(name, flow(lines))]


def triton_cubins() -> dict[str, bytes]:
    """Every kernel of ours that Triton has compiled or loaded in this process, by its hash."""
    found: dict[str, bytes] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("flashsci.backends.triton"):
            for function in vars(module).values():
                caches: dict[Any, Any] = getattr(function, "device_caches", {})
                for compiled, *_ in list(caches.values()):
                    found |= {k.hash: k.asm["cubin"] for k in compiled.values() if "cubin" in k.asm}
    return found
