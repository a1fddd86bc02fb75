"""The choice of `auto` on GPUs that no record times."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from flashsci.call.problem import Problem, problem_of
from flashsci.choice import preferences
from flashsci.choice.candidates import candidates, rejects

PLAIN_ON_HOPPER = Problem("cuda", (9, 0), torch.bfloat16, 16, 16, 64, 64)
UNMEASURED = {  # compute capability of GPUs that no record times
    "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "L4, RTX 40": (8, 9), "B200": (10, 0), "B300": (10, 3), "RTX 50": (12, 0),
}  # fmt: skip


@pytest.mark.parametrize("gpu", UNMEASURED)
@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("causal", (False, True))
def test_gpus_that_nobody_measured_have_torchs_kernels(gpu, causal, grad, monkeypatch):
    """Calls that SDPA serves by its fast kernels are never slower than torch for want of records."""
    capability = UNMEASURED[gpu]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    features = {"window_right": 0 if causal else -1, "requires_grad": grad, "given": ("q", "k", "v")}
    for dtype in (torch.float16, torch.bfloat16):
        for dims, sizes, heads_k in product(
            (16, 64, 96, 128, 256), ((8, 8), (128, 128), (1, 4096), (None, None)), (2, 8)
        ):
            known = {} if sizes[0] is None else {"batch": (4,), "seq_q": sizes[0], "seq_k": sizes[1]}
            problem = problem_of("cuda", 0, dtype, 8, heads_k, dims, dims, tuple((features | known).items()))
            assert problem.capability == capability
            order = candidates(problem, "auto", False)
            assert order[0] == "sdpa" and rejects("sdpa", problem) is None, (dtype, dims, sizes)
            assert order[-1] == "reference" and "triton" in order


def test_options_and_measured_gpus_keep_their_rules():
    plain = replace(PLAIN_ON_HOPPER, batch=(4,), seq_q=1024, seq_k=1024)
    assert preferences.find("calls", plain).order[0] == "cuda"
    for change in (
        {"bias_shape": (16, 8, 9)},
        {"window_left": 5},
        {"varlen": True},
        {"lower_right": True},
        {"mask": True},
    ):
        for capability, first in (((8, 0), "cuda"), ((12, 0), "triton")):
            assert preferences.find("calls", replace(plain, capability=capability, **change)).order[0] == first
