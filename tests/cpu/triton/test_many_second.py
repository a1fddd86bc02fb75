"""The double backward along many directions under torch.vmap, interpreted: launches that share P, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.call import ops
from flashsci.testing import Judge, generate, make_inputs, poisoned_memory, second_order_variants
from flashsci.testing.cases import SMALL_LENGTHS
from flashsci.testing.evaluation import evaluate_second_batch
from flashsci.testing.second_tangents import second_direction
from tests.cpu.triton.test_many_directions import call, close, tensors
from tests.cpu.triton.test_second_order_kernels import CASES, case, quick_first

pytestmark = [
    pytest.mark.every(6),
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="Triton interprets without a GPU only; there, tests/gpu has the same"
    ),
]
func = torch.func


@pytest.fixture
def shared(monkeypatch):
    """The numbers of directions of the launches by queries and by keys that share P."""
    from flashsci.backends.triton.plans import dense, many_backward, many_double_backward

    found = []
    launch = many_double_backward.Launch

    def spied(kernel, programs, arguments):
        run = launch(kernel, programs, arguments)
        return lambda *given: found.append(arguments["tiles"][0]) or run(*given)

    monkeypatch.setattr(many_double_backward, "Launch", spied)
    monkeypatch.setattr(many_backward, "NARROW", 64)  # also the calls that are faster without
    dense.plan.cache_clear()  # its launches, made before and here
    yield found
    dense.plan.cache_clear()


def judged(inputs, forward=False):
    """Whether gradients along three directions are right, each by the two-error rule."""
    directions = [inputs.tangents, *second_direction(inputs.tangents)]
    with poisoned_memory():
        found = evaluate_second_batch(inputs, "triton", directions, forward)
    for tangents, results in zip(directions, found, strict=True):
        Judge(replace(inputs, tangents=tangents)).require(results)


EVERYTHING = {
    "bias": "pair", "bias_grad": True, "key_weight": "float", "key_weight_grad": True, "dropout": True, "softcap": True, "lse_grad": True,
    "mask": True, "tangents": "qkvbw",
}  # fmt: skip
NARROW = {
    name: x
    for name, x in CASES.items()
    if not x.variant.gate and x.variant.tangents and max(x.variant.head_dim, x.variant.head_dim_v) <= 64
} | {
    "two chunks": case({"dtype": "float16", "head_dim": 48, "head_dim_v": 24}, layout="bshd"),
    "full bias, window": case({"bias": "pair", "bias_grad": True, "window": True}, bias_shape=(2, 2, 40, 37), causal=True),
    "tangents of v": case({"tangents": "v", "lse_grad": True}),
    "tangents of k": case({"tangents": "k"}),
    "tangents of w": case(
        {"key_weight": "float", "key_weight_grad": True, "tangents": "w", "dropout": True},
        weight_shape=(2, 1, 37), dropout_p=0.3,
    ),
    "everything": case(
        EVERYTHING, bias_shape=(2, 2, 40, 37), weight_shape=(2, 1, 37), dropout_p=0.3, softcap=2.0, mask_shape=(2, 1, 40, 37)
    ),
}  # fmt: skip
QUICK = {
    "fp32", "bf16", "two chunks", "causal, lower right", "window", "softcap and bias", "dropout", "bias of queries", "nothing visible",
    "packed, bias of pairs", "key weights", "ALiBi", "tangents of v", "everything", "no keys",
}  # fmt: skip
# Sums over queries, heads or batch members; and sequences that fit in one tile.
OTHERS = {
    "bias shared by the batch", "bias shared by heads", "bias of two batch dims", "bias of keys", "packed, bias of keys",
    "packed, shared bias of pairs",
}  # fmt: skip


@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
@pytest.mark.parametrize("name", quick_first(NARROW, QUICK))
def test_named(name, forward, shared):
    """Reverse over reverse and forward over reverse."""
    judged(make_inputs(NARROW[name]), forward)
    other = name in OTHERS or "short" in name or name in ("no keys", "no queries")
    assert not (other and shared) and set(shared) <= {3}, (name, shared)
    assert shared or name not in QUICK - {"no keys"}, name


@pytest.mark.parametrize("part", quick_first(range(3), {0}))
def test_generated(part):
    pool = [v for v in second_order_variants(max_dim=64) if not (v.gate or (v.sink and v.key_weight_grad))]
    for generated in generate(90 + part, 4, pool, lengths=SMALL_LENGTHS, score_limit=3000):
        judged(make_inputs(replace(generated, execution="", negated="")), part == 1)


def products(backend, x, wanted=(0, 1, 2), **options):
    """The function from a direction of some of q, k, v to the tangents of their gradients."""
    rest = dict(enumerate(x))

    def energy(*y):
        return call(backend, **options)(*(rest | dict(zip(wanted, y, strict=True))).values()).sin().sum()

    at = tuple(x[i] for i in wanted)
    return lambda *t: func.jvp(func.grad(energy, tuple(range(len(wanted)))), at, t)[1]


def both(x, ways, *rest, **options):
    """Hessian-vector products by the kernels and by the reference."""
    return [torch.vmap(products(b, x, *rest, **options))(*ways) for b in ("triton", "reference")]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_any_number_of_directions(count, shared):
    """Incomplete groups, too. A direction alone goes the way of a call."""
    x = tensors(2)
    close(*both(x, [torch.randn(count, *y.shape) for y in x]))
    assert shared == ([] if count == 1 else [count] * 2)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_some_tensors(wanted, shared):
    """No launch for gradients that are not wanted."""
    x = tensors(2)
    close(*both(x, [torch.randn(3, *x[i].shape) for i in wanted], wanted))
    assert shared == [3]


def test_hessian(shared):
    """Tangents of dO, too: they share P among the cotangents."""
    x = [y[:1, :, :2].contiguous() for y in tensors(1)]
    x[0] = torch.randn(1, 40, 2)
    x[1:] = [torch.randn(1, 37, 2) for _ in range(2)]
    found, due = (func.hessian(lambda v, b=b: call(b)(*x[:2], v).sin().sum())(x[2]) for b in ("triton", "reference"))
    close(found, due)
    assert shared == [x[2].numel()] * len(shared) and shared


def test_tangents_that_are_not_mapped(shared):
    """One for all directions, beside one for each."""
    x = tensors(2)
    same, ways = torch.randn_like(x[0]), torch.randn(3, *x[1].shape)
    found, due = (torch.vmap(products(b, x, (0, 1)), (None, 0))(same, ways) for b in ("triton", "reference"))
    close(found, due)
    assert shared == [3] * 2


def test_directions_of_samples_and_samples_of_directions(shared):
    """Both nestings: the samples become a leading dim, the directions share P."""
    x = tensors(3)
    ways = torch.randn(2, *x[0].shape)
    sample = lambda b, *y: torch.vmap(products(b, y[:3], (0,)))(y[3])  # noqa: E731
    inner = lambda b: torch.vmap(lambda *y: sample(b, *y), (0, 0, 0, 1), 1)(*x, ways)  # noqa: E731
    outer = lambda b: torch.vmap(lambda t: torch.vmap(lambda *y: products(b, y[:3], (0,))(y[3]))(*x, t))(ways)  # noqa: E731
    for nested in (inner, outer):
        close(nested("triton"), nested("reference"))
    assert shared == [2] * 2


def test_directions_of_directions(shared):
    x = tensors(2)
    first, second = torch.randn(2, *x[0].shape), torch.randn(3, *x[1].shape)
    nested = lambda b: torch.vmap(lambda s: torch.vmap(lambda t: products(b, x, (0, 1))(s, t))(second))(first)  # noqa: E731
    close(nested("triton"), nested("reference"))
    assert shared == [6] * 2


def test_mapped_cotangents_go_the_way_of_the_batch(shared):
    """Results are not linear in tangents and cotangents together."""
    x = tensors(2)
    ways, douts = torch.randn(3, *x[0].shape), torch.randn(3, *x[0].shape)

    def of(b):
        pull = lambda q, dout: func.vjp(lambda q: call(b)(q, *x[1:]), q)[1](dout)[0]  # noqa: E731
        return torch.vmap(lambda t, dout: func.jvp(lambda q: pull(q, dout), (x[0],), (t,))[1])(ways, douts)

    close(of("triton"), of("reference"))
    assert shared == []


def test_wider_heads_go_the_way_of_the_batch(shared):
    x = tensors(2, dim=80)
    close(*both(x, [torch.randn(2, *y.shape) for y in x]))
    assert shared == []


def test_tiles_of_a_mask(shared):
    """Kernels go through the table, in both directions."""
    x = [torch.randn(1, 1, n, 16) for n in (300, 290, 290)]
    mask = torch.ones(300, 290, dtype=torch.bool).tril().triu(-60)
    block = flashsci.BlockMask.from_mask(mask)

    def of(b, mask):
        energy = lambda *y: flashsci.attention(*y, mask=mask, backend=b).sin().sum()  # noqa: E731
        return lambda *t: func.jvp(func.grad(energy, (0, 1, 2)), tuple(x), t)[1]

    ways = [torch.randn(2, *y.shape) for y in x]
    close(torch.vmap(of("triton", block))(*ways), torch.vmap(of("reference", mask))(*ways))
    assert shared == [2] * 2


def test_rows_that_begin_anywhere():
    """Tangents of rows of 16 bytes that lie 4 bytes off, and expanded ones."""
    x = tensors(2)
    odd = torch.randn(3, x[0].numel() + 1)[:, : x[0].numel()].view(3, *x[0].shape)
    for ways in (odd, torch.randn(x[0].shape).expand(3, *x[0].shape)):
        close(*both(x, [ways, torch.randn(3, *x[1].shape)], (0, 1)))


def test_gradients_repeat_bitwise_in_any_group():
    """A direction has the same bits beside others."""
    x = tensors(2)
    ways = [torch.randn(5, *y.shape) for y in x]
    found = torch.vmap(products("triton", x))(*ways)
    for part in (slice(0, 2), slice(2, 5), slice(1, 5)):
        for a, b in zip(torch.vmap(products("triton", x))(*(t[part] for t in ways)), found, strict=True):
            assert torch.equal(a, b[part])


def raw(bias=None):
    """The arguments of the raw op for four directions."""
    x = [torch.randn(2, 19, 3, 16).transpose(1, 2) for _ in range(3)]
    out, lse = flashsci.attention(*x, return_lse=True, backend="triton")
    bias = torch.randn(2, 3, 19, 19) if bias is None else bias
    scalars = ops.Scalars(-1, -1, 0.25, 0.0, -1, -1, False, 0.0, "default", False)
    along = [torch.randn(4, *y.shape) for y in (*x, bias)]
    return [*along, None, torch.randn_like(out), None, *ops.Saved(ops.Tensors(*x, bias), out, lse, scalars).flat()]


DROPOUT = {"dropout_p": 0.2, "dropout_seed": torch.tensor([1, 2])}


@pytest.mark.parametrize(("dim", "options", "expected"), [(32, {}, True), (48, {}, False), (48, DROPOUT, True)])
def test_calls_that_are_faster_for_it(dim, options, expected, shared, monkeypatch):
    from flashsci.backends.triton.plans import many_backward

    monkeypatch.setattr(many_backward, "NARROW", 32)
    x = tensors(2, dim=dim)
    close(*both(x, [torch.randn(3, *y.shape) for y in x], **options))
    assert bool(shared) == expected


@pytest.mark.parametrize("need", [127, 73, 38, 0])
def test_results_have_the_strides_that_a_compiler_expects(need):
    given = *raw(), need
    found = torch.ops.flashsci.triton_many_double_backward(*given)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.flashsci.triton_many_double_backward(
            *(mode.from_tensor(y) if isinstance(y, torch.Tensor) else y for y in given)
        )
    for a, b in zip(found, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("at least one is given", dict.fromkeys(range(4))),
        ("with one n", {0: torch.randn(3, 2, 3, 19, 16)}),
        ("tangent of k must have shape", {1: torch.randn(4, 2, 3, 18, 16)}),
        ("dout must have shape", {5: torch.randn(4, 2, 3, 19, 16)}),
    ],
)
def test_the_op_refuses(message, change):
    given = raw()
    for place, x in change.items():
        given[place] = x
    with pytest.raises((ValueError, TypeError), match=message):
        torch.ops.flashsci.triton_many_double_backward(*given, 127)


def test_the_op_refuses_gradients_that_are_sums_over_queries():
    with pytest.raises(flashsci.BackendError, match="along many directions has no kernel"):
        torch.ops.flashsci.triton_many_double_backward(*raw(torch.randn(1, 3, 19, 19)), 8)
