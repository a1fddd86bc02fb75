"""FlopCounterMode over every kind of call: torch's count of SDPA on equal shapes, and pairs inside windows alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flashsci
from flashsci.call.flops import formulas
from flashsci.call.problem import pairs_of
from tests.support.everywhere import BACKENDS, DEVICE
from tests.support.raw_op_calls import all_ops

pytestmark = pytest.mark.usefixtures("loaded")
FUSED = [b for b in BACKENDS if b not in ("reference", "sdpa")]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def draw(*shape, grad=True):
    return torch.randn(shape, device=DEVICE).to(HALF).requires_grad_(grad)


def counted(call, *inputs):
    """Of the forward and of the backward."""
    with FlopCounterMode(display=False) as counter:
        found = call(*inputs)
        out = found[0] if isinstance(found, tuple) else found
        forward = counter.get_total_flops()
        if out.requires_grad:
            out.float().sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("backend", FUSED)
def test_dense_calls_count_as_sdpa(backend):
    q, k, v = draw(2, 4, 8, 16), draw(2, 4, 12, 16), draw(2, 4, 12, 32)
    shapes = q.shape, k.shape, v.shape
    out = (2, 4, 8, 32)
    due = sdpa_flop_count(*shapes), sdpa_backward_flop_count(out, *shapes)
    for _ in range(3):
        flashsci.attention(q, k, v, backend=backend).float().sum().backward()
        assert counted(lambda *x: flashsci.attention(*x, backend=backend), q, k, v) == due


def test_residual_calls_count_as_sdpa():
    q, k, v = draw(2, 4, 8, 16), draw(2, 4, 12, 16), draw(2, 4, 12, 16)
    due = sdpa_flop_count(q.shape, k.shape, v.shape), sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)
    assert counted(lambda *x: flashsci.residual_attention(*x, backend="triton"), q, k, v) == due


@pytest.mark.parametrize("backend", ["reference", *FUSED])
def test_packed_calls_count_their_sequences(backend):
    q, k, v = draw(7, 4, 16), draw(7, 2, 16), draw(7, 2, 16)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE)
    pairs = 4 * (3 * 3 + 4 * 4)
    call = lambda *x: flashsci.varlen_attention(*x, offsets, backend=backend)  # noqa: E731
    assert counted(call, q, k, v) == (2 * pairs * 2 * 16, 2 * pairs * 5 * 16)


def test_paged_calls_count_what_is_used():
    q = draw(2, 4, 16, grad=False)
    cache = draw(3, 8, 2, 16, grad=False)
    table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=DEVICE)
    used = torch.tensor([9, 5], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)

    def call(backend):
        return flashsci.paged_attention(
            q, cache, cache, block_table=table, seqused_k=used, cu_seqlens_q=offsets, backend=backend
        )

    for backend in ("reference", "triton"):
        call(backend)
        for _ in range(2):
            assert counted(lambda b=backend: call(b))[0] == 2 * 4 * (9 + 5) * 2 * 16


def test_the_second_order_is_counted():
    q, k, v = draw(1, 2, 8, 16), draw(1, 2, 8, 16), draw(1, 2, 8, 16)
    with FlopCounterMode(display=False) as counter:
        out = flashsci.attention(q, k, v, backend="triton")
        (force,) = torch.autograd.grad(out.float().sin().sum(), q, create_graph=True)
        first = counter.get_total_flops()
        force.float().square().sum().backward()
    pairs = 2 * 8 * 8
    assert counter.get_total_flops() - first == 2 * pairs * 12 * 16 + 2 * pairs * 5 * 16


@pytest.mark.parametrize("dim", [16, 128])
def test_directions_share_the_products_of_the_call(dim):
    """Two products over D and two over Dv for each, and those of a forward once; each time in wider heads."""
    q, k, v = (draw(1, 2, 8, dim, grad=False) for _ in range(3))
    ways = draw(5, 1, 2, 8, dim, grad=False)
    along = lambda t: torch.func.jvp(lambda q: flashsci.attention(q, k, v, backend="triton"), (q,), (t,))  # noqa: E731
    flashsci.attention(q, k, v, backend="triton")
    with FlopCounterMode(display=False) as counter:
        torch.vmap(along, out_dims=(None, 0))(ways)
    pairs, forward = 2 * 8 * 8, 2
    due = forward + (2 + 5 * 4 if dim == 16 else 5 * 6)
    assert counter.get_total_flops() == 2 * pairs * due * dim


@pytest.mark.parametrize("dim", [16, 128])
def test_cotangents_share_a_product_of_the_call(dim):
    """Two products over D and two over Dv for each, and the scores once; each time in wider heads."""
    q, k, v = (draw(1, 2, 80, dim, grad=False) for _ in range(3))
    ways = draw(5, 1, 2, 80, dim, grad=False)
    pull = torch.func.vjp(lambda *x: flashsci.attention(*x, backend="triton"), q, k, v)[1]
    with FlopCounterMode(display=False) as counter:
        torch.vmap(pull)(ways)
    pairs = 2 * 80 * 80
    assert counter.get_total_flops() == 2 * pairs * (1 + 5 * 4 if dim == 16 else 5 * 5) * dim


@pytest.mark.parametrize("dim", [16, 128])
def test_hessian_vector_products_share_two_products_of_the_call(dim):
    """Ten for each direction, and the scores and dO V^T once; beside them are the forward's tangents, and the first call's products."""
    q, k, v = (draw(1, 2, 80, dim, grad=False) for _ in range(3))
    ways = draw(5, 1, 2, 80, dim, grad=False)
    pull = lambda q: torch.func.vjp(lambda q: flashsci.attention(q, k, v, backend="triton"), q)[1](v)[0]  # noqa: E731
    pull(q)
    with FlopCounterMode(display=False) as counter:
        torch.vmap(lambda t: torch.func.jvp(pull, (q,), (t,))[1])(ways)
    pairs = 2 * 80 * 80
    due = 2 + 5 + (2 + 5 * 4 + 2 + 5 * 10 if dim == 16 else 5 * (6 + 12))
    assert counter.get_total_flops() == 2 * pairs * due * dim


def seen(rows, keys, left, right, lower_right):
    """A bool mask of the pairs inside a window."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    offset = j - i - (keys - rows if lower_right else 0)
    return ((left < 0) | (offset >= -left)) & ((right < 0) | (offset <= right))


