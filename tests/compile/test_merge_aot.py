"""The kernel that merges pieces of distributed calls, as compiled: it changes its sums in place."""

from __future__ import annotations

import itertools
import json
import re
import sys

import pytest

from tests.compile.ahead_of_time import report_of


def compile_for(architecture: int) -> list[dict]:
    import torch

    from flashsci.distributed import merge_kernel
    from tools.kernels.compare_triton import compile_launch

    report = []
    narrow = torch.float16 if architecture == 75 else torch.bfloat16
    for dim, dtype in itertools.product((16, 64, 128, 256), (torch.float32, narrow)):
        out, lse = torch.zeros(2, 3, 70, dim, dtype=dtype), torch.zeros(2, 3, 70)
        part = out.to(narrow)
        rows = max(1, merge_kernel.TILE // dim)
        strides = (*out.stride()[:3], *part.stride()[:3], *lse.stride()[:2], *lse.stride()[:2])
        args = (out, lse, part, lse.clone(), 70, dim, *strides)
        options = {"ROWS": rows, "WIDTH": dim, "num_warps": 4}
        compiled = compile_launch(merge_kernel.merge_kernel, args, options, architecture)
        steps = re.findall(r"\b(ld\.global|st\.global|bar\.sync|bar\.warp)", compiled.asm["ptx"])
        report.append({"dim": dim, "rows": rows, "steps": steps})
    return report


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("architecture", [80, 90])
def test_all_have_read_the_statistics_before_one_writes_them(architecture):
    """Threads share a row where there are fewer rows than threads: between the last load and the store that ends the kernel
    all must meet, or who comes late merges with what is merged already (seen on a GPU alone)."""
    pytest.importorskip("triton")
    for found in report_of(__file__, architecture):
        if found["rows"] < 128:
            steps = found["steps"]
            last_load = len(steps) - 1 - steps[::-1].index("ld.global")
            last_store = len(steps) - 1 - steps[::-1].index("st.global")  # that of the statistics
            assert last_load < steps.index("bar.sync", last_load) < last_store, found


if __name__ == "__main__":
    print(json.dumps(compile_for(int(sys.argv[1]))))
