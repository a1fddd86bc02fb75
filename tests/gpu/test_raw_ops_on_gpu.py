"""Adversarial use of the CUDA ops with CUDA tensors: each call raises a clear error, and the context survives all of them.

tests/cpu/call/test_raw_ops.py has the Triton ops, whose checks are the same on any device.
"""

from __future__ import annotations

import math

import pytest
import torch

from flashsci.testing import poisoned_memory
from tests.support.judged_cases import require

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FORWARD = ("q", "k", "v", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k")
SCALARS = {
    "max_seqlen_q": -1, "max_seqlen_k": -1, "scale": 0.25, "softcap": 0.0, "window_left": -1, "window_right": -1,
    "lower_right": False, "tf32": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def loaded():
    require("cuda")
    yield
    torch.cuda.synchronize()  # an access out of bounds would show here at the latest


def rand(*shape, dtype=torch.float16, device=DEVICE):
    return torch.randn(shape, device=device).to(dtype)


def single(*shape):
    return rand(*shape, dtype=torch.float32)


def ints(*values, dtype=torch.int32, device=DEVICE):
    return torch.tensor(values, dtype=dtype, device=device)


def dense():
    return {
        "q": rand(2, 4, 5, 16),
        "k": rand(2, 2, 7, 16),
        "v": rand(2, 2, 7, 8),
        "out": rand(2, 4, 5, 8),
        "dout": rand(2, 4, 5, 8),
        "lse": single(2, 4, 5),
        "dlse": single(2, 4, 5),
    }


def packed():
    return {
        "q": rand(4, 5, 16), "k": rand(2, 7, 16), "v": rand(2, 7, 8), "out": rand(4, 5, 8), "dout": rand(4, 5, 8),
        "lse": single(4, 5), "dlse": single(4, 5), "cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 7),
    }  # fmt: skip


def call(op, values):
    """One of the two ops with the values given by name."""
    tensors = [values.get(name) for name in FORWARD]
    scalars = [values.get(name, default) for name, default in SCALARS.items()]
    generation = values.get("generation", 0)
    starts = {"bias_offsets": values["bias_offsets"]} if "bias_offsets" in values else {}
    if op == "forward":
        return torch.ops.flashsci.cuda_forward(*tensors, *scalars, generation, **starts)
    return torch.ops.flashsci.cuda_backward(
        values.get("dout"), values.get("dlse"), *tensors, values["out"], values["lse"], *scalars,
        values.get("deterministic", False), generation, values.get("need", 15), **starts,
    )  # fmt: skip


def cases():
    """(op, call that is fine, message, values that replace its own); tensors are made when the test runs."""
    dense_table = (
        ("share one dtype", lambda: {"k": single(2, 2, 7, 16)}),
        ("share one dtype", lambda: {"v": rand(2, 2, 7, 8).bfloat16()}),
        ("float16, bfloat16 or float32", lambda: {n: x.double() for n, x in dense().items()}),
        ("float16, bfloat16 or float32", lambda: {n: x.int() for n, x in dense().items()}),
        ("must be CUDA tensors", lambda: {"k": rand(2, 2, 7, 16, device="cpu")}),
        ("must be CUDA tensors", lambda: {"q": rand(2, 4, 5, 16, device="cpu")}),
        ("same number of dims", lambda: {"k": rand(2, 7, 16)}),
        ("same number of dims", lambda: {"q": rand(16), "k": rand(16), "v": rand(16)}),
        ("same number of dims", lambda: {"q": rand(), "k": rand(), "v": rand()}),
        ("same number of dims", lambda: {n: dense()[n][None, None] for n in "qkv"}),
        ("leading dims of q, k and v differ", lambda: {"k": rand(1, 2, 7, 16)}),
        ("same heads and keys", lambda: {"v": rand(2, 2, 6, 8)}),
        ("same heads and keys", lambda: {"v": rand(2, 1, 7, 8)}),
        ("same head dim", lambda: {"k": rand(2, 2, 7, 8)}),
        ("head dims must be 1 to 256", lambda: {"v": rand(2, 2, 7, 0)}),
        ("head dims must be 1 to 256", lambda: {"q": rand(2, 4, 5, 257), "k": rand(2, 2, 7, 257)}),
        ("multiple of those of k", lambda: {"k": rand(2, 3, 7, 16), "v": rand(2, 3, 7, 8)}),
        ("multiple of those of k", lambda: {"k": rand(2, 0, 7, 16), "v": rand(2, 0, 7, 8)}),
        ("last dim of q, k and v must be contiguous", lambda: {"k": rand(2, 2, 7, 32)[..., ::2]}),
        ("last dim of q, k and v must be contiguous", lambda: {"q": rand(2, 4, 5, 1).expand(2, 4, 5, 16)}),
        ("bias must have as many dims as q", lambda: {"bias": single(5, 7)}),
        ("bias must have as many dims as q", lambda: {"bias": single(1, 2, 4, 5, 7)}),
        ("bias .* does not broadcast", lambda: {"bias": single(2, 4, 5, 6)}),
        ("bias .* does not broadcast", lambda: {"bias": single(2, 2, 5, 7)}),
        ("bias must have q's dtype or float32", lambda: {"bias": rand(2, 4, 5, 7).bfloat16()}),
        ("bias must have q's dtype or float32", lambda: {"bias": rand(2, 4, 5, 7) > 0}),
        ("bias must be on the device of q", lambda: {"bias": rand(2, 4, 5, 7, device="cpu")}),
        ("mask must have as many dims as q", lambda: {"mask": single(7) > 0}),
        ("mask .* does not broadcast", lambda: {"mask": single(2, 4, 5, 8) > 0}),
        ("mask must be bool", lambda: {"mask": rand(2, 4, 5, 7)}),
        ("mask must be on the device of q", lambda: {"mask": rand(2, 4, 5, 7, device="cpu") > 0}),
        ("scale must be finite", lambda: {"scale": math.inf}),
        ("scale must be finite", lambda: {"scale": math.nan}),
        ("scale must be finite", lambda: {"scale": 1e300}),
        ("softcap must be >= 0", lambda: {"softcap": -1.0}),
        ("softcap must be >= 0", lambda: {"softcap": math.nan}),
        ("softcap must be >= 0", lambda: {"softcap": math.inf}),
        ("window_left and window_right must be >= 0", lambda: {"window_left": -2}),
        ("window_left and window_right must be >= 0", lambda: {"window_right": -(2**40)}),
        ("of generation sm42", lambda: {"generation": 42}),
        ("go together", lambda: {"cu_seqlens_q": ints(0, 5)}),
        ("packed tensors are", lambda: {"cu_seqlens_q": ints(0, 5), "cu_seqlens_k": ints(0, 7)}),
    )
    packed_table = (
        ("go together", lambda: {"cu_seqlens_k": None}),
        ("N \\+ 1 offsets, got", lambda: {"cu_seqlens_q": ints(), "cu_seqlens_k": ints()}),
        ("N \\+ 1 offsets, got", lambda: {"cu_seqlens_q": ints(0, 2, 5)[None]}),
        ("N \\+ 1 offsets, got", lambda: {"cu_seqlens_k": ints(0)[0]}),
        ("offsets, got shape \\[3\\]; call .contiguous", lambda: {"cu_seqlens_q": ints(0, 9, 2, 9, 5)[::2]}),
        ("offsets, got shape \\[3\\]; call .contiguous", lambda: {"cu_seqlens_k": ints(0).expand(3)}),
        ("cu_seqlens_q must be int32", lambda: {"cu_seqlens_q": ints(0, 2, 5, dtype=torch.int64)}),
        ("cu_seqlens_k must be int32", lambda: {"cu_seqlens_k": single(3)}),
        ("cu_seqlens_k must be on the device of q", lambda: {"cu_seqlens_k": ints(0, 4, 7, device="cpu")}),
        ("must have the same length", lambda: {"cu_seqlens_k": ints(0, 7)}),
        ("must have the same length", lambda: {"cu_seqlens_q": ints(0)}),
        ("packed calls take no mask", lambda: {"mask": single(4, 5, 7) > 0}),
        ("a packed bias must be", lambda: {"bias": single(4, 5, 7)}),
        ("a packed bias must be", lambda: {"bias": single(4, 35)}),
        ("does not broadcast to the heads", lambda: {"bias": single(3, 1, 7)}),
        ("keys of a packed bias must be neighbours", lambda: {"bias": single(4, 1, 14)[..., ::2]}),
        (
            "a packed bias must be",
            lambda: {"bias": single(4, 1, 7), "bias_offsets": ints(0, 8, 17, dtype=torch.int64)},
        ),
        ("block starts, got", lambda: {"bias": single(4, 17), "bias_offsets": ints(0, 8, 17)}),
        ("block starts, got", lambda: {"bias": single(4, 17), "bias_offsets": ints(0, 17, dtype=torch.int64)}),
        ("belong to a bias of packed calls", lambda: {"bias_offsets": ints(0, 8, 17, dtype=torch.int64)}),
    )
    results_table = (
        ("out has shape", lambda: {"out": rand(2, 4, 6, 8)}),
        ("out has shape", lambda: {"out": rand(2, 4, 5, 16)}),
        ("out must have as many dims", lambda: {"out": rand(4, 5, 8)}),
        ("out must have q's dtype", lambda: {"out": single(2, 4, 5, 8)}),
        ("out must be on the device of q", lambda: {"out": rand(2, 4, 5, 8, device="cpu")}),
        ("last dim of out must be contiguous", lambda: {"out": rand(2, 4, 5, 16)[..., ::2]}),
        ("dout has shape", lambda: {"dout": rand(2, 2, 5, 8)}),
        ("dout must have q's dtype", lambda: {"dout": single(2, 4, 5, 8)}),
        ("dout must be on the device of q", lambda: {"dout": rand(2, 4, 5, 8, device="cpu")}),
        ("lse has shape", lambda: {"lse": single(2, 4, 6)}),
        ("lse must have one dim less", lambda: {"lse": single(2, 4, 5, 1)}),
        ("lse must be float32", lambda: {"lse": rand(2, 4, 5)}),
        ("lse must be on the device of q", lambda: {"lse": torch.randn(2, 4, 5)}),
        ("dlse has shape", lambda: {"dlse": single(2, 1, 5)}),
        ("dlse must be float32", lambda: {"dlse": rand(2, 4, 5)}),
    )
    for ops, base, table in (
        (("forward", "backward"), dense, dense_table),
        (("forward", "backward"), packed, packed_table),
        (("backward",), dense, results_table),
    ):
        for op in ops:
            for message, change in table:
                yield pytest.param(op, base, message, change, id=f"{op}-{base.__name__}-{message}")


@pytest.mark.parametrize("op, base, message, change", list(cases()))
def test_an_op_refuses(op, base, message, change):
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        call(op, {**base(), **change()})


def test_an_op_refuses_a_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for name in ("k", "bias"):
        values = {**dense(), "bias": single(2, 4, 5, 7)}
        values[name] = values[name].to("cuda:1")
        for op in ("forward", "backward"):
            with pytest.raises(RuntimeError, match="must be on"):
                call(op, values)


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize(
    "starts", [[0], [0, 5], [0, 0, 5], [3, 1, 4], [-5, 2, 99], [0, 2**31 - 1, 5], [-(2**31), 0, 5], [9, 9, 9]]
)
def test_offsets_that_are_wrong_stay_in_bounds(op, starts):
    """Wrong rows at most. The tensors around hold NaN, and so would what is read there; all results are written."""
    values = packed()
    for name in ("q", "k", "v", "out", "dout", "lse", "dlse"):
        x = values[name]
        wide = torch.full((3, *x.shape), math.nan, dtype=x.dtype, device=DEVICE)
        wide[1] = x
        values[name] = wide[1]
    values.update(cu_seqlens_q=ints(*starts), cu_seqlens_k=ints(*starts))
    with poisoned_memory():
        found = call(op, values)
    assert all(x.isnan().sum() == 0 for x in found)


@pytest.mark.parametrize("lengths", [(-7, -7), (0, 0), (1, 1), (2**31, 2**31), (-(2**63), 2**63 - 1)])
def test_longest_lengths_are_hints(lengths):
    values = packed()
    hints = {"max_seqlen_q": lengths[0], "max_seqlen_k": lengths[1]}
    for op in ("forward", "backward"):
        found = call(op, {**values, **hints})
        if min(lengths) < 0 or min(lengths) > 5:
            for a, b in zip(found, call(op, values), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window", [(2**31, 2**31), (2**62, -1), (-1, 2**40), (-1, 2**31 - 1)])
def test_windows_beyond_32_bits_cut_nothing(window):
    for base in (dense, packed):
        values = base()
        sides = {"window_left": window[0], "window_right": window[1]}
        for op in ("forward", "backward"):
            for a, b in zip(call(op, {**values, **sides}), call(op, values), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["expanded", "strided", "sliced", "transposed"])
def test_lse_and_dlse_of_any_strides(dtype, layout):
    """As vmap and slices of larger results give them."""
    values = {n: x.to(dtype) if n in ("q", "k", "v", "out", "dout") else x for n, x in dense().items()}
    values["lse"] = values["lse"] + 3

    def odd(x):
        if layout == "expanded":
            return x[:1].expand_as(x)
        if layout == "strided":
            return torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0]
        if layout == "sliced":
            return torch.cat([torch.full_like(x, math.nan), x], -1)[..., x.shape[-1] :]
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    views = {n: odd(values[n]) for n in ("lse", "dlse")}
    found = call("backward", {**values, **views, "deterministic": True})
    wanted = call(
        "backward",
        {**values, **{n: x.contiguous() for n, x in views.items()}, "deterministic": True},
    )
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("generation", [0, 75, 80, 90])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(0, 4, 2, 5, 7), (2, 0, 2, 5, 7), (2, 4, 2, 0, 7), (2, 4, 2, 5, 0), (0, 4, 2, 0, 0)])
@pytest.mark.parametrize("need", [15, 8, 6, 0])
def test_results_of_calls_without_scores(generation, dtype, sizes, need):
    """Zeros, written: a bias that the batch shares has a gradient also where there is no batch."""
    b, h, hk, m, n = sizes
    values = {
        "q": rand(b, h, m, 16, dtype=dtype),
        "k": rand(b, hk, n, 16, dtype=dtype),
        "v": rand(b, hk, n, 8, dtype=dtype),
        "out": rand(b, h, m, 8, dtype=dtype),
        "dout": rand(b, h, m, 8, dtype=dtype),
        "lse": single(b, h, m),
    }
    for shape in ((1, 1, m, n), (1, h, 1, n), (1, 1, 1, 1), (b, h, m, n)):
        change = {"bias": single(*shape), "generation": generation, "need": need}
        with poisoned_memory():
            found = call("backward", {**values, **change})
            out, lse = call("forward", {**values, **change})
        assert out.eq(0).all() and lse.eq(-math.inf).all()
        for i, (name, x) in enumerate(zip(("q", "k", "v", "bias"), found, strict=True)):
            wanted = {**values, **change}[name].shape if need >> i & 1 else (0,)
            assert x.shape == wanted and x.eq(0).all(), name
