"""Generated problems: one frozen dataclass, one drawing function, and the tensors a case stands for.

The same :func:`draw_case` serves a seeded generator (:func:`generate`, no dependencies) and Hypothesis (:func:`cases`):
both only supply choices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from flashsci.testing.poison import embed

T = TypeVar("T")


class Choices(Protocol):
    """Where a case comes from: a seeded generator or Hypothesis' ``draw``."""

    def one_of(self, options: Sequence[T]) -> T: ...

    def integer(self, low: int, high: int) -> int: ...


class SeededChoices:
    """Choices of a pseudo-random generator: the same seed, the same cases, on every machine."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.random.randrange(len(options))]

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


@dataclass(frozen=True)
class Variant:
    """What a kernel may be compiled for; all other properties of a case cost no new kernel."""

    dtype: str = "float32"
    head_dim: int = 16
    head_dim_v: int = 16
    bias: str | None = (
        None  # "pair": broadcastable to [..., Hq, Sq, Sk] (packed: ragged blocks); "key": one row of keys
    )
    bias_float: bool = False  # bias in fp32 whatever the inputs' dtype
    bias_grad: bool = False
    mask: bool = False
    window: bool = False
    softcap: bool = False
    dropout: bool = False
    varlen: bool = False
    lse_grad: bool = False
    tangents: str = (
        ""  # second order: which of "qkvb" (b: bias) have tangents, of dq, dk, dv, dbias cotangents
    )

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Case:
    """One problem as pure data: seeded, hashable, printable as the reproducer of a failure.

    ``lead`` are the leading sizes before heads; ``rank`` says which of batch and heads exist at all. Packed (varlen) cases
    have ``lens_q`` and ``lens_k`` instead of ``seq_q`` and ``seq_k``.
    """

    variant: Variant = field(default_factory=Variant)
    seed: int = 0
    rank: int = 4
    lead: tuple[int, ...] = (1,)
    heads_k: int = 1
    group: int = 1  # query heads per key head
    seq_q: int = 16
    seq_k: int = 16
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    self_attention: bool = False  # packed: cu_seqlens_k and max_seqlen_k are left out
    known_lengths: bool = True  # packed: max_seqlen_q and max_seqlen_k are given
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str = "upper_left"
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    bias_shape: tuple[int, ...] | None = None
    bias_view: str = "contiguous"  # "transposed", "padded", "expanded"
    bias_holes: bool = False  # some entries, and where possible one whole row, are -inf
    mask_shape: tuple[int, ...] | None = None
    mask_kind: str = "random"  # "rows": some rows see nothing; "keys": a tail of keys is hidden; "none": nothing is visible
    mask_view: str = "contiguous"
    layout: str = "bhsd"  # "bshd", "packed", "strided", "expanded", "shifted"
    magnitude: str = "unit"  # "peaked", "low", "small_v", "large_v", "offset_v"
    precision: str | None = None
    tangent_magnitude: str = "unit"  # "offset": far from zero in what softmax does not see

    @property
    def heads_q(self) -> int:
        return self.heads_k * self.group

    def shape(self, heads: int, seq: int, dim: int) -> tuple[int, ...]:
        """Shape of q, k, v, or of scores (dense), with the leading dims that exist at this rank."""
        return (*self.lead, heads, seq, dim)[-self.rank :]

    @property
    def score_shape(self) -> tuple[int, ...]:
        return self.shape(self.heads_q, self.seq_q, self.seq_k)


@dataclass
class Inputs:
    """The tensors and options of one attention call, with the cotangents of its backward.

    Dense: q [..., Hq, Sq, D], k [..., Hk, Sk, D], v [..., Hk, Sk, Dv], as :func:`flashsci.attention`. Packed, when
    ``cu_seqlens_q`` is given: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv], as :func:`flashsci.varlen_attention`.
    ``dout`` has out's shape and ``dlse`` that of lse; None means zero. ``tangents`` by name ("tq", "tk", "tv", "tbias"), in the
    shapes of what they belong to, ask for the second order: absent means zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dropout_seed: Tensor | None = None
    bias_grad: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    tangents: dict[str, Tensor] = field(default_factory=dict)

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    def to(self, dtype: torch.dtype | None) -> Inputs:
        """Every floating-point tensor contiguous and as ``dtype`` (None: as it is); masks, seeds and
        offsets untouched."""

        def cast(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().to(dtype or x.dtype).contiguous()

        return replace(
            self,
            q=cast(self.q),
            k=cast(self.k),
            v=cast(self.v),
            bias=cast(self.bias),
            dout=cast(self.dout),
            dlse=cast(self.dlse),
            tangents={
                n: x.detach().to(dtype or x.dtype).contiguous() for n, x in self.tangents.items()
            },
        )


# Sizes around the tiles of every kernel, and small ones: most bugs live at edges.
EDGE_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65, 97, 127, 128, 129)
BULK_LENGTHS = (*EDGE_LENGTHS, 0, 191, 192, 193, 255, 256, 257, 300)
LARGE_LENGTHS = (511, 576, 1000, 1025)
ALL_LENGTHS = (
    *BULK_LENGTHS,
    *LARGE_LENGTHS,
    8,
    24,
    40,
    48,
    56,
    62,
    80,
    96,
    144,
    160,
    250,
    264,
    320,
    384,
)
MAGNITUDES = ("peaked", "low", "small_v", "large_v", "offset_v")
SMALL_LENGTHS = (0, 1, 2, 3, 5, 15, 16, 17, 23, 33)
HEAD_DIMS = (
    (1, 1),
    (3, 5),
    (8, 8),
    (16, 16),
    (24, 24),
    (32, 32),
    (40, 72),
    (64, 64),
    (80, 48),
    (96, 96),
    (127, 128),
    (128, 128),
    (192, 128),
    (256, 256),
)


