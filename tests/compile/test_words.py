"""What a caller reads and gets where torch stands between: refusals under a compiler, `explain` in transforms, meta tensors."""

from __future__ import annotations

import pytest
import torch

import flashsci
from tests.support.everywhere import BACKENDS, DEVICE

WORDS = "backend 'sdpa' cannot serve this call: SDPA has no softcap"


def refused(q):
    return flashsci.attention(q, q, q, softcap=1.0, backend="sdpa")


def test_a_compiled_refusal_is_the_eager_one():
    torch._dynamo.reset()
    q = torch.randn(1, 2, 6, 16, device=DEVICE)
    with pytest.raises(flashsci.BackendError, match=WORDS):
        torch.compile(refused, backend="eager")(q)


def test_a_refusal_in_one_graph_keeps_its_words():
    """What dynamo raises itself, but no internal error of its own."""
    torch._dynamo.reset()
    q = torch.randn(1, 2, 6, 16, device=DEVICE)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="SDPA has no softcap"):
        torch.compile(refused, fullgraph=True, backend="eager")(q)


def test_other_decisions_refuse_in_the_same_way():
    torch._dynamo.reset()
    q = torch.randn(1, 2, 6, 160, device=DEVICE)
    call = lambda q: flashsci.residual_attention(q, q, q, backend="triton")  # noqa: E731
    with pytest.raises(flashsci.BackendError, match="head dims up to 128"):
        torch.compile(call, backend="eager")(q)


def test_explain_names_who_serves_inside_a_transform():
    q = torch.randn(1, 2, 6, 16, device=DEVICE)
    named = []

    def call(q):
        named.append(flashsci.explain(q, q, q, backend="sdpa"))
        return flashsci.attention(q, q, q, backend="sdpa")

    torch.func.jvp(call, (q,), (q,))
    torch.vmap(call)(q[None])
    torch.func.grad(lambda q: call(q).sum())(q)
    with torch.autograd.forward_ad.dual_level():
        call(q)
    assert [x.chosen for x in named] == ["reference"] * 4
    assert all("torch.func" in str(x) for x in named)
    call(q)
    assert named[-1].chosen == "sdpa"


META = {
    "dense": lambda m, **o: flashsci.attention(m, m, m, causal=True, **o),
    "dropout": lambda m, **o: flashsci.attention(m, m, m, dropout_p=0.5, **o),
    "residual": lambda m, **o: flashsci.residual_attention(m, m, m, **o)[0],
    "packed": lambda m, **o: flashsci.varlen_attention(
        m[0], m[0], m[0], torch.empty(3, dtype=torch.int32, device="meta"), **o
    ),
}


@pytest.mark.parametrize("backend", ["auto", *(b for b in BACKENDS if b != "cuda")])
@pytest.mark.parametrize("name", META)
def test_meta_tensors_have_shapes_and_gradients(backend, name):
    if backend == "sdpa" and name in ("dropout", "packed"):
        pytest.skip("SDPA does not serve it")
    for _ in range(3):
        m = torch.empty(1, 2, 6, 16, device="meta", requires_grad=True)
        out = META[name](m, backend=backend)
        assert out.is_meta and out.shape == (m.shape[1:] if name == "packed" else m.shape)
        (gradient,) = torch.autograd.grad(out.sum(), m)
        assert gradient.is_meta and gradient.shape == m.shape
