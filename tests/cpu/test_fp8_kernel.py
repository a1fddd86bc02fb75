"""The sm90 kernel on 8-bit floats, run on the host: its C++ with csrc/ptx replaced by sm90/emulation.h, from the launcher to the
stores, on generated calls and by the judge of every backend. What a GPU's barriers, copies and products do is emulated; its
speed, its registers and the 14 bits of its sums are not."""

from __future__ import annotations

import ctypes as c
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashsci import fp8_ops
from flashsci.testing import FP8Case, FP8Inputs, FP8Variant, generate_fp8, make_fp8_inputs
from scripts.launchers import NOT_SUPPORTED, ForwardParams, _fields, _pointer, _strides

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "sm90"
HEADERS = [Path(p) for p in ("/usr/local/cuda/include", *sorted(map(str, Path("/usr/local").glob("cuda-*/include"))))]  # fmt: skip
FAILED = 999


class Scales(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "data"),
        *_fields(c.c_int64, "batch0 batch1 head sequence block"),
        *_fields(c.c_int32, "shift slots"),
    ]


class Params(c.Structure):
    _fields_ = [
        *_fields(ForwardParams, "call"),
        *_fields(Scales, "q_scale k_scale v_scale"),
        *_fields(c.c_int32, "out_is_fp16"),
    ]


def includes() -> str:
    """Where cuda.h and cuda_runtime.h are."""
    nvcc = shutil.which("nvcc")
    beside = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    found = next((p for p in [*beside, *HEADERS] if (p / "cuda_runtime.h").is_file()), None)
    if found is None or shutil.which("g++") is None:
        pytest.skip("no g++, or no headers of the CUDA toolkit")
    return str(found)


def build(folder: Path, *changes: tuple[str, str, str]) -> c.CDLL:
    """The kernel as a library for the host. changes: (file of csrc/sm90/fp8, text, what it becomes), of one tile shape alone."""
    source = folder / "csrc"
    shutil.copytree(ROOT / "csrc", source)
    for path in (source / "ptx").glob("*.cuh"):
        path.write_text("#pragma once\n")
    for name, old, new in changes:
        path = source / "sm90" / "fp8" / name
        text = path.read_text()
        assert text.count(old) == 1, (name, old)
        path.write_text(text.replace(old, new))
    if changes:
        path = source / "sm90" / "fp8" / "launch.cuh"
        others = re.compile(r"\blaunch\(Tiles(?!64\{)\w+\{\}\)")
        path.write_text(others.sub("cudaErrorNotSupported", path.read_text()))
    launch = re.compile(r"(\w+)<<<(.*?), [^,]*>>>\(")
    for path in source.rglob("*.cuh"):
        path.write_text(launch.sub(r"emulation::launch(\1, \2, ", path.read_text()))
    target = folder / "fp8.so"
    kernel = source / "sm90" / "fp8" / "e4m3.cu"
    subprocess.run(
        [
            "g++", "-std=c++17", "-O2", "-w", "-U_FORTIFY_SOURCE", "-fPIC", "-shared", "-DFLASHSCI_POISON", "-isystem", includes(),
            "-include", HERE / "emulation.h", f'-DKERNEL="{kernel}"', HERE / "host.cpp", "-o", target,
        ],
        check=True,
    )  # fmt: skip
    return c.CDLL(str(target))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("fp8"))


def scales_of(scale: torch.Tensor | None, x: torch.Tensor, sequences: int) -> Scales:
    """As csrc/bindings/fp8.cpp describes them. x: [..., H, S, D]."""
    rows = fp8_ops.rows_per_scale(scale, x, sequences)
    assert rows is not None
    found = Scales(data=_pointer(scale), shift=rows.bit_length() - 1)
    if scale is None or scale.dim() == 0:
        return found
    if sequences >= 0:
        found.head, found.slots = scale.stride(1), rows != fp8_ops.WHOLE
        setattr(found, "block" if found.slots else "sequence", scale.stride(0))
        return found
    outer = list(scale.stride())
    if rows != fp8_ops.WHOLE:
        found.block = outer.pop()
    for name in ("head", "batch1", "batch0"):
        if outer:
            setattr(found, name, outer.pop())
    return found


