"""From tensors to launches: everything about a call that depends on shapes, strides and flags alone
is worked out once and remembered (`Plan`, `Launch`); after that a launch only collects pointers."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from flashsci.ops import (
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

from . import launch
from .backward_keys import dkdv_kernel
from .backward_queries import NO_BIAS_GRADIENT, ROW_SUMS, STORE, delta_kernel, dq_kernel
from .backward_small import COLUMN_SUMS, small_backward_kernel
from .bias_gradient import bias_gradient_kernel
from .forward import forward_kernel
from .tile import ABSENT, KEY, PLANE

UNBOUNDED = 1 << 30  # a window side that never cuts
NO_STRIDES = (0, 0, 0, 0, 0)


def strides4(stride: tuple[int, ...]) -> tuple[int, ...]:
    """(b0, b1, head, row) strides of a tensor of rank 2 to 5."""
    return (0, 0, 0, 0, *stride[:-1])[-4:]


def weight_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """(b0, b1, head, key) strides of key weights; 0 in the dims they are broadcast along."""
    stride = tuple(0 if n == 1 else s for n, s in zip(shape, stride, strict=True))
    return (0, 0, 0, 0, *stride)[-4:]


def plane_strides(shape: tuple[int, ...], stride: tuple[int, ...], ragged: bool) -> tuple[int, ...]:
    """(b0, b1, head, row, column) strides of a bias or mask; 0 in the dims it is broadcast along."""
    stride = tuple(0 if n == 1 else s for n, s in zip(shape, stride, strict=True))
    if ragged:
        return (0, 0, stride[0], 0, stride[1])
    return (0, 0, 0, 0, 0, *stride)[-5:]


def plane_vector(strides: tuple[int, ...], size_k: int, itemsize: int, packed: bool) -> int:
    """0: columns are not neighbours in memory; else how many elements a load may take at once."""
    if strides[4] != 1:
        return 0
    vector = 16 // itemsize
    whole = all(s % vector == 0 for s in strides[:4]) and size_k % vector == 0
    return vector if whole and not packed else 1


class Device(NamedTuple):
    index: int
    capability: tuple[int, int] | None  # None: the interpreter
    l2_bytes: int
    processors: int


@functools.cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(-1, None, 32 << 20, 1)
    found = torch.cuda.get_device_properties(device)
    return Device(
        device.index, (found.major, found.minor), found.L2_cache_size, found.multi_processor_count
    )


def products(precision: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> str:
    """Triton's name for how fp32 products are taken. Before sm_80 there is no TF32: IEEE."""
    if dtype != torch.float32:
        return "tf32"
    if capability is not None and capability < (8, 0):
        return "ieee"
    return "tf32x3" if precision == "default" else precision


class Launch:
    """One kernel with everything but its tensors decided.

    The first launch with tensors of a kind (absent, aligned to 16 bytes, not aligned) goes through
    Triton's own path, which compiles. Later ones hand the compiled kernel its arguments directly:
    Triton would look at all of them again, at many times the cost.
    """

    def __init__(self, kernel, programs: int, arguments: dict):
        self.kernel, self.programs = kernel, programs
        # Triton 3.10 will no longer fuse multiplications with additions unless asked to.
        self.arguments = arguments | {"enable_fp_fusion": True}
        self.compiled: dict[int, Callable] = {}
        self.rest: list = []

    def __call__(self, *tensors) -> None:
        kind = 0
        for x in tensors:
            kind = 3 * kind + (0 if x is None else 1 if x.data_ptr() % 16 == 0 else 2)
        run = self.compiled.get(kind)
        if run is not None:
            run(*tensors, *self.rest)
            return
        compiled = self.kernel[(self.programs,)](*tensors, **self.arguments)
        if compiled is not None:  # None: interpreted
            self.rest = [self.arguments[name] for name in self.kernel.arg_names[len(tensors) :]]
            self.compiled[kind] = compiled[(self.programs, 1, 1)]


