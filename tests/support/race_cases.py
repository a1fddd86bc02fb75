"""What tests/gpu/test_races.py runs: for every kernel instance of the library the calls that launch it, and their shapes.

The instances are those of reports/resources.md, the table that ptxas' report of every unit becomes (a test keeps
it current): a kernel that is added there without a call here is an error, wherever there is no GPU, too.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from flashsci.testing import FP8Case, FP8Variant, PagedCase, PagedVariant

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "e4m3": "float8_e4m3fn"}
PAIRS = ("own", "shared", "keys")


@cache
def resources() -> ModuleType:
    """tools/kernels/resources.py, which knows kernels by their symbols."""
    spec = importlib.util.spec_from_file_location("resources", ROOT / "tools" / "kernels" / "resources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["resources"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Instance:
    """A row of the table: a compiled kernel."""

    generation: str  # sm90, sm80 or sm75
    kind: str  # fwd, bwd; fp8, paged, paged8: what has no backward and calls of its own
    dtype: str
    head_dim: int
    tile: str
    variant: str


def instances(text: str | None = None) -> list[Instance]:
    """Those that a Hopper device launches; sm75's run there from their PTX, whatever they were tuned for."""
    table = resources()
    _, rows = table.read_table(text or table.TABLE.read_text(encoding="utf-8"))
    found: dict[Instance, None] = {}
    for row in rows:
        matched = re.fullmatch(r"(sm\d+)/([a-z]+\d*)_(\w+)", row["unit"])
        if matched is None:
            raise ValueError(f"{row['unit']} is no unit such as sm90/fwd_bf16")
        generation, kind, dtype = matched.groups()
        if generation == "sm75" or (row["sm"] == "90" and "9.0" in row["runs on"].split(", ")):
            dim = int(row["head dim"])
            tile, variant = row["tile (rows x keys)"], row["variant"]
            if kind == "dropout" and variant in ("dq", "bias sum"):
                continue  # the kernels of bwd, by the same names
            found[Instance(generation, kind, DTYPES[dtype], dim, tile, variant)] = None
    return list(found)


@dataclass(frozen=True)
class Call:
    """What a launcher chooses kernels by, but for sizes. Forward, and where there is one backward, in turns or not."""

    generation: str  # or a backend that has none: triton
    dtype: str
    head_dim: int
    head_dim_v: int
    packed: bool = False
    causal: bool = False
    softcap: bool = False
    # own: [B, Hq, Sq, Sk]; shared: [1, Hq, Sq, Sk]; members: the same in large batches, linear: in memory [1, Sq, Sk, Hq];
    # keys: [B, 1, 1, Sk]; weights: key weights in its place, of each head where there are more than eight; inner: in memory [B, Sq, Sk, Hq], multiples of eight heads
    bias: str | None = None
    bias_fp32: bool = False
    mask: str | None = None  # own, keys
    decoding: bool = False
    short: bool = False  # 32 queries and keys at most
    inside: bool = False  # heads inside rows: in memory [B, S, H, D]
    dropout: bool = False
    alibi: bool = False  # one slope for each head

    def __str__(self) -> str:
        words = (
            self.generation,
            self.dtype,
            f"d{self.head_dim}",
            f"v{self.head_dim_v}",
            *(
                n
                for n in ("packed", "causal", "softcap", "decoding", "short", "inside", "dropout", "alibi")
                if getattr(self, n)
            ),
            f"bias_{self.bias}{'_fp32' * self.bias_fp32}" if self.bias else "",
            f"mask_{self.mask}" if self.mask else "",
        )
        return "-".join(filter(None, words))

    @property
    def has_backward(self) -> bool:
        """Whether the generation has kernels for its gradients (csrc/*/backward*.cuh)."""
        widest = max(self.head_dim, self.head_dim_v)
        if not self.generation.startswith("sm"):
            return True
        if self.bias == "linear":  # gradients read a copy
            return False
        if self.bias == "inner":
            return True
        if self.generation != "sm90":
            return widest <= 128 or self.generation == "sm80"  # in fp32 from sm_90 on
        if self.bias is None and self.mask is None:
            return self.head_dim % 8 == self.head_dim_v % 8 == 0
        both = self.mask == "own" and self.bias in ("own", "shared")
        fits = widest <= 128 and not self.softcap
        return fits and (not both or (self.bias_fp32 and widest <= 64))


