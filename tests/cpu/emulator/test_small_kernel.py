"""The kernels of short sequences, csrc/sm80/small, run on the host (emulated.py) from the launcher to the stores, judged as every backend
by generated cases. What a GPU's products and exchanges do is emulated; its speed and its registers are not."""

from __future__ import annotations

import ctypes as c
from dataclasses import replace

import pytest
import torch

from flashsci.call.ops import empty_like_layout
from flashsci.testing import Case, Inputs, Judge, Variant, make_inputs
from flashsci.testing.choices import SeededChoices
from flashsci.testing.drawing import draw_case
from tests.cpu.emulator.emulated import build, emulate, is_found
from tools.kernels.launchers import (
    BackwardParams,
    BiasMask,
    ForwardParams,
    _pointer,
    _score_strides,
    _strides,
)

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]

DTYPES = ("float16", "bfloat16", "float32")
LENGTHS = (1, 2, 7, 15, 16, 17, 24, 29, 31, 32)
DIMS = ((16, 16), (8, 16), (24, 32), (32, 20), (48, 64), (64, 4))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return build(tmp_path_factory.mktemp("small"), "small")


def common(x: Inputs, room: int) -> dict:
    """What both directions say of a call. room: KiB of shared memory of a multiprocessor."""
    q, k, v = x.q, x.k, x.v
    batch0, batch1, heads_q, seq_q, head_dim = (1,) * (5 - q.dim()) + q.shape
    left, right = x.options.get("window") or (None, None)
    right = 0 if x.options.get("causal") else right
    unbounded = lambda side: -1 if side is None else side  # noqa: E731
    mask = None if x.mask is None else x.mask.view(torch.uint8)
    bias = x.bias if x.key_weight is None else x.key_weight.unsqueeze(-2)
    kind_of_bias = 2 if x.key_weight is not None else int(bias is not None and bias.dtype == torch.float32)
    capped = int(x.options.get("softcap_at") == "biased" and x.bias is not None)
    scale = x.options.get("scale")
    return dict(
        q=_pointer(q), k=_pointer(k), v=_pointer(v), q_strides=_strides(q), k_strides=_strides(k), v_strides=_strides(v),
        bias_mask=BiasMask(_pointer(bias), _pointer(mask), _score_strides(bias), _score_strides(mask), kind_of_bias, capped),
        batch0=batch0, batch1=batch1, heads_q=heads_q, heads_k=k.shape[-3] if k.dim() > 2 else 1, seq_q=seq_q, seq_k=k.shape[-2],
        head_dim=head_dim, head_dim_v=v.shape[-1], scale=head_dim**-0.5 if scale is None else scale, softcap=x.options.get("softcap") or 0.0,
        window_left=unbounded(left), window_right=unbounded(right), lower_right=int(x.options.get("align") == "lower_right"),
        max_seqlen_q=-1, copy_bytes=16, device=0, shared_per_sm=room * 1024,
    )  # fmt: skip


def poisoned(like: torch.Tensor, columns: int | None = None) -> torch.Tensor:
    shape = like.shape if columns is None else (*like.shape[:-1], columns)
    return empty_like_layout(like, shape).fill_(torch.nan)


def kind(x: Inputs) -> int:
    return {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}[x.q.dtype]


def forward(library: c.CDLL, x: Inputs, seed: int = 0, room: int = 228) -> dict[str, torch.Tensor] | None:
    """None where the kernel leaves the call to others."""
    out, lse = poisoned(x.q, x.v.shape[-1]), torch.full(x.q.shape[:-1], torch.nan)
    p = ForwardParams(**common(x, room), out=_pointer(out), lse=_pointer(lse), out_strides=_strides(out))
    return {"out": out, "lse": lse} if emulate(library.emulate_forward, p, kind(x), seed) else None


