"""Calls of every entry point by one of their tensors, and all that torch can ask of that tensor."""

from __future__ import annotations

import torch
from torch import func
from torch.autograd import forward_ad

import flashsci
from flashsci.call import derivatives
from flashsci.call.derivatives import ENTRIES, Asked

ARGUMENTS = [(entry, name) for entry, rules in ENTRIES.items() for name in rules.rules]
OFFSETS = torch.tensor([0, 1, 3], dtype=torch.int32)


def first(found):
    return found[0] if isinstance(found, tuple) else found


def call_of(call, backend):
    return lambda x: call(x, backend)


def wide(*shape):
    return torch.randn(shape, dtype=torch.float64)


def scores_tensors(rows):
    """What attention takes beside q, k, v."""
    return {"sink": wide(2), "alibi_slopes": wide(2).abs(), "dropout_seed": torch.tensor([3, 4]), **rows}


def dense():
    needed = {"q": wide(2, 3, 2), "k": wide(2, 4, 2), "v": wide(2, 4, 2)}
    rows = {
        "bias": wide(2, 3, 4),
        "key_weight": wide(2, 4).abs(),
        "mask": torch.rand(3, 4) > 0.3,
        "pair_gate": wide(2, 3, 4),
    }
    return needed, scores_tensors(rows)


def packed():
    needed = {"q": wide(3, 2, 2), "k": wide(3, 2, 2), "v": wide(3, 2, 2)}
    rows = {"bias": wide(2, 1, 3), "key_weight": wide(2, 3).abs()}
    return {**needed, "cu_seqlens_q": OFFSETS}, scores_tensors(rows)


def backward():
    needed, others = dense()
    out, lse = flashsci.attention(**needed, return_lse=True, backend="reference")
    needed |= {
        "dout": wide(2, 3, 2),
        "out": out,
        "lse": lse + 4,
    }  # of more keys, as in a ring: P is at most 1
    return needed, {"dlse": wide(2, 3), **{n: x for n, x in others.items() if n not in ("sink", "pair_gate")}}


def maps(places=()):
    needed, others = dense()
    del needed["v"]
    rest = {n: x for n, x in others.items() if n not in ("sink", "dropout_seed", "pair_gate")}
    return {**needed, "lse": wide(2, 3) + 8}, {**rest, **dict(places)}


def drops(given):
    return {"dropout_p": 0.5} if "dropout_seed" in given else {}


def attention_backward(**given):
    return tuple(x for x in flashsci.attention_backward(**given, **drops(given)) if x is not None)


def laplacian():
    needed, others = dense()
    halves = {f"{n}_jacobian": wide(2, *x.shape) for n, x in needed.items()}
    halves |= {f"{n}_laplacian": wide(*x.shape) for n, x in needed.items()}
    return needed, {**halves, "bias": others["bias"], "mask": others["mask"]}


def forward_laplacian(**given):
    """One tensor that depends on all tensors of the call, each alone too."""
    found = flashsci.forward_laplacian(**given)
    return torch.cat([found.jacobian, found.laplacian[None]])


# By entry: its needed and its optional tensors, and what calls it.
CALLS = {
    "attention": (dense, lambda **x: flashsci.attention(**x, **drops(x))),
    "varlen_attention": (packed, lambda **x: flashsci.varlen_attention(**x, **drops(x))),
    "residual_attention": (
        lambda: (dense()[0], {"bias": wide(2, 3, 4), "dropout_seed": torch.tensor([3, 4])}),
        lambda **x: flashsci.residual_attention(**x, **drops(x)),
    ),
    "attention_backward": (backward, attention_backward),
    "attention_weights": (
        lambda: maps({"rows": torch.tensor([2, 0]), "columns": torch.tensor([1, 3, 0])}),
        lambda backend, **x: flashsci.attention_weights(**x),
    ),
    "attention_statistics": (
        maps,
        lambda backend, **x: flashsci.attention_statistics(**x, entropy=True).entropy,
    ),
    "forward_laplacian": (laplacian, forward_laplacian),
    "merge": (
        lambda: ({"outs": wide(3, 2, 3, 2), "lses": wide(3, 2, 3)}, {}),
        lambda backend, **x: flashsci.merge(**x),
    ),
    "sdpa": (
        lambda: (
            {"query": wide(2, 3, 2), "key": wide(2, 4, 2), "value": wide(2, 4, 2)},
            {"attn_mask": wide(2, 3, 4)},
        ),
        lambda backend, **x: flashsci.sdpa(**x),
    ),
    "dropout_mask": (
        lambda: ({"dropout_seed": torch.tensor([3, 4])}, {}),
        lambda backend, dropout_seed: flashsci.dropout_mask(dropout_seed, 0.5, (2, 3)).int(),
    ),
}
DENSE_ALONE = ("attention_backward", "attention_weights", "attention_statistics")  # the calls here
HAVE = [
    (e, n)
    for e, n in ARGUMENTS
    if e in CALLS and ENTRIES[e].rules[n] != derivatives.FIXED and not (e in DENSE_ALONE and n.startswith("cu_seqlens"))
]


