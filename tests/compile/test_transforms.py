"""Every transform of torch.func over every backend, against the reference backend and against loops over samples.

On a GPU also in fp16.
"""

from __future__ import annotations

import pytest
import torch

import flashsci
from tests.support.everywhere import BACKENDS, DEVICE, GPU, backends

pytestmark = [pytest.mark.usefixtures("loaded"), pytest.mark.every(4)]
FUSED = tuple(b for b in BACKENDS if b not in ("reference", "sdpa"))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, *([torch.float16] if GPU else [])])
leaves = torch.utils._pytree.tree_leaves


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def attend(backend, *, lse=None, **options):
    """attention(q, k, v, bias) of a backend; with its lse, which SDPA has not, where ``lse``."""
    lse = backend != "sdpa" if lse is None else lse

    def call(q, k, v, bias=None):
        return flashsci.attention(q, k, v, bias=bias, causal=True, return_lse=lse, backend=backend, **options)

    return call


def scalar(backend, lse):
    call = attend(backend, lse=lse)

    def loss(*tensors):
        found = call(*tensors)
        out, row = found if lse else (found, None)
        total = out.float().sin().sum()
        return total if row is None else total + row.cos().sum()

    return loss


def close(found, wanted, what=None, half=False):
    """half: of inputs of 16 bits, whatever a result's own dtype."""
    found, wanted = leaves(found), leaves(wanted)
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape, (what, a.shape, b.shape)
        limit = 5e-2 if half else 2e-4
        torch.testing.assert_close(
            a.float(),
            b.float(),
            rtol=limit,
            atol=limit * max(1.0, float(b.abs().max())),
            msg=lambda m: f"{what}: {m}",
        )


def inputs(*lead, dtype=torch.float32, dim=16):
    """q, k, v, bias of a small grouped call."""
    return (
        draw(*lead, 2, 3, dim, dtype=dtype),
        draw(*lead, 1, 4, dim, dtype=dtype),
        draw(*lead, 1, 4, dim, dtype=dtype),
        draw(*lead, 2, 3, 4),
    )


func = torch.func
SCALAR = {
    "grad": lambda f: func.grad(f, argnums=(0, 1, 2, 3)),
    "grad_and_value": lambda f: func.grad_and_value(f, argnums=(0, 3)),
    "hvp, forward over reverse": lambda f: lambda *x: func.jvp(func.grad(f, argnums=(0, 1, 2, 3)), x, x)[1],
    "hvp, reverse over reverse": lambda f: lambda *x: func.vjp(func.grad(f, argnums=(0, 1, 2, 3)), *x)[1](x),
    "hessian": lambda f: lambda q, k, v, b: func.hessian(f, argnums=(0, 1))(q[:, :2], k[:, :2], v[:, :2], b[:, :2, :2]),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(f, argnums=0), argnums=1),
    "vmap of grad": lambda f: lambda *x: func.vmap(func.grad(f, argnums=(0, 1, 2, 3)))(*(y[None] for y in x)),
}
TENSORS = {
    "vjp": lambda f: lambda *x: func.vjp(f, *x)[1](torch.utils._pytree.tree_map(torch.sin, f(*x))),
    "jvp": lambda f: lambda *x: func.jvp(f, x, x),
    "jvp of one": lambda f: lambda q, k, v, b: func.jvp(lambda k: f(q, k, v, b), (k,), (k,)),
    "jvp of vjp": lambda f: (
        lambda *x: func.jvp(lambda *y: func.vjp(f, *y)[1](torch.utils._pytree.tree_map(torch.sin, f(*x))), x, x)
    ),
    "jacrev": lambda f: func.jacrev(f, argnums=(0, 1, 2, 3)),
    "jacrev in chunks": lambda f: func.jacrev(
        lambda *x: torch.utils._pytree.tree_map(lambda y: y.sum(-1), f(*x)), argnums=0, chunk_size=4
    ),
    "jacfwd": lambda f: func.jacfwd(f, argnums=(0, 3)),
    "linearize": lambda f: lambda *x: func.linearize(f, *x)[1](*x),
}


def wide(name):
    """Whether it runs the call once for each element of a result: no leading dim then."""
    return name in ("hessian", "jacrev of jacrev", "jacfwd", "jacrev", "jacrev in chunks")


@backends
@dtypes
@pytest.mark.parametrize("name", [*SCALAR, *TENSORS])
def test_transform(backend, dtype, name):
    """All that torch.func makes of one call, as of the reference's."""
    lead = () if wide(name) else (2,)
    x = inputs(*lead, dtype=dtype)
    lse = backend != "sdpa"
    if name in SCALAR:
        make = lambda b: SCALAR[name](scalar(b, lse))  # noqa: E731
    else:
        make = lambda b: TENSORS[name](attend(b, lse=lse))  # noqa: E731
    half = dtype == torch.float16
    close(make(backend)(*x), make("reference")(*(y.float() for y in x)), name, half)


