"""Residual attention: its meaning, derivatives and errors; and its kernels, which Triton interprets, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.api import residual
from flashsci.testing import (
    Inputs,
    Judge,
    ResidualCase,
    Variant,
    evaluate,
    make_inputs,
    poisoned_memory,
    residual_cases,
    residual_variants,
)
from flashsci.testing.evaluation import check_alone

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("triton")

LIMITS = dict(pool=residual_variants(max_dim=64), lengths=(0, 1, 3, 15, 16, 17, 33, 40), score_limit=1 << 10)
BIAS = dict(bias="pair", bias_grad=True)
LONG = dict(lead=(2,), heads_k=2, seq_q=37, seq_k=50, seed=7)
FULL = dict(bias_shape=(2, 2, 37, 50))
NAMED = {
    "no bias": ResidualCase(Variant(), **LONG),
    "pair bias": ResidualCase(Variant(**BIAS), **LONG, **FULL, bias_holes=True),
    "bf16": ResidualCase(Variant("bfloat16", 8, 8, **BIAS), **LONG, **FULL, bias_number="-1e9"),
    "fp16, d8 of a projection": ResidualCase(Variant("float16", 8, 8, **BIAS), **LONG, **FULL, layout="joint"),
    "wider bias": ResidualCase(Variant("bfloat16", bias_float=True, **BIAS), **LONG, **FULL),
    "shared bias": ResidualCase(Variant(**BIAS), **LONG, bias_shape=(1, 2, 37, 50)),
    "bias of keys": ResidualCase(Variant("bfloat16", bias="key", bias_grad=True), **LONG, bias_shape=(50,)),
    "bias without gradient": ResidualCase(Variant(bias="pair"), **LONG, **FULL),
    "bias of a Linear": ResidualCase(Variant(**BIAS), **LONG, **FULL, bias_view="linear", scores_view="linear"),
    "groups": ResidualCase(Variant(head_dim=24, head_dim_v=40, **BIAS), **LONG | {"group": 3}, bias_shape=(2, 6, 37, 50)),
    "dropout": ResidualCase(Variant(dropout=True, **BIAS), **LONG, **FULL, dropout_p=0.5),
    "scores alone": ResidualCase(Variant(**BIAS), **LONG, **FULL, given="scores"),
    "out alone": ResidualCase(Variant(**BIAS), **LONG, **FULL, given="out"),
    "one tile of keys": ResidualCase(Variant(**BIAS), lead=(2,), seq_q=40, seq_k=16, bias_shape=(2, 1, 40, 16)),
    "one tile, no bias gradient": ResidualCase(Variant(bias="pair"), lead=(2,), seq_q=40, seq_k=13, bias_shape=(2, 1, 40, 13)),
    "zero rows": ResidualCase(Variant(**BIAS), **LONG, **FULL, padding="tail", bias_number="-1e30", bias_number_at="padding"),
    "rank 2": ResidualCase(Variant(**BIAS), rank=2, lead=(), seq_q=20, seq_k=33, bias_shape=(20, 33)),
    "rank 5": ResidualCase(Variant(**BIAS), rank=5, lead=(2, 3), heads_k=2, seq_q=9, seq_k=17, bias_shape=(3, 1, 9, 17)),
    "no keys": ResidualCase(Variant(**BIAS), lead=(2,), seq_q=5, seq_k=0, bias_shape=(2, 1, 5, 0)),
    "no queries": ResidualCase(Variant(**BIAS), lead=(2,), seq_q=0, seq_k=5, bias_shape=(2, 1, 0, 5)),
}  # fmt: skip


def judge(case: ResidualCase, backend: str) -> dict[str, torch.Tensor]:
    inputs = make_inputs(case)
    found = evaluate(inputs, backend)
    if backend == "triton":
        check_alone(inputs, backend, found)
    Judge(inputs, backend == "triton").require(found)
    return found


@pytest.mark.parametrize("name", NAMED)
def test_named(name, poison):
    judge(NAMED[name], "triton")


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", [n for n, c in NAMED.items() if c.variant.dtype == "float32" and n != "dropout"])
def test_parts(name, backend):
    judge(NAMED[name], backend)


@hypothesis.settings(max_examples=30)
@hypothesis.given(residual_cases(**LIMITS))
def test_generated(case):
    with poisoned_memory():
        judge(case, "triton")


MUTANTS = {
    "scores": lambda found: found | {"scores": found["scores"] * 1.01},
    "out": lambda found: found | {"out": found["out"].roll(1, -2)},
    "dbias without that of scores": lambda found: found | {"dbias": found["dbias"] - found["g"]},
    "dq without that of scores": lambda found: found | {"dq": found["dq"] - found["gq"]},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_sees(name):
    """Results of a kernel that forgets something."""
    inputs = make_inputs(replace(NAMED["pair bias"], bias_holes=False))
    found = evaluate(inputs, "triton")
    scale = inputs.q.shape[-1] ** -0.5
    more = {"g": inputs.dscores, "gq": scale * inputs.dscores @ inputs.k.detach()}
    wrong = MUTANTS[name](found | more)
    with pytest.raises(AssertionError, match=name.split()[0]):
        Judge(inputs).require({n: wrong[n] for n in found})


def layers(backend, x, pair, count=3):
    """Layers as a model has them, whose inputs come from each other: q, k and v of x, bias the last layer's scores."""
    scores = pair
    for i in range(count):
        q, k, v = x, (x + i).sin(), x.cos() * scores.mean()
        out, scores = flashsci.residual_attention(q, k, v, scores, backend=backend)
        x = x + out
    return x, scores


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_layers_to_second_order(backend):
    """First gradients, also recorded ones, and second ones of layers that depend on each other."""

    def run(name, dtype):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(1, 2, 6, 8, generator=generator).to(dtype).requires_grad_()
        pair = torch.randn(1, 2, 6, 6, generator=generator).to(dtype).requires_grad_()
        out, scores = layers(name, x, pair)
        total = out.sin().sum() + scores.cos().sum()
        plain = torch.autograd.grad(total, (x, pair), retain_graph=True)
        first = torch.autograd.grad(total, (x, pair), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, pair))
        return out, scores, *plain, *first, *second

    for found, true in zip(run(backend, torch.float32), run("reference", torch.float64), strict=True):
        torch.testing.assert_close(found.double(), true, rtol=2e-4, atol=2e-4)


