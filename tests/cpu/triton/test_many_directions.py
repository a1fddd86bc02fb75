"""Tangents along many directions under torch.vmap, interpreted: one launch that shares P, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.call import ops
from flashsci.testing import Judge, generate, make_inputs, poisoned_memory, second_order_variants
from flashsci.testing.cases import SMALL_LENGTHS
from flashsci.testing.evaluation import evaluate_along
from flashsci.testing.second_tangents import second_direction
from tests.cpu.triton.test_second_order_kernels import CASES, case, quick_first

pytestmark = [
    pytest.mark.every(6),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="Triton interprets without a GPU only; there, tests/gpu has the same"
    ),
]
func = torch.func


@pytest.fixture
def shared(monkeypatch):
    """The numbers of directions of the calls that share P."""
    from flashsci.backends.triton.plans import dense, many_jvp

    found = []
    launch = many_jvp.Launch

    def spied(kernel, programs, arguments):
        run = launch(kernel, programs, arguments)
        return lambda *given: found.append(arguments["tiles"][0]) or run(*given)

    monkeypatch.setattr(many_jvp, "Launch", spied)
    dense.plan.cache_clear()  # its launches, made before and here
    yield found
    dense.plan.cache_clear()


def judged(inputs, backend="triton"):
    """Whether tangents along three directions are right, each by the two-error rule."""
    directions = [inputs.tangents, *second_direction(inputs.tangents)]
    with poisoned_memory():
        found = evaluate_along(inputs, backend, directions)
    for tangents, results in zip(directions, found, strict=True):
        Judge(replace(inputs, tangents=tangents)).require(results)


NARROW = {
    name: x
    for name, x in CASES.items()
    if not x.variant.gate and x.variant.tangents and max(x.variant.head_dim, x.variant.head_dim_v) <= 64
} | {
    "two chunks": case({"dtype": "float16", "head_dim": 48, "head_dim_v": 24}, layout="bshd"),
    "tangents of v": case({"tangents": "v"}),
    "tangents of w": case(
        {"key_weight": "float", "key_weight_grad": True, "tangents": "w", "dropout": True},
        weight_shape=(2, 1, 37), dropout_p=0.3,
    ),
}  # fmt: skip
QUICK = {
    "fp32", "bf16", "two chunks", "causal, lower right", "softcap and bias", "dropout", "bias shared by heads", "nothing visible",
    "packed, bias of pairs", "key weights", "ALiBi", "tangents of v", "no keys",
}  # fmt: skip


@pytest.mark.parametrize("name", quick_first(NARROW, QUICK))
def test_named(name, shared):
    judged(make_inputs(NARROW[name]))
    assert shared == ([] if name in ("no keys", "no queries") else [3]), name


@pytest.mark.parametrize("part", quick_first(range(3), {0}))
def test_generated(part):
    pool = [v for v in second_order_variants(max_dim=64) if not (v.gate or (v.sink and v.key_weight_grad))]
    for generated in generate(70 + part, 4, pool, lengths=SMALL_LENGTHS, score_limit=3000):
        judged(make_inputs(generated))


def tensors(*lead, count=3, dim=16):
    torch.manual_seed(2)
    return [torch.randn(*lead, 2, n, dim) for n in (19, 37, 37)][:count]


def call(backend="triton", **options):
    return lambda *x: flashsci.attention(*x, causal=True, backend=backend, **options)


def close(found, due):
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(due), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_any_number_of_directions(count, shared):
    """Incomplete groups, too. A direction alone goes the way of a call."""
    q, k, v = tensors(2)
    ways = torch.randn(count, *k.shape)
    along = lambda t, backend: func.jvp(lambda k: call(backend)(q, k, v), (k,), (t,))[1]  # noqa: E731
    close(torch.vmap(lambda t: along(t, "triton"))(ways), torch.stack([along(t, "reference") for t in ways]))
    assert shared == ([] if count == 1 else [count])


def test_jacfwd(shared):
    q, k, v = (x[:1, :3, :4] for x in tensors())
    found, due = (
        func.jacfwd(lambda q, b=b: flashsci.attention(q, k, v, backend=b))(q) for b in ("triton", "reference")
    )
    close(found, due)
    assert shared == [q.numel()]


def test_the_older_vmap(shared):
    """That of torch.autograd.functional."""
    q, k, v = (x[:1, :3, :4] for x in tensors())
    found, due = (
        torch.autograd.functional.jacobian(
            lambda *x, b=b: flashsci.attention(*x, backend=b, return_lse=True),
            (q, k, v),
            strategy="forward-mode",
            vectorize=True,
        )
        for b in ("triton", "reference")
    )
    close(found, due)
    assert shared == [q.numel() + k.numel() + v.numel()]


def test_the_older_vmap_in_itself():
    """Directions of one level, and of both."""
    from torch._vmap_internals import _vmap

    q, k, v = tensors(2)
    out, lse = flashsci.attention(q, k, v, return_lse=True, backend="triton")
    first, second = torch.randn(3, *q.shape), torch.randn(2, *k.shape)
    scalars = ops.Scalars(-1, -1, 0.25, 0.0, -1, -1, False, 0.0, "default", False)
    saved = ops.Saved(ops.Tensors(q, k, v), out, lse, scalars).flat()
    op = torch.ops.flashsci.triton_jvp

    def of(s, t):
        return op(s, t, None, None, None, *saved)[0]

    close(
        _vmap(lambda s: _vmap(lambda t: of(s, t))(second))(first),
        torch.stack([torch.stack([of(s, t) for t in second]) for s in first]),
    )
    close(
        _vmap(lambda s: _vmap(lambda t: of(s, None) + t.sum())(second))(first),
        torch.stack([torch.stack([of(s, None) + t.sum() for t in second]) for s in first]),
    )
    close(_vmap(lambda s: of(s, None))(first[:1]), of(first[0], None)[None])
    samples = torch.stack([q, q.sin()])
    each = lambda q, s: op(s, None, None, None, None, q, *saved[1:])[0]  # noqa: E731
    close(_vmap(each)(samples, first[:2]), torch.stack([each(samples[n], first[n]) for n in range(2)]))


def test_directions_of_samples_and_samples_of_directions(shared):
    """Both nestings: the samples become a leading dim, the directions share P."""
    x = tensors(3)
    ways = torch.randn(2, *x[0].shape)

    def along(backend, q, k, v, t):
        return func.jvp(lambda q: flashsci.attention(q, k, v, backend=backend), (q,), (t,))[1]

    inner = lambda b: torch.vmap(lambda *y: torch.vmap(lambda t: along(b, *y[:3], t))(y[3]), (0, 0, 0, 1), 1)(*x, ways)  # noqa: E731
    outer = lambda b: torch.vmap(lambda t: torch.vmap(lambda *y: along(b, *y))(*x, t))(ways)  # noqa: E731
    due = torch.stack([along("reference", *x, t) for t in ways])
    for nested in (inner, outer):
        close(nested("triton"), due)
    assert shared == [2, 2]


def test_directions_of_directions(shared):
    q, k, v = tensors(2)
    first, second = torch.randn(2, *q.shape), torch.randn(3, *v.shape)
    along = lambda b, s, t: func.jvp(lambda q, v: call(b)(q, k, v), (q, v), (s, t))[1]  # noqa: E731
    found = torch.vmap(lambda s: torch.vmap(lambda t: along("triton", s, t))(second))(first)
    close(found, torch.stack([torch.stack([along("reference", s, t) for t in second]) for s in first]))
    assert shared == [6]


def test_samples_of_other_masks_and_packed_samples_run_one_by_one():
    """What has no leading dim: each sample is a call of its own, which shares P among its directions."""
    q, k, v = (x.transpose(0, 1) for x in tensors())
    offsets = torch.tensor([0, 7, 19], dtype=torch.int32), torch.tensor([0, 20, 37], dtype=torch.int32)
    samples, ways = torch.stack([q, q.sin()]), torch.randn(3, *q.shape)

    def along(b, q, t):
        return func.jvp(lambda q: flashsci.varlen_attention(q, k, v, *offsets, backend=b), (q,), (t,))[1]

    found = torch.vmap(lambda q: torch.vmap(lambda t: along("triton", q, t))(ways))(samples)
    close(found, torch.stack([torch.stack([along("reference", q, t) for t in ways]) for q in samples]))


def test_wider_heads_go_the_way_of_the_batch(shared):
    q, k, v = tensors(2, dim=80)
    ways = torch.randn(2, *q.shape)
    along = lambda t, b: func.jvp(lambda q: call(b)(q, k, v), (q,), (t,))[1]  # noqa: E731
    close(torch.vmap(lambda t: along(t, "triton"))(ways), torch.stack([along(t, "reference") for t in ways]))
    assert shared == []


def test_rows_that_begin_anywhere():
    """Directions of rows of 16 bytes that lie 4 bytes off, and expanded ones."""
    q, k, v = tensors(2)
    odd = torch.randn(3, q.numel() + 1)[:, : q.numel()].view(3, *q.shape)
    same = torch.randn(q.shape).expand(3, *q.shape)
    along = lambda s, t, b: func.jvp(lambda q, k: call(b)(q, k, v), (q, k), (s, t))[1]  # noqa: E731
    for first in (odd, same):
        second = torch.randn(3, *k.shape)
        found = torch.vmap(lambda s, t: along(s, t, "triton"))(first, second)
        close(found, torch.stack([along(s, t, "reference") for s, t in zip(first, second, strict=True)]))


def test_results_have_the_strides_that_a_compiler_expects():
    x = [torch.randn(2, 19, 3, 16).transpose(1, 2) for _ in range(3)]
    out, lse = flashsci.attention(*x, return_lse=True, backend="triton")
    saved = ops.Saved(ops.Tensors(*x), out, lse, ops.Scalars(-1, -1, 0.25, 0.0, -1, -1, False, 0.0, "default", False))
    tangents = ops.Tangents(*(torch.randn(4, *y.shape) for y in x), None, None)
    given = *tangents, *saved.flat()
    found = torch.ops.flashsci.triton_many_jvp(*given)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.flashsci.triton_many_jvp(
            *(mode.from_tensor(y) if isinstance(y, torch.Tensor) else y for y in given)
        )
    for a, b in zip(found, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("at least one is given", dict.fromkeys("qkv")),
        ("with one n", {"q": torch.randn(3, 2, 2, 19, 16)}),
        ("tangent of k must have shape", {"k": torch.randn(4, 2, 2, 36, 16)}),
        ("at least one is given", {"q": None, "k": None, "v": torch.randn(())}),
    ],
)
def test_the_op_refuses(message, change):
    x = tensors(2)
    out, lse = flashsci.attention(*x, return_lse=True, backend="triton")
    along = dict(zip("qkv", (torch.randn(4, *y.shape) for y in x), strict=True)) | change
    scalars = -1, -1, 0.25, 0.0, -1, -1, False, 0.0, "default", False
    saved = ops.Saved(ops.Tensors(*x), out, lse, ops.Scalars(*scalars))
    with pytest.raises((ValueError, TypeError), match=message):
        torch.ops.flashsci.triton_many_jvp(*along.values(), None, None, *saved.flat())
