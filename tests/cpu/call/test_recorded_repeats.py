"""A recorded backward after plain ones of the same call: it has a graph, whatever the plain ones have left to be repeated."""

import pytest
import torch

import flashsci

B, H, S, D = 2, 2, 5, 8
RECORDED = ("plain", "bias", "key_weight", "gate", "sink", "gate and sink", "window", "packed", "residual")


@pytest.mark.parametrize("form", RECORDED)
def test_a_recorded_backward_repeats_no_plain_one(form):
    """A backward that has been computed without a graph, and then one with it, of the same call."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(B, H, S, D, generator=generator, requires_grad=True) for _ in range(3))
    extra = {
        "bias": {"bias": torch.randn(1, H, S, S, generator=generator).requires_grad_()},
        "key_weight": {"key_weight": torch.rand(B, H, S, generator=generator).requires_grad_()},
        "gate": {"pair_gate": torch.randn(1, H, S, S, generator=generator).requires_grad_()},
        "sink": {"sink": torch.randn(H, generator=generator).requires_grad_()},
        "window": {"window": (3, 2)},
    }
    options = {name: x for part in form.split(" and ") for name, x in extra.get(part, {}).items()}
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor))]

    def first(backend, **asked):
        if form == "packed":
            rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            offsets = torch.arange(0, B * S + 1, S, dtype=torch.int32)
            found = (flashsci.varlen_attention(*rows, offsets, backend=backend),)
        elif form == "residual":
            found = flashsci.residual_attention(q, k, v, backend=backend)
        else:
            found = (flashsci.attention(q, k, v, **options, backend=backend),)
        # Cotangents without a graph: those of plain and of recorded backwards look the same.
        return torch.autograd.grad(found, leaves, [torch.ones_like(x) * 0.5 + x.detach() for x in found], **asked)

    for _ in range(4):
        first("triton")
    found = first("triton", create_graph=True)
    due = first("reference", create_graph=True)
    for second in (lambda rows: rows, lambda rows: torch.autograd.grad(sum(x.square().sum() for x in rows), leaves)):
        for a, b in zip(second(found), second(due), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
