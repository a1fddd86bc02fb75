"""Triangle attention of sm90, forward and backward, in the cases of tests/cpu/emulator/test_triangle_backward_kernel.py and in sizes of
models: against fp64, and ten times over, for its barriers and copies are what the emulator cannot time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashsci.testing import Judge, evaluate
from tests.cpu.emulator.test_triangle_backward_kernel import CASES, Case, inputs_of

LARGE = {
    "s384": Case((1, 24), 4, 384, 384, seed=30),
    "s384, fp32 bias, padding": Case((1, 40), 4, 384, 384, bias_fp32=True, mask="padding", seed=31),
    "s384, two batches": Case((2, 33), 4, 384, 384, own=True, layout="bshd", mask="padding", seed=32),
    "s300": Case((1, 70), 4, 300, 300, layout="bshd", dlse=True, seed=33),
    "s256, fp16": Case((1, 90), 4, 256, 256, dtype=torch.float16, seed=34),
    "s768": Case((1, 16), 4, 768, 768, mask="padding", seed=35),
    "s768, fp32 bias": Case((1, 18), 4, 768, 768, bias_fp32=True, mask="heads", seed=37),
    "s512, -inf": Case((1, 20), 2, 512, 512, numbers="inf", seed=36),
    "s512, -1e9, fp32 bias": Case((1, 20), 4, 512, 512, bias_fp32=True, numbers="1e9", seed=38),
}


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("name", (*CASES, *LARGE))
def test_against_fp64(name, deterministic):
    inputs = inputs_of({**CASES, **LARGE}[name]).on("cuda")
    inputs = replace(inputs, options={"deterministic": deterministic})
    judge = Judge(inputs)
    first = evaluate(inputs, "cuda:own")
    judge.require(first)
    for _ in range(10):
        again = evaluate(inputs, "cuda:own")
        judge.require(again)
        if deterministic:
            assert all(torch.equal(x, again[n]) for n, x in first.items())
