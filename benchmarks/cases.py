"""What to time, in which shapes: cases as data, in plain Python without torch.

The shapes are those that models and papers really use: FlashAttention-3's grid, PET and EScAIP (one
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
    """What was asked of the benchmark cannot be done; the message says why."""


@dataclass(frozen=True)
class Case:
    """One attention problem: dense [B, (N,) H, S, D] or, with `lens`, packed sequences of those
    lengths.

    `bias` is a shape with 1 for broadcast dims, "ragged" (one block per packed sequence) or None.
    `order` is the highest derivative that the case is about: 0 forward, 1 backward, 2 double
    backward.
    """

    id: str
    suite: str
    dtype: str = "bf16"
    B: int = 1
    N: int | None = None
    H: int = 1
    Hk: int = 0  # 0: as many as H
    Sq: int = 0
    Sk: int = 0
    D: int = 64
    Dv: int = 0  # 0: as D
    lens: tuple[int, ...] = ()
    causal: bool = False
    window: tuple[int, int] | None = None
    bias: tuple[int, ...] | str | None = None
    bias_dtype: str | None = None  # None: the dtype of q
    bias_grad: bool = False
    mask: tuple[int, ...] | None = None
    order: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "Hk", self.Hk or self.H)
        object.__setattr__(self, "Dv", self.Dv or self.D)
        object.__setattr__(self, "bias_dtype", self.bias_dtype or self.dtype)

    @property
    def batch(self) -> tuple[int, ...]:
        return (self.B,) if self.N is None else (self.B, self.N)

    def describe(self) -> dict:
        """The case for a record: what it has, and a summary of long lists of lengths."""
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
    """
    return re.sub(r"-s\d+(?=$|@)", "", id)


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


def _tiny() -> list[Case]:
    """One short sequence per atom, with a key-only log-cutoff bias that is trained through."""
    pet = Case(id="", suite="tiny", dtype="fp32", H=8, Sq=25, Sk=25, bias_grad=True)
    return [
        *(
            replace(pet, id=f"pet-train-d{d}", B=500, D=d, Dv=d, bias=(500, 1, 1, 25), order=2)
            for d in (16, 32, 48, 80)
        ),
        *(
            replace(pet, id=f"pet-md-{b}", B=b, D=16, Dv=16, bias=(b, 1, 1, 25))
            for b in (4096, 70000, 262144)
        ),
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
        *(
            _square(f"af3-pairformer-s{s}", s, H=16, D=24, bias=(1, 16, s, s), bias_dtype="fp32")
            for s in (384, 768)
        ),
        _square("af3-diffusion", 384, B=48, H=16, D=48, bias=(1, 16, 384, 384), bias_dtype="fp32"),
        replace(
            _square("atom-window", 32, B=32, N=144, H=4, D=32, bias=(1, 144, 4, 32, 128)), Sk=128
        ),
        _square(
            "msa-row", 384, N=512, H=8, D=32, bias=(1, 1, 8, 384, 384), mask=(1, 512, 1, 1, 384)
        ),
        *(
            _square(f"unimol-{dtype}", 256, dtype=dtype, B=32, H=64, D=8, bias=(32, 64, 256, 256))
            for dtype in ("fp32", "fp16")
        ),
        _square("graphormer", 129, dtype="fp32", B=64, H=32, D=24, bias=(64, 32, 129, 129)),
        _square("pangu-window", 144, B=30, N=124, H=6, D=32, bias=(1, 124, 6, 144, 144)),
        _square("long-bias", 4096, H=16, D=64, bias=(1, 16, 4096, 4096)),
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


def _decode() -> list[Case]:
    return [
        Case(f"decode-b{b}-s{s}", "decode", B=b, H=32, Hk=8, Sq=1, Sk=s, D=128, order=0)
        for b in (1, 16, 64)
        for s in (4096, 8192, 32768)
        if b * s <= 1 << 20
    ]


#: One small call, timed on the host: what a step of a small model waits for.
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
        *_decode(),
        SMALL_CALL,
    )
}


#: The pass of a forward and a backward by the host's clock, Python and launching included, and the
#: cases that have it: what torch's users see who train.
STEP = "training step"
TRAINING_STEPS = tuple(
    f"dense-bf16-d{d}-{mode}-s4096" for d in (64, 128) for mode in ("full", "causal")
)

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
    return tuple(
        f"dense-bf16-d{d}-{mode}-s{s}" for d in dims for mode in ("full", "causal") for s in lengths
    )


def _headline() -> list[Case]:
    """What the project's speed claims rest on, and one or two cases of every other kind: one
    command, one table."""
    others = ("crystals-bf16", "crystals-mptrj", "pet-md-4096", "gqa-causal-8k")
    more = ("window-1024-of-16k", "decode-b16-s8192", "small-call")
    ids = (*_dense_ids(64, 128, 256), _FP32_CLAIM, *_BIAS_CLAIMS, *others, *more)
    return [CASES[id] for id in ids]


@dataclass(frozen=True)
class Claim:
    """A speed that the project stands for: `ours` against `baseline` over `cases`.

    `target` is the least ratio of speeds, of their geometric mean or, with `each`, of every case; a
    baseline may be several names with commas, the best of which counts. Without a baseline it is the
    most microseconds of the best sample (whatever else a shared host does only adds to it).
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
    yield Claim(
        "the same, inputs require gradients", "cuda", None, "host, with gradients", small, 35
    )


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
            raise BenchError(
                f"no case named {id!r}" + (f"; close: {', '.join(close)}" if close else "")
            )
        chosen.setdefault(id, known[id])
    return list(chosen.values())
