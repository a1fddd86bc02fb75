"""The properties of generated cases, as names, and their combinations with dtypes, head dims and backends that never
came up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from flashsci.testing.cases import (
    DOUT_LAYOUTS,
    DOUT_SCALES,
    EXECUTIONS,
    LAYOUTS,
    MAGNITUDES,
    NUMBERS,
    PADDINGS,
    PLACES,
    Case,
)
from flashsci.testing.reshaping import has_inner_heads

# Buckets of head dims, by the larger of the two, as kernels are made for them.
BUCKETS = (16, 32, 64, 96, 128, 192, 256, 512)
# The features of a variant: there are too few variants for each feature at every head dim.
OF_VARIANTS = ("weights", "scale zero", "scale negative")
VIEWS = ("contiguous", "transposed", "padded", "expanded", "linear")


def properties(case: Case) -> list[str]:
    """Names of the special properties of a case; those of :func:`expected`, for cases that :func:`draw_case`
    makes."""
    variant = case.variant
    found = [f"{name} {layout}" for name, layout in case.layout_of.items()]
    found += [] if case.magnitude == "unit" else [f"values {case.magnitude}"]
    found += [] if case.padding == "none" else [f"zero rows {case.padding}"]
    found += [] if case.dout_scale == 1 else [f"dout {case.dout_scale:g}"]
    found += ["dout not as q"] if case.layout_of["dout"] != case.layout else []
    found += ["scale 1e8"] if case.scale == 1e8 else []
    found += ["softcap 0.01"] if case.softcap == 0.01 else []
    found += ["softcap far above"] if (case.softcap or 0) > 1e3 else []
    found += ["gate of pairs"] if variant.gate else []
    found += ["softcap of biased scores"] if variant.caps_bias else []
    found += ["learnt slopes"] if variant.alibi_grad else []
    found += [f"run with {case.execution}"] if case.execution else []
    found += ["scale zero"] if case.scale == 0 else []
    found += ["scale negative"] if (case.scale or 0) < 0 else []
    found += ["scale tiny"] if case.scale and abs(case.scale) < 1e-5 else []
    if case.weight_shape is not None:
        found.append(f"weights {case.weight_zeros}")
        found += ["weights and sink"] if variant.sink else []
    if case.bias_shape is not None:
        found.append(f"bias {case.bias_view}")
        found += ["bias large"] if case.bias_scale > 1 else []
        if not variant.varlen:
            found.append(f"bias of {len(case.bias_shape)} dims")
            found += ["bias of many members"] if max((*case.lead, 1)) > 5 else []
            found += ["bias of inner heads"] if has_inner_heads(case) else []
        if case.bias_number:
            found += [f"bias {case.bias_number}", f"numbers {case.bias_number_at}"]
        if case.bias_number and case.padding != "none":
            found.append("numbers and zero rows")
        if variant.bias_grad and not variant.varlen and 0 in case.score_shape:
            empty = "batch" if 0 in case.lead else "queries" if case.seq_q == 0 else "keys"
            found.append(f"bias gradient of no {empty}")
    return found


def expected(dtype: str, features: bool = True) -> list[str]:
    """The properties that should come up in this dtype; ``features``: biases, too."""
    found = [f"{name} {layout}" for name, layout in itertools.product(("q", "k", "v", "dout"), LAYOUTS)]
    found += [f"dout {x}" for x in DOUT_LAYOUTS[len(LAYOUTS) :]]
    found += [f"run with {x}" for x in EXECUTIONS]
    found += ["softcap far above", "scale zero", "scale negative", "scale tiny"]
    found += [f"values {x}" for x in MAGNITUDES] + [f"zero rows {x}" for x in PADDINGS]
    found += [f"dout {x:g}" for x in dict.fromkeys(DOUT_SCALES[dtype])] + ["dout not as q"]
    found += ["softcap 0.01"] + (["scale 1e8"] if dtype != "float16" else [])
    if features:
        found += [f"bias {x}" for x in (*VIEWS, *NUMBERS)] + [f"numbers {x}" for x in PLACES]
        found += [f"weights {x}" for x in ("some", "none", "rows", "subnormal", "and sink")]
        found += ["bias large"]
        found += [f"bias of {n} dims" for n in range(1, 6)] + ["numbers and zero rows"]
        found += ["bias of many members", "bias of inner heads"]
        found += [f"bias gradient of no {x}" for x in ("batch", "queries", "keys")]
    return found


def bucket(case: Case) -> int:
    """The bucket of the larger head dim."""
    widest = max(case.variant.head_dim, case.variant.head_dim_v)
    return next(limit for limit in BUCKETS if widest <= limit)


class Coverage:
    """Counts of properties by (backend, dtype) and by (backend, bucket) of judged cases."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str | int], dict[str, int]] = {}

    def see(self, backend: str, case: Case) -> None:
        names = properties(case)
        for group in (case.variant.dtype, bucket(case)):
            counts = self.counts.setdefault((backend, group), {})
            for name in ("cases", *names):
                counts[name] = counts.get(name, 0) + 1

    def add(self, other: Coverage) -> None:
        for key, theirs in other.counts.items():
            mine = self.counts.setdefault(key, {})
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count

    def summary(
        self, backends: Iterable[str], dtypes: Iterable[str] = ("bfloat16", "float16", "float32")
    ) -> dict[str, dict[str, dict[str, object]]]:
        """Per backend, per dtype and per bucket of head dims: the number of judged cases, and the properties that no
        case had.

        A group without a case is left out, with all its names: the backend has no kernels for it, or none were asked
        for.
        """
        report: dict[str, dict[str, dict[str, object]]] = {}
        kinds: tuple[str | int, ...] = (*dtypes, *BUCKETS)
        for backend in backends:
            groups: dict[str, dict[str, object]] = {}
            for group in kinds:
                counts = self.counts.get((backend, group))
                if not counts:
                    continue
                wanted = expected(group if isinstance(group, str) else "float32")
                apart = OF_VARIANTS if group in BUCKETS else ()
                if not any(name.startswith("weights") for name in counts):  # refused
                    apart = (*apart, "weights")
                wanted = [x for x in wanted if not x.startswith(apart)]
                groups[group if isinstance(group, str) else f"head dims to {group}"] = {
                    "cases": counts["cases"],
                    "never": [name for name in wanted if name not in counts],
                }
            report[backend] = groups
        return report
