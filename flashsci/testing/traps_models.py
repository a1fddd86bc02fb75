"""Known traps of inputs as models have them: padding, small gradients, masks as numbers, scores of any size.

Registered with those of traps.py. On a GPU they take realistic sizes, on the CPU the interpreter's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashsci
from flashsci.testing.bounds import PLAIN, Judge
from flashsci.testing.cases import NUMBERS, PADDINGS, PLACES, Case, Variant
from flashsci.testing.evaluation import evaluate
from flashsci.testing.inputs import Inputs
from flashsci.testing.making import make_inputs
from flashsci.testing.poison import poisoned_memory
from flashsci.testing.tolerance import LOWEST
from flashsci.testing.traps import (
    DTYPES,
    HALVES,
    Skipped,
    each_served,
    judged,
    require,
    trap,
)


@trap()
def zero_rows_of_dout(backend: str, device: torch.device) -> None:
    """Padded rows and gradients of a mean: a scale taken from a tile must not come from its rows of zeros."""
    small = Case(seed=30, lead=(2,), heads_k=2, seq_q=40, seq_k=40, layout="bshd")
    packed = replace(small, rank=3, lead=(), variant=Variant(varlen=True), lens_q=(20, 33))
    packed = replace(packed, lens_k=(20, 33), dout_scale=1e-6, padding="tail")
    full = device.type == "cuda"
    # A bf16 gradient is as small as an fp32 one; fp16 has no numbers of 1e-9.
    wide = ("float32", "bfloat16") if full else ("float32",)
    parts: list[Callable[[], None]] = []
    for scale, padding in itertools.product((1e-3, 1e-6, 1e-9), PADDINGS):
        if full or padding in ("tail", "dout_scattered"):
            padded = replace(small, dout_scale=scale, padding=padding)
            parts += judged(backend, device, padded, dtypes=wide)
    parts += judged(backend, device, replace(small, padding="scattered"), dtypes=HALVES)
    parts += judged(backend, device, packed, dtypes=wide)
    if full:
        parts += [
            functools.partial(_padded_triangle, backend, device, scale, dtype)
            for scale, dtype in itertools.product((1e-3, 1e-6, 1e-9), wide)
        ]
    each_served(parts)


@trap()
def products_of_tiny_numbers(backend: str, device: torch.device) -> None:
    """Keys and values of 1e-12 with a dout of 1e-12.

    Powers of two that were taken out of both factors of a product come back together as 2^-150, which is zero,
    although the product is an ordinary number.
    """
    tiny = Case(seed=61, lead=(2,), heads_k=2, seq_q=17, seq_k=300, magnitude="tiny", dout_scale=1e-12)
    short = replace(tiny, seq_q=20, seq_k=24)
    biased = replace(tiny, variant=Variant(bias="pair", bias_grad=True), bias_shape=(1, 17, 300))
    wide = ("float32", "bfloat16") if device.type == "cuda" else ("float32",)
    parts: list[Callable[[], None]] = []
    for case in (tiny, short, biased):
        parts += judged(backend, device, case, dtypes=wide)
    each_served(parts)


def _padded_triangle(backend: str, device: torch.device, scale: float, dtype: str) -> None:
    """Triangle attention over 128 tokens, 120 of them real: pair bias in fp32, [1, 128, 4, 128, 32]."""
    generator = torch.Generator().manual_seed(31)
    shape = (1, 128, 128, 4, 32)
    q, k, v, dout = (
        torch.randn(shape, generator=generator).to(device, getattr(torch, dtype)).transpose(2, 3) for _ in range(4)
    )
    dout = scale * dout
    dout[..., 120:, :] = 0
    bias = torch.randn(1, 1, 128, 128, 4, generator=generator).to(device).permute(0, 1, 4, 2, 3)
    inputs = Inputs(q, k, v, bias=bias, dout=dout)
    with poisoned_memory():
        found = evaluate(inputs, backend, deterministic=False)
    some = slice(40, 44)  # rows whose gradients are their own
    rows = q[:, some], k[:, some], v[:, some]
    few = Inputs(*rows, bias, dout=dout[:, some], bias_grad=False)
    Judge(few).require({n: x[:, some] for n, x in found.items() if n != "dbias"})
    _require_zero(found["dq"][..., 120:, :], "dq of rows whose dout is zero")


def _require_zero(x: Tensor, what: str) -> None:
    assert bool((x == 0).all()), f"{what} is {x.abs().max().item():.3g}, must be 0"


def _masked_as_numbers(device: torch.device, order: int) -> Iterator[tuple[Case, str]]:
    """Every number in every place, each in every dtype on a GPU and in one on the CPU."""
    tangents = "qkvb" if order == 2 else ""
    full = device.type == "cuda"
    for i, (number, place) in enumerate(itertools.product(NUMBERS, PLACES)):
        if order == 2 and not full and i % 4:
            continue  # the interpreter takes seconds for each
        for dtype in DTYPES if full and order == 1 else (DTYPES[i % 3],):
            variant = Variant(
                head_dim=32 if full else 16,
                head_dim_v=32 if full else 16,
                bias="pair",
                bias_float=i % 2 == 0,
                bias_grad=True,
                lse_grad=i % 3 == 0,
                tangents=tangents,
            )
            size = (70, 152) if full else (18, 37)  # rows of 16 bytes: Hopper's kernels ask for them
            # Whole rows come with padding, whose dout is zero, and without.
            yield (
                Case(
                    seed=32 + i,
                    variant=variant,
                    lead=(2,),
                    heads_k=2,
                    seq_q=size[0],
                    seq_k=size[1],
                    bias_shape=(2, 2, *size) if i % 4 else (2, 1, 1, size[1]),
                    bias_view="linear" if i % 5 == 1 else "contiguous",
                    bias_number=number,
                    bias_number_at=place,
                    padding="tail" if place == "padding" and i % 2 else "none",
                ),
                dtype,
            )


@trap()
def masks_as_numbers(backend: str, device: torch.device) -> None:
    """-1e4, -1e9, -1e30 and the least numbers in a bias, on some keys and on whole rows: finite, and exact where a key is seen."""
    parts = (judged(backend, device, c, dtypes=(t,)) for c, t in _masked_as_numbers(device, 1))
    each_served(itertools.chain.from_iterable(parts))


@trap()
def whole_rows_of_numbers_without_dout_add_nothing(backend: str, device: torch.device) -> None:
    """Whole rows of -1e9 and similar numbers, as in padding, with dout 0: their gradients are zero, and only the
    other rows count."""

    def add_nothing(number: float, dtype: str) -> None:
        generator = torch.Generator().manual_seed(33)
        q, k, v, dout = (
            torch.randn(2, 2, 48, 32, generator=generator).to(device, getattr(torch, dtype)) for _ in range(4)
        )
        bias = torch.randn(2, 1, 48, 48, generator=generator).to(device)
        bias[..., 30:, :] += number
        dout[..., 30:, :] = 0
        inputs = Inputs(q, k, v, bias=bias, dout=dout)
        with poisoned_memory():
            found = evaluate(inputs, backend, deterministic=False)
        for name, x in found.items():
            # Scores that low may count as none: a row without keys has an lse of -inf.
            finite = x.isfinite() if name != "lse" or number > LOWEST else x < torch.inf
            assert bool(finite.all()), f"{name} is not finite: {number:g}, {dtype}"
        for name in ("dq", "dbias"):
            _require_zero(found[name][..., 30:, :], f"{name} of rows whose dout is zero")
        rows = Inputs(q[..., :30, :], k, v, bias=bias[..., :30, :], dout=dout[..., :30, :])
        part = {n: found[n] if n in ("dk", "dv") else found[n][..., :30, :] for n in found}
        part["lse"] = found["lse"][..., :30]
        Judge(rows).require(part)

    numbers = (-1e9, -1e30, torch.finfo(torch.float32).min)
    each_served(functools.partial(add_nothing, number, dtype) for number, dtype in itertools.product(numbers, DTYPES))


@trap(order=2)
def masks_as_numbers_to_second_order(backend: str, device: torch.device) -> None:
    parts = (judged(backend, device, c, dtypes=(t,)) for c, t in _masked_as_numbers(device, 2))
    each_served(itertools.chain.from_iterable(parts))


@trap()
def shared_bias_gradient_of_an_empty_batch(backend: str, device: torch.device) -> None:
    """The gradient of a bias without any batch member: zeros, not uninitialised memory."""
    variant = Variant(bias="pair", bias_grad=True)
    case = Case(seed=34, variant=variant, lead=(0,), heads_k=2, seq_q=18, seq_k=20)
    without = (
        replace(case, lead=(2,), seq_q=0, bias_shape=(1, 1, 1, 20)),
        replace(case, lead=(2,), seq_k=0, bias_shape=(1, 1, 18, 1)),
    )
    parts = judged(backend, device, *without)
    for shape in ((2, 18, 20), (1, 1, 18, 20), (20,)):
        given = replace(case, bias_shape=shape)
        parts += judged(backend, device, given)
        parts += judged(backend, device, replace(given, lead=(3, 0), rank=5), dtypes=("float32",))
    each_served(parts)


@trap()
def wide_heads_in_fp32_with_mask_and_dropout(backend: str, device: torch.device) -> None:
    """Triton 3.6 compiles the two together into wrong code, unless products are IEEE."""
    cases = []
    for dim, dim_v, softcap in ((256, 256, None), (200, 136, 15.0)):
        variant = Variant(head_dim=dim, head_dim_v=dim_v, mask=True, dropout=True, softcap=softcap is not None)
        case = Case(
            seed=36,
            variant=variant,
            lead=(2,),
            seq_q=33,
            seq_k=40,
            softcap=softcap,
            dropout_p=0.2,
            mask_shape=(2, 1, 33, 40),
        )
        cases.append(case)
    require(backend, device, *cases, dtypes=("float32",))


@trap(cuda=True, one_of=HALVES)
def values_of_129_to_192(backend: str, device: torch.device, dtype: str) -> None:
    """Short tiles, the first of them empty, and a head dim of v of three store boxes: correct, with the same bits 30
    times."""
    import flashsci

    generator = torch.Generator(device).manual_seed(35)
    for dim in (160, 192):
        q, k, v = (
            torch.randn(60, 4, n, dim, device=device, generator=generator).to(getattr(torch, dtype))
            for n in (1024, 128, 128)
        )
        options: dict[str, Any] = {"causal": True, "align": "lower_right"}
        with torch.no_grad(), flashsci.use_backend(backend, strict=True):
            first = flashsci.attention(q, k, v, return_lse=True, **options)
            differ = torch.zeros((), dtype=torch.int64, device=device)
            for _ in range(29):
                again = flashsci.attention(q, k, v, return_lse=True, **options)
                for x, y in zip(first, again, strict=True):
                    differ += (x != y).sum()
        count = int(differ)
        assert count == 0, f"D {dim}: {count} values of 29 repeats differ from the first run's"
        ends = torch.tensor([0, 1, 30, 59], device=device)
        few = Inputs(q[ends], k[ends], v[ends], options=options)
        Judge(few).require({"out": first[0][ends], "lse": first[1][ends]})


@trap(one_of=("float32", *HALVES))
def sharp_softcap(backend: str, device: torch.device, dtype: str) -> None:
    """Softcap 0.01 with scores of 30: few keys have a slope at all, and it must not be a difference of numbers near
    1."""
    variant = Variant(dtype=dtype, softcap=True, head_dim=128, head_dim_v=128)
    size = 300 if device.type == "cuda" else 64
    case = Case(seed=36, variant=variant, lead=(1,), heads_k=2, seq_q=size, seq_k=size)
    inputs = make_inputs(replace(case, softcap=0.01), device)
    with torch.no_grad():
        for x in (inputs.q, inputs.k):
            x.mul_(30**0.5)
    with poisoned_memory():
        found = evaluate(inputs, backend, deterministic=False)
    judge = Judge(inputs)
    judge.require(found)
    # Ill-conditioned: the limit is a few times the error of plain PyTorch.
    for name in ("dq", "dk"):
        error, base = judge.errors(name, found[name])[2], judge.baseline_errors(name)[2]
        size_of = judge.truth[name].norm().item()
        limit = 4 * base + 1e-6 * size_of
        assert error <= limit, (
            f"{name}: error norm {error / size_of:.3g} of its size, plain PyTorch {base / size_of:.3g}"
        )


@trap(order=2)
def softcap_of_biased_scores(backend: str, device: torch.device) -> None:
    """A softcap after the bias: -inf hides its key, a mask as a number does not, and gradients end where the cap is reached."""
    rows, keys = (130, 200) if device.type == "cuda" else (18, 37)
    capped = Variant(softcap=True, caps_bias=True, bias="pair", bias_grad=True, lse_grad=True, tangents="qkvb")
    case = Case(seed=41, variant=capped, lead=(2,), heads_k=2, seq_q=rows, seq_k=keys, softcap=3.0, bias_holes=True)
    wide = replace(capped, bias_float=True)
    cases = [
        replace(case, bias_shape=(2, 2, rows, keys)),
        replace(case, bias_shape=(1, 2, rows, keys), magnitude="peaked"),
        replace(case, variant=wide, bias_shape=(2, 1, rows, keys), bias_number="float32_min", bias_number_at="rows"),
        replace(case, variant=replace(wide, bias="key", alibi=True), bias_shape=(2, 1, 1, keys), bias_scale=100.0),
        replace(case, variant=replace(capped, mask=True), bias_shape=(rows, 1), mask_shape=(keys,), mask_kind="keys"),
    ]
    require(backend, device, *cases)


@trap()
def scores_beyond_ten_million(backend: str, device: torch.device) -> None:
    """Scores of 1e7 to 1e11: softmax is a maximum, whose exponent is 0 however large the numbers that cancel are."""
    size = (70, 150) if device.type == "cuda" else (18, 37)
    case = Case(seed=37, lead=(2,), heads_k=2, seq_q=size[0], seq_k=size[1])
    wide = ("bfloat16", "float32")
    # The reference's float16 scores end at 65504: it is plain PyTorch.
    dtypes = DTYPES if backend != "reference" else wide
    huge = replace(case, magnitude="huge", dout_scale=1e-3)
    capped = replace(huge, variant=Variant(softcap=True), softcap=15.0)
    windowed = replace(huge, seed=38, variant=Variant(head_dim=64, head_dim_v=64, window=True))
    parts = judged(backend, device, replace(case, scale=1e8), capped, dtypes=wide)
    parts += judged(backend, device, huge, windowed, replace(windowed, causal=True), dtypes=dtypes)

    def two_maxima(dtype: str) -> None:
        """Two equal scores far above the others: exactly the mean of two values."""
        top = 6e4 if dtype == "float16" else 1e9
        q, k, v = (torch.zeros(1, 1, 20, 16) for _ in range(3))
        q[..., 0] = top
        k[..., 5, 0], k[..., 7, 0] = top, top
        v[..., 5, :], v[..., 7, :], v[..., 9, :] = 1.0, 3.0, 100.0
        q, k, v = (x.to(device, getattr(torch, dtype)) for x in (q, k, v))
        out = evaluate(Inputs(q, k, v), backend, lse=backend != "sdpa")["out"]
        assert bool((out == 2).all()), f"{dtype}: two equal maxima give {out.flatten()[:3].tolist()}"

    each_served([*parts, *(functools.partial(two_maxima, dtype) for dtype in dtypes)])


def _only_keys(device: torch.device, dtype: str, dim: int, smallest: int, full: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of rows with one key each, with scores from 2^smallest to 2^30 of either sign."""
    rows = 1024 if full else 48
    generator = torch.Generator().manual_seed(39)
    # All terms of a score have one sign: sums that cancel round by more than a score's own digits.
    q, k, v = (torch.randn(rows, 1, 1, dim, generator=generator).abs() for _ in range(3))
    q[::2] *= -1
    size = torch.linspace(smallest, 26 if dtype == "float16" else 30, rows)  # fp16 ends earlier
    half = torch.exp2(size / 2).reshape(-1, 1, 1, 1) * dim**-0.25
    return tuple(x.to(device, getattr(torch, dtype)) for x in (q * half, k * half, v))  # type: ignore[return-value]


