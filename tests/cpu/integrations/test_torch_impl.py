"""flashsci as torch's flash attention: the operators' schemas, strides and meta kernels, values and gradients through torch's own
autograd, varlen_attn and compiler. Here they are entered for the CPU, which has no kernels of these names; on a GPU
tests/gpu/test_torch_sdpa_impl.py goes through scaled_dot_product_attention."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn

import flashsci
from flashsci.integrations import torch as integration
from flashsci.testing import Inputs, Judge

aten = torch.ops.aten
NAMES = sorted(integration.KERNELS)
VARLEN = sorted(integration.VARLEN_KERNELS)
PRESENT = [name for name in NAMES if hasattr(aten, name)]
LAYOUTS = {
    "bhsd": lambda b, h, s, d: torch.randn(b, h, s, d),
    "bshd": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "packed projection": lambda b, h, s, d: torch.randn(b, s, 3, h, d)[:, :, 1].transpose(1, 2),
    "expanded": lambda b, h, s, d: torch.randn(1, h, s, d).expand(b, h, s, d),
    "strided": lambda b, h, s, d: torch.randn(b, h, s, 2 * d)[..., ::2],
}


@pytest.fixture
def on_cpu():
    """The operators entered for the CPU."""
    replaced = integration.Replaced("CPU")
    yield
    replaced.remove()


def flash(q, k, v, causal=False, **options):
    return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, **options)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "reference"])
def test_inside_use_backend(on_cpu, backend):
    """A program that asks for sdpa comes here through torch's function: what has no lse cannot serve the operator."""
    q = torch.randn(1, 2, 16, 8)
    due = flash(q, q, q)[:2]
    with flashsci.use_backend(backend):
        for ours, theirs in zip(flash(q, q, q)[:2], due, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_schemas(name):
    """Names, kinds and defaults of this torch's operators; what an older one lacks has a default."""
    ours = inspect.signature(integration.KERNELS[name]).parameters
    if not hasattr(aten, name):
        pytest.skip(f"torch {torch.__version__} has no aten::{name}")
    arguments = getattr(aten, name).default._schema.arguments
    for theirs in arguments:
        mine = ours[theirs.name]
        assert (mine.kind is mine.KEYWORD_ONLY) == theirs.kwarg_only, theirs.name
        assert (mine.default is mine.empty) == (not theirs.has_default_value()), theirs.name
        assert mine.default is mine.empty or mine.default == theirs.default_value, theirs.name
    known = [x.name for x in arguments]
    assert [n for n in ours if n in known] == known
    assert {n for n in ours if n not in known} <= {"block_table", "num_splits"}


def test_every_operator_of_the_flash_path_is_replaced():
    """Those that torch's own replacements of these kernels replace, but for 8-bit inputs; a release that adds one shows."""
    from torch.nn.attention import _fa4

    theirs = set(re.findall(r'\.impl\(\s*"(\w+)"', inspect.getsource(_fa4)))
    assert {"_flash_attention_forward", "_scaled_dot_product_flash_attention"} <= theirs
    assert theirs <= set(NAMES)


@pytest.mark.parametrize("name", VARLEN)
def test_schemas_of_varlen(name):
    """Every argument of this torch's operators has its name here; an older one lacks some."""
    ours = inspect.signature(integration.VARLEN_KERNELS[name]).parameters
    arguments = getattr(torch.ops.torch_attn, name).default._schema.arguments
    assert {theirs.name for theirs in arguments} <= set(ours)
    missing = set(ours) - {theirs.name for theirs in arguments}
    assert all(ours[name].default is not ours[name].empty for name in missing)


def test_no_operator_of_varlen_goes_elsewhere():
    """An operator of torch_attn that calls another kernel than the flash operators is replaced; a release that adds one
    shows."""
    sources = {name: inspect.getsource(op._init_fn) for name, op in vars(varlen).items() if hasattr(op, "_init_fn")}
    elsewhere = {name for name, text in sources.items() if re.search(r"aten\._(?!flash_attention)\w+", text)}
    assert "_varlen_attn" in sources and elsewhere <= set(VARLEN)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_results_are_what_the_meta_kernels_promise(on_cpu, layout, heads):
    """Shapes, strides and dtypes, which compilers build on: out keeps q's layout, gradients those of q, k, v."""
    q, k, v = (LAYOUTS[layout](2, h, 6, 8).bfloat16() for h in (heads[0], heads[1], heads[1]))
    if layout in ("expanded", "strided"):  # the cast made them dense
        q, k, v = (LAYOUTS[layout](2, h, 6, 8) for h in (heads[0], heads[1], heads[1]))

    def run(q, k, v):
        first = flash(q, k, v, True)
        out, lse, _, _, max_q, max_k, rng, unused, _ = first
        more = aten._scaled_dot_product_flash_attention_backward(
            torch.ones_like(out),
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            max_q,
            max_k,
            0.0,
            True,
            rng,
            unused,
        )
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        second = aten._flash_attention_forward(*rows, None, None, 6, 6, 0.0, True, False)
        last = aten._flash_attention_backward(
            torch.ones_like(second[0]), *rows, second[0], second[1], None, None, 6, 6, 0.0, True, *second[2:4]
        )
        return [*first, *more, *second, *last]

    ours, promised = run(q, k, v), run(*(x.to("meta") for x in (q, k, v)))
    assert len(ours) == len(promised)
    for place, (found, due) in enumerate(zip(ours, promised, strict=True)):
        if isinstance(due, torch.Tensor):
            about = [(x.shape, x.stride(), x.dtype) for x in (found, due)]
            assert about[0] == about[1], place
        else:
            assert found == due, place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads, lengths, causal, scale",
    [
        ((4, 4), (33, 33), True, None),
        ((4, 2), (33, 33), False, 0.3),
        ((4, 1), (20, 33), False, None),
        ((4, 2), (20, 33), True, None),  # lower right, as these operators have it
    ],
)
def test_values_and_gradients(on_cpu, dtype, heads, lengths, causal, scale):
    """Through torch's autograd, judged against fp64."""
    shapes = zip((heads[0], heads[1], heads[1]), (lengths[0], lengths[1], lengths[1]), strict=True)
    q, k, v = (torch.randn(2, h, s, 16, dtype=dtype) for h, s in shapes)
    dout = torch.randn_like(q)
    options = dict(causal=causal, scale=scale, align="lower_right")
    judge = Judge(Inputs(q, k, v, dout=dout, options=options), fused=False)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, *_ = flash(*leaves, causal, scale=scale)
    gradients = torch.autograd.grad(out, leaves, dout)
    names = ("out", "lse", "dq", "dk", "dv")
    judge.require(dict(zip(names, (out.detach(), lse.detach(), *gradients), strict=True)))


