"""The paged benchmark: its cells, and that it times nothing that is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import flashsci
from tools.bench import paged

SMALL = paged.Cell(3, 64, "log-uniform", dtype="bfloat16", heads_q=4, heads_k=2, dim=32)
CPU = torch.device("cpu")


def test_cells():
    found = list(paged.cells())
    assert len({c.id for c in found}) == len(found) == 2 * 4 * 7
    assert all(len(c.lengths()) == c.batch and max(c.lengths()) == c.longest for c in found)
    assert replace(SMALL, spread="equal", batch=2).bytes() == 2 * 2 * 64 * 2 * 32 * 2 + 2 * 2 * 4 * 32 * 2


@pytest.mark.parametrize("cell", [SMALL, replace(SMALL, batch=1), replace(SMALL, cache="float8_e4m3fn")])
def test_measures(cell, capsys):
    records = paged.measure(cell, ["reference", "fa3"], CPU, 0.05)
    assert [r["backend"] for r in records] == ["reference", "copy"]
    assert "no fa3" in capsys.readouterr().out
    assert records[0]["bytes_per_second"] > 0 and records[1]["share_of_copy"] == 1


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    wrong = {"ours": lambda: torch.ones(3, 4, 32, dtype=torch.bfloat16)}
    monkeypatch.setattr(paged, "candidates", lambda *_: wrong)
    assert [r["backend"] for r in paged.measure(SMALL, ["ours"], CPU, 0.05)] == ["copy"]
    assert "is wrong and not timed" in capsys.readouterr().out


def test_all_of_it_in_small(tmp_path, monkeypatch, capsys):
    """One candidate's error is its own, one case's leaves the others, and the table comes last."""
    honest, made = paged.candidates, paged.inputs_of

    def failing():
        raise KeyError("no such kernel")

    def inputs_of(cell, device):
        if cell.cache != cell.dtype:
            raise torch.OutOfMemoryError("Tried to allocate 2 TiB")
        return made(cell, device)

    monkeypatch.setattr(paged, "candidates", lambda *a: {**honest(*a), "other": failing})
    monkeypatch.setattr(paged, "inputs_of", inputs_of)
    path = tmp_path / "new" / "paged.json"
    given = ["--device", "cpu", "--tiny", "--backends", "reference", "--seconds", "0.05"]
    assert paged.main([*given, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "other is wrong and not timed: [\"it raised: 'no such kernel'\"]" in said
    assert "paged-float8_e4m3fn-b3-log-uniform-s64 is not measured: Tried to allocate" in said
    head, _, row = said.strip().splitlines()[-3:]
    assert sorted(head.strip("| ").split(" | ")) == ["case", "copy", "reference"]
    assert row.startswith("| paged-bfloat16-b3-log-uniform-s64 | ") and ", 100%" in row
    assert [r["backend"] for r in json.loads(path.read_text())["records"]] == ["reference", "copy"]
    assert paged.main([*given, "--minutes", "0"]) == 1
    assert "no time left" in capsys.readouterr().out


def test_what_8_bits_gain():
    """Of the cases that were timed with both caches."""

    def timed(cache, name, s, longest=64):
        return {
            "case": asdict(replace(SMALL, cache=cache, longest=longest)),
            "backend": name,
            "seconds": {"median": s},
        }

    records = [
        timed("bfloat16", "cuda", 4.0),
        timed("bfloat16", "fa3", 3.0),
        timed("bfloat16", "cuda", 9.0, 128),
    ]
    assert paged.gains(records) == ""
    records += [timed("float8_e4m3fn", "cuda", 2.0), timed("float8_e4m3fn", "triton", 1.0)]
    assert paged.gains(records) == f"8 bits against 16, b{SMALL.batch}-{SMALL.spread}-s64: cuda 2.00"


def test_it_says_that_there_is_no_gpu(capsys):
    with pytest.raises(SystemExit):
        paged.main([])
    assert "torch sees no CUDA GPU" in capsys.readouterr().err


def test_a_backend_that_refuses_is_no_candidate_and_nobody_steps_in(capsys):
    x = paged.inputs_of(SMALL, CPU)
    assert list(paged.candidates(SMALL, x, ["cuda", "reference"])) == ["reference"]
    assert f"{SMALL.id}: no cuda: " in capsys.readouterr().out


def test_fa3_gets_its_own_arguments():
    x = paged.inputs_of(SMALL, CPU)
    seen = {}

    class Ops:
        @staticmethod
        def fwd(q, k, v, **options):
            seen.update(options, shape=k.shape)
            return (q,)

    assert paged._fa3(Ops, x)() is x.q
    assert seen["page_table"] is x.options["block_table"] and seen["max_seqlen_k"] == 64
    assert seen["shape"][1:] == (16, 2, 32)


# Of vLLM 0.26, word by word: no argument has a default.
VLLM_FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q,
    Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k,
    Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
    Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left,
    int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits,
    bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
VLLM_PLAN = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,
    int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,
    Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,
    int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"""
