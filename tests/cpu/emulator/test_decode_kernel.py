"""The sm90 kernels of decoding, run on the host (emulated.py) from the launcher to the stores, judged as every backend. What a
GPU's barriers, copies and products do is emulated; its speed and its registers are not."""

from __future__ import annotations

import ctypes as c

import pytest
import torch

from flashsci.testing import Inputs, Judge
from tests.cpu.emulator.emulated import build, emulate, is_found
from tools.kernels.launchers import ForwardParams, _pointer, _strides

BF16, FP16 = torch.bfloat16, torch.float16


def loaded(folder, *changes: tuple[str, str, str]) -> c.CDLL:
    library = build(folder, "decode", *changes)
    library.workspace.restype = c.c_int64
    return library


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("decode"))


def make(
    seq_q: int, seq_k: int, batch: tuple[int, ...] = (2,), heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16, seed: int = 0, **options,
) -> Inputs:  # fmt: skip
    """[.., H, S, D], the keys a part of a longer cache, whose other rows are NaN."""
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(*batch, heads[0], seq_q, dims[0], generator=made).to(dtype)
    room = torch.full((*batch, heads[1], seq_k + 40, sum(dims)), torch.nan, dtype=dtype)
    room[..., :seq_k, :] = torch.randn(*batch, heads[1], seq_k, sum(dims), generator=made).to(dtype)
    k, v = room[..., :seq_k, :].split(dims, -1)
    return Inputs(q, k, v, options=options)


def run(library: c.CDLL, x: Inputs, seed: int = 0, processors: int = 3) -> dict[str, torch.Tensor]:
    q, k, v, options = x.q, x.k, x.v, x.options
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:-1], torch.nan)
    left, right = options.get("window") or (-1, -1)
    lead = (1,) * (5 - q.dim()) + q.shape[:-3]
    # Launchers ask a device once for its multiprocessors: each number of them is a device.
    params = ForwardParams(
        *map(_pointer, (q, k, v, out, lse)), None, None, *map(_strides, (q, k, v, out)), batch0=lead[0], batch1=lead[1],
        heads_q=q.shape[-3], heads_k=k.shape[-3], seq_q=q.shape[-2], seq_k=k.shape[-2], max_seqlen_q=-1,
        head_dim=q.shape[-1], head_dim_v=v.shape[-1], scale=options.get("scale") or q.shape[-1] ** -0.5,
        softcap=options.get("softcap") or 0.0, window_left=left, window_right=0 if options.get("causal") else right,
        lower_right=options.get("align") == "lower_right", device=processors,
    )  # fmt: skip
    size = library.workspace(c.byref(params), processors)
    workspace = torch.full((size + 256,), 255, dtype=torch.uint8)  # NaN
    params.workspace = workspace.data_ptr()
    assert emulate(library.emulate, params, q.dtype == BF16, seed, processors)
    assert (workspace[size:] == 255).all()
    return {"out": out, "lse": lse}


def judge(library: c.CDLL, x: Inputs, seed: int = 0, processors: int = 3) -> None:
    Judge(x).require(run(library, x, seed, processors))


@pytest.mark.parametrize("processors", (1, 3, 7, 60))
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (256, 256), (192, 128), (40, 80)))
def test_runs(kernel, dims, processors):
    """Of every length: sequences in one piece, in some and in many, more multiprocessors than blocks."""
    judge(kernel, make(1, 700, dims=dims, dtype=FP16, seed=processors), 1, processors)


@pytest.mark.parametrize(
    "options",
    (
        {"causal": True, "align": "lower_right"},
        {"window": (150, 0), "align": "lower_right"},
        {"window": (3, 300)},
        {"softcap": 5.0},
        {"scale": -0.2},
    ),
)
@pytest.mark.parametrize("seq_q, heads", ((1, (8, 1)), (5, (4, 2)), (16, (8, 2)), (64, (1, 1))))
def test_options(kernel, options, seq_q, heads):
    """Blocks that no query sees are left out; tiles of 1 to 64 rows, one for all heads that share K and V."""
    judge(kernel, make(seq_q, 600, heads=heads, dims=(128, 128), **options), 2, 5)


@pytest.mark.parametrize("batch", ((), (5,), (2, 3)))
def test_leading_dims(kernel, batch):
    judge(kernel, make(2, 300, batch=batch), 3, 5)


def test_large_scores(kernel):
    """Maxima that rise from block to block, in one piece and between pieces."""
    x = make(3, 900)
    x.k.mul_(torch.linspace(0.1, 60, 900)[:, None].to(BF16))
    for processors in (1, 9):
        judge(kernel, x, 4, processors)


def test_the_same_twice(kernel):
    x = make(2, 900)
    first = run(kernel, x, 0, 13)
    for seed in range(1, 4):
        found = run(kernel, x, seed, 13)
        assert all(torch.equal(found[name], first[name]) for name in first)


FAULTS = {
    "K read before it is there": ("decode/kernel.cuh", "wait(shared.k_full[stage], turn.parity);", ""),
    "V overwritten while it is read": ("decode/kernel.cuh", "ptx::mbarrier_sleep(ptx::shared_address(&empty), turn.parity ^ 1);", ""),
    "pieces in one place": ("decode/kernel.cuh", "* a.plan.segments + segment.index)", "* a.plan.segments)"),
    "a piece too many": ("decode/combine.cuh", "last / plan.run - begin / plan.run + 1;", "last / plan.run - begin / plan.run + 2;"),
    "keys beyond the last": ("decode/kernel.cuh", "first_key + kBlockK > full_end", "first_key > full_end"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    broken = loaded(tmp_path, FAULTS[fault])
    assert is_found(lambda seed: judge(broken, make(2, 700 + seed, seed=seed), seed))
