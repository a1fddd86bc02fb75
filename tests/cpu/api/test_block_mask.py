"""BlockMask: its makers, its refusals, and calls of every backend that take it."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import flashsci
from flashsci import BlockMask
from flashsci.call.kinds import Dense
from flashsci.call.mask_tiles import belongs, decides
from flashsci.call.ops import Tensors
from flashsci.choice import preferences
from flashsci.choice.candidates import rule_of
from flashsci.choice.gradients import by_rules, gradients


def test_documents():
    ids = torch.tensor([[0, 0, 1, 1, 1, 7], [3, 3, 3, 3, 2, 2]])
    due = ids[:, None, :, None] == ids[:, None, None]
    assert torch.equal(BlockMask.from_documents(ids).mask, due)
    assert torch.equal(BlockMask.from_documents(ids[0]).mask, due[0, 0])
    assert torch.equal(BlockMask.from_documents(ids, causal=True).mask, due.tril())


def test_function():
    made = BlockMask.from_function(lambda b, h, q, k: (q - k).abs() <= b + h, 2, 3, 40, 50, "cpu")
    assert made.mask.shape == (2, 3, 40, 50)
    q, k = torch.arange(40)[:, None], torch.arange(50)
    for b in range(2):
        for h in range(3):
            assert torch.equal(made.mask[b, h], (q - k).abs() <= b + h)
    assert torch.equal(BlockMask.from_function(lambda b, h, q, k: k < 7, 1, 1, 4, 9).mask[0, 0, 2], torch.arange(9) < 7)


def test_a_copy_of_the_mask_is_kept():
    mask = torch.rand(1, 37, 43) < 0.5
    made, before = BlockMask.from_mask(mask), mask.clone()
    mask.zero_()
    assert torch.equal(made.mask, before) and made.mask.stride(-2) % 16 == 0
    repeated = BlockMask.from_mask(before.expand(5, 37, 43))
    assert repeated.mask.shape == (5, 37, 43) and repeated.mask.stride(0) == 0


def test_it_is_a_tree_of_tensors():
    made = BlockMask.from_documents(torch.arange(9) // 4)
    leaves, spec = pytree.tree_flatten(made)
    assert type(pytree.tree_unflatten(leaves, spec)) is BlockMask


@pytest.mark.parametrize("backend", ["reference", "sdpa", "eager", "auto"])
def test_every_backend_takes_it(backend):
    q, k, v = (torch.randn(2, 3, 20, 16, requires_grad=True) for _ in range(3))
    made = BlockMask.from_documents(torch.arange(20) // 7, causal=True)
    for _ in range(3):
        found, due = (
            torch.autograd.grad(flashsci.attention(q, k, v, mask=mask, backend=backend).square().sum(), (q, k, v))
            for mask in (made, made.mask)
        )
        assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))


def test_explain_and_the_backward_take_it():
    q, k, v, dout = (torch.randn(2, 3, 20, 16) for _ in range(4))
    made = BlockMask.from_documents(torch.arange(20) // 7)
    assert flashsci.explain(q, k, v, mask=made).chosen == flashsci.explain(q, k, v, mask=made.mask).chosen
    out, lse = flashsci.attention(q, k, v, mask=made, return_lse=True)
    found, due = (flashsci.attention_backward(dout, q, k, v, out, lse, mask=mask) for mask in (made, made.mask))
    assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True) if x is not None)


@pytest.mark.parametrize(
    "make, kind, words",
    [
        (lambda: BlockMask.from_mask([[True]]), TypeError, "mask must be a torch.Tensor"),
        (lambda: BlockMask.from_mask(torch.zeros(3, 3)), TypeError, "bool"),
        (lambda: BlockMask.from_mask(torch.zeros(3) > 0), ValueError, "at least two dims"),
        (lambda: BlockMask.from_documents([0, 1]), TypeError, "ids must be a torch.Tensor"),
        (lambda: BlockMask.from_documents(torch.tensor(3)), ValueError, "at least one dim"),
        (lambda: BlockMask.from_function(lambda b, h, q, k: q - k, 1, 1, 5, 5), TypeError, "bool"),
        (lambda: BlockMask.from_function(lambda b, h, q, k: k[:3] > 0, 1, 1, 5, 5), ValueError, "does not broadcast"),
        (lambda: BlockMask.from_function(lambda b, h, q, k: True, 1, 1, 5, 5), TypeError, "must be a torch.Tensor"),
    ],
)
def test_refusals(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_a_mask_that_does_not_fit_is_refused_as_its_tensor_is():
    q = torch.randn(1, 2, 20, 16)
    with pytest.raises(ValueError, match="mask of shape"):
        flashsci.attention(q, q, q, mask=BlockMask.from_documents(torch.arange(21)))


def test_the_rule_of_auto():
    """A mask for which a table pays goes to the kernels that skip tiles, on tensor cores alone; one of keys does not."""
    q = torch.empty(1, 16, 4096, 64, device="meta", dtype=torch.bfloat16)
    mask = torch.empty(4096, 4096, device="meta", dtype=torch.bool)
    assert decides(Tensors(q, q, q, mask=mask))
    assert not decides(Tensors(q, q, q, mask=mask[:1]))
    assert not decides(Tensors(q, q, q, mask=mask[:1].expand(4096, 4096)))
    assert not decides(Tensors(q[:, :1], q[:, :1], q[:, :1], mask=mask))
    assert not belongs(mask, Dense(q, q, q, mask=mask[:, :1]))
    problem = flashsci.explain(q, q, q, mask=mask).problem
    assert problem.mask_tiles
    assert preferences.tiled(problem) is None, "there is no GPU"


def test_calls_on_tensor_cores_with_tables_are_triton_s():
    from dataclasses import replace

    q = torch.randn(1, 2, 20, 16)
    problem = flashsci.explain(q, q, q, mask=BlockMask.from_documents(torch.arange(20))).problem
    for capability, tiled in (((9, 0), True), ((8, 0), True), ((7, 5), False)):
        here = replace(problem, capability=capability, device_type="cuda")
        assert (preferences.tiled(here) is not None) == tiled
        assert preferences.tiled(replace(here, mask_tiles=False)) is None
        if tiled:
            assert rule_of(here) is preferences.tiled(here) and rule_of(here).order[0] == "triton"
            assert "hides" in rule_of(here).cited()
            learning = replace(here, requires_grad=True)
            assert gradients(by_rules("triton"), learning, anywhere=True).backend == "triton"
