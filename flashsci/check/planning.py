"""The plan of a check: generated cases, and the backends that judge them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashsci.check import units
from flashsci.testing import (
    Case,
    FP8Case,
    MapCase,
    PagedCase,
    ResidualCase,
    Variant,
    generate,
    generate_fp8,
    generate_maps,
    generate_paged,
    generate_residual,
    map_variants,
    residual_variants,
    second_order_variants,
    variants,
)
from flashsci.testing.cases import (
    BULK_LENGTHS,
    DOUT_LAYOUTS,
    LARGE_LENGTHS,
    LAYOUTS,
    SHORT_LENGTHS,
    SMALL_LENGTHS,
)
from flashsci.testing.choices import SeededChoices
from flashsci.testing.coverage import VIEWS
from flashsci.testing.drawing import draw_case, draw_map, draw_residual
from flashsci.testing.drawing_values import layouts_of
from flashsci.testing.reshaping import resized, with_inner_heads, with_members, with_neighbours

PlannedCases = tuple[
    list[Case] | list[PagedCase] | list[FP8Case] | list[ResidualCase] | list[MapCase], tuple[str, ...]
]  # cases, and the backends that are judged by them
# Head dims whose rows are 32, 64 and 128 bytes.
WHOLE = {"float16": (16, 32, 64), "bfloat16": (16, 32, 64), "float32": (16, 32)}
# Heads wider than those of `variants`; in fp32 their scores are held in memory if they are few.
WIDE = ((320, 64), (129, 131), (512, 512), (257, 40), (264, 320))
MANY_KEYS = (1025, 1288)  # with as many queries, too many scores to hold
FEW_QUERIES = (3, 40)  # with so many keys, scores that are held
OF_MANY_KEYS, OF_FEW_QUERIES = (6, 8), 7  # the families of wide heads that have them
DTYPE_OF = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def plan_cases(count: int, seed: int, device: str, unit: str | None, order: int = 1, many: bool = False) -> list[Case]:
    """The cases of a run; every sixteenth family has long sequences. Interpreter-sized on the CPU.

    ``many``: with more variants and layouts than Triton could compile kernels for in the time of a run.
    """
    make = second_order_variants if order == 2 else variants
    pool = make() if device == "cuda" else make(max_dim=32)
    if unit and "bias" in unit:
        pool = [v for v in pool if v.bias_grad]
    pairs = bool(unit and unit.startswith("cuda/sm90/pair"))
    small = bool(unit and unit.startswith("cuda/sm80/small"))
    hopper = bool(unit and unit.startswith("cuda/sm90")) and not pairs
    dropping = bool(unit and unit.startswith("cuda/sm80/dropout"))
    weighting = bool(unit and unit.startswith("cuda/sm80/weights"))  # of all dtypes
    slopes = bool(unit and unit.startswith("cuda/sm80")) and not small
    if unit and unit.startswith("cuda"):
        only = None if weighting else DTYPE_OF.get(unit.rsplit("_")[-1])
        # Without features that these kernels refuse: a case that no backend serves shows nothing.
        served = [
            replace(v, caps_bias=v.caps_bias and slopes, gate=None, dropout=dropping)
            for v in variants(1024 if many else 512) + variants(features=False)
            if not (v.dropout and not dropping)
            and not (v.varlen and v.bias and (not slopes or dropping))
            and not (v.alibi and (v.bias or not slopes or (v.varlen and dropping)))
            and not (dropping and max(v.head_dim, v.head_dim_v) > 128)
            and not (v.key_weight and not weighting)
            and only in (None, v.dtype)
            and not (hopper and (v.dtype == "float32" or v.head_dim % 8 or v.head_dim_v % 8))
        ]
        if pairs:
            served = [paired(v) for v in served if not v.varlen]
        elif small:
            dense = (v for v in served if not v.varlen)
            served = [shortened(v, whole=i % 2 == 0, weighted=i % 3 == 0) for i, v in enumerate(dense)]
        elif weighting:
            dense = (v for v in served if not (v.varlen or v.bias or v.alibi))
            served = [replace(v, key_weight="float", key_weight_grad=i % 4 != 0) for i, v in enumerate(dense)]
        pool = list(dict.fromkeys(served))[: 256 if many else 64]
    if device != "cuda":
        return list(generate(seed, count, pool, lengths=SMALL_LENGTHS, score_limit=1 << 9))
    # One family of problems for each variant, so that there are few kernels to compile: within it, values, batch,
    # heads and lengths of a class vary.
    choices = SeededChoices(seed)
    rounds = max(1, min(8, count // (2 * len(pool)))) if many else 2 if count >= 4000 else 1
    families: list[Case] = []
    met: dict[tuple[Any, ...], int] = defaultdict(int)
    for i, variant in enumerate(pool * rounds):
        lengths = SHORT_LENGTHS if small else LARGE_LENGTHS if i % 16 == 0 else BULK_LENGTHS
        drawn, inner_heads = draw_case(choices, [variant], lengths), pairs
        if order == 1 and variant.bias == "pair" and not variant.varlen and not pairs:
            met[variant.dtype, "pairs", None] += 1
            turn = met[variant.dtype, "pairs", None] % 4
            inner_heads = turn == 0
            if turn == 2:
                drawn = with_members(choices, drawn)
        family = _dealt(drawn, met)
        if inner_heads:
            family = with_inner_heads(choices, family)
        families.append(_aligned(family) if hopper or pairs or small else family)
    most = 19 if order == 2 else 21  # log2 of scores: the second order of the oracle is slow
    limits = [1 << (most if i % 16 == 0 else most - 2) for i in range(len(families))]
    n = len(families)
    cases = [resized(choices, families[i % n], limits[i % n]) for i in range(count)]
    if small:  # in every other round
        chosen = lambda i, x: i // n % 2 == 0 and is_whole(x)  # noqa: E731
        return [with_neighbours(choices, x) if chosen(i, x) else x for i, x in enumerate(cases)]
    if not pairs:
        return cases
    return [case if i % 4 == 0 else _whole_rows(case) for i, case in enumerate(cases)]


def _dealt(case: Case, met: dict[tuple[Any, ...], int]) -> Case:
    """The case with layouts, views and dims of a bias dealt in turn, dtype by dtype: families are too few for chance.
    ``met`` counts them."""

    def rarest(what: str, options: Sequence[Any]) -> Any:
        found = min(options, key=lambda x: met[case.variant.dtype, what, x])
        met[case.variant.dtype, what, found] += 1
        return found

    kinds = layouts_of(case)
    layout = rarest("q", kinds)
    others: tuple[str, ...] = ()
    if case.layouts:  # each from another start, so that not all are equal
        turned = {n: kinds[i:] + kinds[:i] for i, n in enumerate(("k", "v", "dout"))}
        turned["dout"] += DOUT_LAYOUTS[len(LAYOUTS) :]
        others = tuple(rarest(n, of) for n, of in turned.items())
    case = replace(case, layout=layout, layouts=others)
    if case.bias_shape is not None and not case.variant.varlen:
        rank = len(case.score_shape)
        dims = rarest("dims", range(rank, 0, -1))
        shape = ((1,) * rank + case.bias_shape)[-dims:]
        case = replace(case, bias_view=rarest("view", VIEWS), bias_shape=shape)
    return case


def _aligned(case: Case) -> Case:
    """The case with rows at multiples of 16 bytes, as Hopper's copies and wide loads need; otherwise as drawn."""
    kept = lambda layout: "bshd" if layout == "shifted" else layout  # noqa: E731
    return replace(case, layout=kept(case.layout), layouts=tuple(map(kept, case.layouts)))