def along(loss):
    return lambda q, *r: func.jvp(lambda q: loss(q, *r), (q,), (q,))[1]


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("name", ["jacfwd of jacfwd", "jacfwd of jvp"])
def test_forward_mode_over_forward_mode(backend, name):
    make = (lambda f: func.jacfwd(func.jacfwd(f))) if name == "jacfwd of jacfwd" else lambda f: func.jacfwd(along(f))
    x = inputs(dim=4)  # one call for each pair of elements of q
    close(make(scalar(backend, True))(*x), make(scalar("reference", True))(*x), name)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("name", ["jacfwd of jvp of jvp", "third"])
def test_what_the_formulas_do_not_reach_is_refused(backend, name):
    loss = scalar(backend, True)
    calls = {
        "jacfwd of jvp of jvp": func.jacfwd(along(along(loss))),
        "third": func.grad(lambda q, *r: func.grad(lambda q: func.grad(loss)(q, *r).square().sum())(q).square().sum()),
    }
    with pytest.raises(flashsci.BackendError, match="backend='reference'"):
        calls[name](*inputs())


def by_sample(call, dims, *tensors):
    """vmap as a loop."""
    size = next(x.shape[d] for x, d in zip(tensors, dims, strict=True) if d is not None)
    each = [
        call(*(x if d is None else x.select(d, n) for x, d in zip(tensors, dims, strict=True))) for n in range(size)
    ]
    if isinstance(each[0], tuple):
        return tuple(torch.stack(ys) for ys in zip(*each, strict=True))
    return torch.stack(each)


def mapped(rank, dims, dtype=torch.float32, size=2):
    """q, k, v and a bias of ``rank`` dims with one more dim where ``dims`` says."""
    base = ((2, 2, 2, 4, 16), (2, 2, 2, 4, 16), (2, 2, 2, 4, 16), (2, 1, 2, 4, 4))
    found = []
    for shape, dim, kind in zip(base, dims, (dtype, dtype, dtype, torch.float32), strict=True):
        shape = shape[5 - rank :]
        one = draw(size, *shape, dtype=kind)
        found.append(one[0] if dim is None else one.movedim(0, dim).contiguous())
    return found


@backends
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("dims", [0, 1, -1, "q", "k", "bias", "apart"])
def test_vmap_with_any_in_dims(backend, rank, dims):
    """Wherever the mapped dim lies in memory, innermost too, and whatever is shared."""
    chosen = {
        "q": (0, None, None, None),
        "k": (None, -1, None, None),
        "bias": (None, None, None, 1),
        "apart": (1, 0, -1, -2),
    }.get(dims, (dims,) * 4)
    tensors = mapped(rank, chosen)
    call = attend(backend)
    close(
        torch.vmap(call, in_dims=chosen)(*tensors),
        by_sample(call, chosen, *tensors),
        (rank, chosen),
    )


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (-1, -1, -1, -1), (None, 1, None, 1)])
@pytest.mark.parametrize("name", ["grad", "jvp", "hvp", "jacrev"])
def test_vmap_of_derivatives_with_any_in_dims(backend, dims, name):
    tensors = mapped(3, dims)
    loss = scalar(backend, True)
    call = {
        "grad": func.grad(loss, argnums=(0, 1, 2, 3)),
        "jvp": lambda *x: func.jvp(loss, x, x)[1],
        "hvp": lambda *x: func.jvp(func.grad(loss, argnums=(0, 3)), x, x)[1],
        "jacrev": lambda *x: func.jacrev(lambda *y: attend(backend)(*y)[0].sum((0, -1)), argnums=2)(*x),
    }[name]
    close(torch.vmap(call, in_dims=dims)(*tensors), by_sample(call, dims, *tensors), (name, dims))


@backends
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_nested_vmap(backend, rank):
    """Two and three levels, over ranks that leave room for another leading dim and ranks that do not."""
    call = attend(backend)
    levels = 3 if rank == 2 else 2
    sizes = (2, 3, 2)[:levels]
    q, k, v, bias = (draw(*sizes, *x.shape) for x in mapped(rank, (None,) * 4))
    for _ in range(levels):
        inner = call
        call = torch.vmap(call)
    one = attend(backend)
    flat = [x.flatten(0, levels - 1) for x in (q, k, v, bias)]
    wanted = by_sample(one, (0,) * 4, *flat)
    found = call(q, k, v, bias)
    close(
        tuple(x.flatten(0, levels - 1) for x in leaves(found)),
        leaves(wanted) and tuple(leaves(wanted)),
    )
    shared = torch.vmap(inner, in_dims=(0, None, 0, None), out_dims=-1)(q, k[0], v, bias[0])
    loop = [inner(q[n], k[0], v[n], bias[0]) for n in range(sizes[0])]
    stacked = [torch.stack(xs, -1) for xs in zip(*map(leaves, loop), strict=True)]
    close(leaves(shared), stacked)


