"""Generated problems for attention on 8-bit floats, and their judge.

The exact meaning of the inputs is a call in fp32, :meth:`FP8Inputs.dequantised`: the rounding of the inputs
themselves is no error of a kernel. Compared with that, the ordinary :class:`flashsci.testing.Judge` allows the
unavoidable errors of two products in e4m3. P is rounded once to 1 part in 16, and no finer than 2^-17 of the largest
P of its row. Out is rounded once to its own dtype. On a GPU, sums of 8-bit products keep 14 bits where others keep
24; if they run over all keys (``fp8_accumulate="fast"``), out may lose 2^-15 of itself with each key. The sums of P, and with them lse, may be those of P before or after it is rounded. The limit on the largest error
is one such rounding of every P, all of them upwards; the limits on gain and spread are those of independent
roundings.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashsci.testing.bounds import Finding, Judge
from flashsci.testing.choices import Choices, SeededChoices, strategy_of
from flashsci.testing.inputs import Inputs
from flashsci.testing.poison import embed
from flashsci.testing.roundings import Precisions, Rounding, finite

LAYOUTS = ("heads", "rows", "joint", "unaligned")
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (96, 64), (40, 24))
SCALES = ("none", "one", "head", "128", "64")
E4M3 = Rounding(2.0**-4, 2.0**-14)  # for P, with the largest of a row as 256
TENSOR_CORES = 2.0**-14  # unit roundoff of their sums of 8-bit products
# The part of a sum over all keys that is lost with each key: products are cut where the sum so far has its last bit, and
# lose half of it on average, 2^-14 of the sum; while the sum grows, that is 2^-15 of the last.
LOST = 2.0**-15


@dataclass(frozen=True)
class FP8Variant:
    """The properties that kernels are compiled for."""

    dtype: str = "bfloat16"  # that of out
    head_dim: int = 64
    head_dim_v: int = 64
    window: str = "none"  # "causal", "left": causal and a left side, "both"
    softcap: bool = False
    packed: bool = False


@dataclass(frozen=True)
class FP8Case:
    """One problem as pure data: seeded, hashable, printable as the reproducer of a failure."""

    variant: FP8Variant = field(default_factory=FP8Variant)
    seed: int = 0
    lens_q: tuple[int, ...] = (30,)  # a dense call has one, the length
    lens_k: tuple[int, ...] = (40,)
    batch: tuple[int, ...] = ()  # leading dims of a dense call
    heads_k: int = 1
    group: int = 1  # query heads per key head
    layout: str = "heads"  # one of LAYOUTS
    scales: tuple[str, str, str] = ("one", "one", "one")  # of q, k, v, each one of SCALES
    align: str = "upper_left"
    left: int = 20  # sides of the window, where it has them
    right: int = 3
    scale: float | None = None
    sharp: float = 1.0  # a factor of q: large scores
    accumulate: str = "safe"  # or "fast"

    @property
    def heads_q(self) -> int:
        return self.heads_k * self.group

    @property
    def scores(self) -> int:
        pairs = sum(q * k for q, k in zip(self.lens_q, self.lens_k, strict=True))
        return self.heads_q * pairs * functools.reduce(int.__mul__, self.batch, 1)


@dataclass
class FP8Inputs:
    """The tensors and options of one call, in float8_e4m3fn.

    The call is one of :func:`flashsci.attention`, or of :func:`flashsci.varlen_attention` if the options have
    ``cu_seqlens_q``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]  # the keyword arguments

    def evaluate(self, backend: str, **options: Any) -> dict[str, Tensor]:
        """out and lse of this backend, never of another."""
        import flashsci

        given = dict(self.options, return_lse=True, backend=backend) | options
        call = flashsci.varlen_attention if "cu_seqlens_q" in given else flashsci.attention
        with flashsci.use_backend(backend, strict=True):
            found = call(self.q, self.k, self.v, **given)
        return dict(zip(("out", "lse"), found, strict=True))

    def dequantised(self) -> Inputs:
        """The same attention in fp32."""
        options = {n: x for n, x in self.options.items() if not isinstance(x, Tensor)}
        for name in ("out_dtype", "fp8_accumulate"):
            options.pop(name, None)
        edges = [self.options.get(n) for n in ("cu_seqlens_q", "cu_seqlens_k")]
        q, k, v = (
            _times(x, self.options.get(f"{name}_scale"), of)
            for name, x, of in (
                ("q", self.q, edges[0]),
                ("k", self.k, edges[1]),
                ("v", self.v, edges[1]),
            )
        )
        return Inputs(q, k, v, cu_seqlens_q=edges[0], cu_seqlens_k=edges[1], options=options)

    def judge(self) -> FP8Judge:
        return FP8Judge(self)


