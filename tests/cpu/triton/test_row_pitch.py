"""A bias or mask whose rows do not begin at multiples of 16 bytes, on the Triton kernels, interpreted: the copy that
kernels read, all derivatives, and the layout of the gradient."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.call import bias_copy, row_pitch
from flashsci.call.ops import Tensors, with_inner_keys
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs, poisoned_memory

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets without a GPU only")


@pytest.fixture(autouse=True)
def copies_of_any_size(monkeypatch):
    monkeypatch.setattr(row_pitch, "FEWEST_SCORES", 1)
    flashsci.clear_caches() if hasattr(flashsci, "clear_caches") else None


def case(variant=None, **fields):
    plain = {"lead": (2,), "heads_k": 2, "group": 1, "seq_q": 37, "seq_k": 43, "seed": 5}
    return Case(variant=Variant(**({"dtype": "bfloat16"} | (variant or {}))), **(plain | fields))


PAIR = {"bias": "pair", "bias_grad": True}
OWN = (2, 2, 37, 43)
CASES = {
    "shared by the batch": case(PAIR, bias_shape=(1, 2, 37, 43)),
    "shared by all": case(PAIR, bias_shape=(37, 43)),
    "of one head": case(PAIR, bias_shape=(2, 1, 37, 43)),
    "for every pair": case(PAIR, bias_shape=OWN),
    "for every pair, fp16": case(PAIR | {"dtype": "float16", "softcap": True}, bias_shape=OWN, softcap=3.0),
    "for every pair, causal": case(PAIR | {"window": True}, bias_shape=OWN, causal=True),
    "for every pair, short": case(PAIR, bias_shape=(2, 2, 17, 23), seq_q=17, seq_k=23),
    "shared, short": case(PAIR, bias_shape=(1, 2, 17, 23), seq_q=17, seq_k=23, lead=(5,)),
    "several tiles": case(PAIR, bias_shape=(1, 2, 70, 135), seq_q=70, seq_k=135, lead=(1,)),
    "transposed": case(PAIR, bias_shape=OWN, bias_view="transposed"),
    "heads innermost": case(PAIR, bias_shape=OWN, bias_view="linear"),
    "padded rows": case(PAIR, bias_shape=OWN, bias_view="padded"),
    "expanded": case(PAIR, bias_shape=OWN, bias_view="expanded"),
    "fp32": case(PAIR | {"dtype": "float32"}, bias_shape=OWN),
    "mask": case({"mask": True}, mask_shape=(1, 1, 37, 43)),
    "mask and bias": case(PAIR | {"mask": True}, bias_shape=OWN, mask_shape=(37, 43)),
    "expanded mask": case({"mask": True}, mask_shape=OWN, mask_view="expanded"),
    "second order": case(PAIR | {"tangents": "qkvb"}, bias_shape=OWN),
    "second order, shared": case(PAIR | {"tangents": "qkvb"}, bias_shape=(1, 2, 37, 43)),
    "second order, short": case(PAIR | {"tangents": "qkvb"}, bias_shape=(2, 2, 17, 23), seq_q=17, seq_k=23),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    judge = Judge(make_inputs(CASES[name]))
    with poisoned_memory():
        found = evaluate(judge.inputs, "triton")
    judge.require(found)
