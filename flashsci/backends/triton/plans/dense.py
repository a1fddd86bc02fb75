"""The step from tensors to launches: decisions that depend only on shapes, strides and flags are made once and kept.

`Plan` and `Launch` hold them; after that a launch only collects pointers.
"""

import functools
import math

import torch

from flashsci.api.dropout import keep_threshold
from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.backward_keys import dkdv_kernel
from flashsci.backends.triton.kernels.backward_preprocess import delta_kernel
from flashsci.backends.triton.kernels.backward_queries import COLUMN_SUMS, DISTANCE_SUMS, STORE, dq_kernel
from flashsci.backends.triton.kernels.backward_small import small_backward_kernel
from flashsci.backends.triton.kernels.backward_small_shared import small_shared_backward_kernel
from flashsci.backends.triton.kernels.bias_gradient import bias_gradient_kernel
from flashsci.backends.triton.kernels.forward import forward_kernel
from flashsci.backends.triton.kernels.groups import (
    Chunks,
    Features,
    InputStrides,
    Schedule,
    ScoreMod,
    Sharing,
    Sizes,
)
from flashsci.backends.triton.kernels.scores import ABSENT, KEY, PLANE
from flashsci.backends.triton.launcher import Launch, device_of
from flashsci.backends.triton.plans.bias import (
    NO_ROUTE,
    bias_parts,
    bias_result,
    bias_route,
    reduce_to,
)
from flashsci.backends.triton.plans.strides import (
    NO_STRIDES,
    plane_strides,
    plane_vector,
    slope_strides,
    strides4,
    strides_of,
    table_strides_of,
    weight_strides,
)
from flashsci.backends.triton.plans.wide import Wide
from flashsci.call.mask_tiles import has_rows
from flashsci.call.ops import (
    BATCH_INVARIANT,
    NEED_BIAS,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Scalars,
    Tensors,
    empty_like_layout,
    pitches_bias_gradient,
)

UNBOUNDED = 1 << 30  # a window side that never cuts


