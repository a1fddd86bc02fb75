"""The second-order kernels, interpreted: named cases for every feature and generated ones, against the fp64 oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashsci.testing import (
    Case,
    Judge,
    Variant,
    evaluate,
    generate,
    make_inputs,
    poisoned_memory,
    second_order_variants,
)
from flashsci.testing.cases import SMALL_LENGTHS

pytestmark = [
    pytest.mark.every(6),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets without a GPU only; there, run the check"),
]


def case(variant=None, **fields):
    plain = {"lead": (2,), "heads_k": 1, "group": 2, "seq_q": 40, "seq_k": 37, "seed": 11}
    variant = {"tangents": "qkvb" if (variant or {}).get("bias_grad") else "qkv"} | (variant or {})
    return Case(variant=Variant(**variant), **(plain | fields))


PAIR = {"bias": "pair", "bias_grad": True}
KEY = {"bias": "key", "bias_grad": True}
WEIGHT = {"key_weight": "float", "key_weight_grad": True, "tangents": "qkvw"}
PACKED = {
    "rank": 3,
    "lead": (),
    "seq_q": 0,
    "seq_k": 0,
    "lens_q": (33, 0, 1, 17),
    "lens_k": (17, 5, 0, 40),
}
PAIRS = sum(q * k for q, k in zip(PACKED["lens_q"], PACKED["lens_k"], strict=True))
SHORT = {"seq_q": 17, "seq_k": 23}
SHORT_PACKED = PACKED | {"lens_q": (9, 0, 1, 17), "lens_k": (17, 5, 0, 23)}
SHORT_PAIRS = 9 * 17 + 17 * 23

CASES = {
    "fp32": case({"lse_grad": True}),
    "fp32, ieee": case(precision="ieee"),
    "fp16": case({"dtype": "float16", "head_dim": 32, "head_dim_v": 16}),
    "bf16": case({"dtype": "bfloat16", "head_dim": 16, "head_dim_v": 32, "lse_grad": True}),
    "odd head dims": case({"head_dim": 3, "head_dim_v": 5}),
    "two chunks": case({"dtype": "float16", "head_dim": 80, "head_dim_v": 48}, layout="bshd"),
    "one query": case(seq_q=1, seq_k=33),
    "one key": case(seq_q=33, seq_k=1),
    "no keys": case(seq_k=0),
    "no queries": case(seq_q=0),
    "causal, upper left": case({"window": True}, causal=True, seq_q=50, seq_k=35),
    "causal, lower right": case(
        {"window": True}, causal=True, align="lower_right", seq_q=50, seq_k=35
    ),
    "window": case({"window": True}, window=(16, 3), seq_q=70, seq_k=70),
    "left window": case({"window": True}, window=(5, None), align="lower_right", seq_k=60),
    "softcap": case({"softcap": True, "lse_grad": True}, softcap=2.0, magnitude="peaked"),
    "softcap and bias": case({"softcap": True, **PAIR}, softcap=1.0, bias_shape=(2, 2, 40, 37)),
    "dropout": case({"dropout": True}, dropout_p=0.5),
    "full bias": case(PAIR, bias_shape=(2, 2, 40, 37), bias_holes=True),
    "transposed bias": case(PAIR, bias_shape=(2, 2, 40, 37), bias_view="transposed"),
    "bias shared by the batch": case(PAIR, bias_shape=(1, 2, 40, 37), lead=(5,)),
    "bias shared by heads": case(
        {**PAIR, "window": True, "dropout": True, "softcap": True},
        bias_shape=(2, 1, 40, 37), causal=True, dropout_p=0.2, softcap=3.0,
    ),
    "bias of two batch dims": case(
        {**PAIR, "bias_float": True, "dtype": "float16", "mask": True},
        rank=5, lead=(2, 3), bias_shape=(1, 3, 2, 40, 37), mask_shape=(2, 1, 1, 1, 37),
    ),
    "bias of keys": case({**KEY, "bias_float": True, "dtype": "bfloat16"}, bias_shape=(2, 1, 1, 37)),
    "bias of queries": case({**PAIR, "lse_grad": True}, bias_shape=(2, 1, 40, 1)),
    "bias without gradient": case({"bias": "pair"}, bias_shape=(2, 1, 40, 37)),
    "mask": case({"mask": True}, mask_shape=(2, 1, 40, 37), mask_kind="rows"),
    "mask of keys": case({"mask": True}, mask_shape=(2, 1, 1, 37), mask_kind="keys"),
    "nothing visible": case({"mask": True}, mask_shape=(1, 1, 1, 37), mask_kind="none"),
    "expanded inputs": case(layout="expanded", lead=(3,)),
    "unaligned inputs": case({"dtype": "float16", "head_dim": 24, "head_dim_v": 24}, layout="shifted"),
    "common shift": case({**PAIR, "dtype": "bfloat16"}, bias_shape=(2, 2, 40, 37), tangent_magnitude="offset"),
    "packed": case({"varlen": True, "window": True}, causal=True, align="lower_right", **PACKED),
    "packed, lengths unknown": case({"varlen": True, "dropout": True}, dropout_p=0.2, known_lengths=False, **PACKED),
    "packed, bias of keys": case({"varlen": True, **KEY}, bias_shape=(2, 62), **PACKED),
    "packed, bias of pairs": case({"varlen": True, **PAIR}, bias_shape=(2, PAIRS), **PACKED),
    "packed, shared bias of pairs": case({"varlen": True, **PAIR, "lse_grad": True}, bias_shape=(1, PAIRS), **PACKED),
    # Whole sequences in one tile: one kernel.
    "short": case({"lse_grad": True, "window": True, "softcap": True}, causal=True, softcap=2.0, **SHORT),
    "short, two chunks": case({"dtype": "float16", "head_dim": 48, "head_dim_v": 24, "dropout": True}, dropout_p=0.2, **SHORT),
    "short, full bias": case(
        {**PAIR, "mask": True}, bias_shape=(2, 2, 17, 23), mask_shape=(1, 1, 17, 23), mask_kind="rows", **SHORT
    ),
    "short, bias of keys": case(KEY, bias_shape=(2, 1, 1, 23), **SHORT),
    "short, bias of queries": case({**PAIR, "lse_grad": True}, bias_shape=(2, 1, 17, 1), **SHORT),
    "key weights": case(WEIGHT, weight_shape=(2, 1, 37)),
    "key weights of two heads": case({**WEIGHT, "dtype": "bfloat16", "mask": True}, heads_k=2, weight_shape=(2, 2, 37),
                                     mask_shape=(2, 1, 40, 37), mask_kind="rows"),
    "key weights for all, some rows without": case({**WEIGHT, "window": True}, causal=True, weight_shape=(37,)),
    "key weights, all zero": case(WEIGHT, weight_shape=(2, 1, 37), weight_zeros="rows"),
    "key weights in 16 bits": case({**WEIGHT, "dtype": "float16", "key_weight": "inputs"}, weight_shape=(2, 1, 37),
                                   weight_view="padded"),
    "key weights and everything": case(
        {**WEIGHT, **PAIR, "dropout": True, "softcap": True, "lse_grad": True, "tangents": "qkvbw"},
        softcap=2.0, dropout_p=0.2, bias_shape=(2, 2, 40, 37), weight_shape=(2, 1, 37),
    ),
    "key weights and a shared bias": case({**WEIGHT, **PAIR, "tangents": "qkvbw"}, bias_shape=(2, 1, 40, 37), weight_shape=(1, 1, 37)),
    "key weights without gradient": case({"key_weight": "float"}, weight_shape=(2, 1, 37)),
    "packed, key weights": case({"varlen": True, **WEIGHT}, weight_shape=(1, 62), **PACKED),
    "short, key weights": case(WEIGHT, weight_shape=(2, 1, 23), **SHORT),
    "ALiBi": case({"alibi": True, "window": True, "softcap": True}, softcap=2.0, causal=True, align="lower_right"),
    "ALiBi and a shared bias": case({**PAIR, "alibi": True}, bias_shape=(2, 1, 40, 37)),
    "packed, ALiBi": case({"varlen": True, "alibi": True}, **PACKED),
    "short, ALiBi": case({"alibi": True}, **SHORT),
    "short, key weights and everything": case(
        {**WEIGHT, **PAIR, "dropout": True, "softcap": True, "lse_grad": True, "tangents": "qkvbw"},
        softcap=2.0, dropout_p=0.2, bias_shape=(2, 2, 17, 23), weight_shape=(1, 1, 23), **SHORT,
    ),
    "packed, short, key weights": case({"varlen": True, **WEIGHT}, weight_shape=(45,), **SHORT_PACKED),
    "short, shared bias": case(PAIR, bias_shape=(17, 23), **SHORT),
    "packed, short": case({"varlen": True, "lse_grad": True}, **SHORT_PACKED),
    "packed, short, bias of keys": case({"varlen": True, **KEY}, bias_shape=(2, 45), **SHORT_PACKED),
    "packed, short, bias of pairs": case({"varlen": True, **PAIR}, bias_shape=(2, SHORT_PAIRS), **SHORT_PACKED),
}  # fmt: skip
# A softcap of scores with their bias, in each kernel of its gradient.
CAPPED = {"softcap": True, "caps_bias": True, "lse_grad": True}
for prefix, seq_q, seq_k, sizes in (("", 40, 37, {}), ("short, ", 17, 23, SHORT)):
    CASES |= {
        f"{prefix}capped bias": case({**CAPPED, **PAIR}, softcap=2.0, bias_shape=(2, 2, seq_q, seq_k), bias_holes=True, **sizes),
        f"{prefix}capped bias, shared": case(
            {**CAPPED, **PAIR, **WEIGHT, "tangents": "qkvbw"}, softcap=2.0, bias_shape=(1, 1, seq_q, seq_k), weight_shape=(2, 1, seq_k), **sizes
        ),
        f"{prefix}capped bias of keys": case({**CAPPED, **KEY, "alibi": True}, softcap=2.0, bias_shape=(2, 1, 1, seq_k), **sizes),
        f"{prefix}capped bias of queries": case({**CAPPED, **PAIR, "tangents": "b"}, softcap=2.0, bias_shape=(2, 1, seq_q, 1), **sizes),
    }  # fmt: skip
CASES["packed, capped bias of pairs"] = case(
    {"varlen": True, **CAPPED, **PAIR}, softcap=2.0, bias_shape=(2, PAIRS), **PACKED
)
# A gate of pairs, of every shape and view that its kernels tell apart.
GATE = {"gate": "float", "lse_grad": True, "tangents": "qkvg"}
CASES |= {
    "gate": case(GATE, gate_shape=(2, 2, 40, 37)),
    "gate, bf16": case({**GATE, "dtype": "bfloat16", "gate": "inputs"}, gate_shape=(1, 2, 40, 37), gate_view="linear"),
    "gate and everything": case(
        {**GATE, **PAIR, **WEIGHT, "softcap": True, "caps_bias": True, "dropout": True, "tangents": "qkvbwg"},
        softcap=2.0, dropout_p=0.2, bias_shape=(2, 1, 40, 37), weight_shape=(2, 1, 37), gate_shape=(2, 1, 40, 37),
    ),
    "gate of all heads, causal, fp16": case(
        {**GATE, "dtype": "float16", "window": True}, causal=True, gate_shape=(2, 1, 40, 37), gate_view="padded"
    ),
    "gate of keys": case(GATE, gate_shape=(2, 2, 1, 37)),
    "gate of queries": case(GATE, gate_shape=(40, 1)),
    "gate of heads": case(GATE, gate_shape=(2, 1, 1)),
    "gate of keys, causal": case({**GATE, "window": True}, causal=True, align="lower_right", gate_shape=(37,)),
    "gate of pairs for all": case(GATE, lead=(5,), gate_shape=(40, 37), gate_view="transposed"),
    "gate, one query": case(GATE, seq_q=1, gate_shape=(2, 2, 1, 37)),
    "gate, one key": case(GATE, seq_k=1, gate_shape=(2, 2, 40, 1)),
    "gate, no keys": case(GATE, seq_k=0, gate_shape=(2, 2, 40, 1)),
    "gate, window, mask, sink": case(
        {**GATE, "mask": True, "window": True, "sink": "float"},
        window=(9, 4), gate_shape=(2, 2, 40, 37), mask_shape=(2, 1, 40, 37), mask_kind="rows",
    ),
    "gate and a bias": case({**GATE, **PAIR, "tangents": "qkvbg"}, gate_shape=(1, 2, 40, 37), bias_shape=(2, 2, 40, 37), bias_holes=True),
    "gate and a bias of keys": case({**GATE, **KEY, "tangents": "qkvbg"}, gate_shape=(2, 2, 40, 37), bias_shape=(2, 1, 1, 37)),
    "gate and a bias of queries": case({**GATE, **PAIR, "tangents": "qkvbg"}, gate_shape=(2, 1, 40, 37), bias_shape=(2, 1, 40, 1)),
    "gate, two batch dims, ALiBi": case(
        {**GATE, "alibi": True, "dropout": True}, dropout_p=0.2, rank=5, lead=(2, 3), seq_q=33, seq_k=20, gate_shape=(3, 1, 33, 20)
    ),
    "gate, keys of their own": case({**GATE, "head_dim": 40, "head_dim_v": 24}, heads_k=2, group=1, gate_shape=(2, 2, 40, 37), layout="bshd"),
    "gate, wide heads": case({**GATE, "head_dim": 129, "head_dim_v": 200}, gate_shape=(2, 2, 17, 23), **SHORT),
    "gate, huge scores": case(GATE, magnitude="huge", gate_shape=(2, 2, 40, 37)),
    "gate, common shift": case({**GATE, **PAIR, "dtype": "bfloat16", "tangents": "qkvbg"}, bias_shape=(2, 2, 40, 37),
                               gate_shape=(2, 2, 40, 37), tangent_magnitude="offset"),
}  # fmt: skip
# Absent tangents beside a gate.
for some in ("g", "q", "v", "kg", "vg", "wg", "bg"):
    variant = {**GATE, **PAIR, **WEIGHT, "softcap": True, "tangents": some}
    CASES[f"gate, tangents of {some}"] = case(
        variant, softcap=2.0, gate_shape=(2, 1, 40, 37), bias_shape=(2, 2, 40, 37), weight_shape=(2, 1, 37)
    )
# Absent tangents, each in the large kernels and in the one for short sequences.
for some in ("w", "qw", "vw"):
    variant = {**WEIGHT, "softcap": True, "tangents": some}
    CASES[f"tangents of {some}"] = case(variant, softcap=2.0, weight_shape=(2, 1, 37))
    CASES[f"short, tangents of {some}"] = case(variant, softcap=2.0, weight_shape=(2, 1, 23), **SHORT)
for some in ("q", "k", "v", "b", "qk", "kv", "qvb", "kb"):
    variant = {**PAIR, "softcap": True, "tangents": some}
    CASES[f"tangents of {some}"] = case(variant, softcap=2.0, bias_shape=(2, 2, 40, 37))
    CASES[f"short, tangents of {some}"] = case(variant, softcap=2.0, bias_shape=(2, 2, 17, 23), **SHORT)
    CASES[f"shared, tangents of {some}"] = case(variant, softcap=2.0, bias_shape=(40, 37))


# One of each feature for `make test`; the others, a few seconds of interpreting each, are `make test-slow`.
QUICK = {
    "fp32", "bf16", "odd head dims", "two chunks", "one key", "no keys", "no queries", "causal, lower right", "window",
    "softcap and bias", "dropout", "full bias", "bias shared by heads", "mask", "nothing visible", "packed",
    "packed, bias of pairs", "short", "short, full bias", "packed, short", "key weights", "key weights and a shared bias",
    "short, key weights", "ALiBi", "tangents of qvb", "short, tangents of k", "capped bias, shared", "short, capped bias", "gate and everything",
    "gate of keys", "gate, window, mask, sink", "gate, tangents of vg",
}  # fmt: skip


def quick_first(names, quick):
    """All of them as parameters; those that are not quick are marked slow."""
    assert set(quick) <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick_first(CASES, QUICK))
def test_named(name):
    judge = Judge(replace(make_inputs(CASES[name]), twice=not CASES[name].variant.gate))
    with poisoned_memory():
        found = evaluate(judge.inputs, "triton")
    judge.require(found)
    assert {"gq", "gk", "gv", "gdout", "tout", "tlse"} <= set(found)
    assert ({"tuout", "tulse"} <= set(found)) is (CASES[name].variant.gate is None)


# Heads so wide that scores are held in memory, of every dense case.
WIDE = {
    name: replace(x, variant=replace(x.variant, dtype="float32", head_dim=130, head_dim_v=24))
    for name, x in CASES.items()
    if not x.variant.varlen
}


@pytest.mark.parametrize("name", quick_first(WIDE, QUICK & set(WIDE)))
def test_wide_heads(name, monkeypatch):
    """In one section, a few, or one for each key head."""
    from flashsci.backends.triton import tilings
    from flashsci.backends.triton.plans.dense import plan
    from flashsci.backends.triton.plans.wide import Wide

    plan.cache_clear()  # plans made before keep the methods of then
    monkeypatch.setattr(tilings, "FEW_SCORES", (1 << 12, 1, 1 << 24)[list(WIDE).index(name) % 3])
    monkeypatch.setattr(tilings, "is_wide", lambda dims, *sizes: max(dims) > 128)
    served = []
    for what in ("forward", "backward", "tangents", "double_backward"):
        honest = getattr(Wide, what)
        spy = lambda *a, what=what, honest=honest, **k: served.append(what) or honest(*a, **k)  # noqa: E731
        monkeypatch.setattr(Wide, what, spy)
    judge = Judge(replace(make_inputs(WIDE[name]), twice=not WIDE[name].variant.gate))
    with poisoned_memory():
        judge.require(evaluate(judge.inputs, "triton"))
    plan.cache_clear()
    assert len(set(served)) == 4 or name.endswith(("no keys", "no queries"))


NARROW = {
    name: replace(x, variant=replace(x.variant, dtype="float32", head_dim=24, head_dim_v=40))
    for name, x in [(n, x) for n, x in CASES.items() if not (x.variant.varlen or x.variant.gate)][::2]
}


@pytest.mark.parametrize("name", quick_first(NARROW, QUICK & set(NARROW)))
def test_the_second_order_alone_holds_scores(name, monkeypatch):
    from flashsci.backends.triton import tilings
    from flashsci.backends.triton.plans.dense import plan
    from flashsci.backends.triton.plans.wide import Wide

    plan.cache_clear()
    monkeypatch.setattr(tilings, "FEW_SCORES", 1 << 12)
    monkeypatch.setattr(tilings, "holds_second_order", lambda *given: True)
    monkeypatch.setattr(tilings, "double_backward_small_config", lambda *given: None)
    served = []
    honest = Wide.double_backward
    monkeypatch.setattr(Wide, "double_backward", lambda *a, **k: served.append(name) or honest(*a, **k))
    judge = Judge(replace(make_inputs(NARROW[name]), twice=True))
    with poisoned_memory():
        judge.require(evaluate(judge.inputs, "triton"))
    plan.cache_clear()
    # Loads of the rows of this bias extend beyond its keys.
    assert served or name == "transposed bias" or name.endswith(("no keys", "no queries"))


@pytest.mark.parametrize(
    "lead, heads_k, group, scores", [((3, 5), 4, 2, 100), ((7, 1), 3, 1, 60), ((1, 6), 8, 4, 50), ((1, 1), 1, 1, 5)]
)
@pytest.mark.parametrize("most", (1, 250, 1000, 4321, 1 << 24))
def test_sections_cover_each_head_once(lead, heads_k, group, scores, most, monkeypatch):
    from flashsci.backends.triton import tilings
    from flashsci.backends.triton.plans.wide import sections_of

    monkeypatch.setattr(tilings, "FEW_SCORES", most)
    places = torch.arange(lead[0] * lead[1] * heads_k * group).view(*lead, heads_k * group)
    parts = sections_of(lead, heads_k, group, scores)
    for part in parts:
        heads = places[part.box].flatten()
        assert heads.tolist() == list(range(part.first * group, (part.first + part.count) * group))
        assert part.count == 1 or part.count * group * scores <= most
    assert torch.cat([places[part.box].flatten() for part in parts]).equal(places.flatten())


@pytest.mark.parametrize("part", quick_first(range(6), {0}))
def test_generated(part):
    # Triton refuses gradients of key weights beside a sink.
    pool = [v for v in second_order_variants(max_dim=96) if not (v.sink and v.key_weight_grad)]
    for generated in generate(50 + part, 5, pool, lengths=SMALL_LENGTHS, score_limit=3000):
        judge = Judge(replace(make_inputs(generated), twice=not generated.variant.gate))
        with poisoned_memory():
            judge.require(evaluate(judge.inputs, "triton"))


@pytest.mark.parametrize("bias", ("key", "pair"))
@pytest.mark.parametrize("sizes", (SHORT, {}), ids=("short", "long"))
def test_intermediate_values_beyond_fp16(sizes, bias):
    """A key of weight zero makes W and F as large as e^(S - lse): results that fp16 can hold must be right."""
    seq_q, seq_k = sizes.get("seq_q", 40), sizes.get("seq_k", 37)
    bias_shape = (2, 1, 1, seq_k) if bias == "key" else (2, 1, seq_q, seq_k)
    variant = WEIGHT | {"dtype": "float16", "head_dim": 48, "bias": bias}
    inputs = make_inputs(case(variant, bias_shape=bias_shape, weight_shape=(2, 1, seq_k), **sizes))
    with torch.no_grad():
        inputs.key_weight[..., 5] = 0.0
        inputs.bias[..., 5] = 14.0
    inputs = replace(inputs, twice=True)
    judge = Judge(inputs)
    for name in ("gq", "gk", "gv", "tout"):
        beyond = judge.truth[name].abs() > torch.finfo(torch.float16).max
        assert beyond.any() and not beyond.all(), name
    with poisoned_memory():
        judge.require(evaluate(inputs, "triton"))


NEEDED = ("fp32", "short", "bias shared by heads", "packed, bias of pairs", "key weights", "short, key weights")


@pytest.mark.parametrize("name", quick_first(NEEDED, {"short"}))
def test_what_is_not_needed_is_empty_and_changes_nothing(name):
    """Every subset of seven gradients from the raw op: the same bits, the rest empty."""
    import flashsci
    from flashsci.backends import triton

    inputs = make_inputs(CASES[name])
    calls = []
    honest = triton.double_backward
    triton.double_backward = lambda *a: calls.append(a) or honest(*a)
    try:
        evaluate(inputs, "triton")
    finally:
        triton.double_backward = honest
    *arguments, _ = calls[0]
    has_bias = inputs.bias is not None and inputs.bias_grad
    has_weight = inputs.key_weight is not None
    whole = honest(*arguments, 127 - 8 * (not has_bias) - 16 * (not has_weight))
    bits = (1, 2, 4, 8, 16, 32, 64)
    subsets = [sum(s) for n in (1, 2) for s in itertools.combinations(bits, n)]
    for need in subsets:
        some = honest(*arguments, need)
        for i, (a, b) in enumerate(zip(some, whole, strict=True)):
            if not need >> i & 1 or (i == 3 and not has_bias) or (i == 4 and not has_weight):
                assert a.numel() == 0
            else:
                assert torch.equal(a, b), (need, i)
    assert flashsci.__version__


def test_tangents_of_any_layout():
    """Cotangents come as autograd makes them: expanded, transposed, without a contiguous dim."""
    plain = replace(CASES["full bias"], bias_holes=False)
    inputs = make_inputs(plain)
    shapes = {name: x.shape for name, x in inputs.tangents.items()}
    layouts = {
        "expanded": lambda s: torch.randn((1,) * len(s)).expand(s),
        "rows expanded": lambda s: torch.randn((*s[:-2], 1, s[-1])).expand(s),
        "transposed": lambda s: torch.randn((*s[:-2], s[-1], s[-2])).mT,
        "heads last": lambda s: torch.randn((s[0], s[2], s[3], s[1])).permute(0, 3, 1, 2),
    }
    for make in layouts.values():
        given = replace(inputs, tangents={name: make(s) for name, s in shapes.items()}, twice=True)
        Judge(given).require(evaluate(given, "triton"))
