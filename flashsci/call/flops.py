"""The counts of our ops in torch's FlopCounterMode: multiplications and additions of the matrix products, as it
counts SDPA's.

A pair of query and key costs ``2 D`` for a product over the head dim and ``2 Dv`` for one over that of the values.
Counted are the pairs inside the window; causal is one. torch's own formulas ignore causal, so they count up to twice as
much. Masks are data: the pairs that they leave out are computed and counted. Packed and paged lengths are counted, by
reading the offsets; ops of a ring of ranks count the pairs of this rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashsci.call.problem import pairs_of

#: Products over D and over Dv of each pass. The second order's are those that the formulas need, without repeated
#: work of kernels.
PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "jvp": (3, 3), "second_jvp": (9, 4), "double_backward": (7, 5)}
#: Pairs that an op of a module above computes, by its name; that module adds them.
PAIRS: dict[str, Callable[[dict[str, Any]], int]] = {}
#: Products over D and over Dv of ops for which the arguments decide it, in the same way.
COUNTED: dict[str, Callable[[dict[str, Any]], tuple[int, int]]] = {}
_BACKENDS = ("triton", "cuda", "reference_packed")


def teach(modes: Any = None) -> None:
    """Give every flop counter, active or later, the formulas of the ops that are loaded."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:  # nothing counts, and its import would cost us time
        return
    registry = module.flop_registry
    new = {op: f for op, f in formulas().items() if op not in registry}
    registry.update(new)
    if modes is None:
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    for mode in modes:
        counter = getattr(mode, "counter", mode)
        known = getattr(counter, "flop_registry", None)
        if known is not None:
            known.update({op: f for op, f in formulas().items() if op not in known})


def formulas() -> dict[Any, Callable[..., int]]:
    """The formulas by op, for the backends that are loaded."""
    found: dict[Any, Callable[..., int]] = {}
    named = [(f"{b}_{what}", PRODUCTS[what]) for b in _BACKENDS for what in PRODUCTS]
    named += [(f"triangle_{what}", PRODUCTS[what]) for what in ("forward", "backward")]
    named += [(f"triton_gated_{what}", PRODUCTS[what]) for what in PRODUCTS]
    named += [("triton_residual_forward", (1, 1)), ("triton_residual_backward", (3, 2))]
    named += [(f"{b}_fp8_attention", (1, 1)) for b in ("triton", "cuda", "reference")]
    for name, products in named:
        op = getattr(torch.ops.flashsci, name, None)
        if op is not None:
            found[op] = _formula(op, *products)
    for backend in ("triton", "cuda", "reference"):
        op = getattr(torch.ops.flashsci, f"{backend}_paged_attention", None)
        if op is not None:
            found[op] = _formula(op, 1, 1, _paged_pairs)
    op = getattr(torch.ops.flashsci, "triton_map_statistics", None)
    if op is not None:
        found[op] = _formula_of_maps(op)
    op = getattr(torch.ops.flashsci, "triton_forward_laplacian", None)
    if op is not None:
        found[op] = _formula_of_laplacians(op)
    for name, pairs in PAIRS.items():
        op = getattr(torch.ops.flashsci, name)
        found[op] = _formula(op, *PRODUCTS[name.rpartition("_")[2]], pairs)
    for name, products_of in COUNTED.items():
        op = getattr(torch.ops.flashsci, name)
        found[op] = _formula_of(op, products_of)
    return found


def _formula(
    op: Any, over_dim: int, over_values: int, pairs: Callable[[dict[str, Any]], int] | None = None
) -> Callable[..., int]:
    """The formula of an op; ``pairs``: the number of pairs by the op's arguments, if shapes and windows do not tell it."""
    return _formula_of(op, lambda given: (over_dim, over_values), pairs)