def test_gradcheck_of_parts():
    tensors = [torch.randn(1, 2, *s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (5, 3), (5, 2), (4, 5))]
    assert torch.autograd.gradcheck(flashsci.residual_attention, tensors)
    assert torch.autograd.gradgradcheck(flashsci.residual_attention, tensors)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_compiles_in_one_graph(backend):
    x, pair = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 6)
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")

    def run(function):
        given = x.clone().requires_grad_(), pair.clone().requires_grad_()
        out, scores = function(backend, *given)
        return out, scores, *torch.autograd.grad(out.sum() + scores.square().sum(), given)

    for found, true in zip(run(compiled), run(layers), strict=True):
        torch.testing.assert_close(found, true)


@pytest.mark.parametrize("dims", [(None, 0, None, None), (0, 0, 0, 0)])
def test_transforms(dims):
    """vmap and forward mode, through the parts."""
    q, k, v = torch.randn(3, 4, 2, 5, 8).unbind(0)
    bias = torch.randn(4, 2, 5, 5)
    given = [x if d == 0 else x[0] for x, d in zip((q, k, v, bias), dims, strict=True)]
    call = lambda *x: flashsci.residual_attention(*x, backend="triton")  # noqa: E731
    found = torch.func.vmap(call, dims)(*given)
    full = [x if d == 0 else x.expand(4, *x.shape) for x, d in zip(given, dims, strict=True)]
    for a, b in zip(found, call(*full), strict=True):
        torch.testing.assert_close(a, b)
    _, (tout, tscores) = torch.func.jvp(lambda b: call(q, k, v, b), (bias,), (bias,))
    torch.testing.assert_close(tscores, bias)
    assert tout.shape == q.shape


