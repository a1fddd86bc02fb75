"""Loads and stores of a bias and a mask as compiled: 16 bytes at a time where rows are apart by whole 16 bytes, for any
number of keys."""

from __future__ import annotations

import re

import pytest

from tests.compile.ahead_of_time import compiled, report_of, script

LENGTHS = {"whole": 144, "odd": 135}


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.call.ops import Scalars, Tensors
    from flashsci.call.row_pitch import padded

    for name, keys in LENGTHS.items():
        for shape in ((2, 2, 72, keys), (1, 2, 72, keys)):
            q, k, v = (torch.zeros(2, 2, n, 64, dtype=torch.bfloat16) for n in (72, keys, keys))
            bias, mask = torch.zeros(shape, dtype=q.dtype), torch.ones(1, 1, 72, keys, dtype=torch.bool)
            for pitched in {False, name == "odd"}:
                planes = [padded(x) for x in (bias, mask)] if pitched else [bias, mask]
                tensors = Tensors(q, k, v, planes[0], None, planes[1])
                scalars = Scalars(-1, -1, 0.125, 0.0, -1, -1, False, 0.0, "default", False)
                out, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1])
                ops["triton_forward"](*tensors, *scalars)
                ops["triton_backward"](out, None, *tensors, out, lse, *scalars, 15)
                for entry, ptx in compiled(launched, architecture, f"{name}, {pitched}, {shape[0]}"):
                    # of 2 bytes or less, and those of the gradient
                    small = re.findall(r"(?:ld|st)\.global(?:\.\w+)*?\.(?:b8|b16|u8|u16)", ptx)
                    yield {"call": entry["call"], "kernel": entry["kernel"], "single": len(small)}


@pytest.mark.slow
def test_no_number_is_moved_alone():
    pytest.importorskip("triton")
    found = {(entry["call"], entry["kernel"]): entry["single"] for entry in report_of(__file__, 90)}
    for shared in (1, 2):
        kernels = {kernel for call, kernel in found if call == f"whole, False, {shared}"}
        assert kernels > {"forward_kernel", "dq_kernel", "dkdv_kernel"}
        for kernel in kernels:
            whole, copied, alone = (
                found[f"{call}, {shared}", kernel] for call in ("whole, False", "odd, True", "odd, False")
            )
            assert whole == 0, (kernel, found)
            if kernel == "bias_gradient_kernel":  # its sums are written without a pitch
                assert 0 < copied < alone, found
            else:
                assert copied == 0 and (alone >= 64 or kernel == "delta_kernel"), (kernel, found)


if __name__ == "__main__":
    script(report)
