"""How large an error may be: three criteria per tensor, all against the fp64 oracle and plain PyTorch in the same dtype.

Two-error rule: the largest error is at most twice that of plain PyTorch (the reference backend, TF32 off), plus a rounding floor
of 8 eps times the formula evaluated on absolute values. In a low precision that alone lets an output scaled by 1.01
through, or a forgotten key among a hundred. Two more criteria rest on a model of honest rounding in a fused
kernel: P, dS and every result are rounded once to the inputs' dtype, independently where their values differ (standard
deviations follow from derivatives of the formula by each rounding); all else is kept in fp32.

- Gain: of an error x - ref, <x - ref, ref> / <ref, ref> is the part that rescales the result. Independent roundings average
  out in it, a wrong scale does not.
- Spread: the Euclidean norm of the error. Many small roundings stay small in it, a missing term in every row does not.

Both may be twice plain PyTorch's, plus five standard deviations, plus what fp32 sums can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashsci.testing.cases import Inputs
from flashsci.testing.second_order import SECOND_ORDER, Sized, second_order

TENSORS = ("out", "lse", "dq", "dk", "dv", "dbias", *SECOND_ORDER)
BASELINE_FACTOR = 2.0  # error allowed, in errors of plain PyTorch
FLOOR_ROUNDINGS = 16.0  # plus so many roundings (8 eps) of the largest absolute-value sum
# Gain and spread allowed for sums in fp32, whose roundings may all point one way: tensor cores
# truncate, and 3xTF32 takes three chains of products (measured on an H200, D 128: up to 2.1).
SUM_ROUNDINGS = 4.0
PROBES = 8  # random directions that measure the norm of independent roundings
SIGMAS = 5.0  # gain and spread allowed beyond the baseline's, in standard deviations of independent roundings
UNIFORM = 3.0**-0.5  # standard deviation of a uniform error between -1 and 1


def evaluate(
    inputs: Inputs, backend: str = "auto", lse: bool = True, **options: Any
) -> dict[str, Tensor]:
    """out, lse and the gradients of one call, by name (see TENSORS), with the backend asked for and never another.

    Args:
        inputs: dense or packed; ``dout`` None: forward alone; with tangents: the second order, too.
        backend: as in :func:`flashsci.attention`.
        lse: whether to ask for the lse where ``dlse`` does not (the sdpa backend has none).
        options: replace options of ``inputs``.

    Raises:
        BackendError: the backend cannot serve the call.
    """
    import flashsci

    lse = lse or inputs.dlse is not None
    leaves = {
        n: getattr(inputs, n).detach().requires_grad_(inputs.dout is not None)
        for n in ("q", "k", "v")
    }
    if inputs.bias is not None:
        leaves["bias"] = inputs.bias.detach().requires_grad_(
            inputs.dout is not None and inputs.bias_grad
        )
    arguments = dict(inputs.options, bias=leaves.get("bias"), return_lse=lse, backend=backend)
    if inputs.dropout_seed is not None:
        arguments["dropout_seed"] = inputs.dropout_seed
    arguments.update(options)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        given = dict(arguments, bias=bias)
        with flashsci.use_backend(backend, strict=True):
            if inputs.cu_seqlens_q is not None:
                result = flashsci.varlen_attention(
                    q, k, v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, **given
                )
            else:
                result = flashsci.attention(q, k, v, mask=inputs.mask, **given)
        return result if lse else (result,)

    tensors = [leaves.get(n) for n in ("q", "k", "v", "bias")]
    found = dict(zip(("out", "lse"), call(*tensors), strict=False))
    if inputs.dout is not None:
        wanted = {f"d{n}": x for n, x in leaves.items() if x.requires_grad}
        dout, dlse = inputs.dout, inputs.dlse
        ends, cotangents = [found["out"]], [dout]
        if dlse is not None:
            dlse = dlse.to(found["lse"].dtype)
            ends.append(found["lse"])
            cotangents.append(dlse)
        if not inputs.tangents:
            gradients = torch.autograd.grad(ends, list(wanted.values()), cotangents)
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


def _second_order(
    inputs: Inputs, leaves: dict[str, Tensor], found: dict[str, Tensor], cotangents: list[Tensor]
) -> dict[str, Tensor]:
    """Gradients of <tangents, first gradients> by what can have one."""
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
        for name, x in zip(("tq", "tk", "tv", "tbias"), tensors, strict=True):
            tangent = inputs.tangents.get(name)
            x = None if x is None else x.detach()
            if x is not None and tangent is not None:
                # torch lays a tangent out like its tensor, and cannot in expanded memory.
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
    """What was found of one tensor. ``problem`` says what is wrong, None when nothing is."""

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
        """Largest error, gain and spread over what is allowed of each; above 1 is a failure."""
        pairs = (
            (self.error, self.allowed),
            (self.gain, self.gain_allowed),
            (self.spread, self.spread_allowed),
        )
        return tuple(found / most if most else float(found > 0) for found, most in pairs)  # type: ignore[return-value]


class Judge:
    """Truth, baseline and allowances of one call; then judges any number of results for it.

    Args:
        inputs: the call, on any device, in any dtype (fp64 is compared with the oracle at fp64 rounding).

    Raises:
        AssertionError: the oracle (reference backend in fp64) and the formula written here disagree.

    Example:
        >>> import torch
        >>> from flashsci.testing import Inputs, Judge, evaluate
        >>> q, k, v, dout = torch.randn(4, 1, 2, 8, 16).bfloat16()
        >>> judge = Judge(Inputs(q, k, v, dout=dout))
        >>> judge.require(evaluate(judge.inputs, "sdpa", lse=False))
    """

    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        with exact_matmul():
            self.truth = evaluate(inputs.to(torch.float64), "reference")
            # Contiguous: torch's bf16 products on the CPU read past strided rows of one element.
            self.baseline = evaluate(inputs.to(None), "reference")
            if not all(self._same_finite(n, x) for n, x in self.baseline.items()):
                wide = evaluate(inputs.to(torch.float32), "reference")
                self.baseline = {n: wide[n].to(x.dtype) for n, x in self.baseline.items()}
        self._allowances()

    def _allowances(self) -> None:
        dtype = self.inputs.q.dtype
        unit, internal = _unit(dtype), min(_unit(dtype), _unit(torch.float32))
        if self.inputs.options.get("precision") == "tf32":
            unit = internal = 2.0**-11
        bias_unit = unit if self.inputs.bias is None else min(unit, _unit(self.inputs.bias.dtype))
        value = {
            n: torch.full_like(x, -torch.inf if n == "lse" else 0.0) for n, x in self.truth.items()
        }
        coarse, fine = ({n: torch.zeros_like(x) for n, x in self.truth.items()} for _ in range(2))
        generator = torch.Generator(self.inputs.q.device).manual_seed(0)
        directions = {
            n: torch.stack([_finite(x), *(_signs(x, generator) for _ in range(PROBES))])
            for n, x in self.truth.items()
        }
        variances = {
            n: torch.zeros(1 + PROBES, dtype=torch.float64, device=x.device)
            for n, x in self.truth.items()
        }
        for block in _blocks(self.inputs.to(torch.float64)):
            formula = _Formula(block, unit, internal, torch.finfo(dtype).smallest_normal, bias_unit)
            for name in self.truth:
                for whole, part in (
                    (value, formula.values),
                    (coarse, formula.coarse),
                    (fine, formula.fine),
                ):
                    block.slot(name, whole[name]).copy_(part[name].detach())
                variances[name] += formula.variances(
                    name, torch.stack([block.slot(name, x) for x in directions[name]])
                )
        self.floor, self.gain_floor, self.spread_floor, self.vanishes = {}, {}, {}, {}
        for name, truth in self.truth.items():
            size = unit * coarse[name] + internal * fine[name]
            self.floor[name] = FLOOR_ROUNDINGS * size.max().item() if size.numel() else 0.0
            # Sums in fp32 do not round independently: what they can do adds up.
            sums = internal * fine[name]
            square = _finite(truth).square().sum().item()
            along, across = (
                variances[name][0].sqrt().item(),
                variances[name][1:].mean().sqrt().item(),
            )
            gain = SIGMAS * along + SUM_ROUNDINGS * (sums * _finite(truth).abs()).sum().item()
            self.gain_floor[name] = gain / square if square else 0.0
            self.vanishes[name] = square**0.5 <= 2.0**-40 * fine[name].norm().item()
            self.spread_floor[name] = SIGMAS * across + SUM_ROUNDINGS * sums.norm().item()
            # The oracle is checked against the formula of this file, which shares no code with it.
            difference, limit = (
                _largest(value[name], truth),
                self.floor[name] * (_unit(torch.float64) / internal),
            )
            assert difference <= max(limit, 1e-280), (
                f"the reference in fp64 and the formula disagree on {name} by {difference:.3g} (limit {limit:.3g})"
            )

    def _same_finite(self, name: str, x: Tensor) -> bool:
        return torch.equal(torch.isfinite(x), torch.isfinite(self.truth[name]))

    def gain(self, name: str, x: Tensor) -> float:
        """<x - ref, ref> / <ref, ref>: by what factor, minus one, x is too large. 0 when ref is zero."""
        truth = _finite(self.truth[name])
        square = truth.square().sum().item()
        return ((_finite(x.double()) - truth) * truth).sum().item() / square if square else 0.0

    def judge(self, name: str, x: Tensor) -> Finding:
        """One tensor of one result."""
        truth, baseline = self.truth[name], self.baseline[name]
        if x.shape != truth.shape or x.dtype != baseline.dtype:
            return Finding(
                name,
                problem=f"{name} is {x.dtype} {list(x.shape)}, must be {baseline.dtype} {list(truth.shape)}",
            )
        wrong = torch.isfinite(x) != torch.isfinite(truth)
        wrong |= ~torch.isfinite(truth) & (x != truth)
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            return Finding(
                name,
                error=float("inf"),
                problem=f"{name}: {int(wrong.sum())} of {x.numel()} values are "
                f"{x[first].item()} or the like where {truth[first].item():.3g} is due, first at {first}",
            )
        base = _largest(baseline, truth)
        found = Finding(
            name,
            error=_largest(x, truth),
            allowed=BASELINE_FACTOR * base + self.floor[name],
            baseline=base,
            gain=abs(self.gain(name, x)),
            gain_allowed=BASELINE_FACTOR * abs(self.gain(name, baseline)) + self.gain_floor[name],
            spread=_norm(x, truth),
            spread_allowed=BASELINE_FACTOR * _norm(baseline, truth) + self.spread_floor[name],
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
        """Two results against each other: they may differ by what one may differ from the truth."""
        allowed = (
            BASELINE_FACTOR * _largest(self.baseline[name], self.truth[name]) + self.floor[name]
        )
        found = Finding(name, error=_largest(x, y.double()), allowed=allowed)
        if torch.equal(torch.isfinite(x), torch.isfinite(y)) and found.error <= allowed:
            return found
        return replace(
            found, problem=f"{name}: two backends differ by {found.error:.3g} > {allowed:.3g}"
        )

    def findings(self, results: dict[str, Tensor]) -> list[Finding]:
        """All tensors of one result (those it has)."""
        return [self.judge(name, x) for name, x in results.items()]

    def require(self, results: dict[str, Tensor]) -> None:
        """Raise AssertionError, naming every tensor that fails."""
        problems = [f.problem for f in self.findings(results) if f.problem]
        assert not problems, "\n".join(problems)

    def catches(self, name: str, x: Tensor, factor: float = 1.01) -> bool | None:
        """Whether this result times ``factor`` would fail: the test of the test. None: the truth is zero, or would be."""
        if self.vanishes[name]:
            return None
        return self.judge(name, (x.double() * factor).to(x.dtype)).problem is not None


def assert_accurate(inputs: Inputs, backend: str, lse: bool = True) -> None:
    """Run one call on a backend and require both rules of every tensor; AssertionError names those that fail."""
    Judge(inputs).require(evaluate(inputs, backend, lse=lse))


def _unit(dtype: torch.dtype) -> float:
    """Unit roundoff."""
    return torch.finfo(dtype).eps / 2


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, x.shape, generator=generator, device=x.device).to(x.dtype) * 2 - 1


def _norm(x: Tensor, truth: Tensor) -> float:
    return (_finite(x.double()) - _finite(truth)).norm().item()


def _largest(x: Tensor, truth: Tensor) -> float:
    return (_finite(x.double()) - _finite(truth)).abs().max().item() if x.numel() else 0.0


@dataclass
class _Block:
    """One dense attention problem in fp64: the whole call, or one packed sequence.

    q [*, Hq, Sq, D], k [*, Hk, Sk, D], v [*, Hk, Sk, Dv], dout as out, dlse [*, Hq, Sq]; bias, visible and keep
    (dropout, already divided by 1 - p) broadcast to the scores [*, Hq, Sq, Sk].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    dlse: Tensor | None
    bias: Tensor | None
    visible: Tensor
    keep: Tensor
    scale: float
    softcap: float | None
    place: dict[str, Any]  # tensor name -> how its slice of a whole result looks like this block's
    tangents: dict[str, Tensor]  # "tq", "tk", "tv", "tbias" in the shapes of q, k, v, bias

    def slot(self, name: str, whole: Tensor) -> Tensor:
        """This block's part of a result, a view of it."""
        return self.place[name](whole)


