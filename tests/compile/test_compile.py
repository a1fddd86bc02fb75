"""Compilation and export of every backend, in modules and with sizes unknown; the raw ops' declarations.

The features of torch around fused kernels are in test_torch_features.py; here is what those leave open.
"""

import pytest
import torch

import flashsci
from flashsci.backends.cuda import decisions
from flashsci.backends.cuda.library import library_path
from flashsci.choice import differentiate

pytestmark = pytest.mark.every(3)

BACKENDS = ["reference", "sdpa", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, grad=True, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def raw_arguments(kind):
    """Arguments of a raw forward op: every feature that changes shapes, dtypes or aliasing."""
    q, k, v = (draw(1, h, n, d, grad=False) for h, n, d in ((2, 5, 16), (1, 7, 16), (1, 7, 8)))
    tensors = [q, k, v, *(None,) * 8]
    scalars = [-1, -1, 0.25, 0.0, -1, 0, True, 0.0, "default", False]
    if kind == "features":
        tensors[3] = draw(1, 2, 1, 7, grad=False)
        tensors[4] = draw(1, 1, 7, grad=False).abs()
        tensors[5] = torch.ones(1, 1, 5, 7, dtype=torch.bool, device=DEVICE)
        tensors[9] = torch.tensor([1, 2], device=DEVICE)
        scalars[7] = 0.5
    if kind == "packed":
        tensors[:3] = (
            x.transpose(0, 1)
            for x in (
                draw(9, 2, 16, grad=False),
                draw(8, 1, 16, grad=False),
                draw(8, 1, 8, grad=False),
            )
        )
        tensors[6] = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
        tensors[7] = torch.tensor([0, 6, 8], dtype=torch.int32, device=DEVICE)
        scalars[:2] = (5, 6)
    if kind == "empty":
        tensors[1], tensors[2] = tensors[1][:, :, :0], tensors[2][:, :, :0]
    return tensors, scalars


def raw_ops():
    import flashsci.backends.triton  # noqa: F401  (defines them)

    ops = torch.ops.flashsci
    return ops.triton_forward.default, ops.triton_backward.default


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("kind", ["features", "packed", "empty"])
def test_opcheck_forward_and_backward(kind):
    """Schema, fake kernel and dispatch of the raw Triton ops: functional, shapes and strides as declared."""
    forward, backward = raw_ops()
    tensors, scalars = raw_arguments(kind)
    torch.library.opcheck(forward, (*tensors, *scalars), test_utils=CHECKS)
    out, lse = forward(*tensors, *scalars)
    dlse = torch.randn_like(lse)
    need = 7 if tensors[3] is None else 31
    torch.library.opcheck(backward, (None, dlse, *tensors, out, lse, *scalars, need), test_utils=CHECKS)


def test_what_is_not_needed_is_empty():
    forward, backward = raw_ops()
    tensors, scalars = raw_arguments("features")
    out, lse = forward(*tensors, *scalars)
    everything = backward(torch.ones_like(out), None, *tensors, out, lse, *scalars, 31)
    for need in (0, 1, 6, 8, 16):
        found = backward(torch.ones_like(out), None, *tensors, out, lse, *scalars, need)
        for bit, x, full in zip((1, 2, 4, 8, 16), found, everything, strict=True):
            assert x.dtype == full.dtype
            if need & bit:
                torch.testing.assert_close(x, full)
            else:
                assert x.shape == (0,)


def model(backend):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48)
            self.bias = torch.nn.Parameter(torch.randn(2, 1, 1))

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
            out = flashsci.attention(
                q,
                k,
                v,
                bias=self.bias.expand(2, x.shape[1], x.shape[1]),
                causal=True,
                backend=backend,
            )
            return out.transpose(1, 2).flatten(-2)

    return Block().to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_module_with_a_bias_parameter_compiles_whole(backend, compiler):
    """torch.compile(fullgraph=True): no graph break, forward and gradients as in eager mode."""
    torch._dynamo.reset()
    block, x = model(backend), draw(2, 5, 16)
    truth = block(x)
    wanted = torch.autograd.grad(truth.square().sum(), (x, *block.parameters()))
    out = torch.compile(block, fullgraph=True, backend=compiler)(x)
    torch.testing.assert_close(out, truth)
    for a, b in zip(torch.autograd.grad(out.square().sum(), (x, *block.parameters())), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_and_dynamic_shapes_compile(backend):
    torch._dynamo.reset()

    def call(q, k, v):
        if backend == "sdpa":
            return flashsci.attention(q, k, v, scale=0.3, backend=backend)
        out, lse = flashsci.attention(q, k, v, scale=0.3, return_lse=True, backend=backend)
        return out * lse.exp()[..., None]

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9, 12):
        q, k, v = (draw(2, 2, n, 8) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


def test_autocast_compiles():
    torch._dynamo.reset()
    q, k, v = (draw(2, 2, 5, 8) for _ in range(3))

    def call(q):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return flashsci.attention(q, k, v, backend="triton")

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, call(q))


