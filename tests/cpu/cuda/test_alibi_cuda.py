"""ALiBi in the library: the kernels that it would launch, and the calls that it leaves to others, without a GPU."""

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.backends import cuda, reference
from flashsci.backends.cuda import rehearsal
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem
from flashsci.choice import preferences
from tests.support.rehearsed import check_served, empty, require_library

ROWS = NEED_Q | NEED_K | NEED_V
SCALARS = Scalars(-1, -1, 0.125, 0.0, -1, -1, False, 0.0, "default", False)
PROBLEM = Problem("cuda", (8, 0), torch.float16, 4, 4, 64, 64, batch=(2,), seq_q=100, seq_k=100, alibi=True)


@pytest.fixture(autouse=True)
def built():
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


@pytest.mark.parametrize("device", (rehearsal.A100, rehearsal.H100))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("kind", ("dense", "packed", "dropout"))
def test_the_kernels_of_learnt_slopes(kind, dtype, device):
    """The kernel of queries, behind that of the statistics."""
    tensors, scalars = packed(empty(3, 4), dtype=dtype) if kind == "packed" else dense(empty(4), dtype=dtype), SCALARS
    if kind == "dropout":
        tensors = tensors._replace(dropout_seed=empty(2, dtype=torch.int64))
        scalars = scalars._replace(dropout_p=0.5)
        if dtype == torch.float32:
            return  # which has no dropout
    saved = Saved(tensors, *fake_forward(tensors), scalars)
    alone = rehearsal.backward_kernels(saved.out, None, saved, NEED_BIAS, device)
    half = "" if dtype != torch.float32 else "_fp32"
    assert [name.rpartition("/")[2] for name in alone] == [
        f"statistics{half}_kernel",
        "backward_queries_kernel" if half == "" else "backward_fp32_kernel",
    ]
    every = rehearsal.backward_kernels(saved.out, None, saved, ROWS | NEED_BIAS, device)
    assert every[0] == alone[0] and every[-1] == alone[-1] and len(every) > 2


@pytest.mark.parametrize("rows_too", (True, False))
def test_learnt_slopes_take_one_more_call(stand_in, rows_too):
    """The library's op, stood in for by formulas of the reference: the gradient of slopes comes from its sums over keys."""
    q, k, v, slopes = torch.randn(2, 4, 10, 16), torch.randn(2, 4, 12, 16), torch.randn(2, 4, 12, 16), torch.rand(4)
    distances = (torch.arange(10)[:, None] - torch.arange(12)).abs()
    asked = []

    def backward(dout, dlse, saved, need, generation=0):
        asked.append(need)
        with torch.enable_grad():
            addend = torch.zeros(2, 4, 10, 12, requires_grad=True)
            leaves = [x.detach().requires_grad_() for x in saved.tensors[:3]]
            out, _ = reference.forward(
                saved.tensors._replace(**dict(zip("qkv", leaves, strict=True)), bias=addend), SCALARS
            )
            *found, dscores = torch.autograd.grad(out, (*leaves, addend), dout)
        return (*found, -(dscores * distances).sum(-1) if need & NEED_BIAS else q.new_empty(0), q.new_empty(0))

    stand_in(
        cuda, rejects=lambda p: None, unavailable=lambda: None, backward_kernels=lambda *a, **b: (80, None), backward=backward,
        forward=lambda tensors, scalars: reference.forward(tensors, SCALARS), hopper_takes=lambda *a: True, takes_pairs=lambda *a: False,
    )  # fmt: skip

    def gradients(name):
        leaves = [x.clone().requires_grad_(rows_too or x is slopes) for x in (q, k, v, slopes)]
        out = flashsci.attention(*leaves[:3], alibi_slopes=leaves[3], scale=SCALARS.scale, backend=name)
        return torch.autograd.grad(out.sum(), [x for x in leaves if x.requires_grad])

    for found, due in zip(gradients("cuda"), gradients("reference"), strict=True):
        torch.testing.assert_close(found, due)
    assert asked == [ROWS, NEED_BIAS][1 - rows_too :]


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
        (dict(alibi_grad=True, requires_grad=True), None),
        (dict(alibi_grad=True, requires_grad=True, dtype=torch.float32), None),
        (dict(alibi_grad=True, requires_grad=True, varlen=True, batch=None), None),
        (dict(alibi_grad=True, requires_grad=True, sink=True), "but the gradient of an eager call without sink"),
        (dict(alibi_grad=True, alibi_further=True, requires_grad=True), "but the gradient of an eager call"),
    ],
)
def test_the_calls_that_the_backend_serves(change, reason):
    check_served(PROBLEM, change, reason)


def test_auto_leaves_them_to_triton():
    for change in ({}, dict(alibi_grad=True, requires_grad=True)):
        problem = replace(PROBLEM, **change)
        assert "cuda" in preferences.untimed(problem)
        assert "cuda" not in preferences.find("calls", problem).order
        assert "cuda" not in preferences.find("gradients", problem, 80, "triton").order