def products(precision: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> str:
    """Triton's name for the precision of fp32 products. Before sm_80 there is no TF32: IEEE."""
    if dtype != torch.float32:
        return "tf32"
    if capability is not None and capability < (8, 0):
        return "ieee"
    return "tf32x3" if precision == "default" else precision


class DensePlan:
    """The values that the launches of one kind of call share. Made by `plan`."""

    def __init__(self, device, dtype, shapes, strides, bias, weight, mask, alibi, table, sequences, longest, ragged, scale, softcap,
                 window_left, window_right, lower_right, dropout_p, precision, caps_bias):  # fmt: skip
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
        self.varlen, self.sequences = sequences >= 0, sequences
        self.empty = self.batch * self.heads * self.size_q * self.size_k == 0
        self.launches: dict[tuple, Launch] = {}
        self.prepared: ForwardLaunches | None = None
        self.backwards: dict[int, BackwardLaunches] = {}  # by what they need
        self.second_orders: dict[tuple, object] = {}  # second_order.py's, by layout of two tangents
        # Typical lengths, which decide the tiles; those of varlen sequences vary about the mean.
        self.lengths = self.size_q, self.size_k
        self.longest = longest if self.varlen else max(self.lengths)
        if self.varlen and longest == BATCH_INVARIANT:
            self.lengths, self.longest = (UNBOUNDED, UNBOUNDED), UNBOUNDED
        elif self.varlen:
            self.lengths = tuple(3 * size // (2 * max(sequences, 1)) for size in self.lengths)

        precise = products(precision, dtype, device.capability)
        dims = self.head_dim, self.head_dim_v
        dense = not (self.varlen or self.empty)
        single = dense and dtype == torch.float32
        wide = single and tilings.is_wide(dims, *self.lengths, self.group)
        if mask is not None and dropout_p and max(dims) > 128 and not wide:
            # Triton 3.6 makes wrong code of these together with TF32 products (sm_90): P of some keys is lost or
            # misplaced.
            precise = "ieee" if dtype == torch.float32 else precise
        self.vector = self.row_vector((*q_shape[-1:], *v_shape[-1:]), strides)
        # Heads this wide have tiles of fewer than 64 rows in fp32: no wgmma, which the rules for unaligned rows are for.
        few_rows = dtype == torch.float32 and max(dims) > 128
        of_k = of_v = self.vector
        if few_rows or max(dims) > 256:  # where nothing is loaded ahead; q, k, v, dout, out, tq, tk, tv
            of_k = self.row_vector(dims[:1], (*strides[:2], *strides[5:7]))
            of_v = self.row_vector(dims[1:], (*strides[2:5], *strides[7:]))
        deep = precise != "tf32x3"
        d0, d1 = tilings.head_chunks(dims[0], few_rows or of_k > 1, deep, dims[1], 32 if of_k == 1 else 16)
        v0, v1 = tilings.head_chunks(dims[1], few_rows or of_v > 1, deep, dims[0], 32 if of_v == 1 else 16)
        self.strides = tuple(strides4(stride) for stride in strides)

        self.ragged = ragged
        bias_kind = mask_kind = ABSENT.value
        bias_vector = mask_vector = 0
        bias_strides = mask_strides = NO_STRIDES
        self.bias_total = 0
        if bias is not None:
            self.bias_shape, stride, itemsize = bias
            bias_strides = plane_strides(self.bias_shape, stride, ragged)
            bias_kind = PLANE.value if ragged or bias_strides[3] != 0 else KEY.value
            bias_vector = plane_vector(bias_strides, self.size_k, itemsize, self.varlen, not wide)
            self.bias_total = self.bias_shape[-1] if ragged else 0
        if mask is not None:
            shape, stride = mask
            mask_strides = plane_strides(shape, stride, False)
            mask_kind = PLANE.value if mask_strides[3] != 0 else KEY.value
            mask_vector = plane_vector(mask_strides, self.size_k, 1, self.varlen, not wide)

        kind_of_table = PLANE.value if table is not None and has_rows(table[0], self.size_q) else KEY.value
        self.tiles = ABSENT.value if table is None or wide else kind_of_table
        table_strides = table_strides_of(*table, self.size_q, self.size_k) if self.tiles else None
        self.bias_mask = PLANE.value in (bias_kind, mask_kind)
        self.tables = bool(self.tiles) and bias_kind != PLANE.value
        self.width = max(d0 + d1, v0 + v1)
        self.small = tilings.small_config(device.capability, dtype, self.width, self.longest)
        self.wide = Wide(self) if wide else None
        whole_rows = bias_vector <= 1 or self.size_k % bias_vector == 0
        one_tile = tilings.double_backward_small_config(device.capability, dtype, self.width, self.longest) is not None
        held = single and whole_rows and not (self.tiles or one_tile)
        held = held and tilings.holds_second_order(dims, *self.lengths, self.group)
        self.wide_second = Wide(self) if held else self.wide
        self.window = 0 if window_left < 0 and window_right < 0 else 1 if window_left < 0 else 2
        dropout = dropout_p > 0.0
        self.precision = precise
        of_weights = NO_STRIDES[:4] if weight is None else weight_strides(*weight[:2])
        of_slopes = NO_STRIDES[:3] if alibi is None else slope_strides(*alibi, self.varlen)
        self.arguments = {
            "strides": InputStrides(*self.strides[:3], bias_strides, of_weights, mask_strides, of_slopes, table_strides),
            "sizes": Sizes(
                self.bias_total, self.lead[1], self.heads, self.heads_k, self.group, max(sequences, 0),
                self.size_q, self.size_k, self.head_dim, self.head_dim_v,
            ),
            "mod": ScoreMod(
                scale=scale, softcap=softcap,
                left=UNBOUNDED if window_left < 0 else min(window_left, UNBOUNDED),
                right=UNBOUNDED if window_right < 0 else min(window_right, UNBOUNDED),
                lower_right=int(lower_right),
                threshold=keep_threshold(dropout_p),
                keep_scale=1.0 / (1.0 - dropout_p) if dropout and dropout_p < 1.0 else float(not dropout),
            ),
            "F": Features(
                VARLEN=self.varlen, WINDOW=self.window, SOFTCAP=softcap > 0.0, DROPOUT=dropout,
                BIAS=bias_kind, BIAS_VECTOR=bias_vector, RAGGED=ragged, MASK=mask_kind, MASK_VECTOR=mask_vector,
                CAPS_BIAS=caps_bias and softcap > 0.0 and (bias is not None or alibi is not None), TILES=self.tiles,
            ),
            "D": Chunks(d0, d1, d0 + d1 != self.head_dim, of_k),
            "V": Chunks(v0, v1, v0 + v1 != self.head_dim_v, of_v),
            "FOLD": bias is None and weight is None and alibi is None and softcap == 0.0 and scale > 0.0,
            "PRECISION": precise,
        }  # fmt: skip

    def row_vector(self, dims: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> int:
        """The elements of one load of rows of these head dims and strides: 16 bytes, where all are multiples of it."""
        vector = 16 // self.dtype.itemsize
        steps = (*dims, *(s for stride in strides for s in stride[:-1]))
        return vector if all(s % vector == 0 for s in steps) else 1

    def tiled(self, kernel: str, gated: bool = False) -> tuple[int, dict]:
        """Query (of BY_KEYS: key) tiles of a head, and the arguments with the tile sizes. gated: tiles of a gate stream, as those
        of a bias do."""
        block_m, block_n, warps, stages, *registers = tilings.config(
            kernel,
            self.device.capability,
            self.dtype,
            self.precision,
            self.head_dim,
            self.head_dim_v,
            self.bias_mask or bool(self.tiles) or gated,
            self.tables,
            *self.lengths,
        )
        by_keys = kernel in tilings.BY_KEYS
        size, block = (self.size_k, block_n) if by_keys else (self.size_q, block_m)
        tiles = size // block + self.sequences + 2 if self.varlen else -(-size // block)
        arguments = dict(self.arguments, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages)
        if registers and not (self.tables and self.arguments["F"].DROPOUT):  # whose random bits would spill
            arguments["maxnreg"] = registers[0]
        return tiles, arguments

    def scheduled(self, kernel: str, gated: bool = False) -> tuple[int, dict]:
        """Programs that cover the tiles of all heads once, and their arguments."""
        tiles, arguments = self.tiled(kernel, gated)
        by_keys = kernel in tilings.BY_KEYS
        heads = self.batch * (self.heads_k if by_keys else self.heads)
        # Without a window all tiles take the same time: one head after the other. Otherwise the longest come first,
        # in sections of heads whose keys and values fit in half the L2 cache.
        section = 1
        if self.window:
            head_bytes = self.size_k * (self.head_dim + self.head_dim_v) * self.dtype.itemsize
            fit = max(1, self.device.l2_bytes // 2 // max(1, head_bytes))
            section = min(fit if by_keys else fit * self.group, heads)
        arguments["schedule"] = Schedule(tiles, section, heads)
        return tiles * heads, arguments

    def whole(self, config: tuple[int, ...]) -> tuple[int, dict]:
        """Programs that each do a sequence of a key head, and their arguments. config: as from
        tilings.small_config."""
        side, warps, *registers = config
        arguments = dict(self.arguments, BLOCK=side, num_warps=warps, num_stages=1)
        if registers:
            arguments["maxnreg"] = registers[0]
        return (self.sequences + 2 if self.varlen else self.batch) * self.heads_k, arguments

    def shared(self, kernel: str) -> tuple[int, dict, int]:
        """Programs, arguments and the number of partial sums of a kernel over a bias that heads or batch members
        share."""
        tiles, arguments = self.tiled(kernel)
        tiles_k = 1 if self.varlen else -(-self.size_k // arguments["BLOCK_N"])
        return self.split(arguments, tiles, tiles_k)

    def split(
        self, arguments: dict, tiles: int, tiles_k: int, shape: tuple[int, ...] | None = None, along: int = 1
    ) -> tuple[int, dict, int]:
        """The same for tiles that cover a block of the bias, or of another tensor of this shape. along: the tiles of
        each member that are summed."""
        shape = self.bias_shape if shape is None else shape
        own = (1, 1, shape[0]) if self.ragged else (1, 1, 1, *shape[:-2])[-3:]
        full = (*self.lead, self.heads)
        shared = tuple(n // m for n, m in zip(full, own, strict=True))
        blocks, members = math.prod(own), along * math.prod(shared)
        programs = blocks * tiles * tiles_k
        # Enough splits to fill the device several times over, but each long enough to be worth its fp32 copy of the
        # bias.
        splits = max(1, min(members // 4, -(-8 * self.device.processors // programs)))
        each = -(-members // splits)
        splits = -(-members // each)
        arguments.update(
            own=own,
            shared=shared,
            sharing=Sharing(members, each, blocks, tiles, tiles_k, math.prod(shape)),
        )
        return splits * programs, arguments, splits

    def gradient_strides(self, dbias, use: int) -> tuple[int, ...]:
        """Strides of a bias gradient that a kernel stores directly."""
        return plane_strides(dbias.shape, dbias.stride(), self.ragged) if use == STORE.value else NO_STRIDES

    def parts_strides(self) -> tuple[int, ...]:
        """Strides of one partial sum of a shared bias gradient."""
        shape = self.bias_shape
        contiguous = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return plane_strides(shape, contiguous, self.ragged)

    def gradient_vector(self, dbias) -> int:
        vector = 1 if dbias is None else 16 // dbias.element_size()
        return vector if not self.ragged and self.size_k % vector == 0 else 1

    def stored_vector(self, dbias, use: int) -> int:
        """The vector of a bias gradient that a kernel stores directly: the pitch of its rows may hold the last one."""
        strides = self.gradient_strides(dbias, use)
        pitched = not self.ragged and strides[4] == 1 and strides[3] > self.size_k
        if not pitched:
            return self.gradient_vector(dbias)
        return plane_vector(strides, self.size_k, dbias.element_size(), self.varlen, True)

    def weight_sums(self, like) -> torch.Tensor:
        """Memory for the gradient of key weights: fp32, one per key head and key."""
        shape = (
            *self.score_shape[:-3],
            *(self.score_shape[-3:-2] and (self.heads_k,)),
            self.size_k,
        )
        return like.new_empty(shape, dtype=torch.float32)

    def forward(self, out) -> Launch:
        if "forward" not in self.launches:
            programs, arguments = self.scheduled("forward")
            arguments["out_strides"] = strides4(out.stride())
            self.launches["forward"] = Launch(forward_kernel, programs, arguments)
        return self.launches["forward"]

    def delta(self) -> Launch:
        if "delta" not in self.launches:
            block = 32 if self.head_dim_v > 128 or self.size_q <= 32 else 64
            tiles = -(-self.size_q // block)
            arguments = {name: self.arguments[name] for name in ("sizes", "V", "FOLD")} | {
                "dout_strides": self.strides[3],
                "out_strides": self.strides[4],
                "tiles": tiles,
                "BLOCK_M": block,
                "num_warps": 4 if block * self.head_dim_v >= 2048 else 1,
            }
            programs = tiles * self.batch * self.heads
            self.launches["delta"] = Launch(delta_kernel, programs, arguments)
        return self.launches["delta"]

    def dq(self, dq, use: int, dbias) -> Launch:
        """The launch of dq. `use`: the use of dS as bias gradient, see backward_queries.py."""
        key = "dq", dq is None, use
        if key not in self.launches:
            programs, arguments = self.scheduled("dq")
            arguments.update(
                dout_strides=self.strides[3],
                dq_strides=strides_of(dq),
                dbias_strides=self.gradient_strides(dbias, use),
                BIAS_GRADIENT=use,
                DBIAS_VECTOR=self.stored_vector(dbias, use),
            )
            self.launches[key] = Launch(dq_kernel, programs, arguments)
        return self.launches[key]

    def dkdv(self, dk, dv, column_sums: bool) -> Launch:
        key = "dkdv", dk is None, dv is None, column_sums
        if key not in self.launches:
            programs, arguments = self.scheduled("dkdv")
            arguments.update(dout_strides=self.strides[3], dk_strides=strides_of(dk), dv_strides=strides_of(dv))
            self.launches[key] = Launch(dkdv_kernel, programs, arguments)
        return self.launches[key]

    def small_backward(self, dq, dk, dv, use: int, dbias) -> Launch:
        key = "small", use
        if key not in self.launches:
            programs, arguments = self.whole(self.small)
            arguments.update(
                dout_strides=self.strides[3],
                out_strides=self.strides[4],
                dq_strides=strides_of(dq),
                dk_strides=strides_of(dk),
                dv_strides=strides_of(dv),
                dbias_strides=self.gradient_strides(dbias, use),
                BIAS_GRADIENT=use,
                DBIAS_VECTOR=self.stored_vector(dbias, use),
            )
            self.launches[key] = Launch(small_backward_kernel, programs, arguments)
        return self.launches[key]

    @property
    def small_shares(self) -> bool:
        """Whether one program may do the backward of short sequences that share a bias, one after the other."""
        if self.small is None or self.varlen or self.group > 1:
            return False
        return self.small[0] <= 32 or self.dtype != torch.float32  # whose 64 x 64 tiles would spill

    def small_shared_backward(self, dq, dk, dv, bias) -> tuple[Launch, int]:
        """The launch, and the number of partial sums of the bias gradient."""
        if "small_shared" not in self.launches:
            _, arguments = self.whole(self.small)
            programs, arguments, splits = self.split(arguments, 1, 1)
            arguments.update(
                dout_strides=self.strides[3],
                out_strides=self.strides[4],
                dq_strides=strides_of(dq),
                dk_strides=strides_of(dk),
                dv_strides=strides_of(dv),
                dbias_strides=self.parts_strides(),
                DBIAS_VECTOR=self.gradient_vector(bias),
            )
            made = Launch(small_shared_backward_kernel, programs, arguments)
            self.launches["small_shared"] = made, splits
        return self.launches["small_shared"]

    def bias_gradient(self, bias) -> tuple[Launch, int]:
        """The launch for a bias that heads or batch members share, and its number of partial sums."""
        if "bias_gradient" not in self.launches:
            programs, arguments, splits = self.shared("bias_gradient")
            arguments.update(
                dout_strides=self.strides[3],
                dbias_strides=self.parts_strides(),
                DBIAS_VECTOR=self.gradient_vector(bias),
            )
            made = Launch(bias_gradient_kernel, programs, arguments)
            self.launches["bias_gradient"] = made, splits
        return self.launches["bias_gradient"]


@functools.lru_cache(maxsize=1024)
def plan(*key) -> DensePlan:
    return DensePlan(*key)


def plan_of(strided, inputs: tuple, longest: int, options) -> DensePlan:
    """The plan for these inputs (in the order of Inputs). strided: q, k, v, then other tensors with rows whose
    strides matter."""
    q, k, v, bias, weight, mask, cu_seqlens_q, _, bias_offsets, _, alibi, table = inputs
    return plan(
        device_of(q.device),
        q.dtype,
        (q.shape, k.shape, v.shape),
        tuple([x.stride() for x in strided]),
        None if bias is None else (bias.shape, bias.stride(), bias.element_size()),
        None if weight is None else (weight.shape, weight.stride(), weight.element_size()),
        None if mask is None else (mask.shape, mask.stride()),
        None if alibi is None else (alibi.shape, alibi.stride()),
        None if table is None else (table.shape, table.stride()),
        -1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        longest,
        bias_offsets is not None,
        *options,
    )


def options_of(scalars: Scalars) -> tuple:
    """The options that a plan depends on: without longest lengths; all kernels are deterministic."""
    _, _, *options, _, caps_bias = scalars
    return *options, caps_bias


def longest_of(scalars: Scalars) -> int:
    """The longest lengths of a plan whose kernels do not ask for them: they say only whether the batch has a say."""
    return BATCH_INVARIANT if scalars.batch_invariant() else 0


def reads_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels of some pass of a dense call read its mask even if it has a table."""
    lengths = q.shape[-2], k.shape[-2]
    group = q.shape[:-2].numel() // max(1, k.shape[:-2].numel())
    wide = q.dtype == torch.float32 and tilings.is_wide((q.shape[-1], v.shape[-1]), *lengths, group)
    return wide or max(lengths) <= tilings.MOST_SMALL


def longest_class(max_seqlen_q: int, max_seqlen_k: int) -> int:
    """The class of the longest varlen lengths, if known: it only decides whether each sequence fits in one tile."""
    if max_seqlen_q == BATCH_INVARIANT:
        return BATCH_INVARIANT
    longest = max(max_seqlen_q, max_seqlen_k) if min(max_seqlen_q, max_seqlen_k) >= 0 else 1 << 30
    return 32 if longest <= 32 else 64 if longest <= 64 else 1 << 30


def rows_like(x) -> tuple:
    """Shape and strides of a gradient with rows like x's."""
    return x.shape, empty_like_layout(x, x.shape).stride()


class ForwardLaunches:
    """A function that computes out, lse of tensors of one signature: it allocates memory for them and launches."""

    def __init__(self, p: DensePlan, tensors: Tensors):
        q, _, v = tensors[:3]
        out = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]))
        self.out, self.lse = (out.shape, out.stride()), q.shape[:-1]
        self.dtype, self.device = q.dtype, q.device
        self.run = None if p.empty else p.wide.forward if p.wide else p.forward(out)

    def __call__(self, tensors: Tensors):
        out = torch.empty_strided(*self.out, dtype=self.dtype, device=self.device)
        lse = torch.empty(self.lse, dtype=torch.float32, device=self.device)
        if self.run is None:
            out.zero_(), lse.fill_(float("-inf"))
        else:
            self.run(tuple(tensors), out, lse)
        return out, lse

    def at_addresses(self, raised) -> "ForwardLaunches":
        """The same for tensors from which `raised` makes views: kernels read addresses, and strides of the plan."""
        return self


class BackwardLaunches:
    """A function that computes dq, dk, dv, dbias, dweight of tensors of one signature, None where `need` does not
    name them."""

    def __init__(self, p: DensePlan, tensors: Tensors, need: int):
        q, k, v, bias, weight = tensors[:5]
        self.plan, self.need = p, need
        self.rows = [rows_like(x) if need & bit else None for x, bit in ((q, NEED_Q), (k, NEED_K), (v, NEED_V))]
        self.need_dbias = bias is not None and bool(need & NEED_BIAS)
        windowed = bool(p.window or p.varlen)
        self.pitched = self.need_dbias and pitches_bias_gradient(bias, q, k, windowed)
        self.need_dweight = weight is not None and bool(need & NEED_KEY_WEIGHT)
        self.dtype, self.device = q.dtype, q.device

    def __call__(self, dout, dlse, tensors: Tensors, out, lse):
        p = self.plan
        q, _, _, bias, weight = tensors[:5]
        dq, dk, dv = [
            None if x is None else torch.empty_strided(*x, dtype=self.dtype, device=self.device) for x in self.rows
        ]
        if p.empty:
            for x in (dq, dk, dv):
                if x is not None:
                    x.zero_()
            dbias = torch.zeros_like(bias) if self.need_dbias else None
            return dq, dk, dv, dbias, torch.zeros_like(weight) if self.need_dweight else None
        dout, out = rows_of(dout, out), rows_of(out, out)
        lse = lse.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        inputs = tuple(tensors)
        if p.wide is not None:
            rows = dq, dk, dv
            return *rows, *p.wide.backward(dout, dlse, inputs, out, lse, rows, self.need)[:2]
        use, dbias, sums, shared = bias_route(p, bias, lse, self.pitched) if self.need_dbias else NO_ROUTE
        weight_sums = p.weight_sums(q) if self.need_dweight else None
        small = p.small and dq is not None and dk is not None and dv is not None
        if small and shared and p.small_shares:
            run, splits = p.small_shared_backward(dq, dk, dv, bias)
            dbias = bias_parts(p, bias, splits)
            run(inputs, dout, out, lse, dlse, dq, dk, dv, dbias, weight_sums)
            return dq, dk, dv, bias_result(bias, use, dbias, None, True), self.weight_gradient(weight_sums, weight)
        if small and not shared:
            kind = COLUMN_SUMS.value if sums is not None else use
            into = dbias if sums is None else sums
            p.small_backward(dq, dk, dv, kind, dbias)(inputs, dout, out, lse, dlse, dq, dk, dv, into, weight_sums)
        else:
            reference, delta = torch.empty_like(lse), torch.empty_like(lse)
            p.delta()(dout, out, lse, dlse, reference, delta)
            if dq is not None or use:
                p.dq(dq, use, dbias)(inputs, dout, reference, delta, dq, dbias)
            if not (dk is dv is sums is weight_sums is None):
                p.dkdv(dk, dv, sums is not None)(inputs, dout, reference, delta, dk, dv, sums, weight_sums)
        if shared:
            run, splits = p.bias_gradient(bias)
            dbias = bias_parts(p, bias, splits)
            run(inputs, dout, reference, delta, dbias)
        if self.need_dbias:
            dbias = bias_result(bias, use, dbias, sums, shared)
        return dq, dk, dv, dbias, self.weight_gradient(weight_sums, weight)

    @staticmethod
    def weight_gradient(sums, weight):
        return None if sums is None else reduce_to(sums, weight)


def rows_of(x, out):
    """A gradient of out, or out, with a contiguous last dim; None: zeros."""
    if x is None:
        return torch.zeros_like(out if out.stride(-1) == 1 else out.contiguous())
    return x if x.stride(-1) == 1 else x.contiguous()


def prepared_forward(tensors: Tensors, scalars: Scalars) -> ForwardLaunches:
    """A prepared forward. Longest lengths are not needed."""
    p = plan_of(tensors[:3], tuple(tensors), longest_of(scalars), options_of(scalars))
    if p.prepared is None:
        p.prepared = ForwardLaunches(p, tensors)
    return p.prepared


def prepared_backward(dout, saved: Saved, need: int) -> BackwardLaunches:
    tensors, out, _, scalars = saved
    longest = longest_class(scalars.max_seqlen_q, scalars.max_seqlen_k)
    p = plan_of((*tensors[:3], rows_of(dout, out), rows_of(out, out)), tuple(tensors), longest, options_of(scalars))
    if need not in p.backwards:
        p.backwards[need] = BackwardLaunches(p, tensors, need)
    return p.backwards[need]


def slope_sums(dout, dlse, saved: Saved) -> torch.Tensor:
    """The gradient of ALiBi slopes as sums over keys, fp32 [*, Hq, Sq]: those of the rows of a head make that of its
    slope."""
    tensors, out, lse, _ = saved
    p = prepared_backward(dout, saved, 0).plan
    lse = lse.contiguous()  # hooks of saved tensors may have returned any strides
    sums = torch.empty_like(lse)
    if p.empty:
        return sums.zero_()
    dout, out = rows_of(dout, out), rows_of(out, out)
    reference, delta = torch.empty_like(lse), torch.empty_like(lse)
    p.delta()(dout, out, lse, None if dlse is None else dlse.contiguous(), reference, delta)
    p.dq(None, DISTANCE_SUMS.value, None)(tuple(tensors), dout, reference, delta, None, sums)
    return sums


def forward(tensors: Tensors, scalars: Scalars):
    """out, lse."""
    return prepared_forward(tensors, scalars)(tensors)


def backward(dout, dlse, saved: Saved, need: int):
    """dq, dk, dv, dbias, dweight; those that `need` does not name are empty."""
    tensors, out, lse, _ = saved
    q, _, _, bias, weight = tensors[:5]
    likes = (q, q, q, q if bias is None else bias, q if weight is None else weight)
    found = prepared_backward(dout, saved, need)(dout, dlse, tensors, out, lse)
    return tuple(like.new_empty(0) if x is None else x for x, like in zip(found, likes, strict=True))