def test_repeated_calls(monkeypatch):
    """A call like one before is known by its tensors, and computes with its own; of other strides or dtypes it is another."""
    q, k, v = torch.randn(3, 2, 2, 20, 8).unbind(0)
    bias = torch.randn(2, 2, 20, 20)
    first = flashsci.residual_attention(q, k, v, bias, backend="triton")
    others = [x + 1 for x in (q, k, v, bias)]
    fresh = flashsci.residual_attention(*others, backend="reference")
    monkeypatch.setattr(residual, "choice_of", lambda *_: pytest.fail("looked at again"))
    for found, true in zip(flashsci.residual_attention(*others, backend="triton"), fresh, strict=True):
        torch.testing.assert_close(found, true)
    again = flashsci.residual_attention(q, k, v, bias, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.undo()
    for changed in (bias.double().float().mT, bias[:1], bias.bfloat16(), None):
        given = (q, k, v, changed)
        pairs = zip(*(flashsci.residual_attention(*given, backend=b) for b in ("triton", "reference")), strict=True)
        for found, true in pairs:
            torch.testing.assert_close(found, true)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_autocast_leaves_the_bias(backend):
    q, k, v = torch.randn(3, 2, 2, 9, 8).unbind(0)
    bias = torch.randn(2, 2, 9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        out, scores = flashsci.residual_attention(q, k, v, bias, backend=backend)
        assert (out.dtype, scores.dtype) == (torch.bfloat16, torch.float32)
        _, scores = flashsci.residual_attention(q, k, v, bias.bfloat16(), backend=backend)
        assert scores.dtype == torch.bfloat16


def test_layout_and_masks():
    """out lies as q does; -inf stays in the scores, and a row of nothing else has out 0."""
    q, k, v = torch.randn(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
    bias = torch.zeros(2, 4, 9, 9)
    bias[..., 5:] = -torch.inf
    bias[:, :, 2] = -torch.inf
    for backend in ("triton", "reference"):
        out, scores = flashsci.residual_attention(q, k, v, bias, backend=backend)
        assert out.transpose(1, 2).is_contiguous()
        assert torch.equal(scores == -torch.inf, bias == -torch.inf)
        assert (out[:, :, 2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [1, 8, 13, 16, 37])
def test_rows_of_scores(dtype, keys, poison):
    """They begin at multiples of 16 bytes, and are users' own: to reshape, to write to, to give back in any layout."""
    q, k, v = (torch.randn(2, 3, n, 8, dtype=dtype).requires_grad_() for n in (11, keys, keys))
    bias = torch.randn(2, 3, 11, keys, dtype=dtype).requires_grad_()
    given = q, k, v, bias
    true = flashsci.residual_attention(*given, backend="reference")
    for _ in range(2):  # the second call is a repeat
        out, scores = flashsci.residual_attention(*given, backend="triton")
        row = scores.stride(-2)
        assert 0 <= row - keys < 16 // dtype.itemsize and row * dtype.itemsize % 16 == 0
        assert scores._base is None and scores.view(6, 11, keys).shape[0] == 6
        tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
        torch.testing.assert_close(scores, true[1], **tolerance)
        gradients = torch.randn_like(out), torch.randn(11, 3, 2, keys, dtype=dtype).transpose(0, 2)
        found, right = (torch.autograd.grad(x, given, gradients) for x in ((out, scores), true_of(given)))
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, **{n: 5 * x for n, x in tolerance.items()})
    with torch.no_grad():
        flashsci.residual_attention(*given, backend="triton")[1].add_(1)
    following, _ = flashsci.residual_attention(q, k, v, scores, backend="triton")
    torch.testing.assert_close(
        following,
        flashsci.residual_attention(q, k, v, true[1], backend="reference")[0],
        **tolerance,
    )


def true_of(given):
    return flashsci.residual_attention(*given, backend="reference")


@pytest.mark.parametrize("offset", range(9))
def test_a_bias_that_begins_anywhere(offset, poison):
    """Memory that is not aligned is read in smaller pieces; the same plan serves all."""
    q, k, v = torch.randn(3, 1, 2, 20, 8).bfloat16().unbind(0)
    memory = torch.randn(offset + 2 * 20 * 24).bfloat16()
    bias = memory[offset:].view(1, 2, 20, 24)[..., :20]
    for a, b in zip(
        *(flashsci.residual_attention(q, k, v, bias, backend=x) for x in ("triton", "reference")),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kernel, fp32, most", [("forward", False, 32), ("backward", True, 64)])
def test_last_tiles_are_not_mostly_empty(kernel, fp32, most):
    """Of molecules, which have any number of atoms, at 8 channels a head on Hopper: padding below `most` rows or keys."""
    from flashsci.backends.triton.plans.residual import tiles

    for length in range(65, 512):
        tile = tiles(kernel, (9, 0), fp32, "tf32x3", 16, length)[kernel == "backward"]
        assert -length % tile < most, (length, tile)


def test_saves_no_scores_of_16_bits():
    """They are computed again: a layer holds its results and nothing of their size besides."""
    q, k, v = torch.randn(3, 1, 2, 40, 8).bfloat16().unbind(0)
    bias = torch.randn(1, 2, 40, 40).bfloat16().requires_grad_()
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with hooks:
        flashsci.residual_attention(q, k, v, bias, backend="triton")
    assert [tuple(x.shape) for x in saved if x.numel() == bias.numel()] == [(1, 2, 40, 40)]


def wrong_calls():
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    bias = torch.randn(2, 4, 6, 6)
    yield "bool bias", (q, k, v, bias > 0), {}, TypeError, "mask"
    yield "dtypes", (q, k.double(), v, bias), {}, TypeError, "one dtype"
    yield "shape of the bias", (q, k, v, bias[..., :5]), {}, ValueError, "bias"
    yield "no tensor", (q, k, [1], bias), {}, TypeError, "v"
    yield "scale", (q, k, v, bias), {"scale": "1"}, TypeError, "scale"
    yield "dropout", (q, k, v, bias), {"dropout_p": 1.5}, ValueError, "dropout_p"
    yield "seed", (q, k, v, bias), {"dropout_p": 0.5, "dropout_seed": 3}, TypeError, "dropout_seed"
    yield "precision", (q, k, v, bias), {"precision": "fp8"}, ValueError, "precision"
    yield "backend", (q, k, v, bias), {"backend": "tritn"}, ValueError, "unknown backend"
    yield "heads", (q, k[:, :3], v[:, :3], bias), {}, ValueError, "multiple"


@pytest.mark.parametrize(
    "given, options, error, message", [x[1:] for x in wrong_calls()], ids=[x[0] for x in wrong_calls()]
)
def test_errors(given, options, error, message):
    with pytest.raises(error, match=message):
        flashsci.residual_attention(*given, **options)


def test_what_kernels_do_not_take():
    """float64 and wide heads: from parts by `auto`, refused by name with advice."""
    for dim, dtype in ((8, torch.float64), (136, torch.float32)):
        q, k, v = torch.randn(3, 2, 2, 5, dim, dtype=dtype).unbind(0)
        _, scores = flashsci.residual_attention(q, k, v)
        torch.testing.assert_close(scores, dim**-0.5 * q @ k.mT)
        with pytest.raises(flashsci.BackendError, match="backend='auto' computes it from parts"):
            flashsci.residual_attention(q, k, v, backend="triton")


def test_nested_tensors_are_refused():
    q = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    with pytest.raises(ValueError, match="pad them"):
        flashsci.residual_attention(q, q, q)


@pytest.mark.parametrize("kind", ["bias", "no bias"])
def test_ops_pass_opcheck(kind):
    q, k, v = torch.randn(3, 2, 2, 20, 8).unbind(0)
    bias = torch.randn(2, 2, 20, 20) if kind == "bias" else None
    call = q, k, v, bias, None, 0.3, 0.0, "default"
    ops = torch.ops.flashsci
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.triton_residual_forward.default, call, test_utils=tests)
    out, lse, scores = ops.triton_residual_forward.default(*call)
    backward = out, scores, *call, out, lse, scores, bias is not None
    torch.library.opcheck(ops.triton_residual_backward.default, backward, test_utils=tests)


def test_raw_backward_refuses_what_does_not_fit():
    q, k, v = torch.randn(3, 2, 2, 20, 8).unbind(0)
    call = q, k, v, None, None, 0.3, 0.0, "default"
    ops = torch.ops.flashsci
    out, lse, scores = ops.triton_residual_forward.default(*call)
    run = ops.triton_residual_backward.default
    for wrong in (scores[..., :19], scores.double()):
        with pytest.raises((TypeError, ValueError), match="scores must"):
            run(out, wrong, *call, out, lse, scores, False)
        with pytest.raises((TypeError, ValueError), match="scores must"):
            run(out, None, *call, out, lse, wrong, False)
    # Those that are not given are computed again.
    for a, b in zip(*(run(out, scores, *call, out, lse, x, False) for x in (scores, None)), strict=True):
        torch.testing.assert_close(a, b)


def test_inputs_hold_what_they_say():
    """The generator's own: pairs with padding have no gradient where rows have none."""
    inputs = make_inputs(NAMED["zero rows"])
    assert isinstance(inputs, Inputs) and inputs.residual
    zero = (inputs.dout == 0).all(-1)
    assert zero.any() and (inputs.dscores[zero] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_tensors_that_come_back_with_other_strides(dtype):
    """Hooks of saved tensors may lay them out as they like: gradients are the same."""

    def laid_out_anew(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x

    given = [torch.randn(2, 4, 6, 16, dtype=dtype) for _ in range(3)]
    given.append(torch.randn(2, 4, 6, 6, dtype=dtype))
    found = []
    for again in (lambda x: x, laid_out_anew):
        for _ in range(2):  # a call like one before, too
            leaves = [x.clone().requires_grad_() for x in given]
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, again):
                out, scores = flashsci.residual_attention(*leaves, backend="triton")
            (out.float().square().sum() + scores.float().square().sum()).backward()
            found.append([x.grad for x in leaves])
    for gradients in found[1:]:
        for a, b in zip(gradients, found[0], strict=True):
            assert torch.equal(a, b)


def test_second_derivatives_in_v_alone():
    """Scores do not depend on v: a recorded backward with a gradient of scores goes on through out."""
    given = torch.randn(3, 1, 2, 5, 8)

    def derivatives(backend, dtype):
        q, k, v = given.to(dtype).unbind(0)
        v = v.clone().requires_grad_()
        out, scores = flashsci.residual_attention(q, k, v, backend=backend)
        total = out.square().sum() + scores.sum()
        (first,) = torch.autograd.grad(total, v, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), v)

    exact = derivatives("reference", torch.float64)
    plain, found = derivatives("reference", torch.float32), derivatives("triton", torch.float32)
    eps = torch.finfo(torch.float32).eps
    for x, y, right in zip(found, plain, exact, strict=True):
        allowed = 2 * (y - right).abs().max() + 8 * eps * right.abs().max()
        assert (x - right).abs().max() <= allowed
