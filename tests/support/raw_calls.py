"""Calls of the raw CUDA ops, held to one generation, against attention and its gradients in fp64.

For what the public functions cannot ask, and for sizes that a :class:`flashsci.testing.Judge` could not hold: an lse that is
given, gradients that nobody wants, packed rows of no sequence, strides of a bias. 16-bit kernels; a test collects what it
finds in :class:`Findings`, so that one run shows every case that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashsci.backends import cuda as backend
from flashsci.call import ops
from flashsci.testing import embed, poisoned_memory

DEVICE = "cuda"
WINDOWS = [((-1, -1), False), ((-1, 0), False), ((-1, 0), True), ((100, 0), False),
           ((37, 50), True), ((-1, 300), False), ((64, -1), False)]  # fmt: skip
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DIMS = {"sm90": (64, 96, 128, 192, 256), "sm80": (64, 96, 128, 192, 256), "sm75": (64, 128)}
# (generation, dtype, head dim), one of each bucket
CELLS = [(g, t, d) for g, dims in DIMS.items() for t in HALVES for d in dims if (g, t) != ("sm75", "bf16")]
ALL = ops.NEED_Q | ops.NEED_K | ops.NEED_V | ops.NEED_BIAS
LABELS = ("dq", "dk", "dv", "dbias")
Sizes = tuple[int, ...]  # batch, heads_q, heads_k, seq_q, seq_k
_seed = 0


def unavailable(generation: str, dtype: str) -> str | None:
    """Why this machine cannot run a generation's kernels of a dtype ("bf16"), or None."""
    reason = backend.unavailable()
    if reason is not None:
        return reason
    built = (backend.build_info() or {}).get("units", {})
    if not any(u.startswith(f"cuda/{generation}/") and u.endswith(dtype) for u in built):
        return f"this build has no {dtype} kernels of {generation}"
    major, minor = torch.cuda.get_device_capability()
    if major != 9 if generation == "sm90" else 10 * major + minor < int(generation[2:]):
        return f"{generation} does not run on {torch.cuda.get_device_name()}"
    return None


def require(generation: str, dtype: str) -> None:
    """A generation that this machine lacks is a reason to skip, never a pass."""
    reason = unavailable(generation, dtype)
    if reason is not None:
        pytest.skip(f"{generation}: {reason}")


def make(shape: Iterable[int], dtype: torch.dtype, layout: str = "bhsd", size: float = 1.0) -> Tensor:
    """Normal numbers, other ones at every call, in the middle of NaN; layout "bshd": heads inside rows."""
    global _seed
    _seed += 1
    x = torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(_seed))
    rank = x.dim()
    order = (*range(rank - 3), rank - 2, rank - 3, rank - 1) if layout == "bshd" else None
    return embed((x * size).to(dtype), order)


# --- the formulas -------------------------------------------------------------------------------


def _scores(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    lower_right: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores after softcap; and with bias, mask and window."""
    capped = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        capped = softcap * torch.tanh(capped / softcap)
    s = capped if bias is None else capped + bias
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    i = torch.arange(s.shape[-2], device=s.device)[:, None]
    j = torch.arange(s.shape[-1], device=s.device)[None, :]
    rel = j - i - (s.shape[-1] - s.shape[-2] if lower_right else 0)
    seen = torch.ones_like(rel, dtype=torch.bool)
    if window[0] >= 0:
        seen &= rel >= -window[0]
    if window[1] >= 0:
        seen &= rel <= window[1]
    return capped, s.masked_fill(~seen, float("-inf"))


def attention(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, Tensor]:
    """out, lse of the options of a call, in this dtype."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    _, s = _scores(q, k, **options)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return p.to(dtype) @ v, torch.logsumexp(s, -1)


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dtype: torch.dtype,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """dq, dk, dv, and dbias of a bias, of the formulas in this dtype; and of their absolute values (a floor for errors)."""
    group = q.shape[-3] // k.shape[-3]
    q, k, v, dout, out = (x.to(dtype) for x in (q, k, v, dout, out))
    kk, vv = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    capped, s = _scores(q, kk, **options)
    p = torch.exp(s.to(lse.dtype) - lse[..., None]).nan_to_num(0.0, posinf=0.0)
    p = torch.where(lse[..., None] == float("-inf"), 0.0, p).to(dtype)
    dp = dout @ vv.transpose(-1, -2)
    delta = (dout * out).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None].to(dtype)
    softcap, scale = options.get("softcap"), options.get("scale")
    slope = 1 - (capped / softcap) ** 2 if softcap else 1.0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = options.get("bias")

    def fold(x: Tensor) -> Tensor:
        return x.unflatten(-3, (k.shape[-3], group)).sum(-3)

    def products(ds: Tensor, q: Tensor, kk: Tensor, dout: Tensor) -> list[Tensor]:
        found = [
            scale * (ds @ kk),
            fold(scale * (ds.transpose(-1, -2) @ q)),
            fold(p.transpose(-1, -2) @ dout),
        ]
        return found if bias is None else [*found, ds.sum_to_size(bias.shape)]

    of_sizes = p * (dp.abs() + delta.abs()) * slope
    return (
        products(p * (dp - delta) * slope, q, kk, dout),
        products(of_sizes, q.abs(), kk.abs(), dout.abs()),
    )


