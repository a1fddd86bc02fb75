"""The kernel on 8-bit floats compiles for every architecture that has them, without a GPU: test_paged_aot.py's way."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest
from ahead_of_time import report_of

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MOST_SHARED = {89: 99, 90: 227}
PRODUCTS = {89: "mma.sync", 90: "wgmma.mma_async"}


def calls():
    """(name, (D, Dv), queries, options) that together take every branch."""
    yield "d64", (64, 64), 1000, {}
    yield "d128", (128, 128), 1000, {}
    yield "d128, causal", (128, 128), 1000, {"window_right": 0}
    yield "d128, one scale", (128, 128), 1000, {"blocks": False}
    yield "d192", (192, 128), 1000, {"window_right": 0, "lower_right": True}
    yield "d256", (256, 256), 1000, {}
    yield "d96, few, window", (96, 40), 30, {"window_left": 100, "window_right": 3, "softcap": 9.0}
    yield "unaligned", (40, 24), 200, {"out_dtype": "float16", "return_lse": False}
    yield "packed", (64, 64), 700, {"packed": True, "window_right": 0}


def run(torch, host, dims, queries, options) -> None:
    """One call of the raw op."""
    packed, keys = options.get("packed", False), 500
    lead = () if packed else (2,)
    q, k, v = (
        torch.zeros(*lead, heads, rows, dim).to(torch.float8_e4m3fn)
        for heads, rows, dim in ((8, queries, dims[0]), (2, keys, dims[0]), (2, keys, dims[1]))
    )
    edges = torch.zeros(4, dtype=torch.int32) if packed else None

    def scale(x):
        if not options.get("blocks", True):
            return torch.ones(())
        rows = x.shape[-2]
        return torch.ones(rows // 128 + 3, len(x)) if packed else torch.ones(*x.shape[:-2], -(-rows // 128))  # fmt: skip

    scalars = host.FP8Scalars(
        -1, -1, 0.1, options.get("softcap", 0.0), options.get("window_left", -1), options.get("window_right", -1),
        options.get("lower_right", False), getattr(torch, options.get("out_dtype", "bfloat16")), options.get("return_lse", True),
    )  # fmt: skip
    host.attention(host.FP8Tensors(q, k, v, scale(q), scale(k), scale(v), edges, edges), scalars)


def compile_for(architecture: int) -> list[dict]:
    import torch

    sys.path.insert(0, str(SCRIPTS))
    from compare_triton import compile_launch, compile_one, described, recorder
    from triton.backends.compiler import GPUTarget

    _, launched = recorder(architecture)
    from flashsci.backends.triton import host_fp8, host_launch
    from flashsci.backends.triton.arguments import RUNTIME

    device = host_launch.Device(0, divmod(architecture, 10), 50 << 20, 132)
    host_fp8.device_of = lambda _: device
    report = []
    for call, *kind in calls():
        launched.clear()
        run(torch, host_fp8, *kind)
        for kernel, args, options in launched:
            source, _ = described(kernel, args, options, GPUTarget("cuda", architecture, 32))
            fixed = {kernel.arg_names[path[0]] for path in (*source.constants, *source.attrs)}
            found = compile_one(kernel, args, options, architecture)
            ptx = compile_launch(kernel, args, options, architecture).asm["ptx"]
            products = sorted(set(re.findall(r"(?:wg)?mma[\w.]*\.f32\.[\w.]*", ptx)))
            report.append({"call": call, "sizes": sorted(fixed & set(RUNTIME)), "products": products} | found)  # fmt: skip
    return report


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MOST_SHARED)
def test_compiles(architecture):
    pytest.importorskip("triton")
    report = report_of(__file__, architecture)
    assert len(report) == len(list(calls()))
    assert all(entry["shared"] <= MOST_SHARED[architecture] * 1024 for entry in report), report
    # What ptxas lost: flashsci/check/machine_code.py.
    assert not any(entry["undefined"] for entry in report), report
    # A kernel serves every size.
    assert not any(entry["sizes"] for entry in report), report
    # Both products by tensor cores, of 8-bit floats as they are.
    products = {name for entry in report for name in entry["products"]}
    assert products and all(n.startswith(PRODUCTS[architecture]) for n in products), products
    assert all("e4m3.e4m3" in name for name in products), products
    assert not any(entry["stack"] for entry in report), [e for e in report if e["stack"]]


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = compile_for(int(sys.argv[1]))
    print(json.dumps(result))
