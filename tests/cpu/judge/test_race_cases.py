"""That tests/gpu/test_races.py has a call for every kernel of the library; no GPU needed."""

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashsci.backends import cuda as backend
from flashsci.backends import reference
from flashsci.backends.cuda.paged import refuse_layout
from flashsci.call.paged_ops import PagedTensors
from flashsci.testing import make_paged_inputs
from tests.support import race_cases as races
from tests.support.race_cases import Call, FP8Call, Instance, PagedCall, Shape

ROOT = Path(__file__).resolve().parents[3]


def test_every_instance_has_calls():
    table = races.instances()
    assert {i.generation for i in table} == {"sm75", "sm80", "sm90"} and len(table) > 400
    for instance in table:
        for call in races.calls_of(instance):
            assert call.dtype == instance.dtype and call.generation == instance.generation
    # What a backward is compiled for must be run with one.
    for instance in (i for i in table if i.kind == "bwd"):
        assert any(call.has_backward for call in races.calls_of(instance)), instance


@pytest.mark.parametrize("unit", sorted(races._UNITS))
def test_an_unknown_instance_is_an_error(unit):
    generation, kind = re.match(r"(sm\d+)/([a-z]+\d*)", unit).groups()
    dtype = "float32" if "fp32" in unit else "float8_e4m3fn" if "fp8" in unit else "float16"
    with pytest.raises(KeyError, match="no call for"):
        races.calls_of(Instance(generation, kind, dtype, 64, "64 x 64", "with sinks"))


def test_head_dims_of_every_kind_are_called():
    calls = races.all_calls()
    assert len({str(c) for c in calls}) == len(calls)
    pairs = {(c.head_dim, c.head_dim_v) for c in calls if c.generation == "sm90"}
    assert {(64, 128), (128, 64), (192, 128), (128, 256), (160, 160)} <= pairs
    assert {c.dtype for c in calls if c.packed} == set(races.DTYPES.values())


