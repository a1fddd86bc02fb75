"""The sm90 and sm80 kernels of paged attention, from caches of 16 and of 8 bits, run on the host (emulated.py) from the launcher
to the stores, on generated calls and by the judge of every backend. What a GPU's barriers, copies and products do is emulated;
its speed, its registers, its fences and kernels that start beside their predecessors are not."""

from __future__ import annotations

import ctypes as c
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashsci.check.planning import aligned_paged
from flashsci.testing import (
    PagedCase,
    PagedInputs,
    PagedVariant,
    generate_paged,
    make_paged_inputs,
)
from tests.cpu.emulator.emulated import ROOT, build, emulate, is_found
from tools.kernels.launchers import _fields, _pointer

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]


class Params(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "q k_cache v_cache out lse block_table seqused_k cu_seqlens_q sink"),
        *_fields(c.c_int64, "q_row q_head out_row out_head"),
        *_fields(c.c_int64, "k_page k_row k_head v_page v_row v_head"),
        *_fields(c.c_int32, "tokens sequences heads_q heads_k pages page columns"),
        *_fields(c.c_int32, "head_dim head_dim_v"),
        *_fields(c.c_float, "scale softcap"),
        *_fields(c.c_int32, "window_left window_right device"),
        *_fields(c.c_void_p, "workspace"),
    ]


class Params8(c.Structure):
    _fields_ = [
        ("call", Params),
        *_fields(c.c_void_p, "k_scale v_scale"),
        *_fields(c.c_int64, "k_scale_sequence k_scale_head v_scale_sequence v_scale_head"),
        ("e5m2", c.c_int32),
    ]


FORMATS = ("float8_e4m3fn", "float8_e5m2")
caches = pytest.mark.parametrize("cache", ("", "float8_e4m3fn"))

GENERATIONS = ("sm90", "sm80")
PROCESSORS = (1, 2, 3, 4, 50)  # of the devices of generated calls


class Kernels:
    """The two libraries of a generation, each built when it is first asked for."""

    def __init__(self, folder: Path, generation: str, *changes: tuple[str, str, str]):
        self.folder, self.generation, self.changes = folder, generation, changes
        self.built: dict[str, c.CDLL] = {}

    def of(self, inputs: PagedInputs) -> c.CDLL:
        name = "paged" if inputs.k_cache.dtype == inputs.q.dtype else "paged8"
        if name not in self.built:
            (self.folder / name).mkdir()
            define = "SM80" if self.generation == "sm80" else ""
            self.built[name] = build(self.folder / name, name, *self.changes, define=define)
            self.built[name].workspace.restype = c.c_int64
        return self.built[name]


@pytest.fixture(scope="module", params=GENERATIONS)
def kernel(tmp_path_factory, request):
    return Kernels(tmp_path_factory.mktemp("paged"), request.param)


def call_of(params: Params | Params8) -> Params:
    return params.call if isinstance(params, Params8) else params


