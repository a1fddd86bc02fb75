"""Calls as people make them, drawn at random: shapes, layouts and options of a call as data.

ODDS and the limits are the whole distribution. A call depends on its seed and its number alone, on every machine, so
that a speed measured on one seed can be judged on another. SIZES calls in a row are of one kind, in other lengths and
batches: kernels, which take seconds to compile, serve all of them. calls_making.py makes the tensors of a call.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

#: The weights of every choice.
ODDS: dict[str, dict[Any, int]] = {
    "work": {"forward": 8, "step": 9, "second": 2},
    "dtype": {"bfloat16": 5, "float16": 2, "float32": 4},
    "second order's dtype": {"float32": 3, "bfloat16": 1},
    "dim": {"common": 16, "multiple of 8": 3, "any": 2},
    "common dim": {8: 1, 16: 2, 24: 1, 32: 5, 40: 1, 48: 2, 64: 10, 80: 2, 96: 2, 128: 10, 160: 1, 192: 1, 256: 2},
    "values": {"same dim": 9, "other dim": 1},
    "lengths": {"self": 14, "cross": 3, "decode": 2, "packed": 3},
    "heads": {1: 2, 2: 1, 3: 1, 4: 4, 6: 1, 8: 6, 12: 4, 14: 1, 16: 5, 24: 1, 32: 4, 40: 1, 64: 2},
    "group": {1: 12, 2: 1, 4: 2, 8: 1},  # heads of q to one of k
    "layout": {"bhsd": 3, "bshd": 4, "qkv": 3},
    "bias": {None: 10, "pairs": 2, "shared": 4, "keys": 2, "one head": 1},
    "bias's dtype": {"of q": 3, "float32": 2},
    "bias's innermost": {"keys": 7, "heads": 3},
    "bias's rank": {"full": 2, "least": 1},
    "bias's gradient": {True: 3, False: 2},
    "mask": {None: 12, "keys": 4, "documents": 1, "band": 1, "prefix": 1, "graph": 1},
    "mask's batch": {"shared": 1, "own": 1},
    "causal": {False: 2, True: 1},
    "option": {None: 16, "window": 3, "softcap": 1, "sink": 1, "alibi": 1, "key_weight": 1, "dropout": 1},
}
SIZES = 4  # calls of one kind
SOFTCAPS = (15.0, 30.0, 50.0)
DROPOUTS = (0.1, 0.2)
GRAPH_SHARES = (2, 10, 50)  # percent of the pairs that a random graph connects
SPREADS = (1.5, 4.0, 16.0)  # longest over shortest of packed sequences
MOST_SEQUENCES = 512
DECODED = 8  # queries of a decoding call, at most


@dataclass(frozen=True)
class CallLimits:
    """The largest calls of a draw. ``flops`` are those of 16-bit products: one in fp32 counts as eight."""

    longest: int = 16384
    longest_second: int = 1024  # of calls of the second order
    members: int = 10**6  # batch times heads
    bytes: int = 2 << 30  # of all operands
    flops: float = 1e13


LARGE_CALLS = CallLimits()  # for a GPU
SMALL_CALLS = CallLimits(
    longest=72, longest_second=24, members=24, bytes=1 << 22, flops=2e8
)  # for a CPU, and for tests


@dataclass(frozen=True)
class DrawnCall:
    """One attention call as plain data, with its place in the draw; frozen, and JSON by :meth:`as_dict`.

    Dense calls have ``batch`` members of ``seq_q`` queries and ``seq_k`` keys; packed ones have ``lens``, and each
    sequence attends to itself. ``work``: "forward", "step" (forward and gradients) or "second" (gradients of the
    gradients, too). ``layout``: of memory, "bhsd", "bshd" or "qkv" (slices of one projection).
    """

    seed: int
    index: int
    work: str = "forward"
    dtype: str = "bfloat16"
    batch: int = 1
    heads: int = 1
    heads_k: int = 1
    seq_q: int = 1
    seq_k: int = 1
    dim: int = 64
    dim_v: int = 64
    lens: tuple[int, ...] = ()
    layout: str = "bhsd"
    bias: str | None = None  # "pairs", "shared" over the batch, "keys", "one head" (over the heads, too)
    bias_dtype: str | None = None
    bias_inner: str = "keys"  # or "heads": the innermost dim in memory
    bias_rank: str = "full"  # or "least": without leading dims of size 1
    bias_grad: bool = False
    mask: str | None = None  # "keys" (padding), "documents", "band", "prefix", "graph"
    mask_size: int = 0  # keys of a document, half a band, a prefix; percent of a graph
    mask_own: bool = False  # one for each member of the batch
    causal: bool = False
    window: tuple[int, int] | None = None
    align: str = "upper_left"
    softcap: float | None = None
    dropout_p: float = 0.0
    sink: bool = False
    alibi: bool = False
    key_weight: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for JSON."""
        default = DrawnCall(-1, -1)
        return {n: x for n, x in asdict(self).items() if x != getattr(default, n)}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> DrawnCall:
        """The inverse of :meth:`as_dict`, also after JSON."""
        values: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in fields.items()}
        return cls(**values)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        """The shape of the bias: broadcastable to the scores, or that of a packed call."""
        if self.bias is None:
            return None
        if self.lens:
            return self.heads, sum(n * n for n in self.lens) if self.bias == "pairs" else self.tokens
        full = {
            "pairs": (self.batch, self.heads, self.seq_q, self.seq_k),
            "shared": (1, self.heads, self.seq_q, self.seq_k),
            "keys": (self.batch, 1, 1, self.seq_k),
            "one head": (1, 1, self.seq_q, self.seq_k),
        }[self.bias]
        drop = {"shared": 1, "one head": 2}.get(self.bias, 0) if self.bias_rank == "least" else 0
        return full[drop:]

    @property
    def mask_shape(self) -> tuple[int, ...] | None:
        if self.mask is None:
            return None
        if self.mask == "keys":
            return self.batch, 1, 1, self.seq_k
        return (self.batch if self.mask_own else 1, 1, self.seq_q, self.seq_k)

    @property
    def tokens(self) -> int:
        """The rows of q over the batch."""
        return sum(self.lens) if self.lens else self.batch * self.seq_q

    @property
    def scores(self) -> int:
        """The number of scores, visible or not, over batch and heads."""
        return self.heads * (sum(n * n for n in self.lens) or self.batch * self.seq_q * self.seq_k)

    @property
    def flops(self) -> float:
        """Operations of the matrix products, as if every pair were visible."""
        times = {"forward": 1.0, "step": 3.5, "second": 12.0}[self.work]
        return times * 2 * self.scores * (self.dim + self.dim_v)

    @property
    def bytes(self) -> int:
        """The size of q, k, v, out, bias and mask."""
        keys = self.tokens if self.lens else self.batch * self.seq_k
        rows = (self.tokens * self.heads + keys * self.heads_k) * (self.dim + self.dim_v)
        bias = math.prod(self.bias_shape) if self.bias_shape else 0
        mask = math.prod(self.mask_shape) if self.mask_shape else 0
        item = self.torch_dtype.itemsize
        return rows * item + bias * (4 if self.bias_dtype == "float32" else item) + mask

    def neighbour(self) -> DrawnCall:
        """The call that every kernel likes: lengths rounded up to a multiple of 64 (of 16 below 64; up to 8 as they
        are), every tensor contiguous, the keys of a bias innermost."""
        return replace(
            self,
            seq_q=_rounded(self.seq_q),
            seq_k=_rounded(self.seq_k),
            lens=tuple(map(_rounded, self.lens)),
            layout="bhsd",
            bias_inner="keys",
        )

    def __str__(self) -> str:
        """The call in one line."""
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        grouped = f"{self.heads}/{self.heads_k}" if self.heads_k != self.heads else f"{self.heads}"
        if self.lens:
            size = f"{len(self.lens)} packed of {min(self.lens)} to {max(self.lens)}, H {grouped}"
        else:
            lengths = f"S {self.seq_q}" if self.seq_q == self.seq_k else f"{self.seq_q} x {self.seq_k}"
            size = f"B {self.batch}, H {grouped}, {lengths}"
        dims = f"D {self.dim}" if self.dim == self.dim_v else f"D {self.dim}/{self.dim_v}"
        parts = [f"{short[self.dtype]} {self.work}", size, dims, self.layout]
        if self.bias:
            kind = f"bias {self.bias} {short[str(self.bias_dtype)]}"
            inner = " heads inside" if self.bias_inner == "heads" else ""
            parts.append(kind + inner + (" learnt" if self.bias_grad else ""))
        if self.mask:
            parts.append(f"mask {self.mask}" + (f" {self.mask_size}" if self.mask_size else ""))
        if self.causal:
            parts.append("causal")
        if self.window:
            parts.append("window {} {}".format(*self.window))
        options = ("softcap", "sink", "alibi", "key_weight")
        parts += [name for name in options if getattr(self, name)]
        if self.dropout_p:
            parts.append(f"dropout {self.dropout_p}")
        return ", ".join(parts)