def _times(x: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """x times its scales in fp32, block after block."""
    wide = x.float()
    if scale is None or not x.numel():
        return wide
    if scale.dim() == 0:
        return wide * scale
    if cu_seqlens is None:
        if scale.dim() == x.dim() - 2:
            return wide * scale[..., None, None]
        block = 128 if scale.shape[-1] == -(-x.shape[-2] // 128) else 64
        parts = wide.split(block, -2)
        return torch.cat([p * scale[..., b, None, None] for b, p in enumerate(parts)], -2)
    edges = cu_seqlens.tolist()
    sequences = len(edges) - 1
    rows = [r for r in (1 << 30, 128, 64) if scale.shape[0] == len(x) // r + sequences]
    found = []
    for n, (first, last) in enumerate(itertools.pairwise(edges)):
        for b, part in enumerate(wide[first:last].split(rows[0])):
            found.append(part * scale[first // rows[0] + n + b][:, None])
    return torch.cat(found)


def on_tensor_cores(x: Tensor) -> bool:
    """Whether sums of products of such tensors may keep 14 bits."""
    return x.is_cuda


class _Truth(Judge):
    sigmas = 4.0  # a fifth of a result would be five roundings to 1 part in 16

    def __init__(self, inputs: Inputs, out_dtype: torch.dtype, fast: bool):
        self.out_dtype, self.fast = out_dtype, fast
        super().__init__(inputs, fused=True)

    def precisions(self) -> Precisions:
        found = torch.finfo(self.out_dtype)
        unit = found.eps / 2
        sums = torch.finfo(torch.float32).eps / 2
        if on_tensor_cores(self.inputs.q):
            sums = TENSOR_CORES * (2 if self.fast else 1)  # q k^T over 256 columns has the cuts of two over 128
        return Precisions(unit, sums, found.smallest_normal, unit, unit, unit, E4M3)

    def _allowances(self) -> None:
        super()._allowances()
        v = self.inputs.v
        if self.fast and on_tensor_cores(v) and v.numel():
            edges = self.inputs.cu_seqlens_k
            keys = v.shape[-2] if edges is None else max(edges.diff().tolist(), default=0)
            lost = min(keys * LOST, 1.0)
            self.floor["out"] += lost * finite(v).abs().max().item()
            self.gain_floor["out"] += lost
            self.spread_floor["out"] += lost * self.square["out"] ** 0.5


class FP8Judge:
    """Truth and allowances of one call on 8-bit floats; it judges any number of results for the call.

    Examples:
        >>> from flashsci.testing import FP8Case, make_fp8_inputs
        >>> inputs = make_fp8_inputs(FP8Case(lens_q=(30,), lens_k=(40,)))
        >>> inputs.judge().require(inputs.evaluate("reference"))
    """

    def __init__(self, inputs: FP8Inputs):
        self.out_dtype = inputs.options.get("out_dtype") or torch.bfloat16
        fast = inputs.options.get("fp8_accumulate") == "fast"
        self.judge = _Truth(inputs.dequantised(), self.out_dtype, fast)

    def problems(self, results: dict[str, Tensor]) -> list[str]:
        """The faults of out and lse."""
        problems = [f.problem for f in self.findings(results) if f.problem]
        if results["out"].dtype != self.out_dtype:
            problems.append(f"out must be {self.out_dtype}, is {results['out'].dtype}")
        return problems

    def findings(self, results: dict[str, Tensor]) -> list[Finding]:
        """The findings on out and lse."""
        return self.judge.findings(self.part(results))

    def part(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The results as the judge compares them: in fp32."""
        return {name: x.float() for name, x in results.items()}

    def require(self, results: dict[str, Tensor]) -> None:
        """Raise AssertionError with every failure."""
        problems = self.problems(results)
        assert not problems, "\n".join(problems)


def judge_fp8(case: FP8Case, backend: str, device: torch.device | str = "cpu") -> None:
    """Run one case on a backend and require the bounds of this module for out and lse.

    Raises:
        AssertionError: a wrong result, with the case.
        BackendError: the backend cannot serve the call.
    """
    inputs = make_fp8_inputs(case, device)
    problems = inputs.judge().problems(inputs.evaluate(backend))
    assert not problems, "\n".join([*problems, repr(case)])


def make_fp8_inputs(case: FP8Case, device: torch.device | str = "cpu") -> FP8Inputs:
    """The tensors of a case: values depend on the case alone; memory around and between them holds NaN."""
    random = torch.Generator().manual_seed(case.seed)
    variant = case.variant
    lengths = case.lens_q, case.lens_k, case.lens_k
    heads = case.heads_q, case.heads_k, case.heads_k
    dims = variant.head_dim, variant.head_dim, variant.head_dim_v
    options: dict[str, Any] = {
        "align": case.align,
        "scale": case.scale,
        "softcap": 5.0 if variant.softcap else None,
        "out_dtype": getattr(torch, variant.dtype),
        "fp8_accumulate": case.accumulate,
    } | _window(case)
    tensors = []
    for name, lens, count, dim, kind in zip("qkv", lengths, heads, dims, case.scales, strict=True):
        size = 1.0 if kind == "none" else 30.0
        rows = sum(lens)
        shape = (rows, count, dim) if variant.packed else (*case.batch, count, rows, dim)
        x = (size * torch.randn(shape, generator=random)).to(torch.float8_e4m3fn)
        tensors.append(_laid_out(x.to(device), case.layout, variant.packed))
        if kind != "none":
            powers = torch.rand(_scale_shape(case, kind, rows, count), generator=random) * 2 - 1
            scale = powers.exp2() / size * (case.sharp if name == "q" else 1.0)
            options[f"{name}_scale"] = embed(scale.to(device), pad={scale.dim() - 1: 1} if scale.dim() else None)
    if variant.packed:
        for name, lens in (("cu_seqlens_q", case.lens_q), ("cu_seqlens_k", case.lens_k)):
            edges = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
            options[name] = embed(edges.to(device))
    q, k, v = tensors
    return FP8Inputs(q, k, v, options)


def _scale_shape(case: FP8Case, kind: str, rows: int, heads: int) -> tuple[int, ...]:
    if kind == "one":
        return ()
    if case.variant.packed:
        sequences = len(case.lens_q)
        return (sequences if kind == "head" else rows // int(kind) + sequences), heads
    return (*case.batch, heads) if kind == "head" else (*case.batch, heads, -(-rows // int(kind)))


def _window(case: FP8Case) -> dict[str, Any]:
    window = {
        "none": None,
        "causal": None,
        "left": (case.left, None),
        "both": (case.left, case.right),
    }
    kind = case.variant.window
    return {"causal": kind in ("causal", "left"), "window": window[kind]}


def _laid_out(x: Tensor, layout: str, packed: bool) -> Tensor:
    """The tensor in the memory layout of that name, between poison.

    Heads are before rows or after them, or it is a slice of a joint projection, or rows begin anywhere.
    """
    rank = x.dim()
    by_heads = [*range(rank - 3), *((1, 0) if packed else (rank - 3, rank - 2)), rank - 1]
    by_rows = [*range(rank - 3), *((0, 1) if packed else (rank - 2, rank - 3)), rank - 1]
    if layout == "unaligned":
        return embed(x, by_heads, pad={rank - 1: 3}, offset=1)
    if layout == "joint":
        return embed(x, by_rows, pad={by_rows[-2]: 4})
    return embed(x, by_heads if layout == "heads" else by_rows)


@functools.cache
def fp8_variants(count: int = 28) -> tuple[FP8Variant, ...]:
    """The bounded set of variants that generated cases draw from, the same everywhere."""
    choices = SeededChoices(20261124)
    found: dict[FP8Variant, None] = {}
    while len(found) < count:
        dims = choices.one_of(HEAD_DIMS)
        found[
            FP8Variant(
                choices.one_of(("bfloat16", "bfloat16", "float16")),
                *dims,
                choices.one_of(("none", "causal", "causal", "left", "both")),
                choices.one_of((False, False, True)),
                choices.one_of((False, False, True)),
            )
        ] = None
    return tuple(found)


def draw_fp8(choices: Choices, pool: tuple[FP8Variant, ...] | None = None, longest: int = 700) -> FP8Case:
    """A case from choices: dense or packed, any lengths, scales of every kind for each of q, k and v."""
    variant = choices.one_of(fp8_variants() if pool is None else pool)
    count = choices.integer(1, 5) if variant.packed else 1
    lens_q, lens_k = (
        tuple(
            choices.one_of((1, 63, 64, 65, choices.integer(1, longest), choices.integer(1, longest)))
            if choices.integer(0, 9)
            else 0
            for _ in range(count)
        )
        for _ in range(2)
    )
    limited = lambda lens: tuple(min(n, longest) for n in lens)  # noqa: E731
    return FP8Case(
        variant=variant,
        seed=choices.integer(0, 2**31 - 1),
        lens_q=limited(lens_q),
        lens_k=limited(lens_k),
        batch=() if variant.packed else choices.one_of(((), (1,), (2,), (2, 2))),
        heads_k=choices.one_of((1, 2, 3)),
        group=choices.one_of((1, 1, 2, 4)),
        layout=choices.one_of(LAYOUTS),
        scales=(choices.one_of(SCALES), choices.one_of(SCALES), choices.one_of(SCALES)),
        align=choices.one_of(("upper_left", "lower_right")),
        left=choices.one_of((0, 1, 20, 100)),
        right=choices.one_of((0, 3)),
        scale=choices.one_of((None, None, 0.3)),
        sharp=choices.one_of((1.0, 1.0, 4.0)),
        accumulate=choices.one_of(("safe", "fast")),
    )


def generate_fp8(seed: int, count: int, **limits: Any) -> Iterator[FP8Case]:
    """``count`` cases of a seeded generator; ``limits`` as in :func:`draw_fp8`."""
    choices = SeededChoices(seed)
    for _ in range(count):
        yield draw_fp8(choices, **limits)


def fp8_cases(**limits: Any) -> Any:
    """A Hypothesis strategy of whole cases (needs hypothesis)."""
    return strategy_of(lambda choices: draw_fp8(choices, **limits))
