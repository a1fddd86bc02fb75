"""The sm90 kernel of triangle attention, run on the host (emulated.py) from the launcher to the stores, judged as every backend.
What a GPU's barriers, copies and products do is emulated; its speed and its registers are not."""

from __future__ import annotations

import ctypes as c

import pytest
import torch

from flashsci.testing import Inputs, Judge
from tests.cpu.emulator.emulated import build, emulate, is_found
from tools.kernels.launchers import BiasMask, ForwardParams, _pointer, _score_strides, _strides

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("triangle"), "triangle_forward")


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same with rows that start at multiples of 16 bytes, NaN between them."""
    wide = -(-x.shape[-1] // 8) * 8
    room = torch.full((*x.shape[:-1], wide), torch.nan, dtype=x.dtype)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def make(
    seq_q: int,
    seq_k: int | None = None,
    *,
    batch: tuple[int, int] = (1, 9),
    heads: tuple[int, int] = (1, 1),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = BF16,
    bias: torch.dtype = FP32,
    bias_batch: tuple[int, int] = (1, 1),
    mask: float | None = None,
    size: float = 1.0,
    seed: int = 0,
    scale: float | None = None,
) -> Inputs:
    """A call; mask: the part of the keys that each member hides."""
    made = torch.Generator().manual_seed(seed)
    seq_k = seq_q if seq_k is None else seq_k
    rows = ((seq_q, heads[0], dims[0]), (seq_k, heads[1], dims[0]), (seq_k, heads[1], dims[1]))
    # [.., S, H, D] in memory, as projections leave them.
    q, k, v = (torch.randn(*batch, *shape, generator=made).to(dtype).transpose(-2, -3) for shape in rows)
    scores = padded(torch.randn(*bias_batch, heads[0], seq_q, seq_k, generator=made).mul(2).to(bias))
    hidden = None
    if mask is not None:
        hidden = torch.rand(*batch, 1, 1, seq_k, generator=made) >= mask
    options = {} if scale is None else {"scale": scale}
    return Inputs((q * size).to(dtype), k, v, bias=scores, mask=hidden, options=options)


def run(
    library: c.CDLL, x: Inputs, seed: int = 0, other: bool = False, room: bool = True
) -> dict[str, torch.Tensor] | None:
    """out and lse; None where the kernel leaves the call to others. room: whether there is a workspace."""
    q, k, v, bias, mask = x.q, x.k, x.v, x.bias, x.mask
    out = torch.full((*q.shape[:2], q.shape[3], q.shape[2], v.shape[-1]), torch.nan, dtype=q.dtype).transpose(-2, -3)
    lse = torch.full(q.shape[:-1], torch.nan)
    bytes_ = None if mask is None else mask.to(torch.uint8)
    workspace = torch.full((bias.numel() * 2 + 4096,), torch.nan)
    given = BiasMask(
        _pointer(bias), _pointer(bytes_), _score_strides(bias), _score_strides(bytes_), int(bias.dtype == FP32)
    )
    params = ForwardParams(
        *map(_pointer, (q, k, v, out, lse)), None, None, *map(_strides, (q, k, v, out)), bias_mask=given,
        batch0=q.shape[0], batch1=q.shape[1], heads_q=q.shape[2], heads_k=k.shape[2], seq_q=q.shape[3], seq_k=k.shape[3],
        max_seqlen_q=-1, head_dim=q.shape[-1], head_dim_v=v.shape[-1], scale=x.options.get("scale") or q.shape[-1] ** -0.5,
        window_left=-1, window_right=-1, workspace=_pointer(workspace) if room else None,
    )  # fmt: skip
    call = library.emulate_other if other else library.emulate
    taken = emulate(call, params, q.dtype == BF16, seed)
    return {"out": out, "lse": lse} if taken else None


def judge(library: c.CDLL, x: Inputs, seed: int = 0) -> dict[str, torch.Tensor]:
    found = run(library, x, seed)
    assert found is not None
    Judge(x).require(found)
    return found


KINDS = [(d, b) for d in (BF16, FP16) for b in (d, FP32)]


@pytest.mark.parametrize("dtype, bias", KINDS)
@pytest.mark.parametrize("seq_q, seq_k", ((64, 64), (100, 150), (200, 390), (17, 500)))
def test_lengths(kernel, dtype, bias, seq_q, seq_k):
    """Tails of rows and keys; a bias that stays and one that does not (more than 384 keys)."""
    judge(kernel, make(seq_q, seq_k, dtype=dtype, bias=bias, heads=(2, 2)), seed=seq_q + seq_k // 10)


@pytest.mark.parametrize("dtype, bias", KINDS)
@pytest.mark.parametrize("seq_k, hidden", ((150, 0.3), (390, 0.97), (500, 1.0), (64, 1.0)))
def test_masks(kernel, dtype, bias, seq_k, hidden):
    """Blocks that a member's mask hides are skipped; members without any key have no output."""
    x = make(70, seq_k, dtype=dtype, bias=bias, mask=hidden, batch=(1, 10))
    x.mask[:, 3] = False
    x.mask[:, 4, ..., : seq_k // 2] = False
    x.mask[:, 5, ..., seq_k // 2 :] = False
    x.mask[:, 6] = True
    found = judge(kernel, x, seed=seq_k)
    assert (found["out"][:, 3] == 0).all() and (found["lse"][:, 3] == -torch.inf).all()


@pytest.mark.parametrize("dtype, bias", KINDS)
@pytest.mark.parametrize("number", (-torch.inf, -1e9, -1e4, "lowest", 50.0))
def test_masks_in_the_bias(kernel, dtype, bias, number):
    """Some keys, all keys of some rows, the first keys of others."""
    if number == "lowest":
        number = torch.finfo(bias).min
    if bias == FP16 and abs(number) > 65504 and number != -torch.inf:
        pytest.skip("no such number")
    x = make(130, 200, dtype=dtype, bias=bias, mask=0.1)
    x.bias[..., torch.rand(200) < 0.4] = number
    x.bias[:, :, 0, 5:40] = number
    x.bias[:, :, 0, 60:100, :130] = number
    judge(kernel, x, seed=3)


@pytest.mark.parametrize("dtype, bias", KINDS)
@pytest.mark.parametrize("size", (30.0, 1000.0))
def test_large_scores(kernel, dtype, bias, size):
    """Maxima that grow from block to block."""
    x = make(70, 330, dtype=dtype, bias=bias, size=size)
    judge(kernel, x, seed=1)
    x.k.mul_(torch.linspace(0, 1, 330)[:, None].to(dtype))
    judge(kernel, x, seed=2)


@pytest.mark.parametrize("scale", (2e-4, 0.03, 0.69))
def test_scales(kernel, scale):
    for dtype, bias in KINDS:
        judge(kernel, make(40, 100, dtype=dtype, bias=bias, scale=scale, mask=0.5), seed=5)


@pytest.mark.parametrize(
    "shape",
    (
        {"dims": (8, 32)},
        {"dims": (24, 8)},
        {"dims": (16, 16), "heads": (4, 2)},
        {"batch": (9, 1), "heads": (3, 1)},
        {"batch": (9, 3), "bias_batch": (1, 3)},
        {"batch": (2, 13), "bias_batch": (2, 1)},
        {"batch": (8, 9)},
    ),
    ids=str,
)
def test_shapes(kernel, shape):
    """Head dims, grouped heads, members along either batch dimension, and a last group of fewer."""
    for dtype, bias in KINDS:
        judge(kernel, make(70, 90, dtype=dtype, bias=bias, mask=0.2, **shape), seed=7)


def test_layouts(kernel):
    """Contiguous heads; a bias of one row or one head; a mask of any strides, of each head."""
    x = make(70, 90, mask=0.2, heads=(2, 2))
    x.q, x.k, x.v = (y.contiguous() for y in (x.q, x.k, x.v))
    judge(kernel, x)
    x.bias = padded(x.bias[..., :1, :]).expand(-1, -1, -1, 70, -1)
    judge(kernel, x)
    x.bias = padded(x.bias[:, :, :1]).expand(-1, -1, 2, -1, -1)
    x.mask = (torch.rand(90, 1, 2, 9, 1) < 0.6).permute(4, 3, 2, 1, 0)
    judge(kernel, x)


@pytest.mark.parametrize("dtype, bias", KINDS)
@pytest.mark.parametrize("seq_q, seq_k", ((70, 90), (100, 390), (17, 500)))
def test_bias_of_a_linear(kernel, dtype, bias, seq_q, seq_k):
    """[.., Sq, Sk, H] with heads moved forward: copied, tails of rows among the poison of the workspace."""
    x = make(seq_q, seq_k, dtype=dtype, bias=bias, heads=(2, 2), mask=0.4)
    x.bias = x.bias.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    judge(kernel, x, seed=seq_k)
    x = make(40, 90, dtype=dtype, bias=bias, batch=(2, 9), bias_batch=(2, 1), heads=(3, 1), dims=(16, 32))
    x.bias = torch.cat([x.bias, x.bias], 2).permute(0, 1, 3, 4, 2).contiguous()[..., :3].permute(0, 1, 4, 2, 3)
    judge(kernel, x, seed=seq_q)
    x = make(70, 90, dtype=dtype, bias=bias, heads=(2, 2))
    x.bias = x.bias[:, :, :1].transpose(-1, -2).contiguous().transpose(-1, -2).expand(-1, -1, 2, -1, -1)
    judge(kernel, x)


@pytest.mark.parametrize("dtype, bias", KINDS)
@pytest.mark.parametrize("heads, seq_k", ((4, 150), (8, 70), (12, 40)))
def test_neighbouring_heads_of_a_bias(kernel, dtype, bias, heads, seq_k):
    """8 and 16 bytes of a key together, where addresses allow it."""
    for first in (0, 1):
        x = make(20, seq_k, dtype=dtype, bias=bias, heads=(heads, 2), mask=0.4)
        beside = torch.cat([x.bias, x.bias[:, :, :2]], 2).permute(0, 1, 3, 4, 2).contiguous()
        x.bias = beside[..., first : first + heads].permute(0, 1, 4, 2, 3)
        judge(kernel, x, seed=heads + first)


def test_the_same_twice(kernel):
    """Whatever the order of the threads: bit for bit."""
    for dtype, bias in KINDS:
        x = make(130, 450, dtype=dtype, bias=bias, mask=0.6)
        first = run(kernel, x, 0)
        for seed in range(1, 4):
            found = run(kernel, x, seed)
            assert torch.equal(found["out"], first["out"])
            assert torch.equal(found["lse"], first["lse"])


@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_other_form_of_16_bits(kernel, dtype):
    """Units of as many members and rows as the launcher does not choose."""
    for seq_k in (64, 330, 450):
        x = make(150, seq_k, dtype=dtype, bias=dtype, mask=0.6)
        Judge(x).require(run(kernel, x, seq_k, other=True))


def test_left_to_others(kernel):
    """Before anything is launched."""
    x = make(70, 90)
    assert run(kernel, make(70, 90, batch=(1, 4))) is None
    assert run(kernel, make(70, 90, bias_batch=(1, 9))) is None
    assert run(kernel, make(70, 90, dims=(40, 40))) is None
    for scale in (-0.1, 1e-5, 0.8):
        assert run(kernel, make(70, 90, scale=scale)) is None
    whole = x.bias
    x.bias = whole.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert run(kernel, x, room=False) is None  # keys that are no neighbours, and no room for a copy
    x.bias = whole[..., :1].expand_as(whole)
    assert run(kernel, x) is None  # one number for all keys
    x.bias = whole[..., 1:89]
    x.k, x.v = x.k[..., :88, :], x.v[..., :88, :]
    assert run(kernel, x) is None  # rows that TMA cannot load
    x = make(70, 90)
    x.mask = torch.ones(1, 9, 1, 70, 90, dtype=torch.bool)
    assert run(kernel, x) is None  # a mask of pairs


FAULTS = {
    "a bias that is never freed": ("triangle_fwd/mainloop.cuh", "release(shared.bias_empty[bias.stage]);\n    bias.next();", ";\n    bias.next();"),
    "K and V freed before they are read": ("triangle_fwd/mainloop.cuh", "wait_products();\n    // Not before: loads of q and bias may still be in flight until a product has read them.\n    release(used);", "release(used);\n    wait_products();"),
    "Q overwritten while it is read": ("triangle_fwd/load.cuh", "ptx::mbarrier_sleep(ptx::shared_address(&shared.q_empty[consumer]), phase ^ 1);", ""),
    "bias not waited for": ("triangle_fwd/load.cuh", "ptx::mbarrier_sleep(ptx::shared_address(&shared.bias_empty[ring.stage]), ring.phase ^ 1);", ""),
    "the bias of the tile before": ("triangle_fwd/load.cuh", "needs_bias = walk.leaves_tile();", "needs_bias = false;"),
    "a block of another turn": ("triangle_fwd/load.cuh", "ptx::mbarrier_sleep(ptx::shared_address(&shared.kv_empty[place][ring.stage]), ring.phase ^ 1);\n  const uint32_t k", "const uint32_t k"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    broken = build(tmp_path, "triangle_forward", FAULTS[fault])

    def judged(seed: int) -> None:
        x = make(200, 500 if seed % 2 else 300, bias=(FP32, BF16)[seed // 2 % 2], mask=0.5, seed=seed)
        judge(broken, x, seed)

    assert is_found(judged)