def variants(
    count: int = 64,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
    max_dim: int = 256,
    features: bool = True,
) -> list[Variant]:
    """A fixed list of at most ``count`` kernel variants covering every dtype, head dim and feature, and many pairs of them.

    ``features=False`` leaves out bias, mask, dropout and gradients of lse (what the simplest kernels lack).
    """
    choices = SeededChoices(20)
    dims = [d for d in HEAD_DIMS if max(d) <= max_dim]
    found: dict[Variant, None] = {}
    for i in range(4 * count):
        if len(found) == count:
            break
        rare = lambda n: features and choices.integer(1, n) == 1  # noqa: E731
        bias = choices.one_of(("pair", "pair", "key")) if rare(2) else None
        varlen = choices.integer(1, 4) == 1
        dim, dim_v = dims[i % len(dims)]
        variant = Variant(
            dtype=dtypes[(i + i // len(dims)) % len(dtypes)],
            head_dim=dim,
            head_dim_v=dim_v,
            bias=bias,
            bias_float=bias is not None and rare(2),
            bias_grad=bias is not None and choices.integer(1, 3) > 1,
            mask=not varlen and rare(3),
            window=choices.integer(1, 3) == 1,
            softcap=choices.integer(1, 6) == 1,
            dropout=rare(6),
            varlen=varlen,
            lse_grad=rare(3),
        )
        found[variant] = None
    return list(found)


def second_order_variants(count: int = 48, **limits: Any) -> list[Variant]:
    """Those of :func:`variants` with tangents: of all tensors in two of three, else of some."""
    choices = SeededChoices(21)
    found: dict[Variant, None] = {}
    for variant in variants(count, **limits):
        some = choices.one_of(("q", "k", "v", "b", "qk", "kv", "qb", "kvb"))
        tangents = "qkvb" if choices.integer(1, 3) > 1 else some
        if not variant.bias_grad:
            tangents = tangents.replace("b", "")
        found[replace(variant, tangents=tangents or "qkv")] = None
    return list(found)


def draw_case(
    choices: Choices,
    pool: Sequence[Variant],
    lengths: Sequence[int] = BULK_LENGTHS,
    score_limit: int = 1 << 20,
) -> Case:
    """One case of a variant in ``pool``; B * Hq * Sq * Sk stays under ``score_limit``."""
    variant = choices.one_of(pool)
    often = lambda n: choices.integer(1, n) > 1  # noqa: E731
    case = Case(
        variant=variant,
        seed=choices.integer(0, 2**31 - 1),
        scale=None if often(3) else choices.one_of((0.05, 0.3, 1.0)),
        softcap=choices.one_of((2.0, 15.0, 50.0)) if variant.softcap else None,
        dropout_p=choices.one_of((0.2, 0.5))
        if variant.dropout
        else 0.0,  # 1 / (1 - p) is exact in every dtype
        magnitude="unit" if often(3) else choices.one_of(MAGNITUDES),
        layout=choices.one_of(("bhsd", "bshd", "packed", "strided", "expanded", "shifted")),
        heads_k=choices.one_of((1, 1, 2, 3)),
        group=choices.one_of((1, 1, 2, 4)),
    )
    if variant.window:
        kind = choices.one_of(("causal", "causal", "band", "left", "causal_band"))
        width = choices.one_of((0, 1, 5, 16, 64, 100))
        window = {
            "causal": None,
            "band": (width, choices.one_of((0, 3, 40))),
            "left": (width, None),
            "causal_band": (width, None),
        }[kind]
        case = replace(
            case,
            causal=kind.startswith("causal"),
            window=window,
            align=choices.one_of(("upper_left", "lower_right")),
        )
    case = (
        _draw_packed(choices, case, lengths, score_limit)
        if variant.varlen
        else _draw_dense(choices, case, lengths, score_limit)
    )
    if variant.bias:
        case = replace(case, bias_holes=not often(3))
    return _draw_second_order(choices, case)


def _draw_second_order(choices: Choices, case: Case) -> Case:
    if not case.variant.tangents:
        return case
    return replace(
        case,
        precision=choices.one_of((None, None, "ieee", "tf32", "tf32x3"))
        if case.variant.dtype == "float32"
        else None,
        tangent_magnitude=choices.one_of(("unit", "unit", "unit", "offset")),
    )


def _draw_dense(choices: Choices, case: Case, lengths: Sequence[int], score_limit: int) -> Case:
    rank = choices.one_of((2, 3, 4, 4, 4, 5))
    if rank == 2:
        case = replace(case, heads_k=1, group=1)
    seq_q = choices.one_of(lengths)
    seq_k = seq_q if choices.integer(0, 1) else choices.one_of(lengths)
    scores = max(1, case.heads_q * seq_q * seq_k)
    lead = tuple(choices.one_of((1, 2, 3, 5)) for _ in range(rank - 3))
    while scores * _product(lead) > score_limit and max((*lead, 1)) > 1:
        lead = tuple(max(1, n - 1) for n in lead)
    if scores * _product(lead) > score_limit:
        case = replace(case, heads_k=1, group=1)
    case = replace(case, rank=rank, lead=lead, seq_q=seq_q, seq_k=seq_k)
    if rank == 2 and case.layout in ("bshd", "packed", "expanded"):
        case = replace(case, layout="strided")

    def broadcast(kind: str | None) -> tuple[int, ...] | None:
        if kind is None:
            return None
        full = case.score_shape
        shape = tuple(n if choices.integer(0, 2) else 1 for n in full)
        if kind == "key":
            shape = (*full[:-3], *[1] * min(2, rank - 1), full[-1])
        elif choices.integer(0, 1):
            shape = full
        # Fewer dims than the scores broadcast too.
        return (
            shape[choices.integer(0, max(0, rank - 2)) :] if choices.integer(0, 3) == 0 else shape
        )

    views = ("contiguous", "transposed", "padded", "expanded")
    return replace(
        case,
        bias_shape=broadcast(case.variant.bias),
        bias_view=choices.one_of(views) if case.variant.bias else "contiguous",
        mask_shape=broadcast(choices.one_of(("pair", "key")) if case.variant.mask else None),
        mask_view=choices.one_of(views) if case.variant.mask else "contiguous",
        mask_kind=choices.one_of(("random", "rows", "keys", "none"))
        if case.variant.mask
        else "random",
    )


def _draw_packed(choices: Choices, case: Case, lengths: Sequence[int], score_limit: int) -> Case:
    count = choices.integer(1, 6)
    lens_q = tuple(choices.one_of(lengths) for _ in range(count))
    same = choices.integer(0, 1) == 1
    lens_k = lens_q if same else tuple(choices.one_of(lengths) for _ in range(count))
    while (
        case.heads_q * sum(a * b for a, b in zip(lens_q, lens_k, strict=True)) > score_limit
        and len(lens_q) > 1
    ):
        lens_q, lens_k = lens_q[1:], lens_k[1:]
    shape = None
    if case.variant.bias:
        heads, keys = choices.one_of((1, case.heads_q)), sum(lens_k)
        pairs = sum(a * b for a, b in zip(lens_q, lens_k, strict=True))
        # Where both sizes agree, only three dims say which is meant.
        shape = (heads, pairs) if case.variant.bias == "pair" else (heads, keys)
        if pairs == keys or (case.variant.bias == "key" and choices.integer(0, 1)):
            shape = (heads, 1, keys)
    return replace(
        case,
        rank=3,
        lead=(),
        seq_q=0,
        seq_k=0,
        lens_q=lens_q,
        lens_k=lens_k,
        bias_shape=shape,
        self_attention=same and choices.integer(0, 1) == 1,
        known_lengths=choices.integer(0, 1) == 1,
        layout=choices.one_of(("bhsd", "packed", "strided", "shifted")),
    )


def generate(
    seed: int, count: int, pool: Sequence[Variant] | None = None, **limits: Any
) -> Iterator[Case]:
    """``count`` cases of a seeded generator; ``pool`` and ``limits`` as in :func:`draw_case`.

    Example:
        >>> from flashsci.testing import generate
        >>> len({case.seed for case in generate(0, 10)})
        10
    """
    choices = SeededChoices(seed)
    pool = variants() if pool is None else pool
    for _ in range(count):
        yield draw_case(choices, pool, **limits)


def resized(choices: Choices, case: Case, score_limit: int = 1 << 20) -> Case:
    """Another problem for the kernels that ``case`` was compiled into: other values, batch, heads and
    lengths, where lengths stay in their class (as tile sizes see them) and broadcast dims broadcast.
    """
    group = case.group if case.rank == 2 else choices.one_of((1, 1, 2, 4))
    heads_k = case.heads_k if case.rank == 2 else choices.one_of((1, 2, 3))
    often = lambda n: choices.integer(1, n) > 1  # noqa: E731
    softcap = choices.one_of((2.0, 15.0, 50.0)) if case.softcap else None
    case = replace(
        case,
        seed=choices.integer(0, 2**31 - 1),
        heads_k=heads_k,
        group=group,
        softcap=softcap,
        scale=None if often(3) else choices.one_of((0.05, 0.3, 1.0)),
        magnitude="unit" if often(3) else choices.one_of(MAGNITUDES),
        align=choices.one_of(("upper_left", "lower_right")) if case.variant.window else case.align,
        bias_holes=case.variant.bias is not None and not often(3),
    )

    def like(length: int) -> int:
        return choices.one_of([n for n in ALL_LENGTHS if _length_class(n) == _length_class(length)])

    if case.variant.varlen:
        lens_q = tuple(like(n) for n in case.lens_q)
        lens_k = lens_q if case.lens_k == case.lens_q else tuple(like(n) for n in case.lens_k)
        shape = case.bias_shape
        if shape is not None:
            keys, pairs = sum(lens_k), sum(a * b for a, b in zip(lens_q, lens_k, strict=True))
            heads = 1 if shape[0] == 1 else heads_k * group
            per_key = len(shape) == 3 or case.variant.bias == "key" or pairs == keys
            shape = (heads, 1, keys) if per_key else (heads, pairs)
        return replace(case, lens_q=lens_q, lens_k=lens_k, bias_shape=shape)
    before = case.score_shape
    seq_q = like(case.seq_q)
    seq_k = seq_q if case.seq_k == case.seq_q else like(case.seq_k)
    lead = tuple(choices.one_of((2, 3, 5)) for _ in case.lead)
    while heads_k * group * seq_q * seq_k * _product(lead) > score_limit and max((*lead, 1)) > 1:
        lead = tuple(max(1, n - 1) for n in lead)
    case = replace(case, seq_q=seq_q, seq_k=seq_k, lead=lead)

    def spread(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if shape is None:
            return None
        old, new = before[len(before) - len(shape) :], case.score_shape[len(before) - len(shape) :]
        return tuple(
            1 if n == 1 and (m != 1 or k == 1) else k
            for n, m, k in zip(shape, old, new, strict=True)
        )

    return replace(case, bias_shape=spread(case.bias_shape), mask_shape=spread(case.mask_shape))


def _length_class(n: int) -> tuple[bool, int, bool]:
    """Lengths that kernels treat alike: none, up to 32, 64, 128, 256 or more; a multiple of 8 or not."""
    return n == 0, sum(n > limit for limit in (32, 64, 128, 256)), n % 8 == 0


def cases(pool: Sequence[Variant] | None = None, **limits: Any) -> Any:
    """A Hypothesis strategy of whole cases (needs hypothesis); ``pool`` and ``limits`` as in :func:`draw_case`."""
    from hypothesis import strategies as st

    class Drawn:
        def __init__(self, draw: Callable[..., Any]):
            self.draw = draw

        def one_of(self, options: Sequence[T]) -> T:
            return self.draw(st.sampled_from(list(options)))

        def integer(self, low: int, high: int) -> int:
            return self.draw(st.integers(low, high))

    @st.composite
    def strategy(draw: Callable[..., Any]) -> Case:
        return draw_case(Drawn(draw), variants() if pool is None else pool, **limits)

    return strategy()


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The tensors of a case: values depend on the case alone, memory around and between them holds NaN.

    q, k, v and bias are leaves that require grad (bias as the variant says). Masks are surrounded by True, offsets by
    huge integers: whatever is read outside the tensors shows in the result.
    """
    return _Maker(case, torch.device(device)).inputs()


class _Maker:
    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.random = torch.Generator().manual_seed(case.seed)

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.random)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(tuple(shape), generator=self.random)

    def inputs(self) -> Inputs:
        case, variant = self.case, self.case.variant
        dim, dim_v, packed = variant.head_dim, variant.head_dim_v, variant.varlen
        if packed:
            tq, tk = sum(case.lens_q), sum(case.lens_k)
            shapes = (tq, case.heads_q, dim), (tk, case.heads_k, dim), (tk, case.heads_k, dim_v)
            out_shape, lse_shape = (tq, case.heads_q, dim_v), (case.heads_q, tq)
        else:
            shapes = (
                case.shape(case.heads_q, case.seq_q, dim),
                case.shape(case.heads_k, case.seq_k, dim),
                case.shape(case.heads_k, case.seq_k, dim_v),
            )
            out_shape = case.shape(case.heads_q, case.seq_q, dim_v)
            lse_shape = out_shape[:-1]
        q, k, v = (self.normal(s) for s in shapes)
        q, k, v = self.magnitude(q, k, v)
        bias = self.bias()
        dout, dlse = self.normal(out_shape), self.normal(lse_shape) if variant.lse_grad else None
        leaves = [self.place(x).requires_grad_() for x in (q, k, v)]
        options: dict[str, Any] = {
            "causal": case.causal,
            "window": case.window,
            "align": case.align,
            "scale": case.scale,
            "softcap": case.softcap,
            "dropout_p": case.dropout_p,
        }
        if case.precision:
            options["precision"] = case.precision
        if packed and case.known_lengths:
            options["max_seqlen_q"] = max(case.lens_q)
            if not case.self_attention:
                options["max_seqlen_k"] = max(case.lens_k)
        return Inputs(
            *leaves,
            bias=None if bias is None else bias.requires_grad_(variant.bias_grad),
            mask=self.mask(),
            dout=self.place(dout),
            dlse=None if dlse is None else embed(dlse.to(self.device)),
            cu_seqlens_q=self.offsets(case.lens_q) if packed else None,
            cu_seqlens_k=self.offsets(case.lens_k) if packed and not case.self_attention else None,
            dropout_seed=torch.tensor([case.seed * 7919, case.seed % 97], device=self.device)
            if variant.dropout
            else None,
            bias_grad=variant.bias_grad,
            options=options,
            tangents=self.tangents(*leaves, bias) if variant.tangents else {},
        )

    def tangents(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        found = {}
        for letter, x in zip("qkvb", (q, k, v, bias), strict=True):
            if x is None or letter not in self.case.variant.tangents:
                continue
            tangent = self.normal(x.shape)
            if self.case.tangent_magnitude == "offset" and letter in "kb":
                tangent += 4
            if letter == "b":
                kind = "contiguous" if self.case.bias_view == "expanded" else self.case.bias_view
                found["tbias"] = self.view(tangent.to(x.dtype), kind)
            else:
                found[f"t{letter}"] = self.place(tangent)
        return found

    def magnitude(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kind, dim = self.case.magnitude, max(1, q.shape[-1])
        if kind == "peaked":
            return q * 4, k * 4, v
        if kind == "low":  # every score near -150: exp underflows in fp32, row lse far below -88.7
            scale = self.case.scale if self.case.scale is not None else dim**-0.5
            shift = (150 / (scale * dim)) ** 0.5
            return 0.3 * q + shift, 0.3 * k - shift, v
        scaled = {"small_v": 1e-3, "large_v": 30.0}.get(kind, 1.0) * v
        return q, k, scaled + 3 if kind == "offset_v" else scaled

    def place(self, x: Tensor) -> Tensor:
        """x in the inputs' dtype, laid out in poisoned memory as the case says."""
        x, rank = x.to(self.case.variant.torch_dtype).to(self.device), x.dim()
        layout = self.case.layout
        heads_first = (*range(rank - 3), rank - 2, rank - 3, rank - 1) if rank > 2 else None
        if layout == "bshd":
            return embed(x, order=heads_first)
        if layout == "packed":  # one of three slices of a joint projection
            order, heads = (None, 1) if self.case.variant.varlen else (heads_first, rank - 3)
            return embed(x, order=order, pad={heads: 2 * x.shape[heads]})
        if layout == "strided":
            return embed(x, pad={rank - 2: 1, rank - 1: 8})
        if layout == "shifted":  # rows that are not aligned to 16 bytes
            return embed(x, pad={rank - 1: 1}, offset=1)
        if layout == "expanded" and rank > 3:
            return embed(x[:1]).expand_as(x)
        return embed(x)

    def view(self, x: Tensor, kind: str) -> Tensor:
        x = x.to(self.device)
        if kind == "transposed" and x.dim() > 1:
            return embed(x, order=(*range(x.dim() - 2), x.dim() - 1, x.dim() - 2))
        if kind == "padded":
            return embed(x, pad={x.dim() - 1: 5}, offset=1)
        if kind == "expanded" and not self.case.variant.varlen:
            return embed(x).expand(self.case.score_shape)
        return embed(x)

    def bias(self) -> Tensor | None:
        case, variant = self.case, self.case.variant
        if case.bias_shape is None:
            return None
        bias = self.normal(case.bias_shape)
        if case.bias_holes:
            bias[self.uniform(case.bias_shape) < 0.2] = -torch.inf
            if not variant.varlen and bias.dim() > 1 and bias.numel():
                bias.select(-2, 0).fill_(-torch.inf)
        return self.view(
            bias.float() if variant.bias_float else bias.to(variant.torch_dtype), case.bias_view
        )

    def mask(self) -> Tensor | None:
        shape = self.case.mask_shape
        if shape is None:
            return None
        mask = self.uniform(shape) < 0.7
        if self.case.mask_kind == "keys":
            visible = int(self.uniform((1,)).item() * (shape[-1] + 1))
            mask = (torch.arange(shape[-1]) < visible).expand(shape).contiguous()
        elif self.case.mask_kind == "rows":
            mask &= self.uniform((*shape[:-1], 1)) < 0.7
        elif self.case.mask_kind == "none":
            mask = torch.zeros(shape, dtype=torch.bool)
        return self.view(mask, self.case.mask_view)

    def offsets(self, lens: Sequence[int]) -> Tensor:
        return embed(torch.tensor([0, *lens]).cumsum(0).to(torch.int32).to(self.device))


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
