"""Options are constants of a call: what is no such constant is refused, and honest numbers are numbers whatever their type."""

from __future__ import annotations

import fractions
import inspect

import numpy
import pytest
import torch

import flashsci
from flashsci.call import arguments

Q = torch.randn(2, 4, 5, 8)
K = torch.randn(2, 2, 6, 8)
X = torch.randn(5, 2, 8)
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
OUT, LSE = flashsci.attention(Q, K, K, return_lse=True, backend="reference")
LOST = torch.tensor(0.5, requires_grad=True)  # whose gradient would be lost

ENTRIES = {
    "attention": lambda **o: flashsci.attention(Q, K, K, **o),
    "varlen_attention": lambda **o: flashsci.varlen_attention(X, X, X, OFFSETS, **o),
    "attention_backward": lambda **o: flashsci.attention_backward(OUT, Q, K, K, OUT, LSE, **o),
    "explain": lambda **o: flashsci.explain(Q, K, K, **o),
}
PARAMETERS = {
    name: inspect.signature(getattr(flashsci, name if name != "explain" else "attention")).parameters
    for name in ENTRIES
}
WRONG = (
    (TypeError, r"scale must be a number, got a tensor of shape \[\].*multiply q by it", {"scale": LOST}),
    (TypeError, r"scale must be a number, got a tensor of shape \[1\]", {"scale": torch.ones(1)}),
    (TypeError, "softcap must be a number, got a tensor", {"softcap": LOST}),
    (TypeError, "dropout_p must be a number, got a tensor", {"dropout_p": LOST}),
    (TypeError, "scale must be a number or None, got 'x' of type str", {"scale": "x"}),
    (TypeError, "scale must be a number or None, got True of type bool", {"scale": True}),
    (TypeError, "scale must be a number or None, got .* of type bool_?$", {"scale": numpy.bool_(True)}),
    (TypeError, "scale must be a number or None, got 1j of type complex", {"scale": 1j}),
    (TypeError, "scale must be a number or None, got array.* of type ndarray", {"scale": numpy.ones(1)}),
    (TypeError, "softcap must be a number or None, got False of type bool", {"softcap": False}),
    (TypeError, "dropout_p must be a number, got None", {"dropout_p": None}),
    (TypeError, "dropout_p must be a number, got False of type bool", {"dropout_p": False}),
    (ValueError, "scale must be finite, got nan", {"scale": float("nan")}),
    (ValueError, "scale must be finite, got -inf", {"scale": -float("inf")}),
    (ValueError, "scale must be finite, got inf", {"scale": 10**400}),
    (ValueError, "scale must be finite, got nan", {"scale": numpy.float32("nan")}),
    (ValueError, "softcap must be positive", {"softcap": float("nan")}),
    (ValueError, "softcap must be positive", {"softcap": float("inf")}),
    (ValueError, r"dropout_p must be in \[0, 1\), got 1", {"dropout_p": 1}),
    (ValueError, r"dropout_p must be in \[0, 1\), got nan", {"dropout_p": float("nan"), "dropout_seed": torch.zeros(2).long()}),
    (TypeError, "causal must be True or False, got 'diagonal' of type str; .*align='upper_left'.*mask=", {"causal": "diagonal"}),
    (TypeError, "causal must be True or False, got 1 of type int", {"causal": 1}),
    (TypeError, "causal must be True or False, got None", {"causal": None}),
    (TypeError, r"causal must be True or False, got a tensor; bool\(causal\)", {"causal": torch.tensor(True)}),
    (TypeError, "return_lse must be True or False, got 'yes'", {"return_lse": "yes"}),
    (TypeError, "return_lse must be True or False, got 1", {"return_lse": 1}),
    (TypeError, "deterministic must be True or False, got 1", {"deterministic": 1}),
    (ValueError, "align must be one of .* got None", {"align": None}),
    (ValueError, "align must be one of .* got 'diagonal'", {"align": "diagonal"}),
    (ValueError, "align must be one of", {"align": ["upper_left"]}),
    (ValueError, "precision must be None or one of", {"precision": 32}),
    (ValueError, "precision must be None or one of", {"precision": torch.float32}),
    (ValueError, "window must be", {"window": "ab"}),
    (ValueError, "window must be", {"window": (1,)}),
    (ValueError, "window must be", {"window": (True, 0)}),
    (ValueError, "window must be", {"window": (1.0, 0)}),
    (ValueError, "window must be", {"window": (torch.tensor(1), 0)}),
    (ValueError, "window must be", {"window": torch.tensor([1, 0])}),
    (TypeError, r"max_seqlen_q must be an int or None, got a tensor; int\(max_seqlen_q\)", {"max_seqlen_q": torch.tensor(3)}),
    (TypeError, "max_seqlen_k must be an int or None, got 3.0 of type float", {"max_seqlen_k": 3.0}),
    (TypeError, "max_seqlen_q must be an int or None, got True", {"max_seqlen_q": True}),
    (ValueError, "max_seqlen_q must be >= 0, or None where it is unknown, got -1", {"max_seqlen_q": -1}),
    (TypeError, "validate must be True or False", {"validate": "yes"}),
    (TypeError, "dropout_seed must be an int64 tensor of shape .* or None, got int", {"dropout_p": 0.5, "dropout_seed": 3}),
)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_option(entry, number):
    kind, message, options = WRONG[number]
    if not options.keys() <= PARAMETERS[entry].keys() or (entry == "explain" and "dropout_seed" in options):
        pytest.skip(f"{entry} does not look at this option")
    if entry in ("attention_backward", "varlen_attention") and "max_seqlen_q" in options:
        options = dict(options, **({"cu_seqlens_q": OFFSETS} if entry == "attention_backward" else {}))
    with pytest.raises(kind, match=message) as caught:
        ENTRIES[entry](**options)
    assert caught.type is kind