OPS = "flashsci_test_of_fa3"


@pytest.fixture
def vllms(monkeypatch):
    """Ops with vLLM's schemas on the reference, and what they were called with."""
    fwd_names, plan_names = (
        [word.split()[-1] for word in text[text.index("(") + 1 : text.rindex(")")].split(",")]
        for text in (VLLM_FWD, VLLM_PLAN)
    )
    seen = {}

    def fwd(*arguments):
        seen["fwd"] = given = dict(zip(fwd_names, arguments, strict=True))
        names = ("cu_seqlens_q", "max_seqlen_q", "seqused_k")
        options = {n: given[n] for n in names} | {"causal": given["is_causal"]}
        scale, table = given["softmax_scale"], given["page_table"]
        out = flashsci.paged_attention(*arguments[:3], block_table=table, scale=scale, backend="reference", **options)
        return [out, torch.zeros(1)]

    def plan(*arguments):
        seen["plan"] = dict(zip(plan_names, arguments, strict=True))
        return torch.zeros(17, dtype=torch.int32)

    library = torch.library.Library(OPS, "DEF")
    for schema, function in ((VLLM_FWD, fwd), (VLLM_PLAN, plan)):
        library.define(" ".join(schema.split()))
        library.impl(schema.split("(")[0], function, "CPU")
    ops = getattr(torch.ops, OPS)
    monkeypatch.setattr(paged.fa3, "load", lambda path: ops)
    yield ops, seen
    paged.fa3.neutral.cache_clear()
    library._destroy()


def test_fa3_without_defaults(vllms):
    """What vLLM's build asks for and a decoding step does not use is what vLLM gives it."""
    _, seen = vllms
    x = paged.inputs_of(SMALL, CPU)
    found = paged.candidates(SMALL, x, ["fa3", "fa3-planned"])
    assert list(found) == ["fa3", "fa3-planned"]
    expected = flashsci.paged_attention(x.q, x.k_cache, x.v_cache, **x.options, backend="reference")
    assert torch.equal(found["fa3"](), expected)
    given = seen["fwd"]
    assert given["window_size_left"] == given["window_size_right"] == -1
    assert given["cp_world_size"] == 1 and given["is_rotary_interleaved"] is True
    assert given["num_splits"] == given["sm_margin"] == given["cp_rank"] == given["softcap"] == 0
    assert given["scheduler_metadata"] is None and given["pack_gqa"] is None
    assert torch.equal(found["fa3-planned"](), expected)
    assert seen["fwd"]["scheduler_metadata"].shape == (17,)
    sizes = ("batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "page_size", "max_seqlen_q", "max_seqlen_k")  # fmt: skip
    assert [seen["plan"][n] for n in sizes] == [3, 4, 2, 32, 32, 16, 1, 64]
    assert seen["plan"]["is_causal"] and not seen["plan"]["has_softcap"]
    assert not paged.judged(x, found["fa3-planned"])


def test_fa3_plans_only_where_it_can(monkeypatch, capsys, vllms):
    x = paged.inputs_of(SMALL, CPU)
    assert not paged.candidates(replace(SMALL, cache="float8_e4m3fn"), x, list(paged.FA3))
    assert capsys.readouterr().out.count("needs 8-bit queries") == 2
    monkeypatch.setattr(paged.fa3, "load", lambda path: SimpleNamespace(fwd=vllms[0].fwd))
    assert list(paged.candidates(SMALL, x, list(paged.FA3))) == ["fa3"]
    assert "no fa3-planned: this build has no get_scheduler_metadata" in capsys.readouterr().out

    def broken(**options):
        raise RuntimeError("no kernel image\nand more")

    ops = SimpleNamespace(fwd=vllms[0].fwd, get_scheduler_metadata=broken)
    monkeypatch.setattr(paged.fa3, "load", lambda path: ops)
    assert list(paged.candidates(SMALL, x, list(paged.FA3))) == ["fa3"]
    assert "no fa3-planned: it could not plan: no kernel image\n" in capsys.readouterr().out


def test_fa3_defaults_are_left_alone():
    """An argument that has a default, or that nobody may leave out, is not filled in."""
    with torch.library._scoped_library(OPS + "_defaults", "DEF") as library:
        library.define("fwd(Tensor q, int size, Tensor? a, int sm_margin, int num_splits=3, Tensor? b=None) -> Tensor")
        op = getattr(torch.ops, OPS + "_defaults").fwd
        assert paged.fa3.neutral(op) == {"a": None, "sm_margin": 0}
        paged.fa3.neutral.cache_clear()
    assert paged.fa3.neutral(lambda q: q) == {}