def run(library: c.CDLL, inputs: FP8Inputs, seed: int = 0) -> dict[str, torch.Tensor] | None:
    """out and lse; None where the kernel leaves the call to others."""
    given = inputs.options
    edges = [given.get(f"cu_seqlens_{n}") for n in "qk"]
    packed = edges[0] is not None
    q, k, v = ((x.transpose(0, 1) if packed else x) for x in (inputs.q, inputs.k, inputs.v))
    sequences = len(edges[0]) - 1 if packed else -1
    left, right = given["window"] or (None, None)
    right = 0 if given["causal"] else right
    dtype = given["out_dtype"]
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=dtype)
    lse = torch.full(q.shape[:-1], torch.nan)
    lead = (1,) * (5 - q.dim()) + q.shape[:-3]
    workspace = torch.full((64,), 255, dtype=torch.uint8)
    call = ForwardParams(
        *map(_pointer, (q, k, v, out, lse, *edges)), *map(_strides, (q, k, v, out)), batch0=lead[0], batch1=lead[1],
        heads_q=q.shape[-3], heads_k=k.shape[-3], seq_q=q.shape[-2], seq_k=k.shape[-2], num_seqs=max(sequences, 0),
        max_seqlen_q=-1, head_dim=q.shape[-1], head_dim_v=v.shape[-1], scale=given["scale"] or q.shape[-1] ** -0.5,
        softcap=given["softcap"] or 0.0, window_left=-1 if left is None else left, window_right=-1 if right is None else right,
        lower_right=given["align"] == "lower_right", workspace=workspace.data_ptr(),
    )  # fmt: skip
    scales = (scales_of(given.get(f"{n}_scale"), x, sequences) for n, x in zip("qkv", (q, k, v), strict=True))  # fmt: skip
    params = Params(call, *scales, dtype == torch.float16)
    text = c.create_string_buffer(300)
    error = library.emulate(c.byref(params), seed, seed % 2, text, len(text))
    if error == NOT_SUPPORTED:
        return None
    assert error == 0, (error, text.value.decode())
    return {"out": out.transpose(0, 1) if packed else out, "lse": lse}


def judge(library: c.CDLL, case: FP8Case) -> bool:
    """Whether the kernel took a case; it must be right then."""
    inputs = make_fp8_inputs(case)
    found = run(library, inputs, case.seed)
    if found is None:
        return False
    problems = inputs.judge().problems(found)
    assert not problems, "\n".join([*problems, repr(case)])
    return True


TILES = ((64, 64), (128, 128), (192, 128), (256, 256))


@pytest.mark.parametrize("block", ("128", "64"))
@pytest.mark.parametrize("dims", TILES)
def test_every_tile(kernel, dims, block):
    """More keys than the ring has stages, rows of every consumer, a last block that is cut."""
    variant = FP8Variant("bfloat16", *dims, "causal")
    case = FP8Case(variant, 1, (300,), (650,), scales=(block, block, block), align="lower_right")
    assert judge(kernel, case)
    full = replace(case, variant=replace(variant, window="none"), seed=2, lens_q=(70,))
    assert judge(kernel, full)


@pytest.mark.parametrize("part", range(4))
def test_generated(kernel, part):
    """In 3 CTAs: each has several tiles. Rows that TMA cannot load are left to others, whatever else they are."""
    taken = 0
    for case in generate_fp8(300 + part, 16, longest=260):
        aligned = case.layout != "unaligned" and case.variant.head_dim % 16 == 0
        some = case.scores > 0
        if some and judge(kernel, case):
            taken += 1
        else:
            assert not (aligned and some and case.variant.head_dim_v % 16 == 0), case
    assert taken >= 3


def test_nan_of_another_sequence(kernel):
    """Stays there: of a neighbour's rows in the same block of keys the values are cut, the scores are hidden."""
    case = FP8Case(FP8Variant(packed=True), 6, (70, 40, 130), (100, 30, 150), heads_k=2, scales=("64", "head", "64"))  # fmt: skip
    inputs = make_fp8_inputs(case)
    wanted = run(kernel, inputs)
    inputs.judge().require(wanted)
    for x, (first, last) in ((inputs.q, (70, 110)), (inputs.k, (100, 130)), (inputs.v, (100, 130))):
        x.view(torch.uint8)[first:last] = 0x7F
    found = run(kernel, inputs, 1)
    for rows in (slice(0, 70), slice(110, 240)):
        assert torch.equal(found["out"][rows], wanted["out"][rows])
        assert torch.equal(found["lse"][:, rows], wanted["lse"][:, rows])
    assert found["out"][70:110].isnan().all()


FAULTS = {
    "V turned over a tile that is being read": ("transpose.cuh", "ptx::mbarrier_sleep(address(&shared.turned_empty[stage]), phase ^ 1);", ""),
    "V in another order than P": ("softmax.cuh", "s[e], s[e + 1], s[e + 4], s[e + 5]", "s[e], s[e + 1], s[e + 2], s[e + 3]"),
    "Q released before all have read the tile": ("kernel.cuh", "4 + (w == 0 ? 1 + C::kTransposers : 0)", "4"),
    "the scale of another block": ("load.cuh", "scale_of(a.v_scale, v, key)", "scale_of(a.v_scale, v, key + 128)"),
    "fewer bytes than arrive": ("load.cuh", "(v_full, sizeof(shared.v[0]));", "(v_full, sizeof(shared.v[0]) / 2);"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    broken = build(tmp_path, FAULTS[fault])
    variant = FP8Variant("bfloat16", 64, 64, "causal", packed=True)
    case = FP8Case(variant, 1, (100, 40, 200), (300, 77, 640), heads_k=2, scales=("128", "128", "128"), align="lower_right")  # fmt: skip
    found = 0
    for seed in range(2, 8):
        try:
            judge(broken, replace(case, seed=seed))
        except AssertionError:
            found += 1
    assert found
