"""Launches of residual attention: tile sizes, the values kept for repeated calls, and its raw ops."""

import math

import torch
import triton
from torch import Tensor

from flashsci.backends.triton import checks
from flashsci.backends.triton.kernels.groups import Schedule
from flashsci.backends.triton.kernels.residual_backward import (
    residual_backward_kernel,
    residual_queries_kernel,
)
from flashsci.backends.triton.kernels.residual_forward import residual_forward_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.dense import DensePlan, options_of, plan_of, rows_of
from flashsci.backends.triton.plans.strides import plane_strides, strides4
from flashsci.call import residual_ops
from flashsci.call.op_checks import shapes
from flashsci.call.residual_ops import (
    MAX_HEAD_DIM,
    ResidualCall,
    ResidualKernels,
    empty_gradients,
    empty_results,
    scores_dtype,
)

# (BLOCK_M, BLOCK_N, warps, stages[, registers a thread at most]) up to a width, in 16 bits and in fp32. With two
# warps, rows of P^T and dS^T go to tensor cores from registers; four warps with 64 rows write them to shared memory
# for wgmma first. docs/develop/kernels/logs/triton.md has the times.
HOPPER = {
    "forward": {
        16: ((64, 64, 4, 3, 128), (64, 32, 4, 3, 128)),
        32: ((64, 64, 4, 3, 128), (64, 32, 4, 3, 168)),
        64: ((64, 64, 4, 3), (64, 32, 4, 3)),
        128: ((64, 64, 4, 2), (128, 64, 8, 1)),
    },
    "backward": {
        16: ((32, 64, 2, 3), (16, 128, 4, 3, 168)),
        32: ((32, 64, 2, 3), (16, 128, 4, 2)),
        64: ((64, 64, 4, 3), (16, 32, 2, 2)),
        128: ((128, 64, 8, 1), (16, 32, 4, 2)),
    },
    "queries": {
        32: ((64, 64, 4, 2), (64, 32, 4, 3)),
        64: ((64, 64, 4, 3), (64, 32, 2, 3)),
        128: ((128, 64, 4, 3), (32, 32, 4, 2)),
    },
}
OTHERS = {
    "forward": {
        16: ((64, 64, 4, 2, 128), (64, 32, 2, 2)),
        32: ((64, 64, 4, 2), (64, 32, 4, 2)),
        128: ((64, 32, 4, 2), (32, 32, 4, 1)),
    },
    "backward": {
        16: ((32, 64, 2, 2), (32, 32, 4, 1)),
        64: ((32, 64, 4, 1), (32, 32, 4, 1)),
        128: ((32, 32, 4, 1), (16, 32, 4, 1)),
    },
    "queries": {
        64: ((64, 64, 4, 2), (32, 32, 4, 2)),
        128: ((32, 32, 4, 2), (32, 32, 4, 2)),
    },
}
# Tiles where the last one would be mostly empty: half the rows forward, half the columns backward, a tenth slower a
# score.
HALVED = {
    (64, 64, 4, 3, 128): (32, 64, 2, 3, 128),
    (16, 128, 4, 3, 168): (32, 64, 4, 2, 168),
    (16, 128, 4, 2): (32, 64, 4, 2),
}


def tiles(
    kernel: str,
    capability: tuple[int, int] | None,
    fp32: bool,
    precision: str,
    width: int,
    length: int,
) -> tuple[int, ...]:
    """Tiles from the tables. width: that of the wider head dim; length: that of the dim a program owns tiles of:
    backward keys, else queries."""
    if capability is None:
        return 32, 16, 4, 1
    if capability < (8, 0):
        return (32, 32, 4, 1) if width <= (32 if fp32 else 64) else (16, 16, 4, 1)
    # Without tensor cores ("ieee") large tiles of the Hopper table spill.
    hopper = capability[0] == 9 and not (fp32 and precision == "ieee")
    if hopper and kernel == "backward" and fp32 and width <= 16 and length <= 64:
        return 64, 64, 4, 1
    table = (HOPPER if hopper else OTHERS)[kernel]
    found: tuple[int, ...] = table[min(w for w in table if w >= width)][fp32]
    if found in HALVED:
        own = found[kernel == "backward"]
        rest = length % own
        if 0 < rest <= own // 2 and length < 8 * own:
            return HALVED[found]
    return found


