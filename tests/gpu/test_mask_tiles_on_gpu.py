"""Tables of the tiles of a mask on a GPU: the tables, numbers in every dtype, repeated results, CUDA graphs, the compiler."""

import pytest
import torch

import flashsci
from flashsci.call import mask_tiles as tables
from flashsci.call import plans
from flashsci.choice import backends
from flashsci.testing import Inputs, Judge, evaluate, poisoned_memory
from tests.support import judged_cases

pytestmark = pytest.mark.gpu
SIZES = (517, 701)


@pytest.fixture(autouse=True)
def tables_of_any_size(monkeypatch):
    judged_cases.require("triton")
    monkeypatch.setattr(tables, "FEWEST_SCORES", 1)
    monkeypatch.setattr(tables, "FEWEST_READERS", 0)
    backends.load("triton")
    plans.plans.clear()
    yield
    plans.plans.clear()


def masks(rows=SIZES[0], keys=SIZES[1]):
    i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")
    drawn = torch.rand(8, rows, keys, device="cuda")
    tiles = torch.rand(8, tables.tiles(rows), tables.tiles(keys), device="cuda") < 0.2
    seen = tiles.repeat_interleave(tables.TILE, 1).repeat_interleave(tables.TILE, 2)[:, :rows, :keys]
    empty_rows = (i - j).abs() <= 40
    empty_rows[130:200] = False
    return {
        "band": (i - j).abs() <= 40,
        "documents": i // 150 == j // 150,
        "prefix": (j <= i) | (j < 100),
        "graph for each head": seen & (drawn < 0.5),
        "graph for each batch member": (seen & (drawn < 0.9))[:2, None],
        "empty rows": empty_rows,
        "everything hidden": drawn[0] < -1,
        "nothing hidden": drawn[0] >= 0,
        "padding": (j < torch.tensor([[keys - 5], [tables.TILE - 1]], device="cuda"))[:, None, None],
    }


