"""The kernels of csrc/sm80 with dropout, forward and backward, run on the host (emulated.py) from the launcher to the stores, by the judge of
every backend, and by flashsci.dropout_mask bit by bit."""

from __future__ import annotations

import ctypes as c
from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.api.dropout import keep_threshold
from flashsci.testing import Case, Inputs, Judge, Variant, generate, make_inputs
from tests.cpu.emulator.emulated import build, emulate, is_found
from tests.cpu.emulator.test_sm80_kernel import (
    ROOMS,
    learning_slopes,
    learns_slopes,
    of_heads,
    parameters,
    slope_gradient,
)
from tests.cpu.emulator.test_small_kernel import poisoned
from tools.kernels.launchers import BackwardParams, Dropout, ForwardParams, _pointer, _score_strides, _strides

# Those of each tile; 48 columns are padded, and rows of 36 take no 16-byte copies.
DIMS = ((32, 32), (64, 48), (64, 64), (96, 96), (128, 128), (36, 64))


def built(folder, *changes) -> c.CDLL:
    found = build(folder, "sm80_dropout", *changes)
    found.workspace.restype = c.c_int64
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return built(tmp_path_factory.mktemp("sm80_dropout"))


def give(library: c.CDLL, x: Inputs) -> None:
    p = x.options["dropout_p"]
    library.drop(c.byref(Dropout(_pointer(x.dropout_seed), keep_threshold(p), 1 / (1 - p))))


def forward(library: c.CDLL, x: Inputs, room: int, seed: int) -> dict[str, torch.Tensor] | None:
    """None where the kernels leave the call to others."""
    give(library, x)
    out = of_heads(x, poisoned(x.q, x.v.shape[-1]))
    lse = torch.full(out.shape[:-1], torch.nan)
    given = parameters(replace(x, dout=None), room)
    p = ForwardParams(**given, out=_pointer(out), lse=_pointer(lse), out_strides=_strides(out))
    if not emulate(library.emulate_forward, p, x.q.dtype == torch.bfloat16, seed):
        return None
    return {"out": of_heads(x, out), "lse": lse}


def backward(
    library: c.CDLL, x: Inputs, made: dict, room: int, deterministic: bool, seed: int, need: str = "qkv"
) -> dict:
    give(library, x)
    found = {f"d{name}": of_heads(x, poisoned(getattr(x, name))) for name in need}
    out, dout, lse = of_heads(x, made["out"]), of_heads(x, x.dout), made["lse"].contiguous()
    p = parameters(x, room) | {"max_seqlen_k": -1, "deterministic": int(deterministic)}
    for name, gradient in found.items():
        p |= {name: _pointer(gradient), f"{name}_strides": _strides(gradient)}
    if x.bias is not None and x.bias_grad:
        dbias = torch.full(x.bias.shape, torch.nan, dtype=x.bias.dtype)
        p |= {"dbias": _pointer(dbias), "dbias_strides": _score_strides(dbias)}
    sums = torch.full(lse.shape, torch.nan)
    if learns_slopes(x):
        p |= {"dbias": _pointer(sums)}
    p |= {"out": _pointer(out), "out_strides": _strides(out), "lse": _pointer(lse)}
    p |= {"dout": _pointer(dout), "dout_strides": _strides(dout)}
    p |= {"dlse": _pointer(x.dlse), "dlse_strides": _strides(x.dlse, last=False)}
    params = BackwardParams(**p)
    size = library.workspace(c.byref(params))
    workspace = torch.full((size + 64 + 256,), 255, dtype=torch.uint8)
    params.workspace = (workspace.data_ptr() + 255) // 256 * 256
    assert emulate(library.emulate_backward, params, x.q.dtype == torch.bfloat16, seed)
    found = {name: of_heads(x, gradient) for name, gradient in found.items()}
    if learns_slopes(x):
        found |= slope_gradient(x, sums)
    return found | ({"dbias": dbias} if x.bias is not None and x.bias_grad else {})


def judge(library: c.CDLL, case: Case, deterministic: bool = False, need: str = "qkv") -> None:
    x = learning_slopes(make_inputs(case))
    judged, room = Judge(x), ROOMS[case.seed % 3]
    rows = {n: y.resolve_neg() for n in ("q", "k", "v", "dout") if (y := getattr(x, n)) is not None}
    x = replace(x, **{n: y if y.stride(-1) == 1 else y.contiguous() for n, y in rows.items()})
    results = forward(library, x, room, case.seed)
    if x.dout is not None:
        results |= backward(library, x, results, room, deterministic, case.seed, need)
    judged.require(results)