def test_dropout_is_the_same_in_forward_and_backward(on_cpu):
    q, k, v = (torch.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3))
    dout = torch.randn(2, 3, 9, 8)
    torch.manual_seed(1)
    out, _, _, _, _, _, rng_state, *_ = flash(q, k, v, dropout_p=0.4)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert rng_state.dtype == torch.uint64
    due = flashsci.attention(q, k, v, dropout_p=0.4, dropout_seed=rng_state.view(torch.int64))
    torch.testing.assert_close(out, due)
    for found, expected in zip(gradients, torch.autograd.grad(due, (q, k, v), dout), strict=True):
        torch.testing.assert_close(found, expected)
    torch.manual_seed(1)
    assert torch.equal(flash(q, k, v, dropout_p=0.4)[0], out)
    assert not torch.equal(flash(q, k, v, dropout_p=0.4)[0], out)


LENGTHS_Q, LENGTHS_K = [3, 1, 6], [4, 5, 6]


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 1)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_varlen_attn(on_cpu, window, heads):
    """torch.nn.attention.varlen, forward and backward, against each sequence in a call of its own."""
    q = torch.randn(sum(LENGTHS_Q), heads[0], 8, requires_grad=True)
    k, v = (torch.randn(sum(LENGTHS_K), heads[1], 8, requires_grad=True) for _ in range(2))
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    options = {"enable_gqa": True} if heads[0] != heads[1] else {}
    if "window_size" not in inspect.signature(varlen_attn).parameters or (
        options and "enable_gqa" not in inspect.signature(varlen_attn).parameters
    ):
        pytest.skip(f"varlen_attn of torch {torch.__version__} has no windows or grouped heads")
    out = varlen_attn(q, k, v, cu_q, cu_k, 6, 6, window_size=window, scale=0.4, **options)
    pieces = [
        flashsci.attention(*(x.transpose(0, 1).double() for x in qkv), window=window, align="lower_right", scale=0.4)
        for qkv in zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K), strict=True)
    ]
    due = torch.cat([x.transpose(0, 1) for x in pieces])
    torch.testing.assert_close(out, due.float())
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(due, (q, k, v), dout.double())
    for found, gradient in zip(torch.autograd.grad(out, (q, k, v), dout), expected, strict=True):
        torch.testing.assert_close(found, gradient)