def given(entry, name):
    """(call of the argument alone, the argument)."""
    tensors, call = CALLS[entry]
    needed, others = tensors()
    if name == "cu_seqlens_k":
        others[name] = OFFSETS
    x = needed.pop(name) if name in needed else others[name]

    def of(x, backend="reference"):
        with flashsci.use_backend(backend):
            return call(**needed, **{name: x}, backend=backend)

    return of, x


def requires_grad(call, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(total(call(x)), x)


def gradient(call, x):
    return func.grad(lambda x: total(call(x)))(x)


def numbers(call, x):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, x))


def along(call, x):
    return func.jvp(call, (x,), (x,))


def mapped(call, x):
    return func.vmap(call)(torch.stack([x, x]))


def beside_mapped(call, x):
    return func.vmap(lambda y: total(call(x)) + y)(torch.zeros(2))


def beside_gradient(call, x):
    return func.grad(lambda y: total(call(x)) * y)(torch.zeros(()))


def beside_tangent(call, x):
    return func.jvp(lambda y: total(call(x)) + y, (torch.zeros(()),), (torch.ones(()),))[0]


def total(found):
    return first(found).float().sum()


def of(outer, inner):
    """One transform of the argument, around one of something else: the argument is wrapped, or hidden below."""
    return lambda call, x: outer(lambda x: inner(call, x), x)


BESIDE = {"vmap": beside_mapped, "grad": beside_gradient, "jvp": beside_tangent}
WAYS = {
    Asked.REVERSE: {
        "requires_grad": requires_grad, "grad": gradient, "vmap of grad": lambda call, x: func.vmap(lambda x: gradient(call, x))(x[None]),
        **{f"grad of {n} of another": of(gradient, f) for n, f in BESIDE.items()},
        **{f"{n} of another, x requires grad": lambda call, x, f=f: f(call, x.detach().requires_grad_()) for n, f in BESIDE.items()},
    },
    Asked.FORWARD: {
        "jvp": along, "dual numbers": numbers, "jvp of jvp": of(along, along),
        **{f"jvp of {n} of another": of(along, f) for n, f in BESIDE.items()},
        **{f"dual numbers in {n} of another": of(numbers, f) for n, f in BESIDE.items() if n != "jvp"},
    },
    Asked.MAPPED: {
        "vmap": mapped, "vmap of vmap": lambda call, x: func.vmap(func.vmap(call))(x[None, None]),
        **{f"vmap of {n} of another": of(mapped, f) for n, f in BESIDE.items()},
    },
}  # fmt: skip
SAYS = {
    Asked.REVERSE: "no gradients and {} requires one; ",
    Asked.FORWARD: "no forward-mode derivatives and {} has a tangent; ",
    Asked.MAPPED: "no batching rule and torch.vmap maps {}; ",
}


def eight_bits(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def float8_dense():
    tensors = {n: eight_bits(1, 2, 16, 16) for n in "qkv"}
    return tensors | {f"{n}_scale": torch.rand(1, 2) + 0.5 for n in "qkv"}


def float8_packed():
    tensors = {n: eight_bits(16, 2, 16) for n in "qkv"}
    edges = torch.tensor([0, 4, 16], dtype=torch.int32)
    scales = {f"{n}_scale": torch.rand(2, 2) + 0.5 for n in "qkv"}
    return tensors | scales | {"cu_seqlens_q": edges, "cu_seqlens_k": edges.clone()}


def paged():
    return {
        "q": torch.randn(3, 2, 16), "k_cache": torch.randn(4, 16, 2, 16), "v_cache": torch.randn(4, 16, 2, 16),
        "block_table": torch.tensor([[1, 2]], dtype=torch.int32), "seqused_k": torch.tensor([20], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32), "sink": torch.randn(2), "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(2.0), "out": torch.empty(3, 2, 16),
    }  # fmt: skip


def written():
    return {
        "key": torch.randn(3, 2, 16),
        "value": torch.randn(3, 2, 16),
        "k_cache": torch.zeros(4, 16, 2, 16),
        "v_cache": torch.zeros(4, 16, 2, 16),
        "slot_mapping": torch.tensor([1, 20, 40]),
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(2.0),
    }


def write(**given):
    flashsci.write_kv_cache(**given)
    return given["k_cache"]


def quantized(backend, **given):
    return flashsci.quantize(**given).scale


# Those that have no derivatives: which rules, tensors, and the call.
WITHOUT = {
    "float8": ("float8", float8_dense, flashsci.attention),
    "float8, packed": ("float8", float8_packed, flashsci.varlen_attention),
    "paged_attention": ("paged_attention", paged, flashsci.paged_attention),
    "write_kv_cache": ("write_kv_cache", written, write),
    "quantize": (
        "quantize",
        lambda: {"x": torch.randn(3, 2, 16), "cu_seqlens": OFFSETS},
        quantized,
    ),
}
REFUSED = [
    (call, name, mode)
    for call, (entry, tensors, _) in WITHOUT.items()
    for name, x in tensors().items()
    for mode in Asked
    if not getattr(
        ENTRIES[entry].rules[name], {Asked.REVERSE: "reverse", Asked.FORWARD: "forward", Asked.MAPPED: "mapped"}[mode]
    )
    and (mode is Asked.MAPPED or x.is_floating_point())
]


def without(which, name, backend):
    _, tensors, function = WITHOUT[which]
    others = tensors()
    x = others.pop(name)
    return (lambda x: function(**others, **{name: x}, backend=backend)), x
