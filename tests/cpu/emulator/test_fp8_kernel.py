"""The sm90 kernel on 8-bit floats, run on the host (emulated.py) from the launcher to the stores, on generated calls and by the
judge of every backend. What a GPU's barriers, copies and products do is emulated; its speed, its registers and the 14 bits of
its sums are not."""

from __future__ import annotations

import ctypes as c
from dataclasses import replace

import pytest
import torch

from flashsci.call import fp8_ops
from flashsci.testing import FP8Case, FP8Inputs, FP8Variant, generate_fp8, make_fp8_inputs
from tests.cpu.emulator.emulated import build, emulate, is_found
from tools.kernels.launchers import ForwardParams, _fields, _pointer, _strides

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]


class Scales(c.Structure):
    _fields_ = [
        *_fields(c.c_void_p, "data"),
        *_fields(c.c_int64, "batch0 batch1 head sequence block"),
        *_fields(c.c_int32, "shift slots"),
    ]


class Params(c.Structure):
    _fields_ = [
        *_fields(ForwardParams, "call"),
        *_fields(Scales, "q_scale k_scale v_scale"),
        *_fields(c.c_int32, "out_is_fp16 fast"),
    ]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("fp8"))


def loaded(folder, *changes):
    library = build(folder, "fp8", *changes)
    library.workspace.restype = c.c_int64
    library.has_fast_tiles.restype = c.c_bool
    return library


def scales_of(scale: torch.Tensor | None, x: torch.Tensor, sequences: int) -> Scales:
    """As csrc/bindings/fp8.cpp describes them. x: [..., H, S, D]."""
    rows = fp8_ops.rows_per_scale(scale, x, sequences)
    assert rows is not None
    found = Scales(data=_pointer(scale), shift=rows.bit_length() - 1)
    if scale is None or scale.dim() == 0:
        return found
    if sequences >= 0:
        found.head, found.slots = scale.stride(1), rows != fp8_ops.WHOLE
        setattr(found, "block" if found.slots else "sequence", scale.stride(0))
        return found
    outer = list(scale.stride())
    if rows != fp8_ops.WHOLE:
        found.block = outer.pop()
    for name in ("head", "batch1", "batch0"):
        if outer:
            setattr(found, name, outer.pop())
    return found


def run(
    library: c.CDLL, inputs: FP8Inputs, seed: int = 0, processors: int = 3, cut: bool | None = None
) -> dict[str, torch.Tensor] | None:
    """out and lse; None where the kernel leaves the call to others. cut: whether tiles are to be cut into pieces."""
    given = inputs.options
    edges = [given.get(f"cu_seqlens_{n}") for n in "qk"]
    packed = edges[0] is not None
    q, k, v = ((x.transpose(0, 1) if packed else x) for x in (inputs.q, inputs.k, inputs.v))
    sequences = len(edges[0]) - 1 if packed else -1
    left, right = given["window"] or (None, None)
    right = 0 if given["causal"] else right
    dtype = given["out_dtype"]
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=dtype)
    lse = torch.full(q.shape[:-1], torch.nan)
    lead = (1,) * (5 - q.dim()) + q.shape[:-3]
    call = ForwardParams(
        *map(_pointer, (q, k, v, out, lse, *edges)), *map(_strides, (q, k, v, out)), batch0=lead[0], batch1=lead[1],
        heads_q=q.shape[-3], heads_k=k.shape[-3], seq_q=q.shape[-2], seq_k=k.shape[-2], num_seqs=max(sequences, 0),
        max_seqlen_q=-1, head_dim=q.shape[-1], head_dim_v=v.shape[-1], scale=given["scale"] or q.shape[-1] ** -0.5,
        softcap=given["softcap"] or 0.0, window_left=-1 if left is None else left, window_right=-1 if right is None else right,
        lower_right=given["align"] == "lower_right", device=processors,
    )  # fmt: skip
    scales = (scales_of(given.get(f"{n}_scale"), x, sequences) for n, x in zip("qkv", (q, k, v), strict=True))
    params = Params(call, *scales, dtype == torch.float16, given.get("fp8_accumulate") == "fast")
    library.rows = library.tile_rows(c.byref(params), processors)
    library.fast = library.has_fast_tiles(c.byref(params))
    needed = library.workspace(c.byref(params), processors)
    if cut is not None:
        assert (needed > 4) == cut
    workspace = torch.full((needed,), 255, dtype=torch.uint8)
    params.call.workspace = workspace.data_ptr() if needed else None
    if not emulate(library.emulate, params, True, seed, processors):
        return None
    return {"out": out.transpose(0, 1) if packed else out, "lse": lse}


