"""Launches of the second order: tangents of the forward, and gradients of the backward's gradients."""

import torch

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.backward_queries import COLUMN_SUMS
from flashsci.backends.triton.kernels.double_backward_bias import double_backward_bias_kernel
from flashsci.backends.triton.kernels.double_backward_keys import double_backward_keys_kernel
from flashsci.backends.triton.kernels.double_backward_queries import double_backward_queries_kernel
from flashsci.backends.triton.kernels.double_backward_small import double_backward_small_kernel
from flashsci.backends.triton.kernels.groups import TangentStrides
from flashsci.backends.triton.kernels.jvp import jvp_kernel
from flashsci.backends.triton.kernels.scores import ABSENT, KEY, PLANE
from flashsci.backends.triton.kernels.wide_double_backward import wide_double_backward_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.bias import (
    NO_ROUTE,
    bias_parts,
    bias_result,
    bias_route,
    reduce_to,
)
from flashsci.backends.triton.plans.dense import DensePlan, longest_class, longest_of, options_of, plan_of
from flashsci.backends.triton.plans.strides import (
    NO_STRIDES,
    plane_strides,
    plane_vector,
    strides_of,
    weight_strides,
)
from flashsci.backends.triton.plans.wide import Section, Wide
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_DLSE,
    NEED_DOUT,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Tangents,
    Tensors,
    empty_like_layout,
)


