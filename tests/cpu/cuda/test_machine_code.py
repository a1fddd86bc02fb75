"""Machine code in which a uniform register is read that nothing has written."""

import os
import subprocess
import sys

import pytest

from flashsci.check import machine_code, workers
from flashsci.check.machine_code import UndefinedRead, flow, kernels, undefined_reads
from flashsci.check.tally import Tally
from flashsci.testing import Case, Variant

# As `nvdisasm -c` prints it: a loop, a branch over the descriptor's first half, wgmma with A in registers.
FINE = """
.text.some_kernel:
        /*0000*/                   ULDC UR4, c[0x0][0x210] ;
        /*0010*/                   ELECT P0, UR62, PT ;
        /*0020*/                   MOV R0, UR62 ;
        /*0030*/              @P1 BRA `(.L_x_1) ;
        /*0040*/                   UIADD3 UR6, UP0, UR4, 0x40, URZ ;
        /*0050*/                   ULDC.64 UR8, c[0x0][0x218] ;
.L_x_1:
        /*0060*/                   UIADD3 UR7, UR6, UR9, URZ ;
        /*0070*/                   HGMMA.64x32x16.F32.BF16 R56, R24, gdesc[UR4].tnspB, R56 ;
        /*0080*/              @!P1 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_2:
        /*00a0*/                   BRA `(.L_x_2);
"""


def findings(sass):
    return [f for name, lines in kernels(sass) for f in undefined_reads(name, flow(lines))]


def test_what_some_path_writes_is_defined():
    assert findings(FINE) == []


@pytest.mark.parametrize(
    ("line", "register"),
    [
        ("ULDC UR4, c[0x0][0x210]", "UR4"),  # every later read of it
        ("UIADD3 UR6, UP0, UR4, 0x40, URZ", "UR6"),  # the descriptor of B is UR6 and UR7
        ("ULDC.64 UR8, c[0x0][0x218]", "UR9"),  # the second half of a pair
    ],
)
def test_what_no_path_writes_is_found(line, register):
    found = findings(FINE.replace(line, "NOP"))
    assert {f.register for f in found} == {register}
    assert all(f.kernel == "some_kernel" for f in found)


def test_descriptors_take_their_registers():
    """In registers, A has no descriptor, and the first two of the four registers are not read."""
    both = FINE.replace("R24, gdesc", "gdesc")
    assert {f.register for f in findings(both)} == {"UR5"}


def test_a_kernel_with_such_a_read_fails_its_cases(monkeypatch):
    """Once, in the process that compiled it."""
    found = [UndefinedRead("paged_kernel", "20a0", "UIADD3 UR20, UP0, UR20, 0x40, URZ", "UR20")]
    monkeypatch.setattr(machine_code, "triton_cubins", lambda: {"hash": b"cubin"})
    monkeypatch.setattr(machine_code, "undefined_in", lambda cubin: found)
    monkeypatch.setattr(workers, "_seen", set())
    (problem,) = workers.undefined_reads()
    assert problem.startswith("paged_kernel reads UR20, which nothing has written: UIADD3")
    assert workers.undefined_reads() == []
    monkeypatch.setattr(machine_code, "triton_cubins", dict)
    assert workers.undefined_reads() == ["Triton kernels ran, and none of their machine code was found"]


def test_cases_without_queries_or_keys_owe_no_machine_code(monkeypatch):
    """A worker whose first cases are all empty has launched nothing yet."""
    judged = Tally()
    judged.cases = 1
    asked = []
    monkeypatch.setattr(workers.judging, "judge_case", lambda *_: {"triton": judged})
    monkeypatch.setattr(workers, "undefined_reads", lambda: asked.append(True) or [])
    packed = Variant(varlen=True)
    nothing = [
        Case(Variant(), seq_q=0, seq_k=3),
        Case(Variant(), lead=(0,), seq_q=2, seq_k=3),
        Case(packed, rank=3, lead=(), lens_q=(0, 0), lens_k=(3, 0)),
    ]
    workers.work(("cases", nothing, ("triton",), "cuda", 1))
    assert not asked
    for case in (
        Case(Variant(), seq_q=2, seq_k=3),
        Case(packed, rank=3, lead=(), lens_q=(2, 0), lens_k=(0, 3)),
    ):
        workers.work(("cases", [*nothing, case], ("triton",), "cuda", 1))
    assert len(asked) == 2


# A kernel of ours with what Triton keeps of it: for each device (compiled kernels by key, ...).
COMPILED = """
from importlib import import_module
from types import SimpleNamespace
from flashsci.check import machine_code
forward = import_module("flashsci.backends.triton.kernels.forward")
assert machine_code.triton_cubins() == {}
kernel = SimpleNamespace(hash="of the kernel", asm={"cubin": b"code", "ptx": ""})
forward.forward_kernel.device_caches[0] = ({"key": kernel}, {}, None, None, None)
assert machine_code.triton_cubins() == {"of the kernel": b"code"}
"""


def test_what_a_process_has_compiled_is_found():
    pytest.importorskip("triton")
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
