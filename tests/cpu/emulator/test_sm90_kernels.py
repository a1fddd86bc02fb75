"""The sm90 forward and backward in 16 bits with a bias, a mask and without, run on the host (emulated.py) from the launcher to the stores, by the judge of
every backend. A bias lies between pages that no copy may touch."""

from __future__ import annotations

import ctypes as c
import functools
import mmap
from dataclasses import replace

import pytest
import torch

from flashsci.call.ops import empty_with_inner_keys
from flashsci.testing import Case, Inputs, Judge, Variant, make_inputs
from tests.cpu.emulator.emulated import build, emulate, is_found
from tests.cpu.emulator.test_small_kernel import common, poisoned
from tools.kernels.launchers import BackwardParams, ForwardParams, _pointer, _score_strides, _strides

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A function that gives a pass of a head dim, built at its first use."""

    @functools.cache
    def find(name: str, dim: int) -> c.CDLL:
        define = f"FLASHSCI_SM90_ONLY={dim}" if name == "backward" else ""
        found = build(tmp_path_factory.mktemp(f"{name}{dim}"), name, define=define)
        found.workspace.restype = c.c_int64
        return found

    return find


class Guarded:
    """Copies of tensors in front of a page, or behind one, that nobody may read or write."""

    PAGE = mmap.PAGESIZE

    def __init__(self) -> None:
        self.pages: list[mmap.mmap] = []

    def copy(self, x: torch.Tensor, at_end: bool) -> torch.Tensor:
        size = x.numel() * x.element_size()
        inner = (size + self.PAGE - 1) // self.PAGE * self.PAGE
        pages = mmap.mmap(-1, inner + 2 * self.PAGE)
        self.pages.append(pages)
        start = c.addressof(c.c_char.from_buffer(pages))
        for page in (start, start + self.PAGE + inner):
            assert c.CDLL(None).mprotect(c.c_void_p(page), c.c_size_t(self.PAGE), 0) == 0
        first = self.PAGE + (inner - size if at_end else 0)
        memory = torch.frombuffer(pages, dtype=x.dtype, offset=first, count=x.numel())
        return memory.view(x.shape).copy_(x)


def forward(library: c.CDLL, x: Inputs, seed: int) -> dict[str, torch.Tensor]:
    out, lse = poisoned(x.q, x.v.shape[-1]), torch.full(x.q.shape[:-1], torch.nan)
    p = ForwardParams(**common(x, 228) | {"device": 3}, out=_pointer(out), lse=_pointer(lse), out_strides=_strides(out))
    workspace = torch.full((library.workspace(c.byref(p), 3) + 64,), 255, dtype=torch.uint8)
    p.workspace = workspace.data_ptr()
    assert emulate(library.emulate, p, True, seed)
    return {"out": out, "lse": lse}


def backward(
    library: c.CDLL, x: Inputs, made: dict[str, torch.Tensor], seed: int, deterministic: bool
) -> dict[str, torch.Tensor]:
    found = {f"d{name}": poisoned(getattr(x, name)) for name in "qkv"}
    p = common(x, 228) | {"max_seqlen_k": -1, "deterministic": int(deterministic), "device": 3}
    for name, gradient in found.items():
        p |= {name: _pointer(gradient), f"{name}_strides": _strides(gradient)}
    if x.bias is not None and x.bias_grad:
        found["dbias"] = empty_with_inner_keys(x.bias).fill_(torch.nan)
        p |= {"dbias": _pointer(found["dbias"]), "dbias_strides": _score_strides(found["dbias"])}
    out, lse = made["out"], made["lse"].contiguous()
    p |= {"out": _pointer(out), "out_strides": _strides(out), "lse": _pointer(lse)}
    p |= {"dout": _pointer(x.dout), "dout_strides": _strides(x.dout)}
    p |= {"dlse": _pointer(x.dlse), "dlse_strides": _strides(x.dlse, last=False)}
    params = BackwardParams(**p)
    workspace = torch.full((library.workspace(c.byref(params)) + 64 + 256,), 255, dtype=torch.uint8)
    params.workspace = (workspace.data_ptr() + 255) // 256 * 256
    assert emulate(library.emulate, params, True, seed)
    return found


def judge(
    library,
    case: Case,
    deterministic: bool = False,
    at_end: bool = True,
    room: tuple[int, int] = (0, 0),
    dim: int | None = None,
    forward_alone: bool = False,
) -> None:
    """at_end: whether the bias ends with a page, or begins with one. room: rows and keys of NaN behind those of a bias. dim: that
    the kernels are compiled for, by default that of q."""
    x = make_inputs(case)
    judged, guarded = Judge(x), Guarded()
    rows = {n: y.resolve_neg() for n in ("q", "k", "v", "dout") if (y := getattr(x, n)) is not None}
    x = replace(x, **{n: y if y.stride(-1) == 1 else y.contiguous() for n, y in rows.items()})
    if x.bias is not None and case.bias_view == "contiguous":
        *heads, seq_q, seq_k = torch.atleast_2d(x.bias).shape
        wide = torch.full((*heads, seq_q + room[0], seq_k + room[1]), torch.nan, dtype=x.bias.dtype)
        wide[..., :seq_q, :seq_k] = x.bias
        x = replace(x, bias=guarded.copy(wide, at_end)[..., :seq_q, :seq_k])  # of a tensor of all keys: one row
    dim = case.variant.head_dim if dim is None else dim
    results = forward(library("forward", dim), x, case.seed % 1000)
    if x.dout is not None and not forward_alone:
        results |= backward(library("backward", dim), x, results, case.seed % 1000, deterministic)
    judged.require(results)


def pairs(dim: int = 64, *, seq_q: int = 150, seq_k: int = 136, **changes) -> Case:
    """A call with a bias of pairs."""
    variant = dict(bias="pair", bias_grad=True)
    of_variant = ("bias", "bias_float", "mask", "bias_grad", "lse_grad")
    names = {n: changes.pop(n) for n in tuple(changes) if n in of_variant} | {"window": bool(changes.get("causal"))}
    case = dict(heads_k=3, lead=(2,), seq_q=seq_q, seq_k=seq_k, bias_shape=(2, 3, seq_q, seq_k)) | changes
    return Case(Variant("bfloat16", dim, dim, **variant | names), **case)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("at_end", (False, True))
@pytest.mark.parametrize("seq_k", (72, 136, 192))
@pytest.mark.parametrize("seq_q", (64, 150, 201))
def test_a_bias_of_pairs(library, dim, seq_q, seq_k, at_end):
    judge(library, pairs(dim, seq_q=seq_q, seq_k=seq_k), at_end=at_end)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("seq_k, room", ((131, (0, 5)), (136, (1, 0)), (133, (3, 11))))
def test_what_is_behind_its_rows_does_not_matter(library, dim, seq_k, room):
    """NaN behind the last key and behind the last row."""
    judge(library, pairs(dim, seq_k=seq_k), room=room)


SHAPES = {
    "of every head": dict(bias_shape=(3, 150, 136)),
    "of every batch entry": dict(bias_shape=(2, 1, 150, 136)),
    "of all": dict(bias_shape=(150, 136)),
    "of one head": dict(lead=(1,), heads_k=1, bias_shape=(150, 136)),
    "grouped heads": dict(heads_k=1, group=3),
    "hidden": dict(bias_holes=True),
    "in turns": dict(deterministic=True),
    "a large number": dict(bias_number="-1e9"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", (64, 128))
def test_a_bias_that_heads_or_batches_share(library, dim, shape):
    """The sum of the gradient of a shared bias is not a part of these kernels."""
    given = dict(SHAPES[shape])
    deterministic = given.pop("deterministic", False)
    owns = given.get("bias_shape", (2, 3, 150, 136)) == (2, 3, 150, 136) or shape == "of one head"
    judge(library, pairs(dim, bias_grad=owns, **given), deterministic)


OF_KEYS = {
    "a bias": dict(bias_shape=(2, 3, 1, 136)),
    "a bias of batch entries": dict(bias_shape=(2, 1, 1, 136)),
    "a bias of all": dict(bias_shape=(136,)),
    "a mask": dict(mask=True, mask_shape=(2, 1, 1, 144), mask_kind="keys", bias=None, bias_shape=None, seq_k=144),
    "a mask of heads": dict(mask=True, mask_shape=(3, 1, 144), bias=None, bias_shape=None, seq_k=144),
    "both": dict(bias_shape=(2, 3, 1, 144), mask=True, mask_shape=(2, 1, 1, 144), seq_k=144),
    "bias of pairs, mask of keys": dict(bias_shape=(2, 3, 150, 144), mask=True, mask_shape=(2, 1, 1, 144), seq_k=144),
}


@pytest.mark.parametrize("bias_float", (False, True))
@pytest.mark.parametrize("name", OF_KEYS)
def test_rows_of_keys(library, name, bias_float):
    """A row for all queries."""
    judge(library, pairs(bias_grad=False, bias_float=bias_float, **OF_KEYS[name]), forward_alone=True)


FEATURES = {
    "causal": dict(causal=True),
    "keys hidden": dict(mask=True, mask_shape=(2, 1, 1, 144), mask_kind="keys"),
    "pairs hidden": dict(mask=True, mask_shape=(150, 144)),
}


@pytest.mark.parametrize("bias_float", (False, True))
@pytest.mark.parametrize("feature", FEATURES)
def test_the_forward_with_other_features(library, bias_float, feature):
    case = pairs(seq_k=144, bias_grad=False, bias_float=bias_float, **FEATURES[feature])
    judge(library, case, room=(0, 8), forward_alone=True)


KINDS = {
    "plain": Case(Variant("bfloat16", 64, 64, lse_grad=True), lead=(2,), heads_k=2, group=2, seq_q=150, seq_k=260),
    "causal": Case(Variant("bfloat16", 64, 64, window=True), heads_k=2, seq_q=300, seq_k=200, causal=True),
    "rows of 16 bytes": pairs(seq_k=136),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", (64, 128))
def test_every_kind(library, kind, dim):
    case = KINDS[kind]
    judge(library, replace(case, variant=replace(case.variant, head_dim=dim, head_dim_v=dim)))


FAULTS = {
    "boxes that begin anywhere": ("fwd/load_bias_mask.cuh", "key + i * box_keys, row", "key + 1 + i * box_keys, row"),
    "more bytes than come": ("bwd/bias_aliased.cuh", "sizeof(shared.ds[0]));", "sizeof(shared.ds[0]) + 16);"),
    "dS in the place of a bias that is still read": (
        "bwd/bias_aliased.cuh", "if (iter > 0 && iter - 1 + C::kDsStages < iters) load(iter - 1 + C::kDsStages);",
        "if (iter + C::kDsStages - 1 < iters && iter > 0) load(iter - 1 + C::kDsStages); if (iter == 0 && iters > 3) load(3);",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(library, tmp_path, fault):
    change = FAULTS[fault]

    def broken(name: str, dim: int) -> c.CDLL:
        kernels = library(name, dim)
        if change[0].startswith("bwd") == (name == "forward"):
            return kernels  # the fault is in the other pass
        folder = tmp_path / name
        if folder not in made:
            folder.mkdir()
            made[folder] = build(folder, name, change, define="FLASHSCI_SM90_ONLY=64" if name == "backward" else "")
            made[folder].workspace.restype = c.c_int64
        return made[folder]

    made: dict[object, c.CDLL] = {}
    case = pairs(seq_q=600)
    assert is_found(lambda seed: judge(broken, replace(case, seed=seed), room=(1, 0)), range(4))
