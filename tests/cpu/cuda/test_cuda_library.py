"""The CUDA library where there is no GPU: it loads, says what it is, and refuses with reasons."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashsci
from flashsci import digest
from flashsci.backends import cuda as backend
from flashsci.call import ops
from flashsci.call.problem import Problem
from flashsci.choice import backends
from flashsci.choice.candidates import rejects

ROOT = Path(__file__).resolve().parents[3]
SCALARS = ops.Scalars(-1, -1, 1.0, 0.0, -1, -1, False, 0.0, "default", False)
PROBLEM = Problem(
    device_type="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    heads_q=4,
    heads_k=4,
    head_dim=64,
    head_dim_v=64,
    batch=(2,),
    seq_q=128,
    seq_k=128,
)
BUILD = {  # of everything
    "archs": ["75", "80", "90"],
    "units": {
        f"cuda/{folder}/{kind}_{dtype}": ""
        for folder, dtypes in (("sm75", "fp16"), ("sm80", "fp16 bf16 fp32"), ("sm90", "fp16 bf16"))
        for dtype in dtypes.split()
        for kind in ("fwd", "bwd")
    },
}
needs_library = pytest.mark.skipif(
    backend.library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)"
)


@pytest.fixture
def fresh_backend(monkeypatch):
    """The backend module as it is before its first use."""
    for name, value in (
        ("_loaded", False),
        ("_problem", None),
        ("_driver", None),
        ("_driver_asked", False),
        ("handle", None),
        ("ops", None),
    ):
        monkeypatch.setattr(backend.library, name, value)
    return backend


@needs_library
def test_loads_and_describes_itself():
    info = backend.build_info()
    assert info is not None, backend.library.load()
    assert info["version"] == digest.VERSION
    assert info["archs"] and info["nvcc"] and info["tile_preset"]
    assert torch.ops.flashsci.build_info() == backend.library.handle.flashsci_build_info().decode()
    assert torch.ops.flashsci.sees_torch_cuda() == (torch.version.cuda is not None)
    stale = backend.stale()
    assert stale is None or "build it again" in stale


@needs_library
def test_needs_only_the_stable_abi():
    symbols = subprocess.run(
        ["nm", "-D", str(backend.library_path())], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    defined = {s.split()[-1] for s in symbols if not re.search(r"\s[Uwv]\s", s)}
    # The linker's own marker of the version script may be listed as an absolute symbol.
    assert all(name.startswith("flashsci_") for name in defined), defined
    wanted = [s.split()[-1] for s in symbols if re.search(r"\s[Uw]\s", s)]
    unstable = [n for n in wanted if re.match(r"_ZNK?(3c10|2at|5torch)", n)]
    assert not unstable
    assert any(n.startswith("aoti_torch_get_current_cuda_stream") for n in wanted)
    weak = [s for s in symbols if "aoti_torch_get_current_cuda_stream" in s]
    assert all(re.search(r"\sw\s", s) for s in weak), "a strong reference cannot load under CPU torch"


@needs_library
def test_links_torch_as_both_worlds_have_it():
    dynamic = subprocess.run(
        ["readelf", "-d", str(backend.library_path())], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.+)\]", dynamic)
    assert "libtorch.so" in needed and "libtorch_cpu.so" in needed
    assert not [n for n in needed if "cuda" in n or "python" in n]
    assert "RUNPATH" not in dynamic and "RPATH" not in dynamic


@needs_library
def test_imports_torch_first_and_loads_by_ctypes():
    code = f"import torch, ctypes; ctypes.CDLL({str(backend.library_path())!r}); torch.ops.flashsci.build_info()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@needs_library
def test_cpu_tensors_are_refused():
    backend.build_info()
    q = torch.randn(2, 4, 8)
    with pytest.raises(NotImplementedError, match="cuda_forward"):
        torch.ops.flashsci.cuda_forward(q, q, q, *(None,) * 4, -1, -1, 1.0, 0.0, -1, -1, False, False, 0)


@needs_library
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_fake_kernel_follows_the_layout_of_q(rank):
    backend.build_info()
    lead = (2, 3, 6)[5 - rank :]
    q = torch.empty(*lead, 5, 8, device="meta", dtype=torch.float16)
    if rank > 3:
        q = q.transpose(-3, -2).contiguous().transpose(-3, -2)
    k = torch.empty(*lead, 7, 8, device="meta", dtype=torch.float16)
    v = torch.empty(*lead, 7, 4, device="meta", dtype=torch.float16)
    op = torch.ops.flashsci.cuda_forward.default
    out, lse = op(q, k, v, *(None,) * 4, -1, -1, 1.0, 0.0, -1, 0, False, False, 0)
    want = ops.empty_like_layout(q, (*q.shape[:-1], 4))
    assert out.shape == want.shape and out.stride() == want.stride() and out.dtype == q.dtype
    assert lse.shape == q.shape[:-1] and lse.is_contiguous() and lse.dtype == torch.float32


@needs_library
def test_schema_takes_symbolic_sizes():
    backend.build_info()
    schema = str(torch.ops.flashsci.cuda_forward.default._schema)
    assert "SymInt max_seqlen_q" in schema and "Tensor? cu_seqlens_q" in schema


def test_absent_library_is_a_reason(fresh_backend, monkeypatch, tmp_path):
    monkeypatch.setattr(flashsci, "__path__", [str(tmp_path)])
    reason = fresh_backend.unavailable()
    assert "was not built" in reason and "nvcc" in reason
    assert fresh_backend.build_info() is None and fresh_backend.stale() is None
    with pytest.raises(flashsci.BackendError, match="was not built"):
        fresh_backend.forward(ops.Tensors(None, None, None), SCALARS)


def test_broken_library_is_a_reason(fresh_backend, monkeypatch, tmp_path):
    (tmp_path / "_C.so").write_bytes(b"this is not ELF" * 99)
    monkeypatch.setattr(flashsci, "__path__", [str(tmp_path)])
    reason = fresh_backend.unavailable()
    assert "cannot be loaded" in reason and "ELF" in reason


@needs_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_missing_gpu_is_a_reason():
    reason = backend.unavailable()
    assert reason is not None and ("without CUDA" in reason or "no CUDA device" in reason)


@needs_library
def test_driver_problem_is_answered_without_torch():
    library = ctypes.CDLL(str(backend.library_path()))
    library.flashsci_driver_problem.restype = ctypes.c_char_p
    problem = library.flashsci_driver_problem()
    assert torch.cuda.is_available() or problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device_type": "cpu", "capability": None}, ("cpu",)),
        ({"dtype": torch.float32, "precision": "ieee"}, ("float32", "IEEE")),
        ({"dtype": torch.float64}, ("float64",)),
        ({"capability": (7, 5)}, ("sm_75", "bfloat16", "float16", "float32")),
        ({"capability": (7, 0), "dtype": torch.float16}, ("sm_70", "float16")),
        ({"varlen": True, "ragged_bias": True, "capability": (7, 5), "dtype": torch.float16}, ("bias", "packed")),
        ({"dropout_p": 0.1}, ("dropout",)),
        ({"head_dim": 257}, ("256",)),
        ({"head_dim_v": 300}, ("256",)),
    ],
)
def test_rejects(monkeypatch, change, words):
    monkeypatch.setattr(backend.library, "build_info", lambda: BUILD)
    assert backend.rejects(PROBLEM) is None
    reason = backend.rejects(replace(PROBLEM, **change))
    assert reason is not None
    for word in words:
        assert word in reason, reason


@pytest.mark.parametrize(
    "capability, dims, served",
    [
        ((9, 0), (256, 160), True),
        ((10, 0), (129, 8), True),
        ((8, 0), (128, 128), True),
        ((8, 0), (8, 129), False),
        ((8, 6), (256, 256), False),
        ((12, 0), (192, 192), False),
    ],
)
def test_gradients_of_wide_heads_in_fp32(monkeypatch, capability, dims, served):
    """The forward runs everywhere, the backward where a block has 227 KiB of shared memory."""
    monkeypatch.setattr(backend.library, "build_info", lambda: BUILD)
    problem = replace(PROBLEM, dtype=torch.float32, capability=capability, head_dim=dims[0], head_dim_v=dims[1])
    assert backend.rejects(problem) is None
    generation, reason = backend.backward_kernels(problem)
    assert (generation, reason is None) == (80 if served else 0, served)
    assert served or "end at 128 on this device" in reason


SHORT = replace(PROBLEM, dtype=torch.float32, head_dim=16, head_dim_v=16, seq_q=29, seq_k=29, key_weight=True)


@pytest.mark.parametrize(
    "change, served",
    [
        ({}, True),
        ({"capability": (8, 0), "mask": True, "window_right": 0}, True),
        ({"bias_shape": (1, 29), "bias_dtype": torch.float32}, False),
        ({"precision": "ieee"}, False),
        ({"capability": (7, 5)}, False),
    ],
)
def test_key_weights_of_short_sequences(monkeypatch, change, served):
    units = BUILD["units"] | {f"cuda/sm80/small_{d}": "" for d in ("bf16", "fp16", "fp32")}
    monkeypatch.setattr(backend.library, "build_info", lambda: {**BUILD, "units": units})
    problem = replace(SHORT, **change)
    reason = backend.rejects(problem)
    assert (reason is None) == served and (served or "key_weight" in reason or "IEEE" in reason)
    if served:  # of strides that the kernels take; else another backend has the gradients
        assert backend.backward_kernels(problem, True) == (80, None)
        assert "multiples of 16 bytes" in backend.backward_kernels(problem)[1]


@pytest.mark.parametrize(
    "change",
    [
        {"seq_k": 33},
        {"seq_q": None},
        {"dtype": torch.float16},
        {"heads_k": 2},
        {"head_dim": 18},
        {"softcap": 5.0},
    ],
)
def test_key_weights_of_other_calls_need_no_layout(monkeypatch, change):
    monkeypatch.setattr(backend.library, "build_info", lambda: BUILD)
    problem = replace(SHORT, **change)
    assert backend.rejects(problem) is None
    assert backend.backward_kernels(problem) == (80, None)


def test_gradients_need_triton(monkeypatch):
    triton = backends.BACKENDS["triton"]
    monkeypatch.setattr(triton.load(), "unavailable", lambda: "Triton is not installed")
    monkeypatch.setattr(backend, "unavailable", lambda: None)
    forward_only = {unit: "" for unit in BUILD["units"] if "/fwd" in unit}
    monkeypatch.setattr(backend.library, "build_info", lambda: {**BUILD, "units": forward_only})
    assert rejects("cuda", PROBLEM) is None
    reason = rejects("cuda", replace(PROBLEM, requires_grad=True))
    assert "Triton is not installed" in reason and "the triton backend" in reason


def test_library_without_a_kernel_for_the_device(monkeypatch):
    monkeypatch.setattr(backend.library, "build_info", lambda: {"archs": ["75"], "units": {}})
    reason = backend.rejects(PROBLEM)
    assert "FA_ARCHS=75" in reason and "FA_ARCHS=90" in reason


def test_features_that_were_refused_do_not_pass_silently():
    if backend.library_path() is None:
        pytest.skip("no library")
    q = torch.zeros(1, 4, 8)
    with pytest.raises(
        flashsci.BackendError,
        match="no alibi_slopes beside a bias or key_weight, has dropout",
    ):
        backend.forward(ops.Tensors(q, q, q), SCALARS._replace(dropout_p=0.5))


@pytest.mark.parametrize("lacking", ("alibi_slopes", "key_weight", "dropout_p"))
@pytest.mark.parametrize("backward", (backend.backward, backend.prepared_backward))
def test_no_gradients_without_what_the_forward_had(backward, lacking):
    """Of what another backend computed, whoever chose this one for them."""
    q = torch.zeros(1, 33, 8)  # too long for key weights
    more = {} if lacking == "dropout_p" else {lacking: torch.ones(1)}
    if lacking == "alibi_slopes":
        more["bias"] = torch.zeros(1, 1, 1)
    scalars = SCALARS._replace(dropout_p=0.5 if lacking == "dropout_p" else 0.0)
    saved = ops.Saved(ops.Tensors(q, q, q, **more), q, q[..., 0], scalars)
    with pytest.raises(flashsci.BackendError, match="has no alibi_slopes"):
        backward(q, None, saved, 7)


# --- digests -----------------------------------------------------------------------------------


def test_digest_ignores_comments_and_layout_only():
    base = '#include "a.h"\nint f(int x) {  // why\n  return x + 1; /* so */\n}\n'
    same = '#include "a.h"\n\nint f( int x )\n{ return x+1;\n}'
    other = base.replace("+ 1", "+ 2")
    text = 'const char* s = "// no comment";'
    assert digest.normalised_cpp(base) == digest.normalised_cpp(same)
    assert digest.normalised_cpp(base) != digest.normalised_cpp(other)
    assert "// no comment" in digest.normalised_cpp(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 128, "head_dim_v": 72, "window_left": 5, "softcap": 3.0}, None),
        ({"deterministic": True}, None),
        ({"varlen": True}, None),
        ({"head_dim": 192, "head_dim_v": 136}, None),
        ({"head_dim_v": 256}, None),
        ({"head_dim": 36}, "multiples of 8"),
    ],
)
def test_what_the_hopper_backward_serves(monkeypatch, change, reason):
    monkeypatch.setattr(backend.library, "build_info", lambda: BUILD)
    _, found = backend.SM90.backward_kernels(replace(PROBLEM, **change))
    assert found is None if reason is None else reason in found


def test_digest_of_every_unit():
    units = digest.units(ROOT)
    assert "cuda/sm80/fwd_bf16" in units
    assert all(re.fullmatch(r"[0-9a-f]{16}", value) for value in units.values())
    assert any(name.startswith("triton/") for name in units)
    result = subprocess.run(
        [sys.executable, "-I", str(ROOT / "flashsci" / "digest.py"), "cuda"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert units["cuda/sm80/fwd_bf16"] in result.stdout


def test_digest_sees_every_included_header():
    csrc = ROOT / "csrc"
    sources = digest.cpp_sources([csrc / "sm80" / "fwd" / "bf16.cu"])
    names = {str(p.relative_to(csrc)) for p in sources}
    assert {"include/flashsci.h", "core/smem_tile.cuh", "ptx/mma.cuh"} <= names


def test_triton_digest_ignores_docstrings(tmp_path):
    folder = tmp_path / "flashsci" / "backends" / "triton"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("def g():\n    return 1\n")
    kernel = 'from flashsci.backends.triton.helper import g\ndef f_kernel():\n    "doc"\n    return g()\n'
    (folder / "forward.py").write_text(kernel)
    before = digest.triton_units(tmp_path)
    assert set(before) == {"triton/forward"}
    (folder / "forward.py").write_text(kernel.replace('"doc"', '"other words"') + "# comment\n")
    assert digest.triton_units(tmp_path) == before
    (folder / "helper.py").write_text("def g():\n    return 2\n")
    assert digest.triton_units(tmp_path) != before


def test_a_debug_build_matches_no_tree(tmp_path):
    """Its kernels are not those that are installed: `check` must refuse it."""
    command = [sys.executable, "-I", str(ROOT / "flashsci" / "digest.py"), "cuda", "--archs", "90"]
    told = []
    for extra in ([], ["--poison"]):
        subprocess.run([*command, "--build-info", str(tmp_path / "info"), *extra], check=True)
        told.append(json.loads(json.loads((tmp_path / "info").read_text())))
    plain, poison = told
    assert plain["units"].keys() == poison["units"].keys()
    assert all(poison["units"][n] == f"{digest_}-poison" for n, digest_ in plain["units"].items())


# --- bytes at barriers -------------------------------------------------------------------------


def test_dependent_launches_wait_for_the_end_of_their_predecessor():
    """Before they read or write memory: some at once, others where they begin to load; what generations share, by their Isa."""
    found = 0
    wait = re.compile(r"(ptx|C::Isa)::wait_for_prerequisites\(\);(?! })")
    for folder in {path.parent for path in (ROOT / "csrc" / "sm90").rglob("launch.cuh")}:
        launched = len(re.findall(r"launch_dependent<", (folder / "launch.cuh").read_text()))
        own = filter(Path.is_file, folder.iterdir())
        files = [*own, *(ROOT / "csrc" / "core" / folder.name).glob("*")]
        waits = sum(len(wait.findall(path.read_text())) for path in files)
        assert waits >= launched, folder.name
        found += launched
    assert found >= 6


def test_barriers_expect_the_sizes_of_what_is_loaded():
    """A barrier that expects a byte more than its loads bring never opens, one that expects less opens too early.

    Loads assert that their boxes fill a stage (csrc/sm90/tma_box.cuh); so barriers must expect stages, not numbers of their
    own.
    """
    sizes = r"sizeof\(shared\.\w+(\[0\])*\)"
    asserted = (  # where what is loaded is known at run time: beside static_asserts of its boxes
        "plan.loaded",
        "kBytes + bytes",
        "part_bytes",
        "copies * box_rows * C::kPitch",
        "sizeof(shared.bias[0]) - C::kBiasStart",
        "(a.bias_tiles ? C::kBiasBytes : 0) + (a.mask_tiles ? C::kMaskBytes : 0)",
    )
    found = 0
    for path in sorted((ROOT / "csrc" / "sm90").rglob("*.cuh")):
        text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
        for call in re.findall(r"mbarrier_arrive_expect\((.*?)\);", text):
            expected = call.rsplit(", ", 1)[1]
            found += 1
            assert expected in asserted or re.fullmatch(rf"{sizes}( \+ {sizes})*", expected), (
                f"{path.name}: a barrier expects {expected}; say sizeof of the stage, which the loads fill"
            )
    assert found >= 10
