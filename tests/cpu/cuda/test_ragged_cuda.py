"""A bias of packed calls in the library: the kernels that it would launch, and the calls that it leaves to others, without a
GPU."""

from dataclasses import replace

import pytest
import torch

from flashsci.backends import cuda as backend
from flashsci.backends.cuda import layouts, rehearsal
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem
from flashsci.choice import preferences
from tests.support.rehearsed import check_served, empty, require_library

ROWS = NEED_Q | NEED_K | NEED_V
SCALARS = Scalars(-1, -1, 0.125, 0.0, -1, -1, False, 0.0, "default", False)
PROBLEM = Problem(
    "cuda", (8, 0), torch.float16, 4, 4, 64, 64, batch=(3,), seq_q=200, seq_k=200, varlen=True, bias_shape=(4, 9000),
    ragged_bias=True, bias_dtype=torch.float16, bias_grad=True, requires_grad=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def library():
    require_library("bias_offsets")


def packed(*shape, dtype=torch.float16, bias_dtype=None, sequences=3):
    """A call with a bias [Hb, pairs] or [Hb, 1, Tk]."""
    rows, edges = empty(4, 200, 64, dtype=dtype), empty(sequences + 1, dtype=torch.int32)
    starts = empty(sequences + 1, dtype=torch.int64) if len(shape) == 2 else None
    bias = empty(*shape, dtype=bias_dtype or dtype)
    return Tensors(rows, rows, rows, bias, cu_seqlens_q=edges, cu_seqlens_k=edges, bias_offsets=starts)


def kernels_of(tensors, scalars, need, device=rehearsal.H100):
    saved = Saved(tensors, *fake_forward(tensors), scalars)
    forward = rehearsal.forward_kernels(tensors, scalars, device)
    return forward, rehearsal.backward_kernels(saved.out, None, saved, need, device)


@pytest.mark.parametrize("device", (rehearsal.A100, rehearsal.H100))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("shape", ((4, 9000), (1, 9000), (4, 1, 200), (1, 1, 200)))
@pytest.mark.parametrize("deterministic", (False, True))
def test_the_kernels_of_a_packed_bias(shape, dtype, device, deterministic):
    scalars = SCALARS._replace(deterministic=deterministic)
    need = ROWS | (NEED_BIAS if len(shape) == 2 else 0)
    for bias_dtype in {dtype, torch.float32}:
        forward, backward = kernels_of(packed(*shape, dtype=dtype, bias_dtype=bias_dtype), scalars, need, device)
        half = "" if dtype != torch.float32 else "_fp32"
        assert rehearsal.folders(forward) == (f"sm80/fwd{half}",)
        assert set(rehearsal.folders(backward)) <= {f"sm80/bwd{half}", "sm80/dq"}
        assert forward[0].endswith("/forward_fp32_kernel" if half else "/forward_bias_mask_kernel")


def test_no_older_kernel_takes_it():
    assert rehearsal.forward_kernels(packed(4, 9000), SCALARS, rehearsal.T4) is None
    assert rehearsal.forward_kernels(packed(4, 9000), SCALARS, rehearsal.H100, 90) is None


def test_gradients_that_kernels_leave_to_others():
    for tensors, scalars in (
        (packed(4, 1, 200), SCALARS),
        (packed(4, 9000), SCALARS._replace(softcap=3.0)),
    ):
        forward, backward = kernels_of(tensors, scalars, ROWS)
        assert forward and backward
        assert kernels_of(tensors, scalars, ROWS | NEED_BIAS)[1] is None
    capped = SCALARS._replace(softcap=3.0, caps_bias=True)
    assert kernels_of(packed(4, 9000), capped, ROWS | NEED_BIAS)[1]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (packed(3, 9000), "does not broadcast to the heads"),
        (packed(4, 1, 100), "a packed bias must be"),
        (packed(4, 9000)._replace(bias_offsets=None), "a packed bias must be"),
        (packed(4, 9000)._replace(bias_offsets=empty(3, dtype=torch.int64)), "block starts"),
        (packed(4, 9000)._replace(bias_offsets=empty(4, dtype=torch.int32)), "block starts"),
        (packed(4, 9000, bias_dtype=torch.bfloat16), "q's dtype or float32"),
        (packed(4, 9000)._replace(bias=None), "belong to a bias of packed calls"),
    ],
)
def test_a_bias_that_does_not_fit(tensors, reason):
    with pytest.raises(RuntimeError, match=reason):
        rehearsal.forward_kernels(tensors, SCALARS, rehearsal.H100)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(capability=(9, 0)), None),
        (dict(dtype=torch.float32, bias_dtype=torch.float32), None),
        (dict(softcap=3.0, caps_bias=True), None),
        (dict(ragged_bias=False, bias_shape=(4, 1, 200), bias_grad=False), None),
        (dict(softcap=3.0, bias_grad=False), None),
        (dict(capability=(7, 5)), "only its kernels for compute capability 8.0 and newer"),
        (dict(dropout_p=0.5), "for packed sequences without alibi_slopes and bias"),
        (dict(alibi=True), "only without bias"),
    ],
)
def test_the_calls_that_the_backend_serves(change, reason):
    check_served(PROBLEM, change, reason)


@pytest.mark.parametrize("change", (dict(softcap=3.0), dict(ragged_bias=False, bias_shape=(4, 1, 200))))
def test_gradients_that_the_backend_leaves_to_others(change):
    problem = replace(PROBLEM, **change)
    assert backend.rejects(problem) is None
    generation, reason = backend.backward_kernels(problem)
    assert generation == 0 and "that of a bias per pair" in reason


def test_auto_leaves_such_calls_to_others():
    assert "cuda" in preferences.untimed(PROBLEM)
    assert "cuda" in preferences.untimed(replace(PROBLEM, ragged_bias=False, bias_shape=(4, 1, 200)))
    assert "cuda" not in preferences.untimed(replace(PROBLEM, ragged_bias=False, bias_shape=None, bias_dtype=None))


def test_the_gradient_of_shared_heads_is_summed():
    """In fp32, of a copy of every head."""
    tensors = packed(1, 9000)
    tensors = tensors._replace(bias=torch.zeros(1, 9000, dtype=torch.float16))
    assert layouts.with_own_heads(tensors, ROWS).bias is tensors.bias
    own = layouts.with_own_heads(tensors, ROWS | NEED_BIAS).bias
    assert own.shape == (4, 9000) and own.dtype == torch.float32 and own.stride() == (0, 1)
    found = layouts.summed(torch.full((4, 9000), 0.25), tensors.bias)
    assert found.dtype == torch.float16 and torch.equal(found, torch.ones(1, 9000, dtype=torch.float16))
    assert layouts.summed(torch.empty(0), tensors.bias).shape == (0,)