def _must_be_one(p: Tensor, what: str) -> None:
    least, most = p.min().item(), p.max().item()
    assert least >= 0.5 and most <= 2, f"{what}: P of an only key is {least:.3g} to {most:.3g}, must be 1"


@trap()
def one_key_of_every_score(backend: str, device: torch.device) -> None:
    """P of a row's only key is 1, whatever its score: the rounding of a large lse must not show as a power of two."""
    full = device.type == "cuda"

    def part(dtype: str, dim: int) -> None:
        # 2^8 to 2^30: below and beyond the point where kernels treat scores as large.
        q, k, v = _only_keys(device, dtype, dim, 8, full)
        inputs = Inputs(q, k, v, dout=torch.ones_like(v), options={"scale": 1.0})
        p = evaluate(inputs, backend, lse=backend != "sdpa")["dv"].float()
        _must_be_one(p, f"{dtype}, D {dim}")

    # The reference's float16 scores end at 65504: it is plain PyTorch.
    dtypes = DTYPES if backend != "reference" else ("bfloat16", "float32")
    dims = (16, 64, 128, 256) if full else (16,)
    each_served(functools.partial(part, dtype, dim) for dtype in dtypes for dim in dims)


@trap()
def lse_of_other_tensor_cores(backend: str, device: torch.device) -> None:
    """One key per row with the lse of another kernel: tensor cores truncate, and sums in other steps differ by 2^-20
    of a score."""
    if backend in PLAIN:
        raise Skipped("plain PyTorch takes an lse as it is")
    full = device.type == "cuda"

    def part(dtype: str, dim: int) -> None:
        q, k, v = _only_keys(device, dtype, dim, 21, full)
        options: dict[str, Any] = {"scale": 1.0, "backend": backend}
        with flashsci.use_backend(backend, strict=True), torch.no_grad():
            out, lse = flashsci.attention(q, k, v, return_lse=True, **options)
            for error in (2.0**-20, -(2.0**-20)):
                dout = torch.ones_like(out)
                found = flashsci.attention_backward(dout, q, k, v, out, lse * (1 + error), **options)
                _must_be_one(found.dv.float(), f"{dtype}, D {dim}, lse off by {error:.1e}")

    dims = (16, 64, 128, 256) if full else (16,)
    each_served(functools.partial(part, dtype, dim) for dtype in DTYPES for dim in dims)


