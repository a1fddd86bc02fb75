"""One right call of every raw op, and what it computes. tests/support/raw_op_judge.py makes wrong ones of them.

An op that is missing here fails tests/cpu/call/test_every_raw_op.py: `CALLS` is held against what torch knows of the namespace.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.call.laplacian import computed
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.call.ops import Scalars, Tensors

Arguments = dict[str, Any]
Results = tuple[Tensor | None, ...]


class Right(NamedTuple):
    """A right call of an op."""

    op: str
    label: str
    arguments: Callable[[str], Arguments]  # of a device, in the order of the schema
    truth: Callable[[Arguments, torch.dtype], Results] | None  # in a dtype; None: it has no numbers
    written: tuple[str, ...] = ()
    unit: float = 0.0  # what a result may be off by, if a kernel holds P in fewer bits than results
    loose: frozenset[str] = frozenset()  # whose length kernels clamp to: a wrong one gives wrong rows, in bounds
    refresh: Callable[[Arguments], None] = lambda arguments: None  # results among the arguments, of other options

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


# --- what torch knows ---------------------------------------------------------------------------

HOMES = (
    "flashsci.call.autograd",
    "flashsci.backends.reference_fp8",
    "flashsci.backends.reference_packed",
    "flashsci.backends.reference_paged",
    "flashsci.backends.triton",
    "flashsci.backends.cuda",
    "flashsci.backends.cuda.fp8",
    "flashsci.distributed",
)


def all_ops() -> dict[str, Any]:
    """Every op of the namespace that takes a tensor, and its schema. Ops that return text read no memory, and those of
    tests/support/opaque.py belong to tests; both are left out."""
    for home in HOMES:
        importlib.import_module(home)
    cuda = importlib.import_module("flashsci.backends.cuda")
    if cuda.library_path() is not None:
        cuda.build_info()  # loads it
    found = (s for s in torch._C._jit_get_all_schemas() if re.match("flashsci::(?!opaque_)", s.name))
    return {
        s.name.removeprefix("flashsci::"): s
        for s in found
        if any("Tensor" in str(a.type) for a in s.arguments)
        and any(str(r.type) != "str" for r in s.returns or s.arguments)
    }


def schema_of(op: str) -> Any:
    return getattr(torch.ops.flashsci, op).default._schema


# --- numbers ------------------------------------------------------------------------------------


class Draw:
    """Normal numbers of one seed."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator)
        return x.to(dtype or self.dtype).to(self.device)

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


OPTIONS = {
    "max_seqlen_q": -1, "max_seqlen_k": -1, "scale": 0.25, "softcap": 3.0, "window_left": 4, "window_right": 3,
    "lower_right": True, "dropout_p": 0.0, "precision": "default", "deterministic": False, "caps_bias": False,
}  # fmt: skip
RAW = [
    "q",
    "k",
    "v",
    "bias",
    "key_weight",
    "mask",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "bias_offsets",
    "dropout_seed",
    "alibi_slopes",
    "mask_tiles",
]


def dense(device: str, dropout: bool = False) -> Arguments:
    r = Draw(device)
    given = {
        "q": r(2, 4, 5, 16),
        "k": r(2, 2, 7, 16),
        "v": r(2, 2, 7, 8),
        "bias": r(2, 4, 5, 7),
        "key_weight": r(2, 2, 7).exp(),
        "mask": r(1, 1, 5, 7) > -1,
        "alibi_slopes": r(2, 4).abs() / 4,
    }
    if dropout:
        given |= {"dropout_seed": r.ints(3, 4, dtype=torch.int64), "dropout_p": 0.5}
    return (
        dict.fromkeys(RAW)
        | {n: x for n, x in given.items() if n in RAW}
        | OPTIONS
        | {n: x for n, x in given.items() if n in OPTIONS}
    )


def tiled(device: str) -> Arguments:
    """A dense call whose mask has a table of its tiles."""
    given = dense(device)
    return given | {"mask_tiles": torch.ops.flashsci.triton_mask_tiles(given["mask"])}


def capped(device: str) -> Arguments:
    """A dense call whose softcap bounds bias and ALiBi, too."""
    return dense(device) | {"caps_bias": True}


def mask_alone(device: str) -> Arguments:
    return {"mask": Draw(device)(2, 1, 140, 270) > 0}


