"""What Hopper's backward takes of a bias or mask, and what it leaves to others: served right, or refused, never in between."""

import itertools
from dataclasses import replace

import pytest
import torch

from flashsci.errors import BackendError
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs, poisoned_memory
from tests.support.raw_calls import HALVES, WINDOWS, Findings, require

pytestmark = pytest.mark.gpu
CELLS = list(itertools.product(HALVES, (64, 96, 128)))  # wider head dims are left to sm80
SOME, ODD = (2, 4, 2, 333, 448), (2, 4, 2, 333, 441)  # batch, heads, heads of k, queries, keys
FP32 = {"bias_dtype": torch.float32}


@pytest.fixture
def findings(dtype):
    """Collects what is wrong; the test fails with all of it."""
    require("sm90", dtype)
    found = Findings("sm90")
    yield found
    found.done()


@pytest.fixture
def case(findings, dtype, dim):
    """A backward: sizes, shape of the bias, options; head dims are the test's."""

    def run(sizes, *shape, dims=None, **options):
        findings.backward_with_bias(sizes, HALVES[dtype], dims or (dim, dim), *shape, **options)

    return run


@pytest.mark.parametrize("dtype, dim", CELLS)
def test_bias_of_pairs_in_16_bits(case, dim):
    for sizes in [(1, 2, 2, 128, 128), (2, 4, 4, 512, 512), (1, 2, 1, 200, 336), (3, 6, 2, 300, 1000), (1, 2, 2, 1, 80), (2, 2, 2, 1500, 1408)]:  # fmt: skip
        for window, lower_right in WINDOWS[:5]:
            case(sizes, 1, 1, 1, 1, window=window, lower_right=lower_right, hidden=0.1)
    for dims in [(dim - 56, dim - 56), (dim - 8, dim), (dim, dim - 56)]:
        case(SOME, 1, 1, 1, 1, dims=dims, window=(50, 70))
        case(SOME, 0, 1, 1, 1, dims=dims)
    for need in (1, 2, 4, 9, 14):
        case(SOME, 1, 1, 1, 1, need=need)
    # Rows of the bias are longer than it: no gradient of such a bias, unless the batch shares it.
    case(ODD, 1, 1, 1, 1, pad=7, need=7)
    case(ODD, 0, 1, 1, 1, pad=7)
    case(ODD, 1, 1, 1, 1, refused=True)
    case(SOME, 1, 1, 1, 1, refused=True, mask=(1, 1, 333, 448))


@pytest.mark.parametrize("dtype, dim", CELLS)
def test_bias_of_pairs_in_fp32(case, dim):
    for sizes in [(1, 2, 2, 128, 128), (2, 4, 4, 512, 512), (1, 2, 1, 200, 332), (3, 6, 2, 300, 1000), (1, 2, 2, 2, 80), (2, 2, 2, 1500, 1412)]:  # fmt: skip
        for (window, lower_right), batch in itertools.product(WINDOWS[:5], (1, 0)):
            case(sizes, batch, 1, 1, 1, window=window, lower_right=lower_right, hidden=0.1, **FP32)
    sides = [(dim - 56, dim - 56), (dim - 8, dim), (dim, dim - 56), (dim - 40, dim - 40)]
    for dims, batch in itertools.product(sides, (0, 1)):
        case((2, 4, 2, 333, 444), batch, 1, 1, 1, dims=dims, window=(50, 70), **FP32)
    for need, batch in itertools.product((1, 2, 4, 9, 14), (1, 0)):
        case(SOME, batch, 1, 1, 1, need=need, **FP32)
    case(ODD, 1, 1, 1, 1, pad=3, need=7, **FP32)
    case(ODD, 0, 1, 1, 1, pad=3, **FP32)  # sm80's kernel sums
    case(ODD, 1, 1, 1, 1, pad=3, refused=True, **FP32)  # nothing for rows of its gradient
    case(ODD, 1, 1, 1, 1, refused=True, **FP32)