def draw_call(seed: int, index: int, limits: CallLimits = LARGE_CALLS) -> DrawnCall:
    """The call of that number in the draw of that seed, within ``limits``.

    Examples:
        >>> from flashsci.testing import draw_call
        >>> print(draw_call(seed=1, index=0))
        fp32 second, B 5, H 12, S 526, D 64, bshd, causal, softcap
        >>> draw_call(1, 0) == draw_call(1, 0), draw_call(1, 0) == draw_call(2, 0)
        (True, False)
    """
    source, sizes = _Source(f"{seed}/{index // SIZES}"), _Source(f"{seed}/{index // SIZES}/{index % SIZES}")
    work = source.choice("work")
    dtype = source.choice("second order's dtype" if work == "second" else "dtype")
    dim = source.dim()
    heads, group = source.choice("heads"), source.choice("group")
    heads_k = heads // group if heads % group == 0 else heads
    call = DrawnCall(
        seed,
        index,
        work,
        dtype,
        heads=heads,
        heads_k=heads_k,
        dim=dim,
        dim_v=dim if source.choice("values") == "same dim" else source.dim(),
        layout=source.choice("layout"),
    )
    lengths = source.choice("lengths")
    longest = limits.longest_second if work == "second" else limits.longest
    call = _with_lengths(sizes, call, lengths, longest)
    call = _with_bias(source, call)
    call = _with_options(source, sizes, call)
    call = _with_mask(source, sizes, call)
    return _with_batch(sizes, call, limits)