@trap()
def large_bias_of_a_linear(backend: str, device: torch.device) -> None:
    """A bias with keys that are not neighbours in memory, so large that a kernel copies it, of one shape in several
    dtypes.

    With and without a gradient, which has the layout of the bias.
    """
    full = device.type == "cuda"
    s, heads = (144, 14) if full else (12, 3)  # 14: a tile of heads is not full; 144: nor is the last of keys
    case = Case(seed=50, lead=(2,), heads_k=heads, seq_q=s, seq_k=s, bias_view="linear", dout_scale=1e-3)
    owned, shared = (2, heads, s, s), (1, heads, s, s)
    parts: list[Callable[[], None]] = []
    for shape, wide, learnt in itertools.product((owned, shared), (False, True), (False, True)):
        variant = Variant(bias="pair", bias_float=wide, bias_grad=learnt)
        parts += judged(
            backend,
            device,
            replace(case, variant=variant, bias_shape=shape),
            dtypes=DTYPES if full else ("float32",),
        )
    if full:  # rows that begin at no multiple of 16 bytes
        odd = replace(case, seq_k=139, bias_shape=(1, heads, s, 139))
        variant = Variant(bias="pair", bias_grad=True)
        parts += judged(backend, device, replace(odd, variant=variant))
    each_served(parts)


