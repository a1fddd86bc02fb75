"""Every op that runs kernels, given CUDA tensors: tests/cpu/call/test_every_raw_op.py says what is asked of them.

`test_memory` alone is small enough for compute-sanitizer:
``compute-sanitizer --target-processes all python -m pytest -x tests/gpu/test_every_raw_op_on_gpu.py -k test_memory``.
"""

from __future__ import annotations

import pytest
import torch

from tests.support import judged_cases
from tests.support.raw_op_calls import CALLS, COMPOSED, Right, all_ops
from tests.support.raw_op_judge import judge, opcheck, wrong_calls

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
HERE = tuple(right for right in CALLS if right.op.startswith(("cuda_", "triton_")))


@pytest.fixture(autouse=True)
def context():
    yield
    torch.cuda.synchronize()  # an access out of bounds would show here at the latest


def require(right: Right) -> None:
    """What this machine cannot run is a reason to skip, never a pass."""
    judged_cases.require(right.op.split("_")[0])
    capability = torch.cuda.get_device_capability()
    if right.op.startswith("cuda_fp8") and capability[0] != 9:
        pytest.skip("the kernel on 8-bit floats is for Hopper")
    if ("fp8" in right.op or "float8" in right.label) and capability < (8, 9):
        pytest.skip("this GPU has no instructions for 8-bit floats")
    if right.op == "cuda_paged_attention" and capability < (8, 0):
        pytest.skip("paged kernels are for compute capability 8.0 and newer")


def test_every_op_has_a_right_call():
    missing = all_ops().keys() - {right.op for right in CALLS} - COMPOSED
    assert not missing, f"tests/support/raw_op_calls.py has no right call of {sorted(missing)}"


@pytest.mark.parametrize("right", HERE, ids=str)
def test_memory(right: Right):
    """A right call; and numbers in device tensors that cannot be, which nobody reads on the host."""
    require(right)
    found = [f"as it should be: {x}" for x in judge(right, None, DEVICE)]
    for wrong in wrong_calls(right, right.arguments(DEVICE), DEVICE):
        if wrong.contents and wrong.what not in ("full of -1", "backwards"):
            found += [f"{wrong.argument}, {wrong.what}: {x}" for x in judge(right, wrong, DEVICE)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("right", HERE, ids=str)
def test_torchs_own_check(right: Right):
    require(right)
    assert opcheck(right, DEVICE) == {"SUCCESS"}


@pytest.mark.parametrize("right", HERE, ids=str)
def test_one_argument_wrong(right: Right):
    require(right)
    found = []
    for wrong in wrong_calls(right, right.arguments(DEVICE), DEVICE):
        found += [f"{wrong.argument}, {wrong.what}: {x}" for x in judge(right, wrong, DEVICE)]
    assert not found, "\n".join(found)