def inner(x):
    """x with a contiguous last dim."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def bias_layout(plan: DensePlan, tbias: tuple | None) -> tuple[int, int, tuple[int, ...]]:
    """Kind, vector and strides of the tangent of a bias, given its shape, strides and bytes of a number; None: absent."""
    if tbias is None:
        return ABSENT.value, 0, NO_STRIDES
    shape, stride, itemsize = tbias
    strides = plane_strides(shape, stride, plan.ragged)
    kind = PLANE.value if plan.ragged or strides[3] != 0 else KEY.value
    return kind, plane_vector(strides, plan.size_k, itemsize, plan.varlen), strides


class SecondOrderLaunches:
    """The launches of one plan for one layout of the tangents of bias and key weights."""

    jvp_kernel, queries_kernel, keys_kernel = jvp_kernel, double_backward_queries_kernel, double_backward_keys_kernel
    wide_kernel = wide_double_backward_kernel
    gated = False  # whether tiles of a gate stream

    def __init__(self, plan: DensePlan, tbias, tweight):
        self.plan = plan
        self.launches: dict = {}
        self.small = tilings.double_backward_small_config(plan.device.capability, plan.dtype, plan.width, plan.longest)
        kind, vector, strides = bias_layout(plan, tbias)
        _q, _k, _v, self.dout_strides, self.out_strides, *rows = plan.strides
        self.weighted = tweight is not None
        of_weights = NO_STRIDES[:4] if tweight is None else weight_strides(*tweight)
        self.tangents = {
            "tangent_strides": TangentStrides(*rows, strides, of_weights),
            "dout_strides": self.dout_strides,
            "TBIAS": kind,
            "TBIAS_VECTOR": vector,
        }

    def jvp(self, tout) -> Launch:
        if "jvp" not in self.launches:
            programs, arguments = self.plan.scheduled("jvp", self.gated)
            arguments.update(self.tangents, out_strides=self.out_strides, tout_strides=strides_of(tout))
            if self.weighted:  # Triton 3.6 cannot compile some of these for one warp
                arguments["num_warps"] = max(2, arguments["num_warps"])
            self.launches["jvp"] = Launch(self.jvp_kernel, programs, arguments)
        return self.launches["jvp"]

    def queries(self, gq, use: int, gbias) -> Launch:
        key = "queries", gq is None, use
        if key not in self.launches:
            programs, arguments = self.plan.scheduled("double_backward_queries", self.gated)
            arguments.update(
                self.tangents,
                gq_strides=strides_of(gq),
                gbias_strides=self.plan.gradient_strides(gbias, use),
                BIAS_GRADIENT=use,
                GBIAS_VECTOR=self.plan.gradient_vector(gbias),
            )
            self.launches[key] = Launch(self.queries_kernel, programs, arguments)
        return self.launches[key]

    def keys(self, gk, gv, column_sums: bool) -> Launch:
        key = "keys", gk is None, gv is None, column_sums
        if key not in self.launches:
            programs, arguments = self.plan.scheduled("double_backward_keys", self.gated)
            arguments.update(self.tangents, gk_strides=strides_of(gk), gv_strides=strides_of(gv))
            self.launches[key] = Launch(self.keys_kernel, programs, arguments)
        return self.launches[key]

    def whole(self, gq, gk, gv, tout, use: int, gbias) -> Launch:
        """The launch for sequences that fit in one tile."""
        key = "whole", gq is None, gk is None, gv is None, use
        if key not in self.launches:
            programs, arguments = self.plan.whole(self.small)
            arguments.update(
                self.tangents,
                out_strides=self.out_strides,
                tout_strides=strides_of(tout),
                gq_strides=strides_of(gq),
                gk_strides=strides_of(gk),
                gv_strides=strides_of(gv),
                gbias_strides=self.plan.gradient_strides(gbias, use),
                BIAS_GRADIENT=use,
                GBIAS_VECTOR=self.plan.gradient_vector(gbias),
            )
            self.launches[key] = Launch(double_backward_small_kernel, programs, arguments)
        return self.launches[key]

    def wide(self, wide: Wide, part: Section) -> Launch:
        """The launch between products of whole heads of a section."""
        key = "wide", part.first, part.count
        if key not in self.launches:
            tangents = {name: x for name, x in self.tangents.items() if name != "dout_strides"}
            self.launches[key] = wide.of_scores(self.wide_kernel, part, 2, **tangents)
        return self.launches[key]

    def bias(self, gbias) -> tuple[Launch, int]:
        """The launch for a bias that heads or batch members share, and its number of partial sums."""
        if "bias" not in self.launches:
            programs, arguments, splits = self.plan.shared("double_backward_bias")
            arguments.update(
                self.tangents,
                gbias_strides=self.plan.parts_strides(),
                GBIAS_VECTOR=self.plan.gradient_vector(gbias),
            )
            made = Launch(double_backward_bias_kernel, programs, arguments)
            self.launches["bias"] = made, splits
        return self.launches["bias"]


def plan_along(inputs: tuple, tangents: tuple, dout, out, *rest) -> tuple[DensePlan, tuple]:
    """The plan for these tensors (in the order of Inputs and Tangents), and the layouts of the tangents of bias and key weights.
    An absent tangent or dout has the layout of its tensor."""
    q, k, v = inputs[:3]
    tq, tk, tv, tbias, tweight = tangents
    dout, tq, tk, tv = (like if x is None else x for x, like in ((dout, out), (tq, q), (tk, k), (tv, v)))
    plan = plan_of((q, k, v, dout, out, tq, tk, tv), inputs, *rest)
    key = (
        None if tbias is None else (tbias.shape, tbias.stride(), tbias.element_size()),
        None if tweight is None else (tweight.shape, tweight.stride()),
    )
    return plan, key


def second_order_of(*given) -> SecondOrderLaunches:
    """The launches for the tensors of `plan_along`."""
    plan, key = plan_along(*given)
    if key not in plan.second_orders:
        plan.second_orders[key] = SecondOrderLaunches(plan, *key)
    return plan.second_orders[key]


def jvp(tangents: Tangents, saved: Saved):
    """Tangents of out and lse; those of q, k, v, bias, key weights may be None, for zero."""
    tensors, out, lse, scalars = saved
    q, k = tensors[:2]
    tq, tk, tv, tbias, tweight = tangents
    tq, tk, tv, out, lse = inner(tq), inner(tk), inner(tv), inner(out), lse.contiguous()
    tout, mean = empty_like_layout(q, out.shape), torch.empty_like(lse)
    if tout.numel() == 0 or k.shape[-2] == 0 or (tq is tk is tv is tbias is tweight is None):
        return tout.zero_(), mean.zero_()
    inputs = tuple(tensors)
    tangents = (tq, tk, tv, tbias, tweight)
    second = second_order_of(inputs, tangents, None, out, longest_of(scalars), options_of(scalars))
    if second.plan.wide_second is not None:
        second.plan.wide_second.tangents(second.wide, tangents, inputs, lse, tout, mean)
        return tout, mean
    second.jvp(tout)(inputs, tangents, out, lse, None, None, tout, mean, None, None)
    return tout, mean


def double_backward(tangents: Tangents, dout, dlse, saved: Saved, need: int):
    """Gradients of q, k, v, bias, key weights, dout, dlse for the cotangents tq, ... of the first five's gradients
    (None: zero); those that `need` does not name are empty."""
    tensors, out, lse, scalars = saved
    q, k, v, bias, weight = tensors[:5]
    tq, tk, tv, tbias, tweight = tangents
    need_bias = bias is not None and bool(need & NEED_BIAS)
    need_weight = weight is not None and bool(need & NEED_KEY_WEIGHT)
    tq, tk, tv, out, lse = inner(tq), inner(tk), inner(tv), inner(out), lse.contiguous()
    dout = torch.zeros_like(out) if dout is None else inner(dout)
    dlse = None if dlse is None else dlse.contiguous()
    gq = empty_like_layout(q, q.shape) if need & NEED_Q else None
    gk = empty_like_layout(k, k.shape) if need & NEED_K else None
    gv = empty_like_layout(v, v.shape) if need & NEED_V else None
    tout, mean = empty_like_layout(q, out.shape), torch.empty_like(lse)
    if tout.numel() == 0 or k.shape[-2] == 0 or (tq is tk is tv is tbias is tweight is None):
        for x in (gq, gk, gv, tout, mean):
            if x is not None:
                x.zero_()
        gbias = torch.zeros_like(bias) if need_bias else None
        gweight = torch.zeros_like(weight) if need_weight else None
    else:
        inputs = tuple(tensors)
        tangents = (tq, tk, tv, tbias, tweight)
        longest = longest_class(scalars.max_seqlen_q, scalars.max_seqlen_k)
        second = second_order_of(inputs, tangents, dout, out, longest, options_of(scalars))
        p = second.plan
        if p.wide_second is not None:
            rows = gq, gk, gv, tout if need & NEED_DOUT else None
            gbias, gweight, _ = p.wide_second.double_backward(
                second.wide, tangents, dout, dlse, inputs, out, lse, rows, mean, need
            )
            return results(tensors, lse, (*rows[:3], gbias, gweight, tout, mean), need)
        use, gbias, sums, shared = bias_route(p, bias, lse) if need_bias else NO_ROUTE
        weight_sums = p.weight_sums(q) if need_weight else None
        if second.small and not shared:
            kind = use if sums is None else COLUMN_SUMS.value
            second.whole(gq, gk, gv, tout, kind, gbias)(
                inputs, tangents, out, lse, dout, dlse, gq, gk, gv, gbias if sums is None else sums, weight_sums, tout, mean
            )  # fmt: skip
        else:
            delta, zeta = torch.empty_like(lse), torch.empty_like(lse)
            second.jvp(tout)(inputs, tangents, out, lse, dout, dlse, tout, mean, delta, zeta)
            common = (inputs, tangents, lse, dout, mean, delta, zeta)
            if gq is not None or use:
                second.queries(gq, use, gbias)(*common, gq, gbias)
            if gk is not None or gv is not None or sums is not None or need_weight:
                second.keys(gk, gv, sums is not None)(*common, gk, gv, sums, weight_sums)
            if shared:
                run, splits = second.bias(bias)
                gbias = bias_parts(p, bias, splits)
                run(*common, gbias)
        gbias = bias_result(bias, use, gbias, sums, shared) if need_bias else None
        gweight = None if weight_sums is None else reduce_to(weight_sums, weight)
    return results(tensors, lse, (gq, gk, gv, gbias, gweight, tout, mean), need)


def results(tensors: Tensors, lse, found: tuple, need: int) -> tuple:
    """The results of the raw op: an empty tensor for None, and for tout and mean where `need` does not name them."""
    q, k, v, bias, weight = tensors[:5]
    *gradients, tout, mean = found
    likes = (q, k, v, q if bias is None else bias, q if weight is None else weight)
    return (
        *(like.new_empty(0) if x is None else x for x, like in zip(gradients, likes, strict=True)),
        tout if need & NEED_DOUT else q.new_empty(0),
        mean if need & NEED_DLSE else lse.new_empty(0),
    )
