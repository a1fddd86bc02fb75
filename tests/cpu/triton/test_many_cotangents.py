"""Gradients for many cotangents under torch.vmap, interpreted: launches that share P, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.call import ops
from flashsci.testing import Judge, generate, make_inputs, poisoned_memory, variants
from flashsci.testing.cases import SMALL_LENGTHS
from flashsci.testing.evaluation import evaluate_batch
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
    """The numbers of cotangents of the launches that share P."""
    from flashsci.backends.triton.plans import dense, many_backward

    found = []
    launch = many_backward.Launch

    def spied(kernel, programs, arguments):
        run = launch(kernel, programs, arguments)
        if "GROUP" not in arguments:
            return run
        return lambda *given: found.append(arguments["tiles"][0]) or run(*given)

    monkeypatch.setattr(many_backward, "Launch", spied)
    monkeypatch.setattr(many_backward, "NARROW", 64)  # also the calls that are faster without
    dense.plan.cache_clear()  # its launches, made before and here
    yield found
    dense.plan.cache_clear()


def judged(inputs, older=False):
    """Whether gradients for three cotangents are right, each by the two-error rule."""
    inputs = replace(inputs, tangents={})
    pair = inputs.dout, inputs.dlse
    cotangents = [pair, *([None if x is None else f(x) for x in pair] for f in (lambda x: x.flip(-2), lambda x: -x))]
    with poisoned_memory():
        found = evaluate_batch(inputs, "triton", cotangents, older)
    for (dout, dlse), results in zip(cotangents, found, strict=True):
        Judge(replace(inputs, dout=dout, dlse=dlse)).require(results)


NARROW = {
    name: x
    for name, x in CASES.items()
    if not x.variant.gate and max(x.variant.head_dim, x.variant.head_dim_v) <= 64
} | {
    "two chunks": case({"dtype": "float16", "head_dim": 48, "head_dim_v": 24}, layout="bshd"),
    "full bias, window": case({"bias": "pair", "bias_grad": True, "window": True}, bias_shape=(2, 2, 40, 37), causal=True),
    "everything": case(
        {"bias": "pair", "bias_grad": True, "key_weight": "float", "key_weight_grad": True, "dropout": True, "softcap": True,
         "lse_grad": True, "mask": True},
        bias_shape=(2, 2, 40, 37), weight_shape=(2, 1, 37), dropout_p=0.3, softcap=2.0, mask_shape=(2, 1, 40, 37),
    ),
}  # fmt: skip
QUICK = {
    "fp32", "bf16", "two chunks", "causal, lower right", "bias of queries", "dropout", "full bias, window", "nothing visible",
    "packed, bias of pairs", "key weights", "ALiBi", "everything", "no keys",
}  # fmt: skip
# Sums over queries, heads or batch members; and sequences that fit in one tile.
OTHERS = {
    "bias shared by the batch", "bias shared by heads", "bias of two batch dims", "bias of keys", "packed, bias of keys",
    "packed, shared bias of pairs",
}  # fmt: skip


@pytest.mark.parametrize("name", quick_first(NARROW, QUICK))
def test_named(name, shared):
    judged(make_inputs(NARROW[name]))
    other = name in OTHERS or "short" in name or name in ("no keys", "no queries")
    assert not (other and shared) and set(shared) <= {3}, (name, shared)
    assert shared or name not in QUICK - {"no keys"}, name


@pytest.mark.parametrize("name", ["fp32", "everything", "bias of keys"])
def test_the_older_vmap(name, shared):
    """That behind is_grads_batched runs the op sample by sample."""
    judged(make_inputs(NARROW[name]), older=True)
    assert not shared


@pytest.mark.parametrize("part", quick_first(range(3), {0}))
def test_generated(part):
    served = (v for v in variants(max_dim=64) if not (v.gate or (v.sink and v.key_weight_grad)))
    pool = [replace(v, alibi_grad=False) for v in served]  # under a transform, which the slopes' gradient refuses
    for generated in generate(80 + part, 4, pool, lengths=SMALL_LENGTHS, score_limit=3000):
        judged(make_inputs(replace(generated, execution="", negated="")))


def pulled(backend, x, wanted=(0, 1, 2), **options):
    """The function from a cotangent of out to the gradients of some of q, k, v."""
    moved = [x[i] for i in wanted]
    return func.vjp(lambda *y: call(backend, **options)(*(dict(enumerate(x)) | dict(zip(wanted, y, strict=True))).values()), *moved)[1]  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "options", "expected"), [(32, {}, True), (48, {}, False), (48, {"dropout_p": 0.2}, True)]
)
def test_calls_that_are_faster_for_it(dim, options, expected, shared, monkeypatch):
    from flashsci.backends.triton.plans import many_backward

    monkeypatch.setattr(many_backward, "NARROW", 32)
    x = torch.randn(3, 1, 2, 70, dim).unbind()
    torch.vmap(pulled("triton", x, **options))(torch.randn(3, *x[0].shape))
    assert bool(shared) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_any_number_of_cotangents(count, shared):
    """Incomplete groups, too. A cotangent alone goes the way of a call."""
    x = tensors(2)
    ways = torch.randn(count, *x[0].shape)
    close(torch.vmap(pulled("triton", x))(ways), torch.vmap(pulled("reference", x))(ways))
    assert shared == ([] if count == 1 else [count] * 2)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_some_gradients(wanted, shared):
    """No launch for those that are not wanted; short sequences share P, too, unless one program has all gradients."""
    x = [y[..., :17, :] for y in tensors(2)]
    ways = torch.randn(3, *x[0].shape)
    close(torch.vmap(pulled("triton", x, wanted))(ways), torch.vmap(pulled("reference", x, wanted))(ways))
    assert shared == [3]
    torch.vmap(pulled("triton", x))(ways)
    assert shared == [3]


def test_jacrev(shared):
    x = tensors(1)
    found, due = (
        func.jacrev(lambda k, b=b: call(b)(x[0], k, x[2])[0, 0, ::9, :2])(x[1]) for b in ("triton", "reference")
    )
    close(found, due)
    assert shared == [3 * 2]


def test_the_older_jacobian(shared):
    x = tensors(1)
    found, due = (
        torch.autograd.functional.jacobian(lambda *y, b=b: call(b)(*y)[0, 0, ::9, :2], tuple(x), vectorize=True)
        for b in ("triton", "reference")
    )
    close(found, due)
    assert not shared


def test_the_older_vmap_in_itself():
    from torch._vmap_internals import _vmap

    x = tensors(2)
    out, lse = flashsci.attention(*x, return_lse=True, backend="triton")
    saved = ops.Saved(
        ops.Tensors(*x), out, lse, ops.Scalars(-1, -1, 0.25, 0.0, -1, -1, False, 0.0, "default", False)
    ).flat()
    first, second = torch.randn(3, *out.shape), torch.randn(2, *lse.shape)
    of = lambda s, t: torch.ops.flashsci.triton_backward(s, t, *saved, 2)[1]  # noqa: E731
    found = _vmap(lambda s: _vmap(lambda t: of(s, t))(second))(first)
    close(found, torch.stack([torch.stack([of(s, t) for t in second]) for s in first]))


def test_cotangents_of_samples_and_samples_of_cotangents(shared):
    """Both nestings: the samples become a leading dim, the cotangents share P."""
    x = tensors(3)
    ways = torch.randn(2, *x[0].shape)
    inner = lambda b: torch.vmap(lambda *y: torch.vmap(pulled(b, y[:3], (0, 2)))(y[3]), (0, 0, 0, 1), 1)(*x, ways)  # noqa: E731
    outer = lambda b: torch.vmap(lambda t: torch.vmap(lambda *y: pulled(b, y[:3], (0, 2))(y[3]))(*x, t))(ways)  # noqa: E731
    for nested in (inner, outer):
        close(nested("triton"), nested("reference"))
    assert shared == [2] * 4


def test_cotangents_of_cotangents(shared):
    x = tensors(2)
    first, second = torch.randn(2, *x[0].shape), torch.randn(3, *x[0].shape[:-1])
    both = lambda b: func.vjp(lambda q, v: call(b, return_lse=True)(q, x[1], v), x[0], x[2])[1]  # noqa: E731
    nested = lambda b: torch.vmap(lambda s: torch.vmap(lambda t: both(b)((s, t)))(second))(first)  # noqa: E731
    close(nested("triton"), nested("reference"))
    assert shared == [6] * 2


def test_second_derivatives_of_a_batch(shared):
    """Those of a recorded graph use the ops of one direction; under vmap over cotangents first gradients share P."""
    x = tensors(2)
    ways = torch.randn(2, *x[0].shape)

    def of(backend):
        def curve(q):
            found = torch.vmap(pulled(backend, (q, *x[1:]), (1, 2)))(ways)
            return sum(y.sin().sum() for y in found)

        return func.grad(curve)(x[0])

    close(of("triton"), of("reference"))
    assert set(shared) <= {2}


def test_wider_heads_go_the_way_of_the_batch(shared):
    x = tensors(2, dim=80)
    ways = torch.randn(2, *x[0].shape)
    close(torch.vmap(pulled("triton", x))(ways), torch.vmap(pulled("reference", x))(ways))
    assert shared == []


def test_rows_that_begin_anywhere():
    """Cotangents of rows of 16 bytes that lie 4 bytes off, expanded ones, and of two batch dims that do not merge."""
    x = tensors(2)
    odd = torch.randn(3, x[0].numel() + 1)[:, : x[0].numel()].view(3, *x[0].shape)
    for ways in (odd, torch.randn(x[0].shape).expand(3, *x[0].shape)):
        close(torch.vmap(pulled("triton", x))(ways), torch.vmap(pulled("reference", x))(ways))
    x = tensors(2, 3)
    ways = torch.randn(3, 3, 2, *x[0].shape[2:]).transpose(1, 2)
    close(torch.vmap(pulled("triton", x))(ways), torch.vmap(pulled("reference", x))(ways))


def test_tiles_of_a_mask(shared):
    """Kernels go through the table, in both directions."""
    x = [torch.randn(1, 1, n, 16) for n in (300, 290, 290)]
    mask = torch.ones(300, 290, dtype=torch.bool).tril().triu(-60)
    of = {"triton": flashsci.BlockMask.from_mask(mask), "reference": mask}
    ways = torch.randn(2, *x[0].shape)
    found, due = (
        torch.vmap(func.vjp(lambda *y, b=b: flashsci.attention(*y, mask=of[b], backend=b), *x)[1])(ways) for b in of
    )
    close(found, due)
    assert shared == [2] * 2


def test_gradients_repeat_bitwise_in_any_group():
    """A direction has the same bits beside others."""
    x = tensors(2)
    ways = torch.randn(5, *x[0].shape)
    found = torch.vmap(pulled("triton", x))(ways)
    for part in (slice(0, 2), slice(2, 5), slice(1, 5)):
        for a, b in zip(torch.vmap(pulled("triton", x))(ways[part]), found, strict=True):
            assert torch.equal(a, b[part])


def raw():
    """The arguments of the raw op for four cotangents, after these."""
    x = [torch.randn(2, 19, 3, 16).transpose(1, 2) for _ in range(3)]
    out, lse = flashsci.attention(*x, return_lse=True, backend="triton")
    bias = torch.randn(2, 3, 19, 19)
    scalars = ops.Scalars(-1, -1, 0.25, 0.0, -1, -1, False, 0.0, "default", False)
    return ops.Saved(ops.Tensors(*x, bias), out, lse, scalars).flat()


@pytest.mark.parametrize("need", [31, 9, 6, 0])
def test_results_have_the_strides_that_a_compiler_expects(need):
    given = torch.randn(4, 2, 3, 19, 16), torch.randn(4, 2, 3, 19), *raw(), need
    found = torch.ops.flashsci.triton_many_backward(*given)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.flashsci.triton_many_backward(
            *(mode.from_tensor(y) if isinstance(y, torch.Tensor) else y for y in given)
        )
    for a, b in zip(found, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("at least one is given", (None, None)),
        ("with one n", (torch.randn(3, 2, 3, 19, 16), torch.randn(4, 2, 3, 19))),
        ("dout must have shape", (torch.randn(4, 2, 3, 18, 16), None)),
        ("at least one is given", (torch.randn(()), None)),
    ],
)
def test_the_op_refuses(message, change):
    with pytest.raises((ValueError, TypeError), match=message):
        torch.ops.flashsci.triton_many_backward(*change, *raw(), 7)


def test_the_op_refuses_gradients_that_are_sums_over_queries():
    *tensors_, bias = raw()[:4]
    given = *tensors_, bias[:1], *raw()[4:]
    with pytest.raises(flashsci.BackendError, match="many cotangents have no kernel"):
        torch.ops.flashsci.triton_many_backward(torch.randn(4, 2, 3, 19, 16), None, *given, 8)
