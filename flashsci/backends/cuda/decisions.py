"""The library's decisions that depend on the layout of tensors, asked by rehearsals once for each kind of call.

No condition of a kernel is repeated here. A tensor is described by its sizes, strides and dtype; a size that a compiler
keeps symbolic is the one that it traces with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from flashsci.backends.cuda import layouts, library, masked_bias, rehearsal
from flashsci.call import row_pitch
from flashsci.call.ops import NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors, fake_forward
from flashsci.call.problem import Problem
from flashsci.call.torch_state import modes, tracer_paused


class Described(NamedTuple):
    """A tensor without its memory: the properties that launchers decide by."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements between its first one and a multiple of 16 bytes
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Described:
        """The description of a tensor of any kind.

        Raises:
            Unknown: a size depends on data, so that a compiler has no example of it.
        """
        dtype = x.dtype
        sizes: Any = x.shape
        strides: Any = x.stride()
        first: Any = x.storage_offset()
        if modes() or type(x) not in (Tensor, Parameter):  # else there are no symbols
            sizes, strides = (tuple(map(_number, numbers)) for numbers in (sizes, strides))
            first = _number(first)
        return cls(sizes, strides, first % (16 // dtype.itemsize), dtype)

    def contiguous(self) -> Described:
        steps = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        return self._replace(strides=tuple(steps), offset=0)

    def tensor(self) -> Tensor:
        """A tensor on "meta" with this description."""
        last = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True) if n > 1)
        memory = torch.empty(self.offset + last + 1, dtype=self.dtype, device="meta")
        return memory.as_strided(self.sizes, self.strides, self.offset)


class Unknown(Exception):
    """A size depends on data."""


def _number(n: Any) -> Any:
    """A number, or the one that a compiler traces with."""
    if not isinstance(n, torch.SymInt | torch.SymFloat):
        return n
    hint = n.node.hint if n.node.has_hint() else None
    if hint is None:
        raise Unknown
    return hint


_Described = tuple[Described | None, ...]


@contextmanager
def unobserved() -> Iterator[None]:
    """A context in which no mode, transform or tracer sees an op: a question is no part of a program."""
    with _disable_current_modes(), torch._C._DisableFuncTorch(), tracer_paused():
        yield


def device_of(device: torch.device) -> rehearsal.DescribedDevice:
    """The properties of a tensor's device; elsewhere than on a GPU of this machine those of Hopper."""
    real = device.type == "cuda" and torch.cuda.is_available()
    return rehearsal.DescribedDevice.of(device) if real else rehearsal.H100


def _describe(*tensors: Tensor | None) -> _Described:
    return tuple([None if x is None else Described.of(x) for x in tensors])


def _known(scalars: Scalars) -> Scalars:
    return Scalars(*map(_number, scalars)) if modes() else scalars


def _tensors(described: _Described) -> list[Any]:
    return [None if x is None else x.tensor() for x in described]


def _answer(ask: Callable[..., rehearsal.Kernels | None], *given: Any) -> rehearsal.Kernels | None:
    """The kernels that a rehearsal names; None also for dtypes and features that the ops refuse."""
    try:
        return ask(*given)
    except RuntimeError:
        return None


@functools.lru_cache(maxsize=4096)
def _forward(tensors: _Described, scalars: Scalars, generation: int, device: torch.device) -> rehearsal.Kernels | None:
    with unobserved():
        given = Tensors(*_tensors(tensors))
        return _answer(rehearsal.forward_kernels, given, scalars, device_of(device), generation)


class _Backward(NamedTuple):
    """The kernels of a backward, and whether they take a mask hidden in the bias."""

    kernels: rehearsal.Kernels | None
    hides_in_bias: bool = False


@functools.lru_cache(maxsize=4096)
def _backward(
    tensors: _Described,
    results: _Described,
    scalars: Scalars,
    need: int,
    generation: int,
    device: torch.device,
) -> _Backward:
    """``results``: out and lse; dout is like out."""
    with unobserved():
        out, lse = _tensors(results)
        given = Tensors(*_tensors(tensors))

        def kernels_of(given: Tensors) -> rehearsal.Kernels | None:
            saved = Saved(given, out, lse, scalars)
            return _answer(rehearsal.backward_kernels, out, None, saved, need, device_of(device), generation)

        found = kernels_of(given)
        wanted = generation == 90 or (generation == 0 and masked_bias.pays(given))
        if wanted and not _are_hoppers(found) and masked_bias.fits(given):
            others = kernels_of(masked_bias.hidden_in_bias(given))
            if others and others[0].startswith("sm90/bwd/"):
                return _Backward(others, True)
        return _Backward(found)


def _are_hoppers(kernels: rehearsal.Kernels | None) -> bool:
    """Whether they are those of sm90, or csrc/sm80/small, which the library tries before them."""
    return kernels is not None and all(x.startswith(("sm90/", "sm80/small/")) for x in kernels[:1])


