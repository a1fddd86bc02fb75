"""The sm90 triangle backward, run on the host (emulated.py) from the launcher to the stores, judged as every backend. What a
GPU's barriers, copies and products do is emulated; its speed, its registers and the order in which CTAs add are not."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass, replace

import pytest
import torch

from flashsci.testing import Inputs, Judge, evaluate
from tests.cpu.emulator.emulated import build, emulate, is_found
from tools.kernels.launchers import BackwardParams, BiasMask, _pointer, _score_strides, _strides

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("triangle"), "triangle_backward")


@dataclass(frozen=True)
class Case:
    """batch: two dims; own: whether the bias has the first of them."""

    batch: tuple[int, int] = (1, 16)
    heads: int = 1
    rows: int = 128
    keys: int = 128
    dim: int = 32
    dim_v: int = 32
    dtype: torch.dtype = torch.bfloat16
    bias_fp32: bool = False
    own: bool = False
    mask: str = ""  # "padding": of keys, per member; "heads": per head, too
    numbers: str = ""  # what the bias holds besides normal numbers
    dlse: bool = False
    zeros: bool = False  # rows of dout
    layout: str = "bhsd"
    processors: int = 3
    deterministic: bool = False
    size: float = 1.0
    seed: int = 0


def normal(case: Case, random: torch.Generator, heads: int, rows: int, dim: int) -> torch.Tensor:
    """In the middle of NaN; layout "bshd": heads inside rows."""
    shape = (*case.batch, rows, heads, dim) if case.layout == "bshd" else (*case.batch, heads, rows, dim)
    wide = torch.full((*shape[:-1], 64), torch.nan, dtype=case.dtype)
    wide[..., 8 : 8 + dim] = case.size * torch.randn(shape, generator=random)
    x = wide[..., 8 : 8 + dim]
    return x.transpose(-2, -3) if case.layout == "bshd" else x


def inputs_of(case: Case) -> Inputs:
    random = torch.Generator().manual_seed(case.seed)
    q = normal(case, random, case.heads, case.rows, case.dim)
    k = normal(case, random, case.heads, case.keys, case.dim)
    v = normal(case, random, case.heads, case.keys, case.dim_v)
    dout = normal(case, random, case.heads, case.rows, case.dim_v)
    if case.zeros:
        dout[..., ::3, :] = 0
    lead = (case.batch[0] if case.own else 1, 1)
    bias = torch.randn(*lead, case.heads, case.rows, case.keys, generator=random)
    if case.numbers == "inf":
        bias[torch.rand(bias.shape, generator=random) < 0.3] = -torch.inf
        bias[..., 5, :] = -torch.inf  # a row without keys
        bias[..., 64:128, :64] = -torch.inf  # a tile
    elif case.numbers:
        low = -1e9 if case.numbers == "1e9" else torch.finfo(case.dtype).min
        bias[torch.rand(bias.shape, generator=random) < 0.3] = low
        bias[..., 70:, 10:20] = low
        bias[..., 7, :] = low  # a row of nothing else
    bias = bias.to(torch.float32 if case.bias_fp32 else case.dtype)
    mask = None
    if case.mask:
        heads = case.heads if case.mask == "heads" else 1
        length = torch.randint(0, case.keys + 1, (*case.batch, heads, 1, 1), generator=random)
        length[0, 0] = 0  # a member without keys
        mask = torch.arange(case.keys) < length
        mask |= torch.rand(mask.shape, generator=random) < 0.01
    dlse = torch.randn(q.shape[:-1], generator=random) if case.dlse else None
    return Inputs(q, k, v, bias=bias, mask=mask, dout=dout, dlse=dlse)


def params_of(case: Case, inputs: Inputs, forward: dict[str, torch.Tensor]):
    """The call, and its results, which hold NaN."""
    q, k, v, bias, mask = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask
    out, lse = forward["out"].contiguous(), forward["lse"].float().contiguous()
    found = {f"d{n}": torch.full_like(getattr(inputs, n), torch.nan) for n in "qkv"}
    found["dbias"] = torch.full(bias.shape, torch.nan, dtype=bias.dtype)
    byte_mask = None if mask is None else mask.view(torch.uint8)
    p = BackwardParams(
        *map(_pointer, (q, k, v, out, inputs.dout, lse, inputs.dlse, *found.values())),
        q_strides=_strides(q), k_strides=_strides(k), v_strides=_strides(v), out_strides=_strides(out),
        dout_strides=_strides(inputs.dout), dlse_strides=_strides(inputs.dlse, last=False),
        dq_strides=_strides(found["dq"]), dk_strides=_strides(found["dk"]), dv_strides=_strides(found["dv"]),
        bias_mask=BiasMask(_pointer(bias), _pointer(byte_mask), _score_strides(bias), _score_strides(byte_mask),
                           int(bias.dtype == torch.float32)),
        dbias_strides=_score_strides(found["dbias"]), batch0=q.shape[0], batch1=q.shape[1], heads_q=q.shape[2],
        heads_k=k.shape[2], seq_q=q.shape[3], seq_k=k.shape[3], max_seqlen_q=-1, max_seqlen_k=-1, head_dim=q.shape[-1],
        head_dim_v=v.shape[-1], scale=q.shape[-1] ** -0.5, window_left=-1, window_right=-1,
        deterministic=int(case.deterministic), copy_bytes=16, device=64,
    )  # fmt: skip
    return p, found, (out, lse, byte_mask)


def run(library: c.CDLL, case: Case, inputs: Inputs, forward, seed: int):
    """The gradients; None where the kernel leaves the call to others."""
    p, found, keep = params_of(case, inputs, forward)
    library.workspace.restype = c.c_int64
    space = torch.full((library.workspace(c.byref(p)) + 256,), 255, dtype=torch.uint8)
    p.workspace = (space.data_ptr() + 255) // 256 * 256
    taken = emulate(library.emulate, p, case.dtype == torch.bfloat16, seed, case.processors)
    assert bool((space[-(256 - (p.workspace - space.data_ptr())) or None :] == 255).all()), "beyond the workspace"
    del keep
    return found if taken else None


def judge(library: c.CDLL, case: Case) -> dict[str, torch.Tensor]:
    inputs = inputs_of(case)
    judged = Judge(inputs)
    wide = evaluate(inputs.to(torch.float32), "reference")
    forward = {"out": wide["out"].to(case.dtype), "lse": wide["lse"]}
    found = run(library, case, inputs, forward, case.seed)
    assert found is not None, case
    judged.require({**forward, **found})
    return found


CASES = {
    "plain": Case(),
    "two panels of two steps": Case(rows=390, keys=70, seed=1),
    "three steps": Case(rows=384, keys=128, bias_fp32=True, processors=5, seed=2),
    "two panels of three steps": Case(rows=700, keys=65, dim=16, dim_v=24, seed=3),
    "padding": Case(rows=130, keys=200, mask="padding", bias_fp32=True, processors=9, seed=4),
    "padding per head": Case(heads=3, mask="heads", processors=7, seed=5, batch=(1, 17)),
    "fp16": Case(dtype=torch.float16, rows=100, keys=90, dim=8, dim_v=8, seed=6),
    "fp16, fp32 bias": Case(dtype=torch.float16, bias_fp32=True, dim=24, dim_v=32, dlse=True, seed=7),
    "-inf": Case(numbers="inf", rows=140, seed=8, heads=2, processors=11),
    "-inf, fp32, padding": Case(numbers="inf", bias_fp32=True, mask="padding", seed=9, dlse=True),
    "-1e9": Case(numbers="1e9", seed=10, dlse=True),
    "-1e9, fp32": Case(numbers="1e9", bias_fp32=True, rows=200, seed=11),
    "the lowest number": Case(numbers="min", seed=12),
    "the lowest number, fp32": Case(numbers="min", bias_fp32=True, mask="padding", seed=13),
    "zero rows of dout": Case(zeros=True, dlse=True, layout="bshd", heads=2, seed=14),
    "two batch dims, both shared": Case(batch=(3, 6), heads=2, layout="bshd", seed=15, processors=20),
    "owners": Case(batch=(2, 16), own=True, heads=2, seed=16, processors=14, mask="padding"),
    "owners of fewer members than groups": Case(batch=(3, 16), own=True, processors=130, seed=17),
    "large scores": Case(size=8.0, seed=18),
    "an lse beyond 2^20": Case(size=700.0, seed=19, mask="padding"),
}


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(kernel, name):
    judge(kernel, CASES[name])


@pytest.mark.parametrize("name", ("padding", "two panels of three steps", "padding per head"))
def test_deterministic(kernel, name):
    case = replace(CASES[name], deterministic=True)
    first = judge(kernel, case)
    inputs = inputs_of(case)
    wide = evaluate(inputs.to(torch.float32), "reference")
    forward = {"out": wide["out"].to(case.dtype), "lse": wide["lse"]}
    for seed in (50, 51):
        again = run(kernel, case, inputs, forward, seed)
        assert all(torch.equal(x, again[n]) for n, x in first.items())


def test_refusals(kernel):
    """What is left to other kernels; nothing is written then."""
    base = Case()
    inputs = inputs_of(base)
    wide = evaluate(inputs.to(torch.float32), "reference")
    forward = {"out": wide["out"].to(base.dtype), "lse": wide["lse"]}

    def refused(**changes) -> bool:
        p, found, keep = params_of(base, inputs, forward)
        for name, value in changes.items():
            target = p
            *path, last = name.split("__")
            for part in path:
                target = getattr(target, part)
            setattr(target, last, value)
        taken = emulate(kernel.emulate, p, True, 0)
        del keep
        return not taken and all(bool(x.isnan().all()) for x in found.values())

    assert refused(softcap=3.0) and refused(window_left=5) and refused(window_right=0)
    assert refused(head_dim=40) and refused(head_dim_v=12) and refused(heads_k=2)
    assert all(refused(**{n: None}) for n in ("dq", "dk", "dv", "dbias", "dout"))
    assert refused(dbias_strides__batch1=128 * 128)  # a bias of each member's own
    assert refused(dbias_strides__row=0) and refused(batch1=8)
    assert refused(bias_mask__mask=inputs.q.data_ptr(), bias_mask__mask_strides__row=128)
    assert refused(deterministic=1, seq_q=1000)
    assert refused(q=inputs.q.data_ptr() + 2) and refused(q_strides__row=30)


FAULTS = {
    "dS overwritten while others read it": ("triangle_bwd/mainloop.cuh", "wait_for(shared.ds_empty[w], count + 1);", ""),
    "dQ overwritten before it has been added": ("triangle_bwd/mainloop.cuh", "wait_for(shared.dq_empty[w], count + 1);", ""),
    "sums of one consumer": ("triangle_bwd/kernel.cuh", "init(shared.sums_full, 4 * kConsumers);", "init(shared.sums_full, 4);"),
    "the bias of another step": ("triangle_bwd/mainloop.cuh", "shared.bias[w][step][0]", "shared.bias[w][0][0]"),
    "Q released before dK": ("triangle_bwd/kernel.cuh", "init(shared.q_empty[w][i], 4);", "init(shared.q_empty[w][i], 1);"),
    "rows sent while they are written": ("triangle_bwd/store.cuh", "ptx::bulk_wait_read<0>();  // stores of the previous member", ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    broken = build(tmp_path, "triangle_backward", FAULTS[fault])
    assert is_found(lambda seed: judge(broken, Case(rows=300, mask="padding", seed=seed)), range(2, 6))