def table_of(given: Arguments, dtype: torch.dtype) -> Results:
    """The table of a mask, by its definition: kinds of tiles, lists in both directions, the places of the bits of all tiles,
    zeros up to a multiple of 512, bits."""
    mask = given["mask"].cpu()
    rows, keys = (-(-n // 128) for n in mask.shape[-2:])
    padded = torch.zeros(*mask.shape[:-2], 128 * rows, 128 * keys, dtype=torch.int64)
    padded[..., : mask.shape[-2], : mask.shape[-1]] = mask
    whole = torch.ones_like(padded)
    whole[..., : mask.shape[-2], : mask.shape[-1]] = mask
    tiles, full = (x.unflatten(-1, (keys, 128)).unflatten(-3, (rows, 128)) for x in (padded, whole))
    kinds = tiles.amax((-3, -1)) + full.amin((-3, -1)) * tiles.amax((-3, -1))
    found = []
    for of_lines in (kinds, kinds.mT):
        count = of_lines.shape[-1]
        listed = (of_lines > 0).long()
        before = torch.nn.functional.pad(listed.cumsum(-1), (1, 0))
        order = torch.argsort(1 - listed, dim=-1, stable=True)
        entries = torch.where(of_lines > 0, 2 * torch.arange(count) + of_lines // 2, 0).gather(-1, order)
        found += [before.flatten(-2), entries.flatten(-2)]
    found.append(torch.arange(rows * keys).expand_as(kinds.flatten(-2)))
    found.append(torch.zeros(*kinds.shape[:-2], -sum(x.shape[-1] for x in found) % 512, dtype=torch.int64))
    words = (tiles.transpose(-3, -2).unflatten(-1, (4, 32)) << torch.arange(32)).sum(-1)
    table = torch.cat([*found, words.flatten(-4)], -1).unsqueeze(-2)
    return (table.to(torch.int32).to(given["mask"].device),)


def packed(device: str) -> Arguments:
    r = Draw(device)
    return dict.fromkeys(RAW) | {
        "q": r(4, 5, 16), "k": r(2, 7, 16), "v": r(2, 7, 8), "bias": r(4, 17), "cu_seqlens_q": r.ints(0, 2, 5),
        "cu_seqlens_k": r.ints(0, 4, 7), "bias_offsets": r.ints(0, 8, 17, dtype=torch.int64),
    } | OPTIONS  # fmt: skip


def tensors_of(given: Arguments, dtype: torch.dtype) -> Tensors:
    wide = {
        n: x if x is None or n == "alibi_slopes" or not x.is_floating_point() else x.to(dtype)
        for n, x in given.items()
        if n in RAW
    }
    return Tensors(**wide)


def forward_of(given: Arguments, dtype: torch.dtype) -> Results:
    scalars = Scalars(*(given[n] for n in OPTIONS))
    return reference.forward(tensors_of(given, dtype), scalars)


LEARNT = ("q", "k", "v", "bias", "key_weight")


def _differentiable(given: Arguments, dtype: torch.dtype) -> tuple[dict[str, Tensor], Callable[..., Results]]:
    leaves = {n: given[n].to(dtype).detach().requires_grad_() for n in LEARNT if given[n] is not None}
    return leaves, lambda *values: forward_of({**given, **dict(zip(leaves, values, strict=True))}, dtype)


def _pull(given: Arguments, dtype: torch.dtype, names: tuple[str, ...] = ("dout", "dlse")) -> Results:
    """dq, dk, dv, dbias, dkey_weight, with a graph of their own."""
    leaves, function = _differentiable(given, dtype)
    out, lse = function(*leaves.values())
    along = [
        torch.zeros_like(x) if given[n] is None else given[n].to(dtype) for n, x in zip(names, (out, lse), strict=True)
    ]
    found = torch.autograd.grad((out, lse), list(leaves.values()), along, create_graph=True)
    return tuple(dict(zip(leaves, found, strict=True)).get(n) for n in LEARNT)


def backward_of(given: Arguments, dtype: torch.dtype) -> Results:
    found = _pull(given, dtype)
    return tuple(x if given["need"] >> i & 1 else None for i, x in enumerate(found))


def jvp_of(given: Arguments, dtype: torch.dtype) -> Results:
    return _jvp(*_differentiable(given, dtype), given, dtype)


def _jvp(leaves: dict[str, Tensor], function: Callable[..., Results], given: Arguments, dtype: torch.dtype) -> Results:
    along = [torch.zeros_like(x) if given[f"t{n}"] is None else given[f"t{n}"].to(dtype) for n, x in leaves.items()]
    values = [x.detach() for x in leaves.values()]
    return torch.autograd.functional.jvp(function, tuple(values), tuple(along))[1]


def many_jvp_of(given: Arguments, dtype: torch.dtype) -> Results:
    """One direction after the other."""
    along = [f"t{n}" for n in LEARNT]
    count = next(given[n].shape[0] for n in along if given[n] is not None)
    each = [jvp_of(given | {n: None if given[n] is None else given[n][i] for n in along}, dtype) for i in range(count)]
    return tuple(torch.stack(x) for x in zip(*each, strict=True))


def many_backward_of(given: Arguments, dtype: torch.dtype) -> Results:
    """One cotangent after the other."""
    along = ("dout", "dlse")
    count = next(given[n].shape[0] for n in along if given[n] is not None)
    each = [
        backward_of(given | {n: None if given[n] is None else given[n][i] for n in along}, dtype) for i in range(count)
    ]
    return tuple(None if x[0] is None else torch.stack(x) for x in zip(*each, strict=True))


def second_jvp_of(given: Arguments, dtype: torch.dtype) -> Results:
    leaves, function = _differentiable(given, dtype)
    first, second, mixed = (
        tuple(
            torch.zeros_like(x) if given[f"{p}{n}"] is None else given[f"{p}{n}"].to(dtype) for n, x in leaves.items()
        )
        for p in DIRECTIONS
    )
    values, count = tuple(x.detach() for x in leaves.values()), len(leaves)
    along = lambda *at: torch.func.jvp(function, at[:count], at[count:])[1]  # noqa: E731
    return torch.func.jvp(along, (*values, *first), (*second, *mixed))[1]


def double_backward_of(given: Arguments, dtype: torch.dtype) -> Results:
    return _double_backward(given, dtype, LEARNT, forward_of)


def _double_backward(
    given: Arguments, dtype: torch.dtype, names: tuple[str, ...], forward: Callable[..., Results]
) -> Results:
    leaves = {n: given[n].to(dtype).detach().requires_grad_() for n in (*names, "dout", "dlse") if given[n] is not None}
    values = given | leaves
    out, lse = forward(values, dtype)
    inner = [n for n in names if n in leaves]
    for n, x in (("dout", out), ("dlse", lse)):
        if n not in leaves:
            leaves[n] = torch.zeros_like(x).requires_grad_()
    found = torch.autograd.grad(
        (out, lse), [leaves[n] for n in inner], [leaves["dout"], leaves["dlse"]], create_graph=True
    )
    total = sum(
        (x * given[f"t{n}"].to(dtype)).sum() for n, x in zip(inner, found, strict=True) if given[f"t{n}"] is not None
    )
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    by_name = dict(zip(leaves, grads, strict=True))
    return tuple(by_name.get(n) if given["need"] >> i & 1 else None for i, n in enumerate((*names, "dout", "dlse")))


def many_double_backward_of(given: Arguments, dtype: torch.dtype) -> Results:
    """One direction after the other."""
    along = [f"t{n}" for n in LEARNT]
    count = next(given[n].shape[0] for n in along if given[n] is not None)
    each = [
        double_backward_of(given | {n: None if given[n] is None else given[n][i] for n in along}, dtype)
        for i in range(count)
    ]
    return tuple(None if x[0] is None else torch.stack(x) for x in zip(*each, strict=True))


def with_results(given: Arguments) -> None:
    """out and lse as the forward leaves them."""
    out, lse = forward_of(given, torch.float64)
    given["out"], given["lse"] = out.to(given["q"].dtype), lse.float()


def with_tangents(given: Arguments) -> None:
    """out and lse as the forward leaves them, and the tangents of lse along two directions."""
    with_results(given)
    for prefix in DIRECTIONS[:2]:
        along = {f"t{n}": given[f"{prefix}{n}"] for n in LEARNT}
        given[f"{prefix}lse"] = jvp_of(given | along, torch.float64)[1].float()


DIRECTIONS = ("t", "u", "tu")  # the first, the second, and of the first along the second
SECOND = (*(f"t{n}" for n in LEARNT), "dout", "dlse")


def saved(base: Callable[[str], Arguments], op: str, device: str) -> Arguments:
    given, r = base(device), Draw(device)
    r.generator.manual_seed(6)
    if op.startswith("many_"):  # GPUs have no kernel of it for all of these features in float32
        given |= {n: given[n].half() for n in ("q", "k", "v", "bias") if given[n] is not None}
    with_results(given)
    given |= {"dout": r(*given["out"].shape, dtype=given["out"].dtype), "dlse": r(*given["lse"].shape)}
    for prefix in DIRECTIONS if op == "second_jvp" else DIRECTIONS[:1]:
        given |= {f"{prefix}{n}": None if given[n] is None else r(*given[n].shape) for n in LEARNT}
    if op in ("many_jvp", "many_double_backward"):
        given |= {f"t{n}": None if given[n] is None else r(3, *given[n].shape, dtype=given[n].dtype) for n in LEARNT}
    if op == "many_backward":
        given |= {n: r(3, *given[x].shape, dtype=given[x].dtype) for n, x in (("dout", "out"), ("dlse", "lse"))}
    if op == "second_jvp":
        with_tangents(given)
    given["need"] = 31 if op in ("backward", "many_backward") else 127
    return in_order(f"triton_{op}", given)


def in_order(op: str, given: Arguments) -> Arguments:
    return {a.name: given[a.name] for a in schema_of(op).arguments}


# --- attention maps -------------------------------------------------------------------------------


def map_of(base: Callable[[str], Arguments], label: str, device: str) -> Arguments:
    """The reductions of a map: all of them, or the sum over queries alone."""
    given = base(device)
    with_results(given)
    rows = label != "sums"
    given |= {"entropy": rows, "largest_score": rows, "key_sum": True, "top_k": 3 * rows}
    return in_order("triton_map_statistics", given)


def map_results(given: Arguments) -> None:
    """The lse as the forward leaves it."""
    whole = dict.fromkeys(RAW) | OPTIONS | given | {"v": given["k"]}
    with_results(whole)
    given["lse"] = whole["lse"]


def reductions_of(given: Arguments, dtype: torch.dtype) -> Results:
    """The reductions by the formula, each sequence of a packed call by itself."""
    if given["cu_seqlens_q"] is None:
        found = _reductions(given, dtype)
    else:
        edges, others = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
        parts = []
        for n in range(len(edges) - 1):
            rows, keys = slice(edges[n], edges[n + 1]), slice(others[n], others[n + 1])
            lengths = rows.stop - rows.start, keys.stop - keys.start
            start = int(given["bias_offsets"][n])
            bias = given["bias"][:, start : start + lengths[0] * lengths[1]].unflatten(-1, lengths)
            part = {"q": given["q"][:, rows], "k": given["k"][:, keys], "lse": given["lse"][:, rows], "bias": bias}
            parts.append(_reductions(given | part, dtype))
        found = tuple(torch.cat(x, dim) for dim, *x in zip((-1, -1, -1, -2, -2), *parts, strict=True))
    asked = given["entropy"], given["largest_score"], given["key_sum"], given["top_k"], given["top_k"]
    return tuple(x if need else None for x, need in zip(found, asked, strict=True))


def _reductions(given: Arguments, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, lse = (given[n].to(dtype) for n in ("q", "k", "lse"))
    group = q.shape[-3] // k.shape[-3]
    s = q @ k.repeat_interleave(group, -3).mT * given["scale"]
    if given["softcap"]:
        s = given["softcap"] * torch.tanh(s / given["softcap"])
    if given["bias"] is not None:
        s = s + given["bias"].to(dtype)
    rows, keys = s.shape[-2:]
    shift = keys - rows if given["lower_right"] else 0
    away = torch.arange(keys, device=s.device) - torch.arange(rows, device=s.device)[:, None] - shift
    if given["alibi_slopes"] is not None:
        s = s - given["alibi_slopes"].to(dtype)[..., None, None] * away.abs()
    hidden = [] if given["mask"] is None else [~given["mask"]]
    for side, far in ((given["window_left"], -away), (given["window_right"], away)):
        if side >= 0:
            hidden.append(far > side)
    for where in hidden:
        s = s.masked_fill(where, -torch.inf)
    p = _exp(s, lse)
    if given["key_weight"] is not None:
        weights = given["key_weight"].to(dtype).expand(*k.shape[:-1])
        p = p * weights.repeat_interleave(group, -2).unsqueeze(-2)
    # Equal probabilities in the order of their keys; fewer keys than asked for are followed by zeros of key -1.
    values, places = torch.nn.functional.pad(p, (0, given["top_k"])).sort(dim=-1, descending=True, stable=True)
    top = values[..., : given["top_k"]], places.masked_fill(places >= keys, -1)[..., : given["top_k"]]
    return torch.special.entr(p).sum(-1), s.amax(-1), p.sum(-2), *top


def _exp(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse), zero in rows without keys."""
    empty = (lse == -torch.inf).unsqueeze(-1)
    return (s - lse.unsqueeze(-1).masked_fill(empty, 0)).exp().masked_fill(empty, 0)


# --- paged --------------------------------------------------------------------------------------


def pages(device: str, cache: torch.dtype, dtype: torch.dtype = torch.float32) -> Arguments:
    r = Draw(device, dtype)
    scales = cache.itemsize == 1
    given = {
        "q": r(6, 4, 16), "k_cache": r(5, 16, 2, 16).to(cache), "v_cache": r(5, 16, 2, 8).to(cache),
        "block_table": r.ints(4, 1, 2, 0).view(2, 2), "seqused_k": r.ints(20, 9), "cu_seqlens_q": r.ints(0, 2, 5),
        "sink": None if scales else r(4, dtype=torch.float32), "k_scale": r(2, 2, dtype=torch.float32).exp() if scales else None,
        "v_scale": r(2, 2, dtype=torch.float32).exp() if scales else None, "out": torch.full((6, 4, 8), torch.nan, dtype=dtype, device=device),
        "max_seqlen_q": 3, "scale": 0.25, "softcap": 0.0, "window_left": 11, "window_right": 0, "return_lse": True,
    }  # fmt: skip
    return given


def pages_of(given: Arguments, dtype: torch.dtype) -> Results:
    """out and lse from the formula; rows of no sequence are 0 and -inf."""
    q, heads_k = given["q"].to(dtype), given["k_cache"].shape[2]
    group, page = q.shape[1] // heads_k, given["k_cache"].shape[1]
    out = q.new_zeros(*q.shape[:2], given["v_cache"].shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf)
    edges = given["cu_seqlens_q"].tolist()
    for n, keys in enumerate(given["seqused_k"].tolist()):
        keys = min(keys, given["block_table"].shape[1] * page)
        j = torch.arange(keys, device=q.device)
        where = given["block_table"][n, j // page].long(), j % page
        k, v = (_wide(given[f"{c}_cache"], where, given[f"{c}_scale"], n, dtype) for c in "kv")
        rows = slice(edges[n], edges[n + 1])
        s = torch.einsum("qhd,khd->hqk", q[rows], k.repeat_interleave(group, 1)) * given["scale"]
        if given["softcap"]:
            s = given["softcap"] * torch.tanh(s / given["softcap"])
        i = torch.arange(s.shape[1], device=q.device)[:, None] + keys - s.shape[1]
        for side, far in ((given["window_left"], i - j), (given["window_right"], j - i)):
            if side >= 0:
                s = s.masked_fill(far > side, -torch.inf)
        if given["sink"] is not None:
            s = torch.cat([s, given["sink"].to(dtype)[:, None, None].expand(*s.shape[:2], 1)], -1)
            v = torch.cat([v, torch.zeros_like(v[:1])])
        out[rows] = torch.einsum("hqk,khd->qhd", s.softmax(-1), v.repeat_interleave(group, 1))
        lse[:, rows] = s.logsumexp(-1)
    return out, lse if given["return_lse"] else None


def _wide(cache: Tensor, where: tuple[Tensor, Tensor], scale: Tensor | None, n: int, dtype: torch.dtype) -> Tensor:
    x = cache.to(dtype)[where]
    return x if scale is None else x * scale[n].to(dtype)[:, None]


def tokens(device: str, cache: torch.dtype) -> Arguments:
    r = Draw(device)
    scales = cache.itemsize == 1
    kv = r(3, 16, 2, 24).to(cache)  # keys and values of one buffer, which interleave
    k_cache, v_cache = kv.split((16, 8), -1)
    return {
        "key": r(5, 2, 16),
        "value": r(5, 2, 8),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": r.ints(17, -1, 0, 47, dtype=torch.int64),
        "k_scale": r(2).exp() if scales else None,
        "v_scale": r(2).exp() if scales else None,
    }


def tokens_of(given: Arguments, dtype: torch.dtype) -> Results:
    """Both caches as they are after an update."""
    found = []
    for new, name in (("key", "k"), ("value", "v")):
        cache, scale = given[f"{name}_cache"].to(dtype), given[f"{name}_scale"]
        for t, slot in enumerate(given["slot_mapping"].tolist()):
            if 0 <= slot < cache.shape[0] * cache.shape[1]:
                x = given[new][t].to(dtype)
                x = x if scale is None else x / scale.to(dtype)[:, None]
                kept = given[f"{name}_cache"].dtype
                if kept.itemsize == 1:
                    most = torch.finfo(kept).max
                    x = x.float().clamp(-most, most).to(kept)
                cache[slot // cache.shape[1], slot % cache.shape[1]] = x.to(dtype)
        found.append(cache)
    return tuple(found)


# --- the forward Laplacian ----------------------------------------------------------------------


def laplacian(device: str, keys: int) -> Arguments:
    r = Draw(device)
    q, k, v = r(2, 4, 5, 16), r(2, 2, keys, 16), r(2, 2, keys, 8)
    rows = {"q": q, "k": k, "v": v}
    given = rows | {f"{n}_jacobian": r(3, *x.shape) for n, x in rows.items()}
    given |= {f"{n}_laplacian": r(*x.shape) for n, x in rows.items()}
    given |= {"bias": r(2, 4, 5, keys), "mask": r(1, 1, 5, keys) > -1, "scale": 0.25}
    return in_order("triton_forward_laplacian", given)


def laplacian_of(given: Arguments, dtype: torch.dtype) -> Results:
    *tensors, scale = given.values()
    return computed(
        LaplacianTensors(*(x if x is None or x.dtype is torch.bool else x.to(dtype) for x in tensors)), scale
    )


# --- 8-bit floats, residual, distributed --------------------------------------------------------

E4M3 = torch.float8_e4m3fn


def eight(device: str, packed: bool, op: str) -> Arguments:
    r = Draw(device)
    shapes = ((4, 5, 16), (2, 7, 16), (2, 7, 16))
    q, k, v = (r(*(s if packed else (2, *s))).to(E4M3) for s in shapes)
    given = {
        "q": q, "k": k, "v": v, "q_scale": r(2, 4).exp(), "k_scale": r(2, 2).exp(), "v_scale": None if packed else r(2, 2, 1).exp(),
        "cu_seqlens_q": r.ints(0, 2, 5) if packed else None, "cu_seqlens_k": r.ints(0, 4, 7) if packed else None,
    } | OPTIONS | {"out_dtype": torch.float16, "return_lse": True, "out_is_fp16": True, "fast": False}  # fmt: skip
    return in_order(op, given)


def eight_of(given: Arguments, dtype: torch.dtype) -> Results:
    edges = given["cu_seqlens_q"], given["cu_seqlens_k"]
    wide = {}
    for name, of in (("q", edges[0]), ("k", edges[1]), ("v", edges[1])):
        x, scale = given[name].to(dtype), given[f"{name}_scale"]
        if scale is not None and of is not None:
            n = torch.bucketize(torch.arange(x.shape[1], device=x.device), of[1:-1], right=True)
            x = x * scale.to(dtype)[n].T[..., None]
        elif scale is not None:
            x = x * scale.to(dtype).reshape(*x.shape[:2], 1, 1)
        wide[name] = x
    values = dict.fromkeys(RAW) | OPTIONS | {n: x for n, x in given.items() if n in OPTIONS}
    values |= wide | {"cu_seqlens_q": edges[0], "cu_seqlens_k": edges[1]}
    out, lse = forward_of(values, dtype)
    return out, lse if given.get("return_lse", True) else None


def residual(device: str, backward: bool, dropout: bool = False) -> Arguments:
    given, r = dense(device, dropout), Draw(device)
    given |= {"dout": None, "dscores": None, "out": None, "lse": None, "scores": None, "need_bias": True}
    if backward:
        residual_results(given)
        r.generator.manual_seed(7)
        given |= {"dout": r(2, 4, 5, 8), "dscores": r(2, 4, 5, 7)}
    return in_order(f"triton_residual_{'backward' if backward else 'forward'}", given)


def residual_of(given: Arguments, dtype: torch.dtype) -> Results:
    own = ("q", "k", "v", "bias", "dropout_seed", "scale", "dropout_p")
    values = dict.fromkeys(RAW) | OPTIONS | {"softcap": 0.0, "window_left": -1, "window_right": -1}
    values |= {n: given[n] for n in own}
    out, lse = forward_of(values, dtype)
    q, k = (given[n].to(dtype) for n in "qk")
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * given["scale"]
    return out, lse, scores if given["bias"] is None else scores + given["bias"].to(dtype)


def residual_results(given: Arguments) -> None:
    out, lse, scores = residual_of(given, torch.float64)
    given |= {"out": out.float(), "lse": lse.float(), "scores": scores.float()}


def residual_backward_of(given: Arguments, dtype: torch.dtype) -> Results:
    names = [n for n in ("q", "k", "v", "bias") if given[n] is not None]
    leaves = {n: given[n].to(dtype).detach().requires_grad_() for n in names}
    q, k, _ = (leaves[n] for n in "qkv")
    out, _, scores = residual_of(given | leaves, dtype)
    change = torch.zeros_like(scores, requires_grad=True)  # added to the scores, also where there is no bias
    bias = leaves["bias"] + change if "bias" in leaves else change
    out, _, scores = residual_of(given | leaves | {"bias": bias}, dtype)
    pairs = [(x, given[n]) for x, n in ((out, "dout"), (scores, "dscores")) if given[n] is not None]
    wanted = (q, k, leaves["v"], change)
    if not pairs:
        return tuple(torch.zeros_like(x) for x in wanted)
    found = torch.autograd.grad(
        [x for x, _ in pairs], wanted, [g.to(dtype) for _, g in pairs], allow_unused=True, materialize_grads=True
    )
    return *found[:3], found[3] if given["need_bias"] else None


GATED = (*LEARNT, "pair_gate")


def gate(device: str, what: str, dropout: bool = False) -> Arguments:
    given, r = dense(device, dropout), Draw(device)
    r.generator.manual_seed(8)
    given |= {"pair_gate": r(2, 1, 5, 7), "need": 255 if what == "double_backward" else 63}
    if what != "forward":
        gated_results(given)
        given |= {"dout": r(2, 4, 5, 8), "dlse": r(2, 4, 5)}
        given |= {f"t{n}": r(*given[n].shape) for n in GATED}
    return in_order(f"triton_gated_{what}", given)


def gated_of(given: Arguments, dtype: torch.dtype) -> Results:
    scalars = Scalars(*(given[n] for n in OPTIONS))
    return reference.forward(tensors_of(given, dtype), scalars, None, given["pair_gate"].to(dtype))


def gated_results(given: Arguments) -> None:
    out, lse = gated_of(given, torch.float64)
    given |= {"out": out.to(given["q"].dtype), "lse": lse.float()}


def gated_backward_of(given: Arguments, dtype: torch.dtype) -> Results:
    leaves = {n: given[n].to(dtype).detach().requires_grad_() for n in GATED if given[n] is not None}
    out, lse = gated_of(given | leaves, dtype)
    pairs = [(x, given[n]) for x, n in ((out, "dout"), (lse, "dlse")) if given[n] is not None]
    found = dict.fromkeys(leaves)
    if pairs:
        ends, along = [x for x, _ in pairs], [g.to(dtype) for _, g in pairs]
        of = torch.autograd.grad(ends, list(leaves.values()), along, allow_unused=True, materialize_grads=True)
        found = dict(zip(leaves, of, strict=True))
    else:
        found = {n: torch.zeros_like(x) for n, x in leaves.items()}
    return tuple(found.get(n) if given["need"] >> i & 1 else None for i, n in enumerate(GATED))


def gated_jvp_of(given: Arguments, dtype: torch.dtype) -> Results:
    leaves = {n: given[n].to(dtype).detach().requires_grad_() for n in GATED if given[n] is not None}
    return _jvp(leaves, lambda *values: gated_of(given | dict(zip(leaves, values, strict=True)), dtype), given, dtype)


def gated_double_backward_of(given: Arguments, dtype: torch.dtype) -> Results:
    return _double_backward(given, dtype, GATED, gated_of)


def across(op: str, device: str) -> Arguments:
    """Of a group of one rank."""
    import torch.distributed as dist

    from flashsci.distributed.block import Scores as ScoresOf
    from flashsci.distributed.call import DistributedCall
    from flashsci.distributed.layout import Layout
    from flashsci.distributed.pieces import Band

    r, ring = Draw(device), op.startswith("ring")
    options = ScoresOf(0.25, None, False, None, "reference")
    queries, keys = (Layout("contiguous", (n,)) for n in (5, 7))
    heads = 2 if ring else 4
    given = {
        "q": r(2, 4, 5, 16), "k": r(2, heads, 7, 16), "v": r(2, heads, 7, 8), "bias": r(2, 4, 5, 7),
        "key_weight": r(2, heads, 7).exp(), "mask": r(1, 1, 5, 7) > -1, "dlse": r(2, 4, 5), "dout": r(2, 4, 5, 8),
        "call": DistributedCall(dist.group.WORLD.group_name, queries, keys, Band(-1, -1), options, (True, True), True).text(),
    }  # fmt: skip
    if not ring:
        del given["key_weight"]
    across_results(given)
    return in_order(op, given)


def across_results(given: Arguments) -> None:
    out, lse = across_forward_of(given, torch.float64)
    given |= {"out": out.float(), "lse": lse.float()}


def across_forward_of(given: Arguments, dtype: torch.dtype) -> Results:
    values = dict.fromkeys(RAW) | OPTIONS | {"softcap": 0.0, "window_left": -1, "window_right": -1}
    return forward_of(values | {n: x for n, x in given.items() if n in RAW}, dtype)


def across_backward_of(given: Arguments, dtype: torch.dtype) -> Results:
    values = dict.fromkeys(RAW) | OPTIONS | {"softcap": 0.0, "window_left": -1, "window_right": -1}
    values |= {n: x for n, x in given.items() if n in RAW}
    values["dout"] = given["dout"]
    values["dlse"] = torch.zeros(values["q"].shape[:-1]).to(given["q"]) if given["dlse"] is None else given["dlse"]
    found = _pull(values, dtype)
    return found if "key_weight" in given else found[:4]


# --- the table ----------------------------------------------------------------------------------

FLOAT8, HALF = torch.float8_e4m3fn, torch.float16
FINE = 2.0**-7  # of kernels that round P to 16 bits
LENGTHS = frozenset(
    ("q", "k", "v", "bias", "out", "dout", "lse", "dlse")
)  # of packed calls: rows and pairs that are not there


def _of(base: Callable[..., Arguments], *more: Any, **named: Any) -> Callable[[str], Arguments]:
    return lambda device: base(*more[:0], device, *more, **named)


def _saved(base: Callable[[str], Arguments], op: str) -> Callable[[str], Arguments]:
    return lambda device: saved(base, op, device)


def _mapped(base: Callable[[str], Arguments], label: str) -> Callable[[str], Arguments]:
    return lambda device: map_of(base, label, device)


def _triton() -> Iterator[Right]:
    bases = {"dense": dense, "capped": capped, "tiles": tiled, "dropout": _of(dense, True), "packed": packed}
    yield Right("triton_mask_tiles", "mask", mask_alone, table_of)
    truths = {
        "backward": backward_of,
        "many_backward": many_backward_of,
        "jvp": jvp_of,
        "many_jvp": many_jvp_of,
        "second_jvp": second_jvp_of,
        "double_backward": double_backward_of,
        "many_double_backward": many_double_backward_of,
    }
    for label, base in bases.items():
        if label == "dropout":  # of the second order its checks are those of the first
            truths = {"backward": backward_of}
        loose = LENGTHS if label == "packed" else frozenset()
        yield Right("triton_forward", label, lambda device, base=base: in_order("triton_forward", base(device)), forward_of, loose=loose)  # fmt: skip
        for op, truth in truths.items():
            refresh = with_tangents if op == "second_jvp" else with_results
            unit = FINE if op.startswith("many_") else 0.0
            yield Right(f"triton_{op}", label, _saved(base, op), truth, unit=unit, loose=loose, refresh=refresh)
    for label, base in (("dense", dense), ("sums", dense), ("packed", packed)):
        yield Right("triton_map_statistics", label, _mapped(base, label), reductions_of, loose=LENGTHS if label == "packed" else frozenset(), refresh=map_results)  # fmt: skip
    for label, dropout in (("dense", False), ("dropout", True)):
        yield Right("triton_gated_forward", label, _of(gate, "forward", dropout), gated_of)
        yield Right(
            "triton_gated_backward", label, _of(gate, "backward", dropout), gated_backward_of, refresh=gated_results
        )
    yield Right("triton_gated_jvp", "dense", _of(gate, "jvp"), gated_jvp_of, refresh=gated_results)
    yield Right("triton_gated_double_backward", "dense", _of(gate, "double_backward"), gated_double_backward_of, refresh=gated_results)  # fmt: skip
    for label, dropout in (("bias", False), ("dropout", True)):
        yield Right("triton_residual_forward", label, _of(residual, False, dropout), residual_of)
        yield Right("triton_residual_backward", label, _of(residual, True, dropout), residual_backward_of, refresh=residual_results)  # fmt: skip
    for label, keys in (("few keys", 7), ("many keys", 70)):
        yield Right("triton_forward_laplacian", label, lambda device, keys=keys: laplacian(device, keys), laplacian_of)


def _paged(backend: str) -> Iterator[Right]:
    for cache in (torch.float32, FLOAT8):
        label = str(cache).removeprefix("torch.")
        yield Right(f"{backend}_paged_attention", label, _of(pages, cache), pages_of, ("out",))
        yield Right(f"{backend}_write_kv_cache", label, _of(tokens, cache), tokens_of, ("k_cache", "v_cache"))


def _fp8(op: str) -> Iterator[Right]:
    for label, packed_ in (("dense", False), ("packed", True)):
        unit = 0.0 if op.startswith("reference") else 2.0**-3  # P of e4m3
        loose = LENGTHS if packed_ else frozenset()
        yield Right(op, label, _of(eight, packed_, op), eight_of, unit=unit, loose=loose)


def _across() -> Iterator[Right]:
    for op in ("ring", "triangle"):
        yield Right(
            f"{op}_forward", "one rank", lambda device, op=op: across(f"{op}_forward", device), across_forward_of
        )
        yield Right(f"{op}_backward", "one rank", lambda device, op=op: across(f"{op}_backward", device), across_backward_of, refresh=across_results)  # fmt: skip


CUDA_LABELS = ("dense", "packed", "packed bias", "slopes", "packed slopes")


def _cuda_values(op: str, label: str, device: str) -> Arguments:
    """Of the ops of the compiled library: 16 bits, options that they all have, slopes in the place of the bias."""
    r, sloped = Draw(device, HALF), "slopes" in label
    given = packed(device) if "packed" in label else dense(device)
    slopes = (
        r(*(2, 4) if "packed" in label else given["alibi_slopes"].shape, dtype=torch.float32).abs() / 4
        if sloped
        else None
    )
    given |= {"key_weight": None, "alibi_slopes": slopes}
    if label == "packed bias":
        given["caps_bias"] = True  # below a softcap, its gradient is another backend's
    else:
        given["bias_offsets"] = None
        if label != "dense":
            given["bias"] = None
    singles = (
        n for n, x in given.items() if n != "alibi_slopes" and isinstance(x, Tensor) and x.dtype == torch.float32
    )
    given |= {n: given[n].half() for n in list(singles)}
    with_results(given)
    given |= {"dout": r(*given["out"].shape), "dlse": r(*given["lse"].shape, dtype=torch.float32)}
    if sloped:
        given["bias"] = slopes[..., None, None]
    for n in ("q", "k", "v", "bias"):
        given[f"d{n}"] = None if given[n] is None or (n == "bias" and sloped) else torch.empty_like(given[n])
    given |= {"tf32": False, "generation": 0, "weighted": False, "slopes": sloped}
    return in_order(op, given | {"need": 7 if sloped else 15})


def _cuda_problem(given: Arguments) -> Arguments:
    """The arguments of :data:`RAW` that those of an op of the library mean."""
    found = dict.fromkeys(RAW) | OPTIONS | given
    if given["slopes"]:
        found |= {"alibi_slopes": given["bias"].squeeze(-1).squeeze(-1), "bias": None}
    return found


def _cuda_refresh(given: Arguments) -> None:
    """out and lse of other options, where the op lacks some of those of :data:`RAW`."""
    whole = _cuda_problem(given)
    with_results(whole)
    given |= {n: whole[n] for n in ("out", "lse") if n in given}


def _cuda_pages(device: str, cache: torch.dtype) -> Arguments:
    """Rows of 16 bytes at least, which the library's kernels take."""
    given = pages(device, cache, HALF) | {"generation": 0}
    if cache.itemsize == 1:
        wide = torch.cat([given["v_cache"].float()] * 2, -1).to(cache)
        out = torch.full((6, 4, 16), torch.nan, dtype=HALF, device=device)
        given |= {"v_cache": wide, "out": out}
    return in_order("cuda_paged_attention", given)


def _cuda_truth(truth: Callable[..., Results], count: int) -> Callable[..., Results]:
    return lambda given, dtype: truth(_cuda_problem(given), dtype)[:count]


def _cuda() -> Iterator[Right]:
    truths = {"cuda_forward": _cuda_truth(forward_of, 2), "cuda_backward": _cuda_truth(backward_of, 4)}
    for label in CUDA_LABELS:
        for what in ("forward", "backward"):
            for op in (f"cuda_{what}", f"cuda_prepared_{what}"):
                if label == "packed bias" and "prepared" in op:
                    continue  # it has no such argument
                loose = LENGTHS if "packed" in label else frozenset()
                values = lambda device, op=op, label=label: _cuda_values(op, label, device)  # noqa: E731
                yield Right(op, label, values, truths.get(op), unit=FINE, loose=loose, refresh=_cuda_refresh)
    for cache in (HALF, FLOAT8):
        label = str(cache).removeprefix("torch.")
        yield Right("cuda_paged_attention", label, lambda device, cache=cache: _cuda_pages(device, cache), pages_of, ("out",), FINE)  # fmt: skip
    yield from _fp8("cuda_fp8_attention")
    yield from _fp8("cuda_fp8_forward")


def refusal(device: str) -> Arguments:
    return {"x": Draw(device)(3), "what": "nothing"}


CALLS: tuple[Right, ...] = (
    *_triton(), *_paged("triton"), *_paged("reference"), *_fp8("triton_fp8_attention"), *_fp8("reference_fp8_attention"), *_across(),
    *_cuda(), Right("refuse", "always", refusal, None),
)  # fmt: skip
RAISES = ("refuse",)  # whatever they are given
# Made of torch's own ops, or of others in this table, which check themselves: they hold no pointer.
PACKED = ("forward", "backward", "jvp", "second_jvp", "double_backward")
COMPOSED = frozenset(
    (
        "draw_seed",
        "keep_mask",
        "recorded_backward",
        "recorded_double_backward",
        *(f"reference_packed_{what}" for what in PACKED),
    )
)
