"""The biases of xformers: bands around the diagonal, of one sequence or of many packed ones.

Classes, fields, constructors and methods are those of ``xformers.ops.fmha.attn_bias``; clients subclass them, test by
isinstance and read their fields. The meaning of a bias for attention is defined in one place, :data:`BANDS`, by the
name of its class.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashsci.backends.reference import visible
from flashsci.call.arguments import window_bounds
from flashsci.errors import BackendError

Device = torch.device | str | None
_Bias = TypeVar("_Bias", bound="AttentionBias")
_Blocks = TypeVar("_Blocks", bound="BlockDiagonalMask")
_Padded = TypeVar("_Padded", bound="BlockDiagonalPaddedKeysMask")
_Gappy = TypeVar("_Gappy", bound="BlockDiagonalGappyKeysMask")


def _all(bias: Any) -> dict[str, Any]:
    return {}


def _causal(bias: Any) -> dict[str, Any]:
    return {"causal": True}


def _causal_lower_right(bias: Any) -> dict[str, Any]:
    return {"causal": True, "align": "lower_right"}


def _local(bias: Any) -> dict[str, Any]:
    return {"window": (index(bias.window_left), index(bias.window_right)), "align": "lower_right"}


def _causal_local(bias: Any) -> dict[str, Any]:
    return {"window": (index(bias._window_size) - 1, 0)}


def _causal_local_lower_right(bias: Any) -> dict[str, Any]:
    return {"window": (index(bias._window_size) - 1, 0), "align": "lower_right"}


# The options of attention, by the name of a bias's class.
BANDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "LowerTriangularMask": _causal,
    "LowerTriangularMaskWithTensorBias": _causal,
    "LowerTriangularFromBottomRightMask": _causal_lower_right,
    "LowerTriangularFromBottomRightLocalAttentionMask": _causal_local_lower_right,
    "LocalAttentionFromBottomRightMask": _local,
    "BlockDiagonalMask": _all,
    "BlockDiagonalCausalMask": _causal,
    "BlockDiagonalCausalFromBottomRightMask": _causal_lower_right,
    "BlockDiagonalCausalLocalAttentionMask": _causal_local,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _causal_local_lower_right,
    "BlockDiagonalPaddedKeysMask": _all,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _causal_lower_right,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _local,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _causal_local_lower_right,
    "BlockDiagonalGappyKeysMask": _all,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _causal_lower_right,
}


def band_of(bias: Any) -> dict[str, Any]:
    """The options of attention for a bias of this file or of xformers.

    Raises:
        BackendError: it is of another class; a subclass may have another meaning.
    """
    name = type(bias).__name__
    if name not in BANDS:
        advice = (
            "call flashsci.paged_attention, gather the pages into packed keys"
            if "Paged" in name
            else "give its values as a tensor"
        )
        raise BackendError(f"attn_bias of type {name} is not supported; {advice}, or use one of {', '.join(BANDS)}")
    return BANDS[name](bias)


class AttentionBias:
    """The values of ``attn_bias`` other than a tensor."""

    def to(self: _Bias, device: Device) -> _Bias:
        """The same bias on a device."""
        return self

    def materialize(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        """The bias as a tensor of ``shape`` ``[*, Mq, Mk]``, 0 and -inf: for tests and debugging, no call makes
        it."""
        keep = _visible(band_of(self), shape[-2], shape[-1], device)
        return _zeros_and_infinities(keep, shape, dtype)


def _visible(band: dict[str, Any], rows: int, keys: int, device: Device) -> Tensor:
    sides = window_bounds(band.get("causal", False), band.get("window"))
    device = torch.device(device or "cpu")
    keep = visible(rows, keys, *sides, band.get("align") == "lower_right", device)
    return torch.ones(rows, keys, dtype=torch.bool, device=device) if keep is None else keep


def _zeros_and_infinities(keep: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(keep.shape, dtype=dtype, device=keep.device)
    return zeros.masked_fill(~keep, -torch.inf).expand(shape)


# --- One sequence ---------------------------------------------------------------------------------


class LowerTriangularMask(AttentionBias):
    """Causal: query i sees the keys 0 to i."""

    def __init__(self, device: Device = None) -> None:
        """``device`` has no effect, in xformers and here."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal, and a tensor ``[B, H, Mq, Mk]`` added to the scores."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def to(self, device: Device) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))

    def materialize(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, aligned so that the last query sees the last key."""

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal, aligned at the last key, and only the last ``_window_size`` of the visible keys."""

    _window_size: int

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """``window_left`` keys before and ``window_right`` after a diagonal on which the last query meets the last
    key."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError(
                f"window_left and window_right must be >= 0, got {self.window_left} and {self.window_right}"
            )


def _check_window(size: int) -> None:
    if size <= 0:
        raise ValueError(f"window_size must be > 0, got {size}")


# --- Packed sequences -----------------------------------------------------------------------------


def _ints(values: Iterable[Any]) -> list[int]:
    """Lengths on the host, given as a tensor, an array or a list whose items hold one number each."""
    return [index(x) for x in values]


def _offsets(values: Sequence[int], device: Device) -> Tensor:
    """int32 on a device (None: the GPU if there is one), without a wait for it."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int32)
    return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


@dataclass
class _SeqLenInfo:
    """Sequences one after the other: the n-th is ``seqstart[n]`` to ``seqstart[n + 1]``; ``_py`` has the same on the
    host."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device = None) -> _SeqLenInfo:
        lengths = _ints(seqlens)
        starts = [0, *itertools.accumulate(lengths)]
        # -1 if there is no sequence, as in xformers.
        longest, shortest = max(lengths, default=-1), min(lengths, default=-1)
        return _SeqLenInfo(_offsets(starts, device), longest, shortest, starts)

    def to(self: Any, device: Device) -> Any:
        tensors = {n: x.to(device) for n, x in vars(self).items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **tensors)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """First row, and the one after the last, of each sequence."""
        yield from itertools.pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """``x [1, M, *]`` cut into the sequences, or into batches ``[b, m, *]`` of these sizes, with sequences of
        equal length."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ValueError(f"what is split must have shape [1, {self.seqstart_py[-1]}, ...], got {list(x.shape)}")
        batches = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else batch_sizes
        ends = [self.seqstart_py[n] for n in (0, *itertools.accumulate(batches))]
        pieces = x.split([b - a for a, b in itertools.pairwise(ends)], dim=1)
        return [
            piece.reshape(n, piece.shape[1] // max(n, 1), *x.shape[2:])
            for n, piece in zip(batches, pieces, strict=True)
        ]


@dataclass
class _GappySeqInfo(_SeqLenInfo):
    """Sequences at any place: the n-th is ``seqlen[n]`` rows from ``seqstart[n]`` on; ``seqstart`` ends with the
    number of rows."""

    seqlen: Tensor
    seqlen_py: Sequence[int]

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Device
    ) -> _GappySeqInfo:
        if paged:
            raise BackendError(
                "keys in pages are not supported by this stand-in; call flashsci.paged_attention, or gather the pages into packed keys"
            )
        starts, lengths = _ints(seqstarts), _ints(seqlens)
        if not lengths or len(starts) != len(lengths) + 1:
            raise ValueError(
                "kv_seqstarts must have one entry more than kv_seqlen, which has at least one; got "
                f"{len(starts)} and {len(lengths)}"
            )
        return _GappySeqInfo(
            _offsets(starts, device),
            max(lengths),
            min(lengths),
            starts,
            _offsets(lengths, device),
            lengths,
        )

    def intervals(self) -> Iterator[tuple[int, int]]:
        for start, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield start, start + length

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        raise NotImplementedError(
            "keys with padding between sequences cannot be split; split them before the padding is added"
        )


@dataclass
class _PaddedSeqLenInfo(_GappySeqInfo):
    """Sequences that begin at multiples of ``padding``."""

    padding: int

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Device = None) -> _PaddedSeqLenInfo:
        lengths = _ints(seqlens)
        if not lengths or max(lengths) > padding:
            raise ValueError(f"there must be lengths of keys, each at most kv_padding={padding}, got {lengths}")
        starts = list(range(0, len(lengths) * padding + 1, padding))
        return _PaddedSeqLenInfo(
            _offsets(starts, device), max(lengths), min(lengths), starts, _offsets(lengths, device), lengths, padding,
        )  # fmt: skip


