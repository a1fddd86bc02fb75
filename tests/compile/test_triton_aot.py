"""The Triton kernels compile for every target architecture, without a GPU."""

from __future__ import annotations

import re

import pytest

from tests.compile.ahead_of_time import check, compiled, report_of, script

ARCHITECTURES = (75, 80, 90, 100)
KERNELS = {
    "forward_kernel", "delta_kernel", "dq_kernel", "dkdv_kernel", "bias_gradient_kernel", "small_backward_kernel",
    "small_shared_backward_kernel",
    "jvp_kernel", "double_backward_queries_kernel", "double_backward_keys_kernel", "double_backward_bias_kernel",
    "double_backward_small_kernel", "copy_bias_kernel", "product_kernel", "wide_forward_kernel", "wide_backward_kernel",
    "wide_double_backward_kernel",
}  # fmt: skip


def calls(architecture):
    """Few calls that, together, touch every branch of the kernels: (dtype, dims, options)."""
    yield "plain", "float16", (64, 64), {}
    yield "odd", "float16", (80, 40), {"window_left": 16, "window_right": 16, "softcap": 15.0}
    yield (
        "bias",
        "float32",
        (32, 32),
        {"bias": (1, 2, 48, 96), "weight": (2, 1, 96), "mask": (2, 1, 1, 96), "dropout_p": 0.1},
    )
    yield (
        "short",
        "float16",
        (48, 16),
        {"seq": (31, 17), "bias": (2, 2, 31, 17), "weight": (1, 1, 17), "softcap": 9.0},
    )
    yield (
        "short, no longer small on Turing",
        "float16",
        (48, 16),
        {"seq": (33, 17), "bias": (2, 2, 33, 17)},
    )
    yield (
        "windows that share a bias",
        "float16",
        (32, 32),
        {"seq": (25, 25), "bias": (1, 2, 25, 25), "mask": (2, 1, 25, 25), "heads_k": 2},
    )
    yield "unaligned rows", "float16", (50, 20), {"window_left": 40, "window_right": 8}
    yield "unaligned rows, packed", "float16", (100, 25), {"packed": True}
    yield "key weights", "float16", (64, 80), {"weight": (2, 1, 96)}
    narrow = {"weight": (2, 1, 96), "narrow_weight": True, "window_right": 0}
    yield "key weights of 16 bits, causal", "float16", (128, 128), narrow
    yield "key weights of 16 bits, causal, two chunks", "float16", (40, 72), narrow | {"bias": (2, 1, 1, 96)}
    yield "negative scale", "float16", (64, 64), {"scale": -0.125}
    # Products whose rows are queries, fewer than 64 of them, beside products whose rows are keys.
    for name, seq in (("few queries", (32, 200)), ("short rows", (72, 144))):
        yield f"{name}, bias", "float16", (64, 64), {"seq": seq, "bias": (1, 2, *seq)}
    yield "packed", "float16", (128, 128), {"packed": True, "window_right": 0, "bias": "ragged"}
    yield "ALiBi", "float16", (64, 64), {"alibi": (2, 2), "window_right": 0}
    yield "ALiBi, packed", "float16", (32, 32), {"alibi": (1, 2), "packed": True}
    wide = {"bias": (2, 2, 40, 36), "weight": (1, 2, 36), "softcap": 9.0, "dropout_p": 0.1}
    yield "wide", "float32", (320, 64), wide | {"seq": (40, 36), "heads_k": 2}
    yield "wide, unaligned rows", "float32", (129, 131), {"seq": (100, 90), "mask": (2, 1, 1, 90)}
    if architecture == 80:
        yield "wide, long", "float32", (256, 256), {"seq": (600, 700), "bias": (2, 1, 1, 700)}
        yield "widest", "float16", (512, 512), {}


