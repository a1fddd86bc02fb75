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
        if name == "forward" and dim > 0:
            return find(name, 0)  # of every head dim
        define = f"FLASHSCI_SM90_ONLY={dim}" if name == "backward" else ""
        found = build(tmp_path_factory.mktemp(f"{name}{dim}"), name, define=define)
        found.workspace.restype = c.c_int64
        return found

    return find


class Unserved(Exception):
    """The launcher leaves a call to others."""


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
    if not emulate(library.emulate, p, True, seed):
        raise Unserved
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
    skipped: int = 0,
    dim: int | None = None,
    forward_alone: bool = False,
) -> None:
    """at_end: whether the bias ends with a page, or begins with one. room: rows and keys of NaN behind those of a bias. skipped:
    numbers of NaN before it. dim: that the kernels are compiled for, by default that of q."""
    x = make_inputs(case)
    judged, guarded = Judge(x), Guarded()
    rows = {n: y.resolve_neg() for n in ("q", "k", "v", "dout") if (y := getattr(x, n)) is not None}
    x = replace(x, **{n: y if y.stride(-1) == 1 else y.contiguous() for n, y in rows.items()})
    if x.bias is not None and case.bias_view == "contiguous":
        *heads, seq_q, seq_k = torch.atleast_2d(x.bias).shape
        wide = torch.full((*heads, seq_q + room[0], seq_k + room[1]), torch.nan, dtype=x.bias.dtype)
        wide[..., :seq_q, :seq_k] = x.bias
        before = wide.new_full((skipped,), torch.nan)
        wide = guarded.copy(torch.cat((before, wide.flatten())), at_end)[skipped:].view(wide.shape)
        x = replace(x, bias=wide[..., :seq_q, :seq_k])  # of a tensor of all keys: one row
    dim = case.variant.head_dim if dim is None else dim
    results = forward(library("forward", dim), x, case.seed % 1000)
    if x.dout is not None and not forward_alone:
        results |= backward(library("backward", dim), x, results, case.seed % 1000, deterministic)
    judged.require(results)


def pairs(dim: int = 64, *, seq_q: int = 150, seq_k: int = 136, **changes) -> Case:
    """A call with a bias of pairs."""
    variant = dict(bias="pair", bias_grad=True)
    of_variant = ("bias", "bias_float", "mask", "bias_grad", "lse_grad")
    variant["softcap"] = "softcap" in changes
    names = {n: changes.pop(n) for n in tuple(changes) if n in of_variant} | {
        "window": bool(changes.get("causal") or changes.get("window"))
    }
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


CAPPED = {
    "of all": dict(bias_shape=(150, 136)),
    "of keys": dict(bias_shape=(2, 3, 1, 136)),
    "of keys in fp32": dict(bias_shape=(136,), bias_float=True),
    "keys hidden": dict(mask=True, mask_shape=(2, 1, 1, 144), mask_kind="keys", seq_k=144),
    "keys hidden without a bias": dict(
        mask=True, mask_shape=(2, 1, 1, 144), mask_kind="keys", bias=None, bias_shape=None, seq_k=144
    ),
    "pairs hidden by the bias": dict(bias_holes=True),
    "causal": dict(causal=True, seq_q=300),
    "grouped heads": dict(heads_k=1, group=3),
    "in turns": dict(deterministic=True),
    "rows of a large number": dict(bias_number="-1e30", bias_number_at="rows"),
}


@pytest.mark.parametrize("kind", CAPPED)
@pytest.mark.parametrize("dim", (64, 96, 128))
def test_a_bias_behind_a_softcap(library, dim, kind):
    """The gradient of the bias, which has no slope of the softcap, is not a part of these kernels."""
    given = dict(CAPPED[kind])
    deterministic = given.pop("deterministic", False)
    judge(library, pairs(dim, softcap=3.0, bias_grad=False, lse_grad=True, **given), deterministic)


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


def odd(dim: int = 64, seq_q: int = 150, seq_k: int = 131, **changes) -> Case:
    """A forward with a bias of which rows begin anywhere, in heads that begin anywhere."""
    plain = {"lead": (1,), "bias_shape": (3, seq_q, seq_k), "bias_grad": False}
    return pairs(dim, seq_q=seq_q, seq_k=seq_k, **plain | changes)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("at_end", (False, True))
