"""The benchmark of 8-bit floats: its cells, that it times nothing that is wrong, and its table of errors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import flashsci
from flashsci.testing.fp8 import LOST
from tools.bench import fp8, fp8_sums
from tools.bench.inputs import Unsupported

CPU = torch.device("cpu")
SMALL = fp8.Cell(seq=300, dim=32, heads=2)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(fp8, "TOKENS", 300)


def test_cells():
    found = list(fp8.cells())
    assert len({c.id for c in found}) == len(found) == 3 * 2 * 4
    assert replace(SMALL, causal=True).flops() == 4 * 2 * 32 * 300 * 301 / 2


@pytest.mark.parametrize("cell", [SMALL, replace(SMALL, causal=True, per="head"), replace(SMALL, per="tensor")])
def test_measures(cell, capsys):
    records = fp8.measure(cell, ["reference", "reference+fast", "bf16", "cudnn", "fa3"], CPU, 0.05)
    assert sorted(r["backend"] for r in records) == ["bf16", "reference", "reference+fast"]
    said = capsys.readouterr().out
    assert "no cudnn: it runs on GPUs only" in said and "no fa3" in said
    assert all(r["flops_per_second"] > 0 for r in records)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_3(causal):
    """Its op, as fp8.py calls it, on the reference: packed, a scale for each member and head, splits by choice."""

    def fwd(
        q, k, v, *, q_descale, k_descale, v_descale, softmax_scale, is_causal, num_splits, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k,
    ):  # fmt: skip
        assert q.shape == (300, 2, 32) and q.dtype is torch.float8_e4m3fn and num_splits == 1
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, 300]
        assert max_seqlen_q == max_seqlen_k == 300
        scales = {"q_scale": q_descale, "k_scale": k_descale, "v_scale": v_descale}
        assert all(s.shape == (1, 2) and s.dtype is torch.float32 for s in scales.values())
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        options = {"scale": softmax_scale, "causal": is_causal, "backend": "reference"}
        found = flashsci.attention(q, k, v, **scales, **options)
        return found[0].transpose(0, 1), None, None, None

    cell = replace(SMALL, causal=causal)
    x = fp8.problem_of(cell, CPU)
    out = fp8._fa3(SimpleNamespace(fwd=fwd), cell, x)()
    assert fp8.problems(cell, x, "fa3", out) == []
    assert fp8.problems(cell, x, "fa3", 1.5 * out) != []

    def none(*_, **__):
        raise RuntimeError("This flash attention build does not support fp8.")

    with pytest.raises(Unsupported, match="does not support fp8"):
        fp8._fa3(SimpleNamespace(fwd=none), cell, x)


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    right = fp8.candidates

    def wrong(*given):
        found = right(*given)
        return found | {"reference": lambda: 1.2 * found["reference"]()}

    monkeypatch.setattr(fp8, "candidates", wrong)
    records = fp8.measure(SMALL, ["reference", "bf16"], CPU, 0.05)
    assert [r["backend"] for r in records] == ["bf16"]
    assert "reference is wrong and not timed" in capsys.readouterr().out


def test_the_table_of_errors():
    records = fp8.errors("reference", 200, 64, 1, CPU, ("normal", "keys with a common part"))
    assert len(records) == 2 * 3 * 4
    for r in records:
        assert r["bf16"] < r["kernel"] == r["rounded inputs"] < 0.5
    common = {(r["smooth"], r["rotate"]): r["kernel"] for r in records[-4:]}
    assert common[True, False] < 0.5 * common[False, False]
    assert fp8.table(records).count("\n") == 1 + 2 * 3


def test_the_model_of_sums():
    """Safe sums lose nothing that shows beside P's rounding; fast ones lose at most what the judge allows, and do lose it."""
    x = torch.randn(3, 64, dtype=torch.float64)
    y = torch.randn(64, 5, dtype=torch.float64)
    found, exact = fp8_sums.product(x, y, 64), x @ y
    assert 0 < (found - exact).norm() < 2.0**-11 * exact.norm()
    one = torch.ones((), dtype=torch.float64)
    assert fp8_sums.add(one, (2.0**-14 * one).expand(fp8_sums.STEP)) == 1, "each is cut before it is added"
    assert fp8_sums.add(one, (2.0**-13 * one).expand(fp8_sums.STEP)) == 1 + 2.0**-8
    safe, fast = fp8_sums.errors(1024, 1.0)
    assert safe < 0.005 and LOST * 1024 / 4 < fast < LOST * 1024
    assert fp8_sums.errors(1024, 0.0)[1] < 0.03
