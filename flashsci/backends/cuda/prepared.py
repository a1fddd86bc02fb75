"""Repeated calls without torch's dispatcher: a call is two allocations and one C function.

The results of the library's checks on tensors and options are found once and kept. An op costs its caller several
microseconds in torch's dispatcher, as much as the launch itself. If a C function refuses a call, the call goes to the
op, which runs it or says why it cannot.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from ctypes import c_int, c_void_p
from typing import Any

import torch
from torch import Tensor

from flashsci.backends.cuda.layouts import bias_or_weights, bias_or_weights_needed, inputs
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_K,
    NEED_Q,
    NEED_V,
    Given,
    Saved,
    Tensors,
    empty_bias_gradient,
    empty_like_layout,
    fake_forward,
    is_like,
    may_pitch_bias_gradient,
    pitches_bias_gradient,
)
from flashsci.call.row_pitch import ragged_bias

_INPUTS = ("q", "k", "v", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "out", "lse")
# The arguments of the functions: addresses, None for absent tensors.
PARAMETERS = {
    "flashsci_takes_bias": ("prepared",),
    "flashsci_run_forward": ("prepared", *_INPUTS, "stream"),
    "flashsci_run_backward": (
        "prepared",
        "dout",
        "dlse",
        *_INPUTS,
        "dq",
        "dk",
        "dv",
        "dbias",
        "stream",
    ),
}
#: The answers of `flashsci_takes_bias` (csrc/include/flashsci_pair.h).
FORWARD_AS_GIVEN, AS_GIVEN = 1, 2
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # not in CPU builds


def _function(library: Any, name: str) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = [c_void_p] * len(PARAMETERS[name]), c_int
    return function


def has_scores(tensors: Tensors) -> bool:
    """Whether there is a query and a key; otherwise results are constants, which the ops write."""
    return 0 not in tensors.q.shape and tensors.k.shape[-2] != 0


def takes_bias(library: Any, tensors: Tensors, options: tuple[Any, ...]) -> int:
    """Whether the kernels for such calls take a bias whose keys are not neighbours in memory without a copy.

    AS_GIVEN: forward and backward do; FORWARD_AS_GIVEN: the forward does.
    """
    kept = _prepared_forward(tensors, fake_forward(tensors)[0], options)
    found: int = _function(library, "flashsci_takes_bias")(kept.data_ptr())
    return found


def _prepared_forward(tensors: Tensors, out: Tensor, options: tuple[Any, ...]) -> Tensor:
    kept: Tensor = torch.ops.flashsci.cuda_prepared_forward(*inputs(tensors), out, *options)
    return kept


_SLOPES = Tensors._fields.index("alibi_slopes")

# The most numbers of an lse that no caller reads.
MOST_DISCARDED = 65536


@functools.cache
def _discarded(device: torch.device) -> Tensor:
    """Memory for such an lse; all kernels may write it at any time. It is never freed: a stream may still use it."""
    return torch.empty(MOST_DISCARDED, dtype=torch.float32, device=device)


class PreparedForward:
    """A function that computes out, lse of tensors of one signature."""

    __slots__ = (
        "address",
        "discarded",
        "general",
        "index",
        "kept",
        "launch",
        "like_q",
        "lse",
        "out",
        "single",
    )

    def __init__(
        self,
        library: Any,
        tensors: Tensors,
        options: tuple[Any, ...],
        general: Callable[[Given], tuple[Tensor, Tensor]],
    ) -> None:
        q = tensors.q
        out, lse = fake_forward(tensors)
        self.kept = _prepared_forward(tensors, out, options)
        self.address, self.launch = self.kept.data_ptr(), _function(library, "flashsci_run_forward")
        self.out, self.lse = (out.shape, out.stride()), (lse.shape, lse.stride())
        self.like_q = is_like(out, q)
        # From a tensor: a call with a dtype and a device costs half a microsecond.
        self.single = torch.empty(0, dtype=torch.float32, device=q.device)
        self.index = q.device.index
        self.general = general
        self.discarded: Tensor | None = None

    def without_lse(self) -> PreparedForward:
        """The same for callers that do not read the lse: a small lse has no memory of its own."""
        shape, _ = self.lse
        # Memory that is allocated during the capture of a graph belongs to the graph.
        captured = self.single.is_cuda and torch.cuda.is_current_stream_capturing()
        if shape.numel() > MOST_DISCARDED or captured:
            return self
        other = copy.copy(self)
        other.discarded = _discarded(self.single.device)
        return other

    def at_addresses(self, raised: Callable[[Given], Tensors]) -> PreparedForward:
        """The same for tensors from which ``raised`` makes views: the library reads addresses, and strides that it
        keeps."""
        other, general = copy.copy(self), self.general
        other.general = lambda tensors: general(raised(tensors))
        return other

    def __call__(self, tensors: Given) -> tuple[Tensor, Tensor]:
        q, k, v, bias, weights, mask, offsets_q, offsets_k, _, _, _, _ = tensors
        if weights is not None:
            bias = weights
        out = torch.empty_like(q) if self.like_q else q.new_empty_strided(*self.out)
        lse = self.discarded
        if lse is None:
            lse = self.single.new_empty_strided(*self.lse)
        if self.launch(
            self.address,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if mask is None else mask.data_ptr(),
            None if offsets_q is None else offsets_q.data_ptr(),
            None if offsets_k is None else offsets_k.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            _stream_of(self.index),
        ):
            return out, lse
        return self.general(tensors)


def _slopes_as_bias(tensors: Given) -> Given:
    """The tensors of a call with ALiBi, which has no bias, with the slopes in its place, as the library takes them."""
    return *tensors[:3], tensors[_SLOPES], *tensors[4:]


def _without_bias(tensors: Given) -> Given:
    return *tensors[:3], None, *tensors[4:]


class PreparedForwardOfSlopes(PreparedForward):
    """A :class:`PreparedForward` of tensors with ALiBi."""

    __slots__ = ()

    def __init__(self, library: Any, tensors: Tensors, options: tuple[Any, ...], general: Callable[..., Any]) -> None:
        super().__init__(library, tensors, options, lambda given: general(_without_bias(given)))

    def __call__(self, tensors: Given) -> tuple[Tensor, Tensor]:
        return super().__call__(_slopes_as_bias(tensors))


class PreparedBackward:
    """A function that computes dq, dk, dv, dbias, dkey_weight of tensors of one signature, None for those not
    needed."""

    __slots__ = (
        "address",
        "dbias",
        "general",
        "index",
        "kept",
        "launch",
        "like_bias",
        "like_inputs",
        "rows",
    )

    def __init__(
        self,
        library: Any,
        dout: Tensor | None,
        dlse: Tensor | None,
        saved: Saved,
        need: int,
        options: tuple[Any, ...],
        general: Callable[..., tuple[Tensor | None, ...]],
        by_pairs: bool = False,
    ) -> None:
        """``by_pairs``: the gradient of the bias is in the order of the bias, else as
        ``ops.empty_bias_gradient`` makes it."""
        q, k, v, _, weights, *_ = saved.tensors
        rows = [
            empty_like_layout(x, x.shape) if need & bit else None for x, bit in ((q, NEED_Q), (k, NEED_K), (v, NEED_V))
        ]
        bias, dbias = bias_or_weights(saved.tensors), None
        if bias is not None and bias_or_weights_needed(need) & NEED_BIAS:
            windowed = saved.scalars.windowed()
            pitched = pitches_bias_gradient(bias, q, k, windowed)
            if not pitched and ragged_bias(saved.tensors):  # that `decisions.reads_ragged_bias` left as it is
                pitched = may_pitch_bias_gradient(bias, q, k, windowed)
            dbias = torch.empty_like(bias) if by_pairs else empty_bias_gradient(bias, pitched)
        # Weights have one dim less than a bias in their place.
        self.like_bias = bias is not None and weights is None and is_like(dbias, bias)
        given = *inputs(saved.tensors), saved.out, saved.lse
        self.kept = torch.ops.flashsci.cuda_prepared_backward(dout, dlse, *given, *rows, dbias, *options)
        self.address, self.launch = (
            self.kept.data_ptr(),
            _function(library, "flashsci_run_backward"),
        )
        self.like_inputs = all(map(is_like, rows, (q, k, v)))
        self.rows = [None if x is None else (x.shape, x.stride()) for x in rows]
        if weights is not None and dbias is not None:
            dbias = dbias.squeeze(-2)
        self.dbias = None if dbias is None else (dbias.shape, dbias.stride())
        self.index = q.device.index
        self.general = general

    def __call__(
        self, dout: Tensor | None, dlse: Tensor | None, tensors: Given, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weights, mask, offsets_q, offsets_k, _, _, _, _ = tensors
        if weights is not None:
            bias = weights
        dq: Tensor | None
        dk: Tensor | None
        dv: Tensor | None
        if self.like_inputs:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        else:
            dq, dk, dv = [None if x is None else q.new_empty_strided(*x) for x in self.rows]
        dbias = None
        if self.like_bias:
            dbias = torch.empty_like(bias)
        elif self.dbias is not None:
            dbias = bias.new_empty_strided(*self.dbias)
        if self.launch(
            self.address,
            None if dout is None else dout.data_ptr(),
            None if dlse is None else dlse.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if mask is None else mask.data_ptr(),
            None if offsets_q is None else offsets_q.data_ptr(),
            None if offsets_k is None else offsets_k.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            None if dq is None else dq.data_ptr(),
            None if dk is None else dk.data_ptr(),
            None if dv is None else dv.data_ptr(),
            None if dbias is None else dbias.data_ptr(),
            _stream_of(self.index),
        ):
            return (dq, dk, dv, dbias, None) if weights is None else (dq, dk, dv, None, dbias)
        return self.general(dout, dlse, tensors, out, lse)


class PreparedBackwardOfSlopes(PreparedBackward):
    """A :class:`PreparedBackward` of tensors with ALiBi."""

    __slots__ = ()

    def __init__(
        self,
        library: Any,
        dout: Tensor | None,
        dlse: Tensor | None,
        saved: Saved,
        need: int,
        options: tuple[Any, ...],
        general: Callable[..., tuple[Tensor | None, ...]],
        by_pairs: bool = False,
    ) -> None:
        def of_slopes(dout: Any, dlse: Any, tensors: Given, *results: Tensor) -> tuple[Tensor | None, ...]:
            return general(dout, dlse, _without_bias(tensors), *results)

        super().__init__(library, dout, dlse, saved, need, options, of_slopes, by_pairs)

    def __call__(
        self, dout: Tensor | None, dlse: Tensor | None, tensors: Given, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        return super().__call__(dout, dlse, _slopes_as_bias(tensors), out, lse)