def arguments(torch, dtype, dims, options):
    """Arguments of the raw ops for one call: tensors, scalars, those of backward and of double_backward."""
    dtype, (head_dim, head_dim_v) = getattr(torch, dtype), dims
    lead = () if options.get("packed") else (2,)
    seq_q, seq_k = options.get("seq", (48, 96))
    q = torch.zeros(*lead, 2, seq_q, head_dim, dtype=dtype)
    heads_k = options.get("heads_k", 1)
    k = torch.zeros(*lead, heads_k, seq_k, head_dim, dtype=dtype)
    v = torch.zeros(*lead, heads_k, seq_k, head_dim_v, dtype=dtype)
    bias = weight = mask = cu_q = cu_k = offsets = seed = slopes = None
    if options.get("packed"):
        cu_q = torch.tensor([0, 20, 48], dtype=torch.int32)
        cu_k = torch.tensor([0, 40, 96], dtype=torch.int32)
    if options.get("bias") == "ragged":
        offsets = torch.tensor([0, 800, 800 + 28 * 56])
        bias = torch.zeros(1, int(offsets[-1]), dtype=dtype)
    elif options.get("bias"):
        bias = torch.zeros(options["bias"], dtype=dtype)
    if options.get("weight"):
        weight = torch.zeros(options["weight"], dtype=dtype if options.get("narrow_weight") else torch.float32)
    if options.get("mask"):
        mask = torch.ones(options["mask"], dtype=torch.bool)
    if options.get("dropout_p"):
        seed = torch.zeros(2, dtype=torch.int64)
    if options.get("alibi"):
        slopes = torch.zeros(options["alibi"])
    out = torch.zeros(*q.shape[:-1], head_dim_v, dtype=dtype)
    lse = torch.zeros(q.shape[:-1])
    scalars = (-1, -1, options.get("scale", 0.125), options.get("softcap", 0.0), options.get("window_left", -1), options.get("window_right", -1),
               False, options.get("dropout_p", 0.0), "default", False)  # fmt: skip
    tensors = (q, k, v, bias, weight, mask, cu_q, cu_k, offsets, seed, slopes)
    given = (*tensors, out, lse, *scalars)
    return tensors, scalars, (out, lse, *given, 31), (q, k, v, bias, weight, out, lse, *given, 127)


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans.copy import copied

    for call, dtype, dims, features in calls(architecture):
        if call == "plain" and architecture >= 80:
            dtype = "bfloat16"
        tensors, scalars, backward, double_backward = arguments(torch, dtype, dims, features)
        ops["triton_forward"](*tensors, *scalars)
        ops["triton_backward"](*backward)
        ops["triton_double_backward"](*double_backward)
        if tensors[3] is not None and tensors[3].dim() == 4:
            # As a Linear leaves it, and its gradient.
            bias = tensors[3].contiguous(memory_format=torch.channels_last)
            copied(bias, torch.empty_like(tensors[3]))
            copied(torch.empty_like(tensors[3]), bias)
        for entry, ptx in compiled(launched, architecture, call):
            yield entry | {
                "wgmma": "wgmma" in ptx,
                "mma": "mma.sync" in ptx,
                "rounded products": len(re.findall(r"fma\.rn\.f32 .*, 0f00000000;", ptx)),
            }


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture)
    missing = KERNELS - {entry["kernel"] for entry in found}
    # Turing's shared memory is too small for a whole second order.
    assert missing == ({"double_backward_small_kernel"} if architecture == 75 else set())
    check(found, architecture)
    # Scores whose maximum is subtracted are numbers of their own: not contracted with the subtraction, which would leave
    # their rounding where zero is due. "plain" has them where huge scores send it a second time.
    forwards = {e["call"]: e for e in found if e["kernel"] == "forward_kernel"}
    assert forwards["negative scale"]["rounded products"] >= 16, forwards
    assert forwards["plain"]["rounded products"] >= 4, forwards
    # Of a tile that is loaded ahead and read by both, Triton 3.6 overwrites what wgmma still reads.
    mixed = [e for e in found if e["wgmma"] and e["mma"] and e["stages"] > 1]
    assert not mixed, mixed
    if architecture == 90:
        plain = [entry for entry in found if entry["call"] == "plain" and entry["kernel"] != "delta_kernel"]
        assert all(entry["wgmma"] for entry in plain), plain


if __name__ == "__main__":
    script(report)
