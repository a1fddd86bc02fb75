"""Dropout: Philox4x32-7, the same mask in every backend (flashsci.dropout_mask)."""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def philox(key, c0, c1, c2, c3):
    """Philox4x32 of a counter; key: 64 bits. One product of 64 bits has both halves (tl.philox computes each for itself)."""
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = first.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def keep_pair(kept, word, threshold, BIT: tl.constexpr):
    """kept with the bits BIT and BIT + 1 of two keys: those of the low and of the high half of a drawn word."""
    kept |= tl.where((word & 0xFFFF) >= threshold, 1 << BIT, 0).to(tl.uint32)
    return kept | tl.where(word >= (threshold << 16), 2 << BIT, 0).to(tl.uint32)


@triton.jit
def dropout_keep(
    inputs, at, sizes, i0, j0, mod, F: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """The probabilities of the tile at (i0, j0) that stay, as bools: [M, N], or [N, M] if TRANSPOSED; None without
    dropout.

    One draw serves eight neighbouring keys: counter (offset, stream, i, j // 8), 16 bits for each. Threads pack the bits of
    up to WORD keys, as many as four warps have scores a thread, and exchange these words.
    """
    if F.DROPOUT:
        WORD: tl.constexpr = max(8, min(32, N, M * N // 128))
        DRAWS: tl.constexpr = WORD // 8
        key = tl.load(inputs.dropout_seed)
        offset = tl.load(inputs.dropout_seed + 1).to(tl.uint32)
        stream = (at.b * sizes.heads + at.h).to(tl.uint32)
        threshold = mod.threshold.to(tl.uint32)
        i = (i0 + tl.arange(0, M)).to(tl.uint32)
        blocks = (j0 // 8 + tl.arange(0, N // WORD) * DRAWS).to(tl.uint32)
        if TRANSPOSED:
            i, blocks = tl.broadcast(i[None, None, :], blocks[None, :, None])
        else:
            i, blocks = tl.broadcast(i[None, :, None], blocks[None, None, :])
        zeros = i ^ i
        kept = zeros
        for n in tl.static_range(DRAWS):
            r0, r1, r2, r3 = philox(key, zeros + offset, zeros + stream, i, blocks + n)
            kept = keep_pair(kept, r0, threshold, 8 * n)
            kept = keep_pair(kept, r1, threshold, 8 * n + 2)
            kept = keep_pair(kept, r2, threshold, 8 * n + 4)
            kept = keep_pair(kept, r3, threshold, 8 * n + 6)
        # The sum of one element is what keeps Triton from drawing a word again in every thread that reads its bits.
        kept = tl.sum(kept, 0)
        if TRANSPOSED:
            bits = kept[:, None, :] & (1 << tl.arange(0, WORD))[None, :, None]
            return tl.reshape(bits, (N, M)) != 0
        else:
            # A thread has two neighbouring keys of eight: one shift moves the bits of all its pairs to constant places.
            shift = 2 * tl.arange(0, 4)[None, :, None]
            places = 8 * tl.arange(0, DRAWS)[:, None, None] + tl.arange(0, 2)[None, None, :]
            bits = (kept[:, :, None, None, None] >> shift[None, None]) & (1 << places)[None, None]
            return tl.reshape(bits, (M, N)) != 0


@triton.jit
def drop(x, keep, mod):
    """x after dropout, scaled; x for None. A product with the factor, zero or the scale, costs less than a choice of results."""
    if keep is None:
        return x
    else:
        return x * tl.where(keep, mod.keep_scale, 0.0)


@triton.jit
def drop_unscaled(x, keep):
    """x after dropout, without the scale, which another value takes."""
    if keep is None:
        return x
    else:
        return tl.where(keep, x, 0.0)
