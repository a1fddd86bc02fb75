"""What flash_attn has beside attention: packing of padded batches, and rotary embeddings, by their formulas."""

from __future__ import annotations

import pytest
import torch

from flashsci.compat.flash_attn.padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flashsci.compat.flash_attn.rotary import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_unpad_and_pad(dtype):
    mask, x = MASK.to(dtype), torch.randn(3, 4, 2, 5)
    rows, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert torch.equal(rows, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 9, 11] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 2, 2, 4] and cu_seqlens.dtype == torch.int32
    assert longest == 2 and type(longest) is int
    assert used.tolist() == [2, 0, 2] and used.dtype == torch.int32
    assert torch.equal(pad_input(rows, indices, 3, 4), x * MASK[..., None, None])


def test_unused_rows_are_kept_and_not_counted_as_used():
    x, unused = torch.randn(3, 4, 5), torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = unpad_input(x, MASK, unused)
    assert torch.equal(rows, x[(MASK + unused).bool()]) and indices.tolist() == [0, 1, 2, 4, 9, 11]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 4, 6], 3, [2, 0, 2])


def test_sequences_that_share_a_row():
    x = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :5], x[1, :5], x[2])))
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert longest == 6 and torch.equal(pad_input(rows, indices, 3, 6)[:2, :5], x[:2, :5])


def test_rows_and_all_of_them():
    x = torch.randn(6, 2, 3, requires_grad=True)
    some, everything = index_first_axis_residual(x, torch.tensor([4, 1]))
    assert torch.equal(some, x[[4, 1]]) and torch.equal(everything, x)
    (gradient,) = torch.autograd.grad(some.sum() + 2 * everything.sum(), x)
    expected = torch.full_like(x, 2.0)
    expected[[4, 1]] = 3.0
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_by_index(dtype):
    """transformers gives int32 indices when it decodes."""
    x, values = torch.randn(6, 2, 3), torch.randn(2, 2, 3)
    indices = torch.tensor([4, 1], dtype=dtype)
    assert torch.equal(index_first_axis(x, indices), x[[4, 1]])
    put = index_put_first_axis(values, indices, 6)
    assert torch.equal(put[[4, 1]], values) and put[[0, 2, 3, 5]].eq(0).all()


def test_gradients_of_packing():
    x, mask = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True), MASK
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, mask)[0], x)
    indices = unpad_input(x, mask)[1]
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: pad_input(rows, indices, 3, 4), rows)
    assert torch.autograd.gradgradcheck(lambda rows: pad_input(rows**2, indices, 3, 4), rows)


# Rotary embeddings

ANGLES = torch.outer(torch.arange(12.0), torch.tensor([1.0, 0.4, 0.1])).double()


def turned(x, position, interleaved=False, angles=ANGLES):
    """x [..., S, H, D] in fp64: pairs of its first R dims as complex numbers, times e^(i angle) of their positions [..., S]."""
    x, half = x.double(), angles.shape[1]
    y = x[..., : 2 * half]
    a, b = (y[..., ::2], y[..., 1::2]) if interleaved else (y[..., :half], y[..., half:])
    z = torch.complex(a, b) * torch.exp(1j * angles[position].unsqueeze(-2))
    pair = (z.real, z.imag)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((y, x[..., 2 * half :]), -1)


