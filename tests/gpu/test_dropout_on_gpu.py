"""Dropout in the CUDA kernels of sm80, asked for by name: what `check` draws by chance, here on purpose."""

import pytest
import torch

import flashsci
from flashsci.testing import Case, Variant
from tests.support import judged_cases

DEVICE = torch.device("cuda")
NAME = "cuda:sm80"
DIMS = ((16, 16), (33, 64), (64, 64), (96, 80), (128, 128), (128, 36))
KINDS = {
    "plain": {},
    "causal": dict(causal=True, align="lower_right"),
    "window": dict(window=(90, 20)),
    "softcap": dict(softcap=9.0),
    "pairs hidden": dict(mask_shape=(2, 1, 130, 300)),
    "keys hidden": dict(mask_shape=(2, 1, 1, 300), mask_kind="keys"),
    "bias of every score": dict(bias_shape=(2, 4, 130, 300)),
    "shared bias": dict(bias_shape=(1, 4, 130, 300)),
    "bias of keys": dict(bias_shape=(2, 1, 1, 300)),
    "packed": dict(lens_q=(100, 0, 33, 300), lens_k=(50, 20, 0, 333)),
}
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


def case_of(dtype, dims, kind, **others):
    given = KINDS[kind]
    biased = "bias_shape" in given
    variant = Variant(
        dtype, *dims, dropout=True, varlen=kind == "packed", window="causal" in given or "window" in given,
        softcap="softcap" in given, mask="mask_shape" in given, bias="pair" if biased else None, bias_grad=biased, lse_grad=True,
    )  # fmt: skip
    sizes = {} if kind == "packed" else dict(lead=(2,), seq_q=130, seq_k=300)
    return Case(variant, heads_k=2, group=2, dropout_p=0.2, **sizes, **given, **others)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_tile(dtype, dims, kind, deterministic):
    for seed in range(2):
        judged_cases.judge(case_of(dtype, dims, kind, seed=seed), NAME, DEVICE, deterministic)


@pytest.mark.parametrize("half", (0, 1))
@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_the_entries_are_those_of_dropout_mask(dtype, masked, half):
    """A value for each key, in its own column: an output is zero where its entry is dropped, and nowhere else."""
    seed = torch.tensor([-(1 << 61) + 12345, (1 << 35) - 3], device=DEVICE)
    q, k = (0.1 * torch.randn(2, 3, n, 64, dtype=dtype, device=DEVICE) for n in (1000, 256))
    columns = slice(128 * half, 128 * half + 128)  # of the keys
    v = torch.eye(256, dtype=dtype, device=DEVICE)[:, columns].expand(2, 3, 256, 128)
    mask = torch.ones(1000, 256, dtype=torch.bool, device=DEVICE) if masked else None
    out = flashsci.attention(q, k, v, mask=mask, dropout_p=0.3, dropout_seed=seed, backend=NAME)
    assert torch.equal(out != 0, flashsci.dropout_mask(seed, 0.3, (2, 3, 1000, 256))[..., columns])


def test_repeated_calls_draw_anew():
    """Each call reads its own seed; a captured graph too."""
    q = torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, device=DEVICE)
    seed = torch.tensor([1, 0], device=DEVICE)
    call = lambda: flashsci.attention(q, q, q, dropout_p=0.5, dropout_seed=seed, backend=NAME)  # noqa: E731
    first = call()
    assert torch.equal(first, call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    seed[1] += 1
    graph.replay()
    assert not torch.equal(first, captured)
    assert torch.equal(captured, call())
