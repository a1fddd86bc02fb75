"""Launches of the second tangents of out and lse: forward mode over forward mode."""

from typing import NamedTuple

import torch

from flashsci.backends.triton.kernels.groups import TangentStrides
from flashsci.backends.triton.kernels.second_jvp import second_jvp_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.dense import DensePlan, longest_of, options_of, plan_of
from flashsci.backends.triton.plans.second_order import bias_layout, inner
from flashsci.backends.triton.plans.strides import NO_STRIDES, strides4, strides_of, weight_strides
from flashsci.call.ops import Saved, Tangents, empty_like_layout
from flashsci.errors import BackendError

WIDEST_FP32 = 128  # beyond, no tile of this kernel has room in registers


def has_kernel(dtype: torch.dtype, widest: int) -> bool:
    """Whether a kernel computes calls whose widest head dim is this one."""
    return dtype != torch.float32 or widest <= WIDEST_FP32


class _Layout(NamedTuple):
    """The layout of the tangents of bias and key weights of one direction; None: absent."""

    bias: tuple | None  # shape, strides and bytes of a number
    weight: tuple | None

    @classmethod
    def of(cls, tangents: Tangents) -> "_Layout":
        bias, weight = tangents.bias, tangents.key_weight
        return cls(
            None if bias is None else (bias.shape, bias.stride(), bias.element_size()),
            None if weight is None else (weight.shape, weight.stride()),
        )


def _launch(plan: DensePlan, rows: list, layouts: tuple[_Layout, ...], result) -> Launch:
    """rows: the strides of the tangents of q, k, v of each direction."""
    programs, arguments = plan.scheduled("second_jvp")
    names = "first_strides", "second_strides", "mixed_strides"
    kinds, vectors = [], []
    for name, of_rows, layout in zip(names, rows, layouts, strict=True):
        kind, vector, strides = bias_layout(plan, layout.bias)
        of_weights = NO_STRIDES[:4] if layout.weight is None else weight_strides(*layout.weight)
        arguments[name] = TangentStrides(*of_rows, strides, of_weights)
        kinds.append(kind)
        vectors.append(vector)
    arguments.update(
        out_strides=plan.strides[3],
        result_strides=strides_of(result),
        TBIAS=tuple(kinds),
        TBIAS_VECTOR=tuple(vectors),
    )
    if any(layout.weight is not None for layout in layouts):  # Triton 3.6 cannot compile some of these for one warp
        arguments["num_warps"] = max(2, arguments["num_warps"])
    return Launch(second_jvp_kernel, programs, arguments)


def second_jvp(first: Tangents, second: Tangents, mixed: Tangents, first_lse, second_lse, saved: Saved):
    """Second tangents of out and lse along `first` and `second`, whose own tangent is `mixed`; any of them may be None,
    for zero. first_lse, second_lse: the tangents of lse along the two."""
    tensors, out, lse, scalars = saved
    q, k, v = tensors[:3]
    out, lse = inner(out), lse.contiguous()
    first_lse, second_lse = first_lse.contiguous(), second_lse.contiguous()
    result, mean = empty_like_layout(q, out.shape), torch.empty_like(lse)
    along = [Tangents(*map(inner, t[:3]), *t[3:]) for t in (first, second, mixed)]
    still = all(x is None for x in mixed) and any(all(x is None for x in t) for t in along[:2])
    if result.numel() == 0 or k.shape[-2] == 0 or still:
        return result.zero_(), mean.zero_()
    if max(q.shape[-1], v.shape[-1]) > 256:  # there, alignments of a plan are those of the first direction
        along = [Tangents(*(None if x is None else x.contiguous() for x in t[:3]), *t[3:]) for t in along]
    rows = [like if x is None else x for t in along for x, like in zip(t[:3], (q, k, v), strict=True)]
    inputs = tuple(tensors)
    # In the order of the second order's.
    plan = plan_of((q, k, v, out, out, *rows), inputs, longest_of(scalars), options_of(scalars))
    if plan.wide is not None:  # with the scores of all heads in memory
        from flashsci.backends import reference_packed

        return reference_packed.second_jvp(*along, first_lse, second_lse, Saved(tensors, out, lse, scalars))
    if not has_kernel(q.dtype, max(q.shape[-1], v.shape[-1])):
        raise BackendError(
            f"flashsci: forward mode over forward mode in float32 has kernels for head dims up to {WIDEST_FP32}, got "
            f"{q.shape[-1]} and {v.shape[-1]}; give q, k and v in 16 bits, or compute this call with backend='reference'"
        )
    layouts = tuple(map(_Layout.of, along))
    key = "second_jvp", layouts
    if key not in plan.launches:
        strides = [tuple(strides4(x.stride()) for x in rows[n : n + 3]) for n in (0, 3, 6)]
        plan.launches[key] = _launch(plan, strides, layouts, result)
    plan.launches[key](inputs, *map(tuple, along), out, lse, first_lse, second_lse, result, mean)
    return result, mean
