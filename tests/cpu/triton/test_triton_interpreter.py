"""The Triton kernels, interpreted: named cases for every feature, and generated ones, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsci.testing import Case, Judge, Variant, evaluate, generate, make_inputs, poisoned_memory
from flashsci.testing.cases import SMALL_LENGTHS

pytestmark = pytest.mark.every(4)

pytest.importorskip("triton")

GENERATED = 24
SEED = 7


def case(variant=None, **fields):
    fields = {
        "lead": (2,),
        "heads_k": 1,
        "group": 2,
        "seq_q": 40,
        "seq_k": 40,
        "seed": 11,
    } | fields
    return Case(variant=Variant(**(variant or {})), **fields)


PACKED = {
    "rank": 3,
    "lead": (),
    "seq_q": 0,
    "seq_k": 0,
    "lens_q": (33, 0, 1, 17),
    "lens_k": (17, 5, 0, 40),
}
SHORT = {"seq_q": 17, "seq_k": 23}


def long_cases():
    yield "fp32", case({"lse_grad": True})
    yield "fp16", case({"dtype": "float16", "head_dim": 64, "head_dim_v": 32})
    yield "bf16", case({"dtype": "bfloat16", "head_dim": 32, "head_dim_v": 64})
    yield "odd head dims", case({"head_dim": 3, "head_dim_v": 5})
    yield "two chunks", case({"dtype": "float16", "head_dim": 80, "head_dim_v": 48}, layout="bshd")
    yield (
        "large head dims",
        case({"head_dim": 320, "head_dim_v": 64}, lead=(1,), seq_q=17, seq_k=33),
    )
    yield "one query", case(seq_q=1, seq_k=33)
    yield "one key", case(seq_q=33, seq_k=1)
    yield "no keys", case(seq_k=0)
    yield "no queries", case(seq_q=0)
    yield "causal, upper left", case({"window": True}, causal=True, seq_q=50, seq_k=35)
    yield (
        "causal, lower right",
        case({"window": True}, causal=True, align="lower_right", seq_q=50, seq_k=35),
    )
    yield "window", case({"window": True}, window=(16, 3), seq_q=70, seq_k=70)
    yield (
        "left window",
        case({"window": True}, window=(5, None), align="lower_right", seq_q=40, seq_k=60),
    )
    yield "softcap", case({"softcap": True}, softcap=2.0, magnitude="peaked")
    yield "dropout", case({"dropout": True}, dropout_p=0.5, seq_k=37)
    yield (
        "full bias",
        case({"bias": "pair", "bias_grad": True}, bias_shape=(2, 2, 40, 40), bias_holes=True),
    )
    yield (
        "transposed bias",
        case({"bias": "pair", "bias_grad": True}, bias_shape=(2, 2, 40, 40), bias_view="transposed"),
    )
    yield (
        "bias shared by the batch",
        case({"bias": "pair", "bias_grad": True}, bias_shape=(1, 2, 40, 40), lead=(5,)),
    )
    yield "bias shared by heads", case(
        {"bias": "pair", "bias_grad": True, "window": True, "dropout": True}, bias_shape=(2, 1, 40, 40), causal=True, dropout_p=0.1)  # fmt: skip
    yield "bias of two batch dims", case({"bias": "pair", "bias_grad": True, "bias_float": True, "dtype": "float16"}, rank=5,
                                         lead=(2, 3), bias_shape=(1, 3, 2, 40, 40), mask_shape=(2, 1, 1, 1, 40))  # fmt: skip
    yield (
        "bias of keys",
        case(
            {"bias": "key", "bias_grad": True, "bias_float": True, "dtype": "bfloat16"},
            bias_shape=(2, 1, 1, 40),
        ),
    )
    yield (
        "bias of queries",
        case({"bias": "pair", "bias_grad": True, "lse_grad": True}, bias_shape=(2, 1, 40, 1)),
    )
    yield "mask", case({"mask": True}, mask_shape=(2, 1, 40, 40), mask_kind="rows")
    yield "mask of keys", case({"mask": True}, mask_shape=(2, 1, 1, 40), mask_kind="keys")
    yield "nothing visible", case({"mask": True}, mask_shape=(1, 1, 1, 40), mask_kind="none")
    yield "expanded inputs", case(layout="expanded", lead=(3,))
    yield (
        "unaligned inputs",
        case({"dtype": "float16", "head_dim": 24, "head_dim_v": 24}, layout="shifted"),
    )
    yield "low scores and a tail of 64 keys", case({"mask": True, "dtype": "bfloat16"}, seq_q=16, seq_k=192, lead=(1,), group=1,
                                                   mask_shape=(1, 1, 1, 192), mask_kind="keys", magnitude="low")  # fmt: skip
    yield (
        "packed",
        case({"varlen": True, "window": True}, causal=True, align="lower_right", **PACKED),
    )
    yield (
        "packed, lengths unknown",
        case({"varlen": True, "dropout": True}, dropout_p=0.3, known_lengths=False, **PACKED),
    )
    yield (
        "packed, bias of keys",
        case({"varlen": True, "bias": "key", "bias_grad": True}, bias_shape=(2, 62), **PACKED),
    )
    pairs = sum(q * k for q, k in zip(PACKED["lens_q"], PACKED["lens_k"], strict=True))
    yield (
        "packed, bias of pairs",
        case({"varlen": True, "bias": "pair", "bias_grad": True}, bias_shape=(2, pairs), **PACKED),
    )
    yield (
        "packed, shared bias of pairs",
        case({"varlen": True, "bias": "pair", "bias_grad": True}, bias_shape=(1, pairs), **PACKED),
    )

    yield "ALiBi", case({"alibi": True, "window": True}, causal=True, align="lower_right", seq_k=70)
    yield "ALiBi and a shared bias", case({"alibi": True, "bias": "pair", "bias_grad": True}, bias_shape=(2, 1, 40, 40))
    yield "packed, ALiBi", case({"varlen": True, "alibi": True, "sink": "float"}, **PACKED)
    yield "sink", case({"sink": "float", "lse_grad": True})
    yield (
        "sink in 16 bits",
        case({"sink": "inputs", "dtype": "bfloat16", "mask": True}, mask_shape=(2, 1, 40, 40), mask_kind="rows"),
    )
    yield "sink, no keys", case({"sink": "float", "lse_grad": True}, seq_k=0)


def short_cases():
    """Whole sequences in one tile: their backward is one kernel."""
    yield (
        "short",
        case({"lse_grad": True, "window": True, "softcap": True}, causal=True, softcap=2.0, **SHORT),
    )
    yield "short, ALiBi", case({"alibi": True, "sink": "float"}, align="lower_right", **SHORT)
    yield (
        "short, two chunks",
        case({"dtype": "float16", "head_dim": 48, "head_dim_v": 24, "dropout": True}, dropout_p=0.4, **SHORT),
    )
    yield "short, full bias", case({"bias": "pair", "bias_grad": True, "mask": True}, bias_shape=(2, 2, 17, 23),
                                   mask_shape=(1, 1, 17, 23), mask_kind="rows", **SHORT)  # fmt: skip
    yield (
        "short, bias of keys",
        case({"bias": "key", "bias_grad": True}, bias_shape=(2, 1, 1, 23), **SHORT),
    )
    yield (
        "short, bias of queries",
        case({"bias": "pair", "bias_grad": True}, bias_shape=(2, 1, 17, 1), **SHORT),
    )
    lens = {
        "rank": 3,
        "lead": (),
        "seq_q": 0,
        "seq_k": 0,
        "lens_q": (9, 0, 1, 17),
        "lens_k": (17, 5, 0, 23),
    }
    yield "packed, short", case({"varlen": True, "lse_grad": True}, **lens)
    yield (
        "packed, short, bias of keys",
        case({"varlen": True, "bias": "key", "bias_grad": True}, bias_shape=(2, 45), **lens),
    )
    yield (
        "packed, short, bias of pairs",
        case({"varlen": True, "bias": "pair", "bias_grad": True}, bias_shape=(2, 9 * 17 + 17 * 23), **lens),
    )


def wide_cases():
    """Heads that are read in slices, where every head has keys of its own."""
    wide = {"head_dim": 136, "head_dim_v": 72}
    own = {"heads_k": 2, "group": 1, **SHORT}
    yield "wide", case({"lse_grad": True, "window": True, "softcap": True, **wide}, causal=True, softcap=2.0, **own)
    yield (
        "wide, ALiBi and a sink",
        case({"head_dim": 320, "head_dim_v": 64, "alibi": True, "sink": "float"}, align="lower_right", **own),
    )
    yield (
        "wide, unaligned rows, dropout",
        case({"head_dim": 129, "head_dim_v": 131, "dropout": True}, dropout_p=0.4, **own),
    )
    yield "wide, full bias", case({"bias": "pair", "bias_grad": True, "mask": True, **wide}, bias_shape=(2, 2, 17, 23),
                                  mask_shape=(1, 1, 17, 23), mask_kind="rows", layout="bshd", **own)  # fmt: skip
    yield "wide, bias of keys", case({"bias": "key", "bias_grad": True, **wide}, bias_shape=(2, 1, 1, 23), **own)
    yield "wide, bias of queries", case({"bias": "pair", "bias_grad": True, **wide}, bias_shape=(2, 1, 17, 1), **own)
    yield "wide, shared bias", case({"bias": "pair", "bias_grad": True, **wide}, bias_shape=(1, 2, 17, 23), **own)
    yield (
        "wide, key weights",
        case({"key_weight": "float", "key_weight_grad": True, **wide}, weight_shape=(2, 2, 23), **own),
    )
    yield "wide, key heads shared", case({"lse_grad": True, **wide}, **SHORT)
    yield "wide, 64 keys", case({**wide}, heads_k=2, group=1, seq_q=40, seq_k=64)
    yield (
        "wide, many rows, dropout",
        case({"dropout": True, **wide}, dropout_p=0.4, heads_k=2, group=1, seq_q=70, seq_k=40),
    )
    yield "wide, key weights, key heads shared", case({"key_weight": "float", "key_weight_grad": True, **wide}, weight_shape=(2, 1, 2, 23),
                                                      rank=5, lead=(2, 1), heads_k=2, **SHORT)  # fmt: skip
    yield "wide, bias of two batch dims", case({"bias": "pair", "bias_grad": True, **wide}, rank=5, lead=(2, 3),
                                               bias_shape=(1, 3, 2, 17, 23), mask_shape=(2, 1, 1, 1, 23), **SHORT)  # fmt: skip


CASES = dict([*long_cases(), *short_cases(), *wide_cases()])
for number, generated in enumerate(generate(SEED, GENERATED, lengths=SMALL_LENGTHS, score_limit=5000)):
    # The Triton kernels refuse the gradient of key weights beside a sink.
    learnt = generated.variant.key_weight_grad and not generated.variant.sink
    variant = replace(generated.variant, key_weight_grad=learnt)
    CASES[f"generated {number}"] = replace(generated, variant=variant)


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    judge = Judge(make_inputs(CASES[name]))
    with poisoned_memory():
        found = evaluate(judge.inputs, "triton")
    judge.require(found)
