"""Key weights of any length in the CUDA backend: the kernels that serve them, the form in which the library takes them, and
refusals. No GPU is needed; the kernels themselves run in tests/cpu/emulator/test_weights_kernel.py."""

from dataclasses import replace

import pytest
import torch

import flashsci.backends.cuda as backend
from flashsci.backends.cuda import decisions, rehearsal
from flashsci.call.ops import NEED_K, NEED_KEY_WEIGHT, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem
from flashsci.choice import preferences
from flashsci.errors import BackendError
from tests.support.rehearsed import check_served, empty, require_library

ROWS = NEED_Q | NEED_K | NEED_V
SCALARS = Scalars(-1, -1, 0.125, 0.0, -1, -1, False, 0.0, "default", False)
PROBLEM = Problem("cuda", (8, 0), torch.float16, 4, 2, 64, 64, batch=(2,), seq_q=100, seq_k=100, key_weight=True)


@pytest.fixture
def library():
    require_library("dropout_p")


def dense(weights, dtype=torch.float16, dim=64, heads_k=2, **others):
    q, k = (empty(2, heads, 300, dim, dtype=dtype) for heads in (4, heads_k))
    return Tensors(q, k, k, key_weight=weights, **others)


@pytest.mark.parametrize("device", (rehearsal.A100, rehearsal.H100))
@pytest.mark.parametrize("weights", (empty(2, 2, 300), empty(1, 2, 300), empty(2, 1, 1), empty(1, 1, 300)))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("masked", (False, True))
def test_the_kernels_of_key_weights(library, dtype, weights, device, masked):
    mask = empty(2, 1, 300, 300, dtype=torch.bool) if masked else None
    tensors = dense(weights, dtype, mask=mask)
    assert decisions.takes_weights(tensors, SCALARS)
    half = "" if dtype != torch.float32 else "_fp32"
    folders = rehearsal.folders(rehearsal.forward_kernels(tensors, SCALARS, device))
    assert folders == ("sm80/weights", f"sm80/fwd{half}")
    saved = Saved(tensors, *fake_forward(tensors), SCALARS)
    asked = lambda need: rehearsal.folders(rehearsal.backward_kernels(saved.out, None, saved, need, device))  # noqa: E731
    assert asked(ROWS) == ("sm80/weights", f"sm80/bwd{half}")
    assert asked(ROWS | NEED_KEY_WEIGHT) == ("sm80/weights", f"sm80/bwd{half}", f"sm80/dbias{half}")
    assert asked(NEED_KEY_WEIGHT) == ("sm80/weights", f"sm80/bwd{half}", f"sm80/dbias{half}")


def test_short_calls_have_kernels_of_their_own(library):
    q = empty(2, 4, 20, 16)
    tensors = Tensors(q, q, q, key_weight=empty(2, 4, 20))
    assert rehearsal.folders(rehearsal.forward_kernels(tensors, SCALARS, rehearsal.H100)) == ("sm80/small",)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (empty(2, 3, 300), "do not broadcast to the keys"),
        (empty(2, 4, 300), "do not broadcast to the keys"),  # heads of queries
        (empty(2, 2, 299), "do not broadcast to the keys"),
    ],
)
def test_the_library_checks_weights(library, weights, reason):
    with pytest.raises(RuntimeError, match=reason):
        rehearsal.forward_kernels(dense(weights), SCALARS, rehearsal.H100)


@pytest.mark.parametrize("others", ({"bias": empty(1, 1, 1, 300, dtype=torch.float16)}, {"alibi_slopes": empty(4)}))
def test_no_kernel_leaves_something_out(library, others):
    with pytest.raises(BackendError, match="key_weight for dense calls without bias and alibi_slopes"):
        backend.forward(dense(empty(2, 2, 300), **others), SCALARS)
    with pytest.raises(BackendError, match="without key_weight"):
        backend.forward(dense(empty(2, 2, 300)), SCALARS._replace(dropout_p=0.5))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(dtype=torch.float32), None),
        (dict(dtype=torch.bfloat16, capability=(9, 0), mask=True, softcap=3.0), None),
        (dict(capability=(7, 5)), "only its kernels for compute capability 8.0 and newer"),
        (dict(varlen=True), "key_weight for dense calls"),
        (dict(bias_shape=(1, 4, 100, 100), bias_dtype=torch.float16), "key_weight for dense calls without bias"),
        (dict(dropout_p=0.5), "without key_weight"),
    ],
)
def test_the_calls_that_the_backend_serves(change, reason):
    check_served(PROBLEM, change, reason)


def test_auto_leaves_long_calls_to_others():
    short = replace(PROBLEM, dtype=torch.float32, heads_k=4, seq_q=20, seq_k=20)
    assert "cuda" in preferences.untimed(PROBLEM)
    assert "cuda" in preferences.untimed(replace(short, seq_k=33))
    assert "cuda" in preferences.untimed(replace(short, head_dim=65))
    assert "cuda" in preferences.untimed(replace(short, heads_k=2))
    assert "cuda" not in preferences.untimed(short)
