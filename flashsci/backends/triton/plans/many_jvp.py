"""Launches of the tangents of out and lse along many directions."""

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.groups import TangentStrides
from flashsci.backends.triton.kernels.many_jvp import many_jvp_kernel
from flashsci.backends.triton.launcher import Launch, device_of
from flashsci.backends.triton.plans.dense import options_of, plan_of
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
    count = count_of(tangents)
    out, lse = inner(out), lse.contiguous()
    tout, mean = (stacked(x, count) for x in fake_forward(tensors))
    if tout.numel() == 0 or k.shape[-2] == 0:
        return tout.zero_(), mean.zero_()
    along = Tangents(*(None if x is None else from_16_bytes(inner(x)) for x in tangents[:3]), *tangents[3:])
    first = [None if x is None else x[0] for x in along]
    rows = [like if x is None else x for x, like in zip(first[:3], (q, k, v), strict=True)]
    inputs = tuple(tensors)
    plan = plan_of((q, k, v, out, out, *rows), inputs, 0, options_of(scalars))  # in the order of the second order's
    steps = tuple(0 if x is None else x.stride(0) for x in (*along, tout, mean))
    of_bias, of_weight = first[3:]
    key = (
        "many_jvp", count, steps,
        None if of_bias is None else (of_bias.shape, of_bias.stride()),
        None if of_weight is None else (of_weight.shape, of_weight.stride()),
    )  # fmt: skip
    if key not in plan.launches:
        programs, arguments = plan.scheduled("many_jvp")
        layout = None if of_bias is None else (of_bias.shape, of_bias.stride(), of_bias.element_size())
        kind, vector, strides = bias_layout(plan, layout)
        if vector > 1 and steps[3] % vector:
            vector = 1
        of_weights = NO_STRIDES[:4] if of_weight is None else weight_strides(of_weight.shape, of_weight.stride())
        group = group_of(count, most)
        arguments.update(
            tangent_strides=TangentStrides(*(strides4(x.stride()) for x in rows), strides, of_weights),
            out_strides=plan.strides[3],
            tout_strides=strides4(tout.stride()[1:]),
            tiles=(count, steps),
            TBIAS=kind,
            TBIAS_VECTOR=vector,
            GROUP=group,
        )
        if of_weight is not None:  # Triton 3.6 cannot compile some of these for one warp
            arguments["num_warps"] = max(2, arguments["num_warps"])
        plan.launches[key] = Launch(many_jvp_kernel, programs * -(-count // group), arguments)
    plan.launches[key](inputs, tuple(along), out, lse, tout, mean)
    return tout, mean
