"""Launches of residual attention: tile sizes, what is kept for calls that are alike, and its raw ops."""

import math

import torch
import triton
from torch import Tensor

from flashsci import residual_ops
from flashsci.residual_ops import (
    Kernels,
    ResidualCall,
    empty_gradients,
    empty_results,
    scores_dtype,
)

from . import checks
from .arguments import Schedule
from .host import Plan, plan_of, rows_of
from .host_launch import Launch
from .host_strides import strides4
from .residual_backward import residual_backward_kernel, residual_queries_kernel
from .residual_forward import residual_forward_kernel


def tiles(
    kernel: str, capability: tuple[int, int] | None, fp32: bool, width: int, length_k: int
) -> tuple[int, ...]:
    """(BLOCK_M, BLOCK_N, warps, stages[, registers a thread at most]); width: of the wider head dim."""
    if capability is None:
        return 32, 16, 4, 1
    if capability < (8, 0):
        return (32, 32, 4, 1) if width <= (32 if fp32 else 64) else (16, 16, 4, 1)
    hopper = capability[0] == 9
    if kernel == "queries":
        if fp32 and not hopper:
            return 32, 32, 4, 2
        return (64, 64, 4, 2) if width <= 32 or (width <= 64 and not fp32) else (32, 32, 4, 2)
    if kernel == "forward":
        if fp32:
            if width <= 16:
                return 64, 32, 2, 2
            return (64, 32, 4, 2) if width <= 32 or (width <= 64 and hopper) else (32, 32, 4, 1)
        if width <= 16:
            return 64, 64, 4, 2, 128
        return (64, 64, 4, 2) if width <= 32 else (64, 32, 4, 2)
    # Two warps: rows of P^T and dS^T go to tensor cores from registers, where four on Hopper write them for wgmma first.
    if fp32:
        if width <= 16 and hopper:
            return (64, 64, 4, 1) if length_k <= 64 else (16, 128, 4, 3)
        return (32, 64, 4, 1) if width <= 32 and hopper else (32, 32, 4, 1) if width <= 64 else (16, 32, 4, 1)  # fmt: skip
    if width <= 16:
        return (64, 64, 2, 2) if length_k > 64 else (32, 64, 2, 2)
    return (32, 64, 4, 1) if width <= 64 else (32, 32, 4, 1)