@pytest.mark.parametrize("backend", FUSED)
def test_nested_vmap_of_a_gradient(backend):
    gradient = func.grad(scalar(backend, True), argnums=(0, 1, 2, 3))
    tensors = [draw(2, 2, *x.shape) for x in mapped(4, (None,) * 4)]
    found = torch.vmap(torch.vmap(gradient))(*tensors)
    wanted = by_sample(gradient, (0,) * 4, *(x.flatten(0, 1) for x in tensors))
    close([x.flatten(0, 1) for x in found], list(wanted))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_vmap_keeps_the_dropout_mask_of_a_sample(backend, rank):
    """What is dropped depends on the index in a sample's own batch: mapping must not move it."""
    seed = torch.tensor([3, 4], device=DEVICE)
    call = lambda *x: attend(backend, dropout_p=0.5, dropout_seed=seed)(*x)  # noqa: E731
    tensors = mapped(rank, (0,) * 4)
    close(torch.vmap(call)(*tensors), by_sample(call, (0,) * 4, *tensors))
    gradient = func.grad(lambda *x: call(*x)[0].sin().sum(), argnums=(0, 3))
    close(torch.vmap(gradient)(*tensors), by_sample(gradient, (0,) * 4, *tensors))


def test_vmap_draws_a_seed_for_each_sample():
    """randomness="different": mapped seeds."""
    tensors = mapped(3, (0, 0, 0, 0))
    call = lambda q, k, v, b: flashsci.attention(q, k, v, bias=b, dropout_p=0.5, backend="triton")  # noqa: E731
    tensors = [x[:1].expand(3, *x.shape[1:]) for x in tensors]
    found = torch.vmap(call, randomness="different")(*tensors)
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    found = torch.vmap(call, randomness="same")(*tensors)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "sdpa"])
@pytest.mark.parametrize("dims", [(0, 0, 0), (-1, None, 1)])
def test_vmap_of_packed_calls(backend, dims):
    """Packed tensors have no leading dims: samples run one by one."""
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    one = [draw(3, 5, 2, 16) for _ in range(3)]
    tensors = [x[0] if d is None else x.movedim(0, d) for x, d in zip(one, dims, strict=True)]

    def call(q, k, v):
        return flashsci.varlen_attention(q, k, v, offsets, return_lse=True, backend=backend)

    close(torch.vmap(call, in_dims=dims)(*tensors), by_sample(call, dims, *tensors))
    gradient = func.grad(lambda *x: call(*x)[0].sin().sum(), argnums=(0, 1, 2))
    close(torch.vmap(gradient, in_dims=dims)(*tensors), by_sample(gradient, dims, *tensors))
    rows = lambda *x: call(*x)[0].sum((1, 2))  # noqa: E731
    wanted = lambda *x: flashsci.varlen_attention(*x, offsets, backend="reference").sum((1, 2))  # noqa: E731
    sample = one_of(tensors, dims)
    close(func.jacrev(rows, argnums=(0, 1))(*sample), func.jacrev(wanted, argnums=(0, 1))(*sample))


def one_of(tensors, dims):
    return [x if d is None else x.select(d, 0) for x, d in zip(tensors, dims, strict=True)]


@pytest.mark.parametrize("backend", FUSED)
def test_vmap_of_key_weights(backend):
    if backend == "cuda":
        pytest.skip("it has no key_weight")
    for rank in (2, 3, 4):
        q, k, v, _ = mapped(rank, (0, 0, 0, None))
        weight = torch.rand(2, *k.shape[1:-1], device=DEVICE)

        def call(q, k, v, w):
            return flashsci.attention(q, k, v, key_weight=w, return_lse=True, backend=backend)

        gradient = func.grad(lambda *x: call(*x)[0].sin().sum(), argnums=(0, 3))
        for function in (call, gradient):
            close(
                torch.vmap(function)(q, k, v, weight),
                by_sample(function, (0,) * 4, q, k, v, weight),
            )


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("layout", ["expanded", "strided", "sliced", "transposed"])
def test_attention_backward_takes_lse_and_out_of_any_strides(backend, layout):
    """As transforms, ring attention and slices of larger results give them."""
    q, k, v, _ = mapped(4, (None,) * 4)
    if layout == "expanded":
        q, k, v = (x[:1].expand(2, *x.shape[1:]) for x in (q, k, v))
    out, lse = attend(backend)(q, k, v)
    dout = draw(*out.shape, dtype=out.dtype)
    wanted = flashsci.attention_backward(dout, q, k, v, out, lse, causal=True, backend=backend)

    def odd(x):
        if layout == "expanded":
            return x[:1].expand_as(x)
        if layout == "strided":
            return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]
        if layout == "sliced":
            return torch.cat([torch.full_like(x, float("nan")), x], -1)[..., x.shape[-1] :]
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    if layout == "expanded":
        dout = dout[:1].expand_as(dout)
        wanted = flashsci.attention_backward(dout.contiguous(), q, k, v, out, lse, causal=True, backend=backend)
    found = flashsci.attention_backward(odd(dout), q, k, v, odd(out), odd(lse), causal=True, backend=backend)
    close(found[:3], wanted[:3])
