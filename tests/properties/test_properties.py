"""Hypothesis draws whole problems; every backend that runs here must agree with the oracle and with
the symmetries of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flashsci
from flashsci.testing import (
    Judge,
    MapInputs,
    MapJudge,
    cases,
    evaluate,
    make_inputs,
    map_cases,
    map_variants,
    poisoned_memory,
    variants,
)
from flashsci.testing.cases import BULK_LENGTHS, SMALL_LENGTHS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
POOL = variants() if GPU else variants(max_dim=32)
DENSE = [v for v in POOL if not v.varlen]
# Nothing depends on positions.
PLAIN = [v for v in DENSE if not (v.window or v.dropout or v.alibi)]
LIMITS = {
    "reference": {"lengths": BULK_LENGTHS, "score_limit": 1 << 12},
    "sdpa": {"lengths": BULK_LENGTHS, "score_limit": 1 << 12},
    "eager": {"lengths": BULK_LENGTHS, "score_limit": 1 << 12},
    "triton": {
        "lengths": BULK_LENGTHS if GPU else SMALL_LENGTHS,
        "score_limit": 1 << (16 if GPU else 10),
    },
    "cuda": {"lengths": BULK_LENGTHS, "score_limit": 1 << 16},
}
EXAMPLES = {"reference": 25, "sdpa": 25, "eager": 25, "triton": 60 if GPU else 5, "cuda": 60}
NO_LSE = ("sdpa", "eager")
BACKENDS = ["reference", "sdpa", "eager", "triton", *(["cuda"] if GPU else [])]


def served(pool, backend):
    """Without what a backend always refuses: refusals are discarded examples, and few may be."""
    if backend in ("reference", "triton"):
        return pool
    pool = [
        replace(v, caps_bias=v.caps_bias and backend == "cuda", gate=None)
        for v in pool
        if not v.dropout and not (v.alibi and (backend != "cuda" or v.bias or v.key_weight))
    ]
    if backend == "sdpa":
        return [v for v in pool if not (v.softcap or v.lse_grad or v.sink)]
    pool = [v for v in pool if not v.key_weight]
    if backend == "cuda":
        return pool
    return [v for v in pool if v.dtype == "float32" and not (v.softcap or v.lse_grad or v.sink)]


def fused(backend):
    """Whether a backend keeps scores in fp32: plain PyTorch may do as badly as it does."""
    return backend not in ("reference", *NO_LSE)


def bearable(case, backend):
    """Without scores beyond 65504, which plain PyTorch does not survive in float16, nor those of 1e7 and more in SDPA: torch's
    backward on CPUs rounds them otherwise than its forward, by 1 and more, so that P is not bounded by 1. Nor saved tensors in
    other strides in SDPA: that backward reads rows as if they were contiguous."""
    if backend == "sdpa" and (case.magnitude == "huge" or case.scale == 1e8):
        case = replace(case, magnitude="peaked", scale=None)
    if backend == "sdpa" and case.execution == "hooks":
        case = replace(case, execution="")
    if fused(backend) or case.variant.dtype != "float16":
        return case
    number = "-1e4" if case.bias_number else ""
    magnitude = "peaked" if case.magnitude == "huge" else case.magnitude
    return replace(case, bias_number=number, magnitude=magnitude)


def run(inputs, backend, *, deterministic=False, **options):
    """The results of one call in poisoned memory; a refusal discards the example."""
    options = dict(options, deterministic=deterministic)
    try:
        with poisoned_memory():
            return evaluate(inputs, backend, lse=backend not in NO_LSE, **options)
    except flashsci.BackendError:
        assume(False)


def check(backend, strategy, body, examples=1.0):
    """Run ``body(case, ...)`` over drawn examples."""
    count = max(3, int(EXAMPLES[backend] * examples))
    settings(max_examples=count)(given(strategy)(body))()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
def test_agrees_with_the_oracle(backend, packed):
    """The two-error rule, gain and spread, of every tensor, over whole problems."""
    pool = [v for v in POOL if v.varlen == packed]
    if backend in NO_LSE:
        if packed:
            pytest.skip(f"{backend} takes no packed sequences")
        pool = served(pool, backend)

    def body(case):
        case = bearable(case, backend)
        inputs = make_inputs(case, DEVICE)
        Judge(inputs, fused(backend)).require(run(inputs, backend))

    check(backend, cases(pool, **LIMITS[backend]), body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_keys_does_not_matter(backend):
    pool = served(PLAIN, backend) if backend in NO_LSE else PLAIN

    def body(case):
        case = bearable(case, backend)
        inputs = make_inputs(case, DEVICE)
        order = torch.randperm(case.seq_k, generator=torch.Generator().manual_seed(case.seed))
        order = order.to(DEVICE)

        def turn(x, dim):
            return x if x is None or (x.shape[dim] == 1 and case.seq_k != 1) else x.detach().index_select(dim, order)

        moved = replace(
            inputs,
            k=turn(inputs.k, -2),
            v=turn(inputs.v, -2),
            bias=turn(inputs.bias, -1),
            key_weight=turn(inputs.key_weight, -1),
            mask=turn(inputs.mask, -1),
        )
        found = run(moved, backend)
        back = torch.argsort(order)
        for name, dim in (("dk", -2), ("dv", -2), ("dbias", -1), ("dkey_weight", -1)):
            if name in found and (found[name].shape[dim] != 1 or case.seq_k == 1):
                found[name] = found[name].index_select(dim, back)
        Judge(inputs, fused(backend)).require(found)

    check(backend, cases(pool, **LIMITS[backend]), body, 0.5)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in NO_LSE])
def test_a_constant_added_to_a_row_of_scores_moves_only_the_lse(backend):
    pool = [replace(v, bias="pair", bias_float=True, sink=None) for v in served(PLAIN, backend) if not v.mask]

    def body(case):
        case = bearable(case, backend)
        # A number that stands for a mask leaves nothing of what is added to it.
        case = replace(case, bias_shape=case.score_shape, bias_view="contiguous", bias_number="")
        inputs = make_inputs(case, DEVICE)
        shift = torch.randint(-8, 9, case.score_shape[:-1], generator=torch.Generator().manual_seed(1))
        shift = shift.to(DEVICE)[..., None]  # integers: the sum rounds little
        found = run(replace(inputs, bias=inputs.bias.detach() + shift), backend)
        found["lse"] = found["lse"] - shift[..., 0]
        judge = Judge(inputs, fused(backend))
        # The shifted bias and lse round once more.
        extra = 16 * torch.finfo(torch.float32).eps
        for name in judge.floor:
            judge.floor[name] *= 8
            judge.gain_floor[name] = 8 * judge.gain_floor[name] + extra
            judge.spread_floor[name] *= 8
        judge.require(found)

    check(backend, cases(pool, **LIMITS[backend]), body, 0.5)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in NO_LSE])
def test_parts_merged_by_their_lse_are_the_whole(backend):
    """Split-K: any two halves of the keys, weighted by exp(lse - total), give out and lse."""
    pool = [
        replace(
            v,
            dtype="float32" if backend != "cuda" else v.dtype,
            bias=None,
            key_weight=None,
            sink=None,
            mask=False,
            lse_grad=False,
        )
        for v in PLAIN
    ]

    def body(case, cut):
        case = bearable(case, backend)
        inputs = replace(make_inputs(case, DEVICE), dout=None)
        cut = min(cut, case.seq_k)
        parts = [
            run(replace(inputs, k=inputs.k[..., keys, :], v=inputs.v[..., keys, :]), backend)
            for keys in (slice(0, cut), slice(cut, None))
        ]
        lse = torch.logaddexp(parts[0]["lse"], parts[1]["lse"])
        weights = [torch.exp(p["lse"] - torch.where(torch.isinf(lse), 0.0, lse))[..., None] for p in parts]
        out = sum(w * p["out"].float() for w, p in zip(weights, parts, strict=True))
        judge = Judge(inputs)
        judge.floor = {n: 4 * x for n, x in judge.floor.items()}  # two more roundings of each part
        judge.gain_floor = {n: 4 * x + 1e-6 for n, x in judge.gain_floor.items()}
        judge.spread_floor = {n: 4 * x for n, x in judge.spread_floor.items()}
        judge.require({"out": out.to(inputs.q.dtype), "lse": lse})

    strategy = cases(pool, **LIMITS[backend])
    count = max(3, EXAMPLES[backend] // 2)
    settings(max_examples=count)(given(strategy, st.integers(0, 40))(body))()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_key_weights_are_a_quotient_of_two_plain_attentions(backend):
    """out = A(w v) / A(w) with A the attention without weights: a formula without logarithms, exact at zero."""
    pool = [
        replace(v, key_weight="float", sink=None, bias=None, mask=False, dropout=False, dtype="float32") for v in PLAIN
    ]

    def body(case):
        case = replace(case, weight_shape=case.key_shape, weight_zeros="some", magnitude="unit", scale=None)
        case = replace(case, variant=replace(case.variant, key_weight_grad=False))
        inputs = replace(make_inputs(case, DEVICE), dout=None)
        wide = inputs.to(torch.float64)
        w = wide.key_weight[..., None]
        plain = replace(wide, key_weight=None)
        above = evaluate(replace(plain, v=w * plain.v), "reference")["out"]
        below = evaluate(replace(plain, v=w.expand_as(plain.v)), "reference")["out"]
        out = torch.where(below == 0, 0.0, above / below)
        found = run(inputs, backend)["out"]
        torch.testing.assert_close(found.double(), out, rtol=1e-3, atol=1e-4)

    check(backend, cases(pool, **LIMITS[backend]), body, 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_attention_of_a_prefix_is_the_prefix(backend):
    """Later queries and keys never matter: rows of the long call are those of the short one."""
    pool = [
        v
        for v in (served(DENSE, backend) if backend in NO_LSE else DENSE)
        if not (v.dropout or v.bias or v.key_weight or v.mask or v.lse_grad)
    ]
    pool = [replace(v, window=True) for v in pool]

    def body(case, length):
        case = bearable(case, backend)
        case = replace(case, seq_k=case.seq_q, causal=True, window=None, align="upper_left")
        length = min(length, case.seq_q)
        inputs = make_inputs(case, DEVICE)
        short = replace(
            inputs,
            dout=None,
            **{n: getattr(inputs, n).detach()[..., :length, :] for n in ("q", "k", "v")},
        )
        found = run(replace(inputs, dout=None), backend)
        part = {"out": found["out"][..., :length, :]}
        if "lse" in found:
            part["lse"] = found["lse"][..., :length]
        Judge(short, fused(backend)).require(part)

    strategy = cases(pool, **LIMITS[backend])
    count = max(3, EXAMPLES[backend] // 2)
    settings(max_examples=count)(given(strategy, st.integers(1, 60))(body))()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if fused(b)])
def test_an_entry_of_a_batch_is_that_entry_alone(backend):
    """Batch invariance of fused kernels, bit for bit where sums have a fixed order: results do not depend on what
    else is there."""
    without = ("dropout", "bias", "key_weight", "mask", "alibi", "sink")
    pool = [v for v in DENSE if not any(getattr(v, name) for name in without)]

    def body(case):
        case = replace(case, rank=4, lead=(2,), layout="bshd", layouts=())
        inputs = make_inputs(case, DEVICE)
        whole = run(inputs, backend, deterministic=True)
        last = slice(case.lead[0] - 1, None)
        names = [n for n in ("q", "k", "v", "dout", "dlse") if getattr(inputs, n) is not None]
        alone = run(
            replace(inputs, **{n: getattr(inputs, n).detach()[last] for n in names}),
            backend,
            deterministic=True,
        )
        for name, x in alone.items():
            assert torch.equal(whole[name][last], x), name

    check(backend, cases(pool, **LIMITS[backend]), body)


@pytest.mark.parametrize("backend", ["reference", "triton", *(["cuda"] if GPU else [])])
def test_powers_of_two_move_between_q_and_scale(backend):
    """q times 2 and scale over 2 is the same call, bit for bit."""
    pool = [v for v in served(DENSE, backend) if not v.dropout]

    def body(case):
        case = replace(case, layout="bhsd", layouts=(), magnitude="unit")
        scale = case.variant.head_dim**-0.5 if case.scale is None else case.scale
        inputs = replace(make_inputs(case, DEVICE), dout=None, dlse=None)
        one = run(inputs, backend, scale=scale)
        two = run(replace(inputs, q=2 * inputs.q.detach()), backend, scale=scale / 2)
        assert all(torch.equal(one[name], two[name]) for name in one)

    check(backend, cases(pool, **LIMITS[backend]), body, 0.5)


def test_linear_in_v():
    """In fp64, out is linear in v and does not change lse."""

    def body(case, a):
        inputs = make_inputs(replace(case, variant=replace(case.variant, dtype="float64")), DEVICE)
        inputs = replace(inputs.to(torch.float64), dout=None, dlse=None)
        other = torch.randn_like(inputs.v)
        first, second, both = (run(replace(inputs, v=v), "reference") for v in (inputs.v, other, inputs.v + a * other))
        torch.testing.assert_close(both["out"], first["out"] + a * second["out"], rtol=1e-9, atol=1e-9)
        assert torch.equal(both["lse"], first["lse"])

    strategy = cases(DENSE, **LIMITS["reference"])
    settings(max_examples=20)(given(strategy, st.floats(-4, 4))(body))()


@pytest.mark.parametrize("a, b", [("reference", "triton"), ("sdpa", "triton")] + ([("triton", "cuda")] if GPU else []))
def test_backends_agree_with_each_other(a, b):
    pool = [v for v in served(DENSE, b) if not (v.softcap or v.dropout or v.lse_grad)]

    def body(case):
        case = bearable(bearable(case, a), b)
        inputs = make_inputs(case, DEVICE)
        judge = Judge(inputs, fused(a) and fused(b))
        first, second = run(inputs, a), run(inputs, b)
        for name in first.keys() & second.keys():
            found = judge.compare(name, first[name], second[name])
            assert found.problem is None, found.problem

    check(b, cases(pool, **LIMITS["triton"]), body)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@settings(max_examples=40)
@given(
    case=map_cases(pool=map_variants(max_dim=32), lengths=BULK_LENGTHS if GPU else SMALL_LENGTHS, score_limit=1 << 9)
)
def test_reductions_of_a_map_agree_with_the_oracle(backend, case):
    inputs = MapInputs(case, "cuda" if torch.cuda.is_available() else "cpu")
    judge = MapJudge(inputs)
    results = inputs.evaluate(backend)
    judge.require(results)
    for name, x in results.items():
        assert not x.numel() or judge.catches(name, x.nan_to_num() * torch.nan, 1.0)