OFFSETS = {"none": 0, "int": 3, "tensor": torch.tensor([2, 0, 5], dtype=torch.int32)}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("dim", [6, 9])
def test_rotation(dim, offsets, interleaved):
    x = torch.randn(3, 5, 2, dim, dtype=torch.float64, requires_grad=True)
    first = torch.as_tensor(OFFSETS[offsets]).expand(3)
    position = first[:, None] + torch.arange(5)
    table = ANGLES.cos(), ANGLES.sin()
    found = apply_rotary_emb(x, *table, interleaved, seqlen_offsets=OFFSETS[offsets])
    expected = turned(x, position, interleaved)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(found)
    gradients = [torch.autograd.grad(y, x, dout)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    back = apply_rotary(found, *table, OFFSETS[offsets], interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offsets", OFFSETS)
def test_packed_rotation(offsets):
    lengths = torch.tensor([4, 0, 3])
    cu_seqlens = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    x = torch.randn(7, 2, 8, dtype=torch.float64)
    first = torch.as_tensor(OFFSETS[offsets]).expand(3)
    position = torch.cat([f + torch.arange(n) for f, n in zip(first, lengths, strict=True)])
    found = apply_rotary_emb(
        x, ANGLES.cos(), ANGLES.sin(), seqlen_offsets=OFFSETS[offsets], cu_seqlens=cu_seqlens, max_seqlen=4
    )
    torch.testing.assert_close(found, turned(x, position), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_rounds_once(dtype):
    """Half a unit in the last place of the result, and what float32 adds to it."""
    x = torch.randn(2, 5, 2, 8).to(dtype)
    cos, sin = ANGLES.cos().to(dtype), ANGLES.sin().to(dtype)
    found = apply_rotary_emb(x, cos, sin)
    a, b = x.double()[..., :3], x.double()[..., 3:6]
    cos, sin = cos[:5, None].double(), sin[:5, None].double()
    exact = torch.cat((a * cos - b * sin, a * sin + b * cos, x.double()[..., 6:]), -1)
    terms = torch.cat((a.abs() + b.abs(), a.abs() + b.abs(), 0 * x[..., 6:]), -1)
    allowed = 0.5 * torch.finfo(dtype).eps * exact.abs() + 2 * torch.finfo(torch.float32).eps * terms
    assert found.dtype == dtype and ((found.double() - exact).abs() <= allowed + 1e-7 * allowed).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_by_tables_of_every_row(interleaved):
    x = torch.randn(3, 5, 2, 9, dtype=torch.float64)
    position = torch.tensor([[2], [0], [6]]) + torch.arange(5)
    cos, sin = ANGLES.cos()[position], ANGLES.sin()[position]
    found = apply_rotary_emb_torch(x, cos, sin, interleaved)
    torch.testing.assert_close(found, turned(x, position, interleaved), rtol=1e-12, atol=1e-12)
    plain = apply_rotary_emb_torch(x, cos[0], sin[0], interleaved)
    torch.testing.assert_close(plain, turned(x, position[0], interleaved), rtol=1e-12, atol=1e-12)
    quarter = apply_rotary_emb_torch(x[..., :6], torch.zeros(5, 3), torch.ones(5, 3), interleaved)
    torch.testing.assert_close(rotate_half(x[..., :6], interleaved), quarter)


def test_gradients_of_tables():
    x = torch.randn(1, 4, 1, 6, dtype=torch.float64, requires_grad=True)
    table = [f[:4].clone().requires_grad_() for f in (ANGLES.cos(), ANGLES.sin())]
    assert torch.autograd.gradcheck(apply_rotary_emb, (x, *table))


def test_rotation_in_place():
    leaf = torch.randn(2, 5, 3, 9, dtype=torch.float64, requires_grad=True)
    position, weight = torch.arange(5), torch.randn(2, 5, 3, 9).double()
    x = leaf * 1
    found = apply_rotary_emb(x, ANGLES.cos(), ANGLES.sin(), inplace=True)
    assert found is x
    torch.testing.assert_close(x, turned(leaf, position), rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(y, leaf, weight)[0] for y in (x, turned(leaf, position))]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


REFUSED_BY_AUTOGRAD = {
    "leaf": lambda leaf: leaf,
    "view of a leaf": lambda leaf: leaf.view(leaf.shape),
    "unbind": lambda leaf: (leaf[None] * 1).unbind(0)[0],
    "split": lambda leaf: (leaf * 1).split(leaf.shape[0])[0],
}


@pytest.mark.parametrize("kind", REFUSED_BY_AUTOGRAD)
@pytest.mark.parametrize("what", ["x", "qkv", "grouped", "kv"])
def test_in_place_where_autograd_lets_nobody_write(what, kind):
    """What is returned lies in x's memory and has the gradient."""
    shape = {"x": (2, 5, 3, 9), "qkv": (2, 5, 3, 2, 9), "grouped": (2, 5, 4, 9), "kv": (2, 5, 2, 2, 9)}[what]
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    before = leaf.detach().clone()
    x, table = REFUSED_BY_AUTOGRAD[kind](leaf), (ANGLES.cos(), ANGLES.sin())
    found = {
        "x": lambda: apply_rotary_emb(x, *table, inplace=True),
        "qkv": lambda: apply_rotary_emb_qkv_(x, *table),
        "grouped": lambda: apply_rotary_emb_qkv_(x, *table, num_heads_q=2),
        "kv": lambda: apply_rotary_emb_kv_(x, *table),
    }[what]()
    y, position = before.clone().requires_grad_(), torch.arange(5)
    expected = {
        "x": lambda: turned(y, position),
        "qkv": lambda: torch.stack((turned(y[:, :, 0], position), turned(y[:, :, 1], position), y[:, :, 2]), 2),
        "grouped": lambda: torch.cat((turned(y[:, :, :3], position), y[:, :, 3:]), 2),
        "kv": lambda: torch.stack((turned(y[:, :, 0], position), y[:, :, 1]), 2),
    }[what]()
    assert found.data_ptr() == x.data_ptr() and torch.equal(found, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad(a, b, weight)[0] for a, b in ((found, leaf), (expected, y))]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", REFUSED_BY_AUTOGRAD)
def test_in_place_under_a_transform_is_right_or_raises(kind):
    x, weight = torch.randn(2, 2, 5, 3, 9, dtype=torch.float64).unbind(0)
    table = ANGLES.cos(), ANGLES.sin()

    def loss(y, inplace):
        y = REFUSED_BY_AUTOGRAD[kind](y) if inplace else y
        return (apply_rotary_emb(y, *table, inplace=inplace) * weight).sum()

    expected = torch.func.grad(lambda y: loss(y, False))(x)
    try:
        found = torch.func.grad(lambda y: loss(y, True))(x.clone())
    except RuntimeError as error:
        assert "in-place" in str(error) or "inplace" in str(error)
    else:
        torch.testing.assert_close(found, expected)


def test_a_leaf_in_place_outside_of_autograd_is_the_leaf():
    leaf = torch.randn(2, 5, 3, 9, requires_grad=True)
    with torch.no_grad():
        assert apply_rotary_emb(leaf, ANGLES.cos(), ANGLES.sin(), inplace=True) is leaf


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_projections_in_place(grouped, tables):
    heads, dims = (4, 2), 9
    shape = (2, 5, 4 + 2 + 2, dims) if grouped else (2, 5, 3, 4, dims)
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    qkv, weight = leaf * 1, torch.randn(shape).double()
    angles_k = ANGLES if tables == 1 else 2 * ANGLES
    more = () if tables == 1 else (angles_k.cos(), angles_k.sin())
    found = apply_rotary_emb_qkv_(
        qkv, ANGLES.cos(), ANGLES.sin(), *more, seqlen_offsets=2, num_heads_q=heads[0] if grouped else None
    )
    q, k, v = leaf.split((4, 2, 2), 2) if grouped else leaf.unbind(2)
    position = torch.arange(2, 7)
    parts = turned(q, position), turned(k, position, angles=angles_k), v
    expected = torch.cat(parts, 2) if grouped else torch.stack(parts, 2)
    assert found is qkv
    torch.testing.assert_close(qkv, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(y, leaf, weight)[0] for y in (qkv, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_keys_in_place():
    kv = torch.randn(2, 5, 2, 3, 6).double()
    k, v = (x.clone() for x in kv.unbind(2))
    assert apply_rotary_emb_kv_(kv, ANGLES.cos(), ANGLES.sin(), True, 1) is kv
    expected = torch.stack((turned(k, torch.arange(1, 6), True), v), 2)
    torch.testing.assert_close(kv, expected, rtol=1e-12, atol=1e-12)


TABLE = torch.ones(6, 3)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: apply_rotary_emb(torch.ones(2, 5, 6), TABLE, TABLE), r"\[B, S, H, D\]"),
        (lambda: apply_rotary_emb(torch.ones(1, 5, 2, 6), TABLE, TABLE, cu_seqlens=TABLE), r"\[T, H, D\]"),
        (lambda: apply_rotary_emb(torch.ones(1, 5, 2, 4), TABLE, TABLE), "head dim 4"),
        (lambda: apply_rotary_emb(torch.ones(1, 5, 2, 6), TABLE, TABLE[:5]), r"\[6, 3\] and \[5, 3\]"),
        (lambda: apply_rotary_emb(torch.ones(1, 5, 2, 6), TABLE, TABLE, seqlen_offsets=2), "7 are needed"),
        (lambda: apply_rotary_emb_qkv_(torch.ones(1, 5, 4, 6), TABLE, TABLE), "num_heads_q=None"),
        (lambda: apply_rotary_emb_kv_(torch.ones(1, 5, 3, 2, 6), TABLE, TABLE), r"\[B, S, 2, H, D\]"),
        (
            lambda: RotaryEmbedding(6)(torch.ones(2, 5, 3, 1, 6), seqlen_offset=torch.tensor([0, 1])),
            "give max_seqlen",
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def frequencies(dim, base):
    return torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)]).double()


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_module_rotates_a_projection(interleaved, offset):
    rotary = RotaryEmbedding(6, base=100.0, interleaved=interleaved)
    qkv = torch.randn(2, 5, 3, 2, 8)
    expected = qkv.double()
    angles = torch.outer(torch.arange(8.0).double(), frequencies(6, 100.0))
    for part in (0, 1):
        expected[:, :, part] = turned(qkv[:, :, part], offset + torch.arange(5), interleaved, angles)
    found = rotary(qkv, seqlen_offset=offset)
    assert found is qkv and not list(rotary.parameters()) and not rotary.state_dict()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=3e-6)


def test_module_rotates_queries_and_keys_at_offsets_of_their_own():
    rotary, angles = (
        RotaryEmbedding(8),
        torch.outer(torch.arange(9.0).double(), frequencies(8, 1e4)),
    )
    q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 2, 8)
    position = torch.tensor([[0], [4]]) + torch.arange(5)
    expected_q, expected_k = (turned(x, position, False, angles) for x in (q, kv[:, :, 0]))
    v = kv[:, :, 1].clone()
    found_q, found_kv = rotary(q, kv, seqlen_offset=torch.tensor([0, 4]), max_seqlen=9)
    torch.testing.assert_close(found_q.double(), expected_q, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(found_kv[:, :, 0].double(), expected_k, rtol=1e-6, atol=3e-6)
    assert torch.equal(found_kv[:, :, 1], v)


def test_module_scales_by_position():
    """xPos: q up, k down by ((2 i + 0.4 d) / 1.4 d)^((p - S // 2) / base), so that products depend on distances alone."""
    dim, seq, base = 6, 7, 4.0
    rotary = RotaryEmbedding(dim, scale_base=base)
    qkv = torch.randn(1, seq, 3, 2, dim)
    angles = torch.outer(torch.arange(seq).double(), frequencies(dim, 1e4))
    zeta = (torch.arange(0, dim, 2).double() + 0.4 * dim) / (1.4 * dim)
    scale = zeta ** ((torch.arange(seq).double()[:, None] - seq // 2) / base)
    scale = torch.cat((scale, scale), -1)[:, None]
    q, k = (turned(qkv[:, :, n], torch.arange(seq), False, angles) for n in (0, 1))
    found = rotary(qkv)
    torch.testing.assert_close(found[:, :, 0].double(), q * scale, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(found[:, :, 1].double(), k / scale, rtol=1e-6, atol=3e-6)


def test_module_tables_grow_and_follow_the_dtype():
    rotary = RotaryEmbedding(6)
    rotary(torch.randn(1, 4, 3, 1, 6))
    short = rotary._cos_cached
    rotary(torch.randn(1, 3, 3, 1, 6))
    assert rotary._cos_cached is short
    rotary(torch.randn(1, 90, 3, 1, 6))
    long = rotary._cos_cached
    assert long.shape == (90, 3) and torch.equal(long[:4], short)
    rotary.bfloat16()(torch.randn(1, 90, 3, 1, 6).bfloat16())
    assert rotary.inv_freq.dtype == torch.bfloat16
    assert torch.equal(rotary._cos_cached, long.bfloat16()), "angles keep float32's digits"
