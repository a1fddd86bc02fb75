"""The cases of tests/cpu/test_triangle_backward_kernel.py, and larger ones, on a GPU, by a build of the sm90 backward units:

FLASHSCI_BUILDS=bf16.so,fp16.so python -m pytest -q tests/gpu/test_triangle_backward.py
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from flashsci.testing import Judge, evaluate
from scripts import launchers
from tests.cpu.test_triangle_backward_kernel import CASES, Case, inputs_of

BUILDS = [x for x in os.environ.get("FLASHSCI_BUILDS", "").split(",") if x]
pytestmark = pytest.mark.skipif(not BUILDS, reason="no build is given in FLASHSCI_BUILDS")

LARGE = {
    "triangle s384": Case((1, 24), 4, 384, 384, seed=30),
    "triangle s384, fp32 bias, padding": Case((1, 40), 4, 384, 384, bias_fp32=True, mask="padding", seed=31),
    "triangle s384, two batches": Case((2, 33), 4, 384, 384, own=True, layout="bshd", mask="padding", seed=32),
    "triangle s300": Case((1, 70), 4, 300, 300, layout="bshd", dlse=True, seed=33),
    "triangle s256, fp16": Case((1, 90), 4, 256, 256, dtype=torch.float16, seed=34),
    "triangle s768": Case((1, 16), 4, 768, 768, mask="padding", seed=35),
    "triangle s512, -inf": Case((1, 20), 2, 512, 512, numbers="inf", seed=36),
}  # fmt: skip


@pytest.fixture(scope="module")
def builds():
    return [launchers.install(f"triangle{i}={path}") for i, path in enumerate(BUILDS)]


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("name", (*CASES, *LARGE))
def test_against_fp64(builds, name, deterministic):
    case = replace({**CASES, **LARGE}[name], deterministic=deterministic)
    build = next((b for b in builds if case.dtype in b.dtypes("backward")), None)
    if build is None:
        pytest.skip(f"no build has {case.dtype}")
    inputs = inputs_of(case).on("cuda")
    inputs = replace(inputs, options={"deterministic": deterministic})
    judge = Judge(inputs)
    first = evaluate(inputs, build.name)
    judge.require(first)
    for _ in range(10):
        again = evaluate(inputs, build.name)
        judge.require(again)
        if deterministic:
            assert all(torch.equal(x, again[n]) for n, x in first.items())
