"""The kernels of residual attention compile for every target architecture, without a GPU."""

from __future__ import annotations

import pytest

from tests.compile.ahead_of_time import check, compiled, report_of, script

ARCHITECTURES = (75, 80, 90)
KERNELS = {
    "residual_forward_kernel",
    "residual_backward_kernel",
    "residual_queries_kernel",
    "delta_kernel",
}
MOST_STACK = 520  # bytes of a thread that may spill: of IEEE products, of rows that are not aligned


def calls(architecture: int):
    """(name, dtype, (D, Dv), (queries, keys), options) that together take every branch."""
    main = "float16" if architecture == 75 else "bfloat16"
    for dtype in (main, "float32"):
        yield f"{dtype} d8", dtype, (8, 8), (256, 256), {}
        yield f"{dtype} d8, short", dtype, (8, 8), (64, 64), {}
        yield f"{dtype} d64", dtype, (64, 64), (300, 300), {}
        yield f"{dtype} d128", dtype, (128, 128), (300, 300), {}
        yield f"{dtype} d128, short", dtype, (128, 128), (40, 50), {}
        yield f"{dtype} two chunks", dtype, (80, 48), (300, 257), {}
        yield f"{dtype} unaligned", dtype, (25, 37), (65, 258), {}
        yield f"{dtype} d32, dropout", dtype, (32, 32), (100, 200), {"dropout_p": 0.1}
        yield f"{dtype} bias of keys", dtype, (32, 32), (100, 200), {"bias": (1, 1, 1, 200)}
        yield f"{dtype} no bias", dtype, (16, 16), (100, 200), {"bias": None, "dscores": False}
    yield "wider bias", main, (16, 16), (100, 200), {"bias_dtype": "float32"}
    if architecture >= 80:
        for precision in ("tf32", "ieee"):
            yield precision, "float32", (32, 32), (200, 200), {"precision": precision}


def run(torch, host, dtype, dims, lengths, options) -> None:
    """Both raw ops."""
    from flashsci.call.residual_ops import ResidualCall, empty_results

    dtype = getattr(torch, dtype)
    q, k, v = (
        torch.zeros(2, heads, rows, dim, dtype=dtype)
        for heads, rows, dim in zip((4, 2, 2), (lengths[0], *lengths[1:] * 2), (dims[0], *dims), strict=True)
    )
    shape = options.get("bias", (2, 4, *lengths))
    kind = getattr(torch, options["bias_dtype"]) if "bias_dtype" in options else dtype
    bias = None if shape is None else torch.zeros(shape, dtype=kind)
    dropout_p = options.get("dropout_p", 0.0)
    seed = torch.zeros(2, dtype=torch.int64) if dropout_p else None
    call = ResidualCall(q, k, v, bias, seed, 0.1, dropout_p, options.get("precision", "default"))
    out, lse, scores = empty_results(call)
    host.forward(call)
    dscores = scores if options.get("dscores", True) else None
    host.backward(out, dscores, call, out, lse, scores, bias is not None)


def report(architecture: int, _, launched: list):
    import torch

    from flashsci.backends.triton.plans import residual as plans

    for call, *kind in calls(architecture):
        run(torch, plans, *kind)
        yield from (entry for entry, _ in compiled(launched, architecture, call))


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture)
    assert {entry["kernel"] for entry in found} == KERNELS
    check(found, architecture)
    if architecture >= 80:
        most = {e["call"]: e["stack"] for e in found if e["stack"] > MOST_STACK}
        assert not most, most


if __name__ == "__main__":
    script(report)
