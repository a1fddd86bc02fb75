"""Dropout: Philox4x32-10, the same mask in every backend (flashsci.dropout_mask)."""

import triton
import triton.language as tl


@triton.jit
def dropout_keep(
    inputs, at, sizes, i0, j0, mod, F: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """The probabilities of the tile at (i0, j0) that stay, as bools: [M, N], or [N, M] if TRANSPOSED; None without
    dropout.

    One Philox call serves four neighbouring keys: counter (offset, stream, i, j // 4), lane j % 4.
    """
    if F.DROPOUT:
        key = tl.load(inputs.dropout_seed)
        offset = tl.load(inputs.dropout_seed + 1).to(tl.uint32)
        stream = at.b * sizes.heads + at.h
        i = (i0 + tl.arange(0, M)).to(tl.uint32)
        quads = (j0 // 4 + tl.arange(0, N // 4)).to(tl.uint32)
        if TRANSPOSED:
            i, quads = tl.broadcast(i[None, :], quads[:, None])
        else:
            i, quads = tl.broadcast(i[:, None], quads[None, :])
        zeros = i ^ i
        r0, r1, r2, r3 = tl.philox(key, zeros + offset, zeros + stream.to(tl.uint32), i, quads)
        bits = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # [.., .., 2, 2], lanes in order
        if TRANSPOSED:
            bits = tl.permute(bits, (0, 2, 3, 1))
            bits = tl.reshape(bits, (N, M))
        else:
            bits = tl.reshape(bits, (M, N))
        return bits >= mod.threshold.to(tl.uint32, bitcast=True)


@triton.jit
def drop(x, keep, mod):
    """x after dropout, scaled; x for None."""
    if keep is None:
        return x
    else:
        return drop_unscaled(x * mod.keep_scale, keep)


@triton.jit
def drop_unscaled(x, keep):
    """x after dropout, without the scale, which another value takes."""
    if keep is None:
        return x
    else:
        return tl.where(keep, x, 0.0)