def judge(library: c.CDLL, case: FP8Case, *how) -> bool:
    """Whether the kernel took a case; it must be right then. how: the rest that `run` takes."""
    inputs = make_fp8_inputs(case)
    found = run(library, inputs, case.seed, *how)
    if found is None:
        return False
    problems = inputs.judge().problems(found)
    assert not problems, "\n".join([*problems, repr(case)])
    return True


TILES = ((64, 64), (128, 128), (192, 128), (256, 256))


@pytest.mark.parametrize("block", ("128", "64"))
@pytest.mark.parametrize("dims", TILES)
def test_every_tile(kernel, dims, block):
    """More keys than the ring has stages, rows of every consumer, a last block that is cut."""
    variant = FP8Variant("bfloat16", *dims, "causal")
    case = FP8Case(variant, 1, (300,), (650,), scales=(block, block, block), align="lower_right")
    assert judge(kernel, case)
    full = replace(case, variant=replace(variant, window="none"), seed=2, lens_q=(70,))
    assert judge(kernel, full)


PIECES = FP8Case(
    FP8Variant("bfloat16", 64, 64, "none"),
    1,
    (70,),
    (3100,),
    heads_k=3,
    scales=("128", "128", "128"),
)


@pytest.mark.parametrize("how", ("safe", "fast"))
@pytest.mark.parametrize(("dims", "rows"), [*((dims, 70) for dims in TILES), ((64, 64), 256)])
def test_pieces(kernel, dims, rows, how):
    """Of some of the tiles and of all, in two pieces and in many; 256 rows: of wide tiles."""
    if how == "fast" and dims != (256, 256):
        pytest.skip("as the safe call")
    variant = replace(PIECES.variant, head_dim=dims[0], head_dim_v=dims[1])
    scales = ("128", "128", "head" if how == "fast" else "128")
    inputs = make_fp8_inputs(replace(PIECES, variant=variant, lens_q=(rows,), scales=scales, accumulate=how))
    for processors in (2, 5, 20):
        found = run(kernel, inputs, 1, processors, True)
        assert (kernel.rows == 256) == (rows == 256) and kernel.fast == (how == "fast")
        assert not (problems := inputs.judge().problems(found)), problems
    again = run(kernel, inputs, 2, 20, True)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("scales", ("64", "128"))
@pytest.mark.parametrize("processors", (7, 16, 40, 132))
def test_more_processors_than_blocks(kernel, processors, scales):
    """Tiles as long as those that are cut, but few: a run without a block would be waited for, and never come."""
    case = replace(PIECES, lens_q=(40,), lens_k=(1100,), scales=("one", scales, scales))
    assert judge(kernel, case, processors)


FAST = FP8Case(
    FP8Variant("bfloat16", 256, 256, "causal"), 1, (300,), (1100,), scales=("128", "128", "head"), align="lower_right", accumulate="fast"
)  # fmt: skip
FAST_PACKED = replace(
    FAST, variant=replace(FAST.variant, packed=True), lens_q=(100, 40, 200), lens_k=(300, 77, 640), heads_k=2, sharp=4.0
)


@pytest.mark.parametrize("window", ("none", "causal", "left", "both"))
@pytest.mark.parametrize("case", (FAST, FAST_PACKED, replace(FAST, lens_q=(70,), lens_k=(90,), align="upper_left")))
def test_fast_tiles(kernel, case, window):
    """More blocks than stages, and one; offsets that move; scales of all that have one number for v."""
    for i, scales in enumerate((("128", "128", "head"), ("one", "head", "one"), ("none", "none", "none"))):
        variant = replace(case.variant, window=window, softcap=i == 1, dtype=("bfloat16", "float16")[i % 2])
        assert judge(kernel, replace(case, variant=variant, scales=scales, seed=i, sharp=(1.0, 4.0, 4.0)[i]))
        assert kernel.fast