def backward(
    library: c.CDLL,
    x: Inputs,
    made: dict[str, torch.Tensor],
    seed: int = 0,
    room: int = 228,
    laid: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor] | None:
    """laid: tensors as which gradients lie, those that are not to lie as what they are gradients of."""
    found = {f"d{name}": poisoned((laid or {}).get(name, getattr(x, name))) for name in "qkv"}
    p = common(x, room) | {"max_seqlen_k": -1}
    if x.bias is not None and x.bias_grad:
        found["dbias"] = torch.full(x.bias.shape, torch.nan, dtype=x.bias.dtype)
        p |= {"dbias": _pointer(found["dbias"]), "dbias_strides": _score_strides(found["dbias"])}
    if x.key_weight is not None and x.key_weight_grad:
        found["dkey_weight"] = torch.full(x.key_weight.shape, torch.nan)
        made_of = found["dkey_weight"].unsqueeze(-2)
        p |= {"dbias": _pointer(made_of), "dbias_strides": _score_strides(made_of)}
    for name in ("dq", "dk", "dv"):
        p |= {name: _pointer(found[name]), f"{name}_strides": _strides(found[name])}
    out, lse = made["out"], made["lse"].contiguous()
    p |= {"out": _pointer(out), "out_strides": _strides(out), "lse": _pointer(lse)}
    p |= {"dout": _pointer(x.dout), "dout_strides": _strides(x.dout)}
    p |= {"dlse": _pointer(x.dlse), "dlse_strides": _strides(x.dlse, last=False)}
    taken = emulate(library.emulate_backward, BackwardParams(**p), kind(x), seed)
    return found if taken else None


def judge(library: c.CDLL, x: Inputs) -> dict[str, torch.Tensor]:
    """Results; of what the kernels leave to others none."""
    judged = Judge(x)
    rows = {n: getattr(x, n) for n in ("q", "k", "v", "dout")}
    x = replace(x, **{n: y.resolve_neg() for n, y in rows.items() if y is not None})
    if x.dout is not None and x.dout.stride(-1) != 1:  # as backends/cuda gives it to the library
        x = replace(x, dout=x.dout.contiguous())
    results = forward(library, x)
    if results is None:
        return {}
    if x.dout is not None:
        results |= backward(library, x, results) or {}
    judged.require(results)
    return results


def draw(seed: int, **options) -> Case:
    """A case of these kernels: everything that they take."""
    choices = SeededChoices(seed)
    dims = choices.one_of(DIMS)
    variant = Variant(
        choices.one_of(DTYPES), *dims,
        bias=choices.one_of((None, "pair", "key")), bias_float=choices.one_of((False, True)), bias_grad=True,
        mask=choices.one_of((False, True)), window=choices.one_of((False, True)), lse_grad=choices.one_of((False, True)), **options,
    )  # fmt: skip
    return draw_case(choices, [variant], LENGTHS)


def made(seed: int) -> Inputs:
    return make_inputs(draw(seed), torch.device("cpu"))


@pytest.mark.parametrize("seed", range(12))
def test_generated_calls(kernels, seed):
    """What layouts keep from these kernels they leave to others."""
    judge(kernels, made(seed))


def test_most_generated_calls_are_taken(kernels):
    results = [judge(kernels, made(seed)) for seed in range(100, 112)]
    assert sum("out" in found for found in results) >= 6
    assert sum("dq" in found for found in results) >= 3


