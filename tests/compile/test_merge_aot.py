"""The kernel that merges pieces of a distributed call compiles for every target architecture, and moves 16 bytes at a time."""

from __future__ import annotations

import json
import sys

import pytest
from ahead_of_time import report_of


def compile_for(architecture: int) -> list[dict]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from flashsci.distributed.merge_kernel import merge_kernel

    names = merge_kernel.arg_names
    found = []
    for dtype in ("fp16", "fp32") if architecture < 80 else ("bf16", "fp16", "fp32"):
        for width in (16, 64, 128, 256):
            kinds = {"part": f"*{dtype}", "ROWS": "constexpr", "WIDTH": "constexpr"}
            kinds |= dict.fromkeys(("out", "lse", "part_lse"), "*fp32")
            constants = {"ROWS": 4096 // width, "WIDTH": width}
            source = ASTSource(
                merge_kernel,
                {name: kinds.get(name, "i32") for name in names},
                constexprs={(names.index(name),): value for name, value in constants.items()},
                attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in (*constants, "rows")},
            )  # fmt: skip
            ptx = compile(
                source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4}
            ).asm["ptx"]
            found.append({"dtype": dtype, "width": width, "wide": ptx.count("ld.global.v4"), "local": ptx.count("ld.local")})  # fmt: skip
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [75, 80, 90])
def test_compiles(architecture):
    pytest.importorskip("triton")
    report = report_of(__file__, architecture)
    assert len(report) == (8 if architecture == 75 else 12)
    assert all(entry["wide"] and not entry["local"] for entry in report), report


if __name__ == "__main__":
    print(json.dumps(compile_for(int(sys.argv[1]))))
