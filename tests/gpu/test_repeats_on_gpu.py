"""Repeated calls with tensors of lower rank than q, and with sinks, on kernels: bitwise the results of tensors that were
given in q's rank, at addresses that no earlier call had."""

import pytest
import torch

import flashsci
from tests.support.judged_cases import require

pytestmark = pytest.mark.gpu
B, H, S, D = 2, 4, 128, 64
FORMS = {
    "bias [Sq, Sk]": {"bias": (S, S)},
    "bias [H, Sq, Sk]": {"bias": (H, S, S)},
    "mask [Sq, Sk]": {"mask": (S, S)},
    "key weights [Sk]": {"key_weight": (S,)},
    "sink": {"sink": (H,)},
    "sink and bias [Sq, Sk]": {"sink": (H,), "bias": (S, S)},
}
RANKS = {"bias": 4, "mask": 4, "key_weight": 3}


def drawn(name, shape):
    x = torch.rand(shape, device="cuda")
    return x > 0.3 if name == "mask" else x.requires_grad_()


def in_rank(name, x):
    return x[(None,) * (RANKS[name] - x.dim())] if name in RANKS else x


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("offset", [0, 2], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("form", FORMS)
def test_lower_ranks_and_sinks(backend, grad, offset, form):
    """An address off 16 bytes goes the general way behind a function that the library refuses."""
    require(backend)
    kept = []
    for _ in range(4):
        q, k, v = (
            torch.randn(B * H * S * D + offset, device="cuda", dtype=torch.bfloat16)[offset:]
            .view(B, H, S, D)
            .requires_grad_(grad)
            for _ in range(3)
        )
        others = {name: drawn(name, shape) for name, shape in FORMS[form].items()}
        kept.append((q, k, v, others))  # so that no memory is used twice

        def attend(given, rows=(q, k, v)):
            with torch.set_grad_enabled(grad):
                return flashsci.attention(*rows, **given, deterministic=True, return_lse=True, backend=backend)

        try:
            found = attend(others)
        except flashsci.BackendError as error:
            pytest.skip(str(error))
        due = attend({name: in_rank(name, x) for name, x in others.items()})
        assert all(torch.equal(a, b) for a, b in zip(found, due, strict=True))
        if grad:
            leaves = [x for x in (q, k, v, *others.values()) if x.requires_grad]
            first, second = (
                torch.autograd.grad(out.float().sin().sum() + lse.sum(), leaves) for out, lse in (found, due)
            )
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