@pytest.mark.parametrize("dims", ((208, 240), (64, 144)))
def test_fast_tiles_of_fewer_columns(kernel, dims):
    assert (
        judge(kernel, replace(FAST, variant=replace(FAST.variant, head_dim=dims[0], head_dim_v=dims[1])))
        and kernel.fast
    )


@pytest.mark.parametrize("changes", (
    {"head_dim": 128, "head_dim_v": 128}, {"head_dim": 192, "head_dim_v": 128}, {"scales": ("128", "128", "128")},
    {"scales": ("128", "128", "64")}, {"scales": ("128", "64", "head")}, {"accumulate": "safe"},
))  # fmt: skip
def test_other_calls_are_safe(kernel, changes):
    """In the bits of the call that asks for it."""
    dims = {n: changes[n] for n in ("head_dim", "head_dim_v") if n in changes}
    others = {n: x for n, x in changes.items() if n not in dims}
    case = replace(FAST, variant=replace(FAST.variant, **dims), lens_q=(70,), lens_k=(300,), **others)
    found = [run(kernel, make_fp8_inputs(replace(case, accumulate=how))) for how in (case.accumulate, "safe")]
    assert not kernel.fast
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("scale", (0.0, -0.5, torch.nan, 2.0**-140))
def test_fast_scales_of_values(kernel, scale):
    """That are not positive, or tiny: the result is that of safe sums."""
    inputs = make_fp8_inputs(replace(FAST, scales=("one", "one", "head")))
    inputs.options["v_scale"] = torch.full_like(inputs.options["v_scale"], scale)
    fast = run(kernel, inputs)
    assert kernel.fast
    inputs.options["fp8_accumulate"] = "safe"
    safe = run(kernel, inputs)
    assert torch.equal(fast["out"].isnan(), safe["out"].isnan())
    difference = (fast["out"] - safe["out"]).nan_to_num().norm()
    assert difference <= 0.05 * safe["out"].nan_to_num().norm()
    torch.testing.assert_close(fast["lse"], safe["lse"], atol=0.01, rtol=0)


def test_few_keys_are_not_cut(kernel):
    assert judge(kernel, replace(PIECES, lens_k=(900,)), 4, False)


WIDE = FP8Case(FP8Variant("bfloat16", 64, 64, "causal"), 3, (197,), (600,), heads_k=2, scales=("128",) * 3)


@pytest.mark.parametrize("window", ("none", "causal", "both"))
@pytest.mark.parametrize(("seq_q", "rows"), ((192, 192), (197, 256), (256, 256), (320, 192), (500, 256)))
def test_tiles_by_what_they_waste(kernel, seq_q, rows, window):
    """Of 256 rows where these waste no more than those of 192: more keys than their ring has stages, too."""
    for seq_k in (seq_q, 600):
        variant = replace(WIDE.variant, window=window)
        assert judge(kernel, replace(WIDE, variant=variant, lens_q=(seq_q,), lens_k=(seq_k,)), 1)
        assert kernel.rows == rows


@pytest.mark.parametrize(
    ("rows", "heads", "seq", "changed"),
    (
        (256, 16, 16384, {}),
        (256, 16, 16384, {"causal": True}),
        (256, 64, 4096, {}),
        (256, 512, 512, {}),
        (192, 512, 512, {"packed": True}),
        (192, 512, 512, {"shift": 6}),
        (192, 64, 1100, {}),  # 1,280 rows of a head in tiles of 256, 1,152 in tiles of 192
        # 7 waves of 256 rows or 9 of 192; the last waves are cut into pieces where all rows see all keys.
        (192, 13, 16384, {"causal": True}),
        (256, 13, 16384, {}),
    ),
)
def test_choice_of_tiles(kernel, rows, heads, seq, changed):
    """For a GPU's 132 multiprocessors."""
    call = ForwardParams(
        batch0=1, batch1=1, heads_q=heads, heads_k=heads, seq_q=seq, seq_k=seq, head_dim=64, head_dim_v=64,
        window_left=-1, window_right=0 if changed.get("causal") else -1, device=132,
        cu_seqlens_q=1 if changed.get("packed") else None,
    )  # fmt: skip
    scales = (Scales(shift=changed.get("shift", 7)) for _ in range(3))
    assert kernel.tile_rows(c.byref(Params(call, *scales, 0, 0)), 132) == rows


