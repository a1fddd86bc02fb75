"""The kernels of csrc/sm80 with ALiBi and learnt slopes, with a softcap that bounds it or a bias, and with a bias of packed calls, forward and backward, run on the host (emulated.py) from the launcher to the stores, by the judge of every
backend. What a GPU's products, copies and barriers do is emulated; its speed and its registers are not."""

from __future__ import annotations

import ctypes as c
import functools
import math
from dataclasses import replace

import pytest
import torch

from flashsci.call import learnt_slopes, row_pitch
from flashsci.call.ops import Tensors
from flashsci.testing import Case, Inputs, Judge, Variant, generate, make_inputs
from tests.cpu.emulator.emulated import build, emulate, is_found
from tests.cpu.emulator.test_small_kernel import common, poisoned
from tools.kernels.launchers import (
    ALIBI_SLOPES,
    BackwardParams,
    BiasMask,
    ForwardParams,
    ScoreStrides,
    _copy_bytes,
    _pointer,
    _score_strides,
    _strides,
)

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]

ROOMS = (100, 164, 228)  # KiB of shared memory of a multiprocessor: sm_86, sm_80, sm_90


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A function that gives the library of a dtype, built at its first use."""

    @functools.cache
    def library(name: str) -> c.CDLL:
        found = build(tmp_path_factory.mktemp(name), name)
        found.workspace.restype = c.c_int64
        return found

    return lambda dtype: library("sm80_fp32" if dtype == torch.float32 else "sm80")


def slope_strides(slopes: torch.Tensor, x: Inputs) -> ScoreStrides:
    """Packed: the first stride is that of sequences."""
    step = [0 if n == 1 else s for n, s in zip(slopes.shape, slopes.stride(), strict=True)]
    if x.varlen:
        return ScoreStrides(*((0,) * (2 - len(step)) + tuple(step))[:1], 0, step[-1], 0, 0)
    return ScoreStrides(*(0,) * (3 - len(step)), *step, 0, 0)


@functools.cache
def block_starts(lens_q: tuple[int, ...], lens_k: tuple[int, ...]) -> torch.Tensor:
    """The starts of the blocks of a packed bias per pair; kept, as parameters hold its address."""
    sizes = [a * b for a, b in zip(lens_q, lens_k, strict=True)]
    return torch.tensor([0, *sizes]).cumsum(0)


def edges_of(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return x.cu_seqlens_q, x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k


def per_pair(x: Inputs) -> bool:
    """Whether the bias of a packed call has blocks of pairs."""
    return x.bias.dim() == 2 and x.bias.shape[1] != len(x.k)


def with_own_heads(x: Inputs) -> Inputs:
    """The inputs as the backend gives them for gradients: a bias that heads share becomes one of every head."""
    heads = x.q.shape[1]
    if x.bias is None or not x.varlen or not x.bias_grad or len(x.bias) == heads:
        return x
    return replace(x, bias=x.bias.contiguous().float().expand(heads, *x.bias.shape[1:]))


def ragged_bias(x: Inputs, bias: torch.Tensor) -> BiasMask:
    """csrc/include/flashsci_ragged.h."""
    pairs, places = per_pair(x), ScoreStrides()
    if pairs:
        lens = (tuple(e.diff().tolist()) for e in edges_of(x))
        places = ScoreStrides(block_starts(*lens).data_ptr(), bias.shape[1])
    strides = ScoreStrides(0, 0, 0 if len(bias) == 1 else bias.stride(0), 0, 1)
    capped = int(x.options.get("softcap_at") == "biased")
    return BiasMask(_pointer(bias), None, strides, places, int(bias.dtype == torch.float32), capped)


def parameters(x: Inputs, room: int) -> dict:
    """The fields that forward and backward have in common."""
    given = x
    if x.varlen:
        x = replace(x, **{n: getattr(x, n).transpose(0, 1) for n in ("q", "k", "v")})
    found = common(x, room) | {"copy_bytes": _copy_bytes(x.q, x.k, x.v, *(x.dout,) * (x.dout is not None))}
    if x.alibi_slopes is not None:
        mask = None if x.mask is None else x.mask.view(torch.uint8)
        found["bias_mask"] = BiasMask(
            _pointer(x.alibi_slopes),
            _pointer(mask),
            slope_strides(x.alibi_slopes, x),
            _score_strides(mask),
            ALIBI_SLOPES,
            int(x.options.get("softcap_at") == "biased"),
        )
    if x.varlen and x.bias is not None:
        found["bias_mask"] = ragged_bias(given, x.bias)
    if x.varlen:
        edges = edges_of(x)
        found |= {"cu_seqlens_q": _pointer(edges[0]), "cu_seqlens_k": _pointer(edges[1]), "num_seqs": len(edges[0]) - 1}
    return found


def of_heads(x: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """Packed rows as the library takes them: [H, T, D]."""
    return rows.transpose(0, 1) if x.varlen else rows


def forward(kernels, x: Inputs, room: int, seed: int) -> dict[str, torch.Tensor]:
    out = of_heads(x, poisoned(x.q, x.v.shape[-1]))
    lse = torch.full(out.shape[:-1], torch.nan)
    p = ForwardParams(
        **parameters(replace(x, dout=None), room), out=_pointer(out), lse=_pointer(lse), out_strides=_strides(out)
    )
    assert emulate(kernels(x.q.dtype).emulate_forward, p, x.q.dtype == torch.bfloat16, seed)
    return {"out": of_heads(x, out), "lse": lse}


def backward(
    kernels,
    x: Inputs,
    made: dict[str, torch.Tensor],
    room: int,
    deterministic: bool,
    seed: int,
    need: str = "qkv",
    gives_dout: bool = True,
) -> dict:
    shared, x = x.bias, with_own_heads(x)
    found = {f"d{name}": of_heads(x, poisoned(getattr(x, name))) for name in need}
    out, dout, lse = of_heads(x, made["out"]), of_heads(x, x.dout), made["lse"].contiguous()
    p = parameters(x, room) | {"max_seqlen_k": -1, "deterministic": int(deterministic)}
    for name, gradient in found.items():
        p |= {name: _pointer(gradient), f"{name}_strides": _strides(gradient)}
    dbias = {}
    if x.bias is not None and x.bias_grad:
        dbias = {"dbias": torch.full(x.bias.shape, torch.nan, dtype=x.bias.dtype)}
        p |= {"dbias": _pointer(dbias["dbias"]), "dbias_strides": _score_strides(dbias["dbias"])}
        if x.varlen:
            p["dbias_strides"] = ragged_bias(x, dbias["dbias"]).bias_strides
    sums = torch.full(lse.shape, torch.nan)
    if learns_slopes(x):
        p |= {"dbias": _pointer(sums)}
    p |= {"out": _pointer(out), "out_strides": _strides(out), "lse": _pointer(lse)}
    if gives_dout:
        p |= {"dout": _pointer(dout), "dout_strides": _strides(dout)}
    p |= {"dlse": _pointer(x.dlse), "dlse_strides": _strides(x.dlse, last=False)}
    params, library = BackwardParams(**p), kernels(x.q.dtype)
    size = library.workspace(c.byref(params))
    workspace = torch.full((size + 64 + 256,), 255, dtype=torch.uint8)
    params.workspace = (workspace.data_ptr() + 255) // 256 * 256
    assert emulate(library.emulate_backward, params, x.q.dtype == torch.bfloat16, seed)
    if learns_slopes(x):
        dbias = slope_gradient(x, sums)
    if "dbias" in dbias and x.bias.shape != shared.shape:
        dbias = {"dbias": dbias["dbias"].sum(0, keepdim=True).to(shared.dtype)}
    return {name: of_heads(x, gradient) for name, gradient in found.items()} | dbias


def learns_slopes(x: Inputs) -> bool:
    return x.alibi_slopes is not None and x.alibi_grad


def slope_gradient(x: Inputs, sums: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of slopes from the kernels' sums over keys."""
    given = Tensors(x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens_q, alibi_slopes=x.alibi_slopes)
    return {"dalibi_slopes": learnt_slopes.of_rows(sums, given)}