def simple(
    rows: int = 24, keys: int = 24, heads: int = 3, dims: tuple[int, int] = (16, 16), dtype: torch.dtype = torch.float32, size: float = 1.0,
    dout: float = 1.0, batch: tuple[int, int] = (2, 2), seed: int = 0, **options,
) -> Inputs:  # fmt: skip
    """Heads inside rows, as projections leave them."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(rows, dims[0]), (keys, dims[0]), (keys, dims[1]), (rows, dims[1])]
    q, k, v, gradient = (torch.randn(*batch, n, heads, d, generator=random).transpose(-2, -3) for n, d in shapes)
    cast = lambda x: x.to(dtype)  # noqa: E731
    return Inputs(cast(q * size), cast(k), cast(v), dout=cast(gradient * dout), options=options)


KINDS = [getattr(torch, name) for name in DTYPES]


@pytest.mark.parametrize("dtype", KINDS, ids=DTYPES)
@pytest.mark.parametrize(
    "rows, keys, dims",
    (
        (16, 16, (16, 16)), (9, 24, (16, 16)), (25, 32, (16, 16)), (1, 1, (32, 32)), (32, 17, (32, 32)), (24, 20, (64, 64)),
        (32, 32, (64, 64)), (16, 13, (20, 12)), (17, 24, (48, 36)), (30, 32, (48, 64)),
    ),
)  # fmt: skip
def test_shapes(kernels, dtype, rows, keys, dims):
    """Every tile, whole units of columns and others."""
    found = judge(kernels, simple(rows, keys, dims=dims, dtype=dtype, batch=(1, 2), seed=rows))
    assert found["dq"].isfinite().all()


@pytest.mark.parametrize("dtype", KINDS, ids=DTYPES)
@pytest.mark.parametrize("shape", ("own", "heads", "keys", "keys of heads"))
def test_gradient_of_a_bias(kernels, dtype, shape):
    """Of pairs, of keys for each head, of keys for all heads of a batch member."""
    x = simple(20, 29, heads=5, dtype=dtype)
    sizes = {
        "own": (5, 20, 29),
        "heads": (5, 1, 29),
        "keys": (1, 1, 29),
        "keys of heads": (5, 1, 29),
    }
    for kind in (torch.float32, dtype):
        x.bias = torch.randn(2, 2, *sizes[shape]).to(kind)
        assert "dbias" in judge(kernels, x)


@pytest.mark.parametrize("seed", range(8))
def test_generated_key_weights(kernels, seed):
    """Of one head or of all of them, zeros and rows of zeros among them, with a gradient and without."""
    choices = SeededChoices(seed + 500)
    variant = Variant(
        "float32",
        *choices.one_of(DIMS),
        key_weight="float",
        key_weight_grad=choices.one_of((True, True, False)),
        mask=choices.one_of((False, True)),
        window=choices.one_of((False, True)),
        lse_grad=choices.one_of((False, True)),
    )
    judge(kernels, make_inputs(draw_case(choices, [variant], LENGTHS), torch.device("cpu")))


def weighted(rows: int = 29, shared: bool = True, **options) -> Inputs:
    """A cutoff that neighbours leave smoothly: zeros, numbers so small that their keys hardly count, atoms without neighbours."""
    x = simple(rows, 29, heads=8, seed=rows, **options)
    random = torch.Generator().manual_seed(rows)
    x.key_weight = torch.rand(2, 2, 1 if shared else 8, 29, generator=random)
    x.key_weight[..., 20:] = 0
    x.key_weight[0, 0, ..., 5:9] = 1e-30
    x.key_weight[1, 1] = 0
    return x


@pytest.mark.parametrize("shared", (True, False))
@pytest.mark.parametrize("rows", (29, 16, 1))
def test_key_weights(kernels, rows, shared):
    """dw of a weight of zero is that of the key's first step in; where all are zero there is nothing."""
    found = judge(kernels, weighted(rows, shared))
    assert found["dkey_weight"][0, 1, ..., 20:].abs().min() > 0
    assert all(found[n][1, 1].abs().max() == 0 for n in ("out", "dq", "dk", "dv", "dkey_weight"))


@pytest.mark.parametrize("size", (10.0, 100.0))
def test_key_weights_of_large_scores(kernels, size):
    """Keys without weight have the largest of some rows: their exponentials are beyond fp32."""
    judge(kernels, weighted(size=size))


def test_padded_neighbours_without_weight(kernels):
    """Hidden by a mask as well, with garbage beyond, and gradients as small as a mean over a batch leaves them."""
    x = weighted(dout=1e-9)
    x.mask = (torch.arange(29) < 22).expand(2, 2, 1, 29, 29).clone()
    x.mask[..., 25:, :] = False
    x.k[..., 22:, :], x.v[..., 22:, :] = 300, 300
    judge(kernels, x)


