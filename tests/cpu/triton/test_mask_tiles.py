"""Masks that hide tiles, on the Triton kernels, interpreted: the tables, the tiles that kernels visit, all derivatives."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashsci
from flashsci.backends.triton.kernels import backward_keys, backward_queries, forward
from flashsci.call import mask_tiles as tables
from flashsci.call import plans
from flashsci.testing import Inputs, Judge, evaluate, poisoned_memory

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets without a GPU only"),
    pytest.mark.every(6),
]
TILE = tables.TILE


@pytest.fixture(autouse=True)
def tables_of_any_size(monkeypatch):
    monkeypatch.setattr(tables, "FEWEST_SCORES", 1)
    monkeypatch.setattr(tables, "FEWEST_READERS", 0)
    plans.plans.clear()
    yield
    plans.plans.clear()


@pytest.fixture
def made(monkeypatch):
    """The shapes of the masks that got a table."""
    found, table_of = [], tables.table_of

    def spy(mask):
        found.append(tuple(mask.shape))
        return table_of(mask)

    monkeypatch.setattr(tables, "table_of", spy)
    return found


def band(rows, keys, width=30):
    return (torch.arange(rows)[:, None] - torch.arange(keys)).abs() <= width


def documents(rows, keys, length=50):
    return torch.arange(rows)[:, None] // length == torch.arange(keys) // length


def prefix(rows, keys, length=70):
    j = torch.arange(keys)
    return (j < length) | (j <= torch.arange(rows)[:, None])


def graph(rows, keys, share=0.3):
    """Random tiles, each hidden, seen, or cut."""
    drawn = torch.Generator().manual_seed(7)
    seen = torch.rand(tables.tiles(rows), tables.tiles(keys), generator=drawn) < share
    cut = torch.rand(rows, keys, generator=drawn) < 0.5
    cut[:TILE] = True
    return cut & seen.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:rows, :keys]


def empty_rows(rows, keys):
    mask = band(rows, keys)
    mask[TILE : TILE + 5] = False
    mask[-70:] = False
    return mask


def heads(rows, keys):
    return torch.stack([band(rows, keys), documents(rows, keys), prefix(rows, keys), torch.zeros(rows, keys) > 0])


def padding(rows, keys):
    return (torch.arange(keys) < torch.tensor([[keys - 5], [TILE - 1]]))[:, None, None]


MASKS = {
    "band": band,
    "documents": documents,
    "prefix": prefix,
    "graph": graph,
    "empty rows": empty_rows,
    "everything hidden": lambda rows, keys: torch.zeros(rows, keys) > 0,
    "nothing hidden": lambda rows, keys: torch.zeros(rows, keys) == 0,
    "a mask for each head": heads,
    "a mask for each batch member": lambda rows, keys: heads(rows, keys)[:2, None],
    "padding": padding,
    "a mask for each key": lambda rows, keys: torch.arange(keys) % 90 < 30,
}


def kinds_of(mask):
    """0, 1 or 2 for each tile: none, some or all of it is seen."""
    rows, keys = (range(0, n, TILE) for n in mask.shape)
    cut = [[mask[i : i + TILE, j : j + TILE] for j in keys] for i in rows]
    return [[int(bool(x.any())) + int(bool(x.all())) for x in line] for line in cut]


def naive_table(mask):
    kinds, found = kinds_of(mask), []
    for lines in (kinds, [list(line) for line in zip(*kinds, strict=True)]):
        lists = [[2 * t + kind // 2 for t, kind in enumerate(line) if kind] for line in lines]
        for line in lines:
            found += [sum(map(bool, line[:t])) for t in range(len(line) + 1)]
        for line, listed in zip(lines, lists, strict=True):
            found += listed + [0] * (len(line) - len(listed))
    found += range(len(kinds) * len(kinds[0]))  # every tile has bits
    return torch.tensor(found, dtype=torch.int32)


def naive_bits(mask):
    """Four words for each row of each tile."""
    rows, keys = (tables.tiles(n) for n in mask.shape)
    high = 1 if len(mask) == 1 else TILE
    padded = torch.zeros(rows * high, keys * TILE, dtype=torch.int64)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    words = padded.view(rows, high, keys, 4, 32).permute(0, 2, 1, 3, 4) << torch.arange(32)
    return words.sum(-1).to(torch.int32).flatten()


def require_table(table, mask):
    lists = naive_table(mask)
    assert torch.equal(table[: len(lists)], lists)
    assert torch.equal(table[tables.lists_length(*mask.shape) :], naive_bits(mask))


@pytest.mark.parametrize(
    "sizes", ((300, 533), (128, 128), (1, 257), (129, 1), (512, 384), (140, 262), (260, 270)), ids=str
)
@pytest.mark.parametrize("name", MASKS)
def test_the_table_is_that_of_the_tiles(name, sizes):
    mask = MASKS[name](*sizes)
    mask = mask[(None,) * (2 - mask.dim())]
    table = tables.table_of(mask)
    assert table.shape == (*mask.shape[:-2], 1, tables.table_length(*mask.shape[-2:]))
    blocks = mask.reshape(-1, *mask.shape[-2:])
    for found, block in zip(table.reshape(len(blocks), -1), blocks, strict=True):
        require_table(found, block)


def test_a_repeated_mask_has_one_table():
    mask = graph(300, 333)
    for given in (mask.expand(2, 3, 300, 333), mask[:1].expand(2, 3, 300, 333)):
        table = tables.table_of(given)
        once = mask if given.stride(-2) else mask[:1]
        assert table.shape[:-1] == (1, 1, 1)
        require_table(table[0, 0, 0], once)
    for pitch in (335, 336, 352):
        require_table(tables.table_of(torch.nn.functional.pad(mask, (0, pitch - 333), value=True)[:, :333])[0], mask)
    transposed = graph(333, 300).mT
    require_table(tables.table_of(transposed)[0], transposed)


SIZES = (140, 265)


def inputs(mask, rows=SIZES[0], keys=SIZES[1], bias=None, group=2, dtype=torch.float32, **fields):
    drawn = torch.Generator().manual_seed(3)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=drawn).to(dtype)

    q, k, v = normal(2, 4, rows, 16), normal(2, 4 // group, keys, 16), normal(2, 4 // group, keys, 8)
    fields.setdefault("dout", normal(2, 4, rows, 8))
    fields.setdefault("dlse", normal(2, 4, rows, dtype=torch.float32))
    return Inputs(q, k, v, bias=None if bias is None else normal(*bias), mask=mask, **fields)


CALLS = {
    **{name: lambda make=make: inputs(make(*SIZES)) for name, make in MASKS.items()},
    "bf16": lambda: inputs(band(*SIZES), dtype=torch.bfloat16),
    "causal": lambda: inputs(documents(*SIZES), options={"causal": True}),
    "causal, nothing hidden": lambda: inputs(torch.ones(*SIZES) > 0, options={"causal": True}),
    "causal, lower right": lambda: inputs(graph(*SIZES), options={"causal": True, "align": "lower_right"}),
    "window": lambda: inputs(graph(*SIZES, 0.6), options={"window": (40, 10)}),
    "a window, nothing hidden": lambda: inputs(torch.ones(*SIZES) > 0, options={"window": (100, 10)}),
    "a window beyond the keys": lambda: inputs(graph(300, 70, 0.6), 300, 70, options={"window": (20, 3)}),
    "padding and a window": lambda: inputs(padding(*SIZES), options={"window": (40, 10)}),
    "bias": lambda: inputs(band(*SIZES), bias=(2, 4, *SIZES)),
    "bias shared by the batch": lambda: inputs(heads(*SIZES), bias=(1, 4, *SIZES)),
    "bias shared by members of different masks": lambda: inputs(heads(*SIZES)[:2, None], bias=(1, 1, *SIZES)),
    "bias of keys": lambda: inputs(documents(*SIZES), bias=(2, 4, 1, SIZES[1])),
    "bias of queries": lambda: inputs(documents(*SIZES), bias=(2, 4, SIZES[0], 1)),
    "padding and a bias": lambda: inputs(padding(*SIZES), bias=(1, 1, *SIZES)),
    "softcap": lambda: inputs(graph(*SIZES), options={"softcap": 3.0}),
    "huge scores": lambda: inputs(band(*SIZES), options={"scale": 1e9}, dout=None, dlse=None),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers(name, made):
    judge = Judge(CALLS[name]())
    with poisoned_memory():
        found = evaluate(judge.inputs, "triton")
    judge.require(found)
    assert len(made) == 1  # for the forward; the backward has it


SECOND = {
    "band": lambda: (band(131, 140), None),
    "documents and a bias": lambda: (documents(131, 140), (2, 4, 131, 140)),
    "bias shared by the batch": lambda: (heads(131, 140), (1, 4, 131, 140)),
    "padding": lambda: (padding(131, 140), None),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name, made):
    mask, bias = SECOND[name]()
    given = inputs(mask, 131, 140, bias)
    tangents = {f"t{n}": torch.randn_like(x) for n in ("q", "k", "v", "bias") if (x := getattr(given, n)) is not None}
    judge = Judge(inputs(mask, 131, 140, bias, tangents=tangents))
    with poisoned_memory():
        found = evaluate(judge.inputs, "triton")
    judge.require(found)
    assert made


def test_kernels_visit_the_listed_tiles_alone(monkeypatch):
    """Steps of each kernel over a band: those of its listed tiles, of 32 queries or 16 keys."""
    steps = {}

    def counted(module, step, *given):
        steps[module] = steps.get(module, 0) + 1
        return step(*given)

    for module in (forward, backward_queries, backward_keys):
        name = "query_step" if module is backward_keys else "key_step"

        monkeypatch.setattr(module, name, partial(counted, module, getattr(module, name)))
    q, k, v = (torch.randn(1, 1, 512, 16, requires_grad=True) for _ in range(3))
    mask = band(512, 512, 10)
    out = flashsci.attention(q, k, v, mask=mask, backend="triton")
    torch.autograd.grad(out.sum(), (q, k, v))
    listed = sum(kind > 0 for line in kinds_of(mask) for kind in line)
    assert listed == 3 * 4 - 2
    # A tile of the table is four query tiles and eight key tiles of the interpreter's.
    assert steps == dict.fromkeys((forward, backward_queries, backward_keys), 4 * 8 * listed)


@pytest.mark.parametrize("hidden", (0, 1))
def test_tiles_that_hide_nothing_are_not_read(hidden):
    """The bits change behind the lists: only the tiles that are listed as partial follow."""
    q, k, v = (torch.randn(1, 1, 256, 16) for _ in range(3))
    mask = torch.ones(256, 256, dtype=torch.bool)
    mask[:, :hidden] = False
    given = flashsci.BlockMask.from_mask(mask)
    due = flashsci.attention(q, k, v, mask=mask, backend="reference")
    lists = tables.lists_length(256, 256)
    given.tiles[..., lists:] = torch.randint(1 << 30, (given.tiles.shape[-1] - lists,))
    given.mask.zero_()
    found = flashsci.attention(q, k, v, mask=given, backend="triton")
    assert torch.allclose(found, due, atol=1e-5) == (hidden == 0)


def test_values_of_skipped_tiles_do_not_matter():
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    mask = documents(256, 256, TILE)
    due = flashsci.attention(q, k, v, mask=mask, backend="triton")
    k[..., :TILE, :], v[..., :TILE, :] = torch.nan, torch.nan
    found = flashsci.attention(q, k, v, mask=mask, backend="triton")
    assert torch.equal(found[..., TILE:, :], due[..., TILE:, :]) and found[..., :TILE, :].isnan().all()


def gradients(call, *leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = call(*leaves)
    return out, *torch.autograd.grad(out.square().sum(), leaves)


def close(found, due):
    return all(torch.allclose(x, y, atol=2e-5, rtol=1e-4) for x, y in zip(found, due, strict=True))


def test_vmap_over_a_mask(made):
    q, k, v = (torch.randn(3, 2, 150, 16) for _ in range(3))
    masks = torch.stack([band(150, 150), documents(150, 150), graph(150, 150)])

    def step(backend):
        def of_one(q, k, v, mask):
            return flashsci.attention(q, k, v, mask=mask, backend=backend)

        return gradients(lambda *rows: torch.func.vmap(of_one)(*rows, masks), q, k, v)

    assert close(step("triton"), step("reference")) and made
    block = flashsci.BlockMask.from_mask(masks[0])
    found, due = (
        torch.func.vmap(partial(flashsci.attention, k=k[0], v=v[0], mask=mask, backend=backend))(q)
        for mask, backend in ((block, "triton"), (masks[0], "reference"))
    )
    assert close([found], [due])


def test_forward_mode(made):
    q, k, v, tq = (torch.randn(1, 2, 150, 16) for _ in range(4))
    mask = band(150, 150)
    found, due = (
        torch.func.jvp(partial(flashsci.attention, k=k, v=v, mask=mask, backend=backend), (q,), (tq,))
        for backend in ("triton", "reference")
    )
    assert close(found, due) and made


@pytest.mark.parametrize("as_block", (False, True))
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint(as_block, reentrant):
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    mask = band(100, 100)
    given = flashsci.BlockMask.from_mask(mask) if as_block else mask

    def call(q, k, v):
        return flashsci.attention(q, k, v, mask=given, backend="triton")

    due = gradients(call, q, k, v)
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = checkpoint(call, *leaves, use_reentrant=reentrant)
        out.square().sum().backward()
        found = out, *(x.grad for x in leaves)
        assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))


def test_a_repeated_call_with_a_block_mask_is_recognised(monkeypatch):
    found, repeated = [], plans.repeated

    def spied(*given):
        again, call = repeated(*given)
        found.append(again is not None)
        return again, call

    monkeypatch.setattr(sys.modules["flashsci.api.attention"], "repeated", spied)
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    for length in (20, 30, 40):
        given = flashsci.BlockMask.from_mask(documents(100, 100, length))
        flashsci.attention(q, k, v, mask=given, backend="triton")
    assert found[-1]


def test_repeated_calls_read_the_mask_of_each():
    q, k, v = (torch.randn(1, 2, 150, 16) for _ in range(3))
    for mask in (band(150, 150), documents(150, 150), prefix(150, 150), graph(150, 150)):
        for given in (mask, flashsci.BlockMask.from_mask(mask)):
            found = gradients(lambda *rows, x=given: flashsci.attention(*rows, mask=x, backend="triton"), q, k, v)
            due = gradients(lambda *rows, x=mask: flashsci.attention(*rows, mask=x, backend="reference"), q, k, v)
            assert close(found, due)


@pytest.mark.parametrize("as_block", (False, True))
def test_the_compiler_computes_the_same(as_block):
    q, k, v = (torch.randn(1, 2, 150, 16) for _ in range(3))
    mask = documents(150, 150)
    given = flashsci.BlockMask.from_mask(mask) if as_block else mask

    def call(mask, *rows):
        return flashsci.attention(*rows, mask=mask, backend="triton")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, due = (gradients(lambda *rows, f=f: f(given, *rows), q, k, v) for f in (compiled, call))
    assert close(found, due)


def test_the_op_has_a_fake_kernel_and_a_rule_for_vmap():
    torch.library.opcheck(
        torch.ops.flashsci.triton_mask_tiles.default, (graph(260, 140),), test_utils="test_faketensor"
    )
    masks = torch.stack([band(260, 140), graph(260, 140)], 1)
    found = torch.func.vmap(tables.table_of, in_dims=1)(masks)
    assert torch.equal(found, torch.stack([tables.table_of(masks[:, n]) for n in (0, 1)]))


def test_small_calls_and_other_backends_make_no_table(monkeypatch, made):
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    for backend in ("reference", "sdpa"):
        flashsci.attention(q, k, v, mask=band(100, 100), backend=backend)
    monkeypatch.setattr(tables, "FEWEST_SCORES", 1 << 26)
    flashsci.attention(q, k, v, mask=band(100, 100), backend="triton")
    assert not made