KINDS = {
    "plain": {},
    "lower right": dict(causal=True, align="lower_right"),
    "window": dict(window=(40, 20)),
    "softcap": dict(softcap=7.0),
    "pairs hidden": dict(mask_shape=(70, 150)),
    "bias of every score": dict(bias_shape=(2, 2, 70, 150)),
    "shared bias": dict(bias_shape=(70, 150)),
    "softcap of a bias of every score": dict(bias_shape=(2, 2, 70, 150), softcap=3.0),
    "softcap of a shared bias": dict(bias_shape=(70, 150), softcap=0.5, bias_holes=True),
    "bias of keys": dict(bias_shape=(2, 1, 1, 150), mask_shape=(2, 1, 1, 150), mask_kind="keys"),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
def test_every_tile(library, dims, kind):
    """Tiles that are cut, several of them, in both directions; both ways to dq."""
    given = KINDS[kind]
    biased = "bias_shape" in given
    variant = Variant(
        ("bfloat16", "float16")[dims[0] % 64 != 0], *dims, dropout=True, lse_grad=True, window="window" in given or "causal" in given,
        softcap="softcap" in given, mask="mask_shape" in given, bias="pair" if biased else None, bias_grad=biased,
        caps_bias=biased and "softcap" in given,
    )  # fmt: skip
    case = Case(variant, sum(dims) // 32, lead=(2,), heads_k=1, group=2, seq_q=70, seq_k=150, dropout_p=0.25, **given)
    for deterministic in (False, True):
        judge(library, case, deterministic)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dims", ((32, 32), (64, 48), (20, 36), (128, 128)))
def test_packed_calls(library, dims, causal):
    """Entries of each sequence; empty sequences, and rows of none."""
    variant = Variant("bfloat16", *dims, dropout=True, varlen=True, window=causal)
    lens = dict(lens_q=(33, 0, 70, 5), lens_k=(40, 9, 0, 150))
    for seed in range(3):
        case = Case(variant, seed, heads_k=2, group=2, dropout_p=0.5, causal=causal, align="lower_right", **lens)
        judge(library, case, deterministic=seed == 1)


@pytest.mark.parametrize("half", (0, 1))
@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("masked", (False, True), ids=("plain", "mask"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_the_entries_are_those_of_dropout_mask(library, dtype, masked, packed, half):
    """A value for each key, in its own column: an output is zero where its entry is dropped, and nowhere else."""
    if packed and masked:
        return  # packed calls have no mask
    lens_q, lens_k = ((150, 3, 67), (256, 1, 130)) if packed else ((150,), (251,))
    p, seed, dim = 0.3, torch.tensor([-(1 << 61) + 12345, (1 << 35) - 3]), 128
    heads, lead = 3, () if packed else (2, 2)
    tokens_q, tokens_k = sum(lens_q), sum(lens_k)
    q, k = (0.1 * torch.randn(*lead, heads, n, 64, dtype=dtype) for n in (tokens_q, tokens_k))
    # The columns are those of one half of the keys.
    identity = torch.cat([torch.eye(n, 2 * dim)[:, half * dim :][:, :dim] for n in lens_k]).to(dtype)
    v = identity.expand(*lead, heads, tokens_k, dim)
    options = {"dropout_p": p}
    if packed:
        edges = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lens_q, lens_k)]
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        x = Inputs(q, k, v, cu_seqlens_q=edges[0], cu_seqlens_k=edges[1], dropout_seed=seed, options=options)
    else:
        mask = torch.ones(tokens_q, tokens_k, dtype=torch.bool) if masked else None
        x = Inputs(q, k, v, mask=mask, dropout_seed=seed, options=options)
    out = of_heads(x, forward(library, x, ROOMS[half], 3)["out"])
    for n, (of_q, of_k) in enumerate(zip(out.split(lens_q, -2), lens_k, strict=True)):
        kept = flashsci.dropout_mask(seed, p, (*of_q.shape[:-1], of_k), batch_offset=n if packed else 0)
        kept = torch.nn.functional.pad(kept, (0, 2 * dim - of_k))[..., half * dim :][..., :dim]
        assert torch.equal(of_q != 0, kept)


def test_wider_heads_are_left_to_others(library):
    case = Case(Variant("bfloat16", 136, 64, dropout=True), heads_k=2, seq_q=9, seq_k=9, dropout_p=0.5)
    assert forward(library, make_inputs(case), 228, 0) is None


def test_gradients_alone(library):
    """Each gradient without the others, which other kernels then compute."""
    variant = Variant("float16", 64, 64, dropout=True)
    for need in "qkv":
        judge(library, Case(variant, 3, lead=(2,), heads_k=2, seq_q=70, seq_k=150, dropout_p=0.2), need=need)


def test_ten_percent_of_large_and_small_probabilities(library):
    """A p whose threshold and scale are rounded."""
    for p in (1e-6, 0.1, 0.9):
        judge(library, Case(Variant("bfloat16", 64, 64, dropout=True), 5, heads_k=2, seq_q=140, seq_k=90, dropout_p=p))


def test_alibi_is_a_bias_of_dense_calls(library):
    for dims in ((64, 64), (128, 96)):
        case = Case(
            Variant("bfloat16", *dims, alibi=True, dropout=True),
            1,
            lead=(2,),
            heads_k=2,
            seq_q=70,
            seq_k=150,
            dropout_p=0.5,
        )
        for deterministic in (False, True):
            judge(library, case, deterministic)
    packed = Case(Variant("bfloat16", 64, 64, alibi=True, dropout=True, varlen=True), 1, heads_k=2, lens_q=(9,), lens_k=(9,), dropout_p=0.5)  # fmt: skip
    assert forward(library, make_inputs(packed), 228, 0) is None


@pytest.mark.parametrize("part", range(4))
def test_generated_calls(library, part):
    pool = [
        Variant(dtype, *dims, dropout=True, window=window, mask=mask, lse_grad=mask, softcap=window and mask, bias=bias, bias_grad=bias is not None)
        for dtype in ("bfloat16", "float16")
        for dims in ((40, 64), *DIMS)
        for window in (False, True)
        for mask in (False, True)
        for bias in (None, "pair", "key")
    ]  # fmt: skip
    for case in generate(170 + part, 8, pool, score_limit=1 << 15):
        x = make_inputs(case)
        if x.q.numel() == 0 or x.k.numel() == 0:
            continue  # no launcher gets a call without a score
        if 3 <= x.q.dim() <= 5 and x.q.shape[:-3] == x.k.shape[:-3] == x.v.shape[:-3]:
            judge(library, case, deterministic=case.seed % 2 == 1)


FAULTS = {
    "the word of another key": ("../core/dropout.cuh", "kept >> bit_of_element(b, i % 4) & 1)) p[b", "kept >> bit_of_element(b, i % 4 ^ 1) & 1)) p[b"),
    "the row of the other lane": ("../core/dropout.cuh", "lane & 1 ? 0x3715 : 0x6240", "lane & 1 ? 0x6240 : 0x3715"),
    "blocks in another order": ("../core/dropout.cuh", "lane & 2 ? 0x3276 : 0x5410", "lane & 2 ? 0x7632 : 0x1054"),
    "a round less": ("../core/dropout.cuh", "round < 7", "round < 6"),
    "the number of the other half": ("../core/dropout.cuh", "x[d] << 16 >= threshold", "x[d] >= threshold"),
    "the query of another column": ("../core/dropout.cuh", "query + n * 8 + odd", "query + 2 * n + odd"),
    "keys of the other lane": ("../core/dropout.cuh", "odd ? 0x3276 : 0x5410", "odd ? 0x5410 : 0x3276"),
    "a kept gradient of what is dropped": ("../sm80/bwd/bias_mask.cuh", "if (!stays(kept, i / 4, n, i % 4)) dp[i", "if (false) dp[i"),
    "delta of another scale": ("../sm80/bwd/preprocess.cuh", "(1.f / ... / dropout.keep_scale)", "(2.f / ... / dropout.keep_scale)"),
    "entries of the first head": ("../sm80/bwd/bias_mask_kernel.cuh", "stream + member", "stream"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    library = built(tmp_path, FAULTS[fault])
    case = Case(Variant("bfloat16", 64, 64, dropout=True), lead=(2,), heads_k=1, group=2, seq_q=70, seq_k=150, dropout_p=0.25)  # fmt: skip
    assert is_found(lambda seed: judge(library, replace(case, seed=seed)), range(4))