def test_the_same_bits_in_any_order(kernels):
    """A bias of keys is added up in one order, whatever that of blocks and warps is: each seed has another."""
    x = simple(24, 24, heads=8)
    x.bias = torch.randn(2, 2, 1, 1, 24)
    results = forward(kernels, x)
    first, *others = (backward(kernels, x, results, seed) for seed in range(5))
    assert first["dbias"].isfinite().all()
    assert all(torch.equal(first[n], y) for found in others for n, y in found.items())


def laid_out(x: Inputs, joint: bool, **order: bool) -> Inputs:
    """The same numbers, for each tensor heads before rows or, where `order` says so, inside them; joint: k and v, and q of as many
    rows, as slices of one projection."""
    made = {}
    if joint:
        rows = {n: y for n in "qkv" if (y := getattr(x, n)).shape == x.k.shape}
        qkv = torch.stack([y.transpose(-2, -3) for y in rows.values()], dim=-3)
        made = dict(zip(rows, qkv.transpose(-2, -4).unbind(-3), strict=True))
    for name, inside in order.items():
        y = getattr(x, name)
        made[name] = y.transpose(-2, -3).contiguous().transpose(-2, -3) if inside else y.contiguous()
    return replace(x, **made)


def is_staged(x: Inputs) -> bool:
    """Whether rows go through shared memory, of calls that leave room for that."""
    heads, _, dim = x.q.shape[-3:]
    size = dim * x.q.element_size()
    inside = x.q.stride(-3) < x.q.stride(-2)
    alone = all(heads % n for n in range(2, 8)) or x.k.shape[-3] != heads
    return dim in (16, 32, 64) and (size == 128 or (size < 128 and inside)) and not alone


