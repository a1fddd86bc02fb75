"""The kernels of the library for a bias or mask of odd lengths, by rehearsal: those of the next multiple of 64."""

import pytest
import torch

from flashsci.backends import cuda
from flashsci.backends.cuda import naming, rehearsal
from flashsci.backends.cuda.library import library_path
from flashsci.call import ops, row_pitch
from flashsci.call.ops import Saved, Scalars, Tensors, fake_forward
from tests.support.rehearsed import empty

pytestmark = pytest.mark.skipif(library_path() is None, reason="flashsci/_C.so was not built (no nvcc at install)")

PLAIN = Scalars(-1, -1, 0.125, 0.0, -1, -1, False, 0.0, "default", False)
ROWS, BIAS = ops.NEED_Q | ops.NEED_K | ops.NEED_V, ops.NEED_BIAS
SHAPES = {
    "shared by the batch": lambda n, s: (1, 8, s, s),
    "of one head": lambda n, s: (n, 1, s, s),
    "for every pair": lambda n, s: (n, 8, s, s),
    "shared by all": lambda n, s: (1, 1, s, s),
}


def made(shape, length, dim, batch=16, mask=False, dtype=torch.bfloat16):
    rows = (empty(batch, 8, length, dim, dtype=dtype) for _ in range(3))
    plane = empty(*SHAPES[shape](batch, length), dtype=torch.bool if mask else dtype)
    return Tensors(*rows, **{"mask" if mask else "bias": plane})


def named(tensors, need, scalars=PLAIN):
    return naming.attention("cuda", tensors, scalars, need, torch.device("cuda"), lambda hopper: "cuda")


@pytest.mark.parametrize("dim", (32, 64, 128))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", (383, 1023, 1025))
def test_a_16_bit_bias_of_any_length_has_the_kernels_of_the_next_multiple(shape, length, dim):
    whole = -(-length // 64) * 64
    for need in (0, ROWS, ROWS | BIAS):
        found, expected = (named(made(shape, s, dim), need) for s in (length, whole))
        assert found == expected, need
        assert found.kernel.startswith("sm90/") and (not need or found.gradient_kernel.startswith("sm90/"))


@pytest.mark.parametrize("shape", ("shared by all", "shared by the batch"))
def test_a_mask_of_any_length_has_the_kernels_of_the_next_multiple(shape):
    for need in (0, ROWS):
        found, expected = (named(made(shape, s, 64, mask=True), need) for s in (1023, 1024))
        assert found == expected
        assert found.kernel.startswith("sm90/")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", (64, 128, 192))
def test_without_the_copy_hoppers_forward_computes_it_up_to_128_head_dims(shape, dim):
    for dtype in (torch.bfloat16, torch.float32):
        tensors = made(shape, 1023, dim)
        tensors = tensors._replace(bias=tensors.bias.to(dtype))
        kernels = rehearsal.forward_kernels(tensors, PLAIN, rehearsal.H100)
        assert kernels and kernels[0].startswith("sm90/fwd/" if dim <= 128 else "sm80/")


def test_a_call_without_gradients_leaves_the_bias_as_it_is():
    ragged, whole = (made("for every pair", s, 64) for s in (1023, 1024))
    assert cuda.reads_ragged_bias(ragged, PLAIN, device=torch.device("cuda"))
    assert not cuda.reads_ragged_bias(made("for every pair", 1023, 192), PLAIN, device=torch.device("cuda"))
    for need in (0, ROWS, ROWS | BIAS):
        assert named(ragged, need) == named(whole, need)


def test_calls_that_are_left_as_they_are():
    def kept(tensors):
        return row_pitch.whole_rows(tensors) is tensors

    assert kept(made("for every pair", 1024, 64))
    assert kept(made("for every pair", 63, 64, batch=2)), "few scores"
    assert kept(made("for every pair", 1023, 64, mask=True)), "a mask that one head reads"
    assert not kept(made("for every pair", 1023, 64))
    assert not kept(made("of one head", 1023, 64, mask=True))
    shared = made("shared by all", 1023, 64)
    assert kept(shared._replace(bias=shared.bias.expand(16, 8, 1023, 1023))), "a copy would hold every repetition"
    assert kept(shared._replace(bias=shared.bias[:, :, :1])), "one row for all queries"
    assert not kept(shared._replace(bias=shared.bias.float()))
    singles = {n: getattr(shared, n).float() for n in ("q", "k", "v", "bias")}
    assert kept(shared._replace(**singles)), "32 bits"
    offsets = empty(3, dtype=torch.int32)
    assert kept(shared._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)), "packed"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", (-1, 0))
def test_the_gradient_of_the_op_is_as_its_fake_says(shape, window):
    """The op's own allocation: tiles of Hopper's kernel go to a pitch of 16 bytes only, and a window clears dense
    memory."""
    tensors = row_pitch.whole_rows(made(shape, 1023, 64))
    scalars = PLAIN._replace(window_right=window)
    saved = Saved(tensors, *fake_forward(tensors), scalars)
    dbias = ops.fake_backward(tensors, BIAS, scalars.windowed())[3]
    own, pitched = shape == "for every pair", dbias.stride(-2) == 1024
    assert dbias.shape == tensors.bias.shape and pitched == (own and window < 0)
    kernels = rehearsal.backward_kernels(saved.out, None, saved, ROWS | BIAS, rehearsal.H100)
    assert kernels[0].startswith("sm90/") == (pitched or not own)
