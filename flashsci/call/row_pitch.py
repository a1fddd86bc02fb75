"""Copies of a bias or mask whose rows do not begin at multiples of 16 bytes, as those of 1023 keys.

Most kernels read such rows number by number, which takes 5 to 10 times as long. A copy reads and writes each number once
more, and both passes use it; its rows are apart by whole 16 bytes. Without gradients Hopper's forward reads a bias as it
is (csrc/sm90/fwd/load_bias_mask.cuh).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashsci.call.ops import Tensors
from flashsci.call.symbols import certainly
from flashsci.call.torch_state import is_traced

#: Scores of a call from which kernels save more than a copy costs; with a mask of heads up to NARROW, whose kernels lose less
#: by its rows.
FEWEST_SCORES, FEWEST_NARROW_SCORES, NARROW = 1 << 22, 1 << 24, 32
#: Scores that read one number of a mask, from which on a mask is copied: some kernels read it as fast either way.
FEWEST_READERS = 4


def ragged_bias(tensors: Tensors) -> bool:
    """Whether the rows of a bias of a 16-bit call begin anywhere, so that a copy of it pays.

    A copy of an expanded bias would hold every repetition. Kernels of float32 calls lose less than a copy costs.
    """
    bias = tensors.bias
    if bias is None or tensors.q.element_size() != 2 or tensors.cu_seqlens_q is not None:
        return False
    return _is_ragged(bias) and _is_whole(bias) and certainly(_scores(tensors) >= FEWEST_SCORES)


def ragged_mask(tensors: Tensors) -> bool:
    """Whether the rows of a mask begin anywhere, so that a copy of it pays: of its numbers without repetitions.

    Few of them are read where it has a table of its tiles.
    """
    mask = tensors.mask
    if mask is None or tensors.mask_tiles is not None or not _is_ragged(mask):
        return False
    narrow = all(certainly(x.shape[-1] <= NARROW) for x in (tensors.q, tensors.v))
    scores, fewest = _scores(tensors), FEWEST_NARROW_SCORES if narrow else FEWEST_SCORES
    return certainly(scores >= fewest) and certainly(scores >= FEWEST_READERS * once(mask).numel())


def _scores(tensors: Tensors) -> int:
    q = tensors.q
    return q.shape[:-1].numel() * tensors.k.shape[-2]


def _is_ragged(x: Tensor) -> bool:
    """Whether x is a plane of queries and keys with neighbouring keys, and a row or a head of it does not begin at a
    multiple of 16 bytes."""
    if x.dim() < 2 or not certainly(x.stride(-1) == 1):
        return False
    if not (certainly(x.shape[-2] > 1) and certainly(x.stride(-2) > 0) and certainly(x.shape[-1] > 1)):
        return False
    each = 16 // x.element_size()
    return any(certainly(n > 1) and certainly(s % each != 0) for n, s in zip(x.shape[:-1], x.stride(), strict=False))


def _is_whole(x: Tensor) -> bool:
    """Whether no dim is expanded."""
    return all(certainly(n == 1) or certainly(s != 0) for n, s in zip(x.shape, x.stride(), strict=True))


def once(x: Tensor) -> Tensor:
    """x without the repetitions of expanded dims."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if certainly(stride == 0) and certainly(size > 1):
            x = x.narrow(dim, 0, 1)
    return x


def differs_by_query(mask: Tensor) -> bool:
    """Whether a mask has rows of its own for queries. False for sizes that a compiler keeps symbolic."""
    return mask.dim() > 1 and certainly(mask.shape[-2] > 1) and certainly(mask.stride(-2) != 0)


def padded(x: Tensor) -> Tensor:
    """A copy of a bias or mask with rows of whole 16 bytes: by ops that every tracer and transform follows."""
    keys = x.shape[-1]
    return torch.nn.functional.pad(x, (0, -keys % (16 // x.element_size())))[..., :keys]


def ragged(tensors: Tensors) -> tuple[bool, bool]:
    """Whether the bias, and whether the mask, has rows that begin anywhere, so that a copy pays.

    False for ``torch.jit.trace`` and for sizes that a compiler keeps symbolic: the next length may need no copy.
    """
    return (False, False) if is_traced() else (ragged_bias(tensors), ragged_mask(tensors))


def whole_rows(
    tensors: Tensors,
    copy_bias: Callable[[Tensor], Tensor] = padded,
    copy_mask: Callable[[Tensor], Tensor] = padded,
    which: tuple[bool, bool] | None = None,
) -> Tensors:
    """The tensors, with copies of a bias and a mask whose rows begin anywhere. ``which``: as :func:`ragged` finds them."""
    bias, mask = tensors.bias, tensors.mask
    of_bias, of_mask = ragged(tensors) if which is None else which
    if bias is not None and of_bias:
        tensors = tensors._replace(bias=copy_bias(bias))
    if mask is not None and of_mask:
        tensors = tensors._replace(mask=copy_mask(once(mask)).expand(mask.shape))
    return tensors
