"""Dropout in the CUDA backend: the kernels that serve it, the form in which the library takes it, and refusals. No GPU is
needed; the kernels themselves run in tests/cpu/emulator/test_dropout_kernel.py."""

from dataclasses import replace

import pytest
import torch

import flashsci.backends.cuda as backend
from flashsci.backends.cuda import rehearsal
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem
from flashsci.choice import preferences
from flashsci.errors import BackendError
from tests.support.rehearsed import check_served, empty, require_library

ROWS = NEED_Q | NEED_K | NEED_V
SCALARS = Scalars(-1, -1, 0.125, 0.0, -1, -1, False, 0.25, "default", False)
PROBLEM = Problem("cuda", (8, 0), torch.float16, 4, 4, 64, 64, batch=(2,), seq_q=100, seq_k=100, dropout_p=0.25)


@pytest.fixture
def library():
    require_library("dropout_p")


SEED = empty(2, dtype=torch.int64)


def packed(dtype=torch.float16, **others):
    rows, edges = empty(4, 200, 64, dtype=dtype), empty(4, dtype=torch.int32)
    return Tensors(rows, rows, rows, cu_seqlens_q=edges, cu_seqlens_k=edges, dropout_seed=SEED, **others)


def dense(dtype=torch.float16, dim=64, **others):
    rows = empty(2, 4, 300, dim, dtype=dtype)
    return Tensors(rows, rows, rows, **{"dropout_seed": SEED, **others})


KINDS = {
    "plain": (dense(), ("sm80/fwd/forward_kernel",), ("sm80/bwd",)),
    "packed": (packed(), ("sm80/fwd/forward_kernel",), ("sm80/bwd",)),
    "mask": (dense(mask=empty(300, 300, dtype=torch.bool)[None, None]), ("sm80/fwd/forward_bias_mask_kernel",), ("sm80/bwd",)),
    "slopes": (dense(alibi_slopes=empty(4)), ("sm80/fwd/forward_bias_mask_kernel",), ("sm80/bwd",)),
    "shared bias": (
        dense(bias=empty(1, 4, 300, 300, dtype=torch.float16)),
        ("sm80/fwd/forward_bias_mask_kernel",),
        ("sm80/bwd", "sm80/dbias"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", (rehearsal.A100, rehearsal.H100))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_dropout(library, kind, dtype, device):
    tensors, forward, backward = KINDS[kind]
    of = lambda x: x.to(dtype) if x is not None and x.dtype == torch.float16 else x  # noqa: E731
    tensors = Tensors(*map(of, tensors))
    assert rehearsal.forward_kernels(tensors, SCALARS, device) == forward
    saved = Saved(tensors, *fake_forward(tensors), SCALARS)
    need = ROWS | (NEED_BIAS if tensors.bias is not None else 0)
    assert rehearsal.folders(rehearsal.backward_kernels(saved.out, None, saved, need, device)) == backward
    ordered = saved._replace(scalars=SCALARS._replace(deterministic=True))
    found = rehearsal.backward_kernels(saved.out, None, ordered, need, device)
    assert rehearsal.folders(found)[:2] == ("sm80/bwd", "sm80/dq")


@pytest.mark.parametrize(
    ("tensors", "scalars", "reason"),
    [
        (dense(dropout_seed=None), SCALARS, "dropout_p needs a dropout_seed"),
        (dense(dropout_seed=empty(3, dtype=torch.int64)), SCALARS, r"must be int64 \[2\]"),
        (dense(dropout_seed=empty(2, dtype=torch.int32)), SCALARS, r"must be int64 \[2\]"),
        (dense(), SCALARS._replace(dropout_p=1.0), r"must be in \[0, 1\)"),
    ],
)
def test_the_library_checks_a_seed(library, tensors, scalars, reason):
    with pytest.raises(RuntimeError, match=reason):
        rehearsal.forward_kernels(tensors, scalars, rehearsal.H100)


@pytest.mark.parametrize("tensors", (dense(torch.float32), dense(dim=136), packed(alibi_slopes=empty(3, 4))))
def test_no_kernel_drops_silently(library, tensors):
    assert rehearsal.forward_kernels(tensors, SCALARS, rehearsal.H100) is None
    with pytest.raises(BackendError, match="dropout for float16 and bfloat16"):
        backend.forward(tensors, SCALARS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(capability=(9, 0)), None),
        (dict(varlen=True), None),
        (dict(alibi=True), None),
        (dict(mask=True, bias_shape=(1, 4, 100, 100), bias_dtype=torch.float16), None),
        (dict(capability=(7, 5)), "only its kernels for compute capability 8.0 and newer"),
        (dict(head_dim=128), None),
        (dict(dtype=torch.float32), "dropout for float16 and bfloat16"),
        (dict(head_dim_v=136), "of head dims up to 128"),
        (dict(varlen=True, alibi=True), "without alibi_slopes and bias"),
        (dict(varlen=True, ragged_bias=True), "without alibi_slopes and bias"),
    ],
)
def test_the_calls_that_the_backend_serves(change, reason):
    check_served(PROBLEM, change, reason)


def test_auto_leaves_it_to_others():
    assert "cuda" in preferences.untimed(PROBLEM)
    assert "cuda" not in preferences.untimed(replace(PROBLEM, dropout_p=0.0))
