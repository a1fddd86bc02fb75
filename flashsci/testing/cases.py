"""Generated problems as frozen dataclasses. drawing.py draws them; making.py makes the tensors of a case."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Variant:
    """The properties that a kernel may be compiled for; all other properties of a case cost no new kernel."""

    dtype: str = "float32"
    head_dim: int = 16
    head_dim_v: int = 16
    bias: str | None = (
        None  # "pair": broadcastable to [..., Hq, Sq, Sk] (packed: ragged blocks); "key": one row of keys
    )
    bias_float: bool = False  # bias in fp32 whatever the inputs' dtype
    bias_grad: bool = False
    key_weight: str | None = None  # "inputs": in the inputs' dtype; "float": in fp32
    key_weight_grad: bool = False
    alibi: bool = False
    alibi_grad: bool = False
    sink: str | None = None  # as key_weight; kernels compute none, some backends refuse it
    mask: bool = False
    window: bool = False
    softcap: bool = False
    dropout: bool = False
    varlen: bool = False
    lse_grad: bool = False
    caps_bias: bool = False  # the softcap bounds scores with bias and ALiBi
    gate: str | None = None  # a factor of P: as key_weight
    flipped: bool = False  # a scale of zero or less, which no kernel makes part of an exponent
    tangents: str = (
        ""  # second order: which of "qkvbwg" (bias, key_weight, gate) have tangents, their gradients cotangents
    )

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Case:
    """One problem as pure data: seeded, hashable, printable as the reproducer of a failure.

    ``lead`` are the leading sizes before heads; ``rank`` says which of batch and heads exist at all. Packed (varlen)
    cases have ``lens_q`` and ``lens_k`` instead of ``seq_q`` and ``seq_k``.
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
    bias_view: str = "contiguous"  # "transposed", "padded", "expanded", "linear"
    bias_holes: bool = False  # some entries, and where possible one whole row, are -inf
    bias_number: str = ""  # a mask written as a number: one of NUMBERS, and where it stands, one of PLACES
    bias_number_at: str = "last"
    bias_scale: float = 1.0  # the standard deviation of a bias in fp32
    weight_shape: tuple[int, ...] | None = None
    weight_view: str = "contiguous"  # as bias_view
    # "none"; "rows": all weights of the first batch member, or head; "subnormal": some are too small to count
    weight_zeros: str = "some"
    gate_shape: tuple[int, ...] | None = None
    gate_view: str = "contiguous"  # as bias_view
    mask_shape: tuple[int, ...] | None = None
    mask_kind: str = (
        "random"  # "rows": some rows see nothing; "keys": a tail of keys is hidden; "none": nothing is visible
    )
    mask_view: str = "contiguous"
    layout: str = "bhsd"  # of q, and of k, v and dout unless ``layouts`` names theirs: one of LAYOUTS
    layouts: tuple[str, ...] = ()  # of k, v and dout; the last may be one of DOUT_LAYOUTS
    negated: str = ""  # the one of q, k, v and dout that torch is to negate when it is read; or none
    magnitude: str = "unit"  # or one of MAGNITUDES
    padding: str = "none"  # or one of PADDINGS: which rows are zero
    dout_scale: float = 1.0  # dout and dlse as a mean over many terms makes them
    execution: str = ""  # or one of EXECUTIONS: how autograd runs the call
    precision: str | None = None
    tangent_magnitude: str = "unit"  # "offset": far from zero in what softmax does not see

    @property
    def heads_q(self) -> int:
        return self.heads_k * self.group

    @property
    def vastness(self) -> float:
        """The factor of q and of k for "vast" products: far from 1, but the sums are finite in their dtype."""
        if self.variant.dtype == "float16":
            return 2.0**8
        return 2.0**40 if self.variant.softcap else 2.0**58

    @property
    def layout_of(self) -> dict[str, str]:
        """Layouts of q, k, v and dout by name."""
        return dict(
            zip(
                ("q", "k", "v", "dout"),
                (self.layout, *(self.layouts or (self.layout,) * 3)),
                strict=True,
            )
        )

    def shape(self, heads: int, seq: int, dim: int) -> tuple[int, ...]:
        """Shape of q, k, v, or of scores (dense), with the leading dims that exist at this rank."""
        return (*self.lead, heads, seq, dim)[-self.rank :]

    @property
    def key_shape(self) -> tuple[int, ...]:
        """[*, Hk, Sk], the shape that key weights broadcast to."""
        if self.variant.varlen:
            return self.heads_k, sum(self.lens_k)
        return (*self.lead, self.heads_k, self.seq_k)[1 - self.rank :]

    @property
    def score_shape(self) -> tuple[int, ...]:
        return self.shape(self.heads_q, self.seq_q, self.seq_k)

    @property
    def scores(self) -> int:
        """The number of scores, over batch and heads."""
        if self.variant.varlen:
            return self.heads_q * sum(map(operator.mul, self.lens_q, self.lens_k))
        return math.prod(self.score_shape)