def evaluate(library: c.CDLL, x: Inputs, room: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Results of the kernels that the call should have."""
    staged = library.shared_bytes
    found = forward(library, x, seed, room)
    assert (staged() > 0) == (room > 0 and is_staged(x))
    if x.k.shape[-3] == x.q.shape[-3]:
        found |= backward(library, x, found, seed, room)
        assert (staged() > 0) == (room > 0 and is_staged(x))
    return found


def require_the_same_bits(library: c.CDLL, x: Inputs, seed: int) -> None:
    """Wherever heads lie, through shared memory and directly."""
    layouts = (
        laid_out(x, False, q=False, k=False, v=False, dout=False),
        laid_out(x, True, dout=True),
        laid_out(x, False, q=True, k=False, v=True, dout=False),
        laid_out(x, False, q=False, k=True, v=False, dout=True),
    )
    expected = judge(library, layouts[0])
    for laid in layouts:
        for room in (228, 0):
            found = evaluate(library, laid, room, seed)
            assert found.keys() == expected.keys()
            assert all(torch.equal(y, found[name]) for name, y in expected.items())


@pytest.mark.parametrize("dtype", KINDS, ids=DTYPES)
@pytest.mark.parametrize("dim", (16, 32, 64))
@pytest.mark.parametrize("rows, keys, heads", ((16, 9, 6), (5, 16, 4), (24, 24, 4), (17, 23, 2), (32, 27, 3)))
def test_the_same_bits_in_any_layout(kernels, dtype, dim, rows, keys, heads):
    """Every kernel of whole rows, staged where it is, and its direct one."""
    x = simple(rows, keys, heads=heads, dims=(dim, dim), dtype=dtype, batch=(1, 2), seed=rows)
    require_the_same_bits(kernels, x, seed=rows + heads)


@pytest.mark.parametrize("dtype", KINDS, ids=DTYPES)
@pytest.mark.parametrize("heads", (1, 2, 3, 5, 6, 7, 8, 11, 12))
def test_the_same_bits_of_any_number_of_heads(kernels, dtype, heads):
    """Blocks of two to eight warps; a bias of keys that eight heads share, with its gradient."""
    x = simple(11, 13, heads=heads, dims=(32, 32), dtype=dtype, batch=(1, 2), seed=heads)
    if heads <= 8:
        x.bias = torch.randn(1, 2, 1, 1, 13)
    require_the_same_bits(kernels, x, seed=heads)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_direct_kernels_of_long_rows(kernels, dtype):
    """What keeps rows of 128 bytes from shared memory: grouped heads, rows at multiples of 8 bytes, no room."""
    dim = 64 if dtype == torch.bfloat16 else 32
    x = simple(20, 24, heads=4, dims=(dim, dim), dtype=dtype, batch=(1, 2))
    assert evaluate(kernels, x, 228) and kernels.shared_bytes() > 0
    assert forward(kernels, x, room=32) and kernels.shared_bytes() == 0
    grouped = replace(x, k=x.k[..., :2, :, :], v=x.v[..., :2, :, :], dout=None)
    assert judge(kernels, grouped) and kernels.shared_bytes() == 0
    if dtype == torch.bfloat16:
        shifted = replace(x, v=torch.nn.functional.pad(x.v, (4, 0))[..., 4:])
        assert judge(kernels, shifted) and kernels.shared_bytes() == 0


@pytest.mark.parametrize("dtype", KINDS, ids=DTYPES)
def test_shared_memory_that_grows_from_call_to_call(kernels, dtype):
    """A kernel is allowed once what any call may ask for."""
    dim = 32 if dtype == torch.float32 else 64
    asked = []
    for rows, heads in ((25, 2), (25, 3), (25, 4), (29, 4)):
        x = simple(rows, rows, heads=heads, dims=(dim, dim), dtype=dtype, batch=(1, 1))
        evaluate(kernels, x, 228)
        asked.append(kernels.shared_bytes())
    assert asked == sorted(asked) and asked[1] > 48 << 10 and asked[-1] < 111 << 10


def unserved() -> dict[str, Inputs]:
    aligned = simple()
    shifted = torch.randn(2, 2, 24, 3, 17)[..., 1:].transpose(-2, -3)
    nine = simple(heads=9)
    nine.bias = torch.randn(2, 2, 1, 1, 24)
    shared = simple()
    shared.bias = torch.randn(1, 1, 3, 24, 24)
    many, batches, half = weighted(), weighted(), weighted(dtype=torch.bfloat16)
    many = replace(many, k=many.k[..., :4, :, :], v=many.v[..., :4, :, :])
    batches.key_weight = batches.key_weight[:1]
    return {
        "weights of grouped heads": many,
        "weights that batches share": batches,
        "weights in 16 bits": half,
        "softcap": simple(softcap=5.0),
        "33 queries": simple(33),
        "33 keys": simple(24, 33),
        "68 columns": simple(dims=(68, 16)),
        "columns that are no fours": simple(dims=(18, 16)),
        "rows at any address": replace(aligned, q=shifted),
        "a bias of keys that nine heads share": nine,
        "a bias that batches share": shared,
    }


@pytest.mark.parametrize("name", unserved())
def test_left_to_others(kernels, name):
    assert "dq" not in judge(kernels, unserved()[name])


@pytest.mark.parametrize("dim, step", ((-4, 1 << 32), (-3, 1 << 32), (-2, 1 << 26)))
def test_steps_of_more_bytes_than_kernels_multiply(kernels, dim, step):
    """To others, by the launcher's rule; a step of 16 bytes less is taken."""
    x = simple(batch=(2, 2))
    q = ForwardParams(**common(x, 228)).q_strides
    field = {-4: "batch1", -3: "head", -2: "row"}[dim]
    for bytes_, taken in ((step - 16, True), (step, False)):
        setattr(q, field, bytes_ // 4)
        assert bool(kernels.steps_fit(c.byref(q), 4)) == taken


@pytest.mark.parametrize("number", (-torch.inf, -1e9, "lowest"))
@pytest.mark.parametrize("dtype", KINDS, ids=DTYPES)
def test_padding_as_models_write_it(kernels, number, dtype):
    """Keys hidden by numbers, rows with none, tiny gradients and zero rows, rows of garbage beyond."""
    number = torch.finfo(torch.float32).min if number == "lowest" else number
    x = simple(29, 29, heads=8, dtype=dtype, dout=1e-9 if dtype == torch.float32 else 1e-3, seed=3)
    x.bias = torch.zeros(2, 2, 1, 1, 29)
    x.bias[0, 0, ..., 11:] = number
    x.bias[1, 1] = number
    x.dout[..., 20:, :] = 0
    x.k[0, 0, :, 11:], x.v[0, 0, :, 11:] = 300, 300
    judge(kernels, x)


@pytest.mark.parametrize("dtype", KINDS, ids=DTYPES)
def test_large_scores(kernels, dtype):
    for size in (30.0, 1000.0):
        judge(kernels, simple(31, 23, dtype=dtype, size=size))


FAULTS = {
    "numbers change places": ("fragments.cuh", "movmatrix_trans(__byte_perm(a, b, 0x5410))", "movmatrix_trans(__byte_perm(a, b, 0x1054))"),
    "keys beyond the last": ("scores.cuh", "p.seq_k < kBlocks * 8", "false"),
    "queries beyond the last": ("statistics.cuh", " || row >= p.seq_q", ""),
    "a head too few": ("backward.cuh", "for (int w = 0;", "for (int w = 1;"),
    "zeros beyond the last column": ("fragments.cuh", "x[i] = Row{};", "x[i] = P::row_of(1.f, 1.f, 1.f, 1.f);"),
    "low parts left out": ("fragments.cuh", "ptx::mma_m16n8k8_tf32(sum.small, a.high, b.low);", ""),
    "a block too few": ("fragments.cuh", "n < kBlocks ? pair[m]", "n < kBlocks - 1 ? pair[m]"),
    "rows that nobody waits for": ("staging.cuh", "ptx::cp_async_wait<kPending>();", ""),
    "rows of other warps": ("staging.cuh", "else\n      __syncthreads();", ""),
    "rows of other lanes": ("staging.cuh", "__syncwarp();", "{}"),
    "lse of other rows": ("statistics.cuh", "min(row_of_lane(), p.seq_q - 1)", "0"),
    "values that nobody waits for": ("forward.cuh", "[&] { stage.template wait<0>(); }", "[] {}"),
    "rows too near": ("staging.cuh", "piece = row * pitch()", "piece = row * (pitch() - 16)"),
    "rows beyond the last": ("staging.cuh", "cp_async_16_if(is_there", "cp_async_16_if(true"),
    "no zeros beyond the last row": ("staging.cuh", "cp_async_16(to, from, is_there)", "cp_async_16(to, from, true)"),
    "lse of other heads": ("backward.cuh", "stage.statistics()", "stage.statistics() - threadIdx.x / 32 * kMostRows"),
    "lse that nobody waits for": ("backward.cuh", "    ptx::cp_async_commit();\n    if constexpr (!kInParts)", "    if constexpr (!kInParts)"),
    "keys that lie elsewhere": ("launch.cuh", "same(p.q_strides, p.k_strides)", "true"),
    "values that lie elsewhere": ("launch.cuh", "same(p.q_strides, p.v_strides)", "true"),
    "results that lie elsewhere": ("launch.cuh", "same(p.dout_strides, p.out_strides)", "true"),
    "gradients that lie elsewhere": ("launch.cuh", "same(p.dq_strides, p.dk_strides)", "true"),
    "room for too few heads": ("launch.cuh", "return staged_warps <= kFewHeads", "return true"),
    "gradients that nobody waits for": ("backward.cuh", "__syncthreads();\n      at = stage.offsets(kDv);", "at = stage.offsets(kDv);"),
    "results that nobody waits for": ("forward.cuh", "__syncthreads();\n      stage.release(", "stage.release("),
    "operands that nobody waits for": ("backward.cuh", "wait<decltype(behind)::value>", "wait<2>"),
    "statistics that nobody waits for": ("statistics.cuh", "{ __syncwarp(); }", "{}"),
    "statistics of other rows": ("statistics.cuh", "threadIdx.x % 4 * 8 + n;", "threadIdx.x % 4 * 8;"),
    "statistics of other blocks": ("statistics.cuh", "upper ? high : low", "upper ? low : high"),
    "lse of another block": ("forward.cuh", "if (t == i)", "if (t == 0)"),
    "a gradient in the place of keys": ("staging.cuh", "result == kDk ? kOut", "result == kDk ? kK"),
    "scores without a check": ("config.cuh", "p.seq_k == rows && ", ""),
    "a scale below zero": ("config.cuh", " && p.scale > 0.f", ""),
    "heads of another block": ("staging.cuh", "first.head + head)", "head)"),
    "weights of zero count": ("backward.cuh", "x *= weights.weight[block];", ""),
    "no gradient of a weight": ("backward.cuh", "sums[block] += times(x);", ""),
    "exponentials without a limit": ("backward.cuh", "x = weights.limit(x, block, lse);", ""),
    "weights of other keys": ("backward.cuh", "weight[i] = keys.has(i) ? counted(__ldg(head + keys.clamped(i)", "weight[i] = keys.has(i) ? counted(__ldg(head + keys.clamped(0)"),
    "weights left out": ("scores.cuh", "return logf(counted(weight));", "return 0.f;"),
    "shared memory of the first call": ("launch.cuh", "bytes > 0 ? most_bytes(p) : 0", "bytes"),
}  # fmt: skip


def within(x: torch.Tensor) -> torch.Tensor:
    """The same amid NaN: no row before the first or beyond the last may be read."""
    wide = torch.full((*x.shape[:-2], x.shape[-2] + 16, x.shape[-1]), torch.nan, dtype=x.dtype)
    wide = wide.transpose(-2, -3).contiguous().transpose(-2, -3)
    return wide[..., 8:-8, :].copy_(x)


def judge_layouts(library: c.CDLL, dtype: torch.dtype, dim: int, heads: int) -> None:
    """Tensors that lie alike, and each that does not; rows amid NaN."""
    for rows in (14, 22, 29):
        same = simple(rows, rows, heads=heads, dims=(dim, dim), dtype=dtype, batch=(1, 2), seed=rows)
        alone = {n: getattr(same, n).contiguous() for n in ("k", "v", "dout")}
        amid = {n: within(getattr(same, n)) for n in ("q", "k", "v", "dout")}
        for changed in ({}, {"k": alone["k"]}, {"v": alone["v"]}, {"dout": alone["dout"]}, amid):
            assert "dq" in judge(library, replace(same, **changed))
        for name in "qkv":
            results = forward(library, same)
            assert results is not None
            laid = {name: getattr(same, name).contiguous()}
            found = backward(library, same, results, laid=laid)
            assert found is not None
            Judge(same).require(results | found)


@pytest.mark.parametrize("dtype", KINDS, ids=DTYPES)
@pytest.mark.parametrize("heads", (3, 6))
def test_layouts(kernels, dtype, heads):
    for dim in (16, 32, 64):
        judge_layouts(kernels, dtype, dim, heads)


def judge_calls(library: c.CDLL, seed: int) -> None:
    """From memory; through shared memory, of one block of a batch member, of two, and more of it."""
    for dtype in KINDS:
        long = 32 if dtype == torch.float32 else 64
        calls = (21, 4, (20, 12)), (17, 4, (long, long)), (21, 8, (long, long)), (24, 4, (long, long)), (21, 4, (16, 16))  # fmt: skip
        for rows, heads, dims in calls:
            x = simple(rows, 19, heads=heads, dims=dims, dtype=dtype, seed=seed)
            x.bias = torch.randn(2, 2, 1, 1, 19)
            assert "dbias" in judge(library, x)
        judge(library, simple(24, 19, dtype=dtype, seed=seed))
        judge(library, simple(24, 24, dtype=dtype, seed=seed, scale=-3.0, size=10.0))
        for heads in (3, 6):
            judge_layouts(library, dtype, 16, heads)
    judge(library, weighted())
    judge(library, weighted(size=100.0))


def test_honest_kernels_pass(kernels):
    judge_calls(kernels, 2)


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    file, old, new = FAULTS[fault]
    broken = build(tmp_path, "small", (f"../sm80/small/{file}", old, new))
    assert is_found(lambda seed: judge_calls(broken, seed))
