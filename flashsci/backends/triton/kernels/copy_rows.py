"""A bias or mask copied between rows of keys that begin anywhere: to rows that begin at multiples of 16 bytes, or back.

Maths     target = source
Grid      one axis over (up to three dims, tile of rows, tile of the words of a row)
Tiles     4 KB: 4 rows of 128 words of 8 bytes, a row for each warp. A word of the target is cut from the two words of the source
          that it lies in: loads of single numbers would take four times as many instructions
Limits    memory
"""

from typing import NamedTuple

import triton.language as tl

from .kernel import kernel


class RowStrides(NamedTuple):
    source: tuple[int, ...]  # (three outer dims, rows)
    target: tuple[int, ...]


class RowSizes(NamedTuple):
    outer1: int
    outer2: int
    rows: int
    keys: int
    last: int  # the place of the source's last number


@kernel
def copy_rows_kernel(
    source, target, strides, sizes,
    BYTES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, OUTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """BYTES: of a number. OUTER: whether there are outer dims. WHOLE: rows of the target are whole words."""
    EACH: tl.constexpr = 8 // BYTES
    line = tl.program_id(0)
    tiles = tl.cdiv(sizes.keys, EACH * WORDS)  # of a row
    start = line % tiles * (WORDS * EACH)
    key = start + tl.arange(0, WORDS)[None, :] * EACH
    line //= tiles
    tiles = tl.cdiv(sizes.rows, ROWS)
    row0 = (line % tiles * ROWS).to(tl.int64)
    row = row0 + tl.arange(0, ROWS)[:, None]
    from_outer, to_outer = row0 * 0, row0 * 0
    if OUTER:
        line //= tiles
        outer2 = (line % sizes.outer2).to(tl.int64)
        line //= sizes.outer2
        outer1, outer0 = (line % sizes.outer1).to(tl.int64), (line // sizes.outer1).to(tl.int64)
        from_outer += outer0 * strides.source[0] + outer1 * strides.source[1] + outer2 * strides.source[2]
        to_outer += outer0 * strides.target[0] + outer1 * strides.target[1] + outer2 * strides.target[2]
    first = from_outer + row * strides.source[3]
    place = to_outer + row * strides.target[3]
    # Words that reach beyond the last number are in these programs alone.
    end = from_outer + (row0 + ROWS - 1) * strides.source[3] + start + (WORDS + 2) * EACH
    holds_last = end > sizes.last
    inside = (row < sizes.rows) & (key < sizes.keys)
    full = inside
    if not WHOLE:  # the numbers before the row's first word, and those after its last one, are stored one by one
        lead = (-(target.to(tl.int64) // BYTES + place) % EACH + EACH) % EACH
        for n in tl.static_range(EACH - 1):
            mask = (row < sizes.rows) & (start == 0) & (n < lead) & (n < sizes.keys)
            tl.store(target + place + n, tl.load(source + first + n, mask=mask), mask=mask)
        key += lead.to(tl.int32)
        full = inside & (key + EACH <= sizes.keys)
        for n in tl.static_range(EACH - 1):
            mask = inside & (key + EACH > sizes.keys) & (key + n < sizes.keys)
            tl.store(target + place + key + n, tl.load(source + first + key + n, mask=mask), mask=mask)
    before = (source.to(tl.int64) % 8) // BYTES  # numbers between the last multiple of 8 bytes and the source
    first += before
    from_words = (source - before).to(tl.pointer_type(tl.uint64))
    if WHOLE:  # a number for each row
        lies_in = first // EACH + key // EACH
        shift = first % EACH * (8 * BYTES)
    else:
        lies_in = (first + key) // EACH
        shift = (first + key) % EACH * (8 * BYTES)
    # Words that reach beyond the last number are read number by number.
    behind = (lies_in + 1) * EACH - before
    low_is_there = behind <= sizes.last + 1
    high_is_there = (behind + EACH <= sizes.last + 1) | (shift == 0)
    low = tl.load(from_words + lies_in, mask=full & low_is_there, other=0)
    high = tl.load(from_words + lies_in + 1, mask=full & high_is_there & (shift != 0), other=0)
    # A shift by all bits is not defined.
    value = (low >> shift.to(tl.uint64)) | ((high << 1) << (63 - shift).to(tl.uint64))
    if holds_last:
        cut = full & ~(low_is_there & high_is_there)
        found = tl.zeros_like(value)
        for n in tl.static_range(EACH):
            number = tl.load(source - before + first + key + n, mask=cut & (key + n < sizes.keys), other=0)
            bits = number.to(tl.uint8 if BYTES == 1 else tl.uint16 if BYTES == 2 else tl.uint32, bitcast=True)
            found |= bits.to(tl.uint64) << (n * 8 * BYTES)
        value = tl.where(cut, found, value)
    tl.store((target + (place + key)).to(tl.pointer_type(tl.uint64)), value, mask=full)