def _bound(baseline: Tensor, expected: Tensor, size: float) -> float:
    """The two-error rule: twice plain PyTorch's error in the same dtype, plus 8 roundings of a size."""
    error = (baseline.double() - expected).abs().nan_to_num(0.0).max().item()
    return 2 * error + 8 * torch.finfo(baseline.dtype).eps * size


# --- calls --------------------------------------------------------------------------------------


def op(name: str) -> Any:
    return getattr(torch.ops.flashsci, name).default


class Findings:
    """What is wrong with the calls of one test; `done` fails with all of it."""

    def __init__(self, generation: str):
        self.generation = int(generation[2:])
        self.problems: list[str] = []

    def done(self) -> None:
        assert not self.problems, "\n".join(self.problems)

    def fail(self, name: str, what: str) -> None:
        self.problems.append(f"{name}: {what}")

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """Its results, with memory that starts as NaN; None after a failure."""
        try:
            with poisoned_memory(cuda_bytes=0):
                found = call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            return found
        except torch.AcceleratorError:  # nothing else can run after it
            raise
        except RuntimeError as error:
            self.fail(name, str(error).split("\n")[0])

    def refused(self, name: str, call: Callable[[], Any]) -> None:
        """The generation leaves the call to an older one."""
        try:
            call()
        except RuntimeError as error:
            if "serves this call" not in str(error):
                self.fail(name, str(error))
        else:
            self.fail(name, "not refused")

    def judge(
        self, name: str, label: str, found: Tensor, want: Tensor, base: Tensor, largest: float, norm: float
    ) -> None:
        """One tensor by the two-error rule, and by the part of its error that rescales it.

        largest, norm: largest value and Euclidean norm of the formula on absolute values.
        """
        eps, error = torch.finfo(base.dtype).eps, found.double() - want
        # fp32 results of 16-bit inputs: nothing in their way is rounded to 16 bits.
        bound = _bound(base, want, largest) if found.dtype == base.dtype else 2**-13 * largest
        away = error.abs()
        if not away.max().item() <= bound + 1e-30:
            bad = (~(away <= bound + 1e-30)).nonzero()
            places = f"first at {bad[0].tolist()}, last at {bad[-1].tolist()}"
            what = f"error {away.max().item():.2e} > {bound:.2e}, {len(bad)} of {found.numel()} cells"
            return self.fail(name, f"{label} {what}, {places}")
        square = want.square().sum().item()
        if norm < 32 * square**0.5:  # else what is left after cancelling shows no factor
            gain, of_base = (((x.double() - want) * want).sum().item() / square for x in (found, base))
            allowed = 2 * abs(of_base) + 2 * eps
            if not abs(gain) <= allowed:
                self.fail(name, f"{label} is off by a factor 1 + {gain:.3g}, allowed {allowed:.3g}")

    def judge_forward(
        self, name: str, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> None:
        want, want_lse = attention(q, k, v, **options)
        base, _ = attention(q, k, v, q.dtype, **options)
        self.judge(name, "out", out, want, base, want.abs().max().item(), want.norm().item())
        finite = torch.isfinite(want_lse)
        error = (lse.double() - want_lse)[finite].abs().max().item() if finite.any() else 0.0
        if not torch.equal(torch.isfinite(lse), finite) or lse.isnan().any() or not error < 1e-3:
            self.fail(name, f"lse error {error:.1e}, or not finite in other rows")

    def judge_backward(self, name: str, got: Iterable[Tensor], arguments: tuple[Any, ...], **options: Any) -> None:
        """arguments: dout, q, k, v, out, lse, dlse."""
        wide = (None if x is None else x.double() for x in arguments)
        want, sizes = gradients(*wide, torch.float64, **options)
        base, _ = gradients(*arguments, arguments[1].dtype, **options)
        for label, g, w, b, size in zip(LABELS, got, want, base, sizes, strict=False):
            if g.numel():
                self.judge(name, label, g, w, b, size.max().item(), size.norm().item())

    def forward_op(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu: tuple[Tensor, Tensor] | None = None, **options: Any
    ) -> Callable[[], Any]:
        """What runs the forward: (out, lse)."""
        bias, mask, *scalars = _arguments(q, options)
        offsets = cu or (None, None)
        return lambda: op("cuda_forward")(q, k, v, bias, mask, *offsets, *scalars, False, self.generation)

    def backward_op(self, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
                    cu: tuple[Tensor, Tensor] | None = None, deterministic: bool = False, need: int = ALL, **options: Any) -> Callable[[], Any]:  # fmt: skip
        """What runs the backward: dq, dk, dv, dbias; those that are not needed are empty."""
        bias, mask, *scalars = _arguments(q, options)
        offsets = cu or (None, None)
        return lambda: op("cuda_backward")(
            dout, dlse, q, k, v, bias, mask, *offsets, out, lse, *scalars, False, deterministic, self.generation, need,
        )  # fmt: skip

    def forward(self, name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        """One call, run and judged."""
        name = f"{name} {' '.join(str(tuple(x.shape)) for x in (q, k, v))} {_shown(options)}"
        found = self.run(name, self.forward_op(q, k, v, **options))
        if found is not None:
            self.judge_forward(name, *found, q, k, v, **options)

    def backward(self, name: str, sizes: Sizes, dtype: torch.dtype, dims: tuple[int, int], layout: str = "bshd", size: float = 1.0, extra: float = 0.0,
                 dlse: bool = False, no_dout: bool = False, need: int = ALL, deterministic: bool = False, refused: bool = False, **options: Any) -> None:  # fmt: skip
        """One call, run and judged; extra: what is added to the lse, as other keys would; size: of q and k."""
        b, h, hk, sq, sk = sizes
        d, dv = dims
        name = f"{name} {sizes} d{d}/{dv} {layout} size {size} extra {extra} dlse {dlse} need {need} {_shown(options)}"
        q, k = (make(shape, dtype, layout, size) for shape in ((b, h, sq, d), (b, hk, sk, d)))
        v, dout = (make(shape, dtype, layout) for shape in ((b, hk, sk, dv), (b, h, sq, dv)))
        out, lse = attention(q, k, v, **options)
        out, lse = out.to(dtype), (lse + extra).float()
        grad_lse = torch.randn_like(lse) if dlse else None
        call = self.backward_op(
            None if no_dout else dout, grad_lse, q, k, v, out, lse, need=need, deterministic=deterministic, **options
        )
        if refused:
            return self.refused(name, call)
        got = self.run(name, call)
        if got is not None:
            given = (dout * (not no_dout), q, k, v, out, lse, grad_lse)
            self.judge_backward(name, got, given, **options)

    def backward_with_bias(self, sizes: Sizes, dtype: torch.dtype, dims: tuple[int, int], *shape: int, bias_dtype: torch.dtype | None = None,
                           mask: Sizes | None = None, hidden: float = 0.0, pad: int = 0, **options: Any) -> None:  # fmt: skip
        """shape: whether the bias has a batch, heads, queries, keys; nothing: no bias. ``pad``: so much longer are the rows of its
        memory. ``hidden``: this share of it is -inf, and some rows are."""
        full = (sizes[0], sizes[1], sizes[3], sizes[4])
        if shape:
            *rows, keys = (n if has else 1 for n, has in zip(full, shape, strict=True))
            x = make((*rows, keys + pad), bias_dtype or dtype)
            x[..., keys:] = float("nan")
            options["bias"] = x = x[..., :keys]
            if hidden:
                x.masked_fill_(torch.rand(x.shape, device=x.device) < hidden, float("-inf"))
                x[..., :: max(x.shape[-2] // 5, 1), :] = float("-inf")
        if mask is not None:
            options["mask"] = torch.rand(mask, device=DEVICE) < 0.6
        self.backward(f"bias {shape} pad {pad}", sizes, dtype, dims, **options)

    def every_use_of_a_bias(
        self, sizes: Sizes, dtype: torch.dtype, dims: tuple[int, int], *shape: int, **options: Any
    ) -> None:
        """A broadcast of the bias: alone, with rows and keys hidden, without its gradient, alone wanted, and with a mask of keys."""
        given = sizes, dtype, dims, *shape
        self.backward_with_bias(*given, **options)
        self.backward_with_bias(*given, hidden=0.3, window=(-1, 0), lower_right=True, **options)
        for need in (ALL & ~ops.NEED_BIAS, ops.NEED_BIAS):
            self.backward_with_bias(*given, need=need, **options)
        self.backward_with_bias(*given, mask=(sizes[0], 1, 1, sizes[4]), **options)


def _arguments(q: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
    """bias, mask and the scalars of an op, up to lower_right."""
    scale = options.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = options.get("window", (-1, -1))
    return (
        options.get("bias"), options.get("mask"), -1, -1, scale, options.get("softcap", 0.0), *window,
        options.get("lower_right", False),
    )  # fmt: skip


def _shown(options: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in options.items()}
