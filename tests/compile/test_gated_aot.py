"""The kernels of a gate of pairs, compiled without a GPU: they fit shared memory, spill little, and serve every size."""

from __future__ import annotations

import itertools

import pytest

from tests.compile.ahead_of_time import check, compiled, report_of, script

ARCHITECTURES = (80, 90)
FEATURES = ("", "bias", "causal, dropout")


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans import gated, gated_second_order
    from flashsci.call.gate_ops import GatedTangents
    from flashsci.call.ops import Saved, Scalars, Tensors

    for dtype, dim, feature in itertools.product((torch.bfloat16, torch.float32), (32, 64, 128), FEATURES):
        q, k = torch.zeros(2, 4, 200, dim, dtype=dtype), torch.zeros(2, 2, 300, dim, dtype=dtype)
        bias = torch.zeros(1, 4, 200, 300, dtype=dtype) if feature == "bias" else None
        rest = (0, False, 0.1) if feature == "causal, dropout" else (-1, False, 0.0)
        scalars = Scalars(-1, -1, 0.1, 0.0, -1, *rest, "default", False)
        seed = torch.zeros(2, dtype=torch.int64) if feature == "causal, dropout" else None
        tensors = Tensors(q, k, k, bias, dropout_seed=seed)
        gate = torch.zeros(1, 4, 200, 300, dtype=dtype)
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1])
        saved, along = Saved(tensors, out, lse, scalars), GatedTangents(q, k, k, bias, None, gate)
        gated.forward(tensors, gate, scalars)
        gated.backward(out, None, saved, gate, 63)
        gated_second_order.jvp(along, saved, gate)
        gated_second_order.double_backward(along, out, None, saved, gate, 255)
        for entry, _ in compiled(launched, architecture, f"{dtype} {dim} {feature}"):
            yield entry


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture)
    kernels = {entry["kernel"] for entry in found}
    assert kernels == {
        "gated_forward_kernel", "gated_dq_kernel", "gated_dkdv_kernel", "pair_sums_kernel", "delta_kernel", "gated_jvp_kernel",
        "gated_double_backward_queries_kernel", "gated_double_backward_keys_kernel", "second_order_pair_sums_kernel",
    }  # fmt: skip
    check(found, architecture)


if __name__ == "__main__":
    script(report)
