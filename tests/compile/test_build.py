"""What the compiler makes of the CUDA sources: symbols per architecture, instructions, registers. Needs nvcc, no GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashsci import digest
from flashsci.backends import cuda as backend
from flashsci.backends.cuda import prepared
from tests.support.cpp_functions import functions, loops
from tools.bench import page_loads

ROOT = Path(__file__).resolve().parents[2]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
needs_library = pytest.mark.skipif(backend.library_path() is None, reason="flashsci/_C.so was not built")


def load_resources():
    spec = importlib.util.spec_from_file_location("resources", ROOT / "tools" / "kernels" / "resources.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["resources"] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def hardly_optimised() -> dict[str, str]:
    """For tests that ask for names only: a third of the time, or two thirds by an nvcc that has no fast-compile. (-O0 takes longer.)"""
    options = subprocess.run(["nvcc", "--help"], capture_output=True, text=True).stdout
    fast = "--Ofast-compile" in options
    return {"NVCC_APPEND_FLAGS": "--Ofast-compile max" if fast else "-Xcicc -O1 -Xptxas -O1"}


def build_manual(folder: Path, archs: str, **environment: str) -> Path:
    output = folder / "_C.so"
    result = subprocess.run(
        ["bash", str(ROOT / "tools" / "kernels" / "build_manual.sh"), str(output)],
        env=os.environ | hardly_optimised() | {"FA_ARCHS": archs, "PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stderr
    return output


def exported(library: Path) -> set[str]:
    text = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in text.splitlines() if line}


def cuobjdump(*flags: str) -> str:
    """What it prints of the library."""
    try:
        import triton
    except ImportError:
        tool = shutil.which("cuobjdump")
    else:
        found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        tool = str(found) if found.is_file() else shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump (Triton carries one)")
    command = [tool, *flags, str(backend.library_path())]
    return subprocess.run(command, capture_output=True, text=True).stdout


def sass(arch: str, kernel: str) -> list[str]:
    """The machine code of each kernel whose mangled name contains ``kernel``, its name first. Only theirs is disassembled:
    all of it takes minutes."""
    symbols = cuobjdump("-symbols", "-arch", arch).splitlines()
    names = {line.split()[-1] for line in symbols if "STO_ENTRY" in line and kernel in line}
    listing = cuobjdump("-sass", "-arch", arch, "-fun", ",".join(sorted(names)))
    return re.split(r"Function : ", listing)[1:]


def build_cmake(folder: Path, archs: str) -> Path:
    for command in (
        ["-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}"],
        ["--build", str(folder), "-j2"],
    ):
        result = subprocess.run(
            ["cmake", *command],
            env=os.environ | hardly_optimised() | {"FA_ARCHS": archs},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert result.returncode == 0, result.stdout + result.stderr
    return folder / "_C.so"


@needs_nvcc
@pytest.mark.slow
def test_debug_build_compiles_and_says_what_it_is(tmp_path):
    """FLASHSCI_POISON: the same kernels and names; digests that match no tree."""
    library = build_manual(tmp_path, "75", FLASHSCI_POISON="1")
    assert {s for s in exported(library) if "forward_sm75_fp16" in s}
    info = re.search(rb'"cuda/sm75/fwd_fp16": "(\w+-poison)"', library.read_bytes())
    assert info is not None
    assert info[1].decode() == digest.units(ROOT)["cuda/sm75/fwd_fp16"] + "-poison"


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("build", [build_manual, build_cmake])
def test_turing_build_has_no_bf16(build, tmp_path):
    """Nothing of bf16 may be in a library for Turing alone under any name, and nothing of other generations."""
    library = build(tmp_path, "75")
    listings = [
        subprocess.run(["nm", *flags, str(library)], capture_output=True, text=True).stdout
        for flags in (["-a"], ["-D"])
    ]
    # torch's own number for the dtype is imported by the argument checks.
    names = [
        n
        for n in "".join(listings).split()
        if n != "aoti_torch_dtype_bfloat16"
        and not n.startswith("libcudart_static_")  # a hash
        and not re.fullmatch("[0-9a-f]{16}", n)  # an address
    ]
    assert not [n for n in names if "bf16" in n.lower() or "bfloat16" in n.lower()]
    kernels = {s for s in exported(library) if re.match("flashsci_(forward|backward)_", s)}
    assert kernels and all("_sm75_fp16" in s for s in kernels), kernels
    about = {"flashsci_build_info", "flashsci_driver_problem"}
    assert exported(library) - kernels == about | set(prepared.PARAMETERS)
    code = (
        f"import torch, json; torch.ops.load_library({str(library)!r});"
        "info = json.loads(torch.ops.flashsci.build_info());"
        "assert info['archs'] == ['75'] and info['units'], info;"
        "assert all(u.startswith('cuda/sm75/') and u.endswith('_fp16') for u in info['units']), info"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@needs_nvcc
@needs_library
@pytest.mark.slow
def test_manual_build_is_the_same_library(tmp_path):
    info = backend.build_info()
    preset = {"t4_safe": "0", "ampere_balanced": "1"}.get(info["tile_preset"], "")
    # Two architectures have every unit: those of sm_80 are compiled for sm_90, too.
    archs = ["75", "90"] if {"75", "90"} <= set(info["archs"]) else info["archs"]
    library = build_manual(tmp_path, ",".join(archs), FA_TILE_PRESET=preset)
    assert exported(library) == exported(backend.library_path())
    assert (tmp_path / "forward_runner").exists() == any(int(a) >= 80 for a in info["archs"])


@needs_nvcc
def test_objects_depend_on_the_digest_of_their_sources(tmp_path):
    """And not only on the headers that the compiler names, which a build had lost: its library carried the digests of new sources
    and kernels of old ones, and was judged in their place."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cmake, ninja = (shutil.which(name, path=folders) for name in ("cmake", "ninja"))
    assert cmake and ninja
    given = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
    }
    given |= {"SKBUILD_PROJECT_NAME": "flashsci", "SKBUILD_PROJECT_VERSION": digest.VERSION}
    command = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(tmp_path)]
    command += [f"-D{name}={value}" for name, value in given.items()]
    environment = os.environ | {"FA_ARCHS": "75,80,90"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    objects = re.findall(
        r"^build CMakeFiles/(\w+)\.dir/csrc/sm\S+\.o: .*? \| (\S+) ", (tmp_path / "build.ninja").read_text(), re.M
    )
    units = {unit.removeprefix("cuda/").replace("/", "_") for unit in digest.cuda_units(ROOT)}
    assert dict(objects) == {unit: f"generated/digests/{unit}" for unit in units}


@needs_nvcc
def test_the_benchmark_of_loads_compiles(tmp_path):
    """And its patterns fit: copies fill a stage, by threads that there are, and lie within a page."""
    assert page_loads.library(tmp_path / "page_loads.so").read_pages
    for place, patterns in page_loads.PATTERNS.items():
        layout = place(21)
        for name, (by, pattern) in patterns.items():
            rows = page_loads.STAGE // (layout.lines * pattern.heads * page_loads.LINE)
            copy = pattern.lines * pattern.copy_heads * pattern.rows * page_loads.LINE
            assert page_loads.STAGE % copy == 0 and rows % pattern.rows == 0, name
            assert by == "pieces" or page_loads.STAGE // copy <= page_loads.LOADERS, name
            assert layout.page_rows % pattern.rows == layout.heads % pattern.heads == 0, name


@needs_library
def test_sass_is_tensor_core_code():
    """mma, ldmatrix and cp.async reached the machine code of every sm_80 and newer cubin, and no fp64 did."""
    archs = [int(a) for a in backend.build_info()["archs"] if int(a) >= 80]
    if not archs:
        pytest.skip("a build without sm_80 kernels")
    forward = sass(f"sm_{archs[-1]}", "_ZN8flashsci4sm803fwd14forward_kernel")
    assert len(forward) >= 2 * 6
    for text in forward:
        name = text.split("\n", 1)[0]
        dtype = "BF16" if "BFloat16" in name else "F32"
        assert re.search(rf"HMMA\.16816\.F32(\.{dtype})?", text), name
        assert "LDSM.16.M88.4" in text and "LDSM.16.MT88.4" in text, name
        assert "LDGSTS" in text, name
        assert "DFMA" not in text and "DMUL" not in text, name
    of_paged = [a for a in archs if a not in (90, 120, 121) or archs[0] == a]  # cmake/left_out.txt
    paged = sass(f"sm_{of_paged[-1]}", "sm805paged12paged_kernel")
    assert len(paged) == 2 * 3 * 3  # dtypes, head dims, what a cache holds
    for text in paged:
        name = text.split("\n", 1)[0]
        assert "HMMA.16816" in text and "LDGSTS" in text, name
        assert not re.search(r"\b(LDL|STL)\b", text), f"{name} uses local memory"


@needs_library
def test_turing_sass_is_tensor_core_code():
    """The kernels of sm_75 multiply with HMMA.1688, read with ldmatrix, and carry PTX for newer devices."""
    if "75" not in (backend.build_info() or {"archs": []})["archs"]:
        pytest.skip("a build without sm_75 kernels")
    forward = sass("sm_75", "sm753fwd14forward_kernel")
    assert len(forward) >= 4 * 6
    for text in forward:
        name = text.split("\n", 1)[0]
        assert "HMMA.1688.F32" in text and "HMMA.16816" not in text, name
        assert "LDSM.16.M88.4" in text and "LDSM.16.MT88.4" in text, name
        assert "DFMA" not in text and "DMUL" not in text, name
    assert "sm_75" in cuobjdump("-lptx")


@needs_library
@pytest.mark.slow
def test_hopper_sass_uses_wgmma_and_tma():
    """Every sm90 main loop multiplies with HGMMA, is fed by UTMALDG and stores by UTMASTG; HMMA is for the rare block, and for paged
    decoding, which fills no HGMMA; no local memory up to D 128."""
    if "90" not in (backend.build_info() or {"archs": []})["archs"]:
        pytest.skip("a build without sm_90a kernels")
    forward = sass("sm_90a", "sm903fwd14forward_kernel")
    assert len(forward) >= 2 * 3
    for text in forward:
        name = text.split("\n", 1)[0]
        assert "HGMMA.64x" in text and "UTMALDG.5D" in text and "UTMASTG.5D" in text, name
        assert text.count("HMMA.16816") <= 16, name
        if "TilingILi256" not in name:
            assert not re.search(r"\b(LDL|STL)\b", text), f"{name} uses local memory"
    triangle = sass("sm_90a", "sm9012triangle_fwd23triangle_forward_kernel")
    assert len(triangle) == 2 * 2
    for text in triangle:
        name = text.split("\n", 1)[0]
        assert "UTMALDG.5D" in text and "UTMASTG.5D" in text and "HMMA.16816" not in text, name
        assert 2 * text.count("WARPGROUP.DEPBAR") < text.count("HGMMA.64x"), name
        assert not re.search(r"\b(LDL|STL)\b", text), f"{name} uses local memory"
    eight_bits = sass("sm_90a", "sm903fp818fp8_forward_kernel")
    assert len(eight_bits) >= 2 * 4
    for text in eight_bits:
        name = text.split("\n", 1)[0]
        assert "QGMMA.64x" in text and "HGMMA" not in text and "UTMALDG.5D" in text, name
        assert "LDSM.16.MT88.4" in text and "STSM.16.M88.4" in text and "UTMASTG.5D" in text, name
        dim, fast, packed = re.search(r"TilingILi(\d+)E.*ELb([01])EEELb([01])E", name).groups()
        variant = ("", "fast ")[int(fast)] + ("dense", "packed")[int(packed)]
        if ("sm90/fp8_e4m3", dim, variant) not in SPILLS:
            assert not re.search(r"\b(LDL|STL)\b", text), f"{name} uses local memory"
        assert text.count("WARPGROUP.DEPBAR") < text.count("QGMMA.64x"), name
    decoding = sass("sm_90a", "sm906decode13decode_kernel")
    assert decoding and all("HGMMA.64x" in f and "UTMALDG.5D" in f for f in decoding)
    paged = sass("sm_90a", "sm905paged12paged_kernel")
    assert len(paged) == 2 * (3 * 3 + 1)  # dtypes, head dims, what a cache holds; joined rows
    for text in paged:
        name = text.split("\n", 1)[0]
        assert "HMMA.16816" in text and "UTMALDG.5D" in text, name
        assert not re.search(r"\b(LDL|STL)\b", text), f"{name} uses local memory"
    backward = sass("sm_90a", "sm903bwd15backward_kernel")
    assert len(backward) >= 2 * 4 * 4
    for text in backward:
        name = text.split("\n", 1)[0]
        assert "UTMALDG.5D" in text and "UTMASTG.5D" in text and "UBLKRED" in text, name
        # Serialised products wait for each other: one wait for each HGMMA.
        assert 2 * text.count("WARPGROUP.DEPBAR") < text.count("HGMMA.64x"), name


@pytest.mark.parametrize("source", sorted(ROOT.glob("csrc/sm*/*/fp16.cu")), ids=str)
def test_fp16_unit_sees_no_bf16_header(source):
    for path in digest.cpp_sources([source]):
        text = path.read_text(encoding="utf-8")
        assert "#include <cuda_bf16.h>" not in text and "bf16" not in path.name, path


def test_ptx_is_written_in_its_folder_only():
    for path in (ROOT / "csrc").rglob("*.cu*"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if path.parent.name != "ptx":
            # An empty asm is a compiler barrier, not PTX.
            found = [n for n in lines if re.search(r'\basm\b.*\(\s*"[^"]', n)]
            assert not found, f"{path}: {found}"


def test_functions_are_short():
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".cuh", ".cu", ".h", ".cpp") and "tests" not in path.parts:
            name = path.relative_to(ROOT / "csrc").as_posix()
            for function, lines in functions(path.read_text(encoding="utf-8")):
                assert lines <= 120, f"{name}: {function} has {lines} lines"


def test_loops_are_short():
    """Steps have names: a loop is read without scrolling."""
    for path in (ROOT / "csrc").rglob("*.cu*"):
        for line, lines in loops(path.read_text(encoding="utf-8")):
            assert lines <= 60, f"{path.relative_to(ROOT)}:{line}: a loop of {lines} lines"


def test_functions_are_found():
    source = """
    namespace a { template <class T> struct B { int f() const { if (x) { return 1; } return 2; } }; }
    __global__ void __launch_bounds__(C::kThreads, 1)
        kernel(const Args a) {
      const auto lambda = [&] { };  // }
    }
    """
    assert functions(source) == [("f", 1), ("kernel", 4)]


def test_loops_are_found():
    source = """
    for (int i = 0; i < n; ++i) a[i] = 0;  // while (x) {
    while (one(x) &&
           other(x)) {
      for (;;) {
        break;
      }
    }
    """
    assert loops(source) == [(3, 6), (5, 3)]


# (unit, head dim, variant): bytes. Keys and queries share a launch, and the registers of the larger. Products of 8 bits that are
# 4 registers wider, for sums of P, gain more than what they spill.
SPILLS = {
    ("sm90/fp8_e4m3", "64", "dense"): 32,
    ("sm90/fp8_e4m3", "128", "dense"): 32,
    ("sm90/fp8_e4m3", "128", "packed"): 24,
    ("sm90/fp8_e4m3", "256", "fast dense"): 80,  # of the warps that load and transpose, which have 24 registers
    ("sm90/fp8_e4m3", "256", "fast packed"): 40,
    **{  # once a tile, of the warp that loads
        (f"sm90/bwd_{dtype}", dim, variant): 8
        for dtype in ("bf16", "fp16")
        for dim in ("192", "256")
        for variant in ("dense", "softcap", "v 128", "v 128 softcap")
    },
    **{(f"sm90/bwd_{dtype}", "128", "bias or mask softcap"): 84 for dtype in ("bf16", "fp16")},
    **{(f"sm80/bwd_{dtype}", "64", "backward queries"): 44 for dtype in ("bf16", "fp16")},
    **{  # of sm_80 alone
        (f"sm80/fwd_{dtype}", "96", f"{rows} rows, any bias or mask"): 20
        for dtype in ("bf16", "fp16")
        for rows in ("any", "16-byte")
    },
    ("sm90/pair_fp32", "32", "backward"): 120,
    ("sm90/pair_bf16", "32", "backward"): 64,
    ("sm90/pair_fp16", "32", "backward"): 64,
}
# Of units without a loop over rows: what they spill they spill once, and took longer with fewer warps and more registers.
STRAIGHT = {"sm80/small_bf16": 128, "sm80/small_fp16": 128, "sm80/small_fp32": 400}


def test_resource_table_is_current_and_nothing_spills():
    resources = load_resources()
    digests, rows = resources.read_table(resources.TABLE.read_text(encoding="utf-8"))
    assert digests == digest.cuda_units(ROOT), "run: python tools/kernels/resources.py --write"
    assert {f"cuda/{r['unit']}" for r in rows} == set(digests)
    for row in rows:
        # Both stage counts are in the binary; which one a device runs depends on its shared memory.
        clean = int(row["head dim"]) <= 128 or row["unit"].startswith("sm90")
        if clean and row["runs on"] != "none":
            place = row["unit"], row["head dim"], row["variant"]
            allowed = SPILLS.get(place, STRAIGHT.get(row["unit"], 0))
            assert int(row["spill bytes"]) <= allowed, row
        assert int(row["registers"]) <= 255


def test_every_device_has_a_kernel_that_fits():
    """What a device runs asks for no more shared memory than it gives a block (8.6: 99 KiB, 8.0: 163, 9.0: 227), and every
    kind of kernel has one for every device at every head dim: larger tiles have a smaller brother. Refused are gradients in fp32
    of wide heads, where a block has less than 227 KiB."""
    resources = load_resources()
    _, rows = resources.read_table(resources.TABLE.read_text(encoding="utf-8"))
    served = {}
    for row in rows:
        devices = set(row["runs on"].split(", ")) - {"none"}
        for device in devices:
            _, most = resources.SHARED_KIB[int(row["sm"])][device]
            assert float(row["shared KiB"]) <= most, row
        kind = row["variant"]
        if row["unit"].startswith(("sm80/bwd_fp16", "sm80/bwd_bf16")):
            # Where the tile of plain calls does not fit, they run as calls with a bias or a mask.
            kind = kind.replace("backward, plain 16-byte rows", "backward bias mask")
        key = row["unit"], row["sm"], row["head dim"], kind
        served[key] = served.get(key, set()) | devices
    for (unit, sm, dim, kind), devices in served.items():
        if unit == "sm80/bwd_fp32" and int(dim) > 128:  # gradients of wide heads are Triton's there
            devices |= {"8.0", "8.6"}
        missing = set(resources.SHARED_KIB[int(sm)]) - devices
        assert not missing, f"{unit} for sm_{sm}, head dim {dim}, {kind}: none for {missing}"
    assert any(row["runs on"] == "8.6" for row in rows), "the smaller brothers"


def test_resource_parser():
    resources = load_resources()
    log = (
        "ptxas info    : Compiling entry function '_ZN1aITilingILi64ELi128ELi128ELi4ELi2ELi2EEELb1EEv' for 'sm_90'\n"
        "ptxas info    : Function properties for x\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size\n"
    )
    (kernel,) = resources.parse("unit.cu", log)
    assert (kernel.arch, kernel.registers, kernel.spill_stores, kernel.spill_loads) == (
        90,
        168,
        8,
        12,
    )
    assert kernel.tiling == (64, 128, 128, 4, 2, 2, 1)
    assert kernel.shared == 80 * 1024


def test_a_report_holds_for_units_of_the_same_code():
    """One whose sources changed and whose code did not keeps what a GPU has shown; one whose code changed does not."""
    resources = load_resources()

    def table(**units):
        return "".join(f"- cuda/{u}: `{d}`, code `{c}`\n" for u, (d, c) in units.items())

    before = table(a=("a1", "x"), b=("b1", "y"), c=("c1", "z"), d=("d1", "w"))
    after = table(a=("a2", "x"), b=("b2", "Y"), c=("c1", "z"), d=("d2", "w"))
    units = {"cuda/a": "a1", "cuda/b": "b1", "cuda/c": "c1", "cuda/d": "d0", "triton/t": "t"}
    report = {
        "units": dict(units),
        "judged": dict(units),
        "library": dict(units),
        "parts": {"sm80": {"units": {"cuda/a": "a1"}, "library": {"cuda/a": "a1"}}},
    }
    assert resources.carry(report, before, after) == ["cuda/a"]  # d was not checked as it was
    assert report["units"] == report["judged"] == report["library"] == {**units, "cuda/a": "a2"}
    assert report["parts"]["sm80"]["units"] == {"cuda/a": "a2"}
    assert report["carried"] == {"cuda/a": "a1"}