class _PackedBias(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: Any

    def to(self: Any, device: Device) -> Any:
        of_q, of_k = self.q_seqinfo, self.k_seqinfo
        moved = of_q.to(device)
        kept = moved if of_k is of_q else of_k.to(device)
        return dataclasses.replace(self, q_seqinfo=moved, k_seqinfo=kept)

    def materialize(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        expected = (self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1])
        if tuple(shape[-2:]) != expected:
            raise ValueError(f"shape must end in the numbers of queries and keys, {expected}, got {tuple(shape)}")
        keep = torch.zeros(expected, dtype=torch.bool, device=device)
        band = band_of(self)
        blocks = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (first, end), (first_key, end_key) in blocks:
            block = _visible(band, end - first, end_key - first_key, device)
            keep[first:end, first_key:end_key] = block
        return _zeros_and_infinities(keep, shape, dtype)


def _check_counts(q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(
            f"q_seqlen and kv_seqlen must be of equally many sequences, got {len(q_seqlen)} and {len(kv_seqlen)}"
        )


@dataclass
class BlockDiagonalMask(_PackedBias):
    """Each of the packed sequences attends to itself."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls: type[_Blocks],
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: Device = None,
    ) -> _Blocks:
        """The bias for the lengths of queries and keys of each sequence (keys: by default the same)."""
        q_seqinfo = k_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is not None and kv_seqlen != q_seqlen:
            _check_counts(q_seqlen, kv_seqlen)
            k_seqinfo = _SeqLenInfo.from_seqlens(kv_seqlen, device=device)
        return cls(q_seqinfo, k_seqinfo)

    @classmethod
    def from_tensor_list(cls: type[_Blocks], tensors: Sequence[Tensor]) -> tuple[_Blocks, Tensor]:
        """The bias of tensors ``[B_i, M_i, *]``, and these as one ``[1, sum B_i M_i, *]``; :meth:`split` undoes it."""
        bias = cls.from_seqlens(_lengths(tensors), device=tensors[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors]
        return bias, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls: type[_Blocks],
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[_Blocks, Tensor, Tensor, Tensor | None]:
        """The same for queries, keys and values."""
        lengths, key_lengths = _lengths(tensors_q), _lengths(tensors_k)
        bias = cls.from_seqlens(lengths, key_lengths, device=tensors_q[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors_q]
        values = None if tensors_v is None else _joined(tensors_v)
        return bias, _joined(tensors_q), _joined(tensors_k), values

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The sequences of ``[1, M, *]``; for self-attention."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError(
                "the queries have other lengths than the keys; call split_queries or split_kv instead of split"
            )
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(x.shape[0])]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors]).unsqueeze(0)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal in each sequence."""


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal in each sequence, aligned at its end. Queries before the first key, which xformers refuses, have out
    0."""


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """The last ``_window_size`` keys up to each query's own position."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """The same, aligned at the end of each sequence."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclass
class BlockDiagonalPaddedKeysMask(_PackedBias):
    """Packed queries; keys in slots of equal size, with only the first of each slot in use."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls: type[_Padded],
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Device = None,
    ) -> _Padded:
        """The bias for these lengths and the size of a slot; ``causal_diagonal`` has no effect, in xformers and
        here."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


def _padded(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: Device = None
) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    _check_counts(q_seqlen, kv_seqlen)
    keys = _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)
    return _SeqLenInfo.from_seqlens(q_seqlen, device=device), keys


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal, aligned so that the last query of a sequence sees its last key in use."""

    causal_diagonal: Any = None


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """A window around the diagonal on which a sequence's last query meets its last key in use."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The last ``_window_size`` keys up to the diagonal on which a sequence's last query meets its last key in
    use."""

    _window_size: int

    def __post_init__(self) -> None:
        _check_window(self._window_size)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_size)


@dataclass
class BlockDiagonalGappyKeysMask(_PackedBias):
    """Packed queries; the keys of each sequence at any place."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls: type[_Gappy],
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: Device = None,
    ) -> _Gappy:
        """The bias for these lengths and starts of each sequence's keys; ``kv_seqstarts`` ends with the number of
        keys."""
        _check_counts(q_seqlen, kv_seqlen)
        keys = _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), keys)


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Causal, aligned so that the last query of a sequence sees its last key."""
