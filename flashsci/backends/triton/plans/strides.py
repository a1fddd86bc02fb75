"""Strides of tensors as kernels take them: one for each of two batch dims, for the head, and for the inner dims."""

from flashsci.call.mask_tiles import has_rows, places

NO_STRIDES = (0, 0, 0, 0, 0)


def strides4(stride: tuple[int, ...]) -> tuple[int, ...]:
    """(b0, b1, head, row) strides of a tensor of rank 2 to 5."""
    return (0, 0, 0, 0, *stride[:-1])[-4:]


def strides_of(x) -> tuple[int, ...]:
    """The strides of a result with rows; None: it is not wanted."""
    return NO_STRIDES[:4] if x is None else strides4(x.stride())


def weight_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """(b0, b1, head, key) strides of key weights; 0 in the dims they are broadcast along."""
    stride = tuple(0 if n == 1 else s for n, s in zip(shape, stride, strict=True))
    return (0, 0, 0, 0, *stride)[-4:]


def slope_strides(shape: tuple[int, ...], stride: tuple[int, ...], varlen: bool) -> tuple[int, ...]:
    """(b0, b1, head) strides of ALiBi slopes, (sequence, 0, head) of a packed call; 0 in the dims they are broadcast
    along."""
    stride = tuple(0 if n == 1 else s for n, s in zip(shape, stride, strict=True))
    if varlen:
        return (*(0, *stride[:-1])[-1:], 0, *stride[-1:])
    return (0, 0, 0, *stride)[-3:]


def plane_strides(shape: tuple[int, ...], stride: tuple[int, ...], ragged: bool) -> tuple[int, ...]:
    """(b0, b1, head, row, column) strides of a bias or mask; 0 in the dims it is broadcast along."""
    stride = tuple(0 if n == 1 else s for n, s in zip(shape, stride, strict=True))
    if ragged:
        return (0, 0, stride[0], 0, stride[1])
    return (0, 0, 0, 0, 0, *stride)[-5:]


def table_strides_of(shape: tuple[int, ...], stride: tuple[int, ...], rows: int, keys: int) -> tuple[int, ...]:
    """(b0, b1, head) strides of a table of tiles (flashsci/call/mask_tiles.py), and its places that have bits."""
    found = places(shape[-1], rows if has_rows(shape, rows) else 1, keys)
    return (*plane_strides(shape, stride, False)[:3], found)


def plane_vector(strides: tuple[int, ...], size_k: int, itemsize: int, varlen: bool, beyond: bool = False) -> int:
    """The number of elements that one load may take; 0: columns are not neighbours in memory.

    ``beyond``: the last load of a row may extend beyond the keys, into the rest of the 16 bytes of the last one. The
    pitch of the rows holds it, and their values there are not used.
    """
    if strides[4] != 1:
        return 0
    vector = 16 // itemsize
    ends = size_k % vector == 0 or (beyond and strides[3] > size_k)
    whole = all(s % vector == 0 for s in strides[:4]) and ends
    return vector if whole and not varlen else 1
