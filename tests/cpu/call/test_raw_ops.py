"""Adversarial use of the raw ops, where there is no GPU: each call raises a clear error, and none reads beyond a tensor.

tests/gpu/test_raw_ops_on_gpu.py has the same for CUDA tensors.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashsci
from flashsci.backends import cuda

pytestmark = pytest.mark.every(3)

NAMES = (
    "q", "k", "v", "bias", "key_weight", "mask", "cu_seqlens_q", "cu_seqlens_k", "bias_offsets", "dropout_seed", "alibi_slopes",
    "mask_tiles",
)  # fmt: skip
SCALARS = {
    "max_seqlen_q": -1, "max_seqlen_k": -1, "scale": 0.25, "softcap": 0.0, "window_left": -1, "window_right": -1,
    "lower_right": False, "dropout_p": 0.0, "precision": "default", "deterministic": False,
    "caps_bias": False,
}  # fmt: skip
TANGENTS = ("tq", "tk", "tv", "tbias", "tkey_weight")


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def dense():
    q, k, v = (torch.randn(2, h, n, d) for h, n, d in ((4, 5, 16), (2, 7, 16), (2, 7, 8)))
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": torch.randn(2, 4, 5, 8),
        "dout": torch.randn(2, 4, 5, 8),
        "lse": torch.randn(2, 4, 5),
        "dlse": torch.randn(2, 4, 5),
    }


def packed():
    q, k, v = (torch.randn(h, n, d) for h, n, d in ((4, 5, 16), (2, 7, 16), (2, 7, 8)))
    return {
        "q": q, "k": k, "v": v, "out": torch.randn(4, 5, 8), "dout": torch.randn(4, 5, 8), "lse": torch.randn(4, 5),
        "dlse": torch.randn(4, 5), "cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 4, 7),
    }  # fmt: skip


def call(op, values):
    """One of the Triton ops with the values given by name."""
    of = lambda names: [values.get(name) for name in names]  # noqa: E731
    scalars = [values.get(name, default) for name, default in SCALARS.items()]
    raw = torch.ops.flashsci
    if op == "forward":
        return raw.triton_forward(*of(NAMES), *scalars)
    if op == "backward":
        return raw.triton_backward(*of(("dout", "dlse", *NAMES, "out", "lse")), *scalars, values.get("need", 31))
    if op == "many_backward":
        along = [None if values.get(n) is None else torch.stack((values[n], -values[n])) for n in ("dout", "dlse")]
        return raw.triton_many_backward(*along, *of((*NAMES, "out", "lse")), *scalars, values.get("need", 31))
    if op == "jvp":
        return raw.triton_jvp(*of((*TANGENTS, *NAMES, "out", "lse")), *scalars)
    if op == "many_jvp":
        along = [None if values.get(n) is None else torch.stack((values[n], -values[n])) for n in TANGENTS]
        return raw.triton_many_jvp(*along, *of((*NAMES, "out", "lse")), *scalars)
    if op == "second_jvp":
        values = (
            {f"u{n}": torch.ones_like(values[n]) for n in ("q", "k")}
            | dict.fromkeys(("tlse", "ulse"), values["lse"])
            | values
        )
        seconds = [f"{prefix}{n[1:]}" for prefix in ("u", "tu") for n in TANGENTS]
        given = [values.get(n) for n in (*TANGENTS, *seconds, "tlse", "ulse", *NAMES, "out", "lse")]
        return raw.triton_second_jvp(*given, *scalars)
    if op == "many_double_backward":
        along = [None if values.get(n) is None else torch.stack((values[n], -values[n])) for n in TANGENTS]
        rest = of(("dout", "dlse", *NAMES, "out", "lse"))
        return raw.triton_many_double_backward(*along, *rest, *scalars, values.get("need", 127))
    return raw.triton_double_backward(
        *of((*TANGENTS, "dout", "dlse", *NAMES, "out", "lse")), *scalars, values.get("need", 127)
    )


R = torch.randn
# What is wrong in every op that takes it: message, values that replace those of a call that is fine.
DENSE = (
    ("share one dtype", {"k": R(2, 2, 7, 16).half()}),
    ("share one dtype", {"v": R(2, 2, 7, 8).double()}),
    ("float16, bfloat16 or float32", {"q": R(2, 4, 5, 16).double(), "k": R(2, 2, 7, 16).double(), "v": R(2, 2, 7, 8).double()}),
    ("float16, bfloat16 or float32", {"q": ints(1).expand(2, 4, 5, 16), "k": ints(1).expand(2, 2, 7, 16), "v": ints(1).expand(2, 2, 7, 8)}),
    ("same number of dims", {"k": R(2, 7, 16)}),
    ("same number of dims", {"q": R(16), "k": R(16), "v": R(16)}),
    ("same number of dims", {"q": R(1, 1, 1, 4, 5, 16), "k": R(1, 1, 1, 2, 7, 16), "v": R(1, 1, 1, 2, 7, 8)}),
    ("leading dims of q, k and v differ", {"k": R(1, 2, 7, 16)}),
    ("same heads and keys", {"v": R(2, 2, 6, 8)}),
    ("same heads and keys", {"v": R(2, 1, 7, 8)}),
    ("same head dim", {"k": R(2, 2, 7, 8)}),
    ("head dims must be 1 to", {"v": R(2, 2, 7, 0)}),
    ("head dims must be 1 to", {"q": R(2, 4, 5, 1025), "k": R(2, 2, 7, 1025)}),
    ("multiple of those of k", {"k": R(2, 3, 7, 16), "v": R(2, 3, 7, 8)}),
    ("multiple of those of k", {"k": R(2, 0, 7, 16), "v": R(2, 0, 7, 8)}),
    ("bias must have 4 dims", {"bias": R(5, 7)}),
    ("bias must have 4 dims", {"bias": R(2, 4, 5, 6)}),
    ("bias must have 4 dims", {"bias": R(1, 2, 4, 5, 7)}),
    ("bias must be torch.float32", {"bias": R(2, 4, 5, 7).half()}),
    ("bias must be torch.float32", {"bias": torch.ones(2, 4, 5, 7, dtype=torch.bool)}),
    ("mask must have 4 dims", {"mask": torch.ones(7, dtype=torch.bool)}),
    ("mask must be torch.bool", {"mask": R(2, 4, 5, 7)}),
    ("key_weight must have 3 dims", {"key_weight": R(7)}),
    ("key_weight must have 3 dims", {"key_weight": R(2, 4, 7)}),
    ("key_weight must be torch.float32", {"key_weight": ints(1).expand(2, 2, 7)}),
    ("alibi_slopes must be torch.float32", {"alibi_slopes": ints(1).expand(4)}),
    ("alibi_slopes must have 2 dims", {"alibi_slopes": R(3)}),
    ("alibi_slopes must have 2 dims", {"alibi_slopes": R(2, 2, 4)}),
    ("dropout_seed must be torch.int64", {"dropout_p": 0.5, "dropout_seed": ints(1, 2)}),
    (r"dropout_seed must have shape \[2\]", {"dropout_p": 0.5, "dropout_seed": ints(1, dtype=torch.int64)}),
    ("dropout needs a dropout_seed", {"dropout_p": 0.5}),
    ("dropout_p must be in", {"dropout_p": 1.0, "dropout_seed": ints(1, 2, dtype=torch.int64)}),
    ("dropout_p must be in", {"dropout_p": float("nan")}),
    ("scale must be finite", {"scale": float("inf")}),
    ("softcap must be >= 0", {"softcap": -1.0}),
    ("softcap must be >= 0", {"softcap": float("nan")}),
    ("window_left and window_right must be >= 0", {"window_left": -2}),
    ("window_left and window_right must be >= 0", {"window_right": -7}),
    ("precision must be one of", {"precision": "fp64"}),
    ("go together", {"cu_seqlens_q": ints(0, 5)}),
    ("packed tensors are", {"cu_seqlens_q": ints(0, 5), "cu_seqlens_k": ints(0, 7)}),
    ("belong to a packed call", {"bias_offsets": ints(0, 35, dtype=torch.int64)}),
)  # fmt: skip
PACKED = (
    ("go together", {"cu_seqlens_k": None}),
    ("vector of N \\+ 1 offsets", {"cu_seqlens_q": ints(), "cu_seqlens_k": ints()}),
    ("vector of N \\+ 1 offsets", {"cu_seqlens_q": ints(0, 2, 5)[None]}),
    ("vector of N \\+ 1 offsets", {"cu_seqlens_k": torch.tensor(0, dtype=torch.int32)}),
    ("cu_seqlens_q must be torch.int32", {"cu_seqlens_q": ints(0, 2, 5, dtype=torch.int64)}),
    ("cu_seqlens_k must be torch.int32", {"cu_seqlens_k": R(3)}),
    ("same length, got 3 and 2", {"cu_seqlens_k": ints(0, 7)}),
    ("same length, got 1 and 3", {"cu_seqlens_q": ints(0)}),
    ("packed calls take no mask", {"mask": torch.ones(1, 1, 7, dtype=torch.bool)}),
    ("bias must have 3 dims", {"bias": R(4, 7)}),
    ("bias must have 3 dims", {"bias": R(4, 5, 7)}),
    ("bias must have 3 dims", {"bias": R(2, 1, 7)}),
    ("must be \\[1 or 4, pairs\\]", {"bias": R(2, 17), "bias_offsets": ints(0, 8, 17, dtype=torch.int64)}),
    ("must be \\[1 or 4, pairs\\]", {"bias": R(4, 1, 7), "bias_offsets": ints(0, 8, 17, dtype=torch.int64)}),
    ("bias_offsets must be torch.int64", {"bias": R(4, 17), "bias_offsets": ints(0, 8, 17)}),
    ("bias_offsets must have shape", {"bias": R(4, 17), "bias_offsets": ints(0, 17, dtype=torch.int64)}),
)
RESULTS = (
    ("out must have shape", {"out": R(2, 4, 5, 16)}),
    ("out must be torch.float32", {"out": R(2, 4, 5, 8).half()}),
    ("lse must have shape", {"lse": R(2, 4, 6)}),
    ("lse must have shape", {"lse": R(2, 4, 5, 1)}),
    ("lse must be torch.float32", {"lse": R(2, 4, 5).half()}),
)
COTANGENTS = (
    ("dout must have shape", {"dout": R(2, 4, 5)}),
    ("dout must be torch.float32", {"dout": R(2, 4, 5, 8).double()}),
    ("dlse must have shape", {"dlse": R(4, 5)}),
    ("dlse must be torch.float32", {"dlse": R(2, 4, 5).double()}),
)
ALONG = (
    ("tangent of q must have shape", {"tq": R(2, 4, 5, 8)}),
    ("tangent of k must be torch.float32", {"tk": R(2, 2, 7, 16).half()}),
    ("tangent of v must have shape", {"tv": R(7, 8)}),
    ("a tangent of bias needs bias", {"tbias": R(2, 4, 5, 7)}),
    ("tangent of bias must have shape", {"tbias": R(2, 4, 5, 7), "bias": R(1, 4, 5, 7)}),
    ("a tangent of key_weight needs key_weight", {"tkey_weight": R(2, 2, 7)}),
)
ALONG_TWICE = (
    ("tangent of q must have shape", {"uq": R(2, 4, 5, 8)}),
    ("tangent of v must have shape", {"tuv": R(7, 8)}),
    ("a tangent of bias needs bias", {"tubias": R(2, 4, 5, 7)}),
    ("tlse must have shape", {"tlse": R(2, 4, 6)}),
    ("ulse must be torch.float32", {"ulse": R(2, 4, 5).half()}),
)
OF_DOUBLE = ("double_backward", "many_double_backward")
OF_TANGENTS = ("jvp", "many_jvp", "second_jvp", *OF_DOUBLE)
OPS = ("forward", "backward", "many_backward", *OF_TANGENTS)
CASES = [
    (op, base, message, change)
    for ops, base, table in (
        (OPS, dense, DENSE),
        (OPS, packed, PACKED),
        (OPS[1:], dense, RESULTS),
        (("backward", "many_backward", *OF_DOUBLE), dense, COTANGENTS),
        (OF_TANGENTS, dense, ALONG),
        (("second_jvp",), dense, ALONG_TWICE),
    )
    for op in ops
    for message, change in table
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_triton_op_refuses(number):
    op, base, message, change = CASES[number]
    values = base()
    if op in OF_TANGENTS:
        values["tq"] = torch.randn_like(values["q"])
    with pytest.raises((ValueError, TypeError), match=message):
        call(op, {**values, **change})


@pytest.mark.parametrize("op", OPS)
def test_a_call_that_was_fine_does_not_let_others_through(op):
    values = dense()
    values["tq"] = torch.randn_like(values["q"])
    call(op, values)
    for message, change in DENSE[:2]:
        with pytest.raises((ValueError, TypeError), match=message):
            call(op, {**values, **change})
    call(op, values)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "name",
    ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out", "lse", "dout", "dlse", "dropout_seed"],
)
def test_a_triton_op_takes_any_strides(op, name):
    """Copied where kernels need neighbours in memory; NaN and large numbers lie between."""
    values = packed()
    values.update(tq=torch.randn_like(values["q"]), dropout_p=0.5, dropout_seed=ints(3, 4, dtype=torch.int64))
    x = values[name]
    junk = float("nan") if x.is_floating_point() else 77
    odd = torch.stack([torch.full_like(x, junk), x], -1)[..., 1]
    for a, b in zip(call(op, {**values, name: odd}), call(op, values), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "starts", [[0], [0, 5], [0, 0, 5], [3, 1, 4], [-5, 2, 99], [0, 2**31 - 1, 5], [-(2**31), 0, 5], [9, 9, 9]]
)
def test_offsets_that_are_wrong_stay_in_bounds(op, starts):
    """Wrong rows at most: kernels clamp. The tensors around hold NaN, and so would what is read there."""
    values = packed()
    surround = {}
    for name in ("q", "k", "v", "out", "dout", "lse", "dlse"):
        x = values[name]
        wide = torch.full((3, *x.shape), float("nan"))
        wide[1] = x
        surround[name] = wide[1]
    values.update(surround, tq=torch.randn_like(values["q"]))
    values.update(cu_seqlens_q=ints(*starts), cu_seqlens_k=ints(*starts))
    for x in call(op, values):
        assert x.isnan().sum() == 0


@pytest.mark.parametrize("lengths", [(-7, -7), (0, 0), (1, 1), (2**31 - 1, 2**31 - 1)])
def test_longest_lengths_are_hints(lengths):
    """Those that hold, and those below zero for unknown, change nothing; none reads out of bounds."""
    values = packed()
    found = call("forward", {**values, "max_seqlen_q": lengths[0], "max_seqlen_k": lengths[1]})
    if lengths[0] < 0 or lengths[0] > 5:
        for a, b in zip(found, call("forward", values), strict=True):
            assert torch.equal(a, b)


def cuda_arguments(values, need=None):
    tensors = [values.get(n) for n in ("q", "k", "v", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k")]
    scalars = [-1, -1, 0.25, 0.0, -1, -1, False, False]
    if need is None:
        return (*tensors, *scalars, 0)
    return (values["dout"], None, *tensors, values["out"], values["lse"], *scalars, False, 0, need)


@pytest.mark.skipif(cuda.library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)")
@pytest.mark.parametrize("values", [dense(), packed()], ids=["dense", "packed"])
def test_cuda_ops_refuse_cpu_tensors(values):
    assert cuda.build_info() is not None
    namespace = torch.ops.flashsci
    with pytest.raises(NotImplementedError, match="cuda_forward"):
        namespace.cuda_forward(*cuda_arguments(values))
    with pytest.raises(NotImplementedError, match="cuda_backward"):
        namespace.cuda_backward(*cuda_arguments(values, 15))
    for wrong in ({"q": None}, {"k": "x"}, {"bias": 1.0}):
        with pytest.raises(RuntimeError):
            namespace.cuda_forward(*cuda_arguments({**values, **wrong}))
    with pytest.raises(RuntimeError):
        namespace.cuda_forward(*cuda_arguments(values)[:-3])


@pytest.mark.skipif(cuda.library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)")
@pytest.mark.parametrize("values", [dense(), packed()], ids=["dense", "packed"])
def test_cuda_ops_on_meta_tensors(values):
    """Their fake kernels: shapes, dtypes and strides, for compilers."""
    assert cuda.build_info() is not None
    meta = {n: x.to("meta") for n, x in values.items()}
    out, lse = torch.ops.flashsci.cuda_forward(*cuda_arguments(meta))
    assert out.is_meta and out.shape == values["out"].shape and lse.shape == values["lse"].shape
    for need in (0, 1, 6, 15):
        found = torch.ops.flashsci.cuda_backward(*cuda_arguments(meta, need))
        shapes = [values[n].shape if need >> i & 1 else (0,) for i, n in enumerate("qkv")]
        assert [x.shape for x in found[:3]] == shapes and found[3].shape == (0,)


def test_attention_backward_checks_what_it_is_given():
    values = dense()
    names = ("dout", "q", "k", "v", "out", "lse")
    for kind, message, change in (
        (TypeError, "lse must be a torch.Tensor, got NoneType", {"lse": None}),
        (TypeError, "out must be a torch.Tensor, got list", {"out": []}),
        (TypeError, "dout must be a torch.Tensor or None, got float", {"dout": 0.0}),
        (TypeError, "out must have q's dtype", {"out": values["out"].half()}),
        (TypeError, "dout must have q's dtype", {"dout": values["dout"].double()}),
        (ValueError, "lse must have shape", {"lse": values["lse"][:1]}),
    ):
        with pytest.raises(kind, match=message):
            flashsci.attention_backward(*({**values, **change}[n] for n in names))
    seed = {"dropout_p": 0.5, "dropout_seed": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"dropout_seed must be an int64 tensor of shape \[2\]"):
        flashsci.attention_backward(*(values[n] for n in names), **seed)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.add(str(func))
        return func(*args, **(kwargs or {}))


def test_who_watches_sees_the_ops():
    """A plain call leaves torch's dispatcher out; modes, profilers and transforms are told all the same."""
    q = torch.randn(2, 4, 8, requires_grad=True)

    def step():
        flashsci.attention(q, q, q, backend="triton").sum().backward()

    with Seen() as seen:
        step()
    assert {"flashsci.triton_forward.default", "flashsci.triton_backward.default"} <= seen.ops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = {event.key for event in profile.key_averages()}
    assert {"flashsci::triton_forward", "flashsci::triton_backward"} <= names


def test_a_plain_call_leaves_the_dispatcher_out(monkeypatch):
    from flashsci.backends import triton

    dispatched = []
    op = triton.forward
    monkeypatch.setattr(triton, "forward", lambda *a: dispatched.append("forward") or op(*a))
    q = torch.randn(2, 4, 8)
    plain = flashsci.attention(q, q, q, backend="triton")
    assert dispatched == []

    class Wrapped(torch.Tensor):
        pass

    found = flashsci.attention(q.as_subclass(Wrapped), q, q, backend="triton")
    assert dispatched == ["forward"], "a subclass of Tensor may have a dispatch of its own"
    assert torch.equal(found, plain)


def test_a_tensor_that_escaped_from_a_transform():
    """It looks like a tensor and has no memory of its own: only torch's dispatcher reads it."""
    escaped = []
    torch.func.grad(lambda x: escaped.append(2 * x) or x.sum())(torch.ones(2, 4, 8))
    (q,) = escaped
    assert type(q) is torch.Tensor
    with torch.no_grad():
        found = flashsci.attention(q, q, q, backend="triton")
    assert torch.equal(found, torch.full((2, 4, 8), 2.0))
