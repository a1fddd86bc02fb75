"""The paged kernels compile for every target architecture, without a GPU."""

from __future__ import annotations

import pytest

from tests.compile.ahead_of_time import check, compiled, report_of, script

ARCHITECTURES = (75, 80, 90)
KERNELS = {"paged_kernel", "paged_combine_kernel", "write_cache_kernel"}


def calls(architecture: int):
    """(name, dtype, cache dtype or "", (D, Dv), queries of a sequence, options) that together take every branch."""
    main = "float16" if architecture == 75 else "bfloat16"
    yield "decode", main, "", (128, 128), 1, {}
    yield "decode, fp16", "float16", "", (64, 64), 1, {"sink": True, "return_lse": False}
    yield "decode, one split", main, "", (128, 128), 1, {"sequences": 2000, "sink": True}
    yield "prompts", main, "", (128, 128), 100, {}
    yield "window", main, "", (96, 40), 20, {"window_left": 100, "softcap": 9.0, "sink": True}
    yield "wide", main, "", (192, 128), 300, {"window_right": -1}
    if architecture == 90:
        yield "widest", main, "", (256, 256), 1, {}
        yield "fp32", "float32", "", (64, 64), 1, {}
        for cache in ("float8_e4m3fn", "float8_e5m2"):
            yield f"{cache}, decode", main, cache, (128, 128), 1, {}
            yield f"{cache}, prompts", "float16", cache, (64, 64), 100, {"softcap": 9.0}
            yield f"{cache}, rows not aligned", main, cache, (40, 24), 100, {"window_left": 9}


def run(torch, host, dtype, cache_dtype, dims, queries, options) -> None:
    """One call of both raw ops, on caches that have keys and values in one row."""
    sequences = options.get("sequences", 4)
    dtype, cache_dtype = getattr(torch, dtype), getattr(torch, cache_dtype or dtype)
    joint = torch.zeros(30, 16, 2, sum(dims), dtype=cache_dtype)
    caches = joint.split(dims, -1)
    q = torch.zeros(sequences * queries, 8, dims[0], dtype=dtype)
    out = torch.zeros(*q.shape[:-1], dims[1], dtype=dtype)
    table = torch.zeros(sequences, 256, dtype=torch.int32)
    used = torch.zeros(sequences, dtype=torch.int32)
    edges = torch.zeros(sequences + 1, dtype=torch.int32)
    scales = (None, None) if cache_dtype == dtype else (torch.ones(()).expand(sequences, 2),) * 2
    sink = torch.zeros(8) if options.get("sink") else None
    scalars = host.PagedScalars(
        queries,
        0.1,
        options.get("softcap", 0.0),
        options.get("window_left", -1),
        options.get("window_right", 0),
        options.get("return_lse", True),
    )
    tensors = host.PagedTensors(q, *caches, table, used, edges, sink, *scales)
    host.attention(tensors, out, scalars)
    new = torch.zeros(5, 2, sum(dims), dtype=dtype).split(dims, -1)
    host.write_kv_cache(*new, *caches, torch.zeros(5).long(), *(s if s is None else s[0] for s in scales))


def report(architecture: int, _, launched: list):
    import torch

    from flashsci.backends.triton.plans import paged as plans

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
    # Before sm_80 Triton multiplies without tensor cores, and keeps parts of a prompt's tiles in memory.
    simple = "decode" if architecture == 75 else ""
    narrow = [e for e in found if "wid" not in e["call"] and e["call"] != "fp32" and simple in e["call"]]
    assert not any(entry["stack"] for entry in narrow), [e for e in narrow if e["stack"]]


if __name__ == "__main__":
    script(report)