@dataclass(frozen=True)
class ResidualCase(Case):
    """One problem of :func:`flashsci.residual_attention`, in which scores are a result; its variant has only a bias
    and dropout."""

    given: str = "both"  # "out", "scores": which results have a gradient
    scores_view: str = "contiguous"  # of the scores' gradient, as bias_view


@dataclass(frozen=True)
class MapCase(Case):
    """One problem of :func:`flashsci.attention_statistics`: a call without dropout and gradients."""


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
    1100,
    1288,
)
# `_Maker.magnitude` in inputs.py defines them.
MAGNITUDES = (
    "peaked",
    "low",
    "small_v",
    "large_v",
    "offset_v",
    "outliers",
    "sharp_and_flat",
    "rising",
    "falling",
    "huge",
    "tiny",
    "vast",
)
LAYOUTS = ("bhsd", "bshd", "packed", "strided", "expanded", "shifted", "joint")
# "columns": its last two dims are exchanged in memory; "constant": one number, as the gradient of a sum.
DOUT_LAYOUTS = (*LAYOUTS, "columns", "constant")
# "tail": rows of q, k, v and dout from some row of each sequence on; "tail_masked": the same, with those keys hidden
# by the mask, if there is one; "dout_tail": of dout alone; "scattered": single rows of each; "dout_scattered": of
# dout alone.
PADDINGS = ("tail", "tail_masked", "dout_tail", "scattered", "dout_scattered")
NUMBERS = ("-1e4", "-1e9", "-1e30", "float32_min", "dtype_min")
# Keys at the end, at the start, anywhere, whole rows; "padding": the zero rows and keys of ``padding``.
PLACES = ("last", "first", "scattered", "rows", "padding")
DOUT_SCALES = {
    "bfloat16": (1e-3, 1e-6, 1e-9),
    "float16": (1e-3, 1e-3, 1e-6),  # of 1e-6 are subnormals
    "float32": (1e-3, 1e-6, 1e-9),
    "float64": (1e-3, 1e-6, 1e-9),
}
SOFTCAPS = (2.0, 15.0, 50.0, 0.01, 1e4, 1e7, 1e12)
# "hooks": saved tensors come back with the strides of their last two dims exchanged; "batched": several gradients in
# one backward, under torch's vmap (first derivatives alone).
EXECUTIONS = ("hooks", "batched")
SUBNORMAL = (1e-45, 1e-42, 3e-39, 1e-38)  # key weights that count as zero
SMALL_LENGTHS = (0, 1, 2, 3, 5, 15, 16, 17, 23, 33)
SHORT_LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 20, 23, 24, 25, 29, 31, 32)  # of csrc/sm80/small
HEAD_DIMS = (
    (1, 1),
    (3, 5),
    (8, 8),
    (16, 16),
    (24, 24),
    (32, 32),
    (40, 72),
    (50, 20),
    (64, 64),
    (80, 48),
    (96, 96),
    (100, 25),
    (127, 128),
    (128, 128),
    (192, 128),
    (72, 256),
    (200, 136),
    (256, 256),
)