@pytest.mark.parametrize(
    "seq_q, seq_k",
    ((64, 129), (150, 130), (65, 131), (77, 132), (201, 133), (150, 134), (193, 191), (70, 255), (3, 1023)),
)
def test_rows_that_begin_anywhere(library, dim, seq_q, seq_k, at_end):
    judge(library, odd(dim, seq_q, seq_k), at_end=at_end, forward_alone=True)


@pytest.mark.parametrize("bias_float", (False, True))
@pytest.mark.parametrize("skipped", (1, 2, 3, 7))
@pytest.mark.parametrize("seq_k", (133, 136))
def test_a_bias_that_begins_anywhere(library, seq_k, skipped, bias_float):
    case = odd(seq_k=seq_k, bias_float=bias_float)
    judge(library, case, at_end=False, skipped=skipped, forward_alone=True)


@pytest.mark.parametrize("bias_float", (False, True))
@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("seq_k, room", ((131, (0, 2)), (127, (2, 0)), (133, (1, 12))))
def test_what_is_behind_rows_that_begin_anywhere_does_not_matter(library, dim, seq_k, room, bias_float):
    judge(library, odd(dim, seq_k=seq_k, bias_float=bias_float), room=room, forward_alone=True)


BEGINNING_ANYWHERE = {
    "of every batch entry and head": dict(lead=(2,), bias_shape=(2, 3, 150, 131)),
    "of every batch entry": dict(lead=(2,), bias_shape=(2, 1, 150, 131)),
    "of all": dict(lead=(2,), bias_shape=(150, 131)),
    "many tiles": dict(lead=(5,), seq_q=65, seq_k=67, bias_shape=(5, 3, 65, 67)),
    "of one head": dict(heads_k=1, bias_shape=(150, 131)),
    "grouped heads": dict(heads_k=1, group=3),
    "of keys": dict(bias_shape=(3, 1, 131)),
    "of keys, of all": dict(lead=(2,), bias_shape=(131,)),
    "hidden": dict(bias_holes=True),
    "a large number": dict(bias_number="-1e9"),
    "causal": dict(causal=True, seq_q=300, seq_k=331),
    "causal, few keys": dict(causal=True, seq_q=300, seq_k=129),
    "in a window": dict(window=(70, 9), seq_q=300, seq_k=331),
    "one query": dict(lead=(2,), seq_q=1, bias_shape=(2, 3, 1, 131)),
    "keys hidden": dict(seq_k=144, mask=True, mask_shape=(1, 1, 1, 144), mask_kind="keys"),
    "pairs hidden": dict(seq_k=144, mask=True, mask_shape=(150, 144)),
}


@pytest.mark.parametrize("kind", BEGINNING_ANYWHERE)
@pytest.mark.parametrize("dim, bias_float", ((64, False), (128, False), (24, False), (64, True)))
def test_rows_that_begin_anywhere_with_other_features(library, dim, bias_float, kind):
    case = odd(dim, bias_float=bias_float, **BEGINNING_ANYWHERE[kind])
    refused = case.variant.mask and (dim == 24 or (bias_float and kind == "pairs hidden"))  # the latter: one stage
    run = functools.partial(judge, library, case, room=(0, 1), forward_alone=True)
    if not refused:
        return run()
    with pytest.raises(Unserved):
        run()