def _whole_rows(case: Case) -> Case:
    """The case with rows of all heads side by side in 16 bits, as csrc/sm90/pair needs them."""
    return case if case.variant.dtype == "float32" else replace(case, layout="bshd", layouts=())


def paired(variant: Variant) -> Variant:
    """The nearest variant that csrc/sm90/pair serves."""
    dims = [min(-(-d // 4) * 4, 32) for d in (variant.head_dim, variant.head_dim_v)]
    if narrow := variant.dtype != "float32":
        dims = [24 if max(dims) <= 24 else 32] * 2
    return replace(
        variant,
        head_dim=dims[0],
        head_dim_v=dims[1],
        bias="pair",
        bias_float=narrow,
        window=False,
        softcap=False,
        caps_bias=False,
        sink=None,
    )


def shortened(variant: Variant, whole: bool, weighted: bool) -> Variant:
    """The nearest variant that csrc/sm80/small serves if sequences are short. whole: rows of 64 or 128 bytes.
    weighted: in fp32 with key weights in the place of a bias."""
    dims = [min(-(-d // 4) * 4, 64) for d in (variant.head_dim, variant.head_dim_v)]
    if whole:
        known = WHOLE[variant.dtype]
        dims = [next((d for d in known if max(dims) <= d), known[-1])] * 2
    variant = replace(variant, head_dim=dims[0], head_dim_v=dims[1], softcap=False, caps_bias=False, sink=None)
    if weighted and variant.dtype == "float32":
        learnt = variant.bias is None or variant.bias_grad
        variant = replace(
            variant,
            bias=None,
            bias_float=False,
            bias_grad=False,
            key_weight="float",
            key_weight_grad=learnt,
        )
    return variant


def wide_cases(count: int, seed: int, device: str) -> list[Case]:
    """Cases with heads wider than in other cases: three of four in fp32 and dense, with derivatives of second
    order."""
    choices = SeededChoices(seed)
    drawn = [v for v in second_order_variants(96) if v.dtype == "float32" and not v.varlen][:9]
    drawn += [replace(v, sink=None) for v in variants(96) if v.dtype != "float32" or v.varlen][:3]
    pool = [replace(v, head_dim=d, head_dim_v=dv) for v, (d, dv) in zip(drawn, itertools.cycle(WIDE), strict=False)]
    if device != "cuda":
        return list(generate(seed, count, pool, lengths=SMALL_LENGTHS, score_limit=1 << 9))
    long = LARGE_LENGTHS[:2]
    families = []
    for i, v in enumerate(pool):
        few = i == OF_FEW_QUERIES
        usual = MANY_KEYS if i in OF_MANY_KEYS else (*BULK_LENGTHS, 40, *long)
        case = draw_case(choices, [v], FEW_QUERIES + MANY_KEYS if few else usual)
        while few and not (case.seq_q in FEW_QUERIES and case.seq_k in MANY_KEYS):
            case = draw_case(choices, [v], FEW_QUERIES + MANY_KEYS)
        families.append(case)
    return [resized(choices, families[i % len(families)], 1 << 18) for i in range(count)]


def is_whole(case: Case) -> bool:
    """Whether csrc/sm80/small may hold rows of a case in shared memory, by their size."""
    longest = max(case.seq_q, case.seq_k)
    return case.variant.head_dim in WHOLE[case.variant.dtype] and longest <= SHORT_LENGTHS[-1]


def paged_plan(count: int, seed: int, device: str, backends: Sequence[str]) -> PlannedCases:
    """Cases of paged attention, for the backends that have it; small ones where Triton interprets.

    If CUDA's kernels are judged, every other case is one that they serve: most drawn cases have fp32, scales of a
    16-bit cache or rows that are not aligned.
    """
    limits = {} if device == "cuda" else {"longest_k": 40, "longest_q": 6}
    having = units.cuda_paged(device)
    names = tuple(b for b in backends if b in ("triton", *having))
    cases = list(generate_paged(seed, count, **limits))
    if set(having) & set(names):
        cases[::2] = [aligned_paged(case) for case in cases[::2]]
    return cases, names


def aligned_paged(case: PagedCase) -> PagedCase:
    """The nearest case that the CUDA library's paged kernels take, with rows at multiples of 16 bytes; otherwise as
    drawn."""
    variant, layout, scales = case.variant, case.layout, case.scales
    if variant.dtype == "float32":
        variant = replace(variant, dtype=("float16", "bfloat16")[case.seed % 2])
    if layout == "unaligned":
        layout = "rows"
    if variant.cache:
        dim, dim_v = (-(-d // 16) * 16 for d in (variant.head_dim, variant.head_dim_v))
        variant = replace(variant, head_dim=dim, head_dim_v=dim_v)
    else:
        scales = "none"
    return replace(case, variant=variant, layout=layout, scales=scales)


def fp8_plan(count: int, seed: int, device: str, backends: Sequence[str]) -> PlannedCases:
    """Cases of attention on 8-bit floats, in the same way; for CUDA if the device and the library have that
    kernel."""
    limits = {} if device == "cuda" else {"longest": 70}
    having = ("triton", "cuda") if units.runs_cuda_fp8(device) else ("triton",)
    return list(generate_fp8(seed, count, **limits)), tuple(b for b in backends if b in having)


def residual_plan(count: int, seed: int, device: str, backends: Sequence[str]) -> PlannedCases:
    """Cases of residual attention, for the backends with kernels of it: on a GPU in families, each of which has a
    kernel."""
    names = tuple(b for b in backends if b == "triton")
    if device != "cuda":
        limits: dict[str, Any] = {
            "pool": residual_variants(max_dim=32),
            "lengths": SMALL_LENGTHS,
            "score_limit": 1 << 9,
        }
        return list(generate_residual(seed, count, **limits)), names
    choices = SeededChoices(seed)
    pool = residual_variants()
    chosen = [pool[i % len(pool)] for i in range(max(1, min(len(pool), count // 3)))]
    families = [draw_residual(choices, [v], BULK_LENGTHS) for v in chosen]
    return [resized(choices, families[i % len(families)], 1 << 19) for i in range(count)], names


def maps_plan(count: int, seed: int, device: str, backends: Sequence[str]) -> PlannedCases:
    """Cases of the reductions of attention maps, in the same way."""
    names = tuple(b for b in backends if b == "triton")
    if device != "cuda":
        pool = map_variants(max_dim=32)
        return list(generate_maps(seed, count, pool=pool, lengths=SMALL_LENGTHS, score_limit=1 << 9)), names
    choices = SeededChoices(seed)
    pool = map_variants()
    chosen = [pool[i % len(pool)] for i in range(max(1, min(len(pool), count // 3)))]
    families = [draw_map(choices, [v], BULK_LENGTHS) for v in chosen]
    return [resized(choices, families[i % len(families)], 1 << 19) for i in range(count)], names


# Calls with cases of their own, by the group of their units: (class, plan).
APART = {
    "paged": (PagedCase, paged_plan),
    "fp8": (FP8Case, fp8_plan),
    "residual": (ResidualCase, residual_plan),
    "maps": (MapCase, maps_plan),
}


def plans_of(
    count: int,
    seed: int,
    device: str,
    unit: str | None,
    orders: Sequence[int],
    backends: Sequence[str],
) -> list[PlannedCases]:
    """The cases of a check, and the backends that judge them.

    Half of a run of everything, and three quarters of one of CUDA units, are for CUDA kernels restricted to one
    generation, in many more layouts and variants than the rest. Second order is Triton's, after a forward of either.
    Wide heads, a sixteenth as many, are Triton's, too.
    """
    backends = tuple(backends)
    # These kernels serve such cases themselves: no Triton kernel replaces them, and none is compiled.
    held = tuple(b for b in backends if b in ("cuda:sm90", "cuda:sm80"))

    def apart(share: int, part: str, names: tuple[str, ...]) -> PlannedCases:
        return plan_cases(share, seed + len(plans), device, part, many=True), names

    plans: list[PlannedCases] = []
    if device == "cuda" and unit is None and "cuda:sm90" in held:
        plans.append(apart(7 * count // 20, "cuda/sm90", held))
        if "cuda:sm80" in held:
            plans.append(apart(3 * count // 20, "cuda/sm80/fwd_fp32", ("cuda:sm80",)))
    elif device == "cuda" and held and unit is not None and unit.startswith("cuda") and orders != [2]:
        plans.append(apart(3 * count // 4, unit, held))
    only_wide = bool(unit and unit.startswith("triton/wide"))
    rest = 0 if only_wide else count - sum(len(planned) for planned, _ in plans)
    plans.insert(0, (plan_cases(rest, seed, device, unit, orders[0]), backends))
    if len(orders) > 1:
        users = tuple(b for b in backends if ":" not in b)
        plans.append((plan_cases(count // 10, seed, device, unit, orders[1]), users or backends))
    wide = count if only_wide else count // 16
    if wide and "triton" in backends:
        plans.append((wide_cases(wide, seed, device), ("triton",)))
    return plans
