"""The kernels of a call that only a Problem describes are those of its tensors as kernels read them."""

from dataclasses import replace

import pytest
import torch

from flashsci.backends.cuda import of_problem
from flashsci.backends.cuda.library import library_path
from flashsci.call.problem import Problem
from flashsci.choice.predictions.families import family_of

pytestmark = pytest.mark.skipif(library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)")
ODD = Problem("cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64, batch=(16,), seq_q=1213, seq_k=1213)
PAIRS = {"bias_shape": (16, 4, 1213, 1213), "bias_dtype": torch.bfloat16}
OF_WEIGHTS = "sm80/weights/log_weights_kernel"


@pytest.mark.parametrize(
    ("features", "forward", "backward"),
    [
        ({"mask": True, "mask_by_query": True}, "sm90/fwd", "sm90/bwd"),  # rows are copied
        (PAIRS, "sm90/fwd", None),  # read in place
        (PAIRS | {"requires_grad": True, "bias_grad": True}, "sm90/fwd", "sm90/bwd"),  # copied
        ({"alibi": True}, "sm80/fwd", "sm80/bwd"),
        ({"key_weight": True}, "sm80/fwd", "sm80/bwd"),
    ],
)
def test_the_family_is_that_of_the_tensors_as_kernels_read_them(features, forward, backward):
    p = replace(ODD, **features)
    assert family_of(p, "cuda", False).name == forward
    assert backward is None or family_of(p, "cuda", True).name == backward


def test_kernels_that_prepare_operands_come_before_those_of_the_family():
    names = of_problem.kernels(replace(ODD, key_weight=True), False)
    assert names[0] == OF_WEIGHTS and names[1].startswith("sm80/fwd/")
