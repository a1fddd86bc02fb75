"""Launches of attention with a gate of pairs."""

import torch
from torch import Tensor

from flashsci.backends.triton import checks
from flashsci.backends.triton.kernels.gated import (
    gated_dkdv_kernel,
    gated_dq_kernel,
    gated_forward_kernel,
    pair_sums_kernel,
)
from flashsci.backends.triton.kernels.gated_wide import gated_wide_backward_kernel, gated_wide_forward_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.bias import NO_ROUTE, bias_parts, bias_result, bias_route, reduce_to
from flashsci.backends.triton.plans.dense import DensePlan, longest_of, options_of, plan_of, rows_like, rows_of
from flashsci.backends.triton.plans.strides import NO_STRIDES, plane_strides, plane_vector, strides4, strides_of
from flashsci.backends.triton.plans.wide import Section, Wide
from flashsci.call.gate_ops import NEED_GATE, Gate
from flashsci.call.op_checks import declared, need
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Given,
    Saved,
    Scalars,
    Tensors,
    empty_like_layout,
)


class GatedWide(Wide):
    """The launches for wide heads, whose scores are held in memory, of one layout of the gate."""

    forward_kernel, backward_kernel = gated_wide_forward_kernel, gated_wide_backward_kernel

    def __init__(self, plan: DensePlan, gate: dict):
        super().__init__(plan)
        self.gate = gate

    def of_scores(self, kernel, part: Section, narrower: int = 1, **more) -> Launch:
        return super().of_scores(kernel, part, narrower, **self.gate, **more)


class GatedLaunches:
    """The launches of one plan for one layout of the gate."""

    def __init__(self, plan: DensePlan, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int):
        self.plan, self.shape = plan, shape
        strides, vector = gate_layout(plan, shape, stride, itemsize)
        self.gate = {"gate_strides": strides, "GATE_VECTOR": vector}
        self.launches: dict[tuple, Launch] = {}
        self.prepared: GatedForward | None = None
        self.backwards: dict[int, GatedBackward] = {}  # by what they need
        self.wide = None if plan.wide is None else GatedWide(plan, self.gate)

    def forward(self, out) -> Launch:
        key = "forward", out.stride()
        if key not in self.launches:
            programs, arguments = self.plan.scheduled("forward", True)
            arguments.update(self.gate, out_strides=strides4(out.stride()))
            self.launches[key] = Launch(gated_forward_kernel, programs, arguments)
        return self.launches[key]

    def dq(self, dout, dq, use: int, dbias, dgate) -> Launch:
        key = "dq", dq is None, use, dgate is None
        if key not in self.launches:
            programs, arguments = self.plan.scheduled("dq", True)
            arguments.update(
                self.gate,
                dout_strides=strides4(dout.stride()),
                dq_strides=strides_of(dq),
                dbias_strides=self.plan.gradient_strides(dbias, use),
                dgate_strides=NO_STRIDES if dgate is None else plane_strides(dgate.shape, dgate.stride(), False),
                BIAS_GRADIENT=use,
                DBIAS_VECTOR=self.plan.stored_vector(dbias, use),
                DGATE_VECTOR=self.plan.gradient_vector(dgate),
            )
            self.launches[key] = Launch(gated_dq_kernel, programs, arguments)
        return self.launches[key]

    def own_gradient(self, gate: Tensor) -> Tensor | None:
        """Memory for the gradient of a gate with a number of its own for each score, which the kernel of dq stores; None: scores
        share numbers."""
        if self.shape != self.plan.score_shape:
            return None
        made = gate.new_zeros if self.plan.window else gate.new_empty  # tiles that no query sees are not written
        return made(gate.shape)

    def dkdv(self, dout, dk, dv, column_sums: bool) -> Launch:
        key = "dkdv", dk is None, dv is None, column_sums
        if key not in self.launches:
            programs, arguments = self.plan.scheduled("dkdv", True)
            arguments.update(
                self.gate, dout_strides=strides4(dout.stride()), dk_strides=strides_of(dk), dv_strides=strides_of(dv)
            )
            self.launches[key] = Launch(gated_dkdv_kernel, programs, arguments)
        return self.launches[key]

    def pair_sums(self, dout, shape: tuple[int, ...], like, of_gate: bool) -> tuple[Launch, int]:
        """The launch of sums of this shape, as `sums_of` has them, and the number of partial sums."""
        key = "sums", of_gate
        if key not in self.launches:
            programs, arguments, splits = sums_of(self.plan, "bias_gradient", shape, like)
            arguments.update(self.gate, dout_strides=strides4(dout.stride()), OF_GATE=of_gate)
            self.launches[key] = Launch(pair_sums_kernel, programs, arguments), splits
        return self.launches[key]


