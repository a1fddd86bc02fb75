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
from flashsci.testing.formula import Formula, Rounding, finite
from flashsci.testing.inputs import Inputs, moved_to
from flashsci.testing.second_order import SECOND_ORDER

TENSORS = ("out", "lse", "scores", "dq", "dk", "dv", "dbias", "dkey_weight", "dsink", *SECOND_ORDER)
SUMMED = ("dsink", "gsink")  # summed over packed sequences
PLAIN = ("reference", "sdpa", "eager")  # backends that are plain PyTorch, with its own accuracy
LEAVES = ("q", "k", "v", "bias", "key_weight", "sink")
BASELINE_FACTOR = 2.0  # error allowed, in errors of plain PyTorch
FLOOR_ROUNDINGS = 16.0  # plus this many roundings (8 eps) of the largest absolute-value sum
# Gain and spread allowed for sums in fp32, whose roundings may all have one direction: tensor cores truncate, and
# 3xTF32 takes three chains of products (measured on an H200, D 128: up to 2.1).
SUM_ROUNDINGS = 4.0
PROBES = 8  # random directions that measure the norm of independent roundings
SIGMAS = 5.0  # gain and spread allowed beyond the baseline's, in standard deviations of independent roundings


def evaluate(
    inputs: Inputs, backend: str = "auto", lse: bool = True, **options: Any
) -> dict[str, Tensor]:
    """out, lse and the gradients of one call, by name (see TENSORS), by the backend asked for and never another.

    Args:
        inputs: dense or packed; ``dout`` None: forward alone; with tangents: the second order, too.
        backend: as in :func:`flashsci.attention`.
        lse: whether to ask for the lse even if there is no ``dlse`` (the sdpa backend has none).
        options: replace options of ``inputs``.

    Raises:
        BackendError: the backend cannot serve the call.
    """
    import flashsci

    lse = not inputs.residual and (lse or inputs.dlse is not None)
    learning = inputs.has_gradients
    leaves: dict[str, Tensor] = {
        n: getattr(inputs, n).detach().requires_grad_(learning) for n in ("q", "k", "v")
    }
    learnt_of = {"bias": inputs.bias_grad, "key_weight": inputs.key_weight_grad, "sink": True}
    for name, learnt in learnt_of.items():
        x = getattr(inputs, name)
        if x is not None:
            leaves[name] = x.detach().requires_grad_(learning and learnt)
    arguments: dict[str, Any] = dict(inputs.options, return_lse=lse, backend=backend)
    if inputs.dropout_seed is not None:
        arguments["dropout_seed"] = inputs.dropout_seed
    if inputs.alibi_slopes is not None:
        arguments["alibi_slopes"] = inputs.alibi_slopes
    arguments.update(options)
    if inputs.residual:
        names = ("scale", "dropout_p", "dropout_seed", "precision", "backend")
        arguments = {n: x for n, x in arguments.items() if n in names}

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        optional = dict(zip(LEAVES[3:], others, strict=True))
        given = arguments | {name: x for name, x in optional.items() if x is not None}
        with flashsci.use_backend(backend, strict=True):
            if inputs.residual:
                return flashsci.residual_attention(q, k, v, **given)
            if inputs.cu_seqlens_q is not None:
                result = flashsci.varlen_attention(
                    q, k, v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, **given
                )
            else:
                result = flashsci.attention(q, k, v, mask=inputs.mask, **given)
        return result if lse else (result,)

    tensors: list[Any] = [leaves.get(n) for n in LEAVES]
    second = "scores" if inputs.residual else "lse"
    with _saving(inputs.execution if learning else ""):
        found = dict(zip(("out", second), call(*tensors), strict=False))
    if learning:
        wanted = {f"d{n}": x for n, x in leaves.items() if x.requires_grad}
        dout, dlse = inputs.dout, inputs.dlse
        ends, cotangents = ([], []) if dout is None else ([found["out"]], [dout])
        if inputs.dscores is not None:
            ends.append(found["scores"])
            cotangents.append(inputs.dscores)
        if dlse is not None:
            dlse = dlse.to(found["lse"].dtype)
            ends.append(found["lse"])
            cotangents.append(dlse)
        if not inputs.tangents:
            # The gradient of scores alone does not reach v.
            batched = inputs.execution == "batched"
            if batched:
                cotangents = [torch.stack((-x, x)) for x in cotangents]
            gradients = torch.autograd.grad(
                ends,
                list(wanted.values()),
                cotangents,
                materialize_grads=inputs.residual,
                is_grads_batched=batched,
            )
            if batched:
                gradients = tuple(x[1] for x in gradients)
            found.update(zip(wanted, gradients, strict=True))
        else:
            cotangents = [x.detach().requires_grad_() for x in cotangents]
            gradients = torch.autograd.grad(
                ends, list(wanted.values()), cotangents, create_graph=True
            )
            found.update(zip(wanted, gradients, strict=True))
            found.update(_second_order(inputs, wanted, found, cotangents))
            found.update(_forward_mode(inputs, tensors, call))
    return {name: x.detach() for name, x in found.items()}