class _Source:
    """Choices of one call, by the weights of ODDS."""

    def __init__(self, seed: str):
        self.random = random.Random(seed)

    def choice(self, name: str) -> Any:
        options = ODDS[name]
        return self.random.choices(tuple(options), tuple(options.values()))[0]

    def log_uniform(self, low: int, high: int) -> int:
        """A whole number from low to high, whose logarithm is uniform."""
        return round(math.exp(self.random.uniform(math.log(low), math.log(max(low, high)))))

    def dim(self) -> int:
        kind = self.choice("dim")
        if kind == "common":
            return int(self.choice("common dim"))
        return self.random.randint(8, 256) if kind == "any" else 8 * self.random.randint(1, 32)

    def one_of(self, options: tuple[Any, ...]) -> Any:
        return self.random.choice(options)


def _rounded(n: int) -> int:
    step = 64 if n >= 64 else 16 if n > DECODED else 1
    return -(-n // step) * step


def _with_lengths(source: _Source, call: DrawnCall, kind: str, longest: int) -> DrawnCall:
    length = source.log_uniform(1, longest)
    if kind == "packed" and call.work != "second":
        spread, count = source.one_of(SPREADS), source.log_uniform(2, MOST_SEQUENCES)
        shortest = max(1, round(length / spread))
        lens = tuple(source.log_uniform(shortest, length) for _ in range(count))
        return replace(call, seq_q=0, seq_k=0, lens=lens, layout="qkv" if call.layout == "qkv" else "bshd")
    if kind == "cross":
        return replace(call, seq_q=length, seq_k=source.log_uniform(1, longest))
    if kind == "decode" and call.work == "forward":
        return replace(call, seq_q=source.log_uniform(1, DECODED), seq_k=length)
    return replace(call, seq_q=length, seq_k=length)


def _with_bias(source: _Source, call: DrawnCall) -> DrawnCall:
    kind = source.choice("bias")
    if kind is None or (call.lens and kind not in ("pairs", "keys")):
        return call
    of_q = source.choice("bias's dtype") == "of q"
    inner, rank = source.choice("bias's innermost"), source.choice("bias's rank")
    learnt = source.choice("bias's gradient") and call.work != "forward"
    inside = inner == "heads" and kind in ("pairs", "shared") and not call.lens and call.heads > 1
    return replace(
        call,
        bias=kind,
        bias_dtype=call.dtype if of_q else "float32",
        bias_inner="heads" if inside else "keys",
        bias_rank=rank,
        bias_grad=learnt,
    )


def _with_options(source: _Source, sizes: _Source, call: DrawnCall) -> DrawnCall:
    """The call with causal and at most one more option. Every row sees a key."""
    causal, option = source.choice("causal"), source.choice("option")
    square = call.seq_q == call.seq_k  # packed calls, too
    if call.seq_q > call.seq_k or (call.seq_q == 1 and not square):
        causal = False
        option = None if option == "window" else option
    call = replace(call, causal=causal, align="upper_left" if square else "lower_right")
    if option == "window":
        width = sizes.log_uniform(1, max(1, max(call.lens, default=call.seq_k)))
        return replace(call, window=(width, 0 if causal else source.one_of((width, width, 0))))
    if option == "softcap":
        return replace(call, softcap=source.one_of(SOFTCAPS))
    if option == "sink" and call.work != "second":
        return replace(call, sink=True)
    if option == "alibi" and call.bias is None:
        return replace(call, alibi=True)
    if option == "key_weight" and call.bias is None:
        return replace(call, key_weight=True)
    if option == "dropout" and call.work == "step":
        return replace(call, dropout_p=source.one_of(DROPOUTS))
    return call


def _with_mask(source: _Source, sizes: _Source, call: DrawnCall) -> DrawnCall:
    """The call with a bool mask. Every row sees a key: padding is at the end, and other masks show the diagonal."""
    kind, own = source.choice("mask"), source.choice("mask's batch") == "own"
    square = call.seq_q == call.seq_k
    if kind is None or call.lens or (kind == "keys" and call.window):
        return call
    if kind == "keys":
        return replace(call, mask=kind) if square or not call.causal else call
    if not square:
        return call
    if kind == "prefix":
        call = replace(call, causal=False, window=None)
    size = source.one_of(GRAPH_SHARES) if kind == "graph" else sizes.log_uniform(1, call.seq_k)
    return replace(call, mask=kind, mask_size=size, mask_own=own and kind != "band")


def _with_batch(source: _Source, call: DrawnCall, limits: CallLimits) -> DrawnCall:
    """The call with as many members as the limits allow, or fewer; a call too large for one is made smaller."""
    weight = (8 if call.dtype == "float32" else 1) * (8 if call.work == "second" else 1)

    def fits(x: DrawnCall) -> bool:
        return weight * x.flops <= limits.flops and x.bytes <= limits.bytes and x.batch * x.heads <= limits.members

    while not fits(call):
        if len(call.lens) > 1:
            call = replace(call, lens=call.lens[: len(call.lens) // 2])
        elif call.heads_k % 2 == 0:
            call = replace(call, heads=call.heads // 2, heads_k=call.heads_k // 2)
        elif call.lens:
            call = replace(call, lens=(max(1, call.lens[0] * 3 // 4),))
        elif max(call.seq_q, call.seq_k) > 1:
            # Equal lengths stay equal, and queries no more than keys.
            sizes = {n: max(1, getattr(call, n) * 3 // 4) for n in ("seq_q", "seq_k")}
            call = replace(call, **sizes)
        else:
            call = replace(call, heads=1, heads_k=1, dim=min(64, call.dim), dim_v=min(64, call.dim_v))
    if call.lens:
        return call
    most = 1
    while fits(replace(call, batch=2 * most)):
        most *= 2
    return replace(call, batch=source.log_uniform(1, most))
