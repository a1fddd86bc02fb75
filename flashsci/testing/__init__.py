"""Tools for testing attention, like torch.testing: error bounds, generated problems, poisoned memory.

from flashsci.testing import generate, make_inputs, Judge, evaluate, poisoned_memory

for case in generate(seed=0, count=100):
    judge = Judge(make_inputs(case, "cuda"))
    with poisoned_memory():
        judge.require(evaluate(judge.inputs, "triton"))
"""

from flashsci.testing import (  # noqa: F401  (register their traps)
    traps_execution,
    traps_models,
    traps_second,
    traps_tangents,
)
from flashsci.testing.bounds import TENSORS, Finding, Judge, assert_accurate, exact_matmul
from flashsci.testing.calls import LARGE_CALLS, SMALL_CALLS, CallLimits, DrawnCall, draw_call
from flashsci.testing.calls_making import make_call
from flashsci.testing.cases import Case, MapCase, ResidualCase, Variant
from flashsci.testing.drawing import (
    cases,
    draw_case,
    generate,
    generate_maps,
    generate_residual,
    map_cases,
    residual_cases,
)
from flashsci.testing.evaluation import evaluate
from flashsci.testing.fp8 import (
    FP8Case,
    FP8Inputs,
    FP8Judge,
    FP8Variant,
    fp8_cases,
    generate_fp8,
    judge_fp8,
    make_fp8_inputs,
)
from flashsci.testing.inputs import Inputs
from flashsci.testing.making import make_inputs
from flashsci.testing.maps import MapInputs, MapJudge
from flashsci.testing.paged import (
    PagedCase,
    PagedInputs,
    PagedJudge,
    PagedVariant,
    generate_paged,
    judge_paged,
    make_paged_inputs,
    paged_cases,
)
from flashsci.testing.poison import embed, poison_value, poisoned_memory
from flashsci.testing.traps import TRAPS, Skipped, Trap
from flashsci.testing.variants import map_variants, residual_variants, second_order_variants, variants

__all__ = [
    "LARGE_CALLS",
    "SMALL_CALLS",
    "TENSORS",
    "TRAPS",
    "CallLimits",
    "Case",
    "DrawnCall",
    "FP8Case",
    "FP8Inputs",
    "FP8Judge",
    "FP8Variant",
    "Finding",
    "Inputs",
    "Judge",
    "MapCase",
    "MapInputs",
    "MapJudge",
    "PagedCase",
    "PagedInputs",
    "PagedJudge",
    "PagedVariant",
    "ResidualCase",
    "Skipped",
    "Trap",
    "Variant",
    "assert_accurate",
    "cases",
    "draw_call",
    "draw_case",
    "embed",
    "evaluate",
    "exact_matmul",
    "fp8_cases",
    "generate",
    "generate_fp8",
    "generate_maps",
    "generate_paged",
    "generate_residual",
    "judge_fp8",
    "judge_paged",
    "make_call",
    "make_fp8_inputs",
    "make_inputs",
    "make_paged_inputs",
    "map_cases",
    "map_variants",
    "paged_cases",
    "poison_value",
    "poisoned_memory",
    "residual_cases",
    "residual_variants",
    "second_order_variants",
    "variants",
]
