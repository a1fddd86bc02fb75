"""Launches of the tangents of out and lse along many directions."""

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.groups import TangentStrides
from flashsci.backends.triton.kernels.many_jvp import many_jvp_kernel
from flashsci.backends.triton.launcher import Launch, device_of
from flashsci.backends.triton.plans.dense import DensePlan, options_of, plan_of
from flashsci.backends.triton.plans.second_order import bias_layout, inner
from flashsci.backends.triton.plans.strides import NO_STRIDES, strides4, weight_strides
from flashsci.call.ops import Saved, Tangents, count_of, fake_forward, stacked
from flashsci.errors import BackendError


def most_of(tangents: Tangents, saved: Saved) -> int:
    """The directions that a program has room for."""
    tensors, scalars = saved.tensors, saved.scalars
    dims = tensors.q.shape[-1], tensors.v.shape[-1]
    capability = device_of(tensors.q.device).capability
    if capability is not None and any(n * tensors.q.element_size() % 16 for n in dims):
        return 1  # one load for each number
    absent = tensors.bias is tensors.mask is tensors.key_weight is None
    plain = absent and not scalars.dropout_p and not scalars.softcap
    bias_moves = tangents.bias is not None
    return tilings.most_directions(capability, tensors.q.dtype, scalars.precision, max(dims), plain, bias_moves)


def shares(tangents: Tangents, saved: Saved) -> bool:
    """Whether a program has room for the tangents of several directions."""
    return most_of(tangents, saved) > 1


def from_16_bytes(x):
    """Rows of directions that begin where the rows of one may begin: at multiples of 16 bytes, or anywhere."""
    vector = 16 // x.element_size()
    return x.contiguous() if x.stride(0) % vector and x.shape[-1] % vector == 0 else x


def group_of(count: int, most: int) -> int:
    """The directions of a program, of `count` in all."""
    return next(n for n in (1, 2, 4) if n >= min(count, most))


def along_of(tangents: Tangents) -> Tangents:
    """Tangents as kernels read those of many directions."""
    return Tangents(*(None if x is None else from_16_bytes(inner(x)) for x in tangents[:3]), *tangents[3:])


def plan_along(along: Tangents, dout, saved: Saved, longest: int) -> DensePlan:
    """The plan of a call with these tangents; the order of tensors is that of the second order's plans."""
    tensors, out, _, scalars = saved
    rows = [like if x is None else x[0] for x, like in zip(along[:3], tensors[:3], strict=True)]
    return plan_of((*tensors[:3], dout, out, *rows), tuple(tensors), longest, options_of(scalars))


def steps_of(*every) -> tuple[int, ...]:
    """The steps from one direction to the next in these tensors."""
    return tuple(0 if x is None else x.stride(0) for x in every)


def layouts_of(along: Tangents) -> tuple:
    """The layouts, along one direction, of the tangents that a plan does not know."""
    return tuple(None if x is None else (x.shape[1:], x.stride()[1:], x.element_size()) for x in along[3:])


def tangent_arguments(p: DensePlan, along: Tangents) -> dict:
    """The arguments of a kernel for tangents along many directions."""
    of_bias, of_weight = layouts_of(along)
    kind, vector, strides = bias_layout(p, of_bias)
    if vector > 1 and along.bias.stride(0) % vector:
        vector = 1
    of_weights = NO_STRIDES[:4] if of_weight is None else weight_strides(*of_weight[:2])
    return {
        "tangent_strides": TangentStrides(*p.strides[5:], strides, of_weights),
        "TBIAS": kind,
        "TBIAS_VECTOR": vector,
    }


def launch(p: DensePlan, along: Tangents, tout, mean, most: int, second: bool) -> Launch:
    """The launch for groups of at most so many directions. second: the double backward follows, which needs sums of dout."""
    count, steps = len(tout), steps_of(*along, tout, mean)
    key = "many_jvp", count, steps, layouts_of(along), second
    if key not in p.launches:
        programs, arguments = p.scheduled("many_jvp")
        group = group_of(count, most)
        arguments.update(
            tangent_arguments(p, along),
            out_strides=p.strides[4],
            dout_strides=p.strides[3] if second else None,
            tout_strides=strides4(tout.stride()[1:]),
            tiles=(count, steps),
            GROUP=group,
        )
        if along.key_weight is not None:  # Triton 3.6 cannot compile some of these for one warp
            arguments["num_warps"] = max(2, arguments["num_warps"])
        p.launches[key] = Launch(many_jvp_kernel, programs * -(-count // group), arguments)
    return p.launches[key]


def many_jvp(tangents: Tangents, saved: Saved):
    """Tangents of out and lse along directions: those of q, k, v, bias, key weights are [n, *], or None for zero."""
    tensors, out, lse, scalars = saved
    q, k, v = tensors[:3]
    most = most_of(tangents, saved)
    if most < 2:
        raise BackendError(
            f"flashsci: tangents along many directions have no kernel here for head dims {q.shape[-1]} and {v.shape[-1]} in "
            f"{str(q.dtype).removeprefix('torch.')} and these features; compute them one after the other"
        )
    out, lse = inner(out), lse.contiguous()
    tout, mean = (stacked(x, count_of(tangents)) for x in fake_forward(tensors))
    if tout.numel() == 0 or k.shape[-2] == 0:
        return tout.zero_(), mean.zero_()
    along = along_of(tangents)
    p = plan_along(along, out, Saved(tensors, out, lse, scalars), 0)
    launch(p, along, tout, mean, most, False)(
        tuple(tensors), tuple(along), out, lse, None, None, tout, mean, None, None
    )
    return tout, mean