class Launches:
    """The launches for tensors of one signature."""

    def __init__(self, plan: DensePlan, call: ResidualCall):
        self.plan = plan
        d, v = plan.arguments["D"], plan.arguments["V"]
        self.width = max(d.W0 + d.W1, v.W0 + v.W1)
        self.vector = 16 // scores_dtype(call.q, call.bias).itemsize

    def __call__(self, name: str, kernel, pieces: int, **strided: Tensor) -> Launch:
        """The launch of a kernel. pieces: those of the bias (`pieces_of`); strided: results and gradients with rows,
        by their names in the kernel."""
        p = self.plan
        by_keys = name == "backward"
        m, n, warps, stages, *registers = tiles(
            name,
            p.device.capability,
            p.dtype == torch.float32,
            p.arguments["PRECISION"],
            self.width,
            p.size_k if by_keys else p.size_q,
        )
        count = -(-p.size_k // n) if by_keys else -(-p.size_q // m)
        heads = p.batch * (p.heads_k if by_keys else p.heads)
        arguments = p.arguments | {
            "schedule": Schedule(count, 1, heads),
            "VECTOR": self.vector,
            "BIAS_VECTOR": pieces,
            "BLOCK_M": m,
            "BLOCK_N": n,
        }
        arguments |= {f"{k}_strides": strides4(x.stride()) for k, x in strided.items()}
        arguments = {k: x for k, x in arguments.items() if k in kernel.arg_names}
        arguments |= {"num_warps": warps, "num_stages": stages}
        if registers:
            arguments["maxnreg"] = registers[0]
        return Launch(kernel, count * heads, arguments)

    def delta(self) -> Launch:
        """The launch of `delta_kernel`, for references of unscaled scores."""
        found = self.plan.delta()
        return Launch(found.kernel, found.programs, found.arguments | {"FOLD": False})


def pieces_of(bias: Tensor | None) -> int:
    """The numbers, up to 16 bytes, of whose multiples rows of a bias begin; 0: its keys are not neighbours."""
    if bias is None:
        return 0
    *strides, column = plane_strides(bias.shape, bias.stride(), False)
    if column != 1:
        return 0
    return math.gcd(16 // bias.element_size(), *strides, bias.data_ptr() // bias.element_size())


def inputs_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in the order of Inputs."""
    return q, k, v, bias, None, None, None, None, None, seed, None, None


def plan_for(call: ResidualCall, *more: Tensor) -> DensePlan:
    """The plan of a call. more: further tensors with rows."""
    return plan_of((*call[:3], *more), inputs_of(*call[:5]), 0, options_of(call.scalars))


def alike(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype, x.device


def room(shape, stride, dtype, device) -> Tensor:
    """An empty tensor for scores, with memory up to the padded end of the last row, which kernels write."""
    if len(shape) < 2 or stride[-2] == shape[-1]:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    memory = torch.empty(shape[0] * stride[0], dtype=dtype, device=device)
    # autograd must not see a view: users may write to it.
    return torch.empty(0, dtype=dtype, device=device).set_(
        memory.untyped_storage(), memory.storage_offset(), shape, stride
    )


class ResidualForward:
    """A function that computes out, lse, scores of tensors of one signature."""

    def __init__(self, plan: DensePlan, call: ResidualCall):
        *self.rows, self.scores = (alike(x) for x in empty_results(call))
        self.empty, self.launches = plan.empty, Launches(plan, call)
        self.runs: dict[int, Launch] = {}  # by the pieces of the bias

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse, scores. tensors: the first five of a ResidualCall."""
        out, lse = [torch.empty_strided(x, y, dtype=z, device=d) for x, y, z, d in self.rows]
        scores = room(*self.scores)
        if self.empty:
            out.zero_(), lse.fill_(-torch.inf)
            return out, lse, scores
        pieces = pieces_of(tensors[3])
        run = self.runs.get(pieces)
        if run is None:
            run = self.launches("forward", residual_forward_kernel, pieces, out=out)
            self.runs[pieces] = run
        run(inputs_of(*tensors), out, lse, scores)
        return out, lse, scores


class ResidualBackward:
    """A function that computes dq, dk, dv and the gradient of the whole scores (None unless wanted) for one
    signature."""

    def __init__(self, plan: DensePlan, call: ResidualCall, need_bias: bool):
        dq, dk, dv, change = empty_gradients(call, True)
        self.rows = [alike(x) for x in (dq, dk, dv)]
        self.change, self.need_bias = alike(change), need_bias
        self.empty, self.launches = plan.empty, Launches(plan, call)
        self.runs: dict[int, tuple[Launch, Launch | None]] = {}
        self.prepare = self.launches.delta()

    def __call__(self, dout, dscores, tensors, out, lse, scores) -> tuple[Tensor | None, ...]:
        dq, dk, dv = [torch.empty_strided(x, y, dtype=z, device=d) for x, y, z, d in self.rows]
        if self.empty:
            return dq.zero_(), dk.zero_(), dv.zero_(), room(*self.change)
        inputs, pieces = inputs_of(*tensors), pieces_of(tensors[3])
        if pieces not in self.runs:
            strided = {"dout": dout, "out": out, "dq": dq, "dk": dk, "dv": dv}
            first = self.launches("backward", residual_backward_kernel, pieces, **strided)
            whole = first.arguments["schedule"].tiles == 1  # one tile has all keys
            second = None if whole else self.launches("queries", residual_queries_kernel, pieces, dq=dq)
            self.runs[pieces] = first, second
        run, queries = self.runs[pieces]
        change = room(*self.change) if self.need_bias or queries is not None else None
        early = dq if queries is None else None
        scores, dscores = self.in_rows(scores), self.in_rows(dscores)
        delta = None
        if queries is not None:  # several programs would compute it again
            reference, delta = torch.empty_like(lse), torch.empty_like(lse)
            self.prepare(dout, out, lse, None, reference, delta)
            out, lse = None, reference
        run(inputs, dout, out, lse, delta, scores, dscores, change, early, dk, dv)
        if queries is not None:
            queries(inputs, change, dq)
        return dq, dk, dv, change if self.need_bias else None

    def in_rows(self, x: Tensor | None) -> Tensor | None:
        """Scores or their gradient as kernels read them."""
        if x is None or (x.stride() == self.change[1] and not x.data_ptr() & 15):
            return x
        return room(*self.change).copy_(x)


def forward_of(call: ResidualCall) -> ResidualForward:
    plan = plan_for(call)
    key = "residual forward", scores_dtype(call.q, call.bias)
    if key not in plan.launches:
        plan.launches[key] = ResidualForward(plan, call)
    return plan.launches[key]


def backward_of(dout: Tensor, call: ResidualCall, out: Tensor, need_bias: bool) -> ResidualBackward:
    plan = plan_for(call, dout, out)
    key = "residual backward", scores_dtype(call.q, call.bias), need_bias
    if key not in plan.launches:
        plan.launches[key] = ResidualBackward(plan, call, need_bias)
    return plan.launches[key]


class Prepared:
    """Both functions for tensors of one signature; backwards by the signature of their arguments."""

    def __init__(self, call: ResidualCall):
        call = checked(call)
        self.options = call[5:]
        self.forward = forward_of(call)
        self.backwards: dict[tuple, ResidualBackward] = {}

    def backward(self, dout, dscores, tensors, out, lse, scores, need_bias: bool):
        """A function that computes the gradients of plain tensors like these, with any strides: hooks of saved
        tensors may have returned others than were given."""
        call = ResidualCall(*tensors, *self.options).laid_out()
        d, o = rows_of(dout, out), rows_of(out, out)
        call = checked(call, (o, d), (lse,), scores=scores, dscores=dscores)
        given = (*call[:5], d, o, lse, dscores, scores)
        key = need_bias, *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given]
        run = self.backwards.get(key)
        if run is None:
            if len(self.backwards) >= 64:
                self.backwards.clear()
            run = self.backwards[key] = backward_of(d, call, o, need_bias)
        copied = any(x is not y for x, y in zip(call[:5], tensors, strict=True))

        def backward(dout, dscores, tensors, out, lse, scores):
            if copied:
                tensors = ResidualCall(*tensors, *self.options).laid_out()[:5]
            dout, out = rows_of(dout, out), rows_of(out, out)
            return run(dout, dscores, tensors, out, lse.contiguous(), scores)

        return backward


def checked(call: ResidualCall, of_out: tuple = (), of_lse: tuple = (), **scores: Tensor | None) -> ResidualCall:
    """The call as kernels read it. ``scores``: a tensor with their shape and dtype.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    q, k, v, *_, seed, _, _ = checks.checked(call.tensors, call.scalars, (), of_out, of_lse)
    if q.shape[-1] > MAX_HEAD_DIM or v.shape[-1] > MAX_HEAD_DIM:
        given = shapes(q=q, k=k, v=v)
        raise ValueError(f"flashsci: head dims of residual attention must be 1 to {MAX_HEAD_DIM}: {given}")
    if scores:
        checks.check_scores(q, call.score_shape, scores_dtype(q, call.bias), **scores)
    if q is call.q and k is call.k and v is call.v and seed is call.dropout_seed:
        return call
    return call._replace(q=q, k=k, v=v, dropout_seed=seed)


def forward(call: ResidualCall) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, scores."""
    call = checked(call)
    return forward_of(call)(*call[:5])


def backward(dout, dscores, call: ResidualCall, out, lse, scores, need_bias: bool):
    """dq, dk, dv and the gradient of the whole scores, empty unless ``need_bias``."""
    call = checked(call, (out, dout), (lse,), scores=scores, dscores=dscores)
    dtype = scores_dtype(call.q, call.bias)
    dout, out = rows_of(dout, out), rows_of(out, out)
    exact = scores if dtype == torch.float32 else None
    run = backward_of(dout, call, out, need_bias)
    *rows, change = run(dout, dscores, call[:5], out, lse.contiguous(), exact)
    return *rows, call.q.new_empty(0, dtype=dtype) if change is None else change


_KEYS = ("CUDA", "CPU") if triton.knobs.runtime.interpret else ("CUDA",)
OPS = residual_ops.define("triton", ResidualKernels(forward, backward, Prepared), _KEYS)
