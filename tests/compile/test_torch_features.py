"""Fused kernels inside torch's machinery: opcheck, compile, export, functorch, checkpoint, autocast, CUDA graphs.

Without a GPU the Triton kernels are interpreted (tests/conftest.py); with one, the CUDA kernels take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashsci
from flashsci.call import ops
from flashsci.choice import backends
from flashsci.testing import bounds

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FUSED = ("triton", "cuda") if GPU else ("triton",)
for name in FUSED:  # their ops exist once they are loaded
    assert backends.BACKENDS[name].unavailable() is None, backends.BACKENDS[name].unavailable()
fused = pytest.mark.parametrize("backend", FUSED)
SCALARS = (-1, -1, 0.25, 0.0, -1, 0, False, 0.0, "default", False)


def qkv(*shape: int, grad: bool = True, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    shape = shape or (2, 2, 12, 16)
    dtype = dtype or (torch.float16 if GPU else torch.float32)
    q, k, v = torch.randn(3, *shape, device=DEVICE).to(dtype).unbind(0)
    return tuple(x.clone().requires_grad_(grad) for x in (q, k, v))  # type: ignore[return-value]


def attend(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    return flashsci.attention(q, k, v, causal=True, backend=backend)


def squares(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    out, lse = flashsci.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    return out.float().square().sum() + lse.sin().sum()


def close(a: Tensor, b: Tensor) -> None:
    # The same kernel on the same numbers: only what surrounds it differs.
    torch.testing.assert_close(a, b, atol=0, rtol=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("wide", (False, True))  # their scores are held between products
@pytest.mark.parametrize("bias", (None, "pair"))
def test_opcheck_of_the_triton_ops(bias: str | None, wide: bool) -> None:
    shape = (2, 2, 12, 132 if wide else 16)
    q, k, v = qkv(*shape, grad=False, dtype=torch.float32 if wide else None)
    extra = None if bias is None else torch.randn(2, 1, 12, 12, device=DEVICE)
    weight = None if bias is None else torch.rand(2, 1, 12, device=DEVICE)
    keys = k.transpose(0, 1).contiguous().transpose(0, 1)
    tensors = (q, keys, v, extra, weight, *(None,) * 6)
    forward = torch.ops.flashsci.triton_forward.default
    torch.library.opcheck(forward, (*tensors, *SCALARS))
    out, lse = forward(*tensors, *SCALARS)
    for need in (ops.NEED_Q, ops.NEED_K | ops.NEED_V, 7 if bias is None else 31):
        arguments = (torch.randn_like(out), None, *tensors, out, lse, *SCALARS, need)
        torch.library.opcheck(torch.ops.flashsci.triton_backward.default, arguments)
    tangents = (torch.randn_like(q), None, torch.randn_like(v), None, None)
    if bias is not None:
        tangents = (
            None,
            torch.randn_like(k),
            None,
            torch.randn_like(extra),
            torch.randn_like(weight),
        )
    given = (*tensors, out, lse, *SCALARS)
    torch.library.opcheck(torch.ops.flashsci.triton_jvp.default, (*tangents, *given))
    for need in (ops.NEED_DOUT, ops.NEED_Q | ops.NEED_DLSE, 103 if bias is None else 127):
        arguments = (*tangents, torch.randn_like(out), torch.randn_like(lse), *given, need)
        torch.library.opcheck(torch.ops.flashsci.triton_double_backward.default, arguments)


@pytest.mark.skipif(not GPU, reason="the CUDA ops need a GPU")
def test_opcheck_of_the_cuda_ops() -> None:
    from flashsci.backends import cuda

    assert cuda.unavailable() is None, cuda.unavailable()
    q, k, v = qkv(grad=False)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    tensors, scalars = (q, k, v, *(None,) * 4), (*SCALARS[:7], False)
    forward, backward = torch.ops.flashsci.cuda_forward, torch.ops.flashsci.cuda_backward
    torch.library.opcheck(forward.default, (*tensors, *scalars, 0))
    units = cuda.build_info()["units"]
    generations = [g for g in (90, 80, 75) if f"cuda/sm{g}/bwd_fp16" in units]
    if not generations:
        pytest.skip("this build has no CUDA backward")
    out, lse = forward(*tensors, *scalars, 0)
    for need in (15, 1, 6, 0):
        arguments = (torch.randn_like(out), None, *tensors, out, lse, *scalars, True)
        arguments = (*arguments, generations[0], need)
        torch.library.opcheck(backward.default, arguments)


@fused
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("compiler", ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_compile_training_step_in_one_graph(backend: str, dynamic: bool, compiler: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(squares, fullgraph=True, dynamic=dynamic, backend=compiler)
    for length in (12, 20) if dynamic else (12,):
        q, k, v = qkv(2, 2, length, 16)
        eager = torch.autograd.grad(squares(q, k, v, backend), (q, k, v))
        for a, b in zip(torch.autograd.grad(compiled(q, k, v, backend), (q, k, v)), eager, strict=True):
            torch.testing.assert_close(a, b, atol=2e-3 if GPU else 1e-5, rtol=1e-2 if GPU else 1e-5)


@fused
def test_compile_of_a_packed_call_in_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    q, k, v = qkv(11, 2, 16)
    offsets = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=DEVICE)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashsci.varlen_attention(q, k, v, offsets, max_seqlen_q=7, max_seqlen_k=7, backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    close(compiled(q, k, v), call(q, k, v))
    upstream = torch.randn_like(q)
    eager = torch.autograd.grad(call(q, k, v), (q, k, v), upstream)
    for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v), upstream), eager, strict=True):
        close(a, b)


def test_compile_with_symbolic_softcap_scale_and_dropout() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(grad=False)
    seed = torch.tensor([3, 4], device=DEVICE)

    def call(q: Tensor, k: Tensor, v: Tensor, cap: float, p: float) -> Tensor:
        return flashsci.attention(
            q,
            k,
            v,
            softcap=cap,
            dropout_p=p,
            dropout_seed=seed,
            scale=p,
            window=(3, None),
            backend="triton",
        )

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for cap, p in ((2.0, 0.25), (3.0, 0.5)):
        close(compiled(q, k, v, cap, p), call(q, k, v, cap, p))


@fused
def test_export(backend: str) -> None:
    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, backend)

    q, k, v = qkv(grad=False)
    exported = torch.export.export(Block(), (q, k, v))
    targets = {str(node.target) for node in exported.graph.nodes}
    assert f"flashsci.{backend}_forward.default" in targets
    close(exported.module()(q, k, v), attend(q, k, v, backend))


@fused
def test_checkpoint_recomputes_the_same_gradient(backend: str) -> None:
    q, k, v = qkv()
    plain = torch.autograd.grad(squares(q, k, v, backend), (q, k, v))
    again = torch.autograd.grad(checkpoint(squares, q, k, v, backend, use_reentrant=False), (q, k, v))
    for a, b in zip(again, plain, strict=True):
        close(a, b)


def test_checkpoint_replays_a_drawn_dropout_seed() -> None:
    q, k, v = qkv()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashsci.attention(q, k, v, dropout_p=0.5, backend="triton")

    torch.manual_seed(5)
    plain = torch.autograd.grad(call(q, k, v).float().square().sum(), q)[0]
    torch.manual_seed(5)
    out = checkpoint(call, q, k, v, use_reentrant=False)
    close(torch.autograd.grad(out.float().square().sum(), q)[0], plain)


@fused
def test_autocast_casts_inputs_and_returns_gradients_in_their_dtype(backend: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    half = torch.float16 if GPU else torch.bfloat16
    with torch.autocast(DEVICE, dtype=half):
        out = attend(q, k, v, backend)
    assert out.dtype == half
    close(out, attend(q.to(half), k.to(half), v.to(half), backend))
    out.float().square().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


@fused
def test_functorch_grad_and_vjp(backend: str) -> None:
    q, k, v = qkv(grad=False)
    inputs = tuple(x.clone().requires_grad_() for x in (q, k, v))
    expected = torch.autograd.grad(squares(*inputs, backend), inputs)
    found = torch.func.grad(squares, argnums=(0, 1, 2))(q, k, v, backend)
    out, pull = torch.func.vjp(lambda *x: attend(*x, backend), q, k, v)
    upstream = torch.randn_like(out)
    pulled = pull(upstream)
    expected_pulled = torch.autograd.grad(attend(*inputs, backend), inputs, upstream)
    for a, b in zip((*found, *pulled), (*expected, *expected_pulled), strict=True):
        close(a, b)


@fused
def test_vmap_of_a_gradient_gives_one_gradient_per_sample(backend: str) -> None:
    q, k, v = qkv(3, 2, 12, 16, grad=False)
    k, v = k[0], v[0]
    found = torch.func.vmap(torch.func.grad(squares), in_dims=(0, None, None, None))(q, k, v, backend)
    for n in range(3):
        close(found[n], torch.func.grad(squares)(q[n], k, v, backend))


def test_vmap_keeps_the_gradient_of_a_shared_bias_per_sample() -> None:
    q, k, v = qkv(3, 2, 12, 16, grad=False)
    bias = torch.randn(1, 12, 12, device=DEVICE)

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flashsci.attention(q, k, v, bias=bias, backend="triton").float().square().sum()

    gradient = torch.func.grad(loss, argnums=3)
    found = torch.func.vmap(gradient, in_dims=(0, 0, 0, None))(q, k, v, bias)
    assert found.shape == (3, 1, 12, 12)
    for n in range(3):
        torch.testing.assert_close(found[n], gradient(q[n], k[n], v[n], bias))


def assert_within_two_errors(found: object, call: Callable[..., object], inputs: Sequence[Tensor]) -> None:
    """The two-error rule of flashsci.testing, for what `call` does with the reference backend: no
    more than twice the error of plain PyTorch in the same dtype, both against fp64."""
    leaves = torch.utils._pytree.tree_leaves
    plain = leaves(call(*inputs))
    truths = leaves(call(*(x.detach().double().requires_grad_(x.requires_grad) for x in inputs)))
    floor = bounds.FLOOR_ROUNDINGS * torch.finfo(inputs[0].dtype).eps / 2
    for a, b, truth in zip(leaves(found), plain, truths, strict=True):
        allowed = bounds.BASELINE_FACTOR * float((b - truth).abs().max())
        allowed += floor * float(truth.abs().max())
        torch.testing.assert_close(a.double(), truth.double(), atol=allowed, rtol=0)


def force_loss(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    (force,) = torch.autograd.grad(squares(q, k, v, backend), q, create_graph=True)
    return force.float().square().sum()


def force_gradient(*inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(force_loss(*inputs, "reference"), inputs)


@fused
@pytest.mark.parametrize("through", ("grad", "backward"))
def test_second_derivatives(backend: str, through: str) -> None:
    """The way force training meets them, whichever backend ran the forward."""
    inputs = qkv()
    loss = force_loss(*inputs, backend)
    if through == "grad":
        found = torch.autograd.grad(loss, inputs)
    else:
        loss.backward()
        found = tuple(x.grad for x in inputs)
    assert_within_two_errors(found, force_gradient, inputs)


SECOND = {
    "jvp": lambda f: lambda *x: torch.func.jvp(f, x, x)[1],
    "hvp": lambda f: lambda *x: torch.func.jvp(torch.func.grad(f, argnums=(0, 1)), x, x)[1],
    "gradient of a gradient": lambda f: torch.func.grad(
        lambda *x: torch.func.grad(f)(*x).float().square().sum(), argnums=(0, 1, 2)
    ),
    "vmap of a gradient": lambda f: torch.vmap(torch.func.grad(f)),
    "hessian": lambda f: lambda q, k, v: torch.func.hessian(f)(q[:1, :1, :3], k[:1, :1], v[:1, :1]),
}


@fused
@pytest.mark.parametrize("name", SECOND)
def test_functorch_to_second_order(backend: str, name: str) -> None:
    inputs = qkv(2, 2, 6, 16, grad=False)
    found = SECOND[name](lambda *x: squares(*x, backend))(*inputs)
    assert_within_two_errors(found, SECOND[name](lambda *x: squares(*x, "reference")), inputs)


@fused
@pytest.mark.parametrize("name", ("jvp", "hvp", "gradient of a gradient", "vmap of a gradient"))
def test_compiled_functorch_to_second_order(backend: str, name: str) -> None:
    """The transform inside the compiled function: once, all of them gave wrong numbers there."""
    torch._dynamo.reset()
    inputs = qkv(2, 2, 6, 16, grad=False)
    call = SECOND[name](lambda *x: squares(*x, backend))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(compiled(*inputs)), leaves(call(*inputs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="this torch.compile cannot trace torch.autograd.grad",
)
@fused
@pytest.mark.parametrize("compiler", ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_compiled_force_step(backend: str, compiler: str) -> None:
    torch._dynamo.reset()
    inputs = qkv()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(force_loss, fullgraph=True, backend=compiler)
        found = torch.autograd.grad(compiled(*inputs, backend), inputs)
    assert_within_two_errors(found, force_gradient, inputs)


@fused
def test_a_compiled_forward_under_an_eager_second_derivative_raises(backend: str) -> None:
    """torch's own limit, and never a dropped term: only the whole step compiles."""
    torch._dynamo.reset()
    inputs = qkv()
    compiled = torch.compile(squares, backend="aot_eager")
    (force,) = torch.autograd.grad(compiled(*inputs, backend), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(force.float().square().sum(), inputs[1])


@fused
@pytest.mark.parametrize("through", ("grad", "backward"))
def test_a_third_derivative_raises_with_advice(backend: str, through: str) -> None:
    inputs = qkv()
    first = torch.autograd.grad(force_loss(*inputs, backend), inputs[1], create_graph=True)[0]
    loss = first.float().square().sum()
    with pytest.raises(flashsci.BackendError, match=r"third derivative.*backend='reference'"):
        torch.autograd.grad(loss, inputs[2]) if through == "grad" else loss.backward()


@fused
def test_autocast_to_second_order(backend: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    half = torch.float16 if GPU else torch.bfloat16

    def loss(backend: str) -> Tensor:
        with torch.autocast(DEVICE, dtype=half):
            energy = attend(q, k, v, backend).float().square().sum()
        return torch.autograd.grad(energy, q, create_graph=True)[0].square().sum()

    for a, b in zip(
        torch.autograd.grad(loss(backend), (q, k, v)), torch.autograd.grad(loss("reference"), (q, k, v)), strict=True
    ):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.03 * b.norm()


def test_a_derivative_of_attention_backward_raises() -> None:
    q, k, v = qkv()
    out, lse = flashsci.attention(q, k, v, return_lse=True, backend="triton")
    gradients = flashsci.attention_backward(torch.ones_like(out), q, k, v, out.detach(), lse.detach(), backend="triton")
    with pytest.raises(flashsci.BackendError, match="second derivative"):
        gradients.dq.float().sum().backward()


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(("backend", "wide"), [*((b, False) for b in FUSED), ("triton", True)])
def test_cuda_graph_replays_forward_and_backward(backend: str, wide: bool) -> None:
    q, k, v = qkv(2, 2, 12, 320, dtype=torch.float32) if wide else qkv()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and load outside the capture
        torch.autograd.grad(squares(q, k, v, backend), (q, k, v))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(squares(q, k, v, backend), (q, k, v))
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, torch.autograd.grad(squares(q, k, v, backend), (q, k, v)), strict=True):
        close(a, b)


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
def test_cuda_graph_draws_a_new_dropout_mask_at_each_replay() -> None:
    q, k, v = qkv(grad=False)
    flashsci.attention(q, k, v, dropout_p=0.5, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashsci.attention(q, k, v, dropout_p=0.5, backend="triton")
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