def require_independence(kernels: c.CDLL, seq_q: int, dim: int = 64, seed: int = 0, **changes) -> None:
    """No bit of a head depends on the bias of the next one, whose rows are behind its own in a box. Numbers that grow from one block to
    the next, from right to left, make the maxima of a warp move where a window cuts the blocks."""
    x = make_inputs(replace(odd(dim, seq_q, 331, window=(70, 9), **changes), seed=seed))
    outs = []
    growing = torch.where(torch.arange(331) < seq_q // 64 * 64, 1000.0, 0.0)
    for number in (torch.tensor(0.0), torch.tensor(torch.nan), growing):
        bias = x.bias.contiguous()
        bias[1:] = number
        outs.append(forward(kernels, replace(x, bias=bias), seed)["out"][..., 0, :, :])
    assert outs[0].isfinite().all()
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("bias_float", (False, True))
@pytest.mark.parametrize("seq_q", (1, 3, 70, 77, 193, 260))
@pytest.mark.parametrize("dim", (64, 128))
def test_rows_of_the_next_head_do_not_matter(library, dim, seq_q, bias_float):
    require_independence(library("forward", dim), seq_q, dim, bias_float=bias_float)


NO_LATTICE = {
    "a head between two rows": ((3, 150, 131), (150 * 131 + 1, 131, 1)),
    "rows by turns": ((3, 150, 131), (131, 3 * 131, 1)),
    "heads within a row": ((3, 150, 131), (8, 131, 1)),
}


@pytest.mark.parametrize("kind", NO_LATTICE)
def test_rows_on_no_lattice_are_left_to_others(library, kind):
    shape, stride = NO_LATTICE[kind]
    x = make_inputs(odd(lead=(2,), bias_shape=shape))
    memory = torch.zeros(sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1, dtype=x.bias.dtype)
    x = replace(x, bias=memory.as_strided(shape, stride))
    with pytest.raises(Unserved):
        forward(library("forward", 64), x, 0)


def test_above_128_head_dims_rows_begin_at_multiples_of_16_bytes(library):
    with pytest.raises(Unserved):
        judge(library, odd(192), forward_alone=True)


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


OF_A_LATTICE = {
    "the shift of another row": ("fwd/bias_mask.cuh", "tile, tile.row + own)", "tile, tile.row + own + 1)"),
    "the shift of the first head": ("fwd/bias_mask.cuh", "flat_row(tile, tile.row + own)", "flat_row(TileInfo{}, tile.row + own)"),
    "a word that is not put together": ("fwd/bias_mask.cuh", "place & 1 ? 0x5432 : 0x3210", "0x3210"),
    "the last row twice": ("fwd/bias_mask.cuh", "(row + 8 <= last ? 2 : 0)", "(row + 8 < last ? 2 : 0)"),
    "rows of the next head": ("fwd/bias_mask.cuh", "own = min(row, last)", "own = row"),
    "the next row of the next head": ("fwd/bias_mask.cuh", "(row + 8 <= last ? 2 : 0)", "2"),
    "another class": ("fwd/load_bias_mask.cuh", "a.bias[(first + l) &", "a.bias[(first + l + 1) &"),
    "boxes that begin with the tile": ("fwd/load_bias_mask.cuh", ">> bits) - l, 0", ">> bits), 0"),
    "fewer bytes expected than come": ("fwd/launch.cuh", "plan.boxes * box_rows * row_bytes;", "plan.boxes * box_rows * (row_bytes - 16);"),
    "a class without its last row": ("fwd/launch.cuh", "{{(last - first) / classes + 1, ", "{{std::max<int64_t>((last - first) / classes, 1), "),
    "a row without its last keys": ("fwd/launch.cuh", "(before + p.seq_k + classes - 1)", "(before + p.seq_k)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", OF_A_LATTICE)
def test_faults_of_a_lattice_are_found(tmp_path, fault):
    kernels = build(tmp_path / "forward", "forward", OF_A_LATTICE[fault])
    kernels.workspace.restype = c.c_int64
    case = odd(seq_q=260, seq_k=191)
    if "next head" in fault:
        assert is_found(lambda seed: require_independence(kernels, 260, seed=seed), range(4))
        return
    found = lambda seed: judge(lambda *_: kernels, replace(case, seed=seed), room=(1, 0), forward_alone=True)  # noqa: E731
    assert is_found(found, range(4))


CAPPED_FAULTS = {
    "P without its limit": ("bwd/mainloop.cuh", "const float limit = large ? 1.f : INFINITY;", "const float limit = INFINITY;"),
    "dS without the slope": ("bwd/mainloop.cuh", "prob[e] = first * slope_of(prob[e]);", "prob[e] = first;"),
    "hidden keys": ("bwd/mainloop.cuh", "shown[1] = shows_key(a, tile, w, iter, 1);", "shown[1] = true;"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS | CAPPED_FAULTS)
def test_faults_are_found(library, tmp_path, fault):
    change = (FAULTS | CAPPED_FAULTS)[fault]

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
    case, room = pairs(seq_q=600), (1, 0)
    if fault in CAPPED_FAULTS:
        kind = "keys hidden" if fault == "hidden keys" else "rows of a large number"
        case, room = pairs(softcap=3.0, bias_grad=False, **CAPPED[kind]), (0, 0)
    assert is_found(lambda seed: judge(broken, replace(case, seed=seed), room=room), range(4))
