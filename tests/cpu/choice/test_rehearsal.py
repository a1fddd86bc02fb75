"""The library names the kernels that it would launch, on a device that is only described; Python decides by these names."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode

from flashsci.backends.cuda import capabilities, decisions, library, rehearsal
from flashsci.backends.cuda.paged import refuse_layout
from flashsci.backends.cuda.rehearsal import A100, H100, T4
from flashsci.call import ops, problem
from flashsci.call.fp8_ops import FP8Scalars, FP8Tensors
from flashsci.call.paged_ops import PagedScalars, PagedTensors
from flashsci.call.problem import Problem
from flashsci.choice import differentiate, gradients
from tests.support import rehearsed

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(
    library.library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)"
)
PLAIN = ops.Scalars(-1, -1, 0.125, 0.0, -1, -1, False, 0.0, "default", False)
HALVES = torch.bfloat16, torch.float16
empty = partial(rehearsed.empty, dtype=torch.bfloat16)


def kernels(q, k, v, bias=None, device=H100, scalars=PLAIN, mask=None, need=7):
    """The folders of the kernels of the forward, and of the backward."""
    tensors = ops.Tensors(q, k, v, bias, mask=mask)
    out, lse = ops.fake_forward(tensors)
    saved = ops.Saved(tensors, out, lse, scalars)
    found = (
        rehearsal.forward_kernels(tensors, scalars, device),
        rehearsal.backward_kernels(out, None, saved, need, device),
    )
    return [None if names is None else rehearsal.folders(names) for names in found]


def inner_heads(batch, rows, heads, columns, dtype=torch.bfloat16):
    return empty(batch, rows, columns, heads, dtype=dtype).permute(0, 3, 1, 2)


CALLS = {
    "dense": ((2, 16, 1024, 64), None, ["sm90/fwd"], ["sm90/bwd"]),
    "short": ((4, 8, 64, 64), None, ["sm90/fwd"], ["sm80/bwd"]),
    "small": ((1000, 6, 16, 32), None, ["sm80/small"], ["sm80/small"]),
    "triangle": ((1, 384, 4, 384, 32), (1, 1, 4, 384, 384), ["sm90/triangle_fwd"], ["sm90/triangle_bwd"]),
    "bias of queries": ((8, 8, 256, 64), (8, 8, 256, 256), ["sm90/fwd"], ["sm90/bwd"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_names_on_hopper(name):
    shape, bias, *wanted = CALLS[name]
    q = empty(*shape)
    given = None if bias is None else empty(*bias)
    found = kernels(q, q, q, given, need=7 if bias is None else 15)
    assert [list(folders) for folders in found] == wanted
    assert all((ROOT / "csrc" / folder).is_dir() for folders in found for folder in folders)


def test_heads_inside_pairs():
    q = empty(2, 384, 16, 24, dtype=torch.float32).transpose(1, 2)
    bias = inner_heads(2, 384, 16, 384, torch.float32)
    assert kernels(q, q, q, bias, need=15) == [("sm90/pair",), ("sm90/pair",)]


def test_decoding_and_grouped_heads():
    q, k = empty(2, 16, 1, 128), empty(2, 2, 4096, 128)
    assert kernels(q, k, k)[0] == ("sm90/decode",)
    assert kernels(q, k, k, device=A100) == [("sm80/fwd",), ("sm80/bwd",)]


def test_older_devices():
    q = empty(2, 4, 100, 64, dtype=torch.float16)
    assert kernels(q, q, q, device=T4) == [("sm75/fwd",), ("sm75/bwd",)]
    single = empty(2, 4, 100, 64, dtype=torch.float32)
    assert kernels(single, single, single, device=T4) == [None, None]


def test_calls_without_scores_launch_nothing():
    q, k = empty(2, 4, 0, 64), empty(2, 4, 7, 64)
    assert kernels(q, k, k) == [(), ()]


def test_what_does_not_fit_raises():
    q = empty(2, 4, 10, 64)
    with pytest.raises(RuntimeError, match="same head dim"):
        kernels(q, empty(2, 4, 10, 32), q)


def drawn(choose: random.Random):
    batch, heads = choose.choice(((2, 4), (17, 4), (6, 8), (1, 16), (40, 2)))
    rows, keys = choose.choice(((16, 16), (48, 24), (70, 66), (300, 70), (384, 384), (128, 200), (1000, 80)))
    dim = choose.choice((16, 24, 32, 64, 128))
    dim_v = choose.choice((dim, dim, 32 if dim < 64 else 64))
    dtype = choose.choice(HALVES)
    q, k, v = (empty(batch, heads, n, d, dtype=dtype) for n, d in ((rows, dim), (keys, dim), (keys, dim_v)))
    bias = mask = None
    if choose.random() < 0.6:
        shape = choose.choice((1, batch)), choose.choice((1, heads)), choose.choice((rows, rows, 1)), keys
        bias = empty(*shape, dtype=choose.choice((dtype, torch.float32)), pad=choose.choice((0, 0, 1, 8)))
    if choose.random() < 0.5:
        shape = choose.choice((1, batch)), choose.choice((1, heads)), choose.choice((1, 1, rows)), keys
        mask = empty(*shape, dtype=torch.bool, pad=choose.choice((0, 0, 16)))
    scalars = PLAIN._replace(
        softcap=choose.choice((0.0, 0.0, 0.0, 5.0)),
        window_right=choose.choice((-1, -1, 0)),
        deterministic=choose.random() < 0.3,
    )
    need = 15 if bias is not None and choose.random() < 0.7 else 7
    return q, k, v, bias, mask, scalars, need


def test_decisions_are_those_of_a_launch_on_the_tensors_themselves():
    """Asked with descriptions of the tensors, of any strides and offsets."""
    choose, seen = random.Random(3), set()
    for _ in range(400):
        q, k, v, bias, mask, scalars, need = drawn(choose)
        folders = kernels(q, k, v, bias, H100, scalars, mask, need)[1]
        by_hopper = folders is not None and (folders[0].startswith("sm90/") or folders[0] == "sm80/small")
        tensors = ops.Tensors(q, k, v, bias, mask=mask)
        saved = ops.Saved(tensors, *ops.fake_forward(tensors), scalars)
        plain = bias is None and mask is None
        assert decisions.hopper_takes(saved, need) == (plain or by_hopper), (q.shape, bias, mask, scalars)
        assert rehearsal.folders(decisions.backward(saved, need)) == folders
        seen.add(by_hopper)
    assert seen == {True, False}


def test_an_offset_into_memory_decides():
    q, bias = empty(2, 4, 128, 64), torch.empty(2, 4, 128, 136, dtype=torch.bfloat16, device="meta")
    for first, taken in ((0, True), (8, True), (4, False)):
        tensors = ops.Tensors(q, q, q, bias[..., first : first + 128])
        saved = ops.Saved(tensors, *ops.fake_forward(tensors), PLAIN)
        assert decisions.hopper_takes(saved, 7) is taken


def test_questions_are_asked_once_and_unseen():
    """By no mode and no transform; again only of another kind of call."""
    q, bias = torch.empty(2, 4, 128, 64), torch.empty(2, 4, 128, 128)
    tensors = ops.Tensors(q.half(), q.half(), q.half(), bias)
    saved = ops.Saved(tensors, *ops.fake_forward(tensors), PLAIN)
    asked = decisions._backward.cache_info
    expected = decisions.hopper_takes(saved, 7)
    before = asked().misses

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Seeing():
        assert decisions.hopper_takes(saved, 7) is expected
        assert asked().misses == before
        decisions.hopper_takes(saved, 15)
    assert asked().misses == before + 1

    def mapped(x):
        given = saved._replace(tensors=tensors._replace(q=x))
        return x.sum() * decisions.hopper_takes(given, 3)

    torch.vmap(mapped)(torch.empty(3, 2, 4, 128, 64).half())


def test_a_compilers_sizes_are_those_it_traces_with():
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 4)
    for keys, taken in ((128, True), (130, False)):
        real = torch.empty(2, 4, 128, 64), torch.empty(2, 4, keys, 64), torch.empty(2, 4, 128, keys)
        q, k, bias = (mode.from_tensor(x.half(), symbolic_context=dynamic) for x in real)
        assert type(bias.shape[3]) is not int
        with mode:
            tensors = ops.Tensors(q, k, k, bias)
            saved = ops.Saved(tensors, *ops.fake_forward(tensors), PLAIN)
        guards = len(shapes.guards)
        assert decisions.hopper_takes(saved, 7) is taken
        assert len(shapes.guards) == guards, "no condition on a size"


def test_short_gradients_by_older_kernels():
    choose, seen = random.Random(4), set()
    for _ in range(300):
        batch, heads = choose.choice(((1, 4), (1, 131), (1, 132), (11, 12)))
        rows, keys = (choose.choice((33, 64, 65, 128, 129, 512, 513)) for _ in range(2))
        dim = choose.choice((16, 32, 40, 64, 72))
        q, k = empty(batch, heads, rows, dim), empty(batch, heads, keys, dim)
        older = kernels(q, k, k)[1] == ("sm80/bwd",)
        problem = Problem(
            "cuda", (9, 0), torch.bfloat16, heads, heads, dim, dim, batch=(batch,), seq_q=rows, seq_k=keys
        )
        assert (capabilities.older_backward(problem) == 80) == older, (q.shape, k.shape)
        seen.add(older)
    assert seen == {True, False}


def test_key_weights_are_refused_where_no_kernel_takes_them():
    """The one rule that Python repeats, because a refusal states it."""
    choose, seen = random.Random(5), set()
    for _ in range(300):
        heads = choose.choice((4, 4, 8))
        rows, keys = (choose.choice((1, 24, 32, 32, 33)) for _ in range(2))
        dims = choose.choice(((16, 16), (64, 64), (64, 4), (68, 16), (16, 18)))
        softcap, right = choose.choice((0.0, 0.0, 0.0, 5.0)), choose.choice((-1, -1, 0))
        biased = choose.random() < 0.1
        shapes = (heads, rows, dims[0]), (4, keys, dims[0]), (4, keys, dims[1])
        q, k, v = (empty(3, *n, dtype=torch.float32) for n in shapes)
        weights = empty(3, 1, keys, dtype=torch.float32)
        bias = empty(3, heads, rows, keys, dtype=torch.float32) if biased else None
        problem = Problem(
            "cuda", (9, 0), torch.float32, heads, 4, *dims, batch=(3,), seq_q=rows, seq_k=keys, key_weight=True,
            softcap=softcap, window_right=right, bias_shape=None if bias is None else tuple(bias.shape),
            precision="tf32x3",
        )  # fmt: skip
        tensors = ops.Tensors(q, k, v, bias, weights)
        scalars = PLAIN._replace(softcap=softcap, window_right=right)
        taken = decisions.takes_weights(tensors, scalars)
        assert (capabilities.rejects(problem) is None) == taken, problem
        seen.add(taken)
    assert seen == {True, False}


def paged(q, cache, columns=4, sequences=2, scale=None, device=H100, generation=0):
    """The kernels of a paged call, and why Python says that there are none."""
    counts = ((sequences, columns), (sequences,), (sequences + 1,))
    tables = (empty(*shape, dtype=torch.int32) for shape in counts)
    tensors = PagedTensors(q, cache, cache, *tables, None, scale, scale)
    out = empty(*q.shape[:-1], cache.shape[-1], dtype=q.dtype)
    scalars = PagedScalars(1, 0.125, 0.0, -1, -1, False)
    found = rehearsal.paged_kernels(tensors, out, scalars, device, generation)
    return found, refuse_layout(tensors, out)


def test_paged_calls():
    q, cache = empty(2, 8, 128), empty(50, 64, 2, 128)
    wide = empty(50, 64, 2, 128, dtype=torch.float8_e4m3fn)
    scale = empty(2, 2, dtype=torch.float32)
    for device, older in ((H100, 90), (A100, 80)):
        names = f"sm{older}/paged/paged_kernel", "paged/combine_kernel"
        assert paged(q, cache, device=device)[0] == names
        assert paged(q, wide, scale=scale, device=device)[0] == names
    assert paged(q, cache, generation=80)[0] == ("sm80/paged/paged_kernel", "paged/combine_kernel")
    assert paged(q, cache, device=T4)[0] is None
    assert paged(empty(0, 8, 128), cache)[0] == (), "no token"
    with pytest.raises(RuntimeError, match="same head dim"):
        paged(empty(2, 8, 64), cache)


def test_the_layouts_that_paged_kernels_refuse_are_those_that_refusals_name():
    choose, seen = random.Random(6), set()
    for _ in range(300):
        dim, page = choose.choice((64, 128, 256)), choose.choice((16, 24, 64, 8, 4096))
        q = empty(choose.choice((1, 7, 64)), 8, dim, pad=choose.choice((0, 0, 0, 4, 8)))
        dtype = choose.choice((torch.bfloat16, torch.float8_e4m3fn))
        cache = empty(9, page, 2, dim, dtype=dtype, pad=choose.choice((0, 0, 8, 16)))
        columns = choose.choice((1, 40, 1 << 17, 1 << 22))
        sequences = choose.choice((1, 3, 200))
        try:
            found, reason = paged(q, cache, columns, sequences)
        except RuntimeError as error:
            assert "2^29" in str(error)
            continue
        call = q.stride(), cache.shape, cache.stride(), columns, reason
        assert found is not None or reason is not None, call
        # Blocks are counted by the smallest of all kernels: only a refused call is told of them.
        assert found is None or reason is None or "more blocks" in reason, call
        seen.add(reason is None)
    assert seen == {True, False}


def test_calls_on_8_bit_floats():
    scalars = FP8Scalars(-1, -1, 0.1, 0.0, -1, -1, False, torch.bfloat16, False, False)

    def asked(q, k, scale=None, device=H100, fast=False):
        tensors = FP8Tensors(q, k, k, scale, None, None, None, None)
        return rehearsal.fp8_kernels(tensors, scalars._replace(fast=fast), device)

    x = empty(2, 4, 256, 128, dtype=torch.float8_e4m3fn)
    assert asked(x, x) == asked(x, x, fast=True) == ("sm90/fp8/fp8_forward_kernel",)
    assert asked(x, x, empty(2, 4, 2, dtype=torch.float32)) == asked(x, x)
    assert asked(x, x, device=A100) is None
    assert asked(empty(2, 4, 256, 128, dtype=x.dtype, pad=8), x) is None
    assert asked(x[:, :, :0], x) == ()
    with pytest.raises(RuntimeError, match="q_scale of shape"):
        asked(x, x, empty(2, 4, 3, dtype=torch.float32))


def test_calls_that_kernels_of_inner_heads_take():
    """The other rule that Python repeats: a Problem has no strides, and backends are chosen by it."""
    choose, seen = random.Random(7), set()
    for _ in range(300):
        dtype = choose.choice((torch.float32, torch.bfloat16, torch.float16))
        bias_dtype = choose.choice((torch.float32, dtype))
        dims = choose.choice(((24, 24), (32, 32), (16, 16), (20, 32), (18, 18), (64, 64)))
        heads, rows, keys = (
            choose.choice((4, 8, 16)),
            choose.choice((64, 100)),
            choose.choice((64, 101)),
        )
        sizes = (rows, dims[0]), (keys, dims[0]), (keys, dims[1])
        q, k, v = (empty(2, n, heads, d, dtype=dtype).transpose(1, 2) for n, d in sizes)
        bias = inner_heads(2, rows, heads, keys, bias_dtype)
        softcap, right = choose.choice((0.0, 0.0, 5.0)), choose.choice((-1, -1, 0))
        problem = Problem(
            "cuda", (9, 0), dtype, heads, heads, *dims, batch=(2,), seq_q=rows, seq_k=keys, inner_heads=True,
            bias_shape=tuple(bias.shape), bias_dtype=bias_dtype, softcap=softcap, window_right=right, precision="tf32x3",
        )  # fmt: skip
        scalars = PLAIN._replace(softcap=softcap, window_right=right)
        found = kernels(q, k, v, bias, scalars=scalars, need=15)
        taken = [folders[0].startswith("sm90/pair") for folders in found if folders]
        assert taken == [capabilities._may_take_pairs(problem)] * 2, problem
        seen.update(taken)
    assert seen == {True, False}


@pytest.mark.parametrize("trace", ["jit.trace", "make_fx", "make_fx, symbolic"])
def test_the_backend_of_gradients_is_decided_with_numbers(trace, monkeypatch):
    """Sizes are tensors under torch.jit.trace, and symbols in a trace of any sizes: neither can be a key of a cache."""

    def problem_of(*facts):
        return replace(problem.problem_of(*facts), device_type="cuda", capability=(9, 0))

    monkeypatch.setattr(differentiate, "problem_of", problem_of)
    monkeypatch.setattr(differentiate, "_gradients_of", lru_cache(differentiate._gradients_of.__wrapped__))
    choice = gradients.named("cuda")
    module = gradients.sharing(choice)
    decided = []

    def decide(q, bias):
        tensors = ops.Tensors(q, q, q, bias)
        saved = ops.Saved(tensors, q, q[..., 0].float(), PLAIN)
        decided.append(differentiate._gradient_backend(choice, module, saved, 15))
        return q + bias.sum()

    given = torch.randn(2, 4, 32, 64, dtype=torch.bfloat16), torch.randn(1, 4, 32, 32, dtype=torch.bfloat16)
    decide(*given)
    if trace == "jit.trace":
        traced = torch.jit.trace(decide, given, check_trace=False)
    else:
        traced = make_fx(decide, tracing_mode="symbolic" if "symbolic" in trace else "real")(*given)
    assert torch.equal(traced(*given), given[0] + given[1].sum())
    assert len(set(decided)) == 1 and len(decided) == 2