@pytest.mark.parametrize("part", range(4))
def test_generated(kernel, part):
    """In 3 CTAs: each has several tiles. Rows that TMA cannot load are left to others, whatever else they are."""
    taken = 0
    for case in generate_fp8(300 + part, 16, longest=260):
        aligned = case.layout != "unaligned" and case.variant.head_dim % 16 == 0
        some = case.scores > 0
        if some and judge(kernel, case):
            taken += 1
        else:
            assert not (aligned and some and case.variant.head_dim_v % 16 == 0), case
    assert taken >= 3


def test_nan_of_another_sequence(kernel):
    """Stays there: of a neighbour's rows in the same block of keys the values are cut, the scores are hidden."""
    case = FP8Case(FP8Variant(packed=True), 6, (70, 40, 130), (100, 30, 150), heads_k=2, scales=("64", "head", "64"))
    inputs = make_fp8_inputs(case)
    wanted = run(kernel, inputs)
    inputs.judge().require(wanted)
    for x, (first, last) in ((inputs.q, (70, 110)), (inputs.k, (100, 130)), (inputs.v, (100, 130))):
        x.view(torch.uint8)[first:last] = 0x7F
    found = run(kernel, inputs, 1)
    for rows in (slice(0, 70), slice(110, 240)):
        assert torch.equal(found["out"][rows], wanted["out"][rows])
        assert torch.equal(found["lse"][:, rows], wanted["lse"][:, rows])
    assert found["out"][70:110].isnan().all()


