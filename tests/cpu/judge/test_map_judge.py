"""The judge of attention maps finds wrong keys of the largest probabilities."""

from __future__ import annotations

import pytest
import torch

from flashsci.testing import MapCase, MapInputs, MapJudge
from flashsci.testing.cases import Variant

CASES = {
    "dense": MapCase(Variant(), seq_q=9, seq_k=30, heads_k=2, group=2),
    "packed": MapCase(Variant(varlen=True), rank=3, lens_q=(4, 5), lens_k=(30, 3), heads_k=2, group=2),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_keys(name):
    inputs = MapInputs(CASES[name])
    judge, right = MapJudge(inputs), inputs.evaluate("reference")
    judge.require(right)
    keys = right["top_indices"]
    assert keys.shape[-1] == 5
    wrongs = {
        "different": keys[..., :1].expand_as(keys),
        "beyond|different": torch.where(keys < 0, 0, keys + 100),
        "another probability": torch.cat((keys[..., :3].flip(-1), keys[..., 3:]), -1),
        "float32": keys.float(),
    }
    for says, wrong in wrongs.items():
        with pytest.raises(AssertionError, match=says):
            judge.require(right | {"top_indices": wrong})


HUGE = MapCase(
    Variant(head_dim=32, head_dim_v=32, key_weight="float", window=True, softcap=True),
    seed=2058799013, lead=(2,), heads_k=3, group=4, seq_q=65, seq_k=63, causal=True, scale=-0.3, softcap=1e12,
    weight_shape=(1, 1, 63), magnitude="huge",
)  # fmt: skip


def test_probabilities_beside_huge_scores():
    """Beside scores of 1e11 the difference from a limit is off by 1e4 times the rounding of a probability; a weight times the largest
    exponential is off by roundings of both."""
    inputs = MapInputs(HUGE)
    judge, found = MapJudge(inputs), inputs.evaluate("reference")
    assert inputs.lse.abs().max() > 1e10 and found["top_values"].max() == 1.0
    judge.require(found)
    beyond = found["top_values"] * (1 + 2.0**-22)
    judge.require(found | {"top_values": beyond})
    with pytest.raises(AssertionError, match="top_values"):
        judge.require(found | {"top_values": found["top_values"] * 1.01})