def gate_layout(
    p: DensePlan, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, ...], int]:
    """The strides of a gate, or of its tangent, and the elements of one load."""
    strides = plane_strides(shape, stride, False)
    return strides, plane_vector(strides, p.size_k, itemsize, False)


def sums_of(p: DensePlan, kernel: str, shape: tuple[int, ...], like) -> tuple[int, dict, int]:
    """Programs, arguments and the number of partial sums of a kernel that sums over the scores that share a number of a
    tensor of this shape, which has a row for each query or a column for each key. like: a tensor of the sums' dtype."""
    tiles, arguments = p.tiled(kernel, True)
    tiles_k = -(-p.size_k // arguments["BLOCK_N"])
    rows, columns = shape[-2] == p.size_q, shape[-1] == p.size_k
    along = 1 if rows and columns else tiles_k if rows else tiles
    programs, arguments, splits = p.split(arguments, tiles if rows else 1, tiles_k if columns else 1, shape, along)
    contiguous = torch.empty(shape, device="meta").stride()
    arguments.update(
        sums_strides=plane_strides(shape, contiguous, False),
        SUMS_VECTOR=p.gradient_vector(like) if columns else 1,
        ROWS=rows,
        COLUMNS=columns,
    )
    return programs, arguments, splits


def launches_of(strided: tuple, tensors: Tensors, gate: Tensor, scalars: Scalars) -> GatedLaunches:
    """The launches for these tensors. strided: q, k, v, then other tensors with rows."""
    plan = plan_of(strided, tuple(tensors), longest_of(scalars), options_of(scalars))
    key = "gated", gate.shape, gate.stride(), gate.element_size()
    if key not in plan.launches:
        plan.launches[key] = GatedLaunches(plan, *key[1:])
    return plan.launches[key]


def check_gate(tensors: Tensors, gate: Tensor) -> None:
    """Check the gate beside tensors that fit."""
    need(tensors.cu_seqlens_q is None, "packed calls take no pair_gate")
    need(tensors.mask_tiles is None, "gated calls take a mask without a table of its tiles")
    full = (*tensors.q.shape[:-1], tensors.k.shape[-2])
    fits = gate.dim() == len(full) and all(n in (1, m) for n, m in zip(gate.shape, full, strict=True))
    need(fits, f"pair_gate must have {len(full)} dims, each 1 or that of {list(full)}, got {list(gate.shape)}")
    declared(Gate, "pair_gate", gate, gate.shape, tensors.q)


class GatedForward:
    """A function that computes out, lse of tensors and a gate of one signature: it allocates memory for them and launches."""

    def __init__(self, gates: GatedLaunches, tensors: Tensors):
        q, _, v = tensors[:3]
        out = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]))
        self.out, self.lse = (out.shape, out.stride()), q.shape[:-1]
        self.dtype, self.device = q.dtype, q.device
        self.wide = gates.wide
        self.run = None if gates.plan.empty or gates.wide is not None else gates.forward(out)

    def __call__(self, tensors: Given, gate: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_strided(*self.out, dtype=self.dtype, device=self.device)
        lse = torch.empty(self.lse, dtype=torch.float32, device=self.device)
        if self.run is not None:
            self.run(tuple(tensors), gate, out, lse)
        elif self.wide is not None:
            self.wide.forward(tuple(tensors), out, lse, (gate,))
        else:
            out.zero_(), lse.fill_(float("-inf"))
        return out, lse


def prepared_forward(tensors: Tensors, gate: Tensor, scalars: Scalars) -> GatedForward:
    """The function for tensors that kernels read as they are, and a gate, with the signatures of these."""
    checks.checked(tensors, scalars)
    check_gate(tensors, gate)
    gates = launches_of(tensors[:3], tensors, gate, scalars)
    if gates.prepared is None:
        gates.prepared = GatedForward(gates, tensors)
    return gates.prepared


def forward(tensors: Tensors, gate: Tensor, scalars: Scalars) -> tuple[Tensor, Tensor]:
    """out, lse."""
    tensors = checks.checked(tensors, scalars)
    return prepared_forward(tensors, gate, scalars)(tensors, gate)


class GatedBackward:
    """A function that computes dq, dk, dv, dbias, dkey_weight, dpair_gate of tensors and a gate of one signature, None where
    `wanted` does not name them."""

    def __init__(self, gates: GatedLaunches, tensors: Tensors, wanted: int):
        q, k, v, bias, weight = tensors[:5]
        self.gates, self.plan, self.wanted = gates, gates.plan, wanted
        self.rows = [rows_like(x) if wanted & bit else None for x, bit in ((q, NEED_Q), (k, NEED_K), (v, NEED_V))]
        self.need_bias = bias is not None and bool(wanted & NEED_BIAS)
        self.need_weight = weight is not None and bool(wanted & NEED_KEY_WEIGHT)
        self.need_gate = bool(wanted & NEED_GATE)
        self.dtype, self.device = q.dtype, q.device

    def __call__(self, dout, dlse, tensors: Given, gate: Tensor, out, lse) -> tuple[Tensor | None, ...]:
        gates, p = self.gates, self.plan
        q, _, _, bias, weight = tensors[:5]
        dq, dk, dv = [
            None if x is None else torch.empty_strided(*x, dtype=self.dtype, device=self.device) for x in self.rows
        ]
        if p.empty:
            dq, dk, dv = (None if x is None else x.zero_() for x in (dq, dk, dv))
            dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format) if self.need_bias else None
            dweight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if self.need_weight else None
            return dq, dk, dv, dbias, dweight, gate.new_zeros(gate.shape) if self.need_gate else None
        dout, out, lse = rows_of(dout, out), rows_of(out, out), lse.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        inputs = tuple(tensors)
        if gates.wide is not None:
            rows = dq, dk, dv
            return *rows, *gates.wide.backward(dout, dlse, inputs, out, lse, rows, self.wanted, (gate,), self.need_gate)
        use, dbias, sums, shared = bias_route(p, bias, lse) if self.need_bias else NO_ROUTE
        weight_sums = p.weight_sums(q) if self.need_weight else None
        reference, delta = torch.empty_like(lse), torch.empty_like(lse)
        p.delta()(dout, out, lse, dlse, reference, delta)
        common = (inputs, gate, dout, reference, delta)
        dgate = gates.own_gradient(gate) if self.need_gate else None
        if dq is not None or use or dgate is not None:
            gates.dq(dout, dq, use, dbias, dgate)(*common, dq, dbias, dgate)
        if not (dk is dv is sums is weight_sums is None):
            gates.dkdv(dout, dk, dv, sums is not None)(*common, dk, dv, sums, weight_sums)
        if shared:
            run, splits = gates.pair_sums(dout, tuple(bias.shape), bias, False)
            dbias = bias_parts(p, bias, splits)
            run(*common, dbias)
        if self.need_bias:
            dbias = bias_result(bias, use, dbias, sums, shared)
        if self.need_gate and dgate is None:
            dgate = gate_gradient(gates, gate, common)
        return dq, dk, dv, dbias, None if weight_sums is None else reduce_to(weight_sums, weight), dgate


