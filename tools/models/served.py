"""flashsci as the patches call it, with an optional list of the backends that served each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import flashsci
from flashsci.call.ops import Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem
from flashsci.choice import backends, explanation
from flashsci.choice.gradients import gradients as kernels_of
from flashsci.choice.gradients import named

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}

_log: dict[str, dict] | None = None


@contextmanager
def listening() -> Iterator[dict[str, dict]]:
    """The calls made inside, equal ones as one: shapes and strides by argument, dtype, count, and the
    backends of forward and gradients.

    This costs more than a small call: steps are not timed inside.
    """
    global _log
    before, _log = _log, {}
    try:
        yield _log
    finally:
        _log = before


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """`flashsci.attention`."""
    if _log is None:
        return flashsci.attention(q, k, v, **options)
    note = _note(flashsci.explain(q, k, v, **options), q, k, v, options)
    return _followed(flashsci.attention(q, k, v, **options), note)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **options: Any) -> Tensor:
    """`flashsci.varlen_attention` of sequences with themselves."""
    if _log is None:
        return flashsci.varlen_attention(q, k, v, cu_seqlens_q, **options)
    found = flashsci.explain(q, k, v, cu_seqlens_q=cu_seqlens_q, **options)
    note = _note(found, q, k, v, {"sequences": cu_seqlens_q.numel() - 1, **options})
    return _followed(flashsci.varlen_attention(q, k, v, cu_seqlens_q, **options), note)


def residual_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`flashsci.residual_attention`."""
    if _log is None:
        return flashsci.residual_attention(q, k, v, bias, **options)
    note = _note(flashsci.explain(q, k, v, bias=bias, **options), q, k, v, {"bias": bias, **options})
    out, scores = flashsci.residual_attention(q, k, v, bias, **options)
    if "Residual" in type(scores.grad_fn).__name__:  # one operation with its own kernels
        note["forward"] = note["gradients"] = "triton"
    return _followed(out, note), scores


def _note(found: explanation.Explanation, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> dict:
    """The note of a call, entered in the log."""
    problem, chosen = found.problem, found.chosen
    given = {"q": q, "k": k, "v": v, **options}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    plain = {n: x for n, x in given.items() if n not in tensors and x not in (None, False, 0.0)}
    gradients = None
    if problem.requires_grad and chosen is not None:
        gradients = kernels_of(named(chosen), problem, _in_place(tensors, problem)).backend
    note = {
        "shapes": {name: list(x.shape) for name, x in tensors.items()},
        "strides": {name: list(x.stride()) for name, x in tensors.items()},
        "dtype": _NAMES[problem.dtype],
        "options": plain,
        "forward": chosen,
        "gradients": gradients,
    }
    assert _log is not None
    entry = _log.setdefault(repr(note), {**note, "count": 0})
    entry["count"] += 1
    return entry


def _in_place(tensors: dict[str, Tensor], problem: Problem) -> bool:
    """Whether Hopper's backward takes bias and mask in place, or after a copy that is made of them."""
    cuda = backends.BACKENDS["cuda"].load()
    with torch.no_grad():
        named = {n: tensors.get(n) for n in ("q", "k", "v", "bias", "key_weight", "mask")}
        given = Tensors(**named).inner_contiguous()
    wanted = (given.q, given.k, given.v, given.bias)
    need = sum(1 << i for i, x in enumerate(wanted) if x is not None)
    window = problem.window_left, problem.window_right
    scalars = Scalars(
        -1, -1, 1.0, problem.softcap, *window, problem.lower_right, problem.dropout_p, problem.precision,
        problem.deterministic,
    )  # fmt: skip
    return bool(cuda.hopper_takes(Saved(given, *fake_forward(given), scalars), need))


def _followed(out: Tensor, note: dict) -> Tensor:
    """The output, whose gradient leaves its strides in the note."""

    def look(dout: Tensor) -> None:
        note["strides"].setdefault("dout", list(dout.stride()))

    if out.requires_grad:
        out.register_hook(look)
    return out
