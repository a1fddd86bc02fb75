"""The arguments of kernels: those that belong together are named tuples, both on the host and inside kernels.

Tuples annotated `tl.constexpr` in a kernel (Features, Chunks) are known to the compiler; a kernel is compiled for
each of their values. All others reach the device as the numbers and pointers in them. Of these, the compiled kernel
contains: which tensors are absent (None), dtypes, which pointers are multiples of 16 bytes, and which strides are 1
(not those of rows) or multiples of 16.
"""

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """flashsci.call.ops.Tensors: tensors on the host, pointers in a kernel. None for tensors that a call does not have."""

    q: Any
    k: Any
    v: Any
    bias: Any
    weight: Any  # of keys
    mask: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    bias_offsets: Any
    dropout_seed: Any
    alibi_slopes: Any
    mask_tiles: Any  # see tiles.py


class TangentOperands(NamedTuple):
    """Tangents of the inputs of these names, see tangents.py. None: zero."""

    q: Any
    k: Any
    v: Any
    bias: Any
    weight: Any


class InputStrides(NamedTuple):
    """Strides of the inputs; 0 in the dims that a tensor is broadcast along."""

    q: tuple[int, ...]  # (b0, b1, head, row)
    k: tuple[int, ...]
    v: tuple[int, ...]
    bias: tuple[int, ...]  # (b0, b1, head, row, column)
    weight: tuple[int, ...]  # (b0, b1, key head, key)
    mask: tuple[int, ...]  # as for bias
    alibi: tuple[int, ...]  # (b0, b1, head); for a varlen batch (sequence, 0, head)
    tiles: (
        tuple[int, ...] | None
    )  # of the mask's table of tiles: (b0, b1, head), then the tiles that have bits; None without one


class TangentStrides(NamedTuple):
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    bias: tuple[int, ...]
    weight: tuple[int, ...]


class Sizes(NamedTuple):
    bias_total: int  # elements of a ragged bias per head
    batch1: int  # the inner one of two batch dims
    heads: int  # of queries
    heads_k: int
    group: int  # query heads of a key head
    sequences: int  # of a varlen batch
    size_q: int  # rows of the tensor, which are the sequence in a dense batch
    size_k: int
    head_dim: int  # of q and k
    head_dim_v: int


class Schedule(NamedTuple):
    """The order in which programs take tiles, see coord.dense_tile."""

    tiles: int  # of a head, over the whole varlen batch
    section: int  # heads
    heads_total: int  # in the whole batch; key heads if a program owns keys


class ScoreMod(NamedTuple):
    """The steps from a product q k^T to a probability."""

    scale: float
    softcap: float
    left: int  # window
    right: int
    lower_right: int  # 1: the diagonal ends in the lower right corner
    threshold: int  # for dropout: bits below it drop
    keep_scale: float  # 1 / (1 - p)


class Sharing(NamedTuple):
    """The split of the gradient of a bias that heads and batch members share, see bias_gradient.py."""

    members: int  # of each block
    members_per_split: int
    blocks: int  # heads and batch members that the bias has
    tiles_q: int
    tiles_k: int
    split_stride: int


class Features(NamedTuple):
    """The features of a call; compiled in."""

    VARLEN: bool
    WINDOW: int  # 0: none, 1: a right side, 2: both
    SOFTCAP: bool
    DROPOUT: bool
    BIAS: int  # ABSENT, PLANE or KEY, see scores.py
    BIAS_VECTOR: int  # elements in one load; 0: columns have a stride of their own
    RAGGED: bool  # the bias is one block of pairs after the other
    MASK: int
    MASK_VECTOR: int
    CAPS_BIAS: bool = False  # the softcap bounds bias and ALiBi, too
    TILES: int = 0  # ABSENT, PLANE or KEY: the mask has a table of tiles, see tiles.py


class Chunks(NamedTuple):
    """The chunks of a head dim (see chunks.py); compiled in."""

    W0: int
    W1: int  # 0: one chunk
    PADDED: bool  # the head dim is less than W0 + W1
    VECTOR: int  # strides and head dims are multiples of it


class ProductStrides(NamedTuple):
    """Strides of the operands and the result of wide_products.py: (b0, b1, head, row)."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    a2: tuple[int, ...]
    b2: tuple[int, ...]
    out: tuple[int, ...]


class Product(NamedTuple):
    """One product for each head of a section of a result, see wide_products.py."""

    first: int  # head of the section, of the result's over all batch members
    batch1: int  # the inner one of two batch dims
    heads: int  # of the result
    members: int  # heads of `a` that are summed for one of the result
    shared: int  # heads of `a` that share one of `b`
    rows: int  # of the result
    columns: int
    depth: int  # the length of the sum
    count: int  # of the section's heads, of the result's
    piece: int  # the length of a piece of the sum, where a program has one
    tiles_m: int
    tiles_n: int
    factor: float


class Operand(NamedTuple):
    """The memory layout of an operand; compiled in."""

    TURNED: bool  # transposed: neighbours are rows of the product's matrix
    PADDED: bool  # neighbours end within a tile
    LOCAL: bool  # scores, which are in memory for a section's heads alone
    VECTOR: int  # strides and rows are multiples of it


# Strides of tensors with rows, as arguments of kernels or fields of groups: (b0, b1, head, row).
ROWS = frozenset((
    "q", "k", "v", "out_strides", "dout_strides", "tout_strides", "dq_strides", "dk_strides", "dv_strides", "gq_strides",
    "gk_strides", "gv_strides",
))  # fmt: skip
# Numbers in these change from call to call: a kernel is not compiled again if one of them is 1 or a multiple of 16.
# (For strides it is: the strides of one layout are equal.)
RUNTIME = ("sizes", "schedule", "sharing", "mod", "tiles", "product")
