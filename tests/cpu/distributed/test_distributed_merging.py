"""Pieces of a softmax put together, by torch and by the kernel for GPUs in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
from unittest.mock import patch

import pytest
import torch

from flashsci.distributed import merging

with patch.dict(os.environ, TRITON_INTERPRET="1"):
    try:
        merge_kernel = importlib.import_module("flashsci.distributed.merge_kernel")
    except ImportError:
        merge_kernel = None

NOTHING = float("-inf")


def by_kernel(out, lse, part, part_lse):
    if merge_kernel is None:
        pytest.skip("no Triton")
    assert merge_kernel.launch(out, lse, part, part_lse)


FORMS = {"torch": merging.merge, "kernel": by_kernel}


def merged(out, lse, part, part_lse):
    """In float64, by the definition."""
    weights = torch.stack([lse, part_lse]).double()
    whole = torch.logsumexp(weights, 0)
    shares = (weights - whole.masked_fill(whole == NOTHING, 0)).exp().unsqueeze(-1)
    return shares[0] * out.double() + shares[1] * part.double(), whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 70, 24), (3, 17, 64), (33, 8), (2, 2, 3, 5, 16), (2, 3, 0, 8)])
def test_pieces_are_put_together(form, dtype, shape):
    out, part = torch.randn(shape), torch.randn(shape).to(dtype)
    lse, part_lse = 20 * torch.randn(2, *shape[:-1])
    lse[..., ::3], part_lse[..., ::2] = NOTHING, NOTHING  # on either side, and on both
    out[lse == NOTHING], part[part_lse == NOTHING] = 0.0, 0.0
    expected, whole = merged(out, lse, part, part_lse)
    FORMS[form](out, lse, part, part_lse)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, whole.float(), rtol=1e-6, atol=1e-5)
    assert out[lse == NOTHING].eq(0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_sixteen_bits_are_rounded_once(form, dtype):
    out, part = torch.randn(2, 3, 70, 24).to(dtype), torch.randn(2, 3, 70, 24).to(dtype)
    lse, part_lse = torch.randn(2, 2, 3, 70)
    exact, whole = merged(out, lse, part, part_lse)
    FORMS[form](out, lse, part, part_lse)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps / 1.9, atol=1e-6)
    torch.testing.assert_close(lse, whole.float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_larger_tensors_in_any_order(form):
    """Views of rows, of tensors whose rows are farther apart than their heads, and nothing beside them changes."""
    sums = torch.randn(2, 40, 3, 16).transpose(1, 2)  # [2, 3, 40, 16], as [B, S, H, D] lies
    lse, part, part_lse = torch.randn(2, 3, 40), torch.randn(2, 25, 3, 16).transpose(1, 2), torch.randn(2, 3, 25)
    before, lse_before = sums.clone(), lse.clone()
    rows = slice(11, 36)
    expected, whole = merged(sums[:, :, rows], lse[..., rows], part, part_lse)
    FORMS[form](sums[:, :, rows], lse[..., rows], part, part_lse)
    torch.testing.assert_close(sums[:, :, rows], expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[..., rows], whole.float(), rtol=1e-6, atol=1e-5)
    for x, y in ((sums, before), (lse.unsqueeze(-1), lse_before.unsqueeze(-1))):
        assert torch.equal(x[:, :, :11], y[:, :, :11]) and torch.equal(x[:, :, 36:], y[:, :, 36:])


def test_the_kernel_says_what_it_does_not_take():
    """Members that no single stride goes through, and columns that are not neighbours: torch does these."""
    if merge_kernel is None:
        pytest.skip("no Triton")
    lse = torch.zeros(2, 2, 3, 5)
    columns = torch.zeros(2, 2, 3, 16, 5).transpose(-1, -2)
    members = torch.zeros(2, 3, 5, 2, 16).permute(0, 3, 1, 2, 4)
    for x in (columns, members):
        assert not merge_kernel.launch(x, lse, x, lse)