def test_a_tensor_as_scale_is_refused_behind_a_cached_plan():
    """It hashes by identity: the plan of a first call would keep its value for good."""
    scale = torch.tensor(0.5)
    for _ in range(2):
        with pytest.raises(TypeError, match="scale must be a number"):
            flashsci.attention(Q, K, K, scale=scale)
    flashsci.attention(Q, K, K, scale=1.0)
    for same in (True, numpy.bool_(True)):  # hash and equality of 1.0
        with pytest.raises(TypeError, match="scale must be a number"):
            flashsci.attention(Q, K, K, scale=same)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    "kind",
    [
        int,
        numpy.float64,
        numpy.float32,
        numpy.float16,
        numpy.int64,
        numpy.int32,
        fractions.Fraction,
    ],
)
def test_honest_numbers(kind, backend):
    """Of any type, with the value that a float has."""
    wanted = flashsci.attention(Q, K, K, scale=2.0, softcap=3.0, backend=backend)
    found = flashsci.attention(Q, K, K, scale=kind(2), softcap=kind(3), dropout_p=kind(0), backend=backend)
    assert torch.equal(found, wanted)
    options = arguments.Options.of(False, None, "upper_left", kind(2), kind(3), kind(0), False, None, None)
    assert type(options.scale) is type(options.softcap) is type(options.dropout_p) is float


def test_numpys_booleans_and_ints():
    wanted = flashsci.attention(Q, K, K, causal=True, window=(2, 0))
    found = flashsci.attention(Q, K, K, causal=numpy.bool_(True), window=[numpy.int64(2), numpy.int32(0)])
    assert torch.equal(found, wanted)
    lengths = dict(max_seqlen_q=numpy.int64(3), max_seqlen_k=numpy.int32(3))
    assert torch.equal(
        flashsci.varlen_attention(X, X, X, OFFSETS, **lengths),
        flashsci.varlen_attention(X, X, X, OFFSETS),
    )


def test_the_advice_for_a_learned_scale_keeps_its_gradient():
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    q, k = Q.double(), K.double()
    loss = lambda t: flashsci.attention(q * t, k, k, scale=1.0).square().sum()  # noqa: E731
    assert torch.autograd.gradcheck(loss, temperature)


def test_a_seed_without_dropout_does_not_matter():
    for seed in (torch.zeros(2).long(), torch.zeros(4).long()[::2]):
        assert torch.equal(
            flashsci.attention(Q, K, K, dropout_seed=seed, backend="triton"),
            flashsci.attention(Q, K, K, backend="triton"),
        )


@pytest.mark.parametrize("kind", [float, int])
def test_options_that_a_compiler_keeps_symbolic(kind):
    torch._dynamo.reset()

    def call(q, k, scale, cap):
        return flashsci.attention(q, k, k, scale=scale, softcap=cap, backend="triton")

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for scale, cap in ((2, 3), (3, 5), (4, 7)):
        found = compiled(Q, K, kind(scale), kind(cap))
        assert torch.equal(found, call(Q, K, kind(scale), kind(cap)))


def test_a_compiled_call_refuses_what_an_eager_one_does():
    torch._dynamo.reset()
    compiled = torch.compile(lambda scale: flashsci.attention(Q, K, K, scale=scale), backend="eager")
    with pytest.raises(Exception, match="scale must be a number"):
        compiled(torch.tensor(0.5))