def _visible(seq_q: int, seq_k: int, options: dict[str, Any], device: torch.device) -> Tensor:
    """Bool [Sq, Sk] of causal, window and align."""
    left, right = options.get("window") or (None, None)
    if options.get("causal"):
        right = 0 if right is None else min(right, 0)
    shift = seq_k - seq_q if options.get("align") == "lower_right" else 0
    ahead = (
        torch.arange(seq_k, device=device)[None, :]
        - torch.arange(seq_q, device=device)[:, None]
        - shift
    )
    low = float("-inf") if left is None else -left
    return (ahead >= low) & (ahead <= (float("inf") if right is None else right))


# What the tensors of the second order look like.
_LIKE = {"gq": "dq", "gk": "dk", "gv": "dv", "gbias": "dbias", "gdout": "out", "gdlse": "lse", "tout": "out",
         "tlse": "lse", "tq": "dq", "tk": "dk", "tv": "dv", "tbias": "dbias"}  # fmt: skip


def _places(first: dict[str, Any]) -> dict[str, Any]:
    return first | {name: first[like] for name, like in _LIKE.items()}


def _blocks(inputs: Inputs) -> Iterator[_Block]:
    """The dense problems of a call in fp64."""
    from flashsci import dropout_mask

    options = inputs.options
    p = options.get("dropout_p", 0.0)
    scale = options.get("scale")
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale

    def keep(shape: tuple[int, ...], index: int) -> Tensor:
        if not p:
            return inputs.q.new_ones(())
        assert inputs.dropout_seed is not None
        return dropout_mask(inputs.dropout_seed, p, shape, batch_offset=index).double() / (1 - p)

    if inputs.cu_seqlens_q is None:
        heads = (lambda x: x[None]) if inputs.q.dim() == 2 else (lambda x: x)
        q, k, v = heads(inputs.q), heads(inputs.k), heads(inputs.v)
        shape = (*q.shape[:-1], k.shape[-2])
        full = lambda x: x.reshape((1,) * (len(shape) - x.dim()) + x.shape)  # noqa: E731
        visible = _visible(shape[-2], shape[-1], options, q.device)
        visible = visible if inputs.mask is None else visible & full(inputs.mask)
        place = _places(dict.fromkeys(("out", "lse", "dq", "dk", "dv"), heads) | {"dbias": full})
        yield _Block(
            q,
            k,
            v,
            None if inputs.dout is None else heads(inputs.dout),
            None if inputs.dlse is None else heads(inputs.dlse),
            None if inputs.bias is None else full(inputs.bias),
            visible,
            keep(shape, 0),
            scale,
            options.get("softcap"),
            place,
            {name: place[name](x) for name, x in inputs.tangents.items()},
        )
        return
    starts_q = inputs.cu_seqlens_q.tolist()
    starts_k = starts_q if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k.tolist()
    per_key = inputs.bias is not None and (
        inputs.bias.dim() == 3 or inputs.bias.shape[1] == starts_k[-1]
    )
    offset = 0
    for n in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        size = rows.stop - rows.start, keys.stop - keys.start
        pairs = slice(offset, offset := offset + size[0] * size[1])

        def rows_of(x: Tensor, rows: slice = rows) -> Tensor:
            return x[rows].transpose(0, 1)

        def keys_of(x: Tensor, keys: slice = keys) -> Tensor:
            return x[keys].transpose(0, 1)

        def bias_of(
            x: Tensor, keys: slice = keys, pairs: slice = pairs, size: tuple[int, int] = size
        ) -> Tensor:
            return x.view(len(x), 1, -1)[..., keys] if per_key else x[:, pairs].unflatten(-1, size)

        def lse_of(x: Tensor, rows: slice = rows) -> Tensor:
            return x[:, rows]

        place = _places(
            {"out": rows_of, "lse": lse_of, "dq": rows_of, "dk": keys_of, "dv": keys_of, "dbias": bias_of}
        )  # fmt: skip
        yield _Block(
            rows_of(inputs.q),
            keys_of(inputs.k),
            keys_of(inputs.v),
            None if inputs.dout is None else rows_of(inputs.dout),
            None if inputs.dlse is None else lse_of(inputs.dlse),
            None if inputs.bias is None else bias_of(inputs.bias),
            _visible(*size, options, inputs.q.device),
            keep((inputs.q.shape[1], *size), n),
            scale,
            options.get("softcap"),
            place,
            {name: place[name](x) for name, x in inputs.tangents.items()},
        )