def describe(inputs: PagedInputs, device: int) -> tuple[Params | Params8, dict[str, torch.Tensor]]:
    """As csrc/bindings/paged.cpp does it: the parameters but for a workspace, and the results. device: a number for itself."""
    q, k, v, given = inputs.q, inputs.k_cache, inputs.v_cache, inputs.options
    left, right = given["window"] or (None, None)
    right = 0 if given["causal"] else right
    out = torch.full((*q.shape[:2], v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    vectors = (given[n] for n in ("block_table", "seqused_k", "cu_seqlens_q"))
    scale = given["scale"] if given["scale"] is not None else q.shape[2] ** -0.5
    params = Params(
        *map(_pointer, (q, k, v, out, lse, *vectors, given.get("sink"))), *q.stride()[:2], *out.stride()[:2], *k.stride()[:3],
        *v.stride()[:3], tokens=q.shape[0], sequences=len(given["seqused_k"]), heads_q=q.shape[1], heads_k=k.shape[2],
        pages=k.shape[0], page=k.shape[1], columns=given["block_table"].shape[1], head_dim=q.shape[2], head_dim_v=v.shape[3],
        scale=scale, softcap=given["softcap"] or 0.0, window_left=-1 if left is None else left,
        window_right=-1 if right is None else right, device=device,
    )  # fmt: skip
    results = {"out": out, "lse": lse}
    if k.dtype == q.dtype:
        return params, results
    shape = len(given["seqused_k"]), k.shape[2]
    k_scale, v_scale = (None if given.get(n) is None else given[n].expand(shape) for n in ("k_scale", "v_scale"))
    strides = [s for x in (k_scale, v_scale) for s in ((0, 0) if x is None else x.stride())]
    e5m2 = k.dtype == torch.float8_e5m2
    return Params8(params, _pointer(k_scale), _pointer(v_scale), *strides, e5m2), results


def device_of(processors: int, seed: int) -> int:
    """Launchers ask a device once for its multiprocessors and allow a kernel its shared memory once: each number of them is a
    device, with each of the three rooms of paged.cpp."""
    return 3 * processors + seed % 3


def run(kernels: Kernels, inputs: PagedInputs, seed: int = 0, processors: int = 3) -> dict[str, torch.Tensor] | None:
    """out and lse; None where the kernels leave the call to others. Nothing is written behind the workspace."""
    params, results = describe(inputs, device_of(processors, seed))
    library = kernels.of(inputs)
    size = library.workspace(c.byref(params), processors)
    workspace = torch.full((size + 256,), 255, dtype=torch.uint8)  # NaN, and garbage in integers
    call_of(params).workspace = workspace.data_ptr()
    taken = emulate(library.emulate, params, inputs.q.dtype == torch.bfloat16, seed, processors)
    assert (workspace[size:] == 255).all()
    return results if taken else None


def judge(kernels: Kernels, case: PagedCase, processors: int = 3) -> None:
    """The kernels take a case and are right."""
    inputs = make_paged_inputs(case)
    found = run(kernels, inputs, case.seed, processors)
    assert found is not None, case
    problems = inputs.judge(fused=True).problems(found)
    assert not problems, "\n".join([*problems, repr(case)])


@caches
@pytest.mark.parametrize("processors", (1, 2, 5, 13))
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (256, 256), (192, 128)))
def test_every_tile(kernel, dims, processors, cache):
    """Rings that go round, tiles that are cut and tiles that are not, in runs of every length."""
    variant = PagedVariant("bfloat16", cache, *dims, "causal")
    case = PagedCase(variant, 2 + processors, (1, 30, 0, 2), (700, 90, 40, 150), 2, 3, 48, padding=2)
    judge(kernel, case, processors)


@pytest.mark.parametrize("part", range(4))
def test_generated(kernel, part):
    for case in generate_paged(500 + part, 12, longest_k=400, longest_q=80):
        judge(kernel, aligned_paged(case), PROCESSORS[case.seed % 5])


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("cache", FORMATS)
def test_generated_with_8_bit_caches(kernel, cache, part):
    for case in generate_paged(600 + part, 8, longest_k=400, longest_q=80):
        variant = replace(case.variant, cache=cache)
        judge(kernel, aligned_paged(replace(case, variant=variant)), PROCESSORS[case.seed % 5])


@caches
def test_what_shared_memory_held_changes_no_bit(kernel, tmp_path, cache):
    """NaN in rows that nobody has loses every comparison. What another kernel leaves there may win some: here 85, or 1.5e13."""
    left = (
        "make_uint4(~0u, ~0u, ~0u, ~0u)",
        "make_uint4(0x55555555, 0x55555555, 0x55555555, 0x55555555)",
    )
    other = Kernels(tmp_path, kernel.generation, ("../core/poison.cuh", *left))
    for dtype in ("float16", "bfloat16"):
        variant = PagedVariant(dtype, cache, 64, 64)
        inputs = make_paged_inputs(PagedCase(variant, 2, (1, 5, 1, 9), (700, 300, 20, 90), 2, 4))
        first, second = (run(kernels, inputs, 3) for kernels in (kernel, other))
        assert all(torch.equal(x, second[name]) for name, x in first.items())


@caches
@pytest.mark.parametrize("sink", (False, True))
def test_a_sequence_is_cut_into_many_pieces(kernel, sink, cache):
    """A sink counts once, whoever writes the row."""
    variant = PagedVariant("float16", cache, 64, 64, "left", sink=sink)
    case = PagedCase(variant, 3, (1, 1), (2000, 5), 1, 8, 16, left=1500)
    for seed in (3, 4):
        judge(kernel, replace(case, seed=seed), 11)


