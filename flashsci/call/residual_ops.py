"""The raw ops of residual attention: their arguments, schemas and fake kernels, the same for every backend that has them.

``flashsci::<backend>_residual_forward`` and ``_residual_backward`` are opaque to a compiler and know nothing of
autograd: flashsci/api/residual.py has the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call import kinds
from flashsci.call.ops import Scalars, Tensors, empty_like_layout
from flashsci.call.schemas import arguments, define_op

MAX_HEAD_DIM = 128  # of kernels


class ResidualCall(NamedTuple):
    """One call, as kernels take it.

    q ``[*, Hq, Sq, D]``, k ``[*, Hk, Sk, D]``, v ``[*, Hk, Sk, Dv]`` with equal leading dims, none to two; bias
    broadcastable to the scores ``[*, Hq, Sq, Sk]``, with as many dims.
    """

    q: kinds.Rows
    k: kinds.Rows
    v: kinds.Rows
    bias: kinds.Bias
    dropout_seed: kinds.Seed
    scale: float
    dropout_p: float
    precision: str

    @property
    def tensors(self) -> Tensors:
        return Tensors(self.q, self.k, self.v, self.bias, dropout_seed=self.dropout_seed)

    @property
    def scalars(self) -> Scalars:
        return Scalars(-1, -1, self.scale, 0.0, -1, -1, False, self.dropout_p, self.precision, False)

    def laid_out(self) -> ResidualCall:
        """The call as Tensors.laid_out gives tensors: itself, or with copies."""
        given, whole = self.tensors, self.tensors.laid_out()
        if all(a is b for a, b in zip(given, whole, strict=True)):
            return self
        return self._replace(q=whole.q, k=whole.k, v=whole.v, bias=whole.bias, dropout_seed=whole.dropout_seed)

    @property
    def score_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.k.shape[-2])


def scores_dtype(q: Tensor, bias: Tensor | None) -> torch.dtype:
    """The wider one of the dtypes of q and the bias."""
    return q.dtype if bias is None else torch.promote_types(q.dtype, bias.dtype)


_CALL = arguments(ResidualCall)
_FORWARD = f"({_CALL}) -> (Tensor out, Tensor lse, Tensor scores)"
_BACKWARD = (
    f"(Tensor? dout, Tensor? dscores, {_CALL}, Tensor out, Tensor lse, Tensor? scores, bool need_bias) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor change)"
)
_N = len(ResidualCall._fields)


class ResidualKernels(NamedTuple):
    """The residual functions of a backend."""

    forward: Callable[[ResidualCall], tuple[Tensor, Tensor, Tensor]]
    """Returns out, lse, scores."""
    backward: Callable[..., tuple[Tensor, ...]]
    """Returns dq, dk, dv and the gradient of the whole scores, empty unless ``need_bias``; takes (dout, dscores,
    call, out, lse, scores, need_bias). ``scores``, which are read if they are float32, may be None: then they are
    computed again, from the bias."""
    prepared: Callable[[ResidualCall], Any]
    """Both functions for plain tensors with the signature of a call's: ``forward(q, k, v, bias, dropout_seed)``, and
    ``backward(dout, dscores, (q, k, v, bias, dropout_seed), out, lse, scores, need_bias)``. The latter returns a
    function that computes the gradients for all tensors with the signature of these, in their order, with None in the
    place of empty tensors."""


def empty_scores(q: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor for scores, or of their shape, with rows that begin at multiples of 16 bytes."""
    step = 16 // dtype.itemsize
    strides = [1, -(-shape[-1] // step) * step]
    for n in reversed(shape[1:-1]):
        strides.append(strides[-1] * n)
    return q.new_empty_strided(tuple(shape), strides[::-1], dtype=dtype)


def empty_results(call: ResidualCall) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for out, lse and scores."""
    q = call.q
    out = empty_like_layout(q, (*q.shape[:-1], call.v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return out, lse, empty_scores(q, call.score_shape, scores_dtype(q, call.bias))


def empty_gradients(call: ResidualCall, need_bias: bool) -> tuple[Tensor, ...]:
    """Empty tensors for dq, dk, dv and the gradient of the scores."""
    rows = [empty_like_layout(x, x.shape) for x in (call.q, call.k, call.v)]
    dtype = scores_dtype(call.q, call.bias)
    if not need_bias:
        return *rows, call.q.new_empty(0, dtype=dtype)
    return *rows, empty_scores(call.q, call.score_shape, dtype)


def define(backend: str, kernels: ResidualKernels, keys: Sequence[str]) -> ResidualKernels:
    """Define a backend's ops for the given dispatch keys; returns the functions that call them."""

    def forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.forward(ResidualCall(*given))

    def grouped(dout: Any, dscores: Any, *rest: Any) -> tuple[Any, ...]:
        return dout, dscores, ResidualCall(*rest[:_N]), *rest[_N:]

    def backward(*given: Any) -> tuple[Tensor, ...]:
        return kernels.backward(*grouped(*given))

    run = define_op(
        f"{backend}_residual_forward",
        _FORWARD,
        forward,
        keys,
        lambda *given: empty_results(ResidualCall(*given)),
    )
    run_backward = define_op(
        f"{backend}_residual_backward",
        _BACKWARD,
        backward,
        keys,
        lambda *given: empty_gradients(grouped(*given)[2], given[-1]),
    )
    return ResidualKernels(
        lambda call: run(*call),
        lambda dout, dscores, call, *rest: run_backward(dout, dscores, *call, *rest),
        kernels.prepared,
    )