def _formula_of(
    op: Any,
    products_of: Callable[[dict[str, Any]], tuple[int, int]],
    pairs: Callable[[dict[str, Any]], int] | None = None,
) -> Callable[..., int]:
    names = [argument.name for argument in op.default._schema.arguments]

    def count(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        given = dict(zip(names, arguments, strict=False)) | named
        values = given["v"] if "v" in given else given["v_cache"]
        over_dim, over_values = products_of(given)
        products = over_dim * given["q"].shape[-1] + over_values * values.shape[-1]
        return int(2 * (pairs or _pairs)(given) * products)

    count._get_raw = True  # type: ignore[attr-defined]  # takes tensors, not shapes
    return count


def _formula_of_maps(op: Any) -> Callable[..., int]:
    """The formula of the reductions of a map: a product for numbers of rows, one for those of keys, and one for the largest."""
    names = [argument.name for argument in op.default._schema.arguments]

    def count(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        given = dict(zip(names, arguments, strict=False)) | named
        given |= {"max_seqlen_q": given["q"].shape[-2], "max_seqlen_k": given["k"].shape[-2]}
        products = int(given["entropy"] or given["largest_score"]) + int(given["key_sum"])
        products += int(given["top_k"] > 0)
        return int(2 * _pairs(given) * products * given["q"].shape[-1])

    count._get_raw = True  # type: ignore[attr-defined]  # takes tensors, not shapes
    return count


def _formula_of_laplacians(op: Any) -> Callable[..., int]:
    """The formula of output, Jacobian and Laplacian: products of the tensors that are there, of flashsci/call/laplacian.py."""
    names = [argument.name for argument in op.default._schema.arguments]

    def count(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        given = dict(zip(names, arguments, strict=False)) | named
        dq, dk, dv, lq, lk, lv = (
            given.get(f"{x}_{what}") is not None for what in ("jacobian", "laplacian") for x in "qkv"
        )
        directions = next((given[f"{x}_jacobian"].shape[0] for x, d in zip("qkv", (dq, dk, dv), strict=True) if d), 0)
        slope = dq or dk  # S changes
        over_dim = 1 + lq + lk + directions * (dq + dk + (dq and dk))
        over_values = 1 + (slope or lq or lk) + lv + directions * (slope + dv + (slope and dv))
        return int(2 * _pairs(given) * (over_dim * given["q"].shape[-1] + over_values * given["v"].shape[-1]))

    count._get_raw = True  # type: ignore[attr-defined]  # takes tensors, not shapes
    return count


def _pairs(given: dict[str, Any]) -> int:
    """The pairs of a dense or packed call, over all heads."""
    q, k = given["q"], given["k"]
    first, second = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    window = given.get("window_left", -1), given.get("window_right", -1), given.get("lower_right", False)
    if first is None or second is None:
        return math.prod(q.shape[:-2]) * pairs_of(q.shape[-2], k.shape[-2], *window)
    queries = _lengths(first, given["max_seqlen_q"])
    keys = _lengths(second, given["max_seqlen_k"])
    heads: int = q.shape[0]
    return heads * sum(pairs_of(m, n, *window) for m, n in zip(queries, keys, strict=True))


def _paged_pairs(given: dict[str, Any]) -> int:
    """The pairs of a paged call, over all heads."""
    q, table, used = given["q"], given["block_table"], given["seqused_k"]
    longest = given["k_cache"].shape[1] * table.shape[1]
    keys = [longest] * table.shape[0] if _hidden(used) else used.tolist()
    window = given["window_left"], given["window_right"], True
    heads: int = q.shape[1]
    return heads * sum(pairs_of(m, n, *window) for m, n in zip(_lengths(given["cu_seqlens_q"], 1), keys, strict=True))


def _hidden(x: Tensor) -> bool:
    """Whether numbers cannot be read: a tensor without memory, or one of a compiler."""
    return x.is_meta or type(x) is not Tensor


def _lengths(offsets: Tensor, longest: int) -> list[int]:
    """The lengths of the sequences; the longest for each if they cannot be read, as torch does."""
    if _hidden(offsets):
        return [max(longest, 0)] * (offsets.shape[0] - 1)
    return [int(n) for n in offsets.diff().tolist()]
