"""The kernel on 8-bit floats compiles for every architecture that has them, without a GPU."""

from __future__ import annotations

import re

import pytest

from tests.compile.ahead_of_time import check, compiled, report_of, script

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
        return torch.ones(rows // 128 + 3, len(x)) if packed else torch.ones(*x.shape[:-2], -(-rows // 128))

    scalars = host.FP8Scalars(
        -1, -1, 0.1, options.get("softcap", 0.0), options.get("window_left", -1), options.get("window_right", -1),
        options.get("lower_right", False), getattr(torch, options.get("out_dtype", "bfloat16")), options.get("return_lse", True), False,
    )  # fmt: skip
    host.attention(host.FP8Tensors(q, k, v, scale(q), scale(k), scale(v), edges, edges), scalars)


def report(architecture: int, _, launched: list):
    import torch

    from flashsci.backends.triton.plans import fp8 as plans

    for call, *kind in calls():
        run(torch, plans, *kind)
        for entry, ptx in compiled(launched, architecture, call):
            products = sorted(set(re.findall(r"(?:wg)?mma[\w.]*\.f32\.[\w.]*", ptx)))
            yield entry | {"products": products}


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("architecture", PRODUCTS)
def test_compiles(architecture):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture)
    assert len(found) == len(list(calls()))
    check(found, architecture)
    # Both products by tensor cores, of 8-bit floats as they are.
    products = {name for entry in found for name in entry["products"]}
    assert products and all(n.startswith(PRODUCTS[architecture]) for n in products), products
    assert all("e4m3.e4m3" in name for name in products), products
    assert not any(entry["stack"] for entry in found), [e for e in found if e["stack"]]


if __name__ == "__main__":
    script(report)
