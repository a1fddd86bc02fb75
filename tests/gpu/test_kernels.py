"""The fused backends on a GPU: generated problems, the known traps, what only a device can show.

`python -m flashsci check` judges thousands of problems; this is the part of it that runs in a minute, and the rest.
"""

import os
from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.testing import (
    TRAPS,
    Case,
    Judge,
    Skipped,
    Variant,
    evaluate,
    generate,
    make_inputs,
    poisoned_memory,
    variants,
)

KERNELS = ["triton", "cuda"]
DEVICE = torch.device("cuda")
SOME = variants()[::3]  # `check` judges them all
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("loaded")]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("name", TRAPS)
def test_trap(name, backend):
    gigabytes, processes = TRAPS[name].gigabytes, os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if gigabytes and processes != "1":
        pytest.skip(
            f"takes {gigabytes} GiB, and {processes} processes share the device: -n 0, or `python -m flashsci check`"
        )
    try:
        TRAPS[name](backend, DEVICE)
    except Skipped as reason:
        pytest.skip(str(reason))
    except flashsci.BackendError as reason:
        pytest.skip(f"{backend} refuses: {reason}")


@pytest.mark.parametrize("backend", [*KERNELS, "cuda:sm90", "auto"])
@pytest.mark.parametrize("index", range(len(SOME)))
def test_generated_problems(backend, index):
    """`auto`, too: its gradients may be another backend's than its results."""
    variant = SOME[index]
    tried = 0
    for case in generate(11, 6, [variant]):
        inputs = make_inputs(case, DEVICE)
        try:
            with poisoned_memory():
                found = evaluate(inputs, backend, deterministic=False)
        except flashsci.BackendError as reason:
            assert backend != "triton", reason
            continue
        tried += 1
        Judge(inputs).require(found)
    if not tried:
        pytest.skip(f"{backend} refuses {variant}")


@pytest.mark.parametrize("backend", KERNELS)
def test_backward_under_a_global_lse(backend):
    """Two blocks of keys, each with the out and lse of both: shares add up to the whole gradient."""
    variant = Variant(dtype="bfloat16", head_dim=64, head_dim_v=64)
    inputs = make_inputs(Case(variant=variant, lead=(2,), heads_k=2, group=2, seq_q=150, seq_k=260), DEVICE)
    judge, whole = Judge(inputs), evaluate(inputs, backend)
    parts = [
        flashsci.attention_backward(
            inputs.dout,
            inputs.q.detach(),
            inputs.k.detach()[..., keys, :],
            inputs.v.detach()[..., keys, :],
            whole["out"],
            whole["lse"],
            backend=backend,
        )
        for keys in (slice(0, 130), slice(130, None))
    ]
    judge.require({"dk": torch.cat([p.dk for p in parts], -2), "dv": torch.cat([p.dv for p in parts], -2)})
    dq = sum(p.dq.float() for p in parts).bfloat16()  # one rounding more than the whole gradient has
    assert judge.judge("dq", dq).ratios[0] <= 1