def made(mask, dtype=torch.bfloat16, dim=64, bias=None, group=2, **fields):
    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    rows, keys = SIZES
    q, k, v = normal(2, 8, rows, dim), normal(2, 8 // group, keys, dim), normal(2, 8 // group, keys, dim)
    fields.setdefault("dout", normal(2, 8, rows, dim))
    return Inputs(q, k, v, bias=None if bias is None else normal(*bias), mask=mask, **fields)


def require(inputs):
    judge = Judge(inputs)
    with poisoned_memory():
        found = evaluate(judge.inputs, "triton")
    judge.require(found)
    for _ in range(3):
        again = evaluate(judge.inputs, "triton")
        assert all(torch.equal(x, again[name]) for name, x in found.items())


@pytest.mark.parametrize("name", list(masks(1, 1)) if torch.cuda.is_available() else ["band"])
def test_tables_and_numbers(name):
    mask = masks()[name]
    for given in (
        mask,
        torch.nn.functional.pad(mask, (0, 19))[..., : mask.shape[-1]],
    ):  # rows of any pitch, and of 16 bytes
        table = tables.table_of(given)
        seen = given[(None,) * (2 - given.dim())]
        high = tables.tiles(seen.shape[-2])
        padded = torch.zeros(
            *seen.shape[:-2], high * tables.TILE, tables.tiles(seen.shape[-1]) * tables.TILE, device="cuda"
        )
        padded[..., : seen.shape[-2], : seen.shape[-1]] = seen
        kinds = padded.unflatten(-1, (-1, tables.TILE)).unflatten(-3, (-1, tables.TILE)).amax((-1, -3))
        wide = kinds.shape[-1]
        before = table[..., 0, : high * (wide + 1)].unflatten(-1, (high, wide + 1))
        assert torch.equal(before[..., -1], kinds.sum(-1).int())
    require(made(mask))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dim", (32, 64, 80, 128, 256))
def test_dtypes_and_dims(dtype, dim):
    require(made(masks()["graph for each head"], dtype, dim))


CALLS = {
    "causal": ("documents", {"options": {"causal": True}}),
    "causal, nothing hidden": ("nothing hidden", {"options": {"causal": True}}),
    "a window, nothing hidden": ("nothing hidden", {"options": {"window": (300, 30)}}),
    "window": ("graph for each head", {"options": {"window": (100, 30), "align": "lower_right"}}),
    "bias": ("band", {"bias": (2, 8, *SIZES)}),
    "shared bias": ("graph for each head", {"bias": (1, 8, *SIZES)}),
    "bias shared by members of different masks": ("graph for each batch member", {"bias": (1, 1, *SIZES)}),
    "bias of keys": ("documents", {"bias": (2, 8, 1, SIZES[1])}),
    "padding and a bias": ("padding", {"bias": (1, 1, *SIZES)}),
    "softcap": ("prefix", {"options": {"softcap": 5.0}}),
}


@pytest.mark.parametrize("name", CALLS)
def test_features(name):
    mask, fields = CALLS[name]
    require(made(masks()[mask], **fields))


@pytest.mark.parametrize("bias", (None, (2, 8, *SIZES), (1, 8, *SIZES)), ids=str)
@pytest.mark.parametrize("mask", ("band", "graph for each head", "padding"))
def test_second_order(mask, bias):
    given = made(masks()[mask], bias=bias)
    tangents = {f"t{n}": torch.randn_like(x) for n in ("q", "k", "v", "bias") if (x := getattr(given, n)) is not None}
    require(made(given.mask, bias=bias, tangents=tangents))


@pytest.mark.parametrize("as_block", (False, True))
def test_graphs_and_the_compiler(as_block):
    mask = masks()["documents"]
    given = flashsci.BlockMask.from_mask(mask) if as_block else mask.clone()
    q, k, v = (
        torch.randn(2, 8, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (517, 701, 701)
    )

    def step(q, k, v, mask):
        out = flashsci.attention(q, k, v, mask=mask, backend="triton")
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    def loss(q, k, v, mask):
        return flashsci.attention(q, k, v, mask=mask, backend="triton").float().square().sum()

    compiled = torch.compile(loss, dynamic=False, fullgraph=True)
    found = torch.autograd.grad(compiled(q, k, v, given), (q, k, v))
    for x, y in zip(found, step(q, k, v, given)[1:], strict=True):
        assert torch.equal(x, y)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(q, k, v, given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(q, k, v, given)
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        if not as_block:  # its table is made by the replay
            given.copy_(masks()["band"])
    graph.replay()
    for x, y in zip(captured, step(q, k, v, given), strict=True):
        assert torch.equal(x, y)


def test_auto_takes_the_kernels_that_skip():
    q = torch.randn(1, 16, 4096, 64, device="cuda", dtype=torch.bfloat16)
    i = torch.arange(4096, device="cuda")
    mask = (i[:, None] - i).abs() < 100
    for given in (mask, flashsci.BlockMask.from_mask(mask)):
        assert flashsci.explain(q, q, q, mask=given).chosen == "triton"


@pytest.mark.parametrize("mask", ("documents", "graph for each head"))
def test_masks_that_are_not_held(mask, monkeypatch):
    """Their tables have bits of partial tiles alone; the results are those of tables with all bits, bit by bit."""
    given = masks()[mask]
    monkeypatch.setattr("flashsci.api.block_mask.MOST_HELD", 1 << 62)
    held = flashsci.BlockMask.from_mask(given)
    monkeypatch.setattr("flashsci.api.block_mask.MOST_HELD", 0)
    block = flashsci.BlockMask.from_mask(given)
    assert block.mask is None and block.tiles.is_cuda and torch.equal(block.dense(), given)
    leaves = [
        torch.randn(2, 8, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in SIZES[:1] + 2 * SIZES[1:]
    ]
    due, found = [], []
    for into, one in ((due, held), (found, block)):
        out = flashsci.attention(*leaves, mask=one, backend="triton")
        into += [out, *torch.autograd.grad(out.float().square().sum(), leaves)]
    assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))
