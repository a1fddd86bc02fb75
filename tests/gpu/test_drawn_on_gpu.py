"""The suite of drawn calls on a GPU: compiled ahead, in a process of its own; rules make the recorded choices again."""

import pytest
import torch

from flashsci.testing import SMALL_CALLS, draw_call
from tools.bench import drawn
from tools.bench.drawn import ways
from tools.choice import drawn as choosing


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_calls_are_checked_timed_and_chosen_again(small, tmp_path):
    path = tmp_path / "drawn.jsonl"
    records = drawn.run(31, 150, calls=8, small=small, path=path)
    assert records
    for record in records:
        assert "failed" not in record
        found = record["candidates"]
        assert found["auto"]["gate"] == "passed"
        assert not [n for n in ways.OURS if n in found and found[n]["gate"].startswith("failed")]
        assert found["auto"]["gpu_us"] > 0
        assert record["neighbour"]["gate"] == "passed"
    assert (
        f"{len(records)} of {len(records)} drawn calls timed; seed 31; {torch.cuda.get_device_name()}"
        in drawn.summary(records)
    )
    for measured in choosing.read([path]):
        assert choosing.rules(measured) == measured.auto, str(measured.call)


def test_one_process_measures_too():
    (record,) = drawn.run(32, 60, calls=1, small=True, isolated=False)
    assert record["text"] == str(draw_call(32, 0, SMALL_CALLS))
    assert record["candidates"]["auto"]["gate"] == "passed"