def require_no_synchronisation(inputs, backend):
    evaluate(inputs, backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        evaluate(inputs, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("known", [False, True])
def test_packed_calls_do_not_synchronise(backend, known):
    variant = Variant(dtype="bfloat16", head_dim=64, head_dim_v=64, varlen=True)
    case = Case(
        variant=variant,
        rank=3,
        lead=(),
        heads_k=2,
        lens_q=(30, 70),
        lens_k=(30, 70),
        known_lengths=known,
    )
    inputs = make_inputs(case, DEVICE)
    require_no_synchronisation(inputs, backend)


@pytest.mark.parametrize("backend", KERNELS)
def test_dense_calls_do_not_synchronise(backend):
    inputs = make_inputs(Case(variant=Variant(dtype="bfloat16", head_dim=64, head_dim_v=64)), DEVICE)
    require_no_synchronisation(inputs, backend)


def test_validate_reads_the_offsets():
    x = torch.randn(5, 2, 16, device=DEVICE)
    starts = torch.tensor([0, 4, 3, 5], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"must rise from 0 to the number of packed rows \(5\)"):
        flashsci.varlen_attention(x, x, x, starts, validate=True)
    flashsci.varlen_attention(x, x, x, starts)
    torch.cuda.synchronize()


def test_tensors_on_two_devices():
    q, k = torch.randn(1, 2, 5, 16, device=DEVICE), torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match=r"k is on cpu but q is on cuda:0; move them to one device"):
        flashsci.attention(q, k, k)
    with pytest.raises(ValueError, match="bias is on cpu"):
        flashsci.attention(q, q, q, bias=torch.zeros(5, 5))


def test_dropout_mask_is_the_same_on_every_device():
    seed = torch.tensor([99, 7])
    here = flashsci.dropout_mask(seed, 0.4, (3, 2, 70, 70))
    assert torch.equal(flashsci.dropout_mask(seed.to(DEVICE), 0.4, (3, 2, 70, 70)).cpu(), here)


def test_kernels_drop_what_the_mask_says():
    n, p = 64, 0.5
    seed = torch.tensor([5, 11], device=DEVICE)
    q, k = torch.randn(2, 2, 3, n, n, device=DEVICE).unbind(0)
    eye = torch.eye(n, device=DEVICE).expand(2, 3, n, n)
    out = flashsci.attention(q, k, eye, dropout_p=p, dropout_seed=seed, backend="triton")
    assert torch.equal(out != 0, flashsci.dropout_mask(seed, p, (2, 3, n, n)))


@pytest.mark.parametrize("precision", [None, "ieee", "tf32x3"])
def test_fp32_stays_fp32_under_torchs_tf32_switch(precision):
    variant = Variant(head_dim=64, head_dim_v=64)
    inputs = make_inputs(Case(variant=variant, lead=(2,), heads_k=2, seq_q=200, seq_k=200), DEVICE)
    judge = Judge(inputs)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        judge.require(evaluate(inputs, "triton", precision=precision))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32_is_as_good_as_tf32():
    variant = Variant(head_dim=64, head_dim_v=64)
    inputs = make_inputs(Case(variant=variant, lead=(2,), heads_k=2, seq_q=200, seq_k=200), DEVICE)
    inputs = replace(inputs, options={**inputs.options, "precision": "tf32"})
    Judge(inputs).require(evaluate(inputs, "triton"))


@pytest.mark.parametrize("layout", ("shifted", "strided", "expanded"))
@pytest.mark.parametrize("mask", (None, (1, 1), (1, 7), (5, 1)))
@pytest.mark.parametrize("dim", (7, 64))
def test_sdpa_takes_every_stride_and_broadcast(layout, mask, dim):
    """Its kernels fault on rows off 16 bytes and on a last mask dim that is broadcast."""
    variant = Variant(dtype="float16", head_dim=dim, head_dim_v=dim, mask=mask is not None)
    given = dict(layout=layout, lead=(2,), heads_k=2, seq_q=5, seq_k=7, mask_shape=mask)
    inputs = make_inputs(Case(seed=3, variant=variant, **given), DEVICE)
    found = evaluate(inputs, "sdpa", lse=False, deterministic=False)
    Judge(inputs).require(found)


def test_auto_uses_a_kernel_of_ours():
    q = torch.randn(1, 2, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    assert flashsci.explain(q, q, q, bias=torch.zeros(64, 64, device=DEVICE), return_lse=True).chosen in KERNELS
    assert flashsci.explain(q.double(), q.double(), q.double(), return_lse=True).chosen == "reference"


@pytest.mark.parametrize("backend", KERNELS)
def test_autocast(backend):
    q, k, v = (torch.randn(1, 2, 40, 64, device=DEVICE, requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", dtype=torch.float16):
        out = flashsci.attention(q, k, v, backend=backend)
    assert out.dtype == torch.float16
    assert torch.equal(out, flashsci.attention(q.half(), k.half(), v.half(), backend=backend))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.sum(), (q, k, v)))
