"""The kernels of csrc/sm80 with key weights of any length, forward and backward, run on the host (emulated.py) from the launcher to the stores,
by the judge of every backend."""

from __future__ import annotations

import ctypes as c
import functools
from dataclasses import replace

import pytest
import torch

from flashsci.testing import Case, Inputs, Judge, Variant, generate, make_inputs
from tests.cpu.emulator.emulated import build, emulate, is_found
from tests.cpu.emulator.test_sm80_kernel import DIMS, ROOMS, parameters
from tests.cpu.emulator.test_small_kernel import poisoned
from tools.kernels.launchers import BackwardParams, ForwardParams, _pointer, _score_strides, _strides


def built(folder, name: str, *changes) -> c.CDLL:
    found = build(folder, name, *changes)
    found.workspace.restype = found.forward_workspace.restype = c.c_int64
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A function that gives the library of a dtype, built at its first use."""
    library = functools.cache(lambda name: built(tmp_path_factory.mktemp(name), name))
    return lambda dtype: library("sm80_fp32" if dtype == torch.float32 else "sm80")


def memory(size: int) -> tuple[torch.Tensor, int]:
    """A workspace, poisoned, and its address."""
    made = torch.full((size + 64 + 256,), 255, dtype=torch.uint8)
    return made, (made.data_ptr() + 255) // 256 * 256


def forward(library: c.CDLL, x: Inputs, room: int, seed: int) -> dict[str, torch.Tensor]:
    out = poisoned(x.q, x.v.shape[-1])
    lse = torch.full(out.shape[:-1], torch.nan)
    given = parameters(replace(x, dout=None), room)
    p = ForwardParams(**given, out=_pointer(out), lse=_pointer(lse), out_strides=_strides(out))
    _kept, p.workspace = memory(library.forward_workspace(c.byref(p)))
    assert emulate(library.emulate_forward, p, x.q.dtype == torch.bfloat16, seed)
    return {"out": out, "lse": lse}


def backward(
    library: c.CDLL, x: Inputs, made: dict, room: int, deterministic: bool, seed: int, need: str = "qkv"
) -> dict:
    found = {f"d{name}": poisoned(getattr(x, name)) for name in need}
    p = parameters(x, room) | {"max_seqlen_k": -1, "deterministic": int(deterministic)}
    for name, gradient in found.items():
        p |= {name: _pointer(gradient), f"{name}_strides": _strides(gradient)}
    if x.key_weight_grad:
        found["dkey_weight"] = torch.full(x.key_weight.shape, torch.nan)
        as_bias = found["dkey_weight"].unsqueeze(-2)
        p |= {"dbias": _pointer(as_bias), "dbias_strides": _score_strides(as_bias)}
    out, lse = made["out"], made["lse"].contiguous()
    p |= {"out": _pointer(out), "out_strides": _strides(out), "lse": _pointer(lse)}
    p |= {"dout": _pointer(x.dout), "dout_strides": _strides(x.dout)}
    p |= {"dlse": _pointer(x.dlse), "dlse_strides": _strides(x.dlse, last=False)}
    params = BackwardParams(**p)
    _kept, params.workspace = memory(library.workspace(c.byref(params)))
    assert emulate(library.emulate_backward, params, x.q.dtype == torch.bfloat16, seed)
    return found


def judge(kernels, case: Case, deterministic: bool = False, need: str = "qkv") -> None:
    x = make_inputs(case)
    judged, room = Judge(x), 228 if max(x.q.shape[-1], x.v.shape[-1]) > 128 else ROOMS[case.seed % 3]
    rows = {n: y.resolve_neg() for n in ("q", "k", "v", "dout") if (y := getattr(x, n)) is not None}
    x = replace(x, **{n: y if y.stride(-1) == 1 else y.contiguous() for n, y in rows.items()})
    shape = x.key_weight.shape
    x = replace(x, key_weight=x.key_weight.reshape(*(1,) * (x.q.dim() - 1 - len(shape)), *shape))
    library = kernels(x.q.dtype)
    results = forward(library, x, room, case.seed)
    if x.dout is not None:
        results |= backward(library, x, results, room, deterministic, case.seed, need)
    if x.key_weight_grad:
        results["dkey_weight"] = results["dkey_weight"].reshape(shape)
    judged.require(results)


KINDS = {
    "of heads": {},
    "of all heads": dict(weight_shape=(2, 1, 150)),
    "of the batch": dict(weight_shape=(1, 2, 150), weight_view="transposed"),
    "one for all keys": dict(weight_shape=(2, 2, 1)),
    "all zero in one member": dict(weight_zeros="rows"),
    "subnormal": dict(weight_zeros="subnormal"),
    "lower right": dict(causal=True, align="lower_right"),
    "softcap": dict(softcap=7.0),
    "negative scale": dict(scale=-0.1),
    "pairs hidden": dict(mask_shape=(70, 150)),
    "keys hidden": dict(mask_shape=(2, 1, 1, 150), mask_kind="keys"),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [*((dims, ("bfloat16", "float16")[dims[0] % 64 != 0]) for dims in DIMS)]
    + [(dims, "float32") for dims in ((16, 16), (32, 20), (64, 64), (128, 128))],
)
def test_every_tile(kernels, dims, dtype, kind):
    """Tiles that are cut, several of them, in both directions; heads of keys with two heads of queries each."""
    given = {"weight_shape": (2, 2, 150), **KINDS[kind]}
    variant = Variant(
        dtype, *dims, key_weight="float", key_weight_grad=True, lse_grad=True, window="causal" in given,
        softcap="softcap" in given, mask="mask_shape" in given, flipped=given.get("scale", 1) < 0,
    )  # fmt: skip
    case = Case(variant, sum(dims) // 32, lead=(2,), heads_k=2, group=2, seq_q=70, seq_k=150, **given)
    for deterministic in (False, True):
        judge(kernels, case, deterministic)


@pytest.mark.parametrize("need", ("", "q", "kv"))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_gradients_alone(kernels, dtype, need):
    """That of the weights without the others, and with some of them."""
    variant = Variant(dtype, 64, 64, key_weight="float", key_weight_grad=True)
    case = Case(variant, 3, lead=(2,), heads_k=2, seq_q=70, seq_k=150, weight_shape=(2, 2, 150))
    judge(kernels, case, need=need)


@pytest.mark.parametrize("part", range(3))
def test_generated_calls(kernels, part):
    pool = [
        Variant(dtype, *dims, key_weight="float", key_weight_grad=grad, window=window, mask=mask, lse_grad=mask, softcap=window and mask)
        for dtype in ("bfloat16", "float16", "float32")
        for dims in ((40, 64), *DIMS[:4])
        for window in (False, True)
        for mask in (False, True)
        for grad in (False, True)
    ]  # fmt: skip
    for case in generate(270 + part, 8, pool, score_limit=1 << 15):
        x = make_inputs(case)
        if x.q.numel() == 0 or x.k.numel() == 0:
            continue  # no launcher gets a call without a score
        if 3 <= x.q.dim() <= 5 and x.q.shape[:-3] == x.k.shape[:-3] == x.v.shape[:-3]:
            judge(kernels, case, deterministic=case.seed % 2 == 1)


FAULTS = {
    "a gradient divided by nothing": ("../sm80/weights/gradient.cuh", "counted(__ldg(plan.weights + at(plan.strides)), kLeast)", "1.f"),
    "weights of query heads": ("../sm80/weights/logs.cuh", ") / plan.group;", ");"),
    "a weight of zero that hides nothing": ("../sm80/weights/launch.cuh", "take_logs(work.rows, p, 0.f", "take_logs(work.rows, p, 1.f"),
    "a gradient of the first query head": ("../sm80/weights/gradient.cuh", "member < plan.group", "member < 1"),
    "no gradient of a weight of zero": ("../sm80/weights/launch.cuh", "take_logs(work.sums, p, kLeast", "take_logs(work.sums, p, 0.f"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    library = built(tmp_path, "sm80", FAULTS[fault])
    variant = Variant("bfloat16", 64, 64, key_weight="float", key_weight_grad=True)
    case = Case(variant, lead=(2,), heads_k=2, group=2, seq_q=70, seq_k=150, weight_shape=(2, 2, 150))
    assert is_found(lambda seed: judge(lambda dtype: library, replace(case, seed=seed)), range(6))
