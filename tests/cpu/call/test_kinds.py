"""The declaration of each kind of call: complete, consistent, and what no backend reads is refused."""

from __future__ import annotations

import ast
import typing
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashsci
import flashsci.api.attention
import flashsci.api.fp8
import flashsci.api.paged
import flashsci.api.residual
import flashsci.api.varlen
from flashsci.call import kinds, ops
from flashsci.call.fp8_ops import FP8Tensors
from flashsci.call.laplacian_tensors import LaplacianTensors
from flashsci.call.paged_ops import PagedTensors
from flashsci.call.plans import plans
from flashsci.call.residual_ops import ResidualCall
from flashsci.choice import backends, choose
from flashsci.errors import BackendError

DECLARATIONS = (
    kinds.Dense,
    kinds.Packed,
    kinds.Seeded,
    kinds.Scales,
    ops.Tensors,
    PagedTensors,
    FP8Tensors,
    ResidualCall,
)
ROOT = Path(__file__).resolve().parents[3]
EVERY = ("reference", "sdpa", "eager", "triton")
SOME = ("reference", "triton")
NEW = "pair_factor"


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda x: x.__name__)
def test_every_tensor_has_a_role(declaration):
    found = kinds.fields(declaration)
    assert tuple(found) == declaration._fields
    for field in found.values():
        assert (field.type is Tensor) == (field.argument is not None), field.name


def test_one_name_has_one_role():
    """A tensor has one place in the formula, in whatever kind of call it is given."""
    roles = {}
    for declaration in DECLARATIONS:
        for name in declaration._fields:
            roles.setdefault(name, set()).add(kinds.fields(declaration)[name].role)
    assert all(len(found) == 1 for found in roles.values()), roles


def test_tangents_are_the_first_tensors():
    """Raw ops, bits of needed gradients and autograd nodes count from the first tensor."""
    leaves = ops.Tangents._fields
    assert leaves == ops.Tensors._fields[: len(leaves)]
    assert all(kinds.rules(ops.Tensors)[name].reverse for name in leaves)
    bits = [getattr(ops, f"NEED_{name.upper()}") for name in (*leaves, "dout", "dlse")]
    assert bits == [1 << i for i in range(len(bits))]


def test_what_users_give_reaches_kernels_under_its_name():
    """Exceptions: the pass behind the kernels reads a sink, and a gate has ops of its own. Kernels also take what is made of such tensors."""
    given = {*kinds.Dense._fields, *kinds.Packed._fields, *kinds.Seeded._fields}
    assert given - set(ops.Tensors._fields) == {"sink", "pair_gate"}
    assert set(ops.Tensors._fields) - given == {"bias_offsets", "mask_tiles"}


def wider(declaration):
    """The declaration with one more tensor, which every call gives."""
    hints = typing.get_type_hints(declaration, include_extras=True)
    made = typing.NamedTuple("Wider", [*hints.items(), (NEW, kinds.Bias)])
    made.__new__.__defaults__ = (*declaration._field_defaults.values(), torch.ones(()))
    return made


@pytest.fixture(autouse=True)
def nothing_decided():
    """Plans and choices of another declaration would be found."""
    for cache in (plans, choose._choices):
        cache.clear()
    yield
    for cache in (plans, choose._choices):
        cache.clear()


def rows(*shape):
    return torch.randn(3, *shape).unbind(0)


def widen(monkeypatch, module, kind):
    """Let an entry point give the new tensor, too."""
    monkeypatch.setattr(module, kind.__name__, wider(kind))
    if hasattr(module, "_FIELDS"):
        new = {NEW: kinds.Field(NEW, torch.Tensor, True, None)}
        monkeypatch.setattr(module, "_FIELDS", {**kinds.fields(kind), **new})


def dense(backend, monkeypatch):
    widen(monkeypatch, flashsci.api.attention, kinds.Dense)
    return lambda: flashsci.attention(*rows(1, 2, 4, 8), backend=backend)


def packed(backend, monkeypatch):
    widen(monkeypatch, flashsci.api.varlen, kinds.Packed)
    return lambda: flashsci.varlen_attention(*rows(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32), backend=backend)