def learning_slopes(x: Inputs) -> Inputs:
    """The call, whose slopes are learnt if it has any."""
    return replace(x, alibi_grad=x.alibi_slopes is not None)


def judge(kernels, case: Case, deterministic: bool = False, need: str = "qkv") -> None:
    x = learning_slopes(make_inputs(case))
    judged, room = Judge(x), 228 if max(x.q.shape[-1], x.v.shape[-1]) > 128 else ROOMS[case.seed % 3]
    rows = {n: y.resolve_neg() for n in ("q", "k", "v", "dout") if (y := getattr(x, n)) is not None}
    x = replace(x, **{n: y if y.stride(-1) == 1 else y.contiguous() for n, y in rows.items()})
    if x.varlen and x.bias is not None and x.bias.stride(-1) != 1:
        x = replace(x, bias=x.bias.contiguous())
    if case.mask_view == "padded":
        x = replace(x, mask=row_pitch.padded(x.mask))
    results = forward(kernels, x, room, case.seed)
    if x.dout is not None:
        results |= backward(kernels, x, results, room, deterministic, case.seed, need)
    judged.require(results)


DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256))
KINDS = {
    "plain": {},
    "lower right": dict(causal=True, align="lower_right"),
    "window": dict(window=(40, 20)),
    "softcap": dict(softcap=7.0),
    "softcap of the sum": dict(softcap=7.0, align="lower_right"),
    "scale too small to divide by": dict(scale=1e-7),
    "negative scale": dict(scale=-0.1),
    "pairs hidden": dict(mask_shape=(70, 150)),
    "pairs hidden, at a pitch of 16 bytes": dict(mask_shape=(70, 150), mask_view="padded"),
    "keys hidden": dict(mask_shape=(2, 1, 1, 150), mask_kind="keys"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [*((dims, ("bfloat16", "float16")[dims[0] % 64 != 0]) for dims in DIMS)]
    + [(dims, "float32") for dims in ((16, 16), (32, 20), (64, 64), (128, 128))]
    + [pytest.param((256, 256), "float32", marks=pytest.mark.slow)],
)
def test_alibi_of_every_tile(kernels, dims, dtype, kind):
    """Tiles that are cut, several of them, in both directions; both ways to dq."""
    given = KINDS[kind]
    variant = Variant(
        dtype, *dims, alibi=True, lse_grad=True, window="window" in given or "causal" in given,
        softcap="softcap" in given, mask="mask_shape" in given, flipped=given.get("scale", 1) < 0, caps_bias=kind == "softcap of the sum",
    )  # fmt: skip
    case = Case(variant, sum(dims) // 32, lead=(2,), heads_k=1, group=2, seq_q=70, seq_k=150, **given)
    for deterministic in (False, True):
        judge(kernels, case, deterministic)


PAIRS = (2, 2, 70, 150)
# Calls whose softcap bounds the bias.
CAPPED = {
    "every score": dict(bias_shape=PAIRS),
    "every score, heads innermost": dict(bias_shape=PAIRS, bias_view="linear"),
    "every score, at a pitch": dict(bias_shape=PAIRS, bias_view="padded"),
    "shared": dict(bias_shape=(70, 150)),
    "of keys, keys hidden": dict(bias_shape=(2, 1, 1, 150), mask_shape=(2, 1, 1, 150), mask_kind="keys"),
    "of queries, pairs hidden": dict(bias_shape=(70, 1), mask_shape=(70, 150)),
    "lower right": dict(bias_shape=PAIRS, causal=True, align="lower_right"),
    "window, pairs hidden": dict(bias_shape=(1, 2, 70, 150), window=(40, 20), mask_shape=(2, 1, 70, 150)),
    # A small softcap: hidden keys would have probabilities like those of others.
    "-inf hides": dict(bias_shape=PAIRS, bias_holes=True, softcap=0.5),
    "shared, -inf hides": dict(bias_shape=(70, 150), bias_holes=True, softcap=0.5),
    "the lowest number does not hide": dict(bias_shape=PAIRS, bias_number="dtype_min"),
    "no scale": dict(bias_shape=PAIRS, scale=0.0),
    "no scale, shared, keys hidden": dict(bias_shape=(70, 150), scale=0.0, mask_shape=(2, 1, 1, 150), mask_kind="keys"),
    "negative scale": dict(bias_shape=(70, 150), scale=-0.1),
    "scale too small to divide by": dict(bias_shape=PAIRS, scale=1e-7),
}


def capped_case(dims, dtype, kind, **others) -> Case:
    given = CAPPED[kind]
    variant = Variant(
        dtype, *dims, bias="pair", bias_grad=True, bias_float=others.pop("bias_float", False), softcap=True, caps_bias=True, lse_grad=True,
        window="window" in given or "causal" in given, mask="mask_shape" in given, flipped=given.get("scale", 1) <= 0,
        dropout="dropout_p" in others,
    )  # fmt: skip
    sizes = dict(lead=(2,), heads_k=1, group=2, seq_q=70, seq_k=150, softcap=3.0)
    return Case(variant, sum(dims) // 32, **(sizes | given | others))


@pytest.mark.parametrize("kind", CAPPED)
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [*((dims, ("bfloat16", "float16")[dims[0] % 64 != 0]) for dims in (*DIMS, (36, 20)))]
    + [(dims, "float32") for dims in ((16, 16), (32, 20), (64, 64), (128, 128))],
)
def test_softcap_of_biased_scores(kernels, dims, dtype, kind):
    """Biases of every shape, and both ways to dq."""
    for bias_float in (False, True)[: 1 + (dtype != "float32")]:
        judge(kernels, capped_case(dims, dtype, kind, bias_float=bias_float), deterministic=bias_float)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("kind", ("every score", "shared", "-inf hides"))
def test_some_gradients_of_biased_scores(kernels, kind, dtype):
    """dq and dbias alone: the kernels of queries, and that of the bias."""
    x = make_inputs(capped_case((64, 64), dtype, kind))
    made = forward(kernels, x, 164, 0)
    every = backward(kernels, x, made, 164, True, 0)
    some = backward(kernels, x, made, 164, True, 0, need="q")
    Judge(x).require(made | every | some)


@pytest.mark.parametrize("sizes", ((20, 30), (70, 32), (70, 150), (300, 200)))
@pytest.mark.parametrize("own", (True, False), ids=("every score", "shared"))
def test_biased_scores_of_short_rows_of_keys(kernels, sizes, own):
    """The fp32 backward in one pass."""
    for dims in ((16, 16), (32, 32)):
        variant = Variant("float32", *dims, bias="pair", bias_grad=True, softcap=True, caps_bias=True, mask=True)
        shapes = dict(bias_shape=(2, 2, *sizes) if own else sizes, mask_shape=sizes, bias_holes=own)
        case = Case(variant, 2, lead=(2,), heads_k=2, seq_q=sizes[0], seq_k=sizes[1], softcap=0.5, **shapes)
        judge(kernels, case)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dims", ((32, 32), (64, 48), (20, 36), (128, 128)))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_alibi_of_packed_calls(kernels, dtype, dims, causal):
    """Slopes of each sequence; empty sequences, and rows of none."""
    variant = Variant(dtype, *dims, alibi=True, varlen=True, window=causal)
    lens = dict(lens_q=(33, 0, 70, 5), lens_k=(40, 9, 0, 150))
    for seed in range(3):
        case = Case(variant, seed, heads_k=2, group=2, causal=causal, align="lower_right", **lens)
        judge(kernels, case, deterministic=seed == 1)


LENS = dict(lens_q=(33, 0, 70, 5), lens_k=(40, 9, 0, 150))
PAIRS_OF_LENS = sum(a * b for a, b in zip(*LENS.values(), strict=True))
RAGGED = {
    "pairs of every head": dict(bias_shape=(4, PAIRS_OF_LENS)),
    "pairs that heads share": dict(bias_shape=(1, PAIRS_OF_LENS)),
    "pairs, -inf hides": dict(bias_shape=(4, PAIRS_OF_LENS), bias_holes=True),
    "pairs, causal": dict(bias_shape=(4, PAIRS_OF_LENS), causal=True, align="lower_right"),
    "pairs, window": dict(bias_shape=(1, PAIRS_OF_LENS), window=(40, 20)),
    "pairs, softcap of the sum": dict(bias_shape=(4, PAIRS_OF_LENS), softcap=3.0),
    "pairs, softcap of the scores": dict(bias_shape=(4, PAIRS_OF_LENS), softcap=3.0),
    "keys of every head": dict(bias_shape=(4, 199)),
    "keys, causal": dict(bias_shape=(1, 1, 199), causal=True, align="upper_left"),
    "keys, scale too small to divide by": dict(bias_shape=(1, 199), scale=1e-7),
}


@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [*((dims, ("bfloat16", "float16")[dims[0] % 64 != 0]) for dims in (*DIMS, (36, 20)))]
    + [(dims, "float32") for dims in ((16, 16), (32, 20), (64, 64), (128, 128))],
)
def test_bias_of_packed_calls(kernels, dtype, dims, kind):
    """Blocks of each sequence, or a number of each key; empty sequences, and rows of none."""
    given = RAGGED[kind]
    below = kind == "pairs, softcap of the scores"
    for bias_float in (False, True)[: 1 + (dtype != "float32")]:
        variant = Variant(
            dtype, *dims, bias="pair" if "pairs" in kind else "key", bias_float=bias_float, bias_grad="pairs" in kind and not below,
            varlen=True, softcap="softcap" in given, caps_bias="sum" in kind, window="window" in given or "causal" in given,
            flipped="scale" in given,
        )  # fmt: skip
        case = Case(variant, sum(dims) // 32 + bias_float, heads_k=2, group=2, **(LENS | given))
        judge(kernels, case, deterministic=bias_float)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_blocks_that_would_leave_the_bias(kernels, dtype):
    """Their sequences are computed as those without keys; nothing outside is read or written."""
    variant = Variant(dtype, 64, 64, bias="pair", bias_grad=True, varlen=True)
    x = make_inputs(Case(variant, 3, heads_k=2, group=2, bias_shape=(4, PAIRS_OF_LENS), **LENS))
    starts = block_starts(LENS["lens_q"], LENS["lens_k"])
    right = starts.clone()
    try:
        for wrong in (-1, PAIRS_OF_LENS - 5, 1 << 62):
            starts[3] = wrong
            made = forward(kernels, x, 164, 0)
            assert not made["out"][103:].any() and (made["lse"][:, 103:] == -torch.inf).all()
            found = backward(kernels, x, made, 164, False, 0) | {}
            for name in ("dq", "dk", "dv"):
                own = found[name][-5 if name == "dq" else -150 :]
                assert not own.any(), name
            assert not found["dbias"][:, -750:].any()
    finally:
        starts.copy_(right)


@pytest.mark.parametrize("sizes", ((20, 30), (70, 32), (70, 150), (300, 200)))
@pytest.mark.parametrize("mask", (False, True))
def test_alibi_of_short_rows_of_keys(kernels, sizes, mask):
    """The fp32 backward in one pass."""
    for dims in ((16, 16), (32, 32)):
        variant = Variant("float32", *dims, alibi=True, mask=mask, softcap=mask)
        shapes = dict(mask_shape=sizes, softcap=5.0) if mask else dict(causal=True, align="lower_right")
        judge(kernels, Case(variant, 2, lead=(2,), heads_k=2, seq_q=sizes[0], seq_k=sizes[1], **shapes))


@pytest.mark.parametrize("dims", ((64, 64), (24, 40)))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_slopes_of_any_sign_and_size(kernels, dtype, dims):
    case = Case(Variant(dtype, *dims, alibi=True), 4, lead=(1, 2), rank=5, heads_k=2, seq_q=40, seq_k=90)
    x = make_inputs(case)
    for values in ((0.0, -0.03), (3e4, 1e-30)):
        given = learning_slopes(replace(x, alibi_slopes=torch.tensor(values)))
        results = forward(kernels, given, 164, 0)
        Judge(given).require(results | backward(kernels, given, results, 164, False, 1))


@pytest.mark.parametrize("shape", ((4,), (1,), (2, 4), (2, 1), (1, 4)))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_the_gradient_of_slopes_that_broadcast(kernels, dtype, shape):
    """Alone: neither rows of queries nor of keys have gradients."""
    variant = Variant(dtype, 64, 64, alibi=True, window=True, lse_grad=True)
    x = make_inputs(
        Case(variant, 3, lead=(2,), heads_k=2, group=2, seq_q=70, seq_k=150, causal=True, align="lower_right")
    )
    slopes = torch.linspace(0.01, 0.3, math.prod(shape)).reshape(shape)
    x = learning_slopes(replace(x, alibi_slopes=slopes))
    made = forward(kernels, x, 164, 0)
    every = backward(kernels, x, made, 164, False, 0)
    alone = backward(kernels, x, made, 164, True, 1, need="")
    assert list(alone) == ["dalibi_slopes"]
    Judge(x).require(made | every | alone)
    assert torch.equal(alone["dalibi_slopes"], every["dalibi_slopes"])


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_the_gradient_of_lse_alone_reaches_the_slopes(kernels, dtype):
    x = learning_slopes(
        make_inputs(Case(Variant(dtype, 64, 64, alibi=True, lse_grad=True), 2, heads_k=2, seq_q=70, seq_k=150))
    )
    made = forward(kernels, x, 164, 0)
    given = replace(x, dout=torch.zeros_like(x.dout))
    without = backward(kernels, given, made, 164, False, 0, need="", gives_dout=False)
    Judge(given).require(made | backward(kernels, given, made, 164, False, 0) | without)


@pytest.mark.parametrize("part", range(3))
def test_generated_calls(kernels, part):
    pool = [
        Variant(dtype, *dims, alibi=True, window=window, mask=mask, lse_grad=mask, softcap=capped, caps_bias=capped)
        for dtype in ("bfloat16", "float16", "float32")
        for dims in ((40, 64), *DIMS[:4])
        for window in (False, True)
        for mask in (False, True)
        for capped in (False, True)
    ]
    pool += [
        Variant(dtype, *dims, bias=bias, bias_grad=bias == "pair", bias_float=True, varlen=True, window=window)
        for dtype in ("bfloat16", "float16", "float32")
        for dims in ((40, 64), *DIMS[:4])
        for window in (False, True)
        for bias in ("pair", "key")
    ]
    for case in generate(70 + part, 8, pool, score_limit=1 << 15):
        x = make_inputs(case)
        if x.q.numel() == 0 or x.k.numel() == 0:
            continue  # no launcher gets a call without a score
        if x.varlen or (3 <= x.q.dim() <= 5 and x.q.shape[:-3] == x.k.shape[:-3] == x.v.shape[:-3]):
            judge(kernels, case, deterministic=case.seed % 2 == 1)


FAULTS = {
    "a distance with a sign": ("../core/alibi.cuh", "fmaf(-slope, fabsf(ahead), s)", "fmaf(-slope, ahead, s)"),
    "the keys of other lanes, in the backward": ("../sm80/bwd/bias_mask.cuh", "(m * 2 + e / 2);", "(m * 2);"),
    "a diagonal that ends elsewhere": (
        "../sm80/bwd/bias_mask_kernel.cuh",
        "(p.lower_right != 0 ? keys - queries : 0)",
        "0",
    ),
    "a slope's gradient of the keys of other lanes": (
        "../core/alibi.cuh",
        "i * 8 - key_of(j / 2, j % 2)",
        "i * 8 - key_of(j / 2, 0)",
    ),
    "a slope's gradient of one row in two": ("../core/alibi.cuh", "i * 8 < left", "i * 16 < left"),
    "a slope's gradient behind the softcap": (
        "../sm80/dq/kernel.cuh",
        "capped || !sums_slopes(), capped",
        "true, capped",
    ),
    "a cap before the bias": (
        "../sm80/bwd/bias_mask_kernel.cuh",
        "if (capped == (turn != 0))",
        "if (turn == 0)",
    ),
    "a cap before the bias, in the forward": (
        "../sm80/fwd/bias_mask_kernel.cuh",
        "const bool capped = p.bias_mask.capped != 0;",
        "const bool capped = false;",
    ),
    "a bias gradient without the slope": (
        "../sm80/dbias/kernel.cuh",
        "if (capped) dp[",
        "if (false) dp[",
    ),
    "what -inf hides is capped": ("../core/score_mod.cuh", "hides && x == -INFINITY ? x : ", ""),
    "the block of the next sequence": ("../core/ragged_bias.cuh", "(starts + sequence)", "(starts + sequence + 1)"),
    "rows as long as all keys": (
        "../sm80/fwd/bias_mask_load.cuh",
        "batch0 != 0, sequence.seq_k)",
        "batch0 != 0, p.seq_k)",
    ),
    "the slope of the next sequence": ("../core/alibi.cuh", "(segment - 1) * p", "(segment % num_seqs) * p"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    library = build(tmp_path, "sm80", FAULTS[fault])
    library.workspace.restype = c.c_int64
    packed, ragged = "sequence" in fault or "rows" in fault, "block" in fault or "rows" in fault
    causal = "sign" not in fault  # where no key is ahead of its query, its distance has one sign
    variant = Variant("bfloat16", 64, 64, alibi=True, window=causal, varlen=packed)
    sizes = dict(lens_q=(33, 40), lens_k=(40, 90)) if packed else dict(lead=(2,), seq_q=70, seq_k=150)
    if ragged:
        variant = replace(variant, alibi=False, bias="pair", bias_float=True)
        sizes["bias_shape"] = (2, 33 * 40 + 40 * 90)
    case = Case(variant, heads_k=2, causal=causal, align="lower_right", **sizes)
    if "behind the softcap" in fault:
        case = replace(case, variant=replace(variant, softcap=True), softcap=3.0)
    elif "cap" in fault or "bias gradient" in fault:
        case = capped_case((64, 64), "bfloat16", "-inf hides" if "-inf" in fault else "shared")
    assert is_found(lambda seed: judge(lambda dtype: library, replace(case, seed=seed)), range(12))