def test_varlen_attn_arrives_where_torch_prefers_cudnn(on_cpu, monkeypatch):
    """torch 2.14 sends packed calls without a window to cuDNN on Hopper, below the operator that is replaced."""
    for name in ("_can_use_cudnn", "_should_use_cudnn"):
        monkeypatch.setattr(varlen, name, lambda *a: pytest.fail("torch chose"), raising=False)
    q, k, v = torch.randn(3, 300, 2, 8).requires_grad_().unbind(0)
    cu = offsets([130, 170])
    out = varlen_attn(q, k, v, cu, cu, 170, 170)
    torch.testing.assert_close(out, flashsci.varlen_attention(q, k, v, cu))
    torch.autograd.grad(out.sum(), (q, k, v))


@pytest.mark.skipif("_flash_attention_forward_no_dropout_inplace" not in PRESENT, reason="no such op")
def test_varlen_attn_out(on_cpu):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

    q, k, v = torch.randn(3, 10, 2, 8).unbind(0)
    cu, out = offsets([4, 6]), torch.full((10, 2, 8), float("nan"))
    due, lse = varlen_attn(q, k, v, cu, cu, 6, 6, return_aux=AuxRequest(lse=True))
    found = varlen_attn_out(out, q, k, v, cu, cu, 6, 6, return_aux=AuxRequest(lse=True))
    assert torch.equal(out, due) and torch.equal(found[0], due) and torch.equal(found[1], lse)
    torch.testing.assert_close(lse, flashsci.varlen_attention(q, k, v, cu, return_lse=True)[1])


@pytest.mark.parametrize("causal", [False, True])
def test_keys_in_pieces(on_cpu, causal):
    """As context parallelism calls it: blocks of keys merged by their lse; each block's gradient under the merged out and
    lse, summed. The causal ring has one block on the diagonal and the others before it."""
    q, k, v, dout = torch.randn(4, 1, 2, 8, 16, dtype=torch.float64).unbind(0)
    keys = [(x[:, :, :8], x[:, :, 8:]) for x in (torch.cat([y, y + 0.3], 2) for y in (k, v))]
    blocks = list(zip(*keys, strict=True))  # (k, v), of which the second is the diagonal one
    out, lse = None, None
    for i, (block_k, block_v) in enumerate(blocks):
        part, part_lse = flash(q, block_k, block_v, causal and i == 1)[:2]
        if out is None:
            out, lse = part, part_lse
            continue
        share = torch.sigmoid(part_lse - lse).unsqueeze(-1)
        out, lse = out - share * (out - part), lse - torch.nn.functional.logsigmoid(lse - part_lse)
    found = [
        aten._scaled_dot_product_flash_attention_backward(
            dout, q, *block, out, lse, None, None, 8, 8, 0.0, causal and i == 1,
            torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64),
        )
        for i, block in enumerate(blocks)
    ]  # fmt: skip
    whole = [x.requires_grad_() for x in (q, *(torch.cat(x, 2) for x in keys))]
    due = flashsci.attention(*whole, causal=causal, align="lower_right")
    torch.testing.assert_close(out, due, rtol=1e-12, atol=1e-12)
    dq, dk, dv = torch.autograd.grad(due, whole, dout)
    ours = (found[0][0] + found[1][0], *(torch.cat([a[i], b[i]], 2) for a, b in [found] for i in (1, 2)))
    for x, y in zip(ours, (dq, dk, dv), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_compiled(on_cpu, dropout_p):
    """Strides that a compiler was promised, and one dropout for both passes."""
    q, k, v = (torch.randn(2, 6, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v):
        found = flash(q, k, v, True, dropout_p=dropout_p)
        return found[0], found[6]

    out, rng_state = compiled(q, k, v)
    assert out.stride() == q.stride()
    options = {}
    if dropout_p:
        options = dict(dropout_p=dropout_p, dropout_seed=rng_state.view(torch.int64))
    due = flashsci.attention(q, k, v, causal=True, **options)
    torch.testing.assert_close(out, due)
    pairs = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, due)]
    for found, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(found, expected)