@pytest.mark.parametrize("bias", ["16 bits", "fp32"])
@pytest.mark.parametrize("dtype, dim", CELLS)
def test_every_broadcast_of_a_bias(findings, dtype, dim, bias):
    single = bias == "fp32"
    shapes = [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1)]
    shapes += [] if single else [(1, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 1)]
    sizes = [(3, 4, 2, 257, 268 if single else 264), (2, 6, 6, 640, 384)]
    sizes += [(40, 4, 4, 384, 384)] if single else []
    for shape, size in itertools.product(shapes, sizes):
        options = FP32 if single else {}
        findings.every_use_of_a_bias(size, HALVES[dtype], (dim, dim), *shape, **options)


@pytest.mark.parametrize("dtype, dim", CELLS)
def test_bias_and_mask_of_keys(case, dim):
    odd = (2, 4, 2, 200, 333)
    for shape in [(1, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 1)]:
        case(odd, *shape, **FP32)
        case(odd, *shape, hidden=0.2)
    for mask in [(2, 4, 1, 333), (2, 1, 1, 333), (1, 1, 1, 333)]:
        case(odd, mask=mask)
        case(odd, mask=mask, dims=(dim - 8, dim - 16), window=(-1, 0))


@pytest.mark.parametrize("dtype, dim", CELLS)
def test_mask_of_pairs(case, dim):
    """Alone, with a bias of keys; with an fp32 bias of pairs only where head dims are small."""
    for b, h, sq, sk, shape in [(2, 4, 333, 448, (1, 1)), (2, 4, 200, 336, (2, 1)), (2, 4, 64, 16, (2, 4)), (1, 2, 1500, 1424, (1, 2)), (3, 6, 257, 272, (1, 6))]:  # fmt: skip
        sizes = (b, h, h // 2, sq, sk)
        for window, lower_right in WINDOWS[:3]:
            options = {"mask": (*shape, sq, sk), "window": window, "lower_right": lower_right}
            case(sizes, **options)
            case(sizes, 1, 0, 0, 1, **options)
            for batch in {0, 1} if b > 1 else {1}:
                case(sizes, batch, 1, 1, 1, hidden=0.1, refused=dim > 64, **options, **FP32)
    case(ODD, mask=(2, 1, 333, 441), refused=True)


def test_held_to_hopper_a_bias_is_served_or_refused():
    """In strides that its kernels take, by them and nothing else; in others, BackendError, and never Triton's gradients."""
    require("sm90", "bf16")
    variant = Variant("bfloat16", 64, 64, bias="pair", bias_float=True, bias_grad=True)
    case = Case(variant=variant, seed=2, lead=(2,), heads_k=2, seq_q=80, seq_k=96, bias_shape=(2, 2, 80, 96))
    inputs = make_inputs(case, "cuda")
    with poisoned_memory():
        found = evaluate(inputs, "cuda:sm90", deterministic=False)
    Judge(inputs).require(found)
    odd = make_inputs(replace(case, layout="shifted"), "cuda")
    with pytest.raises(BackendError, match="of generation sm90 serves this call"):
        evaluate(odd, "cuda:sm90", deterministic=False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("heads", "rows", "dim", "generation"),
    ((192, 77, 64, "sm80"), (192, 197, 64, "sm90"), (16, 77, 64, "sm90"), (192, 77, 96, "sm90")),
)
def test_short_plain_calls_are_left_to_sm80(findings, heads, rows, dim, generation, dtype):
    shape = 1, heads, rows, dim
    q, k, v, dout = torch.randn(4, *shape, device="cuda", dtype=HALVES[dtype]).unbind()
    scalars = (-1, -1, dim**-0.5, 0.0, -1, -1, False, False)
    given = (q, k, v, None, None, None, None)
    out, lse = torch.ops.flashsci.cuda_forward(*given, *scalars, 0)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.ops.flashsci.cuda_backward(dout, None, *given, out, lse, *scalars, False, 0, 7)
        torch.cuda.synchronize()
    names = {event.name for event in profile.events() if "flashsci" in event.name}
    assert names and all(f"flashsci::{generation}::" in name for name in names)