@caches
@pytest.mark.parametrize("processors", (7, 16, 40, 132))
def test_more_processors_than_blocks(kernel, processors, cache):
    """Every block has one, and the others nothing: pieces are found where they are."""
    case = PagedCase(PagedVariant("float16", cache, 64, 64), 6, (1, 1), (1000, 130), 2, 4)
    judge(kernel, case, processors)


@pytest.mark.parametrize("kernel", ("sm90",), indirect=True)
@pytest.mark.parametrize("processors", (1, 2, 3))
def test_ctas_keep_step_in_long_runs(kernel, processors):
    """They wait for CTAs that have not begun here, in vain; and what they count ends where it began: no launch clears it."""
    case = PagedCase(PagedVariant("bfloat16", "", 256, 256), 0, (1,), (7000,), 1, 2, 64)
    steps, all_of_a_launch = kernel.of(make_paged_inputs(case)).steps, 1 << 24
    before = steps()
    for launches in (1, 2):
        judge(kernel, replace(case, seed=launches), processors)
        assert steps() - before == launches * all_of_a_launch


@caches
def test_many_sequences(kernel, cache):
    """More than each CTA plans by itself."""
    lens_q = tuple(n % 5 != 3 for n in range(420))
    case = PagedCase(PagedVariant("bfloat16", cache, 64, 64), 7, lens_q, tuple(range(420)), 1, 2)
    judge(kernel, case, 5)


@caches
@pytest.mark.parametrize("lens_k", ((0, 0), (0, 17)))
@pytest.mark.parametrize("lens_q", ((0, 0), (1, 3), (70, 0)))
def test_nothing_to_see(kernel, lens_q, lens_k, cache):
    """Sequences without keys, without queries, without either."""
    case = PagedCase(PagedVariant("bfloat16", cache), 5, lens_q, lens_k, 2, 4, padding=3)
    judge(kernel, case)


def finite(case: PagedCase) -> PagedInputs:
    """Without the NaN where no key is: whatever is read of the caches is a number."""
    inputs = make_paged_inputs(case)
    for cache in (inputs.k_cache, inputs.v_cache):
        cache.copy_(cache.float().nan_to_num(0.0))
    return inputs


@caches
@pytest.mark.parametrize("edges", ((0, 1, 8, 11), (5, 3, 2, 900), (-7, 2**31 - 1, 0, 4), (11, 11, 11, 11)))
@pytest.mark.parametrize("used", ((2**31 - 1, -5, 2**30), (-(2**31), 1, 10**9)))
@pytest.mark.parametrize("entry", (None, 2**31 - 1, -(2**31)))
def test_what_is_out_of_range_reads_nothing_beyond_the_tensors(kernel, edges, used, entry, cache):
    """Around the tensors there is NaN, and every row is a number; lengths end with the table, entries with the cache."""
    inputs = finite(PagedCase(PagedVariant("bfloat16", cache), 1, (1, 7, 3), (400, 90, 20), 2, 4))
    options = inputs.options
    if entry is not None:
        options["block_table"].fill_(entry)
    options["cu_seqlens_q"].copy_(torch.tensor(edges))
    options["seqused_k"].copy_(torch.tensor(used))
    found = run(kernel, inputs)
    assert found["out"].isfinite().all() and not found["lse"].isnan().any()
    if edges == (0, 1, 8, 11):
        options["seqused_k"].clamp_(0, options["block_table"].shape[1] * 16)
        inputs.judge(fused=True).require(found)


@pytest.mark.parametrize("dim", (64, 256))
@pytest.mark.parametrize("power", (-100, -20, 17, 90))
def test_rows_of_q_of_any_size(kernel, power, dim):
    """Products are in fp16, whose range bf16 leaves: powers of two that k_scale takes back change no bit."""
    case = PagedCase(PagedVariant("bfloat16", FORMATS[0], dim, dim), 1, (1, 9), (300, 90), 2, 4)
    inputs = make_paged_inputs(case)
    one = inputs.options | {"k_scale": torch.ones(())}
    other = inputs.options | {"k_scale": torch.tensor(2.0**-power)}
    expected = run(kernel, replace(inputs, options=one))
    found = run(kernel, replace(inputs, q=inputs.q * 2.0**power, options=other))
    assert all(torch.equal(found[n], x) for n, x in expected.items())