@dataclass(frozen=True)
class FP8Call:
    """The same of calls on 8-bit floats, whose cases are those of flashsci.testing."""

    head_dim: int
    head_dim_v: int
    block: str  # rows that share a scale
    packed: bool = False
    causal: bool = False
    fast: bool = False
    generation: str = "sm90"
    dtype: str = "float8_e4m3fn"
    backend: str = "cuda"
    has_backward: ClassVar[bool] = False

    def __str__(self) -> str:
        options = (n for n in ("packed", "causal", "fast") if getattr(self, n))
        words = (
            self.generation,
            "fp8",
            f"d{self.head_dim}",
            f"v{self.head_dim_v}",
            f"block{self.block}",
            *options,
        )
        return "-".join(words)

    def cases(self, processors: int) -> Iterator[tuple[str, FP8Case]]:
        """Names and cases: the shapes of other calls, with scales."""
        dims = self.head_dim, self.head_dim_v
        scales = ("head", self.block, "head" if self.fast else self.block)
        for i, shape in enumerate(shapes(Call("sm90", "bfloat16", *dims, self.packed, self.causal), processors)):
            if shape.judged is not None:  # too much for a judge
                continue
            banded = shape.window != (-1, -1)
            window = "both" if banded else "causal" if self.causal else "none"
            variant = FP8Variant(("bfloat16", "float16")[i % 2], *dims, window, packed=self.packed)
            yield shape.name, FP8Case(
                variant, i, shape.lens_q or (shape.seq_q,), shape.lens_k or (shape.seq_k,), () if self.packed else (shape.batch,),
                shape.heads_k, shape.heads // shape.heads_k, scales=scales, align="lower_right" if shape.lower_right else "upper_left",
                left=shape.window[0], right=shape.window[1], accumulate="fast" if self.fast else "safe",
            )  # fmt: skip


@dataclass(frozen=True)
class PagedCall:
    """The same of calls on a paged cache."""

    dtype: str
    head_dim: int
    head_dim_v: int
    window: str = "causal"
    cache: str = ""  # an 8-bit float, or dtype
    generation: str = "sm90"
    other: str = ""  # a backend in place of the generation's
    packed: ClassVar[bool] = True
    has_backward: ClassVar[bool] = False

    @property
    def backend(self) -> str:
        return self.other or f"cuda:{self.generation}"

    def __str__(self) -> str:
        dims = f"d{self.head_dim}", f"v{self.head_dim_v}"
        cache = (self.cache,) if self.cache else ()
        return "-".join((self.generation, "paged", self.dtype, *cache, *dims, self.window))

    def cases(self, processors: int) -> Iterator[tuple[str, PagedCase]]:
        """Names and cases: rings that go round, runs that begin and end within a sequence, one sequence cut into many, more
        of them than multiprocessors, prompts, tiles without a row, rows without a key; plans that every block makes and one that
        is made ahead (more than 384 slots)."""
        banded = self.window == "both"
        variant = PagedVariant(self.dtype, self.cache, self.head_dim, self.head_dim_v, self.window, banded, banded)
        common = dict(layout="joint rows", padding=3, left=500, heads_k=2)
        if self.cache:
            common["scales"] = "heads"
        more = processors + 1
        shapes = (
            ("one cut among all", (1,), (300 * processors,), 4, 16),
            ("mixed", (1, 70, 0, 3, 1), (9000, 70, 500, 4000, 1), 7, 48),
            ("many short, planned ahead", (1,) * 3 * more, (17,) * 3 * more, 8, 16),
            ("one more than processors", (1,) * more, (260,) * more, 1, 32),
            ("prompts", (150, 40, 1, 300), (700, 40, 3000, 300), 5, 64),
            ("nothing to see", (1, 1, 1), (0, 0, 0), 16, 128),
        )
        for i, (name, lens_q, lens_k, group, page) in enumerate(shapes):
            yield name, PagedCase(variant, i, lens_q, lens_k, group=group, page=page, **common)


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    name: str
    batch: int
    heads: int
    heads_k: int
    seq_q: int
    seq_k: int
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    known: bool = False  # the longest sequences are said
    window: tuple[int, int] = (-1, -1)  # of calls that are not causal
    lower_right: bool = False
    forward_only: bool = False
    judged: int | None = None  # so many batch entries are judged, the others held against plain fp32


