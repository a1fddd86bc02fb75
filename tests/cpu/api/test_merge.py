"""Attention over disjoint sets of keys, merged: the whole."""

import itertools

import pytest
import torch

import flashsci
from flashsci.testing import Inputs, Judge


def parts_of(q, k, v, cuts, **options):
    edges = [0, *cuts, k.shape[-2]]
    return [
        flashsci.attention(q, k[..., a:b, :], v[..., a:b, :], return_lse=True, **options)
        for a, b in itertools.pairwise(edges)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cuts", [(), (4,), (1, 1, 6, 9)], ids=str)
def test_parts_are_the_whole(cuts, dtype):
    """With their gradients, judged as one call; parts without a key among them."""
    q, k, v, dout = (torch.randn(2, 4, 9, 16).to(dtype).requires_grad_() for _ in range(4))
    dlse = torch.randn(2, 4, 9)
    out, lse = flashsci.merge(*zip(*parts_of(q, k, v, cuts), strict=True))
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.to(lse.dtype)))
    if dtype == torch.bfloat16:  # parts are rounded before their sum, and so are their gradients
        judged = Judge(Inputs(q, k, v), fused=False).judge("out", out)
        assert judged.error <= judged.allowed
        return
    judge = Judge(Inputs(q, k, v, dout=dout.detach(), dlse=dlse), fused=False)
    judge.require(dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *found), strict=True)))


def test_stacked_parts_and_many_of_them():
    q, k, v = torch.randn(3, 1, 2, 12, 8).double()
    outs, lses = zip(*parts_of(q, k, v, range(1, 12)), strict=True)
    out, lse = flashsci.merge(torch.stack(outs), torch.stack(lses))
    due = flashsci.attention(q, k, v, return_lse=True)
    torch.testing.assert_close((out, lse), due)


@pytest.mark.parametrize("unseen", [-torch.inf, torch.inf], ids=["flashsci", "flash-attn 2"])
def test_rows_without_keys(unseen):
    """In one part, or in all: exact, with gradients that are finite and zero where nothing is seen."""
    outs = torch.randn(2, 1, 3, 8, dtype=torch.float64)
    lses = torch.randn(2, 1, 3, dtype=torch.float64)
    lses[0, 0, :2] = lses[1, 0, 1] = unseen
    outs[0, 0, :2] = outs[1, 0, 1] = 0
    outs.requires_grad_(), lses.requires_grad_()
    out, lse = flashsci.merge(outs, lses)
    assert torch.equal(out[0, 0], outs[1, 0, 0]) and lse[0, 0] == lses[1, 0, 0]
    assert not out[0, 1].any() and lse[0, 1] == -torch.inf
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    found = torch.autograd.grad(out.sum() + finite.sum(), (outs, lses))
    assert all(x.isfinite().all() for x in found) and not found[1][:, 0, 1].any()
    assert found[1][1, 0, 0] == 1 and found[1][0, 0, 0] == 0


def test_a_sink_belongs_to_one_part():
    q, k, v = torch.randn(3, 1, 2, 12, 8).double()
    sink = torch.randn(2).double()
    (first,) = parts_of(q, k[..., :5, :], v[..., :5, :], ())
    (second,) = parts_of(q, k[..., 5:, :], v[..., 5:, :], (), sink=sink)
    merged = flashsci.merge(*zip(first, second, strict=True))
    torch.testing.assert_close(merged, flashsci.attention(q, k, v, sink=sink, return_lse=True))


def test_what_does_not_fit():
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    for words, outs, lses in (
        ("same number of parts", [out], [lse, lse]),
        ("at least one", [], []),
        (r"got \[2, 3, 4\] and \[3, 2\]", [out], [lse.T]),
        (r"the first out \[2, 3, 4\]", [out, out[:, :2]], [lse, lse[:, :2]]),
    ):
        with pytest.raises(ValueError, match=words):
            flashsci.merge(outs, lses)
