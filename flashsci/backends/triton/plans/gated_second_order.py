"""Launches of the second order of attention with a gate of pairs: tangents of its forward, and gradients of its backward's
gradients."""

import torch
from torch import Tensor

from flashsci.backends.triton import checks
from flashsci.backends.triton.kernels.gated_second_order import (
    gated_double_backward_keys_kernel,
    gated_double_backward_queries_kernel,
    gated_jvp_kernel,
    second_order_pair_sums_kernel,
)
from flashsci.backends.triton.kernels.gated_wide import gated_wide_double_backward_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.bias import NO_ROUTE, bias_parts, bias_result, bias_route, reduce_to
from flashsci.backends.triton.plans.dense import DensePlan, longest_of, options_of
from flashsci.backends.triton.plans.gated import check_gate, gate_layout, room_of, sums_for, sums_of
from flashsci.backends.triton.plans.second_order import SecondOrderLaunches, inner, plan_along
from flashsci.backends.triton.plans.strides import NO_STRIDES
from flashsci.call.gate_ops import NEED_GATE, NEED_GATED_DLSE, NEED_GATED_DOUT, GatedTangents, without_gate
from flashsci.call.op_checks import same
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Scalars,
    Tensors,
    empty_like_layout,
)


class GatedSecondOrderLaunches(SecondOrderLaunches):
    """The launches of one plan for one layout of the gate, its tangent, and those of bias and key weights."""

    jvp_kernel = gated_jvp_kernel
    queries_kernel = gated_double_backward_queries_kernel
    keys_kernel = gated_double_backward_keys_kernel
    wide_kernel = gated_wide_double_backward_kernel
    gated = True

    def __init__(self, plan: DensePlan, of_bias, of_weight, gate: tuple, tgate: tuple | None):
        super().__init__(plan, of_bias, of_weight)
        strides, vector = gate_layout(plan, *gate)
        tstrides, tvector = (NO_STRIDES, 0) if tgate is None else gate_layout(plan, *tgate)
        self.tangents |= {
            "gate_strides": strides,
            "GATE_VECTOR": vector,
            "tgate_strides": tstrides,
            "TGATE_VECTOR": tvector,
        }

    def sums(self, shape: tuple[int, ...], like, of_gate: bool) -> tuple[Launch, int]:
        """The launch of sums of this shape, as `sums_of` has them, and the number of partial sums."""
        key = "sums", of_gate
        if key not in self.launches:
            programs, arguments, splits = sums_of(self.plan, "double_backward_bias", shape, like)
            arguments.update(self.tangents, OF_GATE=of_gate)
            self.launches[key] = Launch(second_order_pair_sums_kernel, programs, arguments), splits
        return self.launches[key]


def layout_of(x: Tensor | None) -> tuple | None:
    return None if x is None else (x.shape, x.stride(), x.element_size())


def launches_of(inputs: tuple, tangents: tuple, gate, tgate, dout, out, scalars: Scalars) -> GatedSecondOrderLaunches:
    """The launches for these tensors."""
    plan, layouts = plan_along(inputs, tangents, dout, out, longest_of(scalars), options_of(scalars))
    key = (*layouts, layout_of(gate), layout_of(tgate))
    if key not in plan.second_orders:
        plan.second_orders[key] = GatedSecondOrderLaunches(plan, *key)
    return plan.second_orders[key]


def _checked(tangents: GatedTangents, dout, dlse, saved: Saved, gate: Tensor) -> Tensors:
    """The tensors as kernels read them. Raises for those that do not fit."""
    tensors = checks.checked(saved.tensors, saved.scalars, tangents[:-1], (saved.out, dout), (saved.lse, dlse))
    check_gate(tensors, gate)
    if tangents.pair_gate is not None:
        same("the tangent of pair_gate", tangents.pair_gate, gate.shape, (gate.dtype,), tensors.q)
    return tensors