def test_second_derivative_of_a_compiled_call_raises():
    torch._dynamo.reset()
    q, k, v = (draw(1, 2, 5, 8) for _ in range(3))
    call = torch.compile(lambda q: flashsci.attention(q, k, v, backend="triton"), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError):
        (slope,) = torch.autograd.grad(call(q).square().sum(), q, create_graph=True)
        torch.autograd.grad(slope.square().sum(), k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_export_with_a_free_length(backend):
    block, x = model(backend).eval(), draw(2, 5, 16, grad=False)
    length = torch.export.Dim("length", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(block, (x,), dynamic_shapes={"x": {1: length}})
        torch.testing.assert_close(program.module()(x), block(x))
        longer = draw(2, 11, 16, grad=False)
        torch.testing.assert_close(program.module()(longer), block(longer))
    names = {str(node.target) for node in program.graph.nodes}
    if backend == "triton":
        assert "flashsci.triton_forward.default" in names


@pytest.mark.skipif(library_path() is None, reason="flashsci/_C.so was not built")
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_library_is_asked_in_the_middle_of_a_trace(monkeypatch, dynamic):
    """Its answer is of the sizes that the compiler traces with, and adds nothing to the program."""
    torch._dynamo.reset()
    asked, compute = [], differentiate.backward

    def backward(name, dout, dlse, saved, need):
        sizes = saved.tensors.bias.shape
        asked.append((any(type(n) is not int for n in sizes), decisions.hopper_takes(saved, need)))
        return compute(name, dout, dlse, saved, need)

    monkeypatch.setattr(differentiate, "backward", backward)

    def call(q, bias):
        return flashsci.attention(q, q, q, bias=bias, backend="triton")

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, takes in ((128, True), (132, False)):
        q = torch.randn(1, 2, rows, 16).half().requires_grad_()
        bias = torch.randn(1, 2, rows, rows).half().requires_grad_()
        compiled(q, bias).float().sum().backward()
        if not dynamic:
            assert asked[-1] == (False, takes)
    assert asked[0] == (dynamic, True)


OPTIONS = {
    "windows": [dict(window=(2, 3)), dict(window=(4, 5)), dict(window=(-1, 0)), dict(window=(3, 0)), {}],
    "scales": [dict(scale=s, causal=True) for s in (0.3, 0.4, -0.5)],
    "windows and scales": [dict(scale=0.1 * w, window=(w, 0)) for w in (1, 2, 3)] + [dict(scale=0.4, window=(-1, 0))],
    "softcaps": [dict(softcap=c) for c in (1.5, 2.0, 0.0)],
}


@pytest.mark.parametrize("backend", [*BACKENDS, "eager", "auto"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_options_that_change_between_calls(kind, backend):
    """A number that changed once is a symbol to the compiler ever after: what it decides is decided on a symbol."""
    if backend in ("sdpa", "eager") and kind == "softcaps":
        pytest.skip(f"{backend} has no softcap")
    torch._dynamo.reset()
    q, k, v = draw(2, 2, 9, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 16)
    compiled = torch.compile(flashsci.attention, backend="eager", fullgraph=True)
    for options in OPTIONS[kind]:
        results = [attend(q, k, v, backend=backend, **options) for attend in (compiled, flashsci.attention)]
        grads = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in results]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*grads)