def forward(
    tensors: Tensors, scalars: Scalars, generation: int = 0, device: torch.device | None = None
) -> rehearsal.Kernels | None:
    """The kernels that compute out and lse.

    Args:
        generation: 75, 80 or 90: only its kernels.
        device: None: that of the tensors.

    Returns:
        () if there is no score; None if no kernel takes the call, or no library is here.
    """
    if library.load() is not None:
        return None
    try:
        with tracer_paused():
            given = _describe(*tensors), _known(scalars)
    except Unknown:
        return None
    return _forward(*given, generation, device or tensors.q.device)


def _of_backward(saved: Saved, need: int, generation: int, device: torch.device | None) -> _Backward:
    if library.load() is not None:
        return _Backward(None)
    try:
        with tracer_paused():
            tensors, results = _describe(*saved.tensors), _describe(saved.out, saved.lse)
            scalars = _known(saved.scalars)
    except Unknown:
        return _Backward(None)
    where = device or saved.tensors.q.device
    return _backward(tensors, results, scalars, need, generation, where)


def backward(
    saved: Saved, need: int, generation: int = 0, device: torch.device | None = None
) -> rehearsal.Kernels | None:
    """The kernels that compute the gradients named by ``need``, of a dout like out; as :func:`forward`."""
    return _of_backward(saved, need, generation, device).kernels


def hides_in_bias(saved: Saved, need: int, generation: int = 0) -> bool:
    """Whether these kernels are Hopper's because the mask is hidden in the bias (:mod:`~.masked_bias`)."""
    if saved.tensors.bias is None or saved.tensors.mask is None:
        return False
    return _of_backward(saved, need, generation, None).hides_in_bias


def hopper_takes(saved: Saved, need: int, device: torch.device | None = None) -> bool:
    """Whether the newest kernels take the bias, mask or key weights of a call in their memory layout.

    The gradients' backend depends on the answer, because a kernel that another backend replaces must not be launched.
    """
    given = saved.tensors
    if given.bias is None and given.mask is None and given.key_weight is None:
        return True
    return _are_hoppers(backward(saved, need, device=device))


def reads_ragged_bias(
    tensors: Tensors, scalars: Scalars, generation: int = 0, device: torch.device | None = None
) -> bool:
    """Whether Hopper's forward takes a bias whose rows begin anywhere, and would take a copy in whole rows as well."""
    if tensors.bias is None:
        return False
    found = forward(tensors, scalars, generation, device)
    if not found or not found[0].startswith("sm90/fwd/"):
        return False
    with unobserved():
        copied = row_pitch.padded(Described.of(tensors.bias).tensor())
    return forward(tensors._replace(bias=copied), scalars, generation, device or tensors.q.device) == found


def reads_small_bias(
    tensors: Tensors, scalars: Scalars, generation: int = 0, device: torch.device | None = None
) -> bool:
    """Whether a forward of a small call takes a bias whose keys are not neighbours in memory."""
    if not tensors.has_strided_bias() or tensors.cu_seqlens_q is not None or not layouts.is_small(tensors):
        return False
    return bool(forward(tensors, scalars, generation, device))


def takes_weights(tensors: Tensors, scalars: Scalars) -> bool:
    """Whether the library takes the key weights of a call, of which it copies rows that begin anywhere."""
    if tensors.bias is not None or library.load() is not None:
        return False
    try:
        with tracer_paused():
            given, options = _describe(*tensors), _known(scalars)
    except Unknown:
        return False
    rows = [x.contiguous() for x in given[:3] if x is not None]
    return _forward((*rows, *given[3:]), options, 0, tensors.q.device) is not None


def backward_of(problem: Problem) -> rehearsal.Kernels | None:
    """The kernels for the gradients of q, k and v of a dense call without other tensors, which are contiguous; None
    also where a size is not known."""
    p = problem
    if p.varlen or p.batch is None or p.seq_q is None or p.seq_k is None or p.capability is None:
        return None
    sizes = [(p.heads_q, p.seq_q, p.head_dim), (p.heads_k, p.seq_k, p.head_dim), (p.heads_k, p.seq_k, p.head_dim_v)]
    leading = (math.prod(p.batch),)
    with unobserved():
        q, k, v = (torch.empty(*leading, *n, dtype=p.dtype, device="meta") for n in sizes)
        tensors = Tensors(q, k, v)
        window = p.window_left, p.window_right
        scalars = Scalars(-1, -1, 1.0, p.softcap, *window, p.lower_right, 0.0, p.precision, p.deterministic)
        saved = Saved(tensors, *fake_forward(tensors), scalars)
    return backward(saved, NEED_Q | NEED_K | NEED_V)
