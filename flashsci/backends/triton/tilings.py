"""Tile sizes, warps and pipeline stages: small tables by kernel, architecture, dtype and head dim, from measurements
(docs/develop/kernels/triton.md). No search at run time: the same call always runs the same kernel."""

import functools

import torch

BY_KEYS = ("dkdv", "double_backward_keys")  # kernels that own key tiles
BY_BIAS = ("bias_gradient", "double_backward_bias")  # and those that own tiles of a bias

# (BLOCK_M, BLOCK_N, warps, stages[, registers a thread at most]) for head dims up to the key;
# max(D, Dv) after padding selects the row.
Tiles = dict[str, dict[int, tuple[int, ...]]]
HOPPER_16BIT: Tiles = {
    "forward": {
        64: (64, 64, 4, 3),
        128: (64, 64, 4, 3),
        256: (128, 64, 8, 2),
        384: (64, 32, 8, 1),
        512: (64, 32, 4, 1),
    },
    "dq": {
        32: (64, 32, 4, 3),
        64: (128, 64, 8, 3, 128),
        128: (64, 64, 4, 2),
        256: (64, 64, 4, 2),
        512: (32, 32, 4, 1),
    },
    "dkdv": {
        64: (64, 64, 4, 3),
        128: (64, 128, 8, 3),
        256: (64, 64, 4, 1),
        512: (32, 32, 4, 1),
    },
    "bias_gradient": {
        64: (64, 64, 4, 3),
        128: (64, 64, 4, 2),
        256: (64, 64, 4, 1),
        512: (32, 32, 4, 1),
    },
    "jvp": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 4, 1), 512: (32, 16, 4, 1)},
    "many_jvp": {64: (64, 32, 4, 2)},
    "second_jvp": {64: (64, 32, 4, 2), 128: (128, 32, 8, 1), 256: (64, 16, 4, 1), 512: (16, 16, 4, 1)},
    "double_backward_queries": {
        64: (64, 64, 4, 2),
        128: (64, 32, 4, 2),
        256: (32, 32, 4, 1),
        512: (16, 16, 4, 1),
    },
    "double_backward_keys": {
        64: (64, 64, 4, 2),
        128: (32, 64, 4, 1),
        256: (16, 32, 4, 1),
        512: (16, 16, 4, 1),
    },
    "double_backward_bias": {
        64: (64, 64, 4, 2),
        128: (64, 32, 4, 2),
        256: (32, 32, 4, 1),
        512: (16, 16, 4, 1),
    },
}
# With a bias or mask for each pair, whose tiles go through shared memory too.
HOPPER_16BIT_BIAS_MASK = HOPPER_16BIT | {
    "dq": HOPPER_16BIT["dq"] | {64: (64, 64, 4, 3)},
    "dkdv": HOPPER_16BIT["dkdv"] | {128: (64, 64, 4, 2), 256: (32, 64, 4, 1)},
    "forward": HOPPER_16BIT["forward"] | {256: (64, 64, 4, 2)},
    "many_jvp": {32: (64, 32, 4, 2), 64: (64, 16, 4, 2)},
}
# With a table of tiles (mask_tiles.py) and no such bias: 128 query rows halve the reads of K and V. The steps of a list depend on
# loads, so that more stages than usual hide them.
HOPPER_16BIT_TABLES = HOPPER_16BIT_BIAS_MASK | {
    "forward": HOPPER_16BIT_BIAS_MASK["forward"] | {64: (128, 64, 8, 5, 128), 128: (128, 128, 8, 2)},
    "dq": HOPPER_16BIT_BIAS_MASK["dq"] | {64: (64, 64, 4, 5, 168), 128: (128, 64, 8, 5)},
    "dkdv": HOPPER_16BIT_BIAS_MASK["dkdv"] | {64: (64, 64, 4, 5), 128: (64, 128, 8, 5)},
}
AMPERE_16BIT: Tiles = {
    "forward": {
        64: (128, 64, 4, 3),
        128: (128, 64, 8, 3),
        256: (64, 32, 4, 2),
        512: (32, 32, 4, 1),
    },
    "dq": {64: (64, 64, 4, 3), 128: (64, 64, 8, 2), 256: (32, 32, 4, 2), 512: (32, 16, 4, 1)},
    "dkdv": {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 4, 1), 512: (16, 32, 4, 1)},
    "bias_gradient": {128: (64, 64, 4, 2), 256: (32, 64, 4, 1), 512: (32, 32, 4, 1)},
    "jvp": {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "many_jvp": {32: (64, 32, 4, 2), 64: (64, 16, 4, 2)},
    "second_jvp": {64: (64, 32, 4, 1), 128: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "double_backward_queries": {
        64: (64, 32, 4, 2),
        128: (32, 32, 4, 1),
        256: (16, 16, 4, 1),
        512: (16, 16, 4, 1),
    },
    "double_backward_keys": {
        64: (32, 64, 4, 2),
        128: (32, 32, 4, 1),
        256: (16, 16, 4, 1),
        512: (16, 16, 4, 1),
    },
    "double_backward_bias": {
        64: (64, 32, 4, 2),
        128: (32, 32, 4, 1),
        256: (16, 16, 4, 1),
        512: (16, 16, 4, 1),
    },
}
TURING_16BIT: Tiles = {  # 64 KiB of shared memory, no asynchronous copies
    "forward": {64: (64, 64, 4, 1), 128: (64, 32, 4, 1), 256: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "dq": {64: (64, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1), 512: (16, 16, 4, 1)},
    "dkdv": {64: (32, 64, 4, 1), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1), 512: (16, 16, 4, 1)},
    "bias_gradient": {64: (64, 64, 4, 1), 128: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "jvp": {64: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "second_jvp": {64: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "double_backward_queries": {64: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "double_backward_keys": {64: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "double_backward_bias": {64: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
}
# fp32: three tf32 products hold two halves of every operand in registers; IEEE products run on the plain cores.
FP32: Tiles = {
    "forward": {
        32: (64, 64, 4, 2),
        64: (64, 32, 4, 2),
        128: (64, 32, 4, 2),
        256: (32, 32, 4, 1),
        512: (16, 16, 4, 1),
    },
    "dq": {
        32: (64, 32, 4, 2),
        64: (64, 32, 4, 1),
        128: (32, 32, 4, 1),
        256: (32, 16, 4, 1),
        512: (16, 16, 4, 1),
    },
    "dkdv": {
        32: (32, 64, 4, 2),
        64: (32, 64, 4, 1),
        128: (32, 32, 4, 1),
        256: (16, 32, 4, 1),
        512: (16, 16, 4, 1),
    },
    "bias_gradient": {
        32: (64, 64, 4, 2),
        64: (32, 64, 4, 1),
        128: (32, 32, 4, 1),
        512: (16, 16, 4, 1),
    },
    "jvp": {
        32: (64, 32, 4, 2),
        64: (64, 32, 4, 1),
        128: (32, 32, 4, 1),
        256: (16, 16, 4, 1),
        512: (16, 16, 4, 1),
    },
    "many_jvp": {32: (64, 16, 4, 1)},
    "second_jvp": {32: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "double_backward_queries": {32: (32, 32, 4, 2), 64: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "double_backward_keys": {32: (32, 32, 4, 2), 64: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "double_backward_bias": {32: (32, 32, 4, 2), 64: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
}
HOPPER_FP32 = FP32 | {
    "forward": FP32["forward"] | {32: (64, 32, 4, 2), 128: (64, 64, 4, 1), 384: (32, 32, 8, 1)},
    "dq": FP32["dq"] | {32: (64, 64, 4, 1), 64: (64, 64, 4, 1), 128: (32, 32, 4, 2)},
    "dkdv": FP32["dkdv"] | {32: (64, 64, 4, 1), 64: (32, 32, 2, 1), 128: (32, 32, 4, 1)},
    "second_jvp": FP32["second_jvp"] | {32: (64, 32, 4, 1), 64: (64, 16, 4, 1)},
}
# Without a bias or mask for each pair, which take shared memory, and by tensor cores.
HOPPER_TENSOR_FP32 = {
    "tf32x3": HOPPER_FP32
    | {
        "jvp": FP32["jvp"] | {64: (128, 64, 8, 1)},
        "double_backward_queries": FP32["double_backward_queries"] | {64: (128, 32, 8, 1)},
    },
    "tf32": HOPPER_FP32
    | {
        "dkdv": HOPPER_FP32["dkdv"] | {64: (64, 64, 4, 1)},
        "jvp": FP32["jvp"] | {64: (128, 64, 8, 2)},
        "double_backward_queries": FP32["double_backward_queries"] | {64: (128, 32, 8, 2)},
        "double_backward_keys": FP32["double_backward_keys"] | {64: (64, 32, 4, 1)},
    },
}
TURING_FP32: Tiles = {
    name: {d: (min(m, 32), min(n, 32), 4, 1) for d, (m, n, _, _) in rows.items()} for name, rows in FP32.items()
}
INTERPRETER: Tiles = {name: {512: (32, 16, 4, 1)} for name in FP32}  # small, so that small tests have several tiles

MAX_HEAD_DIM = 512
MOST_SMALL = 64  # rows and keys of a sequence whose backward one program does
MOST_KEYS = 8192  # keys of a row of scores that one program holds
SHORT_ROW = 1024  # keys of rows of which a head may have any number
FEW_PAIRS = 1 << 20  # scores of a head with longer rows, of which a window may hide most: wide heads compute all
FEW_SCORES = 1 << 24  # scores that are held in memory at a time, 64 MiB
LEAST_HELD = 64  # head dim from which the second order holds them
LEAST_PIECE = 256  # keys of a piece of a sum
BUSY = 4  # programs of a processor that hide each other's loads


@functools.lru_cache
def head_chunks(d: int, split: bool = True, deep: bool = True, other: int = 0, least: int = 16) -> tuple[int, int]:
    """A head dim as one or two powers of two: 64 -> (64, 0), 80 -> (64, 16), 24 -> (32, 0).

    The ptxas of Triton 3.6 (12.8) loses the shared-memory address of the second product with a tile that is not
    loaded ahead. Rows that are not aligned to 16 bytes never are. The fault has two forms;
    tools/kernels/undefined_registers.py finds them.

    Args:
        split: rows that are not aligned are not split: two products with one left operand were one form of the fault.
        deep: whether one chunk may have any depth. For three TF32 products it may not, because tensor cores round
            sums towards zero: from 128 on, 128 -> (64, 64).
        other: the other head dim. Tiles of K and V that are not aligned share a place. They were the other form,
            where one has rows of 128 bytes or more and the other shorter ones: (50, 20) are both 64 wide.
        least: width of the second chunk. With 16 columns of unaligned rows in fp32, ptxas overwrites a register before its last use
            in `dkdv_kernel` of head dims 129 to 144, and stores of shared memory are misaligned.
    """
    if not split:
        d = max(d, min(other, 64))
    d = max(16, -(-d // 16) * 16)
    power = 1 << (d.bit_length() - 1)
    if power == d:
        return (d, 0) if deep or d < 128 or not split else (d // 2, d // 2)
    rest = max(least, 1 << (d - power - 1).bit_length())
    return (power, rest) if split and rest < power else head_chunks(2 * power, split, deep)


@functools.lru_cache(maxsize=4096)
def config(
    kernel: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    precision: str,
    head_dim: int,
    head_dim_v: int,
    bias_mask: bool,
    tables: bool,
    length_q: int,
    length_k: int,
) -> tuple[int, ...]:
    """(BLOCK_M, BLOCK_N, warps, stages[, registers a thread]); lengths are typical ones when the batch is varlen.

    bias_mask: a bias, mask or gate for each pair. tables: the mask has a table of its tiles, and there is no other.
    """
    if capability is None:
        table = INTERPRETER
    elif dtype == torch.float32:
        table = TURING_FP32 if capability < (8, 0) else FP32
        if capability[0] == 9:
            table = HOPPER_FP32 if bias_mask else HOPPER_TENSOR_FP32.get(precision, HOPPER_FP32)
    elif capability < (8, 0):
        table = TURING_16BIT
    elif capability[0] == 9 and tables:
        table = HOPPER_16BIT_TABLES
    elif capability[0] == 9:
        table = HOPPER_16BIT_BIAS_MASK if bias_mask else HOPPER_16BIT
    else:
        table = AMPERE_16BIT
    width = max(sum(head_chunks(head_dim)), sum(head_chunks(head_dim_v)))
    rows = table[kernel]
    registers: list[int]
    block_m, block_n, warps, stages, *registers = rows[min(d for d in rows if d >= width)]
    # Short sequences: smaller tiles, and no more warps than they can feed. There are few sizes, so that few kernels
    # are compiled.
    chosen = block_m, block_n
    # Hopper's wgmma takes 64 rows. These kernels have both products whose rows are queries (scores that are read with
    # a bias or mask) and products whose rows are keys.
    both_ways = capability is not None and capability >= (9, 0) and bias_mask and kernel in BY_KEYS
    longest = max(length_q, length_k)
    if longest <= 64:
        block_m, block_n = min(block_m, 64), min(block_n, 64)
    if length_q <= 32:
        block_m = min(block_m, 32)
    streams_keys = kernel not in BY_KEYS + BY_BIAS
    if length_k <= 32 or (streams_keys and length_q <= 32 and length_k <= 128 and width <= 32):
        block_n = min(block_n, 32)
    if longest <= 256 and kernel not in BY_BIAS and not both_ways:  # 144 = 4.5 tiles of 32: better than 2.25 of 64
        length, block = (length_k, block_n) if streams_keys else (length_q, block_m)
        if block > 32 and -(-length // block) * block > 1.2 * length:
            block_m, block_n = (block_m, 32) if streams_keys else (32, block_n)
    if (block_m, block_n) != chosen:
        registers = []
        most = 4 if width > 64 or block_m * block_n > 32 * 32 else 1 if width <= 32 else 2
        warps = min(warps, most if block_m * block_n <= 64 * 64 else warps)
    if kernel == "many_jvp" and block_m < 64 and capability is not None:  # 16 rows of each tO a warp
        block_n, warps = min(block_n, 16), block_m // 16
    # The rows that this kernel keeps fill the registers of mma's operands.
    if kernel == "second_jvp" and dtype == torch.float32 and width > 32 and block_m == 32:
        block_m, block_n = 16, 16
    # A tile that both wgmma and mma read gets one buffer too few from Triton 3.6, which overwrites it while wgmma reads.
    if both_ways and min(block_m, block_n) < 64 <= max(block_m, block_n):
        stages = 1
    return block_m, block_n, warps, stages, *registers


def small_config(
    capability: tuple[int, int] | None, dtype: torch.dtype, width: int, longest: int
) -> tuple[int, ...] | None:
    """(tile side, warps[, registers a thread]) if one program does the whole backward of a sequence; None: it does
    not fit."""
    wide, turing = dtype == torch.float32, capability is not None and capability < (8, 0)
    if longest > (32 if capability is None or turing else MOST_SMALL):
        return None
    if width > (64 if wide or turing else 128):
        return None
    if longest <= 32:
        return (32, 2, 168 if wide else 128) if width <= 32 else (32, 4)
    return None if wide and width > 32 else (64, 4)


def most_directions(
    capability: tuple[int, int] | None, dtype: torch.dtype, precision: str, width: int, plain: bool, bias_moves: bool
) -> int:
    """The directions whose tangents a program of many_jvp computes at most: with more, its registers would spill. 1: it has no
    room for a second one.

    plain: no bias, mask, key weights, dropout, softcap; bias_moves: a bias has tangents.
    """
    if capability is None:
        return 4 if width <= 32 else 2 if width <= 64 else 1
    if capability < (8, 0):
        return 1
    hopper = capability[0] == 9
    if dtype == torch.float32:
        return 2 if hopper and plain and width <= 32 and precision != "ieee" else 1
    if width > (32 if bias_moves else 64) or not (hopper or plain):
        return 1
    return 4 if hopper and plain and width <= 32 else 2


def is_wide(dims: tuple[int, int], length_q: int, length_k: int, group: int) -> bool:
    """Whether scores of fp32 inputs are held in memory, between products of whole heads: no tile serves rows so wide.

    group: query heads of a key head, whose scores are in memory together.
    """
    pairs = length_q * length_k
    few = 2 * pairs <= (length_q + length_k) * sum(dims) or group * pairs <= FEW_SCORES
    fits = length_k <= SHORT_ROW or (length_k <= MOST_KEYS and pairs <= FEW_PAIRS)
    return max(dims) > 128 and few and fits


def holds_second_order(dims: tuple[int, int], length_q: int, length_k: int, group: int) -> bool:
    """Whether the second order of fp32 inputs alone holds scores in memory: its tiles of heads this wide spill."""
    few = group * length_q * length_k <= FEW_SCORES
    return LEAST_HELD <= max(dims) <= 128 and few and length_k <= SHORT_ROW


def product_config(
    capability: tuple[int, int] | None, of_rows: bool, rows: int, depth: int, aligned: bool
) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) of a product of whole heads. of_rows: its depth is a head dim."""
    if capability is None:
        return 16, 32, 16, 4, 1
    if capability < (8, 0):
        return 32, 32, 16, 4, 1
    # Few queries: the cost is that many programs read, or write, the other operand.
    if rows <= 16:
        return (16, 32, 32, 1, 3) if of_rows else (16, 64, 16, 1, 4)
    # On Hopper, four warps with 64 rows use wgmma, for which three TF32 products write both halves of an operand to
    # shared memory: only long sums are worth it.
    if of_rows and aligned:
        return (64, 64, 32, 4, 3) if rows > 32 else (32, 32, 32, 2, 3)
    if of_rows:
        return 32, 64, 16, 2, 3
    if depth <= 64:
        return (64, 64, 16, 2, 3) if rows > 32 and depth > 16 else (32, 64, 16, 1, 3)
    half_empty = 0 < rows % 64 <= 32  # the last of the tiles with 64 rows
    return (32, 64, 32, 2, 3) if half_empty else (64, 64, 16, 2, 3)


def pieces_of(processors: int, programs: int, depth: int, step: int) -> tuple[int, int]:
    """The number of pieces of a sum over this many keys, each with programs of its own, and the keys of a piece, a multiple of step.

    One for short rows; of longer ones enough to fill the processors.
    """
    most = depth // LEAST_PIECE if depth > SHORT_ROW else 1
    pieces = max(1, min(most, -(-BUSY * processors // programs)))
    piece = -(-depth // (pieces * step)) * step
    return -(-depth // piece), piece


def rows_config(rows: int, columns: int, narrower: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, warps) of a kernel on whole rows of scores; 1/narrower of the rows, or more warps for one row."""
    n = max(16, 1 << (columns - 1).bit_length())
    m = min(1 << (rows - 1).bit_length(), 4096 // narrower // n, 64 // narrower)
    return max(m, 1), n, max(4, n * narrower // 1024)


@functools.lru_cache
def double_backward_small_config(
    capability: tuple[int, int] | None, dtype: torch.dtype, width: int, longest: int
) -> tuple[int, ...] | None:
    """The same for the double backward, which holds twice as much."""
    wide, turing = dtype == torch.float32, capability is not None and capability < (8, 0)
    if longest <= 32:
        return None if width > 64 or turing else (32, 2) if width <= 32 else (32, 4)
    fits = longest <= 64 and width <= (32 if wide else 64)
    return (64, 4) if fits and capability is not None and not turing else None