@contextmanager
def _saving(execution: str) -> Iterator[None]:
    """A context in which autograd's saved tensors come back as ``execution`` says."""
    if execution != "hooks":
        yield
        return

    def turned(x: Tensor) -> Tensor:
        return x if x.dim() < 2 else x.transpose(-1, -2).contiguous().transpose(-1, -2)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turned):
        yield


def check_alone(inputs: Inputs, backend: str, found: dict[str, Tensor], lse: bool = True) -> None:
    """Require the same bits from the same call without gradients, of tensors at other addresses.

    The values that are kept for repeated calls must not depend on the tensors that they were made for, and inference
    must use the same kernels.

    Args:
        inputs, backend, lse: as of :func:`evaluate`, which gave ``found`` with gradients.

    Raises:
        AssertionError: other bits.
    """
    alone = inputs.elsewhere().forward_alone()
    for name, x in evaluate(alone, backend, lse, deterministic=False).items():
        same = x.shape == found[name].shape and torch.equal(_bits(x), _bits(found[name]))
        assert same, f"{name}: other bits without gradients, or of tensors at other addresses"


def _bits(x: Tensor) -> Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def _second_order(
    inputs: Inputs, leaves: dict[str, Tensor], found: dict[str, Tensor], cotangents: list[Tensor]
) -> dict[str, Tensor]:
    """Gradients of <tangents, first gradients> by every tensor that can have one."""
    chosen = [
        (found[f"d{n[1:]}"], t.to(found[f"d{n[1:]}"].dtype)) for n, t in inputs.tangents.items()
    ]
    wanted = {f"g{n[1:]}": x for n, x in leaves.items()}
    wanted.update(zip(("gdout", "gdlse"), cotangents, strict=False))
    gradients = torch.autograd.grad(
        [x for x, _ in chosen], list(wanted.values()), [t for _, t in chosen], allow_unused=True
    )
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(wanted.items(), gradients, strict=True)
    }