def _mask_of_tiles(kind: str, rows: int, keys: int, device: torch.device) -> Tensor:
    """A mask that hides whole tiles of 64 x 64, cuts others, and leaves some rows without a key."""
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)
    if kind == "band":
        return ((i - j).abs() <= 40) & (i % 150 < 140)
    if kind == "documents":
        return i // 90 == j // 90
    if kind == "padding":
        return (j < torch.tensor([[keys - 5], [60]], device=device))[:, None, None]
    drawn = torch.Generator().manual_seed(5)
    tiles = torch.rand(4, -(-rows // 64), -(-keys // 64), generator=drawn).to(device) < 0.3
    cut = torch.rand(4, rows, keys, generator=drawn).to(device) < 0.5
    return tiles.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :rows, :keys] & cut


@trap()
def masks_that_hide_tiles(backend: str, device: torch.device) -> None:
    """Masks whose tables name the tiles to compute: rows and tiles without a key, lengths that end inside a tile."""
    rows, keys, dim = (517, 701, 64) if device.type == "cuda" else (140, 200, 16)

    def judge(kind: str, dtype: str, bias: tuple[int, ...], options: dict[str, Any]) -> None:
        randn = functools.partial(torch.randn, device=device, dtype=getattr(torch, dtype))
        q, k, v, dout = randn(2, 4, rows, dim), randn(2, 2, keys, dim), randn(2, 2, keys, dim), randn(2, 4, rows, dim)
        mask = _mask_of_tiles(kind, rows, keys, device)
        inputs = Inputs(q, k, v, bias=randn(bias) if bias else None, mask=mask, dout=dout, options=options)
        with poisoned_memory():
            results = evaluate(inputs, backend, mask=flashsci.BlockMask.from_mask(mask), deterministic=False)
        Judge(inputs, backend not in PLAIN).require(results)

    calls: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("band", (), {}),
        ("documents", (2, 4, rows, keys), {"causal": True}),
        ("graph", (1, 4, rows, keys), {}),
        ("graph", (), {"window": (100, 30)}),
        ("padding", (), {}),
    ]
    if device.type != "cuda":
        calls = calls[1:3]
    dtypes = DTYPES if device.type == "cuda" else DTYPES[:1]
    each_served(
        functools.partial(judge, kind, dtype, bias, options) for kind, bias, options in calls for dtype in dtypes
    )
