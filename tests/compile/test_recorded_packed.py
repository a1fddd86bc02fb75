"""Packed and jagged calls, and lengths that the data decides, in one compiled or exported graph."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.choice.choose import recorded_reference
from tests.support.everywhere import BACKENDS, DEVICE

pytestmark = [pytest.mark.usefixtures("loaded"), pytest.mark.every(8)]
every = pytest.mark.parametrize("backend", ["auto", *(b for b in BACKENDS if b != "sdpa")])
OFFSETS = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 2, 5], [0, 4, 4, 11])]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def leaf(*shape):
    return torch.randn(shape, device=DEVICE).requires_grad_()


def agree(found, wanted, inputs):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(found.sin().sum(), inputs),
        torch.autograd.grad(wanted.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every
@pytest.mark.parametrize("name", ["plain", "bias", "sink", "weights"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_packed_calls_compile_in_one_graph(backend, name, compiler):
    if backend == "cuda" and name in ("bias", "weights"):
        pytest.skip("the cuda backend does not serve it")
    option = {"bias": "bias", "sink": "sink", "weights": "key_weight"}.get(name)

    def call(q, k, v, offsets, more):
        options = {} if option is None else {option: more}
        return flashsci.varlen_attention(q, k, v, offsets, backend=backend, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=compiler)
    for offsets in OFFSETS:
        total, lengths = int(offsets[-1]), offsets.diff()
        inputs = [leaf(total, 2, 16), leaf(total, 2, 16), leaf(total, 2, 16)]
        more = {
            "bias": lambda n=lengths: leaf(1, int((n * n).sum())),
            "sink": lambda: leaf(2),
            "weights": lambda t=total: torch.rand(t, device=DEVICE).requires_grad_(),
        }.get(name, lambda: None)()
        wanted = call(*inputs, offsets, more)
        found = compiled(*inputs, offsets, more)
        agree(found, wanted, [*inputs, *([] if more is None else [more])])


@every
def test_packed_calls_are_exported(backend):
    class Block(torch.nn.Module):
        def forward(self, q, k, v, offsets):
            return flashsci.varlen_attention(q, k, v, offsets, backend=backend)

    rows = torch.export.Dim("rows", min=2, max=64)
    draw = lambda n: [torch.randn(n, 2, 16, device=DEVICE) for _ in range(3)]  # noqa: E731
    shapes = ({0: rows}, {0: rows}, {0: rows}, None)
    program = torch.export.export(Block(), (*draw(5), OFFSETS[0]), dynamic_shapes=shapes)
    others = draw(7), torch.tensor([0, 4, 7], dtype=torch.int32, device=DEVICE)
    found = program.module()(*others[0], others[1])
    torch.testing.assert_close(found, Block()(*others[0], others[1]), rtol=1e-4, atol=1e-5)


@every
@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("lse", [True, False])
def test_jagged_tensors_compile_in_one_graph(backend, heads, lse):
    def jagged(lengths):
        inner = (2, 16) if heads else (16,)
        parts = [torch.randn(n, *inner, device=DEVICE) for n in lengths]
        q = torch.nested.nested_tensor(parts, layout=torch.jagged)
        k = torch.nested.nested_tensor_from_jagged(torch.randn_like(q.values()), q.offsets())
        return q.requires_grad_(), k.requires_grad_()

    def call(q, k):
        if heads:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        found = flashsci.attention(q, k, k, return_lse=lse, backend=backend)
        return (found[0].values(), found[1].values()) if lse else (found.values(),)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ((3, 2), (4, 1, 2)):
        inputs = jagged(lengths)
        found, wanted = compiled(*inputs), call(*inputs)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        gradients = (torch.autograd.grad(sum(x.sin().sum() for x in ends), inputs) for ends in (found, wanted))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a.values(), b.values(), rtol=1e-4, atol=1e-4)


SERVE_ANY_LENGTH = [*(b for b in BACKENDS if b != "sdpa"), "eager"]
FROM_DATA = dict(fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("backend", SERVE_ANY_LENGTH)
def test_lengths_that_the_data_decides(backend):
    """[B, S, H, D] with heads moved forward, S found by nonzero: none of its strides is known while tracing."""

    def call(x, chosen):
        rows = x[chosen.nonzero().squeeze(1)].view(1, -1, 2, 16).transpose(1, 2)
        return flashsci.attention(rows, rows, rows, backend=backend)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for n in (5, 8):
            x, chosen = leaf(n, 32), torch.arange(n, device=DEVICE) % 3 > 0
            agree(compiled(x, chosen), call(x, chosen), [x])


def select(q, k, v, chosen, which):
    rows = chosen.nonzero().squeeze(1)
    return {
        "q": lambda: (q.index_select(-2, rows), k, v),
        "k": lambda: (q, k.index_select(-2, rows), v.index_select(-2, rows)),
        "all": lambda: [x.index_select(-2, rows) for x in (q, k, v)],
        "batch": lambda: [x.index_select(0, rows) for x in (q, k, v)],
    }[which]()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1)}], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "all", "batch"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_auto_takes_a_backend_that_serves_sizes_from_data(backend, which, options, dynamic):
    def call(q, k, v, chosen):
        return flashsci.attention(*select(q, k, v, chosen, which), backend=backend, **options)

    q, k, v = leaf(6, 2, 6, 8), leaf(6, 2, 6, 8), leaf(6, 2, 6, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, dynamic=dynamic, **FROM_DATA)
        for chosen in (torch.arange(6, device=DEVICE) % 3 > 0, torch.ones_like(q[0, 0, :, 0]) > 0):
            agree(compiled(q, k, v, chosen), call(q, k, v, chosen), [q, k, v])


@pytest.mark.parametrize("which", ["q", "k", "batch"])
def test_sdpa_refuses_sizes_from_data_with_advice(which):
    def call(q, k, v, chosen):
        return flashsci.attention(*select(q, k, v, chosen, which), backend="sdpa")

    q = torch.randn(6, 2, 6, 8, device=DEVICE)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(Exception, match=r"cannot serve this call: SDPA's rules.*depend on data; backend="),
    ):
        torch.compile(call, **FROM_DATA)(q, q, q, torch.ones(6, device=DEVICE) > 0)


def test_opcheck_of_the_packed_reference():
    recorded_reference()
    ops = torch.ops.flashsci
    q, k, v = (torch.randn(2, 5, 16, device=DEVICE) for _ in range(3))
    tensors = (q, k, v, None, None, None, OFFSETS[0], OFFSETS[0], None, None, None)
    scalars = (-1, -1, 0.25, 0.0, -1, 0, False, 0.0, "default", False)
    torch.library.opcheck(ops.reference_packed_forward.default, (*tensors, *scalars))
    out, lse = ops.reference_packed_forward(*tensors, *scalars)
    given = (*tensors, out, lse, *scalars)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    tangents = (torch.randn_like(q), None, torch.randn_like(v), None, None)
    torch.library.opcheck(ops.reference_packed_backward.default, (upstream[0], None, *given, 7))
    torch.library.opcheck(ops.reference_packed_jvp.default, (*tangents, *given))
    more = (*tangents, *upstream, *given, 103)
    torch.library.opcheck(ops.reference_packed_double_backward.default, more)


def test_the_packed_reference_has_its_second_order():
    """Compiled forces, by the ops' own second derivatives."""
    offsets = OFFSETS[0]

    def loss(q, k, v, backend):
        out, lse = flashsci.varlen_attention(q, k, v, offsets, return_lse=True, backend=backend)
        return out.sin().sum() + lse.cos().sum()

    inputs = [torch.randn(5, 2, 16, device=DEVICE) for _ in range(3)]
    second = torch.func.grad(lambda *x: torch.func.grad(loss)(*x, "reference").square().sum(), argnums=(0, 1, 2))
    tangents = lambda *x: torch.func.jvp(lambda *y: loss(*y, "reference"), x, x)[1]  # noqa: E731
    for call in (second, lambda *x: (tangents(*x),)):
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
        for a, b in zip(found, call(*inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
