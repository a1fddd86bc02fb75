"""Attention on 8-bit floats: what it means, what it refuses, generated calls against the fp64 oracle, and the judge itself."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.backends import cuda, reference_fp8
from flashsci.backends.cuda import fp8 as cuda_fp8
from flashsci.call.fp8_ops import FP8Scalars, FP8Tensors
from flashsci.call.problem import Problem
from flashsci.choice import preferences
from flashsci.testing import FP8Case, FP8Inputs, FP8Variant, judge_fp8, make_fp8_inputs
from tools.bench import fp8_sums

hypothesis = pytest.importorskip("hypothesis")

E4M3 = torch.float8_e4m3fn
DIM = 16


def call(batch=(2,), heads=(4, 2), rows=(70, 200), **changes):
    """Arguments of a small dense call with a scale for each block of 64."""
    given = {}
    for name, count, length in zip("qkv", (heads[0], heads[1], heads[1]), (rows[0], rows[1], rows[1]), strict=True):
        given[name] = (30 * torch.randn(*batch, count, length, DIM)).to(E4M3)
        given[f"{name}_scale"] = (0.5 + torch.rand(*batch, count, -(-length // 64))) / 30
    return given | changes


def run(given, **options):
    tensors = [given[n] for n in "qkv"]
    return flashsci.attention(*tensors, **{n: x for n, x in given.items() if n not in "qkv"}, **options)


def row_by_row(given, causal=False, window=(None, None), align="upper_left", softcap=None, scale=DIM**-0.5):
    """Every row by itself, key after key, from the definition, in fp64."""
    wide = {}
    for name in "qkv":
        x, s = given[name].double(), given[f"{name}_scale"].double()
        wide[name] = torch.stack([x[..., i, :] * s[..., i // 64, None] for i in range(x.shape[-2])], -2)
    q, k, v = wide["q"], *(wide[n].repeat_interleave(2, -3) for n in "kv")
    rows, keys = q.shape[-2], k.shape[-2]
    shift = keys - rows if align == "lower_right" else 0
    out, lse = [], []
    for i in range(rows):
        right = 0 if causal else window[1]
        seen = [
            j
            for j in range(keys)
            if (right is None or j <= i + shift + right) and (window[0] is None or j >= i + shift - window[0])
        ]
        s = scale * (k[..., seen, :] @ q[..., i, :, None]).squeeze(-1)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        lse.append(s.logsumexp(-1))
        out.append((torch.exp(s - lse[-1][..., None])[..., None] * v[..., seen, :]).sum(-2))
    return torch.stack(out, -2), torch.stack(lse, -1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "align": "lower_right"},
        {"window": (7, 2), "align": "lower_right"},
        {"softcap": 2.0, "scale": 0.5},
    ],
)
def test_means_what_it_says(options):
    given = call()
    out, lse = run(given, return_lse=True, out_dtype=torch.float16, **options)
    wanted, sums = row_by_row(given, **options)
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), sums, atol=1e-5, rtol=1e-5)


def test_every_kind_of_scale_is_the_same_call():
    """Of one number, of heads, of blocks of 64 and of 128, none at all, and leading dims that broadcast or are many."""
    given = call(rows=(130, 200))
    plain = {n: given[n] for n in "qkv"}
    one = dict.fromkeys(("q_scale", "k_scale", "v_scale"), torch.tensor(0.04))
    wanted = run(plain | one)
    shapes = {n: plain[n].shape for n in plain}
    for blocks in (None, 64, 128):
        tail = {n: () if blocks is None else (-(-s[-2] // blocks),) for n, s in shapes.items()}
        scales = {f"{n}_scale": torch.full((*s[:-2], *tail[n]), 0.04) for n, s in shapes.items()}
        assert torch.equal(run(plain | scales), wanted)
    unscaled = run(plain, scale=DIM**-0.5 * 0.04**2, out_dtype=torch.float16)
    torch.testing.assert_close(unscaled.float() * 0.04, wanted.float(), atol=2e-3, rtol=1e-2)
    assert run(plain).dtype == torch.bfloat16

    blocks = call(batch=(2, 3, 2))
    q, q_scale = blocks["q"], blocks["q_scale"]
    shared = {n: blocks[n][0, 0, 0] for n in ("k", "v", "k_scale", "v_scale")}
    found, lse = run(dict(q=q, q_scale=q_scale, **shared), return_lse=True)
    assert found.shape == q.shape and lse.shape == q.shape[:-1]
    for at in itertools.product(range(2), range(3), range(2)):
        alone = run(dict(q=q[at], q_scale=q_scale[at], **shared))
        assert torch.equal(found[at], alone)


def test_one_head():
    given = call()
    tensors = {n: x[0, 0] for n, x in given.items()}
    assert torch.equal(run(tensors)[None], run({n: x[:1, :1] for n, x in given.items()})[0])


def test_packed_agrees_with_dense():
    """Blocks are counted from the first row of each sequence."""
    lens = (70, 0, 130, 1, 64)
    edges = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    total, sequences = int(edges[-1]), len(lens)
    for block in (64, 128, None):
        count = sequences if block is None else total // block + sequences
        given = {}
        for name, heads in zip("qkv", (4, 2, 2), strict=True):
            given[name] = (30 * torch.randn(total, heads, DIM)).to(E4M3)
            given[f"{name}_scale"] = (0.5 + torch.rand(count, heads)) / 30
        tensors = [given.pop(n) for n in "qkv"]
        out, lse = flashsci.varlen_attention(*tensors, edges, causal=True, return_lse=True, **given)
        for n, (first, last) in enumerate(itertools.pairwise(edges.tolist())):
            rows = slice(first, last)
            slot = n if block is None else first // block + n
            blocks = 1 if block is None else -(-lens[n] // block)
            scales = {name: s[slot : slot + blocks].T.contiguous() for name, s in given.items()}
            if block is None:
                scales = {name: s[:, 0] for name, s in scales.items()}
            elif lens[n] == 0:
                scales = {name: s[:, :0] for name, s in scales.items()}
            alone = [x[rows].transpose(0, 1) for x in tensors]
            wanted, sums = flashsci.attention(*alone, causal=True, return_lse=True, **scales)
            assert torch.equal(out[rows].transpose(0, 1), wanted)
            assert torch.equal(lse[:, rows], sums)


def test_rows_without_keys():
    given = call(rows=(5, 3))
    out, lse = run(given, causal=True, align="lower_right", return_lse=True)
    assert (out[..., :2, :] == 0).all() and (lse[..., :2] == -torch.inf).all()
    assert out[..., 2:, :].isfinite().all() and lse[..., 2:].isfinite().all()
    none = call(rows=(5, 0))
    out, lse = run(none, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


@hypothesis.settings(max_examples=40)
@hypothesis.given(flashsci.testing.fp8_cases(longest=150))
def test_generated(case):
    judge_fp8(case, "reference")


def truncated(p: torch.Tensor) -> torch.Tensor:
    """p in e4m3, towards zero."""
    _, exponent = torch.frexp(p)
    step = torch.ldexp(torch.ones_like(p), (exponent - 4).clamp(min=-9))
    return (p / step).floor() * step


def as_a_kernel(
    inputs: FP8Inputs,
    fault: str = "",
    rounded_sums: bool = False,
    offset: float | torch.Tensor = 0.0,
) -> dict[str, torch.Tensor]:
    """out and lse of a dense call without a window as a kernel computes them: P in e4m3; or with a fault. rounded_sums: the
    sums are those of P as rounded, as CUDA's kernel has them. offset: how much P of a row's maximum is above 256, in powers of 2."""
    given = inputs.dequantised()
    q, k, v = (x.double() for x in (given.q, given.k, given.v))
    groups = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    s = q.shape[-1] ** -0.5 * (q @ k.mT)
    if fault == "a key lost":
        s[..., 3] = -torch.inf
    top = s.amax(-1, keepdim=True)
    largest = 1.0 if fault == "P not scaled" else 256.0 * 2**offset
    p = torch.exp(s - top) * largest
    rounded = (truncated(p) if fault == "P truncated" else p).float().to(E4M3).double()
    if fault == "a scale of the next block":
        v = v.clone()
        v[..., :64, :] *= 2
    summed = rounded if rounded_sums else p
    if fault == "a key lost from the sum":
        summed = summed[..., 1:]
    if fault == "the sum of truncated P":
        summed = truncated(p)
    total = summed.sum(-1, keepdim=True)
    lse = (top + (total / largest).log()).squeeze(-1)
    if fault == "lse 1% off":
        lse = lse * 1.01
    if fault in OF_LSE:
        total = (rounded if rounded_sums else p).sum(-1, keepdim=True)
    return {"out": (rounded @ v / total).to(inputs.options["out_dtype"]), "lse": lse.float()}


FAULTS = ("P truncated", "a key lost", "a scale of the next block")
OF_LSE = ("a key lost from the sum", "the sum of truncated P", "lse 1% off")
SPREAD_OUT = FP8Case(FP8Variant(head_dim=64, head_dim_v=64), 5, (200,), (900,), (2,), 2, 2, scales=("head", "64", "64"))


@pytest.mark.every(3)
@pytest.mark.parametrize("rounded_sums", (False, True))
@pytest.mark.parametrize("sharp", (0.01, 0.1, 1.0, 4.0))
def test_the_judge_lets_a_kernel_pass(sharp, rounded_sums):
    """Few rows and keys, too, and offsets that are not at the maximum."""
    for seed, (queries, keys) in enumerate(((200, 900), (1, 900), (1, 7), (40, 30), (3, 1), (200, 2))):
        sizes = {"sharp": sharp, "lens_q": (queries,), "lens_k": (keys,), "seed": seed}
        inputs = make_fp8_inputs(FP8Case(**vars(SPREAD_OUT) | sizes))
        judge = inputs.judge()
        apart = 0.75 * min(sharp, 1.0) * torch.rand(2, 4, queries, 1)
        for offset in (0.0, apart) if rounded_sums else (0.0,):
            judge.require(as_a_kernel(inputs, "", rounded_sums, offset))


@pytest.mark.every(3)
@pytest.mark.parametrize("rounded_sums", (False, True))
@pytest.mark.parametrize("fault", (*FAULTS, *OF_LSE))
def test_the_judge_finds_faults(fault, rounded_sums):
    inputs = make_fp8_inputs(SPREAD_OUT)
    judge, right = inputs.judge(), as_a_kernel(inputs, "", rounded_sums)
    judge.require(right)
    assert judge.problems(as_a_kernel(inputs, fault, rounded_sums)), fault


def test_the_mean_of_equal_values_is_their_value():
    """Where the weights that are summed are those that are used."""
    inputs = make_fp8_inputs(SPREAD_OUT)
    v = torch.full_like(inputs.v, 1.5)
    alike = replace(inputs, v=v, options=inputs.options | {"v_scale": None})
    assert (as_a_kernel(alike, "", True)["out"] == 1.5).all()
    assert (as_a_kernel(alike)["out"] != 1.5).any()


def test_a_flat_tail_beside_one_large_score():
    """4000 keys whose P is 3e-4 of the largest have more than half of the weight: e4m3 holds them only where P is scaled."""
    k = torch.zeros(1, 4000, 64)
    k[:, 5] = 1
    v = torch.randn(1, 4000, 64) + 1
    q, k, v = (x.to(E4M3) for x in (torch.ones(1, 3, 64), k, v))
    inputs = FP8Inputs(q, k, v, {"out_dtype": torch.bfloat16})
    judge = inputs.judge()
    for rounded_sums in (False, True):
        judge.require(as_a_kernel(inputs, "", rounded_sums))
        assert judge.problems(as_a_kernel(inputs, "P not scaled", rounded_sums))


def test_the_judge_finds_wrong_scales_and_dtypes():
    case = FP8Case(FP8Variant(packed=True), 3, (70, 90), (150, 33), (), 2, scales=("64", "64", "128"))
    inputs = make_fp8_inputs(case)
    judge, right = inputs.judge(), inputs.evaluate("reference")
    judge.require(right)
    assert judge.problems({"out": right["out"] * 1.1, "lse": right["lse"]})
    assert judge.problems({"out": right["out"], "lse": right["lse"] * 1.01})
    assert judge.problems(inputs.evaluate("reference", out_dtype=torch.float16))
    for name in ("q_scale", "k_scale", "v_scale"):
        for change in ({name: inputs.options[name].flip(0)}, {name: None}):
            assert judge.problems(inputs.evaluate("reference", **change)), name


@pytest.mark.parametrize("smooth", (False, True))
def test_the_error_does_not_grow_with_the_keys(smooth):
    """Roundings of P average out as its entries do: relative to out, which shrinks with the keys, the error stays where it was.
    The product of a kernel on quantised inputs, against the inputs in 16 bits."""
    errors = []
    for keys in (256, 1024, 4096, 16384):
        q = torch.randn(1, 64, 64)
        k, v = torch.randn(2, 1, keys, 64)
        given, scales = {}, {}
        for name, x in zip("qkv", (q, k, v), strict=True):
            found = flashsci.quantize(x, smooth=smooth and name == "k")
            given[name], scales[f"{name}_scale"] = found.values, found.scale
        inputs = FP8Inputs(**given, options=scales | {"out_dtype": torch.float16})
        out = as_a_kernel(inputs)["out"].double()
        exact = flashsci.attention(*(x.double() for x in (q, k, v)), backend="reference")
        errors.append(((out - exact).norm() / exact.norm()).item())
    assert max(errors) < 1.3 * min(errors) and max(errors) < 0.08, errors


WRONG = (
    (TypeError, "k_scale must be a torch.Tensor or None, got float", {"k_scale": 0.5}),
    (TypeError, r"q_scale must be float32, got torch.float64; call .float\(\)", {"q_scale": torch.ones(()).double()}),
    (ValueError, r"v_scale must have one number for all .* a head \(\[2, 2\]\) or a block of 128 or 64 rows \(\[2, 2, 2 or 4\]\), got \[2, 2, 3\]; flashsci.quantize", {"v_scale": torch.ones(2, 2, 3)}),
    (ValueError, r"got \[2\]", {"k_scale": torch.ones(2)}),
    (TypeError, "out_dtype must be torch.bfloat16 .* or torch.float16, got torch.float32", {"out_dtype": torch.float32}),
    (TypeError, "one dtype, got torch.float8_e4m3fn, torch.bfloat16, torch.float8_e4m3fn; flashsci.quantize", {"k": torch.zeros(2, 2, 200, DIM).bfloat16()}),
    (ValueError, "q_scale requires one; call inside torch.no_grad", {"q_scale": torch.ones((), requires_grad=True)}),
    (ValueError, "same head dim", {"q": torch.zeros(2, 4, 70, 24).to(E4M3)}),
    (ValueError, "same length", {"k": torch.zeros(2, 2, 199, DIM).to(E4M3)}),
    (ValueError, "multiple of the number of key heads", {"q": torch.zeros(2, 3, 70, DIM).to(E4M3), "q_scale": None}),
    (ValueError, "do not broadcast", {"q": torch.zeros(3, 4, 70, DIM).to(E4M3), "q_scale": None}),
    (ValueError, "at least two dims", {"q": torch.zeros(DIM).to(E4M3), "q_scale": None}),
    (ValueError, "align must be one of", {"align": "middle"}),
    (ValueError, "window must be", {"window": 5}),
    (flashsci.BackendError, "float8_e4m3fn inputs have no bias; dequantise", {"bias": torch.zeros(70, 200)}),
    (flashsci.BackendError, "have no mask", {"mask": torch.ones(70, 200, dtype=torch.bool)}),
    (flashsci.BackendError, "have no key_weight", {"key_weight": torch.ones(200)}),
    (flashsci.BackendError, "have no alibi_slopes, sink", {"alibi_slopes": torch.ones(4), "sink": torch.zeros(4)}),
    (flashsci.BackendError, "have no dropout", {"dropout_p": 0.1}),
    (flashsci.BackendError, "SDPA takes no 8-bit floats", {"backend": "sdpa"}),
    (flashsci.BackendError, "it has no 8-bit floats", {"backend": "eager"}),
    (flashsci.BackendError, "up to 256, got 257 and 257", {n: torch.zeros(1, 1, 8, 257).to(E4M3) for n in "qkv"} | {f"{n}_scale": None for n in "qkv"} | {"backend": "triton"}),
)  # fmt: skip


@pytest.mark.parametrize("error, message, changes", WRONG)
def test_refusals(error, message, changes):
    with pytest.raises(error, match=message):
        run(call() | changes)


def test_scales_belong_to_8_bits():
    q = torch.randn(2, 8, DIM)
    with pytest.raises(TypeError, match=r"q_scale belongs to float8_e4m3fn .* got torch.float32"):
        flashsci.attention(q, q, q, q_scale=torch.ones(()))
    edges = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"k_scale, out_dtype belong to .* leave them out"):
        flashsci.varlen_attention(q, q, q, edges, k_scale=torch.ones(()), out_dtype=torch.float16)
    with pytest.raises(TypeError, match="must be float16, bfloat16, float32 or float64, got"):
        flashsci.attention(*3 * [q.to(torch.float8_e5m2)])


def test_how_sums_are_taken():
    """ "fast" is a leave: where no kernel takes it the call is that of "safe". Other tensors and words are refused."""
    given = call()
    for packed in (False, True):
        if packed:
            given = {n: x[0].transpose(0, 1) if n in "qkv" else x[0, :, 0].expand(1, -1) for n, x in given.items()}
            offsets = {"cu_seqlens_q": torch.tensor([0, 70]), "cu_seqlens_k": torch.tensor([0, 200])}
            given |= {n: x.int() for n, x in offsets.items()}
        entry = flashsci.varlen_attention if packed else flashsci.attention
        tensors, options = [given[n] for n in "qkv"], {n: x for n, x in given.items() if n not in "qkv"}
        safe, fast = (entry(*tensors, **options, fp8_accumulate=how) for how in ("safe", "fast"))
        assert torch.equal(safe, fast)
        assert flashsci.explain(*tensors, **options, fp8_accumulate="fast").chosen == "reference"
        wide = [x.float() for x in tensors]
        edges = {n: x for n, x in options.items() if n.startswith("cu_")}
        assert torch.equal(entry(*wide, **edges), entry(*wide, **edges, fp8_accumulate="safe"))
        for _ in range(2):  # also where a call like it has been planned
            for of in (entry, flashsci.explain):
                with pytest.raises(ValueError, match=r'fp8_accumulate="fast" is for float8_e4m3fn .* leave it out'):
                    of(*wide, **edges, fp8_accumulate="fast")
        for wrong in ("exact", None, True):
            with pytest.raises(ValueError, match=r"fp8_accumulate must be one of \('safe', 'fast'\), got"):
                entry(*tensors, **options, fp8_accumulate=wrong)


@pytest.mark.parametrize("keys, mean", [(640, 0.0), (640, 1.0), (2048, 1.0)])
def test_the_judge_of_a_gpu_lets_fast_sums_pass(monkeypatch, keys, mean):
    """By the model of a tensor core that keeps 14 bits; a result that is half too large fails."""
    random = torch.Generator().manual_seed(keys)
    v = torch.randn(1, keys, 32, generator=random) + mean
    q, k, v = (x.to(E4M3) for x in (*(torch.randn(1, n, 256, generator=random) for n in (24, keys)), v))
    inputs = FP8Inputs(q, k, v, {"out_dtype": torch.bfloat16, "fp8_accumulate": "fast"})
    lse = inputs.evaluate("reference")["lse"]
    out = fp8_sums.attention(*(x[0].double() for x in (q, k, v)), fast=True)[None].bfloat16()
    monkeypatch.setattr(flashsci.testing.fp8, "on_tensor_cores", lambda x: True)
    inputs.judge().require({"out": out, "lse": lse})
    assert inputs.judge().problems({"out": 1.5 * out, "lse": lse})


def test_packed_refusals():
    x = torch.zeros(100, 2, DIM).to(E4M3)
    edges = torch.tensor([0, 60, 100], dtype=torch.int32)
    message = r"a sequence and head \(\[2, 2\]\) or a block of 128 or 64 rows \(\[2 or 3, 2\]\), got \[4, 2\]"
    with pytest.raises(ValueError, match=message):
        flashsci.varlen_attention(x, x, x, edges, q_scale=torch.ones(4, 2))
    with pytest.raises(ValueError, match="must rise from 0"):
        flashsci.varlen_attention(x, x, x, edges.flip(0))
    with pytest.raises(TypeError, match="must be int32"):
        flashsci.varlen_attention(x, x, x, edges.long())
    with pytest.raises(flashsci.BackendError, match="have no bias"):
        flashsci.varlen_attention(x, x, x, edges, bias=torch.zeros(1, 100))


def test_never_chosen_for_16_bits(monkeypatch):
    """And 8 bits are never served by what casts them."""
    from flashsci.api import fp8

    def fail(*_):
        raise AssertionError("8-bit kernels for a 16-bit call")

    monkeypatch.setattr(fp8, "dense", fail)
    x = torch.randn(2, 8, DIM).bfloat16()
    flashsci.attention(x, x, x)
    with pytest.raises(AssertionError, match="8-bit kernels"), torch.autocast("cpu", torch.bfloat16):
        flashsci.attention(*3 * [x.to(E4M3)])


def test_explain():
    given = call()
    tensors = [given.pop(n) for n in "qkv"]
    found = flashsci.explain(*tensors, **given)
    assert found.chosen == "reference" and "8-bit" in found.reasons["sdpa"]
    edges = torch.tensor([0, 2], dtype=torch.int32)
    x = torch.zeros(2, 2, DIM).to(E4M3)
    found = flashsci.explain(x, x, x, cu_seqlens_q=edges, sink=torch.zeros(2))
    assert found.chosen is None and "no sink" in found.reasons["reference"]


def test_compiles_without_graph_breaks():
    given = call(scale=0.3)

    def step(**given):
        out, lse = run(given, causal=True, return_lse=True)
        return out * 2, lse

    wanted = step(**given)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(**given)
    torch.testing.assert_close(found, wanted)


def test_op_passes_opcheck():
    q, k, v, *scales = (call()[n] for n in ("q", "k", "v", "q_scale", "k_scale", "v_scale"))
    assert reference_fp8.OP is not None
    op = torch.ops.flashsci.reference_fp8_attention.default
    scalars = (-1, -1, 0.3, 0.0, -1, 0, True, torch.bfloat16, True, True)
    for given in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        arguments = (given, k, v, *scales, None, None, *scalars)
        # Not test_schema: it compares inputs before and after by allclose, which 8-bit floats do not have.
        torch.library.opcheck(op, arguments, test_utils=("test_faketensor",))


def test_the_layout_is_that_of_q():
    given = call()
    given["q"] = given["q"].transpose(1, 2).contiguous().transpose(1, 2)
    assert run(given).stride() == given["q"].stride()
    assert math.isfinite(run(given).float().norm())


HOPPER = Problem("cuda", (9, 0), E4M3, 4, 2, 128, 128, batch=(2,), seq_q=100, seq_k=200)
UNITS = {"cuda/sm90/fp8_e4m3", "cuda/sm90/fwd_bf16"}


@pytest.mark.parametrize(
    "message, changes, units, generation",
    [
        (None, {}, UNITS, 0),
        (None, {"head_dim": 192, "softcap": 3.0, "varlen": True}, UNITS, 90),
        ("for compute capability 9.0 and this device has 8.9", {"capability": (8, 9)}, UNITS, 0),
        ("for compute capability 9.0 and this device has 10.0", {"capability": (10, 0)}, UNITS, 0),
        ("generation sm80 take no 8-bit floats", {}, UNITS, 80),
        ("no kernel on 8-bit floats; build with FA_ARCHS=90", {}, {"cuda/sm90/fwd_bf16"}, 0),
        ("multiples of 16, got 40 and 24", {"head_dim": 40, "head_dim_v": 24}, UNITS, 0),
        ("up to 256, got 128 and 272", {"head_dim_v": 272}, UNITS, 0),
        ("have no mask; dequantise", {"mask": True}, UNITS, 0),
    ],
)
def test_what_the_cuda_backend_refuses(message, changes, units, generation):
    found = cuda_fp8.rejects(replace(HOPPER, **changes), units, generation)
    assert found is None if message is None else message in found


def test_the_cuda_backend_asks_its_library(monkeypatch):
    """Of its units, and of 8-bit floats before dtypes that it has never; the first of auto on Hopper."""
    monkeypatch.setattr(cuda.library, "build_info", lambda: {"archs": ["90"], "units": dict.fromkeys(UNITS, "")})
    assert cuda.rejects(HOPPER) is None
    assert "no 8-bit floats" in cuda.rejects(HOPPER, generation=80)
    assert "the tensors are on cpu" in cuda.rejects(replace(HOPPER, device_type="cpu"))
    monkeypatch.setattr(cuda.library, "build_info", lambda: {"archs": ["80"], "units": {}})
    assert "build with FA_ARCHS=90" in cuda.rejects(HOPPER)
    assert preferences.find("calls", HOPPER).order == ("cuda", "triton", "reference")
    assert preferences.find("calls", replace(HOPPER, capability=(8, 9))).order[0] == "triton"


def test_a_call_that_the_kernel_leaves_is_a_refusal(monkeypatch):
    def refuse(*_):
        raise RuntimeError("flashsci: no float8_e4m3fn kernel serves this call on compute capability 9\nC++ frames")

    monkeypatch.setattr(torch.ops.flashsci, "cuda_fp8_forward", refuse, raising=False)
    q = torch.zeros(1, 8, 16).to(E4M3)
    tensors = FP8Tensors(q, q, q, None, None, None, None, None)
    scalars = FP8Scalars(-1, -1, 1.0, 0.0, -1, -1, False, torch.bfloat16, True, False)
    with pytest.raises(flashsci.BackendError, match=r"capability 9$"):
        cuda_fp8.attention(tensors, scalars)
