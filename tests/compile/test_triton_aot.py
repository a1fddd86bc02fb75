"""The Triton kernels compile for every target architecture, without a GPU."""

from __future__ import annotations

import re

import pytest

from flashsci.call.mask_tiles import table_length
from tests.compile.ahead_of_time import PARTS, check, compiled, report_of, script

ARCHITECTURES = (75, 80, 90, 100)
KERNELS = {
    "forward_kernel", "delta_kernel", "dq_kernel", "dkdv_kernel", "bias_gradient_kernel", "small_backward_kernel",
    "small_shared_backward_kernel",
    "many_dq_kernel", "many_dkdv_kernel", "jvp_kernel", "many_jvp_kernel", "second_jvp_kernel", "double_backward_queries_kernel", "double_backward_keys_kernel", "double_backward_bias_kernel",
    "many_double_backward_queries_kernel", "many_double_backward_keys_kernel",
    "double_backward_small_kernel", "copy_bias_kernel", "copy_rows_kernel", "product_kernel", "wide_forward_kernel", "wide_backward_kernel",
    "wide_double_backward_kernel", "classify_kernel", "list_kernel",
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
    yield "rows of one number", "float16", (1, 1), {}
    yield "rows of one number, apart", "float16", (1, 1), {"apart": True}
    capped = {"softcap": 9.0, "caps_bias": True}
    yield "softcap of biased scores", "float16", (64, 64), capped | {"bias": (1, 2, 48, 96), "alibi": (2, 2)}
    yield "softcap of biased scores, short", "float32", (32, 32), capped | {"seq": (31, 17), "bias": (2, 2, 31, 17)}
    yield "negative scale", "float16", (64, 64), {"scale": -0.125}
    # Products whose rows are queries, fewer than 64 of them, beside products whose rows are keys.
    for name, seq in (("few queries", (32, 200)), ("short rows", (72, 144)), ("few keys", (150, 30))):
        yield f"{name}, bias", "float16", (64, 64), {"seq": seq, "bias": (1, 2, *seq)}
    yield "packed", "float16", (128, 128), {"packed": True, "window_right": 0, "bias": "ragged"}
    yield "ALiBi", "float16", (64, 64), {"alibi": (2, 2), "window_right": 0}
    yield "ALiBi, packed", "float16", (32, 32), {"alibi": (1, 2), "packed": True}
    wide = {"bias": (2, 2, 40, 36), "weight": (1, 2, 36), "softcap": 9.0, "dropout_p": 0.1}
    yield "wide", "float32", (320, 64), wide | {"seq": (40, 36), "heads_k": 2}
    yield "wide, unaligned rows", "float32", (129, 131), {"seq": (100, 90), "mask": (2, 1, 1, 90)}
    wide = {"bias": (1, 2, 3, 8192), "softcap": 9.0, "dropout_p": 0.1}
    yield "wide, long rows", "float32", (160, 160), wide | {"seq": (3, 8192)}
    for dtype, dims in (("float16", (64, 64)), ("float16", (128, 128)), ("float32", (32, 32))):
        band = {"seq": (200, 333), "mask": (2, 1, 200, 333), "tiles": True}
        yield f"tiles of a mask, {dtype}, {dims[0]}", dtype, dims, band | {"bias": (1, 2, 200, 333), "window_right": 0}
    keys = {"seq": (200, 320), "mask": (2, 1, 1, 320), "tiles": True}
    yield "tiles of a mask of keys", "float16", (64, 64), keys | {"bias": (2, 2, 200, 320)}
    if architecture == 80:
        yield "wide, long", "float32", (256, 256), {"seq": (600, 700), "bias": (2, 1, 1, 700)}
        yield "widest", "float16", (512, 512), {}


def arguments(torch, dtype, dims, options):
    """Arguments of the raw ops for one call: tensors, scalars, those of backward, double_backward, second_jvp, many_jvp,
    many_backward and many_double_backward."""
    dtype, (head_dim, head_dim_v) = getattr(torch, dtype), dims
    lead = () if options.get("packed") else (2,)
    seq_q, seq_k = options.get("seq", (48, 96))
    q = torch.zeros(*lead, 2, seq_q, head_dim, dtype=dtype)
    heads_k = options.get("heads_k", 1)
    k = torch.zeros(*lead, heads_k, seq_k, head_dim, dtype=dtype)
    v = torch.zeros(*lead, heads_k, seq_k, head_dim_v, dtype=dtype)
    if options.get("apart"):
        q, k, v = (torch.cat((x, x), -1)[..., : x.shape[-1]] for x in (q, k, v))
    bias = weight = mask = cu_q = cu_k = offsets = seed = slopes = table = None
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
    if options.get("tiles"):
        table = torch.zeros(*mask.shape[:-2], 1, table_length(*mask.shape[-2:]), dtype=torch.int32)
    out = torch.zeros(*q.shape[:-1], head_dim_v, dtype=dtype)
    lse = torch.zeros(q.shape[:-1])
    scalars = (-1, -1, options.get("scale", 0.125), options.get("softcap", 0.0), options.get("window_left", -1), options.get("window_right", -1),
               False, options.get("dropout_p", 0.0), "default", False, options.get("caps_bias", False))  # fmt: skip
    tensors = (q, k, v, bias, weight, mask, cu_q, cu_k, offsets, seed, slopes, table)
    given = (*tensors, out, lse, *scalars)
    leaves = q, k, v, bias, weight
    second_jvp = (*leaves, *leaves, *leaves, lse, lse, *given)
    along = tuple(None if x is None else torch.zeros(4, *x.shape, dtype=x.dtype) for x in leaves)
    many_jvp = (*along, *given)
    many_backward = (out.expand(4, *out.shape), lse.expand(4, *lse.shape), *given)
    return (
        tensors, scalars, (out, lse, *given, 31), (*leaves, out, lse, *given, 127), second_jvp, many_jvp, many_backward,
        (*along, out, lse, *given),
    )  # fmt: skip


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans import many_double_backward as of_second
    from flashsci.backends.triton.plans.copy import copied
    from flashsci.backends.triton.plans.many_backward import has_kernels
    from flashsci.backends.triton.plans.many_jvp import shares
    from flashsci.backends.triton.plans.mask_tiles import mask_tiles
    from flashsci.backends.triton.plans.second_jvp import has_kernel
    from flashsci.call.ops import PASSES

    for call, dtype, dims, features in calls(architecture):
        if call == "plain" and architecture >= 80:
            dtype = "bfloat16"
        tensors, scalars, backward, double_backward, second_jvp, many_jvp, many_backward, many_second = arguments(
            torch, dtype, dims, features
        )
        ops["triton_forward"](*tensors, *scalars)
        ops["triton_backward"](*backward)
        ops["triton_double_backward"](*double_backward)
        if has_kernel(tensors[0].dtype, max(dims)):
            ops["triton_second_jvp"](*second_jvp)
        if shares(*PASSES["jvp"].grouped(*many_jvp)):
            ops["triton_many_jvp"](*many_jvp)
        for need in (31, 23):  # without the gradient of the bias, where that is a sum over queries
            if has_kernels(*PASSES["many_backward"].grouped(*many_backward, need)[2:]):
                ops["triton_many_backward"](*many_backward, need)
        for need in (127, 119):
            if of_second.has_kernels(*PASSES["many_double_backward"].grouped(*many_second, need)[3:]):
                ops["triton_many_double_backward"](*many_second, need)
        if tensors[3] is not None and tensors[3].dim() == 4:
            # As a Linear leaves it, and its gradient.
            bias = tensors[3].contiguous(memory_format=torch.channels_last)
            copied(bias, torch.empty_like(tensors[3]))
            copied(torch.empty_like(tensors[3]), bias)
            rows = torch.empty(*bias.shape[:-1], bias.shape[-1] + 1, dtype=bias.dtype)[..., : bias.shape[-1]]
            copied(rows, tensors[3])
            copied(tensors[3], rows)
        if tensors[11] is not None:
            mask_tiles(tensors[5])
        for entry, ptx in compiled(launched, architecture, call):
            yield entry | {
                "wgmma": "wgmma" in ptx,
                "mma": "mma.sync" in ptx,
                "rounded products": len(re.findall(r"fma\.rn\.f32 .*, 0f00000000;", ptx)),
            }


@pytest.mark.slow
@pytest.mark.every(12)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture, part):
    pytest.importorskip("triton")
    found = report_of(__file__, architecture, part)
    missing = KERNELS - {entry["kernel"] for entry in found}
    # Turing's shared memory is too small for a whole second order, its registers for several directions.
    of_many = {kernel for kernel in KERNELS if kernel.startswith("many_")}
    assert missing == ({"double_backward_small_kernel", *of_many} if architecture == 75 else set())
    named = (
        "plain",
        "negative scale",
        "rows of one number",
        "rows of one number, apart",
    )  # with checks of their own below
    assert {entry["call"] for entry in found}.issuperset(named)
    found = check(found, architecture)
    # Scores whose maximum is subtracted are numbers of their own: not contracted with the subtraction, which would leave
    # their rounding where zero is due. "plain" has them where huge scores send it a second time.
    forwards = {e["call"]: e for e in found if e["kernel"] == "forward_kernel"}
    for call, fewest in (("negative scale", 16), ("plain", 4)):
        assert call not in forwards or forwards[call]["rounded products"] >= fewest, forwards
    # Where rows are neighbours, tiles are held as those of other rows: products of transposed tiles are wrong.
    for kernel in ("forward_kernel", "dq_kernel", "dkdv_kernel", "jvp_kernel", "double_backward_keys_kernel"):
        together, apart = (
            {e["loops"] for e in found if e["kernel"] == kernel and e["call"] == f"rows of one number{rest}"}
            for rest in ("", ", apart")
        )
        assert together == apart, kernel
    # Of a tile that is loaded ahead and read by both, Triton 3.6 overwrites what wgmma still reads.
    mixed = [e for e in found if e["wgmma"] and e["mma"] and e["stages"] > 1]
    assert not mixed, mixed
    if architecture == 90:
        plain = [entry for entry in found if entry["call"] == "plain" and entry["kernel"] != "delta_kernel"]
        assert all(entry["wgmma"] for entry in plain), plain


if __name__ == "__main__":
    script(report)
