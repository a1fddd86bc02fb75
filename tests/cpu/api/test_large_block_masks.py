"""Block masks that are not held as a whole: the memory they take, their tensors, and calls by their tables."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import flashsci
from flashsci import BlockMask
from flashsci.api import block_mask
from flashsci.call import mask_blocks
from flashsci.call import mask_tiles as tables


@pytest.fixture
def never_held(monkeypatch):
    monkeypatch.setattr(block_mask, "MOST_HELD", 0)
    monkeypatch.setattr(mask_blocks, "BLOCK", 20_000)


def drawn(*shape):
    """A mask with tiles of every kind."""
    generator = torch.Generator().manual_seed(3)
    *lead, rows, keys = shape
    kinds = torch.randint(3, (*lead, tables.tiles(rows), tables.tiles(keys)), generator=generator)
    kinds = kinds.repeat_interleave(tables.TILE, -1).repeat_interleave(tables.TILE, -2)[..., :rows, :keys]
    return (kinds == 2) | ((kinds == 1) & (torch.rand(shape, generator=generator) < 0.5))


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that an op returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("causal", (False, True))
def test_documents_never_take_the_memory_of_their_scores(causal):
    length = 6000  # 36 million scores
    ids = torch.arange(length) // 500
    with Largest() as largest:
        made = BlockMask.from_documents(ids, causal=causal)
    assert made.mask is None and made.shape == (length, length) and made.extent.untyped_storage().nbytes() == 0
    assert largest.bytes <= 2 * mask_blocks.BLOCK, "a block of rows, in whole tiles"
    assert made.tiles.nbytes < length**2 / 20, "bits of partial tiles alone"
    due = ids[:, None] == ids
    assert torch.equal(made.dense(), due.tril() if causal else due)


def test_functions_are_called_for_blocks_of_rows():
    length, most = 3000, []

    def near(b, h, q, k):
        most.append(q.numel() * k.numel())
        return (q - k).abs() < 100

    with Largest() as largest:
        made = BlockMask.from_function(near, 1, 1, length, length)
    assert made.mask is None and len(most) > 2 and max(most) <= mask_blocks.BLOCK
    assert largest.bytes <= 8 * mask_blocks.BLOCK  # distances are int64
    i = torch.arange(length)
    assert torch.equal(made.dense()[0, 0], (i[:, None] - i).abs() < 100)


@pytest.mark.parametrize("shape", [(200, 333), (2, 128, 128), (2, 3, 260, 270), (1, 1, 140, 1), (3, 384, 256)], ids=str)
def test_the_tensor_comes_back(shape, never_held):
    mask = drawn(*shape)
    made = BlockMask.from_mask(mask)
    assert made.mask is None and made.shape == shape and torch.equal(made.dense(), mask)
    repeated = BlockMask.from_mask(mask.expand(4, *shape))
    assert repeated.shape == (4, *shape) and repeated.tiles.shape[0] == 1
    assert torch.equal(repeated.dense(), mask.expand(4, *shape))
    for empty in (False, True):
        assert (BlockMask.from_mask(torch.full(shape, empty)).dense() == empty).all()


def test_a_mask_of_keys_is_held(never_held):
    assert BlockMask.from_mask(torch.rand(2, 1, 1, 90) < 0.5).mask is not None


def test_it_is_stored_and_moved_without_its_scores(never_held):
    made = BlockMask.from_mask(drawn(2, 1, 300, 200))
    stored = io.BytesIO()
    torch.save(tuple(made), stored)
    stored.seek(0)
    again = BlockMask(*torch.load(stored, weights_only=True))
    cloned = pytree.tree_map_only(torch.Tensor, torch.clone, made)
    for other in (again, pickle.loads(pickle.dumps(made)), made.to("cpu"), cloned):
        assert other.shape == made.shape and torch.equal(other.dense(), made.dense())
    assert made.to("meta").shape == made.shape
    held = BlockMask(made.dense(), None)
    assert held.to("cpu").mask is not None


def step(q, k, v, mask, backend):
    out = flashsci.attention(q, k, v, mask=mask, backend=backend)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


def rows(q=260, k=270, dim=16):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 2, n, dim, generator=generator).requires_grad_() for n in (q, k, k)]


@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto", "triton"])
def test_calls_and_their_repeats(backend, never_held):
    if backend == "triton":
        pytest.importorskip("triton")
    given = rows()
    mask = drawn(2, 1, 260, 270)
    mask[..., :5] = True  # every row sees a key
    made = BlockMask.from_mask(mask)
    due = step(*given, mask, "reference")
    for _ in range(3):
        for x, y in zip(step(*given, made, backend), due, strict=True):
            torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(40, 50, 16), (33, 60, 136)], ids=["short", "wide"])
def test_kernels_that_read_masks_get_the_tensor(sizes, never_held):
    """Triton's kernels of short sequences and of wide heads have no tiles to skip."""
    pytest.importorskip("triton")
    given = rows(*sizes)
    mask = drawn(2, 1, *sizes[:2])
    mask[..., :5] = True
    due = step(*given, mask, "reference")
    for x, y in zip(step(*given, BlockMask.from_mask(mask), "triton"), due, strict=True):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_backward_of_its_own(backend, never_held):
    if backend == "triton":
        pytest.importorskip("triton")
    q, k, v = (x.detach() for x in rows())
    mask = drawn(260, 270)
    mask[..., :5] = True
    out, lse = flashsci.attention(q, k, v, mask=mask, backend="reference", return_lse=True)
    due = flashsci.attention_backward(torch.ones_like(out), q, k, v, out, lse, mask=mask, backend="reference")
    made = BlockMask.from_mask(mask)
    found = flashsci.attention_backward(torch.ones_like(out), q, k, v, out, lse, mask=made, backend=backend)
    for x, y in zip(found[:3], due[:3], strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)
    assert flashsci.explain(q, k, v, mask=made).problem.mask_tiles


def test_another_size_is_refused(never_held):
    q = torch.randn(1, 2, 128, 16)
    made = BlockMask.from_mask(drawn(127, 127))
    with pytest.raises(ValueError, match="mask of shape"):
        flashsci.attention(q, q, q, mask=made)


def test_the_compiler_takes_it(never_held):
    given = rows()
    made = BlockMask.from_mask(drawn(260, 270))
    compiled = torch.compile(lambda q, k, v, m: flashsci.attention(q, k, v, mask=m), backend="eager")
    torch.testing.assert_close(compiled(*given, made), flashsci.attention(*given, mask=made.dense()))
