"""From tensors to launches: everything about a call that depends on shapes, strides and flags alone is worked out once
and remembered (`plan`); a launch then only collects pointers."""

import functools
import math
from typing import NamedTuple

import torch

from flashsci.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, empty_like_layout

from . import launch
from .backward_keys import dkdv_kernel
from .backward_queries import NO_BIAS_GRADIENT, ROW_SUMS, STORE, delta_kernel, dq_kernel
from .bias_gradient import bias_gradient_kernel
from .forward import forward_kernel
from .tile import ABSENT, KEY, PLANE

UNBOUNDED = 1 << 30  # a window side that never cuts
EMPTY_STRIDES = (0, 0, 0, 0, 0)


def strides4(stride: tuple[int, ...]) -> tuple[int, ...]:
    """(b0, b1, head, row) strides of a tensor of rank 2 to 5."""
    return (0, 0, 0, 0, *stride[:-1])[-4:]


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
    capability: tuple[int, int] | None  # None: the interpreter
    l2_bytes: int
    processors: int


@functools.cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(None, 32 << 20, 1)
    found = torch.cuda.get_device_properties(device)
    return Device((found.major, found.minor), found.L2_cache_size, found.multi_processor_count)


def products(precision: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> str:
    """Triton's name for how fp32 products are taken. Before sm_80 there is no TF32: IEEE."""
    if dtype != torch.float32:
        return "tf32"
    if capability is None or capability < (8, 0):
        return "ieee"
    return "tf32x3" if precision == "default" else precision


class Plan:
    """What the launches of one kind of call share. Made by `plan`, never changed after."""

    def __init__(
        self,
        device,
        dtype,
        shapes,
        strides,
        bias,
        mask,
        sequences,
        ragged,
        scale,
        softcap,
        window_left,
        window_right,
        lower_right,
        dropout_p,
        precision,
    ):
        q_shape, k_shape, v_shape = shapes
        self.device = device
        capability = device.capability
        self.dtype = dtype
        lead = (1, 1, *q_shape[:-3])[-2:]
        self.batch0, self.batch1 = lead
        self.batch = lead[0] * lead[1]
        self.heads = q_shape[-3] if len(q_shape) > 2 else 1
        self.heads_k = k_shape[-3] if len(k_shape) > 2 else 1
        self.group = self.heads // max(self.heads_k, 1)
        self.size_q, self.head_dim = q_shape[-2:]
        self.size_k, self.head_dim_v = v_shape[-2:]
        self.packed = sequences >= 0
        self.sequences = sequences
        self.empty = self.batch * self.heads * self.size_q * self.size_k == 0
        # Typical lengths, to choose tiles by.
        self.length_q = -(-self.size_q // max(sequences, 1)) if self.packed else self.size_q
        self.length_k = -(-self.size_k // max(sequences, 1)) if self.packed else self.size_k
        if self.packed:  # lengths vary about the mean
            self.length_q, self.length_k = 3 * self.length_q // 2, 3 * self.length_k // 2

        d0, d1 = launch.head_chunks(self.head_dim)
        v0, v1 = launch.head_chunks(self.head_dim_v)
        vector = 16 // dtype.itemsize
        steps = (self.head_dim, self.head_dim_v, *(s for stride in strides for s in stride[:-1]))
        vector = vector if all(s % vector == 0 for s in steps) else 1
        self.strides = tuple(strides4(stride) for stride in strides)

        bias_kind = mask_kind = ABSENT.value
        bias_vector = mask_vector = 0
        self.bias_strides = self.mask_strides = EMPTY_STRIDES
        self.bias_total = 0
        if bias is not None:
            shape, stride, itemsize = bias
            self.bias_strides = plane_strides(shape, stride, ragged)
            bias_kind = PLANE.value if ragged or self.bias_strides[3] != 0 else KEY.value
            bias_vector = plane_vector(self.bias_strides, self.size_k, itemsize, self.packed)
            self.bias_total = shape[-1] if ragged else 0
        if mask is not None:
            shape, stride = mask
            self.mask_strides = plane_strides(shape, stride, False)
            mask_kind = PLANE.value if self.mask_strides[3] != 0 else KEY.value
            mask_vector = plane_vector(self.mask_strides, self.size_k, 1, self.packed)

        window = 0 if window_left < 0 and window_right < 0 else 1 if window_left < 0 else 2
        self.window = window
        dropout = dropout_p > 0.0
        threshold = min(math.floor(dropout_p * 2**32), 2**32 - 1)
        self.scalars = {
            "bias_total": self.bias_total, "batch1": self.batch1, "sequences": max(sequences, 0), "size_q": self.size_q,
            "size_k": self.size_k, "head_dim": self.head_dim, "head_dim_v": self.head_dim_v, "scale": scale, "softcap": softcap,
            "left": UNBOUNDED if window_left < 0 else min(window_left, UNBOUNDED),
            "right": UNBOUNDED if window_right < 0 else min(window_right, UNBOUNDED), "lower_right": int(lower_right),
            "threshold": threshold - (1 << 32) if threshold >= 1 << 31 else threshold,
            "keep_scale": (1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0) if dropout else 1.0,
            "PACKED": self.packed, "WINDOW": window, "SOFTCAP": softcap > 0.0, "DROPOUT": dropout,
            "FOLD": bias is None and softcap == 0.0 and scale > 0.0, "BIAS": bias_kind, "BIAS_VECTOR": bias_vector, "RAGGED": ragged,
            "MASK": mask_kind, "MASK_VECTOR": mask_vector, "D0": d0, "D1": d1, "V0": v0, "V1": v1, "EVEN_D": d0 + d1 == self.head_dim,
            "EVEN_V": v0 + v1 == self.head_dim_v, "VECTOR": vector, "PRECISION": products(precision, dtype, capability),
        }  # fmt: skip
        self.heads_in_cache = max(
            1,
            device.l2_bytes
            // 2
            // max(1, self.size_k * (self.head_dim + self.head_dim_v) * dtype.itemsize),
        )

    @functools.cache  # noqa: B019 (plans live as long as the process, by design)
    def launch(self, kernel: str) -> tuple[int, dict]:
        """Programs and arguments of one kernel."""
        block_m, block_n, warps, stages, *registers = launch.config(
            kernel,
            self.device.capability,
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            self.length_q,
            self.length_k,
        )
        heads, size, block = (
            (self.heads_k, self.size_k, block_n)
            if kernel == "dkdv"
            else (self.heads, self.size_q, block_m)
        )
        tiles = size // block + self.sequences + 2 if self.packed else -(-size // block)
        section = min(
            self.heads_in_cache * (1 if kernel == "dkdv" else self.group), self.batch * heads
        )
        arguments = dict(
            self.scalars,
            heads=heads,
            group=self.group,
            tiles=tiles,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
            num_stages=stages,
        )
        if registers:
            arguments["maxnreg"] = registers[0]
        if kernel != "bias_gradient":
            # Without a mask all tiles take as long: one head after the other.
            arguments.update(
                heads_total=self.batch * heads, section=max(section, 1) if self.window else 1
            )
        return tiles * self.batch * heads, arguments


@functools.lru_cache(maxsize=1024)
def plan(*key) -> Plan:
    return Plan(*key)


def plan_of(
    tensors,
    bias,
    mask,
    cu_seqlens_q,
    bias_offsets,
    scale,
    softcap,
    window_left,
    window_right,
    lower_right,
    dropout_p,
    precision,
) -> Plan:
    q, k, v = tensors[:3]
    return plan(
        device_of(q.device), q.dtype, (q.shape, k.shape, v.shape), tuple(t.stride() for t in tensors),
        None if bias is None else (bias.shape, bias.stride(), bias.element_size()),
        None if mask is None else (mask.shape, mask.stride()),
        -1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, bias_offsets is not None, scale, softcap, window_left,
        window_right, lower_right, dropout_p, precision,
    )  # fmt: skip


def launch_on_device(function):
    """Runs `function` with the device of its third argument (v, or q after dout and dlse) current."""

    @functools.wraps(function)
    def wrapper(*arguments):
        device = arguments[2].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return function(*arguments)
        return function(*arguments)

    return wrapper


@launch_on_device
def forward(
    q,
    k,
    v,
    bias,
    mask,
    cu_seqlens_q,
    cu_seqlens_k,
    bias_offsets,
    dropout_seed,
    max_seqlen_q,
    max_seqlen_k,
    scale,
    softcap,
    window_left,
    window_right,
    lower_right,
    dropout_p,
    precision,
):
    p = plan_of(
        (q, k, v),
        bias,
        mask,
        cu_seqlens_q,
        bias_offsets,
        scale,
        softcap,
        window_left,
        window_right,
        lower_right,
        dropout_p,
        precision,
    )
    out = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]))
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if p.empty:
        return out.zero_(), lse.fill_(float("-inf"))
    programs, arguments = p.launch("forward")
    q_strides, k_strides, v_strides = p.strides
    forward_kernel[(programs,)](
        q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, out, lse,
        q_strides, k_strides, v_strides, strides4(out.stride()), p.bias_strides, p.mask_strides, **arguments,
    )  # fmt: skip
    return out, lse


