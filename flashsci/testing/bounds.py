"""The limits of errors: three criteria per tensor, against the fp64 oracle and plain PyTorch in the same dtype.

Two-error rule: the largest error is at most twice that of plain PyTorch (the reference backend, TF32 off), plus a
rounding floor of 8 eps times the formula evaluated on absolute values. In a low precision that rule alone accepts an
output scaled by 1.01, or with one forgotten key among a hundred. Two more criteria use a model of honest rounding in
a fused kernel: P, dS and every result are rounded once to the inputs' dtype, independently where their values differ
(standard deviations follow from derivatives of the formula by each rounding); all other values are kept in fp32.

- Gain: for an error x - ref, <x - ref, ref> / <ref, ref> is the part that rescales the result. Independent roundings
  average out in it, a wrong scale does not.
- Spread: the Euclidean norm of the error. Many small roundings stay small in it, a missing term in every row does
  not.

Both may be twice plain PyTorch's, plus five standard deviations, plus the possible error of fp32 sums.

All this is first order in the errors of scores. The possible effect of rows with larger errors (scores of 1e8, whole
rows of -1e9: formula.py) is subtracted from every error, also from a baseline's, element by element, before it is
measured: such rows must be finite, and the others are judged as if they stood alone. If every term of a result is
zero (gradients of rows whose dout is zero), the result must be zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashsci.testing.blocks import blocks
from flashsci.testing.evaluation import check_alone, evaluate
from flashsci.testing.formula import Formula
from flashsci.testing.inputs import Inputs, moved_to
from flashsci.testing.roundings import Precisions, Rounding, finite
from flashsci.testing.second_order import SECOND_ORDER
from flashsci.testing.tolerance import (
    BASELINE_FACTOR,
    FLOOR_ROUNDINGS,
    PROBES,
    SIGMAS,
    SUM_ROUNDINGS,
    SUM_WIDTH,
)

REDUCTIONS = ("entropy", "largest_score", "key_sum", "top_values", "top_indices")  # of an attention map
GRADIENTS = ("dq", "dk", "dv", "dbias", "dkey_weight", "dpair_gate", "dsink", "dalibi_slopes")
TENSORS = ("out", "lse", "scores", *GRADIENTS, *SECOND_ORDER, *REDUCTIONS)
SUMMED = ("dsink", "gsink", "dalibi_slopes")  # summed over packed sequences
PLAIN = ("reference", "sdpa", "eager")  # backends that are plain PyTorch, with its own accuracy


@contextmanager
def exact_matmul() -> Iterator[None]:
    """fp32 matrix products in fp32: TF32 and reduced-precision reductions off."""
    settings = torch.backends.cuda.matmul
    names = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(settings, name) for name in names}
    try:
        for name in names:
            setattr(settings, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


@dataclass(frozen=True)
class Finding:
    """The findings on one tensor. ``problem`` describes the fault; None if there is none."""

    tensor: str
    error: float = 0.0  # largest absolute error
    allowed: float = 0.0
    baseline: float = 0.0  # that of plain PyTorch
    gain: float = 0.0
    gain_allowed: float = 0.0
    spread: float = 0.0  # Euclidean norm of the error
    spread_allowed: float = 0.0
    problem: str | None = None

    @property
    def ratios(self) -> tuple[float, float, float]:
        """Largest error, gain and spread, each divided by its limit; above 1 is a failure."""
        pairs = (
            (self.error, self.allowed),
            (self.gain, self.gain_allowed),
            (self.spread, self.spread_allowed),
        )
        return tuple(found / most if most else float(found > 0) for found, most in pairs)  # type: ignore[return-value]


class Judge:
    """Truth, baseline and allowances of one call; it judges any number of results for the call.

    Args:
        inputs: the call, on any device, in any dtype (fp64 is compared with the oracle at fp64 rounding).
        fused: the results come from kernels that keep scores in fp32. False for plain PyTorch itself, which in 16
            bits may have its own large errors if scores are large (hundreds, or masks written as numbers on whole
            rows).
        device: the device where truth and allowances are computed and results are compared; None for that of
            ``inputs``. Plain PyTorch runs on the latter in any case.

    Raises:
        AssertionError: the oracle (reference backend in fp64) and the formula written here disagree.

    Examples:
        >>> import torch
        >>> from flashsci.testing import Inputs, Judge, evaluate
        >>> q, k, v, dout = torch.randn(4, 1, 2, 8, 16).bfloat16()
        >>> judge = Judge(Inputs(q, k, v, dout=dout))
        >>> judge.require(evaluate(judge.inputs, "sdpa", lse=False))
    """

    sigmas = SIGMAS

    def __init__(self, inputs: Inputs, fused: bool = True, device: torch.device | str | None = None):
        self.device = inputs.q.device if device is None else torch.device(device)
        inputs = replace(inputs, execution="")
        self.given, self.inputs, self.fused = inputs, inputs.on(self.device), fused
        with exact_matmul():
            self.truth = evaluate(self.inputs.to(torch.float64), "reference")
        # Contiguous: torch's bf16 products on the CPU read past strided rows of one element.
        self.baseline = self._plain(inputs.to(None))
        if not all(self._same_finite(n, x) for n, x in self.baseline.items()):
            self._wide_baseline()
        self._allowances()

    def _plain(self, inputs: Inputs) -> dict[str, Tensor]:
        """The results of plain PyTorch, on the device of the inputs."""
        with exact_matmul():
            return moved_to(self.device, evaluate(inputs, "reference"))

    def _wide_baseline(self) -> None:
        """Replace the baseline by fp32 results, rounded."""
        wide = self._plain(self.given.to(torch.float32))
        self.baseline = {n: wide[n].to(x.dtype) for n, x in self.baseline.items()}

    def precisions(self) -> Precisions:
        """The precisions of a kernel's results and of its parts."""
        inputs, dtype = self.inputs, self.inputs.q.dtype
        unit, internal = _unit(dtype), min(_unit(dtype), _unit(torch.float32))
        if inputs.options.get("precision") == "tf32":
            unit = internal = 2.0**-11
        of_bias, of_weight, of_sink, of_gate = (
            unit if x is None else min(unit, _unit(x.dtype))
            for x in (inputs.bias, inputs.key_weight, inputs.sink, inputs.pair_gate)
        )
        tiny = torch.finfo(dtype).smallest_normal
        # Fused kernels multiply fp32 in parts of TF32 (the last part is truncated): 3xTF32.
        in_parts = self.fused and dtype == torch.float32 and unit == internal == _unit(dtype)
        parts = Rounding(2.0**-10, tiny) if in_parts else None
        return Precisions(unit, internal, tiny, of_bias, of_weight, of_sink, None, parts, of_gate)

    def _allowances(self) -> None:
        precisions = self.precisions()
        unit, internal, self.tiny = precisions[:3]
        value = {n: torch.full_like(x, -torch.inf if n == "lse" else 0.0) for n, x in self.truth.items()}
        coarse, fine = ({n: torch.zeros_like(x) for n, x in self.truth.items()} for _ in range(2))
        generator = torch.Generator(self.inputs.q.device).manual_seed(0)
        directions = {
            n: torch.stack([finite(x), *(_signs(x, generator) for _ in range(PROBES))]) for n, x in self.truth.items()
        }
        variances = {n: torch.zeros(1 + PROBES, dtype=torch.float64, device=x.device) for n, x in self.truth.items()}
        cells = {n: torch.zeros_like(x) for n, x in self.truth.items()}
        shift: dict[str, Any] = {}  # the rescaling by computed roundings, times <truth, truth>
        self.loose: dict[str, Tensor] = {}
        large = False
        for block in blocks(self.inputs.to(torch.float64)):
            formula = Formula(block, precisions)
            large |= formula.large
            for name in self.truth:
                for whole, part in (
                    (value, formula.values),
                    (coarse, formula.coarse),
                    (fine, formula.fine),
                ):
                    _into(name, block.slot(name, whole[name]), part[name].detach())
                if name in formula.subnormal:
                    _into(name, block.slot(name, cells[name]), formula.subnormal[name].detach())
                if name in formula.loose:
                    sums = self.loose.setdefault(name, torch.zeros_like(self.truth[name]))
                    _into(name, block.slot(name, sums), formula.loose[name].detach())
                if name in formula.shift:
                    along_truth = formula.shift[name] * block.slot(name, directions[name][0])
                    shift[name] = shift.get(name, 0.0) + along_truth.flatten(1).sum(1)
                variances[name] += formula.variances(name, torch.stack([block.slot(name, x) for x in directions[name]]))
        if large and self.fused and self.inputs.q.dtype.itemsize == 2:
            # Scores in 16 bits make plain PyTorch itself wrong: its fp32 result, rounded, is the measure.
            self._wide_baseline()
        sum_roundings = SUM_ROUNDINGS * max(1.0, max(self.inputs.q.shape[-1], self.inputs.v.shape[-1]) / SUM_WIDTH)
        self.floor, self.gain_floor, self.spread_floor, self.vanishes = {}, {}, {}, {}
        self.zero: dict[str, Tensor] = {}  # where every term of a result is zero
        self.square: dict[str, float] = {}
        self.of_baseline: dict[str, tuple[float, float, float]] = {}
        for name, truth in self.truth.items():
            self.zero[name] = (coarse[name] + fine[name] == 0) & (truth == 0)
            if name in self.loose:
                self.zero[name] &= self.loose[name] == 0
            # No number is rounded better than to a subnormal number.
            least = self.tiny if truth.numel() and name not in ("lse", "gdlse", "tlse", "tulse") else 0.0
            size = unit * (coarse[name] + least) + internal * fine[name]
            # Sums in fp32 do not round independently: their possible errors add up. Nor do subnormal numbers.
            sums = internal * fine[name]
            cell = unit * (cells[name] + least * (finite(truth).abs() < least))
            # One wait for the device, instead of one for each number.
            largest, square, along, across, sum_gain, fine_norm, sum_norm, moved, difference = _numbers(
                size.max() if size.numel() else size.sum(),
                finite(truth).square().sum(),
                variances[name][0].sqrt(),
                variances[name][1:].mean().sqrt(),
                ((sum_roundings * sums + cell) * finite(truth).abs()).sum(),
                fine[name].norm(),
                sums.norm(),
                shift.get(name, variances[name].new_zeros(1)).abs().max(),
                self._beyond(name, _error(value[name], truth)).max() if truth.numel() else truth.sum(),
            )
            self.floor[name] = FLOOR_ROUNDINGS * largest
            self.square[name] = square
            gain = self.sigmas * along + sum_gain + moved
            self.gain_floor[name] = gain / square if square else 0.0
            norm = square**0.5
            self.vanishes[name] = norm <= 2.0**-40 * fine_norm
            # Nor can 1% be detected in a result that is mostly loose, or of subnormal numbers.
            if name in self.loose and not self.vanishes[name]:
                left = (0.01 * finite(truth).abs() - self.loose[name]).clamp(min=0).norm().item()
                self.vanishes[name] = left < 0.007 * norm
            if least and not self.vanishes[name]:
                self.vanishes[name] = 0.01 * norm < 8 * unit * least * truth.numel() ** 0.5
            self.spread_floor[name] = self.sigmas * across + sum_roundings * sum_norm
            # The oracle is checked against the formula of this file, which shares no code with it.
            limit = self.floor[name] * (_unit(torch.float64) / internal)
            assert difference <= max(limit, 1e-280), (
                f"the reference in fp64 and the formula disagree on {name} by {difference:.3g} (limit {limit:.3g})"
            )

    def _beyond(self, name: str, error: Tensor) -> Tensor:
        """Errors minus the possible effect of loose rows."""
        if name not in self.loose:
            return error
        return error.sign() * (error.abs() - self.loose[name]).clamp(min=0)

    def _same_finite(self, name: str, x: Tensor) -> bool:
        return torch.equal(torch.isfinite(x), torch.isfinite(self.truth[name]))

    def errors(self, name: str, x: Tensor) -> tuple[float, float, float]:
        """The largest error, the gain and the norm of the error.

        The gain is <x - ref, ref> / <ref, ref>, the factor minus one by which x is too large (0 when ref is zero).
        """
        truth, square = finite(self.truth[name]), self.square[name]
        if not x.numel():
            return 0.0, 0.0, 0.0
        error = self._beyond(name, finite(x.double()) - truth)
        error = error.masked_fill(self._overflows(name, x), 0.0)
        largest, along, norm = _numbers(error.abs().max(), (error * truth).sum(), error.norm())
        return largest, along / square if square else 0.0, norm

    def baseline_errors(self, name: str) -> tuple[float, float, float]:
        """The errors of plain PyTorch."""
        if name not in self.of_baseline:
            self.of_baseline[name] = self.errors(name, self.baseline[name])
        return self.of_baseline[name]

    def _overflows(self, name: str, x: Tensor) -> Tensor:
        """Elements whose truth is beyond the dtype of a result, where it can only be infinite or NaN."""
        truth = self.truth[name]
        beyond = torch.isfinite(truth) & (truth.abs() > torch.finfo(x.dtype).max)
        return beyond & ~torch.isfinite(x)

    def _may_overflow(self, name: str, dtype: torch.dtype) -> Tensor:
        """Elements that loose rows may make too large for the dtype of a result."""
        if name not in self.loose:
            return self.truth[name].new_zeros((), dtype=torch.bool)
        return self.truth[name].abs() + self.loose[name] > torch.finfo(dtype).max

    def judge(self, name: str, x: Tensor) -> Finding:
        """The findings on one tensor of one result."""
        x = x.to(self.device)
        truth, baseline = self.truth[name], self.baseline[name]
        if x.shape != truth.shape or x.dtype != baseline.dtype:
            return Finding(
                name,
                problem=f"{name} is {x.dtype} {list(x.shape)}, must be {baseline.dtype} {list(truth.shape)}",
            )
        wrong = torch.isfinite(x) != torch.isfinite(truth)
        wrong |= ~torch.isfinite(truth) & (x != truth)
        wrong &= ~(torch.isinf(x) & self._may_overflow(name, x.dtype))
        wrong &= ~self._overflows(name, x)
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            return Finding(
                name,
                error=float("inf"),
                problem=f"{name}: {int(wrong.sum())} of {x.numel()} values are "
                f"{x[first].item()} or the like where {truth[first].item():.3g} is due, first at {first}",
            )
        stray = self.zero[name] & (x != 0) & torch.isfinite(x)
        if stray.any():
            first = tuple(stray.nonzero()[0].tolist())
            return Finding(
                name,
                error=float("inf"),
                problem=f"{name}: {int(stray.sum())} of {x.numel()} values are {x[first].item():.3g} or the like "
                f"where every term is zero, first at {first}",
            )
        base, base_gain, base_norm = self.baseline_errors(name)
        error, gain, norm = self.errors(name, x)
        found = Finding(
            name,
            error=error,
            allowed=BASELINE_FACTOR * base + self.floor[name],
            baseline=base,
            gain=abs(gain),
            gain_allowed=BASELINE_FACTOR * abs(base_gain) + self.gain_floor[name],
            spread=norm,
            spread_allowed=BASELINE_FACTOR * base_norm + self.spread_floor[name],
        )
        problem = None
        if not found.error <= found.allowed:
            problem = f"{name}: error {found.error:.3g} > {found.allowed:.3g} allowed (plain PyTorch: {base:.3g})"
        elif not found.gain <= found.gain_allowed:
            problem = f"{name}: off by a factor 1 ± {found.gain:.3g}, allowed {found.gain_allowed:.3g}"
        elif not found.spread <= found.spread_allowed:
            problem = f"{name}: error norm {found.spread:.3g} > {found.spread_allowed:.3g} allowed by roundings"
        return replace(found, problem=problem)

    def compare(self, name: str, x: Tensor, y: Tensor) -> Finding:
        """Compare two results: they may differ by as much as one may differ from the truth."""
        x, y = x.to(self.device), y.to(self.device)
        allowed = BASELINE_FACTOR * self.baseline_errors(name)[0] + self.floor[name]
        error = self._beyond(name, self._beyond(name, _error(x, y.double())))
        largest = error.abs().max().item() if error.numel() else 0.0
        found = Finding(name, error=largest, allowed=allowed)
        wrong = torch.isfinite(x) != torch.isfinite(y)
        wrong &= ~((torch.isinf(x) | torch.isinf(y)) & self._may_overflow(name, x.dtype))
        if found.error <= allowed and not wrong.any():
            return found
        return replace(found, problem=f"{name}: two backends differ by {found.error:.3g} > {allowed:.3g}")

    def findings(self, results: dict[str, Tensor]) -> list[Finding]:
        """The findings on all tensors of one result (those it has)."""
        return [self.judge(name, x) for name, x in results.items()]

    def require(self, results: dict[str, Tensor]) -> None:
        """Raise AssertionError with every tensor that fails."""
        problems = [f.problem for f in self.findings(results) if f.problem]
        assert not problems, "\n".join(problems)

    def catches(self, name: str, x: Tensor, factor: float = 1.01) -> bool | None:
        """Whether this result times ``factor`` would fail: the test of the test. None: the truth is zero, or would
        be."""
        if self.vanishes[name]:
            return None
        scaled = (x.to(self.device).double() * factor).to(x.dtype)
        return self.judge(name, scaled).problem is not None


def assert_accurate(inputs: Inputs, backend: str, lse: bool = True) -> None:
    """Run one call on a backend and require both rules of every tensor; AssertionError names those that fail."""
    results = evaluate(inputs, backend, lse=lse)
    if inputs.has_gradients and backend not in PLAIN:
        check_alone(inputs, backend, results, lse)
    Judge(inputs, backend not in PLAIN).require(results)


def _into(name: str, slot: Tensor, part: Tensor) -> None:
    """Store a block's part of a result in its place."""
    if name in SUMMED:
        slot.add_(part)
    else:
        slot.copy_(part)


def _unit(dtype: torch.dtype) -> float:
    """Unit roundoff."""
    return torch.finfo(dtype).eps / 2


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, x.shape, generator=generator, device=x.device).to(x.dtype) * 2 - 1


def _numbers(*scalars: Tensor) -> list[float]:
    """fp64 tensors of one element as numbers, with one wait for their device."""
    return torch.stack(scalars).tolist()


def _error(x: Tensor, truth: Tensor) -> Tensor:
    return (finite(x.double()) - finite(truth)).abs()