def _forward_mode(inputs: Inputs, tensors: list[Tensor | None], call: Any) -> dict[str, Tensor]:
    """Tangents of out and lse."""
    from torch.autograd import forward_ad

    with torch.no_grad(), forward_ad.dual_level():
        duals = []
        for name, x in zip(LEAVES, tensors, strict=True):
            tangent = inputs.tangents.get(f"t{name}")
            x = None if x is None else x.detach()
            if x is not None and tangent is not None:
                # torch gives a tangent the layout of its tensor, and cannot do so in expanded memory.
                x = x.contiguous() if 0 in x.stride() else x
                x = forward_ad.make_dual(x, tangent.to(x.dtype))
            duals.append(x)
        results = dict(zip(("tout", "tlse"), call(*duals), strict=False))
        tangents = {name: (forward_ad.unpack_dual(x), x) for name, x in results.items()}
        return {
            name: torch.zeros_like(x) if pair.tangent is None else pair.tangent
            for name, (pair, x) in tangents.items()
        }


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

    def __init__(
        self, inputs: Inputs, fused: bool = True, device: torch.device | str | None = None
    ):
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

    def precisions(self) -> tuple[float, float, float, Rounding | None]:
        """Unit roundoff of results and of the values that kernels keep in fp32, the smallest normal result, and the
        rounding of P.

        The last is None if it is that of results.
        """
        dtype = self.inputs.q.dtype
        unit, internal = _unit(dtype), min(_unit(dtype), _unit(torch.float32))
        if self.inputs.options.get("precision") == "tf32":
            unit = internal = 2.0**-11
        return unit, internal, torch.finfo(dtype).smallest_normal, None

    def _allowances(self) -> None:
        dtype = self.inputs.q.dtype
        unit, internal, self.tiny, of_p = self.precisions()
        of_bias, of_weight, of_sink = (
            unit if x is None else min(unit, _unit(x.dtype))
            for x in (self.inputs.bias, self.inputs.key_weight, self.inputs.sink)
        )
        value = {
            n: torch.full_like(x, -torch.inf if n == "lse" else 0.0) for n, x in self.truth.items()
        }
        coarse, fine = ({n: torch.zeros_like(x) for n, x in self.truth.items()} for _ in range(2))
        generator = torch.Generator(self.inputs.q.device).manual_seed(0)
        directions = {
            n: torch.stack([finite(x), *(_signs(x, generator) for _ in range(PROBES))])
            for n, x in self.truth.items()
        }
        variances = {
            n: torch.zeros(1 + PROBES, dtype=torch.float64, device=x.device)
            for n, x in self.truth.items()
        }
        cells = {n: torch.zeros_like(x) for n, x in self.truth.items()}
        shift: dict[str, Any] = {}  # the rescaling by computed roundings, times <truth, truth>
        self.loose: dict[str, Tensor] = {}
        large = False
        # Fused kernels multiply fp32 in parts of TF32 (the last part is truncated): 3xTF32.
        in_parts = self.fused and dtype == torch.float32 and unit == internal == _unit(dtype)
        parts = Rounding(2.0**-10, self.tiny) if in_parts else None
        for block in blocks(self.inputs.to(torch.float64)):
            formula = Formula(
                block, unit, internal, self.tiny, of_bias, of_weight, of_sink, of_p, parts
            )
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
                variances[name] += formula.variances(
                    name, torch.stack([block.slot(name, x) for x in directions[name]])
                )
        if large and self.fused and dtype.itemsize == 2:
            # Scores in 16 bits make plain PyTorch itself wrong: its fp32 result, rounded, is the measure.
            self._wide_baseline()
        self.floor, self.gain_floor, self.spread_floor, self.vanishes = {}, {}, {}, {}
        self.zero: dict[str, Tensor] = {}  # where every term of a result is zero
        self.square: dict[str, float] = {}
        self.of_baseline: dict[str, tuple[float, float, float]] = {}
        for name, truth in self.truth.items():
            self.zero[name] = (coarse[name] + fine[name] == 0) & (truth == 0)
            if name in self.loose:
                self.zero[name] &= self.loose[name] == 0
            # No number is rounded better than to a subnormal number.
            least = self.tiny if truth.numel() and name not in ("lse", "gdlse", "tlse") else 0.0
            size = unit * (coarse[name] + least) + internal * fine[name]
            # Sums in fp32 do not round independently: their possible errors add up. Nor do subnormal numbers.
            sums = internal * fine[name]
            cell = unit * (cells[name] + least * (finite(truth).abs() < least))
            # One wait for the device, instead of one for each number.
            largest, square, along, across, sum_gain, fine_norm, sum_norm, moved, difference = (
                _numbers(
                    size.max() if size.numel() else size.sum(),
                    finite(truth).square().sum(),
                    variances[name][0].sqrt(),
                    variances[name][1:].mean().sqrt(),
                    ((SUM_ROUNDINGS * sums + cell) * finite(truth).abs()).sum(),
                    fine[name].norm(),
                    sums.norm(),
                    shift.get(name, variances[name].new_zeros(1)).abs().max(),
                    self._beyond(name, _error(value[name], truth)).max()
                    if truth.numel()
                    else truth.sum(),
                )
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
            self.spread_floor[name] = self.sigmas * across + SUM_ROUNDINGS * sum_norm
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
            problem = (
                f"{name}: off by a factor 1 ± {found.gain:.3g}, allowed {found.gain_allowed:.3g}"
            )
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
        return replace(
            found, problem=f"{name}: two backends differ by {found.error:.3g} > {allowed:.3g}"
        )

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
