"""Every op of torch.ops.flashsci defends itself: a call that is wrong in one argument raises clearly, or is right all the same.

Whatever it is given, it reads and writes nothing beyond its tensors. tests/gpu/test_every_raw_op_on_gpu.py has the same for CUDA tensors.
"""

from __future__ import annotations

import pytest

from tests.support.raw_op_calls import CALLS, COMPOSED, RAISES, Right, all_ops
from tests.support.raw_op_judge import judge, opcheck, wrong_calls

pytestmark = pytest.mark.every(4)

HERE = tuple(right for right in CALLS if not right.op.startswith("cuda_"))
PARTS = 8  # of the wrong calls of an op: some kernels are slow here

all_ops()  # imports what defines them


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_op_has_a_right_call():
    missing = all_ops().keys() - {right.op for right in CALLS} - COMPOSED
    assert not missing, f"tests/support/raw_op_calls.py has no right call of {sorted(missing)}"


@pytest.mark.parametrize("right", HERE, ids=str)
def test_a_right_call(right: Right):
    assert not judge(right, None, "cpu")


@pytest.mark.parametrize("right", [right for right in HERE if right.op not in RAISES], ids=str)
def test_torchs_own_check(right: Right):
    """Schema, fake kernel, autograd and tracing with symbolic sizes, as `torch.library.opcheck` has them."""
    assert opcheck(right, "cpu") == {"SUCCESS"}


@pytest.mark.every(16)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("right", HERE, ids=str)
def test_one_argument_wrong(right: Right, part: int):
    given = right.arguments("cpu")
    found = []
    for wrong in list(wrong_calls(right, given, "cpu"))[part::PARTS]:
        found += [f"{wrong.argument}, {wrong.what}: {x}" for x in judge(right, wrong, "cpu")]
    assert not found, "\n".join(found)
