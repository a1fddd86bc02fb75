"""What kernels cannot differentiate is refused on a GPU too, and what they can has its tangents, on each backend."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import flashsci

BACKENDS = ["reference", "triton", "cuda", "auto"]


def dense(dtype=torch.float32):
    return torch.randn(3, 2, 4, 64, 64, device="cuda").to(dtype).unbind(0)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tangents_by_slopes(backend, packed):
    """Those of the reference, or refused: never zero."""
    q, k, v = (x[0].transpose(0, 1).contiguous() if packed else x for x in dense())
    slopes = torch.rand(4, device="cuda")
    edges = torch.tensor([0, 20, 64], dtype=torch.int32, device="cuda")

    def call(name):
        if packed:
            return lambda s: flashsci.varlen_attention(q, k, v, edges, alibi_slopes=s, backend=name)
        return lambda s: flashsci.attention(q, k, v, alibi_slopes=s, backend=name)

    def along():
        return torch.func.jvp(call(backend), (slopes,), (torch.ones_like(slopes),))[1]

    if backend in ("triton", "cuda"):
        with pytest.raises(flashsci.BackendError, match="slopes"):
            along()
        return
    due = torch.func.jvp(call("reference"), (slopes,), (torch.ones_like(slopes),))[1]
    assert torch.equal(along(), due) and due.abs().max() > 0


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("backend", ["reference", "triton", "cuda", "auto"])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sink", "k_scale"])
def test_paged_calls_refuse(backend, name):
    given = {
        "q": torch.randn(3, 2, 64),
        "k_cache": torch.randn(4, 16, 2, 64),
        "v_cache": torch.randn(4, 16, 2, 64),
        "sink": torch.randn(2),
        "k_scale": torch.tensor(0.5),
    }
    if backend == "cuda" and name != "k_scale":
        del given["k_scale"]  # its kernels have no scales of a 16-bit cache
    halves = ("q", "k_cache", "v_cache", "sink")
    given = {n: x.cuda().bfloat16() if n in halves else x.cuda() for n, x in given.items()}
    if backend == "cuda" and name == "k_scale":
        given |= {n: given[n].to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")}
    places = dict(block_table=[[1, 2]], seqused_k=[20], cu_seqlens_q=[0, 3])
    places = {n: torch.tensor(x, dtype=torch.int32, device="cuda") for n, x in places.items()}
    x = given.pop(name)

    def call(x):
        return flashsci.paged_attention(**given, **{name: x}, **places, backend=backend)

    due = call(x)
    with pytest.raises(ValueError, match=f"{name} has a tangent"):
        torch.func.jvp(call, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(ValueError, match=f"{name} has a tangent"):
        call(forward_ad.make_dual(x, x))
    with pytest.raises(ValueError, match=f"{name} requires one"):
        torch.func.grad(lambda x: call(x).sum())(x)
    with pytest.raises(ValueError, match=f"torch.vmap maps {name}"):
        torch.func.vmap(call)(x[None])
    other = torch.func.grad(lambda y: (call(x).float() * y).sum())(torch.ones((), device="cuda"))
    torch.testing.assert_close(other, due.float().sum())


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("kind", ["plain", "sink", "residual"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tangents_of_a_cotangent(backend, kind):
    """Forward mode over a backward whose forward was before. Gradients are linear in the cotangent, so these are those along it."""
    leaves = list(dense()) + ([torch.randn(4, device="cuda")] if kind == "sink" else [])
    direction = torch.randn_like(leaves[0])

    def compute(name, q, k, v, sink=None):
        if kind == "residual":
            return flashsci.residual_attention(q, k, v, backend=name)[0]
        return flashsci.attention(q, k, v, sink=sink, backend=name)

    def gradients(name, dtype):
        given = [x.to(dtype).requires_grad_() for x in leaves]
        return torch.autograd.grad(compute(name, *given), given, direction.to(dtype))

    truth, base = gradients("reference", torch.float64), gradients("reference", torch.float32)
    sizes = [t.abs().max() for t in truth]
    if kind == "sink":  # the sum over rows of what may cancel
        q, k, v, sink = (x.double() for x in leaves)
        out, lse = flashsci.attention(q, k, v, sink=sink, return_lse=True, backend="reference")
        terms = (sink[:, None] - lse).exp() * (direction.double() * out).abs().sum(-1)
        sizes[3] = terms.sum((0, 2)).max()
    given = [x.requires_grad_() for x in leaves]
    for _ in range(3):  # the later ones are repeats
        out = compute(backend, *given)
        with forward_ad.dual_level():
            dout = forward_ad.make_dual(torch.ones_like(out), direction)
            found = torch.autograd.grad(out, given, dout)
            tangents = [forward_ad.unpack_dual(x).tangent for x in found]
        for x, b, t, size in zip(tangents, base, truth, sizes, strict=True):
            floor = 8 * torch.finfo(torch.float32).eps * size
            assert (x - t).abs().max() <= 2 * (b - t).abs().max() + floor
