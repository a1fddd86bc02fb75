"""What Python writes by hand of the library: structs of the C boundary have the sizes and offsets that a compiler gives them, and
a rule says what the C++ says."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flashsci.backends.cuda import served
from flashsci.call.problem import Problem
from tests.cpu.emulator.test_paged_kernel import Params
from tools.kernels import launchers

ROOT = Path(__file__).resolve().parents[3]
MIRRORS = {
    "FlashsciStrides": launchers.Strides,
    "FlashsciScoreStrides": launchers.ScoreStrides,
    "FlashsciBiasMask": launchers.BiasMask,
    "FlashsciForwardParams": launchers.ForwardParams,
    "FlashsciBackwardParams": launchers.BackwardParams,
    "FlashsciPagedParams": Params,
}


def output_of(folder: Path, source: str, given: str = "") -> str:
    """What a C++ program prints that has the library's headers."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    file, program = folder / "said.cpp", folder / "said"
    file.write_text(source)
    include = ["-I", str(ROOT / "csrc" / "include")]
    subprocess.run([compiler, "-std=c++17", *include, str(file), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], input=given, capture_output=True, text=True, check=True)
    return done.stdout


def test_mirrors_of_structs(tmp_path):
    asked = [f"sizeof({name})" for name in MIRRORS]
    wanted = [ctypes.sizeof(mirror) for mirror in MIRRORS.values()]
    for name, mirror in MIRRORS.items():
        for field, *_ in mirror._fields_:
            asked.append(f"offsetof({name}, {field})")
            wanted.append(getattr(mirror, field).offset)
    lines = "\n".join(f'  std::printf("%zu\\n", {question});' for question in asked)
    said = output_of(
        tmp_path,
        '#include <cstddef>\n#include <cstdio>\n#include "flashsci_paged.h"\n'
        f"int main() {{\n{lines}\n}}\n",
    )
    assert dict(zip(asked, map(int, said.split()), strict=True)) == dict(
        zip(asked, wanted, strict=True)
    )


ASKING = """
int main() {
  FlashsciBackwardParams p{};
  long b0, b1;
  int packed, bias, mask;
  while (std::scanf("%ld %ld %d %d %d %d %d %d %d %d", &b0, &b1, &p.heads_q, &p.seq_q, &p.seq_k, &p.head_dim,
                    &p.head_dim_v, &packed, &bias, &mask) == 10) {
    p.batch0 = b0, p.batch1 = b1;
    p.cu_seqlens_q = packed ? reinterpret_cast<const int32_t*>(&p) : nullptr;
    p.bias_mask.bias = bias ? &p : nullptr;
    p.bias_mask.mask = mask ? reinterpret_cast<const uint8_t*>(&p) : nullptr;
    std::printf("%d", int{is_short(p)});
  }
}
"""


def test_mirror_of_who_computes_short_gradients(tmp_path):
    text = (ROOT / "csrc" / "bindings" / "backward.cpp").read_text()
    (rule,) = re.findall(r"^bool is_short\(.*?^}\n", text, re.DOTALL | re.MULTILINE)
    leading = ((1, 1, 131), (1, 1, 132), (11, 2, 6), (11, 1, 11))
    lengths, dims = (1, 64, 65, 128, 129, 512, 513), (1, 32, 33, 64, 65)
    plain = itertools.product(leading, lengths, lengths, dims, dims, [(0, 0, 0)])
    others = itertools.product(leading, (1, 64), (1,), (32,), (32,), [(1, 0, 0), (0, 1, 0), (0, 0, 1)])  # fmt: skip
    asked = [*plain, *others]
    given = "\n".join(" ".join(map(str, (*a, *rest, *b))) for a, *rest, b in asked)
    includes = "#include <algorithm>\n#include <cstdio>\n" + '#include "flashsci.h"\n'
    said = output_of(tmp_path, includes + rule + ASKING, given)

    def mirrored(leading, seq_q, seq_k, dim, dim_v, others):
        *batch, heads = leading
        packed, bias, mask = map(bool, others)
        return served.is_short(
            Problem("cuda", (9, 0), torch.bfloat16, heads, heads, dim, dim_v, batch=tuple(batch), seq_q=seq_q, seq_k=seq_k,
                    varlen=packed, bias_shape=(seq_q, seq_k) if bias else None, mask=mask)
        )  # fmt: skip

    assert [mirrored(*one) for one in asked] == [x == "1" for x in said]
    assert {"0", "1"} == set(said)
