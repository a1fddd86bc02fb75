"""Rows of q, k and v that no vector load fits, such as heads of 25 numbers in 16 bits, copied into rows of whole 16 bytes.

Kernels read such rows in pieces of 2 or 4 bytes, and none of Hopper's takes them. A copy moves each number once, which pays where
many scores read it. Zeros behind q and k add nothing to a score; zeros behind v are columns of out, which are cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashsci.call.arguments import BATCH, Options
from flashsci.call.kinds import Dense, Packed
from flashsci.call.symbols import certainly
from flashsci.choice.backends import override, requested

#: Multiplications of a forward from which kernels save more than the copies cost the host: 0.4 ms of an H200. A step with copies
#: takes the host 0.9 ms.
LEAST_WORK = 1 << 34
#: Queries and keys from which they save more than the copies cost the GPU.
FEWEST_ROWS = 128
#: The backends that compute from rows as they are: SDPA copies them itself, and plain PyTorch does not mind.
OTHERS = frozenset(("sdpa", "eager", "reference"))
DTYPES = (torch.float16, torch.bfloat16)

_PIECE = 8  # numbers of 16 bits


def pays(q: Tensor, k: Tensor, v: Tensor, options: Options, backend: str, offsets: Tensor | None = None) -> bool:
    """Whether a call should compute from copies of its rows.

    False for sizes that a compiler keeps symbolic, because the next length may need no copy; for tensors that do not belong
    together, whose error names what was given; and where the batch may decide nothing.

    Args:
        backend: the request.
        offsets: those of packed sequences, which count as if all were of one length.
    """
    if q.dtype not in DTYPES or not _has_tensor_cores(q.device) or _names_others(backend, override.name):
        return False
    if q.dim() < 2 or not any(map(_is_ragged, (q, k, v))) or any(map(_is_expanded, (q, k, v))):
        return False
    fit = (
        q.dtype == k.dtype == v.dtype
        and q.dim() == k.dim()
        and q.shape[-1] == k.shape[-1]
        and k.shape[:-1] == v.shape[:-1]
    )
    if not fit or options.deterministic == BATCH:
        return False
    rows, keys = q.shape[-2], k.shape[-2]
    if offsets is not None:
        if not isinstance(offsets, Tensor) or offsets.dim() != 1:
            return False
        sequences = max(offsets.shape[0] - 1, 1)
        rows, keys = q.shape[0] // sequences, k.shape[0] // sequences
    left, right = options.window_left, options.window_right
    if left >= 0 and right >= 0 and not certainly(left + right >= FEWEST_ROWS):
        return False
    enough = certainly(rows >= FEWEST_ROWS) and certainly(keys >= FEWEST_ROWS)
    return enough and certainly(q.shape[:-1].numel() * keys * (q.shape[-1] + v.shape[-1]) >= LEAST_WORK)


def attend(entry: Callable[..., Any], given: Dense | Packed, options: Options, **others: Any) -> tuple[Tensor, Tensor]:
    """out and lse of a call of an entry point, from copies of its rows. ``others``: arguments beside these, or in their place."""
    rows = {name: in_whole_pieces(getattr(given, name)) for name in "qkv"}
    scale = given.q.shape[-1] ** -0.5 if options.scale is None else options.scale
    keywords = options.keywords() | {"scale": scale, "return_lse": True}
    wide, lse = entry(**(given._replace(**rows)._asdict() | keywords | others))
    return wide[..., : given.v.shape[-1]], lse


def in_whole_pieces(x: Tensor) -> Tensor:
    """x, or a differentiable copy whose rows begin at multiples of 16 bytes, with zeros behind its columns. The dims keep their
    order in memory."""
    if not _is_ragged(x):
        return x
    outer = sorted(range(x.dim() - 1), key=lambda d: -x.stride()[d])
    moved = x.permute(*outer, -1)
    rest = -x.shape[-1] % _PIECE
    copied = torch.nn.functional.pad(moved, (0, rest)) if rest else moved.contiguous()
    return copied.permute(*(outer.index(d) for d in range(len(outer))), -1)


def _is_ragged(x: Tensor) -> bool:
    """Whether a row begins elsewhere than at a multiple of 16 bytes, or ends there. Addresses are not asked for."""
    if x.dim() == 0 or certainly(x.shape[-1] % _PIECE != 0):
        return x.dim() > 0
    apart = zip(x.shape[:-1], x.stride(), strict=False)
    return any(certainly(n > 1) and certainly(s % _PIECE != 0) for n, s in apart)


def _is_expanded(x: Tensor) -> bool:
    """Whether a copy would hold repetitions."""
    return any(certainly(n > 1) and certainly(s == 0) for n, s in zip(x.shape, x.stride(), strict=True))


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether kernels for a device multiply bf16 and fp16 with loads of 16 bytes."""
    return device.type == "cuda" and _is_ampere_or_newer(device.index)


def _is_ampere_or_newer(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


def _names_others(backend: str, _: str | None) -> bool:
    """Whether a request, which a context may override, names kernels that compute from rows as they are."""
    name = requested(backend)[0]
    return name in OTHERS or ":sm" in name


# Compilers take the answers for constants, as `torch.compiler.assume_constant_result` says.
_is_ampere_or_newer._dynamo_marked_constant = True  # type: ignore[attr-defined]
_names_others._dynamo_marked_constant = True  # type: ignore[attr-defined]
