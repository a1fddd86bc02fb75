"""Launches of the tangents of out and lse along many directions."""

import torch

from flashsci.backends.triton.kernels.groups import TangentStrides
from flashsci.backends.triton.kernels.many_jvp import many_jvp_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.dense import options_of, plan_of
from flashsci.backends.triton.plans.second_order import inner
from flashsci.backends.triton.plans.strides import NO_STRIDES, strides4
from flashsci.call.ops import Saved, Tangents, Tensors

GROUP = 4  # directions of a program


def shares(tensors: Tensors) -> bool:
    """Whether a program has room for the tangents of several directions."""
    q, v = tensors.q, tensors.v
    return max(q.shape[-1], v.shape[-1]) <= (32 if q.dtype == torch.float32 else 64)


def many_jvp(tangents: Tangents, saved: Saved):
    """Tangents of out and lse along directions [n, *]: those of q, k, v may be None, for zero; of bias and key weights there
    are none."""
    tensors, out, lse, scalars = saved
    q, k, v = tensors[:3]
    along = [inner(x) for x in tangents[:3]]
    along = [None if x is None else x if x.stride(0) % (16 // x.element_size()) == 0 else x.contiguous() for x in along]
    count = next(x.shape[0] for x in along if x is not None)
    out, lse = inner(out), lse.contiguous()
    tout, mean = q.new_empty((count, *out.shape)), lse.new_empty((count, *lse.shape))
    if tout.numel() == 0 or k.shape[-2] == 0:
        return tout.zero_(), mean.zero_()
    rows = [like if x is None else x[0] for x, like in zip(along, (q, k, v), strict=True)]
    inputs = tuple(tensors)
    plan = plan_of((q, k, v, out, *rows), inputs, 0, options_of(scalars))
    steps = (*(0 if x is None else x.stride(0) for x in along), tout.stride(0), mean.stride(0))
    key = "many_jvp", count, steps
    if key not in plan.launches:
        programs, arguments = plan.scheduled("many_jvp")
        arguments.update(
            tangent_strides=TangentStrides(*(strides4(x.stride()) for x in rows), NO_STRIDES, NO_STRIDES[:4]),
            out_strides=plan.strides[3],
            tout_strides=strides4(tout.stride()[1:]),
            tiles=(count, steps),
            GROUP=GROUP,
        )
        plan.launches[key] = Launch(many_jvp_kernel, programs * -(-count // GROUP), arguments)
    plan.launches[key](inputs, (*along, None, None), out, lse, tout, mean)
    return tout, mean
