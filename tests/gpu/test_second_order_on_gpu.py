"""Second order on a GPU, whichever backend ran the forward: few problems, `python -m flashsci check` judges many."""

import pytest
import torch

import flashsci
from flashsci import registry
from flashsci.testing import (
    Case,
    Judge,
    Variant,
    evaluate,
    generate,
    make_inputs,
    poisoned_memory,
    second_order_variants,
)

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_generated_problems(backend, dtype):
    reason = registry.BACKENDS[backend].unavailable()
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    pool = [v for v in second_order_variants() if v.dtype == dtype][:6]
    tried = 0
    for case in generate(13, 12, pool, score_limit=1 << 17):
        inputs = make_inputs(case, DEVICE)
        try:
            with poisoned_memory():
                found = evaluate(inputs, backend, deterministic=False)
        except flashsci.BackendError:
            continue
        tried += 1
        Judge(inputs).require(found)
    assert tried or backend == "cuda"


def test_the_second_derivative_of_sdpa_is_tritons():
    """SDPA's own kernels have none: nothing of the size of the scores is made for it."""
    variant = Variant(dtype="bfloat16", head_dim=64, head_dim_v=64, tangents="qkv")
    inputs = make_inputs(
        Case(variant=variant, lead=(2,), heads_k=2, seq_q=300, seq_k=300, causal=True), DEVICE
    )
    judge = Judge(inputs)
    found = evaluate(inputs, "sdpa", lse=False)
    judge.require({n: found[n] for n in ("gq", "gk", "gv", "gdout")})

    q, k, v = (
        torch.randn(1, 4, 8192, 64, device=DEVICE).bfloat16().requires_grad_() for _ in range(3)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = torch.autograd.grad(
        flashsci.attention(q, k, v, backend="sdpa").float().square().sum(), (q, k, v), create_graph=True
    )  # fmt: skip
    torch.autograd.grad(sum(x.float().square().sum() for x in first), (q, k, v))
    assert torch.cuda.max_memory_allocated() - before < 4 * 8192 * 8192
