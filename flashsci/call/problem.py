"""One attention call as plain data: the properties that decide the backend, and its least cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from flashsci.call.kinds import ATTENTION, FP8, PAGED


def sums_bias(bias: Tensor, leading: Sequence[int]) -> bool:
    """Whether the gradient of a bias is a sum, so that tiles of dS do not hold it.

    It is a sum over queries or, for 16 bits, over some of the ``leading`` dims of the scores (batch and heads). In
    fp32, tiles can be added to it one by one.
    """
    if bias.dim() < 2 or bias.shape[-2] == 1 or bias.stride(-2) == 0:
        return True
    own = (*(1,) * (len(leading) + 2 - bias.dim()), *bias.shape[:-2])
    return bias.dtype != torch.float32 and own != tuple(leading)


def has_inner_heads(bias: Tensor) -> bool:
    """Whether the heads of a bias are neighbours in memory and its keys are not.

    This is ``[.., Sq, Sk, H]``, as a Linear over pairs leaves it, with its dims permuted.
    """
    return bias.dim() > 2 and bias.shape[-3] > 1 and bias.stride(-3) == 1 and bias.stride(-1) > 1


def pairs_of(rows: int, keys: int, left: int, right: int, lower_right: bool = False) -> int:
    """Pairs of query and key inside a window, -1 for no limit."""
    if left < 0 and right < 0:
        return rows * keys
    shift = keys - rows if lower_right else 0
    # Row i sees the keys from i + shift - left to i + shift + right.
    end = rows * keys if right < 0 else _clamped(shift + right + 1, rows, keys)
    start = 0 if left < 0 else _clamped(shift - left, rows, keys)
    return max(end - start, 0)


def _clamped(first: int, rows: int, keys: int) -> int:
    """The sum of ``min(max(first + i, 0), keys)`` over ``rows`` values of i."""

    def below(x: int) -> int:  # of all values up to x
        x = max(x, 0)
        return x * (x - 1) // 2 if x <= keys else keys * (keys - 1) // 2 + keys * (x - keys)

    return below(first + rows) - below(first)


@dataclass(frozen=True)
class Problem:
    """Shapes, dtypes, features and device of one call; hashable, holds no tensors.

    ``seq_q`` and ``seq_k`` are the packed totals when ``varlen`` is set, and ``batch`` is the number of sequences.
    Sizes that a compiler keeps symbolic are None, as is the shape of a bias that it hides. Whether a backend can
    serve a call never depends on their values; only the order of the backends does (flashsci/choice/preferences).
    """

    device_type: str  # "cuda" or "cpu"
    capability: tuple[int, int] | None  # compute capability of a CUDA device
    dtype: torch.dtype
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    batch: tuple[int, ...] | None = None  # leading dims
    seq_q: int | None = None
    seq_k: int | None = None
    sizes_from_data: bool = False  # some of these are known to nobody before the program runs
    varlen: bool = False
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: torch.dtype | None = None
    bias_grad: bool = False
    bias_summed: bool = False  # see `sums_bias`
    inner_heads: bool = False  # those of the bias, see `has_inner_heads`
    ragged_bias: bool = False
    key_weight: bool = False
    key_weight_grad: bool = False
    alibi: bool = False
    alibi_grad: bool = False
    alibi_further: bool = False  # by more than the gradient of an eager call: see `arguments.Options.features`
    sink: bool = False
    mask: bool = False
    mask_by_query: bool = False  # see `differs_by_query` (row_pitch.py)
    mask_tiles: bool = False  # of a mask with a table of its tiles, or of one for which a table pays
    window_left: int = -1
    window_right: int = -1
    lower_right: bool = False
    softcap: float = 0.0
    caps_bias: bool = False  # the softcap bounds a bias or ALiBi, too
    dropout_p: float = 0.0
    return_lse: bool = False
    requires_grad: bool = False
    precision: str = "default"
    deterministic: bool = False
    paged: bool = False  # keys and values are in a paged cache; no gradients
    cache_dtype: torch.dtype | None = None  # of that cache
    batch_invariant: bool = False  # no bit of a sequence's results may depend on the others of the call
    given: tuple[str, ...] = ()  # the names of the call's tensors; none where only sizes are described

    @property
    def kind(self) -> str:
        """The kind of call: of a residual one, that of its attention."""
        return PAGED if self.paged else FP8 if self.dtype is torch.float8_e4m3fn else ATTENTION

    @property
    def bias(self) -> bool:
        return self.bias_shape is not None or self.ragged_bias

    @property
    def few_scores(self) -> bool:
        """Whether the scores of one key head of a dense call are up to 2^24, or half as many numbers as the rows of q, k, v and out;
        and there are up to 1,024 keys, or up to 8,192 if a query head has up to 2^20 scores.

        Triton's kernels for wide heads require this, because they hold scores in memory, and whole rows of them in registers. False
        where sizes are not known.
        """
        if self.varlen or self.seq_q is None or self.seq_k is None:
            return False
        width, group = self.head_dim + self.head_dim_v, self.heads_q // max(1, self.heads_k)
        pairs = self.seq_q * self.seq_k
        few = 2 * pairs <= (self.seq_q + self.seq_k) * width or group * pairs <= 1 << 24
        return few and (self.seq_k <= 1024 or (self.seq_k <= 8192 and pairs <= 1 << 20))

    def visible_pairs(self) -> int:
        """Query-key pairs of one head that causal and window leave, summed over the batch (dense calls)."""
        if self.batch is None or self.seq_q is None or self.seq_k is None:
            raise ValueError("flops and bytes need concrete sizes")
        pairs = pairs_of(self.seq_q, self.seq_k, self.window_left, self.window_right, self.lower_right)
        return pairs * math.prod(self.batch)

    def flops(self, order: int = 0) -> int:
        """Floating-point operations of the matrix products: order 0 forward, 1 backward alone (2.5
        x forward)."""
        forward = 2 * self.visible_pairs() * self.heads_q * (self.head_dim + self.head_dim_v)
        backward = 2 * self.visible_pairs() * self.heads_q * (3 * self.head_dim + 2 * self.head_dim_v)
        return (forward, backward)[order]

    def bytes(self, order: int = 0) -> int:
        """Least bytes moved: each operand read once, each result written once."""
        if self.batch is None or self.seq_q is None or self.seq_k is None:
            raise ValueError("flops and bytes need concrete sizes")
        item, batch = self.dtype.itemsize, math.prod(self.batch)
        q = batch * self.heads_q * self.seq_q * self.head_dim * item
        o = batch * self.heads_q * self.seq_q * self.head_dim_v * item
        kv = batch * self.heads_k * self.seq_k * (self.head_dim + self.head_dim_v) * item
        lse = batch * self.heads_q * self.seq_q * 4
        bias = math.prod(self.bias_shape) * (self.bias_dtype or self.dtype).itemsize if self.bias_shape else 0
        if order == 0:
            return q + kv + o + lse + bias
        return 2 * (q + kv + bias) + 2 * o + lse


def facts(q: Tensor, v: Tensor, heads_q: int, heads_k: int, features: dict[str, object]) -> tuple[Any, ...]:
    """The arguments of :func:`problem_of`: only constants, so that torch.compile can pass them (``index`` makes it
    specialise on heads and head dims, as kernels do anyway)."""
    device = q.device
    sizes = index(heads_q), index(heads_k), index(q.shape[-1]), index(v.shape[-1])
    return (device.type, device.index, q.dtype, *sizes, tuple(features.items()))


def with_feature(facts: tuple[Any, ...], name: str, value: object) -> tuple[Any, ...]:
    """:func:`facts` with another value of one feature."""
    *others, features = facts
    return (*others, tuple((n, value if n == name else x) for n, x in features))


def problem_of(
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    heads_q: int,
    heads_k: int,
    head_dim: int,
    head_dim_v: int,
    features: tuple[tuple[str, Any], ...],
) -> Problem:
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device_index) if on_gpu else None
    return Problem(device_type, capability, dtype, heads_q, heads_k, head_dim, head_dim_v, **dict(features))
