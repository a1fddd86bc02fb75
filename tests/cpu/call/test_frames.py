"""The way from an entry point to the launch is short for every form of a call that was made before."""

import pytest

from tools.bench import count_frames

MOST = 9  # frames of a repeated call without gradients, the launch included
WITH_GRADIENTS = MOST + 3


@pytest.mark.parametrize("form", count_frames.forms())
@pytest.mark.parametrize("grad", [False, True])
def test_a_repeated_call_is_short(form, grad):
    first, _, third = count_frames.count(count_frames.forms()[form], grad)
    assert len(third) <= (WITH_GRADIENTS if grad else MOST), third
    assert len(first) > len(third), "a first call is checked and planned"


def test_calls_that_launch_nothing_are_refused():
    with pytest.raises(ValueError, match="launched no Triton kernel"):
        count_frames.frames_to_launch(lambda: None)