def test_pairs_of_windows():
    for rows, keys, left, right, lower in itertools.product(
        (0, 1, 3, 8), (0, 1, 5, 9), (-1, 0, 2, 20), (-1, 0, 3), (False, True)
    ):
        due = int(seen(rows, keys, left, right, lower).sum())
        assert pairs_of(rows, keys, left, right, lower) == due, (rows, keys, left, right, lower)


WINDOWS = [dict(causal=True), dict(window=(3, 2)), dict(window=(4, 0), align="lower_right"), dict(window=(-1, 1))]


@pytest.mark.parametrize("options", WINDOWS, ids=str)
@pytest.mark.parametrize("backend", FUSED)
def test_dense_calls_count_the_pairs_inside_windows(backend, options):
    q, k, v = draw(2, 4, 8, 16), draw(2, 2, 12, 16), draw(2, 2, 12, 32)
    left, right = options.get("window", (-1, 0))
    pairs = 2 * 4 * int(seen(8, 12, left, right, options.get("align") == "lower_right").sum())
    found = counted(lambda *x: flashsci.attention(*x, backend=backend, **options), q, k, v)
    assert found == (2 * pairs * (16 + 32), 2 * pairs * (3 * 16 + 2 * 32))


@pytest.mark.parametrize("backend", ["reference", *FUSED])
def test_packed_calls_count_the_pairs_inside_windows(backend):
    q, k, v = draw(7, 4, 16), draw(9, 2, 16), draw(9, 2, 16)
    of_q, of_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 3, 7], [0, 4, 9]))
    pairs = 4 * int(seen(3, 4, 2, 0, True).sum() + seen(4, 5, 2, 0, True).sum())
    call = lambda *x: flashsci.varlen_attention(  # noqa: E731
        *x, of_q, of_k, window=(2, 0), align="lower_right", backend=backend
    )
    assert counted(call, q, k, v)[0] == 2 * pairs * 2 * 16


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_paged_calls_count_the_pairs_inside_windows(backend):
    q, cache = draw(5, 4, 16, grad=False), draw(3, 8, 2, 16, grad=False)
    table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=DEVICE)
    used = torch.tensor([9, 5], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32, device=DEVICE)
    given = dict(block_table=table, seqused_k=used, cu_seqlens_q=offsets, max_seqlen_q=3, window=(4, 0))
    pairs = 4 * int(seen(3, 9, 4, 0, True).sum() + seen(2, 5, 4, 0, True).sum())
    call = lambda: flashsci.paged_attention(q, cache, cache, backend=backend, **given)  # noqa: E731
    assert counted(call)[0] == 2 * pairs * 2 * 16