class Plan:
    """What the launches of one kind of call share. Made by `plan`."""

    def __init__(self, device, dtype, shapes, strides, bias, weight, mask, sequences, longest, ragged, scale, softcap,
                 window_left, window_right, lower_right, dropout_p, precision):  # fmt: skip
        q_shape, k_shape, v_shape = shapes
        self.device, self.dtype = device, dtype
        self.lead = (1, 1, *q_shape[:-3])[-2:]
        self.batch = self.lead[0] * self.lead[1]
        self.heads = q_shape[-3] if len(q_shape) > 2 else 1
        self.heads_k = k_shape[-3] if len(k_shape) > 2 else 1
        self.group = self.heads // max(self.heads_k, 1)
        self.size_q, self.head_dim = q_shape[-2:]
        self.size_k, self.head_dim_v = v_shape[-2:]
        self.score_shape = (*q_shape[:-1], self.size_k)
        self.packed, self.sequences = sequences >= 0, sequences
        self.empty = self.batch * self.heads * self.size_q * self.size_k == 0
        self.launches: dict[tuple, Launch] = {}
        self.seconds: dict[tuple, object] = {}  # host_second.py's, by layout of two tangents
        # Typical lengths, to choose tiles by; those of packed sequences vary about the mean.
        self.lengths = self.size_q, self.size_k
        self.longest = longest if self.packed else max(self.lengths)
        if self.packed:
            self.lengths = tuple(3 * size // (2 * max(sequences, 1)) for size in self.lengths)

        vector = 16 // dtype.itemsize
        steps = (self.head_dim, self.head_dim_v, *(s for stride in strides for s in stride[:-1]))
        vector = vector if all(s % vector == 0 for s in steps) else 1
        precise = products(precision, dtype, device.capability)
        if mask is not None and dropout_p and max(self.head_dim, self.head_dim_v) > 128:
            # Triton 3.6 makes wrong code of these together with TF32 products (sm_90): P of some keys is lost or misplaced.
            precise = "ieee" if dtype == torch.float32 else precise
        d0, d1 = launch.head_chunks(self.head_dim, vector > 1, precise != "tf32x3")
        v0, v1 = launch.head_chunks(self.head_dim_v, vector > 1, precise != "tf32x3")
        self.strides = tuple(strides4(stride) for stride in strides)

        self.ragged = ragged
        bias_kind = mask_kind = ABSENT.value
        bias_vector = mask_vector = 0
        self.bias_strides = self.mask_strides = NO_STRIDES
        self.bias_total = 0
        if bias is not None:
            self.bias_shape, stride, itemsize = bias
            self.bias_strides = plane_strides(self.bias_shape, stride, ragged)
            bias_kind = PLANE.value if ragged or self.bias_strides[3] != 0 else KEY.value
            bias_vector = plane_vector(self.bias_strides, self.size_k, itemsize, self.packed)
            self.bias_total = self.bias_shape[-1] if ragged else 0
        if mask is not None:
            shape, stride = mask
            self.mask_strides = plane_strides(shape, stride, False)
            mask_kind = PLANE.value if self.mask_strides[3] != 0 else KEY.value
            mask_vector = plane_vector(self.mask_strides, self.size_k, 1, self.packed)

        self.pairs = PLANE.value in (bias_kind, mask_kind)
        self.small = launch.small_config(
            device.capability, dtype, max(d0 + d1, v0 + v1), self.longest
        )
        self.window = 0 if window_left < 0 and window_right < 0 else 1 if window_left < 0 else 2
        dropout = dropout_p > 0.0
        threshold = min(math.floor(dropout_p * 2**32), 2**32 - 1)
        self.arguments = {
            "bias_strides": self.bias_strides, "mask_strides": self.mask_strides,
            "weight_strides": NO_STRIDES[:4] if weight is None else weight_strides(*weight[:2]),
            "bias_total": self.bias_total, "batch1": self.lead[1], "sequences": max(sequences, 0),
            "size_q": self.size_q, "size_k": self.size_k, "group": self.group,
            "head_dim": self.head_dim, "head_dim_v": self.head_dim_v,
            "scale": scale, "softcap": softcap, "lower_right": int(lower_right),
            "left": UNBOUNDED if window_left < 0 else min(window_left, UNBOUNDED),
            "right": UNBOUNDED if window_right < 0 else min(window_right, UNBOUNDED),
            "threshold": threshold - (1 << 32) if threshold >= 1 << 31 else threshold,
            "keep_scale": 1.0 / (1.0 - dropout_p) if dropout and dropout_p < 1.0 else float(not dropout),
            "PACKED": self.packed, "WINDOW": self.window, "SOFTCAP": softcap > 0.0, "DROPOUT": dropout,
            "FOLD": bias is None and weight is None and softcap == 0.0 and scale > 0.0, "RAGGED": ragged,
            "BIAS": bias_kind, "BIAS_VECTOR": bias_vector, "MASK": mask_kind, "MASK_VECTOR": mask_vector,
            "D0": d0, "D1": d1, "V0": v0, "V1": v1,
            "EVEN_D": d0 + d1 == self.head_dim, "EVEN_V": v0 + v1 == self.head_dim_v,
            "VECTOR": vector,
            "PRECISION": precise,
        }  # fmt: skip

    def tiles_of(self, kernel: str) -> tuple[int, dict]:
        """Programs that cover the query (dkdv: key) tiles of all heads once, and the arguments that
        follow from the tile sizes."""
        block_m, block_n, warps, stages, *registers = launch.config(
            kernel,
            self.device.capability,
            self.dtype,
            self.arguments["PRECISION"],
            self.head_dim,
            self.head_dim_v,
            self.pairs,
            *self.lengths,
        )
        by_keys = kernel in launch.BY_KEYS
        heads = self.heads_k if by_keys else self.heads
        size, block = (self.size_k, block_n) if by_keys else (self.size_q, block_m)
        tiles = size // block + self.sequences + 2 if self.packed else -(-size // block)
        arguments = dict(
            self.arguments, heads=heads, tiles=tiles,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if registers:
            arguments["maxnreg"] = registers[0]
        if kernel not in launch.BY_BIAS:
            # Without a window all tiles take as long: one head after the other. Else the longest
            # come first, in sections of heads whose keys and values fit in half the L2 cache.
            section = 1
            if self.window:
                head_bytes = self.size_k * (self.head_dim + self.head_dim_v) * self.dtype.itemsize
                fit = max(1, self.device.l2_bytes // 2 // max(1, head_bytes))
                section = min(fit if by_keys else fit * self.group, self.batch * heads)
            arguments.update(heads_total=self.batch * heads, section=section)
        return tiles * self.batch * heads, arguments

    def forward(self, out) -> Launch:
        if "forward" not in self.launches:
            programs, arguments = self.tiles_of("forward")
            arguments.update(
                zip(("q_strides", "k_strides", "v_strides"), self.strides, strict=False)
            )
            arguments.update(out_strides=strides4(out.stride()))
            self.launches["forward"] = Launch(forward_kernel, programs, arguments)
        return self.launches["forward"]

    def delta(self) -> Launch:
        if "delta" not in self.launches:
            block = 32 if self.head_dim_v > 128 or self.size_q <= 32 else 64
            tiles = -(-self.size_q // block)
            shared = ("batch1", "size_q", "head_dim_v", "V0", "V1", "EVEN_V", "VECTOR", "FOLD")
            arguments = {name: self.arguments[name] for name in shared} | {
                "heads": self.heads, "tiles": tiles, "BLOCK_M": block,
                "dout_strides": self.strides[3], "out_strides": self.strides[4],
                "num_warps": 4 if block * self.head_dim_v >= 2048 else 1,
            }  # fmt: skip
            self.launches["delta"] = Launch(
                delta_kernel, tiles * self.batch * self.heads, arguments
            )
        return self.launches["delta"]

    def _backward(self, kernel: str) -> tuple[int, dict]:
        programs, arguments = self.tiles_of(kernel)
        names = ("q_strides", "k_strides", "v_strides", "dout_strides")
        arguments.update(zip(names, self.strides, strict=False))
        return programs, arguments

    def dq(self, dq, need_dq: bool, use: int, dbias) -> Launch:
        """`use` is what becomes of dS as bias gradient, see backward_queries.py."""
        key = "dq", need_dq, use
        if key not in self.launches:
            programs, arguments = self._backward("dq")
            arguments.update(
                dq_strides=strides4(dq.stride()) if need_dq else NO_STRIDES[:4],
                dbias_strides=plane_strides(dbias.shape, dbias.stride(), self.ragged)
                if use == STORE.value
                else NO_STRIDES,
                NEED_DQ=need_dq, BIAS_GRADIENT=use, DBIAS_VECTOR=self.gradient_vector(dbias),
            )  # fmt: skip
            self.launches[key] = Launch(dq_kernel, programs, arguments)
        return self.launches[key]

    def dkdv(self, dk, dv, need_dk: bool, need_dv: bool, column_sums: bool) -> Launch:
        key = "dkdv", need_dk, need_dv, column_sums
        if key not in self.launches:
            programs, arguments = self._backward("dkdv")
            arguments.update(
                dk_strides=strides4(dk.stride()) if need_dk else NO_STRIDES[:4],
                dv_strides=strides4(dv.stride()) if need_dv else NO_STRIDES[:4],
                NEED_DK=need_dk, NEED_DV=need_dv, COLUMN_SUMS=column_sums,
            )  # fmt: skip
            self.launches[key] = Launch(dkdv_kernel, programs, arguments)
        return self.launches[key]

    def small_backward(self, dq, dk, dv, use: int, dbias) -> Launch:
        key = "small", use
        if key not in self.launches:
            side, warps, *registers = self.small
            names = ("q_strides", "k_strides", "v_strides", "dout_strides", "out_strides")
            arguments = dict(self.arguments, **dict(zip(names, self.strides, strict=True)))
            arguments.update(
                dq_strides=strides4(dq.stride()), dk_strides=strides4(dk.stride()), dv_strides=strides4(dv.stride()),
                dbias_strides=plane_strides(dbias.shape, dbias.stride(), self.ragged)
                if use == STORE.value
                else NO_STRIDES,
                heads=self.heads_k, BIAS_GRADIENT=use, DBIAS_VECTOR=self.gradient_vector(dbias),
                BLOCK_M=side, BLOCK_N=side, num_warps=warps, num_stages=1,
            )  # fmt: skip
            if registers:
                arguments["maxnreg"] = registers[0]
            programs = (self.sequences + 2 if self.packed else self.batch) * self.heads_k
            self.launches[key] = Launch(small_backward_kernel, programs, arguments)
        return self.launches[key]

    def weight_sums(self, like) -> torch.Tensor:
        """What kernels fill with the gradient of key weights: fp32, one per key head and key."""
        shape = (
            *self.score_shape[:-3],
            *(self.score_shape[-3:-2] and (self.heads_k,)),
            self.size_k,
        )
        return like.new_empty(shape, dtype=torch.float32)

    def bias_gradient(self, bias) -> tuple[Launch, int]:
        """The launch for a bias that heads or batch members share, and its number of partial sums."""
        if "bias_gradient" not in self.launches:
            _, arguments = self._backward("bias_gradient")
            programs, splits = self.share(arguments)
            arguments.update(DBIAS_VECTOR=self.gradient_vector(bias))
            made = Launch(bias_gradient_kernel, programs, arguments)
            self.launches["bias_gradient"] = made, splits
        return self.launches["bias_gradient"]

    def share(self, arguments: dict) -> tuple[int, int]:
        """Adds to the arguments of a kernel over a shared bias who shares what; its programs and splits."""
        shape = self.bias_shape
        own = (1, 1, shape[0]) if self.ragged else (1, 1, 1, *shape[:-2])[-3:]
        full = (*self.lead, self.heads)
        shared = tuple(n // m for n, m in zip(full, own, strict=True))
        blocks, members = math.prod(own), math.prod(shared)
        tiles_k = 1 if self.packed else -(-self.size_k // arguments["BLOCK_N"])
        programs = blocks * arguments["tiles"] * tiles_k
        # Enough splits to fill the device several times over, but each long enough to be worth
        # its fp32 copy of the bias.
        splits = max(1, min(members // 4, -(-8 * self.device.processors // programs)))
        each = -(-members // splits)
        splits = -(-members // each)
        numel = math.prod(shape)
        contiguous = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        arguments.update(
            own=own, shared=shared, members=members, members_per_split=each, blocks=blocks,
            tiles_k=tiles_k, split_stride=numel,
            dbias_strides=plane_strides(shape, contiguous, self.ragged),
        )  # fmt: skip
        return splits * programs, splits

    def gradient_vector(self, dbias) -> int:
        vector = 1 if dbias is None else 16 // dbias.element_size()
        return vector if not self.ragged and self.size_k % vector == 0 else 1


@functools.lru_cache(maxsize=1024)
def plan(*key) -> Plan:
    return Plan(*key)


def plan_of(tensors, bias, weight, mask, cu_seqlens_q, bias_offsets, longest, options) -> Plan:
    q, k, v = tensors[:3]
    return plan(
        device_of(q.device),
        q.dtype,
        (q.shape, k.shape, v.shape),
        tuple([x.stride() for x in tensors]),
        None if bias is None else (bias.shape, bias.stride(), bias.element_size()),
        None if weight is None else (weight.shape, weight.stride(), weight.element_size()),
        None if mask is None else (mask.shape, mask.stride()),
        -1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        longest,
        bias_offsets is not None,
        *options,
    )


def longest_class(max_seqlen_q: int, max_seqlen_k: int) -> int:
    """Longest packed lengths, where known, decide one thing: whether sequences fit in one tile each."""
    longest = max(max_seqlen_q, max_seqlen_k) if min(max_seqlen_q, max_seqlen_k) >= 0 else 1 << 30
    return 32 if longest <= 32 else 64 if longest <= 64 else 1 << 30


def on_device_of(position: int):
    """Runs a function with the device of one of its arguments, Tensors or Saved, current."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            given = arguments[position]
            device = (given.tensors if isinstance(given, Saved) else given).q.device
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return function(*arguments)
            return function(*arguments)

        return wrapper

    return decorate


@on_device_of(0)
def forward(tensors: Tensors, scalars: Scalars):
    """out, lse. Longest lengths are not needed, and all kernels are deterministic."""
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed = tensors
    _, _, *options, _ = scalars
    p = plan_of((q, k, v), bias, weight, mask, cu_seqlens_q, bias_offsets, 0, options)
    out = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]))
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if p.empty:
        return out.zero_(), lse.fill_(float("-inf"))
    p.forward(out)(
        q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, out, lse
    )  # fmt: skip
    return out, lse


@on_device_of(2)
def backward(dout, dlse, saved: Saved, need: int):
    """dq, dk, dv, dbias, dweight; those that `need` does not name are empty."""
    tensors, out, lse, scalars = saved
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed = tensors
    max_seqlen_q, max_seqlen_k, *options, _ = scalars
    need_dq, need_dk, need_dv = bool(need & NEED_Q), bool(need & NEED_K), bool(need & NEED_V)
    need_dbias = bias is not None and bool(need & NEED_BIAS)
    need_dweight = weight is not None and bool(need & NEED_KEY_WEIGHT)
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()
    if out.stride(-1) != 1:
        out = out.contiguous()
    longest = longest_class(max_seqlen_q, max_seqlen_k)
    p = plan_of(
        (q, k, v, dout, out), bias, weight, mask, cu_seqlens_q, bias_offsets, longest, options
    )
    dq = empty_like_layout(q, q.shape) if need_dq else q.new_empty(0)
    dk = empty_like_layout(k, k.shape) if need_dk else q.new_empty(0)
    dv = empty_like_layout(v, v.shape) if need_dv else q.new_empty(0)
    if p.empty:
        like = q if bias is None else bias
        dbias = like.new_zeros(bias.shape) if need_dbias else like.new_empty(0)
        dweight = weight_result(q, weight, None) if not need_dweight else torch.zeros_like(weight)
        return dq.zero_(), dk.zero_(), dv.zero_(), dbias, dweight

    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    use, dbias, sums, shared = bias_route(p, bias, lse) if need_dbias else NO_ROUTE
    weight_sums = p.weight_sums(q) if need_dweight else None
    if p.small and need_dq and need_dk and need_dv and not shared:
        kind = COLUMN_SUMS.value if sums is not None else use
        p.small_backward(dq, dk, dv, kind, dbias)(
            q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, dout, out, lse, dlse,
            dq, dk, dv, dbias if sums is None else sums, weight_sums,
        )  # fmt: skip
    else:
        reference, delta = torch.empty_like(lse), torch.empty_like(lse)
        p.delta()(dout, out, lse, dlse, reference, delta)
        common = (q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed,
                  dout, reference, delta)  # fmt: skip
        if need_dq or use:
            p.dq(dq, need_dq, use, dbias)(*common, dq, dbias)
        if need_dk or need_dv or sums is not None or need_dweight:
            run = p.dkdv(dk, dv, need_dk, need_dv, sums is not None)
            run(*common, dk, dv, sums, weight_sums)

    if shared:
        run, splits = p.bias_gradient(bias)
        dbias = bias_parts(p, bias, splits)
        run(*common, dbias)
    dbias = bias_result(q, bias, use, dbias, sums, shared)
    return dq, dk, dv, dbias, weight_result(q, weight, weight_sums)


NO_ROUTE = NO_BIAS_GRADIENT.value, None, None, False


def bias_route(p: Plan, bias, lse) -> tuple:
    """Where a bias gradient comes from (see the heads of the kernels' files): what the kernel by queries does with
    it, the tensor that kernel fills, that of its sums over queries, and whether it has a kernel of its own."""
    if bias.shape == ((p.heads, p.bias_total) if p.ragged else p.score_shape):
        # Scores that no query tile visits are not written.
        make = torch.zeros if p.window or p.ragged else torch.empty
        return STORE.value, make(bias.shape, dtype=bias.dtype, device=bias.device), None, False
    if not p.ragged and bias.shape[-2] == 1:
        shape = (*lse.shape[:-1], p.size_k)
        sums = torch.empty(shape, dtype=torch.float32, device=bias.device)
        return NO_BIAS_GRADIENT.value, None, sums, False
    if not p.ragged and bias.shape[-1] == 1:
        return ROW_SUMS.value, torch.empty_like(lse), None, False
    return NO_BIAS_GRADIENT.value, None, None, True


def bias_parts(p: Plan, bias, splits: int) -> torch.Tensor:
    """What the kernel of a shared bias fills. Blocks of a ragged bias need not cover it."""
    return (torch.zeros if p.ragged else torch.empty)(
        (splits, *bias.shape),
        dtype=bias.dtype if splits == 1 else torch.float32,
        device=bias.device,
    )


def bias_result(q, bias, use: int, found, sums, shared: bool) -> torch.Tensor:
    """The bias gradient from what `bias_route` had filled; empty if there was no route."""
    if sums is not None:
        return reduce_to(sums.unsqueeze(-2), bias)
    if use == ROW_SUMS.value:
        return reduce_to(found.unsqueeze(-1), bias)
    if shared:
        return found[0] if len(found) == 1 else found.sum(0).to(bias.dtype)
    return (q if bias is None else bias).new_empty(0) if found is None else found


def weight_result(q, weight, sums) -> torch.Tensor:
    """The gradient of key weights from what `Plan.weight_sums` had filled; empty if it was not wanted."""
    if sums is None:
        return (q if weight is None else weight).new_empty(0)
    return reduce_to(sums, weight)


def reduce_to(sums: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """fp32 sums over the dims that the bias is broadcast along."""
    dims = [d for d, (n, m) in enumerate(zip(sums.shape, bias.shape, strict=True)) if n != m]
    return (sums.sum(dims, keepdim=True) if dims else sums).to(bias.dtype)
