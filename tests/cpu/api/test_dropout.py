"""Philox4x32 and the one dropout mask of all backends."""

import itertools

import pytest
import torch

import flashsci
from flashsci.api.dropout import keep_threshold, philox4x32

SEED = torch.tensor([123456789012345, 42])

# Random123, examples/kat_vectors: rounds, counter, key, result of philox4x32.
KNOWN = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize("rounds, counter, key, result", KNOWN)
def test_known_answers(rounds, counter, key, result):
    found = philox4x32(words(key), words(counter), rounds)
    assert [int(x) for x in found] == [int(x) for x in words(result)]


def one(seed, offset, row, i, j, p):
    """Whether an entry is kept, from Python integers alone."""
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    c = [offset & 0xFFFFFFFF, row, i, j // 8]
    for _ in range(7):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    word = c[j % 8 // 2]
    return (word >> 16 if j % 2 else word & 0xFFFF) >= round(p * 2**16)


@pytest.mark.parametrize("seed", [(7, 0), (-3, 5), (2**62 + 17, -1), (123456789012345, 2**40 + 9)])
def test_counter_layout(seed):
    """key = seed, counter = (offset, b * Hq + h, i, j // 8), half j % 2 of word j % 8 // 2; negative seeds count as
    unsigned."""
    mask = flashsci.dropout_mask(torch.tensor(seed), 0.3, (2, 3, 2, 19))
    unsigned = [s & (2**64 - 1) for s in seed]
    for b, h, i, j in itertools.product(*map(range, mask.shape)):
        assert bool(mask[b, h, i, j]) == one(*unsigned, b * 3 + h, i, j, 0.3)


def test_threshold():
    """The probability is p to within 2^-17; below that nothing is dropped, and of 2^16 numbers one is always kept."""
    for p in (0.0, 1e-6, 0.1, 0.3, 0.5, 1 / 3, 0.9, 0.99999):
        assert abs(keep_threshold(p) / 2**16 - p) <= 2**-17
    assert keep_threshold(2**-17) == 0 and keep_threshold(1.01 * 2**-17) == 1
    assert keep_threshold(1 - 2**-20) == 2**16 - 1


def test_statistics():
    """Half a million draws: the share kept, and no correlation along rows, columns, heads or seeds."""
    for p in (0.1, 0.5, 0.9):
        mask = flashsci.dropout_mask(SEED, p, (2, 4, 256, 256)).double()
        deviation = (p * (1 - p) / mask.numel()) ** 0.5
        assert abs(mask.mean() - (1 - p)) < 5 * deviation
        x = (mask - mask.mean()) / mask.std()
        other = flashsci.dropout_mask(SEED + torch.tensor([0, 1]), p, (2, 4, 256, 256)).double()
        pairs = (
            x[..., 1:] * x[..., :-1],
            x[..., 1:, :] * x[..., :-1, :],
            x[:, 1:] * x[:, :-1],
            x[1] * x[0],
            x[..., 2:] * x[..., :-2],
            x[..., 8:] * x[..., :-8],
            x * (other - other.mean()) / other.std(),
        )
        for product in pairs:
            assert abs(product.mean()) < 5 / product.numel() ** 0.5


def test_batch_offset_and_shapes():
    whole = flashsci.dropout_mask(SEED, 0.5, (3, 2, 4, 9))
    assert torch.equal(flashsci.dropout_mask(SEED, 0.5, (2, 4, 9), batch_offset=2), whole[2])
    assert torch.equal(flashsci.dropout_mask(SEED, 0.5, (3, 1, 2, 4, 9)).squeeze(1), whole)
    assert torch.equal(flashsci.dropout_mask(SEED, 0.5, (4, 9)), whole[0, 0])
    assert torch.equal(flashsci.dropout_mask(SEED, 0.5, (2, 4, 5)), whole[0, :, :, :5]), "a prefix of keys is a prefix"
    assert flashsci.dropout_mask(SEED, 0.0, (2, 3)).all()


def test_arguments():
    for options in (
        (SEED.int(), 0.5, (2, 2)),
        (SEED[:1], 0.5, (2, 2)),
        (SEED, 1.0, (2, 2)),
        (SEED, -0.1, (2, 2)),
        (SEED, 0.5, (2,)),
    ):
        with pytest.raises(ValueError):
            flashsci.dropout_mask(*options)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_drops_what_the_mask_says(backend, packed):
    """With v the identity, out is P o R: zero where the mask says, times 1 / (1 - p) elsewhere."""
    p, n = 0.5, 8
    q, k, v = torch.randn(2, 2, n, n), torch.randn(2, 2, n, n), torch.eye(n).expand(2, 2, n, n)
    if packed:
        offsets = torch.tensor([0, n, 2 * n], dtype=torch.int32)
        flat = [x.transpose(1, 2).reshape(2 * n, 2, n) for x in (q, k, v)]
        out = flashsci.varlen_attention(*flat, offsets, dropout_p=p, dropout_seed=SEED, backend=backend)
        out = out.view(2, n, 2, n).transpose(1, 2)
    else:
        out = flashsci.attention(q, k, v, dropout_p=p, dropout_seed=SEED, backend=backend)
    keep = flashsci.dropout_mask(SEED, p, (2, 2, n, n))
    plain = flashsci.attention(q, k, v, backend="reference")
    torch.testing.assert_close(out, torch.where(keep, plain / (1 - p), torch.zeros(())), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_seed_drawn_when_none_is_given(backend):
    """From torch's generator: reproducible by manual_seed, different from call to call, mean preserved."""
    x = torch.randn(1, 2, 16, 8)
    call = lambda: flashsci.attention(x, x, x, dropout_p=0.5, backend=backend)  # noqa: E731
    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first) and not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_lse_knows_nothing_of_dropout(backend):
    x = torch.randn(1, 2, 16, 8)
    options = {"return_lse": True, "backend": backend}
    _, lse = flashsci.attention(x, x, x, dropout_p=0.5, dropout_seed=SEED, **options)
    _, plain = flashsci.attention(x, x, x, **options)
    assert torch.equal(lse, plain)


def test_gradients_see_the_same_mask():
    """Finite differences of a call with a fixed seed, in fp64."""
    leaves = [torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(q, k, v):
        return flashsci.attention(q, k, v, dropout_p=0.5, dropout_seed=SEED, backend="reference")

    assert torch.autograd.gradcheck(call, leaves)