@pytest.mark.parametrize("processors", [1, 40, 108, 132])
def test_shapes_have_the_tiles_they_are_named_for(processors):
    kinds = (
        dict(causal=True),
        dict(packed=True, causal=True),
        dict(decoding=True),
        dict(bias="own"),
    )
    for kind in kinds:
        shapes = {s.name: s for s in races.shapes(Call("sm90", "bfloat16", 64, 64, **kind), processors)}
        one, more = shapes["one"], shapes["one more than processors"]
        assert one.batch * one.heads == 1 and one.seq_q <= 32
        assert more.batch * more.heads == processors + 1 and more.seq_q <= 64
        many = shapes["many"]
        sequences = sum(n > 0 for n in many.lens_q) or -(-many.seq_q // 128)
        if "decoding" not in kind:
            assert many.batch * many.heads * sequences >= 2.5 * processors
        for s in shapes.values():
            assert s.heads % s.heads_k == 0 and len(s.lens_q) == len(s.lens_k)
            assert s.lens_q or s.seq_k % 16 == 0, "a mask of bytes that TMA takes"
        if "packed" in kind:
            assert many.lens_q[0] == many.lens_q[-1] == many.lens_k[0] == many.lens_k[-1] == 0


NAMES = {
    "void flashsci::sm90::fwd::forward_kernel<(anonymous namespace)::Op, flashsci::sm90::fwd::Tiling<192, 128, 2, 2, false, 128>, "
    "true, true, true>(flashsci::sm90::fwd::ForwardArgs)": (192, "128 x 128", "v 128 window packed"),
    "void flashsci::sm90::decode::decode_combine<(anonymous namespace)::Op, 256>(flashsci::sm90::decode::DecodeArgs)": (256, "4 x 0", "combine"),
    "void flashsci::sm90::fp8::fp8_forward_kernel<flashsci::sm90::fp8::Tiling<192, 128, 64, 2, 4, false>, true>(flashsci::sm90::fp8::Args)": (192, "128 x 64", "v 128 packed"),
    "void flashsci::sm90::fp8::fp8_forward_kernel<flashsci::sm90::fp8::Tiling<256, 256, 128, 2, 2, true>, false>(flashsci::sm90::fp8::Args)": (256, "128 x 128", "fast dense"),
    "void flashsci::sm90::paged::paged_kernel<(anonymous namespace)::Op, flashsci::paged::Same, flashsci::sm90::paged::Tiling<128, 2> >(flashsci::sm90::paged::MappedArgs)": (128, "64 x 64", "paged"),
    "void flashsci::paged::plan_kernel<(anonymous namespace)::Op, flashsci::sm90::paged::Tiling<128, 2> >(FlashsciPagedParams, flashsci::paged::Plan, int)": (128, "64 x 64", "plan"),
    "void flashsci::paged::combine_kernel<(anonymous namespace)::Op, flashsci::sm90::paged::Tiling<256, 2> >(flashsci::paged::Args)": (256, "4 x 0", "combine"),
    "void flashsci::paged::combine_kernel<(anonymous namespace)::Op8, flashsci::sm80::paged::Tiling<128, 1> >(flashsci::paged::Args)": (128, "4 x 0", "combine"),
    "void flashsci::sm90::paged::paged_kernel<(anonymous namespace)::Op8, flashsci::sm90::paged::E5m2, flashsci::sm90::paged::Tiling<256, 1> >(flashsci::sm90::paged::MappedArgs)": (256, "64 x 128", "e5m2"),
    "void flashsci::sm80::paged::paged_kernel<(anonymous namespace)::Op, flashsci::paged::Same, flashsci::sm80::paged::Tiling<128, 2> >(flashsci::paged::Args)": (128, "64 x 32", "paged"),
    "void flashsci::sm80::paged::paged_kernel<(anonymous namespace)::Op8, flashsci::sm80::paged::E4m3, flashsci::sm80::paged::Tiling<64, 1> >(flashsci::paged::Args)": (64, "64 x 128", "e4m3"),
    "void flashsci::sm90::bwd::backward_kernel<(anonymous namespace)::Op, flashsci::sm90::bwd::BackwardTiling<64, 64, 128, "
    "(flashsci::sm90::bwd::BiasMaskTiles)0, true>, false, false>(flashsci::sm90::bwd::BackwardArgs)": (64, "128 x 128", "tile after tile"),
    "void flashsci::sm90::bwd::backward_postprocess_kernel<(anonymous namespace)::Op, flashsci::sm90::bwd::D256BackwardTiling<256, 128>, true>"
    "(flashsci::sm90::bwd::BackwardArgs)": (256, "64 x 0", "v 128 postprocess packed"),
    "void flashsci::sm80::fwd::forward_bias_mask_kernel<(anonymous namespace)::Op, flashsci::sm80::fwd::BiasMaskTiling<flashsci::sm80::fwd::Tiling<32, 128, "
    "32, 4, 2, 2>, 2, 4>, true>(FlashsciForwardParams, flashsci::sm80::fwd::ForwardPlan, flashsci::sm80::fwd::BiasMaskPlan)": (32, "128 x 32", "16-byte rows, fp32 bias, two members"),
    "void flashsci::sm80::dq::backward_queries_kernel<(anonymous namespace)::Op, flashsci::sm80::dq::QueryTiling<256, 64, 32, 1, 2> >"
    "(FlashsciBackwardParams, flashsci::sm80::bwd::BackwardPlan, unsigned int)": (256, "64 x 32", "backward queries"),
    "void flashsci::sm75::bwd::backward_keys_kernel<(anonymous namespace)::Op, flashsci::sm75::bwd::KeyTiling<32, 128, 32, 2, 4, 2>, true>"
    "(FlashsciBackwardParams, flashsci::sm75::bwd::BackwardPlan, unsigned int)": (32, "32 x 128", "backward keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_instances_are_known_by_the_names_that_profilers_show(name):
    (found,) = races.launched([name], "bfloat16" if "sm75" not in name else "float16")
    assert (found.head_dim, found.tile, found.variant) == NAMES[name]
    assert found in races.instances()


@pytest.mark.parametrize(
    "kernel, blocks, units, staged, variant, shared",
    (
        ("forward", 3, 4, "true", "forward, staged", 2 * (3 * 24 * 160 + 32)),
        ("backward", 4, 2, "true, 0", "backward, staged", 2 * (5 * 32 * 96 + 32)),
        ("backward", 4, 2, "true, 4", "backward, staged, room for 4", 5 * 32 * 9 * 32 + 256),
        ("backward", 3, 1, "true, 8", "backward, staged, room for 8", 5 * 32 * 9 * 32 + 256),
        ("backward", 4, 2, "false, 0", "backward", 0),
    ),
)
def test_kernels_of_rows_in_shared_memory_are_told_from_others(kernel, blocks, units, staged, variant, shared):
    name = (
        f"void flashsci::sm80::small::small_{kernel}_kernel<flashsci::sm80::small::Products16<flashsci::BFloat16>, "
        f"flashsci::sm80::small::Shape<{blocks}, {units}, true>, {staged}>(Flashsci{kernel.title()}Params, flashsci::sm80::small::HeadPlan)"
    )
    rows = 8 * blocks
    (found,) = races.launched([name], "bfloat16")
    assert found == Instance("sm80", "small", "bfloat16", 16 * units, f"{rows} x {rows}", variant)
    calls = races.calls_of(found)
    assert all(call.inside == staged.startswith("true") for call in calls)
    symbol = races.symbol_of(name)
    assert races.resources().Kernel("sm80/small_bf16", 90, symbol, 0, 0, 0, 0).shared == shared


def _symbols() -> list[str]:
    """Of the kernels in the built library, for sm_90 and Turing."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if backend.library_path() is None or shutil.which("c++filt") is None or not tool.is_file():
        pytest.skip("no library, no cuobjdump or no c++filt")
    dump = subprocess.run([str(tool), "-symbols", str(backend.library_path())], capture_output=True, text=True).stdout
    found: dict[str, None] = {}
    arch = ""
    for line in dump.splitlines():
        if matched := re.match(r"arch = sm_(\d+)", line):
            arch = matched[1]
        elif (matched := re.search(r"STO_ENTRY\s+(_Z\w+)", line)) and arch in ("90", "75"):
            found[matched[1]] = None
    return list(found)


def test_every_kernel_in_the_library_is_in_the_table():
    """By symbol, and by the name that a profiler shows for it."""
    symbols = _symbols()
    if not symbols:
        pytest.skip("cuobjdump finds no kernels in this library")
    shown = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True).stdout.splitlines()
    table = races.resources().TABLE.read_text(encoding="utf-8")
    _, rows = races.resources().read_table(table)
    known = {(r["unit"][:4], r["head dim"], r["tile (rows x keys)"], r["variant"]) for r in rows}
    for symbol, name in zip(symbols, shown, strict=True):
        # By the unit's file (sm90) or the type that the kernel is a template of.
        named = {"BFloat16": "bfloat16", "Float16": "float16"}
        named = {f"_{s}_": d for s, d in races.DTYPES.items()} | named
        dtype = next((d for mark, d in named.items() if mark in symbol), "float32")
        for given in (symbol, name):
            (instance,) = races.launched([given], dtype)
            key = (instance.generation, str(instance.head_dim), instance.tile, instance.variant)
            assert key in known, (given, instance)


# --- the test of the test ----------------------------------------------------------------------


@pytest.fixture
def harness(monkeypatch):
    """tests/gpu/test_races.py on the CPU, with a few repeats."""
    spec = importlib.util.spec_from_file_location("races_on_cpu", ROOT / "tests/gpu/test_races.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    for name, value in (("REPEATS", 4), ("DEVICE", torch.device("cpu")), ("ON_GPU", False)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.Repeats, "SMALL", 0)
    dense = [
        Shape("many", 2, 4, 2, 20, 16),
        Shape("empty rows first", 1, 2, 1, 40, 16, lower_right=True),
        Shape("partly judged", 3, 2, 2, 40, 16, lower_right=True, forward_only=True, judged=1),
        Shape("empty rows last", 1, 2, 1, 40, 16, window=(3, 2)),
    ]
    packed = [
        Shape("packed", 1, 2, 1, 22, 20, lens_q=(0, 5, 0, 17, 0), lens_k=(0, 0, 4, 16, 0)),
        Shape("one", 1, 1, 1, 5, 7, lens_q=(5,), lens_k=(7,), known=True),
    ]
    monkeypatch.setattr(
        races,
        "shapes",
        lambda call, _: packed if call.packed else [s for s in dense if not (s.judged and (call.bias or call.mask))],
    )
    return module


@pytest.mark.parametrize(
    "kind",
    [
        dict(causal=True),
        dict(packed=True, causal=True),
        dict(bias="shared", bias_fp32=True, mask="keys"),
        dict(softcap=True),
        dict(bias="own", mask="own", softcap=True, causal=True),
    ],
    ids=str,
)
def test_honest_results_pass(harness, kind):
    harness.run_call(Call("reference", "bfloat16", 16, 8, **kind))


def test_small_calls_are_repeated_more_often(harness, monkeypatch):
    monkeypatch.setattr(harness.Repeats, "SMALL", 2000)
    made = []
    compare = harness.Compared.add
    monkeypatch.setattr(
        harness.Compared, "add", lambda self, *given: (made.append(len(given[1])), compare(self, *given))
    )
    harness.run_call(Call("reference", "bfloat16", 16, 8, causal=True))
    assert set(made) == {4, 20}


@pytest.mark.parametrize("packed", (False, True))
def test_honest_results_of_8_bit_floats_pass_and_a_wrong_repeat_is_found(harness, monkeypatch, packed):
    call = FP8Call(16, 16, "64", packed, causal=True, backend="reference")
    assert len(list(call.cases(1))) == (2 if packed else 3)
    harness.run_apart(call)
    calls, evaluate = [], harness.FP8Inputs.evaluate

    def wrong(self, backend):
        found = evaluate(self, backend)
        calls.append(self)
        if len(calls) == 4:
            found["lse"][0, -1] += 1.0
        return found

    monkeypatch.setattr(harness.FP8Inputs, "evaluate", wrong)
    with pytest.raises(AssertionError, match="lse differs in 1 of 4 repeats, first in repeat 2"):
        harness.run_apart(call)


@pytest.mark.parametrize("window", ("causal", "both"))
def test_honest_results_of_paged_calls_pass_and_a_wrong_repeat_is_found(harness, monkeypatch, window):
    call = PagedCall("bfloat16", 64, 64, window, other="reference")
    small = [(n, c) for n, c in call.cases(2) if sum(c.lens_k) < 2000]
    assert len(small) == 4
    monkeypatch.setattr(PagedCall, "cases", lambda *_: iter(small))
    harness.run_apart(call)
    calls, evaluate = [], harness.PagedInputs.evaluate

    def wrong(self, backend):
        found = evaluate(self, backend)
        calls.append(self)
        if len(calls) == 3:
            found["out"][0, 1, 2] += 1.0
        return found

    monkeypatch.setattr(harness.PagedInputs, "evaluate", wrong)
    with pytest.raises(AssertionError, match="out differs in 1 of 4 repeats, first in repeat 1"):
        harness.run_apart(call)


def test_cases_of_paged_calls():
    cases = dict(PagedCall("float16", 192, 128, "both").cases(132))
    assert len(cases["one more than processors"].lens_q) == 133
    for case in cases.values():
        assert len(case.lens_q) == len(case.lens_k) and case.page % 16 == 0
        assert case.variant.sink and case.variant.softcap and case.variant.head_dim_v == 128
    for call, scales in (
        (PagedCall("float16", 64, 64), "none"),
        (PagedCall("float16", 64, 64, cache="float8_e5m2"), "heads"),
    ):
        assert {(c.variant.cache, c.scales) for _, c in call.cases(2)} == {(call.cache, scales)}


def test_paged_calls_have_plans_of_either_kind():
    """A kernel of its own makes those of many slots (csrc/core/paged/plan.cuh), every block the others."""
    source = (ROOT / "csrc/core/paged/plan.cuh").read_text()
    most = int(re.search(r"kPlannedByEach = (\d+)", source)[1])
    call = PagedCall("bfloat16", 64, 64)
    slots = [sum(case.lens_q) * case.group // 64 + len(case.lens_q) + 2 for _, case in call.cases(132)]
    assert any(n > most for n in slots) and sum(n <= most for n in slots) > 1


def test_paged_calls_are_those_that_kernels_take():
    """One that they refuse would be found on a GPU alone."""
    for call in (c for c in races.all_calls() if isinstance(c, PagedCall)):
        case = next(replace(c, seed=0) for _, c in call.cases(2) if sum(c.lens_k) < 2000)
        x = make_paged_inputs(case)
        out = torch.empty(*x.q.shape[:2], x.v_cache.shape[-1], dtype=x.q.dtype)
        given = [x.options.get(n) for n in PagedTensors._fields[3:]]
        assert refuse_layout(PagedTensors(x.q, x.k_cache, x.v_cache, *given), out) is None, call


@pytest.mark.parametrize("block", ("64", "128"))
@pytest.mark.parametrize("packed", (False, True))
def test_cases_of_8_bit_floats_have_the_shapes_of_other_calls(block, packed):
    call = FP8Call(192, 128, block, packed, causal=True)
    names = {s.name for s in races.shapes(Call("sm90", "bfloat16", 192, 128, packed, True), 132)}
    cases = dict(call.cases(132))
    assert names - set(cases) <= {"short tiles one after the other"}
    for case in cases.values():
        assert case.variant.packed == packed and case.scales == ("head", block, block)
        assert len(case.lens_q) == len(case.lens_k) and bool(case.batch) != packed
    assert str(call).startswith("sm90-fp8-d192-v128-block")
    fast = dict(FP8Call(256, 256, block, packed, fast=True).cases(132))
    assert all(case.accumulate == "fast" and case.scales == ("head", block, "head") for case in fast.values())


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("out", "many: out differs in 1 of 4 repeats, first in repeat 2 at [0, 0, 3, 2]"),
        ("dk", "many, in turns: dk differs in 1 of 4 repeats, first in repeat 1 at [0, 0, 3, 2]"),
        ("dq", "many, any order: dq is off by nan from the first run, "),
        ("dv", "in 1 of 4 repeats, first in repeat 3 at [0, 1, 2, 7]"),
        ("first", "many: out: "),
    ],
)
def test_a_single_wrong_repeat_is_found(harness, monkeypatch, tensor, words):
    """One element, once: of the forward, of the backward in turns, of the other; and in the first run."""
    calls = {"fwd": 0, "bwd": 0}
    wrong = {
        "first": ("fwd", 1),
        "out": ("fwd", 4),
        "dk": ("bwd", 4),
        "dq": ("bwd", 8),
        "dv": ("bwd", 10),
    }
    kind, time = wrong[tensor]  # backwards: in any order, in turns, four of these, four of those

    def now(of):
        calls[of] += 1
        return of == kind and calls[of] == time

    def forward(*arguments):
        out, lse = reference.forward(*arguments)
        if now("fwd"):
            out[0, 0, 3, 2] += 1.0
        return out, lse

    def backward(*arguments):
        dq, dk, dv, *others = reference.backward(*arguments)
        if now("bwd"):
            if tensor == "dv":
                dv[0, 1, 2, 7] += 1.0
            else:
                (dk if tensor == "dk" else dq)[0, 0, 3, 2] = torch.nan
        return dq, dk, dv, *others

    class Wrong(harness.backends.Backend):
        def load(self):
            return SimpleNamespace(forward=forward, backward=backward, unavailable=lambda: None)

    monkeypatch.setitem(harness.backends.BACKENDS, "wrong", Wrong("wrong", ""))
    with pytest.raises(AssertionError, match=re.escape(words)):
        harness.run_call(Call("wrong", "bfloat16", 16, 8, causal=True))
