"""The sm90 forward in bf16 without bias and mask, run on the host (emulated.py) from the launcher to the stores, on generated calls and by the judge of
every backend. What a GPU's barriers, copies and products do is emulated; its speed and its registers are not."""

from __future__ import annotations

import ctypes as c
from dataclasses import replace

import pytest
import torch

from flashsci.testing import Case, Inputs, Judge, Variant, generate, make_inputs
from tests.cpu.emulator.emulated import build, emulate, is_found
from tools.kernels.launchers import ForwardParams, _pointer, _strides

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]

# Left out, which have tests of their own.
ELSEWHERE = (
    (
        "fwd/launch.cuh",
        "const cudaError_t error = triangle_fwd::launch<Op>(p, stream);",
        "const cudaError_t error = cudaErrorNotSupported;",
    ),
    ("fwd/launch.cuh", "if (p.workspace != nullptr && decode::is_decoding(p)) {", "if constexpr (false) {"),
)


def loaded(folder, *changes: tuple[str, str, str]) -> c.CDLL:
    library = build(folder, "forward", *ELSEWHERE, *changes, fast=not changes)
    library.workspace.restype = c.c_int64
    return library


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("forward"))


def run(library: c.CDLL, x: Inputs, seed: int = 0, processors: int = 3) -> dict[str, torch.Tensor] | None:
    """out and lse; None where the kernel leaves the call to others."""
    given = x.options
    q, k, v = (y.resolve_neg() for y in (x.q, x.k, x.v))
    if x.varlen:
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
    edges = x.cu_seqlens_q, x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k
    left, right = given.get("window") or (None, None)
    right = 0 if given.get("causal") else right
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:-1], torch.nan)
    lead = (1,) * (5 - q.dim()) + q.shape[:-3]
    # Launchers ask a device once for its multiprocessors: each number of them is a device.
    params = ForwardParams(
        *map(_pointer, (q, k, v, out, lse, *edges)), *map(_strides, (q, k, v, out)), batch0=lead[0],
        batch1=lead[1], heads_q=q.shape[-3], heads_k=k.shape[-3], seq_q=q.shape[-2], seq_k=k.shape[-2],
        num_seqs=len(edges[0]) - 1 if x.varlen else 0, max_seqlen_q=-1, head_dim=q.shape[-1], head_dim_v=v.shape[-1],
        scale=q.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"], softcap=given.get("softcap") or 0.0,
        window_left=-1 if left is None else left, window_right=-1 if right is None else right,
        lower_right=given.get("align") == "lower_right", device=processors,
    )  # fmt: skip
    library.was_wide = bool(library.is_wide(c.byref(params), processors))
    size = library.workspace(c.byref(params), processors)
    workspace = torch.full((size + 64,), 255, dtype=torch.uint8)
    params.workspace = workspace.data_ptr() if size else None
    if not emulate(library.emulate, params, True, seed, processors):
        return None
    assert (workspace[size:] == 255).all()
    return {"out": out.transpose(0, 1) if x.varlen else out, "lse": lse}


def judge(library: c.CDLL, case: Case, processors: int = 3) -> bool:
    """Whether the kernel took a case; it must be right then."""
    x = make_inputs(case)
    if x.q.dim() < 3 or x.q.dim() > 5 or x.q.shape[:-3] != x.k.shape[:-3]:
        return False  # such calls are expanded before they come here
    found = run(library, x, case.seed % 1000, processors)
    if found is not None:
        Judge(x).require(found)
    return found is not None


DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


@pytest.mark.parametrize("kind", ("plain", "causal", "window", "softcap", "varlen"))
@pytest.mark.parametrize("dims", DIMS)
def test_every_tile(kernel, dims, kind):
    """More keys than the ring has stages, rows of every consumer, last blocks that are cut; several tiles for each CTA."""
    windowed = {"causal": True} if kind == "causal" else {"window": (70, 30)} if kind == "window" else {}
    variant = Variant("bfloat16", *dims, softcap=kind == "softcap", varlen=kind == "varlen", window=bool(windowed))
    sizes = dict(lens_q=(100, 0, 260), lens_k=(50, 20, 330)) if kind == "varlen" else dict(seq_q=290, seq_k=600)
    case = Case(variant, 5, heads_k=2, softcap=9.0 if variant.softcap else None, **sizes, **windowed)
    for processors in (3, 50):
        assert judge(kernel, case, processors)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(("seq_q", "wide"), ((192, False), (197, True), (256, True), (320, False), (500, True)))
def test_tiles_by_what_they_waste(kernel, seq_q, wide, causal):
    """Of 256 rows where these waste no more than those of 192: more keys than their ring has stages, too."""
    variant = Variant("bfloat16", 64, 64, window=causal)
    for seq_k in (seq_q, 600):
        case = Case(variant, 3, heads_k=2, seq_q=seq_q, seq_k=seq_k, causal=causal)
        assert judge(kernel, case, processors=1)
        assert kernel.was_wide == wide


@pytest.mark.parametrize("part", range(4))
def test_generated(kernel, part):
    pool = [
        Variant("bfloat16", *dims, window=window, softcap=softcap)
        for dims in ((32, 32), *DIMS)
        for window in (False, True)
        for softcap in (False, True)
    ]
    taken = [
        judge(kernel, case, (1, 3, 20)[case.seed % 3]) for case in generate(40 + part, 16, pool, score_limit=1 << 17)
    ]
    assert sum(taken) >= 5, taken


@pytest.mark.parametrize("part", range(2))
def test_generated_packed(kernel, part):
    pool = [Variant("bfloat16", *dims, window=window, varlen=True) for dims in DIMS for window in (False, True)]
    taken = [judge(kernel, case) for case in generate(60 + part, 12, pool, score_limit=1 << 17)]
    assert sum(taken) >= 5, taken


FAULTS = {
    "K overwritten while it is read": ("fwd/load.cuh", "      acquire(shared.k_empty, block);\n", ""),
    "K read before it is there": ("fwd/mainloop.cuh", "      wait_k();\n      pingpong_wait();", "      pingpong_wait();"),
    "who skips a block says so once too often": ("fwd/load.cuh", "4 * skipping", "4 * skipping + 1"),
    "the keys of the next sequence": ("fwd/load.cuh", "tile.first_k + block * C::kBlockK", "tile.first_k + block * C::kBlockK + 1"),
    "fewer bytes than arrive": ("fwd/load.cuh", "(v_full, sizeof(shared.v[0]));", "(v_full, sizeof(shared.v[0]) / 2);"),
}  # fmt: skip


# Left out, which a compiler is quicker with: faults are looked for at head dim 64, without a bias.
OTHER_TILES = (
    ("fwd/launch.cuh", "if (bias_mask)", "if constexpr (false)"),
    *(
        ("fwd/launch.cuh", f"return {tiles};", "return launch(Tiles<64>{});")
        for tiles in (
            "launch(Tiles<96>{})",
            "launch(Tiles<128>{})",
            "launch(Tiles<192, 128>{})",
            "dim <= 192 ? launch(Tiles<192>{}) : launch(Tiles<256>{})",
        )
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    broken = loaded(tmp_path, FAULTS[fault], *OTHER_TILES)
    variant = Variant("bfloat16", 64, 64, window=True)
    case = Case(variant, heads_k=2, seq_q=290, seq_k=600, causal=True)
    assert is_found(lambda seed: judge(broken, replace(case, seed=seed)), range(6))