def jvp(tangents: GatedTangents, saved: Saved, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents of out and lse; those of the tensors may be None, for zero."""
    tensors, (_, out, lse, scalars) = _checked(tangents, None, None, saved, gate), saved
    tq, tk, tv, tbias, tweight, tgate = tangents
    tq, tk, tv, out, lse = inner(tq), inner(tk), inner(tv), inner(out), lse.contiguous()
    tout, mean = empty_like_layout(tensors.q, out.shape), torch.empty_like(lse)
    if tout.numel() == 0 or tensors.k.shape[-2] == 0 or all(t is None for t in tangents):
        return tout.zero_(), mean.zero_()
    inputs, along = tuple(tensors), (tq, tk, tv, tbias, tweight)
    second = launches_of(inputs, along, gate, tgate, None, out, scalars)
    if second.plan.wide is not None:
        second.plan.wide.tangents(second.wide, along, inputs, lse, tout, mean, (gate, tgate))
        return tout, mean
    second.jvp(tout)(inputs, along, gate, tgate, out, lse, None, None, tout, mean, None, None)
    return tout, mean


def double_backward(tangents: GatedTangents, dout, dlse, saved: Saved, gate: Tensor, wanted: int) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, bias, key weights, gate, dout, dlse for the cotangents tq, ... of the first six's gradients
    (None: zero); those that `wanted` does not name are empty."""
    tensors, (_, out, lse, scalars) = _checked(tangents, dout, dlse, saved, gate), saved
    q, k, v, bias, weight = tensors[:5]
    tq, tk, tv, tbias, tweight, tgate = tangents
    need_bias = bias is not None and bool(wanted & NEED_BIAS)
    need_weight = weight is not None and bool(wanted & NEED_KEY_WEIGHT)
    tq, tk, tv, out, lse = inner(tq), inner(tk), inner(tv), inner(out), lse.contiguous()
    dout = torch.zeros_like(out) if dout is None else inner(dout)
    dlse = None if dlse is None else dlse.contiguous()
    gq, gk, gv = (
        empty_like_layout(x, x.shape) if wanted & bit else None for x, bit in ((q, NEED_Q), (k, NEED_K), (v, NEED_V))
    )
    tout, mean = empty_like_layout(q, out.shape), torch.empty_like(lse)
    gbias = gweight = ggate = None
    if tout.numel() == 0 or k.shape[-2] == 0 or all(t is None for t in tangents):
        for x in (gq, gk, gv, tout, mean):
            if x is not None:
                x.zero_()
        gbias = torch.zeros_like(bias, memory_format=torch.contiguous_format) if need_bias else None
        gweight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if need_weight else None
        ggate = gate.new_zeros(gate.shape) if wanted & NEED_GATE else None
        return _results(tensors, gate, lse, (gq, gk, gv, gbias, gweight, ggate, tout, mean), wanted)
    inputs, along = tuple(tensors), (tq, tk, tv, tbias, tweight)
    second = launches_of(inputs, along, gate, tgate, dout, out, scalars)
    p = second.plan
    if p.wide is not None:
        rows = gq, gk, gv, tout if wanted & NEED_GATED_DOUT else None
        gbias, gweight, ggate = p.wide.double_backward(
            second.wide,
            along,
            dout,
            dlse,
            inputs,
            out,
            lse,
            rows,
            mean,
            without_gate(wanted),
            (gate, tgate),
            bool(wanted & NEED_GATE),
        )
        return _results(tensors, gate, lse, (*rows[:3], gbias, gweight, ggate, tout, mean), wanted)
    use, gbias, sums, shared = bias_route(p, bias, lse) if need_bias else NO_ROUTE
    weight_sums = p.weight_sums(q) if need_weight else None
    delta, zeta = torch.empty_like(lse), torch.empty_like(lse)
    second.jvp(tout)(inputs, along, gate, tgate, out, lse, dout, dlse, tout, mean, delta, zeta)
    common = (inputs, along, gate, tgate, lse, dout, mean, delta, zeta)
    if gq is not None or use:
        second.queries(gq, use, gbias)(*common, gq, gbias)
    if not (gk is gv is sums is weight_sums is None):
        second.keys(gk, gv, sums is not None)(*common, gk, gv, sums, weight_sums)
    if shared:
        run, splits = second.sums(tuple(bias.shape), bias, False)
        gbias = bias_parts(p, bias, splits)
        run(*common, gbias)
    gbias = bias_result(bias, use, gbias, sums, shared) if need_bias else None
    gweight = None if weight_sums is None else reduce_to(weight_sums, weight)
    if wanted & NEED_GATE:
        shape, like = room_of(p, gate)
        run, splits = second.sums(shape, like, True)
        parts = sums_for(gate, shape, splits)
        run(*common, parts)
        ggate = reduce_to(parts[0] if splits == 1 else parts.sum(0), gate)
    return _results(tensors, gate, lse, (gq, gk, gv, gbias, gweight, ggate, tout, mean), wanted)


def _results(tensors: Tensors, gate: Tensor, lse: Tensor, found: tuple, wanted: int) -> tuple[Tensor, ...]:
    """The results of the raw op: an empty tensor for None, and for tout and mean where `wanted` does not name them."""
    q, k, v, bias, weight = tensors[:5]
    *gradients, tout, mean = found
    likes = (q, k, v, q if bias is None else bias, q if weight is None else weight, gate)
    return (
        *(like.new_empty(0) if x is None else x for x, like in zip(gradients, likes, strict=True)),
        tout if wanted & NEED_GATED_DOUT else q.new_empty(0),
        mean if wanted & NEED_GATED_DLSE else lse.new_empty(0),
    )