def test_numbers_in_a_row_of_q_of_all_sizes(kernel):
    inputs = make_paged_inputs(PagedCase(PagedVariant("bfloat16", FORMATS[0]), 1, (1, 9), (300, 90), 2, 4))
    inputs.q.mul_(torch.logspace(-12, 0, 64)[torch.randperm(64)])
    inputs.judge(fused=True).require(run(kernel, inputs))


@pytest.mark.parametrize("value", (torch.inf, torch.nan))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_a_row_of_q_that_is_not_finite_is_no_other_rows_business(kernel, dtype, value):
    inputs = make_paged_inputs(PagedCase(PagedVariant(dtype, FORMATS[1]), 1, (1, 9), (300, 90), 2, 4))
    expected = run(kernel, inputs)
    inputs.q[3, 5, 7] = value
    found = run(kernel, inputs)
    assert found["out"][3, 5].isnan().all() and found["lse"][5, 3].isnan()
    for name, x in expected.items():
        y = found[name].clone()
        (y[3] if name == "out" else y.T[3])[5] = (x[3] if name == "out" else x.T[3])[5]
        torch.testing.assert_close(y, x, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("number", (True, False))
def test_scales_of_any_strides(kernel, number):
    """One number for all, or a column of a larger table, either without the other."""
    case = PagedCase(PagedVariant("float16", FORMATS[0]), 7, (1, 3), (300, 40), 3, 2, scales="heads")
    inputs = make_paged_inputs(case)
    for name in ("k_scale", "v_scale"):
        scale = inputs.options[name]
        wide = torch.full((5, 2, 7), torch.nan)[:3, :, 4].T
        given = scale[0, 0] if number else wide.copy_(scale)
        options = {k: v for k, v in inputs.options.items() if k not in ("k_scale", "v_scale")}
        changed = replace(inputs, options=options | {name: given})
        changed.judge(fused=True).require(run(kernel, changed))


@caches
def test_no_sequence(kernel, cache):
    inputs = make_paged_inputs(PagedCase(PagedVariant("float16", cache), 1, (3,), (40,), 1, 2))
    options = {n: inputs.options[n][:0] for n in ("block_table", "seqused_k")}
    options["cu_seqlens_q"] = inputs.options["cu_seqlens_q"][:1]
    found = run(kernel, replace(inputs, options=inputs.options | options))
    assert not found["out"].any() and (found["lse"] == -torch.inf).all()


@caches
def test_no_lse_is_asked_for(kernel, cache):
    inputs = make_paged_inputs(PagedCase(PagedVariant("bfloat16", cache), 1, (1, 20), (600, 30), 2, 2))
    wanted = run(kernel, inputs)
    params, found = describe(inputs, device_of(3, 1))
    library = kernel.of(inputs)
    workspace = torch.empty(library.workspace(c.byref(params), 3), dtype=torch.uint8)
    call_of(params).workspace, call_of(params).lse = workspace.data_ptr(), None
    assert emulate(library.emulate, params, True, 1)
    assert torch.equal(found["out"], wanted["out"])


@caches
@pytest.mark.parametrize(
    "changes",
    [
        {"page": 24}, {"head_dim": 68}, {"head_dim_v": 264}, {"q_row": 132}, {"out_head": 68}, {"k_row": 132}, {"v_page": 4},
        {"columns": 1 << 26, "page": 16}, {"tokens": 1 << 27, "heads_q": 8}, {"sequences": 1 << 22, "columns": 1 << 24},
        {"heads_q": 1 << 29, "heads_k": 1 << 29, "tokens": 1, "sequences": 1 << 29, "columns": 1 << 25},
    ],
)  # fmt: skip
def test_what_they_leave_to_others(kernel, changes, cache):
    """Before anything is launched, and without a workspace where sizes are the reason. No size overflows on the way."""
    inputs = make_paged_inputs(PagedCase(PagedVariant("bfloat16", cache), 1, (1, 20), (600, 30), 2, 2))
    params, results = describe(inputs, device_of(3, 1))
    for name, value in changes.items():
        setattr(call_of(params), name, value)
    library = kernel.of(inputs)
    size = library.workspace(c.byref(params), 3)
    assert (size == 0) == (not {"q_row", "out_head", "k_row", "v_page"} & changes.keys())
    assert not emulate(library.emulate, params, True, 1)
    assert results["out"].isnan().all()


@pytest.mark.parametrize("cache", FORMATS)
def test_bytes_as_fp16_without_an_instruction(tmp_path, cache):
    """Of sm80: every number, the subnormal ones among them, and NaN."""
    widen = build(tmp_path, "paged8", define="SM80").widen
    widen.restype = c.c_float
    every = torch.arange(256, dtype=torch.uint8)
    wide = torch.empty(256, dtype=torch.float16)
    for i, word in enumerate(every.view(torch.int32).tolist()):
        unit = widen(c.c_uint32(word), cache == "float8_e5m2", c.c_void_p(wide.data_ptr() + 8 * i))
    expected = every.view(getattr(torch, cache)).float()
    assert torch.equal((wide.float() * unit).nan_to_num(1e9, 2e9, -2e9), expected.nan_to_num(1e9, 2e9, -2e9))


SHARED = {
    "V of keys that no row sees": ("warp_tile", "words[i][w] &= mask;", ";"),
    "stages that are never free": ("warp_tile", "      release(shared.k_empty[stage]);\n      release(shared.v_empty[stage]);\n", ""),
    "V before it is there": ("warp_tile", "      C::Isa::wait(shared.v_full[stage], turn.parity);\n", ""),
    "the stage of another turn": ("config", "uint32_t count = 0, stage = 0, parity = 0;", "uint32_t count = 0, stage = 0, parity = 1;"),
    "chunks of another part": ("warp_tile", "part(warp % kKeyWarps<C> / rows.tiers)", "part(warp % (kKeyWarps<C> / rows.tiers))"),
    "sums that are not there yet": ("gather", "    ptx::barrier_sync(kComputing, kComputingThreads);\n    write_part", "    write_part"),
    "sums of the part before": ("gather", "    ptx::barrier_sync(kComputing, kComputingThreads);  // the old contents have been read\n", ""),
    "weights of the warps": ("gather", "ptx::ex2_approx(statistics[warp].x - offset)", "1.f"),
    "weights of the warps where rows are few": ("gather", "__shfl_sync(0xffffffffu, weight, i * kRowLanes + warp)", "1.f"),
    "sums of few rows that are not there yet": ("gather", "    C::Isa::wait(shared.sums_full, handed++ & 1);\n", ""),
    "sums of the last few rows that are not there yet": ("gather", "  leave_all(warp_tile);\n  ptx::barrier_sync(kComputing, kComputingThreads);\n", "  leave_all(warp_tile);\n"),
    "sums of few rows before the last are read": ("compute", "    C::Isa::wait(shared.sums_empty, (handed & 1) ^ 1);", ""),
    "a sink in each piece": ("gather", "      if (column == 0) a.plan.partial_lse[place] = lse;", "      if (column == 0) a.plan.partial_lse[place] = a.p.sink == nullptr ? lse : with_logit(lse, __ldg(a.p.sink + rows.head_of(r)) * kLog2e).x;"),
    "Q of the next tile but one before the last has read it": ("load_q", "      if (first == 0) C::Isa::sleep(shared.q_empty[stage], (turn / C::kQStages & 1) ^ 1);\n", ""),
    "Q before it is there": ("compute", "    C::Isa::wait(shared.q_full[stage], tiles / C::kQStages & 1);\n", ""),
    "pages that are not clamped": ("pages", "return min(max(entry, 0), a.p.pages - 1);", "return entry;"),
    "a page of another block": ("pages", "place(taken++)", "place(1 + taken++)"),
    "a page before it is there": ("pages", "    ptx::cp_async_wait<C::kAhead - 1>();\n", ""),
    "the place of a piece": ("config", "return int64_t{cta} * 2 + begins_there;", "return int64_t{cta} * 2;"),
    "where a run begins": ("config", "at(begin + (start.unit == 0))", "at(begin)"),
    "the CTA of a block": ("gather", "runs.cta_of(tile.begin + tile.slot.blocks - 1)", "runs.cta_of(tile.begin + tile.slot.blocks - 2)"),
    "rows of no sequence": ("combine", "      if (has_slots<C>(a, token)) continue;\n", "      continue;\n"),
    "pieces of another tile": ("combine", "      if (first + base + i > last) break;", "      ;"),
    "the lse of another piece": ("combine", "__shfl_sync(0xffffffffu, share, (base + i) % 32)", "share"),
}  # fmt: skip
LOADS = {
    "sm90": {
        "boxes that are not swizzled": ("config", "(piece ^ line * C::kRowBytes / 128 % (C::kRowBytes / 16)) * 16", "piece * 16"),
        "fewer bytes than arrive": ("load", "copies * box_rows * C::kPitch);", "copies * box_rows * C::kPitch / 2);"),
        "rows of a page": ("load", "const int row = copy.key(cursor) % copy.a.p.page;", "const int row = 0;"),
    },
    "sm80": {
        "copies that nobody has waited for": ("load", "    ptx::cp_async_arrive(ptx::shared_address(&full[turn.stage]));\n", "    C::Isa::arrive(full[turn.stage]);\n"),
        "stages before they are free": ("load", "    C::Isa::sleep(empty[turn.stage], turn.parity ^ 1);\n", ""),
        "rows of a page": ("load", "lookup.key(cursor) % p.page * cache.row", "0"),
        "rows of another page": ("load", "__shfl_sync(0xffffffffu, found, i)", "__shfl_sync(0xffffffffu, found, 0)"),
        "pieces of another place": ("load", "first + at, piece % kBoxPieces)", "at, piece % kBoxPieces)"),
        "more stages than there is room for": ("launch", "stages < C::kStages && shared_bytes<C>(stages + 1) <= room", "stages < C::kStages"),
    },
}  # fmt: skip
OF_16_BITS = {"keys of V in another order": ("format", "0x5410), __byte_perm(upper, lower, 0x7632)", "0x1054), __byte_perm(upper, lower, 0x3276)")}  # fmt: skip
OF_8_BITS = {
    "keys of V in another order": ("format", "pair ? 0x7362 : 0x5140", "pair ? 0x3726 : 0x1504"),
    "units of Q": ("warp_tile", "s[e] *= q_unit[e >> 1 & 1];", ";"),
    "the scale of K": ("warp_tile", "*= k_scale;", "*= 1.f;"),
    "the scale of V": ("gather", "ptx::rcp_approx(sum) * v_scale", "ptx::rcp_approx(sum)"),
}


def file_of(name: str, generation: str) -> str:
    """Of csrc/core/paged, else of the generation's folder, from csrc/sm90 on."""
    shared = (ROOT / "csrc" / "core" / "paged" / f"{name}.cuh").is_file()
    return f"../{'core' if shared else generation}/paged/{name}.cuh"


def finds(folder: Path, generation: str, cache: str, fault: tuple[str, str, str]) -> bool:
    """Whether some of a few calls show a fault."""
    other_tiles = [
        (
            "../core/paged/host.cuh",
            f"return launch(std::integral_constant<int, {dim}>());",
            "return cudaErrorNotSupported;",
        )
        for dim in (128, 256)
    ]
    file, *texts = fault
    broken = Kernels(folder, generation, (file_of(file, generation), *texts), *other_tiles)
    scales = "heads" if cache else "none"
    variant = PagedVariant("bfloat16", cache, 64, 64, "both", sink=True)
    case = PagedCase(variant, 0, (1, 30, 0, 2, 5), (1900, 90, 40, 150, 700), 2, 4, 48, outside=True, padding=3, left=900, scales=scales)  # fmt: skip
    whole = PagedCase(PagedVariant("bfloat16", cache), 0, (1,) * 9, (128,) * 9, 2, 16)  # no block is cut

    def judged(seed: int) -> None:
        for given in (case, whole):
            judge(broken, replace(given, seed=seed), seed)

    return is_found(judged)


KINDS = [(generation, cache) for generation in GENERATIONS for cache in ("", FORMATS[0])]
# Of what all kinds share each fault is looked for in one of them, in turn: a library is compiled for each.
FAULTS = [
    pytest.param(generation, cache, fault, id=f"{generation}-{8 if cache else 16}-{name}")
    for kind, (generation, cache) in enumerate(KINDS)
    for own in (OF_8_BITS if cache else OF_16_BITS,)
    for name, fault in [*list(SHARED.items())[kind :: len(KINDS)], *LOADS[generation].items(), *own.items()]
]


@pytest.mark.slow
@pytest.mark.parametrize("generation, cache, fault", FAULTS)
def test_faults_are_found(tmp_path, generation, cache, fault):
    assert finds(tmp_path, generation, cache, fault)
