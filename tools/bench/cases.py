"""The cases of the benchmark, with their shapes: data in plain Python without torch.

The shapes are those of models and papers: FlashAttention-3's grid, PET and EScAIP (one
short sequence per atom), crystals packed without padding, AlphaFold-3-style pair biases, weather
windows, decoding. Lengths are drawn from fixed seeds, so a case is the same on every machine.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace


class BenchError(ValueError):
    """An impossible request to the benchmark; the message says why."""


#: Memory layouts of q, k and v, all seen as [..., H, S, D] (packed: [T, H, D]): projections [..., S, H, D],
#: of which k and v may be the first heads, or slices of one [..., S, 3, H, D]. dout comes as [..., S, H, D].
HEADS_INSIDE, FIRST_HEADS, QKV = LAYOUTS = ("heads inside", "first heads", "qkv")
#: Memory layouts of a bias: the output of a Linear over pairs, [..., Sq, Sk, H], seen as [..., H, Sq, Sk]; or
#: a slice of one of BIAS_LAYERS layers that one Linear serves.
HEADS_LAST, ONE_LAYER = BIAS_LAYOUTS = ("heads last", "one layer of several")
BIAS_LAYERS = 3


@dataclass(frozen=True)
class Case:
    """One attention problem: dense [B, (N,) H, S, D] or, with `lens`, packed sequences of those
    lengths.

    `bias` is a shape with 1 for broadcast dims, "ragged" (one block per packed sequence) or None.
    `order` is the highest derivative that the case is about: 0 forward, 1 backward, 2 double backward.
    `layout` and `bias_layout` are the memory layouts of tensors; None: that of their shapes.
    """

    id: str
    suite: str
    dtype: str = "bf16"
    B: int = 1
    N: int | None = None
    H: int = 1
    Hk: int = 0  # 0: equal to H
    Sq: int = 0
    Sk: int = 0
    D: int = 64
    Dv: int = 0  # 0: equal to D
    lens: tuple[int, ...] = ()
    causal: bool = False
    window: tuple[int, int] | None = None
    bias: tuple[int, ...] | str | None = None
    bias_dtype: str | None = None  # None: the dtype of q
    bias_grad: bool = False
    mask: tuple[int, ...] | None = None
    order: int = 1
    layout: str | None = None  # of q, k, v and dout, one of LAYOUTS
    bias_layout: str | None = None  # of the bias, one of BIAS_LAYOUTS

    def __post_init__(self) -> None:
        object.__setattr__(self, "Hk", self.Hk or self.H)
        object.__setattr__(self, "Dv", self.Dv or self.D)
        object.__setattr__(self, "bias_dtype", self.bias_dtype or self.dtype)

    @property
    def batch(self) -> tuple[int, ...]:
        return (self.B,) if self.N is None else (self.B, self.N)

    def describe(self) -> dict:
        """The case for a record: its fields, with a summary of long lists of lengths."""
        out = {k: v for k, v in asdict(self).items() if v not in (None, False, ())}
        if self.lens:
            out["lens"] = {
                "n": len(self.lens),
                "min": min(self.lens),
                "max": max(self.lens),
                "total": sum(self.lens),
            }
        return out


def series(id: str) -> str:
    """The name that cases share which differ in length alone.

    >>> series("dense-bf16-d64-full-s512@fp16")
    'dense-bf16-d64-full@fp16'
    >>> series("calls-triangle-bf16-s384-model")
    'calls-triangle-bf16-model'
    """
    return re.sub(r"-s\d+(?=$|@|-model)", "", id)


def dense_grid(dtype: str = "bf16") -> list[Case]:
    """The FlashAttention-3 paper's setting: 16k tokens, hidden size 2048; 36 cells."""
    return [
        Case(
            id=f"dense-{dtype}-d{d}-{'causal' if causal else 'full'}-s{s}",
            suite="dense" if dtype == "bf16" else f"dense-{dtype}",
            dtype=dtype,
            B=16384 // s,
            H=2048 // d,
            Sq=s,
            Sk=s,
            D=d,
            causal=causal,
        )
        for d in (64, 128, 256)
        for causal in (False, True)
        for s in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def crystal_lengths(n: int, seed: int = 0, cap: int = 320) -> tuple[int, ...]:
    """Atoms per structure: LogNormal(3.19, 0.72), which reproduces MPtrj (mean 31, 82% < 50, 97% <
    100)."""
    r = random.Random(seed)
    return tuple(max(1, min(cap, round(math.exp(r.gauss(3.19, 0.72))))) for _ in range(n))


def uniform_lengths(n: int, low: int, high: int, seed: int = 0) -> tuple[int, ...]:
    r = random.Random(seed)
    return tuple(r.randint(low, high) for _ in range(n))


def protein_lengths(n: int, seed: int = 4) -> tuple[int, ...]:
    """Residues per protein, 60 to 1160, most of them short."""
    r = random.Random(seed)
    return tuple(60 + int(1100 * r.random() ** 2.5) for _ in range(n))


def _tiny() -> list[Case]:
    """One short sequence per atom, with a trained key-only log-cutoff bias."""
    pet = Case(id="", suite="tiny", dtype="fp32", H=8, Sq=25, Sk=25, bias_grad=True)
    return [
        *(
            replace(pet, id=f"pet-train-d{d}", B=500, D=d, Dv=d, bias=(500, 1, 1, 25), order=2)
            for d in (16, 32, 48, 80)
        ),
        *(replace(pet, id=f"pet-md-{b}", B=b, D=16, Dv=16, bias=(b, 1, 1, 25)) for b in (4096, 70000, 262144)),
        Case(
            id="escaip",
            suite="tiny",
            dtype="fp32",
            B=250,
            H=10,
            Sq=45,
            Sk=45,
            D=320,
            Dv=64,
            bias=(250, 1, 1, 45),
            bias_grad=True,
            order=2,
        ),
    ]


def _varlen() -> list[Case]:
    return [
        Case("crystals-bf16", "varlen", H=8, D=64, lens=uniform_lengths(2048, 8, 64)),
        Case(
            "crystals-mptrj",
            "varlen",
            "fp32",
            H=8,
            D=16,
            lens=crystal_lengths(256),
            bias="ragged",
            bias_grad=True,
            order=2,
        ),
        Case("crystals-1-200", "varlen", H=8, D=32, lens=uniform_lengths(512, 1, 200)),
        Case("documents", "varlen", H=16, D=128, lens=uniform_lengths(16, 128, 4096), causal=True),
    ]


def _square(id: str, s: int, **kwargs) -> Case:
    return Case(id=id, suite="bias", Sq=s, Sk=s, bias_grad=True, **kwargs)


def _bias() -> list[Case]:
    """Pair bias with a gradient: triangle attention, AlphaFold 3, molecules, weather."""
    return [
        *(
            _square(
                f"triangle-{dtype}-s{s}",
                s,
                dtype=dtype,
                N=s,
                H=4,
                D=32,
                bias=(1, 1, 4, s, s),
                bias_dtype="fp32",
                mask=(1, s, 1, 1, s),
            )
            for s in (256, 384, 512, 768)
            for dtype in ("bf16", "fp32")
        ),
        _square("af3-pair", 768, B=4, H=16, D=64, bias=(4, 16, 768, 768)),
        *(_square(f"af3-pairformer-s{s}", s, H=16, D=24, bias=(1, 16, s, s), bias_dtype="fp32") for s in (384, 768)),
        _square("af3-diffusion", 384, B=48, H=16, D=48, bias=(1, 16, 384, 384), bias_dtype="fp32"),
        replace(_square("atom-window", 32, B=32, N=144, H=4, D=32, bias=(1, 144, 4, 32, 128)), Sk=128),
        _square("msa-row", 384, N=512, H=8, D=32, bias=(1, 1, 8, 384, 384), mask=(1, 512, 1, 1, 384)),
        *(
            _square(f"unimol-{dtype}", 256, dtype=dtype, B=32, H=64, D=8, bias=(32, 64, 256, 256))
            for dtype in ("fp32", "fp16")
        ),
        _square("graphormer", 129, dtype="fp32", B=64, H=32, D=24, bias=(64, 32, 129, 129)),
        _square("pangu-window", 144, B=30, N=124, H=6, D=32, bias=(1, 124, 6, 144, 144)),
        _square("long-bias", 4096, H=16, D=64, bias=(1, 16, 4096, 4096)),
    ]


def _short() -> list[Case]:
    """Dense calls between a launch and a full GPU: few and many heads of batch, short rows."""
    return [
        Case(f"short-{dtype}-d{d}-bh{b * 16}-s{s}", "dense-short", dtype, B=b, H=16, Sq=s, Sk=s, D=d)
        for dtype in ("bf16", "fp32")
        for d in (32, 64, 128)
        for b in (1, 64)
        for s in (128, 512)
    ]


def _order2() -> list[Case]:
    def case(id, dtype, b, h, s, d):
        return Case(id, "order2", dtype, B=b, H=h, Sq=s, Sk=s, D=d, order=2)

    return [
        case("order2-bf16-s8192", "bf16", 1, 16, 8192, 64),
        case("order2-fp32-s2048", "fp32", 2, 8, 2048, 64),
        case("order2-fp32-s128", "fp32", 64, 8, 128, 32),
    ]


def _llm() -> list[Case]:
    return [
        Case("gqa-causal-8k", "dense", B=2, H=32, Hk=8, Sq=8192, Sk=8192, D=128, causal=True),
        Case(
            "window-1024-of-16k",
            "dense",
            H=16,
            Sq=16384,
            Sk=16384,
            D=128,
            causal=True,
            window=(1023, 0),
        ),
    ]


def _wide() -> Iterable[Case]:
    """fp32 heads wider than 128 in the layouts of models: few and many scores per row, masks of each kind,
    one query."""
    base = Case("", "wide", "fp32", B=64, H=8, layout=HEADS_INSIDE)
    for causal in (False, True):
        mode = "causal" if causal else "full"
        for d, dv, s, b in (
            (256, 256, 128, 64),
            (256, 256, 256, 32),
            (256, 256, 512, 16),
            (320, 64, 256, 32),
            (512, 512, 512, 4),
        ):
            shape = {"B": b, "D": d, "Dv": dv, "Sq": s, "Sk": s}
            yield replace(base, id=f"wide-d{d}-{mode}-s{s}", causal=causal, **shape)
    pairs = {
        "D": 256,
        "Dv": 256,
        "Sq": 128,
        "Sk": 128,
        "bias": (64, 8, 128, 128),
        "bias_grad": True,
    }
    yield replace(base, id="wide-d256-bias-s128", **pairs)
    for d, dv, s, b in (
        (256, 256, 1024, 8),
        (320, 64, 400, 32),
    ):  # more scores than half of the rows
        yield replace(base, id=f"wide-d{d}-full-s{s}", B=b, D=d, Dv=dv, Sq=s, Sk=s)
    window = {"window": (16, 16), "D": 256, "Dv": 256, "Sq": 512, "Sk": 512}
    yield replace(base, id="wide-d256-window-s512", B=8, **window)
    yield replace(base, id="wide-d256-one-query", D=256, Dv=256, Sq=1, Sk=200)
    for d, dv, s in ((130, 130, 120), (321, 64, 40)):  # rows that no vector load fits
        yield replace(base, id=f"wide-d{d}-full-s{s}", D=d, Dv=dv, Sq=s, Sk=s)
    packed = ((256, 256, 64, 20, 100), (192, 128, 64, 20, 100), (256, 256, 16, 300, 700), (320, 64, 350, 30, 50))
    for d, dv, n, low, high in packed:
        shape = {"D": d, "Dv": dv, "lens": uniform_lengths(n, low, high)}
        yield replace(base, id=f"wide-d{d}-packed-{high}", B=1, **shape)
    one = {"B": 1, "H": 1, "Hk": 1, "D": 129, "Dv": 128, "lens": uniform_lengths(216, 80, 130)}
    yield replace(base, id="wide-d129-packed-130", **one)


def _wide_long() -> Iterable[Case]:
    """fp32 heads wider than 128: few queries of thousands of keys."""
    for b, h, d, sq, sk in (
        (1, 8, 160, 3, 2048),
        (4, 16, 160, 3, 4096),
        (1, 8, 160, 95, 2048),
        (4, 16, 160, 95, 4096),
        (2, 8, 160, 1, 8192),
        (1, 8, 160, 256, 4096),
        (4, 16, 136, 17, 2048),
        (2, 8, 136, 40, 1500),
        (1, 8, 129, 17, 2047),
        (1, 8, 256, 3, 4096),
        (4, 16, 256, 17, 2048),
        (1, 8, 256, 95, 8000),
    ):
        shape = {"B": b, "H": h, "D": d, "Dv": d, "Sq": sq, "Sk": sk}
        yield Case(f"wide-d{d}-{b}x{h}-{sq}of{sk}", "wide-long", "fp32", layout=HEADS_INSIDE, **shape)


def _decode() -> list[Case]:
    return [
        Case(f"decode-b{b}-s{s}", "decode", B=b, H=32, Hk=8, Sq=1, Sk=s, D=128, order=0)
        for b in (1, 16, 64)
        for s in (4096, 8192, 32768)
        if b * s <= 1 << 20
    ]


def _calls() -> Iterable[Case]:
    """The calls that the models of `tools.models` make, each alone: "-model" in the strides of the
    model, and for some the same call with every tensor contiguous."""

    def both(case: Case, layout: str, bias_layout: str | None = None) -> Iterable[Case]:
        yield case
        yield from model(case, layout, bias_layout)

    def model(case: Case, layout: str, bias_layout: str | None = None) -> Iterable[Case]:
        yield replace(case, id=f"{case.id}-model", layout=layout, bias_layout=bias_layout)

    def call(name: str, s: int, sk: int = 0, **options) -> Case:
        return Case(f"calls-{name}-s{s}", "calls", Sq=s, Sk=sk or s, **options)

    def triangle(name: str, s: int, dtype: str, bias_dtype: str) -> Case:
        bias, mask = (1, 1, 4, s, s), (1, s, 1, 1, s)
        options = {"bias": bias, "bias_dtype": bias_dtype, "bias_grad": True, "mask": mask}
        return call(f"triangle-{name}", s, dtype=dtype, N=s, H=4, D=32, **options)

    for s in (256, 384, 768):  # Boltz-2, Protenix
        yield from both(triangle("bf16", s, "bf16", "fp32"), HEADS_INSIDE, HEADS_LAST)
    chunk = {"B": 128, "H": 4, "D": 32, "bias": (1, 4, 768, 768), "bias_dtype": "fp32"}
    chunk |= {"mask": (128, 1, 1, 768), "order": 0}  # inference beyond 384 tokens
    yield from model(call("triangle-chunk-bf16", 768, **chunk), HEADS_INSIDE, HEADS_LAST)
    yield from both(triangle("bf16-bias16", 384, "bf16", "bf16"), HEADS_INSIDE, HEADS_LAST)
    yield from both(triangle("fp32", 384, "fp32", "fp32"), HEADS_INSIDE, HEADS_LAST)

    # Boltz-2: tokens with a pair bias, and 16 diffusion samples that share one.
    shared = {"H": 16, "bias": (1, 16, 384, 384), "bias_dtype": "fp32", "bias_grad": True}
    for dtype in ("bf16", "fp32"):
        pair = call(f"pair-{dtype}", 384, dtype=dtype, D=24, mask=(1, 1, 1, 384), **shared)
        yield from both(pair, HEADS_INSIDE, HEADS_LAST)
        samples = {"B": 16, "mask": (16, 1, 1, 384), **shared}
        diffusion = call(f"diffusion-{dtype}", 384, dtype=dtype, D=48, **samples)
        yield from both(diffusion, HEADS_INSIDE, ONE_LAYER)
    yield from model(
        call("diffusion-bf16-bias16", 384, D=48, **{**samples, "bias_dtype": "bf16"}),
        HEADS_INSIDE,
        ONE_LAYER,
    )
    atoms = {"H": 4, "D": 32, "bias_grad": True}
    atoms |= {"B": 16, "N": 144, "bias": (1, 144, 4, 32, 128), "mask": (16, 144, 1, 1, 128)}
    yield from both(call("atoms-fp32", 32, 128, dtype="fp32", **atoms), HEADS_INSIDE, ONE_LAYER)
    # Boltz-2 repeats the bias for every sample.
    b = 16 * 144
    atoms |= {"B": b, "N": None, "bias": (b, 4, 32, 128), "mask": (b, 1, 1, 128)}
    for dtype in ("bf16", "fp32"):
        repeated = call(f"atoms-repeated-{dtype}", 32, 128, dtype=dtype, **atoms)
        yield from model(repeated, HEADS_INSIDE, ONE_LAYER)

    # Force fields with attention over neighbours: head dims without a tile of that size.
    yield from model(call("neighbours-fp32-d129", 120, dtype="fp32", B=216, D=129, Dv=128), HEADS_INSIDE)
    escaip = {"B": 350, "H": 8, "D": 320, "Dv": 64}
    yield from model(call("neighbours-fp32-d320", 40, dtype="fp32", **escaip), HEADS_INSIDE)

    # PET: one short sequence per atom; the bias is the logarithm of its cutoff.
    for b in (8192, 70000):
        pet = {"B": b, "H": 8, "D": 16, "bias": (b, 1, 1, 24), "bias_grad": True}
        yield from both(call(f"pet-fp32-b{b}", 24, dtype="fp32", order=2, **pet), QKV)

    # Tabular models: the features of 100,000 rows; then (TabPFN 2.6) 18,064 labelled rows of 17 columns, and 2,000 to
    # predict through one head of keys.
    yield from both(call("tabular-rows-bf16", 16, B=100_000, H=6, D=16), HEADS_INSIDE)
    yield from model(call("tabular-rows-bf16-d64", 17, B=100_064, H=3, D=64), HEADS_INSIDE)
    yield from model(call("tabular-columns-bf16", 18_064, B=17, H=3, D=64), HEADS_INSIDE)
    yield from model(call("tabular-test-bf16", 2_000, 18_064, B=17, H=3, Hk=1, D=64), FIRST_HEADS)

    # Transformers of images and text.
    for name, s, d in (("vit", 50, 80), ("vit", 77, 64), ("vit", 197, 64)):
        yield from model(call(f"{name}-bf16-d{d}", s, B=256, H=12, D=d), HEADS_INSIDE)
    # Swin-T, 64 images of 224 x 224: windows of an image and heads, by stage.
    for stage, (windows, h) in enumerate(((64, 3), (16, 6), (4, 12))):
        bias, shifted = (1, h, 49, 49), (64 * windows, h, 49, 49)
        for kind, shape in (("swin", bias), ("swin-shifted", shifted)):
            swin = {"B": 64 * windows, "H": h, "D": 32, "bias": shape, "bias_grad": True}
            yield from model(call(f"{kind}-bf16-stage{stage + 1}", 49, **swin), HEADS_INSIDE)

    # Uni-Mol: every layer's scores are the bias of the next, so each call has a whole one.
    for dtype in ("bf16", "fp32"):
        for s in (64, 256):
            unimol = {"B": 32, "H": 64, "D": 8, "bias": (32, 64, s, s), "bias_grad": True}
            yield from model(call(f"unimol-{dtype}", s, dtype=dtype, **unimol), QKV)

    # ESM-C: proteins packed one after the other, q and k rotated.
    for dtype in ("bf16", "fp32"):
        proteins = Case(f"calls-proteins-{dtype}", "calls", dtype, H=15, lens=protein_lengths(24))
        yield from model(proteins, HEADS_INSIDE)


#: One small call, timed on the host: the time that a step of a small model waits for.
SMALL_CALL = Case("small-call", "latency", H=8, Sq=64, Sk=64, D=64)

CASES: dict[str, Case] = {
    case.id: case
    for case in (
        *dense_grid(),
        *dense_grid("fp32"),
        *_llm(),
        *_tiny(),
        *_varlen(),
        *_bias(),
        *_order2(),
        *_short(),
        *_wide(),
        *_wide_long(),
        *_decode(),
        *_calls(),
        SMALL_CALL,
    )
}


#: The pass of a forward and a backward by the host's clock, Python and launching included, and the cases that
#: have it: the time that a training user of torch sees.
STEP = "training step"
TRAINING_STEPS = tuple(f"dense-bf16-d{d}-{mode}-s4096" for d in (64, 128) for mode in ("full", "causal"))

_BIAS_CLAIMS = (
    "triangle-bf16-s384",
    "triangle-fp32-s384",
    "af3-pair",
    "msa-row",
    "unimol-fp32",
    "graphormer",
)
_FP32_CLAIM = "dense-fp32-d64-full-s4096"


def _dense_ids(*dims: int, lengths: tuple[int, ...] = (1024, 4096, 16384)) -> tuple[str, ...]:
    return tuple(f"dense-bf16-d{d}-{mode}-s{s}" for d in dims for mode in ("full", "causal") for s in lengths)


def _headline() -> list[Case]:
    """The cases of the project's speed claims, and one or two of every other kind: one command, one table."""
    others = ("crystals-bf16", "crystals-mptrj", "pet-md-4096", "gqa-causal-8k")
    more = ("window-1024-of-16k", "decode-b16-s8192", "small-call")
    ids = (*_dense_ids(64, 128, 256), _FP32_CLAIM, *_BIAS_CLAIMS, *others, *more)
    return [CASES[id] for id in ids]


@dataclass(frozen=True)
class Claim:
    """A speed that the project claims: `ours` against `baseline` over `cases`.

    `target` is the least ratio of speeds, as geometric mean or, with `each`, of every case. A baseline may be
    several names with commas, the best of which counts. Without a baseline it is the largest number of
    microseconds of the best sample (other work of a shared host only adds to it).
    """

    text: str
    ours: str
    baseline: str | None
    kind: str  # "forward", "backward", "training step", "host" or "host, with gradients"
    cases: tuple[str, ...]
    target: float
    each: bool = False


def _claims() -> Iterable[Claim]:
    for kind in ("forward", "backward"):
        every = _dense_ids(64, 128, 256)
        yield Claim(f"dense, D 64 to 256, {kind}", "cuda:sm80", "sdpa:flash", kind, every, 0.9)
        fp32 = (_FP32_CLAIM,)
        yield Claim(f"fp32, D 64, S 4096, {kind}", "cuda", "sdpa:efficient", kind, fp32, 3)
        text = f"each of {len(_BIAS_CLAIMS)} cases with bias, {kind}"
        yield Claim(text, "cuda", "sdpa:efficient,cueq", kind, _BIAS_CLAIMS, 2, each=True)
        yield Claim(text, "cuda", "triton", kind, _BIAS_CLAIMS, 1, each=True)
        some = _dense_ids(64, 128, lengths=(4096, 16384))
        yield Claim(f"dense, D 64 and 128, {kind}", "triton", "flex", kind, some, 1)
        for id in ("triangle-bf16-s384", "af3-pair"):
            yield Claim(f"{id}, {kind}", "triton", "sdpa:efficient", kind, (id,), 1.5)
    for id in TRAINING_STEPS:
        yield Claim(f"{STEP}, Python included, {id}", "cuda", "sdpa:default", STEP, (id,), 1.0)
    small = ("small-call",)
    yield Claim("one small call, on the host", "cuda", None, "host", small, 15)
    yield Claim("the same, inputs require gradients", "cuda", None, "host, with gradients", small, 35)


CLAIMS = tuple(_claims())

#: Small enough for a laptop without a GPU.
CPU_CASES = [
    Case("cpu-dense", "cpu", "fp32", B=2, H=4, Sq=128, Sk=128, D=32),
    Case("cpu-causal-gqa", "cpu", "fp32", H=4, Hk=2, Sq=128, Sk=128, D=32, causal=True),
    Case(
        "cpu-pair-bias",
        "cpu",
        "fp32",
        B=4,
        H=4,
        Sq=64,
        Sk=64,
        D=16,
        bias=(1, 4, 64, 64),
        bias_grad=True,
    ),
    Case(
        "cpu-crystals",
        "cpu",
        "fp32",
        H=4,
        D=16,
        lens=crystal_lengths(8, cap=64),
        bias="ragged",
        bias_grad=True,
    ),
]

SUITES: dict[str, list[Case]] = {"headline": _headline(), "cpu": CPU_CASES}
for _case in CASES.values():
    SUITES.setdefault(_case.suite, []).append(_case)
SUITES["auto"] = [
    case
    for suite in ("calls", "bias", "tiny", "varlen", "dense-short", "wide", "decode", "latency")
    for case in SUITES[suite]
]
SUITES["all"] = list(CASES.values())


def select(suites: Iterable[str] = (), ids: Iterable[str] = ()) -> list[Case]:
    """The cases of these suites and those with these ids, in order and without repetition.

    >>> [case.id for case in select(suites=["latency"], ids=["af3-pair"])]
    ['small-call', 'af3-pair']
    """
    known = {**CASES, **{case.id: case for case in CPU_CASES}}
    chosen: dict[str, Case] = {}
    for suite in suites:
        if suite not in SUITES:
            raise BenchError(f"no suite named {suite!r}; there are {', '.join(sorted(SUITES))}")
        chosen.update((case.id, case) for case in SUITES[suite])
    for id in ids:
        if id not in known:
            close = [other for other in known if id.split("-")[0] in other]
            raise BenchError(f"no case named {id!r}" + (f"; close: {', '.join(close)}" if close else ""))
        chosen.setdefault(id, known[id])
    return list(chosen.values())