def prepared_backward(dout, dlse, saved: Saved, gate: Tensor, wanted: int):
    """A function in the same way: from (dout, dlse, tensors, gate, out, lse) to the six gradients; None where `wanted` does not
    name them."""
    tensors, out, lse, scalars = saved
    given = checks.checked(tensors, scalars, (), (out, dout), (lse, dlse))
    check_gate(given, gate)
    q, k, v = given[:3]
    gates = launches_of((q, k, v, rows_of(dout, out), rows_of(out, out)), given, gate, scalars)
    if wanted not in gates.backwards:
        gates.backwards[wanted] = GatedBackward(gates, given, wanted)
    run = gates.backwards[wanted]
    if given is tensors:
        return run
    return lambda dout, dlse, tensors, gate, out, lse: run(dout, dlse, Tensors(*tensors).laid_out(), gate, out, lse)


def backward(dout, dlse, saved: Saved, gate: Tensor, wanted: int) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbias, dkey_weight, dpair_gate; those that `wanted` does not name are empty."""
    tensors, out, lse, _ = saved
    q, _, _, bias, weight = tensors[:5]
    found = prepared_backward(dout, dlse, saved, gate, wanted)(dout, dlse, tensors, gate, out, lse)
    likes = (q, q, q, q if bias is None else bias, q if weight is None else weight, gate)
    return tuple(like.new_empty(0) if x is None else x for x, like in zip(found, likes, strict=True))


def gate_gradient(gates: GatedLaunches, gate: Tensor, common: tuple) -> Tensor:
    """The gradient of a gate that scores share, by a kernel of its own."""
    shape, like = room_of(gates.plan, gate)
    run, splits = gates.pair_sums(common[2], shape, like, True)
    sums = sums_for(gate, shape, splits)
    run(*common, sums)
    return reduce_to(sums[0] if splits == 1 else sums.sum(0), gate)


def room_of(p: DensePlan, gate: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """The shape in which a kernel sums the gradient of a gate, and a tensor of the dtype: one number for all scores of a head is a sum
    for each query first."""
    rows = p.size_q if gate.shape[-1] == 1 else gate.shape[-2]
    shape = (*gate.shape[:-2], rows, gate.shape[-1])
    return shape, gate if shape == tuple(gate.shape) else torch.empty(0, dtype=torch.float32)


def sums_for(gate: Tensor, shape: tuple[int, ...], splits: int) -> Tensor:
    """Memory for these sums: in fp32 where they are added further."""
    whole = splits == 1 and shape == tuple(gate.shape)
    return gate.new_empty((splits, *shape), dtype=gate.dtype if whole else torch.float32)