FAULTS = {
    "V turned over a tile that is being read": ("fp8/transpose.cuh", "if (part == 0) ptx::mbarrier_sleep(address(&shared.turned_empty[stage]), phase ^ 1);", ""),
    "V in another order than P": ("fp8/softmax.cuh", "s[e], s[e + 1], s[e + 4], s[e + 5]", "s[e], s[e + 1], s[e + 2], s[e + 3]"),
    "a turn that is not passed on": ("fp8/mainloop.cuh", "      pass_turn();\n      take_turn();", "      take_turn();"),
    "offsets that stay behind": ("fp8/softmax.cuh", "const bool grew = ", "const bool grew = before == kUninitializedMax && "),
    "Q released before all have read the tile": ("fp8/kernel.cuh", "4 + (w == 0 ? 1 + C::kTransposers : 0)", "4"),
    "the scale of another block": ("fp8/load.cuh", "scale_of(a.v_scale, v, key)", "scale_of(a.v_scale, v, key + 128)"),
    "fewer bytes than arrive": ("fp8/load.cuh", "(full, sizeof(shared.v[0][0]));", "(full, sizeof(shared.v[0][0]) / 2);"),
    "pieces added before all are there": ("fp8/split_tail.cuh", "before != last - first", "before + 1 != last - first"),
    "the weight of another row": ("fp8/split_tail.cuh", "fmaf(weight[1], y.z,", "fmaf(weight[0], y.z,"),
    "a run that ends too early": ("fp8/split_tail.cuh", "end(run_begin(tail, blockIdx.x + 1))", "end(run_begin(tail, blockIdx.x + 1) - 1)"),
    "two pieces in one place": ("fp8/split_tail.cuh", "(cta * 2 + begins)", "(cta * 2)"),
    "an output that does not follow its offsets": ("fp8/mainloop.cuh", "        if (kLate && chunk == 0) follow_offsets();\n", ""),
    "ones in another row": ("fp8/transpose.cuh", "unit < kRow ?", "unit / kRow == 1 ?"),
    "ones that a later stage lacks": ("fp8/transpose.cuh", "i < C::kStages * 8 * kRow;", "i < 2 * 8 * kRow;"),
    "sums that do not follow their offsets": ("fp8/softmax.cuh", "    rows.sum[half] *= alpha[half];\n", ""),
    "sums in all lanes of a quad": ("fp8/mainloop.cuh", "rows.sum[0] += own[kChunk / 2],", "rows.sum[0] += __shfl_sync(~0u, own[kChunk / 2], lane & ~3),"),
    "the sum of the row 8 before": ("fp8/mainloop.cuh", "rows.sum[1] += own[kChunk / 2 + 2];", "rows.sum[1] += own[kChunk / 2];"),
    "fast: sums of P that go on": ("fp8/mainloop.cuh", "    sum0 -= sum0, sum1 -= sum1;\n", ""),
    "fast: sums that are read before they are there": ("fp8/mainloop.cuh", "      ptx::wgmma_wait<1>();\n      end_values(head - 1);", "      end_values(head - 1);"),
    "fast: the release of another block": ("fp8/mainloop.cuh", "end_values(head - 1);", "end_values(head);"),
    "fast: an output that does not follow its offsets": ("fp8/mainloop.cuh", "      if (!kLate) follow_offsets();\n", ""),
    "fast: values without their scale": ("fp8/mainloop.cuh", "x *= v_scale;", "x *= 1.f;"),
    "fast: columns of V turned into those of the other product": ("fp8/mainloop.cuh", "v + 128 * kBlockK / 16", "v"),
    "fast: a part of V that arrives in the one before": ("fp8/load.cuh", "    ptx::mbarrier_sleep(ptx::shared_address(&shared.v_empty[stage][part]), free);\n", ""),
    "fast: a part of V that is not waited for": ("fp8/transpose.cuh", "address(&shared.v_full[v_stage][part])", "address(&shared.v_full[v_stage][0])"),
    "fast: Q over that of the tile before": ("fp8/load.cuh", "        ptx::mbarrier_sleep(address(&shared.q_empty[(tiles - 1) % C::kQStages][w]),\n                            (tiles - 1) / C::kQStages & 1);", "        ;"),
    "fast: a turn that is passed on twice": ("fp8/mainloop.cuh", "if (!passed) pass_turn();", "pass_turn();"),
    "fast: V turned when its first part is": ("fp8/transpose.cuh", "const bool last = part + 1 == C::kVParts;", "const bool last = part == 0;"),
    "turns of three where there are four": ("fp8/mainloop.cuh", "w + 1 == C::kConsumers ? 1 : w + 2", "w % 3 == 2 ? 1 : w + 2"),
}  # fmt: skip


def only(tiles: str) -> list[tuple[str, str, str]]:
    """Changes that leave the other tile shapes out, which a compiler is quicker with."""
    return [
        ("fp8/launch.cuh", f"return {others};", f"return launch({tiles}{{}});")
        for others in (
            "launch(Tiles64Wide{})",
            "fine ? launch(Tiles64Fine{}) : launch(Tiles64{})",
            "fine ? launch(Tiles128Fine{}) : launch(Tiles128{})",
            "fine ? launch(Tiles192Fine{}) : launch(Tiles192{})",
            "launch(Tiles256{})",
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    how: tuple[int, ...] = ()
    tiles = "Tiles64"
    variant = FP8Variant("bfloat16", 64, 64, "causal", packed=True)
    case = FP8Case(
        variant, 1, (100, 40, 200), (300, 77, 640), heads_k=2, scales=("128", "128", "128"), align="lower_right"
    )
    if FAULTS[fault][0] == "fp8/split_tail.cuh":
        case, how = PIECES, (5,)
    elif "fast" in fault:
        tiles, case = "Tiles256Fast", FAST_PACKED
    elif "kLate" in FAULTS[fault][1]:
        tiles = "Tiles128"
        case = replace(case, variant=replace(variant, head_dim=128, head_dim_v=128))
    elif "four" in fault:
        tiles, case = "Tiles64Wide", WIDE
    broken = loaded(tmp_path, FAULTS[fault], *only(tiles))
    assert is_found(lambda seed: judge(broken, replace(case, seed=seed), *how))