@launch_on_device
def backward(
    dout,
    dlse,
    q,
    k,
    v,
    bias,
    mask,
    cu_seqlens_q,
    cu_seqlens_k,
    bias_offsets,
    dropout_seed,
    out,
    lse,
    max_seqlen_q,
    max_seqlen_k,
    scale,
    softcap,
    window_left,
    window_right,
    lower_right,
    dropout_p,
    precision,
    need,
):
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()
    if out.stride(-1) != 1:
        out = out.contiguous()
    p = plan_of(
        (q, k, v, dout, out),
        bias,
        mask,
        cu_seqlens_q,
        bias_offsets,
        scale,
        softcap,
        window_left,
        window_right,
        lower_right,
        dropout_p,
        precision,
    )
    dq = empty_like_layout(q, q.shape) if need & NEED_Q else q.new_empty(0)
    dk = empty_like_layout(k, k.shape) if need & NEED_K else q.new_empty(0)
    dv = empty_like_layout(v, v.shape) if need & NEED_V else q.new_empty(0)
    dbias = (q if bias is None else bias).new_empty(0)
    need_dbias = bias is not None and need & NEED_BIAS
    if p.empty:
        if need_dbias:
            dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=q.device)
        return dq.zero_(), dk.zero_(), dv.zero_(), dbias

    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    reference, delta = torch.empty_like(lse), torch.empty_like(lse)
    q_strides, k_strides, v_strides, dout_strides, out_strides = p.strides
    block = 32 if p.head_dim_v > 128 or p.size_q <= 32 else 64
    tiles = -(-p.size_q // block)
    delta_kernel[(tiles * p.batch * p.heads,)](
        dout, out, lse, dlse, reference, delta, dout_strides, out_strides, p.batch1, p.heads, tiles, p.size_q, p.head_dim_v,
        BLOCK_M=block, V0=p.scalars["V0"], V1=p.scalars["V1"], EVEN_V=p.scalars["EVEN_V"], VECTOR=p.scalars["VECTOR"],
        FOLD=p.scalars["FOLD"], num_warps=4 if block * p.head_dim_v >= 2048 else 1,
    )  # fmt: skip

    # Where the bias gradient comes from: see the kernels' heads.
    column_sums = shared = False
    stored, dbias_strides, dbias_vector = NO_BIAS_GRADIENT.value, EMPTY_STRIDES, 1
    if need_dbias:
        ragged = bias_offsets is not None
        full = (p.heads, p.bias_total) if ragged else (*q.shape[:-1], p.size_k)
        vector = 16 // bias.element_size()
        dbias_vector = vector if not ragged and p.size_k % vector == 0 else 1
        if bias.shape == full:
            stored = STORE.value
            # Scores that no query tile visits are not written.
            allocate = torch.zeros if p.window or ragged else torch.empty
            dbias = allocate(bias.shape, dtype=bias.dtype, device=q.device)
            dbias_strides = plane_strides(dbias.shape, dbias.stride(), ragged)
        elif not ragged and bias.shape[-2] == 1:
            column_sums = True
            sums = torch.empty((*lse.shape[:-1], p.size_k), dtype=torch.float32, device=q.device)
        elif not ragged and bias.shape[-1] == 1:
            stored = ROW_SUMS.value
            dbias = torch.empty_like(lse)
        else:
            shared = True

    if need & NEED_Q or stored:
        programs, arguments = p.launch("dq")
        dq_kernel[(programs,)](
            q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, dout, reference, delta, dq, dbias,
            q_strides, k_strides, v_strides, dout_strides, strides4(dq.stride()) if need & NEED_Q else EMPTY_STRIDES,
            p.bias_strides, p.mask_strides, dbias_strides, NEED_DQ=bool(need & NEED_Q), BIAS_GRADIENT=stored,
            DBIAS_VECTOR=dbias_vector, **arguments,
        )  # fmt: skip
    if need & (NEED_K | NEED_V) or column_sums:
        programs, arguments = p.launch("dkdv")
        dkdv_kernel[(programs,)](
            q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, dout, reference, delta, dk, dv,
            sums if column_sums else None, q_strides, k_strides, v_strides, dout_strides,
            strides4(dk.stride()) if need & NEED_K else EMPTY_STRIDES,
            strides4(dv.stride()) if need & NEED_V else EMPTY_STRIDES, p.bias_strides, p.mask_strides,
            NEED_DK=bool(need & NEED_K), NEED_DV=bool(need & NEED_V), COLUMN_SUMS=column_sums, **arguments,
        )  # fmt: skip
    if column_sums:
        dbias = reduce_to(sums.unsqueeze(-2), bias)
    elif stored == ROW_SUMS.value:
        dbias = reduce_to(dbias.unsqueeze(-1), bias)
    elif shared:
        dbias = shared_bias_gradient(
            p,
            q,
            k,
            v,
            bias,
            mask,
            cu_seqlens_q,
            cu_seqlens_k,
            bias_offsets,
            dropout_seed,
            dout,
            reference,
            delta,
            dbias_vector,
        )
    return dq, dk, dv, dbias


def reduce_to(sums: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """fp32 sums over the dims that the bias is broadcast along."""
    dims = [d for d, (n, m) in enumerate(zip(sums.shape, bias.shape, strict=True)) if n != m]
    return (sums.sum(dims, keepdim=True) if dims else sums).to(bias.dtype)


def shared_bias_gradient(
    p,
    q,
    k,
    v,
    bias,
    mask,
    cu_seqlens_q,
    cu_seqlens_k,
    bias_offsets,
    dropout_seed,
    dout,
    reference,
    delta,
    dbias_vector,
):
    _programs_per_block, arguments = p.launch("bias_gradient")
    ragged = bias_offsets is not None
    full = (p.batch0, p.batch1, p.heads)
    own = (1, 1, bias.shape[0]) if ragged else (1, 1, 1, *bias.shape[:-2])[-3:]
    shared = tuple(n // m for n, m in zip(full, own, strict=True))
    blocks, members = math.prod(own), math.prod(shared)
    tiles = arguments["tiles"]
    tiles_k = 1 if p.packed else -(-p.size_k // arguments["BLOCK_N"])
    # Enough splits to fill the device several times over, but each long enough to be worth its fp32 copy of the bias.
    splits = max(1, min(members // 4, -(-8 * p.device.processors // (blocks * tiles * tiles_k))))
    members_per_split = -(-members // splits)
    splits = -(-members // members_per_split)
    dtype = bias.dtype if splits == 1 else torch.float32
    # Blocks of a ragged bias need not cover it.
    parts = (torch.zeros if ragged else torch.empty)(
        (splits, *bias.shape), dtype=dtype, device=q.device
    )
    q_strides, k_strides, v_strides, dout_strides, _ = p.strides
    bias_gradient_kernel[(splits * blocks * tiles * tiles_k,)](
        q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, dout, reference, delta, parts,
        q_strides, k_strides, v_strides, dout_strides, p.bias_strides, p.mask_strides,
        plane_strides(bias.shape, parts.stride()[1:], ragged), own, shared, members, members_per_split, blocks, tiles_k,
        parts.stride(0), DBIAS_VECTOR=dbias_vector, **arguments,
    )  # fmt: skip
    return parts[0] if splits == 1 else parts.sum(0).to(bias.dtype)