class _Formula:
    """Attention and its gradients in fp64, with what the roundings of a fused kernel can do to them.

    ``values[name]`` is the result, ``coarse[name]`` its formula on absolute values and ``fine[name]`` the same for the
    parts that kernels keep in fp32 (scores, statistics), all in the shape of the block's slot; errors of one rounding
    are at most ``unit * coarse + internal * fine``. ``tiny`` is the smallest normal number: nothing rounds better.
    """

    def __init__(self, b: _Block, unit: float, internal: float, tiny: float, bias_unit: float):
        self.unit = unit
        self.leaves: list[tuple[Tensor, Tensor]] = []  # (perturbation, group of equal roundings)
        groups = b.q.shape[-3] // b.k.shape[-3]
        per_query = lambda x: x.repeat_interleave(groups, -3)  # noqa: E731
        per_key = lambda x: x.unflatten(-3, (-1, groups)).sum(-3) if groups > 1 else x  # noqa: E731
        turn = lambda x: x.transpose(-1, -2)  # noqa: E731
        row = lambda x: x.sum(-1, keepdim=True)  # noqa: E731
        k, v = per_query(b.k), per_query(b.v)
        q_abs, k_abs, v_abs, scale_abs = b.q.abs(), k.abs(), v.abs(), abs(b.scale)
        zero = b.q.new_zeros(())

        # Scores, their statistics and their softmax.
        raw_abs = scale_abs * (q_abs @ turn(k_abs))
        raw = b.scale * (b.q @ turn(k))
        tanh = torch.tanh(raw / b.softcap) if b.softcap else None
        capped = raw if tanh is None else b.softcap * tanh
        bias = torch.zeros_like(raw_abs) if b.bias is None else b.bias.expand(raw.shape)
        visible = b.visible.expand(raw.shape) & (bias > -torch.inf)
        bias = torch.where(visible, bias, zero)
        scores = capped + bias
        empty = ~visible.any(-1, keepdim=True)
        top = torch.where(visible, scores, -torch.inf).detach()
        top = top.amax(-1, keepdim=True) if top.shape[-1] else raw_abs.new_zeros(*top.shape[:-1], 1)
        top = torch.where(empty, zero, top)
        weights = torch.where(visible, torch.exp(torch.where(visible, scores - top, zero)), zero)
        total = torch.where(empty, zero + 1, row(weights))
        lse = self.rounded(torch.log(total) + top, internal)
        p = weights / total
        scores_abs = torch.where(
            visible, raw_abs + capped.abs() + bias.abs() + scores.abs() + lse.abs(), zero
        )
        p_fine = p * (scores_abs + row(p * scores_abs))
        p_abs = p + tiny * visible
        pr, pr_abs, pr_fine = self.rounded(p * b.keep), p_abs * b.keep, p_fine * b.keep
        out_abs, out_fine = pr_abs @ v_abs, pr_fine @ v_abs
        out = self.rounded(pr @ v)
        self.values = {"out": out, "lse": torch.where(empty, -torch.inf, lse).squeeze(-1)}
        self.coarse = {"out": out_abs, "lse": zero.expand(lse.shape[:-1])}
        self.fine = {
            "out": out_abs + out_fine,
            "lse": (row(p * scores_abs) + lse.abs()).squeeze(-1),
        }
        if b.dout is None:
            return

        # First backward, from P recomputed with the stored lse: E = dS = P o (R o (G V^T) - delta + g).
        p = torch.where(visible, torch.exp(torch.where(visible, scores - lse, zero)), zero)
        pr = self.rounded(p * b.keep)
        g_abs = b.dout.abs()
        dlse = zero if b.dlse is None else b.dlse[..., None]
        dp_abs = b.keep * (g_abs @ turn(v_abs))
        dp = b.keep * (b.dout @ turn(v))
        delta_abs = row(g_abs * out_abs) + dlse.abs()
        delta = row(b.dout * out) - dlse
        e = p * (dp - delta)
        e_abs = p * (dp_abs + delta_abs) + tiny * visible
        e_fine = e_abs + p_fine * (dp_abs + delta_abs) + p * row(g_abs * out_fine)
        da, da_abs, da_fine = e, e_abs, e_fine
        if tanh is not None:
            slope = 1 - tanh * tanh
            da = e * slope
            da_abs = e_abs * slope
            da_fine = e_fine * slope + e_abs * (
                2 * tanh * tanh + 2 * tanh.abs() * raw_abs / b.softcap
            )
        da = self.rounded(da)
        dq = [scale * (x @ y) for scale, x, y in _terms(b.scale, (da, da_abs, da_fine), k, k_abs)]
        dk = [
            per_key(scale * (turn(x) @ y))
            for scale, x, y in _terms(b.scale, (da, da_abs, da_fine), b.q, q_abs)
        ]
        dv = [
            per_key(turn(x) @ y)
            for _, x, y in _terms(1.0, (pr, pr_abs, pr_abs + pr_fine), b.dout, g_abs)
        ]
        dbias = [] if b.bias is None else [x.sum_to_size(b.bias.shape) for x in (e, e_abs, e_fine)]
        for name, found in (("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dbias)):
            if found:
                value, self.coarse[name], self.fine[name] = found
                self.values[name] = self.rounded(value, bias_unit if name == "dbias" else unit)
        if b.tangents:
            exact = lambda x: Sized(x, x.abs(), torch.zeros_like(x))  # noqa: E731
            slope = bend = None
            if tanh is not None:
                slope = Sized(
                    1 - tanh * tanh,
                    1 - tanh * tanh,
                    2 * tanh * tanh + 2 * tanh.abs() * raw_abs / b.softcap,
                )
                bend = Sized.bend(tanh, raw_abs, b.softcap)
            found = second_order(
                {n: exact(per_query(x) if n in ("tk", "tv") else x) for n, x in b.tangents.items()},
                exact(b.q), exact(k), exact(v), exact(b.dout), Sized(p, p_abs, p_fine), exact(b.keep), b.scale, slope, bend,
                Sized(dp, dp_abs, dp_abs), Sized(delta, delta_abs, row(g_abs * out_fine) + delta_abs), self.rounded,
            )  # fmt: skip
            for name, x in found.items():
                if name in ("gk", "gv"):
                    x = x.map(per_key)
                elif name == "gbias":
                    if b.bias is None:
                        continue
                    x = x.map(lambda y: y.sum_to_size(b.bias.shape))
                self.coarse[name], self.fine[name] = x.coarse, x.fine
                last = {"gbias": bias_unit, "gdlse": internal, "tlse": internal}.get(name, unit)
                self.values[name] = self.rounded(x.value, last)

    def rounded(self, x: Tensor, unit: float | None = None) -> Tensor:
        """x with a perturbation, zero, that stands for its rounding to the precision ``unit``.

        Equal mantissas round equally, so they share a group; values that ``unit`` represents do not round at all.
        """
        unit = self.unit if unit is None else unit
        mantissa = torch.frexp(x.detach().abs()).mantissa
        key = torch.round(mantissa * (2**16 / unit))
        _, group = torch.unique(key, return_inverse=True)
        exact = key % 2**15 == 0
        leaf = torch.zeros_like(x, requires_grad=True)
        self.leaves.append((leaf, group))
        return x + leaf * torch.where(exact, 0.0, x.detach() * (unit * UNIFORM))

    def variances(self, name: str, directions: Tensor) -> Tensor:
        """Variance of <result, direction> for each of [n, *] directions, when groups of equal values round independently."""
        value, found = self.values[name], directions.new_zeros(directions.shape[0])
        if not value.numel():
            return found
        leaves = [leaf for leaf, _ in self.leaves]
        changes = torch.autograd.grad(
            _finite(value),
            leaves,
            directions,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        for change, (_, group) in zip(changes, self.leaves, strict=True):
            if change is not None and group.numel():
                sums = change.new_zeros(len(change), int(group.max()) + 1)
                found += sums.index_add_(1, group.flatten(), change.flatten(1)).square().sum(1)
        return found


def _terms(
    scale: float, sizes: tuple[Tensor, Tensor, Tensor], y: Tensor, y_abs: Tensor
) -> list[tuple[Any, ...]]:
    """Factors of a product's value, of its absolute-value formula, and of the same for what is kept in fp32."""
    value, coarse, fine = sizes
    return [(scale, value, y), (abs(scale), coarse, y_abs), (abs(scale), fine, y_abs)]