def test_masks_are_counted_in_full():
    q, k, v = draw(1, 2, 8, 16), draw(1, 2, 12, 16), draw(1, 2, 12, 16)
    mask = torch.zeros(8, 12, dtype=torch.bool, device=DEVICE)
    mask[:, :3] = True
    found = counted(lambda *x: flashsci.attention(*x, mask=mask, backend="triton"), q, k, v)
    assert found[0] == 2 * 2 * 8 * 12 * 2 * 16


def test_every_op_that_multiplies_has_a_formula():
    """An op that is added shows. Without one are ops that no product is in, ops composed of counted ones, and those of the
    library that run below a counted op, where no mode sees them."""
    all_ops()  # defines and loads them
    without = {"build_info", "sees_torch_cuda", "keep_mask", "refuse", "draw_seed", "triton_mask_tiles"}
    ends = ("_kernels", "_write_kv_cache")
    below = {"cuda_fp8_forward", "cuda_prepared_forward", "cuda_prepared_backward"}
    names = {n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith("flashsci::")}
    names = {n.partition(".")[0] for n in names if not n.startswith(("flashsci::opaque", "opaque_", "recorded_"))}
    known = {op._qualified_op_name.partition("::")[2] for op in formulas()}
    assert {n for n in names - without - below - known if not n.endswith(ends)} == set()
    assert {"triton_forward", "ring_backward", "triangle_forward"} <= known


@pytest.mark.parametrize(
    ("asked", "products"),
    [(("entropy", "largest_score"), 1), (("key_sum",), 1), (("entropy", "key_sum"), 2), (("entropy", "top_k"), 2)],
)
def test_reductions_of_a_map(asked, products):
    """A product over the head dim for numbers of rows, one for those of keys and one for the largest, inside the window."""
    q, k, lse = torch.randn(2, 4, 20, 16), torch.randn(2, 2, 20, 16), torch.randn(2, 4, 20) + 9
    with flashsci.use_backend("triton"), FlopCounterMode(display=False) as counter:
        flashsci.attention_statistics(
            q, k, lse, causal=True, **{name: 3 if name == "top_k" else True for name in asked}
        )
    assert counter.get_total_flops() == 2 * products * 16 * (2 * 4 * 20 * 21 // 2)


@pytest.mark.parametrize(
    ("given", "over_dim", "over_values"),
    [
        ("", 1, 1),
        ("q_jacobian", 1 + 5, 2 + 5),
        ("v_jacobian", 1, 1 + 5),
        ("q_jacobian k_jacobian", 1 + 5 * 3, 2 + 5),
        ("k_jacobian v_jacobian", 1 + 5, 2 + 5 * 3),
        ("k_laplacian", 2, 2),
        ("v_laplacian", 1, 2),
        ("q_jacobian k_jacobian v_jacobian q_laplacian k_laplacian v_laplacian", 3 + 5 * 3, 3 + 5 * 3),
    ],
)
def test_a_forward_laplacian_counts_the_products_of_what_is_given(given, over_dim, over_values):
    """Five directions. A product is over the head dim for scores and their derivatives, else over that of the values."""
    rows = {
        "q": draw(2, 4, 8, 16, grad=False),
        "k": draw(2, 2, 12, 16, grad=False),
        "v": draw(2, 2, 12, 32, grad=False),
    }
    shape = lambda name: (*[5] * name.endswith("jacobian"), *rows[name[0]].shape)  # noqa: E731
    others = {name: draw(*shape(name), grad=False) for name in given.split()}
    with flashsci.use_backend("triton"), FlopCounterMode(display=False) as counter:
        flashsci.forward_laplacian(**rows, **others)
    assert counter.get_total_flops() == 2 * (2 * 4 * 8 * 12) * (over_dim * 16 + over_values * 32)