def residual(backend, monkeypatch):
    for module in (flashsci.api.attention, flashsci.api.residual):
        widen(monkeypatch, module, kinds.Dense)
    return lambda: flashsci.residual_attention(*rows(1, 2, 4, 8), backend=backend)


def fp8(backend, monkeypatch):
    widen(monkeypatch, flashsci.api.fp8, flashsci.api.fp8.FP8Options)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in rows(1, 2, 4, 16))
    return lambda: flashsci.attention(q, k, v, backend=backend)


def paged(backend, monkeypatch):
    widen(monkeypatch, flashsci.api.paged, PagedTensors)
    tables = dict(
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seqused_k=torch.tensor([3], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
    )
    cache = torch.randn(1, 16, 2, 16)
    return lambda: flashsci.paged_attention(torch.randn(1, 2, 16), cache, cache, **tables, backend=backend)


CALLS = [(call, b) for call in (dense, residual) for b in EVERY] + [
    (call, b) for call in (packed, fp8, paged) for b in SOME
]


@pytest.mark.parametrize("call, backend", CALLS, ids=lambda x: getattr(x, "__name__", x))
def test_a_tensor_that_no_kernel_reads_is_refused(call, backend, monkeypatch):
    """A new tensor of a kind of call is refused by each backend until it declares that it reads it."""
    with monkeypatch.context() as patch:
        compute = call(backend, patch)
        with pytest.raises(BackendError, match=f"do not read {NEW}"):
            compute()
        kind = {"dense": "attention", "packed": "attention"}.get(call.__name__, call.__name__)
        module = backends.find(backend).load()
        reads = {**module.READS, "attention": module.READS["attention"] | {NEW}}
        if kind in reads:
            reads[kind] = reads[kind] | {NEW}
        patch.setattr(module, "READS", reads)
        if call is not paged:  # its kernels get the tuple itself
            compute()


@pytest.mark.parametrize("name", ["cuda", "cuda:sm75", "cuda:sm80", "cuda:sm90"])
def test_the_library_declares_what_it_reads(name):
    backend = backends.find(name)
    problem = flashsci.explain(*rows(1, 2, 4, 8), mask=torch.ones(4, 4, dtype=torch.bool)).problem
    assert problem.given == ("q", "k", "v", "mask")
    assert backend.ignores(problem, problem.kind) is None
    gated = flashsci.explain(*rows(1, 2, 4, 8), pair_gate=torch.ones(4, 4)).problem
    assert "pair_gate" in backend.ignores(gated, gated.kind)


@pytest.mark.parametrize("name", [*backends.BACKENDS, *backends.GENERATIONS, "eager", "reference:packed"])
def test_only_declared_tensors_are_read(name):
    """A misspelt name would read nothing and refuse every call that gives the tensor."""
    known = {
        kinds.ATTENTION: {*kinds.Dense._fields, *ops.Tensors._fields},
        kinds.PAGED: set(PagedTensors._fields),
        kinds.FP8: set(FP8Tensors._fields),
        kinds.RESIDUAL: set(ResidualCall._fields),
        kinds.LAPLACIAN: set(LaplacianTensors._fields),
    }
    for kind, names in backends.find(name).load().READS.items():
        assert names <= known[kind], kind


def taken_apart(tree):
    """Whether code takes the tensors of a call apart by position: six and more at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and len(node.targets[0].elts) > 5:
            value = node.value
            name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
            if name in ("tensors", "inputs"):
                return True
    return False


def test_the_guide_lists_the_places_that_count_tensors_by_position():
    """Everyone else takes a tensor by its name, so that a new one needs no change there."""
    guide = (ROOT / "CONTRIBUTING.md").read_text().partition("**Its place in the tuple.**")[2].partition("   - **")[0]
    files = [
        p.relative_to(ROOT)
        for room in ("api", "backends", "call", "choice")
        for p in ROOT.glob(f"flashsci/{room}/**/*.py")
    ]
    found = [str(p) for p in files if taken_apart(ast.parse((ROOT / p).read_text()))]
    assert "flashsci/backends/cuda/prepared.py" in found
    # Tuples of another kind of call, each beside the declaration that it takes apart.
    others = {"flashsci/backends/triton/plans/fp8.py", "flashsci/backends/triton/plans/paged.py"}
    assert [p for p in found if f"`{p}`" not in guide and p not in others] == []
