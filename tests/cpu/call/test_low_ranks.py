"""Repeated calls with tensors of lower rank than q, and with sinks: the plan remembers their strides, and the results and
derivatives are those of tensors that were given in full."""

import pytest
import torch

import flashsci
from flashsci.call import plans

B, H, S, D = 2, 2, 5, 8
FORMS = {
    "bias [Sq, Sk]": {"bias": (S, S)},
    "bias [1, Sk]": {"bias": (1, S)},
    "bias [H, Sq, Sk]": {"bias": (H, S, S)},
    "key weights [Sk]": {"key_weight": (S,)},
    "key weights [Hk, Sk] and bias": {"key_weight": (H, S), "bias": (S, S)},
    "sink": {"sink": (H,)},
    "sink and bias [Sq, Sk]": {"sink": (H,), "bias": (S, S)},
}
IN_FULL = {"bias": (B, H, S, S), "key_weight": (B, H, S)}


def draw(form):
    rows = {name: torch.randn(B, H, S, D).requires_grad_() for name in "qkv"}
    # Far from weights of zero, where second derivatives grow without bound.
    others = {n: (torch.rand(shape) + 0.5).requires_grad_() for n, shape in FORMS[form].items()}
    return rows | others


def in_full(given):
    """The tensors expanded, which is the general way to compute the same."""
    return {n: x.expand(IN_FULL[n]) if n in IN_FULL else x for n, x in given.items()}


def attend(given):
    out, lse = flashsci.attention(**given, backend="triton", return_lse=True)
    return out.sin().sum() + lse.cos().sum()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_repeated_call(form):
    for _ in range(4):  # planned, remembered, repeated, repeated by its backward
        given = draw(form)
        leaves = list(given.values())
        found = torch.autograd.grad(attend(given), leaves)
        due = torch.autograd.grad(attend(in_full(given)), leaves)
        for name, a, b in zip(given, found, due, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_of_a_repeated_call(form):
    for _ in range(3):
        given = draw(form)
        leaves = list(given.values())

        def second(call, leaves=leaves):
            first = torch.autograd.grad(call, leaves, create_graph=True)
            return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

        for a, b in zip(second(attend(given)), second(attend(in_full(given))), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_results_of_a_repeated_call(form):
    for _ in range(3):
        given = {name: x.detach() for name, x in draw(form).items()}
        found = flashsci.attention(**given, backend="triton", return_lse=True)
        due = flashsci.attention(**in_full(given), backend="triton", return_lse=True)
        for a, b in zip(found, due, strict=True):
            torch.testing.assert_close(a, b)


def test_a_mask_of_two_dims():
    q, k, v = torch.randn(3, B, H, S, D).unbind(0)
    for _ in range(3):
        mask = torch.rand(S, S) > 0.3
        found = flashsci.attention(q, k, v, mask=mask, backend="triton")
        due = flashsci.attention(q, k, v, mask=mask.expand(B, H, S, S), backend="triton")
        torch.testing.assert_close(found, due)


def test_other_ranks_are_other_calls():
    """A bias of another rank or sink does not repeat a call that was planned for the first."""
    q, k, v = torch.randn(3, B, H, S, D).unbind(0)
    bias, sink = torch.randn(S, S), torch.randn(H)
    for _ in range(3):
        whole = flashsci.attention(q, k, v, bias=bias[None, None], backend="triton")
        assert torch.equal(whole, flashsci.attention(q, k, v, bias=bias, backend="triton"))
        with_sink = flashsci.attention(q, k, v, bias=bias, sink=sink, backend="triton")
        assert not torch.allclose(with_sink, whole)


class Reads:
    """A prepared forward that fails as a library does which refuses addresses, and then goes the general way."""

    def __init__(self, general):
        self.general = general

    def at_addresses(self, raised):
        return Reads(lambda given: self.general(raised(given)))

    def __call__(self, given):
        return self.general(given)


@pytest.mark.parametrize("reads_addresses", [False, True])
def test_the_general_way_gets_tensors_of_one_rank(reads_addresses):
    """Also behind a function that reads addresses, which needs no views itself."""
    seen = []

    def general(given):
        seen.append([None if x is None else tuple(x.shape) for x in given[3:6]])
        return given[0], given[0][..., 0]

    class Module:
        FUSED = True

        @staticmethod
        def prepared_forward(tensors, scalars):
            return Reads(general) if reads_addresses else general

    plan = plans.Plan(None, Module, None, None, 4)
    given = (*torch.randn(3, B, H, S, D).unbind(0), torch.randn(S, S), torch.rand(S), None)
    given = (*given, None, None, None, None, None, None)
    plan.prepared(given)(given)
    assert seen == [[(1, 1, S, S), (1, 1, S), None]]