class Launches:
    """Of tensors of one signature, by name."""

    def __init__(self, plan: Plan, dtype: torch.dtype):
        self.plan = plan
        d, v = plan.arguments["D"], plan.arguments["V"]
        self.width = max(d.W0 + d.W1, v.W0 + v.W1)
        self.vector = math.gcd(plan.size_k, 16 // dtype.itemsize)  # scores of a row in one load

    def __call__(self, name: str, kernel, **strided: Tensor) -> Launch:
        """The launch of a kernel. strided: results and gradients with rows, by the kernel's name of them."""
        p = self.plan
        m, n, warps, stages, *registers = tiles(
            name, p.device.capability, p.dtype == torch.float32, self.width, p.size_k
        )
        by_keys = name == "backward"
        count = -(-p.size_k // n) if by_keys else -(-p.size_q // m)
        heads = p.batch * (p.heads_k if by_keys else p.heads)
        arguments = {k: x for k, x in p.arguments.items() if k in kernel.arg_names}
        arguments |= {f"{k}_strides": strides4(x.stride()) for k, x in strided.items()}
        arguments |= {
            "schedule": Schedule(count, 1, heads), "VECTOR": self.vector, "BLOCK_M": m, "BLOCK_N": n,
            "num_warps": warps, "num_stages": stages,
        }  # fmt: skip
        if registers:
            arguments["maxnreg"] = registers[0]
        return Launch(kernel, count * heads, arguments)


def inputs_of(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed: Tensor | None
) -> tuple[Tensor | None, ...]:
    """In the order of Inputs."""
    return q, k, v, bias, None, None, None, None, None, seed, None


def plan_for(call: ResidualCall, *more: Tensor) -> Plan:
    """more: what has rows besides."""
    _, _, *options, _ = call.scalars
    return plan_of((*call[:3], *more), inputs_of(*call[:5]), 0, options)


def alike(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype


class Forward:
    """out, lse, scores of tensors of one signature."""

    def __init__(self, plan: Plan, call: ResidualCall):
        results = empty_results(call)
        self.results, self.device = [alike(x) for x in results], call.q.device
        launches = Launches(plan, results[2].dtype)
        self.run = None if plan.empty else launches("forward", residual_forward_kernel, out=results[0])  # fmt: skip

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """tensors: the first five of a ResidualCall."""
        out, lse, scores = [
            torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            for shape, stride, dtype in self.results
        ]
        if self.run is None:
            out.zero_(), lse.fill_(-torch.inf)
        else:
            self.run(inputs_of(*tensors), out, lse, scores)
        return out, lse, scores


class Backward:
    """dq, dk, dv and the gradient of the whole scores (None unless wanted), likewise."""

    def __init__(self, plan: Plan, dout: Tensor, call: ResidualCall, out: Tensor, need_bias: bool):
        dtype = scores_dtype(call.q, call.bias)
        dq, dk, dv, _ = empty_gradients(call, False)
        self.rows, self.device = [alike(x) for x in (dq, dk, dv)], call.q.device
        self.run = self.queries = None
        self.scores = call.score_shape, dtype
        launches = Launches(plan, dtype)
        if not plan.empty:
            self.run = launches("backward", residual_backward_kernel, dout=dout, out=out, dq=dq, dk=dk, dv=dv)  # fmt: skip
            if self.run.arguments["schedule"].tiles > 1:  # else one tile has all keys
                self.queries = launches("queries", residual_queries_kernel, dq=dq)
        self.stored = need_bias or self.queries is not None
        self.need_bias = need_bias

    def __call__(self, dout, dscores, tensors, out, lse, scores) -> tuple[Tensor | None, ...]:
        dq, dk, dv = [
            torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            for shape, stride, dtype in self.rows
        ]
        shape, dtype = self.scores
        change = torch.empty(shape, dtype=dtype, device=self.device) if self.stored else None
        if self.run is None:
            for x in (dq, dk, dv):
                x.zero_()
            return dq, dk, dv, change
        inputs = inputs_of(*tensors)
        whole = self.queries is None
        self.run(inputs, dout, out, lse, scores, dscores, change, dq if whole else None, dk, dv)
        if self.queries is not None:
            self.queries(inputs, change, dq)
        return dq, dk, dv, change if self.need_bias else None


def forward_of(call: ResidualCall) -> Forward:
    plan = plan_for(call)
    key = "residual forward", scores_dtype(call.q, call.bias)
    if key not in plan.launches:
        plan.launches[key] = Forward(plan, call)
    return plan.launches[key]


def backward_of(dout: Tensor, call: ResidualCall, out: Tensor, need_bias: bool) -> Backward:
    plan = plan_for(call, dout, out)
    key = "residual backward", scores_dtype(call.q, call.bias), need_bias
    if key not in plan.launches:
        plan.launches[key] = Backward(plan, dout, call, out, need_bias)
    return plan.launches[key]


class Prepared:
    """Both for tensors of one signature; backwards by the signature of what they are given."""

    def __init__(self, call: ResidualCall):
        checks.checked(call.tensors, call.scalars)
        self.options = call[5:]
        self.forward = forward_of(call)
        self.backwards: dict[tuple, Backward] = {}

    def backward(self, dout, dscores, tensors, out, lse, scores, need_bias: bool):
        """Of plain tensors."""
        dout, out = rows_of(dout, out), rows_of(out, out)
        key = need_bias, *[None if x is None else (x.shape, x.stride(), x.dtype) for x in (*tensors, dout, out)]  # fmt: skip
        run = self.backwards.get(key)
        if run is None:
            call = ResidualCall(*tensors, *self.options)
            check(dout, dscores, call, out, lse, scores)
            if len(self.backwards) >= 64:
                self.backwards.clear()
            run = self.backwards[key] = backward_of(dout, call, out, need_bias)
        dscores = None if dscores is None else dscores.contiguous()
        return run(dout, dscores, tensors, out, lse.contiguous(), scores)


def check(dout, dscores, call: ResidualCall, out, lse, scores) -> None:
    """Of a backward's tensors."""
    checks.checked(call.tensors, call.scalars, (), (out, dout), (lse,))
    dtype = scores_dtype(call.q, call.bias)
    for name, x in (("scores", scores), ("dscores", dscores)):
        if x is not None:
            checks._same(name, x, call.score_shape, (dtype,), call.q)


def forward(call: ResidualCall) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, scores."""
    checks.checked(call.tensors, call.scalars)
    return forward_of(call)(*call[:5])


def backward(dout, dscores, call: ResidualCall, out, lse, scores, need_bias: bool):
    """dq, dk, dv and the gradient of the whole scores, empty unless ``need_bias``."""
    check(dout, dscores, call, out, lse, scores)
    exact = scores if scores_dtype(call.q, call.bias) == torch.float32 else None
    dout, out = rows_of(dout, out), rows_of(out, out)
    dscores = None if dscores is None else dscores.contiguous()
    run = backward_of(dout, call, out, need_bias)
    *rows, change = run(dout, dscores, call[:5], out, lse.contiguous(), exact)
    empty = call.q.new_empty(0, dtype=run.scores[1])
    return *rows, empty if change is None else change


_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
OPS = residual_ops.define("triton", Kernels(forward, backward, Prepared), _KEYS)
