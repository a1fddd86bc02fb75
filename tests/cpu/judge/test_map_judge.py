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
