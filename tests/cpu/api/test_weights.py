"""Probabilities of chosen pairs: judged as the output of attention whose values are the unit vectors, with every option."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import flashsci
from flashsci.call import maps
from flashsci.testing import Judge, cases, make_inputs, variants
from tests.support.map_calls import OPTIONS, called, drawn

POOL = [replace(v, dropout=False, gate=None) for v in variants() if not v.varlen]
SHAPING = ("causal", "window", "align", "scale", "softcap", "softcap_at")


def of_case(case):
    """(inputs with unit vectors as values, the arguments of a map)."""
    inputs = make_inputs(replace(case, dropout_p=0.0, magnitude="unit" if case.magnitude == "huge" else case.magnitude))
    eye = torch.eye(inputs.k.shape[-2], dtype=inputs.v.dtype).expand(*inputs.v.shape[:-1], -1)
    inputs = replace(inputs.forward_alone(), v=eye)
    options = {n: x for n, x in inputs.options.items() if n in SHAPING}
    tensors = {n: getattr(inputs, n) for n in ("bias", "key_weight", "mask", "alibi_slopes")}
    return inputs, options | {n: x for n, x in tensors.items() if x is not None}


@settings(max_examples=60)
@given(cases(POOL, lengths=(1, 2, 3, 5, 8, 17, 33), score_limit=20000))
def test_judged_as_the_output_of_unit_vectors(case):
    inputs, options = of_case(case)
    with flashsci.use_backend("reference"):
        out, lse = flashsci.attention(
            inputs.q.double(), inputs.k.double(), inputs.v.double(), return_lse=True, sink=inputs.sink,
            **{n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in options.items()},
        )  # fmt: skip
    dtype = torch.float64 if inputs.q.dtype is torch.float64 else torch.float32
    found = flashsci.attention_weights(inputs.q, inputs.k, lse.to(dtype), **options)
    assert found.dtype == dtype and found.shape == out.shape
    Judge(inputs, fused=True).require({"out": found.to(inputs.q.dtype)})


@pytest.mark.parametrize("small", [False, True], ids=["one block", "blocks"])
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_and_their_gradients(name, small, monkeypatch):
    q, k, lse, options, p, _ = called(name, small, monkeypatch)
    found = flashsci.attention_weights(q, k, lse, **options)
    torch.testing.assert_close(found, p)
    mean = flashsci.attention_weights(q, k, lse, average_heads=True, **options)
    torch.testing.assert_close(mean, p.mean(1))
    got = torch.autograd.grad(found.sin().sum() + mean.cos().sum(), (q, k), create_graph=True)
    due = torch.autograd.grad(p.sin().sum() + p.mean(1).cos().sum(), (q, k), create_graph=True)
    torch.testing.assert_close(got, due)
    ends = [sum(x.sin().sum() for x in pair) for pair in (got, due)]
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, k)) for x in ends))


PLACES = {
    "slice": (slice(2, 7), slice(None, -1, 3)),
    "from the end": (slice(-1, None), slice(-4, -2)),
    "index": (torch.tensor([8, -1, 0, 0]), torch.tensor([10, 3], dtype=torch.int32)),
    "both kinds": (torch.tensor([5]), slice(4, None)),
    "none": (slice(0, 0), torch.tensor([], dtype=torch.int64)),
}


@pytest.mark.parametrize("small", [False, True], ids=["one block", "blocks"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", OPTIONS)
def test_chosen_rows_and_columns(name, places, small, monkeypatch):
    q, k, lse, options, p, _ = called(name, small, monkeypatch)
    rows, columns = PLACES[places]
    found = flashsci.attention_weights(q, k, lse, rows=rows, columns=columns, **options)
    torch.testing.assert_close(found, p[:, :, rows][..., columns])
    gradients = [
        torch.autograd.grad(x.sin().sum(), (q, k), retain_graph=True) for x in (found, p[:, :, rows][..., columns])
    ]
    torch.testing.assert_close(*gradients)


def test_memory_is_that_of_blocks(monkeypatch):
    """No tensor of all pairs is made, in forward or backward of reductions."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            found = op(*args, **(kwargs or {}))
            for x in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(x, torch.Tensor):
                    self.most = max(self.most, x.numel())
            return found

    monkeypatch.setattr(maps, "BLOCK", 2 * 256 * 16)
    q, k = torch.randn(2, 1, 2, 256, 8).requires_grad_().unbind(0)
    lse = torch.randn(1, 2, 256) + 9
    with Largest() as seen:
        found = flashsci.attention_statistics(q, k, lse, entropy=True, largest_score=True, key_sum=True, top_k=3)
        torch.autograd.grad(found.entropy.sum() + found.key_sum.square().sum() + found.top_values.sum(), (q, k))
    assert seen.most <= maps.BLOCK < 2 * 256 * 256


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 1, 3, 5, 8)], ids=str)
def test_ranks(shape):
    q, k, v = torch.randn(3, *shape, dtype=torch.float64)
    out, lse = flashsci.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(flashsci.attention_weights(q, k, lse) @ v, out)


def test_leading_dims_that_broadcast():
    q, k = torch.randn(2, 1, 3, 5, 8).double(), torch.randn(1, 4, 1, 6, 8).double()
    out, lse = flashsci.attention(q, k, k, return_lse=True)
    torch.testing.assert_close(flashsci.attention_weights(q, k, lse) @ k, out)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (dict(lse=torch.zeros(2, 4, 8)), ValueError, "lse must have the shape .* second result"),
        (dict(lse=torch.zeros(2, 4, 9, dtype=torch.float16)), TypeError, "lse must be"),
        (dict(rows=3), TypeError, "rows must be a slice, an integer tensor"),
        (dict(rows=torch.ones(9) > 0), TypeError, "nonzero"),
        (dict(columns=torch.zeros(2, 2, dtype=torch.int64)), ValueError, "one dim"),
        (dict(rows=slice(None, None, -1)), ValueError, "positive step"),
        (dict(average_heads=1), TypeError, "average_heads must be True or False"),
        (dict(bias=torch.zeros(3, 11)), ValueError, "bias of shape"),
        (dict(mask=torch.zeros(9, 11)), TypeError, "mask must be"),
        (dict(k=torch.zeros(2, 2, 11, 4)), ValueError, "head dim"),
        (dict(window=3), ValueError, "window must be"),
    ],
)
def test_refused(change, kind, says):
    q, k, _ = drawn(torch.float32)
    with pytest.raises(kind, match=says):
        flashsci.attention_weights(**{**dict(q=q, k=k, lse=torch.zeros(2, 4, 9)), **change})