def shapes(call: Call, processors: int) -> Iterator[Shape]:
    """Many short tiles, empty ones first and last, one tile, one more than multiprocessors, and rings that go round.

    Keys are multiples of 16, for TMA's sake; rows are not.
    """
    more = processors + 1
    if call.decoding:  # runs of key blocks that end within a sequence
        yield Shape("many", 3 * processors // 4, 8, 2, 1, 320)
        yield Shape("one", 1, 1, 1, 1, 288)
        yield Shape("one more than processors", 1, more, more, 2, 272, lower_right=True)
        yield Shape("long", 2, 4, 2, 3, 1200, lower_right=True)
        return
    if call.packed:
        lens_q = (0, 0, 70, 1, 0, 200, 33, 129, 5, 64, 0, 130, 17, 0)
        lens_k = (0, 9, 40, 1, 7, 48, 0, 136, 20, 64, 3, 33, 2, 0)
        heads = -(-processors // 6) * 2
        packed = replace(Shape("many", 1, heads, heads // 2, 0, 0), lower_right=True)
        yield _packed(packed, lens_q, lens_k)
        yield _packed(
            replace(packed, name="mostly empty", lower_right=False),
            (0, 0, 0, 0, 41, 0, 0, 0, 0),
            (0, 0, 5, 0, 9, 0, 0, 30, 0),
        )
        yield _packed(Shape("one", 1, 1, 1, 0, 0, known=True), (16,), (32,))
        yield _packed(Shape("one more than processors", 1, more, more, 0, 0), (40,), (48,))
        yield _packed(Shape("long", 1, 6, 3, 0, 0), (330, 0, 200, 40), (528, 30, 0, 700))
        return
    if call.bias in ("members", "linear"):  # with units for all processors
        yield Shape("one panel of three steps", 67, 4, 4, 300, 272)
        yield Shape("two steps", processors // 3 + 4, 4, 4, 192, 96)
        yield Shape("two panels, a bias that changes", 48, 4, 4, 400, 528)
        return
    if call.bias == "inner":  # clusters of four, two and one
        yield Shape("one", 1, 8, 8, 16, 32)
        yield Shape("long", 1, 24, 24, 200, 528)
        yield Shape("more clusters than processors", processors // 3 + 1, 8, 8, 72, 40)
        yield Shape("blocks that end within a box", 5, 8, 8, 130, 77)
        return
    if call.short:  # a warp for every head
        yield Shape("two blocks of rows", 4 * processors, 6, 6, 16, 11)
        yield Shape("three", 2 * processors, 3, 3, 19, 24, lower_right=True)
        yield Shape("four", processors, 8, 8, 32, 29)
        yield Shape("one", 1, 1, 1, 1, 32)
        yield Shape("four, of three heads", processors, 3, 3, 27, 29)
        # Heads that no blocks divide: their rows do not go through shared memory.
        yield Shape("eleven heads", processors, 11, 11, 13, 16)
        yield Shape("eleven heads, three blocks of rows", processors, 11, 11, 24, 21)
        if call.inside:  # tensors that lie alike; room for four heads, and for eight
            for name, batch, rows in (
                ("two", 4 * processors, 14),
                ("three", 2 * processors, 22),
                ("four", processors, 29),
            ):
                yield Shape(f"{name}, as many keys", batch, 3, 3, rows, rows)
                yield Shape(f"{name}, as many keys, six heads", batch, 6, 6, rows + 2, rows + 2)
        return
    batch = -(-processors * 3 // 8)  # 1.5 heads a processor, of two tiles each at least
    yield Shape("many", batch, 4, 2, 200, 48)
    if call.generation == "sm90":  # CTAs that take tile after tile
        yield Shape("few keys, short rows", 2 * batch, 4, 4, 24, 16)
        # Up to 64 head dims "many" is for tiles of 256 rows, this for those of 192.
        yield Shape("many, longer rows", batch, 4, 2, 310, 48)
    yield Shape("one", 1, 1, 1, 16, 32)
    yield Shape("one more than processors", 1, more, more, 40, 48)
    yield Shape("two tiles of keys", 2 * batch // 3, 4, 2, 72, 144, lower_right=True)
    yield Shape("long", 2, 4, 2, 330, 528)
    if call.causal:
        # Of causal rows that end with the keys the first see nothing, and of keys that outnumber rows the last are
        # seen by none; a window that ends before the rows do leaves the last rows nothing.
        yield Shape("empty rows first", 16, 4, 2, 520, 144, lower_right=True)
        yield Shape("empty keys last", 16, 4, 2, 136, 528)
        yield Shape("empty rows last", 16, 4, 2, 520, 144, window=(16, 16))
        # The output of one tile leaves while that of the next is staged.
        if call.generation == "sm90" and not (call.bias or call.mask):
            yield Shape(
                "short tiles one after the other", 60, 4, 4, 1024, 128,
                lower_right=True, forward_only=True, judged=4,
            )  # fmt: skip


def _packed(shape: Shape, lens_q: tuple[int, ...], lens_k: tuple[int, ...]) -> Shape:
    return replace(shape, lens_q=lens_q, lens_k=lens_k, seq_q=sum(lens_q), seq_k=sum(lens_k))


AnyCall = Call | FP8Call | PagedCall


def calls_of(instance: Instance) -> list[AnyCall]:
    """The calls that launch an instance, in some of their shapes.

    Raises:
        KeyError: nothing here launches it.
    """
    unit = f"{instance.generation}/{instance.kind}" + "_fp32" * (instance.dtype == "float32")
    found = list(_UNITS[unit](instance)) if unit in _UNITS else []
    if not found:
        raise KeyError(
            f"tests/support/race_cases.py has no call for {instance}; say there which calls launch such kernels"
        )
    return found


def all_calls() -> list[AnyCall]:
    """Of all instances, in the table's order, then some that no instance asks for."""
    found = dict.fromkeys(call for instance in instances() for call in calls_of(instance))
    return list(found | dict.fromkeys(_others()))


def _others() -> Iterator[Call]:
    for dtype in ("float16", "bfloat16"):
        # The last box of values holds 32 or 8 columns of 64.
        yield Call("sm90", dtype, 160, 160, causal=True)
        yield Call("sm90", dtype, 192, 136, causal=True)
        yield Call("sm90", dtype, 80, 72, packed=True, causal=True)
        yield Call("sm90", dtype, 40, 40, bias="shared", mask="keys")
        for generation in ("sm90", "sm80"):
            yield PagedCall(dtype, 192, 128, generation=generation)
            yield PagedCall(dtype, 192, 80, cache="float8_e4m3fn", generation=generation)
        # Rows of values end within a box.
        yield PagedCall(dtype, 80, 48, cache="float8_e5m2", generation="sm80")
    for dtype, dim in (("bfloat16", 64), ("float16", 128), ("float32", 32)):
        yield Call("triton", dtype, dim, dim, causal=True)
        yield Call("triton", dtype, dim, dim, packed=True, causal=True)
        yield Call("triton", dtype, dim, dim, bias="shared", bias_fp32=True)


def _sm90_forward(instance: Instance) -> Iterator[Call]:
    dim, variant = instance.head_dim, instance.variant
    call = Call("sm90", instance.dtype, dim, dim)
    if variant == "bias or mask":
        yield replace(call, bias="own")
        yield replace(call, bias="shared", bias_fp32=True, causal=True)
        if dim > 32:  # masks are left to sm80 there
            yield replace(call, bias="shared", mask="keys")
            yield replace(call, bias="keys", bias_fp32=True, mask="own")
            yield replace(call, mask="own", causal=True)
    elif variant in ("decoding", "combine"):
        yield replace(call, decoding=True)
    elif found := re.fullmatch(r"(16-bit|fp32) bias, \d members", variant):
        fp32 = found[1] == "fp32"
        yield replace(call, bias="members", bias_fp32=fp32)
        yield replace(call, bias="members", bias_fp32=fp32, mask="keys")
    elif found := re.fullmatch(r"copy of (16-bit|fp32) bias", variant):
        yield replace(call, bias="linear", bias_fp32=found[1] == "fp32", mask="keys")
    elif found := re.fullmatch(r"(?:v (\d+) )?(full|window)( softcap)?( packed)?", variant):
        values, window, softcap, packed = found.groups()
        yield replace(
            call,
            head_dim_v=int(values or dim),
            causal=window == "window",
            softcap=softcap is not None,
            packed=packed is not None,
        )


def _sm90_backward(instance: Instance) -> Iterator[Call]:
    dim = instance.head_dim
    if instance.variant.endswith("bias of many members"):
        yield Call("sm90", instance.dtype, dim, dim, bias="members")
        yield Call("sm90", instance.dtype, dim, dim, bias="members", bias_fp32=True, mask="keys")
        return
    found = re.fullmatch(
        r"(?:v (?P<v>\d+) ?)?(?P<rows>postprocess|preprocess)? ?(?P<pairs>bias or mask|fp32 bias or mask by pairs)? ?"
        r"(?P<packed>packed)? ?(?P<softcap>softcap)? ?(tile after tile)?|dense",
        instance.variant,
    )
    if found is None:
        return
    dim_v = int(found["v"] or dim)
    call = Call("sm90", instance.dtype, dim, dim_v, packed=found["packed"] is not None)
    # Head dims up to 64: blocks of 64 rows are those of softcap, of 128 all others'.
    halves = (dim, dim_v) == (64, 64) and instance.tile.startswith("64 ")
    if found["pairs"] == "bias or mask":
        yield replace(call, bias="own")
        yield replace(call, bias="shared", causal=True)
        yield replace(call, bias="keys", mask="keys")
    elif found["pairs"] is not None:
        yield replace(call, bias="own", bias_fp32=True, mask="keys")
        yield replace(call, bias="shared", bias_fp32=True, causal=True)
        yield replace(call, mask="own")
        if dim <= 64 and dim_v <= 64:
            yield replace(call, bias="own", bias_fp32=True, mask="own")
    elif found["softcap"] or halves:
        yield replace(call, softcap=True, causal=True)
    else:
        yield replace(call, causal=call.packed)
        yield replace(call, causal=True)


def _pair(instance: Instance) -> Iterator[Call]:
    dim = instance.head_dim or 24
    if instance.variant in ("forward", "backward", "statistics"):
        call = Call("sm90", instance.dtype, dim, dim, bias="inner", bias_fp32=True)
        yield call
        yield replace(call, mask="keys")
        if instance.dtype == "float32":
            yield replace(call, head_dim_v=dim - 8)


def _small(instance: Instance) -> Iterator[Call]:
    dim, whole = instance.head_dim, "any columns" not in instance.variant
    if not instance.variant.startswith(("forward", "backward")):
        return
    call = Call("sm80", instance.dtype, dim, dim if whole else dim - 12, short=True)
    if "staged" in instance.variant:
        call = replace(call, inside=True)
    if "weights" in instance.variant:
        call = replace(call, bias="weights", bias_fp32=True)
        yield call
        yield replace(call, causal=True, mask="keys")
        return
    yield call
    yield replace(call, causal=True, mask="keys")
    yield replace(call, bias="keys", bias_fp32=True)
    yield replace(call, bias="own", mask="own")


def _fp8(instance: Instance) -> Iterator[FP8Call]:
    found = re.fullmatch(r"(?:v (\d+) )?(fast )?(dense|packed)", instance.variant)
    if found is None:
        return
    dim = instance.head_dim
    call = FP8Call(dim, int(found[1] or dim), "64", found[3] == "packed", causal=True, fast=found[2] is not None)
    if instance.tile.endswith("x 128"):
        call = replace(call, block="128")
    yield call
    yield replace(call, causal=False)
    if dim == 256 and not call.fast:  # blocks of 64 keys, whatever shares a scale
        yield replace(call, block="128")


def _paged(instance: Instance) -> Iterator[PagedCall]:
    if instance.kind == "paged":
        caches = dict.fromkeys(("paged", "plan", "combine"), "")
    else:
        caches = dict.fromkeys(("e4m3", "plan", "combine"), "float8_e4m3fn")
        caches |= {"e5m2": "float8_e5m2"}
    if instance.variant not in caches:
        return
    dim, cache = instance.head_dim, caches[instance.variant]
    for window in ("causal", "both"):
        yield PagedCall(instance.dtype, dim, dim, window, cache, instance.generation)


def _plain(call: Call, dims: int) -> Iterator[Call]:
    """Calls without pairs, which one kernel of sm80 or sm75 serves; dims: of q, k and v."""
    call = replace(call, head_dim=dims, head_dim_v=dims)
    yield replace(call, causal=True)
    yield replace(call, packed=True, causal=True)


def _older_forward(instance: Instance) -> Iterator[Call]:
    """sm80 and sm75, 16 bits."""
    dim = instance.head_dim
    call = Call(instance.generation, instance.dtype, dim, dim)
    odd = replace(call, head_dim=dim - 3, head_dim_v=dim - 5)
    if instance.variant == "16-byte rows":
        yield from _plain(call, dim)
    elif instance.variant == "any rows":
        yield from _plain(call, dim - 3)
    elif instance.variant == "16-byte rows, ALiBi":
        yield from _plain(replace(call, alibi=True), dim)
    elif instance.variant == "any rows, ALiBi":
        yield from _plain(replace(call, alibi=True), dim - 3)
    elif instance.variant in ("16-byte rows, any bias or mask", "16-byte rows, bias or mask"):
        yield replace(call, bias="shared", causal=True)
        yield replace(call, bias="own", bias_fp32=True, mask="own")
    elif instance.variant in ("any rows, any bias or mask", "any rows, bias or mask"):
        yield replace(odd, bias="own")
        yield replace(odd, bias="shared", bias_fp32=True, mask="keys", causal=True)
    elif found := re.fullmatch(r"16-byte rows, (16-bit|fp32) bias(, two members)?", instance.variant):
        fp32, two = found[1] == "fp32", found[2] is not None
        yield replace(call, bias="shared" if two else "own", bias_fp32=fp32)
        if not two:
            yield replace(call, bias="own", bias_fp32=fp32, mask="keys")


def _older_backward(instance: Instance) -> Iterator[Call]:
    dim, variant = instance.head_dim, instance.variant
    call = Call(instance.generation, instance.dtype, dim or 64, dim or 64)
    if variant in ("backward, plain 16-byte rows", "backward keys, plain 16-byte rows", "backward queries, plain 16-byte rows", "statistics", "dq"):  # fmt: skip
        yield from _plain(call, call.head_dim)
        if not dim:  # whatever the tiles
            yield replace(call, softcap=True)
    elif variant in ("backward bias mask", "backward keys", "backward queries"):
        yield replace(call, bias="own", causal=True)
        yield replace(call, bias="shared", mask="keys")
        yield from _plain(call, call.head_dim - 3)
    elif variant in ("bias gradient", "bias sum"):
        yield replace(call, bias="shared", mask="keys")
        yield replace(call, bias="keys", bias_fp32=True)
        yield replace(call, bias="own", bias_fp32=True, softcap=True)


def _weighted(instance: Instance) -> Iterator[Call]:
    """Key weights, of which both kernels are part of every call with their gradient."""
    if instance.variant in ("log weights", "weight gradient"):
        call = Call(instance.generation, instance.dtype, 64, 64, bias="weights", bias_fp32=True)
        yield call
        yield replace(call, mask="keys", softcap=True)


def _dropping(instance: Instance) -> Iterator[Call]:
    """Both passes of sm80 with dropout, in 16 bits."""
    forward = "16-byte rows" in instance.variant or "any rows" in instance.variant
    for call in _older_forward(instance) if forward else _older_backward(instance):
        yield replace(call, dropout=True)


def _fp32_forward(instance: Instance) -> Iterator[Call]:
    dim = instance.head_dim
    call = Call("sm80", "float32", dim, dim)
    if instance.variant == "any rows":
        yield from _plain(call, dim)
        yield replace(call, head_dim=dim - 3, head_dim_v=dim - 5, softcap=True)
        yield replace(call, softcap=True, short=True)
    elif instance.variant == "any rows, bias or mask":
        yield replace(call, bias="own", softcap=True, short=True)
        yield replace(call, bias="own", causal=True)
        yield replace(call, bias="shared", mask="keys")
        yield replace(call, mask="own")


def _fp32_backward(instance: Instance) -> Iterator[Call]:
    dim = instance.head_dim or 32
    call = Call("sm80", "float32", dim, dim)
    variant = instance.variant.removesuffix(", bias or mask")
    pairs = variant != instance.variant
    if variant in ("short rows of keys", "statistics"):
        yield from _plain(call, dim)
        yield replace(call, softcap=True, short=True)
        yield replace(call, bias="own", mask="keys")
    elif variant in ("keys", "queries", "keys, dk", "keys, dv"):
        if pairs:
            yield replace(call, bias="own", causal=True)
            yield replace(call, bias="shared", mask="own")
        else:
            yield from _plain(call, dim)
    elif variant in ("bias gradient", "bias sum"):
        yield replace(call, bias="shared", mask="keys")
        yield replace(call, bias="keys")
        yield replace(call, bias="own", softcap=True)


_UNITS = {
    "sm90/fwd": _sm90_forward,
    "sm90/bwd": _sm90_backward,
    "sm90/pair": _pair,
    "sm90/pair_fp32": _pair,
    "sm90/fp8": _fp8,
    "sm90/paged": _paged,
    "sm90/paged8": _paged,
    "sm80/paged": _paged,
    "sm80/paged8": _paged,
    "sm80/small": _small,
    "sm80/small_fp32": _small,
    "sm80/dropout": _dropping,
    "sm80/weights_fp32": _weighted,
    "sm80/fwd": _older_forward,
    "sm80/bwd": _older_backward,
    "sm80/fwd_fp32": _fp32_forward,
    "sm80/bwd_fp32": _fp32_backward,
    "sm75/fwd": _older_forward,
    "sm75/bwd": _older_backward,
}


# --- which instances were launched -------------------------------------------------------------


def launched(names: Iterable[str], dtype: str) -> set[Instance]:
    """The instances of kernel names, as profilers show them, in calls of one dtype (8-bit floats are known by the name)."""
    found = set()
    for name in names:
        symbol = name if name.startswith("_Z") else symbol_of(name)
        generation = re.search(r"(?:4|::)(sm\d\d)", name)  # its own, or that of an argument
        if generation is None:
            continue
        kind = "fwd" if re.search(r"\d(forward_|decode_|triangle_forward_)", symbol) else "bwd"
        own = dtype
        if "fp8_forward_" in symbol:
            kind, own = "fp8", DTYPES["e4m3"]
        elif "4pair" in symbol:
            kind = "pair"
        elif "5small" in symbol:
            kind = "small"
        elif "3Op8" in symbol:
            kind = "paged8"
        elif "5paged" in symbol:
            kind = "paged"
        elif "FlashsciDropout" in name:
            kind = "dropout"
        elif "7weights" in symbol:
            kind, own = "weights", DTYPES["fp32"]
        suffix = next(s for s, d in DTYPES.items() if d == own)
        unit = f"{generation[1]}/{kind}_{suffix}"
        kernel = resources().Kernel(unit, 90, symbol, 0, 0, 0, 0)
        dim, rows, keys, *_ = kernel.tiling or (0, 0, 0)
        tile = f"{rows} x {keys}"
        found.add(Instance(generation[1], kind, own, dim, tile, kernel.variant))
    return found


def symbol_of(name: str) -> str:
    """A demangled kernel name as a symbol again, as far as tools/kernels/resources.py reads it (no substitutions, no
    arguments)."""
    name = name.removeprefix("void ").replace("(anonymous namespace)", "_GLOBAL__N_1")
    code, _ = _encode(name, 0)
    return "_Z" + code


def _encode(text: str, at: int) -> tuple[str, int]:
    """The code of the name, number or type that begins at `at`, and where it ends."""
    if found := re.compile(r"\(([\w:]+)\)(-?\d+)").match(text, at):  # an enumerator
        last = found[1].rsplit("::", 1)[-1]
        return f"LNS0_{len(last)}{last}E{found[2]}E", found.end()
    if found := re.compile(r"true|false").match(text, at):
        return f"Lb{int(found[0] == 'true')}E", found.end()
    if found := re.compile(r"(-?\d+)[ul]*").match(text, at):
        return f"Li{found[1]}E", found.end()
    found = re.compile(r"[\w:]+").match(text, at)
    if found is None:
        raise ValueError(f"{text!r} is no kernel name (at {at})")
    parts, end, arguments = found[0].split("::"), found.end(), ""
    if text[end : end + 1] == "<":
        end += 1
        while text[end] != ">":
            code, end = _encode(text, end)
            arguments += code
            end = re.compile(r"[, ]*").match(text, end).end()
        end, arguments = end + 1, f"I{arguments}E"
    head = "".join(f"{len(part)}{part}" for part in parts[:-1]) if at == 0 else "S0_"
    return f"N{head}{len(parts[-1])}{parts[-1]}{arguments}E", end
