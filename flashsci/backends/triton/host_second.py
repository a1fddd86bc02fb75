"""Launches of the second order: tangents of the forward, and gradients of the backward's gradients."""

import torch

from flashsci.ops import (
    NEED_BIAS,
    NEED_DLSE,
    NEED_DOUT,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Tangents,
    empty_like_layout,
)

from . import launch
from .host import (
    COLUMN_SUMS,
    NO_ROUTE,
    NO_STRIDES,
    STORE,
    Launch,
    Plan,
    bias_parts,
    bias_result,
    bias_route,
    longest_class,
    on_device_of,
    plan_of,
    plane_strides,
    plane_vector,
    strides4,
    weight_result,
    weight_strides,
)
from .jvp import jvp_kernel
from .second_bias import second_bias_kernel
from .second_keys import second_keys_kernel
from .second_queries import second_queries_kernel
from .second_small import second_small_kernel
from .tile import ABSENT, KEY, PLANE

# In the order of the strides that a plan of the second order is made of.
STRIDED = ("q", "k", "v", "dout", "out", "tq", "tk", "tv")


def inner(x):
    """x with a contiguous last dim."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


class Second:
    """The launches of one plan for one layout of the tangents of bias and key weights."""

    def __init__(self, plan: Plan, tbias, tweight):
        self.plan = plan
        self.launches: dict = {}
        width = max(sum(plan.arguments[n] for n in names) for names in (("D0", "D1"), ("V0", "V1")))
        self.small = launch.second_small_config(
            plan.device.capability, plan.dtype, width, plan.longest
        )
        self.tangent: dict = {"tbias_strides": NO_STRIDES, "TBIAS": ABSENT.value, "TBIAS_VECTOR": 0}
        if tbias is not None:
            shape, stride, itemsize = tbias
            strides = plane_strides(shape, stride, plan.ragged)
            self.tangent = {
                "tbias_strides": strides,
                "TBIAS": PLANE.value if plan.ragged or strides[3] != 0 else KEY.value,
                "TBIAS_VECTOR": plane_vector(strides, plan.size_k, itemsize, plan.packed),
            }
        self.weighted = tweight is not None
        self.tangent["tweight_strides"] = (
            NO_STRIDES[:4] if tweight is None else weight_strides(*tweight)
        )

    def arguments(self, kernel: str, names: tuple[str, ...]) -> tuple[int, dict]:
        """Programs of a kernel and its arguments, with the strides of the tensors named."""
        programs, arguments = self.plan.tiles_of(kernel)
        strides = dict(zip(STRIDED, self.plan.strides, strict=True))
        arguments.update(self.tangent, **{f"{name}_strides": strides[name] for name in names})
        return programs, arguments

    def jvp(self, tout) -> Launch:
        if "jvp" not in self.launches:
            programs, arguments = self.arguments("jvp", STRIDED)
            arguments["tout_strides"] = strides4(tout.stride())
            if self.weighted:  # Triton 3.6 cannot compile some of these for one warp
                arguments["num_warps"] = max(2, arguments["num_warps"])
            self.launches["jvp"] = Launch(jvp_kernel, programs, arguments)
        return self.launches["jvp"]

    def queries(self, gq, use: int, gbias) -> Launch:
        key = "queries", gq is None, use
        if key not in self.launches:
            names = tuple(name for name in STRIDED if name != "out")
            programs, arguments = self.arguments("second_queries", names)
            arguments.update(
                gq_strides=NO_STRIDES[:4] if gq is None else strides4(gq.stride()),
                gbias_strides=plane_strides(gbias.shape, gbias.stride(), self.plan.ragged)
                if use == STORE.value
                else NO_STRIDES,
                BIAS_GRADIENT=use, GBIAS_VECTOR=self.plan.gradient_vector(gbias),
            )  # fmt: skip
            self.launches[key] = Launch(second_queries_kernel, programs, arguments)
        return self.launches[key]

    def keys(self, gk, gv, column_sums: bool) -> Launch:
        key = "keys", gk is None, gv is None, column_sums
        if key not in self.launches:
            names = tuple(name for name in STRIDED if name != "out")
            programs, arguments = self.arguments("second_keys", names)
            arguments.update(
                gk_strides=NO_STRIDES[:4] if gk is None else strides4(gk.stride()),
                gv_strides=NO_STRIDES[:4] if gv is None else strides4(gv.stride()),
                COLUMN_SUMS=column_sums,
            )  # fmt: skip
            self.launches[key] = Launch(second_keys_kernel, programs, arguments)
        return self.launches[key]

    def whole(self, gq, gk, gv, tout, use: int, gbias) -> Launch:
        """Of sequences that fit in one tile."""
        key = "whole", gq is None, gk is None, gv is None, use
        if key not in self.launches:
            p, (side, warps, *registers) = self.plan, self.small
            arguments = dict(p.arguments, **self.tangent)
            for name, stride in zip(STRIDED, p.strides, strict=True):
                arguments[f"{name}_strides"] = stride
            for name, x in (("gq", gq), ("gk", gk), ("gv", gv), ("tout", tout)):
                arguments[f"{name}_strides"] = NO_STRIDES[:4] if x is None else strides4(x.stride())
            arguments.update(
                gbias_strides=plane_strides(gbias.shape, gbias.stride(), p.ragged)
                if use == STORE.value
                else NO_STRIDES,
                heads=p.heads_k, BIAS_GRADIENT=use, GBIAS_VECTOR=p.gradient_vector(gbias),
                BLOCK=side, num_warps=warps, num_stages=1,
            )  # fmt: skip
            if registers:
                arguments["maxnreg"] = registers[0]
            programs = (p.sequences + 2 if p.packed else p.batch) * p.heads_k
            self.launches[key] = Launch(second_small_kernel, programs, arguments)
        return self.launches[key]

    def bias(self, gbias) -> tuple[Launch, int]:
        """The launch for a bias that heads or batch members share, and its number of partial sums."""
        if "bias" not in self.launches:
            names = tuple(name for name in STRIDED if name != "out")
            _, arguments = self.arguments("second_bias", names)
            programs, splits = self.plan.share(arguments)
            arguments["GBIAS_VECTOR"] = self.plan.gradient_vector(gbias)
            self.launches["bias"] = Launch(second_bias_kernel, programs, arguments), splits
        return self.launches["bias"]


def second_of(tensors, tbias, tweight, *rest) -> Second:
    """The launches for these tensors, in the order of STRIDED; an absent tangent is laid out like what it belongs to."""
    q, k, v, dout, out, tq, tk, tv = tensors
    dout, tq, tk, tv = (
        like if x is None else x for x, like in ((dout, out), (tq, q), (tk, k), (tv, v))
    )
    plan = plan_of((q, k, v, dout, out, tq, tk, tv), *rest)
    key = (
        None if tbias is None else (tbias.shape, tbias.stride(), tbias.element_size()),
        None if tweight is None else (tweight.shape, tweight.stride()),
    )
    if key not in plan.seconds:
        plan.seconds[key] = Second(plan, *key)
    return plan.seconds[key]


@on_device_of(1)
def jvp(tangents: Tangents, saved: Saved):
    """Tangents of out and lse; those of q, k, v, bias, key weights may be None, for zero."""
    tensors, out, lse, scalars = saved
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed = tensors
    tq, tk, tv, tbias, tweight = tangents
    _, _, *options, _ = scalars  # all kernels are deterministic
    tq, tk, tv, out, lse = inner(tq), inner(tk), inner(tv), inner(out), lse.contiguous()
    tout, mean = empty_like_layout(q, out.shape), torch.empty_like(lse)
    if tout.numel() == 0 or k.shape[-2] == 0 or (tq is tk is tv is tbias is tweight is None):
        return tout.zero_(), mean.zero_()
    second = second_of(
        (q, k, v, None, out, tq, tk, tv), tbias, tweight, bias, weight, mask, cu_seqlens_q, bias_offsets, 0, options
    )  # fmt: skip
    second.jvp(tout)(
        q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, out, lse, None, None,
        tq, tk, tv, tbias, tweight, tout, mean, None, None,
    )  # fmt: skip
    return tout, mean


@on_device_of(3)
def double_backward(tangents: Tangents, dout, dlse, saved: Saved, need: int):
    """Gradients of q, k, v, bias, key weights, dout, dlse for the cotangents tq, ... of the first five's gradients (None: zero);
    those that `need` does not name are empty."""
    tensors, out, lse, scalars = saved
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed = tensors
    tq, tk, tv, tbias, tweight = tangents
    max_seqlen_q, max_seqlen_k, *options, _ = scalars
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
        gbias = (q if bias is None else bias).new_zeros(bias.shape if need_bias else 0)
        gweight = torch.zeros_like(weight) if need_weight else weight_result(q, weight, None)
    else:
        second = second_of(
            (q, k, v, dout, out, tq, tk, tv), tbias, tweight, bias, weight, mask, cu_seqlens_q, bias_offsets,
            longest_class(max_seqlen_q, max_seqlen_k), options,
        )  # fmt: skip
        p = second.plan
        use, gbias, sums, shared = bias_route(p, bias, lse) if need_bias else NO_ROUTE
        weight_sums = p.weight_sums(q) if need_weight else None
        inputs = (
            q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed,
        )  # fmt: skip
        if second.small and not shared:
            kind = use if sums is None else COLUMN_SUMS.value
            second.whole(gq, gk, gv, tout, kind, gbias)(
                *inputs, out, lse, dout, dlse, tq, tk, tv, tbias, tweight, gq, gk, gv, gbias if sums is None else sums,
                weight_sums, tout, mean,
            )  # fmt: skip
        else:
            delta, zeta = torch.empty_like(lse), torch.empty_like(lse)
            second.jvp(tout)(
                *inputs, out, lse, dout, dlse, tq, tk, tv, tbias, tweight, tout, mean, delta, zeta
            )
            common = (*inputs, lse, dout, tq, tk, tv, tbias, tweight, mean, delta, zeta)
            if gq is not None or use:
                second.queries(gq, use, gbias)(*common, gq, gbias)
            if gk is not None or gv is not None or sums is not None or need_weight:
                second.keys(gk, gv, sums is not None)(*common, gk, gv, sums, weight_sums)
            if shared:
                run, splits = second.bias(bias)
                gbias = bias_parts(p, bias, splits)
                run(*common, gbias)
        gbias = bias_result(q, bias, use, gbias, sums, shared)
        gweight = weight_result(q, weight, weight_sums)
    return (
        *(q.new_empty(0) if x is None else x for x in (gq, gk, gv)),
        gbias,
        gweight,
        tout if need & NEED_DOUT else q.new_empty(0),
        mean if need & NEED_DLSE else lse.new_empty(0),
    )
