"""ALiBi in the library: the kernels that it would launch, and the calls that it leaves to others, without a GPU."""

import pytest
import torch

from flashsci.backends.cuda import rehearsal
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem
from tests.support.rehearsed import check_served, empty, require_library

ROWS = NEED_Q | NEED_K | NEED_V
SCALARS = Scalars(-1, -1, 0.125, 0.0, -1, -1, False, 0.0, "default", False)
PROBLEM = Problem("cuda", (8, 0), torch.float16, 4, 4, 64, 64, batch=(2,), seq_q=100, seq_k=100, alibi=True)


@pytest.fixture(autouse=True)
def library():
    require_library("slopes")


def packed(slopes, sequences=3, dtype=torch.float16):
    rows = empty(4, 200, 64, dtype=dtype)
    edges = empty(sequences + 1, dtype=torch.int32)
    return Tensors(rows, rows, rows, cu_seqlens_q=edges, cu_seqlens_k=edges, alibi_slopes=slopes)


def dense(slopes, *lead, dtype=torch.float16, **others):
    rows = empty(*(lead or (2,)), 4, 100, 64, dtype=dtype)
    return Tensors(rows, rows, rows, alibi_slopes=slopes, **others)


@pytest.mark.parametrize("device", (rehearsal.A100, rehearsal.H100))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("kind", ("plain", "mask", "packed", "deterministic"))
def test_the_kernels_of_alibi(kind, dtype, device):
    scalars = SCALARS._replace(deterministic=kind == "deterministic")
    mask = empty(2, 1, 100, 100, dtype=torch.bool)
    tensors = (
        packed(empty(3, 4), dtype=dtype)
        if kind == "packed"
        else dense(empty(4), dtype=dtype, mask=mask if kind == "mask" else None)
    )
    forward = rehearsal.forward_kernels(tensors, scalars, device)
    saved = Saved(tensors, *fake_forward(tensors), scalars)
    backward = rehearsal.backward_kernels(saved.out, None, saved, ROWS, device)
    half = "" if dtype != torch.float32 else "_fp32"
    assert rehearsal.folders(forward) == (f"sm80/fwd{half}",)
    assert set(rehearsal.folders(backward)) == {f"sm80/bwd{half}"}
    masked = kind == "mask" and dtype != torch.float32
    assert forward[0].endswith("bias_mask_kernel" if masked else f"/forward{half}_kernel")


@pytest.mark.parametrize("device", (rehearsal.T4,))
def test_no_older_kernel_takes_slopes(device):
    assert rehearsal.forward_kernels(dense(empty(4)), SCALARS, device) is None


@pytest.mark.parametrize("lead", ((2,), (1, 2), ()))
@pytest.mark.parametrize("shape", ((4,), (1,), (2, 4), (2, 1), (1, 4)))
def test_slopes_that_broadcast(shape, lead):
    if len(shape) > 1 and lead == ():
        return  # a call without a batch
    rows = empty(*lead, 4, 100, 64, dtype=torch.float16)
    tensors = Tensors(rows, rows, rows, alibi_slopes=empty(*shape))
    assert rehearsal.forward_kernels(tensors, SCALARS, rehearsal.H100) == ("sm80/fwd/forward_kernel",)
    alone = Tensors(*[empty(100, 64, dtype=torch.float16)] * 3, alibi_slopes=empty(1))
    assert rehearsal.forward_kernels(alone, SCALARS, rehearsal.H100) == ("sm80/fwd/forward_kernel",)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (dense(empty(3)), "do not broadcast to the heads"),
        (dense(empty(3, 4)), "do not broadcast to the heads"),
        (dense(empty(4, dtype=torch.float16)), "must be float32"),
        (packed(empty(2, 4)), "do not broadcast to the heads"),
    ],
)
def test_slopes_that_do_not_fit(tensors, reason):
    with pytest.raises(RuntimeError, match=reason):
        rehearsal.forward_kernels(tensors, SCALARS, rehearsal.H100)


def test_slopes_have_no_gradient_in_the_library():
    tensors = dense(empty(4))
    saved = Saved(tensors, *fake_forward(tensors), SCALARS)
    with pytest.raises(RuntimeError, match="no gradient here"):
        rehearsal.backward_kernels(saved.out, None, saved, ROWS | NEED_BIAS, rehearsal.H100)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(capability=(9, 0), requires_grad=True), None),
        (dict(dtype=torch.float32), None),
        (dict(mask=True), None),
        (dict(varlen=True, batch=None), None),
        (dict(capability=(7, 5)), "only its kernels for compute capability 8.0 and newer"),
        (dict(bias_shape=(1, 4, 100, 100), bias_dtype=torch.float16), "only without bias and key_weight"),
        (dict(key_weight=True, dtype=torch.float32, seq_q=8, seq_k=8), "only without bias and key_weight"),
        (dict(alibi_grad=True, requires_grad=True), "have no gradient"),
    ],
)
def test_the_calls_that_the_backend_serves(change, reason):
    check_served(PROBLEM, change, reason)
