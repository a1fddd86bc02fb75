"""Exact tests of whether tensors share memory, element by element: interleaved views do not."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from torch import Tensor

MOST_STEPS = 10_000  # of a search: strides of views need few; a longer search counts as shared


def span(x: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if x.numel() == 0:
        return 0
    steps = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return int(steps + 1) * x.element_size()


def share(a: Tensor, b: Tensor) -> bool:
    """Whether an element of ``a`` and one of ``b`` share a byte."""
    distance = b.data_ptr() - a.data_ptr()
    if not -span(b) < distance < span(a) or not a.numel() or not b.numel():
        return False
    if a.device != b.device:  # addresses on different devices are unrelated
        return False
    of_a, of_b = ((tuple(x.shape), x.stride(), x.element_size()) for x in (a, b))
    return _meet(of_a, of_b, distance)


class Spans:
    """Spans of the written tensor and of those read meanwhile, for calls whose tensors have these shapes and
    strides."""

    def __init__(self, written: Tensor, read: Sequence[Tensor | None]) -> None:
        self.written = span(written)
        self.read = [0 if x is None else span(x) for x in read]

    def cross(self, written: Tensor, read: Sequence[Tensor | None]) -> bool:
        """Whether they may share memory; :func:`share` decides. This is cheap enough for every call."""
        begin = written.data_ptr()
        end = begin + self.written
        for x, bytes_of_x in zip(read, self.read, strict=True):
            if bytes_of_x:
                assert x is not None
                other = x.data_ptr()
                if other < end and begin < other + bytes_of_x:
                    return True
        return False


def folds(x: Tensor) -> bool:
    """Whether two elements of ``x`` may have one address, as in an expanded tensor."""
    end = 1
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1:
            if stride < end:
                return x.numel() > 0
            end += (n - 1) * stride
    return False


_Layout = tuple[tuple[int, ...], tuple[int, ...], int]


@functools.lru_cache(maxsize=1024)
def _meet(a: _Layout, b: _Layout, distance: int) -> bool:
    """Whether elements of these (shape, strides, bytes of an element) meet, if b begins ``distance`` bytes after a.

    Index i of a and j of b meet where ``sum i s - sum j t = distance``, in bytes, those within an element included.
    If j is counted from the end, its sign is plus as well; the question is then whether a sum of bounded multiples
    equals a number.
    """
    most: dict[int, int] = {}
    target = distance
    for (shape, strides, size), back in ((a, False), (b, True)):
        dims = [(s * size, n - 1) for s, n in zip(strides, shape, strict=True)]
        for step, count in (*dims, (1, size - 1)):
            if step and count:
                most[step] = most.get(step, 0) + count
                target += step * count if back else 0
    return _hits(sorted(most.items(), reverse=True), target)


def _hits(terms: list[tuple[int, int]], target: int) -> bool:
    """Whether ``sum n_i step_i = target`` for some ``0 <= n_i <= most_i``; terms: (step, most), largest step first."""
    reach, divisor = [0], [0]  # for the terms from i on, from the end
    for step, most in reversed(terms):
        reach.append(reach[-1] + step * most)
        divisor.append(math.gcd(divisor[-1], step))
    reach.reverse()
    divisor.reverse()
    steps = 0
    stack = [(0, target)]
    while stack:
        i, rest = stack.pop()
        if rest == 0:
            return True
        if rest < 0 or rest > reach[i] or rest % divisor[i]:
            continue
        steps += 1
        if steps > MOST_STEPS:
            return True
        step, most = terms[i]
        low = max(0, -(-(rest - reach[i + 1]) // step))
        stack.extend((i + 1, rest - n * step) for n in range(low, min(most, rest // step) + 1))
    return False
