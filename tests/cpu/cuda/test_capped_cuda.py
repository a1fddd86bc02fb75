"""A softcap of biased scores in the library: the kernels that it would launch, and the calls that it leaves to others, without a GPU."""

from dataclasses import replace

import pytest
import torch

from flashsci.backends.cuda import rehearsal
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem
from flashsci.choice import preferences
from tests.support.rehearsed import check_served, empty, require_library

ROWS = NEED_Q | NEED_K | NEED_V
SCALARS = Scalars(-1, -1, 0.125, 5.0, -1, -1, False, 0.0, "default", False, True)
PROBLEM = Problem(
    "cuda", (8, 0), torch.float16, 4, 4, 64, 64, batch=(2,), seq_q=100, seq_k=100, softcap=5.0, caps_bias=True,
    bias_shape=(2, 4, 100, 100), bias_dtype=torch.float16, bias_grad=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def library():
    require_library("caps_bias")


def dense(dtype=torch.float16, **others):
    rows = empty(2, 4, 96, 64, dtype=dtype)
    return Tensors(rows, rows, rows, **others)


def kernels_of(tensors, scalars, device, need=ROWS):
    saved = Saved(tensors, *fake_forward(tensors), scalars)
    backward = rehearsal.backward_kernels(saved.out, None, saved, need, device)
    return rehearsal.forward_kernels(tensors, scalars, device), backward


@pytest.mark.parametrize("device", (rehearsal.A100, rehearsal.H100))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("kind", ("every score", "shared", "dropout", "alibi"))
def test_the_kernels_of_such_calls(kind, dtype, device):
    """Those of sm80, also where Hopper's take a softcap beside a bias; they write the gradient of a bias of every score
    beside those of the keys."""
    if kind == "dropout" and dtype == torch.float32:
        return
    half = "" if dtype != torch.float32 else "_fp32"
    scalars = SCALARS._replace(dropout_p=0.5 if kind == "dropout" else 0.0)
    given = {"bias": empty(*((1, 1) if kind == "shared" else (2, 4)), 96, 96, dtype=dtype)}
    given |= {"dropout_seed": empty(2, dtype=torch.int64)} if kind == "dropout" else {}
    tensors = dense(dtype, **({"alibi_slopes": empty(4)} if kind == "alibi" else given))
    forward, backward = kernels_of(tensors, scalars, device, ROWS if kind == "alibi" else ROWS | NEED_BIAS)
    assert rehearsal.folders(forward) == (f"sm80/fwd{half}",)
    summed = {f"sm80/dbias{half}"} if kind == "shared" else set()
    assert set(rehearsal.folders(backward)) - {"sm80/dq"} == {f"sm80/bwd{half}"} | summed


def test_a_softcap_of_products_keeps_its_kernels():
    tensors = dense(bias=empty(2, 4, 96, 96, dtype=torch.float16))
    forward, _ = kernels_of(tensors, SCALARS._replace(caps_bias=False), rehearsal.H100)
    assert rehearsal.folders(forward) == ("sm90/fwd",)
    # Without a bias there is nothing more to bound.
    forward, _ = kernels_of(dense(), SCALARS, rehearsal.H100)
    assert rehearsal.folders(forward) == ("sm90/fwd",)


def test_no_older_kernel_bounds_a_bias():
    tensors = dense(bias=empty(2, 4, 96, 96, dtype=torch.float16))
    assert rehearsal.forward_kernels(tensors, SCALARS, rehearsal.T4) is None
    assert rehearsal.forward_kernels(tensors, SCALARS, rehearsal.H100, 90) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(capability=(9, 0), requires_grad=True), None),
        (dict(dtype=torch.float32, bias_dtype=torch.float32), None),
        (dict(mask=True), None),
        (dict(dropout_p=0.5), None),
        (dict(alibi=True, bias_shape=None, bias_dtype=None, bias_grad=False), None),
        (dict(capability=(7, 5)), "only its kernels for compute capability 8.0 and newer"),
        (dict(varlen=True, batch=None, ragged_bias=True), None),
    ],
)
def test_the_calls_that_the_backend_serves(change, reason):
    check_served(PROBLEM, change, reason)


def test_auto_leaves_such_calls_to_others():
    assert "cuda" in preferences.untimed(PROBLEM)
    assert "cuda" not in preferences.untimed(replace(PROBLEM, caps_bias=False))