def test_below_autograd_and_autocast(on_cpu):
    """Dtypes are final there: a packed call in fp16 stays fp16 where autocast says bf16."""
    q, k, v = torch.randn(3, 10, 2, 8, dtype=torch.float16).unbind(0)
    cu = offsets([4, 6])
    with torch.autocast("cpu", torch.bfloat16):
        assert varlen_attn(q, k, v, cu, cu, 6, 6).dtype == torch.float16
    leaf = q.clone().requires_grad_()
    kernel = integration.KERNELS["_flash_attention_forward"]
    out, lse, *_ = kernel(leaf, k, v, cu, cu, 6, 6, 0.0, False, False)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(seqused_k=torch.tensor([1])), "seqused_k"),
        (dict(alibi_slopes=torch.ones(2)), "alibi_slopes"),
        (dict(block_table=torch.zeros(1, 1)), "block_table"),
        (dict(num_splits=1), "num_splits"),
    ],
)
def test_refused_by_name(options, says):
    q, k, v = torch.randn(3, 1, 5, 2, 8).unbind(0)
    kernels = integration.KERNELS
    with pytest.raises(RuntimeError, match=f"{says} is not supported.*restore_flash_attention_impl"):
        kernels["_flash_attention_forward"](q, k, v, None, None, 5, 5, 0.0, False, False, **options)


def test_refused():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    kernels = integration.KERNELS
    with pytest.raises(RuntimeError, match="return_debug_mask is not supported"):
        kernels["_scaled_dot_product_flash_attention"](q, k, v, 0.5, False, True)
    with pytest.raises(RuntimeError, match="head dims must be equal, got 8 and 4"):
        kernels["_scaled_dot_product_flash_attention"](q, k, v[..., :4])
    rows = q[0].transpose(0, 1)
    cu = offsets([5])
    with pytest.raises(RuntimeError, match="packed queries need cum_seq_k"):
        kernels["_flash_attention_forward"](rows, rows, rows, cu, None, 5, 5, 0.0, False, False)
    with pytest.raises(RuntimeError, match="dropout_p is not supported"):
        kernels["_flash_attention_forward_no_dropout_inplace"](
            rows.clone(), rows, rows, rows, cu, cu, 5, 5, 0.5, False, False
        )


def replaced(name):
    namespace = "torch_attn" if name in integration.VARLEN_KERNELS else "aten"
    dump = torch._C._dispatch_dump(f"{namespace}::{name}")
    mine = integration.__file__
    return any(line.startswith("CUDA: ") and mine in line for line in dump.splitlines())


def test_registering_activating_and_removing():
    from torch.nn import attention as theirs

    handle = integration.register()
    assert integration.register() is handle
    assert integration.NAME in theirs.list_flash_attention_impls()
    assert not any(map(replaced, PRESENT + VARLEN)), "registering activates nothing"
    for _ in range(2):
        theirs.activate_flash_attention_impl("flashsci")
        handle.activate()  # torch 2.10 activates a name once
        try:
            assert theirs.current_flash_attention_impl() == "flashsci"
            assert all(map(replaced, PRESENT + VARLEN))
        finally:
            if hasattr(theirs, "restore_flash_attention_impl"):
                theirs.restore_flash_attention_impl()
            else:
                handle.remove()
        assert not any(map(replaced, PRESENT + VARLEN))
    handle.remove()  # of what is not there


def test_example_in_the_docstring():
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (example,) = finder.find(integration.register, "register", integration)
    assert example.examples
    runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def test_importing_flashsci_registers_nothing():
    program = (
        "import flashsci, flashsci.integrations.torch, torch\n"
        "assert 'flashsci' not in torch.nn.attention.list_flash_attention_impls()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_torch_without_the_registry_is_named(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"has no .*register_flash_attention_impl .*flashsci.sdpa"):
        integration.register()
